r"""Optimizers in one line: chains of optax around the exchange."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from demo_optax import _checks, _tree, compressors
from demo_optax.compressors.compressor import (
  CompressorTree,
  broadcast,
  is_function,
  per_leaf,
)
from demo_optax.demo import (
  check_is_scalar,
  check_range,
  resolve_update_values,
  scale_by_demo,
)
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.per_worker import per_worker
from demo_optax.recipes import links
from demo_optax.recipes.matrices import (
  DimensionNumbersTree,
  Matrices,
  check_is_no_count,
)
from demo_optax.workers import Workers

# Those of `optax.contrib.scale_by_muon`, which looks at them when traced.
_PRECONDITIONINGS = ('frobenius', 'spectral', 'aol', 'schatten')

# Of gradients before Newton-Schulz, which does not depend on it but for range.
_GRADIENT_SCALE = 2.0**20

# Of updates. Those that have a gradient are above 1e-4 in models that were
# tried; what is left of others loses a tenth a step.
_MIN_RMS = 1e-8

# The default `adam_learning_rate`, as a multiple of `learning_rate`.
_ADAM_RATE = 3.0


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
  r"""DeMo as published (first version): signed updates, lr in the momentum.

  .. math::
    m_i &\leftarrow \beta m_i + \eta_t g_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - T^{-1} q_i \\
    x   &\leftarrow x - \eta_t \lambda x
           - \eta_t\, \mathrm{sign}(T^{-1}\, \mathrm{average}_i(q_i))

  It is this chain: `scale_by_demo` with :math:`\eta_t` as the gradients'
  weight, `optax.scale_by_sign`, `optax.add_decayed_weights`,
  `optax.scale_by_learning_rate`; masked to the leaves that are exchanged. If
  every worker is excluded from a step, the parameters stay as they are, weight
  decay included. For other options write that chain.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule of the step.
    workers: the workers of the exchange.
    compressor: what is sent, see `scale_by_demo`.
    decay: :math:`\beta`, in `[0, 1)`. 0.999 is the paper's; short runs and
      small `topk` want less (0.99).
    weight_decay: :math:`\lambda`, decoupled.
    weight_decay_mask: which leaves decay, as in `optax.add_decayed_weights`; by
      default all that take part.
    exchange: as in `scale_by_demo`. Signs are all that is wanted of updates, so
      that `'all_to_all'` and `'auto'` change no bit of the parameters.

  Returns:
    A gradient transformation; see `scale_by_demo` for what it takes.

  Raises:
    ValueError: as `scale_by_demo`; also a negative `learning_rate` or
      `weight_decay`.
    TypeError: as `scale_by_demo`; also a `learning_rate` that is no number.

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
  _check_rate('learning_rate', learning_rate)
  check_range('weight_decay', weight_decay, 0.0, float('inf'))
  _check_mask(weight_decay_mask)
  is_zero = isinstance(weight_decay, int | float) and not weight_decay
  decay_link = [] if is_zero else [  # alone needs the parameters
      optax.add_decayed_weights(weight_decay, weight_decay_mask)
  ]
  chain = optax.chain(
      links.in_momentum_dtype(),
      scale_by_demo(
          compressor,
          decay,
          workers=workers,
          gradient_weight=links.lost_unless_finite(learning_rate, weight_decay),
          exchange=exchange,
          update_values='ternary',
      ),
      optax.scale_by_sign(),
      links.in_parameter_dtype(),
      *decay_link,
      optax.scale_by_learning_rate(learning_rate),
  )
  return links.settled(chain, workers)


