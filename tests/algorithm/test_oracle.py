"""Against the NumPy oracle: N workers, many steps, odd and padded shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

import demo_optax

SHAPES = {
  'scalar': (),
  'one': (1,),
  'short': (7,),
  'vector': (97,),
  'matrix': (24, 40),
  'padded_rows': (31, 16),
  'padded_both': (31, 37),
  'thin': (1, 53),
  'narrow': (97, 3),
  'scanned': (2, 17, 33),
  'kernel': (3, 3, 10, 20),
  'window': (7, 7, 3, 5),
  'heads': (32, 4, 8),
  'out': (4, 8, 24),
  'scanned_heads': (3, 16, 2, 8),
}

# Every way of being cut, for what does not depend on shapes.
FEW = {
  k: SHAPES[k]
  for k in ('scalar', 'vector', 'padded_both', 'kernel', 'scanned_heads')
}

# For what depends on shapes even less: a matrix and a vector.
TWO = {k: SHAPES[k] for k in ('vector', 'padded_both')}


def run(
  workers,
  steps,
  *,
  limit=16,
  topk=5,
  decay=0.9,
  seed=0,
  left_out=None,
  shapes=SHAPES,
  weights=None,
  **kwargs,
):
  """Yields (ours, oracle's) merged momentum, and at the end the momentum."""
  rng = np.random.default_rng(seed)
  padding, values = kwargs.pop('padding', True), kwargs.pop('values', 'float32')
  proportional = kwargs.pop('proportional', False)
  compressor = demo_optax.dct_topk(
    limit, topk, padding=padding, values=values, proportional=proportional
  )
  who = demo_optax.Workers.simulated(workers)
  tx = demo_optax.scale_by_demo(compressor, decay, workers=who, **kwargs)
  params = {k: jnp.zeros(s) for k, s in shapes.items()}
  state = tx.init(params)
  oracles = {
    k: Oracle(
      s,
      workers,
      limit=limit,
      topk=topk,
      decay=decay,
      padding=padding,
      values=values,
      of=limit**2 if proportional else None,
      **kwargs,
    )
    for k, s in shapes.items()
  }
  update = jax.jit(tx.update)
  for step in range(steps):
    gradients = {k: rng.normal(size=(workers, *s)) for k, s in shapes.items()}
    if left_out is not None and step % 3 == 1:
      for g in gradients.values():
        g[left_out] = np.nan if step % 2 else np.inf
    given = {}
    if weights is not None:  # other ones in every step
      weights = np.roll(weights, 1)
      given['weight'] = weights
    updates, state = update(gradients, state, params, **given)
    yield (
      updates,
      {k: o.exchange(gradients[k], weights) for k, o in oracles.items()},
    )
  momentum = jax.jit(demo_optax.state.momentum)(state)
  yield (
    momentum,
    {k: o.m.reshape(workers, *o.shape) for k, o in oracles.items()},
  )


def compare(pairs):
  for ours, expected in pairs:
    for key in expected:
      np.testing.assert_allclose(
        ours[key], expected[key], atol=1e-11, rtol=0, err_msg=key
      )


@pytest.mark.parametrize(
  'workers, steps, shapes', [(1, 30, TWO), (5, 12, SHAPES), (8, 12, TWO)]
)
def test_many_steps(workers, steps, shapes, x64):
  compare(run(workers, steps, shapes=shapes))


SECOND = {'average': 'workers', 'alpha': 0.2}


@pytest.mark.parametrize(
  'workers, steps, rule',
  [
    (
      3,
      12,
      {'gradient_weight': 1 - 0.995, 'decay': 0.995, 'shapes': TWO, **SECOND},
    ),
    # A worker is left out now and then.
    (5, 12, {'left_out': 3, 'alpha': 0.2, 'values': 'int4', 'shapes': TWO}),
    (3, 12, {'left_out': 1, 'shapes': TWO, **SECOND}),
    # Everything is sent.
    *(
      (2, 4, {'values': values, 'topk': 90, 'shapes': TWO, **SECOND})
      for values in ('int8', 'sign')
    ),
    # Workers of unlike weights; of the last ones some do not count.
    (3, 8, {'weights': [3, 800, 45], 'values': 'int8', 'shapes': TWO}),
    (
      4,
      8,
      {
        'weights': [0.5, 0, 2, np.nan],
        'left_out': 2,
        'shapes': TWO,
        **SECOND,
      },
    ),
    (5, 8, {'weights': [-1, 9e9, 2**-30, 1e-12, 2**30], 'shapes': TWO}),
    (3, 6, {'topk': 40, 'proportional': True, 'values': 'sign'}),
    (2, 6, {'padding': False}),  # the published rule of chunks
    *((2, 6, {'topk': topk, 'shapes': TWO}) for topk in (1, 100, 10_000)),
  ],
)
def test_rules(workers, steps, rule, x64):
  """Each rule and each code of values once, some of them together."""
  compare(run(workers, steps, **{'shapes': FEW, **rule}))
