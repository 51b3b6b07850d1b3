"""Checks that all devices, workers and processes hold the same bits.

Reading a replicated array shows one copy. Here every device digests its copy
(NumPy that of a CPU), and only digests, 8 bytes per leaf and device, are
gathered and compared.
"""

import collections
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from demo_optax._paths import dotted, leaves_of
from demo_optax.numerics import packing, platform, prng
from demo_optax.workers import Workers


class Difference(NamedTuple):
  """Copies of a leaf that differ from most of its copies.

  Attributes:
    leaf: the leaf's path.
    devices: ids of the devices that hold them.
    workers: the workers of these devices, if workers on a mesh were given.
    processes: the processes of these devices.
  """

  leaf: str
  devices: tuple[int, ...]
  workers: tuple[int, ...]
  processes: tuple[int, ...]


def check_replicas(
  tree: chex.ArrayTree,
  workers: Workers | None = None,
) -> list[Difference]:
  """Compares all copies of every array in `tree` that is held more than once.

  Training does not show a bit flipped in memory, or an update that differs in
  one process. Every device digests its words and their places, in 64 bits: a
  single different word of 32 bits always changes the digest. Compared are
  copies of the same part of an array, such as shards of parameters in different
  workers. Stacked momentum has copies only if devices of a worker replicate it.
  Arrays of one process, NumPy's and numbers are compared between processes.

  Of a module give `nnx.state(model)`. Every process must call it, with the same
  tree, and gets the same answer: for each leaf the copies that differ from the
  majority, or, of equally many, from the copy on the first device. With
  `workers` on a mesh, it names the workers.
  """
  worker_of: dict[Any, int] = {}
  if workers is not None and workers.spmd_axis_name is not None:
    assert workers.mesh is not None
    axis = workers.mesh.axis_names.index(workers.spmd_axis_name)
    for index, device in np.ndenumerate(workers.mesh.devices):
      worker_of[device] = index[axis]
  several = {}
  for keys, x in leaves_of(tree):
    if len(_holders(x)) > 1:
      several[keys] = x
  found = []
  for keys, held in copies(several).items():
    devices, numbers, processes = set(), set(), set()
    for copy in differing(held):
      processes.add(copy.process)
      if copy.device is not None:
        devices.add(copy.device.id)
      if copy.device in worker_of:
        numbers.add(worker_of[copy.device])
    if processes:
      sets = map(sorted, (devices, numbers, processes))
      found.append(Difference(dotted(keys), *map(tuple, sets)))
  return found


# Copies -----------------------------------------------------------------------


Array = jax.Array | np.ndarray
Name = TypeVar('Name', bound=Hashable)


class Copy(NamedTuple):
  """A copy of a block of an array."""

  device: Any  # None if it is not known to all processes
  process: int
  block: str
  digest: bytes  # of uint32[2]


def copies(values: Mapping[Name, Any]) -> dict[Name, list[Copy]]:
  """Returns the copies of all blocks of arrays, in all processes the same.

  Other values are compared by a checksum. Raises in all processes if their
  arrays have other names, shapes or dtypes, rather than leave some waiting in a
  gather.
  """
  arrays: dict[Name, Any] = {}
  lines = []
  for name, x in values.items():
    if not hasattr(x, 'dtype'):
      x = _checksum(repr(x))
    arrays[name] = x
    lines.append(f'{name} {x.shape} {x.dtype} {is_local(x)}')
  shape = len(arrays), jax.local_device_count(), 2
  own = np.zeros(shape, np.uint32)
  digests = [*map(_digest_blocks, arrays.values())]  # all are started first
  for row, digest in zip(own, digests):
    row[: len(digest)] = jax.device_get(digest)
  tree = _checksum('\n'.join(lines))
  trees = np.asarray(multihost_utils.process_allgather(tree))
  if (trees != trees[0]).any():
    raise ValueError(
      'tree must be the same in all processes, got another one than in process'
      f' 0 in {np.flatnonzero(trees != trees[0]).tolist()}. Make the same calls'
      ' in all, with the same names, shapes, dtypes and placement.'
    )
  every = own  # uint32[processes, arrays, devices, 2]
  if arrays:
    every = multihost_utils.process_allgather(own)
  held: dict[Name, list[Copy]] = {}
  for number, (name, x) in enumerate(arrays.items()):
    in_order = [iter(of_process[number]) for of_process in every]
    held[name] = []
    for device, process, block in _holders(x):
      digest = next(in_order[process]).tobytes()
      held[name].append(Copy(device, process, block, digest))
  return held


def _checksum(text: str) -> np.uint32:
  return np.uint32(zlib.crc32(text.encode()))


def differing(held: Sequence[Copy]) -> list[Copy]:
  """Returns the copies of one array that differ from most of their block."""
  counts = collections.Counter((copy.block, copy.digest) for copy in held)
  usual: dict[str, bytes] = {}
  for (block, digest), _ in counts.most_common():
    usual.setdefault(block, digest)
  return [copy for copy in held if copy.digest != usual[copy.block]]


def content_digest(held: Sequence[Copy]) -> str:
  """Returns the digest of an array, 16 digits, the same for any sharding."""
  blocks = {copy.block: copy.digest for copy in held}
  total = np.zeros(2, np.uint32)  # modulo 2^32, in any order
  for digest in blocks.values():
    total += np.frombuffer(digest, np.uint32)
  return total.astype('>u4').tobytes().hex()


def is_local(x: Array) -> bool:
  """Returns whether each of several processes holds all of an array."""
  is_whole = not isinstance(x, jax.Array) or x.is_fully_addressable
  return is_whole and jax.process_count() > 1


def has_copies(x: object) -> bool:
  """Returns whether several devices have the same part of one array."""
  if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
    return False
  blocks = [block for _, _, block in _holders(x)]
  return not is_local(x) and len({*blocks}) < len(blocks)


def _holders(x: Array) -> list[tuple[Any, int, str]]:
  """Returns device, process and block of each copy, in the order of devices."""
  found: list[tuple[Any, int, str]] = [(None, 0, '')]
  if isinstance(x, jax.Array):
    blocks: Any = x.sharding.devices_indices_map(x.shape)
    devices = sorted(blocks, key=lambda device: device.id)
    found = [(d, d.process_index, str(blocks[d])) for d in devices]
  if not is_local(x):
    return found
  numbers = range(jax.process_count())
  return [(None, n, block) for n in numbers for _, _, block in found]


def _digest_blocks(x: Array) -> list[Array]:
  """Digests the blocks of an array in this process, as `_holders` orders."""
  if not isinstance(x, jax.Array):
    x = np.asarray(x)
    start = np.zeros(x.ndim, np.uint32)
    return [packing.digest_block(x, start, x.shape)]
  if prng.is_key_array(x):
    x = jax.random.key_data(x)
  found = []
  for shard in sorted(x.addressable_shards, key=lambda s: s.device.id):
    # Where the block begins: words count with their places in the array.
    starts = [part.start or 0 for part in shard.index]
    start = np.array(starts, np.uint32)
    if platform.digests_on_host(shard.device):
      data = np.asarray(shard.data)
      found.append(packing.digest_block(data, start, x.shape))
      continue
    # On this device, not on the mesh that the caller has set.
    mesh = Mesh([shard.device], ('device',))
    with jax.set_mesh(mesh):
      found.append(packing.digest_block(shard.data, start, x.shape))
  return found
