"""How one worker's function runs for all workers.

By `vmap` (simulated), by `shard_map` (on a mesh), or right where it is, in the
caller's own map: the same function, with the same bits.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.numerics import rounding
from demo_optax.workers import collectives, split
from demo_optax.workers.collectives import vary, widened
from demo_optax.workers.param_specs import ParamSharding, entry, names_of
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
  axis. What it returns for specs that are not `stacked` must be equal on all
  workers, as what `Workers.group` returns is. Specs are trees of `Spec`.
  """
  _ = workers.count  # an error where the axis is not mapped
  flat, treedef = jax.tree.flatten(args)
  ins = jax.tree.leaves(in_specs)
  outs, out_treedef = jax.tree.flatten(out_specs)

  def one_worker(*own: Any) -> list[Any]:
    return out_treedef.flatten_up_to(fun(*treedef.unflatten(own)))

  def one_device(*flat: Any) -> list[Any]:
    found = one_worker(*(x[0] if s.stacked else x for x, s in zip(flat, ins)))
    return [x[None] if s.stacked else x for x, s in zip(found, outs)]

  if workers.kind == 'simulated':
    found = _simulate(workers, one_worker, flat, ins, outs)
  elif workers.relay is not None and any(
      any(names_of(s.inner)) for s in (*ins, *outs)
  ):
    found = _run_in_parts(workers, one_device, flat, ins, outs)
  elif not workers.stacked_gradients:
    found = one_device(*flat)
  else:
    own, out = (
        [_spec(workers, s) for s in side] for side in (ins, outs)
    )
    found = jax.shard_map(
        one_device, mesh=workers.mesh, in_specs=tuple(own), out_specs=out
    )(*(
        reshard(workers, x, p) if s.stacked else x
        for x, s, p in zip(flat, ins, own)
    ))
  return out_treedef.unflatten(found)


def _spec(workers: Workers, spec: Spec) -> P:
  lead = workers.spmd_axis_name
  return P(lead, *spec.inner) if spec.stacked else spec.inner


def _run_in_parts(
    workers: Workers,
    one_device: Callable[..., list[Any]],
    flat: Sequence[Any],
    ins: Sequence[Spec],
    outs: Sequence[Spec],
) -> list[Any]:
  """Runs a function of one device for all devices of one worker.

  What it exchanges with other workers passes from one `shard_map` to the next
  along an axis of the devices.
  """
  mesh, names = workers.mesh, workers.param_specs.axes
  assert mesh is not None
  own, out = ([_spec(workers, s) for s in side] for side in (ins, outs))
  whole = jax.make_jaxpr(jax.shard_map(
      one_device, mesh=mesh, in_specs=tuple(own), out_specs=out, check_vma=False
  ))(*flat)
  (eqn,) = whole.jaxpr.eqns
  (body,) = core.jaxprs_in_params(eqn.params)
  given = [*whole.jaxpr.invars, *whole.jaxpr.constvars]
  numbers = [given.index(v) for v in eqn.invars]
  values = [*flat, *whole.consts]
  specs = [*own, *(P() for _ in whole.consts)]
  known = {v: specs[n] for v, n in zip(body.invars, numbers)}
  met = {  # by the field of `Met` that a variable is
      v: field for e in body.eqns if e.primitive is collectives.meet_p
      for field, v in enumerate(e.outvars)
  }

  def build(
      part: Callable[..., Any], read: list[Any], written: list[Any],
      is_last: bool,
  ) -> Callable[..., Any]:

    def on_device(*args: Any) -> list[Any]:
      args = tuple(
          x if v in known or met.get(v) else jnp.squeeze(x, met.get(v, -1) + 1)
          for v, x in zip(read, args)
      )
      found = part(*args)
      return found if is_last else [x[None] for x in found]

    def spec_of(v: Any) -> P:
      if v in known:
        return known[v]
      return {None: P(names), 0: P(None, names)}.get(met.get(v), P())

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(map(spec_of, read)),
        out_specs=out if is_last else [P(names)] * len(written),
        check_vma=False,
    )

  def exchange(types: list[Any], sent: list[Any] | None) -> list[Any]:
    assert sent is not None
    programs = collectives.Programs(workers.count)
    return [collectives.meet(x, programs) for x in sent]

  plan = split.Plan(core.ClosedJaxpr(body, []), build=build)
  return plan.run([values[n] for n in numbers], exchange)


