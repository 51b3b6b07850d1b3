"""Checks that all devices, workers and processes hold the same bits.

Reading a replicated array shows one copy. Here every device digests its copy,
and only digests (8 bytes per leaf and device) are gathered and compared.
"""

import collections
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from demo_optax import _tree, state
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
    tree: chex.ArrayTree, workers: Workers | None = None
) -> list[Difference]:
  r"""Compares all copies of every array in `tree` that is held more than once.

  Parameters must be equal on all workers, to the bit. Training does not show a
  bit flipped in memory, or an update that differs in one process. Every device
  digests its 32-bit words :math:`x_i`,

  .. math::
    \sum_i (2 i + 1)\, x_i \bmod 2^{32}, \qquad
    \sum_i h(x_i + 2^{32} i / \phi) \bmod 2^{32},

  with a hash `h`, and `i` the word's place in the whole array. A single
  different word always changes the first. Compared are copies of the same part
  of an array. For parameters sharded inside a worker, these are the shards of
  other workers; stacked momentum has copies only if devices of a worker
  replicate it. Arrays of one process alone, NumPy arrays and numbers are
  compared between processes.

  With `workers` on a mesh, differences name the workers, and it warns of
  momentum that is replicated over them. Every process must call it, with the
  same tree, and gets the same answer.

  The tree may hold parameters, optimizer state, or both, arrays of any shape
  and dtype; of a module give `nnx.state(model)`. Differences are found leaf by
  leaf: copies that differ from the majority, or, of equally many, from the copy
  on the first device.
  """
  if workers is not None and workers.spmd_axis_name is not None:
    state.warn_if_replicated(tree, workers.axis_name)
  flat = [
      (_tree.leaf_name(path), comparable(x))
      for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
  ]
  found = between_processes(flat)  # first, since it checks the trees
  several = [
      (name, x) for name, x in flat
      if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
  ]
  for (name, _), held in zip(several, _held([x for _, x in several])):
    blocks = collections.defaultdict(list)
    for device, block, digest in held:
      blocks[block].append((device, digest))
    other = [d for copies in blocks.values() for d in _minority(copies)]
    if other:
      found.append(_difference(name, other, workers))
  order = [name for name, _ in flat]
  return sorted(found, key=lambda difference: order.index(difference.leaf))


def _minority(copies: list[tuple[Any, np.ndarray]]) -> list[Any]:
  """Returns the holders of digests that differ from most."""
  counts = collections.Counter(digest.tobytes() for _, digest in copies)
  ((usual, _),) = counts.most_common(1)
  return [holder for holder, digest in copies if digest.tobytes() != usual]


def _difference(
    name: str, devices: list[Any], workers: Workers | None
) -> Difference:
  positions: set[int] = set()
  if workers is not None and workers.mesh is not None and not workers.relay:
    axis = workers.mesh.axis_names.index(workers.axis_name)
    for index, device in np.ndenumerate(workers.mesh.devices):
      if device in devices:
        positions.add(index[axis])
  return Difference(
      name,
      tuple(sorted(d.id for d in devices)),
      tuple(sorted(positions)),
      tuple(sorted({d.process_index for d in devices})),
  )


# Between processes ------------------------------------------------------------


def between_processes(flat: list[tuple[str, Any]]) -> list[Difference]:
  """Returns the differences between leaves that every process holds whole.

  Raises on all processes if their trees differ, rather than leave some waiting
  in a gather.
  """
  if jax.process_count() == 1:
    return []
  text = '\n'.join(
      f'{name} {x.shape} {x.dtype} {is_local(x)}' for name, x in flat
  )
  mine = np.uint32(zlib.crc32(text.encode()))
  trees = np.asarray(multihost_utils.process_allgather(mine))
  if (trees != trees[0]).any():
    other = np.flatnonzero(trees != trees[0]).tolist()
    raise ValueError(
        f'Processes {other} gave another tree than process 0: all must make the'
        ' same calls, with the same names, shapes, dtypes and placement.'
    )
  local = [(name, x) for name, x in flat if is_local(x)]
  if not local:
    return []
  contents = np.stack(_contents([x for _, x in local]))
  every = multihost_utils.process_allgather(contents)  # [processes, leaves, 2]
  found = []
  for place, (name, _) in enumerate(local):
    other = _minority([(p, row[place]) for p, row in enumerate(every)])
    if other:
      found.append(Difference(name, (), (), tuple(other)))
  return found


