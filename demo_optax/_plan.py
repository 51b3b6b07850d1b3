"""Predicts the bytes of an exchange from shapes."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import chex
import numpy as np

from demo_optax import _checks
from demo_optax.compressors.compressor import CompressorTree, LeafChunks
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
  shape: tuple[int, ...]
  blocks: tuple[int, ...]  # shards inside a worker, along each dimension
  num_chunks: int
  sent_bytes: int  # in a worker's payload, or in the all-reduce
  index_bits: float  # per index, a fraction; 0 without indices
  as_unsharded: bool  # in the chunks of an unsharded worker
  small_blocks: bool  # a side shorter than that worker's chunk
  cells: tuple[str, ...]  # of the table, about its chunks

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def is_large(self) -> bool:
    """Whether more than a tenth of its float32 elements is sent."""
    return self.sent_bytes > 0.4 * self.size

  @property
  def row(self) -> tuple[str, ...]:
    """Its row of the table, without the name."""
    sent = _num_bytes(self.sent_bytes) + ('!' if self.is_large else '')
    blocks = _times(self.blocks) if math.prod(self.blocks) > 1 else '-'
    if not self.as_unsharded:
      blocks += '*'
    shape = _times(self.shape) or 'scalar'
    return shape, f'{self.num_chunks}', *self.cells, sent, blocks


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
    names = collections.defaultdict(list)
    for leaf in self.leaves:
      names[leaf.row].append(leaf.name)
    header = 'leaf shape chunks of topk indices bits values sent blocks'
    rows = [header.split()]
    for (*cells, sent, blocks), (name, *others) in names.items():
      if others:
        name, sent = f'{name} and {len(others)} more', f'{sent} each'
      rows.append([name, *cells, sent, blocks])
    if all(row[-1] == '-' for row in rows[1:]):
      rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
      line = name.ljust(widths[0])
      for cell, width in zip(cells, widths[1:]):
        line += '  ' + cell.rjust(width)
      lines.append(line.rstrip())
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
    ours = 'all_to_all' if self.update_bytes else 'this exchange'
    directions = {
      ours: (self.sent_bytes, self.received_bytes),
      'all-reduce float32': (self.dense_bytes(4),) * 2,
      'all-reduce bfloat16': (self.dense_bytes(2),) * 2,
    }
    for name, (out, back) in directions.items():
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
  weighted: bool = False,
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
  number. With `weighted`, `update` is given a `weight`, which takes 4 bytes of
  a message. The other arguments are those of `scale_by_demo`. A plan prints as
  a table, as from `python -m demo_optax`.

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
  specs, count = workers.param_specs, workers.count
  layout = make_layout(params, compressor, specs)
  unsharded = make_layout(params, compressor, REPLICATED)
  leaves = []
  for leaf, alone in zip(layout.leaves, unsharded.leaves):
    if not leaf.is_frozen:
      leaves.append(_leaf_bytes(leaf, alone))

  values = resolve_update_values(exchange, update_values, workers)
  if workers.relay is not None:
    exchange = 'all_gather'
  config = make_config(
    layout, 'senders', exchange, count, values, weighted=weighted
  )
  owners = config.update_packer
  payload = summed = updates = 0
  for name, (shape, dtype) in config.packer.shapes.items():
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if name == config.packer.name:
      payload += num_bytes
    else:
      summed += num_bytes
  averaged = [_shard_bytes(layout.leaves[i]) for i in layout.averaged]
  if weighted and averaged:
    averaged.append(4)  # weights are added up beside them
  for num_bytes in averaged:
    if num_bytes > ORDERED_BYTES:
      summed += num_bytes
    elif owners is None:
      payload += num_bytes
    else:
      updates += num_bytes * count
  if owners is not None:
    updates += owners.num_bytes * count
  if workers.relay is not None:  # sums are of all workers' summands
    payload, summed = payload + summed, 0

  sent, received = min(count - 1, 1) * payload, (count - 1) * payload
  if updates:  # to owners, and from them: equally many each way
    sent = received = (payload + updates) // count * (count - 1)
  sums = round(2 * summed * (count - 1) / count)  # in a ring
  return Plan(
    leaves=tuple(leaves),
    size=sum(leaf.size for leaf in leaves),
    num_workers=count,
    num_devices=specs.devices,
    sent_bytes=(sent + sums) * specs.devices,
    received_bytes=(received + sums) * specs.devices,
    payload_bytes=payload * specs.devices,
    summed_bytes=summed * specs.devices,
    device_bytes={(workers.axis_name,): received + sums, **_joined(layout)},
    update_bytes=updates * specs.devices,
  )


def _leaf_bytes(leaf: Leaf, alone: Leaf) -> LeafBytes:
  """Returns the bytes of a leaf, which is `alone` in an unsharded worker."""
  blocks = leaf.sharding.blocks
  num_shards = math.prod(blocks)
  num_chunks, index_bits, small_blocks = 1, 0.0, False
  cells = ['whole', 'all', 'shared', '-', 'averaged']
  if leaf.chunks is not None:  # else its gradient is averaged uncompressed
    grid, chunk_format = leaf.grid, leaf.chunks.format
    num_chunks = num_shards * grid.num_chunks
    if code := chunk_format.index_code:
      index_bits = code.bits / chunk_format.k
    cells = _cells(leaf.chunks)
    if not alone.grid.whole:
      sides = zip(grid.folded[-2:], alone.grid.lengths[-2:])
      small_blocks = any(length < side for length, side in sides)
  return LeafBytes(
    name=leaf.name,
    shape=leaf.shape,
    blocks=blocks,
    num_chunks=num_chunks,
    sent_bytes=num_shards * _shard_bytes(leaf),
    index_bits=index_bits,
    as_unsharded=leaf.record == alone.record,
    small_blocks=small_blocks,
    cells=tuple(cells),
  )


def _cells(chunks: LeafChunks) -> list[str]:
  """Returns cells of a row: chunk, topk, indices, bits and values."""
  grid, chunk_format = chunks.grid, chunks.format
  indices, bits = 'shared' if chunk_format.shared else '-', '-'
  if code := chunk_format.index_code:
    indices = 'group' if chunk_format.grouped else code.name
    bits = f'{code.bits / chunk_format.k:.2f}'
  is_all = chunk_format.k == chunk_format.n
  return [
    'whole' if grid.whole else _times(grid.lengths[-2:]),
    'all' if is_all else f'{chunk_format.k}',
    indices,
    bits,
    chunk_format.values,
  ]


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
