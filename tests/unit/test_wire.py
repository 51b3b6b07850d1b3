"""Payloads are safe to read, whoever wrote them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import merge

from demo_optax.codes import value_codes
from demo_optax.codes.format import ChunkFormat
from demo_optax.compressors import Dct, chunking
from demo_optax.compressors.layout import Bucket
from demo_optax.exchange.message import (
  END_WORDS,
  GATHERED,
  Packer,
  Selected,
  energy,
)
from demo_optax.workers import Group

MERGE = jax.jit(merge, static_argnums=(3, 4))


def random_selection(rng, f, chunks):
  indices = [np.sort(rng.permutation(f.n)[: f.k]) for _ in range(chunks)]
  values = rng.normal(size=(chunks, f.k)) * 10.0 ** rng.integers(-38, 38)
  return np.stack(indices).astype(np.int32), values.astype(np.float32)


def packer_of(leaves):
  """Of buckets of these formats, with so many chunks each."""
  return Packer(
    tuple(
      Bucket(f'bucket_{i}', None, None, f, (1, f.n), False, (), 1, chunks, True)
      for i, (f, chunks) in enumerate(leaves)
    )
  )


@functools.partial(jax.jit, static_argnums=0)
def write(packer, selections):
  """The message of a worker that is present."""
  selected = [
    Selected(None if b.format.k == b.format.n else i, v)
    for b, (i, v) in zip(packer.buckets, selections)
  ]
  message, _ = packer.pack(selected, {}, jnp.ones(()), jnp.asarray(True))
  return message[GATHERED].reshape(-1)


def read(packer, data):
  """(indices, values) of each bucket, and whose values count."""
  received, _ = packer.unpack({GATHERED: data}, Group('workers', len(data)))
  found = [
    (
      x.indices
      if x.indices is not None
      else jnp.broadcast_to(jnp.arange(x.values.shape[-1]), x.values.shape),
      x.values,
    )
    for x in received.values()
  ]
  return found, received[0].valid


def formats(packer):
  return [(b.format, b.num_chunks) for b in packer.buckets]


# Payloads that nobody wrote ---------------------------------------------------

# Every index code (fixed, bitmap, Elias-Fano, none) with every value code.
PLACES = {
  'fixed': (100, 1),
  'bitmap': (40, 15),
  'elias-fano': (300, 9),
  'none': (7, 7),
}


MANY = 300
PRESENT = np.float32(1).view(np.uint32)


def mixed_layout(values):
  leaves = [
    (ChunkFormat(n, k, 'float32', values), 3) for n, k in PLACES.values()
  ]
  assert [
    f.index_code.name if f.index_code else 'none' for f, _ in leaves
  ] == list(PLACES)
  return packer_of(leaves)


@functools.cache
def reader(values):
  return jax.jit(functools.partial(read, mixed_layout(values)))


def status_at(layout):
  return sum(f.words(c) for f, c in formats(layout))


def damaged(rng, values, count):
  """Messages: random words, and true ones with a few bytes changed."""
  layout = mixed_layout(values)
  payload = np.asarray(
    write(layout, [random_selection(rng, f, c) for f, c in formats(layout)])
  )
  used = 4 * (status_at(layout) + END_WORDS)
  changed = np.tile(payload, (count, 1)).view(np.uint8)
  for _ in range(3):
    changed[np.arange(count), rng.integers(0, used, count)] = rng.integers(
      0, 256, count
    )
  changed = changed.view(np.uint32)
  noise = rng.integers(0, 2**32, changed.shape, dtype=np.uint32)
  noise[::2, status_at(layout)] = PRESENT
  return np.concatenate(
    [
      changed,
      noise,
      np.full_like(noise[:1], 0),
      np.full_like(noise[:1], 2**32 - 1),
    ]
  )


@pytest.mark.core
@pytest.mark.parametrize('values', value_codes.VALUES)
def test_any_bytes_are_safe_to_read(values):
  """Indices ascend in every chunk; whoever is present has moderate values."""
  data, layout = (
    damaged(np.random.default_rng(0), values, MANY),
    mixed_layout(values),
  )
  received, present = reader(values)(jnp.asarray(data))
  present = np.asarray(present)
  assert 0 < present.sum() < len(present)
  assert not np.any(present[data[:, status_at(layout)] != PRESENT])
  for (f, _), (indices, v) in zip(formats(layout), received):
    places = np.asarray(indices)
    assert np.all(places[..., 0] >= 0) and np.all(places[..., -1] < f.n)
    assert np.all(np.diff(places, axis=-1) > 0)
    assert np.all(np.abs(np.asarray(v)[present]) <= f.max_magnitude)
    merged = MERGE(indices, v, present, f.n, 'senders')
    assert np.all(np.isfinite(merged))


@pytest.mark.parametrize('values', value_codes.VALUES)
def test_who_wrote_what_nobody_reads_is_left_out(values):
  """Too few bits in a bitmap, an index too far, a value not finite."""
  layout = mixed_layout(values)
  rng = np.random.default_rng(2)
  good = np.asarray(
    write(layout, [random_selection(rng, f, c) for f, c in formats(layout)])
  )
  starts = np.cumsum([0] + [f.words(c) for f, c in formats(layout)])

  def values_end(number):
    f, c = formats(layout)[number]
    return int(starts[number]) + f.value_code.words(c)

  # The indices of 100 places, in 7 bits: the second is 127.
  def changed(place, word):
    words = good.copy()
    words[place] = word
    return words

  too_far = changed(slice(values_end(0), int(starts[1])), 2**32 - 1)
  too_few = changed(slice(values_end(1), int(starts[2])), 0)
  end = status_at(layout)
  cases = [good, too_far, too_few, changed(end, 0), changed(end, 3)]
  expected = [True, False, False, False, False]
  # A scale, or the first value, that is not finite or larger than sums allow.
  place = 0 if values == 'float32' else values_end(0) - 1
  bad = [0x7F80]
  if values == 'float32':
    bad = np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32).view(
      np.uint32
    )
  cases += [changed(place, word) for word in bad]
  expected += [False] * len(bad)
  # As many as in the test above, whose program reads them.
  data = np.stack([*cases, *[good] * (2 * MANY + 2 - len(cases))])
  _, present = reader(values)(jnp.asarray(data))
  assert present.tolist() == expected + [True] * (len(data) - len(cases))


@pytest.mark.parametrize(
  'values, average',
  [
    *((values, 'senders') for values in value_codes.VALUES),
    ('float32', 'workers'),
  ],
)
def test_the_largest_that_is_read_can_be_transformed(values, average):
  """Of signs as in the worst of the basis, from many workers."""
  grid = chunking.chunk_grid((16, 32), (32, 32))
  n, many = grid.chunk_size, 11
  f = ChunkFormat(n, n, 'float32', values)
  rng = np.random.default_rng(0)
  signs = np.sign(
    [
      np.outer(np.ones(32), np.ones(16)).ravel(),
      chunking.to_coefficients(
        jnp.asarray(rng.normal(size=(16, 32)), jnp.float32), grid, Dct()
      ).ravel(),
    ]
  )
  for sign in signs:
    data, _ = jax.jit(f.encode)(None, np.float32(3.4e38 * sign[None]))
    indices, read, sound = jax.jit(lambda x: f.decode(x, 1))(
      np.stack([data] * many)
    )
    assert bool(jnp.all(sound))
    doubled = jnp.where(sound[:, None, None], 2 * read, 0)
    for v in (read, jnp.clip(doubled, -f.max_magnitude, f.max_magnitude)):
      merged = MERGE(indices, v, sound, n, average)
      update = chunking.from_coefficients(
        merged.reshape(grid.coefficients_shape), grid, Dct()
      )
      assert np.all(np.isfinite(update))


@pytest.mark.parametrize('columns', [1, 2, 3, 12, 16, 48])
def test_the_energy_of_many_chunks_is_estimated_from_some(columns):
  """Whatever the columns of chunks are that hold it."""
  chunks = np.ones((2304, 4), np.float32)
  chunks[::columns] = 10
  found, whole = energy(jnp.asarray(chunks)), np.sum(chunks**2)
  assert 0.8 * whole < found < 1.25 * whole
  few = jnp.asarray(chunks[:2047])
  np.testing.assert_allclose(energy(few), jnp.sum(few**2), rtol=1e-6)
