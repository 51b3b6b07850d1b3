"""Bytes on the wire, read from compiled code."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from demo_optax.tools import tables

Groups = tuple[tuple[int, ...], ...]

# Texts come from files, too. More devices than this no program has; what is
# said of them is not to be written out before it is looked at.
_MAX_DEVICES = 2**17
_MAX_SIZE = 2**63  # of a shape, in bits


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled function.

  Attributes:
    kind: `'all-gather'`, `'all-reduce'`, `'reduce-scatter'`, `'all-to-all'`,
      `'ragged-all-to-all'`, `'collective-permute'` or `'collective-broadcast'`.
    axes: the mesh axes it runs over, in the order of the mesh; `()` if no
      device has a partner; None without a mesh, or if the groups are not those
      of any axes. Of a collective-permute: the axes along which data moves.
    group_size: devices in a group, the largest if they differ.
    output_bytes: bytes of its outputs on one device.
    sent_bytes: bytes that a device sends, by the ring algorithm.
    received_bytes: bytes that a device receives, by the ring algorithm.
    shapes: its outputs, such as `'f32[4,8]'`.
    groups: the devices that communicate, as places in the flattened mesh; of a
      collective-permute: its pairs `(source, target)`.
    groups_text: the same as the compiler wrote it; `''` if it wrote nothing.
  """

  kind: str
  axes: tuple[str, ...] | None
  group_size: int
  output_bytes: int
  sent_bytes: int
  received_bytes: int
  shapes: tuple[str, ...]
  groups: Groups
  groups_text: str

  def __str__(self) -> str:
    axes = '' if self.axes is None else f' over {", ".join(self.axes) or "-"}'
    return (
        f'{self.kind}{axes} of {self.group_size}: {" ".join(self.shapes)},'
        f' receives {tables.num_bytes(self.received_bytes)} per device'
    )


def collectives(
    compiled: Any, mesh: Mesh | AbstractMesh | None = None
) -> list[Collective]:
  """Returns the collectives of a compiled function, with bytes on the wire.

  With `B` the bytes of the outputs on one device and `g` the devices in a
  group, a device sends and receives, by the ring algorithm: all-gather
  `B (g - 1) / g`, all-reduce `2 B (g - 1) / g`, reduce-scatter `B (g - 1)`,
  all-to-all (at most, if ragged) `B (g - 1) / g`, collective-permute (who takes
  part) and -broadcast `B`. Where an all-gather is counted as what is put into
  it, that is `B / g`.

  Compiled code numbers devices by their places in the flattened mesh, whatever
  their ids. So `mesh` must have the axes, in the order, of the mesh that the
  function was compiled for; its devices are not looked at. Axes of size 1 are
  never listed.

  What is read is this backend's code: CPUs send bfloat16 as float32, for one,
  and TPUs fuse an all-reduce with the slice of it, which is listed as the
  all-reduce.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`, or the text of one.
    mesh: the mesh it was compiled for, to name the axes of each collective.

  Returns:
    The collectives in the order of the text. One inside a loop is listed once,
    and so is an asynchronous one, which is a start and a done.

  Raises:
    TypeError: something without `as_text`; a `mesh` that is none.
    ValueError: what is not compiled, or for another number of devices than the
      mesh has; a dtype, or a spelling of groups, that is not known; more than
      131,072 devices, or than it is compiled for. A text is read in a time in
      proportion to its length, and to the devices of its groups.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> compiled = jax.jit(jnp.sum).lower(jnp.ones(3)).compile()
    >>> demo_optax.tools.collectives(compiled)
    []
    >>> text = '''HloModule step, num_partitions=8
    ... %g = u8[4,100] all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
    ... '''
    >>> mesh = jax.sharding.AbstractMesh((2, 4), ('replica', 'fsdp'))
    >>> for c in demo_optax.tools.collectives(text, mesh):
    ...   print(c.kind, c.axes, c.group_size, c.sent_bytes)
    all-gather ('fsdp',) 4 300

  References:
    Ring collectives: Patarasuk and Yuan, `Bandwidth optimal all-reduce
    algorithms for clusters of workstations
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.
  """
  text = _text(compiled)
  num_devices = _num_devices(text)
  _check_mesh(mesh, num_devices)
  # Most have the groups of one before.
  groups_of = functools.cache(functools.partial(_groups, num_devices))
  found = map(_INSTRUCTION.match, text.splitlines())
  return [_collective(match, groups_of, mesh) for match in found if match]


