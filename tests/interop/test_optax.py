"""optax's own contract, and kinds of parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  COMPILATIONS,
  assert_same_bits,
  on_mesh,
  random_tree,
  updates_of,
)
from optax.experimental import aggregating

import demo_optax

pytestmark = pytest.mark.core

N = 3
WORKERS = demo_optax.Workers.simulated(N)
COMPRESSOR = demo_optax.dct_topk(16, 6)
SHAPES = {'w': (20, 32), 'b': (32,)}
PARAMS = {k: np.ones(s, np.float32) for k, s in SHAPES.items()}


@jax.numpy_dtype_promotion('standard')  # optax's own schedules
def test_inject_hyperparams_over_decay_and_learning_rate():
  """The updates of the plain optimizer, and its state is found."""
  given = {
    'learning_rate': optax.linear_schedule(0.1, 0.01, 10),
    'decay': 0.9,
    'workers': WORKERS,
    'compressor': COMPRESSOR,
    'weight_decay': 0.01,
  }
  gradients = [random_tree(step, SHAPES, (N,)) for step in range(10)]
  (found, state), (expected, _) = (
    updates_of(make(**given), PARAMS, gradients)
    for make in (optax.inject_hyperparams(demo_optax.demo), demo_optax.demo)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), found, expected
  )
  assert set(state.hyperparams) >= {'learning_rate', 'decay'}
  momentum = demo_optax.state.momentum(state)
  assert jax.tree.map(jnp.shape, momentum) == {'w': (N, 20, 32), 'b': (N, 32)}


def test_masked_leaves_out_what_is_masked():
  tx = optax.masked(
    demo_optax.scale_by_demo(COMPRESSOR, workers=WORKERS),
    {'w': True, 'b': False},
  )
  state = tx.init(PARAMS)
  gradients = random_tree(1, SHAPES, (N,))
  updates, state = tx.update(gradients, state)
  assert updates['w'].shape == (20, 32)
  assert updates['b'] is gradients['b']  # untouched, as optax.masked says
  momentum = demo_optax.state.momentum(state)
  assert momentum.keys() == {'w'}


def test_weight_decay_mask():
  zero = jax.tree.map(jnp.zeros_like, random_tree(0, SHAPES, (N,)))

  def shrunk(**more):
    tx = demo_optax.demo(
      0.1, weight_decay=0.5, workers=WORKERS, compressor=COMPRESSOR, **more
    )
    updates, _ = tx.update(zero, tx.init(PARAMS), PARAMS)
    return {k: float(u.mean()) for k, u in updates.items()}

  assert shrunk() == pytest.approx({'w': -0.05, 'b': -0.05}, rel=1e-4)
  mask = {'w': True, 'b': False}
  assert shrunk(weight_decay_mask=mask) == pytest.approx(
    {'w': -0.05, 'b': 0}, rel=1e-4
  )


# An aggregator of optax -----------------------------------------------------------


@pytest.mark.parametrize('kind', ['simulated', 'auto'])
def test_an_aggregator_between_two_chains(kind):
  """The bits of a chain, with stacked gradients in a jit of one's own."""
  workers = on_mesh(N, 'auto') if kind == 'auto' else WORKERS
  before = demo_optax.per_worker(
    optax.clip_by_global_norm(1.0), workers=workers
  )
  exchange = demo_optax.scale_by_demo(COMPRESSOR, workers=workers)
  after = optax.chain(optax.scale_by_sign(), optax.scale(-0.01))
  assert isinstance(exchange, aggregating.Aggregator)
  assert isinstance(
    demo_optax.average_gradients(workers=workers), aggregating.Aggregator
  )

  def loss_fn(params, x):
    return jnp.mean((x @ params['w'] + params['b'][None]) ** 2)

  def train(tx):
    @jax.jit
    def step(params, state, x):  # x: f32[workers, rows, 20]
      value_and_grad = jax.vmap(jax.value_and_grad(loss_fn), (None, 0))
      losses, gradients = value_and_grad(params, x)
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state, losses.mean()

    params, state = workers.device_put(PARAMS), tx.init(PARAMS)
    for seed in range(4):
      x = random_tree(seed, {'x': (N, 5, 20)})['x']
      params, state, loss = step(params, state, x)
    return params, loss

  processed = train(aggregating.process(before, exchange, after))
  chained = train(optax.chain(before, exchange, after))
  assert_same_bits(processed, chained)


