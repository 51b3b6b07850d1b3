"""Trees of compressors: one exchange, whatever is sent of each leaf."""

import functools

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  COMPILATIONS,
  assert_devices_agree,
  assert_same_bits,
  make_mesh_2d,
  own,
  random_tree,
  updates_of,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import compressors

pytestmark = [
    pytest.mark.core, pytest.mark.usefixtures('standard_promotion')]

N = 4
SHAPES = {'a': (32, 24), 'b': (24, 32), 'rows': (40, 16), 'gain': (9,)}
HIDDEN = demo_optax.dct_topk(16, 4)


def test_gathered_and_summed_together():
  workers = demo_optax.Workers.simulated(N)
  shared = compressors.Compressor(
      compressors.Striding(0.25), compressors.Identity(), 8)
  codes = {'a': HIDDEN, 'b': shared, 'rows': shared,
           'gain': HIDDEN}
  tx = demo_optax.scale_by_demo(codes, workers=workers)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  gradients = random_tree(0, SHAPES, lead=(N,))
  gradients['b'][2] = np.nan
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  # Whoever is not finite in one leaf is left out of all.
  assert int(demo_optax.exchange_info(state)['num_excluded']) == 1
  assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
  kept = demo_optax.state.momentum(state)
  assert [*kept] == sorted(codes)  # in the order of the parameters
  for name, moment in kept.items():
    assert not np.any(moment[2])
    expected = gradients[name][[0, 1, 3]].mean(0)
    if codes[name] is shared:
      np.testing.assert_allclose(
          np.asarray(moment)[[0, 1, 3]].mean(0) + updates[name], expected,
          atol=1e-6)


def test_prefix_trees():
  """One in place of a subtree holds for all of it."""
  workers = demo_optax.Workers.simulated(2)
  params = {'x': {'a': jnp.zeros((8, 8)), 'b': jnp.zeros((8, 8))},
            'y': jnp.zeros((8, 8))}
  tx = demo_optax.scale_by_demo(
      {'x': demo_optax.compressors.full(), 'y': None}, 0.5, workers=workers,
      alpha=0.0, gradient_weight=lambda step: 2.0 + step)
  ones = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), params)
  state = tx.init(params)
  for _ in range(2):
    updates, state = jax.jit(tx.update)(ones, state, params)
  np.testing.assert_array_equal(updates['x']['a'], 4.0)
  np.testing.assert_array_equal(updates['x']['b'], 4.0)
  np.testing.assert_array_equal(updates['y'], 1.0)


def test_gradients_that_are_scaled_before_have_the_bits_of_a_weight():
  """So other weights for some leaves need no argument."""
  workers = demo_optax.Workers.simulated(3)
  rate = optax.cosine_decay_schedule(0.013, 50)
  codes = {'matrix': demo_optax.dct_topk(16, 5),
           'padded': demo_optax.dct_topk(16, 5, values='sign'),
           'dense': demo_optax.compressors.full()}
  shapes = {'matrix': (32, 48), 'padded': (37, 20), 'dense': (33, 5)}
  exchange = functools.partial(
      demo_optax.scale_by_demo, codes, 0.9, workers=workers, alpha=0.7)
  within = exchange(gradient_weight=rate)
  before = optax.chain(
      optax.scale_by_learning_rate(rate, flip_sign=False), exchange())
  params = {k: jnp.zeros(s) for k, s in shapes.items()}
  gradients = [random_tree(step, shapes, lead=(3,)) for step in range(4)]
  assert_same_bits(
      *(updates_of(tx, params, gradients)[0] for tx in (within, before)))


def test_averages_tell_who_was_excluded_and_frozen_leaves_do_not_count():
  workers = demo_optax.Workers.simulated(2)
  params = {'w': jnp.zeros((4,)), 'frozen': jnp.zeros((4,))}
  gradients = {'w': jnp.array([[2.0] * 4, [4.0] * 4]),
               'frozen': jnp.array([[jnp.nan] * 4, [1.0] * 4])}
  for codes, excluded, mean in (
      ({'w': None, 'frozen': None}, 1, 4.0),
      ({'w': None, 'frozen': compressors.FROZEN}, 0, 3.0),
      ({'w': demo_optax.compressors.full(), 'frozen': compressors.FROZEN}, 0, 3.0),
      ({'w': demo_optax.compressors.full(), 'frozen': None}, 1, 4.0)):
    tx = demo_optax.scale_by_demo(codes, workers=workers)
    updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert int(demo_optax.exchange_info(state)['num_excluded']) == excluded
    np.testing.assert_array_equal(updates['w'], mean)
    if codes['frozen'] is compressors.FROZEN:
      assert not np.any(updates['frozen'])