def _text(compiled: Any) -> str:
  if not isinstance(compiled, str) and not hasattr(compiled, 'as_text'):
    raise TypeError(
        f'{type(compiled).__name__} has no as_text; pass'
        ' jax.jit(f).lower(...).compile().'
    )
  text = compiled if isinstance(compiled, str) else compiled.as_text()
  # What is lowered but not compiled has as_text too, and no collectives yet.
  if not text.startswith('HloModule'):
    raise ValueError(
        f'The text starts with {text[:20]!r}, not with HloModule: it is not'
        ' compiled. Pass jax.jit(f).lower(...).compile().'
    )
  return text


def _num_devices(text: str) -> int:
  """Returns the product of both counts of the header; one of 1 is left out."""
  header = text.split('\n', 1)[0]
  counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', header)
  return _product(' '.join(counts), _MAX_DEVICES, 'devices')


def _check_mesh(mesh: Any, num_devices: int) -> None:
  if mesh is None:
    return
  if not isinstance(mesh, (Mesh, AbstractMesh)):
    raise TypeError(
        f'mesh={mesh!r} must be a mesh, such as jax.make_mesh((8,), ("data",)).'
    )
  if mesh.size != num_devices:
    raise ValueError(
        f'The mesh {dict(mesh.shape)} has {mesh.size} devices, but the function'
        f' is compiled for {num_devices}; pass the mesh it was compiled for.'
    )


# %name = type kind(operands), attributes
#
# A type is `f32[8]{0}`, or a tuple `(f32[8]{0}, /*index=1*/f32[])`: it ends
# before the % of operands and the " of metadata. The -done of a pair does not
# match. Where `async-start` is written instead of, say, `all-gather-start`, the
# all-gather stands in a computation of its own, and is found there.
_INSTRUCTION = re.compile(
    r"""\s*(?:ROOT\ )?\S+\ =\ (?P<type>\([^%"]*\)|[^\s(]\S*)\ (?P<kind>
    all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all
    |collective-permute|collective-broadcast)(?P<start>-start)?
    \((?P<rest>.*)""",
    re.VERBOSE,
)
# dtype[dimensions]{layout}, such as s4[8,128]{1,0:T(8,128)E(4)}. No bracket is
# passed over in search of its end: the search would begin anew at each of them.
_SHAPE = re.compile(r'\b([a-z]\w*)\[([^\[\]]*)\](\{[^{}]*\})?')
# f32, bf16, u8, s4, c64, f8e4m3fn: the first number is the number of bits.
_DTYPE = re.compile(r'(?:[sufc]|bf)(\d+)(?:e\d+m\d+\w*)?')
# {{0,1},{2,3}}: the groups themselves; {}: all devices in one.
# [4,2]<=[2,4]T(1,0): 0..7 in the shape [2,4], transposed, cut into 4 of 2.
# mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}: see `_mesh_groups`.
_GROUPS_ARE = re.compile('replica_groups=|source_target_pairs=')
_GROUPS = re.compile(
    r"""((?P<listed>\{[{}\d,\ ]*\})
    |\[(?P<shape>[\d,]+)\]<=(?P<iota>\[[\d,]+\](?:T\([\d,]+\))?)
    |mesh\[(?P<sizes>[^\]]*)\](?:,\ device_ids=\((?P<ids>[^{]*)\))?
     \ \{(?P<axes>[^}]*)\})""",
    re.VERBOSE,
)
_AXIS_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")  # 'a'=2
_AXIS_PART = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")  # 'a', 'a':(2)4
_MAX_AXES = 32  # of a mesh; NumPy has arrays of 64


