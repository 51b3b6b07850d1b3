"""Runs a step that is written for one worker: mapped, on devices, or alone."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P

from demo_optax.numerics import prng
from demo_optax.step import modules, own_params, results
from demo_optax.step.arguments import Array, Call
from demo_optax.step.roles import Role
from demo_optax.workers import Workers, inside, lift
from demo_optax.workers.in_turn import run_in_turn
from demo_optax.workers.inside import StepView
from demo_optax.workers.variation import Origin, follow, origins_at

# Arrays of the worker's own and arrays that are equal on all workers, None in
# one of both, and what is known of them: see `results.settle`.
_Settled = tuple[list[Any], list[Any], results.Returned]

# What is a worker's own among the arguments; other roles are shared.
_ORIGINS = {
  Role.BATCH: Origin.DATA | Origin.ROWS,
  Role.KEY: Origin.DATA,
  Role.STACKED: Origin.STATE,
  Role.ADDED: Origin.TOTAL,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
  """Runs the step of one call for all workers, or for one separate program.

  Attributes:
    workers: those of the step.
    step: written for one worker.
    call: what is known of the arguments.
    scans_rows: whether the step may exchange in a scan over the batch's rows.
  """

  workers: Workers
  step: Callable[..., object]
  call: Call
  scans_rows: bool

  def __call__(
    self,
    *arrays: jax.Array,
    index: Any = None,
  ) -> tuple[list[jax.Array], results.Returned]:
    """Runs the step of all workers, or of the separate program `index`."""
    workers = self.workers
    if index is not None:
      with lift.context(workers):
        own, equal, known = self._run_alone(workers, index, arrays)
    elif workers.mesh is not None and not workers.param_specs.all_sizes:
      own, equal, known = self._run_on_devices(arrays)
    else:
      own, equal, known = self._run_mapped(arrays)
    values = []
    for result, apart, x in zip(known.results, own, equal):
      if apart is not None:
        x = apart
      if result.role is Role.BATCH:
        x = jnp.moveaxis(x, 0, self.call.axis)
      values.append(results.hold(workers, result, x))
    return values, known

  def _run_alone(
    self,
    workers: Workers,
    index: jax.Array,
    arrays: Sequence[jax.Array],
  ) -> _Settled:
    """Runs the step of a worker that shares no device, or is a program."""
    # In the step nothing has a worker axis.
    inner = dataclasses.replace(workers, stacked_state=False)
    view = StepView(workers.axis, self.workers.count, inner)
    arrays = self.call.replace(Role.STACKED, lambda x, _: x[0], arrays)
    own, equal, known = self._one_worker(view, index, arrays)
    # Outside of the step momentum is [workers, ...]: here, of this worker.
    for number, result in enumerate(known.results):
      if result.role is Role.STACKED:
        own[number] = own[number][None]
    return own, equal, known

  def _run_on_devices(self, arrays: Sequence[jax.Array]) -> _Settled:
    """Runs the step in a `shard_map`, where each worker is one device."""
    workers, axis = self.workers, self.workers.axis_name

    def one_device(arrays: Sequence[jax.Array]) -> _Settled:
      index = jax.lax.axis_index(axis)
      return self._run_alone(Workers.on_axis(axis), index, arrays)

    specs, placed = [], []
    for x, array in zip(arrays, self.call.arrays):
      spec = P(*[None] * array.axis, axis) if array.role.is_own else P()
      specs.append(spec)
      placed.append(lift.reshard(workers, x, spec))
    return jax.shard_map(
      one_device,
      mesh=workers.mesh,
      in_specs=(specs,),
      out_specs=(P(axis), P(), P()),
      # Types do not know that parameters stay equal which each worker
      # differentiates alone; `variation.follow` does.
      check_vma=False,
    )(placed)

  def _run_mapped(self, arrays: Sequence[jax.Array]) -> _Settled:
    """Runs the step under `jax.vmap`."""
    workers, axis = self.workers, inside.WORKER_AXIS
    view = StepView(axis, workers.count, None)

    def one_worker(arrays: Sequence[jax.Array]) -> _Settled:
      return self._one_worker(view, jax.lax.axis_index(axis), arrays)

    def split(x: jax.Array, array: Array) -> jax.Array:
      # From [..., rows, ...] to [workers, ..., rows of a worker, ...].
      rows = lift.split_rows(workers, jnp.moveaxis(x, array.axis, 0))
      return jnp.moveaxis(rows, 1, array.axis + 1)

    arrays = self.call.replace(Role.BATCH, split, arrays)
    in_axes = [0 if x.role.is_own else None for x in self.call.arrays]
    # A model may name mesh axes inside a worker, also those of one device.
    with lift.context(workers):
      own, equal, known = jax.vmap(
        one_worker,
        in_axes=(in_axes,),
        out_axes=(0, None, None),
        axis_name=axis,
        axis_size=workers.count,
        spmd_axis_name=workers.spmd_axis_name,
      )(arrays)
    for number, result in enumerate(known.results):
      if result.role is Role.BATCH:
        own[number] = lift.join_rows(workers, own[number])
    return own, equal, known

  def _one_worker(
    self,
    view: StepView,
    index: jax.Array,
    arrays: Sequence[jax.Array],
  ) -> _Settled:
    """Runs the step of worker `index`, with the arrays as it has them."""
    call = self.call
    own = call.replace(Role.KEY, lambda x, _: prng.fold(x, index), arrays)
    if call.own_params:
      names = [array.keys for array in call.arrays]
      own_params.enter(call.own_params, own, names)

    def step(
      *own: jax.Array,
    ) -> tuple[list[jax.Array], results.Returned]:
      # The step is called as it was written: with trees and Flax objects.
      (args, kwargs), objects = call.form.merge(own, inner=True)
      before = modules.variables(objects)
      returned = self.step(*args, **kwargs)
      modules.check_variables([keys for keys, _ in before], objects)
      return results.collect(call, returned, objects, own)

    with _explained(self.workers):
      closed, (_, known) = inside.trace(view, step, own)
      # Before anything is run, mistakes are found in the program.
      origins = follow(closed.jaxpr, self._origins(), view.axis)
      if self.workers.sequential:
        values = run_in_turn(closed, origins, view.axis, own)
      else:
        values = core.jaxpr_as_fun(closed)(*own)
    for number, like in enumerate(closed.out_avals):
      if isinstance(values[number], int | float | complex):  # a constant
        values[number] = jnp.asarray(values[number], like.dtype)
    own, equal = results.settle(
      call,
      known,
      values,
      origins_at(origins, closed.jaxpr.outvars),
      arrays,
      view,
      is_spread=view.own is None and self.workers.mesh is not None,
    )
    return own, equal, known

  def _origins(self) -> list[Origin]:
    """Returns the origins of the arguments."""
    found = []
    for number, array in enumerate(self.call.arrays):
      origin = _ORIGINS.get(array.role, Origin.NOTHING)
      if number in self.call.own_params:
        origin = Origin.STATE
      if self.scans_rows:
        origin &= ~Origin.ROWS
      found.append(origin)
    return found


@contextlib.contextmanager
def _explained(workers: Workers) -> Iterator[None]:
  """Adds to errors of JAX and Flax in a step what to do about them."""
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
