"""Three ways to run, one exchange: the same bits everywhere."""

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  COMPILATIONS,
  SHAPES,
  assert_replicas_equal,
  assert_same_bits,
  make_mesh,
  on_mesh,
  random_tree,
  replicated,
  stacked,
    worker_grads,
)
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.codes.values import VALUES

pytestmark = pytest.mark.core

N = 4
STEPS = 20
COMPRESSOR = demo_optax.dct_topk(chunk_size=32, topk=8)


RULES = {
    'published': {'decay': 0.95},
    'second': {'decay': 0.97, 'alpha': 0.3, 'average': 'workers', 'ema': True},
}


def make_tx(workers, rule='published', compressor=COMPRESSOR):
  return demo_optax.scale_by_demo(compressor, workers=workers, **RULES[rule])


def whole_demo(workers):
  return optax.chain(
      demo_optax.per_worker(optax.clip(2.0), workers=workers),
      demo_optax.demo(
          optax.linear_schedule(1e-2, 1e-3, 50), workers=workers,
          compressor=COMPRESSOR, decay=0.95, weight_decay=0.1))


def gradients_of(step, workers=N):
  """Gradients of a step; every seventh, one worker's are not finite."""
  gradients = random_tree(step, lead=(workers,))
  if step % 7 == 3:
    gradients['bias'][step % workers] = np.nan
  return gradients


def stacked_run(workers, steps, *rule):
  """(updates of every step, state) with stacked gradients."""
  tx = make_tx(workers, *rule)
  params = replicated(random_tree(99), workers)
  state = tx.init(params)
  update, seen = jax.jit(tx.update), []
  for s in range(steps):
    gradients = stacked(gradients_of(s, workers.count), workers)
    before = COMPILATIONS.count
    updates, state = update(gradients, state, params)
    assert s == 0 or COMPILATIONS.count == before, 'compiled again'
    assert_replicas_equal(updates)
    seen.append(jax.tree.map(np.asarray, updates))
  return seen, state


def shard_map_run(steps, check_vma, *rule):
  """The same with gradients local, inside a shard_map of our own."""
  workers = demo_optax.Workers.on_axis('data')
  tx = make_tx(workers, *rule)
  params, mesh = random_tree(99), make_mesh(N)
  specs = demo_optax.state_specs(tx, params, workers)

  def local_step(state, gradients, params):
    gradients = jax.tree.map(lambda g: g[0], gradients)
    return tx.update(gradients, state, params)

  state = jax.jit(jax.shard_map(
      tx.init, mesh=mesh, in_specs=P(), out_specs=specs,
      check_vma=check_vma))(params)
  step = jax.jit(jax.shard_map(
      local_step, mesh=mesh, in_specs=(specs, P('data'), P()),
      out_specs=(P(), specs), check_vma=check_vma))
  seen = []
  for s in range(steps):
    updates, state = step(state, gradients_of(s), params)
    assert_replicas_equal(updates)
    seen.append(jax.tree.map(np.asarray, updates))
  return seen, state


def mapped_run(steps, how, *rule):
  """The same in vmap or pmap, where every worker decodes for itself."""
  workers = demo_optax.Workers.on_axis('data')
  tx = make_tx(workers, *rule)
  params = jax.tree.map(lambda x: np.stack([x] * N), random_tree(99))
  state = jax.vmap(tx.init, axis_name='data')(params)
  if how == 'vmap':
    update = jax.jit(jax.vmap(tx.update, axis_name='data'))
  else:
    update = jax.pmap(
        tx.update, axis_name='data', devices=jax.devices()[:N])
  seen = []
  for s in range(steps):
    updates, state = update(gradients_of(s), state, params)
    updates = jax.tree.map(np.asarray, updates)
    for leaf in jax.tree.leaves(updates):
      for other in leaf[1:]:
        np.testing.assert_array_equal(leaf[0], other)
    seen.append(jax.tree.map(lambda u: u[0], updates))
  return seen, state


@pytest.fixture(scope='module', params=RULES)
def simulated(request):
  workers = demo_optax.Workers.simulated(N)
  return request.param, stacked_run(workers, STEPS, request.param)


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_mesh_equals_simulation(simulated, kind):
  rule, expected = simulated
  assert_same_bits(stacked_run(on_mesh(N, kind), STEPS, rule), expected)


