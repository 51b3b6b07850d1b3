"""What a relay keeps in files: the last lists, and a state for who joins.

A disk that is full, or files that somebody has removed, cost a relay the list
or the state, and nothing else.
"""

import contextlib
import pathlib
import pickle
from collections.abc import Sequence
from typing import NamedTuple

from demo_optax.remote import frames
from demo_optax.remote.frames import Header


class Closed(NamedTuple):
  """The list of a round that is closed."""

  messages: Sequence[bytes]  # of all ranks, b'' of absent workers
  wants_state: bool = False  # whether a worker shall send its state


class Lists:
  """The lists of the last rounds, each with the chain before it."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    # The chain before the open round, and before each whose list is kept.
    self._chains: dict[int, bytes] = {}

  def clear(self) -> None:
    """Forgets all lists."""
    for number in list(self._chains):
      self._remove(number)

  def begin(self, number: int, chain: bytes) -> None:
    """Begins with a round that is open."""
    self.clear()
    self._chains[number] = chain

  def lead_from(self, at: Header) -> bool:
    """Returns whether lists lead from a position to the open round."""
    return self._chains.get(at.round) == at.chain

  def close(self, number: int, closed: Closed) -> None:
    """Keeps the list of the open round; the next one is open.

    If the list cannot be kept, workers that miss it must join: an `OSError`.
    """
    chain = frames.digest(self._chains[number], *closed.messages)
    self._chains[number + 1] = chain
    self._write(number, closed)

  def add(self, at: Header, messages: Sequence[bytes]) -> None:
    """Keeps the list after a position, which leads to the open round."""
    self._chains[at.round] = at.chain
    self._write(at.round, Closed(messages))

  def read(self, number: int) -> Closed | None:
    """Returns the list of a closed round, or None if its file is lost."""
    try:
      return Closed(*pickle.loads((self._folder / f'{number}').read_bytes()))
    except OSError:
      self._remove(number)
      return None

  def drop(self, last: int) -> None:
    """Drops the lists of old rounds, up to the round `last`."""
    for old in [number for number in self._chains if number <= last]:
      self._remove(old)

  def _write(self, number: int, closed: Closed) -> None:
    try:
      with (self._folder / f'{number}').open('wb') as file:
        pickle.dump(tuple(closed), file)
    except OSError:
      self._remove(number)
      raise

  def _remove(self, number: int) -> None:
    del self._chains[number]
    with contextlib.suppress(OSError):
      (self._folder / f'{number}').unlink()


class State:
  """The shared state before a round, in parts, as one worker sends it."""

  def __init__(self, folder: pathlib.Path, header: Header, now: float):
    self.header = header  # of the first part
    self.parts = 0  # that are there
    self.since = now  # when the last one came
    self.complete = False
    self._path = folder / 'state'

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
    with contextlib.suppress(OSError):
      self._path.unlink()
