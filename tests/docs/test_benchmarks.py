"""What benchmarks measure is what the library has."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ROOT, random_tree, results, updates_of

import demo_optax


@jax.numpy_dtype_promotion('standard')
def test_the_recipe_that_was_measured_is_demo_muon(monkeypatch):
  for folder in ('examples', 'benchmarks'):
    monkeypatch.syspath_prepend(ROOT / folder)
  import muon
  import optimizers

  settings = {**muon.DEFAULTS, **muon.ROWS['demo_muon'], 'steps': 80}
  workers = demo_optax.Workers.simulated(4)
  measured = optimizers.make(settings, workers).tx
  rates = [
    optimizers.schedule(settings, settings[name]) for name in ('lr', 'other_lr')
  ]
  recipe = optax.chain(
    demo_optax.per_worker(optax.clip_by_global_norm(1.0), workers=workers),
    demo_optax.demo_muon(
      rates[0],
      other_learning_rate=rates[1],
      consistent_rms=(1 - 0.9 * (1 - 64 / 64**2)) ** 0.5,
      workers=workers,
    ),
  )
  rng = np.random.default_rng(0)
  params = {
    'embed': rng.normal(size=(50, 128)),
    'up': rng.normal(size=(128, 192)),
    'norm': rng.normal(size=128),
  }
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  shapes = {k: x.shape for k, x in params.items()}
  gradients = [random_tree(s, shapes, (workers.count,)) for s in range(3)]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
    *(updates_of(tx, params, gradients)[0] for tx in (measured, recipe)),
  )


def test_what_a_relay_does_is_as_measured():
  page = (ROOT / 'benchmarks/README.md').read_text()
  found = results('relay.json')
  goodput = found['goodput']
  for kind in ('steps', 'rounds'):
    one, two = (goodput[job][kind] for job in ('undisturbed', 'killed'))
    assert (
      f'| {one:,} | {two:,} ({goodput[f"goodput_{kind}"]:.1%}) |'.replace(
        '%', ' %'
      )
      in page
    )
  assert not goodput['killed']['rounds_that_differ']
  for row in found['links']:
    assert f'| {row["seconds"]:.3f} |' in page, row
  for row in found['load']:
    assert (
      f'| {row["workers"]} | {row["bytes"] / 1e6:g} MB |'
      f' {row["seconds"]:.3f} | {row["relay_cpu_seconds"]:.3f} |'
    ) in page
  attack = found['attack']
  assert f'{attack["connections"]:,} connections' in page
  assert f'{1e3 * attack["seconds_attacked"]:.1f} ms during' in page
  assert f'for {found["drift"]["rounds"]:,} rounds' in page
  slow = found['slow']
  assert f'{slow["rounds"]} rounds; in {slow["rounds_without_some"]} of' in page
  assert not slow['rounds_that_differ']


@pytest.mark.parametrize(
  'command',
  [
    'step.py --trees tiny --topk 8 --values sign --peers 2 --rounds 1',
    'owners.py merge --tree tiny --workers 2 --rounds 1',
    'folds.py',
  ],
)
def test_commands_run(command):
  name, *args = command.split()
  subprocess.run(
    [sys.executable, str(ROOT / 'benchmarks' / name), *args],
    check=True,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    timeout=900,
  )


def test_a_part_of_scale_goes_on_where_it_ended(tmp_path):
  letters = np.random.default_rng(0).integers(97, 123, 20_000, np.uint8)
  text, records = tmp_path / 'text.npz', tmp_path / 'scale.jsonl'
  np.savez(text, train=letters, valid=letters[:3000])
  small = 'layers=1 width=64 heads=2 context=32 batch=8 steps=4 warmup=2'

  def call(*args: str) -> str:
    command = [sys.executable, str(ROOT / 'benchmarks/scale.py'), *args]
    return subprocess.run(
      [*command, '--file', str(records)],
      check=True,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      capture_output=True,
      text=True,
      timeout=900,
    ).stdout

  part = ['b', '--text', str(text), '--set', *small.split(), 'batch=16']
  assert '1 runs are left' in call(*part, '--minutes', '0')
  assert call(*part).endswith('done\n')
  assert call(*part) == 'done\n'
  assert call('table').count('16 workers') == 2
