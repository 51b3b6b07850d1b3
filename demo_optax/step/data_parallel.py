"""Runs one worker's training step for all workers."""

import dataclasses
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from demo_optax import _checks
from demo_optax._paths import Keys, dotted, is_stacked, path_keys
from demo_optax.compressors.compressor import Frozen
from demo_optax.demo import layouts_in
from demo_optax.exchange.algorithm import traced_configs
from demo_optax.numerics import prng
from demo_optax.per_worker import AverageState
from demo_optax.step import agreement, programs
from demo_optax.step import nnx as modules
from demo_optax.workers import Workers, checks, inside
from demo_optax.workers.inside import WORKER_AXIS, OwnParam, Result


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
  computes one worker's loss and gradient from one worker's rows, and its
  optimizer, which contains `scale_by_demo`, exchanges:

  .. math:: g_i = \nabla_x f(x; B_i), \qquad x \leftarrow x + u(g_1, \dots, g_N)

  What the step sees and what comes of it:

  ============================  ================================================
  argument                      in the step
  ============================  ================================================
  Flax NNX objects              one worker's; updated in place afterwards
  parameters, optimizer state,  one worker's, of which the momentum is its own
  `TrainState`, dataclasses,
  Equinox modules
  PRNG keys (see `keys`)        folded with the worker's number; so are the
                                random streams of NNX objects
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

  Which arguments are batches is told from what they are: an argument is shared
  if it holds a Flax object, a dataclass or an optimizer state, or a tree with
  the structure of such a state's parameters. `batch_argnums` says otherwise.

  On a mesh, arguments are put where they belong at the first call: batches are
  spread over the worker axis, momentum lies with its worker, parameters where
  `param_specs` says. Several processes give the same NumPy batch each, or a
  global `jax.Array` (`jax.make_array_from_process_local_data`).

  Args:
    workers: `Workers.simulated` or `Workers.on_mesh`.
    batch_argnums: positions of the arguments to cut; no others are cut then.
      With `()` none is cut: every array is shared, and workers differ by their
      random keys, as for a step that draws its batch.
    batch_argnames: the same, by name.
    batch_axis: the axis of the rows, by default the first one: an integer, or
      one for each argument, by name. Rows of results have the axis of the first
      batch.
    keys: paths of the legacy PRNG keys, `uint32[..., 2]`, among the shared
      arrays, such as `'state.seed_generator.0'`, or of what holds them; `()`
      where all are data. By default those are keys whose argument's or last
      name has the word key, rng, prng or seed, and others are an error.
    static_argnums: positions of arguments to compile for, as in `jax.jit`.
      Functions, strings and other objects that are not arrays are static
      wherever they occur.
    static_argnames: the same, by name.
    donate_argnums: positions of arguments whose arrays may be overwritten, as
      in `jax.jit`: model and optimizer of a training loop.
    donate_argnames: the same, by name.

  Returns:
    A decorator. The decorated step is called as before; `lower` of it returns
    the lowered program for its arguments.

  Raises:
    TypeError: `workers` is something else, or `Workers.on_axis`.
    ValueError: when called: no batch among the arguments, one that does not
      divide, or batches of different lengths; a result that differs between
      workers and must not.

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
    >>> print(loss.round(3), params['w'].round(3))
    0.135 [0.5 0.5 0.5]

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_: gradients are not synchronised.
  """
  _checks.check_type(
      'workers', workers, Workers, 'demo_optax.Workers.simulated(4)'
  )
  if not workers.stacked_gradients:
    raise TypeError(
        f'{workers} are the workers of an axis that you map yourself: call the'
        ' step in your own shard_map, pmap or vmap. data_parallel needs'
        ' Workers.on_mesh or Workers.simulated.'
    )
  options = _Options(
      None if batch_argnums is None else _as_tuple(batch_argnums),
      None if batch_argnames is None else _as_tuple(batch_argnames),
      batch_axis,
      None if keys is None else _as_tuple(keys),
      _as_tuple(static_argnums),
      _as_tuple(static_argnames),
      _as_tuple(donate_argnums),
      _as_tuple(donate_argnames),
  )
  return lambda step: DataParallelStep(step, workers, options)


def _as_tuple(x: Any) -> tuple[Any, ...]:
  return (x,) if isinstance(x, int | str) else tuple(x)


@dataclasses.dataclass(frozen=True)
class _Options:
  """What the caller of `data_parallel` says of the step's arguments."""

  batch_argnums: tuple[int, ...] | None
  batch_argnames: tuple[str, ...] | None
  batch_axis: int | Mapping[str, int] | None
  keys: tuple[str, ...] | None
  static_argnums: tuple[int, ...]
  static_argnames: tuple[str, ...]
  donate_argnums: tuple[int, ...]
  donate_argnames: tuple[str, ...]


