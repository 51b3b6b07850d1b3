"""What a step does with each array of a call, decided once for equal calls.

Each array has a role:

  batch    cut over the workers along its axis of rows
  stacked  one part for each worker, along a leading axis
  key      folded with the worker's number
  shared   the same for all workers
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted, is_stacked, path_keys
from demo_optax.compressors.compressor import Frozen
from demo_optax.demo import layouts_in
from demo_optax.numerics import prng
from demo_optax.step import nnx as modules
from demo_optax.workers import Workers, inside
from demo_optax.workers.inside import OwnParam

Params = frozenset[tuple[Keys, tuple[int, ...]]]  # paths and shapes


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `data_parallel`, as tuples."""

  batch_argnums: tuple[int, ...] | None
  batch_argnames: tuple[str, ...] | None
  batch_axis: int | Mapping[str, int] | None
  keys: tuple[str, ...] | None
  static_argnums: tuple[int, ...]
  static_argnames: tuple[str, ...]
  donate_argnums: tuple[int, ...]
  donate_argnames: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a call."""

  name: str  # for error messages
  keys: Keys  # its path
  role: str  # see the module
  kind: Any  # of its variable: see `nnx.leaf_kinds`
  donated: bool  # whether it may be overwritten
  in_state: bool = False  # whether its argument holds a state
  axis: int = 0  # of its rows, if it is a batch
  sharding: NamedSharding | None = None  # where it belongs on a mesh


class Fixed(NamedTuple):
  """A leaf that is not an array: a constant, or an object of the call."""

  source: str  # 'constant', or 'object' or 'variable' by number
  value: Any  # the constant or number
  type: Any = None  # of a constant, since `1 == 1.0`


@dataclasses.dataclass(frozen=True)
class Static:
  """A static argument, a leaf even if it is a tree."""

  value: Any


def rebuild(
    treedef: Any,
    fixed: Sequence[Fixed | None],
    arrays: Sequence[Any],
    **sources: Sequence[Any],
) -> Any:
  """Returns a tree with arrays where `fixed` is None."""
  rest = iter(arrays)
  return treedef.unflatten([
      next(rest) if f is None
      else f.value if f.source == 'constant'
      else sources[f.source][f.value]
      for f in fixed
  ])


class Opened(NamedTuple):
  """A call, taken apart: all of it that is needed if it is not the first."""

  treedef: Any
  fixed: list[Fixed | None]
  objects: list[Any]
  structure: Any
  arrays: list[Any]

  @property
  def key(self) -> Any:
    """What equal calls have in common, within one `treedef`."""
    shapes = tuple(
        (x.shape, x.dtype) if isinstance(x, jax.Array)
        else (np.shape(x), jax.dtypes.result_type(x))
        for x in self.arrays
    )
    return tuple(self.fixed), self.structure, shapes


def open_call(flat: Sequence[Any], treedef: Any, numbers: list[bool]) -> Opened:
  """Takes a call apart into arrays, NNX objects and constants."""
  fixed: list[Fixed | None] = []
  arrays: list[Any] = []
  objects: dict[int, Any] = {}
  for x, traces_number in zip(flat, numbers):
    if modules.is_array(x, traces_number):
      fixed.append(None)
      arrays.append(x)
    elif modules.is_object(x):
      objects.setdefault(id(x), x)
      fixed.append(Fixed('object', [*objects].index(id(x))))
    else:
      x = x.value if isinstance(x, Static) else x
      fixed.append(Fixed('constant', x, type(x)))
  leaves, structure = modules.split([*objects.values()])
  return Opened(treedef, fixed, [*objects.values()], structure, arrays + leaves)


@dataclasses.dataclass(frozen=True)
class Call:
  """What is decided about a call."""

  treedef: Any  # of arguments and keyword arguments, NNX objects as leaves
  fixed: list[Fixed | None]  # what each leaf is, or None for an array
  structure: Any  # of the NNX objects: see `nnx.split`
  arrays: list[Array]  # those of the arguments, then those of NNX objects
  rows: int | None  # length of one worker's batch; None if nothing is cut
  # Structures of the shared arguments, each with the number of its first array;
  # what is returned with the same structure is the argument's next value.
  states: list[tuple[Any, int]]
  own_params: list[OwnParam]  # parameters of which each worker has its own

  @property
  def axis(self) -> int:
    """The axis of the rows in results."""
    return next((a.axis for a in self.arrays if a.role == 'batch'), 0)

  @property
  def variables(self) -> list[Array]:
    """The arrays of NNX objects."""
    return self.arrays[self.fixed.count(None) :]

  def merge(self, arrays: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Returns the step's arguments and NNX objects, made of these arrays."""
    number = self.fixed.count(None)
    objects = modules.merge(self.structure, arrays[number:], inner=True)
    args, kwargs = rebuild(
        self.treedef, self.fixed, arrays[:number], object=objects
    )
    return args, kwargs, objects


