"""Every public transformation under every map: one matrix of guarantees.

A case trains for a few steps, in one of which a worker's gradient is not
finite. It must give the bits of a run in simulation: updates, parameters and
states. Nothing may compile after the first step, no type may change, and all
devices must hold the same bits. In some maps the run is saved and restored on
the way, and the run that it is compared with is not.
"""

import contextlib
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  COMPILATIONS,
  assert_devices_agree,
  assert_same_bits,
  make_mesh,
  make_mesh_2d,
  on_mesh,
  own,
  random_tree,
  stacked,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import local
from demo_optax.checkpoint import Checkpointer
from demo_optax.numerics import platform

pytestmark = pytest.mark.core

N, STEPS, SAVED = 4, 5, 3
QUICK = 'optimization_level=0' in os.environ['XLA_FLAGS']
BAD = {1: 2, 4: 0}  # the worker whose gradient is not finite, by steps
SHAPES = {'w': (16, 24), 'b': (5,)}
COMPRESSOR = demo_optax.dct_topk(8, 3)
CYCLIC = {'w': demo_optax.compressors.cyclic_signs(4), 'b': COMPRESSOR}


def with_codes(values):
  compressor = demo_optax.dct_topk(8, 3, values=values)
  return lambda workers: demo_optax.scale_by_demo(
    compressor, 0.95, workers=workers, alpha=0.3
  )


def owners(update_values, compressor=COMPRESSOR):
  return lambda workers: demo_optax.scale_by_demo(
    compressor,
    0.9,
    workers=workers,
    exchange='all_to_all',
    update_values=update_values,
  )


def methods(make, **options):
  """Local updates; a power of two as rate, so that products are exact."""
  return lambda workers: make(
    optax.sgd(0.125), workers=workers, sync_period=2, **options
  )


def weighted(make):
  """With weights of workers, which are read from their gradients."""

  def of(workers):
    tx = make(workers)

    def update(gradients, state, params=None):
      weight = 1 + 100 * jnp.abs(gradients['b'][..., 0].astype(jnp.float32))
      return tx.update(gradients, state, params, weight=weight)

    return optax.GradientTransformation(tx.init, update)

  return of


EXCHANGES = {
  'published': lambda workers: demo_optax.scale_by_demo(
    COMPRESSOR, 0.95, workers=workers
  ),
  'second': lambda workers: demo_optax.scale_by_demo(
    COMPRESSOR,
    0.97,
    workers=workers,
    alpha=0.3,
    average='workers',
    gradient_weight=1 - 0.97,
  ),
  'demo': lambda workers: optax.chain(
    demo_optax.per_worker(optax.clip(2.0), workers=workers),
    demo_optax.demo(
      lambda count: jnp.where(count < 2, 2.0**-6, 2.0**-7),
      workers=workers,
      compressor=COMPRESSOR,
      decay=0.95,
      weight_decay=0.125,
    ),
  ),  # powers of two: products are exact
  'demo_muon': lambda workers: demo_optax.demo_muon(
    1e-2, workers=workers, compressor=COMPRESSOR, weight_decay=0.1
  ),
  'per_worker': lambda workers: optax.chain(
    demo_optax.per_worker(optax.trace(0.5), workers=workers),
    demo_optax.average_gradients(workers=workers),
  ),
  'average': lambda workers: demo_optax.average_gradients(workers=workers),
  'owners': owners('ternary'),
  'cyclic': lambda workers: demo_optax.scale_by_demo(
    CYCLIC, 0.9, workers=workers, average='workers'
  ),
  'cyclic, owners': owners('float32', CYCLIC),
  'weighted': weighted(
    lambda workers: demo_optax.scale_by_demo(
      {'w': COMPRESSOR, 'b': None}, 0.9, workers=workers
    )
  ),
}
LOCAL = {
  'diloco': methods(local.diloco),
  'demo_diloco': methods(local.demo_diloco, compressor=COMPRESSOR),
  'drift': methods(local.demo_diloco, compressor=COMPRESSOR, drift=True),
  'sparse_loco': methods(local.sparse_loco, compressor=COMPRESSOR),
}
ALL = {**EXCHANGES, **LOCAL}
SPECS = {'w': P('fsdp'), 'b': None}
OWN_MAPS, STACKED = (
  ['checked', 'unchecked', 'vmap', 'pmap'],
  ['auto', 'explicit'],
)
IN_STEP = ['step', 'step auto', 'step explicit']
DEVICES = ['2x4 auto', '2x4 explicit', 'step 2x4 auto', 'step 2x4 explicit']
UNPLACED = [
  'simulated',
  'simulated 2x4',
  'step',
  'step simulated 2x4',
  'pmap',
  '2x4 auto',
]


