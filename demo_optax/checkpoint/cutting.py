"""Cuts buckets of all workers and devices into leaves, and fills them again.

Outside of a step: for checkpoints, and for momentum in parameter space. Buckets
are `[workers, rows, n]`, or `[workers, devices, rows, n]` if a worker has
several devices. Coefficients of a leaf are `[workers, *counts, n]`, the chunks
of all its shards along each dimension, and so do not depend on devices.
"""

import contextlib
import functools
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
  sizes, groups = _bucket_axes(layout, number, len(x))
  x = _join_axes(x[..., : bucket.num_chunks, :], sizes, groups)
  rows = len(groups) - 2
  x = x.reshape(*x.shape[:rows], -1, *bucket.unit)
  found = {}
  for i in layout.members(number):
    leaf = layout.leaves[i]
    of_leaf = slice(leaf.offset, leaf.offset + leaf.size)
    c = x[(slice(None),) * rows + (of_leaf,)]
    c = _join_axes(c, *_leaf_axes(layout, leaf, len(x)))
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
  bucket = layout.buckets[number]
  n, unit = bucket.format.n, bucket.unit
  sizes, groups = _bucket_axes(layout, number, like.shape[0])
  rows = len(groups) - 2

  def fill(leaves: dict[int, Any]) -> Any:
    parts = []
    for i in layout.members(number):
      leaf, c = layout.leaves[i], fun(layout.leaves[i], leaves[i])
      c = _split_axes(c, *_leaf_axes(layout, leaf, len(c)))
      parts.append(c.reshape(*c.shape[:rows], leaf.size, *unit))
    xp: Any = np if isinstance(parts[0], np.ndarray) else jnp
    x = xp.concatenate(parts, rows)
    of_all = bucket.num_devices * bucket.num_chunks
    x = _pad(x, rows, of_all * n // math.prod(unit))
    x = _split_axes(x, sizes, groups)
    x = x.reshape(*like.shape[:-2], bucket.num_chunks, n)
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
  """Calls a function of one shard for all blocks of all workers."""
  grid, blocks, basis = cut
  mapped: Callable[[jax.Array], jax.Array]
  mapped = functools.partial(fun, grid=grid, basis=basis)
  for dim, count in enumerate(blocks):
    mapped = _over_blocks(mapped, dim, count)
  return jax.vmap(mapped)(jnp.asarray(x))


def _over_blocks(
  fun: Callable[[jax.Array], jax.Array], dim: int, count: int
) -> Callable[[jax.Array], jax.Array]:
  """Returns `fun` for an array that has `count` blocks along a dimension."""

  def over(x: jax.Array) -> jax.Array:
    x = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    y = jax.vmap(fun, dim, dim)(x)
    return jax.lax.collapse(y, dim, dim + 2)

  return over


# Axes by name: those of the mesh, dimensions by number, and these.
_WORKER, _CHUNK, _N = -3, -2, -1

# The sizes of an array's axes in order, and which of them one axis joins.
Axes = tuple[dict[Any, int], list[list[Any]]]


def _bucket_axes(layout: Layout, number: int, workers: int) -> Axes:
  """Returns the axes of a bucket; the chunks of devices are joined.

  Except those of devices that have other shards.
  """
  bucket = layout.buckets[number]
  inner, split = dict(layout.axis_sizes), bucket.split_axes
  sizes: dict[Any, int] = {_WORKER: workers, **inner}
  sizes |= {_CHUNK: bucket.num_chunks, _N: bucket.format.n}
  shards = [[name] for name in inner if name not in split]
  return sizes, [[_WORKER], *shards, [*split, _CHUNK], [_N]]


def _leaf_axes(layout: Layout, leaf: Leaf, workers: int) -> Axes:
  """Returns the axes of a leaf; the shards of each dimension are joined."""
  *counts, n = leaf.grid.coefficients_shape
  sharding = leaf.sharding
  shards = [x for x in layout.axis_sizes if x[0] in sharding.axes]
  sizes = {_WORKER: workers, **dict(shards), **dict(enumerate(counts)), _N: n}
  dims = [[*entry(sharding.spec, dim), dim] for dim in range(len(counts))]
  return sizes, [[_WORKER], *dims, [_N]]


def _join_axes(x: Any, sizes: dict[Any, int], groups: list[list[Any]]) -> Any:
  """Returns an array of axes of these sizes with one axis for each group."""
  names = list(sizes)
  order = [names.index(name) for group in groups for name in group]
  shape = [math.prod(sizes[name] for name in group) for group in groups]
  return x.reshape(*sizes.values()).transpose(order).reshape(shape)


def _split_axes(x: Any, sizes: dict[Any, int], groups: list[list[Any]]) -> Any:
  """Undoes `_join_axes`."""
  names = [name for group in groups for name in group]
  x = x.reshape([sizes[name] for name in names])
  return x.transpose([names.index(name) for name in sizes])


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
