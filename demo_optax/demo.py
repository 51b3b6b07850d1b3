r"""DeMo: decoupled momentum as optax transformations.

`scale_by_demo` matches gradients, momentum and parameters, and has `exchange`
do the step; `demo` is the published method as a chain around it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import _tree as trees
from demo_optax import compressors, one_worker
from demo_optax import flax as modules
from demo_optax.compressors import Compressor, LeafPlan
from demo_optax.engine import topk as selection
from demo_optax.exchange import (
  Leaf,
  Numbers,
  Request,
  Response,
  exchange,
  exchange_late,
  nothing_known,
  pending_parts,
  plan_leaf,
)
from demo_optax.workers import Workers
from demo_optax.workers.sharding import Path, Placement


class DeMoState(NamedTuple):
  """State of `scale_by_demo`.

  Everything with a leading worker axis lies under `worker_stacked`, as in every
  state of this package, and nothing else does.

  Attributes:
    count: int32 `[]`, exchanges so far.
    metrics: scalars about the last exchange, the same on all workers.
      `'num_excluded'`: int32, workers that were excluded, their gradient not
      finite or their message damaged. The others are float32:
      `'sent_energy'`, the share of the momentum's energy (its sum of squares)
      that was sent; `'residual_norm'`, the norm of what stayed, the root of its
      mean square over the workers; `'mean_senders'`, how many workers sent a
      coefficient, on average over all that were sent (of leaves of which every
      worker selects a part for itself; 0 if there are none). Energies that
      float32 cannot hold count as zero.
    worker_stacked: what every worker has of its own, `[workers, ...]`.
  """

  count: chex.Array
  metrics: dict[str, chex.Array]
  worker_stacked: 'WorkerState'


class WorkerState(NamedTuple):
  """What a worker keeps from one exchange to the next, stacked over workers.

  Attributes:
    momentum: a tree like the parameters: every leaf's momentum as coefficients,
      float32 (float64 for float64 parameters), stacked
      `[workers, *chunk counts, n]`; `optax.MaskedNode()` for leaves that are
      empty or not floating point.
    in_flight: with `delay=1` the message that arrives in the next exchange, by
      dtype: uint8 `[workers, bytes]`, and what is summed beside it; else `()`.
  """

  momentum: chex.ArrayTree
  in_flight: chex.ArrayTree


def scale_by_demo(
    compressor: Compressor | None = None,
    decay: chex.Numeric = 0.999,
    *,
    workers: Workers,
    alpha: chex.Numeric = 1.0,
    average: selection.Average = 'senders',
    ema: bool = False,
    gradient_weight: optax.ScalarOrSchedule = 1.0,
    kernels: bool | None = None,
    delay: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Exchanges the fast part of every worker's own momentum.

  For worker :math:`i` with gradient :math:`g_i`, momentum :math:`m_i` and the
  chunked transform :math:`T`:

  .. math::
    m_i &\leftarrow \beta m_i + w g_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - \alpha\, T^{-1} q_i \\
    u   &= T^{-1}\, \mathrm{average}_i(q_i)

  where :math:`q_i` is rounded to what the compressor's value code can say, so
  that momentum keeps what rounding lost.
  `u` is the update, the same on all workers to the last bit. It takes the
  place of a momentum-filtered averaged gradient: follow it with any optax
  transformation. Momentum is kept as coefficients, which changes nothing since
  :math:`T` is linear and orthonormal.

  Communication: one `all_gather` of one uint8 payload per step for the whole
  tree, or with compressors of places that all workers share one all-reduce;
  `demo_optax.plan` gives the bytes.

  A worker whose gradient is not finite, or beyond :math:`10^{-12}` of the
  largest number so that momentum could overflow, says so in its payload. All
  workers leave it out of the average and it keeps its momentum as it was;
  `state.metrics['num_excluded']` counts. If all are left out the update is
  zero (and what follows, such as weight decay, goes on as with any update). A
  payload that is damaged beyond sense (indices out of order or of the chunk,
  values that are not finite or too large to transform) is left out, too, and
  what it was to carry is lost. If a worker is several devices, the bytes of
  each are judged by themselves, and `'num_excluded'` counts by those that all
  of them hold.

  Integer leaves get zero updates; complex leaves are refused.

  Args:
    compressor: what is sent; `dct_topk()` by default.
    decay: :math:`\beta`, in `[0, 1)`.
    workers: who takes part.
    alpha: share of what was sent that leaves the momentum, in `[0, 1]`: 1 in
      the first version of the paper, 0.2 was best in the second.
    average: `'senders'` divides a coefficient by the number of workers that
      sent it (the published code); `'workers'` by the number of workers that
      were not left out.
    ema: weight the gradient by :math:`1 - \beta`, too, as `optax.ema` and the
      second version of the paper do.
    gradient_weight: :math:`w`, a number or a schedule of the step.
    kernels: whether GPUs and TPUs run a step as two kernels of one pass over
      memory each, where they apply: float32 momentum; chunks of 32, 64 or 128
      a side, without padding; `topk` up to 64. Selections are the same, and
      bits but for the rounding of the transform; workers must agree in this.
      None: on backends of which a measurement says that it is worth while (so
      far on none). On CPUs kernels are interpreted: slowly, to be looked at.
    delay: None or 0: none. 1: a step returns the update of what the step before
      has sent (the first step none, with all workers left out), and what it
      sends itself stays in the state until the next. What is communicated then
      does not depend on the step's gradients, and may travel while they are
      computed. Updates are a step old then, which may cost in loss: compare
      first (benchmarks/diloco.py).

  Returns:
    A gradient transformation. Its `update` takes stacked gradients
    `[workers, ...]` (`Workers.on_axis`: the worker's own) and returns updates
    in the parameters' shapes and the gradients' dtypes.

  Raises:
    ValueError: `decay` or `alpha` out of range or unknown `average`, at once;
      gradients that can be seen not to be one per worker, or momentum of
      another number of workers or another compressor, when traced.
    TypeError: `compressor` or `workers` is something else, at once; complex
      leaves, when traced.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> compressor = demo_optax.dct_topk(chunk_size=4, topk=1)
    >>> tx = demo_optax.scale_by_demo(compressor, 0.9, workers=workers)
    >>> params = {'w': jnp.zeros((4, 4))}
    >>> state = tx.init(params)
    >>> gradients = {'w': jnp.stack([jnp.ones((4, 4)), 3 * jnp.ones((4, 4))])}
    >>> updates, state = tx.update(gradients, state, params)
    >>> print(updates['w'][0])  # both sent their mean and nothing else
    [2. 2. 2. 2.]

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1 (both versions).
  """
  compressor = compressors.dct_topk() if compressor is None else compressor
  trees.check_type(
      'compressor', compressor, Compressor, 'demo_optax.dct_topk(...)'
  )
  trees.check_type(
      'workers', workers, Workers, 'demo_optax.Workers.simulated(n)'
  )
  _check_range('decay', decay, 0.0, 1.0, open_end=True)
  _check_range('alpha', alpha, 0.0, 1.0)
  if average not in ('senders', 'workers'):
    raise ValueError(f"average={average!r} must be 'senders' or 'workers'.")
  _check_delay(delay)

  exact = isinstance(alpha, (int, float, np.number)) and bool(alpha == 1)

  def fixed(plan: LeafPlan, placement: Placement) -> Leaf:
    return Leaf(0, compressor, average, kernels, exact, plan, placement)

  def init_fn(params: chex.ArrayTree) -> DeMoState:
    leaves = []

    def zeros(path: Path, param: jax.Array) -> jax.Array:
      dtype = trees.momentum_dtype(path, param)
      plan, placement = plan_leaf(
          path, np.shape(param), dtype, compressor, workers
      )
      leaves.append(fixed(plan, placement))
      return workers.zeros(plan.grid.coefficients_shape, dtype, placement)

    momentum = modules.stack_annotations(
        trees.map_exchanged(zeros, params), workers.spmd_axis_name
    )
    return DeMoState(
        count=workers.device_put(jnp.zeros((), jnp.int32)),
        metrics=workers.device_put(nothing_known()._asdict()),
        worker_stacked=WorkerState(
            momentum, _nothing_sent(workers, leaves) if delay and leaves else ()
        ),
    )

  def of_leaf(leaf: trees.Leaf) -> Leaf:
    """What is fixed for a leaf, checked against its momentum."""
    plan, placement = plan_leaf(
        leaf.path, leaf.shape, leaf.momentum.dtype, compressor, workers
    )
    _check_momentum(leaf, plan, compressor, workers)
    return fixed(plan, placement)

  def update_fn(
      updates: chex.ArrayTree,
      state: DeMoState,
      params: chex.ArrayTree | None = None,
      *,
      demo_exchange: Callable[[Request], Response] | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, DeMoState]:
    del extra_args
    if one_worker.is_mapped():
      return one_worker.exchange(
          lambda updates, state, params, hyper: stacked_update_fn(
              updates, state, params, hyper
          ),
          workers,
          updates,
          state,
          params,
          (decay, alpha),
      )
    return stacked_update_fn(
        updates, state, params, (decay, alpha), demo_exchange
    )

  def stacked_update_fn(
      updates: chex.ArrayTree,
      state: DeMoState,
      params: chex.ArrayTree | None,
      hyper: tuple[chex.Numeric, chex.Numeric],
      demo_exchange: Callable[[Request], Response] | None = None,
  ) -> tuple[chex.ArrayTree, DeMoState]:
    decay, alpha = hyper
    own = state.worker_stacked
    leaves = trees.align(updates, own.momentum, params, workers)
    taking_part = [leaf for leaf in leaves if leaf.exchanged]
    merged: list[jax.Array] = []
    kept: list[jax.Array] = []
    metrics, in_flight = nothing_known(), own.in_flight
    if taking_part:
      _check_pending(own.in_flight, delay)
      weight = gradient_weight
      if callable(weight):
        weight = weight(state.count)
      request = Request(
          workers,
          [of_leaf(leaf) for leaf in taking_part],
          [leaf.gradient for leaf in taking_part],
          [leaf.momentum for leaf in taking_part],
          Numbers(
              step=state.count,
              decay=decay,
              gradient_weight=(1 - decay) * weight if ema else weight,
              alpha=alpha,
          ),
          own.in_flight,
      )
      if demo_exchange is not None:
        response = demo_exchange(request)
      elif delay:
        response, in_flight = exchange_late(request)
      else:
        (response,) = exchange([request])
      merged, kept, metrics = response

    in_order = iter(merged)
    new = [
        next(in_order).astype(leaf.dtype) if leaf.exchanged
        else leaf.zero_update()
        for leaf in leaves
    ]
    return jax.tree.structure(updates).unflatten(new), DeMoState(
        count=optax.safe_increment(state.count),
        metrics=metrics._asdict(),
        worker_stacked=WorkerState(
            jax.tree.structure(own.momentum).unflatten(kept), in_flight
        ),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _nothing_sent(
    workers: Workers, leaves: list[Leaf]
) -> dict[str, jax.Array]:
  """What is on its way before the first exchange: that nobody takes part."""
  return {
      name: workers.zeros((length,), jnp.dtype(dtype), placement)
      for name, (length, dtype, placement) in pending_parts(
          workers, leaves
      ).items()
  }


def _check_delay(delay: Any) -> None:
  if isinstance(delay, jax.Array):
    raise TypeError(
        f'delay={delay!r} must be known before anything is traced: give'
        " optax.inject_hyperparams static_args=('delay',)."
    )
  if isinstance(delay, bool) or delay not in (None, 0, 1):
    raise ValueError(f'delay={delay!r} must be 0 or 1.')


def _check_pending(pending: Any, delay: int | None) -> None:
  if bool(pending) != bool(delay):
    raise ValueError(
        f'The state was made with delay={int(bool(pending))}, and update has'
        f' delay={int(bool(delay))}: make it with tx.init of the same'
        ' transformation.'
    )


def demo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    workers: Workers,
    compressor: Compressor | None = None,
    decay: chex.Numeric = 0.999,
    weight_decay: chex.Numeric = 0.0,
    weight_decay_mask: Any = None,
    alpha: chex.Numeric = 1.0,
    average: selection.Average = 'senders',
    kernels: bool | None = None,
    delay: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""DeMo as published (first version): signed updates, lr in the momentum.

  .. math::
    m_i &\leftarrow \beta m_i + \eta_t g_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - T^{-1} q_i \\
    x   &\leftarrow x - \eta_t \lambda x
           - \eta_t\, \mathrm{sign}(T^{-1}\, \mathrm{average}_i(q_i))

  It is this chain: `scale_by_demo` with :math:`\eta_t` as the gradients'
  weight, `optax.scale_by_sign`, `optax.add_decayed_weights`,
  `optax.scale_by_learning_rate`; masked to the leaves that take part. If every
  worker is left out of a step, the parameters stay as they are, weight decay
  included.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule of the step.
    workers: who takes part.
    compressor: what is sent; `dct_topk()` by default.
    decay: :math:`\beta`, in `[0, 1)`. 0.999 is the paper's; short runs and
      small `topk` want less (0.99).
    weight_decay: :math:`\lambda`, decoupled.
    weight_decay_mask: which leaves decay, as in `optax.add_decayed_weights`; by
      default all that take part.
    alpha: see `scale_by_demo`.
    average: see `scale_by_demo`.
    kernels: see `scale_by_demo`.
    delay: see `scale_by_demo`.

  Returns:
    A gradient transformation; see `scale_by_demo` for what it takes.

  Raises:
    ValueError: as `scale_by_demo`; also a negative `weight_decay`.
    TypeError: as `scale_by_demo`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(0.1, workers=workers)
    >>> params = {'w': jnp.ones((8, 8))}
    >>> @demo_optax.data_parallel(workers)
    ... def train_step(params, opt_state, x):  # written for one worker
    ...   loss_fn = lambda params: jnp.mean((x @ params['w']) ** 2)
    ...   loss, gradients = jax.value_and_grad(loss_fn)(params)
    ...   updates, opt_state = tx.update(gradients, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state, loss
    >>> opt_state = tx.init(params)
    >>> for step in range(10):
    ...   params, opt_state, loss = train_step(params, opt_state, jnp.eye(8))
    >>> print(f'{loss:.3f}')
    0.010

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870v1>`_, version 1, Algorithm 1.
  """
  _check_range('weight_decay', weight_decay, 0.0, float('inf'))
  chain = optax.chain(
      _in_momentum_dtype(),
      scale_by_demo(
          compressor,
          decay,
          workers=workers,
          alpha=alpha,
          average=average,
          gradient_weight=learning_rate,
          kernels=kernels,
          delay=delay,
      ),
      optax.scale_by_sign(),
      _in_parameter_dtype(),
      optax.add_decayed_weights(weight_decay, weight_decay_mask),
      optax.scale_by_learning_rate(learning_rate),
  )
  return _zero_where_nothing_was_exchanged(chain, workers)


def _in_momentum_dtype() -> optax.GradientTransformation:
  """Gradients, and so merged momentum, in its dtype: float16 underflows."""

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    del params
    return trees.map_exchanged(
        lambda path, x: x.astype(trees.momentum_dtype(path, x)), updates
    )

  return optax.stateless(update_fn)


def _in_parameter_dtype() -> optax.GradientTransformation:
  """Updates in the dtypes of the parameters, once their signs are taken."""

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    return jax.tree.map(
        lambda u, p: u.astype(jnp.result_type(p)), updates, params
    )

  return optax.stateless(update_fn)


def _zero_where_nothing_was_exchanged(
    chain: optax.GradientTransformation, workers: Workers
) -> optax.GradientTransformationExtraArgs:
  """`chain` over the leaves that take part; zero updates for all others.

  And for all leaves, in a step from which every worker was left out.
  """
  masked = optax.masked(chain, trees.exchanged_mask)

  def update_fn(
      updates: chex.ArrayTree,
      state: optax.MaskedState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, optax.MaskedState]:
    if params is None:
      raise ValueError('demo needs params: tx.update(grads, state, params).')
    updates, state = masked.update(updates, state, params, **extra_args)
    links = state.inner_state
    (exchange,) = (link for link in links if isinstance(link, DeMoState))
    someone = exchange.metrics['num_excluded'] < workers.count

    def settle(update: jax.Array, param: Any) -> jax.Array:
      if not trees.is_exchanged(param):
        return jnp.zeros_like(param)
      return jnp.where(someone, update, jnp.zeros_like(update))

    return jax.tree.map(settle, updates, params), state

  return optax.GradientTransformationExtraArgs(masked.init, update_fn)


def _check_range(
    name: str,
    value: chex.Numeric,
    low: float,
    high: float,
    *,
    open_end: bool = False,
) -> None:
  """Checks a concrete number; schedules' traced values cannot be checked."""
  dtype = getattr(value, 'dtype', None)
  if dtype in (jnp.bfloat16, jnp.float16):
    raise ValueError(
        f'{name} is {dtype}, in which 0.999 is 1. optax.inject_hyperparams'
        " casts numbers to the parameters' dtype: give it"
        ' hyperparam_dtype=jnp.float32.'
    )
  if isinstance(value, jax.core.Tracer):
    return
  if not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
    raise TypeError(f'{name}={value!r} must be a number.')
  number = float(value)
  if not (low <= number < high or (number == high and not open_end)):
    bracket = ')' if open_end or high == float('inf') else ']'
    raise ValueError(
        f'{name}={number} is not in [{low:g}, {high:g}{bracket}.'
    )


def _check_momentum(
    leaf: trees.Leaf, plan: LeafPlan, compressor: Compressor, workers: Workers
) -> None:
  expected = (workers.stacked_size, *plan.grid.coefficients_shape)
  found = leaf.momentum.shape
  if found == expected:
    return
  if found[1:] == expected[1:]:
    raise ValueError(
        f'The momentum of {leaf.name} is of {found[0]} workers, but {workers}'
        f' has {expected[0]}. Make the state with tx.init under the same'
        ' workers that update uses.'
    )
  raise ValueError(
      f'The momentum of {leaf.name} has shape {found}, but a gradient of shape'
      f' {leaf.gradient.shape} under {compressor} and {workers} needs'
      f' {expected}. Either the state was made for another compressor, or the'
      ' gradient is not one per worker: an averaged gradient must not reach the'
      ' exchange.'
  )
