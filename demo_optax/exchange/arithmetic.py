"""A bucket's arithmetic, on CPUs and TPUs in parts that fit fast memory."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from demo_optax.compressors import chunking
from demo_optax.compressors.layout import Bucket
from demo_optax.compressors.selectors import TopK
from demo_optax.exchange.message import Received, Selected, energy
from demo_optax.numerics import plain, platform, rounding, topk


def accumulate_and_select(
  bucket: Bucket,
  gradients: jax.Array,
  momentum: jax.Array,
  decay: chex.Numeric,
  weight: chex.Numeric,
  valid: jax.Array,
  step: jax.Array,
) -> tuple[jax.Array, Selected]:
  """Adds gradient chunks to momentum `[rows, n]`; selects what to send.

  Momentum does not change unless `valid`, bool `[]`.
  """
  n, k = bucket.format.n, bucket.format.k
  shared = _shared_indices(bucket, step) if bucket.format.shared else None

  def add_piece(momentum: jax.Array, start: chex.Numeric, rows: int) -> Any:
    g = _load(gradients, start, rows)  # [rows, n]
    old = _load(momentum, start, rows)

    def add(_: object, m: jax.Array) -> jax.Array:
      c = rounding.mul_no_fma(weight, g)
      if bucket.content == 'chunks':
        c = chunking.transform(c, bucket.sides, bucket.basis)
      return rounding.mul_no_fma(decay, m) + c

    if platform.loop_to_keep(gradients.size):
      m = jax.lax.fori_loop(0, valid.astype(jnp.int32), add, old)
    else:
      m = plain.where(valid, add(None, old), old)
    momentum = _store(momentum, m, start)
    indices = None
    if k < n and shared is not None:
      indices = jnp.broadcast_to(shared[None], (rows, k))
    elif k < n:
      indices = _select(bucket, m, step)
    values = topk.take(m, indices)
    if indices is not None and not _is_sound(bucket):
      # An index outside of the chunk reads as NaN, which excludes the worker.
      inside = (indices >= 0) & (indices < n)
      values = plain.where(inside, values, jnp.full_like(values, jnp.nan))
    return momentum, (indices, values)

  momentum, found = _in_pieces(bucket, add_piece, momentum)
  indices, values = jax.tree.map(lambda x: x.reshape(bucket.rows, k), found)
  return momentum, Selected(indices, values, energy(momentum))


def subtract(
  bucket: Bucket,
  momentum: jax.Array,
  indices: jax.Array | None,
  values: jax.Array,
) -> jax.Array:
  """Subtracts `values [rows, k]` at `indices` from momentum `[rows, n]`."""
  if not platform.chunks_in_lanes(bucket.rows) or indices is None:
    return topk.subtract(momentum, indices, values)

  def subtract_piece(
    momentum: jax.Array, start: chex.Numeric, rows: int
  ) -> Any:
    at, leaving = (_piece_of(x, start, rows) for x in (indices, values))
    m = _load(momentum, start, rows)
    return _store(momentum, topk.subtract(m, at, leaving), start), None

  return _in_pieces(bucket, subtract_piece, momentum)[0]


def merge(
  bucket: Bucket,
  received: Received,
  average: topk.Average,
  step: jax.Array,
  unused: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Averages all workers' selections and inverts the transform.

  Returns update chunks `[rows, n]`, and how many different coefficients were
  sent, float32 `[]`. Pieces may be written over `unused`: zeros cost a pass.
  """
  n, k = bucket.format.n, bucket.format.k
  if bucket.format.shared and k < n:
    indices = _shared_indices(bucket, step)[None, None]
    indices = jnp.broadcast_to(indices, (1, bucket.rows, k))
    received = received._replace(indices=indices)

  def merge_piece(carry: Any, start: chex.Numeric, rows: int) -> Any:
    updates, distinct = carry

    indices, values = jax.tree.map(  # [senders, rows, k]
      lambda x: _piece_of(x, start, rows, axis=1), received[:2]
    )
    u, found = topk.merge(
      indices,
      values,
      received.valid,
      n,
      average,
      received.weights,
    )
    if bucket.content == 'chunks':
      u = chunking.inverse(u, bucket.sides, bucket.basis)
    return (_store(updates, u, start), distinct + found), None

  # Zeros that depend on received values: XLA would otherwise allocate them
  # before the exchange, while the gradients' chunks are still alive.
  zero = jnp.zeros_like(received.values, shape=())
  count = jnp.sum(received.valid, dtype=jnp.int32)
  zero = plain.where(count < 0, jnp.ones_like(zero), zero)
  updates = jnp.broadcast_to(zero, (bucket.rows, n))
  if unused is not None and unused.shape == updates.shape:
    updates = plain.overwritten(unused, updates)
  carry = updates, jnp.zeros_like(received.values, jnp.float32, shape=())
  (updates, distinct), _ = _in_pieces(bucket, merge_piece, carry)
  # Padding rows count as sent; remove them.
  padding = (bucket.rows - bucket.num_chunks) * k
  someone = jnp.any(received.valid).astype(jnp.float32)
  return updates, distinct - padding * someone


def _in_pieces(bucket: Bucket, piece: Any, carry: Any) -> tuple[Any, Any]:
  """Scans `piece(carry, start, rows)` over a bucket's pieces."""
  pieces = platform.num_pieces(bucket.pieces, bucket.rows * bucket.format.n)
  rows = bucket.rows // pieces
  if pieces == 1:  # also compiles faster
    return piece(carry, 0, rows)
  return jax.lax.scan(
    lambda carry, number: piece(carry, number * rows, rows),
    carry,
    jnp.arange(pieces, dtype=jnp.int32),
  )


def _piece_of(
  x: jax.Array, start: chex.Numeric, rows: int, axis: int = 0
) -> jax.Array:
  if rows == x.shape[axis]:
    return x
  return jax.lax.dynamic_slice_in_dim(x, start, rows, axis)


def _load(x: jax.Array, start: chex.Numeric, rows: int) -> jax.Array:
  x = _piece_of(x, start, rows)
  # If not first in rows, XLA would prefer lanes for all of the bucket.
  return platform.laid_out(platform.laid_out(x, in_lanes=False), in_lanes=True)


def _store(x: jax.Array, part: jax.Array, start: chex.Numeric) -> jax.Array:
  part = platform.laid_out(part, in_lanes=False)
  if part.shape == x.shape:
    return part
  return plain.put(x, part, start)


def _shared_indices(bucket: Bucket, step: jax.Array) -> jax.Array:
  """Returns the ascending indices `[k]` that all workers select at `step`."""
  one = jnp.zeros((1, bucket.format.n), bucket.format.dtype)
  return _select(bucket, one, step)[0]


def _select(bucket: Bucket, c: jax.Array, step: jax.Array) -> jax.Array:
  """Returns int32 indices, ascending within a chunk, as messages need them.

  Selectors may return any order and integer dtype, and negative indices.
  """
  indices = bucket.select(c, step).astype(jnp.int32)
  if _is_sound(bucket):
    return indices
  n = bucket.format.n
  return jnp.sort(plain.where(indices < 0, indices + n, indices), axis=1)


def _is_sound(bucket: Bucket) -> bool:
  """Returns whether indices are in range, and in their code's order."""
  return type(bucket.select) is TopK
