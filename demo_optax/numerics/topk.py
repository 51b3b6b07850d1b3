"""Top-k within chunks, and merging of selections.

Arrays here are coefficients `[chunks, n]` and selected values `[chunks, k]`.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax, vmap

from demo_optax.numerics import one_hot, packing, plain, platform
from demo_optax.numerics.rounding import (
  bits_of,
  exact_reciprocal,
  mul_no_fma,
  share,
)

Average = Literal['senders', 'workers']


def top_k(coefficients: Array, k: int) -> Array:
  """Returns where the `k` largest magnitudes are in each chunk, ascending.

  Ties go to the lowest index, so that the selection depends on the values
  alone, on every backend. Returns int32 `[chunks, k]`; `k` is at most `n`.

  >>> import jax.numpy as jnp
  >>> top_k(jnp.array([[0.0, 2.0, -2.0, 3.0]]), 2)
  Array([[1, 3]], dtype=int32)
  """
  n = coefficients.shape[1]
  size = platform.top_k_tile(coefficients.size, n, k)
  if size > 1:
    return top_k_of_tiles(coefficients, k, size)
  _, places = lax.top_k(jnp.abs(coefficients), k)
  return jnp.sort(places.astype(jnp.int32))


def top_k_of_tiles(
  coefficients: Array,
  k: int,
  size: int,
) -> Array:
  """As `top_k`, within the `k` tiles with the largest maxima.

  Returns the indices of `lax.top_k`, ties included. Suppose one among them were
  in a tile not chosen. Each chosen tile would hold a larger value, or an equal
  one at a lower index. `coefficients` are `[chunks, n]`, without NaN; `size` is
  a power of two that divides `n`; `k` at most `n / size`.
  """
  chunks, n = coefficients.shape
  num_tiles = n // size
  tiles = coefficients.reshape(chunks, num_tiles, size)
  if platform.counts_top_k():
    largest = _largest
    maxima = jnp.abs(coefficients)
    while maxima.shape[1] > num_tiles:  # CPUs reduce a short axis slowly
      even, odd = maxima[:, ::2], maxima[:, 1::2]
      maxima = jnp.maximum(even, odd)
  else:
    largest = top_k  # in tiles again
    magnitudes = jnp.abs(tiles)
    maxima = jnp.max(magnitudes, axis=2)
  # [chunks, k], ascending: of equals the first must be chosen
  chosen = largest(maxima, k)
  candidates = packing.take(tiles, chosen)  # [chunks, k, size]
  candidates = candidates.reshape(chunks, k * size)
  places = largest(candidates, k)
  tile = packing.take(chosen, places // size)
  return tile * size + places % size


def _largest(
  coefficients: Array,
  k: int,
) -> Array:
  """As `top_k`, without a sort."""
  n = coefficients.shape[1]
  keys = bits_of(jnp.abs(coefficients))  # sort like the magnitudes
  bits = jnp.iinfo(keys.dtype).bits - 1
  threshold = _kth_largest(keys, k, bits)
  # All above the threshold, and the first of those equal to it: exactly k.
  places = jnp.arange(n, dtype=jnp.int32)
  order = n - places[None]  # [1, n]
  order = jnp.where(keys == threshold, order, 0)
  order = jnp.where(keys > threshold, n + 1, order)
  last = _kth_largest(order, k, (n + 1).bit_length())
  return packing.places_of_ones(order >= last, k)


def _kth_largest(
  keys: Array,
  k: int,
  bits: int,
) -> Array:
  """Returns the k-th largest integer `[chunks, 1]`, all below `2**bits`.

  Bit by bit from the highest: the largest number that `k` keys reach.
  """

  def set_bit(number: Array, reached: Array) -> Array:
    bit = jnp.asarray(bits - 1 - number, keys.dtype)
    power = jnp.left_shift(jnp.ones_like(bit), bit)
    trial = reached | power
    enough = _count(keys >= trial) >= k
    return jnp.where(enough, trial, reached)

  zeros = jnp.zeros_like(keys[:, :1])
  return lax.fori_loop(0, bits, set_bit, zeros)


def _count(mask: Array) -> Array:
  """Counts the true elements in each row, bool `[chunks, n]`.

  In two sums, since LLVM vectorises the first over neighbours in memory. XLA
  would merge two integer sums into one, ten times as slow on CPUs.
  """
  chunks, n = mask.shape
  padded = plain.pad_to(mask, n + -n % 16)
  table = padded.reshape(chunks, 16, -1)
  counts = jnp.sum(table, axis=1, dtype=jnp.int32)
  return jnp.sum(counts, axis=1, dtype=jnp.float32, keepdims=True)


def take(coefficients: Array, indices: Array) -> Array:
  """Returns the values `[chunks, k]` at `indices` in `[chunks, n]`."""
  if platform.by_product():
    return one_hot.take(coefficients, indices)
  return packing.take(coefficients, indices)


def subtract(
  coefficients: Array,
  indices: Array | None,
  values: Array,
) -> Array:
  """Subtracts `values [chunks, k]` at `indices` in `[chunks, n]`."""
  if indices is None:
    return coefficients - values
  if platform.by_product():
    n = coefficients.shape[1]
    return coefficients - one_hot.spread(indices, values, n)
  rows = packing.row_numbers(indices)
  return coefficients.at[rows, indices].add(
    -values,
    unique_indices=True,
    indices_are_sorted=True,
    mode='promise_in_bounds',
    wrap_negative_indices=False,
  )


def merge(
  indices: Array | None,
  values: Array,
  present: Array,
  n: int,
  average: Average,
  weights: Array | None = None,
) -> tuple[Array, Array]:
  """Averages values `[workers, chunks, k]` of `present` workers, bool.

  For `average='senders'` over those that sent a coefficient, for `'workers'`
  over all that are present; rows of absent ones may hold anything. With weights
  `[workers]` the averages are weighted; equal weights give the bits of none.
  Returns dense `[chunks, n]`, and the number of different coefficients that
  were sent, float32 `[]`.
  """
  workers = len(values)
  dtype = values.dtype
  everyone = jnp.sum(present, dtype=jnp.int32)
  if indices is not None and platform.by_product() and weights is None:
    total, senders = one_hot.add_up(indices, values, present, n)
    was_sent = (senders > 0).astype(jnp.float32)
    distinct = jnp.sum(was_sent)
    if average == 'senders':
      mean = total / jnp.maximum(senders, 1)
    else:
      of_each = exact_reciprocal(everyone, workers, dtype)
      mean = mul_no_fma(of_each, total)
    mean = platform.laid_out(mean, in_lanes=True)
    mean = mean.reshape(len(mean), -1)  # [chunks, n, and padding]
    return mean[:, :n], distinct

  counted = present[:, None, None]
  if weights is not None:
    weights = weights.astype(dtype)[:, None, None]
    weights = jnp.where(counted, weights, 0)

  def shares_of(indices: Array | None) -> Array:
    """Returns shares in each coefficient, or without indices in all."""
    if weights is not None:
      return _weighted_shares(indices, weights, n)
    senders = everyone
    if indices is not None and workers > 1:
      senders = _count_senders(indices, counted, n)
    return exact_reciprocal(senders, workers, dtype)

  shares = shares_of(indices)
  # The shares of those who sent a coefficient add up to one.
  given = jnp.where(counted, shares, 0)
  one_each = jnp.broadcast_to(given, values.shape)
  distinct = jnp.sum(one_each, dtype=jnp.float32)
  if average == 'workers':
    shares = shares_of(None)
  weighted = mul_no_fma(shares, values)
  terms = jnp.where(counted, weighted, 0)
  return _add_in_turn(indices, terms, n), distinct


def _add_in_turn(
  indices: Array | None,
  values: Array,
  n: int,
) -> Array:
  """Adds values `[workers, chunks, k]` at their places; dense `[chunks, n]`.

  Deterministic on every backend: workers are added one after the other, and
  indices of a worker are distinct, so that no scatter writes a place twice.
  """
  workers, chunks, k = values.shape
  places = jnp.arange(n, dtype=jnp.int32)[None]

  def add_worker(worker: Array, total: Array) -> Array:
    added = values[worker]  # [chunks, k]
    if indices is None:
      return total + added
    own = indices[worker]
    if platform.by_comparison(workers, k):
      return total + jnp.where(own == places, added, 0)
    return subtract(total, own, -added)

  # From the values, to vary over the same axes in a shard_map that tracks them.
  zeros = jnp.zeros_like(values, shape=(chunks, n))
  turns = platform.unrolled(workers)
  return lax.fori_loop(0, workers, add_worker, zeros, unroll=turns)


def _weighted_shares(
  indices: Array | None,
  weights: Array,
  n: int,
) -> Array:
  """Returns shares of `weights [workers, 1, 1]` in those of all senders.

  Without indices every worker has sent every value.
  """
  if indices is None:
    total = _add_in_turn(None, weights, 1)
    total = total[None]  # [1, 1, 1]
  else:
    of_values = jnp.broadcast_to(weights, indices.shape)
    dense = _add_in_turn(indices, of_values, n)  # [chunks, n]
    take_all = vmap(take, in_axes=(None, 0))
    total = take_all(dense, indices)  # [workers, chunks, k]
  return share(weights, total, weights.dtype)


def _count_senders(
  indices: Array,
  counted: Array,
  n: int,
) -> Array:
  """Returns how many of the `counted` sent each of `indices`, int32."""
  workers, chunks, k = indices.shape
  if platform.count_by_comparison(workers * k):
    by_chunk = jnp.swapaxes(indices, 0, 1)
    places = by_chunk.reshape(chunks, workers * k)
    # All pairs, [chunks, workers * k, workers * k].
    same = places[:, :, None] == places[:, None]
    of_each = jnp.broadcast_to(counted, (workers, 1, k))
    same &= of_each.reshape(1, 1, -1)
    senders = jnp.sum(same, axis=2, dtype=jnp.int32)
    senders = senders.reshape(chunks, workers, k)
    return jnp.swapaxes(senders, 0, 1)
  zeros = jnp.zeros((chunks, n), jnp.int32)
  rows = packing.row_numbers(indices)
  counts = zeros.at[rows, indices].add(
    counted.astype(jnp.int32),
    mode='promise_in_bounds',
    wrap_negative_indices=False,
  )
  return packing.take(counts, indices)
