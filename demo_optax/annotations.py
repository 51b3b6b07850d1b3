"""Variables and boxes of Flax around the leaves of trees.

NNX keeps parameters in `nnx.Variable`s, Linen in `nn.Partitioned` boxes where a
model is annotated; both are nodes of trees, and say how a leaf is sharded.

Flax is imported by the user or not at all.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def stack_annotations(tree: Any, axis_name: str | None) -> Any:
  """Puts a leading axis before the shardings that Flax parameters ask for.

  Flax gives variables made of an optimizer's state the annotations of the
  parameters they were made for, and would move stacked arrays accordingly; in
  Linen the parameters' boxes are part of that state.
  """

  def lead(x: Any) -> Any:
    if _is_box(x):
      return x.replace(names=(axis_name, *x.names))
    if not _is_variable(x):
      return x
    sharding = x.get_metadata('out_sharding', None)
    if not sharding:
      return x
    return x.replace(out_sharding=_with_lead(sharding, axis_name))

  return jax.tree.map(lead, tree, is_leaf=_is_annotated)


def _with_lead(sharding: Any, axis_name: str | None) -> Any:
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, P(axis_name, *sharding.spec))
  return P(axis_name, *sharding)


def without_variables(tree: Any) -> Any:
  """Returns `tree` with values in the place of Flax variables and boxes."""

  def value(x: Any) -> Any:
    if _is_box(x):
      return x.value
    return x.get_value() if _is_variable(x) else x

  return jax.tree.map(value, tree, is_leaf=_is_annotated)


def with_variables_of(tree: Any, values: Any) -> Any:
  """Returns `tree` with other values: the way back from `without_variables`."""
  return jax.tree.structure(tree).unflatten(jax.tree.leaves(values))


def update_without_variables(
    update: Callable[..., tuple[Any, Any]],
    updates: Any,
    state: Any,
    params: Any,
    *args: Any,
    **extra_args: Any,
) -> tuple[Any, Any]:
  """Returns `update(updates, state, params, ...)`, computed without Flax.

  Boxes of parameters differ from those of what is stacked, and would not go
  together: they are taken off before, and put on again.
  """
  new, after = update(
      without_variables(updates),
      without_variables(state),
      without_variables(params),
      *args,
      **extra_args,
  )
  return with_variables_of(updates, new), with_variables_of(state, after)


def _is_annotated(x: Any) -> bool:
  return _is_variable(x) or _is_box(x)


def _is_variable(x: Any) -> bool:
  nnx = sys.modules.get('flax.nnx')
  return nnx is not None and isinstance(x, nnx.Variable)


def _is_box(x: Any) -> bool:
  linen = sys.modules.get('flax.linen')
  return linen is not None and isinstance(x, linen.Partitioned)
