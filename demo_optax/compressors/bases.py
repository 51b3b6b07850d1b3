"""Orthonormal transforms of a chunk: one matrix per length of a side."""

import dataclasses
import functools
from typing import Protocol

import numpy as np


class Basis(Protocol):
  """An orthonormal transform, applied along both sides of a chunk.

  Implement it as a frozen dataclass that inherits from this: bases are compared
  and hashed.
  """

  def matrix(self, length: int) -> np.ndarray:
    """Returns float64 `[length, length]` whose ROWS are the basis."""


@dataclasses.dataclass(frozen=True)
class Dct(Basis):
  """The orthonormal DCT-II, `[frequency, position]`."""

  def matrix(self, length: int) -> np.ndarray:
    return _dct(length)


@dataclasses.dataclass(frozen=True)
class Identity(Basis):
  """No transform: coefficients are elements."""

  def matrix(self, length: int) -> np.ndarray:
    return np.eye(length)


@functools.cache
def _dct(length: int) -> np.ndarray:
  position = np.arange(length)
  angle = np.pi * position[:, None] * (2 * position + 1) / (2 * length)
  matrix = np.sqrt(2 / length) * np.cos(angle)
  matrix[0] = np.sqrt(1 / length)
  return matrix
