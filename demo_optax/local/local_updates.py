r"""Local updates: workers train alone, and exchange what they moved.

Every worker has parameters of its own, :math:`x_i`, in the optimizer state, and
all have the same global parameters :math:`s`. A period is

    x_i = s  --inner, sync_period times-->  x_i
        --s - x_i-->  pseudo-gradients, one for each worker
        --outer, in which the exchange is-->  update of s
        -->  x_i = s

`outer` is a chain as it is used for gradients: an exchange, which makes one
update of the workers' pseudo-gradients, and a base optimizer behind it. What
distinguishes the published methods is the choice of these parts (`methods`).

The exchange is in a branch that is taken when a period ends, which is told from
counters that are the same on all workers: in all other steps nothing is
communicated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import _checks, _tree
from demo_optax._paths import Path
from demo_optax.per_worker import stack_own
from demo_optax.workers import Workers, inside

# Steps between exchanges: a number, or a schedule of the steps done.
Period = int | Callable[[chex.Numeric], chex.Numeric]


class OwnState(NamedTuple):
  """What every worker has of its own, stacked `[workers, ...]`.

  Attributes:
    params: its parameters; in a step they take the place of the model's.
    inner: state of the inner optimizer.
    skipped: int32 `[workers]`, steps that a worker left out because its
      gradient was not finite, or the step's result would not have been.
    start: where workers drift, its parameters after the last exchange, in the
      dtype of momentum; else `()`.
  """

  params: chex.ArrayTree
  inner: chex.ArrayTree
  skipped: chex.Array
  start: chex.ArrayTree


class LocalUpdatesState(NamedTuple):
  """State of `local_updates`.

  Attributes:
    count: int32 `[]`, steps so far.
    steps_since_sync: int32 `[]`, how many of them since the last exchange.
    global_params: the parameters after the last exchange, which all workers
      share, in the dtype of momentum (float32 for bfloat16); where workers
      drift, the mean of theirs.
    outer: state of the outer optimizer, which has the exchange in it.
    worker_stacked: what every worker has of its own.
  """

  count: chex.Array
  steps_since_sync: chex.Array
  global_params: chex.ArrayTree
  outer: chex.ArrayTree
  worker_stacked: OwnState


def local_updates(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    sync_period: Period,
    *,
    workers: Workers,
    drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Each worker trains alone; every `sync_period` steps they exchange.

  With the global parameters :math:`s`, for worker :math:`i` with parameters
  :math:`x_i`, which are :math:`s` after each exchange:

  .. math::
    x_i &\leftarrow x_i + \mathrm{inner}(g_i)
        \qquad \text{every step} \\
    G_i &= s - x_i \qquad \text{after } H \text{ steps} \\
    s   &\leftarrow s + \mathrm{outer}(G_1, \dots, G_N) \\
    x_i &\leftarrow s

  The training step is written for one worker and decorated with
  `data_parallel`. In the step, the model has :math:`x_i`, which the optimizer
  state keeps; outside of it, :math:`s`, to be evaluated and saved. A change of
  parameters between steps, such as loading weights, reaches all workers; a
  change inside a step, other than by `update`, is lost.

  :math:`s` is the same on all workers to the last bit, and so is :math:`x_i`
  after an exchange. In a step without an exchange nothing is communicated, but
  what the step returns: the mean of a loss is one number. Losses of the batch's
  rows, returned as an array, stay where they are.

  A step is left out by its worker alone, with its inner state as it was, if its
  gradient is not finite, or if it would make parameters or inner state that are
  not; `state.worker_stacked.skipped` counts.

  Args:
    inner: each worker's own optimizer. All begin with the same state, but for
      random keys.
    outer: from pseudo-gradients to the update of the global parameters:
      `optax.chain(scale_by_demo(...), optax.sgd(0.7))`, for example. Extra
      arguments of `update` go to both.
    sync_period: :math:`H`, at least 1: a number, or a schedule of the steps
      done. The exchange is after step :math:`t` if at least :math:`H(t)` steps
      were made since the last one.
    workers: those of the exchange: `Workers.simulated` or `Workers.on_mesh`.
    drift: `outer` makes another update for every worker, each of which goes on
      from parameters of its own, :math:`s_i`. Then :math:`s` is their mean, for
      evaluation: with each exchange a dense all-reduce of the parameters.

  Returns:
    A gradient transformation; its `update` runs in a `data_parallel` step.

  Raises:
    ValueError: `sync_period` below 1, at once; when traced: outside of a
      `data_parallel` step, no `params`, an `outer` without an exchange.
    TypeError: `workers` or `sync_period` is something else; `Workers.on_axis`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> outer = optax.chain(
    ...     demo_optax.average(workers=workers), optax.sgd(1.0))
    >>> tx = demo_optax.local.local_updates(
    ...     optax.sgd(1.0), outer, sync_period=2, workers=workers)
    >>> params = {'w': jnp.zeros(())}
    >>> state = tx.init(params)
    >>> @demo_optax.data_parallel(workers)
    ... def train_step(params, state, x):
    ...   grads = jax.grad(lambda params: params['w'] * x.mean())(params)
    ...   updates, state = tx.update(grads, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> for step in range(2):
    ...   params, state = train_step(params, state, jnp.array([1.0, 3.0]))
    ...   print(state.worker_stacked.params['w'], params['w'])
    [-1. -3.] 0.0
    [-4. -4.] -4.0

  References:
    Douillard et al., `DiLoCo: Distributed Low-Communication Training of
    Language Models <https://arxiv.org/abs/2311.08105>`_, Algorithm 1.
  """
  _check_workers(workers)
  _check_period(sync_period)
  inner = optax.with_extra_args_support(inner)
  outer = optax.with_extra_args_support(outer)

  def init_fn(params: chex.ArrayTree) -> LocalUpdatesState:
    params = workers.device_put(_tree.mask_others(params))
    global_params = jax.tree.map(jnp.copy, _in_momentum_dtype(params))
    count, steps_since_sync, skipped = (  # three arrays, which can be donated
        workers.device_put(jnp.zeros((), jnp.int32)) for _ in range(3)
    )
    own = OwnState(
        params,
        inner.init(params),
        skipped,
        global_params if drift else (),
    )
    return LocalUpdatesState(
        count,
        steps_since_sync,
        global_params,
        outer.init(global_params),
        stack_own(own, workers),
    )

  def update_fn(
      updates: chex.ArrayTree,
      state: LocalUpdatesState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, LocalUpdatesState]:
    _check_call(updates, params)
    return _tree.update_without_variables(
        update_plain, updates, state, params, **extra_args
    )

  def update_plain(
      updates: chex.ArrayTree,
      state: LocalUpdatesState,
      params: chex.ArrayTree,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, LocalUpdatesState]:
    own = _inner_step(
        inner, _tree.mask_others(updates), state.worker_stacked, extra_args
    )
    steps = state.steps_since_sync + 1
    period = sync_period(state.count) if callable(sync_period) else sync_period
    due = jnp.logical_not(steps < period)  # NaN is due, too

    def exchange() -> tuple[OwnState, chex.ArrayTree, chex.ArrayTree]:
      start = own.start if drift else state.global_params
      change, outer_state = outer.update(
          _pseudo_gradients(start, own.params),
          state.outer,
          state.global_params,
          **extra_args,
      )
      start = jax.tree.map(_add, start, change)
      shared = (
          inside.over_workers(start)
          if drift
          else inside.alike(start, _NO_EXCHANGE)
      )
      new = own._replace(
          params=_like(start, own.params), start=start if drift else ()
      )
      return new, shared, _like(outer_state, state.outer)

    def wait() -> tuple[OwnState, chex.ArrayTree, chex.ArrayTree]:
      return own, state.global_params, state.outer

    own, global_params, outer_state = jax.lax.cond(due, exchange, wait)
    return _updates(own.params, params), LocalUpdatesState(
        count=optax.safe_increment(state.count),
        steps_since_sync=jnp.where(due, 0, steps).astype(jnp.int32),
        global_params=global_params,
        outer=outer_state,
        worker_stacked=own,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _inner_step(
    inner: optax.GradientTransformationExtraArgs,
    gradients: chex.ArrayTree,
    own: OwnState,
    extra_args: dict[str, Any],
) -> OwnState:
  """Returns the worker's state after a step of its own, if that is finite."""
  updates, inner_state = inner.update(
      gradients, own.inner, own.params, **extra_args
  )
  inner_state = _like(inner_state, own.inner)
  params = optax.apply_updates(own.params, _like(updates, own.params))
  finite = jnp.ones((), bool)
  for x in jax.tree.leaves((gradients, params)):
    finite &= jnp.isfinite(x).all()
  for x, old in zip(jax.tree.leaves(inner_state), jax.tree.leaves(own.inner)):
    if jnp.issubdtype(x.dtype, jnp.inexact):  # some begin with infinity
      finite &= (jnp.isfinite(x) | ~jnp.isfinite(old)).all()
  params, inner_state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old),
      (params, inner_state),
      (own.params, own.inner),
  )
  skipped = own.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
  return OwnState(params, inner_state, skipped, own.start)


