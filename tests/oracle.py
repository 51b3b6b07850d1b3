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
  if not padding:
    return [d for d in range(1, limit + 1) if dim % d == 0][-1]
  fewest = min(int(np.ceil(dim / length)) for length in range(1, limit + 1))
  waste = {length: fewest * length - dim for length in range(1, limit + 1)}
  return min((w, length) for length, w in waste.items() if w >= 0)[1]


def fold(shape, *rule):
  """The shape `[*batch, rows, cols]` that a leaf is cut in.

  The cheapest of all folds, unless that of the last two dimensions is as cheap;
  of equals, to 5 %, the one with the longest batch, then the squarest, then the
  one with the fewest dimensions in the rows.
  """
  if len(shape) <= 2:
    return (1,) * (2 - len(shape)) + shape
  found = []
  for rows in range(1, len(shape)):
    for cols in range(1, len(shape) - rows + 1):
      batch = len(shape) - rows - cols
      r = int(np.prod(shape[batch : batch + rows]))
      c = int(np.prod(shape[batch + rows :]))
      folded = (*shape[:batch], r, c)
      ratio = r / c if r > c else c / r
      found.append(
        (cheapest(folded, *rule)[0], -batch, ratio, batch + rows, folded)
      )
  least = 1.05 * min(cost for cost, *_ in found)
  found = [rest for cost, *rest in found if cost <= least]
  kept = [folded for *_, folded in found if folded == shape]
  return kept[0] if kept else min(found)[-1]


def slices(shape, limit, padding):
  """The chunks of a matrix as pairs of slices, and their full size."""
  rows, cols = shape
  limits = (limit, limit) if isinstance(limit, int) else limit
  a, b = side(rows, limits[0], padding), side(cols, limits[1], padding)
  for i in range(0, rows, a):
    for j in range(0, cols, b):
      yield (slice(i, min(i + a, rows)), slice(j, min(j + b, cols))), (a, b)


def index_bits(n, k):
  """Bits per chunk of the indices: the cheapest of three codes."""
  if k == n:
    return 0
  elias_fano = [
    k * low + k + int(np.ceil(n / 2**low)) - 1
    for low in range(int(np.ceil(np.log2(n))))
  ]
  return min(k * int(np.ceil(np.log2(n))), n, *elias_fano)


VALUE_BITS = {'int8': 8, 'int4': 4, 'sign': 1}


def sent_bytes(chunks, n, k, values, itemsize):
  """Bytes of `k` of `n` coefficients of each of so many chunks."""
  bits = VALUE_BITS.get(values, 8 * itemsize)
  scales = 2 * chunks if values in LEVELS else 0
  return (
    int(np.ceil(chunks * k * bits / 8))
    + scales
    + int(np.ceil(chunks * index_bits(n, k) / 8))
  )


def cheapest(shape, limit, topk, padding, values, itemsize, of=None):
  """`(bytes, whole, topk)` of a leaf `[*batch, rows, cols]`.

  Whether it is one chunk, and how many are sent of each: `topk` of every chunk,
  or of one of `of` coefficients and in proportion.
  """
  *batch, rows, cols = shape
  limits = (limit, limit) if isinstance(limit, int) else limit
  a, b = side(rows, limits[0], padding), side(cols, limits[1], padding)
  n, size = a * b, int(np.prod(shape))
  chunks = int(np.prod(batch)) * int(np.ceil(rows / a)) * int(np.ceil(cols / b))
  whole = values not in LEVELS or chunks == 1
  dense = (1, size, size) if whole else (chunks, n, n)
  k = min(topk if of is None else int(np.ceil(topk * n / of)), n)
  some = sent_bytes(chunks, n, k, values, itemsize)
  everything = sent_bytes(*dense, values, itemsize)
  return (some, False, k) if some < everything else (everything, whole, n)


LEVELS = {'int8': 127, 'int4': 7, 'sign': 1}
TINY = np.finfo(np.float32).tiny


def to_bfloat16(x):
  """float32 rounded to 8 significant bits, ties to even."""
  bits = int(np.float32(x).view(np.uint32))
  half, odd = 0x7FFF, bits >> 16 & 1
  return np.uint32((bits + half + odd) & 0xFFFF0000).view(np.float32)


def read_as(v, values):
  """What is read where the values `v` of one chunk were sent."""
  if values == 'float32':
    return v
  limit, v = LEVELS[values], np.where(np.abs(v) < TINY, 0, v)
  if values == 'sign':
    scale = mean_in_pairs(np.abs(v))
  else:
    scale = np.float32(np.abs(v).max()) * np.float32(1 / limit)
  if not scale >= TINY:
    return np.zeros_like(v)
  scale = to_bfloat16(scale)
  if values == 'sign':
    return (np.where(v >= 0, 1, -1) * scale).astype(v.dtype)
  inverse = np.float32(1) / scale
  levels = np.clip(np.round(v * inverse.astype(v.dtype)), -limit, limit)
  return levels * scale.astype(v.dtype)