def run_alone(
    workers: Workers,
    fun: Callable[..., tuple[Any, Any]],
    own: Any,
    state: Any,
    shared: Any,
) -> tuple[Any, Any]:
  """As `run`, without communication, of stacked arrays or those of one worker.

  `fun(index, own, state, shared) -> (own, state)` sees all without the worker
  axis; `index` is the worker's number, int32 `[]`. `own` is laid out as
  gradients are: stacked, or local with `on_axis`. `state` is stacked.
  """
  if not workers.stacked_gradients:
    axis = workers.axis
    _ = workers.count  # an error where the axis is not mapped

    # What is shared must vary before it is differentiated: jax.grad with
    # respect to replicated parameters would sum the workers' gradients.
    def vary_floats(x: Any) -> Any:
      inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
      return vary(x, axis) if inexact else x

    own, state = fun(
        workers.index,
        own,
        jax.tree.map(lambda x: x[0], state),
        jax.tree.map(vary_floats, shared),
    )
    return own, jax.tree.map(lambda x: x[None], state)
  mapped = jax.vmap(
      fun, in_axes=(0, 0, 0, None), spmd_axis_name=workers.spmd_axis_name
  )
  index = place(workers, jnp.arange(workers.count, dtype=jnp.int32))
  with context(workers):
    return mapped(index, own, state, shared)


def context(workers: Workers) -> contextlib.AbstractContextManager[Any]:
  """Returns the context of one worker's model: layers may look for the mesh."""
  if workers.mesh is None:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(workers.mesh.abstract_mesh)


# Arrays of all workers --------------------------------------------------------


