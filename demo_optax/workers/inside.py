"""Operations across workers, called inside of a `data_parallel` step.

A step is traced once, for one worker (`trace`). Where each worker has its own
device, or is a separate program, exchanges in the step communicate by the
collectives of that worker. Else the step is run under `jax.vmap`, and an
exchange is a rule that receives the arrays of all workers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend import core

from demo_optax import _tree
from demo_optax._paths import (
  Keys,
  Path,
  dotted,
  is_stacked,
  leaf_name,
  leaves_of,
)
from demo_optax.numerics import prng
from demo_optax.workers import Workers, collectives
from demo_optax.workers.variation import Origin, traced_step, watch

# The axis that `data_parallel` maps a step over. No other has this name.
WORKER_AXIS = 'demo_optax_workers'

Tree = TypeVar('Tree')


class StepView(NamedTuple):
  """The workers, as a step that is being traced sees them."""

  axis: collectives.Axis
  num_workers: int
  # Of a worker on its own device, or of a separate program: exchanges use it.
  own: Workers | None


def trace(
  view: StepView,
  step: Callable[..., object],
  arrays: Sequence[jax.Array],
) -> tuple[core.ClosedJaxpr, Any]:
  """Traces one worker's step; returns its program, and results as shapes."""
  token = traced_step.set(view)
  try:
    return jax.make_jaxpr(step, return_shape=True)(*arrays)
  finally:
    traced_step.reset(token)


def is_in_step() -> bool:
  """Returns whether the caller is traced in a `data_parallel` step."""
  return traced_step.get() is not None


def check_in_step(what: str) -> StepView:
  """Returns the view of the step; raises outside of a step."""
  view = traced_step.get()
  if view is None:
    raise ValueError(
      f'{what} must be called in a demo_optax.data_parallel step, got a call'
      ' outside of one. Write the step for one worker and decorate it with'
      ' @demo_optax.data_parallel(workers, batch_argnames=...), instead of'
      ' jax.jit or nnx.jit.'
    )
  return view


# Checks -----------------------------------------------------------------------


def _watch_leaves(
  tree: Tree,
  which: Callable[[Any], bool],
  check: Callable[[list[tuple[Keys, Origin]]], None],
) -> Tree:
  """Returns `tree`; leaves a check of the origins of some of its leaves."""
  leaves, treedef = jax.tree.flatten(tree)
  chosen = [place for place, x in enumerate(leaves) if which(x)]
  # Not the leaves: what a program closes over must not hold tracers.
  names = [keys for keys, _ in leaves_of(tree)]

  def check_chosen(origins: Sequence[Origin]) -> None:
    check([(names[i], origin) for i, origin in zip(chosen, origins)])

  watched = watch([leaves[place] for place in chosen], check_chosen)
  for place, x in zip(chosen, watched):
    leaves[place] = x
  return treedef.unflatten(leaves)


def _is_array(x: object) -> bool:
  # Numbers that are known when a step is traced make a smaller program.
  return isinstance(x, jax.Array | np.ndarray)


def check_own_gradients(gradients: Tree) -> Tree:
  """Returns `gradients`; raises if all of them are the same on all workers.

  A single gradient that is the same belongs to an unused parameter.
  """
  view = check_in_step('An update of gradients')

  def check(found: list[tuple[Keys, Origin]]) -> None:
    is_own = any(Origin.DATA in origin for _, origin in found)
    if is_own or not found or view.num_workers == 1:
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

  return _watch_leaves(gradients, _tree.is_exchanged, check)


def equal(tree: Tree, message: str) -> Tree:
  """Returns `tree`; raises `message` of an array that differs between workers.

  `{}` in the message is the name of the leaf.
  """

  def check(found: list[tuple[Keys, Origin]]) -> None:
    for keys, origin in found:
      if origin.differs:
        raise ValueError(message.replace('{}', dotted(keys)))

  return _watch_leaves(tree, _is_array, check)


def _check_state(found: list[tuple[Keys, Origin]]) -> None:
  """Raises for momentum that workers share, or for other state that differs."""
  for keys, origin in found:
    if origin.differs and not is_stacked(keys):
      name = f'The optimizer state {dotted(keys)}'
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


