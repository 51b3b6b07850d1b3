"""Makes one value for all workers of each array that a step returns."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._paths import Keys, dotted, is_stacked, leaves_of
from demo_optax._tree import is_inexact
from demo_optax.numerics import prng
from demo_optax.step import modules, own_params
from demo_optax.step.arguments import Call, Form, StateForm, only_arrays
from demo_optax.step.roles import Role
from demo_optax.workers import Workers, collectives, inside
from demo_optax.workers.variation import Origin

Tree = TypeVar('Tree')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OutBatch(Generic[Tree]):
  """Rows of a batch among the results of a step."""

  value: Tree


def out_batch(tree: Tree) -> OutBatch[Tree]:
  """Marks arrays that a step returns as rows of its batch.

  For predictions and losses per row: `data_parallel` joins the rows of all
  workers, along the axis of the first batch. They are `[rows, ...]` in the
  step, and `[all rows, ...]` in what it returns.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> @demo_optax.data_parallel(workers, batch_argnames='x')
    ... def predict(x):
    ...   return demo_optax.out_batch(2 * x)
    >>> print(predict(jnp.arange(4.0)))
    [0. 2. 4. 6.]
  """
  inside.check_in_step('out_batch')
  return OutBatch(_without_marks(tree)[0])


@dataclasses.dataclass
class Result:
  """An array that a step returns or changes.

  Attributes:
    name: for messages.
    keys: its path.
    role: see `Role`.
    at: number of the argument's array whose next value it is, if known.
    is_kept: whether it is a key that the step has not changed.
  """

  name: str
  keys: Keys
  role: Role
  at: int | None = None
  is_kept: bool = False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
  """What is known of the results of a step that has been traced.

  As a static part of the results it leaves `jax.jit` in their structure.
  """

  results: list[Result]
  form: Form

  @property
  def nexts(self) -> list[int | None]:
    """For each array the number of the shared argument whose next value it is.

    Momentum is not shared.
    """
    return [None if x.role is Role.STACKED else x.at for x in self.results]


def collect(
  call: Call,
  returned: object,
  objects: list[object],
  own: Sequence[jax.Array],
) -> tuple[list[jax.Array], Returned]:
  """Collects the results of a step, then the variables of `objects` after it.

  `own` are the arrays that the step had. Returns arrays, and about them.
  """
  after, structure = modules.split(objects)
  known = [*objects]
  # nnx.state(model) is what the step has changed in place.
  returned = only_arrays(returned, known, after)
  if len(known) > len(objects):
    raise ValueError(
      'A step must return Flax objects that are among its arguments, got a new'
      f' {type(known[-1]).__name__}. Make Flax objects outside of the step and'
      ' pass them to it, or return nnx.state(...) of it.'
    )
  returned, is_rows = _without_marks(returned)
  nexts = _next_values(call, returned)
  said = modules.roles_of(returned)
  unchanged = {id(x): number for number, x in enumerate(own)}
  values: list[jax.Array] = []
  results: list[Result] = []

  def add(
    result: Result,
    x: jax.Array,
    role: Role | None,
  ) -> None:
    number = unchanged.get(id(x))
    if result.role is not Role.BATCH:
      result.role = _role(call, result, x, role, number is not None)
    if number is not None and result.role is Role.KEY:
      result.at, result.is_kept = number, True
    results.append(result)
    values.append(x)

  flat = leaves_of({'result': returned})
  for place, (keys, x) in enumerate(flat):
    role = Role.BATCH if is_rows[place] else Role.SHARED
    result = Result(f'the {dotted(keys)}', keys, role, nexts[place])
    add(result, x, said[place])
  start = len(call.arrays) - len(after)  # where variables are
  for number, x in enumerate(after, start):
    array = call.arrays[number]
    name = f'the variable {array.name}'
    add(Result(name, array.keys, Role.SHARED, number), x, array.role)
  # The model that is returned is the one that all workers share.
  copies = own_params.find([result.keys for result in results])
  for number, (shared, *_) in copies.items():
    results[number].role = Role.SHARED
    values[number] = values[shared].astype(values[number].dtype)
  form = Form(jax.tree.structure(returned), structure)
  return [*map(jnp.asarray, values)], Returned(results, form)


def settle(
  call: Call,
  returned: Returned,
  values: Sequence[jax.Array],
  origins: Sequence[Origin],
  before: Sequence[jax.Array],
  view: inside.StepView,
  is_spread: bool,
) -> tuple[list[Any], list[Any]]:
  """Makes one value for all workers of what each of them returns.

  `before` are the arguments as all workers have them. `is_spread` says that
  mapped arrays are spread over the devices of a mesh. Returns two lists with an
  entry for each result: arrays of the worker's own, rows along the first axis;
  and arrays that are equal on all workers. One of both is None.
  """
  own: list[Any] = []
  equal: list[Any] = []
  for result, x, origin in zip(returned.results, values, origins):
    if result.role is Role.BATCH:
      _check_rows(result, x, call)
      x = jnp.moveaxis(x, call.axis, 0)
    if result.role.is_own:
      own.append(x)
      equal.append(None)
      continue
    old = None if result.at is None else before[result.at]
    own.append(None)
    equal.append(_combine(result, x, old, origin, view.axis, is_spread))
  return own, equal


def hold(
  workers: Workers,
  result: Result,
  x: jax.Array,
) -> jax.Array:
  """Returns a result where it belongs."""
  types_say_it = workers.mesh is None or workers.is_explicit
  is_state = result.at is not None or result.role is Role.STACKED
  if types_say_it or (x.ndim and not is_state):
    return x
  sharding = workers.sharding(result.keys, x.shape)
  return jax.lax.with_sharding_constraint(x, sharding)


def _without_marks(returned: Tree) -> tuple[Tree, list[bool]]:
  """Returns results without `OutBatch`, and which of their leaves are rows."""
  is_rows: list[bool] = []

  def is_mark(x: object) -> bool:
    return isinstance(x, OutBatch)

  def plain(x: object) -> object:
    is_rows.extend([is_mark(x)] * len(jax.tree.leaves(x)))
    return x.value if isinstance(x, OutBatch) else x

  return jax.tree.map(plain, returned, is_leaf=is_mark), is_rows


def _role(
  call: Call,
  result: Result,
  x: jax.Array,
  said: Role | None,
  is_unchanged: bool,
) -> Role:
  """Returns the role of a result; `said` is what its variable's class says."""
  if is_stacked(result.keys):
    return Role.STACKED
  if said in (None, Role.KEY) and prng.is_key_array(x):
    return Role.KEY
  is_unknown = result.at is None or result.at in call.ambiguous
  if said is Role.ADDED and (is_unknown or is_unchanged):
    return Role.SHARED
  if said is not None:
    return said
  if result.at is None and is_inexact(x) and not np.shape(x):
    return Role.MEAN
  return Role.SHARED


