"""Whether all devices, workers and processes hold the same bits.

What is replicated is computed by everybody and compared by nobody: reading such
an array shows one copy. Here every device digests what it holds itself, and
only digests (8 bytes per leaf and device) are gathered and compared.
"""

import collections
import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import _tree
from demo_optax.tools import placement
from demo_optax.workers import Workers


class Difference(NamedTuple):
  """Copies of a leaf that are not as most of its copies are.

  Attributes:
    leaf: the leaf's path.
    devices: ids of the devices that hold them.
    workers: the workers that these devices belong to, if workers on a mesh were
      given.
    processes: the processes that these devices belong to.
  """

  leaf: str
  devices: tuple[int, ...]
  workers: tuple[int, ...]
  processes: tuple[int, ...]


def check_replicas(
    tree: chex.ArrayTree, workers: Workers | None = None
) -> list[Difference]:
  r"""Compares all copies of everything in `tree` that is held more than once.

  Parameters are to be the same on all workers to the bit, and nothing in a step
  would show that they are not: a bit flipped in memory, or an update that one
  process did differently, makes runs drift apart unseen. Every device digests
  the 32-bit words :math:`x_i` that it holds,

  .. math::
    \sum_i (2 i + 1)\, x_i \bmod 2^{32}, \qquad
    \sum_i h(x_i + 2^{32} i / \phi) \bmod 2^{32},

  with a hash `h` and `i` the word's place in the whole array; a single word
  that differs always changes the first. Copies are compared that cover the same
  part of an array: of parameters sharded inside a worker, the counterparts in
  the other workers; of stacked momentum nothing, unless the devices of a worker
  hold it alike. Arrays of one process alone, NumPy arrays and numbers are
  compared between processes.

  With `workers` on a mesh it warns of momentum that is replicated over them.

  Every process must call it, with the same tree. All of them always take part
  in the same gathers, whatever they find, and get the same answer.

  Args:
    tree: parameters, optimizer state, or both; `nnx.state(model)` of a module;
      arrays `[...]` of any shape and dtype.
    workers: if given, differences tell which workers on a mesh it is.

  Returns:
    The differences, leaf by leaf; none if all copies are the same. Those copies
    differ that are not as most are; of equally many, those that are not as on
    the first device.

  Raises:
    ValueError: processes called it with different _tree.
    TypeError: a leaf spread over processes without a mesh.

  Example:
    >>> import demo_optax, jax, numpy as np
    >>> mesh = jax.make_mesh((jax.device_count(),), ('data',))
    >>> workers = demo_optax.Workers.on_mesh(mesh, 'data')
    >>> params = workers.device_put({'w': np.ones(3, np.float32)})
    >>> demo_optax.check_replicas(params, workers)
    []

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, whose workers must apply the same
    update.
  """
  if workers is not None and workers.mesh is not None:
    placement.warn_if_replicated(tree, workers.axis_name)
  flat = [
      (_tree.leaf_name(path), comparable(x))
      for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
  ]
  found = collections.defaultdict(list)
  for difference in [
      *between_processes(flat),  # first: it checks that the trees agree
      *_on_devices([leaf for leaf in flat if _is_on_mesh(leaf[1])], workers),
  ]:
    found[difference.leaf].append(difference)
  for name, x in flat:
    if not _is_on_mesh(x) and not is_local(x):
      raise TypeError(
          f'{name} is spread over processes by {x.sharding}: put it on a mesh,'
          ' with workers.device_put.'
      )
  return [d for name, _ in flat for d in found.get(name, ())]


def _is_on_mesh(x: Any) -> bool:
  return isinstance(getattr(x, 'sharding', None), NamedSharding)


def is_local(x: Any) -> bool:
  """Returns whether this process holds all of it."""
  return not isinstance(x, jax.Array) or x.is_fully_addressable


# Inside meshes ----------------------------------------------------------------


def _on_devices(
    flat: list[tuple[str, Any]], workers: Workers | None
) -> list[Difference]:
  """Differences between the devices of the leaves' meshes."""
  found = []
  several = [(n, x) for n, x in flat if x.sharding.mesh.size > 1]
  for name, x, by_device in _digests_by_device(several):
    blocks = collections.defaultdict(list)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
      blocks[str(index)].append((device, bytes(by_device[device])))
    other = [d for copies in blocks.values() for d in _minority(copies)]
    if other:
      found.append(_difference(name, other, workers))
  return found


