"""Collectives in one worker's function, by axis name.

The same code serves simulation (`jax.vmap`), meshes (`jax.shard_map`) and the
caller's own maps: inside each, the axes have names.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, flatten_util, lax
from jax.extend import core
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

  rows: Array  # [workers, *x.shape], zeros of those that are absent
  present: Array  # bool [workers]
  included: Array  # bool [], whether this worker is present


# Where a step of programs is cut, to exchange messages: see `remote.split`.
meet_p = core.Primitive('demo_optax_meet')
meet_p.multiple_results = True


@meet_p.def_abstract_eval
def _(
  x: Any,
  *,
  size: int,
) -> list[Any]:
  # The fields of `Met`.
  return [
    jax.core.ShapedArray((size, *x.shape), x.dtype),
    jax.core.ShapedArray((size,), jnp.bool_),
    jax.core.ShapedArray((), jnp.bool_),
  ]


def meet(x: Array, programs: Programs) -> Met:
  """Returns `x` of all workers that are programs."""
  return Met(*meet_p.bind(x, size=programs.size))


@dataclasses.dataclass(frozen=True)
class Group:
  """The workers, and one worker's devices, as seen from inside."""

  axis: Axis  # name of the worker axis
  size: int  # number of workers
  # Names of the axes inside a worker that have several devices. Over one device
  # a collective would be one more for nothing.
  inner: tuple[str, ...] = ()

  def send_and_receive(
    self, message: Mapping[str, Array]
  ) -> tuple[dict[str, Array], Array | None]:
    """Sends words to all workers, or to each of them its own, and sums floats.

    By name: `GATHERED` is an array for all workers, `TO_OWNERS` has a row for
    each, `[workers, ...]`; all others are summed, by one collective for each
    dtype. Returns `[workers, ...]`, a row from each worker, or sums; and bool
    `[]`, whether the message reaches the others, if it may not.
    """
    received = {}
    included = None
    for name, array in message.items():
      if isinstance(self.axis, Programs):
        rows, _, included = meet(array, self.axis)
        received[name] = rows
        if name != GATHERED:
          received[name] = jnp.sum(rows, axis=0)
      elif name == GATHERED:
        received[name] = gather(array, self.axis)
      elif name == TO_OWNERS:
        array = vary(array, self.axis)
        received[name] = lax.all_to_all(array, self.axis, 0, 0, tiled=True)
      else:
        received[name] = lax.psum(vary(array, self.axis), self.axis)
    return received, included

  def all_devices(self, ok: Array) -> Array:
    """Returns whether `ok` holds on all devices in this worker."""
    least = self.over_devices(lax.pmin, ok.astype(jnp.int32))
    return least == 1

  def over_devices(self, reduce: Callable[..., Array], array: Array) -> Array:
    """Returns a sum or minimum over the devices in this worker."""
    if not self.inner:
      return array
    return reduce(vary(array, *self.inner), self.inner)


def join_devices(
  array: Array,
  axes: tuple[str, ...],
) -> Array:
  """Concatenates what devices have along some axes inside a worker.

  From `[rows, ...]` to `[devices * rows, ...]`, as `jax.lax.axis_index(axes)`
  counts the devices.
  """
  for axis_name in reversed(axes):
    of_devices = gather(array, axis_name)  # [devices, rows, ...]
    array = lax.collapse(of_devices, 0, 2)
  return array


def gather(
  x: Array,
  axis: Axis,
) -> Array:
  """Gathers `x` along an axis: `[size, *x.shape]`, the same everywhere."""
  if isinstance(axis, Programs):
    return meet(x, axis).rows
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.explicit_axes:
    gather_auto = functools.partial(gather, axis=axis)
    return without_types(gather_auto, x, num_new_axes=1)
  if varies(x, axis):  # typed as replicated, where that is tracked
    return lax.all_gather(x, axis, to='invarying')
  rows = lax.all_gather(x, axis)
  if mesh.auto_axes:
    # Under vmap rows may be spread over the mesh. They move in one collective,
    # and not in one for each row that is read.
    whole = P(None, *[P.UNCONSTRAINED] * x.ndim)
    rows = lax.with_sharding_constraint(rows, whole)
  return rows


# Larger arrays are summed by an all-reduce, whose order is its own.
ORDERED_BYTES = 1 << 16


def sums(
  xs: Sequence[Array],
  axis: Axis,
) -> list[Array]:
  """Sums each array along an axis, halves in float32.

  Real arrays up to `ORDERED_BYTES` are gathered, together, and added from left
  to right: the sums have the same bits in every map. Programs, which have no
  all-reduce, add all arrays so.
  """
  summed = {}
  together: dict[object, dict[int, Array]] = {}  # by type
  for number, array in enumerate(xs):
    wide = _widened(array, axis)
    is_small = wide.size * wide.dtype.itemsize <= ORDERED_BYTES
    is_real = jnp.issubdtype(wide.dtype, jnp.floating)
    if isinstance(axis, Programs) or (is_small and is_real):
      array_type = wide.dtype, jax.typeof(wide).mat.varying
      together.setdefault(array_type, {})[number] = wide
    else:
      summed[number] = lax.psum(wide, axis)
  for arrays in together.values():
    joined, parts_of = flatten_util.ravel_pytree(arrays)
    rows = gather(joined, axis)  # [workers, elements]
    total_row = _in_order(rows)
    summed |= parts_of(total_row)
  return [summed[number].astype(array.dtype) for number, array in enumerate(xs)]


