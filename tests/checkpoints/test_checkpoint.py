"""Checkpoints: bit for bit, with other workers, and never in silence."""

import functools
import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import mismatches
import numpy as np
import optax
import pytest
from helpers import MESHES, assert_same_bits, worker_grads
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint
from demo_optax import state as state_lib
from demo_optax.checkpoint import folder

COMPRESSOR = demo_optax.dct_topk(chunk_size=8, topk=3)
SPECS = {'up': P(None, 'fsdp'), 'down': P('fsdp'), 'bias': None}
PARAMS = {
    'up': np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32) / 4,
    'down': np.random.default_rng(1).normal(size=(64, 12)).astype(np.float32) / 8,
    'bias': np.zeros(12, np.float32),
}


def simulated(count, blocks=1):
  specs = (SPECS, {'fsdp': blocks}) if blocks > 1 else ()
  return demo_optax.Workers.simulated(count, *specs)


def on_mesh(count, blocks=1, kind='auto'):
  mesh = jax.make_mesh(
      (count, blocks), ('replica', 'fsdp'), axis_types=(MESHES[kind],) * 2,
      devices=jax.devices()[:count * blocks])
  return demo_optax.Workers.on_mesh(
      mesh, 'replica', SPECS if blocks > 1 else None)


LAYOUTS = {
    'simulated': lambda: simulated(4),
    'mesh': lambda: on_mesh(4),
    'explicit': lambda: on_mesh(4, kind='explicit'),
    'sharded': lambda: on_mesh(2, 4),
    'sharded explicit': lambda: on_mesh(2, 4, 'explicit'),
}


def make_tx(workers, compressor):
  """DeMo behind links of each worker's own: floats, and a count."""
  own = optax.chain(
      optax.trace(0.5), optax.scale_by_schedule(lambda count: 1.0))
  return optax.chain(
      demo_optax.per_worker(own, workers=workers),
      demo_optax.demo(1e-2, workers=workers, compressor=compressor, decay=0.9))


@functools.cache
def make_step(workers):
  explicit = getattr(workers, '_explicit', False)
  out = P() if explicit else None
  tx = make_tx(workers, COMPRESSOR)

  def loss_fn(params, x):
    y = jnp.einsum('bi,io->bo', x @ params['up'], params['down'],
                   out_sharding=out)
    return jnp.mean((y + params['bias'][None] - 1.0) ** 2)

  grad = worker_grads(loss_fn, workers)

  def step(params, state, key, x):
    _, gradients = grad(params, x + jax.random.uniform(key))
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step, donate_argnums=(0, 1))


class Run:
  """A small training run."""

  def __init__(self, workers, compressor=COMPRESSOR):
    self.workers, self.compressor = workers, compressor
    tx = make_tx(workers, compressor)
    params = workers.device_put(jax.tree.map(jnp.asarray, PARAMS))
    self.tree = {
        'params': params,
        'opt_state': workers.device_put(tx.init(params)),
        'key': workers.device_put(jax.random.key(3)),
        'position': 0,
    }

  def train(self, steps):
    step = make_step(self.workers)
    for _ in range(steps):
      position = self.tree['position']
      x = np.random.default_rng(position).normal(size=(24, 12))
      x = x.astype(np.float32)
      if self.workers.mesh is not None:
        x = jax.device_put(
            x, NamedSharding(self.workers.mesh, P('replica')))
      key, used = jax.random.split(self.tree['key'])
      params, state = step(
          self.tree['params'], self.tree['opt_state'], used, x)
      self.tree = {'params': params, 'opt_state': state, 'key': key,
                   'position': position + 1}
    return self

  def fill(self):
    """As if it had been trained: random numbers everywhere."""
    rng = np.random.default_rng(5)

    def draw(x):
      if x.dtype == jnp.uint32:  # of the layout
        return x
      if x.dtype == jnp.int32:
        return jax.device_put(np.full(x.shape, 7, np.int32), x.sharding)
      return jax.device_put(
          rng.normal(size=x.shape).astype(x.dtype), x.sharding)

    self.tree |= {k: jax.tree.map(draw, self.tree[k])
                  for k in ('params', 'opt_state')}
    return self

  def open(self, folder, **options):
    return checkpoint.Checkpointer(
        folder, self.tree['params'], self.compressor, self.workers, **options)

  def save(self, folder):
    with self.open(folder) as checkpoints:
      checkpoints.save(self.tree['position'], self.tree)
    return self

  def restore(self, folder, **options):
    with self.open(folder) as checkpoints:
      step, self.tree = checkpoints.restore(self.tree, **options)
    assert step == self.tree['position']
    return self

  @property
  def momentum(self):
    return demo_optax.state.momentum(
        self.tree['opt_state'], self.tree['params'], self.compressor,
        self.workers)


  @property
  def by_leaf(self):
    """The tree, with the momentum's coefficients leaf by leaf.

    Buckets differ between layouts, in their padding and their digest.
    """
    own, opt_state = self.tree['opt_state']
    exchange = opt_state.inner_state[1]
    layout = state_lib.layout_of(
        self.tree['params'], self.compressor, self.workers)
    moments = state_lib.momentum_to_leaves(
        layout, self.workers, exchange.worker_stacked.momentum)
    assert len(moments) == len(PARAMS)
    return {
        **self.tree, 'opt_state': (own, exchange.count, exchange.metrics),
        'worker_stacked': {layout.leaves[i].name: x
                           for i, x in moments.items()}}


