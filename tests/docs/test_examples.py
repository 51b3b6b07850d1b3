"""The main job, small: it learns, resumes to the bit, and draws."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT

EXAMPLES = ROOT / 'examples'
sys.path[:0] = [str(EXAMPLES), str(ROOT / 'benchmarks')]

import metrics
import train_lm

import demo_optax

pytestmark = pytest.mark.usefixtures('standard_promotion', 'rank_promotion')

SMALL = [
  '--width',
  '32',
  '--heads',
  '2',
  '--layers',
  '1',
  '--context',
  '32',
  '--steps',
  '12',
  '--eval-every',
  '6',
  '--save-every',
  '6',
  '--batch',
  '8',
  '--warmup',
  '2',
]


def run(tmp_path, *args):
  return train_lm.main([*SMALL, '--out', str(tmp_path), *args])


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_compare_draws_and_tells(tmp_path, capsys):
  recipe, adamw, muon = run(tmp_path, '--compare', '--workers', '2')
  assert (tmp_path / 'loss.png').stat().st_size > 10_000
  sent = [r['plan'].sent_bytes for r in (recipe, adamw, muon)]
  assert sent[0] < 0.1 * sent[1] == 0.1 * sent[2]
  out = capsys.readouterr().out
  assert out.count('Compiling the first step.') == 3 and 'A sample of' in out
  assert out.count('step 12 of 12: loss') == 3
  # Bytes of 12 steps, beside those of all-reduces.
  for done, count in zip((recipe, adamw, muon), sent):
    dense = done['plan'].dense_bytes(4)
    assert re.search(
      rf'^{done["name"]} +{done["valid_loss"]:.4f} +{12e-6 * count:.1f} .*'
      rf' {6e-6 * dense:.1f} +{12e-6 * dense:.1f} ',
      out,
      re.M,
    )
  for name in ('demo_muon', 'adamw', 'muon'):
    config, *records = read(tmp_path / name / 'metrics.jsonl')
    assert config['config']['optimizer'] == name
    losses = [r['loss'] for r in records]
    assert len(losses) == 12 and np.mean(losses[-3:]) < losses[0] - 0.3
    assert 'valid_loss' in records[-1] and records[-1]['sent'] > 0


@pytest.mark.parametrize('workers', ['2', '9'], ids=['mesh', 'simulated'])
def test_resumed_equals_uninterrupted(tmp_path, workers, capsys):
  args = [
    '--workers',
    workers,
    '--optimizer',
    'demo',
    '--batch',
    '36' if workers == '9' else '8',
  ]
  (whole,) = run(tmp_path / 'whole', *args)
  # Stopped after 6 of the same 12 steps: later checkpoints are gone.
  shutil.copytree(tmp_path / 'whole', tmp_path / 'parts')
  folder = tmp_path / 'parts' / 'demo' / 'checkpoints'
  assert sorted(p.name for p in folder.iterdir()) == ['12', '6']
  shutil.rmtree(folder / '12')
  (second,) = run(tmp_path / 'parts', *args, '--resume')
  assert [r['step'] for r in second['records']] == list(range(1, 13))
  assert second['records'] == whole['records']
  drawn = (tmp_path / name / 'loss.png' for name in ('whole', 'parts'))
  assert len({picture.read_bytes() for picture in drawn}) == 1
  expected = '2 workers on' if workers == '2' else '9 simulated workers on'
  assert expected in capsys.readouterr().out
  arrays = [
    checkpoint(tmp_path / name / 'demo', 12) for name in ('whole', 'parts')
  ]
  assert arrays[0].keys() == arrays[1].keys()
  for key in arrays[0]:
    np.testing.assert_array_equal(arrays[0][key], arrays[1][key])


def checkpoint(folder, step):
  """Read as anybody's Orbax code would."""
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(
      (folder / f'checkpoints/{step}/state').absolute()
    )


def test_resume_with_another_number_of_workers(tmp_path, capsys):
  (first,) = run(tmp_path, '--workers', '2')
  for args, says in (
    (['--workers', '4', '--resume'], '(?s)must fit like.*Here: --resize'),
    (
      ['--workers', '2', '--resume', '--width', '64'],
      '(?s)must fit like.*float32',
    ),
    (['--workers', '2', '--resume', '--seed', '1'], '--seed: 0 there, 1 here'),
    (['--workers', '2'], 'give --resume'),
  ):
    with pytest.raises(SystemExit, match='2'):
      run(tmp_path, *args)
    assert re.search(says, capsys.readouterr().err)
  # Stopped while it wrote a record.
  with (tmp_path / 'demo_muon/metrics.jsonl').open('a') as file:
    file.write('{"step": 13, "lo')
  (more,) = run(
    tmp_path, '--workers', '4', '--resume', 'auto', '--resize', '--steps', '14'
  )
  assert more['records'][-1]['loss'] < first['records'][0]['loss'] - 0.3
  config, *records = read(tmp_path / 'demo_muon' / 'metrics.jsonl')
  assert 'config' in config and records == more['records']
  assert [r['step'] for r in records] == list(range(1, 15))
  assert all(r.keys() >= INFO for r in records)


