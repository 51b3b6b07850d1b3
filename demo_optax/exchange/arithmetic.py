"""A bucket's arithmetic: on CPUs in pieces that fit the caches."""

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
    g = jax.lax.dynamic_slice_in_dim(gradients, start, rows)  # [rows, n]
    old = jax.lax.dynamic_slice_in_dim(momentum, start, rows)

    def add(_: Any, m: jax.Array) -> jax.Array:
      c = rounding.mul_no_fma(weight, g)
      if bucket.kind == 'chunks':
        c = chunking.transform(c, bucket.sides, bucket.basis)
      return rounding.mul_no_fma(decay, m) + c

    if platform.loop_to_keep(gradients.size):
      m = jax.lax.fori_loop(0, valid.astype(jnp.int32), add, old)
    else:
      m = platform.stored(jnp.where(valid, add(None, old), old))
    momentum = jax.lax.dynamic_update_slice_in_dim(momentum, m, start, 0)
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

  momentum, (indices, values, energies) = jax.lax.scan(
      add_piece,
      momentum,
      jnp.arange(pieces, dtype=jnp.int32),
      unroll=pieces == 1,
  )
  if indices is not None:
    indices = indices.reshape(bucket.rows, k)
  values = values.reshape(bucket.rows, k)
  return momentum, Selected(indices, values, jnp.sum(energies))


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
    updates = jax.lax.dynamic_update_slice_in_dim(updates, u, start, 0)
    return (updates, distinct + found), None

  # Zeros that depend on received values: XLA would otherwise allocate them
  # before the exchange, while the gradients' chunks are still alive.
  zero = jnp.zeros_like(received.values, shape=())
  count = jnp.sum(received.valid, dtype=jnp.int32)
  zero = jnp.where(count < 0, jnp.ones_like(zero), zero)
  carry = (
      jnp.broadcast_to(zero, (bucket.rows, n)),
      jnp.zeros_like(received.values, jnp.float32, shape=()),
  )
  (updates, distinct), _ = jax.lax.scan(
      merge_piece,
      carry,
      jnp.arange(pieces, dtype=jnp.int32),
      unroll=pieces == 1,
  )
  # Padding rows count as sent; remove them.
  padding = (bucket.rows - bucket.num_chunks) * bucket.format.k
  someone = jnp.any(received.valid)
  return updates, distinct - jnp.where(someone, float(padding), 0.0)


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
