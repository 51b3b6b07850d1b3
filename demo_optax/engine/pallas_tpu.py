"""The step's two kernels for TPUs, written for Pallas' Mosaic backend.

A program has a block of 128 rows and, to write momentum in whole tiles of
8 x 128 numbers, of 8 chunks side by side (of vectors: 128 chunks).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from demo_optax.engine import pallas_common as kernel_math
from demo_optax.engine.pallas_common import HIGHEST, Basis, Cut, Tile

LEAVES = 1  # of a launch; a launch costs little here

_LANES = 128
_BESIDE = 8  # chunks along the columns that a program selects from
_ENTRIES = 512  # that are added to a tile at once


def tile(kind: tuple[int, int]) -> Tile:
  """What is multiplied by one matrix: 128 rows, and columns of matrices."""
  row_length, col_length = kind
  wide = 1 if row_length == 1 else _LANES // col_length
  return Tile(_LANES // row_length, wide, row_length, col_length)


def applies(cut: Cut) -> bool:
  """Returns whether a matrix is made of such blocks."""
  beside = 1 if cut.row_length == 1 else _BESIDE
  return (
      cut.row_chunks % tile(cut.kind).tall == 0 and cut.col_chunks % beside == 0
  )


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
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
  """Adds gradients to momentum, selects, and takes away what is sent.

  See `kernels_gpu.encode`, whose arguments and results these are.
  """
  return [
      _encode_leaf(g, m, scalars, cut, k, basis, limit, interpret)
      for g, m, cut in zip(gradients, momentum, cuts)
  ]


def _encode_leaf(
    gradient: jax.Array,
    momentum: jax.Array,
    scalars: jax.Array,
    cut: Cut,
    k: int,
    basis: Basis,
    limit: float | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  shape = tile(cut.kind)
  beside = 1 if cut.row_length == 1 else _BESIDE
  rows, cols = shape.bases(basis)
  args = kernel_math.vary_alike(
      [scalars[None], rows.T, cols.T, gradient, momentum]
  )
  like = functools.partial(kernel_math.like, x=args[-1])

  def block(*lengths: int) -> pl.BlockSpec:
    return pl.BlockSpec(lengths, lambda i, j: (i, j, 0)[: len(lengths)])

  def whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, j: (0, 0))

  outside = cut.row_chunks, cut.col_chunks
  inside = shape.tall, beside
  kept, indices, values = pl.pallas_call(
      functools.partial(_encode, shape=shape, k=k, limit=limit),
      grid=(cut.row_chunks // shape.tall, cut.col_chunks // beside),
      in_specs=[
          pl.BlockSpec(memory_space=pltpu.SMEM),
          whole(rows),
          whole(cols),
          block(shape.rows, beside * cut.col_length),
          block(*inside, cut.n),
      ],
      out_specs=[block(*inside, cut.n), block(*inside, k), block(*inside, k)],
      out_shape=[
          like(momentum.shape, momentum.dtype),
          like((*outside, k), jnp.dtype('int32')),
          like((*outside, k), jnp.dtype('float32')),
      ],
      scratch_shapes=[
          pltpu.VMEM((beside * cut.col_length, shape.rows), jnp.float32),
          pltpu.VMEM((shape.tall * beside, cut.n), jnp.float32),
      ],
      input_output_aliases={4: 0},
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'parallel')
      ),
      interpret=interpret,
      name='demo_encode',
  )(*args)
  return kept, indices.reshape(-1, k), values.reshape(-1, k)


def _encode(
    scalars: Any,
    row_basis: Any,
    col_basis: Any,
    gradient: Any,
    momentum: Any,
    kept: Any,
    indices: Any,
    values: Any,
    turned: Any,
    held: Any,
    *,
    shape: Tile,
    k: int,
    limit: float | None,
) -> None:
  decay, weight, present = (scalars[0, i] for i in range(3))
  if shape.row_length == 1:
    g = weight * gradient[...].astype(jnp.float32)
    held[...] = kernel_math.product(g, col_basis[...], HIGHEST)
  else:
    _transform(weight, gradient, row_basis, col_basis, turned, held, shape)

  m = momentum[...].reshape(held.shape)
  c = jnp.where(present > 0, decay * m + held[...], m)
  n = c.shape[1]
  mask = kernel_math.top_k_mask(c, k, jnp.max)
  rest = c
  if limit is not None:
    rest = jnp.where(mask, c - jnp.clip(c, -limit, limit), c)
  kept[...] = jnp.where(present > 0, rest, m).reshape(kept.shape)

  index = jax.lax.broadcasted_iota(jnp.int32, c.shape, 1)
  left = jnp.where(mask, index, n)
  place = jax.lax.broadcasted_iota(jnp.int32, (len(c), k), 1)

  def take(
      number: jax.Array, state: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    last, found, taken = state
    following = jnp.where(left > last, left, n)
    last = jnp.min(following, axis=1, keepdims=True)
    value = jnp.sum(jnp.where(index == last, c, 0.0), axis=1, keepdims=True)
    here = place == number
    return last, jnp.where(here, last, found), jnp.where(here, value, taken)

  state = (
      jnp.full((len(c), 1), -1, jnp.int32),
      jnp.zeros((len(c), k), jnp.int32),
      jnp.zeros((len(c), k), jnp.float32),
  )
  _, found, taken = jax.lax.fori_loop(0, k, take, state)
  indices[...] = found.reshape(indices.shape)
  values[...] = taken.reshape(values.shape)


def _transform(
    weight: jax.Array,
    gradient: Any,
    row_basis: Any,
    col_basis: Any,
    turned: Any,
    held: Any,
    shape: Tile,
) -> None:
  """The gradient's coefficients, `[chunk, n]` into `held`.

  128 columns at a time, several chunks of them, times a matrix that has one
  chunk's on its diagonal; what is then in `turned` is a row for each chunk and
  column frequency, and in it, for each chunk above, all row frequencies.
  """
  for start in range(0, gradient.shape[1], _LANES):
    at = pl.ds(start, _LANES)
    x = weight * gradient[:, at].astype(jnp.float32)
    x = kernel_math.product(x, col_basis[...], HIGHEST)
    turned[at, :] = kernel_math.product(x.T, row_basis[...], HIGHEST)

  lane = jax.lax.broadcasted_iota(jnp.int32, (_BESIDE, _LANES), 1)
  length, tall = shape.row_length, shape.tall
  for start in range(0, held.shape[1], _LANES):  # of so many coefficients
    pieces = []
    for number in range(tall):  # column frequencies among them
      frequency = start // length + number
      rows = pl.ds(frequency, _BESIDE, stride=shape.col_length)
      pieces.append(turned[rows, :])
    for i in range(tall):
      c = pieces[0]
      for number, piece in enumerate(pieces):
        shift = (number - i) * length % _LANES
        rolled = pltpu.roll(piece, shift, 1) if shift else piece
        c = jnp.where(lane // length == number, rolled, c)
      held[pl.ds(i * _BESIDE, _BESIDE), pl.ds(start, _LANES)] = c


def decode(
    places: jax.Array,
    values: jax.Array,
    cuts: Sequence[Cut],
    basis: Basis,
    *,
    weighted: bool,
    signed: bool = False,
    interpret: bool = False,
) -> list[jax.Array]:
  """Returns what all workers sent, merged and transformed back.

  See `kernels_gpu.decode`, whose arguments and results these are; one leaf.
  """
  (cut,) = cuts
  shape = tile(cut.kind)
  block = min(_ENTRIES, -(-places.shape[1] // _LANES) * _LANES)
  places, values = kernel_math.pad_entries(places, values, shape, block)
  rows, cols = shape.bases(basis)
  tiles, entries = places.shape
  down, across = shape.count(cut)
  sent = pl.BlockSpec((1, 1, block), lambda i, j, e: (i * across + j, 0, e))
  args = kernel_math.vary_alike([
      rows.T, cols, *(x.reshape(tiles, 1, entries) for x in (places, values))
  ])
  update = pl.pallas_call(
      functools.partial(
          _decode, shape=shape, weighted=weighted, signed=signed
      ),
      grid=(down, across, entries // block),
      in_specs=[
          pl.BlockSpec(rows.shape, lambda i, j, e: (0, 0)),
          pl.BlockSpec(cols.shape, lambda i, j, e: (0, 0)),
          sent,
          sent,
      ],
      out_specs=pl.BlockSpec(
          (shape.rows, shape.cols), lambda i, j, e: (i, j)
      ),
      out_shape=kernel_math.like(cut.shape, jnp.dtype('float32'), args[-1]),
      scratch_shapes=[
          pltpu.VMEM((1 if weighted else 2, shape.rows, shape.cols),
                     jnp.float32)
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'parallel', 'arbitrary')
      ),
      interpret=interpret,
      name='demo_decode',
  )(*args)
  return [update]


def _decode(
    row_basis: Any,
    col_basis: Any,
    places: Any,
    values: Any,
    update: Any,
    totals: Any,
    *,
    shape: Tile,
    weighted: bool,
    signed: bool,
) -> None:
  number = pl.program_id(2)

  @pl.when(number == 0)
  def _() -> None:
    totals[...] = jnp.zeros(totals.shape, jnp.float32)

  new = kernel_math.add_entries(
      places[0], values[0], shape.rows, shape.cols, HIGHEST,
      counted=not weighted,
  )
  for i, x in enumerate(new):
    totals[i] += x

  @pl.when(number == pl.num_programs(2) - 1)
  def _() -> None:
    c = totals[0]
    if not weighted:
      c = c / jnp.maximum(totals[1], 1.0)
    u = kernel_math.product(c, col_basis[...], HIGHEST)
    if shape.row_length > 1:
      u = kernel_math.product(row_basis[...], u, HIGHEST)
    update[...] = jnp.sign(u) if signed else u
