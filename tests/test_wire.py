"""Payloads: exact, of the promised size, and safe to read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import merge
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_optax.compressors import chunking as chunks
from demo_optax.wire import message as wire
from demo_optax.wire import values as value_codes

pytestmark = pytest.mark.core


@st.composite
def layouts(draw):
  kinds = st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(1, 5),
                    st.sampled_from(value_codes.VALUES))
  leaves = draw(st.lists(kinds, min_size=1, max_size=4))
  return [(wire.ChunkFormat(n, min(k, n), 'float32', values), chunks)
          for n, k, chunks, values in leaves]


def random_selection(rng, f, chunks):
  indices = [np.sort(rng.permutation(f.n)[: f.k]) for _ in range(chunks)]
  values = rng.normal(size=(chunks, f.k)) * 10.0 ** rng.integers(-38, 38)
  return (jnp.asarray(np.stack(indices), jnp.int32),
          jnp.asarray(values, jnp.float32))


def write(layout, selections, present):
  """A payload, and the values as they will be read."""
  data, sent = layout.encode(selections)
  return layout.seal(data, present), sent


@settings(max_examples=20)  # each compiles
@given(layouts(), st.integers(1, 3), st.integers(0, 2**31))
def test_payloads_come_back(leaves, workers, seed):
  rng = np.random.default_rng(seed)
  layout = wire.Layout(leaves)
  encode = jax.jit(functools.partial(write, layout))
  selected, sent, payloads = [], [], []
  for worker in range(workers):
    selected.append([random_selection(rng, f, c) for f, c in leaves])
    payload, values = encode(selected[-1], jnp.asarray(worker != 1))
    assert payload.shape == (layout.num_bytes,) and payload.dtype == jnp.uint8
    payloads.append(payload)
    sent.append(values)
  received, present, _ = jax.jit(layout.decode)(jnp.stack(payloads))
  assert present.tolist() == [w != 1 for w in range(workers)]
  for leaf, (indices, values) in enumerate(received):
    for worker in range(workers):
      np.testing.assert_array_equal(indices[worker], selected[worker][leaf][0])
      np.testing.assert_array_equal(
          np.asarray(values[worker]).view(np.uint32),
          np.asarray(sent[worker][leaf]).view(np.uint32))
      f = leaves[leaf][0]
      if f.values == 'float32':
        np.testing.assert_array_equal(
            values[worker],
            np.clip(selected[worker][leaf][1], -f.limit / 2, f.limit / 2))


def test_float64_travels_as_float64(x64):
  f = wire.ChunkFormat(10, 2, 'float64')
  values = jnp.asarray([[np.pi, -1e-300]])
  indices = jnp.asarray([[3, 9]], jnp.int32)
  data, _ = f.encode(indices, values)
  assert data.size == f.num_bytes(1) == 16 + 1
  found = f.decode(data[None], 1)
  np.testing.assert_array_equal(found[0][0], indices)
  np.testing.assert_array_equal(found[1][0], values)
  assert found[2].tolist() == [True]


# Payloads that nobody wrote ---------------------------------------------------

# Every index code (fixed, bitmap, Elias-Fano, none) with every value code.
PLACES = {'fixed': (100, 1), 'bitmap': (40, 15), 'elias-fano': (300, 9),
          'none': (7, 7)}


def mixed_layout(values):
  leaves = [(wire.ChunkFormat(n, k, 'float32', values), 3)
            for n, k in PLACES.values()]
  assert [f.index_code.name for f, _ in leaves] == list(PLACES)
  return wire.Layout(leaves)


@functools.cache
def reader(values):
  return jax.jit(mixed_layout(values).decode)


def damaged(rng, values, count):
  """Payloads: random bytes, and true ones with a few bytes changed."""
  layout = mixed_layout(values)
  payload, _ = jax.jit(functools.partial(write, layout))(
      [random_selection(rng, f, c) for f, c in layout.leaves],
      jnp.asarray(True))
  changed = np.tile(np.asarray(payload), (count, 1))
  for _ in range(3):
    changed[np.arange(count), rng.integers(0, layout.num_bytes, count)] = (
        rng.integers(0, 256, count))
  noise = rng.integers(0, 256, (count, layout.num_bytes), dtype=np.uint8)
  noise[::2, -1] = 1
  return np.concatenate([changed, noise, np.full_like(noise[:1], 0),
                         np.full_like(noise[:1], 255)])


def assert_safe(values, data):
  """Indices ascend in every chunk; whoever is present has moderate values."""
  received, present, _ = reader(values)(jnp.asarray(data))
  present = np.asarray(present)
  assert not np.any(present[data[:, -1] != 1])
  for (f, _), (indices, v) in zip(mixed_layout(values).leaves, received):
    indices = np.asarray(indices)
    assert np.all(indices[..., 0] >= 0) and np.all(indices[..., -1] < f.n)
    assert np.all(np.diff(indices, axis=-1) > 0)
    assert np.all(np.abs(np.asarray(v)[present]) <= f.limit)
  return received, present


@pytest.mark.parametrize('values', value_codes.VALUES)
def test_any_bytes_are_safe_to_read(values):
  data = damaged(np.random.default_rng(0), values, 300)
  received, present = assert_safe(values, data)
  assert 0 < present.sum() < len(present)
  for (f, _), (indices, v) in zip(mixed_layout(values).leaves, received):
    merged = merge(
        indices, v, jnp.asarray(present), f.n, 'senders')
    assert np.all(np.isfinite(merged))


@pytest.mark.slow
@pytest.mark.parametrize('values', value_codes.VALUES)
def test_a_million_payloads_are_safe_to_read(values):
  rng = np.random.default_rng(1)
  for _ in range(20):  # 200,000 per value code
    assert_safe(values, damaged(rng, values, 5_000))


@pytest.mark.parametrize('values', value_codes.VALUES)
def test_who_wrote_what_nobody_reads_is_left_out(values):
  """Too few bits in a bitmap, an index too far, a value not finite."""
  layout = mixed_layout(values)
  rng = np.random.default_rng(2)
  selected = [random_selection(rng, f, c) for f, c in layout.leaves]
  good, _ = jax.jit(functools.partial(write, layout))(selected, jnp.asarray(True))
  starts = np.cumsum([0] + [f.num_bytes(c) for f, c in layout.leaves])
  fixed, c = layout.leaves[0]
  too_far = good.at[fixed.value_bytes(c)].set(127)  # of 100 places, in 7 bits
  bitmap, c = layout.leaves[1]
  first = int(starts[1]) + bitmap.value_bytes(c)
  too_few = good.at[first : int(starts[2])].set(0)
  cases = [good, too_far, too_few, good.at[-1].set(0), good.at[-1].set(3)]
  expected = [True, False, False, False, False]
  if values != 'float32':  # a scale, or the first value, that is infinite
    place = fixed.value_bytes(c) - (0 if values == 'bfloat16' else 2 * c)
    place = 0 if values == 'bfloat16' else place
    infinite = jnp.asarray([0x80, 0x7F], jnp.uint8)
    cases.append(good.at[place : place + 2].set(infinite))
    expected.append(False)
  _, present, _ = reader(values)(jnp.stack(cases))
  assert present.tolist() == expected


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_value_that_is_not_finite_or_too_large_is_left_out(bad):
  f = wire.ChunkFormat(16, 2, 'float32')
  layout = wire.Layout([(f, 1)])
  indices = jnp.asarray([[3, 9]], jnp.int32)
  payload, _ = write(
      layout, [(indices, jnp.asarray([[1.0, 2.0]]))], jnp.asarray(True))
  assert layout.decode(payload[None])[1].tolist() == [True]
  damage = np.frombuffer(np.float32(bad).tobytes(), np.uint8)
  received, present, _ = layout.decode(payload.at[:4].set(damage)[None])
  assert present.tolist() == [False]
  np.testing.assert_array_equal(received[0][0][0], indices)


@pytest.mark.parametrize('values', value_codes.VALUES)
@pytest.mark.parametrize('average', ['senders', 'workers'])
def test_the_largest_that_is_read_can_be_transformed(values, average):
  """Of signs as in the worst of the basis, from many workers."""
  grid = chunks.chunk_grid((16, 32), 32)
  n, many = grid.chunk_size, 11
  f = wire.ChunkFormat(n, n, 'float32', values)
  rng = np.random.default_rng(0)
  signs = np.sign([np.outer(np.ones(32), np.ones(16)).ravel(),
                   chunks.to_coefficients(jnp.asarray(
                       rng.normal(size=(16, 32)), jnp.float32), grid,
                       chunks.dct_basis).ravel()])
  for sign in signs:
    data, _ = f.encode(jnp.arange(n, dtype=jnp.int32)[None],
                       jnp.asarray(3.4e38 * sign[None], jnp.float32))
    indices, read, sound = f.decode(jnp.stack([data] * many), 1)
    assert bool(jnp.all(sound))
    doubled = jnp.where(sound[:, None, None], 2 * read, 0)
    for v in (read, jnp.clip(doubled, -f.limit, f.limit)):
      merged = merge(indices, v, sound, n, average)
      update = chunks.from_coefficients(
          merged.reshape(grid.coefficients_shape), grid, chunks.dct_basis)
      assert np.all(np.isfinite(update))


def test_stats_travel_with_who_takes_part():
  layout = wire.Layout([(wire.ChunkFormat(16, 2, 'float32'), 1)], 3)
  chosen = [(jnp.asarray([[3, 9]], jnp.int32), jnp.asarray([[1.0, 2.0]]))]
  data, _ = layout.encode(chosen)
  stats = jnp.asarray([1.5, -2e30, 7e-40])
  payload = layout.seal(data, jnp.asarray(True), stats)
  assert payload.shape == (layout.num_bytes,)
  received, present, found = layout.decode(payload[None])
  np.testing.assert_array_equal(received[0][1][0], chosen[0][1])
  assert present.tolist() == [True]
  np.testing.assert_array_equal(
      np.asarray(found[0]).view(np.uint32), np.asarray(stats).view(np.uint32))


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_sums_are_means_over_who_takes_part(x64, dtype):
  f = wire.ChunkFormat(16, 2, dtype, shared=True)
  layout = wire.SumLayout([(f, 3), (wire.ChunkFormat(5, 5, dtype, shared=True), 1)], 2)
  rng = np.random.default_rng(0)
  values = [[jnp.asarray(rng.normal(size=shape), dtype) for shape in ((3, 2), (1, 5))]
            for _ in range(3)]
  values[1][0] = values[1][0] * np.nan
  vectors = [
      layout.encode(v, jnp.asarray(w != 1), jnp.asarray([1.0, 2.0], 'float32'), dtype)
      for w, v in enumerate(values)]
  assert vectors[0].shape == (layout.num_elements,)
  means, count, stats = layout.decode(sum(vectors), 3)
  assert int(count) == 2 and stats.tolist() == [2.0, 4.0]
  for mean, a, b in zip(means, values[0], values[2]):
    assert mean.dtype == dtype
    np.testing.assert_allclose(mean, (a + b) / 2, rtol=1e-6)
