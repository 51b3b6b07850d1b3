"""Predicts the bytes of an exchange from shapes."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import chex
import numpy as np

from demo_optax import _checks
from demo_optax.compressors.compressor import CompressorTree
from demo_optax.compressors.layout import Layout, Leaf, make_layout
from demo_optax.exchange.algorithm import ExchangeKind, make_config
from demo_optax.transformation import resolve_update_values
from demo_optax.workers import Workers
from demo_optax.workers.collectives import ORDERED_BYTES
from demo_optax.workers.param_specs import REPLICATED


@dataclasses.dataclass(frozen=True)
class LeafBytes:
  """The bytes of one leaf in an exchange, of all its shards."""

  name: str
  size: int  # elements
  blocks: tuple[int, ...]  # shards inside a worker, along each dimension
  num_chunks: int
  sent_bytes: int  # in a worker's payload, or in the all-reduce
  is_large: bool  # more than a tenth of its float32 elements is sent
  index_bits: float  # per index, a fraction; 0 without indices
  as_unsharded: bool  # in the chunks of an unsharded worker
  small_blocks: bool  # a side shorter than that worker's chunk
  cells: tuple[str, ...]  # its row of the table, without the name


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
  """The bytes of one exchange, printed as a table.

  They are those of all devices of a worker, unless noted.

  Attributes:
    leaves: of each leaf that takes part.
    size: number of elements that take part.
    sent_bytes: its payload, and its part of the sums; of owners also updates.
    received_bytes: all other payloads (of owners those to it, and updates), and
      the sums.
    payload_bytes: its message (its messages to all owners), and averaged leaves
      of up to 64 KB.
    summed_bytes: what is all-reduced.
    device_bytes: what one device receives per step, by the mesh axes crossed:
      the worker axis, then axes inside a worker, over which updates are joined.
      Scalars on which its devices agree are not counted.
    update_bytes: updates of all owners, and averaged leaves of up to 64 KB; 0
      without owners.
  """

  leaves: tuple[LeafBytes, ...]
  size: int
  num_workers: int
  num_devices: int
  sent_bytes: int
  received_bytes: int
  payload_bytes: int
  summed_bytes: int
  device_bytes: dict[tuple[str, ...], int]
  update_bytes: int

  def dense_bytes(self, itemsize: int = 4) -> float:
    """Returns the bytes, each way, of a ring all-reduce of the gradient."""
    return 2 * self.size * itemsize * (self.num_workers - 1) / self.num_workers

  def max_workers(self, itemsize: int = 4) -> float:
    """Returns the most workers with which an all-reduce receives more.

    An all-gather receives `N - 1` payloads, a ring all-reduce at most twice the
    dense gradient, of `itemsize` bytes per element. Returns 1 if an all-reduce
    always receives less, infinity if it never does, and 0 without leaves.
    """
    if not self.leaves:
      return 0
    saved = 2 * (self.size * itemsize - self.summed_bytes)
    if self.update_bytes or not self.payload_bytes:
      always = self.payload_bytes + self.update_bytes < saved
      return math.inf if always else 1
    return max(1, math.ceil(saved / self.payload_bytes) - 1)

  def __str__(self) -> str:
    return f'{self.table()}\n\n{self.totals()}'

  __repr__ = __str__

  def table(self) -> str:
    """Returns the costs of leaves; equal ones share a row."""
    equal = collections.defaultdict(list)
    for leaf in self.leaves:
      equal[leaf.cells].append(leaf.name)
    header = 'leaf shape chunks of topk indices bits values sent blocks'
    rows = [tuple(header.split())]
    for (*cells, sent, blocks), (name, *others) in equal.items():
      if others:
        name, sent = f'{name} and {len(others)} more', f'{sent} each'
      rows.append((name, *cells, sent, blocks))
    if all(row[-1] == '-' for row in rows[1:]):
      rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
      cells = [cell.rjust(width) for cell, width in zip(row, widths)]
      lines.append('  '.join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    if any(leaf.is_large for leaf in self.leaves):
      lines.append(
        '! sends more than a tenth of the leaf. If that is much of the total,'
        " give it a smaller topk, or values='sign'."
      )
    if not all(leaf.as_unsharded for leaf in self.leaves):
      lines.append(
        '* cut into other chunks than on one device: results depend on how it'
        ' is sharded.'
      )
    if small := [leaf.name for leaf in self.leaves if leaf.small_blocks]:
      lines.append(
        'Blocks are smaller than a chunk, which costs bytes. Shard another'
        f' dimension, or over fewer devices: {", ".join(small)}'
      )
    return '\n'.join(lines)

  def totals(self) -> str:
    """Returns a worker's bytes, next to those of dense all-reduces."""
    share = self.sent_bytes / (4 * max(1, self.size))
    lines = [
      f'{self.size:,} elements, {self.num_workers} workers. Per worker'
      f' and step (sends {share:.2%} of a float32 gradient):'
    ]
    for name, out, back in (
      (
        'all_to_all' if self.update_bytes else 'this exchange',
        self.sent_bytes,
        self.received_bytes,
      ),
      ('all-reduce float32', self.dense_bytes(4), self.dense_bytes(4)),
      ('all-reduce bfloat16', self.dense_bytes(2), self.dense_bytes(2)),
    ):
      lines.append(
        f'  {name:<20} sends {_num_bytes(out):>10}, receives'
        f' {_num_bytes(back):>10}'
      )
    if self.num_devices > 1:
      lines.append(
        f'A worker is {self.num_devices} devices. Per device and step:'
      )
      for axes, moved in self.device_bytes.items():
        lines.append(
          f'  over {", ".join(axes):<15} receives {_num_bytes(moved):>10}'
        )
    if not self.update_bytes:
      up_to = f'up to {self.max_workers(4)}/{self.max_workers(2)}'
      if self.max_workers(2) == math.inf:
        up_to = 'any number of'
      lines.append(
        'This exchange receives less than an all-reduce of float32/bfloat16'
        f' with {up_to} workers.'
      )
    return '\n'.join(lines)