def assert_placed_alike(tree, other):
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other)):
    if isinstance(y, jax.Array):
      assert x.sharding.is_equivalent_to(y.sharding, y.ndim)
      assert x.dtype == y.dtype
      kinds = [getattr(z.sharding, 'mesh', None) for z in (x, y)]
      assert kinds[0] == kinds[1]


def bits(tree):
  """As plain arrays."""
  return jax.tree.map(
      lambda x: np.asarray(jax.random.key_data(x))
      if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else np.asarray(x), tree)


# The same layout --------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize('layout', LAYOUTS)
def test_resumed_is_uninterrupted_bit_for_bit(layout, tmp_path):
  run = Run(LAYOUTS[layout]()).train(3)
  with run.open(tmp_path) as checkpoints:
    checkpoints.save(3, run.tree)  # while the state is donated to step 4
    run.train(3)
  again = Run(LAYOUTS[layout]())
  fresh = again.tree
  again.restore(tmp_path)
  assert_placed_alike(again.tree, fresh)
  again.train(3)
  assert_same_bits(bits(again.tree), bits(run.tree))


def test_a_flax_model(tmp_path):
  """Dropout's streams, batch statistics and the optimizer, all of it."""
  nnx = pytest.importorskip('flax.nnx')

  class Model(nnx.Module):

    def __init__(self, rngs):
      self.first = nnx.Linear(12, 16, rngs=rngs)
      self.norm = nnx.BatchNorm(16, rngs=rngs)
      self.dropout = nnx.Dropout(0.3, rngs=rngs)
      self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
      return self.second(self.dropout(self.norm(jnp.tanh(self.first(x)))))

  workers = on_mesh(2)
  tx = demo_optax.demo(1e-2, workers=workers, compressor=COMPRESSOR)
  loss_fn = lambda model, x: jnp.mean((model(x) - 1.0) ** 2)

  @demo_optax.data_parallel(workers)
  def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_fn)(model, x))

  def make(seed):
    model = Model(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for module in (model, optimizer):
      nnx.update(module, workers.device_put(nnx.state(module)))
    params = nnx.state(model, nnx.Param)
    return model, optimizer, checkpoint.Checkpointer(
        tmp_path, params, COMPRESSOR, workers)

  def train(model, optimizer):
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    for _ in range(3):
      step(model, optimizer, x)

  def states(model, optimizer):
    return {'model': nnx.state(model), 'optimizer': nnx.state(optimizer)}

  model, optimizer, checkpoints = make(0)
  train(model, optimizer)
  with checkpoints:
    checkpoints.save(3, states(model, optimizer))
  train(model, optimizer)

  again, its_optimizer, checkpoints = make(1)
  with checkpoints:
    step_done, tree = checkpoints.restore(states(again, its_optimizer))
  assert step_done == 3
  nnx.update(again, tree['model'])
  nnx.update(its_optimizer, tree['optimizer'])
  train(again, its_optimizer)
  for a, b in ((model, again), (optimizer, its_optimizer)):
    assert_same_bits(bits(nnx.to_pure_dict(nnx.state(a))),
                     bits(nnx.to_pure_dict(nnx.state(b))))


def test_all_kinds_of_leaves(tmp_path):
  tree = {
      'bfloat16': jnp.array([1.5, -0.0, jnp.inf], jnp.bfloat16),
      'bool': jnp.array([True, False]),
      'empty': jnp.zeros((0, 3)),
      'scalar': jnp.float32(3.5),
      'numpy': np.arange(3),
      'numpy scalar': np.float64(0.1),
      'keys': jax.random.split(jax.random.key(1, impl='rbg'), 3),
      'legacy key': jax.random.PRNGKey(0),
      'integer': 2**40,
      'float': 0.1,
      'infinite': float('inf'),
      'true': True,
      'text': 'shard 7',
      'nested': [({'a/b': jnp.ones(2)},), None, ()],
  }
  workers = demo_optax.Workers.simulated(2)
  with checkpoint.Checkpointer(tmp_path, {}, None, workers) as checkpoints:
    checkpoints.save(0, tree)
    _, found = checkpoints.restore(tree)
    shapes = {**tree, 'keys': jax.eval_shape(lambda: tree['keys'])}
    _, from_shapes = checkpoints.restore(shapes)
  assert [type(x) for x in jax.tree.leaves(found)] == [
      type(x) for x in jax.tree.leaves(tree)]
  assert str(found['keys'].dtype) == str(tree['keys'].dtype)
  assert str(from_shapes['keys'].dtype) == str(tree['keys'].dtype)
  assert found['numpy scalar'].dtype == np.float64
  assert_same_bits(bits(found), bits(tree))
  assert np.signbit(np.asarray(found['bfloat16'], np.float32))[1]


def test_nothing_to_save(tmp_path):
  workers = demo_optax.Workers.simulated(1)
  with checkpoint.Checkpointer(tmp_path, {}, None, workers) as checkpoints:
    for tree in ({}, {'position': 3}, {'empty': np.zeros((0, 3))}):
      with pytest.raises(ValueError, match='no array in the tree'):
        checkpoints.save(1, tree)


def test_arrays_of_numpy_and_of_jax_are_the_same_to_it(tmp_path):
  workers = demo_optax.Workers.simulated(1)
  with checkpoint.Checkpointer(tmp_path, {}, None, workers) as checkpoints:
    checkpoints.save(0, {'a': np.ones(3, np.float32), 'b': jnp.ones(3)})
    _, tree = checkpoints.restore(
        {'a': jnp.zeros(3), 'b': np.zeros(3, np.float32)})
  assert isinstance(tree['a'], jax.Array) and isinstance(tree['b'], np.ndarray)
  assert_same_bits(tree, {'a': np.ones(3), 'b': np.ones(3)})


def test_a_state_on_the_host(tmp_path):
  run = Run(simulated(2)).fill().save(tmp_path)
  here = jax.tree.map(np.asarray, run.tree['opt_state'])
  with run.open(tmp_path) as checkpoints:
    _, found = checkpoints.restore({**run.tree, 'opt_state': here})
  for x in jax.tree.leaves(found['opt_state']):
    assert isinstance(x, np.ndarray)
  assert_same_bits(found['opt_state'], here)


def test_the_last_are_kept(tmp_path):
  workers = demo_optax.Workers.simulated(1)
  tree = {'x': jnp.zeros(3)}
  with checkpoint.Checkpointer(
      tmp_path, {}, None, workers, keep=3) as checkpoints:
    for step in range(5):
      checkpoints.save(10 * step, {'x': jnp.full(3, float(step))})
    assert checkpoints.steps == (20, 30, 40)
    assert checkpoints.restore(tree)[0] == 40
    step, found = checkpoints.restore(tree, step=20)
    assert step == 20 and float(found['x'][0]) == 2.0
  with checkpoint.Checkpointer(tmp_path, {}, None, workers) as checkpoints:
    assert checkpoints.steps == (20, 30, 40)
    checkpoints.save(50, tree)
    assert checkpoints.steps == (40, 50)


def test_anyones_own_orbax_code_works(tmp_path):
  """The state is a plain pytree: nothing of checkpoint is needed."""
  import orbax.checkpoint as ocp
  run = Run(on_mesh(2, 4)).train(2)
  state = {k: run.tree[k] for k in ('params', 'opt_state')}
  other = Run(on_mesh(2, 4))
  target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      {k: other.tree[k] for k in ('params', 'opt_state')})
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'own', state)
    checkpointer.wait_until_finished()
    found = checkpointer.restore(tmp_path / 'own', target)
  assert_same_bits(found, state)
  other.tree |= {**found, 'key': run.tree['key'], 'position': 2}
  assert_same_bits(bits(other.train(1).tree), bits(run.train(1).tree))


