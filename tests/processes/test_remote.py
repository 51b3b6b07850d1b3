"""Workers that are processes, with a relay in one of its own."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from helpers import wait_until

HERE = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(HERE / 'remote'), str(HERE.parent / 'examples')]

import launch_local
import test_bits
import test_follow

import demo_optax

# A process of a worker; it writes the worker's parameters and losses to a file.
WORKER = """
import sys
import conftest, jax, numpy as np
import demo_optax, test_bits

address, rank, count, method, steps, out, *processes = sys.argv[1:]
rank, count, steps, devices = int(rank), int(count), int(steps), {}
if processes:  # a worker of two processes, with two devices of each
  port, number = processes
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'127.0.0.1:{port}', 2, int(number))
  each = [jax.local_devices(process_index=i)[:2] for i in range(2)]
  devices = {'mesh': jax.sharding.Mesh(sum(each, []), 'fsdp'),
             'param_specs': test_bits.SPECS}
workers = demo_optax.Workers.remote(
    address, rank=rank, count=count, **devices)
data = test_bits.data_of(method, count, steps)
found = test_bits.train(method, workers, [x[rank] for x in data])
np.savez(out, *jax.tree.leaves(found))
"""

# As before; worker 1 is there later, and late once. When it has called `steps`
# steps, a file ends all.
LATER = (
  WORKER[: WORKER.index('data = ')]
  + """
import itertools, pathlib, time
import test_late
from jax.experimental import multihost_utils

end, calls = pathlib.Path(out).with_name('end'), itertools.count()

def before(_):
  number = next(calls)
  time.sleep(0.05)
  if number == 40:
    end.with_name(f'begun-{rank}').touch()
  if rank == 1 and number == steps:
    end.touch()
  if rank == 1 and number == 4 and jax.process_index() == 1:
    time.sleep(1.2)  # of one process: the other one waits
  if multihost_utils.broadcast_one_to_all(np.int32(end.exists())):
    raise test_late.Done

found = test_late.train(workers, 10_000, before)
joined = test_late.INFOS[rank]['joined']
np.savez(out, joined=joined, **{
    f'{n} {key}': x for n in found for key, x in found[n].items()})
"""
)


# A process that follows one trainer; it prints parameters, in hexadecimal.
FOLLOWER = """
import sys
import conftest
import demo_optax, test_follow

workers = demo_optax.Workers.remote(sys.argv[1], rank=None, count=1)
for number, _, (params, _) in test_follow.follow(workers, 'demo'):
  print(number, test_follow.digest_of(params), flush=True)
"""


def test_a_follower_that_is_killed():
  """SIGKILL, twice; it is started again, and has the trainer's bits."""
  of_trainer, until = {}, threading.Event()

  def run(workers):
    test_follow.train(workers, 'demo', until, of_trainer)

  def follow_and_kill():
    try:
      for _ in range(3):
        follow_for_a_while()
    finally:
      until.set()

  def follow_for_a_while():
    with running() as start:
      process = start(
        '-c', FOLLOWER, joined.address, stdout=subprocess.PIPE, text=True
      )
      lines = [process.stdout.readline().split() for _ in range(4)]
      process.kill()
    for number, digest in lines:
      wait_until(lambda number=number: int(number) in of_trainer)
      assert test_follow.digest_of(of_trainer[int(number)]) == digest

  with test_bits.Joined(1) as joined:
    killer = threading.Thread(target=follow_and_kill)
    killer.start()
    joined.run(run)
    killer.join()
  assert [*of_trainer] == [*range(1, 1 + len(of_trainer))]


@pytest.mark.parametrize(
  'count, method, processes',
  [
    (2, 'demo_muon', 1),
    (3, 'averaged', 1),
    (8, 'demo', 1),
    (3, 'demo_diloco', 1),
    (2, 'demo', 2),
    (2, 'averaged', 2),
  ],
)
def test_as_simulated(tmp_path, count, method, processes):
  """All processes have the bits of the simulation; two shard parameters."""
  steps = {1: 50, 2: 12}[processes]
  inside = (test_bits.SPECS, {'fsdp': 4}) if processes == 2 else ()
  data = test_bits.data_of(method, count, steps)
  simulated = demo_optax.Workers.simulated(count, *inside)
  expected = test_bits.train(method, simulated, test_bits.joined_rows(data))
  with running() as start:
    address = start_relay(start, count, '--deadline', 60)
    workers = [
      process
      for rank in range(count)
      for process in start_worker(
        start, WORKER, address, rank, count, method, steps, tmp_path, processes
      )
    ]
    assert all(process.wait(900) == 0 for process in workers)
  test_bits.check(
    method,
    [
      read(tmp_path, f'{r}-{n}') for r in range(count) for n in range(processes)
    ],
    jax.tree.leaves(expected),
  )


def test_a_worker_of_several_processes_joins_and_is_late(tmp_path):
  with running() as start:
    address = start_relay(
      start, 2, '--start', 2, '--deadline', 0.5, '--history', 32
    )

    def worker(rank):
      return start_worker(
        start, LATER, address, rank, 2, 'demo', 16, tmp_path, 2
      )

    first = worker(0)
    wait_until((tmp_path / 'begun-0').exists, 600)
    assert all(p.wait(900) == 0 for p in [*first, *worker(1)])
  found = [
    np.load(tmp_path / f'{r}-{n}.npz') for r in range(2) for n in range(2)
  ]
  assert [int(own['joined']) for own in found] == [0, 0, 1, 1]
  shared = set.intersection(*(set(own.files) for own in found)) - {'joined'}
  rounds = sorted(int(name.split()[0]) for name in shared if name.endswith('w'))
  assert len(rounds) >= 12 and rounds[-1] - rounds[0] > len(rounds)
  for name in shared:
    for own in found[1:]:
      np.testing.assert_array_equal(own[name], found[0][name])


@contextlib.contextmanager
def running():
  """Starts Python processes, and ends them."""
  paths = [str(HERE.parent), str(HERE), str(HERE / 'remote')]
  env = os.environ | {'PYTHONPATH': os.pathsep.join(paths)}
  with contextlib.ExitStack() as stack:

    def start(*args, **options):
      process = stack.enter_context(
        subprocess.Popen([sys.executable, *map(str, args)], env=env, **options)
      )
      stack.callback(process.kill)
      return process

    yield start


def start_relay(start, count, *options):
  relay = start(
    '-m',
    'demo_optax.remote',
    '--workers',
    count,
    '--port',
    0,
    *options,
    stdout=subprocess.PIPE,
    text=True,
  )
  return relay.stdout.readline().split()[-1]


def start_worker(
  start, code, address, rank, count, method, steps, folder, processes
):
  """Starts the processes of a worker."""
  port = launch_local.free_port()
  return [
    start(
      '-c',
      code,
      address,
      rank,
      count,
      method,
      steps,
      folder / f'{rank}-{n}.npz',
      *[port, n] * (processes > 1),
    )
    for n in range(processes)
  ]


def read(folder, name):
  with np.load(folder / f'{name}.npz') as file:
    return [file[key] for key in file.files]
