"""Compressors that take the same places on all workers, in plain NumPy.

In parameter space, with nothing of the library: which places of a chunk are
taken comes in as a function of its size and the step.
"""

import math

import jax
import numpy as np
from oracle import slices


def random_places(seed):
  """As documented: the first of a permutation that seed and step fix."""
  def places(n, k, step):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return np.asarray(jax.random.permutation(key, n))[:k]
  return places


def striding_places(n, k, step):
  return [(step + j * (n // k)) % n for j in range(k)]


def slicing_places(n, k, step):
  return [(step * k + j) % n for j in range(k)]


class SubsetOracle:
  """N workers' momentum of one parameter."""

  def __init__(self, shape, workers, *, limit, rate, places, decay, alpha=1.0):
    self.shape = tuple(shape)
    self.matrix = (1,) * (2 - len(shape)) + self.shape
    self.limit, self.rate, self.places = limit, rate, places
    self.decay, self.alpha, self.step = decay, alpha, 0
    self.m = np.zeros((workers, *self.matrix))

  def mask(self):
    """Which elements are taken at this step."""
    taken = np.zeros(self.matrix, bool)
    if self.rate == 1:
      return ~taken
    for outer in np.ndindex(*self.matrix[:-2]):
      for where, (a, b) in slices(self.matrix[-2:], self.limit, True):
        n = a * b
        flat = np.zeros(n, bool)
        flat[self.places(n, math.ceil(self.rate * n), self.step)] = True
        block = flat.reshape(b, a).T  # the column is the slow index
        part = taken[outer][where]
        part[...] = block[: part.shape[0], : part.shape[1]]
    return taken

  def exchange(self, gradients):
    """Takes `[N, *shape]` and returns the merged momentum `[*shape]`."""
    gradients = np.asarray(gradients).reshape(self.m.shape)
    present = [i for i, g in enumerate(gradients) if np.isfinite(g).all()]
    mask = self.mask()
    total = np.zeros(self.matrix)
    for i in present:
      self.m[i] = self.decay * self.m[i] + gradients[i]
      sent = np.where(mask, self.m[i], 0)
      self.m[i] -= self.alpha * sent
      total += sent
    self.step += 1
    return (total / max(len(present), 1)).reshape(self.shape)
