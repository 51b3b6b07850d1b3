"""Exchanges every few steps: oracles, equality and drift, who communicates."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
  COMPILATIONS,
  assert_replicas_equal,
  assert_same_bits,
  on_mesh,
  stacked,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Oracle

import demo_optax
from demo_optax.checkpoint.checkpointer import Checkpointer

SHAPES = {'padded': (31, 37), 'short': (7,)}  # every leaf compiles
LIMIT, TOPK = 16, 5
COMPRESSOR = demo_optax.dct_topk(LIMIT, TOPK)
RAW = demo_optax.identity_topk(LIMIT, TOPK, values='int4')
RATES = {'learning_rate': 1e-2, 'b1': 0.9, 'b2': 0.95, 'weight_decay': 0.1}
DECAY = 0.9


def make(method, workers, period=3):
  inner = optax.adamw(**RATES)
  kwargs = {'workers': workers, 'sync_period': period}
  if method == 'diloco':
    return demo_optax.diloco(
        inner, outer_learning_rate=0.7, outer_momentum=0.9, **kwargs)
  if method == 'sparse_loco':
    return demo_optax.sparse_loco(
        inner, compressor=RAW, outer_learning_rate=0.8, decay=DECAY, **kwargs)
  return demo_optax.demo_diloco(
      inner, compressor=COMPRESSOR, outer_learning_rate=0.7, decay=DECAY,
      drift=method == 'drift', **kwargs)


@pytest.fixture(autouse=True)
def lenient():
  """optax's AdamW and schedules promote dtypes."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield


METHODS = ['diloco', 'demo_diloco', 'drift', 'sparse_loco']


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


def noise(step, workers, dtype=np.float32):
  rng = np.random.default_rng(step)
  return {k: rng.normal(size=(workers, *s)).astype(dtype)
          for k, s in SHAPES.items()}


def start(dtype=np.float32):
  rng = np.random.default_rng(99)
  return {k: rng.normal(size=s).astype(dtype) for k, s in SHAPES.items()}


# Oracles ----------------------------------------------------------------------


class Worker:
  """One worker's AdamW in NumPy."""

  def __init__(self, x):
    self.x, self.m, self.v, self.t = x.copy(), 0 * x, 0 * x, 0

  def step(self, g):
    b1, b2 = RATES['b1'], RATES['b2']
    self.t += 1
    self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
    m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
    self.x = self.x - RATES['learning_rate'] * (
        m / (np.sqrt(v) + 1e-8) + RATES['weight_decay'] * self.x)


class Leaf:
  """N workers' copies of one parameter, after the formulas."""

  def __init__(self, x, workers, method):
    self.method, self.s, self.momentum = method, x, 0 * x
    self.workers = [Worker(x) for _ in range(workers)]
    self.own_s = [x] * workers
    values = {'values': 'int4', 'average': 'workers', 'basis': np.eye}
    self.exchange = Oracle(
        x.shape, workers, limit=LIMIT, topk=TOPK, decay=DECAY,
        **(values if method == 'sparse_loco' else {}))

  @property
  def x(self):
    return np.stack([w.x for w in self.workers])

  def sync(self):
    if self.method == 'drift':
      G = [s - w.x for s, w in zip(self.own_s, self.workers)]
      Q = self.exchange.exchange(np.stack(G))
      self.exchange.m += Q.reshape(self.exchange.matrix)
      for i, w in enumerate(self.workers):
        m = self.exchange.m[i].reshape(w.x.shape)
        w.x = self.own_s[i] - 0.7 * (G[i] + DECAY * m)
      self.own_s = [w.x for w in self.workers]
      return
    G = np.stack([self.s - w.x for w in self.workers])
    if self.method == 'diloco':
      self.momentum = 0.9 * self.momentum + G.mean(axis=0)
      self.s = self.s - 0.7 * (G.mean(axis=0) + 0.9 * self.momentum)
    else:
      rate = 0.8 if self.method == 'sparse_loco' else 0.7
      self.s = self.s - rate * self.exchange.exchange(G)
    for w in self.workers:
      w.x = self.s.copy()


