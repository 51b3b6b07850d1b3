"""Codes for indices: which `k` out of `n` places in a chunk are sent.

Indices are int32 `[..., chunks, k]`. Places are written in ascending
order, which takes `log2 C(n, k)` bits at least. Elias-Fano is within 10 % of it
for `n >= 4096` and `8 <= k <= n / 19`. Decoding accepts arbitrary
words; `format.ChunkFormat.decode` checks the order and range of the indices.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from demo_optax.codes.parts import Code, Parts
from demo_optax.numerics import packing


@dataclasses.dataclass(frozen=True)
class IndexCode(Code):
  """How the places sent from every chunk are written."""

  name: ClassVar[str]
  n: int
  k: int


@functools.cache
def cheapest(n: int, k: int) -> IndexCode:
  """Returns the code that takes the fewest bits for `k < n` places.

  >>> cheapest(4096, 32)
  EliasFano(n=4096, k=32, low=7)
  >>> cheapest(4096, 32).bits / 32
  8.96875
  >>> cheapest(64, 24), cheapest(4096, 1)
  (Bitmap(n=64, k=24), FixedWidth(n=4096, k=1))
  """
  # Of equals the first: the simpler code, then the shorter unary part.
  codes: list[IndexCode] = [FixedWidth(n, k), Bitmap(n, k)]
  codes += [EliasFano(n, k, low) for low in range(index_width(n) - 1, 0, -1)]
  return min(codes, key=lambda code: code.bits)


class FixedWidth(IndexCode):
  """Every index in `ceil(log2 n)` bits."""

  name = 'fixed'

  @property
  def parts(self) -> Parts:
    return ((self.k, index_width(self.n)),)

  def encode(self, indices: Array) -> Array:
    return self.pack(indices)

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    (numbers,) = self.unpack(data, chunks)
    return numbers.astype(jnp.int32)


class Bitmap(IndexCode):
  """A bit per place, 1 where it is sent."""

  name = 'bitmap'

  @property
  def parts(self) -> Parts:
    return ((self.n, 1),)

  def encode(self, indices: Array) -> Array:
    return self.pack(_ones_at(indices, self.n))

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    (ones,) = self.unpack(data, chunks)
    return _places_of(ones, self.k)


@dataclasses.dataclass(frozen=True)
class EliasFano(IndexCode):
  """The `low` low bits in every index as they are, the rest in unary.

  The rest, `index >> low`, never descends and is below `b = ceil(n / 2**low)`.
  The `j`-th becomes a one at place `rest + j` in `k + b - 1` bits. With
  `2**low` near `n / k` that is about `2 + log2(n / k)` bits per index. The
  bound for small `k / n` is `1.44 + log2(n / k)`.

  References:
    Elias, `Efficient storage and retrieval by content and address of static
    files <https://doi.org/10.1145/321812.321820>`_, 1974.
  """

  name: ClassVar[str] = 'elias-fano'
  low: int

  @property
  def _unary_size(self) -> int:
    return self.k - 1 + -(-self.n >> self.low)

  @property
  def parts(self) -> Parts:
    return (self.k, self.low), (self._unary_size, 1)

  def encode(self, indices: Array) -> Array:
    # Distinct and ascending, although several may have the same high bits.
    rest = (indices >> self.low) + order_of(indices)
    unary = _ones_at(rest, self._unary_size)
    return self.pack(indices & (2**self.low - 1), unary)

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    # [..., chunks, k] and [..., chunks, size]
    lows, unary = self.unpack(data, chunks)
    places = _places_of(unary, self.k)
    rest = places - order_of(places)
    return (rest << self.low) | lows.astype(jnp.int32)


def index_width(n: int) -> int:
  """Bits for an index into `n` places, `ceil(log2 n)`."""
  return (n - 1).bit_length()


def order_of(indices: Array) -> Array:
  """Returns int32 `[..., 1, k]`, the numbers 0 to k - 1."""
  order = jnp.arange(indices.shape[-1], dtype=jnp.int32)
  return jax.lax.broadcast_to_rank(order, indices.ndim)


def _ones_at(places: Array, size: int) -> Array:
  """Returns uint32 `[..., size]`, 1 at ascending `places [..., k]`."""
  rows = places.reshape(-1, places.shape[-1])
  # [rows, size]; each place is written once, so in any order.
  zeros = jnp.zeros((len(rows), size), jnp.uint32)
  ones = zeros.at[packing.row_numbers(rows), rows].set(
    1,
    unique_indices=True,
    indices_are_sorted=True,
    mode='promise_in_bounds',
    wrap_negative_indices=False,
  )
  return ones.reshape(*places.shape[:-1], size)


def _places_of(ones: Array, k: int) -> Array:
  """Undoes `_ones_at`, for `k` places; they may be `size` or more."""
  rows = ones.reshape(-1, ones.shape[-1])
  places = packing.places_of_ones(rows == 1, k)
  return places.reshape(*ones.shape[:-1], k)
