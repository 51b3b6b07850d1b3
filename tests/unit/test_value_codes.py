"""Value codes against NumPy, and at the ends of the floats' range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import read_as

from demo_optax.codes import value_codes
from demo_optax.codes.format import ChunkFormat

BITS = {
  'float32': (32, 0),
  'int8': (8, 16),
  'int4': (4, 16),
  'sign': (1, 16),
}
SCALES = [
  0.0,
  1e-45,
  1e-42,
  1e-38,
  2e-38,
  1e-36,
  1e-20,
  1.0,
  3e4,
  1e36,
  1e38,
  3.4028235e38,
]

# One message; one compilation per shape.
encode = jax.jit(
  lambda code, v: [x[0] for x in code.encode(v[None])], static_argnums=0
)
# Of chunks that are sent as a whole, clipped.
ENCODE = jax.jit(lambda f, v: f.encode(None, v), static_argnums=0)
DECODE = jax.jit(
  lambda f, data, chunks: f.decode(data[None], chunks)[1:],
  static_argnums=(0, 2),
)
decode = jax.jit(
  lambda code, data, chunks: code.decode(data[None], chunks)[0],
  static_argnums=(0, 2),
)


def make(values, k, dtype='float32'):
  return value_codes.CODES[values](dtype, k)


def same_numbers(a, b):
  """Equal as numbers, the subnormals of exact values being any."""
  a, b = (
    np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
    for x in (np.asarray(a), np.asarray(b))
  )
  np.testing.assert_array_equal(a, b)


def check(values, v):
  """Encodes, decodes and compares with the oracle; returns what was read."""
  chunks, k = v.shape
  f = ChunkFormat(k, k, v.dtype.name, values)
  data, sent = ENCODE(f, jnp.asarray(v))
  code = f.value_code
  per_value, per_chunk = BITS[values]
  is_double = v.dtype == np.float64 and values == 'float32'
  if is_double:
    per_value = 64
  assert code.bits == k * per_value + per_chunk
  assert (
    data.size
    == code.words(chunks)
    == (-(-chunks * k * per_value // 32) + -(-chunks * per_chunk // 32))
  )
  (read,), valid = DECODE(f, data, chunks)
  assert valid.all()
  assert read.dtype == sent.dtype == v.dtype
  np.testing.assert_array_equal(read, sent)
  assert np.all(np.isfinite(read))
  most = 2.0 ** (1022 if is_double else 126) / 2 ** (k - 1).bit_length()
  clipped = np.clip(v, -most, most)
  same_numbers(read, np.stack([read_as(chunk, values) for chunk in clipped]))
  return np.asarray(read)


@pytest.mark.parametrize('values', value_codes.VALUES)
@given(st.sampled_from([(5, 1), (5, 13), (1, 32)]), st.data())
def test_values_are_read_as_defined(values, shape, data):
  """One value, words that are not full, and whole words; each shape compiles."""
  chunks, k = shape
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  sizes = data.draw(
    st.lists(st.sampled_from(SCALES), min_size=chunks, max_size=chunks)
  )
  v = rng.uniform(-1, 1, (chunks, k)) * np.array(sizes)[:, None]
  check(values, v.astype(np.float32))


@pytest.mark.core
@pytest.mark.parametrize('values', value_codes.VALUES)
def test_the_ends_of_the_range(values):
  big, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
  rows = [
    [0.0] * 5,
    [-0.0] * 5,
    [big] * 5,
    [-big, big, big, -big, big],
    [big, 0, 1, -1, 1e-45],
    [1e-45] * 5,
    [tiny] * 5,
    [127 * tiny] * 5,
    [-126 * tiny, 0, tiny, 0, 0],
    [3.39e38, 3.3961e38, 1, 0, -3.4e38],
  ]
  read = check(values, np.array(rows, np.float32))
  assert not np.any(read[:2])


@pytest.mark.parametrize('values', value_codes.VALUES)
def test_float64(values, x64):
  rng = np.random.default_rng(0)
  v = (
    rng.normal(size=(6, 11))
    * np.array([1, 0, 1e-300, 1e-30, 1e30, 1e300])[:, None]
  )
  read = check(values, v)
  if values == 'float32':
    np.testing.assert_array_equal(read, v)


@pytest.mark.parametrize('values', value_codes.VALUES)
def test_what_is_read_and_what_is_left_make_up_the_whole(values):
  """To the bit, but for signs: those are one scale, however small the value."""
  rng = np.random.default_rng(0)
  v = (rng.standard_cauchy((200, 32)) ** 3).astype(np.float32)
  read = check(values, v)
  left = np.asarray(jax.jit(lambda v, read: v - read)(v, read))
  error = np.abs(left.astype(np.float64) + read - v)
  if values == 'sign':
    assert 0 < np.max(error / np.abs(read)) <= 2.0**-24
  else:
    assert not error.any()


@pytest.mark.parametrize('chunks, k', [(1, 1), (4, 5), (3, 20), (7, 33)])
def test_signs_and_zeros_twenty_in_a_word(chunks, k):
  rng = np.random.default_rng(k)
  v = rng.integers(-1, 2, (chunks, k)) * rng.uniform(1e-30, 1e30, (chunks, k))
  v = v.astype(np.float32)
  code = make('ternary', k)
  data, sent = encode(code, jnp.asarray(v))
  assert data.size == code.words(chunks) == -(-chunks * k // 20)
  digits = np.zeros(20 * data.size, np.uint64)
  digits[: v.size] = np.sign(v).reshape(-1) + 1
  powers = np.uint64(3) ** np.arange(20, dtype=np.uint64)
  np.testing.assert_array_equal(data, powers @ digits.reshape(20, -1))
  np.testing.assert_array_equal(sent, np.sign(v))
  np.testing.assert_array_equal(decode(code, data, chunks), np.sign(v))


def test_any_word_is_signs_and_zeros():
  code = make('ternary', 20)
  data = jnp.asarray([0, 3**20 - 1, 3**20, 2**32 - 1], jnp.uint32)
  found = np.asarray(decode(code, data, 4)).reshape(20, 4)
  np.testing.assert_array_equal(found[:, :2], np.tile([-1.0, 1.0], (20, 1)))
  assert np.isin(found, [-1.0, 0.0, 1.0]).all()
