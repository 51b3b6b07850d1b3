"""How one worker's function runs for all workers.

By `vmap` (simulated), by `shard_map` (on a mesh), or directly, in the caller's
own map or in a separate program: the same function, with the same bits.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from demo_optax._tree import is_inexact
from demo_optax.workers.collectives import vary
from demo_optax.workers.param_specs import entry
from demo_optax.workers.workers import Spec, Workers


def map_over(
  workers: Workers,
  fun: Callable[..., Any],
  in_specs: tuple[chex.ArrayTree, ...],
  out_specs: chex.ArrayTree,
) -> Callable[..., Any]:
  """Maps one worker's function, which may communicate, over all workers.

  `fun` takes what one device has from the arguments, without a worker axis.
  Results must be equal on all workers, as `Workers.group` makes them, unless
  their spec is `stacked`. The arguments and results are trees with arrays, the
  specs such trees with a `Spec` for each.
  """

  def on_device(*args: Any) -> Any:
    """Runs the function where this device is the worker."""
    # The worker's own [1, ...] without the worker axis, and back.
    own = jax.tree.map(
      lambda spec, x: x[0] if spec.stacked else x, in_specs, args
    )
    return jax.tree.map(
      lambda spec, x: x[None] if spec.stacked else x, out_specs, fun(*own)
    )

  def on_mesh(*args: Any) -> Any:
    """Runs the function on all devices in the mesh."""
    whole = functools.partial(_on_mesh, workers)
    # Types of parameters say already where they are.
    placed = jax.tree.map(
      lambda spec, x: reshard(workers, x, whole(spec)) if spec.stacked else x,
      in_specs,
      args,
    )
    mapped = jax.shard_map(
      on_device,
      mesh=workers.mesh,
      in_specs=jax.tree.map(whole, in_specs),
      out_specs=jax.tree.map(whole, out_specs),
      check_vma=workers.stacked_gradients,  # `meet` has no such types
    )
    return mapped(*placed)

  if workers.kind == 'simulated':
    return functools.partial(_simulate, workers, fun, in_specs, out_specs)
  if workers.mesh is not None:
    return on_mesh
  # In a step nothing is stacked: the function runs as it is.
  specs = jax.tree.leaves((in_specs, out_specs))
  if any(spec.stacked for spec in specs):
    return on_device
  return fun


def _on_mesh(workers: Workers, spec: Spec) -> P:
  """Returns a whole array's spec."""
  if not spec.stacked:
    return spec.inner
  return P(workers.spmd_axis_name, *spec.inner)


def _simulate(
  workers: Workers,
  fun: Callable[..., Any],
  in_specs: tuple[chex.ArrayTree, ...],
  out_specs: chex.ArrayTree,
  *args: Any,
) -> Any:
  """Runs the function under a `vmap` for each axis.

  What is sharded gets an axis for the devices, before the axis for the block.
  """
  axis_sizes = {workers.axis_name: workers.count}
  axis_sizes.update(workers.param_specs.axis_sizes)
  axis_names = [*axis_sizes]

  def axis_of(
    name: str,
    spec: Spec,
  ) -> int | None:
    """Returns where an array has this axis, under maps over outer ones."""
    outer = axis_names[: axis_names.index(name)]
    # From the outermost; None is an axis of the block itself.
    axes: list[str | None] = [workers.axis_name] * spec.stacked
    for dimension in range(len(spec.inner)):
      axes += [*entry(spec.inner, dimension), None]
    # The outer maps have taken their axes away.
    axes = [axis for axis in axes if axis not in outer]
    return axes.index(name) if name in axes else None

  mapped = fun
  for name in reversed(axis_names):
    # out_axes=None holds because what was gathered is the same for all:
    # merging is done once, not once per worker.
    axis_in = functools.partial(axis_of, name)
    mapped = jax.vmap(
      mapped,
      in_axes=jax.tree.map(axis_in, in_specs),
      out_axes=jax.tree.map(axis_in, out_specs),
      axis_name=name,
      axis_size=axis_sizes[name],
    )
  to_blocks = functools.partial(_to_blocks, axis_sizes)
  blocks = jax.tree.map(to_blocks, in_specs, args)
  results = mapped(*blocks)
  return jax.tree.map(_from_blocks, out_specs, results)


