"""Operations across workers, called inside of a `data_parallel` step.

`data_parallel` traces a step under `jax.vmap` over the workers. Arrays that are
equal on all workers have no worker axis there. Workers communicate by
collectives, and in the exchange by a rule that receives all workers' arrays.

Where each worker is one device of a mesh, that trace is only a check
(`tracing`), and `jax.shard_map` runs the step on each device: compilers would
gather the batch for the gradients of stacked convolutions.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from demo_optax import _paths, _tree
from demo_optax._paths import Keys, path_keys
from demo_optax.numerics import prng
from demo_optax.workers import Workers, collectives

# The axis that `data_parallel` maps a step over. No other has this name.
WORKER_AXIS = 'demo_optax_workers'

# Name of the exchange in the program of one worker's step.
EXCHANGE = 'demo_optax_exchange'

# How the step that is being traced is run: see `tracing`.
_TRACE = contextvars.ContextVar[tuple[Workers | None, bool]](
  'demo_optax_trace', default=(None, False)
)


@contextlib.contextmanager
def tracing(
  seen_as: Workers | None = None, checks: bool = False
) -> Iterator[None]:
  """Traces a step in another way than for all workers, mapped.

  With `seen_as`, for one worker on its own device; its exchanges use `seen_as`.
  With `checks`, to see what differs between workers; nothing is exchanged.
  """
  token = _TRACE.set((seen_as, checks))
  try:
    yield
  finally:
    _TRACE.reset(token)


def is_mapped() -> bool:
  """Returns whether the caller is traced inside of a `data_parallel` step."""
  try:
    jax.lax.axis_index(WORKER_AXIS)
  except NameError:
    return _TRACE.get()[0] is not None
  return True


def _worker_axis() -> collectives.Axis:
  """Returns the axis of the workers, as the step sees it."""
  seen_as, _ = _TRACE.get()
  return WORKER_AXIS if seen_as is None else seen_as.axis


def check_in_step(what: str) -> None:
  """Raises outside of a `data_parallel` step."""
  if not is_mapped():
    raise ValueError(
      f'{what} must be called in a demo_optax.data_parallel step. Write the'
      ' step for one worker and decorate it with'
      ' @demo_optax.data_parallel(workers), instead of jax.jit or nnx.jit.'
    )


def _with_all_workers(
  rule: Callable[..., Any], like: Callable[..., Any], *args: Any
) -> Any:
  """Applies `rule` to the `args` of all workers, trees of arrays.

  `rule(size, cut, *args) -> (out, apart)`: `cut` is like `args`, and true where
  an array differs between workers, and so is stacked; `apart` is like `out`,
  and true where each worker has its own array, stacked. `like(*args)` has the
  types that one worker sees.
  """

  # The number is mapped wherever this is reached, so that the rule is called.
  @custom_vmap
  def one_worker(index: Any, *args: Any) -> Any:
    return like(*args)

  @one_worker.def_vmap
  def all_workers(size: int, cut: Any, index: Any, *args: Any) -> Any:
    return rule(size, cut[1:], *args)

  return one_worker(jax.lax.axis_index(WORKER_AXIS), *args)


def _watch(tree: Any, see: Callable[[Any], None]) -> Any:
  """Returns `tree`; calls `see` with which of its arrays differ.

  Where workers are mapped; on a worker's own device `see` is never called.
  """

  def rule(size: int, cut: Any, tree: Any) -> Any:
    see(cut[0])
    return tree, cut[0]

  if _TRACE.get()[0] is not None:
    return tree
  return _with_all_workers(rule, lambda tree: tree, tree)


# Parameters of each worker ----------------------------------------------------


def enter(params: Mapping[int, Sequence[int]], arrays: list[Any]) -> None:
  """Puts the worker's own copies in the places of the parameters.

  If any was changed between steps, as when weights are loaded, then what the
  model has holds for all copies.
  """
  changed = jnp.zeros((), bool)
  for number, (shared, *_) in params.items():
    x = arrays[number]
    changed |= jnp.any(x != arrays[shared].astype(x.dtype))
  for number, copies in params.items():
    x = arrays[number]
    for copy in copies:
      old = arrays[copy]
      arrays[copy] = jnp.where(changed, x.astype(old.dtype), old)
    arrays[number] = arrays[copies[1]]


def own_params(keys: Sequence[Keys]) -> dict[int, list[int]]:
  """Finds the parameters of which `local_updates` keeps one copy per worker.

  Returns the number of each, among the arrays with such paths, and those of its
  copies in the optimizer state: the one that all workers share, the worker's
  own, and, of one that drifts, where it started.
  """
  numbers = {k: number for number, k in enumerate(keys)}
  found = {}
  for root, params in local_params(keys).items():
    starts = dict.fromkeys(k[: len(k) - len(params[0])] for k in keys)
    prefixes = [
      start
      for start in starts
      if start[: len(root)] != root
      and all((*start, *k) in numbers for k in params)
    ]
    if len(prefixes) != 1:
      names = ', '.join(map(_paths.dotted, prefixes)) or 'none'
      raise ValueError(
        'The state of local_updates has the parameters of each worker, which'
        " replace the model's in the step. The"
        f' arguments and results must hold these once, but hold: {names}.'
      )
    for k in params:
      copies = [(*root, *part, *k) for part in (_SHARED, _OWN, _START)]
      found[numbers[(*prefixes[0], *k)]] = [
        numbers[copy] for copy in copies if copy in numbers
      ]
  return found


# Where a state of `local_updates` has parameters.
_OWN, _SHARED = ('worker_stacked', 'params'), ('global_params',)
_START = ('worker_stacked', 'start')


def local_params(keys: Sequence[Keys]) -> dict[Keys, list[Keys]]:
  """Returns the paths of the parameters in states of `local_updates`."""
  roots: dict[Keys, list[Keys]] = {}
  for k in keys:
    for start in range(len(k) - 1):
      if k[start : start + 2] == _OWN:
        roots.setdefault(k[:start], []).append(k[start + 2 :])
  return {
    root: params
    for root, params in roots.items()
    if {(*root, *_SHARED, *k) for k in params} <= {*keys}
  }


# The exchange -----------------------------------------------------------------


def call_stacked(
  stacked_update: Callable[..., tuple[Any, Any]],
  workers: Workers,
  updates: Any,
  state: Any,
  params: Any,
  hyperparams: Any,
  *,
  own_updates: bool = False,
) -> tuple[Any, Any]:
  """Calls a transformation of stacked gradients from one worker's step.

  `stacked_update(updates, state, params, hyperparams, workers)` returns updates
  in the parameters' shapes, or each worker's with `own_updates`, and the new
  state. Gradients, state and own updates are as `workers` have them: stacked,
  or of one worker. Here `updates` and `state` are those of one worker;
  parameters and hyperparameters are equal on all workers.
  """
  seen_as, only_checks = _TRACE.get()
  if seen_as is not None:
    return stacked_update(updates, state, params, hyperparams, seen_as)
  stacked = jax.tree_util.tree_map_with_path(
    lambda path, _: _paths.is_stacked(path_keys(path)), state
  )
  grads_def = jax.tree.structure(updates)
  grads = [  # those of integers are float0, which no operation takes
    _tree.zero_update(g, p, 0)
    if getattr(g, 'dtype', None) == jax.dtypes.float0
    else jnp.asarray(g)
    for (_, g), p in zip(*_tree.flatten_alike(updates, params))
  ]
  # Numbers that are known when a step is traced make a smaller program.
  known = params, hyperparams
  rest = jax.tree.map(
    lambda x: x if isinstance(x, jax.Array | np.ndarray) else None, known
  )

  def nothing(grads: Any, state: Any, rest: Any) -> Any:
    return [jnp.zeros_like(g) for g in grads], state

  def exchange(size: int, cut: Any, grads: Any, state: Any, rest: Any) -> Any:
    grads_cut, state_cut, (params_cut, hyperparams_cut) = cut
    if workers.kind == 'on_axis' or workers.count != size:
      raise ValueError(
        f'data_parallel runs the step for {size} workers, but the'
        f' transformation exchanges among {workers}: give both the same'
        ' workers.'
      )
    if grads_cut and not any(grads_cut):
      raise ValueError(
        'The gradients that reach the exchange are the same on all workers:'
        ' either the loss does not depend on the batch that data_parallel has'
        " cut, or they were averaged. Use the step's own argument in the"
        ' loss, and remove what averages gradients, which the exchange'
        ' replaces.'
      )
    shared_cut = jax.tree.map(
      lambda is_cut, axis: is_cut and not axis, state_cut, stacked
    )
    for what, are_cut, causes in (
      ('parameter', params_cut, ('skip', 'wrapper')),
      ('hyperparameter', hyperparams_cut, ('number',)),
      ('optimizer state', shared_cut, ('state', 'skip', 'number', 'wrapper')),
    ):
      for keys, is_cut in _paths.leaves_of(are_cut):
        if is_cut:
          name = f'the {what} {_paths.dotted(keys)}' if keys else f'the {what}'
          raise ValueError(_differs(name, causes))
    if jax.tree.leaves(state_cut) != jax.tree.leaves(stacked):
      raise ValueError(
        'The momentum that reaches the exchange is not the one of a worker:'
        ' the optimizer state must be an argument of the step (or in one, as'
        ' in an nnx.Optimizer or a TrainState), not a variable that the step'
        ' closes over.'
      )
    # A gradient that is the same on all workers is that of an unused parameter.
    everyones = [
      g if is_cut else jnp.broadcast_to(g, (size, *g.shape))
      for g, is_cut in zip(grads, grads_cut)
    ]
    apart = [own_updates] * len(grads), stacked
    if only_checks:
      new = [jnp.zeros_like(g if own_updates else g[0]) for g in everyones]
      return (new, state), apart
    new, state = stacked_update(
      grads_def.unflatten(everyones),
      state,
      *jax.tree.map(
        lambda x, number: number if x is None else x,
        rest,
        known,
        is_leaf=lambda x: x is None,
      ),
      workers,
    )
    return (jax.tree.leaves(new), state), apart

  nothing.__name__ = EXCHANGE
  new, state = _with_all_workers(exchange, jax.jit(nothing), grads, state, rest)
  return grads_def.unflatten(new), state


# What makes values differ that must not, and what to do.
_CAUSES = {
  'gradient': 'a gradient that is not exchanged: average it'
  ' (demo_optax.average), or set it to zero',
  'statistics': 'statistics of batches: return'
  ' demo_optax.over_workers(statistics)',
  'metric': 'a metric that is not only added to: reset it between steps, and'
  ' update nnx.metrics.Welford there, from rows that the step returns',
  'skip': 'a step that is skipped: decide from the update, or from all'
  ' workers, demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is'
  ' not needed, since the exchange leaves out workers with gradients that are'
  ' not finite',
  'number': 'a number of one worker, such as its loss or a norm: give'
  ' value=demo_optax.over_workers(loss) to reduce_on_plateau',
  'state': 'a transformation with a state before the exchange: put it into'
  ' demo_optax.per_worker',
  'wrapper': 'a wrapper that also reads gradients, such as'
  ' optax.contrib.mechanize: place it after the exchange,'
  ' optax.chain(demo_optax.scale_by_demo(...), wrapper(...))',
}


def _differs(what: str, causes: Iterable[str] = tuple(_CAUSES)) -> str:
  return '\n  - '.join(
    [
      f'{what[0].upper()}{what[1:]} differs between workers: it depends on'
      " one worker's gradient, loss or batch. Usual causes:",
      *(_CAUSES[cause] for cause in causes),
    ]
  )


def over_workers(tree: Any, reduce: Callable[..., jax.Array] = jnp.mean) -> Any:
  """Reduces one worker's values over all workers, inside of a step.

  For what a step decides or returns from all workers' values: skips, counts,
  statistics that are state. It is communication, so keep it small. A gradient
  is one worker's: what is differentiated is refused, as is the mean of integers
  or flags that differ.

  Args:
    tree: this worker's arrays.
    reduce: a reduction such as `jnp.mean`, `jnp.sum`, `jnp.min` or `jnp.all`,
      called with `[workers, ...]` and `axis=0`.

  Returns:
    A tree like `tree`, equal on all workers. Of random keys it has worker 0's,
    and with `jnp.mean` integers and flags, which must be equal, as they are.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> @demo_optax.data_parallel(workers, batch_argnums=0)
    ... def count_positive(x):
    ...   return demo_optax.over_workers((x > 0).sum(), jnp.sum)
    >>> print(count_positive(jnp.array([1.0, -1.0, 2.0, 3.0])))
    3
  """
  check_in_step('over_workers')
  axis = _worker_axis()
  same_bits = {jnp.mean: collectives.mean, jnp.sum: collectives.total}

  def over(path: _paths.Path, x: Any) -> jax.Array:
    x = _undifferentiated(jnp.asarray(x))
    if prng.is_key(path_keys(path), x):
      return collectives.first(x, axis)
    if reduce is jnp.mean and not jnp.issubdtype(x.dtype, jnp.inexact):
      name = _paths.dotted(('x', *path_keys(path)))
      return equal(
        x,
        (
          f'over_workers was called on {name}, {x.dtype}{list(x.shape)}, which'
          ' differs between workers and has no mean. Give another reduction,'
          ' such as jnp.sum or jnp.max; a random key is returned as it is.'
        ),
      )
    if reduce in same_bits and jax.eval_shape(reduce, x).dtype == x.dtype:
      return same_bits[reduce](x, axis)
    return reduce(collectives.everyones(x, axis), axis=0)

  return jax.tree_util.tree_map_with_path(over, tree)


@jax.custom_jvp
def _undifferentiated(x: Any) -> Any:
  """Returns `x`; raises where its derivative is asked for."""
  return x


@functools.partial(_undifferentiated.defjvp, symbolic_zeros=True)
def _derivative(primals: Any, tangents: Any) -> Any:
  (x,), (tangent,) = primals, tangents
  if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
    raise ValueError(
      'over_workers was called inside of the function that is differentiated.'
      ' Gradients must stay per worker. Return the value beside the loss'
      ' (has_aux=True) and call over_workers on it outside, or give it'
      ' jax.lax.stop_gradient(x).'
    )
  return x, tangent


def equal(tree: Any, message: str) -> Any:
  """Returns `tree`; raises `message` of a leaf that differs between workers."""

  def see(differs: Any) -> None:
    for keys, is_cut in _paths.leaves_of(differs):
      if is_cut:
        raise ValueError(message.replace('{}', _paths.dotted(keys)))

  return _watch(tree, see)


# What a step returns ----------------------------------------------------------

ResultRole = Literal['stacked', 'equal', 'statistics', 'added', 'key', 'output']


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('value', 'old'),
  meta_fields=('name', 'keys', 'role', 'at', 'differs', 'apart'),
)
@dataclasses.dataclass
class Result:
  """A leaf of what a step returns or changes, as one worker has it.

  The role says how the workers' values become one: 'stacked' (they stay apart),
  'equal' (an error if they differ), 'statistics' (averaged over those that are
  finite), 'added' (all that was added to the old one), 'key' (worker 0's), or
  'output' (the mean of numbers, the rows of a batch).
  """

  name: str  # for error messages
  keys: Keys  # its path
  role: ResultRole
  value: Any
  old: Any = None  # before the step, for 'statistics' and 'added'
  at: int | None = None  # number of the array that it is the next value of
  differs: bool = False  # whether it differs between workers
  apart: bool = False  # whether it keeps a worker axis: 'stacked', or rows

  @property
  def is_rows(self) -> bool:
    """Whether the workers' values are the rows of a batch."""
    return self.apart and self.role == 'output'


def settle(
  results: list[Result], rows: int | None, axis: int, on_mesh: bool = False
) -> list[Result]:
  """Makes one value for all workers of what each of them returns.

  A worker's batch has `rows` rows, along `axis` of results; rows are moved to
  the first axis. Raises for a value that must not differ between workers. On a
  worker's own device `results` know `differs`. `on_mesh` if stacked arrays are
  spread over devices.
  """

  def see(cut: list[bool]) -> None:
    for r, differs in zip(results, cut):
      r.differs = differs

  values = _watch([jnp.asarray(r.value) for r in results], see)
  for r, x in zip(results, values):
    r.value, r.apart = _combine(r, x, rows, axis, on_mesh)
    r.old = None
  return results


def _combine(
  result: Result, x: jax.Array, rows: int | None, row_axis: int, on_mesh: bool
) -> tuple[jax.Array, bool]:
  """Returns one value of all workers', and whether it stays apart instead."""
  axis, role, old = _worker_axis(), result.role, result.old
  is_real = jnp.issubdtype(x.dtype, jnp.inexact)  # integers have no mean
  if role == 'stacked':
    return x, True
  if role == 'added':
    return old + collectives.total(x - old, axis), False
  if not result.differs:
    return x, False
  if role == 'equal' or (role == 'statistics' and not is_real):
    raise ValueError(_differs(result.name))
  if role == 'statistics':
    # Statistics of a worker that saw a NaN would stay NaN for ever.
    return collectives.mean_finite(x, old, axis), False
  if role == 'key':
    return collectives.first(x, axis), False
  if not x.shape and is_real and on_mesh:  # XLA would send slices one by one
    return jnp.mean(collectives.everyones(x, axis), axis=0), False
  if not x.shape and is_real:
    return collectives.mean(x, axis), False
  if x.shape[row_axis : row_axis + 1] == (rows,):
    return jnp.moveaxis(x, row_axis, 0), True
  rows_too = f', and no array with the {rows} rows of a worker, axis {row_axis}'
  raise ValueError(
    f'Of what the step returns, {result.name}, {x.dtype}{list(x.shape)},'
    ' differs between workers. It is no real number, whose mean is returned'
    f'{"" if rows is None else rows_too}. Return'
    ' demo_optax.over_workers(x, jnp.sum) for counts and the like, or'
    ' demo_optax.over_workers(x) for the mean of statistics.'
  )
