"""How one worker's function runs for all workers.

By `vmap` (simulated), by `shard_map` (on a mesh), or directly, in the caller's
own map or in a separate program: the same function, with the same bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
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

  `fun` takes what one device has of the arguments, trees of arrays, without a
  worker axis. Results must be equal on all workers, as those of `Workers.group`
  are, unless their spec is `stacked`. Specs are trees like the arguments and
  results, of `Spec`.
  """
  mapped = _Mapped(workers, fun, in_specs, out_specs)
  if workers.kind == 'simulated':
    return mapped.simulate
  if workers.mesh is not None:
    return mapped.run_on_mesh
  specs = jax.tree.leaves((in_specs, out_specs))
  if any(spec.stacked for spec in specs):
    return mapped.run_on_device
  return fun


def _on_mesh(workers: Workers, spec: Spec) -> P:
  """Returns the spec of a whole array."""
  if not spec.stacked:
    return spec.inner
  return P(workers.spmd_axis_name, *spec.inner)


def _named(workers: Workers, spec: P) -> NamedSharding:
  assert workers.mesh is not None
  return NamedSharding(workers.mesh, spec)


def _drop_axis(spec: Spec, x: jax.Array) -> jax.Array:
  return x[0] if spec.stacked else x


def _add_axis(spec: Spec, x: jax.Array) -> jax.Array:
  return x[None] if spec.stacked else x


@dataclasses.dataclass(frozen=True, eq=False)
class _Mapped:
  """A function of one worker, and the ways to run it; see `map_over`."""

  workers: Workers
  fun: Callable[..., Any]
  in_specs: tuple[chex.ArrayTree, ...]
  out_specs: chex.ArrayTree

  def run_on_device(self, *args: Any) -> Any:
    """Runs the function where this device is the worker."""
    own = jax.tree.map(_drop_axis, self.in_specs, args)
    return jax.tree.map(_add_axis, self.out_specs, self.fun(*own))

  def run_on_mesh(self, *args: Any) -> Any:
    """Runs the function on all devices of the mesh."""
    workers = self.workers
    whole = functools.partial(_on_mesh, workers)

    def place_stacked(spec: Spec, x: jax.Array) -> jax.Array:
      return reshard(workers, x, whole(spec)) if spec.stacked else x

    mapped = jax.shard_map(
      self.run_on_device,
      mesh=workers.mesh,
      in_specs=jax.tree.map(whole, self.in_specs),
      out_specs=jax.tree.map(whole, self.out_specs),
      check_vma=workers.stacked_gradients,  # `meet` has no such types
    )
    return mapped(*jax.tree.map(place_stacked, self.in_specs, args))

  def simulate(self, *args: Any) -> Any:
    """Runs the function under a `vmap` for each axis of devices.

    What is sharded gets an axis for each of them, before the axis of its
    blocks.
    """
    workers = self.workers
    sizes = {workers.axis_name: workers.count}
    sizes |= workers.param_specs.axis_sizes
    names = [*sizes]

    def axis_of(name: str, spec: Spec) -> int | None:
      """Returns the axis of an array under the maps of all outer names."""
      # From the outermost; None is an axis of the block itself.
      axes: list[str | None] = []
      if spec.stacked:
        axes.append(workers.axis_name)
      for dim in range(len(spec.inner)):
        axes += [*entry(spec.inner, dim), None]
      if name not in axes:
        return None
      # The outer maps have taken their axes away.
      before = axes[: axes.index(name)]
      outer = names[: names.index(name)]
      return sum(axis not in outer for axis in before)

    def mapped(number: jax.Array, *own: Any) -> Any:
      del number  # something has to be mapped over every axis
      return self.fun(*own)

    for name in reversed(names):
      # out_axes=None holds because what was gathered is the same for all:
      # merging is done once, not once per worker.
      axis_in = functools.partial(axis_of, name)
      mapped = jax.vmap(
        mapped,
        in_axes=(0, *jax.tree.map(axis_in, self.in_specs)),
        out_axes=jax.tree.map(axis_in, self.out_specs),
        axis_name=name,
        axis_size=sizes[name],
      )
    numbers = jnp.zeros([*sizes.values()], jnp.int32)  # [workers, *devices]
    to_blocks = functools.partial(_to_blocks, sizes)
    blocks = jax.tree.map(to_blocks, self.in_specs, args)
    found = mapped(numbers, *blocks)
    return jax.tree.map(_from_blocks, self.out_specs, found)


def _to_blocks(
  sizes: Mapping[str, int],
  spec: Spec,
  x: jax.Array,
) -> jax.Array:
  """Cuts every sharded dimension to `[*devices, length of a block]`."""
  for dim in reversed(range(len(spec.inner))):
    at = spec.stacked + dim
    devices = [sizes[axis] for axis in entry(spec.inner, dim)]
    before, after = x.shape[:at], x.shape[at + 1 :]
    x = x.reshape(*before, *devices, -1, *after)
  return x


