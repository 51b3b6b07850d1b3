"""The base for all codes: numbers as words with 32 bits."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from demo_optax.numerics import packing

# Of each part the numbers per chunk, and the bits of each.
Parts = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Code:
  """Writes what is sent from every chunk as a few parts.

  A part has as many numbers for every chunk, all with one width. It is packed
  for all chunks together: only its last word is padded.
  """

  @property
  def parts(self) -> Parts:
    """Counts and widths for each part."""
    raise NotImplementedError

  @property
  def bits(self) -> float:
    """Bits per chunk, without padding."""
    return sum(count * width for count, width in self.parts)

  def words(self, chunks: int) -> int:
    """Returns the words that this many chunks take."""
    return sum(self._sizes(chunks))

  def _sizes(self, chunks: int) -> list[int]:
    """Words for each part."""
    return [
      packing.packed_words(chunks * count, width) for count, width in self.parts
    ]

  def encode(self, x: Array) -> Any:
    """Writes what is sent, `[..., chunks, k]`, as uint32 `[..., words]`.

    Value codes also return the values that receivers decode.
    """
    raise NotImplementedError

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    """Undoes `encode`, for arbitrary words."""
    raise NotImplementedError

  def pack(self, *numbers: Array) -> Array:
    """Packs `[..., chunks, count]` for each part; returns uint32 words."""
    packed = []
    for part, (_, width) in zip(numbers, self.parts):
      row = as_row(part)
      # XLA for GPUs would copy the words of all workers.
      packed.append(row if width == 32 else packing.pack_bits(row, width))
    return jnp.concatenate(packed, axis=-1)

  def unpack(
    self,
    data: Array,
    chunks: int,
  ) -> list[Array]:
    """Undoes `pack`; returns uint32 arrays."""
    numbers, first = [], 0
    for (count, width), size in zip(self.parts, self._sizes(chunks)):
      part = data[..., first : first + size]
      if width < 32:
        part = packing.unpack_bits(part, chunks * count, width)
      numbers.append(part.reshape(*data.shape[:-1], chunks, count))
      first += size
    return numbers


def as_row(x: Array) -> Array:
  """Returns `[..., chunks, count]` as uint32 `[..., chunks * count]`."""
  return x.reshape(*x.shape[:-2], -1).astype(jnp.uint32)