# The protocol of every transformation ---------------------------------------------


PUBLIC = {
  'scale_by_demo': demo_optax.scale_by_demo,
  'average': demo_optax.average_gradients,
  'per_worker': lambda workers: demo_optax.per_worker(
    optax.trace(0.9), workers=workers
  ),
  'demo': lambda workers: demo_optax.demo(1e-2, workers=workers),
  'demo_muon': lambda workers: demo_optax.demo_muon(1e-2, workers=workers),
  'diloco': lambda workers: demo_optax.local.diloco(workers=workers),
  'demo_diloco': lambda workers: demo_optax.local.demo_diloco(workers=workers),
  'sparse_loco': lambda workers: demo_optax.local.sparse_loco(workers=workers),
}


@jax.numpy_dtype_promotion('standard')  # optax's AdamW
@pytest.mark.parametrize('name', PUBLIC)
def test_every_transformation_keeps_the_contract(name):
  """`init` makes the types that `update` keeps; neither compiles twice."""
  tx = PUBLIC[name](workers=WORKERS)
  assert isinstance(tx, optax.GradientTransformationExtraArgs)
  is_stacked = name not in ('diloco', 'demo_diloco', 'sparse_loco')
  state = tx.init(PARAMS)
  types = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), state)
  shapes = jax.eval_shape(tx.init, PARAMS)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)

  def one_worker(params, state, x, unused):
    gradients = jax.tree.map(lambda p: p * x.mean(), params)
    updates, state = tx.update(gradients, state, params, unused=unused)
    if name == 'per_worker':  # its updates are the worker's own
      updates = demo_optax.over_workers(updates)
    return optax.apply_updates(params, updates), state

  step = demo_optax.data_parallel(WORKERS, batch_argnames='x')(one_worker)
  params = PARAMS
  for seed in range(2):
    x = random_tree(seed, {'x': (2 * N, 3)})['x']
    params, state = step(params, state, x, jnp.ones(()))
    found = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), state)
    assert found == types
    assert jax.tree.map(jnp.shape, params) == SHAPES
    if seed == 0:
      COMPILATIONS.count = 0
  assert COMPILATIONS.count == 0
  if is_stacked:
    gradients = random_tree(0, SHAPES, (N,))
    lead = (N,) if name == 'per_worker' else ()
    updates, _ = jax.eval_shape(tx.update, gradients, tx.init(PARAMS), PARAMS)
    shapes = {k: (*lead, *shape) for k, shape in SHAPES.items()}
    assert jax.tree.map(jnp.shape, updates) == shapes


# Kinds of parameters ----------------------------------------------------------


def test_float64_parameters_have_float64_momentum(x64):
  tx = demo_optax.demo(1e-3, workers=WORKERS)
  params = {'w': jnp.ones((4, 4)), 'h': jnp.ones((4, 4), jnp.float32)}
  momentum = tx.init(params).inner_state[1].worker_stacked.momentum
  assert {x.dtype for x in momentum.values()} == {
    np.dtype('float64'),
    np.dtype('float32'),
  }
  gradients = jax.tree.map(lambda p: jnp.stack([p] * N), params)
  updates, _ = tx.update(gradients, tx.init(params), params)
  assert updates['w'].dtype == jnp.float64
  assert updates['h'].dtype == jnp.float32


def test_bfloat16_momentum_decays():
  """In bfloat16 arithmetic 0.999 * m is m again."""
  tx = demo_optax.scale_by_demo(
    demo_optax.dct_topk(8, 1), 0.999, workers=WORKERS
  )
  params = jnp.zeros((8, 8), jnp.bfloat16)
  gradient = jnp.asarray(random_tree(0, {'x': (N, 8, 8)})['x'], jnp.bfloat16)
  (before,), (after,) = (
    map(
      np.asarray,
      updates_of(tx, params, given)[1].worker_stacked.momentum.values(),
    )
    for given in ([gradient], [gradient, jnp.zeros_like(gradient)])
  )
  kept = after != 0
  np.testing.assert_allclose(after[kept], 0.999 * before[kept], rtol=1e-6)


def test_float16_gradients_do_not_underflow_in_the_momentum():
  """lr * g = 4e-8 is zero or a subnormal in float16."""
  tx = demo_optax.demo(4e-4, workers=WORKERS)
  params = jnp.ones((8, 8), jnp.float16)
  gradient = jnp.full((N, 8, 8), 1e-5, jnp.float16)
  updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
  assert np.all(np.asarray(updates) < 0)


