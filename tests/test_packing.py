"""Numbers of a few bits, packed."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_optax import packing

pytestmark = pytest.mark.core


@settings(max_examples=20)  # each compiles
@given(st.integers(0, 32), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_packed_numbers_come_back(width, count, seed):
  rng = np.random.default_rng(seed)
  numbers = rng.integers(0, 2**width, count, dtype=np.uint64).astype(np.uint32)
  packed = packing.pack_bits(jnp.asarray(numbers), width)
  assert packed.dtype == jnp.uint8
  assert packed.shape == (packing.packed_size(count, width),)
  assert packed.size == (count * width + 7) // 8
  np.testing.assert_array_equal(
      packing.unpack_bits(packed, count, width), numbers)
  # Lowest bits first, as NumPy packs them.
  bits = (numbers[:, None] >> np.arange(width, dtype=np.uint32)) & 1
  np.testing.assert_array_equal(
      packed, np.packbits(bits.reshape(-1), bitorder='little'))
