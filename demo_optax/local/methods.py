"""Published methods as choices of the outer optimizer of `local_updates`."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from demo_optax import compressors
from demo_optax.compressors import Compressor, chunking
from demo_optax.demo import DeMoState, scale_by_demo
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.local.local_updates import Period, local_updates
from demo_optax.numerics.topk import Average
from demo_optax.per_worker import stays_finite
from demo_optax.workers import Spec, Workers, inside, lift

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
  r"""DiLoCo: averages pseudo-gradients, with Nesterov as the outer optimizer.

  .. math::
    G &= \mathrm{mean}_i (s - x_i) \\
    m &\leftarrow \mu m + G \\
    s &\leftarrow s - \eta\, (G + \mu m)

  It is `local_updates` with `scale_by_demo(full(), 0.0)` and `optax.sgd` as
  `outer`: a dense all-reduce every `sync_period` steps.

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
  return local_updates(inner or _ADAMW, outer, sync_period, workers=workers)


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
    exchange: ExchangeKind = 'all_gather',
    update_values: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""DeMo inside DiLoCo: sends the fast part of each worker's outer momentum.

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
  the :math:`s_i`, a dense all-reduce with each exchange. The default reached a
  lower loss wherever both were tried (benchmarks/README.md, "Every H steps").

  Other arguments are those of `diloco` and `scale_by_demo`; the compressor is
  `dct_topk()` by default, and `decay` is :math:`\beta`.

  References:
    Nedelkoski et al., `Distributed Low-Communication Training with Decoupled
    Momentum Optimization <https://arxiv.org/abs/2510.03371>`_, 2025.
  """
  compressor = compressors.dct_topk() if compressor is None else compressor
  shared = scale_by_demo(
      compressor, decay, workers=workers, average=average, exchange=exchange,
      update_values=update_values,
  )
  if drift:
    shared = _own_nesterov(shared, decay, workers)
  outer = optax.chain(shared, optax.scale_by_learning_rate(outer_learning_rate))
  return local_updates(
      inner or _ADAMW, outer, sync_period, workers=workers, drift=drift
  )


def sparse_loco(
    inner: optax.GradientTransformation | None = None,
    *,
    workers: Workers,
    compressor: Compressor | None = None,
    sync_period: Period = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 1.0,
    decay: chex.Numeric = 0.95,
    exchange: ExchangeKind = 'all_gather',
    update_values: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """SparseLoCo: sends the largest raw differences in few bits.

  As `demo_diloco`, with `average='workers'` and without a transform: by default
  64 of 4096 elements, 1.6 %, in four bits (published: two bits). The momentum
  is the error feedback :math:`e_i`.

  References:
    Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
  """
  if compressor is None:
    compressor = Compressor(
        compressors.TopK(64), compressors.Identity(), values='int4'
    )
  return demo_diloco(
      inner, workers=workers, compressor=compressor, sync_period=sync_period,
      outer_learning_rate=outer_learning_rate, decay=decay, average='workers',
      exchange=exchange, update_values=update_values,
  )


def _own_nesterov(
    exchange: optax.GradientTransformationExtraArgs,
    decay: chex.Numeric,
    workers: Workers,
) -> optax.GradientTransformationExtraArgs:
  """Makes each worker's Nesterov step from the update that all share."""

  def update_fn(
      updates: Any, state: DeMoState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, DeMoState]:
    shared, state = exchange.update(updates, state, params, **extra_args)
    momentum, state = inside.call_stacked(
        _put_back, workers, updates, state, None, shared, own_updates=True
    )
    finite = stays_finite(updates, (), ())
    return jax.tree.map(
        lambda g, m: jnp.where(finite, g, jnp.zeros_like(g)) + decay * m,
        updates, momentum,
    ), state

  return optax.GradientTransformationExtraArgs(exchange.init, update_fn)


def _put_back(
    updates: Any, state: DeMoState, params: Any, shared: Any, workers: Workers
) -> tuple[Any, DeMoState]:
  """Adds the shared update to momentum; returns momentum and the new state."""
  layout, group = state.layout.layout, workers.group
  flat, treedef = jax.tree.flatten(shared)

  def one_worker(
      own: dict[str, jax.Array], shared: dict[int, jax.Array]
  ) -> tuple[dict[int, jax.Array], dict[str, jax.Array]]:
    found: dict[int, jax.Array] = {}
    new: dict[str, jax.Array] = {}
    for number, bucket in enumerate(layout.buckets):
      axes, transformed = bucket.split_axes, bucket.kind == 'chunks'
      q = layout.fill(number, shared, group.device_index(axes))
      if transformed:
        q = chunking.transform(q, bucket.sides, bucket.basis)
      x = own[bucket.name].reshape(bucket.shape) + q
      new[bucket.name] = x.reshape(own[bucket.name].shape)
      if axes:
        x = group.join_devices(x[: bucket.num_chunks], axes)
      if transformed:
        x = chunking.inverse(x, bucket.sides, bucket.basis)
      found |= layout.cut(number, x)
    return found, new

  momentum = state.worker_stacked.momentum
  buckets = dict.fromkeys(momentum, workers.bucket_spec)
  inner = {i: layout.leaves[i].sharding.spec for i in layout.compressed}
  found, momentum = lift.run(
      workers,
      one_worker,
      (momentum, {i: flat[i] for i in inner}),
      (buckets, {i: Spec(False, spec) for i, spec in inner.items()}),
      ({i: Spec(True, spec) for i, spec in inner.items()}, buckets),
  )
  own = state.worker_stacked._replace(momentum=momentum)
  return (
      treedef.unflatten(found.get(i, x[None]) for i, x in enumerate(flat)),
      state._replace(worker_stacked=own),
  )
