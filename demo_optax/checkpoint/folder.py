"""The folder of a run's checkpoints: where it is, and what is left in it.

A save must not find out late, or in one process alone, that it cannot write:
Orbax's threads wait for directories that nobody makes, and the other processes
for the one that failed. So folders are made and tried by every process, and all
learn what came of it (`together`).
"""

import contextlib
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

try:
  import fcntl
except ImportError:  # Windows: nothing is known of other writers
  fcntl = None  # type: ignore[assignment]

_BACK_ENDS = {'gs': 'gcsfs', 's3': 's3fs'}
_URI = re.compile(r'([A-Za-z][A-Za-z0-9+.-]+):(//?)')
_UNFINISHED = re.compile(r'[0-9]+\.orbax-checkpoint-tmp.*')


def resolve(folder: Any) -> epath.Path:
  """Returns an absolute path, or an address in a cloud, whose back end is here.

  Raises:
    ValueError: '', an address in no known cloud, or of an unknown user.
    TypeError: neither text nor a path.
    ImportError: the back end of a cloud is not installed.
  """
  text = os.fspath(folder)
  if not isinstance(text, str):
    raise TypeError(f'folder={folder!r} must be text or a path.')
  if not text:
    raise ValueError("folder='' names no folder; '.' is the working directory.")
  uri = _URI.match(text)
  if uri is None or (uri[2] == '/' and uri[1] not in _BACK_ENDS):
    return epath.Path(_local(text))
  known = ' or '.join(f'{scheme}://' for scheme in _BACK_ENDS)
  if uri[1] not in _BACK_ENDS:
    raise ValueError(
        f'folder={text!r}: only {known} can be written to over a network; give'
        ' a folder of this machine as a plain path.'
    )
  if uri[2] == '/':
    raise ValueError(
        f'folder={text!r}: one slash is missing. pathlib.Path removes it: give'
        f' {uri[1]}://... as text or as etils.epath.Path.'
    )
  path = epath.Path(text)
  try:
    path.exists()
  except ImportError as error:
    raise ImportError(
        f'{text} cannot be reached ({error}): pip install'
        f' {_BACK_ENDS[uri[1]]}.'
    ) from error
  return path


def _local(text: str) -> pathlib.Path:
  try:
    return pathlib.Path(text).expanduser().absolute()
  except RuntimeError as error:
    raise ValueError(
        f'folder={text!r}: {error} If it is the name of a folder, write'
        f" {'./' + text!r}."
    ) from error


def together(action: Callable[[], None], what: str) -> None:
  """Calls `action` in every process; raises in all if it fails in any.

  Args:
    action: what is done; it must not communicate.
    what: follows 'process 1' where only other processes failed.
  """
  error = None
  try:
    action()
  except Exception as caught:
    error = caught
  failed = np.array([error is not None])
  if jax.process_count() > 1:
    failed = np.asarray(multihost_utils.process_allgather(failed)).ravel()
  if error is not None:
    raise error
  if failed.any():
    which = ', '.join(map(str, np.flatnonzero(failed)))
    raise OSError(f'process {which} {what}; its own output says why.')


def make(folder: epath.Path) -> None:
  """Makes the folder, if it is not there."""
  together(
      lambda: folder.mkdir(parents=True, exist_ok=True),
      f'cannot make the folder {folder}',
  )


def check_writable(folder: epath.Path) -> None:
  """Raises in every process if one of them cannot write to the folder."""

  def write() -> None:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f'.writable-{jax.process_index()}-{uuid.uuid4().hex}'
    try:
      probe.write_text('demo_optax')
    finally:
      probe.unlink(missing_ok=True)

  together(write, f'cannot write to {folder}: nothing was saved')


# What is left in it -----------------------------------------------------------


def lock(folder: epath.Path, exclusive: bool) -> int | None:
  """Locks a local folder; None if it is locked, or cannot be.

  Who writes holds a shared lock, who cleans up an exclusive one. The lock ends
  with `os.close`, and with the process however it ends.
  """
  if fcntl is None or _is_remote(folder):
    return None
  how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
  handle = None
  try:
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, how | fcntl.LOCK_NB)
  except OSError:  # it is held, or network file systems that have none
    if handle is not None:
      os.close(handle)
    return None
  return handle


def remove_unfinished(folder: epath.Path, unchanged_for: float) -> None:
  """Removes saves that were broken off, if nobody is writing to the folder.

  Args:
    folder: where they are.
    unchanged_for: seconds in which nothing in them may have changed. Not every
      file system tells of locks that other machines hold.
  """
  handle = lock(folder, exclusive=True)
  if handle is None:
    return
  try:
    for path in _unfinished(folder):
      if time.time() - _last_change(path) >= unchanged_for:
        shutil.rmtree(path, ignore_errors=True)
  finally:
    os.close(handle)


def remove_unfinished_step(folder: epath.Path, step: int) -> None:
  """Removes what a save of this process has left.

  Threads of the save may still be writing, so that a folder is not empty when
  it is to be removed, or is there again: tries until nothing appears any more,
  for at most two seconds.
  """
  if _is_remote(folder):
    return
  for _ in range(40):
    left = [p for p in _unfinished(folder) if p.name.startswith(f'{step}.')]
    for path in left:
      shutil.rmtree(path, ignore_errors=True)
    if not left:
      return
    time.sleep(0.05)


def is_empty(folder: epath.Path) -> bool:
  """Returns whether it is a local folder with nothing in it."""
  with contextlib.suppress(OSError):
    return not _is_remote(folder) and not os.listdir(folder)
  return False


def _unfinished(folder: epath.Path) -> Iterator[pathlib.Path]:
  with contextlib.suppress(OSError):
    for path in pathlib.Path(folder).iterdir():
      if _UNFINISHED.fullmatch(path.name):
        yield path


def _last_change(path: pathlib.Path) -> float:
  times = []
  for p in (path, *path.rglob('*')):
    with contextlib.suppress(OSError):
      times.append(p.stat().st_mtime)
  return max(times, default=0.0)


def _is_remote(folder: epath.Path) -> bool:
  return '://' in os.fspath(folder)
