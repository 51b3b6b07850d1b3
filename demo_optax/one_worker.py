"""One worker's view: operations of all workers inside one worker's step.

`data_parallel` runs a step under `jax.vmap` over the workers. What is written
in the step sees one worker's arrays; the functions here are the places where
all workers meet. Each is a `jax.custom_batching.custom_vmap`: its rule receives
the arrays of all workers at once, stacked, and returns what is equal on all of
them without a worker axis.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from demo_optax.workers import Workers, sharding
from demo_optax.workers.sharding import Keys, path_keys

# The axis that `data_parallel` maps a step over. No axis of a mesh or of a user
# has this name.
WORKER_AXIS = 'demo_optax_workers'


def is_mapped() -> bool:
  """Returns whether the caller is traced inside of a `data_parallel` step."""
  try:
    jax.lax.axis_index(WORKER_AXIS)
  except NameError:
    return False
  return True


def exchanged_params(keys: list[Keys]) -> list[set[Keys]]:
  """Returns the paths of the parameters of every exchange in a state."""
  return [
      {k[len(root) :] for k in keys if k[: len(root)] == root}
      for root in sharding.momentum_roots(keys)
  ]


def own_params(keys: Sequence[Keys]) -> list[tuple[int, int, int]]:
  """Finds the parameters of which `local_updates` keeps one copy per worker.

  Args:
    keys: paths of all arrays, of models and of optimizer states.

  Returns:
    for each such parameter the numbers of: the parameter itself, the worker's
    own copy, and the one that all workers share, the last two in the state.

  Raises:
    ValueError: the arrays hold no, or several, trees of these parameters.
  """
  own, shared = ('worker_stacked', 'params'), ('global_params',)
  numbers = {k: number for number, k in enumerate(keys)}
  roots: dict[Keys, set[Keys]] = {}
  for k in keys:
    for start in range(len(k) - 1):
      if k[start : start + 2] == own:
        roots.setdefault(k[:start], set()).add(k[start + 2 :])
  found = []
  for root, params in roots.items():
    if any((*root, *shared, *k) not in numbers for k in params):
      continue  # not a state of local_updates
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
      names = ', '.join(map(sharding.dotted, prefixes)) or 'none'
      raise ValueError(
          'The state of local_updates has parameters of its own for each'
          " worker, which take the place of the model's in the step; the"
          f' arguments and results must hold these once, but hold: {names}.'
      )
    found += [
        (
            numbers[(*prefixes[0], *k)],
            numbers[(*root, *own, *k)],
            numbers[(*root, *shared, *k)],
        )
        for k in sorted(params, key=str)
    ]
  return found


# The exchange -----------------------------------------------------------------


def exchange(
    stacked_update: Callable[..., tuple[Any, Any]],
    workers: Workers,
    updates: Any,
    state: Any,
    params: Any,
    hyperparams: Any = (),
    *,
    own_params: bool = False,
) -> tuple[Any, Any]:
  """Calls a transformation of stacked gradients from one worker's step.

  Args:
    stacked_update: `(updates, state, params, hyperparams) -> (updates, state)`,
      from gradients `[workers, ...]` to updates in the parameters' shapes.
    workers: the workers, as many as the step is mapped over.
    updates: this worker's gradients, in the parameters' shapes.
    state: the state as one worker sees it: leaves with a worker axis without
      that axis.
    params: the parameters, equal on all workers, or None.
    hyperparams: a tree of numbers, equal on all workers.
    own_params: whether every worker has parameters of its own: parameters and
      updates then are stacked `[workers, ...]`, too.

  Returns:
    the updates, equal on all workers unless they have `own_params`; the new
    state, as one worker sees it.

  Raises:
    ValueError: no gradient differs between workers, or something does that must
      not; the message names the leaf.
  """
  flat = jax.tree_util.tree_flatten_with_path(updates)[0]
  grads_def = jax.tree.structure(updates)
  grads = [x for _, x in flat]
  # The gradient of integers is float0, which no operation takes.
  void = [getattr(g, 'dtype', None) == jax.dtypes.float0 for g in grads]
  outs = _update_shapes(grads, void, params)
  old, state_def = jax.tree.flatten(state)
  rest, join_rest = _split_constants((params, hyperparams))
  state_paths = jax.tree_util.tree_flatten_with_path(state)[0]
  stacked = [sharding.is_stacked(path_keys(path)) for path, _ in state_paths]

  @custom_vmap
  def one_worker(index: Any, grads: Any, old: Any, rest: Any) -> Any:
    # Only traced, for shapes and dtypes: `index` is mapped wherever this is
    # reached, so that the rule below takes its place.
    del index, grads, rest
    return [jnp.zeros(x.shape, x.dtype) for x in outs], old

  @one_worker.def_vmap
  def all_workers(
      size: int, batched: Any, index: Any, grads: Any, old: Any, rest: Any
  ) -> Any:
    del index
    _, grads_cut, old_cut, rest_cut = batched
    _check_count(size, workers)
    if grads and not any(grads_cut):
      raise ValueError(_NOT_CUT)
    params_cut, hyper_cut = join_rest(rest_cut, False)
    if not own_params:
      _check_equal('The parameter', params_cut)
    _check_equal('The hyperparameter', hyper_cut)
    for (path, _), is_cut, has_axis in zip(state_paths, old_cut, stacked):
      if is_cut and not has_axis:
        name = jax.tree_util.keystr(path)
        raise ValueError(_differs(f'The optimizer state {name}'))
      if has_axis and not is_cut:
        raise ValueError(_NOT_AN_ARGUMENT)
    # A gradient that is the same on all workers is that of an unused parameter.
    given = iter([
        g if is_cut else jnp.broadcast_to(g, (size, *g.shape))
        for g, is_cut in zip(grads, grads_cut)
    ])
    everyones = [
        np.zeros((size, *x.shape), jax.dtypes.float0) if v else next(given)
        for x, v in zip(outs, void)
    ]
    params, hyper = join_rest(rest)
    if own_params:
      params = jax.tree.map(
          lambda x, is_cut: x if is_cut else workers.stack(x),
          params,
          params_cut,
      )
    new, after = stacked_update(
        grads_def.unflatten(everyones), state_def.unflatten(old), params, hyper
    )
    out = jax.tree.leaves(new), jax.tree.leaves(after)
    return out, ([own_params] * len(out[0]), stacked)

  new, after = one_worker(
      jax.lax.axis_index(WORKER_AXIS),
      [jnp.asarray(g) for g, v in zip(grads, void) if not v],
      old,
      rest,
  )
  return grads_def.unflatten(new), state_def.unflatten(after)


def _split_constants(tree: Any) -> tuple[list[Any], Callable[..., Any]]:
  """Returns the arrays of a tree, and what makes the tree of such a list.

  Python numbers stay what they are: a decay that is known when a step is traced
  makes a smaller program than one that is an array.
  """
  leaves, treedef = jax.tree.flatten(tree)
  known = [isinstance(x, bool | int | float) for x in leaves]

  def join(arrays: list[Any], constant: Any = None) -> Any:
    rest = iter(arrays)
    return treedef.unflatten([
        (x if constant is None else constant) if k else next(rest)
        for x, k in zip(leaves, known)
    ])

  return [x for x, k in zip(leaves, known) if not k], join


def _update_shapes(
    grads: list[Any], void: list[bool], params: Any
) -> list[jax.ShapeDtypeStruct]:
  """Returns shapes and dtypes of the updates, from gradients or parameters."""
  like = jax.tree.leaves(params)
  if len(like) != len(grads):  # masked: checked by the exchange itself
    like = grads
  return [
      jax.ShapeDtypeStruct(
          np.shape(g), jnp.result_type(p) if v else jnp.result_type(g)
      )
      for g, v, p in zip(grads, void, like)
  ]


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


def _check_count(size: int, workers: Workers) -> None:
  if not workers.stacked_gradients or workers.count != size:
    raise ValueError(
        f'data_parallel runs the step for {size} workers, but the'
        f' transformation exchanges among {workers}: give both the same'
        ' workers.'
    )


def _check_equal(what: str, is_cut: Any) -> None:
  for path, cut in jax.tree_util.tree_flatten_with_path(is_cut)[0]:
    if cut:
      raise ValueError(_differs(f'{what} {jax.tree_util.keystr(path)}'))


def _differs(what: str) -> str:
  return (
      f'{what[0].upper()}{what[1:]} differs between workers: it comes of one'
      " worker's own gradient, loss or batch. A gradient that is not exchanged:"
      ' average it (demo_optax.average), or set it to zero. Statistics of'
      ' batches: return demo_optax.over_workers(statistics). A skipped step:'
      ' decide from the update, or from all workers:'
      ' demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is not'
      ' needed, since the exchange leaves out workers with gradients that are'
      ' not finite. A transformation with a state before the exchange: put it'
      ' into demo_optax.per_worker. A wrapper that passes gradients on, or'
      ' compares them with updates (optax.contrib.mechanize): put it behind,'
      ' optax.chain(demo_optax.scale_by_demo(...), wrapper(...)).'
  )


def over_workers(
    tree: Any, reduce: Callable[..., jax.Array] = jnp.mean
) -> Any:
  r"""Reduces one worker's values over all workers, inside of a step.

  .. math:: y = \mathrm{reduce}(x_1, \dots, x_N)

  For what a step decides or returns from all workers' values: skips, counts,
  statistics that are state. It is communication, so keep it small.

  Args:
    tree: this worker's arrays.
    reduce: a reduction such as `jnp.mean`, `jnp.sum`, `jnp.min` or `jnp.all`,
      called with `[workers, ...]` and `axis=0`.

  Returns:
    A tree like `tree`, equal on all workers.

  Raises:
    ValueError: called outside of a `data_parallel` step.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> @demo_optax.data_parallel(workers, batch_argnums=0)
    ... def count_positive(x):
    ...   return demo_optax.over_workers((x > 0).sum(), jnp.sum)
    >>> print(count_positive(jnp.array([1.0, -1.0, 2.0, 3.0])))
    3
  """
  if not is_mapped():
    raise ValueError(
        'over_workers was called outside of a demo_optax.data_parallel step,'
        ' where there is one value for all workers and nothing to reduce.'
    )

  @custom_vmap
  def reduced(index: Any, leaves: list[Any]) -> list[Any]:
    del index
    return [jnp.zeros(x.shape, x.dtype) for x in outs]

  @reduced.def_vmap
  def all_workers(
      size: int, batched: Any, index: Any, leaves: list[Any]
  ) -> Any:
    del index
    stacked = [
        x if is_cut else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_cut in zip(leaves, batched[1])
    ]
    return [reduce(x, axis=0) for x in stacked], [False] * len(outs)

  leaves, treedef = jax.tree.flatten(tree)
  leaves = [jnp.asarray(x) for x in leaves]
  outs = [
      jax.eval_shape(lambda x: reduce(x[None], axis=0), x) for x in leaves
  ]
  index = jax.lax.axis_index(WORKER_AXIS)
  return treedef.unflatten(reduced(index, leaves))


# What a step returns ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
  """A leaf of what a step returns or changes, as one worker has it.

  Attributes:
    name: for error messages.
    keys: its path.
    role: how the workers' values become one: 'stacked' (they stay apart),
      'state' (they must be equal), 'statistics' (averaged over those that are
      finite), 'key' (worker 0's), a `MetricPart`, or 'output' (the mean of
      numbers, the rows of a batch).
    value: the array.
    old: the value before the step, for 'statistics' and metrics.
  """

  name: str
  keys: Keys
  role: Any
  value: Any
  old: Any = None


@dataclasses.dataclass(frozen=True)
class MetricPart:
  """One of the arrays of a metric that accumulates.

  Attributes:
    metric: number of the metric.
    part: 'total' or 'count' of an average; 'count', 'mean' or 'm2' (the sum of
      squared deviations) of a running mean and variance.
  """

  metric: int
  part: str


def settle(
    results: Sequence[Result], workers: Workers, rows: int
) -> tuple[list[jax.Array], list[bool]]:
  """Makes one value for all workers of what each of them returns.

  Args:
    results: what this worker's step returned or changed.
    workers: the workers.
    rows: length of one worker's batch.

  Returns:
    for each result its value; and whether it keeps a worker axis: values that
    stay apart, and rows that are to be joined.

  Raises:
    ValueError: a value that differs between workers and must not, or cannot be
      combined; the message names it.
  """
  apart: list[bool] = []

  @custom_vmap
  def one_worker(index: Any, values: Any, olds: Any) -> Any:
    del index, olds
    return values

  @one_worker.def_vmap
  def all_workers(
      size: int, batched: Any, index: Any, values: Any, olds: Any
  ) -> Any:
    del size, index
    _, cut, _ = batched
    metrics = _metrics(results, values, olds, cut, workers.count)
    out = []
    for j, result in enumerate(results):
      x, old, is_cut = values[j], olds[j], cut[j]
      if result.role == 'stacked':
        out.append((x if is_cut else workers.stack(x), True))
      elif j in metrics:
        out.append((metrics[j], False))
      elif not is_cut:
        out.append((x, False))
      else:
        out.append(_combine(result, x, old, workers, rows))
    apart[:] = [stays for _, stays in out]
    return [x for x, _ in out], list(apart)

  values = one_worker(
      jax.lax.axis_index(WORKER_AXIS),
      [jnp.asarray(r.value) for r in results],
      [0 if r.old is None else r.old for r in results],
  )
  return values, apart


def _combine(
    result: Result, x: jax.Array, old: jax.Array, workers: Workers, rows: int
) -> tuple[jax.Array, bool]:
  """Returns one value of `x [workers, ...]`, and whether it keeps that axis."""
  shape, name = x.shape[1:], result.name
  if result.role == 'state':
    raise ValueError(_differs(name))
  if result.role == 'statistics':
    # Statistics of a worker that saw a NaN would stay NaN for ever.
    finite = workers.all_finite([x])
    return workers.mean_present(x, finite, old), False
  if result.role == 'key':
    return workers.first(x), False
  if not shape and jnp.issubdtype(x.dtype, jnp.inexact):
    return jnp.mean(x, axis=0), False
  if shape and shape[0] == rows:
    return x, True
  raise ValueError(
      f'The step returns {name}, {x.dtype}{list(shape)}, which differs between'
      f' workers and is neither a real number, whose mean is returned, nor an'
      f' array with the {rows} rows of a worker along its first axis. Return'
      ' demo_optax.over_workers(x, jnp.sum) for counts and the like, or'
      ' demo_optax.over_workers(x) for the mean of statistics.'
  )


def _metrics(
    results: Sequence[Result], values: Any, olds: Any, cut: Any, count: int
) -> dict[int, jax.Array]:
  """Returns metrics over all workers' data, by the numbers of their results.

  Every worker went on from the same old values with data of its own. A metric
  in which nothing differs between workers, such as one that was reset, is none
  of them.
  """
  metrics: dict[int, dict[str, int]] = {}
  for j, result in enumerate(results):
    if isinstance(result.role, MetricPart):
      metrics.setdefault(result.role.metric, {})[result.role.part] = j
  merged: dict[int, jax.Array] = {}
  for at in metrics.values():
    if not any(cut[j] for j in at.values()):
      continue
    old = {part: olds[j] for part, j in at.items()}
    new = {  # [workers]; a count may be known when traced, and so be unmapped
        part: values[j] if cut[j] else jnp.broadcast_to(values[j], (count,))
        for part, j in at.items()
    }
    if 'total' in at:
      after = {
          k: x + jnp.sum(new[k] - x, axis=0, dtype=x.dtype)
          for k, x in old.items()
      }
    else:
      after = _joined_moments(old, new)
    merged |= {at[part]: after[part] for part in at}
  return merged


def _joined_moments(
    old: dict[str, jax.Array], new: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  """Returns count, mean and squared deviations of all workers' data.

  Takes each worker's own data out of its running moments, and joins them by
  the formula of Chan, Golub and LeVeque (1979).
  """
  dtype = old['mean'].dtype
  before = old['count'].astype(dtype)
  after = new['count'].astype(dtype)  # [workers]
  added = after - before
  own_mean = old['mean'] + (new['mean'] - old['mean']) * after / jnp.maximum(
      added, 1
  )
  own_m2 = (
      new['m2']
      - old['m2']
      - (own_mean - old['mean']) ** 2 * before * added / jnp.maximum(after, 1)
  )
  total = before + jnp.sum(added)
  mean = (before * old['mean'] + jnp.sum(added * own_mean)) / jnp.maximum(
      total, 1
  )
  m2 = (
      old['m2']
      + jnp.sum(own_m2)
      + before * (old['mean'] - mean) ** 2
      + jnp.sum(added * (own_mean - mean) ** 2)
  )
  return {'count': total.astype(old['count'].dtype), 'mean': mean, 'm2': m2}
