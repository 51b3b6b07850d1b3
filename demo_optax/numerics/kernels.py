"""Kernels for TPUs of a bucket of which `GroupMax` selects.

A block is 128 chunks. It is transposed, so that each lane has one: then all
operations are elementwise, or products from the left. Every kernel reads its
bucket once, and changes momentum in place. The forms of `exchange.arithmetic`
without kernels have the same results, except for the last bits.

Places and values are `[k, rows]` here, and a place that is not sent is -1. A
coefficient of column frequency f and row frequency q is at row `f * rows + q`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import pallas_call
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
# Bytes. Three blocks of buckets, twice, and three of scratch take 18 MiB.
_VMEM = 32 * 2**20

Matrices = tuple[np.ndarray, np.ndarray]  # of a transform, of rows and columns


def encode(
    gradients: jax.Array,
    momentum: jax.Array,
    scalars: jax.Array,
    matrices: Matrices,
    k: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Adds chunks `[rows, n]` to momentum, and selects one of each group.

  `scalars [1, 3]` are decay, weight, and 1 if the worker is valid, else 0.
  Returns momentum, places and values `[k, rows]`, and sums of squares,
  `[1, rows]`.
  """
  (rows, n), dtype = momentum.shape, momentum.dtype
  row, col = (jnp.asarray(x, dtype) for x in matrices)
  chunks, selected = _in_rows(n), _in_lanes(k)
  return _call(
      functools.partial(_encode, k=k), 'demo_encode',
      [scalars, row, col, gradients, momentum],
      [_SCALARS, _same(row), _same(col), chunks, chunks],
      [(chunks, (rows, n), dtype), (selected, (k, rows), jnp.int32),
       (selected, (k, rows), dtype), (_in_lanes(1), (1, rows), dtype)],
      rows=rows, scratch=[n] * 3, aliases={4: 0},
  )


