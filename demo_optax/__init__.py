"""Decoupled momentum (DeMo) for JAX.

Train data-parallel models while each worker sends about one percent, or a tenth
of a percent, of its gradient's bytes, by changing two lines of a script.

    data_parallel    runs a step that is written for one worker, for all
    one_worker       where all workers meet in such a step
    agreement        whether all processes run the same exchange
    demo             the exchange as an optax transformation
    recipes          optimizers in one line: chains around the exchange
    exchange         Algorithm 1, as one worker runs it: the main path
    gradients        transformations before the exchange; plain averages
    flax             NNX objects in a step; how models are sharded
    state            reading and editing optimizer states
    compressors/     what a worker sends of its momentum
    wire/            messages as bytes
    engine/          the arithmetic of a step, and faster forms of it
    workers/         simulated, on a mesh, or on an axis of the caller's own
    local/           training alone between exchanges
    checkpoint/      saving, restoring, another number of workers
    elastic/         processes that are lost, return, or are added
    tools/           bytes predicted and read, replicas compared, pictures
    accumulation     what a stock `optax.MultiSteps` needs in such a step
    annotations      variables and boxes of Flax around leaves
    _tree            leaves matched and checked
"""

from demo_optax import checkpoint, compressors, local, recipes, tools
from demo_optax.compressors import Compressor, dct_topk
from demo_optax.data_parallel import data_parallel
from demo_optax.demo import DeMoState, scale_by_demo
from demo_optax.flax import param_specs
from demo_optax.gradients import average, per_worker
from demo_optax.one_worker import over_workers
from demo_optax.recipes import demo, demo_muon
from demo_optax.state import exchange_info, state_specs
from demo_optax.tools import check_replicas, plan, recommend
from demo_optax.workers import Workers

__version__ = '0.1.0'

__all__ = [
  'Compressor',
  'DeMoState',
  'Workers',
  'average',
  'check_replicas',
  'checkpoint',
  'compressors',
  'data_parallel',
  'dct_topk',
  'demo',
  'demo_muon',
  'exchange_info',
  'local',
  'over_workers',
  'param_specs',
  'per_worker',
  'plan',
  'recipes',
  'recommend',
  'scale_by_demo',
  'state_specs',
  'tools',
]
