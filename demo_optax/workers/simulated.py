"""Workers on one device, for notebooks, laptops and tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax.workers.base import Spec, is_spec
from demo_optax.workers.param_specs import ParamSpecs, entry, names_of
from demo_optax.workers.stacked import Stacked


class Simulated(Stacked):
  """Workers on one device."""

  axis_name = 'workers'

  def __init__(self, num_workers: int, param_specs: ParamSpecs):
    self._count, self._param_specs = num_workers, param_specs

  def __repr__(self) -> str:
    return f'Workers.simulated({self._count}{self._param_specs})'

  @property
  def param_specs(self) -> ParamSpecs:
    return self._param_specs

  @property
  def count(self) -> int:
    return self._count

  def stack(self, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (self.count, *jnp.shape(x)))

  def run(
      self,
      fun: Callable[..., Any],
      args: tuple[Any, ...],
      in_specs: tuple[Any, ...],
      out_specs: Any,
  ) -> Any:
    flat, treedef = jax.tree.flatten(args)
    ins = jax.tree.leaves(in_specs, is_leaf=is_spec)
    outs, out_treedef = jax.tree.flatten(out_specs, is_leaf=is_spec)

    def mapped(_: Any, *flat: Any) -> list[Any]:
      return out_treedef.flatten_up_to(fun(*treedef.unflatten(flat)))

    # One map for each axis inside a worker, the outermost axis last.
    for a, size in reversed(self._param_specs.axis_sizes):
      mapped = jax.vmap(
          mapped,
          in_axes=(0, *(0 if a in names_of(s.inner) else None for s in ins)),
          out_axes=[0 if a in names_of(s.inner) else None for s in outs],
          axis_name=a,
          axis_size=size,
      )
    # out_axes=None holds because what was gathered is the same for all: merging
    # is done once, not once per worker.
    mapped = jax.vmap(
        mapped,
        in_axes=(0, *(0 if s.stacked else None for s in ins)),
        out_axes=[0 if s.stacked else None for s in outs],
        axis_name=self.axis_name,
        axis_size=self.count,
    )
    # Something has to be mapped over every axis.
    sizes = [self.count, *(n for _, n in self._param_specs.axis_sizes)]
    numbers = jnp.zeros(sizes, jnp.int32)
    found = mapped(numbers, *(self._split(x, s) for x, s in zip(flat, ins)))
    return out_treedef.unflatten(
        [self._join(x, s) for x, s in zip(found, outs)]
    )

  def _axes(self, spec: Spec) -> tuple[list[list[str]], list[str]]:
    """Returns the axes of each dimension, and all of them, outermost first."""
    used = [a for a in self._param_specs.axes if a in names_of(spec.inner)]
    return [list(entry(spec.inner, d)) for d in range(len(spec.inner))], used

  def _split(self, x: jax.Array, spec: Spec) -> jax.Array:
    """Moves the shards of an array `[*worker, ...]` to axes behind the worker.

    Returns:
      `[*worker, *axes, ...]`, with one axis for each mesh axis it is sharded
      over.
    """
    dims, used = self._axes(spec)
    if not used:
      return x
    sizes = dict(self._param_specs.axis_sizes)
    lead = 1 if spec.stacked else 0
    shape, place = list(x.shape[:lead]), {}
    rest = []
    for d, size in enumerate(x.shape[lead:]):
      for axis in dims[d] if d < len(dims) else []:
        place[axis] = len(shape)
        shape.append(sizes[axis])
        size //= sizes[axis]
      rest.append(len(shape))
      shape.append(size)
    order = [*range(lead), *(place[a] for a in used), *rest]
    return x.reshape(shape).transpose(order)

  def _join(self, x: jax.Array, spec: Spec) -> jax.Array:
    """Undoes `_split`."""
    dims, used = self._axes(spec)
    if not used:
      return x
    lead = 1 if spec.stacked else 0
    first = lead + len(used)
    order, shape = list(range(lead)), list(x.shape[:lead])
    for d, size in enumerate(x.shape[first:]):
      for axis in dims[d] if d < len(dims) else []:
        order.append(lead + used.index(axis))
        size *= x.shape[lead + used.index(axis)]
      order.append(first + d)
      shape.append(size)
    return x.transpose(order).reshape(shape)
