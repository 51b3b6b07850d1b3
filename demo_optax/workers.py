"""Workers: who takes part, and how one worker's function is run for all.

This is the only module that knows `vmap`, `shard_map` and collectives. It
knows nothing of compression.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


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

  Example:
    >>> import demo_optax
    >>> demo_optax.Workers.simulated(4)
    Workers.simulated(4)
  """

  axis_name: str

  def __eq__(self, other: object) -> bool:
    return type(self) is type(other) and vars(self) == vars(other)

  def __hash__(self) -> int:
    return hash((type(self), *vars(self).values()))

  @staticmethod
  def simulated(num_workers: int) -> 'Workers':
    """`num_workers` workers on one device, run by `jax.vmap`.

    Args:
      num_workers: how many, at least 1.

    Returns:
      The workers. Gradients and momentum are stacked, `[num_workers, ...]`.

    Raises:
      ValueError: `num_workers` is below 1.
      TypeError: `num_workers` is not an integer.

    Example:
      >>> import demo_optax
      >>> demo_optax.Workers.simulated(2).count
      2
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
      raise TypeError(f'num_workers={num_workers!r} must be an integer.')
    if num_workers < 1:
      raise ValueError(f'num_workers={num_workers} must be at least 1.')
    return _Simulated(num_workers)

  @staticmethod
  def on_mesh(mesh: Mesh, axis_name: str) -> 'Workers':
    """One worker at each position of a mesh axis, run by `jax.shard_map`.

    Args:
      mesh: a mesh with axes of type Auto or Explicit.
      axis_name: the axis along which the workers stand. Parameters are
        replicated over it; over the mesh's other axes everything is. On an
        axis of type Explicit, parameters must be on the mesh (`replicate`).

    Returns:
      The workers. Gradients and momentum are stacked, one per worker, and
      sharded over `axis_name`.

    Raises:
      ValueError: the mesh has no such axis.

    Example:
      >>> import demo_optax, jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ('data',))
      >>> workers = demo_optax.Workers.on_mesh(mesh, 'data')
      >>> workers.count == jax.device_count()
      True
    """
    if axis_name not in mesh.axis_names:
      raise ValueError(
          f'The mesh has no axis {axis_name!r}; its axes are'
          f' {mesh.axis_names}.'
      )
    return _OnMesh(mesh, axis_name)

  @staticmethod
  def on_axis(axis_name: str) -> 'Workers':
    """The workers of an axis that the caller has mapped.

    For training steps written inside `jax.shard_map` (with `check_vma` on or
    off), `jax.vmap` or `jax.pmap`. Gradients are the worker's own, in the
    parameters' shapes; momentum has a leading axis of 1, so that
    `P(axis_name)`, as given by `demo_optax.state_specs`, carries the stacked
    layout of the other two through `shard_map`.

    Args:
      axis_name: name of the mapped axis.

    Returns:
      The workers.

    Gradients that were averaged before are refused where that can be seen:
    inside a checked `shard_map`. Under `vmap`, `pmap` and `check_vma=False` it
    cannot: take gradients with `demo_optax.value_and_grad`.

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

  @abc.abstractmethod
  def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Zeros `[stacked_size, *shape]`, each worker's at its place from birth."""

  @abc.abstractmethod
  def stack(self, x: jax.Array) -> jax.Array:
    """A copy of `x` for every worker, `[stacked_size, *x.shape]`."""

  @abc.abstractmethod
  def run(
      self, step: Callable[..., tuple[Any, Any]], gradients: Any, state: Any
  ) -> tuple[Any, Any]:
    """Runs one worker's `step` for all workers.

    Args:
      step: `(gradients, state) -> (shared, state)`, everything without the
        worker axis. `shared` must be equal on all workers, which it is if it
        depends on nothing but what `gather` returned.
      gradients: the workers' gradients.
      state: a tree of stacked arrays.

    Returns:
      `shared`, without a worker axis, and the new stacked state.
    """

  @abc.abstractmethod
  def gather(self, x: jax.Array) -> jax.Array:
    """All workers' `x`, `[count, *x.shape]`. Call it inside `step`."""

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

  def replicate(self, tree: Any) -> Any:
    """`tree` on all devices of the workers' mesh, before the first step.

    Arrays that are spread over the mesh already (the momentum) stay where they
    are. Without a mesh it is `tree` as it is.

    Args:
      tree: parameters, an optimizer state, or an `nnx.State`.

    Returns:
      The tree. What is born on one device moves in the first step at the
      latest; moved before, the second step needs no compilation of its own.

    Example:
      >>> import demo_optax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ('data',))
      >>> workers = demo_optax.Workers.on_mesh(mesh, 'data')
      >>> params = workers.replicate({'w': jnp.ones(3)})
      >>> params['w'].is_fully_replicated
      True
    """
    return tree

  def check_gradient(self, name: str, gradient: jax.Array) -> None:  # noqa: B027
    """Raises if a gradient can be seen not to be one worker's own."""


class _Stacked(Workers):
  """Gradients carry the worker axis in front."""

  _spmd_axis_name: str | None = None

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
        spmd_axis_name=self._spmd_axis_name,
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
    finite = [jnp.isfinite(x).reshape(self.count, -1).all(axis=1) for x in xs]
    return functools.reduce(jnp.logical_and, finite, self.place(everyone))

  def place(self, x: jax.Array) -> jax.Array:
    """Puts each worker's part of a stacked array where the worker is."""
    return x


