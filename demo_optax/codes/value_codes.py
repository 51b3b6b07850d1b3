"""Codes for selected values, `[..., chunks, k]`.

`encode` returns uint32 words, and the values that receivers will decode. The
sender subtracts exactly those: what a code loses stays in its momentum, if it
has one, to the last bit. With a chunk's values v, and its scale s in bfloat16:

    name      bits per value  per chunk  decoded as
    float32   32 (or 64)      0          v, in the momentum's dtype
    int8      8               16         s round(v / s), s = max |v| / 127
    int4      4               16         the same, s = max |v| / 7
    sign      1               16         +s or -s, s = mean |v|
    ternary   1.6             0          -1, 0 or 1: for updates alone

Levels are clipped to their range. Subnormal scales (below 2^-126) are decoded
as zero. Values come clipped, so that no sum and no product overflows: see
`ChunkFormat.max_magnitude`.

Equal values must give equal bits in every program. Compilers may contract a
product and a sum, regroup sums, and replace divisions by products, depending on
the program. So products level times scale are exact (8 bits times 8 bits),
and sums are trees: elementwise additions. An inverse is a separate array.
A bfloat16 is made by `reduce_precision`: compilers may drop conversions.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from demo_optax.codes.parts import Code, Parts, as_row
from demo_optax.numerics import plain

_TINY = float(np.finfo(np.float32).tiny)
_PER_WORD = 20  # ternary digits
_POWERS = (3 ** np.arange(_PER_WORD, dtype=np.uint32))[:, None]


@dataclasses.dataclass(frozen=True)
class ValueCode(Code):
  """How the values sent from every chunk are written."""

  dtype: str  # of the momentum
  k: int  # values of a chunk

  def encode(self, values: Array) -> tuple[Array, Array]:
    """Writes values `[..., chunks, k]`, as uint32 `[..., words]`.

    Also returns the values that receivers decode.
    """
    raise NotImplementedError


class Exact(ValueCode):
  """Values as they are; float64 as halves, the low ones first."""

  @property
  def parts(self) -> Parts:
    halves = jnp.dtype(self.dtype).itemsize // 4
    return ((self.k, 32),) * halves

  def encode(self, values: Array) -> tuple[Array, Array]:
    words = lax.bitcast_convert_type(values, jnp.uint32)
    words = words.reshape(*values.shape, -1)  # [..., k, halves]
    halves = jnp.moveaxis(words, -1, 0)
    return self.pack(*halves), values

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    halves = self.unpack(data, chunks)
    words = jnp.stack(halves, axis=-1)  # [..., k, halves]
    values = lax.bitcast_convert_type(words, self.dtype)
    return values.reshape(words.shape[:-1])


class Scaled(ValueCode):
  """Levels with a few bits each, times a bfloat16 scale per chunk.

  Levels are `-limit, -limit + spacing, ... limit`.
  """

  width: ClassVar[int]  # bits of a level
  limit: ClassVar[int]
  spacing: ClassVar[int] = 1

  @property
  def parts(self) -> Parts:
    return (self.k, self.width), (1, 16)

  def encode(self, values: Array) -> tuple[Array, Array]:
    values = _without_subnormals(values)
    levels, scales = self._quantise(values)
    levels = levels.astype(jnp.int32)  # no -0
    from_zero = (levels + self.limit).astype(jnp.uint32)
    numbers = from_zero // self.spacing
    # The upper halves of float32 are bfloat16.
    halves = lax.bitcast_convert_type(scales, jnp.uint32) >> 16
    data = self.pack(numbers, halves)
    return data, self._products(levels, scales)

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    # [..., chunks, k] and [..., chunks, 1]
    numbers, halves = self.unpack(data, chunks)
    from_zero = numbers.astype(jnp.int32) * self.spacing
    levels = from_zero - self.limit
    scales = lax.bitcast_convert_type(halves << 16, jnp.float32)
    scales = _without_subnormals(scales)
    return self._products(levels, scales)

  def _products(
    self,
    levels: Array,
    scales: Array,
  ) -> Array:
    """Returns the values that receivers decode."""
    return levels.astype(self.dtype) * scales.astype(self.dtype)

  def _quantise(self, values: Array) -> tuple[Array, Array]:
    """Returns levels, and scales `[..., chunks, 1]`: bfloat16s as float32.

    The largest magnitude becomes `limit`.
    """
    limit = self.limit
    magnitudes = jnp.abs(values)
    largest = jnp.max(magnitudes, axis=-1, keepdims=True)
    spread = largest.astype(jnp.float32) * np.float32(1 / limit)
    scales = _round(spread)
    inverse = jnp.where(scales > 0, 1 / scales, 0)
    inverse = inverse.astype(values.dtype)
    levels = jnp.round(values * inverse)
    # The scale may have been rounded down.
    levels = jnp.clip(levels, -limit, limit)
    return levels, scales


class Int8(Scaled):
  """Integers with 8 bits."""

  width = 8
  limit = 127


class Int4(Scaled):
  """Integers with 4 bits."""

  width = 4
  limit = 7


class Sign(Scaled):
  """Signs, times the mean magnitude, the least-squares scale."""

  width = 1
  limit = 1
  spacing = 2

  def _quantise(self, values: Array) -> tuple[Array, Array]:
    signs = jnp.where(values >= 0, jnp.ones_like(values), -1)
    scales = _round(_mean_magnitude(values))
    return signs, scales


class Ternary(ValueCode):
  """Signs, -1, 0 or 1, twenty to a word: for updates that only need signs.

  They are digits to base three, in planes as in `pack_bits`.
  """

  def words(self, chunks: int) -> int:
    return -(-chunks * self.k // _PER_WORD)

  def encode(self, values: Array) -> tuple[Array, Array]:
    *lead, chunks, _ = values.shape
    size = self.words(chunks)
    above = (values > 0).astype(jnp.int8)
    below = (values < 0).astype(jnp.int8)
    signs = above - below
    digits = as_row(signs + 1)  # [..., chunks * k]
    digits = plain.pad_to(digits, size * _PER_WORD)
    digits = digits.reshape(*lead, _PER_WORD, size)
    powers = lax.broadcast_to_rank(_POWERS, digits.ndim)  # [..., 20, 1]
    data = jnp.sum(digits * powers, axis=-2, dtype=jnp.uint32)
    return data, signs.astype(values.dtype)

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    *lead, _ = data.shape
    words = data[..., None, :]  # [..., 1, words]
    powers = lax.broadcast_to_rank(_POWERS, words.ndim)
    # [..., 20, words]; digits also for words that no signs make.
    digits = words // powers % 3
    signs = digits.astype(self.dtype) - 1
    signs = signs.reshape(*lead, -1)  # [..., chunks * k, and padding]
    num_signs = chunks * self.k
    return signs[..., :num_signs].reshape(*lead, chunks, self.k)


def _mean_magnitude(values: Array) -> Array:
  """Returns float32 means `[..., 1]`, summed in one fixed order."""
  k = values.shape[-1]
  width = 1 << (k - 1).bit_length()
  magnitudes = jnp.abs(values).astype(jnp.float32)
  sums = plain.pad_to(magnitudes, width)
  # Neighbours at half of the width, then at a quarter: a tree of sums.
  while width > 1:
    width //= 2
    sums = sums[..., :width] + sums[..., width:]
  return sums * np.float32(1 / k)


def _round(x: Array) -> Array:
  """Rounds float32 to bfloat16's numbers, ties to even, no subnormals."""
  return lax.reduce_precision(
    _without_subnormals(x),
    exponent_bits=8,
    mantissa_bits=7,
  )


def _without_subnormals(x: Array) -> Array:
  """Replaces subnormal numbers by zero.

  Some devices and threads flush them. A subnormal scale has no finite inverse.
  """
  is_subnormal = jnp.abs(x) < _TINY
  return jnp.where(is_subnormal, 0, x)


CODES: dict[str, type[ValueCode]] = {
  'float32': Exact,
  'int8': Int8,
  'int4': Int4,
  'sign': Sign,
  'ternary': Ternary,
}

# Codes of updates; those of them without error feedback; codes of coefficients.
UPDATE_VALUES = tuple(CODES)
WITHOUT_RESIDUAL = 'float32', 'ternary'
VALUES = UPDATE_VALUES[:-1]
