"""One coefficient from each group in a chunk, without sorts or gathers.

A chunk has k groups. Place p in group g is coefficient `p k + g`: an array
`[rows, n]` is a table `[rows, places, k]`. With n not divisible by k the first
`n mod k` groups have one place more. Places are int32 `[..., k]`, in the
order of the groups.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from demo_optax.numerics import plain, platform

# Sums, and counts as floats.
Tables = tuple[Array, Array]


def num_places(n: int, k: int) -> int:
  """Returns how many places the largest group has."""
  return -(-n // k)


def largest(coefficients: Array, k: int) -> Array:
  """Returns the place with the largest magnitude in each of `k` groups.

  Takes one maximum over integers. A key has the upper bits from a magnitude,
  the lower bits from the complement of its place. Magnitudes that differ in the
  lower bits alone count as equal; among equals the lowest place wins.
  """
  table = _table(jnp.abs(coefficients), k)  # [rows, places, k]
  integer = jnp.int64 if table.dtype.itemsize == 8 else jnp.int32
  last = table.shape[1] - 1
  low = (1 << last.bit_length()) - 1  # the bits that hold a place
  # Numbers that are not negative sort like their bits.
  bits = lax.bitcast_convert_type(table, integer)
  place = lax.broadcasted_iota(integer, table.shape, 1)
  keys = (bits & ~low) | (last - place)
  return (last - (jnp.max(keys, axis=1) & low)).astype(jnp.int32)


def indices(places: Array) -> Array:
  """Returns the places as indices into their chunk, int32 `[..., k]`."""
  k = places.shape[-1]
  group = lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 1)
  return places * k + group


def places(indices: Array) -> Array:
  """Undoes `indices`."""
  return lax.div(indices, jnp.int32(indices.shape[-1]))


def take(
  coefficients: Array,
  indices: Array,
) -> Array:
  """Returns the values at the indices, `[rows, k]`, from `[rows, n]`."""
  table = _table(coefficients, indices.shape[1])
  hits = _hits(places(indices), table.shape[1])
  return jnp.sum(plain.where(hits, table, 0), axis=1)


def spread(
  indices: Array,
  values: Array,
  n: int,
) -> Array:
  """Returns coefficients `[rows, n]` with the values at the indices."""
  table = _spread(places(indices), values, n)
  return table.reshape(len(values), -1)[:, :n]  # without padding


def add_up(
  indices: Array,
  values: Array,
  present: Array,
  n: int,
) -> Tables:
  """Adds up `[workers, rows, k]` of `present` workers, one after the other.

  Returns tables: the sums, and from how many workers each is, as floats.
  """
  all_places = places(indices)
  counted = present[:, None, None]  # [workers, 1, 1]
  values = plain.where(counted, values, 0)
  ones = jnp.ones_like(values) * counted.astype(values.dtype)

  def tables(worker: Array | int) -> Tables:
    own = all_places[worker]
    return _spread(own, values[worker], n), _spread(own, ones[worker], n)

  def add(worker: Array, sums: Tables) -> Tables:
    return jax.tree.map(jnp.add, sums, tables(worker))

  workers = len(indices)
  turns = platform.unrolled(workers)
  return lax.fori_loop(1, workers, add, tables(0), unroll=turns)


def _spread(
  places: Array,
  values: Array,
  n: int,
) -> Array:
  """Returns a table with the values at their places."""
  hits = _hits(places, num_places(n, places.shape[1]))  # [rows, places, k]
  return plain.where(hits, values[:, None], 0)


def _table(x: Array, k: int) -> Array:
  """Returns `[rows, n]` as `[rows, places, k]`, padded with zeros."""
  rows, n = x.shape
  number = num_places(n, k)
  return plain.pad_to(x, number * k).reshape(rows, number, k)


def _hits(places: Array, number: int) -> Array:
  """Returns where the places are in a bool table `[rows, number, k]`."""
  return places[:, None] == jnp.arange(number, dtype=jnp.int32)[None, :, None]
