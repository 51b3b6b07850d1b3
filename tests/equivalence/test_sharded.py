"""Workers of several devices, which shard their parameters."""

import contextlib
import functools
import math

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
  COMPILATIONS,
  MESHES,
  assert_devices_agree,
  assert_same_bits,
  mesh_of,
  random_tree,
  stacked,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.exchange.message import ROW

pytestmark = pytest.mark.core

COMPRESSOR = demo_optax.dct_topk(chunk_size=8, topk=3)

LEAVES = {  # shapes, and specs on meshes of two axes and of three
  'rows': ((64, 40), P('fsdp'), P('fsdp')),
  'cols': ((24, 96), P(None, 'fsdp'), P(None, 'tensor')),
  'both': ((32, 64), P(None, 'fsdp'), P('tensor', 'fsdp')),
  # Blocks of 11 x 52: chunks of 6 x 8, padded.
  'padded': ((44, 52), P('fsdp', None), P(('fsdp', 'tensor'), None)),
  'experts': ((4, 16, 24), P('fsdp', None, None), P('tensor', None, 'fsdp')),
  # Folded to 16 x 32 within blocks.
  'heads': ((16, 4, 8), P(None, 'fsdp'), P(None, 'fsdp')),
  # Blocks of it are no blocks of what is folded.
  'inner': ((16, 4, 8), P(None, None, 'fsdp'), P(None, None, 'tensor')),
  'short': ((8,), P('fsdp'), P('tensor')),  # blocks that are sent whole
  'bias': ((70,), P(), P()),
  'gain': ((5,), None, P()),
  'scalar': ((), P(), P()),
}
SHAPES, SPECS_2D, SPECS_3D = (
  {name: leaf[i] for name, leaf in LEAVES.items()} for i in range(3)
)
FEW = 'rows', 'cols', 'padded', 'bias'
SHAPE_2D = {'replica': 2, 'fsdp': 4}
SHAPE_3D = {'replica': 2, 'fsdp': 2, 'tensor': 2}
LAYOUTS = {'2d': (SHAPE_2D, SPECS_2D), '3d': (SHAPE_3D, SPECS_3D)}


def make_workers(layout, kind='auto'):
  shape, specs = LAYOUTS[layout]
  return demo_optax.Workers.on_mesh(mesh_of(shape, kind), 'replica', specs)


def simulated_workers(layout):
  shape, specs = LAYOUTS[layout]
  inside = {a: n for a, n in shape.items() if a != 'replica'}
  return demo_optax.Workers.simulated(2, specs, inside)


def run(workers, steps, make_tx, layout, specs=None, leaves=tuple(SHAPES)):
  tx, shapes = make_tx(workers), {name: SHAPES[name] for name in leaves}
  params = workers.device_put(random_tree(9, shapes))
  state = workers.device_put(tx.init(params))
  update, seen = jax.jit(tx.update), []
  for s in range(steps):
    gradients = random_tree(s, shapes, lead=(2,))
    if s == 2:  # one element, on one device of one worker
      gradients[leaves[0]][1, -1, -1] = np.nan
    gradients = stacked(gradients, workers, specs or LAYOUTS[layout][1])
    before = COMPILATIONS.count
    updates, state = update(gradients, state, params)
    assert s == 0 or COMPILATIONS.count == before, 'compiled again'
    seen.append(jax.tree.map(np.asarray, updates))
  return seen, state, updates


def exchange(workers):
  return demo_optax.scale_by_demo(COMPRESSOR, 0.95, workers=workers)


@functools.cache
def simulated(layout, leaves=tuple(SHAPES)):
  workers = simulated_workers(layout)
  return run(workers, 4, exchange, layout, leaves=leaves)[:2]


def test_sharded_equals_simulated_with_the_same_blocks():
  """Over two axes; test_maps.py has those of one."""
  workers = make_workers('3d', 'explicit')
  seen, state, updates = run(workers, 4, exchange, '3d')
  assert_same_bits((seen, state), simulated('3d'))
  for key, spec in SPECS_3D.items():
    where = NamedSharding(workers.mesh, spec or P())
    assert updates[key].sharding.is_equivalent_to(where, updates[key].ndim)
  for moment in state.worker_stacked.momentum.values():
    kept = NamedSharding(workers.mesh, P('replica', ('fsdp', 'tensor')))
    assert moment.sharding.is_equivalent_to(kept, moment.ndim)


