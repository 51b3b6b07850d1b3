"""Checks that all devices, workers and processes hold the same bits.

Reading a replicated array shows one copy. Here every device digests its copy,
and only digests (8 bytes per leaf and device) are gathered and compared.
"""

import collections
import functools
import zlib
from collections.abc import Iterable, Sequence
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

  With `workers` on a mesh it warns of momentum that is replicated over them.
  Every process must call it, with the same tree, and gets the same answer.

  Args:
    tree: parameters, optimizer state, or both; `nnx.state(model)` of a module;
      arrays of any shape and dtype.
    workers: if given, differences name the workers on the mesh.

  Returns:
    The differences, leaf by leaf: copies that differ from the majority, or, of
    equally many, from the copy on the first device.

  Raises:
    ValueError: processes called it with different trees.
  """
  if workers is not None and workers.mesh is not None:
    state.warn_if_replicated(tree, workers.axis_name)
  flat = [
      (_tree.leaf_name(path), comparable(x))
      for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
  ]
  found = between_processes(flat)  # first, since it checks the trees
  several = [(name, x) for name, x in flat if _num_devices(x) > 1]
  for (name, _), held in zip(several, _held([x for _, x in several])):
    blocks = collections.defaultdict(list)
    for device, block, digest_of in held:
      blocks[block].append((device, digest_of.tobytes()))
    other = [d for copies in blocks.values() for d in _minority(copies)]
    if other:
      found.append(_difference(name, other, workers))
  order = [name for name, _ in flat]
  return sorted(found, key=lambda difference: order.index(difference.leaf))


def _num_devices(x: Any) -> int:
  return len(x.sharding.device_set) if isinstance(x, jax.Array) else 0


def is_local(x: Any) -> bool:
  """Returns whether this process holds all of an array."""
  return not isinstance(x, jax.Array) or x.is_fully_addressable


def _minority(copies: list[tuple[Any, bytes]]) -> list[Any]:
  """Returns the holders of digests that differ from most."""
  counts = collections.Counter(digest for _, digest in copies)
  ((usual, _),) = counts.most_common(1)
  return [holder for holder, digest in copies if digest != usual]


def _difference(
    name: str, devices: Iterable[Any], workers: Workers | None
) -> Difference:
  devices = sorted(devices, key=lambda d: d.id)
  positions: set[int] = set()
  if workers is not None and workers.mesh is not None:
    mesh = workers.mesh
    axis = mesh.axis_names.index(workers.axis_name)
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    for device in devices:
      positions |= set(np.argwhere(ids == device.id)[:, axis].tolist())
  return Difference(
      name,
      tuple(d.id for d in devices),
      tuple(sorted(positions)),
      tuple(sorted({d.process_index for d in devices})),
  )


def _held(arrays: Sequence[Any]) -> list[list[tuple[Any, str, np.ndarray]]]:
  """Returns the device, block and digest of each array's copies.

  Every device digests its block. Digests of arrays that span processes are
  gathered, so that all processes return the same.
  """
  found: list[list[tuple[Any, str, Any]]] = []
  spread = []
  for x in map(_without_key, arrays):
    blocks = x.sharding.devices_indices_map(x.shape)
    mine = []
    for shard in sorted(x.addressable_shards, key=lambda s: s.device.id):
      # On this device, not on the mesh that the caller has set.
      with jax.set_mesh(Mesh([shard.device], ('device',))):
        found_here = _digest_shard(shard.data, _start(shard.index), x.shape)
      mine.append((shard.device, found_here))
    if not x.is_fully_addressable:
      spread.append((len(found), mine, blocks))
    found.append([(d, str(blocks[d]), digest_of) for d, digest_of in mine])
  if spread:
    own = np.zeros((len(spread), jax.local_device_count(), 2), np.uint32)
    for row, (_, mine, _) in enumerate(spread):
      own[row, : len(mine)] = [np.asarray(digest_of) for _, digest_of in mine]
    every = multihost_utils.process_allgather(own)
    for row, (number, _, blocks) in enumerate(spread):
      places = collections.Counter[int]()  # the next one of a process
      found[number] = []
      for d in sorted(blocks, key=lambda d: d.id):
        digest_of = every[d.process_index, row, places[d.process_index]]
        found[number].append((d, str(blocks[d]), digest_of))
        places[d.process_index] += 1
  return [[(d, b, np.asarray(x)) for d, b, x in held] for held in found]


def _start(index: tuple[slice, ...]) -> np.ndarray:
  return np.array([s.start or 0 for s in index], np.uint32)


def _without_key(x: Any) -> Any:
  is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x


# Between processes ------------------------------------------------------------


def between_processes(flat: list[tuple[str, Any]]) -> list[Difference]:
  """Returns the differences between leaves that every process holds whole."""
  if jax.process_count() == 1:
    return []
  _check_same_tree(flat)
  local = [(name, x) for name, x in flat if is_local(x)]
  if not local:
    return []
  mine = np.stack(_contents([x for _, x in local]))
  every = multihost_utils.process_allgather(mine)  # [processes, leaves, 2]
  found = []
  for place, (name, _) in enumerate(local):
    other = _minority([(p, bytes(row[place])) for p, row in enumerate(every)])
    if other:
      found.append(Difference(name, (), (), tuple(other)))
  return found


def comparable(x: Any) -> Any:
  """Returns an array unchanged, and a checksum of any other value."""
  return x if hasattr(x, 'dtype') else np.uint32(zlib.crc32(repr(x).encode()))


def _check_same_tree(flat: list[tuple[str, Any]]) -> None:
  """Raises on all processes, rather than leave some waiting in a gather."""
  text = '\n'.join(
      f'{name} {x.shape} {x.dtype} {is_local(x)}' for name, x in flat
  )
  mine = np.uint32(zlib.crc32(text.encode()))
  every = np.asarray(multihost_utils.process_allgather(mine))
  if (every != every[0]).any():
    other = np.flatnonzero(every != every[0]).tolist()
    raise ValueError(
        f'Processes {other} gave another tree than process 0: all must make the'
        ' same calls, with the same names, shapes, dtypes and placement.'
    )


# Digests ----------------------------------------------------------------------


def content_digests(arrays: dict[str, Any]) -> dict[str, str]:
  """Returns a digest of each array, 16 digits, for any sharding.

  Sums the digests of the blocks, one copy of each. All processes must call it
  with the same names.
  """
  digests = _contents(list(arrays.values()))
  return {name: np.asarray(x).astype('>u4').tobytes().hex()
          for name, x in zip(arrays, digests)}


def _contents(arrays: Sequence[Any]) -> list[np.ndarray]:
  on_devices = iter(_held([x for x in arrays if isinstance(x, jax.Array)]))
  found = []
  for x in arrays:
    if isinstance(x, jax.Array):
      blocks = {block: digest_of for _, block, digest_of in next(on_devices)}
      found.append(sum(blocks.values(), np.zeros(2, np.uint32)))
    else:
      found.append(_digest_on_host(x))
  return found


@functools.partial(jax.jit, static_argnums=2)
def _digest_shard(
    x: jax.Array, start: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
  """Returns the part of a digest from one block of an array, uint32 `[2]`."""
  words = _words(x)  # u32[*block, words of an element]
  place = jnp.zeros(words.shape, jnp.uint32)
  for d, length in enumerate((*shape, words.shape[-1])):
    along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, d)
    if d < len(shape):
      along = along + start[d]
    place = place * jnp.uint32(length) + along
  return digest(words, place)


def digest(words: Any, place: Any) -> Any:
  """Hashes `words` and their places, uint32, to uint32 `[2]`."""
  xp = np if isinstance(words, np.ndarray) else jnp
  weighted = words * (place * xp.uint32(2) + xp.uint32(1))
  mixed = words + place * xp.uint32(0x9E3779B9)
  mixed = (mixed ^ (mixed >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
  mixed = mixed ^ (mixed >> xp.uint32(16))
  return xp.stack([
      xp.sum(weighted, dtype=xp.uint32), xp.sum(mixed, dtype=xp.uint32)
  ])


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32 `[*shape, n]`."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], -1)
  else:
    x = x[..., None]
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  if _is_below_a_byte(x.dtype):
    x = x.astype(jnp.float32)  # exact; bits below a byte are not addressable
  bits = x.dtype.itemsize * 8
  narrow = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
  words = jax.lax.bitcast_convert_type(x, narrow)  # 64 bits: two words each
  if words.ndim > x.ndim:
    words = words.reshape(*x.shape[:-1], -1)
  return words.astype(jnp.uint32)


def _digest_on_host(x: Any) -> np.ndarray:
  """Returns the digest of an array that this process holds."""
  x = np.asarray(x)
  if _is_below_a_byte(x.dtype):
    x = x.astype(np.float32)
  size = x.dtype.itemsize // (2 if x.dtype.kind == 'c' else 1)
  narrow = {1: np.uint8, 2: np.uint16}.get(size, np.uint32)
  words = np.frombuffer(x.tobytes(), narrow).astype(np.uint32)
  return digest(words, np.arange(words.size, dtype=np.uint32))


def _is_below_a_byte(dtype: Any) -> bool:
  kinds = 'int4', 'uint4', 'int2', 'uint2', 'float4'
  return dtype.name.startswith(kinds)
