"""Codes for indices: which `k` out of `n` places in a chunk are sent.

Indices are int32 `[..., chunks, k]`. Places are written in ascending
order, which takes `log2 C(n, k)` bits at least. Elias-Fano is within 10 % of it
for `n >= 4096` and `8 <= k <= n / 19`. Decoding accepts arbitrary
words; `format.ChunkFormat.decode` checks the order and range of the indices.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax

from demo_optax.codes.parts import Code, Parts
from demo_optax.numerics import packing


@dataclasses.dataclass(frozen=True)
class IndexCode(Code):
  """The `low` low bits in every index as they are, the rest in unary.

  The rest, `index >> low`, never descends and is below `b = ceil(n / 2**low)`.
  The `j`-th becomes a one at place `rest + j` in `k + b - 1` bits. With
  `2**low` near `n / k` that is about `2 + log2(n / k)` bits per index. The
  bound for small `k / n` is `1.44 + log2(n / k)`. At the ends, all bits as they
  are need no rest, and without low bits there is one bit per place.

  References:
    Elias, `Efficient storage and retrieval by content and address of static
    files <https://doi.org/10.1145/321812.321820>`_, 1974.
  """

  n: int
  k: int
  low: int

  @property
  def name(self) -> str:
    """What tables call it."""
    if self.low == 0:
      return 'bitmap'
    return 'elias-fano' if self._rest_bits else 'fixed'

  @property
  def _rest_bits(self) -> int:
    if self.low == 0:
      return self.n
    zeros = self.n - 1 >> self.low  # one after each but the last bucket
    return self.k + zeros if zeros else 0

  @property
  def parts(self) -> Parts:
    both = (self.k, self.low), (self._rest_bits, 1)
    return tuple(part for part in both if all(part))

  def encode(self, indices: Array) -> Array:
    """Writes ascending indices `[..., chunks, k]`, as uint32 `[..., words]`."""
    numbers = []
    if self.low:
      numbers.append(indices & (2**self.low - 1))
    if self._rest_bits:
      places = indices >> self.low
      if self.low:  # several may have the same high bits
        places += order_of(indices)
      numbers.append(_ones_at(places, self._rest_bits))
    return self.pack(*numbers)

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    numbers = self.unpack(data, chunks)
    lows = numbers[0].astype(jnp.int32)  # [..., chunks, k]
    if not self._rest_bits:
      return lows
    ones = numbers[-1]  # [..., chunks, size]
    *lead, size = ones.shape
    rows = ones.reshape(-1, size)
    places = packing.places_of_ones(rows == 1, self.k)
    places = places.reshape(*lead, self.k)
    if not self.low:
      return places
    rest = places - order_of(places)
    return (rest << self.low) | lows


@functools.cache
def cheapest(n: int, k: int) -> IndexCode:
  """Returns the code that takes the fewest bits for `k < n` places.

  >>> code = cheapest(4096, 32)
  >>> code, code.name, code.bits / 32
  (IndexCode(n=4096, k=32, low=7), 'elias-fano', 8.96875)
  >>> cheapest(64, 24).name, cheapest(4096, 1).name
  ('bitmap', 'fixed')
  """
  width = index_width(n)
  # Of equals the first: the simpler code, then the shorter unary part.
  lows = width, 0, *range(width - 1, 0, -1)
  codes = [IndexCode(n, k, low) for low in lows]
  return min(codes, key=lambda code: code.bits)


def index_width(n: int) -> int:
  """Bits for an index into `n` places, `ceil(log2 n)`."""
  return (n - 1).bit_length()


def order_of(indices: Array) -> Array:
  """Returns int32 `[..., 1, k]`, the numbers 0 to k - 1."""
  k = indices.shape[-1]
  order = jnp.arange(k, dtype=jnp.int32)
  return lax.broadcast_to_rank(order, indices.ndim)


def _ones_at(places: Array, size: int) -> Array:
  """Returns uint32 `[..., size]`, 1 at ascending `places [..., k]`."""
  *lead, k = places.shape
  rows = places.reshape(-1, k)  # [rows, k]
  zeros = jnp.zeros((len(rows), size), jnp.uint32)
  numbers = packing.row_numbers(rows)
  # Each place is written once, so in any order.
  ones = zeros.at[numbers, rows].set(
    1,
    unique_indices=True,
    indices_are_sorted=True,
    mode='promise_in_bounds',
    wrap_negative_indices=False,
  )
  return ones.reshape(*lead, size)
