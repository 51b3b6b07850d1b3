"""How a worker's parameters are spread over its devices.

A worker with several devices shards its parameters over mesh axes other than
the worker axis; `ParamSpecs` knows, for every parameter, over which. Parameters
are found by path, since an exchange may see only some (`optax.masked`,
`optax.partition`) and Flax wraps them in variables.
"""

import dataclasses
import math
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import chex
import jax
from jax.sharding import PartitionSpec as P

from demo_optax._checks import short
from demo_optax._paths import (
  Keys,
  dotted,
  is_bucket,
  leaves_of,
)


@dataclasses.dataclass(frozen=True)
class ParamSharding:
  """Where one parameter is inside a worker."""

  spec: P  # without the worker axis and axes of one device
  blocks: tuple[int, ...]  # along each dimension, each on another device
  # The mesh axes that the blocks are spread over, in the mesh's order; over all
  # others the parameter is replicated.
  axes: tuple[str, ...]
  # As the user wrote it, which Explicit meshes compare.
  given: P = dataclasses.field(default=P(), compare=False, repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class ParamSpecs:
  """The partition specs for all parameters, checked."""

  # Paths and specs; a spec holds for all parameters below its path.
  specs: tuple[tuple[Keys, P], ...] = (((), P()),)
  # Names and sizes of the mesh axes inside a worker, in the mesh's order, which
  # have more than one device: along others nothing is spread.
  axis_sizes: tuple[tuple[str, int], ...] = ()

  @classmethod
  def of(
    cls,
    specs: chex.ArrayTree,
    axis_sizes: Mapping[str, int],
  ) -> 'ParamSpecs':
    """Checks a tree with `PartitionSpec`s; see `Workers.on_mesh`."""
    checked = []
    known = ', '.join(axis_sizes) or 'none'
    for keys, spec in leaves_of(specs, lambda x: isinstance(x, P | None)):
      name = dotted(keys) if keys else 'all parameters'
      if spec is None:
        spec = P()
      if not isinstance(spec, P):
        raise TypeError(
          'param_specs must have a jax.sharding.PartitionSpec for'
          f' {name}, got {short(spec)}. Give None for replicated.'
        )
      # A dimension is cut along an axis once, and never over the workers.
      names = names_of(spec)
      if len({*names}) < len(names) or {*names} - {*axis_sizes}:
        raise ValueError(
          f'The spec of {name} must name axes inside a worker'
          f' ({known}), each once, got {spec}. Over the worker axis'
          ' parameters are replicated.'
        )
      checked.append((keys, keep(spec, names)))
    spread = [(name, size) for name, size in axis_sizes.items() if size > 1]
    return cls(tuple(checked), tuple(spread))

  def __repr__(self) -> str:
    names = dict.fromkeys(
      name for _, spec in self.specs for name in names_of(spec)
    )
    return f', sharded over {", ".join(names)}' if names else ''

  @property
  def axes(self) -> tuple[str, ...]:
    """The names in `axis_sizes`."""
    return tuple(name for name, _ in self.axis_sizes)

  @property
  def devices(self) -> int:
    """How many devices a worker has."""
    return math.prod(size for _, size in self.axis_sizes)

  @property
  def bucket_spec(self) -> P:
    """How a bucket is spread over a worker's devices."""
    return P(self.axes) if self.axes else P()

  def place(
    self,
    keys: Keys,
    shape: tuple[int, ...],
  ) -> ParamSharding:
    """Returns how the parameter at a path is sharded; raises if it cannot."""
    spec = self._spec_above(keys)
    if spec is None:
      known = ', '.join(map(dotted, dict(self.specs))) or 'none'
      raise ValueError(
        f'param_specs must have a spec for the parameter {dotted(keys)}, got'
        f' specs for {textwrap.shorten(known, 200)}. Give a PartitionSpec for'
        ' every parameter (P() for replicated), in a tree of their structure;'
        ' flax.nnx.get_partition_spec takes it from a model.'
      )
    blocks = self._blocks(spec, shape)
    if blocks is None:
      raise ValueError(
        f'The spec of {dotted(keys)} must divide its shape {shape}, got'
        f' {spec} over axes of sizes {dict(self.axis_sizes)}. Shard another'
        ' dimension of it, or replicate it: P().'
      )
    # Along axes with one device nothing is cut, also if the user names them.
    axes = tuple(axis for axis in self.axes if axis in names_of(spec))
    return ParamSharding(keep(spec, axes), blocks, axes, spec)

  def place_state(
    self,
    keys: Keys,
    shape: tuple[int, ...],
  ) -> P:
    """Returns the spec for a bucket or parameter, without the worker axis."""
    if is_bucket(keys):
      return self.bucket_spec
    # A parameter's path ends that of its moment in an optimizer's state, which
    # may have another shape.
    for start in range(len(keys) + 1):
      spec = self._spec_above(keys[start:])
      if spec is not None and self._blocks(spec, shape) is not None:
        return spec
    return P()

  def _spec_above(self, keys: Keys) -> P | None:
    """Returns the spec at this path or above it, which holds for all below."""
    specs = dict(self.specs)
    for length in range(len(keys) + 1):
      if keys[:length] in specs:
        return specs[keys[:length]]
    return None

  def _blocks(
    self,
    spec: P,
    shape: tuple[int, ...],
  ) -> tuple[int, ...] | None:
    """Returns how many blocks each dimension has, or None."""
    if len(spec) > len(shape):
      return None
    sizes, blocks = dict(self.axis_sizes), []
    for dimension, length in enumerate(shape):
      count = math.prod(sizes.get(axis, 1) for axis in entry(spec, dimension))
      if length % count:
        return None
      blocks.append(count)
    return tuple(blocks)


REPLICATED = ParamSpecs()


def entry(spec: P, dim: int) -> tuple[Any, ...]:
  """Returns the axes along one dimension."""
  return tuple(jax.tree.leaves(tuple(spec)[dim : dim + 1]))


def keep(spec: P, axes: Collection[Any]) -> P:
  """Returns the spec with these axes alone, in its shortest form."""
  entries = []
  for dimension in range(len(spec)):
    kept = [axis for axis in entry(spec, dimension) if axis in axes]
    entries.append(tuple(kept) or None)
  # P(None) and P() are equal layouts, but not equal.
  while entries and entries[-1] is None:
    entries.pop()
  return P(*entries)


def names_of(spec: P) -> list[Any]:
  """Returns all axes in a spec."""
  return jax.tree.leaves(tuple(spec))