def _encode(
    scalars: Any, row: Any, col: Any, gradients: Any, momentum: Any,
    kept: Any, places: Any, values: Any, squares: Any,
    x: Any, y: Any, m: Any, *, k: int,
) -> None:
  decay, weight, valid = scalars[0, 0], scalars[0, 1], scalars[0, 2] > 0
  num_rows, num_cols, n = len(row), len(col), len(m)
  for at in _tiles(n):
    x[at, :] = (weight * gradients[:, at]).T
    m[at, :] = momentum[:, at].T

  def transform_row(p: Any) -> None:
    at = _nth(p, num_cols)
    y[at, :] = _dot(col[...], x[at, :])

  def transform_column(f: Any) -> None:
    at = _nth(f, num_rows)
    c = _dot(row[...], y[pl.ds(f, num_rows, stride=num_cols), :])
    m[at, :] = jnp.where(valid, decay * m[at, :] + c, m[at, :])

  _for(num_rows, transform_row)
  _for(num_cols, transform_column)

  # As `groups.largest`: magnitude above, complement of the place below.
  last = n // k - 1
  low = (1 << last.bit_length()) - 1

  def best(place: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
    c = m[_nth(place, k), :]
    bits = jax.lax.bitcast_convert_type(jnp.abs(c), jnp.int32)
    keys = (bits & ~low) | (last - place)
    return jnp.maximum(found[0], keys), found[1] + c * c

  none = jnp.full(places.shape, -1, jnp.int32), jnp.zeros(values.shape, m.dtype)
  keys, total = jax.lax.fori_loop(0, last + 1, best, none, unroll=8)
  chosen = last - (keys & low)

  def take(place: Any, found: Any) -> Any:
    return found + jnp.where(chosen == place, m[_nth(place, k), :], 0)

  places[...] = chosen
  values[...] = jax.lax.fori_loop(0, last + 1, take, none[1], unroll=8)
  squares[...] = jnp.sum(total, axis=0, keepdims=True)
  for at in _tiles(n):
    kept[:, at] = m[at, :].T


def subtract(
    momentum: jax.Array, places: jax.Array, values: jax.Array
) -> jax.Array:
  """Subtracts values `[k, rows]` at places from momentum `[rows, n]`."""
  rows, n = momentum.shape
  chunks, selected = _in_rows(n), _in_lanes(len(places))
  return _call(
      _subtract, 'demo_subtract', [momentum, places, values],
      [chunks, selected, selected], [(chunks, (rows, n), momentum.dtype)],
      rows=rows, scratch=[n], aliases={0: 0},
  )[0]


def _subtract(
    momentum: Any, places: Any, values: Any, kept: Any, x: Any
) -> None:
  k, n = len(places), len(x)
  chosen, leaving = places[...], values[...]

  def spread(place: Any) -> None:
    x[_nth(place, k), :] = jnp.where(chosen == place, leaving, 0)

  _for(n // k, spread)
  for at in _tiles(n):
    kept[:, at] = momentum[:, at] - x[at, :].T


def decode(
    places: jax.Array,
    values: jax.Array,
    share: jax.Array,
    matrices: Matrices,
    by_senders: bool,
) -> tuple[jax.Array, jax.Array]:
  """Averages selections `[workers, k, rows]`, and inverts the transform.

  Divides by the number of senders, or multiplies by `share`, `[1, 1]`. Returns
  updates `[rows, n]`, and the number of distinct coefficients, `[1, rows]`.
  """
  row, col = (jnp.asarray(x.T, values.dtype) for x in matrices)
  rows, n, dtype = values.shape[2], len(row) * len(col), values.dtype
  received = _in_lanes(*values.shape[:2])
  return _call(
      functools.partial(_decode, by_senders=by_senders), 'demo_decode',
      [share, row, col, places, values],
      [_SCALARS, _same(row), _same(col), received, received],
      [(_in_rows(n), (rows, n), dtype), (_in_lanes(1), (1, rows), dtype)],
      rows=rows, scratch=[n] * 2, aliases={},
  )


def _decode(
    share: Any, row: Any, col: Any, places: Any, values: Any,
    updates: Any, distinct: Any, x: Any, y: Any, *, by_senders: bool,
) -> None:
  workers, k, _ = places.shape
  num_rows, num_cols, n = len(row), len(col), len(x)

  def merge(place: Any, found: Any) -> Any:
    def add(worker: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
      hits = places[worker] == place
      total = sums[0] + jnp.where(hits, values[worker], 0)
      return total, sums[1] + jnp.where(hits, 1.0, 0.0)

    zeros = jnp.zeros_like(found)
    total, count = jax.lax.fori_loop(
        0, workers, add, (zeros, zeros), unroll=min(workers, 8)
    )
    mean = total / jnp.maximum(count, 1) if by_senders else share[0, 0] * total
    x[_nth(place, k), :] = mean
    return found + jnp.where(count > 0, 1.0, 0.0)

  none = jnp.zeros(values.shape[1:], x.dtype)
  found = jax.lax.fori_loop(0, n // k, merge, none)
  distinct[...] = jnp.sum(found, axis=0, keepdims=True)

  def invert_column(f: Any) -> None:
    at = _nth(f, num_rows)
    y[at, :] = _dot(row[...], x[at, :])

  def invert_row(p: Any) -> None:
    c = y[pl.ds(p, num_cols, stride=num_rows), :]
    x[_nth(p, num_cols), :] = _dot(col[...], c)

  _for(num_cols, invert_column)
  _for(num_rows, invert_row)
  for at in _tiles(n):
    updates[:, at] = x[at, :].T


def _nth(number: Any, length: int) -> Any:
  """Returns the rows of one of many parts of a length."""
  return pl.ds(number * length, length)


def _tiles(n: int) -> list[Any]:
  return [pl.ds(start, _LANES) for start in range(0, n, _LANES)]


def _for(count: int, fun: Callable[[Any], None]) -> None:
  def body(number: Any, _: Any) -> None:
    fun(number)

  jax.lax.fori_loop(0, count, body, None, unroll=4)


def _dot(x: Any, y: Any) -> jax.Array:
  return jnp.dot(x, y, precision=jax.lax.Precision.HIGHEST)


# Blocks: of scalars; the same for all chunks; of rows; and of lanes.
_SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


def _same(x: jax.Array) -> pl.BlockSpec:
  return pl.BlockSpec(x.shape, lambda i: (0, 0))


def _in_rows(n: int) -> pl.BlockSpec:
  return pl.BlockSpec((_LANES, n), lambda i: (i, 0))


def _in_lanes(*lead: int) -> pl.BlockSpec:
  return pl.BlockSpec((*lead, _LANES), lambda i: (*[0] * len(lead), i))


def _call(
    kernel: Callable[..., None],
    name: str,
    args: Sequence[jax.Array],
    in_specs: Sequence[pl.BlockSpec],
    out: Sequence[tuple[pl.BlockSpec, tuple[int, ...], Any]],
    *,
    rows: int,
    scratch: Sequence[int],
    aliases: Mapping[int, int],
) -> Any:
  """Runs a kernel for blocks of `rows` chunks, with `scratch` rows of lanes."""
  # In a shard_map that tracks what varies, all must vary over the same axes.
  axes = [jax.typeof(x).mat.varying for x in args]
  every = frozenset[str]().union(*axes)
  args = [
      jax.lax.pcast(x, tuple(every - own), to='varying') if every - own else x
      for x, own in zip(args, axes)
  ]
  mat = jax.typeof(args[0]).mat
  like = [
      jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=mat)
      for _, shape, dtype in out
  ]
  specs, dtype = [spec for spec, *_ in out], out[0][2]
  call = pallas_call(
      kernel, grid=(pl.cdiv(rows, _LANES),), in_specs=in_specs, out_specs=specs,
      out_shape=like, input_output_aliases=dict(aliases), name=name,
      scratch_shapes=[pltpu.VMEM((n, _LANES), dtype) for n in scratch],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel',), vmem_limit_bytes=_VMEM
      ),
  )
  with jax.enable_x64(False):  # Mosaic has no indices of 64 bits
    return call(*args)
