"""Encodes the merged updates that owners of chunks broadcast.

Every worker owns a share of the chunks. It merges what all workers selected
from them, inverts the transform, and broadcasts one uint32 array:

    for every bucket:
      values    of the owner's chunks, [chunks, n], by a value code (`values`);
                [chunks, k] of the places that all workers select
    report      float32: valid workers, the energies of all messages, and for
                every bucket how many different coefficients were sent
    zeros       up to a multiple of 512 bytes

The owner keeps the code's losses and adds them to its next update.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from demo_optax.codes.format import ChunkFormat
from demo_optax.codes.value_codes import WITHOUT_RESIDUAL
from demo_optax.compressors.layout import Bucket
from demo_optax.exchange.message import ENERGIES, ROW, Report, as_rows
from demo_optax.workers import Group


@dataclasses.dataclass(frozen=True)
class UpdatePacker:
  """Packs updates for one owner's chunks, and unpacks those from all owners.

  Buckets whose values are summed have no owners and are skipped. Where all
  workers select the same places, updates of these alone are written.
  """

  buckets: tuple[Bucket, ...]
  num_owners: int
  values: str  # one of UPDATE_VALUES

  @functools.cached_property
  def shares(self) -> dict[int, Bucket]:
    """By bucket number, the part that one owner writes."""
    shares = {}
    for number, bucket in enumerate(self.buckets):
      if bucket.format.summed:
        continue
      # Of a chunk after merging, without places that no worker selects.
      size = bucket.format.k if bucket.format.shared else bucket.format.n
      everything = ChunkFormat(size, size, bucket.format.dtype, self.values)
      share = bucket.share(self.num_owners)
      shares[number] = dataclasses.replace(share, format=everything)
    return shares

  @property
  def _sizes(self) -> list[int]:
    """Words for the updates in each bucket, then for the report."""
    sizes = []
    for share in self.shares.values():
      sizes.append(share.format.words(share.num_chunks))
    return [*sizes, 1 + ENERGIES + len(self.shares)]

  @property
  def num_bytes(self) -> int:
    """Bytes that one owner broadcasts."""
    return 4 * ROW * -(-sum(self._sizes) // ROW)

  @property
  def residuals(self) -> dict[str, jax.ShapeDtypeStruct]:
    """An owner's residuals by bucket name, as shapes and dtypes."""
    residuals = {}
    if self.values not in WITHOUT_RESIDUAL:
      for number, share in self.shares.items():
        if self.buckets[number].format.shared:
          continue  # the next updates have other places
        shape = share.num_chunks, share.format.n
        residuals[share.name] = jax.ShapeDtypeStruct(shape, share.format.dtype)
    return residuals

  def pack(
    self,
    updates: Sequence[Array],
    residuals: Mapping[str, Array],
    report: Report,
  ) -> tuple[Array, dict[str, Array]]:
    """Writes one owner's message, from updates `[rows, n]` for its chunks.

    Adds `residuals [chunks, n]`, what earlier messages lost; empty if the code
    is exact. Returns uint32 `[rows, ROW]`, and the new residuals.
    """
    assert report.num_valid is not None
    # If every worker is excluded, apply nothing, not even a pending residual.
    someone = report.num_valid > 0
    packed, kept = [], {}
    for number, share in self.shares.items():
      update = updates[number][: share.num_chunks]
      old = residuals.get(share.name)
      if old is not None:
        zeros = jnp.zeros_like(update)
        update = jnp.where(someone, update + old, zeros)
      words, decoded = share.format.encode(None, update)
      packed.append(words)
      if old is not None:
        kept[share.name] = jnp.where(someone, update - decoded, old)
    count = report.num_valid.astype(jnp.float32)[None]
    distinct = jnp.stack([report.distinct[number] for number in self.shares])
    scalars = jnp.concatenate([count, report.energies, distinct])
    end = lax.bitcast_convert_type(scalars, jnp.uint32)
    return as_rows(jnp.concatenate([*packed, end])), kept

  def unpack(
    self,
    data: Array,
    distinct: Sequence[Array],
    group: Group,
  ) -> tuple[dict[int, Array], Report]:
    """Reads all owners' messages, uint32 `[owners, rows, ROW]`.

    Returns the updates in each bucket, `[num_chunks, n]`, and the combined
    report, with `distinct` for shared places.
    """
    words = data.reshape(self.num_owners, -1)
    *parts, end, _ = jnp.split(words, np.cumsum(self._sizes), axis=1)
    scalars = lax.bitcast_convert_type(end, jnp.float32)  # [owners, ...]
    # An owner that received a damaged message counts fewer workers than others.
    num_valid = jnp.min(scalars[:, 0]).astype(jnp.int32)
    num_valid = group.over_devices(lax.pmin, num_valid)
    someone = num_valid > 0
    updates = {}
    for part, (number, share) in zip(parts, self.shares.items()):
      # [owners, chunks, n]
      _, values, sound = share.format.decode(part, share.num_chunks)
      values = jnp.where(sound[:, None, None] & someone, values, 0)
      chunks = values.reshape(-1, share.format.n)  # [owners * chunks, n]
      updates[number] = chunks[: self.buckets[number].num_chunks]
    totals = jnp.sum(scalars[:, 1 + ENERGIES :], axis=0)
    all_distinct = list(distinct)
    for (number, share), total in zip(self.shares.items(), totals):
      bucket = self.buckets[number]
      # Padding chunks of owners count as sent; remove them.
      padding = self.num_owners * share.num_chunks - bucket.num_chunks
      padding *= bucket.format.k
      all_distinct[number] = total - padding * someone.astype(jnp.float32)
    energies = jnp.max(scalars[:, 1 : 1 + ENERGIES], axis=0)
    return updates, Report(num_valid, energies, all_distinct)
