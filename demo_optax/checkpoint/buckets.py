"""Turns all workers' buckets into leaves, and back, outside a step.

For checkpoints, and for momentum in parameter space. Buckets are
`[workers, rows, n]`, or `[workers, devices, rows, n]` if a worker has several
devices. A leaf's coefficients are `[workers, *counts, n]`: the chunks from all
its shards along each dimension, which do not depend on devices.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.checkpoint.placement import fit_sharding, run
from demo_optax.compressors import chunking
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.compressor import Compressor
from demo_optax.compressors.layout import Layout, Leaf
from demo_optax.numerics import plain
from demo_optax.workers.param_specs import entry, names_of

Shape = jax.ShapeDtypeStruct


class Coding(NamedTuple):
  """How a leaf's coefficients are made from its elements."""

  grid: ChunkGrid  # of one shard
  blocks: tuple[int, ...]  # shards along each dimension
  basis: Basis | None

  def decode(self, coefficients: chex.Array) -> Array:
    """Returns `[workers, *shape]` from coefficients `[workers, *counts, n]`."""
    return self._each_shard(chunking.from_coefficients, coefficients)

  def encode(self, x: chex.Array) -> Array:
    """Undoes `decode`."""
    return self._each_shard(chunking.to_coefficients, x)

  def _each_shard(self, fun: Callable[..., Array], x: chex.Array) -> Array:
    """Calls a function for every shard on every worker."""
    mapped: Callable[[Array], Array]
    mapped = functools.partial(fun, grid=self.grid, basis=self.basis)
    for dim, count in enumerate(self.blocks):
      mapped = _over_blocks(mapped, dim, count)
    return jax.vmap(mapped)(jnp.asarray(x))


def _over_blocks(
  fun: Callable[[Array], Array], dim: int, count: int
) -> Callable[[Array], Array]:
  """Returns `fun` for an array that has `count` blocks along a dimension."""

  def over(x: Array) -> Array:
    # [..., count, block, ...]
    x = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    found = jax.vmap(fun, dim, dim)(x)
    return jax.lax.collapse(found, dim, dim + 2)

  return over


def coding_of(leaf: Leaf) -> Coding:
  """Returns the coding of a leaf."""
  assert isinstance(leaf.compressor, Compressor)
  return Coding(leaf.grid, leaf.sharding.blocks, leaf.compressor.basis)


def cut_bucket(
  layout: Layout, number: int, bucket: Any, decoded: bool = False
) -> dict[int, Any]:
  """Cuts the leaves out of a bucket: coefficients by leaf number.

  They are sharded as the parameters, and in parameter space if `decoded`. The
  bucket may be a `jax.ShapeDtypeStruct`, for shapes.
  """
  like = {}
  for i in layout.members(number):
    like[i] = _leaf_like(layout, layout.leaves[i], bucket, decoded)
  if isinstance(bucket, Shape):
    return like
  shardings = {i: x.sharding for i, x in like.items()}
  return run(_leaves_of, bucket, shardings, layout, number, decoded)


def _leaf_like(
  layout: Layout, leaf: Leaf, bucket: chex.Array | Shape, decoded: bool
) -> Shape:
  """Returns shape and sharding of a leaf that is cut out of a bucket."""
  workers, shape = bucket.shape[0], leaf.shape
  if not decoded:
    *counts, n = leaf.grid.coefficients_shape
    blocks = zip(leaf.sharding.blocks, counts)
    shape = *(parts * count for parts, count in blocks), n
  sharding = getattr(bucket, 'sharding', None)
  if isinstance(sharding, NamedSharding):
    inner = dict(layout.axis_sizes)
    worker = [a for a in names_of(sharding.spec) if a not in inner] or [None]
    spec = P(*worker, *leaf.sharding.spec)
    placed = NamedSharding(sharding.mesh, spec)
    sharding = fit_sharding((workers, *shape), placed)
  return Shape((workers, *shape), bucket.dtype, sharding=sharding)


