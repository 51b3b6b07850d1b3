"""The recipes: `demo` as published, and `demo_muon` with local Muon."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from demo_optax import _checks, _tree, compressors
from demo_optax._per_worker import of_each
from demo_optax.compressors.compressor import CompressorTree, Frozen, per_leaf
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.recipes import links, matrices
from demo_optax.recipes.matrices import DimensionNumbersTree
from demo_optax.transformation import scale_by_demo
from demo_optax.workers import Workers, checks


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

  It chains `scale_by_demo`, `optax.scale_by_sign`, `optax.add_decayed_weights`
  and `optax.scale_by_learning_rate`, masked to the exchanged leaves. For other
  options write that chain.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.demo(1e-3, workers=workers)
    >>> params = {'w': jnp.zeros((8, 8))}
    >>> gradients = {'w': jnp.ones((2, 8, 8))}
    >>> updates, _ = tx.update(gradients, tx.init(params), params)
    >>> print(updates['w'].min(), updates['w'].max())
    -0.001 -0.001

  The exchange has the weight :math:`w = \eta_t`; then

  .. math::
    x \leftarrow x - \eta_t \lambda x - \eta_t\, \mathrm{sign}(u)

  A step that excludes every worker does not change the parameters, not even by
  weight decay.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule.
    workers: as in `scale_by_demo`.
    compressor: as in `scale_by_demo`.
    decay: :math:`\beta`, in `[0, 1)`. 0.999 is the paper's; short runs and
      small `topk` need less (0.99).
    weight_decay: :math:`\lambda`, decoupled.
    weight_decay_mask: as in `optax.add_decayed_weights`.
    exchange: as in `scale_by_demo`. Only updates' signs matter:
      `'all_to_all'` changes no bit of the parameters.

  Raises:
    ValueError: a hyperparameter out of range, and as `scale_by_demo`.

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870v1>`_, version 1, Algorithm 1.
  """
  descent = _descent(
    learning_rate,
    weight_decay,
    mask=weight_decay_mask,
  )
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


# The largest coefficients in every row.
_ROWS = compressors.dct_topk((1, 192), 8, values='sign', proportional=False)