def _collective(
    match: re.Match,
    groups_of: Callable[[str, bool], Groups],
    mesh: Mesh | AbstractMesh | None,
) -> Collective:
  kind = match['kind']
  outputs = match['type']
  # The type of a start is (operands, outputs, state...). Only all-reduce-start
  # has the type of its outputs.
  if match['start'] and kind != 'all-reduce':
    elements = _elements(outputs)
    if len(elements) < 2:
      raise ValueError(
          f'{_start_of(outputs)} is the type of a {kind}-start, but not a tuple'
          ' of operands and outputs.'
      )
    outputs = elements[1]
  shapes = _SHAPE.findall(outputs)
  output_bytes = sum(_shape_bytes(*shape) for shape in shapes)
  groups_text = _groups_text(match['rest'])
  groups = groups_of(groups_text, kind == 'collective-permute')
  moved = _ring_bytes(kind, output_bytes, groups)
  return Collective(
      kind=kind,
      axes=None if mesh is None else _axes(kind, groups, mesh),
      group_size=max(map(len, groups), default=1),
      output_bytes=output_bytes,
      sent_bytes=moved,
      received_bytes=moved,
      shapes=tuple(f'{dtype}[{dims}]' for dtype, dims, _ in shapes),
      groups=groups,
      groups_text=groups_text,
  )


def _elements(type_: str) -> list[str]:
  """Splits a tuple at its commas, but for those inside of brackets."""
  ends, depth = [], 0
  for place, character in enumerate(type_[:-1]):
    depth += (character in '([{') - (character in ')]}')
    if character == ',' and depth == 1:
      ends.append(place)
  ends = [0, *ends, len(type_) - 1]
  return [type_[a + 1 : b] for a, b in itertools.pairwise(ends)]


