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
  num_rows = _num_rows(n)
  padded = plain.pad_to(coefficients, num_rows * _COLUMNS)
  table = padded.reshape(chunks, num_rows, _COLUMNS)
  rows = _in_rows(indices, n)
  rows = jnp.swapaxes(rows, 1, 2)  # [chunks, k, rows]
  # [chunks, k, columns]: the row with each selected coefficient
  of_each = _product(rows.astype(table.dtype), table)
  selected = jnp.where(_in_columns(indices), of_each, 0)
  return jnp.sum(selected, axis=2)


def spread(
  indices: Array,
  values: Array,
  n: int,
) -> Array:
  """Undoes `take`: returns `[chunks, n]`, zero but at distinct indices."""
  rows = _in_rows(indices, n)
  columns = _in_columns(indices)
  in_rows = jnp.where(rows, values[:, None], 0)  # [chunks, rows, k]
  table = _product(in_rows, columns.astype(values.dtype))
  flat = table.reshape(len(values), -1)  # [chunks, n, and padding]
  return flat[:, :n]


def add_up(
  indices: Array,
  values: Array,
  present: Array,
  n: int,
) -> tuple[Array, Array]:
  """Adds up values `[workers, chunks, k]` from the workers that are `present`.

  Returns tables `[chunks, rows, columns]`: the sums, and from how many workers
  each is, as floats.
  """
  k = values.shape[2]
  values = jnp.where(present[:, None, None], values, 0)
  # [chunks, workers * k]
  values = _side_by_side(values)
  indices = _side_by_side(indices)
  ones = jnp.repeat(present.astype(values.dtype), k)
  columns = _in_columns(indices)
  # The rows of sums, then those of counts, in one product.
  num_rows = _num_rows(n)
  row = jnp.arange(2 * num_rows, dtype=jnp.int32)[None, :, None]
  of_sum = row < num_rows
  row = jnp.where(of_sum, row, row - num_rows)
  hits = (indices // _COLUMNS)[:, None] == row
  both = jnp.where(of_sum, values[:, None], ones[None, None])
  in_rows = jnp.where(hits, both, 0)  # [chunks, 2 * rows, workers * k]
  sums = _product(in_rows, columns.astype(values.dtype))
  total, counts = jnp.split(sums, 2, axis=1)
  return total, counts


def _side_by_side(x: Array) -> Array:
  """Returns `[workers, chunks, k]` as `[chunks, workers * k]`."""
  _, chunks, _ = x.shape
  by_chunk = jnp.swapaxes(x, 0, 1)
  return by_chunk.reshape(chunks, -1)


def _num_rows(n: int) -> int:
  return -(-n // _COLUMNS)


def _in_rows(indices: Array, n: int) -> Array:
  """Returns which row each index is in, bool `[chunks, rows, k]`."""
  row = indices // _COLUMNS
  num_rows = _num_rows(n)
  return jax.nn.one_hot(row, num_rows, dtype=bool, axis=1)


def _in_columns(indices: Array) -> Array:
  """Returns which column each index is in, bool `[chunks, k, columns]`."""
  column = indices % _COLUMNS
  return jax.nn.one_hot(column, _COLUMNS, dtype=bool)


def _product(x: Array, y: Array) -> Array:
  highest = jax.lax.Precision.HIGHEST
  return jnp.einsum('cij,cjk->cik', x, y, precision=highest)
