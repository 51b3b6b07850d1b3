"""Mistakes that are not in the table of `common_errors.py`: each is loud."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import random_tree
from optax import contrib

import demo_optax
from demo_optax import compressors

N = 4
WORKERS = demo_optax.Workers.simulated(N)
SHAPES = {'w': (8, 8), 'b': (8,)}
PARAMS = {k: np.ones(s, np.float32) for k, s in SHAPES.items()}
NUMBERS = contrib.MuonDimensionNumbers


def demo(learning_rate=1e-3, **options):
  return demo_optax.demo(learning_rate, workers=WORKERS, **options)


def exchange(*args, **options):
  return demo_optax.scale_by_demo(*args, workers=WORKERS, **options)


def muon(learning_rate=0.1, **options):
  return demo_optax.demo_muon(learning_rate, workers=WORKERS, **options)


def init_muon(rule):
  """With a rule of what is a matrix."""
  muon(muon_weight_dimension_numbers=rule).init(PARAMS)


@pytest.mark.parametrize(
  'make, error, match',
  [
    (
      lambda: demo_optax.dct_topk(chunk_size=0),
      ValueError,
      'chunk_size must .* 0',
    ),
    (lambda: demo_optax.dct_topk(topk=0), ValueError, 'topk must .* 0'),
    (lambda: demo_optax.dct_topk(chunk_size=64.0), TypeError, '64.0'),
    (lambda: demo(decay=-0.1), ValueError, 'decay must .* -0.1'),
    (lambda: demo(decay='fast'), TypeError, "decay must .* 'fast'"),
    (
      lambda: demo(-1e-3),
      ValueError,
      r'learning_rate must be in \[0, inf\), got -0.001',
    ),
    (lambda: demo('1e-3'), TypeError, "must be a number, got '1e-3'"),
    (lambda: demo(weight_decay=-1.0), ValueError, 'weight_decay must .* -1'),
    (lambda: exchange(alpha=1.5), ValueError, r'be in \[0, 1\], got 1.5'),
    (lambda: exchange(average='mean'), ValueError, "average must .* 'mean'"),
    (lambda: exchange(64), TypeError, 'compressor must .* 64.*dct_topk'),
    (lambda: exchange({'a': 'dct'}), TypeError, 'must be a Compressor'),
    (
      lambda: exchange({'z': None}).init(PARAMS),
      ValueError,
      'compressor must be a tree like',
    ),
    *(
      (
        lambda name=name: exchange(**{name: {'w': 0.5, 'b': 0.1}}),
        TypeError,
        f'{name} must be a number',
      )
      for name in ('decay', 'gradient_weight')
    ),
    (
      lambda: demo(exchange='ring'),
      ValueError,
      "got 'ring'. Choose one of 'all",
    ),
    (
      lambda: demo_optax.dct_topk(values='ternary'),
      ValueError,
      "values must .* got 'ternary'",
    ),
    (
      lambda: compressors.RandomSubset(0.0),
      ValueError,
      r'rate must be in \(0, 1\], got 0.0',
    ),
    (lambda: compressors.Striding('all'), TypeError, "got 'all'"),
    (lambda: compressors.cyclic_signs(1), ValueError, 'period must .* 1'),
    (
      lambda: dataclasses.replace(compressors.full(), period=2.5),
      TypeError,
      'period must .* 2.5',
    ),
    (lambda: demo_optax.dct_topk((1, 2, 3)), ValueError, 'one number, or two'),
    (lambda: demo_optax.dct_topk((1, 2.5)), TypeError, 'got 2.5'),
    (
      lambda: demo_optax.Workers.simulated(0),
      ValueError,
      'num_workers must .* 0',
    ),
    (
      lambda: demo_optax.Workers.simulated(2.0),
      TypeError,
      'num_workers .* 2.0',
    ),
    (lambda: demo_optax.Workers.on_axis(3), TypeError, 'must be a str, got 3'),
    (lambda: demo_optax.average_gradients(workers=None), TypeError, 'None'),
    (
      lambda: demo_optax.per_worker(optax.identity(), workers='x'),
      TypeError,
      "'x'",
    ),
    (
      lambda: init_muon({'w': NUMBERS(), 'b': NUMBERS()}),
      ValueError,
      r'axes of b, .* shape \(8,\)',
    ),
    (
      lambda: init_muon({'w': NUMBERS(0, 2), 'b': None}),
      ValueError,
      r'axes of w, .* shape \(8, 8\)',
    ),
    (
      lambda: init_muon({'w': NUMBERS(0, -2), 'b': None}),
      ValueError,
      'each once',
    ),
    (
      lambda: demo_optax.recipes.muon_compressors(
        {'scale': jnp.ones(())}, muon_weight_dimension_numbers=NUMBERS()
      ),
      ValueError,
      r'axes of scale, .* shape \(\)',
    ),
    (lambda: init_muon({'w': 'muon', 'b': None}), TypeError, "got 'muon' for"),
    (
      lambda: init_muon({'w': None}),
      ValueError,
      'muon_weight_dimension_numbers',
    ),
    (lambda: muon(beta=1.0), ValueError, 'beta must be in'),
    (lambda: muon(weight_decay=-1.0), ValueError, 'weight_decay must .* -1.0'),
    (lambda: muon(mu_dtype=jnp.int8), ValueError, 'int8'),
    (
      lambda: muon(mu_dtype=jnp.float16),
      TypeError,
      'float16.* Use jnp.bfloat16',
    ),
    (lambda: muon(learning_rate=np.ones(3)), ValueError, r'of shape \(3,\)'),
    (
      lambda: muon(other_learning_rate=-1.0),
      ValueError,
      'other_learning_rate must .* -1.0',
    ),
  ],
)
def test_at_the_factory(make, error, match):
  with pytest.raises(error, match=match):
    make()


def test_a_range_is_not_checked_for_what_is_traced():
  jax.jit(lambda d: exchange(decay=d).init(PARAMS).count)(0.5)


def test_averaged_gradients_that_look_stacked_are_refused():
  """A parameter's first dimension may equal the number of workers."""
  params = jnp.ones((N, 16))
  for tx in (
    exchange(),
    demo_optax.average_gradients(workers=WORKERS),
    demo_optax.per_worker(optax.identity(), workers=WORKERS),
  ):
    with pytest.raises(ValueError, match=r'got \(4, 16\)|averaged'):
      tx.update(jnp.ones((N, 16)), tx.init(params), params)
  with pytest.raises(ValueError, match='averaged'):
    exchange().update(jnp.ones((N, 16)), exchange().init(params))


