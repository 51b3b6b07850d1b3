"""Exchanges applied one step late: what is on its way, and what it depends on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  assert_same_bits,
  on_mesh,
  random_tree,
  stacked,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import Oracle

import demo_optax
from demo_optax.checkpoint.checkpointer import Checkpointer

SHAPES = {'padded': (31, 37), 'matrix': (32, 64)}  # every leaf compiles
COMPRESSORS = {
    'gathered': demo_optax.dct_topk(16, 5),
    'summed': demo_optax.compressors.random_subset(0.3, chunk_size=16),
}


SUMMED_SLOWLY = [
    'gathered', pytest.param('summed', marks=pytest.mark.slow)]


def gradients_of(step, workers):
  gradients = random_tree(step, SHAPES, lead=(workers,))
  if step == 2:
    gradients['padded'][step % workers] = np.nan
  return gradients


def run(workers, kind='gathered', delay=1, steps=5):
  """Updates and info of every step, and the last state."""
  tx = demo_optax.scale_by_demo(
      COMPRESSORS[kind], 0.9, workers=workers, delay=delay)
  params = workers.device_put(random_tree(99, SHAPES))
  state, update, seen = tx.init(params), jax.jit(tx.update), []
  for step in range(steps):
    updates, state = update(
        stacked(gradients_of(step, workers.count), workers), state, params)
    seen.append(jax.tree.map(np.asarray, (updates, state.metrics)))
  return seen, state


def updates_of(seen):
  return [updates for updates, _ in seen]


@pytest.mark.parametrize('kind', COMPRESSORS)
def test_the_same_a_step_later(kind):
  """Updates, and what is known of them, to the bit; momentum in time."""
  workers = demo_optax.Workers.simulated(3)
  in_time, state = run(workers, kind, delay=0)
  late, late_state = run(workers, kind)
  assert_same_bits(late[1:], in_time[:-1])
  assert_same_bits(late_state.worker_stacked.momentum, state.worker_stacked.momentum)
  first, info = late[0]
  assert not any(x.any() for x in first.values())
  assert info['num_excluded'] == 3
  assert not state.worker_stacked.in_flight
  assert set(late_state.worker_stacked.in_flight) == {
      'gathered': {'bucket_message'},
      'summed': {'bucket_sum_float32'}}[kind]


@pytest.mark.parametrize('kind', SUMMED_SLOWLY)
def test_mesh_and_axis_equal_simulation(kind):
  simulated, state = run(demo_optax.Workers.simulated(4), kind)
  workers = on_mesh(4)
  on_a_mesh, mesh_state = run(workers, kind)
  if kind == 'gathered':  # sums may be in another order
    assert_same_bits(updates_of(on_a_mesh), updates_of(simulated))
    assert_same_bits(mesh_state.worker_stacked.momentum, state.worker_stacked.momentum)
  for x in jax.tree.leaves(mesh_state.worker_stacked.in_flight):
    assert x.sharding.spec[0] == 'data'

  axis = demo_optax.Workers.on_axis('data')
  tx = demo_optax.scale_by_demo(
      COMPRESSORS[kind], 0.9, workers=axis, delay=1)
  params = random_tree(99, SHAPES)
  specs = demo_optax.state_specs(tx, params, axis)
  assert set(specs.worker_stacked.in_flight.values()) == {P('data')}
  mesh = workers.mesh
  state = jax.jit(jax.shard_map(
      tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
  step_fn = jax.jit(jax.shard_map(
      lambda state, gradients: tx.update(
          jax.tree.map(lambda g: g[0], gradients), state),
      mesh=mesh, in_specs=(specs, P('data')), out_specs=(P(), specs)))
  for step in range(5):
    updates, state = step_fn(state, gradients_of(step, 4))
    assert_same_bits(
        jax.tree.map(np.asarray, updates), on_a_mesh[step][0])


def test_workers_of_several_devices():
  mesh = jax.make_mesh(
      (2, 4), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2)
  specs = {'padded': P(), 'matrix': P(None, 'fsdp')}
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)
  alike = demo_optax.Workers.simulated(2, specs, {'fsdp': 4})
  seen, state = run(workers, steps=3)
  assert_same_bits(updates_of(seen), updates_of(run(alike, steps=3)[0]))
  assert {k: x.sharding.spec for k, x in state.worker_stacked.in_flight.items()} == {
      'bucket_message': P('data', 'fsdp')}
  tx = demo_optax.scale_by_demo(
      COMPRESSORS['gathered'], workers=workers, delay=1)
  found = demo_optax.state_specs(tx, random_tree(99, SHAPES), workers)
  assert found.worker_stacked.in_flight == {
      'bucket_message': P('data', ('fsdp',))}


def test_oracle(x64):
  """DeMo as published, its updates applied one step late."""
  n, rate = 3, 1e-2
  workers = demo_optax.Workers.simulated(n)
  tx = optax.chain(
      demo_optax.scale_by_demo(
          COMPRESSORS['gathered'], 0.9, workers=workers, gradient_weight=rate,
          delay=1),
      optax.scale_by_sign(), optax.add_decayed_weights(0.1),
      optax.scale_by_learning_rate(rate))
  params = jax.tree.map(
      lambda x: jnp.asarray(x, float), random_tree(99, SHAPES))
  x = jax.tree.map(np.asarray, params)
  oracles = {k: Oracle(s, n, limit=16, topk=5, decay=0.9, gradient_weight=rate)
             for k, s in SHAPES.items()}
  state, update = tx.init(params), jax.jit(tx.update)
  sent = None
  for step in range(6):
    noise = random_tree(step, SHAPES, lead=(n,))
    own = jax.tree.map(lambda p, e: p[None] + e.astype(float), params, noise)
    updates, state = update(own, state, params)
    params = optax.apply_updates(params, updates)
    arrived, sent = sent, {
        k: o.exchange(x[k][None] + noise[k].astype(float))
        for k, o in oracles.items()}
    x = {  # in the first step nothing arrives
        k: v - rate * ((0 if arrived is None else np.sign(arrived[k])) + 0.1 * v)
        for k, v in x.items()}
    for k in SHAPES:
      np.testing.assert_allclose(params[k], x[k], atol=1e-12, rtol=0)


# What the gather depends on ---------------------------------------------------


def instructions(text):
  """Of a compiled module: `{computation: {name: (operands, line)}}`."""
  found, body = {}, None
  for line in text.splitlines():
    if line and not line[0].isspace() and line.rstrip().endswith('{'):
      name = re.match(r'(?:ENTRY )?%?([\w.\-]+)', line)[1]
      body = found[('entry' if line.startswith('ENTRY') else name)] = {}
    elif body is not None and ' = ' in line:
      name, rest = line.split(' = ', 1)
      operands = re.findall(r'%([\w.\-]+)', rest)
      body[name.split()[-1].strip('%')] = (operands, rest)
  return found


def inputs_of(text, kind):
  """The arguments that reach the operands of the collectives of a kind."""
  bodies = instructions(text)
  reached, seen = set(), set()

  def walk(computation, name):
    if (computation, name) in seen:
      return
    seen.add((computation, name))
    operands, line = bodies[computation].get(name, ((), ''))
    if ' parameter(' in line:
      if computation == 'entry':
        reached.add(re.search(r'op_name="([^"]*)"', line)[1])
      else:  # all that its callers give it
        for caller, body in bodies.items():
          for other, (names, _) in body.items():
            if computation in names:
              walk(caller, other)
    for operand in operands:
      if operand in bodies[computation]:
        walk(computation, operand)

  for computation, body in bodies.items():
    for name, (_, line) in body.items():
      if f' {kind}(' in line or f' {kind}-start(' in line:
        walk(computation, name)
  return reached


@pytest.mark.parametrize('kind', SUMMED_SLOWLY)
def test_what_travels_does_not_wait_for_gradients(kind):
  """In the compiled step it depends on what is pending, and on nothing else."""
  collective = {'gathered': 'all-gather', 'summed': 'all-reduce'}[kind]
  workers = on_mesh(4)
  loss_fn = lambda params, x: jnp.mean((x @ params['w']) ** 2)

  def depends_on(delay):
    tx = optax.chain(
        demo_optax.scale_by_demo(
            COMPRESSORS[kind], workers=workers, delay=delay),
        optax.sign_sgd(0.1))

    def step_fn(params, state, x):
      gradients = jax.vmap(
          jax.grad(loss_fn), in_axes=(None, 0), spmd_axis_name='data'
      )(params, x)
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state

    params = workers.device_put({'w': np.ones((32, 32), np.float32)})
    x = stacked(np.ones((4, 2, 32), np.float32), workers)
    compiled = jax.jit(step_fn).lower(params, tx.init(params), x).compile()
    (found,) = demo_optax.tools.collectives(compiled, workers.mesh)
    assert found.kind == collective
    return inputs_of(compiled.as_text(), collective)

  in_time, late = depends_on(0), depends_on(1)
  assert 'x' in in_time and any('params' in name for name in in_time)
  assert late and all('.in_flight' in name for name in late), late


# States -----------------------------------------------------------------------


@pytest.mark.parametrize('where', [
    'mesh', pytest.param('simulated', marks=pytest.mark.slow)])
def test_a_payload_in_flight_survives_a_checkpoint(where, tmp_path):
  workers = (demo_optax.Workers.simulated(4) if where == 'simulated'
             else on_mesh(4))
  compressor = COMPRESSORS['gathered']
  tx = optax.chain(
      demo_optax.scale_by_demo(compressor, workers=workers, delay=1),
      optax.sign_sgd(0.1))
  params = workers.device_put(random_tree(99, SHAPES))
  update = jax.jit(tx.update)

  def go_on(tree, steps):
    for step in steps:
      updates, state = update(
          stacked(gradients_of(step, 4), workers), tree['opt_state'],
          tree['params'])
      tree = {'params': optax.apply_updates(tree['params'], updates),
              'opt_state': state}
    return tree

  fresh = {'params': params, 'opt_state': tx.init(params)}
  middle = go_on(fresh, range(3))
  with Checkpointer(tmp_path, params, compressor, workers) as checkpoints:
    checkpoints.save(3, middle)
    _, restored = checkpoints.restore(fresh)
  assert_same_bits(go_on(restored, range(3, 6)), go_on(middle, range(3, 6)))
  other = demo_optax.dct_topk(16, 5, values='sign')
  with (
      Checkpointer(tmp_path, params, other, workers) as checkpoints,
      pytest.raises(ValueError, match='in the state, .* here'),
  ):
    checkpoints.restore(fresh, rechunk=compressor)
  two = demo_optax.checkpoint.resize_workers(middle['opt_state'], 2)
  sizes = {x.shape[0] for x in jax.tree.leaves(two[0].worker_stacked)}
  assert sizes == {2}


def test_mistakes():
  workers = demo_optax.Workers.simulated(2)
  with pytest.raises(ValueError, match='delay=2 must be 0 or 1'):
    demo_optax.scale_by_demo(workers=workers, delay=2)
  with pytest.raises(TypeError, match='static_args'):
    optax.inject_hyperparams(demo_optax.scale_by_demo)(
        workers=workers, delay=1).init({'w': jnp.ones(4)})
  late = demo_optax.scale_by_demo(workers=workers, delay=1)
  in_time = demo_optax.scale_by_demo(workers=workers)
  params, gradients = np.ones(3, np.float32), np.ones((2, 3), np.float32)
  with pytest.raises(ValueError, match='made with delay=0, and update has'):
    late.update(gradients, in_time.init(params), params)