@pytest.mark.parametrize(
  'kind, removed', [('auto', False), ('auto', True), ('explicit', False)]
)
def test_axes_of_one_device_change_nothing(kind, removed):
  """Meshes of large trainers have a dozen axes, nearly all of size one.

  Updates lie as the user wrote it, so they can be added on Explicit axes.
  """
  mesh = mesh_of({'replica': 2, 'data': 1, 'fsdp': 4, 'tensor': 1}, kind)
  specs = SPECS_2D | {
    'rows': P(('data', 'fsdp'), 'tensor'),
    'cols': P('tensor', ('fsdp', 'data')),
    'bias': P('tensor'),
  }
  with jax.remove_size_one_mesh_axis_from_type(removed):
    workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)
    seen, state, updates = run(workers, 4, exchange, '2d', specs, FEW)
    params = {name: np.zeros(SHAPES[name], np.float32) for name in FEW}
    optax.apply_updates(workers.device_put(params), updates)
  assert_same_bits((seen, state), simulated('2d', FEW))


def test_a_whole_chain_trains_as_if_simulated():
  """Clip by each worker's norm, averaged leaves; norms in another order."""

  def make_tx(workers):
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.5))
    return optax.chain(
      demo_optax.per_worker(clip, workers=workers),
      demo_optax.demo(
        1e-2,
        workers=workers,
        decay=0.9,
        weight_decay=0.1,
        compressor={**dict.fromkeys(leaves, COMPRESSOR), 'cols': None},
      ),
    )

  leaves = 'both', 'padded', 'cols'
  (expected, _, _), (seen, state, _) = (
    run(workers, 2, make_tx, '3d', leaves=leaves)
    for workers in (simulated_workers('3d'), make_workers('3d', 'explicit'))
  )
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
    seen,
    expected,
  )
  trace = state[0].worker_stacked[1].trace['both']
  assert {s.data.shape for s in trace.addressable_shards} == {(1, 16, 32)}


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_state_is_born_sharded(kind):
  """Eagerly and under jit, no device holds another's momentum; and put back."""
  workers = make_workers('3d', kind)
  tx = optax.chain(
    demo_optax.per_worker(optax.scale_by_adam(), workers=workers),
    exchange(workers),
    optax.scale_by_adam(),
    # Its moments have other shapes; optax makes none on Explicit axes.
    *[optax.scale_by_factored_rms(min_dim_size_to_factor=8)] * (kind == 'auto'),
  )
  params = workers.device_put(random_tree(9, SHAPES))
  specs = demo_optax.state_specs(tx, params, workers)
  shardings = jax.tree.map(lambda s: NamedSharding(workers.mesh, s), specs)
  eager = workers.device_put(tx.init(params))
  for state in (
    jax.jit(tx.init, out_shardings=shardings)(params),
    eager,
    workers.device_put(jax.tree.map(np.asarray, eager)),
  ):  # from a file
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings)):
      assert x.sharding.is_equivalent_to(sharding, x.ndim)
  # In jit without a word about shardings the momentum is, all the same.
  init = jax.jit(tx.init).lower(params).compile()
  assert not hlo_text.collectives(init, workers.mesh)
  momentum = init(params)[1].worker_stacked.momentum
  assert {
    s.data.shape[:2] for x in momentum.values() for s in x.addressable_shards
  } == {(1, 1)}  # of [workers, devices, ...]


@pytest.mark.parametrize('kind', ['auto', 'explicit', 'simulated'])
def test_values_of_all_workers(kind):
  """Sharded inside a worker; the large ones are beyond what is gathered."""
  shapes = {'rows': (8, 6), 'cols': (6, 8), 'large': (160, 160), 'bias': (3,)}
  specs = {
    'rows': P('fsdp'),
    'cols': P(None, 'fsdp'),
    'large': P(None, 'fsdp'),
    'bias': P(),
  }
  mesh = None if kind == 'simulated' else mesh_of(SHAPE_2D, kind)
  workers = (
    demo_optax.Workers.on_mesh(mesh, 'replica', specs)
    if mesh
    else demo_optax.Workers.simulated(2, specs, {'fsdp': 4})
  )

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(params, x):
    own = jax.tree.map(lambda p: p * x.mean(), params)
    count = (x > 0).sum()
    over = [
      demo_optax.over_workers(own, f) for f in (jnp.mean, jnp.sum, jnp.max)
    ]
    key = demo_optax.over_workers(jax.random.fold_in(jax.random.key(0), count))
    return (
      over,
      demo_optax.over_workers(params),
      demo_optax.over_workers(count, jnp.sum),
      (x**2).mean(),
      demo_optax.out_batch(x.sum(1)),
      jax.random.key_data(key),
    )

  params, x = random_tree(1, shapes), random_tree(0, {'x': (8, 3)})['x']
  with jax.set_mesh(mesh) if kind == 'explicit' else contextlib.nullcontext():
    found = step(workers.device_put(params), x)
  own = {
    k: np.stack([p * x[:4].mean(), p * x[4:].mean()]) for k, p in params.items()
  }
  over = [
    {k: f(v, axis=0) for k, v in own.items()} for f in (np.mean, np.sum, np.max)
  ]
  first = jax.random.fold_in(jax.random.key(0), (x[:4] > 0).sum())
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
    found,
    (
      over,
      params,
      (x > 0).sum(),
      (x**2).mean(),
      x.sum(1),
      jax.random.key_data(first),
    ),
  )


