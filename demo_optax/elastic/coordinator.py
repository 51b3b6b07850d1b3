"""Who takes part in a run: one process decides, and all others follow.

A run is a sequence of generations. In a generation the processes are fixed, and
know each other through a runtime service of JAX's that was started for it
alone. When a process is lost, or one comes, the generation ends: every process
leaves the service, says which step it can go on from, and waits for the next.
Nothing that a process of a former generation may still send can reach a step of
a later one, since their connections are others.

The coordinator holds those services, so that the death of no worker ends a run.
It computes nothing.
"""

import dataclasses
import json
import logging
import selectors
import socket
import time
from typing import Any

from jax._src.lib import _jax  # the service without a process of its own

_log = logging.getLogger(__name__)

# Between two signs of life of a process, roughly.
HEARTBEAT_SECONDS = 0.5
# JAX's own heartbeats must not end anything: members are told by ours.
JAX_HEARTBEAT_SECONDS = 10**6
# In which all processes of a generation must have found its service.
REGISTER_SECONDS = 30
_LONGEST_LINE = 2**20
_KEPT = 3  # services of former generations


@dataclasses.dataclass(eq=False)
class _Member:
  """One connection of a process."""

  socket: socket.socket
  name: str
  heard: float  # when it spoke last
  buffer: bytes = b''
  is_ready: bool = False  # for the next generation
  step: int | None = None  # that it can go on from; None: it has nothing
  about: Any = None  # what newcomers must know of what it has
  asked: float = 0.0  # since when it is to become ready
  rank: int | None = None  # in the generation that runs, or ran last
  is_steady: bool = False  # it has made a step in this generation
  is_done: bool = False


