"""Every compressor keeps the protocol, and does what its formula says."""

import dataclasses
import math
import re

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from helpers import (
  ROOT,
  assert_devices_agree,
  assert_same_bits,
  on_mesh,
  random_tree,
  stacked,
)
from oracle import Oracle, dct_matrix

import demo_optax
from demo_optax.compressors import (
  Compressor,
  Hadamard,
  Identity,
  RandomOrthogonal,
  RandomSubset,
  Slicing,
  Striding,
  TopK,
)

N = 4
SHAPES = {'matrix': (32, 48), 'padded': (37, 20), 'vector': (33,), 'scalar': ()}
POWERS = {'kernel': (2, 8, 16), 'vector': (64,)}

TOPK = {
  'dct': (demo_optax.dct_topk(16, 5, proportional=False), dct_matrix),
  'rows': (demo_optax.dct_topk((1, 24), 5, proportional=False), dct_matrix),
  'hadamard': (
    Compressor(TopK(5), Hadamard(), 16),
    lambda n: scipy.linalg.hadamard(n) / np.sqrt(n),
  ),
  'random': (
    Compressor(TopK(5), RandomOrthogonal(3), 16),
    RandomOrthogonal(3).matrix,
  ),  # orthonormal: see below
  'identity': (Compressor(TopK(5), Identity(), 16, 'int8'), np.eye),
}
RATE = 0.11


def random_places(n, step):
  """As documented: the first of a permutation that seed and step fix."""
  key = jax.random.fold_in(jax.random.key(2), step)
  return np.asarray(jax.random.permutation(key, n))[: math.ceil(RATE * n)]


