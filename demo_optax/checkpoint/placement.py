"""Runs functions on arrays wherever they are, and places their results."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.workers.param_specs import entry
from demo_optax.workers.workers import put

Sharding = jax.sharding.Sharding | None
# A leaf of a state: an array, its `jax.ShapeDtypeStruct`, or a Python number.
Value = Any


def run(
  fun: Callable[..., chex.ArrayTree],
  args: chex.ArrayTree,
  shardings: chex.ArrayTree,
  *static: Hashable,
) -> Any:
  """Calls `fun(args, *static)` on arrays that may span devices and processes.

  Jitted, on the devices that results have. Directly, if `args` are traced, or
  NumPy's and results have no `shardings`. XLA chooses a sharding that is
  `None`. The same function, not a closure, is compiled once for equal `static`.
  """
  arrays, targets = jax.tree.leaves(args), jax.tree.leaves(shardings)
  is_traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
  is_on_host = all(isinstance(array, np.ndarray) for array in arrays)
  if is_traced or (is_on_host and not targets):
    return fun(args, *static)
  to_targets = functools.partial(_near, targets=targets)
  jitted = jax.jit(
    fun,
    static_argnums=range(1, 1 + len(static)),
    out_shardings=jax.tree.map(auto, shardings),
  )
  # Not under the mesh that the caller has set, whose types may be Explicit.
  with jax.set_mesh(_NO_MESH):
    results = jitted(jax.tree.map(to_targets, args), *static)
  # Back to the caller's types of axes: nothing moves.
  return jax.device_put(results, shardings)


_NO_MESH = Mesh(np.empty((), object), ())


def of(x: Value) -> Sharding:
  """Returns where an array is, or where a shape shall be, if that is known."""
  return getattr(x, 'sharding', None)


def _near(
  x: Value,
  targets: Sequence[jax.sharding.Sharding],
) -> Value:
  """Returns an array on Auto axes, on the first target's devices."""
  if not isinstance(x, Array):
    return x
  sharding: Sharding = x.sharding
  if targets and x.sharding.device_set != targets[0].device_set:
    sharding = fit_sharding(x.shape, targets[0])
  elif not isinstance(sharding, NamedSharding):
    return x
  return jax.device_put(x, auto(sharding))


def fit_sharding(
  shape: tuple[int, ...],
  sharding: Sharding,
) -> Sharding:
  """Returns `sharding`, adapted to another shape.

  Axes that do not divide their dimension move to the longest one that they
  divide, so that no device holds more than necessary.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec, sizes = sharding.spec, sharding.mesh.shape
  by_length = sorted(range(len(shape)), key=lambda dim: -shape[dim])
  entries: list[Any] = [None] * len(shape)
  for old_dim, axes in enumerate(spec):
    blocks = math.prod(sizes[name] for name in entry(spec, old_dim))
    for dim in (old_dim, *by_length):
      is_free = dim < len(shape) and entries[dim] is None
      if is_free and shape[dim] % blocks == 0:
        entries[dim] = axes
        break
  return NamedSharding(sharding.mesh, P(*entries))


def auto(sharding: Sharding) -> Sharding:
  """Returns a sharding on Auto axes, where XLA inserts communication."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
  return NamedSharding(mesh, sharding.spec)


def abstract(x: Value) -> Value:
  """Returns a JAX array's shape, dtype and sharding; others unchanged.

  An array that is not committed to its device has no sharding: a step would be
  compiled again for one that is.
  """
  if not isinstance(x, Array):
    return x
  sharding = x.sharding if x.committed else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


# The arrays that hold the same as a Python number. A step returns the count of
# a state as an array, also where it was a Python number.
_DTYPES = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating}


def as_array(x: Value, like: Value) -> Value:
  """Returns a Python number as a scalar array like `like`, if that is one.

  Other values are returned as they are.
  """
  dtype = getattr(like, 'dtype', None)
  held_by = _DTYPES.get(type(x))
  if dtype is None or held_by is None:
    return x
  if like.shape or not jnp.issubdtype(dtype, held_by):
    return x
  return np.asarray(x, dtype)


def place(x: Value, like: Value) -> Value:
  """Returns `x` as an array like `like`, on its devices."""
  if not hasattr(like, 'dtype'):  # a Python number
    return x.item() if hasattr(x, 'dtype') else x
  x = as_array(x, like)
  if isinstance(like, np.ndarray | np.generic):
    return np.asarray(x)
  if like.sharding is None:
    return jnp.asarray(x)
  return put(x, like.sharding)
