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
  momentum: jax.Array | None,
  decay: chex.Numeric,
  weight: chex.Numeric,
  valid: jax.Array,
  step: jax.Array,
) -> tuple[jax.Array | None, Selected]:
  """Adds gradient chunks to momentum `[rows, n]`; selects what to send.

  Momentum does not change unless `valid`, bool `[]`. It is None without error
  feedback.
  """

  def add_piece(
    momentum: jax.Array | None, start: chex.Numeric, rows: int
  ) -> Any:
    c = rounding.mul_no_fma(weight, _load(gradients, start, rows))  # [rows, n]
    c = chunking.transform(c, bucket.sides, bucket.basis)
    if momentum is not None:
      old = _load(momentum, start, rows)
      c = jnp.where(valid, rounding.mul_no_fma(decay, old) + c, old)
      momentum = _store(momentum, c, start)
    return momentum, _select(bucket, c, step)

  momentum, found = _in_pieces(bucket, add_piece, momentum)
  shape = bucket.rows, bucket.format.k
  indices, values = jax.tree.map(lambda x: x.reshape(shape), found)
  held = jnp.zeros((), jnp.float32)
  if momentum is not None:
    held = energy(momentum)
  return momentum, Selected(indices, values, held)


def _select(
  bucket: Bucket, c: jax.Array, step: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
  """Returns the indices `[rows, k]` that are sent, if not all, and values."""
  if bucket.format.k == bucket.format.n:
    return None, c
  indices = _places(bucket, c, step)
  return indices, topk.take(c, indices)


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
) -> tuple[jax.Array, jax.Array]:
  """Averages all workers' selections and inverts the transform.

  Returns update chunks `[rows, n]`, and how many different coefficients were
  sent, float32 `[]`, also in rows that fill the bucket.
  """
  n, k = bucket.format.n, bucket.format.k
  if bucket.format.shared and k < n:
    indices = _places(bucket, jnp.zeros_like(received.values[0]), step)
    indices = jnp.broadcast_to(indices, received.values.shape)
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
    u = chunking.inverse(u, bucket.sides, bucket.basis)
    return (_store(updates, u, start), distinct + found), None

  # Zeros that depend on received values: XLA would otherwise allocate them
  # before the exchange, while the gradients' chunks are still alive.
  zero = jnp.zeros_like(received.values, shape=())
  count = jnp.sum(received.valid, dtype=jnp.int32)
  zero = jnp.where(count < 0, jnp.ones_like(zero), zero)
  updates = jnp.broadcast_to(zero, (bucket.rows, n))
  carry = updates, jnp.zeros_like(received.values, jnp.float32, shape=())
  return _in_pieces(bucket, merge_piece, carry)[0]


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


def _places(bucket: Bucket, c: jax.Array, step: jax.Array) -> jax.Array:
  """Returns int32 `[rows, k]`, ascending within a chunk, as messages need them.

  Selectors may return any order and integer dtype. What all workers select
  depends on the step alone.
  """
  rows = len(c)
  if bucket.format.shared:
    c = jnp.zeros((1, bucket.format.n), c.dtype)
  indices = bucket.select(c, step).astype(jnp.int32)
  if not _is_sound(bucket):
    indices = jnp.sort(indices, axis=1)
  return jnp.broadcast_to(indices, (rows, bucket.format.k))


def _is_sound(bucket: Bucket) -> bool:
  """Returns whether indices are selected in their code's order."""
  return type(bucket.select) is TopK
