"""Methods of low rank to compare with, from their papers.

All are transformations of one worker's gradients for a `data_parallel` step.
What those of low rank average over all workers are the two thin factors of a
matrix, `rank * (rows + columns)` numbers.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

import demo_optax


class LowRankState(NamedTuple):
  """State of the methods of low rank.

  Attributes:
    worker_stacked: of each matrix, what a worker has not sent (PowerSGD), or
      its momentum (Dion), `[workers, rows, columns]`.
    right: the right factors of the step before, `[columns, rank]`.
  """

  worker_stacked: chex.ArrayTree
  right: chex.ArrayTree


def _init(rank: int, workers: demo_optax.Workers) -> Any:

  def init_fn(params: chex.ArrayTree) -> LowRankState:
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    right = [
        jax.random.normal(key, (x.shape[1], rank), x.dtype)
        for key, x in zip(keys, leaves)
    ]
    zeros = [jnp.zeros((workers.count, *x.shape), x.dtype) for x in leaves]
    return LowRankState(treedef.unflatten(zeros), treedef.unflatten(right))

  return init_fn


def _transformation(
    rank: int, workers: demo_optax.Workers, of_matrix: Any
) -> optax.GradientTransformation:

  def update_fn(
      updates: chex.ArrayTree, state: LowRankState, params: Any = None
  ) -> tuple[chex.ArrayTree, LowRankState]:
    del params
    leaves, treedef = jax.tree.flatten(updates)
    residuals, right = map(jax.tree.leaves, state)
    found = [of_matrix(*x) for x in zip(leaves, residuals, right)]
    new, residuals, right = map(treedef.unflatten, zip(*found))
    return new, LowRankState(residuals, right)

  return optax.GradientTransformation(_init(rank, workers), update_fn)


def _factors(
    matrix: jax.Array, right: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns one step of subspace iteration on the mean of the matrices.

  Returns:
    Orthonormal columns, and the matrix's product with them.
  """
  left, _ = jnp.linalg.qr(demo_optax.over_workers(matrix @ right))
  return left, demo_optax.over_workers(matrix.T @ left)


def power_sgd(
    rank: int, workers: demo_optax.Workers
) -> optax.GradientTransformation:
  """Averages gradients by one step of subspace iteration, with error feedback.

  References:
    Vogels et al., `PowerSGD <https://arxiv.org/abs/1905.13727>`_, Algorithms 1
    and 2, with the warm start.
  """

  def of_matrix(
      gradient: jax.Array, error: jax.Array, right: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    matrix = gradient + error
    left, right = _factors(matrix, right)
    update = left @ right.T
    return update, matrix - update, right

  return _transformation(rank, workers, of_matrix)


def dion(
    rank: int, workers: demo_optax.Workers, mu: float = 0.95
) -> optax.GradientTransformation:
  """Orthonormalises a low-rank approximation of the workers' own momenta.

  References:
    Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, Algorithm 1, with a
    momentum for each worker; the update is scaled by sqrt(rows / columns) of
    the output and the input, as theirs.
  """

  def of_matrix(
      gradient: jax.Array, momentum: jax.Array, right: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    matrix = momentum + gradient
    left, factor = _factors(matrix, right)
    momentum = matrix - (1 - mu) * left @ factor.T
    norms = jnp.linalg.norm(factor, axis=0, keepdims=True)
    right = factor / jnp.maximum(norms, 1e-20)
    rows, columns = gradient.shape  # of input and output
    return left @ right.T * (columns / rows) ** 0.5, momentum, right

  return _transformation(rank, workers, of_matrix)


def sent_bytes(params: chex.ArrayTree, rank: int, workers: int) -> float:
  """Returns what a worker sends of matrices by ring all-reduces of factors."""
  elements = sum(rank * sum(x.shape) for x in jax.tree.leaves(params))
  return 2 * (workers - 1) / workers * 4 * elements
