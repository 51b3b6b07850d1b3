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


def packed_words(
  count: int,
  width: int,
) -> int:
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
  planes = []
  start = 0  # of the part, in a number
  for part in _parts(width):
    low = (numbers >> start) & (2**part - 1)
    per_word = _WORD // part
    words = packed_words(count, part)
    padded = plain.pad_to(low, per_word * words)
    # [..., numbers of a word, words]
    table = padded.reshape(*lead, per_word, words)
    shifted = table << _first_bits(part, table.ndim)
    plane = jnp.sum(shifted, axis=-2, dtype=jnp.uint32)
    planes.append(plane)
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
  start = 0  # of the part, in a number
  first = 0  # word of the plane
  for part in _parts(width):
    last = first + packed_words(count, part)
    plane = words[..., None, first:last]  # [..., 1, words]
    shifted = plane >> _first_bits(part, plane.ndim)
    table = shifted & (2**part - 1)  # [..., numbers of a word, words]
    low = table.reshape(*lead, -1)  # [..., count, and padding]
    numbers |= low[..., :count] << start
    start += part
    first = last
  return numbers


def _parts(width: int) -> list[int]:
  """Returns the powers of two whose sum is `width`, ascending."""
  return [power for power in (1, 2, 4, 8, 16, 32) if width & power]


def _first_bits(part: int, ndim: int) -> Array:
  """Returns where parts begin in a word, uint32 `[..., 32 / part, 1]`."""
  places = np.arange(0, _WORD, part, dtype=np.uint32)
  return lax.broadcast_to_rank(places[:, None], ndim)


def places_of_ones(
  ones: Array,
  k: int,
) -> Array:
  """Returns the places of the first `k` ones in rows, bool `[rows, size]`.

  Counts ones per 32 bits to find the word with the j-th one, then halves that
  word five times. All operations are vectorised, without sort or scatter.
  Returns int32 `[rows, k]`, ascending, `size` where there are fewer ones.
  """
  rows, size = ones.shape
  num_words = -(-size // _WORD)
  padded = plain.pad_to(ones, num_words * _WORD)
  bits = padded.reshape(rows, num_words, _WORD)  # [rows, words, bits]
  bits = bits.astype(jnp.uint32)
  shifts = jnp.arange(_WORD, dtype=jnp.uint32)
  shifted = bits << shifts[None, None]
  words = jnp.sum(shifted, axis=2, dtype=jnp.uint32)  # [rows, words]
  counts = lax.population_count(words).astype(jnp.int32)
  # Ones up to the end of each word: a product with a triangle of ones.
  triangle = jnp.tri(num_words, dtype=jnp.int32)
  terms = triangle[None] * counts[:, None]  # [rows, words, words]
  until = jnp.sum(terms, axis=2, dtype=jnp.int32)
  until = until[:, None]  # [rows, 1, words]
  rank = jnp.arange(k, dtype=jnp.int32)[None]  # [1, k]
  passed = until <= rank[:, :, None]  # [rows, k, words]
  number = jnp.sum(passed, axis=2, dtype=jnp.int32)  # of a word, [rows, k]
  all_before = jnp.where(passed, until, 0)
  before = jnp.max(all_before, axis=2)  # [rows, k]
  existing = jnp.minimum(number, num_words - 1)
  word = take(words, existing)
  places = _WORD * number + _place_in_word(word, rank - before)
  return jnp.where(number < num_words, places, size)


def take(x: Array, places: Array) -> Array:
  """Returns `x[row, places[..., row, j]]`, for `places [..., rows, k]`.

  Places must be in `[0, n)`: a check would cost several kernels per call.
  """
  return x.at[row_numbers(places), places].get(
    mode='promise_in_bounds',
    wrap_negative_indices=False,
  )


def row_numbers(places: Array) -> Array:
  """Returns the row of each place, int32 `[..., rows, k]`."""
  return lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 2)


def _place_in_word(
  words: Array,
  rank: Array,
) -> Array:
  """Returns where the `rank`-th one is in uint32 `words`, which have it."""
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    shifted = words >> place.astype(jnp.uint32)
    low = shifted & (2**width - 1)
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
    x = np.asarray(x, order='C')
    return _digest(np, x, start, shape)
  return _digest_on_device(x, start, shape)


def _digest(
  xp: ModuleType,
  x: chex.Array,
  start: np.ndarray,
  shape: tuple[int, ...],
) -> chex.Array:
  words = _words(x)  # u32[*block, words of an element]
  ndim = words.ndim
  place = xp.zeros((1,) * ndim, np.uint32)
  lengths = *shape, words.shape[-1]
  for dim, length in enumerate(lengths):
    along = xp.arange(words.shape[dim], dtype=np.uint32)
    if dim < len(shape):
      along = along + start[dim]
    ones = [1] * ndim
    ones[dim] = -1
    place = place * np.uint32(length)
    place = place + along.reshape(ones)
  weighted = words * (place * 2 + 1)
  mixed = words + place * np.uint32(0x9E3779B9)
  mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
  mixed = mixed ^ (mixed >> 16)
  total = xp.sum(weighted, dtype=np.uint32)
  hashed = xp.sum(mixed, dtype=np.uint32)
  return xp.stack([total, hashed])


_digest_on_device = jax.jit(functools.partial(_digest, jnp), static_argnums=2)


_NARROW = 'bool', 'int2', 'int4', 'uint2', 'uint4', 'float4'


def _words(x: chex.Array) -> chex.Array:
  """Returns the bits of an array as uint32 `[*shape, n]`."""
  # Bits below a byte are not addressable; float32 is exact.
  if x.dtype.name.startswith(_NARROW):
    x = x.astype(np.float32)
  narrow = f'uint{8 * min(x.dtype.itemsize, 4)}'
  elements = x.reshape(*x.shape, 1)
  return elements.view(narrow).astype(np.uint32)