def _in_order(rows: Array) -> Array:
  """Returns the sum over the first axis, from left to right."""
  # A program without a loop for few workers, of one size for many.
  if len(rows) <= 16:
    return functools.reduce(jnp.add, list(rows))

  def add(
    row: Array,
    added: Array,
  ) -> Array:
    return added + rows[row]

  return lax.fori_loop(1, len(rows), add, rows[0])


def total(
  x: Array,
  axis: Axis,
) -> Array:
  """Returns the sum over workers; see `sums`."""
  return without_types(lambda x: sums([x], axis)[0], x)


def mean_finite(
  x: Array,
  axis: Axis,
  otherwise: Array | None = None,
) -> Array:
  """Returns the mean over the workers that are there and have a finite `x`.

  `x` are real or complex numbers. Without such a worker it is `otherwise`, by
  default NaN. Scalars whose workers share a mesh with axes inside of them are
  added by all-reduces, which XLA joins: their order is its own.
  """

  def mean_of(x: Array) -> Array:
    wide = _widened(x, axis)
    is_finite = jnp.isfinite(wide).all()
    wide = jnp.where(is_finite, wide, jnp.zeros_like(wide))
    # An absent worker has zeros in both.
    real = jnp.finfo(wide.dtype).dtype
    parts = [wide, is_finite.astype(real)]
    is_spread = jax.sharding.get_abstract_mesh().auto_axes
    is_scalar = not x.ndim and otherwise is None
    if is_spread and is_scalar and not isinstance(axis, Programs):
      added, number = lax.psum(parts, axis)
    else:
      added, number = sums(parts, axis)
    inverse = rounding.share(1, number, number.dtype)
    mean = added * inverse.astype(added.dtype)
    mean = mean.astype(x.dtype)
    return jnp.where(number > 0, mean, jnp.full_like(mean, jnp.nan))

  mean = without_types(mean_of, x)
  if otherwise is None:
    return mean
  # Statistics keep a number whose mean is not finite.
  return jnp.where(jnp.isfinite(mean), mean, otherwise)


def first(x: Array, axis: Axis) -> Array:
  """Returns the first worker's array, such as a random key."""
  rows = everyones(prng.words(x), axis)
  return prng.of_words(rows[0], like=x)


def everyones(
  x: Array,
  axis: Axis,
) -> Array:
  """Returns all workers' `x`, `[workers, *x.shape]`, for any reduction.

  An absent worker has what the first one has that is present.
  """
  if not isinstance(axis, Programs):
    return gather(x, axis)
  rows, present, _ = meet(x, axis)
  # Zeros would count in a minimum or a product.
  of_first = rows[jnp.argmax(present)]
  ones = [1] * x.ndim
  present = present.reshape(-1, *ones)  # as rows
  return jnp.where(present, rows, of_first)


def without_types(
  fun: Callable[[Any], Any],
  arrays: Any,
  num_new_axes: int = 0,
) -> Any:
  """Returns `fun(arrays)`, a tree like it; it may add axes in front.

  On an Explicit mesh it runs where no type says how arrays are sharded: JAX has
  no collectives with such types under `vmap`.
  """
  explicit = jax.sharding.get_abstract_mesh().explicit_axes
  if not explicit:
    return fun(arrays)

  def spec_of(x: Array) -> P:  # inside a worker it stays sharded as it is
    new_axes = [None] * num_new_axes
    return P(*new_axes, *jax.typeof(x).sharding.spec)

  specs = jax.tree.map(spec_of, arrays)
  untyped = jax.sharding.auto_axes(fun, axes=explicit, out_sharding=specs)
  return untyped(arrays)


def _widened(
  x: Array,
  axis: Axis,
) -> Array:
  """Returns `x` as sums take it: halves in float32, varying over an axis."""
  is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
  if is_inexact and x.dtype.itemsize < 4:
    x = x.astype(jnp.float32)
  return vary(x, axis)


def varies(x: Array, axis: Axis) -> bool:
  """Returns whether `x` is known to vary over a mapped mesh axis."""
  return axis in jax.typeof(x).mat.varying  # of the "manual axis type"


def is_tracked(axis: Axis) -> bool:
  """Returns whether we are in a shard_map that tracks what varies."""
  try:
    return varies(lax.axis_index(axis), axis)
  except NameError:  # not mapped, or of programs
    return False


def vary(x: Array, *axes: Axis) -> Array:
  """Marks an array as varying over axes, where that is tracked."""
  for axis in axes:
    if is_tracked(axis) and not varies(x, axis):
      x = lax.pcast(x, axis, to='varying')
  return x
