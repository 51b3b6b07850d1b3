"""One process of a run: what it tells the coordinator, and JAX's runtime."""

import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import json
import os
import platform
import re
import socket
import threading
import time
from typing import Any

import jax
from jax._src import cache_key, compiler, distributed
from jax._src.lib import _jax
from jax.extend import backend

from demo_optax.elastic import coordinator

# Seconds from the end of a generation to the end of the connections of those
# that still wait in one of its steps.
_GRACE = 0.5
# What the runtime raises begins with a status, as in "UNKNOWN: Gloo ...".
_STATUS = re.compile('(?:[A-Z_]{5,}): ')


class Member:
  """The connection of this process to the coordinator.

  A thread sends signs of life, hears when the generation ends, and then cuts
  the connections that a step waits for. Where a process has stopped without
  closing them, a step would wait for ever.
  """

  def __init__(self, address: str, timeout: float, patience: float):
    host, _, port = address.rpartition(':')
    if not host or not port.isdecimal():
      raise ValueError(f'coordinator={address!r} must be "HOST:PORT".')
    self._address = host.strip('[]'), int(port)
    self._timeout, self._patience = timeout, patience
    self._changed = threading.Condition()
    self._inside = 0  # the attempt at a step that is under way, or 0
    self._attempts = 0
    self._socket: socket.socket | None = None
    self._client: Any = None  # of JAX's service of the generation
    self._services: set[int] = set()  # ports of JAX's services
    # Sockets that were open before it joined a generation; None: it has not.
    self._others: set[str] | None = None
    self._leaving, self._sending = threading.Lock(), threading.Lock()
    self._clear()

  def _clear(self) -> None:
    self._ended = ''  # why the generation ended
    self._offer: dict[str, Any] | None = None  # the next one
    self._finished = False

  # The coordinator ------------------------------------------------------------

  @property
  def ended(self) -> str:
    """Returns why the generation has ended, or nothing if it has not."""
    return self._ended

  @property
  def is_connected(self) -> bool:
    """Returns whether the coordinator has not hung up."""
    return self._socket is not None

  def connect(self) -> None:
    """Connects, for as long as the time limit lets it try."""
    deadline = time.monotonic() + self._timeout
    while True:
      try:
        connection = socket.create_connection(self._address, timeout=5)
        break
      except OSError as error:
        if time.monotonic() > deadline:
          host, port = self._address
          raise TimeoutError(
              f'There is no coordinator at {host}:{port} ({error}): start one'
              f' with python -m demo_optax.elastic --port {port} --workers N.'
          ) from error
        time.sleep(0.2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(coordinator.HEARTBEAT_SECONDS)
    with self._changed:
      self._clear()
      self._socket = connection
    threading.Thread(
        target=self._listen, args=(connection,), daemon=True
    ).start()

  def tell(self, kind: str, **about: Any) -> None:
    """Sends the coordinator a message."""
    connection = self._socket
    if connection is None:
      return
    try:
      with self._sending:
        connection.sendall(json.dumps({'kind': kind, **about}).encode() + b'\n')
    except OSError:
      self._hang_up(connection)

  def _hang_up(self, connection: socket.socket) -> None:
    with self._changed:
      if self._socket is connection:
        self._socket = None
        self._ended = self._ended or 'the coordinator has hung up'
      self._changed.notify_all()
    connection.close()

  def _listen(self, connection: socket.socket) -> None:
    buffer, spoken = b'', 0.0
    while self._socket is connection:
      if time.monotonic() - spoken > coordinator.HEARTBEAT_SECONDS / 2:
        self.tell('alive')
        spoken = time.monotonic()
      try:
        received = connection.recv(2**16)
      except TimeoutError:
        continue
      except OSError:
        received = b''
      if not received:
        break
      *lines, buffer = (buffer + received).split(b'\n')
      for line in lines:
        self._hear(json.loads(line))
    if self._socket is connection and not self._finished:
      # At once: where it has died, JAX ends this process without another word.
      host, port = self._address
      text = f'The coordinator at {host}:{port} has hung up on {name()}.\n'
      os.write(2, text.encode())
    self._hang_up(connection)
    self._cut_when_stuck()

  def _hear(self, said: dict[str, Any]) -> None:
    with self._changed:
      if said['kind'] == 'generation':
        self._offer, self._ended = said, ''
      elif said['kind'] == 'finished':
        self._finished = True
      elif said['kind'] == 'ended':
        self._ended = said['why']
      self._changed.notify_all()
    if said['kind'] == 'ended' and said['lost']:
      threading.Thread(target=self._cut_when_stuck, daemon=True).start()

  def wait_for_generation(
      self, step: int | None, about: Any, rank: int = 0, generation: int = 0
  ) -> dict[str, Any] | None:
    """Says which step it can go on from; returns the next generation.

    What it has is of `rank` in `generation`.

    None if the coordinator has hung up in between: it takes this process for
    lost, or is lost itself.

    Raises:
      TimeoutError: there were too few processes for too long.
      RuntimeError: the others are done.
    """
    with self._changed:
      self._offer = None
    self.tell('ready', step=step, about=about, name=name(), rank=rank,
              generation=generation)
    with self._changed:
      if not self._changed.wait_for(
          lambda: self._offer is not None or self._socket is None
          or self._finished,
          self._patience,
      ):
        raise TimeoutError(
            f'The coordinator waits for other processes, {self._patience:g} s'
            ' by now: start more, or a coordinator with a smaller --min-workers'
            ' (at the beginning, --workers).'
        )
      if self._finished:
        raise RuntimeError('The run is over: its processes are done.')
      return self._offer if self._socket is not None else None

  def finish(self) -> None:
    """Waits until all are done, or the generation has ended."""
    self.tell('done')
    with self._changed:
      self._changed.wait_for(
          lambda: self._finished or self._ended or self._socket is None,
          timeout=self._timeout,
      )
    # The coordinator ends when all have hung up, and JAX's service with it.
    self._leave_service()
    with self._changed:
      connection, self._socket = self._socket, None
    if connection is not None:
      connection.close()

  def hang_up(self) -> None:
    """Lets the others go on without this process."""
    connection = self._socket
    if connection is not None:
      self._hang_up(connection)
    self.cut()
    self._leave_service()

  # Steps ----------------------------------------------------------------------

  def enter(self) -> None:
    """Begins an attempt at a step."""
    with self._changed:
      self._attempts += 1
      self._inside = self._attempts

  def leave(self) -> None:
    """Ends the attempt."""
    with self._changed:
      self._inside = 0

  def _cut_when_stuck(self) -> None:
    attempt = self._inside
    time.sleep(_GRACE)
    waits = 0
    while attempt and self._inside == attempt:
      self.cut()
      if waits == 4:  # it does not wait for a collective: for a barrier
        self._leave_service()
      waits += 1
      time.sleep(_GRACE)

  # JAX's runtime --------------------------------------------------------------

  def join_generation(self, generation: dict[str, Any]) -> None:
    """Becomes a process of a generation.

    Raises:
      RuntimeError: not all of its processes have come.
    """
    if backend_is_there():
      raise RuntimeError(
          'JAX has devices already: elastic.Run must come before anything is'
          ' computed, and before jax.devices().'
      )
    state = distributed.global_state
    if state.client is not None:
      raise RuntimeError(
          'jax.distributed is initialized already: elastic.Run does that.'
      )
    host, port = self._address[0], generation['port']
    self._services.add(port)
    self._others = set(_sockets().values())
    # Not by jax.distributed.initialize: process 0 would hold the service, and
    # a process that does not come would end all others.
    client = _jax.get_distributed_runtime_client(
        f'{host}:{port}', generation['rank'],
        init_timeout=coordinator.REGISTER_SECONDS,
        heartbeat_timeout=coordinator.JAX_HEARTBEAT_SECONDS,
        shutdown_timeout=5, use_compression=True, shutdown_on_destruction=False,
        missed_heartbeat_callback=lambda status: None,
    )
    client.connect()
    state.client = self._client = client
    state.process_id = generation['rank']
    state.num_processes = generation['processes']
    state.coordinator_address = f'{host}:{port}'
    _renew_orbax()
    _share_programs()

  def leave_generation(self) -> None:
    """Leaves JAX's devices, its connections, and all that was compiled."""
    self.cut()  # others may still wait for what this process does not send
    state = distributed.global_state
    self._leave_service()
    state.process_id, state.num_processes = 0, 1
    # What is kept by mesh or device keeps the backend, and its threads.
    _forget('demo_optax.', 'jax.')
    with contextlib.suppress(AttributeError):
      # With jax_share_binary_between_hosts: programs of this backend.
      sharing: Any = compiler._compile_and_share_module
      sharing.modules_cache.clear()
    backend.clear_backends()
    gc.collect()
    _return_memory()

  def _leave_service(self) -> None:
    """Leaves JAX's service; what waits for a barrier there fails."""
    with self._leaving:
      client, self._client = self._client, None
      if client is not None:
        distributed.global_state.client = None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
          client.shutdown()

  def cut(self) -> None:
    """Ends the connections of the backend to other processes.

    They are what of this process's connections was opened since it joined the
    generation, does not belong to Python, and does not lead to a service of
    JAX's. A library in C++ that opens connections of its own meanwhile loses
    those, too, and has to open them again.
    """
    if self._others is None:
      return
    connections = _sockets()
    for number, inode in connections.items():
      if inode in self._others:
        continue
      try:
        with socket.socket(fileno=os.dup(number)) as connection:
          if (
              connection.type == socket.SOCK_STREAM
              and connection.family in (socket.AF_INET, socket.AF_INET6)
              and connection.getpeername()[1] not in self._services
          ):
            connection.shutdown(socket.SHUT_RDWR)
      except OSError:
        continue


def _sockets() -> dict[int, str]:
  """Returns the sockets of this process that Python does not hold."""
  own = set()
  for x in gc.get_objects():
    if issubclass(type(x), socket.socket):  # a dead proxy has no class to ask
      own.add(x.fileno())
  found = {}
  with contextlib.suppress(OSError):
    for entry in os.listdir('/proc/self/fd'):
      with contextlib.suppress(OSError):
        link = os.readlink(f'/proc/self/fd/{entry}')
        if link.startswith('socket:') and int(entry) not in own:
          found[int(entry)] = link
  return found


def _return_memory() -> None:
  """Returns free memory to the system, which glibc keeps after compilation."""
  with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).malloc_trim(0)


