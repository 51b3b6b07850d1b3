"""Cuts arrays into chunks, and transforms chunks into coefficients.

An array is folded to `[*batch, rows, cols]` and cut into chunks `[chunks, n]`,
each a block with `n = row_length * col_length` elements in row-major order.
Chunks are transformed into coefficients `[chunks, n]`. All steps are linear,
and everything about a cut is static and lives in `ChunkGrid`. What fills the
last chunks is momentum as the rest, with gradients of zero; updates drop it.

A sharded parameter is cut shard by shard: a `ChunkGrid` describes the array on
one device, and no chunk spans two devices.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from chex import Numeric
from jax import Array

from demo_optax.compressors.bases import Basis, Identity
from demo_optax.numerics import plain, platform, rounding

# XLA:CPU rounds products of few rows differently: a chunk's bits would depend
# on the number of chunks, and so of workers. It is uniform from 96 rows on.
_MIN_ROWS = 128

# The first dimension of the rows, and that of the columns.
Fold = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ChunkGrid:
  """How one array is cut into chunks.

  Attributes:
    shape: shape before folding.
    lengths: chunk length along each folded dimension; 1 along those before the
      last two, unless the array is one whole chunk.
    whole: the array is one chunk in its own order, not transformed.
    fold: `(rows_from, cols_from)`: dimensions from the first to the second are
      folded into the rows, those from the second on into the columns. None: the
      last two dimensions are cut.
    period: of how many rows chunks have one element in every column, the next
      one at each step. A vector is one column.
  """

  shape: tuple[int, ...]
  lengths: tuple[int, ...]
  whole: bool = False
  fold: Fold | None = None
  period: int = 1

  @property
  def folded(self) -> tuple[int, ...]:
    """Shape after folding, `[*batch, rows, cols]`."""
    if self.fold is None:
      return self.shape
    rows_from, cols_from = self.fold
    rows = math.prod(self.shape[rows_from:cols_from])
    cols = math.prod(self.shape[cols_from:])
    return (*self.shape[:rows_from], rows, cols)

  @property
  def taken(self) -> tuple[int, ...]:
    """Shape after folding, of what chunks have in one step."""
    sizes = [*self.folded]
    if sizes:
      dim = max(len(sizes) - 2, 0)  # of the rows
      sizes[dim] = -(-sizes[dim] // self.period)
    return tuple(sizes)

  @property
  def columns(self) -> tuple[int, int, int]:
    """Shape `[batch, rows, cols]` after folding; a vector is one column."""
    *batch, rows, cols = (1, 1, *self.folded)
    if len(self.folded) < 2:
      rows, cols = cols, rows
    return math.prod(batch), rows, cols

  @property
  def leading(self) -> list[int]:
    """The slowest dimension in each folded one.

    Folding keeps blocks if an array is sharded along these dimensions alone.
    """
    if self.fold is None:
      return list(range(len(self.shape)))
    rows_from, cols_from = self.fold
    return [*range(rows_from + 1), cols_from]

  @property
  def counts(self) -> tuple[int, ...]:
    """Number of chunks along each dimension; 1 along those that do not lead."""
    counts = [1] * len(self.shape)
    for dim, count in zip(self.leading, self._counts):
      counts[dim] = count
    return tuple(counts)

  @property
  def folded_counts(self) -> tuple[int, int, int]:
    """Number of chunks after folding, `[batch, rows, cols]`."""
    *batch, rows, cols = 1, 1, *self._counts
    return math.prod(batch), rows, cols

  @property
  def _counts(self) -> list[int]:
    """Number of chunks along each folded dimension."""
    sizes = zip(self.taken, self.lengths)
    return [-(-size // length) for size, length in sizes]

  @property
  def sides(self) -> tuple[int, int]:
    """Rows and columns in a chunk."""
    if self.whole:
      return 1, self.chunk_size
    rows, cols = (1, 1, *self.lengths)[-2:]
    return rows, cols

  @property
  def chunk_size(self) -> int:
    """Number of coefficients in a chunk, `n`."""
    return math.prod(self.lengths)

  @property
  def num_chunks(self) -> int:
    """Number of chunks in the array."""
    return math.prod(self.counts)

  @property
  def size(self) -> int:
    """What a bucket counts: chunks, but elements of a whole array."""
    return self.chunk_size if self.whole else self.num_chunks

  @property
  def coefficients_shape(self) -> tuple[int, ...]:
    """Shape `[*counts, n]`: coefficients can be sharded as the array is."""
    return (*self.counts, self.chunk_size)

  @property
  def ends(self) -> tuple[int, ...]:
    """Elements added at the end of each folded dimension."""
    sizes = zip(self.taken, self.lengths)
    return tuple(-size % length for size, length in sizes)


def folds(
  ndim: int,
  batch_dims: int = 0,
) -> list[Fold | None]:
  """Returns all folds, and None, which leaves an array as it is."""
  dims = range(batch_dims, ndim)
  pairs = [*itertools.combinations(dims, 2)]
  return [None, *pairs[:-1]]  # the last pair would leave it, too


def chunk_length(
  size: int,
  chunk_size: int,
  *,
  padding: bool = True,
) -> int:
  """Returns the chunk length for a dimension.

  A dimension takes the fewest chunks up to `chunk_size` long, with the length
  that needs the least padding. Without padding: the largest divisor not above
  `chunk_size`, however small, as in the published implementation.

  >>> [chunk_length(d, 64) for d in (10, 64, 768, 97, 50257)]
  [10, 64, 64, 49, 64]
  >>> chunk_length(97, 64, padding=False)
  1
  """
  if padding:
    count = -(-size // chunk_size)
    return -(-size // count)
  length = min(size, chunk_size)
  while size % length:
    length -= 1
  return length


def chunk_grid(
  shape: tuple[int, ...],
  sides: tuple[int, int],
  *,
  padding: bool = True,
  fold: Fold | None = None,
  period: int = 1,
) -> ChunkGrid:
  """Returns the grid that cuts the last two folded dimensions.

  `sides` are the longest of a chunk along them; a vector has the second.
  """
  uncut = ChunkGrid(shape, (), fold=fold, period=period)
  sizes = uncut.taken
  lengths = [1] * len(sizes)
  for dim in range(-min(2, len(sizes)), 0):
    lengths[dim] = chunk_length(sizes[dim], sides[dim], padding=padding)
  return dataclasses.replace(uncut, lengths=tuple(lengths))


# Cutting ----------------------------------------------------------------------


def to_chunks(
  array: Array,
  grid: ChunkGrid,
  step: Numeric,
) -> Array:
  """Cuts an array `[*grid.shape]` into chunks `[num_chunks, n]`.

  With a period, takes the elements whose turn it is at a `step`.
  """
  array = array.reshape(grid.folded)  # [*batch, rows, cols], of elements
  mode = 'constant'
  if grid.period > 1:
    array = _take_turns(array, grid, step)
    # Without a momentum nobody repairs a scale that zeros have made smaller.
    mode = 'edge'
  if any(grid.ends):
    widths = [(0, end) for end in grid.ends]
    array = jnp.pad(array, widths, mode)
  batch, rows, cols = grid.folded_counts
  row_length, col_length = grid.sides
  blocks = array.reshape(batch, rows, row_length, cols, col_length)
  # [batch, rows, cols, row_length, col_length]
  chunks = blocks.transpose(0, 1, 3, 2, 4)
  return chunks.reshape(grid.num_chunks, -1)


def from_chunks(
  chunks: Array,
  grid: ChunkGrid,
  step: Numeric,
) -> Array:
  """Undoes `to_chunks`, dropping the padding; zeros were not taken."""
  # [batch, rows, cols, row_length, col_length]
  blocks = chunks.reshape(*grid.folded_counts, *grid.sides)
  # [batch, rows, row_length, cols, col_length]
  blocks = blocks.transpose(0, 1, 3, 2, 4)
  padded = [size + end for size, end in zip(grid.taken, grid.ends)]
  array = blocks.reshape(padded)
  if any(grid.ends):
    array = array[tuple(map(slice, grid.taken))]
  if grid.period > 1:
    array = _put_turns(array, grid, step)
  return array.reshape(grid.shape)


def _take_turns(
  array: Array,
  grid: ChunkGrid,
  step: Numeric,
) -> Array:
  """Returns the elements whose turn it is, `[*grid.taken]`."""
  batch, rows, cols = grid.columns
  array = array.reshape(batch, rows, cols)
  missing = -rows % grid.period
  if missing:
    widths = (0, 0), (0, missing), (0, 0)
    array = jnp.pad(array, widths, 'edge')
  array = array.reshape(batch, -1, grid.period, cols)
  # Along rows: neither vectors nor tiles of a TPU are taken apart. What is not
  # finite among the others makes NaN, which excludes the worker.
  own_turn = _turns(grid.period, cols, step)
  array = jnp.where(own_turn, array, 0 * array)
  taken = jnp.sum(array, axis=2)  # [batch, turns, cols]
  return taken.reshape(grid.taken)


def _put_turns(
  array: Array,
  grid: ChunkGrid,
  step: Numeric,
) -> Array:
  """Undoes `_take_turns`, with zeros elsewhere."""
  batch, rows, cols = grid.columns
  array = array.reshape(batch, -1, 1, cols)
  own_turn = _turns(grid.period, cols, step)
  array = jnp.where(own_turn, array, 0)  # [batch, turns, period, cols]
  array = array.reshape(batch, -1, cols)
  return array[:, :rows]


def _turns(
  period: int,
  cols: int,
  step: Numeric,
) -> Array:
  """Returns whose turn it is, bool `[1, 1, period, cols]`: diagonals."""
  row = np.arange(period, dtype=np.int32)[:, None]
  col = np.arange(cols, dtype=np.int32)[None]
  turns = jnp.asarray((row + step) % period == col % period)
  return turns[None, None]


# Transforming -----------------------------------------------------------------


def transform(
  x: Array,
  sides: tuple[int, int],
  basis: Basis,
) -> Array:
  """Transforms chunks `[chunks, n]` into coefficients `[chunks, n]`.

  Inside a chunk the column frequency is the slow index and the row frequency
  the fast one: the order in which two matrix products from the right produce
  them. Without a transform elements keep their order.
  """
  if isinstance(basis, Identity):
    return x
  rows, cols = sides
  fast = _matrix(basis, cols)
  slow = _matrix(basis, rows)
  return _multiply(x, fast.T, slow.T)


def inverse(
  coefficients: Array,
  sides: tuple[int, int],
  basis: Basis,
) -> Array:
  """Undoes `transform`."""
  if isinstance(basis, Identity):
    return coefficients
  rows, cols = sides
  fast = _matrix(basis, rows)
  slow = _matrix(basis, cols)
  return _multiply(coefficients, fast, slow)


def to_coefficients(
  x: Array,
  grid: ChunkGrid,
  basis: Basis,
) -> Array:
  """Cuts and transforms an array; returns `[*grid.coefficients_shape]`.

  What is kept between steps has no turns.
  """
  chunks = to_chunks(x, grid, step=0)
  coefficients = transform(chunks, grid.sides, basis)
  return coefficients.reshape(grid.coefficients_shape)


def from_coefficients(
  coefficients: Array,
  grid: ChunkGrid,
  basis: Basis,
) -> Array:
  """Undoes `to_coefficients`, dropping the padding."""
  chunks = inverse(coefficients, grid.sides, basis)
  return from_chunks(chunks, grid, step=0)


def _multiply(
  blocks: Array,
  fast: np.ndarray,
  slow: np.ndarray,
) -> Array:
  """Multiplies chunks `[chunks, n]` along their fast and slow index.

  They change places: the slow index becomes the fast one.
  """
  blocks = blocks.reshape(-1, len(slow), len(fast))  # [chunks, slow, fast]
  blocks = _apply(blocks, fast)
  blocks = blocks.transpose(0, 2, 1)  # [chunks, fast, slow]
  blocks = _apply(blocks, slow)
  return blocks.reshape(-1, len(slow) * len(fast))


@functools.cache
def _matrix(
  basis: Basis,
  length: int,
) -> np.ndarray:
  return basis.matrix(length) if length > 1 else np.eye(1)


def _apply(x: Array, matrix: np.ndarray) -> Array:
  """Returns `x @ matrix` for `x [chunks, rows, length]`, in full precision."""
  chunks, rows, length = x.shape
  if length == 1:
    return x
  least = -(-_MIN_ROWS // rows)
  if chunks < least:
    x = plain.pad_to(x, least, axis=0)
  flat = x.reshape(-1, length)  # [chunks * rows, length]
  factor = jnp.asarray(matrix, x.dtype)
  if platform.joins_products(x.size):
    factor = rounding.hidden(factor, flat[:1, :1])
  if platform.chunks_in_lanes(len(x)):
    flat = x
  # The default is bfloat16 on TPUs and TF32 on GPUs.
  product = jnp.dot(flat, factor, precision=jax.lax.Precision.HIGHEST)
  return product.reshape(x.shape)[:chunks]
