"""What an exchange keeps, sends and leaves out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_maps
from helpers import (
  assert_same_bits,
  make_mesh,
  on_mesh,
  own,
  random_tree,
  with_momentum,
)
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.codes.value_codes import VALUES
from demo_optax.numerics import platform

N = 4
COMPRESSOR = demo_optax.dct_topk(chunk_size=32, topk=8)


@pytest.mark.core
def test_scan_over_steps_inside_shard_map():
  """The state's type does not change from one step to the next."""
  make = test_maps.EXCHANGES['published']
  tx = make(demo_optax.Workers.on_axis('data'))

  def run(params, gradients):  # gradients [steps, 1, ...] of this worker
    def step(state, g):
      updates, state = tx.update(g, state, params)
      return state, updates

    gradients = jax.tree.map(lambda g: g[:, 0], gradients)
    return jax.lax.scan(step, tx.init(params), gradients)[1]

  gradients = [test_maps.gradients_of(s, N) for s in range(test_maps.STEPS)]
  gradients = jax.tree.map(lambda *g: np.stack(g), *gradients)
  mapped = jax.shard_map(
    run, mesh=make_mesh(N), in_specs=(P(), P(None, 'data')), out_specs=P()
  )
  updates = jax.jit(mapped)(random_tree(99, test_maps.SHAPES), gradients)
  expected, *_ = test_maps.run(make, 'simulated')
  assert_same_bits(updates, jax.tree.map(lambda *u: np.stack(u), *expected))


@pytest.mark.core
@pytest.mark.parametrize(
  'make, kinds',
  [
    ('demo', ('auto', 'explicit')),
    ('demo_muon', ('auto', 'explicit')),
  ],
)
def test_buckets_of_several_pieces(make, kinds, monkeypatch):
  """A step whose momentum is more than one turn of a loop, on each map."""
  monkeypatch.setattr(platform, 'PIECE', 2**13)
  tx_of = {
    'demo': lambda workers: demo_optax.demo(1e-2, workers=workers),
    'demo_muon': lambda workers: demo_optax.demo_muon(1e-2, workers=workers),
  }[make]

  def train(workers):
    tx = tx_of(workers)

    @demo_optax.data_parallel(workers, batch_argnames='x')
    def step(params, state, x):
      gradients = {'w': params['w'] + x[0]}
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state

    params = {'w': jnp.ones(shape)}
    state = tx.init(params)
    for number in range(3):
      x = random_tree(number, {'x': shape}, lead=(N,))['x']
      params, state = step(params, state, x)
    return jax.device_get(params)

  shape = 192, 192  # of no other test, whose programs have one piece
  simulated = demo_optax.Workers.simulated(N)
  state = demo_optax.scale_by_demo(workers=simulated).init(jnp.ones(shape))
  (bucket,) = state.layout.layout.buckets
  assert (bucket.pieces, bucket.num_chunks, bucket.rows) == (5, 9, 10)
  expected = train(simulated)
  for kind in kinds:
    found = train(on_mesh(N, kind))
    if make == 'demo':
      assert_same_bits(found, expected)
    else:  # matrices are not multiplied in a stack as alone
      np.testing.assert_allclose(found['w'], expected['w'], atol=1e-3)


@pytest.mark.parametrize(
  'values, alpha',
  [
    *((values, 1.0) for values in VALUES if values != 'sign'),
    ('float32', 0.2),
    ('sign', 0.2),
  ],
)
def test_conservation_at_the_ends_of_the_range(values, alpha):
  """All-zero, huge, subnormal and mixed chunks: rounding and nothing else."""
  rng = np.random.default_rng(0)
  workers = demo_optax.Workers.simulated(1)
  compressor = demo_optax.dct_topk(16, 8, values=values)
  tx = demo_optax.scale_by_demo(
    compressor, 0.5, workers=workers, alpha=alpha, average='workers'
  )
  params = jnp.zeros((6 * 16, 16))
  state, update = tx.init(params), jax.jit(tx.update)
  before = np.zeros((6, 16, 16))
  spike = np.zeros((16, 16))
  spike[3, 5] = 8e37  # its coefficients are finite, the sum of 256 is not
  for _ in range(4):
    noise = rng.normal(size=(3, 16, 16))
    gradient = np.stack(
      [
        0 * spike,
        spike,
        1e-42 * noise[0],
        noise[1],
        noise[2] * 10.0 ** rng.integers(-44, 30, (16, 16)),
        np.eye(16) * 1.2e-38,
      ]
    )
    # Of what is larger than gradients may be, twice as much is there already.
    extreme = np.abs(gradient) > 1e25
    before = jnp.asarray(
      before + np.where(extreme, 2 * gradient, 0), jnp.float32
    )
    state = with_momentum(state, {'the only leaf': before.reshape(1, -1, 16)})
    gradient = jnp.asarray(np.where(extreme, 0, gradient), jnp.float32)
    sent, state = update(gradient.reshape(1, -1, 16), state, params)
    kept = demo_optax.state.momentum(state)['the only leaf']
    sent, kept, gradient, before = (
      np.asarray(x, np.float64).reshape(6, 16, 16)
      for x in (sent, kept, gradient, before)
    )
    had = 0.5 * before + gradient
    scale = np.abs(had).max((1, 2), keepdims=True)
    assert int(state.metrics['num_excluded']) == 0
    assert np.all(np.abs(kept + alpha * sent - had) <= 2e-6 * scale + 3e-37)
    assert not np.any(sent[0]) and not np.any(kept[0])
    before = kept


