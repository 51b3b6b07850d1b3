"""A worker's connection to the relay."""

import atexit
import contextlib
import functools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
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
# Seconds after which an answer is asked for again; to a hello, which may carry
# a list.
_ASK, _ASK_HELLO = 1.0, 10.0
_WARN = 30.0  # seconds without an answer between warnings
_BEAT = 5.0  # seconds in which the first process of several says something
_PIECE = 1 << 24  # bytes that processes send each other at once


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
    if keys is None and not frames.is_loopback(address):
      raise ValueError(
          f'keys must be given for a relay at {address}, on another host. Use'
          " this worker's file of those that python -m demo_optax.remote keys"
          ' writes.'
      )
    self.position = Position()
    self.open = -1  # the round that is open, as far as the worker knows
    self.state_wanted = False  # whether the relay has asked for the state
    self.joined = 0  # how often it has taken the state of another one
    self.parted = 0  # how often its state was not that of the others
    self.shared = ''  # names and types of the shared arrays, once one changes
    # Called ten times a second while there is no answer.
    self.while_waiting: Callable[[], None] = lambda: None
    self._address, self._rank, self._count = address, rank, count
    self._keys = None if keys is None else frames.read_keys(keys)
    self._program = os.urandom(8)
    self._text = b''
    self._digest, self._steps, self._largest = b'', 0, 0
    self._pushing: threading.Thread | None = None
    self._socket = self._connect()
    atexit.register(self.close)

  def close(self) -> None:
    """Ends the connection."""
    self._socket.close()

  def _connect(self) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    if self._keys is not None:
      socket.set(zmq.CURVE_SERVERKEY, self._keys.others[0])
      socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)
      socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IMMEDIATE, 1),  # nothing waits for a connection
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 2000),
        (zmq.HEARTBEAT_IVL, 5000),
        (zmq.HEARTBEAT_TIMEOUT, 30000),
        (zmq.IPV6, 1),
    ):
      socket.set(option, value)
    socket.connect(self._address)
    return socket

  def hello(self, text: bytes, digest: bytes, steps: int = 0) -> None:
    """Takes part, once; waits until the run has begun.

    `text` must be the same for all workers. `digest` and `steps` are of the
    worker's shared state: a run begins with that of most steps.
    """
    self._text, self._digest, self._steps = text, digest, steps
    self._greet()

  def _greet(self) -> None:
    """Says hello, with what the relay needs to go on if it was restarted."""
    at = self.position
    if not at.chain:
      at = self.position = Position(chain=self._digest)
    header, bodies = self._ask(
        lambda: (frames.HELLO, self._steps, [self._text, *at.last]),
        lambda header: header.kind == frames.WELCOME,
    )
    workers, self._largest = frames.LIMITS.unpack(bodies[0])
    if workers != self._count:
      raise ValueError(
          f'count must be that of the relay, {workers}, got {self._count}.'
          f' Start the relay with --workers {self._count}.'
      )
    self.open = header.round
    if header.number:
      self.position = Position()

  def exchange(self, body: bytes | None) -> list[bytes]:
    """Sends a message; returns all of its round, b'' of absent workers.

    With None it only receives. Raises `Behind` if the round is too long ago.
    """
    number = self.position.round
    if body is not None and len(body) > self._largest:
      raise ValueError(
          f'A message must have at most {self._largest:,} bytes, got'
          f' {len(body):,}. Start the relay with a larger --max-message.'
      )
    unsent = [] if body is None else [body]  # or lost, and to be sent again

    def request() -> tuple[int, int, list[bytes]]:
      if unsent:
        return frames.MESSAGE, 0, [unsent.pop()]
      return frames.LISTEN, 0, []

    def fits(header: Header) -> bool:
      if header.kind == frames.AGAIN and header.round == number:
        unsent[:] = [] if body is None else [body]
      return header.kind == frames.LIST and header.round == number

    header, (present, *bodies) = self._ask(request, fits, body is not None)
    rest = iter(bodies)
    messages = [next(rest) if here else b'' for here in present]
    self.open, self.state_wanted = abs(header.number), header.number < 0
    self.position = Position(
        number + 1,
        frames.after(self.position.chain, messages),
        tuple(messages),
        self.position.trained,
    )
    return messages

  def part(self) -> None:
    """Notes that the worker's state is not that of the others: it must join."""
    _LOG.warning('worker %d has another state than the others', self._rank)
    self.position = Position()
    self.parted += 1

  def pause(self) -> None:
    """Says that the others need not wait for this worker until it is back."""
    header = Header(frames.PAUSE, self._rank, program=self._program)
    with contextlib.suppress(zmq.Again):  # there is no connection
      self._socket.send_multipart([header.pack()], zmq.NOBLOCK)

  def state(self) -> bytes:
    """Returns the shared state of another worker, and takes its position."""
    _LOG.info('worker %d takes the state of another worker', self._rank)
    self.joined += 1
    parts: list[bytes] = []
    source = Header(frames.PULL, 0)

    def fits(header: Header) -> bool:
      number = header.number & 0xFFFFFFFF
      return header.kind == frames.PULL and number == len(parts)

    while not parts or len(parts) < source.number >> 32:  # the high half
      header, bodies = self._ask(lambda: (frames.PULL, len(parts), []), fits)
      if not bodies or not bodies[0]:  # it is not there yet
        time.sleep(_SLICE / 1000)
        continue
      if parts and header.chain != source.chain:  # of a later round
        parts.clear()
        continue
      parts.append(bodies[0])
      source = header
      if len(parts) == source.number >> 32:
        state = memoryview(b''.join(parts))
        if frames.digest(state[frames.CHAIN :]) != state[: frames.CHAIN]:
          parts.clear()  # it is damaged, and so would be the relay's copy
          self.position = Position(source.round + 1)
    self.position = Position(source.round, source.chain)
    self.open = max(self.open, source.round)
    return bytes(state[frames.CHAIN :])

  def send_state(self, state: bytes) -> None:
    """Sends the shared state at this position, from a thread."""
    self.state_wanted = False
    state = frames.digest(state) + state
    if self._pushing is None or not self._pushing.is_alive():
      self._pushing = threading.Thread(
          target=self._push, args=(state, self.position), daemon=True
      )
      self._pushing.start()

  def _push(self, state: bytes, at: Position) -> None:
    size, socket = frames.PART, self._connect()
    parts = -(-len(state) // size)
    number = 0
    while number < parts:
      header = Header(
          frames.PUSH, self._rank, at.round, parts << 32 | number, at.chain,
          self._program,
      )
      body = memoryview(state)[number * size : (number + 1) * size]
      socket.send_multipart([header.pack(), body])
      if not socket.poll(1000 * _WARN):
        break
      answer = frames.unpack(socket.recv_multipart()[0])
      if answer is None or answer.kind != frames.PUSH or (
          answer.number <= number
      ):
        break
      number = answer.number
    socket.close()

  # Requests and answers -------------------------------------------------------

  def _ask(
      self,
      request: Callable[[], tuple[int, int, list[bytes]]],
      fits: Callable[[Header], bool],
      may_repeat: bool = False,
  ) -> tuple[Header, list[bytes]]:
    """Sends a request, again if need be, until an answer fits.

    With `may_repeat` also when the relay says that the message is lost.
    """
    began = warned = time.monotonic()
    again = False
    while True:
      kind, number, bodies = request()
      at = self.position
      header = Header(
          kind, self._rank, at.round, number, at.chain, self._program, again
      )
      until = time.monotonic()
      with contextlib.suppress(zmq.Again):  # there is no connection
        self._socket.send_multipart([header.pack(), *bodies], zmq.NOBLOCK)
        until += _ASK_HELLO if kind == frames.HELLO else _ASK
        again = True
      until = max(until, time.monotonic() + _SLICE / 1000)
      while time.monotonic() < until:
        self.while_waiting()
        if not self._socket.poll(_SLICE):
          continue
        head, *found = self._socket.recv_multipart()
        answer = frames.unpack(head)
        if answer is None:
          continue
        began = warned = time.monotonic()
        if fits(answer):
          return answer, found
        if answer.kind == frames.REFUSED:
          raise RuntimeError(self._reason(found))
        if answer.kind == frames.GONE:
          self.position = Position()
          raise Behind
        if answer.kind == frames.UNKNOWN and kind != frames.HELLO:
          _LOG.info('the relay is a new one; worker %d says hello', self._rank)
          self._greet()
          if self.position != at or kind == frames.PULL:
            raise Behind
          break
        if answer.kind == frames.AGAIN and may_repeat:
          break
      if time.monotonic() - warned > _WARN:
        warned = time.monotonic()
        _LOG.warning(
            'no answer from the relay at %s for %.0f s. Is it running, and is'
            ' this the key of worker %d?',
            self._address, warned - began, self._rank,
        )

  def _reason(self, bodies: list[bytes]) -> str:
    """Returns why this worker cannot take part."""
    if bodies and bodies[0]:
      return bodies[0].decode('utf-8', 'replace')
    ours = frames.read_text(self._text)
    theirs = frames.read_text(bodies[1] if len(bodies) > 1 else b'')
    different = [
        name for name in ours | theirs if ours.get(name) != theirs.get(name)
    ]
    return '\n'.join([
        f'Worker {self._rank} must run what the others run; different are'
        f' {", ".join(different)}:',
        *(f'  {name}: {ours.get(name)} here, {theirs.get(name)} in the run'
          for name in different),
    ])


class SharedLink:
  """The link of a worker of several processes, which the first one holds.

  All processes call the same methods. All of them get what the first one's link
  returns or raises, and its attributes.
  """

  _MIRRORED = 'position', 'open', 'state_wanted', 'joined', 'parted'

  def __init__(self, *of: Any):
    self._link = Link(*of) if jax.process_index() == 0 else None
    self.position, self.open, self.shared = Position(), -1, ''
    self.state_wanted, self.joined, self.parted = False, 0, 0
    self._sent = 0.0  # when the others heard of the first process
    if self._link is not None:
      self._link.while_waiting = self._say_waiting

  def __getattr__(self, name: str) -> Callable[..., Any]:
    """Returns a method of `Link`, for all processes to call."""
    return functools.partial(self._call, name)

  def close(self) -> None:
    """Ends the connection, if this process holds it."""
    if self._link is not None:
      self._link.close()

  def _call(self, name: str, *args: Any) -> Any:
    returned, error = None, None
    if self._link is not None:
      self._link.position = self.position  # a failed step has set it back
      try:
        returned = getattr(self._link, name)(*args)
      except BaseException as raised:
        error = raised
      at = [getattr(self._link, x) for x in self._MIRRORED]
      reason = None if error is None else f'{type(error).__name__}: {error}'
      is_behind = isinstance(error, Behind)
      self._from_first(pickle.dumps((returned, at, is_behind, reason)))
    else:
      while not (data := self._from_first(b'')):
        pass  # the first process waits
      returned, at, is_behind, reason = pickle.loads(data)
    for attribute, value in zip(self._MIRRORED, at):
      setattr(self, attribute, value)
    if error is not None:
      raise error
    if reason is not None:
      raise Behind if is_behind else RuntimeError(f'In process 0: {reason}')
    return returned

  def _say_waiting(self) -> None:
    """Lets the others begin to wait again: collectives have time limits."""
    if time.monotonic() - self._sent > _BEAT:
      self._from_first(b'')

  def _from_first(self, data: bytes) -> bytes:
    """Returns the bytes of the first process, in all of them."""
    (size,) = multihost_utils.broadcast_one_to_all(
        np.frombuffer(len(data).to_bytes(8, 'little'), np.uint32).reshape(1, 2)
    )
    left, found = int(size[0]) + (int(size[1]) << 32), []
    while left:
      # Few sizes: each is a program.
      piece = np.zeros(min(1 << (left - 1).bit_length(), _PIECE), np.uint8)
      own = np.frombuffer(data[:_PIECE], np.uint8)
      piece[: own.size] = own
      piece = np.asarray(multihost_utils.broadcast_one_to_all(piece))
      found.append(piece[:left].tobytes())
      data, left = data[_PIECE:], left - len(found[-1])
    self._sent = time.monotonic()
    return b''.join(found)


Connection = Link | SharedLink


def link_of(workers: Workers) -> Connection:
  """Returns this process's connection for a worker."""
  assert workers.relay is not None
  address, rank, keys = workers.relay
  kind = SharedLink if jax.process_count() > 1 else Link
  return _link(kind, address, rank, workers.count, keys)


@functools.cache
def _link(kind: type[Connection], *of: Any) -> Connection:
  return kind(*of)
