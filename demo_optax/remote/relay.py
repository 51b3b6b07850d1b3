"""The relay: hands all workers the same list of messages, round by round.

It never decodes a message. `rounds` says who is answered what, `store` keeps
the last lists in temporary files, and this module holds the connections.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from demo_optax.remote import frames
from demo_optax.remote.frames import Header
from demo_optax.remote.rounds import Options, Rounds

_TICK = 10  # milliseconds after which the clock is looked at


class Relay:
  """A relay of one run; `serve` runs it.

  It listens at `address`, with the port that it was given. The options are
  those of `python -m demo_optax.remote --help`.
  """

  def __init__(
    self,
    address: str,
    options: Options,
    keys: str | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    own_keys = frames.keys_for(address, keys)
    with contextlib.ExitStack() as stack:
      self._ranks: dict[str, int] = {}  # by public key
      self._identities: dict[int, bytes] = {}  # by file descriptor
      self._socket = self._open(stack, address, options)
      if own_keys is not None:
        self._ask_for_keys(stack, own_keys)
      self._socket.bind(address)
      self.address: str = self._socket.last_endpoint.decode()
      self._disconnections = stack.enter_context(
        self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
      )
      self.rounds = Rounds(options, self._send, clock)
      stack.callback(self.rounds.forget)
      self._closing = stack.pop_all()

  def serve(self, should_stop: Callable[[], bool]) -> None:
    """Serves until `should_stop()` is true."""
    with self._closing:
      while not should_stop():
        has_come = self._socket.poll(_TICK)
        # First: a new connection may have the number of one that has ended.
        self._note_disconnections()
        if has_come:
          self._take(self._socket.recv_multipart(copy=False))
        self.rounds.look_at_the_clock()

  def _open(
    self, stack: contextlib.ExitStack, address: str, options: Options
  ) -> Any:
    context: Any = stack.enter_context(zmq.Context())
    context.max_sockets = 65536
    socket = stack.enter_context(context.socket(zmq.ROUTER))
    socket.linger = 0
    socket.maxmsgsize = options.max_message
    socket.handshake_ivl = 5000
    socket.heartbeat_ivl = 5000
    socket.heartbeat_timeout = 30000
    socket.sndhwm = 64 + 2 * options.workers
    socket.rcvhwm = 4  # of each connection: each waits for answers
    socket.backlog = 1024
    socket.ipv6 = int('//*' in address or '[' in address)
    return socket

  def _ask_for_keys(
    self, stack: contextlib.ExitStack, keys: frames.Keys
  ) -> None:
    """Lets only workers in whose keys are known."""
    *of_workers, of_followers = keys.others
    self._ranks = {key: rank for rank, key in enumerate(of_workers)}
    self._ranks[of_followers] = frames.FOLLOWER
    auth = zmq.auth.thread.ThreadAuthenticator(self._socket.context)
    auth.start()
    stack.callback(auth.stop)
    auth.configure_curve_callback('*', self)
    self._socket.curve_server = 1
    self._socket.curve_publickey = keys.public.encode()
    self._socket.curve_secretkey = keys.secret.encode()

  def callback(self, domain: str, key: bytes) -> bool:
    """Returns whether this is a worker's key: ZeroMQ asks."""
    return key.decode('ascii', 'replace') in self._ranks

  def _take(self, received: list[Any]) -> None:
    origin, first, *_ = received
    identity, *frames_sent = [frame.bytes for frame in received]
    key_rank = None
    if self._ranks:
      public_key = str(first.get('User-Id'))
      key_rank = self._ranks.get(public_key, -1)
    with contextlib.suppress(zmq.ZMQError):  # who speaks an old protocol
      descriptor = origin.get(zmq.SRCFD)
      self._identities[descriptor] = identity
    self.rounds.take(identity, key_rank, *frames_sent)

  def _note_disconnections(self) -> None:
    """Notes which connections have ended, as that of a killed program."""
    while self._disconnections.poll(0):
      number = recv_monitor_message(self._disconnections)['value']
      self.rounds.note_disconnected(self._identities.pop(number, b''))

  def _send(self, identity: bytes, header: Header, *bodies: bytes) -> None:
    # The worker may be gone, or not read.
    with contextlib.suppress(zmq.ZMQError):
      self._socket.send_multipart(
        [identity, header.pack(), *bodies], zmq.NOBLOCK, copy=False
      )
