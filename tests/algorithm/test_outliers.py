"""Workers whose messages are too large: who is excluded, and what that does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import COMPILATIONS, assert_same_bits, random_tree
from oracle import Oracle, outliers

import demo_optax
from demo_optax.workers import collectives

SHAPES = {'padded': (31, 37), 'kernel': (2, 10, 20), 'bias': (48,), 'scalar': ()}
COMPRESSOR = demo_optax.dct_topk(16, 5)
# How large the gradients of each worker are in a step.
SIZES = {
    1: [[1.0], [100.0]],
    2: [[1, 1.2], [1, 100], [100, 1], [0, 1], [np.nan, 1]],
    3: [[1, 1, 1], [1, 50, 1], [0, 1, 9], [5, 30, np.nan], [0, 0, 0]],
    4: [[1, 1, 1, 1], [1, 100, 1, 1], [1, 100, 100, 1], [9, 9, 9, 1e-3],
        [0, 0, 1, 50], [1e-6, 1e6, 1, np.nan], [1, 1, 1, 1]],
    5: [[1, 7, 1, 7, 1], [0, 0, 0, 0, 3], [np.nan, np.nan, 2, 2, 40]],
}


def sized(seed, sizes, shapes=SHAPES):
  gradients = random_tree(seed, shapes, lead=(len(sizes),))
  sizes = np.asarray(sizes, np.float32)
  return {k: g * sizes.reshape(-1, *[1] * (g.ndim - 1))
          for k, g in gradients.items()}


@functools.cache
def usual(count, ratio=2.0):
  return make(count, ratio)


def make(count, ratio=2.0, compressor=COMPRESSOR, **options):
  """`(update, state, params)` of simulated workers."""
  workers = demo_optax.Workers.simulated(count)
  tx = demo_optax.scale_by_demo(
      compressor, options.pop('decay', 0.1), workers=workers,
      max_norm_ratio=ratio, **options)
  params = jax.tree.map(jnp.asarray, random_tree(99, SHAPES))
  return jax.jit(tx.update), tx.init(params), params


def found(state):
  info = demo_optax.exchange_info(state)
  return int(info['num_excluded']), int(info['num_outliers'])


@pytest.mark.parametrize('count, values, average', [
    (1, 'float32', 'senders'), (2, 'float32', 'senders'),
    (3, 'float32', 'workers'), (4, 'float32', 'senders'),
    (4, 'sign', 'workers'), (5, 'int8', 'senders'),
])
def test_the_oracle(count, values, average, x64):
  compressor = demo_optax.dct_topk(16, 5, values=values)
  workers = demo_optax.Workers.simulated(count)
  tx = demo_optax.scale_by_demo(
      compressor, 0.1, workers=workers, average=average, max_norm_ratio=2.0)
  params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
  oracles = {
      k: Oracle(s, count, limit=16, topk=5, decay=0.1, values=values,
                average=average)
      for k, s in SHAPES.items()}
  state, update = tx.init(params), jax.jit(tx.update)
  for step, sizes in enumerate(SIZES[count]):
    gradients = jax.tree.map(np.float64, sized(step, sizes))
    updates, state = update(gradients, state, params)
    sent = {k: o.send(gradients[k]) for k, o in oracles.items()}
    excluded = outliers(sent.values(), 2.0)
    missing = sum(np.isnan(sizes))
    assert found(state) == (len(excluded) + missing, len(excluded)), step
    for k, o in oracles.items():
      np.testing.assert_allclose(
          updates[k], o.merge(sent[k], excluded), atol=1e-9, err_msg=k)
  # An excluded worker has sent its message all the same.
  kept = demo_optax.state.momentum(state, params, compressor, workers)
  for k, o in oracles.items():
    np.testing.assert_allclose(
        kept[k], o.m.reshape(count, *o.shape), atol=1e-9, err_msg=k)


@pytest.mark.parametrize('sizes, excluded', [
    ([1, 1, 1, 100], 1),       # a hundredfold gradient
    ([1, 1, 100, 100], 2),     # half of the workers
    ([1, 100, 100, 100], 0),   # more: they are what is usual
    ([0, 0, 0, 100], 0),       # nothing to compare with
    ([0, 0, 1, 100], 1),       # zeros say nothing about what is usual
    ([0, 0, 0, 0], 0),
    ([1, 1, 1, 1e-6], 0),      # small ones do no harm
    ([1, 1, 1, 1e24], 1),      # a norm that float32 cannot hold the square of
    ([1e24, 1e24, 1e24, 1e24], 0),
    ([1e24, 1e24, 1e24, 1], 0),
    ([1, np.nan, np.nan, 100], 1),  # of two, the smaller is what is usual
    ([np.nan, np.nan, np.nan, 100], 0),
])
def test_who_is_excluded(sizes, excluded):
  update, state, params = usual(4)
  updates, state = update(sized(0, sizes), state, params)
  missing = sum(np.isnan(sizes))
  assert found(state) == (excluded + missing, excluded)
  # As if these had never been there.
  order = np.argsort(sizes)[: 4 - missing - excluded]  # NaN are the last
  kept = sorted(int(i) for i in order)
  alone, state, params = usual(len(kept), None)
  gradients = {k: g[kept] for k, g in sized(0, sizes).items()}
  assert_same_bits(updates, alone(gradients, state, params)[0])


def test_what_is_not_told_from_the_norm():
  """Flipped signs and noise of the usual size are averaged like any other."""
  gradients = random_tree(1, SHAPES, lead=(4,))
  other = random_tree(2, SHAPES, lead=(4,))
  update, state, params = usual(4)
  plain, without, _ = usual(4, None)
  for wrong in (jax.tree.map(np.negative, gradients), other):
    g = jax.tree.map(lambda a, b: np.concatenate([a[:3], b[3:]]), gradients, wrong)
    updates, after = update(g, state, params)
    assert found(after) == (0, 0)
    assert_same_bits(updates, plain(g, without, params)[0])


@pytest.mark.parametrize('values, options', [
    ('float32', {}), ('int4', {}),
    ('sign', {'exchange': 'all_to_all', 'update_values': 'int8'}),
])
def test_the_same_bits_where_nobody_is_excluded(values, options):
  compressor = demo_optax.dct_topk(16, 5, values=values)
  update, state, params = make(3, 3.0, compressor, decay=0.9, **options)
  plain, before, _ = make(3, None, compressor, decay=0.9, **options)
  for step in range(4):
    gradients = sized(step, [1, np.nan if step == 2 else 1, 1])
    updates, state = update(gradients, state, params)
    expected, before = plain(gradients, before, params)
    assert_same_bits(updates, expected)
    assert found(state)[1] == 0
  own, other = state.worker_stacked, before.worker_stacked
  assert_same_bits(own.momentum, other.momentum)
  assert_same_bits(own.update_residual, other.update_residual)
  metrics = dict(state.metrics)
  del metrics['num_outliers']
  np.testing.assert_allclose(
      list(metrics.values()), list(before.metrics.values()), rtol=1e-5)


def test_a_message_that_states_less_than_it_holds(monkeypatch):
  """What is read counts, if it is more."""
  real = collectives.Group.send_and_receive

  def send_and_receive(group, message):
    arrived = real(group, message)
    return {k: x.at[:, -8:-4].set(0) for k, x in arrived.items()}

  update, state, params = usual(4)
  expected = update(sized(0, [1, 1, 1, 9]), state, params)[0]
  monkeypatch.setattr(collectives.Group, 'send_and_receive', send_and_receive)
  jax.clear_caches()
  update, state, params = make(4)
  updates, state = update(sized(0, [1, 1, 1, 9]), state, params)
  jax.clear_caches()
  assert found(state) == (1, 1)
  assert_same_bits(updates, expected)


# What may be given ------------------------------------------------------------


def test_an_injected_ratio_may_change():
  workers = demo_optax.Workers.simulated(4)
  tx = optax.inject_hyperparams(demo_optax.demo)(
      1e-2, workers=workers, compressor=COMPRESSOR, max_norm_ratio=2.0)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  state, update = tx.init(params), jax.jit(tx.update)
  dtypes = jax.tree.map(lambda x: x.dtype, state)
  gradients, counted = sized(0, [1, 1, 1, 9]), []
  for ratio in (2.0, 2.0, 40.0, 1.0, np.nan):
    state.hyperparams['max_norm_ratio'] = jnp.float32(ratio)
    before = COMPILATIONS.count
    updates, after = update(gradients, state, params)
    assert counted == [] or COMPILATIONS.count == before, 'compiled again'
    assert jax.tree.map(lambda x: x.dtype, after) == dtypes
    counted.append(found(after))
  # One that cannot be meant loses the step, like any other hyperparameter.
  assert counted == [(1, 1), (1, 1), (0, 0), (4, 0), (4, 0)]
  assert not any(u.any() for u in updates.values())


def test_an_injected_none_is_off():
  tx = optax.inject_hyperparams(demo_optax.demo)(
      1e-2, workers=demo_optax.Workers.simulated(4), max_norm_ratio=None)
  state = tx.init(jax.tree.map(jnp.asarray, random_tree(9, SHAPES)))
  assert 'max_norm_ratio' not in state.hyperparams
  assert 'num_outliers' not in demo_optax.exchange_info(state)


@pytest.mark.parametrize('shared', [
    None, demo_optax.compressors.full(),
    demo_optax.compressors.random_subset(1 / 4)])
def test_leaves_that_are_summed_are_refused(shared):
  tree = {**dict.fromkeys(SHAPES, COMPRESSOR), 'kernel': shared}
  with pytest.raises(ValueError, match='kernel is summed over .*dct_topk'):
    make(4, 2.0, tree)
  frozen = {**tree, 'kernel': demo_optax.compressors.FROZEN}
  assert 'num_outliers' in make(4, 2.0, frozen)[1].metrics


def methods(workers, ratio):
  local = demo_optax.local
  return {
      'demo': demo_optax.demo(1e-2, workers=workers, max_norm_ratio=ratio),
      'demo_muon': demo_optax.demo_muon(
          1e-2, workers=workers, max_norm_ratio=ratio),
      'demo_diloco': local.demo_diloco(
          optax.sgd(1.0), workers=workers, sync_period=1, max_norm_ratio=ratio),
      'sparse_loco': local.sparse_loco(
          optax.sgd(1.0), workers=workers, sync_period=1, max_norm_ratio=ratio),
  }


@pytest.mark.parametrize('method', methods(demo_optax.Workers.simulated(1), 2))
def test_what_is_built_on_it(method):
  """In a step of data_parallel, of which worker 2 has other rows."""
  workers = demo_optax.Workers.simulated(4)
  params = {'w': jnp.ones((8, 8))}

  def train(ratio):
    tx = methods(workers, ratio)[method]

    @demo_optax.data_parallel(workers)
    def train_step(params, state, x):
      grads = {'w': jnp.reshape(x, (8, 8))}
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    x = random_tree(0, {'x': (4, 64)})['x']
    x[2] *= 100
    if method == 'demo_muon':  # orthonormal whatever they are, unless nothing
      x[2] = 0
    # A state that a step replaces is donated.
    return train_step(jax.tree.map(jnp.copy, params), tx.init(params), x)

  moved, state = train(2.0)
  assert int(demo_optax.exchange_info(state)['num_outliers']) == (
      method != 'demo_muon')
  others, _ = train(None)
  assert np.any(moved['w'] != others['w']) == (method != 'demo_muon')
