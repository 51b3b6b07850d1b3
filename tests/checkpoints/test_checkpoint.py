"""Checkpoints: bit for bit, for other layouts, and never in silence."""

import copy
import functools
import gc
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import mismatches
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization
from flax.training.train_state import TrainState
from helpers import COMPILATIONS, assert_same_bits, mesh_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint
from demo_optax import compressors as codes
from demo_optax.checkpoint.regroup import regroup

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
  mesh = mesh_of({'replica': count, 'fsdp': blocks}, kind)
  return demo_optax.Workers.on_mesh(
    mesh, 'replica', SPECS if blocks > 1 else None
  )


def make_tx(workers, compressor):
  """DeMo behind links of each worker's own: floats, and a count."""
  own = optax.chain(
    optax.trace(0.5), optax.scale_by_schedule(lambda count: 1.0)
  )
  return optax.chain(
    demo_optax.per_worker(own, workers=workers),
    demo_optax.demo(1e-2, workers=workers, compressor=compressor, decay=0.9),
  )


@functools.cache
def make_step(workers):
  explicit = workers.is_explicit
  out = P() if explicit else None
  tx = make_tx(workers, COMPRESSOR)

  def loss_fn(params, x):
    y = jnp.einsum(
      'bi,io->bo', x @ params['up'], params['down'], out_sharding=out
    )
    return jnp.mean((y + params['bias'][None] - 1.0) ** 2)

  @demo_optax.data_parallel(workers, batch_argnums=3, donate_argnums=(0, 1))
  def step(params, state, key, x):
    gradients = jax.grad(loss_fn)(params, x + jax.random.uniform(key))
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return step


class Run:
  """A small training run."""

  def __init__(self, workers, compressor=COMPRESSOR):
    self.workers = workers
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
      key, used = jax.random.split(self.tree['key'])
      params, state = step(self.tree['params'], self.tree['opt_state'], used, x)
      self.tree = {
        'params': params,
        'opt_state': state,
        'key': key,
        'position': position + 1,
      }
    return self

  def fill(self):
    """As if it had been trained: random numbers everywhere."""
    self.tree |= {k: fill(self.tree[k]) for k in ('params', 'opt_state')}
    return self

  def save(self, folder):
    with checkpoint.Checkpointer(folder, self.tree) as checkpoints:
      checkpoints.save(self.tree['position'], self.tree)
    return self

  def restore(self, folder, **options):
    with checkpoint.Checkpointer(folder, self.tree) as checkpoints:
      step, self.tree = checkpoints.restore(**options)
    assert step == self.tree['position']
    return self


def fill(tree):
  rng = np.random.default_rng(5)

  def draw(x):
    if x.dtype == jnp.uint32:  # of the layout
      return x
    if x.dtype == jnp.int32:
      return jax.device_put(np.full(x.shape, 7, np.int32), x.sharding)
    return jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)

  return jax.tree.map(draw, tree)


def leaves_of(tree):
  """Leaf by leaf: buckets differ between layouts, and descriptions do."""
  return {
    name: x
    for name, x in checkpoint.to_leaves(tree).items()
    if 'layout.' not in name
  }


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
    lambda x: (
      np.asarray(jax.random.key_data(x))
      if isinstance(x, jax.Array)
      and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else np.asarray(x)
    ),
    tree,
  )


# The same layout --------------------------------------------------------------


@pytest.mark.core
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path):
  """With all that is in a tree; `test_maps.py` has states on other meshes."""
  layout = 2, 4, 'explicit'
  run = Run(on_mesh(*layout)).train(3)
  with checkpoint.Checkpointer(tmp_path, run.tree) as checkpoints:
    checkpoints.save(3, run.tree)  # while the state is donated to step 4
    run.train(3)
  again = Run(on_mesh(*layout))
  fresh = again.tree
  again.restore(tmp_path)
  assert_placed_alike(again.tree, fresh)
  again.train(3)
  assert_same_bits(bits(again.tree), bits(run.tree))


