"""Several optimizers for one model, and one exchange for all."""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import _tree as trees
from demo_optax.demo import DeMoState
from demo_optax.exchange import (
  Request,
  Response,
  exchange,
  nothing_known,
)
from demo_optax.gradients import average
from demo_optax.workers import Workers


def partition(
    transforms: Mapping[Any, optax.GradientTransformation],
    labels: Any,
    *,
    workers: Workers,
) -> optax.GradientTransformationExtraArgs:
  r"""`optax.partition` for stacked gradients, with one exchange per step.

  Every leaf goes to the transformation of its label. Those that hold a
  `scale_by_demo` get each worker's own gradients, whatever stands before it in
  their chain, and all that they exchange travels in one payload; they may
  differ in compressor, decay and base optimizer. The others (`optax.adamw` for
  embeddings and norms) get gradients averaged over the workers, as by
  `average`: do not put that before them.

  The transformations that exchange are called twice in each step: to learn what
  is to be exchanged, and again with what has come. In the first call what
  follows an exchange sees zeros, and its results are dropped; under `jax.jit`
  they are not computed, but effects such as `jax.debug.print` show twice.

  A worker whose gradients of the exchanging leaves are not all finite is left
  out of the exchange, as `exchange_info` counts; one whose gradients of the
  averaged leaves are not, of those averages.

  Args:
    transforms: a transformation for each label; each has at most one
      `scale_by_demo`, of these `workers`.
    labels: a tree of labels like the parameters (one in place of a subtree
      holds for all of it), or a function that makes it from the parameters.
    workers: who takes part.

  Returns:
    A gradient transformation from stacked gradients `[workers, ...]` to updates
    in the parameters' shapes. Its state is `optax.PartitionState`; `momentum`,
    `with_momentum`, `plan` and `Checkpointer` take a tree of compressors like
    the parameters for it, with `None` where nothing is exchanged.

  Raises:
    ValueError: a label without a transformation, at init; when traced, an
      update that has not its parameter's shape, a transformation with several
      exchanges or another `partition` in it, or an exchange of other workers;
      no `params`.
    TypeError: `workers`, `transforms` or one of them is something else, at
      once.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.partition(
    ...     {'sparse': demo_optax.demo(1e-3, workers=workers),
    ...      'dense': optax.sgd(1e-3)},
    ...     {'embedding': 'dense', 'kernel': 'sparse'},
    ...     workers=workers)
    >>> params = {'embedding': jnp.ones((8, 4)), 'kernel': jnp.ones((4, 4))}
    >>> gradients = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    >>> updates, state = tx.update(gradients, tx.init(params), params)
    >>> print(jax.tree.map(lambda u: u.shape, updates))
    {'embedding': (8, 4), 'kernel': (4, 4)}

  References:
    Hidden layers by one optimizer and embeddings by another: Jordan et al.,
    `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024; exchanges:
    Peng et al. <https://arxiv.org/abs/2411.19870>, Algorithm 1.
  """
  trees.check_type(
      'workers', workers, Workers, 'demo_optax.Workers.simulated(n)'
  )
  trees.check_type('transforms', transforms, Mapping, "{'label': tx, ...}")
  for label, tx in transforms.items():
    trees.check_type(
        f'transforms[{label!r}]',
        tx,
        optax.GradientTransformation,
        'optax.adamw(1e-3)',
    )
  mean = average(workers=workers)

  def by_label(params: chex.ArrayTree) -> tuple[Any, Any]:
    """`optax.partition` of these parameters, and the label of each leaf."""
    tree = labels(params) if callable(labels) else labels
    tree = jax.tree.map(
        lambda label, part: jax.tree.map(lambda _: label, part), tree, params
    )
    return optax.partition(transforms, tree), tree

  def init_fn(params: chex.ArrayTree) -> optax.PartitionState:
    inner, _ = by_label(params)
    return inner.init(params)

  def update_fn(
      updates: chex.ArrayTree,
      state: optax.PartitionState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, optax.PartitionState]:
    if params is None:
      raise ValueError(
          'partition needs params: tx.update(grads, state, params).'
      )
    if 'demo_exchange' in extra_args:
      raise ValueError(
          'A demo_optax.partition is inside of another one, and there can be'
          ' one exchange only: give all transformations to the outer one.'
      )
    inner, tree = by_label(params)
    exchanging = {
        label: _exchanges(label, inner_state)
        for label, inner_state in state.inner_states.items()
    }
    dense = jax.tree.map(lambda label: not exchanging[label], tree)
    averaged = optax.masked(mean, dense)
    updates, _ = averaged.update(updates, averaged.init(params), params)

    requests: list[Request] = []

    def ask(request: Request) -> Response:
      requests.append(_checked(request, workers))
      return _nothing_yet(request)

    inner.update(updates, state, params, demo_exchange=ask, **extra_args)
    responses = iter(exchange(requests) if requests else [])
    updates, state = inner.update(
        updates,
        state,
        params,
        demo_exchange=lambda request: next(responses),
        **extra_args,
    )
    _check_shapes(updates, params)
    return updates, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _exchanges(label: Any, state: Any) -> bool:
  """Whether a state is of a transformation that exchanges; once, then."""

  def is_leaf(x: Any) -> bool:
    return isinstance(x, DeMoState)

  found = [x for x in jax.tree.leaves(state, is_leaf=is_leaf) if is_leaf(x)]
  busy = [x for x in found if jax.tree.leaves(x.worker_stacked)]
  if len(busy) > 1:
    raise ValueError(
        f'transforms[{label!r}] has {len(busy)} exchanges: have one'
        ' scale_by_demo in each, and a label for each.'
    )
  return bool(found)


def _checked(request: Request, workers: Workers) -> Request:
  if request.workers != workers:
    raise ValueError(
        f'A transformation exchanges among {request.workers}, but partition'
        f' among {workers}: give both the same workers.'
    )
  if request.pending:
    raise ValueError(
        'partition exchanges everything at once, in time: give its'
        ' transformations delay=0.'
    )
  return request


def _nothing_yet(request: Request) -> Response:
  """A response of the right shapes, which only the first call sees."""
  updates = [
      jnp.zeros(leaf.plan.grid.shape, x.dtype)
      for leaf, x in zip(request.leaves, request.momentum)
  ]
  return updates, request.momentum, nothing_known()


def _check_shapes(updates: chex.ArrayTree, params: chex.ArrayTree) -> None:
  flat, (like,) = trees.flatten_alike(updates, params)
  for (path, update), param in zip(flat, like):
    if np.shape(update) != np.shape(param):
      raise ValueError(
          f'The update of {trees.leaf_name(path)} has shape'
          f' {np.shape(update)}, and its parameter {np.shape(param)}: its'
          ' transformation changed it.'
      )

