"""The rounds of a relay without connections, by a clock that the test moves."""

import math
import os
import random
import tempfile

import pytest
from test_bits import Clock

from demo_optax.remote import frames, rounds
from demo_optax.remote.frames import Header

NAMES = """HELLO MESSAGE LISTEN PUSH PULL PAUSE
           WELCOME LIST AGAIN UNKNOWN GONE REFUSED"""
KINDS = {getattr(frames, name): name for name in NAMES.split()}
TRAIN, EVALUATE = (frames.tag('', b'', changes) for changes in (True, False))
WORKERS = 3
TEXT = frames.described(WORKERS, {})


class Worker:
  """What a worker knows, and the kinds of answers that it has received."""

  def __init__(self, desk, rank, text=TEXT):
    self.desk, self.rank, self.text = desk, rank, text
    self.program = os.urandom(8)
    self.round, self.chain = 0, frames.digest(b'state')
    self.answers = []

  def send(self, kind, *bodies, **fields):
    header = Header(
      kind, self.rank, self.round, 0, self.chain, self.program
    )._replace(**fields)
    self.desk.rounds.take(self.program, None, header.pack(), *bodies)
    self.desk.rounds.look_at_the_clock()

  def hello(self, **fields):
    self.send(frames.HELLO, self.text, **fields)

  def message(self, body=TRAIN):
    self.send(frames.MESSAGE, body)

  def pull(self, taken=b''):
    self.send(frames.PULL, taken, round=0, chain=b'')

  def follow(self):
    """Applies lists up to the open round."""
    while self.round < self.desk.rounds.round:
      self.send(frames.LISTEN)

  def receive(self, header, bodies):
    self.answers.append(KINDS[header.kind])
    if header.kind == frames.LIST and header.round == self.round:
      self.round += 1
      self.chain = frames.digest(self.chain, *bodies)
    if header.kind == frames.PULL:
      self.pulled = header, bodies


class Desk:
  """Rounds, and three workers: the first one is looked at."""

  made = []

  def __init__(self, **options):
    self.made.append(self)
    self.clock = Clock()
    self.rounds = rounds.Rounds(
      rounds.Options(WORKERS, **{'deadline': 2, 'start': 300} | options),
      self._deliver,
      self.clock,
    )
    self.workers = [Worker(self, rank) for rank in range(WORKERS)]
    self.one, *self.others = self.workers

  def _deliver(self, identity, header, *bodies):
    header = frames.unpack(header.pack())
    for worker in self.workers:
      if worker.program == identity:
        worker.receive(header, bodies)

  def wait(self, seconds):
    self.clock.now += seconds
    self.rounds.look_at_the_clock()

  def round_of(self, workers, body=TRAIN):
    """Only these send a message."""
    for worker in workers:
      worker.follow()
    for worker in workers:
      worker.message(body)
    self.wait(3)

  def place(self):
    """Where the first worker is, in the words of the table."""
    member = self.rounds._members.get(0)
    if member is None:
      return 'unknown'
    if not self.rounds._text:
      return 'waiting'
    if member.body:
      return 'sent'
    if member.joins:
      return 'joining'
    return 'awaited' if member.awaited else 'idle'


@pytest.fixture(autouse=True)
def close_files():
  yield
  while Desk.made:
    Desk.made.pop().rounds.forget()


# How the first worker gets there.


def unknown(desk):
  pass


def waiting(desk):
  desk.one.hello()


def awaited(desk):
  for worker in desk.workers:
    worker.hello()


def sent(desk):
  awaited(desk)
  desk.one.message()


def idle(desk):
  awaited(desk)
  for _ in range(3):
    desk.round_of(desk.others)


def joining(desk):
  idle(desk)
  desk.one.chain = b'x' * frames.CHAIN
  desk.one.pull()


# What happens then.


def hello_after_it_began(desk):
  for worker in desk.others:
    worker.hello()
  desk.wait(301)
  desk.one.hello()


def hello_of_another_program(desk, last_word=True):
  if last_word:
    desk.one.send(frames.PAUSE)
  desk.one.program = os.urandom(8)
  desk.one.answers.clear()
  desk.one.hello()


def connection_ends(desk):
  desk.rounds.note_disconnected(desk.one.program)


def that_hello_after_its_end(desk):
  connection_ends(desk)
  hello_of_another_program(desk, last_word=False)


def hello_for_other_workers(desk):
  desk.one.text = frames.described(4, {})
  desk.one.hello()


def hello_with_another_configuration(desk):
  hello_after_it_began(desk)
  desk.rounds.forget()
  for worker in desk.others:
    worker.hello()
  desk.wait(301)
  desk.one.answers.clear()
  desk.one.text = frames.described(WORKERS, {'k': '8'})
  desk.one.hello()


