"""Makes one value for all workers of each array that a step returns."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._paths import Keys, dotted, is_stacked, leaves_of
from demo_optax.numerics import prng
from demo_optax.step import modules, own_params
from demo_optax.step.arguments import Call, Fixed, Form, Shapes, take_apart
from demo_optax.step.roles import Role
from demo_optax.workers import Workers, collectives, inside
from demo_optax.workers.variation import Origin


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OutBatch:
  """Rows of a batch among the results of a step."""

  value: Any


def out_batch(tree: Any) -> Any:
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
  """The static part of a result; it leaves `jax.jit` in the structure."""

  form: Form
  # For each array, the number of the shared argument whose next value it is.
  nexts: list[int | None]


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
class Collected:
  """What is known of the results of a step, when it has been traced."""

  results: list[Result]
  returned: Returned


def collect(
  call: Call, returned: Any, objects: list[Any], own: Sequence[Any]
) -> tuple[list[Any], Collected]:
  """Collects the results of a step, then the variables of `objects` after it.

  `own` are the arrays that the step had. Returns arrays, and about them.
  """
  after, structure = modules.split(objects)
  returned, is_rows = _without_marks(returned)
  treedef = jax.tree.structure(returned, modules.is_object)
  flat = leaves_of({'result': returned}, modules.is_object)
  known, leaves = [*objects], [x for _, x in flat]
  fixed, _ = take_apart(leaves, modules.traces_numbers(returned), known)
  if len(known) > len(objects):
    raise ValueError(
      'A step must return Flax objects that are among its arguments, got a new'
      f' {type(known[-1]).__name__}. Make Flax objects outside of the step and'
      ' pass them to it, or return nnx.state(...) of it.'
    )
  # nnx.state(model) is what the step has changed in place.
  numbers = {id(x): number for number, x in enumerate(after)}
  fixed = tuple(
    Fixed('variable', numbers[id(x)]) if not f and id(x) in numbers else f
    for x, f in zip(leaves, fixed)
  )
  shapes = tuple(None if f else np.shape(x) for x, f in zip(leaves, fixed))
  previous = _previous(call, treedef, shapes, [])
  names = [f'the {dotted(keys)}' for keys, _ in flat]
  said = modules.roles_of(returned)
  found = [
    leaf
    for leaf, f in zip(zip(names, flat, previous, said, is_rows), fixed)
    if f is None
  ]
  start = call.form.fixed.count(None)  # where variables are
  found += [
    (f'the variable {a.name}', (a.keys, x), at, a.role, False)
    for at, (a, x) in enumerate(zip(call.arrays[start:], after), start)
  ]
  unchanged = {id(x): at for at, x in enumerate(own)}
  doubtful = _in_several(call)
  values: list[Any] = []
  results: list[Result] = []
  for name, (keys, x), at, role, rows in found:
    result = Result(name, keys, Role.BATCH, at)
    is_same = id(x) in unchanged
    if not rows:
      result.role = _role(result, x, role, is_same or at in doubtful)
    if is_same and result.role is Role.KEY:
      result.at, result.is_kept = unchanged[id(x)], True
    results.append(result)
    values.append(x)
  copies = own_params.find([r.keys for r in results])
  for number, (shared, *_) in copies.items():
    results[number].role = Role.SHARED
    values[number] = values[shared].astype(values[number].dtype)
  nexts = [None if r.role is Role.STACKED else r.at for r in results]
  collected = Collected(
    results, Returned(Form(treedef, fixed, structure), nexts)
  )
  return [jnp.asarray(x) for x in values], collected


def settle(
  call: Call,
  collected: Collected,
  values: Sequence[jax.Array],
  origins: Sequence[Origin],
  before: Sequence[Any],
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
  for result, x, origin in zip(collected.results, values, origins):
    is_apart = result.role in (Role.STACKED, Role.BATCH)
    if result.role is Role.BATCH:
      _check_rows(result, x, call)
      x = jnp.moveaxis(x, call.axis, 0)
    if not is_apart:
      old = None if result.at is None else before[result.at]
      x = _combine(result, x, old, origin, view.axis, is_spread)
    own.append(x if is_apart else None)
    equal.append(None if is_apart else x)
  return own, equal


def hold(workers: Workers, result: Result, x: jax.Array) -> jax.Array:
  """Returns a result where it belongs."""
  types_say_it = workers.mesh is None or workers.is_explicit
  is_state = result.at is not None or result.role is Role.STACKED
  if types_say_it or (x.ndim and not is_state):
    return x
  sharding = workers.sharding(result.keys, x.shape)
  return jax.lax.with_sharding_constraint(x, sharding)


def _without_marks(returned: Any) -> tuple[Any, list[bool]]:
  """Returns results without `OutBatch`, and which of their leaves are rows."""

  def is_node(x: Any) -> bool:
    return isinstance(x, OutBatch) or modules.is_object(x)

  def plain(x: Any) -> Any:
    return x.value if isinstance(x, OutBatch) else x

  parts = jax.tree.leaves(returned, is_leaf=is_node)
  is_rows: list[bool] = []
  for part in parts:
    count = len(jax.tree.leaves(plain(part), is_leaf=modules.is_object))
    is_rows += [isinstance(part, OutBatch)] * count
  return jax.tree.map(plain, returned, is_leaf=is_node), is_rows


def _role(
  result: Result, x: Any, said: Role | None, adds_nothing: bool
) -> Role:
  """Returns the role of a result; `said` is what its variable's class says."""
  if is_stacked(result.keys):
    return Role.STACKED
  if said in (None, Role.KEY) and prng.is_key_array(x):
    return Role.KEY
  if said is Role.ADDED and (result.at is None or adds_nothing):
    return Role.SHARED
  if said is not None:
    return said
  is_real = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  if result.at is None and is_real and not np.shape(x):
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
    if Origin.TOTAL in origin:
      return old + collectives.total(x - old, axis)
    if origin.differs:
      raise ValueError(
        'A metric that a step adds to must not be reset in the step, got'
        f' {result.name} that was. Reset it between steps.'
      )
  if not origin.differs:
    return x
  if result.role is Role.KEY:
    return collectives.first(x, axis)
  # Integers have no mean.
  is_real = jnp.issubdtype(x.dtype, jnp.inexact)
  if result.role is Role.STATISTICS and is_real:
    # Statistics of a worker that saw a NaN would stay NaN for ever.
    return collectives.mean_finite(x, axis, old)
  if result.role is Role.MEAN:
    # XLA would send slices of what is spread one by one, to add them in order.
    return collectives.mean_finite(x, axis, ordered=not is_spread)
  name = f'The value of {result.name}, {x.dtype}{list(x.shape)},'
  raise ValueError(inside.differs_text(name, inside.RETURNED))


