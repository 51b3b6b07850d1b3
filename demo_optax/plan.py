"""Predicts the bytes of an exchange from shapes."""

import dataclasses
import math
import operator
from collections.abc import Sequence

import chex
import jax
import numpy as np

from demo_optax.compressors.compressor import (
  Compressor,
  CompressorTree,
  Frozen,
  per_leaf,
)
from demo_optax.compressors.layout import Leaf, make_layout
from demo_optax.demo import describe_leaf, resolve_update_values
from demo_optax.exchange.algorithm import (
  ExchangeConfig,
  ExchangeKind,
  make_config,
)
from demo_optax.workers import Workers
from demo_optax.workers.collectives import (
  GATHERED,
  ORDERED_BYTES,
  TO_OWNERS,
)
from demo_optax.workers.param_specs import REPLICATED, ParamSpecs


@dataclasses.dataclass(frozen=True)
class LeafBytes:
  """The bytes of one leaf in an exchange."""

  name: str
  shape: tuple[int, ...]
  num_chunks: int
  chunk: tuple[int, ...]  # lengths along the last two dimensions
  topk: int
  values: str  # as in `dct_topk`; or 'averaged'
  index_code: str  # also 'none', or 'shared' by an all-reduce
  index_bits: float  # per index, a fraction; 0 without indices
  whole: bool  # sent without a transform
  sent_bytes: int  # in a worker's payload, or in the all-reduce
  blocks: tuple[int, ...]  # shards inside a worker, along each dimension
  axes: tuple[str, ...]
  as_unsharded: bool  # in the chunks of an unsharded worker
  small_blocks: bool = False  # a side shorter than that worker's chunk

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def is_large(self) -> bool:
    """Whether more than a tenth of its float32 elements is sent."""
    return self.sent_bytes > 0.4 * self.size

  def max_workers(self, itemsize: int = 4) -> float:
    """Returns the most workers with which an all-reduce receives more."""
    if self.index_code == 'shared':
      return _max_workers(self.size * itemsize, 0, self.sent_bytes)
    return _max_workers(self.size * itemsize, self.sent_bytes, 0)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
  """The bytes of one exchange, printed as a table.

  Attributes:
    leaves: of each leaf that takes part.
    num_devices: number of devices of a worker.
    payload_bytes: of all devices of a worker: its message (with owners, its
      messages to all of them) and averaged leaves of up to 64 KB.
    summed_bytes: bytes that are all-reduced, of all devices of a worker.
    device_bytes: bytes that one device receives per step, by the mesh axes they
      cross: the worker axis, then axes inside a worker, over which updates are
      joined. Scalars on which its devices agree are not counted.
    update_bytes: of the updates of all owners and of averaged leaves of up to
      64 KB; 0 without owners.
    update_values: the code of owners' updates; None without owners.
  """

  leaves: tuple[LeafBytes, ...]
  num_workers: int
  num_devices: int
  payload_bytes: int
  summed_bytes: int
  device_bytes: dict[tuple[str, ...], int]
  update_bytes: int = 0
  update_values: str | None = None

  @property
  def exchange(self) -> str:
    """`'all_to_all'` if chunks have owners, else `'all_gather'`."""
    return 'all_to_all' if self.update_bytes else 'all_gather'

  @property
  def sent_bytes(self) -> int:
    """Bytes that a worker sends: its payload, and its part of the sums."""
    if self.num_workers == 1:
      return 0
    return self._each_way() or self.payload_bytes + self._summed()

  @property
  def received_bytes(self) -> int:
    """Bytes that a worker receives: all other payloads, and the sums."""
    gathered = (self.num_workers - 1) * self.payload_bytes
    return self._each_way() or gathered + self._summed()

  def _summed(self) -> int:
    return _ring(self.summed_bytes, self.num_workers)

  def _each_way(self) -> int:
    """Bytes with owners: messages to them, and updates by a ring."""
    if not self.update_bytes:
      return 0
    both = self.payload_bytes + self.update_bytes
    return both // self.num_workers * (self.num_workers - 1) + self._summed()

  @property
  def size(self) -> int:
    """Number of elements that take part."""
    return sum(leaf.size for leaf in self.leaves)

  def dense_bytes(self, itemsize: int = 4) -> float:
    """Returns the bytes, each way, of a ring all-reduce of the gradient."""
    share = 2 * (self.num_workers - 1) / self.num_workers
    return share * self.size * itemsize

  def max_workers(self, itemsize: int = 4) -> float:
    """Returns the most workers with which an all-reduce receives more.

    An all-gather receives `N - 1` payloads, a ring all-reduce at most twice the
    dense gradient, of `itemsize` bytes per element. Returns 1 if an all-reduce
    always receives less, infinity if it never does, and 0 without leaves.
    """
    if not self.leaves:
      return 0
    dense = self.size * itemsize
    if self.update_bytes:
      both = self.payload_bytes + self.update_bytes
      return math.inf if both + 2 * self.summed_bytes < 2 * dense else 1
    return _max_workers(dense, self.payload_bytes, self.summed_bytes)

  def __str__(self) -> str:
    return f'{self.table()}\n\n{self.totals()}'

  __repr__ = __str__

  def table(self) -> str:
    """Returns what leaves cost; those that differ in name only share a row."""
    return '\n'.join([*_aligned(self._rows()), *self._marks()])

  def _marks(self) -> list[str]:
    """Returns what the marks in the table mean, and what to do."""
    lines = []
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
    small = [leaf.name for leaf in self.leaves if leaf.small_blocks]
    if small:
      lines.append(
          'Blocks are smaller than a chunk, which costs bytes. Shard another'
          f' dimension, or over fewer devices: {", ".join(small)}'
      )
    return lines

  def _rows(self) -> list[tuple[str, ...]]:
    sharded = any(leaf.axes for leaf in self.leaves)
    header = (
        'leaf', 'shape', 'chunks', 'of', 'topk', 'indices', 'bits', 'values',
        'sent', 'pays to',
    )
    rows: list[tuple[str, ...]] = [(*header, 'blocks') if sharded else header]
    alike: dict[LeafBytes, list[LeafBytes]] = {}
    for leaf in self.leaves:
      alike.setdefault(dataclasses.replace(leaf, name=''), []).append(leaf)
    for leaf, members in alike.items():
      more = f' and {len(members) - 1} more' if len(members) > 1 else ''
      row = (
          members[0].name + more,
          _times(leaf.shape) or 'scalar',
          f'{leaf.num_chunks}',
          'whole' if leaf.whole else _times(leaf.chunk),
          'all' if leaf.topk == math.prod(leaf.chunk) else f'{leaf.topk}',
          '-' if leaf.index_code == 'none' else leaf.index_code,
          f'{leaf.index_bits:.2f}' if leaf.index_bits else '-',
          leaf.values,
          _num_bytes(leaf.sent_bytes) + (' each' if more else '')
          + ('!' if leaf.is_large else ''),
          '-' if self.update_bytes
          else _any_of(leaf.max_workers(4), leaf.max_workers(2)),
      )
      mark = '' if leaf.as_unsharded else '*'
      blocks = _times(leaf.blocks) + mark if leaf.axes else '-'
      rows.append((*row, blocks) if sharded else row)
    return rows

  def totals(self) -> str:
    """Returns a worker's bytes, next to those of dense all-reduces."""
    lines = [
        f'{self.size:,} elements, {self.num_workers} workers. Per worker and'
        ' step:'
    ]
    for name, out, back in (
        ('this exchange' if not self.update_bytes else self.exchange,
         self.sent_bytes, self.received_bytes),
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
      if self.num_devices > 1:
        lines.append(
            f'  over {", ".join(axes):<15} receives {_num_bytes(moved):>10}'
        )
    most = _any_of(self.max_workers(4), self.max_workers(2))
    lines.append(
        f'Owners of chunks write updates as {self.update_values!r}:'
        f' {_num_bytes(self.update_bytes)}, all of them together.'
        if self.update_bytes else
        f'Pays to {most} workers: up to there less is received than by an'
        ' all-reduce of float32/bfloat16.'
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
  each of :math:`N > 1` workers

  .. math::
    \text{sends } P + 2\tfrac{N-1}{N} S, \qquad
    \text{receives } (N - 1) P + 2\tfrac{N-1}{N} S.

  With `exchange='all_to_all'` and updates of :math:`U` bytes it

  .. math::
    \text{sends and receives } \tfrac{N-1}N (P + U) + 2\tfrac{N-1}{N} S,

  where :math:`P` and :math:`U` include padding of every owner's share to whole
  chunks. A payload has the values and indices of every kind of chunk, packed
  across chunks, a status and energies, and padding. Each device of a worker has
  its own message. A sharded leaf is cut into chunks shard by shard. They are
  the chunks of an unsharded worker if a shard is a multiple of `chunk_size`.

  Args:
    params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
    compressor: as in `scale_by_demo`.
    workers: the workers of the exchange, or their number.
    exchange: as in `scale_by_demo`.
    update_values: as in `scale_by_demo`.

  Returns:
    A `Plan`. `python -m demo_optax` prints one for a file of shapes.

  Raises:
    TypeError: complex leaves.
    ValueError: fewer than one worker; unknown `exchange` or `update_values`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {'w': jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    >>> plan = demo_optax.plan(params, demo_optax.dct_topk(topk=8), workers=16)
    >>> plan.sent_bytes  # 1024 chunks * (8 * 4 bytes + 87 bits), in whole rows
    44032
    >>> plan.max_workers()
    762
  """
  if isinstance(workers, Workers):
    specs, axis, num_workers = (
        workers.param_specs, workers.axis_name, workers.count,
    )
  else:
    specs, axis = REPLICATED, 'workers'
    if isinstance(workers, bool) or not hasattr(workers, '__index__'):
      raise TypeError(
          f'workers={workers!r} must be demo_optax.Workers, or their number.'
      )
    num_workers = operator.index(workers)
  if num_workers < 1:
    raise ValueError(f'workers={num_workers} must be at least 1.')
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  layout = make_layout(
      [describe_leaf(path, np.shape(x), x, specs) for path, x in flat],
      per_leaf(compressor, params),
      specs.axis_sizes,
  )
  leaves = [
      _leaf_bytes(leaf) for leaf in layout.leaves
      if not isinstance(leaf.compressor, Frozen)
  ]
  averaged = [
      leaf.sent_bytes // math.prod(leaf.blocks)
      for leaf in leaves if leaf.values == 'averaged'
  ]
  gathered = sum(size for size in averaged if size <= ORDERED_BYTES)
  written = resolve_update_values(exchange, update_values)
  config = make_config(layout, 'senders', exchange, num_workers, written)
  own, summed, inside = _device_bytes(config, specs, num_workers)
  summed += sum(averaged) - gathered
  across = config.received_bytes(num_workers) + (num_workers - 1) * gathered
  owners = 1 if config.update_packer is None else num_workers
  told = 0 if config.update_packer is None else config.update_packer.num_bytes
  if told:
    told += gathered
  else:
    own += gathered
  return Plan(
      tuple(leaves),
      num_workers,
      specs.devices,
      own * owners * specs.devices,
      summed * specs.devices,
      {(axis,): across + _ring(summed, num_workers), **inside},
      told * owners * specs.devices,
      written if told else None,
  )


def _leaf_bytes(leaf: Leaf) -> LeafBytes:
  """Returns the bytes of all shards of a leaf."""
  plan, blocks, axes = leaf.plan, leaf.sharding.blocks, leaf.sharding.axes
  if leaf.compressor is None:  # its gradient is averaged uncompressed
    size = math.prod(leaf.shape)
    sent = np.dtype(leaf.dtype).itemsize * size
    return LeafBytes(
        leaf.name, leaf.shape, 1, leaf.shape, size, 'averaged', 'shared', 0.0,
        True, sent, blocks, axes, True,
    )
  assert isinstance(leaf.compressor, Compressor) and plan is not None
  shards = math.prod(blocks)
  grid, chunk_format = plan.grid, plan.format
  alone = leaf.compressor.plan(leaf.shape, leaf.dtype)
  same = not axes or (
      chunk_format == alone.format
      and (grid.lengths, grid.fold) == (alone.grid.lengths, alone.grid.fold)
      and all(lead or b == 1 for lead, b in zip(grid.leads, blocks))
      and shards * grid.num_chunks == alone.grid.num_chunks
      and not any((*grid.padding, *alone.grid.padding))
      and not grid.whole
      and not alone.grid.whole
  )
  code = chunk_format.index_code
  return LeafBytes(
      name=leaf.name,
      shape=leaf.shape,
      num_chunks=shards * grid.num_chunks,
      chunk=grid.lengths if grid.whole else grid.lengths[-2:],
      topk=chunk_format.k,
      values=chunk_format.values,
      index_code='shared' if chunk_format.shared else code.name,
      index_bits=code.bits / chunk_format.k,
      whole=grid.whole,
      sent_bytes=plan.num_bytes * shards,
      blocks=blocks,
      axes=axes,
      as_unsharded=same,
      small_blocks=not alone.grid.whole and any(
          d < l for d, l in zip(grid.folded[-2:], alone.grid.lengths[-2:])
      ),
  )


def _device_bytes(
    config: ExchangeConfig, specs: ParamSpecs, num_workers: int
) -> tuple[int, int, dict[tuple[str, ...], int]]:
  """Bytes per device: gathered, all-reduced, and received within the worker."""
  inside: dict[tuple[str, ...], int] = {}
  own = summed = 0
  for name, (shape, dtype) in config.packer.shapes.items():
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if name == GATHERED:
      own += size
    elif name == TO_OWNERS:
      own += size // num_workers
    else:
      summed += size
  for bucket in config.layout.buckets:
    # Updates are joined along one axis after the other, the innermost first.
    size = bucket.num_chunks * bucket.format.n
    size *= np.dtype(bucket.format.dtype).itemsize
    for axis, devices in reversed(specs.axis_sizes):
      if axis in bucket.split_axes:
        inside[axis,] = inside.get((axis,), 0) + (devices - 1) * size
        size *= devices
  return own, summed, inside


def _ring(size: int, devices: int) -> int:
  """Returns the bytes each way, per device, of a ring all-reduce."""
  return round(2 * size * (devices - 1) / devices)


def _max_workers(dense: int, gathered: int, summed: int) -> float:
  """Returns the largest `N` with `N gathered < 2 (dense - summed)`, or 1."""
  if dense <= summed:
    return 1
  if not gathered:
    return math.inf
  return max(1, math.ceil(2 * (dense - summed) / gathered) - 1)


def _any_of(*workers: float) -> str:
  return '/'.join('any' if n == math.inf else f'{n}' for n in workers)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
  """Aligns the first column to the left, all others to the right."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = []
  for row in rows:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    lines.append('  '.join(cells).rstrip())
  return lines


def _num_bytes(count: float) -> str:
  """Returns bytes in decimal units: 1.2 MB is 1,200,000 bytes."""
  for unit, name in ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
    if count >= unit:
      return f'{count / unit:.2f} {name}'
  return f'{count:.0f} B'


def _times(lengths: Sequence[int]) -> str:
  """Returns a shape such as `'64x64'`; `''` for a scalar."""
  return 'x'.join(map(str, lengths))
