"""What benchmarks measure is what the library has."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ROOT, random_tree, results, updates_of

import demo_optax
from demo_optax.recipes import links

sys.path.insert(0, str(ROOT / 'benchmarks'))

import muon

PAGE = (ROOT / 'benchmarks/README.md').read_text()


@jax.numpy_dtype_promotion('standard')
def test_the_recipe_that_was_measured_is_demo_muon(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / 'examples')
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


def rows(section):
  """Cells of the tables below a heading, and below those that are under it."""
  text = PAGE.split(f'\n## {section}\n')[1].split('\n## ')[0]
  lines = re.findall(r'^\| (.*) \|$', text, re.M)
  return [[cell.strip() for cell in line.split('|')] for line in lines]


def percent(share):
  return f'{100 * share:+.1f} %'


def test_losses_of_methods_are_as_recorded():
  """Rows are in the order of `muon.ROWS`."""
  records = muon.read()
  table = rows('Muon through the exchange')[1 : len(muon.ROWS) + 1]
  goal = statistics.mean(
    r['loss'] for r in muon.runs_of(muon.ROWS['AdamW'], records)
  )
  seconds = {
    r['method']: r['cpu_seconds'] for r in results('muon_seconds.json')
  }
  assert muon.ROWS.keys() - seconds.keys() == {'demo_muon, period 8'}
  for cells, (name, settings) in zip(table, muon.ROWS.items(), strict=True):
    found = muon.runs_of(settings, records)
    losses = [r['loss'] for r in found]
    reached = [muon.steps_to(r, goal) for r in found]
    if settings.get('method') == 'adamw':
      reached = [800]
    assert len(losses) == 3
    assert cells[1:] == [
      f'{statistics.mean(losses):.3f} ({min(losses):.3f} - {max(losses):.3f})',
      f'{found[0]["sent"] / 1e3:,.1f} / {found[0]["received"] / 1e3:,.1f}',
      f'{found[0]["dense"] / found[0]["sent"]:.0f}x',
      '' if None in reached else f'{statistics.mean(reached):.0f}',
      f'{seconds[name]:.2f}' if name in seconds else '',
    ], cells


LARGE = {'width': 512, 'layers': 3, 'heads': 8, 'steps': 400}
# Of each row that compares with Muon: its settings of `demo_muon`, and of Muon.
SETTINGS = [
  ({'workers': 16, 'lr': 3e-3}, {}),
  ({'workers': 16, 'lr': 3e-3, 'topk': 128, 'rows': 24}, {}),
  ({'data': 'stdlib'}, {}),
  (
    LARGE | {'lr': 1.2e-3, 'other_lr': 2.25e-3},
    LARGE | {'other_lr': 4.5e-3},
  ),
  ({'data': 'stdlib', 'steps': 2400}, {'lr': 1e-2}),
  ({'steps': 5000}, {'lr': 1e-2}),
]


def test_other_settings_are_as_recorded():
  table = [c for c in rows('Muon through the exchange') if '%' in c[-1]]
  del table[-2]  # the lowest loss of the same run
  for cells, (ours, averaged) in zip(table, SETTINGS, strict=True):
    text = {k: v for k, v in ours.items() if k in ('data', 'steps')}
    losses = [
      statistics.mean(r['loss'] for r in muon.runs_of(row, muon.read()))
      for row in (
        muon.ROWS['Muon'] | text | averaged,
        muon.ROWS['topk=64'] | ours,
      )
    ]
    assert cells[3:5] == [f'{loss:.3f}' for loss in losses], cells
    assert cells[5] == percent(losses[1] / losses[0] - 1), cells


def test_rates_of_muon_carry_over_as_recorded():
  records = muon.read()

  def losses(name, width, workers):
    heads = {64: 2, 192: 6, 384: 6}[width]
    found = muon.runs_of(
      muon.ROWS[name]
      | {'data': 'botocore', 'steps': 1600, 'width': width, 'heads': heads}
      | {'workers': workers},
      records,
    )
    by_seed = {r.get('seed', 0): r['loss'] for r in found}
    return [by_seed[seed] for seed in range(3) if seed in by_seed]

  table = rows("Muon's rates")
  start = table.index(['width', 'Muon', '`demo_muon`', 'period of 8'])
  for cells in table[start + 1 : start + 6]:
    width, *sixteen = cells[0].split(',')
    averaged = losses('Muon', int(width), 4)
    shown = ', '.join(f'{loss:.3f}' for loss in averaged)
    assert cells[1] == ('' if sixteen else shown)
    names = 'demo_muon', 'demo_muon, period 8'
    for name, cell in zip(names, cells[2:]):
      found = losses(name, int(width), 16 if sixteen else 4)
      if not found:
        assert not cell
        continue
      above = statistics.mean(found) / statistics.mean(averaged[: len(found)])
      shown = ', '.join(f'{loss:.3f}' for loss in found)
      assert cell == f'{shown} ({percent(above - 1)})'


def test_a_text_that_is_not_repeated_is_as_recorded():
  records = muon.read()

  def loss(name, **other):
    settings = muon.ROWS[name] | {'data': 'botocore', 'steps': 1600} | other
    (found,) = (
      r for r in records if muon.settings_of(r) == muon.settings_of(settings)
    )
    return found['loss']

  names = [
    'AdamW',
    'Muon',
    'demo_muon',
    'topk=128',
    'topk=64',
    'topk=8',
    'DeMo as published',
    'demo_diloco, Muon inside',
  ]
  table = rows('A text that is not repeated')
  adamw, averaged = loss('AdamW'), loss('Muon')
  for name, cells in zip(names, table[1:], strict=False):
    found = loss(name)
    assert cells[1:4] == [
      f'{found:.3f}',
      '' if name == 'Muon' else percent(found / averaged - 1),
      '' if name == 'AdamW' else percent(found / adamw - 1),
    ], name
  for name, cells in zip(('AdamW', 'Muon', 'topk=64'), table[-3:]):
    losses = [loss(name, seed=seed) for seed in range(3)]
    assert cells[1] == ', '.join(f'{x:.3f}' for x in losses)
    assert cells[2] == f'{statistics.mean(losses):.3f}'
    assert cells[6] == f'{loss(name, steps=4800):.3f}'


def grid_of(words):
  """The settings of all runs that `muon.py run` would do."""
  names, axes = [], {}
  words = iter(words)
  for word in words:
    if word == '--row':
      names.append(next(words))
    else:
      axes.update([muon.parse(word)])
  chosen = [muon.ROWS[name] for name in names] or [{}]
  return [
    muon.settings_of(row | other)
    for row in chosen
    for other in muon.grid(**axes)
  ]


@pytest.mark.parametrize('name', ['README', 'TRIED'])
def test_every_run_that_a_command_names_is_recorded(name):
  text = (ROOT / f'benchmarks/{name}.md').read_text().replace('\\\n', '')
  recorded = list(map(muon.settings_of, muon.read()))
  commands = re.findall(r'muon\.py run ([^`\n#]+)', text)
  assert len(commands) >= 8
  for command in commands:
    for settings in grid_of(shlex.split(command)):
      assert settings in recorded, command


def test_newton_schulz_iterations_are_those_that_are_fitted():
  import newton_schulz

  fitted = newton_schulz.fit(low=0.003, count=4, margin=0.02)
  assert fitted == links.NEWTON_SCHULZ


def attempts():
  text = (ROOT / 'benchmarks/TRIED.md').read_text()
  return dict(re.findall(r'^### (.+)\n((?:- .+\n)+)', text, re.M))


@pytest.mark.parametrize('name', attempts())
def test_an_attempt_is_five_lines_with_recorded_losses(name):
  lines = attempts()[name]
  labels = re.findall(r'^- \*\*(\w+)\*\*: ', lines, re.M)
  assert labels == ['What', 'Why', 'Figure', 'Command', 'Verdict']
  _, _, figure, command, _ = lines.splitlines()
  assert len(lines.split()) <= 125
  runs = [
    settings
    for words in re.findall(r'`muon\.py run ([^`]+)`', command)
    for settings in grid_of(shlex.split(words))
  ]
  if runs and 'table below' not in figure:
    losses = {
      f'{r["loss"]:.3f}' for r in muon.read() if muon.settings_of(r) in runs
    }
    seeds = {json.dumps({**s, 'seed': 0}): s for s in runs}
    for settings in seeds.values():
      found = muon.runs_of({**settings, 'seed': 0}, muon.read())
      losses.add(f'{statistics.mean(r["loss"] for r in found):.3f}')
    assert losses & set(re.findall(r'\d\.\d{3}', figure)), losses


def test_losses_of_late_matrices_are_as_recorded():
  narrow = {'width': 64, 'heads': 2}
  settings = [
    narrow | {'steps': 600},
    narrow | {'steps': 600, 'workers': 16},
    narrow | {'steps': 1600, 'data': 'botocore'},
    {},
  ]
  ours = {'method': 'demo_muon', 'lr': 2e-2, 'other_lr': 1.2e-2}
  ours |= {'topk': 64, 'rows': 8}
  records = muon.read()

  def losses(setting):
    found = muon.runs_of(ours | setting, records)
    assert {r.get('seed', 0) for r in found} == {0, 1, 2}
    return statistics.mean(r['loss'] for r in found)

  for setting in settings:
    late = losses(setting | {'delayed': 'matrices'})
    cost = percent(late / losses(setting) - 1)
    assert f'({cost})' in attempts()['Late matrices']


def test_values_compressors_and_local_updates_are_as_recorded():
  runs = {}
  for r in results('values.jsonl'):
    runs.setdefault((r['values'], r['topk']), []).append(r)
  for name, *cells in rows('Bits of the values')[1:]:
    for cell in cells:
      topk = int(re.search(r'\((\d+),', cell).group(1))
      found = runs[name.strip('`'), topk]
      loss = statistics.mean(r['valid_loss'] for r in found)
      assert cell == f'{loss:.3f} ({topk}, {found[0]["sent"] / 1e3:.1f})'
  losses = [f'{r["valid_loss"]:.3f}' for r in results('compressors.jsonl')]
  table = rows('Compressors and bases')
  assert [cells[2] for cells in table[1:9]] == losses[:8]
  for cells in table[10:]:
    assert cells[1] in losses and cells[4] in losses
  best = {}
  for r in results('diloco.jsonl'):
    key = r['method'], r['workers']
    best[key] = min(r['valid_loss'], best.get(key, 9))
  written = [cells[2].split(' / ') for cells in rows('Every H steps')[1:]]
  recorded = [f'{loss:.3f}' for loss in best.values()]
  assert len(written) == 5
  assert all(x in recorded for pair in written for x in pair)


def test_times_are_as_recorded():
  found = results('step.json')['results']['42M']
  written = [cells[1] for cells in rows('A step')[1:]]
  assert sorted(written) == sorted(f'{x["ms"]:.0f}' for x in found.values())
  found = results('step_h100.json')
  alone, together = found['after'], found['one_change_at_a_time']
  recorded = [f'{x["ms"]:.1f}' for x in alone.values()]
  recorded += [f'{x:.1f}' for x in together.values()]
  table = rows('On an H100')
  assert all(cells[1] in recorded for cells in table[1:])
  for part in results('owners.json').values():
    for r in part['rows']:
      if r['exchange'] != 'published':
        (cells,) = (
          c for c in rows('Owners of chunks')[1:5] if c[0] == str(r['workers'])
        )
        assert f'{1e3 * r["median"]:.0f}' in cells
  links = results('links_owners.json') + results('links_muon.json')
  seconds = {f'{r["step"]:.2f}' for r in links}
  seconds |= {f'{r["step"]:.1f}' for r in links}
  for _, *cells in rows('Slow links'):
    for cell in cells:
      number = re.match(r'[\d.]+(?= s,|$)', cell)
      assert number is None or number.group() in seconds, cell


def test_what_was_compiled_is_as_recorded():
  found = results('ahead.json')['42M']
  table = rows('Compiled for TPUs and GPUs')[1:]
  assert {cells[0] for cells in table} == set(found)
  for cells in table:
    run = found[cells[0]]
    assert cells[1:] == [
      str(run.get('launches', run['operations'])),
      f'{run["temporaries"]:.2f}',
      f'{run["bytes"]:.1f}',
      f'{run["code"] / 2**20:.1f}',
      f'{run["milliseconds"]:.2f}' if 'milliseconds' in run else '',
      f'{run["compile_seconds"]:.0f}',
    ]


def test_what_a_relay_does_is_as_measured():
  found = results('relay.json')
  goodput = found['goodput']
  for kind in ('steps', 'rounds'):
    one, two = (goodput[job][kind] for job in ('undisturbed', 'killed'))
    share = f'{goodput[f"goodput_{kind}"]:.1%}'.replace('%', ' %')
    assert f'| {one:,} | {two:,} ({share}) |' in PAGE
  assert not goodput['killed']['rounds_that_differ']
  table = rows('Workers with a relay')
  for row in found['links']:
    written = f'{row["seconds"]:.3f} ({row["least"]:.3f})'
    assert any(written in cells for cells in table), row
  loads = [
    [
      f'{row["workers"]}',
      f'{row["bytes"] / 1e6:g} MB',
      f'{row["seconds"]:.3f}',
      f'{row["relay_cpu_seconds"]:.3f}',
      f'{row["relay_mb"]:.0f}',
    ]
    for row in found['load']
  ]
  first = [cells[-1] for cells in table].index('MB of the relay') + 1
  assert len(table) - first >= 4
  assert all(cells in loads for cells in table[first:])
  attack = found['attack']
  assert f'{attack["connections"]:,} connections' in PAGE
  assert f'{1e3 * attack["seconds_attacked"]:.1f} ms during' in PAGE
  assert f'for {found["drift"]["rounds"]:,} rounds' in PAGE
  slow = found['slow']
  assert f'{slow["rounds"]} rounds; in {slow["rounds_without_some"]} of' in PAGE
  kills = results('kills.json')
  assert kills['ended'] == kills['unequal'] == 0
  counted = f'{kills["kills"]}, at random moments, and'
  assert f'{counted} {kills["kills_of_the_relay"]} of the relay' in PAGE
  assert f'{kills["rounds"]:,} rounds, no worker ended or differed' in PAGE
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


@pytest.mark.parametrize(
  'command, said',
  [
    (
      'step.py --reference nowhere.py',
      '--reference must be a file, got nowhere',
    ),
    ('host.py nowhere', 'nowhere must be a clone of this repository.'),
    ('muon.py run lrr=1e-3', 'no setting: lrr'),
    ('muon.py run --row demo-muon', "invalid choice: 'demo-muon'"),
  ],
)
def test_what_is_wrong_in_a_command_is_named_in_one_line(command, said):
  name, *args = command.split()
  run = subprocess.run(
    [sys.executable, str(ROOT / 'benchmarks' / name), *args],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert run.returncode
  assert said in run.stderr.splitlines()[-1]


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
