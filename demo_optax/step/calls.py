"""Decides once for equal calls how a step treats each of its arrays.

Each array has a role:

  batch    cut over the workers along its axis of rows
  stacked  one part for each worker, along a leading axis
  key      folded with the worker's number
  shared   the same for all workers
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted, is_stacked, leaves_of
from demo_optax.numerics import prng
from demo_optax.step import modules
from demo_optax.transformation import layouts_in
from demo_optax.workers import Workers, inside
from demo_optax.workers.value import put

Role = Literal['batch', 'stacked', 'key', 'shared']
Params = frozenset[tuple[Keys, tuple[int, ...]]]  # paths and shapes
Shapes = tuple[tuple[int, ...] | None, ...]  # None of what is no array
_REMEDY = (
  'Say which arguments are batches: demo_optax.data_parallel(workers,'
  ' batch_argnums=...).'
)


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `data_parallel`: names of arguments, and paths of keys."""

  batches: frozenset[str] | None  # None: to be inferred
  static: frozenset[str]
  donated: frozenset[str]
  keys: tuple[str, ...] | None
  axis: int | Mapping[str, int] | None  # of rows, by default the first one


@dataclasses.dataclass
class Array:
  """One array of a call."""

  keys: Keys  # its path, from the name of its argument
  type: jax.ShapeDtypeStruct
  kind: Any  # of its variable: see `modules.leaf_kinds`
  in_state: bool = False  # whether its argument holds a state
  role: Role = 'shared'  # see the module
  axis: int = 0  # of its rows, if it is a batch
  sharding: NamedSharding | None = None  # where it belongs on a mesh

  @property
  def name(self) -> str:
    """The path in messages."""
    return dotted(self.keys)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape, as all workers have it."""
    return self.type.shape


class Fixed(NamedTuple):
  """A leaf that is not an array: a constant, or an object of the call."""

  source: str  # 'constant', or 'object' or 'variable' by number
  value: Any  # the constant or number
  type: Any = None  # of a constant, since `1 == 1.0`


class Static:
  """A static argument, a leaf even if it is a tree."""

  def __init__(self, value: Any):
    self.value = value


class Form(NamedTuple):
  """The structure of the arguments or results of a step, without arrays.

  Its arrays are those of the tree, then those of its NNX objects.
  """

  treedef: Any  # NNX objects are leaves
  fixed: tuple[Fixed | None, ...]  # what each leaf is, or None for an array
  objects: Any  # the structure of the NNX objects: see `modules.split`

  def merge(self, arrays: Sequence[Any], inner: bool) -> tuple[Any, list[Any]]:
    """Returns the tree with these arrays, and its NNX objects."""
    variables, rest = arrays[self.fixed.count(None) :], iter(arrays)
    objects = modules.merge(self.objects, variables, inner)
    sources = {'object': objects, 'variable': variables}
    return self.treedef.unflatten(
      [
        next(rest)
        if f is None
        else f.value
        if f.source == 'constant'
        else sources[f.source][f.value]
        for f in self.fixed
      ]
    ), objects


def take_apart(
  flat: Sequence[Any], numbers: Sequence[bool], objects: list[Any]
) -> tuple[tuple[Fixed | None, ...], list[Any]]:
  """Separates the arrays of a tree from all else, see `Form`.

  `numbers` are of `modules.traces_numbers`. Adds new NNX objects to `objects`.
  """
  fixed: list[Fixed | None] = []
  arrays: list[Any] = []
  known = {id(x): number for number, x in enumerate(objects)}
  for x, traces_number in zip(flat, numbers):
    if modules.is_array(x, traces_number):
      fixed.append(None)
      arrays.append(x)
    elif modules.is_object(x):
      if id(x) not in known:
        known[id(x)] = len(objects)
        objects.append(x)
      fixed.append(Fixed('object', known[id(x)]))
    else:
      x = x.value if isinstance(x, Static) else x
      fixed.append(Fixed('constant', x, type(x)))
  return tuple(fixed), arrays


@dataclasses.dataclass(frozen=True)
class Call:
  """An analysed call: its arguments and keyword arguments."""

  form: Form
  arrays: list[Array]
  rows: int | None  # length of one worker's batch; None if nothing is cut
  axis: int  # of the rows in results
  # By structure of shared arguments, the numbers of the first array of each;
  # what is returned with the same structure is the argument's next value.
  states: dict[Any, list[int]]
  own_params: dict[int, list[int]]  # see `inside.own_params`

  def replace(
    self, role: Role, fun: Callable[[Any, Array], Any], arrays: Sequence[Any]
  ) -> list[Any]:
    """Applies a function to the arrays of one role."""
    return [
      fun(x, a) if a.role == role else x for x, a in zip(arrays, self.arrays)
    ]


class Argument(NamedTuple):
  """An argument, while a call is analysed."""

  name: str
  value: Any
  arrays: list[Array]
  structure: tuple[Any, Shapes]  # with the shapes of leaves
  holds_state: bool  # of a model or an optimizer
  holds_objects: bool  # of NNX


def analyse(
  step: str,
  workers: Workers,
  o: Options,
  named: Iterable[tuple[str, Any]],
  form: Form,
  objects: Sequence[Any],
  types: Iterable[tuple[tuple[int, ...], Any]],
) -> Call:
  """Decides about every array of a call of `step`.

  `named` are its arguments, in the order in which JAX flattens a call; the rest
  are the same, taken apart, with the shapes and dtypes of the arrays.
  """
  arguments: list[Argument] = []
  paths: dict[int, Keys] = {}  # of the NNX objects
  fixed = iter(form.fixed)
  structs = itertools.starmap(jax.ShapeDtypeStruct, types)
  for name, value in named:
    keys = [(name, *k) for k, _ in leaves_of(value, modules.is_object)]
    found = list(itertools.islice(fixed, len(keys)))
    leaves = [
      None if f else Array(k, next(structs), kind)
      for k, kind, f in zip(keys, modules.leaf_kinds(value), found)
    ]
    inner = {
      f.value: k for k, f in zip(keys, found) if f and f.source == 'object'
    }
    paths |= inner
    own = [x for x in leaves if x]
    shapes = tuple(  # without the axis of workers, as the step sees them
      x.shape[is_stacked(x.keys[1:]) :] if x else None for x in leaves
    )
    holds_state = modules.holds_state(value) or any(
      is_stacked(x.keys[1:]) for x in own
    )
    structure = jax.tree.structure(value, modules.is_object), shapes
    arguments.append(
      Argument(name, value, own, structure, holds_state, bool(inner))
    )

  arrays: list[Array] = []
  states: dict[Any, list[int]] = {}
  for a, is_shared in zip(arguments, _shared(step, o, arguments)):
    axis = o.axis.get(a.name) if isinstance(o.axis, Mapping) else o.axis
    for x in a.arrays:
      x.role, x.in_state = _role(x, is_shared, o), a.holds_state
      x.axis = axis or 0 if x.role == 'batch' else 0
    # Not of a single scalar: any loss has that structure.
    is_state = is_shared or {x.role for x in a.arrays} == {'key'}
    if is_state and a.arrays and a.structure[1] != ((),):
      states.setdefault(a.structure, []).append(len(arrays))
    arrays += a.arrays
  for ((n, *rest), kind), of in zip(modules.variables(objects), structs):
    variable = Array((*paths[n], *rest), of, kind)
    variable.role = _role(variable, True, o)
    variable.kind = kind or ('stream' if variable.role == 'key' else 'equal')
    arrays.append(variable)
  multi_steps = [
    {x.keys[: x.keys.index(field)] for x in arrays if field in x.keys}
    for field in ('mini_step', 'gradient_step', 'acc_grads')
  ]
  if set.intersection(*multi_steps):
    raise ValueError(
      'The optimizer of a data_parallel step must not be in optax.MultiSteps,'
      ' which would exchange in every call and drop all results but the last.'
      ' Take the mean of the gradients of micro-batches in the step, by'
      ' jax.lax.scan or optax.microbatching, and update once.'
    )
  for path in o.keys or ():
    if not any(x.role == 'key' and _is_within(path, x.keys) for x in arrays):
      raise ValueError(
        f'keys must be paths of random keys, got {path!r}. The arguments'
        f' of {step} are {", ".join(a.name for a in arguments)}.'
      )
  if workers.mesh is not None:
    for x in arrays:
      x.sharding = workers.sharding(x.keys, x.shape)
      if x.role == 'batch':
        spec = P(*[None] * x.axis, workers.spmd_axis_name)
        x.sharding = NamedSharding(workers.mesh, spec)
  rows = _rows(step, workers, o, arrays)
  axis = next((x.axis for x in arrays if x.role == 'batch'), 0)
  own_params = inside.own_params([x.keys for x in arrays])
  return Call(form, arrays, rows, axis, states, own_params)


def place(workers: Workers, x: Any, a: Array) -> Any:
  """Puts an argument's array where it belongs, unless it is on the mesh."""
  if a.in_state and type(x) is int:
    # A count of 0 in a state gets the dtype of those that a step returns, or
    # the step would be compiled for both.
    x = np.asarray(x, a.type.dtype)
  target = a.sharding
  if target is None or isinstance(x, jax.core.Tracer):
    return x
  there = getattr(getattr(x, 'sharding', None), 'mesh', None) == workers.mesh
  if there and (
    a.role != 'stacked' or x.sharding.is_equivalent_to(target, x.ndim)
  ):
    if not workers.is_explicit:
      return x
    # Where types have specs, P() and P(None) are two, and results of a step
    # have the longer one: it would be compiled for both.
    spec = x.sharding.spec
    full = P(*spec, *[None] * (x.ndim - len(spec)))
    target = NamedSharding(target.mesh, full)
    if x.sharding == target:
      return x
  return put(x, target)