class Argument(NamedTuple):
  """An argument, while a call is analysed."""

  name: str
  value: Any
  first: int  # number of its first array
  paths: list[Any]  # of its arrays, below the argument, as of the next three
  keys: list[Keys]
  arrays: list[Any]
  kinds: list[Any]
  structure: Any
  is_batch: bool | None  # None: not said
  is_donated: bool
  is_state: bool  # whether it holds the state of a model or an optimizer
  objects: list[int]


def analyse(
    step: str,
    names: Sequence[str],
    workers: Workers,
    o: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opened: Opened,
) -> Call:
  """Decides about every array of a call of `step`.

  `names` are those of its positional arguments. `opened` are `args` and
  `kwargs`, taken apart.
  """
  arguments: list[Argument] = []
  fixed, arrays = iter(opened.fixed), iter(opened.arrays)
  first = 0
  automatic = o.batch_argnums is None and o.batch_argnames is None
  given: list[tuple[int | str, Any]] = [*enumerate(args)]
  for key, value in [*given, *sorted(kwargs.items())]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=modules.is_object
    )
    kinds = modules.leaf_kinds(value)
    value = value.value if isinstance(value, Static) else value
    found = list(itertools.islice(fixed, len(flat)))
    are_arrays = tuple(f is None for f in found)
    paths = [path for (path, _), f in zip(flat, found) if f is None]
    keys = list(map(path_keys, paths))
    listed = functools.partial(is_listed, key, names, len(args))
    arguments.append(Argument(
        name_of(key, names),
        value,
        first,
        paths,
        keys,
        list(itertools.islice(arrays, len(paths))),
        [kinds[i] for i, is_array in enumerate(are_arrays) if is_array],
        (treedef, are_arrays),
        None if automatic else listed(o.batch_argnums, o.batch_argnames),
        listed(o.donate_argnums, o.donate_argnames),
        modules.holds_state(value) or any(map(is_stacked, keys)),
        [f.value for f in found if f and f.source == 'object'],
    ))
    first += len(paths)

  decided: list[Array] = []
  states = []
  for a, is_shared in zip(arguments, _shared(step, arguments)):
    roles = [
        _role(a, k, x, kind, is_shared, o.keys)
        for k, x, kind in zip(a.keys, a.arrays, a.kinds)
    ]
    axis = o.batch_axis or 0
    axis = axis.get(a.name, 0) if isinstance(axis, Mapping) else axis
    decided += [
        Array(
            a.name + jax.tree_util.keystr(path), (a.name, *k), role, kind,
            a.is_donated, a.is_state, axis if role == 'batch' else 0,
        )
        for path, k, role, kind in zip(a.paths, a.keys, roles, a.kinds)
    ]
    if is_shared or {*roles} == {'key'}:
      shapes = [
          np.shape(x)[1 if is_stacked(k) else 0 :]
          for k, x in zip(a.keys, a.arrays)
      ]
      states.append((structure_of(a.structure, shapes), a.first))
  donated = {n: a.is_donated for a in arguments for n in a.objects}
  for k, kind in modules.variables(opened.objects):
    role = 'key' if kind == 'stream' else 'shared'
    role = 'stacked' if is_stacked(k) else role
    name = modules.keystr(k)
    decided.append(Array(name, k, role, kind or 'state', donated[k[0]]))
  for path in o.keys or ():
    if not any(
        x.role == 'key' and _is_within(path, x.keys) for x in decided
    ):
      raise ValueError(
          f'keys must be paths of random keys, got {path!r}. The arguments'
          f' of {step} are {", ".join(a.name for a in arguments)}.'
      )
  if workers.mesh is not None:
    decided = [
        dataclasses.replace(a, sharding=(
            workers.sharding(a.keys, np.shape(x)) if a.role != 'batch'
            else NamedSharding(
                workers.mesh, P(*(None,) * a.axis, workers.spmd_axis_name)
            )
        ))
        for a, x in zip(decided, opened.arrays)
    ]
  return Call(
      opened.treedef,
      opened.fixed,
      opened.structure,
      decided,
      _rows(step, workers, o, arguments, decided, opened.arrays),
      states,
      inside.own_params([x.keys for x in decided]),
  )


