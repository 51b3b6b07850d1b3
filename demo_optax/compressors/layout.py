"""Buckets: the chunks with one format, from all leaves, as one array.

A step's program then grows with the formats, not with the leaves. Gradients are
joined to buckets, and updates are split from them.

A `Layout` maps leaves to buckets. It depends on paths, shapes, dtypes and
compressors alone, and is made when a step is traced. Its digest is kept in the
state, so that renamed or reordered leaves never take each other's momentum.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from chex import Numeric
from jax import Array, lax

from demo_optax import _tree
from demo_optax._paths import Keys, dotted, leaves_of
from demo_optax.codes import index_codes
from demo_optax.codes.format import ChunkFormat
from demo_optax.compressors import chunking
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.compressor import (
  Compressor,
  CompressorTree,
  Frozen,
  LeafChunks,
  per_leaf,
)
from demo_optax.compressors.selectors import Selector
from demo_optax.numerics import plain, platform
from demo_optax.workers.collectives import join_devices
from demo_optax.workers.param_specs import ParamSharding, ParamSpecs

# Describes a leaf in JSON, so that it can be saved with arrays.
Record = dict[str, Any]

# Most elements in a row of a bucket of leaves that are sent densely.
_DENSE_ROW = 128


@dataclasses.dataclass(frozen=True)
class Bucket:
  """All chunks with one format, `[rows, n]` on each device.

  If it is `dense`, its rows have elements from all leaves, without chunks.
  Leaves are replicated over the mesh axes `split_axes` inside a worker. Each
  device along them, `num_devices` in all, has a share of the chunks.
  """

  name: str  # in the state
  select: Selector
  basis: Basis
  format: ChunkFormat
  sides: tuple[int, int]  # rows and columns of a chunk; (1, 1), if dense
  dense: bool
  split_axes: tuple[str, ...]
  num_devices: int
  size: int  # chunks of all its leaves
  error_feedback: bool  # whether momentum keeps what is not sent

  @property
  def num_chunks(self) -> int:
    """Chunks that one device sends."""
    return -(-self.size // self.num_devices)

  @property
  def pieces(self) -> int:
    """Number of equal pieces on all platforms; CPUs take one at a time."""
    if self.dense:
      return 1
    elements = self.num_chunks * self.format.n
    return -(-elements // platform.PIECE)

  @property
  def rows(self) -> int:
    """Rows of the array: chunks, and padding up to whole pieces."""
    # A last piece that overlapped the one before would decay chunks twice.
    of_piece = -(-self.num_chunks // self.pieces)
    return of_piece * self.pieces

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the array on one device."""
    return self.rows, self.format.n

  @property
  def unit(self) -> tuple[int, ...]:
    """Shape of what leaf sizes and offsets count: chunks, or elements."""
    return () if self.dense else (self.format.n,)

  def share(self, num_owners: int) -> 'Bucket':
    """Returns the bucket that one among several owners has."""
    num_devices = self.num_devices * num_owners
    return dataclasses.replace(self, num_devices=num_devices)


def with_rows(
  x: Array,
  rows: int,
) -> Array:
  """Cuts or fills `[..., chunks, k]` to a number of rows.

  Those that fill it have zeros, or the indices 0 to k - 1.
  """
  *lead, chunks, k = x.shape
  if rows <= chunks:
    return x[..., :rows, :]
  missing = rows - chunks
  filling = jnp.zeros_like(x, shape=(*lead, missing, k))
  if x.dtype == jnp.int32:  # indices
    filling += index_codes.order_of(filling)
  return jnp.concatenate([x, filling], axis=-2)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """The place of one parameter in the buckets."""

  keys: Keys  # its path
  shape: tuple[int, ...]
  dtype: str  # of its momentum
  sharding: ParamSharding
  compressor: Compressor | Frozen | None  # None: averaged uncompressed
  chunks: LeafChunks | None = None  # of one shard, if compressed
  bucket: int = -1  # number of its bucket, -1 if not compressed
  offset: int = 0  # its first chunk in the bucket; element, if dense

  @property
  def name(self) -> str:
    """The path in messages and tables."""
    return dotted(self.keys)

  @property
  def is_frozen(self) -> bool:
    """Whether the leaf stays out of the exchange."""
    return isinstance(self.compressor, Frozen)

  @property
  def grid(self) -> ChunkGrid:
    """The chunks of one shard."""
    assert self.chunks is not None
    return self.chunks.grid

  @property
  def record(self) -> Record:
    """Describes the leaf and its chunks in JSON.

    Two records are equal if and only if the arrays of coefficients have the
    same meaning.
    """
    record: Record = {
      'shape': self.shape,
      'dtype': self.dtype,
      'compressor': str(self.compressor),
    }
    if self.chunks is not None:
      grid = self.grid
      blocks = list(self.sharding.blocks)
      for dim, padding in zip(grid.leading, grid.ends):
        if not padding and not grid.whole and grid.period == 1:
          blocks[dim] = 1  # chunks of blocks are chunks of the whole
      record |= {
        'lengths': grid.lengths,
        'whole': grid.whole,
        'fold': grid.fold,
        'blocks': blocks,
      }
      if not grid.whole:
        basis = self.chunks.basis
        record['basis'] = [type(basis).__name__, vars(basis)]
    return json.loads(json.dumps(record, default=str))


