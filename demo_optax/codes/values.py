"""Codes of the values: what is sent of every coefficient selected.

`encode` returns the bytes and, beside them, the values that everybody will read
from these bytes. The sender takes those out of its momentum, so that what a
code loses stays in the momentum, to the last bit.

The same values must give the same bits in every program. Compilers contract a
product and a sum, regroup sums and turn divisions into products, or not,
depending on the program around them. Hence: a level times a scale is exact (8
bits times 8 bits), sums are trees of elementwise additions, an inverse is an
array of its own, and bfloat16 is made by `reduce_precision`, since a conversion
there and back may be left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import bits as packing

_MAX = np.finfo(np.float32).max
_TINY = np.finfo(np.float32).tiny
_SCALE_BYTES = 2
_IN_A_BYTE = 5  # numbers of three values: 3**5 is 243
_POWERS = tuple(3**place for place in range(_IN_A_BYTE))


class ValueCode(Protocol):
  """How the values sent of every chunk are written."""

  def num_bytes(self, chunks: int, k: int) -> int:
    """Returns the bytes that `k` values of each of so many chunks take."""

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packs `[chunks, k]`; returns uint8 `[num_bytes]`, and what is read."""

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Undoes `encode` for uint8 `[bytes]`; returns `[chunks, k]`."""


@dataclasses.dataclass(frozen=True)
class Exact:
  """Values as they are, in the dtype of the momentum."""

  dtype: str

  def num_bytes(self, chunks: int, k: int) -> int:
    """Returns 4 bytes each, or 8 for float64."""
    return chunks * k * jnp.dtype(self.dtype).itemsize

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bytes of the values."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(-1), values

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Returns the values of the bytes."""
    dtype = jnp.dtype(self.dtype)
    data = data.reshape(chunks, k, dtype.itemsize)
    return jax.lax.bitcast_convert_type(data, dtype)


@dataclasses.dataclass(frozen=True)
class BFloat16:
  """Values rounded to bfloat16; beyond its range, its largest."""

  dtype: str

  def num_bytes(self, chunks: int, k: int) -> int:
    """Returns 2 bytes each."""
    return chunks * k * 2

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded values."""
    largest = _largest_scale(1)
    rounded = _round(jnp.clip(values, -largest, largest).astype(jnp.float32))
    return _bfloat16_bytes(rounded), rounded.astype(values.dtype)

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Returns the rounded values."""
    values = _without_subnormals(_from_bfloat16_bytes(data))
    return values.astype(self.dtype).reshape(chunks, k)


@dataclasses.dataclass(frozen=True)
class Scaled:
  """Levels of a few bits each, times a bfloat16 scale per chunk.

  Attributes:
    dtype: name of the dtype of the momentum.
    width: bits of a level.
    limit: levels are `-limit, -limit + spacing, ... limit`.
    spacing: from one level to the next.
    quantise: `(values [chunks, k], limit) -> (levels [chunks, k], scales
      [chunks, 1])`, scales being float32 that bfloat16 can hold.
  """

  dtype: str
  width: int
  limit: int
  spacing: int
  quantise: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]

  def num_bytes(self, chunks: int, k: int) -> int:
    """Returns the bytes: `width` bits each, and a scale per chunk."""
    packed = packing.packed_size(chunks * k, self.width)
    return packed + chunks * _SCALE_BYTES

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the levels of all chunks, packed, then their scales."""
    levels, scales = self.quantise(_without_subnormals(values), self.limit)
    levels = levels.astype(jnp.int32)  # which have no -0
    numbers = (levels + self.limit).astype(jnp.uint32) // self.spacing
    packed = packing.pack_bits(numbers.reshape(-1), self.width)
    data = jnp.concatenate([packed, _bfloat16_bytes(scales)])
    return data, levels.astype(values.dtype) * scales.astype(values.dtype)

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Levels times scales."""
    split = packing.packed_size(chunks * k, self.width)
    numbers = packing.unpack_bits(data[:split], chunks * k, self.width)
    levels = numbers.astype(jnp.int32) * self.spacing - self.limit
    levels = levels.reshape(chunks, k).astype(self.dtype)
    scales = _without_subnormals(_from_bfloat16_bytes(data[split:]))
    return levels * scales.astype(self.dtype)[:, None]


