"""Exchanges that are one step late: what is sent, and what comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, random_tree
from hlo_text import collectives

import demo_optax
from demo_optax import compressors

N, STEPS = 4, 6
SHAPES = {'w': (16, 24), 'b': (5,), 'odd': (7, 9)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
WORKERS = demo_optax.Workers.simulated(N)
CODES = {name: demo_optax.dct_topk(8, 3, values='int8') for name in SHAPES}


def exchange(**options):
  return demo_optax.scale_by_demo(
    CODES, 0.9, workers=WORKERS, alpha=0.5, average='workers', **options
  )


def gradients_of(step, lost=()):
  gradients = random_tree(step, SHAPES, lead=(N,))
  for worker in lost:
    gradients['b'][worker] = np.nan
  return gradients


def run(tx, steps, params=PARAMS, lost=None):
  """The updates of all steps, and the states before and after each."""
  state, update = tx.init(params), jax.jit(tx.update)
  seen, states = [], [state]
  for step in range(steps):
    gradients = gradients_of(step, (lost or {}).get(step, ()))
    updates, state = update(gradients, state, params)
    seen.append(updates)
    states.append(state)
  return seen, states


LOST = {2: [1], 4: range(N)}  # a worker, and all of them


def test_updates_are_those_of_the_step_before():
  """With workers that are excluded; nothing of the momentum is lost."""
  at_once, states = run(exchange(), STEPS, lost=LOST)
  late, late_states = run(exchange(delayed=True), STEPS + 1, lost=LOST)
  assert not any(map(np.any, jax.tree.leaves(late[0])))
  assert_same_bits(late[1:], at_once)
  # What was sent leaves the momentum one step later, also of a worker that is
  # excluded in that step.
  nobody = gradients_of(0, range(N))
  _, after = exchange(delayed=True).update(nobody, late_states[-2], PARAMS)
  momentum = demo_optax.state.momentum
  assert_same_bits(momentum(after), momentum(states[-1]))
  for before, now in zip(states[1:], late_states[2:]):
    assert_same_bits(now.metrics, before.metrics)
  assert late_states[1].metrics['num_excluded'] == N  # nothing was on its way


def test_an_update_does_not_depend_on_the_gradients():
  """Of its own step: neither values nor the compiled gather."""
  tx = exchange(delayed=True)
  _, states = run(tx, 3)
  found = [
    tx.update(gradients_of(seed), states[-1], PARAMS)[0] for seed in (5, 6)
  ]
  assert_same_bits(*found)


@pytest.mark.parametrize('word', [0, -1])
def test_a_damaged_message_excludes_its_sender(word):
  """Its update stays in its momentum, since it reads the same."""
  tx = exchange(delayed=True)
  _, states = run(tx, 3)
  state = states[-1]
  words = np.array(state.worker_stacked.message['gathered'])
  flat = words[1].reshape(-1)
  status = np.flatnonzero(flat)[-4]  # before three energies
  assert flat[status] == 1
  flat[status] = 0
  if word == 0:
    flat[status] = 1
    flat[:status] = ~flat[:status]
  own = state.worker_stacked._replace(message={'gathered': jnp.asarray(words)})
  damaged = state._replace(worker_stacked=own)
  nobody = gradients_of(0, range(N))
  _, after = tx.update(nobody, damaged, PARAMS)
  assert after.metrics['num_excluded'] == 1
  before, kept = (demo_optax.state.momentum(x) for x in (state, after))
  assert_same_bits(kept['w'][1], before['w'][1])
  assert np.any(kept['w'][0] != before['w'][0])


def test_leaves_that_are_averaged_go_at_once():
  codes = CODES | {'b': None}
  late = demo_optax.scale_by_demo(codes, workers=WORKERS, delayed=True)
  (first, *_), _ = run(late, 1)
  np.testing.assert_allclose(
    first['b'], np.mean(gradients_of(0)['b'], axis=0), rtol=1e-5, atol=1e-6
  )
  assert not np.any(first['w'])


def test_mistakes():
  with pytest.raises(ValueError, match="exchange must be 'all_gather'"):
    exchange(delayed=True, exchange='all_to_all', update_values='int8')
  with pytest.raises(ValueError, match="exchange must be 'all_gather'"):
    demo_optax.demo_muon(
      1e-2, workers=WORKERS, exchange='all_to_all', delayed=True
    )
  shared = compressors.Compressor(
    compressors.RandomSubset(1 / 4), compressors.Identity()
  )
  with pytest.raises(ValueError, match='must let each worker choose'):
    demo_optax.scale_by_demo(shared, workers=WORKERS, delayed=True).init(PARAMS)
  late = exchange(delayed=True)
  with pytest.raises(ValueError, match=r'message\.gathered .* must be'):
    late.update(gradients_of(0), exchange().init(PARAMS), PARAMS)


# The recipe -------------------------------------------------------------------


def demo_muon(**options):
  return demo_optax.demo_muon(
    0.125,
    workers=WORKERS,
    compressor=lambda params: jax.tree.map(lambda _: CODES['w'], params),
    weight_decay=0.5,
    **options,
  )


def test_matrices_of_the_recipe_are_late_and_corrected():
  """By the last update; other leaves are as without a delay."""
  ones = jax.tree.map(np.ones_like, PARAMS)
  at_once, _ = run(demo_muon(), STEPS, ones, {3: range(N)})
  late, states = run(demo_muon(delayed=True), STEPS + 1, ones, {3: range(N)})
  for here, there in zip(at_once, late):
    assert_same_bits(there['b'], here['b'])
  decayed = -0.125 * 0.5
  for name in ('w', 'odd'):
    u = [x[name] - decayed for x in at_once]
    assert not np.any(late[0][name])
    np.testing.assert_allclose(late[1][name] - decayed, u[0], atol=1e-6)
    # The step that excludes all: nothing moves, and the last update is kept.
    assert not np.any(late[4][name])
    for step, new, old in ((2, 1, 0), (3, 2, 1), (5, 4, 2), (6, 5, 4)):
      expected = 2 * u[new] - u[old]
      found = late[step][name] - decayed
      np.testing.assert_allclose(found, expected, atol=1e-5)
  assert demo_optax.exchange_info(states[1])['num_excluded'] == 0


def test_matrices_that_are_averaged_go_at_once():
  codes = CODES | {'w': None}
  make = lambda **options: demo_optax.demo_muon(
    1e-2, workers=WORKERS, compressor=codes, **options
  )
  (now, _), (late, _) = run(make(), 1), run(make(delayed=True), 1)
  assert_same_bits(late[0]['w'], now[0]['w'])
  assert not np.any(late[0]['odd'])


def test_messages_are_as_large_as_planned():
  """That of the matrices, and that of the other leaves."""
  from helpers import on_mesh, stacked

  workers = on_mesh(N, 'auto')
  tx = demo_optax.demo_muon(
    1e-2, workers=workers, compressor=CODES['w'], delayed=True
  )
  params = workers.device_put(PARAMS)
  gradients = stacked(gradients_of(0), workers)
  lowered = jax.jit(tx.update).lower(gradients, tx.init(params), params)
  received = [
    c.received_bytes
    for c in collectives(lowered.compile().as_text(), workers.mesh)
    if c.kind == 'all-gather'
  ]
  parts = [{k: PARAMS[k] for k in names} for names in (('w', 'odd'), ('b',))]
  planned = [
    demo_optax.plan(part, CODES['w'], workers).received_bytes for part in parts
  ]
  assert sorted(received) == sorted(planned)


def test_a_user_delays_some_leaves():
  """Exchanges compose: each part of the parameters has its own."""
  part = {
    'late': optax.chain(
      demo_optax.scale_by_demo(CODES['w'], workers=WORKERS, delayed=True),
      optax.scale_by_optimistic_gradient(),
    ),
    'at once': demo_optax.scale_by_demo(CODES['w'], workers=WORKERS),
  }
  labels = {'w': 'late', 'b': 'at once', 'odd': 'at once'}
  seen, _ = run(optax.partition(part, labels), 2)
  assert not np.any(seen[0]['w'])
  assert np.any(seen[0]['b'])
  assert np.any(seen[1]['w'])