class Coordinator:
  """Forms the generations of a run; see `demo_optax.elastic.Run`.

  Args:
    num_workers: processes that the first generation waits for.
    host: address to listen on, all of the machine's if empty.
    port: to listen on; 0 takes a free one, see `self.port`.
    min_workers: a run of fewer processes waits for others.
    deadline: seconds, at least 2. A process that was silent for so long is left
      behind; it gives a sign of life about twice a second.
    patience: seconds in which a process must end its step, or its compilation,
      when the generation ends; then it is left behind.

  Raises:
    ValueError: `min_workers` is not between 1 and `num_workers`, a time is too
      short, or there is no such port.
    OSError: the port is taken, or may not be listened on.

  Example:
    >>> from demo_optax import elastic
    >>> coordinator = elastic.Coordinator(4, host='127.0.0.1', port=0)
    >>> coordinator.port > 0
    True
    >>> coordinator.close()
  """

  def __init__(
      self, num_workers: int, *, host: str = '', port: int = 0,
      min_workers: int = 1, deadline: float = 10.0, patience: float = 600.0,
  ):
    if not 1 <= min_workers <= num_workers:
      raise ValueError(
          f'min_workers={min_workers} must be from 1 to'
          f' num_workers={num_workers}.'
      )
    if not 0 <= port < 2**16:
      raise ValueError(f'port={port} must be from 0 to {2**16 - 1}.')
    if not deadline >= 4 * HEARTBEAT_SECONDS:
      raise ValueError(
          f'deadline={deadline} must be at least {4 * HEARTBEAT_SECONDS:g} s.'
      )
    if not patience > 0:
      raise ValueError(f'patience={patience} must be positive.')
    self._wanted, self._min = num_workers, min_workers
    self._host = host or '[::]'
    self._deadline, self._patience = deadline, patience
    self._members: list[_Member] = []
    self._number = 0  # of the generation
    self._running = False  # whether it has not ended
    self._finished = False
    self._changed = 0.0  # when a process came or went last
    # Services of generations that may still have clients, with them. A service
    # that closes while a client is connected ends the client's process.
    self._services: dict[int, tuple[Any, set[_Member]]] = {}
    self._selector = selectors.DefaultSelector()
    self._listener = socket.create_server((host, port))
    self._listener.setblocking(False)
    self._selector.register(self._listener, selectors.EVENT_READ)

  @property
  def port(self) -> int:
    """Returns the port that processes connect to."""
    return self._listener.getsockname()[1]

  def serve(self) -> None:
    """Forms generations until all processes of one are done."""
    last = time.monotonic()
    try:
      while not (self._finished and not self._members):
        now = time.monotonic()
        if now - last > self._deadline / 2:
          # It was this process that stood still, not all others.
          for member in self._members:
            member.heard = now
        last = now
        for key, _ in self._selector.select(0.1):
          if key.fileobj is self._listener:
            self._accept()
          else:
            self._read(key.data)
        self._leave_behind()
        self._take_in()
        self._form()
    finally:
      self.close()

  def close(self) -> None:
    """Closes all connections."""
    for member in list(self._members):
      self._drop(member, '')
    self._selector.close()
    self._listener.close()

  # Connections ----------------------------------------------------------------

  def _accept(self) -> None:
    try:
      connection, (host, port, *_) = self._listener.accept()
    except OSError:
      return
    connection.settimeout(5.0)  # of sending; it is read when there is something
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    member = _Member(connection, f'{host}:{port}', time.monotonic())
    self._members.append(member)
    self._selector.register(connection, selectors.EVENT_READ, member)

  def _read(self, member: _Member) -> None:
    try:
      received = member.socket.recv(2**16)
    except OSError:
      received = b''
    if not received:
      self._drop(member, 'its connection was closed')
      return
    member.heard = time.monotonic()
    *lines, member.buffer = (member.buffer + received).split(b'\n')
    try:
      if len(member.buffer) > _LONGEST_LINE:
        raise ValueError('it is too long')
      for line in lines:
        self._hear(member, json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
      self._drop(member, f'what it says makes no sense: {error!r}')

  def _hear(self, member: _Member, said: dict[str, Any]) -> None:
    kind = said['kind']
    if kind == 'ready':
      step, rank = said['step'], said.get('rank')
      if not isinstance(step, int | None) or not isinstance(rank, int | None):
        raise TypeError('steps and ranks are integers')
      member.name, member.about = str(said['name']), said['about']
      # Who comes back has what it had, unless others have gone on meanwhile.
      kept = member.rank is not None or (
          said.get('generation') == self._number and not self._running
      )
      member.step = step if kept else None
      if kept and member.rank is None:
        member.rank = rank
      member.is_ready = True
      if self._finished:
        self._send(member, {'kind': 'finished'})
      self._changed = time.monotonic()
      self._forget_client(member)
    elif kind == 'steady':
      member.is_steady = True
    elif kind == 'failed':
      if member.rank is not None:
        self._end_generation(f'a step failed in {member.name}', lost=True)
    elif kind == 'done' and member.rank is not None:
      member.is_done = True
      self._finish()

  def _finish(self) -> None:
    """Ends the run when all of a generation are done."""
    current = [m for m in self._members if m.rank is not None]
    if current and all(m.is_done for m in current):
      self._finished = True
      for m in list(self._members):
        if m.is_done or m.is_ready:
          self._send(m, {'kind': 'finished'})

  def _send(self, member: _Member, message: dict[str, Any]) -> None:
    try:
      member.socket.sendall(json.dumps(message).encode() + b'\n')
    except OSError:
      self._drop(member, 'nothing can be sent to it')

  def _forget_client(self, member: _Member) -> None:
    """Notes that a process has no connection to any service any more.

    A process that was left behind returns as another member, of the same name.
    """
    for _, clients in self._services.values():
      clients -= {client for client in clients if client.name == member.name}

  def _drop(
      self, member: _Member, why: str, *, is_silent: bool = False
  ) -> None:
    """Forgets a process; the generation that it was part of ends.

    Of one that is silent the connection to the service may live on.
    """
    if member not in self._members:
      return
    self._members.remove(member)
    self._selector.unregister(member.socket)
    member.socket.close()
    if not why:
      return
    if not is_silent:
      self._forget_client(member)
    self._changed = time.monotonic()
    if member.rank is None or member.is_done:
      return
    _log.info('%s is lost: %s', member.name, why)
    self._end_generation(f'{member.name} is lost', lost=True)
    self._finish()

  def _leave_behind(self) -> None:
    now = time.monotonic()
    for member in list(self._members):
      if now - member.heard > self._deadline:
        self._drop(
            member, f'it was silent for {self._deadline:g} s', is_silent=True
        )
        continue
      awaited = not (self._running or member.is_ready or member.is_done)
      if (
          awaited and member.rank is not None
          and now - member.asked > self._patience
      ):
        self._drop(
            member, f'it did not end its step in {self._patience:g} s',
            is_silent=True,
        )

  # Generations ----------------------------------------------------------------

  def _take_in(self) -> None:
    """Ends the generation if somebody has come, once all of it train.

    Before that some of them still meet or compile, and would do it twice.
    """
    if not self._running:
      return
    for member in self._members:
      if member.rank is not None and not member.is_steady:
        return
    for member in self._members:
      if member.rank is None and member.is_ready:
        self._end_generation(f'{member.name} comes', lost=False)
        return

  def _end_generation(self, why: str, *, lost: bool) -> None:
    """Tells all of the generation that it is over.

    Once more if it was over because somebody came, and is now lost: then a step
    that is under way has no end of its own.
    """
    if self._running:
      _log.info('generation %d ends: %s', self._number, why)
    for member in list(self._members):
      if member.rank is None or member.is_ready or member.is_done:
        continue
      if self._running:
        member.asked = time.monotonic()
      self._send(member, {'kind': 'ended', 'why': why, 'lost': lost})
    self._running = False

  def _form(self) -> None:
    """Begins a generation, if all that shall be in it are ready."""
    if self._running or self._finished:
      return
    ready = [m for m in self._members if m.is_ready and not m.is_done]
    former = [m for m in self._members if m.rank is not None and not m.is_done]
    if any(m not in ready for m in former):
      return
    wanted = self._min if self._number else self._wanted
    # Those who come at once come together.
    newcomers = [m for m in ready if m not in former]
    settling = newcomers and self._number and (
        time.monotonic() - self._changed < 0.5
    )
    if len(ready) < wanted or settling:
      return
    survivors = sorted(
        (m for m in ready if m.step is not None),
        key=lambda m: m.rank if m.rank is not None else len(ready),
    )
    order = survivors + [m for m in ready if m.step is None]
    # Who is ahead has the state before its last step as well.
    steps = [m.step for m in survivors if m.step is not None]
    self._number += 1
    about = {
        'kind': 'generation', 'number': self._number,
        'port': self._start_service(order), 'processes': len(order),
        'survivors': len(survivors), 'step': min(steps, default=None),
        'about': survivors[0].about if survivors else None,
    }
    _log.info(
        'generation %d: %d processes, %d of them new, after step %s',
        self._number, len(order), len(order) - len(survivors), about['step'],
    )
    self._running = True
    for rank, member in enumerate(order):
      member.rank, member.is_ready = rank, False
      member.is_steady = False
    for rank, member in enumerate(order):
      self._send(
          member, {**about, 'rank': rank, 'is_new': rank >= len(survivors)}
      )

  def _start_service(self, members: list[_Member]) -> int:
    # Not at once: a client that has left may still listen for a moment.
    over = [
        number for number, (_, clients) in self._services.items()
        if not clients and number < self._number - _KEPT
    ]
    for number in over:
      self._services.pop(number)[0].shutdown()
    with socket.create_server((self._host.strip('[]:'), 0)) as free:
      port = free.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f'{self._host}:{port}', len(members),
        heartbeat_timeout=JAX_HEARTBEAT_SECONDS,
        cluster_register_timeout=REGISTER_SECONDS, shutdown_timeout=5,
        recoverable=True,
    )
    self._services[self._number] = service, set(members)
    return port