# What crosses which wire ------------------------------------------------------


@pytest.mark.parametrize(
  'layout, kind, leaves',
  [('2d', 'explicit', FEW), ('3d', 'auto', tuple(SHAPES))],
)
def test_one_gather_between_workers_and_only_scalars_inside(
  layout, kind, leaves
):
  workers = make_workers(layout, kind)
  shapes = {name: SHAPES[name] for name in leaves}
  tx = optax.chain(
    demo_optax.per_worker(optax.clip_by_global_norm(1.0), workers=workers),
    demo_optax.demo(
      1e-2, workers=workers, compressor=COMPRESSOR, weight_decay=0.1
    ),
  )
  params = workers.device_put(random_tree(9, shapes))
  state = workers.device_put(tx.init(params))
  gradients = stacked(
    random_tree(0, shapes, lead=(2,)), workers, LAYOUTS[layout][1]
  )
  compiled = jax.jit(tx.update).lower(gradients, state, params).compile()
  found = hlo_text.collectives(compiled, workers.mesh)
  plan = demo_optax.plan(params, COMPRESSOR, workers)

  between = [c for c in found if 'replica' in c.axes]
  assert [c.kind for c in between] == ['all-gather']
  assert between[0].axes == ('replica',)
  assert between[0].received_bytes == plan.device_bytes['replica',]
  assert 4 * between[0].received_bytes == plan.received_bytes
  inside = [c for c in found if 'replica' not in c.axes]
  rejoins = [c for c in inside if c.kind == 'all-gather']
  scalars = [c for c in inside if c.kind != 'all-gather']
  assert {c.kind for c in scalars} == {'all-reduce'}
  # f32[1]: each worker's norm; s32[]: whether this worker is valid; s32[2]:
  # whose messages are; f32[5]: metrics.
  shapes = [c.shapes for c in scalars]
  counted = [('s32[]',), ('s32[2]',), ('f32[5]',)]
  assert [shapes.count(shape) for shape in counted] == [1, 1, 1]
  assert {x for c in scalars if c.shapes not in counted for x in c.shapes} == {
    'f32[1]'
  }
  moved = {}
  for c in rejoins:
    moved[c.axes] = moved.get(c.axes, 0) + c.received_bytes
  assert {('replica',): between[0].received_bytes, **moved} == plan.device_bytes


def test_what_is_replicated_inside_crosses_once():
  """As many bytes per worker as if it were a single device, but for padding.

  Each device has as many chunks of every kind, and whole rows of words.
  """
  mesh = mesh_of({'replica': 2, 'local': 4})
  many = demo_optax.Workers.on_mesh(mesh, 'replica')
  leaves = (*FEW, 'gain', 'scalar')  # of which two are sent whole
  shapes = {name: SHAPES[name] for name in leaves}
  params = random_tree(9, shapes)
  plan = demo_optax.plan(params, COMPRESSOR, many)
  one = demo_optax.plan(params, COMPRESSOR, 2)
  buckets = exchange(many).init(params).layout.layout.buckets
  padding = sum(
    b.format.num_bytes(4 * b.num_chunks) - b.format.num_bytes(b.size)
    for b in buckets
    if not b.dense
  )
  (dense,) = (b for b in buckets if b.dense)
  filled = 4 * math.prod(dense.shape) - dense.size * dense.format.n
  padding += 4 * filled
  assert padding <= 4 * 3 * len(buckets) * 8
  row = 4 * ROW
  assert plan.sent_bytes % (4 * row) == one.sent_bytes % row == 0
  assert 0 <= plan.sent_bytes - one.sent_bytes <= padding + 4 * row
  tx = exchange(many)
  params = many.device_put(params)
  args = (
    stacked(random_tree(0, shapes, lead=(2,)), many),
    tx.init(params),
    params,
  )
  compiled = jax.jit(tx.update).lower(*args).compile()
  updates, _ = compiled(*args)
  simulated = demo_optax.Workers.simulated(2)
  (expected,), *_ = run(simulated, 1, exchange, '2d', leaves=leaves)
  assert_same_bits(updates, expected)
  assert_devices_agree(updates)
  moved = {
    c.axes: c.received_bytes
    for c in hlo_text.collectives(compiled, mesh)
    if c.kind == 'all-gather'
  }
  assert moved['replica',] == plan.device_bytes['replica',]
  assert 4 * moved['replica',] == plan.received_bytes


