"""Workers that are processes, with a relay in one of its own."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

HERE = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(HERE / 'remote'))

import test_bits

import demo_optax

STEPS = 50

# A process of one worker; it writes its parameters and losses to a file.
WORKER = """
import sys
import conftest, jax, numpy as np
import demo_optax, test_bits

address, rank, count, method, steps, out = sys.argv[1:]
rank, count = int(rank), int(count)
workers = demo_optax.Workers.remote(address, rank=rank, count=count)
data = test_bits.data_of(method, count, int(steps))
found = test_bits.train(
    test_bits.METHODS[method](workers), workers, [x[rank] for x in data])
np.savez(out, *jax.tree.leaves(found))
"""


@pytest.mark.parametrize('count, method', [
    (2, 'demo_muon'), (3, 'averaged'), (8, 'demo'), (8, 'demo_diloco')])
def test_as_simulated(tmp_path, count, method):
  """After 50 steps all processes have the bits of the simulation."""
  data = test_bits.data_of(method, count, STEPS)
  simulated = demo_optax.Workers.simulated(count)
  expected = test_bits.train(
      test_bits.METHODS[method](simulated), simulated,
      [x.reshape(count * 4, 24) for x in data])
  paths = [str(HERE.parent), str(HERE), str(HERE / 'remote')]
  env = os.environ | {'PYTHONPATH': os.pathsep.join(paths)}
  with contextlib.ExitStack() as stack:
    def start(*args, **options):
      process = stack.enter_context(subprocess.Popen(
          [sys.executable, *map(str, args)], env=env, **options))
      stack.callback(process.kill)
      return process
    relay = start('-m', 'demo_optax.remote', '--workers', count, '--port', 0,
                  stdout=subprocess.PIPE, text=True)
    address = relay.stdout.readline().split()[-1]
    workers = [
        start('-c', WORKER, address, rank, count, method, STEPS,
              tmp_path / f'{rank}.npz') for rank in range(count)]
    assert all(process.wait(240) == 0 for process in workers)
  found = []
  for rank in range(count):
    with np.load(tmp_path / f'{rank}.npz') as file:
      found.append([file[name] for name in file.files])
  test_bits.check(method, found, jax.tree.leaves(expected))
