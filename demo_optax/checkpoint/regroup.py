"""States for another number of workers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import plain, prng


def regroup(x: chex.Array, n: int) -> chex.Array:
  """Returns `x [workers, ...]` for `n` workers, as `from_leaves` documents."""
  old = x.shape[0]
  if n == old:
    return x
  if n % old == 0 or not jnp.issubdtype(x.dtype, jnp.inexact):
    x = x[np.argmax(weights(old, n), axis=1)]
    if prng.is_key_array(x) and n > old:  # else several would have one key
      return jax.vmap(prng.fold)(x, jnp.arange(n))
    return x
  if old % n == 0:
    return x.reshape(n, old // n, *x.shape[1:]).mean(axis=1)
  wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
  mixed = []
  for row in weights(old, n):
    # Only weights that are not zero: 0 times NaN is NaN.
    parts = [row[i].astype(wide.dtype) * wide[i] for i in np.flatnonzero(row)]
    mixed.append(sum(parts[1:], parts[0]))
  return jnp.stack(mixed).astype(x.dtype)


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


def regroup_owned(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns owners' residuals, `[owners, *devices, chunks, n]`, as `shape`.

  Chunks keep the order of their owners; zeros pad the end.
  """
  owners, *devices, rows, n = shape
  # [*devices, chunks of all owners, n]
  chunks = jnp.moveaxis(x, 0, -3).reshape(*devices, -1, n)
  chunks = plain.pad_to(chunks[..., : owners * rows, :], owners * rows, axis=-2)
  return jnp.moveaxis(chunks.reshape(*devices, owners, rows, n), -3, 0)
