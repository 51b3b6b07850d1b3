"""Collectives, with their bytes on the wire, read from compiled code.

`collectives(compiled, mesh)` reads `jax.jit(f).lower(...).compile().as_text()`.
With `B` the bytes of the outputs on one device and `g` the devices in a group,
a device sends and receives, by the ring algorithm: all-gather and all-to-all
`B (g - 1) / g`, all-reduce twice that, reduce-scatter `B (g - 1)`,
collective-permute and -broadcast `B`. One inside a loop is listed once.

Compiled code numbers devices by their places in the flattened mesh. What is
read is this backend's code: CPUs send bfloat16 as float32, for one.
"""

import dataclasses
import itertools
import math
import re

import numpy as np


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


def collectives(compiled, mesh=None):
  """The collectives of a compiled function, or of its text, in its order."""
  text = compiled if isinstance(compiled, str) else compiled.as_text()
  header = text.split('\n', 1)[0]
  # What is lowered but not compiled has no collectives yet.
  assert header.startswith('HloModule'), header
  counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', header)
  num_devices = math.prod(map(int, counts))
  assert mesh is None or mesh.size == num_devices, (mesh, header)
  found = map(_INSTRUCTION.match, text.splitlines())
  return [_collective(match, num_devices, mesh) for match in found if match]


# %name = type kind(operands), attributes
#
# A type is `f32[8]{0}`, or a tuple `(f32[8]{0}, /*index=1*/f32[])`. The -done of
# a pair does not match. Where `async-start` is written instead of, say,
# `all-gather-start`, the all-gather is in a computation of its own.
_INSTRUCTION = re.compile(
    r"""\s*(?:ROOT\ )?\S+\ =\ (?P<type>\([^%"]*\)|[^\s(]\S*)\ (?P<kind>
    all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all
    |collective-permute|collective-broadcast)(?P<start>-start)?
    \((?P<rest>.*)""",
    re.VERBOSE,
)
# dtype[dimensions]{layout}, such as s4[8,128]{1,0:T(8,128)E(4)}.
_SHAPE = re.compile(r'\b([a-z]\w*)\[([^\[\]]*)\](\{[^{}]*\})?')
# f32, bf16, u8, s4, c64, f8e4m3fn: the first number is the number of bits.
_DTYPE = re.compile(r'(?:[sufc]|bf)(\d+)(?:e\d+m\d+\w*)?')
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


def _collective(match, num_devices, mesh):
  kind, outputs = match['kind'], match['type']
  # The type of a start is (operands, outputs, state...). Only all-reduce-start
  # has the type of its outputs.
  if match['start'] and kind != 'all-reduce':
    outputs = _elements(outputs)[1]
  shapes = _SHAPE.findall(outputs)
  output_bytes = sum(_shape_bytes(*shape) for shape in shapes)
  groups = _groups(match['rest'], num_devices, kind == 'collective-permute')
  return Collective(
      kind=kind,
      axes=None if mesh is None else _axes(kind, groups, mesh),
      group_size=max(map(len, groups), default=1),
      output_bytes=output_bytes,
      received_bytes=_ring_bytes(kind, output_bytes, groups),
      shapes=tuple(f'{dtype}[{dims}]' for dtype, dims, _ in shapes),
      groups=groups,
  )


def _elements(type_):
  """Splits a tuple at its commas, but for those inside of brackets."""
  ends, depth = [0], 0
  for place, character in enumerate(type_[:-1]):
    depth += (character in '([{') - (character in ')]}')
    if character == ',' and depth == 1:
      ends.append(place)
  return [type_[a + 1 : b] for a, b in itertools.pairwise([*ends, len(type_) - 1])]


def _shape_bytes(dtype, dims, layout):
  packed = re.search(r'E\((\d+)\)', layout)  # bits of an element in memory
  if packed:
    bits = int(packed[1])
  elif dtype in ('pred', 'token'):
    bits = {'pred': 8, 'token': 0}[dtype]
  else:
    bits = max(int(_DTYPE.fullmatch(dtype)[1]), 8)
  return -(-bits * math.prod(_ints(dims)) // 8)


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
    return tuple(tuple(_ints(group)) for group in listed)
  if match['iota']:
    ids = _iota(match['iota']).reshape(_ints(match['shape']))
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
          r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes)
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
    devices = _iota(ids) if '[' in ids else np.array(_ints(ids))
  devices = devices.reshape([size for _, _, size in parts])
  group_size = math.prod(parts[i][2] for i in last)
  return devices.transpose(first + last).reshape(-1, group_size)


def _iota(text):
  """`[2,4]T(1,0)`: 0..7 in the shape [2, 4], transposed; flat."""
  dims, _, permutation = text.partition('T')
  ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
  return ids.transpose(_ints(permutation) or range(ids.ndim)).ravel()


def _ints(text):
  return [int(number) for number in re.findall(r'\d+', text)]


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
