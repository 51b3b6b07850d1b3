"""What kernels for GPUs and for TPUs have in common: geometry and arithmetic.

A kernel works on tiles: a matrix cut into `tall x wide` chunks each, where a
vector cut into chunks of length `s` is a matrix of `s` columns whose chunks are
single rows. Functions here whose arguments are plain arrays are called inside
kernels, too: they keep to what both compilers can do.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.compressors.chunking import ChunkGrid

# Length of a side of a chunk -> the matrix of the transform.
Basis = Callable[[int], np.ndarray]

HIGHEST = jax.lax.Precision.HIGHEST

# The bits of numbers that are not negative are ordered as the numbers are, and
# every NaN comes last. They are taken for one, so that there is a number after.
_MAGNITUDE = 0x7FFFFFFF
_NAN = 0x7F800001


@dataclasses.dataclass(frozen=True)
class Cut:
  """How a matrix is cut, `[row_chunks * row_length, col_chunks * col_length]`.

  Attributes:
    row_chunks: number of chunks along the rows.
    col_chunks: number of chunks along the columns.
    row_length: rows of a chunk; 1 for vectors.
    col_length: columns of a chunk.
  """

  row_chunks: int
  col_chunks: int
  row_length: int
  col_length: int

  @classmethod
  def of(cls, grid: ChunkGrid) -> 'Cut':
    """Returns the matrix that an array without padding can be seen as."""
    rows, cols = (1, *grid.lengths)[-2:]
    across = grid.counts[-1] if rows > 1 else 1
    return cls(grid.num_chunks // across, across, rows, cols)

  @property
  def chunks(self) -> int:
    """Number of chunks."""
    return self.row_chunks * self.col_chunks

  @property
  def n(self) -> int:
    """Number of coefficients in a chunk."""
    return self.row_length * self.col_length

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the matrix."""
    return (
        self.row_chunks * self.row_length,
        self.col_chunks * self.col_length,
    )

  @property
  def kind(self) -> tuple[int, int]:
    """The lengths: what chunks of several matrices must share."""
    return self.row_length, self.col_length


@dataclasses.dataclass(frozen=True)
class Tile:
  """A block of `tall x wide` chunks that a program works on.

  Attributes:
    tall: chunks along the rows.
    wide: chunks along the columns.
    row_length: rows of a chunk.
    col_length: columns of a chunk.
  """

  tall: int
  wide: int
  row_length: int
  col_length: int

  @property
  def rows(self) -> int:
    """Rows of the tile."""
    return self.tall * self.row_length

  @property
  def cols(self) -> int:
    """Columns of the tile."""
    return self.wide * self.col_length

  @property
  def outside(self) -> int:
    """A place that no tile has."""
    return self.rows * self.cols

  def count(self, cut: Cut) -> tuple[int, int]:
    """Returns how many tiles a matrix has along its rows and its columns."""
    return cut.row_chunks // self.tall, cut.col_chunks // self.wide

  def bases(self, basis: Basis) -> tuple[jax.Array, jax.Array]:
    """float32 `[rows, rows]` and `[cols, cols]`, `[frequency, position]`.

    One chunk's matrix for each chunk along the diagonal.
    """
    sides = (self.tall, self.row_length), (self.wide, self.col_length)
    rows, cols = (np.kron(np.eye(c), basis(l)) for c, l in sides)
    return jnp.asarray(rows, jnp.float32), jnp.asarray(cols, jnp.float32)


def entries(
    indices: jax.Array,
    values: jax.Array,
    taken: jax.Array,
    cut: Cut,
    tile: Tile,
) -> tuple[jax.Array, jax.Array]:
  """Returns what all workers sent of each tile, with its places in the tile.

  Args:
    indices: int32 `[workers, chunks, k]`.
    values: float32 `[workers, chunks, k]`.
    taken: bool `[workers, chunks]`; other entries are outside of every tile.
    cut: the matrix.
    tile: its tiles.

  Returns:
    int32 and float32 `[tiles, entries]`; a place is
    `col_frequency * tile.rows + row_frequency`, both counted in the tile.
  """
  workers, _, k = indices.shape
  down, across = tile.count(cut)
  split = (workers, down, tile.tall, across, tile.wide, k)
  indices, values = indices.reshape(split), values.reshape(split)
  taken = taken.reshape(*split[:-1], 1)
  row = jax.lax.rem(indices, cut.row_length)
  col = jax.lax.div(indices, cut.row_length)
  row += cut.row_length * jax.lax.broadcasted_iota(jnp.int32, split, 2)
  col += cut.col_length * jax.lax.broadcasted_iota(jnp.int32, split, 4)
  places = jnp.where(taken, col * tile.rows + row, tile.outside)
  values = jnp.where(taken, values, 0)

  def order(x: jax.Array) -> jax.Array:
    x = x.transpose(1, 3, 2, 4, 0, 5)  # [down, across, tall, wide, workers, k]
    return x.reshape(down * across, -1)

  return order(places), order(values)


def pad_entries(
    places: jax.Array, values: jax.Array, tile: Tile, multiple: int
) -> tuple[jax.Array, jax.Array]:
  """Entries `[tiles, e]`, up to a multiple, with some that are outside."""
  more = ((0, 0), (0, -places.shape[1] % multiple))
  return (
      jnp.pad(places, more, constant_values=tile.outside),
      jnp.pad(values, more),
  )


