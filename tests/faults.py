"""Every fault that was tried on a training run, and what came of it.

    python tests/faults.py            # writes the table of docs/faults.md
    python tests/faults.py FAULT...   # the rows of some of them

Each case does it to a run of its own, asserts what must come of it within its
limit of seconds, and tells what came. `test_faults.py` runs the same cases.
"""

import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
if __name__ == '__main__':
  sys.path[:0] = [str(ROOT), str(HERE)]
  import conftest  # eight devices, and a cache of programs

import bad_network
import jax
import jax.numpy as jnp
import numpy as np
import optax

import demo_optax
from demo_optax import checkpoint

DOCS = ROOT / 'docs/faults.md'
MARKS = '<!-- faults: python tests/faults.py -->', '<!-- end -->'

SMALL = ['--width', '32', '--layers', '1', '--heads', '2', '--batch', '12',
         '--eval-every', '1000000', '--save-every', '20']
TRAIN = [sys.executable, str(ROOT / 'examples/train_lm.py'), *SMALL]
LAUNCH = [sys.executable, str(ROOT / 'examples/launch_local.py')]
START = 240  # seconds in which a run has begun to train, on a busy machine


class Outcome(NamedTuple):
  """What came of a fault: how long it took, and in words."""

  seconds: float
  text: str


class NotPossibleError(Exception):
  """The machine does not allow the fault."""


# A run to do something to -------------------------------------------------------


