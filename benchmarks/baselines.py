"""Other exchanges of matrices to compare with, from their papers.

All are transformations of one worker's gradients for a `data_parallel` step.
What those of low rank average over all workers are the two thin factors of a
matrix, `rank * (rows + columns)` numbers. The others average the same places
of all workers' matrices, so that a worker receives as much with any number.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

import demo_optax


class ExchangeState(NamedTuple):
  """State of an exchange of matrices.

  Attributes:
    worker_stacked: of each matrix, what a worker has not sent, or its momentum
      (Dion), `[workers, rows, columns]`.
    shared: of each matrix, what is known to all: right factors of the step
      before `[columns, rank]`, places to send, or the number of steps.
  """

  worker_stacked: chex.ArrayTree
  shared: chex.ArrayTree


def _transformation(
  workers: demo_optax.Workers,
  first: Callable[[jax.Array, jax.Array], jax.Array],
  of_matrix: Any,
) -> optax.GradientTransformation:
  """Returns the exchange of each matrix.

  Args:
    workers: those who exchange.
    first: from a matrix and a key to what all know at first.
    of_matrix: from a worker's matrix, what it keeps and what all know to the
      common update and both of the next step.
  """

  def init_fn(params: chex.ArrayTree) -> ExchangeState:
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    shared = [first(x, key) for key, x in zip(keys, leaves)]
    zeros = [jnp.zeros((workers.count, *x.shape), x.dtype) for x in leaves]
    return ExchangeState(treedef.unflatten(zeros), treedef.unflatten(shared))

  def update_fn(
    updates: chex.ArrayTree, state: ExchangeState, params: Any = None
  ) -> tuple[chex.ArrayTree, ExchangeState]:
    del params
    leaves, treedef = jax.tree.flatten(updates)
    own, shared = map(jax.tree.leaves, state)
    found = [of_matrix(*x) for x in zip(leaves, own, shared)]
    new, own, shared = map(treedef.unflatten, zip(*found))
    return new, ExchangeState(own, shared)

  return optax.GradientTransformation(init_fn, update_fn)


def _low_rank(
  rank: int, workers: demo_optax.Workers, of_matrix: Any
) -> optax.GradientTransformation:

  def right(x: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (x.shape[1], rank), x.dtype)

  return _transformation(workers, right, of_matrix)


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

  return _low_rank(rank, workers, of_matrix)


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

  return _low_rank(rank, workers, of_matrix)


def _of_each_part(topk: int, size: int, workers: int) -> int:
  """Returns what a worker chooses of a matrix for a common mask."""
  return max(topk * size // (4096 * workers), 1)


def _common_rows_of(topk: int, matrix: jax.Array) -> int:
  return max(round(topk * matrix.shape[0] / 4096), 1)


def common_mask(
  topk: int, workers: demo_optax.Workers, decay: float
) -> optax.GradientTransformation:
  """Averages coefficients that the workers chose together a step before.

  Of the coefficients of 64x64 chunks, each worker chooses the largest in its
  part (every N-th), so that all together choose `topk` of 4096. The exchange of
  SCAPE, by its abstract, which applies it to AdamS without a transform.

  References:
    Zheng et al., `SCAPE <https://arxiv.org/abs/2607.01678>`_.
  """
  n = workers.count

  def first(x: jax.Array, _: jax.Array) -> jax.Array:
    return jnp.arange(n * _of_each_part(topk, x.size, n))

  def of_matrix(
    update: jax.Array, residual: jax.Array, places: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    matrix = decay * residual + update
    flat = _chunks_of_dct(matrix).reshape(-1)
    values = demo_optax.over_workers(flat[places])
    update = jnp.zeros_like(flat).at[places].set(values)
    flat = flat.at[places].set(0.0)
    # Rows are the parts; of what a worker finds in all, its part counts.
    _, found = jax.lax.top_k(jnp.abs(flat.reshape(-1, n).T), len(places) // n)
    found = demo_optax.over_workers(
      found * n + jnp.arange(n)[:, None], lambda x, axis: jnp.diagonal(x).T
    )
    update, residual = (
      _chunks_of_dct(x.reshape(matrix.shape), inverse=True)
      for x in (update, flat)
    )
    return update, residual, found.reshape(-1)

  return _transformation(workers, first, of_matrix)


def _chunks_of_dct(x: jax.Array, inverse: bool = False) -> jax.Array:
  """Returns the DCT of each 64x64 chunk, where it is, or what it was of."""
  basis = jax.scipy.fft.dct(jnp.eye(64), axis=0, norm='ortho')
  basis = basis.T if inverse else basis
  chunks = x.reshape(x.shape[0] // 64, 64, x.shape[1] // 64, 64)
  return jnp.einsum('aibj,ki,lj->akbl', chunks, basis, basis).reshape(x.shape)


def common_rows(
  topk: int, workers: demo_optax.Workers, decay: float, width: int = 4
) -> optax.GradientTransformation:
  """Averages the largest rows of the mean matrix, which a sketch finds.

  The exchange of ARC-Top-K: the mean of all matrices' products with the same
  random `[columns, width]` has about the norms of the mean matrix's rows.

  References:
    Chen et al., `ARC-Top-K <https://arxiv.org/abs/2510.26709>`_.
  """

  def of_matrix(
    update: jax.Array, residual: jax.Array, count: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    matrix = decay * residual + update
    key = jax.random.fold_in(jax.random.key(0), count)
    random = jax.random.normal(key, (matrix.shape[1], width), matrix.dtype)
    sketch = demo_optax.over_workers(matrix @ random)
    _, rows = jax.lax.top_k(
      jnp.linalg.norm(sketch, axis=1), _common_rows_of(topk, matrix)
    )
    mean = demo_optax.over_workers(matrix[rows])
    update = jnp.zeros_like(matrix).at[rows].set(mean)
    return update, matrix.at[rows].set(0.0), count + 1

  return _transformation(
    workers, lambda x, key: jnp.zeros([], jnp.int32), of_matrix
  )


def sent_bytes(
  method: str, topk: int, matrix: jax.Array, workers: int
) -> float:
  """Returns what a worker sends of a matrix, by ring all-reduces.

  Factors are in float32. Values at common places are in bfloat16, the places of
  a mask (all-gathered) take the fixed bits of a part.

  Args:
    method: of `optimizers.py`.
    topk: the rank, or of 4096 what is sent.
    matrix: one of the parameters.
    workers: their number.
  """
  ring = 2 * (workers - 1) / workers
  if method == 'common_mask':
    k = _of_each_part(topk, matrix.size, workers)
    bits = math.ceil(math.log2(matrix.size / workers))
    return k * workers * ring * 2 + (workers - 1) * k * bits / 8
  if method == 'common_rows':
    rows = _common_rows_of(topk, matrix)
    return ring * (2 * rows * matrix.shape[1] + 4 * 4 * matrix.shape[0])
  return ring * 4 * topk * sum(matrix.shape)