def test_only_the_first_save_compiles():
  tree = Run(demo_optax.Workers.simulated(4)).tree
  for _ in range(2):
    before = COMPILATIONS.count
    checkpoint.to_leaves(tree)
    demo_optax.state.momentum(tree['opt_state'])
  assert COMPILATIONS.count == before


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

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_fn)(model, x))

  def make(seed):
    model = Model(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for module in (model, optimizer):
      nnx.update(module, workers.device_put(nnx.state(module)))
    return {'model': model, 'optimizer': optimizer}

  def train(model, optimizer):
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    for _ in range(3):
      step(model, optimizer, x)

  run, again = make(0), make(1)
  train(**run)
  with checkpoint.Checkpointer(tmp_path, run) as checkpoints:
    checkpoints.save(3, run)
  with pytest.raises(ValueError, match='state that has its types'):
    checkpoint.to_leaves(nnx.state(run['optimizer']))
  train(**run)
  with checkpoint.Checkpointer(tmp_path, again) as checkpoints:
    step_done, tree = checkpoints.restore()
  assert step_done == 3
  for name, module in again.items():
    nnx.update(module, nnx.state(tree[name]))
  train(**again)
  for name, module in again.items():
    assert_same_bits(
      bits(nnx.to_pure_dict(nnx.state(module))),
      bits(nnx.to_pure_dict(nnx.state(run[name]))),
    )


def test_all_kinds_of_leaves(tmp_path):
  tree = {
    'bfloat16': jnp.array([1.5, -0.0, jnp.inf], jnp.bfloat16),
    'bool': jnp.array([True, False]),
    'scalar': jnp.float32(3.5),
    'numpy': np.arange(3),
    'keys': jax.random.split(jax.random.key(1, impl='rbg'), 3),
    'key': jax.random.key(0),
    'integer': 2**40,
    'float': 0.1,
    'infinite': float('inf'),
    'true': True,
    'nested': [({'a/b': jnp.ones(2)},), None, ()],
  }
  with checkpoint.Checkpointer(tmp_path, tree) as checkpoints:
    checkpoints.save(0, tree)
    _, found = checkpoints.restore()
  assert [type(x) for x in jax.tree.leaves(found)] == [
    type(x) for x in jax.tree.leaves(tree)
  ]
  assert str(found['keys'].dtype) == str(tree['keys'].dtype)
  assert_same_bits(bits(found), bits(tree))
  assert np.signbit(np.asarray(found['bfloat16'], np.float32))[1]
  with pytest.raises(ValueError, match=r'one leaf called a\.b, got two'):
    checkpoint.to_leaves({'a.b': 1, 'a': {'b': 2}})
  for value in (object(), b'text', 'text', np.array(['text'])):
    with pytest.raises(TypeError, match='text must be an array of numbers'):
      checkpoint.Checkpointer(tmp_path, {**tree, 'text': value})


def make_train_state(tx):
  net = nn.Dense(2)
  params = net.init(jax.random.key(0), jnp.ones((1, 8)))['params']
  return TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def test_a_train_state_of_linen(tmp_path):
  """Its step is a Python number before the first step, and an array after."""
  workers = simulated(2)
  tx = demo_optax.demo(0.1, workers=workers, compressor=COMPRESSOR, decay=0.9)
  batch = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    loss_fn = lambda p: jnp.mean(state.apply_fn({'params': p}, x) ** 2)
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

  fresh = make_train_state(tx)
  first = step(fresh, batch)
  with checkpoint.Checkpointer(tmp_path, fresh) as checkpoints:
    checkpoints.save(0, fresh)
    checkpoints.save(1, first)
    _, resumed = checkpoints.restore()
    assert int(resumed.step) == 1
  with checkpoint.Checkpointer(tmp_path, first) as checkpoints:
    _, again = checkpoints.restore(0)
  assert again.step.dtype == jnp.int32
  second = step(resumed, batch)
  compiled = COMPILATIONS.count
  step(second, batch)
  assert COMPILATIONS.count == compiled
  assert_same_bits(second, step(first, batch))
  assert_same_bits(step(again, batch), first)


def restored_by_flax(state, fresh):
  return serialization.from_bytes(fresh, serialization.to_bytes(state))


@pytest.mark.parametrize(
  'copy_of',
  [
    restored_by_flax,
    lambda state, _: pickle.loads(pickle.dumps(state)),
    lambda state, _: copy.deepcopy(state),
  ],
)
@pytest.mark.parametrize('make', [demo_optax.demo, demo_optax.demo_muon])
def test_copies_by_other_libraries(make, copy_of):
  tx = make(0.1, workers=simulated(3))
  params = {'norm': np.ones(12, np.float32), **PARAMS}
  fresh = tx.init(params)
  state = fill(fresh)
  found = copy_of(state, fresh)
  assert_same_bits(bits(found), bits(state))
  demo_optax.state.momentum(found)  # its digest is that of its layout


def test_flax_does_not_restore_another_layout():
  tx, other = (
    demo_optax.demo(0.1, workers=simulated(2), compressor=compressor)
    for compressor in (COMPRESSOR, demo_optax.dct_topk(chunk_size=4, topk=1))
  )
  state = tx.init(PARAMS)
  for fresh in (other.init(PARAMS), tx.init({**PARAMS, 'more': jnp.ones(3)})):
    with pytest.raises(ValueError, match='saved for the same leaves'):
      restored_by_flax(state, fresh)
    with pytest.raises(ValueError, match='metadata') as caught:
      jax.tree.map(jnp.add, state, fresh)
    assert len(str(caught.value)) < 1000


NUMBERS = [  # of one kind: the tree to restore has the dtype
  (3, jnp.int32(3)),
  (0.5, jnp.float32(0.5)),
  (0.5, jnp.bfloat16(0.5)),
  (True, jnp.bool_(True)),
  (np.int64(3), jnp.int32(3)),
]
UNLIKE = [
  (3.0, jnp.int32(3)),
  (True, jnp.int32(1)),
  (1, jnp.bool_(True)),
  (1, jnp.float32(1)),
  (1, jnp.ones(1, jnp.int32)),
  (1, True),
  (1, 1.0),
]


def restored(saved, like):
  return checkpoint.from_leaves(checkpoint.to_leaves({'x': saved}), {'x': like})


@pytest.mark.parametrize('number, array', NUMBERS)
def test_numbers_are_scalar_arrays(number, array):
  for saved, like in ((number, array), (array, number)):
    found = restored(saved, like)['x']
    if isinstance(like, int | float):
      assert type(found) is type(like)
    assert found == like
    assert getattr(found, 'dtype', None) == getattr(like, 'dtype', None)


def test_an_integer_that_does_not_fit():
  with pytest.raises(OverflowError, match='out of bounds for int32'):
    restored(2**40, jnp.int32(0))


def test_a_scalar_is_not_rounded():
  """As other arrays, which are refused; without a loss it takes the dtype."""
  rounded = jnp.bfloat16(0.1)
  assert restored(rounded, jnp.float32(0))['x'] == jnp.float32(rounded)
  assert jnp.isnan(restored(jnp.float32(jnp.nan), rounded)['x'])
  with pytest.raises(ValueError, match='x must be exact in bfloat16, got 0.1'):
    restored(jnp.float32(0.1), rounded)


@pytest.mark.parametrize('one, other', UNLIKE)
def test_numbers_of_another_kind_are_refused(one, other):
  for saved, like in ((one, other), (other, one)):
    with pytest.raises(ValueError, match='x: .* in the checkpoint, .* here'):
      restored(saved, like)


@pytest.mark.parametrize('before', [(), (optax.trace(0.9),)])
def test_momentum_that_claims_to_be_replicated_is_not_saved(before, tmp_path):
  """Types do not show it in a `shard_map` with `check_vma=False`."""
  mesh = mesh_of({'data': 4})
  workers = demo_optax.Workers.on_axis('data')
  links = [demo_optax.per_worker(tx, workers=workers) for tx in before]
  tx = optax.chain(*links, demo_optax.demo(0.1, workers=workers))
  batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  params = {'w': jnp.ones((8, 4))}

  def one_step(params, x):
    grads = jax.grad(lambda p: jnp.mean((x @ p['w']) ** 2))(params)
    return tx.update(grads, tx.init(params), params)[1]

  def state_by(specs):
    step = jax.shard_map(
      one_step,
      mesh=mesh,
      in_specs=(P(), P('data')),
      out_specs=specs,
      check_vma=False,
    )
    return jax.jit(step)(params, batch)

  wrong = state_by(P())
  name = r'worker_stacked\.\S+ must be sharded over the workers'
  with pytest.raises(ValueError, match=f'{name}.*state_specs'):
    checkpoint.to_leaves(wrong)
  checkpoint.to_leaves(jax.eval_shape(lambda: wrong))  # shapes have no copies
  with checkpoint.Checkpointer(tmp_path, wrong) as checkpoints:
    with pytest.raises(ValueError, match=name):
      checkpoints.save(1, wrong)
    assert not checkpoints.steps
  right = state_by(demo_optax.state_specs(tx, params, workers))
  saved = {k: x.shape for k, x in checkpoint.to_leaves(right).items()}
  momentum = f'{len(before)}.inner_state.1.worker_stacked.momentum.w'
  assert saved[momentum] == (4, 1, 1, 32)
  alone = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), wrong)
  assert checkpoint.to_leaves(alone)[momentum].shape == (1, 1, 1, 32)


