"""Transformations before the exchange, for each worker's own gradient."""

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from demo_optax import _checks, _tree
from demo_optax.numerics import prng
from demo_optax.workers import Workers, checks, inside, lift


class PerWorkerState(NamedTuple):
  """Each worker's state, stacked `[workers, ...]`."""

  worker_stacked: chex.ArrayTree


def per_worker(
  tx: optax.GradientTransformation,
  *,
  workers: Workers,
) -> optax.GradientTransformationExtraArgs:
  """Applies a transformation to each worker's gradient, before the exchange.

  In a `data_parallel` step, links with a state need it, such as `optax.trace`
  or an EMA of gradients: each worker then keeps its state. With stacked
  gradients, any link that looks across elements needs it:
  `optax.clip_by_global_norm` would take one norm over all workers.

  Example:
    >>> import demo_optax, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = optax.chain(
    ...     demo_optax.per_worker(
    ...         optax.clip_by_global_norm(1.0), workers=workers),
    ...     demo_optax.demo(1e-3, workers=workers))

  Random keys in the state differ between workers (`optax.add_noise`): each
  worker folds its number into them. If the result or the new state would not be
  finite, the worker keeps its state and its gradients become NaN. The exchange
  then excludes it from this step alone.

  Args:
    tx: the transformation. Integer and empty leaves pass through.
    workers: those of the exchange. Gradients are one worker's in a
      `data_parallel` step and with `Workers.on_axis`, else stacked,
      `[workers, ...]`.

  Raises:
    ValueError: gradients that are not one for each worker; a state for other
      parameters.
  """
  _checks.check_type('workers', workers, Workers, 'Workers.simulated(4)')
  return of_each(_keeping_finite(tx), workers)


def _keeping_finite(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Keeps a state that would not be finite, and makes updates NaN instead."""
  tx = optax.with_extra_args_support(tx)

  def update_fn(
    updates: chex.ArrayTree,
    state: chex.ArrayTree,
    params: chex.ArrayTree | None = None,
    **extra_args: Any,
  ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
    updates, new_state = tx.update(
      updates,
      state,
      params,
      **extra_args,
    )
    if not jax.tree.leaves(state):  # NaN needs no help to be passed on
      return updates, new_state
    is_good = stays_finite(updates, new_state, state)
    updates = jax.tree.map(lambda x: jnp.where(is_good, x, jnp.nan), updates)
    return updates, optax.tree.where(is_good, new_state, state)

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def of_each(
  tx: optax.GradientTransformation,
  workers: Workers,
) -> optax.GradientTransformationExtraArgs:
  """Applies a transformation that keeps its state finite, as `per_worker`."""
  tx = optax.with_extra_args_support(tx)

  def init_fn(params: chex.ArrayTree) -> PerWorkerState:
    state = tx.init(_tree.mask_others(params))
    return PerWorkerState(stack_own(state, workers))

  def update_one(
    gradients: chex.ArrayTree,
    state: chex.ArrayTree,
    shared: tuple[chex.ArrayTree, dict[str, Any]],
  ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
    """Updates one worker's gradients."""
    params, extra_args = shared
    return _tree.update_without_variables(
      tx.update,
      gradients,
      state,
      params,
      **extra_args,
    )

  def update_fn(
    updates: chex.ArrayTree,
    state: PerWorkerState,
    params: chex.ArrayTree | None = None,
    **extra_args: Any,
  ) -> tuple[chex.ArrayTree, PerWorkerState]:
    own_state = state.worker_stacked
    gradients, params = own_arguments(
      updates, params, own_state, tx.init, workers
    )
    shared = _tree.mask_others(params), extra_args
    run = update_one
    if not inside.is_in_step():
      run = functools.partial(lift.run_alone, workers, update_one)
    changed, own_state = run(gradients, own_state, shared)

    def unmask(
      given: jax.Array,
      update: jax.Array | optax.MaskedNode,
    ) -> jax.Array:
      return given if isinstance(update, optax.MaskedNode) else update

    changed = jax.tree.map(unmask, updates, changed)
    return changed, PerWorkerState(own_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def own_arguments(
  updates: chex.ArrayTree,
  params: chex.ArrayTree | None,
  state: chex.ArrayTree,
  init: Callable[[chex.ArrayTree], chex.ArrayTree],
  workers: Workers,
) -> tuple[Any, Any]:
  """Returns the gradients that are exchanged, and the parameters with one.

  Raises unless gradients are laid out for the workers, and the state is one
  that `init` makes for their parameters.
  """
  params, like = checks.params_and_like(updates, params, workers)
  updates = checks.check_gradients(updates, params, workers)
  # Before a state of other parameters is taken for one of these.
  expected = jax.eval_shape(init, _tree.mask_others(like))
  num_axes = int(not inside.is_in_step())
  _tree.check_state(state, expected, num_axes, workers)
  return _tree.mask_others(updates), params


def stack_own(
  tree: chex.ArrayTree,
  workers: Workers,
) -> chex.ArrayTree:
  """Copies a tree for every worker, with different random keys."""
  fold = jax.vmap(prng.fold, spmd_axis_name=workers.spmd_axis_name)

  def stack(leaf: chex.Numeric) -> jax.Array:
    leaf = jnp.asarray(leaf)
    # [workers, ...]
    stacked = lift.stack(workers, leaf)
    if prng.is_key_array(leaf):
      return fold(stacked, lift.numbers(workers))
    return stacked

  # Flax's annotations do not hold for stacked arrays.
  return jax.tree.map(stack, _tree.without_variables(tree))


def stays_finite(
  updates: chex.ArrayTree,
  new: chex.ArrayTree = (),
  old: chex.ArrayTree = (),
) -> jax.Array:
  """Returns whether updates and a new state are finite, bool `[]`.

  Infinity in the old state, such as an initial best loss, may stay.
  """

  def finite_leaves(tree: chex.ArrayTree) -> list[jax.Array]:
    leaves = filter(_tree.is_inexact, jax.tree.leaves(tree))
    return [*map(jnp.isfinite, leaves)]

  finite = finite_leaves(updates)
  for is_finite, was_finite in zip(finite_leaves(new), finite_leaves(old)):
    finite.append(is_finite | ~was_finite)
  # A kernel for the rows of an array, one for all rows of one type: an array
  # by itself takes two. Sharding is part of a type on Explicit axes.
  rows = collections.defaultdict(list)
  for leaf in finite:
    finite_rows = leaf.all(tuple(range(1, leaf.ndim)))
    rows[jax.typeof(finite_rows)].append(finite_rows)
  result = jnp.bool(True)
  for same_type in rows.values():
    result &= functools.reduce(jnp.logical_and, same_type).all()
  return result