def comparable(x: Any) -> Any:
  """Returns an array unchanged, and a checksum of any other value."""
  return x if hasattr(x, 'dtype') else np.uint32(zlib.crc32(repr(x).encode()))


def is_local(x: Any) -> bool:
  """Returns whether this process holds all of an array."""
  return not isinstance(x, jax.Array) or x.is_fully_addressable


# Digests ----------------------------------------------------------------------


def content_digests(arrays: dict[str, Any]) -> dict[str, str]:
  """Returns a digest of each array, 16 digits, for any sharding.

  All processes must call it with the same names.
  """
  digests = _contents(list(arrays.values()))
  return {
      name: x.astype('>u4').tobytes().hex() for name, x in zip(arrays, digests)
  }


def _contents(arrays: Sequence[Any]) -> list[np.ndarray]:
  """Sums the digests of the blocks of each array, one copy of each."""
  on_devices = iter(_held([x for x in arrays if isinstance(x, jax.Array)]))
  found = []
  for x in arrays:
    if isinstance(x, jax.Array):
      blocks = {block: digest for _, block, digest in next(on_devices)}
      found.append(sum(blocks.values(), np.zeros(2, np.uint32)))
    else:
      x = _narrow(np.asarray(x))
      start = np.zeros(x.ndim, np.uint32)
      found.append(np.asarray(digest_block(x, start, x.shape)))
  return found


def _held(arrays: Sequence[jax.Array]) -> list[list[tuple[Any, str, Any]]]:
  """Returns the device, block and digest of each array's copies.

  Every device digests its block, and processes gather the digests, if there
  are several: all return the same.
  """
  found: list[list[tuple[Any, str, Any]]] = []
  if not arrays:
    return found
  computed = []
  for x in arrays:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    digests = []
    for shard in sorted(x.addressable_shards, key=lambda s: s.device.id):
      start = np.array([s.start or 0 for s in shard.index], np.uint32)
      # On this device, not on the mesh that the caller has set.
      with jax.set_mesh(Mesh([shard.device], ('device',))):
        digests.append(digest_block(shard.data, start, x.shape))
    computed.append(digests)
  every = np.zeros((len(arrays), jax.local_device_count(), 2), np.uint32)
  for row, digests in zip(every, computed):
    row[: len(digests)] = jax.device_get(digests)
  every = every[None]
  if jax.process_count() > 1:
    every = multihost_utils.process_allgather(every[0])
  for number, x in enumerate(arrays):
    blocks: Any = x.sharding.devices_indices_map(x.shape)
    places = collections.Counter[int]()  # the next one of a process
    held = []
    for d in sorted(blocks, key=lambda d: d.id):
      p = d.process_index
      held.append((d, str(blocks[d]), every[p, number, places[p]]))
      places[p] += 1
    found.append(held)
  return found


@functools.partial(jax.jit, static_argnums=2)
def digest_block(
    x: jax.Array, start: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
  """Returns the part of a digest from one block of an array, uint32 `[2]`.

  The block has the first element `start` of an array of `shape`. Hashes words
  and their places there.
  """
  words = _words(x)  # u32[*block, words of an element]
  place = jnp.zeros(words.shape, jnp.uint32)
  for d, length in enumerate((*shape, words.shape[-1])):
    along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, d)
    if d < len(shape):
      along = along + start[d]
    place = place * jnp.uint32(length) + along
  weighted = words * (place * jnp.uint32(2) + jnp.uint32(1))
  mixed = words + place * jnp.uint32(0x9E3779B9)
  mixed = (mixed ^ (mixed >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
  mixed = mixed ^ (mixed >> jnp.uint32(16))
  return jnp.stack([
      jnp.sum(weighted, dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)
  ])


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32 `[*shape, n]`."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], -1)
  else:
    x = x[..., None]
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  if x.dtype.name.startswith(('int4', 'uint4', 'int2', 'uint2', 'float4')):
    x = x.astype(jnp.float32)  # exact; bits below a byte are not addressable
  bits = x.dtype.itemsize * 8
  narrow = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
  words = jax.lax.bitcast_convert_type(x, narrow)  # 64 bits: two words each
  if words.ndim > x.ndim:
    words = words.reshape(*x.shape[:-1], -1)
  return words.astype(jnp.uint32)


def _narrow(x: np.ndarray) -> np.ndarray:
  """Returns numbers of more than 32 bits as uint32 `[*shape, n]`."""
  n = x.dtype.itemsize // 4
  if n < 2:
    return x
  return np.frombuffer(x.tobytes(), np.uint32).reshape(*x.shape, n)
