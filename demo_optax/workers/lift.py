"""How one worker's function runs for all workers.

By `vmap` (simulated), by `shard_map` (on a mesh), or directly, in the caller's
own map or in a separate program: the same function, with the same bits.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.workers import collectives, split
from demo_optax.workers.collectives import vary
from demo_optax.workers.param_specs import entry
from demo_optax.workers.value import Spec, Workers


def run(
  workers: Workers,
  fun: Callable[..., Any],
  args: tuple[Any, ...],
  in_specs: tuple[Any, ...],
  out_specs: Any,
) -> Any:
  """Runs one worker's function for all workers; it may communicate.

  `fun` takes what one device has of `args`, trees of arrays, without a worker
  axis. Results must be equal on all workers, as those of `Workers.group` are,
  unless their spec is `stacked`. Specs are trees of `Spec`.
  """
  flat, treedef = jax.tree.flatten(args)
  ins = jax.tree.leaves(in_specs)
  outs, out_treedef = jax.tree.flatten(out_specs)

  def one_worker(*own: jax.Array) -> list[jax.Array]:
    return out_treedef.flatten_up_to(fun(*treedef.unflatten(own)))

  def one_device(*arrays: jax.Array) -> list[jax.Array]:
    own = [x[0] if spec.stacked else x for x, spec in zip(arrays, ins)]
    found = one_worker(*own)
    return [x[None] if spec.stacked else x for x, spec in zip(found, outs)]

  read = [_spec(workers, spec) for spec in ins]
  written = [_spec(workers, spec) for spec in outs]
  if workers.kind == 'simulated':
    found = _simulate(workers, one_worker, flat, ins, outs)
  elif workers.relay is not None and workers.param_specs.axes:
    found = _run_in_parts(workers, one_device, flat, read, written)
  elif not workers.stacked_gradients:
    found = one_device(*flat)
  else:
    for i, spec in enumerate(ins):
      if spec.stacked:
        flat[i] = reshard(workers, flat[i], read[i])
    mapped = jax.shard_map(
      one_device, mesh=workers.mesh, in_specs=tuple(read), out_specs=written
    )
    found = mapped(*flat)
  return out_treedef.unflatten(found)


def _named(workers: Workers, spec: P) -> NamedSharding:
  assert workers.mesh is not None
  return NamedSharding(workers.mesh, spec)


def _spec(workers: Workers, spec: Spec) -> P:
  lead = workers.spmd_axis_name
  return P(lead, *spec.inner) if spec.stacked else spec.inner


def _run_in_parts(
  workers: Workers,
  one_device: Callable[..., list[jax.Array]],
  flat: Sequence[jax.Array],
  in_specs: Sequence[P],
  out_specs: Sequence[P],
) -> list[jax.Array]:
  """Runs a function of one device for all devices of one worker.

  Messages for other workers pass from one `shard_map` to the next along an axis
  of the devices.
  """
  names = workers.param_specs.axes
  shard_map = functools.partial(
    jax.shard_map, mesh=workers.mesh, check_vma=False
  )
  mapped = shard_map(one_device, in_specs=tuple(in_specs), out_specs=out_specs)
  whole = jax.make_jaxpr(mapped)(*flat)
  (eqn,) = whole.jaxpr.eqns
  (body,) = core.jaxprs_in_params(eqn.params)
  values = dict(zip(whole.jaxpr.invars, flat))
  values |= zip(whole.jaxpr.constvars, whole.consts)
  # Specs of what passes between parts, and the axis of the devices, if any.
  layouts: dict[Any, tuple[P, int | None]] = {}
  for variable, spec in zip(body.invars, eqn.params['in_specs']):
    layouts[variable] = spec, None
  for inner in body.eqns:
    if inner.primitive is collectives.meet_p:
      rows, *flags = inner.outvars
      layouts[rows] = P(None, names), 1
      layouts |= dict.fromkeys(flags, (P(), None))

  def build(
    part: Callable[..., list[jax.Array]],
    read: list[Any],
    written: list[Any],
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
      out_specs=out_specs if is_last else [P(names)] * len(written),
    )

  parts = split.PartedStep(core.ClosedJaxpr(body, []), build=build)
  programs = collectives.Programs(workers.count)
  return parts.run(
    [values[variable] for variable in eqn.invars],
    lambda _, sent: [collectives.meet(x, programs) for x in sent or ()],
  )


def run_alone(
  workers: Workers,
  fun: Callable[..., tuple[Any, Any]],
  own: Any,
  state: Any,
  shared: Any,
) -> tuple[Any, Any]:
  """As `run`, without communication, of stacked arrays or those of one worker.

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
    spec = _spec(workers, workers.bucket_spec)
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
  fun: Callable[..., list[jax.Array]],
  flat: Sequence[jax.Array],
  ins: Sequence[Spec],
  outs: Sequence[Spec],
) -> list[jax.Array]:
  """Runs a function of one device under a `vmap` for each axis of devices.

  What is sharded gets an axis for each of them, before the axis of its blocks.
  """
  sizes = {workers.axis_name: workers.count}
  sizes |= workers.param_specs.axis_sizes
  names = list(sizes)

  def axis_of(name: str, spec: Spec) -> int | None:
    """Returns the axis of an array under the maps of all outer names."""
    axes: list[str | None] = [*names[: spec.stacked]]
    for dim in range(len(spec.inner)):
      axes += [*entry(spec.inner, dim), None]
    outer = names[: names.index(name)]
    axes = [axis for axis in axes if axis not in outer]
    return axes.index(name) if name in axes else None

  # Something has to be mapped over every axis.
  numbers = jnp.zeros([*sizes.values()], jnp.int32)

  def mapped(number: jax.Array, *own: jax.Array) -> list[jax.Array]:
    del number
    return fun(*own)

  for name in reversed(names):
    # out_axes=None holds because what was gathered is the same for all: merging
    # is done once, not once per worker.
    mapped = jax.vmap(
      mapped,
      in_axes=(0, *(axis_of(name, spec) for spec in ins)),
      out_axes=[axis_of(name, spec) for spec in outs],
      axis_name=name,
      axis_size=sizes[name],
    )
  found = mapped(numbers, *map(functools.partial(_to_blocks, sizes), flat, ins))
  return list(map(_from_blocks, found, outs))


def _to_blocks(sizes: Mapping[str, int], x: jax.Array, spec: Spec) -> jax.Array:
  """Cuts every sharded dimension to `[*devices, length of a block]`."""
  for dim in reversed(range(len(spec.inner))):
    at = spec.stacked + dim
    devices = [sizes[axis] for axis in entry(spec.inner, dim)]
    x = x.reshape(*x.shape[:at], *devices, -1, *x.shape[at + 1 :])
  return x


def _from_blocks(x: jax.Array, spec: Spec) -> jax.Array:
  """Undoes `_to_blocks`."""
  for dim in range(len(spec.inner)):
    at = spec.stacked + dim
    x = jax.lax.collapse(x, at, at + 1 + len(entry(spec.inner, dim)))
  return x