def test_what_is_stacked_is_refused_on_an_axis():
  """Gradients, and the momentum of all workers."""
  tx = demo_optax.scale_by_demo(workers=demo_optax.Workers.on_axis('data'))
  step = jax.vmap(tx.update, in_axes=(0, None, None), axis_name='data')
  with pytest.raises(ValueError, match="worker's own gradient, unstacked"):
    step(random_tree(0, SHAPES, (2, 1)), tx.init(PARAMS), PARAMS)
  with pytest.raises(
    ValueError, match=r'\[4, 1, 8\] in the state, \[1, 1, 8\] in the update'
  ):
    step(random_tree(0, SHAPES, (2,)), exchange().init(PARAMS), PARAMS)


def test_row_labels_by_number_of_dimensions():
  """They are called with stacked gradients, too, in a step of all workers."""

  def labels(tree):
    return jax.tree.map(lambda x: 'x' if jnp.ndim(x) > 1 else 'd', tree)

  mean = demo_optax.average_gradients(workers=WORKERS)
  tx = optax.partition(
    {'x': exchange(), 'd': optax.chain(mean, optax.sgd(0.1))}, labels
  )
  with pytest.raises(ValueError, match='b: nothing in the state, float32'):
    tx.update(random_tree(0, SHAPES, (N,)), tx.init(PARAMS), PARAMS)
