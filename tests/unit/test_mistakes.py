"""Mistakes are loud: each error names the value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh, on_mesh, random_tree
from jax.sharding import PartitionSpec as P

import demo_optax

pytestmark = pytest.mark.core

N = 4
WORKERS = demo_optax.Workers.simulated(N)
SHAPES = {'w': (8, 8), 'b': (8,)}
PARAMS = {'w': jnp.ones((8, 8)), 'b': jnp.ones(8)}


@pytest.mark.parametrize('make, error, match', [
    (lambda: demo_optax.dct_topk(chunk_size=0), ValueError, 'chunk_size=0'),
    (lambda: demo_optax.dct_topk(topk=0), ValueError, 'topk=0'),
    (lambda: demo_optax.dct_topk(topk=-3), ValueError, 'topk=-3'),
    (lambda: demo_optax.dct_topk(chunk_size=64.0), TypeError, '64.0'),
    (lambda: demo_optax.dct_topk(values='int3'), ValueError, "'int3'.*float32"),
    (lambda: demo_optax.demo(1e-3, workers=WORKERS, decay=1.0), ValueError,
     r'decay=1.0 is not in \[0, 1\)'),
    (lambda: demo_optax.demo(1e-3, workers=WORKERS, decay=-0.1), ValueError,
     'decay=-0.1'),
    (lambda: demo_optax.demo(1e-3, workers=WORKERS, decay='fast'), TypeError,
     "decay='fast'"),
    (lambda: demo_optax.demo(-1e-3, workers=WORKERS), ValueError,
     r'learning_rate=-0.001 is not in \[0, inf\)'),
    (lambda: demo_optax.demo('1e-3', workers=WORKERS), TypeError,
     "learning_rate='1e-3' must be a number"),
    (lambda: demo_optax.demo(1e-3, workers=WORKERS, weight_decay=-1.),
     ValueError, 'weight_decay=-1'),
    (lambda: demo_optax.scale_by_demo(workers=WORKERS, alpha=1.5), ValueError,
     r'alpha=1.5 is not in \[0, 1\]'),
    (lambda: demo_optax.scale_by_demo(workers=WORKERS, average='mean'),
     ValueError, "average='mean'"),
    (lambda: demo_optax.scale_by_demo(workers=4), TypeError,
     'workers=4 .*Workers.simulated'),
    (lambda: demo_optax.scale_by_demo(64, workers=WORKERS), TypeError,
     'compressor=64 .*dct_topk'),
    (lambda: demo_optax.Workers.simulated(0), ValueError, 'num_workers=0'),
    (lambda: demo_optax.Workers.simulated(2.0), TypeError, 'num_workers=2.0'),
    (lambda: demo_optax.Workers.on_mesh(make_mesh(2), 'model'), ValueError,
     r"no axis 'model'.*data"),
    (lambda: demo_optax.Workers.on_axis(3), TypeError, 'axis_name=3'),
    (lambda: demo_optax.average(workers=None), TypeError, 'None'),
    (lambda: demo_optax.per_worker(optax.identity(), workers='x'), TypeError,
     "'x'"),
])
def test_at_the_factory(make, error, match):
  with pytest.raises(error, match=match):
    make()


def test_a_range_is_not_checked_for_what_is_traced():
  jax.jit(lambda d: demo_optax.scale_by_demo(
      decay=d, workers=WORKERS).init(PARAMS).count)(0.5)


LINKS = {
    'demo': lambda w: demo_optax.demo(1e-3, workers=w),
    'scale_by_demo': lambda w: demo_optax.scale_by_demo(workers=w),
    'average': lambda w: demo_optax.average(workers=w),
    'per_worker': lambda w: demo_optax.per_worker(
        optax.clip_by_global_norm(1.0), workers=w),
}


@pytest.mark.parametrize('link', LINKS)
@pytest.mark.parametrize('workers', [WORKERS, on_mesh(N)], ids=['sim', 'mesh'])
def test_averaged_gradients_are_refused(link, workers):
  tx = LINKS[link](workers)
  averaged = random_tree(0, SHAPES)
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match=r"\['b'\] has shape \(8,\).*\(4, 8\)"):
    tx.update(averaged, state, PARAMS)
  if link != 'demo':  # without params, where the shapes still tell
    with pytest.raises(ValueError, match='one'):
      tx.update(averaged, state)


def test_averaged_gradients_that_look_stacked_are_refused():
  """A parameter's first dimension may equal the number of workers."""
  params = jnp.ones((N, 16))
  tx = demo_optax.scale_by_demo(workers=WORKERS)
  with pytest.raises(ValueError, match='averaged'):
    tx.update(jnp.ones((N, 16)), tx.init(params))


