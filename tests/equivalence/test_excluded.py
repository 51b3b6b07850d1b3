"""Workers that are excluded for their norms: the same ones however it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  assert_replicas_equal,
  assert_same_bits,
  make_mesh,
  make_workers,
  random_tree,
  replicated,
  stacked,
)
from jax.sharding import PartitionSpec as P
from test_sharded import LAYOUTS, place_gradients, simulated_workers
from test_sharded import SHAPES as SHARDED
from test_sharded import make_workers as sharded_workers

import demo_optax
from demo_optax.workers import collectives

pytestmark = pytest.mark.core

N, RATIO = 4, 1.5
# By step, how large the gradients of each worker are: by little and by much.
SIZES = [(1, 1, 1, 1), (1, 1.55, 1, 100), (0, 1, 1, 9), (1, np.nan, 50, 1),
         (1, 1, 1.4, 1.6)]
OWNERS = {'exchange': 'all_to_all', 'update_values': 'ternary'}


def gradients_of(step, count=N, shapes=None):
  sizes = np.asarray(SIZES[step][:count], np.float32)
  return {k: g * sizes.reshape(-1, *[1] * (g.ndim - 1))
          for k, g in random_tree(step, shapes, lead=(count,)).items()}


def make_tx(workers, values='float32', **options):
  compressor = demo_optax.dct_topk(32, 8, values=values)
  return demo_optax.scale_by_demo(
      compressor, 0.5, workers=workers, max_norm_ratio=RATIO, **options)


def run(workers, **options):
  """(updates and counts of every step, state)."""
  tx = make_tx(workers, **options)
  params = replicated(random_tree(99), workers)
  state, update, seen = tx.init(params), jax.jit(tx.update), []
  for step in range(len(SIZES)):
    gradients = stacked(gradients_of(step), workers)
    updates, state = update(gradients, state, params)
    assert_replicas_equal((updates, state.metrics))
    seen.append(jax.tree.map(np.asarray, (updates, counts(state))))
  return seen, state


def counts(state):
  return {k: state.metrics[k] for k in ('num_excluded', 'num_outliers')}


OPTIONS = {
    'plain': {}, 'signs': {'values': 'sign'}, 'owners': OWNERS,
}


def slow(*args):
  return pytest.param(*args, marks=pytest.mark.slow)


@functools.cache
def simulate(options):
  return run(demo_optax.Workers.simulated(N), **OPTIONS[options])


@pytest.mark.parametrize('kind, options', [
    slow('auto', 'plain'), ('explicit', 'plain'), ('auto', 'signs'),
    ('auto', 'owners'),
])
def test_mesh_equals_simulation(kind, options):
  expected = simulate(options)
  assert any(x['num_outliers'] for _, x in expected[0])
  with make_workers(kind, N) as workers:
    assert_same_bits(run(workers, **OPTIONS[options]), expected)


@pytest.mark.parametrize('how', ['shard_map', slow('unchecked'), 'vmap'])
def test_maps_of_the_caller_equal_simulation(how):
  expected, _ = simulate('plain')
  tx = make_tx(demo_optax.Workers.on_axis('data'))
  params = random_tree(99)

  def local(*gradients):  # both steps in one program
    state, seen = tx.init(params), []
    for g in gradients:
      if how != 'vmap':
        g = jax.tree.map(lambda x: x[0], g)
      updates, state = tx.update(g, state, params)
      seen.append((updates, counts(state)))
    return seen

  if how == 'vmap':
    mapped = jax.vmap(local, axis_name='data')
  else:
    mapped = jax.shard_map(
        local, mesh=make_mesh(N), in_specs=P('data'), out_specs=P(),
        check_vma=how == 'shard_map')
  found = jax.jit(mapped)(gradients_of(0), gradients_of(1))
  if how == 'vmap':
    assert all((x == x[:1]).all() for x in jax.tree.leaves(found))
    found = jax.tree.map(lambda x: x[0], found)
  assert_same_bits(found, expected[:2])


@pytest.mark.parametrize('values', ['float32', 'sign'])
def test_owners_exclude_whom_all_would(values):
  workers = demo_optax.Workers.simulated(N)
  options = {**OWNERS, 'update_values': 'float32', 'values': values}
  found, after = run(workers, **options)
  expected, before = run(workers, values=values)
  assert_same_bits(found, expected)
  assert_same_bits(after.worker_stacked.momentum, before.worker_stacked.momentum)


def test_a_damaged_piece_counts_for_all():
  """Metrics are those of the owner that has excluded most."""
  real = collectives.Group.send_and_receive

  def send_and_receive(group, message):
    arrived = real(group, message)
    here = jax.lax.axis_index(group.axis) == 2
    # Worker 1's statement of its norm, as owner 2 reads it.
    return {k: jnp.where(here, x.at[1, -8:-4].set(jnp.uint8([0, 0, 0, 127])), x)
            for k, x in arrived.items()}

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(collectives.Group, 'send_and_receive', send_and_receive)
    jax.clear_caches()
    tx = make_tx(demo_optax.Workers.simulated(N), **OWNERS)
    params = random_tree(99)
    _, state = tx.update(gradients_of(0), tx.init(params), params)
  jax.clear_caches()
  assert [int(x) for x in counts(state).values()] == [1, 1]


@pytest.mark.parametrize('layout, kind, options', [
    ('3d', 'auto', 'plain'), ('2d', 'explicit', 'owners'),
    slow('2d', 'explicit', 'plain'), slow('3d', 'auto', 'owners'),
])
def test_workers_of_several_devices(layout, kind, options):
  """A norm is that of all devices of a worker, whichever holds what is large."""

  def train(workers):
    tx = demo_optax.scale_by_demo(
        demo_optax.dct_topk(8, 3), 0.5, workers=workers, max_norm_ratio=RATIO,
        **OPTIONS[options])
    params = workers.device_put(random_tree(9, SHARDED))
    state = workers.device_put(tx.init(params))
    update, seen = jax.jit(tx.update), []
    for step in range(3):
      gradients = random_tree(step, SHARDED, lead=(2,))
      gradients['rows'][1, :16] *= 10.0 * step  # rows of one device
      if workers.mesh is not None:
        gradients = place_gradients(gradients, workers, LAYOUTS[layout][1])
      updates, state = update(gradients, state, params)
      seen.append(jax.tree.map(np.asarray, (updates, counts(state))))
    return seen

  expected = train(simulated_workers(layout))
  assert [int(x['num_outliers']) for _, x in expected] == [0, 1, 1]
  assert_same_bits(train(sharded_workers(layout, kind)), expected)


def test_a_step_of_one_worker_on_a_mesh():
  """data_parallel gives the bits of stacked gradients."""
  params = random_tree(99)
  expected, _ = simulate('plain')
  with make_workers('auto', N) as workers:
    tx = make_tx(workers)

    @demo_optax.data_parallel(workers)
    def train_step(params, state, batch):
      gradients = jax.tree.map(lambda x: x[0], batch)
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state, updates

    state = tx.init(params)
    for step in range(2):
      _, state, updates = train_step(params, state, gradients_of(step))
      assert_same_bits((updates, counts(state)), expected[step])