@pytest.mark.parametrize('count', [1, 8])
def test_mesh_equals_simulation_for_other_counts(count):
  expected = stacked_run(demo_optax.Workers.simulated(count), 10)
  assert_same_bits(stacked_run(on_mesh(count), 10), expected)


@pytest.mark.parametrize('check_vma', [True, False])
def test_own_shard_map_equals_simulation(simulated, check_vma):
  rule, expected = simulated
  assert_same_bits(shard_map_run(STEPS, check_vma, rule), expected)


@pytest.mark.parametrize('how', ['vmap', 'pmap'])
def test_own_vmap_and_pmap_equal_simulation(simulated, how):
  rule, (expected, expected_state) = simulated
  updates, state = mapped_run(STEPS, how, rule)
  assert_same_bits(updates, expected)
  assert_same_bits(
      jax.tree.map(lambda m: m[:, 0], state.worker_stacked.momentum), expected_state.worker_stacked.momentum)


@pytest.mark.parametrize('rule, how, values', [
    ('published', 'mesh', 'int8'), ('published', 'pmap', 'sign'),
    ('second', 'vmap', 'bfloat16'), ('second', 'mesh', 'int4')])
def test_every_value_code_gives_the_same_bits(rule, how, values):
  rule = rule, demo_optax.dct_topk(chunk_size=32, topk=8, values=values)
  expected = stacked_run(demo_optax.Workers.simulated(N), 5, *rule)
  if how == 'mesh':
    assert_same_bits(stacked_run(on_mesh(N), 5, *rule), expected)
    return
  updates, state = mapped_run(5, how, *rule)
  assert_same_bits(updates, expected[0])
  assert_same_bits(
      jax.tree.map(lambda m: m[:, 0], state.worker_stacked.momentum), expected[1].worker_stacked.momentum)


def test_a_run_repeats_bit_for_bit(simulated):
  rule, expected = simulated
  workers = demo_optax.Workers.simulated(N)
  assert_same_bits(stacked_run(workers, STEPS, rule), expected)


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_parameters_stay_identical_on_all_devices(kind):
  """A whole chain, clip and weight decay and all, read from every shard."""
  workers = on_mesh(N, kind)
  tx = whole_demo(workers)
  params = replicated(random_tree(99), workers)
  state = workers.device_put(tx.init(params))

  @jax.jit
  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  for s in range(STEPS):
    before = COMPILATIONS.count
    params, state = step(params, state, stacked(gradients_of(s), workers))
    assert s == 0 or COMPILATIONS.count == before, 'compiled again'
    assert_replicas_equal(params)


def test_scan_over_steps_inside_shard_map():
  """The state's type does not change from one step to the next."""
  tx = make_tx(demo_optax.Workers.on_axis('data'))

  def run(params, gradients):  # gradients [steps, 1, ...] of this worker
    def step(state, g):
      updates, state = tx.update(g, state, params)
      return state, updates

    gradients = jax.tree.map(lambda g: g[:, 0], gradients)
    return jax.lax.scan(step, tx.init(params), gradients)[1]

  gradients = [gradients_of(s) for s in range(5)]
  gradients = jax.tree.map(lambda *g: np.stack(g), *gradients)
  mapped = jax.shard_map(
      run, mesh=make_mesh(N), in_specs=(P(), P(None, 'data')), out_specs=P())
  updates = jax.jit(mapped)(random_tree(99), gradients)
  expected, _ = stacked_run(demo_optax.Workers.simulated(N), 5)
  assert_same_bits(updates, jax.tree.map(lambda *u: np.stack(u), *expected))


def test_momentum_is_born_sharded():
  """Eagerly and under jit, no device holds more than its own."""
  for kind in ('auto', 'explicit'):
    workers = on_mesh(N, kind)
    tx = demo_optax.scale_by_demo(COMPRESSOR, workers=workers)
    params = replicated(random_tree(0), workers)
    for init in (tx.init, jax.jit(tx.init)):
      for leaf in jax.tree.leaves(init(params).worker_stacked):
        assert len(leaf.addressable_shards) == N
        assert all(s.data.shape[0] == 1 for s in leaf.addressable_shards)
    compiled = jax.jit(tx.init).lower(params).compile()
    size = sum(np.prod(s) for s in SHAPES.values()) * 4
    # Outputs per device: one worker's momentum (padding included).
    assert compiled.memory_analysis().output_size_in_bytes < 1.2 * size


