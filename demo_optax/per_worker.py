"""Transformations of each worker's own gradient, and the mean of all."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import _checks, _tree
from demo_optax._paths import Path, path_keys
from demo_optax.numerics import prng
from demo_optax.workers import Workers, checks, inside, lift

_WORKERS = 'demo_optax.Workers.simulated(4)'


class PerWorkerState(NamedTuple):
  """State of `per_worker`.

  Attributes:
    worker_stacked: each worker's state of the transformation, stacked
      `[workers, ...]`.
  """

  worker_stacked: chex.ArrayTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Averaged:
  """Paths and shapes of the parameters whose gradients are averaged."""

  params: frozenset[Any]


class AverageState(NamedTuple):
  """State of `average`, from which `data_parallel` infers the parameters."""

  averaged: Averaged


def per_worker(
    tx: optax.GradientTransformation, *, workers: Workers
) -> optax.GradientTransformationExtraArgs:
  """Applies a transformation to each worker's gradient, before the exchange.

  In a `data_parallel` step, links with a state need it, such as `optax.trace`
  or an EMA of gradients: each worker then keeps its state. A stateless link,
  such as a clip by norm, works without. With stacked gradients, any link that
  looks across elements needs it: `optax.clip_by_global_norm` would take one
  norm over all workers. Integer and empty leaves pass through.

  Random keys in the state differ between workers (`optax.add_noise`): each
  worker folds its number into them.

  If the result or the new state would not be finite, the worker keeps its state
  and its gradients become NaN. The exchange then excludes it from this step
  alone.

  It takes the worker's gradients to its own in a `data_parallel` step and with
  `Workers.on_axis`; else stacked gradients `[workers, ...]` to stacked ones.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> clip = demo_optax.per_worker(
    ...     optax.clip_by_global_norm(1.0), workers=workers)
    >>> params = jnp.zeros(2)
    >>> gradients = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    >>> clipped, _ = clip.update(gradients, clip.init(params), params)
    >>> print(clipped)
    [[0.6 0.8]
     [0.3 0.4]]
  """
  _checks.check_type('workers', workers, Workers, _WORKERS)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params: chex.ArrayTree) -> PerWorkerState:
    return PerWorkerState(
        stack_own(tx.init(_tree.mask_others(params)), workers)
    )

  def update_if_finite(
      gradients: Any, state: Any, params: Any, extra_args: dict[str, Any]
  ) -> tuple[Any, Any]:
    """Updates one worker's gradients; keeps a state that would be NaN."""
    updates, new = _tree.update_without_variables(
        tx.update, gradients, state, params, **extra_args
    )
    if not jax.tree.leaves(state):  # NaN needs no help to be passed on
      return updates, new
    good = stays_finite(updates, new, state)
    return (
        jax.tree.map(lambda u: jnp.where(good, u, jnp.nan), updates),
        jax.tree.map(lambda x, old: jnp.where(good, x, old), new, state),
    )

  def update_fn(
      updates: chex.ArrayTree,
      state: PerWorkerState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, PerWorkerState]:
    if inside.is_mapped():
      new, own = update_if_finite(
          _tree.mask_others(updates),
          state.worker_stacked,
          _tree.mask_others(params),
          extra_args,
      )
      return _with_others(new, updates), PerWorkerState(own)
    _check_own(updates, params, workers)

    def update_one(
        index: jax.Array, gradients: Any, state: Any, shared: Any
    ) -> tuple[Any, Any]:
      del index
      return update_if_finite(gradients, state, *shared)

    new, state = lift.run_alone(
        workers,
        update_one,
        _tree.mask_others(updates),
        state.worker_stacked,
        (_tree.mask_others(params), extra_args),
    )
    return _with_others(new, updates), PerWorkerState(state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def stack_own(tree: chex.ArrayTree, workers: Workers) -> chex.ArrayTree:
  """Copies a tree for every worker, with different random keys."""

  def stack(path: Path, x: Any) -> Any:
    stacked = lift.stack(workers, x)
    if not prng.is_key(path_keys(path), jnp.asarray(x)):
      return stacked
    _, keys = lift.run_alone(
        workers,
        lambda index, own, key, _: (own, prng.fold(key, index)),
        (), stacked, (),
    )
    return keys

  tree = jax.tree_util.tree_map_with_path(stack, tree)
  return _tree.stack_annotations(tree, workers.spmd_axis_name)


def average(*, workers: Workers) -> optax.GradientTransformation:
  """Averages the workers' gradients: plain data parallelism.

  The sum is in float32 or wider. Leaves of up to 64 KB are gathered and added
  in the order of the workers, with equal bits in every map. Larger ones are
  all-reduced, in the collective's order. A worker whose gradients are not all
  finite is excluded, as in the exchange. If all are, the mean is zero.

  Use it as the first link of a baseline. To average some leaves of a model,
  prefer `None` in a tree of compressors: `exchange_info` then counts excluded
  workers.

  Takes gradients as `per_worker` does, to updates in the parameters' shapes;
  zeros for integer leaves.
  """
  _checks.check_type('workers', workers, Workers, _WORKERS)

  def update_fn(
      updates: chex.ArrayTree,
      state: AverageState,
      params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, AverageState]:
    inside.check_called(workers)
    if inside.is_mapped():
      mean, _ = inside.call_stacked(
          stacked_update, workers, updates, (), params
      )
      return mean, state
    return stacked_update(updates, state, params, (), workers)

  def stacked_update(
      updates: chex.ArrayTree,
      state: Any,
      params: chex.ArrayTree | None,
      hyperparams: Any,
      workers: Workers,
  ) -> tuple[chex.ArrayTree, Any]:
    del hyperparams
    _check_own(updates, params, workers)
    leaves, treedef = jax.tree.flatten(updates)
    like = leaves if params is None else treedef.flatten_up_to(params)
    taking_part = [x for x in leaves if _tree.is_exchanged(x)]
    present = lift.all_finite(workers, taking_part)
    lead = 1 if workers.stacked_gradients else 0

    def mean(x: Any, param: Any) -> Any:
      if not _tree.is_exchanged(x):
        return _tree.zero_update(x, param, lead)
      return lift.mean_present(workers, x, present)

    means = [mean(x, param) for x, param in zip(leaves, like)]
    return treedef.unflatten(means), state

  def init_fn(params: chex.ArrayTree) -> AverageState:
    return AverageState(Averaged(frozenset(
        (path_keys(path), np.shape(x))
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    )))

  return optax.GradientTransformation(init_fn, update_fn)


def stays_finite(
    updates: chex.ArrayTree, new: chex.ArrayTree, old: chex.ArrayTree
) -> jax.Array:
  """Returns whether updates and a new state are finite, bool `[]`.

  Infinity in the old state, such as an initial best loss, may stay.
  """

  def inexact(tree: chex.ArrayTree) -> list[jax.Array]:
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]

  finite = [jnp.isfinite(x) for x in inexact(updates)]
  finite += [
      jnp.isfinite(x) | ~jnp.isfinite(before)
      for x, before in zip(inexact(new), inexact(old))
  ]
  # A kernel for the rows of an array, one for all rows of one type: an array
  # by itself takes two. Sharding is part of a type on Explicit axes.
  rows = collections.defaultdict(list)
  for x in finite:
    row = x.all(tuple(range(1, x.ndim)))
    rows[jax.typeof(row)].append(row)
  found = [functools.reduce(jnp.logical_and, x).all() for x in rows.values()]
  return functools.reduce(jnp.logical_and, found, jnp.bool(True))


def _with_others(
    new: chex.ArrayTree, updates: chex.ArrayTree
) -> chex.ArrayTree:
  """Returns `new`, with the leaves of `updates` that it masks."""
  leaves, treedef = jax.tree.flatten(updates)
  return treedef.unflatten([
      x if isinstance(update, optax.MaskedNode) else update
      for update, x in zip(treedef.flatten_up_to(new), leaves)
  ])


def _check_own(
    gradients: chex.ArrayTree, params: chex.ArrayTree | None, workers: Workers
) -> None:
  flat, (like,) = _tree.flatten_alike(gradients, params)
  for (path, gradient), param in zip(flat, like):
    checks.check_gradient(_tree.leaf_name(path), gradient, param, workers)
