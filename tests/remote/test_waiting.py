"""Workers that wait for a relay: signals end them, and `pause` needs one."""

import os
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from test_bits import Clock, Joined

import demo_optax
from demo_optax.remote import __main__ as command
from demo_optax.remote import link
from demo_optax.remote.link import Position, link_of


@pytest.fixture(name='heard')
def make_heard():
  """Signals that a program only notes, to end after its step."""
  heard = []
  former = {
    number: signal.signal(number, lambda number, _: heard.append(number))
    for number in (signal.SIGTERM, signal.SIGINT)
  }
  handlers = list(map(signal.getsignal, former))
  yield heard
  assert list(map(signal.getsignal, former)) == handlers
  for number, handler in former.items():
    signal.signal(number, handler)


def make_step(workers):
  return demo_optax.data_parallel(workers, batch_argnames='x')(
    lambda params, x: {'w': params['w'] + demo_optax.over_workers(x.mean())}
  )


def interrupted(workers, number, call):
  """Returns tenths of a second from a signal to the end of a call."""
  own, waits = link_of(workers), []

  def note():  # ten times a second
    if not waits:
      os.kill(os.getpid(), number)
    waits.append(number)
    assert len(waits) < 100, 'it has not ended'

  own.while_waiting = note
  with pytest.raises(KeyboardInterrupt):
    call()
  del own.while_waiting
  return len(waits)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_without_a_relay(heard, number):
  workers = demo_optax.Workers.remote(
    f'tcp://127.0.0.1:{number:d}', rank=0, count=1
  )
  step, params = make_step(workers), {'w': jnp.zeros(3)}
  x = np.ones(2, np.float32)
  assert interrupted(workers, number, lambda: step(params, x=x)) <= 10
  link_of(workers).close()
  assert heard == [number]
  np.testing.assert_array_equal(params['w'], np.zeros(3))


def test_a_signal_where_the_others_do_not_come(heard, monkeypatch):
  """Before the run, in a round, and where a state is wanted."""
  x = np.ones(2, np.float32)
  with Joined(2, clock=Clock()) as joined:
    one, other = map(joined.workers, range(2))
    step, params = make_step(one), {'w': jnp.zeros(3)}
    assert interrupted(one, signal.SIGINT, lambda: step(params, x=x)) <= 10
    ready = threading.Event()

    def train():
      theirs = make_step(other)
      state = theirs(params, x=x)
      ready.wait(60)
      theirs(state, x=x)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    params = step(params, x=x)
    assert interrupted(one, signal.SIGTERM, lambda: step(params, x=x)) <= 10
    own, at = link_of(one), link_of(one).position
    own.position = Position()
    assert interrupted(one, signal.SIGINT, lambda: step(params, x=x)) <= 10
    own.position = at
    # One that comes in the middle of a step, which the other one lets end.
    monkeypatch.setattr(link, '_GRACE', 600)
    timers = [
      threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)),
      threading.Timer(0.4, ready.set),
    ]
    for timer in timers:
      timer.start()
    params = step(params, x=x)
    thread.join(20)
    np.testing.assert_array_equal(params['w'], np.full(3, 2))
  assert heard == [signal.SIGINT, signal.SIGTERM] * 2


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_relay_that_waits_for_its_only_worker(number, capsys):
  """It prints where it listens, and a signal ends it within a second."""
  former = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
  sent = []

  def send():
    sent.append(time.monotonic())
    os.kill(os.getpid(), number)

  timer = threading.Timer(0.2, send)
  timer.start()
  try:
    command.main(['--workers', '1', '--port', '0'])
  finally:
    timer.join()
    for n, handler in former.items():
      signal.signal(n, handler)
  assert time.monotonic() - sent[0] < 1
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith('relay for 1 workers on tcp://127.0.0.1:')


def test_pause_needs_a_relay():
  with pytest.raises(ValueError, match=r'workers must be Workers.remote, got'):
    demo_optax.remote.pause(demo_optax.Workers.simulated(2))
