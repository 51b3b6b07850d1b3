"""Runs a step that is written for one worker: mapped, on devices, or alone."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P

from demo_optax.numerics import prng
from demo_optax.step import modules, own_params, results
from demo_optax.step.arguments import Array, Call
from demo_optax.step.roles import Parts, Role
from demo_optax.workers import Workers, inside, lift
from demo_optax.workers.in_turn import run_in_turn
from demo_optax.workers.variation import Follower, Origin

# What a step returns, and what is known of it.
_Settled = tuple[Parts, results.Returned]

# What is a worker's own among the arguments; other roles are shared.
_ORIGINS = {
  Role.BATCH: Origin.DATA | Origin.ROWS,
  Role.KEY: Origin.DATA,
  Role.STACKED: Origin.STATE,
  Role.ADDED: Origin.TOTAL,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
  """Runs a step for all workers, or for one separate program.

  Outside the map a worker's own arrays have a leading axis: momentum is
  `[workers, ...]`, a batch `[workers, rows, ...]`.

  Attributes:
    workers: those that it runs for.
    step: written for one worker.
    call: what is known about the arguments.
  """

  workers: Workers
  step: Callable[..., object]
  call: Call

  def __call__(
    self, *arrays: jax.Array, index: Any = None
  ) -> tuple[list[jax.Array], results.Returned]:
    """Runs the step for all workers, or for the separate program `index`."""
    workers, call = self.workers, self.call
    given = call.replace(Role.BATCH, self._split, arrays)
    parts = Parts.of(given, call.roles)
    if index is not None:
      with lift.context(workers):
        settled, returned = self._run_alone(workers, index, parts)
    elif workers.mesh is not None and len(workers.mesh.shape) == 1:
      settled, returned = self._run_on_devices(parts)
    else:
      settled, returned = self._run_mapped(parts)
    values = []
    for array, result in zip(settled.joined(returned.roles), returned.results):
      if result.role is Role.BATCH:
        array = jnp.moveaxis(lift.join_rows(workers, array), 0, call.axis)
      values.append(results.hold(workers, result, array))
    return values, returned

  def _split(
    self,
    batch: jax.Array,
    array: Array,
  ) -> jax.Array:
    """Cuts a batch `[..., rows, ...]` to `[workers, ..., rows, ...]`."""
    # split_rows: from [rows, ...] to [workers, rows, ...].
    rows = lift.split_rows(self.workers, jnp.moveaxis(batch, array.axis, 0))
    return jnp.moveaxis(rows, 1, array.axis + 1)

  def _run_alone(
    self,
    workers: Workers,
    index: jax.Array,
    parts: Parts,
  ) -> _Settled:
    """Runs the step for a worker that shares no device, or is a program."""
    # From [1, ...] to the worker's own, and back.
    parts = Parts([array[0] for array in parts.own], parts.equal)
    settled, returned = self._one_worker(workers, index, parts)
    own = [array[None] for array in settled.own]
    return Parts(own, settled.equal), returned

  def _run_on_devices(self, parts: Parts) -> _Settled:
    """Runs the step in a `shard_map`, where each worker is one device."""
    workers, axis = self.workers, self.workers.axis_name

    def one_device(parts: Parts) -> _Settled:
      index = jax.lax.axis_index(axis)
      return self._run_alone(Workers.on_axis(axis), index, parts)

    specs = Parts(P(axis), P())
    # What workers share may be spread over them: Explicit types would keep it.
    whole = [lift.reshard(workers, array, P()) for array in parts.equal]
    return jax.shard_map(
      one_device,
      mesh=workers.mesh,
      in_specs=(specs,),
      out_specs=(specs, P()),
      # Types do not know that parameters stay equal which each worker
      # differentiates alone; `variation.Follower` does.
      check_vma=False,
    )(Parts(parts.own, whole))

  def _run_mapped(self, parts: Parts) -> _Settled:
    """Runs the step under `jax.vmap`."""
    workers, axis = self.workers, inside.WORKER_AXIS

    def one_worker(parts: Parts) -> _Settled:
      index = jax.lax.axis_index(axis)
      return self._one_worker(Workers.on_axis(axis), index, parts)

    axes = Parts(0, None)
    # A model may name mesh axes inside a worker, also those of one device.
    with lift.context(workers):
      return jax.vmap(
        one_worker,
        in_axes=(axes,),
        out_axes=(axes, None),
        axis_name=axis,
        axis_size=workers.count,
        spmd_axis_name=workers.spmd_axis_name,
      )(parts)

  def _one_worker(
    self,
    workers: Workers,
    index: jax.Array,
    parts: Parts,
  ) -> _Settled:
    """Runs the step for worker `index`, with the arrays as it has them."""
    call, axis = self.call, workers.axis
    arrays = parts.joined(call.roles)
    given = call.replace(Role.KEY, lambda key, _: prng.fold(key, index), arrays)
    # `local_updates`: the model in the step is the worker's.
    if call.own_params:
      own_params.enter(call.own_params, given, call.arrays)
    # In the step nothing has a worker axis.
    seen = dataclasses.replace(
      workers, num_workers=self.workers.count, stacked_state=False
    )
    with _explained(self.workers):
      closed, (_, returned) = inside.trace(seen, self._step_of_arrays, given)
      # Before anything is run, mistakes are found in the program.
      follower = Follower(axis)
      origins = follower.follow(closed.jaxpr, self._origins())
      if self.workers.sequential:
        values = run_in_turn(closed, follower, given)
      else:
        values = core.jaxpr_as_fun(closed)(*given)
    # By identity, since constants among the outputs cannot be hashed.
    inputs = dict(zip(map(id, closed.jaxpr.invars), arrays))
    for number, result in enumerate(returned.results):
      value, variable = values[number], closed.jaxpr.outvars[number]
      if isinstance(value, int | float | complex):  # a constant
        value = jnp.asarray(value, variable.aval.dtype)
      if result.role is Role.KEY and id(variable) in inputs:
        # Returned as it was: the next step folds it again.
        values[number] = inputs[id(variable)]
        continue
      # The argument that the result continues, such as statistics.
      former = None
      if result.continues is not None:
        former = arrays[result.continues]
      values[number] = results.settle(
        call, result, value, former, origins[number], axis
      )
    return Parts.of(values, returned.roles), returned

  def _step_of_arrays(
    self, *given: jax.Array
  ) -> tuple[list[jax.Array], results.Returned]:
    """Calls the step as it was written: with trees and Flax objects."""
    args, kwargs, objects = self.call.bind(given)
    before = modules.variables(objects)
    returned = self.step(*args, **kwargs)
    modules.check_variables(before, objects)
    return results.collect(self.call, returned, objects)

  def _origins(self) -> list[Origin]:
    """Returns the origins of the arguments."""
    origins = []
    for number, array in enumerate(self.call.arrays):
      origin = _ORIGINS.get(array.role, Origin.NOTHING)
      if number in self.call.own_params:
        origin = Origin.STATE
      if self.call.options.axis is not None:  # a scan over rows is meant
        origin &= ~Origin.ROWS
      origins.append(origin)
    return origins


@contextlib.contextmanager
def _explained(workers: Workers) -> Iterator[None]:
  """Adds to JAX's and Flax's errors in a step what to do about them."""
  try:
    yield
  except Exception as error:
    text, axis = str(error), workers.axis_name
    if isinstance(error, NameError) and 'unbound axis name' in text:
      remedy = (
        'In a step of data_parallel no axis has a name. Remove what averages'
        ' gradients, which the exchange replaces. Replace other pmean and'
        ' psum by demo_optax.over_workers(x) and over_workers(x, jnp.sum).'
      )
    elif f"'{axis}'" in text and re.search(
      'with_sharding_constraint|reshard|NamedSharding', text
    ):
      remedy = (
        f'In a step of data_parallel the worker axis {axis!r} does not cut'
        " arrays, which are one worker's. Leave it out of shardings in the"
        f' step and its layers: P(None, ...) in place of P({axis!r}, ...).'
      )
    elif isinstance(error, NotImplementedError) and workers.mesh is None:
      remedy = (
        'jax.vmap, which runs simulated workers, cannot map an operation of the'
        ' step. Run them one after another:'
        f' Workers.simulated({workers.num_workers}, sequential=True).'
      )
    elif isinstance(error, NotImplementedError):
      remedy = (
        'jax.vmap, which runs workers of several devices, cannot map an'
        ' operation of the step. Wrap the function that takes gradients:'
        ' jax.custom_batching.sequential_vmap(jax.value_and_grad(loss_fn)).'
      )
    elif 'different trace level' in text:
      remedy = (
        'The step of data_parallel, or a transformation in it, changes or'
        ' differentiates a Flax object that it closes over. Make it an'
        ' argument, as with nnx.jit.'
      )
    else:
      raise
    raise ValueError(f'{text}\n{remedy}') from error