def test_init_is_abstract():
  for workers in (demo_optax.Workers.simulated(N), on_mesh(N),
                  demo_optax.Workers.on_axis('data')):
    tx = make_tx(workers)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), random_tree(0))
    shapes = jax.eval_shape(tx.init, params)
    lead = 1 if 'on_axis' in repr(workers) else N
    for leaf in jax.tree.leaves(shapes.worker_stacked):
      assert leaf.shape[0] == lead and leaf.dtype == jnp.float32


@pytest.mark.parametrize('alpha', [0.2, 1.0])
def test_conservation(alpha, x64):
  """What is kept and what was sent make up what was there."""
  workers = demo_optax.Workers.simulated(1)
  tx = demo_optax.scale_by_demo(COMPRESSOR, 0.9, workers=workers, alpha=alpha)
  params = {k: jnp.asarray(v, jnp.float64) for k, v in random_tree(0).items()}
  state = tx.init(params)
  before = jax.tree.map(jnp.zeros_like, params)
  for s in range(5):
    gradients = {k: jnp.asarray(v, jnp.float64)
                 for k, v in random_tree(s, lead=(1,)).items()}
    sent, state = tx.update(gradients, state, params)  # one worker's own
    kept = demo_optax.state.momentum(state)
    for key in params:
      had = 0.9 * before[key] + gradients[key][0]
      np.testing.assert_allclose(
          kept[key][0] + alpha * sent[key], had, atol=1e-12)
    before = jax.tree.map(lambda m: m[0], kept)


@pytest.mark.parametrize('values, alpha', [
    *((values, 1.0) for values in VALUES), ('float32', 0.2), ('sign', 0.2)])
def test_conservation_at_the_ends_of_the_range(values, alpha):
  """All-zero, huge, subnormal and mixed chunks: rounding and nothing else."""
  rng = np.random.default_rng(0)
  workers = demo_optax.Workers.simulated(1)
  compressor = demo_optax.dct_topk(16, 8, values=values)
  tx = demo_optax.scale_by_demo(
      compressor, 0.5, workers=workers, alpha=alpha, average='workers')
  params = jnp.zeros((6 * 16, 16))
  state, update = tx.init(params), jax.jit(tx.update)
  before = np.zeros((6, 16, 16))
  spike = np.zeros((16, 16))
  spike[3, 5] = 8e37  # its coefficients are finite, the sum of 256 is not
  for _ in range(4):
    noise = rng.normal(size=(3, 16, 16))
    gradient = np.stack([0 * spike, spike, 1e-42 * noise[0], noise[1],
                         noise[2] * 10.0 ** rng.integers(-44, 30, (16, 16)),
                         np.eye(16) * 1.2e-38])
    # Of what is larger than gradients may be, twice as much is there already.
    extreme = np.abs(gradient) > 1e25
    before = jnp.asarray(
        before + np.where(extreme, 2 * gradient, 0), jnp.float32)
    state = demo_optax.state.with_momentum(
        state, {'the only leaf': before.reshape(1, -1, 16)})
    gradient = jnp.asarray(np.where(extreme, 0, gradient), jnp.float32)
    sent, state = update(gradient.reshape(1, -1, 16), state, params)
    kept = demo_optax.state.momentum(state)['the only leaf']
    sent, kept, gradient, before = (
        np.asarray(x, np.float64).reshape(6, 16, 16)
        for x in (sent, kept, gradient, before))
    had = 0.5 * before + gradient
    scale = np.abs(had).max((1, 2), keepdims=True)
    assert int(state.metrics['num_excluded']) == 0
    assert np.all(np.abs(kept + alpha * sent - had) <= 2e-6 * scale + 3e-37)
    assert not np.any(sent[0]) and not np.any(kept[0])
    before = kept


