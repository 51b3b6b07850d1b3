"""Runs functions on arrays wherever they are, and places their results."""

import contextlib
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

  Jitted, on the devices that results have, unless `args` are traced. NumPy's
  arrays stay so, in 64 bits, unless results have `shardings`. XLA chooses a
  sharding that is `None`. The same function, not a closure, is compiled once
  for equal `static`.
  """
  arrays = jax.tree.leaves(args)
  targets = jax.tree.leaves(shardings)
  if any(isinstance(array, jax.core.Tracer) for array in arrays):
    return fun(args, *static)
  # A device may be too small for what the host holds.
  if not targets and all(isinstance(array, np.ndarray) for array in arrays):
    host_device = jax.local_devices(backend='cpu')[0]
    host = Mesh([host_device], ('host',))
    with jax.enable_x64(True), jax.set_mesh(host):
      return jax.device_get(fun(args, *static))

  to_targets = functools.partial(_near, targets=targets)
  args = jax.tree.map(to_targets, args)
  auto_shardings = jax.tree.map(auto, shardings)
  placed = [
    *map(of, jax.tree.leaves(args)),
    *jax.tree.leaves(auto_shardings),
  ]
  meshes: list[Any] = []
  for sharding in placed:
    if isinstance(sharding, NamedSharding):
      meshes.append(sharding.mesh)
  jitted = jax.jit(
    fun,
    static_argnums=range(1, 1 + len(static)),
    out_shardings=auto_shardings,
  )
  # Not under the mesh that the caller has set, whose types may be Explicit.
  with jax.set_mesh(meshes[0]) if meshes else contextlib.nullcontext():
    results = jitted(args, *static)
  # Back to the caller's types of axes: nothing moves.
  return jax.device_put(results, shardings)


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
  entries: list[Any] = [None] * len(shape)
  moving = []  # numbers of blocks, and axes, that have no dimension yet
  for dim in range(len(spec)):
    blocks = math.prod(sizes[name] for name in entry(spec, dim))
    if dim < len(shape) and shape[dim] % blocks == 0:
      entries[dim] = spec[dim]
    else:
      moving.append((blocks, spec[dim]))
  for blocks, axes in moving:
    longest = None
    for dim, length in enumerate(shape):
      is_free = entries[dim] is None and length % blocks == 0
      if is_free and (longest is None or length > shape[longest]):
        longest = dim
    if longest is not None:
      entries[longest] = axes
  return NamedSharding(sharding.mesh, P(*entries))


def auto(sharding: Sharding) -> Sharding:
  """Returns a sharding on Auto axes, where XLA inserts communication."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
  return NamedSharding(mesh, sharding.spec)


def abstract(x: Value) -> Value:
  """Returns an array's shape, dtype and sharding; other values unchanged.

  An array that is not committed to its device has no sharding: a step would be
  compiled again for one that is.
  """
  if not hasattr(x, 'dtype'):
    return x
  sharding = of(x)
  if isinstance(x, Array) and not x.committed:
    sharding = None
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
  try:
    return np.asarray(x, dtype)
  except OverflowError:
    return x


def place(x: Value, like: Value) -> Value:
  """Returns `x` as an array like `like`, on its devices."""
  if not hasattr(like, 'dtype'):  # a Python number
    return x.item() if hasattr(x, 'dtype') else x
  x = as_array(x, like)
  if isinstance(like, np.ndarray):
    return np.asarray(x)
  if isinstance(like, np.generic):
    return np.asarray(x)[()]
  if like.sharding is None:
    return jnp.asarray(x)
  return put(x, like.sharding)