class Map(NamedTuple):
  """How a transformation is called.

  Attributes:
    count: the number of workers.
    put: places parameters, as every worker has them.
    init: `params -> state`.
    update: `(stacked gradients, state, params) -> (updates, state)`.
    place: places stacked gradients.
    take: results with one copy of what all workers share.
  """

  count: int
  put: Any
  init: Any
  update: Any
  place: Any = lambda gradients: gradients
  take: Any = lambda tree: tree


def of_one(gradients):
  return jax.tree.map(lambda g: g[0], gradients)


def by_shard_map(make, checked):
  workers, mesh = demo_optax.Workers.on_axis('data'), make_mesh(N)
  tx = make(workers)
  specs = demo_optax.state_specs(tx, random_tree(99, SHAPES), workers)
  mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=checked)
  return Map(
    N,
    lambda tree: jax.device_put(tree, NamedSharding(mesh, P())),
    jax.jit(mapped(tx.init, in_specs=P(), out_specs=specs)),
    jax.jit(
      mapped(
        lambda g, state, params: tx.update(of_one(g), state, params),
        in_specs=(P('data'), specs, P()),
        out_specs=(P(), specs),
      )
    ),
  )


def by_copies(make, how):
  """In vmap or pmap, where every worker decodes for itself."""
  tx = make(demo_optax.Workers.on_axis('data'))
  mapped = (
    jax.vmap
    if how == 'vmap'
    else functools.partial(jax.pmap, devices=jax.devices()[:N])
  )
  jit = jax.jit if how == 'vmap' else lambda f: f

  def take(tree):
    def leaf(path, x):
      if 'worker_stacked' in jax.tree_util.keystr(path):
        return x[:, 0]
      x = np.asarray(x)
      for other in x[1:]:
        np.testing.assert_array_equal(x[0], other)
      return x[0]

    return jax.tree_util.tree_map_with_path(leaf, tree)

  return Map(
    N,
    lambda tree: jax.tree.map(lambda x: np.stack([x] * N), tree),
    jit(mapped(tx.init, axis_name='data')),
    jit(mapped(tx.update, axis_name='data')),
    take=take,
  )


def by_workers(make, workers, in_step):
  """With stacked gradients, or as one worker's in a step of its own."""
  tx = make(workers)

  def place(gradients):
    return stacked(
      gradients, workers, SPECS if workers.param_specs.axes else None
    )

  if in_step:

    @demo_optax.data_parallel(workers, batch_argnums=0)
    def step(rows, state, params):
      return tx.update(of_one(dict(zip(SHAPES, rows))), state, params)

    return Map(
      workers.count,
      workers.device_put,
      tx.init,
      step,
      lambda gradients: list(gradients.values()),
    )
  return Map(
    workers.count,
    workers.device_put,
    jax.jit(tx.init),
    jax.jit(tx.update),
    place,
  )


@functools.cache
def simulated_map(make, count, form):
  """All tests of a platform's form share its compiled programs."""
  del form
  return by_workers(make, demo_optax.Workers.simulated(count), in_step=False)


def map_of(make, how, count=N):
  """Returns the map, and the mesh that is set while it runs."""
  if how == 'simulated':
    return simulated_map(make, count, platform.of(None)), None
  *words, kind = how.split()
  if how in ('checked', 'unchecked'):
    return by_shard_map(make, how == 'checked'), None
  if how in ('vmap', 'pmap'):
    return by_copies(make, how), None
  if how.endswith('simulated 2x4'):
    workers = demo_optax.Workers.simulated(2, SPECS, {'fsdp': 4})
  elif '2x4' in words:
    mesh = make_mesh_2d(kind)
    workers = demo_optax.Workers.on_mesh(mesh, 'data', SPECS)
  elif how == 'step':
    workers = demo_optax.Workers.simulated(count)
  else:
    workers = on_mesh(count, kind)
  found = by_workers(make, workers, how.startswith('step'))
  return found, workers.mesh if kind == 'explicit' else None


def gradients_of(step, count, bad=BAD):
  gradients = random_tree(step, SHAPES, lead=(count,))
  if step in bad:
    gradients['b'][bad[step] % count] = np.nan
  return gradients