def mean_in_pairs(x):
  """The mean in float32: first half plus second half, until one is left."""
  width = 1
  while width < len(x):
    width *= 2
  total = np.zeros(width, np.float32)
  total[: len(x)] = x
  while len(total) > 1:
    total = total[: len(total) // 2] + total[len(total) // 2 :]
  return total[0] * np.float32(1 / len(x))


def compress(m, limit, select, padding, values, basis=dct_matrix):
  """What is sent of a matrix of whole chunks.

  A list over chunks of (coefficients sent, mask of sent).
  """
  chunks = []
  for where, (a, b) in slices(m.shape, limit, padding):
    c = basis(a) @ m[where] @ basis(b).T
    # The column frequency is the slow index; elements are in their order.
    flat = (c if basis is np.eye else c.T).reshape(-1)
    chosen = np.sort(select(flat))  # those beyond the chunk are zeros
    size = max(len(flat), chosen[-1] + 1)
    mask = np.zeros(size, bool)
    mask[chosen] = True
    sent = np.pad(flat, (0, size - len(flat)))
    sent[mask] = read_as(sent[mask], values)
    sent = np.where(mask, sent, 0)[: len(flat)]
    mask = mask[: len(flat)]
    if basis is np.eye:
      chunks.append((sent.reshape(a, b), mask.reshape(a, b)))
    else:
      chunks.append((sent.reshape(b, a).T, mask.reshape(b, a).T))
  return chunks


def expand(blocks, shape, limit, padding, basis=dct_matrix):
  """The matrix whose chunks have these coefficients."""
  out = np.zeros(shape, blocks[0].dtype)
  for (where, (a, b)), c in zip(slices(shape, limit, padding), blocks):
    block = basis(a).T @ c @ basis(b)
    rows, cols = out[where].shape
    out[where] = block[:rows, :cols]
  return out


class Oracle:
  """N workers' momentum of one parameter.

  `places(n, step)` are those that all workers send of n; else the `topk` of
  largest magnitude, the lowest index first of equal ones.
  """

  def __init__(
    self,
    shape,
    workers,
    *,
    limit,
    decay,
    topk=1,
    padding=True,
    alpha=1.0,
    average='senders',
    gradient_weight=1.0,
    values='float32',
    dtype=np.float64,
    basis=dct_matrix,
    of=None,
    places=None,
    error_feedback=True,
  ):
    self.shape = tuple(shape)
    rule = limit, topk, padding, values, np.dtype(dtype).itemsize
    self.matrix = fold(self.shape, *rule)
    self.limit, self.padding, self.values = limit, padding, values
    self.decay, self.alpha, self.average = decay, alpha, average
    self.gradient_weight, self.basis = gradient_weight, basis
    _, self.whole, self.topk = cheapest(self.matrix, *rule, of)
    self.places, self.step = places, 0
    self.error_feedback = error_feedback
    self.whole &= places is None
    *batch, rows, cols = self.matrix
    limits = (limit, limit) if isinstance(limit, int) else limit
    if not self.whole:  # whole chunks
      rows += -rows % side(rows, limits[0], padding)
      cols += -cols % side(cols, limits[1], padding)
    self.padded = np.zeros((workers, *batch, rows, cols), dtype)

  @property
  def m(self):
    """Every worker's momentum, `[N, *matrix]`."""
    *_, rows, cols = self.matrix
    return self.padded[..., :rows, :cols]

  def exchange(self, gradients, weights=None):
    """Takes `[N, *shape]` and returns the merged momentum `[*shape]`."""
    gradients = np.asarray(gradients).reshape(self.m.shape)
    present = [bool(np.isfinite(g).all()) for g in gradients]
    if weights is None:
      weights = np.ones(len(present))
    present = [p and 2**-30 <= w <= 2**30 for p, w in zip(present, weights)]
    self.weights = weights
    merged = np.zeros(self.matrix, self.padded.dtype)
    for place in np.ndindex(*self.matrix[:-2]):
      merged[place] = self._merge(self._send(place, gradients, present))
    self.step += 1
    return merged.reshape(self.shape)

  def _select(self, flat):
    if self.places is not None:
      return self.places(len(flat), self.step)
    return np.argsort(-np.abs(flat), kind='stable')[: self.topk]

  def _send(self, place, gradients, present):
    sent, shape = {}, self.padded.shape[-2:]
    for i in (i for i, p in enumerate(present) if p):
      m = self.padded[(i, *place)]  # a view
      g = gradients[(i, *place)]
      ends = [(0, size - own) for size, own in zip(shape, g.shape)]
      g = np.pad(g, ends, 'constant' if self.error_feedback else 'edge')
      m[:] = self.decay * m + self.gradient_weight * g
      if self.whole:
        own = read_as(m.flatten(), self.values).reshape(shape)
        sent[i] = [(own, np.ones(shape, bool))]
      else:
        sent[i] = compress(
          m, self.limit, self._select, self.padding, self.values, self.basis
        )
        own = expand(
          [c for c, _ in sent[i]], shape, self.limit, self.padding, self.basis
        )
      m[:] = m - self.alpha * own if self.error_feedback else 0
    return sent

  def _merge(self, sent):
    shape = self.matrix[-2:]
    if not sent:
      return np.zeros(shape)
    merged = []
    weights = [self.weights[i] for i in sent]
    for parts in zip(*sent.values()):
      total = sum(w * c for w, (c, _) in zip(weights, parts))
      whole = sum(w * mask for w, (_, mask) in zip(weights, parts))
      if self.average == 'workers':
        whole = np.full(whole.shape, sum(weights))
      merged.append(total / np.where(whole > 0, whole, 1))
    if self.whole:
      return merged[0]
    return expand(merged, shape, self.limit, self.padding, self.basis)


def planes(numbers, width):
  """Numbers of `width` bits as words of 32, by the definition of the format.

  The powers of two that make up the width, ascending, are parts of each number;
  number j W + w has bits j part to (j + 1) part of word w of W.
  """
  numbers = np.asarray(numbers, np.uint64).reshape(-1)
  words, start = [], 0
  for bit in range(6):
    part = 1 << bit
    if width & part:
      size = -(-len(numbers) * part // 32)
      plane = np.zeros(size, np.uint64)
      for i, number in enumerate(numbers):
        own = number >> np.uint64(start) & np.uint64(2**part - 1)
        plane[i % size] |= own << np.uint64(i // size * part)
      words.append(plane)
      start += part
  return np.concatenate(words or [np.zeros(0)]).astype(np.uint32)
