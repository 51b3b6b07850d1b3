"""Bytes on the wire: predicted from shapes, and read from compiled code."""

import dataclasses
import math
import operator
import re
from typing import Any

import chex
import jax
import numpy as np

from demo_optax import trees, wire
from demo_optax.compressors import Compressor
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
    index_code: how indices are written: `'fixed'`, `'bitmap'`, `'elias-fano'`,
      or `'none'` if everything is sent.
    index_bits: bits per index, a fraction; 0 if everything is sent.
    sent_bytes: bytes in the payload.
  """

  name: str
  shape: tuple[int, ...]
  size: int
  num_chunks: int
  chunk: tuple[int, ...]
  topk: int
  index_code: str
  index_bits: float
  sent_bytes: int

  @property
  def is_whole(self) -> bool:
    """Whether the leaf is sent as it is."""
    return self.num_chunks == 1 and self.index_code == 'none'


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes of one exchange; `print` it for a table.

  Attributes:
    leaves: per leaf that takes part, what it costs.
    num_workers: number of workers.
    sent_bytes: size of a worker's payload.
  """

  leaves: tuple[LeafBytes, ...]
  num_workers: int
  sent_bytes: int

  @property
  def received_bytes(self) -> int:
    """Bytes that a worker receives: the payloads of all others."""
    return (self.num_workers - 1) * self.sent_bytes

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
      The largest such `N`.
    """
    if not self.leaves:
      return 0
    return math.ceil(2 * self.size * itemsize / self.sent_bytes) - 1

  def __str__(self) -> str:
    header = ('leaf', 'shape', 'chunks', 'of', 'topk', 'index bits', 'sent')
    rows = [
        (
            leaf.name,
            'x'.join(map(str, leaf.shape)) or 'scalar',
            f'{leaf.num_chunks}',
            'whole' if leaf.is_whole else 'x'.join(map(str, leaf.chunk)),
            f'{leaf.topk}',
            f'{leaf.index_bits:.2f}' if leaf.index_bits else '-',
            _bytes(leaf.sent_bytes),
        )
        for leaf in self.leaves
    ]
    lines = _table([header, *rows])
    lines.append('')
    lines.append(
        f'{self.size:,} elements, {self.num_workers} workers. Per worker and'
        ' step:'
    )
    for name, sent, received in (
        ('this exchange', self.sent_bytes, self.received_bytes),
        ('all-reduce float32', self.dense_bytes(4), self.dense_bytes(4)),
        ('all-reduce bfloat16', self.dense_bytes(2), self.dense_bytes(2)),
    ):
      lines.append(
          f'  {name:<20} sends {_bytes(sent):>10}, receives'
          f' {_bytes(received):>10}'
      )
    lines.append(
        'Less is received than by an all-reduce with up to'
        f' {self.max_workers(4)} workers (float32), {self.max_workers(2)}'
        ' (bfloat16).'
    )
    return '\n'.join(lines)


def plan(
    params: chex.ArrayTree, compressor: Compressor, workers: Workers | int
) -> Plan:
  """What an exchange will send, before anything is run.

  A payload is, over the kinds of chunks, the values and the indices, packed
  across chunks, plus one status byte; `dct_topk` has the bits of each.

  Args:
    params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
    compressor: what is sent.
    workers: who takes part, or how many.

  Returns:
    A `Plan`; its `sent_bytes` is the exact size of a payload.

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
    num_workers = workers.count
  else:
    num_workers = operator.index(workers)
  if num_workers < 1:
    raise ValueError(f'workers={num_workers} must be at least 1.')
  leaves, formats = [], []
  for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    if not trees.is_exchanged(x):
      continue
    name = trees.leaf_name(path)
    leaf = compressor.plan(np.shape(x), trees.momentum_dtype(name, x))
    formats.append((leaf.format, leaf.grid.num_chunks))
    leaves.append(
        LeafBytes(
            name=name,
            shape=np.shape(x),
            size=math.prod(np.shape(x)),
            num_chunks=leaf.grid.num_chunks,
            chunk=leaf.grid.lengths[-2:],
            topk=leaf.format.k,
            index_code=leaf.format.index_code.name,
            index_bits=leaf.format.index_code.bits / leaf.format.k,
            sent_bytes=leaf.num_bytes,
        )
    )
  sent = wire.Layout(formats).num_bytes if leaves else 0
  return Plan(tuple(leaves), num_workers, sent)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled function.

  Attributes:
    kind: `'all-gather'`, `'all-reduce'`, `'reduce-scatter'`, `'all-to-all'`,
      `'ragged-all-to-all'`, `'collective-permute'` or `'collective-broadcast'`.
    shapes: its outputs, such as `'f32[4,8]'`.
    output_bytes: bytes of its outputs on one device.
    groups: the devices that communicate, as the compiler wrote them.
    group_size: devices in a group.
    sent_bytes: bytes that a device sends, by the ring algorithm.
    received_bytes: bytes that a device receives, by the ring algorithm.
  """

  kind: str
  shapes: tuple[str, ...]
  output_bytes: int
  groups: str
  group_size: int
  sent_bytes: int
  received_bytes: int


def collectives(compiled: Any) -> list[Collective]:
  """Every collective of a compiled function, with its bytes on the wire.

  With `B` the bytes of the outputs on one device and `g` the devices in a
  group, a device sends and receives, by the ring algorithm: all-gather
  `B (g - 1) / g`, all-reduce `2 B (g - 1) / g`, reduce-scatter `B (g - 1)`,
  all-to-all (at most, if ragged) `B (g - 1) / g`, collective-permute and
  -broadcast `B`. Where an all-gather is
  counted as what is put into it, that is `B / g`.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`, or the text of one.

  Returns:
    The collectives in the order of the text. One inside a loop is listed once.

  Raises:
    TypeError: something without `as_text`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> compiled = jax.jit(jnp.sum).lower(jnp.ones(3)).compile()
    >>> demo_optax.collectives(compiled)
    []

  References:
    Ring collectives: Patarasuk and Yuan, `Bandwidth optimal all-reduce
    algorithms for clusters of workstations
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.
  """
  if isinstance(compiled, str):
    text = compiled
  elif hasattr(compiled, 'as_text'):
    text = compiled.as_text()
  else:
    raise TypeError(
        f'{type(compiled).__name__} has no as_text; pass'
        ' jax.jit(f).lower(...).compile().'
    )
  default_group = _num_devices(text)
  found = []
  for line in text.splitlines():
    line = _LAYOUT.sub('', line)
    match = _COLLECTIVE.search(line)
    if match and match['phase'] != '-done':
      found.append(_collective(match, line, default_group))
  return found


_KINDS = (
    'all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all'
    '|collective-permute|collective-broadcast'
)
_COLLECTIVE = re.compile(
    rf'= (?P<type>\(.*\)|\S+) (?P<kind>{_KINDS})(?P<phase>-start|-done)?\('
)
_LAYOUT = re.compile(r'(?<=\])\{[^}]*\}')  # f32[8,8]{1,0:T(8,128)}
_SHAPE = re.compile(r'\b([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\]')


def _collective(match: re.Match, line: str, default_group: int) -> Collective:
  kind = match['kind']
  shapes = _SHAPE.findall(match['type'])
  if match['phase'] == '-start' and kind != 'all-reduce' and len(shapes) > 1:
    # A start gives (operands, outputs, ...): the outputs are the second part.
    nested = re.match(r'\(\((.*?)\)', match['type'])
    operands = len(_SHAPE.findall(nested[1])) if nested else 1
    shapes = shapes[operands : 2 * operands]
  size = sum(_shape_bytes(*shape) for shape in shapes)
  groups, group_size = _groups(line, default_group)
  if kind in ('collective-permute', 'collective-broadcast'):
    moved = size
  else:
    share = (group_size - 1) / group_size
    factor = {
        'all-gather': share,
        'all-reduce': 2 * share,
        'reduce-scatter': group_size - 1,
        'all-to-all': share,
        'ragged-all-to-all': share,
    }[kind]
    moved = round(size * factor)
  return Collective(
      kind=kind,
      shapes=tuple(f'{dtype}[{dims}]' for dtype, dims in shapes),
      output_bytes=size,
      groups=groups,
      group_size=group_size,
      sent_bytes=moved,
      received_bytes=moved,
  )


def _groups(line: str, default: int) -> tuple[str, int]:
  """The replica groups of an instruction and the size of one."""
  listed = re.search(r'replica_groups=(\{\{[0-9,{} ]*\}\}|\{\})', line)
  if listed:
    first = listed[1][2:].split('}')[0]
    return listed[1], len(first.split(',')) if first else default
  iota = re.search(r'replica_groups=(\[([0-9,]+)\]<=\[[^\s,]*)', line)
  if iota:
    return iota[1], int(iota[2].split(',')[-1])
  axes = re.search(r'replica_groups=(mesh\[(.*?)\] *\{(.*?)\})', line)
  if axes:
    sizes = dict(re.findall(r"['\"]?([\w.]+)['\"]?=([0-9]+)", axes[2]))
    names = re.findall(r"[\w.]+", axes[3])
    return axes[1], math.prod(int(sizes[name]) for name in names)
  return '', default


def _num_devices(text: str) -> int:
  header = text.split('\n', 1)[0]
  counts = re.findall(r'(?:num_partitions|replica_count)=(\d+)', header)
  return max([1, *map(int, counts)])


def _shape_bytes(dtype: str, dims: str) -> int:
  bits = re.search(r'\d+', dtype)
  size = 1 if dtype == 'pred' or not bits else max(int(bits[0]), 8) // 8
  return size * math.prod(int(d) for d in dims.split(',') if d)


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
