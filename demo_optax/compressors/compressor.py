"""Compressors: a `Selector`, a `Basis` for coefficients, and a value code.

Byte counts and communication are the same for all compressors, and so are
momentum and error feedback, except with a `period`; see `exchange`.
"""

import dataclasses
import math
import textwrap
from collections.abc import Callable
from typing import Any

import chex
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


@dataclasses.dataclass(frozen=True)
class LeafChunks:
  """A leaf's chunks and format, from its shape and dtype alone."""

  grid: ChunkGrid  # of a sharded leaf, one shard's
  format: ChunkFormat
  basis: Basis  # of the coefficients

  @property
  def num_bytes(self) -> int:
    """Bytes that the leaf takes in a message."""
    return self.format.num_bytes(self.grid.num_chunks)


@dataclasses.dataclass(frozen=True)
class Compressor:
  """Selects from a worker's momentum, and encodes the selection.

  A new selector or basis is a frozen dataclass with the methods in `Selector`
  or `Basis`. `dct_topk` explains the attributes that are not listed.

  Attributes:
    batch_dims: leading dimensions, such as layers or experts. No chunk has
      more than one entry along them.
    period: 1: momentum keeps what is not sent, or what `values` loses, for
      later steps. From 2 on there is no momentum, and `decay`, `alpha` and
      `exchange_info` do not count: chunks are cut from what is taken at a step,
      one element in `period` of every column, the next at each step.
  """

  select: Selector
  basis: Basis
  chunk_size: int | tuple[int, int] = 64
  values: str = 'float32'
  padding: bool = True
  batch_dims: int = 0
  period: int = 1

  def __post_init__(self) -> None:
    _sides_of(self.chunk_size)
    _checks.check_choice('values', self.values, VALUES)
    _checks.check_positive('period', self.period)

  @property
  def error_feedback(self) -> bool:
    """Whether momentum keeps what is not sent, as error feedback."""
    return self.period == 1

  def chunks(
    self,
    shape: tuple[int, ...],
    dtype: DTypeLike,
  ) -> LeafChunks:
    """Returns the chunks for a leaf, or one shard, with momentum in `dtype`.

    An array with more than two dimensions is folded to a matrix batch: see
    `ChunkGrid.fold`. Compares the bytes of all folds, where `TopK` sends `k`
    from every chunk. Keeps the last two dimensions if they cost at most 5 %
    more than the cheapest fold. Otherwise takes, among the folds within 5 %,
    the largest `rows_from`, so that layers and experts stay apart; then the
    squarest, then the smallest `cols_from`.
    """
    # A proportional `k` would favour small chunks, which cost little more and
    # have fewer coefficients to select from.
    sides = _sides_of(self.chunk_size)
    full_k = self.select
    if isinstance(full_k, selectors.TopK):
      full_k = dataclasses.replace(full_k, per=None)
    costs: dict[ChunkGrid, int] = {}
    for fold in chunking.folds(len(shape), self.batch_dims):
      grid = chunking.chunk_grid(
        shape,
        sides,
        padding=self.padding,
        fold=fold,
        period=self.period,
      )
      costs[grid] = self._smallest(grid, dtype, full_k).num_bytes
    most = 1.05 * min(costs.values())
    cheap = [grid for grid, cost in costs.items() if cost <= most]
    best = min(cheap, key=_rank)
    chunks = self._smallest(best, dtype, self.select)
    for side in chunks.grid.sides:
      chunks.basis.check(side)
    return chunks

  def _smallest(
    self,
    grid: ChunkGrid,
    dtype: DTypeLike,
    select: Selector,
  ) -> LeafChunks:
    """Returns the selection from the grid's chunks, or the whole leaf."""
    size = grid.chunk_size
    basis = self.basis
    sparse_format = ChunkFormat(
      size,
      select.count(size),
      jnp.dtype(dtype).name,
      self.values,
      select.shared,
    )
    sparse = LeafChunks(grid, sparse_format, basis)
    if not self.error_feedback:
      return sparse
    # A scale belongs to a chunk; exact values need no chunks.
    if self.values == 'float32':
      grid = ChunkGrid(grid.shape, grid.shape, whole=True)
      size = grid.chunk_size
      basis = bases.Identity()
    dense_format = dataclasses.replace(sparse_format, n=size, k=size)
    dense = LeafChunks(grid, dense_format, basis)
    return sparse if sparse.num_bytes < dense.num_bytes else dense