def test_what_is_written_is_an_orbax_checkpoint(tmp_path):
  from orbax.checkpoint import v1
  run = Run(simulated(2)).fill()
  run.tree['position'] = 1
  run.save(tmp_path)
  with warnings.catch_warnings(action='ignore'):  # without shardings
    found = v1.load(tmp_path / '1')
  assert_same_bits(found['params.up'], run.tree['params']['up'])
  about = v1.metadata(tmp_path / '1').custom_metadata
  assert about['workers'] == 2 and about['compressor'] == str(COMPRESSOR)
  assert about['versions']['jax'] == jax.__version__
  assert about['values'] == {'position': 1}
  moment = next(r for n, r in about['leaves'].items() if n.endswith('tum.up'))
  assert moment == {
      'shape': [12, 64], 'dtype': 'float32', 'workers': 2,
      'chunks': {'blocks': [1, 1], 'lengths': [6, 8], 'whole': False},
      'compressor': str(COMPRESSOR)}
  assert 'decay' not in str(about)


# Another layout ---------------------------------------------------------------


RESIZED = {
    'down': (lambda: on_mesh(4), lambda: on_mesh(2)),
    'up': (lambda: on_mesh(2, kind='explicit'),
           lambda: on_mesh(8, kind='explicit')),
    'uneven': (lambda: on_mesh(8), lambda: on_mesh(3)),
    'from one': (lambda: simulated(1), lambda: on_mesh(4)),
    'simulated to mesh': (lambda: simulated(4), lambda: on_mesh(8)),
    'mesh to simulated': (lambda: on_mesh(4), lambda: simulated(3)),
    'unsharded to sharded': (lambda: on_mesh(4), lambda: on_mesh(2, 4)),
    'sharded to unsharded': (
        lambda: on_mesh(2, 4, 'explicit'), lambda: simulated(6)),
    'another mesh': (lambda: on_mesh(2, 4), lambda: on_mesh(4, 2)),
}
SAME = {
    'simulated to mesh': (lambda: simulated(4), lambda: on_mesh(4)),
    'mesh to simulated': (
        lambda: on_mesh(2, 4, 'explicit'), lambda: simulated(2, 4)),
    'auto to explicit': (
        lambda: on_mesh(4), lambda: on_mesh(4, kind='explicit')),
    'unsharded to sharded': (lambda: simulated(2), lambda: on_mesh(2, 4)),
    'sharded to unsharded': (lambda: on_mesh(2, 2), lambda: on_mesh(2)),
}


@pytest.mark.parametrize('case', SAME)
def test_as_many_workers_elsewhere(case, tmp_path):
  """Nothing to ask for, and not a bit changes."""
  old, new = SAME[case]
  run, other = Run(old()).fill().save(tmp_path), Run(new())
  fresh = other.tree
  other.restore(tmp_path)
  assert_same_bits(bits(other.by_leaf), bits(run.by_leaf))
  assert_placed_alike(other.tree, fresh)


