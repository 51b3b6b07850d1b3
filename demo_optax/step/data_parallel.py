"""Runs one worker's training step for all workers."""

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from demo_optax import _checks
from demo_optax._paths import dotted
from demo_optax.exchange.algorithm import traced_configs
from demo_optax.numerics import prng
from demo_optax.step import agreement, programs, results
from demo_optax.step import call as calls
from demo_optax.step import nnx as modules
from demo_optax.step.call import Call, Options
from demo_optax.step.results import Returned
from demo_optax.workers import Workers, inside, lift
from demo_optax.workers.inside import WORKER_AXIS, Result


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

  A drop-in for `jax.jit` and `nnx.jit` on a training step. The batch is cut
  over the workers along its first axis; everything else is shared. The step
  computes one worker's loss and gradient, and its optimizer exchanges. What the
  step sees, and what becomes of its results:

  ============================  ================================================
  argument                      in the step
  ============================  ================================================
  Flax NNX objects              one worker's; updated in place afterwards
  parameters, optimizer state,  one worker's, of which the momentum is its own
  `TrainState`, dataclasses,
  Equinox modules
  PRNG keys (see `keys`)        folded with the worker's number; so are new ones
                                in variables of NNX objects, and their streams
  numbers, 0-d arrays           as they are
  other arrays: the batch       this worker's rows
  ============================  ================================================

  ============================  ================================================
  returned or changed           is, of all workers,
  ============================  ================================================
  parameters, optimizer state   equal on all of them: anything else is an error
  real numbers                  the mean
  arrays with a row for each    the rows of all, in the order of the batch
  row of the worker's batch
  batch statistics              the mean over workers whose values are finite
  (`nnx.BatchStat`, Linen
  `batch_stats`)
  `nnx.metrics.Average` and     all that the workers have added to it
  its kind
  PRNG keys                     worker 0's
  ============================  ================================================

  Anything else that differs between workers is an error that names it;
  `over_workers(x, jnp.sum)` in the step makes one value of all workers' values.

  Batches are inferred: an argument is shared if it holds a Flax object, a
  dataclass or a state of an exchange, or a tree with the structure of such a
  state's parameters. `batch_argnums` overrides it.

  On a mesh, arguments are put where they belong. Several processes give the
  same NumPy batch each, or a global `jax.Array`
  (`jax.make_array_from_process_local_data`).

  Args:
    workers: `Workers.simulated`, `on_mesh` or `remote`; of `remote`, a batch is
      the worker's own.
    batch_argnums: positions of the arguments to cut, and no others. With `()`,
      for a step that draws its batch, workers differ by their random keys.
    batch_argnames: the same, by name.
    batch_axis: the axis of the rows, by default the first one, or one for each
      argument, by name. Rows of results have that of the first batch.
    keys: paths of the legacy PRNG keys, `uint32[..., 2]`, among the shared
      arrays, such as `'state.seed_generator.0'`, or of what holds them; `()`
      where all are data. By default those are keys whose argument's or last
      name has the word key, rng, prng or seed, and others are an error.
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
  return functools.partial(
      DataParallelStep,
      workers=workers,
      batches=(batch_argnums, batch_argnames),
      static=(static_argnums, static_argnames),
      donated=(donate_argnums, donate_argnames),
      keys=keys,
      axis=batch_axis,
  )