def _combine(
  result: Result,
  x: jax.Array,
  old: Any,
  origin: Origin,
  axis: collectives.Axis,
  is_spread: bool,
) -> jax.Array:
  """Returns one value for all workers."""
  if result.is_kept:  # the next step folds a key that is the same again
    return old
  if result.role is Role.ADDED:
    # Each worker has added to the same total.
    if Origin.TOTAL in origin:
      return old + collectives.total(x - old, axis)
    if origin.differs:
      raise ValueError(
        'A metric that a step adds to must not be reset in the step, got'
        f' {result.name} that was. Reset it between steps.'
      )
  if not origin.differs:
    return x
  if result.role is Role.KEY:  # all go on from one key, and fold it again
    return collectives.first(x, axis)
  if result.role is Role.STATISTICS and is_inexact(x):
    # Statistics of a worker that saw a NaN would stay NaN for ever.
    return collectives.mean_finite(x, axis, old)
  if result.role is Role.MEAN:
    # XLA would send slices of what is spread one by one, to add them in order.
    return collectives.mean_finite(x, axis, ordered=not is_spread)
  name = f'{result.name}, {x.dtype}{list(x.shape)},'
  raise ValueError(inside.differs_text(name, inside.RETURNED))


def _check_rows(
  result: Result,
  x: jax.Array,
  call: Call,
) -> None:
  """Raises for marked rows that are not those of the worker's batch."""
  length = x.shape[call.axis : call.axis + 1]  # () if it has no such axis
  if length != (call.rows,):
    raise ValueError(
      f'out_batch must be given arrays with the {call.rows} rows of a worker'
      f' along axis {call.axis}, got {result.name} of shape {x.shape}. Return'
      ' demo_optax.over_workers(x, reduction) for anything else.'
    )


def _next_values(call: Call, returned: object) -> list[int | None]:
  """Returns for each array the number of the one it is the next value of.

  None for what is not part of the next value of a shared argument. Arguments of
  one form are returned in their order.
  """
  seen: collections.Counter[object] = collections.Counter()
  found: list[int | None] = []

  def form_of(x: object) -> StateForm:
    leaves, treedef = jax.tree.flatten(x)
    return treedef, tuple(map(np.shape, leaves))

  def is_whole(x: object) -> bool:  # not the fields of a NamedTuple
    return type(x) not in (tuple, list, dict) or form_of(x) in call.states

  for part in jax.tree.leaves(returned, is_leaf=is_whole):
    form = form_of(part)
    count = len(form[1])
    starts = call.states.get(form, [])
    # Any loss has the form of a single scalar.
    if not starts or form[1] == ((),):
      found += [None] * count
      continue
    start = starts[min(seen[form], len(starts) - 1)]
    seen[form] += 1
    found += range(start, start + count)
  return found
