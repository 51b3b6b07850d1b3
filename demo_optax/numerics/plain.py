"""Operations on arrays, in the form that XLA compiles well."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.interpreters import batching, mlir

from demo_optax.numerics import platform


def every(flags: Sequence[Array]) -> Array:
  """Returns where all flags hold."""
  x = jnp.stack(flags)
  return jnp.sort(x, 0)[0] if platform.sorts_flags() else x.all(0)


def pad_to(x: Array, length: int, axis: int = -1) -> Array:
  """Pads the end of an axis with zeros, up to a length."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, length - x.shape[axis]
  return jnp.pad(x, widths)


def put(x: Array, part: Array, start: chex.Numeric, axis: int = 0) -> Array:
  """As `lax.dynamic_update_slice_in_dim`, with one `start` for all workers.

  Under `vmap` JAX would make it a scatter, which reads what it writes.
  """
  return _put_p.bind(x, part, jnp.asarray(start, jnp.int32), axis=axis)


def _put_batched(arrays: Any, dims: Any, *, axis: int) -> Any:
  pairs = [*zip(arrays, dims)]
  size = next(array.shape[dim] for array, dim in pairs if dim is not None)
  whole, part, starts = (
    batching.bdim_at_front(array, dim, size) for array, dim in pairs
  )
  return put(whole, part, starts[0], axis + 1), 0


_update = jax.lax.dynamic_update_slice_in_dim
_put_p = core.Primitive('demo_optax_put')
_put_p.def_impl(_update)
_put_p.def_abstract_eval(lambda x, part, start, *, axis: x)
mlir.register_lowering(_put_p, mlir.lower_fun(_update, multiple_results=False))
batching.primitive_batchers[_put_p] = _put_batched


def unknown(
  numbers: Sequence[int], step: chex.Numeric
) -> Sequence[chex.Numeric]:
  """Returns integers; on CPUs, scalars that the compiler knows nothing about.

  XLA:CPU compiles a kernel, in 20 ms, for every constant in which kernels
  differ. It cannot evaluate what depends on the `step`, nor does it repeat one
  of many results in each kernel that uses it.
  """
  if not platform.hides_constants() or isinstance(step, int):
    return numbers
  # The order is not known, but both numbers of an array are the same.
  pairs = [jnp.full(2, number, jnp.int32) for number in numbers]
  _, *in_order = jax.lax.sort((jnp.full(2, step), *pairs), num_keys=1)
  return [pair[0] for pair in in_order]


def joined(arrays: Sequence[Array]) -> list[Array]:
  """Returns arrays; on GPUs, such that XLA joins kernels that read them."""
  if not platform.joins_kernels():
    return list(arrays)
  # Not one element: XLA looks for a common operand that is no scalar.
  yes = jax.lax.optimization_barrier(jnp.ones(2, bool))[0]
  return [jnp.where(yes, x, jnp.zeros_like(x)) for x in arrays]
