"""Runs functions on arrays wherever they are, and places their results."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.workers.workers import put

Sharding = jax.sharding.Sharding | None
# A leaf: an array, its `jax.ShapeDtypeStruct`, or in a state a Python number.
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


def sharding_of(x: Value) -> Sharding:
  """Returns where an array is, or where a shape shall be, if that is known."""
  return getattr(x, 'sharding', None)


def _near(
  x: Value,
  targets: Sequence[jax.sharding.Sharding],
) -> Value:
  """Returns an array on Auto axes, on the first target's devices."""
  if not isinstance(x, Array):
    return x
  sharding = x.sharding
  if targets and sharding.device_set != targets[0].device_set:
    # All of it on each: it may not divide among them.
    sharding = targets[0]
    if isinstance(sharding, NamedSharding):
      sharding = NamedSharding(sharding.mesh, P())
  elif not isinstance(sharding, NamedSharding):
    return x
  return jax.device_put(x, auto(sharding))


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


def place(name: str, x: Value, like: Value) -> Value:
  """Returns `x` as an array or number like `like`, on its devices."""
  if not hasattr(like, 'dtype'):  # a Python number
    return np.asarray(x).item()
  if not like.shape and x.dtype != like.dtype:
    saved = x.item()
    number = np.asarray(saved, like.dtype)  # raises for too large an integer
    # Numbers of Python, which have 64 bits, take the dtype.
    is_array = x.dtype.itemsize < 8
    if is_array and not np.array_equal(number, saved, equal_nan=True):
      raise ValueError(
        f'{name} must be exact in {like.dtype}, got {saved} of {x.dtype}.'
        ' Restore it into a tree with the dtype of the checkpoint.'
      )
    x = number
  if isinstance(like, np.ndarray | np.generic):
    return np.asarray(x)
  if like.sharding is None:
    return jnp.asarray(x)
  return put(x, like.sharding)
