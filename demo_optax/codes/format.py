"""A selection, as words."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from demo_optax.codes import index_codes
from demo_optax.codes.parts import Code
from demo_optax.codes.value_codes import CODES, ValueCode


@dataclasses.dataclass(frozen=True)
class ChunkFormat:
  """How selections from chunks with one size are written.

  If all workers select the same places (`shared`), messages have no indices.
  """

  n: int  # coefficients in a chunk
  k: int  # coefficients sent of each
  dtype: str  # of the coefficients
  values: str = 'float32'  # the value code, one of `VALUES`
  shared: bool = False

  @property
  def summed(self) -> bool:
    """Whether an all-reduce sums the values, and no message has them."""
    return self.shared and self.values == 'float32'

  @property
  def index_code(self) -> index_codes.IndexCode | None:
    """The code for indices; None if none are sent."""
    if self.shared or self.k == self.n:
      return None
    return index_codes.cheapest(self.n, self.k)

  @property
  def value_code(self) -> ValueCode:
    """The code for values."""
    return CODES[self.values](self.dtype, self.k)

  @property
  def _codes(self) -> list[Code]:
    return [code for code in (self.value_code, self.index_code) if code]

  @property
  def max_magnitude(self) -> float:
    """Largest magnitude that receivers accept: no transform overflows.

    `2**127 / n`, n rounded up to a power of two. `2**1023 / n` for float64 that
    is sent as it is.
    """
    dtype = self.dtype if self.values == 'float32' else 'float32'
    exponent = jnp.finfo(dtype).maxexp - 1
    rounded_up = (self.n - 1).bit_length()  # of n, as a power of two
    return 2.0 ** (exponent - rounded_up)

  def num_bytes(self, chunks: int) -> int:
    """Returns the bytes of this many chunks among others, without padding."""
    num_bytes = 0
    for code in self._codes:
      num_bytes += math.ceil(chunks * code.bits / 8)
    return num_bytes

  def words(self, chunks: int) -> int:
    """Returns the words that this many chunks take in a message."""
    return sum(code.words(chunks) for code in self._codes)

  def encode(
    self,
    indices: Array | None,
    values: Array,
  ) -> tuple[Array, Array]:
    """Writes values `[..., chunks, k]` and their ascending int32 indices.

    Returns uint32 `[..., words]`, and the values that receivers decode.
    `indices` is None if `k` is `n`.
    """
    # Half of what is accepted, for rounding; the rest stays in momentum.
    most = self.max_magnitude / 2
    clipped = jnp.clip(values, -most, most)
    data, sent = self.value_code.encode(clipped)
    code = self.index_code
    if code is not None and indices is not None:
      places = code.encode(indices)
      data = jnp.concatenate([data, places], axis=-1)
    return data, sent

  def decode(
    self, data: Array, chunks: int
  ) -> tuple[Array | None, Array, Array]:
    """Undoes `encode` for arbitrary words, uint32 `[workers, words]`.

    Returns int32 indices `[workers, chunks, k]` within `[0, n)`, distinct and
    ascending; or None. Also values `[workers, chunks, k]`, and
    bool `[workers]`, whether the words are a valid selection with values up to
    `max_magnitude`.
    """
    end = self.value_code.words(chunks)
    values = self.value_code.decode(data[:, :end], chunks)
    good = jnp.abs(values) <= self.max_magnitude  # no NaN
    code = self.index_code
    if code is None:
      valid = jnp.all(good, axis=(1, 2))
      return None, values, valid
    indices = code.decode(data[:, end:], chunks)
    # Each index beside the one before it, the first beside -1.
    edge = (0, 0), (0, 0), (1, 0)
    previous = jnp.pad(indices[..., :-1], edge, constant_values=-1)
    good &= indices > previous
    good &= indices < self.n
    valid = jnp.all(good, axis=(1, 2))  # one reduction, one kernel
    # Gathers and scatters are promised ascending indices in [0, n): replace
    # those of excluded workers as well.
    first = index_codes.order_of(indices)
    is_valid = valid[:, None, None]  # bool [workers, 1, 1]
    indices = jnp.where(is_valid, indices, first)
    return indices, values, valid
