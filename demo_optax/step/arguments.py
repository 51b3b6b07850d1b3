"""Decides once for equal calls which role each argument's array has.

The caller names the batches. All else is shared by the workers, except what its
type says is one worker's own: momentum in an exchange's state, and random keys.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted, leaves_of
from demo_optax.numerics import prng
from demo_optax.step import modules, own_params
from demo_optax.step.roles import Role, role_of
from demo_optax.step.trees import (
  Constant,
  Form,
  Known,
  Shape,
  StateForm,
  is_constant,
)
from demo_optax.workers import Workers
from demo_optax.workers.workers import is_on, put

Value = TypeVar('Value')


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `data_parallel`, arguments by their names."""

  batches: frozenset[str]
  static: frozenset[str]
  donated: frozenset[str]
  axis: int | Mapping[str, int] | None  # of rows, by default the first one

  def axis_of(self, name: str) -> int:
    """Returns along which axis an argument has its rows."""
    if isinstance(self.axis, Mapping):
      return self.axis.get(name, 0)
    return self.axis or 0


@dataclasses.dataclass
class Array:
  """An array in a call.

  Attributes:
    keys: its path, from its argument's name.
    type: its shape and dtype, as all workers have it.
    role: see `Role`.
    axis: where its rows are, if it is a batch.
    sharding: where it belongs on a mesh.
  """

  keys: Keys
  type: jax.ShapeDtypeStruct
  role: Role
  axis: int
  sharding: NamedSharding | None

  @property
  def name(self) -> str:
    """The path in messages."""
    return dotted(self.keys)

  @property
  def shape(self) -> Shape:
    """The shape, as all workers have it."""
    return self.type.shape


@dataclasses.dataclass(frozen=True)
class Call:
  """An analysed call.

  Attributes:
    options: what the step was decorated with.
    keywords: the names of those arguments that are given by name, the last.
    form: the structure of all arguments.
    arrays: the arrays in them.
    rows: the length that one worker's batch has; None without a batch.
    axis: where rows are in results.
    states: for each form that shared arguments have, the numbers at which
      they start. A result with this form is the argument's next value.
    own_params: see `own_params.find`.
  """

  options: Options
  keywords: Sequence[str]
  form: Form
  arrays: list[Array]
  rows: int | None
  axis: int
  states: dict[StateForm, list[int]]
  own_params: dict[int, list[int]]

  @property
  def roles(self) -> list[Role]:
    """The role of each array."""
    return [array.role for array in self.arrays]

  @property
  def described(self) -> dict[str, str]:
    """The arguments, as processes compare them."""
    types = [f'{x.name} {x.type.dtype}{list(x.shape)}' for x in self.arrays]
    return {'arguments of the step': ', '.join(types)}

  def bind(
    self, arrays: Sequence[jax.Array]
  ) -> tuple[list[Any], dict[str, Any], list[object]]:
    """Returns the step's arguments with these arrays, and its NNX objects."""
    args, objects = self.form.merge(arrays, inner=True)
    num_positions = len(args) - len(self.keywords)
    kwargs = dict(zip(self.keywords, args[num_positions:]))
    return args[:num_positions], kwargs, objects

  def replace(
    self,
    role: Role,
    fun: Callable[[Value, Array], Value],
    xs: Sequence[Value],
  ) -> list[Value]:
    """Applies a function to the arrays that have a role."""
    found = []
    for x, array in zip(xs, self.arrays):
      found.append(fun(x, array) if array.role is role else x)
    return found


def name_at(signature: inspect.Signature, position: int) -> str | None:
  """Returns the name of the argument at a position, if a step has one there.

  Those of `*rest` are `rest[0]`, ...
  """
  for number, (name, parameter) in enumerate(signature.parameters.items()):
    if parameter.kind is parameter.VAR_POSITIONAL and position >= number:
      return f'{name}[{position - number}]'
    if position == number and parameter.kind < parameter.VAR_POSITIONAL:
      return name
  return None


def analyse(
  workers: Workers,
  options: Options,
  named: Sequence[tuple[str, object]],
  keywords: Sequence[str],
  form: Form,
  objects: Sequence[object],
  variables: Sequence[jax.Array],
) -> Call:
  """Decides about every array in a call.

  `named` are its arguments with their names, each with `only_arrays`.
  """
  arrays: list[Array] = []
  states: dict[StateForm, list[int]] = {}
  paths: dict[int, Keys] = {}  # of the NNX objects
  for name, value in named:
    start = len(arrays)
    roles = iter(modules.roles_of(value))
    for keys, x in leaves_of({name: value}, is_constant):
      if not isinstance(x, Constant):
        arrays.append(_array(workers, options, keys, x, next(roles)))
      elif x.type is Known:
        paths[x.value] = keys
      else:
        _check_hashable(keys, x.value)
    if name not in options.batches and len(arrays) > start:
      # As the step sees them, without the axis of workers.
      own = arrays[start:]
      shapes = [x.shape[x.role is Role.STACKED :] for x in own]
      state = jax.tree.structure(value), tuple(shapes)
      states.setdefault(state, []).append(start)
  # Arrays of Flax objects follow, by the path of the object in the arguments.
  said = modules.variables(objects)
  for ((number, *rest), role), x in zip(said, variables):
    keys = *paths[number], *rest
    arrays.append(_array(workers, options, keys, x, role))
  _check_not_accumulated(arrays)
  _check_stacked(workers, arrays)
  cut = [array for array in arrays if array.role is Role.BATCH]
  _check_batches(options, named, cut)
  return Call(
    options,
    keywords,
    form,
    arrays,
    rows=_rows(workers, cut),
    axis=cut[0].axis if cut else 0,
    states=states,
    own_params=own_params.find(arrays),
  )


