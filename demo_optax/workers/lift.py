"""How one worker's function runs for all workers.

By `vmap` (simulated), by `shard_map` (on a mesh), or directly, in the caller's
own map or in a separate program: the same function, with the same bits.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.workers import collectives, split
from demo_optax.workers.collectives import vary
from demo_optax.workers.param_specs import entry
from demo_optax.workers.value import Spec, Workers


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
  results.
  """
  specs = *jax.tree.leaves(in_specs), *jax.tree.leaves(out_specs)
  is_stacked = any(spec.stacked for spec in specs)

  def one_device(*args: Any) -> Any:
    found = fun(*jax.tree.map(_drop_axis, in_specs, args))
    return jax.tree.map(_add_axis, out_specs, found)

  if workers.kind == 'simulated':
    return functools.partial(_simulate, workers, fun, in_specs, out_specs)
  if workers.stacked_gradients:
    return functools.partial(
      _run_on_mesh, workers, one_device, in_specs, out_specs
    )
  if workers.relay is not None and workers.param_specs.axes:
    return functools.partial(
      _run_in_parts, workers, one_device, in_specs, out_specs
    )
  return one_device if is_stacked else fun


def _drop_axis(spec: Spec, x: jax.Array) -> jax.Array:
  return x[0] if spec.stacked else x


def _add_axis(spec: Spec, x: jax.Array) -> jax.Array:
  return x[None] if spec.stacked else x


def _named(workers: Workers, spec: P) -> NamedSharding:
  assert workers.mesh is not None
  return NamedSharding(workers.mesh, spec)


def _on_mesh(workers: Workers, spec: Spec) -> P:
  """Returns the spec of a whole array."""
  return P(workers.spmd_axis_name, *spec.inner) if spec.stacked else spec.inner


def _run_on_mesh(
  workers: Workers,
  one_device: Callable[..., Any],
  in_specs: tuple[chex.ArrayTree, ...],
  out_specs: chex.ArrayTree,
  *args: Any,
) -> Any:
  """Runs a function of one device on all devices of the mesh."""
  whole = functools.partial(_on_mesh, workers)

  def on_workers(spec: Spec, x: jax.Array) -> jax.Array:
    return reshard(workers, x, whole(spec)) if spec.stacked else x

  return jax.shard_map(
    one_device,
    mesh=workers.mesh,
    in_specs=jax.tree.map(whole, in_specs),
    out_specs=jax.tree.map(whole, out_specs),
  )(*jax.tree.map(on_workers, in_specs, args))


def _run_in_parts(
  workers: Workers,
  one_device: Callable[..., Any],
  in_specs: tuple[chex.ArrayTree, ...],
  out_specs: chex.ArrayTree,
  *args: Any,
) -> Any:
  """Runs a function of one device for all devices of one worker.

  Messages for other workers pass from one `shard_map` to the next along an axis
  of the devices.
  """
  names = workers.param_specs.axes
  whole = functools.partial(_on_mesh, workers)
  out_specs = jax.tree.map(whole, out_specs)
  flat_out = jax.tree.leaves(out_specs)
  shard_map = functools.partial(
    jax.shard_map, mesh=workers.mesh, check_vma=False
  )
  mapped = shard_map(
    one_device, in_specs=jax.tree.map(whole, in_specs), out_specs=out_specs
  )
  program = jax.make_jaxpr(mapped)(*args)
  (eqn,) = program.jaxpr.eqns
  (body,) = core.jaxprs_in_params(eqn.params)
  values = dict(zip(program.jaxpr.invars, jax.tree.leaves(args)))
  values |= zip(program.jaxpr.constvars, program.consts)
  # Specs of what passes between parts, and the axis of the devices, if any.
  layouts: dict[core.Var, tuple[P, int | None]] = {}
  for variable, spec in zip(body.invars, eqn.params['in_specs']):
    layouts[variable] = spec, None
  for inner in body.eqns:
    if inner.primitive is collectives.meet_p:
      rows, *flags = inner.outvars
      layouts[rows] = P(None, names), 1
      layouts |= dict.fromkeys(flags, (P(), None))

  def build(
    part: Callable[..., list[jax.Array]],
    read: list[core.Var],
    written: list[core.Var],
    is_last: bool,
  ) -> Callable[..., list[jax.Array]]:
    ins = [layouts.get(variable, (P(names), 0)) for variable in read]

    def on_device(*arrays: jax.Array) -> list[jax.Array]:
      own = []
      for x, (_, axis) in zip(arrays, ins):
        own.append(x if axis is None else jnp.squeeze(x, axis))
      found = part(*own)
      return found if is_last else [x[None] for x in found]

    return shard_map(
      on_device,
      in_specs=tuple(spec for spec, _ in ins),
      out_specs=flat_out if is_last else [P(names)] * len(written),
    )

  parts = split.PartedStep(core.ClosedJaxpr(body, []), build=build)
  programs = collectives.Programs(workers.count)
  found = parts.run(
    [values[variable] for variable in eqn.invars],
    lambda _, sent: [collectives.meet(x, programs) for x in sent or ()],
  )
  return jax.tree.structure(out_specs).unflatten(found)


