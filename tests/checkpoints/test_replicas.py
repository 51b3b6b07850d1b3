"""Drift between devices, workers and processes is found and named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import COMPILATIONS, MESHES, make_mesh_2d, on_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import replicas
from demo_optax.numerics import packing, platform

DTYPES = [
  'float32',
  'bfloat16',
  'float16',
  'int8',
  'uint32',
  'bool',
  'complex64',
  'float8_e4m3fn',
]


def make_mesh(kind='auto'):
  return make_mesh_2d(kind, names=('replica', 'fsdp'))


def random(dtype, shape=(24, 8)):
  rng = np.random.default_rng(0)
  if dtype == 'bool':
    return rng.integers(0, 2, shape).astype(bool)
  return (10 * rng.normal(size=shape)).astype(jnp.dtype(dtype))


def content_digests(arrays):
  return {
    name: replicas.content_digest(held)
    for name, held in replicas.copies(arrays).items()
  }


def flip(x, sharding, device_id, byte=0, bit=0):
  """`x` on a mesh, with one bit of the copy on one device flipped."""
  placed = jax.device_put(x, sharding)
  parts = []
  for shard in placed.addressable_shards:
    part = np.array(shard.data)
    if shard.device.id == device_id:
      part.view(np.uint8).reshape(-1)[byte] ^= np.uint8(1 << bit)
    parts.append(jax.device_put(part, shard.device))
  return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


@pytest.mark.core
@pytest.mark.parametrize('kind', MESHES)
def test_a_flipped_bit_is_found_and_named(kind):
  workers = on_mesh(8, kind)
  sharding = NamedSharding(workers.mesh, P())
  params = workers.device_put(
    {
      'a': jnp.ones(7),
      'b': [jnp.ones((3, 3)), jnp.arange(5)],
      'b.0': jnp.ones(2),
    }
  )
  assert demo_optax.check_replicas(params, workers) == []
  params['b'][0] = flip(np.ones((3, 3), np.float32), sharding, 5, byte=17)
  assert demo_optax.check_replicas(params, workers) == [
    replicas.Difference('b.0', (5,), (5,), (0,))
  ]
  assert demo_optax.check_replicas(params)[0].workers == ()
  # What reading the array shows is one copy, and tells nothing.
  np.testing.assert_array_equal(params['b'][0], np.ones((3, 3)))


@pytest.mark.core
@pytest.mark.parametrize('kind', MESHES)
def test_sharded_parameters_are_compared_with_their_counterparts(kind):
  mesh = make_mesh(kind)
  specs = {'rows': P('fsdp'), 'cols': P(None, 'fsdp'), 'bias': P()}
  workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)
  host = {
    'rows': random('float32', (8, 3)),
    'cols': random('float32', (3, 8)),
    'bias': random('float32', (5,)),
  }
  params = workers.device_put(jax.tree.map(jnp.asarray, host))
  assert demo_optax.check_replicas(params, workers) == []
  ids = np.vectorize(lambda d: d.id)(mesh.devices)
  params['cols'] = flip(
    host['cols'], NamedSharding(mesh, P(None, 'fsdp')), ids[1, 2]
  )
  params['bias'] = flip(host['bias'], NamedSharding(mesh, P()), ids[0, 3])
  assert demo_optax.check_replicas(params, workers) == [
    replicas.Difference('bias', (int(ids[0, 3]),), (0,), (0,)),
    # Two copies, and no majority: told against the first.
    replicas.Difference('cols', (int(ids[1, 2]),), (1,), (0,)),
  ]


@pytest.mark.core
def test_states_and_keys():
  """Each worker's momentum is its own; what shares it is compared."""
  mesh = make_mesh()
  workers = demo_optax.Workers.on_mesh(mesh, 'replica')
  tx = demo_optax.demo(1e-2, workers=workers)
  params = workers.device_put({'w': jnp.ones((16, 16))})
  gradients = jax.device_put(
    {'w': random('float32', (2, 16, 16))}, NamedSharding(mesh, P('replica'))
  )
  _, state = tx.update(gradients, tx.init(params), params)
  key = jax.device_put(jax.random.key(1), NamedSharding(mesh, P()))
  assert demo_optax.check_replicas((params, state, key), workers) == []
  moment = state.inner_state[1].worker_stacked.momentum
  (name,) = moment
  moment[name] = flip(
    np.asarray(moment[name]), moment[name].sharding, mesh.devices[1, 3].id
  )
  # What differs there is one worker's, and one device's, own.
  assert demo_optax.check_replicas((params, state, key), workers) == []
  exchange = state.inner_state[1]
  exchange.layout.digest = flip(
    np.asarray(exchange.layout.digest),
    exchange.layout.digest.sharding,
    mesh.devices[1, 3].id,
  )
  (found,) = demo_optax.check_replicas((params, state, key), workers)
  assert 'digest' in found.leaf and found.workers == (1,)


