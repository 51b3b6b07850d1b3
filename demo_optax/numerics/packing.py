"""Packs numbers with a few bits, finds ones, digests arrays."""

import functools
from types import ModuleType

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from demo_optax.numerics import plain

_WORD = 32


def packed_words(count: int, width: int) -> int:
  """Returns the words that `count` numbers with `width` bits take."""
  return sum(-(-count * part // _WORD) for part in _parts(width))


def pack_bits(
  numbers: Array,
  width: int,
) -> Array:
  """Packs numbers below `2**width`, 1 to 31 bits, into uint32 words.

  Takes uint32 `[..., count]`; returns `[..., words]`. A number is cut
  into parts with 16, 8, 4, 2 or 1 bits, the lowest bits first: 7 bits into 1, 2
  and 4. Parts with one size are packed in planes: in W words, bits `j part` to
  `(j + 1) part` of word w are those of number `j W + w`. So every operation
  reads long rows.
  """
  *lead, count = numbers.shape
  planes, start = [], 0
  for part in _parts(width):
    per_word = _WORD // part
    words = -(-count // per_word)
    low = (numbers >> start) & (2**part - 1)
    # [..., numbers of a word, words]
    table = plain.pad_to(low, per_word * words).reshape(*lead, per_word, words)
    shifted = table << _first_bits(part, table.ndim)
    planes.append(jnp.sum(shifted, axis=-2, dtype=jnp.uint32))
    start += part
  return jnp.concatenate(planes, axis=-1)


def unpack_bits(
  words: Array,
  count: int,
  width: int,
) -> Array:
  """Undoes `pack_bits`; returns uint32 `[..., count]`."""
  *lead, _ = words.shape
  numbers = jnp.zeros((*lead, count), jnp.uint32)
  first = start = 0
  for part in _parts(width):
    last = first + packed_words(count, part)
    plane = words[..., None, first:last]  # [..., 1, words]
    # [..., numbers of a word, words]
    table = (plane >> _first_bits(part, plane.ndim)) & (2**part - 1)
    low = table.reshape(*lead, -1)[..., :count]  # without padding
    numbers |= low << start
    first, start = last, start + part
  return numbers


def _parts(width: int) -> list[int]:
  """Returns the powers of two whose sum is `width`, ascending."""
  powers = [1 << place for place in range(width.bit_length())]
  return [power for power in powers if width & power]


def _first_bits(part: int, ndim: int) -> Array:
  """Returns where parts begin in a word, uint32 `[..., 32 / part, 1]`."""
  places = np.arange(0, _WORD, part, dtype=np.uint32)[:, None]
  return lax.broadcast_to_rank(places, ndim)


def places_of_ones(ones: Array, k: int) -> Array:
  """Returns the places of the first `k` ones in rows, bool `[rows, size]`.

  Counts ones per 32 bits to find the word with the j-th one, then halves that
  word five times. All operations are vectorised, without sort or scatter.
  Returns int32 `[rows, k]`, ascending, `size` where there are fewer ones.
  """
  rows, size = ones.shape
  number = -(-size // _WORD)
  # [rows, words, bits]
  bits = plain.pad_to(ones, number * _WORD).reshape(rows, number, _WORD)
  shifts = jnp.arange(_WORD, dtype=jnp.uint32)[None, None]
  shifted = bits.astype(jnp.uint32) << shifts
  words = jnp.sum(shifted, axis=2, dtype=jnp.uint32)  # [rows, words]
  counts = lax.population_count(words).astype(jnp.int32)
  # Ones up to the end of each word: a product with a triangle of ones.
  order = jnp.arange(number, dtype=jnp.int32)
  triangle = (order[:, None] >= order[None]).astype(jnp.int32)
  until = triangle[None] * counts[:, None]  # [rows, words, words]
  until = jnp.sum(until, axis=2, dtype=jnp.int32)  # [rows, words]
  rank = jnp.arange(k, dtype=jnp.int32)[None]
  passed = until[:, None] <= rank[:, :, None]  # [rows, k, words]
  word_number = jnp.sum(passed, axis=2, dtype=jnp.int32)  # [rows, k]
  before = jnp.max(jnp.where(passed, until[:, None], 0), axis=2)
  within = take(words, jnp.minimum(word_number, number - 1))
  places = _WORD * word_number + _place_in_word(within, rank - before)
  return jnp.where(word_number < number, places, size)


def take(x: Array, places: Array) -> Array:
  """Returns `x[row, places[row, j]]`, `[rows, k, ...]`, for int32 `[rows, k]`.

  Places must be in `[0, n)`: a check would cost several kernels per call.
  """
  return x.at[row_numbers(places), places].get(
    mode='promise_in_bounds',
    wrap_negative_indices=False,
  )


def row_numbers(places: Array) -> Array:
  """Returns int32 `[rows, 1]`, to index with `places [rows, k]`."""
  return jnp.arange(places.shape[0], dtype=jnp.int32)[:, None]


def _place_in_word(
  words: Array,
  rank: Array,
) -> Array:
  """Returns where the `rank`-th one is in uint32 `words`, which have it."""
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = (words >> place.astype(jnp.uint32)) & (2**width - 1)
    count = lax.population_count(low).astype(jnp.int32)
    above = rank >= count
    rank = jnp.where(above, rank - count, rank)
    place = jnp.where(above, place + width, place)
  return place


def digest_block(
  x: chex.Array,
  start: np.ndarray,
  shape: tuple[int, ...],
) -> chex.Array:
  """Returns the part of a digest from one block, uint32 `[2]`.

  The block begins at `start`, uint32, in an array with this `shape`. Sums over
  its words x and their places i: (2 i + 1) x, and a hash of x and i. A NumPy
  block is digested by NumPy.
  """
  if isinstance(x, np.ndarray):
    return _digest(np, np.asarray(x, order='C'), start, shape)
  return _digest_on_device(x, start, shape)


def _digest(
  xp: ModuleType,
  x: chex.Array,
  start: np.ndarray,
  shape: tuple[int, ...],
) -> chex.Array:
  words = _words(x)  # u32[*block, words of an element]
  place = xp.zeros((1,) * words.ndim, xp.uint32)
  for dim, length in enumerate((*shape, words.shape[-1])):
    along = xp.arange(words.shape[dim], dtype=xp.uint32)
    if dim < len(shape):
      along = along + start[dim]
    ones = [1] * words.ndim
    ones[dim] = -1
    place = place * xp.uint32(length) + along.reshape(ones)
  weighted = words * (place * xp.uint32(2) + xp.uint32(1))
  mixed = words + place * xp.uint32(0x9E3779B9)
  mixed = (mixed ^ (mixed >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
  mixed = mixed ^ (mixed >> xp.uint32(16))
  sums = xp.sum(weighted, dtype=xp.uint32), xp.sum(mixed, dtype=xp.uint32)
  return xp.stack(sums)


_digest_on_device = jax.jit(functools.partial(_digest, jnp), static_argnums=2)


_NARROW = 'bool', 'int2', 'int4', 'uint2', 'uint4', 'float4'


def _words(x: chex.Array) -> chex.Array:
  """Returns the bits of an array as uint32 `[*shape, n]`."""
  # Bits below a byte are not addressable; float32 is exact.
  if x.dtype.name.startswith(_NARROW):
    x = x.astype(np.float32)
  narrow = f'uint{8 * min(x.dtype.itemsize, 4)}'
  return x.reshape(*x.shape, 1).view(narrow).astype(np.uint32)
