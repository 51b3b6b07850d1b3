"""Chunk rule, transform, padding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_optax import dct_topk
from demo_optax.codes.value_codes import VALUES
from demo_optax.compressors import Dct, chunking

DIMS = [1, 3, 7, 10, 31, 64, 97, 128, 509, 768, 50257, 100277]


def grid_of(shape, size, padding=True):
  return chunking.chunk_grid(shape, (size, size), padding=padding)


@pytest.mark.parametrize('dim', DIMS)
@pytest.mark.parametrize('limit', [1, 2, 16, 64, 128])
def test_chunk_length_rule(dim, limit):
  length = chunking.chunk_length(dim, limit)
  waste = -dim % length
  if dim <= limit:
    assert length == dim
    return
  assert limit / 2 <= length <= limit
  # No other length takes fewer chunks, nor as many with less padding.
  for other in range(1, limit + 1):
    assert (-(-dim // other), -dim % other) >= (-(-dim // length), waste)


@pytest.mark.parametrize('length', [1, 2, 7, 64, 128])
def test_basis_is_the_orthonormal_dct(length):
  basis = Dct().matrix(length)
  np.testing.assert_allclose(basis @ basis.T, np.eye(length), atol=1e-13)
  x = np.random.default_rng(0).normal(size=length)
  np.testing.assert_allclose(
    basis @ x, scipy.fft.dct(x, norm='ortho'), atol=1e-13
  )


def test_chunks_are_the_blocks_of_the_matrix(x64):
  grid = grid_of((2, 12, 20), 6)
  assert grid.lengths == (1, 6, 5) and grid.counts == (2, 2, 4)
  x = np.random.default_rng(0).normal(size=grid.shape)
  c = chunking.to_coefficients(jnp.asarray(x), grid, Dct())
  assert c.shape == (2, 2, 4, 30)
  block = scipy.fft.dctn(x[1, 6:, 10:15], norm='ortho')
  np.testing.assert_allclose(
    np.asarray(c[1, 1, 2]).reshape(5, 6).T, block, atol=1e-13
  )


SHAPES = st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple)


@settings(max_examples=12)  # each compiles
@given(SHAPES, st.integers(1, 16), st.booleans())
def test_round_trip_and_energy(shape, limit, padding):
  grid = grid_of(shape, limit, padding)
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

  @jax.jit
  def both_ways(x):
    c = chunking.to_coefficients(x, grid, Dct())
    return c, chunking.from_coefficients(c, grid, Dct())

  c, back = both_ways(x)
  assert c.shape == grid.coefficients_shape
  np.testing.assert_allclose(back, x, atol=1e-5)
  np.testing.assert_allclose(np.sum(np.square(c)), np.sum(x**2), rtol=1e-4)


# Shapes of kernels, and how `topk=32` folds them; None: as they are.
FOLDS = {
  (64, 4, 16): (64, 64),  # attention: inputs, heads, size
  (4096, 32, 128): (4096, 4096),
  (4, 16, 64): (64, 64),  # heads, size, outputs
  (4, 64, 256): None,
  (32, 128, 4096): None,
  (64, 3, 4, 16): (64, 192),  # inputs, three, heads, size
  (12, 64, 4, 16): (12, 64, 64),  # layers before them
  (12, 4, 16, 64): (12, 64, 64),
  (8, 64, 256): None,  # experts
  (64, 1024, 4096): None,
  (2, 8, 64, 256): None,  # layers, experts
  (3, 3, 64, 128): None,  # convolutions
  (1, 1, 64, 256): None,
  (3, 3, 3, 64): (27, 64),
  (16, 16, 3, 192): (256, 576),
  (64, 3, 3, 3): (64, 27),  # of PyTorch and Equinox
  (1, 197, 768): None,  # positions
}


@pytest.mark.parametrize('shape', FOLDS)
def test_how_kernels_are_folded(shape):
  compressor = dct_topk(proportional=True)
  grid = compressor.chunks(shape, jnp.float32).grid
  assert grid.folded == (FOLDS[shape] or shape)
  assert (grid.fold is None) == (FOLDS[shape] is None)


@settings(max_examples=150)
@given(
  st.one_of(
    st.lists(st.integers(1, 12), min_size=3, max_size=5),
    st.lists(st.integers(1, 300), max_size=2),
  ).map(tuple),
  st.sampled_from([4, 8, (1, 8), 64]),
  st.one_of(st.integers(1, 20), st.integers(1, 5000)),
  st.sampled_from(VALUES),
  st.booleans(),
)
def test_folds_and_bytes_are_those_of_the_oracle(
  shape, limit, topk, values, padding
):
  """Which are never more than those of all coefficients."""
  compressor = dct_topk(
    limit, topk, values=values, padding=padding, proportional=False
  )
  plan = compressor.chunks(shape, jnp.float32)
  rule = limit, topk, padding, values, 4
  expected = oracle.fold(shape, *rule)
  assert plan.num_bytes == oracle.cheapest(expected, *rule)[0]
  if len(shape) > 2 and not plan.grid.whole:
    assert plan.grid.folded == expected


@settings(max_examples=10)  # each compiles
@given(st.data())
def test_folding_and_unfolding_is_the_identity(data):
  shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=5)))
  fold = data.draw(st.sampled_from(chunking.folds(len(shape))))
  sides = (data.draw(st.integers(1, 8)),) * 2
  period = data.draw(st.integers(1, 3))
  grid = chunking.chunk_grid(shape, sides, fold=fold, period=period)
  matrix = chunking.chunk_grid(grid.folded, sides, period=period)

  @jax.jit
  def cut_both(x, step):
    cut = chunking.to_chunks(x, grid, step)
    folded = chunking.to_chunks(x.reshape(grid.folded), matrix, step)
    return cut, folded, chunking.from_chunks(cut, grid, step)

  x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
  back = np.zeros_like(x)
  for step in range(period):  # all have their turns
    cut, folded, part = cut_both(x, step)
    np.testing.assert_array_equal(cut, folded)  # chunks of the folded array
    back += part
  np.testing.assert_array_equal(back, x)
