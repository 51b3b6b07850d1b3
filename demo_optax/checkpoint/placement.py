"""Runs functions on arrays wherever they are, and places their results."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.workers.param_specs import entry
from demo_optax.workers.value import put

Sharding = jax.sharding.Sharding | None


def run(
  fun: Callable[..., Any], args: Any, shardings: Any, *static: Any
) -> Any:
  """Calls `fun(args, *static)` on arrays that may span devices and processes.

  Jitted, unless `args` are traced. NumPy's arrays stay so, in 64 bits, unless
  results have `shardings`. XLA chooses a sharding that is `None`. The same
  function, not a closure, is compiled once for equal `static`.
  """
  leaves = jax.tree.leaves(args)
  if any(isinstance(x, jax.core.Tracer) for x in leaves):
    return fun(args, *static)
  is_on_host = all(isinstance(x, np.ndarray) for x in leaves)
  if is_on_host and not jax.tree.leaves(shardings):
    host = Mesh(jax.local_devices(backend='cpu')[:1], ('host',))
    with jax.enable_x64(True), jax.set_mesh(host):
      return jax.device_get(fun(args, *static))
  args, inner = jax.tree.map(_on_auto, args), jax.tree.map(auto, shardings)
  placed = [getattr(x, 'sharding', None) for x in jax.tree.leaves(args)]
  placed += jax.tree.leaves(inner)
  meshes: list[Any] = [x.mesh for x in placed if isinstance(x, NamedSharding)]
  # Not under the mesh that the caller has set, whose types may be Explicit.
  with jax.set_mesh(meshes[0]) if meshes else contextlib.nullcontext():
    numbers = range(1, 1 + len(static))
    jitted = jax.jit(fun, static_argnums=numbers, out_shardings=inner)
    results = jitted(args, *static)
  return jax.tree.map(
    lambda sharding, x: on_mesh(x, sharding),
    shardings,
    results,
    is_leaf=lambda x: x is None,
  )


def fit_sharding(shape: tuple[int, ...], sharding: Sharding) -> Sharding:
  """Returns `sharding`, adapted to another shape.

  Axes that do not divide their dimension move to the longest one that they
  divide, so that no device holds more than necessary.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec, sizes = sharding.spec, sharding.mesh.shape
  entries: list[Any] = [None] * len(shape)
  moving = []
  for dim in range(len(spec)):
    parts = math.prod(sizes[name] for name in entry(spec, dim))
    if dim < len(shape) and shape[dim] % parts == 0:
      entries[dim] = spec[dim]
    else:
      moving.append((parts, spec[dim]))
  for parts, axes in moving:
    homes = [
      dim
      for dim, length in enumerate(shape)
      if entries[dim] is None and length % parts == 0
    ]
    if homes:
      entries[max(homes, key=lambda dim: shape[dim])] = axes
  return NamedSharding(sharding.mesh, P(*entries))


def auto(sharding: Sharding) -> Sharding:
  """Returns a sharding on Auto axes, where XLA inserts communication."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
  return NamedSharding(mesh, sharding.spec)


def _on_auto(x: Any) -> Any:
  return on_mesh(x, auto(x.sharding)) if isinstance(x, Array) else x


def on_mesh(x: Array, sharding: Sharding) -> Array:
  """Returns `x` under an equivalent sharding, without moving anything.

  Unlike `jax.device_put` it accepts arrays with shards in other processes.
  """
  if x.sharding == sharding or not isinstance(sharding, NamedSharding):
    return x
  return jax.make_array_from_single_device_arrays(
    x.shape, sharding, [shard.data for shard in x.addressable_shards]
  )


def abstract(x: Any) -> Any:
  """Returns an array's shape, dtype and sharding; other values unchanged.

  An array that is not committed to its device has no sharding: a step would be
  compiled again for one that is.
  """
  if not hasattr(x, 'dtype'):
    return x
  is_free = isinstance(x, Array) and not x.committed
  sharding = None if is_free else getattr(x, 'sharding', None)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def near(x: Any, like: Any) -> Any:
  """Returns a saved array on the devices of `like`, NumPy's if that is one."""
  if isinstance(like, np.ndarray):
    return np.asarray(x)
  sharding = getattr(like, 'sharding', None)
  if not isinstance(x, Array) or sharding is None:
    return x
  if x.sharding.device_set == sharding.device_set:
    return x
  return jax.device_put(x, auto(fit_sharding(x.shape, sharding)))


# The arrays that hold the same as a Python number. A step returns the count of
# a state as an array, also where it was a Python number.
_DTYPES = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating}


def as_array(x: Any, like: Any) -> Any:
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


def place(x: Any, like: Any) -> Any:
  """Returns `x` as an array like `like`, on its devices."""
  if not hasattr(like, 'dtype'):
    return x.item() if hasattr(x, 'dtype') else x
  x = as_array(x, like)
  if isinstance(like, np.ndarray):
    return np.asarray(x)
  if isinstance(like, np.generic):
    return np.asarray(x)[()]
  return jnp.asarray(x) if like.sharding is None else put(x, like.sharding)
