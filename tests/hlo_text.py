"""Reads compiled code: instructions, and collectives with their bytes.

`collectives(compiled, mesh)` reads `jax.jit(f).lower(...).compile().as_text()`.
With `B` the bytes of the outputs on one device and `g` the devices in a group,
a device sends and receives, by the ring algorithm: all-gather and all-to-all
`B (g - 1) / g`, all-reduce twice that, reduce-scatter `B (g - 1)`,
collective-permute and -broadcast `B`. One inside a loop is listed once.

Compiled code numbers devices by their places in the flattened mesh. What is
read is this backend's code: CPUs send bfloat16 as float32, for one.
"""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Instruction:
  """`%name = type op(operands), attributes`."""

  name: str
  type: str
  op: str
  operands: tuple[str, ...]
  attributes: str
  root: bool

  def attribute(self, key):
    found = re.search(rf'\b{key}=%?([\w.\-]+)', self.attributes)
    return found and found[1]

  @property
  def arrays(self):
    """`(dtype, dimensions, layout)` of its type, such as `f32[8]{0}`."""
    return _ARRAY.findall(self.type)

  @property
  def bytes(self):
    return sum(size_of(*array) for array in self.arrays)


_HEAD = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
# A type is `f32[8]{0}`, or a tuple `(f32[8]{0}, /*index=1*/f32[])`.
_LINE = re.compile(
  r'\s+(ROOT )?%?([\w.\-]+) = (\((?:[^=]|index=)*?\)|\S+) ([a-z][\w\-]*)\((.*)'
)
# dtype[dimensions]{layout}, such as s4[8,128]{1,0:T(8,128)E(4)}.
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?')
# f32, bf16, u8, s4, c64, f8e4m3fn: the first number is the number of bits.
_DTYPE = re.compile(r'(?:[sufc]|bf)(\d+)(?:e\d+m\d+\w*)?')
# What moves nothing, or is counted where it runs.
FREE = {
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'while',
  'conditional',
  'call',
  'after-all',
  'partition-id',
  'replica-id',
  'opt-barrier',
  'async-start',
  'async-done',
  'async-update',
}


class Module:
  """A compiled program."""

  def __init__(self, text):
    self.text, self.bodies, self.entry = text, {}, None
    body = None
    for line in text.splitlines():
      if head := _HEAD.match(line):
        body = self.bodies[head[2]] = {}
        self.entry = head[2] if head[1] else self.entry
      elif line.startswith('}'):
        body = None
      elif body is not None and (match := _LINE.match(line)):
        root, name, type_, op, rest = match.groups()
        operands, attributes = _split(rest)
        body[name] = Instruction(
          name,
          type_,
          op,
          tuple(re.findall(r'%([\w.\-]+)', operands)),
          f'{operands}){attributes}' if op == 'constant' else attributes,
          bool(root),
        )
    assert self.entry is not None, text[:200]

  @functools.cached_property
  def runs(self):
    """How often each computation runs that is no part of a kernel."""
    runs, queue = {self.entry: 1}, [self.entry]
    for name in queue:
      for x in self.bodies[name].values():
        inner = []
        if x.op == 'while':
          inner = [(x.attribute('body'), self.trips(x))]
        elif x.op == 'conditional':
          branches = re.search(r'branch_computations=\{([^}]*)\}', x.attributes)
          found = (
            re.findall(r'[\w.\-]+', branches[1])
            if branches
            else re.findall(
              r'(?:true|false)_computation=%?([\w.\-]+)', x.attributes
            )
          )
          inner = [(branch, 1) for branch in found]
        elif x.op in ('call', 'async-start'):
          inner = [(x.attribute('to_apply') or x.attribute('calls'), 1)]
        for body, times in inner:
          if body in self.bodies:
            runs[body] = runs.get(body, 0) + runs[name] * times
            if body not in queue:
              queue.append(body)
    return runs

  def trips(self, loop):
    """How often a loop turns: as XLA says, or what its counter is compared to."""
    known = re.search(r'known_trip_count[^\d]*(\d+)', loop.attributes)
    if known:
      return int(known[1])
    condition = self.bodies[loop.attribute('condition')]
    inside = [
      self.bodies[x.attribute('calls')]
      for x in condition.values()
      if x.op == 'fusion'
    ]
    limits = [
      int(x.attributes.split(')')[0])
      for body in (condition, *inside)
      for x in body.values()
      if x.op == 'constant' and re.match(r'[su]32\[\]', x.type)
    ]
    assert limits, loop
    return max(limits)

  @property
  def kernels(self):
    """What is run: an instruction, and how often."""
    for name, times in self.runs.items():
      for x in self.bodies[name].values():
        if x.op not in FREE:
          yield x, times

  def all(self, *ops):
    return [
      x for body in self.bodies.values() for x in body.values() if x.op in ops
    ]


