"""Makes one value for all workers from each array that a step returns."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._paths import Keys, dotted, leaves_of
from demo_optax._tree import is_inexact
from demo_optax.step import modules, own_params
from demo_optax.step.arguments import Call
from demo_optax.step.roles import Role, role_of
from demo_optax.step.trees import Form, form_of, only_arrays
from demo_optax.workers import Workers, collectives, inside
from demo_optax.workers.variation import Origin


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
  """An array whose rows are the batch's, among a step's results."""

  value: Any


def _is_rows(x: object) -> bool:
  return isinstance(x, Rows)


def out_batch(tree: Any) -> Any:
  """Marks arrays that a step returns for the rows in its batch.

  For predictions and losses per row: `data_parallel` joins all workers'
  rows, along the first batch's axis. They are `[rows, ...]` in the
  step, and `[all rows, ...]` in what it returns.

  Args:
    tree: arrays with a row for each row in the worker's batch.

  Raises:
    ValueError: outside a step, or for arrays with another number of rows.

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
  return jax.tree.map(Rows, tree)


@dataclasses.dataclass
class Result:
  """An array that a step returns or changes.

  Attributes:
    keys: its path, from `result` or from an argument's name.
    role: see `Role`.
    continues: the number of the argument's array whose next value it is.
  """

  keys: Keys
  role: Role
  continues: int | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
  """What is known about a step's results, once it has been traced.

  It is static: `jax.jit` returns it in the structure.
  """

  results: list[Result]
  form: Form

  @property
  def roles(self) -> list[Role]:
    """The role of each array."""
    return [result.role for result in self.results]

  @property
  def nexts(self) -> list[int | None]:
    """For each array the number of the shared argument that it continues.

    Momentum is not shared.
    """
    nexts = []
    for result in self.results:
      is_shared = result.role is not Role.STACKED
      nexts.append(result.continues if is_shared else None)
    return nexts


def collect(
  call: Call,
  returned: object,
  objects: Sequence[object],
) -> tuple[list[jax.Array], Returned]:
  """Collects a step's results, then the variables in `objects` after it.

  Returns arrays, and what is known about them.
  """
  variables, structure = modules.split(objects)
  # nnx.state(model) is what the step has changed in place.
  known = [*objects, *variables]
  returned = only_arrays(returned, known)
  if len(known) > len(objects) + len(variables):
    raise ValueError(
      'A step must return Flax objects that are among its arguments, got a new'
      f' {type(known[-1]).__name__}. Make Flax objects outside of the step and'
      ' pass them to it, or return nnx.state(...) of it.'
    )
  marked = leaves_of({'result': returned}, _is_rows)
  returned = jax.tree.map(_without_mark, returned, is_leaf=_is_rows)
  values, treedef = jax.tree.flatten(returned)
  # In the same order: each array, the argument it continues, what Flax says.
  nexts, from_flax = _next_values(call, returned), modules.roles_of(returned)
  results = []
  for (keys, leaf), continues, said in zip(marked, nexts, from_flax):
    role = _role(keys, leaf, said, continues)
    results.append(Result(keys, role, continues))
  # Variables are the last among the arguments, too.
  values += variables
  start = len(call.arrays) - len(variables)
  for number, array in enumerate(call.arrays[start:], start):
    results.append(Result(array.keys, array.role, number))
  # The model that is returned is the one that all workers share.
  for number, copies in own_params.find(results).items():
    shared = values[copies[0]]
    results[number].role = Role.SHARED
    values[number] = shared.astype(values[number].dtype)
  # Python's numbers become arrays, as from jax.jit.
  arrays = [*map(jnp.asarray, values)]
  return arrays, Returned(results, Form(treedef, structure))