def muon_compressors(
    params: chex.ArrayTree,
    topk: int = 64,
    row_topk: int = 8,
    *,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
) -> chex.ArrayTree:
  """Returns what `demo_muon` sends of each leaf.

  Of matrices the largest coefficients of chunks of 64x64; of embeddings, the
  head, norms and biases those of every row of up to 192; all as signs with a
  scale.

  Args:
    params: the parameters, or their shapes.
    topk: coefficients of each chunk of 64x64; of a smaller one in proportion,
      such as `[heads, size]` of an attention kernel `[inputs, heads, size]`.
    row_topk: coefficients of each row of up to 192 of the others, however short
      it is; a longer row is cut into several.
    muon_weight_dimension_numbers: which leaves are matrices, as in `demo_muon`.

  Returns:
    A tree of compressors like `params`.

  Raises:
    ValueError: as `dct_topk`; also dimension numbers that do not fit a leaf.
    TypeError: as `dct_topk`; also a count of steps in place of parameters, as
      `optax.inject_hyperparams` gives to functions.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {
    ...     'embed': jax.ShapeDtypeStruct((50257, 768), jnp.float32),
    ...     'up': jax.ShapeDtypeStruct((768, 3072), jnp.float32)}
    >>> compressor = demo_optax.recipes.muon_compressors(params)
    >>> plan = demo_optax.plan(params, compressor, workers=4)
    >>> print(f'{plan.dense_bytes() / plan.sent_bytes:.0f} times fewer')
    128 times fewer
  """
  check_is_no_count(params)
  # `dct_topk` would call it `topk`.
  _checks.check_positive('row_topk', row_topk)
  matrix = dataclasses.replace(
      compressors.dct_topk(64, topk, values='sign'),
      select=compressors.TopShare(min(topk / 64**2, 1.0)),
  )
  other = compressors.dct_topk((1, 192), row_topk, values='sign')
  dimensions = Matrices(params, muon_weight_dimension_numbers).leaves
  return jax.tree.structure(params).unflatten(
      [other if d is None else matrix for d in dimensions]
  )


