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
from helpers import make_workers, random_tree, resized, stacked
from jax.sharding import PartitionSpec as P

import demo_optax

FOUR = demo_optax.Workers.simulated(4)


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

  match = {
    'statistics': 'batch_stats, .* differs',
    'values': r'positive, int32\[\], which differs',
  }[what]
  with pytest.raises(ValueError, match=match):
    step({'batch_stats': jnp.int32(0)}, rows())


# over_workers --------------------------------------------------------------------


def test_means_and_sums_of_every_dtype(workers):
  """Keys of worker 0 come back; on a mesh four times 100 was -112."""

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    state = {**state, 'mean': x.mean(), 'count': state['count'] + 1}
    noise = jax.random.normal(state['seed'], (x.shape[0],))
    narrow = jnp.full_like(x, 100).astype(jnp.int8)[0, 0]
    return (
      demo_optax.over_workers(state),
      demo_optax.out_batch((noise, x[:, 0])),
      demo_optax.over_workers(narrow, jnp.sum),
    )

  state = {
    'mean': jnp.zeros(()),
    'count': jnp.int32(2**24),
    'first': jnp.array(True),
    'seed': jax.random.key(1),
  }
  after, (noise, _), total = step(state, rows())
  assert [after[k].dtype for k in state] == [state[k].dtype for k in state]
  assert after['count'] == 2**24 + 1 and after['first']
  np.testing.assert_allclose(after['mean'], rows().mean(), atol=1e-6)
  assert total == 400 and total.dtype == jnp.int32
  assert len(set(np.asarray(noise).tolist())) == 16
  expected = jax.random.normal(after['seed'], (4,))
  np.testing.assert_array_equal(np.asarray(noise)[:4], expected)


# Keys --------------------------------------------------------------------------


class Noise(nnx.Variable):
  """Of a class of one's own."""


class Noisy(nnx.Module):
  def __init__(self, key):
    self.noise_key = Noise(key)


@pytest.mark.parametrize('hold', [Noisy, lambda key: nnx.state(Noisy(key))])
def test_workers_draw_by_keys_of_their_own(hold):
  @demo_optax.data_parallel(FOUR, batch_argnums=1)
  def step(state, x):
    values = nnx.state(state) if isinstance(state, Noisy) else state
    (key,), tree = jax.tree.flatten(values)
    key, own = jax.random.split(key)
    values = jax.tree.unflatten(tree, [key])
    noise = demo_optax.out_batch(jax.random.normal(own, x.shape[:1]))
    if isinstance(state, Noisy):
      nnx.update(state, values)
      return state, noise
    return values, noise

  state, drawn = hold(jax.random.key(0)), []
  for _ in range(3):
    state, noise = step(state, rows())
    drawn += np.asarray(noise).tolist()
  assert len(set(drawn)) == 48


def test_a_pair_in_a_batch_is_data():
  """Labels of two rows were folded as a key, and not cut."""
  workers = demo_optax.Workers.simulated(2)

  @demo_optax.data_parallel(workers, batch_argnums=0)
  def step(batch):
    return demo_optax.out_batch(batch['label'])

  seen = step(
    {'x': np.ones((2, 3), np.float32), 'label': np.array([5, 7], np.uint32)}
  )
  np.testing.assert_array_equal(seen, [5, 7])


def test_a_counter_in_two_words_is_data(workers):
  """It came back as a hash."""

  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(tokens, x):
    return {'seen': tokens['seen'] + jnp.uint32(1)}, x.mean()

  after, _ = step({'seen': jnp.zeros(2, jnp.uint32)}, rows())
  np.testing.assert_array_equal(after['seen'], [1, 1])


# Noise of each worker's own ------------------------------------------------------


@pytest.mark.parametrize(
  'workers, local',
  [
    ('simulated', True),
    *((x, False) for x in ('simulated', 'auto', 'explicit')),
  ],
  indirect=['workers'],
)
def test_each_worker_draws_noise_of_its_own(workers, local):
  """All drew the same: the mean of four had the noise of one."""
  noise = optax.add_noise(1.0, 0.0, jax.random.key(0))
  mean = optax.chain(
    demo_optax.average_gradients(workers=workers), optax.sgd(1.0)
  )
  if local:
    inner = optax.chain(noise, optax.sgd(1.0))
    tx = demo_optax.local.local_updates(inner, mean, 1, workers=workers)
  else:
    tx = optax.chain(demo_optax.per_worker(noise, workers=workers), mean)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, x):
    loss_fn = lambda params: jnp.mean(x) * jnp.sum(params['w'])
    return advance(tx, params, state, loss_fn=loss_fn)[:2]

  params, state = (
    {'w': jnp.zeros((64, 64))},
    tx.init({'w': jnp.zeros((64, 64))}),
  )
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