def _shared(step: str, o: Options, arguments: list[Argument]) -> list[bool]:
  """Returns for each argument whether all workers share it."""
  if o.batches is not None:
    return [a.name not in o.batches for a in arguments]
  if arguments and not any(a.holds_state for a in arguments):
    raise ValueError(
      f'{step} cannot infer which of its arguments'
      f' ({", ".join(a.name for a in arguments)}) are batches: none holds a'
      f' Flax object, a dataclass or a state of scale_by_demo. {_REMEDY}'
    )
  params = [p for a in arguments for p in _params_of_states(a)]
  held = [any(p <= x for x in _parts(a) for p in params) for a in arguments]
  found = [a.holds_state or holds for a, holds in zip(arguments, held)]
  cut = [a for a, is_shared in zip(arguments, found) if not is_shared]
  rows = {x.shape[:1] for a in cut for x in a.arrays}
  for a, holds in zip(arguments, held):
    own = {x.shape[:1] for x in a.arrays}
    is_state = a.holds_state and not holds and not a.holds_objects
    if is_state and own and own == rows != {()}:
      raise ValueError(
        f'{a.name} must be known as a batch or as a state, got a dataclass of'
        f' arrays that are as long as the batch. {_REMEDY}'
      )
  return found


def _parts(argument: Argument) -> list[Params]:
  """Returns paths and shapes of the arrays of an argument, and of each part."""
  parts: dict[Keys, set[Any]] = {}
  for x in argument.arrays:
    # A part of a single array would match too easily.
    for start in range(1, max(2, len(x.keys))):
      parts.setdefault(x.keys[:start], set()).add((x.keys[start:], x.shape))
  return [*map(frozenset, parts.values())]


