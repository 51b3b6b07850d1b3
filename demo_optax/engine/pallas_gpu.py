"""The step's two kernels for GPUs, written for Pallas' Triton backend.

A program has one chunk of a matrix (of a vector: 16 chunks) in its registers,
read straight from where the parameter's layout has it. Several leaves share a
launch: a program finds the leaf that its number falls in.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from demo_optax.engine import pallas_common as kernel_math
from demo_optax.engine.pallas_common import Basis, Cut, Tile

# Three bfloat16 numbers hold a float32, and six products of theirs are as
# precise as float32's own. Tensor cores do them; products of float32 numbers
# are unrolled and run out of registers (`benchmarks/README.md`, 'Kernels').
_PRECISION = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6

LEAVES = 8  # of a launch; a program compares its number with each one's first

_VECTORS = 16  # the fewest rows of a product that the hardware knows
_ENTRIES = 32  # that are added to a tile at once


def tile(kind: tuple[int, int]) -> Tile:
  """Returns what a program works on."""
  row_length, col_length = kind
  return Tile(_VECTORS if row_length == 1 else 1, 1, row_length, col_length)


def applies(cut: Cut) -> bool:
  """Returns whether a matrix is made of such tiles, and counted in 32 bits.

  And whether its chunks fit: before Hopper those of 128 x 128 need more
  registers and shared memory than there are, before Ampere all are too slow.
  """
  largest = 128 * 128 if _capability() >= 9 else 64 * 64
  return (
      _capability() >= 8
      and cut.n <= largest
      and cut.row_chunks % tile(cut.kind).tall == 0
      and cut.chunks * cut.n < 2**31
  )


def _capability() -> float:
  """The GPU's compute capability; 9 where kernels are only looked at."""
  if jax.default_backend() != 'gpu':
    return 9.0
  try:
    return float(jax.devices()[0].compute_capability)
  except ValueError:  # not NVIDIA's: nobody has tried
    return 0.0