def muon_compressors(
  params: chex.ArrayTree,
  matrix: compressors.Compressor | Frozen | None = compressors.cyclic_signs(),  # noqa: B008
  other: compressors.Compressor | Frozen | None = _ROWS,
  *,
  muon_weight_dimension_numbers: DimensionNumbersTree = None,
) -> chex.ArrayTree:
  """Returns `demo_muon`'s default compressors, a tree like `params`.

  Matrices send signs of a quarter of their elements, by turns. Other leaves
  send the 8 largest coefficients in every row of up to 192, as signs with a
  scale.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> params = {'up': jnp.zeros((64, 64)), 'norm': jnp.zeros(64)}
    >>> found = demo_optax.recipes.muon_compressors(params)
    >>> found['up'].period, found['norm'].select.k
    (4, 8)

  Args:
    params: parameters, or their shapes.
    matrix: for matrices. No chunk has parts from two of them.
    other: for other leaves.
    muon_weight_dimension_numbers: as in `demo_muon`.
  """
  axes = matrices.matrices(params, muon_weight_dimension_numbers)
  chosen = []
  for sides in axes.values():
    if sides is None:
      chosen.append(other)
    elif isinstance(matrix, compressors.Compressor):
      # A matrix without gradients would move with others in its chunk.
      batch_dims = min(map(min, sides))
      chosen.append(dataclasses.replace(matrix, batch_dims=batch_dims))
    else:  # None, or FROZEN
      chosen.append(matrix)
  return jax.tree.structure(params).unflatten(chosen)


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
) -> optax.GradientTransformationExtraArgs:
  r"""Makes Muon whose momentum each worker orthonormalises, then compresses.

  It chains `per_worker` around Muon, `scale_by_demo`, `links.scale_to_muon`
  (`optax.scale_by_rms` for leaves that are no matrices),
  `optax.add_decayed_weights` and `optax.scale_by_learning_rate`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.demo_muon(2e-2, workers=workers)
    >>> state = tx.init({'up': jnp.zeros((8, 8)), 'bias': jnp.zeros(8)})

  For a matrix, with worker :math:`i`'s gradient :math:`g_i` and momentum
  :math:`b_i`:

  .. math::
    b_i &\leftarrow \beta b_i + (1 - \beta) g_i \\
    o_i &= \mathrm{NewtonSchulz}(\beta b_i + (1 - \beta) g_i) \\
    q_i &= \mathrm{mean}|o_i|\, \mathrm{sign}(o_i)
           \text{ in the part whose turn it is, else } 0 \\
    u   &= \mathrm{average}_i(q_i) \\
    x   &\leftarrow x - \eta_t \lambda x - \eta_t\, r\, u / \mathrm{rms}(u)

  The average is over valid workers, the mean over the part in a chunk of 64x64;
  for :math:`r` see `links.scale_to_muon`. Other leaves, and matrices with a
  compressor that has error feedback, keep what is not sent in a residual, as
  `scale_by_demo` does.

  Args:
    learning_rate: :math:`\eta_t`, as for `optax.contrib.muon`; start at 2e-2.
    workers: as in `scale_by_demo`.
    compressor: as there; by default `muon_compressors(params)`.
    decay: of residuals, in `[0, 1)`.
    beta: :math:`\beta`, in `[0, 1)`.
    mu_dtype: for :math:`b_i`, float32 by default.
    other_learning_rate: for other leaves, by default `learning_rate`.
    other_weight_decay: :math:`\lambda` for other leaves.
    weight_decay: :math:`\lambda` for matrices.
    muon_weight_dimension_numbers: matrices' axes, as in `optax.contrib.muon`;
      by default `muon_dimension_numbers`.
    consistent_rms: as in `optax.contrib.muon`: 0.2 for AdamW's rates.
    exchange: as in `scale_by_demo`.
    update_values: as there.

  Raises:
    ValueError, TypeError: a hyperparameter out of range.

  References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024.
  """
  _checks.check_range('decay', decay, '[0, 1)')
  _checks.check_range('beta', beta, '[0, 1)')
  if consistent_rms is not None:
    _checks.check_range('consistent_rms', consistent_rms, '[0, inf)')
  if mu_dtype is not None and jnp.finfo(mu_dtype).maxexp < 128:
    raise TypeError(
      f'mu_dtype must have the range of float32, got {mu_dtype!r}. Use'
      ' jnp.bfloat16.'
    )
  if other_learning_rate is None:
    other_learning_rate = learning_rate
  gradient_weight = links.lost_unless_finite(
    1 - decay,
    learning_rate,
    other_learning_rate,
    weight_decay,
    other_weight_decay,
    consistent_rms,
  )
  exchange_by = functools.partial(
    scale_by_demo,
    decay=decay,
    workers=workers,
    average='workers',
    exchange=exchange,
    update_values=update_values,
    gradient_weight=gradient_weight,
  )
  exchange_by(compressor)  # raises if it cannot be made
  descent = _descent(learning_rate, weight_decay)
  other_descent = _descent(other_learning_rate, other_weight_decay, 'other_')

  def chain_for(
    params: chex.ArrayTree,
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the chain for these parameters, whose names sort the leaves."""
    # By path: links may see a part of the leaves.
    axes = matrices.matrices(params, muon_weight_dimension_numbers)
    axes_tree = matrices.tree_of(axes)
    given = compressor
    if given is None:
      given = muon_compressors(params, muon_weight_dimension_numbers=axes_tree)
    codes = dict(zip(axes, per_leaf(given, params)))
    labels, is_moved = {}, {}
    for path, code in codes.items():
      labels[path] = 'matrix' if axes[path] else 'other'
      if isinstance(code, Frozen):
        labels[path] = 'frozen'
      is_moved[path] = labels[path] != 'frozen'
    sent = matrices.tree_of(codes)
    orthonormalised = links.own_muon(beta, mu_dtype, axes, workers)
    # Frozen matrices need no momentum.
    orthonormalised = optax.masked(orthonormalised, matrices.tree_of(is_moved))
    # Sparse updates are shorter than what was orthonormalised.
    to_size = links.scale_to_muon(axes, codes, decay, consistent_rms)
    after = optax.partition(
      {
        'matrix': optax.chain(to_size, *descent),
        'other': optax.chain(_SECOND_MOMENT, *other_descent),
        'frozen': optax.set_to_zero(),
      },
      matrices.tree_of(labels),
    )
    return links.chain(
      workers,
      sent,
      of_each(orthonormalised, workers),
      exchange_by(sent),
      after,
    )

  return _made_from_params(chain_for, workers)


# Without a first moment, which would be a third copy of its leaves.
_SECOND_MOMENT = optax.scale_by_rms(
  0.95,
  eps=1e-8,
  eps_in_sqrt=False,
  bias_correction=True,
)


def _made_from_params(
  make: Callable[[chex.ArrayTree], optax.GradientTransformationExtraArgs],
  workers: Workers,
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that is made again from the parameters."""

  def init_fn(params: chex.ArrayTree) -> optax.OptState:
    # All links have states in the momentum's dtype.
    wide = _tree.map_wide(jnp.zeros_like, params)
    return make(_tree.without_variables(params)).init(wide)

  def update(
    updates: chex.ArrayTree,
    state: optax.OptState,
    params: chex.ArrayTree | None,
    **extra_args: Any,
  ) -> tuple[chex.ArrayTree, optax.OptState]:
    _, like = checks.params_and_like(updates, params, workers)
    # optax raises a float to an integer count.
    with jax.numpy_dtype_promotion('standard'):
      return make(like).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(
    init_fn,
    functools.partial(_tree.update_without_variables, update),
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