def _leaves_of(
  bucket: Array, layout: Layout, number: int, decoded: bool
) -> dict[int, Array]:
  """Returns a bucket's leaves by number."""
  workers, sent = len(bucket), layout.buckets[number].num_chunks
  # [workers, *shards, chunks, n]
  rows = _bucket_axes(layout, number, workers).join(bucket[..., :sent, :])
  split = _over_leading(functools.partial(layout.split, number), rows.ndim - 2)
  leaves = {}
  for i, chunks in split(rows).items():
    leaf = layout.leaves[i]
    leaves[i] = _leaf_axes(layout, leaf, workers).join(chunks)
    if decoded:
      leaves[i] = coding_of(leaf).decode(leaves[i])
  return leaves


def fill_bucket(
  layout: Layout,
  number: int,
  leaves: Mapping[int, Any],
  like: Any,
  coefficients_of: Callable[[Leaf, Any], Array] = lambda _, c: c,
) -> Any:
  """Undoes `cut_bucket`; returns an array placed as `like`, in its dtype.

  `coefficients_of` takes a leaf and its value in `leaves`.
  """
  bucket = layout.buckets[number]
  axes = _bucket_axes(layout, number, like.shape[0])

  def fill(leaves: Mapping[int, Any]) -> Array:
    chunks = {}
    for i in layout.members(number):
      leaf = layout.leaves[i]
      coefficients = coefficients_of(leaf, leaves[i])
      # [workers, *shards, *counts, n]
      x = _leaf_axes(layout, leaf, like.shape[0]).split(coefficients)
      shards = x.shape[: len(axes.groups) - 2]
      chunks[i] = x.reshape(*shards, leaf.grid.num_chunks, -1)
    join = functools.partial(layout.join, number, rows=bucket.all_chunks)
    rows = axes.split(_over_leading(join, len(axes.groups) - 2)(chunks))
    # [workers, (devices,) chunks, n]
    rows = rows.reshape(*like.shape[:-2], *rows.shape[-2:])
    return plain.pad_to(rows, bucket.rows, axis=-2).astype(like.dtype)

  return run(fill, leaves, getattr(like, 'sharding', None))


def _over_leading(fun: Callable[..., Any], count: int) -> Callable[..., Any]:
  """Returns `fun` for arrays with this many further leading axes."""
  for _ in range(count):
    fun = jax.vmap(fun)
  return fun


# Axes by name: those of the mesh, dimensions by number, and these.
_WORKER, _CHUNK, _N = -3, -2, -1


class _Axes(NamedTuple):
  """An array's axes, and which are joined to one."""

  sizes: dict[Any, int]  # by name, in the order of the array
  groups: list[list[Any]]  # names, of each joined axis

  def join(self, x: Array) -> Array:
    """Returns an array with one axis for each group."""
    names, shape = list(self.sizes), []
    for group in self.groups:
      shape.append(math.prod(self.sizes[name] for name in group))
    x = x.reshape([*self.sizes.values()])
    order = [names.index(name) for name in itertools.chain(*self.groups)]
    return x.transpose(order).reshape(shape)

  def split(self, x: Array) -> Array:
    """Undoes `join`."""
    names = list(itertools.chain(*self.groups))
    x = x.reshape([self.sizes[name] for name in names])
    return x.transpose([names.index(name) for name in self.sizes])


def _bucket_axes(layout: Layout, number: int, workers: int) -> _Axes:
  """Returns a bucket's axes; joins chunks on devices with the same shards."""
  bucket = layout.buckets[number]
  inner = dict(layout.axis_sizes)
  sizes: dict[Any, int] = {_WORKER: workers, **inner}
  sizes |= {_CHUNK: bucket.num_chunks, _N: bucket.format.n}
  shards = [[name] for name in inner if name not in bucket.split_axes]
  return _Axes(sizes, [[_WORKER], *shards, [*bucket.split_axes, _CHUNK], [_N]])


def _leaf_axes(layout: Layout, leaf: Leaf, workers: int) -> _Axes:
  """Returns a leaf's axes; joins the shards of each dimension."""
  *counts, n = leaf.grid.coefficients_shape
  sizes: dict[Any, int] = {_WORKER: workers}
  for name, size in layout.axis_sizes:
    if name in leaf.sharding.axes:
      sizes[name] = size
  sizes |= {**dict(enumerate(counts)), _N: n}
  groups: list[list[Any]] = [[_WORKER]]
  for dim in range(len(counts)):
    groups.append([*entry(leaf.sharding.spec, dim), dim])
  return _Axes(sizes, [*groups, [_N]])
