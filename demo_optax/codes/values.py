"""Codes of the values of selected coefficients.

`encode` returns words of 32 bits and the values that receivers will decode. The
sender subtracts exactly those: the losses of a code stay in its momentum, to
the last bit. Arrays may have further leading dimensions.

Equal values must give equal bits in every program. Compilers may contract a
product and a sum, regroup sums, and replace divisions by products, depending on
the program. So products of a level and a scale are exact (8 bits times 8 bits),
and sums are trees of elementwise additions. An inverse is a separate array.
bfloat16 is made by `reduce_precision`, since a compiler may drop a conversion
there and back.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import bits

_MAX = np.finfo(np.float32).max
_TINY = np.finfo(np.float32).tiny
_POWERS = tuple(3**place for place in range(20))  # digits of a word


class ValueCode(Protocol):
  """How the values sent of every chunk are written."""

  def bits(self, k: int) -> float:
    """Returns the bits that `k` values of a chunk take."""

  def words(self, chunks: int, k: int) -> int:
    """Returns the words of `k` values from each of this many chunks."""

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packs `[chunks, k]`; returns uint32 `[words]`, and the values decoded."""

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Undoes `encode` for uint32 `[words]`; returns `[chunks, k]`."""


@dataclasses.dataclass(frozen=True)
class Exact:
  """Values as they are, in the dtype of the momentum."""

  dtype: str

  def bits(self, k: int) -> float:
    return 8 * k * jnp.dtype(self.dtype).itemsize

  def words(self, chunks: int, k: int) -> int:
    return chunks * k * jnp.dtype(self.dtype).itemsize // 4

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of the values; for float64, the low halves first."""
    words = jax.lax.bitcast_convert_type(values, jnp.uint32)
    if words.ndim > values.ndim:
      words = jnp.moveaxis(words, -1, -3)
    return words.reshape(*values.shape[:-2], -1), values

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    dtype, shape = jnp.dtype(self.dtype), (chunks, k)
    if dtype.itemsize == 4:
      words = data.reshape(*data.shape[:-1], *shape)
    else:
      words = jnp.moveaxis(data.reshape(*data.shape[:-1], 2, *shape), -3, -1)
    return jax.lax.bitcast_convert_type(words, dtype)


@dataclasses.dataclass(frozen=True)
class BFloat16:
  """Values rounded to bfloat16, and clipped to its range."""

  dtype: str

  def bits(self, k: int) -> float:
    return 16 * k

  def words(self, chunks: int, k: int) -> int:
    return bits.packed_words(chunks * k, 16)

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = _largest_scale(1)
    rounded = _round(jnp.clip(values, -largest, largest).astype(jnp.float32))
    return _pack_bfloat16(rounded), rounded.astype(values.dtype)

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    values = _without_subnormals(_unpack_bfloat16(data, chunks * k))
    return values.astype(self.dtype).reshape(*data.shape[:-1], chunks, k)


@dataclasses.dataclass(frozen=True)
class Scaled:
  """Levels of a few bits each, times a bfloat16 scale per chunk.

  Levels are `-limit, -limit + spacing, ... limit`. `quantise` takes values
  `[chunks, k]` and the limit. It returns levels `[chunks, k]` and scales
  `[chunks, 1]`, float32 values that bfloat16 represents.
  """

  dtype: str  # of the momentum
  width: int  # bits of a level
  limit: int
  spacing: int
  quantise: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]

  def bits(self, k: int) -> float:
    return self.width * k + 16

  def words(self, chunks: int, k: int) -> int:
    levels = bits.packed_words(chunks * k, self.width)
    return levels + bits.packed_words(chunks, 16)

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the levels of all chunks, packed, then their scales."""
    levels, scales = self.quantise(_without_subnormals(values), self.limit)
    levels = levels.astype(jnp.int32)  # no -0
    numbers = (levels + self.limit).astype(jnp.uint32) // self.spacing
    packed = bits.pack_bits(_row(numbers), self.width)
    data = jnp.concatenate([packed, _pack_bfloat16(scales)], axis=-1)
    return data, levels.astype(values.dtype) * scales.astype(values.dtype)

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    split = bits.packed_words(chunks * k, self.width)
    numbers = bits.unpack_bits(data[..., :split], chunks * k, self.width)
    levels = numbers.astype(jnp.int32) * self.spacing - self.limit
    levels = levels.reshape(*data.shape[:-1], chunks, k).astype(self.dtype)
    scales = _without_subnormals(_unpack_bfloat16(data[..., split:], chunks))
    return levels * scales.astype(self.dtype)[..., None]


@dataclasses.dataclass(frozen=True)
class Ternary:
  """Signs, -1, 0 or 1, twenty to a word: for updates that only need signs."""

  dtype: str

  def bits(self, k: int) -> float:
    return 32 * k / len(_POWERS)

  def words(self, chunks: int, k: int) -> int:
    return -(-chunks * k // len(_POWERS))

  def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Writes twenty signs to a word, in planes as `bits.pack_bits` does."""
    *batch, chunks, k = values.shape
    size = self.words(chunks, k)
    signs = (values > 0).astype(jnp.int8) - (values < 0).astype(jnp.int8)
    digits = _row(signs + jnp.int8(1))
    missing = size * len(_POWERS) - chunks * k
    digits = jnp.pad(digits, [(0, 0)] * len(batch) + [(0, missing)])
    digits = digits.reshape(*batch, len(_POWERS), size)
    data = jnp.sum(digits * _powers(len(batch)), axis=-2, dtype=jnp.uint32)
    return data, signs.astype(values.dtype)

  def decode(self, data: jax.Array, chunks: int, k: int) -> jax.Array:
    """Returns the signs; words that no signs encode to become zeros."""
    *batch, _ = data.shape
    digits = data[..., None, :] // _powers(len(batch)) % jnp.uint32(3)
    known = data[..., None, :] < jnp.uint32(3 * _POWERS[-1])
    signs = jnp.where(known, digits, jnp.uint32(1)).astype(jnp.int32) - 1
    signs = signs.reshape(*batch, -1)[..., : chunks * k]
    return signs.astype(self.dtype).reshape(*batch, chunks, k)