@pytest.mark.parametrize('method', METHODS)
def test_oracle(method, x64):
  n, period, steps = 3, 3, 13
  workers = demo_optax.Workers.simulated(n)
  tx = make(method, workers, period)
  leaves = {k: Leaf(x, n, method) for k, x in start(np.float64).items()}
  params = demo_optax.stack_params(start(np.float64), workers)
  state = tx.init(params)

  @jax.jit
  def step_fn(params, state, noise):
    gradients = jax.tree.map(lambda x, e: 0.3 * x + e, params, noise)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  for step in range(steps):
    e = noise(step, n, np.float64)
    params, state = step_fn(params, state, e)
    for k, leaf in leaves.items():
      for i, w in enumerate(leaf.workers):
        w.step(0.3 * w.x + e[k][i])
      if step % period == period - 1:
        leaf.sync()
      np.testing.assert_allclose(
          params[k], leaf.x, atol=1e-10, rtol=0, err_msg=f'{k} {step}')
  shared = demo_optax.shared_params(params, state, workers)
  for k, leaf in leaves.items():
    own = np.mean(leaf.own_s, axis=0)
    np.testing.assert_allclose(
        shared[k], own if method == 'drift' else leaf.s, atol=1e-10, rtol=0)


# Runs -------------------------------------------------------------------------


