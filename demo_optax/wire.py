"""Payloads: what the workers selected, as bytes, and back.

A payload is one uint8 vector whose size is fixed by shapes alone:

    for every group of chunks that share (n, k, value dtype):
      values    of all its chunks, [chunks, k]
      indices   of all its chunks, [chunks, k], packed; none where k == n
    status      1 if the worker takes part in this exchange, else 0

Leaves whose chunks are alike share a group, so the number of operations grows
with the kinds of chunks and not with the number of leaves.

A worker of several devices has one such vector for every set of mesh axes that
leaves are sharded over, since they differ in which devices hold which bytes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

STATUS_BYTES = 1


@dataclasses.dataclass(frozen=True)
class ChunkFormat:
  """How the selection from one kind of chunk is written.

  Attributes:
    n: number of coefficients in a chunk.
    k: number of coefficients sent of each.
    dtype: name of the dtype of the coefficients and of the values sent.
  """

  n: int
  k: int
  dtype: str

  @property
  def index_bits(self) -> int:
    """Bits per index; 0 where everything is sent and no index is needed."""
    return 0 if self.k == self.n else index_width(self.n)

  def value_bytes(self, chunks: int) -> int:
    """Bytes that the values of so many chunks take."""
    return chunks * self.k * jnp.dtype(self.dtype).itemsize

  def index_bytes(self, chunks: int) -> int:
    """Bytes that the indices of so many chunks take."""
    return packed_size(chunks * self.k, self.index_bits)

  def num_bytes(self, chunks: int) -> int:
    """Bytes that so many chunks take in a payload."""
    return self.value_bytes(chunks) + self.index_bytes(chunks)

  def encode(self, indices: jax.Array, values: jax.Array) -> jax.Array:
    """`indices` and `values`, both `[chunks, k]`, as uint8 `[num_bytes]`."""
    data = jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(-1)
    packed = pack_bits(indices.reshape(-1).astype(jnp.uint32), self.index_bits)
    return jnp.concatenate([data, packed])

  def decode(self, data: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Undoes `encode` for uint8 `[workers, num_bytes]`.

    Bytes that no worker wrote give some indices within the chunk, never ones
    outside it.
    """
    workers, split = data.shape[0], self.value_bytes(chunks)
    shape = (workers, chunks, self.k)
    dtype = jnp.dtype(self.dtype)
    values = data[:, :split].reshape(*shape, dtype.itemsize)
    values = jax.lax.bitcast_convert_type(values, dtype)
    if self.k == self.n:
      indices = jnp.arange(self.n, dtype=jnp.int32)
      return jnp.broadcast_to(indices, shape), values
    indices = unpack_bits(data[:, split:], chunks * self.k, self.index_bits)
    indices = jnp.minimum(indices.astype(jnp.int32), self.n - 1)
    return indices.reshape(shape), values


