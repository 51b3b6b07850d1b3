"""Code that is shaped otherwise than ours: what would fail without a word.

Each ends in the right result, or in an error with the remedy in its text.
"""

import functools

import equinox as eqx
import flax.linen as nn
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import COMPILATIONS, make_mesh_2d, make_step, on_mesh, own
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

COMPRESSOR = demo_optax.Compressor(
  demo_optax.compressors.Striding(0.5), demo_optax.compressors.Identity()
)
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def demo(workers):
  return demo_optax.demo(
    0.03, workers=workers, compressor=COMPRESSOR, decay=0.9
  )


def square(params, x):
  return jnp.mean((x @ params['w']) ** 2)


def received(compiled, workers):
  found = hlo_text.collectives(compiled, workers.mesh)
  return sum(c.received_bytes for c in found)


def stacked_leaves(tree):
  """What lies under `worker_stacked`, but for numbers."""
  found = [x for x in own(tree).values() if x.ndim > 1]
  assert found
  return found


# A loss that closes over its batch ------------------------------------------------


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
def test_a_closure_over_the_batch_sees_the_workers_own(workers):
  @demo_optax.data_parallel(workers, batch_argnums=1)
  def gradients(w, batch):
    grads = jax.grad(lambda w: jnp.mean(batch @ w))(w)
    return demo_optax.out_batch(jnp.broadcast_to(grads, batch.shape))

  found = gradients(jnp.ones(8), BATCH)
  expected = BATCH.reshape(4, 4, 8).mean(1).repeat(4, axis=0)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_clip_before_is_each_workers_own():
  """One worker with a large gradient does not make the others' small."""
  workers = demo_optax.Workers.simulated(4)
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    demo_optax.average_gradients(workers=workers),
  )

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def clipped(state, grads):
    return tx.update(grads[0], state)[0]

  gradients = np.ones((4, 8), np.float32) * np.float32([[1], [1], [1], [100]])
  mean = clipped(tx.init(jnp.zeros(8)), gradients)
  np.testing.assert_allclose(np.linalg.norm(mean), 1.0, rtol=1e-5)


# Momentum that shardings of others replicate --------------------------------------


def test_replicated_momentum_is_reported_and_put_right_at_the_call():
  workers = on_mesh()
  params, tx = {'w': jnp.ones((64, 64))}, demo(workers)
  sharding = nn.get_sharding(  # as Flax finds it
    (params, jax.eval_shape(tx.init, params)), workers.mesh
  )
  state = jax.jit(tx.init, out_shardings=sharding[1])(params)
  step, params = (
    make_step(tx, workers, square),
    jax.device_put(params, sharding[0]),
  )
  for x in stacked_leaves(state):
    assert x.is_fully_replicated
  with pytest.warns(UserWarning, match=r'every device.*state_specs'):
    demo_optax.exchange_info(state)
  x = np.ones((16, 64), np.float32)
  compiled = step.lower(params, state, x).compile()
  plan = demo_optax.plan(params, COMPRESSOR, workers)
  assert received(compiled, workers) <= plan.device_bytes['data',] + 100
  _, state, *_ = step(params, state, x)
  for x in stacked_leaves(state):
    assert x.sharding.spec[0] == 'data'
  demo_optax.exchange_info(state)


def unboxed(tree):
  is_box = lambda x: isinstance(x, nn.Partitioned)
  return jax.tree.map(
    lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box
  )


