"""Messages: selections as words of 32 bits, and back.

The size of a message depends on shapes alone. Its parts, in order:

    for every format of chunks (n, k, dtype, value code):
      values    of all its chunks, [chunks, k], by the value code:
                  float32: 32 bits each (float64: 64)
                  int8, int4, sign: 8, 4 or 1 bits each; then a bfloat16 scale
                  per chunk
      indices   of all its chunks, [chunks, k] in order, by the index code
                  that takes the fewest bits; absent if k == n, or if all
                  workers select the same
    status      float32, 1 if the worker is valid in this exchange, else 0
    energies    three float32: of the momentum, of its sent part, of the rest
    weight      float32, of the worker in all averages; absent without weights
    zeros       up to a multiple of 512 bytes, if a message is gathered

Numbers of fewer bits are packed in planes (`numerics.packing.pack_bits`); each
part begins with a new word. A gathered message has whole rows of 128 words: at
other sizes XLA:TPU all-reduces the messages of all workers, and NCCL is slower.

Each device of a worker has separate chunks and its own message. With owners, a
worker writes one such message per owner, all of one size.

Decoding is safe for arbitrary words. A worker is excluded if its indices are
not in order or not in the chunk, or a value exceeds
`ChunkFormat.max_magnitude`. All workers read the same words, so they agree.

If all workers select the same indices, only values are sent. Of float32 values
only the mean is needed: an all-reduce sums a vector of them, the number of
valid workers, the energies, and the weights, by which values are multiplied.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from demo_optax.codes.format import ChunkFormat
from demo_optax.compressors.layout import Bucket, with_rows
from demo_optax.numerics import plain, rounding
from demo_optax.workers import Group
from demo_optax.workers.collectives import GATHERED, TO_OWNERS

ENERGIES = 3  # of the momentum, of its sent part, of the rest
END_WORDS = 1 + ENERGIES  # the status and the energies
MAX_WEIGHT = 2.0**30  # of a worker; 1 / MAX_WEIGHT is the smallest
ROW = 128  # words in a row of a gathered message
# Chunks of a kind whose energies are measured, if it has twice as many.
_SAMPLE = 1024
_GOLDEN = (5**0.5 - 1) / 2

# `GATHERED`: uint32 `[rows, ROW]`; `TO_OWNERS`: uint32 `[owners, words]`;
# `SUMMED` + dtype: `[elements]`.
Message = Mapping[str, Array]
SUMMED = 'sum_'


class Selected(NamedTuple):
  """The selection from a bucket, on one device of one worker."""

  indices: Array | None  # int32 [rows, k], ascending; None if k is n
  values: Array  # [rows, k]


class Received(NamedTuple):
  """The selections of all workers from a bucket."""

  # int32 [senders, rows, k]; None if k is n, or all selected the same.
  indices: Array | None
  values: Array  # [senders, rows, k]; a sum is one sender's mean
  valid: Array  # bool [senders], whose values count
  weights: Array | None = None  # float32 [senders], if they have some


class Report(NamedTuple):
  """Counts and energies of an exchange."""

  num_valid: Array | None  # int32 []; None without buckets
  energies: Array  # float32 [ENERGIES], over valid workers
  # Of each bucket float32 [], different coefficients, with those in rows that
  # fill it; known once merged.
  distinct: Sequence[Array] = ()


@dataclasses.dataclass(frozen=True)
class Words:
  """Chunks of several buckets, and float32 scalars after them, as words."""

  buckets: Mapping[int, Bucket]  # by number, as one reader has them
  num_scalars: int
  readers: tuple[int, ...] = ()  # how many, if each reads its own chunks

  @functools.cached_property
  def counts(self) -> dict[ChunkFormat, dict[int, int]]:
    """How many chunks of each bucket are sent.

    By format, whose buckets are packed together, then by bucket number.
    """
    counts: dict[ChunkFormat, dict[int, int]] = {}
    for number, bucket in self.buckets.items():
      of_format = counts.setdefault(bucket.format, {})
      of_format[number] = bucket.num_chunks
    return counts

  @property
  def _sizes(self) -> list[int]:
    """Words of each format, then of the scalars."""
    sizes = []
    for chunk_format, counts in self.counts.items():
      num_chunks = sum(counts.values())
      sizes.append(chunk_format.words(num_chunks))
    return [*sizes, self.num_scalars]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array of words: rows, if all readers read the same."""
    words = sum(self._sizes)
    if self.readers:
      return *self.readers, words
    return -(-words // ROW), ROW

  @property
  def num_bytes(self) -> int:
    """Bytes of all words."""
    return 4 * math.prod(self.shape)

  def encode(
    self,
    selected: Mapping[int, Selected] | Sequence[Selected],
  ) -> tuple[list[Array], dict[int, Array]]:
    """Writes the selections `[rows, k]` of all buckets, by number.

    Returns the words of each format, uint32 `[*readers, words]`; and for each
    bucket the values `[*readers, chunks, k]` that readers decode.
    """
    packed = []
    decoded: dict[int, Array] = {}
    for chunk_format, counts in self.counts.items():
      parts = []  # [*readers, chunks, k] of each bucket
      for number in counts:
        cut = functools.partial(self._cut, self.buckets[number])
        parts.append(jax.tree.map(cut, selected[number]))
      joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-2), *parts)
      words, read = chunk_format.encode(*joined)
      packed.append(words)
      decoded |= by_bucket(read, counts, axis=-2)
    return packed, decoded

  def _cut(
    self,
    bucket: Bucket,
    x: Array,
  ) -> Array:
    """Cuts `[rows, k]` to what is sent, `[*readers, chunks, k]`.

    Readers with fewer chunks get some that fill theirs.
    """
    rows = math.prod(self.readers) * bucket.num_chunks
    cut = with_rows(x, rows)
    return cut.reshape(*self.readers, -1, bucket.format.k)

  def join(
    self,
    packed: Sequence[Array],
    scalars: Array,
  ) -> Array:
    """Returns all words, with float32 scalars after those of `encode`."""
    end = lax.bitcast_convert_type(scalars, jnp.uint32)
    end = jnp.broadcast_to(end, (*self.readers, *end.shape))
    words = jnp.concatenate([*packed, end], axis=-1)  # [*readers, words]
    if self.readers:
      return words
    padded = plain.pad_to(words, math.prod(self.shape))
    return padded.reshape(self.shape)

  def decode(
    self,
    words: Array,
  ) -> tuple[dict[int, Selected], list[Array], Array]:
    """Reads the words of several senders, uint32 `[senders, ...]`.

    Returns selections `[senders, chunks, k]` by bucket number; for each format
    whose chunks are sound, bool `[senders]`; and float32 `[senders, scalars]`.
    """
    flat = words.reshape(len(words), -1)
    ends = np.cumsum(self._sizes)
    *parts, end, _ = jnp.split(flat, ends, axis=1)
    all_sound = []
    selections = {}
    for part, (chunk_format, counts) in zip(parts, self.counts.items()):
      num_chunks = sum(counts.values())
      # [senders, chunks, k] of all buckets together
      indices, values, sound = chunk_format.decode(part, num_chunks)
      all_sound.append(sound)
      places = {}
      if indices is not None:
        places = by_bucket(indices, counts, axis=-2)
      for number, own in by_bucket(values, counts, axis=-2).items():
        own_places = places.get(number)
        selections[number] = Selected(own_places, own)
    scalars = lax.bitcast_convert_type(end, jnp.float32)
    return selections, all_sound, scalars


