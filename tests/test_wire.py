"""Payloads: exact, of the promised size, and safe to read."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_optax import wire

pytestmark = pytest.mark.core


@given(st.integers(0, 32), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_packed_numbers_come_back(width, count, seed):
  rng = np.random.default_rng(seed)
  numbers = rng.integers(0, 2**width, count, dtype=np.uint64).astype(np.uint32)
  packed = wire.pack_bits(jnp.asarray(numbers), width)
  assert packed.dtype == jnp.uint8
  assert packed.shape == (wire.packed_size(count, width),)
  assert packed.size == (count * width + 7) // 8
  np.testing.assert_array_equal(
      wire.unpack_bits(packed, count, width), numbers)
  # Lowest bits first, as NumPy packs them.
  bits = (numbers[:, None] >> np.arange(width, dtype=np.uint32)) & 1
  np.testing.assert_array_equal(
      packed, np.packbits(bits.reshape(-1), bitorder='little'))


@pytest.mark.parametrize('n, width', [(1, 0), (2, 1), (3, 2), (64, 6), (65, 7),
                                      (4096, 12), (65536, 16), (65537, 17)])
def test_index_width(n, width):
  assert wire.index_width(n) == width


@st.composite
def layouts(draw):
  kinds = st.tuples(st.integers(1, 80), st.integers(1, 80),
                    st.integers(1, 5))
  leaves = draw(st.lists(kinds, min_size=1, max_size=4))
  return [(wire.ChunkFormat(n, min(k, n), 'float32'), chunks)
          for n, k, chunks in leaves]


@given(layouts(), st.integers(1, 3), st.integers(0, 2**31))
def test_payloads_come_back(leaves, workers, seed):
  rng = np.random.default_rng(seed)
  layout = wire.Layout(leaves)
  sent, payloads = [], []
  for worker in range(workers):
    selections = []
    for f, chunks in leaves:
      indices = np.stack([rng.permutation(f.n)[: f.k] for _ in range(chunks)])
      if f.k == f.n:
        indices = np.broadcast_to(np.arange(f.n), (chunks, f.n))
      bits = rng.integers(0, 2**32, indices.shape, dtype=np.uint64)
      values = bits.astype(np.uint32).view(np.float32)  # NaNs and all
      selections.append(
          (jnp.asarray(indices, jnp.int32), jnp.asarray(values)))
    sent.append(selections)
    payload = layout.encode(selections, jnp.asarray(worker != 1))
    assert payload.shape == (layout.num_bytes,) and payload.dtype == jnp.uint8
    payloads.append(payload)
  received, present = layout.decode(jnp.stack(payloads))
  assert present.tolist() == [w != 1 for w in range(workers)]
  for leaf, (indices, values) in enumerate(received):
    for worker in range(workers):
      np.testing.assert_array_equal(indices[worker], sent[worker][leaf][0])
      np.testing.assert_array_equal(
          np.asarray(values[worker]).view(np.uint32),
          np.asarray(sent[worker][leaf][1]).view(np.uint32))


@given(layouts(), st.integers(0, 2**31))
def test_any_bytes_give_indices_within_the_chunk(leaves, seed):
  layout = wire.Layout(leaves)
  rng = np.random.default_rng(seed)
  data = rng.integers(0, 256, (2, layout.num_bytes), dtype=np.uint8)
  received, present = layout.decode(jnp.asarray(data))
  assert present.dtype == bool
  for (f, _), (indices, _) in zip(leaves, received):
    assert np.all((np.asarray(indices) >= 0) & (np.asarray(indices) < f.n))


def test_float64_travels_as_float64(x64):
  f = wire.ChunkFormat(10, 2, 'float64')
  values = jnp.asarray([[np.pi, -1e-300]])
  indices = jnp.asarray([[3, 9]], jnp.int32)
  data = f.encode(indices, values)
  assert data.size == f.num_bytes(1) == 16 + 1
  found = f.decode(data[None], 1)
  np.testing.assert_array_equal(found[0][0], indices)
  np.testing.assert_array_equal(found[1][0], values)
