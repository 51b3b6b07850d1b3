"""Runs one worker's training step for all workers."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from demo_optax import _checks
from demo_optax.exchange import agreement
from demo_optax.exchange.algorithm import traced_configs
from demo_optax.step import arguments, modules
from demo_optax.step.arguments import Call, Constant, Options
from demo_optax.step.roles import Role
from demo_optax.step.runner import Runner
from demo_optax.workers import Workers


def data_parallel(
  workers: Workers,
  *,
  batch_argnames: str | Sequence[str] | None = None,
  batch_argnums: int | Sequence[int] | None = None,
  batch_axis: int | Mapping[str, int] | None = None,
  static_argnums: int | Sequence[int] = (),
  static_argnames: str | Sequence[str] = (),
  donate_argnums: int | Sequence[int] = (),
  donate_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], 'DataParallelStep']:
  r"""Compiles a training step that is written for one worker, for all of them.

  A drop-in for `jax.jit` and `nnx.jit` on a training step: the step computes
  one worker's loss and gradient, and its optimizer exchanges. The caller names
  the arguments that are batches; all others are shared by the workers.

  ============================  =======================  =======================
  array                         in the step              returned or changed
  ============================  =======================  =======================
  a batch                       this worker's rows       joined, by `out_batch`
  parameters, optimizer state   as they are              equal, or an error
  momentum in the state         the worker's own         each worker's
  typed PRNG keys               folded with the number   worker 0's
  `nnx.BatchStat`               as they are              the mean of finite ones
  `nnx.metrics.Average`         as they are              all that workers added
  real numbers                  as they are              the mean of finite ones
  ============================  =======================  =======================

  Parameters and states may be trees, Flax objects (updated in place),
  dataclasses or Equinox modules. Keys, also those in Flax objects, are
  `jax.random.key`; each worker folds its number into them. Anything else that
  a step returns must be equal on all workers: `out_batch(x)` joins rows, and
  `over_workers(x, jnp.sum)` makes one value of all.

  On a mesh, arguments are put where they belong. Several processes give the
  same NumPy batch each, or a global `jax.Array`
  (`jax.make_array_from_process_local_data`).

  Args:
    workers: `Workers.simulated`, `on_mesh`, or `remote`, where each program
      passes its own batch.
    batch_argnames: names of the arguments to cut along their axis of rows.
      With `()`, for a step that draws its batch, workers differ by their random
      keys. Either this or `batch_argnums` must be given.
    batch_argnums: the same, by position.
    batch_axis: the axis of the rows, by default the first one, or one for each
      argument, by name. Rows of results have that of the first batch.
    static_argnums: as in `jax.jit`. Functions, strings and other objects that
      are not arrays are static wherever they occur.
    static_argnames: the same, by name.
    donate_argnums: as in `jax.jit`: model and optimizer of a training loop.
    donate_argnames: the same, by name.

  Returns:
    A decorator. The decorated step is called as before; `lower` of it returns
    the lowered program for its arguments.

  Raises:
    TypeError: no argument says which are batches.
    ValueError: when called, rows that do not divide among the workers, or a
      result that differs between workers.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(0.1, workers=workers)
    >>> params = {'w': jnp.ones(3)}
    >>> opt_state = tx.init(params)
    >>> @demo_optax.data_parallel(workers, batch_argnames='x')
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
      f'workers must be Workers.on_mesh, remote or simulated, got {workers},'
      ' those of an axis that you map yourself. Call the step in your own'
      ' shard_map, pmap or vmap.'
    )

  def decorate(step: Callable[..., Any]) -> DataParallelStep:
    if batch_argnames is None and batch_argnums is None:
      raise TypeError(
        'data_parallel must be given batch_argnames or batch_argnums, got'
        f' neither for {_label(step)}({", ".join(_parameters(step))}). Name the'
        " arguments whose rows are cut over the workers, batch_argnames='x', or"
        ' give batch_argnames=() if the step draws its batch by a random key.'
      )
    listed = functools.partial(_listed, step)
    listed((), [*batch_axis] if isinstance(batch_axis, Mapping) else ())
    options = Options(
      batches=listed(batch_argnums, batch_argnames),
      static=listed(static_argnums, static_argnames),
      donated=listed(donate_argnums, donate_argnames),
      axis=batch_axis,
    )
    return DataParallelStep(step, workers, options)

  return decorate


