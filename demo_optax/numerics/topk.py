"""Top-k within chunks, and merging what the workers selected.

Arrays here are `[chunks, n]` (coefficients) and `[chunks, k]` (what is sent).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from demo_optax.numerics import bits as packing
from demo_optax.numerics import groups, platform, rounding

Average = Literal['senders', 'workers']


def top_k(coefficients: jax.Array, k: int) -> jax.Array:
  """Returns the places of the `k` largest magnitudes in each chunk.

  Ties go to the lowest index, so that the selection is a function of the
  values alone on every backend. The places are a set, in ascending order.

  Args:
    coefficients: `[chunks, n]`.
    k: how many, at most `n`.

  Returns:
    int32 `[chunks, k]`, ascending within a chunk.

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
  """Does what `top_k` does in the `k` groups of `size` with largest maxima.

  The groups are put in order before the second stage: of equal magnitudes the
  one at the lowest place must come first there (see `top_k_by_counting`).

  Args:
    magnitudes: `[chunks, n]`, not negative and no NaN.
    k: how many, at most `n / size`.
    size: length of a group, which divides `n`.

  Returns:
    int32 `[chunks, k]`, ascending within a chunk.
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
  """Does what `top_k` does in the `k` groups of `size` with largest maxima.

  The same places as those of `lax.top_k` of all, ties included: if a place of
  those were in a group not chosen, each of the `k` chosen groups would hold a
  larger value, or an equal one at a lower place, since groups are in order.

  Args:
    magnitudes: `[chunks, n]`, not negative and no NaN.
    k: how many, at most `n / size`.
    size: length of a group, a power of 2 that divides `n`.

  Returns:
    int32 `[chunks, k]`, ascending within a chunk.
  """
  chunks, n = magnitudes.shape
  # Numbers that are not negative are in the order of their bits.
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
  """Places of the `k` largest of integers, of equals the first; ascending."""
  n = keys.shape[1]
  threshold = _kth_largest(keys, k, jnp.iinfo(keys.dtype).bits - 1)
  # All above, and of those equal the first, which makes exactly k.
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
  """Returns how many of each row of bool `[chunks, n]` are true, `[chunks, 1]`.

  In two sums, of which XLA would make one if both were of integers, ten times
  as slow on CPUs: LLVM vectorises the first over neighbours in memory, and the
  one over rows.
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
  if grouped and platform.by_comparison():
    return groups.take(coefficients, _places(indices))
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
  if grouped and platform.by_comparison():
    n = coefficients.shape[1]
    return coefficients - groups.spread(_places(indices), values, n)
  return coefficients.at[packing.row_numbers(indices), indices].add(
      -values, unique_indices=True, mode='promise_in_bounds',
      wrap_negative_indices=False,
  )


def weigh(
    indices: jax.Array | None,
    values: jax.Array,
    present: jax.Array,
    n: int,
    average: Average,
    grouped: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns the share of each worker's values in the average of all.

  Args:
    indices: int32 `[workers, chunks, k]`; `None` if all are sent.
    values: `[workers, chunks, k]`; rows of absent workers may hold anything.
    present: bool `[workers]`, the workers that are valid.
    n: number of coefficients in a chunk.
    average: `'senders'` divides each coefficient by the number of workers that
      sent it, `'workers'` by the number of workers present.
    grouped: whether one of each group was selected.

  Returns:
    `[workers, chunks, k]`, zero for absent workers; and float32 `[]`, how many
    different coefficients were sent.
  """
  workers, chunks, _ = values.shape
  counted = present[:, None, None]
  everyone = jnp.sum(present, dtype=jnp.int32)
  if indices is None or workers == 1:
    senders = everyone
  elif grouped and platform.by_comparison():
    senders = groups.count_senders(indices, present)
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
    indices: jax.Array | None,
    values: jax.Array,
    n: int,
    grouped: bool = False,
) -> jax.Array:
  """Adds up what workers selected, as dense coefficients.

  Deterministic on every backend: values are added one worker after the other,
  each of whose indices are distinct within a chunk; no place is written twice
  by one scatter.

  Args:
    indices: int32 `[workers, chunks, k]`; `None` if all are sent.
    values: `[workers, chunks, k]`.
    n: number of coefficients in a chunk.
    grouped: whether one of each group was selected.

  Returns:
    `[chunks, n]`, zero where nothing was sent.
  """
  workers, chunks, _ = values.shape
  if grouped and indices is not None and platform.by_comparison():
    return groups.add_up(_places(indices), values, n)

  def add_worker(worker: jax.Array, total: jax.Array) -> jax.Array:
    if indices is None:
      return total + values[worker]
    return subtract(total, indices[worker], -values[worker])

  # Like the values in what it varies over, in a shard_map that tracks it.
  zeros = jnp.zeros_like(values, shape=(chunks, n))
  return jax.lax.fori_loop(0, workers, add_worker, zeros)


def _places(indices: jax.Array) -> jax.Array:
  """Returns the places in their groups of indices `[..., k]`."""
  return indices // indices.shape[-1]