def test_workers_that_part_stop_the_run(tmp_path, monkeypatch):
  parted = demo_optax.replicas.Difference('w', (3,), (3,), (0,))
  monkeypatch.setattr(demo_optax, 'check_replicas', lambda *_: [parted])
  with pytest.raises(SystemExit, match='After step 1 copies differ'):
    run(tmp_path, '--workers', '2', '--check-every', '1', '--steps', '2')


INFO = {'num_excluded', 'sent_energy', 'residual_norm', 'mean_senders'}


def test_every_flag_has_a_help_text(capsys):
  with pytest.raises(SystemExit):
    train_lm.parse_args(['--help'])
  (_, options) = capsys.readouterr().out.split('options:')
  flags = re.split(r'^  (?=-)', options, flags=re.M)[1:]
  assert len(flags) > 25
  for flag in flags:
    assert re.search(r'\S(  +|\n +)\w', flag), flag


# Mistakes in flags ------------------------------------------------------------


@pytest.mark.parametrize(
  'args, says',
  [
    (['--heads', '5'], '--heads 5 must divide --width 32'),
    (['--resume', '--overwrite'], '--resume goes with neither'),
    (['--compare', '--resume'], '--resume goes with neither'),
    (['--no-such-flag'], 'unrecognized arguments: --no-such-flag'),
    (['--optimizer', 'demo-muon'], "invalid choice: 'demo-muon'"),
    (['--data', '/no/text'], '--data: must be a file or a folder that exists'),
    (['--data', __file__, '--context', '99999'], '--data: The validation text'),
    (['--keys', '/no/keys'], '--keys: must be a file or a folder that exists'),
    (['--steps', '-3'], '--steps: must be a whole number from 1 to 2147483647'),
    (['--lr', '0'], "--lr: must be a number above 0, got '0'."),
    (['--relay', 'here:7077'], '--relay: must be tcp://HOST:PORT'),
    (['--relay', 'tcp://127.0.0.1:7077'], '--relay needs --workers'),
    (
      ['--relay', 'tcp://h:1', '--workers', '2', '--rank', '2'],
      '--rank 2: the workers are numbered from 0 to 1.',
    ),
    (['--process', '0'], '--process without --coordinator, --processes'),
    (
      ['--process', '2', '--processes', '2', '--coordinator', 'here:1'],
      'numbered from 0 to 1',
    ),
    (
      ['--process', '0', '--processes', '2', '--coordinator', 'here'],
      'must be HOST:PORT',
    ),
    (
      ['--process', '0', '--processes', '2', '--coordinator', 'here:99999'],
      'with a port from 1 to 65535',
    ),
    (['--resume'], 'Save one first'),
    (['--workers', '2', '--batch', '3'], 'must be a multiple of 2 workers'),
  ],
)
def test_train_lm_explains_mistakes(args, says, tmp_path, capsys):
  assert_refused(lambda: run(tmp_path / 'out', *args), says, capsys)


def assert_refused(mistake, says, capsys):
  """In one line, with the status of a mistake in the flags."""
  with pytest.raises(SystemExit) as end:
    mistake()
  (line,) = capsys.readouterr().err.splitlines()
  assert end.value.code == 2 and says in line


@pytest.mark.parametrize(
  'args, says',
  [
    (['--no-such-flag'], 'unrecognized arguments: --no-such-flag'),
    (['--workers', '0'], '--workers: must be a whole number from 1'),
    (['--data', '/no/text'], '--data: must be a file or a folder that exists'),
    (['--batch', '4'], '--batch 4 must be a multiple of 8 devices.'),
  ],
)
def test_train_sharded_explains_mistakes(args, says, capsys):
  import train_sharded

  assert_refused(lambda: train_sharded.main(args), says, capsys)


def test_no_cluster(tmp_path):
  env = {k: v for k, v in os.environ.items() if not k.startswith('JAX_')}
  run = subprocess.run(
    [
      sys.executable,
      str(EXAMPLES / 'train_lm.py'),
      '--distributed',
      '--out',
      str(tmp_path),
    ],
    text=True,
    capture_output=True,
    timeout=900,
    env={**env, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(EXAMPLES.parent)},
  )
  assert run.returncode == 2
  assert 'JAX finds no cluster here' in run.stderr.splitlines()[-1]
  assert run.stderr.endswith('give --coordinator, --processes and --process.\n')


