"""Flags that are checked before anything is built.

A mistake is one line on stderr, which says what to write, and exit status 2.
"""

import argparse
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
  """Tells of a mistake in one line; argparse prints its usage as well."""

  def __init__(self, **options: Any):
    super().__init__(allow_abbrev=False, **options)

  def error(self, message: str) -> NoReturn:
    fail(message)


def fail(message: object) -> NoReturn:
  """Ends the program, whose flags are not as they must be."""
  line = ' '.join(str(message).split())
  print(f'{pathlib.Path(sys.argv[0]).name}: {line}', file=sys.stderr)
  raise SystemExit(2)


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
  """An integer of at least `least`."""

  def parse(text: str) -> int:
    try:
      number = int(text)
    except ValueError:
      number = least - 1
    if not least <= number <= most:
      end = '' if most == 2**31 - 1 else f', at most {most}'
      raise argparse.ArgumentTypeError(
          f'{text[:50]!r} must be an integer, at least {least}{end}'
      )
    return number

  return parse


def real(
    words: str, is_right: Callable[[float], bool]
) -> Callable[[str], float]:
  """A finite number, as `words` say."""

  def parse(text: str) -> float:
    try:
      number = float(text)
    except ValueError:
      number = math.nan
    if not (math.isfinite(number) and is_right(number)):
      raise argparse.ArgumentTypeError(f'{text[:50]!r} must be {words}')
    return number

  return parse


positive = real('a number above 0', lambda x: x > 0)
not_negative = real('a number, 0 or above', lambda x: x >= 0)
share = real('a number above 0, at most 1', lambda x: 0 < x <= 1)
up_to_one = real('a number from 0 to 1', lambda x: 0 <= x <= 1)
below_one = real('a number from 0 to below 1', lambda x: 0 <= x < 1)


def not_empty(text: str) -> str:
  if not text:
    raise argparse.ArgumentTypeError("'' must be a file or a folder")
  return text


def folder(text: str) -> str:
  """A folder of this machine that is there, or can be made."""
  if not text or '://' in text:
    raise argparse.ArgumentTypeError(
        f'{text!r} must be a folder of this machine'
    )
  try:
    path = pathlib.Path(text).expanduser().absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
  except (OSError, RuntimeError, ValueError) as error:
    raise argparse.ArgumentTypeError(f'{text[:50]!r}: {error}') from error
  if not there.is_dir():
    raise argparse.ArgumentTypeError(
        f'{text!r} must be a folder, and {there} is a file'
    )
  try:  # permissions do not tell: root may write to /proc, and cannot
    with tempfile.TemporaryDirectory(prefix='.', dir=there) as name:
      trial = pathlib.Path(name)
      (trial / path.relative_to(there)).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise argparse.ArgumentTypeError(
        f'{text!r} must be a folder that can be written to, and nothing can be'
        f' made in {there}: {error.strerror}'
    ) from error
  return str(pathlib.Path(text).expanduser())


def try_to(action: Callable[[], Any], what: str = '') -> Any:
  """What `action` returns; its error is a mistake in the flags."""
  try:
    return action()
  except (OSError, ValueError, TypeError) as error:
    fail(f'{what}{error}')


def divisors(number: int) -> str:
  """The first divisors of a number, to choose from."""
  found = [i for i in range(1, min(number, 64) + 1) if number % i == 0]
  *first, last = map(str, found[:8])
  return f'{", ".join(first)} or {last}' if first else last


def check_batch(
    batch: int, workers: int, microbatches: int = 1, devices: int = 1
) -> None:
  """Fails unless the batch can be cut into equal parts for all."""
  if batch % (workers * devices):
    each = f' of {devices} devices' if devices > 1 else ''
    fail(
        f'--batch {batch} cannot be cut into {workers * devices} equal parts,'
        f' for {workers} worker(s){each}: give a multiple of'
        f' {workers * devices}.'
    )
  if batch // workers % microbatches:
    fail(
        f'--microbatches {microbatches} does not divide the {batch // workers}'
        f' of --batch {batch} that each of {workers} worker(s) has: give'
        f' {divisors(batch // workers)}.'
    )
