"""Random keys: recognises them, and folds worker numbers into them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Folded in before a worker's number.
_WORKERS = 0x0DE30


def is_key_array(x: object) -> bool:
  """Returns whether `x` is an array with typed PRNG keys, any rank."""
  dtype = getattr(x, 'dtype', None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_legacy_key(x: jax.ShapeDtypeStruct) -> bool:
  """Returns whether `x` has the type of a legacy key, `uint32[2]`."""
  return x.dtype == np.uint32 and x.shape == (2,)


def words(x: Any) -> Any:
  """Returns the words of random keys, and other arrays as they are."""
  return jax.random.key_data(x) if is_key_array(x) else x


def of_words(array: Array, like: Any) -> Array:
  """Makes keys of words, if `like` has keys; other arrays stay as they are."""
  if not is_key_array(like):
    return array
  return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))


def fold(key: Array, index: Array) -> Array:
  """Folds a worker's number into a key, or into each key of an array."""

  def one(key: Array) -> Array:
    # fold_in(key, i) alone equals split(key, n)[i], which users may hold.
    of_workers = jax.random.fold_in(key, _WORKERS)
    return jax.random.fold_in(of_workers, index)

  for _ in key.shape:
    one = jax.vmap(one)
  return one(key)
