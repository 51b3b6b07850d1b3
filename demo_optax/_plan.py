"""Predicts an exchange's bytes from shapes."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import chex
import numpy as np

from demo_optax import _checks
from demo_optax.compressors.compressor import CompressorTree
from demo_optax.compressors.layout import Layout, Leaf, make_layout
from demo_optax.exchange.algorithm import ExchangeConfig, ExchangeKind
from demo_optax.transformation import resolve_update_values
from demo_optax.workers import Workers
from demo_optax.workers.collectives import ORDERED_BYTES
from demo_optax.workers.param_specs import REPLICATED


@dataclasses.dataclass(frozen=True)
class LeafBytes:
  """The bytes that one leaf takes in an exchange, with all its shards.

  Attributes:
    leaf: its chunks and sharding.
    as_unsharded: whether its chunks are those of a worker with one device.
  """

  leaf: Leaf
  as_unsharded: bool

  @property
  def name(self) -> str:
    """Its path."""
    return self.leaf.name

  @property
  def num_chunks(self) -> int:
    """Number of chunks; 1 if its gradient is averaged uncompressed."""
    if self.leaf.chunks is None:
      return 1
    return _num_shards(self.leaf) * self.leaf.grid.num_chunks

  @property
  def sent_bytes(self) -> int:
    """Bytes in a worker's payload, or in the all-reduce."""
    return _num_shards(self.leaf) * _shard_bytes(self.leaf)

  @property
  def index_bits(self) -> float:
    """Bits per index, a fraction; 0 without indices."""
    chunks = self.leaf.chunks
    if chunks is None or chunks.format.index_code is None:
      return 0.0
    return chunks.format.index_code.bits / chunks.format.k


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
  """The bytes that one exchange moves, printed as a table.

  They are summed over a worker's devices, unless noted.

  Attributes:
    leaves: a `LeafBytes` for each leaf that takes part.
    size: how many elements take part.
    num_workers: workers in the exchange.
    num_devices: devices per worker.
    sent_bytes: its payload, and its part in sums; an owner also sends updates.
    received_bytes: all other payloads, and sums; with owners the payloads for
      this one, and updates.
    payload_bytes: its message (with owners, its messages to all), and averaged
      leaves up to 64 KB.
    summed_bytes: what is all-reduced.
    device_bytes: what one device receives per step, by the mesh axes crossed:
      the worker axis, then axes inside a worker, over which updates are joined.
      Scalars on which its devices agree are not counted.
    update_bytes: updates from all owners, and averaged leaves up to 64 KB; 0
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
    """Returns a ring all-reduce's bytes for the gradient, each way."""
    return 2 * self.size * itemsize * (self.num_workers - 1) / self.num_workers

  def exchanges(self) -> list[tuple[str, float, float, int]]:
    """Returns this exchange, and dense ones: bytes sent, received, turns.

    What is sent in one turn waits for the latency of a link together.
    """
    gather_turns = self.num_workers - 1  # in a ring
    own_turns = gather_turns + (self.update_bytes > 0)  # to owners: one
    rows: list[tuple[str, float, float, int]] = [
      ('this exchange', self.sent_bytes, self.received_bytes, own_turns)
    ]
    for name, itemsize in (('float32', 4), ('bfloat16', 2)):
      each_way = self.dense_bytes(itemsize)
      rows.append((f'all-reduce {name}', each_way, each_way, 2 * gather_turns))
    return rows

  def max_workers(self, itemsize: int = 4) -> float:
    """Returns the most workers with which an all-reduce receives more.

    An all-gather receives `N - 1` payloads, a ring all-reduce at most twice the
    dense gradient, with `itemsize` bytes per element. Returns 1 if an
    all-reduce always receives less, infinity if it never does, and 0 without
    leaves.
    """
    if not self.leaves:
      return 0
    # What an all-reduce with very many workers receives beyond our sums.
    beyond = 2 * (self.size * itemsize - self.summed_bytes)
    if self.update_bytes or not self.payload_bytes:
      is_less = self.payload_bytes + self.update_bytes < beyond
      return math.inf if is_less else 1
    return max(1, math.ceil(beyond / self.payload_bytes) - 1)

  def __str__(self) -> str:
    return f'{self.table()}\n\n{self.totals()}'

  __repr__ = __str__

  def table(self) -> str:
    """Returns the leaves as a table; equal ones share a row."""
    # Names of the leaves that have one row.
    names = collections.defaultdict(list)
    for leaf in self.leaves:
      names[_cells(leaf)].append(leaf.name)
    rows = [_COLUMNS.split()]
    for (*cells, sent, blocks), (name, *others) in names.items():
      if others:
        name, sent = f'{name} and {len(others)} more', f'{sent} each'
      rows.append([name, *cells, sent, blocks])
    if {row[-1] for row in rows[1:]} <= {'-'}:  # no leaf is sharded
      rows = [row[:-1] for row in rows]
    # Of each column; the first one is aligned to the left.
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
      line = name.ljust(widths[0])
      for cell, width in zip(cells, widths[1:]):
        line += '  ' + cell.rjust(width)
      lines.append(line)
    if not all(leaf.as_unsharded for leaf in self.leaves):
      lines.append(
        '* cut into other chunks than on one device: results depend on how it'
        ' is sharded. If\n  blocks are smaller than chunks, shard another'
        ' dimension, or over fewer devices.'
      )
    return '\n'.join(lines)

  def totals(self) -> str:
    """Returns a worker's bytes, next to those of dense all-reduces."""
    share = self.sent_bytes / (4 * max(1, self.size))
    lines = [
      f'{self.size:,} elements, {self.num_workers} workers. Per worker'
      f' and step (sends {share:.2%} of a float32 gradient):'
    ]
    for name, sent, received, _ in self.exchanges():
      lines.append(
        f'  {name:<20} sends {_num_bytes(sent):>10}, receives'
        f' {_num_bytes(received):>10}'
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
  r"""Predicts the bytes that an exchange moves, without running it.

  Takes parameters or their shapes, and prints as a table, as does
  `python -m demo_optax`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {'w': jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    >>> plan = demo_optax.plan(params, demo_optax.dct_topk(topk=8), workers=16)
    >>> plan.sent_bytes  # 1024 chunks * (8 * 4 bytes + 87 bits), in whole rows
    44032
    >>> plan.max_workers()
    762

  With a payload of :math:`P` bytes, and :math:`S` bytes that are all-reduced,
  each of :math:`N > 1` workers sends :math:`P + R` and receives
  :math:`(N - 1) P + R` bytes, with :math:`R = 2\tfrac{N-1}{N} S`. With
  `exchange='all_to_all'` and :math:`U` bytes for updates it sends and receives
  :math:`\tfrac{N-1}N (P + U) + R`; :math:`P` and :math:`U` then pad every
  owner's share to whole chunks. With a relay :math:`P` includes :math:`S`; that
  a worker's message is sent back to it is not counted.

  A sharded leaf is cut into chunks shard by shard. They are the chunks that an
  unsharded worker has if each shard is a multiple of `chunk_size`.

  Args:
    params: arrays or `jax.ShapeDtypeStruct`.
    compressor: as in `scale_by_demo`.
    workers: the workers, or how many.
    exchange: as in `scale_by_demo`.
    update_values: as in `scale_by_demo`.
    weighted: whether `update` is given weights: 4 bytes of a message.

  Raises:
    ValueError: arguments that `scale_by_demo` refuses.
  """
  if not isinstance(workers, Workers):
    _checks.check_positive('workers', workers)
    workers = Workers.simulated(workers)
  specs, count = workers.param_specs, workers.count
  # Leaves in one order: how they are sharded decides about chunks alone.
  layout = make_layout(params, compressor, specs)
  unsharded = make_layout(params, compressor, REPLICATED)
  leaves, size = [], 0
  for leaf, unsharded_leaf in zip(layout.leaves, unsharded.leaves):
    if not leaf.is_frozen:
      as_unsharded = leaf.record == unsharded_leaf.record
      leaves.append(LeafBytes(leaf, as_unsharded))
      size += math.prod(leaf.shape)
  values = resolve_update_values(exchange, update_values, workers)
  config = ExchangeConfig(
    layout,
    average='senders',
    platform='',
    num_owners=count if exchange == 'all_to_all' else None,
    update_values=values,
    weighted=weighted,
  )
  # By one device; its worker moves as much by each of its devices.
  payload, summed, updates = _sent_by_device(config, count)
  if workers.only_gathers:  # sums are of all workers' summands
    payload, summed = payload + summed, 0
  others = count - 1
  sent, received = min(others, 1) * payload, others * payload
  if updates:  # to owners, and from them: equally many each way
    sent = received = (payload + updates) // count * others
  ring_bytes = round(2 * summed * others / count)
  return Plan(
    leaves=tuple(leaves),
    size=size,
    num_workers=count,
    num_devices=specs.devices,
    sent_bytes=(sent + ring_bytes) * specs.devices,
    received_bytes=(received + ring_bytes) * specs.devices,
    payload_bytes=payload * specs.devices,
    summed_bytes=summed * specs.devices,
    device_bytes={
      (workers.axis_name,): received + ring_bytes,
      **_joined(layout),
    },
    update_bytes=updates * specs.devices,
  )


def _sent_by_device(
  config: ExchangeConfig,
  count: int,
) -> tuple[int, int, int]:
  """Returns bytes in a device's message, summands, and all owners' updates."""
  packer, owners, layout = config.packer, config.owners, config.layout
  message, summed = packer.num_bytes
  updates = 0
  if owners is not None:
    updates = owners.words.num_bytes * count
  # What `average_gradients` gathers or adds up, uncompressed.
  averaged = [_shard_bytes(layout.leaves[number]) for number in layout.averaged]
  if config.weighted and averaged:
    averaged.append(4)  # weights are added up beside them
  for num_bytes in averaged:
    if num_bytes > ORDERED_BYTES:
      summed += num_bytes
    elif owners is None:
      message += num_bytes
    else:
      updates += num_bytes * count
  return message, summed, updates


_COLUMNS = 'leaf shape chunks of topk indices bits values sent blocks'


def _cells(costs: LeafBytes) -> tuple[str, ...]:
  """Returns a leaf's row in the table, without its name."""
  leaf = costs.leaf
  # As for a leaf that is averaged.
  sides, topk, indices, bits = 'whole', 'all', 'shared', '-'
  values, blocks = 'averaged', '-'
  if leaf.chunks is not None:
    chunk_format = leaf.chunks.format
    values = chunk_format.values
    if not leaf.grid.whole:
      sides = _times(leaf.grid.lengths[-2:])
    if leaf.grid.period > 1:
      topk = f'1/{leaf.grid.period}'  # by turns
    elif chunk_format.k < chunk_format.n:
      topk = f'{chunk_format.k}'
    if not chunk_format.shared:
      indices = '-'
    if index_code := chunk_format.index_code:
      indices = index_code.name
      bits = f'{costs.index_bits:.2f}'
  if _num_shards(leaf) > 1:
    blocks = _times(leaf.sharding.blocks)
  if not costs.as_unsharded:
    blocks += '*'
  shape = _times(leaf.shape) or 'scalar'
  chunks = f'{costs.num_chunks}'
  sent = _num_bytes(costs.sent_bytes)
  return shape, chunks, sides, topk, indices, bits, values, sent, blocks


def _num_shards(leaf: Leaf) -> int:
  """Returns how many shards of a leaf a worker has."""
  return math.prod(leaf.sharding.blocks)


def _shard_bytes(leaf: Leaf) -> int:
  """Returns the bytes that a worker sends for one shard."""
  if leaf.chunks is not None:
    return leaf.chunks.num_bytes
  size = math.prod(leaf.shape) // _num_shards(leaf)
  return np.dtype(leaf.dtype).itemsize * size


def _joined(layout: Layout) -> dict[tuple[str, ...], int]:
  """Returns the bytes per device that join updates inside a worker."""
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
  # The largest unit that leaves a number above one.
  for unit, name in ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
    if count >= unit:
      return f'{count / unit:.2f} {name}'
  return f'{count:.0f} B'


def _times(lengths: Sequence[int]) -> str:
  """Returns a shape such as `'64x64'`; `''` for a scalar."""
  return 'x'.join(map(str, lengths))
