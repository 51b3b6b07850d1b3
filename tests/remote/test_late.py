"""Workers that are late, come back or join; relays that end."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import COMPILATIONS, wait_until
from jax.sharding import PartitionSpec as P
from test_bits import METHODS, Clock, Joined, host, pass_when, state_is_sent

import demo_optax
from demo_optax.remote import frames, rounds
from demo_optax.remote.link import Position, link_of
from demo_optax.remote.program import RemoteProgram

INFOS = {}  # of the last run, by rank


class Done(Exception):  # noqa: N818
  """Raised where a worker shall end."""


class Course:
  """Paces workers, and ends them when one of them has trained for a while.

  So that it never needs one that has ended.
  """

  def __init__(self, last, steps):
    self.last, self.steps, self.over = last, steps, threading.Event()

  def of(self, workers, away=None, at=-1):
    """Of a worker; in a round, or later, it calls `away(number)` once."""
    left, calls = [self.steps], [away] if away else []

    def before(number):
      if self.over.wait(0.02):
        raise Done
      if calls and number >= at:
        calls.pop()(number)
      elif workers.relay.rank == self.last and not calls:
        left[0] -= 1
        if not left[0]:
          self.over.set()
          raise Done

    return before


def miss(joined, count):
  """What a worker calls to be late: the others end rounds without it."""

  def away(_):
    number = joined.relay.rounds.round
    pass_when(
      joined,
      lambda members: sum(bool(m.body) for m in members) == joined.count - 1,
      61,
    )
    wait_until(lambda: joined.relay.rounds.round >= number + count)

  return away


def train(
  workers,
  rounds,
  before=lambda number: None,
  method='plain',
  spoil=lambda number, params: None,
  start=0.1,
  rate=lambda number: 1.0,
):
  """Trains until a round; returns the parameters after each round."""
  tx = METHODS[method](workers)
  params = {'w': jnp.full((24, 24), start, jnp.float32), 'b': jnp.zeros(24)}
  state = tx.init(params)

  @demo_optax.data_parallel(workers, batch_argnums=2, donate_argnums=(0, 1))
  def step(params, state, x, rate):
    def loss_of(params):
      errors = jnp.mean((x @ params['w'] + params['b'][None] - x) ** 2, axis=1)
      return errors.mean(), errors

    (loss, errors), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, state = tx.update(grads, state, params)
    updates = jax.tree.map(lambda u: u * rate, updates)
    # Those of its rows are not exchanged: not every step has a round then.
    found = loss
    if method == 'demo_diloco':
      found = demo_optax.out_batch(errors)
    return optax.apply_updates(params, updates), state, found

  rank, link = workers.relay.rank, link_of(workers)
  found = {}
  while link.position.round < rounds:
    try:
      before(link.position.round)
    except Done:
      break
    spoil(link.position.round, params)
    x = jax.random.normal(jax.random.key(100 * rank + len(found)), (4, 24))
    while True:
      try:
        rest = np.asarray(x), np.float32(rate(link.position.round))
        params, state, _ = step(params, state, *rest)
        break
      except KeyboardInterrupt:
        pass
    found[link.position.round] = jax.tree.map(host, params)
    state_is_sent(workers)
  INFOS[rank] = demo_optax.remote.status(workers)._asdict()
  return found


def evaluating(workers, before, turn):
  """As `before`, with another step in some rounds, which exchanges as well."""
  mean = demo_optax.data_parallel(workers, batch_argnums=0)(
    lambda x: demo_optax.over_workers(x.mean())
  )

  def evaluate(number):
    before(number)
    if number % 6 == turn:
      assert mean(np.ones(2, np.float32)) == 1

  return evaluate


def check_equal(found):
  """All workers have the same parameters after each round."""
  rounds = [n for own in found for n in own]
  assert rounds
  for n in set(rounds):
    first, *rest = [own[n] for own in found if n in own]
    for params in rest:
      jax.tree.map(np.testing.assert_array_equal, params, first)


@pytest.mark.parametrize(
  'method, evaluates', [('demo_diloco', False), ('demo', True)]
)
def test_a_late_worker(method, evaluates):
  """It costs the others one deadline, and applies the lists that it missed."""
  # Of local updates every fourth step is a round.
  course = Course(2, 15 if method == 'demo' else 45)

  def run(workers):
    away = miss(joined, 3) if workers.relay.rank == 2 else None
    before = course.of(workers, away, 5)
    if evaluates:
      before = evaluating(workers, before, 5)
    return train(workers, 10_000, before, method)

  with Joined(3, clock=Clock(), one_trace=True) as joined:
    found = joined.run(run)
  check_equal(found)
  assert len([n for n in found[2] if n in found[0] and n > 8]) >= 5
  if evaluates:
    assert not INFOS[2]['joined']  # an evaluation changes nothing
  else:
    assert len(found[2]) < len(found[0])


@pytest.mark.parametrize('devices, method', [(4, 'demo'), (1, 'demo_diloco')])
def test_a_worker_that_joins(devices, method, monkeypatch):
  """One that is there later takes the state, and is not waited for before.

  Nothing is compiled between the state and its first step.
  """
  begun, compiled = threading.Event(), []
  take = RemoteProgram._take

  def noted(program, arrays):
    take(program, arrays)
    compiled.append(COMPILATIONS.count)

  monkeypatch.setattr(RemoteProgram, '_take', noted)

  def run(workers):
    address, rank, _ = workers.relay
    before = course.of(workers)
    if rank == 1:
      assert begun.wait(120)
    if devices > 1:
      own = jax.devices()[devices * rank : devices * (rank + 1)]
      workers = demo_optax.Workers.remote(
        address,
        rank=rank,
        count=2,
        mesh=jax.sharding.Mesh(own, 'fsdp'),
        param_specs={'w': P('fsdp'), 'b': P()},
      )

    def note(number):
      if number > 8:
        begun.set()
      if link_of(workers).joined:
        compiled.append(COMPILATIONS.count)
      before(number)

    return train(workers, 10_000, note, method)

  course = Course(1, 10 if method == 'demo' else 30)
  with Joined(
    2, start=0.5, history=4, deadline=2, one_trace=devices == 1
  ) as joined:
    found = joined.run(run)
  check_equal(found)
  assert 5 < len(found[1]) < len(found[0]) - 5
  assert devices > 1 or compiled[0] == compiled[1]


def test_the_relay_is_restarted():
  """Workers wait, say hello, and go on from the round that was open."""

  def run(workers):
    def before(number):
      if workers.relay.rank == 0 and number in (1, 5, 6):
        joined.restart()

    return train(workers, 12, before)

  with Joined(2) as joined:
    found = joined.run(run)
  check_equal(found)
  assert all(list(own) == list(range(1, 13)) for own in found)


def test_the_relay_is_restarted_while_the_only_worker_is_late():
  """Lists that it knew of are lost; it must not wait for others to send."""
  with Joined(1, start=0.1) as joined:
    link, restarted = link_of(joined.workers(0)), []

    def before(number):
      if number == 3 and not restarted:
        restarted.append(True)
        link.open = number + 4
        joined.restart()

    (found,) = joined.run(lambda workers: train(workers, 6, before))
  assert [*found] == [1, 2, 3, 4, 5, 6]


def test_other_training_steps():
  """A worker that calls another one cannot follow, and is told in the end."""
  over = threading.Event()

  def run(workers):
    def of_shape(rows):
      @demo_optax.data_parallel(workers, batch_argnums=1)
      def step(params, x):
        rest = demo_optax.over_workers(jnp.full(rows, x.mean()))
        return {'w': params['w'] + rest.mean()}

      return step

    one, other = of_shape(1), of_shape(2)
    params, x = {'w': jnp.zeros(3)}, np.ones(2, np.float32)
    for _ in range(3):
      params = one(params, x)
    if workers.relay.rank == 0:
      while not over.is_set():
        params = one(params, x)
        time.sleep(0.02)
    else:
      with pytest.raises(RuntimeError, match='Call the same training step'):
        other(params, x)
      over.set()
      another = {'v': params['w']}
      with pytest.raises(ValueError, match='must return the same state'):
        demo_optax.data_parallel(workers, batch_argnums=1)(
          lambda params, x: {'v': params['v'] + 1.0}
        )(another, x)

  with Joined(2, deadline=1.5) as joined:
    joined.run(run)


def test_a_step_that_fails_changes_nothing(monkeypatch):
  """The arrays that were given are as before, and it can be run again."""

  def trained(workers):
    own = Interrupted(link_of(workers))
    if workers.relay.rank == 1:
      monkeypatch.setattr(own.link, 'gather', own.exchange)
    return train(workers, 12)

  with Joined(2) as joined:
    found = joined.run(trained)
  check_equal(found)
  assert list(found[0]) == list(range(1, 13)) and len(found[1]) > 5


class Interrupted:
  """A link whose exchanges are interrupted, before or after they happened."""

  def __init__(self, link):
    self.link, self.real, self.calls = link, link.gather, 0

  def exchange(self, body):
    self.calls += bool(body)
    if body and self.calls % 3 == 1:
      raise KeyboardInterrupt
    found = self.real(body)
    if body and self.calls % 3 == 2:
      raise KeyboardInterrupt
    return found


def test_an_evaluation_without_the_others():
  """Before the first training step, and where the worker must join."""

  def run(workers):
    rank = workers.relay.rank
    mean = demo_optax.data_parallel(workers, batch_argnums=0)(
      lambda x: demo_optax.over_workers(x.mean())
    )
    rows = np.full(4, rank, np.float32)
    found = [float(mean(rows))]
    train(workers, 3)
    found.append(float(mean(rows)))
    link_of(workers).part()
    return [*found, float(mean(rows))]

  with Joined(2) as joined:
    assert joined.run(run) == [[0, 0.5, 0], [1, 0.5, 1]]


def test_parameters_that_differ(monkeypatch):
  """At the start and later: a worker takes the state of another one.

  Although every round of a check is an evaluation.
  """
  monkeypatch.setattr(rounds, 'CHECK_EVERY', 6)

  def run(workers):
    steps = iter(range(10_000))

    def spoil(number, params):
      if workers.relay.rank == 1 and next(steps) == 10:
        params['w'] = params['w'].at[3, 5].add(1e-6)

    return train(
      workers,
      10_000,
      evaluating(workers, course.of(workers), 0),
      spoil=spoil,
      start=0.1 + (workers.relay.rank == 1),
    )

  course = Course(1, 30)
  with Joined(3, deadline=2, one_trace=True) as joined:
    found = joined.run(run)
  first, spoiled, last = (
    [INFOS[r][name] for name in ('joined', 'parted')] for r in range(3)
  )
  assert first == last == [0, 0]
  assert spoiled[0] >= 2 and spoiled[1] == 1  # one that is slow joins again
  differ = [
    n
    for n in found[0]
    if n in found[1] and np.any(found[0][n]['w'] != found[1][n]['w'])
  ]
  assert not differ or max(differ) - min(differ) <= 7


def test_a_number_that_all_must_give():
  """A late worker cannot follow the others with the number of its own call."""

  def run(workers):
    is_late = workers.relay.rank == 2
    before = course.of(workers, miss(joined, 3) if is_late else None, 5)

    def paced(number):
      before(number)
      if ended.is_set():
        raise Done

    try:
      return train(
        workers, 10_000, paced, rate=lambda number: 1.0 if number < 7 else 0.5
      )
    finally:
      if is_late:
        ended.set()

  course, ended = Course(2, 15), threading.Event()
  with (
    Joined(3, clock=Clock(), one_trace=True) as joined,
    pytest.raises(ValueError, match='rate must be equal on all workers'),
  ):
    joined.run(run)


def test_arguments_that_differ():
  def run(workers):
    step = demo_optax.data_parallel(workers, batch_argnums=2)(
      lambda params, base, x: {
        'w': params['w'] + demo_optax.over_workers(x.mean()) + base.sum()
      }
    )
    base = np.full(100, workers.relay.rank, np.float32)
    for _ in range(3):
      step({'w': np.zeros(3, np.float32)}, base, np.ones(2, np.float32))

  with (
    Joined(2) as joined,
    pytest.raises(RuntimeError, match='others run, got\n  other arguments: '),
  ):
    joined.run(run)


def test_mistakes():
  """An update outside of a step, a step that keeps no state, owners."""
  workers = demo_optax.Workers.remote('tcp://127.0.0.1:1', rank=0, count=2)
  params = {'w': jnp.ones((8, 8))}
  tx = demo_optax.demo(1e-2, workers=workers)
  for each in (tx, demo_optax.average_gradients(workers=workers)):
    with pytest.raises(
      ValueError, match='must be called in a demo_optax.data_par'
    ):
      jax.jit(each.update)(params, each.init(params), params)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, x):
    grads = jax.grad(lambda params: jnp.sum(params['w'] * x.mean()))(params)
    return tx.update(grads, state, params)[0]['w'].sum()

  with pytest.raises(ValueError, match='must return parameters and'):
    step(params, tx.init(params), np.ones(2, np.float32))
  with pytest.raises(ValueError, match='must have one program to lower'):
    step.lower(params, tx.init(params), np.ones(2, np.float32))
  with pytest.raises(ValueError, match="exchange must be 'all_gather'"):
    demo_optax.demo(1e-2, workers=workers, exchange='all_to_all')
  with pytest.raises(ValueError, match="exchange must be 'all_gather'"):
    demo_optax.plan(params, None, workers, exchange='all_to_all')


@pytest.mark.parametrize('is_in', [True, False])
def test_momentum_gives_up_only_what_others_received(is_in, monkeypatch):
  """The list of a round without this worker's message, or with it."""
  workers = demo_optax.Workers.remote('tcp://127.0.0.1:1', rank=0, count=2)
  link = link_of(workers)
  monkeypatch.setattr(link, 'hello', lambda *_: None)
  monkeypatch.setattr(link, 'position', Position(1, b'x' * frames.CHAIN))
  monkeypatch.setattr(
    link, 'gather', lambda body: [body if is_in else b'', body]
  )
  tx = demo_optax.demo(1e-2, decay=0.99, workers=workers)
  params = {'w': jnp.zeros((64, 64))}

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, x):
    grads = jax.grad(lambda params: jnp.sum(params['w'] * x))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  x = jax.random.normal(jax.random.key(0), (64, 64))
  params, state = step(params, tx.init(params), x)
  link.close()
  (momentum,) = jax.tree.leaves(demo_optax.state.momentum(state))
  kept, whole = (float(jnp.sum(m**2)) for m in (momentum, (1 - 0.99) * x))
  assert np.any(params['w'] != 0)
  assert (kept < 0.98 * whole) if is_in else abs(kept / whole - 1) < 1e-5


def test_a_state_on_the_mesh_of_a_worker():
  """Its specs place it where `init` has it; copies are compared."""
  mesh = jax.sharding.Mesh(jax.devices()[:4], 'fsdp')
  workers = demo_optax.Workers.remote(
    'tcp://127.0.0.1:1',
    rank=0,
    count=2,
    mesh=mesh,
    param_specs={'w': P('fsdp')},
  )
  tx = demo_optax.demo(1e-2, workers=workers)
  params = workers.device_put({'w': jnp.ones((64, 64))})
  state = tx.init(params)
  assert demo_optax.check_replicas((params, state), workers) == []
  for spec, x in zip(
    jax.tree.leaves(demo_optax.state_specs(tx, params, workers)),
    jax.tree.leaves(state),
    strict=True,
  ):
    wanted = jax.sharding.NamedSharding(mesh, spec)
    assert wanted.is_equivalent_to(x.sharding, x.ndim)
