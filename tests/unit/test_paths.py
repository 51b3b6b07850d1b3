"""Every fast way gives the bits of the plain one; top-k, and merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, merge, random_tree

import demo_optax
from demo_optax.exchange import algorithm
from demo_optax.numerics import platform as paths
from demo_optax.numerics import topk as selection

SHAPES = {
  'tall': (256, 40),
  'padded': (101, 67),
  'a': (70,),
  'b': (70,),
  'gain': (5,),
  'scalar': (),
}


def take(way, monkeypatch):
  fast = way == 'fast'
  algorithm.run_jitted.clear_cache()  # compiled by another way
  monkeypatch.setattr(paths, 'PIECE', 1024)
  monkeypatch.setattr(paths, 'num_pieces', lambda p, _: p if fast else 1)
  monkeypatch.setattr(
    paths, 'top_k_tile', lambda _, n, k: 8 if fast and n % 8 == 0 else 1
  )


def run(way, monkeypatch):
  take(way, monkeypatch)
  codes = {
    **dict.fromkeys(SHAPES, demo_optax.dct_topk(16, 4)),
    'padded': demo_optax.dct_topk(16, 4, values='sign'),
  }
  tx = demo_optax.scale_by_demo(
    codes, 0.9, workers=demo_optax.Workers.simulated(3), alpha=0.7
  )
  params = random_tree(0, SHAPES)
  state, update = tx.init(params), jax.jit(tx.update)
  seen = []
  for step in range(3):
    gradients = random_tree(step, SHAPES, lead=(3,))
    gradients['a'][0, 1] = np.inf if step == 1 else 0
    gradients['tall'][1, 3, 3] = (
      1e30 if step == 2 else 0
    )  # so large that momentum could overflow
    updates, state = update(gradients, state, params)
    kept = demo_optax.state.momentum(state)
    seen.append((updates, state._replace(worker_stacked=kept)))
  return seen


def test_steps_are_equal(monkeypatch):
  expected = run('plain', monkeypatch)
  assert_same_bits(run('fast', monkeypatch), expected)
  assert [int(state.metrics['num_excluded']) for _, state in expected] == [
    0,
    1,
    1,
  ]


@pytest.mark.parametrize(
  'name, pieces, elements, parts',
  [
    ('cpu', 161, 161 * 2**18, 161),
    ('gpu', 161, 161 * 2**18, 1),
    ('tpu', 161, 161 * 2**18, 7),
    ('tpu', 32, 2**23, 1),
    ('tpu', 1, 2**24, 1),
  ],
)
def test_parts_of_a_bucket(name, pieces, elements, parts):
  with paths.running_on(name):
    assert paths.num_pieces(pieces, elements) == parts


# Selections and their means -----------------------------------------------------

OF_TILES = jax.jit(selection.top_k_of_tiles, static_argnums=(1, 2))
TOP_K = jax.jit(lambda c, k, _: selection.top_k(c, k), static_argnums=(1, 2))
FORMS = [
  OF_TILES,
  TOP_K,
  paths.running_on('gpu')(
    jax.jit(lambda *x: TOP_K.__wrapped__(*x), static_argnums=(1, 2))
  ),
]


@pytest.mark.parametrize(
  'kind', ['ties', 'zeros', 'normal', 'infinite', 'tiny', 'float64']
)
@pytest.mark.parametrize(
  'n, k, size',
  [(64, 8, 8), (96, 3, 4), (4096, 32, 8), (77, 7, 1), (5, 5, 1), (1, 1, 1)],
)
def test_top_k_of_tiles(n, k, size, kind, monkeypatch):
  monkeypatch.setattr(paths, '_SMALL', 0)
  rng = np.random.default_rng(n)
  x = {
    'ties': rng.integers(0, 4, (20, n)),
    'zeros': np.zeros((20, n)),
    'normal': rng.normal(size=(20, n)),
    'infinite': np.where(rng.random((20, n)) < 0.01, np.inf, 1),
    'tiny': rng.integers(0, 9, (20, n)) * 2.0**-126,
    'float64': 1 + 1e-12 * np.abs(rng.normal(size=(20, n))),
  }[kind]
  x = np.abs(x).astype('float64' if kind == 'float64' else 'float32')
  expected = np.argsort(-x, axis=1, kind='stable')[
    :, :k
  ]  # the lowest of equals
  with jax.enable_x64(kind == 'float64'):
    for select in FORMS:
      found = select(jnp.asarray(x), k, size)
      assert found.dtype == jnp.int32
      np.testing.assert_array_equal(found, np.sort(expected))


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
@pytest.mark.parametrize(
  'workers, n, k, average',
  [
    (1, 30, 4, 'senders'),
    (3, 30, 9, 'senders'),
    (3, 30, 9, 'workers'),
    (8, 5, 2, 'workers'),
    (4, 6, 6, 'senders'),
    (40, 50, 26, 'senders'),  # many: on GPUs in a loop
  ],
)
def test_merge(workers, n, k, average, kind):
  rng = np.random.default_rng(0)
  chunks = 11
  indices = np.stack(
    [
      np.stack([np.sort(rng.permutation(n)[:k]) for _ in range(chunks)])
      for _ in range(workers)
    ]
  ).astype(np.int32)
  if k == n:
    indices[:] = np.arange(n)
  values = rng.normal(size=indices.shape).astype(np.float32)
  present = np.arange(workers) != 1
  values[~present] = np.nan
  total, count = np.zeros((chunks, n)), np.zeros((chunks, n), int)
  for w in np.flatnonzero(present):
    for c in range(chunks):
      total[c, indices[w, c]] += values[w, c]
      count[c, indices[w, c]] += 1
  if average == 'workers':
    count[:] = present.sum()
  with paths.running_on(kind):
    merged = jax.jit(merge, static_argnums=(3, 4))(
      indices, values, present, n, average
    )
  np.testing.assert_allclose(merged, total / np.maximum(count, 1), atol=1e-6)
