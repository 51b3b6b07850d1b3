"""Trains with MaxText, and exchanges between slices instead of averaging.

    python examples/maxtext/train.py CONFIG.yml run_name=... \
        dcn_diloco_parallelism=2 demo_topk=32 demo_values=sign

What begins with `demo_` is read here, everything else by MaxText. A worker is a
slice: the mesh axis `diloco` joins the workers, all others lie inside of one.
MaxText's own step, written for all devices, becomes the step of one worker; its
clipping, accumulation and skipped steps stay where they are.

`installed` replaces six functions of MaxText while its block runs.
"""

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app
from flax import nnx
from flax.linen import logical_axis_rules
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.common import data_loader
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import (
  maxtext_utils,
  maxtext_utils_nnx,
  muon_utils,
  sharding,
  train_utils,
)

import demo_optax
from demo_optax.transformation import layouts_in

AXIS = 'diloco'


@dataclasses.dataclass(frozen=True)
class Exchange:
  """What is sent, and how; see `demo_optax.demo`, `demo_muon`, `dct_topk`.

  Attributes:
    optimizer: 'demo' or 'demo_muon'.
    topk: coefficients of each chunk.
    chunk_size: of `demo`.
    values: how coefficients are written, of `demo`.
    decay: of the momentum that was not sent.
    kind: 'all_gather' or 'all_to_all'.
  """

  optimizer: str = 'demo'
  topk: int = 32
  chunk_size: int = 64
  values: str = 'sign'
  decay: float = 0.99
  kind: str = 'all_gather'


def split_arguments(argv: Sequence[str]) -> tuple[Exchange, list[str]]:
  """Splits a command line into what is read here and what MaxText reads."""
  types = {
    field.name: type(field.default) for field in dataclasses.fields(Exchange)
  }
  ours, rest = {}, []
  for argument in argv:
    found = re.fullmatch(r'demo_(\w+)=(.*)', argument)
    if not found:
      rest.append(argument)
    elif (name := found[1]) not in types:
      raise ValueError(f'{argument}: known are demo_{", demo_".join(types)}.')
    else:
      try:
        ours[name] = types[name](found[2])
      except ValueError:
        raise ValueError(f'{argument}: not {types[name].__name__!r}.') from None
  exchange = Exchange(**ours)
  if exchange.optimizer not in ('demo', 'demo_muon'):
    raise ValueError(
      f"demo_optimizer={exchange.optimizer}: not 'demo' or 'demo_muon'."
    )
  for name in ('chunk_size', 'values'):
    if exchange.optimizer == 'demo_muon' and name in ours:
      raise ValueError(f'demo_{name} is not read by demo_optimizer=demo_muon.')
  # Made here too: what it refuses is refused before MaxText starts.
  demo_optax.scale_by_demo(
    compressor_of(exchange),
    workers=demo_optax.Workers.simulated(2),
    decay=exchange.decay,
    exchange=exchange.kind,
  )
  return exchange, rest


def compressor_of(exchange: Exchange) -> demo_optax.Compressor:
  """Makes the compressor of `demo`."""
  return demo_optax.dct_topk(
    exchange.chunk_size, exchange.topk, values=exchange.values
  )


def make_optimizer(
  exchange: Exchange,
  config: Any,
  learning_rate: optax.Schedule,
  model: nnx.Module,
  workers: demo_optax.Workers,
) -> optax.GradientTransformation:
  """Makes the optimizer of MaxText's configuration around an exchange."""
  shared = {
    'workers': workers,
    'decay': exchange.decay,
    'weight_decay': config.adam_weight_decay,
    'exchange': exchange.kind,
  }
  if exchange.optimizer == 'demo':
    tx = demo_optax.demo(
      learning_rate,
      weight_decay_mask=optimizers.get_adamw_mask(config),
      compressor=compressor_of(exchange),
      **shared,
    )
  else:
    if config.adamw_mask:
      raise ValueError('adamw_mask is not read by demo_optimizer=demo_muon.')
    dimensions = muon_utils.get_muon_weight_dimension_numbers(model, config)
    tx = demo_optax.demo_muon(
      learning_rate,
      muon_weight_dimension_numbers=dimensions,
      consistent_rms=config.muon_consistent_rms,
      other_weight_decay=config.adam_weight_decay,
      **shared,
    )
  if config.skip_step_on_spikes:
    tx = decided_by_all(
      optimizers.skip_step_on_spikes(
        tx, config.skip_step_interval, config.skip_step_scaling_factor
      )
    )
  if config.trainable_parameters_mask:
    tx = only_trainable(tx, config.trainable_parameters_mask)
  return tx


