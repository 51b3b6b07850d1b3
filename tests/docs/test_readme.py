"""What the README says is so: its code, its table, its figures, its links."""

import itertools
import json
import pathlib
import re
import statistics
import tomllib

import jax
import numpy as np

import demo_optax
from demo_optax import __main__ as command
from demo_optax import recipes

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / 'README.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', README, re.S)


def results(name):
  text = (ROOT / 'benchmarks/results' / name).read_text()
  if name.endswith('.json'):
    return json.loads(text)
  return [json.loads(line) for line in text.splitlines()]


def test_it_is_short():
  assert len(README.splitlines()) <= 90


def test_blocks_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert len(BLOCKS) == 1
  names = {}
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    exec(BLOCKS[0], names)
    batch = {'x': np.ones((16, 8), np.float32), 'y': np.ones((16, 1))}
    args = names['model'], names['optimizer'], batch
    losses = [float(names['train_step'](*args)) for _ in range(20)]
    assert losses[-1] < losses[0]


# The rows of the table, by what their runs have in results.
MUON = {'method': 'muon', 'lr': 0.02, 'other_lr': 0.012, 'ns_steps': 5,
        'preconditioning': 'frobenius'}
BEST = {'other_lr': 0.006, 'average': 'workers'}
ROWS = {
    'AdamW, gradients averaged in float32': {'method': 'adamw'},
    'Muon (`optax.contrib.muon`), gradients averaged': MUON,
    '`demo_muon`, `topk=128`, 24 of each row': {**BEST, 'topk': 128},
    '`demo_muon`': {**BEST, 'topk': 64, 'rows': 8},
    '`demo_muon`, `topk=8`': {**BEST, 'topk': 8, 'rows': 8},
    'Muon at every worker, an exchange every 10 steps'
    ' ([how](docs/muon.md#what-to-set))': {
        **MUON, 'method': 'demo-diloco', 'inner': 'muon', 'outer_lr': 0.5,
        'topk': 128, 'decay': 0.95},
    'DeMo as published, our index codes': {
        'method': 'demo', 'values': 'float32', 'decay': 0.99},
}
# What a run of muon.jsonl has that is no setting.
SEEN = {'loss', 'train_loss', 'curve', 'sent', 'received', 'dense',
        'cpu_seconds_per_step', 'jax', 'seed'}
# What runs must have in common for their losses to be compared.
COMPARABLE = ('task', 'data', 'width', 'workers', 'batch', 'steps')


def runs(settings):
  return [r for r in results('muon.jsonl')
          if {k: v for k, v in r.items() if k not in SEEN} == settings]


def test_the_table_is_what_was_measured():
  for label, settings in ROWS.items():
    found = runs(settings)
    assert len(found) == 3, label
    losses = [r['loss'] for r in found]
    sent, received, dense = (
        found[0][kind] / 1e3 for kind in ('sent', 'received', 'dense'))
    digits = 0 if sent == dense else 1
    times = '' if sent == dense else f' {dense / sent:,.0f}x'
    assert (
        f'| {label} | {statistics.mean(losses):.3f} ({min(losses):.3f} -'
        f' {max(losses):.3f}) | {sent:,.{digits}f} / {received:,.{digits}f} kB'
        f' |{times} |') in README


def test_muons_settings_are_what_was_measured():
  """And nothing that was run with three seeds is 0.01 better for its bytes."""
  measured = {}
  for run in results('muon.jsonl'):
    settings = {k: v for k, v in run.items() if k not in SEEN}
    if not settings.keys() & {'method', *COMPARABLE}:
      measured.setdefault(json.dumps(settings), []).append(run)
  measured = {
      name: (found[0]['sent'], statistics.mean(r['loss'] for r in found))
      for name, found in measured.items() if len(found) == 3}
  table = (ROOT / 'docs/muon.md').read_text().split('## What to send')[1]
  rows = re.findall(
      r'^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$', table, re.M)
  assert len(measured) > len(rows) == 4
  for topk, row_topk, *written in rows:
    chosen = {**BEST, 'topk': int(topk), 'rows': int(row_topk)}
    defaults = {'topk': 32, 'rows': 24}
    found = runs({
        k: v for k, v in chosen.items() if defaults.get(k) != v})
    loss = statistics.mean(r['loss'] for r in found)
    sent, received = (found[0][kind] / 1e3 for kind in ('sent', 'received'))
    assert written == [f'{loss:.3f}', f'{sent:.1f}', f'{received:.1f}']
    assert all(
        other > loss - 0.01 for size, other in measured.values()
        if size <= found[0]['sent'])