def _to_blocks(
  sizes: Mapping[str, int],
  spec: Spec,
  x: jax.Array,
) -> jax.Array:
  """Cuts every sharded dimension to `[*devices, block]`."""
  blocks = [*x.shape[: spec.stacked]]
  for dimension, length in enumerate(x.shape[spec.stacked :]):
    devices = [sizes[axis] for axis in entry(spec.inner, dimension)]
    blocks += [*devices, length // math.prod(devices)]
  return x.reshape(blocks)


def _from_blocks(
  spec: Spec,
  x: jax.Array,
) -> jax.Array:
  """Undoes `_to_blocks`."""
  for dimension in range(len(spec.inner)):
    position = spec.stacked + dimension
    num_axes = len(entry(spec.inner, dimension))
    x = jax.lax.collapse(x, position, position + num_axes + 1)
  return x


def run_alone(
  workers: Workers,
  fun: Callable[..., tuple[chex.ArrayTree, chex.ArrayTree]],
  own: chex.ArrayTree,
  state: chex.ArrayTree,
  shared: chex.ArrayTree,
) -> tuple[chex.ArrayTree, chex.ArrayTree]:
  """Runs a function that does not communicate for all workers.

  `fun(own, state, shared) -> (own, state)` sees all without the worker axis.
  `own` is laid out as gradients are. `state` is stacked.
  """
  _ = workers.count  # an error where the axis is not mapped
  if workers.stacked_gradients:
    # One worker's arrays are whole here, and may be spread over its devices.
    mapped = jax.vmap(
      fun,
      in_axes=(0, 0, None),
      spmd_axis_name=workers.spmd_axis_name,
    )
    with context(workers):
      return mapped(own, state, shared)

  # What is shared must vary before it is differentiated: jax.grad with respect
  # to replicated parameters would sum the workers' gradients.
  def vary_floats(x: jax.Array) -> jax.Array:
    return vary(x, workers.axis) if is_inexact(x) else x

  state = jax.tree.map(lambda x: x[0], state)
  shared = jax.tree.map(vary_floats, shared)
  own, state = fun(own, state, shared)
  return own, jax.tree.map(lambda x: x[None], state)


def context(
  workers: Workers,
) -> contextlib.AbstractContextManager[object]:
  """Returns the context for one worker's model, which may look for the mesh."""
  if workers.mesh is None:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(workers.mesh.abstract_mesh)


# Arrays of all workers --------------------------------------------------------


def numbers(workers: Workers) -> jax.Array:
  """Returns which workers' arrays are here, int32 `[num_here]`."""
  num_workers = workers.count  # an error where the axis is not mapped
  if workers.stacked_gradients:
    return place(workers, jnp.arange(num_workers, dtype=jnp.int32))
  if workers.relay is not None:
    return jnp.array([workers.relay.rank or 0], jnp.int32)
  return jax.lax.axis_index(workers.axis_name)[None]


def stack(
  workers: Workers,
  x: jax.Array,
) -> jax.Array:
  """Copies `x` for every worker: with a leading worker axis."""
  if not workers.stacked_gradients:
    # Varying from the start, or a scan over steps would see its type change.
    return vary(x[None], workers.axis)
  if not isinstance(x, jax.core.Tracer):
    x = workers.device_put(x)
  return _copies(workers, x)


@functools.partial(jax.jit, static_argnums=0)
def _copies(
  workers: Workers,
  x: jax.Array,
) -> jax.Array:
  # Compiled, so that each copy is made where its worker is.
  shape = workers.count, *x.shape
  return place(workers, jnp.broadcast_to(x, shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def bucket_zeros(
  workers: Workers,
  types: tuple[jax.ShapeDtypeStruct, ...],
) -> list[jax.Array]:
  """Returns zeros in each `Workers.bucket_shape`, allocated sharded."""
  devices = (1,) if workers.param_specs.axes else ()

  # Each device makes its shard. jnp.zeros(device=sharding) in a jit would make
  # all workers' momentum on a single device.
  def zeros() -> list[jax.Array]:
    buckets = []
    for bucket_type in types:
      bucket = jnp.zeros((*devices, *bucket_type.shape), bucket_type.dtype)
      buckets.append(vary(bucket, workers.axis))
    return buckets

  return map_over(workers, zeros, (), [workers.bucket_spec] * len(types))()


def place(
  workers: Workers,
  x: jax.Array,
) -> jax.Array:
  """Returns `x [count, ...]`, each worker's part where the worker is."""
  if workers.mesh is None:
    return x
  axis = workers.spmd_axis_name
  if workers.is_explicit:
    former = jax.typeof(x).sharding.spec
    return reshard(workers, x, P(axis, *former[1:]))
  # XLA decides how the worker's devices share its part.
  others = [P.UNCONSTRAINED] * (x.ndim - 1)
  sharding = workers.sharding(P(axis, *others))
  return jax.lax.with_sharding_constraint(x, sharding)


def spread(
  workers: Workers,
  x: jax.Array,
) -> jax.Array:
  """Shards one worker's array along its first axis, over the worker's devices.

  Pads it, to divide by their number. Leaves it as it is if it has fewer rows
  than half the devices, and for two devices, where products with shards move as
  few bytes. Called in `context`.
  """
  devices = workers.param_specs.devices
  if workers.mesh is None or devices < 4 or 2 * len(x) < devices:
    return x
  # From [rows, ...] to [rows up to a multiple of the devices, ...].
  padding = [(0, 0)] * x.ndim
  padding[0] = 0, -len(x) % devices
  x = jnp.pad(x, padding)
  # Of the mesh in the context, whose axes `auto_axes` makes Auto.
  return jax.lax.with_sharding_constraint(x, P(workers.param_specs.axes))


def split_rows(
  workers: Workers,
  x: jax.Array,
) -> jax.Array:
  """Returns a batch `[workers * b, ...]` as rows `[workers, b, ...]`."""
  shape = (workers.num_here, -1, *x.shape[1:])
  if not workers.is_explicit:
    return place(workers, x.reshape(shape))
  # A batch may be spread over the devices of a worker as well, and stays so.
  axis, former = workers.axis_name, jax.typeof(x).sharding.spec
  inner = tuple(name for name in entry(former, 0) if name != axis)
  spec = P(axis, inner or None, *former[1:])
  return x.reshape(shape, out_sharding=workers.sharding(spec))


def join_rows(
  workers: Workers,
  x: jax.Array,
) -> jax.Array:
  """Returns rows `[workers, b, ...]` as a batch: undoes `split_rows`."""
  joined_shape = (-1, *x.shape[2:])
  if not workers.is_explicit:
    return x.reshape(joined_shape)
  former = jax.typeof(x).sharding.spec
  spec = P((workers.axis_name, *entry(former, 1)), *former[2:])
  return x.reshape(joined_shape, out_sharding=workers.sharding(spec))


def reshard(
  workers: Workers,
  x: jax.Array,
  spec: P,
) -> jax.Array:
  """Reshards `x` on Explicit axes; on Auto axes `shard_map` does it."""
  if not workers.is_explicit:
    return x
  return jax.sharding.reshard(x, workers.sharding(spec))
