"""Frames between workers and relay: a header, then byte strings.

Numbers are little-endian. A round is one list of messages, one of each worker
that took part. The chain is a digest of the state that a run began with and of
all lists since: workers with equal chains have equal parameters.
"""

import hashlib
import json
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# From a worker: who it is, what it exchanges (see `described`), and its last
# list, if it has one. `number` is the count of steps of the state that it has.
HELLO = 1
# Its message of a round; the relay answers with the list of that round.
MESSAGE = 2
# A request for the list of a round, once it is closed.
LISTEN = 3
# The part `number` of the shared state, for workers that join; answered by the
# header with the number of the next one. The last part has less than `PART`.
PUSH = 4
# A request for the part `round` of that state, with the chain of the state that
# was taken before: it was damaged, or did not help. Answered by a header with
# the state's round as `number`, and the part.
PULL = 5
# Notes that the worker is away for a while: no round waits for it. No answer.
PAUSE = 6

# From the relay: the run has begun. A text says the most bytes of a message.
WELCOME = 11
# The list of a round, see `packed`. `number` is the round that is open now.
LIST = 12
# A message of this round was lost: send it again.
AGAIN = 13
# The relay does not know the worker, or not any more: say hello.
UNKNOWN = 14
# No lists lead from the worker's position to the open round: join.
GONE = 15
# The worker cannot take part; with the reason as text.
REFUSED = 16

CHAIN = 16  # bytes
PART = 1 << 20  # bytes in a part of a state
MAX_WORKERS = 2**16 - 1

# What workers do in the next training step, by the last byte of a list.
NOTHING = 0
COMPARE = 1  # their states
SEND = 2  # as well, the first one of the majority: its state, which is wanted

# In place of a rank: a program that takes part in no round, see `follow`.
FOLLOWER = 2**16 - 1
_MAGIC = b'DEM3'
_HEADER = struct.Struct(f'<4sBHqq{CHAIN}s8s?')


class Header(NamedTuple):
  """The first frame of a message between worker and relay."""

  kind: int
  rank: int = 0  # of a worker, not in answers
  round: int = 0
  number: int = 0
  chain: bytes = b''
  program: bytes = b''  # a random number of the worker's process
  again: bool = False  # of a request: the answer may be on its way

  def pack(self) -> bytes:
    """Returns the header as bytes."""
    return _HEADER.pack(_MAGIC, *self)


def unpack(data: bytes) -> Header | None:
  """Returns the header in a frame, or None."""
  if len(data) != _HEADER.size or not data.startswith(_MAGIC):
    return None
  return Header(*_HEADER.unpack(data)[1:])


def name_of(rank: int) -> str:
  """Returns how a program is named in logs and errors."""
  return 'a follower' if rank == FOLLOWER else f'worker {rank}'


def digest(*parts: bytes | memoryview) -> bytes:
  """Returns a digest of byte strings, one after the other."""
  found = hashlib.blake2b(digest_size=CHAIN)
  for part in parts:
    found.update(len(part).to_bytes(8, 'little'))
    found.update(part)
  return found.digest()


def packed(messages: Sequence[bytes], then: int) -> tuple[bytes, ...]:
  """Returns a list: a byte for each worker, and what follows; then messages.

  The byte is 1 for a worker that took part. `then` is for the next step.
  """
  is_here = map(bool, messages)
  return bytes([*is_here, then]), *filter(None, messages)


def unpacked(closed: Sequence[bytes]) -> list[bytes]:
  """Returns the messages in a list, b'' of workers that took no part."""
  *present, _ = closed[0]
  remaining = iter(closed[1:])
  return [next(remaining) if is_here else b'' for is_here in present]


def described(workers: int, values: Mapping[str, str]) -> bytes:
  """Returns lines that all workers must say, and the relay the first one."""
  lines = [f'workers: {workers}']
  for name, value in values.items():
    lines.append(' '.join(f'{name}: {value}'.split()))
  return '\n'.join(lines).encode()


def tag(text: str, values: bytes, changes: bool) -> bytes:
  """Returns the first bytes of every message of a step.

  Digests of its exchanges and of arguments that must be equal on all workers,
  and whether it changes the state that workers share.
  """
  exchanges, given = digest(text.encode()), digest(values)
  return exchanges[:8] + given[:7] + bytes([changes])


def changes_state(message: bytes) -> bool:
  """Returns whether a message is of a step that changes the shared state."""
  return message[CHAIN - 1 : CHAIN] == b'\1'


# Keys -------------------------------------------------------------------------


class Keys(NamedTuple):
  """The CURVE keys in a file, in Z85."""

  public: str
  secret: str
  # Public ones: the relay's, or those of all ranks, then that of followers.
  others: list[str]


def write_keys(folder: str, workers: int) -> list[pathlib.Path]:
  """Writes files of keys: the relay's, each worker's, and one for followers."""
  import zmq

  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  worker_names = [f'worker-{rank}' for rank in range(workers)]
  pairs = {}
  for name in ('relay', *worker_names, 'follower'):
    public, secret = zmq.curve_keypair()
    pairs[name] = public.decode(), secret.decode()
  relay, *others = [public for public, _ in pairs.values()]
  files = []
  for name, pair in pairs.items():
    keys = Keys(*pair, others if name == 'relay' else [relay])
    files.append(path / f'{name}.key')
    # Never readable by others, and never over keys that are in use.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(files[-1], flags, 0o600)
    with os.fdopen(descriptor, 'w') as file:
      json.dump(keys._asdict(), file)
  return files


def keys_for(address: str, path: str | None) -> Keys | None:
  """Reads a file of `write_keys`, which only a local address can be without."""
  if path is None:
    host, _, _ = address.removeprefix('tcp://').rpartition(':')
    host = host.strip('[]')
    if host in ('localhost', '::1') or host.startswith('127.'):
      return None
    raise ValueError(
      f'keys must be given for a relay at {address}, which other hosts reach.'
      ' Make a file for it and one for each worker with python -m'
      ' demo_optax.remote --workers N --write-keys FOLDER, or use'
      ' tcp://127.0.0.1:PORT.'
    )
  try:
    text = pathlib.Path(path).read_text()
    return Keys(**json.loads(text))
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(
      f'keys must be a file of keys, got {path} ({error}). Make one for the'
      ' relay and for each worker: python -m demo_optax.remote --workers N'
      ' --write-keys FOLDER.'
    ) from error