def add_entries(
    places: jax.Array,
    values: jax.Array,
    rows: int,
    cols: int,
    precision: jax.lax.PrecisionLike,
    *,
    counted: bool,
) -> tuple[jax.Array, ...]:
  """Sums, and numbers if `counted`, of the entries at each place of a tile.

  A product of matrices that are zero but for a one (or a value) in each
  column: the sums are exact up to their own rounding, their order is fixed, and
  no place is written twice.

  Args:
    places: int32 `[1, e]`, see `entries`; those outside are left out.
    values: float32 `[1, e]`.
    rows: rows of the tile.
    cols: columns of the tile.
    precision: of the sums.
    counted: whether to count.

  Returns:
    float32 `[rows, cols]`, once or twice.
  """
  row = jax.lax.broadcasted_iota(jnp.int32, (rows, places.shape[1]), 0)
  col = jax.lax.broadcasted_iota(jnp.int32, (cols, places.shape[1]), 0)
  in_row = row == jax.lax.rem(places, jnp.int32(rows))
  in_col = col == jax.lax.div(places, jnp.int32(rows))
  sums = product_t(
      jnp.where(in_row, values, 0.0), in_col.astype(jnp.float32), precision
  )
  if not counted:
    return (sums,)
  counts = product_t(
      in_row.astype(jnp.bfloat16), in_col.astype(jnp.bfloat16), None
  )
  return sums, counts


def product(
    a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike
) -> jax.Array:
  """Returns float32 `a @ b`."""
  return jax.lax.dot_general(
      a, b, (((1,), (0,)), ((), ())), precision=precision,
      preferred_element_type=jnp.float32,
  )


def product_t(
    a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike
) -> jax.Array:
  """Returns float32 `a @ b.T`."""
  return jax.lax.dot_general(
      a, b, (((1,), (1,)), ((), ())), precision=precision,
      preferred_element_type=jnp.float32,
  )


def top_k_mask(
    c: jax.Array, k: int, largest: Callable[[jax.Array], jax.Array]
) -> jax.Array:
  """Returns the `k` largest magnitudes of each row, ties to the lowest index.

  Bisection: first for the bits of the smallest magnitude that is selected;
  then, where more are equal to it than there is room for, for the last index.

  Args:
    c: float32 `[rows, n]`; a NaN counts as larger than all numbers.
    k: how many, below `n`.
    largest: of `[rows, 1]`, as a scalar.

  Returns:
    bool `[rows, n]`, `k` of them true in every row.
  """
  rows, n = c.shape
  bits = jax.lax.bitcast_convert_type(c, jnp.int32) & _MAGNITUDE
  bits = jnp.minimum(bits, _NAN)
  index = jax.lax.broadcasted_iota(jnp.int32, (rows, n), 1)

  def count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32), axis=1, keepdims=True)

  low = jnp.zeros((rows, 1), jnp.int32)
  high = jnp.max(bits, axis=1, keepdims=True) + 1
  enough = jnp.full((rows, 1), n, jnp.int32)

  # At least k are as large as `low` (exactly `enough`), fewer as `high`.
  def open_bits(state: tuple[jax.Array, ...]) -> jax.Array:
    low, high, enough = state
    return largest(jnp.where(enough == k, 0, high - low)) > 1

  def halve_bits(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    low, high, enough = state
    middle = low + jax.lax.div(high - low, 2)
    found = count(bits >= middle)
    up = found >= k
    return (
        jnp.where(up, middle, low),
        jnp.where(up, high, middle),
        jnp.where(up, found, enough),
    )

  state: tuple[jax.Array, ...] = (low, high, enough)
  low, high, enough = jax.lax.while_loop(open_bits, halve_bits, state)
  larger = bits > low
  equal = bits == low
  room = k - count(larger)

  # Those equal up to `last` fill the room, those up to `before` do not.
  def open_index(state: tuple[jax.Array, ...]) -> jax.Array:
    before, last = state
    return largest(last - before) > 1

  def halve_index(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    before, last = state
    middle = before + jax.lax.div(last - before, 2)
    filled = count(equal & (index <= middle)) >= room
    return jnp.where(filled, before, middle), jnp.where(filled, middle, last)

  last = jnp.full((rows, 1), n - 1, jnp.int32)
  span: tuple[jax.Array, ...] = (jnp.where(enough == k, last - 1, -1), last)
  _, last = jax.lax.while_loop(open_index, halve_index, span)
  return larger | (equal & (index <= last))


def vary_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Makes all arrays vary over what any does, where shard_map tracks it."""
  axes = set().union(*map(varying, arrays))
  return [
      jax.lax.pcast(x, tuple(axes - varying(x)), to='varying')
      if axes - varying(x) else x
      for x in arrays
  ]


def like(
    shape: Sequence[int], dtype: jnp.dtype, x: jax.Array
) -> jax.ShapeDtypeStruct:
  """Returns the type of a result that varies over what `x` does."""
  axes = jax.sharding.ManualAxisType(varying=frozenset(varying(x)))
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes)


def varying(x: jax.Array) -> set[str]:
  """Returns the mapped axes that `x` is known to vary over."""
  return set(getattr(getattr(jax.typeof(x), 'mat', None), 'varying', ()))
