"""Trees of compressors: one exchange, whatever is sent of each leaf."""

import functools
import itertools
import re

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
  make_step,
  own,
  random_tree,
  stacked,
  updates_of,
)
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import compressors

pytestmark = pytest.mark.usefixtures('standard_promotion')

HIDDEN = demo_optax.dct_topk(16, 4)
TWO = demo_optax.Workers.simulated(2)


def test_prefix_trees():
  """One in place of a subtree holds for all of it."""
  params = {
    'x': {'a': jnp.zeros((8, 8)), 'b': jnp.zeros((8, 8))},
    'y': jnp.zeros((8, 8)),
  }
  tx = demo_optax.scale_by_demo(
    {'x': demo_optax.compressors.full(), 'y': None},
    0.5,
    workers=TWO,
    alpha=0.0,
    gradient_weight=lambda step: 2.0 + step,
  )
  ones = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), params)
  (_, updates), _ = updates_of(tx, params, [ones] * 2)
  np.testing.assert_array_equal(updates['x']['a'], 4.0)
  np.testing.assert_array_equal(updates['x']['b'], 4.0)
  np.testing.assert_array_equal(updates['y'], 1.0)


def test_gradients_that_are_scaled_before_have_the_bits_of_a_weight():
  """So other weights for some leaves need no argument."""
  rate = optax.cosine_decay_schedule(0.013, 50)
  codes = {
    'matrix': demo_optax.dct_topk(16, 5),
    'padded': demo_optax.dct_topk(16, 5, values='sign'),
    'dense': demo_optax.compressors.full(),
  }
  shapes = {'matrix': (32, 48), 'padded': (37, 20), 'dense': (33, 5)}
  exchange = functools.partial(
    demo_optax.scale_by_demo,
    codes,
    0.9,
    alpha=0.7,
    workers=demo_optax.Workers.simulated(3),
  )
  within = exchange(gradient_weight=rate)
  before = optax.chain(
    optax.scale_by_learning_rate(rate, flip_sign=False), exchange()
  )
  params = {k: jnp.zeros(s) for k, s in shapes.items()}
  gradients = [random_tree(step, shapes, lead=(3,)) for step in range(4)]
  assert_same_bits(
    *(updates_of(tx, params, gradients)[0] for tx in (within, before))
  )


def test_averages_tell_who_was_excluded_and_frozen_leaves_do_not_count():
  params = {'w': jnp.zeros((4,)), 'frozen': jnp.zeros((4,))}
  gradients = {
    'w': jnp.array([[2.0] * 4, [4.0] * 4]),
    'frozen': jnp.array([[jnp.nan] * 4, [1.0] * 4]),
  }
  for code, frozen in itertools.product(
    (None, compressors.full()), (None, compressors.FROZEN)
  ):
    tx = demo_optax.scale_by_demo({'w': code, 'frozen': frozen}, workers=TWO)
    updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    excluded = frozen is None
    assert int(demo_optax.exchange_info(state)['num_excluded']) == excluded
    np.testing.assert_array_equal(updates['w'], 4.0 if excluded else 3.0)
    assert excluded or not np.any(updates['frozen'])


OPTIMIZERS = {  # by name: how it is made, and its hyperparameters
  'scale_by_demo': (
    demo_optax.scale_by_demo,
    {'decay': 0.9, 'alpha': 0.5, 'gradient_weight': 1.0},
  ),
  'demo': (demo_optax.demo, {'learning_rate': 0.1, 'weight_decay': 0.1}),
  'demo_muon': (
    demo_optax.demo_muon,
    {
      'learning_rate': 0.1,
      'other_learning_rate': 0.1,
      'weight_decay': 0.1,
      'decay': 0.9,
      'beta': 0.95,
    },
  ),
}


SENSELESS = {
  'scale_by_demo': [('alpha', 1e38), ('alpha', -1.0), ('decay', 2.0)]
}


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_a_hyperparameter_that_makes_no_sense_only_loses_its_step(optimizer):
  make, given = OPTIMIZERS[optimizer]
  tx = optax.inject_hyperparams(
    make, static_args=('workers', 'compressor'), hyperparam_dtype=jnp.float32
  )(workers=TWO, compressor=demo_optax.dct_topk(4, 2), **given)
  shapes = {'w': (8, 8), 'norm': (8,)}
  params = {k: jnp.ones(shape) for k, shape in shapes.items()}
  gradients = random_tree(0, shapes, lead=(2,))
  update = jax.jit(tx.update)
  _, before = update(gradients, tx.init(params), params)
  for name, value in [(name, np.nan) for name in given] + SENSELESS.get(
    optimizer, []
  ):
    lost = before._replace(
      hyperparams={**before.hyperparams, name: jnp.float32(value)}
    )
    compiled = COMPILATIONS.count
    nothing, after = update(gradients, lost, params)
    updates, last = update(
      gradients, after._replace(hyperparams=before.hyperparams), params
    )
    assert COMPILATIONS.count == compiled, (name, value)
    assert not any(np.any(u) for u in nothing.values()), (name, value)
    if optimizer != 'demo_muon':  # whose momentum before the exchange goes on
      assert_same_bits(own(after), own(before))
    assert int(demo_optax.exchange_info(after)['num_excluded']) == 2, (
      name,
      value,
    )
    for x in jax.tree.leaves((updates, last)):
      assert np.isfinite(np.asarray(x, np.float64)).all(), (name, value)
    assert all(np.any(u) for u in updates.values()), (name, value)