@pytest.mark.core
@pytest.mark.parametrize('case', RESIZED)
def test_another_number_of_workers(case, tmp_path):
  old, new = RESIZED[case]
  run, other = Run(old()).fill().save(tmp_path), Run(new())
  with pytest.raises(ValueError, match='Pass resize=True'):
    other.restore(tmp_path)
  fresh = other.tree
  other.restore(tmp_path, resize=True)
  assert_placed_alike(other.tree, fresh)
  assert_same_bits(other.tree['params'], run.tree['params'])
  count = other.workers.count
  here, found = bits(run.by_leaf), bits(other.by_leaf)
  expected = demo_optax.checkpoint.resize_workers(here, count)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(x, y, atol=1e-6)
  for name, x in here['worker_stacked'].items():
    y = found['worker_stacked'][name]
    np.testing.assert_allclose(x.mean(0), y.mean(0), atol=1e-6)
  if case in ('up', 'uneven', 'another mesh'):
    other.train(1)


@pytest.mark.parametrize('old, new, resize', [
    (lambda: Run(simulated(2)),
     lambda: Run(on_mesh(2), demo_optax.dct_topk(16, 5)), False),
    (lambda: Run(on_mesh(2), demo_optax.dct_topk(32, 2)),
     lambda: Run(on_mesh(2, 4, 'explicit')), False),
    (lambda: Run(on_mesh(2, 4), demo_optax.dct_topk(32, 2)),
     lambda: Run(on_mesh(8), demo_optax.dct_topk(12, 300)), True),
    (lambda: Run(on_mesh(4), demo_optax.dct_topk(64, 4)),
     lambda: Run(on_mesh(2, 4), demo_optax.dct_topk(64, 4)), True),
], ids=['chunks', 'chunks and shards', 'all', 'shards alone'])
def test_other_chunks(old, new, resize, tmp_path):
  run, other = old().fill().save(tmp_path), new()
  with pytest.raises(ValueError, match=r'Pass rechunk=Compressor\(.*Dct'):
    other.restore(tmp_path, resize=resize)
  other.restore(tmp_path, resize=resize, rechunk=run.compressor)
  for key in PARAMS:
    expected = demo_optax.checkpoint.resize_workers(
        {'worker_stacked': run.momentum[key]}, other.workers.count)
    np.testing.assert_allclose(
        np.asarray(other.momentum[key]),
        np.asarray(expected['worker_stacked']), atol=1e-5)


# Never in silence -------------------------------------------------------------


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp('mismatches')
  mismatches.saved(folder)
  return folder


@pytest.mark.parametrize(
    'case', mismatches.CASES, ids=[name for name, *_ in mismatches.CASES])
def test_every_mismatch_is_refused_and_in_the_docs(case, saved):
  name, make_tree, options = case
  text = mismatches.message(saved, make_tree, options)
  row = f'| {name} | {text} |'.replace('\n', '<br>')
  docs = mismatches.DOCS.read_text()
  assert row in docs, 'run python tests/mismatches.py'
  body = docs.split(mismatches.MARKS[0])[1].split(mismatches.MARKS[1])[0]
  assert body.count('\n|') == len(mismatches.CASES) + 2


def test_long_lists_are_cut(saved):
  text = mismatches.message(
      saved, lambda: mismatches.make(
          shapes={f'w{i}': (4, 4) for i in range(20)}), {})
  assert '... and 40 more leaves.' in text


def test_a_leaf_that_is_no_array(tmp_path):
  workers = demo_optax.Workers.simulated(1)
  with checkpoint.Checkpointer(tmp_path, {}, None, workers) as checkpoints:
    with pytest.raises(TypeError, match=r'^a.b is <object'):
      checkpoints.save(0, {'a': {'b': object()}})
    assert checkpoints.steps == ()


def test_nothing_is_overwritten(tmp_path):
  run = Run(simulated(1)).save(tmp_path)
  with run.open(tmp_path) as checkpoints, pytest.raises(
      ValueError, match='checkpoint of step 0 in .* already'):
    checkpoints.save(0, run.tree)


def test_of_another_origin(tmp_path):
  from orbax.checkpoint import v1
  with v1.training.Checkpointer(tmp_path) as theirs:
    theirs.save(4, {'x': jnp.zeros(3)})
  workers = demo_optax.Workers.simulated(1)
  with checkpoint.Checkpointer(
      tmp_path, {}, None, workers) as checkpoints, pytest.raises(
          ValueError, match='not written by demo_optax'):
    checkpoints.restore({'x': jnp.zeros(3)})


@pytest.mark.parametrize('options, error', [
    ({'keep': 0}, ValueError), ({'timeout': 0}, ValueError),
    ({'workers': 4}, TypeError),
    ({'compressor': 'dct'}, TypeError),
    ({'workers': demo_optax.Workers.on_axis('data')}, ValueError)])
def test_arguments(options, error, tmp_path):
  given = {'params': {}, 'compressor': COMPRESSOR, 'workers': simulated(2)}
  with pytest.raises(error):
    checkpoint.Checkpointer(tmp_path, **{**given, **options})


def test_the_docs_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  blocks = re.findall(r'```python\n(.*?)```', mismatches.DOCS.read_text(), re.S)
  assert len(blocks) == 4
  names = {}
  for block in blocks:
    exec(block, names)
  assert names['step'] == 100 and names['differences'] == []
  moment = names['state']['opt_state'].inner_state[1].worker_stacked.momentum
  assert {x.shape[0] for x in moment.values()} == {2}