def striding_places(n, step):
  k = math.ceil(RATE * n)
  return [(step + j * (n // k)) % n for j in range(k)]


def slicing_places(n, step):
  k = math.ceil(RATE * n)
  return [(step * k + j) % n for j in range(k)]


class CyclicSigns(Oracle):
  """Of what is taken from an array: one of five rows in every column."""

  period = 5

  def __init__(self, shape, workers, **rule):
    self.of = shape
    rows, self.cols = shape if len(shape) > 1 else (*shape, 1)
    self.groups = -(-rows // self.period)
    taken = self.groups, self.cols
    super().__init__(
      taken if len(shape) > 1 else taken[:1],
      workers,
      limit=(2, 16),
      basis=np.eye,
      places=lambda n, step: np.arange(n),
      values='sign',
      error_feedback=False,
      **rule,
    )

  def exchange(self, gradients):
    """Diagonals of the array; copies of the last row fill its end."""
    group, col = np.indices((self.groups, self.cols))
    row = self.period * group + (col - self.step) % self.period
    filled = np.zeros((N, self.groups * self.period, self.cols))
    size = math.prod(self.of)
    filled.reshape(N, -1)[:, :size] = np.reshape(gradients, (N, -1))
    rows = size // self.cols
    filled[:, rows:] = filled[:, rows - 1 : rows]
    update = np.zeros(filled.shape[1:])
    taken = filled[:, row, col].reshape(N, *self.shape)
    update[row, col] = super().exchange(taken).reshape(row.shape)
    return update.reshape(-1)[:size].reshape(self.of)


SUBSETS = {  # all workers send the same places of a chunk
  'random_subset': (
    Compressor(RandomSubset(RATE, 2), Identity(), 16),
    random_places,
  ),
  'striding': (Compressor(Striding(RATE), Identity(), 16), striding_places),
  'slicing': (Compressor(Slicing(RATE), Identity(), 16), slicing_places),
  'full': (demo_optax.compressors.full(), lambda n, step: np.arange(n)),
}
SIGNS = dataclasses.replace(  # gathered; nothing is kept
  demo_optax.compressors.cyclic_signs(5), chunk_size=(2, 16)
)
ALL = {name: code for name, (code, *_) in {**TOPK, **SUBSETS}.items()}
ALL['cyclic_signs'] = SIGNS


def oracle(name, shape, **rule):
  if name == 'cyclic_signs':
    return CyclicSigns(shape, N, **rule)
  if name in SUBSETS:
    _, places = SUBSETS[name]
    return Oracle(shape, N, limit=16, basis=np.eye, places=places, **rule)
  return Oracle(
    shape,
    N,
    limit=(1, 24) if name == 'rows' else 16,
    topk=5,
    values='int8' if name == 'identity' else 'float32',
    basis=TOPK[name][1],
    **rule,
  )


# test_oracle.py has the DCT.
@pytest.mark.core
@pytest.mark.parametrize('name', [*(n for n in ALL if n != 'dct'), 'mixed'])
def test_oracle(name, x64):
  """Several workers and steps, one of them left out for a while.

  Each code with two kinds of chunks; those of four codes with all kinds.
  """
  shapes = POWERS if name == 'hadamard' else SHAPES
  if name != 'mixed':
    kinds = ('kernel', 'vector') if name == 'hadamard' else ('padded', 'vector')
    shapes = {kind: shapes[kind] for kind in kinds}
  rule = {'decay': 0.9, 'alpha': 0.7, 'average': 'workers'}
  mixed = [
    'dct',
    'striding',
    'cyclic_signs',
    'identity',
  ]  # gathered and summed together
  names = dict(zip(shapes, mixed if name == 'mixed' else [name] * 4))
  oracles = {k: oracle(names[k], s, **rule) for k, s in shapes.items()}
  workers = demo_optax.Workers.simulated(N)
  codes = {k: ALL[each] for k, each in names.items()}
  tx = demo_optax.scale_by_demo(
    codes if name == 'mixed' else ALL[name], workers=workers, **rule
  )
  params = {k: jnp.zeros(s) for k, s in shapes.items()}
  state, update = tx.init(params), jax.jit(tx.update)
  rng = np.random.default_rng(0)
  for step in range(7):
    gradients = {k: rng.normal(size=(N, *s)) for k, s in shapes.items()}
    if step in (2, 3):
      for g in gradients.values():
        g[1] = np.nan
    updates, state = update(gradients, state, params)
    for key, gradient in gradients.items():
      np.testing.assert_allclose(
        updates[key],
        oracles[key].exchange(gradient),
        atol=1e-11,
        err_msg=f'{key}, step {step}',
      )
    assert int(state.metrics['num_excluded']) == (step in (2, 3))
  kept = demo_optax.state.momentum(state)
  keeps = [k for k in sorted(shapes) if names[k] != 'cyclic_signs']
  assert [*kept] == keeps  # in the order of the parameters
  for key in keeps:
    known = oracles[key]
    np.testing.assert_allclose(
      kept[key], known.m.reshape(kept[key].shape), atol=1e-11
    )


@pytest.mark.parametrize(
  'code',
  [
    SUBSETS['random_subset'][0],  # others differ in the places alone
    SUBSETS['full'][0],
    SIGNS,
    demo_optax.dct_topk(16, 5, values='int4'),
  ],
)
def test_on_a_mesh(code):
  """The bytes of the plan in one collective; sums in another order."""
  shapes = {'matrix': (32, 48), 'vector': (64,)}
  params = random_tree(0, shapes)
  results = []
  for workers in (demo_optax.Workers.simulated(N), on_mesh(N)):
    tx = demo_optax.scale_by_demo(code, 0.5, workers=workers)
    placed = workers.device_put(params)
    gradients = stacked(random_tree(0, shapes, lead=(N,)), workers)
    args = gradients, tx.init(placed), placed
    update = jax.jit(tx.update).lower(*args).compile()
    results.append(update(*args))
  assert_devices_agree(results[1][0])
  for a, b in zip(*map(jax.tree.leaves, results)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  found = hlo_text.collectives(update)
  plan = demo_optax.plan(params, code, workers)
  kind = 'all-reduce' if plan.summed_bytes else 'all-gather'
  assert [c.kind for c in found] == [kind]
  assert found[0].received_bytes == plan.received_bytes


@pytest.mark.parametrize('length', [1, 2, 5, 32])
def test_random_basis_is_orthonormal(length):
  basis = RandomOrthogonal(0).matrix(length)
  np.testing.assert_allclose(basis @ basis.T, np.eye(length), atol=1e-14)
  if length > 1:
    assert np.any(basis != RandomOrthogonal(1).matrix(length))


def test_slicing_does_not_overflow():
  """Of long chunks, products of step and length are beyond 32 bits."""
  n, rate = 50_000, 0.90001
  select = Slicing(rate)
  assert select.count(n) == 45_001
  zeros = jnp.zeros((1, n))
  places = jax.jit(lambda step: select(zeros, step)[0])
  for step in (0, 1, 46_341, 47_720, 49_999, 2**31 - 1):
    expected = (step * 45_001 + np.arange(45_001)) % n
    np.testing.assert_array_equal(places(jnp.int32(step)), expected)


@pytest.mark.parametrize(
  'rate, n, k',
  [
    (0.07, 100, 7),
    (0.29, 100, 29),
    (1 / 3, 3, 1),
    (1 / 49, 49, 1),
    (0.11, 256, 29),
    (1e-7, 64, 1),
    (1, 5, 5),
    (0.9999, 5, 5),
  ],
)
def test_a_share_is_the_ceiling_of_what_is_written(rate, n, k):
  assert Striding(rate).count(n) == k


def test_info_says_what_was_sent_and_kept():
  workers = demo_optax.Workers.simulated(3)
  compressor = Compressor(TopK(1), Identity(), 4)
  tx = demo_optax.scale_by_demo(compressor, 0.9, workers=workers)
  params = jnp.zeros((4, 8))
  g = np.zeros((3, 4, 8), np.float32)
  g[0, 0, 0], g[0, 1, 1], g[0, 2, 6] = 3, 1, 5
  g[1, 0, 0], g[1, 3, 5] = 4, 2
  g[2] = np.nan
  _, state = tx.update(jnp.asarray(g), tx.init(params), params)
  info = state.metrics
  assert int(info['num_excluded']) == 1
  # Sent: 3, 5 and 4, 2. Kept: 1.
  assert float(info['sent_energy']) == pytest.approx((9 + 25 + 16 + 4) / 55)
  assert float(info['residual_norm']) == pytest.approx(np.sqrt(1 / 2))
  assert float(info['mean_senders']) == pytest.approx(4 / 3)
  assert demo_optax.exchange_info({'deep': [state]}) == info
  # An exchange in front of it that has nothing to send tells nothing.
  idle = demo_optax.scale_by_demo(compressor, workers=workers).init(())
  assert demo_optax.exchange_info((idle, state)) == info


# The guide --------------------------------------------------------------------

GUIDE = ROOT / 'docs/compressors.md'


@pytest.fixture(scope='module')
def guide():
  """The names that the guide's code makes, run from the top."""
  names = {}
  with jax.numpy_dtype_promotion('standard'):
    for block in re.findall(r'```python\n(.*?)```', GUIDE.read_text(), re.S):
      exec(block, names)
  return names


@pytest.mark.parametrize(
  'make',
  [
    lambda names: names['low_frequencies'](8),
    lambda names: names['loudest_run'](8, 3),
  ],
)
def test_compressors_of_the_guide(guide, make):
  compressor = make(guide)
  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.scale_by_demo(
    compressor, 0.0, workers=workers, average='workers'
  )
  params = {'w': jnp.zeros((16, 24)), 'b': jnp.zeros(20)}
  gradients = random_tree(0, {'w': (2, 16, 24), 'b': (2, 20)})
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  kept = demo_optax.state.momentum(state)
  for key, moment in kept.items():
    assert np.any(moment) and np.any(updates[key])
    np.testing.assert_allclose(
      np.mean(moment, axis=0) + updates[key], gradients[key].mean(0), atol=1e-6
    )
  shared = compressor.select.shared
  assert bool(demo_optax.plan(params, compressor, 2).summed_bytes) == shared


@pytest.mark.parametrize('name', ['SGD', 'Signum', 'AdamW', 'Lion', 'Muon'])
def test_bases_of_the_guide_learn(guide, name):
  """A quadratic on two workers, whose gradients differ."""
  tx = guide['optimizers'][name]
  rng = np.random.default_rng(0)
  goal = jnp.asarray(0.02 * rng.normal(size=(16, 16)), jnp.float32)
  params = {'w': jnp.zeros((16, 16))}
  noise = jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)
  apart = 0.01 * jnp.stack([noise, -noise])

  @jax.jit
  def step(params, state):
    gradients = {'w': (params['w'] - goal)[None] + apart}
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  with jax.numpy_dtype_promotion('standard'):
    state, losses = tx.init(params), []
    for _ in range(400):
      params, state = step(params, state)
      losses.append(float(jnp.sum((params['w'] - goal) ** 2)))
  assert min(losses) < 0.7 * losses[0]


@dataclasses.dataclass(frozen=True)
class At:
  """Selects fixed places, as they are given."""

  places: tuple[int, ...]
  shared: bool = False
  dtype: str = 'int32'

  def count(self, n):
    return len(self.places)

  def __call__(self, coefficients, step):
    return jnp.broadcast_to(
      jnp.asarray(self.places, self.dtype),
      (len(coefficients), len(self.places)),
    )


def update_of(select, basis, limit):
  """Returns the update, what is kept, and how many workers are excluded."""
  tx = demo_optax.scale_by_demo(
    Compressor(select, basis, limit),
    0.5,
    workers=demo_optax.Workers.simulated(2),
  )
  params = {'w': jnp.zeros((32, 64))}
  gradients = random_tree(0, {'w': (32, 64)}, lead=(2,))
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  return (
    updates,
    state.worker_stacked.momentum,
    int(state.metrics['num_excluded']),
  )


@pytest.mark.parametrize('shared', [False, True])
def test_places_may_be_in_any_order_and_integer_type(shared):
  expected = update_of(At((1, 250), shared), Identity(), 16)
  assert_same_bits(
    update_of(At((250, 1), shared, 'uint8'), Identity(), 16), expected
  )


@pytest.mark.parametrize(
  'select', [RandomSubset(8 / 1024), At((5, 3), True, 'uint32')]
)
def test_shared_places_of_a_wide_type_go_through_a_transform(select, x64):
  updates, _, num_excluded = update_of(select, demo_optax.compressors.Dct(), 32)
  assert num_excluded == 0
  assert all(np.any(u) for u in jax.tree.leaves(updates))


def test_ends_of_matrices_move_as_far_as_the_rest():
  """What fills the last chunks counts in no scale."""
  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.scale_by_demo(
    demo_optax.compressors.cyclic_signs(8), workers=workers, average='workers'
  )
  gradients = random_tree(0, {'rows': (2, 141, 64), 'cols': (2, 64, 65)})
  params = {name: jnp.zeros(g.shape[1:]) for name, g in gradients.items()}
  state, update = tx.init(params), jax.jit(tx.update)
  moved = dict.fromkeys(params, 0.0)
  for _ in range(8):
    updates, state = update(gradients, state, params)
    for name, u in updates.items():
      moved[name] += np.abs(u)
  for total, axis in ((moved['rows'], 1), (moved['cols'], 0)):
    along = total.mean(axis)
    assert np.all(np.abs(along[-5:].mean() / along.mean() - 1) < 0.2)