class DataParallelStep:
  """A step that `data_parallel` has decorated; called like the step itself.

  Attributes:
    workers: the workers that it runs for.
  """

  def __init__(
      self, step: Callable[..., Any], workers: Workers, options: _Options
  ):
    functools.update_wrapper(self, step)
    self.workers = workers
    self._step, self._options = step, options
    try:
      parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
      self._names: list[str] = []
    else:
      self._names = _positional(parameters)
      name = getattr(step, '__name__', str(step))
      _check_options(name, parameters, options)
    self._calls: dict[Any, _Call] = {}
    self._has_run = False
    self._jitted = jax.jit(self._run, static_argnums=0, donate_argnums=1)

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    """Binds the step to an object whose method it is, as functions do."""
    return self if instance is None else functools.partial(self, instance)

  def __repr__(self) -> str:
    name = getattr(self._step, '__name__', repr(self._step))
    return f'data_parallel({self.workers})({name})'

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the step; see `data_parallel`."""
    with modules.in_transform():
      return self._call(args, kwargs)

  def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Once: later on, processes may differ in flags that are compiled for.
    is_first = not self._has_run and jax.process_count() > 1
    call, objects, leaves = self._open(args, kwargs, compare=is_first)
    if is_first:
      with traced_configs() as configs:
        self._jitted.trace(call, *call.split_donated(leaves))
      agreement.check_exchanges(self.workers, configs)
    self._has_run = True
    returned, changed = self._jitted(call, *call.split_donated(leaves))
    modules.update_objects(objects, changed)
    modules.change_attributes(objects, returned.attributes)
    return returned.rebuild(objects, changed)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Lowers the step for these arguments, as `jax.jit(step).lower` does.

    Args:
      *args: arguments of the step, or their shapes: any array may be a
        `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of the step.

    Returns:
      A `jax.stages.Lowered`; `lowered.compile().as_text()` names what is sent.
    """
    call, _, leaves = self._open(args, kwargs)
    return self._jitted.lower(call, *call.split_donated(leaves))

  def _open(
      self,
      args: tuple[Any, ...],
      kwargs: dict[str, Any],
      compare: bool = False,
  ) -> tuple['_Call', list[Any], list[Any]]:
    """Returns the call's static part, its NNX objects, and all arrays.

    Args:
      args: of the step.
      kwargs: of the step.
      compare: whether to compare the arrays' shapes with other processes'.
    """
    objects: list[Any] = []
    arguments, leaves = [], []
    for position, value in enumerate(args):
      argument, arrays = self._argument(position, len(args), value, objects)
      arguments.append(argument)
      leaves += arrays
    for name, value in kwargs.items():
      argument, arrays = self._argument(name, len(args), value, objects)
      arguments.append(argument)
      leaves += arrays
    opened = modules.open_objects(objects)
    leaves += opened.leaves
    shapes = tuple((np.shape(x), jax.dtypes.result_type(x)) for x in leaves)
    key = (tuple(arguments), opened.structure, shapes)
    try:
      call = self._calls.get(key)
    except TypeError as error:
      raise TypeError(
          f'{self!r} compiles for what is not an array among its arguments,'
          f' and so needs it hashable: {error}'
      ) from error
    if call is None:
      _check_no_multi_steps((args, kwargs, modules.attributes(objects)))
      call = _Call.of(self, arguments, opened, leaves)
      self._calls[key] = call
      if len(self._calls) == _MANY_PROGRAMS:
        warnings.warn(
            f'{self!r} has compiled {_MANY_PROGRAMS} programs. It compiles for'
            ' every new shape, and for every new value of what is not an array'
            ' among its arguments: a string, a static argument, or another'
            ' object, such as self of a method, by its identity.',
            stacklevel=5,
        )
    if compare:
      agreement.check(self.workers, {
          'arguments of the step': ', '.join(
              f'{dotted(keys)} {jax.dtypes.result_type(x)}{list(np.shape(x))}'
              for keys, x in zip(call.keys, leaves)
          )
      })
    put = self.workers.put(call.keys, call.roles, call.axes, leaves)
    modules.update_objects(objects, put[len(put) - len(opened.leaves) :])
    return call, objects, put

  def _argument(
      self, key: int | str, num_args: int, value: Any, objects: list[Any]
  ) -> tuple['_Argument', list[Any]]:
    """Returns an argument's static part and its arrays; appends NNX objects."""
    if isinstance(key, int):
      known = key < len(self._names)
      name, number = self._names[key] if known else f'argument {key}', key
    else:
      name = key
      number = self._names.index(key) if key in self._names else -1

    def listed(numbers: Any, names: Any) -> bool:
      positions = [n + num_args if n < 0 else n for n in numbers or ()]
      return number in positions or name in (names or ())

    o = self._options
    if listed(o.static_argnums, o.static_argnames):
      flat, treedef = [((), value)], jax.tree.structure(0)
      fixed: list[Any] = [_Constant(value)]
      kinds: list[Any] = [None]
    else:
      flat, treedef = jax.tree_util.tree_flatten_with_path(
          value, is_leaf=modules.is_object
      )
      fixed, kinds = [], modules.leaf_kinds(value)
      for (_, leaf), is_array in zip(flat, modules.array_leaves(value)):
        if modules.is_object(leaf):
          fixed.append(_Object(_number_of(leaf, objects)))
        else:
          fixed.append(None if is_array else _Constant(leaf))
    automatic = o.batch_argnums is None and o.batch_argnames is None
    argument = _Argument(
        key=key,
        name=name,
        treedef=treedef,
        fixed=tuple(fixed),
        paths=tuple(p for (p, _), f in zip(flat, fixed) if f is None),
        kinds=tuple(k for k, f in zip(kinds, fixed) if f is None),
        is_state=modules.holds_state(value),
        params=_params_of_states(value),
        is_batch=(
            None if automatic else listed(o.batch_argnums, o.batch_argnames)
        ),
        is_donated=listed(o.donate_argnums, o.donate_argnames),
    )
    arrays = [x for (_, x), f in zip(flat, fixed) if f is None]
    if any(type(x) is int for x in arrays) and (
        argument.is_state or any(map(is_stacked, argument.keys))
    ):
      arrays = list(map(_counter, arrays))
    return argument, arrays

  def _run(
      self, call: '_Call', donated: list[Any], kept: list[Any]
  ) -> tuple['_Returned', list[Any]]:
    """Runs the step for all workers. Traced by `jax.jit`."""
    workers = self.workers
    leaves = [
        jnp.moveaxis(x, axis, 0) if role == 'batch' else x
        for x, role, axis in zip(
            call.join_donated(donated, kept), call.roles, call.axes
        )
    ]
    for name, x, role in zip(call.names, leaves, call.roles):
      if role == 'batch':
        checks.check_on_one_device(f'The batch {name}', x, workers)
      elif role == 'stacked' and jnp.shape(x)[:1] != (workers.count,):
        raise ValueError(
            f'{name} has shape {jnp.shape(x)}, but {workers} has'
            f' {workers.count}, each with an entry of its own along the first'
            ' axis. Make the state with tx.init under the same workers, or use'
            ' demo_optax.checkpoint.resize_workers.'
        )
    if workers.mesh is not None and not workers.param_specs.has_axes:
      values, results = self._run_on_devices(call, leaves)
    else:
      values, results = self._run_mapped(call, [
          workers.split(x) if role == 'batch' else x
          for x, role in zip(leaves, call.roles)
      ], workers.spmd_axis_name)
      values = [
          workers.join(x) if a and result.role == 'output' else x
          for x, a, result in zip(values, results.apart, results.leaves)
      ]
    values = [
        jnp.moveaxis(x, 0, call.axis) if a and result.role == 'output' else x
        for x, a, result in zip(values, results.apart, results.leaves)
    ]
    values = workers.hold(
        [r.keys for r in results.leaves],
        [r.role for r in results.leaves],
        values,
    )
    returned = values[: results.num_returned]
    return (
        _Returned(
            returned, results.treedef, results.fixed, results.attributes
        ),
        values[results.num_returned :],
    )

  def _run_mapped(
      self, call: '_Call', leaves: list[Any], spmd_axis_name: str | None
  ) -> tuple[list[Any], '_Results']:
    """Runs the step under `jax.vmap`, with batches `[workers, rows, ...]`."""
    traced: list[_Results] = []

    def one_workers_step(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
      index = jax.lax.axis_index(WORKER_AXIS)
      inside.take_is_nested()
      results = self._inspected(
          call, leaves, self._results(call, index, leaves)
      )
      values, apart, differs = inside.settle(
          results.leaves, self.workers, call.rows, call.axis
      )
      traced.append(
          dataclasses.replace(results, apart=apart, differs=differs)
      )
      return (
          [x for x, a in zip(values, apart) if a],
          [x for x, a in zip(values, apart) if not a],
      )

    in_axes = [
        0 if role in ('batch', 'stacked') else None for role in call.roles
    ]
    with self.workers.context():
      apart, equal = jax.vmap(
          one_workers_step,
          in_axes=(in_axes,),
          out_axes=(0, None),
          axis_name=WORKER_AXIS,
          axis_size=self.workers.count,
          spmd_axis_name=spmd_axis_name,
      )(leaves)
    (results,) = traced
    return _interleave(results.apart, apart, equal), results

  def _run_on_devices(
      self, call: '_Call', leaves: list[Any]
  ) -> tuple[list[Any], '_Results']:
    """Runs the step under `jax.shard_map`, one worker on each device."""
    workers = self.workers
    shapes = [
        jax.ShapeDtypeStruct(
            (workers.count, call.rows, *x.shape[1:]), x.dtype
        )
        if role == 'batch'
        else jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.result_type(x))
        for x, role in zip(leaves, call.roles)
    ]
    checked: list[_Results] = []

    def check(leaves: list[Any]) -> None:
      checked.append(self._run_mapped(call, leaves, None)[1])

    with inside.checking():
      jax.eval_shape(check, shapes)
    (expected,) = checked
    traced: list[_Results] = []
    group = Workers.on_axis(workers.axis_name)

    def one_workers_step(*leaves: Any) -> list[Any]:
      index = jax.lax.axis_index(workers.axis_name)
      own = [
          x[0] if role == 'stacked' else x
          for x, role in zip(leaves, call.roles)
      ]
      with inside.on_own_device(group):
        results = self._results(call, index, own)
        values = inside.settle_on_own_device(
            [
                dataclasses.replace(r, role=e.role)
                for r, e in zip(results.leaves, expected.leaves)
            ],
            expected.differs,
            group,
            call.axis,
        )
      traced.append(dataclasses.replace(
          results, apart=expected.apart, differs=expected.differs
      ))
      return [
          x[None] if r.role == 'stacked' else x
          for x, r in zip(values, results.leaves)
      ]

    own, equal = P(workers.axis_name), P()
    in_specs = [own if r in ('batch', 'stacked') else equal for r in call.roles]
    values = jax.shard_map(
        one_workers_step,
        mesh=workers.mesh,
        in_specs=tuple(in_specs),
        out_specs=[own if a else equal for a in expected.apart],
        # What is equal on all workers was told by the check; types cannot say
        # it of parameters that are differentiated by each worker alone.
        check_vma=False,
    )(*workers.reshard(leaves, in_specs))
    return values, traced[-1]

  def _inspected(
      self, call: '_Call', leaves: list[Any], results: '_Results'
  ) -> '_Results':
    """Checks what only the program shows, where there is something to check.

    A metric to which the step does not add must be equal on all workers.
    """
    added = [j for j, r in enumerate(results.leaves) if r.role == 'added']
    is_nested = inside.take_is_nested() and self._options.batch_axis is None
    if not added and not is_nested:
      return results

    def values(leaves: list[Any]) -> list[Any]:
      index = jax.lax.axis_index(WORKER_AXIS)
      found = self._results(call, index, leaves).leaves
      return [jnp.asarray(r.value) for r in found]

    with inside.inspecting():
      jaxpr = jax.make_jaxpr(values)(leaves).jaxpr
    if is_nested:
      batches = {
          v: i for i, v in enumerate(jaxpr.invars) if call.roles[i] == 'batch'
      }
      if (number := programs.scanned(jaxpr, batches)) is not None:
        raise ValueError(
            f'{call.names[number]} must have its rows along the first axis, but'
            ' the step scans over that axis and exchanges in each turn, as over'
            ' batches [steps, rows, ...]. Say where the rows are:'
            ' demo_optax.data_parallel(workers, batch_axis=1), or batch_axis=0'
            ' if every row is a step.'
        )
    for j in added:
      r = results.leaves[j]
      (number,) = (i for i, x in enumerate(leaves) if x is r.old)
      if not programs.adds(jaxpr, jaxpr.invars[number], jaxpr.outvars[j]):
        results.leaves[j] = dataclasses.replace(r, role='state', old=None)
    return results

  def _results(
      self, call: '_Call', index: jax.Array, leaves: list[Any]
  ) -> '_Results':
    """Runs the step of worker `index` with the arrays as it has them."""
    own = [
        prng.fold(x, index) if role == 'key'
        else jnp.moveaxis(x, 0, axis) if role == 'batch'
        else x
        for x, role, axis in zip(leaves, call.roles, call.axes)
    ]
    if call.own_params:
      inside.enter(call.own_params, own)
    args, kwargs, objects = call.rebuild(own)
    attributes = modules.static_attributes(objects)
    try:
      returned = self._step(*args, **kwargs)
    except Exception as error:
      if (remedy := _remedy(error, self.workers)) is None:
        raise
      raise ValueError(remedy) from error
    results = call.results(returned, objects, leaves, own)
    return dataclasses.replace(
        results, attributes=modules.changed_attributes(attributes, objects)
    )


