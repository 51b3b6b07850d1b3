"""Regroups stacked arrays for another number of workers."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import prng


def regroup(x: Any, n: int, is_key: bool = False) -> Any:
  """Returns `x [workers, ...]` of `n` workers, by the rule of `from_leaves`."""
  old = x.shape[0]
  if n == old:
    return x
  # NumPy's stay NumPy's: JAX would make 32 bits of 64.
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    x = x[np.argmax(weights(old, n), axis=1)]
    if is_key and n > old:  # several workers would have the same key
      keys = jax.vmap(prng.fold)(jnp.asarray(x), jnp.arange(n))
      return np.asarray(keys) if isinstance(x, np.ndarray) else keys
    return x
  if n % old == 0:
    return xp.repeat(x, n // old, axis=0)
  if old % n == 0:
    return xp.mean(x.reshape(n, old // n, *x.shape[1:]), axis=1)
  # Only weights that are not zero: 0 times NaN is NaN.
  wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
  mixed = []
  for row in weights(old, n):
    covered = np.flatnonzero(row)
    parts = [xp.asarray(row[i], wide.dtype) * wide[i] for i in covered]
    mixed.append(functools.reduce(operator.add, parts))
  return xp.stack(mixed).astype(x.dtype)


def weights(old: int, new: int) -> np.ndarray:
  """Returns the weights of old workers in new ones, float64 `[new, old]`.

  >>> weights(3, 2) * 3
  array([[2., 1., 0.],
         [0., 1., 2.]])
  """
  # In units of 1 / (old * new) all ends are integers.
  i, j = np.arange(old)[None, :], np.arange(new)[:, None]
  ends = np.minimum((j + 1) * old, (i + 1) * new)
  return np.maximum(ends - np.maximum(j * old, i * new), 0) / old


def regroup_owned(x: Any, shape: tuple[int, ...]) -> Any:
  """Returns residuals of owners, `[owners, *devices, chunks, n]`, as `shape`.

  Each owner's chunks follow those of the owner before; zeros pad the end.
  """
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  x = xp.moveaxis(x, 0, -3)
  *devices, owners, rows, size = x.shape
  x = x.reshape(*devices, owners * rows, size)
  total = shape[0] * shape[-2]
  missing = max(0, total - owners * rows)
  x = xp.pad(x, [(0, 0)] * len(devices) + [(0, missing), (0, 0)])
  x = x[..., :total, :].reshape(*devices, shape[0], shape[-2], size)
  return xp.moveaxis(x, -3, 0)