def types(tree):
  return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def run(make, how, folder=None, count=N):
  """Trains; through a checkpoint after `SAVED` steps if there is a folder."""
  m, mesh = map_of(make, how, count)
  inside = lambda: jax.set_mesh(mesh) if mesh else contextlib.nullcontext()

  def start(seed):
    params = m.put(random_tree(seed, SHAPES))
    with inside():
      return {'params': params, 'opt_state': m.init(params)}

  tree, seen = start(99), []
  expected = types(tree)
  for step in range(STEPS):
    if step == SAVED and folder is not None and how not in ('vmap', 'pmap'):
      with Checkpointer(folder, tree) as files:
        files.save(step, tree)
      with Checkpointer(folder, start(98)) as files:
        _, tree = files.restore()
    gradients = m.place(gradients_of(step, m.count))
    before = COMPILATIONS.count
    with inside():
      updates, state = m.update(gradients, tree['opt_state'], tree['params'])
      # What nobody has placed lies elsewhere after a step, or a restore.
      since = step - SAVED * (folder is not None and step >= SAVED)
      again = step == 0 or (how in UNPLACED and since < 2)
      assert again or COMPILATIONS.count == before, f'{step} compiled again'
      params = jax.jit(optax.apply_updates)(tree['params'], updates)
    tree = {'params': params, 'opt_state': state}
    assert types(tree) == expected
    assert types(updates) == expected['params']
    if how not in ('vmap', 'pmap'):
      assert_devices_agree((updates, params))
    seen.append(jax.tree.map(np.asarray, m.take(updates)))
  return seen, m.take(params), m.take(state)


@functools.cache
def simulated(name, blocks, form):
  """Local updates know one worker's step alone; a platform has its form."""
  del form
  how = 'simulated 2x4' if blocks else 'simulated'
  if name in LOCAL:
    how = f'step {how}' if blocks else 'step'
  return run(ALL[name], how)


def expected_of(name, how):
  return simulated(name, '2x4' in how, platform.of(None))


# `published` runs in every map. Another transformation runs where its state or
# its collectives are special, and at least in one map with stacked gradients or
# of a user, in one step, and on workers of several devices, if it knows them.
# With -m slow all run in all.
SOME = {
  'second': ['step auto', 'vmap'],
  'demo': ['2x4 explicit', 'unchecked'],
  'demo_muon': ['step explicit', 'explicit', 'checked', 'unchecked'],
  'cyclic': ['2x4 explicit', 'step auto', 'checked', 'vmap'],
  'cyclic, owners': ['step 2x4 auto', 'explicit', 'unchecked'],
  'per_worker': ['step 2x4 explicit', 'checked', 'pmap'],
  'weighted': ['step 2x4 auto', 'explicit', 'checked'],
  'average': ['step 2x4 auto', 'auto'],
  'owners': ['unchecked', 'vmap'],
  'diloco': ['step explicit'],
  'demo_diloco': ['step 2x4 auto'],
  # The mean over workers takes slices of a sharded dimension.
  'drift': ['step 2x4 explicit'],
  'sparse_loco': ['step auto'],
}
# Where runs are saved: each kind of placement, and each kind of state.
SAVED_IN = {name: hows[:1] for name, hows in SOME.items()} | {
  'published': ['auto', 'step explicit', 'checked', 'step', *DEVICES[:2]]
}


def cases():
  for name in ALL:
    hows = (
      IN_STEP + DEVICES[2:]
      if name in LOCAL
      else STACKED + IN_STEP + OWN_MAPS + DEVICES
    )
    if 'demo_muon' in name:  # norms over devices: test_recipes.py
      hows = [how for how in hows if '2x4' not in how]
    for how in hows:
      quick = how in SOME.get(name, hows)
      yield pytest.param(name, how, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize('name, how', list(cases()))
def test_maps_have_the_bits_of_the_simulation(name, how, tmp_path):
  folder = tmp_path if how in SAVED_IN[name] else None
  found, expected = run(ALL[name], how, folder), expected_of(name, how)
  if 'demo_muon' in name and not QUICK:
    # XLA adds the products of a batch of matrices, in Newton-Schulz, in another
    # order than those of one matrix. Its iterations multiply rounding errors of
    # small singular values by up to 283, the product of their slopes at zero.
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(
        x, y, rtol=1e-4, atol=7e-6 * np.max(np.abs(y), initial=0)
      ),
      found,
      expected,
    )
  else:
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
  'make, how',
  [
    (with_codes('int8'), 'auto'),
    (with_codes('sign'), 'pmap'),
    (with_codes('int4'), '2x4 auto'),
    (owners('int8'), 'explicit'),
    (owners('sign'), 'step 2x4 auto'),
  ],
)
def test_value_codes(make, how, tmp_path):
  """Each in one map; what owners keep because of theirs is saved."""
  expected = run(make, 'simulated 2x4' if '2x4' in how else 'simulated')
  folder = tmp_path if how in ('explicit', 'step 2x4 auto') else None
  assert_same_bits(run(make, how, folder), expected)


