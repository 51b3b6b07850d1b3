"""Decoupled momentum (DeMo) for JAX.

Data-parallel training in which each worker sends about one percent of its
gradient's bytes, or less. A training script changes in two lines.

    transformation  the exchange as an optax transformation
    recipes/        optimizers in one line: chains around the exchange
    local           local updates between exchanges
    step/           `data_parallel`: one worker's training step, run for all
    exchange/       Algorithm 1, as one worker runs it: the main path
    _per_worker     transformations before the exchange
    state           reads optimizer states
    checkpoint/     saves and restores, also for another number of workers
    compressors/    selectors and transforms of momentum
    codes/          values and indices as words
    workers/        simulated, on a mesh, or on a caller's axis
    remote/         workers that are programs, and the relay that joins them
    numerics/       bits, rounding, selection; platform-dependent choices
    _plan           bytes of an exchange, predicted from shapes
    replicas        checks that all workers hold the same bits
"""

from demo_optax import checkpoint, compressors, local, recipes, remote, state
from demo_optax._per_worker import PerWorkerState, per_worker
from demo_optax._plan import Plan, plan
from demo_optax._version import __version__ as __version__
from demo_optax.compressors import Compressor, dct_topk
from demo_optax.recipes import demo, demo_muon
from demo_optax.replicas import Difference, check_replicas
from demo_optax.state import exchange_info, state_specs
from demo_optax.step.data_parallel import data_parallel
from demo_optax.step.results import out_batch
from demo_optax.transformation import (
  DeMoState,
  average_gradients,
  scale_by_demo,
)
from demo_optax.workers import Workers
from demo_optax.workers.inside import over_workers

__all__ = [
  'Compressor',
  'DeMoState',
  'Difference',
  'PerWorkerState',
  'Plan',
  'Workers',
  'average_gradients',
  'check_replicas',
  'checkpoint',
  'compressors',
  'data_parallel',
  'dct_topk',
  'demo',
  'demo_muon',
  'exchange_info',
  'local',
  'out_batch',
  'over_workers',
  'per_worker',
  'plan',
  'recipes',
  'remote',
  'scale_by_demo',
  'state',
  'state_specs',
]
