"""Updates that owners of chunks broadcast.

Every worker owns a share of the chunks. It merges what all workers selected
from them, inverts the transform, and broadcasts one array of `Words`: for every
bucket the values of its chunks, [chunks, n], by a value code; then float32: how
many workers are valid, the energies of all messages, and for every bucket how
many different coefficients were sent.

The owner keeps the code's losses and adds them to its next update.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from demo_optax.codes.format import ChunkFormat
from demo_optax.codes.value_codes import WITHOUT_RESIDUAL
from demo_optax.compressors.layout import Bucket
from demo_optax.exchange.message import END_WORDS, Report, Selected, Words
from demo_optax.numerics import plain
from demo_optax.workers import Group


@dataclasses.dataclass(frozen=True)
class UpdatePacker:
  """Packs updates for one owner's chunks, and unpacks those from all owners."""

  buckets: Mapping[int, Bucket]  # by number, as one owner has them
  update_values: str  # the value code, one of UPDATE_VALUES

  @functools.cached_property
  def words(self) -> Words:
    """What one owner writes."""
    shares = {}
    for number, share in self.buckets.items():
      n = share.format.n
      dtype = share.format.dtype
      everything = ChunkFormat(n, n, dtype, self.update_values)
      shares[number] = dataclasses.replace(share, format=everything)
    num_scalars = END_WORDS + len(shares)
    return Words(shares, num_scalars)

  @property
  def residuals(self) -> dict[str, jax.ShapeDtypeStruct]:
    """An owner's residuals by bucket name, as shapes and dtypes."""
    if self.update_values in WITHOUT_RESIDUAL:
      return {}
    residuals = {}
    for share in self.buckets.values():
      if share.error_feedback:  # else the next updates have other places
        shape = share.num_chunks, share.format.n
        dtype = share.format.dtype
        residuals[share.name] = jax.ShapeDtypeStruct(shape, dtype)
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
    written = {}
    for number, share in self.buckets.items():
      rows = updates[number]
      update = rows[: share.num_chunks]
      if share.name in residuals:
        corrected = update + residuals[share.name]
        zeros = jnp.zeros_like(update)
        update = jnp.where(someone, corrected, zeros)
      written[number] = Selected(None, update)
    packed, decoded = self.words.encode(written)
    kept = {}
    for number, share in self.buckets.items():
      if share.name in residuals:
        lost = written[number].values - decoded[number]
        former = residuals[share.name]
        kept[share.name] = jnp.where(someone, lost, former)
    count = report.num_valid.astype(jnp.float32)[None]
    distinct = jnp.stack([report.distinct[number] for number in written])
    scalars = jnp.concatenate([count, report.energies, distinct])
    words = self.words.join(packed, scalars)
    return words, kept

  def unpack(
    self,
    words: Array,
    distinct: Sequence[Array],
    group: Group,
  ) -> tuple[dict[int, Array], Report]:
    """Reads all owners' messages, uint32 `[owners, rows, ROW]`.

    Returns the updates in each bucket, `[chunks of all owners, n]`, and the
    combined report, with `distinct` for what is summed.
    """
    selections, sound, scalars = self.words.decode(words)
    # An owner that received a damaged message counts fewer workers than others.
    num_valid = jnp.min(scalars[:, 0]).astype(jnp.int32)
    num_valid = group.over_devices(lax.pmin, num_valid)
    good = plain.every(sound) & (num_valid > 0)  # [owners]
    totals = jnp.sum(scalars[:, END_WORDS:], axis=0)  # by bucket
    updates = {}
    all_distinct = list(distinct)
    for number, total in zip(self.buckets, totals):
      values = selections[number].values  # [owners, chunks, n]
      values = jnp.where(good[:, None, None], values, 0)
      updates[number] = lax.collapse(values, 0, 2)
      all_distinct[number] = total
    energies = jnp.max(scalars[:, 1:END_WORDS], axis=0)
    return updates, Report(num_valid, energies, all_distinct)