def all_kinds():
  return {
    'matrix': jnp.ones((20, 32)),
    'kernel': jnp.ones((3, 3, 4, 70)),
    'scanned': jnp.ones((5, 17, 9)),
    'scalar': jnp.ones(()),
    'one': jnp.ones((1,)),
    'empty': jnp.ones((0, 4)),
    'steps': jnp.ones((3,), jnp.int32),
    'flag': jnp.ones((), bool),
    'none': None,
    'masked': optax.MaskedNode(),
    'tuple': (jnp.ones(3), [jnp.ones((2, 2))]),
  }


def test_any_tree():
  workers, params = on_mesh(N), all_kinds()
  tx = demo_optax.demo(0.1, workers=workers, weight_decay=0.1)
  state = jax.jit(tx.init)(params)

  def gradient(p):
    if jnp.issubdtype(p.dtype, jnp.inexact):
      return jnp.ones((N, *p.shape), p.dtype)
    return np.zeros((N, *p.shape), jax.dtypes.float0)

  gradients = jax.tree.map(gradient, params)
  updates, state = jax.jit(tx.update)(gradients, state, params)
  new = optax.apply_updates(params, updates)
  assert jax.tree.structure(new) == jax.tree.structure(params)
  assert_same_bits(new['steps'], params['steps'])
  assert_same_bits(new['flag'], params['flag'])
  for key in ('matrix', 'kernel', 'scanned', 'scalar', 'one'):
    assert new[key].shape == params[key].shape
    np.testing.assert_allclose(new[key], 1 - 0.1 - 0.01, rtol=1e-6)
  _, state = jax.jit(tx.update)(gradients, state, params)
  momentum = demo_optax.state.momentum(state)
  assert not momentum.keys() & {'empty', 'steps', 'flag'}
  assert momentum['kernel'].shape == (N, 3, 3, 4, 70)


def test_any_tree_before_the_exchange_and_without_parameters():
  """Integer leaves, Python's floats, nothing to exchange at all."""
  params = {
    'w': jnp.ones((4, 4)),
    'n': jnp.ones(3, jnp.int32),
    'x': 1.0,
    'empty': jnp.ones((0, 4)),
    'none': None,
    'masked': optax.MaskedNode(),
  }
  gradients = {
    **params,
    'w': jnp.ones((N, 4, 4)),
    'x': jnp.ones(N),
    'n': np.zeros((N, 3), jax.dtypes.float0),
    'empty': jnp.ones((N, 0, 4)),
  }
  clip = demo_optax.per_worker(optax.clip(1.0), workers=WORKERS)
  tx = optax.chain(clip, demo_optax.demo(0.1, workers=WORKERS))
  updates, _ = tx.update(gradients, tx.init(params), params)
  new = optax.apply_updates(params, updates)
  assert_same_bits(new['n'], params['n'])
  for name in ('w', 'x'):
    np.testing.assert_allclose(new[name], 0.9, rtol=1e-6)
  exchange = demo_optax.scale_by_demo(workers=WORKERS)
  updates, _ = exchange.update(gradients, exchange.init(params))
  assert updates['n'].dtype == jax.dtypes.float0  # it does not know better
  only = {'n': params['n']}
  for tx in (exchange, demo_optax.average_gradients(workers=WORKERS)):
    updates, _ = tx.update({'n': gradients['n']}, tx.init(only), only)
    assert updates['n'].dtype == jnp.int32 and not np.any(updates['n'])


def test_per_worker_keeps_a_state_for_each():
  """Also of numbers, as optax lets a state hold them."""
  counting = optax.GradientTransformation(
    lambda params: {'steps': 0.0}, lambda u, s, params=None: (u, {'steps': 1.0})
  )
  own = optax.chain(optax.ema(0.5, debias=False), counting)
  tx = demo_optax.per_worker(own, workers=WORKERS)
  state = tx.init(jnp.zeros(2))
  gradients = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
  for expected in (0.5, 0.75):
    updates, state = tx.update(gradients, state)
    np.testing.assert_allclose(updates, expected * gradients)
  ema, steps = state.worker_stacked
  assert ema.ema.shape == (N, 2) and steps['steps'].tolist() == [1] * N


# A whole model as the parameters ----------------------------------------------