def test_the_losses_are_as_measured():
  """At most 1 % above the uninterrupted run, 100 steps after the change."""
  results = mismatches.DOCS.parents[1] / 'benchmarks/results/elastic.json'
  records = json.loads(results.read_text())
  final = {(r['old'], r['new'], r['rule']): r['valid'][-1]
           for r in records if r['seed'] == 0}
  docs = mismatches.DOCS.read_text()
  for old, new in [(4, 2), (4, 8), (8, 3), (1, 4)]:
    step, expected = final[old, old, 'uninterrupted']
    other_step, found = final[old, new, 'regrouped']
    assert step == other_step == 300
    more = 100 * (found / expected - 1)
    assert more < 1
    assert f'| {old} to {new} | {expected:.3f} | {found:.3f} | {more:+.2f} % |' in docs


# Damaged files ----------------------------------------------------------------


def two_steps(folder):
  """Checkpoints of steps 1 and 2; a function that restores one."""
  x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
  tree = {'w': jnp.asarray(x), 'b': on_mesh(4).device_put(jnp.ones(5)),
          'position': 3}

  def open():
    return checkpoint.Checkpointer(folder, {}, None, simulated(1))

  with open() as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, tree)

  def restore(step=None):
    with open() as checkpoints:
      _, found = checkpoints.restore(tree, step)
    assert_same_bits(found, tree)

  return restore


