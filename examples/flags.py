"""Flags of a command line: a mistake is one line, and exit status 2."""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn


def make_parser(words: str | None) -> argparse.ArgumentParser:
  """Returns a parser whose help is `words` and a list of the flags."""
  return argparse.ArgumentParser(
    description=words,
    usage=argparse.SUPPRESS,  # an error is one line
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )


def refuse(words: str) -> NoReturn:
  """Ends the program, as a parser does: for what it cannot know."""
  print(f'{pathlib.Path(sys.argv[0]).name}: error: {words}', file=sys.stderr)
  sys.exit(2)


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
  """Returns what reads a whole number within bounds."""

  def read(text: str) -> int:
    is_number = text.removeprefix('-').isdecimal()
    if not is_number or not least <= int(text) <= most:
      raise argparse.ArgumentTypeError(
        f'must be a whole number from {least} to {most}, got {text[:40]!r}.'
      )
    return int(text)

  return read


def positive(text: str) -> float:
  """Reads a number above 0."""
  try:
    number = float(text)
  except ValueError:
    number = 0.0
  if not 0 < number < float('inf'):
    raise argparse.ArgumentTypeError(
      f'must be a number above 0, got {text[:40]!r}.'
    )
  return number


def existing(text: str) -> str:
  """Reads the path of what exists."""
  if not pathlib.Path(text).exists():
    raise argparse.ArgumentTypeError(
      f'must be a file or a folder that exists, got {text!r}.'
    )
  return text
