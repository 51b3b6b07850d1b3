"""Checks of arguments."""

from typing import Any


def check_type(name: str, value: Any, expected: type, example: str) -> None:
  """Raises a `TypeError` unless `value` is an `expected`."""
  if not isinstance(value, expected):
    raise TypeError(
        f'{name}={value!r} must be a {expected.__name__}, such as {example}.'
    )