def begins(desk):
  for worker in desk.others:
    worker.hello()


def begins_from_more_steps(desk):
  for worker in desk.others:
    worker.chain = b'y' * frames.CHAIN
    worker.hello(number=50)


def most_exchange_something_else(desk):
  for worker in desk.others:
    worker.text = frames.described(WORKERS, {'k': '8'})
    worker.hello()


def another_position(desk):
  desk.one.chain = b'x' * frames.CHAIN


def pull_of_a_state(desk):
  source = desk.others[0]
  source.follow()
  source.send(frames.PUSH, b'state')
  desk.one.answers.clear()
  desk.one.pull()
  header, (part,) = desk.one.pulled
  assert part == b'state'
  desk.one.round, desk.one.chain = header.number, header.chain


def listen_from_that_state(desk):
  pull_of_a_state(desk)
  desk.round_of(desk.others)
  desk.one.answers.clear()
  desk.one.send(frames.LISTEN)


def message_from_that_state(desk):
  pull_of_a_state(desk)
  desk.one.answers.clear()
  desk.one.message()


def all_others_have_left(desk):
  for _ in range(11):
    desk.wait(30)
    desk.one.answers.clear()
    if desk.place() == 'joining':
      desk.one.pull()


def message(desk):
  desk.one.follow()
  desk.one.answers.clear()
  desk.one.message()


def messages_of(body):
  def run(desk):
    for worker in desk.others:
      worker.message(body)

  return run


def deadline_passes(desk):
  desk.others[0].message()
  desk.wait(3)


def sending(kind, *bodies, **fields):
  return lambda desk: desk.one.send(kind, *bodies, **fields)


def both(*events):
  def run(desk):
    for event in events:
      event(desk)

  return run


EVENTS = {
  'HELLO before the run': lambda desk: desk.one.hello(),
  'HELLO after it began': hello_after_it_began,
  'HELLO for another --workers': hello_for_other_workers,
  'HELLO with another configuration': hello_with_another_configuration,
  'HELLO of another program': hello_of_another_program,
  'HELLO of a longer run': lambda desk: desk.one.hello(round=99),
  'LISTEN': sending(frames.LISTEN),
  'LISTEN of a closed round': sending(frames.LISTEN),
  'LISTEN of another position': both(another_position, sending(frames.LISTEN)),
  'LISTEN from that state': listen_from_that_state,
  'the run begins': begins,
  'the run begins from more steps': begins_from_more_steps,
  'most exchange something else': most_exchange_something_else,
  'MESSAGE': message,
  'MESSAGE of a closed round': lambda desk: desk.one.message(),
  'MESSAGE of another position': both(
    another_position, lambda desk: desk.one.message()
  ),
  'MESSAGE from that state': message_from_that_state,
  'PAUSE': sending(frames.PAUSE),
  'PULL': lambda desk: desk.one.pull(),
  'PULL without a state': lambda desk: desk.one.pull(),
  'PULL of a state': pull_of_a_state,
  'a second of the round, cut off': both(
    connection_ends,
    lambda desk: desk.others[0].message(),
    lambda desk: desk.wait(1.1),
  ),
  'that HELLO, the connection ended': that_hello_after_its_end,
  'the deadline passes': deadline_passes,
  'all have sent': messages_of(TRAIN),
  'most have called another step': messages_of(TRAIN + b'longer'),
  'a minute without a request': lambda desk: desk.wait(61),
  'all others have left': all_others_have_left,
}


def table():
  """The rows of the table in the docstring: four columns."""
  lines = iter(rounds.__doc__.splitlines())
  ruler = next(line for line in lines if '-----' in line)
  starts = [i for i in range(len(ruler)) if ruler[i - 1 : i + 1] == ' -']
  for line in lines:
    if not line.strip():
      return
    ends = [*starts[1:], None]
    yield tuple(line[a:b].strip() for a, b in zip(starts, ends))


@pytest.mark.parametrize('row', list(table()), ids=' | '.join)
def test_the_table(row):
  before, event, answer, after = row
  desk = Desk()
  globals()[before](desk)
  assert desk.place() == before
  desk.one.answers.clear()
  EVENTS[event](desk)
  assert desk.one.answers == ([] if answer == '-' else [answer])
  assert desk.place() == after


def test_the_table_has_all_events():
  assert {event for _, event, *_ in table()} == set(EVENTS)