def in_words(record: Record) -> tuple[str, str, str]:
  """Describes a leaf's array, its chunks, its compressor."""
  array = f'{record["dtype"]}[{",".join(map(str, record["shape"]))}]'
  if 'lengths' not in record:
    return array, 'no momentum', record['compressor']
  chunks = f'chunks of {"x".join(map(str, record["lengths"]))}'
  if record['whole']:
    chunks = 'one chunk, not transformed'
  if max(record['blocks'], default=1) > 1:
    chunks += f' in {"x".join(map(str, record["blocks"]))} blocks'
  return array, chunks, record['compressor']


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
  """The buckets for a parameter tree, and the places of its leaves."""

  # Not hashed, since a step hashes its layout at each call.
  leaves: tuple[Leaf, ...] = dataclasses.field(hash=False)
  buckets: tuple[Bucket, ...] = dataclasses.field(hash=False)
  axis_sizes: tuple[tuple[str, int], ...]  # inside a worker, in mesh order

  def __repr__(self) -> str:
    # Errors of JAX about trees print it.
    names = ', '.join(leaf.name for leaf in self.leaves[:3])
    digest = self.digest.tobytes().hex()[:8]
    return f'Layout({digest}, {len(self.leaves)} leaves: {names} ...)'

  @functools.cached_property
  def exchanged(self) -> tuple[int, ...]:
    """Leaves in buckets, and those that are averaged, by number."""
    leaves = enumerate(self.leaves)
    return tuple(member for member, leaf in leaves if not leaf.is_frozen)

  @functools.cached_property
  def exchanged_keys(self) -> frozenset[Keys]:
    """Paths of the leaves in `exchanged`."""
    return frozenset(self.leaves[member].keys for member in self.exchanged)

  @functools.cached_property
  def averaged(self) -> tuple[int, ...]:
    """Leaves that are averaged uncompressed, by number."""
    leaves = enumerate(self.leaves)
    return tuple(member for member, leaf in leaves if leaf.compressor is None)

  @functools.cached_property
  def digest(self) -> np.ndarray:
    """Returns uint32 `[4]`, equal if all leaves have equal places."""
    places = []
    for leaf in self.leaves:
      if leaf.bucket >= 0:
        # The bucket has what is read of the compressor.
        places.append(dataclasses.replace(leaf, compressor=None))
    split_axes = [bucket.split_axes for bucket in self.buckets]
    text = repr((places, split_axes))
    digest = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(digest[:16], np.uint32)

  @functools.cached_property
  def records(self) -> dict[str, Record]:
    """Describes the leaves by name."""
    return {leaf.name: leaf.record for leaf in self.leaves}

  @functools.cached_property
  def words(self) -> dict[str, tuple[str, ...]]:
    """Describes the leaves by name, in words."""
    return {name: in_words(record) for name, record in self.records.items()}

  def members(self, number: int) -> dict[int, Leaf]:
    """Returns a bucket's leaves, by number, in their order there."""
    leaves = enumerate(self.leaves)
    return {member: leaf for member, leaf in leaves if leaf.bucket == number}

  def _starts(
    self,
    number: int,
    step: Numeric,
  ) -> Sequence[Numeric]:
    """Returns where a bucket's leaves begin.

    With the `step` of a program, leaves of one shape share kernels on CPUs.
    """
    leaves = self.members(number).values()
    offsets = [leaf.offset for leaf in leaves]
    return plain.unknown(offsets, step)

  def join(
    self,
    number: int,
    chunks: Mapping[int, Array],
    step: Numeric = 0,
  ) -> Array:
    """Joins the chunks of leaves, by leaf number, to a bucket `[rows, n]`.

    Each leaf has `[chunks, n]`, a dense one `[1, elements]`. Called where
    `split_axes` are mapped: returns the rows of this device.
    """
    bucket = self.buckets[number]
    rows = bucket.rows
    if bucket.split_axes:  # those of all devices
      rows = bucket.num_chunks * bucket.num_devices
    # [chunks, n] per leaf, or [elements] if dense
    parts = []
    for member in self.members(number):
      parts.append(chunks[member].reshape(-1, *bucket.unit))
    shape = rows, bucket.format.n
    zeros = jnp.zeros_like(parts[0], shape=shape)
    zeros = zeros.reshape(-1, *bucket.unit)
    is_full = len(parts[0]) == len(zeros)  # by one leaf
    if is_full or platform.concatenates(bucket.sides[0]):
      end = sum(map(len, parts))
      joined = jnp.concatenate([*parts, zeros[end:]])
    else:
      joined = zeros
      for part, start in zip(parts, self._starts(number, step)):
        joined = plain.put(joined, part, start)
    joined = joined.reshape(shape)
    if not bucket.split_axes:
      return joined
    start = lax.axis_index(bucket.split_axes) * bucket.num_chunks
    own = lax.dynamic_slice_in_dim(joined, start, bucket.num_chunks)
    return plain.pad_to(own, bucket.rows, axis=0)

  def split(
    self,
    number: int,
    rows: Array,
    step: Numeric = 0,
  ) -> dict[int, Array]:
    """Undoes `join`, by the rows of all devices: returns chunks by leaf."""
    bucket = self.buckets[number]
    if bucket.split_axes:
      own = rows[: bucket.num_chunks]
      rows = join_devices(own, bucket.split_axes)
    # [chunks, n], or [elements] if dense
    units = rows.reshape(-1, *bucket.unit)
    members = self.members(number)
    starts = self._starts(number, step)
    chunks = {}
    for (member, leaf), start in zip(members.items(), starts):
      part = lax.dynamic_slice_in_dim(units, start, leaf.grid.size)
      chunks[member] = part.reshape(-1, leaf.grid.chunk_size)
    return chunks

  def fill(
    self,
    number: int,
    shards: Mapping[int, Array],
    step: Numeric,
  ) -> Array:
    """Cuts one shard per leaf into chunks, and joins these to `[rows, n]`."""
    bucket = self.buckets[number]
    chunks = {}
    for member, leaf in self.members(number).items():
      shard = shards[member].astype(bucket.format.dtype)
      chunks[member] = chunking.to_chunks(shard, leaf.grid, step)
    return self.join(number, chunks, step)

  def cut(
    self,
    number: int,
    rows: Array,
    step: Numeric,
  ) -> dict[int, Array]:
    """Undoes `fill`: returns shards by leaf."""
    shards = {}
    for member, chunks in self.split(number, rows, step).items():
      grid = self.leaves[member].grid
      shards[member] = chunking.from_chunks(chunks, grid, step)
    return shards


