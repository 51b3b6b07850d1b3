"""Payloads: what the workers selected, as bytes, and back.

A payload is one uint8 vector whose size is fixed by shapes alone:

    for every group of chunks that share (n, k, dtype, value code):
      values    of all its chunks, [chunks, k], by the value code:
                  float32, bfloat16: 4 (float64: 8) or 2 bytes each
                  int8, int4, sign: 8, 4 or 1 bits each, packed; then a
                  bfloat16 scale per chunk, 2 bytes each
      indices   of all its chunks, [chunks, k] ascending, packed, by whichever
                  index code takes the fewest bits; none where k == n
    status      1 if the worker takes part in this exchange, else 0

Leaves whose chunks are alike share a group, so the number of operations grows
with the kinds of chunks and not with the number of leaves.

A worker of several devices has one such vector for every set of mesh axes that
leaves are sharded over, since they differ in which devices hold which bytes.

Whatever the bytes, reading them is safe: a worker whose indices do not ascend
within the chunk or whose values are beyond `ChunkFormat.limit` takes no part.
All workers see the same bytes and so agree on who that is; if a worker is
several devices, the bytes of each are judged by themselves.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax import index_codes, packing, paths, value_codes

STATUS_BYTES = 1

Axes = tuple[str, ...]
Selection = tuple[jax.Array, jax.Array]  # indices and values


@dataclasses.dataclass(frozen=True)
class ChunkFormat:
  """How the selection from one kind of chunk is written.

  Attributes:
    n: number of coefficients in a chunk.
    k: number of coefficients sent of each.
    dtype: name of the dtype of the coefficients.
    values: name of the value code, one of `value_codes.VALUES`.
  """

  n: int
  k: int
  dtype: str
  values: str = 'float32'

  @property
  def index_code(self) -> index_codes.IndexCode:
    """How the indices are written."""
    return index_codes.cheapest(self.n, self.k)

  @property
  def value_code(self) -> value_codes.ValueCode:
    """How the values are written."""
    return value_codes.value_code(self.values, self.dtype)

  @property
  def limit(self) -> float:
    """Largest magnitude that is read: no transform of such chunks overflows.

    `2**127 / n`, n rounded up to a power of two (`2**1023 / n` for float64). At
    most half of it is sent at once, which leaves room for a code's rounding.
    """
    exponent = jnp.finfo(self.dtype).maxexp - 1
    return 2.0 ** (exponent - (self.n - 1).bit_length())

  def value_bytes(self, chunks: int) -> int:
    """Bytes that the values of so many chunks take."""
    return self.value_code.num_bytes(chunks, self.k)

  def index_bytes(self, chunks: int) -> int:
    """Bytes that the indices of so many chunks take."""
    return packing.packed_size(chunks, self.index_code.bits)

  def num_bytes(self, chunks: int) -> int:
    """Bytes that so many chunks take in a payload."""
    return self.value_bytes(chunks) + self.index_bytes(chunks)

  def encode(
      self, indices: jax.Array, values: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Writes a selection.

    Args:
      indices: int32 `[chunks, k]`, ascending within a chunk.
      values: `[chunks, k]`.

    Returns:
      uint8 `[num_bytes]`, and `[chunks, k]`, the values as they will be read.
    """
    most = self.limit / 2
    data, sent = self.value_code.encode(jnp.clip(values, -most, most))
    return jnp.concatenate([data, self.index_code.encode(indices)]), sent

  def decode(
      self, data: jax.Array, chunks: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Undoes `encode` for uint8 `[workers, num_bytes]`.

    Returns:
      int32 indices `[workers, chunks, k]`, ascending within `[0, n)` whatever
      the bytes; values `[workers, chunks, k]`; and bool `[workers]`, whose
      bytes are a selection with values up to `limit`.
    """
    if paths.one_payload_at_a_time():
      return jax.lax.map(lambda row: self._decode_one(row, chunks), data)
    return jax.vmap(lambda row: self._decode_one(row, chunks))(data)

  def _decode_one(
      self, data: jax.Array, chunks: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    split = self.value_bytes(chunks)
    (values,) = self.value_code.decode(data[None, :split], chunks, self.k)
    (indices,) = self.index_code.decode(data[None, split:], chunks)
    ascending = jnp.all(indices[:, 1:] > indices[:, :-1])
    inside = (indices[:, 0] >= 0) & (indices[:, -1] < self.n)
    sound = ascending & jnp.all(inside)
    # What scatters are promised about indices holds even of garbage.
    first = jnp.arange(self.k, dtype=jnp.int32)[None]
    indices = jnp.where(sound, indices, first)
    moderate = jnp.all(jnp.abs(values) <= self.limit)  # no NaN
    return indices, values, sound & moderate


class Layout:
  """Where each leaf's chunks lie in a payload.

  Args:
    leaves: for every leaf, the format of its chunks and their number.

  >>> layout = Layout([(ChunkFormat(4096, 32, 'float32'), 100)])
  >>> layout.num_bytes  # 100 * (32 * 4 bytes + 287 bits), and the status
  16389
  """

  def __init__(self, leaves: Sequence[tuple[ChunkFormat, int]]):
    self.leaves = tuple(leaves)
    self.groups: dict[ChunkFormat, list[int]] = {}
    for leaf, (chunk_format, _) in enumerate(self.leaves):
      self.groups.setdefault(chunk_format, []).append(leaf)

  def group_chunks(self, chunk_format: ChunkFormat) -> int:
    """Number of chunks in a group."""
    return sum(self.leaves[leaf][1] for leaf in self.groups[chunk_format])

  @property
  def num_bytes(self) -> int:
    """Size of a payload in bytes."""
    return STATUS_BYTES + sum(
        group.num_bytes(self.group_chunks(group)) for group in self.groups
    )

  def encode(
      self, selections: Sequence[Selection], present: jax.Array
  ) -> tuple[jax.Array, list[jax.Array]]:
    """One worker's payload.

    Args:
      selections: per leaf `(indices, values)`, both `[chunks, k]`, indices
        ascending within a chunk.
      present: bool `[]`, whether the worker takes part.

    Returns:
      uint8 `[num_bytes]`, and per leaf `[chunks, k]`, the values as they will
      be read by all workers.
    """
    parts: list[jax.Array] = []
    sent: dict[int, jax.Array] = {}
    for chunk_format, members in self.groups.items():
      indices, values = zip(*(selections[leaf] for leaf in members))
      data, read = chunk_format.encode(
          jnp.concatenate(indices), jnp.concatenate(values)
      )
      parts.append(data)
      sent.update(zip(members, self._split(read, members, axis=0)))
    payload = jnp.concatenate([*parts, present.astype(jnp.uint8)[None]])
    return payload, [sent[leaf] for leaf in range(len(self.leaves))]

  def decode(
      self, payloads: jax.Array
  ) -> tuple[list[Selection], jax.Array]:
    """All workers' payloads, read.

    Args:
      payloads: uint8 `[workers, num_bytes]`.

    Returns:
      per leaf `(indices, values)`, both `[workers, chunks, k]`, and bool
      `[workers]`, who takes part. Indices are distinct within a chunk whatever
      the bytes; values of workers that take no part may be anything.
    """
    selections: dict[int, Selection] = {}
    present = payloads[:, -1] == 1
    start = 0
    for chunk_format, members in self.groups.items():
      chunks = self.group_chunks(chunk_format)
      stop = start + chunk_format.num_bytes(chunks)
      indices, values, sound = chunk_format.decode(
          payloads[:, start:stop], chunks
      )
      present &= sound
      parts = zip(
          self._split(indices, members, axis=1),
          self._split(values, members, axis=1),
      )
      selections.update(zip(members, parts))
      start = stop
    return [selections[leaf] for leaf in range(len(self.leaves))], present

  def _split(
      self, array: jax.Array, members: Sequence[int], axis: int
  ) -> list[jax.Array]:
    """The parts of a group's array that are its leaves'."""
    ends = np.cumsum([self.leaves[leaf][1] for leaf in members])
    return jnp.split(array, ends[:-1], axis)


class Payload:
  """All that a device puts into an exchange: a layout per set of axes.

  Args:
    leaves: for every leaf, the format of its chunks and their number.
    axes: for every leaf, the mesh axes that it is sharded over.
  """

  def __init__(
      self, leaves: Sequence[tuple[ChunkFormat, int]], axes: Sequence[Axes]
  ):
    # What is replicated has a part in any case, for its status.
    self._members: dict[Axes, list[int]] = {(): []}
    for leaf, names in enumerate(axes):
      self._members.setdefault(names, []).append(leaf)
    self.layouts: Mapping[Axes, Layout] = {
        names: Layout([leaves[leaf] for leaf in members])
        for names, members in self._members.items()
    }
    self._num_leaves = len(leaves)

  def encode(
      self, selections: Sequence[Selection], present: jax.Array
  ) -> tuple[list[tuple[jax.Array, Axes]], list[jax.Array]]:
    """One worker's parts.

    Args:
      selections: as for `Layout.encode`.
      present: bool `[]`, whether the worker takes part.

    Returns:
      the parts, uint8 `[bytes]` and the axes they are sharded over; and per
      leaf `[chunks, k]`, the values as they will be read by all workers.
    """
    parts = []
    sent: list[Any] = [None] * self._num_leaves
    for (names, layout), members in zip(
        self.layouts.items(), self._members.values()
    ):
      own = [selections[leaf] for leaf in members]
      part, read = layout.encode(own, present)
      parts.append((part, names))
      for leaf, values in zip(members, read):
        sent[leaf] = values
    return parts, sent

  def decode(
      self, parts: Sequence[jax.Array]
  ) -> tuple[list[Selection], list[jax.Array], jax.Array]:
    """All workers' parts, read.

    Args:
      parts: for each part, uint8 `[workers, bytes]`.

    Returns:
      per leaf `(indices, values)`, both `[workers, chunks, k]`; per leaf bool
      `[workers]`, who takes part in it; and bool `[workers]`, who takes part.
    """
    selections: list[Any] = [None] * self._num_leaves
    present: list[Any] = [None] * self._num_leaves
    statuses = []
    for layout, members, part in zip(
        self.layouts.values(), self._members.values(), parts
    ):
      decoded, status = layout.decode(part)
      statuses.append(status)
      for leaf, selection in zip(members, decoded):
        selections[leaf], present[leaf] = selection, status
    return selections, present, statuses[0]
