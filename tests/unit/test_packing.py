"""Numbers of a few bits, packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import planes

from demo_optax.numerics import bits as packing

pytestmark = pytest.mark.core


@settings(max_examples=20)  # each compiles
@given(st.integers(0, 32), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_packed_numbers_come_back(width, count, seed):
  rng = np.random.default_rng(seed)
  numbers = rng.integers(0, 2**width, count, dtype=np.uint64).astype(np.uint32)
  packed = jax.jit(packing.pack_bits, static_argnums=1)(
      jnp.asarray(numbers), width)
  assert packed.dtype == jnp.uint32
  assert packed.shape == (packing.packed_words(count, width),)
  np.testing.assert_array_equal(packed, planes(numbers, width))
  found = jax.jit(packing.unpack_bits, static_argnums=(1, 2))(
      jnp.stack([packed, packed]), count, width)
  np.testing.assert_array_equal(found, [numbers, numbers])


@pytest.mark.parametrize('size, k', [(1, 1), (31, 4), (32, 32), (95, 8),
                                     (512, 32)])
def test_places_of_ones(size, k):
  rng = np.random.default_rng(size)
  ones = rng.random((2, 30, size)) < rng.random((2, 30, 1))
  found = packing.places_of_ones(jnp.asarray(ones), k)
  assert found.shape == (2, 30, k) and found.dtype == jnp.int32
  for row, places in zip(ones.reshape(-1, size), found.reshape(-1, k)):
    expected = np.full(k, size)
    first = np.flatnonzero(row)[:k]
    expected[: len(first)] = first
    np.testing.assert_array_equal(places, expected)
