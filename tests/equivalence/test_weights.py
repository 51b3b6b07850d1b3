"""Workers with weights: `update(..., weight=tokens)`.

Values are compared with the NumPy oracle in tests/algorithm/test_oracle.py,
maps and relay with the simulation in test_maps.py and tests/remote.
"""

import functools

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, make_mesh, on_mesh, random_tree, stacked
from optax.experimental import aggregating

import demo_optax
from demo_optax import compressors, local

N = 4
SHAPES = {'w': (16, 24), 'b': (5,)}
TOPK = demo_optax.dct_topk(8, 3)
SHARED = compressors.Compressor(
  compressors.RandomSubset(1 / 4), compressors.Identity()
)
PARTS = {
  'sent': TOPK,
  'averaged': {'w': TOPK, 'b': None},
  'summed': {'w': SHARED, 'b': TOPK},
}


def exchange(compressor, workers, **options):
  return demo_optax.scale_by_demo(compressor, 0.9, workers=workers, **options)


def train(tx, weights, count=N, steps=3):
  """Updates, and the state, of stacked gradients."""
  params, found = random_tree(99, SHAPES), []
  state, update = tx.init(params), jax.jit(tx.update)
  given = {} if weights is None else {'weight': np.array(weights, np.float32)}
  for step in range(steps):
    gradients = random_tree(step, SHAPES, lead=(count,))
    updates, state = update(gradients, state, params, **given)
    found.append(updates)
  return found, state


@pytest.mark.core
@pytest.mark.parametrize(
  'parts, average',
  [
    ('sent', 'senders'),
    ('sent', 'workers'),
    # For these leaves an average has one meaning.
    ('averaged', 'senders'),
    ('summed', 'workers'),
  ],
)
def test_equal_weights_are_none(parts, average):
  """To the bit, whatever they are."""
  workers = demo_optax.Workers.simulated(N)
  tx = exchange(PARTS[parts], workers, average=average)
  expected = train(tx, None)
  # Sums of products of powers of two are exact.
  for weight in (1, 64) if parts != 'sent' else (1, 3, 1e-4):
    assert_same_bits(train(tx, [weight] * N), expected)


def test_owners_merge_by_weight():
  weights = [3.0, 0.0, 500.0, 20.0]
  workers = demo_optax.Workers.simulated(N)
  options = {'exchange': 'all_to_all', 'update_values': 'float32'}
  found = train(exchange(TOPK, workers, **options), weights)[0]
  assert_same_bits(found, train(exchange(TOPK, workers), weights)[0])


@pytest.mark.parametrize('parts', PARTS)
def test_workers_whose_weight_does_not_count(parts):
  """They are left out: as workers that are not there."""
  bad = {1: 0.0, 3: float('nan')} if parts == 'sent' else {0: -1.0, 2: 1e10}
  weights = [bad.get(i, 10.0 + i) for i in range(N)]
  workers = demo_optax.Workers.simulated(N)
  tx = exchange(PARTS[parts], workers)
  _, state = train(tx, weights)
  info = demo_optax.exchange_info(state)
  assert info['num_excluded'] == 2
  for momentum in demo_optax.state.momentum(state).values():
    for i, own in enumerate(np.asarray(momentum)):
      assert np.any(own) == (i not in bad)


