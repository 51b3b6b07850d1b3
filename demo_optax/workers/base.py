"""Workers: how one worker's function is run for all of them.

A worker may be several devices, which share its one momentum: the axes of the
mesh other than the worker axis shard its parameters (`workers.sharding`).
"""

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import _paths
from demo_optax.numerics import rounding
from demo_optax.workers.collectives import Group
from demo_optax.workers.param_specs import ParamSharding, ParamSpecs


class Spec(NamedTuple):
  """How an array is laid out over workers and their devices.

  Attributes:
    stacked: whether it has a leading worker axis, one part for each worker; if
      not, all workers have the same.
    inner: how its other dimensions are sharded inside a worker.
  """

  stacked: bool
  inner: P = P()


def is_spec(x: Any) -> bool:
  """Returns whether `x` is a `Spec`, a leaf although it is a tuple."""
  return isinstance(x, Spec)


class Workers(abc.ABC):
  """The workers of an exchange. Make them with one of the constructors.

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
    from demo_optax.workers.simulated import Simulated

    name = Simulated.axis_name
    return Simulated(
        num_workers, ParamSpecs(param_specs, axis_sizes or {}, name)
    )

  @staticmethod
  def on_mesh(
      mesh: Mesh, axis_name: str, param_specs: Any = None
  ) -> 'Workers':
    """One worker at each position of a mesh axis, run by `jax.shard_map`.

    A worker is all the devices at its position. By default each of them has all
    parameters; with `param_specs` they shard them. Chunks are cut from each
    device's own shard, and a device exchanges with its counterparts in the
    other workers. Of what several devices of a worker hold alike, each keeps
    the momentum of its share of the chunks and exchanges that; the updates are
    joined inside the worker.

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
    from demo_optax.workers.mesh import OnMesh

    return OnMesh(
        mesh, axis_name, ParamSpecs(param_specs, inner, axis_name)
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
    inside a checked `shard_map`, where `jax.grad` with respect to replicated
    parameters sums over the workers: make them varying first, with
    `jax.lax.pcast(params, axis_name, to='varying')`. Under `vmap`, `pmap` and
    `check_vma=False` averages cannot be seen.

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
    from demo_optax.workers.axis import OnAxis

    return OnAxis(axis_name)

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
  def param_specs(self) -> ParamSpecs:
    """How parameters are spread over the devices of a worker."""
    return _ON_ONE_DEVICE

  @property
  def spmd_axis_name(self) -> str | None:
    """The mesh axis of the leading axis of stacked arrays, if there is one."""
    return None

  @property
  def group(self) -> Group:
    """The workers as the function of `run` sees them."""
    return Group(self.axis_name, self.count, self.param_specs.axis_sizes)

  @property
  def bucket_spec(self) -> Spec:
    """The layout of arrays `[workers, devices, ...]` of all devices.

    Without axes inside a worker they are `[workers, ...]`.
    """
    return Spec(True, self.param_specs.bucket_spec)

  def bucket_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of what has `shape` on every device of a worker."""
    inner = (self.param_specs.devices,) if self.param_specs.axes else ()
    return (self.stacked_size, *inner, *shape)

  def as_given(
      self, x: jax.Array, placed: ParamSharding
  ) -> jax.Array:
    """Returns an update whose type is that of its parameter."""
    del placed
    return x

  def bucket_zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros `bucket_shape(shape)`, allocated sharded."""
    return jnp.zeros(self.bucket_shape(shape), dtype)

  @abc.abstractmethod
  def stack(self, x: jax.Array) -> jax.Array:
    """Returns a copy of `x` for every worker, `[stacked_size, *x.shape]`."""

  def first(self, x: jax.Array) -> jax.Array:
    """Returns worker 0's part of a stacked array, for all."""
    return x[0]

  @abc.abstractmethod
  def run(
      self,
      fun: Callable[..., Any],
      args: tuple[Any, ...],
      in_specs: tuple[Any, ...],
      out_specs: Any,
  ) -> Any:
    """Runs one worker's function for all workers; it may communicate.

    Args:
      fun: called with what one device has of `args`, without a worker axis.
        What it returns for specs that are not `stacked` must be equal on all
        workers, as what `group` returns is.
      args: trees of arrays.
      in_specs: a tree of `Spec` for each of them.
      out_specs: a tree of `Spec` for what `fun` returns.

    Returns:
      What `fun` returned, laid out so.
    """

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
  def mean(self, x: jax.Array) -> jax.Array:
    """Returns the mean over the workers of what is laid out as gradients."""

  @abc.abstractmethod
  def sum_present(
      self, x: jax.Array, present: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the sum over the workers that are present, and their number.

    Args:
      x: the workers' arrays, laid out as gradients are.
      present: bool, one for each worker, laid out as gradients are.

    Returns:
      The sum, without a worker axis, and int32 `[]`.
    """

  def mean_present(
      self, x: jax.Array, present: jax.Array, otherwise: jax.Array | float = 0
  ) -> jax.Array:
    """Returns the mean over those present; `otherwise` if nobody is."""
    total, count = self.sum_present(x, present)
    # By a product: some programs make one of the division.
    mean = total * rounding.exact_reciprocal(count, self.count, total.dtype)
    return jnp.where(count > 0, mean, otherwise)

  @abc.abstractmethod
  def all_finite(self, xs: Sequence[jax.Array]) -> jax.Array:
    """Returns for every worker whether all its arrays are finite."""

  def device_put(self, tree: Any) -> Any:
    """Puts `tree` on the devices of the workers' mesh, before the first step.

    Parameters, and what ends in a parameter's path in a state, go where
    `param_specs` says; all else goes everywhere. Arrays that are spread over
    the mesh already (the momentum) stay where they are. Without a mesh it is
    `tree` unchanged.

    Args:
      tree: parameters, an optimizer state, or an `nnx.State`.

    Returns:
      The tree. What was made on one device moves in the first step at the
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
      keys: Sequence[_paths.Keys],
      roles: Sequence[str],
      axes: Sequence[int],
      leaves: Sequence[Any],
  ) -> list[Any]:
    """Returns the arrays of a step's arguments where they belong.

    Args:
      keys: their paths.
      roles: 'batch', 'stacked', or anything else for what workers share.
      axes: of the rows of each batch.
      leaves: the arrays; those that are traced are returned as they are.
    """
    del keys, roles, axes
    return list(leaves)

  def hold(
      self,
      keys: Sequence[_paths.Keys],
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

  def reshard(
      self, leaves: Sequence[Any], specs: Sequence[Any]
  ) -> list[Any]:
    """Returns arrays laid out as `jax.shard_map` with these specs wants them.

    Args:
      leaves: the arrays, traced.
      specs: a `PartitionSpec` for each.
    """
    del specs
    return list(leaves)

  def split(self, x: jax.Array) -> jax.Array:
    """Returns a batch `[count * b, ...]` as rows `[count, b, ...]`."""
    raise NotImplementedError

  def join(self, x: jax.Array) -> jax.Array:
    """Returns rows `[count, b, ...]` as a batch: undoes `split`."""
    raise NotImplementedError


_ON_ONE_DEVICE = ParamSpecs(None, {}, '')