def make_layout(
  params: chex.ArrayTree,
  compressor: CompressorTree,
  param_specs: ParamSpecs,
) -> Layout:
  """Maps parameters, or their shapes, to buckets, as far as exchanged."""
  params = _tree.mask_others(params)
  flat = leaves_of(params)
  axis_sizes = param_specs.axis_sizes
  leaves: list[Leaf] = []
  # Of buckets, which have no name and no size yet.
  numbers: dict[Bucket, int] = {}
  # What is in a bucket so far: chunks; elements, if dense.
  sizes: dict[int, int] = collections.defaultdict(int)
  for (path, param), chosen in zip(flat, per_leaf(compressor, params)):
    shape = np.shape(param)
    dtype = _tree.momentum_dtype(path, param)
    sharding = param_specs.place(path, shape)
    leaf = Leaf(path, shape, str(dtype), sharding, chosen)
    if isinstance(chosen, Compressor):
      shard = tuple(map(operator.floordiv, shape, sharding.blocks))
      chunks = chosen.chunks(shard, dtype)
      split = dict(axis_sizes)
      for axis in sharding.axes:
        del split[axis]
      empty = _empty_bucket(chosen, chunks, split)
      number = numbers.setdefault(empty, len(numbers))
      leaf = dataclasses.replace(
        leaf,
        chunks=chunks,
        bucket=number,
        offset=sizes[number],
      )
      sizes[number] += chunks.grid.size
    leaves.append(leaf)
  buckets = []
  for empty, number in numbers.items():
    buckets.append(_fit(empty, number, sizes[number]))
  return Layout(tuple(leaves), tuple(buckets), axis_sizes)


def _empty_bucket(
  compressor: Compressor,
  chunks: LeafChunks,
  split: Mapping[str, int],
) -> Bucket:
  """Returns a leaf's bucket, still without name and size."""
  chunk_format = chunks.format
  sides = chunks.grid.sides
  if chunks.grid.whole:  # its rows come later
    chunk_format = dataclasses.replace(chunk_format, n=1, k=1)
    sides = 1, 1
  return Bucket(
    name='',
    select=compressor.select,
    basis=chunks.basis,
    format=chunk_format,
    sides=sides,
    dense=chunks.grid.whole,
    split_axes=tuple(split),
    num_devices=math.prod(split.values()),
    size=0,
    error_feedback=compressor.error_feedback,
  )


def _fit(
  bucket: Bucket,
  number: int,
  size: int,
) -> Bucket:
  """Returns an empty bucket with its name, and rows for its leaves."""
  label = 'x'.join(map(str, bucket.sides))
  chunk_format = bucket.format
  if bucket.dense:
    label = 'dense'
    # Even rows, so that each device sends little padding.
    share = -(-size // bucket.num_devices)
    length = chunking.chunk_length(share, _DENSE_ROW)
    chunk_format = dataclasses.replace(chunk_format, n=length, k=length)
    size = -(-size // length)
  return dataclasses.replace(
    bucket,
    name=f'bucket_{number:03}_{label}',
    format=chunk_format,
    size=size,
  )
