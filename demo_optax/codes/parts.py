"""The base of all codes: numbers of every chunk as words of 32 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax.numerics import packing

# Of each part the numbers per chunk, and the bits of each.
Parts = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Code:
  """Writes what is sent of every chunk as a few parts.

  A part is the same count of numbers for every chunk, all of one width. Those
  of all chunks are packed together: only the last word of a part is padded.
  Arrays may have further leading dimensions.
  """

  @property
  def parts(self) -> Parts:
    """The parts of a chunk: their counts and widths."""
    raise NotImplementedError

  @property
  def bits(self) -> float:
    """Bits per chunk, without padding of the last words."""
    return sum(count * width for count, width in self.parts)

  def words(self, chunks: int) -> int:
    """Returns the words that this many chunks take."""
    return sum(
      packing.packed_words(chunks * count, width) for count, width in self.parts
    )

  def encode(self, x: jax.Array) -> Any:
    """Writes what is sent, `[..., chunks, k]`, as uint32 `[..., words]`.

    Codes of values also return the values that receivers decode.
    """
    raise NotImplementedError

  def decode(self, data: jax.Array, chunks: int) -> jax.Array:
    """Undoes `encode`, for arbitrary words."""
    raise NotImplementedError

  def pack(self, *numbers: jax.Array) -> jax.Array:
    """Packs `[..., chunks, count]` of each part; returns uint32 words."""
    packed = []
    for x, (_, width) in zip(numbers, self.parts):
      row = as_row(x)
      packed.append(row if width == 32 else packing.pack_bits(row, width))
    return jnp.concatenate(packed, axis=-1)

  def unpack(self, data: jax.Array, chunks: int) -> list[jax.Array]:
    """Undoes `pack`; returns uint32 arrays."""
    found = []
    for count, width in self.parts:
      size = packing.packed_words(chunks * count, width)
      x = data[..., :size]
      if width < 32:
        x = packing.unpack_bits(x, chunks * count, width)
      found.append(x.reshape(*data.shape[:-1], chunks, count))
      data = data[..., size:]
    return found


def as_row(x: jax.Array) -> jax.Array:
  """Returns `[..., chunks, count]` as uint32 `[..., chunks * count]`."""
  return x.reshape(*x.shape[:-2], -1).astype(jnp.uint32)
