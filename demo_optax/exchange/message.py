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
    status      a word, 1 if the worker is valid in this exchange, else 0
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
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from demo_optax.codes.format import ChunkFormat
from demo_optax.compressors.layout import Bucket
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

  # int32 [rows, k], ascending; None if k is n, or all workers select the same.
  indices: Array | None
  values: Array  # [rows, k]
  energy: Array  # float32 [], the sum of squares of all that momentum holds


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
  # Of each bucket float32 [], different coefficients; known once merged.
  distinct: Sequence[Array] = ()


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

  @property
  def _owners(self) -> tuple[int, ...]:
    """The axis of owners that arrays in a message have, if any."""
    return (self.num_owners,) if self.num_owners else ()

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
  def gathered(self) -> dict[ChunkFormat, list[int]]:
    """Numbers of the buckets of each format, which are packed together."""
    members: dict[ChunkFormat, list[int]] = {}
    for number, bucket in enumerate(self.read):
      if not bucket.format.summed:
        members.setdefault(bucket.sent_format, []).append(number)
    return members

  @functools.cached_property
  def summed(self) -> dict[str, list[int]]:
    """Numbers of the buckets of each dtype that are summed."""
    members: dict[str, list[int]] = {}
    for number, bucket in enumerate(self.read):
      if bucket.format.summed:
        members.setdefault(bucket.format.dtype, []).append(number)
    return members

  def _chunks(self, members: Sequence[int]) -> list[int]:
    """Chunks that are sent of each bucket."""
    return [self.read[number].sent_chunks for number in members]

  @property
  def _words(self) -> list[int]:
    """Words of the buckets of each format."""
    sizes = []
    for chunk_format, members in self.gathered.items():
      sizes.append(chunk_format.words(sum(self._chunks(members))))
    return sizes

  @property
  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays in the message of one device."""
    end = END_WORDS + self.weighted
    arrays = {}
    if self.gathered:
      words = sum(self._words) + end
      shape: tuple[int, ...] = -(-words // ROW), ROW
      if self.num_owners:
        shape = self.num_owners, words
      arrays[self.name] = jax.ShapeDtypeStruct(shape, jnp.uint32)
    for dtype, members in self.summed.items():
      length = sum(self.read[number].num_sent for number in members) + end
      arrays[SUMMED + dtype] = jax.ShapeDtypeStruct((length,), dtype)
    return arrays

  # Packing --------------------------------------------------------------------

  def pack(
    self,
    selected: Sequence[Selected],
    alpha: Array,
    valid: Array,
    weight: Array | None = None,
  ) -> tuple[Message, list[Array]]:
    """Writes one device's message; `alpha`, `valid`, `weight` are scalars.

    Returns the message, and for each bucket the values `[rows, k]` that
    receivers decode.
    """
    sent = [selection.values for selection in selected]
    own_weight = [] if weight is None else [weight[None]]  # float32 [1]
    message = {}
    if self.gathered:
      packed = []
      for chunk_format, members in self.gathered.items():
        words, decoded = self._encode(chunk_format, members, selected)
        packed.append(words)
        for number, values in zip(members, decoded):
          sent[number] = values
      gathered = list(itertools.chain(*self.gathered.values()))
      energies = self._energies(gathered, selected, sent, alpha)
      scalars = jnp.concatenate([energies, *own_weight])
      message[self.name] = self._join_words(packed, valid, scalars)
    for dtype, members in self.summed.items():
      energies = self._energies(members, selected, sent, alpha)
      energies = jnp.where(jnp.isfinite(energies), energies, 0)
      one = jnp.ones((1,), dtype)
      vectors = []
      for number in members:
        vectors.append(self.buckets[number].strip(sent[number]).reshape(-1))
      if weight is not None:
        vectors = [rounding.mul_no_fma(weight, vector) for vector in vectors]
      scalars = jnp.concatenate([energies, *own_weight]).astype(dtype)
      vector = jnp.concatenate([*vectors, one, scalars])
      message[SUMMED + dtype] = jnp.where(valid, vector, 0)
    return message, sent

  def _encode(
    self,
    chunk_format: ChunkFormat,
    members: Sequence[int],
    selected: Sequence[Selected],
  ) -> tuple[Array, list[Array]]:
    """Writes all buckets of one format as uint32 `[*owners, words]`.

    Returns also the values `[rows, k]` that receivers decode of each.
    """
    all_values, all_indices = [], []  # [*owners, chunks, k] of each bucket
    for number in members:
      bucket, (indices, values, _) = self.read[number], selected[number]
      all_values.append(bucket.strip(values, *self._owners))
      if indices is not None:
        all_indices.append(bucket.strip(indices, *self._owners))
    joined = None
    if all_indices:
      joined = jnp.concatenate(all_indices, axis=-2)
    values = jnp.concatenate(all_values, axis=-2)
    words, decoded = chunk_format.encode(joined, values)
    sent = []
    parts = split(decoded, self._chunks(members), axis=-2)
    for number, part in zip(members, parts):
      bucket = self.buckets[number]
      without_padding = part.reshape(1, -1)[:, : bucket.rows * bucket.format.k]
      sent.append(bucket.unstrip(without_padding)[0])
    return words, sent

  def _join_words(
    self,
    packed: Sequence[Array],
    valid: Array,
    scalars: Array,
  ) -> Array:
    """Joins the words of all formats, the status and float32 `scalars`."""
    bits = lax.bitcast_convert_type(scalars, jnp.uint32)
    end = jnp.concatenate([valid.astype(jnp.uint32)[None], bits])
    end = jnp.broadcast_to(end, (*self._owners, *end.shape))
    words = jnp.concatenate([*packed, end], axis=-1)  # [*owners, words]
    return words if self.num_owners else as_rows(words)

  def _energies(
    self,
    members: Sequence[int],
    selected: Sequence[Selected],
    sent: list[Array],
    alpha: Array,
  ) -> Array:
    """Returns float32 `[ENERGIES]`: of momentum, its sent part, the rest.

    Makes `sent` depend on them: momentum is read before these are subtracted in
    place. XLA would otherwise copy it.
    """
    total = jnp.zeros((ENERGIES,), jnp.float32)
    for number in members:
      if not self.buckets[number].error_feedback:
        continue
      _, values, held = selected[number]
      chunk_format = self.buckets[number].format
      stays = energy(values - rounding.mul_no_fma(alpha, sent[number]))
      if chunk_format.k < chunk_format.n:
        stays += jnp.maximum(held - energy(values), 0)
      energies = jnp.stack([held, energy(sent[number]), stays])
      # No energy is negative, also if it is beyond float32 (infinite or NaN).
      sent[number] = rounding.after(sent[number], jnp.sum(energies) < 0)
      total += energies
    return total

  # Unpacking ------------------------------------------------------------------

  def unpack(
    self, arrived: Message, group: Group
  ) -> tuple[list[Received], Report]:
    """Reads all workers' messages, uint32 `[workers, ...]`, and their sums."""
    received: dict[int, Received] = {}
    energies = jnp.zeros((ENERGIES,), jnp.float32)
    num_valid = None
    if self.gathered:
      words = arrived[self.name].reshape(group.size, -1)
      received, valid, sent = self._read_words(words, group)
      num_valid = jnp.sum(valid, dtype=jnp.int32)
      sent = jnp.where(valid[:, None] & jnp.isfinite(sent), sent, 0.0)
      energies += jnp.sum(sent, axis=0)
    for dtype, members in self.summed.items():
      sums = arrived[SUMMED + dtype]
      total, end = jnp.split(sums, [len(sums) - END_WORDS - self.weighted])
      count = jnp.round(end[0]).astype(jnp.int32)
      count = group.over_devices(lax.pmin, count)
      if num_valid is None:
        num_valid = count
      energies += end[1:END_WORDS].astype(jnp.float32)
      of_all = end[-1] if self.weighted else count
      share = rounding.share(1, of_all, total.dtype)
      mean = rounding.mul_no_fma(share, total)
      buckets = [self.read[number] for number in members]
      parts = split(mean, [bucket.num_sent for bucket in buckets], axis=0)
      for number, bucket, part in zip(members, buckets, parts):
        values = bucket.unstrip(part.reshape(1, -1, bucket.sent_format.k))
        received[number] = Received(None, values, count[None] > 0)
    in_order = [received[number] for number in range(len(self.buckets))]
    return in_order, Report(num_valid, energies)

  def _read_words(
    self, words: Array, group: Group
  ) -> tuple[dict[int, Received], Array, Array]:
    """Reads uint32 `[workers, words]`.

    Returns the selections by bucket number; whose messages count, bool
    `[workers]`; and the energies that they sent, `[workers, ENERGIES]`.
    """
    *parts, end = jnp.split(words, np.cumsum(self._words), axis=1)
    good = [end[:, 0] == 1]
    selections = {}
    for part, (chunk_format, members) in zip(parts, self.gathered.items()):
      counts = self._chunks(members)
      # [workers, chunks, k] of all members together
      indices, values, sound = chunk_format.decode(part, sum(counts))
      good.append(sound)
      several: Sequence[Array | None] = [None] * len(members)
      if indices is not None:
        several = split(indices, counts, axis=-2)
      of_each = zip(members, several, split(values, counts, axis=-2))
      for number, own_indices, own_values in of_each:
        bucket = self.read[number]
        first = jnp.arange(bucket.format.k, dtype=jnp.int32)
        if own_indices is not None:
          own_indices = bucket.unstrip(own_indices, first)
        selections[number] = own_indices, bucket.unstrip(own_values)
    scalars = lax.bitcast_convert_type(end[:, 1:], jnp.float32)
    energies, weights = scalars[:, :ENERGIES], None
    if self.weighted:
      weights = scalars[:, ENERGIES]
      good.append(is_weight(weights))
    # A damaged message may have reached only one device of a worker.
    valid = group.all_devices(plain.every(good))
    received = {}
    for number, selection in selections.items():
      received[number] = Received(*selection, valid, weights)
    return received, valid, energies