class Run:
  """Processes of the training example; all of them end with the block."""

  def __init__(self, folder: pathlib.Path, command: list, **environment):
    self.folder = folder
    self.marker = f'DEMO_FAULT={uuid.uuid4()}'
    name, value = self.marker.split('=')
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {
        name: value, 'JAX_PLATFORMS': 'cpu', 'PYTHONUNBUFFERED': '1',
        'PYTHONPATH': os.pathsep.join(p for p in paths if p), **environment}
    self.process = subprocess.Popen(
        [*map(str, command), '--out', str(folder)], env=env, text=True,
        errors='replace', stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True)
    self.output = ''
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    for line in self.process.stdout:
      self.output += line

  def __enter__(self) -> 'Run':
    return self

  def __exit__(self, *_) -> None:
    for pid in self.pids():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    self.process.kill()
    self.process.wait()
    self._reader.join(5)

  def pids(self) -> dict[int, str]:
    """Our processes that are alive, and which of the training processes."""
    found = {}
    for entry in pathlib.Path('/proc').glob('[0-9]*'):
      try:
        environment = (entry / 'environ').read_bytes().decode().split('\0')
        state = (entry / 'stat').read_text().rsplit(')')[-1].split()[0]
      except (OSError, UnicodeDecodeError):
        continue
      if self.marker in environment and state != 'Z':
        number = [e.split('=')[1] for e in environment
                  if e.startswith('JAX_PROCESS_ID=')]
        found[int(entry.name)] = number[0] if number else ''
    return found

  def pid(self, number: int) -> int:
    """Of the training process of that number."""
    (pid,) = [p for p, n in self.pids().items() if n == str(number)]
    return pid

  def kill(self, number: int, name: int = signal.SIGKILL) -> None:
    os.kill(self.pid(number), name)

  @property
  def steps(self) -> list[int]:
    return steps_in(self.folder)

  def wait_until(self, condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
      assert time.monotonic() < deadline, f'not in {seconds} s:\n{self.output}'
      assert self.process.poll() is None or condition(), self.output
      time.sleep(0.002)

  def trains(self, saved: int = 2) -> 'Run':
    """Waits until so many checkpoints have been written."""
    every = int(SMALL[-1])
    self.wait_until(
        lambda: self.steps and self.steps[-1] >= saved * every, START)
    return self

  def ended(self, limit: float) -> tuple[int, float]:
    """Its exit status, and after how many seconds; none is left behind."""
    began = time.monotonic()
    try:
      status = self.process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
      raise AssertionError(f'not over in {limit} s:\n{self.output}') from None
    while self.pids():
      assert time.monotonic() < began + limit, f'{self.pids()} are left'
      time.sleep(0.01)
    seconds = time.monotonic() - began
    self._reader.join(5)
    return status, seconds

  def says(self, pattern: str) -> str:
    """The first part of the output that fits."""
    found = re.search(pattern, self.output)
    assert found, f'{pattern} is not in:\n{self.output}'
    return found.group()


def steps_in(folder: pathlib.Path) -> list[int]:
  """Of which there is a whole checkpoint."""
  names = [p.name for p in (folder / 'demo-muon/checkpoints').glob('*')]
  return sorted(int(n) for n in names if n.isdigit())


def launched(folder, processes, *flags, launcher=(), **environment) -> Run:
  """A long run under the launcher."""
  return Run(
      folder, [*LAUNCH, '-n', processes, *launcher, '--', *TRAIN,
               '--steps', '1000000', *flags], **environment)


def resumes(folder: pathlib.Path, workers: int) -> int:
  """Goes on from the last checkpoint, for a step; the step it went on from."""
  saved = steps_in(folder)
  command = [*TRAIN, '--workers', workers, '--steps', saved[-1] + 1, '--resume']
  with Run(folder, command) as run:
    status, _ = run.ended(START)
    assert status == 0, run.output
    run.says(f'Going on after step {saved[-1]}.')
  return saved[-1]


# Faults -----------------------------------------------------------------------


def killed(folder, number=1):
  with launched(folder, 3) as run:
    run.trains().kill(number)
    status, seconds = run.ended(40)
    assert status in (1, 134, 137), run.output
  step = resumes(folder, 3)
  return Outcome(seconds, f'all end; resumed after step {step}')


def killed_without_launcher(folder, number):
  port = 20000 + os.getpid() % 10000 + number
  with contextlib.ExitStack() as stack:
    runs = [
        stack.enter_context(Run(
            folder, [*TRAIN, '--steps', '1000000'], JAX_PROCESS_ID=str(i),
            JAX_NUM_PROCESSES='2', JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}'))
        for i in range(2)]
    runs[0].trains()
    runs[number].kill(number)
    status, seconds = runs[1 - number].ended(40)
    assert status != 0
    text = runs[1 - number].says(
        'Gloo [a-z-]+ failed|detected fatal errors|'
        'Connection (reset|closed) by peer')
  step = resumes(folder, 2)
  return Outcome(seconds, f'the other one ends ("{text}"); resumed after step'
                          f' {step}')


def killed_while_saving(folder):
  with launched(folder, 2, '--save-every', '5') as run:
    run.trains()
    checkpoints = folder / 'demo-muon/checkpoints'
    run.wait_until(lambda: list(checkpoints.glob('*tmp*')), START)
    run.kill(0)
    before = run.steps
    status, seconds = run.ended(40)
    assert status in (1, 134, 137), run.output
    parts = [p.name for p in checkpoints.iterdir() if not p.name.isdigit()]
    assert before
  step = resumes(folder, 2)
  left = 'an incomplete checkpoint is left, and ignored' if parts else (
      'nothing of it is left')
  return Outcome(seconds, f'all end; {left}; resumed after step {step}')


def late(folder):
  flags = ['--steps', '20', '--timeout', '60']
  port = 20000 + os.getpid() % 10000 + 7
  with contextlib.ExitStack() as stack:
    def start(number):
      return stack.enter_context(Run(
          folder, [*TRAIN, *flags], JAX_PROCESS_ID=str(number),
          JAX_NUM_PROCESSES='2', JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}'))
    runs = [start(0)]
    time.sleep(15)
    assert runs[0].process.poll() is None
    began = time.monotonic()
    runs.append(start(1))
    for run in runs:
      status, _ = run.ended(START)
      assert status == 0, run.output
    seconds = time.monotonic() - began
  assert steps_in(folder) == [20]
  return Outcome(seconds, 'the first one waits (`--timeout`, 300 s if not'
                          ' given); both train to the end')


def never(folder, number):
  with Run(folder, [*TRAIN, '--timeout', '15'], JAX_PROCESS_ID=str(number),
           JAX_NUM_PROCESSES='2',
           JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{20009 + number}') as run:
    status, seconds = run.ended(60)
    assert status not in (0, None), run.output
    text = run.says('DEADLINE_EXCEEDED|[Tt]imed out|timed out')
  return Outcome(seconds, f'an error once `--timeout 15` is over ("{text}")')


@contextlib.contextmanager
def small_disk(folder, megabytes):
  folder.mkdir(parents=True, exist_ok=True)
  made = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', f'size={megabytes}m', 'none', folder],
      capture_output=True, text=True)
  if made.returncode:
    raise NotPossibleError(f'no file system of a few MB can be mounted: {made.stderr}')
  try:
    yield
  finally:
    subprocess.run(['umount', '-l', folder], check=True)


def full_disk(folder, processes):
  with small_disk(folder, 16):
    with launched(folder, processes) as run:
      run.trains()
      ballast = folder / 'ballast'
      with contextlib.suppress(OSError), ballast.open('wb', 0) as file:
        while True:
          file.write(bytes(4096))
      status, seconds = run.ended(60)
      assert status == 1, run.output
      text = run.says('No space left on device')
    ballast.unlink()
    step = resumes(folder, processes if processes > 1 else 4)  # simulated
  return Outcome(seconds, f'an error ("{text}"), and all end; with space again,'
                          f' resumed after step {step}')


def one_cannot_write(folder):
  """Of two processes; the other's part of the save succeeds."""
  with launched(folder, 2, '--save-timeout', '20') as run:
    run.trains()
    pid = run.pid(1)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (256, 256))
    status, seconds = run.ended(90)
    assert status == 1, run.output
    text = run.says('File too large')
  step = resumes(folder, 2)
  return Outcome(seconds, f'an error in both ("{text}") once the save has had'
                          f' its `--save-timeout 20`; resumed after step {step}')


def damaged_files(folder):
  """Every file of a checkpoint, in every one of these ways."""
  ways = {
      'missing': lambda path, data: path.unlink(),
      'cut in half': lambda path, data: path.write_bytes(data[:len(data) // 2]),
      'empty': lambda path, data: path.write_bytes(b''),
      **{f'a bit of byte {share} flipped': flip_a_bit(share)
         for share in (0.02, 0.3, 0.5, 0.7, 0.98)},
  }
  rng = np.random.default_rng(0)
  tree = {'w': jnp.asarray(rng.normal(size=(64, 64)), jnp.float32),
          'b': jnp.ones(5), 'key': jax.random.key(0), 'position': 7}

  def open(where):
    return checkpoint.Checkpointer(where, tree)

  with open(folder / 'good') as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, tree)
  same, refused, slowest = 0, 0, 0.0
  files = [p.relative_to(folder / 'good')
           for p in sorted((folder / 'good/2').rglob('*')) if p.is_file()]
  for file in files:
    for damage in ways.values():
      shutil.rmtree(folder / 'bad', ignore_errors=True)
      shutil.copytree(folder / 'good', folder / 'bad')
      path = folder / 'bad' / file
      damage(path, path.read_bytes())
      began = time.monotonic()
      try:
        with open(folder / 'bad') as checkpoints:
          _, found = checkpoints.restore(2)
      except ValueError as error:
        assert re.search(r'step 2 in .* must be whole, .*Restore another one by'
                         r' step= \(there are: 1\)', str(error), re.S), (
                             file, error)
        refused += 1
      else:
        assert_equal(found, tree)
        same += 1
      slowest = max(slowest, time.monotonic() - began)
      with open(folder / 'bad') as checkpoints:
        assert_equal(checkpoints.restore(1)[1], tree)
  assert same + refused == len(files) * len(ways) and refused > len(files)
  return Outcome(slowest, (
      f'{len(files)} files, {len(ways)} ways: {refused} errors that name the'
      f' step and the others there are, {same} restores of the right bits (the'
      ' file was not needed), never of wrong ones. The checkpoint before'
      ' restores each time'))


def flip_a_bit(share):
  def flip(path, data):
    data = bytearray(data)
    data[int(share * len(data))] ^= 16
    path.write_bytes(data)
  return flip


def assert_equal(found, expected):
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_array_equal(*[
        jax.random.key_data(z)
        if hasattr(z, 'dtype') and jnp.issubdtype(z.dtype, jax.dtypes.prng_key)
        else z for z in (x, y)])


def damaged_last(folder):
  """What a user of the example sees, and does."""
  with launched(folder, 2) as run:
    run.trains(3)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait_until(lambda: not run.pids(), 10)
  checkpoints = folder / 'demo-muon/checkpoints'
  last = steps_in(folder)[-1]
  file = max((p for p in (checkpoints / str(last)).rglob('*') if p.is_file()),
             key=lambda p: p.stat().st_size)
  flip_a_bit(0.5)(file, file.read_bytes())
  with Run(folder, [*LAUNCH, '-n', '2', '--', *TRAIN, '--steps', '1000000',
                    '--resume']) as run:
    status, seconds = run.ended(START)
    assert status == 1, run.output
    text = run.says(r'got: .* is not what was saved')
  shutil.rmtree(checkpoints / str(last))
  step = resumes(folder, 2)
  assert step < last
  return Outcome(seconds, (
      f'an error ("{text}"); with that folder removed, as it says, resumed'
      f' after step {step}'))


def training(left_out):
  """Losses and parameters of 60 steps on a mesh of 4 workers.

  `num_excluded` says which workers see only NaN in a step.
  """
  mesh = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4],
                       axis_types=(jax.sharding.AxisType.Auto,))
  workers = demo_optax.Workers.on_mesh(mesh, 'data')
  tx = demo_optax.demo(
      lambda count: 2e-2 * (1 - count.astype(jnp.float32) / 60), decay=0.9,
      workers=workers, compressor=demo_optax.dct_topk(16, 16))
  rng = np.random.default_rng(0)
  true = rng.normal(size=(16, 16)).astype(np.float32) / 4
  params = workers.device_put({'w': jnp.zeros((16, 16)), 'b': jnp.zeros(16)})
  loss_fn = lambda p, x, y: jnp.mean((x @ p['w'] + p['b'][None] - y) ** 2)

  @demo_optax.data_parallel(workers)
  def step_fn(params, state, x, y):
    gradients = jax.grad(loss_fn)(params, x, y)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state, losses, history = tx.init(params), [], []
  for step in range(60):
    x = rng.normal(size=(32, 16)).astype(np.float32)
    y = x @ true
    losses.append(float(np.mean(
        (x @ np.asarray(params['w']) + np.asarray(params['b']) - y) ** 2)))
    bad = left_out(step)
    x.reshape(4, 8, 16)[bad] = np.nan
    params, state = step_fn(params, state, x, y)
    (seen,) = [int(v) for p, v in jax.tree_util.tree_leaves_with_path(state)
               if 'num_excluded' in jax.tree_util.keystr(p)]
    assert seen == len(bad), (step, seen)
    assert not demo_optax.check_replicas((params, state), workers)
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))
    history.append(jax.tree.map(np.asarray, params))
  return losses, history