OPTIMIZERS = {  # by name: how it is made, and its hyperparameters
    'scale_by_demo': (demo_optax.scale_by_demo, {
        'decay': 0.9, 'alpha': 0.5, 'gradient_weight': 1.0}),
    'demo': (demo_optax.demo, {'learning_rate': 0.1, 'weight_decay': 0.1}),
    'demo_muon': (demo_optax.demo_muon, {
        'learning_rate': 0.1, 'adam_learning_rate': 0.1, 'weight_decay': 0.1,
        'decay': 0.9, 'beta': 0.95}),
}


@pytest.mark.parametrize('optimizer, name, value', [
    *((optimizer, name, np.nan)
      for optimizer, (_, given) in OPTIMIZERS.items() for name in given),
    ('scale_by_demo', 'alpha', 1e38), ('scale_by_demo', 'alpha', -1.0),
    ('scale_by_demo', 'decay', 2.0)])
def test_a_hyperparameter_that_makes_no_sense_only_loses_its_step(
    optimizer, name, value):
  make, given = OPTIMIZERS[optimizer]
  tx = optax.inject_hyperparams(
      make, static_args=('workers', 'compressor'),
      hyperparam_dtype=jnp.float32)(
          workers=demo_optax.Workers.simulated(2),
          compressor=demo_optax.dct_topk(4, 2), **given)
  shapes = {'w': (8, 8), 'norm': (8,)}
  params = {k: jnp.ones(shape) for k, shape in shapes.items()}
  gradients = random_tree(0, shapes, lead=(2,))
  update = jax.jit(tx.update)
  _, before = update(gradients, tx.init(params), params)
  lost = before._replace(
      hyperparams={**before.hyperparams, name: jnp.float32(value)})
  compiled = COMPILATIONS.count
  nothing, after = update(gradients, lost, params)
  updates, last = update(
      gradients, after._replace(hyperparams=before.hyperparams), params)
  assert COMPILATIONS.count == compiled
  assert not any(np.any(u) for u in nothing.values())
  if optimizer != 'demo_muon':  # whose momentum before the exchange goes on
    assert_same_bits(own(after), own(before))
  assert int(demo_optax.exchange_info(after)['num_excluded']) == 2
  for x in jax.tree.leaves((updates, last)):
    assert np.isfinite(np.asarray(x, np.float64)).all()
  assert all(np.any(u) for u in updates.values())


def test_momentum_is_never_that_of_another_leaf():
  """Renamed or reordered leaves of one kind are refused."""
  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.scale_by_demo(demo_optax.dct_topk(8, 2), workers=workers)
  params = {'a': jnp.zeros((16, 16)), 'b': jnp.zeros((16, 16))}
  state = tx.init(params)
  other = {'b': jnp.zeros((16, 16)), 'c': jnp.zeros((16, 16))}
  gradients = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), other)
  with pytest.raises(ValueError, match=r'a: float32\[16,16\] in the state, nothing in the update'):
    jax.jit(tx.update)(gradients, state, other)
  with pytest.raises(ValueError, match='saved for other leaves'):
    restored = state._replace(layout=jax.tree.map(
        lambda x, y: x, tx.init(params).layout, state.layout))
    restored.layout.digest = tx.init(other).layout.digest
    demo_optax.state.momentum(restored)


@pytest.mark.parametrize('inside', [1, 2])
def test_one_gather_for_messages_and_one_for_averages(inside):
  """The plan counts what each device receives, replicated or sharded."""
  mesh = make_mesh_2d('auto', (4 // inside, inside))
  specs = {'w': P('fsdp', None), 'rows': None, 'e': P('fsdp', None), 'n': P()}
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)
  shapes = {'w': (32, 16), 'rows': (40, 16), 'e': (40, 8), 'n': (33,)}
  params = workers.device_put(random_tree(0, shapes))
  codes = {'w': HIDDEN, 'rows': demo_optax.dct_topk((1, 16), 3, values='sign'),
           'e': None, 'n': None}
  tx = optax.chain(
      demo_optax.scale_by_demo(codes, workers=workers), optax.sgd(0.1))
  state, update = tx.init(params), jax.jit(tx.update)
  gradients = {
      k: jax.device_put(g, NamedSharding(
          mesh, P('data', *(specs[k] or ()))))
      for k, g in random_tree(1, shapes, lead=(workers.count,)).items()}
  updates, _ = update(gradients, state, params)
  assert_devices_agree(updates)
  found = [c for c in hlo_text.collectives(
      update.lower(gradients, state, params).compile(), mesh)
      if c.axes == ('data',)]
  plan = demo_optax.plan(params, codes, workers)
  moved = sum(c.received_bytes for c in found if 's32' not in str(c.shapes))
  assert moved == plan.device_bytes['data',]
  # Beside them how many workers are valid.
  assert [c.kind for c in found].count('all-gather') <= 3
  assert sum(c.output_bytes for c in found if c.kind == 'all-reduce') <= 8
