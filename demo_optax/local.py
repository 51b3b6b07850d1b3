"""Local updates: workers train alone, and exchange how far they moved.

The exchange is in a branch at the end of a period. Its predicate comes from
counters that are equal on all workers: no other step communicates.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from demo_optax import _checks, _tree, compressors
from demo_optax._per_worker import own_arguments, stack_own, stays_finite
from demo_optax.checkpoint.buckets import (
  coding_of,
  cut_bucket,
  decode,
  encode,
  fill_bucket,
)
from demo_optax.compressors import Compressor
from demo_optax.numerics.topk import Average
from demo_optax.transformation import DeMoState, scale_by_demo
from demo_optax.workers import Workers, inside
from demo_optax.workers.collectives import without_types

__all__ = [
  'LocalUpdatesState',
  'demo_diloco',
  'diloco',
  'local_updates',
  'sparse_loco',
]

# Steps between exchanges: a number, or a schedule of the steps done.
Period = int | Callable[[chex.Numeric], chex.Numeric]


class OwnState(NamedTuple):
  """Each worker's state, stacked `[workers, ...]`."""

  params: chex.ArrayTree  # replace the model's in a step
  inner: chex.ArrayTree  # state of the inner optimizer
  skipped: chex.Array  # int32 [workers], steps that were not finite
  start: chex.ArrayTree  # if drift, after the last exchange; else ()


class LocalUpdatesState(NamedTuple):
  """State of `local_updates`.

  `global_params` are those after the last exchange, in the dtype of momentum
  (float32 for bfloat16); with `drift=True` the mean of the workers'.
  """

  count: chex.Array  # int32 [], steps so far
  steps_since_sync: chex.Array  # int32 []
  global_params: chex.ArrayTree
  outer: chex.ArrayTree  # state of the outer optimizer and its exchange
  worker_stacked: OwnState


