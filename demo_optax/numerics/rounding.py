"""Arithmetic whose rounding does not depend on the program around it."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def mul_no_fma(weight: chex.Numeric, x: Array) -> Array:
  """Returns `weight * x` in the dtype of `x`, rounded before it is used.

  Compilers may contract a product and a sum into one operation with a single
  rounding, depending on the surrounding program. The last bits would then
  differ between simulation and mesh, and between sent and subtracted values.
  Selects do not prevent this, and optimization barriers are removed too early.
  An XOR with bits that the compiler cannot know to be zero does.
  """
  if isinstance(weight, (int, float)) and weight == 1:
    return x
  return hidden(jnp.asarray(weight, x.dtype) * x, x)


def hidden(x: Array, like: Array) -> Array:
  """Returns `x` so that compilers do not know its value or where it is from.

  `like` must broadcast with `x`. Where it is NaN, the last bit of `x` flips.
  """
  bits = jnp.int64 if x.dtype.itemsize == 8 else jnp.int32
  zero = (like != like).astype(bits)
  x = jax.lax.bitcast_convert_type(x, bits) ^ zero
  return jax.lax.bitcast_convert_type(x, like.dtype)


def exact_reciprocal(count: Array, most: int, dtype: Any) -> Array:
  """Returns `1 / count` for int32 counts up to `most`; 1 for a count of zero.

  Looked up, since compilers divide in one program and multiply in another.
  """
  inverse = 1.0 / np.maximum(np.arange(most + 1), 1)
  return jnp.asarray(inverse, dtype)[count]
