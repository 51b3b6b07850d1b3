"""The rounds of a run: who takes part, and what each worker is answered.

`Rounds` is a relay without its connections. A worker that it knows is *waiting*
for the run to begin, *awaited* by the open round, or has *sent* its message for
it. It is *joining* if no lists lead from its position to the open round, and
*idle* if nothing is expected of it: it is late, away, or has just come. What it
sends is in capitals, see `frames`.

    worker   what happens                      answer   then
    -------  --------------------------------  -------  -------
    unknown  HELLO before the run              -        waiting
    unknown  HELLO after it began              WELCOME  idle
    unknown  HELLO for another --workers       REFUSED  unknown
    unknown  HELLO with another configuration  REFUSED  unknown
    unknown  LISTEN                            UNKNOWN  unknown
    waiting  the run begins                    WELCOME  awaited
    waiting  the run begins from more steps    WELCOME  idle
    waiting  most exchange something else      REFUSED  unknown
    awaited  MESSAGE                           -        sent
    awaited  LISTEN                            AGAIN    awaited
    awaited  PAUSE                             -        idle
    awaited  a second of the round, cut off    -        idle
    awaited  the deadline passes               -        idle
    awaited  MESSAGE of another position       GONE     awaited
    sent     PAUSE                             -        sent
    sent     a second of the round, cut off    -        sent
    sent     LISTEN                            -        sent
    sent     all have sent                     LIST     awaited
    sent     the deadline passes               LIST     awaited
    sent     most have called another step     LIST     idle
    idle     MESSAGE                           -        sent
    idle     MESSAGE of a closed round         LIST     awaited
    idle     LISTEN of a closed round          LIST     idle
    idle     LISTEN of another position        GONE     idle
    awaited  PULL                              PULL     joining
    joining  PULL without a state              PULL     joining
    joining  PULL of a state                   PULL     joining
    joining  LISTEN from that state            LIST     joining
    joining  MESSAGE from that state           -        sent
    joining  a minute without a request        -        idle
    joining  all others have left              -        unknown
    idle     HELLO of a longer run             -        waiting
    idle     HELLO of another program          -        idle
    idle     that HELLO, the connection ended  WELCOME  idle

The run begins when all workers are there, or `start` seconds after the first
one, with what most of them exchange, and from the position with the most rounds
or steps. A late message is answered with the list of its round, which does not
contain it. So a worker that falls silent costs the others one deadline, or a
second if its connection ends, as that of a killed program. A worker that was
late by less than a round is waited for in the next one, if it was not late
often.

A worker may be back before anybody knows that it was cut off: its new program
is not answered, and asks again. If the old one has been heard until then, the
new one is refused.

A *follower* takes part in no round: nobody waits for it, and a minute without a
request ends it. It is answered what a worker would be that joins: a state, then
lists. One that comes before the run asks again.
"""

import collections
import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Sequence

from demo_optax.remote import frames
from demo_optax.remote.frames import Header
from demo_optax.remote.store import Lists, State

_LOG = logging.getLogger('demo_optax.relay')

# Rounds between comparisons of what workers share.
CHECK_EVERY = 64

# Without a deadline: how long after its first message a round closes, in
# median rounds, and the fewest seconds.
_ROUNDS, _SECONDS = 5, 2.0

_RECONNECT = 1.0  # seconds of a round that wait for a new connection

_MAX_ROUND = 2**48  # that a worker may claim: later ones must fit a header
_MAX_LISTS = 1024  # on disk, while a worker joins
_STALE = 60.0  # seconds after which a state that does not arrive is given up
_LINES = 20  # of one kind in the log in a minute, and one of each worker
_CUT = 100  # characters of what a stranger sends, in a line


