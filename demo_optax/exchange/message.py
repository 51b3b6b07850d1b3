"""Messages: selections as words of 32 bits, and back.

The size of a message depends on shapes alone. Its parts, in order:

    for every format of chunks (n, k, dtype, value code):
      values    of all its chunks, [chunks, k], by the value code:
                  float32, bfloat16: 32 (float64: 64) or 16 bits each
                  int8, int4, sign: 8, 4 or 1 bits each; then a bfloat16 scale
                  per chunk
      indices   of all its chunks, [chunks, k] in order, by the index code
                  that takes the fewest bits; absent if k == n
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

If all workers select the same indices, only values are sent and only their mean
is needed. An all-reduce sums a vector of these values, the number of valid
workers, the energies, and the weights. Values are multiplied by weights then.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
Message = Mapping[str, jax.Array]
SUMMED = 'sum_'


class Selected(NamedTuple):
  """The selection from a bucket, on one device of one worker."""

  indices: jax.Array | None  # int32 [rows, k], ascending; None if k is n
  values: jax.Array  # [rows, k]
  energy: jax.Array  # float32 [], the sum of squares of all coefficients


class Received(NamedTuple):
  """The selections of all workers from a bucket."""

  # int32 [senders, rows, k]; None if k is n, or all selected the same.
  indices: jax.Array | None
  values: jax.Array  # [senders, rows, k]; a sum is one sender's mean
  valid: jax.Array  # bool [senders], whose values count
  weights: jax.Array | None = None  # float32 [senders], if they have some


class Report(NamedTuple):
  """Counts and energies of an exchange."""

  num_valid: jax.Array | None  # int32 []; None without buckets
  energies: jax.Array  # float32 [ENERGIES], over valid workers
  # Of each bucket float32 [], different coefficients; known once merged.
  distinct: Sequence[jax.Array] = ()


@dataclasses.dataclass(frozen=True)
class Packer:
  """Packs selections from all buckets into messages, and unpacks them."""

  buckets: tuple[Bucket, ...]
  num_owners: int | None = None  # workers that share the chunks, if they do
  weighted: bool = False  # whether workers have weights

  @property
  def name(self) -> str:
    """Name of the words in a message."""
    return GATHERED if self.num_owners is None else TO_OWNERS

  @property
  def _owners(self) -> tuple[int, ...]:
    """The axis of owners that arrays in a message have, if any."""
    return () if self.num_owners is None else (self.num_owners,)

  @functools.cached_property
  def read(self) -> tuple[Bucket, ...]:
    """The part of each bucket that one worker reads."""
    if self.num_owners is None:
      return self.buckets
    owned = []
    for bucket in self.buckets:
      is_owned = not bucket.format.shared
      owned.append(bucket.share(self.num_owners) if is_owned else bucket)
    return tuple(owned)

  @functools.cached_property
  def gathered(self) -> dict[ChunkFormat, list[int]]:
    """Numbers of the buckets of each format, which are packed together."""
    found: dict[ChunkFormat, list[int]] = {}
    for number, bucket in enumerate(self.read):
      if not bucket.format.shared:
        found.setdefault(bucket.sent_format, []).append(number)
    return found

  @functools.cached_property
  def summed(self) -> dict[str, list[int]]:
    """Numbers of the buckets of each dtype that are summed."""
    found: dict[str, list[int]] = {}
    for number, bucket in enumerate(self.read):
      if bucket.format.shared:
        found.setdefault(bucket.format.dtype, []).append(number)
    return found

  def _chunks(self, numbers: Sequence[int]) -> list[int]:
    """Chunks that are sent of each bucket."""
    return [self.read[number].sent_chunks for number in numbers]

  def _sizes(self, numbers: Sequence[int]) -> list[int]:
    """Values that are sent of each bucket."""
    buckets = [self.read[number] for number in numbers]
    return [bucket.sent_chunks * bucket.sent_format.k for bucket in buckets]

  @property
  def _words(self) -> list[int]:
    """Words of the buckets of each format."""
    sizes = []
    for chunk_format, members in self.gathered.items():
      sizes.append(chunk_format.words(sum(self._chunks(members))))
    return sizes

  @property
  def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array in the message of one device."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    if self.gathered:
      words = sum(self._words) + END_WORDS + self.weighted
      rows = -(-words // ROW)
      shape = (*self._owners, words) if self._owners else (rows, ROW)
      shapes[self.name] = shape, 'uint32'
    for dtype, members in self.summed.items():
      length = sum(self._sizes(members)) + 1 + ENERGIES + self.weighted
      shapes[SUMMED + dtype] = (length,), dtype
    return shapes

  # Packing --------------------------------------------------------------------

  def pack(
    self,
    selected: Sequence[Selected],
    alpha: jax.Array,
    valid: jax.Array,
    weight: jax.Array | None = None,
  ) -> tuple[Message, list[jax.Array]]:
    """Writes one device's message; `alpha`, `valid`, `weight` are scalars.

    Returns the message, and for each bucket the values `[rows, k]` that
    receivers decode.
    """
    sent = [x.values for x in selected]  # summed values are sent unrounded
    packed: list[jax.Array] = []
    for chunk_format, members in self.gathered.items():
      words, decoded = self._encode(chunk_format, members, selected)
      packed.append(words)
      for number, values in zip(members, decoded):
        sent[number] = values

    message: dict[str, jax.Array] = {}
    own_weight = [] if weight is None else [weight[None]]  # float32 [1]
    if self.gathered:
      numbers = list(itertools.chain(*self.gathered.values()))
      energies = self._energies(numbers, selected, sent, alpha)
      numbers_at_end = jnp.concatenate([energies, *own_weight])
      bits = jax.lax.bitcast_convert_type(numbers_at_end, jnp.uint32)
      end = jnp.concatenate([valid.astype(jnp.uint32)[None], bits])
      end = jnp.broadcast_to(end, (*self._owners, *end.shape))
      words = jnp.concatenate([*packed, end], axis=-1)
      message[self.name] = words if self._owners else as_rows(words)
    for dtype, members in self.summed.items():
      energies = self._energies(members, selected, sent, alpha)
      energies = plain.where(jnp.isfinite(energies), energies, 0)
      one = jnp.ones((1,), dtype)
      vectors = [self.buckets[i].strip(sent[i]).reshape(-1) for i in members]
      if weight is not None:
        vectors = [rounding.mul_no_fma(weight, x) for x in vectors]
      numbers_at_end = jnp.concatenate([energies, *own_weight])
      vector = jnp.concatenate([*vectors, one, numbers_at_end.astype(dtype)])
      message[SUMMED + dtype] = plain.where(valid, vector, 0)
    return message, sent

  def _encode(
    self,
    chunk_format: ChunkFormat,
    members: Sequence[int],
    selected: Sequence[Selected],
  ) -> tuple[jax.Array, list[jax.Array]]:
    """Writes all buckets of one format as uint32 `[words]`.

    Returns also the values `[rows, k]` that receivers decode of each. With
    owners, words are `[owners, words]`.
    """
    stripped: list[jax.Array] = []
    indices: list[jax.Array] = []
    for number in members:
      bucket, (of_bucket, values, _) = self.read[number], selected[number]
      stripped.append(bucket.strip(values, *self._owners))
      if of_bucket is not None:
        indices.append(bucket.strip(of_bucket, *self._owners))
    words, decoded = chunk_format.encode(
      jnp.concatenate(indices, axis=-2) if indices else None,
      jnp.concatenate(stripped, axis=-2),  # [chunks, k]
    )
    sent = []
    parts = split(decoded, self._chunks(members), axis=-2)
    for number, part in zip(members, parts):
      bucket = self.buckets[number]
      flat = part.reshape(1, -1)[:, : bucket.rows * bucket.format.k]
      sent.append(bucket.unstrip(flat)[0])
    return words, sent

  def _energies(
    self,
    members: Sequence[int],
    selected: Sequence[Selected],
    sent: list[jax.Array],
    alpha: jax.Array,
  ) -> jax.Array:
    """Returns float32 `[ENERGIES]`: of momentum, its sent part, the rest.

    Makes `sent` depend on them: momentum is read before these are subtracted in
    place. XLA would otherwise copy it.
    """
    total = jnp.zeros((ENERGIES,), jnp.float32)
    for number in members:
      _, values, held = selected[number]
      chunk_format = self.buckets[number].format
      stays = energy(values - rounding.mul_no_fma(alpha, sent[number]))
      if chunk_format.k < chunk_format.n:
        stays += jnp.maximum(held - energy(values), 0)
      found = jnp.stack([held, energy(sent[number]), stays])
      # No energy is negative, also if it is beyond float32 (infinite or NaN).
      sent[number] = rounding.after(sent[number], jnp.sum(found) < 0)
      total += found
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
      sent = plain.where(valid[:, None] & jnp.isfinite(sent), sent, 0.0)
      energies += jnp.sum(sent, axis=0)
    for dtype, members in self.summed.items():
      sums = arrived[SUMMED + dtype]
      total, end = jnp.split(sums, [len(sums) - END_WORDS - self.weighted])
      count = jnp.round(end[0]).astype(jnp.int32)
      count = group.over_devices(jax.lax.pmin, count)
      if num_valid is None:
        num_valid = count
      energies += end[1:END_WORDS].astype(jnp.float32)
      share = rounding.exact_reciprocal(count, group.size, total.dtype)
      if self.weighted:
        share = rounding.reciprocal(end[-1], total.dtype)
      mean = rounding.mul_no_fma(share, total)
      parts = split(mean, self._sizes(members), axis=0)
      for number, part in zip(members, parts):
        bucket = self.read[number]
        values = bucket.unstrip(part.reshape(1, -1, bucket.sent_format.k))
        received[number] = Received(None, values, count[None] > 0)
    in_order = [received[number] for number in range(len(self.buckets))]
    return in_order, Report(num_valid, energies)

  def _read_words(
    self, words: jax.Array, group: Group
  ) -> tuple[dict[int, Received], jax.Array, jax.Array]:
    """Reads uint32 `[workers, words]`.

    Returns the selections by bucket number; whose messages count, bool
    `[workers]`; and the energies that they sent, `[workers, ENERGIES]`.
    """
    *parts, end = jnp.split(words, np.cumsum(self._words), axis=1)
    good = [end[:, 0] == 1]
    found: dict[int, tuple[jax.Array | None, jax.Array]] = {}
    for part, (chunk_format, members) in zip(parts, self.gathered.items()):
      counts = self._chunks(members)
      # [workers, chunks, k] of all members together
      indices, values, sound = chunk_format.decode(part, sum(counts))
      good.append(sound)
      several: Sequence[jax.Array | None] = [None] * len(members)
      if indices is not None:
        several = split(indices, counts, axis=-2)
      of_each = zip(members, several, split(values, counts, axis=-2))
      for number, own_indices, own_values in of_each:
        bucket = self.read[number]
        first = jnp.arange(bucket.format.k, dtype=jnp.int32)
        if own_indices is not None:
          own_indices = bucket.unstrip(own_indices, first)
        found[number] = own_indices, bucket.unstrip(own_values)
    numbers_at_end = jax.lax.bitcast_convert_type(end[:, 1:], jnp.float32)
    energies, weights = numbers_at_end[:, :ENERGIES], None
    if self.weighted:
      weights = numbers_at_end[:, ENERGIES]
      good.append(is_weight(weights))
    # A damaged message may have reached only one device of a worker.
    valid = group.all_devices(plain.every(good))
    received = {i: Received(*found[i], valid, weights) for i in found}
    return received, valid, energies


def is_weight(x: jax.Array) -> jax.Array:
  """Returns which numbers are weights that count; NaN does not."""
  return (x >= 1 / MAX_WEIGHT) & (x <= MAX_WEIGHT)


def as_rows(words: jax.Array) -> jax.Array:
  """Returns uint32 `[words]` as whole rows `[rows, ROW]`, filled with zeros."""
  return plain.pad(words, [(0, -len(words) % ROW)]).reshape(-1, ROW)


def energy(x: jax.Array) -> jax.Array:
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
  found = jnp.sum(jnp.square(part), dtype=jnp.float32)
  return found * (len(x) / len(part))


def split(x: jax.Array, sizes: Sequence[int], axis: int) -> list[jax.Array]:
  """Cuts an array into consecutive parts."""
  return jnp.split(x, np.cumsum(sizes)[:-1], axis)