def test_more_workers_have_keys_of_their_own(workers):
  noise = optax.add_noise(1.0, 0.0, jax.random.key(0))
  state = demo_optax.per_worker(noise, workers=workers).init(jnp.zeros(3))
  for n in (2, 8):
    keys = resized(state, n).worker_stacked.rng_key
    data = np.asarray(jax.random.key_data(keys)).reshape(n, -1)
    assert len(np.unique(data, axis=0)) == n


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


@pytest.mark.parametrize('workers', ['simulated', 'explicit'], indirect=True)
def test_a_scan_of_steps(workers):
  """Steps were cut: 10 updates instead of 40, and their losses were joined.

  Asked for, the first axis is cut whatever the step does with it.
  """
  tx = optax.chain(
    demo_optax.average_gradients(workers=workers), optax.sgd(0.1)
  )
  params = {'w': jnp.zeros(8)}
  x = rows(40 * 16).reshape(40, 16, 8)
  wrap = functools.partial(
    demo_optax.data_parallel, workers, batch_argnames='batches'
  )
  with pytest.raises(ValueError, match='must have its rows .*batch_axis=1'):
    make_epoch(tx, wrap())(params, tx.init(params), x)
  alone = make_epoch(optax.sgd(0.1), jax.jit, mean=lambda x: x)
  expected, _, losses = alone(params, optax.sgd(0.1).init(params), x)
  epoch = make_epoch(tx, wrap(batch_axis={'batches': 1}))
  after, _, seen = epoch(params, tx.init(params), x)
  np.testing.assert_allclose(after['w'], expected['w'], atol=1e-5)
  np.testing.assert_allclose(seen, losses, rtol=1e-5)
  each_row = make_epoch(tx, wrap(batch_axis=0), demo_optax.out_batch)
  _, _, losses = each_row(params, tx.init(params), rows())
  assert losses.shape == (16,)


@pytest.mark.parametrize('how', ['micro', 'per row', 'reshaped', 'cast'])
def test_scans_that_are_no_steps(how):
  tx = demo_optax.demo(0.1, workers=FOUR)

  @demo_optax.data_parallel(FOUR, batch_argnames='x')
  def step(params, state, x):
    def update(carry, x):
      return advance(tx, *carry, x)[:2], None

    if how in ('reshaped', 'cast'):
      x = (
        x.reshape(2, 2, 8)
        if how == 'reshaped'
        else (x.astype(jnp.bfloat16).astype(jnp.float32))
      )
      return jax.lax.scan(update, (params, state), x)[0]
    parts = x if how == 'per row' else x.reshape(2, 2, 8)
    _, grads = jax.lax.scan(
      lambda _, x: (None, jax.grad(to_one)(params, x)), None, parts
    )
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
    weighed = (x.sum(2) * weights[None]).mean()
    return x.mean(), demo_optax.out_batch(2 * x), weighed, jnp.arange(3)

  x = rows(3 * 16, 2).reshape(3, 16, 2)
  mean, twice, weighed, equal = step(x, np.arange(16, dtype=np.float32))
  np.testing.assert_array_equal(equal, np.arange(3))
  np.testing.assert_allclose(mean, x.mean(), atol=1e-6)
  np.testing.assert_array_equal(twice, 2 * x)
  np.testing.assert_allclose(
    weighed, (x.sum(2) * np.arange(16)).mean(), rtol=1e-4
  )


# No batch ------------------------------------------------------------------------


@pytest.mark.parametrize('workers', ['simulated', 'explicit'], indirect=True)
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

  params, table = {'w': jnp.zeros(8)}, np.eye(8, dtype=np.float32)
  if workers.mesh is not None:  # spread over the workers, as large data is
    table = jax.device_put(table, workers.sharding(P(workers.axis_name)))
  params, _, key, loss, spread = step(
    jax.random.key(0), params, tx.init(params), table
  )
  assert spread > 0 and loss.shape == () and np.any(np.asarray(params['w']))
  with pytest.raises(ValueError, match=r'(?s)differs.*over_workers\(x'):
    demo_optax.data_parallel(workers, batch_argnums=())(
      lambda key: jax.random.normal(key, (16,))
    )(key)


# Weights loaded within a period --------------------------------------------------


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
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


