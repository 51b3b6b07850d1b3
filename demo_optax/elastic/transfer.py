"""A process's part of a state: out of the devices of one mesh, into another's.

A process keeps its own workers' rows of what is stacked, and a copy of all that
workers share. Both lie in the memory of its host while it is part of no mesh.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import _paths, _tree
from demo_optax.checkpoint.resize import regroup_owned
from demo_optax.state import is_momentum
from demo_optax.step.nnx import is_object

# Bytes that cross at once when a newcomer is told the parameters.
_PIECE = 2**24


@dataclasses.dataclass(frozen=True)
class Local:
  """What one process holds of the leaves of a state.

  Attributes:
    values: of each leaf; a stacked one's rows of this process.
    rows: the numbers of these rows.
    generation: that it is of.
  """

  values: list[Any]
  rows: list[int]
  generation: int = 0


def arrays_of(state: Any) -> Any:
  """Returns the arrays of a state; NNX objects give those they hold now."""

  def arrays(x: Any) -> Any:
    if not is_object(x):
      return x
    # Variables of its own: those of the object are updated in place.
    return jax.tree.map(lambda leaf: leaf, _nnx().state(x))

  return jax.tree.map(arrays, state, is_leaf=is_object)


def objects_in(state: Any) -> list[Any]:
  """Returns the NNX objects of a state."""
  leaves = jax.tree.leaves(state, is_leaf=is_object)
  return [x for x in leaves if is_object(x)]


def with_arrays(state: Any, arrays: Any) -> Any:
  """Returns the state with these arrays, which NNX objects take over."""

  def put(x: Any, values: Any) -> Any:
    if not is_object(x):
      return values
    _nnx().update(x, values)
    return x

  return jax.tree.map(put, state, arrays, is_leaf=is_object)


def leaves_of(arrays: Any) -> list[tuple[_paths.Path, Any]]:
  """Returns all leaves with their paths."""
  return jax.tree_util.tree_flatten_with_path(arrays)[0]


def check_kept(arrays: Any) -> None:
  """Raises a ValueError if arrays were donated to a step."""
  for path, x in leaves_of(arrays):
    if isinstance(x, jax.Array) and x.is_deleted():
      raise ValueError(
          f'{_tree.leaf_name(path)} was donated to the step, which may have to'
          ' be made again: leave donate_argnums out in an elastic run.'
      )


def take(arrays: Any, generation: int = 0) -> Local:
  """Returns what this process holds, as NumPy arrays.

  Raises:
    ValueError: it does not hold all of a leaf that workers share, or arrays
      were donated to a step.
  """
  check_kept(arrays)
  rows: set[int] = set()
  values = []
  for path, x in leaves_of(arrays):
    if not isinstance(x, jax.Array):
      values.append(_canonical(x) if _is_value(x) else x)
      continue
    stacked = _paths.is_stacked(_paths.path_keys(path))
    value, own = _to_host(path, x, stacked)
    values.append(value)
    if stacked:
      rows.update(own)
  return Local(values, sorted(rows), generation)


def _is_carried(keys: tuple[Any, ...], x: Any) -> bool:
  """Returns whether a process takes its part of a leaf along as it is.

  Owners of chunks are others in the next generation.
  """
  return _is_value(x) and not _paths.is_owned(keys)


def _is_value(x: Any) -> bool:
  """Returns whether a leaf is trained: also numbers, and NumPy's arrays."""
  return isinstance(x, jax.Array | np.ndarray | np.generic | int | float)


def _canonical(x: Any) -> np.ndarray:
  """Returns a number or NumPy array in the dtype that JAX gives it."""
  return np.array(x, jax.dtypes.canonicalize_dtype(jnp.result_type(x)))


