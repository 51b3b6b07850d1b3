"""Whether what is a worker's own lies with the worker."""

import warnings
from typing import Any

import chex
import jax
from jax.sharding import NamedSharding

from demo_optax._paths import dotted, is_stacked, path_keys


def warn_if_replicated(
    opt_state: chex.ArrayTree, axis_name: str | None = None
) -> None:
  """Warns of stacked arrays that every device of their mesh has all of.

  They take the memory of all workers on each device, and are gathered in every
  step. Nothing else shows it: losses are the same.

  Args:
    opt_state: any optimizer state; what is traced is not looked at.
    axis_name: the worker axis; by default any axis of the mesh will do.
  """
  for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
    keys = path_keys(path)
    if not is_stacked(keys) or not _is_replicated(x, axis_name):
      continue
    warnings.warn(
        f'{dotted(keys)} is one per worker, but all of it is on every device,'
        ' and a step of your own would gather it: its sharding'
        f' {x.sharding.spec} does not name the worker axis. data_parallel puts'
        ' it right at the next call; for shardings of your own, as from'
        ' nn.get_sharding or nnx.get_partition_spec, take those of'
        ' demo_optax.state_specs(tx, params, workers) for the optimizer state.',
        stacklevel=3,
    )
    return  # one says it


def _is_replicated(x: Any, axis_name: str | None) -> bool:
  if isinstance(x, jax.core.Tracer):
    return False
  sharding = getattr(x, 'sharding', None)
  if not isinstance(sharding, NamedSharding) or len(x) == 1:
    return False
  size = sharding.mesh.shape.get(axis_name, 1) if axis_name else (
      sharding.mesh.size
  )
  first = sharding.spec[0] if sharding.spec else None
  names = first if isinstance(first, tuple) else (first,)
  there = axis_name in names if axis_name else first is not None
  return size > 1 and not there
