"""A bucket's arithmetic, on CPUs and TPUs in parts that fit fast memory."""

from typing import Any

import jax
import jax.numpy as jnp

from demo_optax.compressors import chunking
from demo_optax.compressors.layout import Bucket
from demo_optax.compressors.selectors import TopK
from demo_optax.exchange.message import Received, Selected, energy
from demo_optax.numerics import platform, rounding, topk


def accumulate_and_select(
    bucket: Bucket,
    gradients: jax.Array,
    momentum: jax.Array,
    decay: Any,
    weight: Any,
    valid: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, Selected]:
  """Adds gradient chunks to momentum `[rows, n]`; selects what to send.

  Momentum does not change unless `valid`, bool `[]`.
  """
  n, k = bucket.format.n, bucket.format.k
  pieces = platform.num_pieces(bucket.pieces, bucket.rows * n)
  rows = bucket.rows // pieces
  shared = shared_indices(bucket, step) if bucket.format.shared else None

  def add_piece(
      momentum: jax.Array, number: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array, jax.Array]]:
    start = number * rows
    g = _load(gradients, start, rows)  # [rows, n]
    old = _load(momentum, start, rows)

    def add(_: Any, m: jax.Array) -> jax.Array:
      c = rounding.mul_no_fma(weight, g)
      if bucket.kind == 'chunks':
        c = chunking.transform(c, bucket.sides, bucket.basis)
      return rounding.mul_no_fma(decay, m) + c

    if platform.loop_to_keep(gradients.size):
      m = jax.lax.fori_loop(0, valid.astype(jnp.int32), add, old)
    else:
      m = jnp.where(valid, add(None, old), old)
    momentum = _store(momentum, m, start)
    indices = None
    if shared is not None and k < n:
      indices = jnp.broadcast_to(shared[None], (rows, k))
    elif k < n:
      indices = _select(bucket, m, step)
    values = topk.take(m, indices, bucket.format.grouped)
    if indices is not None and not _is_sound(bucket):
      # An index outside of the chunk reads as NaN, which excludes the worker.
      inside = (indices >= 0) & (indices < n)
      values = jnp.where(inside, values, jnp.full_like(values, jnp.nan))
    return momentum, (indices, values, energy(m))

  momentum, found = _scan(add_piece, momentum, pieces)
  indices, values, energies = found
  if indices is not None:
    indices = indices.reshape(bucket.rows, k)
  values = values.reshape(bucket.rows, k)
  return momentum, Selected(indices, values, jnp.sum(energies))


def subtract(
    bucket: Bucket,
    momentum: jax.Array,
    indices: jax.Array | None,
    values: jax.Array,
) -> jax.Array:
  """Subtracts `values [rows, k]` at `indices` from momentum `[rows, n]`."""
  grouped = bucket.format.grouped
  if not platform.chunks_in_lanes(bucket.rows) or indices is None:
    return topk.subtract(momentum, indices, values, grouped)
  pieces = platform.num_pieces(bucket.pieces, momentum.size)
  rows = bucket.rows // pieces

  def subtract_piece(
      momentum: jax.Array, number: jax.Array
  ) -> tuple[jax.Array, None]:
    start = number * rows
    at, leaving = (
        jax.lax.dynamic_slice_in_dim(x, start, rows) for x in (indices, values)
    )
    m = _load(momentum, start, rows)
    return _store(momentum, topk.subtract(m, at, leaving, grouped), start), None

  return _scan(subtract_piece, momentum, pieces)[0]


def merge(
    bucket: Bucket, received: Received, average: topk.Average
) -> tuple[jax.Array, jax.Array]:
  """Averages all workers' selections and inverts the transform.

  Returns update chunks `[rows, n]`, and the number of different coefficients
  that were sent, float32 `[]`.
  """
  n = bucket.format.n
  pieces = platform.num_pieces(bucket.pieces, bucket.rows * n)
  rows = bucket.rows // pieces

  def merge_piece(
      carry: tuple[jax.Array, jax.Array], number: jax.Array
  ) -> tuple[tuple[jax.Array, jax.Array], None]:
    updates, distinct = carry
    start = number * rows

    def piece_of(x: jax.Array) -> jax.Array:  # [senders, rows, k]
      return jax.lax.dynamic_slice_in_dim(x, start, rows, axis=1)

    indices = None
    if received.indices is not None:
      indices = piece_of(received.indices)
    u, found = topk.merge(
        indices, piece_of(received.values), received.valid, n, average,
        bucket.format.grouped,
    )
    if bucket.kind == 'chunks':
      u = chunking.inverse(u, bucket.sides, bucket.basis)
    return (_store(updates, u, start), distinct + found), None

  # Zeros that depend on received values: XLA would otherwise allocate them
  # before the exchange, while the gradients' chunks are still alive.
  zero = jnp.zeros_like(received.values, shape=())
  count = jnp.sum(received.valid, dtype=jnp.int32)
  zero = jnp.where(count < 0, jnp.ones_like(zero), zero)
  carry = (
      jnp.broadcast_to(zero, (bucket.rows, n)),
      jnp.zeros_like(received.values, jnp.float32, shape=()),
  )
  (updates, distinct), _ = _scan(merge_piece, carry, pieces)
  # Padding rows count as sent; remove them.
  padding = (bucket.rows - bucket.num_chunks) * bucket.format.k
  someone = jnp.any(received.valid)
  return updates, distinct - jnp.where(someone, float(padding), 0.0)


def _scan(piece: Any, carry: Any, pieces: int) -> tuple[Any, Any]:
  numbers = jnp.arange(pieces, dtype=jnp.int32)
  return jax.lax.scan(piece, carry, numbers, unroll=pieces == 1)


def _load(x: jax.Array, start: jax.Array, rows: int) -> jax.Array:
  x = jax.lax.dynamic_slice_in_dim(x, start, rows)
  # Without `in_rows`, XLA would prefer the other layout for all of the bucket.
  return platform.in_lanes(platform.in_rows(x))


def _store(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
  part = platform.in_rows(part)
  return jax.lax.dynamic_update_slice_in_dim(x, part, start, 0)


def shared_indices(bucket: Bucket, step: jax.Array) -> jax.Array:
  """Returns the ascending indices `[k]` that all workers select at `step`."""
  one = jnp.zeros((1, bucket.format.n), bucket.format.dtype)
  return _select(bucket, one, step)[0]


def _select(
    bucket: Bucket, coefficients: jax.Array, step: jax.Array
) -> jax.Array:
  """Returns int32 indices, ascending within a chunk, as messages need them.

  Selectors may return any order and integer dtype, and negative indices.
  """
  indices = bucket.select(coefficients, step).astype(jnp.int32)
  if _is_sound(bucket):
    return indices
  n = bucket.format.n
  return jnp.sort(jnp.where(indices < 0, indices + n, indices), axis=1)


def _is_sound(bucket: Bucket) -> bool:
  """Returns whether indices are in range, and in the order of their code."""
  return bucket.format.grouped or type(bucket.select) is TopK
