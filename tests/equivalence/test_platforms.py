"""The forms of a step that GPUs and TPUs run, on CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_maps
import test_sharded
from helpers import (
  assert_same_bits,
  make_mesh_2d,
  make_step,
  on_mesh,
  random_tree,
)
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.numerics import platform

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True, params=['gpu', 'tpu'])
def accelerator(request):
  with platform.running_on(request.param):
    yield request.param


@pytest.mark.parametrize('name, how', [
    *(('published', how) for how in [
        *test_maps.STACKED, *test_maps.OWN_MAPS, '2x4 auto', '2x4 explicit']),
    *((name, how) for name in ('second', 'groups')
      for how in ('explicit', 'vmap'))])
def test_maps_have_the_bits_of_the_simulation(name, how):
  make = test_maps.EXCHANGES[name]
  found, expected = test_maps.run(make, how), test_maps.expected_of(name, how)
  assert_same_bits(found, expected)


def test_workers_of_several_devices(accelerator):
  make_tx = test_sharded.exchange
  expected = test_sharded.run(
      test_sharded.simulated_workers('3d'), 3, make_tx, '3d')
  found = test_sharded.run(
      test_sharded.make_workers(
          '3d', {'gpu': 'auto', 'tpu': 'explicit'}[accelerator]),
      3, make_tx, '3d')
  assert_same_bits(found[:2], expected[:2])


def test_a_model_with_biases_and_workers_of_several_devices():
  mesh = make_mesh_2d()
  specs = {'w1': P('fsdp'), 'b1': P(), 'w2': P(None, 'fsdp'), 'b2': P()}
  shapes = {'w1': (64, 64), 'b1': (64,), 'w2': (64, 64), 'b2': (64,)}
  batch = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)

  def loss_fn(params, x):
    hidden = jax.nn.relu(x @ params['w1'] + params['b1'][None])
    return jnp.mean((hidden @ params['w2'] + params['b2'][None]) ** 2)

  def train(workers):
    tx = demo_optax.demo(0.01, workers=workers)
    params = workers.device_put(random_tree(0, shapes))
    train_step = make_step(tx, workers, loss_fn)
    state, losses = tx.init(params), []
    for _ in range(3):
      params, state, loss = train_step(params, state, batch)
      losses.append(float(loss))
    return losses

  found = train(demo_optax.Workers.on_mesh(mesh, 'data', specs))
  expected = train(demo_optax.Workers.simulated(2, specs, {'fsdp': 4}))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert found[-1] < found[0]


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
