"""Codes of the indices: which `k` of the `n` places of a chunk are sent.

Places are written in ascending order, which takes `log2 C(n, k)` bits at least.
A code takes the same number of bits for every chunk, and all chunks are packed
together: only the last word is padded. Decoding accepts arbitrary words;
`format.ChunkFormat.decode` checks the order and range of the indices.
"""

import dataclasses
import functools
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from demo_optax.numerics import bits as packing
from demo_optax.numerics import groups


class IndexCode(Protocol):
  """How the places sent of every chunk are written."""

  name: ClassVar[str]

  @property
  def bits(self) -> int:
    """Bits per chunk, without padding of the last words."""

  def words(self, chunks: int) -> int:
    """Words of 32 bits that the indices of this many chunks take."""

  def encode(self, indices: jax.Array) -> jax.Array:
    """Packs ascending int32 `[..., chunks, k]` as uint32 `[..., words]`."""

  def decode(self, data: jax.Array, chunks: int) -> jax.Array:
    """Undoes `encode`; returns int32 `[..., chunks, k]`."""


@functools.cache
def cheapest(n: int, k: int) -> IndexCode:
  """Returns the code that takes the fewest bits for `k < n` of `n` places.

  >>> cheapest(4096, 32)
  EliasFano(n=4096, k=32, low=7)
  >>> cheapest(4096, 32).bits / 32
  8.96875
  >>> cheapest(64, 24), cheapest(4096, 1)
  (Bitmap(n=64, k=24), FixedWidth(n=4096, k=1))
  """
  # Of equals the first: the simpler code, then the shorter unary part.
  codes: list[IndexCode] = [FixedWidth(n, k), Bitmap(n, k)]
  codes += [EliasFano(n, k, low) for low in reversed(range(index_width(n)))]
  return min(codes, key=lambda code: code.bits)


@dataclasses.dataclass(frozen=True)
class FixedWidth:
  """Every index in `ceil(log2 n)` bits."""

  name: ClassVar[str] = 'fixed'
  n: int
  k: int

  @property
  def bits(self) -> int:
    return self.k * index_width(self.n)

  def words(self, chunks: int) -> int:
    return packing.packed_words(chunks * self.k, index_width(self.n))

  def encode(self, indices: jax.Array) -> jax.Array:
    return packing.pack_bits(_row(indices), index_width(self.n))

  def decode(self, data: jax.Array, chunks: int) -> jax.Array:
    numbers = packing.unpack_bits(data, chunks * self.k, index_width(self.n))
    return numbers.astype(jnp.int32).reshape(*data.shape[:-1], chunks, self.k)


@dataclasses.dataclass(frozen=True)
class InGroup:
  """One place of each of `k` groups (`numerics.groups`), in fixed width.

  The only code whose indices follow the order of the groups and do not ascend.
  They are distinct by construction.
  """

  name: ClassVar[str] = 'group'
  n: int
  k: int

  @property
  def _places(self) -> FixedWidth:
    return FixedWidth(groups.num_places(self.n, self.k), self.k)

  @property
  def bits(self) -> int:
    return self._places.bits

  def words(self, chunks: int) -> int:
    return self._places.words(chunks)

  def encode(self, indices: jax.Array) -> jax.Array:
    return self._places.encode(groups.places(indices))

  def decode(self, data: jax.Array, chunks: int) -> jax.Array:
    return groups.indices(self._places.decode(data, chunks))


@dataclasses.dataclass(frozen=True)
class Bitmap:
  """A bit per place, 1 where it is sent."""

  name: ClassVar[str] = 'bitmap'
  n: int
  k: int

  @property
  def bits(self) -> int:
    return self.n

  def words(self, chunks: int) -> int:
    return packing.packed_words(chunks * self.n, 1)

  def encode(self, indices: jax.Array) -> jax.Array:
    return packing.pack_bits(_row(_ones_at(indices, self.n)), 1)

  def decode(self, data: jax.Array, chunks: int) -> jax.Array:
    bits = packing.unpack_bits(data, chunks * self.n, 1)
    bits = bits.reshape(*data.shape[:-1], chunks, self.n)
    return packing.places_of_ones(bits == 1, self.k)


@dataclasses.dataclass(frozen=True)
class EliasFano:
  """The `low` low bits of every index as they are, the rest in unary.

  The rest, `index >> low`, never descends and is below `b = ceil(n / 2**low)`.
  The `j`-th becomes a one at place `rest + j` of `k + b - 1` bits. With
  `2**low` near `n / k` that is about `2 + log2(n / k)` bits per index. The
  bound for small `k / n` is `1.44 + log2(n / k)`.

  References:
    Elias, `Efficient storage and retrieval by content and address of static
    files <https://doi.org/10.1145/321812.321820>`_, 1974.
  """

  name: ClassVar[str] = 'elias-fano'
  n: int
  k: int
  low: int

  @property
  def unary_bits(self) -> int:
    """Bits of the unary part of a chunk."""
    return self.k - 1 + -(-self.n >> self.low)

  @property
  def bits(self) -> int:
    return self.k * self.low + self.unary_bits

  def words(self, chunks: int) -> int:
    lows = packing.packed_words(chunks * self.k, self.low)
    return lows + packing.packed_words(chunks * self.unary_bits, 1)

  def encode(self, indices: jax.Array) -> jax.Array:
    """Returns the low bits of all chunks, then the unary parts of all."""
    lows = _row(indices) & jnp.uint32(2**self.low - 1)
    order = jnp.arange(self.k, dtype=jnp.int32)
    rest = (indices >> self.low) + order.reshape(*(1,) * (indices.ndim - 1), -1)
    return jnp.concatenate([
        packing.pack_bits(lows, self.low),
        packing.pack_bits(_row(_ones_at(rest, self.unary_bits)), 1),
    ], axis=-1)

  def decode(self, data: jax.Array, chunks: int) -> jax.Array:
    batch = data.shape[:-1]
    split = packing.packed_words(chunks * self.k, self.low)
    lows = packing.unpack_bits(data[..., :split], chunks * self.k, self.low)
    unary = packing.unpack_bits(
        data[..., split:], chunks * self.unary_bits, 1
    ).reshape(*batch, chunks, self.unary_bits)
    places = packing.places_of_ones(unary == 1, self.k)
    order = jnp.arange(self.k, dtype=jnp.int32)
    rest = places - order.reshape(*(1,) * (places.ndim - 1), -1)
    return (rest << self.low) | lows.astype(jnp.int32).reshape(rest.shape)


def index_width(n: int) -> int:
  """Bits of an index into `n` places, `ceil(log2 n)`."""
  return (n - 1).bit_length()


def _row(x: jax.Array) -> jax.Array:
  """Returns `[..., chunks, k]` as uint32 `[..., chunks * k]`."""
  return x.reshape(*x.shape[:-2], -1).astype(jnp.uint32)


def _ones_at(places: jax.Array, size: int) -> jax.Array:
  """uint32 `[..., size]`, 1 at `places [..., k]`, distinct and ascending."""
  flat = places.reshape(-1, places.shape[-1])
  zeros = jnp.zeros((flat.shape[0], size), jnp.uint32)
  ones = zeros.at[packing.row_numbers(flat), flat].set(
      1, unique_indices=True, indices_are_sorted=True,
      mode='promise_in_bounds', wrap_negative_indices=False,
  )
  return ones.reshape(*places.shape[:-1], size)