def _to_host(
    path: _paths.Path, x: jax.Array, stacked: bool
) -> tuple[np.ndarray, list[int]]:
  """Puts the shards of this process together; `rows` are those it has."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  shards = [(s.index, np.asarray(s.data)) for s in x.addressable_shards]
  rows: list[int] = []
  if stacked:
    rows = sorted({
        row for index, _ in shards
        for row in range(*index[0].indices(x.shape[0]))
    })
  shape = (len(rows), *x.shape[1:]) if stacked else x.shape
  whole = np.empty(shape, x.dtype)
  held = np.zeros(shape, bool) if whole.ndim else None
  for index, data in shards:
    if stacked:
      first = rows.index(index[0].indices(x.shape[0])[0])
      index = (slice(first, first + data.shape[0]), *index[1:])
    whole[index] = data
    if held is not None:
      held[index] = True
  if held is not None and not held.all():
    raise ValueError(
        f'{_tree.leaf_name(path)}: this process holds {held.mean():.0%} of it.'
        ' In an elastic run every worker lies within one process.'
    )
  return whole, rows


def put(
    arrays: Any, local: Local | None, generation: dict[str, Any],
    rows: Sequence[int],
) -> Any:
  """Returns new arrays with what survivors had.

  Every process calls it. A newcomer receives what workers share, and the rows
  of a survivor's first worker, from that survivor; its momentum is zero.

  Args:
    arrays: those of a state that was built for this generation.
    local: what this process has had, or None if it is new.
    generation: as the coordinator told.
    rows: the numbers of this process's workers.
  """
  flat = leaves_of(arrays)
  treedef = jax.tree.structure(arrays)
  values = take(arrays).values
  if local is not None:
    values = _own(flat, local, values)
  if generation['survivors'] < generation['processes']:
    values = _from_survivor(flat, values, local is not None, generation)
  values = _owned(flat, local, values, generation['about'], rows)
  placed = [
      _place(x, value, _paths.is_stacked(_paths.path_keys(path)), rows[0])
      for (path, x), value in zip(flat, values)
  ]
  return treedef.unflatten(placed)


def _own(flat: Any, local: Local, fresh: list[Any]) -> list[Any]:
  """Returns what this process goes on from."""
  values = []
  if len(local.values) != len(fresh):
    raise ValueError(
        f'The state had {len(local.values)} leaves, and `build` makes'
        f' {len(fresh)}: it must build the same state for every number of'
        ' workers, and a step must not change its structure.'
    )
  for (path, x), old, new in zip(flat, local.values, fresh):
    keys = _paths.path_keys(path)
    if not _is_carried(keys, x):
      values.append(new)
      continue
    if old.shape != new.shape or old.dtype != new.dtype:
      raise ValueError(
          f'{_tree.leaf_name(path)} was {old.dtype}{list(old.shape)}, and'
          f' `build` makes {new.dtype}{list(new.shape)}: it must build the same'
          ' state for every number of workers.'
      )
    values.append(old)
  return values


def _from_survivor(
    flat: Any, values: list[Any], is_survivor: bool,
    generation: dict[str, Any],
) -> list[Any]:
  """Returns values in which newcomers have what the first survivor has."""
  told: list[Any] = []  # of each leaf: what newcomers receive, or None
  for (path, x), value in zip(flat, values):
    keys = _paths.path_keys(path)
    own = is_momentum(keys) or _paths.is_owned(keys)
    if not _is_value(x) or own:
      told.append(None)
    else:
      told.append(value[:1] if _paths.is_stacked(keys) else value)
  sizes = [0 if x is None else x.nbytes for x in told]
  buffer = np.zeros(sum(sizes), np.uint8)
  if generation['rank'] == 0:
    parts = [
        np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        for x in told if x is not None and x.nbytes
    ]
    buffer = np.concatenate(parts) if parts else buffer
  buffer = _sum_over_processes(buffer)
  if is_survivor:
    return values
  received, start = [], 0
  for x, value, size in zip(told, values, sizes):
    if x is None:
      received.append(value)
    else:
      part = buffer[start : start + size].view(x.dtype).reshape(x.shape)
      received.append(np.broadcast_to(part, value.shape))
    start += size
  return received


def _owned(
    flat: Any, local: Local | None, values: list[Any], about: dict[str, Any],
    rows: Sequence[int],
) -> list[Any]:
  """Returns values in which owners of chunks keep what the former ones kept.

  What a lost process owed is lost, as its momentum is; so is what is not of the
  survivors' last generation.
  """
  owned = [
      i for i, (path, x) in enumerate(flat)
      if isinstance(x, jax.Array) and _paths.is_owned(_paths.path_keys(path))
  ]
  if not owned:
    return values
  for i, shape in zip(owned, about['owned'], strict=True):
    x = flat[i][1]
    whole = np.zeros((about['num_workers'], *shape), x.dtype)
    if local is not None and local.generation == about['generation']:
      whole[local.rows] = local.values[i]
    whole = _sum_over_processes(whole.reshape(-1).view(np.uint8)).view(
        x.dtype
    ).reshape(whole.shape)
    regrouped = regroup_owned(whole, x.shape)
    values[i] = regrouped[rows[0] : rows[0] + len(rows)]
  return values


def about(arrays: Any, local: Local, num_workers: int) -> dict[str, Any]:
  """Returns what newcomers must know before they receive anything."""
  owned = [
      list(value.shape[1:])
      for (path, x), value in zip(leaves_of(arrays), local.values)
      if isinstance(x, jax.Array) and _paths.is_owned(_paths.path_keys(path))
  ]
  return {
      'owned': owned, 'num_workers': num_workers,
      'generation': local.generation, 'structure': _structure(arrays),
  }


def check_structure(state: Any, about: dict[str, Any]) -> None:
  """Raises a ValueError if a newcomer has built another state.

  Args:
    state: what it has built.
    about: as the coordinator told, of what survivors have.
  """
  own = _structure(arrays_of(state))
  if own != about['structure']:
    raise ValueError(
        f'This process has built another state ({own}) than those that it came'
        f' to ({about["structure"]}): start it with the same script, model and'
        ' optimizer.'
    )


def _structure(arrays: Any) -> str:
  """Describes the leaves of a state, whatever the number of workers."""
  lines = []
  for path, x in leaves_of(arrays):
    keys = _paths.path_keys(path)
    if _is_carried(keys, x):
      shape = np.shape(x)[1:] if _paths.is_stacked(keys) else np.shape(x)
      dtype = x.dtype if isinstance(x, jax.Array) else _canonical(x).dtype
      lines.append(f'{_tree.leaf_name(path)} {dtype}{list(shape)}')
  digest = hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:8]
  return f'{len(lines)} leaves, {digest}'


def _place(x: Any, value: Any, stacked: bool, first_row: int) -> Any:
  """Returns `value` where `x` lies."""
  if not isinstance(x, jax.Array):
    return value
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  if is_key:
    return jax.random.wrap_key_data(
        _placed(jax.random.key_data(x), value, stacked, first_row),
        impl=jax.random.key_impl(x),
    )
  return _placed(x, value, stacked, first_row)


def _placed(
    x: jax.Array, value: np.ndarray, stacked: bool, first_row: int
) -> jax.Array:
  def part(index: Any) -> np.ndarray:
    if stacked and x.ndim:
      start, stop, _ = index[0].indices(x.shape[0])
      index = (slice(start - first_row, stop - first_row), *index[1:])
    return value[index]

  return jax.make_array_from_callback(x.shape, x.sharding, part)


def _sum_over_processes(buffer: np.ndarray) -> np.ndarray:
  """Returns the sum of all processes' bytes; of each, one alone is not 0."""
  first: dict[int, Any] = {}
  for device in jax.devices():
    first.setdefault(device.process_index, device)
  devices = [first[process] for process in sorted(first)]
  mesh = Mesh(np.array(devices), ('processes',))
  own = NamedSharding(mesh, P('processes'))

  @jax.jit
  def total(x: jax.Array) -> jax.Array:
    y = jnp.sum(x, axis=0, dtype=jnp.uint8)
    return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P()))

  parts = []
  pieces = max(1, math.ceil(buffer.size / _PIECE))
  padded = np.pad(buffer, (0, -buffer.size % pieces)).reshape(pieces, -1)
  for piece in padded:
    x = jax.make_array_from_process_local_data(
        own, piece[None], (len(devices), piece.size)
    )
    parts.append(np.asarray(total(x).addressable_data(0)))
  return np.concatenate(parts)[: buffer.size]


