"""Numbers of a few bits each, packed into bytes; places of ones among bits."""

import math

import jax
import jax.numpy as jnp

_WORD = 32


def packed_size(count: int, width: int) -> int:
  """Returns the bytes that `count` numbers of `width` bits take, packed."""
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
  numbers = numbers.reshape(groups, per_group)
  if 8 % width == 0:  # in fewer operations: each takes time to compile
    places = width * jnp.arange(per_group, dtype=jnp.uint32)[None]
    return jnp.sum(numbers << places, axis=1, dtype=jnp.uint8)
  columns = numbers.T
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
  if 8 % width == 0:
    places = jnp.expand_dims(
        width * jnp.arange(per_group, dtype=jnp.uint32), range(columns.ndim - 1)
    )
    return ((columns >> places) & mask).reshape(*batch, -1)[..., :count]
  numbers = []
  for place in range(per_group):
    first, last = place * width // 8, (place * width + width - 1) // 8
    bits = jnp.zeros((*batch, groups), jnp.uint32)
    for byte in range(first, last + 1):
      bits |= _shift_left(columns[..., byte], 8 * byte - place * width)
    numbers.append(bits & mask)
  return jnp.stack(numbers, -1).reshape(*batch, -1)[..., :count]


def places_of_ones(ones: jax.Array, k: int) -> jax.Array:
  """Places of the first `k` ones, in ascending order.

  Counts the ones of words of 32 bits, which finds the word of the j-th one;
  five halvings find it there. Neither sorts nor scatters: every operation is
  one of vectors.

  Args:
    ones: bool `[..., size]`.
    k: how many.

  Returns:
    int32 `[..., k]`; where there are fewer ones, `size` fills up.

  >>> import jax.numpy as jnp
  >>> places_of_ones(jnp.array([False, True, False, True]), 3)
  Array([1, 3, 4], dtype=int32)
  """
  *batch, size = ones.shape
  found = _places_of_ones(ones.reshape(math.prod(batch), size), k)
  return found.reshape(*batch, k)


def _places_of_ones(ones: jax.Array, k: int) -> jax.Array:
  """Returns the same for `[rows, size]`."""
  rows, size = ones.shape
  ones = jnp.pad(ones, ((0, 0), (0, -size % _WORD))).reshape(rows, -1, _WORD)
  bit = jnp.arange(_WORD, dtype=jnp.uint32)[None, None]
  words = jnp.sum(ones.astype(jnp.uint32) << bit, axis=2, dtype=jnp.uint32)
  number = words.shape[1]
  counts = jax.lax.population_count(words).astype(jnp.int32)
  # Ones until the end of each word.
  until = jnp.tril(jnp.ones((number, number), jnp.int32))[None]
  until = jnp.sum(until * counts[:, None], axis=2, dtype=jnp.int32)
  rank = jnp.arange(k, dtype=jnp.int32)[None]
  passed = until[:, None] <= rank[:, :, None]  # [rows, k, words]
  word = jnp.sum(passed, axis=2, dtype=jnp.int32)
  before = jnp.max(jnp.where(passed, until[:, None], 0), axis=2)
  within = take(words, jnp.minimum(word, number - 1))
  found = _WORD * word + _place_in_word(within, rank - before)
  return jnp.where(word < number, found, size)


def take(x: jax.Array, places: jax.Array) -> jax.Array:
  """Returns `x[row, places[row, j]]` for places that are within the rows.

  Places beyond a row are not handled (XLA takes the nearest): that would cost
  several kernels in each of many calls.

  Args:
    x: `[rows, n, ...]`.
    places: int32 `[rows, k]`, in `[0, n)`.

  Returns:
    `[rows, k, ...]`.
  """
  return x.at[row_numbers(places), places].get(
      mode='promise_in_bounds', wrap_negative_indices=False
  )


def row_numbers(places: jax.Array) -> jax.Array:
  """Returns int32 `[rows, 1]`, to go with `places [rows, k]`."""
  return jnp.arange(places.shape[0], dtype=jnp.int32)[:, None]


def _place_in_word(words: jax.Array, rank: jax.Array) -> jax.Array:
  """Place of the one of number `rank` in uint32 `words`, which have it."""
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = (words >> place.astype(jnp.uint32)) & jnp.uint32(2**width - 1)
    count = jax.lax.population_count(low).astype(jnp.int32)
    above = rank >= count
    rank = jnp.where(above, rank - count, rank)
    place = jnp.where(above, place + width, place)
  return place


def _group(width: int) -> int:
  """Smallest number of `width`-bit numbers that fills whole bytes."""
  return 8 // math.gcd(8, width)


def _shift_left(x: jax.Array, amount: int) -> jax.Array:
  """`x << amount` for uint32; a negative amount shifts right."""
  return x << amount if amount >= 0 else x >> -amount