def data_file(folder):
  """The file that holds the arrays' values."""
  files = [p for p in folder.rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def test_a_flipped_bit_is_not_restored(tmp_path):
  restore = two_steps(tmp_path)
  restore()
  file = data_file(tmp_path / '2')
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 16
  file.write_bytes(data)
  with pytest.raises(ValueError, match=(
      r'step 2 in .* is damaged: w is not what was saved; restore another one'
      r' by step= \(1\), or remove it')):
    restore()
  restore(1)


@pytest.mark.parametrize('how, says', [
    (lambda text: text.replace('float32', 'float33'), 'is damaged: its descr'),
    (lambda text: text.replace('"digests"', '"digest"'), 'is damaged: its desc'),
    (lambda text: text[:len(text) // 2], 'is missing or damaged: restore'),
    (lambda text: text.replace('"format": 1', '"format": 9'), 'has format 9'),
], ids=['changed', 'without digests', 'cut', 'another format'])
def test_a_damaged_description(how, says, tmp_path):
  restore = two_steps(tmp_path)
  file = tmp_path / '2/_CHECKPOINT_METADATA'
  file.write_text(how(file.read_text()))
  with pytest.raises(ValueError, match=says):
    restore()
  restore(1)


@pytest.fixture
def orbax_lets_go():
  """A read that fails in Orbax leaves coroutines: collected here, not later."""
  yield
  gc.collect()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_file_that_is_missing(tmp_path, orbax_lets_go):
  restore = two_steps(tmp_path)
  data_file(tmp_path / '2').unlink()
  with pytest.raises(ValueError, match='step 2 in .* cannot be read: .*shard'):
    restore()
  restore(1)


# A save that fails ------------------------------------------------------------


def test_a_save_that_fails_leaves_the_former_one(tmp_path, monkeypatch):
  """In the background, after the arrays were written; the disk is full."""
  from orbax.checkpoint._src.path import atomicity
  workers = demo_optax.Workers.simulated(1)
  trees = [{'x': jnp.full(3, float(i))} for i in range(4)]

  async def fail(*args, **kwargs):
    raise OSError('no space left on device')

  with checkpoint.Checkpointer(
      tmp_path, {}, None, workers, keep=1) as checkpoints:
    checkpoints.save(0, trees[0])
    checkpoints.wait()
    for _ in range(2):
      with monkeypatch.context() as patch:
        patch.setattr(atomicity.AtomicRenameTemporaryPath, 'finalize', fail)
        checkpoints.save(1, trees[1])
        with pytest.raises(OSError, match='no space'):
          checkpoints.wait()
      assert checkpoints.steps == (0,)
      step, found = checkpoints.restore(trees[1])
      assert step == 0 and float(found['x'][0]) == 0.0
    checkpoints.save(1, trees[2])  # and the next one is whole
    step, found = checkpoints.restore(trees[1])
    assert step == 1 and float(found['x'][0]) == 2.0
    assert checkpoints.steps == (1,)


def test_a_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError):
    checkpoint.Checkpointer(
        tmp_path / 'file' / 'folder', {}, None, demo_optax.Workers.simulated(1))


KILLED = """
import sys
import time
import jax.numpy as jnp
import demo_optax
from demo_optax import checkpoint

workers = demo_optax.Workers.simulated(1)
checkpoints = checkpoint.Checkpointer(sys.argv[1], {}, None, workers)
for step in range(1000):
  checkpoints.save(step, {'x': jnp.full((512, 512), float(step))})
  print(step, flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_ones(tmp_path):
  """Killed while it saves: what is listed can be read."""
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  with subprocess.Popen(
      [sys.executable, '-c', KILLED, str(tmp_path)], env=environment,
      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
    for _ in range(3):
      process.stdout.readline()
    process.send_signal(signal.SIGKILL)
  workers = demo_optax.Workers.simulated(1)
  tree = {'x': jnp.zeros((512, 512))}
  with checkpoint.Checkpointer(tmp_path, {}, None, workers) as checkpoints:
    assert checkpoints.steps and max(checkpoints.steps) >= 1
    for step in checkpoints.steps:
      _, found = checkpoints.restore(tree, step)
      np.testing.assert_array_equal(found['x'], np.full((512, 512), step))
    checkpoints.save(2000, tree)


@pytest.mark.parametrize('step, error', [
    (1.0, TypeError), (True, TypeError), (None, TypeError), (-1, ValueError)])
def test_steps_are_counted(step, error, tmp_path):
  with checkpoint.Checkpointer(
      tmp_path, PARAMS, COMPRESSOR, simulated(2)) as checkpoints:
    with pytest.raises(error, match=f'step={step}'):
      checkpoints.save(step, PARAMS)
    checkpoints.save(np.int64(5), PARAMS)
    assert checkpoints.steps == (5,)
    with pytest.raises(TypeError, match='rechunk'):
      checkpoints.restore(PARAMS, rechunk=str(COMPRESSOR))


def test_a_tree_of_compressors(tmp_path):
  """Each leaf's own: swapped they are refused, and rechunk takes the tree."""
  workers = demo_optax.Workers.simulated(2)
  dct = demo_optax.dct_topk(8, 4)
  raw = demo_optax.Compressor(
      dct.select, demo_optax.compressors.Identity(), 8)
  codes, swapped = {'a': dct, 'b': raw}, {'a': raw, 'b': dct}
  params = {'a': jnp.ones((16, 16)), 'b': jnp.ones((16, 16))}

  def make(codes):
    tx = demo_optax.scale_by_demo(codes, workers=workers)
    return tx, tx.init(params)

  tx, state = make(codes)
  gradients = {k: jnp.asarray(np.random.default_rng(0).normal(
      size=(2, 16, 16)), jnp.float32) for k in 'ab'}
  _, state = tx.update(gradients, state, params)
  with checkpoint.Checkpointer(tmp_path, params, codes, workers) as files:
    files.save(1, state)
    _, same = files.restore(make(codes)[1])
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(same)):
    np.testing.assert_array_equal(x, y)
  other = make(swapped)[1]
  with checkpoint.Checkpointer(tmp_path, params, swapped, workers) as files:
    with pytest.raises(ValueError, match=r'compressor of .*Dct.*Identity') as e:
      files.restore(other)
    assert 'the tree of the compressors' in str(e.value)
    _, moved = files.restore(other, rechunk=codes)
  before = demo_optax.state.momentum(state, params, codes, workers)
  after = demo_optax.state.momentum(moved, params, swapped, workers)
  for key, moment in before.items():
    np.testing.assert_allclose(moment, after[key], atol=1e-6)


def test_exchanges_of_a_part_of_the_parameters_each(tmp_path):
  """Two of them, with compressors of their own, and a leaf without any."""
  workers = demo_optax.Workers.simulated(2)
  params = {k: jnp.ones((16, 16)) for k in ('a', 'b', 'c', 'd')}
  codes = {'a': demo_optax.dct_topk(8, 4), 'b': demo_optax.dct_topk(16, 3),
           'c': demo_optax.dct_topk(8, 4), 'd': None}

  def make():
    one, other = (demo_optax.scale_by_demo(codes[k], workers=workers)
                  for k in ('a', 'b'))
    mean = demo_optax.average(workers=workers)
    tx = optax.partition(
        {'one': one, 'other': other, 'mean': mean},
        {'a': 'one', 'b': 'other', 'c': 'one', 'd': 'mean'})
    return tx, tx.init(params)

  tx, state = make()
  gradients = {k: jnp.asarray(np.random.default_rng(i).normal(
      size=(2, 16, 16)), jnp.float32) for i, k in enumerate(params)}
  _, state = tx.update(gradients, state, params)
  with checkpoint.Checkpointer(tmp_path, params, codes, workers) as files:
    files.save(1, state)
    _, same = files.restore(make()[1])
  assert_same_bits(same, state)
  assert_same_bits(*(tx.update(gradients, s, params) for s in (same, state)))


# The folder -------------------------------------------------------------------


def files_of(folder, **options):
  return checkpoint.Checkpointer(folder, {}, None, simulated(1), **options)


# What makes its folder useless, between two saves of a process by itself.
UNWRITABLE = '''
import pathlib, shutil, subprocess, sys
import jax.numpy as jnp
import demo_optax
from demo_optax import checkpoint

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
checkpoints = checkpoint.Checkpointer(
    folder, {}, None, demo_optax.Workers.simulated(1), timeout=20)
checkpoints.save(0, {'x': jnp.ones(3)})
checkpoints.wait()
if how == 'file':
  shutil.rmtree(folder)
  folder.write_text('')
else:
  subprocess.run(['mount', '-o', 'remount,ro', folder], check=True)
try:
  checkpoints.save(1, {'x': jnp.ones(3)})
  checkpoints.wait()
except OSError as error:
  print('failed:', error, flush=True)
'''


@pytest.mark.parametrize('how, says', [
    ('file', 'File exists'), ('read-only', 'Read-only file system')])
def test_a_save_that_cannot_begin_does_not_hang(how, says, tmp_path):
  """The error comes at once, and the process ends soon after it."""
  folder = tmp_path / 'folder'
  folder.mkdir()
  mounted = how == 'read-only' and subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'none', folder],
      capture_output=True).returncode == 0
  if how == 'read-only' and not mounted:
    pytest.skip('nothing can be mounted here')
  try:
    run = subprocess.run(
        [sys.executable, '-c', UNWRITABLE, str(folder), how],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=100)
  finally:
    if mounted:
      subprocess.run(['umount', '-l', folder], check=True)
  assert run.returncode == 0, run.stderr
  assert 'failed:' in run.stdout and says in run.stdout


