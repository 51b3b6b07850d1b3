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
workers, and the energies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
ROW = 128  # words in a row of a gathered message

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

  @property
  def name(self) -> str:
    """Name of the words in a message."""
    return GATHERED if self.num_owners is None else TO_OWNERS

  @functools.cached_property
  def read(self) -> tuple[Bucket, ...]:
    """The part of each bucket that one worker reads."""
    count = self.num_owners
    return tuple(
      b if count is None or b.format.shared else b.share(count)
      for b in self.buckets
    )

  @functools.cached_property
  def gathered(self) -> dict[ChunkFormat, list[int]]:
    """Numbers of the buckets of each format, which are packed together."""
    return self._numbers_by(False, lambda bucket: bucket.sent[0])

  @functools.cached_property
  def summed(self) -> dict[str, list[int]]:
    """Numbers of the buckets of each dtype that are summed."""
    return self._numbers_by(True, lambda bucket: bucket.format.dtype)

  def _numbers_by(
    self, shared: bool, key: Callable[[Bucket], Any]
  ) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for number, bucket in enumerate(self.read):
      if bucket.format.shared == shared:
        found.setdefault(key(bucket), []).append(number)
    return found

  def _chunks(self, numbers: Sequence[int]) -> list[int]:
    return [self.read[number].sent[1] for number in numbers]

  def _sizes(self, numbers: Sequence[int]) -> list[int]:
    """Values that are sent of each bucket."""
    sent = [self.read[number].sent for number in numbers]
    return [chunks * chunk_format.k for chunk_format, chunks in sent]

  @property
  def _words(self) -> list[int]:
    """Words of the buckets of each format."""
    formats = self.gathered.items()
    return [form.words(sum(self._chunks(members))) for form, members in formats]

  @property
  def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array in the message of one device."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    if self.gathered:
      words = sum(self._words) + END_WORDS
      shape = (-(-words // ROW), ROW)
      if self.num_owners is not None:
        shape = (self.num_owners, words)
      shapes[self.name] = shape, 'uint32'
    for dtype, members in self.summed.items():
      length = sum(self._sizes(members)) + 1 + ENERGIES
      shapes[SUMMED + dtype] = (length,), dtype
    return shapes

  def pack(
    self, selected: Sequence[Selected], alpha: jax.Array, valid: jax.Array
  ) -> tuple[Message, list[jax.Array]]:
    """Writes one device's message; `alpha` and `valid` are scalars.

    Returns the message, and for each bucket the values `[rows, k]` that
    receivers decode.
    """
    sent = [x.values for x in selected]  # summed values are sent unrounded
    packed: list[jax.Array] = []
    for chunk_format, members in self.gathered.items():
      values = [self._cut(i, selected[i].values) for i in members]
      indices = [
        self._cut(i, x)
        for i in members
        if (x := selected[i].indices) is not None
      ]
      data, read = chunk_format.encode(
        jnp.concatenate(indices, axis=-2) if indices else None,
        jnp.concatenate(values, axis=-2),
      )
      packed.append(data)
      for i, x in zip(members, _split(read, self._chunks(members))):
        sent[i] = self._join(i, x)

    def energies(members: Sequence[int]) -> jax.Array:
      """Returns float32 `[ENERGIES]`: of momentum, its sent part, the rest."""
      total = jnp.zeros((ENERGIES,), jnp.float32)
      for i in members:
        _, values, held = selected[i]
        stays = energy(values - rounding.mul_no_fma(alpha, sent[i]))
        if self.buckets[i].format.k < self.buckets[i].format.n:
          stays += jnp.maximum(held - energy(values), 0)
        total += jnp.stack([held, energy(sent[i]), stays])
      return total

    message: dict[str, jax.Array] = {}
    if self.gathered:
      held = energies([i for group in self.gathered.values() for i in group])
      held = jax.lax.bitcast_convert_type(held, jnp.uint32)
      end = jnp.concatenate([valid.astype(jnp.uint32)[None], held])
      if self.num_owners is not None:
        end = jnp.broadcast_to(end, (self.num_owners, *end.shape))
      words = jnp.concatenate([*packed, end], axis=-1)
      message[self.name] = as_rows(words) if self.num_owners is None else words
    for dtype, members in self.summed.items():
      held = energies(members)
      held = plain.where(jnp.isfinite(held), held, 0).astype(dtype)
      values = [self.buckets[i].strip(sent[i]).reshape(-1) for i in members]
      vector = jnp.concatenate([*values, jnp.ones((1,), dtype), held])
      message[SUMMED + dtype] = plain.where(valid, vector, 0)
    return message, sent

  def _cut(self, number: int, x: jax.Array) -> jax.Array:
    """Cuts `[rows, k]` into the chunks to send, `[chunks, k]` for each owner.

    Owners with fewer chunks are padded with zero chunks at indices 0..k-1.
    """
    chunk_format, chunks = self.read[number].sent
    shape: tuple[int, ...] = chunks, chunk_format.k
    if self.num_owners is not None:
      shape = self.num_owners, *shape
    x, size = x.reshape(-1), math.prod(shape)
    if size > len(x):
      fill = jnp.arange(chunk_format.k, dtype=x.dtype)
      if not jnp.issubdtype(x.dtype, jnp.integer):
        fill = jnp.zeros_like(fill)
      missing = (size - len(x)) // chunk_format.k
      x = jnp.concatenate([x, jnp.tile(fill, missing)])
    return x[:size].reshape(shape)

  def _join(self, number: int, x: jax.Array) -> jax.Array:
    """Undoes `_cut` for values; returns `[rows, k]`."""
    bucket = self.buckets[number]
    most = bucket.rows * bucket.format.k
    return bucket.unstrip(x.reshape(1, -1)[:, :most])[0]

  def unpack(
    self, arrived: Message, group: Group
  ) -> tuple[list[Received], Report]:
    """Reads all workers' messages, uint32 `[workers, ...]`, and their sums."""
    received: dict[int, Received] = {}
    energies = jnp.zeros((ENERGIES,), jnp.float32)
    num_valid = None
    if self.gathered:
      data = arrived[self.name].reshape(group.size, -1)
      found: dict[int, tuple[Any, jax.Array]] = {}
      *parts, end = jnp.split(data, np.cumsum(self._words), axis=1)
      good = [end[:, 0] == 1]
      for part, (chunk_format, members) in zip(parts, self.gathered.items()):
        counts = self._chunks(members)
        indices, values, sound = chunk_format.decode(part, sum(counts))
        good.append(sound)
        several = _split(indices, counts), _split(values, counts)
        for i, own, x in zip(members, *several):
          bucket = self.read[i]
          first = jnp.arange(bucket.format.k, dtype=jnp.int32)
          own = None if own is None else bucket.unstrip(own, first)
          found[i] = own, bucket.unstrip(x)
      stats = jax.lax.bitcast_convert_type(end[:, 1:END_WORDS], jnp.float32)
      # A damaged message may have reached only one device of a worker.
      valid = group.all_devices(plain.every(good))
      num_valid = jnp.sum(valid, dtype=jnp.int32)
      stats = plain.where(valid[:, None] & jnp.isfinite(stats), stats, 0.0)
      energies += jnp.sum(stats, axis=0)
      received |= {i: Received(*x, valid) for i, x in found.items()}
    for dtype, members in self.summed.items():
      total = arrived[SUMMED + dtype]
      total, end = jnp.split(total, [len(total) - 1 - ENERGIES])
      count = jnp.round(end[0]).astype(jnp.int32)
      count = group.over_devices(jax.lax.pmin, count)
      num_valid = count if num_valid is None else num_valid
      energies += end[1:].astype(jnp.float32)
      weight = rounding.exact_reciprocal(count, group.size, total.dtype)
      mean = rounding.mul_no_fma(weight, total)
      for i, x in zip(members, _split(mean, self._sizes(members), 0)):
        bucket = self.read[i]
        values = bucket.unstrip(x.reshape(1, -1, bucket.sent[0].k))
        received[i] = Received(None, values, count[None] > 0)
    in_order = [received[i] for i in range(len(self.buckets))]
    return in_order, Report(num_valid, energies)


def as_rows(words: jax.Array) -> jax.Array:
  """Returns uint32 `[words]` as whole rows `[rows, ROW]`, filled with zeros."""
  return plain.pad(words, [(0, -len(words) % ROW)]).reshape(-1, ROW)


def energy(x: jax.Array) -> jax.Array:
  """Returns the sum of squares, float32 `[]`."""
  return jnp.sum(jnp.square(x), dtype=jnp.float32)


def _split(x: jax.Array | None, sizes: Sequence[int], axis: int = -2) -> Any:
  """Cuts an array into consecutive parts, None into as many."""
  if x is None:
    return [None] * len(sizes)
  return jnp.split(x, np.cumsum(sizes)[:-1], axis)
