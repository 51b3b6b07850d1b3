"""Top-k with its ties, and merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import merge
from hypothesis import given
from hypothesis import strategies as st

from demo_optax.numerics import platform
from demo_optax.numerics import topk as selection

pytestmark = pytest.mark.core


def expected_top_k(c, k):
  return np.argsort(-np.abs(c), axis=1, kind='stable')[:, :k]


@given(st.integers(1, 6), st.integers(1, 70), st.data())
def test_top_k_takes_the_lowest_index_on_ties(chunks, n, data):
  k = data.draw(st.integers(1, n))
  values = data.draw(st.lists(
      st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=chunks * n,
      max_size=chunks * n))
  c = np.array(values, np.float32).reshape(chunks, n)
  found = np.asarray(selection.top_k(jnp.asarray(c), k))
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, np.sort(expected_top_k(c, k), 1))


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
@pytest.mark.parametrize('average', ['senders', 'workers'])
@pytest.mark.parametrize('workers, n, k', [  # the last: many, on GPUs in a loop
    (1, 30, 4), (3, 30, 9), (8, 5, 2), (4, 6, 6), (20, 50, 26)])
def test_merge(workers, n, k, average, kind):
  rng = np.random.default_rng(0)
  chunks = 11
  indices = np.stack([
      np.stack([np.sort(rng.permutation(n)[:k]) for _ in range(chunks)])
      for _ in range(workers)]).astype(np.int32)
  if k == n:
    indices[:] = np.arange(n)
  values = rng.normal(size=indices.shape).astype(np.float32)
  present = np.arange(workers) != 1
  values[~present] = np.nan
  total, count = np.zeros((chunks, n)), np.zeros((chunks, n), int)
  for w in np.flatnonzero(present):
    for c in range(chunks):
      total[c, indices[w, c]] += values[w, c]
      count[c, indices[w, c]] += 1
  if average == 'workers':
    count[:] = present.sum()
  with platform.running_on(kind):
    merged = jax.jit(merge, static_argnums=(3, 4))(
        indices, values, present, n, average)
  np.testing.assert_allclose(merged, total / np.maximum(count, 1), atol=1e-6)
