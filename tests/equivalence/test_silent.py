"""What went wrong without a word in other people's training code."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import make_mesh_2d, make_step, make_workers, resized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax


@pytest.fixture(params=['simulated', 'auto', 'explicit'])
def workers(request):
  with make_workers(request.param, 4) as workers:
    yield workers


def rows(count=16, columns=8):
  rng = np.random.default_rng(0)
  return rng.normal(size=(count, columns)).astype(np.float32)


def to_one(params, x):
  return jnp.mean((x @ params['w'] - 1) ** 2)


def advance(tx, params, state, *args, loss_fn=to_one):
  """The usual lines of a step."""
  loss, grads = jax.value_and_grad(loss_fn)(params, *args)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state, loss


def test_means_of_large_halves_are_finite(workers):
  """Scaled losses, statistics: the sum of four is beyond float16."""
  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    mean = x.mean().astype(jnp.float16)
    return mean, demo_optax.over_workers(mean), {'batch_stats': mean}

  x = np.array([30000, 30208, 30464, 30464], np.float32)
  for mean in jax.tree.leaves(step({'batch_stats': jnp.float16(0)}, x)):
    assert mean.dtype == jnp.float16
    np.testing.assert_array_equal(mean, np.float16(x.mean()))


@pytest.mark.parametrize('what', ['statistics', 'values'])
def test_integers_that_differ_have_no_mean(workers, what):
  """A count in statistics that differed became 0."""
  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    count = (x > 0).sum()
    if what == 'values':
      return demo_optax.over_workers({'positive': count})
    return {'batch_stats': state['batch_stats'] + count}

  match = {'statistics': 'batch_stats differs',
           'values': r"'positive'\], int32\[\], which differs"}[what]
  with pytest.raises(ValueError, match=match):
    step({'batch_stats': jnp.int32(0)}, rows())


# over_workers --------------------------------------------------------------------


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey])
def test_means_and_sums_of_every_dtype(workers, make):
  """Keys of worker 0 come back; on a mesh four times 100 was -112."""
  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    state = {**state, 'mean': x.mean(), 'count': state['count'] + 1}
    noise = jax.random.normal(state['seed'], (x.shape[0],))
    narrow = jnp.full_like(x, 100).astype(jnp.int8)[0, 0]
    return (demo_optax.over_workers(state), noise, x[:, 0],
            demo_optax.over_workers(narrow, jnp.sum))

  state = {'mean': jnp.zeros(()), 'count': jnp.int32(2**24),
           'first': jnp.array(True), 'seed': make(1)}
  after, noise, _, total = step(state, rows())
  assert [after[k].dtype for k in state] == [state[k].dtype for k in state]
  assert after['count'] == 2**24 + 1 and after['first']
  np.testing.assert_allclose(after['mean'], rows().mean(), atol=1e-6)
  assert total == 400 and total.dtype == jnp.int32
  assert len(set(np.asarray(noise).tolist())) == 16
  expected = jax.random.normal(after['seed'], (4,))
  np.testing.assert_array_equal(np.asarray(noise)[:4], expected)


def test_statistics_and_seeds_of_keras(workers):
  """One list has both; the seed became float32 and stood still."""
  @demo_optax.data_parallel(workers, batch_argnums=1, keys='state.1.1')
  def step(state, x):
    params, (mean, seed) = state
    noise = jax.random.normal(seed, x.shape[:1])
    others = [0.9 * mean + 0.1 * x.mean(0), seed + jnp.array([0, 1], jnp.uint32)]
    others = [
        x if x.dtype == jnp.uint32 else demo_optax.over_workers(x)
        for x in others
    ]
    return (params, others), noise

  state = jnp.ones(8), [jnp.zeros(8), jax.random.PRNGKey(0)]
  drawn = []
  for _ in range(3):
    state, noise = step(state, rows())
    drawn += np.asarray(noise).tolist()
    assert state[1][1].dtype == jnp.uint32
  assert len(set(drawn)) == 48


# Pairs of uint32 -----------------------------------------------------------------


def pair(*words):
  return np.array(words, np.uint32)


def test_a_pair_in_a_batch_is_data():
  """Labels of two rows were folded as a key, and not cut."""
  workers = demo_optax.Workers.simulated(2)

  @demo_optax.data_parallel(workers, batch_argnums=0)
  def step(batch):
    return batch['label']

  seen = step({'x': np.ones((2, 3), np.float32), 'label': pair(5, 7)})
  np.testing.assert_array_equal(seen, [5, 7])


@pytest.mark.parametrize('shape', [(2,), (3, 2)])
def test_a_pair_must_be_known_as_a_key_or_as_data(workers, shape):
  """A counter of 64 bits in two words came back as a hash."""
  def step(tokens, x):
    return {'seen': tokens['seen'] + jnp.uint32(1)}, x.mean()

  tokens = {'seen': jnp.zeros(shape, jnp.uint32)}
  wrap = lambda **options: demo_optax.data_parallel(
      workers, batch_argnums=1, **options)(step)
  with pytest.raises(ValueError, match=r"tokens.seen must be .*keys=\(\)"):
    wrap()(tokens, rows())
  with pytest.raises(ValueError, match=r"got 'tokens.other'"):
    wrap(keys='tokens.other')(tokens, rows())
  after, _ = wrap(keys=())(tokens, rows())
  np.testing.assert_array_equal(after['seen'], np.ones(shape))
  for keys in ('tokens.seen', ['tokens']):
    after, _ = wrap(keys=keys)(tokens, rows())
    assert np.min(after['seen']) > 1


@pytest.mark.parametrize('name', ['dropout_rng', 'seeds', 'rngKey', 'PRNGKey'])
def test_a_pair_whose_name_says_so_is_a_key(name):
  workers = demo_optax.Workers.simulated(4)

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    key, own = jax.random.split(state[name])
    return {name: key}, jax.random.normal(own, x.shape[:1])

  state, noise = step({name: jax.random.PRNGKey(0)}, rows())
  _, more = step(state, rows())
  assert len(np.unique([*noise, *more])) == 32
  with pytest.raises(ValueError, match='state.monkey must be'):
    step({'monkey': jax.random.PRNGKey(0)}, rows())


def test_a_legacy_key_among_inferred_arguments():
  workers = demo_optax.Workers.simulated(4)
  tx = demo_optax.demo(0.1, workers=workers)
  params = {'w': jnp.ones(8)}

  @demo_optax.data_parallel(workers)
  def step(params, opt_state, rng, x):
    rng, own = jax.random.split(rng)
    params, opt_state, _ = advance(tx, params, opt_state, x)
    return params, opt_state, rng, jax.random.normal(own, x.shape[:1])

  params, opt_state, rng, noise = step(
      params, tx.init(params), jax.random.PRNGKey(0), rows())
  assert rng.shape == (2,) and rng.dtype == jnp.uint32
  assert len(np.unique(noise)) == 16


# Noise of each worker's own ------------------------------------------------------


def add_noise(key):
  """As optax's, which takes new keys alone."""
  if key.dtype != jnp.uint32:
    return optax.add_noise(1.0, 0.0, key)

  def update(updates, key, params=None):
    new, own = jax.random.split(key['rng_key'])
    draw = lambda g: g + jax.random.normal(own, g.shape)
    return jax.tree.map(draw, updates), {'rng_key': new}

  return optax.GradientTransformation(lambda params: {'rng_key': key}, update)


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize('local', [False, True])
def test_each_worker_draws_noise_of_its_own(workers, make, local):
  """All drew the same: the mean of four had the noise of one."""
  noise = add_noise(make(0))
  mean = optax.chain(demo_optax.average(workers=workers), optax.sgd(1.0))
  if local:
    inner = optax.chain(noise, optax.sgd(1.0))
    tx = demo_optax.local.local_updates(inner, mean, 1, workers=workers)
  else:
    tx = optax.chain(demo_optax.per_worker(noise, workers=workers), mean)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, x):
    loss_fn = lambda params: jnp.mean(x) * jnp.sum(params['w'])
    return advance(tx, params, state, loss_fn=loss_fn)[:2]

  params, state = {'w': jnp.zeros((64, 64))}, tx.init({'w': jnp.zeros((64, 64))})
  seen = []
  with jax.numpy_dtype_promotion('standard'):
    for _ in range(2):
      before = params
      params, state = step(params, state, jnp.zeros((16, 8)))
      seen.append(np.asarray(params['w'] - before['w']))
      np.testing.assert_allclose(seen[-1].std(), 0.5, rtol=0.1)
  assert abs(np.corrcoef(seen[0].ravel(), seen[1].ravel())[0, 1]) < 0.1


