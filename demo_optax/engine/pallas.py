"""A step in two kernels, on backends that have them: `encode` and `decode`.

    gradient, momentum --encode--> momentum, indices, values
    indices, values of all workers --decode--> update

each in one pass over memory. What they compute is what the functions of
`compressors.chunking` and `engine.topk` do, one after the other: the same
selections, and the same bits but for the rounding of the transform and of
weighted sums.

This module says to which leaves they apply and puts several into a launch;
`pallas_gpu` and `pallas_tpu` have the kernels.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp

from demo_optax.compressors.base import LeafPlan
from demo_optax.compressors.buckets import Bucket
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.selectors import Largest
from demo_optax.engine import heuristics, plain, topk
from demo_optax.engine import pallas_common as kernel_math
from demo_optax.engine.pallas_common import Basis, Cut
from demo_optax.wire.message import Received, Selected, energy

COUNTS_SENDERS = False  # see `plain`

_LENGTHS = (32, 64, 128)
_LARGEST_K = 64

_T = TypeVar('_T')

Encoded = tuple[jax.Array, jax.Array, jax.Array]  # momentum, indices, values


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The kernels of a backend.

  Attributes:
    backend: 'gpu' or 'tpu'; None: none are used.
    interpret: run them on whatever there is, slowly.
  """

  backend: str | None
  interpret: bool = False

  @classmethod
  def chosen(cls, wanted: bool | None) -> 'Kernels':
    """Returns the kernels to use, if any: `heuristics.kernels` decides."""
    backend = heuristics.kernels(wanted)
    return cls('gpu', interpret=True) if backend == 'cpu' else cls(backend)

  @property
  def module(self) -> Any:
    """Imported when needed: a backend may be absent from a release of JAX."""
    return importlib.import_module(f'demo_optax.engine.pallas_{self.backend}')

  def apply(self, plan: LeafPlan, gradient: Any) -> bool:
    """Returns whether there are kernels for a leaf, by shapes and dtypes."""
    grid, k = plan.grid, plan.format.k
    if self.backend is None or grid.whole or any(grid.padding):
      return False
    if plan.format.dtype != 'float32':
      return False
    cut = Cut.of(grid)
    return (
        gradient.dtype in (jnp.float32, jnp.bfloat16)
        and cut.row_length in (1, *_LENGTHS)
        and cut.col_length in _LENGTHS
        and k <= min(_LARGEST_K, cut.n - 1)
        and self.module.applies(
            self._joined([cut]) if cut.row_length == 1 else cut
        )
    )

  def encode(
      self,
      basis: Basis,
      plans: Sequence[LeafPlan],
      gradients: Sequence[jax.Array],
      momentum: Sequence[jax.Array],
      decay: chex.Numeric,
      weight: chex.Numeric,
      present: jax.Array,
      limits: Sequence[float | None],
  ) -> list[Encoded]:
    """Adds gradients to momentum, selects, and takes away what is sent.

    Args:
      basis: the transform of one side of a chunk.
      plans: of the leaves.
      gradients: `[*plan.grid.shape]`, float32 or bfloat16.
      momentum: float32 `[*plan.grid.coefficients_shape]`.
      decay: what momentum is multiplied by.
      weight: what gradients are multiplied by.
      present: bool `[]`; if not, momentum stays as it is.
      limits: for each leaf the largest magnitude that is sent, and taken away;
        None: nothing is taken away.

    Returns:
      for each leaf momentum `[chunks, n]`, int32 indices and float32 values
      `[chunks, k]`, ascending within a chunk.
    """
    if self.interpret and kernel_math.varying(momentum[0]):
      raise ValueError(
          'kernels=True on a CPU: JAX does not interpret kernels inside a'
          ' shard_map that tracks what varies. Use Workers.simulated, or'
          ' Workers.on_axis in a shard_map with check_vma=False.'
      )
    numbers = decay, weight, present
    scalars = jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])
    cuts = [Cut.of(plan.grid) for plan in plans]
    flat_g = [g.reshape(c.shape) for g, c in zip(gradients, cuts)]
    flat_m = [
        m.reshape(c.row_chunks, c.col_chunks, c.n)
        for m, c in zip(momentum, cuts)
    ]
    keys = [
        (c.kind, plan.format.k, g.dtype, limit)
        for c, plan, g, limit in zip(cuts, plans, gradients, limits)
    ]

    def launch(members: list[int]) -> list[Encoded]:
      gs, ms = ([x[i] for i in members] for x in (flat_g, flat_m))
      own = [cuts[i] for i in members]
      (row_length, _), k, _, limit = keys[members[0]]
      joined = self._joined(own) if row_length == 1 else None
      if joined:
        gs, ms = [_join(gs, joined)], [_join(ms, joined)]
      done: list[Encoded] = self.module.encode(
          gs, ms, scalars, [joined] if joined else own, k, basis, limit,
          interpret=self.interpret,
      )
      if joined:
        done = list(zip(*(_cut(x, own) for x in done[0])))
      return [
          (m.reshape(c.chunks, c.n), i, v) for c, (m, i, v) in zip(own, done)
      ]

    return _in_launches(launch, keys, self.module.LEAVES)

  def decode(
      self,
      basis: Basis,
      plans: Sequence[LeafPlan],
      selections: Sequence[tuple[Any, jax.Array]],
      senders: Sequence[jax.Array],
      average: topk.Average,
      *,
      signed: bool = False,
  ) -> list[jax.Array]:
    """Returns what all workers sent, averaged and transformed back.

    Args:
      basis: the transform of one side of a chunk.
      plans: of the leaves.
      selections: for each leaf int32 indices and float32 values `[workers,
        chunks, k]`.
      senders: for each leaf bool `[workers]`, which workers are valid.
      average: see `topk.weigh`.
      signed: only signs of the result.

    Returns:
      float32 `[*plan.grid.shape]` for each leaf.
    """
    cuts = [Cut.of(plan.grid) for plan in plans]
    workers = len(senders[0])
    weighted = average == 'workers' or workers == 1
    keys = [(c.kind, plan.format.k) for c, plan in zip(cuts, plans)]

    def sent(leaf: int) -> tuple[jax.Array, jax.Array, jax.Array]:
      (indices, values), present = selections[leaf], senders[leaf]
      if weighted:
        n = cuts[leaf].n
        values, _ = topk.weigh(indices, values, present, n, average)
      taken = jnp.broadcast_to(present[:, None], indices.shape[:2])
      return indices, values, taken

    def launch(members: list[int]) -> list[jax.Array]:
      arrays = [sent(i) for i in members]
      own = [cuts[i] for i in members]
      joined = self._joined(own) if own[0].row_length == 1 else None
      if joined:
        i, v, taken = (_join(x, joined, axis=1) for x in zip(*arrays))
        arrays = [(i, v, taken)]
      tile = self.module.tile(own[0].kind)
      launched = [joined] if joined else own
      places, values = zip(*(
          kernel_math.entries(*x, c, tile) for x, c in zip(arrays, launched)
      ))
      updates: list[jax.Array] = self.module.decode(
          jnp.concatenate(places), jnp.concatenate(values), launched, basis,
          weighted=weighted, signed=signed, interpret=self.interpret,
      )
      return _cut(updates[0], own) if joined else updates

    updates = _in_launches(launch, keys, self.module.LEAVES)
    return [u.reshape(plan.grid.shape) for u, plan in zip(updates, plans)]

  def _joined(self, vectors: Sequence[Cut]) -> Cut:
    """Vectors one after the other, filled up to whole tiles."""
    tall = self.module.tile(vectors[0].kind).tall
    chunks = -(-sum(c.chunks for c in vectors) // tall) * tall
    return dataclasses.replace(vectors[0], row_chunks=chunks)


# A bucket: its chunks are those of a matrix `[rows * row_length, col_length]`.


def applies(bucket: Bucket) -> bool:
  """Returns whether there are kernels for a bucket."""
  if bucket.kind != 'chunks' or not isinstance(bucket.select, Largest):
    return False
  plan = _plan(bucket)
  gradient = jax.ShapeDtypeStruct(plan.grid.shape, bucket.format.dtype)
  return Kernels.chosen(True).apply(plan, gradient)


def accumulate_and_select(
    bucket: Bucket,
    gradients: jax.Array,
    momentum: jax.Array,
    decay: Any,
    weight: Any,
    valid: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, Selected]:
  """As `plain.accumulate_and_select`, in one pass over memory."""
  if jnp.ndim(decay) or jnp.ndim(weight):  # one for each row
    return plain.accumulate_and_select(
        bucket, gradients, momentum, decay, weight, valid, step
    )
  plan = _plan(bucket)
  ((momentum, indices, values),) = Kernels.chosen(True).encode(
      bucket.basis.matrix,
      [plan],
      [gradients.reshape(plan.grid.shape)],
      [momentum],
      decay,
      weight,
      valid,
      [None],
  )
  return momentum, Selected(indices, values, energy(momentum))


def merge(
    bucket: Bucket, received: Received, average: topk.Average
) -> tuple[jax.Array, jax.Array]:
  """As `plain.merge`; different coefficients are not counted."""
  (updates,) = Kernels.chosen(True).decode(
      bucket.basis.matrix,
      [_plan(bucket)],
      [(received.indices, received.values)],
      [received.valid],
      average,
  )
  return updates.reshape(bucket.shape), jnp.zeros((), jnp.float32)


def _plan(bucket: Bucket) -> LeafPlan:
  """Returns the plan of a matrix that is cut into the chunks of a bucket."""
  rows, cols = bucket.sides
  shape = (bucket.rows * rows, cols)
  lengths = bucket.sides
  return LeafPlan(ChunkGrid(shape, lengths), bucket.format)


def _in_launches(
    launch: Callable[[list[int]], Sequence[_T]],
    keys: Sequence[tuple[Any, ...]],
    at_once: int,
) -> list[_T]:
  """Leaves of a key together, vectors all at once: results in their order."""
  groups: dict[tuple[Any, ...], list[int]] = {}
  for number, key in enumerate(keys):
    groups.setdefault(key, []).append(number)
  found: dict[int, _T] = {}
  for ((row_length, _), *_), group in groups.items():
    size = len(group) if row_length == 1 else at_once
    for start in range(0, len(group), size):
      members = group[start : start + size]
      found.update(zip(members, launch(members)))
  return [found[number] for number in range(len(keys))]


def _join(
    arrays: Sequence[jax.Array], joined: Cut, axis: int = 0
) -> jax.Array:
  """Concatenated along the chunks, and zeros up to their number."""
  x = jnp.concatenate(arrays, axis)
  more = joined.chunks - x.shape[axis]
  return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])


def _cut(x: jax.Array, cuts: Sequence[Cut]) -> list[jax.Array]:
  """Returns the parts of an array of vectors' chunks that are each vector's."""
  parts, start = [], 0
  for cut in cuts:
    parts.append(x[start : start + cut.chunks])
    start += cut.chunks
  return parts