@pytest.mark.parametrize('count', [1, 8])
def test_other_numbers_of_workers(count):
  found, expected = (
    run(EXCHANGES['second'], how, count=count) for how in ('auto', 'simulated')
  )
  assert_same_bits(found, expected)


def test_saving_where_an_explicit_mesh_is_set(tmp_path):
  m, mesh = map_of(EXCHANGES['published'], 'explicit')
  with jax.set_mesh(mesh):
    tree = {'opt_state': m.init(m.put(random_tree(99, SHAPES)))}
    with Checkpointer(tmp_path, tree) as files:
      files.save(0, tree)


@pytest.mark.parametrize('how', ['step', 'step auto'])
def test_states_can_be_donated(how):
  """No two arrays of parameters and state are one: a jit may take them all."""
  for name, make in ALL.items():
    m, _ = map_of(make, how)
    params = m.put(jax.tree.map(jnp.asarray, random_tree(99, SHAPES)))
    places = [
      shard.data.unsafe_buffer_pointer()
      for x in jax.tree.leaves((params, m.init(params)))
      for shard in x.addressable_shards
    ]
    assert len(set(places)) == len(places), name


# A worker whose gradient is not finite ------------------------------------------


def own_of(state, which):
  return [np.asarray(x)[which] for x in own(state).values()]


@pytest.mark.parametrize('name', EXCHANGES)
def test_a_worker_that_is_not_finite_is_left_out(name):
  """The others have the bits of a run without it; then it takes part again."""
  left_out, others, seen = 1, [0, 2, 3], []
  # 3e38 is finite, and its transform is not. Clipping and averages accept it.
  bads = (np.nan, np.inf, 3e38) if name == 'published' else (np.nan, np.nan)
  for count in (N, N - 1):
    m = map_of(EXCHANGES[name], 'simulated', count)[0]
    params = m.put(random_tree(99, SHAPES))
    first = state = m.init(params)
    for step, bad in enumerate(bads):
      gradients = random_tree(step, SHAPES, lead=(N,))
      gradients['w'][left_out, 3, 5] = bad
      if count < N:
        gradients = {k: g[others] for k, g in gradients.items()}
      updates, state = m.update(gradients, state, params)
      params = optax.apply_updates(params, updates)
    if count < N:
      seen.append((params, own_of(state, slice(None))))
      continue
    seen.append((params, own_of(state, others)))
    assert_same_bits(own_of(state, left_out), own_of(first, left_out))
    gradients = random_tree(7, SHAPES, lead=(N,))
    updates, after = m.update(gradients, state, params)
    if name == 'average':  # which has no state
      np.testing.assert_allclose(
        updates['w'], gradients['w'].mean(0), atol=1e-6
      )
    else:
      pairs = zip(own_of(after, left_out), own_of(state, left_out))
      assert any(np.any(x != y) for x, y in pairs)
  assert_same_bits(*seen)


# Types --------------------------------------------------------------------------


HALVES = 'bfloat16', 'float16'


@pytest.mark.parametrize(
  'name, dtype',
  [('published', dtype) for dtype in HALVES]
  + [(name, HALVES[i % 2]) for i, name in enumerate(EXCHANGES) if i],
)
def test_types_of_states_and_updates(name, dtype):
  """In half precision, of which each transformation has one; `run` has float32."""
  params = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in SHAPES.items()}
  gradients = {
    k: jax.ShapeDtypeStruct((N, *s), dtype) for k, s in SHAPES.items()
  }
  tx = EXCHANGES[name](demo_optax.Workers.simulated(N))
  # Moments of optax are promoted; what is ours alone works under strict rules.
  with jax.numpy_dtype_promotion('strict' if name == 'average' else 'standard'):
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, gradients, state, params)
  assert types(updates) == types(params) and types(after) == types(state)
  own = {x.dtype for x in jax.tree.leaves(state)}
  # Parts of others keep their dtype.
  if name != 'per_worker' and 'demo_muon' not in name:
    assert own <= {np.dtype(x) for x in ('float32', 'int32', 'uint32')}
