"""What went wrong without a word in other people's training code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_workers

import demo_optax


@pytest.fixture(params=['simulated', 'auto', 'explicit'])
def workers(request):
  with make_workers(request.param, 4) as workers:
    yield workers


def rows(count=16, columns=8):
  rng = np.random.default_rng(0)
  return rng.normal(size=(count, columns)).astype(np.float32)


def test_the_mean_of_large_halves_is_finite(workers):
  """Scaled losses in float16: the sum of four is beyond it, the mean is not."""
  @demo_optax.data_parallel(workers, batch_argnums=0)
  def step(x):
    loss = x.mean().astype(jnp.float16)
    return loss, demo_optax.over_workers(loss)

  x = np.full((8, 2), 30000, np.float32)
  for mean in step(x):
    assert mean.dtype == jnp.float16
    np.testing.assert_allclose(mean, 30000, rtol=1e-3)


# over_workers --------------------------------------------------------------------


def test_the_mean_keeps_dtypes(workers):
  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    state = {**state, 'mean': x.mean(), 'count': state['count'] + 1}
    return demo_optax.over_workers(state)

  state = {'mean': jnp.zeros(()), 'count': jnp.int32(2**24), 'first': jnp.array(True)}
  after = step(state, rows())
  assert [after[k].dtype for k in state] == [state[k].dtype for k in state]
  assert after['count'] == 2**24 + 1 and after['first']
  np.testing.assert_allclose(after['mean'], rows().mean(), atol=1e-6)


def test_integers_that_differ_have_no_mean(workers):
  @demo_optax.data_parallel(workers, batch_argnums=0)
  def step(x):
    return demo_optax.over_workers({'positive': (x > 0).sum()})

  with pytest.raises(ValueError, match=r"'positive'\], int32\[\], which differs"):
    step(rows())


@pytest.mark.parametrize('make', [jax.random.key, jax.random.PRNGKey])
def test_keys_have_no_mean(workers, make):
  """Those of worker 0 come back."""
  @demo_optax.data_parallel(workers, batch_argnums=1)
  def step(state, x):
    noise = jax.random.normal(state['seed'], (x.shape[0],))
    return demo_optax.over_workers(state), noise, x[:, 0]

  (after, noise, _) = step({'seed': make(1)}, rows())
  assert after['seed'].dtype == make(1).dtype
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
    loss_fn = lambda params: jnp.mean((x @ params['w']) ** 2)
    updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
    noise = jax.random.normal(own, x.shape[:1])
    return optax.apply_updates(params, updates), opt_state, rng, noise

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
    updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
    return optax.apply_updates(params, updates), state

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
    resized = demo_optax.checkpoint.resize_workers(state, n)
    (keys,) = (
        x for x in jax.tree.leaves(resized) if x.dtype != jnp.int32)
    data = keys if keys.dtype == jnp.uint32 else jax.random.key_data(keys)
    assert len(np.unique(np.asarray(data).reshape(n, -1), axis=0)) == n


def test_a_run_restored_with_more_workers_has_more_keys(tmp_path):
  four, eight = map(demo_optax.Workers.simulated, (4, 8))

  def make(workers):
    return optax.chain(
        demo_optax.per_worker(optax.add_noise(1.0, 0.0, 0), workers=workers),
        demo_optax.demo(0.1, workers=workers))

  params = {'w': jnp.ones((8, 8))}
  with demo_optax.checkpoint.Checkpointer(
      tmp_path / 'run', params, demo_optax.dct_topk(), four) as checkpointer:
    checkpointer.save(1, make(four).init(params))
  with demo_optax.checkpoint.Checkpointer(
      tmp_path / 'run', params, demo_optax.dct_topk(), eight) as checkpointer:
    _, state = checkpointer.restore(make(eight).init(params), resize=True)
  keys = jax.random.key_data(state[0].worker_stacked.rng_key)
  assert len(np.unique(keys, axis=0)) == 8
