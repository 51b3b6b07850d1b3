"""Several processes: the launcher, the exchange, and the training example."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import process_worker
import pytest
import yaml
from helpers import random_tree, wait_until

import demo_optax

HERE = pathlib.Path(__file__).parents[1]
EXAMPLES = HERE.parent / 'examples'
LAUNCH = [sys.executable, str(EXAMPLES / 'launch_local.py')]
PYTHON = sys.executable
TIMEOUT = 240


def environment(**more):
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  paths = [
    str(HERE.parent),
    str(EXAMPLES),
    str(HERE),
    env.get('PYTHONPATH', ''),
  ]
  return {**env, 'PYTHONPATH': os.pathsep.join(p for p in paths if p), **more}


def launch(*args, check=True, **kwargs):
  run = subprocess.run(
    [*LAUNCH, *map(str, args)],
    env=environment(),
    text=True,
    errors='replace',
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    timeout=TIMEOUT,
    **kwargs,
  )
  assert not check or run.returncode == 0, run.stdout
  return run


def is_alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  status = pathlib.Path(f'/proc/{pid}/stat')
  return (
    not status.exists() or status.read_text().rsplit(')')[-1].split()[0] != 'Z'
  )


# The launcher -----------------------------------------------------------------


def test_launcher_numbers_its_processes_and_their_lines():
  code = (
    'import os; print("of", os.environ["JAX_NUM_PROCESSES"]);'
    'print("I am", os.environ["JAX_PROCESS_ID"])'
  )
  lines = launch('-n', 3, '--', PYTHON, '-c', code).stdout.splitlines()
  assert sorted(lines) == sorted(
    f'[{n}] {text}' for n in range(3) for text in ('of 3', f'I am {n}')
  )


# Process 1 fails once all have started a child of their own and said so; the
# others wait for ever, deaf to SIGTERM, as in a collective.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
folder, number = pathlib.Path(sys.argv[1]), os.environ['JAX_PROCESS_ID']
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '600'])
(folder / number).write_text(f'{os.getpid()} {child.pid}')
while len(list(folder.iterdir())) < 3 or number != '1' or len(sys.argv) > 2:
  time.sleep(0.05)
sys.exit(7)
"""


def pids_in(folder):
  return [
    int(pid) for file in folder.iterdir() for pid in file.read_text().split()
  ]


def test_one_failure_ends_all(tmp_path):
  began = time.monotonic()
  run = launch(
    '-n', 3, '--grace', 1, '--', PYTHON, '-c', STUBBORN, tmp_path, check=False
  )
  assert run.returncode == 7 and 'process 1 ended with status 7' in run.stdout
  assert time.monotonic() - began < 30
  pids = pids_in(tmp_path)
  assert len(pids) == 6
  wait_until(lambda: not any(map(is_alive, pids)), 10)


@contextlib.contextmanager
def started(folder, processes, script, *args, grace=1, **options):
  """A launcher whose processes all have a child; none of them is left."""
  launcher = subprocess.Popen(
    [
      *LAUNCH,
      '-n',
      str(processes),
      '--grace',
      str(grace),
      '--',
      PYTHON,
      '-c',
      script,
      str(folder),
      *args,
    ],
    **options,
  )
  try:
    wait_until(lambda: len(pids_in(folder)) == 2 * processes, 60)
    yield launcher
  finally:
    launcher.kill()
    launcher.wait()
    for pid in filter(is_alive, pids_in(folder)):
      os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
  'number',
  [
    signal.SIGTERM,
    signal.SIGINT,
    pytest.param(
      signal.SIGKILL,
      marks=pytest.mark.skipif(
        sys.platform != 'linux', reason='only Linux tells of a dead parent'
      ),
    ),
  ],
)
def test_none_outlives_the_launcher(tmp_path, number):
  with started(tmp_path, 3, STUBBORN, 'for ever') as launcher:
    own = [int(file.read_text().split()[0]) for file in tmp_path.iterdir()]
    children = set(pids_in(tmp_path)) - set(own)
    launcher.send_signal(number)
    assert (
      launcher.wait(timeout=30)
      == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    )
    wait_until(lambda: not any(map(is_alive, own)), 10)
    if number != signal.SIGKILL:  # nobody is left to end grandchildren
      wait_until(lambda: not any(map(is_alive, children)), 10)


