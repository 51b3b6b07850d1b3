"""States for another number of workers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import prng


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
    # Only weights that are not zero: 0 times NaN is NaN.
    parts = [row[worker] * wide[worker] for worker in np.flatnonzero(row)]
    means.append(sum(parts))
  # NumPy's stay NumPy's, in 64 bits.
  stack = x.__array_namespace__().stack
  return stack(means).astype(x.dtype)


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