def _shape_bytes(dtype: str, dims: str, layout: str) -> int:
  packed = re.search(r'E\((\d+)\)', layout)  # bits of an element in memory
  if packed:
    bits = _int(packed[1])
  elif dtype == 'pred':
    bits = 8
  elif dtype == 'token':
    bits = 0
  elif width := _DTYPE.fullmatch(dtype):
    bits = max(_int(width[1]), 8)
  else:
    dtype = _start_of(dtype)
    raise ValueError(
        f'{dtype}[{_start_of(dims)}]: the size of dtype {dtype} is unknown.'
    )
  return -(-bits * _product(dims, _MAX_SIZE, 'elements') // 8)


def _ring_bytes(kind: str, output_bytes: int, groups: Groups) -> int:
  if kind == 'collective-permute':
    return output_bytes if any(s != t for s, t in groups) else 0
  if kind == 'collective-broadcast':
    return output_bytes
  size = max(map(len, groups))
  if kind == 'reduce-scatter':
    return output_bytes * (size - 1)
  rounds = 2 if kind == 'all-reduce' else 1
  return round(rounds * output_bytes * (size - 1) / size)


def _groups_text(attributes: str) -> str:
  """Returns an instruction's groups as they are written; '' for none."""
  begin = _GROUPS_ARE.search(attributes)
  if begin is None:
    return ''
  match = _GROUPS.match(attributes, begin.end())
  if match is None:
    start = _start_of(attributes[begin.start() :])
    raise ValueError(f'The groups are not understood: {start}')
  return match[1]


def _groups(num_devices: int, text: str, permute: bool) -> Groups:
  """Returns the groups that `text` says; of a collective-permute its pairs."""
  match = _GROUPS.fullmatch(text)
  if match is None or (text == '{}' and not permute):
    groups: Groups = (tuple(range(num_devices)),)
  elif match['listed']:
    listed = re.findall(r'\{([\d, ]+)\}', match['listed'])
    groups = tuple(tuple(_ints(group)) for group in listed)
  else:
    try:
      groups = _computed_groups(match, num_devices)
    except (KeyError, ValueError, ZeroDivisionError) as error:
      raise ValueError(
          f'The groups are not understood ({_start_of(str(error))}):'
          f' {_start_of(text)}'
      ) from error
  largest = max((max(group) for group in groups if group), default=-1)
  if largest >= num_devices:
    raise ValueError(
        f'Device {largest} is in a group, but the function is compiled for'
        f' {num_devices}.'
    )
  if permute and any(len(pair) != 2 for pair in groups):
    raise ValueError(f'Pairs are wanted, not groups: {_start_of(text)}')
  if not permute and not groups:
    raise ValueError(f'There is no group in it: {_start_of(text)}')
  return groups


def _computed_groups(match: re.Match, num_devices: int) -> Groups:
  if match['iota']:
    ids = _iota(match['iota'], num_devices).reshape(_ints(match['shape']))
  else:
    ids = _mesh_groups(
        match['sizes'], match['ids'], match['axes'], num_devices
    )
  if ids.ndim != 2:
    raise ValueError(f'{ids.ndim} dimensions')
  return tuple(map(tuple, ids.tolist())) if ids.size else ()


def _mesh_groups(
    sizes: str, ids: str | None, axes: str, num_devices: int
) -> np.ndarray:
  """Returns the groups over axes of a mesh that the compiler wrote down.

  Its mesh need not be the user's: XLA makes up some. An axis may be cut: of
  'a'=8, 'a':(2)4 is the inner axis of two, where 'a' is [2, 4].

  Args:
    sizes: axes of the mesh, such as `'a'=2,'b'=4`.
    ids: its devices if not in order: `0,2,1,3`, or as an iota `[2,2]T(1,0)`.
    axes: those the groups run over, such as `'a','b':(2)2`.
    num_devices: that the function is compiled for.

  Returns:
    The groups, an array of shape (groups, devices in a group).
  """
  mesh = {name: _int(size) for name, size in _listed(_AXIS_SIZE, sizes)}
  # As (axis, size of what is outside of it, size).
  inner = [
      (name, _int(outside or '1'), _int(size) if size else mesh[name])
      for name, outside, size in _listed(_AXIS_PART, axes)
  ]
  parts = []  # the mesh, with every axis cut where one of `inner` cuts it
  for name, size in mesh.items():
    cuts = {n for axis, a, b in inner if axis == name for n in (a, a * b)}
    cuts |= {1, size}
    parts += [(name, a, b // a) for a, b in itertools.pairwise(sorted(cuts))]
  last = [parts.index(part) for part in inner if part[2] > 1]
  first = [i for i in range(len(parts)) if i not in last]
  if ids is None:
    devices = _arange(list(mesh.values()), num_devices)
  else:
    devices = (
        _iota(ids, num_devices) if '[' in ids else np.array(_ints(ids))
    )
  devices = devices.reshape([size for _, _, size in parts])
  group_size = math.prod(parts[i][2] for i in last)
  return devices.transpose(first + last).reshape(-1, group_size)


def _iota(text: str, num_devices: int) -> np.ndarray:
  """`[2,4]T(1,0)`: 0..7 in the shape [2, 4], transposed; flat."""
  dims, _, permutation = text.partition('T')
  ids = _arange(_ints(dims), num_devices).reshape(_ints(dims))
  return ids.transpose(_ints(permutation) or range(ids.ndim)).ravel()


# Numbers and lists, which may be of any length --------------------------------


def _arange(dims: list[int], num_devices: int) -> np.ndarray:
  return np.arange(_product(dims, num_devices, 'devices'))


def _listed(pattern: re.Pattern, text: str) -> list[tuple[str, ...]]:
  """Returns the groups of `pattern` in each of `a,b,c`."""
  parts = text.split(',') if text else []
  if len(parts) > _MAX_AXES:
    raise ValueError(f'{len(parts)} axes')
  found = [pattern.fullmatch(part.strip()) for part in parts]
  if None in found:
    raise ValueError(f'{_start_of(parts[found.index(None)])!r} is no axis')
  return [match.groups('') for match in found if match]


def _product(numbers: Any, limit: int, what: str) -> int:
  numbers = _ints(numbers) if isinstance(numbers, str) else numbers
  if 0 in numbers:
    return 0
  product = 1
  for number in numbers:
    product *= number
    if product > limit:
      raise ValueError(f'More than {limit:,} {what}: {numbers[:8]}')
  return product


def _ints(text: str) -> list[int]:
  return [_int(number) for number in re.findall(r'\d+', text)]


def _int(digits: str) -> int:
  if len(digits) > 18:
    raise ValueError(f'{_start_of(digits)} is too large a number.')
  return int(digits)


def _start_of(text: str) -> str:
  return text if len(text) <= 200 else f'{text[:200]}...'


def _axes(
    kind: str, groups: Groups, mesh: Mesh | AbstractMesh
) -> tuple[str, ...] | None:
  """Returns the axes along which the devices of a group have different places.

  If a group has as many devices as these axes, it has all of them.
  """
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