def test_a_second_ctrl_c_leaves_no_grace(tmp_path):
  with started(tmp_path, 3, STUBBORN, 'for ever', grace=500) as launcher:
    launcher.send_signal(signal.SIGINT)
    time.sleep(1)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    wait_until(lambda: not any(map(is_alive, pids_in(tmp_path))), 10)


@pytest.mark.parametrize(
  'args, says',
  [
    (['-n', '2'], 'Give a command after --'),
    (['-n', '0', '--', 'true'], '--processes: must be a whole number from 1'),
    (['--', 'no-such-command'], "'no-such-command' is not a program. Give"),
    (
      ['--devices', 'x', '--', 'true'],
      "--devices: must be a whole number from 1 to 2147483647, got 'x'",
    ),
  ],
)
def test_launcher_explains_mistakes(args, says):
  run = launch(*args, check=False)
  assert run.returncode == 2 and says in run.stdout


def test_launcher_of_any_output():
  """Output that ends in no newline, or is not text."""
  run = launch('-n', 1, '--', 'sh', '-c', "printf 'a\\377b\\nend'", check=False)
  assert run.returncode == 0 and run.stdout.endswith('[0] end\n')


# Says some lines, and no more.
TALKING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(['sleep', '600'])
file = pathlib.Path(sys.argv[1]) / os.environ['JAX_PROCESS_ID']
file.write_text(f'{os.getpid()} {child.pid}')
for line in range(int(sys.argv[2])):
  print(line, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize('lines', [3, 100_000])
def test_launcher_ends_with_who_reads_it(lines, tmp_path):
  """As in `launch_local.py ... | head -2`: with the processes it started."""
  with started(
    tmp_path,
    2,
    TALKING,
    str(lines),
    grace=5,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as launcher:
    for _ in range(2):
      assert launcher.stdout.readline().startswith(b'[')
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 128 + signal.SIGPIPE
    assert launcher.stderr.read() == b''
    launcher.stderr.close()
    wait_until(lambda: not any(map(is_alive, pids_in(tmp_path))), 10)


# The exchange -----------------------------------------------------------------


@pytest.mark.parametrize(
  'processes, devices, values, exchange',
  [
    pytest.param(2, 2, 'sign', 'all_gather', marks=pytest.mark.core),
    (4, 1, 'float32', 'all_gather'),
    (2, 1, 'sign', 'all_to_all'),
  ],
)
def test_processes_equal_simulation(
  processes, devices, values, exchange, tmp_path
):
  """50 steps: parameters the same on all devices, and all as simulated.

  With owners of chunks, too: the simulation has none, and the same signs.
  """
  launch(
    '-n',
    processes,
    '--devices',
    devices,
    '--',
    PYTHON,
    HERE / 'process_worker.py',
    '--values',
    values,
    '--exchange',
    exchange,
    '--out',
    tmp_path,
  )
  count = processes * devices
  workers = demo_optax.Workers.simulated(count)
  tx = process_worker.make_tx(workers, values)
  params = random_tree(99)
  state, update = tx.init(params), jax.jit(tx.update)
  for step in range(process_worker.STEPS):
    gradients = process_worker.gradients_of(step, count)
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  momentum = state[0].worker_stacked.momentum
  seen = 0
  for process in range(processes):
    found = np.load(tmp_path / f'{process}.npz')
    for name in found.files:
      kind, leaf, device = re.match(r"(\w+)\['(\w+)'\]@(\d+)", name).groups()
      if kind == 'momentum':
        place = sorted(
          {
            int(n.split('@')[1])
            for f in tmp_path.iterdir()
            for n in np.load(f).files
          }
        ).index(int(device))
        expected = momentum[leaf][place : place + 1]
      else:
        expected = {'params': params, 'updates': updates}[kind][leaf]
      np.testing.assert_array_equal(found[name], expected, err_msg=name)
      seen += 1
  assert seen == (2 * len(params) + len(momentum)) * count


def test_a_peer_of_another_exchange_is_an_error():
  """Before the first message, in every process, by what differs."""
  found = launch('-n', 2, '--', PYTHON, HERE / 'other_exchange.py').stdout
  names = {
    'k': 'compressors',
    'chunk': 'compressors',
    'values': 'compressors',
    'as many bytes': 'compressors',
    'averaged': 'compressors',
    'average': 'average',
    'version': 'version',
    'shape': 'parameters',
  }
  for name, different in names.items():
    # Even the momentum may have another shape.
    fits = [different, 'arguments of the step']
    for process in (0, 1):
      (line,) = re.findall(rf'^\[{process}\] {name}: (.*)$', found, re.M)
      assert line.startswith('All processes must be started with the same ')
      assert 'got others than process 0 in [1]' in line
      names_in_line = line.split(' the same ')[1].split(', or they')[0]
      assert set(names_in_line.split(', ')) & set(fits), line
      assert f'Process {process} has' in line
  for process in (0, 1):  # an error is no answer: it is compared again
    assert re.search(
      rf'^\[{process}\] tried again, first: .* in \[1\]', found, re.M
    )
    assert f'[{process}] tried again, second: done' in found
    assert f'[{process}] the same: done' in found


# Every copy on 2 processes of 2 devices; process 1 flips a bit on its second.
FLIPPED = """
import jax, numpy as np, demo_optax, process_worker
from demo_optax.replicas import content_digest, copies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
workers, _ = process_worker.join()
mesh = workers.mesh
host = np.arange(8, dtype=np.float32)
w = workers.device_put(host)
parts = [shard.data for shard in w.addressable_shards]
first = jax.process_index() == 0
bad = jax.device_put(host + (not first) * np.float32(2), parts[1].device)
broken = jax.make_array_from_single_device_arrays(
    w.shape, w.sharding, [parts[0], bad])
cut = jax.make_array_from_callback(
    w.shape, NamedSharding(mesh, P('data')), lambda index: host[index])
tree = {'w': w, 'broken': broken, 'cut': cut, 'host': 3 + first, 'same': host}
for d in demo_optax.check_replicas(tree, workers):
  print(d.leaf, len(d.devices), d.workers, d.processes, flush=True)
held = copies({'w': w, 'cut': cut, 'host': host})
print(len(set(map(content_digest, held.values()))), 'digest', flush=True)
"""


def test_copies_that_differ_between_processes():
  run = launch('-n', 2, '--devices', 2, '--', PYTHON, '-c', FLIPPED)
  for process in (0, 1):
    lines = re.findall(rf'^\[{process}\] (.*)', run.stdout, re.M)
    assert [line for line in lines if line.endswith(')')] == [
      'broken 1 (3,) (1,)',
      'host 0 () (1,)',
    ]
    assert '1 digest' in lines


# The training example ---------------------------------------------------------

SMALL = [
  '--width',
  32,
  '--layers',
  1,
  '--heads',
  2,
  '--batch',
  8,
  '--eval-every',
  4,
  '--save-every',
  4,
]


def train(processes, folder, *args, **kwargs):
  command = [PYTHON, EXAMPLES / 'train_lm.py', *SMALL, '--out', folder, *args]
  return launch(
    '-n', processes, *kwargs.pop('launcher', []), '--', *command, **kwargs
  )


def records(folder, name):
  lines = (folder / name / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines[1:]]


@pytest.mark.parametrize(
  'processes, method',
  [(2, 'demo_muon'), pytest.param(4, 'demo', marks=pytest.mark.slow)],
)
def test_training_on_processes(processes, method, tmp_path):
  """Has the losses of one process with as many devices, and of a resumed run."""
  flags = ['--steps', 8, '--optimizer', method]
  run = train(processes, tmp_path / 'whole', *flags)
  # One process prints. A carriage return in the sample begins a line, too.
  speaking = {
    line[:3]
    for line in run.stdout.split('\n')
    if re.match(r'\[\d\]', line) and 'Gloo' not in line
  }
  assert speaking == {'[0]'}, run.stdout
  train(1, tmp_path / 'one', *flags, launcher=['--devices', processes])
  whole, one = (records(tmp_path / name, method) for name in ('whole', 'one'))
  assert [r['step'] for r in whole] == list(range(1, 9))
  for a, b in zip(whole, one, strict=True):
    np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-5)
    assert a['sent'] == b['sent']
  folder = tmp_path / 'parts'
  shutil.copytree(tmp_path / 'whole', folder)
  shutil.rmtree(folder / method / 'checkpoints/8')
  run = train(processes, folder, *flags, '--resume')
  assert (
    f'{processes} workers on the devices of {processes} process(es)'
    in run.stdout
  )
  assert records(folder, method) == whole


@pytest.mark.parametrize(
  'flags, says',
  [
    (['--workers', '3'], 'one worker for each'),
    (['--data', 'no/such/file'], 'no/such/file'),
  ],
)
def test_training_on_processes_explains_mistakes(flags, says, tmp_path):
  run = train(2, tmp_path, '--steps', 1, *flags, check=False)
  assert run.returncode == 2 and says in run.stdout


# Recipes for clusters ---------------------------------------------------------

SRUN = f'''#!{PYTHON}
"""Starts two tasks with what srun tells them."""
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith('-'):
  command.pop(0)
tasks = [
    subprocess.Popen(command, env={{
        **os.environ, 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2',
        'SLURM_STEP_NUM_NODES': '1', 'SLURM_PROCID': str(i),
        'SLURM_LOCALID': str(i)}})
    for i in range(2)]
sys.exit(max(task.wait() for task in tasks))
'''


def test_slurm_recipe(tmp_path):
  """As the batch system would run it, with AdamW, which compiles quickly."""
  (tmp_path / '.venv/bin').mkdir(parents=True)
  (tmp_path / '.venv/bin/python').write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
  (tmp_path / 'srun').write_text(SRUN)
  (tmp_path / 'hostname').write_text('#!/bin/sh\necho 127.0.0.1\n')
  for name in ('.venv/bin/python', 'srun', 'hostname'):
    (tmp_path / name).chmod(0o755)
  (tmp_path / 'examples').symlink_to(EXAMPLES)
  env = environment(
    JAX_PLATFORMS='cpu',
    SLURM_JOB_ID=str(os.getpid()),
    SLURM_NTASKS='2',
    PATH=f'{tmp_path}{os.pathsep}{os.environ["PATH"]}',
  )
  for name in (
    'JAX_COORDINATOR_ADDRESS',
    'JAX_NUM_PROCESSES',
    'JAX_PROCESS_ID',
  ):
    env.pop(name, None)
  run = subprocess.run(
    [
      'bash',
      str(EXAMPLES / 'recipes/slurm.sbatch'),
      '--steps',
      '2',
      '--optimizer',
      'adamw',
      *map(str, SMALL),
    ],
    env=env,
    text=True,
    cwd=tmp_path,
    timeout=TIMEOUT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )
  assert run.returncode == 0, run.stdout
  assert '2 workers on the devices of 2 process(es)' in run.stdout
  folder = tmp_path / f'runs/{os.getpid()}'
  assert [r['step'] for r in records(folder, 'adamw')] == [1, 2]
  assert '--resume auto' in (EXAMPLES / 'recipes/slurm.sbatch').read_text()


def test_kubernetes_recipe(monkeypatch):
  """Its numbers and names fit each other, and the example takes its flags."""
  monkeypatch.syspath_prepend(str(EXAMPLES))
  import train_lm

  jobset = yaml.safe_load((EXAMPLES / 'recipes/jobset.yaml').read_text())
  (job,) = jobset['spec']['replicatedJobs']
  spec = job['template']['spec']
  (container,) = spec['template']['spec']['containers']
  env = {e['name']: e.get('value') for e in container['env']}
  name, port = (
    jobset['metadata']['name'],
    container['ports'][0]['containerPort'],
  )
  assert env['JAX_COORDINATOR_ADDRESS'] == (
    f'{name}-{job["name"]}-0-0.{name}:{port}'
  )
  assert (
    int(env['JAX_NUM_PROCESSES'])
    == (job['replicas'] * spec['parallelism'])
    == spec['completions']
  )
  assert spec['completionMode'] == 'Indexed'
  for key, value in env.items():
    if value:
      monkeypatch.setenv(key, value)
  monkeypatch.setenv('JAX_PROCESS_ID', '3')
  args = train_lm.parse_args(container['args'])
  assert (args.processes, args.process, args.batch) == (4, 3, 64)
  assert args.resume == 'auto'
  assert args.coordinator == env['JAX_COORDINATOR_ADDRESS']
  assert container['command'][1] == 'examples/train_lm.py'
