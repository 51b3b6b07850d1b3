"""Orthonormal transforms: one matrix for each side length."""

import dataclasses
import math

import numpy as np


class Basis:
  """An orthonormal transform, applied along both chunk sides.

  Implement it as a frozen dataclass that inherits from this: bases are compared
  and hashed.
  """

  def matrix(self, length: int) -> np.ndarray:
    """Returns float64 `[length, length]` whose ROWS are the basis."""
    raise NotImplementedError

  def check(self, length: int) -> None:
    """Raises a `ValueError` for a length without such a matrix."""
    del length


@dataclasses.dataclass(frozen=True)
class Dct(Basis):
  """The orthonormal DCT-II, `[frequency, position]`."""

  def matrix(self, length: int) -> np.ndarray:
    position = np.arange(length)
    frequency = position[:, None]
    middle = 2 * position + 1  # of a position, in halves
    angle = np.pi * frequency * middle / (2 * length)
    matrix = np.sqrt(2 / length) * np.cos(angle)
    matrix[0] = np.sqrt(1 / length)
    return matrix


@dataclasses.dataclass(frozen=True)
class Hadamard(Basis):
  """Sylvester's Hadamard matrix, scaled to be orthonormal.

  Chunk sides must be powers of two.
  """

  def matrix(self, length: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < length:
      matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(length)

  def check(self, length: int) -> None:
    if length & (length - 1):
      raise ValueError(
        f'sides of chunks must be powers of two for Hadamard, got {length}. Use'
        ' Dct() for leaves with other sides, in a tree of compressors.'
      )


@dataclasses.dataclass(frozen=True)
class RandomOrthogonal(Basis):
  """A random rotation or reflection, drawn once for every length.

  The DeMo paper, version 2 (arXiv:2411.19870v2), draws a new matrix in every
  step; momentum could then not be kept as coefficients.

  Attributes:
    seed: 0 or more; the same on all workers.
  """

  seed: int = 0

  def matrix(self, length: int) -> np.ndarray:
    # Gram-Schmidt with exactly rounded sums, not a library's factorisation: all
    # machines must have the same bits.
    generator = np.random.default_rng([self.seed, length])
    matrix = generator.normal(size=(length, length))
    for number, row in enumerate(matrix):
      for _ in range(2):  # the second pass removes rounding errors
        for other in matrix[:number]:
          along = math.fsum(row * other)
          row -= along * other
      energy = math.fsum(row**2)
      row /= math.sqrt(energy)
    return matrix


@dataclasses.dataclass(frozen=True)
class Identity(Basis):
  """No transform: coefficients are elements."""

  def matrix(self, length: int) -> np.ndarray:
    return np.eye(length)