@pytest.mark.parametrize(
  'how, count', [('update', 8), ('step', 8), ('step', 32)]
)
def test_sums_have_the_same_bits_in_every_map(how, count):
  """XLA adds a mapped axis in an order of its own from eight workers on."""
  shapes = {'a': (5000,), 'b': (7, 3), 'large': (140, 140)}
  grads = random_tree(0, shapes, lead=(count,))
  params = {k: jnp.zeros(s) for k, s in shapes.items()}

  def run(workers):
    tx = demo_optax.average_gradients(workers=workers)
    state = tx.init(params)
    if how == 'update':
      return jax.jit(tx.update)(grads, state, params)[0]
    update = lambda state, grads: tx.update(
      jax.tree.map(lambda g: g[0], grads), state, params
    )[0]
    return demo_optax.data_parallel(workers, batch_argnums=1)(update)(
      workers.device_put(state), grads
    )

  found = [
    run(demo_optax.Workers.simulated(count)),
    run(demo_optax.Workers.simulated(count, P(), {'f': 2})),
  ]
  axis = demo_optax.average_gradients(
    workers=demo_optax.Workers.on_axis('data')
  )
  found.append(
    jax.tree.map(
      lambda x: x[0],
      jax.jit(
        jax.vmap(
          lambda grads: axis.update(grads, axis.init(params), params)[0],
          axis_name='data',
        )
      )(grads),
    )
  )
  if count == 8:
    for kind in ('auto', 'explicit'):
      with make_workers(kind, count) as workers:
        found.append(run(workers))
  for updates in found:
    for name in ('a', 'b'):
      expected = functools.reduce(np.add, grads[name]) * np.float32(1 / count)
      np.testing.assert_array_equal(np.asarray(updates[name]), expected)
    np.testing.assert_allclose(
      updates['large'], grads['large'].mean(0), atol=1e-6
    )


# Lines that need not change ------------------------------------------------------


@pytest.mark.parametrize(
  'workers, recipe, inside',
  [
    ('simulated', demo_optax.demo, True),
    ('explicit', demo_optax.demo, False),
    ('auto', demo_optax.demo_muon, False),
  ],
  indirect=['workers'],
)
def test_updates_without_parameters(workers, recipe, inside):
  """As Adam and SGD take them; with weight decay it is optax's error."""
  params = {'w': jnp.ones((8, 8)), 'still': jnp.ones(3)}
  compressor = {
    'w': demo_optax.dct_topk(8, 4),
    'still': demo_optax.compressors.FROZEN,
  }
  tx = recipe(0.1, workers=workers, compressor=compressor)
  shapes = {k: x.shape for k, x in params.items()}
  grads = stacked(random_tree(0, shapes, lead=(4,)), workers)

  def step(params, state, x, given):
    loss_fn = lambda p: (
      jnp.mean((x @ p['w']) ** 2) + x.mean() * p['still'].sum()
    )
    grads = jax.grad(loss_fn)(params)
    return tx.update(grads, state, params if given else None)

  state, update = tx.init(params), jax.jit(tx.update)
  found = [
    demo_optax.data_parallel(workers, batch_argnums=2)(
      functools.partial(step, given=given)
    )(params, state, rows())
    if inside
    else update(grads, state, *[params] * given)
    for given in (True, False)
  ]
  jax.tree.map(np.testing.assert_array_equal, *found)
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
      weights * ((batch.x @ params['w'])[:, 0] - batch.y) ** 2
    )
    updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
    return optax.apply_updates(params, updates), state

  tx = demo_optax.demo(0.1, workers=workers)
  params, x = {'w': jnp.ones((8, 1))}, rows()
  arguments = params, tx.init(params), Batch(x, x[:, 0]), np.ones_like(x[:, 0])
  step = demo_optax.data_parallel(workers, batch_argnums=(2, 3))(step)
  step.lower(*arguments)


def test_keys_of_workers_are_not_those_of_a_split():
  key = jax.random.key(0)
  own = demo_optax.data_parallel(FOUR, batch_argnums=1)(
    lambda key, x: demo_optax.out_batch(x + jax.random.normal(key, (1,)))
  )(key, np.zeros(4, np.float32))
  split = [jax.random.normal(k, ()) for k in jax.random.split(key, 4)]
  assert not set(np.asarray(own).tolist()) & set(map(float, split))


def test_a_step_that_compiles_again_and_again_warns():
  class Trainer:
    @demo_optax.data_parallel(demo_optax.Workers.simulated(2), batch_argnums=1)
    def step(self, x):
      return x.mean()

  assert float(Trainer().step(np.arange(8, dtype=np.float32))) == 3.5
  with pytest.warns(UserWarning, match='20 programs.* self of a method'):
    for _ in range(20):
      Trainer().step.func.lower(Trainer(), np.ones(4, np.float32))