def test_all_that_are_cut_off_while_they_compute():
  """A new connection is seen with its first message: the round waits."""
  desk = Desk()
  awaited(desk)
  for worker in desk.workers:
    desk.rounds.note_disconnected(worker.program)
  desk.wait(5)
  for worker in desk.workers:
    worker.message()
  assert frames.unpacked(desk.rounds._lists.read(0)) == [TRAIN] * 3


def test_the_list_in_a_hello_is_not_kept():
  """Of a worker that comes after the run has begun."""
  desk = Desk()
  awaited(desk)
  desk.one.send(frames.HELLO, TEXT, b'a list' * 1000, again=True)
  assert desk.one.answers[-1] == 'WELCOME'
  assert [member.last for member in desk.rounds._members.values()] == [()] * 3


def test_an_end_that_overtakes_a_message():
  desk = Desk()
  sent(desk)
  desk.rounds.note_disconnected(desk.one.program)
  desk.one.send(frames.LISTEN)
  assert desk.rounds._members[0].disconnected < math.inf


def test_as_many_in_two_steps():
  """That of the lowest rank, whoever came first."""
  desk = Desk()
  for worker in reversed(desk.workers[:2]):
    worker.hello()
  desk.wait(301)
  for worker in desk.workers[:2]:
    worker.follow()
  desk.others[0].message(EVALUATE)
  desk.one.message(TRAIN)
  assert [worker.answers[-1] for worker in desk.workers[:2]] == ['LIST'] * 2
  assert desk.place() == 'awaited'


@pytest.mark.parametrize('old_lives', (True, False))
def test_a_worker_that_is_started_again_at_once(old_lives, caplog):
  """Its new program gets in when the old one is silent, or else is refused."""
  caplog.set_level('INFO')
  desk = Desk()
  awaited(desk)
  new = Worker(desk, 0)
  desk.workers.append(new)
  desk.one.send(frames.PAUSE)
  desk.clock.now += 1
  new.hello()
  assert not new.answers
  desk.clock.now += 1
  if old_lives:
    desk.one.send(frames.PAUSE)
  desk.clock.now += 1
  new.hello(again=True)
  assert new.answers == ['REFUSED' if old_lives else 'WELCOME']
  log = caplog.text
  assert ('refused' in log, 'was started again' in log) == (
    old_lives,
    not old_lives,
  )
  desk.one.send(frames.PAUSE)
  assert desk.one.answers == ['WELCOME'] + ['REFUSED'] * (not old_lives)


def test_any_number_of_later_joins():
  """A state is handed out while lists lead from it, and then another one."""
  desk = Desk(history=4)
  awaited(desk)
  source = desk.others[0]
  for number in range(3):
    desk.round_of(desk.others)
    desk.one.chain = b'x' * frames.CHAIN
    desk.one.send(frames.LISTEN)
    for _ in range(3):
      desk.one.pull()
      assert not desk.one.pulled[1], 'the state of an earlier join'
    desk.round_of(desk.others)
    source.follow()
    source.send(frames.PUSH, b'state %d' % number)
    for _ in range(9):  # more than are kept, but for one that joins
      desk.round_of(desk.others)
    desk.one.pull()
    header, (part,) = desk.one.pulled
    assert part == b'state %d' % number
    desk.one.round, desk.one.chain = header.number, header.chain
    desk.round_of(desk.workers)
    assert desk.one.answers[-1] == 'LIST' and desk.place() == 'awaited'
    for _ in range(9):
      desk.round_of(desk.others)


def test_a_state_that_does_not_help():
  """It is dropped, and another one is asked for, which stays."""
  desk = Desk()
  joining(desk)
  source = desk.others[0]
  source.follow()
  source.send(frames.PUSH, b'early')
  desk.one.pull()
  header, (part,) = desk.one.pulled
  assert part == b'early'
  desk.one.pull(header.chain)
  assert not desk.one.pulled[1]
  desk.round_of(desk.others)
  source.follow()
  source.send(frames.PUSH, b'later')
  for _ in range(2):
    desk.one.pull(header.chain)
    assert desk.one.pulled[1] == (b'later',)


def test_a_full_disk(monkeypatch):
  """Lists and states are not kept; rounds go on, and joins when there is room."""
  desk = Desk()
  joining(desk)
  with monkeypatch.context() as full:
    full.setattr(tempfile, 'TemporaryFile', lambda: open('/dev/full', 'r+b'))  # noqa: SIM115
    source = desk.others[0]
    for _ in range(3):
      desk.round_of([source])
      source.answers.clear()
      source.send(frames.PUSH, b'state')
      assert source.answers == ['PUSH']  # by the same number: it was not taken
      desk.one.pull()
      assert not desk.one.pulled[1]
    late = desk.others[1]
    late.send(frames.LISTEN)
    assert late.answers[-1] == 'GONE'
  desk.round_of([source])
  source.follow()
  source.send(frames.PUSH, b'state')
  desk.one.pull()
  assert desk.one.pulled[1] == (b'state',)


