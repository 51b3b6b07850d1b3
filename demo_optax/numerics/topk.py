"""Top-k within chunks, and merging of selections.

Arrays here are coefficients `[chunks, n]` and selected values `[chunks, k]`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from demo_optax.numerics import bits as packing
from demo_optax.numerics import groups, one_hot, platform, rounding

Average = Literal['senders', 'workers']


def top_k(coefficients: jax.Array, k: int) -> jax.Array:
  """Returns the indices of the `k` largest magnitudes in each chunk, ascending.

  Ties go to the lowest index, so that the selection depends on the values
  alone, on every backend. Returns int32 `[chunks, k]`; `k` is at most `n`.

  >>> import jax.numpy as jnp
  >>> top_k(jnp.array([[0.0, 2.0, -2.0, 3.0]]), 2)
  Array([[1, 3]], dtype=int32)
  """
  chunks, n = coefficients.shape
  if k == n:
    return jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (chunks, n))
  magnitudes = jnp.abs(coefficients)
  size = platform.group_size(coefficients.size, n, k)
  if size > 1:
    return top_k_by_counting(magnitudes, k, size)
  size = platform.stage_size(n, k)
  if size > 1:
    return top_k_in_two_stages(magnitudes, k, size)
  return _sorted_top_k(magnitudes, k)


def top_k_in_two_stages(magnitudes: jax.Array, k: int, size: int) -> jax.Array:
  """As `top_k_by_counting`, by two of `lax.top_k`.

  The chosen groups are sorted before the second stage: among equal magnitudes,
  the one at the lowest index must come first.
  """
  chunks, n = magnitudes.shape
  in_groups = magnitudes.reshape(chunks, n // size, size)
  groups = _sorted_top_k(jnp.max(in_groups, axis=2), k)
  candidates = packing.take(in_groups, groups).reshape(chunks, k * size)
  found = _sorted_top_k(candidates, k)
  return packing.take(groups, found // size) * size + found % size


def _sorted_top_k(x: jax.Array, k: int) -> jax.Array:
  return jnp.sort(jax.lax.top_k(x, k)[1].astype(jnp.int32))


def top_k_by_counting(magnitudes: jax.Array, k: int, size: int) -> jax.Array:
  """As `top_k`, within the `k` groups of `size` with the largest maxima.

  Returns the indices of `lax.top_k`, ties included. Suppose one of those were
  in a group not chosen. Each chosen group would hold a larger value, or an
  equal one at a lower index. `magnitudes` are `[chunks, n]`, without negative
  numbers and NaN; `size` is a power of 2 that divides `n`, and `k` at most
  `n / size`.
  """
  chunks, n = magnitudes.shape
  # Numbers that are not negative sort like their bits.
  bits = jnp.int64 if magnitudes.dtype.itemsize == 8 else jnp.int32
  keys = jax.lax.bitcast_convert_type(magnitudes, bits)
  maxima = keys
  while maxima.shape[1] > n // size:  # faster in pairs than as one reduction
    maxima = jnp.maximum(maxima[:, ::2], maxima[:, 1::2])
  groups = _largest(maxima, k)
  candidates = packing.take(keys.reshape(chunks, n // size, size), groups)
  found = _largest(candidates.reshape(chunks, k * size), k)
  group = packing.take(groups, found >> (size.bit_length() - 1))
  return group * size + (found & (size - 1))


def _largest(keys: jax.Array, k: int) -> jax.Array:
  """Returns the ascending places of the `k` largest; of equals, the first."""
  n = keys.shape[1]
  threshold = _kth_largest(keys, k, jnp.iinfo(keys.dtype).bits - 1)
  # All above the threshold, and the first of those equal to it: exactly k.
  order = n - jnp.arange(n, dtype=jnp.int32)[None]
  order = jnp.where(keys == threshold, order, 0)
  order = jnp.where(keys > threshold, n + 1, order)
  last = _kth_largest(order, k, (n + 1).bit_length())
  return packing.places_of_ones(order >= last, k)


def _kth_largest(keys: jax.Array, k: int, bits: int) -> jax.Array:
  """Returns the k-th largest integer `[chunks, 1]` of those below `2**bits`.

  Bit by bit from the highest: the largest number that `k` keys reach.
  """

  def set_bit(number: jax.Array, found: jax.Array) -> jax.Array:
    bit = jnp.asarray(bits - 1 - number, keys.dtype)
    trial = found | jnp.left_shift(jnp.ones_like(bit), bit)
    return jnp.where(_count(keys >= trial) >= k, trial, found)

  return jax.lax.fori_loop(0, bits, set_bit, jnp.zeros_like(keys[:, :1]))


def _count(mask: jax.Array) -> jax.Array:
  """Returns the number of true elements per row of bool `[chunks, n]`.

  In two sums, since LLVM vectorises the first over neighbours in memory. XLA
  would merge two integer sums into one, ten times as slow on CPUs.
  """
  chunks, n = mask.shape
  mask = jnp.pad(mask, ((0, 0), (0, -n % 16))).reshape(chunks, 16, -1)
  counts = jnp.sum(mask, axis=1, dtype=jnp.int32).astype(jnp.float32)
  return jnp.sum(counts, axis=1, keepdims=True)


def take(
    coefficients: jax.Array,
    indices: jax.Array | None,
    grouped: bool = False,
) -> jax.Array:
  """Returns the values `[chunks, k]` of `coefficients [chunks, n]`."""
  if indices is None:
    return coefficients
  if grouped:
    return groups.take(coefficients, groups.places(indices))
  if platform.by_product():
    return one_hot.take(coefficients, indices)
  return packing.take(coefficients, indices)


def subtract(
    coefficients: jax.Array,
    indices: jax.Array | None,
    values: jax.Array,
    grouped: bool = False,
) -> jax.Array:
  """Subtracts `values [chunks, k]` at `indices` of `[chunks, n]`."""
  if indices is None:
    return coefficients - values
  n = coefficients.shape[1]
  if grouped:
    return coefficients - groups.spread(groups.places(indices), values, n)
  if platform.by_product():
    return coefficients - one_hot.spread(indices, values, n)
  return coefficients.at[packing.row_numbers(indices), indices].add(
      -values, unique_indices=True, indices_are_sorted=True,
      mode='promise_in_bounds', wrap_negative_indices=False,
  )


def merge(
    indices: jax.Array | None,
    values: jax.Array,
    present: jax.Array,
    n: int,
    average: Average,
    grouped: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Averages selections; see `weigh`. Returns dense `[chunks, n]`, and a count.

  The count is that of different coefficients that were sent, float32 `[]`.
  """
  if indices is not None and grouped:
    total, senders = groups.add_up(groups.places(indices), values, present, n)
  elif indices is not None and platform.by_product():
    total, senders = one_hot.add_up(indices, values, present, n)
  else:
    values, distinct = weigh(indices, values, present, n, average)
    return add_up(indices, values, n), distinct
  distinct = jnp.sum((senders > 0).astype(jnp.float32))
  if average == 'senders':
    mean = total / jnp.maximum(senders, 1)
  else:
    everyone = jnp.sum(present, dtype=jnp.int32)
    share = rounding.exact_reciprocal(everyone, len(values), values.dtype)
    mean = rounding.mul_no_fma(share, total)
  return platform.in_lanes(mean).reshape(len(mean), -1)[:, :n], distinct


