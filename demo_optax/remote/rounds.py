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
    awaited  the deadline passes               -        idle
    awaited  MESSAGE of another position       GONE     joining
    sent     PAUSE                             -        sent
    sent     LISTEN                            -        sent
    sent     all have sent                     LIST     awaited
    sent     the deadline passes               LIST     awaited
    sent     most have called another step     LIST     idle
    idle     MESSAGE                           -        sent
    idle     MESSAGE of a closed round         LIST     awaited
    idle     LISTEN of a closed round          LIST     idle
    idle     LISTEN of another position        GONE     joining
    awaited  PULL                              PULL     joining
    joining  PULL without a state              PULL     joining
    joining  PULL of a state                   PULL     joining
    joining  LISTEN from that state            LIST     joining
    joining  MESSAGE from that state           -        sent
    joining  a minute without a request        -        idle
    joining  all others have left              -        unknown
    idle     HELLO of a longer run             -        waiting
    idle     HELLO of another program          AGAIN    idle

The run begins when all workers are there, or `start` seconds after the first
one, with what most of them exchange, and from the position with the most rounds
or steps. A late message is answered with the list of its round, which does not
contain it. So a worker that stops, or is cut off, costs the others one
deadline. A worker that was late by less than a round is waited for in the next
one, if it was not late often.

A worker that was killed may be back before anybody knows: its new program asks
again until the old one has been silent for some time. If both are heard, the
new one is refused.