def demo_muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    workers: Workers,
    compressor: CompressorTree = None,
    decay: chex.Numeric = 0.9,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 3,
    preconditioning: str = 'aol',
    mu_dtype: chex.ArrayDType | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b2: float = 0.95,
    adam_weight_decay: chex.Numeric = 0.0,
    weight_decay: chex.Numeric = 0.0,
    weight_decay_mask: Any = None,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    exchange: ExchangeKind = 'all_gather',
    update_values: str = 'int4',
) -> optax.GradientTransformationExtraArgs:
  r"""Muon whose momentum is orthonormalised at every worker, then compressed.

  For a matrix, with worker :math:`i`'s gradient :math:`g_i`, its momentum
  :math:`b_i`, and what it has not sent yet, :math:`m_i`:

  .. math::
    b_i &\leftarrow \beta b_i + (1 - \beta) g_i \\
    m_i &\leftarrow \delta m_i + (1 - \delta)\,
           \mathrm{NewtonSchulz}(\beta b_i + (1 - \beta) g_i) \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - T^{-1} q_i \\
    u   &= T^{-1}\, \mathrm{average}_i(q_i) \\
    x   &\leftarrow x - \eta_t \lambda x - \eta_t\, u / \mathrm{rms}(u)

  Both terms are corrected for the bias of a momentum that starts at zero, as in
  `optax.contrib.scale_by_muon`. The average is over all workers that take part,
  whether they have sent a coefficient or not. Embeddings, the head, norms and
  biases are no matrices to Muon: their gradients go into :math:`m_i` as they
  are, and Adam without a momentum follows the exchange. All leaves are in one
  exchange.

  It is this chain, of which each link can be had by itself: `per_worker` of
  `optax.contrib.scale_by_muon`, `scale_by_demo`, `scale_to_unit_rms` and
  `optax.scale_by_rms`, `optax.add_decayed_weights`,
  `optax.scale_by_learning_rate`. Each worker keeps two arrays of the size of a
  matrix; of every other leaf one, and all workers share its second moments.

  The update of a matrix has a root mean square of :math:`\eta_t`: begin with a
  rate for signed updates, not with one of `optax.contrib.muon`. It was AdamW's
  (2e-3) on a language model, and a thirtieth of AdamW's on a small
  convolutional network.

  A worker whose gradient of a matrix is all zero, as of an expert that got no
  tokens, sends only what it has kept of it. Once no worker has a gradient, the
  matrix takes some 80 steps of full length more (110 with `topk=8`, 130 with
  `decay=0.99`) and comes to rest, but for weight decay; with `exchange=
  'all_to_all'` and updates in `'sign'` or `'ternary'` it takes far longer.

  A worker whose gradient is not finite is excluded and keeps both momenta; so
  is one whose gradients of a matrix are so large (some 1e11) that Newton-Schulz
  overflows: undo a scale of the loss before. If every worker is, or a
  hyperparameter is not finite (`adam_b2`: not in `[0, 1)`), the parameters stay
  as they are. Leaves with `compressors.FROZEN` are left alone.

  With `optax.inject_hyperparams`, name in its `static_args` what is no number
  that may change: `ns_steps`, `nesterov`, `mu_dtype`, and `compressor`,
  `muon_weight_dimension_numbers` and `weight_decay_mask`, which it would take
  for schedules where they are functions. A function that returns `None` for a
  count would be lost silently: `None` is the default.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule of the step.
    workers: the workers of the exchange.
    compressor: what is sent, see `scale_by_demo`; by default, which `None` is
      here, `muon_compressors(params)`. In a tree of compressors `None` is a
      leaf that is averaged uncompressed.
    decay: :math:`\delta`, of what was not sent, in `[0, 1)`.
    beta: :math:`\beta`, of each worker's own momentum, in `[0, 1)`.
    nesterov: whether the momentum is Nesterov's, as written above.
    ns_steps: Newton-Schulz iterations, see `optax.contrib.scale_by_muon`. Five
      without preconditioning, as is usual, took longer and were no better
      (benchmarks/muon.py).
    preconditioning: of the iterations, see `optax.contrib.scale_by_muon`.
    mu_dtype: in which :math:`b_i` is kept between steps; by default float32.
      bfloat16 takes half the memory; with one seed the loss was 0.6 % higher
      (benchmarks/TRIED.md).
    adam_learning_rate: of the leaves that are no matrices; by default three
      times `learning_rate`. Three and six times it were best on a language
      model, 6 to 48 times it alike on a convolutional network: tune it.
    adam_b2: decay of their second moment.
    adam_weight_decay: :math:`\lambda` of the leaves that are no matrices.
    weight_decay: :math:`\lambda` of matrices, decoupled. As in
      `optax.contrib.muon`, other leaves have their own.
    weight_decay_mask: which leaves decay, as in `optax.add_decayed_weights`; by
      default all that take part.
    muon_weight_dimension_numbers: which leaves are matrices, and along which
      axes: a tree like the parameters, as in `optax.contrib.muon`, or a
      function from them to one; by default `muon_dimension_numbers`. Give it
      to `muon_compressors`, too, if you call that.
    exchange: as in `scale_by_demo`.
    update_values: as in `scale_by_demo`.

  Returns:
    A gradient transformation; see `scale_by_demo` for what it takes.

  Raises:
    ValueError: as `scale_by_demo`; also a rate, `beta`, `ns_steps` or
      `weight_decay` out of range; a leaf of fewer than two dimensions that is
      to be a matrix, when traced.
    TypeError: as `scale_by_demo`; also a rate that is no number.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo_muon(0.1, workers=workers)
    >>> params = {'w': jnp.ones((32, 32))}
    >>> @demo_optax.data_parallel(workers)
    ... def train_step(params, opt_state, x):  # written for one worker
    ...   loss_fn = lambda params: jnp.mean((x @ params['w']) ** 2)
    ...   loss, gradients = jax.value_and_grad(loss_fn)(params)
    ...   updates, opt_state = tx.update(gradients, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state, loss
    >>> opt_state = tx.init(params)
    >>> for step in range(10):
    ...   params, opt_state, loss = train_step(params, opt_state, jnp.eye(32))
    >>> bool(loss < 0.7)  # of 1.0
    True

  References:
    Jordan et al., `Muon: An optimizer for hidden layers in neural networks
    <https://kellerjordan.github.io/posts/muon>`_, 2024; Peng et al., `DeMo:
    Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870>`_.
  """
  _checks.check_type(
      'workers', workers, Workers, 'demo_optax.Workers.simulated(n)'
  )
  _check_rate('learning_rate', learning_rate)
  if adam_learning_rate is not None:
    _check_rate('adam_learning_rate', adam_learning_rate)
  check_range('beta', beta, 0.0, 1.0, open_end=True)
  check_range('decay', decay, 0.0, 1.0, open_end=True)
  check_range('adam_b2', adam_b2, 0.0, 1.0, open_end=True)
  check_range('weight_decay', weight_decay, 0.0, float('inf'))
  check_range('adam_weight_decay', adam_weight_decay, 0.0, float('inf'))
  if (
      isinstance(ns_steps, bool)
      or not isinstance(ns_steps, int | np.integer)
      or ns_steps < 1
  ):
    raise ValueError(
        f'ns_steps={ns_steps!r} must be an integer of at least 1, and known'
        ' when a step is traced: give optax.inject_hyperparams'
        " static_args=('ns_steps',)."
    )
  if mu_dtype is not None and not _is_as_wide_as_float32(mu_dtype):
    raise TypeError(
        f'mu_dtype={mu_dtype!r} must be a dtype of floating-point numbers that'
        ' reach as far as those of float32, such as jnp.bfloat16: the momentum'
        ' is of gradients that were scaled up. optax.inject_hyperparams may'
        " take it for a schedule: name it in its static_args, as 'ns_steps'."
    )
  if preconditioning not in _PRECONDITIONINGS:
    raise ValueError(
        f'preconditioning={preconditioning!r} is not one of'
        f' {", ".join(_PRECONDITIONINGS)}.'
    )
  _check_mask(weight_decay_mask)
  resolve_update_values(exchange, update_values)
  if adam_learning_rate is None:
    adam_learning_rate = _times(_ADAM_RATE, learning_rate)

  def chain_for(
      params: chex.ArrayTree,
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the chain; which leaf is what is told from the parameters."""
    matrices = Matrices(params, muon_weight_dimension_numbers)
    if compressor is None:
      sent = muon_compressors(
          # A function: of a single leaf the tree may be None, the default.
          params, muon_weight_dimension_numbers=lambda _: matrices.tree
      )
    else:
      # Asked once, of all leaves: `scale_by_demo` sees those that take part.
      sent = compressor(params) if is_function(compressor) else compressor
    codes = per_leaf(sent, params)
    labels = matrices.labels(codes)
    muon = optax.chain(
        # Preconditioning clips squares at 1e-8, below which real gradients are.
        optax.scale(_GRADIENT_SCALE),
        contrib.scale_by_muon(
            beta=beta,
            nesterov=nesterov,
            ns_steps=int(ns_steps),
            preconditioning=preconditioning,  # type: ignore[arg-type]
            mu_dtype=mu_dtype,
            weight_dimension_numbers=matrices.dimension_numbers,
        ),
    )
    muon = links.zero_without_gradients(muon, matrices.dimension_numbers)
    # Adam without a momentum, and without a place for one.
    adam = optax.scale_by_rms(
        adam_b2, eps=1e-8, eps_in_sqrt=False, bias_correction=True
    )
    own = {
        'muon': links.in_wide_arithmetic(links.placed_by_xla(muon)),
        'adam': optax.identity(),
    }
    base = {
        'muon': links.scale_to_unit_rms(
            matrices.dimension_numbers, min_rms=_MIN_RMS
        ),
        'adam': links.in_wide_arithmetic(adam),
    }
    rates = {
        'muon': optax.scale_by_learning_rate(learning_rate),
        'adam': optax.scale_by_learning_rate(adam_learning_rate),
    }

    def by_label(
        of: dict[str, optax.GradientTransformation],
    ) -> optax.GradientTransformation:
      return optax.partition({**of, 'frozen': optax.set_to_zero()}, labels)

    def decayed(
        label: str, weight_decay: chex.Numeric
    ) -> optax.GradientTransformation:
      def mask(tree: chex.ArrayTree) -> chex.ArrayTree:
        asked = weight_decay_mask
        if asked is None:
          asked = True
        elif is_function(asked):
          asked = asked(tree)
        wanted = broadcast(asked, tree, 'weight_decay_mask')
        paths = jax.tree_util.tree_flatten_with_path(tree)[0]
        for (path, _), w in zip(paths, wanted, strict=True):
          if not _is_bool(w):
            raise TypeError(
                f'weight_decay_mask has {w!r} for {_tree.leaf_name(path)}: it'
                ' must be a bool.'
            )
        leaves, treedef = jax.tree.flatten(labels(tree))
        return treedef.unflatten(
            [found == label and w for found, w in zip(leaves, wanted)]
        )

      return optax.add_decayed_weights(weight_decay, mask)

    chain = optax.chain(
        links.in_momentum_dtype(),
        per_worker(by_label(own), workers=workers),
        scale_by_demo(
            sent,
            decay,
            workers=workers,
            average='workers',
            ema=True,
            exchange=exchange,
            update_values=update_values,
            gradient_weight=links.lost_unless_finite(
                1.0, learning_rate, adam_learning_rate,
                _nan_unless_decay(adam_b2), weight_decay, adam_weight_decay,
            ),
        ),
        by_label(base),
        links.in_parameter_dtype(),
        decayed('muon', weight_decay),
        decayed('adam', adam_weight_decay),
        by_label(rates),
    )
    return links.settled(chain, workers)

  def init_fn(params: chex.ArrayTree) -> Any:
    return chain_for(_tree.without_variables(params)).init(params)

  def update_fn(
      updates: chex.ArrayTree,
      state: Any,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, Any]:
    if params is None:
      raise ValueError(
          'demo_muon needs params: tx.update(grads, state, params).'
      )
    return _tree.update_without_variables(
        lambda updates, state, params, **extra_args: chain_for(params).update(
            updates, state, params, **extra_args
        ),
        updates, state, params, **extra_args,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_rate(name: str, rate: optax.ScalarOrSchedule) -> None:
  """Checks a number; a schedule's values, and arrays, may become anything."""
  if isinstance(rate, jax.Array):
    check_is_scalar(name, rate)
  elif not callable(rate):
    check_range(name, rate, 0.0, float('inf'))


def _nan_unless_decay(value: chex.Numeric) -> chex.Numeric:
  """Returns a traced decay, NaN where it is out of `[0, 1)`."""
  if isinstance(value, int | float):
    return value
  return jnp.where((value >= 0) & (value < 1), value, jnp.nan)


def _is_as_wide_as_float32(dtype: Any) -> bool:
  """Returns whether a dtype's numbers reach as far as those of float32."""
  if isinstance(dtype, jax.Array | np.ndarray):  # jnp.bfloat16(count)
    return False
  try:
    return bool(
        jnp.issubdtype(dtype, jnp.floating)
        and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
    )
  except TypeError:
    return False


def _check_mask(mask: Any) -> None:
  """Raises for a mask that is neither a tree nor a function.

  Such is what `optax.inject_hyperparams` makes of a function.
  """
  if isinstance(mask, int | float | str | np.generic | np.ndarray | jax.Array):
    raise TypeError(
        f'weight_decay_mask={mask!r} must be a tree of bools, or a function'
        ' from the parameters to one: leave it out for all leaves, and set'
        ' weight_decay=0 for none. optax.inject_hyperparams calls functions'
        " with the count of steps: name it in its static_args, as 'compressor'."
    )


def _is_bool(x: Any) -> bool:
  return isinstance(x, bool) or (
      np.shape(x) == () and getattr(x, 'dtype', None) == np.bool_
  )


def _times(
    factor: float, schedule: optax.ScalarOrSchedule
) -> optax.ScalarOrSchedule:
  if callable(schedule):
    return lambda count: factor * schedule(count)
  return factor * schedule
