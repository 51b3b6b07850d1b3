"""Finished updates, as bytes: what an owner of chunks tells all others.

Where every worker owns a share of the chunks, it merges what all have sent of
them and inverts the transform. What follows is one uint8 vector, of equal size
on all workers:

    for every bucket:
      values    of the owner's chunks, [chunks, n], by a value code (`values`);
                or, with `UpdateTopK`, the largest coefficients of each chunk,
                [chunks, k], and where they stand
    report      float32: valid workers, the energies of all messages, and for
                every bucket how many different coefficients were sent

What a code loses stays with the owner, and is added to its next update.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from demo_optax.codes.format import ChunkFormat
from demo_optax.codes.values import VALUES, WITHOUT_RESIDUAL
from demo_optax.compressors.layout import Bucket
from demo_optax.exchange.message import ENERGIES, Received


class Report(NamedTuple):
  """What an exchange tells about itself.

  Attributes:
    num_valid: int32 `[]`, number of valid workers; None without buckets.
    energies: float32 `[ENERGIES]`, sums over the valid workers.
    distinct: for each bucket float32 `[]`, how many different coefficients were
      sent.
  """

  num_valid: jax.Array | None
  energies: jax.Array
  distinct: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class UpdateTopK:
  """Writes the largest coefficients of each chunk of the merged update.

  What an owner does not send, and what the value code loses, it adds to its
  next update: a coefficient waits for about `n / topk` steps, undamped, in the
  units in which the momentum was sent. Leaves that are not transformed are
  written whole, and so is a chunk where that takes fewer bytes.

  Attributes:
    topk: coefficients of a chunk.
    values: how they are written: `'float32'`, `'bfloat16'`, `'int8'`, `'int4'`
      or `'sign'`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> demo_optax.plan({'w': jnp.zeros((512, 512))}, demo_optax.dct_topk(),
    ...     8, exchange='all_to_all',
    ...     update_values=demo_optax.compressors.UpdateTopK(128, 'sign'),
    ... ).update_bytes  # of all owners; 1.6 bits each would be 52,928
    8472
  """

  topk: int
  values: str = 'sign'

  def __post_init__(self) -> None:
    if isinstance(self.topk, bool) or not isinstance(self.topk, int):
      raise TypeError(
          f'topk={self.topk!r} must be a Python integer: it fixes array shapes.'
      )
    if self.topk < 1:
      raise ValueError(f'topk={self.topk} must be at least 1.')
    if self.values not in VALUES:
      raise ValueError(
          f'values={self.values!r} is not known; choose one of'
          f' {", ".join(VALUES)}.'
      )


# How owners may write updates: one of `UPDATE_VALUES`, or the largest.
UpdateValues = str | UpdateTopK


class UpdatePacker:
  """Packs the updates of one owner's chunks, and unpacks those of all.

  Args:
    buckets: the buckets of a device, by their numbers; those of which places
      are shared are not among them.
    num_owners: number of workers.
    values: how updates are written.
    select: returns the largest coefficients of update chunks `[chunks, n]`:
      indices and values `[chunks, k]`. Used by `UpdateTopK` alone.
    merge: returns the update chunks `[rows, n]` of coefficients; the same.
  """

  def __init__(
      self,
      buckets: Mapping[int, Bucket],
      num_owners: int,
      values: UpdateValues,
      select: Callable[[Bucket, jax.Array], tuple[jax.Array, jax.Array]],
      merge: Callable[[Bucket, Received], jax.Array],
  ):
    self._num_owners = num_owners
    # Coefficients of a chunk in the workers' messages.
    self._sent = {i: b.format.k for i, b in buckets.items()}
    self._buckets = {
        i: dataclasses.replace(b, format=_update_format(b, values))
        for i, b in buckets.items()
    }
    self._select, self._merge = select, merge
    self.shares = {i: b.share(num_owners) for i, b in self._buckets.items()}
    self._report_size = 1 + ENERGIES + len(self._buckets)

  @property
  def num_bytes(self) -> int:
    """Bytes that one owner tells."""
    sizes = (x.format.num_bytes(x.num_chunks) for x in self.shares.values())
    return sum(sizes) + 4 * self._report_size

  @property
  def residual_shapes(self) -> dict[str, tuple[tuple[int, int], str]]:
    """Shapes and dtypes of what an owner keeps, by the names of buckets."""
    return {
        share.name: (
            (share.num_chunks, share.format.n), share.format.dtype
        )
        for share in self.shares.values()
        if not is_exact(share.format)
    }

  def pack(
      self,
      updates: Mapping[int, jax.Array],
      residuals: Mapping[str, jax.Array],
      report: Report,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Writes one owner's bytes.

    Args:
      updates: of each bucket, `[rows, n]` of the owner's share.
      residuals: what earlier bytes have lost, `[chunks, n]` by the names of
        buckets; empty if the code is exact.
      report: of the messages that it has read.

    Returns:
      uint8 `[num_bytes]`, and the new residuals.
    """
    assert report.num_valid is not None
    # Where every worker is excluded nothing moves, not even what is owed.
    someone = report.num_valid > 0
    data, kept = [], {}
    for i, share in self.shares.items():
      u = updates[i][: share.num_chunks]
      old = residuals.get(share.name)
      if old is not None:
        u = jnp.where(someone, u + old, jnp.zeros_like(u))
      indices, values = None, u
      if share.format.k < share.format.n:
        indices, values = self._select(share, u)
      written, read = share.format.encode(indices, values)
      data.append(written)
      if old is not None:
        told = self._chunks(share, indices, read, someone)
        kept[share.name] = jnp.where(someone, u - told, old)
    numbers = jnp.concatenate([
        report.num_valid.astype(jnp.float32)[None],
        report.energies,
        jnp.stack([report.distinct[i] for i in self.shares]),
    ])
    numbers = jax.lax.bitcast_convert_type(numbers, jnp.uint8).reshape(-1)
    return jnp.concatenate([*data, numbers]), kept

  def unpack(
      self,
      data: jax.Array,
      distinct: Sequence[jax.Array],
      min_devices: Callable[[jax.Array], jax.Array],
  ) -> tuple[dict[int, jax.Array], Report]:
    """Reads the bytes of all owners.

    Args:
      data: uint8 `[owners, num_bytes]`.
      distinct: for each bucket, of shared places, passed through.
      min_devices: the minimum over the devices of this worker.

    Returns:
      the updates of each bucket, `[num_chunks, n]`; and the reports, combined.
    """
    numbers = data[:, -4 * self._report_size :].reshape(
        self._num_owners, self._report_size, 4
    )
    numbers = jax.lax.bitcast_convert_type(numbers, jnp.float32)
    # An owner to whom a damaged message came counts fewer workers than others.
    num_valid = min_devices(jnp.min(numbers[:, 0]).astype(jnp.int32))
    someone = num_valid > 0
    found, start = {}, 0
    for i, share in self.shares.items():
      bucket = self._buckets[i]
      stop = start + share.format.num_bytes(share.num_chunks)
      indices, values, sound = share.format.decode(
          data[:, start:stop], share.num_chunks
      )
      values = jnp.where(sound[:, None, None] & someone, values, 0)
      rows = (-1, share.format.k)
      values = values.reshape(rows)[: bucket.num_chunks]
      if indices is not None:
        indices = indices.reshape(rows)[: bucket.num_chunks]
      found[i] = self._chunks(bucket, indices, values, someone)
      start = stop
    totals = jnp.sum(numbers[:, 1 + ENERGIES :], axis=0)
    all_distinct = list(distinct)
    for i, total in zip(self.shares, totals):
      bucket, share = self._buckets[i], self.shares[i]
      lacking = self._num_owners * share.num_chunks - bucket.num_chunks
      # Where owners lack chunks everybody sent zeros.
      lacking *= self._sent[i]
      all_distinct[i] = total - jnp.where(someone, float(lacking), 0.0)
    energies = jnp.max(numbers[:, 1 : 1 + ENERGIES], axis=0)
    return found, Report(num_valid, energies, all_distinct)

  def _chunks(
      self,
      bucket: Bucket,
      indices: jax.Array | None,
      values: jax.Array,
      someone: jax.Array,
  ) -> jax.Array:
    """Returns the update chunks `[num_chunks, n]` that were written."""
    if indices is None:
      return values
    first = jnp.arange(bucket.format.k, dtype=jnp.int32)
    received = Received(
        bucket.unstrip(indices[None], first),
        bucket.unstrip(values[None]),
        someone[None],
    )
    return self._merge(bucket, received)[: bucket.num_chunks]


def _update_format(bucket: Bucket, values: UpdateValues) -> ChunkFormat:
  """Returns how the update of one chunk is written."""
  n, dtype = bucket.format.n, bucket.format.dtype
  if not isinstance(values, UpdateTopK):
    return ChunkFormat(n, n, dtype, values)
  whole = ChunkFormat(n, n, dtype, values.values)
  largest = ChunkFormat(n, min(values.topk, n), dtype, values.values)
  chunks = bucket.num_chunks
  cheaper = largest.num_bytes(chunks) < whole.num_bytes(chunks)
  return largest if bucket.kind == 'chunks' and cheaper else whole


def is_exact(update_format: ChunkFormat) -> bool:
  """Returns whether owners owe nothing of what they have written."""
  whole = update_format.k == update_format.n
  return whole and update_format.values in WITHOUT_RESIDUAL