def test_gradients_summed_by_shard_map_are_refused():
  """jax.grad of replicated parameters in a checked shard_map sums them."""
  who = demo_optax.Workers.on_axis('data')
  tx = demo_optax.scale_by_demo(workers=who)

  def step(params, x):
    state = tx.init(params)
    gradients = jax.grad(lambda p: jnp.sum(x @ p['w']) + jnp.sum(p['b']))(params)
    return tx.update(gradients, state, params)[0]

  mapped = jax.shard_map(step, mesh=make_mesh(N), in_specs=(P(), P('data')),
                         out_specs=P())
  with pytest.raises(ValueError, match=r"before it reached.*pcast"):
    jax.jit(mapped)(PARAMS, jnp.ones((N, 8)))


def test_stacked_gradients_on_an_axis_are_refused():
  who = demo_optax.Workers.on_axis('data')
  tx = demo_optax.scale_by_demo(workers=who)

  def step(gradients):
    return tx.update(gradients, tx.init(PARAMS), PARAMS)[0]

  stacked = random_tree(0, SHAPES, (2, 1))
  with pytest.raises(ValueError, match="worker's own gradient, unstacked"):
    jax.vmap(step, axis_name='data')(stacked)


def test_an_axis_that_is_not_mapped():
  who = demo_optax.Workers.on_axis('data')
  tx = demo_optax.scale_by_demo(workers=who)
  state = tx.init(PARAMS)  # shapes only: works
  with pytest.raises(ValueError, match="'data' is not mapped.*on_mesh"):
    tx.update(PARAMS, state, PARAMS)


def test_another_number_of_workers():
  state = demo_optax.scale_by_demo(
      workers=demo_optax.Workers.simulated(2)).init(PARAMS)
  tx = demo_optax.scale_by_demo(workers=WORKERS)
  with pytest.raises(ValueError, match='of 2 workers.*has 4'):
    tx.update(random_tree(0, SHAPES, (N,)), state, PARAMS)


def test_another_compressor():
  state = demo_optax.scale_by_demo(
      demo_optax.dct_topk(4, 2), workers=WORKERS).init(PARAMS)
  tx = demo_optax.scale_by_demo(workers=WORKERS)
  with pytest.raises(ValueError, match='chunks of 4x4 in the state, chunks of 8x8 in the'):
    tx.update(random_tree(0, SHAPES, (N,)), state, PARAMS)


def test_another_tree():
  tx = demo_optax.scale_by_demo(workers=WORKERS)
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match=r'b: float32\[8\] in the state, nothing in the'):
    tx.update({'w': jnp.ones((N, 8, 8))}, state)


def test_weight_decay_needs_params():
  tx = demo_optax.demo(1e-3, workers=WORKERS, weight_decay=0.1)
  with pytest.raises(ValueError, match='params'):
    tx.update(random_tree(0, SHAPES, (N,)), tx.init(PARAMS))


def test_complex_leaves():
  tx = demo_optax.scale_by_demo(workers=WORKERS)
  with pytest.raises(TypeError, match=r"\['z'\] is complex64.*real"):
    tx.init({'z': jnp.ones(3, jnp.complex64)})
  with pytest.raises(TypeError, match='complex'):
    demo_optax.state_specs(
        tx, {'z': jnp.ones(3, jnp.complex64)}, WORKERS)