def _check_rows(result: Result, x: jax.Array, call: Call) -> None:
  """Raises for marked rows that are not those of the worker's batch."""
  if call.rows is None or x.shape[call.axis : call.axis + 1] != (call.rows,):
    raise ValueError(
      f'out_batch must be given arrays with the {call.rows} rows of a worker'
      f' along axis {call.axis}, got {result.name} of shape {x.shape}. Return'
      ' demo_optax.over_workers(x, reduction) for anything else.'
    )


def _in_several(call: Call) -> set[int]:
  """Returns the arrays of arguments that have the structure of another one."""
  found: set[int] = set()
  for (_, shapes), firsts in call.states.items():
    count = len(shapes) - shapes.count(None)
    if len(firsts) > 1:
      found.update(n for first in firsts for n in range(first, first + count))
  return found


def _previous(
  call: Call, treedef: Any, shapes: Shapes, seen: list[Any]
) -> list[int | None]:
  """Returns for each leaf the number of the array it is the next value of.

  None for what is not part of the next value of a shared argument. Arguments of
  one structure are returned in their order; `seen` has the structures so far.
  """
  structure = treedef, shapes
  for known, firsts in call.states.items():
    if known == structure:
      first = firsts[min(seen.count(structure), len(firsts) - 1)]
      seen.append(structure)
      after = itertools.count(first)
      return [None if shape is None else next(after) for shape in shapes]
  kind, _ = treedef.node_data() or (None, None)
  if kind not in (tuple, list, dict):  # not the fields of a NamedTuple
    return [None] * len(shapes)
  found: list[int | None] = []
  for part in treedef.children():
    own = shapes[len(found) : len(found) + part.num_leaves]
    found += _previous(call, part, own, seen)
  return found
