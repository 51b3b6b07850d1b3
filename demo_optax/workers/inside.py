"""One worker's view: operations of all workers inside one worker's step.

`data_parallel` traces a step under `jax.vmap` over the workers. The functions
here are the places where all workers meet, by `_meet`: a rule receives the
arrays of all workers, stacked, and returns what is equal on all without a
worker axis. So it is known of every array whether it differs.

Where each worker is one device of a mesh, that trace is only a check
(`tracing`), and `jax.shard_map` runs the step on each device: compilers would
gather the batch for the gradients of stacked convolutions.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from demo_optax import _paths
from demo_optax._paths import Keys, path_keys
from demo_optax.numerics import prng
from demo_optax.workers import Workers, collectives, lift

# The axis that `data_parallel` maps a step over. No axis of a mesh or of a user
# has this name.
WORKER_AXIS = 'demo_optax_workers'

# Name of the exchange in the program of one worker's step.
EXCHANGE = 'demo_optax_exchange'


class _Trace(threading.local):
  """How the step that is being traced is run: see `tracing`."""

  group: Workers | None = None
  checks: bool = False


_TRACE = _Trace()


@contextlib.contextmanager
def tracing(**how: Any) -> Iterator[None]:
  """Traces a step in another way than for all workers, mapped.

  With `group`, for one worker on its own device, which sees the others as
  `group`. With `checks`, to see what differs between workers; nothing is
  exchanged.
  """
  before = {name: getattr(_TRACE, name) for name in how}
  vars(_TRACE).update(how)
  try:
    yield
  finally:
    vars(_TRACE).update(before)


def is_mapped() -> bool:
  """Returns whether the caller is traced inside of a `data_parallel` step."""
  if _TRACE.group is not None:
    return True
  try:
    jax.lax.axis_index(WORKER_AXIS)
  except NameError:
    return False
  return True


def check_in_step(what: str) -> None:
  """Raises outside of a `data_parallel` step."""
  if not is_mapped():
    raise ValueError(
        f'{what} must be called in a demo_optax.data_parallel step. Write the'
        ' step for one worker and decorate it with'
        ' @demo_optax.data_parallel(workers), instead of jax.jit or nnx.jit.'
    )


def _meet(
    rule: Callable[..., Any], alone: Callable[..., Any], *args: Any
) -> Any:
  """Returns what `rule` makes of all workers' `args`, trees of arrays.

  `rule(size, cut, *args) -> (out, apart)`: `cut` is like `args`, and true where
  an array differs between workers, and so is stacked; `apart` is like `out`,
  and true where each worker has its own array, stacked. `alone(*args) -> out`
  is for the shapes that one worker sees, and for one on a device of its own.
  """
  if _TRACE.group is not None:
    return alone(*args)

  # The number is mapped wherever this is reached, so that the rule is called.
  @custom_vmap
  def one_worker(index: Any, *args: Any) -> Any:
    return alone(*args)

  @one_worker.def_vmap
  def all_workers(size: int, cut: Any, index: Any, *args: Any) -> Any:
    return rule(size, cut[1:], *args)

  return one_worker(jax.lax.axis_index(WORKER_AXIS), *args)


# Parameters of each worker ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OwnParam:
  """A parameter of which `local_updates` keeps one copy per worker.

  By the numbers, among all arrays of a call, of the parameter and of others in
  the optimizer state.
  """

  number: int
  shared: int  # the one that all workers share
  own: list[int]  # the worker's own; of one that drifts also where it started


def enter(params: Sequence[OwnParam], arrays: list[Any]) -> None:
  """Puts the worker's own copies in the places of the parameters.

  If any was changed between steps, as when weights are loaded, then what the
  model has holds for all copies.
  """
  changed = jnp.zeros((), bool)
  for p in params:
    x = arrays[p.number]
    changed |= jnp.any(x != arrays[p.shared].astype(x.dtype))
  for p in params:
    x = arrays[p.number]
    for number in (p.shared, *p.own):
      old = arrays[number]
      arrays[number] = jnp.where(changed, x.astype(old.dtype), old)
    arrays[p.number] = arrays[p.own[0]]


def own_params(keys: Sequence[Keys]) -> list[OwnParam]:
  """Finds the parameters of which `local_updates` keeps one copy per worker."""
  numbers = {k: number for number, k in enumerate(keys)}
  found = []
  for root, params in local_params(keys).items():
    some = min(params, key=len)
    prefixes = [
        k[: len(k) - len(some)]
        for k in keys
        if k[: len(root)] != root and k[len(k) - len(some) :] == some
    ]
    prefixes = [
        p for p in prefixes if all((*p, *k) in numbers for k in params)
    ]
    if len(prefixes) != 1:
      names = ', '.join(map(_paths.dotted, prefixes)) or 'none'
      raise ValueError(
          'The state of local_updates has parameters of its own for each'
          " worker, which take the place of the model's in the step; the"
          f' arguments and results must hold these once, but hold: {names}.'
      )
    found += [
        OwnParam(
            numbers[(*prefixes[0], *k)],
            numbers[(*root, *_SHARED, *k)],
            [numbers[x] for part in (_OWN, _START)
             if (x := (*root, *part, *k)) in numbers],
        )
        for k in sorted(params, key=str)
    ]
  return found


# Where a state of `local_updates` has parameters.
_OWN, _SHARED = ('worker_stacked', 'params'), ('global_params',)
_START = ('worker_stacked', 'start')


def local_params(keys: Sequence[Keys]) -> dict[Keys, set[Keys]]:
  """Returns the paths of the parameters in states of `local_updates`."""
  roots: dict[Keys, set[Keys]] = {}
  for k in keys:
    for start in range(len(k) - 1):
      if k[start : start + 2] == _OWN:
        roots.setdefault(k[:start], set()).add(k[start + 2 :])
  known = set(keys)
  return {
      root: params
      for root, params in roots.items()
      if all((*root, *_SHARED, *k) in known for k in params)
  }


# The exchange -----------------------------------------------------------------


def call_stacked(
    stacked_update: Callable[..., tuple[Any, Any]],
    workers: Workers,
    updates: Any,
    state: Any,
    params: Any,
    hyperparams: Any = (),
    *,
    own_updates: bool = False,
) -> tuple[Any, Any]:
  """Calls a transformation of stacked gradients from one worker's step.

  `stacked_update(updates, state, params, hyperparams, workers)` takes gradients
  as `workers` have them (`[workers, ...]`, or one worker's own) to updates in
  the parameters' shapes, or stacked with `own_updates`, and the new state.
  `updates` and `state` are as one worker sees them, without worker axes;
  parameters and hyperparameters are equal on all workers.
  """
  flat, state_def = jax.tree_util.tree_flatten_with_path(state)
  paths, old = [path for path, _ in flat], [x for _, x in flat]
  stacked = [_paths.is_stacked(path_keys(path)) for path in paths]

  if _TRACE.group is not None:
    own = [x[None] if axis else x for x, axis in zip(old, stacked)]
    new, after = stacked_update(
        updates, state_def.unflatten(own), params, hyperparams, _TRACE.group
    )
    if own_updates:
      new = jax.tree.map(lambda x: x[0], new)
    leaves = zip(jax.tree.leaves(after), stacked)
    return new, state_def.unflatten([x[0] if axis else x for x, axis in leaves])

  given, grads_def = jax.tree.flatten(updates)
  like = jax.tree.leaves(params)
  if len(like) != len(given):  # masked: checked by the exchange itself
    like = given
  grads = [  # those of integers are float0, which no operation takes
      jnp.zeros_like(p) if getattr(g, 'dtype', None) == jax.dtypes.float0
      else jnp.asarray(g)
      for g, p in zip(given, like)
  ]
  # Numbers that are known when a step is traced make a smaller program.
  known = params, hyperparams
  rest = jax.tree.map(
      lambda x: x if isinstance(x, jax.Array | np.ndarray) else None, known
  )

  def nothing(grads: Any, old: Any, rest: Any) -> Any:
    return [jnp.zeros_like(g) for g in grads], old

  def exchange(size: int, cut: Any, grads: Any, old: Any, rest: Any) -> Any:
    grads_cut, old_cut, (params_cut, hyperparams_cut) = cut
    if workers.kind == 'on_axis' or workers.count != size:
      raise ValueError(
          f'data_parallel runs the step for {size} workers, but the'
          f' transformation exchanges among {workers}: give both the same'
          ' workers.'
      )
    differ = jax.tree.leaves(grads_cut)
    if differ and not any(differ):
      raise ValueError(_NOT_CUT)
    _check_equal('The parameter', params_cut, ('skip', 'wrapper'))
    _check_equal('The hyperparameter', hyperparams_cut, ('number',))
    for path, is_cut, has_axis in zip(paths, old_cut, stacked):
      if is_cut and not has_axis:
        name = f'The optimizer state {jax.tree_util.keystr(path)}'
        raise ValueError(_differs(name, ('state', 'skip', 'value', 'wrapper')))
      if has_axis and not is_cut:
        raise ValueError(_NOT_AN_ARGUMENT)
    # A gradient that is the same on all workers is that of an unused parameter.
    everyones = [
        g if is_cut else jnp.broadcast_to(g, (size, *g.shape))
        for g, is_cut in zip(grads, grads_cut)
    ]
    apart = [own_updates] * len(grads), stacked
    if _TRACE.checks:
      new = [jnp.zeros_like(g if own_updates else g[0]) for g in everyones]
      return (new, old), apart
    params, hyperparams = jax.tree.map(
        lambda x, number: number if x is None else x,
        rest, known, is_leaf=lambda x: x is None,
    )
    out = stacked_update(
        grads_def.unflatten(everyones), state_def.unflatten(old),
        params, hyperparams, workers,
    )
    return tuple(map(jax.tree.leaves, out)), apart

  nothing.__name__ = EXCHANGE
  new, after = _meet(exchange, jax.jit(nothing), grads, old, rest)
  return grads_def.unflatten(new), state_def.unflatten(after)


_NOT_CUT = (
    'The gradients that reach the exchange are the same on all workers: either'
    ' the loss does not depend on the batch that data_parallel has cut, or they'
    " were averaged. Use the step's own argument in the loss, and remove what"
    ' averages gradients, which the exchange replaces.'
)
_NOT_AN_ARGUMENT = (
    'The momentum that reaches the exchange is not the one of a worker: the'
    ' optimizer state must be an argument of the step (or in one, as in an'
    ' nnx.Optimizer or a TrainState), not a variable that the step closes over.'
)


def _check_equal(what: str, is_cut: Any, causes: Sequence[str]) -> None:
  for path, cut in jax.tree_util.tree_flatten_with_path(is_cut)[0]:
    if cut:
      name = f'{what} {jax.tree_util.keystr(path)}'
      raise ValueError(_differs(name, causes))


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
    'value': "an extra argument of one worker, such as value=loss of"
    ' reduce_on_plateau: value=demo_optax.over_workers(loss)',
    'number': "a number from one worker's loss or gradient:"
    ' demo_optax.over_workers(number)',
    'state': 'a transformation with a state before the exchange: put it into'
    ' demo_optax.per_worker',
    'wrapper': 'a wrapper that passes gradients on, or compares them with'
    ' updates (optax.contrib.mechanize): put it behind,'
    ' optax.chain(demo_optax.scale_by_demo(...), wrapper(...))',
}
_OF_RESULTS = (
    'gradient', 'statistics', 'metric', 'skip', 'state', 'value', 'wrapper'
)


def _differs(what: str, causes: Sequence[str] = _OF_RESULTS) -> str:
  return '\n  - '.join([
      f'{what[0].upper()}{what[1:]} differs between workers: it depends on'
      " one worker's gradient, loss or batch. Usual causes:",
      *(_CAUSES[cause] for cause in causes),
  ])


def over_workers(
    tree: Any, reduce: Callable[..., jax.Array] = jnp.mean
) -> Any:
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
  flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
  leaves = [jnp.asarray(_undifferentiated(x)) for _, x in flat]
  are_keys = [
      prng.is_key(path_keys(path), x) for (path, _), x in zip(flat, leaves)
  ]
  # Integers and flags have no mean: they must be equal.
  are_fixed = [
      reduce is jnp.mean and not jnp.issubdtype(x.dtype, jnp.inexact)
      and not is_key
      for x, is_key in zip(leaves, are_keys)
  ]
  same_bits = {jnp.mean: collectives.mean, jnp.sum: collectives.total}

  axis = None if _TRACE.group is None else _TRACE.group.axis

  def meet(x: jax.Array, is_key: bool) -> Any:
    if is_key:
      return collectives.first(x, axis)
    if reduce in same_bits and jax.eval_shape(reduce, x).dtype == x.dtype:
      return same_bits[reduce](x, axis)
    return x if axis is None else collectives.everyones(x, axis)

  def alone(leaves: list[Any]) -> list[Any]:
    if axis is None:
      size = jax.lax.axis_size(WORKER_AXIS)
      return rule(size, [[False] * len(leaves)], leaves)[0]
    return [
        x if is_fixed else meet(x, is_key)
        for x, is_key, is_fixed in zip(leaves, are_keys, are_fixed)
    ]

  def rule(size: int, cut: Any, leaves: list[Any]) -> Any:
    out = []
    for (path, _), x, is_key, is_fixed, is_cut in zip(
        flat, leaves, are_keys, are_fixed, cut[0]
    ):
      if is_cut and is_fixed:
        raise ValueError(_NO_MEAN.format(
            jax.tree_util.keystr(path) or 'x', x.dtype, list(x.shape[1:])
        ))
      if not (is_cut or is_key or is_fixed):
        x, is_cut = jnp.broadcast_to(x, (size, *x.shape)), True
      out.append(meet(x, is_key) if is_cut else x)
    return out, [False] * len(out)

  # Outside of the rule, since `reduce` may close over values of the step.
  return treedef.unflatten([
      reduce(y, axis=0) if y.ndim > x.ndim else y
      for x, y in zip(leaves, _meet(rule, alone, leaves))
  ])


_NO_MEAN = (
    'over_workers was called on {}, {}{}, which differs between workers and has'
    ' no mean. Give another reduction, such as jnp.sum or jnp.max; a random key'
    ' is returned as it is.'
)


@jax.custom_jvp
def _undifferentiated(x: Any) -> Any:
  """Returns `x`; raises where its derivative is asked for."""
  return x


@functools.partial(_undifferentiated.defjvp, symbolic_zeros=True)
def _derivative(primals: Any, tangents: Any) -> Any:
  (x,), (tangent,) = primals, tangents
  if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
    raise ValueError(
        'over_workers was called on what is being differentiated, inside of a'
        " loss: but a gradient is one worker's, and the exchange is where they"
        ' meet. Return the value beside the loss (has_aux=True) and call'
        ' over_workers on it outside, or give it jax.lax.stop_gradient(x).'
    )
  return x, tangent


def alike(tree: Any, message: str) -> Any:
  """Returns `tree`; raises `message` of a leaf that differs between workers."""

  def rule(size: int, cut: Any, tree: Any) -> Any:
    for path, is_cut in jax.tree_util.tree_flatten_with_path(cut[0])[0]:
      if is_cut:
        raise ValueError(message.format(jax.tree_util.keystr(path)))
    return tree, cut[0]

  return _meet(rule, lambda tree: tree, tree)


# What a step returns ----------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('value', 'old'),
    meta_fields=('name', 'keys', 'role', 'at', 'differs', 'apart'),
)
@dataclasses.dataclass
class Result:
  """A leaf of what a step returns or changes, as one worker has it.

  The role says how the workers' values become one: 'stacked' (they stay apart),
  'state' (they must be equal), 'statistics' (averaged over those that are
  finite), 'added' (all that was added to the old one), 'key' (worker 0's), or
  'output' (the mean of numbers, the rows of a batch).
  """

  name: str  # for error messages
  keys: Keys  # its path
  role: str
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
    results: list[Result], workers: Workers, rows: int | None, axis: int
) -> list[Result]:
  """Makes one value for all workers of what each of them returns.

  A worker's batch has `rows` rows, along `axis` of results; rows are moved to
  the first axis. Raises for a value that must not differ between workers. On a
  worker's own device `results` know `differs`, and what keeps a worker axis is
  this worker's.
  """
  for r in results:
    r.value = jnp.asarray(r.value)
  if _TRACE.group is not None:
    for r in results:
      r.value, r.old = _combine(r, workers, rows, axis)[0], None
    return results

  def rule(size: int, cut: Any, values: list[Any], olds: list[Any]) -> Any:
    out = []
    for r, value, old, differs in zip(results, values, olds, cut[0]):
      r.value, r.old, r.differs = value, old, differs
      x, r.apart = _combine(r, workers, rows, axis)
      out.append(x)
    return out, [r.apart for r in results]

  values = _meet(
      rule, lambda values, olds: values,
      [r.value for r in results], [r.old for r in results],
  )
  for r, value in zip(results, values):
    r.value, r.old = value, None
  return results


def _combine(
    result: Result, workers: Workers, rows: int | None, axis: int
) -> tuple[jax.Array, bool]:
  """Returns one value of all workers', and whether it stays apart instead.

  The value is laid out as gradients are if it differs: stacked, or one
  worker's.
  """
  x, old = result.value, result.old
  lead = int(workers.stacked_gradients)
  if result.role == 'stacked':
    return x if result.differs or not lead else lift.stack(workers, x), True
  if not result.differs and result.role != 'added':
    return x, False
  if not result.differs and lead:
    x = jnp.broadcast_to(x, (workers.count, *x.shape))
  shape, name = x.shape[lead:], result.name
  is_real = jnp.issubdtype(x.dtype, jnp.inexact)  # integers have no mean
  if result.role == 'added':
    before = old[None] if lead else old
    return old + collectives.total(x - before, workers.own_axis), False
  if result.role == 'state' or (result.role == 'statistics' and not is_real):
    raise ValueError(_differs(name))
  if result.role == 'statistics':
    # Statistics of a worker that saw a NaN would stay NaN for ever.
    return lift.mean_finite(workers, x, old), False
  if result.role == 'key':
    return collectives.first(x, workers.own_axis), False
  if not shape and is_real:
    if workers.spmd_axis_name is not None:
      return jnp.mean(x, axis=0), False
    return collectives.mean(x, workers.own_axis), False
  if shape[axis : axis + 1] == (rows,):
    return jnp.moveaxis(x, axis + lead, lead), True
  rows_too = f', and no array with the {rows} rows of a worker, axis {axis}'
  raise ValueError(
      f'Of what the step returns, {name}, {x.dtype}{list(shape)}, differs'
      ' between workers. It is no real number, whose mean is returned'
      f'{"" if rows is None else rows_too}. Return'
      ' demo_optax.over_workers(x, jnp.sum) for counts and the like, or'
      ' demo_optax.over_workers(x) for the mean of statistics.'
  )
