"""Decides once for equal calls which role each argument's array has.

The caller names the batches. All else is shared by the workers, except what its
type says is one worker's own: momentum in the state of an exchange, and random
keys.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted, is_stacked, leaves_of
from demo_optax.numerics import prng
from demo_optax.step import modules, own_params
from demo_optax.step.roles import Role
from demo_optax.workers import Workers
from demo_optax.workers.value import put

Shapes = tuple[tuple[int, ...] | None, ...]  # None of what is no array


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `data_parallel`, arguments by their names."""

  batches: frozenset[str]
  static: frozenset[str]
  donated: frozenset[str]
  axis: int | Mapping[str, int] | None  # of rows, by default the first one


@dataclasses.dataclass
class Array:
  """One array of a call.

  Attributes:
    keys: its path, from the name of its argument.
    type: its shape and dtype, as all workers have it.
    role: see `Role`.
    axis: that of its rows, if it is a batch.
    in_state: whether its argument holds Flax objects or dataclasses.
    sharding: where it belongs on a mesh.
  """

  keys: Keys
  type: jax.ShapeDtypeStruct
  role: Role
  axis: int = 0
  in_state: bool = False
  sharding: NamedSharding | None = None

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
    variables = arrays[self.fixed.count(None) :]
    objects = modules.merge(self.objects, variables, inner)
    sources = {'object': objects, 'variable': variables}
    in_order = iter(arrays)
    leaves = []
    for fixed in self.fixed:
      if fixed is None:
        leaves.append(next(in_order))
      elif fixed.source == 'constant':
        leaves.append(fixed.value)
      else:
        leaves.append(sources[fixed.source][fixed.value])
    return self.treedef.unflatten(leaves), objects


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
  """An analysed call: its arguments and keyword arguments.

  Attributes:
    form: the structure of the arguments.
    arrays: the arrays in them.
    rows: length of one worker's batch; None if there is no batch.
    axis: that of the rows in results.
    states: by structure and shapes of shared arguments, the numbers of the
      first array of each. A result of the same structure is the argument's
      next value.
    own_params: see `own_params.find`.
  """

  form: Form
  arrays: list[Array]
  rows: int | None
  axis: int
  states: dict[Any, list[int]]
  own_params: dict[int, list[int]]

  def replace(
    self, role: Role, fun: Callable[[Any, Array], Any], arrays: Sequence[Any]
  ) -> list[Any]:
    """Applies a function to the arrays of one role."""
    return [
      fun(x, a) if a.role is role else x for x, a in zip(arrays, self.arrays)
    ]


def analyse(
  step: str,
  workers: Workers,
  options: Options,
  named: Iterable[tuple[str, Any]],
  form: Form,
  objects: Sequence[Any],
  types: Iterable[tuple[tuple[int, ...], Any]],
) -> Call:
  """Decides about every array of a call of `step`.

  `named` are its arguments, in the order in which JAX flattens a call; the rest
  are the same, taken apart, with the shapes and dtypes of the arrays.
  """
  arrays: list[Array] = []
  states: dict[Any, list[int]] = {}
  paths: dict[int, Keys] = {}  # of the NNX objects
  in_order = iter(form.fixed)
  structs = itertools.starmap(jax.ShapeDtypeStruct, types)
  for name, value in named:
    flat = leaves_of(value, modules.is_object)
    fixed = list(itertools.islice(in_order, len(flat)))
    is_batch = name in options.batches
    own: list[Array] = []
    shapes: list[tuple[int, ...] | None] = []
    for (keys, _), f, said in zip(flat, fixed, modules.roles_of(value)):
      keys = (name, *keys)
      if f is None:
        array = Array(keys, next(structs), Role.SHARED)
        array.role = _role(array, said, is_batch)
        own.append(array)
        # The step sees no axis of workers.
        shapes.append(array.shape[array.role is Role.STACKED :])
      else:
        shapes.append(None)
        if f.source == 'object':
          paths[f.value] = keys
    in_state = not is_batch and modules.holds_state(value)
    axis = _axis_of(options, name)
    for array in own:
      array.in_state = in_state
      array.axis = axis if array.role is Role.BATCH else 0
    if is_batch:
      _check_batch(name, value, own)
    # Not of a single scalar: any loss has that structure.
    elif own and shapes != [()]:
      structure = jax.tree.structure(value, modules.is_object), tuple(shapes)
      states.setdefault(structure, []).append(len(arrays))
    arrays += own
  for ((n, *rest), said), struct in zip(modules.variables(objects), structs):
    variable = Array((*paths[n], *rest), struct, Role.SHARED)
    variable.role = _role(variable, said, is_batch=False)
    arrays.append(variable)
  _check_not_accumulated(arrays)
  _check_stacked(workers, arrays)
  if workers.mesh is not None:
    for x in arrays:
      x.sharding = workers.sharding(x.keys, x.shape)
      if x.role is Role.BATCH:
        spec = P(*[None] * x.axis, workers.spmd_axis_name)
        x.sharding = NamedSharding(workers.mesh, spec)
  rows = _rows(step, workers, options, arrays)
  axis = next((x.axis for x in arrays if x.role is Role.BATCH), 0)
  copies = own_params.find([x.keys for x in arrays])
  return Call(form, arrays, rows, axis, states, copies)


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
    a.role is not Role.STACKED or x.sharding.is_equivalent_to(target, x.ndim)
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