def _remedy(error: Exception, workers: Workers) -> str | None:
  """Returns what to do about an error of JAX or Flax in a step, if known."""
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


# From so many on, a step warns that something makes it compile again.
_MANY_PROGRAMS = 20

# A call -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Constant:
  """A leaf that is not an array, and is part of the compilation key."""

  value: Any

  def __eq__(self, other: object) -> bool:
    return (
        isinstance(other, _Constant)
        and type(self.value) is type(other.value)
        and bool(self.value == other.value)
    )

  def __hash__(self) -> int:
    return hash(self.value)


@dataclasses.dataclass(frozen=True)
class _Object:
  """A leaf that is an NNX object: its number among those of the call."""

  number: int


@dataclasses.dataclass(frozen=True)
class _Variable:
  """A leaf that is an array of an NNX object: its number among those.

  A step that returns `nnx.state(model)` returns what it has changed in place.
  """

  number: int


@dataclasses.dataclass(frozen=True)
class _Argument:
  """The static part of an argument.

  Attributes:
    key: its position, or its name if it was given by name.
    name: for error messages.
    treedef: its structure, with NNX objects as leaves.
    fixed: for each leaf its constant or object, or None for an array.
    paths: of the arrays.
    kinds: of the arrays, what becomes of each: see `flax.leaf_kinds`.
    is_state: whether it is shared by its kind: it holds Flax objects or
      variables, or dataclasses.
    params: paths and shapes of the parameters of the exchanges in it.
    is_batch: whether the user says that it is a batch; None: not said.
    is_donated: whether its arrays may be overwritten.
  """

  key: int | str
  name: str
  treedef: Any
  fixed: tuple[Any, ...]
  paths: tuple[Any, ...]
  kinds: tuple[Any, ...]
  is_state: bool
  params: tuple[Any, ...]
  is_batch: bool | None
  is_donated: bool

  @property
  def keys(self) -> list[Keys]:
    """Returns the arrays' paths below the argument, as plain keys."""
    return [path_keys(path) for path in self.paths]

  def rebuild(self, arrays: Iterator[Any], objects: Sequence[Any]) -> Any:
    """Returns the argument with these arrays and NNX objects."""
    return self.treedef.unflatten(_rebuilt(self.fixed, arrays, objects))


