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
  """Returns coefficients `[chunks, n]`: sums of the values at each index."""
  return _spread_all(indices, values[:, None], n)[:, 0]


def add_up(
  indices: Array, values: Array, present: Array, n: int
) -> tuple[Array, Array]:
  """Adds up values `[workers, chunks, k]` from the workers that are `present`.

  Returns the sums `[chunks, n]`, and from how many workers each is, as floats.
  """
  _, chunks, _ = values.shape
  present = jnp.broadcast_to(present[:, None, None], values.shape)
  values = jnp.where(present, values, 0)
  both = jnp.stack([values, present.astype(values.dtype)])
  # [chunks, 2, workers * k]
  both = jnp.moveaxis(both, 2, 0).reshape(chunks, 2, -1)
  indices = jnp.swapaxes(indices, 0, 1).reshape(chunks, -1)
  sums = _spread_all(indices, both, n)
  return sums[:, 0], sums[:, 1]


def _spread_all(indices: Array, values: Array, n: int) -> Array:
  """As `spread`, for arrays of values `[chunks, arrays, k]` in one product."""
  chunks, arrays, k = values.shape
  rows, columns = _one_hot(indices, n)
  # [chunks, arrays, rows, k]
  in_rows = jnp.where(rows[:, None], values[:, :, None], 0)
  in_rows = in_rows.reshape(chunks, -1, k)
  tables = _product(in_rows, columns.astype(values.dtype))
  return tables.reshape(chunks, arrays, -1)[..., :n]  # without padding


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
