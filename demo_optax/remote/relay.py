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
import pickle
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.auth.thread

from demo_optax.remote import frames
from demo_optax.remote.frames import Header

_LOG = logging.getLogger('demo_optax.relay')

# Without a deadline: how long after its first message a round closes, in
# median rounds, and the fewest seconds.
_ROUNDS, _SECONDS = 5, 2.0

_TICK = 10  # milliseconds after which the clock is looked at
_MAX_LISTS = 1024  # on disk, while a worker joins
_STALE = 60.0  # seconds after which a state that does not arrive is given up


@dataclasses.dataclass
class _Member:
  """A worker that has said hello."""

  identity: bytes  # of the connection
  hello: Header  # with its position, and the steps of its state, as it began
  last: tuple[bytes, ...]  # its list of the round before
  heard: float  # when


@dataclasses.dataclass
class _State:
  """The shared state of a round, as a member sends it."""

  header: Header  # of its first part
  parts: int = 0  # that are there
  since: float = 0.0  # when the last one came
  complete: bool = False


@dataclasses.dataclass(eq=False)
class Relay:
  """A relay of one run; `serve` runs it.

  It listens at `address`, with the port that it was given. `round` is open. See
  `python -m demo_optax.remote --help` for the options.
  """

  address: str
  workers: int
  _: dataclasses.KW_ONLY
  keys: str | None = None
  deadline: float | None = None
  quorum: int = 1
  start: float = 300.0
  history: int = 64
  max_message: int = 1 << 28

  def __post_init__(self) -> None:
    keys = frames.keys_for(self.address, self.keys)
    if not 1 <= self.quorum <= self.workers:
      raise ValueError(
        f'quorum must be from 1 to {self.workers}, the number of workers, got'
        f' {self.quorum}.'
      )
    closing = self._closing = contextlib.ExitStack()
    context = zmq.Context()
    closing.callback(context.term)
    context.max_sockets = 65536
    socket = self._socket = closing.enter_context(context.socket(zmq.ROUTER))
    self._ranks: dict[str, int] = {}  # by public key
    if keys is not None:
      self._ranks = {key: rank for rank, key in enumerate(keys.others)}
      auth = zmq.auth.thread.ThreadAuthenticator(context)
      auth.start()
      closing.callback(auth.stop)
      auth.configure_curve_callback('*', self)
      socket.curve_server = 1
      socket.set_string(zmq.CURVE_PUBLICKEY, keys.public)
      socket.set_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.linger = 0
    socket.maxmsgsize = self.max_message
    socket.handshake_ivl = 5000
    socket.heartbeat_ivl = 5000
    socket.heartbeat_timeout = 30000
    socket.sndhwm = 64 + 2 * self.workers
    socket.rcvhwm = 4  # of each connection: each waits for answers
    socket.backlog = 1024
    socket.ipv6 = int('//*' in self.address or '[' in self.address)
    socket.bind(self.address)
    self.address = str(socket.get_string(zmq.LAST_ENDPOINT))
    folder = tempfile.TemporaryDirectory(prefix='demo-relay-')
    self._disk = pathlib.Path(closing.enter_context(folder))
    self.round = 0
    self._began = 0.0  # when the first message, or hello, came
    self._last_seen = self._closed = 0.0  # when a message, the last round was
    self._seconds: collections.deque[float] = collections.deque(maxlen=100)
    self._complained = 0.0
    self._forget()

  def _forget(self) -> None:
    """Ends a run: its workers must say hello again."""
    # Until `_text` is known there is no run, and until `_opened` it waits for
    # workers to say hello.
    self._text = b''
    self._opened = False
    # The chain before the open round, and before each whose list is kept.
    self._chains: dict[int, bytes] = {}
    self._state: _State | None = None
    self._members: dict[int, _Member] = {}
    self._bodies: dict[int, bytes] = {}
    # The last list that a worker asked for: its connection and the round.
    self._asked: dict[int, tuple[bytes, int]] = {}
    self._joining: set[int] = set()
    self._awaited: set[int] = set()
    self._missed: collections.Counter[int] = collections.Counter()
    self._not_before: dict[int, int] = {}  # the round from which one is awaited
    for path in self._disk.iterdir():
      path.unlink()

  def callback(self, domain: str, key: bytes) -> bool:
    """Returns whether this is a worker's key: ZeroMQ asks."""
    return key.decode('ascii', 'replace') in self._ranks

  def serve(self, should_stop: Any = lambda: False) -> None:
    """Serves until `should_stop()` is true."""
    with self._closing:
      while not should_stop():
        if self._socket.poll(_TICK):
          self._take(self._socket.recv_multipart(copy=False))
        self._look_at_the_clock()

  # What arrives ---------------------------------------------------------------

  def _take(self, received: list[Any]) -> None:
    """Acts on what one worker has sent; refuses what does not fit."""
    if not 2 <= len(received) <= 3 + self.workers:
      return self._complain(f'{len(received)} frames')
    user = received[1].get('User-Id') if self._ranks else None
    identity, head, *bodies = [frame.bytes for frame in received]
    header = frames.unpack(head)
    if header is None:
      return self._complain('no header of this version')
    rank, now = header.rank, time.monotonic()
    if not 0 <= rank < self.workers:
      return self._refuse(
        identity,
        rank,
        (
          f'rank must be from 0 to {self.workers - 1}, got {rank}.'
          ' Start the relay with more --workers.'
        ),
      )
    if self._ranks and self._ranks.get(str(user)) != rank:
      return self._complain(f'a key that is not of rank {rank}')
    member = self._members.get(rank)
    if (
      member is not None
      and member.hello.program != header.program
      and (header.kind != frames.HELLO or now - member.heard < _SECONDS)
    ):
      return self._refuse(
        identity,
        rank,
        (
          f'Another program says that it is worker {rank}. Give every worker a'
          f' rank, and start one again {_SECONDS:g} s after it has ended.'
        ),
      )
    if header.kind != frames.HELLO:
      if member is None:
        return self._send(identity, Header(frames.UNKNOWN, rank))
      member.heard = now
    acts: dict[int, tuple[Any, int, int]] = {  # with the numbers of frames
      frames.HELLO: (self._hello, 1, 1 + self.workers),
      frames.MESSAGE: (self._message, 1, 1),
      frames.LISTEN: (self._listen, 0, 1),
      frames.PUSH: (self._push, 1, 1),
      frames.PULL: (self._pull, 0, 0),
      frames.PAUSE: (self._pause, 0, 0),
    }
    act, least, most = acts.get(header.kind, (None, 0, 0))
    if act is None or not least <= len(bodies) <= most:
      self._complain(f'kind {header.kind} with {len(bodies)} frames')
    elif header.kind == frames.HELLO or self._opened:
      act(identity, header, *bodies)

  def _hello(
    self, identity: bytes, header: Header, text: bytes, *last: bytes
  ) -> None:
    rank, old = header.rank, self._members.get(header.rank)
    if self._text not in (b'', text):
      _LOG.warning('worker %d has another configuration', rank)
      return self._send(identity, Header(frames.REFUSED, rank), b'', self._text)
    if old is None or old.hello.program != header.program:
      _LOG.info('worker %d says hello, round %d', rank, header.round)
    if self._opened and header.round > self.round:
      _LOG.warning('worker %d is back from a longer run', rank)
      self._forget()
    now = time.monotonic()
    if not self._text:
      self._text, self._began = text, now
    self._members[rank] = _Member(identity, header, last, now)
    if not self._is_of_run(header):  # it will have to join
      self._awaited.discard(rank)
    if self._opened:
      self._welcome(rank)

  def _open(self) -> None:
    """Begins the run, or continues one of another relay."""
    members = [member for _, member in sorted(self._members.items())]
    chosen = max(members, key=lambda m: (m.hello.round, m.hello.number)).hello
    self.round, self._chains = chosen.round, {chosen.round: chosen.chain}
    lasts = [m.last for m in members if m.hello.chain == chosen.chain]
    for m, last in itertools.product(members, lasts):
      # A list that the one may not have received, and the other has.
      if m.hello.round == self.round - 1 and (
        frames.digest(m.hello.chain, *last) == chosen.chain
      ):
        self._chains[m.hello.round] = m.hello.chain
        self._keep(m.hello.round, last)
    self._opened = True
    self._awaited = {m.hello.rank for m in members if self._is_of_run(m.hello)}
    self._began, self._last_seen, self._closed = 0.0, time.monotonic(), 0.0
    _LOG.info('round %d, %d workers', self.round, len(members))
    for rank in self._members:
      self._welcome(rank)

  def _welcome(self, rank: int) -> None:
    member = self._members[rank]
    member.last = ()
    self._send(
      member.identity,
      Header(frames.WELCOME, rank, self.round),
      frames.LIMITS.pack(self.workers, self.max_message),
    )

  def _is_of_run(self, at: Header) -> bool:
    """Returns whether lists lead from a worker's position to the open round."""
    return self._chains.get(at.round) == at.chain

  def _message(self, identity: bytes, header: Header, body: bytes) -> None:
    rank = header.rank
    if not body:
      return self._complain('an empty message')
    if self._is_of_run(header):
      if header.round == self.round:
        if not self._bodies:
          self._began = time.monotonic()
        self._bodies.setdefault(rank, body)
        self._joining.discard(rank)
      elif self.round >= self._not_before.get(rank, 0):
        self._awaited.add(rank)  # it is late, and may be in time now
    self._listen(identity, header)

  def _listen(self, identity: bytes, header: Header, *_: bytes) -> None:
    rank, number = header.rank, header.round
    if not self._is_of_run(header):
      _LOG.info('worker %d joins', rank)
      self._joining.add(rank)
      return self._send(identity, Header(frames.GONE, rank, self.round))
    self._last_seen = time.monotonic()
    before, self._asked[rank] = self._asked.get(rank), (identity, number)
    if number == self.round:
      if rank not in self._bodies:
        self._send(identity, Header(frames.AGAIN, rank, number))
    elif not header.again or before != (identity, number):
      # Else it is on its way: a long list on a slow link.
      messages = pickle.loads((self._disk / f'{number}').read_bytes())
      self._send_list(identity, rank, number, messages)

  def _pause(self, identity: bytes, header: Header) -> None:
    if header.rank not in self._bodies:
      self._awaited.discard(header.rank)

  # Rounds ---------------------------------------------------------------------

  def _limit(self) -> float:
    """Returns the seconds after a first message at which a round closes."""
    if self.deadline is not None:
      return self.deadline
    return max(_SECONDS, _ROUNDS * statistics.median(self._seconds or [0.0]))

  def _look_at_the_clock(self) -> None:
    now = time.monotonic()
    if self._members and not self._opened:
      # A run that begins waits for all, one that continues only for some time.
      is_new = all(m.hello.round == 0 for m in self._members.values())
      limit = self.start if is_new else max(10.0, 5 * self._limit())
      if len(self._members) == self.workers or now - self._began > limit:
        self._open()
    if len(self._bodies) >= self.quorum and (
      self._awaited <= set(self._bodies) or now - self._began > self._limit()
    ):
      self._close(now)
    self._joining = {
      r for r in self._joining if now - self._members[r].heard < _STALE
    }
    if self._joining and (
      now - self._last_seen > max(self.start, 3 * self._limit())
    ):
      _LOG.info('all workers have left the run')
      self._forget()

  def _close(self, now: float) -> None:
    """Ends a round: all workers get the same list."""
    # Messages of a round are of one step, that of most of them. An evaluation
    # has priority: a training step is sent again in the next round.
    kinds = {
      rank: (not frames.changes_state(body), len(body), body[: frames.CHAIN])
      for rank, body in sorted(self._bodies.items())
    }
    counts = collections.Counter(kinds.values())
    kind = max(counts, key=lambda kind: (kind[0], counts[kind]))
    for rank in [rank for rank, other in kinds.items() if other != kind]:
      _LOG.warning(
        'round %d without worker %d, which has called another step: its'
        ' message has %d bytes, not %d',
        self.round,
        rank,
        len(self._bodies.pop(rank)),
        kind[1],
      )
    messages = [self._bodies.get(r, b'') for r in range(self.workers)]
    missing = self._awaited - set(self._bodies)
    if missing:
      _LOG.info('round %d without %s', self.round, sorted(missing))
    # One that is often late is waited for in ever fewer rounds.
    self._missed.update(missing)
    for rank in missing:
      self._not_before[rank] = self.round + 2 ** min(self._missed[rank], 8)
    for rank in self._awaited - missing:
      del self._missed[rank]
    if self._closed:
      self._seconds.append(now - self._closed)
    self._closed = now
    self._awaited, self._bodies = set(self._bodies), {}
    closed, self.round = self.round, self.round + 1
    self._chains[self.round] = frames.digest(self._chains[closed], *messages)
    self._keep(closed, messages)
    for rank, (identity, number) in self._asked.items():
      if number == closed:
        self._send_list(identity, rank, closed, messages)
    if self.round % 100 == 0:
      _LOG.info(
        'round %d, %.3f s each, %d workers',
        self.round,
        statistics.median(self._seconds),
        len(self._awaited),
      )

  def _send_list(
    self, identity: bytes, rank: int, number: int, messages: list[bytes]
  ) -> None:
    now = -self.round if self._wants_state() else self.round
    self._send(
      identity,
      Header(frames.LIST, rank, number, now),
      bytes(map(bool, messages)),
      *filter(None, messages),
    )

  def _keep(self, number: int, messages: Sequence[bytes]) -> None:
    """Keeps a list on disk, and drops those of long ago."""
    path = self._disk / f'{number}'
    try:
      with path.open('wb') as file:
        pickle.dump(messages, file)
    except OSError as error:  # who is late must join
      _LOG.warning('round %d is not kept: %s', number, error)
      del self._chains[number]
      path.unlink(missing_ok=True)
    last = number - self.history
    if self._state is not None and self._joining:
      last = max(min(last, self._state.header.round - 1), number - _MAX_LISTS)
    for old in [n for n in self._chains if n <= last]:
      del self._chains[old]
      (self._disk / f'{old}').unlink()

  # The state, for workers that join -------------------------------------------

  def _wants_state(self) -> bool:
    """Returns whether a worker must send its state to those that join."""
    state = self._state
    if state is None or not self._joining:
      return bool(self._joining)
    if state.complete:
      return state.header.round not in self._chains
    is_on_the_way = time.monotonic() - state.since < _STALE
    return not is_on_the_way or state.header.rank not in self._awaited

  def _push(self, identity: bytes, header: Header, body: bytes) -> None:
    if header.number == 0 and self._wants_state():
      self._state = _State(header)
    state = self._state
    if (
      state is None
      or state.complete
      or (header != state.header._replace(number=state.parts))
    ):
      return
    with open(self._disk / 'state', 'ab' if state.parts else 'wb') as file:
      file.write(body)
    state.parts, state.since = state.parts + 1, time.monotonic()
    state.complete = len(body) < frames.PART
    if state.complete:
      _LOG.info(
        'worker %d has sent its state of round %d, %d parts',
        header.rank,
        header.round,
        state.parts,
      )
    self._send(identity, header._replace(number=state.parts))

  def _pull(self, identity: bytes, header: Header) -> None:
    number, state = header.number, self._state
    self._joining.add(header.rank)
    if state and state.complete and state.header.round < header.round:
      self._state = state = None  # the worker cannot follow from there
    if state is None or not state.complete or not 0 <= number < state.parts:
      return self._send(identity, header)
    with open(self._disk / 'state', 'rb') as file:
      file.seek(number * frames.PART)
      part = file.read(frames.PART)
    at = state.header
    self._send(identity, header._replace(round=at.round, chain=at.chain), part)

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