class _Simulated(_Stacked):
  """Workers on one device."""

  axis_name = 'workers'

  def __init__(self, num_workers: int):
    self._count = num_workers

  def __repr__(self) -> str:
    return f'Workers.simulated({self._count})'

  @property
  def count(self) -> int:
    return self._count

  def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.zeros((self.count, *shape), dtype)

  def stack(self, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (self.count, *jnp.shape(x)))

  def run(
      self, step: Callable[..., tuple[Any, Any]], gradients: Any, state: Any
  ) -> tuple[Any, Any]:
    # out_axes=None holds because what was gathered is the same for all: merging
    # is done once, not once per worker.
    mapped = jax.vmap(
        step,
        out_axes=(None, 0),
        axis_name=self.axis_name,
        axis_size=self.count,
    )
    return mapped(gradients, state)

  def gather(self, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, self.axis_name)


class _OnMesh(_Stacked):
  """Workers along a mesh axis."""

  def __init__(self, mesh: Mesh, axis_name: str):
    self.mesh, self.axis_name = mesh, axis_name
    self._spmd_axis_name = axis_name
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    self._explicit = types[axis_name] == AxisType.Explicit
    self._sharding = NamedSharding(mesh, P(axis_name))

  def __repr__(self) -> str:
    return f'Workers.on_mesh({self.mesh}, {self.axis_name!r})'

  @property
  def count(self) -> int:
    return self.mesh.shape[self.axis_name]

  def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    # jnp.zeros(device=sharding) would do under no jit only: inside one it lands
    # on a single device, all workers' momentum together.
    return _zeros_on_mesh(self.mesh, self.axis_name, shape, dtype)()

  def stack(self, x: jax.Array) -> jax.Array:
    copied = jax.shard_map(
        lambda x: x[None],
        mesh=self.mesh,
        in_specs=P(),
        out_specs=P(self.axis_name),
    )
    return jax.jit(copied)(x)

  def run(
      self, step: Callable[..., tuple[Any, Any]], gradients: Any, state: Any
  ) -> tuple[Any, Any]:
    def local_step(gradients: Any, state: Any) -> tuple[Any, Any]:
      shared, state = step(*jax.tree.map(lambda x: x[0], (gradients, state)))
      return shared, jax.tree.map(lambda x: x[None], state)

    mapped = jax.shard_map(
        local_step,
        mesh=self.mesh,
        in_specs=P(self.axis_name),
        out_specs=(P(), P(self.axis_name)),
    )
    return mapped(*jax.tree.map(self.place, (gradients, state)))

  def gather(self, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, self.axis_name, to='invarying')

  def map(
      self,
      fun: Callable[..., tuple[Any, Any, Any]],
      own: Any,
      state: Any,
      shared: Any,
  ) -> tuple[Any, Any, Any]:
    # Layers may look for the mesh in the context, which users need not set.
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      return super().map(fun, own, state, shared)

  def split(self, x: jax.Array) -> jax.Array:
    shape = (self.count, x.shape[0] // self.count, *x.shape[1:])
    if self._explicit:
      x = jax.sharding.reshard(x, self._sharding)
      return jax.lax.reshape(x, shape, out_sharding=self._sharding)
    return self.place(x.reshape(shape))

  def replicate(self, tree: Any) -> Any:
    everywhere = NamedSharding(self.mesh, P())

    def move(x: Any) -> Any:
      if getattr(getattr(x, 'sharding', None), 'mesh', None) == self.mesh:
        return x
      return jax.device_put(x, everywhere)

    return jax.tree.map(move, tree)

  def place(self, x: jax.Array) -> jax.Array:
    if self._explicit:
      return jax.sharding.reshard(x, self._sharding)
    free = [P.UNCONSTRAINED] * (x.ndim - 1)
    sharding = NamedSharding(self.mesh, P(self.axis_name, *free))
    return jax.lax.with_sharding_constraint(x, sharding)


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

  def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return self.stack(jnp.zeros(shape, dtype))

  def stack(self, x: jax.Array) -> jax.Array:
    # Varying from the start, or a scan over steps would see its type change.
    return self.vary(jnp.asarray(x)[None])

  def run(
      self, step: Callable[..., tuple[Any, Any]], gradients: Any, state: Any
  ) -> tuple[Any, Any]:
    _ = self.count  # an error where the axis is not mapped
    shared, state = step(gradients, jax.tree.map(lambda x: x[0], state))
    return shared, jax.tree.map(lambda x: x[None], state)

  def gather(self, x: jax.Array) -> jax.Array:
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


@functools.cache
def _zeros_on_mesh(
    mesh: Mesh, axis_name: str, shape: tuple[int, ...], dtype: jnp.dtype
) -> Callable[[], jax.Array]:
  """Compiled once for all leaves of a shape."""
  return jax.jit(
      jax.shard_map(
          lambda: jnp.zeros((1, *shape), dtype),
          mesh=mesh,
          in_specs=(),
          out_specs=P(axis_name),
      )
  )


def _varies(x: jax.Array, axis_name: str) -> bool:
  """Whether `x` is known to vary over a mapped mesh axis."""
  mat = getattr(jax.typeof(x), 'mat', None)  # "manual axis type"
  return axis_name in getattr(mat, 'varying', ())