def encode(
    gradients: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
    scalars: jax.Array,
    cuts: Sequence[Cut],
    k: int,
    basis: Basis,
    limit: float | None,
    *,
    interpret: bool = False,
    precision: jax.lax.PrecisionLike = _PRECISION,
    num_warps: int | None = None,
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
  """Adds gradients to momentum, selects, and takes away what is sent.

  Args:
    gradients: float32 or bfloat16 `[*cut.shape]`, alike in dtype.
    momentum: float32 `[row_chunks, col_chunks, n]`.
    scalars: float32 `[3]`: the decay, the gradient's weight, and 1 if the
      worker takes part, else 0: then momentum stays as it is.
    cuts: of the matrices, alike in the lengths of their chunks.
    k: coefficients selected of a chunk.
    basis: the transform of one side of a chunk.
    limit: the largest magnitude that is sent, and taken away; None: nothing is.
    interpret: run it without a GPU.
    precision: of the transform's products.
    num_warps: threads of a program / 32; by default as many as are best.

  Returns:
    for each leaf momentum, int32 indices and float32 values `[chunks, k]`,
    ascending within a chunk.
  """
  shape = tile(cuts[0].kind)
  starts, total = _starts(cuts, shape)
  rows, cols = shape.bases(basis)
  args = kernel_math.vary_alike(
      [scalars, rows.T, cols.T, *gradients, *momentum]
  )
  flat = [m.reshape(_rows(c), -1) for m, c in zip(args[-len(cuts):], cuts)]
  args[-len(cuts):] = flat
  selected = (total * shape.tall, k)
  *kept, indices, values = pl.pallas_call(
      functools.partial(
          _encode, cuts=tuple(cuts), starts=starts, k=k, limit=limit,
          precision=precision,
      ),
      grid=(total,),
      out_shape=[
          *(kernel_math.like(m.shape, m.dtype, m) for m in flat),
          kernel_math.like(selected, jnp.dtype('int32'), flat[0]),
          kernel_math.like(selected, jnp.dtype('float32'), flat[0]),
      ],
      input_output_aliases={3 + len(cuts) + i: i for i in range(len(cuts))},
      compiler_params=plgpu.CompilerParams(
          num_warps=num_warps or _warps(shape)
      ),
      interpret=interpret,
      name='demo_encode',
  )(*args)
  ends = np.cumsum([c.chunks for c in cuts])[:-1]
  return list(zip(
      (x.reshape(m.shape) for x, m in zip(kept, momentum)),
      jnp.split(indices, ends),
      jnp.split(values, ends),
  ))


def _encode(
    scalars: Any,
    row_basis: Any,
    col_basis: Any,
    *refs: Any,
    cuts: tuple[Cut, ...],
    starts: tuple[int, ...],
    k: int,
    limit: float | None,
    precision: jax.lax.PrecisionLike,
) -> None:
  leaves, shape = len(cuts), tile(cuts[0].kind)
  gradients, kept = refs[:leaves], refs[2 * leaves : 3 * leaves]
  indices, values = refs[3 * leaves :]
  decay, weight, present = scalars[0], scalars[1], scalars[2]
  number, leaf, place = _find(starts)

  def gradient_at(leaf: int) -> Any:
    row, col = _corner(place, cuts[leaf], shape)
    return gradients[leaf].at[pl.ds(row, shape.rows), pl.ds(col, shape.cols)]

  def momentum_at(leaf: int) -> Any:
    # of a vector [16 chunks, frequency]; [column frequency, row frequency]
    tall, wide = (shape.rows, shape.cols)[:: 1 if shape.tall > 1 else -1]
    return kept[leaf].at[pl.ds(place * tall, tall), pl.ds(0, wide)]

  def load(leaf: int) -> tuple[jax.Array, jax.Array]:
    g = plgpu.load(gradient_at(leaf)).astype(jnp.float32)
    return g, plgpu.load(momentum_at(leaf))

  g, m = _switch(leaf, [functools.partial(load, i) for i in range(leaves)])
  c = kernel_math.product(weight * g, plgpu.load(col_basis), precision)
  if shape.tall == 1:
    c = kernel_math.product(c.T, plgpu.load(row_basis), precision)
  c = jnp.where(present > 0, decay * m + c, m).reshape(shape.tall, -1)

  mask = kernel_math.top_k_mask(c, k, _largest)
  index = jax.lax.broadcasted_iota(jnp.int32, c.shape, 1)
  # What is not selected has a place outside of the array, masked or not.
  order = jnp.where(mask, jnp.cumsum(mask.astype(jnp.int32), axis=1) - 1, k)
  chunk = number * shape.tall
  chunk += jax.lax.broadcasted_iota(jnp.int32, c.shape, 0)
  plgpu.store(indices.at[chunk, order], index, mask=mask)
  plgpu.store(values.at[chunk, order], c, mask=mask)

  if limit is not None:
    c = jnp.where(mask, c - jnp.clip(c, -limit, limit), c)
  c = c.reshape(m.shape)

  for i in range(leaves):
    @pl.when((leaf == i) & (present > 0))
    def _(i: int = i) -> None:
      plgpu.store(momentum_at(i), c)


def decode(
    places: jax.Array,
    values: jax.Array,
    cuts: Sequence[Cut],
    basis: Basis,
    *,
    weighted: bool,
    signed: bool = False,
    interpret: bool = False,
    precision: jax.lax.PrecisionLike = _PRECISION,
    num_warps: int | None = None,
) -> list[jax.Array]:
  """Returns what all workers sent, merged and transformed back.

  Args:
    places: int32 `[tiles, entries]` of all leaves, `kernel_math.entries`.
    values: float32 `[tiles, entries]`.
    cuts: of the matrices, alike in the lengths of their chunks.
    basis: the transform of one side of a chunk.
    weighted: values have their weights; else a coefficient's sum is divided by
      the number of its entries.
    signed: only signs of the result.
    interpret: run it without a GPU.
    precision: of all products.
    num_warps: threads of a program / 32; by default as many as are best.

  Returns:
    float32 `[*cut.shape]` for each leaf.
  """
  shape = tile(cuts[0].kind)
  starts, total = _starts(cuts, shape)
  places, values = kernel_math.pad_entries(places, values, shape, _ENTRIES)
  rows, cols = shape.bases(basis)
  args = kernel_math.vary_alike([rows.T, cols, places, values])
  float32 = jnp.dtype('float32')
  return pl.pallas_call(
      functools.partial(
          _decode, cuts=tuple(cuts), starts=starts, weighted=weighted,
          signed=signed, precision=precision,
      ),
      grid=(total,),
      out_shape=[kernel_math.like(c.shape, float32, args[-1]) for c in cuts],
      compiler_params=plgpu.CompilerParams(
          num_warps=num_warps or _warps(shape)
      ),
      interpret=interpret,
      name='demo_decode',
  )(*args)


def _decode(
    row_basis: Any,
    col_basis: Any,
    places: Any,
    values: Any,
    *updates: Any,
    cuts: tuple[Cut, ...],
    starts: tuple[int, ...],
    weighted: bool,
    signed: bool,
    precision: jax.lax.PrecisionLike,
) -> None:
  shape = tile(cuts[0].kind)
  number, leaf, place = _find(starts)

  def add(
      block: jax.Array, totals: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    at = pl.ds(number, 1), pl.ds(block * _ENTRIES, _ENTRIES)
    new = kernel_math.add_entries(
        plgpu.load(places.at[at]), plgpu.load(values.at[at]),
        shape.rows, shape.cols, precision, counted=not weighted,
    )
    return tuple(a + b for a, b in zip(totals, new))

  zeros = jnp.zeros((shape.rows, shape.cols), jnp.float32)
  c, *counts = jax.lax.fori_loop(
      0, places.shape[1] // _ENTRIES, add, (zeros,) * (1 if weighted else 2)
  )
  if not weighted:
    c = c / jnp.maximum(counts[0], 1.0)
  u = kernel_math.product(c, plgpu.load(col_basis), precision)
  if shape.tall == 1:
    u = kernel_math.product(plgpu.load(row_basis), u, precision)
  if signed:
    u = jnp.sign(u)
  for i, cut in enumerate(cuts):
    @pl.when(leaf == i)
    def _(i: int = i, cut: Cut = cut) -> None:
      row, col = _corner(place, cut, shape)
      at = pl.ds(row, shape.rows), pl.ds(col, shape.cols)
      plgpu.store(updates[i].at[at], u)


def _starts(cuts: Sequence[Cut], shape: Tile) -> tuple[tuple[int, ...], int]:
  """Returns the first tile of each leaf, and the number of all tiles."""
  counts = np.cumsum([0, *(c.chunks // shape.tall for c in cuts)])
  return tuple(int(x) for x in counts[:-1]), int(counts[-1])


def _rows(cut: Cut) -> int:
  """Rows of momentum as a matrix: chunks of a vector, or column frequencies."""
  return cut.chunks * (1 if cut.row_length == 1 else cut.col_length)


def _find(
    starts: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns a program's number, its leaf, and its number in the leaf."""
  number = pl.program_id(0)
  leaf, first = jnp.int32(0), jnp.int32(0)
  for start in starts[1:]:
    leaf += (number >= start).astype(jnp.int32)
    first = jnp.where(number >= start, start, first)
  return number, leaf, number - first


def _corner(
    place: jax.Array, cut: Cut, shape: Tile
) -> tuple[jax.Array, jax.Array]:
  """Returns where in its matrix a tile begins."""
  row = jax.lax.div(place, cut.col_chunks) * shape.rows
  return row, jax.lax.rem(place, cut.col_chunks) * shape.cols


def _largest(x: jax.Array) -> jax.Array:
  """Of `[rows, 1]`: Triton reduces one axis after the other."""
  return jnp.max(jnp.max(x, axis=1), axis=0)


def _switch(leaf: jax.Array, branches: Sequence[Callable[[], Any]]) -> Any:
  if len(branches) == 1:
    return branches[0]()
  return jax.lax.switch(leaf, branches)


def _warps(shape: Tile) -> int:
  """Threads / 32: the most that keep a tile in registers, as compiled."""
  return 4 if shape.rows * shape.cols < 64 * 64 else 8
