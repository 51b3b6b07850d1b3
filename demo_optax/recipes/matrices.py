"""Which leaves are matrices to Muon, and along which axes."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from optax import contrib

from demo_optax import _tree
from demo_optax._paths import path_keys
from demo_optax.compressors.compressor import Frozen, broadcast, is_function

# A tree of `optax.contrib.MuonDimensionNumbers` like the parameters (one in
# place of a subtree holds for all of it; None: not a matrix), or a function
# from the parameters to such a tree.
DimensionNumbersTree = Any

# Of `demo_muon` within `optax.inject_hyperparams`: what is no number that may
# change, and functions that are no schedules.
_STATIC_ARGS = (
    "static_args=('compressor', 'muon_weight_dimension_numbers',"
    " 'weight_decay_mask', 'mu_dtype', 'ns_steps', 'nesterov')"
)

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
    'a_log', 'beta', 'bias', 'cls', 'decay', 'gain', 'gamma', 'latents', 'mask',
    'offset', 'prompt', 'prompts', 'registers', 'scale', 'shift',
})
_WEIGHT = frozenset({'kernel', 'w', 'weight'})
_ATTENTION = frozenset({'key', 'qkv', 'query', 'value'})


def muon_dimension_numbers(params: chex.ArrayTree) -> chex.ArrayTree:
  """Returns which leaves are matrices, told from their paths and shapes.

  Whatever is called an embedding, a codebook, a table of positions, learned
  tokens (`latents`, `prompt`, `registers`), a head, logits, a norm, a bias, a
  scale, a decay or a mask is none, and no leaf with fewer than two dimensions,
  or with a side of one, is. Of the others the last two dimensions are a matrix,
  and those before them are a stack of matrices (of layers scanned along axis 0,
  or experts), except for

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
  check_is_no_count(params)
  flat, treedef = jax.tree_util.tree_flatten_with_path(params)
  shapes = {_parts(path): tuple(jnp.shape(x)) for path, x in flat}
  return treedef.unflatten(
      [_dimension_numbers(_parts(path), jnp.shape(x), shapes)
       for path, x in flat]
  )


def check_is_no_count(params: chex.ArrayTree) -> None:
  """Raises for a count of steps, which functions may be given instead."""
  dtype = getattr(params, 'dtype', None)
  if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
        f'The parameters are one array of {dtype}. optax.inject_hyperparams'
        ' calls functions with the count of steps: name what is no schedule, as'
        f' in {_STATIC_ARGS}.'
    )


def _dimension_numbers(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
) -> contrib.MuonDimensionNumbers | None:
  """Returns which axes of a leaf are a matrix; None if it is none.

  Args:
    path: its names.
    shape: its shape.
    shapes: the shapes of all leaves, by their paths.
  """
  parts = ('', '', *path)
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


class Matrices:
  """Which leaves of parameters are matrices, by what the user said of it.

  Asked once, of the parameters: transformations of optax see parts of them.
  """

  def __init__(
      self,
      params: chex.ArrayTree,
      given: DimensionNumbersTree,
      argument: str = 'muon_weight_dimension_numbers',
  ):
    given = muon_dimension_numbers if given is None else given
    self.leaves: list[contrib.MuonDimensionNumbers | None] = broadcast(
        given(params) if is_function(given) else given,
        params,
        argument,
        _is_dimension_numbers,
    )
    self.tree = jax.tree.structure(params).unflatten(self.leaves)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    for (path, x), dimensions in zip(flat, self.leaves):
      _check_dimension_numbers(
          argument, _tree.leaf_name(path), jnp.shape(x), dimensions)
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
    argument: str, name: str, shape: tuple[int, ...], dimensions: Any
) -> None:
  """Raises unless a leaf can be a matrix along these axes."""
  if not _is_dimension_numbers(dimensions):
    raise TypeError(
        f'{argument} has {dimensions!r} for {name}: it must'
        ' be an optax.contrib.MuonDimensionNumbers, or None for what is no'
        ' matrix.'
    )
  ndim = len(shape)
  if dimensions is None:
    return
  axes = matrix_axes(dimensions)
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


def matrix_axes(dimensions: contrib.MuonDimensionNumbers) -> tuple[int, ...]:
  """Returns the axes of one matrix, reduction first."""
  axes: list[int] = []
  for axis in dimensions:
    axes += [axis] if isinstance(axis, int) else axis
  return tuple(axes)
