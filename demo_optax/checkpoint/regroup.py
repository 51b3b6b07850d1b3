"""States for another number of workers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import plain, prng


def regroup(x: chex.Array, num_workers: int) -> chex.Array:
  """Returns `x [workers, ...]` for other workers; see `from_leaves`."""
  former = len(x)
  # Nothing is computed, so every bit stays.
  if num_workers == former:
    return x
  of_workers = weights(former, num_workers)
  has_mean = jnp.issubdtype(x.dtype, jnp.inexact)
  if not has_mean or num_workers % former == 0:
    # From the worker with the largest weight, the first among equals.
    chosen = x[np.argmax(of_workers, axis=1)]
    if prng.is_key_array(x) and num_workers > former:
      # Else several workers would have one key.
      return jax.vmap(prng.fold)(chosen, jnp.arange(num_workers))
    return chosen
  wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
  of_workers = of_workers.astype(wide.dtype)
  means = []
  for row in of_workers:
    total = jnp.zeros_like(wide[0])
    # Only weights that are not zero: 0 times NaN is NaN.
    for worker in np.flatnonzero(row):
      total += row[worker] * wide[worker]
    means.append(total)
  return jnp.stack(means).astype(x.dtype)


def weights(former: int, num_workers: int) -> np.ndarray:
  """Returns former workers' weights in new ones, float64 `[new, former]`.

  >>> weights(3, 2) * 3
  array([[2., 1., 0.],
         [0., 1., 2.]])
  """
  # In units of 1 / (former * new) the ends of all parts are integers.
  of_former = num_workers * np.arange(former + 1)[None, :]
  of_new = former * np.arange(num_workers + 1)[:, None]
  # The overlap of two parts: from the later start to the earlier stop.
  stops = np.minimum(of_former[:, 1:], of_new[1:])
  starts = np.maximum(of_former[:, :-1], of_new[:-1])
  return np.maximum(stops - starts, 0) / former


def regroup_owned(
  x: jax.Array,
  shape: tuple[int, ...],
) -> jax.Array:
  """Returns owners' residuals, `[owners, *devices, chunks, n]`, as `shape`.

  Chunks keep the order of their owners; zeros pad the end.
  """
  owners, *devices, rows, n = shape
  length = owners * rows
  # [*devices, former owners, chunks, n]
  by_device = jnp.moveaxis(x, 0, -3)
  # [*devices, chunks of all owners, n]
  chunks = by_device.reshape(*devices, -1, n)
  chunks = plain.pad_to(chunks[..., :length, :], length, axis=-2)
  # [*devices, owners, rows, n]
  by_device = chunks.reshape(*devices, owners, rows, n)
  return jnp.moveaxis(by_device, -3, 0)
