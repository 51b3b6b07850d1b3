"""Two kernels for NVIDIA GPUs, which read and write a chunk of 64x64 once.

They were compiled for an H100 and interpreted, never run on a card. Products
are in three passes of TF32: emulated, they differ from those of float32 by up
to 1e-6 of a chunk's largest coefficient. JAX 0.12 deprecates this lowering, by
Triton; the one that stays, Mosaic GPU, has products of one pass alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import Numeric
from jax import Array, Ref, lax

from demo_optax.numerics import one_hot, plain

SIDE = 64  # rows and columns of a chunk
GROUP = 4  # neighbours with one maximum
_TERMS = 32  # of a sum, that are added by one product

_dot = functools.partial(
  jnp.dot, precision=lax.DotAlgorithmPreset.TF32_TF32_F32_X3
)


def encode(
  gradients: Array,
  momentum: Array,
  decay: Numeric,
  valid: Array,
  basis: np.ndarray,
) -> tuple[Array, Array]:
  """Adds transformed gradients to decayed momentum, in place.

  Takes chunks and momentum `[chunks, n]`, and functions in the rows of `basis`.
  Momentum does not change unless `valid`, bool `[]`. Returns it, and the
  largest magnitudes of groups of its coefficients, `[chunks, n / GROUP]`.
  """
  chunks, n = momentum.shape
  square = chunks, SIDE, SIDE
  scalars = [jnp.asarray(x, jnp.float32) for x in (decay, valid)]
  new, maxima = _run(
    _encode,
    [gradients.reshape(square), momentum.reshape(square), jnp.stack(scalars)],
    basis,
    [square, (chunks, SIDE, SIDE // GROUP)],
    aliases={1: 0},
  )
  return new.reshape(chunks, n), maxima.reshape(chunks, -1)


def _encode(
  gradient: Ref,
  momentum: Ref,
  scalars: Ref,
  basis: Ref,
  new: Ref,
  maxima: Ref,
) -> None:
  functions, old = basis[...], momentum[...]
  c = _dot(functions, gradient[...].T)  # [column frequency, row position]
  c = _dot(c, functions.T)  # [column frequency, row frequency]
  decay, valid = scalars[0], scalars[1]
  c = jnp.where(valid > 0, decay * old + c, old)
  new[...] = c
  maxima[...] = jnp.max(jnp.abs(c).reshape(SIDE, -1, GROUP), axis=2)


def decode(basis: np.ndarray, indices: Array, values: Array, n: int) -> Array:
  """Adds up coefficients `[workers, chunks, k]`, and inverts the transform.

  A coefficient is an outer product of two functions, and a product of matrices
  adds up many: there are no dense coefficients. Returns chunks `[chunks, n]`.
  """
  chunks = values.shape[1]
  terms = []  # [chunks, sums, _TERMS]
  for x in (indices, values):
    x = one_hot.side_by_side(x)  # [chunks, workers * k]
    x = plain.pad_to(x, x.shape[1] + -x.shape[1] % _TERMS)
    terms.append(x.reshape(chunks, -1, _TERMS))
  [updates] = _run(_decode, terms, basis, [(chunks, SIDE, SIDE)], aliases={})
  return updates.reshape(chunks, n)


def _decode(indices: Ref, values: Ref, basis: Ref, update: Ref) -> None:
  shape = _TERMS, SIDE
  position = lax.broadcasted_iota(jnp.int32, shape, 1)

  def add(number: Array, total: Array) -> Array:
    index, value = indices[number][:, None], values[number][:, None]
    row = jnp.broadcast_to(index % SIDE, shape)
    column = jnp.broadcast_to(index // SIDE, shape)
    along_rows = value * basis[row, position]
    return total + _dot(along_rows.T, basis[column, position])

  zeros = jnp.zeros((SIDE, SIDE), jnp.float32)
  update[...] = lax.fori_loop(0, indices.shape[0], add, zeros)


def _run(
  kernel: Callable[..., None],
  arrays: Sequence[Array],
  basis: np.ndarray,
  shapes: Sequence[tuple[int, ...]],
  aliases: dict[int, int],
) -> Sequence[Array]:
  """Runs a kernel for each chunk, on its part of arrays with three dimensions.

  Others it reads whole. Returns float32 arrays with `shapes`, which vary over
  the mesh axes over which the first array does.
  """
  # Here, since jaxlib may be built without Triton.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  def of_results(x: Array) -> list[Array]:
    return [jnp.zeros_like(x, jnp.float32, shape=shape) for shape in shapes]

  def part(x: Any) -> pl.BlockSpec:
    if x.ndim < 3:
      return pl.BlockSpec()
    return pl.BlockSpec((None, *x.shape[1:]), lambda chunk: (chunk, 0, 0))

  given = [*arrays, jnp.asarray(basis, jnp.float32)]
  results = jax.eval_shape(of_results, arrays[0])
  return pl.pallas_call(
    kernel,
    grid=(len(arrays[0]),),
    in_specs=[*map(part, given)],
    out_specs=[*map(part, results)],
    out_shape=results,
    input_output_aliases=aliases,
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
  )(*given)
