"""Decoupled momentum (DeMo) for JAX.

Train data-parallel models while each worker sends about one percent, or a tenth
of a percent, of its gradient's bytes, by swapping one line of an optax chain.

The modules in the order of the data's way:

    gradients    each worker's own gradient        (modules: Flax NNX modules)
    demo         DeMo as optax transformations, around
    exchange     one worker's step, from gradient to update: the main path
    partitioning several optimizers, and one exchange
    compressors  what a worker sends of its momentum, made of
      paths        which of several equal ways is the fastest
      chunks       cutting arrays into chunks; the transform
      packing      numbers of a few bits
      selection    top-k within chunks; merging
      index_codes  which coefficients, in few bits
      value_codes  what they are, in few bits
      wire         payload <-> bytes
    kernels      the same in one pass over memory, where a backend has them:
      kernel_math  kernels_gpu  kernels_tpu
    specs        how parameters are spread over the devices of a worker
    workers      who takes part, and how a worker's function runs for all
    inspection   a look into optimizer states
    local_updates  training alone between exchanges
    elastic      another number of workers
    replicas     whether all hold the same bits
    checkpoint   saving and restoring (import it by name: it needs Orbax)
    accounting   bytes on the wire, predicted
    hlo          bytes on the wire, read from compiled code
    drawing      pictures of all that (import it by name: it needs matplotlib)
"""

from demo_optax.accounting import Plan, plan
from demo_optax.compressors import (
  Compressor,
  dct_topk,
  full,
  hadamard_topk,
  identity_topk,
  random_orthogonal_topk,
  random_subset,
  slicing,
  striding,
)
from demo_optax.demo import DeMoState, demo, scale_by_demo
from demo_optax.elastic import resize_workers
from demo_optax.gradients import (
  PerWorkerState,
  mean_over_workers,
  per_worker,
  value_and_grad,
)
from demo_optax.hlo import Collective, collectives
from demo_optax.inspection import (
  exchange_info,
  momentum,
  state_specs,
  state_summary,
  with_momentum,
)
from demo_optax.local_updates import (
  LocalUpdatesState,
  demo_diloco,
  diloco,
  local_updates,
  settle_params,
  shared_params,
  sparse_loco,
  stack_params,
)
from demo_optax.modules import param_specs
from demo_optax.partitioning import partition
from demo_optax.replicas import Difference, check_replicas
from demo_optax.workers import Workers

__version__ = '0.1.0'

__all__ = [
  'Collective',
  'Compressor',
  'DeMoState',
  'Difference',
  'LocalUpdatesState',
  'PerWorkerState',
  'Plan',
  'Workers',
  'check_replicas',
  'collectives',
  'dct_topk',
  'demo',
  'demo_diloco',
  'diloco',
  'exchange_info',
  'full',
  'hadamard_topk',
  'identity_topk',
  'local_updates',
  'mean_over_workers',
  'momentum',
  'param_specs',
  'partition',
  'per_worker',
  'plan',
  'random_orthogonal_topk',
  'random_subset',
  'resize_workers',
  'scale_by_demo',
  'settle_params',
  'shared_params',
  'slicing',
  'sparse_loco',
  'stack_params',
  'state_specs',
  'state_summary',
  'striding',
  'value_and_grad',
  'with_momentum',
]