def _digests_by_device(
    flat: list[tuple[str, Any]],
) -> Iterator[tuple[str, jax.Array, dict[Any, np.ndarray]]]:
  """Yields name, leaf, and what each device's block adds to its digest."""
  by_mesh = collections.defaultdict(list)
  for name, x in flat:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    by_mesh[x.sharding.mesh].append((name, x))
  for mesh, leaves in by_mesh.items():
    arrays = [x for _, x in leaves]
    layout = tuple((x.sharding.spec, x.shape) for x in arrays)
    # One row of digests per device, in the mesh's order.
    digests = _digest_on_mesh(mesh, layout)(arrays)
    rows = np.asarray(digests.addressable_data(0))  # [devices, leaves, 2]
    for place, (name, x) in enumerate(leaves):
      yield name, x, dict(zip(mesh.devices.flat, rows[:, place]))


def _minority(copies: list[tuple[Any, bytes]]) -> list[Any]:
  """Who holds something else than most do."""
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


@functools.cache
def _digest_on_mesh(
    mesh: Mesh, layout: tuple[tuple[P, tuple[int, ...]], ...]
) -> Any:
  """`arrays -> uint32 [devices, leaves, 2]`, on every device."""

  def local(xs: list[jax.Array]) -> jax.Array:
    digests = []
    for x, (spec, shape) in zip(xs, layout):
      first = [jnp.uint32(0)] * x.ndim
      for d, axes in enumerate(spec):
        if axes is not None:
          block = jax.lax.axis_index(axes).astype(jnp.uint32)
          first[d] = block * jnp.uint32(x.shape[d])
      digests.append(_digest_block(x, first, shape))
    return jnp.stack(digests)[None]

  # Not checked: what is replicated by its type may yet differ, which is why we
  # are here.
  mapped = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=([spec for spec, _ in layout],),
      out_specs=P(mesh.axis_names),
      check_vma=False,
  )
  return jax.jit(mapped, out_shardings=NamedSharding(mesh, P()))


# Between processes ------------------------------------------------------------


def between_processes(flat: list[tuple[str, Any]]) -> list[Difference]:
  """Differences between leaves of which every process has all."""
  if jax.process_count() == 1:
    return []
  _check_same_tree(flat)
  local = [(name, x) for name, x in flat if is_local(x)]
  if not local:
    return []
  mine = np.stack([_digest_on_host(x) for _, x in local])
  every = multihost_utils.process_allgather(mine)  # [processes, leaves, 2]
  found = []
  for place, (name, _) in enumerate(local):
    copies = [(p, bytes(row[place])) for p, row in enumerate(every)]
    other = _minority(copies)
    if other:
      found.append(Difference(name, (), (), tuple(other)))
  return found


def comparable(x: Any) -> Any:
  """Returns `x`, or a number in the place of what is no array."""
  return x if hasattr(x, 'dtype') else np.uint32(zlib.crc32(repr(x).encode()))


def _check_same_tree(flat: list[tuple[str, Any]]) -> None:
  """Raises on all processes, rather than leave some in a gather alone."""
  text = '\n'.join(
      f'{name} {x.shape} {x.dtype} {_is_on_mesh(x)} {is_local(x)}'
      for name, x in flat
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
  """Returns what each array holds, as 16 digits, however it lies on devices.

  A digest is a sum over an array's words: blocks are digested where they are,
  and one copy of each is summed. With several processes all must call it with
  the same names.
  """
  found = {}
  flat = list(arrays.items())
  on_meshes = [(name, x) for name, x in flat if _is_on_mesh(x)]
  for name, x, by_device in _digests_by_device(on_meshes):
    indices = x.sharding.devices_indices_map(x.shape)
    blocks = {str(index): by_device[d] for d, index in indices.items()}
    found[name] = sum(blocks.values(), np.zeros(2, np.uint32))
  for name, x in flat:
    if name not in found:
      on_device = isinstance(x, jax.Array)
      found[name] = _digest_whole(x) if on_device else _digest_on_host(x)
  return {name: np.asarray(x).astype('>u4').tobytes().hex()
          for name, x in found.items()}


@jax.jit
def _digest_whole(x: jax.Array) -> jax.Array:
  return _digest_block(x, [jnp.uint32(0)] * x.ndim, x.shape)


def _digest_block(
    x: jax.Array, first: Sequence[Any], shape: tuple[int, ...]
) -> jax.Array:
  """Returns what the block of `x` that begins at `first` adds, uint32 `[2]`."""
  words = _words(x)  # u32[*block, words of an element]
  place = jnp.zeros(words.shape, jnp.uint32)
  for d, length in enumerate((*shape, words.shape[-1])):
    along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, d)
    start = first[d] if d < len(first) else jnp.uint32(0)
    place = place * jnp.uint32(length) + (along + start)
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
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
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