class DataParallelStep:
  """A step that `data_parallel` has decorated; called like the step itself."""

  def __init__(
    self,
    step: Callable[..., Any],
    workers: Workers,
    options: Options,
  ):
    functools.update_wrapper(self, step)
    self.workers, self._step, self._options = workers, step, options
    self._names = _positional(step)
    self._place = functools.partial(arguments.place, workers)
    # Calls and their programs, by all that is static.
    self._known: dict[Any, tuple[Call, Any]] = {}
    self._has_run = False

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    """Binds the step to an object whose method it is, as functions do."""
    return self if instance is None else functools.partial(self, instance)

  def __repr__(self) -> str:
    return f'data_parallel({self.workers})({_label(self._step)})'

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
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
      return program.lower(*map(self._place, arrays, call.arrays))

  def followed(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Follows the workers: see `demo_optax.remote.follow`."""
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
    arrays = [*map(self._place, arrays, call.arrays)]
    for at, behind, current in program.follow(*arrays):
      with modules.in_transform():
        (found, _), _ = call.form.merge(current, inner=True)
      yield at, behind, found

  def _open(
    self,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
  ) -> tuple[Call, Any, list[Any]]:
    """Returns the analysed call, its program, and its arrays."""
    names = [_name_of(i, self._names) for i in range(len(args))]
    given = [*zip(names, args), *sorted(kwargs.items())]
    values = []
    for name, x in given:
      is_static = name in self._options.static
      values.append(Constant(x, type(x)) if is_static else x)
    objects: list[object] = []
    values = arguments.only_arrays(values, objects)
    named = [(name, x) for (name, _), x in zip(given, values)]
    tree = tuple(values[: len(args)]), dict(named[len(args) :])
    arrays, treedef = jax.tree.flatten(tree)
    variables, structure = modules.split(objects)
    form = arguments.Form(treedef, structure)
    arrays += variables
    key = form, tuple(map(_form_of, arrays))
    found = self._known.get(key)
    if found is None:
      call = arguments.analyse(
        repr(self),
        self.workers,
        self._options,
        named,
        form,
        objects,
        variables,
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
    scans_rows = self._options.axis is not None
    run = Runner(self.workers, self._step, call, scans_rows)
    names = self._options.donated
    donated = [i for i, a in enumerate(call.arrays) if a.keys[0] in names]
    if self.workers.relay is not None:
      # ZeroMQ is needed by such workers alone.
      from demo_optax.remote.program import RemoteProgram

      shared = [n for n, a in enumerate(call.arrays) if a.role is Role.SHARED]
      copies = {n: own for n, (_, *own) in call.own_params.items()}
      labels = [array.name for array in call.arrays]
      return RemoteProgram(self.workers, run, labels, shared, copies, donated)
    return jax.jit(run, donate_argnums=donated)


def _form_of(x: Any) -> Any:
  if isinstance(x, jax.Array):
    return x.shape, x.dtype
  return np.shape(x), jax.dtypes.result_type(x)


def _label(step: Callable[..., Any]) -> str:
  return getattr(step, '__name__', repr(step))


def _parameters(step: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
  return inspect.signature(step).parameters


def _positional(step: Callable[..., Any]) -> list[str]:
  return [
    name
    for name, p in _parameters(step).items()
    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]


def _name_of(position: int, names: Sequence[str]) -> str:
  return names[position] if position < len(names) else f'argument {position}'


def _listed(
  step: Callable[..., object],
  argnums: int | Sequence[int] | None,
  argnames: str | Sequence[str] | None,
) -> frozenset[str]:
  """Returns the names of the arguments that two options of a step list."""
  parameters, names = _parameters(step), _positional(step)
  kinds = {parameter.kind for parameter in parameters.values()}
  takes_more = inspect.Parameter.VAR_POSITIONAL in kinds
  takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
  found = set()
  for x in jax.tree.leaves((argnums, argnames)):
    is_name = isinstance(x, str)
    is_known = is_name and (x in parameters or takes_any_name)
    if not is_name and x >= 0:
      is_known = x < len(names) or takes_more
    if not is_known:
      raise ValueError(
        f'data_parallel must be given arguments of the step, got {x!r}, but'
        f' the arguments of {_label(step)} are {", ".join(parameters)}. Give'
        ' names, or positions counted from the first argument.'
      )
    found.add(x if is_name else _name_of(x, names))
  return frozenset(found)
