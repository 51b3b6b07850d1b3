"""Programs that follow the workers of a relay, and train nothing."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import wait_until
from test_bits import METHODS, Clock, Joined, at_once, host, state_is_sent
from test_relay import Links
from test_rounds import TRAIN, Desk, Worker, awaited, joining

import demo_optax
from demo_optax.remote import frames
from demo_optax.remote import link as link_module
from demo_optax.remote.link import Behind, Link, link_of


@pytest.fixture
def asks_often(monkeypatch):
  """A follower that comes before the run asks again every ten seconds."""
  monkeypatch.setattr(link_module, '_ASK_LARGE', 0.5)


def loss_fn(params, x):
  errors = jnp.mean((x @ params['w'] + params['b'][None] - x) ** 2, axis=1)
  return errors.mean(), errors


def make(method, workers, start=0.1):
  """A step, and its arguments."""
  tx = METHODS[method](workers)
  params = {'w': jnp.full((24, 24), start, jnp.float32), 'b': jnp.zeros(24)}

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def train_step(params, state, x):
    (loss, errors), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, loss, demo_optax.out_batch(errors)

  return train_step, params, tx.init(params)


class Pace:
  """Trainers and one that follows, in which nobody is far ahead."""

  def __init__(self, joined):
    self.joined, self.over = joined, threading.Event()
    self.of_workers, self.of_follower = {}, {}
    self.is_away = False  # whether trainers need not wait

  def wait(self):
    wait_until(lambda: self.over.is_set() or self._is_near(), 200)

  def _is_near(self):
    if self.is_away:
      return True
    if self.of_follower:
      return max(self.of_workers) - max(self.of_follower) < 3
    members = list(self.joined.relay.rounds._members.values())
    return any(member.follows for member in members)


def train(workers, method, until, found, wait=None):
  """Trains until the event; notes parameters by round."""
  train_step, params, state = make(method, workers)
  rank, link = workers.relay.rank, link_of(workers)
  wait = wait or (lambda: until.wait(0.02))
  while not until.is_set():
    key = jax.random.key(1000 * rank + link.position.round)
    params, state, *_ = train_step(
      params, state, jax.random.normal(key, (4, 24))
    )
    found[link.position.round] = jax.tree.map(host, params)
    state_is_sent(workers)
    wait()


def follow(workers, method, start=0.7):
  """Follows, from shapes alone."""
  train_step, *args = make(method, workers, start)
  x = jax.ShapeDtypeStruct((4, 24), jnp.float32)
  args = jax.eval_shape(lambda: tuple(args))
  return demo_optax.remote.follow(train_step, *args, x=x)


def digest_of(params):
  return frames.digest(*(host(x).tobytes() for x in params.values())).hex()


def check(of_workers, of_follower):
  """The same bits in each round."""
  shared = of_workers.keys() & of_follower.keys()
  assert len(shared) > 3
  for number in shared:
    jax.tree.map(
      np.testing.assert_array_equal, of_workers[number], of_follower[number]
    )


@pytest.mark.usefixtures('asks_often')
@pytest.mark.parametrize('method, count', [('demo', 1), ('demo_diloco', 2)])
def test_bits(method, count):
  """After each round; also of one trainer, and of local updates."""
  joined = Joined(count, one_trace=True)
  pace = Pace(joined)

  def run(workers):
    if workers.relay.rank is not None:
      return train(workers, method, pace.over, pace.of_workers, pace.wait)
    for number, behind, (params, _) in follow(workers, method):
      pace.of_follower[number] = jax.tree.map(host, params)
      assert behind >= 0
      if len(pace.of_follower) == 12:
        return pace.over.set()

  with joined:
    joined.run(run, [*range(count), None])
    assert link_of(joined.workers(None)).joined == 1
  check(pace.of_workers, pace.of_follower)
  # None is left out. Steps of local updates have one round or two.
  first, last = min(pace.of_follower), max(pace.of_follower)
  rounds = [n for n in sorted(pace.of_workers) if first <= n <= last]
  assert [*pace.of_follower] == rounds


@pytest.mark.usefixtures('asks_often')
def test_one_that_is_later_than_the_history():
  """It takes a state again; the trainers have waited for nothing."""
  joined = Joined(1, history=4, one_trace=True)
  pace = Pace(joined)

  def run(workers):
    if workers.relay.rank is not None:
      return train(workers, 'plain', pace.over, pace.of_workers, pace.wait)
    link = link_of(workers)
    for number, _, (params, _) in follow(workers, 'plain'):
      pace.of_follower[number] = jax.tree.map(host, params)
      # Once all lists are applied, until it joins again, which needs rounds.
      members = list(joined.relay.rounds._members.values())
      is_up_to_date = not any(member.joins for member in members)
      pace.is_away = link.joined == 1 and is_up_to_date
      if pace.is_away:  # generates a long text
        wait_until(lambda number=number: max(pace.of_workers) > number + 8)
      if link.joined == 2 and len(pace.of_follower) > 8:
        return pace.over.set()

  with joined:
    joined.run(run, [0, None])
  check(pace.of_workers, pace.of_follower)
  assert [*pace.of_workers] == [*range(1, 1 + len(pace.of_workers))]


@pytest.mark.usefixtures('asks_often')
def test_an_nnx_model():
  """The model and optimizer of each round are new objects."""
  joined = Joined(1)
  pace = Pace(joined)

  def make_model(workers):
    model = nnx.Linear(24, 24, rngs=nnx.Rngs(0))
    tx = demo_optax.demo(1e-2, workers=workers)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @demo_optax.data_parallel(workers, batch_argnames='x')
    def train_step(model, optimizer, x):
      loss, grads = nnx.value_and_grad(lambda m, x: jnp.mean((m(x) - x) ** 2))(
        model, x
      )
      optimizer.update(model, grads)
      return loss

    return train_step, model, optimizer

  def run(workers):
    train_step, model, optimizer = make_model(workers)
    if workers.relay.rank is not None:
      while not pace.over.is_set():
        train_step(model, optimizer, np.eye(4, 24, dtype=np.float32))
        number = link_of(workers).position.round
        pace.of_workers[number] = np.asarray(model.kernel[...])
        state_is_sent(workers)
        pace.wait()
      return
    x = jax.ShapeDtypeStruct((4, 24), jnp.float32)
    followed = demo_optax.remote.follow(train_step, model, optimizer, x=x)
    for number, _, (own, own_optimizer) in followed:
      wait_until(lambda number=number: number in pace.of_workers)
      np.testing.assert_array_equal(own.kernel[...], pace.of_workers[number])
      assert int(own_optimizer.step[...]) == number
      pace.of_follower[number] = own
      if len(pace.of_follower) > 4:
        return pace.over.set()

  with joined:
    joined.run(run, [0, None])


def test_mistakes():
  address = 'tcp://127.0.0.1:7077'
  simulated = demo_optax.Workers.simulated(2)
  worker = demo_optax.Workers.remote(address, rank=0, count=2)
  for workers in (simulated, worker):
    train_step, *args = make('demo', workers)
    with pytest.raises(ValueError, match='must be decorated by'):
      demo_optax.remote.follow(train_step, *args, np.ones((4, 24)))
  with pytest.raises(ValueError, match='must be decorated by'):
    demo_optax.remote.follow(lambda x: x, 1)
  follower = demo_optax.Workers.remote(address, rank=None, count=2)
  train_step, *args = make('demo', follower)
  with pytest.raises(ValueError, match='rank must be the number of a worker'):
    train_step(*args, jnp.ones((4, 24)))

  @demo_optax.data_parallel(follower, batch_argnames='x')
  def scaled(params, state, x, scale):
    params, state, *_ = train_step.__wrapped__(params, state, x * scale)
    return params, state

  x = np.ones((4, 24), np.float32)
  for shape in ((), (4, 24)):
    scale = jax.ShapeDtypeStruct(shape, jnp.float32)
    followed = demo_optax.remote.follow(scaled, *args, x, scale=scale)
    with pytest.raises(ValueError, match='scale must be an array, got its'):
      next(followed)


# Without arrays ----------------------------------------------------------------


def test_a_hundred():
  """At the bytes of the lists, while no deadline passes: nobody waits."""
  count, number = 100, 5
  with Joined(2, clock=Clock()) as joined, Links(joined, 2) as rounds:
    source = rounds.links[0]
    followers = [Link(joined.address, None, None) for _ in range(count)]
    rounds.each(lambda link: link.hello(rounds.text, b''), followers)
    state = os.urandom(1000)

    def train():
      """The state is sent after the first round that has asked for it."""
      while joined.relay.rounds._state is None:
        rounds.round()
        if source.position.then == frames.SEND:
          source.send_state(state)
          source._pushing.join(10)
      for _ in range(number):
        rounds.round()

    *states, _ = at_once(
      lambda call: call(), [*(link.state for link in followers), train], 60
    )
    assert states == [state] * count
    # Some are killed, and some do not read.
    gone, silent, rest = followers[:10], followers[10:20], followers[20:]
    for link in gone:
      link.close()

    def catch_up(link):
      received = 0
      while link.position.round < source.position.round:
        received += sum(map(len, link.gather(b'')))
      return received, link.position.chain

    found = rounds.each(catch_up, rest)
    bytes_of_a_list = 2 * (frames.CHAIN + 100)
    for received, chain in found:
      assert chain == source.position.chain
      assert received % bytes_of_a_list == 0 and received > 0
    for _ in range(3):
      rounds.round()
    found = rounds.each(catch_up, rest)
    assert {x for x, _ in found} == {3 * bytes_of_a_list}
    for link in (*silent, *rest):
      link.close()


def test_they_take_part_in_nothing(caplog):
  caplog.set_level('INFO')
  desk = Desk()
  follower = Worker(desk, frames.FOLLOWER)
  desk.workers.append(follower)
  follower.hello()  # before the run
  follower.send(frames.LISTEN)
  assert follower.answers == ['UNKNOWN']
  desk.workers.remove(follower)
  awaited(desk)
  desk.workers.append(follower)
  follower.send(frames.HELLO, frames.described(3, {'other': '1'}))
  assert 'a follower has another configuration' in caplog.text
  follower.send(frames.HELLO)
  assert follower.answers[1:] == ['REFUSED', 'UNKNOWN']
  follower.hello()
  follower.send(frames.LISTEN)
  assert follower.answers[3:] == ['WELCOME', 'AGAIN']
  # Its message, its state and its absence change nothing.
  for kind, bodies in (
    (frames.MESSAGE, [TRAIN]),
    (frames.PUSH, [b'state']),
    (frames.PAUSE, []),
    (99, [b'x']),
  ):
    follower.send(kind, *bodies)
  assert desk.rounds._state is None and desk.rounds.round == 0
  for worker in desk.workers[:3]:
    worker.message()
  assert desk.rounds.round == 1 == follower.round
  assert follower.answers[5:] == ['LIST']
  # Without a request for a minute it is forgotten.
  desk.wait(61)
  assert [*desk.rounds._members] == [0, 1, 2]
  follower.send(frames.LISTEN)
  assert follower.answers[-1] == 'UNKNOWN'


def test_they_join_as_workers_do():
  desk = Desk(history=2)
  follower = Worker(desk, frames.FOLLOWER)
  awaited(desk)
  desk.workers.append(follower)
  trainers, source = desk.workers[:3], desk.one
  for _ in range(5):
    desk.round_of(trainers)
  follower.hello()
  follower.send(frames.LISTEN)
  assert follower.answers == ['WELCOME', 'GONE']
  follower.pull()
  assert not follower.pulled[1]
  desk.round_of(trainers)
  source.follow()
  source.send(frames.PUSH, b'state')
  follower.pull()
  header, (part,) = follower.pulled
  assert part == b'state'
  follower.round, follower.chain = header.number, header.chain
  for _ in range(4):  # more than are kept, but for who joins
    desk.round_of(trainers)
  follower.follow()
  assert follower.round == desk.rounds.round


def test_workers_that_have_left_while_others_follow():
  """The run is forgotten, although somebody listens."""
  desk = Desk()
  joining(desk)
  follower = Worker(desk, frames.FOLLOWER)
  follower.round, follower.chain = desk.rounds.round, desk.others[0].chain
  desk.workers.append(follower)
  follower.hello()
  for _ in range(12):
    desk.wait(30)
    desk.one.pull()
    follower.send(frames.LISTEN)
  assert not desk.rounds._text


def test_the_key_of_followers(tmp_path):
  """It opens no place of a worker."""
  relay, first, follower = map(str, frames.write_keys(tmp_path, 1))
  with Joined(1, keys=relay) as joined:
    worker = Link(joined.address, 0, first)
    worker.hello(frames.described(1, {}), frames.digest(b'state'))
    worker.gather(TRAIN)
    own, thief = (Link(joined.address, rank, follower) for rank in (None, 0))
    own.hello(frames.described(1, {}), b'')
    with pytest.raises(Behind):
      own.position = own.position._replace(chain=b'x' * frames.CHAIN)
      own.gather(b'')
    assert thief._socket.poll(20_000, 2)  # may connect
    header = frames.Header(frames.MESSAGE, 0, 1, 0, worker.position.chain)
    thief._socket.send_multipart([header.pack(), TRAIN])
    assert not thief._socket.poll(300)
    assert joined.relay.rounds.round == 1
    for link in (worker, own, thief):
      link.close()