def test_saves_go_on_where_they_can_again(tmp_path):
  tree = {'x': jnp.ones(3)}
  with files_of(tmp_path / 'a') as checkpoints:
    checkpoints.save(0, tree)
    checkpoints.wait()
    (tmp_path / 'a').rename(tmp_path / 'b')
    (tmp_path / 'a').write_text('')
    with pytest.raises(OSError, match='File exists'):
      checkpoints.save(1, tree)
    (tmp_path / 'a').unlink()
    (tmp_path / 'b').rename(tmp_path / 'a')
    checkpoints.save(1, tree)
    assert checkpoints.steps == (0, 1)
  assert sorted(os.listdir(tmp_path / 'a')) == ['0', '1']


@pytest.mark.parametrize('folder, error, says', [
    ('s3://bucket/x', ImportError, 's3://bucket/x cannot be .* install s3fs'),
    ('gs://bucket/x', ImportError, 'gs://bucket/x cannot be .* install gcsfs'),
    (pathlib.Path('s3://bucket/x'), ValueError, 'one slash is missing'),
    ('http://host/x', ValueError, "'http://host/x': only gs:// or s3://"),
    ('file:///tmp/x', ValueError, 'as a plain path'),
    ('', ValueError, "folder='' names no folder"),
    ('~nobody-of-that-name/x', ValueError, "write './~nobody-of-that-name/x'"),
    (b'x', TypeError, 'must be text or a path'), (None, TypeError, 'NoneType')])
def test_folders_that_cannot_be_meant(
    folder, error, says, tmp_path, monkeypatch):
  for name in ('s3fs', 'gcsfs', 'tensorflow'):
    monkeypatch.setitem(sys.modules, name, None)  # as if not installed
  monkeypatch.chdir(tmp_path)
  with pytest.raises(error, match=says):
    files_of(folder)
  assert os.listdir() == []


def test_a_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  (tmp_path / 'home').mkdir()
  monkeypatch.chdir(tmp_path)
  with files_of('~/runs') as checkpoints:
    checkpoints.save(3, {'x': jnp.ones(3)})
  with files_of('./runs'):  # relative ones are of the working directory
    pass
  assert sorted(os.listdir()) == ['home', 'runs']
  assert os.listdir('home/runs') == ['3'] and os.listdir('runs') == []


def test_addresses_in_a_cloud_reach_orbax_as_they_are(monkeypatch):
  """Where the back end is installed: here one that keeps files in memory."""
  fsspec = pytest.importorskip('fsspec')
  from etils.epath import backend
  memory = fsspec.filesystem('memory')
  monkeypatch.setattr(backend._FileSystemSpecBackend, 'fs', lambda *_: memory)
  with files_of('s3://bucket/runs') as checkpoints:
    assert str(checkpoints._files.directory) == 's3://bucket/runs'
    assert checkpoints.steps == ()
  assert memory.exists('s3://bucket/runs')
  assert not os.path.exists('s3:')


@pytest.mark.parametrize('options, error, says', [
    ({'keep': 1.5}, TypeError, 'keep=1.5 must be an integer'),
    ({'keep': '2'}, TypeError, "keep='2' must be an integer"),
    ({'keep': True}, TypeError, 'keep=True must be an integer'),
    ({'keep': 0}, ValueError, 'keep=0 must be at least 1'),
    ({'timeout': '9'}, TypeError, "timeout='9' must be an integer"),
    ({'timeout': 0.5}, TypeError, 'timeout=0.5 must be an integer')])
def test_counts_are_integers(options, error, says, tmp_path):
  with pytest.raises(error, match=says):
    files_of(tmp_path, **options)
  with files_of(tmp_path, keep=np.int64(2), timeout=np.int32(60)):
    pass


@pytest.mark.parametrize('step, error', [
    (True, TypeError), ('1', TypeError), (1.0, TypeError), (-1, ValueError)])
def test_the_step_to_restore_is_an_integer(step, error, tmp_path):
  tree = {'x': jnp.ones(3)}
  with files_of(tmp_path) as checkpoints:
    checkpoints.save(1, tree)
    with pytest.raises(error, match=f'step={step!r}'):
      checkpoints.restore(tree, step)
    assert checkpoints.restore(tree, np.int64(1))[0] == 1


@pytest.mark.parametrize('tree, leaf', [
    ({'a': {'text': '\ud800'}, 'x': 1}, 'a.text'),
    ({'a': {'\udfff': 1}, 'x': 1}, r'a.\udfff')])
def test_text_that_is_not_unicode(tree, leaf, tmp_path):
  with files_of(tmp_path) as checkpoints:
    with pytest.raises(ValueError, match=f"^'{re.escape(leaf)}'.*surrogate"):
      checkpoints.save(1, {**tree, 'x': jnp.ones(3)})
    assert checkpoints.steps == ()


# What is left in it -----------------------------------------------------------


def unfinished(folder):
  return sorted(p.name for p in folder.iterdir() if not p.name.isdigit())