def one_sends_nan(folder):
  began = time.monotonic()
  clean, _ = training(lambda step: [])
  losses, _ = training(lambda step: [1] if 10 <= step < 40 else [])
  seconds = time.monotonic() - began
  assert max(losses[-1], clean[-1]) < 0.05 * losses[0]
  return Outcome(seconds, (
      'excluded by all, and counted, in each of these 30 steps of 60;'
      f' parameters the same on all workers throughout; loss {losses[0]:.2f}'
      f' to {losses[-1]:.4f}, undisturbed {clean[-1]:.4f}'))


def all_send_nan(folder):
  began = time.monotonic()
  losses, history = training(
      lambda step: [0, 1, 2, 3] if 20 <= step < 30 else [])
  seconds = time.monotonic() - began
  for step in range(20, 30):
    assert_equal(history[step], history[19])
  assert losses[-1] < 0.1 * losses[0]
  return Outcome(seconds, (
      'parameters stay as they are, to the bit, in these 10 steps of 60, and'
      f' learning continues after them; loss {losses[0]:.2f} to'
      f' {losses[-1]:.4f}'))


@contextlib.contextmanager
def read_only(folder):
  made = subprocess.run(
      ['mount', '-o', 'remount,ro', folder], capture_output=True, text=True)
  if made.returncode:
    raise NotPossibleError(f'nothing can be mounted anew: {made.stderr}')
  try:
    yield
  finally:
    subprocess.run(['mount', '-o', 'remount,rw', folder], check=True)


