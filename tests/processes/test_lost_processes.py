"""Processes that are lost, stopped, and come, while the others train."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

HERE = pathlib.Path(__file__).parents[1]
START = 240  # seconds in which all train, on a busy machine


class Process:
  """A process, and the lines that it has written."""

  def __init__(self, *command, devices=1):
    env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
    paths = [str(HERE.parent), env.get('PYTHONPATH', '')]
    env |= {'PYTHONPATH': os.pathsep.join(p for p in paths if p),
            'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices),
            'JAX_SHARE_BINARY_BETWEEN_HOSTS': '1'}  # as launch_local.py
    self.process = subprocess.Popen(
        [sys.executable, *map(str, command)], env=env, text=True,
        errors='replace', stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True)
    self.lines = []
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    self.lines.extend(iter(self.process.stdout.readline, ''))

  def signal(self, number):
    os.kill(self.process.pid, number)

  def end(self):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait(20)
    self._reader.join(20)
    self.process.stdout.close()

  def wait(self, seconds):
    try:
      return self.process.wait(seconds)
    finally:
      if self.process.poll() is not None:
        self._reader.join(20)

  @property
  def text(self):
    return ''.join(self.lines)

  @property
  def records(self):
    return [json.loads(line) for line in self.lines if line.startswith('{')]

  @property
  def last(self):
    steps = [r for r in self.records if 'step' in r]
    return steps[-1] if steps else {'step': -1, 'workers': 0, 'generation': 0}


class Cluster(contextlib.ExitStack):
  """A coordinator, and workers that end with the block."""

  def __init__(self, workers, *flags):
    super().__init__()
    self.coordinator = self._start(
        '-m', 'demo_optax.elastic', '--host', '127.0.0.1', '--port', 0,
        '--workers', workers, *flags)
    until(lambda: 'port' in self.coordinator.text, 60, self.coordinator)
    port = re.search(r'listening on port (\d+)', self.coordinator.text).group(1)
    self.address = f'127.0.0.1:{port}'

  def _start(self, *command, **kwargs):
    process = Process(*command, **kwargs)
    self.callback(process.end)
    return process

  def worker(self, *orders, steps=60, kind='demo', **kwargs):
    return self._start(
        HERE / 'elastic_worker.py', self.address, steps, kind, *orders, **kwargs)


def until(condition, seconds, *processes):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, '\n'.join(p.text for p in processes)
    for p in processes:
      assert p.process.poll() in (None, 0), p.text
    time.sleep(0.05)


def trains(process, **found):
  return lambda: process.last['step'] > 0 and all(
      process.last[name] == value for name, value in found.items())


def check_end(processes, cluster):
  """All have the same, at the end and at every step.

  One that was ahead when a generation ended has made a step that is made again.
  """
  for p in processes:
    assert p.wait(START) == 0, p.text
  ends = [p.records[-1] for p in processes]
  assert len({(e['end'], e['loss'], e['shared']) for e in ends}) == 1, ends
  assert not any(e['differ'] for e in ends)
  shared = {}
  for p in processes:
    for r in p.records[:-1]:
      at = r['generation'], r['at']
      assert shared.setdefault(at, r['shared']) == r['shared'], r
  assert cluster.coordinator.wait(60) == 0, cluster.coordinator.text


def check_survivor(process):
  """What it had after a step it has in the next generation, too."""
  seen, generation, changes = {}, 1, 0
  for r in process.records[:-1]:
    had = {name: r[name] for name in ('shared', 'own')}
    if r['generation'] != generation:
      assert seen[r['at']] == had, r
      seen, generation, changes = {}, r['generation'], changes + 1
    assert seen.setdefault(r['at'], had) == had, r
  assert changes


@pytest.mark.parametrize('kind, each', [
    ('demo', 1), *(pytest.param(kind, each, marks=pytest.mark.slow)
                   for kind, each in (('muon', 1), ('local', 1), ('owners', 1),
                                      ('demo', 2), ('owners', 2)))])
def test_processes_leave_and_come(kind, each):
  """One is killed, one comes, one is stopped and wakes: same parameters.

  With `each` workers in a process.
  """
  with Cluster(3, '--deadline', 5) as cluster:
    begin = time.monotonic()
    start = lambda: cluster.worker(
        'pause=.1', kind=kind, steps=150, devices=each)
    a, b, c = start(), start(), start()
    until(trains(b, workers=3 * each), START, a, b, c)
    started = time.monotonic() - begin
    a.signal(signal.SIGKILL)
    until(trains(b, workers=2 * each), START, b, c)
    d = start()
    until(trains(b, workers=3 * each), START, b, c, d)
    until(trains(d, workers=3 * each), START, b, c, d)
    assert d.records[0]['step'] > 0  # not from the beginning
    b.signal(signal.SIGSTOP)
    until(trains(c, workers=2 * each), START + started, c, d)
    b.signal(signal.SIGCONT)
    until(trains(c, workers=3 * each), START, c, d)
    check_end([b, c, d], cluster)
    check_survivor(c)
    assert [r['workers'] for r in c.records if r.get('step')][-1] == 3 * each
    assert {r['generation'] for r in c.records if 'step' in r} == {1, 2, 3, 4, 5}
    assert 'silent' in cluster.coordinator.text
    assert c.records[-1]['loss'] < c.records[0].get('loss', 1.4)


def test_all_but_one_are_lost():
  """Two at once, and one while the others begin anew."""
  with Cluster(4) as cluster:
    a = cluster.worker('pause=.1')
    b = cluster.worker('die=5')
    c = cluster.worker('die=5')
    d = cluster.worker('die-building=2')
    until(trains(a, workers=1), START, a)
    check_end([a], cluster)
    check_survivor(a)
    for lost in (b, c, d):
      assert lost.wait(10) == -signal.SIGKILL
    first = [r['workers'] for r in a.records if 'step' in r]
    assert first[0] == 4 and first[-1] == 1


def test_lost_between_the_collectives_of_owners():
  """Its message has arrived, and the update of its chunks never comes."""
  with Cluster(3) as cluster:
    a, b, c = (cluster.worker(f'between={step}', kind='owners', steps=20)
               for step in (-1, 7, -1))
    assert b.wait(START) == -signal.SIGKILL, b.text
    check_end([a, c], cluster)
    for survivor in a, c:
      check_survivor(survivor)
      assert survivor.last['workers'] == 2
    assert b.last['step'] == 7


def test_an_error_of_its_own_ends_one():
  with Cluster(2) as cluster:
    a, b = cluster.worker(steps=20), cluster.worker('error=4', steps=20)
    assert b.wait(START) == 1
    assert "KeyError: 'of its own'" in b.text
    check_end([a], cluster)
    assert a.last['workers'] == 1


def test_who_comes_with_something_else_has_to_go():
  """Another compressor, and another optimizer beside one that fits."""
  with Cluster(2) as cluster:
    a, b = (cluster.worker('pause=.1', steps=300) for _ in range(2))
    until(trains(a, workers=2), START, a, b)
    c = cluster.worker('topk=8')
    assert c.wait(START) == 1
    assert re.search(r'Processes \[2\] were started with something else than'
                     ' process 0: different are compressor', c.text), c.text
    until(trains(a, workers=2, generation=3), START, a, b)
    d = cluster.worker(kind='adamw')
    e = cluster.worker('pause=.1', steps=300)
    assert d.wait(START) == 1
    assert 'ValueError: This process has built another state' in d.text, d.text
    until(trains(e, workers=3), START, a, b, e)
    check_end([a, b, e], cluster)
    check_survivor(a)


def test_without_a_coordinator_all_end():
  """It holds what they find each other by; then there are the checkpoints."""
  with Cluster(2) as cluster:
    a, b = cluster.worker('pause=.1'), cluster.worker('pause=.1')
    until(trains(a, workers=2), START, a, b)
    cluster.coordinator.signal(signal.SIGKILL)
    for p in (a, b):
      assert p.wait(60) not in (0, None)
      # Whichever of the two connections is missed first.
      assert re.search('has hung up on|coordination service', p.text), p.text
