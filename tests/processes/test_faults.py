"""Faults: a clear error or a run that goes on, in time, and nothing left."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import faults


@pytest.mark.slow
@pytest.mark.parametrize('name', faults.CASES)
def test_fault(name):
  faults.try_case(name)


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
  monkeypatch.syspath_prepend(str(ROOT / 'examples'))
  import cluster

  before = signal.getsignal(signal.SIGTERM)
  with cluster.StopSignal() as stop:
    assert not stop.after(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.after(2) == stop.after(3) == signal.SIGTERM
  assert signal.getsignal(signal.SIGTERM) == before


def test_links_are_skipped_with_a_message(tmp_path):
  """Where network namespaces cannot be had: here, no `unshare` is found."""
  links = ROOT / 'benchmarks/links.py'
  run = subprocess.run(
    [sys.executable, str(links), '--out', str(tmp_path / 'links.json')],
    env={**os.environ, 'PATH': str(tmp_path)},
    text=True,
    capture_output=True,
    timeout=60,
  )
  assert run.returncode == 0, run.stderr
  assert 'Nothing is measured' in run.stdout and 'unshare' in run.stdout
  assert not (tmp_path / 'links.json').exists()
