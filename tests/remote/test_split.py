"""A step, cut where workers meet, is the step; and what it sends when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demo_optax.remote.split import PartedStep, flat, jitted, meetings_in
from demo_optax.workers.collectives import Met, Programs, meet

pytestmark = pytest.mark.core
THREE = Programs(3)
COMPILED = functools.partial(jitted, ahead=True)
SHAPES = (4, 5), (2, 4), ()


def step(seen, w, x, count):
  """Exchanges at two depths, in a branch, and in a program within it."""
  loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
  update = meet(grads, THREE).rows.sum(0)
  mean = meet(loss, THREE).rows.mean()
  jax.debug.callback(seen.append, loss)
  largest = jax.jit(lambda u: meet(u.max(), THREE).rows.max())(update)

  def exchange():
    return w - update * meet(update.sum(), THREE).rows.mean(), count * 0

  w, count = jax.lax.cond(count >= 1, exchange, lambda: (w, count + 1))
  return w, count, mean, largest, jnp.zeros(3), x, meet(mean, THREE).included


class Everyone:
  """An exchange among three workers that send the same."""

  def __init__(self):
    self.sent, self.met = [], []

  def send(self, eqns, sent):
    self.sent.append([str(eqn.invars[0].aval) for eqn in eqns])
    self.met.append(
      [
        Met(np.stack([np.asarray(x)] * 3), np.ones(3, bool), np.bool_(True))
        for x in sent
      ]
    )
    return self.met[-1]

  def read(self, eqns, sent):
    """What was sent before, in the same order, by one that sends nothing."""
    assert not sent
    return self.met.pop(0)


def arrays(count):
  w, x, _ = (jnp.ones(s).cumsum().reshape(s) / 9 for s in SHAPES)
  return w, x, jnp.int32(count)


@pytest.mark.parametrize('count', [0, 1])
def test_the_parts_are_the_step(count):
  seen = []
  closed = flat(jax.make_jaxpr(functools.partial(step, seen))(*arrays(count)))
  plan, everyone = PartedStep(closed, COMPILED, donated=[0, 2]), Everyone()
  given = arrays(count)
  w, new, mean, largest, zeros, x, included = plan.run(given, everyone.send)
  jax.effects_barrier()
  assert len(seen) == 1  # the callback has run once
  grads = jax.grad(lambda w: jnp.mean((given[1] @ w) ** 2))(arrays(count)[0])
  expected = arrays(count)[0]
  if count:
    expected -= 3 * grads * (3 * grads).sum()
  np.testing.assert_allclose(w, expected, rtol=1e-5)
  assert int(new) == 1 - count and included and not zeros.any()
  np.testing.assert_allclose([mean, largest], [seen[0], 3 * grads.max()], 1e-5)
  np.testing.assert_array_equal(x, given[1])
  # Of one depth all is one message, of programs within it too.
  first = ['float32[4,5]', 'float32[]']
  rest = [['float32[]']] * count
  assert everyone.sent == [first, ['float32[]'] * 2, *rest]
  assert meetings_in(closed.jaxpr.eqns) == [*first, *['float32[]'] * 3]
  # One that only receives, without its x, has the same results.
  follows = PartedStep(closed, COMPILED, [0, 1, 3], follows=True)
  assert follows.uses == [True, False, True]
  w_here, _, count_here = arrays(count)
  found = follows.run([w_here, None, count_here], everyone.read)
  assert not everyone.met
  for one, other in zip(found, (w, new, largest), strict=True):
    np.testing.assert_array_equal(one, other)


def test_what_is_donated():
  """The caller's arrays, once all exchanges have succeeded, and no sooner."""

  def run(w, x):
    met = meet(w * x, THREE)
    return w + met.rows.sum(0), x

  w, x = jnp.ones(7), jnp.full(7, 2.0)
  plan = PartedStep(flat(jax.make_jaxpr(run)(w, x)), COMPILED, donated=[0, 1])

  def fails(eqns, sent):
    raise OSError

  with pytest.raises(OSError):
    plan.run([w, x], fails)
  assert not w.is_deleted() and not x.is_deleted()
  found, same = plan.run([w, x], Everyone().send)
  np.testing.assert_array_equal(found, np.full(7, 7.0))
  assert w.is_deleted() and not same.is_deleted()


@pytest.mark.parametrize(
  'loop',
  [
    lambda x: jax.lax.scan(
      lambda c, y: (c + meet(y, THREE).rows[0], None), 0.0, x
    ),
    lambda x: jax.lax.while_loop(
      lambda c: c[0] < 3, lambda c: meet(c, THREE).rows[0], x
    ),
  ],
)
def test_loops_are_refused(loop):
  with pytest.raises(ValueError, match='outside of loops'):
    PartedStep(flat(jax.make_jaxpr(loop)(jnp.ones(4))), COMPILED)