@pytest.mark.parametrize(
  'logical, boxes', [(False, True), (True, True), (True, False)]
)
def test_sharded_parameters_in_boxes_or_unboxed(logical, boxes):
  mesh = make_mesh_2d('auto', (2, 2))
  box = nn.with_logical_partitioning if logical else nn.with_partitioning
  axes = (None, 'mlp') if logical else (None, 'fsdp')
  rules = (('mlp', 'fsdp'),)
  net = nn.Dense(64, kernel_init=box(nn.initializers.lecun_normal(), axes))
  x = np.ones((8, 32), np.float32)
  boxed = jax.eval_shape(net.init, jax.random.key(0), x)['params']
  specs = nn.get_partition_spec(boxed)
  if logical:
    specs = nn.logical_to_mesh(specs, rules)
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)

  def init(key):
    return TrainState.create(
      apply_fn=net.apply, params=net.init(key, x)['params'], tx=demo(workers)
    )

  abstract = jax.eval_shape(init, jax.random.key(0))
  sharding = (
    nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)
    if logical
    else nn.get_sharding(abstract, mesh)
  )
  state = jax.jit(init, out_shardings=sharding)(jax.random.key(0))
  state = state if boxes else unboxed(state)

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    loss_fn = lambda params: jnp.mean(
      state.apply_fn({'params': params}, x) ** 2
    )
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

  state, first = step(state, x)
  COMPILATIONS.count = 0
  for _ in range(3):
    state, loss = step(state, x)
  assert COMPILATIONS.count == 0
  assert loss < first
  kernel = state.params['kernel']
  assert isinstance(kernel, nn.Partitioned) == boxes
  assert unboxed(kernel).sharding.spec == P(None, 'fsdp')
  found = hlo_text.collectives(step.lower(state, x).compile(), mesh)
  message = demo_optax.plan(
    unboxed(state.params), COMPRESSOR, workers
  ).device_bytes['data',]
  between = sum(c.received_bytes for c in found if 'data' in c.axes)
  assert message <= between <= message + 100
  assert demo_optax.check_replicas(state.params, workers) == []
  largest = max(stacked_leaves(state.opt_state), key=lambda x: x.size)
  assert largest.sharding.spec[0] == 'data'
  assert 'fsdp' in jax.tree.leaves(tuple(largest.sharding.spec))


# Explicit meshes ------------------------------------------------------------------


@pytest.mark.parametrize('mapped', [True, False])
@pytest.mark.parametrize(
  'kind, shape, remedy',
  [
    ('simulated', (2, 2), r"w must be sharded by.*'fsdp'.*on_mesh"),
    (
      'on_mesh',
      (2, 2),
      r"w must be sharded.*'fsdp'.*tree of PartitionSpecs",
    ),
    ('on_mesh', (4, 1), None),
  ],
)
def test_parameters_that_an_explicit_mesh_shards(kind, shape, remedy, mapped):
  """And workers that do not say so; an axis of one device shards nothing."""
  mesh = make_mesh_2d('explicit', shape)
  workers = (
    demo_optax.Workers.simulated(2)
    if kind == 'simulated'
    else demo_optax.Workers.on_mesh(mesh, 'data')
  )
  tx, spec = demo(workers), P(None, 'fsdp')
  step = make_step(tx, workers, square) if mapped else jax.jit(tx.update)
  put = lambda x, spec: {'w': jax.device_put(x, NamedSharding(mesh, spec))}
  with jax.set_mesh(mesh):
    params = put(jnp.ones((8, 4)), spec)
    grads = put(jnp.ones((workers.count, 8, 4)), P('data', *spec))
    run = lambda params, state: (
      step(params, state, BATCH) if mapped else step(grads, state, params)
    )
    state = tx.init(params)
    if remedy:
      with pytest.raises(ValueError, match=remedy):
        run(params, state)
      return
    found, state, *_ = run(params, state)
    before = COMPILATIONS.count
    found, *_ = run(found if mapped else params, state)
    assert COMPILATIONS.count == before
    assert not mapped or found['w'].sharding.spec == spec


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
@pytest.mark.parametrize('shape', [None, (4, 1), (2, 2)])
def test_a_layer_that_names_the_worker_axis(kind, shape):
  """As models do that are written for `jit` on a mesh."""
  workers = (
    on_mesh(4, kind)
    if shape is None
    else (demo_optax.Workers.on_mesh(make_mesh_2d(kind, shape), 'data'))
  )
  tx = demo(workers)
  params = {'w': jnp.ones((8, 4))}
  constraint = (
    jax.lax.with_sharding_constraint if kind == 'auto' else jax.sharding.reshard
  )

  def step_with(spec):
    return make_step(
      tx,
      workers,
      lambda params, x: jnp.mean(constraint(x @ params['w'], spec) ** 2),
    )

  with jax.set_mesh(workers.mesh):
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"Leave it out.*place of P\('data'"):
      step_with(P('data', None))(params, state, BATCH)
    if shape is not None and kind == 'auto':  # what remains when it is left out
      step_with(P(None, 'fsdp'))(params, state, BATCH)


