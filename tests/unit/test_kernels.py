"""Kernels for TPUs, interpreted, beside the forms that XLA compiles."""

import functools

import jax
import numpy as np
import pytest
from helpers import random_tree, updates_of
from jax.experimental import pallas as pl

import demo_optax
from demo_optax.compressors import Compressor, Dct, GroupMax
from demo_optax.numerics import kernels, platform

pytestmark = pytest.mark.core


@pytest.fixture
def called(monkeypatch):
  """Runs the kernels here, by the interpreter; yields the names of those run."""
  names = []

  def interpret(*args, name, **more):
    names.append(name)
    return pl.pallas_call(*args, name=name, interpret=True, **more)

  monkeypatch.setattr(kernels, 'pallas_call', interpret)
  monkeypatch.setattr(
      jax.lax, 'platform_dependent', lambda *args, tpu, default: tpu(*args))
  return names


@pytest.mark.parametrize('average', ['workers', 'senders'])
@pytest.mark.parametrize('sides, k', [((64, 64), 32), ((16, 32), 8)])
def test_steps_by_kernels_are_those_without(called, sides, k, average):
  # The last block has two of the 130 chunks. A vector has no kernel.
  shapes = {'w': (13 * sides[0], 10 * sides[1]), 'b': (7,)}
  gradients = [random_tree(seed, shapes, (3,)) for seed in range(3)]
  gradients[1]['b'][1] = np.nan  # this worker is excluded
  params = random_tree(9, shapes)

  def run():
    tx = demo_optax.scale_by_demo(
        Compressor(GroupMax(k), Dct(), sides), 0.9, average=average,
        workers=demo_optax.Workers.simulated(3))
    return updates_of(tx, params, gradients)

  with platform.running_on('tpu'):
    found = run()
  assert set(called) == {'demo_encode', 'demo_subtract', 'demo_decode'}
  called.clear()
  expected = run()
  assert not called
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
      found, expected)


@pytest.mark.parametrize('rows, sides, k, dtype, handled', [
    (128, (64, 64), 32, 'float32', True),
    (127, (64, 64), 32, 'float32', False),
    (128, (64, 64), 82, 'float32', False),
    (128, (1, 4096), 32, 'float32', False),
    (128, (128, 128), 32, 'float32', False),
    (128, (8, 16), 128, 'float32', False),
    (128, (64, 64), 32, 'float64', False),
])
def test_buckets_that_kernels_handle(rows, sides, k, dtype, handled):
  with platform.running_on('tpu'):
    assert platform.in_kernels(rows, sides, k, dtype) == handled
  with platform.running_on('gpu'):
    assert not platform.in_kernels(rows, sides, k, dtype)
