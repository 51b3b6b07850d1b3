"""Encodes the merged updates that owners of chunks broadcast.

Every worker owns a share of the chunks. It merges the selections of all workers
from them, inverts the transform, and broadcasts one array of words of 32 bits:

    for every bucket:
      values    of the owner's chunks, [chunks, n], by a value code (`values`)
    report      float32: valid workers, the energies of all messages, and for
                every bucket the number of different coefficients sent
    zeros       up to a multiple of 512 bytes

The owner keeps the code's losses and adds them to its next update.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.codes.format import ChunkFormat
from demo_optax.codes.value_codes import WITHOUT_RESIDUAL
from demo_optax.compressors.layout import Bucket
from demo_optax.exchange.message import ENERGIES, ROW, Report, as_rows
from demo_optax.numerics import plain
from demo_optax.workers import Group


@dataclasses.dataclass(frozen=True)
class UpdatePacker:
  """Packs the updates of one owner's chunks, and unpacks those of all owners.

  Buckets with shared places have no owners and are skipped.
  """

  buckets: tuple[Bucket, ...]
  num_owners: int
  values: str  # one of UPDATE_VALUES

  @functools.cached_property
  def shares(self) -> dict[int, Bucket]:
    """By bucket number, the part that one owner writes."""
    found = {}
    for i, b in enumerate(self.buckets):
      if not b.format.shared:
        n, dtype = b.format.n, b.format.dtype
        written = ChunkFormat(n, n, dtype, self.values)
        share = b.share(self.num_owners)
        found[i] = dataclasses.replace(share, format=written)
    return found

  @property
  def _sizes(self) -> list[int]:
    """Words of the updates of each bucket, then of the report."""
    sizes = [x.format.words(x.num_chunks) for x in self.shares.values()]
    return [*sizes, 1 + ENERGIES + len(self.shares)]

  @property
  def num_bytes(self) -> int:
    """Bytes that one owner broadcasts."""
    return 4 * ROW * -(-sum(self._sizes) // ROW)

  @property
  def residuals(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of an owner's residuals, by bucket name."""
    if self.values in WITHOUT_RESIDUAL:
      return {}
    return {
      x.name: jax.ShapeDtypeStruct((x.num_chunks, x.format.n), x.format.dtype)
      for x in self.shares.values()
    }

  def pack(
    self,
    updates: Sequence[jax.Array],
    residuals: Mapping[str, jax.Array],
    report: Report,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Writes one owner's message, from updates `[rows, n]` of its chunks.

    Adds `residuals [chunks, n]`, the losses of earlier messages; empty if the
    code is exact. Returns uint32 `[rows, ROW]`, and the new residuals.
    """
    assert report.num_valid is not None
    # If every worker is excluded, apply nothing, not even a pending residual.
    someone = report.num_valid > 0
    data, kept = [], {}
    for i, share in self.shares.items():
      u = updates[i][: share.num_chunks]
      old = residuals.get(share.name)
      if old is not None:
        u = plain.where(someone, u + old, jnp.zeros_like(u))
      written, read = share.format.encode(None, u)
      data.append(written)
      if old is not None:
        kept[share.name] = plain.where(someone, u - read, old)
    numbers = jnp.concatenate(
      [
        report.num_valid.astype(jnp.float32)[None],
        report.energies,
        jnp.stack([report.distinct[i] for i in self.shares]),
      ]
    )
    numbers = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    return as_rows(jnp.concatenate([*data, numbers])), kept

  def unpack(
    self, data: jax.Array, distinct: Sequence[jax.Array], group: Group
  ) -> tuple[dict[int, jax.Array], Report]:
    """Reads all owners' messages, uint32 `[owners, rows, ROW]`.

    Returns the updates of each bucket, `[num_chunks, n]`, and the combined
    report with `distinct` of shared places.
    """
    data = data.reshape(self.num_owners, -1)
    *parts, numbers, _ = jnp.split(data, np.cumsum(self._sizes), axis=1)
    numbers = jax.lax.bitcast_convert_type(numbers, jnp.float32)
    # An owner that received a damaged message counts fewer workers than others.
    num_valid = jnp.min(numbers[:, 0]).astype(jnp.int32)
    num_valid = group.over_devices(jax.lax.pmin, num_valid)
    someone = num_valid > 0
    found = {}
    for part, (i, share) in zip(parts, self.shares.items()):
      _, values, sound = share.format.decode(part, share.num_chunks)
      values = plain.where(sound[:, None, None] & someone, values, 0)
      values = values.reshape(-1, share.format.n)
      found[i] = values[: self.buckets[i].num_chunks]
    totals = jnp.sum(numbers[:, 1 + ENERGIES :], axis=0)
    all_distinct = list(distinct)
    for (i, share), total in zip(self.shares.items(), totals):
      # Padding chunks of owners count as sent; remove them.
      padding = self.num_owners * share.num_chunks - self.buckets[i].num_chunks
      padding *= self.buckets[i].format.k
      all_distinct[i] = total - padding * someone.astype(jnp.float32)
    energies = jnp.max(numbers[:, 1 : 1 + ENERGIES], axis=0)
    return found, Report(num_valid, energies, all_distinct)
