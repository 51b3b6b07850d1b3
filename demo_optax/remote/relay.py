"""The relay: hands all workers the same list of messages, round by round.

It never decodes a message. It keeps the messages of the open round in memory,
and the last lists, and the state that a worker has sent for others to join, in
temporary files.

A round closes when all workers that took part in the last one have sent their
messages, or at the deadline after the first message. A late message is answered
with the list of its round, which does not contain it. So a worker that stops,
or is cut off, costs the others one deadline. A worker that was late by less
than a round is waited for in the next one, if it was not late often.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import pathlib
import statistics
import tempfile
import time
from typing import Any

import zmq
import zmq.auth.thread

from demo_optax.remote import frames
from demo_optax.remote.frames import Header

_LOG = logging.getLogger('demo_optax.relay')

# The longest that a round with messages is waited for if no deadline is given,
# in rounds of median length; and the shortest, in seconds.
_ROUNDS, _SECONDS = 5, 2.0

_MAX_TEXT = 1 << 20  # bytes of the configuration in a hello
_MAX_LISTS = 1024  # on disk, while a worker joins
_STALE = 60.0  # seconds after which a state that does not arrive is given up


@dataclasses.dataclass
class _Member:
  """A worker that has said hello."""

  identity: bytes
  program: bytes
  round: int
  chain: bytes
  last: list[bytes]  # its list of the round before
  steps: int  # of the state that it began with
  heard: float  # when


@dataclasses.dataclass
class _State:
  """The shared state of a round, as a member sends it."""

  source: int
  parts: int
  round: int = -1
  chain: bytes = b''
  next: int = 0
  since: float = 0.0

  @property
  def complete(self) -> bool:
    return self.parts > 0 and self.next == self.parts


class Relay:
  """A relay of one run; `serve` runs it.

  It listens at `address`, with the port that it was given. `round` is open.
  """

  def __init__(
      self,
      address: str,
      workers: int,
      *,
      keys: str | None = None,
      deadline: float | None = None,
      quorum: int = 1,
      start: float = 300.0,
      history: int = 64,
      max_message: int = 1 << 28,
  ):
    if keys is None and not frames.is_loopback(address):
      raise ValueError(
          f'keys must be given to listen on {address}, which other hosts reach.'
          ' Make them with python -m demo_optax.remote keys FOLDER, or listen'
          ' on tcp://127.0.0.1:PORT.'
      )
    if not 1 <= quorum <= workers:
      raise ValueError(
          f'quorum must be from 1 to {workers}, the number of workers, got'
          f' {quorum}.'
      )
    self._workers, self._quorum = workers, quorum
    self._max_message = max_message
    self._deadline, self._start, self._history = deadline, start, history
    self._context = zmq.Context()
    self._context.set(zmq.MAX_SOCKETS, 65536)
    self._ranks: dict[str, int] = {}  # by public key
    self._auth: Any = None
    self._socket = self._context.socket(zmq.ROUTER)
    if keys is not None:
      self._require(frames.read_keys(keys))
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, max_message),
        (zmq.HANDSHAKE_IVL, 5000),
        (zmq.HEARTBEAT_IVL, 5000),
        (zmq.HEARTBEAT_TIMEOUT, 30000),
        (zmq.SNDHWM, 64 + 2 * workers),
        (zmq.RCVHWM, 4),  # of each connection: each waits for answers
        (zmq.BACKLOG, 1024),
        (zmq.IPV6, int('//*' in address or '[' in address)),
    ):
      self._socket.set(option, value)
    self._socket.bind(address)
    self.address = str(self._socket.get_string(zmq.LAST_ENDPOINT))
    self._folder = tempfile.TemporaryDirectory(prefix='demo-relay-')
    self._disk = pathlib.Path(self._folder.name)
    self._lists: dict[int, tuple[bytes, list[int]]] = {}  # chain before, sizes
    # The last list, or part of a state, that a worker got: by rank, its
    # connection, the round, and the number of the part, -1 for a list.
    self._sent: dict[int, tuple[bytes, int, int]] = {}
    self.round, self._chain = 0, b''
    self._began = 0.0  # when the first message, or hello, came
    self._last_seen = self._closed = 0.0  # when a message, the last round was
    self._seconds: collections.deque[float] = collections.deque(maxlen=100)
    self._took_part: collections.Counter[int] = collections.Counter()
    self._complained = 0.0
    self._forget()

  def _forget(self) -> None:
    """Ends a run: its workers must say hello again."""
    # Until `_text` is known there is no run, and until `_opened` it waits for
    # workers to say hello.
    self._text: bytes | None = None
    self._opened = False
    self._state: _State | None = None
    self._members: dict[int, _Member] = {}
    self._bodies: dict[int, bytes] = {}
    self._listening: dict[int, bytes] = {}  # rank: identity
    self._joining: dict[int, float] = {}  # rank: when it was heard last
    self._awaited: set[int] = set()
    self._missed: collections.Counter[int] = collections.Counter()
    self._not_before: dict[int, int] = {}  # the round from which one is awaited
    for number in list(self._lists):
      self._drop(number)

  def _require(self, keys: frames.Keys) -> None:
    """Lets nobody in but the workers whose keys are known."""
    self._ranks = {key.decode(): n for n, key in enumerate(keys.others)}
    self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
    self._auth.start()
    self._auth.configure_curve_callback('*', self)
    self._socket.set(zmq.CURVE_SERVER, 1)
    self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)

  def callback(self, domain: str, key: bytes) -> bool:
    """Returns whether this is a worker's key: ZeroMQ asks."""
    return key.decode('ascii', 'replace') in self._ranks

  def serve(self, should_stop: Any = lambda: False) -> None:
    """Serves until `should_stop()` is true, asked ten times a second."""
    try:
      while not should_stop():
        if self._socket.poll(self._patience()):
          for _ in range(256):  # then look at the clock
            try:
              frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
              break
            self._take(frame)
        self._look_at_the_clock()
    finally:
      if self._auth is not None:
        self._auth.stop()
      self._socket.close()
      self._context.term()
      self._folder.cleanup()

  # What arrives ---------------------------------------------------------------

  def _take(self, received: list[Any]) -> None:
    """Acts on what one worker has sent; refuses what does not fit."""
    if not 2 <= len(received) <= 3 + self._workers:
      return self._complain(f'{len(received)} frames')
    identity, head, *rest = received
    header = frames.unpack(head.bytes)
    if header is None:
      return self._complain('no header of this version')
    if not 0 <= header.rank < self._workers:
      return self._refuse(identity.bytes, header.rank, (
          f'rank must be from 0 to {self._workers - 1}, got {header.rank}.'
          ' Start the relay with more --workers.'))
    if self._ranks:
      user = head.get('User-Id')
      if self._ranks.get(str(user)) != header.rank:
        return self._complain(f'a key that is not of rank {header.rank}')
    identity, bodies = identity.bytes, [frame.bytes for frame in rest]
    if header.kind == frames.HELLO:
      return self._hello(identity, header, bodies)
    member = self._members.get(header.rank)
    if member is None or member.program != header.program:
      if member is not None:
        return self._refuse_second(identity, header.rank)
      return self._send(identity, Header(frames.UNKNOWN, header.rank))
    member.heard = time.monotonic()
    acts = {
        frames.MESSAGE: self._message,
        frames.LISTEN: self._listen,
        frames.PUSH: self._push,
        frames.PULL: self._pull,
        frames.PAUSE: self._pause,
    }
    act = acts.get(header.kind)
    if act is None or len(bodies) > 1:
      return self._complain(f'kind {header.kind} with {len(bodies)} frames')
    if header.kind in (frames.MESSAGE, frames.LISTEN):
      self._last_seen = time.monotonic()
    act(identity, header, bodies[0] if bodies else b'')

  def _hello(
      self, identity: bytes, header: Header, bodies: list[bytes]
  ) -> None:
    rank, now = header.rank, time.monotonic()
    if not bodies or len(bodies[0]) > _MAX_TEXT or len(bodies) > (
        1 + self._workers
    ):
      return self._complain('a hello of another form')
    text, *last = bodies
    if self._text is None:
      self._text, self._began = text, now
    if text != self._text:
      _LOG.warning('worker %d has another configuration', rank)
      self._send(identity, Header(frames.REFUSED, rank), b'', self._text)
      return
    old = self._members.get(rank)
    is_new = old is None or old.program != header.program
    if old is not None and is_new and now - old.heard < _SECONDS:
      return self._refuse_second(identity, rank)
    if self._opened and header.round > self.round:
      _LOG.warning('worker %d is back from a longer run', rank)
      self._forget()
      self._text, self._began = text, now
    if is_new:
      _LOG.info('worker %d says hello, round %d', rank, header.round)
    self._members[rank] = _Member(
        identity, header.program, header.round, header.chain, last,
        header.number, now
    )
    if self._opened:
      self._welcome(rank)

  def _refuse_second(self, identity: bytes, rank: int) -> None:
    self._refuse(identity, rank, f'Another program says that it is worker'
                 f' {rank}. Give every worker a rank, and start one again'
                 f' {_SECONDS:g} s after it has ended.')

  def _open(self) -> None:
    """Begins the run, or continues one of another relay."""
    chosen = max(
        self._members, key=lambda rank: (
            self._members[rank].round, self._members[rank].steps, -rank)
    )
    self.round = self._members[chosen].round
    self._chain = self._members[chosen].chain
    if len({m.steps for m in self._members.values()}) > 1:
      _LOG.warning(
          'states of %s steps: that of worker %d is taken',
          [m.steps for _, m in sorted(self._members.items())], chosen)
    for m, other in itertools.product(self._members.values(), repeat=2):
      # A list that the one may not have received, and the other has.
      if m.round == self.round - 1 == other.round - 1 and (
          other.chain == self._chain == frames.after(m.chain, other.last)
      ):
        self._keep(m.round, m.chain, other.last)
    self._opened, self._awaited = True, set(self._members)
    self._began, self._last_seen, self._closed = 0.0, time.monotonic(), 0.0
    _LOG.info('round %d, %d workers', self.round, len(self._members))
    for rank in list(self._members):
      self._welcome(rank)

  def _welcome(self, rank: int) -> None:
    member = self._members[rank]
    before = self._lists.get(member.round, (b'', []))[0]
    current = member.round == self.round and member.chain == self._chain
    if current or (before and before == member.chain):
      header = Header(frames.WELCOME, rank, self.round)
    else:
      header = Header(frames.WELCOME, rank, self.round, 1)
      self._awaited.discard(rank)
      self._joining[rank] = time.monotonic()
      _LOG.info('worker %d joins', rank)
    member.last = []
    self._send(member.identity, header, frames.LIMITS.pack(
        self._workers, self._max_message))

  def _message(self, identity: bytes, header: Header, body: bytes) -> None:
    rank = header.rank
    if not body:
      return self._complain('an empty message')
    if not self._opened:
      return
    if header.round != self.round or header.chain != self._chain:
      before = self._lists.get(header.round, (b'', []))[0]
      if before and header.chain == before and (
          self.round >= self._not_before.get(rank, 0)
      ):
        self._awaited.add(rank)  # it is late, and may be in time now
      return self._listen(identity, header, b'')
    self._members[rank].identity = identity
    self._listening[rank] = identity
    if rank not in self._bodies:
      if not self._bodies:
        self._began = time.monotonic()
      self._bodies[rank] = body
      self._joining.pop(rank, None)

  def _listen(self, identity: bytes, header: Header, body: bytes) -> None:
    rank = header.rank
    if not self._opened:
      return
    chain = self._lists.get(header.round, (b'', []))[0]
    if rank in self._joining:
      self._joining[rank] = time.monotonic()
    if header.round == self.round and header.chain == self._chain:
      self._listening[rank] = identity
      if rank not in self._bodies:
        self._send(identity, Header(frames.AGAIN, rank, self.round))
    elif header.again and self._sent.get(rank) == (identity, header.round, -1):
      pass  # a long list on a slow link
    elif chain and chain == header.chain:
      self._send_list(identity, rank, header.round)
    else:
      self._joining[rank] = time.monotonic()
      self._send(identity, Header(frames.GONE, rank, self.round))

  def _pause(self, identity: bytes, header: Header, body: bytes) -> None:
    if header.rank not in self._bodies:
      self._awaited.discard(header.rank)

  # Rounds ---------------------------------------------------------------------

  def _limit(self) -> float:
    """Returns the seconds after a first message at which a round closes."""
    if self._deadline is not None:
      return self._deadline
    median = statistics.median(self._seconds) if self._seconds else 0.0
    return max(_SECONDS, _ROUNDS * median)

  def _patience(self) -> int:
    """Returns the milliseconds until the clock may matter."""
    if not self._opened or not self._bodies:
      return 100
    left = self._began + self._limit() - time.monotonic()
    return max(0, min(100, int(1000 * left) + 1))

  def _look_at_the_clock(self) -> None:
    now = time.monotonic()
    if self._text is not None and not self._opened and self._members:
      # A run that begins waits for all, one that continues only for some time.
      is_new = all(m.round == 0 for m in self._members.values())
      limit = self._start if is_new else max(10.0, 5 * self._limit())
      if len(self._members) == self._workers or now - self._began > limit:
        self._open()
    if self._opened and len(self._bodies) >= self._quorum:
      complete = self._bodies and self._awaited <= set(self._bodies)
      if complete or now - self._began > self._limit():
        self._close(now)
    if self._joining:
      self._ask_for_state(now)
      if now - self._last_seen > max(self._start, 3 * self._limit()):
        _LOG.info('nobody is left of the run')
        self._forget()

  def _close(self, now: float) -> None:
    """Ends a round: everybody gets the same list."""
    # Messages of a round are of one step, that of most of them. An evaluation
    # has priority: a training step is sent again in the next round.
    kinds = {
        rank: (not frames.changes_state(body[: frames.CHAIN]), len(body),
               body[: frames.CHAIN])
        for rank, body in sorted(self._bodies.items())
    }
    counts = collections.Counter(kinds.values())
    kind = max(counts, key=lambda kind: (kind[0], counts[kind]))
    for rank in [rank for rank, other in kinds.items() if other != kind]:
      _LOG.warning(
          'round %d without worker %d, which has called another step: its'
          ' message has %d bytes, not %d',
          self.round, rank, len(self._bodies.pop(rank)), kind[1])
    messages = [self._bodies.get(r, b'') for r in range(self._workers)]
    missing = self._awaited - set(self._bodies)
    if missing:
      _LOG.info('round %d without %s', self.round, sorted(missing))
    # One that is often late is waited for in ever fewer rounds.
    self._missed.update([*missing])
    for rank in missing:
      self._not_before[rank] = self.round + 2 ** min(self._missed[rank], 8)
    for rank in self._awaited - missing:
      del self._missed[rank]
    self._keep(self.round, self._chain, messages)
    self._chain = frames.after(self._chain, messages)
    self._awaited = set(self._bodies)
    if self._closed:
      self._seconds.append(now - self._closed)
    self._closed = now
    self._took_part.update([*self._bodies])
    listening, self._listening, self._bodies = self._listening, {}, {}
    closed, self.round = self.round, self.round + 1
    for rank, identity in listening.items():
      self._send_list(identity, rank, closed, messages)
    if self.round % 100 == 0:
      rare = [r for r in sorted(self._members) if self._took_part[r] < 50]
      _LOG.info(
          'round %d, %.3f s each%s', self.round,
          statistics.median(self._seconds),
          f'; in less than half of the last 100: {rare}' if rare else '')
      self._took_part.clear()

  def _send_list(
      self,
      identity: bytes,
      rank: int,
      number: int,
      messages: list[bytes] | None = None,
  ) -> None:
    self._sent[rank] = identity, number, -1
    messages = self._read(number) if messages is None else messages
    present = bytes(1 if message else 0 for message in messages)
    wanted = self._state is not None and self._state.source == rank and (
        not self._state.complete and self._state.round < 0)
    header = Header(
        frames.LIST, rank, number, -self.round if wanted else self.round
    )
    self._send(identity, header, present, *(m for m in messages if m))

  def _keep(self, number: int, chain: bytes, messages: list[bytes]) -> None:
    try:
      (self._disk / f'{number}').write_bytes(b''.join(messages))
      self._lists[number] = chain, list(map(len, messages))
    except OSError as error:  # who is late must join
      _LOG.warning('round %d is not kept: %s', number, error)
      (self._disk / f'{number}').unlink(missing_ok=True)
    keep = number - self._history
    if self._state is not None and self._joining and self._state.round >= 0:
      keep = max(min(keep, self._state.round - 1), number - _MAX_LISTS)
    for old in [n for n in self._lists if n <= keep]:
      self._drop(old)

  def _read(self, number: int) -> list[bytes]:
    data, found, start = (self._disk / f'{number}').read_bytes(), [], 0
    for size in self._lists[number][1]:
      found.append(data[start : start + size])
      start += size
    return found

  def _drop(self, number: int) -> None:
    del self._lists[number]
    (self._disk / f'{number}').unlink()

  # The state, for workers that join -------------------------------------------

  def _ask_for_state(self, now: float) -> None:
    """Chooses the worker that sends its state to those that join."""
    for rank, heard in list(self._joining.items()):
      if now - heard > _STALE:
        del self._joining[rank]
    state = self._state
    if state is not None:
      usable = state.complete and (
          state.round in self._lists or state.round == self.round
      )
      if usable or (not state.complete and now - state.since < _STALE
                    and state.source in self._awaited):
        return
    sources = self._awaited - set(self._joining)
    self._state = None
    if sources and self._joining:
      self._state = _State(min(sources), 0, since=now)

  def _push(self, identity: bytes, header: Header, body: bytes) -> None:
    state = self._state
    if state is None or state.source != header.rank or not body:
      return
    number, parts = header.number & 0xFFFFFFFF, header.number >> 32
    if number == 0:
      state.round, state.chain, state.parts = header.round, header.chain, parts
      state.next = 0
    if number == state.next and len(body) <= frames.PART and (
        header.round == state.round and number < state.parts
    ):
      mode = 'wb' if number == 0 else 'ab'
      with open(self._disk / 'state', mode) as file:
        file.write(body)
      state.next, state.since = number + 1, time.monotonic()
      if state.complete:
        _LOG.info('worker %d has sent its state of round %d, %d parts',
                  header.rank, state.round, parts)
    self._send(identity, Header(
        frames.PUSH, header.rank, header.round, state.next))

  def _pull(self, identity: bytes, header: Header, body: bytes) -> None:
    self._joining[header.rank] = time.monotonic()
    state, part, number = self._state, b'', header.number
    if state and state.complete and state.round < header.round:
      self._state = state = None  # the worker cannot follow from there
    if header.again and state and (
        self._sent.get(header.rank) == (identity, state.round, number)
    ):
      return
    if state is not None and state.complete and 0 <= number < state.parts:
      with open(self._disk / 'state', 'rb') as file:
        file.seek(number * frames.PART)
        part = file.read(frames.PART)
      self._sent[header.rank] = identity, state.round, number
      number |= state.parts << 32
      self._send(identity, Header(
          frames.PULL, header.rank, state.round, number, state.chain), part)
    else:
      self._send(identity, Header(frames.PULL, header.rank))

  # What leaves ----------------------------------------------------------------

  def _send(self, identity: bytes, header: Header, *bodies: bytes) -> None:
    # The worker may be gone, or not read.
    with contextlib.suppress(zmq.ZMQError):
      self._socket.send_multipart(
          [identity, header.pack(), *bodies], zmq.NOBLOCK, copy=False
      )

  def _refuse(self, identity: bytes, rank: int, reason: str) -> None:
    self._complain(reason)
    self._send(identity, Header(frames.REFUSED, rank), reason.encode())

  def _complain(self, what: str) -> None:
    """Logs what was refused, once a second at most."""
    if time.monotonic() - self._complained > 1:
      self._complained = time.monotonic()
      _LOG.warning('refused: %s', what)
