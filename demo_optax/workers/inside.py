"""Operations across workers, called inside of a `data_parallel` step.

A step is traced once, for one worker (`trace`). Where each worker has its own
device, or is a separate program, exchanges in the step communicate by the
collectives of that worker. Else the step is run under `jax.vmap`, and an
exchange is a rule that receives the arrays of all workers.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend import core

from demo_optax import _paths, _tree
from demo_optax._paths import Keys, path_keys
from demo_optax.numerics import prng
from demo_optax.workers import Workers, collectives
from demo_optax.workers.variation import Origin, traced_step, watch

# The axis that `data_parallel` maps a step over. No other has this name.
WORKER_AXIS = 'demo_optax_workers'


class StepView(NamedTuple):
  """The workers, as a step that is being traced sees them."""

  axis: collectives.Axis
  num_workers: int
  # Of a worker on its own device, or of a separate program: exchanges use it.
  own: Workers | None


def trace(
  view: StepView, step: Callable[..., Any], arrays: Sequence[Any]
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


def check_own_gradients(gradients: Any) -> Any:
  """Returns `gradients`; raises if all of them are the same on all workers.

  A single gradient that is the same belongs to an unused parameter.
  """
  view = check_in_step('An update of gradients')
  leaves, treedef = jax.tree.flatten(gradients)
  exchanged = [i for i, x in enumerate(leaves) if _tree.is_exchanged(x)]
  if view.num_workers == 1 or not exchanged:
    return gradients
  watched = watch([leaves[i] for i in exchanged], _must_differ)
  for i, x in zip(exchanged, watched):
    leaves[i] = x
  return treedef.unflatten(leaves)


def _must_differ(origins: Sequence[Origin]) -> None:
  if not any(Origin.DATA in origin for origin in origins):
    raise ValueError(
      'The gradients that reach the exchange must be those of one worker, got'
      ' the same on all workers. Either the loss does not depend on the batch'
      ' that data_parallel has cut (it closes over another array, or over a'
      ' constant random key), or it does not depend on any of these parameters'
      ' (freeze them, optax.set_to_zero), or gradients were averaged. Use the'
      " step's own arguments in the loss, and remove what averages gradients,"
      ' which the exchange replaces.'
    )


def equal(tree: Any, message: str) -> Any:
  """Returns `tree`; raises `message` of a leaf that differs between workers.

  `{}` in the message is the name of the leaf.
  """
  names = [_paths.dotted(keys) for keys, _ in _paths.leaves_of(tree)]

  def check(origins: Sequence[Origin]) -> None:
    for name, origin in zip(names, origins):
      if origin.differs:
        raise ValueError(message.replace('{}', name))

  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(watch([jnp.asarray(x) for x in leaves], check))


# What makes values differ that must not, and what to do.
_CAUSES = {
  'rows': 'rows of a batch: return demo_optax.out_batch(x) to join them',
  'count': 'a count or an array of one worker: return'
  ' demo_optax.over_workers(x, jnp.sum), or another reduction',
  'gradient': 'a gradient that is not exchanged: call update in the step, not'
  ' outside of it, and average what the optimizer leaves out'
  ' (demo_optax.average_gradients), or set it to zero',
  'statistics': 'statistics of batches: return'
  ' demo_optax.over_workers(statistics)',
  'metric': 'a metric: pass an nnx.metrics.Average, which is added up;'
  ' merge those of clu with demo_optax.over_workers(own, jnp.sum); or update it'
  ' outside of the step, from what the step returns',
  'skip': 'a step that is skipped: decide from the update, or from all'
  ' workers, demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is'
  ' not needed, since the exchange leaves out workers with gradients that are'
  ' not finite',
  'number': 'a number of one worker, such as its loss or a norm: give'
  ' value=demo_optax.over_workers(loss) to reduce_on_plateau',
  'state': 'a transformation with a state before the exchange: put it into'
  ' demo_optax.per_worker',
  'wrapper': 'a wrapper that also reads gradients, such as'
  ' optax.contrib.mechanize: place it after the exchange,'
  ' optax.chain(demo_optax.scale_by_demo(...), wrapper(...))',
}


def differs_text(what: str, causes: Iterable[str] = tuple(_CAUSES)) -> str:
  """Returns the message for a value that must not differ, but does."""
  return '\n  - '.join(
    [
      f'{what[0].upper()}{what[1:]} must be the same on all workers, got one'
      " that differs between workers: it depends on one worker's gradient,"
      ' loss or batch. Usual causes:',
      *(_CAUSES[cause] for cause in causes),
    ]
  )


# The exchange -----------------------------------------------------------------


class _Arguments(NamedTuple):
  """What reaches an exchange, as one worker has it."""

  gradients: list[jax.Array]
  state: Any
  params: Any
  hyperparams: Any


# By field of `_Arguments`, its name in messages, and why it may differ.
_SHARED = {
  'params': ('parameter', ('skip', 'wrapper')),
  'hyperparams': ('hyperparameter', ('number',)),
  'state': ('optimizer state', ('state', 'skip', 'number', 'wrapper')),
}


def _check_all(names: Sequence[Keys], origins: Sequence[Origin]) -> None:
  """Raises for an array that differs and must not, or the reverse."""
  for (field, *keys), origin in zip(names, origins):
    is_stacked = field == 'state' and _paths.is_stacked(tuple(keys))
    if field == 'gradients' or origin.differs == is_stacked:
      continue
    if is_stacked:
      raise ValueError(
        'The momentum that reaches the exchange must be that of one worker, got'
        ' one that all workers share: the step closes over the optimizer state,'
        ' or replaces it. Make the state an argument of the step (or a part of'
        ' one, as in an nnx.Optimizer or a TrainState).'
      )
    what, causes = _SHARED[field]
    name = f'the {what} {_paths.dotted(tuple(keys))}' if keys else f'the {what}'
    raise ValueError(differs_text(name, causes))


def call_stacked(
  stacked_update: Callable[..., tuple[Any, Any]],
  workers: Workers,
  updates: Any,
  state: Any,
  params: Any,
  hyperparams: Any,
  *,
  own_updates: bool = False,
) -> tuple[Any, Any]:
  """Calls a transformation of stacked gradients from one worker's step.

  `stacked_update(updates, state, params, hyperparams, workers)` returns updates
  in the parameters' shapes, or each worker's with `own_updates`, and the new
  state. Gradients, state and own updates are as `workers` have them: stacked,
  or of one worker. Here `updates` and `state` are those of one worker;
  parameters and hyperparameters are equal on all workers.
  """
  view = check_in_step('An exchange')
  if workers.kind == 'on_axis' or workers.count != view.num_workers:
    raise ValueError(
      'workers must be those of data_parallel, which runs the step for'
      f' {view.num_workers} workers, got {workers} in the transformation. Give'
      ' both the same workers.'
    )
  grads_def = jax.tree.structure(updates)
  grads = [  # those of integers are float0, which no operation takes
    _tree.zero_update(g, p, 0)
    if getattr(g, 'dtype', None) == jax.dtypes.float0
    else jnp.asarray(g)
    for (_, g), p in zip(*_tree.flatten_alike(updates, params))
  ]
  grads = check_own_gradients(grads)
  given = _Arguments(grads, state, params, hyperparams)
  flat, treedef = _paths.leaves_of(given), jax.tree.structure(given)
  # Numbers that are known when a step is traced make a smaller program. What is
  # closed over below must not hold tracers.
  named = [(keys, x) for keys, x in flat if _is_array(x)]
  constants = [None if _is_array(x) else x for _, x in flat]
  names = [keys for keys, _ in named]
  check = functools.partial(_check_all, names)
  arrays = watch([x for _, x in named], check, exchanges=True)

  def update(
    arrays: Sequence[jax.Array], workers: Workers
  ) -> tuple[list[jax.Array], Any]:
    in_order = iter(arrays)
    leaves = [next(in_order) if x is None else x for x in constants]
    grads, *rest = treedef.unflatten(leaves)
    new, after = stacked_update(grads_def.unflatten(grads), *rest, workers)
    return jax.tree.leaves(new), after

  if view.own is not None:
    new, state = update(arrays, view.own)
    return grads_def.unflatten(new), state

  with_axis = [k[0] == 'gradients' or _paths.is_stacked(k) for k in names]
  outputs = [own_updates] * len(grads)
  outputs += [_paths.is_stacked(keys) for keys, _ in _paths.leaves_of(state)]
  out_def = jax.tree.structure((grads, state))

  def rule(size: int, batched: Any, index: Any, *arrays: Any) -> Any:
    stacked = list(arrays)
    for i, (x, is_batched) in enumerate(zip(arrays, batched[1:])):
      if with_axis[i] and not is_batched:  # of an unused parameter
        stacked[i] = jnp.broadcast_to(x, (size, *x.shape))
    return jax.tree.leaves(update(stacked, workers)), outputs

  # The number is mapped wherever this is reached, so that the rule is called.
  @custom_vmap
  def one_worker(index: Any, *arrays: Any) -> list[Any]:
    by_name = [(k, x) for k, x in zip(names, arrays)]
    grads = [jnp.zeros_like(x) for k, x in by_name if k[0] == 'gradients']
    return grads + [x for k, x in by_name if k[0] == 'state']

  one_worker.def_vmap(rule)
  found = one_worker(jax.lax.axis_index(WORKER_AXIS), *arrays)
  new, state = out_def.unflatten(watch(found, outputs=outputs))
  return grads_def.unflatten(new), state


def _is_array(x: Any) -> bool:
  return isinstance(x, jax.Array | np.ndarray)


def over_workers(tree: Any, reduce: Callable[..., jax.Array] = jnp.mean) -> Any:
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

  def over(path: _paths.Path, x: Any) -> jax.Array:
    x = _undifferentiated(jnp.asarray(x))
    if prng.is_key_array(x):
      return collectives.first(x, axis)
    if reduce is jnp.mean:
      if jnp.issubdtype(x.dtype, jnp.inexact):
        return collectives.mean_finite(x, axis)
      name = _paths.dotted(('x', *path_keys(path)))
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