def plan(
  params: chex.ArrayTree,
  compressor: CompressorTree,
  workers: Workers | int,
  *,
  exchange: ExchangeKind = 'all_gather',
  update_values: str | None = None,
) -> Plan:
  r"""Returns the bytes of an exchange, without running it.

  With a payload of :math:`P` bytes and :math:`S` bytes that are all-reduced,
  each of :math:`N > 1` workers sends :math:`P + R` and receives
  :math:`(N - 1) P + R` bytes, with :math:`R = 2\tfrac{N-1}{N} S`. With
  `exchange='all_to_all'` and updates of :math:`U` bytes it sends and receives
  :math:`\tfrac{N-1}N (P + U) + R`, where :math:`P` and :math:`U` include
  padding of every owner's share to whole chunks. With a relay :math:`S` is a
  part of :math:`P`; that a worker's message is sent back to it is not counted.

  A sharded leaf is cut into chunks shard by shard. They are the chunks of an
  unsharded worker if a shard is a multiple of `chunk_size`.

  Parameters may be shapes (`jax.ShapeDtypeStruct`), and `workers` may be their
  number. The other arguments are those of `scale_by_demo`. A plan prints as a
  table, as from `python -m demo_optax`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {'w': jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    >>> plan = demo_optax.plan(params, demo_optax.dct_topk(topk=8), workers=16)
    >>> plan.sent_bytes  # 1024 chunks * (8 * 4 bytes + 87 bits), in whole rows
    44032
    >>> plan.max_workers()
    762
  """
  if not isinstance(workers, Workers):
    _checks.check_positive('workers', workers)
    workers = Workers.simulated(workers)
  specs, axis, count = workers.param_specs, workers.axis_name, workers.count
  is_relayed = workers.relay is not None
  layout = make_layout(params, compressor, specs)
  unsharded = make_layout(params, compressor, REPLICATED)
  leaves = tuple(
    _leaf_bytes(leaf, alone)
    for leaf, alone in zip(layout.leaves, unsharded.leaves)
    if not leaf.is_frozen
  )
  averaged = [_shard_bytes(layout.leaves[i]) for i in layout.averaged]
  ordered = sum(size for size in averaged if size <= ORDERED_BYTES)
  written = resolve_update_values(exchange, update_values, workers)
  kind = 'all_gather' if is_relayed else exchange
  config = make_config(layout, 'senders', kind, count, written)
  sizes = {
    name: math.prod(shape) * np.dtype(dtype).itemsize
    for name, (shape, dtype) in config.packer.shapes.items()
  }
  payload = sizes.pop(config.packer.name, 0)
  summed = sum(sizes.values()) + sum(averaged) - ordered
  updates = 0
  if config.update_packer is None:
    payload += ordered
  else:
    updates = (config.update_packer.num_bytes + ordered) * count
  if is_relayed:  # sums are computed from all workers' summands
    payload, summed = payload + summed, 0
  sent, received = min(count - 1, 1) * payload, (count - 1) * payload
  if updates:  # to owners, and from them: equally many each way
    sent = received = (payload + updates) // count * (count - 1)
  sums = round(2 * summed * (count - 1) / count)  # in a ring
  return Plan(
    leaves=leaves,
    size=sum(leaf.size for leaf in leaves),
    num_workers=count,
    num_devices=specs.devices,
    sent_bytes=(sent + sums) * specs.devices,
    received_bytes=(received + sums) * specs.devices,
    payload_bytes=payload * specs.devices,
    summed_bytes=summed * specs.devices,
    device_bytes={(axis,): received + sums, **_joined(layout)},
    update_bytes=updates * specs.devices,
  )