def test_keys_outside_of_a_map_of_ones_own():
  workers = demo_optax.Workers.on_axis('data')
  tx = demo_optax.per_worker(optax.add_noise(1.0, 0.0, 0), workers=workers)
  params = jnp.zeros(3)
  with pytest.raises(ValueError, match='call this inside'):
    tx.init(params)
  state = jax.vmap(lambda _: tx.init(params), axis_name='data')(np.arange(4))
  keys = state.worker_stacked.rng_key
  assert len(np.unique(jax.random.key_data(keys), axis=0).reshape(-1)) >= 4


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize('kind', ['simulated', 'auto', 'explicit'])
def test_more_workers_have_keys_of_their_own(make, kind):
  with make_workers(kind, 4) as workers:
    noise = add_noise(make(0))
    state = demo_optax.per_worker(noise, workers=workers).init(jnp.zeros(3))
  for n in (2, 8):
    other = resized(state, n)
    (keys,) = (
        x for x in jax.tree.leaves(other) if x.dtype != jnp.int32)
    data = keys if keys.dtype == jnp.uint32 else jax.random.key_data(keys)
    assert len(np.unique(np.asarray(data).reshape(n, -1), axis=0)) == n


# Where the rows are --------------------------------------------------------------


def make_epoch(tx, wrap, mean=demo_optax.over_workers):
  """A whole epoch in one program, over batches `[steps, rows, ...]`."""
  def epoch(params, state, batches):
    def step(carry, x):
      params, state, loss = advance(tx, *carry, x)
      return (params, state), loss

    (params, state), losses = jax.lax.scan(step, (params, state), batches)
    return params, state, mean(losses)

  return wrap(epoch)


