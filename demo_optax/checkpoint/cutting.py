"""Cuts buckets of all workers and devices into leaves, and fills them again.

Outside of a step: for checkpoints, and for momentum in parameter space. Buckets
are `[workers, rows, n]`, or `[workers, devices, rows, n]` if a worker has
several devices. Coefficients of a leaf are `[workers, *counts, n]`, the chunks
of all its shards along each dimension, and so do not depend on devices.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.compressors import chunking
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.compressor import Compressor
from demo_optax.compressors.layout import Layout, Leaf
from demo_optax.workers.param_specs import entry, names_of

# The grid of one shard, shards along each dimension, the transform of a chunk.
Cut = tuple[ChunkGrid, tuple[int, ...], Basis | None]


def cut_bucket(
  layout: Layout, number: int, bucket: Any, decoded: bool = False
) -> dict[int, Any]:
  """Cuts the leaves out of a bucket: coefficients by leaf number.

  They are sharded as the parameters, and in parameter space if `decoded`. The
  bucket may be a `jax.ShapeDtypeStruct`, for shapes.
  """
  like = {
    i: _leaf_like(layout, layout.leaves[i], bucket, decoded)
    for i in layout.members(number)
  }
  if isinstance(bucket, jax.ShapeDtypeStruct):
    return like
  shardings = {i: x.sharding for i, x in like.items()}
  return run(_cut_leaves, bucket, shardings, layout, number, decoded)


def _leaf_like(
  layout: Layout, leaf: Leaf, bucket: Any, decoded: bool
) -> jax.ShapeDtypeStruct:
  """Returns the shape and sharding of what a bucket has of a leaf."""
  *counts, n = leaf.grid.coefficients_shape
  of_all = [b * count for b, count in zip(leaf.sharding.blocks, counts)]
  shape = bucket.shape[0], *(leaf.shape if decoded else (*of_all, n))
  sharding = getattr(bucket, 'sharding', None)
  if isinstance(sharding, NamedSharding):
    inner = dict(layout.axis_sizes)
    worker = [a for a in names_of(sharding.spec) if a not in inner] or [None]
    place = NamedSharding(sharding.mesh, P(*worker, *leaf.sharding.spec))
    sharding = fit_sharding(shape, place)
  return jax.ShapeDtypeStruct(shape, bucket.dtype, sharding=sharding)


def _cut_leaves(
  x: Any, layout: Layout, number: int, decoded: bool
) -> dict[int, Any]:
  """Returns the leaves of a bucket by number."""
  bucket = layout.buckets[number]
  sizes, order, used = _device_axes(layout, number)
  # [workers, *devices, chunks, n], first the axes that shard leaves
  x = x.reshape(len(x), *sizes, *bucket.shape)
  x = x[..., : bucket.num_chunks, :].transpose(0, *order, -2, -1)
  # [workers, *axes that shard leaves, chunks of all other devices, n]
  x = x.reshape(*x.shape[: 1 + used], -1, *bucket.unit)
  found = {}
  for i in layout.members(number):
    leaf = layout.leaves[i]
    rows = slice(leaf.offset, leaf.offset + leaf.size)
    c = x[(slice(None),) * (1 + used) + (rows,)]
    c = c.transpose(0, *_shard_axes(leaf), *range(1 + used, c.ndim))
    blocks, shape = leaf.sharding.blocks, leaf.grid.coefficients_shape
    c = _join_blocks(c.reshape(len(x), *blocks, *shape), blocks)
    found[i] = decode(c, *cut_of(leaf)) if decoded else c
  return found


def fill_bucket(
  layout: Layout,
  number: int,
  leaves: dict[int, Any],
  like: Any,
  fun: Callable[[Leaf, Any], Any] = lambda _, c: c,
) -> Any:
  """Undoes `cut_bucket`; returns an array of the dtype and sharding of `like`.

  `fun` returns the coefficients of a leaf from its value in `leaves`.
  """
  bucket, axes = layout.buckets[number], dict(layout.axis_sizes)
  n, unit = bucket.format.n, bucket.unit
  sizes, order, used = _device_axes(layout, number)

  def fill(leaves: dict[int, Any]) -> Any:
    parts = []
    for i in layout.members(number):
      leaf, c = layout.leaves[i], fun(layout.leaves[i], leaves[i])
      inner = [axes[name] for name in names_of(leaf.sharding.spec)]
      c = _split_blocks(c, leaf.sharding.blocks)
      c = c.reshape(len(c), *inner, leaf.size, *unit)
      back = 1 + np.argsort(_shard_axes(leaf))
      parts.append(c.transpose(0, *back, *range(1 + used, c.ndim)))
    xp: Any = np if isinstance(parts[0], np.ndarray) else jnp
    x = xp.concatenate(parts, 1 + used)
    rows = bucket.num_devices * bucket.num_chunks
    x = _pad(x, 1 + used, rows * n // math.prod(unit))
    inner = [sizes[i - 1] for i in order]
    x = x.reshape(len(x), *inner, bucket.num_chunks, n)
    x = x.transpose(0, *(1 + np.argsort(order)), -2, -1)
    devices = [math.prod(sizes)] if sizes else []
    x = x.reshape(len(x), *devices, *x.shape[-2:])
    return _pad(x, x.ndim - 2, bucket.rows).astype(like.dtype)

  if isinstance(like, np.ndarray):
    leaves = {i: np.asarray(x) for i, x in leaves.items()}
  return run(fill, leaves, getattr(like, 'sharding', None))


def cut_of(leaf: Leaf) -> Cut:
  """Returns the cut of a leaf."""
  assert isinstance(leaf.compressor, Compressor)
  return leaf.grid, leaf.sharding.blocks, leaf.compressor.basis


def decode(
  c: Any, grid: ChunkGrid, blocks: tuple[int, ...], basis: Basis | None
) -> jax.Array:
  """Returns `[workers, *shape]` from coefficients `[workers, *counts, n]`."""
  return _map_blocks(chunking.from_coefficients, c, (grid, blocks, basis))


def encode(
  x: Any, grid: ChunkGrid, blocks: tuple[int, ...], basis: Basis | None
) -> jax.Array:
  """Undoes `decode`."""
  return _map_blocks(chunking.to_coefficients, x, (grid, blocks, basis))


def _map_blocks(fun: Callable[..., jax.Array], x: Any, cut: Cut) -> jax.Array:
  grid, blocks, basis = cut
  x = _split_blocks(jnp.asarray(x), blocks)
  lead = x.shape[: 1 + len(blocks)]
  x = x.reshape(-1, *x.shape[len(lead) :])
  y = jax.vmap(lambda x: fun(x, grid, basis))(x)
  return _join_blocks(y.reshape(*lead, *y.shape[1:]), blocks)


def _join_blocks(x: Any, blocks: tuple[int, ...]) -> Any:
  """Takes `[workers, *blocks, *dims, ...]` to `[workers, *products, ...]`."""
  rank = len(blocks)
  pairs = [axis for d in range(rank) for axis in (1 + d, 1 + rank + d)]
  rest = range(1 + 2 * rank, x.ndim)
  shape = [b * d for b, d in zip(blocks, x.shape[1 + rank :])]
  shape += [x.shape[axis] for axis in rest]
  return x.transpose(0, *pairs, *rest).reshape(len(x), *shape)


def _split_blocks(x: Any, blocks: tuple[int, ...]) -> Any:
  """Undoes `_join_blocks`."""
  rank = len(blocks)
  shape = [n for b, d in zip(blocks, x.shape[1:]) for n in (b, d // b)]
  x = x.reshape(len(x), *shape, *x.shape[1 + rank :])
  order = *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2)
  return x.transpose(0, *order, *range(1 + 2 * rank, x.ndim))


def _device_axes(
  layout: Layout, number: int
) -> tuple[list[int], list[int], int]:
  """Describes how a bucket is sharded over the devices of a worker.

  Returns the sizes of the axes inside a worker; an order of them, counted from
  1, that starts with those that shard its leaves; and the number of those.
  """
  split = layout.buckets[number].split_axes
  names = [name for name, _ in layout.axis_sizes]
  order = sorted(range(len(names)), key=lambda i: names[i] in split)
  sizes = [size for _, size in layout.axis_sizes]
  return sizes, [1 + i for i in order], len(names) - len(split)


def _shard_axes(leaf: Leaf) -> list[int]:
  """Returns the order of a leaf's axes by the dimensions that they shard."""
  spec = leaf.sharding.spec
  return [1 + leaf.sharding.axes.index(axis) for axis in names_of(spec)]