@dataclasses.dataclass(frozen=True)
class Options:
  """What a relay is started with: `python -m demo_optax.remote --help`."""

  workers: int
  deadline: float | None = None
  start: float = 300.0
  history: int = 64
  max_message: int = 1 << 28

  def __post_init__(self) -> None:
    ranges = {
      'workers': (1, frames.MAX_WORKERS),
      'deadline': (0.001, 10**6),
      'start': (0, 10**9),
      'history': (1, 10**9),
      'max_message': (frames.PART, 2**48),
    }
    for name, (least, most) in ranges.items():
      value = getattr(self, name)
      if value is not None and not least <= value <= most:  # or it is NaN
        raise ValueError(
          f'{name} must be from {least:,} to {most:,}, got {value}. Start the'
          f' relay with another --{name.replace("_", "-")}.'
        )


@dataclasses.dataclass
class _Member:
  """A worker, or a follower, that has said hello."""

  identity: bytes  # of its connection
  heard: float  # when
  hello: Header  # with its position, and the steps of its state, as it began
  text: bytes  # what it exchanges
  last: Sequence[bytes]  # its list of the round before, if it has one
  awaited: bool = False  # whether the open round waits for it
  body: bytes = b''  # its message of the open round
  asked: int = -1  # the last round whose list it has asked for
  joins: bool = False  # whether a state and lists are kept for it
  missed: int = 0  # rounds that have waited for it in vain
  # When its connection ended, if it was not heard over another since.
  disconnected: float = math.inf

  @property
  def rank(self) -> int:
    return self.hello.rank

  @property
  def follows(self) -> bool:
    return self.rank == frames.FOLLOWER

  @property
  def name(self) -> str:
    return frames.name_of(self.rank)

  @property
  def is_due(self) -> bool:
    """Whether the open round cannot close yet, for want of its message."""
    return self.awaited and not self.body


def _step_of(body: bytes) -> tuple[int, bytes]:
  """Returns what the messages of a round have in common."""
  return len(body), body[: frames.CHAIN]


