"""Cutting arrays into chunks, and the orthonormal transform of a chunk.

An array of shape `[*batch, rows, cols]` becomes coefficients of shape
`[*batch, row_chunks, col_chunks, n]`: one axis per dimension of the array that
counts chunks, and one axis of length `n = row_length * col_length` inside a
chunk. That the leading axes match the array's own is what lets coefficients be
sharded exactly as the array is.

An array that is spread over several devices is cut block by block, so that no
chunk lies on two devices; an array on one device is one block.

Everything about a cut is static and lives in `ChunkGrid`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Compilers multiply a few rows in other ways than many, which round otherwise:
# a chunk's bits would depend on how many chunks there are beside it, and so on
# how many workers are simulated. XLA:CPU is uniform from 96 rows on.
_MIN_ROWS = 128

# Length of a chunk's side -> the orthonormal matrix whose ROWS are the basis.
Basis = Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ChunkGrid:
  """How one array is cut into chunks.

  Attributes:
    block: shape of a block.
    lengths: length of a chunk along each dimension of the array; 1 along the
      dimensions before the last two, unless a block is one whole chunk.
    whole: a block is a single chunk in its own element order, and is not
      transformed.
    blocks: number of blocks along each dimension; by default there is one.
  """

  block: tuple[int, ...]
  lengths: tuple[int, ...]
  whole: bool = False
  blocks: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    one = (1,) * len(self.block)
    object.__setattr__(self, 'blocks', self.blocks or one)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array."""
    return tuple(b * d for b, d in zip(self.blocks, self.block))

  @property
  def block_counts(self) -> tuple[int, ...]:
    """Number of chunks along each dimension of a block."""
    return tuple(-(-d // l) for d, l in zip(self.block, self.lengths))

  @property
  def counts(self) -> tuple[int, ...]:
    """Number of chunks along each dimension of the array."""
    return tuple(b * c for b, c in zip(self.blocks, self.block_counts))

  @property
  def chunk_size(self) -> int:
    """Number of coefficients in a chunk, `n`."""
    return math.prod(self.lengths)

  @property
  def num_chunks(self) -> int:
    """Number of chunks in the array."""
    return math.prod(self.counts)

  @property
  def coefficients_shape(self) -> tuple[int, ...]:
    """Shape of the array's coefficients, `[*counts, n]`."""
    return (*self.counts, self.chunk_size)

  @property
  def padding(self) -> tuple[int, ...]:
    """Elements added at the end of each dimension of every block."""
    counts = self.block_counts
    return tuple(
        c * l - d for c, l, d in zip(counts, self.lengths, self.block)
    )

  def stacked(self, count: int) -> 'ChunkGrid':
    """The grid of so many arrays, stacked."""
    return ChunkGrid(
        (1, *self.block), (1, *self.lengths), self.whole, (count, *self.blocks)
    )

  def pieces(self, max_elements: int | None) -> tuple[int, 'ChunkGrid']:
    """Cuts along the first dimension, between chunks, into equal pieces.

    Args:
      max_elements: the largest piece wanted; pieces are larger where the first
        dimension has too few chunks. None: one piece.

    Returns:
      how many pieces there are, and the grid of each, which has no padding.

    >>> count, piece = chunk_grid((640, 128), 64).pieces(2**15)
    >>> count, piece.shape
    (5, (128, 128))
    """
    if self.whole or not self.block:
      return 1, self
    first, *rest = self.counts
    size = self.num_chunks * self.chunk_size
    at_least = -(-size // (max_elements or size))
    counts = range(min(at_least, first), first + 1)
    count = next(p for p in counts if first % p == 0)
    shape = [c * l for c, l in zip((first // count, *rest), self.lengths)]
    return count, ChunkGrid(tuple(shape), self.lengths)


def chunk_length(size: int, chunk_size: int, *, padding: bool = True) -> int:
  """Length of the chunks that a dimension is cut into.

  A dimension up to `chunk_size` is one chunk. A longer one takes its largest
  divisor in `[chunk_size / 2, chunk_size]`; where it has none, the length in
  that range which needs the least padding (the longest of those). Without
  padding: the largest divisor not above `chunk_size`, however small, which is
  the rule of the published implementation.

  Args:
    size: length of the dimension, at least 1.
    chunk_size: the longest chunk allowed.
    padding: whether the last chunk may reach past the end of the dimension.

  Returns:
    The length of a chunk.

  >>> [chunk_length(d, 64) for d in (10, 64, 768, 97, 50257)]
  [10, 64, 64, 49, 33]
  >>> chunk_length(97, 64, padding=False)
  1
  """
  if size <= chunk_size:
    return size
  if not padding:
    return max(l for l in range(1, chunk_size + 1) if size % l == 0)
  # A divisor needs no padding at all, so one rule serves both cases.
  lengths = range(-(-chunk_size // 2), chunk_size + 1)
  return min(lengths, key=lambda l: (-size % l, -l))


def chunk_grid(
    shape: tuple[int, ...],
    chunk_size: int | tuple[int, int],
    *,
    padding: bool = True,
) -> ChunkGrid:
  """The grid that cuts the last two dimensions of `shape` into chunks.

  Args:
    shape: of the array.
    chunk_size: longest side of a chunk, or its longest sides along the last two
      dimensions (of a vector: the second).
    padding: see `chunk_length`.

  Returns:
    The grid.
  """
  sides = (chunk_size,) * 2 if isinstance(chunk_size, int) else chunk_size
  lengths = tuple(
      chunk_length(d, side, padding=padding)
      for d, side in zip(shape[::-1], sides[::-1])
  )[::-1]
  return ChunkGrid(shape, (1,) * (len(shape) - 2) + lengths)


def whole_grid(shape: tuple[int, ...]) -> ChunkGrid:
  """The grid that leaves an array as one untransformed chunk."""
  return ChunkGrid(shape, shape, whole=True)


@functools.cache
def dct_basis(length: int) -> np.ndarray:
  """The orthonormal DCT-II as a float64 matrix `[frequency, position]`."""
  position = np.arange(length)
  angle = np.pi * position[:, None] * (2 * position + 1) / (2 * length)
  matrix = np.sqrt(2 / length) * np.cos(angle)
  matrix[0] = np.sqrt(1 / length)
  return matrix


@functools.cache
def identity_basis(length: int) -> np.ndarray:
  """No transform."""
  return np.eye(length)


@functools.cache
def hadamard_basis(length: int) -> np.ndarray:
  """Sylvester's Hadamard matrix, orthonormal; `length` is a power of two."""
  matrix = np.ones((1, 1))
  while len(matrix) < length:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / np.sqrt(length)


@functools.cache
def random_basis(length: int, seed: int) -> np.ndarray:
  """A random orthonormal matrix, uniform over rotations and reflections.

  The same bits on every machine: workers that disagree in a last bit would
  part. So Gram and Schmidt's way with exactly rounded sums, not a library's.
  """
  matrix = np.random.default_rng([seed, length]).normal(size=(length, length))
  for row in range(length):
    for _ in range(2):  # once more takes away what rounding left
      for other in matrix[:row]:
        matrix[row] -= math.fsum(matrix[row] * other) * other
    matrix[row] /= math.sqrt(math.fsum(matrix[row] ** 2))
  return matrix


def to_coefficients(x: jax.Array, grid: ChunkGrid, basis: Basis) -> jax.Array:
  """Cuts an array into chunks and transforms each.

  Inside a chunk the column frequency is the slow index and the row frequency
  the fast one: it is the order in which two plain matrix products from the
  right produce them.

  Args:
    x: `[*grid.shape]`.
    grid: the cut.
    basis: the transform of one side of a chunk.

  Returns:
    `[*grid.counts, n]` in the dtype of `x`.
  """
  if grid.whole:
    return _split_blocks(x, grid.blocks).reshape(grid.coefficients_shape)
  batch, (rows, row_length), (cols, col_length) = _matrix_view(grid)
  if any(grid.padding):
    x = _pad_blocks(x, grid)
  x = x.reshape(batch, rows, row_length, cols, col_length)
  x = _apply(x, basis(col_length).T)
  x = x.transpose(0, 1, 3, 4, 2)  # [batch, rows, cols, col_freq, row_position]
  x = _apply(x, basis(row_length).T)
  return x.reshape(grid.coefficients_shape)


def from_coefficients(c: jax.Array, grid: ChunkGrid, basis: Basis) -> jax.Array:
  """Undoes `to_coefficients`; what lies in the padding is dropped.

  Args:
    c: `[*grid.counts, n]`.
    grid: the cut.
    basis: the transform of one side of a chunk.

  Returns:
    `[*grid.shape]` in the dtype of `c`.
  """
  if grid.whole:
    return _join_blocks(c.reshape(*grid.blocks, *grid.block))
  batch, (rows, row_length), (cols, col_length) = _matrix_view(grid)
  c = c.reshape(batch, rows, cols, col_length, row_length)
  c = _apply(c, basis(row_length))
  c = c.transpose(0, 1, 4, 2, 3)  # [batch, rows, row_position, cols, col_freq]
  c = _apply(c, basis(col_length))
  c = c.reshape([n * l for n, l in zip(grid.counts, grid.lengths)])
  return _trim_blocks(c, grid) if any(grid.padding) else c


def from_selected(
    indices: jax.Array, values: jax.Array, grid: ChunkGrid, basis: Basis
) -> jax.Array:
  r"""`from_coefficients` of coefficients of which only some are not zero.

  The sum of outer products :math:`v_j\, D_{u_j}^\top D_{v_j}` of rows of the
  basis, which for few coefficients is less work than the whole transform.
  Places may repeat, and are added.

  Args:
    indices: int32 `[chunks, m]`, places within a chunk.
    values: `[chunks, m]`.
    grid: the cut, not `whole`.
    basis: the transform of one side of a chunk.

  Returns:
    `[*grid.shape]` in the dtype of `values`.
  """
  batch, (rows, row_length), (cols, col_length) = _matrix_view(grid)
  col_basis = jnp.asarray(basis(col_length), values.dtype)
  row_basis = jnp.asarray(basis(row_length), values.dtype)
  x = jnp.einsum(
      'cmi,cmj->cij',
      values[..., None] * row_basis[indices % row_length],
      col_basis[indices // row_length],
      precision=jax.lax.Precision.HIGHEST,
  )
  x = x.reshape(batch, rows, cols, row_length, col_length)
  x = x.transpose(0, 1, 3, 2, 4)
  x = x.reshape([n * l for n, l in zip(grid.counts, grid.lengths)])
  return _trim_blocks(x, grid) if any(grid.padding) else x


def split_pieces(x: jax.Array, grid: ChunkGrid, count: int) -> jax.Array:
  """`[*grid.shape]` as `[count, *piece.shape]`, for `count, piece = pieces`."""
  if any(grid.padding):
    x = _pad_blocks(x, grid)
  if count == 1:
    return x[None]  # which may be a scalar
  return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def join_pieces(x: jax.Array, grid: ChunkGrid) -> jax.Array:
  """Undoes `split_pieces`."""
  x = x[0] if len(x) == 1 else x.reshape(-1, *x.shape[2:])
  return _trim_blocks(x, grid) if any(grid.padding) else x


def clear_padding(c: jax.Array, grid: ChunkGrid, basis: Basis) -> jax.Array:
  """Projects coefficients onto arrays that are zero in the padding.

  The same as `to_coefficients(from_coefficients(c))`, at the cost of the chunks
  at the padded edges alone: the projection along one side of a chunk is one
  small matrix.

  Args:
    c: `[*grid.counts, n]`.
    grid: the cut.
    basis: the transform of one side of a chunk.

  Returns:
    `[*grid.counts, n]`.
  """
  if grid.whole or not any(grid.padding):
    return c
  batch, (rows, row_length), (cols, col_length) = _matrix_view(grid)
  row_padding, col_padding = (0, *grid.padding)[-2:]
  row_step, col_step = (1, *grid.block_counts)[-2:]  # from edge to edge
  c = c.reshape(batch, rows, cols, col_length, row_length)
  if row_padding:
    edge = c[:, row_step - 1 :: row_step]
    edge = _apply(edge, _keep(basis(row_length), row_padding))
    c = c.at[:, row_step - 1 :: row_step].set(edge)
  if col_padding:
    edge = c[:, :, col_step - 1 :: col_step].swapaxes(-1, -2)
    edge = _apply(edge, _keep(basis(col_length), col_padding))
    c = c.at[:, :, col_step - 1 :: col_step].set(edge.swapaxes(-1, -2))
  return c.reshape(grid.coefficients_shape)


def _matrix_view(
    grid: ChunkGrid,
) -> tuple[int, tuple[int, int], tuple[int, int]]:
  """`(batch, (row chunks, row length), (col chunks, col length))`."""
  counts, lengths = (1, 1, *grid.counts), (1, 1, *grid.lengths)
  return (
      math.prod(counts[:-2]),
      (counts[-2], lengths[-2]),
      (counts[-1], lengths[-1]),
  )


def _split_blocks(x: jax.Array, blocks: tuple[int, ...]) -> jax.Array:
  """`[b0 * d0, b1 * d1, ...]` to `[b0, b1, ..., d0, d1, ...]`."""
  rank = len(blocks)
  if math.prod(blocks) == 1:
    return x.reshape(*blocks, *x.shape)
  pairs = [(b, d // b) for b, d in zip(blocks, x.shape)]
  x = x.reshape([length for pair in pairs for length in pair])
  return x.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))


def _join_blocks(x: jax.Array) -> jax.Array:
  """Undoes `_split_blocks`."""
  rank = x.ndim // 2
  shape = [b * d for b, d in zip(x.shape[:rank], x.shape[rank:])]
  if math.prod(x.shape[:rank]) > 1:
    x = x.transpose([axis for d in range(rank) for axis in (d, rank + d)])
  return x.reshape(shape)


def _pad_blocks(x: jax.Array, grid: ChunkGrid) -> jax.Array:
  """Pads every block at its ends, so that its chunks are full."""
  x = _split_blocks(x, grid.blocks)
  none = [(0, 0)] * len(grid.blocks)
  return _join_blocks(jnp.pad(x, [*none, *((0, p) for p in grid.padding)]))


def _trim_blocks(x: jax.Array, grid: ChunkGrid) -> jax.Array:
  """Undoes `_pad_blocks`."""
  x = _split_blocks(x, grid.blocks)
  inside = tuple(slice(d) for d in grid.block)
  return _join_blocks(x[(..., *inside)])


def _apply(x: jax.Array, matrix: np.ndarray) -> jax.Array:
  """`x @ matrix` over the last axis as one product, in full precision."""
  if np.array_equal(matrix, np.eye(len(matrix))):
    return x
  flat = x.reshape(-1, x.shape[-1])
  rows = len(flat)
  if rows < _MIN_ROWS:
    flat = jnp.pad(flat, ((0, _MIN_ROWS - rows), (0, 0)))
  flat = jnp.dot(
      flat,
      jnp.asarray(matrix, x.dtype),
      # The default is bfloat16 on TPUs and TF32 on GPUs.
      precision=jax.lax.Precision.HIGHEST,
  )
  return flat[:rows].reshape(x.shape)


def _keep(matrix: np.ndarray, padding: int) -> np.ndarray:
  """The projection, in coefficients, that zeroes the last `padding` places."""
  kept = matrix[:, : len(matrix) - padding]
  return kept @ kept.T