def settle(
  call: Call,
  result: Result,
  value: jax.Array,
  former: Any,
  origin: Origin,
  axis: collectives.Axis,
) -> jax.Array:
  """Makes a result from what each worker returns.

  Rows have their axis first; what is the worker's own stays as it is. All else
  is made equal on all workers. `former` is the argument that it continues.
  """
  # Whether or not it differs.
  match result.role:
    case Role.STACKED:
      return value
    case Role.BATCH:
      _check_rows(result, value, call)
      return jnp.moveaxis(value, call.axis, 0)
    case Role.ADDED if Origin.TOTAL in origin:
      # Each worker has added to the same total.
      return former + collectives.total(value - former, axis)
    case Role.ADDED if origin.differs:
      raise ValueError(
        'A metric that a step adds to must not be reset in the step, got'
        f' {dotted(result.keys)} that was. Reset it between steps.'
      )
  if not origin.differs:
    return value
  # What differs needs a way to one value, or it is a mistake.
  match result.role:
    case Role.KEY:  # all go on from one key, and fold it again
      return collectives.first(value, axis)
    case Role.STATISTICS if is_inexact(value):
      # Statistics of a worker that saw a NaN would stay NaN for ever.
      return collectives.mean_finite(value, axis, former)
    case Role.MEAN:
      return collectives.mean_finite(value, axis)
  name = f'The {dotted(result.keys)}, {value.dtype}{list(value.shape)},'
  raise ValueError(inside.differs_text(name, inside.RETURNED))


def _check_rows(
  result: Result,
  value: jax.Array,
  call: Call,
) -> None:
  """Raises for marked rows that the worker's batch does not have."""
  length = value.shape[call.axis : call.axis + 1]  # () if it has no such axis
  if length != (call.rows,):
    raise ValueError(
      f'out_batch must be given arrays with the {call.rows} rows of a worker'
      f' along axis {call.axis}, got {dotted(result.keys)} of shape'
      f' {value.shape}. Return demo_optax.over_workers(x, reduction) for'
      ' anything else.'
    )


def hold(
  workers: Workers,
  result: Result,
  value: jax.Array,
) -> jax.Array:
  """Returns a result where it belongs."""
  # Without types XLA would choose, and the next call compile again.
  types_say_it = workers.mesh is None or workers.is_explicit
  is_state = result.continues is not None or result.role is Role.STACKED
  if types_say_it or (value.ndim and not is_state):
    return value
  sharding = workers.sharding(workers.spec(result.keys, value.shape))
  return jax.lax.with_sharding_constraint(value, sharding)


def _without_mark(x: Any) -> Any:
  return x.value if isinstance(x, Rows) else x


def _role(
  keys: Keys,
  value: Any,
  said: Role | None,
  continues: int | None,
) -> Role:
  """Returns a result's role; `said` is what its variable's class says."""
  role = role_of(keys, value, said, isinstance(value, Rows))
  if continues is not None or role not in (Role.SHARED, Role.ADDED):
    return role
  # No argument's next value: a loss, or what must be equal.
  is_loss = said is None and is_inexact(value) and not np.shape(value)
  return Role.MEAN if is_loss else Role.SHARED


def _next_values(
  call: Call,
  returned: object,
) -> list[int | None]:
  """Returns for each array the number of the argument that it continues.

  None for what is no part in a shared argument's next value. Arguments with one
  form are returned in their order.
  """
  num_seen: collections.Counter[object] = collections.Counter()
  nexts: list[int | None] = []

  def is_whole(x: object) -> bool:  # not the fields of a NamedTuple
    return type(x) not in (tuple, list, dict) or form_of(x) in call.states

  for part in jax.tree.leaves(returned, is_leaf=is_whole):
    form = form_of(part)
    shapes, starts = form[1], call.states.get(form, [])
    is_loss = shapes == ((),)  # any has the form of a single scalar
    if not starts or is_loss:
      nexts += [None] * len(shapes)
      continue
    start = starts[min(num_seen[form], len(starts) - 1)]
    num_seen[form] += 1
    for number in range(start, start + len(shapes)):
      # The order does not say for certain to which total a metric adds.
      is_sure = len(starts) == 1 or call.arrays[number].role is not Role.ADDED
      nexts.append(number if is_sure else None)
  return nexts
