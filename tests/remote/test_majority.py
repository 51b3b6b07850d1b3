"""Whose state is that of all: that of most workers, whatever their ranks."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import wait_until
from test_bits import Clock, Joined, pass_when

import demo_optax
from demo_optax.checkpoint import Checkpointer
from demo_optax.remote import frames, rounds, states
from demo_optax.remote.link import link_of

ARRAYS = [  # of every dtype that a state may have
  jnp.linspace(-1, 1, 1000),
  jnp.int32(7),
  jnp.ones(3, jnp.complex64),
  jnp.ones(3, jnp.int4),
  jnp.ones(3, bool),
  jnp.ones((), jnp.bfloat16),
  jnp.float32(np.inf),
]
FIRST, *REST = ARRAYS
SPOILED = {
  'equal': FIRST,
  'rounded': FIRST * jnp.float32(1 + 1e-5),
  'a bit': FIRST.at[100].add(1e-7),
  'other': FIRST * jnp.float32(1 + 1e-2),
  'larger': FIRST.at[501].add(1000),
  'nan': FIRST.at[501].set(np.nan),
  'inf': FIRST.at[501].set(np.inf),
}


def sketch(hardware, state):
  found = states.sketch([SPOILED[state], *REST])
  return hardware.encode().ljust(frames.CHAIN) + found[frames.CHAIN :]


@pytest.mark.parametrize(
  'found, majority',
  [
    ('a equal, a equal, a equal', [0, 1, 2]),
    ('a equal', [0]),
    # Hardware of one kind: to the bit.
    ('a a bit, a equal, a equal', [1, 2]),
    ('a equal, a a bit, a equal', [0, 2]),
    ('a nan, a equal, a equal', [1, 2]),
    ('a a bit, a equal', []),
    ('a a bit, a rounded, a equal', []),
    ('a other, a other, a equal, a equal', []),
    # Of several kinds: by samples, with each kind to the bit.
    ('a equal, b rounded, c a bit', [0, 1, 2]),
    ('a larger, b rounded, c equal', [1, 2]),
    ('a equal, b other, c rounded', [0, 2]),
    ('a equal, b inf, c rounded', [0, 2]),
    ('a inf, b inf, c rounded', [0, 1]),
    ('a nan, b equal, c rounded', [1, 2]),
    ('a equal, a equal, a a bit, b rounded, b rounded', [0, 1, 3, 4]),
    ('a a bit, a equal, a equal, b rounded', [1, 2, 3]),
    ('a other, b equal', []),
    # NaN differs from everything.
    ('a nan', []),
    ('a nan, a nan, a equal', []),
    ('a nan, b nan, c equal', []),
    ('a nan, a nan, a equal, a equal, b rounded', [2, 3, 4]),
  ],
)
def test_majority(found, majority):
  sketches = dict(enumerate(sketch(s[0], s[2:]) for s in found.split(', ')))
  assert states.majority(sketches) == majority


@pytest.mark.parametrize('number', range(len(ARRAYS)))
def test_all_arrays_are_compared(number):
  """Also with those of other hardware, of which integers are not rounded."""
  x = ARRAYS[number]
  arrays = [*ARRAYS[:number], jnp.zeros_like(x), *ARRAYS[number + 1 :]]
  for hardware in 'ab':
    other = hardware.encode() * frames.CHAIN
    one, two = (
      own + states.sketch(of)[frames.CHAIN :]
      for own, of in ((b'a' * frames.CHAIN, ARRAYS), (other, arrays))
    )
    assert not states.majority({0: one, 1: two})
    assert states.majority({0: one, 1: one})


def test_a_count_that_is_one_step_ahead():
  """Integers of other hardware must be equal: nothing rounds them."""
  one, two = (
    own * frames.CHAIN + states.sketch([jnp.int32(n)])[frames.CHAIN :]
    for own, n in ((b'a', 10_000), (b'b', 10_001))
  )
  assert states.majority({0: one, 1: two}) == []


def test_hardware(monkeypatch):
  """JAX calls all processors 'cpu', and compiles for each of them."""
  find, found = states.hardware.__wrapped__, set()
  for flags in ('flags: avx2', 'flags: avx2 avx512f', 'flags: avx2'):
    text = f'processor: 0\n{flags}\nMHz: {len(found)}'
    monkeypatch.setattr(
      states.pathlib.Path, 'read_text', lambda _, text=text: text
    )
    found.add(find())
  assert len(found) == 2


@pytest.fixture(name='of_ranks')
def make_of_ranks(monkeypatch):
  """Makes the hardware of each worker another one."""
  local, real = threading.local(), states.sketch

  def sketch_of(arrays):
    found = real(arrays)
    return bytes([local.rank]) * frames.CHAIN + found[frames.CHAIN :]

  def use(rank):
    local.rank = rank
    monkeypatch.setattr(states, 'sketch', sketch_of)

  return use


class Run:
  """Workers that train a small model until all of them are in a late round.

  With a folder they save their state when a step fails.
  """

  folder = None

  def __init__(self, count, last=24, unlike=lambda rank: None):
    self.count, self.last, self.unlike = count, last, unlike
    self.links, self.found = {}, {}  # the last by rank, then round
    self.errors = {rank: [] for rank in range(count)}

  def before(self, rank, params):
    """Is called before each step."""

  def worker(self, workers):
    rank, link = workers.relay.rank, link_of(workers)
    self.unlike(rank)
    self.links[rank], own = link, self.found.setdefault(rank, {})

    @demo_optax.data_parallel(workers, batch_argnums=1, donate_argnums=0)
    def step(params, x):
      mean = demo_optax.over_workers(x.mean())
      return {'w': params['w'] * 0.9 + mean, 'steps': params['steps'] + 1}

    params = {'w': jnp.full((24, 24), 0.1), 'steps': jnp.int32(0)}
    x, late = np.ones(2, np.float32), []
    while len(late) < self.count and len(self.errors[rank]) < 3:
      self.before(rank, params)
      try:
        params = step(params, x)
      except RuntimeError as error:
        self.errors[rank].append(str(error))
        if self.folder is not None:
          with Checkpointer(self.folder / str(rank), params) as checkpoints:
            checkpoints.save(len(self.errors[rank]), params)
      own[link.position.round] = jax.tree.map(np.asarray, params)
      rounds = [max(list(of), default=0) for of in list(self.found.values())]
      late = [number for number in rounds if number >= self.last]
      time.sleep(0.01)

  def run(self, **options):
    with Joined(self.count, one_trace=True, **options) as self.joined:
      self.joined.run(self.worker)
    return self

  def of(self, name):
    return [getattr(self.links[rank], name) for rank in range(self.count)]

  def check_equal(self):
    """In the last round in which all were there; no parameter is spoiled."""
    last = max(set.intersection(*map(set, self.found.values())))
    assert last >= self.last - 1
    for own in self.found.values():
      for name, x in own[last].items():
        np.testing.assert_array_equal(x, self.found[0][last][name])
      assert np.max(np.abs(own[last]['w'])) < 11


class Spoiled(Run):
  """Adds to one parameter of a worker in one of its steps."""

  def __init__(self, count, rank, delta, **options):
    super().__init__(count, **options)
    self.rank, self.delta, self.steps = rank, delta, 0

  def before(self, rank, params):
    if rank == self.rank:
      self.steps += 1
      if self.steps == 8:
        params['w'] = params['w'].at[3, 5].add(self.delta)


@pytest.mark.parametrize(
  'rank, delta, is_unlike',
  [
    (0, 1000.0, False),
    (2, 1e-6, False),
    (0, 1000.0, True),
    (1, np.nan, True),
    (0, np.nan, False),
    (0, np.inf, True),
  ],
)
def test_one_that_is_spoiled(rank, delta, is_unlike, monkeypatch, of_ranks):
  """It takes the state of another one, and the others go on."""
  monkeypatch.setattr(rounds, 'CHECK_EVERY', 6)
  unlike = of_ranks if is_unlike else lambda rank: None
  run = Spoiled(3, rank, delta, unlike=unlike).run()
  assert run.of('parted') == [own == rank for own in range(3)]
  assert [joins > 0 for joins in run.of('joined')] == run.of('parted')
  run.check_equal()


@pytest.mark.parametrize('delta', [1000.0, 1e-6, np.nan])
def test_no_majority(delta, monkeypatch, tmp_path):
  """The run ends for all, and stays ended; the state is saved as it was."""
  monkeypatch.setattr(rounds, 'CHECK_EVERY', 6)
  run = Spoiled(2, 0, delta)
  run.folder = tmp_path
  run.run()
  assert max(run.found[0]) == max(run.found[1]) == 12
  for rank, errors in run.errors.items():
    assert len(errors) == 3
    assert all('no more than half agree' in text for text in errors)
    own = run.found[rank][12]
    assert own['steps'] == 12
    with Checkpointer(tmp_path / str(rank), own) as checkpoints:
      step, saved = checkpoints.restore()
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, saved, own)
  differ = run.found[0][12]['w'] != run.found[1][12]['w']
  np.testing.assert_array_equal(np.argwhere(differ), [[3, 5]])


def test_a_state_is_taken_from_most():
  """Not of the first worker, which is spoiled between two checks."""

  class Late(Spoiled):
    def before(self, rank, params):
      super().before(rank, params)
      if rank == 3 and not self.found[3]:
        pass_when(self.joined, lambda members: len(members) == 3, 301)
        wait_until(lambda: max(list(self.found[0]), default=0) >= 9)

  run = Late(4, 0, 1000.0, last=40).run(clock=Clock(), history=2)
  assert run.of('parted') == [1, 0, 0, 0]
  assert [joins > 0 for joins in run.of('joined')] == [1, 0, 0, 1]
  run.check_equal()
  for rank in (1, 2, 3):
    assert all(np.max(np.abs(x['w'])) < 11 for x in run.found[rank].values())


def test_all_that_have_parted():
  """They say which arrays they have now: the run begins with one of them."""

  class Parting(Run):
    meeting = threading.Barrier(3)

    def before(self, rank, params):
      link = self.links[rank]
      if link.position.round == 6 and not link.parted:
        self.meeting.wait(60)
        link.part()
        if rank == 0:
          self.joined.restart()
        params['w'] = params['w'] + rank
        self.meeting.wait(60)

  run = Parting(3).run()
  assert [joins > 0 for joins in run.of('joined')] == [0, 1, 1]
  run.check_equal()