def becomes_read_only(folder):
  """Only the folder of the checkpoints: the other files stay open."""
  checkpoints = folder / 'demo-muon/checkpoints'
  with small_disk(checkpoints, 16):
    with launched(folder, 2, '--resume', 'auto') as run:
      run.trains()
      with read_only(checkpoints):
        status, seconds = run.ended(60)
      assert status == 1, run.output
      text = run.says('Read-only file system')
    step = resumes(folder, 2)
  return Outcome(seconds, f'an error in both ("{text}"), and all end; writable'
                          f' again, resumed after step {step}')


def told_to_end(folder, processes, to, number=signal.SIGTERM):
  if processes == 1:
    command = [*TRAIN, '--workers', '2', '--steps', '1000000']
    run = Run(folder, command)
  else:
    run = launched(folder, processes)
  with run:
    run.trains()
    before = run.steps[-1]
    for pid in ([run.process.pid] if to == 'launcher' or processes == 1 else
                [run.pid(i) for i in to]):
      os.kill(pid, number)
    status, seconds = run.ended(25)
    assert status == 128 + number, run.output
    # The launcher passes on a SIGTERM.
    name = 'SIGTERM' if to == 'launcher' else signal.Signals(number).name
    text = run.says(rf'Stopped by {name} after step \d+')
    step = int(text.split()[-1])
  assert step == run.steps[-1] and step > before
  assert resumes(folder, max(2, processes)) == step
  return Outcome(seconds, 'all stop after the same step, which is saved;'
                          f' status {128 + number}; resumed from there')