def test_a_failed_save_leaves_no_files(tmp_path, monkeypatch):
  from orbax.checkpoint._src.path import atomicity
  tree = {'x': jnp.ones(3)}

  async def fail(*args, **kwargs):
    raise OSError('no space left on device')

  with files_of(tmp_path) as checkpoints:
    checkpoints.save(0, tree)
    checkpoints.wait()
    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, 'finalize', fail)
    checkpoints.save(1, tree)
    with pytest.raises(OSError, match='no space'):
      checkpoints.wait()
    assert unfinished(tmp_path) == []
    # A thread of the failed save may write after that.
    (tmp_path / '1.orbax-checkpoint-tmp/state').mkdir(parents=True)
    monkeypatch.undo()
    checkpoints.save(2, tree)
    assert checkpoints.steps == (0, 2)
  assert unfinished(tmp_path) == []


def test_threads_of_a_failed_save_may_go_on_writing(tmp_path, monkeypatch):
  path = tmp_path / '1.orbax-checkpoint-tmp'
  slept = []

  def write(seconds):
    slept.append(seconds)
    if len(slept) <= 3:
      (path / 'state').mkdir(parents=True)

  path.mkdir()
  monkeypatch.setattr(folder.time, 'sleep', write)
  folder.remove_unfinished_step(tmp_path, 1)
  assert unfinished(tmp_path) == []
  assert len(slept) == 4 and sum(slept) < 1


def leave(folder, step, age):
  """What a process that was killed in a save has left."""
  left = folder / f'{step}.orbax-checkpoint-tmp' / 'state'
  left.mkdir(parents=True)
  (left / 'd').write_bytes(bytes(1000))
  for path in (left / 'd', left, left.parent):
    os.utime(path, (time.time() - age,) * 2)


def test_a_killed_save_is_removed_by_who_writes_next(tmp_path):
  leave(tmp_path, 5, age=100)
  leave(tmp_path, 6, age=10_000)
  (tmp_path / 'mine.orbax-checkpoint-tmp').mkdir()  # of something else
  with files_of(tmp_path):  # a reader: what no writer can be writing any more
    assert unfinished(tmp_path) == [
        '5.orbax-checkpoint-tmp', 'mine.orbax-checkpoint-tmp']
  with files_of(tmp_path) as checkpoints:
    checkpoints.save(7, {'x': jnp.ones(3)})
  assert unfinished(tmp_path) == ['mine.orbax-checkpoint-tmp']


WRITER = '''
import sys
import time
import jax.numpy as jnp
import demo_optax
from demo_optax import checkpoint

checkpoints = checkpoint.Checkpointer(
    sys.argv[1], {}, None, demo_optax.Workers.simulated(1))
checkpoints.save(0, {'x': jnp.ones(3)})
checkpoints.wait()
print('saved', flush=True)
sys.stdin.read()
'''


def test_what_another_process_writes_is_left_alone(tmp_path):
  with subprocess.Popen(
      [sys.executable, '-c', WRITER, str(tmp_path)],
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
      stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
    assert writer.stdout.readline() == b'saved\n'
    leave(tmp_path, 5, age=10_000)  # it may take that long
    with files_of(tmp_path) as checkpoints:
      checkpoints.save(7, {'x': jnp.ones(3)})
    assert unfinished(tmp_path) == ['5.orbax-checkpoint-tmp']
    writer.kill()
  with files_of(tmp_path):
    assert unfinished(tmp_path) == []


def test_an_empty_folder_is_no_checkpoint(tmp_path):
  tree = {'x': jnp.ones(3)}
  with files_of(tmp_path) as checkpoints:
    checkpoints.save(1, tree)
    checkpoints.save(2, tree)
  for name in ('5', '9'):
    (tmp_path / name).mkdir()
  with files_of(tmp_path) as checkpoints:
    assert checkpoints.steps == (1, 2)
    assert checkpoints.restore(tree)[0] == 2
    with pytest.raises(FileNotFoundError, match=r'step 9 in .*\(steps: 1, 2\)'):
      checkpoints.restore(tree, 9)
    checkpoints.save(5, tree)  # two are kept, of those that are whole
    assert checkpoints.steps == (2, 5)
  assert sorted(os.listdir(tmp_path)) == ['2', '5']


def test_a_reader_beside_a_writer(tmp_path, monkeypatch):
  """What it saw is renamed or removed before it looks at it."""
  from orbax.checkpoint import v1
  tree = {'x': jnp.ones(3)}
  with files_of(tmp_path, keep=1) as writer:
    writer.save(1, tree)
    writer.wait()
    vanish = iter([FileNotFoundError, NotADirectoryError])
    opened = v1.training.Checkpointer.__init__

    def open_(self, *args, **kwargs):
      opened(self, *args, **kwargs)
      if error := next(vanish, None):
        raise error(str(tmp_path / '1.orbax-checkpoint-tmp'))

    with monkeypatch.context() as patch:
      patch.setattr(v1.training.Checkpointer, '__init__', open_)
      reader = files_of(tmp_path)
    with reader:
      assert reader.steps == (1,)
      writer.save(2, {'x': jnp.zeros(3)})  # and the first is removed
      writer.wait()
      step, found = reader.restore(tree)
      assert step == 2 and float(found['x'][0]) == 0.0
      writer.save(3, tree)
      writer.wait()
      with pytest.raises(ValueError, match='step 2 in .* cannot be read'):
        reader.restore(tree, 2)
