r"""Local updates: workers train alone, and exchange what they moved.

Every worker has parameters of its own, stacked `[workers, ...]`. A period is

    x_i = start  --inner, sync_period times-->  x_i
        --start - x_i-->  pseudo-gradients [workers, ...]
        --outer, in which the exchange is-->  update of start
        -->  x_i = start

`outer` is a chain as it is used for gradients: an exchange, which makes one
update of the workers' pseudo-gradients, and a base optimizer behind it. What
distinguishes the published methods is the choice of these parts.

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

from demo_optax import _tree as trees
from demo_optax import compressors
from demo_optax import state as inspection
from demo_optax.compressors import Compressor
from demo_optax.demo import scale_by_demo
from demo_optax.engine.topk import Average
from demo_optax.workers import Workers
from demo_optax.workers import sharding as specs

_SIMULATED = 'demo_optax.Workers.simulated(4)'

# Steps between exchanges: a number, or a schedule of the steps done.
Period = int | Callable[[chex.Numeric], chex.Numeric]


class OwnState(NamedTuple):
  """What every worker has of its own, stacked `[workers, ...]`.

  Attributes:
    inner: state of the inner optimizer.
    skipped: int32 `[workers]`, steps that a worker left out because its
      gradient was not finite, or the step's result would not have been.
    start: its parameters after the last exchange, in the dtype of momentum,
      where workers drift; else `()`.
  """

  inner: chex.ArrayTree
  skipped: chex.Array
  start: chex.ArrayTree


class LocalUpdatesState(NamedTuple):
  """State of `local_updates`.

  Attributes:
    count: int32 `[]`, steps so far.
    since: int32 `[]`, how many of them since the last exchange.
    start: the shared parameters, of the last exchange, in their own shapes and
      the dtype of momentum (float32 for bfloat16); `()` where workers drift and
      nothing is shared.
    outer: state of the outer optimizer, which has the exchange in it.
    worker_stacked: what every worker has of its own.
  """

  count: chex.Array
  since: chex.Array
  start: chex.ArrayTree
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

  With the shared parameters :math:`s`, for worker :math:`i` with parameters
  :math:`x_i`, which are :math:`s` after each exchange:

  .. math::
    x_i &\leftarrow x_i + \mathrm{inner}(g_i)
        \qquad \text{every step} \\
    G_i &= s - x_i \qquad \text{after } H \text{ steps} \\
    s   &\leftarrow s + \mathrm{outer}(G_1, \dots, G_N) \\
    x_i &\leftarrow s

  It is a transformation of stacked gradients and stacked parameters
  (`stack_params`), `[workers, ...]` both, to stacked updates. Take gradients
  with `value_and_grad(..., stacked_params=True)`, which communicates nothing.
  `shared_params` gives :math:`s`, for evaluation. Anything that maps stacked
  gradients to updates in the parameters' shapes is an `outer`:
  `optax.chain(scale_by_demo(...), optax.sgd(0.7))`.

  :math:`s` is the same on all workers to the last bit. `optax.apply_updates`
  (and so `nnx.Optimizer`) adds :math:`s - x_i` to :math:`x_i`, which is
  :math:`s` to rounding; `settle_params` makes it :math:`s` to the bit. Nothing
  builds up without it: pseudo-gradients are differences to :math:`s` itself.

  A step is left out by its worker alone, with its inner state as it was, if its
  gradient is not finite, or if it would make parameters or inner state that are
  not; `state.worker_stacked.skipped` counts.

  Args:
    inner: each worker's own optimizer. All begin with the same state, random
      keys included; extra arguments of `update` are the same for all workers,
      and for `outer`.
    outer: from pseudo-gradients to the update of the shared parameters. One
      that is late (`delay=1`) applies what the period before has found, and
      drops what the workers did in this one: with momentum it diverges easily.
    sync_period: :math:`H`, at least 1: a number, or a schedule of the steps
      done. The exchange is after step :math:`t` if at least :math:`H(t)` steps
      were made since the last one.
    workers: who takes part: `Workers.simulated` or `Workers.on_mesh`.
    drift: `outer` returns stacked updates, another one for every worker;
      :math:`s` is then each worker's own.

  Returns:
    A gradient transformation from stacked gradients to stacked updates.

  Raises:
    ValueError: `sync_period` below 1, at once; parameters that are not stacked,
      an `outer` without an exchange (or, with `drift`, with equal updates), no
      `params`: when traced.
    TypeError: `workers` or `sync_period` is something else; `Workers.on_axis`.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> outer = optax.chain(
    ...     demo_optax.mean_over_workers(workers=workers), optax.sgd(1.0))
    >>> tx = demo_optax.local_updates(
    ...     optax.sgd(1.0), outer, sync_period=2, workers=workers)
    >>> params = demo_optax.stack_params(jnp.zeros(1), workers)
    >>> state = tx.init(params)
    >>> for step in range(2):
    ...   gradients = jnp.array([[1.0], [3.0]])
    ...   updates, state = tx.update(gradients, state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   print(params.ravel())  # apart, and again together
    [-1. -3.]
    [-4. -4.]

  References:
    Douillard et al., `DiLoCo: Distributed Low-Communication Training of
    Language Models <https://arxiv.org/abs/2311.08105>`_, Algorithm 1.
  """
  _check_workers(workers)
  _check_period(sync_period)
  inner = optax.with_extra_args_support(inner)
  outer = optax.with_extra_args_support(outer)

  def init_fn(params: chex.ArrayTree) -> LocalUpdatesState:
    own = _exchanged(_checked(params, workers))
    start = workers.device_put(jax.tree.map(workers.first, own))
    inner_state = jax.tree.map(workers.stack, inner.init(start))
    start = jax.tree.map(jnp.copy, _in_momentum_dtype(start))
    count, since = (  # two arrays, which can be donated
        workers.device_put(jnp.zeros((), jnp.int32)) for _ in range(2)
    )
    return LocalUpdatesState(
        count=count,
        since=since,
        start=() if drift else start,
        outer=outer.init(start),
        worker_stacked=OwnState(
            inner_state,
            workers.stack(jnp.zeros((), jnp.int32)),
            jax.tree.map(jnp.copy, _in_momentum_dtype(own)) if drift else (),
        ),
    )

  def update_fn(
      updates: chex.ArrayTree,
      state: LocalUpdatesState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, LocalUpdatesState]:
    if params is None:
      raise ValueError(
          'local_updates needs params: tx.update(grads, state, params).'
      )
    own = _exchanged(_checked(params, workers))
    _check_gradients(updates, params)
    steps, inner_state, skipped = _inner_step(
        inner, _exchanged(updates), state.worker_stacked, own, extra_args,
        workers,
    )
    since = state.since + 1
    period = sync_period(state.count) if callable(sync_period) else sync_period
    due = jnp.logical_not(since < period)  # NaN is due, too

    def exchange(_: None) -> Any:
      moved = optax.apply_updates(own, steps)
      start = state.worker_stacked.start if drift else state.start
      pseudo = _difference(there(start), moved)
      change, outer_state = outer.update(
          pseudo, state.outer, None if drift else start, **extra_args
      )
      _check_change(change, start, drift)
      start = jax.tree.map(_add, start, change)
      outer_state = _like(outer_state, state.outer)
      return _subtract(there(start), own), start, outer_state

    def there(start: chex.ArrayTree) -> chex.ArrayTree:
      """What all workers' parameters are at `start`, stacked."""
      cast = jax.tree.map(lambda s, x: s.astype(x.dtype), start, own)
      return cast if drift else jax.tree.map(workers.stack, cast)

    def wait(_: None) -> Any:
      start = state.worker_stacked.start if drift else state.start
      return steps, start, state.outer

    moves, start, outer_state = jax.lax.cond(due, exchange, wait, None)
    new = workers.constrain(LocalUpdatesState(
        count=optax.safe_increment(state.count),
        since=jnp.where(due, 0, since).astype(jnp.int32),
        start=() if drift else start,
        outer=outer_state,
        worker_stacked=OwnState(inner_state, skipped, start if drift else ()),
    ))
    moves = workers.constrain({'worker_stacked': moves})['worker_stacked']
    return _with_zeros(moves, params), new

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def diloco(
    inner: optax.GradientTransformation | None = None,
    *,
    workers: Workers,
    sync_period: Period = 128,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  r"""DiLoCo: pseudo-gradients are averaged, the outer optimizer is Nesterov's.

  .. math::
    G &= \mathrm{mean}_i (s - x_i) \\
    m &\leftarrow \mu m + G \\
    s &\leftarrow s - \eta\, (G + \mu m)

  It is `local_updates` with `scale_by_demo(full(), 0.0)` and `optax.sgd` as
  outer optimizer: a dense all-reduce every `sync_period` steps.

  Args:
    inner: each worker's optimizer; by default AdamW with a learning rate of
      4e-4, decays 0.9 and 0.95 and weight decay 0.1.
    workers: who takes part.
    sync_period: steps between exchanges, or a schedule of them.
    outer_learning_rate: :math:`\eta`, a number or a schedule of exchanges; 0.7
      is published, with few exchanges less was better.
    outer_momentum: :math:`\mu`.

  Returns:
    A gradient transformation from stacked gradients `[workers, ...]` to stacked
    updates; see `local_updates`.

  Raises:
    ValueError: as `local_updates`.
    TypeError: as `local_updates`.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.diloco(
    ...     optax.sgd(0.5), workers=workers, sync_period=10)
    >>> params = demo_optax.stack_params({'w': jnp.ones((8, 8))}, workers)
    >>> loss = lambda params, x: jnp.mean((x @ params['w']) ** 2)
    >>> grad = demo_optax.value_and_grad(
    ...     loss, workers=workers, stacked_params=True)
    >>> state = tx.init(params)
    >>> for step in range(20):
    ...   values, gradients = grad(params, jnp.eye(8))
    ...   updates, state = tx.update(gradients, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> print(values.shape, float(values.mean()) < 0.9)
    (4,) True

  References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, Algorithm 1.
  """
  outer = optax.chain(
      scale_by_demo(compressors.full(), 0.0, workers=workers),
      optax.sgd(outer_learning_rate, outer_momentum, nesterov=True),
  )
  return local_updates(_inner(inner), outer, sync_period, workers=workers)


def demo_diloco(
    inner: optax.GradientTransformation | None = None,
    *,
    workers: Workers,
    compressor: Compressor | None = None,
    sync_period: Period = 128,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    decay: chex.Numeric = 0.95,
    average: Average = 'senders',
    drift: bool = False,
    delay: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""DeMo inside DiLoCo: of the momentum of differences the fast part is sent.

  `drift=True` is the published method. The default keeps the parameters of all
  workers equal, and ended at a lower loss wherever both were tried
  (benchmarks/README.md, "Every H steps").

  With :math:`G_i = s - x_i`,

  .. math::
    m_i &\leftarrow \beta m_i + G_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - T^{-1} q_i \\
    Q   &= T^{-1}\, \mathrm{average}_i(q_i)

  By default what is shared is all that moves the parameters,

  .. math::
    s \leftarrow s - \eta\, Q, \qquad x_i \leftarrow s,

  and :math:`m_i` is an error feedback: all workers have the same parameters
  after each exchange. `drift=True` is the published method. What is shared goes
  back into each worker's momentum, and a Nesterov step is made with the
  worker's own difference and momentum,

  .. math::
    m_i &\leftarrow m_i + Q \\
    x_i &\leftarrow s_i - \eta\, (G_i + \beta m_i), \qquad s_i \leftarrow x_i,

  so that workers part slowly, and stay together no more than their momentum
  holds them.

  Args:
    inner: as for `diloco`.
    workers: who takes part.
    compressor: what is sent; `dct_topk()` by default.
    sync_period: steps between exchanges, or a schedule of them.
    outer_learning_rate: :math:`\eta`, a number or a schedule of exchanges.
    decay: :math:`\beta`.
    average: as in `scale_by_demo`.
    drift: as published.
    delay: as in `scale_by_demo`, counted in exchanges: with 1 what one exchange
      sends is applied by the next, a period later, and what the workers did in
      between is dropped.

  Returns:
    A gradient transformation; see `local_updates` for what it takes.

  Raises:
    ValueError: as `local_updates` and `scale_by_demo`.
    TypeError: as `local_updates` and `scale_by_demo`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> compressor = demo_optax.dct_topk(topk=8)
    >>> tx = demo_optax.demo_diloco(
    ...     workers=workers, compressor=compressor, sync_period=100)
    >>> params = {'w': jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    >>> plan = demo_optax.plan(params, compressor, workers)
    >>> sent, received = plan.per_step(100)
    >>> print(f'{sent:.1f} B per step; DiLoCo: {plan.dense_bytes() / 100:.1f}')
    109.9 B per step; DiLoCo: 62914.6

  References:
    Nedelkoski et al., `Distributed Low-Communication Training with Decoupled
    Momentum Optimization <https://arxiv.org/abs/2510.03371>`_, 2025.
  """
  compressor = compressors.dct_topk() if compressor is None else compressor
  exchange = scale_by_demo(
      compressor, decay, workers=workers, average=average, delay=delay
  )
  if drift:
    exchange = _own_nesterov(exchange, compressor, decay, workers)
  outer = optax.chain(
      exchange, optax.scale_by_learning_rate(outer_learning_rate)
  )
  return local_updates(
      _inner(inner), outer, sync_period, workers=workers, drift=drift
  )


def sparse_loco(
    inner: optax.GradientTransformation | None = None,
    *,
    workers: Workers,
    compressor: Compressor | None = None,
    sync_period: Period = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 1.0,
    decay: chex.Numeric = 0.95,
) -> optax.GradientTransformationExtraArgs:
  r"""SparseLoCo: the largest raw differences, in few bits, error feedback.

  .. math::
    e_i &\leftarrow \beta e_i + (s - x_i) \\
    q_i &= \mathrm{quantised}(\mathrm{top}_k(e_i)) \\
    e_i &\leftarrow e_i - q_i \\
    s   &\leftarrow s - \eta\, \tfrac1N \textstyle\sum_i q_i

  It is `local_updates` with `scale_by_demo(identity_topk(...),
  average='workers')` and `optax.sgd`.

  Args:
    inner: as for `diloco`.
    workers: who takes part.
    compressor: what is sent; by default `identity_topk(64, 64, values='int4')`:
      64 of 4096 elements, 1.6 %, of four bits (published: two bits).
    sync_period: steps between exchanges, or a schedule of them.
    outer_learning_rate: :math:`\eta`, a number or a schedule of exchanges.
    decay: :math:`\beta`.

  Returns:
    A gradient transformation; see `local_updates` for what it takes.

  Raises:
    ValueError: as `local_updates` and `scale_by_demo`.
    TypeError: as `local_updates` and `scale_by_demo`.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.sparse_loco(
    ...     optax.sgd(1.0), workers=workers, sync_period=1,
    ...     compressor=demo_optax.identity_topk(topk=1))
    >>> params = demo_optax.stack_params(jnp.zeros(4), workers)
    >>> gradients = jnp.array([[1.0, 8.0, 2.0, 0.0], [4.0, 0.0, 2.0, 0.0]])
    >>> updates, state = tx.update(gradients, tx.init(params), params)
    >>> print(demo_optax.shared_params(params, state, workers))
    [-2. -4.  0.  0.]

  References:
    Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
  """
  if compressor is None:
    compressor = compressors.identity_topk(64, 64, values='int4')
  outer = optax.chain(
      scale_by_demo(compressor, decay, workers=workers, average='workers'),
      optax.scale_by_learning_rate(outer_learning_rate),
  )
  return local_updates(_inner(inner), outer, sync_period, workers=workers)


def _inner(
    inner: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
  if inner is not None:
    return inner
  return optax.adamw(4e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def _own_nesterov(
    exchange: optax.GradientTransformationExtraArgs,
    compressor: Compressor,
    decay: chex.Numeric,
    workers: Workers,
) -> optax.GradientTransformationExtraArgs:
  """What is shared goes back into the momentum, whose step is the worker's own.

  From stacked gradients to stacked updates.
  """

  def update_fn(
      updates: chex.ArrayTree,
      state: chex.ArrayTree,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
    shared, state = exchange.update(updates, state, params, **extra_args)
    kept = inspection.momentum(state, shared, compressor, workers)
    momentum = jax.tree.map(lambda m, q: m + q[None], kept, shared)
    state = inspection.with_momentum(state, momentum, compressor, workers)
    present = workers.all_finite(jax.tree.leaves(updates))

    def step(g: jax.Array, m: jax.Array) -> jax.Array:
      mask = present.reshape(-1, *(1,) * (g.ndim - 1))
      return jnp.where(mask, g, jnp.zeros_like(g)) + decay * m

    return jax.tree.map(step, updates, momentum), state

  return optax.GradientTransformationExtraArgs(exchange.init, update_fn)


# Stacked parameters -----------------------------------------------------------


def stack_params(params: chex.ArrayTree, workers: Workers) -> chex.ArrayTree:
  """A copy of the parameters for every worker, each at its worker.

  Args:
    params: parameters, or the `nnx.state(model, nnx.Param)` of a module, which
      `nnx.update(model, ...)` puts back.
    workers: who takes part.

  Returns:
    A tree like `params`, leaves `[workers, ...]`.

  Raises:
    TypeError: `workers` is something else, or `Workers.on_axis`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(4)
    >>> demo_optax.stack_params({'w': jnp.ones((2, 3))}, workers)['w'].shape
    (4, 2, 3)

  References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, Algorithm 1:
    every worker begins with the shared parameters.
  """
  _check_workers(workers)
  return jax.tree.map(workers.stack, params)


def shared_params(
    params: chex.ArrayTree, opt_state: chex.ArrayTree, workers: Workers
) -> chex.ArrayTree:
  """The parameters that the workers share: those of the last exchange.

  For evaluation, and to be kept when training is over.

  Args:
    params: the stacked parameters `[workers, ...]`; of an `nnx.Optimizer`,
      `nnx.state(model, nnx.Param)`.
    opt_state: any optimizer state that holds the state of `local_updates`.
    workers: who takes part.

  Returns:
    A tree like `params` without the worker axis. Where workers drift, the mean
    over the workers of what they started from after the last exchange, which
    communicates; leaves that take no part in exchanges are worker 0's.

  Raises:
    ValueError: there is no state of `local_updates` in `opt_state`, or of other
      parameters.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.diloco(workers=workers)
    >>> params = demo_optax.stack_params({'w': jnp.ones((2, 3))}, workers)
    >>> state = tx.init(params)
    >>> demo_optax.shared_params(params, state, workers)['w'].shape
    (2, 3)

  References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, Algorithm 1.
  """

  def shared(x: jax.Array, start: Any, own: Any) -> jax.Array:
    if start is not None:
      return jnp.copy(start.astype(x.dtype))  # not the state's own array
    if own is not None:
      return jnp.mean(own, axis=0).astype(x.dtype)
    return workers.first(x)

  return _with_starts(shared, params, opt_state)


def settle_params(
    params: chex.ArrayTree, opt_state: chex.ArrayTree, workers: Workers
) -> chex.ArrayTree:
  """The stacked parameters, after an exchange the shared ones to the bit.

  `optax.apply_updates` and `nnx.Optimizer.update` get there to rounding.

  Args:
    params: the stacked parameters after `optax.apply_updates`.
    opt_state: the new optimizer state.
    workers: who takes part.

  Returns:
    A tree like `params`. Between exchanges it is `params`.

  Raises:
    ValueError: as `shared_params`.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.diloco(optax.sgd(0.1), workers=workers, sync_period=1)
    >>> params = demo_optax.stack_params(jnp.ones(3), workers)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(params, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> params = demo_optax.settle_params(params, state, workers)
    >>> shared = demo_optax.shared_params(params, state, workers)
    >>> bool((params == shared[None]).all())
    True

  References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, Algorithm 1.
  """
  since = _found(opt_state)[1]

  def settled(x: jax.Array, start: Any, own: Any) -> jax.Array:
    if start is not None:
      own = workers.stack(start.astype(x.dtype))
    if own is None:
      return x
    return jnp.where(since == 0, own.astype(x.dtype), x)

  return _with_starts(settled, params, opt_state)


def _with_starts(
    fun: Callable[[Any, Any, Any], Any],
    params: chex.ArrayTree,
    opt_state: chex.ArrayTree,
) -> chex.ArrayTree:
  """`fun(parameter, shared start or None, own start or None)` of all leaves."""
  starts, _ = _found(opt_state)

  def of(path: specs.Path, x: Any) -> Any:
    keys = specs.path_keys(path)
    shared = starts.get(('start', *keys))
    own = starts.get(('worker_stacked', 'start', *keys))
    if trees.is_exchanged(x) and shared is None and own is None:
      raise ValueError(
          f'opt_state has no start of {trees.leaf_name(path)}: it is of other'
          ' parameters.'
      )
    return fun(x, shared, own)

  return jax.tree_util.tree_map_with_path(of, params)


def _found(opt_state: chex.ArrayTree) -> tuple[dict[specs.Keys, Any], Any]:
  """What is in the state of `local_updates`, by path, and its `since`.

  Found by path, since Flax NNX stores states without their types.
  """
  flat = jax.tree_util.tree_flatten_with_path(opt_state)[0]
  by_path = {specs.path_keys(path): x for path, x in flat}
  skipped = ('worker_stacked', 'skipped')  # a parameter may be named since
  roots = [
      k[:-1] for k in by_path
      if k[-1:] == ('since',) and (*k[:-1], *skipped) in by_path
  ]
  if len(roots) != 1:
    raise ValueError(
        f'There are {len(roots)} states of demo_optax.local_updates in'
        ' opt_state, instead of one.'
    )
  (root,) = roots
  below = {
      k[len(root) :]: x for k, x in by_path.items() if k[: len(root)] == root
  }
  return below, below[('since',)]


# A step -----------------------------------------------------------------------


def _inner_step(
    inner: optax.GradientTransformationExtraArgs,
    gradients: chex.ArrayTree,
    own: OwnState,
    params: chex.ArrayTree,
    extra_args: dict[str, Any],
    workers: Workers,
) -> tuple[chex.ArrayTree, chex.ArrayTree, jax.Array]:
  """Every worker's own step: stacked updates, inner state, steps left out."""

  def one_worker(
      index: jax.Array, arrays: Any, state: Any, extra_args: dict[str, Any]
  ) -> tuple[Any, Any, tuple[()]]:
    del index
    gradients, params = arrays
    inner_state, skipped = state
    updates, new = inner.update(gradients, inner_state, params, **extra_args)
    updates, new = _like(updates, params), _like(new, inner_state)
    moved = optax.apply_updates(params, updates)
    finite = jnp.ones((), bool)
    for x in jax.tree.leaves((gradients, moved)):
      finite &= jnp.isfinite(x).all()
    for x, old in zip(jax.tree.leaves(new), jax.tree.leaves(inner_state)):
      if jnp.issubdtype(x.dtype, jnp.inexact):  # some begin with infinity
        finite &= (jnp.isfinite(x) | ~jnp.isfinite(old)).all()
    updates = jax.tree.map(
        lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates
    )
    new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, inner_state)
    skipped += jnp.where(finite, 0, 1).astype(jnp.int32)
    return updates, (new, skipped), ()

  trees.flatten_alike(gradients, params)  # an error where they differ
  updates, (inner_state, skipped), _ = workers.map(
      one_worker, (gradients, params), (own.inner, own.skipped), extra_args
  )
  return updates, inner_state, skipped


def _in_momentum_dtype(tree: chex.ArrayTree) -> chex.ArrayTree:
  """In which differences and sums lose nothing that a parameter would show."""

  def cast(path: specs.Path, x: jax.Array) -> jax.Array:
    return x.astype(trees.momentum_dtype(path, x))

  return jax.tree_util.tree_map_with_path(cast, tree)


def _difference(
    start: chex.ArrayTree, moved: chex.ArrayTree
) -> chex.ArrayTree:
  """Pseudo-gradients, stacked, in the dtype of momentum."""
  return _subtract(_in_momentum_dtype(start), _in_momentum_dtype(moved))


def _like(tree: chex.ArrayTree, before: chex.ArrayTree) -> chex.ArrayTree:
  """`tree` in the dtypes of `before`: branches must agree in them."""
  return jax.tree.map(
      lambda x, old: x.astype(old.dtype) if hasattr(old, 'dtype') else x,
      tree,
      before,
  )


def _add(x: jax.Array, update: jax.Array) -> jax.Array:
  """The sum, made in the update's dtype, in the parameter's."""
  return (x.astype(update.dtype) + update).astype(x.dtype)


def _subtract(a: chex.ArrayTree, b: chex.ArrayTree) -> chex.ArrayTree:
  return jax.tree.map(lambda x, y: x - y, a, b)


def _exchanged(tree: chex.ArrayTree) -> chex.ArrayTree:
  """`tree` with `optax.MaskedNode()` for leaves that take no part."""
  return trees.map_exchanged(lambda path, x: x, tree)


def _with_zeros(
    updates: chex.ArrayTree, params: chex.ArrayTree
) -> chex.ArrayTree:
  """Zero updates for the leaves of `params` that take no part."""
  leaves, treedef = jax.tree.flatten(params)
  new = treedef.flatten_up_to(updates)
  return treedef.unflatten([
      jnp.zeros_like(x) if isinstance(u, optax.MaskedNode) else u
      for x, u in zip(leaves, new)
  ])


# Checks -----------------------------------------------------------------------


def _check_workers(workers: Workers) -> None:
  trees.check_type('workers', workers, Workers, _SIMULATED)
  if not workers.stacked_gradients:
    raise TypeError(
        f'{workers} has no stacked parameters: local updates need'
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


def _checked(params: chex.ArrayTree, workers: Workers) -> chex.ArrayTree:
  """`params`, if they are stacked."""
  for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    shape = jnp.shape(x)
    if shape[:1] != (workers.count,):
      raise ValueError(
          f'The parameter {trees.leaf_name(path)} has shape {shape}, but'
          f' {workers} needs ({workers.count}, ...): one copy per worker. Give'
          ' demo_optax.stack_params(params, workers) to init and to update.'
      )
  return params


def _check_gradients(
    gradients: chex.ArrayTree, params: chex.ArrayTree
) -> None:
  flat, (like,) = trees.flatten_alike(gradients, params)
  for (path, gradient), x in zip(flat, like):
    if jnp.shape(gradient) != jnp.shape(x):
      raise ValueError(
          f'The gradient of {trees.leaf_name(path)} has shape'
          f' {jnp.shape(gradient)}, but the stacked parameter {jnp.shape(x)}:'
          ' take gradients with demo_optax.value_and_grad(loss_fn, workers='
          'workers, stacked_params=True).'
      )


def _check_change(
    change: chex.ArrayTree, start: chex.ArrayTree, drift: bool
) -> None:
  flat, (like,) = trees.flatten_alike(change, start)
  for (path, update), x in zip(flat, like):
    if jnp.shape(update) == jnp.shape(x):
      continue
    why = (
        'with drift=True it must be one update for every worker'
        if drift
        else 'is there an exchange in it, such as scale_by_demo?'
    )
    raise ValueError(
        f'The outer optimizer made an update of shape {jnp.shape(update)} for'
        f' {trees.leaf_name(path)}, and {jnp.shape(x)} is needed: {why}'
    )
