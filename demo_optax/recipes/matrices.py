"""Infers which leaves are matrices for Muon, and along which axes."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from optax import contrib

from demo_optax import _tree
from demo_optax._paths import Keys, dotted, leaves_of, path_keys
from demo_optax.compressors.compressor import broadcast

# A tree of `optax.contrib.MuonDimensionNumbers` like the parameters (one may
# stand for a subtree; None: not a matrix), or a function from them to one.
DimensionNumbersTree = Any

# Words in the last two names of a path that make a leaf no matrix.
_WORDS = frozenset(
  {
    'bias',
    'classifier',
    'embed',
    'embedding',
    'embeddings',
    'head',
    'ln',
    'logits',
    'norm',
    'scale',
    'wpe',
    'wte',
  }
)


def muon_dimension_numbers(params: chex.ArrayTree) -> chex.ArrayTree:
  """Returns which leaves are matrices, inferred from their paths and shapes.

  A matrix is the last two dimensions of a leaf; leading dimensions stack
  matrices, such as scanned layers or experts. A leaf is no matrix if it has
  fewer than two dimensions, a side of one, or the name `b`. Nor is it one if
  its own or its parent's name has one of these words: bias, classifier, embed,
  embedding, embeddings, head, ln, logits, norm, scale, wpe, wte. Two kinds of
  kernels are matrices over more dimensions:

    attention      of Flax: `[in, heads, size]` below `query`, `key` and
                   `value`, `[heads, size, out]` below `out`, beside a `query`
    convolutions   below `conv`, or with a window of 3x3, 5x5 or 7x7, or of
                   other equal sides over at most 4 channels: all dimensions
                   but the output

  Names and shapes can mislead. Print the result for a model, and pass
  `demo_muon` a tree or a function if it is wrong. Parameters may be shapes.

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
  dtype = getattr(params, 'dtype', None)
  if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
      f'The parameters must be a tree of floats, got one array of {dtype}. In'
      ' optax.inject_hyperparams, which calls functions with the count of'
      " steps, add static_args=('compressor',"
      " 'muon_weight_dimension_numbers', 'mu_dtype')."
    )
  # A key of Haiku holds several names.
  leaves = [
    (tuple('/'.join(map(str, keys)).split('/')), jnp.shape(x))
    for keys, x in leaves_of(params)
  ]
  shapes = dict(leaves)
  return jax.tree.structure(params).unflatten(
    _dimension_numbers(names, shape, shapes) for names, shape in leaves
  )


def _dimension_numbers(
  names: tuple[str, ...],
  shape: tuple[int, ...],
  shapes: Mapping[tuple[str, ...], tuple[int, ...]],
) -> contrib.MuonDimensionNumbers | None:
  """Returns the axes of a matrix, or None, given the shapes of all leaves."""
  *_, parent, name = ('', '', *names)
  ndim, words = len(shape), _words(parent)
  if ndim < 2 or name == 'b' or _WORDS & (words | _words(name)):
    return None
  sides = contrib.MuonDimensionNumbers((-2,), (-1,))
  query = shapes.get((*names[:-2], 'query', name), ())
  if ndim < 3 or name not in ('kernel', 'w', 'weight'):
    pass
  elif parent in ('query', 'key', 'value') and shape[-3] > shape[-2]:
    sides = contrib.MuonDimensionNumbers((-3,), (-2, -1))
  elif parent == 'out' and shape[-3:-1] == query[-2:]:
    sides = contrib.MuonDimensionNumbers((-3, -2), (-1,))
  elif 'conv' in words or _has_window(name, shape):
    # Of Equinox and PyTorch [out, in, *window], of others [*window, in, out].
    output = -ndim if name == 'weight' else -1
    others = tuple(a for a in range(-ndim, 0) if a != output)
    sides = contrib.MuonDimensionNumbers(others, (output,))
  if 1 in [math.prod(shape[a] for a in axes) for axes in sides]:
    return None
  return sides


def _has_window(name: str, shape: tuple[int, ...]) -> bool:
  """Returns whether a shape is probably that of a convolution's kernel.

  Stacks of stacks rarely have two equal sides of 3, 5 or 7, or as few inputs as
  an image has channels.
  """
  if len(shape) != 4:
    return False
  *window, inputs = (*shape[2:], shape[1]) if name == 'weight' else shape[:3]
  return window[0] == window[1] and (window[0] in (3, 5, 7) or inputs <= 4)


def _words(name: str) -> set[str]:
  """Returns the words of a name, except the heads of attention.

  >>> sorted(_words('LMHead_0')), sorted(_words('wte2'))
  (['head', 'lm'], ['wte'])
  >>> sorted(_words('MultiHeadAttention')), sorted(_words('multi_head_proj'))
  (['attention'], ['proj'])
  """
  name = re.sub('(?i)multi_?head', '', name)
  found = re.findall('[A-Z]+(?![a-z])|[A-Z]?[a-z]+', name)
  return {word.lower() for word in found}


def matrices(
  params: chex.ArrayTree,
  given: DimensionNumbersTree,
  argument: str = 'muon_weight_dimension_numbers',
) -> dict[Keys, contrib.MuonDimensionNumbers | None]:
  """Returns the axes of all leaves, given or inferred, by path.

  Both sides are tuples, counted from the first axis. Made once from all
  parameters, since transformations may see a part of them.
  """
  given = muon_dimension_numbers if given is None else given
  dimensions = broadcast(
    given(params) if _tree.is_function(given) else given,
    params,
    argument,
    lambda x: x is None or isinstance(x, contrib.MuonDimensionNumbers),
  )
  return {
    keys: _sides(d, jnp.shape(x), argument, dotted(keys))
    for (keys, x), d in zip(leaves_of(params), dimensions)
  }


def tree_of(values: Mapping[Keys, Any]) -> Callable[..., chex.ArrayTree]:
  """Returns a function that puts values by path into a tree of some leaves."""
  return lambda tree: jax.tree_util.tree_map_with_path(
    lambda path, _: values[path_keys(path)], tree
  )


def _sides(
  dimensions: Any, shape: tuple[int, ...], argument: str, name: str
) -> contrib.MuonDimensionNumbers | None:
  """Returns a matrix's axes from 0; raises unless the leaf has them."""
  if dimensions is None:
    return None
  if not isinstance(dimensions, contrib.MuonDimensionNumbers):
    raise TypeError(
      f'{argument} must hold optax.contrib.MuonDimensionNumbers or None, got'
      f' {dimensions!r} for {name}.'
    )
  ndim = len(shape)
  sides = [(x,) if isinstance(x, int) else x for x in dimensions]
  axes = [a for side in sides for a in side]
  inside = {a % ndim for a in axes if -ndim <= a < ndim}
  if () in sides or len(inside) < len(axes):
    raise ValueError(
      f'{argument} must name axes of {name}, each once, got {dimensions} for'
      f' shape {shape}. Use None if it is not a matrix.'
    )
  return contrib.MuonDimensionNumbers(
    *(tuple(a % ndim for a in side) for side in sides)
  )