def test_other_texts_and_more_workers_are_what_was_measured():
  for other, words in (
      ({'data': 'stdlib'}, 'ended {} % above Muon and {} % below AdamW (three'),
      ({'workers': 16}, 'with 16 workers {} % above and {} % below (one seed)'),
  ):
    recipe, muon, adamw = (
        statistics.mean(r['loss'] for r in runs({**settings, **other}))
        for settings in (ROWS['`demo_muon`'], MUON, {'method': 'adamw'}))
    assert words.format(
        f'{100 * (recipe / muon - 1):.1f}',
        f'{100 * (1 - recipe / adamw):.1f}') in README
  demo, adamw = (
      statistics.mean(r['loss'] for r in runs(ROWS[label])) for label in (
          'DeMo as published, our index codes',
          'AdamW, gradients averaged in float32'))
  above = f'{100 * (demo / adamw - 1):.1f} %'
  assert f'DeMo as published ended {above} above AdamW' in README


def test_seconds_are_what_was_measured():
  def step(workers, link, method):
    return next(
        r['step'] for r in results('links_owners.json')
        if (r['workers'], r['link'], r['method']) == (workers, link, method))

  for workers, link, digits in ((2, '100 Mbit/s', 2), (2, '10 Mbit/s', 2),
                                (2, '1 Gbit/s', 2), (8, '1 Gbit/s', 2)):
    demo = step(workers, link, 'all_gather')
    adamw = step(workers, link, 'AdamW bfloat16')
    second = f'{adamw:.1f}' if adamw > 10 else f'{adamw:.2f}'
    assert re.search(
        rf'{demo:.{digits}f}( s with DeMo)? and {second} s', README), link
  for method, words in (
      ('demo_muon', '{} s of CPU with `demo_muon`'),
      ('Muon', '{} with Muon'), ('AdamW', '{} with AdamW')):
    seconds = next(
        r['cpu_seconds'] for r in results('muon_seconds.json')
        if r['method'] == method)
    assert words.format(f'{seconds:.2f}') in README


def steps_to(run, loss):
  """The step at which a run's validation loss was reached, interpolated."""
  curve = [(int(step), value) for step, value in run['curve'].items()]
  for (step, before), (later, after) in itertools.pairwise(curve):
    if after <= loss:
      return step + (later - step) * (before - loss) / (before - after)
  raise AssertionError(f'{run} does not reach {loss}')


def test_minutes_are_what_was_measured():
  """Seconds of a step over links, times the steps to AdamW's final loss."""
  adamw = [r['loss'] for r in runs({'method': 'adamw'})]
  counts = {
      method: statistics.mean(
          steps_to(r, statistics.mean(adamw)) for r in runs(settings))
      for method, settings in (
          ('demo_muon', ROWS['`demo_muon`']), ('Muon bfloat16', MUON))
  }
  counts['AdamW bfloat16'] = 800
  for link, words in (
      ('100 Mbit/s', '{} minutes with `demo_muon`, {} with Muon and {} with'),
      ('1 Gbit/s', 'at 1 Gbit/s {}, {} and {}.')):
    minutes = [
        next(r['step'] for r in results('links_muon.json')
             if (r['link'], r['method']) == (link, method)) * steps / 60
        for method, steps in counts.items()
    ]
    assert words.format(*(f'{m:.1f}' for m in minutes)) in README


def test_what_1024_workers_receive():
  params = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(tuple(s), np.float32),
      command.MODELS['300M'], is_leaf=lambda s: isinstance(s, list))
  for compressor, values, words in (
      (recipes.muon_compressors(params), 'int4',
       'receives {} MB a step with `demo_muon` by the default exchange, and {}'
       " MB by that one with `update_values='int4'`"),
      (demo_optax.dct_topk(topk=8, values='sign'), 'ternary',
       'with `demo` and `topk=8` in signs {} and {} MB.')):
    received = (
        demo_optax.plan(
            params, compressor, 1024, exchange=exchange,
            update_values=values).received_bytes / 1e6
        for exchange in ('all_gather', 'all_to_all'))
    assert words.format(*(f'{size:,.0f}' for size in received)) in README


def test_the_command_that_counts_bytes(capsys):
  words = re.search(r'`python -m demo_optax ([^`]+)`', README)
  command.main(words.group(1).split())
  assert '1.08 MB, receives    7.59 MB' in capsys.readouterr().out


def test_one_version_everywhere():
  version = demo_optax.__version__
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  assert project['version'] == version
  assert f'\nversion: {version}\n' in (ROOT / 'CITATION.cff').read_text()
  assert f'Version {version}, not released' in README
  assert f'## {version} (unreleased)' in (ROOT / 'CHANGELOG.md').read_text()


def test_what_it_links_to_is_there():
  """Files, and the headings in them."""
  targets = re.findall(r'\]\(([^):]+)\)', README)
  assert len(targets) > 15
  for target in targets:
    path, _, anchor = target.partition('#')
    assert (ROOT / path).exists(), path
    if anchor:
      headings = re.findall(r'^#+ (.*)$', (ROOT / path).read_text(), re.M)
      assert anchor in [h.lower().replace(' ', '-') for h in headings]
  for picture in re.findall(r'!\[[^\]]+\]\(([^)]+)\)', README):
    assert (ROOT / picture).stat().st_size > 10_000
