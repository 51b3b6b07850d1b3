"""What a relay keeps in files: the last lists, and a state for who joins.

The files have no names: nobody can remove them, and none is left behind. A disk
that is full costs a relay the list or the state, and nothing else.
"""

import contextlib
import pickle
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from demo_optax.remote import frames
from demo_optax.remote.frames import Header


class Lists:
  """The lists of the last rounds, each with the chain before it.

  `open` is the round whose list is not there yet. `say(text, *values)` logs a
  list that cannot be kept: workers that miss it must join.
  """

  def __init__(self, say: Callable[..., None]):
    self.open = 0
    self._say = say
    # The chain before the open round, and before each whose list is kept.
    self._chains: dict[int, bytes] = {}
    self._files: dict[int, IO[bytes]] = {}

  def begin(self, number: int, chain: bytes) -> None:
    """Opens a round."""
    self.open = number
    self._chains[number] = chain

  def lead_from(self, at: Header) -> bool:
    """Returns whether lists lead from a position to the open round."""
    return self._chains.get(at.round) == at.chain

  def close(self, closed: Sequence[bytes]) -> None:
    """Keeps the list of the open round; opens the next one."""
    number, chain = self.open, self._chains[self.open]
    self.begin(number + 1, frames.digest(chain, *closed))
    try:
      self._files[number] = file = _new_file()
      pickle.dump(closed, file)
      file.flush()
    except OSError as error:
      self.drop(number)  # those before do not lead from there any more
      self._say('round %d is not kept: %s', number, error)

  def read(self, number: int) -> Sequence[bytes]:
    """Returns the list of a closed round."""
    file = self._files[number]
    file.seek(0)
    return pickle.load(file)

  def drop(self, last: int) -> None:
    """Drops the lists of old rounds, up to the round `last`."""
    for old in [number for number in self._chains if number <= last]:
      del self._chains[old]
      if old in self._files:
        _close(self._files.pop(old))


class State:
  """The shared state before a round, in parts, as one worker sends it."""

  def __init__(self, header: Header):
    self.header = header  # of the first part
    self.parts = 0  # that are there
    self.since = 0.0  # when the last one came
    self.complete = False
    self._file = _new_file()

  @property
  def next_header(self) -> Header:
    """The header of the part that is missing next."""
    return self.header._replace(number=self.parts)

  def append(self, part: bytes, now: float) -> None:
    """Keeps the next part, or raises an `OSError`."""
    self._file.write(part)
    self._file.flush()
    self.parts += 1
    self.since = now
    self.complete = len(part) < frames.PART

  def part(self, number: int) -> bytes:
    """Returns one of its parts."""
    self._file.seek(number * frames.PART)
    return self._file.read(frames.PART)

  def remove(self) -> None:
    """Frees the disk."""
    _close(self._file)


def _new_file() -> IO[bytes]:
  return tempfile.TemporaryFile()


def _close(file: IO[bytes]) -> None:
  with contextlib.suppress(OSError):  # what could not be written
    file.close()
