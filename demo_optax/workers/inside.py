"""Operations across workers, called inside a `data_parallel` step.

A step is traced once, for one worker (`trace`). Where each worker has its own
device, or is a separate program, exchanges in the step communicate by
collectives. Else the step is run under `jax.vmap`, and an
exchange is a rule that receives all workers' arrays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend import core

from demo_optax import _tree
from demo_optax._paths import (
  Keys,
  dotted,
  is_stacked,
  leaves_of,
  map_by_path,
)
from demo_optax.numerics import prng
from demo_optax.workers import Workers, collectives
from demo_optax.workers.variation import Origin, traced_step, watch

# The axis that `data_parallel` maps a step over. No other has this name.
WORKER_AXIS = 'demo_optax_workers'

Tree = TypeVar('Tree')


def trace(
  workers: Workers,
  step: Callable[..., object],
  arrays: Sequence[jax.Array],
) -> tuple[core.ClosedJaxpr, Any]:
  """Traces one worker's step; returns its program, and results as shapes.

  `workers` are those that its operations see, without a worker axis.
  """
  previous = traced_step.set(workers)
  try:
    return jax.make_jaxpr(step, return_shape=True)(*arrays)
  finally:
    traced_step.reset(previous)


def is_in_step() -> bool:
  """Returns whether the caller is traced in a `data_parallel` step."""
  return traced_step.get() is not None


def check_in_step(what: str) -> Workers:
  """Returns the workers that the step sees; raises outside a step."""
  workers = traced_step.get()
  if workers is None:
    raise ValueError(
      f'{what} must be called in a demo_optax.data_parallel step, got a call'
      ' outside of one. Write the step for one worker and decorate it with'
      ' @demo_optax.data_parallel(workers, batch_argnames=...), instead of'
      ' jax.jit or nnx.jit.'
    )
  return workers


# Checks -----------------------------------------------------------------------


def _watch_arrays(
  tree: Tree,
  check: Callable[[list[tuple[Keys, Origin]]], None],
) -> Tree:
  """Returns `tree`; leaves a check where its arrays come from."""
  leaves = dict(leaves_of(tree))
  arrays = {keys: leaf for keys, leaf in leaves.items() if _is_array(leaf)}
  # Not the arrays: what a program closes over must not hold tracers.
  names = [*arrays]

  def check_arrays(origins: Sequence[Origin]) -> None:
    check([*zip(names, origins)])

  watched = watch([*arrays.values()], check_arrays)
  leaves.update(zip(names, watched))
  return jax.tree.structure(tree).unflatten(leaves.values())


def _is_array(x: Any) -> bool:
  """Returns whether a leaf is an array which operations take."""
  # Numbers that are known when a step is traced make a smaller program.
  # Gradients of integers are float0, which no operation takes.
  is_array = isinstance(x, jax.Array | np.ndarray)
  return is_array and x.dtype != jax.dtypes.float0


def check_own_gradients(gradients: Tree) -> Tree:
  """Returns `gradients`; raises if all are the same on all workers.

  A single gradient that is the same belongs to an unused parameter.
  """
  num_workers = check_in_step('An update of gradients').count

  def check(found: list[tuple[Keys, Origin]]) -> None:
    is_own = any(Origin.DATA in origin for _, origin in found)
    if is_own or not found or num_workers == 1:
      return
    raise ValueError(
      'The gradients that reach the exchange must be those of one worker, got'
      ' the same on all workers. Either the loss does not depend on the batch'
      ' that data_parallel has cut (it closes over another array, or over a'
      ' constant random key), or it does not depend on any of these parameters'
      ' (freeze them, optax.set_to_zero), or gradients were averaged. Use the'
      " step's own arguments in the loss, and remove what averages gradients,"
      ' which the exchange replaces.'
    )

  return _watch_arrays(gradients, check)


def equal(tree: Tree, message: str) -> Tree:
  """Returns `tree`; raises `message` if an array differs between workers.

  `{}` in the message is the leaf's name.
  """

  def check(found: list[tuple[Keys, Origin]]) -> None:
    for keys, origin in found:
      if origin.differs:
        raise ValueError(message.replace('{}', dotted(keys)))

  return _watch_arrays(tree, check)


def _check_shared(found: list[tuple[Keys, Origin]]) -> None:
  """Raises for momentum that workers share, or for what else differs."""
  for (kind, *rest), origin in found:
    keys = tuple(rest)
    if origin.differs and not is_stacked(keys):
      name = f'The {kind} {dotted(keys)}'
      raise ValueError(differs_text(name, BEFORE_EXCHANGE))
    if is_stacked(keys) and not origin.differs:
      raise ValueError(
        'The momentum that reaches the exchange must be that of one worker, got'
        ' one that all workers share: the step closes over the optimizer state,'
        ' or replaces it. Make the state an argument of the step (or a part of'
        ' one, as in an nnx.Optimizer or a TrainState).'
      )


# What makes values differ that reach an exchange, and what to do.
BEFORE_EXCHANGE = (
  'a step that is skipped: decide from the update, or from all workers,'
  ' demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is not'
  ' needed, since the exchange leaves out workers with gradients that are not'
  ' finite',
  'a number of one worker, such as its loss or a norm: give'
  ' value=demo_optax.over_workers(loss) to reduce_on_plateau',
  'a transformation with a state before the exchange: put it into'
  ' demo_optax.per_worker',
  'a wrapper that also reads gradients, such as optax.contrib.mechanize: place'
  ' it after the exchange, optax.chain(demo_optax.scale_by_demo(...),'
  ' wrapper(...))',
)

# The same of values that a step returns.
RETURNED = (
  'rows of a batch: return demo_optax.out_batch(x) to join them',
  'a count or an array of one worker: return'
  ' demo_optax.over_workers(x, jnp.sum), or another reduction',
  'a gradient that is not exchanged: call update in the step, not outside of'
  ' it, and average what the optimizer leaves out'
  ' (demo_optax.average_gradients), or set it to zero',
  'statistics of batches: return demo_optax.over_workers(statistics)',
  'a metric: pass an nnx.metrics.Average, which is added up; merge those of clu'
  ' with demo_optax.over_workers(own, jnp.sum); or update it outside of the'
  ' step, from what the step returns',
  *BEFORE_EXCHANGE,
)


def differs_text(
  name: str,
  causes: Sequence[str],
) -> str:
  """Returns the message for a value that must not differ, but does."""
  start = (
    f'{name} must be the same on all workers, got one that differs between'
    " workers: it depends on one worker's gradient, loss or batch. Usual"
    ' causes:'
  )
  return '\n  - '.join([start, *causes])


# The exchange -----------------------------------------------------------------

# Returns updates and the new state, from updates, state, parameters,
# hyperparameters, and the `workers` by which these are stacked, or of one.
StackedUpdate = Callable[..., tuple[chex.ArrayTree, Any]]


def check_arguments(
  workers: Workers,
  updates: chex.ArrayTree,
  state: chex.ArrayTree,
  params: chex.ArrayTree | None,
  hyperparams: chex.ArrayTree,
) -> tuple[Any, Any, Any, Any]:
  """Leaves checks of an exchange's arguments in a step; returns these.

  Parameters and hyperparameters must be equal on all workers.
  """
  num_workers = check_in_step('An exchange').count
  if workers.kind == 'on_axis' or workers.count != num_workers:
    raise ValueError(
      'workers must be those of data_parallel, which runs the step for'
      f' {num_workers} workers, got {workers} in the transformation. Give'
      ' both the same workers.'
    )
  updates = jax.tree.map(jnp.asarray, check_own_gradients(updates))
  # By the words in errors.
  shared = {
    'optimizer state': state,
    'parameter': params,
    'hyperparameter': hyperparams,
  }
  checked = _watch_arrays(shared, _check_shared)
  return updates, *(checked[name] for name in shared)


def for_workers(
  update: StackedUpdate,
  workers: Workers,
) -> Callable[..., tuple[Any, Any]]:
  """Returns `update` for the workers that are seen here.

  In a mapped step it takes one worker's arguments, and returns updates that are
  equal on all workers.
  """
  if workers.relay is not None:
    check_in_step(f'The update for {workers}')
  # Outside a step, or on a device that is a worker, they communicate directly.
  seen = traced_step.get() or workers
  if seen.axis_name == WORKER_AXIS:
    return functools.partial(_call_stacked, update, workers)
  return functools.partial(update, workers=seen)


def _call_stacked(
  update: StackedUpdate,
  workers: Workers,
  *given: Any,
) -> tuple[Any, Any]:
  """Calls an update for all workers from the mapped step for one."""
  treedef = jax.tree.structure(given)
  arrays: dict[int, jax.Array] = {}
  # By leaf. Some hyperparameters are numbers, which the rule closes over: it
  # must not hold tracers.
  constants: list[Any] = []
  is_own: list[bool] = []
  # By leaf of the updates and the state, which come back: they are given first.
  outputs: list[bool] = []
  for number, (keys, leaf) in enumerate(leaves_of(given)):
    argument, has_axis = keys[0], is_stacked(keys)
    is_own.append(has_axis or argument == 0)
    if argument < 2:
      outputs.append(has_axis)
    if _is_array(leaf):
      arrays[number] = leaf
      leaf = None
    constants.append(leaf)

  def rule(
    size: int,
    batched: Any,
    index: Any,
    arrays: dict[int, jax.Array],
  ) -> tuple[list[jax.Array], list[bool]]:
    del index
    # Updates to [workers, ...], momentum to [workers, rows, n].
    everyones = list(constants)
    for number, leaf in arrays.items():
      if is_own[number] and not batched[1][number]:  # of an unused parameter
        leaf = jnp.broadcast_to(leaf, (size, *leaf.shape))
      everyones[number] = leaf
    updated = update(*treedef.unflatten(everyones), workers)
    return jax.tree.leaves(updated), outputs

  # The number is mapped wherever this is reached, so that the rule is called.
  @custom_vmap
  def one_worker(
    index: Any,
    arrays: dict[int, jax.Array],
  ) -> list[jax.Array]:
    del index
    returned = [*arrays.values()][: len(outputs)]
    return watch(returned, outputs=tuple(outputs))

  one_worker.def_vmap(rule)
  updated = one_worker(jax.lax.axis_index(WORKER_AXIS), arrays)
  return jax.tree.structure(given[:2]).unflatten(updated)


def over_workers(
  tree: Tree,
  reduce: Callable[..., jax.Array] = jnp.mean,
) -> Tree:
  """Reduces one worker's values over all workers, inside a step.

  For what a step decides or returns from all workers' values: skips, counts,
  statistics that are state. It is communication, so keep it small. A gradient
  is one worker's: what is differentiated is refused. Integers and flags that
  differ need another reduction than the mean.

  Args:
    tree: this worker's arrays.
    reduce: a reduction such as `jnp.mean`, `jnp.sum`, `jnp.min` or `jnp.all`,
      called with `[workers, ...]` and `axis=0`. `jnp.mean`, the default, is the
      mean over the workers whose array is finite, if any is.

  Returns:
    A tree like `tree`, equal on all workers. Random keys are worker 0's,
    and with `jnp.mean` integers and flags, which must be equal, as they are.

  Raises:
    ValueError: outside a step, or in what is differentiated.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> @demo_optax.data_parallel(workers, batch_argnames='x')
    ... def count_positive(x):
    ...   return demo_optax.over_workers((x > 0).sum(), jnp.sum)
    >>> print(count_positive(jnp.array([1.0, -1.0, 2.0, 3.0])))
    3
  """
  axis = check_in_step('over_workers').axis

  def over(
    keys: Keys,
    value: chex.Numeric,
  ) -> jax.Array:
    value = _undifferentiated(jnp.asarray(value))
    if prng.is_key_array(value):
      return collectives.first(value, axis)
    if reduce is jnp.mean:
      # A worker with NaN is left out, as the exchange does.
      if _tree.is_inexact(value):
        return collectives.mean_finite(value, axis)
      return equal(
        value,
        'over_workers must be given real numbers for their mean, got'
        f' {dotted(keys)}, {value.dtype}{list(value.shape)}, which differs'
        ' between workers. Give another reduction, such as jnp.sum or jnp.max.',
      )
    if reduce is jnp.sum and jax.eval_shape(reduce, value).dtype == value.dtype:
      return collectives.total(value, axis)  # with the same bits in every map
    everyones = collectives.everyones(value, axis)  # [workers, *x.shape]
    return reduce(everyones, axis=0)

  return map_by_path(over, tree)


@jax.custom_jvp
def _undifferentiated(x: Any) -> Any:
  """Returns `x`; raises where its derivative is asked for."""
  return x


@functools.partial(_undifferentiated.defjvp, symbolic_zeros=True)
def _derivative(
  primals: Any,
  tangents: Any,
) -> Any:
  (x,), (tangent,) = primals, tangents
  if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
    raise ValueError(
      'over_workers must be called outside of the function that is'
      ' differentiated, got a call inside of it. Gradients must stay per'
      ' worker. Return the value beside the loss (has_aux=True) and call'
      ' over_workers on it outside, or give it jax.lax.stop_gradient(x).'
    )
  return x, tangent