@dataclasses.dataclass(frozen=True)
class _Results:
  """What a step returns, and the NNX variables after it.

  Attributes:
    leaves: all of them, those returned first.
    num_returned: how many are returned.
    treedef: structure of what is returned, with NNX objects as leaves.
    fixed: for each returned leaf its constant or object, or None for an array.
    attributes: static attributes of NNX objects that the step has changed.
    apart: which leaves keep a worker axis.
    differs: which leaves differ between workers.
  """

  leaves: list[Result]
  num_returned: int
  treedef: Any
  fixed: tuple[Any, ...]
  attributes: list[Any] = dataclasses.field(default_factory=list)
  apart: list[bool] = dataclasses.field(default_factory=list)
  differs: list[bool] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
  """The static part of a call. Equal calls share one, and its program.

  Attributes:
    arguments: the arguments in their order.
    objects: the NNX objects.
    names: of all arrays, those of the arguments and then those of NNX objects.
    keys: their paths.
    roles: 'batch', 'stacked', 'key' or 'shared'.
    donated: which may be overwritten.
    axes: of the rows of each array that is cut; else 0.
    axis: of the rows in results.
    rows: length of one worker's batch; None if nothing is cut.
    states: structures of the shared arguments, each with the number of its
      first array; what is returned with the same structure is the argument's
      next value.
    own_params: the parameters of which each worker has its own.
  """

  arguments: list[_Argument]
  objects: Any
  names: list[str]
  keys: list[Keys]
  roles: list[str]
  donated: list[bool]
  axes: list[int]
  axis: int
  rows: int | None
  states: list[tuple[Any, int]]
  own_params: list[OwnParam]

  @staticmethod
  def of(
      step: DataParallelStep,
      arguments: list[_Argument],
      opened: Any,
      leaves: Sequence[Any],
  ) -> '_Call':
    """Decides about every array of a call."""
    names, keys, roles, donated, states, axes = [], [], [], [], [], []
    rest = iter(leaves)
    arrays = [[next(rest) for _ in a.paths] for a in arguments]
    for argument, is_shared, own in zip(
        arguments, _shared(step, arguments, arrays), arrays
    ):
      stacked = [is_stacked(k) for k in argument.keys]
      for path, k, has_axis, kind, x in zip(
          argument.paths, argument.keys, stacked, argument.kinds, own
      ):
        names.append(argument.name + jax.tree_util.keystr(path))
        keys.append((argument.name, *k))
        roles.append(_role(
            x, has_axis, kind, is_shared, argument, k, step._options.keys
        ))
        donated.append(argument.is_donated)
        axes.append(
            _axis(step, argument.name) if roles[-1] == 'batch' else 0
        )
      if is_shared or {*roles[len(roles) - len(own) :]} == {'key'}:
        structure = _structure(argument.treedef, argument.fixed, [
            np.shape(x)[1 if has_axis else 0 :]
            for x, has_axis in zip(own, stacked)
        ])
        states.append((structure, len(names) - len(own)))
    owner = {
        f.number: a.is_donated
        for a in arguments
        for f in a.fixed
        if isinstance(f, _Object)
    }
    names += opened.names
    keys += opened.keys
    roles += opened.roles
    donated += [owner[number] for number in opened.owners]
    axes += [0] * len(opened.names)
    axis = next((a for a, r in zip(axes, roles) if r == 'batch'), 0)
    for given in step._options.keys or ():
      if not any(
          role == 'key' and _is_within(given, k)
          for role, k in zip(roles, keys)
      ):
        raise ValueError(
            f'keys must be paths of random keys, got {given!r}. The arguments'
            f' of {step!r} are {", ".join(a.name for a in arguments)}.'
        )
    rows = _rows(step, arguments, names, roles, axes, leaves)
    return _Call(
        arguments,
        # It is kept: the arrays of this one call are not.
        dataclasses.replace(opened, leaves=[]),
        names,
        keys,
        roles,
        donated,
        axes,
        axis,
        rows,
        states,
        inside.own_params(keys),
    )

  def split_donated(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the arrays that may be overwritten, and the others."""
    return (
        [x for x, d in zip(leaves, self.donated) if d],
        [x for x, d in zip(leaves, self.donated) if not d],
    )

  def join_donated(self, donated: list[Any], kept: list[Any]) -> list[Any]:
    """Undoes `split_donated`."""
    return _interleave(self.donated, donated, kept)

  def rebuild(
      self, leaves: list[Any]
  ) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Returns the step's arguments and NNX objects, made of these arrays."""
    number = len(leaves) - len(self.objects.names)
    objects = self.objects.merge(leaves[number:])
    arrays = iter(leaves[:number])
    args, kwargs = [], {}
    for argument in self.arguments:
      value = argument.rebuild(arrays, objects)
      if isinstance(argument.key, int):
        args.append(value)
      else:
        kwargs[argument.key] = value
    return args, kwargs, objects

  def results(
      self,
      returned: Any,
      objects: list[Any],
      before: list[Any],
      own: list[Any],
  ) -> _Results:
    """Returns what a step returned and changed, each with its role.

    Args:
      returned: what the step returned.
      objects: the NNX objects after it.
      before: all arrays, as all workers have them.
      own: all arrays, as the step had them.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        returned, is_leaf=modules.is_object
    )
    number = len(own) - len(self.objects.names)
    changed = self.objects.results(objects, before[number:], own[number:])
    variables = self.objects.numbers(objects)
    fixed: list[Any] = []
    for (path, leaf), is_array in zip(flat, modules.array_leaves(returned)):
      if id(leaf) in variables:
        fixed.append(_Variable(variables[id(leaf)]))
      elif modules.is_object(leaf):
        found = [i for i, o in enumerate(objects) if o is leaf]
        if not found:
          raise ValueError(
              f'The step returns a {type(leaf).__name__} that is none of its'
              f' arguments, at {_keystr(path)}. Make Flax objects outside of'
              ' the step and pass them to it, or return nnx.state(...) of it.'
          )
        fixed.append(_Object(found[0]))
      else:
        fixed.append(None if is_array else _Constant(leaf))
    arrays = [x for (_, x), f in zip(flat, fixed) if f is None]
    keys = [
        ('returned', *path_keys(path))
        for (path, _), f in zip(flat, fixed)
        if f is None
    ]
    stacked = [is_stacked(k) for k in keys]
    previous, kinds = (
        [y for y, f in zip(found, fixed) if f is None]
        for found in (self._previous(returned), modules.leaf_kinds(returned))
    )
    leaves = []
    for x, k, has_axis, at, kind in zip(
        arrays, keys, stacked, previous, kinds
    ):
      name = '.'.join(['the result', *map(str, k[1:])])
      role, old = 'output', None
      was_key = at is not None and self.roles[at] == 'key'
      if was_key and x.dtype != own[at].dtype:  # of the same shape by chance
        at, was_key = None, False
      if has_axis:
        role = 'stacked'
      elif kind in (None, 'stream') and (
          was_key
          or (prng.is_key_array(x) and (at is not None or not x.ndim))
          or (at is None and prng.is_pair(x) and x.ndim == 1
              and prng.is_named(prng.last_name(k[1:])))
      ):
        role = 'key'
        if at is not None and x is own[at]:  # goes on from the one of all
          role, x = 'state', before[at]
      elif at is not None and kind not in (None, 'state'):
        role, old = kind, before[at]
        if kind == 'added' and x is own[at]:
          role = 'state'
      elif 'batch_stats' in k:  # of Linen
        role, old = 'statistics', self._statistics_before(k, x, at, before)
      elif at is not None:
        role = 'state'
      leaves.append(Result(name, k, role, x, old))
    number = len(leaves)
    leaves += changed
    for param in inside.own_params([r.keys for r in leaves]):
      result = leaves[param.number]
      value = leaves[param.shared].value.astype(result.value.dtype)
      leaves[param.number] = dataclasses.replace(
          result, role='state', value=value
      )
    return _Results(leaves, number, treedef, tuple(fixed))

  def _statistics_before(
      self, keys: Keys, x: Any, number: int | None, before: list[Any]
  ) -> Any:
    """Returns what statistics stay if no worker's are finite.

    Those of the same name among the arguments, if the step does not return
    them as the next value of an argument; zeros if there are none.
    """
    suffix = keys[keys.index('batch_stats') :]
    size = len(suffix)
    found = [n for n, k in enumerate(self.keys) if k[-size:] == suffix]
    if number is None and not found:
      return jnp.zeros_like(x)
    return before[found[0] if number is None else number]

  def _previous(self, returned: Any) -> list[int | None]:
    """Returns for each result the number of the array it is the next value of.

    None for what is not part of the next value of a shared argument.
    """
    flat, treedef = jax.tree.flatten(returned, is_leaf=modules.is_object)
    is_array = modules.array_leaves(returned)
    shapes = [np.shape(x) for x, a in zip(flat, is_array) if a]
    fixed = [None if a else 0 for a in is_array]
    structure = _structure(treedef, fixed, shapes)
    for known, first in self.states:
      if structure is not None and structure == known:
        after = itertools.count(first)
        return [next(after) if a else None for a in is_array]
    if type(returned) in (tuple, list):  # not one NamedTuple
      parts = list(returned)
    elif type(returned) is dict:
      parts = [returned[key] for key in sorted(returned)]  # as JAX flattens it
    else:
      return [None] * len(flat)
    return [number for part in parts for number in self._previous(part)]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Returned:
  """What a step returns, on its way out of `jax.jit`."""

  values: list[Any]
  treedef: Any
  fixed: tuple[Any, ...]
  attributes: list[Any]

  def tree_flatten(self) -> tuple[list[Any], Any]:
    """Returns the arrays, and what is static."""
    return self.values, (self.treedef, self.fixed, self.attributes)

  @classmethod
  def tree_unflatten(cls, static: Any, values: Any) -> '_Returned':
    """Undoes `tree_flatten`."""
    return cls(list(values), *static)

  def rebuild(self, objects: Sequence[Any], changed: Sequence[Any]) -> Any:
    """Returns what the step returned, with the caller's NNX objects."""
    fixed = [
        _Constant(changed[f.number]) if isinstance(f, _Variable) else f
        for f in self.fixed
    ]
    leaves = _rebuilt(fixed, iter(self.values), objects)
    return self.treedef.unflatten(leaves)


def _positional(parameters: Sequence[inspect.Parameter]) -> list[str]:
  return [
      p.name
      for p in parameters
      if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]


def _check_options(
    name: str, parameters: Sequence[inspect.Parameter], options: _Options
) -> None:
  """Raises if the options name arguments that a step does not have."""
  positional = len(_positional(parameters))
  kinds = {p.kind for p in parameters}
  names = [p.name for p in parameters]
  for option, given in vars(options).items():
    if option == 'keys':  # paths: see `_Call.of`
      continue
    for x in () if given is None or (option == 'batch_axis' and isinstance(
        given, int
    )) else given:
      if isinstance(x, str):
        found = x in names or inspect.Parameter.VAR_KEYWORD in kinds
      else:
        found = -positional <= x < positional or (
            inspect.Parameter.VAR_POSITIONAL in kinds
        )
      if not found:
        raise ValueError(
            f'{option} has {x!r}, but the arguments of {name} are'
            f' {", ".join(names)}.'
        )


def _check_no_multi_steps(tree: Any) -> None:

  def is_multi_steps(x: Any) -> bool:
    return isinstance(x, optax.MultiStepsState)

  if any(map(is_multi_steps, jax.tree.leaves(tree, is_leaf=is_multi_steps))):
    raise ValueError(
        'The optimizer of a data_parallel step must not be in optax.MultiSteps,'
        ' which would exchange in every call and drop all results but the last.'
        ' Take the mean of the gradients of micro-batches in the step, by'
        ' jax.lax.scan or optax.microbatching, and update once.'
    )


def _number_of(x: Any, objects: list[Any]) -> int:
  """Returns the number of `x` in `objects`, appending it if it is new."""
  for number, other in enumerate(objects):
    if other is x:
      return number
  objects.append(x)
  return len(objects) - 1


def _rebuilt(
    fixed: Sequence[Any], arrays: Iterator[Any], objects: Sequence[Any]
) -> list[Any]:
  leaves = []
  for f in fixed:
    if f is None:
      leaves.append(next(arrays))
    else:
      leaves.append(
          objects[f.number] if isinstance(f, _Object) else f.value
      )
  return leaves


def _structure(
    treedef: Any, fixed: Sequence[Any], shapes: list[tuple[int, ...]]
) -> Any:
  """Returns what a shared argument and its next value have in common."""
  if not shapes or (len(fixed) == 1 and shapes == [()]):
    return None  # nothing to keep equal; any loss looks like a lone scalar
  return treedef, tuple(f is None for f in fixed), shapes


def _shared(
    step: DataParallelStep,
    arguments: list[_Argument],
    arrays: list[list[Any]],
) -> list[bool]:
  """Returns for each argument whether all workers share it."""
  if any(a.is_batch is not None for a in arguments):
    return [not a.is_batch for a in arguments]
  shared = [
      a.is_state or any(map(is_stacked, a.keys)) for a in arguments
  ]
  if arguments and not any(shared):
    raise ValueError(
        f'{step!r} cannot tell which of its arguments'
        f' ({", ".join(a.name for a in arguments)}) are batches: none holds a'
        ' Flax object, a dataclass or a state of scale_by_demo. Say it:'
        ' demo_optax.data_parallel(workers, batch_argnums=...).'
    )
  params = [p for a in arguments for p in a.params]
  for a, own in zip(arguments, arrays):
    shapes = dict(zip(a.keys, map(np.shape, own)))
    for root, keys in inside.local_params(a.keys).items():
      params.append(frozenset(
          (k, shapes[*root, 'global_params', *k]) for k in keys
      ))
  return [
      is_shared or any(_holds(a, own, p) for p in params)
      for a, own, is_shared in zip(arguments, arrays, shared)
  ]


def _holds(
    argument: _Argument,
    arrays: list[Any],
    params: frozenset[tuple[Keys, tuple[int, ...]]],
) -> bool:
  """Returns whether an argument is such parameters, or has them in a part."""
  found = {(k, np.shape(x)) for k, x in zip(argument.keys, arrays)}
  if not params or params <= found:
    return bool(params)
  some, _ = min(params, key=str)
  if not some:  # a lone array: could be any
    return False
  parts = {
      k[: -len(some)] for k, _ in found if k[len(k) - len(some) :] == some
  }
  return any(
      {((*part, *k), shape) for k, shape in params} <= found for part in parts
  )


def _params_of_states(
    value: Any,
) -> tuple[frozenset[tuple[Keys, tuple[int, ...]]], ...]:
  """Returns paths and shapes of the parameters of all exchanges in a state."""
  return tuple(
      frozenset(
          (leaf.keys, leaf.shape)
          for leaf in layout.leaves
          if not isinstance(leaf.compressor, Frozen)
      )
      for layout in layouts_in(value).values()
  ) + tuple(
      x.averaged.params
      for x in jax.tree.leaves(value, is_leaf=_is_average)
      if _is_average(x)
  )


def _is_average(x: Any) -> bool:
  return isinstance(x, AverageState)


def _role(
    x: Any,
    has_worker_axis: bool,
    kind: Any,
    is_shared: bool,
    argument: _Argument,
    path: Keys,
    keys: tuple[str, ...] | None,
) -> str:
  if has_worker_axis:
    return 'stacked'
  rank = np.ndim(x)
  is_plain = kind in (None, 'stream')
  if is_plain and prng.is_key_array(x) and (is_shared or not rank):
    return 'key'
  if (
      kind is None and prng.is_pair(x) and not argument.is_batch
      and (is_shared or rank == 1)
  ):
    name = dotted((argument.name, *path))
    if keys is not None:
      is_key = any(_is_within(k, (argument.name, *path)) for k in keys)
    else:
      is_key = prng.is_named(argument.name, prng.last_name(path))
      if not is_key:
        raise ValueError(
            f'{name} must be known as a random key or as data, got'
            f' {x.dtype}{list(x.shape)}. If it is a key, into which each worker'
            f' folds its number, give data_parallel keys={name!r}, or use'
            ' jax.random.key. If it is data, give keys=(), or name the batches'
            ' by batch_argnums if it is one.'
        )
    if is_key:
      return 'key'
  return 'shared' if is_shared or not rank else 'batch'


def _axis(step: DataParallelStep, name: str) -> int:
  given = step._options.batch_axis
  if isinstance(given, Mapping):
    return given.get(name, 0)
  return given or 0


def _is_within(name: str, path: Keys) -> bool:
  return f'{dotted(path)}.'.startswith(f'{name}.')


def _rows(
    step: DataParallelStep,
    arguments: list[_Argument],
    names: list[str],
    roles: list[str],
    axes: list[int],
    leaves: Sequence[Any],
) -> int | None:
  """Returns the length of one worker's batch, from those of all arrays cut."""
  lengths: dict[int, str] = {}
  for name, role, axis, x in zip(names, roles, axes, leaves):
    if role != 'batch':
      continue
    if not 0 <= axis < np.ndim(x):
      raise ValueError(
          f'batch_axis must be an axis of every batch, got {axis} for {name} of'
          f' shape {np.shape(x)}. Give one for each argument:'
          " batch_axis={'images': 1}."
      )
    lengths.setdefault(np.shape(x)[axis], name)
  remedy = (
      'Say which arguments are batches: demo_optax.data_parallel(workers,'
      ' batch_argnums=...).'
  )
  o = step._options
  if not lengths and not (o.batch_argnums or o.batch_argnames) and any(
      x is not None for x in (o.batch_argnums, o.batch_argnames)
  ):
    return None
  if not lengths:
    raise ValueError(
        f'{step!r} has nothing to cut over the workers: none of its arguments'
        f' ({", ".join(a.name for a in arguments)}) is a batch. {remedy} If the'
        ' step draws its batch by a random key, give batch_argnums=().'
    )
  if len(lengths) > 1:
    some = ', '.join(f'{n}: {length}' for length, n in lengths.items())
    raise ValueError(
        f'{step!r} would cut arrays of different lengths along their axis of'
        f' rows ({some}), which are not one batch. {remedy}'
    )
  ((length, name),) = lengths.items()
  if length % step.workers.count:
    raise ValueError(
        f'{name} has {length} rows, which do not divide among'
        f' {step.workers}. Change the batch size. {remedy}'
    )
  return length // step.workers.count


def _counter(x: Any) -> Any:
  """Returns a Python integer of a state, such as a step of 0, as an array.

  Of the type that a count in the optimizer state has: a step that is taken from
  there would otherwise be compiled for both.
  """
  return np.asarray(x, jax.dtypes.result_type(x)) if type(x) is int else x


def _interleave(
    mask: list[bool], true: list[Any], false: list[Any]
) -> list[Any]:
  """Returns the next of `true` where `mask` holds, else the next of `false`."""
  trues, falses = iter(true), iter(false)
  return [next(trues) if m else next(falses) for m in mask]


def _keystr(path: Any) -> str:
  return jax.tree_util.keystr(path) or 'the top'
