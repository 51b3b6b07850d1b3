"""States for another number of workers."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import prng


def regroup(x: chex.Array, num_workers: int) -> chex.Array:
  """Returns `x [workers, ...]` for other workers; see `from_leaves`."""
  former = len(x)
  if num_workers == former:
    return x
  # Equal cells of the unit interval, of which each worker has whole ones.
  repeats = num_workers // math.gcd(former, num_workers)
  cells = np.repeat(np.arange(former), repeats)
  # int[new workers, cells]: the former worker in each
  covered = cells.reshape(num_workers, -1)
  if jnp.issubdtype(x.dtype, jnp.inexact):
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    means = [wide[covering].mean(axis=0) for covering in covered]
    # NumPy's stay NumPy's, in 64 bits.
    stack = x.__array_namespace__().stack
    return stack(means).astype(x.dtype)
  # From the worker with the most cells, the first among equals.
  largest = [np.bincount(covering).argmax() for covering in covered]
  chosen = x[np.array(largest)]
  if prng.is_key_array(x) and num_workers > former:
    # Else several workers would have one key.
    return jax.vmap(prng.fold)(chosen, jnp.arange(num_workers))
  return chosen