def test_states_on_the_host_and_shapes(tmp_path):
  """NumPy's stay NumPy's; shapes alone go to the default device."""
  run = Run(simulated(2)).fill().save(tmp_path)
  here = jax.tree.map(np.asarray, run.tree['opt_state'])
  shapes = jax.eval_shape(
    lambda: {k: run.tree[k] for k in ('params', 'opt_state', 'key')}
  )
  for like, kind in (
    ({**run.tree, 'opt_state': here}, np.ndarray),
    ({**shapes, 'position': 0}, jax.Array),
  ):
    with checkpoint.Checkpointer(tmp_path, like) as checkpoints:
      _, found = checkpoints.restore()
    for x in jax.tree.leaves(found['opt_state']):
      assert isinstance(x, kind)
    assert_same_bits(bits(found), bits(run.tree))


# Another layout ---------------------------------------------------------------


def means(state):
  """The mean of the workers' momentum in parameter space."""
  return {
    name: np.mean(x, axis=0)
    for name, x in demo_optax.state.momentum(state).items()
  }


SAME = {
  'simulated to mesh': (lambda: simulated(4), lambda: on_mesh(4)),
  'mesh to simulated': (
    lambda: on_mesh(2, 4, 'explicit'),
    lambda: simulated(2, 4),
  ),
  'auto to explicit': (lambda: on_mesh(4), lambda: on_mesh(4, kind='explicit')),
  'sharded to unsharded': (lambda: on_mesh(2, 2), lambda: on_mesh(2)),
}
RESIZED = {
  'up': (
    lambda: on_mesh(2, kind='explicit'),
    lambda: on_mesh(8, kind='explicit'),
  ),
  'uneven': (lambda: on_mesh(8), lambda: on_mesh(3)),
  'sharded to unsharded': (
    lambda: on_mesh(2, 4, 'explicit'),
    lambda: simulated(6),
  ),
  'another mesh': (lambda: on_mesh(2, 4), lambda: on_mesh(4, 2)),
}