def run_alone(
  workers: Workers,
  fun: Callable[..., tuple[Any, Any]],
  own: Any,
  state: Any,
  shared: Any,
) -> tuple[Any, Any]:
  """Runs a function that does not communicate for all workers.

  `fun(own, state, shared) -> (own, state)` sees all without the worker axis.
  `own` is laid out as gradients are. `state` is stacked.
  """
  _ = workers.count  # an error where the axis is not mapped
  if workers.stacked_gradients:
    mapped = jax.vmap(
      fun, in_axes=(0, 0, None), spmd_axis_name=workers.spmd_axis_name
    )
    with context(workers):
      return mapped(own, state, shared)

  # What is shared must vary before it is differentiated: jax.grad with respect
  # to replicated parameters would sum the workers' gradients.
  def vary_floats(x: Any) -> Any:
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return vary(x, workers.axis) if inexact else x

  state = jax.tree.map(lambda x: x[0], state)
  own, state = fun(own, state, jax.tree.map(vary_floats, shared))
  return own, jax.tree.map(lambda x: x[None], state)


def context(workers: Workers) -> contextlib.AbstractContextManager[Any]:
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
    return jnp.array([workers.relay.rank], jnp.int32)
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
  return place(workers, jnp.broadcast_to(x, (workers.count, *x.shape)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def bucket_zeros(
  workers: Workers, types: tuple[jax.ShapeDtypeStruct, ...]
) -> list[jax.Array]:
  """Returns zeros of `Workers.bucket_shape` of each, allocated sharded."""
  shapes = [workers.bucket_shape(x.shape) for x in types]
  if workers.mesh is not None:
    # jnp.zeros(device=sharding) would do under no jit only: inside one it lands
    # on a single device, all workers' momentum together.
    spec = _on_mesh(workers, workers.bucket_spec)
    shapes = [_named(workers, spec).shard_shape(shape) for shape in shapes]

  def zeros() -> list[jax.Array]:
    return [jnp.zeros(shape, x.dtype) for shape, x in zip(shapes, types)]

  if workers.mesh is None:
    return [vary(x, workers.axis) for x in zeros()]
  return jax.shard_map(
    zeros, mesh=workers.mesh, in_specs=(), out_specs=[spec] * len(types)
  )()


def place(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns `x [count, ...]`, each worker's part where the worker is."""
  if workers.mesh is None:
    return x
  if workers.is_explicit:
    old = jax.typeof(x).sharding.spec
    return reshard(workers, x, P(workers.axis_name, *old[1:]))
  spec = P(workers.axis_name, *[P.UNCONSTRAINED] * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, _named(workers, spec))


def spread(workers: Workers, x: jax.Array) -> jax.Array:
  """Shards the first axis of one worker's array over the worker's devices.

  Pads it to a multiple of their number. Leaves it as it is if it is shorter
  than half of that, and for two devices, whose products of shards move as few
  bytes. Called in `context`.
  """
  devices = workers.param_specs.devices
  if workers.mesh is None or devices < 4 or 2 * len(x) < devices:
    return x
  x = jnp.pad(x, [(0, -len(x) % devices), *[(0, 0)] * (x.ndim - 1)])
  # Of the mesh in the context, whose axes `auto_axes` makes Auto.
  return jax.lax.with_sharding_constraint(x, P(workers.param_specs.axes))


def split_rows(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns a batch `[count * b, ...]` as rows `[count, b, ...]`."""
  shape = (workers.count, x.shape[0] // workers.count, *x.shape[1:])
  if not workers.is_explicit:
    return place(workers, x.reshape(shape))
  # A batch may be spread over the devices of a worker as well, and stays so.
  old, axis = jax.typeof(x).sharding.spec, workers.axis_name
  inner = entry(old, 0)[1:] if entry(old, 0)[:1] == (axis,) else ()
  x = reshard(workers, x, P((axis, *inner), *old[1:]))
  spec = P(axis, inner or None, *old[1:])
  return x.reshape(shape, out_sharding=_named(workers, spec))


def join_rows(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns rows `[count, b, ...]` as a batch: undoes `split_rows`."""
  shape = (x.shape[0] * x.shape[1], *x.shape[2:])
  if not workers.is_explicit:
    return x.reshape(shape)
  old = jax.typeof(x).sharding.spec
  spec = P((workers.axis_name, *entry(old, 1)), *old[2:])
  return x.reshape(shape, out_sharding=_named(workers, spec))


def reshard(workers: Workers, x: jax.Array, spec: P) -> jax.Array:
  """Reshards `x` on Explicit axes; on Auto axes `shard_map` does it."""
  if not workers.is_explicit:
    return x
  return jax.sharding.reshard(x, _named(workers, spec))


# Simulated workers ------------------------------------------------------------


def _simulate(
  workers: Workers,
  fun: Callable[..., Any],
  in_specs: tuple[chex.ArrayTree, ...],
  out_specs: chex.ArrayTree,
  *args: Any,
) -> Any:
  """Runs a function of one device under a `vmap` for each axis of devices.

  What is sharded gets an axis for each of them, before the axis of its blocks.
  """
  sizes = {workers.axis_name: workers.count}
  sizes |= workers.param_specs.axis_sizes
  names = [*sizes]

  def axis_of(name: str, spec: Spec) -> int | None:
    """Returns the axis of an array under the maps of all outer names."""
    axes: list[str | None] = [workers.axis_name] if spec.stacked else []
    for dim in range(len(spec.inner)):
      axes += [*entry(spec.inner, dim), None]
    outer = names[: names.index(name)]
    inside = [axis for axis in axes if axis not in outer]
    return inside.index(name) if name in inside else None

  def mapped(number: jax.Array, *own: Any) -> Any:
    del number  # something has to be mapped over every axis
    return fun(*own)

  for name in reversed(names):
    # out_axes=None holds because what was gathered is the same for all: merging
    # is done once, not once per worker.
    axis_in = functools.partial(axis_of, name)
    mapped = jax.vmap(
      mapped,
      in_axes=(0, *jax.tree.map(axis_in, in_specs)),
      out_axes=jax.tree.map(axis_in, out_specs),
      axis_name=name,
      axis_size=sizes[name],
    )
  numbers = jnp.zeros([*sizes.values()], jnp.int32)
  to_blocks = functools.partial(_to_blocks, sizes)
  found = mapped(numbers, *jax.tree.map(to_blocks, in_specs, args))
  return jax.tree.map(_from_blocks, out_specs, found)


def _to_blocks(sizes: Mapping[str, int], spec: Spec, x: jax.Array) -> jax.Array:
  """Cuts every sharded dimension to `[*devices, length of a block]`."""
  for dim in reversed(range(len(spec.inner))):
    at = spec.stacked + dim
    devices = [sizes[axis] for axis in entry(spec.inner, dim)]
    x = jnp.reshape(x, (*x.shape[:at], *devices, -1, *x.shape[at + 1 :]))
  return x


def _from_blocks(spec: Spec, x: jax.Array) -> jax.Array:
  """Undoes `_to_blocks`."""
  for dim in range(len(spec.inner)):
    at = spec.stacked + dim
    x = jax.lax.collapse(x, at, at + 1 + len(entry(spec.inner, dim)))
  return x
