"""Runs one worker's training step for all workers."""

import contextlib
import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec as P

from demo_optax import _checks
from demo_optax.exchange.algorithm import traced_configs
from demo_optax.numerics import prng
from demo_optax.step import agreement, calls, modules, programs, results
from demo_optax.step.calls import Array, Call, Options
from demo_optax.workers import Workers, inside, lift
from demo_optax.workers.inside import WORKER_AXIS, Result

_Results = tuple[list[Result], results.Returned]


def data_parallel(
  workers: Workers,
  *,
  batch_argnums: int | Sequence[int] | None = None,
  batch_argnames: str | Sequence[str] | None = None,
  batch_axis: int | Mapping[str, int] | None = None,
  keys: str | Sequence[str] | None = None,
  static_argnums: int | Sequence[int] = (),
  static_argnames: str | Sequence[str] = (),
  donate_argnums: int | Sequence[int] = (),
  donate_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], 'DataParallelStep']:
  r"""Compiles a training step that is written for one worker, for all of them.

  A drop-in for `jax.jit` and `nnx.jit` on a training step. The step computes
  one worker's loss and gradient, and its optimizer exchanges.

  =============================  =====================  ========================
  array                          in the step            returned or changed
  =============================  =====================  ========================
  parameters, optimizer state    as they are            equal, or an error
  momentum                       the worker's own       each worker's
  the batch: any other array     this worker's rows     joined, if as many rows
  numbers                        as they are            the mean, if real
  PRNG keys (see `keys`)         the worker's own       worker 0's
  batch statistics               as they are            the mean of finite ones
  `nnx.metrics.Average`          as they are            all that workers added
  =============================  =====================  ========================

  Parameters and states may be trees, Flax objects (updated in place),
  dataclasses or Equinox modules. Keys, also those in Flax objects, are folded
  with the worker's number. Batch statistics are `nnx.BatchStat` and Linen's
  `batch_stats`. Any other result that differs between workers is an error that
  names it; in the step `over_workers(x, jnp.sum)` makes one value of all.

  Batches are inferred: an argument is shared if it holds a Flax object, a
  dataclass or a state of an exchange, or a tree with the structure of such a
  state's parameters. `batch_argnums` overrides it.

  On a mesh, arguments are put where they belong. Several processes give the
  same NumPy batch each, or a global `jax.Array`
  (`jax.make_array_from_process_local_data`).

  Args:
    workers: `Workers.simulated`, `on_mesh`, or `remote`, where each program
      passes its own batch.
    batch_argnums: positions of the arguments to cut, and no others. With `()`,
      for a step that draws its batch, workers differ by their random keys.
    batch_argnames: the same, by name.
    batch_axis: the axis of the rows, by default the first one, or one for each
      argument, by name. Rows of results have that of the first batch.
    keys: paths of the legacy PRNG keys, `uint32[..., 2]`, among the shared
      arrays, such as `'state.seed_generator.0'`, or of what holds them; `()`
      where all are data. By default an array is a key if its argument's name
      or the last name in its path has the word key, rng, prng or seed; any
      other such array is an error.
    static_argnums: as in `jax.jit`. Functions, strings and other objects that
      are not arrays are static wherever they occur.
    static_argnames: the same, by name.
    donate_argnums: as in `jax.jit`: model and optimizer of a training loop.
    donate_argnames: the same, by name.

  Returns:
    A decorator. The decorated step is called as before; `lower` of it returns
    the lowered program for its arguments.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(0.1, workers=workers)
    >>> params = {'w': jnp.ones(3)}
    >>> opt_state = tx.init(params)
    >>> @demo_optax.data_parallel(workers)
    ... def train_step(params, opt_state, x):
    ...   loss, grads = jax.value_and_grad(
    ...       lambda params: jnp.mean((x @ params['w']) ** 2))(params)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state, loss
    >>> for step in range(5):
    ...   params, opt_state, loss = train_step(params, opt_state, jnp.eye(8, 3))
    >>> print(f'{loss:.2f}')
    0.33
  """
  _checks.check_type('workers', workers, Workers, 'Workers.simulated(4)')
  if workers.kind == 'on_axis':
    raise TypeError(
      f'{workers} are the workers of an axis that you map yourself: call the'
      ' step in your own shard_map, pmap or vmap. data_parallel needs'
      ' Workers.on_mesh, remote or simulated.'
    )

  def decorate(step: Callable[..., Any]) -> DataParallelStep:
    listed = functools.partial(_listed, step)
    has_batches = (batch_argnums, batch_argnames) != (None, None)
    listed((), [*batch_axis] if isinstance(batch_axis, Mapping) else ())
    return DataParallelStep(
      step,
      workers,
      Options(
        listed(batch_argnums, batch_argnames) if has_batches else None,
        listed(static_argnums, static_argnames),
        listed(donate_argnums, donate_argnames),
        None if keys is None else tuple(jax.tree.leaves(keys)),
        batch_axis,
      ),
    )

  return decorate