def is_weight(x: Array) -> Array:
  """Returns which numbers are weights that count; NaN does not."""
  return (x >= 1 / MAX_WEIGHT) & (x <= MAX_WEIGHT)


def as_rows(words: Array) -> Array:
  """Returns uint32 `[words]` as whole rows `[rows, ROW]`, filled with zeros."""
  return jnp.pad(words, [(0, -len(words) % ROW)]).reshape(-1, ROW)


def energy(x: Array) -> Array:
  """Returns the sum of squares of `[rows, ...]`, float32 `[]`.

  An estimate by a part of many rows: a metric is not worth a pass over memory.
  """
  part = x
  if len(x) >= 2 * _SAMPLE:
    # By steps of the golden ratio: no period of the rows is in step with them.
    places = np.arange(_SAMPLE) * _GOLDEN % 1 * len(x)
    part = x.at[np.unique(places.astype(np.int32))].get(
      indices_are_sorted=True,
      unique_indices=True,
      mode='promise_in_bounds',
      wrap_negative_indices=False,
    )
  total = jnp.sum(jnp.square(part), dtype=jnp.float32)
  return total * (len(x) / len(part))


def split(
  x: Array,
  sizes: Sequence[int],
  axis: int,
) -> list[Array]:
  """Cuts an array into consecutive parts."""
  return jnp.split(x, np.cumsum(sizes)[:-1], axis)