@pytest.mark.parametrize('values', VALUES)
def test_everything_is_sent_in_the_end(values):
  """Of a constant gradient, only so much is ever waiting in the momentum."""
  workers = demo_optax.Workers.simulated(2)
  compressor = demo_optax.dct_topk(8, 8, values=values)
  tx = demo_optax.scale_by_demo(compressor, 1 - 1e-7, workers=workers)
  tx = optax.chain(tx, optax.trace(1.0))  # the sum of the updates
  gradient = jnp.asarray(random_tree(0, {'w': (24, 16)})['w'])
  update = jax.jit(tx.update)
  state, behind = tx.init(gradient), []
  for step in range(1, 161):
    total, state = update(jnp.stack([gradient] * 2), state, gradient)
    if step in (40, 160):
      behind.append(float(jnp.linalg.norm(total / step - gradient)
                          / jnp.linalg.norm(gradient)))
  assert behind[1] < 0.4 * behind[0] and behind[1] < 0.1


def test_one_worker_is_no_special_case():
  """With one worker as little is sent as with many."""
  workers = demo_optax.Workers.simulated(1)
  tx = demo_optax.scale_by_demo(
      demo_optax.dct_topk(16, 1), 0.9, workers=workers)
  params = jnp.zeros((16, 16))
  gradient = jnp.asarray(random_tree(0, {'w': (1, 16, 16)})['w'])
  update, state = tx.update(gradient, tx.init(params), params)
  assert np.count_nonzero(*state.worker_stacked.momentum.values()) == 255
  assert np.linalg.matrix_rank(np.asarray(update)) == 1


def test_a_gradient_that_could_overflow_the_momentum_is_left_out():
  """Up to a 1e-12th of the largest number, and not beyond."""
  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.scale_by_demo(
      demo_optax.dct_topk(16, 1), 0.9, workers=workers)
  params = jnp.zeros((16, 16))
  for largest, left_out in (3.4e26, 0), (3.5e26, 1):
    gradient = np.ones((2, 16, 16), np.float32)
    gradient[1, 2, 3] = largest
    _, state = tx.update(jnp.asarray(gradient), tx.init(params), params)
    assert int(state.metrics['num_excluded']) == left_out
    (momentum,) = state.worker_stacked.momentum.values()
    assert np.all(np.isfinite(momentum))
    assert bool(np.any(momentum[1])) == (not left_out)


# Workers that are left out ----------------------------------------------------


@pytest.mark.parametrize('kind', ['simulated', 'mesh'])
@pytest.mark.parametrize('bad', [np.nan, np.inf, 3e38])
def test_a_non_finite_worker_is_left_out(kind, bad):
  workers = (demo_optax.Workers.simulated(N) if kind == 'simulated'
             else on_mesh(N))
  three = demo_optax.Workers.simulated(3)
  tx = demo_optax.scale_by_demo(COMPRESSOR, 0.9, workers=workers)
  reference = demo_optax.scale_by_demo(COMPRESSOR, 0.9, workers=three)
  params = replicated(random_tree(1), workers)
  state, reference_state = tx.init(params), reference.init(random_tree(1))
  good = random_tree(2, lead=(N,))
  _, state = tx.update(stacked(good, workers), state, params)
  _, reference_state = reference.update(
      jax.tree.map(lambda g: g[[0, 2, 3]], good), reference_state, params)
  before = jax.tree.map(lambda m: np.array(m[1]), state.worker_stacked.momentum)

  broken = random_tree(3, lead=(N,))
  broken['matrix'][1] = bad  # 3e38: finite, but its transform is not
  updates, state = tx.update(stacked(broken, workers), state, params)
  expected, reference_state = reference.update(
      jax.tree.map(lambda g: g[[0, 2, 3]], broken), reference_state, params)
  assert int(state.metrics['num_excluded']) == 1
  assert_same_bits(updates, expected)
  assert_same_bits(jax.tree.map(lambda m: m[1], state.worker_stacked.momentum), before)
  assert_same_bits(
      jax.tree.map(lambda m: np.asarray(m)[[0, 2, 3]], state.worker_stacked.momentum),
      reference_state.worker_stacked.momentum)