class DataParallelStep:
  """A step that `data_parallel` has decorated; called like the step itself."""

  def __init__(
    self, step: Callable[..., Any], workers: Workers, options: Options
  ):
    functools.update_wrapper(self, step)
    self.workers, self._step, self._options = workers, step, options
    self._names = _positional(step)
    self._place = functools.partial(calls.place, workers)
    # What `traces_numbers` says, by the structure of the arguments; calls and
    # their programs, by all that is static.
    self._numbers: dict[Any, list[bool]] = {}
    self._known: dict[Any, tuple[Call, Any]] = {}
    self._has_run = False

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    """Binds the step to an object whose method it is, as functions do."""
    return self if instance is None else functools.partial(self, instance)

  def __repr__(self) -> str:
    name = getattr(self._step, '__name__', repr(self._step))
    return f'data_parallel({self.workers})({name})'

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the step; see `data_parallel`."""
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
      # Once: later on, processes may differ in flags that are compiled for.
      is_first = not self._has_run and jax.process_count() > 1
      if is_first:
        agreement.check(
          self.workers,
          {
            'arguments of the step': ', '.join(
              f'{a.name} {a.type.dtype}{list(a.shape)}' for a in call.arrays
            )
          },
        )
      arrays = [*map(self._place, arrays, call.arrays)]
      if is_first:
        with traced_configs() as configs:
          program.trace(*arrays)
        agreement.check(self.workers, agreement.describe(configs))
      self._has_run = True
      values, returned = program(*arrays)
      return returned.form.merge(values, inner=False)[0]

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Lowers the step, as `jax.jit(step).lower` does, for arrays or shapes."""
    if self.workers.relay is not None:
      raise ValueError(
        f'workers must have one program to lower, got {self.workers}, whose'
        ' step is several. Lower it with Workers.simulated.'
      )
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
      return program.lower(*map(self._place, arrays, call.arrays))

  def _open(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[Call, Any, list[Any]]:
    """Returns the analysed call, its program, and its arrays."""
    positions = (_name_of(i, self._names) for i in range(len(args)))
    named = [
      (name, calls.Static(x) if name in self._options.static else x)
      for name, x in (*zip(positions, args), *sorted(kwargs.items()))
    ]
    tree = tuple(x for _, x in named[: len(args)]), dict(named[len(args) :])
    flat, treedef = jax.tree.flatten(tree, is_leaf=modules.is_object)
    if treedef not in self._numbers:
      self._numbers[treedef] = modules.traces_numbers(tree)
    objects: list[Any] = []
    fixed, arrays = calls.take_apart(flat, self._numbers[treedef], objects)
    variables, structure = modules.split(objects)
    arrays += variables
    form = calls.Form(treedef, fixed, structure)
    key = form, tuple(map(_form_of, arrays))
    try:
      found = self._known.get(key)
    except TypeError as error:
      raise TypeError(
        f'{self!r} compiles for each value of what is not an array among its'
        f' arguments, which must be hashable: {error}.'
      ) from error
    if found is None:
      call = calls.analyse(
        repr(self), self.workers, self._options, named, form, objects, key[1]
      )
      found = self._known[key] = call, self._program(call)
      if len(self._known) == 20:
        warnings.warn(
          f'{self!r} has compiled 20 programs. It compiles for every new'
          ' shape, and for every new value of what is not an array among its'
          ' arguments: a string, a static argument, or another object, such'
          ' as self of a method, by its identity.',
          stacklevel=3,
        )
    return *found, arrays

  def _program(self, call: Call) -> Any:
    run = functools.partial(self._run, call)
    names = self._options.donated
    donated = [i for i, a in enumerate(call.arrays) if a.keys[0] in names]
    if self.workers.relay is not None:
      # ZeroMQ is needed by such workers alone.
      from demo_optax.step.remote import RemoteProgram

      return RemoteProgram(self.workers, call, run, donated)
    return jax.jit(run, donate_argnums=donated)

  def _run(
    self, call: Call, *arrays: Any, index: Any = None
  ) -> tuple[list[Any], results.Returned]:
    """Runs the step of all workers, or of the separate program `index`."""
    workers = self.workers
    count = workers.count if workers.stacked_gradients else 1
    for a in call.arrays:
      if a.role == 'stacked' and a.shape[:1] != (count,):
        raise ValueError(
          f'{a.name} has shape {a.shape}, but {workers} has {count}'
          ' here, each with its own entry along the first axis. Make the'
          ' state with tx.init under the same workers, or regroup it by'
          ' demo_optax.checkpoint.from_leaves(..., resize=True).'
        )
    has_own_device = workers.mesh and not workers.param_specs.all_sizes
    if workers.relay is not None or has_own_device:
      found, returned = self._run_own(call, arrays, index)
    else:
      found, returned = self._run_mapped(call, arrays, workers)
    return [results.hold(workers, r, call.axis) for r in found], returned

  def _run_mapped(
    self, call: Call, arrays: Sequence[Any], workers: Workers
  ) -> _Results:
    """Runs the step under `jax.vmap`."""

    def one_workers_step(arrays: Sequence[Any]) -> Any:
      index = jax.lax.axis_index(WORKER_AXIS)
      closed, like = jax.make_jaxpr(
        functools.partial(self._results, call, index), return_shape=True
      )(arrays)
      self._check_rows(call, closed.jaxpr)
      build = jax.tree.structure(like).unflatten
      with _explained(self.workers):
        own, returned = build(core.jaxpr_as_fun(closed)(*arrays))
      variables, _ = build(closed.jaxpr.outvars)
      for r, v in zip(own, variables):
        if r.role == 'added' and not programs.adds(
          closed.jaxpr, closed.jaxpr.invars[r.at], v.value
        ):
          r.role = 'equal'
      own = inside.settle(own, call.rows, call.axis, workers.kind == 'on_mesh')
      apart = [r if r.apart else None for r in own]
      return apart, [None if r.apart else r for r in own], returned

    def split(x: Any, a: Array) -> Any:
      rows = lift.split_rows(workers, jnp.moveaxis(x, a.axis, 0))
      return jnp.moveaxis(rows, 1, a.axis + 1)

    arrays = call.replace('batch', split, arrays)
    in_axes = [None if a.role in ('key', 'shared') else 0 for a in call.arrays]
    # A model may name mesh axes inside a worker, also those of one device.
    with lift.context(self.workers):
      apart, equal, returned = jax.vmap(
        one_workers_step,
        in_axes=(in_axes,),
        out_axes=(0, None, None),
        axis_name=WORKER_AXIS,
        axis_size=workers.count,
        spmd_axis_name=workers.spmd_axis_name,
      )(arrays)
    found: list[Result] = [a or e for a, e in zip(apart, equal)]
    for r in found:
      if r.is_rows:
        r.value = lift.join_rows(workers, r.value)
    return found, returned

  def _run_own(self, call: Call, arrays: Sequence[Any], index: Any) -> _Results:
    """Runs the step of one worker, where each has its own device or program."""
    workers, count = self.workers, self.workers.count
    sizes = {'batch': count * (call.rows or 0), 'stacked': count}
    shapes = [
      a.type.update(
        shape=(*a.shape[: a.axis], sizes[a.role], *a.shape[a.axis + 1 :])
      )
      if a.role in sizes
      else a.type
      for a in call.arrays
    ]
    # This trace checks for all workers what differs between them.
    check = functools.partial(
      self._run_mapped, call, workers=Workers.simulated(count)
    )
    with inside.tracing(checks=True):
      expected, _ = jax.eval_shape(check, shapes)
    has_program = workers.relay is not None
    group = dataclasses.replace(  # in the step nothing has a worker axis
      workers if has_program else Workers.on_axis(workers.axis_name),
      stacked_state=False,
    )

    def one_workers_step(*arrays: Any) -> _Results:
      at = index if has_program else jax.lax.axis_index(workers.axis_name)
      own = call.replace('stacked', lambda x, _: x[0], arrays)
      with inside.tracing(seen_as=group):
        found, returned = self._results(call, at, own)
        for r, e in zip(found, expected):
          r.role, r.differs = e.role, e.differs
        found = inside.settle(found, call.rows, call.axis)
      for r in found:
        if r.role == 'stacked':
          r.value = r.value[None]
      return found, returned

    if has_program:
      with lift.context(workers):
        return one_workers_step(*arrays)
    own, equal = P(workers.axis_name), P()
    in_specs = [
      P(*[None] * a.axis, *own) if a.role in sizes else equal
      for a in call.arrays
    ]
    return jax.shard_map(
      one_workers_step,
      mesh=workers.mesh,
      in_specs=tuple(in_specs),
      out_specs=([own if r.apart else equal for r in expected], equal),
      # The check knows what is equal on all workers; types do not, of
      # parameters that are differentiated by each worker alone.
      check_vma=False,
    )(*(lift.reshard(workers, x, s) for x, s in zip(arrays, in_specs)))

  def _check_rows(self, call: Call, jaxpr: core.Jaxpr) -> None:
    """Raises if the step scans over what was cut, as over batches."""
    cut = {v: a for v, a in zip(jaxpr.invars, call.arrays) if a.role == 'batch'}
    batch = programs.scanned(jaxpr, cut)
    if batch is not None and self._options.axis is None:
      raise ValueError(
        f'{batch.name} must have its rows along the first axis, but the step'
        ' scans over that axis and exchanges in each turn, as over batches'
        ' [steps, rows, ...]. Say where the rows are:'
        ' demo_optax.data_parallel(workers, batch_axis=1), or batch_axis=0 if'
        ' every row is a step.'
      )

  def _results(
    self, call: Call, index: jax.Array, arrays: Sequence[Any]
  ) -> _Results:
    """Runs the step of worker `index` with the arrays as it has them."""
    own = call.replace('key', lambda x, _: prng.fold(x, index), arrays)
    if call.own_params:
      inside.enter(call.own_params, own)
    (args, kwargs), objects = call.form.merge(own, inner=True)
    variables = [keys for keys, _ in modules.variables(objects)]
    with _explained(self.workers):
      returned = self._step(*args, **kwargs)
    modules.check_variables(variables, objects)
    return results.collect(call, returned, objects, arrays, own)


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
    elif 'different trace level' in text:
      remedy = (
        'The step of data_parallel, or a transformation in it, changes or'
        ' differentiates a Flax object that it closes over. Make it an'
        ' argument, as with nnx.jit.'
      )
    else:
      raise
    raise ValueError(f'{text}\n{remedy}') from error


def _form_of(x: Any) -> Any:
  if isinstance(x, jax.Array):
    return x.shape, x.dtype
  return np.shape(x), jax.dtypes.result_type(x)


def _positional(step: Callable[..., Any]) -> list[str]:
  return [
    name
    for name, p in inspect.signature(step).parameters.items()
    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]


def _name_of(position: int, names: Sequence[str]) -> str:
  return names[position] if position < len(names) else f'argument {position}'


def _listed(
  step: Callable[..., Any], argnums: Any, argnames: Any
) -> frozenset[str]:
  """Returns the names of the arguments that two options of a step list."""
  parameters = inspect.signature(step).parameters
  names = _positional(step)
  kinds = {p.kind for p in parameters.values()}
  takes_more = inspect.Parameter.VAR_POSITIONAL in kinds
  takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
  # The last argument is unknown if calls may have fewer or more.
  is_open = takes_more or any(
    parameters[n].default is not inspect.Parameter.empty for n in names
  )
  known = {*parameters, *range(0 if is_open else -len(names), len(names))}
  found = set()
  for x in jax.tree.leaves((argnums, argnames)):
    is_name = isinstance(x, str)
    is_more = takes_any_name if is_name else takes_more and x >= 0
    if x not in known and not is_more:
      raise ValueError(
        f'data_parallel must be given arguments of the step, got {x!r}, but'
        f' the arguments of {getattr(step, "__name__", step)} are'
        f' {", ".join(parameters)}. Give names, or positions counted from the'
        ' first argument.'
      )
    found.add(x if is_name else _name_of(x, names))
  return frozenset(found)
