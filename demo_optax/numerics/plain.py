"""Functions of `jax.numpy` as single operations.

There each is a jit, traced, batched and lowered as a function: a fifth of the
time that an exchange takes to trace.
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import batching, mlir

from demo_optax.numerics import platform


def where(condition: jax.Array, x: chex.Numeric, y: chex.Numeric) -> jax.Array:
  """As `jnp.where`, in the dtype of `x`, or of `y` if `x` is a number."""
  like = x if hasattr(x, 'dtype') else y
  shape = jnp.broadcast_shapes(*map(jnp.shape, (condition, x, y)))
  x = jnp.broadcast_to(jnp.asarray(x, like.dtype), shape)
  y = jnp.broadcast_to(jnp.asarray(y, like.dtype), shape)
  if jnp.ndim(condition):  # else it would need the sharding of x
    condition = jnp.broadcast_to(condition, shape)
  return jax.lax.select(condition, x, y)


def every(flags: Sequence[jax.Array]) -> jax.Array:
  """Returns where all flags hold."""
  x = jnp.stack(flags)
  return jnp.sort(x, 0)[0] if platform.sorts_flags() else x.all(0)


def pad(
  x: jax.Array, widths: Sequence[tuple[int, int]], value: chex.Numeric = 0
) -> jax.Array:
  """As `jnp.pad` with a constant value; nothing if nothing is added."""
  if not any(map(any, widths)):
    return x
  ends = [(before, after, 0) for before, after in widths]
  return jax.lax.pad(x, jnp.asarray(value, x.dtype), ends)


def put(
  x: jax.Array, part: jax.Array, start: chex.Numeric, axis: int = 0
) -> jax.Array:
  """As `lax.dynamic_update_slice_in_dim`, also under `vmap`.

  There JAX makes it a scatter, which reads what it writes.
  """
  return _put_p.bind(x, part, jnp.asarray(start, jnp.int32), axis=axis)


_put_p = core.Primitive('demo_optax_put')
_put_p.def_impl(jax.lax.dynamic_update_slice_in_dim)
_put_p.def_abstract_eval(lambda x, part, start, *, axis: x)
mlir.register_lowering(
  _put_p,
  mlir.lower_fun(jax.lax.dynamic_update_slice_in_dim, multiple_results=False),
)


def _put_batched(arrays: Any, dims: Any, *, axis: int) -> Any:
  size = next(x.shape[d] for x, d in zip(arrays, dims) if d is not None)
  x, part, start = (
    batching.bdim_at_front(y, d, size) for y, d in zip(arrays, dims)
  )
  if dims[2] is None:
    return put(x, part, arrays[2], axis + 1), 0
  update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
  return jax.vmap(update)(x, part, start), 0


batching.primitive_batchers[_put_p] = _put_batched


def unknown(
  numbers: Sequence[int], step: chex.Numeric
) -> Sequence[chex.Numeric]:
  """Returns integers; on CPUs as arrays that the compiler knows nothing about.

  XLA:CPU compiles a kernel for each constant that kernels differ in, 20 ms. It
  cannot know the result of an addition to zero that depends on the `step`, nor
  repeat one of many results in the kernels that use them.
  """
  if not platform.hides_constants() or isinstance(step, int) or not numbers:
    return numbers
  zero = (step & 1) >> 1
  pairs = [jnp.asarray([number, 0], jnp.int32) + zero for number in numbers]

  def add(x: Sequence[jax.Array], y: Sequence[jax.Array]) -> list[jax.Array]:
    return list(map(jax.lax.add, x, y))

  return jax.lax.reduce(pairs, [jnp.int32(0)] * len(pairs), add, (0,))