class DataParallelStep:
  """A step that `data_parallel` has decorated; called like the step itself."""

  def __init__(
      self,
      step: Callable[..., Any],
      workers: Workers,
      batches: tuple[Any, Any],
      static: tuple[Any, Any],
      donated: tuple[Any, Any],
      keys: Any,
      axis: Any,
  ):
    functools.update_wrapper(self, step)
    self.workers, self._step = workers, step
    parameters = inspect.signature(step).parameters
    self._names = [
        name for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    listed = functools.partial(
        _listed, getattr(step, '__name__', str(step)), parameters, self._names
    )
    self._options = Options(
        None if batches == (None, None) else listed(*batches),
        listed(*static),
        listed(*donated),
        None if keys is None else _as_tuple(keys),
        axis,
    )
    listed((), axis if isinstance(axis, Mapping) else ())  # raises
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
        agreement.check(self.workers, {
            'arguments of the step': ', '.join(
                f'{dotted(a.keys)} {a.type.dtype}{list(a.shape)}'
                for a in call.arrays
            )
        })
      arrays = self._put(call, arrays)
      if is_first:
        with traced_configs() as configs:
          program.trace(*arrays)
        agreement.check(self.workers, agreement.describe(configs))
      self._has_run = True
      values, returned = program(*arrays)
      tree, _ = returned.form.merge(values, inner=False)
      return tree

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Lowers the step, as `jax.jit(step).lower` does.

    Any array may be a `jax.ShapeDtypeStruct`.
    """
    if self.workers.relay is not None:
      raise ValueError(
          f'workers must have one program to lower, got {self.workers}, whose'
          ' step is several. Lower it with Workers.simulated.'
      )
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
      return program.lower(*self._put(call, arrays))

  def _open(
      self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[Call, Any, list[Any]]:
    """Returns what is decided about a call, its program, and its arrays."""
    named = [
        (name, calls.Static(x) if name in self._options.static else x)
        for name, x in (
            *((_name_of(i, self._names), x) for i, x in enumerate(args)),
            *sorted(kwargs.items()),
        )
    ]
    tree = tuple(x for _, x in named[: len(args)]), dict(named[len(args) :])
    flat, treedef = jax.tree.flatten(tree, is_leaf=modules.is_object)
    try:
      if treedef not in self._numbers:
        self._numbers[treedef] = modules.traces_numbers(tree)
      form, objects, arrays = calls.open_call(
          flat, treedef, self._numbers[treedef]
      )
      key = form, tuple(map(_form_of, arrays))
      found = self._known.get(key)
    except TypeError as error:
      raise TypeError(
          f'{self!r} compiles for what is not an array among its arguments,'
          f' and so needs it hashable: {error}'
      ) from error
    if found is None:
      attributes = modules.attributes(objects).values()
      _check_no_multi_steps((tree, [*attributes]))
      call = calls.analyse(
          repr(self), self.workers, self._options, named, form, objects, key[1]
      )
      found = self._known[key] = call, self._program(call)
      if len(self._known) == _MANY_PROGRAMS:
        warnings.warn(
            f'{self!r} has compiled {_MANY_PROGRAMS} programs. It compiles for'
            ' every new shape, and for every new value of what is not an array'
            ' among its arguments: a string, a static argument, or another'
            ' object, such as self of a method, by its identity.',
            stacklevel=4,
        )
    return *found, arrays

  def _put(self, call: Call, arrays: list[Any]) -> list[Any]:
    return [
        calls.place(self.workers, x, a) for x, a in zip(arrays, call.arrays)
    ]

  def _program(self, call: Call) -> Any:

    def run(*arrays: Any) -> tuple[list[Any], Returned]:
      return self._run(call, arrays)

    donated = [i for i, a in enumerate(call.arrays) if a.donated]
    if self.workers.relay is not None:
      # ZeroMQ is needed by such workers alone.
      from demo_optax.step.remote import RemoteProgram

      return RemoteProgram(
          self.workers, call, functools.partial(self._run, call), donated
      )
    return jax.jit(run, donate_argnums=donated)

  def _run(
      self, call: Call, arrays: Sequence[Any], index: Any = None
  ) -> tuple[list[Any], Returned]:
    """Runs the step for all workers. Traced by `jax.jit`.

    `index` is the worker's number, if it is a separate program.
    """
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
    arrays = [
        jnp.moveaxis(x, a.axis, 0) if a.role == 'batch' else x
        for x, a in zip(arrays, call.arrays)
    ]
    # A model may name mesh axes inside a worker, also those of one device.
    if workers.relay is not None:
      expected = self._expected(call)
      with lift.context(workers):
        found, returned = self._run_own(call, expected, workers, index, arrays)
    elif workers.mesh is not None and not workers.param_specs.all_sizes:
      found, returned = self._run_on_devices(call, arrays)
    else:
      found, returned = self._run_mapped(call, [
          lift.split_rows(workers, x) if a.role == 'batch' else x
          for x, a in zip(arrays, call.arrays)
      ], workers.spmd_axis_name)
      for r in found:
        if r.is_rows:
          r.value = lift.join_rows(workers, r.value)
    return [results.hold(workers, r, call.axis) for r in found], returned

  def _run_mapped(
      self, call: Call, arrays: list[Any], spmd_axis_name: str | None
  ) -> tuple[list[Result], Returned]:
    """Runs the step under `jax.vmap`, with batches `[workers, rows, ...]`."""

    def one_workers_step(arrays: list[Any]) -> Any:
      index = jax.lax.axis_index(WORKER_AXIS)
      closed, like = jax.make_jaxpr(
          functools.partial(self._results, call, index), return_shape=True
      )(arrays)
      build = jax.tree.structure(like).unflatten
      with _explained(self.workers):
        found, returned = build(core.jaxpr_as_fun(closed)(*arrays))
      self._inspect(call, closed.jaxpr, found, build(closed.jaxpr.outvars)[0])
      on_mesh = spmd_axis_name is not None
      found = inside.settle(found, call.rows, call.axis, on_mesh)
      apart = [r if r.apart else None for r in found]
      return apart, [None if r.apart else r for r in found], returned

    in_axes = [
        0 if a.role in ('batch', 'stacked') else None for a in call.arrays
    ]
    with lift.context(self.workers):
      apart, equal, returned = jax.vmap(
          one_workers_step,
          in_axes=(in_axes,),
          out_axes=(0, None, None),
          axis_name=WORKER_AXIS,
          axis_size=self.workers.count,
          spmd_axis_name=spmd_axis_name,
      )(arrays)
    return [a or e for a, e in zip(apart, equal)], returned

  def _run_on_devices(
      self, call: Call, arrays: Sequence[Any]
  ) -> tuple[list[Result], Returned]:
    """Runs the step under `jax.shard_map`, one worker on each device."""
    workers, roles = self.workers, [a.role for a in call.arrays]
    expected = self._expected(call)
    group = Workers.on_axis(workers.axis_name)

    def one_workers_step(*arrays: Any) -> tuple[list[Result], Returned]:
      index = jax.lax.axis_index(workers.axis_name)
      return self._run_own(call, expected, group, index, arrays)

    own, equal = P(workers.axis_name), P()
    in_specs = [own if r in ('batch', 'stacked') else equal for r in roles]
    return jax.shard_map(
        one_workers_step,
        mesh=workers.mesh,
        in_specs=tuple(in_specs),
        out_specs=([own if r.apart else equal for r in expected], equal),
        # The check knows what is equal on all workers; types do not, of
        # parameters that are differentiated by each worker alone.
        check_vma=False,
    )(*(lift.reshard(workers, x, s) for x, s in zip(arrays, in_specs)))

  def _expected(self, call: Call) -> list[Result]:
    """Returns what the step returns, checked for all workers, not run."""
    leads = {
        'batch': (self.workers.count, call.rows),
        'stacked': (self.workers.count,),
    }
    shapes = [
        a.type.update(shape=(
            *leads[a.role], *a.shape[: a.axis], *a.shape[a.axis + 1 :]
        ))
        if a.role in leads else a.type
        for a in call.arrays
    ]
    run = functools.partial(self._run_mapped, call, spmd_axis_name=None)
    with inside.tracing(checks=True):
      expected, _ = jax.eval_shape(run, shapes)
    return expected

  def _run_own(
      self,
      call: Call,
      expected: Sequence[Result],
      group: Workers,
      index: jax.Array,
      arrays: Sequence[Any],
  ) -> tuple[list[Result], Returned]:
    """Runs the step of one worker, where each is on its own device."""
    own = [
        x[0] if a.role == 'stacked' else x for x, a in zip(arrays, call.arrays)
    ]
    with inside.tracing(group=group):
      found, returned = self._results(call, index, own)
      for r, e in zip(found, expected):
        r.role, r.differs, r.apart = e.role, e.differs, e.apart
      found = inside.settle(found, call.rows, call.axis)
    for r in found:
      if r.role == 'stacked':
        r.value = r.value[None]
    return found, returned

  def _inspect(
      self,
      call: Call,
      jaxpr: core.Jaxpr,
      found: list[Result],
      variables: list[Result],
  ) -> None:
    """Checks what only the program shows, with `variables` as results.

    A metric to which the step does not add must be equal on all workers.
    """
    if self._options.axis is None:
      batches = {
          v: a for v, a in zip(jaxpr.invars, call.arrays) if a.role == 'batch'
      }
      if (batch := programs.scanned(jaxpr, batches)) is not None:
        raise ValueError(
            f'{batch.name} must have its rows along the first axis, but the'
            ' step scans over that axis and exchanges in each turn, as over'
            ' batches [steps, rows, ...]. Say where the rows are:'
            ' demo_optax.data_parallel(workers, batch_axis=1), or batch_axis=0'
            ' if every row is a step.'
        )
    for r, v in zip(found, variables):
      if r.role == 'added' and r.at is not None and not (
          programs.adds(jaxpr, jaxpr.invars[r.at], v.value)
      ):
        r.role = 'state'

  def _results(
      self, call: Call, index: jax.Array, arrays: Sequence[Any]
  ) -> tuple[list[Result], Returned]:
    """Runs the step of worker `index` with the arrays as it has them."""
    own = [
        prng.fold(x, index) if a.role == 'key'
        else jnp.moveaxis(x, 0, a.axis) if a.role == 'batch' else x
        for x, a in zip(arrays, call.arrays)
    ]
    if call.own_params:
      inside.enter(call.own_params, own)
    (args, kwargs), objects = call.form.merge(own, inner=True)
    with _explained(self.workers):
      returned = self._step(*args, **kwargs)
    return results.collect(call, returned, objects, arrays, own)


@contextlib.contextmanager
def _explained(workers: Workers) -> Iterator[None]:
  """Raises errors of JAX and Flax in a step with what to do about them."""
  try:
    yield
  except Exception as error:
    if (remedy := _remedy(error, workers)) is None:
      raise
    raise ValueError(remedy) from error


def _remedy(error: Exception, workers: Workers) -> str | None:
  text = str(error)
  if isinstance(error, NameError) and 'unbound axis name' in text:
    return (
        f'{text.split(". ")[0]}: in a step of data_parallel, of one worker, no'
        ' axis has a name. Remove what averages gradients, which the exchange'
        ' replaces, and for other values write'
        ' demo_optax.over_workers(x, jnp.mean) or jnp.sum in the place of pmean'
        ' or psum.'
    )
  if f"'{workers.axis_name}'" in text and re.search(
      'with_sharding_constraint|reshard|NamedSharding', text
  ):
    return (
        f'{text}\nIn a step of data_parallel arrays are of one worker, and the'
        f' worker axis {workers.axis_name!r} does not cut them. Leave it out'
        ' of what the step and its layers say of shardings: P(None, ...) in the'
        f' place of P({workers.axis_name!r}, ...).'
    )
  if 'different trace level' in text:
    return (
        f'{text.split(", got")[0].split(" (http")[0]}: the step of'
        ' data_parallel, or a transformation in it, changes or differentiates'
        ' a Flax object that it closes over. Make it an argument, as with'
        ' nnx.jit: model, optimizer, metrics and random streams alike.'
    )
  return None


def _as_tuple(x: Any) -> tuple[Any, ...]:
  if x is None:
    return ()
  return (x,) if isinstance(x, int | str) else tuple(x)


def _form_of(x: Any) -> Any:
  if isinstance(x, jax.Array):
    return x.shape, x.dtype
  return np.shape(x), jax.dtypes.result_type(x)


def _name_of(position: int, names: Sequence[str]) -> str:
  """Returns the name of a positional argument."""
  return names[position] if position < len(names) else f'argument {position}'


# From so many on, a step warns that something makes it compile again.
_MANY_PROGRAMS = 20


def _listed(
    step: str,
    parameters: Mapping[str, inspect.Parameter],
    names: Sequence[str],
    argnums: Any,
    argnames: Any,
) -> frozenset[str]:
  """Returns the names of the arguments that two options of a step list."""
  parameter = inspect.Parameter
  kinds = {p.kind for p in parameters.values()}
  has_defaults = any(
      parameters[n].default is not parameter.empty for n in names
  )
  found = set()
  for x in (*_as_tuple(argnums), *_as_tuple(argnames)):
    is_name = isinstance(x, str)
    more = parameter.VAR_KEYWORD if is_name else parameter.VAR_POSITIONAL
    is_known = more in kinds or (
        x in parameters if is_name else -len(names) <= x < len(names)
    )
    if not is_name and x < 0 and (more in kinds or has_defaults):
      raise ValueError(
          f'Positions must be counted from the first argument, got {x}:'
          f' {step} may have fewer or more of them. Give the name.'
      )
    if not is_known:
      raise ValueError(
          f'data_parallel must be given arguments of the step, got {x!r}, but'
          f' the arguments of {step} are {", ".join(parameters)}.'
      )
    found.add(x if isinstance(x, str) else _name_of(x, names))
  return frozenset(found)


def _check_no_multi_steps(tree: Any) -> None:
  def is_one(x: Any) -> bool:
    return isinstance(x, optax.MultiStepsState)

  if any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one))):
    raise ValueError(
        'The optimizer of a data_parallel step must not be in optax.MultiSteps,'
        ' which would exchange in every call and drop all results but the last.'
        ' Take the mean of the gradients of micro-batches in the step, by'
        ' jax.lax.scan or optax.microbatching, and update once.'
    )