def _leaf_bytes(leaf: Leaf, alone: Leaf) -> LeafBytes:
  """Returns the bytes of a leaf, which is `alone` in an unsharded worker."""
  blocks, size = leaf.sharding.blocks, math.prod(leaf.shape)
  num_shards, num_chunks, index_bits = math.prod(blocks), 1, 0.0
  as_unsharded, small_blocks = leaf.record == alone.record, False
  of_chunk = 'whole', 'all', 'shared', '-', 'averaged'
  if leaf.chunks is not None:  # else its gradient is averaged uncompressed
    grid, form, code = (
      leaf.grid,
      leaf.chunks.format,
      leaf.chunks.format.index_code,
    )
    num_chunks = num_shards * grid.num_chunks
    index_bits = code.bits / form.k if code else 0.0
    of_chunk = (
      'whole' if grid.whole else _times(grid.lengths[-2:]),
      'all' if form.k == form.n else f'{form.k}',
      'shared'
      if form.shared
      else 'group'
      if form.grouped
      else code.name
      if code
      else '-',
      f'{index_bits:.2f}' if code else '-',
      form.values,
    )
    sides = zip(grid.folded[-2:], alone.grid.lengths[-2:])
    small_blocks = not alone.grid.whole and any(d < n for d, n in sides)
  sent_bytes = num_shards * _shard_bytes(leaf)
  is_large = sent_bytes > 0.4 * size
  cells = (
    _times(leaf.shape) or 'scalar',
    f'{num_chunks}',
    *of_chunk,
    _num_bytes(sent_bytes) + ('!' if is_large else ''),
    (_times(blocks) if num_shards > 1 else '-') + ('' if as_unsharded else '*'),
  )
  return LeafBytes(
    leaf.name,
    size,
    blocks,
    num_chunks,
    sent_bytes,
    is_large,
    index_bits,
    as_unsharded,
    small_blocks,
    cells,
  )


def _shard_bytes(leaf: Leaf) -> int:
  """Returns the bytes that a worker sends of one shard of a leaf."""
  if leaf.chunks is not None:
    return leaf.chunks.num_bytes
  size = math.prod(leaf.shape) // math.prod(leaf.sharding.blocks)
  return np.dtype(leaf.dtype).itemsize * size


def _joined(layout: Layout) -> dict[tuple[str, ...], int]:
  """Returns the bytes per device of joining updates inside a worker."""
  received: dict[tuple[str, ...], int] = collections.defaultdict(int)
  for bucket in layout.buckets:
    # Along one axis after the other, the innermost first.
    size = bucket.num_chunks * bucket.format.n
    size *= np.dtype(bucket.format.dtype).itemsize
    for axis, devices in reversed(layout.axis_sizes):
      if axis in bucket.split_axes:
        received[axis,] += (devices - 1) * size
        size *= devices
  return received


def _num_bytes(count: float) -> str:
  """Returns bytes in decimal units: 1.2 MB is 1,200,000 bytes."""
  for unit, name in ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
    if count >= unit:
      return f'{count / unit:.2f} {name}'
  return f'{count:.0f} B'


def _times(lengths: Sequence[int]) -> str:
  """Returns a shape such as `'64x64'`; `''` for a scalar."""
  return 'x'.join(map(str, lengths))