def _pseudo_gradients(
    start: chex.ArrayTree, params: chex.ArrayTree
) -> chex.ArrayTree:
  """Returns how far the parameters are from where they began, rounded alike."""
  return jax.tree.map(
      lambda s, x: s.astype(x.dtype).astype(s.dtype) - x.astype(s.dtype),
      start,
      params,
  )


def _updates(new: chex.ArrayTree, params: chex.ArrayTree) -> chex.ArrayTree:
  """Returns the way to the new parameters; zeros where none take part."""
  leaves, treedef = jax.tree.flatten(params)
  return treedef.unflatten([
      jnp.zeros_like(x) if isinstance(y, optax.MaskedNode) else y - x
      for x, y in zip(leaves, treedef.flatten_up_to(new))
  ])


def _in_momentum_dtype(tree: chex.ArrayTree) -> chex.ArrayTree:
  """Casts to the momentum's dtype, so that small changes are not lost."""

  def cast(path: Path, x: jax.Array) -> jax.Array:
    return x.astype(_tree.momentum_dtype(path, x))

  return jax.tree_util.tree_map_with_path(cast, tree)


def _like(tree: chex.ArrayTree, before: chex.ArrayTree) -> chex.ArrayTree:
  """Casts to the dtypes of `before`: branches must agree in them."""
  return jax.tree.map(
      lambda x, old: x.astype(old.dtype) if hasattr(old, 'dtype') else x,
      tree,
      before,
  )