def value_code(values: str, dtype: str) -> ValueCode:
  """Returns a code of `UPDATE_VALUES` for a momentum's dtype."""
  return _CODES[values](dtype)


def _nearest_levels(
    values: jax.Array, limit: int
) -> tuple[jax.Array, jax.Array]:
  """Rounds values to levels; the largest magnitude becomes `limit`."""
  largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
  scales = _scales(largest.astype(jnp.float32) * np.float32(1 / limit), limit)
  inverse = jnp.where(scales > 0, 1 / scales, 0).astype(values.dtype)
  # The scale may have been rounded down, or be the largest there is.
  return jnp.clip(jnp.round(values * inverse), -limit, limit), scales


def _signs(values: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
  """Returns the signs, and the mean magnitude: the scale of least squares."""
  levels = jnp.where(values >= 0, limit, -limit)
  return levels, _scales(_mean_magnitude(values), limit)


def _mean_magnitude(values: jax.Array) -> jax.Array:
  """Returns float32 means `[..., 1]`, summed in one fixed order."""
  k = values.shape[-1]
  width = 1 << (k - 1).bit_length()
  # Clip so that the sum cannot overflow; such values' scale is irrelevant.
  x = jnp.minimum(jnp.abs(values), float(_MAX) / width).astype(jnp.float32)
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - k)])
  while width > 1:
    width //= 2
    x = x[..., :width] + x[..., width:]
  return x * np.float32(1 / k)


def _scales(scales: jax.Array, limit: int) -> jax.Array:
  """Rounds to bfloat16, such that `limit` times the scale is finite."""
  return _round(jnp.minimum(scales, _largest_scale(limit)))


def _largest_scale(limit: int) -> float:
  """Returns the largest bfloat16 whose product with `limit` is finite."""
  largest = np.float32(_MAX / limit).view(np.uint32) & np.uint32(0xFFFF0000)
  return float(largest.view(np.float32))


def _round(x: jax.Array) -> jax.Array:
  """Rounds float32 to bfloat16's numbers, ties to even, no subnormals."""
  return jax.lax.reduce_precision(
      _without_subnormals(x), exponent_bits=8, mantissa_bits=7
  )


def _without_subnormals(x: jax.Array) -> jax.Array:
  """Replaces subnormal numbers by zero.

  Some devices and threads flush them, others do not. A subnormal scale has no
  finite inverse.
  """
  return jnp.where(jnp.abs(x) < float(_TINY), 0, x)


def _pack_bfloat16(x: jax.Array) -> jax.Array:
  """Packs float32 `[..., chunks, k]` that bfloat16 represents, two a word."""
  halves = jax.lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(16)
  return bits.pack_bits(_row(halves), 16)


def _unpack_bfloat16(data: jax.Array, count: int) -> jax.Array:
  """Returns float32 `[..., count]`."""
  halves = bits.unpack_bits(data, count, 16)
  return jax.lax.bitcast_convert_type(halves << jnp.uint32(16), jnp.float32)


def _row(x: jax.Array) -> jax.Array:
  """Returns `[..., chunks, k]` as uint32 `[..., chunks * k]`."""
  return x.reshape(*x.shape[:-2], -1).astype(jnp.uint32)


def _powers(batch: int) -> jax.Array:
  """Returns uint32 `[..., 20, 1]`."""
  powers = jnp.asarray(_POWERS, jnp.uint32)
  return powers.reshape(*(1,) * batch, -1, 1)


_CODES: dict[str, Callable[[str], ValueCode]] = {
    'float32': Exact,
    'bfloat16': BFloat16,
    'int8': lambda dtype: Scaled(dtype, 8, 127, 1, _nearest_levels),
    'int4': lambda dtype: Scaled(dtype, 4, 7, 1, _nearest_levels),
    'sign': lambda dtype: Scaled(dtype, 1, 1, 2, _signs),
    'ternary': Ternary,
}

# Codes of updates, and codes of coefficients.
UPDATE_VALUES = tuple(_CODES)
VALUES = tuple(name for name in UPDATE_VALUES if name != 'ternary')
# Codes of updates without error feedback.
WITHOUT_RESIDUAL = ('float32', 'ternary')
