"""Checks how gradients, parameters and weights are laid out."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from demo_optax._paths import Keys, dotted
from demo_optax._tree import Tree, is_exchanged, params_of, with_params
from demo_optax.workers import inside
from demo_optax.workers.collectives import is_tracked, varies
from demo_optax.workers.param_specs import keep, names_of
from demo_optax.workers.variation import traced_step
from demo_optax.workers.workers import Workers


def params_and_like(
  updates: chex.ArrayTree,
  params: chex.ArrayTree | None,
  workers: Workers,
) -> tuple[Any, Any]:
  """Returns the parameters with gradients, and what has their shapes.

  Without parameters these are the gradients' shapes.
  """
  if params is not None:
    params = params_of(updates, params)
    return params, params
  lead = int(workers.stacked_gradients and not inside.is_in_step())

  def of_worker(gradient: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(gradient)[lead:], gradient.dtype)

  return None, jax.tree.map(of_worker, updates)


def check_gradients(
  updates: Tree,
  params: chex.ArrayTree | None,
  workers: Workers,
) -> Tree:
  """Returns gradients; raises unless they are laid out for the workers."""
  seen = traced_step.get() or workers
  for keys, gradient, param in with_params(updates, params):
    check_gradient(dotted(keys), gradient, param, seen)
  if inside.is_in_step():
    return inside.check_own_gradients(updates)
  return updates


def check_gradient(
  name: str,
  gradient: jax.Array,
  param: jax.Array | None,
  workers: Workers,
) -> None:
  """Raises unless `gradient` is laid out as `workers` has it."""
  given = np.shape(gradient)
  # Stacked gradients have a leading worker axis.
  worker_axes: tuple[int, ...] = ()
  if workers.stacked_gradients:
    worker_axes = (workers.count,)
  shape = given[len(worker_axes) :]
  if param is not None:
    shape = np.shape(param)
  expected = (*worker_axes, *shape)
  if given != expected:
    remedy = "Give the worker's own gradient, unstacked."
    if worker_axes:
      # As jax.jit has it: one gradient for all workers' batches.
      remedy = (
        'Decorate the training step with demo_optax.data_parallel(workers),'
        " and it takes one worker's gradient. An averaged gradient has nothing"
        ' left to compress.'
      )
    raise ValueError(
      f'The gradient of {name} must have shape {expected} for {workers}, got'
      f' {given}. {remedy}'
    )
  if worker_axes or not is_exchanged(gradient):
    return
  # Known where the caller's shard_map tracks it (check_vma).
  axis = workers.axis_name
  if is_tracked(axis) and not varies(gradient, axis):
    raise ValueError(
      f"The gradient of {name} must be one worker's, got the same on all"
      f' workers of axis {axis!r}: it was summed or averaged over them before'
      ' it reached the exchange. Inside shard_map, jax.grad with respect to'
      ' replicated parameters does that. Make the parameters varying first:'
      f" jax.lax.pcast(params, {axis!r}, to='varying')."
    )


def checked_weight(
  weight: chex.Numeric,
  workers: Workers,
) -> jax.Array:
  """Returns weights as float32; raises unless there is one for each worker."""
  # Numbers of tokens are integers, and may be Python's.
  weight = jnp.asarray(weight, jnp.float32)
  is_stacked = workers.stacked_gradients and not inside.is_in_step()
  shape = (workers.count,) if is_stacked else ()
  if weight.shape != shape:
    raise ValueError(
      f'weight must have shape {shape} here for {workers}, got {weight.shape}.'
      ' Give one number for each worker beside stacked gradients, and the'
      " worker's own, such as its number of tokens, where gradients are one"
      " worker's."
    )
  return weight


def check_sharding(
  keys: Keys,
  param: jax.Array,
  workers: Workers,
) -> None:
  """Raises if a parameter's type says that it is sharded as workers do not.

  Only Explicit axes are in the types that arrays have. There the exchange
  would gather the whole gradient in every step, or fail at a reshape.
  """
  shape, sharding = np.shape(param), jax.typeof(param).sharding
  if not names_of(sharding.spec) or not workers.stacked_gradients:
    return
  expected = workers.param_specs.place(keys, shape).spec
  # Axes with one device cut nothing.
  axes = [axis for axis, size in sharding.mesh.shape.items() if size > 1]
  given = keep(sharding.spec, axes)
  if given not in (P(), expected):
    raise ValueError(
      f'The parameter {dotted(keys)} must be sharded by {expected} for'
      f' {workers}, got {sharding.spec}. Say how parameters are sharded:'
      ' demo_optax.Workers.on_mesh(mesh, axis_name, param_specs), with a tree'
      ' of PartitionSpecs; or put them elsewhere, with workers.device_put.'
    )