@pytest.mark.parametrize('scale', [1.0, 1e25])
def test_what_is_sent_leaves_the_momentum_to_the_bit(scale):
  """Also where squares overflow, so that energies are not known."""
  workers = demo_optax.Workers.simulated(2)
  compressor = demo_optax.dct_topk(4, 2, proportional=False)
  tx = demo_optax.scale_by_demo(compressor, 0.9, workers=workers)
  params = jnp.zeros((8, 8))
  gradients = np.random.default_rng(0).normal(size=(2, 8, 8)) * scale
  gradients = jnp.asarray(gradients, jnp.float32)
  _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  (momentum,) = state.worker_stacked.momentum.values()  # [2, 4 chunks, 16]
  np.testing.assert_array_equal(jnp.sum(momentum == 0, axis=2), 2)


def test_a_gradient_that_could_overflow_the_momentum_is_left_out():
  """Up to a 1e-12th of the largest number, and not beyond."""
  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.scale_by_demo(
    demo_optax.dct_topk(16, 1), 0.9, workers=workers
  )
  params, update = jnp.zeros((16, 16)), jax.jit(tx.update)
  for largest, left_out in (3.4e26, 0), (3.5e26, 1):
    gradient = np.ones((2, 16, 16), np.float32)
    gradient[1, 2, 3] = largest
    _, state = update(jnp.asarray(gradient), tx.init(params), params)
    assert int(state.metrics['num_excluded']) == left_out
    (momentum,) = state.worker_stacked.momentum.values()
    assert np.all(np.isfinite(momentum))
    assert bool(np.any(momentum[1])) == (not left_out)


# Workers that are left out ----------------------------------------------------


@pytest.mark.parametrize(
  'make',
  [
    functools.partial(demo_optax.demo, 1e-2, weight_decay=0.1),
    functools.partial(
      demo_optax.scale_by_demo, exchange='all_to_all', update_values='sign'
    ),
  ],
)
def test_all_left_out_changes_nothing(make):
  """Neither momentum nor what owners keep; the next good step is as usual."""
  tx = make(workers=demo_optax.Workers.simulated(N), compressor=COMPRESSOR)
  params = jax.tree.map(jnp.asarray, random_tree(1))
  update = jax.jit(tx.update)
  _, before = update(random_tree(2, lead=(N,)), tx.init(params), params)
  broken = jax.tree.map(lambda g: g * np.nan, random_tree(2, lead=(N,)))
  updates, state = update(broken, before, params)
  assert int(demo_optax.exchange_info(state)['num_excluded']) == N
  assert_same_bits(optax.apply_updates(params, updates), params)
  assert_same_bits(own(state), own(before))
  updates, state = update(random_tree(3, lead=(N,)), state, params)
  assert int(demo_optax.exchange_info(state)['num_excluded']) == 0
  assert all(
    np.isfinite(u).all() and np.any(u) for u in jax.tree.leaves(updates)
  )


# What crosses the wire --------------------------------------------------------


@pytest.mark.core
def test_the_operations_of_an_exchange():
  """The default precision is bfloat16 on TPUs and TF32 on GPUs.

  Floats are added by scatters whose indices are unique, ints as they are.
  """
  tx = demo_optax.scale_by_demo(
    COMPRESSOR, 0.95, workers=demo_optax.Workers.simulated(N)
  )
  params = random_tree(0)
  traced = jax.jit(tx.update).trace(
    random_tree(1, lead=(N,)), tx.init(params), params
  )
  jaxpr, text = str(traced.jaxpr), traced.lower().as_text()
  assert jaxpr.count('dot_general') > 0
  assert jaxpr.count('dot_general') == jaxpr.count(
    'precision=(Precision.HIGHEST'
  )
  scatters = text.split('"stablehlo.scatter"')[1:]
  assert scatters
  for scatter in scatters:
    body = scatter[: scatter.index('stablehlo.return')]
    floats = 'tensor<f32>' in body[body.index('^bb0') :]
    assert 'unique_indices = true' in body or not floats
