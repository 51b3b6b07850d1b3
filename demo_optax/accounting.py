"""Bytes on the wire, predicted from shapes."""

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import chex
import jax
import numpy as np

from demo_optax import trees, wire
from demo_optax.compressors import Compressor, LeafPlan
from demo_optax.specs import ParamSpecs, Path
from demo_optax.workers import Workers


@dataclasses.dataclass(frozen=True)
class LeafBytes:
  """What one leaf costs in an exchange.

  Attributes:
    name: path of the leaf.
    shape: its shape.
    size: number of elements.
    num_chunks: number of chunks it is cut into.
    chunk: length of a chunk along the last two dimensions.
    topk: coefficients sent per chunk.
    values: how values are written, as in `dct_topk`.
    index_code: how indices are written: `'fixed'`, `'bitmap'`, `'elias-fano'`,
      or `'none'` if everything is sent.
    index_bits: bits per index, a fraction; 0 if everything is sent.
    whole: whether it is sent as it is, without a transform.
    sent_bytes: bytes in a worker's payload, all its blocks together.
    blocks: blocks it is sharded into inside a worker, along each dimension.
    axes: the mesh axes that it is sharded over.
    as_unsharded: whether its chunks are those of an unsharded worker.
  """

  name: str
  shape: tuple[int, ...]
  size: int
  num_chunks: int
  chunk: tuple[int, ...]
  topk: int
  values: str
  index_code: str
  index_bits: float
  whole: bool
  sent_bytes: int
  blocks: tuple[int, ...]
  axes: tuple[str, ...]
  as_unsharded: bool

  def max_workers(self, itemsize: int = 4) -> int:
    """The most workers with which less is received than by an all-reduce."""
    return _max_workers(self.size, itemsize, self.sent_bytes)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes of one exchange; `print` it for a table.

  Attributes:
    leaves: per leaf that takes part, what it costs.
    num_workers: number of workers.
    num_devices: number of devices of a worker.
    sent_bytes: size of a worker's payload, from all its devices.
    device_bytes: bytes that one device receives in a step, and sends by the
      ring algorithm, by the mesh axes that they cross: first the worker axis,
      then, if a worker is several devices, those inside it, over which parts
      are rejoined and the devices agree on taking part.
  """

  leaves: tuple[LeafBytes, ...]
  num_workers: int
  num_devices: int
  sent_bytes: int
  device_bytes: dict[tuple[str, ...], int]

  @property
  def received_bytes(self) -> int:
    """Bytes that a worker receives: the payloads of all others."""
    return (self.num_workers - 1) * self.sent_bytes

  @property
  def device_sent_bytes(self) -> int:
    """Size of the part of a payload that comes from one device."""
    return self.sent_bytes // self.num_devices

  @property
  def size(self) -> int:
    """Number of elements that take part."""
    return sum(leaf.size for leaf in self.leaves)

  def dense_bytes(self, itemsize: int = 4) -> float:
    """Bytes each way, per worker, of a ring all-reduce of the gradient.

    Args:
      itemsize: bytes per element: 4 for float32, 2 for bfloat16.

    Returns:
      `2 (N - 1) / N * size * itemsize`.
    """
    share = 2 * (self.num_workers - 1) / self.num_workers
    return share * self.size * itemsize

  def max_workers(self, itemsize: int = 4) -> int:
    """The most workers with which less is received than by an all-reduce.

    An all-gather receives `N - 1` payloads; a ring all-reduce receives
    `2 (N - 1) / N` times the dense gradient, however many the workers.

    Args:
      itemsize: bytes per element of the all-reduced gradient.

    Returns:
      The largest such `N`; 1 if there is none, 0 if nothing takes part.
    """
    if not self.leaves:
      return 0
    return _max_workers(self.size, itemsize, self.sent_bytes)

  def __str__(self) -> str:
    return f'{self.table()}\n\n{self.totals()}'

  def table(self) -> str:
    """What each leaf costs; leaves that differ in name only share a row."""
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
          'all' if leaf.index_code == 'none' else f'{leaf.topk}',
          '-' if leaf.index_code == 'none' else leaf.index_code,
          f'{leaf.index_bits:.2f}' if leaf.index_bits else '-',
          leaf.values,
          _bytes(leaf.sent_bytes) + (' each' if more else ''),
          f'{leaf.max_workers(4)}/{leaf.max_workers(2)}',
      )
      mark = '' if leaf.as_unsharded else '*'
      blocks = _times(leaf.blocks) + mark if leaf.axes else '-'
      rows.append((*row, blocks) if sharded else row)
    lines = _table(rows)
    if not all(leaf.as_unsharded for leaf in self.leaves):
      lines.append(
          '* cut into other chunks than on one device: results depend on how it'
          ' is sharded.'
      )
    return '\n'.join(lines)

  def totals(self) -> str:
    """What a worker sends and receives, beside dense all-reduces."""
    return '\n'.join(self._totals())

  def _totals(self) -> Iterator[str]:
    yield (
        f'{self.size:,} elements, {self.num_workers} workers. Per worker and'
        ' step:'
    )
    for name, sent, received in (
        ('this exchange', self.sent_bytes, self.received_bytes),
        ('all-reduce float32', self.dense_bytes(4), self.dense_bytes(4)),
        ('all-reduce bfloat16', self.dense_bytes(2), self.dense_bytes(2)),
    ):
      yield (
          f'  {name:<20} sends {_bytes(sent):>10}, receives'
          f' {_bytes(received):>10}'
      )
    if self.num_devices > 1:
      yield f'A worker is {self.num_devices} devices. Per device and step:'
      for axes, moved in self.device_bytes.items():
        yield f'  over {", ".join(axes):<15} receives {_bytes(moved):>10}'
    yield (
        f'Pays to {self.max_workers(4)}/{self.max_workers(2)} workers: up to'
        ' there less is received than by an all-reduce of float32/bfloat16.'
    )


def plan(
    params: chex.ArrayTree, compressor: Compressor, workers: Workers | int
) -> Plan:
  """What an exchange will send, before anything is run.

  A payload is, over the kinds of chunks, the values and the indices, packed
  across chunks, plus one status byte; `dct_topk` has the bits of each. If a
  worker is several devices, each sends what it alone has, and its share of what
  several have.

  A sharded leaf is cut into chunks block by block. Its chunks are those of an
  unsharded worker, and the results the same to the bit, if along its last two
  dimensions the chunk length of a block is that of the whole dimension and
  divides the block, as it does if a block is a multiple of `chunk_size`, and if
  neither is sent whole; `as_unsharded` tells.

  Args:
    params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
    compressor: what is sent.
    workers: who takes part, or how many.

  Returns:
    A `Plan`; its `sent_bytes` is the exact size of a payload. `python -m
    demo_optax` prints one for named shapes or a file of shapes.

  Raises:
    TypeError: complex leaves.
    ValueError: fewer than one worker.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {'w': jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    >>> plan = demo_optax.plan(params, demo_optax.dct_topk(topk=8), workers=16)
    >>> plan.sent_bytes  # 1024 chunks * (8 * 4 bytes + 87 bits), and the status
    43905
    >>> plan.max_workers()
    764

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_; its figures count what is sent only.
  """
  if isinstance(workers, Workers):
    specs, axis, num_workers = (
        workers.param_specs, workers.axis_name, workers.count,
    )
  else:
    specs, axis = ParamSpecs(None, {}, 'workers'), 'workers'
    num_workers = operator.index(workers)
  if num_workers < 1:
    raise ValueError(f'workers={num_workers} must be at least 1.')
  leaves, formats = [], []
  for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    if not trees.is_exchanged(x):
      continue
    leaf, block = _leaf_bytes(path, x, compressor, specs)
    leaves.append(leaf)
    formats.append((block.format, block.grid.num_chunks))
  moved: dict[tuple[str, ...], int] = {(axis,): 0}
  sent = 0
  if leaves:
    payload = wire.Payload(formats, [leaf.axes for leaf in leaves])
    sent, inside = _device_bytes(payload, specs, num_workers)
    moved = {(axis,): (num_workers - 1) * sent, **inside}
  return Plan(
      tuple(leaves), num_workers, specs.devices, sent * specs.devices, moved
  )


def _leaf_bytes(
    path: Path, x: Any, compressor: Compressor, specs: ParamSpecs
) -> tuple[LeafBytes, LeafPlan]:
  """What a leaf costs, and the plan of one of its blocks."""
  shape, dtype = np.shape(x), trees.momentum_dtype(path, x)
  placement = specs.place(path, shape)
  leaf = compressor.plan_blocks(shape, dtype, placement.blocks)
  block = leaf.with_blocks((1,) * len(shape))
  alone = compressor.plan(shape, dtype)
  same = not placement.axes or (
      leaf.format == alone.format
      and leaf.grid.lengths == alone.grid.lengths
      and leaf.grid.counts == alone.grid.counts
      and not any((*leaf.grid.padding, *alone.grid.padding))
      and not leaf.grid.whole
      and not alone.grid.whole
  )
  leaf_bytes = LeafBytes(
      name=trees.leaf_name(path),
      shape=shape,
      size=math.prod(shape),
      num_chunks=leaf.grid.num_chunks,
      chunk=leaf.grid.lengths[-2:],
      topk=leaf.format.k,
      values=leaf.format.values,
      index_code=leaf.format.index_code.name,
      index_bits=leaf.format.index_code.bits / leaf.format.k,
      whole=leaf.grid.whole,
      sent_bytes=block.num_bytes * math.prod(placement.blocks),
      blocks=placement.blocks,
      axes=placement.axes,
      as_unsharded=same,
  )
  return leaf_bytes, block


def _device_bytes(
    payload: wire.Payload, specs: ParamSpecs, num_workers: int
) -> tuple[int, dict[tuple[str, ...], int]]:
  """What a device sends, and what it receives inside the worker, by axes."""
  sizes = dict(specs.axis_sizes)
  sent = 0
  inside: dict[tuple[str, ...], int] = {}
  for axes, layout in payload.layouts.items():
    alike = tuple(axis for axis in specs.axes if axis not in axes)
    devices = math.prod(sizes[axis] for axis in alike)
    share = -(-layout.num_bytes // devices)
    sent += share
    if devices > 1:  # rejoined
      inside[alike] = num_workers * share * (devices - 1)
  if specs.devices > 1:  # agreed on, by an all-reduce of an int32
    agreed = round(2 * 4 * (specs.devices - 1) / specs.devices)
    inside[specs.axes] = inside.get(specs.axes, 0) + agreed
  return sent, inside


def _max_workers(size: int, itemsize: int, sent_bytes: int) -> int:
  """The largest `N` with `sent_bytes < 2 / N size itemsize`; 1 for none."""
  return max(1, math.ceil(2 * size * itemsize / sent_bytes) - 1)


def _times(lengths: tuple[int, ...]) -> str:
  return 'x'.join(map(str, lengths))


def _bytes(count: float) -> str:
  """A number of bytes as people write it: 1.2 MB is 1,200,000 bytes."""
  for unit, name in ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
    if count >= unit:
      return f'{count / unit:.2f} {name}'
  return f'{count:.0f} B'


def _table(rows: list[tuple[str, ...]]) -> list[str]:
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = []
  for row in rows:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    lines.append('  '.join(cells).rstrip())
  return lines