@dataclasses.dataclass(frozen=True)
class Ternary:
  """Signs: -1, 0 or 1, five of them in a byte.

  For updates of which nothing but the sign is wanted.
  """

  dtype: str

  def num_bytes(self, chunks: int, k: int) -> int:
    """Returns the bytes of 1.6 bits each."""
    return -(-chunks * k // _IN_A_BYTE)

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Writes five signs to a byte.

    They are `num_bytes` apart, so that each digit of all bytes is one slice;
    five neighbours in a byte would be five strided reads.
    """
    chunks, k = values.shape
    size = self.num_bytes(chunks, k)
    signs = (values > 0).astype(jnp.int8) - (values < 0).astype(jnp.int8)
    digits = (signs + jnp.int8(1)).astype(jnp.uint8).reshape(-1)
    digits = jnp.pad(digits, (0, size * _IN_A_BYTE - chunks * k))
    data = jnp.zeros((size,), jnp.uint8)
    for place, power in enumerate(_POWERS):
      own = jax.lax.slice_in_dim(digits, place * size, (place + 1) * size)
      data += own * jnp.uint8(power)
    return data, signs.astype(values.dtype)

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Returns the signs; bytes that no signs make are zeros."""
    powers = jnp.asarray(_POWERS, jnp.uint8)[:, None]
    digits = data[None] // powers % jnp.uint8(3)
    digits = jnp.where(data[None] < 3**_IN_A_BYTE, digits, jnp.uint8(1))
    signs = digits.astype(jnp.int8) - jnp.int8(1)
    return signs.astype(self.dtype).reshape(-1)[: chunks * k].reshape(chunks, k)


def value_code(values: str, dtype: str) -> ValueCode:
  """Returns the code of a name in `UPDATE_VALUES`, for a momentum's dtype."""
  return _CODES[values](dtype)


def _nearest_levels(
    values: jax.Array, limit: int
) -> tuple[jax.Array, jax.Array]:
  """Rounds values to levels, the largest magnitude to `limit`."""
  largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
  scales = _scales(largest.astype(jnp.float32) * np.float32(1 / limit), limit)
  inverse = jnp.where(scales > 0, 1 / scales, 0).astype(values.dtype)
  # The scale may have been rounded down, or be the largest there is.
  return jnp.clip(jnp.round(values * inverse), -limit, limit), scales


def _signs(values: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
  """Returns the sign of every value, and their mean magnitude.

  No other scale leaves a smaller square of what is lost.
  """
  levels = jnp.where(values >= 0, limit, -limit)
  return levels, _scales(_mean_magnitude(values), limit)


def _mean_magnitude(values: jax.Array) -> jax.Array:
  """Returns float32 means `[chunks, 1]`, their sums in one fixed order."""
  k = values.shape[1]
  width = 1 << (k - 1).bit_length()
  # So that no sum overflows; the mean of values this large may be any.
  x = jnp.minimum(jnp.abs(values), float(_MAX) / width).astype(jnp.float32)
  x = jnp.pad(x, ((0, 0), (0, width - k)))
  while width > 1:
    width //= 2
    x = x[:, :width] + x[:, width:]
  return x * np.float32(1 / k)


def _scales(scales: jax.Array, limit: int) -> jax.Array:
  """Rounded to bfloat16, and finite when times `limit`."""
  return _round(jnp.minimum(scales, _largest_scale(limit)))


def _largest_scale(limit: int) -> float:
  """Returns the largest bfloat16 whose product with `limit` is finite."""
  bits = np.float32(_MAX / limit).view(np.uint32) & np.uint32(0xFFFF0000)
  return float(bits.view(np.float32))


def _round(x: jax.Array) -> jax.Array:
  """Rounds float32 to what bfloat16 can hold, ties to even, no subnormals."""
  return jax.lax.reduce_precision(
      _without_subnormals(x), exponent_bits=8, mantissa_bits=7
  )


def _without_subnormals(x: jax.Array) -> jax.Array:
  """Replaces subnormal numbers by zero.

  Some devices and threads flush them, others do not; and a subnormal scale has
  no finite inverse.
  """
  return jnp.where(jnp.abs(x) < float(_TINY), 0, x)


def _bfloat16_bytes(x: jax.Array) -> jax.Array:
  """uint8 `[2 * size]` of float32 numbers that bfloat16 can hold."""
  halves = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
  halves = halves.astype(jnp.uint16)
  return jax.lax.bitcast_convert_type(halves, jnp.uint8).reshape(-1)


def _from_bfloat16_bytes(data: jax.Array) -> jax.Array:
  """Returns float32 `[count]` of uint8 `[2 * count]`."""
  halves = data.reshape(-1, 2)
  halves = jax.lax.bitcast_convert_type(halves, jnp.uint16)
  return jax.lax.bitcast_convert_type(
      halves.astype(jnp.uint32) << 16, jnp.float32
  )


_CODES: dict[str, Callable[[str], ValueCode]] = {
    'float32': Exact,
    'bfloat16': BFloat16,
    'int8': lambda dtype: Scaled(dtype, 8, 127, 1, _nearest_levels),
    'int4': lambda dtype: Scaled(dtype, 4, 7, 1, _nearest_levels),
    'sign': lambda dtype: Scaled(dtype, 1, 1, 2, _signs),
    'ternary': Ternary,
}

# What an update may be written as, and what coefficients may.
UPDATE_VALUES = tuple(_CODES)
VALUES = tuple(name for name in UPDATE_VALUES if name != 'ternary')
# Codes of updates that lose nothing, or nothing that is wanted later.
WITHOUT_RESIDUAL = ('float32', 'ternary')
