"""Compressors: a `Selector` of coefficients in a `Basis`, and a value code.

Momentum, error feedback, byte counts and communication are the same for all
compressors; see `exchange`.
"""

import dataclasses
import math
import textwrap
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from demo_optax import _checks, _tree
from demo_optax.codes.format import ChunkFormat
from demo_optax.codes.value_codes import VALUES
from demo_optax.compressors import bases, chunking, selectors
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.selectors import Selector

# Value codes without a scale per chunk: dense values need no chunks.
_UNSCALED = ('float32', 'bfloat16')


# What a bucket of leaves has in its rows; see `layout.Bucket`.
Content = Literal['chunks', 'whole', 'dense']


@dataclasses.dataclass(frozen=True)
class LeafChunks:
  """The chunks and format of a leaf, from its shape and dtype alone."""

  grid: ChunkGrid  # of a sharded leaf, one shard's
  format: ChunkFormat

  @property
  def num_bytes(self) -> int:
    """Bytes that the leaf takes in a message."""
    return self.format.num_bytes(self.grid.num_chunks)

  @property
  def content(self) -> Content:
    """What its bucket has in its rows."""
    if not self.grid.whole:
      return 'chunks'
    return 'dense' if self.format.values in _UNSCALED else 'whole'


@dataclasses.dataclass(frozen=True)
class Compressor:
  """Selects from a worker's momentum, and encodes the selection.

  A new selector or basis is a frozen dataclass with the methods of `Selector`
  or `Basis`. Attributes that are not listed are those of `dct_topk`.

  Attributes:
    batch_dims: leading dimensions, such as of layers or experts, of which no
      chunk has more than one entry.
  """

  select: Selector
  basis: Basis
  chunk_size: int | tuple[int, int] = 64
  values: str = 'float32'
  padding: bool = True
  batch_dims: int = 0

  def __post_init__(self) -> None:
    _check_sides(self.chunk_size)
    _checks.check_choice('values', self.values, VALUES)

  def chunks(self, shape: tuple[int, ...], dtype: DTypeLike) -> LeafChunks:
    """Returns the chunks of a leaf, or of one shard, with momentum of `dtype`.

    For an array of more than two dimensions, compares the bytes of all folds
    `shape[:b] | shape[b:j] | shape[j:]` to a batch of matrices, of `TopK` with
    `k` of every chunk. Keeps the last two dimensions if they cost at most 5 %
    more than the cheapest fold. Otherwise takes, of the folds within 5 %, the
    largest `b`, so that layers and experts stay apart; then the squarest, then
    the smallest `j`.
    """
    name = jnp.dtype(dtype).name
    # A proportional `k` would favour small chunks, which cost little more and
    # have fewer coefficients to select from.
    full_k = self.select
    if isinstance(full_k, selectors.TopK):
      full_k = dataclasses.replace(full_k, per=None)
    found: list[tuple[int, tuple[bool, int, float, int], LeafChunks]] = []
    refused = None
    for b, j in chunking.folds(len(shape), self.batch_dims):
      fold = None if b == len(shape) - 2 else (b, j)
      grid = chunking.chunk_grid(
        shape, self.chunk_size, padding=self.padding, fold=fold
      )
      chunks = self._smallest(grid, name, self.select)
      try:
        self._check(chunks.grid)
      except ValueError as error:
        refused = error
        continue
      cost = self._smallest(grid, name, full_k).num_bytes
      rows, cols = math.prod(shape[b:j]), math.prod(shape[j:])
      ratio = max(rows, cols) / min(rows, cols)
      found.append((cost, (fold is not None, -b, ratio, j), chunks))
    if refused is not None and not found:
      raise refused
    most = 1.05 * min(cost for cost, *_ in found)
    return min(x[1:] for x in found if x[0] <= most)[1]

  def _check(self, grid: ChunkGrid) -> None:
    """Raises a `ValueError` if the basis has no matrix for these chunks."""
    if grid.whole:
      return
    rows, cols = grid.sides
    try:
      self.basis.check(rows)
      self.basis.check(cols)
    except ValueError as error:
      raise ValueError(
        f'A leaf of shape {grid.shape} is cut into chunks of {rows}x{cols},'
        f' of {self.basis}: {error}'
      ) from error

  def _smallest(
    self, grid: ChunkGrid, dtype: str, select: Selector
  ) -> LeafChunks:
    """Returns the selection from the chunks of a grid, or all of the leaf."""
    n, shape = grid.chunk_size, grid.shape
    k = select.count(n)
    grouped = isinstance(select, selectors.GroupMax) and k < n
    sparse = LeafChunks(
      grid, ChunkFormat(n, k, dtype, self.values, select.shared, grouped)
    )
    if select.shared and (k < n or not isinstance(self.basis, bases.Identity)):
      return sparse
    # A scale belongs to a chunk; values without one need no chunks.
    if grid.num_chunks == 1 or self.values in _UNSCALED:
      grid = ChunkGrid(shape, shape, whole=True)
    n = grid.chunk_size
    dense = LeafChunks(
      grid, ChunkFormat(n, n, dtype, self.values, select.shared)
    )
    return sparse if sparse.num_bytes < dense.num_bytes else dense


# A compressor, a prefix tree of them, or a function from the parameters to such
# a tree. None averages a gradient uncompressed; FROZEN ignores a leaf.
CompressorTree = Any


@dataclasses.dataclass(frozen=True)
class Frozen:
  """Marks leaves in a tree of compressors that are not trained.

  Nothing is exchanged, updates are zero, and gradients are ignored.
  """


FROZEN = Frozen()