# State that is not the optimizer's ------------------------------------------------


@pytest.mark.parametrize('agreed', [True, False])
def test_linen_batch_statistics_are_agreed_upon(agreed):
  """They are one worker's until the step takes their mean."""
  workers = demo_optax.Workers.simulated(4)
  net = nn.Sequential([nn.Dense(6), nn.BatchNorm(use_running_average=False)])
  variables = net.init(jax.random.key(0), BATCH)
  params, stats = variables['params'], variables['batch_stats']
  tx = demo(workers)
  state = tx.init(params)

  @demo_optax.data_parallel(workers, batch_argnums=3)
  def step(params, stats, state, x):
    def loss_fn(params):
      y, new = net.apply(
        {'params': params, 'batch_stats': stats}, x, mutable=['batch_stats']
      )
      return jnp.mean((y - 1) ** 2), new['batch_stats']

    grads, stats_of_worker = jax.grad(loss_fn, has_aux=True)(params)
    updates, state = tx.update(grads, state, params)
    if agreed:
      stats_of_worker = demo_optax.over_workers(stats_of_worker)
    return optax.apply_updates(params, updates), stats_of_worker, state

  if not agreed:
    remedy = r'(?s)result\.1\.layers_1.*differs.*over_workers\(statistics\)'
    with pytest.raises(ValueError, match=remedy):
      step(params, stats, state, BATCH)
    return
  for _ in range(3):
    params, new, state = step(params, stats, state, BATCH)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, stats)
    stats = new
  x = BATCH.copy()
  x[0] = np.nan  # the rows of a worker that is left out
  _, new, _ = step(params, stats, state, x)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


# pmap -----------------------------------------------------------------------------


def test_pmap_that_returns_the_state_of_one_worker():
  """The run is right, but who saves it saves one worker's momentum; it shows."""
  workers = demo_optax.Workers.on_axis('batch')
  tx = demo(workers)
  params = {'w': jnp.zeros((8, 8))}
  xs = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)

  def step(params, state, x):
    grads = jax.grad(lambda params: jnp.mean((params['w'] - x) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mapped = functools.partial(
    jax.pmap, step, axis_name='batch', devices=jax.devices()[:4]
  )
  own, one = mapped(), mapped(in_axes=(None, None, 0), out_axes=(None, None))
  copies = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 4), tree)
  p, s = copies(params), copies(tx.init(params))
  q, t = params, tx.init(params)
  for _ in range(3):
    p, s = own(p, s, xs)
    q, t = one(q, t, xs)
  np.testing.assert_array_equal(p['w'][0], q['w'])
  crossing = hlo_text.collectives(own.lower(p, s, xs).compile())
  plan = demo_optax.plan(params, COMPRESSOR, 4)
  received = sum(c.received_bytes for c in crossing)
  assert plan.received_bytes <= received <= plan.received_bytes + 200
  differences = demo_optax.check_replicas(t)
  assert differences and demo_optax.check_replicas(q) == []
  assert all('worker_stacked' in d.leaf for d in differences)


# States that a step returns, numbers in modules -------------------------------