# Ctrl-C -----------------------------------------------------------------------


def test_ctrl_c_saves_a_last_checkpoint(tmp_path, monkeypatch, capsys):
  args = ['--workers', '2', '--optimizer', 'adamw']
  (whole,) = run(tmp_path / 'whole', *args)
  write = metrics.Metrics.write

  def interrupt(self, record):
    write(self, record)
    if record['step'] == 4:
      os.kill(os.getpid(), signal.SIGINT)

  before = signal.getsignal(signal.SIGINT)
  with monkeypatch.context() as patch:
    patch.setattr(metrics.Metrics, 'write', interrupt)
    with pytest.raises(SystemExit) as end:
      run(tmp_path / 'parts', *args)
  assert end.value.code == 130
  assert signal.getsignal(signal.SIGINT) == before
  assert 'Stopped by SIGINT after step 4, which is saved' in (
    capsys.readouterr().out
  )
  assert os.listdir(tmp_path / 'parts/adamw/checkpoints') == ['4']
  (rest,) = run(tmp_path / 'parts', *args, '--resume')
  assert rest['records'] == whole['records']


# A compilation that takes seconds, in which no Python of the main thread runs.
COMPILING = """
import sys, jax, jax.numpy as jnp
sys.path.insert(0, sys.argv[1])
import cluster

def f(x):
  for i in range(400):
    x = jnp.sort(jnp.sin(x @ x) * i, axis=i % 2)
  return x

lowered = jax.jit(f).lower(jnp.ones((64, 64)))
with cluster.StopSignal() as stop:
  print('begin', flush=True)
  lowered.compile()
  print('compiled', flush=True)
  raise SystemExit(128 + stop.after(1))
"""


@pytest.mark.parametrize('times', [1, 2])
def test_ctrl_c_while_compiling(times):
  """It ends cleanly when that is done; a second one ends it at once."""
  env = {k: v for k, v in os.environ.items() if 'CACHE' not in k}
  with subprocess.Popen(
    [sys.executable, '-c', COMPILING, str(EXAMPLES)],
    text=True,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    assert process.stdout.readline() == 'begin\n'
    time.sleep(0.1)  # It compiles for about a second on idle cores.
    process.send_signal(signal.SIGINT)
    heard = process.stderr.readline()
    if times == 2:
      process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=900)
  assert heard == 'Stopping after this step; Ctrl-C again: at once.\n'
  assert (process.returncode, error) == (130, '')
  assert out == ('compiled\n' if times == 1 else '')


# Workers of several devices ---------------------------------------------------


def test_train_sharded(tmp_path, capsys):
  """Eight devices: a quarter of the memory each, and the same losses."""
  import train_sharded

  sharded, alone = train_sharded.main(
    [
      '--width',
      '256',
      '--heads',
      '2',
      '--layers',
      '1',
      '--context',
      '64',
      '--steps',
      '3',
      '--batch',
      '8',
      '--warmup',
      '1',
      '--out',
      str(tmp_path),
    ]
  )
  assert (tmp_path / 'loss.png').exists()
  assert json.loads((tmp_path / 'sharded.json').read_text())
  _, *records = read(tmp_path / '2-workers-of-4-devices/metrics.jsonl')
  assert [r['loss'] for r in records] == sharded['losses']
  assert records[-1].keys() >= INFO
  np.testing.assert_allclose(sharded['losses'], alone['losses'], atol=0.02)
  for what in ('parameters', 'optimizer'):
    assert sharded['memory'][what] < 0.27 * alone['memory'][what]
  between = {
    tuple(axes): (kind, received)
    for kind, axes, number, received in sharded['traffic']
    if kind == 'all-gather'
  }
  between_alone = {
    tuple(axes): (kind, received)
    for kind, axes, number, received in alone['traffic']
    if kind == 'all-gather'
  }
  assert set(between) == {('replica',), ('fsdp',)}
  assert set(between_alone) == {('replica',)}
  # A quarter each, in whole rows of words.
  assert between['replica',][1] <= between_alone['replica',][1] / 4 + 512
  assert '0 leaves cut otherwise' in capsys.readouterr().out


# Benchmarks' methods ----------------------------------------------------------


@pytest.mark.parametrize(
  'method, rate',
  [('adamw', 0.01), ('muon', 0.02), ('demo', 0.004), ('demo_muon', 0.02)],
)
def test_tasks(method, rate, monkeypatch):
  import tasks

  monkeypatch.setattr(tasks, 'STEPS', 30)
  made = tasks.train('mlp', method, rate, 0)
  assert made['loss'] < 0.85  # at the start 0.95
  assert (made['sent'] < made['parameters'] / 20) == ('demo' in method)