def decided_by_all(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Gives `tx` the mean loss and gradient norm, not those of one worker."""

  def update(updates, state, params=None, **numbers):
    return tx.update(updates, state, params, **demo_optax.over_workers(numbers))

  return optax.GradientTransformationExtraArgs(tx.init, update)


def only_trainable(
  tx: optax.GradientTransformation, patterns: Sequence[str]
) -> optax.GradientTransformation:
  """Freezes the parameters whose path none of the patterns is found in."""

  def label(path: Any, _: Any) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    found = any(re.search(pattern, name) for pattern in patterns)
    return 'trainable' if found else 'frozen'

  return optax.partition(
    {'trainable': tx, 'frozen': optax.set_to_zero()},
    lambda params: jax.tree_util.tree_map_with_path(label, params),
  )


def make_workers(
  config: Any, model: nnx.Module, mesh: jax.sharding.Mesh
) -> demo_optax.Workers:
  """Makes a worker of each slice, sharded inside as MaxText shards it."""
  if mesh.shape.get(AXIS, 1) == 1:
    raise ValueError(
      f'The axis {AXIS!r} of the mesh has one slice: say how many workers'
      f' there are, dcn_{AXIS}_parallelism=2 (or ici_{AXIS}_parallelism).'
    )
  with logical_axis_rules(config.logical_axis_rules):
    named = sharding.nnx_construct_named_sharding(
      nnx.state(model, nnx.Param), mesh
    )
  specs = jax.tree.map(lambda x: x.spec, named)
  return demo_optax.Workers.on_mesh(mesh, AXIS, specs)


def check_config(config: Any) -> None:
  """Raises if MaxText is asked for what would not be right with workers."""
  unfit = {
    'enable_diloco': config.enable_diloco,
    'shard_optimizer_over_data': config.shard_optimizer_over_data,
    'optimizer_memory_host_offload': config.optimizer_memory_host_offload,
    'parameter_memory_host_offload': config.parameter_memory_host_offload,
    'moe_dropless_fallback': config.moe_dropless_fallback == 'step',
    'routed_bias': config.routed_bias,
    'use_qk_clip': config.use_qk_clip,
    'elastic_enabled': config.elastic_enabled,
    'compiled_trainstep_file': config.compiled_trainstep_file,
    'per_device_batch_size': config.per_device_batch_size < 1,
  }
  if found := [name for name, asked in unfit.items() if asked]:
    raise ValueError(f'Not with an exchange: {", ".join(found)}.')
  opt_type = getattr(config.opt_type, 'value', config.opt_type)
  if opt_type != 'adamw':
    raise ValueError(
      f'opt_type={opt_type} has no effect with an exchange: leave it'
      ' out, and say demo_optimizer=demo or demo_optimizer=demo_muon.'
    )
  if not config.use_iota_embed:
    raise ValueError(
      'Say use_iota_embed=true: a look-up in a table that is sharded inside'
      ' of a worker may be compiled to one that sends embedded tokens from'
      ' worker to worker.'
    )


@dataclasses.dataclass
class Run:
  """What `get_optimizer` has made, for the other functions.

  Attributes:
    workers: who takes part.
    specs: of the optimizer state, by the names on a leaf's path.
    digests: of where the leaves lie in the state of each exchange.
  """

  workers: demo_optax.Workers
  specs: dict[tuple[str, ...], P]
  digests: set[bytes]


def names_on(path: Any) -> tuple[str, ...]:
  """Returns a path without the `value` that Flax variables add at its end."""
  names = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
  return tuple(names[:-1] if names[-1] == 'value' else names)


def check_restored(state: Any, digests: set[bytes]) -> None:
  """Raises if momenta are not those of the checkpoint.

  MaxText takes from a checkpoint what has the same name, and leaves the rest as
  it was made: momenta of zeros, or of other chunks.
  """
  found = {
    names_on(path): x
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
  }
  places = [names[:-2] for names in found if names[-2:] == ('layout', 'digest')]
  same = all(
    np.asarray(found[*place, 'layout', 'digest']).tobytes() in digests
    and int(found[*place, 'count']) > 0
    for place in places
  )
  if not same and int(found['optimizer', 'step']) > 0:
    raise ValueError(
      'The momenta of the checkpoint are not those of this run: it was'
      ' written with another demo_optimizer, another demo_chunk_size, or'
      ' another mesh inside of a worker. Go on with the settings of then, or'
      ' begin another run from its parameters (load_parameters_path).'
    )


@contextlib.contextmanager
def installed(exchange: Exchange) -> Iterator[None]:
  """Has MaxText train with an exchange inside of this block."""
  runs: list[Run] = []
  original_state = maxtext_utils.get_abstract_state
  original_setup = maxtext_utils.setup_training_state
  original_sharding = sharding.get_input_data_sharding

  def get_optimizer(config, learning_rate, model=None, mesh=None):
    check_config(config)
    workers = make_workers(config, model, mesh)
    tx = make_optimizer(exchange, config, learning_rate, model, workers)
    params = nnx.state(model, nnx.Param)
    specs = demo_optax.state_specs(tx, params, workers)
    flat = jax.tree_util.tree_flatten_with_path(specs)[0]
    layouts = layouts_in(jax.eval_shape(tx.init, params)).values()
    runs[:] = [
      Run(
        workers,
        {names_on(path): spec for path, spec in flat},
        {layout.digest.tobytes() for layout in layouts},
      )
    ]
    return tx

  def setup_training_state(*args, **kwargs):
    """Looks at what was restored."""
    state, *others, was_restored = original_setup(*args, **kwargs)
    if was_restored:
      check_restored(state, runs[0].digests)
    return state, *others, was_restored

  def get_abstract_state(config, mesh, init_state, is_training=True):
    """Returns shardings, with per-worker state on its worker."""
    state, annotations, _ = original_state(
      config, mesh, init_state, is_training
    )

    def place(path, x):
      first, *rest = names_on(path)
      if (first, *rest[:1]) != ('optimizer', 'opt_state'):
        return x
      spec = runs[0].specs[tuple(rest[1:])]
      return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
      )

    state = jax.tree_util.tree_map_with_path(place, state)
    shardings = maxtext_utils_nnx.nnx_extract_named_sharding(state)
    return state, annotations, shardings

  def get_input_data_sharding(config, mesh, rules=None):
    """Cuts the batch over the workers first."""
    own = original_sharding(config, mesh, rules=rules)
    first, *rest = own.spec if own.spec else (None,)
    first = first if isinstance(first, tuple) else (first,) if first else ()
    return NamedSharding(mesh, P((AXIS, *first), *rest))

  def jit_train_step(
    config,
    model,
    state,
    state_shardings,
    data_sharding,
    train_step,
    params_shardings,
    mesh=None,
  ):
    step = functools.partial(
      train_step, model, config, state_shardings, params_shardings
    )

    @demo_optax.data_parallel(
      runs[0].workers, batch_argnames='data', donate_argnames='state'
    )
    def one_workers_step(state, data):
      state, metrics = step(state, data)
      return state, settled(metrics, runs[0].workers.count)

    return one_workers_step

  replaced = [
    (optimizers, 'get_optimizer', get_optimizer),
    (maxtext_utils, 'get_abstract_state', get_abstract_state),
    (maxtext_utils, 'setup_training_state', setup_training_state),
    (sharding, 'get_input_data_sharding', get_input_data_sharding),
    (data_loader, 'get_input_data_sharding', get_input_data_sharding),
    (train_utils, 'jit_train_step', jit_train_step),
  ]
  with contextlib.ExitStack() as stack:
    for module, name, new in replaced:
      stack.callback(setattr, module, name, getattr(module, name))
      setattr(module, name, new)
    yield


def settled(metrics: Any, num_workers: int) -> Any:
  """Has counts added up over the workers; numbers are averaged as they are.

  A sum is the mean of numbers that are larger by the number of workers, so that
  there is one reduction for all, after everything else.
  """
  scalars = {
    name: x
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    else jnp.asarray(x, jnp.float32) * num_workers
    for name, x in metrics['scalar'].items()
  }
  return {**metrics, 'scalar': scalars}


def main(argv: Sequence[str]) -> None:
  try:
    exchange, argv = split_arguments(argv)
  except ValueError as error:
    print(f'{argv[0]}: error: {error}', file=sys.stderr)
    sys.exit(2)
  config, recorder = train.initialize(argv)
  with installed(exchange):
    train.train_loop(config, recorder)


if __name__ == '__main__':
  app.run(main)