def test_a_weighted_average_is_the_mean_of_all_rows():
  """Whatever the share of each worker is."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(20, 3)), jnp.float32)
  sizes = [1, 4, 12, 3]
  loss_of = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
  params = jnp.ones(3)
  parts = jnp.split(x, np.cumsum(sizes)[:-1])
  gradients = jnp.stack([jax.grad(loss_of)(params, part) for part in parts])
  tx = demo_optax.average_gradients(workers=demo_optax.Workers.simulated(N))
  mean, _ = tx.update(gradients, tx.init(params), weight=jnp.array(sizes))
  np.testing.assert_allclose(mean, jax.grad(loss_of)(params, x), atol=1e-6)


# Where a weight is given -------------------------------------------------------

TRANSFORMATIONS = {
  'demo': lambda workers: demo_optax.demo(
    1e-2, workers=workers, compressor=TOPK
  ),
  'demo_muon': lambda workers: demo_optax.demo_muon(
    1e-2, workers=workers, compressor=TOPK
  ),
  'chain': lambda workers: optax.chain(
    demo_optax.per_worker(optax.trace(0.5), workers=workers),
    demo_optax.average_gradients(workers=workers),
    optax.sgd(1e-2, momentum=0.9),
  ),
  'process': lambda workers: aggregating.process(
    demo_optax.per_worker(optax.clip_by_global_norm(1.0), workers=workers),
    exchange(TOPK, workers),
    optax.sgd(1e-2),
  ),
}


def in_step(make, workers, *all_weights):
  """Trains with gradients and weights that are rows of a batch.

  Yields the parameters after a run with each of `all_weights`.
  """
  tx = make(workers)

  @demo_optax.data_parallel(workers, batch_argnames=('gradients', 'tokens'))
  def step(params, state, gradients, tokens):
    own = jax.tree.map(lambda g: g[0], gradients)
    updates, state = tx.update(own, state, params, weight=tokens.sum())
    return optax.apply_updates(params, updates), state

  for weights in all_weights:
    params = workers.device_put(random_tree(99, SHAPES))
    state = tx.init(params)
    for number in range(3):
      gradients = random_tree(number, SHAPES, lead=(N,))
      params, state = step(params, state, gradients, weights)
    yield params


@pytest.mark.core
@pytest.mark.parametrize('name', TRANSFORMATIONS)
def test_in_a_step_and_with_stacked_gradients(name):
  make, weights = TRANSFORMATIONS[name], np.array([5, 900, 31, 64], np.int32)
  workers = demo_optax.Workers.simulated(N)
  tx, params = make(workers), random_tree(99, SHAPES)
  state = tx.init(params)

  @jax.jit
  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params, weight=weights)
    return optax.apply_updates(params, updates), state

  for number in range(3):
    gradients = random_tree(number, SHAPES, lead=(N,))
    params, state = step(params, state, gradients)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  found, without = in_step(make, workers, weights, np.ones(N, np.int32))
  jax.tree.map(close, found, params)
  assert np.any(np.asarray(found['w']) != np.asarray(without['w']))


def test_an_nnx_optimizer():
  workers = demo_optax.Workers.simulated(2)
  model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
  start = np.asarray(model.kernel[...])
  tx = optax.chain(
    demo_optax.average_gradients(workers=workers), optax.sgd(1.0)
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def train_step(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.sum(model(x)))(model)
    optimizer.update(model, grads, weight=x[0, 0])

  train_step(model, optimizer, jnp.array([[1.0, 0, 0], [3.0, 0, 0]]))
  # (1 * 1 + 3 * 3) / (1 + 3)
  np.testing.assert_allclose(model.kernel[0, 0], start[0, 0] - 2.5, rtol=1e-6)


def test_differences_of_local_updates():
  """That of the step in which workers exchange."""
  workers = demo_optax.Workers.simulated(2)
  tx = local.diloco(
    optax.sgd(1.0),
    workers=workers,
    sync_period=2,
    outer_learning_rate=1.0,
    outer_momentum=0.0,
  )
  params = {'w': jnp.zeros(3)}
  state = tx.init(params)

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def train_step(params, state, x):
    gradients = {'w': x[0, 1:]}
    updates, state = tx.update(gradients, state, params, weight=x[0, 0])
    return optax.apply_updates(params, updates), state

  rows = np.array([[1.0, 1, 2, 3], [3.0, 5, 6, 7]], np.float32)
  for _ in range(2):
    params, state = train_step(params, state, rows)
  np.testing.assert_allclose(params['w'], [-8.0, -10.0, -12.0], rtol=1e-6)


# What is sent ------------------------------------------------------------------


@pytest.mark.parametrize(
  'chunks, weighted', [(9, False), (9, True), (10, True)]
)
def test_bytes_are_those_of_plan(chunks, weighted):
  """The weight is a word of the message, which may need another row."""
  workers, mesh = on_mesh(N, 'auto'), make_mesh(N)
  params = {'w': jnp.zeros((8, 8 * chunks)), 'b': jnp.zeros(7)}
  compressor = {'w': demo_optax.dct_topk(8, 8), 'b': None}
  tx = exchange(compressor, workers)
  params = workers.device_put(params)
  gradients = stacked(
    jax.tree.map(lambda x: np.ones((N, *x.shape), np.float32), params), workers
  )
  given = {'weight': np.ones(N, np.float32)} if weighted else {}
  lowered = jax.jit(tx.update).lower(
    gradients, tx.init(params), params, **given
  )
  received = sum(
    c.received_bytes
    for c in hlo_text.collectives(lowered.compile(), mesh)
    if c.kind == 'all-gather'
  )
  plan = demo_optax.plan(params, compressor, workers, weighted=weighted)
  assert received == plan.received_bytes


def test_mistakes():
  workers = demo_optax.Workers.simulated(N)
  tx, gradients = exchange(TOPK, workers), random_tree(0, SHAPES, lead=(N,))
  state = tx.init(random_tree(0, SHAPES))
  for weight in (3.0, np.ones(3), np.ones((N, 1))):
    with pytest.raises(ValueError, match=r'weight must have shape \(4,\) here'):
      tx.update(gradients, state, weight=weight)
  with pytest.raises(ValueError, match=r'weight must have shape \(\) here'):
    stacked_weight = optax.with_extra_args_support(tx)._replace(
      update=lambda g, s, p, weight: tx.update(g, s, p, weight=weight[None])
    )
    next(in_step(lambda workers: stacked_weight, workers, np.ones(N)))