def _rank(grid: ChunkGrid) -> tuple[bool, int, float, int]:
  """Orders grids with similar costs, the best first."""
  rows_from, cols_from = grid.fold or (0, 0)
  rows, cols = (1, 1, *grid.folded)[-2:]
  ratio = max(rows, cols) / min(rows, cols)
  return grid.fold is not None, -rows_from, ratio, cols_from


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
  compressor: CompressorTree, tree: chex.ArrayTree
) -> list[Compressor | Frozen | None]:
  """Returns the compressor for each leaf in `tree`."""

  def is_leaf(x: object) -> bool:
    return x is None or isinstance(x, Compressor | Frozen)

  if _tree.is_function(compressor):
    compressor = compressor(tree)
  for leaf in jax.tree.leaves(compressor, is_leaf=is_leaf):
    if not is_leaf(leaf):
      raise TypeError(
        'compressor must be a Compressor, or a tree of them and of None, got'
        f' {_checks.short(leaf)}. Make one with demo_optax.dct_topk().'
      )
  return broadcast(compressor, tree, 'compressor', is_leaf)


def broadcast(
  prefix: chex.ArrayTree,
  tree: chex.ArrayTree,
  argument: str,
  is_leaf: Callable[[object], bool] | None = None,
) -> list[Any]:
  """Returns, for each leaf in `tree`, the prefix leaf above it."""
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
  repeated = []
  for leaf, subtree in zip(leaves, subtrees):
    repeated += [leaf] * len(jax.tree.leaves(subtree))
  return repeated


def dct_topk(
  chunk_size: int | tuple[int, int] = 64,
  topk: int = 32,
  *,
  values: str = 'float32',
  padding: bool = True,
  proportional: bool = True,
) -> Compressor:
  """Sends the `topk` largest DCT coefficients in every chunk.

  Matrices are cut into chunks up to `chunk_size x chunk_size`, vectors into
  `chunk_size`. What is not sent, and what `values` loses, stays in the momentum
  and is sent later.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> compressor = demo_optax.dct_topk(64, topk=8, values='sign')
    >>> compressor.chunks((1024, 4096), jnp.float32).num_bytes
    14208

  A leaf with more than two dimensions is folded to a matrix batch where
  that saves bytes (`Compressor.chunks`). Each chunk goes through the separable
  orthonormal DCT-II. Its coefficients with the largest magnitudes are sent;
  ties go to the lowest index. If a selection would cost as much as everything
  in the same value code, everything is sent without indices.

  Args:
    chunk_size: longest side of a chunk, at least 1; or the longest sides along
      the last two dimensions: `(1, 256)` transforms rows, as for embeddings.
    topk: coefficients sent per chunk, at least 1.
    values: `'float32'` (32 bits per value, exact), `'int8'` (8, and a scale
      per chunk), `'int4'` (4, same) or `'sign'` (1, same).
    padding: cut a dimension into as few chunks as possible, the last one
      padded. False follows the published code, which takes the largest divisor,
      however small: it sends more than the gradient for a prime dimension.
    proportional: send `topk` from a full chunk, and from a smaller one in
      proportion, rounded up. False: from every chunk, as published.

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1.
  """
  full_chunk = math.prod(_sides_of(chunk_size))
  select = selectors.TopK(topk, full_chunk if proportional else None)
  return Compressor(select, bases.Dct(), chunk_size, values, padding)


def cyclic_signs(period: int = 4) -> Compressor:
  """Sends signs of one part in `period` of a chunk, the next at each step.

  The part is every `period`-th diagonal. In a chunk of 64x64 it has elements in
  all rows and in all columns, and full rank, which a quarter of its rows or
  columns has not. All workers send the same part, so messages have no indices:
  a bit for each value, and a scale for each chunk, 130 bytes of 16 KB at
  `period=4`. There is no transform and no momentum: what is not sent is lost.
  So give it updates of an optimizer that has a momentum, as `demo_muon` does,
  and not gradients.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> compressor = demo_optax.compressors.cyclic_signs()
    >>> compressor.chunks((1024, 4096), jnp.float32).num_bytes
    133120

  Args:
    period: steps until all of a chunk has been sent, at least 2. With 8,
      messages are half as long, and the loss of `demo_muon` is higher.
  """
  _checks.check_positive('period', period, 2)
  rows = -(-64 // period)  # of 64 that are taken in a step
  return Compressor(
    selectors.Striding(1.0),  # all that is taken
    bases.Identity(),
    chunk_size=(rows, 64),
    values='sign',
    period=period,
  )


def full() -> Compressor:
  """Sends the whole momentum: a dense all-reduce, without a transform.

  It is "Full" in `DeToNATION <https://arxiv.org/abs/2502.06728>`_.
  """
  # All workers select the same: everything, by a stride of one.
  return Compressor(selectors.Striding(1.0), bases.Identity())


def _sides_of(chunk_size: int | tuple[int, int]) -> tuple[int, int]:
  """Returns the longest sides of a chunk; raises unless there are two."""
  if not isinstance(chunk_size, tuple):
    chunk_size = chunk_size, chunk_size
  if len(chunk_size) != 2:
    raise ValueError(
      'chunk_size must be one number, or two for the last two dimensions, got'
      f' {_checks.short(chunk_size)}. Give 64, or (1, 256) for rows.'
    )
  for side in chunk_size:
    _checks.check_positive('chunk_size', side)
  return chunk_size