@dataclasses.dataclass(frozen=True)
class Packer:
  """Packs selections from all buckets into messages, and unpacks them."""

  buckets: tuple[Bucket, ...]
  num_owners: int | None = None  # workers that share the chunks, if they do
  weighted: bool = False  # whether workers have weights

  @property
  def name(self) -> str:
    """Name of the words in a message."""
    return TO_OWNERS if self.num_owners else GATHERED

  @functools.cached_property
  def read(self) -> tuple[Bucket, ...]:
    """The part of each bucket that one worker reads."""
    parts = []
    for bucket in self.buckets:
      if self.num_owners and not bucket.format.summed:
        bucket = bucket.share(self.num_owners)
      parts.append(bucket)
    return tuple(parts)

  @functools.cached_property
  def words(self) -> Words:
    """What is not summed."""
    written = {}
    for number, bucket in enumerate(self.read):
      if not bucket.format.summed:
        written[number] = bucket
    readers = (self.num_owners,) if self.num_owners else ()
    num_scalars = END_WORDS + self.weighted
    return Words(written, num_scalars, readers)

  @functools.cached_property
  def summed(self) -> dict[str, dict[int, int]]:
    """How many values are summed of each bucket: by dtype, then by number."""
    counts: dict[str, dict[int, int]] = {}
    for number, bucket in enumerate(self.buckets):
      if bucket.format.summed:
        of_dtype = counts.setdefault(bucket.format.dtype, {})
        of_dtype[number] = bucket.num_chunks * bucket.format.k
    return counts

  @property
  def num_bytes(self) -> tuple[int, int]:
    """Bytes of one device's words, and of its summands."""
    words = summed = 0
    if self.words.buckets:
      words = self.words.num_bytes
    for dtype, counts in self.summed.items():
      length = sum(counts.values()) + self.words.num_scalars
      summed += length * np.dtype(dtype).itemsize
    return words, summed

  def pack(
    self,
    selected: Sequence[Selected],
    momentum: Mapping[str, Array],
    alpha: Array,
    valid: Array,
    weight: Array | None = None,
  ) -> tuple[Message, list[Array]]:
    """Writes one device's message; `alpha`, `valid`, `weight` are scalars.

    Takes `momentum [rows, n]` by bucket name, to measure it. Returns the
    message, and for each bucket the values `[rows, k]` that receivers decode.
    """
    sent = [selection.values for selection in selected]
    packed, decoded = self.words.encode(selected)
    for number, values in decoded.items():
      bucket = self.buckets[number]
      flat = values.reshape(-1, bucket.format.k)
      sent[number] = with_rows(flat, bucket.rows)
    status = valid.astype(jnp.float32)[None]
    energies = self._energies(selected, sent, momentum, alpha)
    scalars = [status, energies]
    if weight is not None:
      scalars.append(weight[None])
    end = jnp.concatenate(scalars)  # float32 [scalars]

    message = {}
    if packed:
      message[self.name] = self.words.join(packed, end)
    for dtype, counts in self.summed.items():
      vectors = []
      for number in counts:
        bucket = self.buckets[number]
        chunks = with_rows(sent[number], bucket.num_chunks)
        vector = chunks.reshape(-1)
        if weight is not None:
          vector = rounding.mul_no_fma(weight, vector)
        vectors.append(vector)
      joined = jnp.concatenate([*vectors, end.astype(dtype)])
      message[SUMMED + dtype] = jnp.where(valid, joined, 0)
    return message, sent

  def _energies(
    self,
    selected: Sequence[Selected],
    sent: list[Array],
    momentum: Mapping[str, Array],
    alpha: Array,
  ) -> Array:
    """Returns float32 `[ENERGIES]`: of momentum, its sent part, the rest.

    Makes `sent` depend on them: momentum is read before these are subtracted in
    place. XLA would otherwise copy it. What is beyond float32 counts as zero.
    """
    total = jnp.zeros((ENERGIES,), jnp.float32)
    for number, bucket in enumerate(self.buckets):
      if bucket.name not in momentum:
        continue
      held = energy(momentum[bucket.name])
      values = selected[number].values
      leaving = rounding.mul_no_fma(alpha, sent[number])
      stays = energy(values - leaving)
      if bucket.format.k < bucket.format.n:
        stays += jnp.maximum(held - energy(values), 0)
      energies = jnp.stack([held, energy(sent[number]), stays])
      # No energy is negative, also if it is beyond float32 (infinite or NaN).
      never = jnp.sum(energies) < 0
      sent[number] = rounding.after(sent[number], never)
      total += energies
    return jnp.where(jnp.isfinite(total), total, 0)

  def unpack(
    self,
    arrived: Message,
    group: Group,
  ) -> tuple[dict[int, Received], Report]:
    """Reads all workers' messages, uint32 `[workers, ...]`, and their sums.

    The selections are by bucket number.
    """
    received = {}
    report = Report(None, jnp.zeros((ENERGIES,), jnp.float32))
    for dtype, counts in self.summed.items():
      sums = arrived[SUMMED + dtype]
      num_values = sum(counts.values())
      total, end = jnp.split(sums, [num_values])
      num_valid = jnp.round(end[0]).astype(jnp.int32)
      num_valid = group.over_devices(lax.pmin, num_valid)
      of_all = end[-1] if self.weighted else num_valid
      share = rounding.share(1, of_all, total.dtype)
      mean = rounding.mul_no_fma(share, total)
      for number, part in by_bucket(mean, counts, axis=0).items():
        bucket = self.buckets[number]
        chunks = part.reshape(1, -1, bucket.format.k)  # [1, chunks, k]
        values = with_rows(chunks, bucket.rows)
        is_valid = num_valid[None] > 0  # bool [1]
        received[number] = Received(None, values, is_valid)
      energies = end[1:END_WORDS].astype(jnp.float32)
      report = Report(num_valid, energies)
    if self.words.buckets:
      selections, report = self._read_words(arrived[self.name], group)
      received |= selections
    return received, report

  def _read_words(
    self,
    words: Array,
    group: Group,
  ) -> tuple[dict[int, Received], Report]:
    """Reads uint32 `[workers, ...]`; returns selections by bucket number."""
    selections, sound, scalars = self.words.decode(words)
    status = scalars[:, 0]
    good = [*sound, status == 1]
    weights = None
    if self.weighted:
      weights = scalars[:, END_WORDS]
      good.append(is_weight(weights))
    # A damaged message may have reached only one device of a worker.
    valid = group.all_devices(plain.every(good))
    received = {}
    for number, selection in selections.items():
      bucket = self.read[number]
      fill = functools.partial(with_rows, rows=bucket.rows)
      indices, values = jax.tree.map(fill, selection)
      received[number] = Received(indices, values, valid, weights)
    energies = scalars[:, 1:END_WORDS]  # [workers, ENERGIES]
    counted = valid[:, None] & jnp.isfinite(energies)
    total = jnp.sum(jnp.where(counted, energies, 0), axis=0)
    num_valid = jnp.sum(valid, dtype=jnp.int32)
    return received, Report(num_valid, total)


def is_weight(x: Array) -> Array:
  """Returns which numbers are weights that count; NaN does not."""
  return (x >= 1 / MAX_WEIGHT) & (x <= MAX_WEIGHT)


def energy(x: Array) -> Array:
  """Returns the sum of squares of `[rows, ...]`, float32 `[]`.

  An estimate by a part of many rows: a metric is not worth a pass over memory.
  """
  part = x
  if len(x) >= 2 * _SAMPLE:
    # By steps of the golden ratio: no period of the rows is in step with them.
    places = np.arange(_SAMPLE) * _GOLDEN % 1 * len(x)
    rows = np.unique(places.astype(np.int32))
    part = x.at[rows].get(
      indices_are_sorted=True,
      unique_indices=True,
      mode='promise_in_bounds',
      wrap_negative_indices=False,
    )
  total = jnp.sum(jnp.square(part), dtype=jnp.float32)
  return total * (len(x) / len(part))


def by_bucket(
  x: Array,
  counts: Mapping[int, int],
  axis: int,
) -> dict[int, Array]:
  """Cuts an array into consecutive parts with these lengths, by number."""
  ends = np.cumsum([*counts.values()])
  parts = jnp.split(x, ends[:-1], axis)
  return dict(zip(counts, parts))
