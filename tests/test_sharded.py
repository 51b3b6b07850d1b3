"""Workers of several devices, which shard their parameters."""

import jax
import numpy as np
import pytest
from helpers import (
  COMPILATIONS,
  MESHES,
  assert_same_bits,
  random_tree,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

pytestmark = pytest.mark.core

COMPRESSOR = demo_optax.dct_topk(chunk_size=8, topk=3)

SHAPES = {
    'rows': (64, 40),
    'cols': (24, 96),
    'both': (32, 64),
    'padded': (44, 52),  # blocks of 11 x 52: chunks of 6 x 8, padded
    'experts': (4, 16, 24),
    'short': (8,),  # blocks that are sent whole
    'bias': (70,),
    'gain': (5,),
    'scalar': (),
}

SHAPE_2D = {'replica': 2, 'fsdp': 4}
SPECS_2D = {
    'rows': P('fsdp'),
    'cols': P(None, 'fsdp'),
    'both': P(None, 'fsdp'),
    'padded': P('fsdp', None),
    'experts': P('fsdp', None, None),
    'short': P('fsdp'),
    'bias': P(),
    'gain': None,
    'scalar': P(),
}
SHAPE_3D = {'replica': 2, 'fsdp': 2, 'tensor': 2}
SPECS_3D = {
    'rows': P('fsdp'),
    'cols': P(None, 'tensor'),
    'both': P('tensor', 'fsdp'),
    'padded': P(('fsdp', 'tensor'), None),
    'experts': P('tensor', None, 'fsdp'),
    'short': P('tensor'),
    'bias': P(),
    'gain': P(),
    'scalar': P(),
}
LAYOUTS = {'2d': (SHAPE_2D, SPECS_2D), '3d': (SHAPE_3D, SPECS_3D)}


def make_mesh(shape, kind='auto'):
  return jax.make_mesh(
      tuple(shape.values()), tuple(shape),
      axis_types=(MESHES[kind],) * len(shape))


def make_workers(layout, kind='auto'):
  shape, specs = LAYOUTS[layout]
  return demo_optax.Workers.on_mesh(make_mesh(shape, kind), 'replica', specs)


def simulated_workers(layout):
  shape, specs = LAYOUTS[layout]
  return demo_optax.Workers.simulated(2, specs, shape)


def place_gradients(gradients, workers, specs):
  specs = {k: s or P() for k, s in specs.items()}
  return {k: jax.device_put(g, NamedSharding(workers.mesh, P('replica', *specs[k])))
          for k, g in gradients.items()}


def run(workers, steps, make_tx, layout):
  tx = make_tx(workers)
  params = workers.device_put(random_tree(9, SHAPES))
  state = workers.device_put(tx.init(params))
  update, seen = jax.jit(tx.update), []
  for s in range(steps):
    gradients = random_tree(s, SHAPES, lead=(2,))
    if s == 2:  # one element, on one device of one worker
      gradients['rows'][1, -1, -1] = np.nan
    if hasattr(workers, 'mesh'):
      gradients = place_gradients(gradients, workers, LAYOUTS[layout][1])
    before = COMPILATIONS.count
    updates, state = update(gradients, state, params)
    assert s == 0 or COMPILATIONS.count == before, 'compiled again'
    seen.append(jax.tree.map(np.asarray, updates))
  return seen, state, updates


def exchange(workers):
  return demo_optax.scale_by_demo(COMPRESSOR, 0.95, workers=workers)


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_sharded_equals_simulated_with_the_same_blocks(layout, kind):
  expected, expected_state, _ = run(
      simulated_workers(layout), 6, exchange, layout)
  workers = make_workers(layout, kind)
  seen, state, updates = run(workers, 6, exchange, layout)
  assert_same_bits(seen, expected)
  assert_same_bits(state, expected_state)
  for key, spec in LAYOUTS[layout][1].items():
    spec = spec or P()
    where = NamedSharding(workers.mesh, spec)
    assert updates[key].sharding.is_equivalent_to(where, updates[key].ndim)
    kept = NamedSharding(workers.mesh, P('replica', *spec))
    moment = state.momentum[key]
    assert moment.sharding.is_equivalent_to(kept, moment.ndim)
