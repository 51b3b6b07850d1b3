"""Workers along an axis of a mesh."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import _paths
from demo_optax.workers.base import Spec, is_spec
from demo_optax.workers.param_specs import ParamSharding, ParamSpecs
from demo_optax.workers.stacked import Stacked


class OnMesh(Stacked):
  """Workers along a mesh axis."""

  mesh: Mesh

  def __init__(
      self, mesh: Mesh, axis_name: str, param_specs: ParamSpecs
  ):
    self.mesh, self.axis_name, self._param_specs = mesh, axis_name, param_specs
    self._explicit = AxisType.Explicit in mesh.axis_types

  def __repr__(self) -> str:
    sharded = repr(self.param_specs)
    return f'Workers.on_mesh({self.mesh}, {self.axis_name!r}{sharded})'

  @property
  def param_specs(self) -> ParamSpecs:
    return self._param_specs

  @property
  def count(self) -> int:
    return self.mesh.shape[self.axis_name]

  @property
  def spmd_axis_name(self) -> str | None:
    return self.axis_name

  def bucket_zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # jnp.zeros(device=sharding) would do under no jit only: inside one it lands
    # on a single device, all workers' momentum together.
    spec = P(self.axis_name, *self._param_specs.bucket_spec)
    return _zeros_on_mesh(self.mesh, spec, self.bucket_shape(shape), dtype)()

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
      fun: Callable[..., Any],
      args: tuple[Any, ...],
      in_specs: tuple[Any, ...],
      out_specs: Any,
  ) -> Any:
    flat, treedef = jax.tree.flatten(args)
    ins = jax.tree.leaves(in_specs, is_leaf=is_spec)
    outs, out_treedef = jax.tree.flatten(out_specs, is_leaf=is_spec)

    def local(*flat: Any) -> list[Any]:
      own = [x[0] if s.stacked else x for x, s in zip(flat, ins)]
      found = out_treedef.flatten_up_to(fun(*treedef.unflatten(own)))
      return [x[None] if s.stacked else x for x, s in zip(found, outs)]

    mapped = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=tuple(map(self._partition_spec, ins)),
        out_specs=list(map(self._partition_spec, outs)),
    )
    placed = [
        self._reshard(x, self._partition_spec(s)) if s.stacked else x
        for x, s in zip(flat, ins)
    ]
    return out_treedef.unflatten(mapped(*placed))

  def _partition_spec(self, spec: Spec) -> P:
    return P(self.axis_name, *spec.inner) if spec.stacked else spec.inner

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
    spec = P((self.axis_name, *inner), *rest)
    return jax.lax.reshape(
        x, shape, out_sharding=NamedSharding(self.mesh, spec)
    )

  def put(
      self,
      keys: Sequence[_paths.Keys],
      roles: Sequence[str],
      axes: Sequence[int],
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
        # Where types have specs, P() and P(None) are two, and results of a step
        # have the longer one: it would be compiled for both.
        target = NamedSharding(self.mesh, _full(x.sharding.spec, x.ndim))
        if not self._explicit or x.sharding == target:
          return x
      return _put(x, target)

    specs = [
        P(*(None,) * axis, self.axis_name) if role == 'batch' else spec
        for spec, role, axis in zip(
            self._leaf_specs(keys, roles, leaves), roles, axes
        )
    ]
    return [move(x, r, s) for x, r, s in zip(leaves, roles, specs)]

  def reshard(
      self, leaves: Sequence[Any], specs: Sequence[Any]
  ) -> list[Any]:
    return [self._reshard(x, s) for x, s in zip(leaves, specs)]

  def hold(
      self,
      keys: Sequence[_paths.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[Any]:
    if self._explicit:  # types say it
      return list(leaves)

    def hold(x: jax.Array, role: str, spec: P) -> jax.Array:
      if role == 'output' and x.ndim:
        return x
      return jax.lax.with_sharding_constraint(
          x, NamedSharding(self.mesh, spec)
      )

    specs = self._leaf_specs(keys, roles, leaves)
    return [hold(x, r, s) for x, r, s in zip(leaves, roles, specs)]

  def _leaf_specs(
      self,
      keys: Sequence[_paths.Keys],
      roles: Sequence[str],
      leaves: Sequence[Any],
  ) -> list[P]:
    def spec(k: _paths.Keys, role: str, x: Any) -> P:
      if role == 'stacked':
        within = self._param_specs.place_state(k, np.shape(x)[1:])
        return P(self.axis_name, *within)
      return self._param_specs.place_state(k, np.shape(x))

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
    """Returns where parameters, or a state, belong: specs by path and shape."""

    def spec_of(path: _paths.Path, x: Any) -> P:
      keys, shape = _paths.path_keys(path), jnp.shape(x)
      if _paths.is_stacked(keys):
        inner = self._param_specs.place_state(keys, shape[1:])
        return P(self.axis_name, *inner)
      return self._param_specs.place_state(keys, shape)

    return jax.tree_util.tree_map_with_path(spec_of, tree)

  def place(self, x: jax.Array) -> jax.Array:
    """Returns `x [count, ...]`, each worker's part at the worker."""
    if self._explicit:
      old = jax.typeof(x).sharding.spec
      return self._reshard(x, P(self.axis_name, *old[1:]))
    free = [P.UNCONSTRAINED] * (x.ndim - 1)
    sharding = NamedSharding(self.mesh, P(self.axis_name, *free))
    return jax.lax.with_sharding_constraint(x, sharding)

  def as_given(
      self, x: jax.Array, placed: ParamSharding
  ) -> jax.Array:
    """Returns an update whose type is that of its parameter."""
    return x if placed.given == placed.spec else self._reshard(x, placed.given)

  def _reshard(self, x: jax.Array, spec: P) -> jax.Array:
    """Reshards `x` on Explicit axes; on Auto axes `shard_map` does it."""
    if not self._explicit:
      return x
    return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))


def _put(x: Any, sharding: NamedSharding) -> Any:
  """Places an array as `jax.device_put` does, without communication.

  A process cannot write to the devices of others: an array that each process
  has alone goes through the host, each process placing its part. Of a shape it
  returns the shape with the sharding.
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  there = isinstance(x, jax.Array) and (
      isinstance(x, jax.core.Tracer) or not x.is_fully_addressable
  )
  if there or sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  host = np.asarray(x)
  return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])


def _full(spec: P, rank: int) -> P:
  """Returns the spec with an entry for every dimension."""
  return P(*spec, *(None,) * (rank - len(spec)))


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
