"""Selections as products of one-hot matrices: no gather, scatter or sort.

TPUs execute those serially. Coefficient i of a chunk is at row i // 128 and
column i % 128 of a table; a selection is one matrix of ones for its rows and
one for its columns. Products are in full precision, so that a value times one
is that value. Coefficients and values must be finite.
"""

import jax
import jax.numpy as jnp

from demo_optax.numerics import plain

_COLUMNS = 128


def take(coefficients: jax.Array, indices: jax.Array) -> jax.Array:
  """Returns the values at the indices, `[chunks, k]` of `[chunks, n]`."""
  chunks, n = coefficients.shape
  rows, columns = _one_hot(indices, n)
  padded = plain.pad(coefficients, ((0, 0), (0, -n % _COLUMNS)))
  table = padded.reshape(chunks, -1, _COLUMNS)
  found = _product(jnp.swapaxes(rows, 1, 2).astype(table.dtype), table)
  return jnp.sum(plain.where(columns, found, 0), axis=2)


def spread(indices: jax.Array, values: jax.Array, n: int) -> jax.Array:
  """Returns coefficients `[chunks, n]` with the values at distinct indices."""
  rows, columns = _one_hot(indices, n)
  found = _product(
    plain.where(rows, values[:, None], 0), columns.astype(values.dtype)
  )
  return found.reshape(len(values), -1)[:, :n]


def add_up(
  indices: jax.Array, values: jax.Array, present: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
  """Adds up values `[workers, chunks, k]` of the workers that are `present`.

  Returns tables `[chunks, rows, columns]`: the sums, and from how many workers
  each is, as floats.
  """
  workers, chunks, k = values.shape
  indices, values = (
    jnp.swapaxes(x, 0, 1).reshape(chunks, workers * k)
    for x in (indices, plain.where(present[:, None, None], values, 0))
  )
  _, columns = _one_hot(indices, n)
  # The rows of sums, then those of counts, in one product.
  size = -(-n // _COLUMNS)
  row = jnp.arange(2 * size, dtype=jnp.int32)[None, :, None]
  of_sum = row < size
  rows = (indices // _COLUMNS)[:, None] == plain.where(of_sum, row, row - size)
  ones = jnp.repeat(present.astype(values.dtype), k)[None, None]
  found = _product(
    plain.where(rows, plain.where(of_sum, values[:, None], ones), 0),
    columns.astype(values.dtype),
  )
  total, counts = jnp.split(found, 2, axis=1)
  return total, counts


def _one_hot(indices: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
  """Returns bool `[chunks, rows, m]` and `[chunks, m, columns]`."""
  row = jnp.arange(-(-n // _COLUMNS), dtype=jnp.int32)[None, :, None]
  column = jnp.arange(_COLUMNS, dtype=jnp.int32)[None, None]
  return (
    (indices // _COLUMNS)[:, None] == row,
    (indices % _COLUMNS)[:, :, None] == column,
  )


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.einsum('cij,cjk->cik', x, y, precision=jax.lax.Precision.HIGHEST)
