"""Injects faults into training runs, and writes the table of docs/faults.md.

    python benchmarks/faults.py            # all rows
    python benchmarks/faults.py FAULT...   # some of them

Each case starts a run, injects a fault, and asserts the outcome within a limit
of seconds. `pytest -m slow tests/processes/test_faults.py` runs the same cases.
"""

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / 'docs/faults.md'
MARKS = '<!-- faults: python benchmarks/faults.py -->', '<!-- end -->'

SMALL = [
  '--width',
  '32',
  '--layers',
  '1',
  '--heads',
  '2',
  '--batch',
  '12',
  '--eval-every',
  '1000000',
  '--save-every',
  '20',
]
TRAIN = [sys.executable, str(ROOT / 'examples/train_lm.py'), *SMALL]
LAUNCH = [sys.executable, str(ROOT / 'examples/launch_local.py')]
START = 240  # seconds in which a run has begun to train, on a busy machine


class Outcome(NamedTuple):
  """What a run did after a fault, and the seconds until then."""

  seconds: float
  text: str


# A run with a fault -----------------------------------------------------------


class Run:
  """Processes of the training example; all of them end with the block."""

  def __init__(self, folder: pathlib.Path, command: list, **environment):
    self.folder = folder
    self.marker = f'DEMO_FAULT={uuid.uuid4()}'
    name, value = self.marker.split('=')
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {
      name: value,
      'JAX_PLATFORMS': 'cpu',
      'PYTHONUNBUFFERED': '1',
      'PYTHONPATH': os.pathsep.join(p for p in paths if p),
      **environment,
    }
    self.process = subprocess.Popen(
      [*map(str, command), '--out', str(folder)],
      env=env,
      text=True,
      errors='replace',
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
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
    self.process.stdout.close()

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
        number = [
          e.split('=')[1]
          for e in environment
          if e.startswith('JAX_PROCESS_ID=')
        ]
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
      lambda: self.steps and self.steps[-1] >= saved * every, START
    )
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
  names = [p.name for p in (folder / 'demo_muon/checkpoints').glob('*')]
  return sorted(int(n) for n in names if n.isdigit())


def launched(folder, processes, *flags, launcher=(), **environment) -> Run:
  """A long run under the launcher."""
  return Run(
    folder,
    [
      *LAUNCH,
      '-n',
      processes,
      *launcher,
      '--',
      *TRAIN,
      '--steps',
      '1000000',
      *flags,
    ],
    **environment,
  )


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


def killed(folder, number):
  with launched(folder, 3) as run:
    run.trains().kill(number)
    status, seconds = run.ended(40)
    assert status in (1, 134, 137), run.output
  step = resumes(folder, 3)
  return Outcome(seconds, f'all end; resumed after step {step}')


def late(folder):
  flags = ['--steps', '20', '--timeout', '60']
  port = 20000 + os.getpid() % 10000 + 7
  with contextlib.ExitStack() as stack:

    def start(number):
      return stack.enter_context(
        Run(
          folder,
          [*TRAIN, *flags],
          JAX_PROCESS_ID=str(number),
          JAX_NUM_PROCESSES='2',
          JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}',
        )
      )

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
  return Outcome(
    seconds,
    'the first one waits (`--timeout`, 300 s if not'
    ' given); both train to the end',
  )


def never(folder):
  with Run(
    folder,
    [*TRAIN, '--timeout', '15'],
    JAX_PROCESS_ID='0',
    JAX_NUM_PROCESSES='2',
    JAX_COORDINATOR_ADDRESS='127.0.0.1:20009',
  ) as run:
    status, seconds = run.ended(60)
    assert status not in (0, None), run.output
    text = run.says('DEADLINE_EXCEEDED|[Tt]imed out|timed out')
  return Outcome(seconds, f'an error once `--timeout 15` is over ("{text}")')


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
  return Outcome(
    seconds,
    f'an error in both ("{text}") once the save has had'
    ' its `--save-timeout 20`; resumed after step'
    f' {step}',
  )


def told_to_end(folder, processes, to, number=signal.SIGTERM):
  if processes == 1:
    run = Run(folder, [*TRAIN, '--workers', '2', '--steps', '1000000'])
  else:
    run = launched(folder, processes)
  with run:
    before = run.trains().steps[-1]
    by_number = to != 'launcher' and processes > 1
    pids = [run.pid(i) for i in to] if by_number else [run.process.pid]
    for pid in pids:
      os.kill(pid, number)
    status, seconds = run.ended(25)
    assert status == 128 + number, run.output
    name = signal.Signals(number).name
    step = int(run.says(rf'Stopped by {name} after step \d+').split()[-1])
  assert step == run.steps[-1] and step > before
  assert resumes(folder, max(2, processes)) == step
  return Outcome(
    seconds,
    'all stop after the same step, which is saved;'
    f' status {128 + number}; resumed from there',
  )


# With a relay -----------------------------------------------------------------