@pytest.mark.parametrize('case', SAME)
def test_as_many_workers_elsewhere(case, tmp_path):
  """Nothing to ask for, and not a bit changes."""
  old, new = SAME[case]
  run, other = Run(old()).fill().save(tmp_path), Run(new())
  fresh = other.tree
  other.restore(tmp_path)
  assert_same_bits(bits(leaves_of(other.tree)), bits(leaves_of(run.tree)))
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
  count = other.workers.count
  for name, x in bits(leaves_of(run.tree)).items():
    x = regroup(x, count) if 'worker_stacked' in name else x
    np.testing.assert_allclose(
      bits(leaves_of(other.tree)[name]), x, atol=1e-6, err_msg=name
    )
  if case == 'another mesh':
    other.train(1)


AXES = {'fsdp': 2, 'tp': 2}
KINDS = [
  None,
  P('fsdp'),
  P('tp', 'fsdp'),
  P(('tp', 'fsdp')),
  P(None, ('fsdp', 'tp')),
]
BASES = [codes.Dct(), codes.RandomOrthogonal(), codes.Identity()]


@settings(max_examples=3, phases=[Phase.generate])
@given(st.data())
def test_any_layout_to_any_other(data):
  """Same chunks, same bits; others keep each worker, or the mean, to rounding."""
  draw = data.draw
  shapes = {
    name: tuple(
      4 * draw(st.integers(1, 9)) for _ in range(draw(st.integers(0, 3)))
    )
    for name in 'ab'
  }
  params = {name: jnp.zeros(shape) for name, shape in shapes.items()}

  def state(exchange):
    specs = {
      name: draw(st.sampled_from(KINDS)) if len(shape) > 1 else None
      for name, shape in shapes.items()
    }
    sizes = draw(st.sampled_from([{}, AXES, {'tp': 2, 'fsdp': 2}]))
    workers = demo_optax.Workers.simulated(
      draw(st.integers(1, 5)), specs if sizes else None, sizes
    )
    compressor = codes.Compressor(
      codes.TopK(2), draw(st.sampled_from(BASES)), 2 ** draw(st.integers(1, 3))
    )
    tx = demo_optax.scale_by_demo(compressor, workers=workers, **exchange)
    return tx.init(params)

  exchange = draw(st.sampled_from([{}, mismatches.OWNERS]))
  old, new = fill(state(exchange)), state(exchange)
  saved = checkpoint.to_leaves(old)
  assert_same_bits(
    leaves_of(checkpoint.from_leaves(saved, old)), leaves_of(old)
  )
  found = checkpoint.from_leaves(saved, new, resize=True, rechunk=True)
  for name, x in means(old).items():
    np.testing.assert_allclose(x, means(found)[name], atol=2e-5)
  assert jax.tree.structure(found) == jax.tree.structure(new)
  assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, new)
  # What owners keep is bound to its layout: there is all of it, or nothing.
  owed = old.worker_stacked.update_residual
  assert bool(owed) == (bool(exchange) and any(map(np.prod, shapes.values())))
  is_kept = np.array_equal(old.layout.digest, new.layout.digest)
  for name, x in found.worker_stacked.update_residual.items():
    is_kept &= name in owed and owed[name].shape == x.shape
    np.testing.assert_array_equal(x, owed[name] if is_kept else 0)