def _from_blocks(spec: Spec, x: jax.Array) -> jax.Array:
  """Undoes `_to_blocks`."""
  for dim in range(len(spec.inner)):
    at = spec.stacked + dim
    num_axes = len(entry(spec.inner, dim))
    x = jax.lax.collapse(x, at, at + num_axes + 1)
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
  """Returns the context of one worker's model: layers may look for the mesh."""
  if workers.mesh is None:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(workers.mesh.abstract_mesh)


# Arrays of all workers --------------------------------------------------------


def numbers(workers: Workers) -> jax.Array:
  """Returns the numbers of the workers whose arrays are here, int32 `[n]`."""
  count = workers.count  # an error where the axis is not mapped
  if workers.stacked_gradients:
    return place(workers, jnp.arange(count, dtype=jnp.int32))
  if workers.relay is not None:
    return jnp.array([workers.relay.rank or 0], jnp.int32)
  return jax.lax.axis_index(workers.axis_name)[None]


def stack(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns a copy of `x` for every worker, with a leading worker axis."""
  if not workers.stacked_gradients:
    # Varying from the start, or a scan over steps would see its type change.
    return vary(x[None], workers.axis)
  if not isinstance(x, jax.core.Tracer):
    x = workers.device_put(x)
  return _copies(workers, x)


@functools.partial(jax.jit, static_argnums=0)
def _copies(workers: Workers, x: jax.Array) -> jax.Array:
  shape = workers.count, *x.shape
  return place(workers, jnp.broadcast_to(x, shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def bucket_zeros(
  workers: Workers,
  types: tuple[jax.ShapeDtypeStruct, ...],
) -> list[jax.Array]:
  """Returns zeros of `Workers.bucket_shape` of each, allocated sharded."""
  # In a shard_map, each device makes its shard. jnp.zeros(device=sharding) in a
  # jit would make all workers' momentum on a single device.
  spec = _on_mesh(workers, workers.bucket_spec)

  def zeros() -> list[jax.Array]:
    found = []
    for x in types:
      shape = workers.bucket_shape(x.shape)
      if workers.mesh is not None:
        shape = _named(workers, spec).shard_shape(shape)
      found.append(jnp.zeros(shape, x.dtype))
    return found

  if workers.mesh is None:
    return [vary(x, workers.axis) for x in zeros()]
  return jax.shard_map(zeros, mesh=workers.mesh, in_specs=(), out_specs=spec)()


def place(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns `x [count, ...]`, each worker's part where the worker is."""
  if workers.mesh is None:
    return x
  axis = workers.axis_name
  if workers.is_explicit:
    old = jax.typeof(x).sharding.spec
    return reshard(workers, x, P(axis, *old[1:]))
  others = [P.UNCONSTRAINED] * (x.ndim - 1)
  sharding = _named(workers, P(axis, *others))
  return jax.lax.with_sharding_constraint(x, sharding)


def spread(workers: Workers, x: jax.Array) -> jax.Array:
  """Shards the first axis of one worker's array over the worker's devices.

  Pads it to a multiple of their number. Leaves it as it is if it is shorter
  than half of that, and for two devices, whose products of shards move as few
  bytes. Called in `context`.
  """
  devices = workers.param_specs.devices
  if workers.mesh is None or devices < 4 or 2 * len(x) < devices:
    return x
  padding = [(0, 0)] * x.ndim
  padding[0] = 0, -len(x) % devices
  x = jnp.pad(x, padding)
  # Of the mesh in the context, whose axes `auto_axes` makes Auto.
  return jax.lax.with_sharding_constraint(x, P(workers.param_specs.axes))


def split_rows(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns a batch `[count * b, ...]` as rows `[count, b, ...]`."""
  count, axis = workers.count, workers.axis_name
  shape = (count, x.shape[0] // count, *x.shape[1:])
  if not workers.is_explicit:
    return place(workers, x.reshape(shape))
  # A batch may be spread over the devices of a worker as well, and stays so.
  old = jax.typeof(x).sharding.spec
  names = entry(old, 0)
  inner = names[1:] if names[:1] == (axis,) else ()
  x = reshard(workers, x, P((axis, *inner), *old[1:]))
  spec = P(axis, inner or None, *old[1:])
  return x.reshape(shape, out_sharding=_named(workers, spec))


def join_rows(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns rows `[count, b, ...]` as a batch: undoes `split_rows`."""
  count, rows, *others = x.shape
  shape = (count * rows, *others)
  if not workers.is_explicit:
    return x.reshape(shape)
  old = jax.typeof(x).sharding.spec
  spec = P((workers.axis_name, *entry(old, 1)), *old[2:])
  return x.reshape(shape, out_sharding=_named(workers, spec))


def reshard(
  workers: Workers,
  x: jax.Array,
  spec: P,
) -> jax.Array:
  """Reshards `x` on Explicit axes; on Auto axes `shard_map` does it."""
  if not workers.is_explicit:
    return x
  return jax.sharding.reshard(x, _named(workers, spec))