def _add(x: jax.Array, update: jax.Array) -> jax.Array:
  """Returns the sum, made in the update's dtype, in the parameter's."""
  return (x.astype(update.dtype) + update).astype(x.dtype)


# Checks -----------------------------------------------------------------------

_NO_EXCHANGE = (
    'The outer optimizer makes another update of {} for every worker: is there'
    ' an exchange in it, such as scale_by_demo or average? One that is meant to'
    ' do so needs local_updates(..., drift=True).'
)


def _check_workers(workers: Workers) -> None:
  _checks.check_type(
      'workers', workers, Workers, 'demo_optax.Workers.simulated(4)'
  )
  if not workers.stacked_gradients:
    raise TypeError(
        f'{workers} are the workers of an axis that you map yourself: local'
        ' updates run in demo_optax.data_parallel, which needs'
        ' Workers.simulated or Workers.on_mesh.'
    )


def _check_period(period: Any) -> None:
  if callable(period):
    return
  if isinstance(period, jax.Array):
    raise TypeError(
        f'sync_period={period!r} must be known before anything is traced: give'
        " optax.inject_hyperparams static_args=('sync_period',)."
    )
  if isinstance(period, bool) or not isinstance(period, int | np.integer):
    raise TypeError(
        f'sync_period={period!r} must be an integer, or a schedule of the'
        ' steps done.'
    )
  if period < 1:
    raise ValueError(f'sync_period={period} must be at least 1.')


def _check_call(
    gradients: chex.ArrayTree, params: chex.ArrayTree | None
) -> None:
  if not inside.is_mapped():
    raise ValueError(
        'local_updates was updated outside of a demo_optax.data_parallel step,'
        ' in which each worker has parameters of its own. Write the training'
        ' step for one worker and decorate it with'
        ' @demo_optax.data_parallel(workers), instead of jax.jit or nnx.jit.'
    )
  if params is None:
    raise ValueError(
        'local_updates needs params: tx.update(grads, state, params).'
    )
  flat, (like,) = _tree.flatten_alike(gradients, params)
  for (path, gradient), x in zip(flat, like):
    if jnp.shape(gradient) != jnp.shape(x):
      raise ValueError(
          f'The gradient of {_tree.leaf_name(path)} has shape'
          f' {jnp.shape(gradient)}, but its parameter {jnp.shape(x)}: inside of'
          " a data_parallel step, take this worker's gradient with"
          ' jax.value_and_grad or nnx.value_and_grad.'
      )