def stack(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns a copy of `x` for every worker, with a leading worker axis."""
  if not workers.stacked_gradients:
    # Varying from the start, or a scan over steps would see its type change.
    own: jax.Array = vary(jnp.asarray(x)[None], workers.axis)
    return own

  def copies(x: jax.Array) -> jax.Array:
    return place(workers, jnp.broadcast_to(x, (workers.count, *jnp.shape(x))))

  if workers.mesh is None:
    return copies(x)
  if not isinstance(x, jax.core.Tracer):
    x = workers.device_put(x)
  return jax.jit(copies)(x)


def bucket_zeros(
    workers: Workers, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
  """Returns zeros of `Workers.bucket_shape(shape)`, allocated sharded."""
  if not workers.stacked_gradients and workers.mesh is None:
    return stack(workers, jnp.zeros(shape, dtype))
  shape = workers.bucket_shape(shape)
  if workers.mesh is not None:
    # jnp.zeros(device=sharding) would do under no jit only: inside one it lands
    # on a single device, all workers' momentum together.
    spec = _spec(workers, workers.bucket_spec)
    return _zeros_on_mesh(NamedSharding(workers.mesh, spec), shape, dtype)()
  return jnp.zeros(shape, dtype)


@functools.cache
def _zeros_on_mesh(
    sharding: NamedSharding, shape: tuple[int, ...], dtype: jnp.dtype
) -> Callable[[], jax.Array]:
  """Compiled once for all leaves of a shape."""
  local = sharding.shard_shape(shape)
  return jax.jit(jax.shard_map(
      lambda: jnp.zeros(local, dtype),
      mesh=sharding.mesh,
      in_specs=(),
      out_specs=sharding.spec,
  ))


def place(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns `x [count, ...]`, each worker's part where the worker is."""
  if workers.mesh is None:
    return x
  if workers.is_explicit:
    old = jax.typeof(x).sharding.spec
    return reshard(workers, x, P(workers.axis_name, *old[1:]))
  free = [P.UNCONSTRAINED] * (x.ndim - 1)
  sharding = NamedSharding(workers.mesh, P(workers.axis_name, *free))
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
  x = jnp.pad(x, [(0, -len(x) % devices), *[(0, 0)] * (x.ndim - 1)])
  # Of the mesh in the context, whose axes `auto_axes` makes Auto.
  return jax.lax.with_sharding_constraint(x, P(workers.param_specs.axes))


def split_rows(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns a batch `[count * b, ...]` as rows `[count, b, ...]`."""
  shape = (workers.count, x.shape[0] // workers.count, *x.shape[1:])
  if not workers.is_explicit:
    return place(workers, x.reshape(shape))
  # A batch may be spread over the devices of a worker as well, and stays so.
  first, *rest = jax.typeof(x).sharding.spec
  first = first if isinstance(first, tuple) else (first,)
  inner = first[1:] if first[0] == workers.axis_name else ()
  x = reshard(workers, x, P((workers.axis_name, *inner), *rest))
  return _reshape(workers, x, shape, P(workers.axis_name, inner or None, *rest))


def join_rows(workers: Workers, x: jax.Array) -> jax.Array:
  """Returns rows `[count, b, ...]` as a batch: undoes `split_rows`."""
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


def reshard(workers: Workers, x: jax.Array, spec: P) -> jax.Array:
  """Reshards `x` on Explicit axes; on Auto axes `shard_map` does it."""
  if workers.mesh is None or not workers.is_explicit:
    return x
  return jax.sharding.reshard(x, NamedSharding(workers.mesh, spec))


def as_given(
    workers: Workers, x: jax.Array, placed: ParamSharding
) -> jax.Array:
  """Returns an update whose type is that of its parameter."""
  return x if placed.given == placed.spec else reshard(workers, x, placed.given)


# Reductions over the workers --------------------------------------------------


def mean_finite(
    workers: Workers, x: jax.Array, otherwise: jax.Array
) -> jax.Array:
  """Returns the mean over the workers whose `x` is finite, if any is.

  `x` is laid out as gradients are.
  """
  axis, lead = workers.own_axis, int(workers.stacked_gradients)
  finite = jnp.isfinite(x).all(axis=tuple(range(lead, x.ndim)), keepdims=True)
  wide = x.astype(widened(x))
  total = collectives.total(jnp.where(finite, wide, jnp.zeros_like(wide)), axis)
  count = collectives.total(finite.astype(jnp.int32), axis)
  # By a product: some programs make one of the division.
  inverse = rounding.exact_reciprocal(count, workers.count, total.dtype)
  return jnp.where(count > 0, (total * inverse).astype(x.dtype), otherwise)


# Simulated workers ------------------------------------------------------------


def _simulate(
    workers: Workers,
    fun: Callable[..., list[Any]],
    flat: Sequence[Any],
    ins: Sequence[Spec],
    outs: Sequence[Spec],
) -> list[Any]:
  """Runs a function of one device under a `vmap` for each axis of devices.

  What is sharded gets an axis for each of them, before the axis of its blocks.
  """
  sizes = {workers.axis_name: workers.count}
  sizes |= workers.param_specs.axis_sizes
  names = list(sizes)

  def place(spec: Spec, name: str) -> int | None:
    outer = names[: names.index(name)]
    cut = [entry(spec.inner, d) for d in range(len(spec.inner))]
    axes = names[: spec.stacked] + [a for axes in cut for a in (*axes, None)]
    left = [a for a in axes if a not in outer]
    return left.index(name) if name in left else None

  mapped: Any = lambda _, *own: fun(*own)  # noqa: E731
  for name in reversed(names):
    # out_axes=None holds because what was gathered is the same for all: merging
    # is done once, not once per worker.
    mapped = jax.vmap(
        mapped,
        in_axes=(0, *(place(s, name) for s in ins)),
        out_axes=[place(s, name) for s in outs],
        axis_name=name,
        axis_size=sizes[name],
    )
  # Something has to be mapped over every axis.
  numbers = jnp.zeros([*sizes.values()], jnp.int32)
  found = mapped(numbers, *(
      _cut(sizes, x, s) if any(names_of(s.inner)) else x
      for x, s in zip(flat, ins)
  ))
  return [
      _join(x, s) if any(names_of(s.inner)) else x for x, s in zip(found, outs)
  ]


def _cut(sizes: Mapping[str, int], x: jax.Array, spec: Spec) -> jax.Array:
  shape = [*x.shape[: spec.stacked]]
  for d, length in enumerate(x.shape[spec.stacked :]):
    counts = [sizes[name] for name in entry(spec.inner, d)]
    shape += [*counts, length // math.prod(counts)]
  return x.reshape(shape)


def _join(x: jax.Array, spec: Spec) -> jax.Array:
  shape, rest = [*x.shape[: spec.stacked]], [*x.shape[spec.stacked :]]
  dims = itertools.count()
  while rest:
    number = 1 + len(entry(spec.inner, next(dims)))
    shape.append(math.prod(rest[:number]))
    del rest[:number]
  return x.reshape(shape)