def test_simulated_workers_have_the_plan_of_the_mesh():
  params = random_tree(9, SHAPES)
  found = demo_optax.plan(params, COMPRESSOR, simulated_workers('3d'))
  expected = demo_optax.plan(params, COMPRESSOR, make_workers('3d'))
  assert found.leaves == expected.leaves
  assert found.sent_bytes == expected.sent_bytes
  assert list(found.device_bytes.values()) == list(
    expected.device_bytes.values()
  )


def test_plan_tells_where_sharding_changes_the_result():
  """And where it says that it does not, the bits are those of one device."""
  plan = demo_optax.plan(
    random_tree(9, SHAPES), COMPRESSOR, simulated_workers('3d')
  )
  same = {leaf.name: leaf.as_unsharded for leaf in plan.leaves}
  assert same == {
    'rows': True,
    'cols': True,
    'both': True,
    'padded': False,
    'experts': False,
    'heads': True,
    'inner': False,
    'short': False,
    'bias': True,
    'gain': True,
    'scalar': True,
  }
  assert '2x1x2*' in str(plan) and 'depend on how it is sharded' in str(plan)
  assert 'over fsdp ' in str(plan) and 'over tensor ' in str(plan)
  sharded, _ = simulated('3d')
  alone, _, _ = run(demo_optax.Workers.simulated(2), 4, exchange, '3d')
  for key, equal in same.items():
    found = all(np.array_equal(a[key], b[key]) for a, b in zip(sharded, alone))
    assert found == equal, key


# Specs ------------------------------------------------------------------------


class Model(nnx.Module):
  def __init__(self, axes):
    rngs = nnx.Rngs(0)
    init = nnx.with_partitioning(nnx.initializers.normal(), axes)
    self.layers = nnx.List(
      [
        nnx.Linear(16, 32, kernel_init=init, rngs=rngs),
        nnx.Linear(32, 16, rngs=rngs),
      ]
    )
    self.norm = nnx.BatchNorm(16, rngs=rngs)

  def __call__(self, x):
    x = self.layers[0](x, out_sharding=P(None, None))
    return self.norm(self.layers[1](jnp.tanh(x)))


@pytest.mark.parametrize(
  'rules, kind',
  [(None, 'explicit'), ([('embed', None), ('mlp', 'fsdp')], 'auto')],
)
def test_an_nnx_model_sharded_by_its_annotations(rules, kind):
  """It learns, nothing dense crosses, and everything lies where it should."""
  mesh = mesh_of(SHAPE_2D, kind)
  with jax.set_mesh(mesh), nnx.logical_axis_rules(rules or ()):
    model = Model(('embed', 'mlp') if rules else (None, 'fsdp'))
    specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)
    tx = demo_optax.demo(1e-2, workers=workers, compressor=COMPRESSOR)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(model, optimizer, x):
    loss_fn = lambda model, x: jnp.mean((model(x) - 1.0) ** 2)
    loss, gradients = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, gradients)
    return loss

  x = jax.device_put(
    np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32),
    NamedSharding(
      mesh, P('replica' if kind == 'explicit' else ('replica', 'fsdp'))
    ),
  )
  with jax.set_mesh(mesh), jax.numpy_dtype_promotion('standard'):
    losses = [float(step(model, optimizer, x)) for _ in range(5)]
    compiled = step.lower(model, optimizer, x).compile()
  assert losses[-1] < losses[0]
  params = nnx.state(model, nnx.Param)
  received = sum(
    c.received_bytes
    for c in hlo_text.collectives(compiled, mesh)
    if 'replica' in c.axes
  )
  message = demo_optax.plan(params, COMPRESSOR, workers).device_bytes[
    'replica',
  ]
  assert message <= received <= message + 400  # the loss and statistics
  assert demo_optax.check_replicas(params, workers) == []
  kernel = model.layers[0].kernel[...]
  assert kernel.sharding.shard_shape(kernel.shape) == (16, 8)
  momentum = optimizer.opt_state.inner_state[1].worker_stacked.momentum
  for moment in momentum.values():
    moment = moment[...]
    assert moment.shape[:2] == (2, 4)
    assert {s.data.shape[:2] for s in moment.addressable_shards} == {(1, 1)}