class Rounds:
  """A run, without its connections."""

  def __init__(
    self,
    options: Options,
    send: Callable[..., None],
    clock: Callable[[], float],
  ):
    """Makes the rounds of a relay.

    `send(identity, header, *bodies)` sends to a connection, `clock()` returns
    seconds.
    """
    self.options = options
    self._send = send
    self._clock = clock
    self._lists = Lists(self._say)
    self._state: State | None = None
    self._minute = 0.0
    self._lines: collections.Counter[str] = collections.Counter()
    self._seconds: collections.deque[float] = collections.deque(maxlen=100)
    self.forget()

  @property
  def round(self) -> int:
    """The round that is open."""
    return self._lists.open

  def forget(self) -> None:
    """Ends a run: its workers must say hello again."""
    self._text = b''  # what all exchange, in a run that has begun
    # By rank; followers by their program.
    self._members: dict[int | bytes, _Member] = {}
    self._lists.drop(self.round)
    self._drop_state()
    self._then = frames.NOTHING
    self._trained = 0
    # When the first hello came, then the first message of the last round.
    self._began = 0.0

  @property
  def _by_rank(self) -> list[_Member]:
    return sorted(self._members.values(), key=lambda member: member.rank)

  @property
  def _has_message(self) -> bool:
    """Whether a worker has sent its message of the open round."""
    return any(member.body for member in self._members.values())

  def take(
    self, identity: bytes, key_rank: int | None, head: bytes, *bodies: bytes
  ) -> None:
    """Acts on what a connection has sent; refuses what does not fit.

    `key_rank` is the rank whose key the connection has, if there are keys.
    """
    header = frames.unpack(head)
    if header is None:
      return self._say('refused: no header of this version')
    rank = header.rank
    name = frames.name_of(rank)
    if key_rank not in (None, rank):
      return self._say('refused: a key that is not that of %s', name)
    key = header.program if rank == frames.FOLLOWER else rank
    member = self._members.get(key)
    now = self._clock()
    if member is not None and member.hello.program != header.program:
      is_live = now < min(member.heard + _SECONDS, member.disconnected)
      # Messages of a program that has ended may still be on their way.
      if header.kind != frames.HELLO or (is_live and header.again):
        reason = (
          f'Another program says that it is {name}. Give every worker a rank'
          ' of its own, and end one before it is started again.'
        )
        return self._refuse(identity, reason)
      if is_live:
        return None  # it asks again
      self._say('%s was started again', name)
    if header.kind == frames.HELLO and bodies:
      text, *last = bodies
      self._hello(key, _Member(identity, now, header, text, last))
    elif member is None:
      self._send(identity, Header(frames.UNKNOWN))
    else:
      member.heard = now
      # Over the same connection it was on its way as that ended.
      if identity != member.identity:
        member.disconnected = math.inf
      if self._text:
        self._act(member, identity, header, *bodies)

  def note_disconnected(self, identity: bytes) -> None:
    """Notes that a connection has ended; its worker may soon have a new one."""
    for member in self._members.values():
      if member.identity == identity:
        member.disconnected = self._clock()

  def _act(
    self, member: _Member, identity: bytes, header: Header, *bodies: bytes
  ) -> None:
    match header.kind, bodies:
      case frames.LISTEN, _:
        self._listen(member, identity, header)
      case frames.PULL, (taken,):
        self._pull(member, identity, header, taken)
      case frames.MESSAGE, (body,) if not member.follows:
        self._listen(member, identity, header, body)
      case frames.PUSH, (part,) if not member.follows:
        self._push(identity, header, part)
      case frames.PAUSE, _:
        if member.is_due:
          member.awaited = False
      case _:
        self._say('refused: %d of kind %d', len(bodies), header.kind)

  def look_at_the_clock(self) -> None:
    """Begins the run, closes the round, or gives up what does not come."""
    now = self._clock()
    if not self._text:
      if self._members:
        self._begin_when_ready(now)
      return
    has_message = self._has_message
    for key, member in list(self._members.items()):
      if now - member.heard > _STALE:
        member.joins = False
        if member.follows:
          del self._members[key]
      # From the first message: who computes says nothing over a new connection.
      cut_off = now - max(member.disconnected, self._began)
      if has_message and member.is_due and cut_off > _RECONNECT:
        member.awaited = False
    seconds = now - self._began
    patience = max(self.options.start, 3 * self._limit)
    is_waiting = any(member.is_due for member in self._members.values())
    if has_message and (seconds > self._limit or not is_waiting):
      self._close()
    elif self._joining and seconds > patience:
      self._say('all workers have left the run')
      self.forget()

  # Workers that come ----------------------------------------------------------

  def _hello(self, key: int | bytes, member: _Member) -> None:
    header = member.hello
    if reason := self._misfit(member):
      return self._refuse(member.identity, reason)
    if self._text not in (b'', member.text):
      return self._refuse_text(member, self._text)
    if member.follows and not self._text:
      return None  # it asks again
    if not header.again:
      self._say('%s says hello, round %d', member.name, header.round)
    if self._text and header.round > self.round and not member.follows:
      self.forget()  # it is back from a longer run
    self._members[key] = member
    if self._text:
      # One that asks again may have come before the run.
      member.awaited = header.again and self._lists.lead_from(header)
      self._welcome(member)
    else:
      self._began = self._began or member.heard

  def _misfit(self, member: _Member) -> str:
    """Returns why a hello cannot be that of a worker of this run, or ''."""
    first, _, _ = member.text.partition(b'\n')
    expected = frames.described(self.options.workers, {})
    is_rank = member.follows or member.rank < self.options.workers
    is_possible = is_rank and 0 <= member.hello.round < _MAX_ROUND
    if first != expected or not is_possible:
      found = first[:_CUT].decode('utf-8', 'replace')
      return (
        f'count must be that of the relay, {expected.decode()}, got {found}'
        f' from {member.name}. Start it with the count of the'
        ' relay, or the relay with other --workers, and both with one version'
        ' of demo_optax.'
      )
    return ''

  def _begin_when_ready(self, now: float) -> None:
    """Begins the run if all workers are there, or the time for it is over."""
    members = list(self._members.values())
    text = statistics.mode(member.text for member in members)
    # A run that begins waits for all, one that continues only for some time.
    patience = self.options.start
    if any(member.hello.round for member in members):
      patience = 5 * self._limit
    is_over = now - self._began > patience
    if is_over or len(members) == self.options.workers:
      wrong = [member for member in members if member.text != text]
      for member in wrong:
        self._refuse_text(member, text)
        del self._members[member.rank]
      if is_over or not wrong:
        self._begin(text)

  def _begin(self, text: bytes) -> None:
    """Begins a run, or continues one of another relay."""
    self._text = text
    members = self._by_rank
    chains = collections.Counter(member.hello.chain for member in members)

    def standing(member: _Member) -> tuple[int, int, int]:
      hello = member.hello
      return hello.round, hello.number, chains[hello.chain]

    # Of most rounds and steps, the state of most workers.
    first = max(members, key=standing)
    number = first.hello.round
    chain = first.hello.chain
    last = first.last
    self._lists.begin(number, chain)
    # The last list, which some may not have received.
    for before in chains:
      if last and frames.digest(before, *last) == chain:
        self._lists.begin(number - 1, before)
        self._lists.close(last)
    for member in members:
      member.awaited = self._lists.lead_from(member.hello)
      self._welcome(member)
    self._began = self._clock()
    self._say('round %d, %d workers', self.round, len(members))

  def _welcome(self, member: _Member) -> None:
    member.last = ()  # may be large
    limit = b'%d' % self.options.max_message
    header = Header(frames.WELCOME, round=member.hello.round)
    self._send(member.identity, header, limit)

  # Rounds ---------------------------------------------------------------------

  def _listen(
    self, member: _Member, identity: bytes, header: Header, body: bytes = b''
  ) -> None:
    """Takes a message, if there is one, and answers with the round's list."""
    number = header.round
    if not self._lists.lead_from(header):
      # It will ask for a state, unless somebody else has sent this.
      self._send(identity, Header(frames.GONE))
      return
    is_open = number == self.round
    if body and is_open:
      if not self._has_message:
        now = self._clock()
        self._seconds.append(now - self._began)
        self._began = now
      member.body = body
      member.missed = 0
    elif body:  # it is late, and may be in time for the next rounds
      is_its_turn = self.round % 2**member.missed < 2
      member.awaited |= is_its_turn
    was_asked = (member.identity, member.asked) == (identity, number)
    member.identity, member.asked = identity, number
    if is_open:
      member.joins = False  # no lists need be kept for it any more
      if not member.body:  # who follows does not heed it
        self._send(identity, Header(frames.AGAIN, round=number))
    elif not (header.again and was_asked):
      # Else it is on its way: a long list on a slow link.
      closed = self._lists.read(number)
      self._send_list(member, number, closed)

  @property
  def _limit(self) -> float:
    """Seconds from the first message of a round to its end."""
    if self.options.deadline is not None:
      return self.options.deadline
    median = statistics.median_low(self._seconds or [0.0])
    return max(_SECONDS, _ROUNDS * median)

  def _close(self) -> None:
    """Ends a round: all workers get the same list."""
    number = self.round
    members = self._by_rank
    # A worker that has called another step than most sends its message again.
    # Of as many in two steps, those of the lowest rank are in the round.
    bodies = [member.body for member in members if member.body]
    step = statistics.mode(map(_step_of, bodies))
    messages = [b''] * self.options.workers
    missing = []
    for member in members:
      took_part = _step_of(member.body) == step
      if took_part:
        messages[member.rank] = member.body
      elif member.awaited:
        missing.append(member.rank)
        # One that is often late is waited for in ever fewer rounds.
        member.missed += 1
      member.awaited = took_part
      member.body = b''
    if missing:
      self._say('round %d without %s', number, missing)
    _, tag = step
    if frames.changes_state(tag):
      self._then = self._next_step()
    closed = frames.packed(messages, self._then)
    self._lists.close(closed)
    # Lists that nobody can need.
    kept = self.options.history
    if self._joining:
      kept = max(kept, _MAX_LISTS)
    self._lists.drop(number - kept)
    for member in members:
      if member.asked == number:
        self._send_list(member, number, closed)

  def _next_step(self) -> int:
    """Returns the task of workers in the training step after this one.

    Who sends its state does so after that step: a state that is still wanted
    then is not wanted once more.
    """
    self._trained += 1
    if self._wants_state and self._then != frames.SEND:
      return frames.SEND
    if self._trained % CHECK_EVERY == 0:
      return frames.COMPARE
    return frames.NOTHING

  def _send_list(
    self, member: _Member, number: int, closed: Sequence[bytes]
  ) -> None:
    header = Header(frames.LIST, round=number, number=self.round)
    self._send(member.identity, header, *closed)

  # The state, for workers that join -------------------------------------------

  @property
  def _joining(self) -> bool:
    return any(member.joins for member in self._members.values())

  @property
  def _usable_state(self) -> State | None:
    """The state, on its way or there, if it can be handed out.

    Lists must lead from it: the only place where this is decided.
    """
    state = self._state
    if state is None or not self._lists.lead_from(state.header):
      return None
    arrives = self._clock() - state.since < _STALE
    return state if state.complete or arrives else None

  @property
  def _wants_state(self) -> bool:
    """Whether a worker must send its state to one that joins."""
    return self._joining and self._usable_state is None

  def _push(self, identity: bytes, header: Header, part: bytes) -> None:
    """Takes a part; one that is not taken is answered by its own number."""
    try:
      if header.number == 0 and self._wants_state:
        self._drop_state()
        self._state = State(header)
      state = self._state
      if state is not None and header == state.next_header:
        state.append(part, self._clock())
        header = state.next_header
    except OSError as error:
      self._say('the state of worker %d is not kept: %s', header.rank, error)
      self._drop_state()
    self._send(identity, header)

  def _pull(
    self, member: _Member, identity: bytes, header: Header, taken: bytes
  ) -> None:
    """Sends a part, or the header alone if it is not there yet.

    `taken` is the chain of the state that this worker has taken before, of
    which it can make no use.
    """
    if not member.joins:
      self._say('%s joins', member.name)
    member.joins = True
    member.awaited = False
    state = self._usable_state
    part = []
    if state is not None and state.complete:
      source = state.header
      if taken == source.chain:
        self._drop_state()
      elif 0 <= header.round < state.parts:
        part.append(state.part(header.round))
        header = header._replace(number=source.round, chain=source.chain)
    self._send(identity, header, *part)

  def _drop_state(self) -> None:
    if self._state is not None:
      self._state.remove()
    self._state = None

  # What is refused ------------------------------------------------------------

  def _refuse(self, identity: bytes, reason: str, *run: bytes) -> None:
    self._say('refused: %s', reason)
    self._send(identity, Header(frames.REFUSED), reason.encode(), *run)

  def _refuse_text(self, member: _Member, run: bytes) -> None:
    """Refuses a worker that does not exchange what others do in the run."""
    reason = f'{member.name} has another configuration'
    self._refuse(member.identity, reason, run)

  def _say(self, text: str, *values: object) -> None:
    """Logs a line, if there were not too many: workers cause them."""
    minute = self._clock() // 60
    if minute != self._minute:
      self._minute = minute
      self._lines.clear()
    self._lines[text] += 1
    if self._lines[text] <= _LINES + self.options.workers:
      _LOG.info(text, *values)
