"""The forms of a step that GPUs and TPUs run, on CPU devices."""

import jax
import numpy as np
import pytest
import test_maps
import test_sharded
from helpers import assert_same_bits, on_mesh, random_tree, stacked
from jax import export

import demo_optax
from demo_optax.numerics import platform

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True, params=['gpu', 'tpu'])
def accelerator(request):
  with platform.running_on(request.param):
    yield request.param


@pytest.mark.parametrize(
  'name, how',
  [
    *(
      ('published', how)
      for how in (
        'auto',
        'checked',
        'pmap',
        '2x4 auto',
        '2x4 explicit',
        'step 2x4 auto',
      )
    ),
    ('second', 'explicit'),
    ('owners', 'auto'),
    ('demo', 'checked'),
    ('demo_muon', 'explicit'),
    ('demo_muon', 'checked'),
  ],
)
def test_maps_have_the_bits_of_the_simulation(name, how):
  make = test_maps.EXCHANGES[name]
  found, expected = test_maps.run(make, how), test_maps.expected_of(name, how)
  assert_same_bits(found, expected)


def test_workers_of_several_devices(accelerator):
  kind = {'gpu': 'auto', 'tpu': 'explicit'}[accelerator]
  found, expected = (
    test_sharded.run(
      w, 3, test_sharded.exchange, '3d', leaves=('both', 'inner', 'bias')
    )[:2]
    for w in (
      test_sharded.make_workers('3d', kind),
      test_sharded.simulated_workers('3d'),
    )
  )
  assert_same_bits(found, expected)


@pytest.mark.parametrize('exchange', ['all_gather', 'all_to_all'])
def test_forms_agree_but_for_rounding(exchange):
  """Also with chunks in lanes: 144 on a device. A checkpoint fits all forms."""
  gradients = random_tree(0, {'w': (96, 96)}, lead=(2,))

  def run(workers):
    tx = demo_optax.scale_by_demo(
      test_maps.COMPRESSOR,
      0.9,
      workers=workers,
      exchange=exchange,
      update_values='ternary',
    )
    state, update = tx.init(test_maps.of_one(gradients)), jax.jit(tx.update)
    for _ in range(2):
      updates, state = update(stacked(gradients, workers), state)
    return updates, state

  found = run(on_mesh(2))
  assert_same_bits(found, run(demo_optax.Workers.simulated(2)))
  with platform.running_on('cpu'):
    expected = run(demo_optax.Workers.simulated(2))
  for mine, other in zip(found, expected):
    assert test_maps.types(mine) == test_maps.types(other)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), mine, other
    )
  np.testing.assert_array_equal(
    *(np.sign(x['w']) for x, _ in (found, expected))
  )


def test_a_step_is_exported_for_several_platforms(accelerator):
  """In one form, which is right on all of them. That of TPUs constrains layouts."""
  workers = {'gpu': demo_optax.Workers.simulated(2), 'tpu': on_mesh(2)}[
    accelerator
  ]
  tx, params = (
    test_maps.EXCHANGES['published'](workers),
    random_tree(0, {'w': (96, 96)}),
  )
  gradients = stacked(random_tree(1, {'w': (96, 96)}, lead=(2,)), workers)
  args, update = (gradients, tx.init(params), params), jax.jit(tx.update)
  if accelerator == 'tpu':
    with pytest.raises(ValueError, match='LayoutConstraint'):
      export.export(update)(*args)
  exported = export.export(
    update,
    platforms=['cpu', 'tpu', 'cuda'],
    disabled_checks=[
      export.DisabledSafetyCheck.custom_call('LayoutConstraint')
    ],
  )(*args)
  assert_same_bits(exported.call(*args), update(*args))


def test_the_platform_is_that_of_the_mesh(monkeypatch, accelerator):
  """Not of the backend: a CPU host may compile for another."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'another')
  token = platform._running.set(None)
  assert platform.of() == 'another'
  assert platform.of(on_mesh(2).mesh) == 'cpu'
  platform._running.reset(token)
  assert platform.of(on_mesh(2).mesh) == accelerator
