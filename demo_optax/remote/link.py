"""A worker's connection to the relay."""

import atexit
import contextlib
import functools
import json
import logging
import os
import pickle
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import zmq
from jax.experimental import multihost_utils

from demo_optax.remote import frames
from demo_optax.remote.frames import Header
from demo_optax.workers import Workers

_LOG = logging.getLogger('demo_optax.remote')

_SLICE = 100  # milliseconds in a wait, between which signals are handled
_ASK = 1.0  # seconds after which an answer is asked for again
_ASK_LARGE = 10.0  # if there is a list in the request, or a part in the answer
_WARN = 30.0  # seconds without an answer between warnings
_BEAT = 5.0  # seconds in which the first process of several says something

_Answer = tuple[Header, list[bytes]]


class Behind(Exception):  # noqa: N818
  """The lists since a worker's last round are gone: it must join."""


class Position(NamedTuple):
  """Where a worker is in the run, beside its arrays."""

  round: int = 0  # that it takes part in next
  # Digest of the lists before that; b'' if it has to join, by a state of that
  # round or of a later one.
  chain: bytes = b''
  last: tuple[bytes, ...] = ()  # the list of the round before
  trained: int = -1  # the last round of a training step, -1 before it


class Link:
  """A worker's connection to a relay."""

  def __init__(self, address: str, rank: int, count: int, keys: str | None):
    self.position = Position()
    self.open = -1  # the round that is open, as far as the worker knows
    self.state_wanted = False  # whether this worker shall send its state
    self.joined = 0  # how often it has taken the state of another one
    self.parted = 0  # how often its state was not that of the others
    self.shared = ''  # names and types of the shared arrays, once one changes
    self._address, self._rank, self._count = address, rank, count
    self._keys = frames.keys_for(address, keys)
    self._program = os.urandom(8)
    self._hello = b'', b'', 0  # what `hello` was called with
    self._largest = 0  # bytes of a message
    self._pushing = threading.Thread()
    self._socket = self._connect()
    atexit.register(self.close)

  def while_waiting(self) -> None:
    """Is called ten times a second while there is no answer."""

  def close(self) -> None:
    """Ends the connection."""
    if self._socket is not None:
      self._socket.close()

  def _connect(self) -> Any:
    """Returns a socket, in the first process of a worker."""
    if jax.process_index():
      return None
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    if self._keys is not None:
      socket.set_string(zmq.CURVE_SERVERKEY, self._keys.others[0])
      socket.set_string(zmq.CURVE_PUBLICKEY, self._keys.public)
      socket.set_string(zmq.CURVE_SECRETKEY, self._keys.secret)
    socket.linger = 0
    socket.immediate = 1  # nothing waits for a connection
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    socket.heartbeat_ivl = 5000
    socket.heartbeat_timeout = 30000
    socket.ipv6 = 1
    socket.connect(self._address)
    return socket

  def hello(self, text: bytes, digest: bytes, steps: int = 0) -> None:
    """Takes part; waits until the run has begun.

    `text` must be the same for all workers. `digest` and `steps` are of the
    worker's shared state: a run begins with that of most steps. A relay that
    was restarted gets the same and the last list, and continues from there.
    """
    self._hello = text, digest, steps
    if not self.position.chain:
      self.position = Position(chain=digest)
    header, bodies = self._ask(frames.HELLO, steps, text, *self.position.last)
    workers, self._largest = frames.LIMITS.unpack(bodies[0])
    if workers != self._count:
      raise ValueError(
        f'count must be that of the relay, {workers}, got {self._count}.'
        f' Start the relay with --workers {self._count}.'
      )
    self.open = header.round

  def exchange(self, body: bytes) -> list[bytes]:
    """Sends a message; returns all of its round, b'' of absent workers.

    With b'' it only receives. Raises `Behind` if the round is too long ago.
    """
    if len(body) > self._largest:
      raise ValueError(
        f'A message must have at most {self._largest:,} bytes, got'
        f' {len(body):,}. Start the relay with a larger --max-message.'
      )
    kind = frames.MESSAGE if body else frames.LISTEN
    header, (present, *bodies) = self._ask(kind, 0, body)
    rest = iter(bodies)
    messages = [next(rest) if here else b'' for here in present]
    is_trained = any(map(frames.changes_state, messages))
    self.open = abs(header.number)
    is_first = present.index(1) == self._rank  # of those who took part
    self.state_wanted = is_first and is_trained and header.number < 0
    self.position = Position(
      header.round + 1,
      frames.digest(self.position.chain, *messages),
      tuple(messages),
      header.round if is_trained else self.position.trained,
    )
    return messages

  def part(self) -> None:
    """Notes that the worker's state is not that of the others: it must join."""
    _LOG.warning('worker %d has another state than the others', self._rank)
    self.position, self.state_wanted = Position(), False
    self.parted += 1

  def pause(self) -> None:
    """Says that the others need not wait for this worker until it is back."""
    if self._socket is not None:
      with contextlib.suppress(zmq.Again):  # there is no connection
        self._socket.send(self._header(frames.PAUSE).pack(), zmq.NOBLOCK)

  def state(self) -> bytes:
    """Returns the shared state of another worker, and takes its position."""
    _LOG.info('worker %d takes the state of another worker', self._rank)
    self.joined += 1
    while True:
      source, parts = self._pull()
      state = memoryview(b''.join(parts))
      self.position = Position(source.round, source.chain, (), source.round - 1)
      self.open = max(self.open, source.round)
      if frames.digest(state[frames.CHAIN :]) == state[: frames.CHAIN]:
        return bytes(state[frames.CHAIN :])
      # It is damaged, and so would be the relay's copy: take a later one.
      self.position = Position(source.round + 1)

  def _pull(self) -> _Answer:
    """Returns the parts of a state, with its round and chain in a header."""
    parts: list[bytes] = []
    source = Header(frames.PULL, 0)
    while not parts or len(parts[-1]) == frames.PART:
      header, bodies = self._ask(frames.PULL, len(parts))
      if not bodies:  # it is not there yet
        time.sleep(_SLICE / 1000)
      elif parts and header.chain != source.chain:  # of a later round
        parts.clear()
      else:
        parts += bodies
        source = header
    return source, parts

  def send_state(self, state: bytes) -> None:
    """Sends the shared state at this position, from a thread."""
    self.state_wanted = False
    if self._socket is not None and not self._pushing.is_alive():
      self._pushing = threading.Thread(
        target=self._push,
        args=(frames.digest(state) + state, self._header(frames.PUSH)),
        daemon=True,
      )
      self._pushing.start()

  def _push(self, state: bytes, header: Header) -> None:
    """Sends the parts of a state, each when the relay has the one before."""
    socket = self._connect()
    # The last part is smaller than the others: it may be empty.
    for number in range(len(state) // frames.PART + 1):
      part = memoryview(state)[number * frames.PART :][: frames.PART]
      socket.send_multipart([header._replace(number=number).pack(), part])
      taken = header._replace(number=number + 1).pack()
      if not socket.poll(1000 * _WARN) or socket.recv() != taken:
        break
    socket.close()

  # Requests and answers -------------------------------------------------------

  def _header(self, kind: int, number: int = 0) -> Header:
    at = self.position
    return Header(kind, self._rank, at.round, number, at.chain, self._program)

  def _ask(self, kind: int, number: int = 0, *bodies: bytes) -> _Answer:
    """Returns the answer to a request; says hello to a relay that is new."""
    while True:
      answer, found = self._request(kind, number, *bodies)
      if answer.kind == frames.REFUSED:
        raise RuntimeError(self._reason(found))
      if answer.kind == frames.GONE:
        self.position = Position()
        raise Behind
      if answer.kind != frames.UNKNOWN:
        return answer, found
      _LOG.info('the relay is a new one; worker %d says hello', self._rank)
      self.hello(*self._hello)
      if kind == frames.PULL:
        raise Behind

  def _request(self, kind: int, number: int, *bodies: bytes) -> _Answer:
    """Sends a request, again if need be, until it is answered."""
    header = self._header(kind, number)
    seconds = _ASK_LARGE if kind in (frames.HELLO, frames.PULL) else _ASK
    began = warned = time.monotonic()
    again, ask_at = False, 0.0
    while True:
      now = time.monotonic()
      if now >= ask_at:
        frame = [header._replace(again=again).pack(), *bodies]
        if again and kind == frames.MESSAGE:  # it is there, unless it was lost
          frame = [header._replace(kind=frames.LISTEN, again=True).pack()]
        with contextlib.suppress(zmq.Again):  # there is no connection
          self._socket.send_multipart(frame, zmq.NOBLOCK)
          again, ask_at = True, now + seconds
      self.while_waiting()
      if self._socket.poll(_SLICE):
        head, *found = self._socket.recv_multipart()
        answer = frames.unpack(head)
        if answer is None:
          continue
        if _fits(answer, header):
          return answer, found
        began = warned = now
        if kind == frames.MESSAGE and answer.kind == frames.AGAIN:
          again, ask_at = answer.round != header.round, now
      elif now - warned > _WARN:
        warned = now
        _LOG.warning(
          'no answer from the relay at %s for %.0f s. Is it running, and is'
          ' this the key of worker %d?',
          self._address,
          warned - began,
          self._rank,
        )

  def _reason(self, bodies: list[bytes]) -> str:
    """Returns why this worker cannot take part."""
    if bodies[0]:
      return bodies[0].decode('utf-8', 'replace')
    ours, theirs = json.loads(self._hello[0]), json.loads(bodies[1])
    different = [
      name for name in ours | theirs if ours.get(name) != theirs.get(name)
    ]
    return '\n'.join(
      [
        f'Worker {self._rank} must run what the others run; different are'
        f' {", ".join(different)}:',
        *(
          f'  {name}: {ours.get(name)} here, {theirs.get(name)} in the run'
          for name in different
        ),
      ]
    )


def _fits(answer: Header, request: Header) -> bool:
  """Returns whether an answer is to a request, not to an earlier one."""
  kind = request.kind
  is_same_round = answer.round == request.round
  return {
    frames.WELCOME: kind == frames.HELLO,
    frames.LIST: is_same_round and kind in (frames.MESSAGE, frames.LISTEN),
    frames.PULL: kind == frames.PULL and answer.number == request.number,
    frames.UNKNOWN: kind != frames.HELLO,
    frames.GONE: True,
    frames.REFUSED: True,
  }.get(answer.kind, False)


class SharedLink(Link):
  """The link of a worker of several processes, of which the first one has it.

  All call the same methods, and go on from the answers that the first one gets.
  """

  _said = 0.0  # when the others heard of the first process

  def _request(self, *args: Any) -> _Answer:
    if self._socket is None:
      while not (data := self._from_first(b'')):
        pass  # the first process waits
      found, reason = pickle.loads(data)
      if found is None:
        raise RuntimeError(f'In process 0: {reason}')
      return found
    try:
      found = super()._request(*args)
    except BaseException as error:
      self._from_first(pickle.dumps((None, repr(error))))
      raise
    self._from_first(pickle.dumps((found, '')))
    return found

  def while_waiting(self) -> None:
    """Lets the others begin to wait again: collectives have time limits."""
    if time.monotonic() - self._said > _BEAT:
      self._from_first(b'')

  def _from_first(self, data: bytes) -> bytes:
    """Returns the bytes of the first process, in all of them."""
    from_first = multihost_utils.broadcast_one_to_all
    size = int(from_first(np.uint32(len(data))))
    # Few sizes: each is a program.
    padded = np.zeros(1 << size.bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    padded = np.asarray(from_first(padded))
    self._said = time.monotonic()
    return padded[:size].tobytes()


@functools.cache
def _link(*of: Any) -> Link:
  return SharedLink(*of) if jax.process_count() > 1 else Link(*of)


def link_of(workers: Workers) -> Link:
  """Returns this process's connection for a worker."""
  assert workers.relay is not None
  address, rank, keys = workers.relay
  return _link(address, rank, workers.count, keys)