def test_numbers_of_an_equinox_layer_are_no_arrays():
  """`MaxPool2d` pads with minus infinity, a number among its leaves."""
  workers = demo_optax.Workers.simulated(2)
  tx = demo(workers)
  model = eqx.nn.Sequential(
    [eqx.nn.Conv2d(1, 1, 3, key=jax.random.key(0)), eqx.nn.MaxPool2d(2)]
  )
  opt_state = tx.init(eqx.filter(model, eqx.is_array))

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def train_step(model, opt_state, x):
    loss, grads = eqx.filter_value_and_grad(
      lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    )(model)
    updates, opt_state = tx.update(
      grads, opt_state, eqx.filter(model, eqx.is_array)
    )
    return eqx.apply_updates(model, updates), opt_state, loss

  x = jnp.asarray(BATCH).reshape(2, 1, 8, 8)
  losses = []
  for _ in range(3):
    before = COMPILATIONS.count
    model, opt_state, loss = train_step(model, opt_state, x)
    losses.append(float(loss))
  assert COMPILATIONS.count == before
  assert losses[-1] < losses[0]


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
def test_a_returned_nnx_state_is_what_the_objects_have(workers):
  """Statistics averaged, metrics of the whole batch, in either form."""

  def changes(model, metrics, x):
    metrics.update(loss=model(x)[:, 0] ** 2, mask=x[:, 0] > 0)

  def returns(model, metrics, x):
    changes(model, metrics, x)
    return nnx.state((model, metrics))

  def merges(graphdef, state, x):  # nnx.split before the step
    return returns(*nnx.merge(graphdef, state), x)

  found = []
  for form in (changes, returns, merges):
    step = demo_optax.data_parallel(workers, batch_argnums=2)(form)
    objects = nnx.BatchNorm(8, rngs=nnx.Rngs(0)), nnx.metrics.Average('loss')
    for _ in range(2):
      given = nnx.split(objects) if form is merges else objects
      state = step(*given, BATCH)
      if form is not changes:
        nnx.update(objects, state)
    found.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(objects))))
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, found[0], other)
  assert int(found[0][1]['count']) == 2 * int(np.sum(BATCH[:, 0] > 0))


def test_map_params_finds_the_parameters_of_other_states():
  """And none in ours, whose momentum lies in buckets."""
  tx = optax.chain(optax.trace(0.9), demo(demo_optax.Workers.simulated(2)))
  params = {'w': jnp.ones((8, 8))}
  state = tx.init(params)
  found = optax.tree.map_params(
    tx, lambda x: 'param', state, transform_non_params=lambda x: 'other'
  )
  assert found[0].trace == {'w': 'param'}
  assert set(jax.tree.leaves(found[1:])) == {'other'}
  assert jax.tree.structure(optax.tree.map_params(tx, lambda x: x, state)) == (
    jax.tree.structure(state)
  )


@pytest.mark.parametrize('workers', ['auto', 'explicit'], indirect=True)
def test_a_counter_in_a_dict_costs_no_second_program(workers):
  """Of a state that is no dataclass, and goes on as the optimizer's count."""
  tx = demo(workers)
  params = {'w': jnp.ones((8, 2))}
  state = {'params': params, 'opt_state': tx.init(params), 'step': 0}

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def train_step(state, x):
    grads = jax.grad(square)(state['params'], x)
    updates, opt_state = tx.update(grads, state['opt_state'], state['params'])
    (_, count), *_ = optax.tree.get_all_with_path(opt_state, 'count')
    return {
      'params': optax.apply_updates(state['params'], updates),
      'opt_state': opt_state,
      'step': count,
    }

  state = train_step(state, BATCH)
  before = COMPILATIONS.count
  for _ in range(2):
    state = train_step(state, BATCH)
  assert COMPILATIONS.count == before
  assert int(state['step']) == 3


def test_an_average_where_types_say_how_parameters_are_sharded():
  """In a map over the workers alone, beside an Explicit axis."""
  mesh = make_mesh_2d('explicit', (2, 2), ('data', 't'))
  tx = demo_optax.average_gradients(workers=demo_optax.Workers.on_axis('data'))
  of = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec))
  )
  with jax.set_mesh(mesh):
    update = jax.eval_shape(
      jax.shard_map(
        lambda p, g: tx.update(g[0], tx.init(p), p)[0],
        in_specs=(P(), P('data')),
        out_specs=P(),
        axis_names={'data'},
      ),
      of((32, 8), 't'),
      of((2, 32, 8), 'data', 't'),
    )
  assert update.shape == (32, 8)