def test_exchanges_of_a_part_of_the_parameters_each():
  """Two of them, with compressors of their own, and a leaf without any."""
  workers = demo_optax.Workers.simulated(2)
  params = {k: jnp.ones((16, 16)) for k in ('a', 'b', 'c', 'd')}
  one, other = (
    demo_optax.scale_by_demo(code, workers=workers)
    for code in (demo_optax.dct_topk(8, 4), demo_optax.dct_topk(16, 3))
  )
  tx = optax.partition(
    {
      'one': one,
      'other': other,
      'mean': demo_optax.average_gradients(workers=workers),
    },
    {'a': 'one', 'b': 'other', 'c': 'one', 'd': 'mean'},
  )
  state = fill(tx.init(params))
  found = checkpoint.from_leaves(
    checkpoint.to_leaves(state), jax.eval_shape(tx.init, params)
  )
  assert_same_bits(found, state)
  assert demo_optax.state.momentum(state).keys() == set('abc')


# Never in silence -------------------------------------------------------------


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp('mismatches')
  mismatches.saved(folder)
  return folder


@pytest.mark.parametrize(
  'case', mismatches.CASES, ids=[name for name, *_ in mismatches.CASES]
)
def test_every_mismatch_is_refused_as_recorded(case, saved):
  name, make_tree, options = case
  text = mismatches.message(saved, make_tree, options)
  records = mismatches.FILE.read_text()
  assert records.count('# ') == len(mismatches.CASES)
  found = mismatches.record(name, text)
  assert found in records, 'run python tests/mismatches.py'


