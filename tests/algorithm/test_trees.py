"""Trees of compressors: one exchange, whatever is sent of each leaf."""

import functools

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
  assert_replicas_equal,
  assert_same_bits,
  on_mesh,
  random_tree,
  replicated,
  stacked,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import compressors

pytestmark = pytest.mark.core

N = 4
SHAPES = {'a': (32, 24), 'b': (24, 32), 'rows': (40, 16), 'gain': (9,)}
LABELS = {'a': 'hidden', 'b': 'hidden', 'rows': 'embedding', 'gain': 'dense'}
CODES = {'hidden': demo_optax.dct_topk(16, 4),
         'embedding': demo_optax.dct_topk((1, 16), 3, values='sign'),
         'dense': None}
TREE = {name: CODES[label] for name, label in LABELS.items()}


def grouped(workers):
  """One exchange, and behind it a base optimizer for each group."""
  return optax.chain(
      demo_optax.scale_by_demo(TREE, 0.9, workers=workers),
      optax.partition(
          {'hidden': optax.sign_sgd(0.01), 'dense': optax.adamw(0.03),
           'embedding': optax.chain(
               optax.scale_by_adam(b1=0.0),
               optax.scale_by_learning_rate(0.02))},
          LABELS))


def alone(name, workers, steps):
  """The updates of one leaf by itself."""
  exchange = demo_optax.scale_by_demo(TREE[name], 0.9, workers=workers)
  if TREE[name] is None:
    exchange = demo_optax.average(workers=workers)
  base = {'hidden': optax.sign_sgd(0.01), 'dense': optax.adamw(0.03),
          'embedding': optax.chain(optax.scale_by_adam(b1=0.0),
                                   optax.scale_by_learning_rate(0.02))}
  tx = optax.chain(exchange, base[LABELS[name]])
  params = {name: jnp.asarray(random_tree(9, SHAPES)[name])}
  state, update = tx.init(params), jax.jit(tx.update)
  for step in range(steps):
    gradients = random_tree(step, SHAPES, lead=(N,))
    updates, state = update({name: gradients[name]}, state, params)
    yield updates[name]


@pytest.fixture(autouse=True)
def standard_promotion():
  """As optax.adamw needs it."""
  with jax.numpy_dtype_promotion('standard'):
    yield


def test_leaves_do_as_they_do_alone():
  workers = demo_optax.Workers.simulated(N)
  tx = grouped(workers)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  state, update = tx.init(params), jax.jit(tx.update)
  expected = {name: alone(name, workers, 3) for name in SHAPES}
  for step in range(3):
    updates, state = update(random_tree(step, SHAPES, lead=(N,)), state, params)
    for name, results in expected.items():
      np.testing.assert_allclose(
          updates[name], next(results), atol=1e-7, err_msg=name)


def test_one_gather_for_all():
  workers = on_mesh(N)
  tx = grouped(workers)
  params = replicated(random_tree(9, SHAPES), workers)
  state = workers.device_put(tx.init(params))
  gradients = stacked(random_tree(0, SHAPES, lead=(N,)), workers)
  update = jax.jit(tx.update)
  updates, _ = update(gradients, state, params)
  assert_replicas_equal(updates)
  found = hlo_text.collectives(
      update.lower(gradients, state, params).compile())
  plan = demo_optax.plan(params, TREE, workers)
  # The message, and the averaged leaf; beside them how many workers are valid.
  gathers = [c.received_bytes for c in found if c.kind == 'all-gather']
  assert len(gathers) == 2 and min(gathers) == (N - 1) * 36
  assert sum(gathers) == (N - 1) * plan.payload_bytes
  assert sum(c.output_bytes for c in found if c.kind == 'all-reduce') <= 8
  assert plan.sent_bytes == plan.payload_bytes and not plan.summed_bytes
  tx = grouped(demo_optax.Workers.simulated(N))
  params = random_tree(9, SHAPES)
  same, _ = jax.jit(tx.update)(
      random_tree(0, SHAPES, lead=(N,)), tx.init(params), params)
  assert_same_bits({k: updates[k] for k in 'ab'}, {k: same[k] for k in 'ab'})


def test_gathered_and_summed_together():
  workers = demo_optax.Workers.simulated(N)
  shared = compressors.Compressor(
      compressors.Striding(0.25), compressors.Identity(), 8)
  codes = {'a': CODES['hidden'], 'b': shared, 'rows': shared,
           'gain': CODES['hidden']}
  tx = demo_optax.scale_by_demo(codes, workers=workers)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  gradients = random_tree(0, SHAPES, lead=(N,))
  gradients['b'][2] = np.nan
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  # Whoever is not finite in one leaf is left out of all.
  assert int(demo_optax.exchange_info(state)['num_excluded']) == 1
  assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
  kept = demo_optax.state.momentum(state)
  for name, moment in kept.items():
    assert not np.any(moment[2])
    expected = gradients[name][[0, 1, 3]].mean(0)
    if codes[name] is shared:
      np.testing.assert_allclose(
          np.asarray(moment)[[0, 1, 3]].mean(0) + updates[name], expected,
          atol=1e-6)
  again = demo_optax.state.with_momentum(state, kept)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again)):
    np.testing.assert_allclose(a, b, atol=1e-6)


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
  results = []
  for tx in (within, before):
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for step in range(6):
      gradients = random_tree(step, shapes, lead=(3,))
      updates, state = update(gradients, state, params)
      seen.append(updates)
    results.append(seen)
  assert_same_bits(*results)


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