class Model(eqx.Module):
  """Trained leaves among a function, a number and a table of integers."""

  mlp: eqx.nn.MLP
  dropout: eqx.nn.Dropout
  table: jax.Array

  def __call__(self, x):
    return self.dropout(self.mlp(x), inference=True)


@functools.cache
def whole_model():
  mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
  return Model(mlp, eqx.nn.Dropout(0.5), jnp.arange(3))


EXCHANGE = functools.partial(
  demo_optax.scale_by_demo, COMPRESSOR, workers=WORKERS
)
TRANSFORMATIONS = {
  'scale_by_demo': EXCHANGE,
  'average': lambda: demo_optax.average_gradients(workers=WORKERS),
  'per_worker': lambda: optax.chain(
    demo_optax.per_worker(optax.trace(0.9), workers=WORKERS), EXCHANGE()
  ),
  'demo': lambda: demo_optax.demo(0.1, workers=WORKERS, weight_decay=0.1),
  'demo_muon': lambda: demo_optax.demo_muon(
    0.1, workers=WORKERS, weight_decay=0.1
  ),
  'local_updates': lambda: demo_optax.local.local_updates(
    optax.sgd(0.1), EXCHANGE(), 1, workers=WORKERS
  ),
  'demo_diloco': lambda: demo_optax.local.demo_diloco(
    optax.sgd(0.1), workers=WORKERS, sync_period=1, drift=True
  ),
}
trained = functools.partial(eqx.filter, filter_spec=eqx.is_inexact_array)


@pytest.mark.usefixtures('rank_promotion')
@pytest.mark.parametrize('name', ['per_worker', 'demo_muon', 'demo_diloco'])
def test_a_whole_model_in_a_step(name):
  """The bits of its trained leaves alone; links and chains of all kinds."""
  tx, fresh = TRANSFORMATIONS[name](), whole_model()

  def loss_fn(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)

  def after_a_step(params_of):
    @demo_optax.data_parallel(WORKERS, batch_argnums=2)
    def step(model, state, x):
      grads = eqx.filter_grad(loss_fn)(model, x)
      updates, state = tx.update(grads, state, params_of(model))
      return eqx.apply_updates(model, updates), state

    batch = random_tree(0, {'x': (2 * N, 4)})['x']
    model, state = step(fresh, tx.init(trained(fresh)), batch)
    return trained(model), state

  found = after_a_step(lambda model: model)
  assert_same_bits(found, after_a_step(trained))
  assert np.any(found[0].mlp.layers[0].weight != fresh.mlp.layers[0].weight)


@pytest.mark.parametrize('name', TRANSFORMATIONS)
def test_a_whole_model_outside_of_a_step(name):
  tx, model = TRANSFORMATIONS[name](), whole_model()
  params = trained(model)
  with pytest.raises(ValueError, match='filter.model, eqx.is_inexact_array'):
    tx.init(model)
  if name not in ('per_worker', 'demo'):  # others have their links
    return
  gradients = jax.tree.map(lambda p: jnp.stack([p, 2 * p, 3 * p]), params)
  state = tx.init(params)
  assert_same_bits(
    tx.update(gradients, state, model), tx.update(gradients, state, params)
  )


def test_parameters_of_other_leaves_than_the_gradients():
  tx = demo_optax.demo(0.1, workers=WORKERS)
  gradients = {'w': jnp.ones((N, 20, 32))}
  with pytest.raises(ValueError, match='key mismatch at b. Give update the'):
    tx.update(gradients, tx.init({'w': PARAMS['w']}), PARAMS)


# Complex parameters -----------------------------------------------------------


@jax.numpy_dtype_promotion('standard')
def test_complex_parameters_in_two_parts():
  """What an error recommends: the mean of both."""
  average = demo_optax.average_gradients(workers=WORKERS)
  params = {'z': jnp.ones((4, 3), jnp.complex64)}
  with pytest.raises(TypeError, match='z must be real.*split_real_and_imag'):
    average.init(params)
  tx = optax.contrib.split_real_and_imaginary(average)
  parts = random_tree(0, {'re': (N, 4, 3), 'im': (N, 4, 3)})
  gradients = {'z': parts['re'] + 1j * parts['im']}
  updates, _ = tx.update(gradients, tx.init(params), params)
  np.testing.assert_allclose(
    updates['z'], gradients['z'].mean(0), rtol=1e-6, atol=1e-7
  )
