"""Checks of arguments."""

from typing import Any


def check_type(name: str, value: Any, expected: type, example: str) -> None:
  """Raises a `TypeError` unless `value` is an `expected`."""
  if not isinstance(value, expected):
    raise TypeError(
        f'{name}={value!r} must be a {expected.__name__}, such as {example}.'
    )


def check_positive(name: str, value: int, least: int = 1) -> None:
  """Raises unless an argument is an integer of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f'{name}={value!r} must be a Python integer.')
  if value < least:
    raise ValueError(f'{name}={value} must be at least {least}.')


def check_share(name: str, value: float) -> None:
  """Raises unless a share is a number in (0, 1]."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f'{name}={value!r} must be a Python number.')
  if not 0 < value <= 1:
    raise ValueError(f'{name}={value} is not in (0, 1].')
