"""Joins the processes of one training run.

A run has one process here, or one per host (or per accelerator) elsewhere. It
finds out by itself where it can:

- flags: `--coordinator HOST:PORT --processes N --process I`, or the environment
  variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
  (`launch_local.py` and the recipe for Kubernetes set them);
- a cluster that JAX detects: tasks of `srun` or Open MPI, TPUs on GKE; with
  `--distributed` whatever else JAX detects, such as TPU pods without GKE.

Nothing here may compute anything: `jax.distributed` has to come first.
"""

import argparse
import os

import jax


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group('several processes').add_argument
  env = os.environ.get
  add('--coordinator', default=env('JAX_COORDINATOR_ADDRESS'),
      metavar='HOST:PORT', help='of process 0')
  add('--processes', type=int, default=env('JAX_NUM_PROCESSES'), metavar='N')
  add('--process', type=int, default=env('JAX_PROCESS_ID'), metavar='I',
      help='number of this one, from 0')
  add('--distributed', action='store_true', help='let JAX find the others')
  add('--timeout', type=int, default=300, metavar='SECONDS',
      help='how long to wait for the others to start')


def join(args: argparse.Namespace) -> None:
  """Waits for the other processes of this run, if there are any."""
  own = {
      '--coordinator': args.coordinator,
      '--processes': args.processes,
      '--process': args.process,
  }
  missing = [flag for flag, value in own.items() if value is None]
  if 0 < len(missing) < 3:
    given = [flag for flag in own if flag not in missing]
    raise SystemExit(
        f'{", ".join(given)} without {", ".join(missing)}: give all three, or'
        ' none where JAX detects the cluster.'
    )
  if not missing:
    jax.distributed.initialize(
        args.coordinator, args.processes, args.process,
        initialization_timeout=args.timeout,
        cluster_detection_method='deactivate',
    )
  elif args.distributed or detects_cluster():
    jax.distributed.initialize(initialization_timeout=args.timeout)


def detects_cluster() -> bool:
  """Whether the environment is that of one process of many.

  `jax.distributed.initialize` looks again, and more closely; on a machine of
  its own it would fail.
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


def is_main() -> bool:
  """Whether this process writes files and shows progress."""
  return jax.process_index() == 0