def _split(rest):
  """Splits `operands), attributes`."""
  depth = 1
  for place, character in enumerate(rest):
    depth += (character in '([{') - (character in ')]}')
    if not depth:
      return rest[:place], rest[place + 1 :]
  return rest, ''


def ints(text):
  return [int(number) for number in re.findall(r'\d+', text)]


def size_of(dtype, dims, layout=''):
  """Bytes of an array."""
  packed = re.search(r'E\((\d+)\)', layout)  # bits of an element in memory
  if packed:
    bits = int(packed[1])
  elif dtype in ('pred', 'token'):
    bits = {'pred': 8, 'token': 0}[dtype]
  else:
    bits = max(int(_DTYPE.fullmatch(dtype)[1]), 8)
  return -(-bits * math.prod(ints(dims)) // 8)


# Collectives ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled function.

  Attributes:
    kind: such as `'all-gather'`.
    axes: the mesh axes it runs over, in the order of the mesh; `()` if no
      device has a partner; None without a mesh, or if the groups are not those
      of any axes. Of a collective-permute: the axes along which data moves.
    group_size: devices in a group, the largest if they differ.
    output_bytes: bytes of its outputs on one device.
    received_bytes: bytes that a device receives, and sends.
    shapes: its outputs, such as `'f32[4,8]'`.
    groups: the devices that communicate, as places in the flattened mesh; of a
      collective-permute: its pairs `(source, target)`.
  """

  kind: str
  axes: tuple[str, ...] | None
  group_size: int
  output_bytes: int
  received_bytes: int
  shapes: tuple[str, ...]
  groups: tuple[tuple[int, ...], ...]


KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'ragged-all-to-all',
  'all-to-all',
  'collective-permute',
  'collective-broadcast',
)


def collectives(compiled, mesh=None):
  """The collectives of a compiled function, or of its text, in its order."""
  text = compiled if isinstance(compiled, str) else compiled.as_text()
  header = text.split('\n', 1)[0]
  # What is lowered but not compiled has no collectives yet.
  assert header.startswith('HloModule'), header
  counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', header)
  num_devices = math.prod(map(int, counts))
  assert mesh is None or mesh.size == num_devices, (mesh, header)
  found, chains = [], set()
  # The -done of a pair does not match. Where `async-start` is written instead
  # of `all-gather-start`, the all-gather is in a computation of its own.
  for x in Module(text).all(*KINDS, *(f'{kind}-start' for kind in KINDS)):
    # XLA:TPU spreads a collective over several kernels.
    chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', x.attributes)
    if chain is None or chain.groups() not in chains:
      found.append(_collective(x, num_devices, mesh))
    chains.add(chain and chain.groups())
  return found


# {{0,1},{2,3}}: the groups themselves; {}: all devices in one.
# [4,2]<=[2,4]T(1,0): 0..7 in the shape [2,4], transposed, cut into 4 of 2.
# mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}: see `_mesh_groups`.
_GROUPS = re.compile(
  r"""(?:replica_groups|source_target_pairs)=
    ((?P<listed>\{[{}\d,\ ]*\})
    |\[(?P<shape>[\d,]+)\]<=(?P<iota>\[[\d,]+\](?:T\([\d,]+\))?)
    |mesh\[(?P<sizes>[^\]]*)\](?:,\ device_ids=\((?P<ids>[^{]*)\))?
     \ \{(?P<axes>[^}]*)\})""",
  re.VERBOSE,
)


def _collective(x, num_devices, mesh):
  kind, arrays = x.op.removesuffix('-start'), x.arrays
  # The type of a start is (operands, outputs, state...). Only all-reduce-start
  # has the type of its outputs.
  if x.op != kind != 'all-reduce':
    count = len(x.operands)
    arrays = arrays[count : 2 * count]
  output_bytes = sum(size_of(*array) for array in arrays)
  groups = _groups(x.attributes, num_devices, kind == 'collective-permute')
  return Collective(
    kind=kind,
    axes=None if mesh is None else _axes(kind, groups, mesh),
    group_size=max(map(len, groups), default=1),
    output_bytes=output_bytes,
    received_bytes=_ring_bytes(kind, output_bytes, groups),
    shapes=tuple(f'{dtype}[{dims}]' for dtype, dims, _ in arrays),
    groups=groups,
  )


def _ring_bytes(kind, output_bytes, groups):
  if kind == 'collective-permute':
    return output_bytes if any(s != t for s, t in groups) else 0
  if kind == 'collective-broadcast':
    return output_bytes
  size = max(map(len, groups))
  if kind == 'reduce-scatter':
    return output_bytes * (size - 1)
  rounds = 2 if kind == 'all-reduce' else 1
  return round(rounds * output_bytes * (size - 1) / size)


def _groups(attributes, num_devices, permute):
  match = _GROUPS.search(attributes)
  if match is None:
    assert '_groups=' not in attributes, attributes  # in another spelling
    return (tuple(range(num_devices)),)
  if match['listed'] == '{}' and not permute:
    return (tuple(range(num_devices)),)
  if match['listed']:
    listed = re.findall(r'\{([\d, ]+)\}', match['listed'])
    return tuple(tuple(ints(group)) for group in listed)
  if match['iota']:
    ids = _iota(match['iota']).reshape(ints(match['shape']))
  else:
    ids = _mesh_groups(match['sizes'], match['ids'], match['axes'])
  return tuple(map(tuple, ids.tolist()))


def _mesh_groups(sizes, ids, axes):
  """The groups `[groups, devices]` over axes of a mesh of the compiler's own.

  sizes are the axes of that mesh, `'a'=2,'b'=4`; ids its devices, if not in
  order: `0,2,1,3`, or `[2,2]T(1,0)`; axes what the groups run over. An axis may
  be cut: of 'a'=8, 'a':(2)4 is the inner axis of four, where 'a' is [2, 4].
  """
  mesh = {a: int(n) for a, n in re.findall(r"'?([^',=]+)'?=(\d+)", sizes)}
  # As (axis, size of what is outside of it, size).
  inner = [
    (name, int(outside or 1), int(size or mesh[name]))
    for name, outside, size in re.findall(
      r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes
    )
  ]
  parts = []  # the mesh, with every axis cut where one of `inner` cuts it
  for name, size in mesh.items():
    cuts = {n for axis, a, b in inner if axis == name for n in (a, a * b)}
    cuts |= {1, size}
    parts += [(name, a, b // a) for a, b in itertools.pairwise(sorted(cuts))]
  last = [parts.index(part) for part in inner if part[2] > 1]
  first = [i for i in range(len(parts)) if i not in last]
  if ids is None:
    devices = np.arange(math.prod(mesh.values()))
  else:
    devices = _iota(ids) if '[' in ids else np.array(ints(ids))
  devices = devices.reshape([size for _, _, size in parts])
  group_size = math.prod(parts[i][2] for i in last)
  return devices.transpose(first + last).reshape(-1, group_size)


def _iota(text):
  """`[2,4]T(1,0)`: 0..7 in the shape [2, 4], transposed; flat."""
  dims, _, permutation = text.partition('T')
  ids = np.arange(math.prod(ints(dims))).reshape(ints(dims))
  return ids.transpose(ints(permutation) or range(ids.ndim)).ravel()


def _axes(kind, groups, mesh):
  """The axes along which the devices of a group have different places."""
  if len(set(map(len, groups))) > 1:
    return None
  members = np.array(groups or ((0,),))  # a permute may have no pairs
  places = np.unravel_index(members, mesh.axis_sizes)  # per axis, as members
  axes = tuple(
    name
    for name, place in zip(mesh.axis_names, places)
    if np.any(place != place[:, :1])
  )
  complete = members.shape[1] == math.prod(mesh.shape[name] for name in axes)
  return axes if complete or kind == 'collective-permute' else None
