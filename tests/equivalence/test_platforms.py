"""The forms of a step that GPUs and TPUs run, on CPU devices."""

import jax
import numpy as np
import pytest
import test_maps
import test_sharded
from helpers import assert_same_bits, on_mesh

from demo_optax.numerics import platform

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True, params=['gpu', 'tpu'])
def accelerator(request):
  with platform.running_on(request.param):
    yield request.param


@pytest.mark.parametrize('name, how', [
    *(('published', how) for how in (
        'auto', 'checked', 'pmap', '2x4 auto', '2x4 explicit', 'step 2x4 auto')),
    ('second', 'explicit'), ('groups', 'vmap')])
def test_maps_have_the_bits_of_the_simulation(name, how):
  make = test_maps.EXCHANGES[name]
  found, expected = test_maps.run(make, how), test_maps.expected_of(name, how)
  assert_same_bits(found, expected)


def test_workers_of_several_devices(accelerator):
  kind = {'gpu': 'auto', 'tpu': 'explicit'}[accelerator]
  found, expected = (
      test_sharded.run(
          workers, 3, test_sharded.exchange, '3d',
          leaves=('both', 'inner', 'bias'))[:2]
      for workers in (
          test_sharded.make_workers('3d', kind), test_sharded.simulated_workers('3d')))
  assert_same_bits(found, expected)


def test_forms_agree_but_for_rounding():
  make = test_maps.EXCHANGES['published']
  found = test_maps.run(make, 'simulated')
  with platform.running_on('cpu'):
    expected = test_maps.run(make, 'simulated')
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4),
      found.updates, expected.updates)
  assert test_maps.types(found.state) == test_maps.types(expected.state)


def test_the_platform_is_that_of_the_mesh(monkeypatch, accelerator):
  """Not of the backend: a CPU host may compile for another."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'another')
  token = platform._running.set(None)
  assert platform.of() == 'another'
  assert platform.of(on_mesh(2).mesh) == 'cpu'
  platform._running.reset(token)
  assert platform.of(on_mesh(2).mesh) == accelerator