def make_step(tx, workers):
  @jax.jit
  def step_fn(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return demo_optax.settle_params(params, state, workers), state

  return step_fn


@functools.cache
def run(method, workers, steps, period=3):
  """Parameters after every step, and the last ones with their state."""
  tx = make(method, workers, period)
  params = demo_optax.stack_params(workers.device_put(start()), workers)
  state = tx.init(params)
  step_fn, seen = make_step(tx, workers), []
  for step in range(steps):
    before = COMPILATIONS.count
    params, state = step_fn(
        params, state, stacked(noise(step, workers.count), workers))
    assert step == 0 or COMPILATIONS.count == before, 'compiled again'
    seen.append(jax.tree.map(np.asarray, params))
  return seen, params, state


def apart(params):
  """Largest difference between workers, over the parameters' size."""
  return max(float(np.abs(x - x[:1]).max() / np.abs(x).max())
             for x in params.values())


@pytest.mark.parametrize('method', METHODS)
def test_equal_or_apart(method):
  """All equal after each exchange, to the bit; as published they drift."""
  seen, params, state = run(method, demo_optax.Workers.simulated(4), 12)
  between = [apart(p) for i, p in enumerate(seen) if i % 3 != 2]
  after = [apart(p) for i, p in enumerate(seen) if i % 3 == 2]
  assert min(between) > 1e-3
  if method == 'drift':
    assert after == sorted(after)  # further and further
    assert 0.01 < after[-1] < 0.2
  else:
    assert after == [0.0] * 4
    assert int(state.outer[0].count) == 4
  assert int(state.count) == 12 and int(state.since) == 0


@pytest.mark.parametrize('method, kind', [
    ('drift', 'auto'), ('demo_diloco', 'explicit'), slow('diloco', 'auto'),
    slow('demo_diloco', 'auto'), slow('sparse_loco', 'auto')])
def test_mesh_is_as_simulation(method, kind):
  workers = on_mesh(4, kind)
  simulated, *_ = run(method, demo_optax.Workers.simulated(4), 12)
  seen, params, state = run(method, workers, 12)
  for p, q in zip(simulated, seen):
    for k in p:  # compilers contract AdamW's products as they like
      np.testing.assert_allclose(p[k], q[k], atol=1e-5, rtol=0)
  for x in jax.tree.leaves(params):
    assert {s.data.shape[0] for s in x.addressable_shards} == {1}
  if method != 'drift':
    assert_replicas_equal(state.start)
    assert demo_optax.check_replicas(state, workers) == []
    assert [apart(p) for p in seen[2::3]] == [0.0] * 4


@pytest.mark.slow
def test_a_tree_as_outer_optimizer():
  """Some leaves are exchanged sparsely, some averaged, at the same time."""
  workers = demo_optax.Workers.simulated(3)
  outer = optax.chain(
      demo_optax.scale_by_demo(
          {'padded': COMPRESSOR, 'short': None}, workers=workers),
      optax.sgd(1.0))
  tx = demo_optax.local_updates(optax.sgd(0.1), outer, 2, workers=workers)
  params = demo_optax.stack_params(start(), workers)
  state, step_fn = tx.init(params), make_step(tx, workers)
  moved = start()['short']
  for step in range(4):
    params, state = step_fn(params, state, noise(step, 3))
    moved = moved - 0.1 * noise(step, 3)['short'].mean(axis=0)
  assert apart(params) == 0
  np.testing.assert_allclose(params['short'][0], moved, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('drift', [False, True])
def test_workers_of_several_devices(drift):
  mesh = jax.make_mesh(
      (2, 4), ('data', 'fsdp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  specs = {'matrix': P(None, 'fsdp'), 'bias': P()}
  first = {'matrix': np.ones((16, 64), np.float32),
           'bias': np.ones((6,), np.float32)}
  seen = []
  for workers in (demo_optax.Workers.on_mesh(mesh, 'data', specs),
                  demo_optax.Workers.simulated(2, specs, {'fsdp': 4})):
    tx = demo_optax.demo_diloco(
        optax.sgd(0.1), workers=workers, compressor=COMPRESSOR, sync_period=2,
        drift=drift)
    params = demo_optax.stack_params(workers.device_put(first), workers)
    state, step_fn = tx.init(params), make_step(tx, workers)
    for step in range(4):
      rng = np.random.default_rng(step)
      gradients = {k: rng.normal(size=(2, *x.shape)).astype(np.float32)
                   for k, x in first.items()}
      params, state = step_fn(params, state, gradients)
    seen.append(jax.tree.map(np.asarray, params))
  for k in first:
    np.testing.assert_allclose(seen[0][k], seen[1][k], atol=1e-6)


# Who communicates -------------------------------------------------------------


def loss_fn(params, x):
  y = x @ params['w'] + params['b'].sum()
  return jnp.mean(y**2)


def branches(text):
  """Names of the computations that only a conditional calls."""
  (conditional,) = re.findall(r' conditional\(.*', text)
  named = re.search(r'branch_computations=\{([^}]*)\}', conditional)
  if named:
    return [n.strip(' %') for n in named[1].split(',')]
  return re.findall(r'(?:true|false)_computation=%?([\w.\-]+)', conditional)


def computations(text):
  """The lines of every computation of a compiled module, by its name."""
  found, name = {}, None
  for line in text.splitlines():
    if line and not line[0].isspace() and line.endswith('{'):
      name = line.removeprefix('ENTRY ').split()[0].strip('%').split('(')[0]
      found[name] = []
    elif name is not None:
      found[name].append(line)
  return found


@pytest.mark.parametrize('method', ['diloco', 'demo_diloco', slow('drift')])
def test_only_exchange_steps_communicate(method):
  """From the compiled step, gradients and all: one collective, in a branch."""
  workers = on_mesh(4)
  tx = make(method, workers)
  params = workers.device_put({'w': np.ones((32, 32), np.float32),
                               'b': np.ones((5,), np.float32)})
  plan = demo_optax.plan(params, COMPRESSOR, workers)
  params = demo_optax.stack_params(params, workers)
  grad = demo_optax.value_and_grad(
      loss_fn, workers=workers, stacked_params=True)

  @jax.jit
  def step_fn(params, state, x):
    losses, gradients = grad(params, x)
    updates, state = tx.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return demo_optax.settle_params(params, state, workers), state, losses

  compiled = step_fn.lower(
      params, tx.init(params), np.ones((8, 32), np.float32)).compile()
  text = compiled.as_text()
  (found,) = demo_optax.collectives(compiled, workers.mesh)
  assert found.axes == ('data',)
  if method == 'diloco':
    assert found.kind == 'all-reduce'
  else:
    assert found.kind == 'all-gather'
    assert found.output_bytes == 4 * plan.sent_bytes
    sent, received = plan.per_step(3)
    assert sent == found.output_bytes / 4 / 3
    assert received == found.sent_bytes / 3
  lines = computations(text)
  taken = [name for name in lines
           if any(f' {found.kind}(' in line for line in lines[name])]
  assert len(taken) == 1 and taken[0] in branches(text)


# States -----------------------------------------------------------------------


@pytest.mark.parametrize('method, where', [
    ('demo_diloco', 'mesh'), ('drift', 'simulated'),
    slow('demo_diloco', 'simulated'), slow('drift', 'mesh')])
def test_resumed_in_the_middle_of_a_period(method, where, tmp_path):
  workers = (demo_optax.Workers.simulated(4) if where == 'simulated'
             else on_mesh(4))
  tx = make(method, workers)
  step_fn = make_step(tx, workers)

  def fresh():
    params = demo_optax.stack_params(workers.device_put(start()), workers)
    return {'worker_stacked': params, 'opt_state': tx.init(params)}

  def go_on(tree, steps):
    for step in steps:
      gradients = stacked(noise(step, 4), workers)
      params, state = step_fn(
          tree['worker_stacked'], tree['opt_state'], gradients)
      tree = {'worker_stacked': params, 'opt_state': state}
    return tree

  middle = go_on(fresh(), range(7))
  assert int(middle['opt_state'].since) == 1
  with Checkpointer(tmp_path, start(), COMPRESSOR, workers) as checkpoints:
    checkpoints.save(7, middle)
    _, restored = checkpoints.restore(fresh())
  two = demo_optax.Workers.simulated(2)
  with (Checkpointer(tmp_path, start(), COMPRESSOR, two) as checkpoints,
        pytest.raises(ValueError, match=r'(?s)workers.*resize=True')):
    checkpoints.restore(demo_optax.resize_workers(fresh(), 2))
  assert_same_bits(go_on(restored, range(7, 12)), go_on(middle, range(7, 12)))


def test_another_number_of_workers():
  """The shared parameters stay; what is each worker's own is regrouped."""
  four, two = (demo_optax.Workers.simulated(n) for n in (4, 2))
  _, params, state = run('demo_diloco', four, 12)
  tree = demo_optax.resize_workers(
      {'worker_stacked': params, 'opt_state': state}, 2)
  assert_same_bits(tree['opt_state'].start, state.start)
  updates, _ = make('demo_diloco', two).update(
      noise(0, 2), tree['opt_state'], tree['worker_stacked'])
  assert updates['padded'].shape == (2, 31, 37)


def test_period_by_a_schedule():
  """Every one of four steps, then every third."""
  workers = demo_optax.Workers.simulated(2)
  period = optax.piecewise_constant_schedule(1, {4: 3})
  tx = make('demo_diloco', workers, period)
  params = demo_optax.stack_params(start(), workers)
  state, update, ends = tx.init(params), jax.jit(tx.update), []
  for step in range(12):
    updates, state = update(noise(step, 2), state, params)
    params = optax.apply_updates(params, updates)
    if int(state.since) == 0:
      ends.append(step)
      for k, s in state.start.items():  # without settle_params: to rounding
        np.testing.assert_allclose(
            params[k], np.stack([s, s]), rtol=0, atol=3e-7)
  assert ends == [0, 1, 2, 3, 6, 9]
  assert int(state.outer[0].count) == len(ends)


def test_gradients_that_are_not_finite():
  """The worker leaves out that step; a worker gone infinite comes back."""
  workers = demo_optax.Workers.simulated(3)
  tx = make('demo_diloco', workers)
  params = demo_optax.stack_params(start(), workers)
  state, step_fn = tx.init(params), make_step(tx, workers)
  gradients = noise(0, 3)
  gradients['short'][1, 2] = np.nan
  params, state = step_fn(params, state, gradients)
  assert state.worker_stacked.skipped.tolist() == [0, 1, 0]
  np.testing.assert_array_equal(params['padded'][1], start()['padded'])
  assert np.abs(params['padded'][0] - start()['padded']).max() > 1e-3
  assert int(state.worker_stacked.inner[0].count[1]) == 0
  params['padded'] = params['padded'].at[2, 0, 0].set(np.inf)
  for step in (1, 2):
    params, state = step_fn(params, state, noise(step, 3))
  assert int(state.outer[0].metrics['num_excluded']) == 1
  assert all(np.isfinite(x).all() for x in params.values())
  assert apart(params) == 0


def test_integers_are_left_alone():
  workers = demo_optax.Workers.simulated(2)
  tx = make('diloco', workers, 1)
  params = demo_optax.stack_params(
      {'w': np.ones(3, np.float32), 'n': np.int32(7)}, workers)
  grad = demo_optax.value_and_grad(
      lambda p, x: jnp.sum(p['w'] * x) * p['n'].astype(jnp.float32),
      workers=workers, stacked_params=True)
  losses, gradients = grad(params, np.ones(6, np.float32))
  assert losses.tolist() == [21.0, 21.0]
  assert gradients['n'].shape == (2,)
  updates, state = tx.update(gradients, tx.init(params), params)
  params = optax.apply_updates(params, updates)
  shared = demo_optax.shared_params(params, state, workers)
  assert int(shared['n']) == 7 and shared['w'][0] < 1


# With Flax --------------------------------------------------------------------


class Net(nnx.Module):

  def __init__(self, rngs):
    self.linear = nnx.Linear(6, 3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(nnx.relu(self.linear(x)))


def test_nnx_optimizer():
  """A stock nnx.Optimizer on a module with stacked parameters."""
  workers = demo_optax.Workers.simulated(4)
  tx = make('demo_diloco', workers, 2)
  model = Net(nnx.Rngs(0))
  alone = nnx.state(model, nnx.Param)
  shapes = jax.tree.map(jnp.shape, alone)
  nnx.update(model, demo_optax.stack_params(alone, workers))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  grad = demo_optax.value_and_grad(
      lambda model, x: jnp.mean((model(x) - 1) ** 2), workers=workers,
      stacked_params=True, microbatches=2)

  @nnx.jit
  def step_fn(model, optimizer, x):
    losses, gradients = grad(model, x)
    optimizer.update(model, gradients)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, demo_optax.settle_params(
        params, optimizer.opt_state, workers))
    return losses

  x = np.tile(np.random.default_rng(0).normal(size=(2, 6)), (4, 1))
  x = x.astype(np.float32)  # the same for all: dropout masks differ
  for step in range(4):
    losses = step_fn(model, optimizer, x)
    assert losses.shape == (4,)
    params = nnx.state(model, nnx.Param)
    kernel = np.asarray(model.linear.kernel[...])
    assert (np.abs(kernel - kernel[:1]).max() == 0) == (step % 2 == 1)
  shared = demo_optax.shared_params(params, optimizer.opt_state, workers)
  assert jax.tree.map(jnp.shape, shared) == shapes
  np.testing.assert_array_equal(
      shared['linear']['kernel'][...], kernel[0])
  nnx.update(model, shared)
  model.eval()
  assert model(x).shape == (8, 3)


@pytest.mark.parametrize('dtype, of_gradients', [
    ('bfloat16', 'float32'), ('float16', 'float16'), ('float32', 'bfloat16')])
@pytest.mark.parametrize('method', [
    'diloco', 'demo_diloco', slow('drift'), slow('sparse_loco')])
def test_dtypes(method, dtype, of_gradients):
  """Updates in the parameters' dtype; what is shared, in that of momentum."""
  workers = demo_optax.Workers.simulated(2)
  tx = make(method, workers, 2)
  params = {'w': jnp.linspace(-1, 1, 64, dtype=dtype).reshape(8, 8)}
  params = demo_optax.stack_params(params, workers)
  state = tx.init(params)
  like = jax.tree.map(lambda x: x.dtype, state)
  with jax.numpy_dtype_promotion('standard'):
    for step in range(4):
      gradients = {'w': jnp.ones((2, 8, 8), of_gradients) * (step + 1)}
      updates, state = jax.jit(tx.update)(gradients, state, params)
      assert updates['w'].dtype == dtype
      params = optax.apply_updates(params, updates)
      params = demo_optax.settle_params(params, state, workers)
  assert jax.tree.map(lambda x: x.dtype, state) == like
  shared = demo_optax.shared_params(params, state, workers)
  assert shared['w'].dtype == dtype
  if method != 'drift':
    assert state.start['w'].dtype == 'float32'
    np.testing.assert_array_equal(params['w'][1], shared['w'])


def test_sharded_workers_do_not_compile_again():
  """What a step returns lies where its arguments lay."""
  mesh = jax.make_mesh((2, 2), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2,
                       devices=jax.devices()[:4])
  workers = demo_optax.Workers.on_mesh(mesh, 'data', {'w': P(None, 'fsdp'), 'b': None})
  tx = demo_optax.diloco(optax.sgd(1e-2), workers=workers, sync_period=2)
  params = workers.device_put({'w': jnp.ones((8, 8)), 'b': jnp.zeros(8)})
  params = demo_optax.stack_params(params, workers)
  grad = demo_optax.value_and_grad(
      lambda p, x: jnp.mean((x @ p['w'] + p['b'][None]) ** 2), workers=workers,
      stacked_params=True)

  @jax.jit
  def step_fn(params, state, x):
    _, gradients = grad(params, x)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(('data', 'fsdp'))))
  state = tx.init(params)
  for _ in range(3):
    params, state = step_fn(params, state, x)
  assert step_fn._cache_size() == 1
  assert params['w'].sharding.spec == P('data', None, 'fsdp')


def test_a_step_that_would_not_be_finite_is_left_out():
  """Adam squares a gradient that is finite itself."""
  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.diloco(optax.adam(1e-2), workers=workers, sync_period=4)
  params = demo_optax.stack_params({'w': jnp.ones(4)}, workers)
  state = tx.init(params)
  with jax.numpy_dtype_promotion('standard'):
    for step in range(4):
      gradients = {'w': jnp.ones((2, 4)).at[0].mul(1e25 if step == 1 else 1.0)}
      updates, state = tx.update(gradients, state, params)
      params = optax.apply_updates(params, updates)
  assert state.worker_stacked.skipped.tolist() == [1, 0]
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((params, state)))
  kept = demo_optax.shared_params(params, state, workers)
  jax.jit(tx.update, donate_argnums=(1,))(gradients, state, params)
  assert jnp.isfinite(kept['w']).all()  # still there


# Mistakes ---------------------------------------------------------------------


def test_mistakes():
  workers = demo_optax.Workers.simulated(2)
  sgd = optax.sgd(1.0)
  with pytest.raises(ValueError, match='sync_period=0 must be at least 1'):
    demo_optax.local_updates(sgd, sgd, 0, workers=workers)
  with pytest.raises(TypeError, match=r'sync_period=2\.5 must be an integer'):
    demo_optax.local_updates(sgd, sgd, 2.5, workers=workers)
  with pytest.raises(TypeError, match='on_axis.*has no stacked parameters'):
    demo_optax.diloco(workers=demo_optax.Workers.on_axis('data'))
  tx = demo_optax.local_updates(sgd, sgd, 1, workers=workers)
  with pytest.raises(ValueError, match=r'(?s)has shape \(3,\).*stack_params'):
    tx.init(np.ones(3, np.float32))
  params = demo_optax.stack_params(np.ones(3, np.float32), workers)
  with pytest.raises(ValueError, match='needs params'):
    tx.update(params, tx.init(params))
  with pytest.raises(ValueError, match='is there an exchange in it'):
    tx.update(params, tx.init(params), params)
  tx = demo_optax.local_updates(
      sgd, demo_optax.mean_over_workers(workers=workers), 1, workers=workers,
      drift=True)
  with pytest.raises(ValueError, match='one update for every worker'):
    tx.update(params, tx.init(params), params)
  grad = demo_optax.value_and_grad(
      lambda p: p.sum(), workers=workers, stacked_params=True)
  with pytest.raises(ValueError, match=r'has shape \(3,\).*stack_params'):
    grad(np.ones(3, np.float32))
  with pytest.raises(ValueError, match='0 states of demo_optax.local_updates'):
    demo_optax.shared_params(params, sgd.init(params), workers)
  plan = demo_optax.plan(params, COMPRESSOR, workers)
  with pytest.raises(ValueError, match='sync_period=0 must be at least 1'):
    plan.per_step(0)
