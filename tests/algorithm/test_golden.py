"""Recorded runs of the published implementation."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import on_mesh

import demo_optax

pytestmark = pytest.mark.core

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
FLOAT64 = [
    'single_worker', 'two_workers', 'four_workers', 'odd_dims',
    'all_coefficients', 'weight_decay_schedule',
]


def load(name):
  run = dict(np.load(GOLDEN / f'{name}.npz'))

  def tree(prefix):
    return {k[len(prefix) + 1 :]: v for k, v in run.items()
            if k.startswith(prefix + '/')}

  return run, tree


def replay(run, tree, kind):
  """Yields (step, params, merged, state) of our run of the same gradients."""
  make = on_mesh if kind == 'mesh' else demo_optax.Workers.simulated
  workers = make(int(run['workers']))
  compressor = demo_optax.dct_topk(int(run['chunk']), int(run['topk']),
                                   padding=False, proportional=False)
  rates = jnp.asarray(run['lr'])
  kwargs = dict(workers=workers, compressor=compressor,
                decay=float(run['decay']))
  constant = len(set(run['lr'].tolist())) == 1
  rate = float(run['lr'][0]) if constant else lambda step: rates[step]
  tx = demo_optax.demo(rate, weight_decay=float(run['weight_decay']), **kwargs)
  # The same links up to the exchange show the merged momentum before the sign.
  head = optax.chain(
      optax.scale_by_learning_rate(rate, flip_sign=False),
      demo_optax.scale_by_demo(compressor, float(run['decay']),
                               workers=workers))
  params = jax.tree.map(jnp.asarray, tree('param0'))
  state, head_state = tx.init(params), head.init(params)

  @jax.jit
  def step(params, state, head_state, gradients):
    merged, head_state = head.update(gradients, head_state, params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, head_state, merged

  gradients = tree('grad')
  for s in range(len(run['lr'])):
    g = {k: jnp.asarray(v[s]) for k, v in gradients.items()}
    params, state, head_state, merged = step(params, state, head_state, g)
    yield s, params, merged, state
  last = demo_optax.state.momentum(state)
  for name, expected in tree('delta').items():
    tolerance = 1e-12 if expected.dtype == np.float64 else 1e-6
    np.testing.assert_allclose(last[name], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize('name, kind', [
    *((name, 'simulated') for name in FLOAT64), ('four_workers', 'mesh')])
def test_reproduces_published_run(name, kind, x64):
  run, tree = load(name)
  steps = 0
  for s, params, merged, _ in replay(run, tree, kind):
    for key, expected in tree('param').items():
      assert params[key].dtype == np.float64
      np.testing.assert_allclose(params[key], expected[s], atol=1e-12, rtol=0)
    for key, expected in tree('merged').items():
      np.testing.assert_allclose(merged[key], expected[s], atol=1e-12, rtol=0)
    steps += 1
  assert steps == len(run['lr'])


@pytest.mark.parametrize('kind', ['simulated'])
def test_float32_run_within_rounding(kind):
  run, tree = load('float32')
  flips = total = 0
  for s, params, merged, _ in replay(run, tree, kind):
    for key, expected in tree('merged').items():
      np.testing.assert_allclose(merged[key], expected[s], atol=2e-6)
      flips += np.sum(np.sign(merged[key]) != np.sign(expected[s]))
      total += expected[s].size
    for key, expected in tree('param').items():
      off = np.abs(np.asarray(params[key]) - expected[s]) > 1e-6
      assert off.mean() <= 1e-4
  assert flips / total <= 1e-4, f'{flips} of {total} signs differ'
