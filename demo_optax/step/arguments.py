"""Decides once for equal calls which role each argument's array has.

The caller names the batches. All else is shared by the workers, except what its
type says is one worker's own: momentum in the state of an exchange, and random
keys.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted, is_stacked, leaves_of
from demo_optax.numerics import prng
from demo_optax.step import modules, own_params
from demo_optax.step.roles import Role
from demo_optax.workers import Workers
from demo_optax.workers.workers import is_on, put

Shape = tuple[int, ...]
Value = TypeVar('Value')


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
  def shape(self) -> Shape:
    """The shape, as all workers have it."""
    return self.type.shape


class Numbered(NamedTuple):
  """An object of the call, or an array that one holds."""

  source: str  # 'object' or 'variable'
  number: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
  """A part of a tree that is not an array, and that a program is for."""

  value: object
  type: type  # since `1 == 1.0`


def only_arrays(
  tree: object,
  objects: list[object],
  variables: Sequence[jax.Array] = (),
) -> Any:
  """Returns a tree whose leaves are its arrays; all else is in `Constant`s.

  NNX objects have numbers there, and new ones are added to `objects`; so have
  the `variables` of objects after a step.
  """
  numbers: dict[int, Numbered] = {}
  for source, values in ('object', objects), ('variable', variables):
    for number, x in enumerate(values):
      numbers[id(x)] = Numbered(source, number)

  def wrap(x: object, traces_number: bool) -> object:
    if id(x) not in numbers:
      if modules.is_array(x, traces_number):
        return x
      if not modules.is_object(x):
        return Constant(x, type(x))
      numbers[id(x)] = Numbered('object', len(objects))
      objects.append(x)
    return Constant(numbers[id(x)], Numbered)

  return modules.map_leaves(wrap, tree)


class Form(NamedTuple):
  """The structure of the arguments or results of a step, without arrays.

  Its arrays are those of the tree, then those of its NNX objects.
  """

  treedef: jax.tree_util.PyTreeDef  # of `only_arrays`
  objects: object  # the structure of the NNX objects: see `modules.split`

  def merge(
    self,
    arrays: Sequence[jax.Array],
    inner: bool,
  ) -> tuple[Any, list[object]]:
    """Returns the tree with these arrays, and its NNX objects."""
    count = self.treedef.num_leaves
    variables = arrays[count:]
    objects = modules.merge(self.objects, variables, inner)
    sources = {'object': objects, 'variable': variables}

    def plain(x: object) -> object:
      if not isinstance(x, Constant):
        return x
      if isinstance(x.value, Numbered):
        return sources[x.value.source][x.value.number]
      return x.value

    tree = self.treedef.unflatten(arrays[:count])
    return jax.tree.map(plain, tree, is_leaf=_is_constant), objects


def _is_constant(x: object) -> bool:
  return isinstance(x, Constant)


# What an argument and its next value among the results have in common: the
# structure, and the shapes of the arrays in the step.
StateForm = tuple[object, tuple[Shape, ...]]


@dataclasses.dataclass(frozen=True)
class Call:
  """An analysed call: its arguments and keyword arguments.

  Attributes:
    form: the structure of the arguments.
    arrays: the arrays in them.
    rows: length of one worker's batch; None if there is no batch.
    axis: that of the rows in results.
    states: by the form of shared arguments, the numbers of the first array of
      each. A result of this form is the argument's next value.
    ambiguous: numbers of the arrays in arguments of the same form.
    own_params: see `own_params.find`.
  """

  form: Form
  arrays: list[Array]
  rows: int | None
  axis: int
  states: dict[StateForm, list[int]]
  ambiguous: frozenset[int]
  own_params: dict[int, list[int]]

  def replace(
    self,
    role: Role,
    fun: Callable[[Value, Array], Value],
    xs: Sequence[Value],
  ) -> list[Value]:
    """Applies a function to the arrays of one role."""
    found = []
    for x, array in zip(xs, self.arrays):
      found.append(fun(x, array) if array.role is role else x)
    return found


def analyse(
  step: str,
  workers: Workers,
  options: Options,
  named: Sequence[tuple[str, object]],
  form: Form,
  objects: Sequence[object],
  variables: Sequence[jax.Array],
) -> Call:
  """Decides about every array of a call of `step`.

  `named` are its arguments in order, each with `only_arrays`.
  """
  arrays: list[Array] = []
  states: dict[StateForm, list[int]] = {}
  ambiguous: set[int] = set()
  paths: dict[int, Keys] = {}  # of the NNX objects
  for name, value in named:
    own = _arrays_of(name, value, options, paths)
    if name in options.batches:
      _check_batch(name, value, own)
    elif own:
      # The step sees no axis of workers.
      shapes = [x.shape[x.role is Role.STACKED :] for x in own]
      starts = states.setdefault((jax.tree.structure(value), tuple(shapes)), [])
      starts.append(len(arrays))
      # Which of them a result continues is known by the order alone.
      if len(starts) > 1:
        for start in starts:
          ambiguous.update(range(start, start + len(own)))
    arrays += own
  said = modules.variables(objects)
  for ((number, *rest), role), x in zip(said, variables):
    arrays.append(_array((*paths[number], *rest), x, role))
  _check_not_accumulated(arrays)
  _check_stacked(workers, arrays)
  if workers.mesh is not None:
    for array in arrays:
      array.sharding = workers.sharding(array.keys, array.shape)
      if array.role is Role.BATCH:
        spec = P(*[None] * array.axis, workers.spmd_axis_name)
        array.sharding = NamedSharding(workers.mesh, spec)
  rows = _rows(step, workers, options, arrays)
  axis = next((x.axis for x in arrays if x.role is Role.BATCH), 0)
  copies = own_params.find([array.keys for array in arrays])
  return Call(form, arrays, rows, axis, states, frozenset(ambiguous), copies)


def _arrays_of(
  name: str,
  value: object,
  options: Options,
  paths: dict[int, Keys],
) -> list[Array]:
  """Returns the arrays of an argument; adds paths of NNX objects to `paths`."""
  is_batch = name in options.batches
  in_state = not is_batch and modules.holds_state(value)
  roles = iter(modules.roles_of(value))
  found = []
  for keys, x in leaves_of(value, _is_constant):
    keys = (name, *keys)
    if not isinstance(x, Constant):
      array = _array(keys, x, next(roles), is_batch)
      array.in_state = in_state
      if array.role is Role.BATCH:
        array.axis = _axis_of(options, name)
      found.append(array)
    elif isinstance(x.value, Numbered):
      paths[x.value.number] = keys
    else:
      _check_hashable(keys, x.value)
  return found


def _check_hashable(keys: Keys, value: object) -> None:
  """Raises for a value by which no program can be found again."""
  try:
    hash(value)
  except TypeError as error:
    raise TypeError(
      f'{dotted(keys)} must be hashable, since the step is compiled for each'
      f' value of what is not an array, got an {error}. Pass an array, or a'
      ' tuple in place of a list.'
    ) from error


def _array(
  keys: Keys,
  x: Any,
  said: Role | None,
  is_batch: bool = False,
) -> Array:
  """Analyses an array; `said` is from `modules.roles_of`."""
  struct = jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x))
  array = Array(keys, struct, Role.SHARED)
  array.role = _role(array, said, is_batch)
  return array


def place(
  workers: Workers,
  x: Any,
  a: Array,
) -> Any:
  """Puts an argument's array where it belongs, unless it is on the mesh."""
  if a.in_state and type(x) is int:
    # A count of 0 in a state gets the dtype of those that a step returns, or
    # the step would be compiled for both.
    x = np.asarray(x, a.type.dtype)
  target = a.sharding
  if target is None or isinstance(x, jax.core.Tracer):
    return x
  if is_on(workers.mesh, x) and (
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


def _role(
  x: Array,
  said: Role | None,
  is_batch: bool,
) -> Role:
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


def _check_batch(
  name: str,
  value: Any,
  arrays: Sequence[Array],
) -> None:
  """Raises for a batch without arrays to cut."""
  kind = value.type if isinstance(value, Constant) else type(value)
  is_container = issubclass(kind, Mapping | tuple | list)
  is_cut = any(array.role is Role.BATCH for array in arrays)
  if not is_cut and (arrays or not is_container):
    raise ValueError(
      f'{name} must hold arrays whose rows are cut over the workers, got'
      f' {kind.__name__} of {len(arrays)} numbers. Pass arrays:'
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
  step: str,
  workers: Workers,
  options: Options,
  arrays: Sequence[Array],
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
  # The batch of a separate program is its own.
  parts = workers.count if workers.stacked_gradients else 1
  if length % parts or not length:
    raise ValueError(
      f'{name} must have rows that divide among {workers}, got {length} rows.'
      ' Change the batch size, or drop the last rows of an epoch.'
    )
  return length // parts