def test_what_is_held_once_is_no_difference():
  tree = {
    'device': jnp.ones(3),
    'numpy': np.ones(3),
    'number': 3,
    'text': 'a',
    'none': None,
    'empty': jnp.zeros((0, 2)),
  }
  assert demo_optax.check_replicas(tree) == []
  assert demo_optax.check_replicas({}) == []
  placed = on_mesh(4).device_put({'empty': jnp.zeros((0, 2)), 'x': jnp.ones(2)})
  assert demo_optax.check_replicas(placed) == []
  simulated = demo_optax.Workers.simulated(4)
  assert demo_optax.check_replicas(jnp.ones(3), simulated) == []


def test_it_is_compiled_once(monkeypatch):
  monkeypatch.setattr(platform, 'digests_on_host', lambda _: False)
  workers = on_mesh(4)
  params = workers.device_put({'w': jnp.ones((4, 4)), 'b': jnp.ones(11)})
  demo_optax.check_replicas(params, workers)
  before = COMPILATIONS.count
  params = workers.device_put({'w': jnp.zeros((4, 4)), 'b': jnp.zeros(11)})
  before = COMPILATIONS.count
  demo_optax.check_replicas(params, workers)
  assert COMPILATIONS.count == before


def test_digest():
  """As it is defined: one word that differs changes it, and the order of words."""
  words = np.random.default_rng(0).integers(0, 2**32, 257, dtype=np.uint32)
  swapped = words.copy()
  swapped[[3, 200]] = swapped[[200, 3]]
  start = np.zeros(1, np.uint32)
  base, other = (
    np.asarray(packing.digest_block(x, start, x.shape))
    for x in (words, swapped)
  )
  weights = 2 * np.arange(257, dtype=np.uint32) + np.uint32(1)
  assert base[0] == np.sum(weights * words, dtype=np.uint32)
  assert (base != other).all()


@pytest.mark.parametrize(
  'dtype', [*DTYPES, 'int4', 'uint4', 'float32 in 0 dimensions']
)
def test_digests_of_contents_are_those_of_any_layout(dtype, monkeypatch):
  """NumPy's, on one device, and in blocks, some of which are held twice."""
  shape = () if '0' in dtype else (24, 8)
  x = np.asarray(random(dtype.split()[0], shape))
  mesh = make_mesh()
  layouts = (
    [None]
    if not shape
    else [
      P(),
      P('replica'),
      P(None, 'fsdp'),
      P('fsdp', 'replica'),
      P(('replica', 'fsdp')),
      P(('fsdp', 'replica')),
    ]
  )
  arrays = {'host': x, 'device': jnp.asarray(x)} | {
    str(spec): jax.device_put(x, NamedSharding(mesh, spec or P()))
    for spec in layouts
  }
  found = content_digests(arrays)
  assert len(set(found.values())) == 1 and len(found['host']) == 16
  assert demo_optax.check_replicas(arrays) == []
  monkeypatch.setattr(platform, 'digests_on_host', lambda _: False)
  assert (
    content_digests({'device': arrays['device']})['device'] == found['host']
  )
  other = np.array(x).reshape(-1)
  other.view(np.uint8)[-1] ^= 1
  assert content_digests({'x': other})['x'] != found['host']


def test_digests_of_contents_in_double_precision(x64):
  workers = on_mesh(4)
  broken = flip(random('float64'), NamedSharding(workers.mesh, P()), 3, byte=61)
  (found,) = demo_optax.check_replicas(broken, workers)
  assert found.leaf == 'the only leaf' and found.devices == (3,)
  x = np.random.default_rng(0).normal(size=(8, 3))
  for y in (x, x + 1j * x[::-1], x.view(np.int64)):
    arrays = {
      'host': y,
      'device': jnp.asarray(y),
      'mesh': jax.device_put(y, NamedSharding(make_mesh(), P('fsdp'))),
    }
    assert len(set(content_digests(arrays).values())) == 1


def test_processes_with_other_trees(monkeypatch):
  """As if there were three, of which this one is the first."""
  monkeypatch.setattr(jax, 'process_count', lambda: 3)
  monkeypatch.setattr(
    replicas.multihost_utils,
    'process_allgather',
    lambda x: np.stack([x, x, x + np.uint32(x.ndim == 0)]),
  )
  with pytest.raises(
    ValueError, match=r'same in all processes, got .* in \[2\]'
  ):
    demo_optax.check_replicas({'a': np.ones(3)})
