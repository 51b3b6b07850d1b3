"""Chunks that are divided among the workers: the same updates, fewer bytes."""

import functools
import itertools

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  assert_replicas_equal,
  assert_same_bits,
  on_mesh,
  random_tree,
  replicated,
  stacked,
)
from jax.sharding import PartitionSpec as P
from test_sharded import SHAPES as SHARDED
from test_sharded import SPECS_2D, place_gradients
from test_sharded import make_workers as sharded_workers

import demo_optax
from demo_optax import compressors
from demo_optax.workers import collectives

pytestmark = pytest.mark.core

COMPRESSORS = {
    'dct': demo_optax.dct_topk(32, 8, values='sign'),
    'hadamard': compressors.Compressor(
        compressors.TopK(2), compressors.Hadamard(), 32, 'sign'),
    'identity': compressors.Compressor(
        compressors.TopK(3), compressors.Identity(), (1, 32), 'int8'),
}
SHAPES = {  # sides that Hadamard matrices have, and more chunks than workers
    'matrix': (64, 96),
    'few': (32, 64),
    'rows': (4, 64),
    'bias': (64,),
    'scalar': (),
}
LOSSY = ['bfloat16', 'int8', 'int4', 'sign']


def gradients_of(step, count):
  """Gradients with ties among coefficients, and workers that are excluded."""
  gradients = random_tree(step, SHAPES, lead=(count,))
  # Every chunk is a single cosine at another height on each worker: merged they
  # cancel to the last bit in half of the places, or leave zeros.
  line = np.where(np.arange(64) % 2, 1.0, -1.0)
  for worker in range(count):
    gradients['few'][worker] = (-1.0) ** (worker + step) * line
  if step % 5 == 2:
    gradients['bias'][step % count] = np.nan
  if step % 11 == 7:
    gradients['matrix'][:] = np.inf
  return gradients


