"""One coefficient of each of k groups of a chunk, without sorts or gathers.

Place p of group g is coefficient `p k + g` of the n in a chunk: an array
`[..., n]` is a table `[..., places, k]` of whole rows. With n not divisible by
k the first `n mod k` groups have one place more. Arrays of places are int32
`[..., k]`, in the order of the groups.
"""

import functools

import jax
import jax.numpy as jnp


def num_places(n: int, k: int) -> int:
  """Returns the number of places in the largest group."""
  return -(-n // k)


def largest(coefficients: jax.Array, k: int) -> jax.Array:
  """Returns the place of the largest magnitude in each of `k` groups.

  One maximum of integers: the upper bits of a key are those of the magnitude,
  its lower bits the complement of the place. Magnitudes that differ in the
  lower bits alone count as equal; of equals the lowest place wins.
  """
  table = _table(jnp.abs(coefficients), k)
  integer = jnp.int64 if table.dtype.itemsize == 8 else jnp.int32
  last = table.shape[1] - 1
  low = (1 << last.bit_length()) - 1
  place = jax.lax.broadcasted_iota(integer, table.shape, 1)
  bits = jax.lax.bitcast_convert_type(table, integer)
  keys = (bits & ~low) | (last - place)
  return (last - (jnp.max(keys, axis=1) & low)).astype(jnp.int32)


def indices(places: jax.Array) -> jax.Array:
  """Returns the indices of the places in their chunk, int32 `[..., k]`."""
  k = places.shape[-1]
  group = jax.lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 1)
  return places * k + group


def take(coefficients: jax.Array, places: jax.Array) -> jax.Array:
  """Returns the values at the places, `[rows, k]` of `[rows, n]`."""
  table = _table(coefficients, places.shape[-1])
  return jnp.sum(jnp.where(_hits(places, table.shape), table, 0), axis=1)


def spread(places: jax.Array, values: jax.Array, n: int) -> jax.Array:
  """Returns coefficients `[rows, n]` with the values at their places."""
  rows, k = places.shape
  shape = rows, num_places(n, k), k
  table = jnp.where(_hits(places, shape), values[:, None], 0)
  return table.reshape(rows, -1)[:, :n]


def add_up(places: jax.Array, values: jax.Array, n: int) -> jax.Array:
  """Adds up `[workers, rows, k]`, one worker after the other: `[rows, n]`."""
  dense = map(functools.partial(spread, n=n), places, values)
  return functools.reduce(jnp.add, dense)


def count_senders(places: jax.Array, present: jax.Array) -> jax.Array:
  """Returns how many `present` workers sent each coefficient that one sent.

  Takes places `[workers, rows, k]`; returns int32 of that shape.
  """
  ones = present.astype(jnp.int32)
  return functools.reduce(jnp.add, [
      jnp.where(places == other[None], one, 0)
      for other, one in zip(places, ones)
  ])


def _table(x: jax.Array, k: int) -> jax.Array:
  """Returns `[rows, n]` as `[rows, places, k]`, padded with zeros."""
  rows, n = x.shape
  places = num_places(n, k)
  return jnp.pad(x, ((0, 0), (0, places * k - n))).reshape(rows, places, k)


def _hits(places: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns the positions of places in a table, bool `[rows, places, k]`."""
  return jax.lax.broadcasted_iota(jnp.int32, shape, 1) == places[:, None]
