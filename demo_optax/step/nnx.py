"""Flax: NNX objects in and out of a step, and how models are sharded.

Objects that are arguments of a `data_parallel` step are taken apart into their
variables, of which

  random streams     are folded with the worker's number; their counts advance
  nnx.BatchStat      are averaged over the workers whose values are finite
  nnx.metrics.Average  and its kind: what all workers have added is added up
  worker_stacked     are each worker's own
  anything else      must be equal on all workers after the step

Flax is imported by the user or not at all.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from demo_optax import _paths
from demo_optax._paths import Keys, path_keys
from demo_optax.workers.inside import Result


def param_specs(
    model: Any, rules: Sequence[tuple[str, Any]] | None = None
) -> Any:
  """Returns the partition specs that a Flax model's own annotations ask for.

  For `Workers.on_mesh(mesh, axis_name, param_specs)`.

  Args:
    model: an NNX module (its `nnx.Param` variables are taken), an `nnx.State`,
      or the parameters of a Linen model with their metadata, as `model.init` or
      `jax.eval_shape(model.init, ...)` returns them, before `nn.unbox`:
      `variables['params']`.
    rules: pairs `(logical axis, mesh axis or None)` for annotations by logical
      names; by default those of the surrounding `nnx.logical_axis_rules` or
      `nn.logical_axis_rules`.

  Returns:
    A tree like the parameters with a `PartitionSpec` for each; `P()` for those
    without annotations.

  Raises:
    TypeError: `model` is neither, or Flax is not imported.
    ValueError: a Linen model with logical names, and no rules.

  Example:
    >>> import demo_optax, jax
    >>> from flax import nnx
    >>> init = nnx.with_partitioning(nnx.initializers.ones, (None, 'fsdp'))
    >>> mesh = jax.make_mesh((1, 1), ('replica', 'fsdp'),
    ...     axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> with jax.set_mesh(mesh):
    ...   model = nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0))
    >>> specs = demo_optax.param_specs(model)
    >>> tuple(specs['kernel'].get_value()), tuple(specs['bias'].get_value())
    ((None, 'fsdp'), ())
    >>> workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)

  References:
    Flax, `Scale up on multiple devices
    <https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html>`_.
  """
  nnx = _nnx()
  if nnx is not None and isinstance(model, nnx.Module | nnx.State):
    state = model
    if isinstance(model, nnx.Module):
      state = nnx.state(model, nnx.Param)
    with nnx.logical_axis_rules(rules) if rules else contextlib.nullcontext():
      return nnx.get_partition_spec(state)
  linen = sys.modules.get('flax.linen')
  if linen is None or not isinstance(model, Mapping):
    raise TypeError(
        f'model is a {type(model).__name__}: give an NNX module, an nnx.State,'
        " or a Linen model's variables['params'] with their metadata."
    )
  return jax.tree.map(
      lambda x: _linen_spec(linen, x, rules),
      model,
      is_leaf=lambda x: isinstance(x, linen.Partitioned),
  )


def _linen_spec(linen: Any, x: Any, rules: Any) -> P:
  """Returns the spec of an array or box; mesh axes and logical ones may mix."""
  if not isinstance(x, linen.Partitioned):
    return P()
  if not isinstance(x, linen.LogicallyPartitioned):
    return x.get_partition_spec()
  if not rules and not linen.get_logical_axis_rules():
    raise ValueError(
        f'The model names the logical axes {x.names}, and there are no rules'
        " for them. Give rules=(('embed', 'fsdp'), ('mlp', None), ...)."
    )
  return linen.logical_to_mesh_axes(x.names, rules)


def _nnx() -> Any:
  return sys.modules.get('flax.nnx')


def _variables(state: Any) -> list[tuple[Any, Any]]:
  nnx = _nnx()
  return jax.tree_util.tree_flatten_with_path(
      state, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )[0]


# NNX objects as arguments of a step -------------------------------------------


def in_transform() -> contextlib.AbstractContextManager[Any]:
  """Returns what a transformation of NNX runs in.

  `nnx.cached_partial` wants to be asked for its cache, which is of no use here.
  """
  nnx = _nnx()
  if not hasattr(nnx, 'update_context'):
    return contextlib.nullcontext()
  return nnx.update_context('demo_optax')


def is_object(x: Any) -> bool:
  """Returns whether `x` is an NNX module, optimizer, metric or stream."""
  nnx = _nnx()
  return nnx is not None and isinstance(x, nnx.Pytree)


def holds_state(tree: Any) -> bool:
  """Returns whether `tree` is, or holds, Flax objects or dataclasses."""
  nnx = _nnx()

  def is_state(x: Any) -> bool:
    if dataclasses.is_dataclass(x):
      return True
    return nnx is not None and isinstance(
        x, nnx.Pytree | nnx.State | nnx.Variable
    )

  return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def array_leaves(tree: Any) -> list[bool]:
  """Returns which leaves are arrays; a step is compiled for all others.

  Numbers are arrays, but flags and what Equinox modules hold are not: layers
  decide by them what to trace (`eqx.nn.MaxPool2d.init`), as in
  `eqx.filter_jit`. NNX objects are leaves, and no arrays.
  """
  equinox = sys.modules.get('equinox')

  def is_module(x: Any) -> bool:
    return equinox is not None and isinstance(x, equinox.Module)

  def is_node(x: Any) -> bool:
    return is_object(x) or is_module(x)

  arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
  found = []
  for x in jax.tree.leaves(tree, is_leaf=is_node):
    if is_module(x):
      inner = jax.tree.leaves(x, is_leaf=is_object)
      found += [isinstance(y, arrays) for y in inner]
    else:
      number = isinstance(x, int | float | complex) and not isinstance(x, bool)
      found.append(number or isinstance(x, arrays))
  return found


def leaf_kinds(tree: Any) -> list[Any]:
  """Returns for each leaf of a tree what becomes of it, by its variable.

  'statistics' for `nnx.BatchStat`, 'added' for total and count of an
  `nnx.metrics.Average`, 'stream' for keys of random streams, 'state' for their
  counts, two of which look like a key, None for anything else. NNX objects are
  leaves.
  """
  nnx = _nnx()
  if nnx is None:
    return [None] * len(jax.tree.leaves(tree))

  def is_node(x: Any) -> bool:
    return is_object(x) or isinstance(x, nnx.Variable)

  flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)[0]
  paths = [path_keys(path) for path, _ in flat]
  parts: dict[Keys, set[Any]] = {}
  for path, (_, x) in zip(paths, flat):
    if isinstance(x, nnx.metrics.MetricState):
      parts.setdefault(path[:-1], set()).add(path[-1])
  kinds: list[Any] = []
  for path, (_, x) in zip(paths, flat):
    kind: Any = None
    if isinstance(x, nnx.BatchStat):
      kind = 'statistics'
    elif isinstance(x, nnx.RngCount):
      kind = 'state'
    elif isinstance(x, nnx.RngKey):
      kind = 'stream'
    elif parts.get(path[:-1]) == {'total', 'count'} and isinstance(
        x, nnx.metrics.MetricState
    ):
      kind = 'added'
    number = len(jax.tree.leaves(x)) if isinstance(x, nnx.Variable) else 1
    kinds += [kind] * number
  return kinds


@dataclasses.dataclass(frozen=True)
class OpenedObjects:
  """NNX objects, taken apart together: what they share stays shared.

  Attributes:
    leaves: the arrays of all their variables.
    structure: everything else, hashable.
    names: of the arrays, for error messages.
    keys: their paths.
    kinds: for each, what becomes of it: see `results`.
    owners: for each, the number of the object that holds it.
  """

  leaves: list[Any]
  structure: Any
  names: list[str]
  keys: list[Keys]
  kinds: list[Any]
  owners: list[int]

  @property
  def roles(self) -> list[str]:
    """Returns for each array whether workers share it."""
    roles = {'stacked': 'stacked', 'stream': 'key'}
    return [roles.get(kind, 'shared') for kind in self.kinds]

  def merge(self, leaves: Sequence[Any]) -> list[Any]:
    """Returns the objects with these arrays."""
    if not self.structure:
      return []
    graphdef, treedef = self.structure
    return list(_nnx().merge(graphdef, treedef.unflatten(leaves)))

  def numbers(self, objects: list[Any]) -> dict[int, int]:
    """Returns for the identity of each array in the objects its number."""
    if not self.structure:
      return {}
    leaves = jax.tree.leaves(_nnx().split(objects)[1])
    return {
        id(x): i for i, x in enumerate(leaves) if isinstance(x, jax.Array)
    }

  def results(
      self, objects: list[Any], before: Sequence[Any], own: Sequence[Any]
  ) -> list[Result]:
    """Returns the variables after a step, each with its role.

    Args:
      objects: the objects after the step.
      before: their arrays before it, as all workers have them.
      own: their arrays before it, as the step had them.

    Raises:
      ValueError: the step added or removed variables.
    """
    if not self.structure:
      return []
    _, state = _nnx().split(objects)
    after, treedef = jax.tree.flatten(state)
    if treedef != self.structure[1]:
      new = {jax.tree_util.keystr(path) for path, _ in _variables(state)}
      found = sorted(new.symmetric_difference(self.names)) or ['(in structure)']
      raise ValueError(
          'The step added or removed variables of its Flax objects:'
          f' {", ".join(found[:6])}. Return such values instead of storing'
          ' them, or create them before the step.'
      )
    results = []
    for name, keys, kind, x, whole, mine in zip(
        self.names, self.keys, self.kinds, after, before, own
    ):
      role, old = kind, whole
      if kind == 'added' and x is mine:
        role = 'state'
      if kind == 'stream':
        # The stream goes on from the key that all workers share.
        role, x = ('state', whole) if x is mine else ('key', x)
      if role in ('state', 'stacked', 'key'):
        old = None
      results.append(Result(f'the variable {name}', keys, role, x, old))
    return results


def open_objects(objects: Sequence[Any]) -> OpenedObjects:
  """Takes NNX objects apart, together."""
  if not objects:
    return OpenedObjects([], None, [], [], [], [])
  graphdef, state = _nnx().split(list(objects))
  leaves, treedef = jax.tree.flatten(state)
  paths: list[Any] = []
  for path, variable in _variables(state):
    paths += [path] * len(jax.tree.leaves(variable))
  keys = [path_keys(path) for path in paths]
  stacked = [_paths.is_stacked(k) for k in keys]
  kinds = [
      'stacked' if has_axis else kind or 'state'
      for has_axis, kind in zip(stacked, leaf_kinds(state))
  ]
  return OpenedObjects(
      leaves,
      (graphdef, treedef),
      [jax.tree_util.keystr(path) for path in paths],
      keys,
      kinds,
      [k[0] for k in keys],
  )


def update_objects(objects: Sequence[Any], leaves: Sequence[Any]) -> None:
  """Puts arrays, in the order of `open_objects`, into NNX objects."""
  if not objects:
    return
  nnx = _nnx()
  state = nnx.state(list(objects))
  old, treedef = jax.tree.flatten(state)
  if any(new is not x for new, x in zip(leaves, old)):
    nnx.update(list(objects), treedef.unflatten(leaves))


def attributes(objects: Sequence[Any]) -> list[Any]:
  """Returns the attributes of NNX objects and of all that they hold."""
  nodes = _nodes(objects) if objects else []
  return [x for _, node in nodes for x in vars(node).values()]


# The attributes of one object that are neither variables nor arrays.
Attributes = dict[str, Any]


def static_attributes(
    objects: Sequence[Any],
) -> list[tuple[Any, Any, Attributes]]:
  """Returns path, node and static attributes of all nodes of NNX objects."""
  if not objects:
    return []
  return [
      (path, node, _static_attributes(node))
      for path, node in _nodes(objects)
  ]


def changed_attributes(
    before: Sequence[tuple[Any, Any, Attributes]], objects: Sequence[Any]
) -> list[tuple[Any, Attributes, tuple[str, ...]]]:
  """Returns what a step changed of static attributes.

  Args:
    before: the `static_attributes` before the step.
    objects: NNX objects after it.

  Returns:
    for each node that changed its path, the attributes that are new or have
    another value, and the names of those that are gone.

  Raises:
    ValueError: the step added or removed nodes, put one of another class in a
      place, or an array into an attribute that had none.
  """
  if not objects:
    return []
  kinds = {path: type(node).__name__ for path, node, _ in before}
  after = {path: type(node).__name__ for path, node in _nodes(objects)}
  if kinds != after:
    different = [
        f'{_paths.dotted(path)}: {kinds.get(path)} before,'
        f' {after.get(path)} after'
        for path in sorted({*kinds, *after}, key=str)
        if kinds.get(path) != after.get(path)
    ]
    raise ValueError(
        'The step added, removed or replaced Flax objects in its arguments'
        f' ({"; ".join(different[:6])}). Do that outside of the step.'
    )
  changes = []
  for path, node, old in before:
    new = _static_attributes(node)
    changed = {
        name: x
        for name, x in new.items()
        if name not in old or type(x) is not type(old[name]) or x != old[name]
    }
    gone = tuple(name for name in old if name not in vars(node))
    arrays = [name for name in old if name not in (*new, *gone)]
    if arrays:
      raise ValueError(
          'The step puts an array into a plain attribute of a Flax object,'
          f' {_paths.dotted((*path, arrays[0]))}: Return it, or keep it in an'
          ' nnx.Variable that is made before the step.'
      )
    if changed or gone:
      changes.append((path, changed, gone))
  return changes


def change_attributes(
    objects: Sequence[Any],
    changes: Sequence[tuple[Any, Attributes, tuple[str, ...]]],
) -> None:
  """Does to NNX objects what `changed_attributes` found in a step."""
  if not changes:
    return
  nodes = dict(_nodes(objects))
  for path, changed, gone in changes:
    for name, x in changed.items():
      setattr(nodes[path], name, x)
    for name in gone:
      delattr(nodes[path], name)


def _nodes(objects: Sequence[Any]) -> list[tuple[Any, Any]]:
  nnx = _nnx()
  return [
      (path, node)
      for path, node in nnx.iter_graph(list(objects))
      if isinstance(node, nnx.Pytree)
  ]


def _static_attributes(node: Any) -> Attributes:
  nnx = _nnx()

  def is_dynamic(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable | jax.Array | np.ndarray)

  return {
      name: x
      for name, x in vars(node).items()
      if not name.startswith('_pytree__')
      and not any(map(is_dynamic, jax.tree.leaves(x, is_leaf=is_dynamic)))
  }
