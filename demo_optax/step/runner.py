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
_Settled = tuple[list[Any], list[Any], results.Collected]

# What the workers do not share.
_CUT = Role.BATCH, Role.STACKED


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
  step: Callable[..., Any]
  call: Call
  scans_rows: bool

  def __call__(
    self, *arrays: Any, index: Any = None
  ) -> tuple[list[Any], results.Returned]:
    """Runs the step of all workers, or of the separate program `index`."""
    workers = self.workers
    if workers.relay is not None:
      own, equal, known = self._run_program(arrays, index)
    elif workers.mesh is not None and not workers.param_specs.all_sizes:
      own, equal, known = self._run_on_devices(arrays)
    else:
      own, equal, known = self._run_mapped(arrays)
    values = []
    for result, apart, x in zip(known.results, own, equal):
      x = x if apart is None else apart
      if result.role is Role.BATCH:
        x = jnp.moveaxis(x, 0, self.call.axis)
      values.append(results.hold(workers, result, x))
    return values, known.returned

  def _one_worker(
    self, view: StepView, index: Any, arrays: Sequence[Any]
  ) -> _Settled:
    """Runs the step of worker `index`, with the arrays as it has them."""
    own = self.call.replace(Role.KEY, lambda x, _: prng.fold(x, index), arrays)
    if self.call.own_params:
      names = [a.keys for a in self.call.arrays]
      own_params.enter(self.call.own_params, own, names)

    def step(*own: Any) -> Any:
      (args, kwargs), objects = self.call.form.merge(own, inner=True)
      variables = [keys for keys, _ in modules.variables(objects)]
      returned = self.step(*args, **kwargs)
      modules.check_variables(variables, objects)
      return results.collect(self.call, returned, objects, own)

    with _explained(self.workers):
      closed, (_, known) = inside.trace(view, step, own)
      known_origins = follow(closed.jaxpr, self._origins(), view.axis)
      found = origins_at(known_origins, closed.jaxpr.outvars)
      if self.workers.sequential:
        values = run_in_turn(closed, known_origins, view.axis, own)
      else:
        values = core.jaxpr_as_fun(closed)(*own)
      # A constant among the results comes back as a number.
      values = [
        jnp.asarray(x, like.dtype)
        if isinstance(x, int | float | complex)
        else x
        for x, like in zip(values, closed.out_avals)
      ]
    is_spread = view.own is None and self.workers.mesh is not None
    settled = results.settle(
      self.call, known, values, found, arrays, view, is_spread
    )
    return *settled, known

  def _origins(self) -> list[Origin]:
    """Returns the origins of the arguments."""
    found = []
    for number, a in enumerate(self.call.arrays):
      origin = Origin.NOTHING
      if a.role in (Role.BATCH, Role.KEY):
        origin = Origin.DATA
      elif a.role is Role.STACKED or number in self.call.own_params:
        origin = Origin.STATE
      if a.role is Role.BATCH and not self.scans_rows:
        origin |= Origin.ROWS
      if a.role is Role.ADDED:
        origin = Origin.TOTAL
      found.append(origin)
    return found

  def _run_program(self, arrays: Sequence[Any], index: Any) -> _Settled:
    """Runs the step of a worker that is a separate program."""
    workers = self.workers
    own = dataclasses.replace(workers, stacked_state=False)
    view = StepView(workers.axis, workers.count, own)
    with lift.context(workers):
      arrays = self.call.replace(Role.STACKED, lambda x, _: x[0], arrays)
      return _stacked_again(self._one_worker(view, index, arrays))

  def _run_on_devices(self, arrays: Sequence[Any]) -> _Settled:
    """Runs the step in a `shard_map`, where each worker is one device."""
    workers, axis = self.workers, self.workers.axis_name
    # In the step nothing has a worker axis.
    own = dataclasses.replace(Workers.on_axis(axis), stacked_state=False)
    view = StepView(axis, workers.count, own)

    def one_device(*arrays: Any) -> _Settled:
      index = jax.lax.axis_index(axis)
      own = self.call.replace(Role.STACKED, lambda x, _: x[0], arrays)
      return _stacked_again(self._one_worker(view, index, own))

    specs = [
      P(*[None] * a.axis, axis) if a.role in _CUT else P()
      for a in self.call.arrays
    ]
    return jax.shard_map(
      one_device,
      mesh=workers.mesh,
      in_specs=tuple(specs),
      out_specs=(P(axis), P(), P()),
      # Types do not know that parameters stay equal which each worker
      # differentiates alone; `variation.follow` does.
      check_vma=False,
    )(*(lift.reshard(workers, x, s) for x, s in zip(arrays, specs)))

  def _run_mapped(self, arrays: Sequence[Any]) -> _Settled:
    """Runs the step under `jax.vmap`."""
    workers = self.workers
    view = StepView(inside.WORKER_AXIS, workers.count, None)

    def one_worker(arrays: Sequence[Any]) -> _Settled:
      index = jax.lax.axis_index(inside.WORKER_AXIS)
      return self._one_worker(view, index, arrays)

    def split(x: Any, a: Array) -> Any:
      rows = lift.split_rows(workers, jnp.moveaxis(x, a.axis, 0))
      return jnp.moveaxis(rows, 1, a.axis + 1)

    arrays = self.call.replace(Role.BATCH, split, arrays)
    in_axes = [0 if a.role in _CUT else None for a in self.call.arrays]
    # A model may name mesh axes inside a worker, also those of one device.
    with lift.context(workers):
      own, equal, known = jax.vmap(
        one_worker,
        in_axes=(in_axes,),
        out_axes=(0, None, None),
        axis_name=inside.WORKER_AXIS,
        axis_size=workers.count,
        spmd_axis_name=workers.spmd_axis_name,
      )(arrays)
    for i, result in enumerate(known.results):
      if result.role is Role.BATCH and own[i] is not None:
        own[i] = lift.join_rows(workers, own[i])
    return own, equal, known


def _stacked_again(settled: _Settled) -> _Settled:
  """Returns the results of one device, momentum with a worker axis."""
  own, equal, known = settled
  for i, result in enumerate(known.results):
    if result.role is Role.STACKED:
      own[i] = own[i][None]
  return own, equal, known


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