A *follower* takes part in no round: nobody waits for it, and a minute without a
request ends it. It is answered what a worker would be that joins: a state, then
lists. HELLO before the run, or with another configuration, makes no follower.
"""

import collections
import dataclasses
import itertools
import logging
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from demo_optax.remote import frames
from demo_optax.remote.frames import Header
from demo_optax.remote.store import Closed, Lists, State

_LOG = logging.getLogger('demo_optax.relay')

# Without a deadline: how long after its first message a round closes, in
# median rounds, and the fewest seconds.
_ROUNDS, _SECONDS = 5, 2.0

_MAX_ROUND = 2**48  # that a worker may claim: later ones must fit a header
_MAX_LISTS = 1024  # on disk, while a worker joins
_STALE = 60.0  # seconds after which a state that does not arrive is given up
_FOLLOWERS = 10_000  # more are not answered
_LINES = 20  # of one kind in the log in a minute, and one of each worker
_LINE = 300  # characters in it

_SAME_RANK = (
  'Another program says that it is worker {}. Give every worker a rank of its'
  ' own, and end one before it is started again.'
)


@dataclasses.dataclass(frozen=True)
class Options:
  """What a relay is started with: `python -m demo_optax.remote --help`."""

  workers: int
  deadline: float | None = None
  quorum: int = 1
  start: float = 300.0
  history: int = 64
  max_message: int = 1 << 28

  def __post_init__(self) -> None:
    ranges = {
      'workers': (1, frames.MAX_WORKERS),
      'deadline': (0.001, 10**6),
      'quorum': (1, self.workers),
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
  """A worker that has said hello."""

  identity: bytes  # of its connection
  hello: Header  # with its position, and the steps of its state, as it began
  text: bytes  # what it exchanges
  last: tuple[bytes, ...]  # its list of the round before
  heard: float  # when
  awaited: bool = False  # whether the open round waits for it
  body: bytes = b''  # its message of the open round
  asked: int = -1  # the last round whose list it has asked for
  joins: bool = False  # whether a state and lists are kept for it
  least: int = 0  # the first round whose state it can take
  missed: int = 0  # rounds that have waited for it in vain
  not_before: int = 0  # the round from which one waits for it again
  rival: bytes = b''  # another program that says this rank
  rival_since: float = 0.0

  @property
  def rank(self) -> int:
    return self.hello.rank


class Rounds:
  """A run, without its connections. `round` is open."""

  def __init__(
    self,
    options: Options,
    send: Callable[..., None],
    folder: pathlib.Path,
    clock: Callable[[], float],
  ):
    """Makes the rounds of a relay.

    `send(identity, header, *bodies)` sends to a connection, `clock()` returns
    seconds.
    """
    self.options, self._send = options, send
    self._folder, self._clock = folder, clock
    self.round = 0
    self._lists = Lists(folder)
    self._state: State | None = None
    self._minute = 0.0
    self._lines: collections.Counter[str] = collections.Counter()
    self._seconds: collections.deque[float] = collections.deque(maxlen=100)
    self.forget()

  def forget(self) -> None:
    """Ends a run: its workers must say hello again."""
    self._text: bytes | None = (
      None  # what all exchange, in a run that has begun
    )
    self._members: dict[int, _Member] = {}
    self._followers: dict[bytes, _Member] = {}  # by their program
    self._lists.clear()
    self._drop_state()
    self._state_was_asked = False
    self._began = 0.0  # when the first hello, or message of the round, came
    self._last_seen = self._last_closed = 0.0

  def take(
    self, identity: bytes, key_rank: int | None, head: bytes, *bodies: bytes
  ) -> None:
    """Acts on what a connection has sent; refuses what does not fit.

    `key_rank` is the rank whose key the connection has, if there are keys.
    """
    header = frames.unpack(head)
    if header is None:
      return self._say('refused: no header of this version')
    rank, now = header.rank, self._clock()
    is_follower = rank == frames.FOLLOWER
    if rank >= self.options.workers and not is_follower:
      return self._refuse(
        identity,
        rank,
        f'rank must be from 0 to {self.options.workers - 1}, got {rank}.'
        ' Start the relay with more --workers.',
      )
    if key_rank not in (None, rank):
      return self._say('refused: a key that is not of rank %d', rank)
    if is_follower:
      return self._take_from_follower(identity, header, *bodies)
    member = self._members.get(rank)
    if member is not None and member.hello.program != header.program:
      # Messages of a program that has ended may still be on their way.
      if header.program != member.rival:
        member.rival, member.rival_since = header.program, now
      both_live = member.heard > member.rival_since + _SECONDS / 2
      if header.kind != frames.HELLO or both_live:
        return self._refuse(identity, rank, _SAME_RANK.format(rank))
      if now - member.heard < _SECONDS:
        return self._send(identity, Header(frames.AGAIN, rank))
    if header.kind == frames.HELLO and bodies:
      return self._hello(identity, header, *bodies)
    if member is None:
      return self._send(identity, Header(frames.UNKNOWN, rank))
    member.heard = now
    if self._text is not None:
      self._act(member, identity, header, *bodies)

  def _take_from_follower(
    self, identity: bytes, header: Header, *bodies: bytes
  ) -> None:
    follower, now = self._followers.get(header.program), self._clock()
    if header.kind == frames.HELLO and self._text is not None:
      if bodies[:1] != (self._text,):
        self._refuse_text(identity, header.rank)
      elif len(self._followers) < _FOLLOWERS:
        follower = _Member(identity, header, self._text, (), now)
        self._followers[header.program] = follower
        self._welcome(follower)
    elif follower is None and header.kind != frames.HELLO:
      self._send(identity, Header(frames.UNKNOWN, header.rank))
    elif follower is not None and header.kind in (frames.LISTEN, frames.PULL):
      follower.heard = now
      self._act(follower, identity, header)

  def _act(
    self, member: _Member, identity: bytes, header: Header, *bodies: bytes
  ) -> None:
    match header.kind, bodies:
      case frames.MESSAGE, (body,) if body:
        self._message(member, identity, header, body)
      case frames.LISTEN, () | (_,):
        self._listen(member, identity, header)
      case frames.PUSH, (part,):
        self._push(identity, header, part)
      case frames.PULL, ():
        self._pull(member, identity, header)
      case frames.PAUSE, ():
        member.awaited = member.awaited and bool(member.body)
      case _:
        text = 'refused: kind %d with %d frames'
        self._say(text, header.kind, len(bodies))

  def look_at_the_clock(self) -> None:
    """Begins the run, closes the round, or gives up what does not come."""
    now = self._clock()
    members = list(self._members.values())
    if self._text is None:
      if members:
        self._gather(now)
      return
    sent = [member for member in members if member.body]
    is_over = now - self._began > self._limit
    is_complete = all(m.body for m in members if m.awaited)
    if len(sent) >= self.options.quorum and (is_complete or is_over):
      self._close(now)
    for member in members:
      if now - member.heard > _STALE:
        member.joins = False
    for program, follower in list(self._followers.items()):
      if now - follower.heard > _STALE:
        del self._followers[program]
    patience = max(self.options.start, 3 * self._limit)
    some_join = any(member.joins for member in members)
    if some_join and now - self._last_seen > patience:
      self._say('all workers have left the run')
      self.forget()

  # Workers that come ----------------------------------------------------------

  def _hello(
    self, identity: bytes, header: Header, text: bytes, *last: bytes
  ) -> None:
    rank, now = header.rank, self._clock()
    old = self._members.get(rank)
    if reason := self._misfit(header, text, len(last)):
      return self._refuse(identity, rank, reason)
    if self._text not in (None, text):
      return self._refuse_text(identity, rank)
    if old is None or old.hello.program != header.program:
      self._say('worker %d says hello, round %d', rank, header.round)
      if old is not None:
        self._refuse(old.identity, rank, _SAME_RANK.format(rank))
    if self._text is not None and header.round > self.round:
      self._say('worker %d is back from a longer run', rank)
      self.forget()
    member = _Member(identity, header, text, last, now)
    self._members[rank] = member
    if self._text is None:
      self._began = self._began or now
    else:
      was_awaited = old is not None and old.awaited
      member.awaited = was_awaited and self._lists.lead_from(header)
      self._welcome(member)

  def _misfit(self, header: Header, text: bytes, frames_of_list: int) -> str:
    """Returns why a hello cannot be that of a worker of this run, or ''."""
    described = frames.described(text)
    if (
      described is None
      or not 0 <= header.round < _MAX_ROUND
      or frames_of_list not in (0, self.options.workers)
    ):
      return (
        'A hello must be that of a worker with this version of demo_optax, got'
        ' something else. Install one version for relay and workers.'
      )
    count, expected = described.get('workers'), str(self.options.workers)
    if count in (None, expected):
      return ''
    return (
      f'count must be that of the relay, {expected}, got {count} from worker'
      f' {header.rank}. Start the worker with count={expected}, or the relay'
      f' with --workers {count}.'
    )

  def _gather(self, now: float) -> None:
    """Begins the run if all workers are there, or the time for it is over."""
    members = self._members.values()
    # A run that begins waits for all, one that continues only for some time.
    is_new = all(member.hello.round == 0 for member in members)
    patience = self.options.start if is_new else max(10.0, 5 * self._limit)
    is_over = now - self._began > patience
    texts = collections.Counter(member.text for member in members)
    ((text, most),) = texts.most_common(1)
    has_majority = 2 * most > self.options.workers
    if is_over or has_majority or len(members) == self.options.workers:
      for member in [m for m in members if m.text != text]:
        self._refuse_text(member.identity, member.rank, text)
        del self._members[member.rank]
    if is_over or len(self._members) == self.options.workers:
      self._begin(text)

  def _begin(self, text: bytes) -> None:
    """Begins a run, or continues one of another relay."""
    self._text = text
    members = [member for _, member in sorted(self._members.items())]
    positions = collections.Counter(
      (m.hello.round, m.hello.chain) for m in members
    )

    def claim(member: _Member) -> tuple[int, int, int]:
      at = member.hello
      return at.round, at.number, positions[at.round, at.chain]

    chosen = max(members, key=claim).hello
    self.round = chosen.round
    self._lists.begin(chosen.round, chosen.chain)
    lasts = [m.last for m in members if m.hello.chain == chosen.chain]
    for member, last in itertools.product(members, lasts):
      # A list that the one may not have received, and the other has.
      at = member.hello
      leads = frames.digest(at.chain, *last) == chosen.chain
      if leads and at.round == self.round - 1:
        self._keep(at.round, self._lists.add, at, last)
    for member in members:
      member.awaited, member.last = self._lists.lead_from(member.hello), ()
      self._welcome(member)
    self._began, self._last_seen = 0.0, self._clock()
    self._say('round %d, %d workers', self.round, len(members))

  def _welcome(self, member: _Member) -> None:
    header = Header(frames.WELCOME, member.rank, self.round)
    limits = frames.LIMITS.pack(self.options.max_message)
    self._send(member.identity, header, limits)

  # Rounds ---------------------------------------------------------------------

  def _message(
    self, member: _Member, identity: bytes, header: Header, body: bytes
  ) -> None:
    if self._lists.lead_from(header):
      if header.round == self.round:
        if not any(m.body for m in self._members.values()):
          self._began = self._clock()
        if member.awaited:
          member.missed = 0
        member.body, member.joins = member.body or body, False
      elif self.round >= member.not_before:
        member.awaited = True  # it is late, and may be in time now
    self._listen(member, identity, header)

  def _listen(self, member: _Member, identity: bytes, header: Header) -> None:
    rank, number = header.rank, header.round
    if not self._lists.lead_from(header):
      return self._gone(member, identity)
    if rank != frames.FOLLOWER:
      self._last_seen = self._clock()
    was_asked = (member.identity, member.asked) == (identity, number)
    member.identity, member.asked = identity, number
    if number == self.round:
      if rank == frames.FOLLOWER:  # no lists need be kept for it any more
        member.joins = False
      if not member.body:  # who follows does not heed it
        self._send(identity, Header(frames.AGAIN, rank, number))
    elif not (header.again and was_asked):
      # Else it is on its way: a long list on a slow link.
      closed = self._lists.read(number)
      if closed is None:
        self._gone(member, identity)
      else:
        self._send_list(member, number, closed)

  def _gone(self, member: _Member, identity: bytes) -> None:
    """Says that a worker must join."""
    if not member.joins:
      self._say('worker %d joins', member.rank)
    member.joins, member.awaited, member.least = True, False, 0
    self._send(identity, Header(frames.GONE, member.rank, self.round))

  @property
  def _limit(self) -> float:
    """Seconds from the first message of a round to its end."""
    if self.options.deadline is not None:
      return self.options.deadline
    return max(_SECONDS, _ROUNDS * self._median)

  @property
  def _median(self) -> float:
    return statistics.median(self._seconds or [0.0])

  def _close(self, now: float) -> None:
    """Ends a round: all workers get the same list."""
    is_training = self._leave_out_other_steps()
    members = self._members.values()
    messages = [b''] * self.options.workers
    for member in members:
      messages[member.rank] = member.body
      if member.awaited and not member.body:
        # One that is often late is waited for in ever fewer rounds.
        member.missed += 1
        member.not_before = self.round + 2 ** min(member.missed, 8)
    missing = sorted(m.rank for m in members if m.awaited and not m.body)
    if missing:
      self._say('round %d without %s', self.round, missing)
    if self._last_closed:
      self._seconds.append(now - self._last_closed)
    self._last_closed = now
    # In one training step workers compare their states, after the next one the
    # state is there: not before that it is wanted again.
    wants_state = (
      is_training and self._wants_state and not self._state_was_asked
    )
    if is_training:
      self._state_was_asked = wants_state
    number, closed = self.round, Closed(messages, wants_state)
    self._keep(number, self._lists.close, number, closed)
    self.round += 1
    self._drop_lists()
    for member in members:
      member.awaited, member.body = bool(member.body), b''
      if member.asked == number:
        self._send_list(member, number, closed)
    for follower in self._followers.values():
      if follower.asked == number:
        self._send_list(follower, number, closed)
    if self.round % 100 == 0:
      workers = sum(map(bool, messages))
      text = 'round %d, %.3f s each, %d workers'
      self._say(text, self.round, self._median, workers)

  def _leave_out_other_steps(self) -> bool:
    """Drops messages that are not of most workers' step.

    An evaluation has priority: a training step is sent again in the next round.
    Returns whether the round is one of a training step.
    """
    kinds = {}
    for rank, member in sorted(self._members.items()):
      if body := member.body:
        is_evaluation = not frames.changes_state(body)
        kinds[rank] = is_evaluation, len(body), body[: frames.CHAIN]
    counts = collections.Counter(kinds.values())
    kind = max(counts, key=lambda kind: (kind[0], counts[kind]))
    for rank in [rank for rank, other in kinds.items() if other != kind]:
      self._say(
        'round %d without worker %d, which has called another step: its'
        ' message has %d bytes, not %d',
        self.round,
        rank,
        len(self._members[rank].body),
        kind[1],
      )
      self._members[rank].body = b''
    return not kind[0]

  def _send_list(self, member: _Member, number: int, closed: Closed) -> None:
    is_open = -self.round if closed.wants_state else self.round
    self._send(
      member.identity,
      Header(frames.LIST, member.rank, number, is_open),
      bytes(map(bool, closed.messages)),
      *filter(None, closed.messages),
    )

  def _keep(self, number: int, keep: Callable[..., None], *args: Any) -> None:
    """Keeps a list on disk."""
    try:
      keep(*args)
    except OSError as error:  # who is late must join
      self._say('round %d is not kept: %s', number, error)

  def _drop_lists(self) -> None:
    """Drops lists that nobody can need."""
    last = self.round - 1 - self.options.history
    if self._joining and (state := self._usable_state(0)):
      before = min(last, state.header.round - 1)
      last = max(before, self.round - 1 - _MAX_LISTS)
    self._lists.drop(last)

  # The state, for workers that join -------------------------------------------

  @property
  def _joining(self) -> list[_Member]:
    several = itertools.chain(self._members.values(), self._followers.values())
    return [member for member in several if member.joins]

  def _usable_state(self, least: int) -> State | None:
    """Returns the state, on its way or there, if it can be handed out.

    To a worker that can take the state of the round `least` or of a later one.
    Lists must lead from it: the only place where this is decided.
    """
    state = self._state
    if state is None or state.header.round < least:
      return None
    sender = self._members.get(state.header.rank)
    arrives = sender is not None and sender.awaited
    is_recent = self._clock() - state.since < _STALE
    if self._lists.lead_from(state.header) and (
      state.complete or (arrives and is_recent)
    ):
      return state
    return None

  @property
  def _wants_state(self) -> bool:
    """Whether a worker must send its state to one that joins."""
    return any(self._usable_state(m.least) is None for m in self._joining)

  def _push(self, identity: bytes, header: Header, part: bytes) -> None:
    """Takes a part; one that is not taken is answered by its own number."""
    if (
      header.number == 0 and self._wants_state and self._lists.lead_from(header)
    ):
      self._state = State(self._folder, header, self._clock())
    state = self._state
    if (
      state is None
      or state.complete
      or header != state.header._replace(number=state.parts)
    ):
      return self._send(identity, header)
    try:
      state.append(part, self._clock())
    except OSError as error:
      self._say('the state of worker %d is not kept: %s', header.rank, error)
      self._drop_state()
      return self._send(identity, header)
    if state.complete:
      text = 'worker %d has sent its state of round %d, %d parts'
      self._say(text, header.rank, header.round, state.parts)
    self._send(identity, header._replace(number=state.parts))

  def _pull(self, member: _Member, identity: bytes, header: Header) -> None:
    """Sends a part, or the header alone if it is not there yet."""
    member.joins, member.awaited = True, False
    member.least = min(header.round, self.round)
    state, number = self._usable_state(member.least), header.number
    if state and state.complete and 0 <= number < state.parts:
      try:
        part = state.part(number)
      except OSError as error:
        self._say('the state cannot be read: %s', error)
        self._drop_state()
      else:
        at = state.header
        header = header._replace(round=at.round, chain=at.chain)
        return self._send(identity, header, part)
    self._send(identity, header)

  def _drop_state(self) -> None:
    if self._state is not None:
      self._state.remove()
    self._state = None

  # What is refused ------------------------------------------------------------

  def _refuse(self, identity: bytes, rank: int, reason: str) -> None:
    self._say('refused: %s', reason)
    self._send(identity, Header(frames.REFUSED, rank), reason.encode())

  def _refuse_text(
    self, identity: bytes, rank: int, text: bytes | None = None
  ) -> None:
    self._say('refused: worker %d has another configuration', rank)
    header = Header(frames.REFUSED, rank)
    self._send(identity, header, b'', text or self._text or b'')

  def _say(self, text: str, *values: object) -> None:
    """Logs a line, if there were not too many: workers cause them."""
    minute = self._clock() // 60
    if minute != self._minute:
      self._minute = minute
      self._lines.clear()
    self._lines[text] += 1
    if self._lines[text] <= _LINES + self.options.workers:
      _LOG.info('%s', (text % values)[:_LINE])
