"""Arithmetic whose rounding does not depend on the program around it."""

import jax.numpy as jnp
import numpy as np
from chex import Numeric
from jax import Array, lax
from jax.typing import DTypeLike


def mul_no_fma(
  weight: Numeric,
  x: Array,
) -> Array:
  """Returns `weight * x` in the dtype of `x`, rounded before it is used.

  Compilers may contract a product and a sum into one operation with a single
  rounding, depending on the surrounding program. The last bits would then
  differ between simulation and mesh, and between sent and subtracted values.
  Selects do not prevent this, and optimization barriers are removed too early.
  An XOR with bits that the compiler cannot know to be zero does.
  """
  return hidden(jnp.asarray(weight, x.dtype) * x, x)


def hidden(x: Array, like: Array) -> Array:
  """Returns `x` so that compilers do not know its value or where it is from.

  `like` must broadcast with `x`. Where it is NaN, the last bit of `x` flips.
  """
  return after(x, like != like)


def after(x: Array, never: Array) -> Array:
  """Returns `x` so that compilers compute `never` first: a bool that is false.

  Where it is true, the last bit of `x` flips.
  """
  bits = bits_of(x)
  flipped = bits ^ never.astype(bits.dtype)
  return lax.bitcast_convert_type(flipped, x.dtype)


def bits_of(x: Array) -> Array:
  """Returns the bits of float32 or float64, as integers."""
  integers = jnp.int64 if x.dtype.itemsize == 8 else jnp.int32
  return lax.bitcast_convert_type(x, integers)


def share(
  part: Numeric,
  total: Array,
  dtype: DTypeLike,
) -> Array:
  """Returns `part / total`, of weights or counts; a total of zero is as one.

  Compilers divide by a number that they know in one program, and multiply by
  its reciprocal in another.
  """
  total = jnp.where(total > 0, total, jnp.ones_like(total))
  total = total.astype(dtype)
  return hidden(jnp.asarray(part, dtype) / total, total)


def exact_reciprocal(
  count: Array,
  most: int,
  dtype: DTypeLike,
) -> Array:
  """Returns `1 / count` for int32 counts up to `most`; 1 for a count of zero.

  Looked up, since compilers divide in one program and multiply in another.
  """
  counts = np.arange(most + 1)
  inverses = 1.0 / np.maximum(counts, 1)
  return jnp.asarray(inverses, dtype)[count]
