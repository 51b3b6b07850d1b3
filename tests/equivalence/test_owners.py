"""Chunks that are divided among the workers: the same updates, fewer bytes."""

import functools

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  assert_same_bits,
  make_mesh_2d,
  on_mesh,
  random_tree,
  stacked,
  updates_of,
)
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import compressors
from demo_optax.exchange import algorithm
from demo_optax.workers import collectives

COMPRESSOR = demo_optax.dct_topk(32, 8, values='sign')
SHAPES = {  # more chunks than workers, and fewer
  'matrix': (64, 96),
  'few': (32, 64),
  'bias': (64,),
  'scalar': (),
}


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


def owners(
  workers, update_values, compressor=COMPRESSOR, exchange='all_to_all'
):
  return demo_optax.scale_by_demo(
    compressor,
    0.9,
    workers=workers,
    exchange=exchange,
    update_values=update_values,
  )


@functools.cache
def train(count, exchange, steps=20):
  """Returns the parameters of every step, and the last state."""
  workers = demo_optax.Workers.simulated(count)
  tx = optax.chain(
    owners(workers, 'ternary', exchange=exchange),
    optax.scale_by_sign(),
    optax.scale(-0.01),
  )
  params = random_tree(99, SHAPES)
  state, seen = tx.init(params), []

  @jax.jit
  def step_fn(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  for step in range(steps):
    params, state = step_fn(params, state, gradients_of(step, count))
    seen.append(jax.tree.map(np.asarray, params))
  return seen, state


def momentum(state):
  return state[0].worker_stacked.momentum


@pytest.mark.core
def test_signs_are_those_of_an_all_gather():
  """Eight chunks, of six owners: two have padding, and two nothing else."""
  count = 6
  expected, before = train(count, 'all_gather')
  found, after = train(count, 'all_to_all')
  assert_same_bits(found, expected)
  assert_same_bits(momentum(after), momentum(before))
  for name, x in demo_optax.exchange_info(after).items():
    expected_metric = demo_optax.exchange_info(before)[name]
    np.testing.assert_allclose(x, expected_metric, rtol=1e-5, err_msg=name)
  # Zeros move nothing: else cancelled sums would show nothing.
  assert np.mean(found[0]['few'] == random_tree(99, SHAPES)['few']) > 0.03


def test_metrics_of_formats_that_alternate():
  """Owners write the first and the last bucket together: both have one n."""
  shapes = {'early': (16, 16), 'few': (7,), 'last': (16, 16)}
  codes = {
    'early': demo_optax.dct_topk(8, 3),
    'few': demo_optax.dct_topk(8, 64),
    'last': demo_optax.dct_topk(8, 9),
  }
  params, workers = random_tree(99, shapes), demo_optax.Workers.simulated(4)
  gradients = [random_tree(0, shapes, lead=(4,))]

  def metrics(exchange):
    tx = owners(workers, 'float32', codes, exchange)
    _, state = updates_of(tx, params, gradients)
    return demo_optax.exchange_info(state)

  found = metrics('all_to_all')
  for name, metric in metrics('all_gather').items():
    np.testing.assert_allclose(found[name], metric, rtol=1e-5, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize(
  'shape, values', [((4, 1), 'ternary'), ((2, 4), 'int4')]
)
def test_one_of_each_collective_with_the_planned_bytes(shape, values):
  mesh = make_mesh_2d(shape=shape)
  specs = dict.fromkeys(SHAPES) | {'matrix': P(None, 'fsdp')}
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)
  params = workers.device_put(random_tree(9, SHAPES))
  gradients = stacked(
    random_tree(0, SHAPES, lead=(workers.count,)), workers, specs
  )
  tx = owners(workers, values)
  compiled = (
    jax.jit(tx.update).lower(gradients, tx.init(params), params).compile()
  )
  found = {
    c.kind: c.received_bytes
    for c in hlo_text.collectives(compiled, mesh)
    if 'data' in c.axes
  }
  plan = demo_optax.plan(
    params, COMPRESSOR, workers, exchange='all_to_all', update_values=values
  )
  assert sum(found.values()) == plan.device_bytes['data',]
  sent = {'all-gather': plan.update_bytes, 'all-to-all': plan.payload_bytes}
  assert found == {
    kind: size * (workers.count - 1) // workers.count // shape[1]
    for kind, size in sent.items()
  }


def test_a_damaged_message_excludes_its_sender_from_that_owners_chunks(
  monkeypatch,
):
  """Worker 1's message to owner 2 is garbage; others read theirs."""
  real = collectives.Group.send_and_receive
  damage = [False]

  def send_and_receive(group, message):
    arrived, included = real(group, message)
    if damage[0]:
      for name, x in arrived.items():
        here = jax.lax.axis_index(group.axis) == 2
        arrived[name] = x.at[1].set(
          jnp.where(here, jnp.uint32(2**32 - 1), x[1])
        )
    return arrived, included

  monkeypatch.setattr(collectives.Group, 'send_and_receive', send_and_receive)
  workers = demo_optax.Workers.simulated(4)
  params = {'w': jnp.zeros((32, 128))}  # a chunk for each owner
  gradients = random_tree(0, {'w': (32, 128)}, lead=(4,))

  def update_of(gradients):
    algorithm.run_jitted.clear_cache()
    tx = owners(workers, 'float32')
    updates, state = tx.update(gradients, tx.init(params), params)
    return np.asarray(updates['w']), demo_optax.exchange_info(state)

  whole, _ = update_of(gradients)
  damage[0] = True
  found, info = update_of(gradients)
  damage[0] = False
  gradients['w'][1] = np.nan
  alone, _ = update_of(gradients)
  algorithm.run_jitted.clear_cache()
  assert info['num_excluded'] == 1
  chunks = [slice(32 * i, 32 * i + 32) for i in range(4)]
  for i, chunk in enumerate(chunks):
    expected = alone if i == 2 else whole
    np.testing.assert_array_equal(found[:, chunk], expected[:, chunk])
  assert np.any(alone[:, chunks[2]] != whole[:, chunks[2]])


@pytest.mark.core
def test_exact_updates_and_what_all_share_are_as_before():
  """An all-reduce does not grow with the workers, and needs no owners."""
  workers = on_mesh(4)
  params = workers.device_put(random_tree(9, SHAPES))
  shared = compressors.Compressor(
    compressors.RandomSubset(1 / 4), compressors.Identity()
  )
  mixed = {
    'matrix': COMPRESSOR,
    'few': shared,
    'bias': None,
    'scalar': compressors.full(),
  }

  def run(exchange):
    tx = owners(workers, 'float32', mixed, exchange)
    return updates_of(
      tx, params, (stacked(gradients_of(step, 4), workers) for step in range(3))
    )[0]

  assert_same_bits(run('all_to_all'), run('all_gather'))


def test_without_a_chunk_to_own_nothing_is_broadcast():
  params = random_tree(9, SHAPES)
  workers = demo_optax.Workers.simulated(4)
  programs = []
  for exchange in ('all_to_all', 'all_gather'):
    tx = owners(workers, 'sign', compressors.full(), exchange)
    state = jax.eval_shape(tx.init, params)
    programs.append(
      jax.make_jaxpr(tx.update)(gradients_of(0, 4), state, params)
    )
  assert str(programs[0]) == str(programs[1])


# Codes that lose something ----------------------------------------------------


def kept_by_owners(state):
  """What owners keep of all chunks of each bucket."""
  kept = state.worker_stacked.update_residual
  return {
    b.name: np.asarray(kept[b.name]).reshape(-1, b.format.n)[: b.num_chunks]
    for b in state.layout.layout.buckets
  }


@functools.cache
def sum_of_updates(update_values, count):
  """Returns the sum of 12 updates, and the state after them."""
  tx = owners(demo_optax.Workers.simulated(count), update_values)
  updates, state = updates_of(
    tx,
    random_tree(99, SHAPES),
    (gradients_of(step, count) for step in range(12)),
  )
  return jax.tree.map(lambda *u: sum(map(np.asarray, u)), *updates), state


@pytest.mark.parametrize(  # int8 is int4 with more levels
  'values, count', [('int8', 3), ('sign', 3), ('int4', 1)]
)
def test_what_a_code_loses_is_sent_later(values, count):
  """Sums of updates, and what owners keep, are the exact updates' sums."""
  exact, before = sum_of_updates('float32', count)
  found, after = sum_of_updates(values, count)
  # The momentum does not know what becomes of updates.
  assert_same_bits(
    after.worker_stacked.momentum, before.worker_stacked.momentum
  )
  assert not before.worker_stacked.update_residual
  size = {k: float(np.abs(x).max()) for k, x in exact.items()}
  lost = {
    k: np.abs(found[k] - exact[k]).max() / size[k] for k in ('matrix', 'few')
  }
  assert min(lost.values()) > 1e-4  # else nothing is shown below
  owed = {}
  for number, rows in enumerate(kept_by_owners(after).values()):
    owed |= after.layout.layout.cut(number, jnp.asarray(rows), 0)
  for i, name in enumerate(sorted(SHAPES)):
    np.testing.assert_allclose(
      found[name] + owed[i], exact[name], atol=1e-5 * size[name] + 1e-6
    )


# Choosing ---------------------------------------------------------------------


def test_owners_pay_from_dozens_of_workers():
  params = {'w': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
  compressor = demo_optax.dct_topk(topk=32, values='sign')

  def received(count, exchange):
    plan = demo_optax.plan(
      params, compressor, count, exchange=exchange, update_values='ternary'
    )
    return plan.received_bytes

  assert received(4, 'all_gather') < received(4, 'all_to_all')
  assert received(64, 'all_to_all') < received(64, 'all_gather')
  # Constant in the number of workers: a message, and 1.6 bits an element.
  most = demo_optax.plan(params, compressor, 2).payload_bytes + 2**24 / 5
  assert received(64, 'all_to_all') < 1.02 * most


# States of another number of workers ------------------------------------------


@functools.cache
def trained(values):
  """Leaves of a state of four workers in which owners keep something."""
  tx = owners(demo_optax.Workers.simulated(4), values)
  gradients = (gradients_of(step, 4) for step in (0, 1))
  _, state = updates_of(tx, random_tree(99, SHAPES), gradients)
  return state, demo_optax.checkpoint.to_leaves(state)


@pytest.mark.parametrize('count', [1, 3, 8])
def test_new_owners_begin_with_nothing_owed(count):
  _, saved = trained('sign')
  tx = owners(demo_optax.Workers.simulated(count), 'sign')
  like = tx.init(random_tree(99, SHAPES))
  with pytest.raises(ValueError, match='Pass resize=True'):
    demo_optax.checkpoint.from_leaves(saved, like)
  new = demo_optax.checkpoint.from_leaves(saved, like, resize=True)
  assert not any(map(np.any, new.worker_stacked.update_residual.values()))
  assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, like)
  jax.eval_shape(
    tx.update, gradients_of(2, count), new, random_tree(99, SHAPES)
  )


@pytest.mark.parametrize('old, new', [('ternary', 'sign'), ('sign', 'ternary')])
def test_checkpoints_of_another_code(old, new):
  """Owners owe nothing at first, which is asked for."""
  params = random_tree(99, SHAPES)
  state, saved = trained(old)
  tx = owners(demo_optax.Workers.simulated(4), new)
  like = tx.init(params)
  with pytest.raises(ValueError, match='to discard residuals'):
    demo_optax.checkpoint.from_leaves(saved, like)
  restored = demo_optax.checkpoint.from_leaves(saved, like, resize=True)
  assert_same_bits(
    restored.worker_stacked.momentum, state.worker_stacked.momentum
  )
  assert not any(
    np.any(x) for x in restored.worker_stacked.update_residual.values()
  )
  jax.eval_shape(tx.update, gradients_of(2, 4), restored, params)
