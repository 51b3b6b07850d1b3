"""The base for all codes: numbers as words with 32 bits."""

import jax.numpy as jnp
from jax import Array

from demo_optax.numerics import packing

# Of each part the numbers per chunk, and the bits of each.
Parts = tuple[tuple[int, int], ...]


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
  def bits(self) -> int:
    """Bits per chunk, without padding."""
    return sum(count * width for count, width in self.parts)

  def words(self, chunks: int) -> int:
    """Returns the words that this many chunks take."""
    words = 0
    for count, width in self.parts:
      words += packing.packed_words(chunks * count, width)
    return words

  def decode(
    self,
    data: Array,
    chunks: int,
  ) -> Array:
    """Undoes `encode`, for arbitrary words: returns `[..., chunks, k]`."""
    raise NotImplementedError

  def pack(self, *numbers: Array) -> Array:
    """Packs `[..., chunks, count]` for each part; returns uint32 words."""
    packed = []
    for part, (_, width) in zip(numbers, self.parts):
      words = as_row(part)
      if width < 32:  # else XLA:GPU would copy the words of all workers
        words = packing.pack_bits(words, width)
      packed.append(words)
    return jnp.concatenate(packed, axis=-1)

  def unpack(
    self,
    data: Array,
    chunks: int,
  ) -> list[Array]:
    """Undoes `pack`; returns uint32 arrays."""
    lead = data.shape[:-1]
    numbers = []
    start = 0
    for count, width in self.parts:
      end = start + packing.packed_words(chunks * count, width)
      part = data[..., start:end]
      if width < 32:
        part = packing.unpack_bits(part, chunks * count, width)
      numbers.append(part.reshape(*lead, chunks, count))
      start = end
    return numbers


def as_row(x: Array) -> Array:
  """Returns `[..., chunks, count]` as uint32 `[..., chunks * count]`."""
  row = x.reshape(*x.shape[:-2], -1)
  return row.astype(jnp.uint32)
