"""Faults: a clear error or a run that goes on, in time, and nothing left."""

import os
import pathlib
import signal
import subprocess
import sys

import faults
import pytest


@pytest.mark.slow
@pytest.mark.parametrize('name', faults.CASES)
def test_fault(name):
  try:
    faults.try_case(name)
  except faults.NotPossibleError as reason:
    pytest.skip(str(reason))


def test_every_fault_is_in_the_docs():
  text = faults.DOCS.read_text()
  body = text.split(faults.MARKS[0])[1].split(faults.MARKS[1])[0]
  rows = [line.split(' | ') for line in body.strip().splitlines()[2:]]
  found = [(row[0].lstrip('| '), int(row[-1].rstrip(' |'))) for row in rows]
  assert found == [(what, limit) for what, limit, _ in faults.CASES.values()]
  for row in rows:
    assert float(row[-2]) <= int(row[-1].rstrip(' |')), row


def test_sigterm_is_heard(monkeypatch):
  """By one process alone; those of several agree, which is slow to try."""
  monkeypatch.syspath_prepend(str(faults.ROOT / 'examples'))
  import cluster

  before = signal.getsignal(signal.SIGTERM)
  with cluster.StopSignal() as stop:
    assert not stop.after(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.after(2) == stop.after(3) == signal.SIGTERM
  assert signal.getsignal(signal.SIGTERM) == before


FAILING = '''
import os, pathlib, sys
count, number = os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_PROCESS_ID']
os.write(1, f'of {count}\\n'.encode())  # whole, even if it is killed now
if count in sys.argv[1:] and number == '1':
  sys.exit(7)
'''


@pytest.mark.parametrize('failing, counts, status', [
    (['4', '3'], ['4', '3', '2'], 0), (['4', '3', '2'], ['4', '3', '2', '1'], 0)])
def test_elastic_launcher(failing, counts, status):
  """One process less after each failure, until it succeeds."""
  run = subprocess.run(
      [*faults.LAUNCH, '-n', '4', '--elastic', '--', sys.executable, '-c',
       FAILING, *failing], text=True, capture_output=True, timeout=120)
  assert run.returncode == status
  seen = [line.split()[-1] for line in run.stdout.splitlines()]
  assert list(dict.fromkeys(seen)) == counts
  again = [f'starting again with {n} process(es)' for n in counts[1:]]
  assert [line for line in run.stderr.splitlines() if 'again' in line] == again


def test_elastic_launcher_gives_up():
  """When the last process fails, with its status."""
  code = 'import sys; sys.exit(5)'
  run = subprocess.run(
      [*faults.LAUNCH, '-n', '2', '--elastic', '--', sys.executable, '-c',
       code], text=True, capture_output=True, timeout=120)
  assert run.returncode == 5
  assert run.stderr.count('ended with status 5') == 2


def test_links_are_skipped_with_a_message(tmp_path):
  """Where network namespaces cannot be had: here, no `unshare` is found."""
  links = pathlib.Path(faults.ROOT / 'benchmarks/links.py')
  run = subprocess.run(
      [sys.executable, str(links), '--out', str(tmp_path / 'links.json')],
      env={**os.environ, 'PATH': str(tmp_path)}, text=True,
      capture_output=True, timeout=60)
  assert run.returncode == 0, run.stderr
  assert 'Nothing is measured' in run.stdout and 'unshare' in run.stdout
  assert not (tmp_path / 'links.json').exists()