def stands_still(folder):
  """No error, no closed connection: a process that is stopped."""
  with launched(folder, 2) as run:
    run.trains().kill(1, signal.SIGSTOP)
    status, seconds = run.ended(200)
    assert status in (1, 134), run.output
    text = run.says('heartbeat timeout|stopped sending heartbeats')
  step = resumes(folder, 2)
  return Outcome(seconds, f'JAX reports it after 100 s ("{text}"), and all end;'
                          f' resumed after step {step}')


def records(folder):
  """What a run has logged of every step."""
  lines = (folder / 'demo-muon/metrics.jsonl').read_text().splitlines()
  return [{k: x[k] for k in ('step', 'loss', 'residual_norm', 'num_excluded')}
          for x in map(json.loads, lines) if 'loss' in x]


@contextlib.contextmanager
def over_a_wire(folder, *flags):
  """Two processes in namespaces of their own, and what joins them."""
  if reason := bad_network.why_not():
    raise NotPossibleError(f'no network of our own: {reason}')
  wire = bad_network.Wire()
  try:
    with contextlib.ExitStack() as stack:
      runs = []
      for i in range(2):
        command = bad_network.inside(i, [*TRAIN, *flags])
        runs.append(stack.enter_context(Run(
            folder, command, JAX_PROCESS_ID=str(i), JAX_NUM_PROCESSES='2',
            JAX_COORDINATOR_ADDRESS=f'{bad_network.PREFIX}1:1234')))
        bad_network.give(i, runs[-1].process.pid)
      yield wire, runs
  finally:
    wire.close()


def bad_wire(folder, trouble):
  """TCP mends it: the run is an undisturbed one, to the bit."""
  flags = ['--steps', '120']
  command = [*LAUNCH, '-n', '2', '--', *TRAIN, *flags]
  with Run(folder / 'good', command) as run:
    assert run.ended(3 * START)[0] == 0, run.output
  with over_a_wire(folder / 'bad', *flags) as (wire, runs):
    runs[0].trains(1)
    began = time.monotonic()
    text = trouble(wire)
    for run in runs:
      assert run.ended(3 * START)[0] == 0, run.output
    seconds = time.monotonic() - began
  if not text:
    text = ', '.join(f'{n} frames {what}' for what, n in wire.counts.items())
  found, expected = records(folder / 'bad'), records(folder / 'good')
  assert len(found) >= 120 and found == expected
  return Outcome(seconds, f'{text}; the run has the bits of an undisturbed'
                          ' one')


def lossy(wire):
  wire.lost, wire.damaged, wire.doubled = 0.01, 0.01, 0.01
  wire.delays = 0.0, 0.005


def cut_for_a_while(wire):
  wire.cut = True
  time.sleep(10)
  wire.cut = False
  return 'both wait, and continue'


def cut_for_good(folder):
  with over_a_wire(folder, '--steps', '1000000') as (wire, runs):
    runs[0].trains()
    wire.cut = True
    began = time.monotonic()
    for run in runs:
      status, _ = run.ended(200)
      assert status not in (0, None), run.output
    seconds = time.monotonic() - began
    text = ' '.join(run.output for run in runs)
    text = re.search('heartbeat timeout|stopped sending heartbeats|'
                     'DEADLINE_EXCEEDED|detected fatal errors', text).group()
  step = resumes(folder, 2)
  return Outcome(seconds, f'each reports the other ("{text}"), and'
                          f' both end; resumed after step {step}')