def _renew_orbax() -> None:
  """Lets Orbax forget the service of the last generation.

  It keeps a client of it, and names barriers by the number of its saves, which
  processes that come have not made.
  """
  try:
    from orbax.checkpoint._src.futures import synchronization
  except ImportError:
    return
  _forget('orbax.')
  numbers = synchronization.OperationIdGenerator
  numbers._operation_id_counter = itertools.count()
  numbers._operation_id = next(numbers._operation_id_counter)


def _share_programs() -> None:
  """Lets processes on CPUs find in JAX's cache what others have compiled.

  There the key of a program contains the process that compiled it, so that each
  would find its own programs only, and JAX stores those of process 0 alone.
  """
  keys: Any = cache_key
  with contextlib.suppress(AttributeError):
    original = inspect.unwrap(keys._hash_accelerator_config)

    @functools.wraps(original)
    def hash_devices(key: Any, devices: Any) -> None:
      if any(device.platform != 'cpu' for device in devices.flat):
        original(key, devices)
        return
      kinds = [device.device_kind for device in devices.flat]
      key.update(repr((kinds, _cpu_features())).encode())

    keys._hash_accelerator_config = hash_devices


@functools.cache
def _cpu_features() -> str:
  """Returns what programs for this processor may use."""
  found = platform.processor()
  with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
    for line in file:
      if line.lower().startswith(('flags', 'features')):
        return found + line
  return found


def _forget(*packages: str) -> None:
  """Clears the caches of the functions of some packages."""
  for cached in gc.get_objects():
    if issubclass(type(cached), functools._lru_cache_wrapper) and str(
        getattr(cached, '__module__', '')
    ).startswith(packages):
      cached.cache_clear()


def is_lost_peer(error: BaseException | None) -> bool:
  """Returns whether an error is the runtime's: it may be a lost process's."""
  if error is None:
    return False
  if isinstance(error, jax.errors.JaxRuntimeError):
    return True
  # A status that Python is told of by a callback has no type there.
  if type(error) is RuntimeError and str(error) == 'std::bad_cast':
    return True
  # On CPU a collective that fails raises the status as a ValueError.
  if type(error) is ValueError and _STATUS.match(str(error)):
    return True
  return is_lost_peer(error.__cause__) or is_lost_peer(error.__context__)


def backend_is_there() -> bool:
  """Returns whether JAX has devices, which then cannot be others."""
  from jax._src import xla_bridge

  return xla_bridge.backends_are_initialized()


def name() -> str:
  """Returns the name of this process in messages."""
  return f'{socket.gethostname()}:{os.getpid()}'
