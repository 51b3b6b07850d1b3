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
from demo_optax.step.arguments import Call, Options
from demo_optax.step.roles import Role
from demo_optax.step.runner import Runner
from demo_optax.step.trees import Constant, Form, only_arrays
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
  """Compiles a training step that is written for one worker, for all workers.

  A drop-in for `jax.jit` and `nnx.jit`: the step computes one worker's loss and
  gradient, and its optimizer exchanges.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(0.1, workers=workers)
    >>> params = {'w': jnp.ones(3)}
    >>> opt_state = tx.init(params)
    >>> def loss_fn(params, x):
    ...   return jnp.mean((x @ params['w']) ** 2)
    >>> @demo_optax.data_parallel(workers, batch_argnames='x')
    ... def train_step(params, opt_state, x):
    ...   loss, grads = jax.value_and_grad(loss_fn)(params, x)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state, loss
    >>> for step in range(5):
    ...   params, opt_state, loss = train_step(params, opt_state, jnp.eye(8, 3))
    >>> print(f'{loss:.2f}')
    0.33

  Batches are cut; all else is shared, Flax objects too (updated in place), but
  typed PRNG keys and momentum. Real numbers and `nnx.BatchStat` become the
  mean over workers, and `nnx.metrics.Average` adds up all. Other results must
  be equal on all workers: see `out_batch` and `over_workers`.

  Args:
    workers: `Workers.simulated`, `on_mesh` or `remote`.
    batch_argnames: the batches, by name: NumPy arrays, the same in all
      processes, or global `jax.Array`s. With `()` the step draws its batch.
    batch_argnums: the same, by position.
    batch_axis: where the rows are, 0 by default, or by argument.
    static_argnums: as in `jax.jit`; what is no array is static anyway.
    static_argnames: the same, by name.
    donate_argnums: as in `jax.jit`.
    donate_argnames: the same, by name.

  Returns:
    A decorator.

  Raises:
    TypeError: no argument says which are batches.
    ValueError: rows that do not divide, or a result that workers differ in.
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
        f' neither for {_label(step)}{inspect.signature(step)}. Name the'
        " arguments whose rows are cut over the workers, batch_argnames='x', or"
        ' give batch_argnames=() if the step draws its batch by a random key.'
      )
    listed = functools.partial(_listed, step)
    listed([*batch_axis] if isinstance(batch_axis, Mapping) else [])
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
    self._signature = inspect.signature(step)
    # Calls and their programs, by all that is static.
    self._known: dict[Any, tuple[Call, Any]] = {}
    self._has_run = False

  def __get__(
    self,
    instance: Any,
    owner: Any = None,
  ) -> Any:
    """Binds the step to an object whose method it is, as functions do."""
    return self if instance is None else functools.partial(self, instance)

  def __repr__(self) -> str:
    return f'data_parallel({self.workers})({_label(self._step)})'

  def __call__(
    self,
    *args: Any,
    **kwargs: Any,
  ) -> Any:
    """Runs the step; see `data_parallel`."""
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
      # Once: later on, processes may differ in flags that are compiled for.
      if not self._has_run and jax.process_count() > 1:
        agreement.check(self.workers, call.described)
        with traced_configs() as configs:
          program.trace(*arrays)
        agreement.check(self.workers, agreement.describe(configs))
      self._has_run = True
      values, returned = program(*arrays)
      return returned.form.merge(values, inner=False)[0]

  def lower(
    self,
    *args: Any,
    **kwargs: Any,
  ) -> Any:
    """Lowers the step, as `jax.jit(step).lower` does, for arrays or shapes."""
    with modules.in_transform():
      _, program, arrays = self._open(args, kwargs)
      return program.lower(*arrays)

  def followed(
    self,
    *args: Any,
    **kwargs: Any,
  ) -> Iterator[Any]:
    """Follows the workers: see `demo_optax.remote.follow`."""
    with modules.in_transform():
      call, program, arrays = self._open(args, kwargs)
      program.trace(*arrays)
    for at, behind, current in program.follow(*arrays):
      with modules.in_transform():
        given, _, _ = call.bind(current)
      yield at, behind, tuple(given)

  def _open(
    self,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
  ) -> tuple[Call, Any, list[Any]]:
    """Returns the analysed call, its program, and its arrays, placed."""
    names = []
    for position in range(len(args)):
      # One too many: Python says so, once the step is called.
      name = arguments.name_at(self._signature, position)
      names.append(name or str(position))
    names += kwargs
    given = [*args, *kwargs.values()]
    for number, name in enumerate(names):
      if name in self._options.static:
        given[number] = Constant(given[number], type(given[number]))
    objects: list[object] = []
    values = only_arrays(given, objects)
    arrays, treedef = jax.tree.flatten(values)
    variables, structure = modules.split(objects)
    form = Form(treedef, structure)
    arrays += variables
    # All that a program is for: structure, constants, shapes.
    key = tuple(names), tuple(kwargs), form, tuple(map(_type_of, arrays))
    if key not in self._known:
      call = arguments.analyse(
        self.workers,
        self._options,
        [*zip(names, values)],
        [*kwargs],
        form,
        objects,
        variables,
      )
      self._known[key] = call, self._program(call)
      if len(self._known) == 20:
        warnings.warn(
          f'{self!r} has compiled 20 programs. It compiles for every new'
          ' shape, and for every new value of what is not an array among its'
          ' arguments: a string, a static argument, or another object, such'
          ' as self of a method, by its identity.',
          stacklevel=3,
        )
    call, program = self._known[key]
    place = functools.partial(arguments.place, self.workers)
    return call, program, [*map(place, arrays, call.arrays)]

  def _program(self, call: Call) -> Any:
    run = Runner(self.workers, self._step, call)
    donated = []
    for number, array in enumerate(call.arrays):
      if array.keys[0] in self._options.donated:
        donated.append(number)
    if self.workers.relay is not None:
      # ZeroMQ is needed by such workers alone.
      from demo_optax.remote.program import RemoteProgram

      shared = []
      for number, role in enumerate(call.roles):
        if role is Role.SHARED:
          shared.append(number)
      copies = {number: own for number, (_, *own) in call.own_params.items()}
      labels = [array.name for array in call.arrays]
      return RemoteProgram(self.workers, run, labels, shared, copies, donated)
    return jax.jit(run, donate_argnums=donated)


def _type_of(x: Any) -> tuple[tuple[int, ...], Any]:
  if isinstance(x, jax.Array):
    return x.shape, x.dtype
  return np.shape(x), jax.dtypes.result_type(x)


def _label(step: Callable[..., Any]) -> str:
  return getattr(step, '__name__', repr(step))


def _listed(
  step: Callable[..., object],
  *listed: object,
) -> frozenset[str]:
  """Returns the names that a step's options list by name or position."""
  signature = inspect.signature(step)
  known, takes_any_name = set(), False
  for parameter in signature.parameters.values():
    takes_any_name |= parameter.kind is parameter.VAR_KEYWORD
    if parameter.kind is not parameter.VAR_POSITIONAL:
      known.add(parameter.name)
  names = set()
  for argument in jax.tree.leaves(listed):
    name: str | None = argument
    if not isinstance(argument, str):
      name = arguments.name_at(signature, argument)
    elif argument not in known and not takes_any_name:
      name = None
    if name is None:
      raise ValueError(
        f'data_parallel must be given arguments of the step, got {argument!r}'
        f' for {_label(step)}{signature}. Give names, or positions counted from'
        ' the first argument.'
      )
    names.add(name)
  return frozenset(names)