def test_all_left_out_changes_nothing():
  workers = demo_optax.Workers.simulated(N)
  tx = demo_optax.demo(
      1e-2, workers=workers, compressor=COMPRESSOR, weight_decay=0.1)
  params = jax.tree.map(jnp.asarray, random_tree(1))
  state = tx.init(params)
  broken = jax.tree.map(lambda g: g * np.nan, random_tree(2, lead=(N,)))
  updates, state = jax.jit(tx.update)(broken, state, params)
  assert int(state.inner_state[1].metrics['num_excluded']) == N
  assert_same_bits(optax.apply_updates(params, updates), params)
  assert all(not np.any(m) for m in jax.tree.leaves(state.inner_state[1].worker_stacked.momentum))
  # And the next good step goes on as if nothing had been.
  updates, state = tx.update(random_tree(3, lead=(N,)), state, params)
  assert int(state.inner_state[1].metrics['num_excluded']) == 0
  assert all(np.isfinite(u).all() and np.any(u)
             for u in jax.tree.leaves(updates))


# What crosses the wire --------------------------------------------------------


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_one_gather_and_nothing_dense(kind):
  workers = on_mesh(N, kind)
  tx = optax.chain(
      demo_optax.per_worker(optax.clip_by_global_norm(1.0), workers=workers),
      whole_demo(workers))
  params = replicated(random_tree(1), workers)
  state = workers.device_put(tx.init(params))
  x = stacked(np.ones((8, 64), np.float32), workers)

  def loss_fn(params, x):
    every = sum(jnp.sum(jnp.sin(p * x[0, 0])) for p in jax.tree.leaves(params))
    return jnp.mean((x @ params['matrix']) ** 2) + every

  @jax.jit
  def train_step(params, state, x):
    loss, gradients = worker_grads(loss_fn, workers)(params, x)
    updates, state = tx.update(gradients, state, params)
    return loss, optax.apply_updates(params, updates), state

  compiled = train_step.lower(params, state, x).compile()
  found = hlo_text.collectives(compiled)
  plan = demo_optax.plan(params, COMPRESSOR, workers)
  gathers = [c for c in found if c.kind == 'all-gather']
  assert len(gathers) == 1
  assert gathers[0].output_bytes == N * plan.sent_bytes
  assert gathers[0].received_bytes == plan.received_bytes
  assert gathers[0].group_size == N
  rest = [c for c in found if c.kind != 'all-gather']
  assert [c.kind for c in rest] == ['all-reduce']  # the mean of the loss
  assert rest[0].output_bytes == 4
  # Averaging, for contrast, does send everything.
  tx = optax.chain(demo_optax.average(workers=workers), optax.sgd(1.))
  state = tx.init(params)
  dense = hlo_text.collectives(train_step_of(tx, loss_fn, workers).lower(
      params, state, x).compile())
  assert sum(c.received_bytes for c in dense) >= plan.dense_bytes()


def train_step_of(tx, loss_fn, workers):
  @jax.jit
  def train_step(params, state, x):
    loss, gradients = worker_grads(loss_fn, workers)(params, x)
    updates, state = tx.update(gradients, state, params)
    return loss, optax.apply_updates(params, updates), state
  return train_step


def test_transform_is_in_full_precision():
  """The default precision is bfloat16 on TPUs and TF32 on GPUs."""
  workers = demo_optax.Workers.simulated(2)
  tx = make_tx(workers)
  params = random_tree(0)
  jaxpr = str(jax.make_jaxpr(tx.update)(
      random_tree(1, lead=(2,)), tx.init(params), params))
  assert jaxpr.count('dot_general') > 0
  assert jaxpr.count('dot_general') == jaxpr.count('precision=(Precision.HIGHEST')


def test_no_scatter_writes_a_place_twice():
  """Floats are added by scatters whose indices are unique, ints as they are."""
  workers = demo_optax.Workers.simulated(N)
  tx = make_tx(workers)
  params = random_tree(0)
  text = jax.jit(tx.update).lower(
      random_tree(1, lead=(N,)), tx.init(params), params).as_text()
  scatters = text.split('"stablehlo.scatter"')[1:]
  assert scatters
  for scatter in scatters:
    body = scatter[: scatter.index('stablehlo.return')]
    floats = 'tensor<f32>' in body[body.index('^bb0'):]
    assert 'unique_indices = true' in body or not floats