def test_a_scan_of_steps(workers):
  """Steps were cut: 10 updates instead of 40, and their losses were joined."""
  tx = optax.chain(demo_optax.average(workers=workers), optax.sgd(0.1))
  params = {'w': jnp.zeros(8)}
  x = rows(40 * 16).reshape(40, 16, 8)
  wrap = lambda **options: demo_optax.data_parallel(
      workers, batch_argnums=2, **options)
  with pytest.raises(ValueError, match='batches must have its rows .*batch_axis=1'):
    make_epoch(tx, wrap())(params, tx.init(params), x)
  alone = make_epoch(optax.sgd(0.1), jax.jit, mean=lambda x: x)
  expected, _, losses = alone(params, optax.sgd(0.1).init(params), x)
  axis = {'batches': 1}
  after, _, seen = make_epoch(tx, wrap(batch_axis=axis))(
      params, tx.init(params), x)
  np.testing.assert_allclose(after['w'], expected['w'], atol=1e-5)
  np.testing.assert_allclose(seen, losses, rtol=1e-5)


def test_a_step_of_each_row(workers):
  """Asked for, the first axis is cut whatever the step does with it."""
  tx = optax.chain(demo_optax.average(workers=workers), optax.sgd(0.1))
  params = {'w': jnp.zeros(8)}
  step = make_epoch(tx, demo_optax.data_parallel(
      workers, batch_argnums=2, batch_axis=0), mean=lambda x: x)
  _, _, losses = step(params, tx.init(params), rows())
  assert losses.shape == (16,)


@pytest.mark.parametrize('how', ['micro', 'per row', 'reshaped', 'cast'])
def test_scans_that_are_no_steps(how):
  workers = demo_optax.Workers.simulated(4)
  tx = demo_optax.demo(0.1, workers=workers)

  @demo_optax.data_parallel(workers)
  def step(params, state, x):
    def update(carry, x):
      return advance(tx, *carry, x)[:2], None

    if how == 'reshaped':
      return jax.lax.scan(update, (params, state), x.reshape(2, 2, 8))[0]
    if how == 'cast':
      return jax.lax.scan(update, (params, state), x.astype(jnp.bfloat16).astype(jnp.float32))[0]
    parts = x if how == 'per row' else x.reshape(2, 2, 8)
    _, grads = jax.lax.scan(
        lambda _, x: (None, jax.grad(to_one)(params, x)), None, parts)
    grads = jax.tree.map(lambda g: g.mean(0), grads)
    update = jax.jit(tx.update)  # nested, so that the program is looked at
    updates, state = update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = {'w': jnp.zeros(8)}
  if how == 'cast':
    with pytest.raises(ValueError, match='batch_axis'):
      step(params, tx.init(params), rows())
    return
  after, _ = step(params, tx.init(params), rows())
  assert np.any(np.asarray(after['w']))


