"""One of each group: against NumPy, for all sizes, and in both forms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from demo_optax.codes.format import ChunkFormat
from demo_optax.compressors import GroupMax
from demo_optax.numerics import groups, platform, topk


def expected(x, k):
  """Of coefficients g, g + k, g + 2k, ... the first of the largest."""
  n = x.shape[1]
  return np.stack(
    [
      [g + k * int(np.argmax(np.abs(row[g:n:k]))) for g in range(k)]
      for row in x
    ]
  )


def check(n, k, seed=0):
  rng = np.random.default_rng(seed)
  # Few values, which the key distinguishes, zeros, and every place in turn.
  x = np.concatenate([rng.integers(-3, 4, (4, n)), np.eye(n)]).astype(
    np.float32
  )
  found = jax.jit(lambda x: groups.indices(groups.largest(x, k)))(x)
  np.testing.assert_array_equal(found, expected(x, k))
  assert np.asarray(found).max() < n


@pytest.mark.parametrize('k', [1, 7, 64])
def test_sizes_of_a_chunk(k):
  for n in {k, k + 1, 2 * k - 1, 2 * k, 3 * k + 2, 127, 128, 129, 255, 300}:
    check(n, k, n)


def test_float64_is_compared_as_float64(x64):
  x = jnp.asarray([[1.0, 1.0 + 1e-12]])
  assert groups.largest(x, 1).tolist() == [[1]]
  assert groups.largest(x.astype(jnp.float32), 1).tolist() == [[0]]


@pytest.mark.parametrize(
  'n, k, workers, average',
  [
    (4096, 64, 5, 'senders'),
    (100, 7, 5, 'workers'),
    (63, 9, 40, 'senders'),  # 40: in a loop
  ],
)
def test_forms_of_a_selection(n, k, workers, average):
  """Scatters, comparisons, products: the same but for rounding of means."""
  rng = np.random.default_rng(n)
  m = rng.normal(size=(3, n)).astype(np.float32)
  sent = rng.normal(size=(workers, 3, n)).astype(np.float32)
  sent[1] = m
  indices = jax.jit(jax.vmap(lambda x: GroupMax(k)(x, 0)))(sent)
  values = rng.normal(size=indices.shape).astype(np.float32)
  order = np.argsort(indices, axis=-1)  # which scatters are promised
  damaged = values.copy()
  damaged[2] = np.nan
  present = np.arange(workers) != 2

  def all_of_it(grouped):
    i, v, d = (
      jnp.asarray(
        x if grouped else np.take_along_axis(np.asarray(x), order, -1)
      )
      for x in (indices, values, damaged)
    )
    return (
      topk.subtract(jnp.asarray(m), i[0], v[0], grouped),
      topk.take(jnp.asarray(m), i[0], grouped),
      topk.merge(i, d, jnp.asarray(present), n, average, grouped),
    )

  found = {}
  for form in itertools.product(('cpu', 'gpu', 'tpu'), (False, True)):
    name, grouped = form
    with platform.running_on(name):
      found[form] = jax.jit(functools.partial(all_of_it, grouped))()
      made = str(jax.make_jaxpr(functools.partial(all_of_it, grouped))())
    merge = functools.partial(topk.merge, n=n, average=average, grouped=grouped)
    with platform.running_on(name):
      scatters = 'scatter' in str(
        jax.make_jaxpr(merge)(indices, damaged, present)
      )
    assert scatters == (name == 'cpu' or (name == 'gpu' and not grouped))
    if name == 'tpu':
      assert 'scatter' not in made and ' gather' not in made
  left, taken, (mean, count) = found['cpu', False]
  for (_, grouped), forms in found.items():
    own = (
      np.take_along_axis(np.asarray(forms[1]), order[0], -1)
      if grouped
      else forms[1]
    )
    assert_same_bits((forms[0], own), (left, taken))
    np.testing.assert_allclose(forms[2][0], mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(forms[2][1], count, rtol=2e-6)


@pytest.mark.parametrize(
  'n, k, bits',
  [(4096, 64, 6), (4096, 32, 7), (4096, 100, 6), (70, 64, 1), (300, 299, 1)],
)
def test_places_in_fixed_width(n, k, bits):
  rng = np.random.default_rng(0)
  f = ChunkFormat(n, k, 'float32', 'sign', grouped=True)
  assert f.index_code.bits == bits * k
  x = rng.normal(size=(6, n)).astype(np.float32)

  @jax.jit
  def write(x):
    indices = GroupMax(k)(x, 0)
    return indices, *f.encode(indices, topk.take(x, indices))

  indices, data, sent = write(x)
  assert data.size == f.words(6)
  found, values, valid = jax.jit(lambda x: f.decode(x, 6))(
    np.stack([data, data])
  )
  assert valid.tolist() == [True, True]
  for worker in range(2):
    np.testing.assert_array_equal(found[worker], indices)
    np.testing.assert_array_equal(values[worker], sent)


def test_a_place_beyond_its_group_is_a_damaged_message():
  """Of 70 coefficients, groups 6 to 63 have one place: 1 is beyond."""
  f = ChunkFormat(70, 64, 'float32', grouped=True)
  indices = GroupMax(64)(jnp.ones((1, 70)), 0)
  data, _ = f.encode(indices, jnp.ones((1, 64)))
  # Bit j of the first of two words is of group 2 j.
  for word, valid in ((0b111, True), (0b1000, False), (2**32 - 1, False)):
    found, _, sound = f.decode(data.at[64].set(word)[None], 1)
    assert sound.tolist() == [valid]
    assert len(set(np.asarray(found).ravel().tolist())) == 64
    assert np.asarray(found).max() < 70
