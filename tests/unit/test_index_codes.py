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

pytestmark = pytest.mark.core


@settings(max_examples=20)  # each compiles
@given(st.integers(0, 32), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_packed_numbers_come_back(width, count, seed):
  rng = np.random.default_rng(seed)
  numbers = rng.integers(0, 2**width, count, dtype=np.uint64).astype(np.uint32)
  packed = jax.jit(packing.pack_bits, static_argnums=1)(
    jnp.asarray(numbers), width
  )
  assert packed.dtype == jnp.uint32
  assert packed.shape == (packing.packed_words(count, width),)
  np.testing.assert_array_equal(packed, planes(numbers, width))
  found = jax.jit(packing.unpack_bits, static_argnums=(1, 2))(
    np.stack([packed, packed]), count, width
  )
  np.testing.assert_array_equal(found, [numbers, numbers])


@pytest.mark.parametrize(
  'size, k', [(1, 1), (31, 4), (32, 32), (95, 8), (512, 32)]
)
def test_places_of_ones(size, k):
  rng = np.random.default_rng(size)
  ones = rng.random((2, 30, size)) < rng.random((2, 30, 1))
  found = jax.jit(packing.places_of_ones, static_argnums=1)(ones, k)
  assert found.shape == (2, 30, k) and found.dtype == jnp.int32
  for row, places in zip(ones.reshape(-1, size), np.reshape(found, (-1, k))):
    first = np.flatnonzero(row)[:k].tolist()
    assert places.tolist() == first + [size] * (k - len(first))


def bound(n, k):
  return math.log2(math.comb(n, k))


def bitmap_bits(chunk, code):
  return [int(place in chunk) for place in range(code.n)]


def low_bits(chunk, code):
  return [index >> bit & 1 for index in chunk for bit in range(code.low)]


def unary_bits(chunk, code):
  """For every bucket of `2**low` places, a one for each index, then a zero."""
  bits = []
  for bucket in range(math.ceil(code.n / 2**code.low)):
    bits += [1] * sum(index >> code.low == bucket for index in chunk) + [0]
  return bits[:-1]  # the last bucket's zero says nothing


# The streams of a code, each of all chunks before the next.
STREAMS = {
  index_codes.Bitmap: [bitmap_bits],
  index_codes.EliasFano: [low_bits, unary_bits],
}


def expected_words(code, indices):
  if isinstance(code, index_codes.FixedWidth):
    return planes(indices, index_codes.index_width(code.n))
  words = []
  for stream in STREAMS[type(code)]:
    bits = [bit for chunk in indices.tolist() for bit in stream(chunk, code)]
    words.append(planes(bits, 1))
  if isinstance(code, index_codes.EliasFano):
    words[0] = planes(indices & (2**code.low - 1), code.low)
  return np.concatenate(words)


@st.composite
def codes(draw):
  n = draw(st.one_of(st.integers(2, 80), st.sampled_from([300, 1000, 4096])))
  k = draw(st.integers(1, min(n - 1, 80)))
  kind = draw(st.sampled_from(['fixed', 'bitmap', 'elias-fano', 'cheapest']))
  if kind == 'elias-fano':
    low = draw(st.integers(0, index_codes.index_width(n) - 1))
    return index_codes.EliasFano(n, k, low)
  return {
    'fixed': index_codes.FixedWidth,
    'bitmap': index_codes.Bitmap,
    'cheapest': index_codes.cheapest,
  }[kind](n, k)


def random_sets(rng, chunks, n, k):
  sets = [np.sort(rng.permutation(n)[:k]) for _ in range(chunks)]
  return np.stack(sets).astype(np.int32)


@settings(max_examples=20)  # each compiles
@given(codes(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_indices_come_back(code, chunks, seed):
  rng = np.random.default_rng(seed)
  sent = [random_sets(rng, chunks, code.n, code.k) for _ in range(2)]
  sent[1][0] = np.arange(code.n - code.k, code.n)
  encode, decode = jax.jit(code.encode), jax.jit(code.decode, static_argnums=1)
  data = [encode(jnp.asarray(indices)) for indices in sent]
  for d, indices in zip(data, sent):
    assert d.dtype == jnp.uint32 and d.size == code.words(chunks)
    assert (
      -(-chunks * code.bits // 32) <= d.size <= chunks * code.bits // 32 + 7
    )
    np.testing.assert_array_equal(d, expected_words(code, indices))
  for d, indices in zip(data, sent):
    found = decode(d, chunks)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, indices)


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
