"""Checks of arguments."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np


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


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
  """Raises unless an argument is one of the names that are known."""
  if value not in known:
    raise ValueError(
      f'{name}={value!r} is not known; choose one of {", ".join(known)}.'
    )


def check_is_scalar(name: str, value: Any) -> None:
  """Raises for an array with more than one number."""
  if shape := getattr(value, 'shape', ()):
    raise ValueError(f'{name} has shape {shape}: it must be one number.')


def check_range(name: str, value: chex.Numeric, interval: str) -> None:
  """Raises unless a number, if known, is in an interval such as `'[0, 1)'`."""
  dtype = getattr(value, 'dtype', None)
  if dtype in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f'{name} is {dtype}, too coarse for numbers near 1.'
      " optax.inject_hyperparams casts numbers to the parameters' dtype: give"
      ' it hyperparam_dtype=jnp.float32.'
    )
  check_is_scalar(name, value)
  if isinstance(value, jax.core.Tracer):
    return
  if not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
    remedy = ''
    if callable(value):
      remedy = ' For a schedule use optax.inject_hyperparams.'
    raise TypeError(f'{name}={value!r} must be a number.{remedy}')
  low, high = map(float, interval[1:-1].split(', '))
  number = float(value)
  above = number >= low if interval[0] == '[' else number > low
  below = number <= high if interval[-1] == ']' else number < high
  if not (above and below):
    raise ValueError(f'{name}={number} is not in {interval}.')
