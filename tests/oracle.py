"""The algorithm over N workers in plain NumPy, in parameter space.

Written from the formulas, one chunk at a time, with nothing of the library:
transform matrices, chunk rule and selection are its own.
"""

import numpy as np


def dct_matrix(length):
  u, x = np.meshgrid(np.arange(length), np.arange(length), indexing='ij')
  matrix = np.cos(np.pi * (x + 0.5) * u / length) * np.sqrt(2.0 / length)
  matrix[0] /= np.sqrt(2.0)
  return matrix


def side(dim, limit, padding):
  """Length of the chunks along a dimension."""
  if dim <= limit:
    return dim
  divisors = [d for d in range(1, limit + 1) if dim % d == 0]
  if not padding:
    return divisors[-1]
  if divisors[-1] >= limit / 2:
    return divisors[-1]
  waste = {}
  for length in range(int(np.ceil(limit / 2)), limit + 1):
    waste[length] = int(np.ceil(dim / length)) * length - dim
  least = min(waste.values())
  return max(length for length, w in waste.items() if w == least)


def slices(shape, limit, padding):
  """The chunks of a matrix as pairs of slices, and their full size."""
  rows, cols = shape
  a, b = side(rows, limit, padding), side(cols, limit, padding)
  for i in range(0, rows, a):
    for j in range(0, cols, b):
      yield (slice(i, min(i + a, rows)), slice(j, min(j + b, cols))), (a, b)


def sends_everything(shape, size, limit, topk, padding, itemsize):
  """Whether the coded selection would cost as much as the leaf itself."""
  *batch, rows, cols = shape
  a, b = side(rows, limit, padding), side(cols, limit, padding)
  k = min(topk, a * b)
  chunks = int(np.prod(batch)) * int(np.ceil(rows / a)) * int(np.ceil(cols / b))
  bits = 0 if k == a * b else int(np.ceil(np.log2(a * b)))
  sparse = chunks * k * itemsize + int(np.ceil(chunks * k * bits / 8))
  return sparse >= size * itemsize


def compress(m, limit, topk, padding):
  """`(what was sent, which coefficients)` of a matrix, in parameter space.

  The second is a list over chunks of (coefficients sent, mask of sent).
  """
  chunks = []
  for where, (a, b) in slices(m.shape, limit, padding):
    block = np.zeros((a, b), m.dtype)
    part = m[where]
    block[: part.shape[0], : part.shape[1]] = part
    c = dct_matrix(a) @ block @ dct_matrix(b).T
    # Ties: lowest index first, the column frequency being the slow index.
    flat = c.T.reshape(-1)
    order = np.argsort(-np.abs(flat), kind='stable')[: min(topk, a * b)]
    mask = np.zeros(flat.shape, bool)
    mask[order] = True
    sent = np.where(mask, flat, 0)
    chunks.append((sent.reshape(b, a).T, mask.reshape(b, a).T))
  return chunks


def expand(blocks, shape, limit, padding):
  """The matrix whose chunks have these coefficients."""
  out = np.zeros(shape, blocks[0].dtype)
  for (where, (a, b)), c in zip(slices(shape, limit, padding), blocks):
    block = dct_matrix(a).T @ c @ dct_matrix(b)
    rows, cols = out[where].shape
    out[where] = block[:rows, :cols]
  return out


class Oracle:
  """N workers' momentum of one parameter."""

  def __init__(self, shape, workers, *, limit, topk, decay, padding=True,
               alpha=1.0, average='senders', gradient_weight=1.0,
               dtype=np.float64):
    matrix = (1,) * (2 - len(shape)) + tuple(shape) if len(shape) < 2 else shape
    self.shape, self.matrix = tuple(shape), tuple(matrix)
    self.limit, self.topk, self.padding = limit, topk, padding
    self.decay, self.alpha, self.average = decay, alpha, average
    self.gradient_weight = gradient_weight
    self.m = np.zeros((workers, *self.matrix), dtype)
    self.whole = sends_everything(
        self.matrix, int(np.prod(shape)), limit, topk, padding,
        np.dtype(dtype).itemsize)

  def exchange(self, gradients):
    """Takes `[N, *shape]` and returns the merged momentum `[*shape]`."""
    gradients = np.asarray(gradients).reshape(self.m.shape)
    present = [bool(np.isfinite(g).all()) for g in gradients]
    merged = np.zeros(self.matrix, self.m.dtype)
    for place in np.ndindex(*self.matrix[:-2]):
      merged[place] = self._matrix(place, gradients, present)
    return merged.reshape(self.shape)

  def _matrix(self, place, gradients, present):
    workers = [i for i, p in enumerate(present) if p]
    shape = self.matrix[-2:]
    sent = {}
    for i in workers:
      at = (i, *place)
      self.m[at] = (
          self.decay * self.m[at] + self.gradient_weight * gradients[at])
      if self.whole:
        sent[i] = [(self.m[at].copy(), np.ones(shape, bool))]
        own = self.m[at].copy()
      else:
        sent[i] = compress(self.m[at], self.limit, self.topk, self.padding)
        own = expand([c for c, _ in sent[i]], shape, self.limit, self.padding)
      self.m[at] = self.m[at] - self.alpha * own
    if not workers:
      return np.zeros(shape)
    merged = []
    for parts in zip(*sent.values()):
      total = sum(c for c, _ in parts)
      counts = sum(mask.astype(int) for _, mask in parts)
      if self.average == 'workers':
        counts = np.full(counts.shape, len(workers))
      merged.append(total / np.maximum(counts, 1))
    if self.whole:
      return merged[0]
    return expand(merged, shape, self.limit, self.padding)
