"""Joins the processes of one training run.

A run is one process, or one per host or accelerator. The others are found by:

- flags: `--coordinator HOST:PORT --processes N --process I`, or the environment
  variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
  (`launch_local.py` and the recipe for Kubernetes set them);
- a cluster that JAX detects: tasks of `srun` or Open MPI, TPUs on GKE; with
  `--distributed` also others, such as TPU pods without GKE.

Call `join` before anything is computed, because `jax.distributed` must start
first. An error in one process ends all of them (`failing_at_once`). After a
signal to one process all stop after the same step (`StopSignal`).
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType

import flags
import jax
import numpy as np
from jax.experimental import multihost_utils

import demo_optax


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group('several processes').add_argument
  env = os.environ.get
  add(
    '--coordinator',
    default=env('JAX_COORDINATOR_ADDRESS'),
    metavar='HOST:PORT',
    help='address of process 0',
  )
  add(
    '--processes',
    type=flags.whole(1),
    default=env('JAX_NUM_PROCESSES'),
    metavar='N',
    help='number of processes',
  )
  add(
    '--process',
    type=flags.whole(0),
    default=env('JAX_PROCESS_ID'),
    metavar='I',
    help='number of this one, from 0',
  )
  add('--distributed', action='store_true', help='let JAX find the others')
  add(
    '--timeout',
    type=flags.whole(1),
    default=300,
    metavar='SECONDS',
    help='time to wait for the other processes; default: 300',
  )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Refuses flags of processes that do not fit each other."""
  own = {
    '--coordinator': args.coordinator,
    '--processes': args.processes,
    '--process': args.process,
  }
  missing = [flag for flag, value in own.items() if value is None]
  if 0 < len(missing) < 3:
    given = [flag for flag in own if flag not in missing]
    parser.error(
      f'{", ".join(given)} without {", ".join(missing)}: give all three, or'
      ' none where JAX detects the cluster.'
    )
  if missing:
    return
  if not is_address(args.coordinator):
    parser.error(
      f'--coordinator {args.coordinator}: it must be HOST:PORT, with a port'
      ' from 1 to 65535.'
    )
  if args.process >= args.processes:
    parser.error(
      f'--process {args.process}: the processes are numbered from 0 to'
      f' {args.processes - 1}.'
    )


def is_address(text: str) -> bool:
  host, _, port = text.rpartition(':')
  return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def join(args: argparse.Namespace) -> None:
  """Waits for the other processes of this run, if there are any."""
  if args.coordinator is not None:
    jax.distributed.initialize(
      args.coordinator,
      args.processes,
      args.process,
      initialization_timeout=args.timeout,
      cluster_detection_method='deactivate',
    )
  elif args.distributed or detects_cluster():
    try:
      jax.distributed.initialize(initialization_timeout=args.timeout)
    except ValueError as error:  # before anything is sent
      flags.refuse(
        f'JAX finds no cluster here ({error}): give --coordinator,'
        ' --processes and --process.'
      )
  # Connect now: on CPU gloo waits for 30 s only, and later a process can be
  # further behind.
  multihost_utils.sync_global_devices('all are here')


def detects_cluster() -> bool:
  """Whether the environment is that of one process of many.

  On a single machine `jax.distributed.initialize` would fail.
  """
  env = os.environ
  tasks = env.get('SLURM_STEP_NUM_TASKS') or env.get('SLURM_NTASKS') or '1'
  slurm = 'SLURM_STEP_NODELIST' in env and int(tasks) > 1
  open_mpi = int(env.get('OMPI_COMM_WORLD_SIZE') or '1') > 1
  tpu_slices = int(env.get('MEGASCALE_NUM_SLICES') or '1') > 1
  hosts = ('TPU_PROCESS_ADDRESSES', 'TPU_WORKER_HOSTNAMES')
  tpu_pod = any(',' in env.get(name, '') for name in hosts)
  tpu_pod |= 'TPU_PROCESS_ADDRESSES_PATH' in env
  return slurm or open_mpi or tpu_slices or tpu_pod


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
  """Ends the process, if it is one of several, where an error would leave.

  At exit JAX would wait minutes for the other processes, and they would wait
  for a message of this one. If this process ends at once its connections close.
  The others then fail, and end as well.
  """
  try:
    yield
  except BaseException as error:
    if not jax.distributed.is_initialized():
      raise
    status = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
      traceback.print_exc()
    elif status is not None and not isinstance(status, int):
      print(status, file=sys.stderr)
      status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