def differs_text(name: str, causes: Sequence[str]) -> str:
  """Returns the message for a value that must not differ, but does."""
  start = (
    f'{name[0].upper()}{name[1:]} must be the same on all workers, got one'
    " that differs between workers: it depends on one worker's gradient, loss"
    ' or batch. Usual causes:'
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
  view = check_in_step('An exchange')
  if workers.kind == 'on_axis' or workers.count != view.num_workers:
    raise ValueError(
      'workers must be those of data_parallel, which runs the step for'
      f' {view.num_workers} workers, got {workers} in the transformation. Give'
      ' both the same workers.'
    )
  gradients = []
  for (_, x), param in zip(*_tree.flatten_alike(updates, params)):
    if not _tree.is_exchanged(x):
      # Those of integers are float0, which no operation takes.
      x = _tree.zero_update(x, param, 0)
    gradients.append(jnp.asarray(x))
  updates = jax.tree.structure(updates).unflatten(gradients)
  parameter = differs_text('The parameter {}', BEFORE_EXCHANGE)
  hyperparameter = differs_text('The hyperparameter {}', BEFORE_EXCHANGE)
  return (
    check_own_gradients(updates),
    _watch_leaves(state, _is_array, _check_state),
    equal(params, parameter),
    equal(hyperparams, hyperparameter),
  )


def for_workers(
  update: StackedUpdate,
  workers: Workers,
  own_updates: bool = False,
) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
  """Returns `update` for the workers that are seen here.

  In a mapped step it takes the arguments of one worker, and returns updates
  that are equal on all workers, or each worker's with `own_updates`.
  """
  view = traced_step.get()
  if workers.relay is not None:
    view = check_in_step(f'The update for {workers}')
  if view is None:
    return functools.partial(update, workers=workers)
  if view.own is not None:
    return functools.partial(update, workers=view.own)
  return functools.partial(_call_stacked, update, workers, own_updates)


def _call_stacked(
  update: StackedUpdate,
  workers: Workers,
  own_updates: bool,
  *given: Any,
) -> tuple[Any, Any]:
  """Calls an update of all workers from the mapped step of one."""
  treedef = jax.tree.structure(given)
  constants: list[object] = []  # What is closed over must not hold tracers.
  places, arrays, has_axis, outputs = [], [], [], []
  for place, (keys, x) in enumerate(leaves_of(given)):
    if not _is_array(x):
      constants.append(x)
      continue
    constants.append(None)
    places.append(place)
    arrays.append(x)
    is_update, is_own = keys[0] == 0, is_stacked(keys)
    has_axis.append(is_update or is_own)
    if keys[0] < 2:  # Updates and state come first, and come back.
      outputs.append(is_own or (is_update and own_updates))

  def rule(
    size: int,
    batched: Any,
    index: Any,
    *arrays: Any,
  ) -> Any:
    del index
    leaves = [*constants]
    of_arrays = zip(places, arrays, has_axis, batched[1:])
    for place, x, is_own, is_batched in of_arrays:
      if is_own and not is_batched:  # of an unused parameter
        x = jnp.broadcast_to(x, (size, *x.shape))
      leaves[place] = x
    updated = update(*treedef.unflatten(leaves), workers)
    return jax.tree.leaves(updated), [*outputs]

  # The number is mapped wherever this is reached, so that the rule is called.
  @custom_vmap
  def one_worker(index: Any, *arrays: Any) -> list[Any]:
    del index
    return [*arrays[: len(outputs)]]

  one_worker.def_vmap(rule)
  updated = one_worker(jax.lax.axis_index(WORKER_AXIS), *arrays)
  structure = jax.tree.structure(given[:2])
  return structure.unflatten(watch(updated, outputs=tuple(outputs)))


def over_workers(
  tree: Tree,
  reduce: Callable[..., jax.Array] = jnp.mean,
) -> Tree:
  """Reduces one worker's values over all workers, inside of a step.

  For what a step decides or returns from all workers' values: skips, counts,
  statistics that are state. It is communication, so keep it small. A gradient
  is one worker's: what is differentiated is refused, as is the mean of integers
  or flags that differ.

  Args:
    tree: this worker's arrays.
    reduce: a reduction such as `jnp.mean`, `jnp.sum`, `jnp.min` or `jnp.all`,
      called with `[workers, ...]` and `axis=0`. `jnp.mean`, the default, is the
      mean of the workers whose array is finite, if any is.

  Returns:
    A tree like `tree`, equal on all workers. Of random keys it has worker 0's,
    and with `jnp.mean` integers and flags, which must be equal, as they are.

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
  if not callable(reduce):
    raise TypeError(
      f'reduce must be a function, got {reduce!r}. Give one such as jnp.sum.'
    )

  def over(path: Path, x: chex.Numeric) -> jax.Array:
    x = _undifferentiated(jnp.asarray(x))
    if prng.is_key_array(x):
      return collectives.first(x, axis)
    if reduce is jnp.mean:
      if _tree.is_inexact(x):
        return collectives.mean_finite(x, axis)
      name = f'x.{leaf_name(path)}' if path else 'x'
      return equal(
        x,
        f'over_workers must be given real numbers for their mean, got {name},'
        f' {x.dtype}{list(x.shape)}, which differs between workers. Give'
        ' another reduction, such as jnp.sum or jnp.max.',
      )
    if reduce is jnp.sum and jax.eval_shape(reduce, x).dtype == x.dtype:
      return collectives.total(x, axis)  # with the same bits in every map
    return reduce(collectives.everyones(x, axis), axis=0)

  return jax.tree_util.tree_map_with_path(over, tree)


@jax.custom_jvp
def _undifferentiated(x: Any) -> Any:
  """Returns `x`; raises where its derivative is asked for."""
  return x


@functools.partial(_undifferentiated.defjvp, symbolic_zeros=True)
def _derivative(primals: Any, tangents: Any) -> Any:
  (x,), (tangent,) = primals, tangents
  if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
    raise ValueError(
      'over_workers must be called outside of the function that is'
      ' differentiated, got a call inside of it. Gradients must stay per'
      ' worker. Return the value beside the loss (has_aux=True) and call'
      ' over_workers on it outside, or give it jax.lax.stop_gradient(x).'
    )
  return x, tangent
