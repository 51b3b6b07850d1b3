"""Flax: NNX objects in and out of a step, and how models are sharded.

NNX objects go through a step as through `nnx.jit`: they are split into arrays
outside, merged inside, split again after the step, and updated in place.

Flax is imported by the user or not at all.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted, leaves_of
from demo_optax.numerics import prng
from demo_optax.step.roles import Role


def param_specs(
  model: Any, rules: Sequence[tuple[str, Any]] | None = None
) -> Any:
  """Returns the partition specs that a Flax model's own annotations ask for.

  For `Workers.on_mesh(mesh, axis_name, param_specs)`.

  Args:
    model: an NNX module (its `nnx.Param` variables are taken), an `nnx.State`,
      or `variables['params']` of a Linen model, before `nn.unbox`.
    rules: pairs `(logical axis, mesh axis or None)`; by default those of the
      surrounding `nnx.logical_axis_rules` or `nn.logical_axis_rules`.

  Returns:
    A `PartitionSpec` for each parameter; `P()` for those without annotations.
  """
  nnx = _nnx()
  if nnx is not None and isinstance(model, nnx.Module):
    model = nnx.state(model, nnx.Param)
  if nnx is not None and isinstance(model, nnx.State):
    with nnx.logical_axis_rules(rules) if rules else contextlib.nullcontext():
      return nnx.get_partition_spec(model)
  linen = sys.modules.get('flax.linen')
  if linen is None or not isinstance(model, Mapping):
    raise TypeError(
      "model must be an NNX module, an nnx.State, or a Linen model's"
      f" variables['params'] with their metadata, got {type(model).__name__}."
      ' Give one of these, or write a tree of PartitionSpec.'
    )

  def spec(x: Any) -> P:  # mesh axes and logical ones may mix
    if not isinstance(x, linen.LogicallyPartitioned):
      return linen.get_partition_spec(x)
    if not rules and not linen.get_logical_axis_rules():
      raise ValueError(
        f'rules must map the logical axes {x.names} of the model, got none.'
        " Give rules=(('embed', 'fsdp'), ('mlp', None), ...)."
      )
    return linen.logical_to_mesh_axes(x.names, rules)

  return jax.tree.map(
    spec, model, is_leaf=lambda x: isinstance(x, linen.Partitioned)
  )


def _nnx() -> Any:
  return sys.modules.get('flax.nnx')


# NNX objects as arguments of a step -------------------------------------------

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


def split(objects: Sequence[Any]) -> tuple[list[Any], Any]:
  """Returns the arrays of NNX objects, split together, and the structure."""
  if not objects:
    return [], None
  with _nnx().split_context(_CONTEXT) as context:
    graphdef, values = context.flatten(list(objects), with_paths=False)
  leaves, treedef = jax.tree.flatten(values)
  return leaves, (graphdef, treedef)


def merge(structure: Any, leaves: Sequence[Any], inner: bool) -> list[Any]:
  """Undoes `split`: makes objects `inner` of a step, updates them outside."""
  if structure is None:
    return []
  graphdef, treedef = structure
  with _nnx().merge_context(_CONTEXT, inner) as context:
    return list(context.unflatten(graphdef, treedef.unflatten(leaves)))


def variables(objects: Sequence[Any]) -> list[tuple[Keys, Role | None]]:
  """Returns the path and role (`roles_of`) of each array of `split`."""
  if not objects:
    return []
  _, flat = _nnx().graph.flatten(list(objects), graph=True)
  return _with_roles(list(zip(flat.paths, flat.leaves)))


def check_variables(before: Sequence[Keys], objects: Sequence[Any]) -> None:
  """Raises if a step has changed which arrays its NNX objects hold."""
  after = [keys for keys, _ in variables(objects)]
  nodes = _nnx().iter_graph(list(objects)) if objects else ()
  kept = {  # in plain attributes
    (*keys, name)
    for keys, node in nodes
    if is_object(node)
    for name, x in vars(node).items()
    if isinstance(x, jax.core.Tracer)
  }
  changed = ({*before} ^ {*after}) | (kept - {*before})
  if changed or after != [*before]:
    raise ValueError(
      'A step must not add or remove arrays of its Flax objects, got'
      f' {", ".join(sorted(map(dotted, changed)))}. Return such values, or'
      ' keep them in an nnx.Variable that is made before the step.'
    )


def is_object(x: Any) -> bool:
  """Returns whether `x` is an NNX module, optimizer, metric or stream."""
  nnx = _nnx()
  return nnx is not None and isinstance(x, nnx.Pytree)


def holds_state(tree: Any) -> bool:
  """Returns whether `tree` is, or holds, Flax objects or dataclasses."""
  nnx = _nnx()
  kinds = () if nnx is None else (nnx.Pytree, nnx.State, nnx.Variable)

  def is_state(x: Any) -> bool:
    return dataclasses.is_dataclass(x) or isinstance(x, kinds)

  return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def map_leaves(fun: Callable[[object, bool], object], tree: object) -> Any:
  """Applies `fun(leaf, traces_number)`; NNX objects are leaves.

  `traces_number` says whether the leaf is an array if it is a Python number.
  Not in Equinox modules, whose layers decide by numbers what to trace
  (`eqx.nn.MaxPool2d.init`), as in `eqx.filter_jit`.
  """
  equinox = sys.modules.get('equinox')
  modules = () if equinox is None else equinox.Module

  def of_part(part: object) -> object:
    if not isinstance(part, modules):
      return fun(part, True)
    return jax.tree.map(lambda x: fun(x, False), part, is_leaf=is_object)

  return jax.tree.map(
    of_part, tree, is_leaf=lambda x: is_object(x) or isinstance(x, modules)
  )


def is_array(x: Any, traces_number: bool) -> bool:
  """Returns whether a leaf is an array; a step is compiled for all others."""
  return isinstance(x, _ARRAYS) or (
    traces_number
    and isinstance(x, int | float | complex)
    and not isinstance(x, bool)
  )


def roles_of(tree: Any) -> list[Role | None]:
  """Returns the roles that Flax's variables say by their classes.

  `STATISTICS` for `nnx.BatchStat`, `ADDED` for total and count of an
  `nnx.metrics.Average`, `KEY` for random keys in variables, `SHARED` for counts
  of streams and for variables of optimizers, None for anything else. NNX
  objects are leaves.
  """
  nnx = _nnx()
  if nnx is None:
    return [None] * jax.tree.structure(tree).num_leaves
  flat = leaves_of(tree, lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
  return [role for _, role in _with_roles(flat)]


def _with_roles(
  flat: Sequence[tuple[Keys, Any]],
) -> list[tuple[Keys, Role | None]]:
  """Returns the paths and roles of the arrays in variables and objects."""
  nnx = _nnx()
  metrics = [k for k, x in flat if isinstance(x, nnx.metrics.MetricState)]

  def role(keys: Keys, x: Any) -> Role | None:
    if isinstance(x, nnx.BatchStat):
      return Role.STATISTICS
    # Noise of an optimizer must be equal on all workers.
    if isinstance(x, nnx.RngCount | nnx.OptState):
      return Role.SHARED
    if isinstance(x, nnx.Variable) and prng.is_key_array(x.get_value()):
      return Role.KEY
    if keys not in metrics:
      return None
    parts = {k[-1] for k in metrics if k[:-1] == keys[:-1]}
    return Role.ADDED if parts == {'total', 'count'} else Role.SHARED

  found = []
  for keys, x in flat:
    is_variable = isinstance(x, nnx.Variable)
    count = len(jax.tree.leaves(x)) if is_variable else 1  # an object is a leaf
    found += [(keys, role(keys, x))] * count
  return found
