"""Workers: who takes part, and how one worker's function is run for all.

This is the only module that knows `vmap`, `shard_map` and collectives. It
knows nothing of compression.

A worker may be several devices, which share its one momentum: the axes of the
mesh other than the worker axis shard its parameters (`workers.sharding`).
"""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax.workers import sharding as specs
from demo_optax.workers.sharding import Placement

# A vector of bytes, and where the parameter that it tells of lies.
Part = tuple[jax.Array, tuple[str, ...]]


class Workers(abc.ABC):
  """Who takes part in the exchange. Make one with one of the constructors.

  ==========================  ==========================  ======================
  constructor                 gradients                   for
  ==========================  ==========================  ======================
  `Workers.simulated(n)`      stacked `[n, ...]`          one device: notebooks,
                                                          laptops, tests
  `Workers.on_mesh(mesh, a)`  stacked `[n, ...]`,         several devices or
                              sharded over mesh axis `a`  hosts
  `Workers.on_axis(a)`        local `[...]`               a loop of your own in
                                                          shard_map, vmap, pmap
  ==========================  ==========================  ======================

  Attributes:
    axis_name: name of the worker axis.
    mesh: the mesh of `on_mesh`, else None.

  Example:
    >>> import demo_optax
    >>> demo_optax.Workers.simulated(4)
    Workers.simulated(4)
  """

  axis_name: str
  mesh: Mesh | None = None

  def __eq__(self, other: object) -> bool:
    return type(self) is type(other) and vars(self) == vars(other)

  def __hash__(self) -> int:
    return hash((type(self), *vars(self).values()))

  @staticmethod
  def simulated(
      num_workers: int,
      param_specs: Any = None,
      axis_sizes: Mapping[str, int] | None = None,
  ) -> 'Workers':
    """`num_workers` workers on one device, run by `jax.vmap`.

    Args:
      num_workers: how many, at least 1.
      param_specs: see `on_mesh`. Simulates workers that shard their parameters:
        chunks are cut from the same blocks, so results and states are those of
        the mesh.
      axis_sizes: for `param_specs`, the sizes of the axes that it names, in the
        mesh's order, such as `{'fsdp': 4}`; `mesh.shape` less the worker axis.

    Returns:
      The workers. Gradients and momentum are stacked, `[num_workers, ...]`.

    Raises:
      ValueError: `num_workers` is below 1; `param_specs` names an axis that
        `axis_sizes` lacks.
      TypeError: `num_workers` is not an integer; `param_specs` holds something
        else than specs.

    Example:
      >>> import demo_optax
      >>> demo_optax.Workers.simulated(2).count
      2
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
      raise TypeError(f'num_workers={num_workers!r} must be an integer.')
    if num_workers < 1:
      raise ValueError(f'num_workers={num_workers} must be at least 1.')
    name = _Simulated.axis_name
    return _Simulated(
        num_workers, specs.ParamSpecs(param_specs, axis_sizes or {}, name)
    )

  @staticmethod
  def on_mesh(
      mesh: Mesh, axis_name: str, param_specs: Any = None
  ) -> 'Workers':
    """One worker at each position of a mesh axis, run by `jax.shard_map`.

    A worker is all the devices at its position. By default each of them has all
    parameters; with `param_specs` they shard them. Momentum is sharded as its
    parameter is, chunks are cut from each device's own block, and a device
    exchanges with its counterparts in the other workers. What several devices
    of a worker hold alike crosses the worker axis once: each sends a part of
    its bytes, and the parts are rejoined inside.

    Args:
      mesh: a mesh whose axes are all of type Auto or all Explicit.
      axis_name: the axis along which the workers stand. Parameters are
        replicated over it. On a mesh with axes of type Explicit, parameters
        must be on the mesh (`device_put`).
      param_specs: how a worker's parameters are sharded over the other axes: a
        tree of `PartitionSpec` like the parameters, where a spec in place of a
        subtree holds for all of it and `None` is `P()`, replicated.
        `demo_optax.param_specs` takes it from a Flax model.

    Returns:
      The workers. Gradients and momentum are stacked, one per worker, and
      sharded over `axis_name`, then as the parameters are.

    Raises:
      ValueError: the mesh has no such axis, or axes of both types;
        `param_specs` names the worker
        axis, an unknown one, or one twice. When a state is made: a parameter
        without a spec, or whose dimension does not divide over its axes.
      TypeError: `param_specs` holds something else than specs.

    Example:
      >>> import demo_optax, jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ('data',))
      >>> workers = demo_optax.Workers.on_mesh(mesh, 'data')
      >>> workers.count == jax.device_count()
      True

    References:
      Workers of many devices: From et al., `DeToNATION: Decoupled Torch
      Network-Aware Training on Interlinked Online Nodes
      <https://arxiv.org/abs/2502.06728>`_ (FlexDeMo).
    """
    if axis_name not in mesh.axis_names:
      raise ValueError(
          f'The mesh has no axis {axis_name!r}; its axes are'
          f' {mesh.axis_names}.'
      )
    if len(set(mesh.axis_types)) > 1:
      raise ValueError(
          f'The axes {mesh.axis_names} of the mesh are of types'
          f' {mesh.axis_types}: make all Auto or all Explicit.'
      )
    inner = {a: n for a, n in mesh.shape.items() if a != axis_name}
    return _OnMesh(
        mesh, axis_name, specs.ParamSpecs(param_specs, inner, axis_name)
    )

  @staticmethod
  def on_axis(axis_name: str) -> 'Workers':
    """The workers of an axis that the caller has mapped.

    For training steps written inside `jax.shard_map` (with `check_vma` on or
    off), `jax.vmap` or `jax.pmap`. Gradients are the worker's own, in the
    parameters' shapes; momentum has a leading axis of 1, so that
    `P(axis_name)`, as given by `demo_optax.state_specs`, carries the stacked
    layout of the other two through `shard_map`.

    Gradients that were averaged before are refused where that can be seen:
    inside a checked `shard_map`. Under `vmap`, `pmap` and `check_vma=False` it
    cannot: take gradients with `demo_optax.value_and_grad`.

    Args:
      axis_name: name of the mapped axis.

    Returns:
      The workers.

    Raises:
      TypeError: `axis_name` is not a string.

    Example:
      >>> import demo_optax
      >>> demo_optax.Workers.on_axis('data')
      Workers.on_axis('data')
    """
    if not isinstance(axis_name, str):
      raise TypeError(f'axis_name={axis_name!r} must be a string.')
    return _OnAxis(axis_name)

  @property
  @abc.abstractmethod
  def count(self) -> int:
    """Number of workers (`on_axis`: known inside the mapped function only)."""

  @property
  def stacked_size(self) -> int:
    """Length of the leading axis of stacked arrays, as seen by the caller."""
    return self.count

  @property
  def stacked_gradients(self) -> bool:
    """Whether gradients carry a leading worker axis."""
    return True

  @property
  def param_specs(self) -> specs.ParamSpecs:
    """How parameters are spread over the devices of a worker."""
    return _ON_ONE_DEVICE

  @property
  def spmd_axis_name(self) -> str | None:
    """The mesh axis of the leading axis of stacked arrays, if there is one."""
    return None

  def local_blocks(self, placement: Placement) -> tuple[int, ...]:
    """How many of a parameter's blocks `run` shows to a step at once."""
    return placement.blocks

  @abc.abstractmethod
  def zeros(
      self, shape: tuple[int, ...], dtype: jnp.dtype, placement: Placement
  ) -> jax.Array:
    """Zeros `[stacked_size, *shape]`, each at its place from birth.

    Args:
      shape: one axis for each dimension of the parameter, and further ones.
      dtype: their dtype.
      placement: where the parameter lies.
    """

  @abc.abstractmethod
  def stack(self, x: jax.Array) -> jax.Array:
    """A copy of `x` for every worker, `[stacked_size, *x.shape]`."""

  def first(self, x: jax.Array) -> jax.Array:
    """Worker 0's part of a stacked array, for all."""
    return x[0]

  @abc.abstractmethod
  def run(
      self,
      step: Callable[..., tuple[list[Any], list[Any], Any]],
      gradients: list[jax.Array],
      state: list[jax.Array],
      placements: Sequence[Placement],
      *shared: Any,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Runs one worker's `step` for all workers.

    Args:
      step: `(gradients, state, *shared) -> (updates, state, info)`, everything
        without the worker axis, of those blocks that `local_blocks` tells.
        Updates and info must be equal on all workers, which they are if they
        depend on nothing but what `gather` returned.
      gradients: the workers' gradients, or none.
      state: stacked arrays, one for each parameter.
      placements: where the parameters lie.
      *shared: trees of scalars that all workers have alike.

    Returns:
      Updates without a worker axis, the new stacked state, and info: a tree of
      scalars.
    """

  def each(
      self,
      fun: Callable[[list[jax.Array]], list[jax.Array]],
      state: list[jax.Array],
      placements: Sequence[Placement],
  ) -> list[jax.Array]:
    """Stacked arrays from stacked arrays, without communication.

    Args:
      fun: one worker's function, everything without the worker axis, and only
        those blocks that `local_blocks` tells.
      state: stacked arrays.
      placements: where the parameters lie that they belong to.

    Returns:
      What `fun` returned, stacked: one array for each in `state`.
    """
    return jax.vmap(fun)(state)

  @abc.abstractmethod
  def gather(self, parts: Sequence[Part]) -> list[jax.Array]:
    """All workers' `parts`, by one collective over the worker axis.

    Call it inside `step`.

    Args:
      parts: uint8 `[bytes]` with the axes over which it differs between the
        devices of a worker. Over the others it is the same, and crosses the
        worker axis once: divided, and rejoined inside.

    Returns:
      for each part uint8 `[count, bytes]`.
    """

  @abc.abstractmethod
  def sum(self, parts: Sequence[Part]) -> list[jax.Array]:
    """Sums of all workers' `parts`, by one collective for every dtype.

    Call it inside `step`. The same bits on all workers; in simulation and on a
    mesh workers may be added in another order.

    Args:
      parts: `[length]`, of floats, with axes as for `gather`.

    Returns:
      for each part `[length]`.
    """

  def agree(self, ok: jax.Array) -> jax.Array:
    """Whether `ok` holds on all devices of the worker. Inside `step`."""
    return ok

  def copies(self, axes: tuple[str, ...]) -> int:
    """Devices of a worker that hold the same of what is sharded over `axes`."""
    del axes
    return 1

  def sum_inside(self, x: jax.Array) -> jax.Array:
    """Sum over the devices of the worker. Inside `step`."""
    return x

  @abc.abstractmethod
  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    """Runs one worker's function for all workers, without communication.

    Args:
      fun: `(index, own, state, shared) -> (own, state, equal)`, everything
        without the worker axis; `index` is the worker's number, int32 `[]`, and
        `equal` depends on nothing but `shared`.
      own: a tree laid out as gradients are: stacked, or local with `on_axis`.
      state: a tree of stacked arrays.
      shared: a tree that is the same for all workers.

    Returns:
      What `fun` returned: laid out like `own`, like `state`, and `equal` as it
      is.
    """

  @abc.abstractmethod
  def split(self, x: jax.Array) -> jax.Array:
    """A batch `[count * b, ...]` laid out as gradients are."""

  @abc.abstractmethod
  def mean(self, x: jax.Array) -> jax.Array:
    """Mean over the workers of something laid out as gradients are."""

  @abc.abstractmethod
  def sum_present(
      self, x: jax.Array, present: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Sum over the workers that are present, and their number.

    Args:
      x: the workers' arrays, laid out as gradients are.
      present: bool, one for each worker, laid out as gradients are.

    Returns:
      The sum, without a worker axis, and int32 `[]`.
    """

  def mean_present(
      self, x: jax.Array, present: jax.Array, otherwise: jax.Array | float = 0
  ) -> jax.Array:
    """Mean over the workers that are present; `otherwise` if nobody is."""
    total, count = self.sum_present(x, present)
    mean = total / jnp.maximum(count, 1).astype(total.dtype)
    return jnp.where(count > 0, mean, otherwise)

  @abc.abstractmethod
  def all_finite(self, xs: Sequence[jax.Array]) -> jax.Array:
    """For every worker, whether all its arrays are finite."""

  def device_put(self, tree: Any) -> Any:
    """`tree` on the devices of the workers' mesh, before the first step.

    Parameters, and what ends in a parameter's path in a state, go where
    `param_specs` says; all else goes everywhere. Arrays that are spread over
    the mesh already (the momentum) stay where they are. Without a mesh it is
    `tree` as it is.

    Args:
      tree: parameters, an optimizer state, or an `nnx.State`.

    Returns:
      The tree. What is born on one device moves in the first step at the
      latest; moved before, the second step needs no compilation of its own.

    Example:
      >>> import demo_optax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ('data',))
      >>> workers = demo_optax.Workers.on_mesh(mesh, 'data')
      >>> params = workers.device_put({'w': jnp.ones(3)})
      >>> params['w'].is_fully_replicated
      True
    """
    return tree

  def check_gradient(self, name: str, gradient: jax.Array) -> None:  # noqa: B027
    """Raises if a gradient can be seen not to be one worker's own."""

  def context(self) -> contextlib.AbstractContextManager[Any]:
    """Returns the context that a model of one worker is traced in."""
    return contextlib.nullcontext()

  def put(
      self,
      keys: Sequence[specs.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[Any]:
    """Returns the arrays of a step's arguments where they belong.

    Args:
      keys: their paths.
      roles: 'batch', 'stacked', or anything else for what workers share.
      leaves: the arrays; those that are traced are returned as they are.
    """
    del keys, roles
    return list(leaves)

  def hold(
      self,
      keys: Sequence[specs.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[Any]:
    """Returns the arrays of a step's results, constrained to where they belong.

    Args:
      keys: their paths.
      roles: 'output', 'stacked', or anything else for what workers share.
      leaves: the arrays.
    """
    del keys, roles
    return list(leaves)

  def join(self, x: jax.Array) -> jax.Array:
    """Returns rows `[count, b, ...]` as a batch: undoes `split`."""
    raise NotImplementedError


class _Stacked(Workers):
  """Gradients carry the worker axis in front."""

  def join(self, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    mapped = jax.vmap(
        fun,
        in_axes=(0, 0, 0, None),
        out_axes=(0, 0, None),
        spmd_axis_name=self.spmd_axis_name,
    )
    index = self.place(jnp.arange(self.count, dtype=jnp.int32))
    return mapped(index, own, state, shared)

  def split(self, x: jax.Array) -> jax.Array:
    return x.reshape(self.count, x.shape[0] // self.count, *x.shape[1:])

  def mean(self, x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=0)

  def sum_present(
      self, x: jax.Array, present: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    mask = present.reshape(self.count, *(1,) * (x.ndim - 1))
    total = jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)), axis=0)
    return total, jnp.sum(present, dtype=jnp.int32)

  def all_finite(self, xs: Sequence[jax.Array]) -> jax.Array:
    everyone = jnp.ones((self.count,), bool)
    finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in xs]
    return functools.reduce(jnp.logical_and, finite, self.place(everyone))

  def place(self, x: jax.Array) -> jax.Array:
    """Puts each worker's part of a stacked array where the worker is."""
    return x


class _Simulated(_Stacked):
  """Workers on one device."""

  axis_name = 'workers'

  def __init__(self, num_workers: int, param_specs: specs.ParamSpecs):
    self._count, self._param_specs = num_workers, param_specs

  def __repr__(self) -> str:
    return f'Workers.simulated({self._count}{self._param_specs})'

  @property
  def param_specs(self) -> specs.ParamSpecs:
    return self._param_specs

  @property
  def count(self) -> int:
    return self._count

  def zeros(
      self, shape: tuple[int, ...], dtype: jnp.dtype, placement: Placement
  ) -> jax.Array:
    return jnp.zeros((self.count, *shape), dtype)

  def stack(self, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (self.count, *jnp.shape(x)))

  def run(
      self,
      step: Callable[..., tuple[list[Any], list[Any], Any]],
      gradients: list[jax.Array],
      state: list[jax.Array],
      placements: Sequence[Placement],
      *shared: Any,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    # out_axes=None holds because what was gathered is the same for all: merging
    # is done once, not once per worker.
    mapped = jax.vmap(
        lambda gradients, state: step(gradients, state, *shared),
        out_axes=(None, 0, None),
        axis_name=self.axis_name,
        axis_size=self.count,
    )
    return mapped(gradients, state)

  def gather(self, parts: Sequence[Part]) -> list[jax.Array]:
    return _gather_once(
        parts, lambda x: jax.lax.all_gather(x, self.axis_name)
    )

  def sum(self, parts: Sequence[Part]) -> list[jax.Array]:
    return _sum_once(parts, lambda x: jax.lax.psum(x, self.axis_name))


class _OnMesh(_Stacked):
  """Workers along a mesh axis."""

  mesh: Mesh

  def __init__(
      self, mesh: Mesh, axis_name: str, param_specs: specs.ParamSpecs
  ):
    self.mesh, self.axis_name, self._param_specs = mesh, axis_name, param_specs
    self._explicit = AxisType.Explicit in mesh.axis_types

  def __repr__(self) -> str:
    sharded = repr(self.param_specs)
    return f'Workers.on_mesh({self.mesh}, {self.axis_name!r}{sharded})'

  @property
  def param_specs(self) -> specs.ParamSpecs:
    return self._param_specs

  @property
  def count(self) -> int:
    return self.mesh.shape[self.axis_name]

  @property
  def spmd_axis_name(self) -> str | None:
    return self.axis_name

  def local_blocks(self, placement: Placement) -> tuple[int, ...]:
    return (1,) * len(placement.blocks)

  def zeros(
      self, shape: tuple[int, ...], dtype: jnp.dtype, placement: Placement
  ) -> jax.Array:
    # jnp.zeros(device=sharding) would do under no jit only: inside one it lands
    # on a single device, all workers' momentum together.
    spec = P(self.axis_name, *placement.spec)
    return _zeros_on_mesh(self.mesh, spec, (self.count, *shape), dtype)()

  def stack(self, x: jax.Array) -> jax.Array:
    if not isinstance(x, jax.core.Tracer):
      x = self.device_put(x)
    return jax.jit(
        lambda x: self.place(jnp.broadcast_to(x, (self.count, *x.shape)))
    )(x)

  def first(self, x: jax.Array) -> jax.Array:
    if self._explicit:
      x = self._reshard(x, P(None, *jax.typeof(x).sharding.spec[1:]))
    return x[0]

  def run(
      self,
      step: Callable[..., tuple[list[Any], list[Any], Any]],
      gradients: list[jax.Array],
      state: list[jax.Array],
      placements: Sequence[Placement],
      *shared: Any,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    def local_step(
        gradients: list[jax.Array], state: list[jax.Array], *shared: Any
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
      own = jax.tree.map(lambda x: x[0], (gradients, state))
      updates, state, info = step(*own, *shared)
      return updates, [x[None] for x in state], info

    inside = [p.spec for p in placements]
    stacked = [P(self.axis_name, *spec) for spec in inside]
    mapped = jax.shard_map(
        local_step,
        mesh=self.mesh,
        in_specs=(stacked[: len(gradients)], stacked, *(P() for _ in shared)),
        out_specs=(inside[: len(gradients)], stacked, P()),
    )
    gradients = [self._reshard(x, s) for x, s in zip(gradients, stacked)]
    state = [self._reshard(x, s) for x, s in zip(state, stacked)]
    return mapped(gradients, state, *shared)

  def each(
      self,
      fun: Callable[[list[jax.Array]], list[jax.Array]],
      state: list[jax.Array],
      placements: Sequence[Placement],
  ) -> list[jax.Array]:
    def step(
        gradients: list[jax.Array], state: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
      return gradients, fun(state), ()

    # Jitted, since shard_map outside of jit runs operation by operation.
    run = jax.jit(lambda state: self.run(step, [], state, placements)[1])
    return run(state)

  def gather(self, parts: Sequence[Part]) -> list[jax.Array]:
    gathered = _gather_once(
        self._divide(parts),
        lambda x: jax.lax.all_gather(x, self.axis_name, to='invarying'),
    )
    return self._rejoin(parts, gathered)

  def sum(self, parts: Sequence[Part]) -> list[jax.Array]:
    summed = _sum_once(
        self._divide(parts), lambda x: jax.lax.psum(x, self.axis_name)
    )
    return self._rejoin(parts, summed)

  def _alike(self, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes inside a worker over which such a part is the same."""
    return tuple(a for a in self.param_specs.axes if a not in axes)

  def copies(self, axes: tuple[str, ...]) -> int:
    sizes = dict(self.param_specs.axis_sizes)
    return math.prod(sizes[a] for a in self._alike(axes))

  def _divide(self, parts: Sequence[Part]) -> list[Part]:
    """Of what several devices of a worker have, the share of this one.

    All parts can then share one buffer, whatever axes they are sharded over:
    every one of them differs between all devices of a worker.
    """
    mine = []
    for x, axes in parts:
      if alike := self._alike(axes):
        share = -(-x.size // self.copies(axes))
        x = jnp.pad(x, (0, share * self.copies(axes) - x.size))
        start = share * jax.lax.axis_index(alike)
        x = jax.lax.dynamic_slice(x, (start,), (share,))
      mine.append((x, axes))
    return mine

  def _rejoin(
      self, parts: Sequence[Part], shares: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """The whole of the `parts`, which are the last axis, of their shares."""
    wholes = []
    for (part, axes), x in zip(parts, shares):
      if alike := self._alike(axes):
        x = jax.lax.all_gather(
            x, alike, axis=x.ndim - 1, tiled=True, to='invarying'
        )
      wholes.append(x[..., : part.size])
    return wholes

  def agree(self, ok: jax.Array) -> jax.Array:
    if not self.param_specs.axes:
      return ok
    everywhere = self._vary_inside(ok.astype(jnp.int32))
    return jax.lax.pmin(everywhere, self.param_specs.axes) == 1

  def sum_inside(self, x: jax.Array) -> jax.Array:
    if not self.param_specs.axes:
      return x
    return jax.lax.psum(self._vary_inside(x), self.param_specs.axes)

  def _vary_inside(self, x: jax.Array) -> jax.Array:
    """`x`, marked as varying over the devices of a worker."""
    new = tuple(a for a in self.param_specs.axes if not _varies(x, a))
    return jax.lax.pcast(x, new, to='varying')

  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    # Layers may look for the mesh in the context, which users need not set.
    with self.context():
      return super().map(fun, own, state, shared)

  def context(self) -> contextlib.AbstractContextManager[Any]:
    return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

  def join(self, x: jax.Array) -> jax.Array:
    shape = (x.shape[0] * x.shape[1], *x.shape[2:])
    if not self._explicit:
      return x.reshape(shape)
    _, inner, *rest = jax.typeof(x).sharding.spec
    inner = inner if isinstance(inner, tuple) else (inner,) if inner else ()
    sharding = NamedSharding(self.mesh, P((self.axis_name, *inner), *rest))
    return jax.lax.reshape(x, shape, out_sharding=sharding)

  def put(
      self,
      keys: Sequence[specs.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[Any]:
    def move(x: Any, role: str, spec: P) -> Any:
      if isinstance(x, jax.core.Tracer):
        return x
      there = getattr(getattr(x, 'sharding', None), 'mesh', None) == self.mesh
      target = NamedSharding(self.mesh, spec)
      if there and (
          role != 'stacked' or x.sharding.is_equivalent_to(target, x.ndim)
      ):
        return x
      return _put(x, target)

    specs = self._leaf_specs(keys, roles, leaves)
    return [move(x, r, s) for x, r, s in zip(leaves, roles, specs)]

  def hold(
      self,
      keys: Sequence[specs.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[Any]:
    if self._explicit:  # types say it
      return list(leaves)

    def hold(x: jax.Array, role: str, spec: P) -> jax.Array:
      if role == 'output' and x.ndim:
        return x
      sharding = NamedSharding(self.mesh, spec)
      return jax.lax.with_sharding_constraint(x, sharding)

    specs = self._leaf_specs(keys, roles, leaves)
    return [hold(x, r, s) for x, r, s in zip(leaves, roles, specs)]

  def _leaf_specs(
      self,
      keys: Sequence[specs.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[P]:
    def spec(k: specs.Keys, role: str, x: Any) -> P:
      if role == 'batch':
        return P(self.axis_name)
      if role == 'stacked':
        within = self.param_specs.place_state(k, np.shape(x)[1:])
        return P(self.axis_name, *within)
      return self.param_specs.place_state(k, np.shape(x))

    return [spec(k, r, x) for k, r, x in zip(keys, roles, leaves)]

  def split(self, x: jax.Array) -> jax.Array:
    shape = (self.count, x.shape[0] // self.count, *x.shape[1:])
    if not self._explicit:
      return self.place(x.reshape(shape))
    # A batch may be spread over the devices of a worker, too, and stays so.
    first, *rest = jax.typeof(x).sharding.spec
    first = first if isinstance(first, tuple) else (first,)
    inner = first[1:] if first[0] == self.axis_name else ()
    x = self._reshard(x, P((self.axis_name, *inner), *rest))
    sharding = NamedSharding(self.mesh, P(self.axis_name, inner or None, *rest))
    return jax.lax.reshape(x, shape, out_sharding=sharding)

  def device_put(self, tree: Any) -> Any:
    def move(x: Any, spec: P) -> Any:
      there = getattr(getattr(x, 'sharding', None), 'mesh', None) == self.mesh
      if there and (spec == P() or not x.is_fully_replicated):
        return x
      return _put(x, NamedSharding(self.mesh, spec))

    return jax.tree.map(move, tree, self._specs_of(tree))

  def _specs_of(self, tree: Any) -> Any:
    """Where parameters, or a state, belong: specs by path and shape."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [specs.path_keys(path) for path, _ in flat]

    def spec_of(keys: specs.Keys, shape: tuple[int, ...]) -> P:
      place = self.param_specs.place_state
      axes = specs.pending_axes(keys)
      if axes is not None:
        return P(self.axis_name, *([axes] if axes else []))
      if specs.is_stacked(keys):
        return P(self.axis_name, *place(keys, shape[1:]))
      return place(keys, shape)

    return treedef.unflatten(
        [spec_of(keys, jnp.shape(x)) for keys, (_, x) in zip(paths, flat)]
    )

  def place(self, x: jax.Array) -> jax.Array:
    """`x [count, ...]`, each worker's part at the worker."""
    if self._explicit:
      old = jax.typeof(x).sharding.spec
      return self._reshard(x, P(self.axis_name, *old[1:]))
    free = [P.UNCONSTRAINED] * (x.ndim - 1)
    sharding = NamedSharding(self.mesh, P(self.axis_name, *free))
    return jax.lax.with_sharding_constraint(x, sharding)

  def _reshard(self, x: jax.Array, spec: P) -> jax.Array:
    """On Explicit axes types must match; on Auto ones shard_map sees to it."""
    if not self._explicit:
      return x
    return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))


class _OnAxis(Workers):
  """Workers of an axis that the caller has mapped."""

  def __init__(self, axis_name: str):
    self.axis_name = axis_name

  def __repr__(self) -> str:
    return f'Workers.on_axis({self.axis_name!r})'

  @property
  def count(self) -> int:
    try:
      return jax.lax.axis_size(self.axis_name)
    except NameError as error:
      raise ValueError(
          f'The axis {self.axis_name!r} is not mapped here. With'
          ' Workers.on_axis, call this inside jax.shard_map, jax.vmap or'
          ' jax.pmap over that axis; for plain jit, use Workers.on_mesh.'
      ) from error

  @property
  def stacked_size(self) -> int:
    return 1

  @property
  def stacked_gradients(self) -> bool:
    return False

  def zeros(
      self, shape: tuple[int, ...], dtype: jnp.dtype, placement: Placement
  ) -> jax.Array:
    return self.stack(jnp.zeros(shape, dtype))

  def stack(self, x: jax.Array) -> jax.Array:
    # Varying from the start, or a scan over steps would see its type change.
    return self.vary(jnp.asarray(x)[None])

  def run(
      self,
      step: Callable[..., tuple[list[Any], list[Any], Any]],
      gradients: list[jax.Array],
      state: list[jax.Array],
      placements: Sequence[Placement],
      *shared: Any,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    _ = self.count  # an error where the axis is not mapped
    updates, state, info = step(gradients, [x[0] for x in state], *shared)
    return updates, [x[None] for x in state], info

  def gather(self, parts: Sequence[Part]) -> list[jax.Array]:
    return _gather_once(parts, self._gather)

  def sum(self, parts: Sequence[Part]) -> list[jax.Array]:
    return _sum_once(
        parts, lambda x: jax.lax.psum(self.vary(x), self.axis_name)
    )

  def _gather(self, x: jax.Array) -> jax.Array:
    if _varies(x, self.axis_name):
      return jax.lax.all_gather(x, self.axis_name, to='invarying')
    return jax.lax.all_gather(x, self.axis_name)

  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    # What is shared must vary before it is differentiated: jax.grad with
    # respect to replicated parameters would sum the workers' gradients.
    _ = self.count  # an error where the axis is not mapped
    shared = jax.tree.map(self._vary_floats, shared)
    index = jax.lax.axis_index(self.axis_name)
    state = jax.tree.map(lambda x: x[0], state)
    own, state, equal = fun(index, own, state, shared)
    return own, jax.tree.map(lambda x: x[None], state), equal

  def split(self, x: jax.Array) -> jax.Array:
    return x

  def mean(self, x: jax.Array) -> jax.Array:
    return jax.lax.pmean(self.vary(x), self.axis_name)

  def sum_present(
      self, x: jax.Array, present: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    _ = self.count  # an error where the axis is not mapped
    x, present = self.vary(x), self.vary(present)
    total = jnp.where(present, x, jnp.zeros_like(x))
    return jax.lax.psum((total, present.astype(jnp.int32)), self.axis_name)

  def all_finite(self, xs: Sequence[jax.Array]) -> jax.Array:
    finite = [jnp.isfinite(x).all() for x in xs]
    return functools.reduce(jnp.logical_and, finite, jnp.ones((), bool))

  def check_gradient(self, name: str, gradient: jax.Array) -> None:
    if self.checked and not _varies(gradient, self.axis_name):
      raise ValueError(
          f'The gradient of {name} is the same on all workers of axis'
          f' {self.axis_name!r}: it was summed or averaged over them before it'
          ' reached the exchange. Inside shard_map, jax.grad with respect to'
          ' replicated parameters does that. Take gradients with'
          ' demo_optax.value_and_grad, or make the parameters varying first:'
          f" jax.lax.pcast(params, {self.axis_name!r}, to='varying')."
      )

  @property
  def checked(self) -> bool:
    """Whether we are inside a shard_map that tracks what varies."""
    try:
      index = jax.lax.axis_index(self.axis_name)
    except NameError:  # not mapped
      return False
    return _varies(index, self.axis_name)

  def _vary_floats(self, x: jax.Array) -> jax.Array:
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return self.vary(x) if inexact else x

  def vary(self, x: jax.Array) -> jax.Array:
    """`x`, marked as varying over the workers where that is tracked."""
    if not self.checked or _varies(x, self.axis_name):
      return x
    return jax.lax.pcast(x, self.axis_name, to='varying')


_ON_ONE_DEVICE = specs.ParamSpecs(None, {}, '')


def _gather_once(
    parts: Sequence[Part], gather: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
  """Gathers parts `[bytes]` in one buffer, and cuts it `[count, bytes]`."""
  if not parts:
    return []
  ends = np.cumsum([x.size for x, _ in parts])
  gathered = gather(jnp.concatenate([x for x, _ in parts]))
  return jnp.split(gathered, ends[:-1], axis=1)


def _sum_once(
    parts: Sequence[Part], psum: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
  """Sums parts `[length]` in one buffer for every dtype."""
  by_dtype: dict[Any, list[int]] = {}
  for number, (x, _) in enumerate(parts):
    by_dtype.setdefault(x.dtype, []).append(number)
  sums: dict[int, jax.Array] = {}
  for members in by_dtype.values():
    ends = np.cumsum([parts[number][0].size for number in members])
    total = psum(jnp.concatenate([parts[number][0] for number in members]))
    sums.update(zip(members, jnp.split(total, ends[:-1])))
  return [sums[number] for number in range(len(parts))]


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
  """Puts an array where it belongs, also one that each process has alone.

  From one of its own devices, where a checkpoint was restored to, a process
  cannot put an array on those of others; from the host it can.
  """
  alone = isinstance(x, jax.Array) and x.is_fully_addressable
  if not alone or sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return jax.device_put(np.asarray(x), sharding)


@functools.cache
def _zeros_on_mesh(
    mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: jnp.dtype
) -> Callable[[], jax.Array]:
  """Compiled once for all leaves of a shape."""
  sharding = NamedSharding(mesh, spec)
  local = sharding.shard_shape(shape)
  return jax.jit(
      jax.shard_map(
          lambda: jnp.zeros(local, dtype),
          mesh=mesh,
          in_specs=(),
          out_specs=spec,
      )
  )


def _varies(x: jax.Array, axis_name: str) -> bool:
  """Whether `x` is known to vary over a mapped mesh axis."""
  mat = getattr(jax.typeof(x), 'mat', None)  # "manual axis type"
  return axis_name in getattr(mat, 'varying', ())
