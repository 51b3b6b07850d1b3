"""Recorded runs of the published implementation."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax

pytestmark = pytest.mark.core

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
FLOAT64 = [
  'single_worker',
  'two_workers',
  'four_workers',
  'odd_dims',
  'all_coefficients',
  'weight_decay_schedule',
]


def load(name):
  """A recorded run: numbers by name, and trees by the prefix of their names."""
  run, trees = {}, {}
  for key, value in np.load(GOLDEN / f'{name}.npz').items():
    prefix, _, name = key.partition('/')
    if name:
      trees.setdefault(prefix, {})[name] = value
    else:
      run[key] = value
  return run, lambda prefix: trees.get(prefix, {})


def replay(run, tree):
  """Yields (step, params, merged) of our run of the same gradients."""
  kwargs = {
    'workers': demo_optax.Workers.simulated(int(run['workers'])),
    'decay': float(run['decay']),
    'compressor': demo_optax.dct_topk(
      int(run['chunk']), int(run['topk']), padding=False, proportional=False
    ),
  }
  rates = jnp.asarray(run['lr'])
  constant = len(set(run['lr'].tolist())) == 1
  rate = float(run['lr'][0]) if constant else lambda step: rates[step]
  tx = demo_optax.demo(rate, weight_decay=float(run['weight_decay']), **kwargs)
  # The same links up to the exchange show the merged momentum before the sign.
  head = optax.chain(
    optax.scale_by_learning_rate(rate, flip_sign=False),
    demo_optax.scale_by_demo(**kwargs),
  )
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
    yield s, params, merged
  last = demo_optax.state.momentum(state)
  for name, expected in tree('delta').items():
    tolerance = 1e-12 if expected.dtype == np.float64 else 1e-6
    np.testing.assert_allclose(last[name], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize('name', FLOAT64)
def test_reproduces_published_run(name, x64):
  run, tree = load(name)
  for s, params, merged in replay(run, tree):
    for found, prefix in ((params, 'param'), (merged, 'merged')):
      for key, expected in tree(prefix).items():
        assert found[key].dtype == np.float64
        np.testing.assert_allclose(found[key], expected[s], atol=1e-12, rtol=0)
  assert s + 1 == len(run['lr'])


def test_float32_run_within_rounding():
  run, tree = load('float32')
  flips = total = 0
  for s, params, merged in replay(run, tree):
    for key, expected in tree('merged').items():
      np.testing.assert_allclose(merged[key], expected[s], atol=2e-6)
      flips += np.sum(np.sign(merged[key]) != np.sign(expected[s]))
      total += expected[s].size
    for key, expected in tree('param').items():
      off = np.abs(np.asarray(params[key]) - expected[s]) > 1e-6
      assert off.mean() <= 1e-4
  assert flips / total <= 1e-4, f'{flips} of {total} signs differ'
