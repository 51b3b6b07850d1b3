"""Checks of arguments."""

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


def check_share(name: str, value: float) -> None:
  """Raises unless a share is a number in (0, 1]."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f'{name}={value!r} must be a Python number.')
  if not 0 < value <= 1:
    raise ValueError(f'{name}={value} is not in (0, 1].')


def check_is_scalar(name: str, value: Any) -> None:
  """Raises for an array with more than one number."""
  shape = getattr(value, 'shape', ())
  if shape != ():
    raise ValueError(f'{name} has shape {shape}: it must be one number.')


def check_range(
    name: str,
    value: chex.Numeric,
    low: float,
    high: float,
    *,
    open_end: bool = False,
) -> None:
  """Checks a concrete number; a traced one cannot be checked."""
  dtype = getattr(value, 'dtype', None)
  if dtype in (jnp.bfloat16, jnp.float16):
    raise ValueError(
        f'{name} is {dtype}, too coarse for numbers near 1.'
        ' optax.inject_hyperparams'
        " casts numbers to the parameters' dtype: give it"
        ' hyperparam_dtype=jnp.float32.'
    )
  check_is_scalar(name, value)
  if isinstance(value, jax.core.Tracer):
    return
  if not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
    remedy = ''
    if callable(value):
      remedy = ' For a schedule use optax.inject_hyperparams.'
    raise TypeError(f'{name}={value!r} must be a number.{remedy}')
  number = float(value)
  if not (low <= number < high or (number == high and not open_end)):
    bracket = ')' if open_end or high == float('inf') else ']'
    raise ValueError(
        f'{name}={number} is not in [{low:g}, {high:g}{bracket}.'
    )