# name: what is done, in how many seconds it has to be over.
CASES = {
    'kill': ('SIGKILL of process 1 of 3', 40, killed),
    'kill-first': ('SIGKILL of process 0 of 3', 40,
                   lambda folder: killed(folder, 0)),
    'kill-alone': ('SIGKILL of process 1 of 2, no launcher', 40,
                   lambda folder: killed_without_launcher(folder, 1)),
    'kill-alone-first': ('SIGKILL of process 0 of 2, no launcher', 40,
                         lambda folder: killed_without_launcher(folder, 0)),
    'kill-saving': ('SIGKILL of process 0 of 2 in the middle of a save', 40,
                    killed_while_saving),
    'still': ('process 1 of 2 is stopped (SIGSTOP)', 200, stands_still),
    'lossy': ('between 2 hosts 1 % of the frames are lost, 1 % damaged, 1 %'
              ' doubled, and some arrive out of order', 3 * START,
              lambda folder: bad_wire(folder, lossy)),
    'cut': ('the wire between 2 hosts is cut for 10 s', 3 * START,
            lambda folder: bad_wire(folder, cut_for_a_while)),
    'cut-for-good': ('the wire between 2 hosts is cut', 240, cut_for_good),
    'late': ('process 1 of 2 starts 15 s late', START, late),
    'never': ('process 1 of 2 never starts', 60,
              lambda folder: never(folder, 0)),
    'never-first': ('process 0 of 2 never starts', 60,
                    lambda folder: never(folder, 1)),
    'full': ('the disk is full during a save, 1 process', 60,
             lambda folder: full_disk(folder, 1)),
    'full-two': ('the disk is full during a save, 2 processes', 60,
                 lambda folder: full_disk(folder, 2)),
    'one-full': ('process 1 of 2 alone cannot write', 90, one_cannot_write),
    'read-only': ('the disk becomes read-only, 2 processes', 60,
                  becomes_read_only),
    'files': ('a file of a checkpoint is cut, changed or missing', 5,
              damaged_files),
    'last': ('a bit of the last checkpoint flipped, 2 processes', START,
             damaged_last),
    'nan': ('worker 1 of 4 sees only NaN for a while', 60, one_sends_nan),
    'all-nan': ('all workers see only NaN for a while', 60, all_send_nan),
    'term': ('SIGTERM to the launcher of 3', 25,
             lambda folder: told_to_end(folder, 3, 'launcher')),
    'term-all': ('SIGTERM to all of 2', 25,
                 lambda folder: told_to_end(folder, 2, [0, 1])),
    'term-one': ('SIGTERM to process 1 of 2', 25,
                 lambda folder: told_to_end(folder, 2, [1])),
    'term-alone': ('SIGTERM to a process by itself', 25,
                   lambda folder: told_to_end(folder, 1, [0])),
    'int': ('Ctrl-C (SIGINT) to the launcher of 3', 25,
            lambda folder: told_to_end(folder, 3, 'launcher', signal.SIGINT)),
    'int-alone': ('Ctrl-C (SIGINT) to a process by itself', 25,
                  lambda folder: told_to_end(folder, 1, [0], signal.SIGINT)),
}


def try_case(name: str) -> Outcome:
  """Does it; the outcome, within the limit."""
  _, limit, case = CASES[name]
  with tempfile.TemporaryDirectory(prefix=f'fault-{name}-') as folder:
    outcome = case(pathlib.Path(folder) / 'run')
  assert outcome.seconds < limit, outcome
  return outcome


def main() -> None:
  for name in sys.argv[1:] or CASES:
    what, limit, _ = CASES[name]
    try:
      seconds, text = try_case(name)
      row = f'| {what} | {text} | {seconds:.1f} | {limit} |'
    except NotPossibleError as error:
      row = f'| {what} | not tried here: {error} | 0.0 | {limit} |'
    print(row, flush=True)
    write(what, row)


def write(what: str, row: str) -> None:
  """Puts a row in its place in the docs."""
  before, rest = DOCS.read_text().split(MARKS[0])
  body, after = rest.split(MARKS[1])
  rows = {line.split(' | ')[0].lstrip('| '): line
          for line in body.strip().splitlines()[2:]} | {what: row}
  lines = ['| fault | result | seconds | at most |',
           '|---|---|---|---|',
           *(rows[what] for what, *_ in CASES.values() if what in rows)]
  DOCS.write_text('\n'.join([before + MARKS[0], *lines, MARKS[1] + after]))


if __name__ == '__main__':
  main()
  conftest.pytest_unconfigure()
