"""Workers of an axis that the caller has mapped."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax.workers.base import Workers, is_spec
from demo_optax.workers.collectives import is_tracked, mean, sums, varies, vary


class OnAxis(Workers):
  """Workers of an axis that the caller has mapped."""

  def __init__(self, axis_name: str):
    self.axis_name = axis_name

  def __repr__(self) -> str:
    return f'Workers.on_axis({self.axis_name!r})'

  @property
  def count(self) -> int:
    try:
      return jax.lax.axis_size(self.axis_name)
    except NameError as error:
      raise ValueError(
          f'The axis {self.axis_name!r} is not mapped here. With'
          ' Workers.on_axis, call this inside jax.shard_map, jax.vmap or'
          ' jax.pmap over that axis; for plain jit, use Workers.on_mesh.'
      ) from error

  @property
  def stacked_size(self) -> int:
    return 1

  @property
  def stacked_gradients(self) -> bool:
    return False

  def bucket_zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return self.stack(jnp.zeros(shape, dtype))

  def stack(self, x: jax.Array) -> jax.Array:
    # Varying from the start, or a scan over steps would see its type change.
    return self.vary(jnp.asarray(x)[None])

  def run(
      self,
      fun: Callable[..., Any],
      args: tuple[Any, ...],
      in_specs: tuple[Any, ...],
      out_specs: Any,
  ) -> Any:
    _ = self.count  # an error where the axis is not mapped
    flat, treedef = jax.tree.flatten(args)
    ins = jax.tree.leaves(in_specs, is_leaf=is_spec)
    outs, out_treedef = jax.tree.flatten(out_specs, is_leaf=is_spec)
    own = [x[0] if s.stacked else x for x, s in zip(flat, ins)]
    found = out_treedef.flatten_up_to(fun(*treedef.unflatten(own)))
    return out_treedef.unflatten(
        [x[None] if s.stacked else x for x, s in zip(found, outs)]
    )

  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    # What is shared must vary before it is differentiated: jax.grad with
    # respect to replicated parameters would sum the workers' gradients.
    _ = self.count  # an error where the axis is not mapped
    shared = jax.tree.map(self._vary_floats, shared)
    index = jax.lax.axis_index(self.axis_name)
    state = jax.tree.map(lambda x: x[0], state)
    own, state, equal = fun(index, own, state, shared)
    return own, jax.tree.map(lambda x: x[None], state), equal

  def mean(self, x: jax.Array) -> jax.Array:
    return mean(self.vary(x), self.axis_name)

  def sum_present(
      self, x: jax.Array, present: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    _ = self.count  # an error where the axis is not mapped
    x, present = self.vary(x), self.vary(present)
    own = jnp.where(present, x, jnp.zeros_like(x))
    total, count = sums([own, present.astype(jnp.int32)], self.axis_name)
    return total, count

  def all_finite(self, xs: Sequence[jax.Array]) -> jax.Array:
    finite = [jnp.isfinite(x).all() for x in xs]
    return functools.reduce(jnp.logical_and, finite, jnp.ones((), bool))

  def check_gradient(self, name: str, gradient: jax.Array) -> None:
    if self.checked and not varies(gradient, self.axis_name):
      raise ValueError(
          f'The gradient of {name} is the same on all workers of axis'
          f' {self.axis_name!r}: it was summed or averaged over them before it'
          ' reached the exchange. Inside shard_map, jax.grad with respect to'
          ' replicated parameters does that. Make the parameters varying first:'
          f" jax.lax.pcast(params, {self.axis_name!r}, to='varying')."
      )

  @property
  def checked(self) -> bool:
    """Whether we are inside a shard_map that tracks what varies."""
    return is_tracked(self.axis_name)

  def _vary_floats(self, x: jax.Array) -> jax.Array:
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return self.vary(x) if inexact else x

  def vary(self, x: jax.Array) -> jax.Array:
    """Returns `x`, marked as varying over the workers where that is tracked."""
    marked: jax.Array = vary(x, self.axis_name)
    return marked
