r"""Optimizers in one line: chains of optax around the exchange.

`demo` is the method as published; `demo_muon` has every worker orthonormalise
its momentum before it is compressed.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from demo_optax import _tree, annotations, compressors
from demo_optax.compressors.base import (
  CompressorTree,
  Frozen,
  broadcast,
  is_function,
  per_leaf,
)
from demo_optax.demo import (
  DeMoState,
  check_range,
  resolve_update_values,
  scale_by_demo,
)
from demo_optax.exchange import ExchangeKind
from demo_optax.gradients import per_worker
from demo_optax.wire.updates import UpdateValues
from demo_optax.workers import Workers
from demo_optax.workers.sharding import path_keys

__all__ = [
  'demo',
  'demo_muon',
  'muon_compressors',
  'muon_dimension_numbers',
  'scale_to_unit_rms',
]

# A tree of `optax.contrib.MuonDimensionNumbers` like the parameters (one in
# place of a subtree holds for all of it; None: not a matrix), or a function
# from the parameters to such a tree.
DimensionNumbersTree = Any


def demo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    workers: Workers,
    compressor: CompressorTree = compressors.dct_topk(),  # noqa: B008
    decay: chex.Numeric = 0.999,
    weight_decay: chex.Numeric = 0.0,
    weight_decay_mask: Any = None,
    exchange: ExchangeKind = 'all_gather',
    max_norm_ratio: chex.Numeric | None = None,
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
    max_norm_ratio: as in `scale_by_demo`.

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
  chain = optax.chain(
      _in_momentum_dtype(),
      scale_by_demo(
          compressor,
          decay,
          workers=workers,
          gradient_weight=_lost_unless_finite(learning_rate, weight_decay),
          exchange=exchange,
          update_values='ternary',
          max_norm_ratio=max_norm_ratio,
      ),
      optax.scale_by_sign(),
      _in_parameter_dtype(),
      optax.add_decayed_weights(weight_decay, weight_decay_mask),
      optax.scale_by_learning_rate(learning_rate),
  )
  return _settled(chain, workers, compressor)


# Those of `optax.contrib.scale_by_muon`, which looks at them when traced.
_PRECONDITIONINGS = ('frobenius', 'spectral', 'aol', 'schatten')

# The default `adam_learning_rate`, as a multiple of `learning_rate`.
_ADAM_RATE = 3.0

# Words in the names of leaves that are no matrices, whatever their shapes.
_EMBEDDING = frozenset({
    'codebook', 'emb', 'embd', 'embed', 'embedder', 'embedding', 'embeddings',
    'pe', 'pos', 'position', 'positional', 'positions', 'token', 'tokens',
    'unembed', 'unembedding', 'vocab', 'wpe', 'wte',
})
_HEAD = frozenset({
    'classifier', 'head', 'heads', 'lmhead', 'logit', 'logitdense', 'logits',
    'readout', 'vocab',
})
_LAYER = frozenset({'dense', 'fc', 'kernel', 'layer', 'linear', 'w', 'weight'})
_NORM = frozenset({
    'batchnorm', 'bn', 'groupnorm', 'layernorm', 'ln', 'norm', 'rms', 'rmsnorm',
})
_VECTOR = frozenset({
    'a_log', 'beta', 'bias', 'cls', 'decay', 'gain', 'gamma', 'mask', 'offset',
    'scale', 'shift',
})
_WEIGHT = frozenset({'kernel', 'w', 'weight'})
_ATTENTION = frozenset({'key', 'qkv', 'query', 'value'})


def muon_dimension_numbers(params: chex.ArrayTree) -> chex.ArrayTree:
  """Returns which leaves are matrices, told from their paths and shapes.

  Whatever is called an embedding, a table of positions, a head, logits, a norm,
  a bias or a scale is none, and no leaf with fewer than two dimensions, or with
  a side of one, is. Of the others the last two dimensions are a matrix, and
  those before them are a stack of matrices (of layers scanned along axis 0, or
  experts), except for

    attention      of Flax: `[in, heads, size]` of `query`, `key`, `value` and
                   `qkv`, `[in, 3, heads, size]` of `qkv`, `[heads, size, out]`
                   of `out`
    convolutions   by a parent called `conv`, or by a window of 3x3, 5x5 or 7x7,
                   or of other equal sides over at most 4 channels: all
                   dimensions but that of the output reduce

  Names mean what Flax, Haiku and Equinox mean by them, but say only so much: an
  output layer called `decoder` is taken for a matrix, an embedding called
  `shared.weight` too, and `w_b` for a bias; three layers of three experts and
  layers of convolutions that are scanned are taken for windows, and a stack of
  more `query` kernels than they have rows for attention. Print it for a
  model; where it is wrong give `demo_muon` a tree or a function of your own.

  Args:
    params: the parameters, or their shapes.

  Returns:
    A tree like `params`, of `optax.contrib.MuonDimensionNumbers` and `None`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> params = {
    ...     'embed': jnp.zeros((256, 64)), 'norm': jnp.zeros(64),
    ...     'query': {'kernel': jnp.zeros((64, 4, 16))},
    ...     'layers': {'up': jnp.zeros((12, 64, 256))}}
    >>> found = demo_optax.recipes.muon_dimension_numbers(params)
    >>> found['embed'], found['norm'], found['layers']['up']
    (None, None, MuonDimensionNumbers(reduction_axis=(-2,), output_axis=(-1,)))
    >>> found['query']['kernel']
    MuonDimensionNumbers(reduction_axis=(-3,), output_axis=(-2, -1))
  """
  _check_is_no_count(params)
  flat, treedef = jax.tree_util.tree_flatten_with_path(params)
  shapes = {_parts(path): tuple(jnp.shape(x)) for path, x in flat}
  return treedef.unflatten(
      [_dimension_numbers(_parts(path), shapes) for path, _ in flat]
  )


def _check_is_no_count(params: chex.ArrayTree) -> None:
  """Raises for a count of steps, which functions may be given instead."""
  dtype = getattr(params, 'dtype', None)
  if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
        f'The parameters are one array of {dtype}. optax.inject_hyperparams'
        ' calls functions with the count of steps: name the arguments that are'
        " functions of the parameters, as in static_args=('compressor',"
        " 'muon_weight_dimension_numbers')."
    )


def _dimension_numbers(
    path: tuple[str, ...],
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
) -> contrib.MuonDimensionNumbers | None:
  """Returns which axes of a leaf are a matrix; None if it is none.

  Args:
    path: its names.
    shapes: the shapes of all leaves, by their paths.
  """
  shape, parts = shapes[path], ('', '', *path)
  ndim = len(shape)
  name, parent = _words(parts[-1]), _words(parts[-2])
  is_weight = parts[-1] in _WEIGHT
  # A head of attention has queries and keys; one of the model has not.
  inner = [(*path[:-2], word, parts[-1]) in shapes for word in ('query', 'key')]
  heads = parts[-2:] if all(inner) else parts[-3:]
  if (
      ndim < 2
      or not name.isdisjoint(_EMBEDDING | _NORM | _VECTOR)
      or _is_short_bias(parts[-1])
      or not parent.isdisjoint(_EMBEDDING - {'pos', 'token', 'tokens'})
      or any(map(_is_head, heads))
      or (parts[-1] != 'kernel' and not parent.isdisjoint(_NORM))
  ):
    return None
  reduction: tuple[int, ...] = (-2,)
  output: tuple[int, ...] = (-1,)
  is_kernel = parts[-1] == 'kernel' and ndim > 2
  query = shapes.get((*path[:-2], 'query', 'kernel'), ())
  if is_kernel and ndim > 3 and 'qkv' in parent and shape[-3] == 3:
    reduction, output = (-4,), (-3, -2, -1)
  elif is_kernel and parent & _ATTENTION and shape[-3] > shape[-2]:
    reduction, output = (-3,), (-2, -1)
  elif is_kernel and parts[-2] == 'out' and shape[-3:-1] == query[-2:]:
    reduction, output = (-3, -2), (-1,)
  elif is_weight and ndim > 2 and _is_convolution(parent, parts[-1], shape):
    reduction, output = tuple(range(-ndim, -1)), (-1,)
    if parts[-1] == 'weight':  # of Equinox and PyTorch: [out, in, *window]
      reduction, output = tuple(range(1 - ndim, 0)), (-ndim,)
  sides = [math.prod(shape[a] for a in axes) for axes in (reduction, output)]
  if min(sides) == 1:
    return None
  return contrib.MuonDimensionNumbers(reduction, output)


def _is_convolution(
    parent: set[str], name: str, shape: tuple[int, ...]
) -> bool:
  """Returns whether a leaf is a convolution's, by its parent or its shape.

  A window is as wide as it is high; so may stacks of stacks be, but hardly of
  3, 5 or 7, and not of matrices with so few inputs as an image has colours.
  """
  if any(re.fullmatch('conv([1-3]d)?', word) for word in parent):
    return True
  if len(shape) != 4:
    return False
  if name == 'weight':
    inputs, *window = shape[1:]
  else:
    *window, inputs, _ = shape
  side, other = window
  return side == other and (side in (3, 5, 7) or inputs <= 4)


def _is_short_bias(name: str) -> bool:
  """Returns whether a name says `b`, which in `lora_b` is no bias.

  >>> [_is_short_bias(name) for name in ('b', 'b_in', 'mlp_b', 'lora_b', 'wb')]
  [True, True, True, False, False]
  """
  words = [_unnumbered(word) for word in _split(name)]
  return 'b' in (words[0], words[-1]) and 'lora' not in words


def _parts(path: Any) -> tuple[str, ...]:
  """Returns a path by its names; Haiku has several in one."""
  return tuple(
      part for key in path_keys(path) for part in str(key).split('/')
  )


def _words(name: str) -> set[str]:
  """Returns the words of a name, and all of it, without numbers at the ends.

  >>> sorted(_words('LayerNorm_0')), sorted(_words('wte2')), _words('conv2d')
  (['layer', 'layernorm', 'norm'], ['wte'], {'conv2d'})
  """
  words = {_unnumbered(word) for word in _split(name)}
  return (words | {_unnumbered(name.lower())}) - {''}


def _is_head(name: str) -> bool:
  """Returns whether a name ends in a head, and not in several.

  >>> [_is_head(name) for name in ('lm_head_0', 'LMHead', 'multi_label_head')]
  [True, True, True]
  >>> [_is_head(name) for name in ('logits_dense', 'lm_head_kernel', 'head_w')]
  [True, True, True]
  >>> [_is_head(name) for name in ('MultiHeadAttention_0', 'MultiHeadDense')]
  [False, False]
  """
  words = [word for word in map(_unnumbered, _split(name)) if word]
  while words[-1:] != [] and words[-1] in _LAYER:
    words.pop()
  return words[-1:] != [] and words[-1] in _HEAD and words[-2:-1] != ['multi']


def _split(name: str) -> list[str]:
  return re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower().split('_')


def _unnumbered(word: str) -> str:
  return re.sub(r'[\d_]+$', '', word)


def scale_to_unit_rms(
    weight_dimension_numbers: Any = None,
    min_rms: float = 0.0,
) -> optax.GradientTransformation:
  r"""Scales the update of every matrix to a root mean square of one.

  .. math:: u \leftarrow u / \max(\sqrt{\mathrm{mean}(u^2)}, \epsilon)

  A mean of orthonormal matrices is shorter than they are, the more so the less
  workers agree, and what is sent of each is shorter again: behind an exchange
  the learning rate alone should say how long a step is. Zeros stay zeros.

  Args:
    weight_dimension_numbers: a tree of `optax.contrib.MuonDimensionNumbers`
      like the updates, or a function from them to one: a leaf with more axes
      than they name is a stack of matrices, each of which is scaled by itself.
      None: every leaf is one matrix.
    min_rms: :math:`\epsilon`; an update that is shorter keeps being shorter. 0
      gives one of any size its direction.

  Returns:
    A gradient transformation without a state, in the updates' dtypes.

  Raises:
    ValueError: a `min_rms` below zero.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> tx = demo_optax.recipes.scale_to_unit_rms()
    >>> updates, _ = tx.update(jnp.array([3.0, -3.0, 0.0, 0.0]), tx.init(None))
    >>> print(updates)
    [ 1.4142135 -1.4142135  0.         0.       ]

  References:
    Liu et al., `Muon is Scalable for LLM Training
    <https://arxiv.org/abs/2502.16982>`_, 2025, section 2.2, which holds the
    root mean square of updates constant over shapes.
  """
  check_range('min_rms', min_rms, 0.0, float('inf'))

  def scale(u: jax.Array, axes: tuple[int, ...] | None) -> jax.Array:
    # By the largest first: squares overflow and underflow before numbers do.
    largest = jnp.max(jnp.abs(u), axes, keepdims=True)
    u = u / jnp.where(largest > 0, largest, jnp.ones_like(largest))
    mean = jnp.mean(jnp.square(u), axes, keepdims=True)
    u = jnp.where(mean > 0, u * jax.lax.rsqrt(mean), u)
    if min_rms:
      u *= jnp.minimum(largest * jnp.sqrt(mean) / min_rms, 1)
    return u

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    del params
    leaves, treedef = jax.tree.flatten(updates)
    dimensions: list[Any] = [None] * len(leaves)
    if weight_dimension_numbers is not None:
      dimensions = _Matrices(updates, weight_dimension_numbers).leaves
    return treedef.unflatten([
        scale(u, None if d is None else _axes(d))
        for u, d in zip(leaves, dimensions)
    ])

  return optax.stateless(update_fn)


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
    A tree of compressors like `params`. `demo_optax.recommend` makes one for a
    number of bytes.

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
  _check_is_no_count(params)
  matrix = dataclasses.replace(
      compressors.dct_topk(64, topk, values='sign'),
      select=compressors.TopShare(min(topk / 64**2, 1.0)),
  )
  other = compressors.dct_topk((1, 192), row_topk, values='sign')
  dimensions = _Matrices(params, muon_weight_dimension_numbers).leaves
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
    update_values: UpdateValues = 'int4',
    max_norm_ratio: chex.Numeric | None = None,
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
  convolutional network. A worker whose gradient of a matrix is all zero, as of
  an expert that got no tokens, sends only what it has kept of it; where no
  worker has a gradient any more, steps become shorter after some 80.

  A worker whose gradient is not finite is excluded and keeps both momenta; so
  is one whose gradients of a matrix are so large (some 1e11) that Newton-Schulz
  overflows: undo a scale of the loss before. If
  every worker is, or a hyperparameter is not finite, the parameters stay as
  they are. Leaves with `compressors.FROZEN` are left alone.

  With `optax.inject_hyperparams`, name in its `static_args` what is no number
  that may change: `ns_steps`, `nesterov`, and every argument that is a
  function, which it takes for a schedule.

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
      bfloat16 takes half the memory; with one seed the loss was 0.5 % higher
      (benchmarks/TRIED.md).
    adam_learning_rate: of the leaves that are no matrices; by default three
      times `learning_rate`. Two and three times it were best on a language
      model, far more of it on a convolutional network: tune it.
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
    max_norm_ratio: as in `scale_by_demo`. Of matrices orthonormal updates are
      sent, whose norms are alike whatever the gradients: cut each worker's own
      gradient instead, by `optax.clip_by_global_norm` in front.

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
  _tree.check_type(
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
  if mu_dtype is not None and not jnp.issubdtype(mu_dtype, jnp.floating):
    raise TypeError(
        f'mu_dtype={mu_dtype!r} must be a dtype of floating-point numbers, such'
        ' as jnp.bfloat16.'
    )
  if preconditioning not in _PRECONDITIONINGS:
    raise ValueError(
        f'preconditioning={preconditioning!r} is not one of'
        f' {", ".join(_PRECONDITIONINGS)}.'
    )
  resolve_update_values(exchange, update_values)
  if adam_learning_rate is None:
    adam_learning_rate = _times(_ADAM_RATE, learning_rate)

  def chain_for(
      params: chex.ArrayTree,
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the chain; which leaf is what is told from the parameters."""
    matrices = _Matrices(params, muon_weight_dimension_numbers)
    if compressor is None:
      sent = muon_compressors(
          params, muon_weight_dimension_numbers=matrices.tree
      )
    else:
      # Asked once, of all leaves: `scale_by_demo` sees those that take part.
      sent = compressor(params) if is_function(compressor) else compressor
    codes = per_leaf(sent, params)
    labels = matrices.labels(codes)
    muon = optax.chain(
        # Preconditioning clips squares at 1e-8, below which real gradients are.
        optax.scale(2.0**20),
        contrib.scale_by_muon(
            beta=beta,
            nesterov=nesterov,
            ns_steps=int(ns_steps),
            preconditioning=preconditioning,  # type: ignore[arg-type]
            mu_dtype=mu_dtype,
            weight_dimension_numbers=matrices.dimension_numbers,
        ),
    )
    muon = _zero_without_gradients(muon, matrices.dimension_numbers)
    # Adam without a momentum, and without a place for one.
    adam = optax.scale_by_rms(
        adam_b2, eps=1e-8, eps_in_sqrt=False, bias_correction=True
    )
    own = {
        'muon': _in_wide_arithmetic(_placed_by_xla(muon)),
        'adam': optax.identity(),
    }
    base = {
        'muon': scale_to_unit_rms(matrices.dimension_numbers, min_rms=1e-8),
        'adam': _in_wide_arithmetic(adam),
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
        leaves, treedef = jax.tree.flatten(labels(tree))
        return treedef.unflatten(
            [found == label and w for found, w in zip(leaves, wanted)]
        )

      return optax.add_decayed_weights(weight_decay, mask)

    chain = optax.chain(
        _in_momentum_dtype(),
        per_worker(by_label(own), workers=workers),
        scale_by_demo(
            sent,
            decay,
            workers=workers,
            average='workers',
            ema=True,
            exchange=exchange,
            update_values=update_values,
            max_norm_ratio=max_norm_ratio,
            gradient_weight=_lost_unless_finite(
                1.0, learning_rate, adam_learning_rate, adam_b2, weight_decay,
                adam_weight_decay,
            ),
        ),
        by_label(base),
        _in_parameter_dtype(),
        decayed('muon', weight_decay),
        decayed('adam', adam_weight_decay),
        by_label(rates),
    )
    return _settled(chain, workers, sent)

  def init_fn(params: chex.ArrayTree) -> Any:
    return chain_for(annotations.without_variables(params)).init(params)

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
    return annotations.update_without_variables(
        lambda updates, state, params, **extra_args: chain_for(params).update(
            updates, state, params, **extra_args
        ),
        updates, state, params, **extra_args,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Matrices:
  """Which leaves of parameters are matrices, by what the user said of it.

  Asked once, of the parameters: transformations of optax see parts of them.
  """

  def __init__(self, params: chex.ArrayTree, given: DimensionNumbersTree):
    given = muon_dimension_numbers if given is None else given
    self.leaves: list[contrib.MuonDimensionNumbers | None] = broadcast(
        given(params) if is_function(given) else given,
        params,
        'muon_weight_dimension_numbers',
        _is_dimension_numbers,
    )
    self.tree = jax.tree.structure(params).unflatten(self.leaves)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    for (path, x), dimensions in zip(flat, self.leaves):
      _check_dimension_numbers(_tree.leaf_name(path), jnp.shape(x), dimensions)
    self._by_path = {
        path_keys(path): dimensions
        for (path, _), dimensions in zip(flat, self.leaves)
    }

  def dimension_numbers(self, tree: chex.ArrayTree) -> chex.ArrayTree:
    """Returns the dimension numbers of a tree of some of the leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: self._by_path[path_keys(path)], tree
    )

  def labels(self, codes: list[Any]) -> Callable[..., chex.ArrayTree]:
    """Returns what labels a tree of some of the leaves.

    'frozen' where that is the compressor, 'muon' for the other matrices, and
    'adam' for all else.

    Args:
      codes: the compressor of each leaf.
    """
    label = {
        path: 'frozen' if isinstance(code, Frozen)
        else 'adam' if dimensions is None else 'muon'
        for (path, dimensions), code in zip(self._by_path.items(), codes)
    }
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: label[path_keys(path)], tree
    )


def _check_dimension_numbers(
    name: str, shape: tuple[int, ...], dimensions: Any
) -> None:
  """Raises unless a leaf can be a matrix along these axes."""
  if not _is_dimension_numbers(dimensions):
    raise TypeError(
        f'muon_weight_dimension_numbers has {dimensions!r} for {name}: it must'
        ' be an optax.contrib.MuonDimensionNumbers, or None for what is no'
        ' matrix.'
    )
  ndim = len(shape)
  if dimensions is None:
    return
  axes = _axes(dimensions)
  if (
      ndim < 2
      or any(x == () for x in dimensions)
      or not all(-ndim <= axis < ndim for axis in axes)
      or len({axis % ndim for axis in axes}) < len(axes)
  ):
    raise ValueError(
        f'{name} has shape {shape}, which {dimensions} do not fit: give axes of'
        ' its own, each once, or None if it is no matrix.'
    )


def _is_dimension_numbers(x: Any) -> bool:
  return x is None or isinstance(x, contrib.MuonDimensionNumbers)


def _axes(dimensions: contrib.MuonDimensionNumbers) -> tuple[int, ...]:
  """Returns the axes of one matrix, reduction first."""
  axes: list[int] = []
  for axis in dimensions:
    axes += [axis] if isinstance(axis, int) else axis
  return tuple(axes)


def _check_rate(name: str, rate: optax.ScalarOrSchedule) -> None:
  """Checks a number; a schedule's values, and arrays, may become anything."""
  if not callable(rate) and not isinstance(rate, jax.Array):
    check_range(name, rate, 0.0, float('inf'))


def _lost_unless_finite(
    weight: optax.ScalarOrSchedule, *hyperparams: optax.ScalarOrSchedule
) -> optax.ScalarOrSchedule:
  """Returns the weight of gradients, NaN if a hyperparameter is not finite.

  By `optax.inject_hyperparams` one may come to be NaN: then the step is lost,
  and neither momentum nor parameters take it in.
  """
  traced = [x for x in hyperparams if not isinstance(x, int | float)]
  if not traced:
    return weight

  def weight_at(count: chex.Numeric) -> chex.Numeric:
    value, *values = (
        x(count) if callable(x) else x for x in (weight, *traced)
    )
    finite = jnp.stack([jnp.isfinite(x).all() for x in values]).all()
    return jnp.where(finite, value, jnp.nan)

  return weight_at


def _times(
    factor: float, schedule: optax.ScalarOrSchedule
) -> optax.ScalarOrSchedule:
  if callable(schedule):
    return lambda count: factor * schedule(count)
  return factor * schedule


def _in_momentum_dtype() -> optax.GradientTransformation:
  """Casts gradients to the momentum's dtype: float16 would underflow."""

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    del params
    return _tree.map_exchanged(
        lambda path, x: x.astype(_tree.momentum_dtype(path, x)), updates
    )

  return optax.stateless(update_fn)


def _in_parameter_dtype() -> optax.GradientTransformation:
  """Casts updates to the dtypes of the parameters."""

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    return jax.tree.map(
        lambda u, p: u.astype(jnp.result_type(p)), updates, params
    )

  return optax.stateless(update_fn)


def _placed_by_xla(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Wraps `tx` so that XLA shards its intermediates on Explicit meshes.

  On Explicit axes every reshape and product of sharded arrays would need an
  `out_sharding`, which optax does not pass. Updates and state keep theirs.
  """

  def update_fn(
      updates: chex.ArrayTree,
      state: Any,
      params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, Any]:
    del params
    shardings = jax.tree.map(
        lambda x: jax.typeof(x).sharding, (updates, state)
    )
    axes = {
        axis
        for sharding in jax.tree.leaves(shardings)
        for axis in sharding.mesh.explicit_axes
    }
    if not axes:
      return tx.update(updates, state)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    update = jax.sharding.auto_axes(
        tx.update, axes=tuple(axes), out_sharding=specs
    )
    return update(updates, state)

  return optax.GradientTransformation(tx.init, update_fn)


def _zero_without_gradients(
    tx: optax.GradientTransformation,
    dimension_numbers: Callable[..., chex.ArrayTree],
) -> optax.GradientTransformation:
  """Wraps `tx` so that it gives zeros for matrices whose gradient is zero.

  A momentum outlives its gradients and, orthonormalised, is as long as ever.
  """

  def update_fn(
      updates: chex.ArrayTree,
      state: Any,
      params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, Any]:
    def settle(
        update: jax.Array,
        gradient: jax.Array,
        dimensions: contrib.MuonDimensionNumbers,
    ) -> jax.Array:
      some = jnp.any(gradient != 0, _axes(dimensions), keepdims=True)
      return jnp.where(some, update, jnp.zeros_like(update))

    new, state = tx.update(updates, state, params)
    dimensions = dimension_numbers(updates)
    return jax.tree.map(settle, new, updates, dimensions), state

  return optax.GradientTransformation(tx.init, update_fn)


def _in_wide_arithmetic(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Wraps `tx` so that its state has the momentum's dtype, like its updates.

  Allows standard promotion inside: optax raises a float to an integer count.
  """

  def init_fn(params: chex.ArrayTree) -> Any:
    return tx.init(jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(
            x, dtype=_tree.momentum_dtype(path, x)
        ),
        params,
    ))

  def update_fn(
      updates: chex.ArrayTree,
      state: Any,
      params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, Any]:
    with jax.numpy_dtype_promotion('standard'):
      return tx.update(updates, state, params)

  return optax.GradientTransformation(init_fn, update_fn)


def _settled(
    chain: optax.GradientTransformation,
    workers: Workers,
    compressor: CompressorTree,
) -> optax.GradientTransformationExtraArgs:
  """Masks `chain` to the leaves that are exchanged; zeroes other updates.

  In a step from which every worker is excluded, zeroes all updates and keeps
  the second moments behind the exchange.
  """
  masked = optax.masked(chain, _tree.exchanged_mask)

  def update_fn(
      updates: chex.ArrayTree,
      state: optax.MaskedState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, optax.MaskedState]:
    if params is None:
      raise ValueError('demo needs params: tx.update(grads, state, params).')
    try:
      updates, new = masked.update(updates, state, params, **extra_args)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      _check_state_is_of(masked, state, params, error)
      raise
    links = new.inner_state
    (exchange,) = (link for link in links if isinstance(link, DeMoState))
    # Zero from where, not by a product: a decay that is not finite would stay.
    someone = exchange.metrics['num_excluded'] < workers.count
    codes = iter(per_leaf(compressor, params))

    def settle(update: jax.Array, param: Any) -> jax.Array:
      if isinstance(next(codes), Frozen) or not _tree.is_exchanged(param):
        return jnp.zeros_like(param)
      return jnp.where(someone, update, jnp.zeros_like(update))

    def hold(old: Any, new: Any) -> Any:
      if not _has_second_moments(new):
        return new
      return jax.tree.map(lambda o, n: jnp.where(someone, n, o), old, new)

    new = jax.tree.map(
        hold, state, new,
        is_leaf=lambda x: isinstance(x, DeMoState) or _has_second_moments(x),
    )
    return jax.tree.map(settle, updates, params), new

  return optax.GradientTransformationExtraArgs(masked.init, update_fn)


def _check_state_is_of(
    tx: optax.GradientTransformation,
    state: Any,
    params: chex.ArrayTree,
    error: Exception,
) -> None:
  """Raises if an error came of a state that `tx` has not made."""
  try:
    made = jax.eval_shape(tx.init, params)
  except Exception:  # for the reason that the error tells of
    return
  expected, found = (
      {
          # `scale_by_demo` says itself what is wrong with its own.
          _tree.leaf_name(path): () if isinstance(x, DeMoState) else np.shape(x)
          for path, x in jax.tree_util.tree_flatten_with_path(
              tree, is_leaf=lambda x: isinstance(x, DeMoState)
          )[0]
      }
      for tree in (made, state)
  )
  if len(expected.keys() & found.keys()) < len(expected) / 2:
    raise ValueError(
        'The state is one of another optimizer. Make one with tx.init(params),'
        ' or restore one with demo_optax.checkpoint.Checkpointer.'
    ) from error
  for name in (*expected, *found):
    shape, other = expected.get(name), found.get(name)
    if shape is None:
      problem = f'it has {name}, which is not part of it'
    elif other is None:
      problem = f'{name} is missing'
    elif other not in (shape, shape[1:]):  # in a step of one worker: its own
      problem = f'{name} has shape {other} instead of {shape}'
      if other and other[1:] == shape[1:] and 'worker_stacked' in name:
        problem += (
            f', as of {other[0]} workers, for which'
            ' demo_optax.checkpoint.resize_workers is'
        )
    else:
      continue
    raise ValueError(
        'The state was not made by this optimizer for these parameters and'
        f' workers: {problem}. Make one with tx.init(params), or restore one'
        ' with demo_optax.checkpoint.Checkpointer.'
    ) from error


def _has_second_moments(state: Any) -> bool:
  # optax does not export the types of all such states.
  return hasattr(state, 'nu')
