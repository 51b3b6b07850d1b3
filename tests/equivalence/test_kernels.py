"""Kernels for GPUs, interpreted, against plain JAX; compiled in tests/ahead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_tree
from jax.experimental import pallas as pl

import demo_optax
from demo_optax.numerics import kernels, platform

N = 3
# Chunks of 64x64, some of which are filled up; chunks of 60x60.
SHAPES = {'w': (64, 192), 'padded': (127, 190), 'other': (60, 60)}
OPTIONS = {
  'senders': {},
  'workers': {
    'average': 'workers',
    'gradient_weight': 0.5,
    'values': 'int8',
  },
  'owners': {'exchange': 'all_to_all', 'update_values': 'float32'},
  'weighted': {'weight': np.array([1, 7, 2], np.float32)},
}


@pytest.fixture
def called(monkeypatch):
  """Interprets kernels, without TF32; yields the names of those traced."""
  names = []

  def call(kernel, **options):
    names.append(kernel.__name__)
    return compiled(kernel, interpret=True, **options)

  compiled = pl.pallas_call
  monkeypatch.setattr(pl, 'pallas_call', call)
  monkeypatch.setattr(
    kernels, '_dot', functools.partial(jnp.dot, precision='highest')
  )
  monkeypatch.setattr(platform, '_SMALL', 0)
  return names


def make(on, topk=20, values='float32', **options):
  compressor = demo_optax.dct_topk(topk=topk, values=values, kernels=on)
  return demo_optax.scale_by_demo(
    compressor, 0.9, workers=demo_optax.Workers.simulated(N), **options
  )


def train(on, weight=None, **options):
  """Updates of each step, in the second of which a gradient is not finite."""
  tx, params = make(on, **options), random_tree(99, SHAPES)
  state, update, seen = tx.init(params), jax.jit(tx.update), []
  given = {} if weight is None else {'weight': weight}
  for step in range(3):
    gradients = random_tree(step, SHAPES, lead=(N,))
    if step == 1:
      gradients['padded'][2, 3, 3] = np.nan
    updates, state = update(gradients, state, params, **given)
    seen.append((updates, state.metrics))
  return seen, demo_optax.state.momentum(state)


@pytest.mark.parametrize('options', OPTIONS)
def test_updates_and_momentum_differ_by_rounding(options, called):
  expected = train(False, **OPTIONS[options])
  assert not called
  with platform.running_on('gpu'):
    found = train(True, **OPTIONS[options])
  assert {*called} == {'_encode', '_decode'}
  jax.tree.map(assert_near, found, expected)
  excluded = [int(metrics['num_excluded']) for _, metrics in found[0]]
  assert excluded == [0, 1, 0]


def assert_near(x, y):
  assert x.dtype == y.dtype
  largest = float(np.max(np.abs(y)))
  np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize(
  'topk, used',
  [(170, {'_encode', '_decode'}), (171, {'_encode'}), (513, set())],
)
def test_from_much_that_was_sent_xla_decodes(topk, used, called):
  tx, params = make(True, topk), random_tree(99, SHAPES)
  gradients = random_tree(0, SHAPES, lead=(N,))
  with platform.running_on('gpu'):
    jax.eval_shape(tx.update, gradients, tx.init(params), params)
  assert {*called} == used


@pytest.mark.parametrize('name', ['cpu', 'tpu'])
def test_on_other_platforms_the_program_is_the_same(name, called):
  params, gradients = random_tree(99, SHAPES), random_tree(0, SHAPES, lead=(N,))
  with platform.running_on(name):
    texts = []
    for on in (True, False):
      tx = make(on)
      lowered = jax.jit(tx.update).lower(gradients, tx.init(params), params)
      texts.append(lowered.as_text())
  assert texts[0] == texts[1]
  assert not called


def test_a_checkpoint_does_not_know_of_kernels():
  on, off = (
    make(x).init(random_tree(99, SHAPES)).layout for x in (True, False)
  )
  np.testing.assert_array_equal(on.digest, off.digest)
  assert on.layout.records == off.layout.records
