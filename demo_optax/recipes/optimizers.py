"""The recipes: `demo` as published, and `demo_muon` with local Muon."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from demo_optax import _checks, _tree, compressors
from demo_optax._paths import leaves_of
from demo_optax._per_worker import of_each, per_worker
from demo_optax.compressors.compressor import CompressorTree, Frozen, per_leaf
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.recipes import links, matrices
from demo_optax.recipes.matrices import DimensionNumbersTree
from demo_optax.transformation import scale_by_demo
from demo_optax.workers import Workers, checks

# Updates with a gradient were above 1e-4 in all models tried; a residual
# without one loses a tenth per step.
_MIN_RMS = 1e-8


def demo(
  learning_rate: optax.ScalarOrSchedule,
  *,
  workers: Workers,
  compressor: CompressorTree = compressors.dct_topk(),  # noqa: B008
  decay: chex.Numeric = 0.999,
  weight_decay: chex.Numeric = 0.0,
  weight_decay_mask: Any = None,
  exchange: ExchangeKind = 'all_gather',
) -> optax.GradientTransformationExtraArgs:
  r"""Makes DeMo as published, first version: signs, the rate in the momentum.

  The exchange of `scale_by_demo` with :math:`w = \eta_t`, then

  .. math::
    x \leftarrow x - \eta_t \lambda x - \eta_t\, \mathrm{sign}(u)

  It chains `scale_by_demo`, `optax.scale_by_sign`, `optax.add_decayed_weights`
  and `optax.scale_by_learning_rate`, masked to the exchanged leaves. A step
  that excludes every worker does not change the parameters, not even by weight
  decay. For other options write that chain. `data_parallel` has an example.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule of the step.
    workers: as in `scale_by_demo`.
    compressor: as in `scale_by_demo`.
    decay: :math:`\beta`, in `[0, 1)`. 0.999 is the paper's; short runs and
      small `topk` need less (0.99).
    weight_decay: :math:`\lambda`, decoupled.
    weight_decay_mask: as in `optax.add_decayed_weights`.
    exchange: as in `scale_by_demo`. Only signs of updates matter:
      `'all_to_all'` changes no bit of the parameters.

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870v1>`_, version 1, Algorithm 1.
  """
  descent = _descent(learning_rate, weight_decay, mask=weight_decay_mask)
  return links.chain(
    workers,
    compressor,
    scale_by_demo(
      compressor,
      decay,
      workers=workers,
      exchange=exchange,
      update_values='ternary',
      gradient_weight=links.lost_unless_finite(learning_rate, weight_decay),
    ),
    optax.scale_by_sign(),
    *descent,
  )


def muon_compressors(
  params: chex.ArrayTree,
  topk: int = 64,
  row_topk: int = 8,
  *,
  muon_weight_dimension_numbers: DimensionNumbersTree = None,
) -> chex.ArrayTree:
  """Returns the default compressors of `demo_muon`, a tree like `params`.

  Matrices send the `topk` largest coefficients of chunks of 64x64, each of one
  matrix, and in proportion of smaller ones. Other leaves send `row_topk` of
  every row of up to 192. All send signs with a scale.
  """
  # `dct_topk` would call it `topk`.
  _checks.check_positive('row_topk', row_topk)
  matrix = compressors.dct_topk(64, topk, values='sign')
  other = compressors.dct_topk(
    (1, 192), row_topk, values='sign', proportional=False
  )

  def compressor_of(dimensions: Any) -> compressors.Compressor:
    if dimensions is None:
      return other
    # A matrix without gradients would move with others in its chunk.
    return dataclasses.replace(matrix, batch_dims=min(map(min, dimensions)))

  axes = matrices.matrices(params, muon_weight_dimension_numbers)
  return jax.tree.structure(params).unflatten(map(compressor_of, axes.values()))


def demo_muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  workers: Workers,
  compressor: CompressorTree = None,
  decay: chex.Numeric = 0.9,
  beta: chex.Numeric = 0.95,
  mu_dtype: chex.ArrayDType | None = None,
  other_learning_rate: optax.ScalarOrSchedule | None = None,
  other_weight_decay: chex.Numeric = 0.0,
  weight_decay: chex.Numeric = 0.0,
  muon_weight_dimension_numbers: DimensionNumbersTree = None,
  consistent_rms: chex.Numeric | None = None,
  exchange: ExchangeKind = 'all_gather',
  update_values: str = 'int4',
  delayed: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Makes Muon whose momentum each worker orthonormalises, then compresses.

  For a matrix, with worker :math:`i`'s gradient :math:`g_i`, momentum
  :math:`b_i` and residual :math:`m_i`:

  .. math::
    b_i &\leftarrow \beta b_i + (1 - \beta) g_i \\
    m_i &\leftarrow \delta m_i + (1 - \delta)\,
           \mathrm{NewtonSchulz}(\beta b_i + (1 - \beta) g_i) \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - T^{-1} q_i \\
    u   &= T^{-1}\, \mathrm{average}_i(q_i) \\
    x   &\leftarrow x - \eta_t \lambda x - \eta_t\, r\, u / \mathrm{rms}(u)

  Where everything is sent, updates are as long as those of
  `optax.contrib.muon`: their root mean square :math:`r` is
  :math:`1 / \sqrt{\mathrm{fan\_in}}`, or `consistent_rms`. Where a share
  :math:`s` of the coefficients is sent and the others wait, it is that divided
  by :math:`\sqrt{1 - \delta (1 - s)}`.

  Both terms inside NewtonSchulz are corrected for a momentum that starts at
  zero, as in `optax.contrib.scale_by_muon`. The average is over all valid
  workers, including those that did not send a coefficient. Leaves that are not
  matrices skip Newton-Schulz; `optax.scale_by_rms` follows their exchange.

  It chains `per_worker` of Muon, `scale_by_demo`, `scale_to_unit_rms` with a
  scale or `optax.scale_by_rms`, `optax.add_decayed_weights` and
  `optax.scale_by_learning_rate`. Each worker keeps two arrays of the size of a
  matrix and one of every other leaf, whose second moments all workers share.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule of the step: that of
      `optax.contrib.muon`.
    workers: as in `scale_by_demo`.
    compressor: as in `scale_by_demo`; None for `muon_compressors(params)`. In a
      tree, `None` averages a leaf uncompressed.
    decay: :math:`\delta` of the residual, in `[0, 1)`.
    beta: :math:`\beta` of each worker's momentum, in `[0, 1)`.
    mu_dtype: dtype of :math:`b_i` between steps, float32 by default; with
      bfloat16 and one seed the loss was 0.6 % higher (benchmarks/TRIED.md).
    other_learning_rate: of leaves that are not matrices, by default
      `learning_rate`.
    other_weight_decay: :math:`\lambda` of leaves that are not matrices.
    weight_decay: :math:`\lambda` of matrices, decoupled.
    muon_weight_dimension_numbers: the axes of matrices: a tree like the
      parameters, as in `optax.contrib.muon`, or a function from them to one; by
      default `muon_dimension_numbers`. `describe_matrices` prints them. Pass
      the same to `muon_compressors`.
    consistent_rms: as in `optax.contrib.muon`: None for rates that fit every
      width, 0.2 for rates of AdamW.
    exchange: as in `scale_by_demo`.
    update_values: as in `scale_by_demo`.
    delayed: whether matrices that are compressed are exchanged one step late,
      beside the forward and backward pass, see `scale_by_demo`. Their updates
      become :math:`2 u_t - u_{t-1}` (`optax.scale_by_optimistic_gradient`, one
      more array of the size of a matrix): the last update predicts the missing
      one, and is repaired when that is known. Other leaves go at once, in a
      separate message.

  Note:
    Start at a rate of 2e-2. If a worker's gradient of a matrix is zero (an
    expert without tokens), it sends only its residual.
    Without any gradient a matrix moves for some 80 more steps.
    A worker is excluded, and keeps both momenta, if its gradient is not finite
    or so large (some 1e13) that its squares overflow. Undo loss scaling
    before. If every worker is excluded, or a hyperparameter is not finite,
    parameters do not change, nor do leaves with `compressors.FROZEN`. With
    `optax.inject_hyperparams`, name `mu_dtype` and functions that are not
    schedules in its `static_args`.

  References:
    Jordan et al., `Muon: An optimizer for hidden layers in neural networks
    <https://kellerjordan.github.io/posts/muon>`_, 2024.

    Zmushko et al., `One-Step Gradient Delay is Not a Barrier
    <https://arxiv.org/abs/2606.30634>`_, 2026, on `delayed`.
  """
  descent = _descent(learning_rate, weight_decay)
  if other_learning_rate is None:
    other_learning_rate = learning_rate
  other_descent = _descent(other_learning_rate, other_weight_decay, 'other_')
  _checks.check_range('decay', decay, '[0, 1)')
  _checks.check_range('beta', beta, '[0, 1)')
  if consistent_rms is not None:
    _checks.check_range('consistent_rms', consistent_rms, '[0, inf)')
  if mu_dtype is not None and jnp.finfo(mu_dtype).maxexp < 128:
    raise TypeError(
      f'mu_dtype must have the range of float32, got {mu_dtype!r}. Use'
      ' jnp.bfloat16.'
    )
  exchange_by = functools.partial(
    scale_by_demo,
    decay=decay,
    workers=workers,
    average='workers',
    exchange=exchange,
    update_values=update_values,
    gradient_weight=links.lost_unless_finite(
      1 - decay,
      learning_rate,
      other_learning_rate,
      weight_decay,
      other_weight_decay,
      consistent_rms,
    ),
  )
  exchange_by(compressor, delayed=delayed)  # raises if it cannot be made

  def chain_for(params: Any) -> optax.GradientTransformationExtraArgs:
    """Returns the chain for these parameters, whose names sort the leaves."""
    found = matrices.matrices(params, muon_weight_dimension_numbers)
    axes = matrices.tree_of(found)
    sent = compressor
    if compressor is None:
      sent = muon_compressors(params, muon_weight_dimension_numbers=axes)
    elif _tree.is_function(compressor):
      # Called once, with all leaves: `scale_by_demo` sees those exchanged.
      sent = compressor(params)
    codes = per_leaf(sent, params)
    labels, sizes, times, code_of = {}, {}, {}, {}
    for (path, x), code in zip(leaves_of(params), codes):
      code_of[path] = code
      labels[path] = 'other' if found[path] is None else 'muon'
      is_late = found[path] is not None and code is not None
      times[path] = 'late' if is_late else 'at once'
      if isinstance(code, Frozen):
        labels[path] = 'frozen'
      elif found[path] is not None:
        sizes[path] = links.muon_rms(
          jnp.shape(x), found[path], code, decay, consistent_rms
        )

    def by_label(
      muon: optax.GradientTransformation, other: optax.GradientTransformation
    ) -> optax.GradientTransformation:
      parts = {'muon': muon, 'other': other, 'frozen': optax.set_to_zero()}
      return optax.partition(parts, matrices.tree_of(labels))

    muon = links.own_muon(beta, mu_dtype, axes, workers)
    moves = {path: label != 'frozen' for path, label in labels.items()}
    muon = optax.masked(muon, matrices.tree_of(moves))
    # Without a first moment, which would be a third copy of its leaves.
    scale = optax.scale_by_rms(
      0.95, eps=1e-8, eps_in_sqrt=False, bias_correction=True
    )
    unit_rms = links.scale_to_unit_rms(axes, min_rms=_MIN_RMS)
    to_size = links.scale_each(matrices.tree_of(sizes))

    def exchanged(sent: CompressorTree, *, late: bool) -> list[Any]:
      # Predicts the missing update by the last one.
      ahead = [optax.scale_by_optimistic_gradient()] if late else []
      return [
        exchange_by(sent, delayed=late),
        by_label(
          optax.chain(unit_rms, to_size, *ahead, *descent),
          optax.chain(scale, *other_descent),
        ),
      ]

    if not delayed:
      own = of_each(muon, workers)
      return links.chain(workers, sent, own, *exchanged(sent, late=False))
    # Of several exchanges each must see that a worker is excluded.
    own = per_worker(muon, workers=workers)
    of_part = matrices.tree_of(code_of)
    parts = {}
    for name in ('late', 'at once'):
      part = exchanged(of_part, late=name == 'late')
      parts[name] = links.chain(workers, of_part, *part)
    of_time = optax.partition(parts, matrices.tree_of(times))
    return links.chain(workers, sent, own, of_time)

  def init_fn(params: chex.ArrayTree) -> Any:
    # All links have states in the momentum's dtype.
    wide = _tree.map_wide(jnp.zeros_like, params)
    return chain_for(_tree.without_variables(params)).init(wide)

  def update(
    updates: Any, state: Any, params: Any, **extra_args: Any
  ) -> tuple[Any, Any]:
    _, like = checks.params_and_like(updates, params, workers)
    chain = chain_for(like)
    # optax raises a float to an integer count.
    with jax.numpy_dtype_promotion('standard'):
      return chain.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(
    init_fn, functools.partial(_tree.update_without_variables, update)
  )


def _descent(
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: chex.Numeric,
  prefix: str = '',
  mask: Any = None,
) -> list[optax.GradientTransformation]:
  """Returns links from directions to updates, in the parameters' dtype."""
  # Arrays and schedules are unknown before the step.
  if isinstance(learning_rate, jax.Array):
    _checks.check_is_scalar(f'{prefix}learning_rate', learning_rate)
  elif not callable(learning_rate):
    _checks.check_range(f'{prefix}learning_rate', learning_rate, '[0, inf)')
  _checks.check_range(f'{prefix}weight_decay', weight_decay, '[0, inf)')
  cast = optax.stateless(
    lambda u, p: u if p is None else optax.tree.cast_like(u, p)
  )
  is_zero = isinstance(weight_decay, int | float) and not weight_decay
  decay = [] if is_zero else [optax.add_decayed_weights(weight_decay, mask)]
  return [cast, *decay, optax.scale_by_learning_rate(learning_rate)]