def per_leaf(
  compressor: CompressorTree, tree: Any
) -> list[Compressor | Frozen | None]:
  """Returns the compressor of each leaf of `tree`."""

  def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, Compressor | Frozen)

  if _tree.is_function(compressor):
    compressor = compressor(tree)
  for x in jax.tree.leaves(compressor, is_leaf=is_leaf):
    if not is_leaf(x):
      raise TypeError(
        'compressor must be a Compressor, or a tree of them and of None, got'
        f' {_checks.short(x)}. Make one with demo_optax.dct_topk().'
      )
  return broadcast(compressor, tree, 'compressor', is_leaf)


def broadcast(
  prefix: Any, tree: Any, argument: str, is_leaf: Any = None
) -> list[Any]:
  """Returns, for each leaf of `tree`, the leaf of a prefix tree above it."""
  # Both may be made of `nnx.state(model)`; messages need not print arrays.
  prefix = _tree.without_variables(prefix)
  tree = jax.tree.map(lambda _: ..., _tree.without_variables(tree))
  leaves, treedef = jax.tree.flatten(prefix, is_leaf=is_leaf)
  try:
    subtrees = treedef.flatten_up_to(tree)
  except ValueError as error:
    difference = textwrap.shorten(str(error).rstrip('.'), 200)
    raise ValueError(
      f'{argument} must be a tree like the parameters, got another:'
      f' {difference}. Give a prefix of their tree, or a function from the'
      ' parameters to it: in optax.masked or optax.partition each part of the'
      ' parameters has its own tree.'
    ) from error
  return [
    x for x, subtree in zip(leaves, subtrees) for _ in jax.tree.leaves(subtree)
  ]


def dct_topk(
  chunk_size: int | tuple[int, int] = 64,
  topk: int = 32,
  *,
  values: str = 'float32',
  padding: bool = True,
  proportional: bool = True,
) -> Compressor:
  r"""Sends the `topk` largest DCT coefficients of every chunk.

  A leaf of more than two dimensions is folded to a batch of matrices first,
  where that saves bytes: `[in, heads, size]` to `[in, heads * size]`; see
  `Compressor.chunks`. Matrices are cut into chunks of at most
  `chunk_size x chunk_size` (vectors: `chunk_size`), each chunk goes through the
  separable orthonormal DCT-II

  .. math::
    c_{uv} = \sum_{xy} D^{(r)}_{ux} D^{(c)}_{vy} m_{xy}, \quad
    D^{(L)}_{ux} = \sqrt{(2 - [u = 0]) / L}\, \cos \frac{\pi (2x + 1) u}{2L}

  and its `topk` coefficients of largest magnitude are sent. Ties go to the
  lowest index. The `k` indices of a chunk of `n` coefficients take, in bits,
  the least of

  .. math::
    k \lceil \log_2 n \rceil, \quad n, \quad
    \min_l\; k l + k + \lceil n / 2^l \rceil - 1

  (fixed width; a bit per coefficient; Elias-Fano, within 10 % of
  :math:`\log_2 \binom{n}{k}` for `n >= 4096` and `8 <= k <= n / 19`). The
  values :math:`v` of a chunk are encoded as

  ============ ============== ============== =================================
  `values`     bits per value bits per chunk decoded as
  ============ ============== ============== =================================
  `'float32'`  32 (or 64)     0              :math:`v`, in the momentum's dtype
  `'bfloat16'` 16             0              :math:`v` rounded to bfloat16
  `'int8'`     8              16             :math:`s\, \mathrm{round}(v / s)`,
                                             :math:`s = \max |v| / 127`
  `'int4'`     4              16             the same, :math:`s = \max |v| / 7`
  `'sign'`     1              16             :math:`\pm s`,
                                             :math:`s = \mathrm{mean} |v|`
  ============ ============== ============== =================================

  with :math:`s` rounded to bfloat16, and levels clipped to their range.
  Subnormal scales and bfloat16 values (below :math:`2^{-126}`) are decoded as
  zero, and values are clipped at :math:`2^{126} / n`. Losses stay in the
  momentum and are sent later. Computation and momentum are float32 (float64 for
  float64 parameters) with every code.

  If a selection would cost as much as everything in the same value code,
  everything is sent without indices: float32 and bfloat16 values as the leaf,
  without a transform; others as all coefficients of all chunks.

  Args:
    chunk_size: longest side of a chunk, at least 1; or the longest sides along
      the last two dimensions: `(1, 256)` transforms rows, as one may want it
      for embeddings.
    topk: coefficients sent per chunk, at least 1; a chunk with fewer sends all.
    values: how values travel, see above.
    padding: cut a dimension into as few chunks as possible, the last one
      padded. False follows the published implementation, which takes the
      largest divisor, however small, and sends more than the gradient for a
      prime dimension.
    proportional: send `topk` of a full chunk, and of a smaller one, such as of
      a vector, in proportion, rounded up. False: of every chunk, as published.

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1. From et al.,
    `DeToNATION <https://arxiv.org/abs/2502.06728>`_, 2025, of which `full` is
    "Full".
  """
  full_chunk = math.prod(_check_sides(chunk_size))
  select = selectors.TopK(topk, full_chunk if proportional else None)
  return Compressor(select, bases.Dct(), chunk_size, values, padding)


def full() -> Compressor:
  """Sends all of the momentum: a dense all-reduce, without a transform."""
  return Compressor(selectors.Everything(), bases.Identity())


def _check_sides(chunk_size: int | tuple[int, int]) -> tuple[int, ...]:
  if not isinstance(chunk_size, tuple):
    chunk_size = (chunk_size,) * 2
  if len(chunk_size) != 2:
    raise ValueError(
      'chunk_size must be one number, or two for the last two dimensions, got'
      f' {_checks.short(chunk_size)}. Give 64, or (1, 256) for rows.'
    )
  for side in chunk_size:
    _checks.check_positive('chunk_size', side)
  return chunk_size