def test_batches_that_are_time_major(workers):
  """[time, rows]: a worker had a quarter of the time of all sequences."""
  @demo_optax.data_parallel(workers, batch_argnums=(0, 1), batch_axis={'x': 1})
  def step(x, weights):
    assert x.shape == (3, 4, 2) and weights.shape == (4,)
    return x.mean(), 2 * x, (x.sum(2) * weights[None]).mean()

  x = rows(3 * 16, 2).reshape(3, 16, 2)
  mean, twice, weighed = step(x, np.arange(16, dtype=np.float32))
  np.testing.assert_allclose(mean, x.mean(), atol=1e-6)
  np.testing.assert_array_equal(twice, 2 * x)
  np.testing.assert_allclose(
      weighed, (x.sum(2) * np.arange(16)).mean(), rtol=1e-4)


@pytest.mark.parametrize('axis, match', [
    (1, r'axis of every batch, got 1 for x.1.'),
    ({'y': 1}, "got 'y', but the arguments")])
def test_axes_that_are_not_there(axis, match):
  workers = demo_optax.Workers.simulated(4)
  with pytest.raises(ValueError, match=match):
    @demo_optax.data_parallel(workers, batch_argnums=0, batch_axis=axis)
    def step(x):
      return x[0].mean()

    step((rows(4, 16), np.ones(16, np.float32)))


# No batch ------------------------------------------------------------------------


def test_a_step_that_draws_its_batch(workers):
  """It was refused, with a reason that was not true and no remedy."""
  tx = demo_optax.demo(0.1, workers=workers)
  data = rows(1000)

  @demo_optax.data_parallel(workers, batch_argnums=())
  def step(key, params, opt_state, table):
    key, own = jax.random.split(key)
    assert table.shape == (8, 8)
    x = jnp.asarray(data)[jax.random.randint(own, (16,), 0, 1000)]
    params, opt_state, loss = advance(tx, params, opt_state, x)
    largest = demo_optax.over_workers(x.max(), jnp.max)
    least = demo_optax.over_workers(x.max(), jnp.min)
    return params, opt_state, key, loss, largest - least

  params = {'w': jnp.zeros(8)}
  params, _, key, loss, spread = step(
      jax.random.key(0), params, tx.init(params), np.eye(8, dtype=np.float32))
  assert spread > 0 and loss.shape == () and np.any(np.asarray(params['w']))
  with pytest.raises(ValueError, match=r'no real number.*over_workers\(x'):
    demo_optax.data_parallel(workers, batch_argnums=())(
        lambda key: jax.random.normal(key, (16,)))(key)
  with pytest.raises(ValueError, match=r'random key, give batch_argnums=\(\)'):
    demo_optax.data_parallel(workers)(
        lambda params, state, key: params)(params, tx.init(params), key)


# Weights loaded within a period --------------------------------------------------


def test_loaded_weights_arrive_as_a_whole(workers):
  """Elements equal to the last shared ones kept what a worker had moved."""
  tx = demo_optax.local.diloco(optax.sgd(1.0), workers=workers, sync_period=100)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, x):
    loss_fn = lambda p: (p['a'].sum() + p['b'].sum()) * x.mean()
    return advance(tx, params, state, loss_fn=loss_fn)[:2]

  params = {'a': jnp.zeros(3), 'b': jnp.zeros(2)}
  state, x = tx.init(params), np.array([1, 2, 3, 4], np.float32)
  for _ in range(3):
    params, state = step(params, state, x)
  loaded = workers.device_put({'a': jnp.array([5.0, 0, 5]), 'b': jnp.zeros(2)})
  _, state = step(loaded, state, x)
  own = jax.tree.map(np.asarray, state.worker_stacked.params)
  np.testing.assert_array_equal(own['a'], np.array([[5, 0, 5]]) - x[:, None])
  np.testing.assert_array_equal(own['b'], np.zeros((4, 2)) - x[:, None])


# Sums in the order of the workers ------------------------------------------------


