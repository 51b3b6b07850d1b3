"""Infers which leaves are matrices for Muon, and along which axes."""

import functools
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from demo_optax import _tree
from demo_optax._paths import Keys, dotted, leaves_of, map_by_path
from demo_optax.compressors.compressor import broadcast

# A tree of `optax.contrib.MuonDimensionNumbers` like the parameters (one may
# stand for a subtree; None: not a matrix), or a function from them to one.
DimensionNumbersTree = Any

_ARGUMENT = 'muon_weight_dimension_numbers'

# What modules, or the arrays in them, are called that are no matrices.
_MODULES = re.compile(
  r'embed|emb[ds]?\b|\bw[tp]e\b|vocab'
  r'|norms?\b|\bnormali[sz]|\bln\b'
  r'|(?<!multi )(?<!attention )(?<!attn )(?<!per )\b(lm)?heads?\b'
  r'|\bclassif|\blogit'
)
# What only arrays are called: a module called scale may compute scales.
_ARRAYS = re.compile(
  r'\bbias|\bscales?\b|\bgamma\b|\bbeta\b|\blog\b|\btokens?\b|\bpos(ition)?'
)
# Names that say nothing of what is in them.
_CONTAINERS = frozenset(
  {'', 'array', 'block', 'blocks', 'layer', 'layers', 'modules', 'stacked'}
)


def muon_dimension_numbers(params: chex.ArrayTree) -> chex.ArrayTree:
  """Returns which leaves are matrices, inferred from their paths and shapes.

  A matrix is a leaf's last two dimensions; leading dimensions stack
  matrices, such as scanned layers or experts. A leaf is no matrix if it has
  fewer than two dimensions or a side of one. Nor is it one by its own name or
  its parent's, without indices and containers (`layers`):

    either    has a word with `embed`, `vocab`, `norm` or `emb` at its end, or
              one of `ln`, `wte`, `wpe`, `head` (of no attention), `classif...`,
              `logit...`
    its own   is `b`, or has one of `bias...`, `scale`, `gamma`, `beta`, `log`,
              `token`, `pos`, `position...`

  Two kinds of kernels are matrices over more dimensions:

    attention      of Flax: `[in, heads, size]` below `query`, `key` and
                   `value`, `[heads, size, out]` below `out`, beside a `query`
    convolutions   below `conv`, or with a window of 3x3, 5x5 or 7x7, or of
                   other equal sides over at most 4 channels: all dimensions
                   but the output

  Names and shapes can mislead. Print `describe_matrices` for a model, and pass
  `demo_muon` a tree or a function if it is wrong. Parameters may be shapes.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> params = {
    ...     'embed': jnp.zeros((256, 64)), 'norm': jnp.zeros(64),
    ...     'query': {'kernel': jnp.zeros((64, 4, 16))},
    ...     'layers': {'up': jnp.zeros((12, 64, 256))}}
    >>> found = demo_optax.recipes.muon_dimension_numbers(params)
    >>> found['embed'], found['norm'], found['layers']['up']
    (None, None, MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,)))
    >>> found['query']['kernel']
    MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))
  """
  dtype = getattr(params, 'dtype', None)
  if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
      f'The parameters must be a tree of floats, got one array of {dtype}. In'
      ' optax.inject_hyperparams, which calls functions with the count of'
      " steps, add static_args=('compressor',"
      " 'muon_weight_dimension_numbers', 'mu_dtype')."
    )
  leaves = []
  for axes in _inferred(params).values():
    leaves.append(None if isinstance(axes, str) else axes)
  return jax.tree.structure(params).unflatten(leaves)


def describe_matrices(params: chex.ArrayTree) -> str:
  """Returns a line for each leaf: its axes as a matrix, or a reason.

  They are those of `muon_dimension_numbers`. Parameters may be shapes.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> params = {'embedder': {'weight': jnp.zeros((256, 64))},
    ...           'layers': {'up': jnp.zeros((12, 64, 256))}}
    >>> print(demo_optax.recipes.describe_matrices(params))
    embedder.weight                (256, 64)        no matrix: embedder
    layers.up                      (12, 64, 256)    (1,) x (2,)
  """
  inferred = _inferred(params)
  lines = []
  for keys, leaf in leaves_of(params):
    axes = inferred[keys]
    described = f'no matrix: {axes}'
    if isinstance(axes, MuonDimensionNumbers):
      described = ' x '.join(map(str, axes))
    lines.append(f'{dotted(keys):30} {jnp.shape(leaf)!s:16} {described}')
  return '\n'.join(lines)


def _inferred(params: chex.ArrayTree) -> dict[Keys, MuonDimensionNumbers | str]:
  """Returns matrices' axes, or why a leaf has no such axes, by path."""
  shapes = {keys: jnp.shape(leaf) for keys, leaf in leaves_of(params)}
  return {keys: _infer(keys, shapes) for keys in shapes}


def _infer(
  keys: Keys,
  shapes: Mapping[Keys, tuple[int, ...]],
) -> MuonDimensionNumbers | str:
  """Returns a matrix's axes, or a reason why there are no such axes."""
  shape = shapes[keys]
  if len(shape) < 2:
    return 'fewer than two dimensions'
  # Other ancestors say where a module is, not what it does.
  parent, name = ('', '', *_names(keys))[-2:]
  if name.rstrip('0123456789_') == 'b' or _ARRAYS.search(_words(name)):
    return name
  for module in (name, parent):
    if _MODULES.search(_words(module)):
      return module
  query = shapes.get((*keys[:-2], 'query', name), ())
  sides = _sides(parent, name, shape, query)
  # A vector in disguise has no singular values to equalise.
  for axes in sides:
    if math.prod(shape[axis] for axis in axes) == 1:
      return 'a side of one'
  return MuonDimensionNumbers(*sides)