def _pad(x: Any, axis: int, length: int) -> Any:
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  widths = [(0, length - n if d == axis else 0) for d, n in enumerate(x.shape)]
  return xp.pad(x, widths)


# Arrays on meshes -------------------------------------------------------------


def run(
  fun: Callable[..., Any], args: Any, shardings: Any, *static: Any
) -> Any:
  """Calls `fun(args, *static)` on arrays that may span devices and processes.

  Jitted, unless `args` are traced, or NumPy's without `shardings` of results.
  XLA chooses a sharding that is `None`. The same function, not a closure, is
  compiled once for equal `static`.
  """
  leaves = jax.tree.leaves(args)
  on_host = all(isinstance(x, np.ndarray) for x in leaves)
  if any(isinstance(x, jax.core.Tracer) for x in leaves) or (
    on_host and not jax.tree.leaves(shardings)
  ):
    return fun(args, *static)
  args = jax.tree.map(
    lambda x: on_mesh(x, auto(x.sharding)) if isinstance(x, jax.Array) else x,
    args,
  )
  inner = jax.tree.map(auto, shardings)
  placed = [getattr(x, 'sharding', None) for x in jax.tree.leaves(args)]
  placed += jax.tree.leaves(inner)
  meshes: list[Any] = [x.mesh for x in placed if isinstance(x, NamedSharding)]
  # Not under the mesh that the caller has set, whose types may be Explicit.
  with jax.set_mesh(meshes[0]) if meshes else contextlib.nullcontext():
    jitted = jax.jit(
      fun, static_argnums=range(1, 1 + len(static)), out_shardings=inner
    )
    found = jitted(args, *static)
  return jax.tree.map(
    lambda sharding, x: on_mesh(x, sharding),
    shardings,
    found,
    is_leaf=lambda x: x is None,
  )