def local_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  sync_period: Period,
  *,
  workers: Workers,
  drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Lets workers train alone and exchange every `sync_period` steps.

  Other steps communicate only their results, such as a mean loss.
  `diloco`, `demo_diloco` and `sparse_loco` are published methods.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> outer = optax.chain(
    ...     demo_optax.scale_by_demo(workers=workers), optax.sgd(0.7))
    >>> tx = demo_optax.local.local_updates(
    ...     optax.adam(1e-3), outer, 10, workers=workers)
    >>> state = tx.init({'w': jnp.zeros((8, 8))})

  With the global parameters :math:`s`, for worker :math:`i` with parameters
  :math:`x_i`, which are :math:`s` after each exchange:

  .. math::
    x_i &\leftarrow x_i + \mathrm{inner}(g_i)
        \qquad \text{every step} \\
    G_i &= s - x_i \qquad \text{after } H \text{ steps} \\
    s   &\leftarrow s + \mathrm{outer}(G_1, \dots, G_N) \\
    x_i &\leftarrow s

  Inside a `data_parallel` step the model has :math:`x_i`, which the optimizer
  state keeps; outside :math:`s`, for evaluation and checkpoints. A worker skips
  a step that would not be finite.

  Args:
    inner: each worker's optimizer.
    outer: a chain as for gradients: an exchange, which averages the workers'
      pseudo-gradients :math:`G_i`, and a base optimizer. Extra arguments of
      `update` go to both.
    sync_period: :math:`H`, at least 1: a number, or a schedule of the steps
      done. Workers exchange after step :math:`t` if at least :math:`H(t)` steps
      were made since the last exchange.
    workers: those of the step; not `Workers.on_axis`.
    drift: whether `outer` makes a different update for every worker, which
      keeps parameters :math:`s_i`. Then :math:`s` is their mean, which is
      communicated with each exchange.

  Raises:
    TypeError: `Workers.on_axis`.
    ValueError: `outer` makes other updates for every worker, without `drift`.
  """
  _checks.check_type('workers', workers, Workers, 'Workers.simulated(4)')
  if workers.kind == 'on_axis':
    raise TypeError(
      f'workers must be Workers.simulated, on_mesh or remote, got {workers}.'
      ' Give those of the data_parallel step.'
    )
  if not callable(sync_period):
    _checks.check_positive('sync_period', sync_period)
  inner = optax.with_extra_args_support(inner)
  outer = optax.with_extra_args_support(outer)

  def init_one(params: chex.ArrayTree) -> OwnState:
    """Returns one worker's state."""
    start = _tree.map_wide(jnp.array, params) if drift else ()
    return OwnState(
      params=params,
      inner=inner.init(params),
      skipped=jnp.zeros((), jnp.int32),
      start=start,
    )

  def init_fn(params: chex.ArrayTree) -> LocalUpdatesState:
    params = workers.device_put(_tree.mask_others(params))
    # Copies, so that both can be donated; wide, so that small changes count.
    global_params = _tree.map_wide(jnp.array, params)
    return LocalUpdatesState(
      count=workers.device_put(jnp.zeros((), jnp.int32)),
      steps_since_sync=workers.device_put(jnp.zeros((), jnp.int32)),
      global_params=global_params,
      outer=outer.init(global_params),
      worker_stacked=stack_own(init_one(params), workers),
    )

  def update(
    updates: chex.ArrayTree,
    state: LocalUpdatesState,
    params: chex.ArrayTree | None,
    **extra_args: Any,
  ) -> tuple[chex.ArrayTree, LocalUpdatesState]:
    inside.check_in_step('The update of local_updates')
    if params is None:
      raise ValueError(
        'params must be given, got None. Call tx.update(grads, state, params).'
      )
    worker = state.worker_stacked
    # Parameters without a gradient are None, as in Equinox.
    gradients, params = own_arguments(
      updates, params, worker, init_one, workers
    )
    worker = _inner_step(inner, gradients, worker, extra_args)
    steps = state.steps_since_sync + 1
    period = sync_period
    if callable(period):
      period = period(state.count)
    is_due = jnp.logical_not(steps < period)  # also for a period of NaN
    worker, global_params, outer_state = jax.lax.cond(
      is_due,
      functools.partial(_outer_step, outer, drift=drift, extra=extra_args),
      lambda worker, state: (worker, state.global_params, state.outer),
      worker,
      state,
    )
    updates = jax.tree.map(_change, params, worker.params)
    return updates, LocalUpdatesState(
      count=optax.safe_increment(state.count),
      steps_since_sync=jnp.where(is_due, 0, steps).astype(jnp.int32),
      global_params=global_params,
      outer=outer_state,
      worker_stacked=worker,
    )

  return optax.GradientTransformationExtraArgs(
    init_fn,
    functools.partial(_tree.update_without_variables, update),
  )


def _outer_step(
  outer: optax.GradientTransformationExtraArgs,
  worker: OwnState,
  state: LocalUpdatesState,
  *,
  drift: bool,
  extra: dict[str, Any],
) -> tuple[OwnState, chex.ArrayTree, chex.ArrayTree]:
  """Exchanges how far workers moved; returns the states after it.

  They are the worker's, the global parameters, and the outer optimizer's state.
  """
  start = worker.start if drift else state.global_params
  # Pseudo-gradients: they point to where a worker came from.
  moved = jax.tree.map(_moved, start, worker.params)
  change, outer_state = outer.update(
    moved,
    state.outer,
    state.global_params,
    **extra,
  )
  start = optax.apply_updates(start, change)
  params = optax.tree.cast_like(start, worker.params)
  outer_state = optax.tree.cast_like(outer_state, state.outer)
  if drift:
    worker = worker._replace(params=params, start=start)
    return worker, inside.over_workers(start), outer_state
  # All workers start from the same bits.
  global_params = inside.equal(
    start,
    'The outer optimizer makes another update of {} for every worker: is'
    ' there an exchange in it, such as scale_by_demo? One that'
    ' is meant to do so needs local_updates(..., drift=True).',
  )
  return worker._replace(params=params), global_params, outer_state


def _moved(start: jax.Array, x: jax.Array) -> jax.Array:
  """Returns how far a worker moved from the start, in the parameter's dtype."""
  rounded = start.astype(x.dtype).astype(start.dtype)
  return rounded - x.astype(start.dtype)


