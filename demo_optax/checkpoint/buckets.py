"""Turns all workers' buckets into leaves, and back, outside a step.

For checkpoints, and for momentum in parameter space. Buckets are
`[workers, rows, n]`, or `[workers, devices, rows, n]` if a worker has several
devices. A leaf's coefficients are `[workers, *counts, n]`: the chunks from all
its shards along each dimension, which do not depend on devices.

What one device does is mapped over simulated workers and devices.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._paths import STACKED, Keys
from demo_optax.checkpoint.placement import Value, run, sharding_of
from demo_optax.compressors import chunking
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.layout import Layout, Leaf
from demo_optax.workers import Spec, Workers, lift
from demo_optax.workers.param_specs import entry, keep

Shape = jax.ShapeDtypeStruct


class Coding(NamedTuple):
  """How a leaf's coefficients are made from its elements."""

  grid: ChunkGrid  # of one shard
  blocks: tuple[int, ...]  # shards along each dimension
  basis: Basis


def coding_of(leaf: Leaf) -> Coding:
  """Returns a leaf's coding."""
  assert leaf.chunks is not None
  return Coding(leaf.grid, leaf.sharding.blocks, leaf.chunks.basis)


def decode(coefficients: chex.Array, coding: Coding) -> Array:
  """Returns `[workers, *shape]` from coefficients `[workers, *counts, n]`."""
  return _each_shard(chunking.from_coefficients, coefficients, coding)


def encode(x: chex.Array, coding: Coding) -> Array:
  """Undoes `decode`."""
  return _each_shard(chunking.to_coefficients, x, coding)


def _each_shard(
  fun: Callable[..., Array],
  x: chex.Array,
  coding: Coding,
) -> Array:
  """Calls a function for every shard on every worker."""
  # As if each dimension were sharded over an axis, with a device per block.
  numbered = enumerate(coding.blocks)
  axis_sizes = {f'axis_{dimension}': count for dimension, count in numbered}
  workers = Workers.simulated(len(x), None, axis_sizes)
  several_blocks = workers.param_specs.axes
  spec = Spec(True, keep(P(*axis_sizes), several_blocks))
  one_shard = functools.partial(
    fun,
    grid=coding.grid,
    basis=coding.basis,
  )
  mapped = lift.map_over(workers, one_shard, (spec,), spec)
  return mapped(jnp.asarray(x))


def take_momentum(
  arrays: dict[Keys, Value],
  root: Keys,
  layout: Layout,
) -> dict[int, Value]:
  """Takes an exchange's momentum out of a state's arrays: leaves by number."""
  leaves = {}
  for number, bucket in enumerate(layout.buckets):
    if bucket.error_feedback:
      array = arrays.pop((*root, STACKED, 'momentum', bucket.name))
      leaves.update(cut_bucket(layout, number, array))
  return leaves


def cut_bucket(
  layout: Layout,
  number: int,
  array: Value,
) -> dict[int, Value]:
  """Cuts the leaves out of a bucket: coefficients by leaf number.

  They are sharded as the parameters. The bucket may be a
  `jax.ShapeDtypeStruct`, for shapes.
  """
  shapes, shardings = {}, {}
  for member, leaf in layout.members(number).items():
    shapes[member] = _leaf_like(leaf, array)
    shardings[member] = shapes[member].sharding
  if isinstance(array, Shape):
    return shapes
  return run(_leaves_of, array, shardings, layout, number)


def fill_bucket(
  layout: Layout,
  number: int,
  coefficients: Mapping[int, Value],
  like: Value,
) -> Value:
  """Undoes `cut_bucket`; returns an array placed as `like`."""
  return run(_bucket_of, coefficients, sharding_of(like), layout, number)


def _leaf_like(leaf: Leaf, array: chex.Array | Shape) -> Shape:
  """Returns shape and sharding of a leaf that is cut out of a bucket."""
  *counts, n = leaf.grid.coefficients_shape
  # The chunks from all shards along each dimension.
  all_counts = map(operator.mul, leaf.sharding.blocks, counts)
  shape = array.shape[0], *all_counts, n
  sharding = sharding_of(array)
  if isinstance(sharding, NamedSharding):
    worker_axis = entry(sharding.spec, 0) or None
    spec = P(worker_axis, *leaf.sharding.spec)
    sharding = NamedSharding(sharding.mesh, spec)
  return Shape(shape, array.dtype, sharding=sharding)


def _leaves_of(
  array: Array,
  layout: Layout,
  number: int,
) -> dict[int, Array]:
  """Returns the coefficients in a bucket by leaf number."""
  bucket = layout.buckets[number]
  workers, specs = _workers_and_specs(layout, number, len(array))

  def one_device(rows: Array) -> dict[int, Array]:
    own = rows.reshape(bucket.shape)
    coefficients = {}
    for member, chunks in layout.split(number, own).items():
      shape = layout.leaves[member].grid.coefficients_shape
      coefficients[member] = chunks.reshape(shape)
    return coefficients

  in_specs = (workers.bucket_spec,)
  mapped = lift.map_over(workers, one_device, in_specs, specs)
  return mapped(array)


def _bucket_of(
  coefficients: Mapping[int, Array],
  layout: Layout,
  number: int,
) -> Array:
  """Undoes `_leaves_of`."""
  first, *_ = coefficients.values()
  workers, specs = _workers_and_specs(layout, number, len(first))

  def one_device(own: Mapping[int, Array]) -> Array:
    rows = layout.join(number, own)
    # [rows, n], or [1, rows, n] as one of several devices
    return rows[None] if layout.axis_sizes else rows

  out_spec = workers.bucket_spec
  mapped = lift.map_over(workers, one_device, (specs,), out_spec)
  return mapped(coefficients)


def _workers_and_specs(
  layout: Layout,
  number: int,
  count: int,
) -> tuple[Workers, dict[int, Spec]]:
  """Returns simulated workers, and how they spread a bucket's leaves."""
  specs = {}
  for member, leaf in layout.members(number).items():
    specs[member] = Spec(True, leaf.sharding.spec)
  workers = Workers.simulated(count, None, dict(layout.axis_sizes))
  return workers, specs