def _role(x: Array, said: Role | None, is_batch: bool) -> Role:
  """Returns the role of an array; `said` is what its variable's class says."""
  if is_stacked(x.keys[1:]):
    return Role.STACKED
  has_rows = is_batch and bool(x.shape)
  if said in (None, Role.KEY) and prng.is_key_array(x.type):
    return Role.BATCH if has_rows else Role.KEY
  if said is not None:
    return said
  if has_rows:
    return Role.BATCH
  if len(x.keys) == 1 and prng.is_legacy_key(x.type):
    raise ValueError(
      f'{x.name} must not be a legacy random key, got uint32[2], which all'
      ' workers would share. Pass a typed key, jax.random.key(seed) or'
      f' jax.random.wrap_key_data({x.name}), into which each worker folds its'
      ' number. Pass data of this shape in a tuple or dict.'
    )
  return Role.SHARED


def _axis_of(options: Options, name: str) -> int:
  if isinstance(options.axis, Mapping):
    return options.axis.get(name, 0)
  return options.axis or 0


def _check_batch(name: str, value: Any, arrays: Sequence[Array]) -> None:
  """Raises for a batch without arrays to cut."""
  cut = [x for x in arrays if x.role is Role.BATCH]
  if not cut and (arrays or not isinstance(value, Mapping | tuple | list)):
    raise ValueError(
      f'{name} must hold arrays whose rows are cut over the workers, got'
      f' {type(value).__name__} of {len(arrays)} numbers. Pass arrays:'
      f' np.asarray({name}).'
    )


def _check_stacked(workers: Workers, arrays: Sequence[Array]) -> None:
  """Raises for a state of another number of workers."""
  count = workers.count if workers.stacked_gradients else 1
  for a in arrays:
    if a.role is Role.STACKED and a.shape[:1] != (count,):
      raise ValueError(
        f'{a.name} must have an entry for each of the {count} workers here'
        f' along its first axis, got shape {a.shape} with {workers}. Make the'
        ' state with tx.init under the same workers, or regroup it by'
        ' demo_optax.checkpoint.from_leaves(..., resize=True). For an ensemble,'
        ' map the decorated step: jax.vmap(step, in_axes=...).'
      )


def _check_not_accumulated(arrays: Sequence[Array]) -> None:
  """Raises for a state of optax.MultiSteps."""
  fields = 'mini_step', 'gradient_step', 'acc_grads'
  holders = [
    {x.keys[: x.keys.index(field)] for x in arrays if field in x.keys}
    for field in fields
  ]
  if set.intersection(*holders):
    raise ValueError(
      'The optimizer of a data_parallel step must not be in optax.MultiSteps,'
      ' got a state of it: it would exchange in every call and drop all results'
      ' but the last. Take the mean of the gradients of micro-batches in the'
      ' step, by jax.lax.scan or optax.microbatching, and update once.'
    )


def _rows(
  step: str, workers: Workers, options: Options, arrays: Sequence[Array]
) -> int | None:
  """Returns the length of one worker's batch, from those of all arrays cut."""
  cut = [a for a in arrays if a.role is Role.BATCH]
  for a in cut:
    if not 0 <= a.axis < len(a.shape):
      raise ValueError(
        f'batch_axis must be an axis of every batch, got {a.axis} for'
        f' {a.name} of shape {a.shape}. Give one for each argument:'
        " batch_axis={'images': 1}."
      )
  if not options.batches:
    return None
  if not cut:
    raise ValueError(
      f'The batch of {step} must hold arrays, got none in'
      f' {", ".join(sorted(options.batches))}. Pass a batch, or give'
      ' batch_argnames=() if the step draws its batch by a random key.'
    )
  names = {a.shape[a.axis]: a.name for a in cut}
  if len(names) > 1:
    some = ', '.join(f'{name}: {length}' for length, name in names.items())
    raise ValueError(
      f'The arrays of one batch must have the same number of rows, got {some}'
      f' in {step}. Name as batches only arguments of such arrays, and give'
      ' batch_axis if rows are not along the first axis.'
    )
  ((length, name),) = names.items()
  parts = workers.count if workers.relay is None else 1  # the batch is its own
  if length % parts or not length:
    raise ValueError(
      f'{name} must have rows that divide among {workers}, got {length} rows.'
      ' Change the batch size, or drop the last rows of an epoch.'
    )
  return length // parts