# The folder -------------------------------------------------------------------


TREE = {
  'w': jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32),
  'b': jnp.ones(5),
  'position': 3,
}


def files_of(folder, **options):
  return checkpoint.Checkpointer(folder, TREE, **options)


async def fails(*args, **kwargs):
  raise OSError('no space left on device')


def test_the_last_are_kept(tmp_path):
  with files_of(tmp_path / 'a/b', keep=3) as checkpoints:
    assert checkpoints.steps == ()
    with pytest.raises(FileNotFoundError, match='got None'):
      checkpoints.restore()
    for step in range(0, 50, 10):
      checkpoints.save(np.int64(step), {**TREE, 'position': step})
    assert checkpoints.steps == (20, 30, 40)
    assert checkpoints.restore()[0] == 40
    step, found = checkpoints.restore(20)
    assert (step, found['position']) == (20, 20)
  with files_of(tmp_path / 'a/b') as checkpoints:
    checkpoints.save(50, TREE)
    assert checkpoints.steps == (40, 50)


@pytest.mark.parametrize(
  'call, error',
  [
    (lambda f: files_of(f, keep=0), ValueError),
    (lambda f: files_of(f, keep=1.5), TypeError),
    (lambda f: files_of(f).save(-1, TREE), ValueError),
    (lambda f: files_of(f).restore('1'), FileNotFoundError),
  ],
)
def test_counts_are_integers(call, error, tmp_path):
  with pytest.raises(error, match='must be'):
    call(tmp_path)


WRITER = """
import sys
import jax.numpy as jnp
from demo_optax import checkpoint

tree = lambda step: {'x': jnp.full((512, 512), float(step))}
checkpoints = checkpoint.Checkpointer(sys.argv[1], tree(0))
for step in range(1, int(sys.argv[2])):
  checkpoints.save(step, tree(step))
  print(step, flush=True)
checkpoints.wait()
print('saved', flush=True)
sys.stdin.read()
"""


def writer(folder, steps):
  """Another job, which saves so many steps."""
  return subprocess.Popen(
    [sys.executable, '-c', WRITER, str(folder), str(steps)],
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  )


def test_a_step_is_saved_once(tmp_path):
  """Also by another Checkpointer, whose files stay as they are."""
  with files_of(tmp_path) as checkpoints:
    checkpoints.save(1, TREE)
  with files_of(tmp_path) as others:
    with pytest.raises(FileExistsError, match='Step 1 already exists'):
      others.save(1, {**TREE, 'position': 4})
    assert_same_bits(others.restore()[1], TREE)


@pytest.mark.parametrize(
  'tree, line',
  [
    ({**TREE, 'b': jnp.ones(6)}, r'b: float32\[6\] in .*, float32\[5\] here'),
    ({**TREE, 'new': 1}, 'new: one int in .*, nothing here'),
    ({'b': TREE['b'], 'w': TREE['w']}, 'position: nothing in .*, one int'),
  ],
)
def test_another_tree_is_not_saved(tree, line, tmp_path):
  with files_of(tmp_path) as checkpoints:
    checkpoints.save(1, TREE)
    with pytest.raises(ValueError, match=f'{line}.*\n.*for this one'):
      checkpoints.save(2, tree)
    assert checkpoints.steps == (1,)


