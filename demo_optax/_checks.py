"""Checks arguments, and shows values in messages.

A message has the form `<argument> must be <condition>, got <value>. <Remedy>.`
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

_MOST_CHARACTERS = 200


def short(value: object) -> str:
  """Returns a value as one line for a message, cut to 200 characters."""
  text = ' '.join(repr(value).split())
  if len(text) <= _MOST_CHARACTERS:
    return text
  return text[: _MOST_CHARACTERS - 4] + ' ...'


def check_type(
  name: str,
  value: object,
  expected: type,
  example: str,
) -> None:
  """Raises a `TypeError` unless `value` is an `expected`."""
  if not isinstance(value, expected):
    raise TypeError(
      f'{name} must be a {expected.__name__}, got {short(value)}. Give one,'
      f' such as {example}.'
    )


def check_positive(
  name: str,
  value: int,
  least: int = 1,
) -> None:
  """Raises unless an argument is an integer of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(
      f'{name} must be an integer, got {short(value)}. Give a Python int.'
    )
  if value < least:
    raise ValueError(
      f'{name} must be at least {least}, got {value}. Give a larger integer.'
    )


def check_choice(
  name: str,
  value: str,
  known: Sequence[str],
) -> None:
  """Raises unless an argument is one of the names that are known."""
  if value not in known:
    names = ', '.join(map(repr, known))
    raise ValueError(
      f'{name} must be a known name, got {short(value)}. Choose one of {names}.'
    )


def check_is_scalar(name: str, value: object) -> None:
  """Raises for an array with more than one number."""
  if shape := getattr(value, 'shape', ()):
    raise ValueError(
      f'{name} must be one number, got an array of shape {shape}. Give a'
      ' scalar, such as x[0].'
    )


def check_range(
  name: str,
  value: chex.Numeric,
  interval: str,
) -> None:
  """Raises unless a number, if known, is in an interval such as `'[0, 1)'`."""
  dtype = getattr(value, 'dtype', None)
  # A decay such as 0.999 would become 1.
  if dtype in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f'{name} must be precise near 1, got {dtype}. optax.inject_hyperparams'
      " casts numbers to the parameters' dtype: give it"
      ' hyperparam_dtype=jnp.float32.'
    )
  check_is_scalar(name, value)
  # A traced number is unknown; steps exclude workers if it makes no sense.
  if isinstance(value, jax.core.Tracer):
    return
  if not isinstance(value, int | float | np.number | np.ndarray | jax.Array):
    raise TypeError(
      f'{name} must be a number, got {short(value)}. Give a float, or for a'
      ' schedule use optax.inject_hyperparams.'
    )
  # An interval such as `[0, 1)`.
  low, high = map(float, interval[1:-1].split(', '))
  number = float(value)
  is_closed_below, is_closed_above = interval[0] == '[', interval[-1] == ']'
  above = number > low or (is_closed_below and number == low)
  below = number < high or (is_closed_above and number == high)
  if not (above and below):
    raise ValueError(
      f'{name} must be in {interval}, got {number}. Give another number.'
    )