def test_momentum_of_a_state_without_one():
  state = optax.adam(1e-3).init(PARAMS)
  with pytest.raises(ValueError, match='no state of'):
    demo_optax.state.momentum(state)


# What does not compose: the rows of the table in docs/errors.md ------------------------


def test_row_multi_steps():
  """Says no to stacked gradients; data_parallel is what takes it."""
  tx = optax.MultiSteps(demo_optax.demo(1e-3, workers=WORKERS), 2)
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match='one gradient per worker'):
    tx.update(random_tree(0, SHAPES, (N,)), state, PARAMS)


def test_row_apply_if_finite():
  """Says no; the exchange does it by itself (test_exchange)."""
  tx = optax.apply_if_finite(demo_optax.demo(1e-3, workers=WORKERS), 3)
  state = tx.init(PARAMS)
  with pytest.raises(TypeError, match='equal types|same type|match'):
    jax.jit(tx.update)(random_tree(0, SHAPES, (N,)), state, PARAMS)


def test_row_clip_before_the_exchange():
  """A plain clip takes one norm over all workers; per_worker does not."""
  gradients = random_tree(0, SHAPES, (N,))
  clip = optax.clip_by_global_norm(1.0)
  together, _ = clip.update(gradients, clip.init(PARAMS))
  own = demo_optax.per_worker(clip, workers=WORKERS)
  apart, _ = own.update(gradients, own.init(PARAMS), PARAMS)
  norm = lambda tree, w: float(
      optax.tree.norm(jax.tree.map(lambda g: g[w], tree)))
  assert norm(together, 0) < 0.7
  assert norm(apart, 0) == pytest.approx(1.0, rel=1e-5)


def test_row_labels_by_number_of_dimensions():
  """They are called with stacked gradients, too, in a step of all workers."""
  def labels(tree):
    return jax.tree.map(lambda x: 'x' if jnp.ndim(x) > 1 else 'd', tree)

  mean = demo_optax.average(workers=WORKERS)
  tx = optax.partition(
      {'x': demo_optax.scale_by_demo(workers=WORKERS),
       'd': optax.chain(mean, optax.sgd(0.1))}, labels)
  with pytest.raises(ValueError, match='b: nothing in the state, float32'):
    tx.update(random_tree(0, SHAPES, (N,)), tx.init(PARAMS), PARAMS)


def test_row_inject_hyperparams_in_bfloat16():
  """optax casts hyperparameters to the parameters' dtype: 0.999 becomes 1."""
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  make = lambda **kw: optax.inject_hyperparams(demo_optax.demo, **kw)(
      learning_rate=1e-3, decay=0.999, workers=WORKERS)
  for init in (make().init, jax.jit(make().init)):
    with pytest.raises(ValueError, match='hyperparam_dtype'):
      init(params)
  state = jax.jit(make(hyperparam_dtype=jnp.float32).init)(params)
  assert float(state.hyperparams['decay']) == np.float32(0.999)


def test_row_partition():
  """A dense branch without its mean grows parameters; with it, it is right."""
  labels = {'w': 'exchanged', 'b': 'averaged'}
  exchanged = demo_optax.demo(1e-3, workers=WORKERS)
  gradients = random_tree(0, SHAPES, (N,))
  wrong = optax.partition(
      {'exchanged': exchanged, 'averaged': optax.sgd(0.1)}, labels)
  updates, _ = wrong.update(gradients, wrong.init(PARAMS), PARAMS)
  assert updates['b'].shape == (N, 8)  # optax does not look at shapes
  mean = demo_optax.average(workers=WORKERS)
  right = optax.partition(
      {'exchanged': exchanged, 'averaged': optax.chain(mean, optax.sgd(0.1))},
      labels)
  updates, _ = right.update(gradients, right.init(PARAMS), PARAMS)
  np.testing.assert_allclose(
      updates['b'], -0.1 * gradients['b'].mean(0), rtol=1e-5)
