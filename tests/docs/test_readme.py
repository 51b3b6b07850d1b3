"""What the README says is so: its code, its table, its figures."""

import re
import statistics
import sys
import tomllib

import jax
import pytest
from helpers import ROOT, results, shapes_of

import demo_optax
from demo_optax import __main__ as command
from demo_optax import recipes

sys.path[:0] = [str(ROOT / 'benchmarks'), str(ROOT / 'docs')]

import gain
import muon
import readme_commands

README = (ROOT / 'README.md').read_text()
GUIDE = (ROOT / 'docs/is_it_for_me.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', README, re.S)
RUNS = gain.RUNS


def test_it_is_short():
  assert len(README.split()) <= 850


def test_the_block_trains_and_prints_loss_and_bytes(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (block,) = BLOCKS
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    exec(block, {})
  printed = capsys.readouterr().out
  losses = [float(x) for x in re.findall(r'^\d+ (\S+)$', printed, re.M)]
  assert len(losses) == 6 and losses[-1] < 0.2 * losses[0]
  sent, received, averaged = re.search(
    r'sends (\S+) kB and receives (\S+) kB, where a bfloat16 all-reduce moves'
    r' (\S+) kB',
    README,
  ).groups()
  for line in (
    rf'this exchange +sends +{sent} kB, receives +{received} kB',
    rf'all-reduce bfloat16 +sends +{averaged} kB',
  ):
    assert re.search(line, printed), line


def mean_loss(row, seeds=(0, 1, 2), **other):
  found = [r for r in gain.runs(row, **other) if r.get('seed', 0) in seeds]
  assert len(found) in (1, 3), row
  return statistics.mean(r['loss'] for r in found)


def test_the_caption_is_what_was_measured():
  took = [f'{gain.minutes(name, "100 Mbit/s"):.1f}' for name in gain.METHODS]
  adamw, averaged, recipe = (
    mean_loss(row) for row in ('AdamW', 'Muon', 'demo_muon')
  )
  assert (
    f"`demo_muon` takes {took[2]} minutes to AdamW's final loss of"
    f' {adamw:.3f}, Muon {took[1]} and AdamW {took[0]}. It ends at'
    f' {recipe:.3f}, {100 * (recipe / averaged - 1):.1f} % above Muon.'
  ) in README


def test_minutes_over_other_links_are_what_was_measured():
  links = ('10 Mbit/s', '100 Mbit/s', '1 Gbit/s', '100 Mbit/s, 20 ms')
  for label in gain.METHODS:
    cells = [f'{gain.minutes(label, link):.1f}' for link in links]
    assert f'| {label} | {" | ".join(cells)} |' in GUIDE


def test_the_run_on_an_h100_is_as_recorded():
  found = results('gpt_h100.json')
  assert f'{found["parameters"] / 1e6:.1f} M parameters' in README
  rows = [
    f'| {run["valid_loss"]["320"]:.3f} | {run["valid_loss"]["640"]:.3f} |'
    f' {run["step_ms"]:.0f} |'
    for run in found['runs']
    if '640' in run['valid_loss']
  ]
  assert len(rows) == 3
  assert all(row in README for row in rows)


def test_commands_are_whole_and_losses_in_their_range():
  """CI runs them; here that they need nothing that was done before."""
  first, second = readme_commands.commands(README)
  for typed in (first, second):
    assert typed.startswith('(python3 -m venv .venv && .venv/bin/pip install')
  assert first.endswith('examples/train_lm.py)')
  assert second.endswith('pytest)')
  for run in gain.runs('demo_muon'):
    readme_commands.check_loss(README, run['loss'])
  with pytest.raises(AssertionError):
    readme_commands.check_loss(README, 1.5)


def test_what_1024_workers_receive():
  params = shapes_of('300M')
  received = [
    demo_optax.plan(
      params,
      recipes.muon_compressors(params),
      1024,
      exchange=exchange,
      update_values='int4',
    ).received_bytes
    / 1e6
    for exchange in ('all_gather', 'all_to_all')
  ]
  assert 'from {:,.0f} to {:,.0f} MB'.format(*received) in GUIDE


def test_the_command_that_counts_bytes(capsys):
  words = re.search(r'`python -m demo_optax ([^`]+)`', README)
  command.main(words.group(1).split())
  assert '11.31 MB, receives   79.18 MB' in capsys.readouterr().out


def test_one_version_everywhere():
  version = demo_optax.__version__
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  assert project['version'] == version
  assert f'\nversion: {version}\n' in (ROOT / 'CITATION.cff').read_text()
  assert f'Version {version}, not released' in README
  assert f'## {version} (unreleased)' in (ROOT / 'CHANGELOG.md').read_text()


def test_muons_settings_are_what_was_measured():
  """And nothing that was run with three seeds is 0.01 better for its bytes."""
  measured = {}
  for run in RUNS:
    settings = muon.settings_of(run)
    if all(settings[k] == muon.DEFAULTS[k] for k in ('method', *muon.SETTING)):
      measured.setdefault(muon.name_of(run), []).append(run)
  measured = {
    name: (found[0]['sent'], statistics.mean(r['loss'] for r in found))
    for name, found in measured.items()
    if len(found) == 3
  }
  table = (ROOT / 'docs/muon.md').read_text().split('## What to send')[1]
  rows = re.findall(
    r'^\| `.+` \| \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$', table, re.M
  )
  assert len(measured) > len(rows)
  for row, written in zip(gain.SETTINGS, rows, strict=True):
    found = gain.runs(row)
    loss = statistics.mean(r['loss'] for r in found)
    sent, received = (found[0][kind] / 1e3 for kind in ('sent', 'received'))
    assert written == (f'{loss:.3f}', f'{sent:.1f}', f'{received:.1f}')
    assert all(
      other > loss - 0.01
      for size, other in measured.values()
      if size <= found[0]['sent']
    )


def test_other_texts_and_more_workers_are_what_was_measured():
  page = (ROOT / 'docs/choosing.md').read_text()
  for name, other in (
    ('another text', {'data': 'stdlib'}),
    ('16 workers', {'workers': 16, 'seeds': (0,)}),
  ):
    recipe, averaged, adamw = (
      mean_loss(row, **other) for row in ('topk=64', 'Muon', 'AdamW')
    )
    cells = [
      f'+{100 * (recipe / averaged - 1):.1f} %',
      f'-{100 * (1 - recipe / adamw):.1f} %',
    ]
    assert re.search(
      rf'\| {name}[^|]* \| \d \| {re.escape(" | ".join(cells))} \|', page
    )


def test_seconds_of_compute_are_what_was_measured():
  cells = [
    f'{next(r["cpu_seconds"] for r in results("muon_seconds.json") if r["method"] == method):.2f}'
    for method in ('AdamW', 'Muon', 'demo_muon')
  ]
  assert f'| 1.0 M parameters | {" | ".join(cells)} |' in GUIDE
