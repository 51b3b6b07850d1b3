"""Kernels for TPUs, interpreted, beside the forms that XLA compiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_mesh, random_tree, updates_of
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
  return names


def transformation(k=32, sides=(64, 64), workers=None, **options):
  return demo_optax.scale_by_demo(
      Compressor(GroupMax(k, kernels=True), Dct(), sides), 0.9,
      workers=workers or demo_optax.Workers.simulated(3), **options)


@pytest.mark.parametrize('average', ['workers', 'senders'])
@pytest.mark.parametrize('sides, k', [((64, 64), 32), ((16, 32), 8)])
def test_steps_by_kernels_are_those_without(called, sides, k, average):
  # The last block has two of the 130 chunks. A vector has no kernel.
  shapes = {'w': (13 * sides[0], 10 * sides[1]), 'b': (7,)}
  gradients = [random_tree(seed, shapes, (3,)) for seed in range(3)]
  gradients[1]['b'][1] = np.nan  # this worker is excluded
  params = random_tree(9, shapes)
  tx = transformation(k, sides, average=average)
  with platform.running_on('tpu'):
    found = updates_of(tx, params, gradients)
  assert set(called) == {'demo_encode', 'demo_subtract', 'demo_decode'}
  called.clear()
  expected = updates_of(tx, params, gradients)
  assert not called
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
      found, expected)


@pytest.mark.parametrize('how', ['simulated', 'vmap', 'mesh', 'x64'])
def test_kernels_are_lowered_for_tpus(how, request):
  if how == 'x64':
    request.getfixturevalue('x64')
  params = {'w': jnp.zeros((832, 640), jnp.float32)}
  workers = {
      'vmap': demo_optax.Workers.on_axis('workers'), 'mesh': on_mesh(4),
  }.get(how, demo_optax.Workers.simulated(4))
  tx = transformation(workers=workers)
  gradients = jax.tree.map(lambda x: jnp.zeros((4, *x.shape), x.dtype), params)

  def step(gradients):
    updates, state = tx.update(gradients, tx.init(params), params)
    return updates, state.worker_stacked

  mapped = jax.vmap(step, axis_name='workers') if how == 'vmap' else step
  with platform.running_on('tpu'):
    text = jax.jit(mapped).trace(gradients).lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('tpu_custom_call') == 3


def test_steps_are_exported_for_tpus():
  params = {'w': jnp.zeros((832, 640), jnp.float32)}
  tx = demo_optax.demo(0.1, workers=demo_optax.Workers.simulated(2))
  args = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), params), tx.init(params)
  layout = jax.export.DisabledSafetyCheck.custom_call('LayoutConstraint')
  with platform.running_on('tpu'):
    exported = jax.export.export(
        jax.jit(tx.update), platforms=['tpu'], disabled_checks=[layout]
    )(*args, params)
  assert exported.platforms == ('tpu',)


def test_products_of_kernels_are_in_full_precision():
  one = np.eye(64, dtype=np.float32)
  encode = functools.partial(kernels.encode, matrices=(one, one), k=32)
  decode = functools.partial(kernels.decode, matrices=(one, one), by_senders=True)
  bucket, received = jnp.zeros((128, 4096)), jnp.zeros((2, 32, 128))
  for form, args in (
      (encode, (bucket, bucket, jnp.zeros((1, 3)))),
      (decode, (received.astype(jnp.int32), received, jnp.zeros((1, 1)))),
  ):
    text = str(jax.make_jaxpr(form)(*args))
    products = re.findall(r'dot_general\[.*?\] ', text, re.DOTALL)
    assert len(products) == text.count('dot_general') == 2
    assert all('HIGHEST' in x for x in products)


@pytest.mark.parametrize('handled, change', [
    (True, {}),
    (False, {'rows': 127}),
    (False, {'k': 82}),
    (False, {'k': 4096}),
    (False, {'sides': (1, 4096)}),
    (False, {'sides': (128, 128)}),
    (False, {'dtype': 'float64'}),
    (True, {'received': 256 * 32}),
    (False, {'received': 257 * 32}),
])
def test_buckets_that_kernels_handle(handled, change):
  bucket = {'rows': 128, 'sides': (64, 64), 'k': 32, 'dtype': 'float32'} | change
  with platform.running_on('tpu'):
    assert platform.in_kernels(**bucket) == handled
  with platform.running_on('gpu'):
    assert not platform.in_kernels(**bucket)
