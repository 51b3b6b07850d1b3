"""Operations on arrays, in the form that XLA compiles well."""

from collections.abc import Sequence

import chex
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from demo_optax.numerics import platform


def every(flags: Sequence[Array]) -> Array:
  """Returns where all flags hold."""
  stacked = jnp.stack(flags)
  if platform.sorts_flags():
    return jnp.sort(stacked, 0)[0]
  return stacked.all(0)


def pad_to(x: Array, length: int, axis: int = -1) -> Array:
  """Pads the end of an axis with zeros, up to a length."""
  missing = length - x.shape[axis]
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, missing
  return jnp.pad(x, widths)


def put(
  x: Array,
  part: Array,
  start: chex.Numeric,
  axis: int = 0,
) -> Array:
  """As `lax.dynamic_update_slice_in_dim`, with one `start` for all workers.

  Under `vmap` JAX would make it a scatter, which reads what it writes.
  """

  @custom_vmap
  def put_part(
    x: Array,
    part: Array,
    start: Array,
  ) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)

  @put_part.def_vmap
  def put_parts(
    workers: int,
    are_stacked: Sequence[bool],
    *arrays: Array,
  ) -> tuple[Array, bool]:
    stacked = []
    for array, is_stacked in zip(arrays, are_stacked):
      if not is_stacked:
        array = jnp.broadcast_to(array, (workers, *array.shape))
      stacked.append(array)
    x, parts, starts = stacked
    return put(x, parts, starts[0], axis + 1), True

  return put_part(x, part, jnp.asarray(start, jnp.int32))


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
  key = jnp.full(2, step)
  _, *in_order = lax.sort((key, *pairs), num_keys=1)
  return [pair[0] for pair in in_order]


def joined(arrays: Sequence[Array]) -> Sequence[Array]:
  """Returns arrays; on GPUs, such that XLA joins kernels that read them."""
  if not platform.joins_kernels():
    return arrays
  # Not one element: XLA looks for a common operand that is no scalar.
  yes, _ = lax.optimization_barrier(jnp.ones(2, bool))
  return [jnp.where(yes, x, jnp.zeros_like(x)) for x in arrays]
