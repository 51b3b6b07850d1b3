"""Packed numbers and index codes: bit for bit as defined, and near the bound."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import planes

from demo_optax.codes import index_codes
from demo_optax.numerics import packing

PACK = jax.jit(packing.pack_bits, static_argnums=1)
UNPACK = jax.jit(packing.unpack_bits, static_argnums=(1, 2))


# One compilation for each width.
@pytest.mark.parametrize(
  'width, count',
  [(1, 60), (7, 33), (12, 1), (16, 32), (31, 5), (5, 0)],
)
def test_packed_numbers_come_back(width, count):
  rng = np.random.default_rng(width)
  numbers = rng.integers(0, 2**width, (2, count), dtype=np.uint64)
  numbers[:, :1] = 2**width - 1
  numbers = numbers.astype(np.uint32)
  packed = PACK(jnp.asarray(numbers), width)
  assert packed.dtype == jnp.uint32
  assert packed.shape == (2, packing.packed_words(count, width))
  np.testing.assert_array_equal(packed, [planes(x, width) for x in numbers])
  np.testing.assert_array_equal(UNPACK(packed, count, width), numbers)


@pytest.mark.parametrize(
  'size, k', [(1, 1), (31, 4), (32, 32), (95, 8), (512, 32)]
)
def test_places_of_ones(size, k):
  rng = np.random.default_rng(size)
  ones = rng.random((60, size)) < rng.random((60, 1))
  found = jax.jit(packing.places_of_ones, static_argnums=1)(ones, k)
  assert found.shape == (60, k) and found.dtype == jnp.int32
  for row, places in zip(ones, np.asarray(found)):
    first = np.flatnonzero(row)[:k].tolist()
    assert places.tolist() == first + [size] * (k - len(first))


def bound(n, k):
  return math.log2(math.comb(n, k))


def bitmap_bits(chunk, code):
  return [int(place in chunk) for place in range(code.n)]


def unary_bits(chunk, code):
  """For every bucket of `2**low` places, a one for each index, then a zero."""
  bits = []
  for bucket in range(math.ceil(code.n / 2**code.low)):
    bits += [1] * sum(index >> code.low == bucket for index in chunk) + [0]
  return bits[:-1]  # the last bucket's zero says nothing


def expected_words(code, indices):
  """The low bits of all chunks, then the rest of all chunks."""
  lows = planes(indices & (2**code.low - 1), code.low)
  if code.low == index_codes.index_width(code.n):
    return lows
  rest = unary_bits if code.low else bitmap_bits
  bits = [bit for chunk in indices.tolist() for bit in rest(chunk, code)]
  return np.concatenate([lows, planes(bits, 1)])


def random_sets(rng, chunks, n, k):
  sets = [np.sort(rng.permutation(n)[:k]) for _ in range(chunks)]
  return np.stack(sets).astype(np.int32)


# Each compiles once: the smallest, uneven and usual chunks of every code.
CODES = [
  index_codes.IndexCode(2, 1, 1),
  index_codes.IndexCode(1000, 7, 10),
  index_codes.IndexCode(33, 32, 0),
  index_codes.IndexCode(300, 80, 0),
  index_codes.IndexCode(3, 2, 1),
  index_codes.IndexCode(80, 13, 2),
  index_codes.IndexCode(300, 9, 8),
  index_codes.IndexCode(1000, 80, 3),
  index_codes.cheapest(4096, 32),
]
ENCODE = jax.jit(lambda code, x: code.encode(x), static_argnums=0)
DECODE = jax.jit(lambda code, x: code.decode(x, CHUNKS), static_argnums=0)
CHUNKS = 5


@pytest.mark.parametrize('code', CODES, ids=str)
@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_indices_come_back(code, seed):
  rng = np.random.default_rng(seed)
  sent = np.stack([random_sets(rng, CHUNKS, code.n, code.k) for _ in range(2)])
  sent[1, 0] = np.arange(code.n - code.k, code.n)
  data = ENCODE(code, jnp.asarray(sent))
  size = code.words(CHUNKS)
  assert data.dtype == jnp.uint32 and data.shape == (2, size)
  assert -(-CHUNKS * code.bits // 32) <= size <= CHUNKS * code.bits // 32 + 7
  expected = [expected_words(code, indices) for indices in sent]
  np.testing.assert_array_equal(data, expected)
  found = DECODE(code, data)
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, sent)


@given(st.integers(2, 70_000), st.data())
def test_cheapest_is_cheapest(n, data):
  k = data.draw(st.integers(1, n - 1))
  code = index_codes.cheapest(n, k)
  elias_fano = min(k * low + k + math.ceil(n / 2**low) - 1 for low in range(20))
  assert code.bits == min(k * math.ceil(math.log2(n)), n, elias_fano)
  assert code.bits >= bound(n, k) - 1e-6


def test_near_the_bound():
  """At most 10 % above it, of 64 x 64 places up to 215."""
  for k in range(1, 216):
    assert index_codes.cheapest(4096, k).bits < 1.1 * bound(4096, k), k
