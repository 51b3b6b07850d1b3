"""Collectives of one worker's function, by axis name.

The same code serves simulation (`jax.vmap`), meshes (`jax.shard_map`) and maps
of the caller's own: inside each of them, the axes have names.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import flatten_util
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.numerics import prng, rounding

# Names in a message.
GATHERED = 'gathered'
TO_OWNERS = 'to_owners'


@dataclasses.dataclass(frozen=True)
class Programs:
  """In the place of an axis: workers that are programs, joined by a relay.

  Some may be absent, or late: they have rows of zeros in what is gathered.
  """

  size: int


Axis = str | Programs


class Met(NamedTuple):
  """The messages of all workers that are programs."""

  rows: jax.Array  # [workers, *x.shape], zeros of those that are absent
  present: jax.Array  # bool [workers]
  included: jax.Array  # bool [], whether this worker is present


# Where a step of programs is cut, to exchange messages: see `remote.split`.
meet_p = core.Primitive('demo_optax_meet')
meet_p.multiple_results = True


@meet_p.def_abstract_eval
def _(x: Any, *, size: int, early: bool) -> list[Any]:
  return [
    jax.core.ShapedArray((size, *x.shape), x.dtype),
    jax.core.ShapedArray((size,), jnp.bool_),
    jax.core.ShapedArray((), jnp.bool_),
  ]


def meet(x: jax.Array, programs: Programs, early: bool = False) -> Met:
  """Returns `x` of all workers that are programs.

  What is `early` is there before the step, and is sent before all else.
  """
  return Met(*meet_p.bind(x, size=programs.size, early=early))


@dataclasses.dataclass(frozen=True)
class Group:
  """The workers, and the devices of a worker, as seen from inside."""

  axis: Axis  # name of the worker axis
  size: int  # number of workers
  # Names and sizes of the axes inside a worker, the first one outermost.
  inner: tuple[tuple[str, int], ...] = ()

  def send_and_receive(
    self, message: Mapping[str, jax.Array], early: bool = False
  ) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Sends words to all workers, or to each of them its own, and sums floats.

    By name: `GATHERED` is an array for all workers, `TO_OWNERS` has a row for
    each, `[workers, ...]`; all others are summed, by one collective for each
    dtype. Returns `[workers, ...]`, a row from each worker, or sums; and bool
    `[]`, whether the message reaches the others, if it may not. For `early` see
    `meet`.
    """
    found: dict[str, jax.Array] = {}
    if isinstance(self.axis, Programs):
      included = None
      for name, x in message.items():
        met = meet(x, self.axis, early)
        found[name] = met.rows
        if name != GATHERED:
          found[name] = jnp.sum(met.rows, axis=0)
        if included is None:
          included = met.included
      return found, included
    for name, x in message.items():
      if name == GATHERED:
        found[name] = gather(x, self.axis)
      elif name == TO_OWNERS:
        x = vary(x, self.axis)
        found[name] = jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)
      else:
        found[name] = jax.lax.psum(vary(x, self.axis), self.axis)
    return found, None

  def all_devices(self, ok: jax.Array) -> jax.Array:
    """Returns whether `ok` holds on all devices of this worker."""
    return self.over_devices(jax.lax.pmin, ok.astype(jnp.int32)) == 1

  def over_devices(
    self, reduce: Callable[..., jax.Array], x: jax.Array
  ) -> jax.Array:
    """Returns a sum or minimum over the devices of this worker."""
    names = tuple(name for name, _ in self.inner)
    return reduce(vary(x, *names), names) if names else x

  def device_index(self, axes: tuple[str, ...]) -> jax.Array | int:
    """Returns the number of this device along some axes inside its worker."""
    index: jax.Array | int = 0
    for name, size in self.inner:
      if name in axes:
        index = index * size + jax.lax.axis_index(name)
    return index

  def join_devices(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Concatenates `x` of the devices along some axes inside this worker.

    From `[rows, ...]` to `[devices * rows, ...]`, as `device_index` counts.
    """
    for name, _ in reversed(self.inner):
      if name in axes:
        x = jax.lax.collapse(gather(x, name), 0, 2)
    return x


def gather(x: jax.Array, axis: Axis) -> jax.Array:
  """Returns `x` of all along an axis, `[size, *x.shape]`, the same for all."""
  if isinstance(axis, Programs):
    return meet(x, axis).rows
  if varies(x, axis):  # typed as replicated, where that is tracked
    return jax.lax.all_gather(x, axis, to='invarying')
  if not any(jax.typeof(x).sharding.spec):
    return jax.lax.all_gather(x, axis)
  # Of a sharded type, which all_gather keeps for the axes before the new one.
  return jnp.moveaxis(jax.lax.all_gather(x, axis, axis=x.ndim), -1, 0)


# Larger arrays are summed by an all-reduce, whose order is its own.
ORDERED_BYTES = 1 << 16


def sums(xs: Sequence[jax.Array], axis: Axis) -> list[jax.Array]:
  """Returns the sums of arrays along an axis, those of halves in float32.

  Real arrays of up to `ORDERED_BYTES` are gathered, together, and added from
  left to right: the sums have the same bits in every map.
  """
  wide = [vary(x.astype(widened(x)), axis) for x in xs]
  found: dict[int, jax.Array] = {}
  together: dict[tuple[jnp.dtype, frozenset[Axis]], list[int]] = {}
  for i, x in enumerate(wide):
    if _is_ordered(x):
      like = x.dtype, jax.typeof(x).mat.varying
      together.setdefault(like, []).append(i)
  for numbers in together.values():
    flat, parts_of = flatten_util.ravel_pytree([wide[i] for i in numbers])
    added = in_order(gather(flat, axis))  # gathered: [workers, elements]
    found |= zip(numbers, parts_of(added))
  return [
    found[i].astype(x.dtype) if i in found else total(x, axis)
    for i, x in enumerate(xs)
  ]


def _is_ordered(x: jax.Array) -> bool:
  """Returns whether `sums` adds such arrays from left to right."""
  is_small = x.size * x.dtype.itemsize <= ORDERED_BYTES
  return is_small and bool(jnp.issubdtype(x.dtype, jnp.floating))


def total(x: jax.Array, axis: Axis) -> jax.Array:
  """Returns the sum over workers; see `sums`."""
  wide = vary(x.astype(widened(x)), axis)
  if _is_ordered(wide):
    added = in_order(gather(wide, axis))
  elif isinstance(axis, Programs) or _is_explicit(wide):
    # Programs have no all-reduce, and JAX none of types under vmap.
    added = jnp.sum(gather(wide, axis), axis=0)
  else:
    added = jax.lax.psum(wide, axis)
  return added.astype(x.dtype)


def mean_finite(
  x: jax.Array,
  axis: Axis,
  otherwise: jax.Array | None = None,
  ordered: bool = True,
) -> jax.Array:
  """Returns the mean over the workers that are there and have a finite `x`.

  `x` are real or complex numbers. Without such a worker it is `otherwise`, by
  default NaN. Small arrays are added in the order of the workers, if `ordered`.
  """
  wide = vary(x.astype(widened(x)), axis)
  if isinstance(axis, Programs):
    rows, present, _ = meet(wide, axis)
    added, count = _sum_of_finite(rows, present, ordered)
  elif _is_ordered(wide):
    rows = gather(wide, axis)
    present = jnp.ones(len(rows), bool)
    added, count = _sum_of_finite(rows, present, ordered)
  else:
    finite = jnp.isfinite(wide).all()
    added = total(jnp.where(finite, wide, jnp.zeros_like(wide)), axis)
    count = total(finite.astype(jnp.int32), axis)
  size = axis.size if isinstance(axis, Programs) else jax.lax.axis_size(axis)
  # By a product: XLA divides by a constant in some programs, and multiplies by
  # its reciprocal in others.
  inverse = rounding.exact_reciprocal(count, size, added.dtype)
  mean = (added * inverse).astype(x.dtype)
  if otherwise is None:
    otherwise = jnp.full_like(mean, jnp.nan)
  return jnp.where(count > 0, mean, otherwise)


def _sum_of_finite(
  rows: jax.Array, present: jax.Array, ordered: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the sum of the finite rows `[workers, ...]`, and their number."""
  rows = _together(rows)
  finite = jnp.isfinite(rows).all(tuple(range(1, rows.ndim))) & present
  each = finite.reshape(-1, *(1,) * (rows.ndim - 1))  # bool[workers, 1, ...]
  rows = jnp.where(each, rows, jnp.zeros_like(rows))
  if ordered and _is_ordered(rows[0]):
    return in_order(rows), jnp.sum(finite, dtype=jnp.int32)
  if rows.ndim > 1:
    return jnp.sum(rows, axis=0), jnp.sum(finite, dtype=jnp.int32)
  pairs = jnp.stack([rows, finite.astype(rows.dtype)])  # [2, workers]
  added, count = jnp.sum(pairs, axis=1)  # by one collective
  return added, count.astype(jnp.int32)


def first(x: jax.Array, axis: Axis) -> jax.Array:
  """Returns the first worker's array, such as a random key."""
  if not prng.is_key_array(x):
    return _together(everyones(x, axis))[0]
  data = first(jax.random.key_data(x), axis)
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def everyones(x: jax.Array, axis: Axis) -> jax.Array:
  """Returns `x` of all workers, `[workers, *x.shape]`, for any reduction.

  An absent worker has what the first one has that is present.
  """
  if not isinstance(axis, Programs):
    return gather(x, axis)
  rows, present, _ = meet(x, axis)
  some = rows[jnp.argmax(present)]
  return jnp.where(present.reshape(-1, *(1,) * x.ndim), rows, some)


def in_order(x: jax.Array) -> jax.Array:
  """Returns the sum over the first axis, from left to right."""
  x = _together(x)
  if len(x) <= 16:
    return functools.reduce(jnp.add, list(x))
  return jax.lax.fori_loop(1, len(x), lambda i, total: total + x[i], x[0])


def _together(x: jax.Array) -> jax.Array:
  """Gathers the first axis, which may be spread where types are Explicit.

  Even if its type looks replicated: under vmap it lacks the worker axis.
  """
  if not _is_explicit(x):
    return x
  mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
  return jax.sharding.reshard(x, NamedSharding(mesh, P(None, *spec[1:])))


def _is_explicit(x: jax.Array) -> bool:
  return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def widened(x: jax.Array) -> Any:
  """Returns the dtype that sums are computed in: float32 for halves."""
  is_half = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if is_half else x.dtype


def varies(x: jax.Array, axis: Axis) -> bool:
  """Returns whether `x` is known to vary over a mapped mesh axis."""
  return axis in jax.typeof(x).mat.varying  # of the "manual axis type"


def is_tracked(axis: Axis) -> bool:
  """Returns whether we are in a shard_map that tracks what varies."""
  try:
    return varies(jax.lax.axis_index(axis), axis)
  except NameError:  # not mapped, or of programs
    return False


def vary(x: jax.Array, *axes: Axis) -> jax.Array:
  """Marks an array as varying over axes, where that is tracked."""
  new = tuple(a for a in axes if is_tracked(a) and not varies(x, a))
  return jax.lax.pcast(x, new, to='varying') if new else x