def train(workers, exchange, steps=50, compressor='dct', **options):
  """Returns the parameters of every step, and the last state."""
  options = {'update_values': 'ternary', **options}
  tx = optax.chain(
      demo_optax.scale_by_demo(
          COMPRESSORS[compressor], 0.9, workers=workers, exchange=exchange,
          **options,
      ),
      optax.scale_by_sign(),
      optax.scale(-0.01),
  )
  params = replicated(random_tree(99, SHAPES), workers)
  state = tx.init(params)

  @jax.jit
  def step_fn(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  seen = []
  for step in range(steps):
    gradients = stacked(gradients_of(step, workers.count), workers)
    params, state = step_fn(params, state, gradients)
    assert_replicas_equal(params)
    seen.append(jax.tree.map(np.asarray, params))
  return seen, state


def momentum(state):
  return state[0].worker_stacked.momentum


@functools.cache
def simulate(count, exchange, values='ternary'):
  workers = demo_optax.Workers.simulated(count)
  return train(workers, exchange, update_values=values)


@pytest.mark.parametrize('count', [1, 3, 8])
def test_signs_are_those_of_an_all_gather(count):
  expected, before = simulate(count, 'all_gather')
  found, after = simulate(count, 'all_to_all')
  assert_same_bits(found, expected)
  assert_same_bits(momentum(after), momentum(before))
  for name, x in demo_optax.exchange_info(after).items():
    expected_metric = demo_optax.exchange_info(before)[name]
    np.testing.assert_allclose(x, expected_metric, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize('compressor, count', [
    ('hadamard', 2), ('identity', 3),
])
def test_signs_of_updates_full_of_zeros(compressor, count):
  workers = demo_optax.Workers.simulated(count)
  expected, _ = train(workers, 'all_gather', 20, compressor)
  found, _ = train(workers, 'all_to_all', 20, compressor)
  assert_same_bits(found, expected)
  # Else this would show nothing: a zero moves nothing.
  before, after = random_tree(99, SHAPES), found[0]
  assert any(np.mean(after[k] == before[k]) > 0.03 for k in SHAPES)


@pytest.mark.parametrize('values', ['ternary', 'int4'])
def test_one_of_each_collective_with_the_planned_bytes(values):
  workers = on_mesh(4)
  tx = demo_optax.scale_by_demo(
      COMPRESSORS['dct'], workers=workers, exchange='all_to_all',
      update_values=values,
  )
  params = replicated(random_tree(9, SHAPES), workers)
  gradients = stacked(random_tree(0, SHAPES, lead=(4,)), workers)
  compiled = jax.jit(tx.update).lower(
      gradients, tx.init(params), params).compile()
  found = hlo_text.collectives(compiled, workers.mesh)
  assert sorted(c.kind for c in found) == ['all-gather', 'all-to-all']
  plan = demo_optax.plan(
      params, COMPRESSORS['dct'], workers, exchange='all_to_all',
      update_values=values,
  )
  assert sum(c.received_bytes for c in found) == plan.received_bytes
  by_kind = {c.kind: c for c in found}
  assert by_kind['all-gather'].received_bytes == plan.update_bytes * 3 // 4
  assert by_kind['all-to-all'].received_bytes == plan.payload_bytes * 3 // 4


def test_one_of_each_collective_between_workers_of_several_devices():
  workers = sharded_workers('2d', 'auto')
  tx = demo_optax.demo(
      1e-2, workers=workers, compressor=demo_optax.dct_topk(8, 3),
      exchange='all_to_all',
  )
  params = workers.device_put(random_tree(9, SHARDED))
  gradients = place_gradients(
      random_tree(0, SHARDED, lead=(2,)), workers, SPECS_2D)
  compiled = jax.jit(tx.update).lower(
      gradients, tx.init(params), params).compile()
  found = [
      c for c in hlo_text.collectives(compiled, workers.mesh)
      if 'replica' in c.axes
  ]
  assert sorted(c.kind for c in found) == ['all-gather', 'all-to-all']
  plan = demo_optax.plan(
      params, demo_optax.dct_topk(8, 3), workers, exchange='all_to_all',
      update_values='ternary',
  )
  moved = sum(c.received_bytes for c in found)
  assert moved == plan.device_bytes['replica',]


def test_a_damaged_message_excludes_its_sender_from_that_owners_chunks(
    monkeypatch
):
  """Worker 1's message to owner 2 is garbage; others read theirs."""
  real = collectives.Group.send_and_receive
  damage = [False]

  def send_and_receive(group, message):
    arrived = real(group, message)
    if damage[0]:
      for name, x in arrived.items():
        here = jax.lax.axis_index(group.axis) == 2
        arrived[name] = x.at[1].set(jnp.where(here, jnp.uint32(2**32 - 1), x[1]))
    return arrived

  monkeypatch.setattr(collectives.Group, 'send_and_receive', send_and_receive)
  workers = demo_optax.Workers.simulated(4)
  params = {'w': jnp.zeros((32, 128))}  # a chunk for each owner
  gradients = {'w': random_tree(0, params_shapes(params), lead=(4,))['w']}

  def update_of(gradients):
    jax.clear_caches()
    tx = demo_optax.scale_by_demo(
        COMPRESSORS['dct'], 0.9, workers=workers, exchange='all_to_all',
        update_values='float32',
    )
    updates, state = tx.update(gradients, tx.init(params), params)
    return np.asarray(updates['w']), demo_optax.exchange_info(state)

  whole, _ = update_of(gradients)
  damage[0] = True
  found, info = update_of(gradients)
  damage[0] = False
  alone, _ = update_of({'w': gradients['w'].copy() * nan_of_worker(1)})
  jax.clear_caches()
  assert info['num_excluded'] == 1
  chunks = [slice(32 * i, 32 * i + 32) for i in range(4)]
  for i, chunk in enumerate(chunks):
    expected = alone if i == 2 else whole
    np.testing.assert_array_equal(found[:, chunk], expected[:, chunk])
  assert np.any(alone[:, chunks[2]] != whole[:, chunks[2]])


def params_shapes(params):
  return {k: x.shape for k, x in params.items()}


def nan_of_worker(worker):
  factor = np.ones((4, 1, 1), np.float32)
  factor[worker] = np.nan
  return factor


@pytest.mark.parametrize('selector', [
    compressors.Compressor(
        compressors.RandomSubset(1 / 4), compressors.Identity()),
    compressors.full(),
])
def test_what_all_workers_share_is_summed_as_before(selector):
  """An all-reduce does not grow with the workers, and needs no owners."""
  workers = on_mesh(4)
  params = replicated(random_tree(9, SHAPES), workers)
  mixed = {**dict.fromkeys(SHAPES, selector), 'few': COMPRESSORS['dct']}

  def run(exchange):
    tx = demo_optax.scale_by_demo(
        mixed, 0.9, workers=workers, exchange=exchange,
        update_values='float32',
    )
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for step in range(3):
      gradients = stacked(gradients_of(step, 4), workers)
      updates, state = update(gradients, state, params)
      seen.append(jax.tree.map(np.asarray, updates))
    return seen

  assert_same_bits(run('all_to_all'), run('all_gather'))


def test_averaged_leaves_beside_owned_ones():
  workers = on_mesh(4)
  params = replicated(random_tree(9, SHAPES), workers)
  tree = {**dict.fromkeys(SHAPES, COMPRESSORS['dct']), 'bias': None}
  gradients = stacked(random_tree(0, SHAPES, lead=(4,)), workers)
  tx = demo_optax.scale_by_demo(
      tree, 0.9, workers=workers, exchange='all_to_all',
      update_values='ternary',
  )
  updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
  np.testing.assert_allclose(
      updates['bias'], np.mean(gradients['bias'], axis=0), rtol=1e-6
  )


# Codes that lose something ----------------------------------------------------


@functools.cache
def sum_of_updates(update_values, count):
  """Returns the sum of 12 updates, and the state after them."""
  params = random_tree(99, SHAPES)
  tx = demo_optax.scale_by_demo(
      COMPRESSORS['dct'], 0.9, workers=demo_optax.Workers.simulated(count),
      exchange='all_to_all', update_values=update_values,
  )
  state, update = tx.init(params), jax.jit(tx.update)
  total = jax.tree.map(np.zeros_like, params)
  for step in range(12):
    updates, state = update(gradients_of(step, count), state, params)
    total = jax.tree.map(np.add, total, updates)
  return total, state


@pytest.mark.parametrize('values, count', [
    *((values, 3) for values in LOSSY), ('sign', 1),
])
def test_what_a_code_loses_is_sent_later(values, count):
  """Sums of updates, and what owners keep, are the exact updates' sums."""
  exact, before = sum_of_updates('float32', count)
  found, after = sum_of_updates(values, count)
  assert_same_bits(  # the momentum does not know what becomes of updates
      after.worker_stacked.momentum, before.worker_stacked.momentum
  )
  kept = after.worker_stacked.update_residual
  assert kept and not before.worker_stacked.update_residual
  size = {k: float(np.abs(x).max()) for k, x in exact.items()}
  lost = {
      k: np.abs(found[k] - exact[k]).max() / size[k] for k in ('matrix', 'rows')
  }
  assert min(lost.values()) > 1e-4  # else nothing is shown below
  layout = after.layout.layout
  rows = [
      kept[bucket.name].reshape(-1, bucket.format.n)[: bucket.num_chunks]
      for bucket in layout.buckets
  ]
  owed = {}
  for number, x in enumerate(rows):
    owed |= layout.cut(number, jnp.asarray(x))
  for i, name in enumerate(sorted(SHAPES)):
    np.testing.assert_allclose(
        found[name] + owed[i], exact[name], atol=1e-5 * size[name] + 1e-6
    )


def test_nothing_moves_where_all_are_excluded():
  """Not even what owners keep."""
  workers = demo_optax.Workers.simulated(2)
  params = random_tree(99, SHAPES)
  tx = demo_optax.scale_by_demo(
      COMPRESSORS['dct'], 0.9, workers=workers, exchange='all_to_all',
      update_values='sign',
  )
  _, state = tx.update(gradients_of(0, 2), tx.init(params), params)
  nothing = jax.tree.map(
      lambda g: np.full_like(g, np.nan), gradients_of(0, 2)
  )
  updates, after = tx.update(nothing, state, params)
  assert not any(np.any(u) for u in jax.tree.leaves(updates))
  assert_same_bits(
      after.worker_stacked.update_residual,
      state.worker_stacked.update_residual,
  )


def test_exact_updates_are_those_of_an_all_gather():
  """Transforms of few chunks, and of many, round alike."""
  workers = demo_optax.Workers.simulated(5)
  params = random_tree(99, SHAPES)
  found = {}
  for exchange in ('all_gather', 'all_to_all'):
    tx = demo_optax.scale_by_demo(
        COMPRESSORS['dct'], 0.9, workers=workers, exchange=exchange,
        update_values='float32',
    )
    updates, _ = jax.jit(tx.update)(
        gradients_of(0, 5), tx.init(params), params
    )
    found[exchange] = jax.tree.map(np.asarray, updates)
  assert_same_bits(found['all_to_all'], found['all_gather'])


# Choosing ---------------------------------------------------------------------


def test_auto_is_what_receives_less():
  params = {'w': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
  compressor = demo_optax.dct_topk(topk=32, values='sign')
  received = {
      (count, exchange): demo_optax.plan(
          params, compressor, count, exchange=exchange,
          update_values='ternary',
      ).received_bytes
      for count, exchange in itertools.product(
          (2, 4, 16, 64, 1024), ('all_gather', 'all_to_all', 'auto'))
  }
  for count in (2, 4, 16, 64, 1024):
    both = received[count, 'all_gather'], received[count, 'all_to_all']
    assert received[count, 'auto'] == min(both)
  assert received[4, 'auto'] == received[4, 'all_gather']
  assert received[64, 'auto'] == received[64, 'all_to_all']
  # Constant in the number of workers: a message, and 1.6 bits an element.
  most = demo_optax.plan(params, compressor, 2).payload_bytes + 2**24 / 5
  assert received[64, 'all_to_all'] < 1.02 * most


def test_wrong_arguments():
  workers = demo_optax.Workers.simulated(2)
  with pytest.raises(ValueError, match="'ring' is not known; choose one of all"):
    demo_optax.demo(1e-3, workers=workers, exchange='ring')
  with pytest.raises(ValueError, match="values='ternary' is not known"):
    demo_optax.dct_topk(values='ternary')


def test_a_state_of_another_exchange():
  workers = demo_optax.Workers.simulated(2)
  params = {'w': jnp.ones((8, 8))}
  made = {
      values: demo_optax.scale_by_demo(
          workers=workers, exchange='all_to_all', update_values=values)
      for values in ('sign', 'ternary')
  }
  state = made['sign'].init(params)
  gradients = {'w': jnp.ones((2, 8, 8))}
  with pytest.raises(ValueError, match='make the state with tx.init of the'):
    made['ternary'].update(gradients, state, params)


# States of another number of workers ------------------------------------------


@functools.cache
def trained(count, values='sign'):
  """Returns a transformation, and a state in which owners keep something."""
  workers = demo_optax.Workers.simulated(count)
  tx = demo_optax.scale_by_demo(
      COMPRESSORS['dct'], 0.9, workers=workers, exchange='all_to_all',
      update_values=values,
  )
  params = random_tree(99, SHAPES)
  state = tx.init(params)
  for step in (0, 1):
    _, state = jax.jit(tx.update)(gradients_of(step, count), state, params)
  return tx, state


def chunks_of(state):
  """Returns what owners keep, as the chunks of every bucket."""
  kept = state.worker_stacked.update_residual
  return {
      b.name: np.asarray(kept[b.name]).reshape(-1, b.format.n)[: b.num_chunks]
      for b in state.layout.layout.buckets
  }


@pytest.mark.parametrize('count', [1, 3, 8])
def test_new_owners_inherit_what_is_owed(count):
  _, state = trained(4)
  new = demo_optax.checkpoint.resize_workers(state, count)
  assert_same_bits(chunks_of(new), chunks_of(state))
  params = random_tree(99, SHAPES)
  tx = demo_optax.scale_by_demo(
      COMPRESSORS['dct'], 0.9, workers=demo_optax.Workers.simulated(count),
      exchange='all_to_all', update_values='sign',
  )
  like = jax.eval_shape(tx.init, params)
  assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, like)
  jax.eval_shape(tx.update, gradients_of(2, count), new, params)


@pytest.mark.parametrize('count', [4, 3])
def test_checkpoints_keep_what_is_owed(count, tmp_path):
  params = random_tree(99, SHAPES)
  old, state = trained(4)
  with demo_optax.checkpoint.Checkpointer(tmp_path, state) as files:
    files.save(2, state)
  tx, like = trained(count)
  with demo_optax.checkpoint.Checkpointer(tmp_path, like) as files:
    if count != 4:
      with pytest.raises(ValueError, match='Pass resize=True'):
        files.restore()
    _, restored = files.restore(resize=count != 4)
  expected = state
  if count != 4:
    expected = demo_optax.checkpoint.resize_workers(state, count)
  assert_same_bits(restored, expected)
  assert_same_bits(
      tx.update(gradients_of(2, count), restored, params),
      tx.update(gradients_of(2, count), expected, params),
  )


@pytest.mark.parametrize('old, new', [('ternary', 'sign'), ('sign', 'ternary')])
def test_checkpoints_of_another_code(old, new):
  """Residuals that were not there are zeros; dropping some is asked for."""
  params = random_tree(99, SHAPES)
  _, state = trained(4, old)
  tx, like = trained(4, new)
  saved = demo_optax.checkpoint.to_leaves(state)
  if new == 'ternary':
    with pytest.raises(ValueError, match='resize=True to discard it'):
      demo_optax.checkpoint.from_leaves(saved, like)
  restored = demo_optax.checkpoint.from_leaves(
      saved, like, resize=new == 'ternary')
  assert_same_bits(
      restored.worker_stacked.momentum, state.worker_stacked.momentum
  )
  assert not any(
      np.any(x) for x in restored.worker_stacked.update_residual.values()
  )
  tx.update(gradients_of(2, 4), restored, params)


def test_states_go_both_ways_where_auto_changes_its_mind():
  compressor = demo_optax.dct_topk(32, 8, values='sign')
  params = {'w': jnp.zeros((1024, 1024))}

  def make(count):
    workers = demo_optax.Workers.simulated(count)
    return demo_optax.scale_by_demo(
        compressor, workers=workers, exchange='auto', update_values='int4')

  kinds = {
      count: demo_optax.plan(
          params, compressor, count, exchange='auto', update_values='int4'
      ).exchange
      for count in (2, 64)
  }
  assert kinds == {2: 'all_gather', 64: 'all_to_all'}
  state = jax.eval_shape(make(64).init, params)
  for count in (2, 64, 2):
    gradients = {'w': jax.ShapeDtypeStruct((count, 1024, 1024), jnp.float32)}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    resized = demo_optax.checkpoint.resize_workers(zeros, count)
    state = jax.eval_shape(make(count).update, gradients, resized, params)[1]


def test_workers_of_an_unknown_number():
  """Outside of the map a state can be described if it does not depend on it."""
  workers = demo_optax.Workers.on_axis('data')
  params = random_tree(99, SHAPES)

  def specs_of(**options):
    tx = demo_optax.scale_by_demo(
        COMPRESSORS['dct'], workers=workers, exchange='all_to_all', **options)
    return demo_optax.state_specs(tx, params, workers)

  specs = specs_of(update_values='ternary')
  assert set(jax.tree.leaves(specs.worker_stacked)) == {P('data')}
  with pytest.raises(ValueError, match='call tx.init there'):
    specs_of(update_values='sign')


# What is built on it ----------------------------------------------------------


def loss_fn(params, x):
  y = jnp.tanh(x @ params['up']) @ params['down'] + params['bias'][None]
  return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2)


@pytest.mark.parametrize('make', [
    lambda **kw: demo_optax.demo(3e-2, decay=0.9, **kw),
    lambda **kw: demo_optax.demo_muon(3e-2, update_values='sign', **kw),
    lambda **kw: demo_optax.local.sparse_loco(
        optax.sgd(1.0), sync_period=2, update_values='int4', **kw),
], ids=['demo', 'muon-sign', 'sparse-loco'])
def test_what_is_built_on_it_learns(make):
  workers = on_mesh(4)
  tx = make(workers=workers, exchange='all_to_all')
  params = workers.device_put({
      'up': 0.1 * random_tree(0, {'': (32, 64)})[''],
      'down': 0.1 * random_tree(1, {'': (64, 32)})[''],
      'bias': np.zeros(32, np.float32),
  })

  @demo_optax.data_parallel(workers)
  def train_step(params, opt_state, x):
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  opt_state, losses = tx.init(params), []
  for step in range(30):
    x = random_tree(step, {'': (16, 32)})['']
    params, opt_state, loss = train_step(params, opt_state, x)
    losses.append(float(loss))
  assert_replicas_equal(params)
  assert losses[-1] < 0.9 * losses[0]