@pytest.mark.parametrize('how', ['update', 'step'])
@pytest.mark.parametrize('count', [8, 32])
def test_sums_have_the_same_bits_in_every_map(how, count):
  """XLA adds a mapped axis in an order of its own from eight workers on."""
  rng = np.random.default_rng(0)
  shapes = {'a': (5000,), 'b': (7, 3), 'large': (140, 140)}
  grads = {
      k: rng.normal(size=(count, *s)).astype(np.float32)
      for k, s in shapes.items()
  }
  params = {k: jnp.zeros(s) for k, s in shapes.items()}

  def run(workers, step=False):
    tx = demo_optax.average(workers=workers)
    state = tx.init(params)
    if not step:
      return jax.jit(tx.update)(grads, state, params)[0]
    update = lambda state, grads: tx.update(
        jax.tree.map(lambda g: g[0], grads), state, params)[0]
    return demo_optax.data_parallel(workers, batch_argnums=1)(update)(
        workers.device_put(state), grads)

  found = [
      run(demo_optax.Workers.simulated(count), how == 'step'),
      run(demo_optax.Workers.simulated(count, P(), {'f': 2}), how == 'step'),
  ]
  axis = demo_optax.average(workers=demo_optax.Workers.on_axis('data'))
  found.append(jax.tree.map(lambda x: x[0], jax.jit(jax.vmap(
      lambda grads: axis.update(grads, axis.init(params), params)[0],
      axis_name='data'))(grads)))
  if count == 8:
    for kind in ('auto', 'explicit'):
      with make_workers(kind, count) as workers:
        found.append(run(workers, how == 'step'))
  for name in ('a', 'b'):
    total = grads[name][0]
    for x in grads[name][1:]:
      total = total + x
    expected = total * np.float32(1 / count)
    for updates in found:
      np.testing.assert_array_equal(np.asarray(updates[name]), expected)
  for updates in found:
    np.testing.assert_allclose(
        updates['large'], grads['large'].mean(0), atol=1e-6)


# Lines that need not change ------------------------------------------------------