class StopSignal:
  """SIGTERM or Ctrl-C to any process: all stop after the same step.

  The processes gather two numbers about once a second: the signal, and the
  seconds of a step, from which all compute the step of the next gather. Gathers
  in every step would cost a round trip each, and clocks differ. (JAX has a
  preemption service. But Orbax reports an earlier step to it while a save ends
  in the background, and a signal at that moment is lost.)

  A signal only sets a flag: an exception during a compilation ends some JAX
  versions with a segmentation fault. A second Ctrl-C ends the process at once.
  A thread handles it: the main thread runs no Python during a compilation.
  """

  def __init__(self) -> None:
    self._heard = 0
    self.begin()
    # In the place of JAX's own handler of SIGTERM.
    self._former = {
      number: signal.signal(number, self._hear)
      for number in (signal.SIGTERM, signal.SIGINT)
    }
    self._pipe = socket.socketpair()
    self._pipe[1].setblocking(False)
    self._former_pipe = signal.set_wakeup_fd(
      self._pipe[1].fileno(), warn_on_full_buffer=False
    )
    threading.Thread(target=self._watch, daemon=True).start()

  def __enter__(self) -> 'StopSignal':
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._former.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._former_pipe)
    self._pipe[1].close()  # and the thread ends

  def begin(self) -> None:
    """Gathers after the next step."""
    self._asked: tuple[int, float] | None = None  # after which step, and when
    self._next = 0

  def _hear(self, number: int, frame: FrameType | None) -> None:
    del frame
    self._heard = self._heard or number

  def _watch(self) -> None:
    interrupts = 0
    with self._pipe[0] as pipe:
      while numbers := pipe.recv(64):
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
          os._exit(128 + signal.SIGINT)
        if interrupts:
          os.write(2, b'Stopping after this step; Ctrl-C again: at once.\n')

  def after(self, step: int) -> int:
    """Returns the signal to stop after `step`, or 0. All call it each step."""
    if jax.process_count() == 1:
      return self._heard
    if step < self._next:
      return 0
    now = time.monotonic()
    before, then = self._asked or (step - 1, now - 1)
    seconds = (now - then) / max(1, step - before)
    mine = np.array([self._heard, seconds], np.float32)
    heard, seconds = multihost_utils.process_allgather(mine).max(0)
    self._asked = step, now
    self._next = step + max(1, int(1 / max(seconds, 1e-3)))
    return int(heard)


def is_main() -> bool:
  """Whether this process writes files and shows progress."""
  return jax.process_index() == 0


def say(words: str) -> None:
  """Prints, in one process."""
  if is_main():
    print(words, flush=True)


def make_workers(count: int | None) -> demo_optax.Workers:
  """One worker per device where there are several, else simulated ones."""
  devices = jax.devices()
  if jax.process_count() > 1 and count not in (None, len(devices)):
    flags.refuse(
      f'--workers {count}: with several processes there is one worker for'
      f' each of the {len(devices)} devices. Leave it out.'
    )
  count = count or (len(devices) if len(devices) > 1 else 4)
  if count > len(devices) or len(devices) == 1:
    return demo_optax.Workers.simulated(count)
  mesh = jax.make_mesh(
    (count,),
    ('data',),
    devices=devices[:count],
    axis_types=(jax.sharding.AxisType.Auto,),
  )
  return demo_optax.Workers.on_mesh(mesh, 'data')


def remove_checkpoints(folder: pathlib.Path, overwrite: bool) -> None:
  """Removes the checkpoints of an earlier run, if the flags allow it."""
  if folder.exists() and any(folder.iterdir()) and not overwrite:
    flags.refuse(
      f'There are checkpoints in {folder}: give --resume, --overwrite, or'
      ' another --out.'
    )
  multihost_utils.sync_global_devices('all have looked for checkpoints')
  if is_main():
    shutil.rmtree(folder, ignore_errors=True)
  multihost_utils.sync_global_devices('former checkpoints are removed')
