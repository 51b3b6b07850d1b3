"""Turns all workers' buckets into leaves, and back, outside a step.

For checkpoints, and for momentum in parameter space. Buckets are
`[workers, rows, n]`, or `[workers, devices, rows, n]` if a worker has several
devices. A leaf's coefficients are `[workers, *counts, n]`: the chunks from all
its shards along each dimension, which do not depend on devices.

What one device does is mapped over simulated workers and devices.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.checkpoint.placement import Value, fit_sharding, of, run
from demo_optax.compressors import chunking
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.compressor import Compressor
from demo_optax.compressors.layout import Layout, Leaf
from demo_optax.workers import Spec, Workers, lift
from demo_optax.workers.param_specs import keep, names_of

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

  def _each_shard(
    self,
    fun: Callable[..., Array],
    x: chex.Array,
  ) -> Array:
    """Calls a function for every shard on every worker."""
    # As if each dimension were sharded over an axis, with a device per block.
    sizes = {f'axis_{dim}': count for dim, count in enumerate(self.blocks)}
    workers = Workers.simulated(len(x), None, sizes)
    axes = workers.param_specs.axes  # those with several blocks
    spec = Spec(True, keep(P(*sizes), axes))
    one_shard = functools.partial(
      fun,
      grid=self.grid,
      basis=self.basis,
    )
    mapped = lift.map_over(workers, one_shard, (spec,), spec)
    return mapped(jnp.asarray(x))


def coding_of(leaf: Leaf) -> Coding:
  """Returns a leaf's coding."""
  assert isinstance(leaf.compressor, Compressor)
  return Coding(
    leaf.grid,
    leaf.sharding.blocks,
    leaf.compressor.basis,
  )


def cut_bucket(
  layout: Layout,
  number: int,
  bucket: Value,
  decoded: bool = False,
) -> dict[int, Value]:
  """Cuts the leaves out of a bucket: coefficients by leaf number.

  They are sharded as the parameters, and in parameter space if `decoded`. The
  bucket may be a `jax.ShapeDtypeStruct`, for shapes.
  """
  shapes, shardings = {}, {}
  for member in layout.members(number):
    leaf = layout.leaves[member]
    shapes[member] = _leaf_like(layout, leaf, bucket, decoded)
    shardings[member] = shapes[member].sharding
  if isinstance(bucket, Shape):
    return shapes
  return run(_leaves_of, bucket, shardings, layout, number, decoded)


def _leaf_like(
  layout: Layout,
  leaf: Leaf,
  bucket: chex.Array | Shape,
  decoded: bool,
) -> Shape:
  """Returns shape and sharding of a leaf that is cut out of a bucket."""
  shape = leaf.shape
  if not decoded:
    *counts, n = leaf.grid.coefficients_shape
    # The chunks from all shards along each dimension.
    counts_of_all = np.multiply(leaf.sharding.blocks, counts)
    shape = *map(int, counts_of_all), n
  shape = bucket.shape[0], *shape
  sharding = of(bucket)
  if isinstance(sharding, NamedSharding):
    inner_axes = dict(layout.axis_sizes)
    worker_axis = None
    for axis in names_of(sharding.spec):
      if axis not in inner_axes:
        worker_axis = axis
    spec = P(worker_axis, *leaf.sharding.spec)
    placed = NamedSharding(sharding.mesh, spec)
    sharding = fit_sharding(shape, placed)
  return Shape(shape, bucket.dtype, sharding=sharding)


def _specs(layout: Layout, number: int) -> dict[int, Spec]:
  """Returns how a bucket's leaves are spread over workers and devices."""
  specs = {}
  for member in layout.members(number):
    leaf = layout.leaves[member]
    specs[member] = Spec(True, leaf.sharding.spec)
  return specs


def _leaves_of(
  bucket: Array,
  layout: Layout,
  number: int,
  decoded: bool,
) -> dict[int, Array]:
  """Returns a bucket's leaves by number."""
  workers = Workers.simulated(
    len(bucket),
    None,
    dict(layout.axis_sizes),
  )
  kind = layout.buckets[number]

  def one_device(rows: Array) -> dict[int, Array]:
    # [chunks of all devices with these shards, n]
    own_chunks = rows.reshape(kind.shape)[: kind.num_chunks]
    chunks = workers.group.join_devices(own_chunks, kind.split_axes)
    leaves = {}
    for member, of_leaf in layout.split(number, chunks).items():
      grid = layout.leaves[member].grid
      array = of_leaf.reshape(grid.coefficients_shape)
      if decoded:
        array = chunking.from_coefficients(array, grid, kind.basis)
      leaves[member] = array
    return leaves

  specs = _specs(layout, number)
  mapped = lift.map_over(
    workers,
    one_device,
    (workers.bucket_spec,),
    specs,
  )
  return mapped(bucket)


def fill_bucket(
  layout: Layout,
  number: int,
  leaves: Mapping[int, Value],
  like: Value,
  coefficients_of: Callable[[Leaf, Value], Array] = lambda _, c: c,
) -> Value:
  """Undoes `cut_bucket`; returns an array placed as `like`, in its dtype.

  `coefficients_of` takes a leaf and its value in `leaves`.
  """
  workers = Workers.simulated(
    like.shape[0],
    None,
    dict(layout.axis_sizes),
  )
  kind = layout.buckets[number]

  def one_device(coefficients: Mapping[int, Array]) -> Array:
    chunks = {}
    for member, of_leaf in coefficients.items():
      grid = layout.leaves[member].grid
      chunks[member] = of_leaf.reshape(grid.num_chunks, -1)
    of_all = layout.join(number, chunks, kind.all_chunks)
    device = workers.group.device_index(kind.split_axes)
    rows = kind.of_device(of_all, device).astype(like.dtype)
    # [rows, n], or [1, rows, n] as one of several devices
    return rows[None] if layout.axis_sizes else rows

  def fill(leaves: Mapping[int, Value]) -> Array:
    specs, coefficients = _specs(layout, number), {}
    for member in specs:
      leaf = layout.leaves[member]
      coefficients[member] = coefficients_of(leaf, leaves[member])
    mapped = lift.map_over(
      workers,
      one_device,
      (specs,),
      workers.bucket_spec,
    )
    return mapped(coefficients)

  return run(fill, leaves, of(like))