def test_momentum_is_never_that_of_another_leaf():
  """Renamed or reordered leaves of one kind are refused."""
  tx = demo_optax.scale_by_demo(demo_optax.dct_topk(8, 2), workers=TWO)
  params = {'a': jnp.zeros((16, 16)), 'b': jnp.zeros((16, 16))}
  state = tx.init(params)
  other = {'b': jnp.zeros((16, 16)), 'c': jnp.zeros((16, 16))}
  gradients = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), other)
  with pytest.raises(
    ValueError, match=r'a: float32\[16,16\] in the state, nothing in the update'
  ):
    jax.jit(tx.update)(gradients, state, other)
  state.layout.digest = tx.init(other).layout.digest
  with pytest.raises(ValueError, match='saved for the same leaves'):
    demo_optax.state.momentum(state)


@pytest.mark.core
@pytest.mark.parametrize('inside', [1, 2])
def test_one_gather_for_messages_and_one_for_averages(inside):
  """The plan counts what each device receives, replicated or sharded."""
  mesh = make_mesh_2d('auto', (4 // inside, inside))
  specs = {'w': P('fsdp', None), 'rows': None, 'e': P('fsdp', None), 'n': P()}
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)
  shapes = {'w': (32, 16), 'rows': (40, 16), 'e': (40, 8), 'n': (33,)}
  params = workers.device_put(random_tree(0, shapes))
  codes = {
    'w': HIDDEN,
    'rows': demo_optax.dct_topk((1, 16), 3, values='sign'),
    'e': None,
    'n': None,
  }
  tx = optax.chain(
    demo_optax.scale_by_demo(codes, workers=workers), optax.sgd(0.1)
  )
  gradients = stacked(
    random_tree(1, shapes, lead=(workers.count,)), workers, specs
  )
  args = gradients, tx.init(params), params
  update = jax.jit(tx.update).lower(*args).compile()
  assert_devices_agree(update(*args)[0])
  found = [c for c in hlo_text.collectives(update, mesh) if c.axes == ('data',)]
  plan = demo_optax.plan(params, codes, workers)
  moved = sum(c.received_bytes for c in found if 's32' not in str(c.shapes))
  assert moved == plan.device_bytes['data',]
  # Beside them how many workers are valid.
  assert [c.kind for c in found].count('all-gather') <= 3
  assert sum(c.output_bytes for c in found if c.kind == 'all-reduce') <= 8


# Surgery: a state that was made for other parameters ------------------------------

GROWING = {
  'a': {'kernel': np.ones((8, 16), np.float32)},
  'b': np.ones(16, np.float32),
  'c': np.ones((16, 16), np.float32),
}


def without(name):
  return {k: x for k, x in GROWING.items() if k != name}


SURGERY = {  # the new parameters, and a leaf that the error must name
  'a matrix more': ({**GROWING, 'z': np.ones((4, 4), np.float32)}, 'z'),
  'a vector more': ({**GROWING, 'z': np.ones(4, np.float32)}, 'z'),
  'a matrix less': (without('c'), 'c'),
  'a vector less': (without('b'), 'b'),
  'a matrix renamed': ({**without('c'), 'z': GROWING['c']}, 'z'),
  'a vector renamed': ({**without('b'), 'z': GROWING['b']}, 'z'),
  'another shape': ({**GROWING, 'c': jnp.ones((8, 32))}, 'c'),
  'a shape that broadcasts': ({**GROWING, 'b': jnp.ones((1, 16))}, 'b'),
  'swapped': ({**GROWING, 'b': GROWING['c'], 'c': GROWING['b']}, 'c'),
  'integers': ({**GROWING, 'b': jnp.ones(16, jnp.int32)}, 'b'),
}

EXCHANGE = functools.partial(demo_optax.scale_by_demo, HIDDEN, workers=TWO)
STATEFUL = {
  'scale_by_demo': EXCHANGE,
  'average': lambda: demo_optax.average_gradients(workers=TWO),
  'per_worker': lambda: optax.chain(
    demo_optax.per_worker(optax.ema(0.9), workers=TWO), EXCHANGE()
  ),
  'adam behind': lambda: optax.chain(EXCHANGE(), optax.scale_by_adam()),
  'demo': lambda: demo_optax.demo(0.1, workers=TWO),
  'demo_muon': lambda: demo_optax.demo_muon(0.1, workers=TWO),
}
LOCAL = {
  'local_updates': lambda: demo_optax.local.local_updates(
    optax.adam(0.1), EXCHANGE(), 2, workers=TWO
  ),
  'demo_diloco': lambda: demo_optax.local.demo_diloco(workers=TWO),
}


def squares(params, x):
  floats = [p for p in jax.tree.leaves(params) if p.dtype == jnp.float32]
  return sum(jnp.sum((p * x.mean()) ** 2) for p in floats)


def update_in_a_step(tx, params, state):
  step = make_step(tx, TWO, squares, batch_argnums=2)
  jax.eval_shape(step, params, state, jnp.ones((4, 4)))


def update_outside(tx, params, state):
  def stack(p):
    is_float = jnp.issubdtype(p.dtype, jnp.inexact)
    dtype = p.dtype if is_float else jax.dtypes.float0
    return np.zeros((2, *p.shape), dtype)

  jax.eval_shape(tx.update, jax.tree.map(stack, params), state, params)


def assert_unfit(update, tx, state, params, name):
  """An error names the leaf and the remedy."""
  with pytest.raises(ValueError, match='state must be made for') as caught:
    update(tx, params, state)
  assert f'{name}: ' in str(caught.value) and 'tx.init' in str(caught.value)
  assert len(str(caught.value)) < 800


@pytest.mark.parametrize('update', [update_in_a_step, update_outside])
@pytest.mark.parametrize('name', STATEFUL)
def test_a_state_of_other_parameters_is_refused(name, update):
  tx = STATEFUL[name]()
  state = tx.init(GROWING)
  cases = SURGERY
  if update is update_in_a_step:  # which asks the same, of unstacked gradients
    cases = {k: SURGERY[k] for k in ('a matrix renamed', 'integers')}
  for params, leaf in cases.values():
    assert_unfit(update, tx, state, params, leaf)
  update(tx, params, tx.init(params))  # the remedy


@pytest.mark.parametrize('name', LOCAL)
def test_a_state_of_other_parameters_is_refused_by_local_updates(name):
  tx = LOCAL[name]()
  state = tx.init(GROWING)
  for case, (params, leaf) in SURGERY.items():
    # A step looks first whether it holds the parameters of the state.
    with pytest.raises(ValueError, match=r'tx\.init') as caught:
      update_in_a_step(tx, params, state)
    old = {
      'a matrix renamed': 'c',
      'a vector renamed': 'b',
      'swapped': 'b',
    }.get(case, leaf)
    assert re.search(rf'\b({leaf}|{old})\b', str(caught.value)), case
    assert len(str(caught.value)) < 800
  update_in_a_step(tx, params, tx.init(params))


@pytest.mark.parametrize('update', [update_in_a_step, update_outside])
@pytest.mark.parametrize('make', [demo_optax.demo, demo_optax.demo_muon])
def test_a_state_of_other_compressors_is_refused(make, update):
  codes = jax.tree.map(lambda _: HIDDEN, GROWING)
  tx, frozen, other = (
    make(0.1, workers=TWO, compressor=compressor)
    for compressor in (
      codes,
      {**codes, 'c': compressors.FROZEN},
      {**codes, 'b': demo_optax.dct_topk(8, 4)},
    )
  )
  state = tx.init(GROWING)
  assert_unfit(update, frozen, state, GROWING, 'c')
  assert_unfit(update, other, state, GROWING, 'b')


# Others are chains of these.
@pytest.mark.parametrize(
  'name', ['scale_by_demo', 'average', 'per_worker', 'demo_muon']
)
def test_a_state_of_another_precision(name):
  """Momentum is float32 for bfloat16 too, and float64 for float64."""
  update = update_outside
  tx = STATEFUL[name]()
  state = tx.init(GROWING)
  narrow = {**GROWING, 'c': GROWING['c'].astype(jnp.bfloat16)}
  update(tx, narrow, state)
  with jax.enable_x64(True):
    wide = {**GROWING, 'c': jnp.ones((16, 16), jnp.float64)}
    with pytest.raises(ValueError, match=r'c: float32\[16,16\] in the state'):
      update(tx, wide, state)
