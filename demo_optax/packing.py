"""Numbers of a few bits each, packed into bytes."""

import math

import jax
import jax.numpy as jnp


def packed_size(count: int, width: int) -> int:
  """Bytes that `count` numbers of `width` bits take, packed."""
  return -(-count * width // 8)


def pack_bits(numbers: jax.Array, width: int) -> jax.Array:
  """Packs uint32 `[count]`, each below `2**width`, lowest bits first.

  Args:
    numbers: uint32 `[count]`.
    width: bits of each, 0 to 32.

  Returns:
    uint8 `[packed_size(count, width)]`.

  >>> import jax.numpy as jnp
  >>> pack_bits(jnp.array([1, 2, 3], jnp.uint32), 4)
  Array([33,  3], dtype=uint8)
  """
  if width == 0:
    return jnp.zeros((0,), jnp.uint8)
  per_group = _group(width)
  count = numbers.shape[0]
  groups = -(-count // per_group)
  numbers = jnp.pad(numbers, (0, groups * per_group - count))
  columns = numbers.reshape(groups, per_group).T
  data = []
  for byte in range(per_group * width // 8):
    bits = jnp.zeros((groups,), jnp.uint32)
    for place in range(8 * byte // width, (8 * byte + 7) // width + 1):
      bits |= _shift_left(columns[place], place * width - 8 * byte)
    data.append((bits & 0xFF).astype(jnp.uint8))
  return jnp.stack(data, 1).reshape(-1)[: packed_size(count, width)]


def unpack_bits(data: jax.Array, count: int, width: int) -> jax.Array:
  """Undoes `pack_bits` along the last axis.

  Args:
    data: uint8 `[..., packed_size(count, width)]`.
    count: how many numbers.
    width: bits of each, 0 to 32.

  Returns:
    uint32 `[..., count]`.
  """
  batch = data.shape[:-1]
  if width == 0:
    return jnp.zeros((*batch, count), jnp.uint32)
  per_group = _group(width)
  groups = -(-count // per_group)
  group_bytes = per_group * width // 8
  missing = groups * group_bytes - data.shape[-1]
  data = jnp.pad(data, [(0, 0)] * len(batch) + [(0, missing)])
  columns = data.reshape(*batch, groups, group_bytes).astype(jnp.uint32)
  mask = jnp.uint32(2**width - 1)
  numbers = []
  for place in range(per_group):
    first, last = place * width // 8, (place * width + width - 1) // 8
    bits = jnp.zeros((*batch, groups), jnp.uint32)
    for byte in range(first, last + 1):
      bits |= _shift_left(columns[..., byte], 8 * byte - place * width)
    numbers.append(bits & mask)
  return jnp.stack(numbers, -1).reshape(*batch, -1)[..., :count]


def _group(width: int) -> int:
  """Smallest number of `width`-bit numbers that fills whole bytes."""
  return 8 // math.gcd(8, width)


def _shift_left(x: jax.Array, amount: int) -> jax.Array:
  """`x << amount` for uint32; a negative amount shifts right."""
  return x << amount if amount >= 0 else x >> -amount
