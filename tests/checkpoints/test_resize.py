"""Regrouping of workers, and momentum to and from parameter space."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh_2d, on_mesh, random_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.checkpoint.resize import weights
from demo_optax.compressors.leaves import fit_sharding

pytestmark = pytest.mark.core

COUNTS = st.integers(1, 12)
COMPRESSOR = demo_optax.dct_topk(chunk_size=8, topk=3)


def state_of(stacked):
  """A state with this in it for every worker."""
  return {'count': jnp.zeros((), jnp.int32), 'worker_stacked': {'w': stacked}}


def resize(stacked, n):
  return np.asarray(
      demo_optax.checkpoint.resize_workers(state_of(stacked), n)['worker_stacked']['w'])


# The rule ---------------------------------------------------------------------


@given(COUNTS, COUNTS)
def test_weights_keep_the_mean(old, new):
  w = weights(old, new)
  assert w.shape == (new, old) and (w >= 0).all()
  np.testing.assert_allclose(w.sum(1), 1, rtol=1e-15)
  np.testing.assert_allclose(w.sum(0), new / old, rtol=1e-14)
  assert (np.count_nonzero(w, axis=1) <= -(-old // new) + 1).all()


@settings(max_examples=20)
@given(COUNTS, COUNTS, st.integers(0, 2**16))
def test_the_average_is_kept(old, new, seed):
  x = np.random.default_rng(seed).normal(size=(old, 5)).astype(np.float32)
  y = resize(x, new)
  assert y.shape == (new, 5) and y.dtype == np.float32
  np.testing.assert_allclose(
      y.astype(np.float64).mean(0), x.astype(np.float64).mean(0), atol=3e-7)
  np.testing.assert_allclose(y, weights(old, new) @ x, atol=1e-6)


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


# Any state --------------------------------------------------------------------


def whole_state(workers):
  own = optax.chain(
      optax.trace(0.5, accumulator_dtype=jnp.bfloat16),
      optax.scale_by_schedule(lambda count: 1.0))
  exchanged = optax.chain(
      demo_optax.per_worker(own, workers=workers),
      demo_optax.demo(1e-2, workers=workers, compressor=COMPRESSOR))
  averaged = optax.chain(
      demo_optax.average(workers=workers), optax.trace(0.9))
  tx = optax.inject_hyperparams(lambda rate: optax.chain(
      optax.partition({'exchanged': exchanged, 'averaged': averaged},
                      {'w': 'exchanged', 'b': 'averaged'}),
      optax.scale(rate)))(rate=0.5)
  params = workers.device_put({'w': jnp.ones((16, 16)), 'b': jnp.ones(3)})
  return tx, params


def test_only_what_is_stacked_changes():
  four, two = map(demo_optax.Workers.simulated, (4, 2))
  tx, params = whole_state(four)
  state = tx.init(params)
  resized = demo_optax.checkpoint.resize_workers(state, 2)
  expected = whole_state(two)[0].init(params)
  chex.assert_trees_all_equal_shapes_and_dtypes(resized, expected)
  gradients = {'w': jnp.ones((2, 16, 16)), 'b': jnp.ones((2, 3))}
  with jax.numpy_dtype_promotion('standard'):  # of the bfloat16 trace
    whole_state(two)[0].update(gradients, resized, params)


def test_states_of_flax():
  """Found by path: nnx keeps no types. Annotations stay."""
  nnx = pytest.importorskip('flax.nnx')
  model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
  workers = demo_optax.Workers.simulated(4)
  tx = optax.chain(
      demo_optax.per_worker(optax.trace(0.5), workers=workers),
      demo_optax.demo(1e-2, workers=workers, compressor=COMPRESSOR))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  for state in (nnx.state(optimizer), optimizer.opt_state):
    resized = demo_optax.checkpoint.resize_workers(state, 3)
    shapes = {jax.tree_util.keystr(p): (x.shape, y.shape) for (p, x), (_, y) in
              zip(*(jax.tree_util.tree_flatten_with_path(s)[0]
                    for s in (state, resized)))}
    changed = {name for name, (a, b) in shapes.items() if a != b}
    assert len(changed) == 4  # kernel and bias, of the trace; two buckets
    for name in changed:
      a, b = shapes[name]
      assert a[0] == 4 and b == (3, *a[1:])
  nnx.update(optimizer, demo_optax.checkpoint.resize_workers(nnx.state(optimizer), 3))


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
@pytest.mark.parametrize('old, new', [(4, 8), (8, 3)])
def test_on_a_mesh(old, new, kind):
  workers = on_mesh(old, kind)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(old, 6, 5)).astype(np.float32)
  there = jax.device_put(x, NamedSharding(workers.mesh, P('data')))
  resized = demo_optax.checkpoint.resize_workers(state_of(there), new)
  y = resized['worker_stacked']['w']
  assert y.sharding.mesh == workers.mesh
  np.testing.assert_allclose(y, resize(x, new), atol=1e-6)
  moved = on_mesh(new, kind).device_put(resized)['worker_stacked']['w']
  assert moved.sharding.shard_shape(moved.shape) == (1, 6, 5)
  np.testing.assert_array_equal(moved, y)


def test_no_device_holds_more_than_it_must():
  """8 workers on a mesh of 4 x 2, for 3: another dimension is cut."""
  mesh = make_mesh_2d(shape=(4, 2))
  sharding = NamedSharding(mesh, P('data', None, 'fsdp'))
  fit = lambda *shape: tuple(fit_sharding(shape, sharding).spec)
  assert fit(3, 8, 6, 5) == (None, 'data', 'fsdp', None)
  assert fit(8, 8, 5) == ('data', 'fsdp', None)
  assert fit(3, 5, 5) == (None, None, None)


# Momentum in parameter space, and back ----------------------------------------


SHAPES = {'matrix': (20, 16), 'padded': (11, 13), 'bias': (5,), 'scalar': ()}
SPECS = dict.fromkeys(SHAPES) | {'matrix': P(None, 'fsdp')}


def sharded(kind):
  return demo_optax.Workers.on_mesh(make_mesh_2d(kind), 'data', SPECS)


@pytest.mark.parametrize('make', [
    lambda: demo_optax.Workers.simulated(4), lambda: on_mesh(4, 'explicit'),
    lambda: sharded('auto'), lambda: sharded('explicit'),
], ids=['simulated', 'explicit', 'sharded', 'sharded explicit'])
def test_momentum_goes_both_ways(make):
  workers = make()
  tx = demo_optax.scale_by_demo(COMPRESSOR, workers=workers)
  params = workers.device_put(
      jax.tree.map(jnp.asarray, random_tree(0, SHAPES)))
  empty = tx.init(params)
  moments = random_tree(1, SHAPES, lead=(workers.count,))
  state = demo_optax.state.with_momentum(empty, moments)
  assert jax.tree.structure(state) == jax.tree.structure(empty)
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(empty)):
    assert x.shape == y.shape and x.dtype == y.dtype
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
  found = demo_optax.state.momentum(state)
  assert found.keys() == SHAPES.keys()
  for key in SHAPES:
    np.testing.assert_allclose(found[key], moments[key], atol=2e-6)


def resize_of(state, n=2):
  demo_optax.checkpoint.resize_workers(state, n)


def put(matrix):
  tx = demo_optax.scale_by_demo(
      COMPRESSOR, workers=demo_optax.Workers.simulated(2))
  state = tx.init({'w': jnp.ones((16, 16))})
  demo_optax.state.with_momentum(state, {'w': matrix})


@pytest.mark.parametrize('call, error, words', [
    (lambda: resize_of({'w': jnp.ones(3)}), ValueError,
     'Nothing in it is known to be stacked'),
    (lambda: resize_of({'worker_stacked': jnp.ones(3)}, 0), ValueError,
     'n=0 must be at least 1'),
    (lambda: resize_of({'worker_stacked': jnp.ones(3)}, 2.0), TypeError,
     'n=2.0 must be a Python int'),
    (lambda: resize_of({'worker_stacked': [jnp.ones(3), jnp.ones(2)]}), ValueError,
     r"\['worker_stacked'\]\[0\] is of 3 workers and .*\[1\] of 2"),
    *((lambda x=x: put(x), ValueError,
       r"\['w'\] must have shape \(2, 16, 16")
      for x in (None, np.ones((3, 16, 16)), np.ones((2, 16, 8)))),
    (lambda: demo_optax.state.with_momentum({}, {}), ValueError, 'no state of'),
])
def test_mistakes(call, error, words):
  with pytest.raises(error, match=words):
    call()


@pytest.mark.parametrize('n', [3, 8])
def test_numpy_keeps_its_64_bits(n):
  state = {'worker_stacked': {
      'n': np.array([2**40 + i for i in range(4)]),
      'f': np.array([1 / 3, 2 / 3, 1, 1e-12])}}
  found = demo_optax.checkpoint.resize_workers(state, n)['worker_stacked']
  assert found['n'].dtype == np.int64 and found['n'].min() >= 2**40
  assert found['f'].dtype == np.float64
  np.testing.assert_allclose(
      found['f'].mean(), state['worker_stacked']['f'].mean(), rtol=1e-15)


@pytest.mark.parametrize('n, reached', [(4, [0]), (3, [0]), (16, [0, 1])])
def test_nan_stays_with_those_that_cover_it(n, reached):
  x = jnp.ones((8, 2)).at[0].set(jnp.nan)
  state = {'worker_stacked': x}
  found = demo_optax.checkpoint.resize_workers(state, n)['worker_stacked']
  assert np.flatnonzero(np.isnan(found[:, 0])).tolist() == reached
