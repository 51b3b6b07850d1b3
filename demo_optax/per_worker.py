"""Transformations of each worker's own gradient, and the mean of all."""

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
from demo_optax.workers import Workers, checks, inside

_WORKERS = 'demo_optax.Workers.simulated(4)'


class PerWorkerState(NamedTuple):
  """State of `per_worker`.

  Attributes:
    worker_stacked: the state of every worker's transformation, stacked
      `[workers, ...]`.
  """

  worker_stacked: chex.ArrayTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Averaged:
  """Paths and shapes of the parameters whose gradients are averaged."""

  params: frozenset[Any]


class AverageState(NamedTuple):
  """State of `average`, by which `data_parallel` knows the parameters."""

  averaged: Averaged


def per_worker(
    tx: optax.GradientTransformation, *, workers: Workers
) -> optax.GradientTransformationExtraArgs:
  r"""Applies a transformation to each worker's own gradient.

  .. math:: g_i \leftarrow \mathrm{tx}(g_i)

  For links before the exchange. In a step of `data_parallel` those with a state
  need it, such as `optax.trace` or an EMA of gradients: each worker then keeps
  a state of its own; what keeps none, such as a clip by norm, works without.
  Where gradients are stacked, whatever looks across elements needs it too:
  `optax.clip_by_global_norm` would take one norm over all workers. Leaves that
  take no part in exchanges (of integers, or empty) pass through.

  Random keys in the state differ between workers (`optax.add_noise`): each
  folds its number into them.

  Where the result or the new state would not be finite, as after a gradient of
  NaN, the worker keeps the state it had, and its gradients become NaN: an
  exchange behind it leaves the worker out of this step and of no other.

  Args:
    tx: a transformation that maps gradients to gradients of the same shapes.
    workers: the workers of the exchange.

  Returns:
    A gradient transformation: in a step of `data_parallel`, and with
    `Workers.on_axis`, from the worker's own gradients to its own; elsewhere
    from stacked gradients `[workers, ...]` to stacked gradients.

  Raises:
    TypeError: `workers` is something else.
    ValueError: gradients that are not one per worker, when traced.

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

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, whose runs clip each worker's gradient
    at norm 1.
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
    finite = [jnp.isfinite(x).all() for x in _inexact(updates)]
    finite += [  # what was infinite before, such as a best loss, may stay so
        (jnp.isfinite(x) | ~jnp.isfinite(old)).all()
        for x, old in zip(_inexact(new), _inexact(state))
    ]
    # One by one: what is stacked must lie alike on axes of type Explicit.
    good = functools.reduce(jnp.logical_and, finite, jnp.bool(True))
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
    ) -> tuple[Any, Any, tuple[()]]:
      del index
      return *update_if_finite(gradients, state, *shared), ()

    new, state, _ = workers.map(
        update_one,
        _tree.mask_others(updates),
        state.worker_stacked,
        (_tree.mask_others(params), extra_args),
    )
    return _with_others(new, updates), PerWorkerState(state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def stack_own(tree: chex.ArrayTree, workers: Workers) -> chex.ArrayTree:
  """Returns a copy of a tree for every worker; of random keys one each."""

  def stack(path: Path, x: Any) -> Any:
    stacked = workers.stack(x)
    if not prng.is_key(path_keys(path), jnp.asarray(x)):
      return stacked
    _, keys, _ = workers.map(
        lambda index, own, key, shared: (own, prng.fold(key, index), shared),
        (), stacked, (),
    )
    return keys

  tree = jax.tree_util.tree_map_with_path(stack, tree)
  return _tree.stack_annotations(tree, workers.spmd_axis_name)


def average(*, workers: Workers) -> optax.GradientTransformation:
  r"""Averages the workers' gradients: plain data parallelism.

  .. math::
    u = \frac1N \sum_i g_i

  In float32 or wider. Leaves of up to 64 KB are gathered and added in the order
  of the workers, with the same bits in every map; others by an all-reduce, in
  an order of its own. As in the
  exchange, a worker whose gradients are not all finite is left out of the mean;
  the mean over nobody is zero. Integer leaves get zeros.

  The first link of a baseline to compare with. For some leaves of a model take
  `None` in a tree of compressors: then `exchange_info` also counts the workers
  that were left out, which here nothing does.

  Args:
    workers: the workers of the exchange.

  Returns:
    A gradient transformation to the mean, in the parameters' shapes: in a step
    of `data_parallel`, and with `Workers.on_axis`, of the worker's own
    gradients; elsewhere of stacked gradients `[workers, ...]`.

  Raises:
    TypeError: `workers` is something else.
    ValueError: gradients that are not one per worker, when traced.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = optax.chain(
    ...     demo_optax.average(workers=workers), optax.sgd(1.0))
    >>> params = jnp.zeros(2)
    >>> gradients = jnp.array([[3.0, 4.0], [1.0, 0.0]])
    >>> updates, _ = tx.update(gradients, tx.init(params), params)
    >>> print(updates)
    [-2. -2.]

  References:
    The baseline of Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_ ("AdamW-DDP").
  """
  _checks.check_type('workers', workers, Workers, _WORKERS)

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    if not inside.is_mapped():
      return stacked_mean(updates, params, workers)
    mean, _ = inside.call_stacked(
        lambda updates, state, params, _, workers: (
            stacked_mean(updates, params, workers), state
        ),
        workers,
        updates,
        (),
        params,
    )
    return mean

  def stacked_mean(
      updates: chex.ArrayTree, params: chex.ArrayTree | None, workers: Workers
  ) -> chex.ArrayTree:
    _check_own(updates, params, workers)

    leaves, treedef = jax.tree.flatten(updates)
    like = leaves if params is None else treedef.flatten_up_to(params)
    taking_part = [x for x in leaves if _tree.is_exchanged(x)]
    present = workers.all_finite(taking_part)
    lead = 1 if workers.stacked_gradients else 0

    def mean(x: Any, param: Any) -> Any:
      if not _tree.is_exchanged(x):
        dtype = x.dtype if x.dtype != jax.dtypes.float0 else param.dtype
        return _tree.zeros(x.shape[lead:], dtype)
      wide = jnp.promote_types(x.dtype, jnp.float32)
      return workers.mean_present(x.astype(wide), present).astype(x.dtype)

    return treedef.unflatten([mean(x, p) for x, p in zip(leaves, like)])

  def init_fn(params: chex.ArrayTree) -> AverageState:
    return AverageState(Averaged(frozenset(
        (path_keys(path), np.shape(x))
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    )))

  def update_state(
      updates: chex.ArrayTree,
      state: AverageState,
      params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, AverageState]:
    return update_fn(updates, params), state

  return optax.GradientTransformation(init_fn, update_state)


def _inexact(tree: chex.ArrayTree) -> list[jax.Array]:
  leaves = map(jnp.asarray, jax.tree.leaves(tree))
  return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


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
