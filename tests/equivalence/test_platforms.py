"""The forms of a step that GPUs and TPUs run, on CPU devices."""

import functools

import jax
import numpy as np
import pytest
import test_maps
import test_sharded
from helpers import assert_same_bits, on_mesh, random_tree, stacked
from jax import export

import demo_optax
from demo_optax.numerics import platform


@pytest.fixture(autouse=True, params=['gpu', 'tpu'])
def accelerator(request):
  with platform.running_on(request.param):
    yield request.param


BOTH = ['gpu', 'tpu']


@pytest.mark.core
@pytest.mark.parametrize(
  'name, how, accelerator',
  [
    # A form's loops and branches have types in these two maps.
    *(('published', 'checked', x) for x in BOTH),
    *(('published', '2x4 explicit', x) for x in BOTH),
    *(('cyclic', 'checked', x) for x in BOTH),
    # The others call a form that is shown to be right there: in one of both.
    ('published', 'auto', 'gpu'),
    ('published', 'pmap', 'gpu'),
    ('published', '2x4 auto', 'tpu'),
    ('published', 'step 2x4 auto', 'tpu'),
    ('second', 'explicit', 'gpu'),
    ('owners', 'auto', 'gpu'),
    ('demo', 'checked', 'tpu'),
    ('demo_muon', 'explicit', 'gpu'),
    ('demo_muon', 'checked', 'tpu'),
  ],
  indirect=['accelerator'],
)
def test_maps_have_the_bits_of_the_simulation(name, how):
  make = test_maps.EXCHANGES[name]
  found, expected = test_maps.run(make, how), test_maps.expected_of(name, how)
  assert_same_bits(found, expected)


@pytest.mark.parametrize(
  'accelerator, kind, leaves',
  [('gpu', 'auto', ('both',)), ('tpu', 'explicit', ('inner', 'bias'))],
  indirect=['accelerator'],
)
def test_workers_of_several_devices(kind, leaves):
  found, expected = (
    test_sharded.run(w, 3, test_sharded.exchange, '3d', leaves=leaves)[:2]
    for w in (
      test_sharded.make_workers('3d', kind),
      test_sharded.simulated_workers('3d'),
    )
  )
  assert_same_bits(found, expected)


GRADIENTS = random_tree(0, {'w': (96, 96)}, lead=(2,))


def updates_and_state(exchange, workers):
  """Of the second step."""
  tx = demo_optax.scale_by_demo(
    test_maps.COMPRESSOR,
    0.9,
    workers=workers,
    exchange=exchange,
    update_values='ternary',
  )
  state, update = tx.init(test_maps.of_one(GRADIENTS)), jax.jit(tx.update)
  for _ in range(2):
    updates, state = update(stacked(GRADIENTS, workers), state)
  return updates, state


@functools.cache
def of_a_cpu(exchange):
  with platform.running_on('cpu'):
    return updates_and_state(exchange, demo_optax.Workers.simulated(2))


@pytest.mark.parametrize('exchange', ['all_gather', 'all_to_all'])
def test_forms_agree_but_for_rounding(exchange):
  """Also with chunks in lanes: 144 on a device. A checkpoint fits all forms."""
  found, simulated = (
    updates_and_state(exchange, workers)
    for workers in (on_mesh(2), demo_optax.Workers.simulated(2))
  )
  assert_same_bits(found, simulated)
  expected = of_a_cpu(exchange)
  for mine, other in zip(found, expected):
    assert test_maps.types(mine) == test_maps.types(other)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), mine, other
    )
  np.testing.assert_array_equal(
    *(np.sign(x['w']) for x, _ in (found, expected))
  )


@pytest.mark.core
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