def connect() -> None:
  """Meets the other processes, before one of them is far behind."""
  _sum_over_processes(np.zeros(1, np.uint8))


def own_rows(workers: Any) -> Sequence[int]:
  """Returns the numbers of the workers whose devices are this process's.

  Raises:
    ValueError: a worker lies in several processes, or this one has none, or
      they do not follow each other.
  """
  mesh = workers.mesh
  here = jax.process_index()
  if mesh is None:
    raise ValueError(
        'An elastic run has workers on devices: Workers.on_mesh(mesh, ...).'
    )
  sharding = NamedSharding(mesh, P(workers.axis_name))
  found: dict[int, set[int]] = {}
  for device, (index, *_) in sharding.devices_indices_map(
      (workers.count,)
  ).items():
    row = index.indices(workers.count)[0]
    found.setdefault(row, set()).add(cast(Any, device).process_index)
  for row, processes in sorted(found.items()):
    if len(processes) > 1:
      raise ValueError(
          f'Worker {row} lies in processes {sorted(processes)}: in an elastic'
          ' run every worker lies within one, which is lost as a whole.'
      )
  rows = sorted(row for row, processes in found.items() if here in processes)
  if not rows or rows != list(range(rows[0], rows[-1] + 1)):
    raise ValueError(
        f'Process {here} has workers {rows}, which must be one or several that'
        ' follow each other: make the mesh of jax.devices() in their order.'
    )
  return rows


def _nnx() -> Any:
  from flax import nnx

  return nnx

