"""Bytes, predicted."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from demo_optax import chunks
from demo_optax.compressors import VALUES

pytestmark = pytest.mark.core


def shapes_300m():
  """Matrices of the paper's 300 M model: 16 layers, d = 1024, 4096 wide."""
  d, f32 = 1024, jnp.float32
  layer = {'qkv': (d, 3 * d), 'out': (d, d), 'up': (d, 8 * d), 'down': (4 * d, d)}
  tree = {f'{i}.{k}': jax.ShapeDtypeStruct(s, f32)
          for i in range(16) for k, s in layer.items()}
  return {**tree, 'embedding': jax.ShapeDtypeStruct((50304, d), f32)}


def test_plan_of_the_papers_model():
  tree = shapes_300m()
  assert sum(np.prod(x.shape) for x in tree.values()) == 319_946_752
  plan = demo_optax.plan(tree, demo_optax.dct_topk(64, 8), workers=64)
  assert plan.sent_bytes == 319_946_752 // 4096 * (8 * 32 + 87) // 8 + 1
  assert plan.sent_bytes < 3.4e6  # published: 7.49 MB
  assert plan.received_bytes == 63 * plan.sent_bytes
  assert plan.dense_bytes(2) == pytest.approx(2 * 63 / 64 * 2 * 319_946_752)


def test_plan_of_the_papers_model_in_signs():
  compressor = demo_optax.dct_topk(64, 8, values='sign')
  plan = demo_optax.plan(shapes_300m(), compressor, workers=64)
  assert plan.sent_bytes == 319_946_752 // 4096 * (8 + 16 + 87) // 8 + 1
  assert plan.sent_bytes < 1.1e6


@given(st.lists(st.integers(1, 300), max_size=4), st.integers(1, 70),
       st.integers(1, 5000), st.booleans(), st.sampled_from(VALUES))
def test_a_leaf_costs_no_more_than_dense(shape, chunk, topk, padding, values):
  leaf = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
  compressor = demo_optax.dct_topk(
      chunk, topk, values=values, padding=padding)
  plan = demo_optax.plan(leaf, compressor, workers=2)
  grid = chunks.chunk_grid(tuple(shape), chunk, padding=padding)
  count, n = grid.num_chunks, grid.chunk_size
  dense = {
      'float32': 4 * plan.size,
      'bfloat16': 2 * plan.size,
      'int8': count * (n + 2),
      'int4': math.ceil(count * n / 2) + 2 * count,
      'sign': math.ceil(count * n / 8) + 2 * count,
  }[values]
  assert plan.sent_bytes <= dense + 1
  (bytes_of_leaf,) = plan.leaves
  if bytes_of_leaf.sent_bytes == dense:  # no indices where they save nothing
    assert bytes_of_leaf.index_bits == 0


@pytest.mark.parametrize('dim', [1, 3, 7, 10, 31, 97, 509, 50257, 100277])
@pytest.mark.parametrize('other', [None, 1, 3, 64, 97])
def test_awkward_dimensions(dim, other):
  shape = (dim,) if other is None else (dim, other)
  leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
  plan = demo_optax.plan(leaf, demo_optax.dct_topk(64, 8), workers=2)
  size = np.prod(shape)
  assert plan.sent_bytes <= 4 * size + 1
  if dim > 64 and (other or 1) >= 64:  # and it does compress
    assert plan.sent_bytes < 0.25 * 4 * size


def test_max_workers_is_where_receiving_stops_paying():
  leaf = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
  most = demo_optax.plan(leaf, demo_optax.dct_topk(), 2).max_workers()
  at = demo_optax.plan(leaf, demo_optax.dct_topk(), most)
  beyond = demo_optax.plan(leaf, demo_optax.dct_topk(), most + 1)
  assert at.received_bytes < at.dense_bytes()
  assert beyond.received_bytes >= beyond.dense_bytes()


def test_plan_skips_what_takes_no_part():
  tree = {'w': jnp.zeros((8, 8)), 'n': jnp.zeros(3, jnp.int32),
          'empty': jnp.zeros((0, 4)), 'none': None}
  plan = demo_optax.plan(tree, demo_optax.dct_topk(), workers=3)
  assert [leaf.name for leaf in plan.leaves] == ["['w']"]
  nothing = demo_optax.plan({'n': tree['n']}, demo_optax.dct_topk(), 3)
  assert nothing.sent_bytes == nothing.max_workers() == 0
  assert 'leaf' in str(nothing)


def test_plan_prints_a_table():
  text = str(demo_optax.plan(
      {'w': jnp.zeros((256, 128)), 'b': jnp.zeros(3), 's': jnp.zeros(())},
      demo_optax.dct_topk(64, 8), workers=8))
  assert "['w']" in text and '256x128' in text and '64x64' in text
  assert 'whole' in text and 'scalar' in text and 'bfloat16' in text


def test_plan_errors():
  with pytest.raises(TypeError, match='complex'):
    demo_optax.plan(jnp.zeros(3, jnp.complex64), demo_optax.dct_topk(), 2)
  with pytest.raises(ValueError, match='workers=0'):
    demo_optax.plan(jnp.zeros(3), demo_optax.dct_topk(), 0)
