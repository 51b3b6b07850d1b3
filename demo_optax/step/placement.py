"""Where the arrays of a step belong on the workers' mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.step.call import Array
from demo_optax.workers import Workers, lift, value
from demo_optax.workers.inside import Result


def put(workers: Workers, x: Any, a: Array) -> Any:
  """Puts an argument's array where it belongs, unless it is on the mesh."""
  if a.in_state and type(x) is int:
    # A count of 0 in a state gets the dtype of those that a step returns, or
    # the step would be compiled for both.
    x = np.asarray(x, a.type.dtype)
  target = a.sharding
  if target is None or isinstance(x, jax.core.Tracer):
    return x
  there = getattr(getattr(x, 'sharding', None), 'mesh', None) == workers.mesh
  if there and (
      a.role != 'stacked' or x.sharding.is_equivalent_to(target, x.ndim)
  ):
    if not workers.is_explicit:
      return x
    # Where types have specs, P() and P(None) are two, and results of a step
    # have the longer one: it would be compiled for both.
    spec = x.sharding.spec
    full = P(*spec, *(None,) * (x.ndim - len(spec)))
    target = NamedSharding(target.mesh, full)
    if x.sharding == target:
      return x
  return value.put(x, target)


def hold(workers: Workers, r: Result, axis: int) -> jax.Array:
  """Returns a result with its rows along an axis, where it belongs."""
  x = jnp.moveaxis(r.value, 0, axis) if r.is_rows else r.value
  if workers.mesh is None or workers.is_explicit:  # types say it
    return x
  if r.role == 'output' and x.ndim:
    return x
  target = workers.sharding(r.keys, x.shape)
  return jax.lax.with_sharding_constraint(x, target)


def split(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns a batch `[count * b, ...]` as rows `[count, b, ...]`."""
  shape = (workers.count, x.shape[0] // workers.count, *x.shape[1:])
  if not workers.is_explicit:
    return lift.place(workers, x.reshape(shape))
  # A batch may be spread over the devices of a worker as well, and stays so.
  first, *rest = jax.typeof(x).sharding.spec
  first = first if isinstance(first, tuple) else (first,)
  inner = first[1:] if first[0] == workers.axis_name else ()
  x = lift.reshard(workers, x, P((workers.axis_name, *inner), *rest))
  return _reshape(workers, x, shape, P(workers.axis_name, inner or None, *rest))


def join(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns rows `[count, b, ...]` as a batch: undoes `split`."""
  shape = (x.shape[0] * x.shape[1], *x.shape[2:])
  if not workers.is_explicit:
    return x.reshape(shape)
  _, inner, *rest = jax.typeof(x).sharding.spec
  inner = inner if isinstance(inner, tuple) else (inner,) if inner else ()
  return _reshape(workers, x, shape, P((workers.axis_name, *inner), *rest))


def _reshape(
    workers: Workers, x: jax.Array, shape: tuple[int, ...], spec: P
) -> jax.Array:
  assert workers.mesh is not None
  sharding = NamedSharding(workers.mesh, spec)
  return jax.lax.reshape(x, shape, out_sharding=sharding)
