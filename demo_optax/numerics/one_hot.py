"""Selections as products with one-hot matrices: no gather, scatter or sort.

TPUs execute those serially. A chunk is a table, with coefficient i at row
i // 128 and column i % 128. A selection is one matrix with ones at its rows and
one with ones at its columns. Products are in full precision, so that a value
times one is that value. Coefficients and values must be finite.
"""

import jax
import jax.numpy as jnp
from jax import Array

from demo_optax.numerics import plain

_COLUMNS = 128


def take(coefficients: Array, indices: Array) -> Array:
  """Returns the values at the indices, `[chunks, k]`, from `[chunks, n]`."""
  chunks, n = coefficients.shape
  rows, columns = _one_hot(indices, n)
  number = _num_rows(n)
  padded = plain.pad_to(coefficients, number * _COLUMNS)
  table = padded.reshape(chunks, number, _COLUMNS)
  # [chunks, k, columns]: the row with each selected coefficient
  of_each = _product(jnp.swapaxes(rows, 1, 2).astype(table.dtype), table)
  return jnp.sum(jnp.where(columns, of_each, 0), axis=2)


def spread(indices: Array, values: Array, n: int) -> Array:
  """Returns coefficients `[chunks, n]` with the values at distinct indices."""
  rows, columns = _one_hot(indices, n)
  in_rows = jnp.where(rows, values[:, None], 0)  # [chunks, rows, k]
  table = _product(in_rows, columns.astype(values.dtype))
  return table.reshape(len(values), -1)[:, :n]  # without padding


def add_up(
  indices: Array, values: Array, present: Array, n: int
) -> tuple[Array, Array]:
  """Adds up values `[workers, chunks, k]` from the workers that are `present`.

  Returns tables `[chunks, rows, columns]`: the sums, and from how many workers
  each is, as floats.
  """
  k = values.shape[2]
  values = side_by_side(jnp.where(present[:, None, None], values, 0))
  indices = side_by_side(indices)
  # [1, 1, workers * k]
  ones = jnp.repeat(present.astype(values.dtype), k)[None, None]
  _, columns = _one_hot(indices, n)
  # The rows of sums, then those of counts, in one product.
  number = _num_rows(n)
  row = jnp.arange(2 * number, dtype=jnp.int32)[None, :, None]
  of_sum = row < number
  row = jnp.where(of_sum, row, row - number)
  hits = (indices // _COLUMNS)[:, None] == row
  both = jnp.where(of_sum, values[:, None], ones)
  in_rows = jnp.where(hits, both, 0)  # [chunks, 2 * rows, workers * k]
  sums = _product(in_rows, columns.astype(values.dtype))
  total, counts = jnp.split(sums, 2, axis=1)
  return total, counts


def side_by_side(x: Array) -> Array:
  """Returns `[workers, chunks, k]` as `[chunks, workers * k]`."""
  _, chunks, _ = x.shape
  return jnp.swapaxes(x, 0, 1).reshape(chunks, -1)


def _num_rows(n: int) -> int:
  return -(-n // _COLUMNS)


def _one_hot(indices: Array, n: int) -> tuple[Array, Array]:
  """Returns bool `[chunks, rows, k]` and `[chunks, k, columns]`."""
  row = jnp.arange(_num_rows(n), dtype=jnp.int32)[None, :, None]
  column = jnp.arange(_COLUMNS, dtype=jnp.int32)[None, None]
  rows = (indices // _COLUMNS)[:, None] == row
  columns = (indices % _COLUMNS)[:, :, None] == column
  return rows, columns


def _product(x: Array, y: Array) -> Array:
  return jnp.einsum('cij,cjk->cik', x, y, precision=jax.lax.Precision.HIGHEST)