class Relayed:
  """A relay and workers that are runs of their own."""

  def __init__(self, folder, workers, steps=100000):
    self.folder, self.count, self.steps = folder, workers, steps
    self.stack = contextlib.ExitStack()
    self.port = 20000 + os.getpid() % 10000 + 11
    self.relay = self.start_relay()
    self.workers = [self.start(rank) for rank in range(workers)]

  def __enter__(self):
    return self.stack.__enter__() and self

  def __exit__(self, *error):
    self.stack.__exit__(*error)

  def start_relay(self):
    command = [
      sys.executable,
      '-m',
      'demo_optax.remote',
      '--workers',
      self.count,
      '--port',
      self.port,
      '--start',
      START,
    ]
    relay = subprocess.Popen(
      list(map(str, command)),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      cwd=ROOT,
    )
    self.stack.callback(relay.wait)
    self.stack.callback(relay.kill)
    return relay

  def start(self, rank):
    return self.stack.enter_context(
      Run(
        self.folder,
        [
          *TRAIN,
          '--relay',
          f'tcp://127.0.0.1:{self.port}',
          '--rank',
          rank,
          '--workers',
          self.count,
          '--steps',
          self.steps,
          '--overwrite',
        ],
      )
    )

  def losses(self, rank):
    """By step, of all workers, as this one has seen it."""
    files = [*self.folder.glob(f'demo_muon-{rank}/*.jsonl')]
    lines = files[0].read_text().splitlines()[1:] if files else []
    found = [json.loads(line) for line in lines if line.endswith('}')]
    return {x['step']: x['loss'] for x in found}

  def goes_on(self, ranks, steps=20):
    """Waits until workers have trained; returns seconds to the first step."""
    before = [len(self.losses(r)) for r in ranks]
    began, first = time.monotonic(), None
    while True:
      done = [len(self.losses(r)) - b for r, b in zip(ranks, before)]
      if min(done) >= 3:
        first = first or time.monotonic() - began
      if min(done) >= steps:
        return first
      assert time.monotonic() < began + START, [
        self.workers[r].output for r in ranks
      ]
      time.sleep(0.02)

  def check(self):
    """The same losses, of the same parameters, at each step."""
    found = [self.losses(rank) for rank in range(self.count)]
    shared = set.intersection(*map(set, found))
    assert len(shared) >= 20
    for step in shared:
      assert len({losses[step] for losses in found}) == 1, step


def worker_killed(folder):
  with Relayed(folder, 3) as job:
    job.goes_on([0, 1, 2])
    job.workers[1].process.kill()
    seconds = job.goes_on([0, 2])
    job.workers[1] = job.start(1)
    back = job.goes_on([0, 1, 2])
    job.check()
  return Outcome(
    seconds,
    'the others wait for a second and go on;'
    f' started again, it takes part after {back:.0f} s',
  )


def workers_stopped(folder, ranks):
  with Relayed(folder, 3) as job:
    job.goes_on([0, 1, 2])
    for rank in ranks:
      job.workers[rank].process.send_signal(signal.SIGSTOP)
    seconds = job.goes_on([r for r in range(3) if r not in ranks])
    time.sleep(5)
    for rank in ranks:
      job.workers[rank].process.send_signal(signal.SIGCONT)
    job.goes_on([0, 1, 2])
    job.check()
  return Outcome(
    seconds,
    'the others wait for one deadline (2 s) and go on;'
    ' continued, they apply what they missed',
  )


def relay_killed(folder):
  with Relayed(folder, 3) as job:
    job.goes_on([0, 1, 2])
    job.relay.kill()
    job.relay.wait()
    time.sleep(3)
    began = time.monotonic()
    job.relay = job.start_relay()
    job.goes_on([0, 1, 2], 1)
    seconds = time.monotonic() - began
    job.check()
  return Outcome(seconds, 'workers wait for it, and go on from their round')


# name: what is done, in how many seconds it has to be over.
CASES = {
  'kill': ('SIGKILL of process 1 of 3', 40, lambda folder: killed(folder, 1)),
  'kill-first': (
    'SIGKILL of process 0 of 3',
    40,
    lambda folder: killed(folder, 0),
  ),
  'late': ('process 1 of 2 starts 15 s late', START, late),
  'never': ('process 1 of 2 never starts', 60, never),
  'one-full': ('process 1 of 2 alone cannot write', 90, one_cannot_write),
  'term': (
    'SIGTERM to the launcher of 3',
    25,
    lambda folder: told_to_end(folder, 3, 'launcher'),
  ),
  'term-one': (
    'SIGTERM to process 1 of 2',
    25,
    lambda folder: told_to_end(folder, 2, [1]),
  ),
  'int-alone': (
    'Ctrl-C (SIGINT) to a process by itself',
    25,
    lambda folder: told_to_end(folder, 1, [0], signal.SIGINT),
  ),
  'relay-kill': ('with a relay: SIGKILL of worker 1 of 3', 15, worker_killed),
  'relay-stop': (
    'with a relay: SIGSTOP of worker 2 of 3, for 5 s and more',
    15,
    lambda folder: workers_stopped(folder, [2]),
  ),
  'relay-stop-two': (
    'with a relay: SIGSTOP of workers 0 and 1 of 3',
    15,
    lambda folder: workers_stopped(folder, [0, 1]),
  ),
  'relay-restart': (
    'SIGKILL of the relay, and another one 3 s later',
    15,
    relay_killed,
  ),
}


def try_case(name: str) -> Outcome:
  """Does it; the outcome, within the limit."""
  _, limit, case = CASES[name]
  with tempfile.TemporaryDirectory(prefix=f'fault-{name}-') as folder:
    outcome = case(pathlib.Path(folder) / 'run')
  assert outcome.seconds < limit, outcome
  return outcome


def main() -> None:
  """Puts rows in their places in the docs."""
  for name in sys.argv[1:] or CASES:
    what, limit, _ = CASES[name]
    seconds, text = try_case(name)
    row = f'| {what} | {text} | {seconds:.1f} | {limit} |'
    print(row, flush=True)
    old = DOCS.read_text()
    start = old.index(f'| {what} |')
    DOCS.write_text(old[:start] + row + old[old.index('\n', start) :])


if __name__ == '__main__':
  main()
