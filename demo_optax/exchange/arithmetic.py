"""A bucket's arithmetic, on CPUs and TPUs in parts that fit fast memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

from demo_optax.compressors import chunking
from demo_optax.compressors.layout import Bucket
from demo_optax.compressors.selectors import TopK
from demo_optax.exchange.message import Received, Selected
from demo_optax.numerics import plain, platform, rounding, topk


def accumulate_and_select(
  bucket: Bucket,
  gradients: Array,
  momentum: Array | None,
  decay: chex.Numeric,
  weight: chex.Numeric,
  valid: Array,
  step: Array,
) -> tuple[Array | None, Selected]:
  """Adds gradient chunks to momentum `[rows, n]`; selects what to send.

  Momentum does not change unless `valid`, bool `[]`. It is None without error
  feedback.
  """

  def add_piece(
    momentum: Array | None,
    piece: _Piece,
  ) -> tuple[Array | None, Selected]:
    chunks = piece.load(gradients)  # [rows, n]
    weighted = rounding.mul_no_fma(weight, chunks)
    new = chunking.transform(weighted, bucket.sides, bucket.basis)
    if momentum is not None:
      former = piece.load(momentum)
      new = rounding.mul_no_fma(decay, former) + new
      new = jnp.where(valid, new, former)
      momentum = piece.store(momentum, new)
    indices, values = None, new  # if all are sent
    if bucket.format.k < bucket.format.n:
      indices = _places(bucket, new, step)
      values = topk.take(new, indices)
    return momentum, Selected(indices, values)

  momentum, selected = _in_pieces(bucket, add_piece, momentum)
  # From [pieces, rows of a piece, k].
  shape = bucket.rows, bucket.format.k
  return momentum, jax.tree.map(lambda x: x.reshape(shape), selected)


def subtract(
  bucket: Bucket,
  momentum: Array,
  indices: Array | None,
  values: Array,
) -> Array:
  """Subtracts `values [rows, k]` at `indices` from momentum `[rows, n]`."""
  if not platform.chunks_in_lanes(bucket.rows) or indices is None:
    return topk.subtract(momentum, indices, values)

  def subtract_piece(
    momentum: Array,
    piece: _Piece,
  ) -> tuple[Array, None]:
    places = piece.cut(indices)
    leaving = piece.cut(values)
    held = piece.load(momentum)
    stays = topk.subtract(held, places, leaving)
    return piece.store(momentum, stays), None

  momentum, _ = _in_pieces(bucket, subtract_piece, momentum)
  return momentum


def merge(
  bucket: Bucket,
  received: Received,
  average: topk.Average,
  step: Array,
) -> tuple[Array, Array]:
  """Averages all workers' selections and inverts the transform.

  Returns update chunks `[rows, n]`, and how many different coefficients were
  sent, float32 `[]`, also in rows that fill the bucket.
  """
  n = bucket.format.n
  if bucket.format.shared and bucket.format.k < n:
    like = jnp.zeros_like(received.values[0])
    indices = _places(bucket, like, step)  # [rows, k]
    indices = jnp.broadcast_to(indices, received.values.shape)
    received = received._replace(indices=indices)

  def merge_piece(
    carry: tuple[Array, Array],
    piece: _Piece,
  ) -> tuple[Any, None]:
    updates, distinct = carry
    indices, values = jax.tree.map(  # [senders, rows, k]
      lambda x: piece.cut(x, axis=1), received[:2]
    )
    mean, count = topk.merge(
      indices,
      values,
      received.valid,
      n,
      average,
      received.weights,
    )
    update = chunking.inverse(mean, bucket.sides, bucket.basis)
    updates = piece.store(updates, update)
    return (updates, distinct + count), None

  # Zeros that depend on received values: XLA would otherwise allocate them
  # before the exchange, while the gradients' chunks are still alive.
  zero = jnp.zeros_like(received.values, shape=())
  num_valid = jnp.sum(received.valid, dtype=jnp.int32)
  zero = jnp.where(num_valid < 0, jnp.ones_like(zero), zero)
  updates = jnp.broadcast_to(zero, (bucket.rows, n))
  distinct = jnp.zeros_like(received.values, jnp.float32, shape=())
  merged, _ = _in_pieces(bucket, merge_piece, (updates, distinct))
  return merged


class _Piece(NamedTuple):
  """Some of a bucket's rows, which are handled together."""

  start: chex.Numeric
  rows: int

  def cut(
    self,
    x: Array,
    axis: int = 0,
  ) -> Array:
    """Returns these rows."""
    if self.rows == x.shape[axis]:
      return x
    return lax.dynamic_slice_in_dim(x, self.start, self.rows, axis)

  def load(self, x: Array) -> Array:
    """Returns these rows, in lanes where chunks are."""
    part = platform.laid_out(self.cut(x), in_lanes=False)
    # If not first in rows, XLA would prefer lanes for all of the bucket.
    return platform.laid_out(part, in_lanes=True)

  def store(
    self,
    x: Array,
    part: Array,
  ) -> Array:
    """Returns `x` with `part` as these rows."""
    part = platform.laid_out(part, in_lanes=False)
    if part.shape == x.shape:
      return part
    return plain.put(x, part, self.start)


def _in_pieces(
  bucket: Bucket,
  fun: Callable[[Any, _Piece], tuple[Any, Any]],
  carry: Any,
) -> tuple[Any, Any]:
  """Scans `fun` over a bucket's pieces, on CPUs and TPUs."""
  elements = bucket.rows * bucket.format.n
  count = platform.num_pieces(bucket.pieces, elements)
  rows = bucket.rows // count
  if count == 1:  # also compiles faster
    return fun(carry, _Piece(0, rows))
  numbers = jnp.arange(count, dtype=jnp.int32)
  return lax.scan(
    lambda carry, number: fun(carry, _Piece(number * rows, rows)),
    carry,
    numbers,
  )


def _places(
  bucket: Bucket,
  coefficients: Array,
  step: Array,
) -> Array:
  """Returns int32 `[rows, k]`, ascending within a chunk, as messages need them.

  Selectors may return any order and integer dtype. What all workers select
  depends on the step alone.
  """
  shape = len(coefficients), bucket.format.k
  if bucket.format.shared:
    coefficients = jnp.zeros((1, bucket.format.n), coefficients.dtype)
  indices = bucket.select(coefficients, step).astype(jnp.int32)
  if type(bucket.select) is not TopK:  # whose order is that of messages
    indices = jnp.sort(indices, axis=1)
  return jnp.broadcast_to(indices, shape)
