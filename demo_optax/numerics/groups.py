"""One coefficient of each of k groups of a chunk, without sorts or gathers.

Place p of group g is coefficient `p k + g` of the n in a chunk: an array
`[rows, n]` is a table `[rows, places, k]`. With n not divisible by k the first
`n mod k` groups have one place more. Arrays of places are int32 `[..., k]`, in
the order of the groups.
"""

import jax
import jax.numpy as jnp

from demo_optax.numerics import plain, platform


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
  last = num_places(coefficients.shape[1], k) - 1
  low = (1 << last.bit_length()) - 1
  bits = jax.lax.bitcast_convert_type(table, integer)
  place = jax.lax.broadcasted_iota(integer, table.shape, 1)
  keys = (bits & ~low) | (last - place)
  return (last - (jnp.max(keys, axis=1) & low)).astype(jnp.int32)


def indices(places: jax.Array) -> jax.Array:
  """Returns the indices of the places in their chunk, int32 `[..., k]`."""
  k = places.shape[-1]
  group = jax.lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 1)
  return places * k + group


def places(indices: jax.Array) -> jax.Array:
  """Undoes `indices`."""
  return jax.lax.div(indices, jnp.int32(indices.shape[-1]))


def take(coefficients: jax.Array, indices: jax.Array) -> jax.Array:
  """Returns the values at the indices, `[rows, k]` of `[rows, n]`."""
  table = _table(coefficients, indices.shape[1])
  hits = _hits(places(indices), table.shape[1])
  return jnp.sum(plain.where(hits, table, 0), axis=1)


def spread(indices: jax.Array, values: jax.Array, n: int) -> jax.Array:
  """Returns coefficients `[rows, n]` with the values at the indices."""
  return _spread(places(indices), values, n).reshape(len(values), -1)[:, :n]


def add_up(
  indices: jax.Array, values: jax.Array, present: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
  """Adds up `[workers, rows, k]` of `present` workers, one after the other.

  Returns tables: the sums, and from how many workers each is, as floats.
  """
  values = plain.where(present[:, None, None], values, 0)
  ones = jnp.ones_like(values) * present.astype(values.dtype)[:, None, None]
  at = places(indices)

  def tables(worker: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    total, counts = (_spread(at[worker], x[worker], n) for x in (values, ones))
    return total, counts

  return jax.lax.fori_loop(
    1,
    len(at),
    lambda i, sums: jax.tree.map(jnp.add, sums, tables(i)),
    tables(0),
    unroll=platform.unrolled(len(at)),
  )


def _spread(places: jax.Array, values: jax.Array, n: int) -> jax.Array:
  """Returns a table with the values at their places."""
  hits = _hits(places, num_places(n, places.shape[1]))
  return plain.where(hits, values[:, None], 0)


def _table(x: jax.Array, k: int) -> jax.Array:
  """Returns `[rows, n]` as `[rows, places, k]`, padded with zeros."""
  rows, n = x.shape
  padded = plain.pad(x, ((0, 0), (0, num_places(n, k) * k - n)))
  return padded.reshape(rows, -1, k)


def _hits(places: jax.Array, number: int) -> jax.Array:
  """Returns which of a `number` of places each group has, a bool table."""
  return places[:, None] == jnp.arange(number, dtype=jnp.int32)[None, :, None]
