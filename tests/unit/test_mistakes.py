"""Mistakes that are not in the table of `common_errors.py`: each is loud."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import random_tree

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
    (lambda: demo_optax.scale_by_demo(64, workers=WORKERS), TypeError,
     'compressor=64 .*dct_topk'),
    (lambda: demo_optax.Workers.simulated(0), ValueError, 'num_workers=0'),
    (lambda: demo_optax.Workers.simulated(2.0), TypeError, 'num_workers=2.0'),
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


def test_averaged_gradients_that_look_stacked_are_refused():
  """A parameter's first dimension may equal the number of workers."""
  params = jnp.ones((N, 16))
  for tx in (demo_optax.scale_by_demo(workers=WORKERS),
             demo_optax.average(workers=WORKERS),
             demo_optax.per_worker(optax.identity(), workers=WORKERS)):
    with pytest.raises(ValueError, match=r'has shape \(4, 16\)|averaged'):
      tx.update(jnp.ones((N, 16)), tx.init(params), params)
  with pytest.raises(ValueError, match='averaged'):
    tx = demo_optax.scale_by_demo(workers=WORKERS)
    tx.update(jnp.ones((N, 16)), tx.init(params))


def test_stacked_gradients_on_an_axis_are_refused():
  who = demo_optax.Workers.on_axis('data')
  tx = demo_optax.scale_by_demo(workers=who)

  def step(gradients):
    return tx.update(gradients, tx.init(PARAMS), PARAMS)[0]

  stacked = random_tree(0, SHAPES, (2, 1))
  with pytest.raises(ValueError, match="worker's own gradient, unstacked"):
    jax.vmap(step, axis_name='data')(stacked)


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
