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
    energies    three float32, see `Payload.seal`

Leaves whose chunks are alike share a group, so the number of operations grows
with the kinds of chunks and not with the number of leaves.

A worker of several devices has one such vector for every set of mesh axes that
leaves are sharded over, since they differ in which devices hold which bytes.

Whatever the bytes, reading them is safe: a worker whose indices do not ascend
within the chunk or whose values are beyond `ChunkFormat.limit` takes no part.
All workers see the same bytes and so agree on who that is; if a worker is
several devices, the bytes of each are judged by themselves.

Where the places are the same on all workers there is nothing to tell but
values, and what is wanted of them is their mean: they go into a float vector
that an all-reduce sums, with one element more that counts who takes part.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.engine import heuristics as paths
from demo_optax.engine import topk as selection
from demo_optax.wire import bits as packing
from demo_optax.wire import indices as index_codes
from demo_optax.wire import values as value_codes

STATUS_BYTES = 1
ENERGIES = 3  # of what was held, sent and kept

Axes = tuple[str, ...]
Part = tuple[jax.Array, Axes]  # a vector, and the axes that it is sharded over
Selection = tuple[jax.Array, jax.Array]  # indices and values


@dataclasses.dataclass(frozen=True)
class ChunkFormat:
  """How the selection from one kind of chunk is written.

  Attributes:
    n: number of coefficients in a chunk.
    k: number of coefficients sent of each.
    dtype: name of the dtype of the coefficients.
    values: name of the value code, one of `value_codes.VALUES`.
    shared: whether all workers select the same places: no indices are written,
      and values are summed as they are.
  """

  n: int
  k: int
  dtype: str
  values: str = 'float32'
  shared: bool = False

  def __post_init__(self) -> None:
    if self.shared and self.values != 'float32':
      raise ValueError(
          f'values={self.values!r} with shared=True: an all-reduce sums values'
          ' as they are. Leave values out.'
      )

  @property
  def index_code(self) -> index_codes.IndexCode:
    """How the indices are written."""
    return index_codes.cheapest(self.n, self.n if self.shared else self.k)

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

  @property
  def largest_sent(self) -> float:
    """Largest magnitude that is sent; more stays in the momentum."""
    return self.limit / 2

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
    most = self.largest_sent
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
    num_stats: how many float32 there are beside them.

  >>> layout = Layout([(ChunkFormat(4096, 32, 'float32'), 100)])
  >>> layout.num_bytes  # 100 * (32 * 4 bytes + 287 bits), and the status
  16389
  """

  def __init__(
      self, leaves: Sequence[tuple[ChunkFormat, int]], num_stats: int = 0
  ):
    self.leaves = tuple(leaves)
    self.num_stats = num_stats
    self.groups: dict[ChunkFormat, list[int]] = {}
    for leaf, (chunk_format, _) in enumerate(self.leaves):
      self.groups.setdefault(chunk_format, []).append(leaf)

  def group_chunks(self, chunk_format: ChunkFormat) -> int:
    """Number of chunks in a group."""
    return sum(self.leaves[leaf][1] for leaf in self.groups[chunk_format])

  @property
  def num_bytes(self) -> int:
    """Size of a payload in bytes."""
    return STATUS_BYTES + 4 * self.num_stats + sum(
        group.num_bytes(self.group_chunks(group)) for group in self.groups
    )

  def encode(
      self, selections: Sequence[Selection]
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """One worker's payload, but for its end.

    Args:
      selections: per leaf `(indices, values)`, both `[chunks, k]`, indices
        ascending within a chunk.

    Returns:
      its bytes, uint8 in several parts, and per leaf `[chunks, k]`, the values
      as they will be read by all workers.
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
    return parts, [sent[leaf] for leaf in range(len(self.leaves))]

  def seal(
      self,
      parts: Sequence[jax.Array],
      present: jax.Array,
      stats: jax.Array | None = None,
  ) -> jax.Array:
    """One worker's payload, whole.

    Args:
      parts: what `encode` returned.
      present: bool `[]`, whether the worker takes part.
      stats: float32 `[num_stats]`.

    Returns:
      uint8 `[num_bytes]`.
    """
    status = present.astype(jnp.uint8)[None]
    if stats is None:
      return jnp.concatenate([*parts, status])
    stats = jax.lax.bitcast_convert_type(stats, jnp.uint8).reshape(-1)
    return jnp.concatenate([*parts, status, stats])

  def decode(
      self, payloads: jax.Array
  ) -> tuple[list[Selection], jax.Array, jax.Array]:
    """All workers' payloads, read.

    Args:
      payloads: uint8 `[workers, num_bytes]`.

    Returns:
      per leaf `(indices, values)`, both `[workers, chunks, k]`; bool
      `[workers]`, who takes part; and float32 `[workers, num_stats]`. Indices
      are distinct within a chunk whatever the bytes; values and stats of
      workers that take no part may be anything.
    """
    selections: dict[int, Selection] = {}
    end = self.num_bytes - 4 * self.num_stats
    present = payloads[:, end - 1] == 1
    stats = jax.lax.bitcast_convert_type(
        payloads[:, end:].reshape(len(payloads), -1, 4), jnp.float32
    )
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
    in_order = [selections[leaf] for leaf in range(len(self.leaves))]
    return in_order, present, stats

  def _split(
      self, array: jax.Array, members: Sequence[int], axis: int
  ) -> list[jax.Array]:
    """The parts of a group's array that are its leaves'."""
    ends = np.cumsum([self.leaves[leaf][1] for leaf in members])
    return jnp.split(array, ends[:-1], axis)


