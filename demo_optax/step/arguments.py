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
    types = []
    for array in self.arrays:
      types.append(f'{array.name} {array.type.dtype}{list(array.shape)}')
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
    replaced = []
    for x, array in zip(xs, self.arrays):
      replaced.append(fun(x, array) if array.role is role else x)
    return replaced


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
  object_paths: dict[int, Keys] = {}  # of the NNX objects
  for name, value in named:
    start = len(arrays)
    roles = iter(modules.roles_of(value))
    for keys, leaf in leaves_of({name: value}, is_constant):
      if not isinstance(leaf, Constant):
        arrays.append(_array(workers, options, keys, leaf, next(roles)))
      elif leaf.type is Known:
        object_paths[leaf.value] = keys
      else:
        _check_hashable(keys, leaf.value)
    if name not in options.batches and len(arrays) > start:
      # As the step sees them, without the axis of workers.
      shapes = []
      for array in arrays[start:]:
        shapes.append(array.shape[array.role is Role.STACKED :])
      state = jax.tree.structure(value), tuple(shapes)
      states.setdefault(state, []).append(start)
  # Arrays of Flax objects follow, by the path of the object in the arguments.
  from_flax = modules.variables(objects)
  for ((number, *inner_keys), role), leaf in zip(from_flax, variables):
    keys = *object_paths[number], *inner_keys
    arrays.append(_array(workers, options, keys, leaf, role))
  _check_not_accumulated(arrays)
  _check_stacked(workers, arrays)
  batches = [array for array in arrays if array.role is Role.BATCH]
  _check_batches(options, named, batches)
  return Call(
    options,
    keywords,
    form,
    arrays,
    rows=_rows(workers, batches),
    axis=batches[0].axis if batches else 0,
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
  leaf: Any,
  said: Role | None,
) -> Array:
  """Analyses an array; `said` is what its variable's class says."""
  # Also for Python's numbers, whose dtype JAX chooses.
  name = keys[0]
  struct = jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf))
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
    spec = workers.spec(keys, struct.shape)
    if role is Role.BATCH:
      spec = P(*[None] * axis, workers.spmd_axis_name)
    sharding = workers.sharding(spec)
  return Array(keys, struct, role, axis, sharding)


def place(
  workers: Workers,
  value: Any,
  array: Array,
) -> Any:
  """Puts an argument's array where it belongs, unless it is on the mesh."""
  if type(value) is int and len(array.keys) > 1:
    # A count of 0 in a state gets the dtype of those that a step returns, or
    # the step would be compiled for both.
    value = np.asarray(value, array.type.dtype)
  if array.sharding is None or isinstance(value, jax.core.Tracer):
    return value
  if is_on(workers.mesh, value) and (
    array.role is not Role.STACKED
    or value.sharding.is_equivalent_to(array.sharding, value.ndim)
  ):
    return value
  return put(value, array.sharding)


def _check_stacked(
  workers: Workers,
  arrays: Sequence[Array],
) -> None:
  """Raises for a state that was made for more or fewer workers."""
  count = workers.num_here
  for array in arrays:
    if array.role is Role.STACKED and array.shape[:1] != (count,):
      raise ValueError(
        f'{array.name} must have an entry for each of the {count} workers here'
        f' along its first axis, got shape {array.shape} with {workers}. Make'
        ' the state with tx.init under the same workers, or regroup it by'
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
  batches: Sequence[Array],
) -> None:
  """Raises for a batch without arrays to cut, unless it is empty."""
  # One batch of several may be empty, such as an optional mask.
  without_arrays = []
  with_arrays = {array.keys[0] for array in batches}
  for name, value in named:
    has_leaves = jax.tree.leaves(value, is_leaf=is_constant)
    if name in options.batches - with_arrays and (has_leaves or not batches):
      without_arrays.append(name)
  if without_arrays:
    raise ValueError(
      'The batch of a step must hold arrays whose rows are cut over the'
      f' workers, got none in {", ".join(without_arrays)}. Pass arrays,'
      f' np.asarray({without_arrays[0]}), or give batch_argnames=() if the step'
      ' draws its batch by a random key.'
    )


def _rows(
  workers: Workers,
  batches: Sequence[Array],
) -> int | None:
  """Returns how many rows one worker has, from all arrays that are cut."""
  by_length = {}
  for array in batches:
    if not 0 <= array.axis < len(array.shape):
      raise ValueError(
        f'batch_axis must be an axis of every batch, got {array.axis} for'
        f' {array.name} of shape {array.shape}. Give one for each argument:'
        " batch_axis={'images': 1}."
      )
    by_length[array.shape[array.axis]] = array.name
  if not by_length:
    return None
  if len(by_length) > 1:
    lengths = [f'{name}: {length}' for length, name in by_length.items()]
    raise ValueError(
      f'The arrays of one batch must have the same number of rows, got'
      f' {", ".join(lengths)}. Name as batches only arguments of such arrays,'
      ' and give batch_axis if rows are not along the first axis.'
    )
  ((length, name),) = by_length.items()
  num_workers = workers.num_here
  if length % num_workers or not length:
    raise ValueError(
      f'{name} must have rows that divide among {workers}, got {length} rows.'
      ' Change the batch size, or drop the last rows of an epoch.'
    )
  return length // num_workers