class Layout:
  """Where each leaf's chunks lie in a payload.

  Args:
    leaves: for every leaf, the format of its chunks and their number.

  >>> layout = Layout([(ChunkFormat(4096, 32, 'float32'), 100)])
  >>> layout.num_bytes  # 100 * 32 * (4 bytes + 12 bits), and the status
  17601
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
      self,
      selections: Sequence[tuple[jax.Array, jax.Array]],
      present: jax.Array,
  ) -> jax.Array:
    """One worker's payload.

    Args:
      selections: per leaf `(indices, values)`, both `[chunks, k]`.
      present: bool `[]`, whether the worker takes part.

    Returns:
      uint8 `[num_bytes]`.
    """
    parts = []
    for chunk_format, members in self.groups.items():
      indices, values = zip(*(selections[leaf] for leaf in members))
      parts.append(
          chunk_format.encode(jnp.concatenate(indices), jnp.concatenate(values))
      )
    return jnp.concatenate([*parts, present.astype(jnp.uint8)[None]])

  def decode(
      self, payloads: jax.Array
  ) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """All workers' payloads, read.

    Args:
      payloads: uint8 `[workers, num_bytes]`.

    Returns:
      per leaf `(indices, values)`, both `[workers, chunks, k]`, and bool
      `[workers]`, who takes part.
    """
    selections: dict[int, tuple[jax.Array, jax.Array]] = {}
    start = 0
    for chunk_format, members in self.groups.items():
      chunks = self.group_chunks(chunk_format)
      stop = start + chunk_format.num_bytes(chunks)
      indices, values = chunk_format.decode(payloads[:, start:stop], chunks)
      first = 0
      for leaf in members:
        last = first + self.leaves[leaf][1]
        selections[leaf] = indices[:, first:last], values[:, first:last]
        first = last
      start = stop
    present = payloads[:, start] == 1
    return [selections[leaf] for leaf in range(len(self.leaves))], present


Axes = tuple[str, ...]
Selection = tuple[jax.Array, jax.Array]  # indices and values


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
  ) -> list[tuple[jax.Array, Axes]]:
    """The parts: uint8 `[bytes]`, and the axes they are sharded over."""
    return [
        (layout.encode([selections[leaf] for leaf in members], present), names)
        for (names, layout), members in zip(
            self.layouts.items(), self._members.values()
        )
    ]

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


def index_width(n: int) -> int:
  """Bits of an index into `n` places, `ceil(log2 n)`."""
  return (n - 1).bit_length()


def packed_size(count: int, width: int) -> int:
  """Bytes that `count` numbers of `width` bits take, packed."""
  return -(-count * width // 8)


def pack_bits(numbers: jax.Array, width: int) -> jax.Array:
  """Packs uint32 `[count]`, each below `2**width`, lowest bits first.

  Args:
    numbers: uint32 `[count]`.
    width: bits of each, 0 to 32.

  Returns:
    uint8 `[packed_size(count, width)]`.

  >>> import jax.numpy as jnp
  >>> pack_bits(jnp.array([1, 2, 3], jnp.uint32), 4)
  Array([33,  3], dtype=uint8)
  """
  if width == 0:
    return jnp.zeros((0,), jnp.uint8)
  per_group = _group(width)
  count = numbers.shape[0]
  groups = -(-count // per_group)
  numbers = jnp.pad(numbers, (0, groups * per_group - count))
  columns = numbers.reshape(groups, per_group).T
  data = []
  for byte in range(per_group * width // 8):
    bits = jnp.zeros((groups,), jnp.uint32)
    for place in range(8 * byte // width, (8 * byte + 7) // width + 1):
      bits |= _shift_left(columns[place], place * width - 8 * byte)
    data.append((bits & 0xFF).astype(jnp.uint8))
  return jnp.stack(data, 1).reshape(-1)[: packed_size(count, width)]


def unpack_bits(data: jax.Array, count: int, width: int) -> jax.Array:
  """Undoes `pack_bits` along the last axis.

  Args:
    data: uint8 `[..., packed_size(count, width)]`.
    count: how many numbers.
    width: bits of each, 0 to 32.

  Returns:
    uint32 `[..., count]`.
  """
  batch = data.shape[:-1]
  if width == 0:
    return jnp.zeros((*batch, count), jnp.uint32)
  per_group = _group(width)
  groups = -(-count // per_group)
  group_bytes = per_group * width // 8
  missing = groups * group_bytes - data.shape[-1]
  data = jnp.pad(data, [(0, 0)] * len(batch) + [(0, missing)])
  columns = data.reshape(*batch, groups, group_bytes).astype(jnp.uint32)
  mask = jnp.uint32(2**width - 1)
  numbers = []
  for place in range(per_group):
    first, last = place * width // 8, (place * width + width - 1) // 8
    bits = jnp.zeros((*batch, groups), jnp.uint32)
    for byte in range(first, last + 1):
      bits |= _shift_left(columns[..., byte], 8 * byte - place * width)
    numbers.append(bits & mask)
  return jnp.stack(numbers, -1).reshape(*batch, -1)[..., :count]


def _group(width: int) -> int:
  """Smallest number of `width`-bit numbers that fills whole bytes."""
  return 8 // math.gcd(8, width)


def _shift_left(x: jax.Array, amount: int) -> jax.Array:
  """`x << amount` for uint32; a negative amount shifts right."""
  return x << amount if amount >= 0 else x >> -amount