def weigh(
    indices: jax.Array | None,
    values: jax.Array,
    present: jax.Array,
    n: int,
    average: Average,
) -> tuple[jax.Array, jax.Array]:
  """Divides values `[workers, chunks, k]` by the number of workers averaged.

  That is, for `average='senders'`, of those that sent a coefficient; for
  `'workers'`, of all `present`, bool `[workers]`. Returns the weighted values,
  zero for absent workers, whose rows may hold anything; and the number of
  different coefficients sent, float32 `[]`.
  """
  workers, chunks, k = values.shape
  counted = present[:, None, None]
  everyone = jnp.sum(present, dtype=jnp.int32)
  if indices is None or workers == 1:
    senders = everyone
  elif platform.count_by_comparison(workers * k):
    places = jnp.swapaxes(indices, 0, 1).reshape(chunks, workers * k)
    counts = jnp.broadcast_to(present[:, None], (workers, k)).reshape(1, 1, -1)
    same = (places[:, :, None] == places[:, None]) & counts
    senders = jnp.sum(same, axis=2, dtype=jnp.int32)
    senders = jnp.swapaxes(senders.reshape(chunks, workers, k), 0, 1)
  else:
    rows = jnp.broadcast_to(packing.row_numbers(indices[0]), indices.shape)
    ones = jnp.broadcast_to(counted.astype(jnp.int32), indices.shape)
    counts = jnp.zeros((chunks, n), jnp.int32)
    counts = counts.at[rows, indices].add(
        ones, mode='promise_in_bounds', wrap_negative_indices=False
    )
    senders = counts.at[rows, indices].get(
        mode='promise_in_bounds', wrap_negative_indices=False
    )
  shares = rounding.exact_reciprocal(senders, workers, values.dtype)
  one_each = jnp.broadcast_to(jnp.where(counted, shares, 0), values.shape)
  distinct = jnp.sum(one_each.astype(jnp.float32))
  if average == 'workers':
    shares = rounding.exact_reciprocal(everyone, workers, values.dtype)
  return jnp.where(counted, rounding.mul_no_fma(shares, values), 0), distinct


def add_up(
    indices: jax.Array | None, values: jax.Array, n: int
) -> jax.Array:
  """Adds up workers' values `[workers, chunks, k]` as dense `[chunks, n]`.

  Deterministic on every backend: workers are added one after the other, and
  each worker's indices are distinct, so that no scatter writes a place twice.
  """
  workers, chunks, _ = values.shape

  def add_worker(worker: jax.Array, total: jax.Array) -> jax.Array:
    own = None if indices is None else indices[worker]
    return subtract(total, own, -values[worker])

  # From the values, to vary over the same axes in a shard_map that tracks them.
  zeros = jnp.zeros_like(values, shape=(chunks, n))
  return jax.lax.fori_loop(
      0, workers, add_worker, zeros, unroll=platform.unrolls(workers)
  )