def _params_of_states(argument: Argument) -> list[Params]:
  """Returns paths and shapes of the parameters of all states in an argument."""
  shapes = {x.keys[1:]: x.shape for x in argument.arrays}
  found = [
    frozenset((x.keys, x.shape) for x in layout.leaves if not x.is_frozen)
    for layout in layouts_in(argument.value).values()
  ] + [
    frozenset((k, shapes[*root, 'global_params', *k]) for k in keys)
    for root, keys in inside.local_params(list(shapes)).items()
  ]
  return [params for params in found if params]


def _role(x: Array, is_shared: bool, o: Options) -> Role:
  if is_stacked(x.keys[1:]):
    return 'stacked'
  rank = len(x.shape)
  if (
    x.kind in (None, 'stream')
    and prng.is_key_array(x.type)
    and (is_shared or not rank)
  ):
    return 'key'
  may_be_key = is_shared or (rank == 1 and o.batches is None)
  if x.kind is None and prng.is_pair(x.type) and may_be_key:
    if o.keys is not None:
      is_key = any(_is_within(k, x.keys) for k in o.keys)
    elif not (is_key := prng.is_named(x.keys[0], prng.last_name(x.keys[1:]))):
      raise ValueError(
        f'{x.name} must be known as a random key or as data, got'
        f' {x.type.dtype}{list(x.shape)}. Give data_parallel keys={x.name!r}'
        ' if it is a key, into which workers fold their numbers, or keys=()'
        ' if it is data; if it is a batch, name the batches.'
      )
    if is_key:
      return 'key'
  return 'shared' if is_shared or not rank else 'batch'


def _is_within(name: str, path: Keys) -> bool:
  return f'{dotted(path)}.'.startswith(f'{name}.')


def _rows(
  step: str, workers: Workers, o: Options, arrays: Sequence[Array]
) -> int | None:
  """Returns the length of one worker's batch, from those of all arrays cut."""
  cut = [a for a in arrays if a.role == 'batch']
  for a in cut:
    if not 0 <= a.axis < len(a.shape):
      raise ValueError(
        f'batch_axis must be an axis of every batch, got {a.axis} for'
        f' {a.name} of shape {a.shape}. Give one for each argument:'
        " batch_axis={'images': 1}."
      )
  if o.batches == frozenset():
    return None
  if not cut:
    raise ValueError(
      f'{step} has nothing to cut over the workers: no argument is a batch.'
      f' {_REMEDY} If the step draws its batch by a random key, give'
      ' batch_argnums=().'
    )
  names = {a.shape[a.axis]: a.name for a in cut}
  if len(names) > 1:
    some = ', '.join(f'{name}: {length}' for length, name in names.items())
    raise ValueError(
      f'{step} would cut arrays of different lengths along their axis of'
      f' rows ({some}), which are not one batch. {_REMEDY}'
    )
  ((length, name),) = names.items()
  parts = workers.count if workers.relay is None else 1  # the batch is its own
  if length % parts:
    raise ValueError(
      f'{name} has {length} rows, which do not divide among {workers}.'
      f' Change the batch size. {_REMEDY}'
    )
  return length // parts
