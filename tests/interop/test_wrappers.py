"""Transformations and wrappers of optax in a step of one worker.

Each works, or ends in an error that names the leaf and the remedy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import demo_optax

pytestmark = pytest.mark.usefixtures('standard_promotion')

WORKERS = demo_optax.Workers.simulated(2)
COMPRESSOR = demo_optax.Compressor(
  demo_optax.compressors.Striding(0.5), demo_optax.compressors.Identity()
)
FROZEN = {'w': False, 'scale': True}
TRAINED = {'w': True, 'scale': False}
EVEN = lambda step, *_, **__: step % 2 == 0


def demo():
  return demo_optax.demo(
    0.03, workers=WORKERS, compressor=COMPRESSOR, decay=0.9
  )


def scale_by_demo():
  return demo_optax.scale_by_demo(COMPRESSOR, 0.9, workers=WORKERS)


def loss_fn(params, x):
  return jnp.mean((x @ params['w'] * params['scale'][None]) ** 2)


def make_params():
  return {'w': jnp.ones((8, 4)), 'scale': jnp.ones((4,))}


BATCH = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def train(tx, params=None, steps=6, fast=lambda params: params, **extra_args):
  """Trains, and returns the losses and the last parameters and state."""
  tx = optax.with_extra_args_support(tx)
  params = make_params() if params is None else params
  state = tx.init(params)

  @demo_optax.data_parallel(WORKERS, batch_argnums=2)
  def step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(fast(params), x)
    given = {k: f(loss, x) for k, f in extra_args.items()}
    updates, state = tx.update(grads, state, params, **given)
    return optax.apply_updates(params, updates), state, loss

  losses = []
  shapes = jax.tree.map(jnp.shape, params)
  for _ in range(steps):
    params, state, loss = step(params, state, BATCH)
    losses.append(float(loss))
  assert jax.tree.map(jnp.shape, params) == shapes
  return losses, params, state


def per_worker(tx):
  return demo_optax.per_worker(tx, workers=WORKERS)


MEAN_LOSS = {'value': lambda loss, x: demo_optax.over_workers(loss)}
OWN_LOSS = {'value': lambda loss, x: loss}
OWN_GRADIENT = {
  'grad_fn': lambda loss, x: lambda params, _: jax.grad(loss_fn)(params, x)
}

WORKS = {  # and options of `train`
  'adamw of averages for some leaves': lambda: optax.partition(
    {
      True: demo(),
      False: optax.chain(
        demo_optax.average_gradients(workers=WORKERS), optax.adamw(1e-2)
      ),
    },
    TRAINED,
  ),
  'adaptive_grad_clip': lambda: optax.chain(
    optax.adaptive_grad_clip(0.1), demo()
  ),
  'add_noise': lambda: optax.chain(
    optax.add_noise(0.01, 0.5, jax.random.key(0)), demo()
  ),
  'apply_every': lambda: optax.chain(demo(), optax.apply_every(2)),
  'apply_every before': lambda: optax.chain(
    per_worker(optax.apply_every(2)), demo()
  ),
  'conditionally_mask': lambda: optax.conditionally_mask(demo(), EVEN),
  'flatten': lambda: optax.flatten(demo()),
  'keep_params_nonnegative': lambda: optax.chain(
    demo(), optax.keep_params_nonnegative()
  ),
  'mechanize behind': lambda: optax.chain(
    scale_by_demo(), contrib.mechanize(optax.sgd(1.0))
  ),
  'schedule_free': lambda: contrib.schedule_free(demo(), 0.03),
  'snapshot': lambda: optax.chain(
    demo(), optax.snapshot('norm', optax.tree.norm)
  ),
  'snapshot before': lambda: optax.chain(
    per_worker(optax.snapshot('norm', optax.tree.norm)), demo()
  ),
  'reduce_on_plateau': lambda: optax.chain(
    demo(), contrib.reduce_on_plateau(patience=2)
  ),
  'lookahead': lambda: optax.lookahead(demo(), 2, 0.5),
  # In opaque mode: its steps uphill are each worker's own.
  'sam': lambda: contrib.sam(
    demo(),
    optax.chain(contrib.normalize(), optax.sgd(0.05)),
    sync_period=2,
    opaque_mode=True,
  ),
}
OPTIONS = {
  'reduce_on_plateau': MEAN_LOSS,
  'sam': OWN_GRADIENT,
  'lookahead': {
    'params': optax.LookaheadParams.init_synced(make_params()),
    'fast': lambda params: params.fast,
  },
}


@pytest.mark.parametrize('name', WORKS)
def test_works(name):
  losses, *_ = train(WORKS[name](), **OPTIONS.get(name, {}))
  assert losses[-1] < losses[0]


# What is left out of the exchange -------------------------------------------------


FREEZES = {
  'masked and set_to_zero': lambda: optax.chain(
    optax.masked(demo(), TRAINED), optax.masked(optax.set_to_zero(), FROZEN)
  ),
  'partition': lambda: optax.partition(
    {True: demo(), False: optax.set_to_zero()}, TRAINED
  ),
  'selective_transform': lambda: optax.selective_transform(
    demo(), freeze_mask=FROZEN
  ),
  'freeze before': lambda: optax.chain(optax.freeze(FROZEN), demo()),
  'freeze behind': lambda: optax.chain(demo(), optax.freeze(FROZEN)),
}


@pytest.mark.parametrize('name', FREEZES)
def test_freezes(name):
  losses, params, _ = train(FREEZES[name]())
  np.testing.assert_array_equal(params['scale'], make_params()['scale'])
  assert losses[-1] < losses[0]


# Errors that name the leaf and the remedy -----------------------------------------


PARAMETER = r'parameter (scale|w) must be .*differs between workers'
RESULT = r'result\.0\.(scale|w), .*differs between workers'
STATE = r'result\.1\.0\.{}\S*, .*differs between workers'

FAILS = {  # the leaf, and what to do
  'apply_if_finite': (
    lambda: optax.apply_if_finite(demo(), 3),
    'condition of jax.lax.cond or of a loop around an exchange',
    'apply_if_finite is not needed',
  ),
  'apply_every before': (
    lambda: optax.chain(optax.apply_every(2), demo()),
    STATE.format('grad_acc'),
    'per_worker',
  ),
  'conditionally_transform': (
    lambda: optax.conditionally_transform(demo(), EVEN),
    RESULT,
    'place it after',
  ),
  'ema before': (
    lambda: optax.chain(optax.ema(0.9), demo()),
    STATE.format('ema'),
    'per_worker',
  ),
  'mechanize': (
    lambda: contrib.mechanize(demo()),
    RESULT,
    'mechanize.*place it after',
  ),
  'partition with adamw': (
    lambda: optax.partition({True: demo(), False: optax.adamw(1e-2)}, TRAINED),
    r'result\.0\.scale, .*differs',
    'demo_optax.average_gradients',
  ),
  'reduce_on_plateau of own losses': (
    lambda: optax.chain(demo(), contrib.reduce_on_plateau(patience=1)),
    '',
    r'value=demo_optax.over_workers\(loss',
  ),
  'sam': (
    lambda: contrib.sam(demo(), optax.sgd(0.01)),
    RESULT,
    'place it after',
  ),
  'snapshot before': (
    lambda: optax.chain(optax.snapshot('norm', optax.tree.norm), demo()),
    STATE.format('measurement'),
    'per_worker',
  ),
  'zero_nans before': (
    lambda: optax.chain(optax.zero_nans(), demo()),
    STATE.format('found_nan'),
    'per_worker',
  ),
}


@pytest.mark.parametrize('name', FAILS)
def test_fails(name):
  make, leaf, remedy = FAILS[name]
  given = OWN_LOSS if name.startswith('reduce_on_plateau') else {}
  with pytest.raises(ValueError, match=f'(?s){leaf}.*{remedy}'):
    train(make(), steps=2, **given)