def _change(
  x: jax.Array,
  new: jax.Array | optax.MaskedNode,
) -> jax.Array:
  return jnp.zeros_like(x) if isinstance(new, optax.MaskedNode) else new - x


def _inner_step(
  inner: optax.GradientTransformationExtraArgs,
  gradients: chex.ArrayTree,
  own: OwnState,
  extra: dict[str, Any],
) -> OwnState:
  """Returns the worker's state after its step, if that is finite."""
  updates, inner_state = inner.update(
    gradients,
    own.inner,
    own.params,
    **extra,
  )
  inner_state = optax.tree.cast_like(inner_state, own.inner)
  params = optax.apply_updates(
    own.params,
    optax.tree.cast_like(updates, own.params),
  )
  is_finite = stays_finite(
    (gradients, params),
    inner_state,
    own.inner,
  )
  params, inner_state = optax.tree.where(
    is_finite,
    (params, inner_state),
    (own.params, own.inner),
  )
  skipped = own.skipped + jnp.logical_not(is_finite).astype(jnp.int32)
  return OwnState(params, inner_state, skipped, own.start)


# Published methods ------------------------------------------------------------

# The default inner optimizer.
_ADAMW = optax.adamw(4e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def diloco(
  inner: optax.GradientTransformation | None = None,
  *,
  workers: Workers,
  sync_period: Period = 128,
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  outer_momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  r"""Makes DiLoCo: averages pseudo-gradients, with Nesterov as the outer step.

  It is `local_updates` with `scale_by_demo(full(), 0.0)` and `optax.sgd` as
  `outer`: a dense all-reduce every `sync_period` steps.

  Example:
    >>> import demo_optax, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.local.diloco(optax.adamw(4e-4), workers=workers)

  .. math::
    G &= \mathrm{mean}_i (s - x_i) \\
    m &\leftarrow \mu m + G \\
    s &\leftarrow s - \eta\, (G + \mu m)

  Args:
    inner: each worker's optimizer; by default AdamW with a learning rate of
      4e-4, decays 0.9 and 0.95 and weight decay 0.1.
    workers: as in `local_updates`.
    sync_period: as in `local_updates`.
    outer_learning_rate: :math:`\eta`, a number or a schedule of exchanges. 0.7
      is published; with few exchanges less was better.
    outer_momentum: :math:`\mu`.

  References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, Algorithm 1.
  """
  outer = optax.chain(
    scale_by_demo(compressors.full(), 0.0, workers=workers),
    optax.sgd(outer_learning_rate, outer_momentum, nesterov=True),
  )
  return local_updates(
    inner or _ADAMW,
    outer,
    sync_period,
    workers=workers,
  )


def demo_diloco(
  inner: optax.GradientTransformation | None = None,
  *,
  workers: Workers,
  compressor: Compressor = compressors.dct_topk(),  # noqa: B008
  sync_period: Period = 128,
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  decay: chex.Numeric = 0.95,
  average: Average = 'senders',
  drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Makes DeMo inside DiLoCo: sends the outer momentum's fast part.

  As `diloco`, with the exchange of `scale_by_demo` for gradients
  :math:`G_i = s - x_i` and its update :math:`u`. By default
  :math:`s \leftarrow s - \eta\, u` and :math:`x_i \leftarrow s`, and the
  momentum :math:`m_i` is an error feedback. `drift=True` is the published
  method: each worker adds the update to its momentum and makes a Nesterov step
  with its difference and momentum,

  .. math::
    m_i &\leftarrow m_i + u \\
    x_i &\leftarrow s_i - \eta\, (G_i + \beta m_i), \qquad s_i \leftarrow x_i,

  so that workers slowly drift apart. The model outside the step is the mean of
  the :math:`s_i`. The default reached a lower loss wherever both were tried
  (benchmarks/README.md, "Every H steps").

  Args:
    inner: as in `diloco`.
    workers: as in `local_updates`.
    compressor: as in `scale_by_demo`.
    sync_period: as in `local_updates`.
    outer_learning_rate: :math:`\eta`.
    decay: :math:`\beta`.
    average: as in `scale_by_demo`.
    drift: whether workers drift apart.

  References:
    Nedelkoski et al., `Distributed Low-Communication Training with Decoupled
    Momentum Optimization <https://arxiv.org/abs/2510.03371>`_, 2025.
  """
  # Decoupled momentum of pseudo-gradients.
  exchange = scale_by_demo(
    compressor,
    decay,
    workers=workers,
    average=average,
  )
  if drift:
    exchange = _own_nesterov(exchange, decay)
  rate = optax.scale_by_learning_rate(outer_learning_rate)
  return local_updates(
    inner or _ADAMW,
    optax.chain(exchange, rate),
    sync_period,
    workers=workers,
    drift=drift,
  )


# The published compressor has values of two bits.
_LARGEST = Compressor(
  compressors.TopK(64),
  compressors.Identity(),
  values='int4',
)


def sparse_loco(
  inner: optax.GradientTransformation | None = None,
  *,
  workers: Workers,
  compressor: Compressor = _LARGEST,
  sync_period: Period = 30,
  outer_learning_rate: optax.ScalarOrSchedule = 1.0,
  decay: chex.Numeric = 0.95,
) -> optax.GradientTransformationExtraArgs:
  """Makes SparseLoCo: sends the largest raw differences in few bits.

  As `demo_diloco`, with `average='workers'` and without a transform: by default
  64 of 4096 elements, 1.6 %, in four bits (published: two bits). The momentum
  is the error feedback :math:`e_i`.

  References:
    Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
  """
  return demo_diloco(
    inner,
    workers=workers,
    compressor=compressor,
    sync_period=sync_period,
    outer_learning_rate=outer_learning_rate,
    decay=decay,
    average='workers',
  )


def _own_nesterov(
  exchange: optax.GradientTransformationExtraArgs,
  decay: chex.Numeric,
) -> optax.GradientTransformationExtraArgs:
  """Makes each worker's Nesterov step from the update that all share."""

  def update_fn(
    updates: chex.ArrayTree,
    state: DeMoState,
    params: chex.ArrayTree | None = None,
    **extra_args: Any,
  ) -> tuple[chex.ArrayTree, DeMoState]:
    shared, state = exchange.update(updates, state, params, **extra_args)
    momentum, state = _put_back(shared, state)
    is_finite = stays_finite(updates)

    def nesterov(
      gradient: jax.Array,
      momentum: jax.Array,
    ) -> jax.Array:
      finite = jnp.where(is_finite, gradient, 0)
      return finite + decay * momentum

    return jax.tree.map(nesterov, updates, momentum), state

  return optax.GradientTransformationExtraArgs(exchange.init, update_fn)


def _put_back(
  updates: chex.ArrayTree,
  state: DeMoState,
) -> tuple[chex.ArrayTree, DeMoState]:
  """Adds the shared update to the worker's momentum, from which it was sent.

  Returns the momentum in parameter space, and the new state. What is not
  compressed has no momentum; its update is the average.
  """
  layout, worker = state.layout.layout, state.worker_stacked

  def add(given: chex.ArrayTree) -> chex.ArrayTree:
    # As of several workers: [1, rows, n], or [1, devices, rows, n].
    leaves, buckets = jax.tree.map(lambda x: x[None], given)
    for number, bucket in enumerate(layout.buckets):
      if not bucket.error_feedback:
        continue
      momentum = buckets[bucket.name]
      coefficients = cut_bucket(layout, number, momentum)
      for member in coefficients:
        coding = coding_of(layout.leaves[member])
        update = leaves[member].astype(momentum.dtype)
        coefficients[member] += encode(update, coding)
        leaves[member] = decode(coefficients[member], coding)
      buckets[bucket.name] = fill_bucket(layout, number, coefficients, momentum)
    return jax.tree.map(lambda x: x[0], (leaves, buckets))

  leaves, treedef = jax.tree.flatten(updates)
  leaves, buckets = without_types(add, (leaves, worker.momentum))
  worker = worker._replace(momentum=buckets)
  return treedef.unflatten(leaves), state._replace(worker_stacked=worker)
