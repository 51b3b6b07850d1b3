"""Flax: NNX objects in and out of a step.

NNX objects go through a step as through `nnx.jit`: they are split into arrays
outside, merged inside, split again after the step, and updated in place.

Flax is imported by the user or not at all.
"""

import collections
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from demo_optax._paths import Keys, dotted, leaves_of
from demo_optax.numerics import prng
from demo_optax.step.roles import Role


def _nnx() -> Any:
  return sys.modules.get('flax.nnx')


_CONTEXT = 'demo_optax'
_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


@contextlib.contextmanager
def in_transform() -> Iterator[None]:
  """Opens the context in which `split` and `merge` update objects."""
  nnx = _nnx()
  if nnx is None:
    yield
    return
  with nnx.update_context(_CONTEXT) as context:
    context.static_cache = None  # of nnx.cached_partial: of no use here
    yield


def split(objects: Sequence[object]) -> tuple[list[jax.Array], object]:
  """Splits NNX objects together; returns their arrays and structure."""
  if not objects:
    return [], None
  # One graph, since objects may share variables.
  with _nnx().split_context(_CONTEXT) as context:
    graphdef, values = context.flatten(list(objects), with_paths=False)
  leaves, treedef = jax.tree.flatten(values)
  return leaves, (graphdef, treedef)


def merge(
  structure: Any,
  leaves: Sequence[jax.Array],
  inner: bool,
) -> list[object]:
  """Undoes `split`: makes objects `inner` in a step, updates them outside."""
  if structure is None:
    return []
  graphdef, treedef = structure
  with _nnx().merge_context(_CONTEXT, inner) as context:
    return list(context.unflatten(graphdef, treedef.unflatten(leaves)))


def variables(
  objects: Sequence[object],
) -> list[tuple[Keys, Role | None]]:
  """Returns for each array from `split` its path and role (`roles_of`)."""
  if not objects:
    return []
  _, flattened = _nnx().graph.flatten(list(objects), graph=True)
  return _with_roles(list(zip(flattened.paths, flattened.leaves)))


def check_variables(
  before: Sequence[tuple[Keys, Role | None]],
  objects: Sequence[object],
) -> None:
  """Raises if NNX objects hold other arrays than the `variables` before."""
  if not objects:
    return
  # By their paths: values may change, and the objects' other attributes.
  paths_before, paths_after = dict(before), dict(variables(objects))
  changed = paths_before.keys() ^ paths_after.keys()
  for keys, node in _nnx().iter_graph(list(objects)):
    if not is_object(node):
      continue
    for name, value in vars(node).items():
      path = (*keys, name)
      if isinstance(value, jax.core.Tracer) and path not in paths_before:
        changed.add(path)  # in a plain attribute
  if changed:
    raise ValueError(
      'A step must not add or remove arrays of its Flax objects, got'
      f' {", ".join(sorted(map(dotted, changed)))}. Return such values, or'
      ' keep them in an nnx.Variable that is made before the step.'
    )


def is_object(x: object) -> bool:
  """Returns whether `x` is an NNX module, optimizer, metric or stream."""
  return isinstance(x, getattr(_nnx(), 'Pytree', ()))


def is_equinox(x: object) -> bool:
  """Returns whether `x` is an Equinox module."""
  return isinstance(x, getattr(sys.modules.get('equinox'), 'Module', ()))


def is_array(x: object, in_equinox: bool) -> bool:
  """Returns whether a leaf is an array; a step is compiled for all others.

  Numbers in Equinox modules are not, as in `eqx.filter_jit`: layers decide by
  them what to trace (`eqx.nn.MaxPool2d.init`).
  """
  if isinstance(x, _ARRAYS):
    return True
  is_number = isinstance(x, int | float | complex) and type(x) is not bool
  return is_number and not in_equinox


def roles_of(tree: object) -> list[Role | None]:
  """Returns the roles that Flax's variables say by their classes.

  `STATISTICS` for `nnx.BatchStat`, `ADDED` for total and count in an
  `nnx.metrics.Average`, `KEY` for random keys in variables, `SHARED` for a
  stream's count and an optimizer's variables, None for anything else.
  """
  nnx = _nnx()
  if nnx is None:
    return [None] * jax.tree.structure(tree).num_leaves
  leaves = leaves_of(tree, lambda x: isinstance(x, nnx.Variable))
  return [role for _, role in _with_roles(leaves)]


def _with_roles(
  leaves: Sequence[tuple[Keys, object]],
) -> list[tuple[Keys, Role | None]]:
  """Returns paths and roles for the arrays in variables."""
  nnx = _nnx()
  # A metric is an average by the fields that it has.
  fields = collections.defaultdict(set)
  for keys, variable in leaves:
    if isinstance(variable, nnx.metrics.MetricState):
      fields[keys[:-1]].add(keys[-1])
  with_roles: list[tuple[Keys, Role | None]] = []
  for keys, variable in leaves:
    role = None
    match variable:
      case nnx.BatchStat():
        role = Role.STATISTICS
      case nnx.RngCount() | nnx.OptState():
        role = Role.SHARED  # also keys: optimizers draw the same on all workers
      case nnx.metrics.MetricState():
        is_average = fields[keys[:-1]] == {'total', 'count'}
        role = Role.ADDED if is_average else Role.SHARED
      case nnx.Variable() if prng.is_key_array(variable.get_value()):
        role = Role.KEY
    with_roles += [(keys, role)] * len(jax.tree.leaves(variable))
  return with_roles