def test_a_state_of_another_exchange_is_not_saved(tmp_path):
  """Other chunks and workers, which a restore could convert."""
  other = mismatches.make(mismatches.TWO, mismatches.LARGE)
  checkpoints = checkpoint.Checkpointer(tmp_path, mismatches.make())
  with pytest.raises(ValueError, match='for this one') as caught:
    checkpoints.save(1, other)
  assert 'resize' not in str(caught.value)
  with checkpoint.Checkpointer(tmp_path, other) as checkpoints:
    checkpoints.save(1, other)


def test_a_save_that_fails_leaves_the_former_one(tmp_path, monkeypatch):
  """In the background, after the arrays were written; the disk is full."""
  from orbax.checkpoint._src.path import atomicity

  with files_of(tmp_path, keep=1) as checkpoints:
    checkpoints.save(0, TREE)
    checkpoints.wait()
    for _ in range(2):
      with monkeypatch.context() as patch:
        patch.setattr(atomicity.AtomicRenameTemporaryPath, 'finalize', fails)
        checkpoints.save(1, TREE)
        with pytest.raises(OSError, match='no space'):
          checkpoints.wait()
      assert checkpoints.steps == (0,)
      assert_same_bits(checkpoints.restore()[1], TREE)
    checkpoints.save(1, TREE)  # and the next one is whole
    assert checkpoints.steps == (1,)
  assert os.listdir(tmp_path) == ['1']


def test_a_process_that_is_killed_leaves_whole_ones(tmp_path):
  """Killed while it saves: what is listed can be read."""
  with writer(tmp_path, 1000) as process:
    for _ in range(3):
      process.stdout.readline()
    process.send_signal(signal.SIGKILL)
  tree = {'x': jnp.zeros((512, 512))}
  with checkpoint.Checkpointer(tmp_path, tree) as checkpoints:
    assert checkpoints.steps and max(checkpoints.steps) >= 1
    for step in checkpoints.steps:
      _, found = checkpoints.restore(step)
      np.testing.assert_array_equal(found['x'], np.full((512, 512), step))
    checkpoints.save(2000, tree)
  assert all(name.isdecimal() for name in os.listdir(tmp_path))


# Damaged files ----------------------------------------------------------------


def flip(share):
  def flip_bit(path, data):
    place = int(share * len(data))
    path.write_bytes(
      data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
    )

  return flip_bit


def shortened(parts):
  return lambda path, data: path.write_bytes(data[: len(data) * parts // 2])


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize(
  'damages',
  [
    (lambda path, data: path.unlink(),),
    (shortened(0), shortened(1)),
    (flip(0.02), flip(0.98)),
  ],
  ids=['missing', 'shortened', 'flipped'],
)
def test_damage_of_any_file_is_found(damages, tmp_path):
  """An error that names other steps, or the right bits: the file was not read.

  Where there are two damages, files have them in turn.
  """
  good, copy, refused = tmp_path / 'good', tmp_path / 'copy', 0
  with files_of(good) as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, TREE)
  files = [p.relative_to(good) for p in (good / '2').rglob('*') if p.is_file()]
  for file, damage in zip(files, itertools.cycle(damages)):
    shutil.copytree(good, copy)
    damage(copy / file, (copy / file).read_bytes())
    with files_of(copy) as checkpoints:
      try:
        assert_same_bits(checkpoints.restore(2)[1], TREE)
      except ValueError as error:
        assert re.search(
          r'step 2 in .* must be whole, .*Restore another one of \(1, 2\)',
          str(error),
          re.S,
        ), error
        refused += 1
      if file == files[0]:
        assert_same_bits(checkpoints.restore(1)[1], TREE)
    shutil.rmtree(copy)
  assert refused >= 2
  gc.collect()  # a read that fails in Orbax leaves coroutines


def test_of_another_origin(tmp_path):
  from orbax.checkpoint import v1

  with v1.training.Checkpointer(tmp_path) as theirs:
    theirs.save(4, {'x': jnp.zeros(3)})
  with (
    files_of(tmp_path) as checkpoints,
    pytest.raises(
      ValueError, match='written by demo_optax, got .*it has no digests'
    ),
  ):
    checkpoints.restore()