def _check_hashable(
  keys: Keys,
  value: object,
) -> None:
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
  workers: Workers,
  options: Options,
  keys: Keys,
  x: Any,
  said: Role | None,
) -> Array:
  """Analyses an array; `said` is what its variable's class says."""
  # Also for Python's numbers, whose dtype JAX chooses.
  name = keys[0]
  struct = jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x))
  has_rows = name in options.batches and bool(struct.shape)
  role, axis = role_of(keys, struct, said, has_rows), options.axis_of(name)
  if role is Role.SHARED and len(keys) == 1 and prng.is_legacy_key(struct):
    raise ValueError(
      f'{name} must not be a legacy random key, got uint32[2], which all'
      ' workers would share. Pass a typed key, jax.random.key(seed) or'
      f' jax.random.wrap_key_data({name}), into which each worker folds its'
      ' number. Pass data of this shape in a tuple or dict.'
    )
  sharding = None
  if workers.mesh is not None:
    sharding = workers.sharding(keys, struct.shape)
    if role is Role.BATCH:
      spec = P(*[None] * axis, workers.spmd_axis_name)
      sharding = NamedSharding(workers.mesh, spec)
  return Array(keys, struct, role, axis, sharding)


def place(
  workers: Workers,
  x: Any,
  array: Array,
) -> Any:
  """Puts an argument's array where it belongs, unless it is on the mesh."""
  if type(x) is int and len(array.keys) > 1:
    # A count of 0 in a state gets the dtype of those that a step returns, or
    # the step would be compiled for both.
    x = np.asarray(x, array.type.dtype)
  target = array.sharding
  if target is None or isinstance(x, jax.core.Tracer):
    return x
  if is_on(workers.mesh, x) and (
    array.role is not Role.STACKED
    or x.sharding.is_equivalent_to(target, x.ndim)
  ):
    if not workers.is_explicit:
      return x
    # Where types have specs, P() and P(None) are two, and results of a step
    # have the longer one: it would be compiled for both.
    spec = x.sharding.spec
    full = P(*spec, *[None] * (x.ndim - len(spec)))
    target = NamedSharding(target.mesh, full)
  return put(x, target)


def _check_stacked(
  workers: Workers,
  arrays: Sequence[Array],
) -> None:
  """Raises for a state that was made for more or fewer workers."""
  count = workers.num_here
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
  """Raises for a state that optax.MultiSteps has made."""
  if any('acc_grads' in array.keys for array in arrays):
    raise ValueError(
      'The optimizer of a data_parallel step must not be in optax.MultiSteps,'
      ' got a state of it: it would exchange in every call and drop all results'
      ' but the last. Take the mean of the gradients of micro-batches in the'
      ' step, by jax.lax.scan or optax.microbatching, and update once.'
    )


def _check_batches(
  options: Options,
  named: Sequence[tuple[str, object]],
  cut: Sequence[Array],
) -> None:
  """Raises for a batch without arrays to cut, unless it is empty."""
  # One batch of several may be empty, such as an optional mask.
  wrong = []
  names_cut = {array.keys[0] for array in cut}
  for name, value in named:
    has_leaves = jax.tree.leaves(value, is_leaf=is_constant)
    if name in options.batches - names_cut and (has_leaves or not cut):
      wrong.append(name)
  if wrong:
    raise ValueError(
      'The batch of a step must hold arrays whose rows are cut over the'
      f' workers, got none in {", ".join(wrong)}. Pass arrays,'
      f' np.asarray({wrong[0]}), or give batch_argnames=() if the step draws'
      ' its batch by a random key.'
    )


def _rows(
  workers: Workers,
  cut: Sequence[Array],
) -> int | None:
  """Returns how many rows one worker has, from all arrays that are cut."""
  names = {}
  for array in cut:
    if not 0 <= array.axis < len(array.shape):
      raise ValueError(
        f'batch_axis must be an axis of every batch, got {array.axis} for'
        f' {array.name} of shape {array.shape}. Give one for each argument:'
        " batch_axis={'images': 1}."
      )
    names[array.shape[array.axis]] = array.name
  if not names:
    return None
  if len(names) > 1:
    some = ', '.join(f'{name}: {length}' for length, name in names.items())
    raise ValueError(
      f'The arrays of one batch must have the same number of rows, got'
      f' {some}. Name as batches only arguments of such arrays, and give'
      ' batch_axis if rows are not along the first axis.'
    )
  ((length, name),) = names.items()
  parts = workers.num_here
  if length % parts or not length:
    raise ValueError(
      f'{name} must have rows that divide among {workers}, got {length} rows.'
      ' Change the batch size, or drop the last rows of an epoch.'
    )
  return length // parts