def name_of(key: int | str, names: Sequence[str]) -> str:
  """Returns an argument's name, from its position or name in a call."""
  if isinstance(key, str):
    return key
  return names[key] if key < len(names) else f'argument {key}'


def is_listed(
    key: int | str,
    names: Sequence[str],
    num_args: int,
    argnums: Sequence[int] | None,
    argnames: Sequence[str] | None,
) -> bool:
  """Returns whether an option names an argument, by position or by name."""
  name = name_of(key, names)
  if isinstance(key, str):
    key = names.index(key) if key in names else -1
  positions = [n + num_args if n < 0 else n for n in argnums or ()]
  return key in positions or name in (argnames or ())


def structure_of(structure: Any, shapes: list[tuple[int, ...]]) -> Any:
  """Returns what a shared argument and its next value have in common."""
  _, are_arrays = structure
  if not shapes or (len(are_arrays) == 1 and shapes == [()]):
    return None  # nothing to keep equal; any loss looks like a lone scalar
  return structure, shapes


def _shared(step: str, arguments: list[Argument]) -> list[bool]:
  """Returns for each argument whether all workers share it."""
  if any(a.is_batch is not None for a in arguments):
    return [not a.is_batch for a in arguments]
  shared = [a.is_state for a in arguments]
  if arguments and not any(shared):
    raise ValueError(
        f'{step} cannot infer which of its arguments'
        f' ({", ".join(a.name for a in arguments)}) are batches: none holds a'
        ' Flax object, a dataclass or a state of scale_by_demo. Name them:'
        ' demo_optax.data_parallel(workers, batch_argnums=...).'
    )
  params = [p for a in arguments for p in _params_of_states(a.value)]
  for a in arguments:
    shapes = dict(zip(a.keys, map(np.shape, a.arrays)))
    for root, keys in inside.local_params(a.keys).items():
      params.append(frozenset(
          (k, shapes[*root, 'global_params', *k]) for k in keys
      ))
  held = [any(_holds(a, p) for p in params) for a in arguments]
  found = [is_state or holds for is_state, holds in zip(shared, held)]
  rows = {
      np.shape(x)[:1]
      for a, is_shared in zip(arguments, found)
      if not is_shared
      for x in a.arrays
  }
  for a, holds in zip(arguments, held):
    own = {np.shape(x)[:1] for x in a.arrays}
    is_state = a.is_state and not holds and not a.objects
    if is_state and own and own == rows != {()}:
      raise ValueError(
          f'{a.name} must be known as a batch or as a state, got a dataclass of'
          ' arrays that are as long as the batch. Name all batches:'
          ' demo_optax.data_parallel(workers, batch_argnums=...).'
      )
  return found


