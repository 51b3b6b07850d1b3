"""What simulated workers and those on a mesh share: stacked gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax.workers.base import Spec, Workers
from demo_optax.workers.collectives import mean_stacked, sums


class Stacked(Workers):
  """Gradients carry the worker axis in front."""

  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    mapped = jax.vmap(
        fun,
        in_axes=(0, 0, 0, None),
        out_axes=(0, 0, None),
        spmd_axis_name=self.spmd_axis_name,
    )
    index = self.place(jnp.arange(self.count, dtype=jnp.int32))
    return mapped(index, own, state, shared)

  def split(self, x: jax.Array) -> jax.Array:
    return x.reshape(self.count, x.shape[0] // self.count, *x.shape[1:])

  def join(self, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

  def mean(self, x: jax.Array) -> jax.Array:
    return mean_stacked(x) if self.mesh is None else jnp.mean(x, axis=0)

  def sum_present(
      self, x: jax.Array, present: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    if not self.param_specs.axes:

      def one_worker(x: jax.Array, present: jax.Array) -> list[jax.Array]:
        own = jnp.where(present, x, jnp.zeros_like(x))
        return sums([own, present.astype(jnp.int32)], self.axis_name)

      total, count = self.run(
          one_worker, (x, present), (Spec(True),) * 2, [Spec(False)] * 2
      )
      return total, count
    mask = present.reshape(self.count, *(1,) * (x.ndim - 1))
    total = jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)), axis=0)
    return total, jnp.sum(present, dtype=jnp.int32)

  def all_finite(self, xs: Sequence[jax.Array]) -> jax.Array:
    everyone = jnp.ones((self.count,), bool)
    finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in xs]
    return functools.reduce(jnp.logical_and, finite, self.place(everyone))

  def place(self, x: jax.Array) -> jax.Array:
    """Puts each worker's part of a stacked array where the worker is."""
    return x