# Mistakes ---------------------------------------------------------------------


def on_2d(specs):
  return demo_optax.Workers.on_mesh(mesh_of(SHAPE_2D), 'replica', specs)


def init(specs):
  exchange(on_2d(specs)).init({'w': jnp.ones((6, 8))})


def plan(specs):
  demo_optax.plan({'w': jnp.ones((6, 8))}, COMPRESSOR, on_2d(specs))


def update_of_another_sharding():
  state = exchange(demo_optax.Workers.simulated(2)).init(
    {'w': jnp.ones((44, 8))}
  )
  workers = demo_optax.Workers.simulated(2, {'w': P('fsdp')}, {'fsdp': 4})
  exchange(workers).update({'w': jnp.ones((2, 44, 8))}, state)


def mixed_axis_types():
  types = (MESHES['auto'], MESHES['explicit'])
  mesh = jax.make_mesh((2, 4), ('replica', 'fsdp'), axis_types=types)
  demo_optax.Workers.on_mesh(mesh, 'replica')


@pytest.mark.parametrize(
  'call, error, message',
  [
    *(
      (
        lambda spec=spec: on_2d({'w': spec}),
        ValueError,
        r'w must name .* \(fsdp\), each once, got.*Over the worker axis',
      )
      for spec in (
        P('replica'),
        P('model'),
        P('fsdp', 'fsdp'),
        P(P.UNCONSTRAINED),
      )
    ),
    (
      lambda: on_2d({'w': 'fsdp'}),
      TypeError,
      "PartitionSpec for w, got 'fsdp'",
    ),
    (
      lambda: init({'other': P()}),
      ValueError,
      r'have a spec for the parameter w, got specs for other',
    ),
    (
      lambda: init({'w': P('fsdp')}),
      ValueError,
      r"w must divide its shape \(6, 8\), got .*{'fsdp': 4}",
    ),
    (
      lambda: plan({'w': P(None, None, 'fsdp')}),
      ValueError,
      r'must divide its shape \(6, 8\), got .*None, None',
    ),
    (update_of_another_sharding, ValueError, 'sharded over fsdp'),
    (mixed_axis_types, ValueError, 'all Auto or all Explicit'),
  ],
)
def test_mistakes(call, error, message):
  with pytest.raises(error, match=message):
    call()


# Placing trees ----------------------------------------------------------------


def test_device_put_of_subtrees():
  workers = demo_optax.Workers.on_mesh(
    mesh_of(SHAPE_2D), 'replica', {'layer': P('fsdp'), 'head': None}
  )
  params = workers.device_put(
    {'layer': {'a': np.ones((64, 8))}, 'head': np.ones((4,))}
  )
  assert params['layer']['a'].sharding.spec == P('fsdp')
  assert params['head'].is_fully_replicated
  adam = optax.scale_by_adam().init(params)
  assert workers.device_put(adam).mu['layer']['a'].sharding.spec == P('fsdp')
  params = {
    'layer': {'a': jnp.ones((8, 8)), 'b': jnp.ones(16)},
    'head': {'w': jnp.ones((3, 3))},
  }
  plan = demo_optax.plan(params, COMPRESSOR, workers)
  assert [leaf.leaf.sharding.blocks for leaf in plan.leaves] == [
    (1, 1),
    (4, 1),
    (4,),
  ]


def test_workers_are_equal_by_value():
  a = demo_optax.Workers.simulated(2, {'a': P('x'), 'b': P()}, {'x': 4})
  b = demo_optax.Workers.simulated(2, {'b': None, 'a': P('x', None)}, {'x': 4})
  assert a == b and hash(a) == hash(b)
  assert a != demo_optax.Workers.simulated(2, {'a': P('x')}, {'x': 4})
