"""A worker's connection to the relay."""

import atexit
import contextlib
import functools
import logging
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
_ASK = 0.5  # seconds after which an answer is asked for again
_ASK_LARGE = 10.0  # if there is a list in the request, or a part in the answer
_WARN = 30  # seconds without an answer between warnings
_GRACE = 5  # slices in which a step may end after a signal
_BEAT = 5.0  # seconds in which the first process of several says something

_Answer = tuple[Header, list[bytes]]
_ANSWERS = {frames.HELLO: frames.WELCOME, frames.PULL: frames.PULL}


class Behind(Exception):  # noqa: N818
  """The run has gone on without this worker.

  It must take a state (its position is empty), or say hello to a new relay
  (`open` is -1).
  """


class Position(NamedTuple):
  """Where a worker is in the run, beside its arrays."""

  round: int = 0  # that it takes part in next
  chain: bytes = b''  # digest of the lists before that; b'' if it has to join
  last: tuple[bytes, ...] = ()  # the list of the round before
  then: int = frames.NOTHING  # what workers do in the next training step


class Link:
  """A worker's connection to a relay."""

  def __init__(self, address: str, rank: int | None, keys: str | None):
    self.position = Position()
    self.open = -1  # the round that is open, as far as the worker knows
    self.joined = 0  # how often it has taken the state of another one
    self.parted = 0  # how often its state was not that of the others
    self.shared = ''  # names and types of the shared arrays, once one changes
    self.rank = frames.FOLLOWER if rank is None else rank
    self._name = frames.name_of(self.rank)
    self._address = address
    self._keys = frames.keys_for(address, keys)
    if self._keys is not None and len(self._keys.others) > 1:
      raise ValueError(
        f'keys must be the file of a worker, got that of the relay, {keys}.'
        ' Give worker-N.key to worker N.'
      )
    self._program = os.urandom(8)
    self._text = b''  # of the last hello
    self._slices_left = math.inf  # in which one still waits after a signal
    self._largest = 0  # bytes of a message
    self._taken = b''  # chain of the state that was taken last
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
      public, secret, (relay,) = self._keys
      socket.curve_serverkey = relay.encode()
      socket.curve_publickey = public.encode()
      socket.curve_secretkey = secret.encode()
    socket.linger = 0
    socket.immediate = 1  # nothing waits for a connection
    socket.heartbeat_ivl = 5000
    socket.heartbeat_timeout = 30000
    socket.ipv6 = 1
    socket.connect(self._address)
    return socket

  def hello(self, text: bytes, digest: bytes, steps: int = 0) -> None:
    """Takes part; waits until the run has begun.

    `text` must be the same for all workers. `digest` and `steps` are of the
    worker's shared state as it is now: a run begins with that of most steps,
    and else with that of most workers. A relay that was restarted gets the
    position and the last list, and continues from there.

    The worker takes its round for the open one: if it has sent a message, and
    the list with it is there, it must know that it is in it.
    """
    self._text = text
    if not self.position.chain:
      self.position = Position(chain=digest)
    _, (limit,) = self._ask(
      frames.HELLO, text, *self.position.last, number=steps
    )
    self.open = self.position.round
    self._largest = int(limit)

  def gather(self, body: bytes) -> list[bytes]:
    """Sends a message; returns all of its round, b'' of absent workers.

    With b'' it only receives.
    """
    if len(body) > self._largest:
      raise ValueError(
        f'A message must have at most {self._largest:,} bytes, got'
        f' {len(body):,}. Start the relay with a larger --max-message.'
      )
    kind = frames.MESSAGE if body else frames.LISTEN
    header, closed = self._ask(kind, body)
    self.open = header.number
    chain = frames.digest(self.position.chain, *closed)
    then = closed[0][-1]
    self.position = Position(header.round + 1, chain, tuple(closed), then)
    return frames.unpacked(closed)

  def part(self) -> None:
    """Notes that the worker's state is not that of the others: it must join."""
    _LOG.warning('%s has another state than the others', self._name)
    self.position = Position()
    self.parted += 1

  def pause(self) -> None:
    """Says that the others need not wait for this worker until it is back."""
    if self._socket is not None:
      request = self._header(frames.PAUSE).pack()
      with contextlib.suppress(zmq.Again):  # there is no connection
        self._socket.send(request, zmq.NOBLOCK)

  def state(self) -> memoryview:
    """Returns the shared state of another worker, and takes its position."""
    _LOG.info('%s takes the state of another worker', self._name)
    while True:
      source, parts = self._pull()
      digest, body = parts[: frames.CHAIN], parts[frames.CHAIN :]
      self._taken = source.chain  # another one if this one does not help
      if frames.digest(body) == digest:
        number = source.number
        self.position = Position(number, source.chain, (), body[0])
        self.open = max(self.open, number)
        self.joined += 1
        return body[1:]

  def _pull(self) -> tuple[Header, memoryview]:
    """Returns a state as it was sent, after its round and chain in a header."""
    parts: list[bytes] = []
    source = Header(frames.PULL)
    while not parts or len(parts[-1]) == frames.PART:
      header, found = self._ask(frames.PULL, self._taken, round=len(parts))
      if not found:  # it is not there yet
        time.sleep(_SLICE / 1000)
      elif parts and header.chain != source.chain:  # of a later round
        parts.clear()
      else:
        parts += found
        source = header
    return source, memoryview(b''.join(parts))

  def send_state(self, state: bytes) -> None:
    """Sends the shared state at this position, from a thread."""
    if self._socket is not None and not self._pushing.is_alive():
      body = bytes([self.position.then]) + state
      pushed = frames.digest(body) + body, self._header(frames.PUSH)
      self._pushing = threading.Thread(
        target=self._push, args=pushed, daemon=True
      )
      self._pushing.start()

  def _push(self, state: bytes, header: Header) -> None:
    """Sends the parts of a state, each when the relay has the one before."""
    socket = self._connect()
    # The last part is smaller than the others: it may be empty.
    for start in range(0, len(state) + 1, frames.PART):
      part = state[start : start + frames.PART]
      socket.send_multipart([header.pack(), part])
      header = header._replace(number=header.number + 1)
      is_answered = socket.poll(1000 * _WARN)
      if not is_answered or socket.recv() != header.pack():
        break
    socket.close()

  # Signals --------------------------------------------------------------------

  @contextlib.contextmanager
  def interruptible(self) -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C end what waits for the relay.

    Handlers of the program are called as before. If one of them only notes the
    signal, until the end of the step, and this worker waits for so long that
    the step does not end, a `KeyboardInterrupt` is raised where it waits.
    """
    former = {}
    with contextlib.suppress(ValueError):  # not in the main thread
      for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler):
          signal.signal(number, functools.partial(self._hear, handler))
          former[number] = handler
    try:
      yield
    finally:
      self._slices_left = math.inf
      for number, handler in former.items():
        signal.signal(number, handler)

  def _hear(self, handler: Callable[..., None], *signal_and_frame: Any) -> None:
    self._slices_left = min(self._slices_left, _GRACE)
    handler(*signal_and_frame)

  def _heed_signals(self) -> None:
    self._slices_left -= 1
    if self._slices_left < 0:
      raise KeyboardInterrupt(
        'A signal has ended the wait for the relay; the arrays of the step are'
        ' as they were before.'
      )

  # Requests and answers -------------------------------------------------------

  def _header(self, kind: int, **fields: Any) -> Header:
    number, chain, *_ = self.position
    header = Header(kind, self.rank, number, 0, chain, self._program)
    return header._replace(**fields)

  def _ask(self, kind: int, *bodies: bytes, **fields: Any) -> _Answer:
    """Returns the answer to a request, or raises `Behind`."""
    header = self._header(kind, **fields)
    answer, found = self._request(header, *bodies)
    if answer.kind == frames.REFUSED:
      raise RuntimeError(self._reason(*found))
    if answer.kind == frames.GONE:
      self.position = Position()
      raise Behind
    if answer.kind == frames.UNKNOWN:
      self.open = -1  # the relay is a new one
      raise Behind
    return answer, found

  def _request(self, header: Header, *bodies: bytes) -> _Answer:
    """Sends a request, again if need be, until it is answered."""
    kind = header.kind
    request = [header.pack(), *bodies]
    again = header._replace(again=True)
    repeated = [again.pack(), *bodies]
    if kind == frames.MESSAGE:  # it is there, unless it was lost
      repeated = [again._replace(kind=frames.LISTEN).pack()]
    seconds = _ASK_LARGE if kind in (frames.HELLO, frames.PULL) else _ASK
    heard = time.monotonic()  # or warned
    frame, ask_at = request, 0.0
    while True:
      now = time.monotonic()
      if now >= ask_at:
        with contextlib.suppress(zmq.Again):  # there is no connection
          self._socket.send_multipart(frame, zmq.NOBLOCK)
          frame, ask_at = repeated, now + seconds
      self.while_waiting()
      self._heed_signals()
      if self._socket.poll(_SLICE):
        head, *found = self._socket.recv_multipart()
        answer = frames.unpack(head)
        if answer is None:
          continue
        if _fits(answer, header):
          return answer, found
        heard = now
        is_lost = (answer.kind, answer.round) == (frames.AGAIN, header.round)
        if is_lost and kind == frames.MESSAGE:
          frame, ask_at = request, now
      elif now - heard > _WARN:
        heard = now
        _LOG.warning(
          'no answer from the relay at %s for %d s. Is it running, and is this'
          ' the key of %s?',
          self._address,
          _WARN,
          self._name,
        )

  def _reason(self, reason: bytes, run: bytes = b'') -> str:
    """Returns why this worker cannot take part."""
    if not run:
      return reason.decode('utf-8', 'replace')
    return (
      f'{self._name} must run what the others run, got'
      f'{_only_in(self._text, run)}\nwhere the run has'
      f'{_only_in(run, self._text)}\nStart it with the same. If the others'
      ' are wrong, start them again.'
    )


def _only_in(one: bytes, other: bytes) -> str:
  """Returns the lines that another text has not."""
  lines = {*one.splitlines()} - {*other.splitlines()}
  indented = [b'\n  ' + line for line in sorted(lines)]
  return b''.join(indented).decode('utf-8', 'replace')


def _fits(answer: Header, request: Header) -> bool:
  """Returns whether an answer belongs to a request, not to an earlier one."""
  if answer.kind in (frames.UNKNOWN, frames.GONE, frames.REFUSED):
    return True
  wanted = _ANSWERS.get(request.kind, frames.LIST)
  return (answer.kind, answer.round) == (wanted, request.round)


class SharedLink(Link):
  """The link of a worker of several processes, of which the first one has it.

  All call the same methods, and go on from the answers that the first one gets.
  """

  _said = 0.0  # when the others heard of the first process

  def _request(self, *args: Any) -> _Answer:
    found: Any
    if self._socket is None:
      while not (data := self._from_first(b'')):
        pass  # the first process waits
      found = pickle.loads(data)
    else:
      try:
        found = super()._request(*args)
      except BaseException as error:
        found = error
      self._from_first(pickle.dumps(found))
    if isinstance(found, BaseException):
      raise found
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
  return _link(*workers.relay)