def fit_sharding(shape: tuple[int, ...], sharding: Any) -> Any:
  """Returns `sharding`, adapted to another shape.

  Axes that do not divide their dimension move to the longest one that they
  divide, so that no device holds more than necessary.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  parts = [
    math.prod(sharding.mesh.shape[name] for name in entry(sharding.spec, dim))
    for dim in range(len(sharding.spec))
  ]

  def fits(dim: int, home: int) -> bool:
    return home < len(shape) and shape[home] % parts[dim] == 0

  entries: list[Any] = [None] * len(shape)
  longest = sorted(range(len(shape)), key=lambda dim: -shape[dim])
  for dim in sorted(range(len(parts)), key=lambda dim: not fits(dim, dim)):
    for home in (dim, *longest):
      if fits(dim, home) and entries[home] is None:
        entries[home] = sharding.spec[dim]
        break
  return NamedSharding(sharding.mesh, P(*entries))


def auto(sharding: Any) -> Any:
  """Returns a sharding on Auto axes, where XLA inserts communication."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
  return NamedSharding(mesh, sharding.spec)


def on_mesh(x: jax.Array, sharding: Any) -> jax.Array:
  """Returns `x` under an equivalent sharding, without moving anything.

  Unlike `jax.device_put` it accepts arrays with shards in other processes.
  """
  if x.sharding == sharding or not isinstance(sharding, NamedSharding):
    return x
  return jax.make_array_from_single_device_arrays(
    x.shape, sharding, [shard.data for shard in x.addressable_shards]
  )