@pytest.mark.parametrize('name, value', [
    *((name, np.nan) for name in (
        'decay', 'alpha', 'gradient_weight', 'learning_rate', 'weight_decay')),
    ('alpha', 1e38), ('alpha', -1.0), ('decay', 2.0)])
def test_a_hyperparameter_that_makes_no_sense_only_loses_its_step(name, value):
  workers = demo_optax.Workers.simulated(2)
  of_demo = name in ('learning_rate', 'weight_decay')
  make = optax.inject_hyperparams(
      demo_optax.demo if of_demo else demo_optax.scale_by_demo,
      static_args=('workers', 'compressor'), hyperparam_dtype=jnp.float32)
  given = {'learning_rate': 0.1, 'weight_decay': 0.1} if of_demo else {
      'decay': 0.9, 'alpha': 0.5, 'gradient_weight': 1.0}
  tx = make(workers=workers, compressor=demo_optax.dct_topk(4, 2), **given)
  params = {'w': jnp.ones((8, 8))}
  gradients = random_tree(0, {'w': (8, 8)}, lead=(2,))
  update = jax.jit(tx.update)
  _, before = update(gradients, tx.init(params), params)
  lost = before._replace(
      hyperparams={**before.hyperparams, name: jnp.float32(value)})
  updates, after = update(gradients, lost, params)
  assert not np.any(updates['w'])
  stacked_of = lambda state: [
      x for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
      if 'worker_stacked' in jax.tree_util.keystr(path)]
  assert_same_bits(stacked_of(after), stacked_of(before))
  assert int(demo_optax.exchange_info(after)['num_excluded']) == 2
  after = after._replace(hyperparams=before.hyperparams)
  updates, _ = update(gradients, after, params)
  assert np.all(np.isfinite(updates['w'])) and np.any(updates['w'])


def test_with_nnx_and_schedules():
  """The count of steps, hyperparameters and numbers of each part advance."""
  workers = demo_optax.Workers.simulated(2)
  model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  tx = optax.chain(
      demo_optax.scale_by_demo(
          lambda params: jax.tree.map(
              lambda x: demo_optax.dct_topk(4, 2) if x.ndim > 1 else None,
              params),
          workers=workers),
      optax.partition(
          {'kernel': optax.sign_sgd(optax.linear_schedule(0.1, 0.0, 10)),
           'bias': optax.sgd(optax.linear_schedule(1.0, 0.0, 10))},
          lambda params: jax.tree.map(
              lambda x: 'kernel' if x.ndim > 1 else 'bias', params)))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers)
  def train_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(
        lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss

  x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
  losses = [float(train_step(model, optimizer, x)) for _ in range(8)]
  assert losses[-1] < 0.7 * losses[0]
  counts = [int(x) for path, x in
            jax.tree_util.tree_flatten_with_path(optimizer.opt_state)[0]
            if 'count' in jax.tree_util.keystr(path)]
  assert len(counts) >= 3 and set(counts) == {8}


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


def test_mistakes():
  workers = demo_optax.Workers.simulated(2)
  with pytest.raises(TypeError, match='must be a Compressor'):
    demo_optax.scale_by_demo({'a': 'dct'}, workers=workers)
  for name in ('decay', 'gradient_weight'):
    with pytest.raises(TypeError, match=f'{name}=.* must be a number'):
      demo_optax.scale_by_demo(workers=workers, **{name: {'a': 0.5, 'b': 0.1}})
  params = {'a': jnp.zeros((4, 4))}
  tx = demo_optax.scale_by_demo({'b': None}, workers=workers)
  with pytest.raises(ValueError, match='compressor is not like'):
    tx.init(params)


def test_averaged_leaves_of_several_devices():
  """The plan counts what each device all-reduces, replicated or sharded."""
  mesh = jax.make_mesh(
      (2, 2), ('replica', 'fsdp'),
      axis_types=(jax.sharding.AxisType.Auto,) * 2)
  specs = {'w': P('fsdp', None), 'e': P('fsdp', None), 'n': P()}
  workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)
  shapes = {'w': (32, 16), 'e': (40, 8), 'n': (33,)}
  params = workers.device_put(random_tree(0, shapes))
  codes = {'w': demo_optax.dct_topk(16, 4), 'e': None, 'n': None}
  tx = optax.chain(
      demo_optax.scale_by_demo(codes, workers=workers), optax.sgd(0.1))
  state = workers.device_put(tx.init(params))
  gradients = {
      k: jax.device_put(g, NamedSharding(mesh, P('replica', *specs[k])))
      for k, g in random_tree(1, shapes, lead=(2,)).items()}
  found = hlo_text.collectives(
      jax.jit(tx.update).lower(gradients, state, params).compile(), mesh)
  plan = demo_optax.plan(params, codes, workers)
  moved = sum(c.received_bytes for c in found
              if c.axes == ('replica',) and 's32' not in str(c.shapes))
  assert moved == plan.device_bytes['replica',]
