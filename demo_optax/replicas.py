"""Checks that all devices, workers and processes hold the same bits.

Reading a replicated array shows one copy. Here every device digests its copy
(NumPy that of a CPU), and only digests, 8 bytes per leaf and device, are
gathered and compared.
"""

import collections
import statistics
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
  """A leaf's copies that differ from most.

  Attributes:
    leaf: the leaf's path.
    devices: ids of the devices that hold them.
    workers: their workers, if workers on a mesh were given.
    processes: their processes.
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
  one process. Every process must call it, with the same tree, and gets the same
  answer.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> demo_optax.check_replicas({'w': jnp.ones((8, 8))})
    []

  Every device digests its words and their places, in 64 bits: a single
  different word of 32 bits always changes the digest. Compared are copies of
  the same part of an array, such as shards of parameters in different workers.
  Stacked momentum has copies only if devices of a worker replicate it. Arrays
  of one process, NumPy's and numbers are compared between processes.

  Args:
    tree: arrays; of a module give `nnx.state(model)`.
    workers: those on the mesh, to name them.

  Returns:
    For each leaf the copies that differ from the majority, or, of equally many,
    from the copy on the first device.

  Raises:
    ValueError: processes have other trees.
  """
  worker_of: dict[Any, int] = {}
  if workers is not None and workers.kind == 'on_mesh':
    assert workers.mesh is not None
    axis = workers.mesh.axis_names.index(workers.axis_name)
    for index, device in np.ndenumerate(workers.mesh.devices):
      worker_of[device] = index[axis]
  replicated = {}
  for keys, value in leaves_of(tree):
    array = comparable(value)
    held = _without_digests(array)
    blocks = {copy.block for copy in held}
    # What is held once needs no digest.
    if len(blocks) < len(held):
      replicated[keys] = array
  differences = []
  for keys, held in copies(replicated).items():
    devices = set()
    numbers = set()
    processes = set()
    for copy in differing(held):
      processes.add(copy.process)
      if copy.device is not None:
        devices.add(copy.device.id)
      if copy.device in worker_of:
        numbers.add(worker_of[copy.device])
    # All copies are the same otherwise.
    if processes:
      ids = [tuple(sorted(found)) for found in (devices, numbers, processes)]
      differences.append(Difference(dotted(keys), *ids))
  return differences


# Copies -----------------------------------------------------------------------


Array = jax.Array | np.ndarray
Name = TypeVar('Name', bound=Hashable)


class Copy(NamedTuple):
  """A copy of an array's block."""

  device: Any  # None if each process has the whole array
  process: int
  block: str
  digest: bytes = b''  # of uint32[2]


def comparable(value: Any) -> Array:
  """Returns the array that is compared, JAX's if processes share it.

  Else it is NumPy's. Of keys it is their data, of other values a checksum.
  """
  value = prng.words(value)
  if not hasattr(value, 'dtype'):
    return np.asarray(_checksum(repr(value)))
  is_shared = isinstance(value, jax.Array) and (
    jax.process_count() == 1 or not value.is_fully_addressable
  )
  return value if is_shared else np.asarray(value)


def copies(values: Mapping[Name, Any]) -> dict[Name, list[Copy]]:
  """Returns the copies of all arrays' blocks, the same in all processes.

  Raises in all processes if their arrays have other names, shapes or dtypes,
  rather than leave some waiting in a gather.
  """
  arrays: dict[Name, Array] = {}
  lines = []
  for name, value in values.items():
    array = comparable(value)
    arrays[name] = array
    lines.append(f'{name} {array.shape} {array.dtype} {type(array)}')
  _check_tree(lines)
  if not arrays:
    return {}
  digests = [*map(_digest_blocks, arrays.values())]  # all are started first
  # uint32[arrays, devices, 2]
  shape = len(arrays), jax.local_device_count(), 2
  own_digests = np.zeros(shape, np.uint32)
  for row, array_digests in zip(own_digests, digests):
    row[: len(array_digests)] = jax.device_get(array_digests)
  # uint32[processes, arrays, devices, 2]
  gathered = multihost_utils.process_allgather(own_digests)
  held = collections.defaultdict(list)
  for number, (name, array) in enumerate(arrays.items()):
    # A process lists its devices' digests by their numbers.
    in_order = [iter(process_digests[number]) for process_digests in gathered]
    for copy in _without_digests(array):
      digest = next(in_order[copy.process]).tobytes()
      held[name].append(copy._replace(digest=digest))
  return held


def _check_tree(lines: Sequence[str]) -> None:
  """Raises in all processes unless their arrays have one description."""
  checksum = _checksum('\n'.join(lines))
  checksums = np.asarray(multihost_utils.process_allgather(checksum))
  others = np.flatnonzero(checksums != checksums[0])
  if len(others):
    raise ValueError(
      'tree must be the same in all processes, got another one than in process'
      f' 0 in {others.tolist()}. Make the same calls'
      ' in all, with the same names, shapes, dtypes and placement.'
    )


def _checksum(text: str) -> np.uint32:
  return np.uint32(zlib.crc32(text.encode()))


def differing(held: Sequence[Copy]) -> list[Copy]:
  """Returns one array's copies that differ from most for their block."""
  digests = collections.defaultdict(list)
  for copy in held:
    digests[copy.block].append(copy.digest)
  usual = {}
  for block, found in digests.items():
    usual[block] = statistics.mode(found)  # of equally many, the first
  return [copy for copy in held if copy.digest != usual[copy.block]]


def content_digest(held: Sequence[Copy]) -> str:
  """Returns an array's digest, 16 digits, the same for any sharding."""
  # Each block counts once, however many devices hold it.
  blocks = {copy.block: copy.digest for copy in held}
  total = np.zeros(2, np.uint32)  # modulo 2^32, in any order
  for digest in blocks.values():
    total += np.frombuffer(digest, np.uint32)
  return total.astype('>u4').tobytes().hex()


def _without_digests(array: Array) -> list[Copy]:
  """Returns an array's copies in the order of devices, not yet digested."""
  if not isinstance(array, jax.Array):
    return [Copy(None, process, '') for process in range(jax.process_count())]
  held = []
  blocks: Any = array.sharding.devices_indices_map(array.shape)
  for device in sorted(blocks, key=lambda device: device.id):
    block = str(blocks[device])
    held.append(Copy(device, device.process_index, block))
  return held


def _digest_blocks(array: Array) -> list[Array]:
  """Digests an array's blocks in this process, in the order of devices."""
  if not isinstance(array, jax.Array):
    start = np.zeros(array.ndim, np.uint32)
    return [packing.digest_block(array, start, array.shape)]
  digests = []
  shards = array.addressable_shards
  for shard in sorted(shards, key=lambda shard: shard.device.id):
    # Where the block begins: words count with their places in the array.
    starts = [places.start or 0 for places in shard.index]
    start = np.array(starts, np.uint32)
    block: Array = shard.data
    if platform.digests_on_host(shard.device):
      block = np.asarray(block)
    # On this device, not on the mesh that the caller has set.
    this_device = Mesh([shard.device], ('device',))
    with jax.set_mesh(this_device):
      digests.append(packing.digest_block(block, start, array.shape))
  return digests