def _sides(
  parent: str,
  name: str,
  shape: tuple[int, ...],
  query: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the axes for a matrix's inputs and outputs.

  `query` is the shape that a kernel below `query` has beside this one.
  """
  *stack, left, right = range(len(shape))
  last_two = (left,), (right,)
  if not stack or name not in ('kernel', 'w', 'weight', ''):
    return last_two
  # Flax keeps heads apart: `[in, heads, size]`, `[heads, size, out]`.
  if parent in ('query', 'key', 'value') and shape[-3] > shape[-2]:
    return (stack[-1],), (left, right)
  if parent == 'out' and shape[-3:-1] == query[-2:]:
    return (stack[-1], left), (right,)
  if 'conv' not in _words(parent).split() and not _has_window(name, shape):
    return last_two
  if name == 'weight':  # of Equinox and PyTorch [out, in, *window]
    return (*stack[1:], left, right), (0,)
  return (*stack, left), (right,)


def _names(keys: Keys) -> list[str]:
  """Returns the names in a path, without indices and containers.

  >>> _names(('net/~/lm', 'layers', 0, 'w'))  # a key of Haiku has several
  ['net', 'lm', 'w']
  """
  names = '/'.join(map(str, keys)).split('/')
  return [name for name in names if _words(name) not in _CONTAINERS]


def _has_window(name: str, shape: tuple[int, ...]) -> bool:
  """Returns whether a shape is probably a convolution's kernel.

  Stacks of stacks rarely have two equal sides of 3, 5 or 7, or as few inputs as
  an image has channels.
  """
  if len(shape) != 4:
    return False
  height, width, inputs, _ = shape
  if name == 'weight':  # of Equinox and PyTorch [out, in, *window]
    _, inputs, height, width = shape
  return height == width and (height in (3, 5, 7) or inputs <= 4)


def _words(name: str) -> str:
  """Returns the words in a name.

  >>> _words('LMHead_0'), _words('wte2'), _words('MultiHeadAttention')
  ('lm head', 'wte', 'multi head attention')
  """
  words = re.findall('[A-Z]+(?![a-z])|[A-Z]?[a-z]+', name)
  return ' '.join(words).lower()


def matrices(
  params: chex.ArrayTree,
  given: DimensionNumbersTree,
) -> dict[Keys, MuonDimensionNumbers | None]:
  """Returns all leaves' axes, given or inferred, by path.

  Both sides are tuples, counted from the first axis. Made once from all
  parameters, since transformations may see only a part.
  """
  if given is None:
    _warn_of_unnamed(params)
    given = muon_dimension_numbers
  if _tree.is_function(given):
    given = given(params)

  def is_leaf(x: object) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)

  # An entry may stand for a subtree.
  prefix = broadcast(given, params, _ARGUMENT, is_leaf)
  by_path = {}
  for (keys, leaf), axes in zip(leaves_of(params), prefix):
    by_path[keys] = _checked(axes, jnp.shape(leaf), dotted(keys))
  return by_path


def _warn_of_unnamed(params: chex.ArrayTree) -> None:
  """Warns about leaves without names, as in a list."""
  unnamed = []
  lines = describe_matrices(params).splitlines()
  for (keys, leaf), line in zip(leaves_of(params), lines):
    if jnp.ndim(leaf) > 1 and not _words(dotted(keys)):
      unnamed.append(line)
  if unnamed:
    shown = '\n'.join(unnamed[:8])
    warnings.warn(
      'muon_weight_dimension_numbers must be given for parameters without'
      f' names, got none for {len(unnamed)}. By their shapes:\n{shown}\nPass a'
      ' tree like the parameters, with None for embeddings, heads and norms.',
      stacklevel=2,
    )


def tree_of(values: Mapping[Keys, Any]) -> Callable[..., chex.ArrayTree]:
  """Returns a function that makes a tree by path, for some leaves."""
  return functools.partial(map_by_path, lambda keys, _: values[keys])


def _checked(
  given: object,
  shape: tuple[int, ...],
  name: str,
) -> MuonDimensionNumbers | None:
  """Returns a matrix's axes from 0; raises unless the leaf has them."""
  if given is None:
    return None
  if not isinstance(given, MuonDimensionNumbers):
    raise TypeError(
      f'{_ARGUMENT} must hold optax.contrib.MuonDimensionNumbers or None, got'
      f' {given!r} for {name}. Give None for what is not a matrix.'
    )
  ndim = len(shape)
  sides = []
  for side in given:
    axes = (side,) if isinstance(side, int) else side
    # Negative ones count from the end.
    sides.append(tuple(axis if axis >= 0 else axis + ndim for axis in axes))
  inputs, outputs = sides
  distinct = {*inputs, *outputs} & {*range(ndim)}
  if () in sides or len(distinct) < len(inputs + outputs):
    raise ValueError(
      f'{_ARGUMENT} must name axes of {name}, each once, got {given} for'
      f' shape {shape}. Use None if it is not a matrix.'
    )
  return MuonDimensionNumbers(inputs, outputs)
