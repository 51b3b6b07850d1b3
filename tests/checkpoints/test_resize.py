"""Regrouping of workers, and momentum in parameter space."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh_2d, on_mesh, random_tree, resized, with_momentum
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint

COUNTS = st.integers(1, 12)
COMPRESSOR = demo_optax.dct_topk(chunk_size=8, topk=3)


def resize(stacked, n):
  found = resized({'worker_stacked': {'w': stacked}}, n)
  return np.asarray(found['worker_stacked']['w'])


# The rule ---------------------------------------------------------------------


def weights(former, count):
  """Overlaps of equal parts of the unit interval, relative to a new part."""
  # In units of 1 / (former * count) the ends of all parts are integers.
  of_former = count * np.arange(former + 1)[None, :]
  of_new = former * np.arange(count + 1)[:, None]
  stops = np.minimum(of_former[:, 1:], of_new[1:])
  starts = np.maximum(of_former[:, :-1], of_new[:-1])
  return np.maximum(stops - starts, 0) / former


@settings(max_examples=20)
@given(COUNTS, COUNTS, st.integers(0, 2**16))
def test_the_average_is_kept(old, new, seed):
  w = weights(old, new)
  assert w.shape == (new, old) and (w >= 0).all()
  np.testing.assert_allclose(w.sum(1), 1, rtol=1e-15)
  np.testing.assert_allclose(w.sum(0), new / old, rtol=1e-14)
  assert (np.count_nonzero(w, axis=1) <= -(-old // new) + 1).all()
  x = np.random.default_rng(seed).normal(size=(old, 5)).astype(np.float32)
  y = resize(x, new)
  assert y.shape == (new, 5) and y.dtype == np.float32
  np.testing.assert_allclose(
    y.astype(np.float64).mean(0), x.astype(np.float64).mean(0), atol=3e-7
  )
  np.testing.assert_allclose(y, w @ x, atol=1e-6)


@settings(max_examples=12)
@given(COUNTS, st.integers(1, 4))
def test_special_cases(count, times):
  """The same number: as it is. Multiples: copies, and means of groups."""
  x = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
  x[0, 0] = np.nan  # of one worker, and stays there
  np.testing.assert_array_equal(resize(x, count), x)
  grown = resize(x, count * times)
  np.testing.assert_array_equal(grown, np.repeat(x, times, axis=0))
  groups = resize(grown, count)
  np.testing.assert_allclose(groups, x, rtol=1e-6)


@settings(max_examples=20)
@given(COUNTS, COUNTS)
def test_what_has_no_mean_comes_from_the_worker_that_covers_most(old, new):
  numbers = resize(np.arange(old, dtype=np.int32), new)
  w = weights(old, new)
  assert numbers.dtype == np.int32
  np.testing.assert_array_equal(numbers, w.argmax(1))
  assert (w[np.arange(new), numbers] == w.max(1)).all()


@pytest.mark.parametrize('n', [3, 8])
def test_numpy_keeps_its_64_bits(n):
  whole = resize(np.array([2**40 + i for i in range(4)]), n)
  assert whole.dtype == np.int64 and whole.min() >= 2**40
  x = np.array([1 / 3, 2 / 3, 1, 1e-12])
  assert resize(x, n).dtype == np.float64
  np.testing.assert_allclose(resize(x, n).mean(), x.mean(), rtol=1e-15)


@pytest.mark.parametrize('n, reached', [(4, [0]), (3, [0]), (16, [0, 1])])
def test_nan_stays_with_those_that_cover_it(n, reached):
  found = resize(jnp.ones((8, 2)).at[0].set(jnp.nan), n)
  assert np.flatnonzero(np.isnan(found[:, 0])).tolist() == reached


# Any state --------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize('old, new, kind', [(4, 8, 'explicit'), (8, 3, 'auto')])
def test_on_a_mesh(old, new, kind):
  def state(workers, x):
    place = NamedSharding(workers.mesh, P('data'))
    return {'worker_stacked': jax.device_put(x, place)}

  x = np.random.default_rng(0).normal(size=(old, 6, 5)).astype(np.float32)
  saved = checkpoint.to_leaves(state(on_mesh(old, kind), x))
  like = state(on_mesh(new, kind), np.zeros((new, 6, 5), np.float32))
  found = checkpoint.from_leaves(saved, like, resize=True)['worker_stacked']
  assert found.sharding == like['worker_stacked'].sharding
  np.testing.assert_allclose(found, resize(x, new), atol=1e-6)


# Momentum in parameter space --------------------------------------------------


SHAPES = {'matrix': (20, 16), 'padded': (11, 13), 'bias': (5,), 'scalar': ()}
SPECS = dict.fromkeys(SHAPES) | {'matrix': P(None, 'fsdp')}


def sharded(kind):
  return demo_optax.Workers.on_mesh(make_mesh_2d(kind), 'data', SPECS)


@pytest.mark.core
@pytest.mark.parametrize(
  'make',
  [
    lambda: demo_optax.Workers.simulated(4),
    lambda: on_mesh(4, 'explicit'),
    lambda: sharded('auto'),
    lambda: sharded('explicit'),
  ],
  ids=['simulated', 'explicit', 'sharded', 'sharded explicit'],
)
def test_momentum_in_parameter_space(make):
  workers = make()
  tx = demo_optax.scale_by_demo(COMPRESSOR, workers=workers)
  params = workers.device_put(jax.tree.map(jnp.asarray, random_tree(0, SHAPES)))
  moments = random_tree(1, SHAPES, lead=(workers.count,))
  found = demo_optax.state.momentum(with_momentum(tx.init(params), moments))
  assert found.keys() == SHAPES.keys()
  for key in SHAPES:
    np.testing.assert_allclose(found[key], moments[key], atol=2e-6)
