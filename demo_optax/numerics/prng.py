"""Random keys: recognises them, and folds worker numbers into them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Folded in before a worker's number.
_WORKERS = 0x0DE30

_WORDS = re.compile(r'(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])')
_WORD = re.compile(r'(?<![a-z])(key|rng|prng|seed)s?(?![a-z])')


def is_key_array(x: Any) -> bool:
  """Returns whether `x` is an array of new PRNG keys, of any rank."""
  dtype = getattr(x, 'dtype', None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_pair(x: Any) -> bool:
  """Returns whether `x` has the shape of legacy keys, `uint32[..., 2]`."""
  is_uint32 = getattr(x, 'dtype', None) == np.uint32
  return is_uint32 and np.shape(x)[-1:] == (2,)


def is_named(*names: Any) -> bool:
  """Returns whether a name has the word key, rng, prng or seed."""
  split = (_WORDS.sub('_', str(name)) for name in names)
  return any(_WORD.search(name.lower()) for name in split)


def last_name(keys: tuple[Any, ...]) -> Any:
  """Returns the last key of a path that is no index, or ''."""
  return next((k for k in reversed(keys) if not str(k).isdigit()), '')


def is_key(path: tuple[Any, ...], x: Any) -> bool:
  """Returns whether the leaf at a path is a key, or an array of keys."""
  return is_key_array(x) or (is_pair(x) and is_named(last_name(path)))


def fold(key: jax.Array, index: jax.Array) -> jax.Array:
  """Folds a worker's number into a key, or into each key of an array."""
  lead = key.shape if is_key_array(key) else key.shape[:-1]

  def one(key: jax.Array) -> jax.Array:
    # fold_in(key, i) alone equals split(key, n)[i], which users may hold.
    return jax.random.fold_in(jax.random.fold_in(key, _WORKERS), index)

  for _ in lead:
    one = jax.vmap(one)
  return one(key)