@pytest.mark.parametrize('number', [0, 1, 98, 99, 100, 199, 2**40])
def test_a_relay_is_restarted_in_any_round(number):
  desk = Desk(deadline=None)
  for worker in desk.workers:
    worker.round = number
    worker.hello()
  for _ in range(3):
    desk.round_of(desk.workers)
  assert desk.rounds.round == number + 3


def test_what_a_member_says():
  """Nothing that fits a header ends the relay, and other workers begin again."""
  numbers = [0, 1, -1, 2**47, 2**48, 2**62, 2**63 - 1, -(2**63)]
  bodies = [b'', TEXT, b'[]', b'\xff', b'[' * 10_000, TRAIN, EVALUATE, b'x']
  rng = random.Random(0)
  for _ in range(20):
    desk = Desk(history=3)
    awaited(desk)
    for number in range(1000):
      worker = desk.workers[rng.choice([0, 0, 0, 1])]
      count = rng.choice([0, 1, 1, 2, WORKERS, WORKERS + 1])
      worker.send(
        rng.choice([*KINDS, 0, 99]),
        *rng.choices(bodies, k=count),
        rank=rng.choice([worker.rank, 0, 7, 2**16 - 1]),
        round=rng.choice([*numbers, worker.round, desk.rounds.round]),
        number=rng.choice(numbers),
        chain=rng.choice([worker.chain, b'', b'x' * frames.CHAIN]),
        again=rng.random() < 0.5,
      )
      if number % 50 == 0:
        desk.wait(rng.choice([0.1, 3, 20, 61]))
        desk.rounds.forget()
        awaited(desk)
    desk.wait(10_000)
    desk.rounds.forget()
    desk.workers = [Worker(desk, rank) for rank in range(WORKERS)]
    awaited(desk)
    desk.round_of(desk.workers)
    assert desk.rounds.round == 1


def test_wrong_workers_that_come_first():
  """Of another count, with another text: those that are right get in."""
  desk = Desk()
  for text in (b'no json', b'[]', frames.described(4, {})):
    desk.one.text = text
    desk.one.hello()
    assert desk.one.answers == ['REFUSED']
    desk.one.answers.clear()
  desk.one.text = frames.described(WORKERS, {'k': '9'})
  desk.one.hello()
  for worker in desk.others:
    worker.hello()
  assert desk.one.answers == ['REFUSED'] and desk.others[0].answers == []
  right = Worker(desk, 0)
  desk.workers.append(right)
  right.hello()
  assert right.answers == desk.others[0].answers == ['WELCOME']


@pytest.mark.parametrize('most', [0, 1, 2])
def test_most_states_of_equal_steps_win(most):
  """Whatever their ranks; and most steps win over most workers."""
  desk = Desk()
  for worker in desk.workers:
    worker.chain = b'xy'[worker.rank == most :][:1] * frames.CHAIN
    worker.hello()
  places = [desk.rounds._members[rank].awaited for rank in range(WORKERS)]
  assert places == [rank != most for rank in range(WORKERS)]


def test_lines_in_the_log(caplog):
  """Workers cause any number of them, and a minute has few."""
  caplog.set_level('INFO')
  desk = Desk()
  awaited(desk)
  stranger = Worker(desk, 1)
  for number in range(2000):
    desk.one.send(frames.LISTEN, chain=os.urandom(frames.CHAIN))
    desk.one.send(frames.HELLO, frames.described(WORKERS, {'k': str(number)}))
    desk.one.send(frames.HELLO, b'x' * 5000)
    desk.one.send(frames.LISTEN, *[b''] * 2)
    desk.one.send(frames.HELLO, TEXT, program=os.urandom(8))
    stranger.send(99, rank=2 + number)
    stranger.send(frames.LISTEN)
    desk.clock.now += 3 * (number % 10 == 0)
  minutes = (desk.clock.now - 1000) / 60
  assert 20 < len(caplog.records) < 10 * 23 * (minutes + 1)
  assert max(len(r.getMessage()) for r in caplog.records) <= 300


def test_options():
  for name, value in {
    'workers': 0,
    'deadline': float('nan'),
    'start': float('inf'),
    'history': -5,
    'max_message': -1,
  }.items():
    with pytest.raises(ValueError, match=f'{name} must be from .*, got'):
      rounds.Options(**{'workers': 3} | {name: value})
