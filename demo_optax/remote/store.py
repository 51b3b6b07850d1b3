"""What a relay keeps in files: the last lists, and a state for who joins.

A disk that is full, or files that somebody has removed, cost a relay the list
or the state, and nothing else.
"""

import contextlib
import pathlib
import pickle
from collections.abc import Callable, Sequence

from demo_optax.remote import frames
from demo_optax.remote.frames import Header


class Lists:
  """The lists of the last rounds, each with the chain before it.

  `open` is the round whose list is not there yet. `say(text, *values)` logs a
  list that cannot be kept: workers that miss it must join.
  """

  def __init__(self, folder: pathlib.Path, say: Callable[..., None]):
    self._folder, self._say = folder, say
    self.open = 0
    # The chain before the open round, and before each whose list is kept.
    self._chains: dict[int, bytes] = {}

  def begin(self, number: int, chain: bytes) -> None:
    """Forgets all lists, and begins with a round that is open."""
    self.drop(self.open)
    self.open = number
    self._chains[number] = chain

  def lead_from(self, at: Header) -> bool:
    """Returns whether lists lead from a position to the open round."""
    return self._chains.get(at.round) == at.chain

  def close(self, messages: Sequence[bytes]) -> None:
    """Keeps the list of the open round; the next one is open."""
    number, chain = self.open, self._chains[self.open]
    self.open += 1
    self._chains[self.open] = frames.digest(chain, *messages)
    self.add(number, chain, messages)

  def add(self, number: int, chain: bytes, messages: Sequence[bytes]) -> None:
    """Keeps the list of a closed round."""
    self._chains[number] = chain
    try:
      with self._path(number).open('wb') as file:
        pickle.dump(messages, file)
    except OSError as error:
      self._remove(number)
      self._say('round %d is not kept: %s', number, error)

  def read(self, number: int) -> Sequence[bytes] | None:
    """Returns the list of a closed round, or None if its file is lost."""
    try:
      return pickle.loads(self._path(number).read_bytes())
    except OSError:
      self._remove(number)
      return None

  def drop(self, last: int) -> None:
    """Drops the lists of old rounds, up to the round `last`."""
    for old in [number for number in self._chains if number <= last]:
      self._remove(old)

  def _path(self, number: int) -> pathlib.Path:
    return self._folder / f'{number}'

  def _remove(self, number: int) -> None:
    del self._chains[number]
    _unlink(self._path(number))


class State:
  """The shared state before a round, in parts, as one worker sends it."""

  def __init__(self, folder: pathlib.Path, header: Header, now: float):
    self.header = header  # of the first part
    self.parts = 0  # that are there
    self.since = now  # when the last one came
    self.complete = False
    self._path = folder / 'state'

  @property
  def next_header(self) -> Header:
    """The header of the part that is missing next."""
    return self.header._replace(number=self.parts)

  def append(self, part: bytes, now: float) -> None:
    """Keeps the next part, or raises an `OSError`."""
    with self._path.open('ab' if self.parts else 'wb') as file:
      file.write(part)
    self.parts, self.since = self.parts + 1, now
    self.complete = len(part) < frames.PART

  def part(self, number: int) -> bytes:
    """Returns one of its parts, or raises an `OSError`."""
    with self._path.open('rb') as file:
      file.seek(number * frames.PART)
      return file.read(frames.PART)

  def remove(self) -> None:
    """Frees the disk."""
    _unlink(self._path)


def _unlink(path: pathlib.Path) -> None:
  with contextlib.suppress(OSError):
    path.unlink()