def test_an_averaged_baseline_in_the_same_step():
  """Its state was not known, and the step refused to guess."""
  workers = demo_optax.Workers.simulated(4)
  tx = optax.chain(demo_optax.average(workers=workers), optax.sgd(0.1))
  params = {'w': jnp.zeros(8)}
  after, *_ = make_step(tx, workers, to_one)(params, tx.init(params), rows())
  expected = jax.grad(lambda w: jnp.mean((rows() @ w - 1) ** 2))(params['w'])
  np.testing.assert_allclose(after['w'], -0.1 * expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('workers, recipe', [
    ('simulated', demo_optax.demo), ('explicit', demo_optax.demo),
    ('auto', demo_optax.demo_muon)], indirect=['workers'])
def test_updates_without_parameters(workers, recipe):
  """As Adam and SGD take them; with weight decay it is optax's error."""
  params = {'w': jnp.ones((8, 8)), 'sent': jnp.ones(3), 'still': jnp.ones(3)}
  compressor = {
      'w': demo_optax.dct_topk(8, 4), 'sent': demo_optax.dct_topk(3, 2),
      'still': demo_optax.compressors.FROZEN}
  tx = recipe(0.1, workers=workers, compressor=compressor)
  grads = jax.tree.map(
      lambda p: jnp.asarray(np.random.default_rng(0).normal(size=(4, *p.shape)),
                            jnp.float32), params)
  if workers.mesh is not None:
    grads = jax.device_put(grads, NamedSharding(workers.mesh, P('data')))

  def step(params, state, x, given):
    loss_fn = lambda p: jnp.mean((x @ p['w']) ** 2) + x.mean() * sum(
        p[k].sum() for k in ('sent', 'still'))
    grads = jax.grad(loss_fn)(params)
    return tx.update(grads, state, params if given else None)

  state, update = tx.init(params), jax.jit(tx.update)
  found = [
      demo_optax.data_parallel(workers, batch_argnums=2)(
          functools.partial(step, given=given))(params, state, rows())
      for given in (True, False)]
  jax.tree.map(np.testing.assert_array_equal, *found)
  jax.tree.map(np.testing.assert_array_equal,
               update(grads, state, params), update(grads, state))
  decayed = recipe(0.1, workers=workers, weight_decay=0.1)
  with pytest.raises(ValueError, match='params'):
    decayed.update(grads, decayed.init(params))


def test_a_batch_in_a_dataclass_beside_arrays(workers):
  """It was one batch for all workers, and the arrays were cut."""
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass
  class Batch:
    x: Any
    y: Any

  def step(params, state, batch, weights):
    loss_fn = lambda params: jnp.mean(
        weights * ((batch.x @ params['w'])[:, 0] - batch.y) ** 2)
    updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
    return optax.apply_updates(params, updates), state

  tx = demo_optax.demo(0.1, workers=workers)
  params = {'w': jnp.ones((8, 1))}
  x = rows()
  arguments = params, tx.init(params), Batch(x, x[:, 0]), np.ones_like(x[:, 0])
  with pytest.raises(ValueError, match='batch must be known as a batch or'):
    demo_optax.data_parallel(workers)(step)(*arguments)
  demo_optax.data_parallel(workers, batch_argnums=(2, 3))(step)(*arguments)


def test_keys_of_workers_are_not_those_of_a_split():
  workers = demo_optax.Workers.simulated(4)
  key = jax.random.key(0)
  own = demo_optax.data_parallel(workers, batch_argnums=1)(
      lambda key, x: x + jax.random.normal(key, (1,)))(key, np.zeros(4, np.float32))
  split = [jax.random.normal(k, ()) for k in jax.random.split(key, 4)]
  assert not set(np.asarray(own).tolist()) & set(map(float, split))


def test_a_step_that_compiles_again_and_again_warns():
  class Trainer:

    @demo_optax.data_parallel(
        demo_optax.Workers.simulated(2), batch_argnums=1)
    def step(self, x):
      return x.mean()

  assert float(Trainer().step(np.arange(8, dtype=np.float32))) == 3.5
  with pytest.warns(UserWarning, match='20 programs.* self of a method'):
    for _ in range(20):
      Trainer().step.func.lower(Trainer(), np.ones(4, np.float32))


def test_an_extra_argument_of_one_worker_is_named():
  workers = demo_optax.Workers.simulated(4)
  tx = optax.chain(
      demo_optax.demo(0.1, workers=workers),
      optax.contrib.reduce_on_plateau(patience=1))

  def make(value):
    @demo_optax.data_parallel(workers)
    def step(params, state, x):
      loss, grads = jax.value_and_grad(
          lambda params: jnp.mean((x @ params['w'] - 1) ** 2))(params)
      with jax.numpy_dtype_promotion('standard'):
        updates, state = tx.update(grads, state, params, value=value(loss))
      return optax.apply_updates(params, updates), state
    return step

  params = {'w': jnp.zeros(8)}
  with pytest.raises(ValueError, match=r'(?s)value=demo_optax.over_workers\(loss'):
    make(lambda loss: loss)(params, tx.init(params), rows())
  make(demo_optax.over_workers)(params, tx.init(params), rows())


def test_two_states_of_one_structure(workers):
  """The second had the first one's statistics where all was NaN, and the counts
  of one worker in metrics."""
  graph, empty = nnx.split(nnx.metrics.Average('loss'))

  @demo_optax.data_parallel(workers, batch_argnums=4)
  def step(student, teacher, first, second, x):
    mean = lambda state: {'batch_stats': state['batch_stats'] + x.mean()}
    seen = [nnx.merge(graph, first), nnx.merge(graph, second)]
    with jax.numpy_dtype_promotion('standard'):
      for scale, metric in enumerate(seen, 1):
        metric.update(loss=jnp.full(1, scale, jnp.float32))
    return mean(student), mean(teacher), *map(nnx.state, seen)

  stats = lambda x: {'batch_stats': jnp.float32(x).reshape(1)}
  student, teacher, *metrics = step(
      stats(1), stats(2), empty, empty, np.full(4, np.nan, np.float32))
  assert float(student['batch_stats'][0]) == 1
  assert float(teacher['batch_stats'][0]) == 2
  for value, state in enumerate(metrics, 1):
    assert float(state['total'].get_value()) == 4 * value
  only = demo_optax.data_parallel(workers, batch_argnums=2)(
      lambda first, second, x: jax.tree.map(lambda n: n + 1, second))
  with pytest.raises(ValueError, match='must return all of first, second'):
    only(empty, empty, rows())


def test_an_injected_beta_on_explicit_axes():
  """Closed over it kept its Explicit type, and no step could be traced."""
  def train(workers):
    tx = optax.inject_hyperparams(demo_optax.demo_muon)(
        0.1, workers=workers, beta=0.5)
    params = workers.device_put({'w': jnp.ones((8, 8))})
    step = make_step(tx, workers, to_one)
    return step(params, tx.init(params), rows())[0]['w']

  mesh = make_mesh_2d('explicit')
  with jax.set_mesh(mesh):
    found = train(demo_optax.Workers.on_mesh(mesh, 'data'))
  expected = train(demo_optax.Workers.simulated(2))
  np.testing.assert_allclose(found, expected, atol=1e-5)