class SumLayout:
  """Where each leaf's values lie in a vector that an all-reduce sums.

  Args:
    leaves: for every leaf, the format of its chunks and their number.
    num_stats: how many floats there are beside them.
  """

  def __init__(
      self, leaves: Sequence[tuple[ChunkFormat, int]], num_stats: int = 0
  ):
    self.leaves = tuple(leaves)
    self.num_stats = num_stats

  @property
  def num_elements(self) -> int:
    """Length of the vector: all values, who takes part, stats."""
    values = sum(chunks * f.k for f, chunks in self.leaves)
    return values + 1 + self.num_stats

  def encode(
      self,
      values: Sequence[jax.Array],
      present: jax.Array,
      stats: jax.Array,
      dtype: str,
  ) -> jax.Array:
    """One worker's vector, which is zero if it takes no part.

    Args:
      values: per leaf `[chunks, k]`.
      present: bool `[]`, whether the worker takes part.
      stats: `[num_stats]`.
      dtype: of the vector.

    Returns:
      `[num_elements]`.
    """
    stats = jnp.where(jnp.isfinite(stats), stats, jnp.zeros_like(stats))
    end = [jnp.ones((1,), dtype), stats.astype(dtype)]
    vector = jnp.concatenate([*(x.reshape(-1) for x in values), *end])
    return jnp.where(present, vector, jnp.zeros_like(vector))

  def decode(
      self, total: jax.Array, workers: int
  ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The sum of all workers' vectors, read.

    Args:
      total: `[num_elements]`.
      workers: their number.

    Returns:
      per leaf `[chunks, k]`, the mean over those that take part, or zero; int32
      `[]`, how many do; and the sum of stats, float32 `[num_stats]`.
    """
    sizes = [chunks * f.k for f, chunks in self.leaves]
    *values, count, stats = jnp.split(total, np.cumsum([*sizes, 1]))
    count = jnp.round(count[0]).astype(jnp.int32)
    weight = selection.reciprocal(count, workers, total.dtype)
    means = [
        selection.product(weight, x).reshape(chunks, f.k)
        for x, (f, chunks) in zip(values, self.leaves)
    ]
    return means, count, stats.astype(jnp.float32)


class Received(NamedTuple):
  """What has come from all workers.

  Attributes:
    selections: per leaf `(indices, values)`, both `[senders, chunks, k]`; where
      a sum has come it is as if one worker had sent the mean.
    present: per leaf bool `[senders]`, whose values count.
    taking_part: int32 `[]`, how many workers take part.
    energies: per set of axes float32 `[ENERGIES]`, the sums over the workers
      that take part.
  """

  selections: list[Selection]
  present: list[jax.Array]
  taking_part: jax.Array
  energies: dict[Axes, jax.Array]


class Payload:
  """All that a device puts into an exchange: a layout per set of axes.

  Args:
    leaves: for every leaf, the format of its chunks and their number.
    axes: for every leaf, the mesh axes that it is sharded over.
  """

  def __init__(
      self, leaves: Sequence[tuple[ChunkFormat, int]], axes: Sequence[Axes]
  ):
    self._num_leaves = len(leaves)
    own: dict[Axes, list[int]] = {}
    summed: dict[tuple[str, Axes], list[int]] = {}
    for leaf, ((chunk_format, _), names) in enumerate(zip(leaves, axes)):
      # What is replicated has a part in any case, for its status.
      if chunk_format.shared:
        summed.setdefault((chunk_format.dtype, ()), [])
        summed.setdefault((chunk_format.dtype, names), []).append(leaf)
      else:
        own.setdefault((), [])
        own.setdefault(names, []).append(leaf)
    self._own, self._summed = own, summed
    self.layouts: Mapping[Axes, Layout] = {
        names: Layout([leaves[leaf] for leaf in members], ENERGIES)
        for names, members in own.items()
    }
    self.sum_layouts: Mapping[tuple[str, Axes], SumLayout] = {
        key: SumLayout([leaves[leaf] for leaf in members], ENERGIES)
        for key, members in summed.items()
    }

  def encode(
      self, selections: Sequence[Selection]
  ) -> tuple[list[Any], list[jax.Array]]:
    """One worker's selections, written.

    Args:
      selections: as for `Layout.encode`.

    Returns:
      what `seal` wants; and per leaf `[chunks, k]`, the values as they will be
      read by all workers.
    """
    sent = [values for _, values in selections]
    data: list[Any] = []
    for layout, members in zip(self.layouts.values(), self._own.values()):
      written, read = layout.encode([selections[leaf] for leaf in members])
      data.append(written)
      for leaf, values in zip(members, read):
        sent[leaf] = values
    for members in self._summed.values():
      data.append([sent[leaf] for leaf in members])
    return data, sent

  def seal(
      self,
      data: Sequence[Any],
      energies: Sequence[jax.Array],
      present: jax.Array,
  ) -> tuple[list[Part], list[Part]]:
    """One worker's parts.

    Args:
      data: as `encode` returned it.
      energies: per leaf float32 `[ENERGIES]`: sums of squares of the momentum
        with its gradient, of what is sent and of what stays.
      present: bool `[]`, whether the worker takes part.

    Returns:
      the parts to gather, uint8, and those to sum, floats.
    """

    def stats(members: Sequence[int]) -> jax.Array:
      nothing = jnp.zeros((ENERGIES,), jnp.float32)
      return sum((energies[leaf] for leaf in members), nothing)

    to_gather: list[Part] = []
    to_sum: list[Part] = []
    rest = iter(data)
    for (names, layout), members in zip(
        self.layouts.items(), self._own.values()
    ):
      part = layout.seal(next(rest), present, stats(members))
      to_gather.append((part, names))
    for ((dtype, names), sums), members in zip(
        self.sum_layouts.items(), self._summed.values()
    ):
      vector = sums.encode(next(rest), present, stats(members), dtype)
      to_sum.append((vector, names))
    return to_gather, to_sum

  def part_sizes(self) -> list[tuple[int, str, Axes]]:
    """Length, dtype and axes of what `seal` returns, to gather and to sum."""
    return [
        *((x.num_bytes, 'uint8', axes) for axes, x in self.layouts.items()),
        *(
            (x.num_elements, dtype, axes)
            for (dtype, axes), x in self.sum_layouts.items()
        ),
    ]

  def parts(
      self, vectors: Sequence[jax.Array]
  ) -> tuple[list[Part], list[Part]]:
    """What `seal` returned, from its vectors alone."""
    parts = [(x, axes) for x, (_, _, axes) in zip(vectors, self.part_sizes())]
    return parts[: len(self.layouts)], parts[len(self.layouts) :]

  def decode(
      self,
      gathered: Sequence[jax.Array],
      summed: Sequence[jax.Array],
      selections: Sequence[Selection],
      workers: int,
  ) -> Received:
    """All workers' parts, read.

    Args:
      gathered: for each part to gather, uint8 `[workers, bytes]`.
      summed: for each part to sum, the sum.
      selections: the own ones, of which the places are used that all share.
      workers: their number.

    Returns:
      What has come.
    """
    found: list[Any] = [None] * self._num_leaves
    present: list[Any] = [None] * self._num_leaves
    energies: dict[Axes, Any] = {}
    counts = []

    def add(names: Axes, stats: jax.Array) -> None:
      energies[names] = energies[names] + stats if names in energies else stats

    for (names, layout), members, part in zip(
        self.layouts.items(), self._own.values(), gathered
    ):
      decoded, status, stats = layout.decode(part)
      counts.append(jnp.sum(status, dtype=jnp.int32))
      sound = status[:, None] & jnp.isfinite(stats)
      add(names, jnp.sum(jnp.where(sound, stats, 0.0), axis=0))
      for leaf, chosen in zip(members, decoded):
        found[leaf], present[leaf] = chosen, status
    for ((_, names), sums), members, total in zip(
        self.sum_layouts.items(), self._summed.values(), summed
    ):
      means, count, stats = sums.decode(total, workers)
      counts.append(count)
      add(names, stats)
      for leaf, mean in zip(members, means):
        indices, _ = selections[leaf]
        found[leaf] = indices[None], mean[None]
        present[leaf] = count[None] > 0
    return Received(found, present, counts[0], energies)