def _holds(argument: Argument, params: Params) -> bool:
  """Returns whether an argument is such parameters, or has them in a part."""
  found = {(k, np.shape(x)) for k, x in zip(argument.keys, argument.arrays)}
  if not params or params <= found:
    return bool(params)
  some, _ = min(params, key=str)
  if not some:  # a lone array: could be any
    return False
  parts = {
      k[: -len(some)] for k, _ in found if k[len(k) - len(some) :] == some
  }
  return any(
      {((*part, *k), shape) for k, shape in params} <= found for part in parts
  )


def _params_of_states(value: Any) -> list[Params]:
  """Returns paths and shapes of the parameters of all exchanges in a state."""
  return [
      frozenset(
          (leaf.keys, leaf.shape)
          for leaf in layout.leaves
          if not isinstance(leaf.compressor, Frozen)
      )
      for layout in layouts_in(value).values()
  ]


def _role(
    argument: Argument,
    path: Keys,
    x: Any,
    kind: Any,
    is_shared: bool,
    keys: tuple[str, ...] | None,
) -> str:
  if is_stacked(path):
    return 'stacked'
  rank = np.ndim(x)
  if kind in (None, 'stream') and prng.is_key_array(x) and (
      is_shared or not rank
  ):
    return 'key'
  if (
      kind is None and prng.is_pair(x) and not argument.is_batch
      and (is_shared or rank == 1)
  ):
    name = dotted((argument.name, *path))
    if keys is not None:
      is_key = any(_is_within(k, (argument.name, *path)) for k in keys)
    elif not (is_key := prng.is_named(argument.name, prng.last_name(path))):
      raise ValueError(
          f'{name} must be known as a random key or as data, got'
          f' {x.dtype}{list(x.shape)}. If it is a key, into which each worker'
          f' folds its number, give data_parallel keys={name!r}, or use'
          ' jax.random.key. If it is data, give keys=(), or name the batches'
          ' by batch_argnums if it is one.'
      )
    if is_key:
      return 'key'
  return 'shared' if is_shared or not rank else 'batch'


def _is_within(name: str, path: Keys) -> bool:
  return f'{dotted(path)}.'.startswith(f'{name}.')


def _rows(
    step: str,
    workers: Workers,
    o: Options,
    arguments: list[Argument],
    decided: list[Array],
    arrays: Sequence[Any],
) -> int | None:
  """Returns the length of one worker's batch, from those of all arrays cut."""
  lengths: dict[int, str] = {}
  for a, x in zip(decided, arrays):
    if a.role != 'batch':
      continue
    if not 0 <= a.axis < np.ndim(x):
      raise ValueError(
          f'batch_axis must be an axis of every batch, got {a.axis} for'
          f' {a.name} of shape {np.shape(x)}. Give one for each argument:'
          " batch_axis={'images': 1}."
      )
    lengths.setdefault(np.shape(x)[a.axis], a.name)
  remedy = (
      'Say which arguments are batches: demo_optax.data_parallel(workers,'
      ' batch_argnums=...).'
  )
  options = o.batch_argnums, o.batch_argnames
  if not lengths and not any(options) and options != (None, None):
    return None
  if not lengths:
    raise ValueError(
        f'{step} has nothing to cut over the workers: none of its arguments'
        f' ({", ".join(a.name for a in arguments)}) is a batch. {remedy} If the'
        ' step draws its batch by a random key, give batch_argnums=().'
    )
  if len(lengths) > 1:
    some = ', '.join(f'{n}: {length}' for length, n in lengths.items())
    raise ValueError(
        f'{step} would cut arrays of different lengths along their axis of'
        f' rows ({some}), which are not one batch. {remedy}'
    )
  ((length, name),) = lengths.items()
  parts = workers.count if workers.relay is None else 1  # the batch is its own
  if length % parts:
    raise ValueError(
        f'{name} has {length} rows, which do not divide among {workers}.'
        f' Change the batch size. {remedy}'
    )
  return length // parts
