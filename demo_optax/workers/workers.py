"""The workers in an exchange, as a value."""

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import chex
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import _checks
from demo_optax._paths import Keys, is_stacked, map_by_path
from demo_optax.numerics import prng
from demo_optax.workers.collectives import Axis, Group, Programs
from demo_optax.workers.param_specs import REPLICATED, ParamSpecs

Tree = TypeVar('Tree')


@dataclasses.dataclass(frozen=True)
class Spec:
  """How an array is laid out over workers and their devices."""

  stacked: bool  # with a leading worker axis; else equal on all workers
  inner: P = P()  # noqa: RUF009  (of its other dimensions, inside a worker)


class Remote(NamedTuple):
  """How a worker that is a separate program finds the others."""

  address: str
  rank: int | None  # None of a program that follows
  keys: str | None


@dataclasses.dataclass(frozen=True, repr=False)
class Workers:
  """The workers in an exchange, made by one of the constructors.

  ==========================  ==========================  ======================
  constructor                 gradients                   for
  ==========================  ==========================  ======================
  `Workers.simulated(n)`      stacked `[n, ...]`          one device: notebooks,
                                                          laptops, tests
  `Workers.on_mesh(mesh, a)`  stacked `[n, ...]`,         several devices or
                              sharded over mesh axis `a`  hosts
  `Workers.remote(address)`   local `[...]`               programs that start
                                                          and end on their own
  `Workers.on_axis(a)`        local `[...]`               a loop of your own in
                                                          shard_map, vmap, pmap
  ==========================  ==========================  ======================

  Attributes:
    kind: the constructor.
    axis_name: the worker axis's name.
    num_workers: how many there are; None if the caller's axis decides.
    mesh: that `on_mesh` or a `remote` worker was given, else None.
    param_specs: how parameters are spread over a worker's devices.
    relay: where the others are, for `remote`, else None.
    stacked_state: whether momentum has a worker axis; `data_parallel` sets it.
    sequential: whether a step runs simulated workers one after another.
  """

  kind: Literal['simulated', 'on_mesh', 'on_axis', 'remote']
  axis_name: str
  num_workers: int | None = None
  mesh: Mesh | None = None
  param_specs: ParamSpecs = REPLICATED
  relay: Remote | None = None
  stacked_state: bool = True
  sequential: bool = False

  @classmethod
  def simulated(
    cls,
    num_workers: int,
    param_specs: chex.ArrayTree | None = None,
    axis_sizes: Mapping[str, int] | None = None,
    *,
    sequential: bool = False,
  ) -> 'Workers':
    """Makes `num_workers` workers on one device, run by `jax.vmap`.

    With `sequential`, a `data_parallel` step runs them one after another
    between exchanges, by `jax.lax.map`: for operations that `jax.vmap` cannot
    map, such as `jax.lax.ragged_dot` or `jax.pure_callback`, and for large
    models. The state has the same bits for the same gradients.

    With `param_specs` as in `on_mesh`, and the sizes that axes inside a worker
    have, in the mesh's order, such as `axis_sizes={'fsdp': 4}`, results and
    states are as on that mesh.
    """
    _checks.check_positive('num_workers', num_workers)
    specs = ParamSpecs.of(param_specs, axis_sizes or {})
    return cls(
      'simulated', 'workers', num_workers, None, specs, sequential=sequential
    )

  @classmethod
  def on_mesh(
    cls,
    mesh: Mesh,
    axis_name: str,
    param_specs: chex.ArrayTree | None = None,
  ) -> 'Workers':
    """Makes a worker at each position along a mesh axis.

    Workers exchange in a `jax.shard_map`. A `data_parallel` step is run by it
    if the mesh has no other axis, and else by `jax.vmap`.

    A worker is all the devices at its position, which replicate the parameters,
    or shard them by `param_specs`. A device exchanges its shard's chunks,
    and its share in what is replicated, with its counterparts in the other
    workers. Gradients and momentum are stacked: sharded over `axis_name`, then
    as the parameters.

    Args:
      mesh: a mesh whose axes are all Auto or all Explicit. On Explicit
        axes parameters must be on the mesh (`device_put`).
      axis_name: the workers' axis; parameters are replicated over it.
      param_specs: how a worker's parameters are sharded over the other axes: a
        tree with `PartitionSpec`s like the parameters, where a spec for a
        subtree holds for all in it and `None` is `P()`, replicated.
        `flax.nnx.get_partition_spec` takes it from a model.

    References:
      Workers with many devices: From et al., `DeToNATION
      <https://arxiv.org/abs/2502.06728>`_ (FlexDeMo).
    """
    if axis_name not in mesh.axis_names:
      raise ValueError(
        f'axis_name must be an axis of the mesh, got {axis_name!r}. Choose one'
        f' of {mesh.axis_names}.'
      )
    if len({*mesh.axis_types}) > 1:
      raise ValueError(
        f'The axes {mesh.axis_names} of the mesh must have one type, got'
        f' {mesh.axis_types}. Make all Auto or all Explicit.'
      )
    # All other axes are inside a worker.
    inner_sizes = dict(mesh.shape)
    del inner_sizes[axis_name]
    specs = ParamSpecs.of(param_specs, inner_sizes)
    return cls('on_mesh', axis_name, mesh.shape[axis_name], mesh, specs)

  @classmethod
  def on_axis(cls, axis_name: str) -> 'Workers':
    """Makes workers along an axis that the caller has mapped.

    For training steps inside `jax.shard_map`, `jax.vmap` or `jax.pmap`.
    Gradients are the worker's own, in the parameters' shapes; momentum has a
    leading axis of 1, which `shard_map` joins by `demo_optax.state_specs`.

    Averaged gradients are refused only inside a checked `shard_map`, where
    `jax.grad` with respect to replicated parameters sums over the workers. Make
    these varying first: `jax.lax.pcast(params, axis_name, to='varying')`.
    """
    _checks.check_type('axis_name', axis_name, str, "'data'")
    return cls('on_axis', axis_name)

  @classmethod
  def remote(
    cls,
    address: str,
    *,
    rank: int | None,
    count: int,
    keys: str | None = None,
    mesh: Mesh | None = None,
    param_specs: chex.ArrayTree | None = None,
  ) -> 'Workers':
    """Makes workers that are separate programs, joined by a relay.

    Each is a JAX program on its own device or mesh, on any platform. In a
    `data_parallel` step it sends its message to the relay
    (`python -m demo_optax.remote`) and receives everyone's. A late worker is
    left out for a round, which costs the others one deadline. A program that
    starts later takes the parameters and the shared state from another worker
    in its first step.

    Batches and results for their rows are the program's own. The momentum has a
    leading axis of 1. Parameters are equal on all workers, to the bit on
    like hardware.

    Args:
      address: the relay's, such as `tcp://relay.example.org:7077`.
      rank: this worker's number, from 0 to `count - 1`; or None, for a
        program that trains nothing (`demo_optax.remote.follow`).
      count: the most workers that there can be. More than needed make programs
        larger, not messages.
      keys: this worker's file from `demo_optax.remote --write-keys`, needed
        beyond loopback.
      mesh: this worker's devices, if there are several, with Auto axes. All
        workers' meshes must have one shape. If the worker has
        several processes, it spans their devices; the first one connects.
      param_specs: how parameters are sharded over them; see `on_mesh`.
    """
    if rank is not None and not 0 <= rank < count:
      raise ValueError(
        f'rank must be from 0 to {count - 1}, for count={count} workers, got'
        f' {rank}. Number the workers from 0, and give None to a program that'
        ' follows them.'
      )
    if re.fullmatch(r'tcp://.+:\d+', address) is None:
      raise ValueError(
        'address must be that of a relay, such as tcp://127.0.0.1:7077, got'
        f' {address!r}. Start one: python -m demo_optax.remote.'
      )
    if importlib.util.find_spec('zmq') is None:
      raise ImportError(
        'Workers.remote must have ZeroMQ, got no module zmq. Install it: pip'
        ' install pyzmq.'
      )
    remote = Remote(address, rank, keys and str(keys))
    inner_sizes = {} if mesh is None else mesh.shape
    if mesh is not None and {*mesh.axis_types} != {AxisType.Auto}:
      raise ValueError(
        f'mesh must have axes of type Auto, got {mesh}. Make it with'
        ' axis_types=(jax.sharding.AxisType.Auto,) * n.'
      )
    specs = ParamSpecs.of(param_specs, inner_sizes)
    return cls('remote', 'workers', count, mesh, specs, remote)

  def __repr__(self) -> str:
    address, rank, _ = self.relay or (None, None, None)
    given = {
      'simulated': f'{self.num_workers}',
      'on_mesh': f'{self.mesh}, {self.axis_name!r}',
      'on_axis': f'{self.axis_name!r}',
      'remote': f'{address!r}, rank={rank}, count={self.num_workers}',
    }[self.kind]
    return f'Workers.{self.kind}({given}{self.param_specs})'

  @property
  def count(self) -> int:
    """How many workers there are (`on_axis`: known inside the map only)."""
    if self.num_workers is not None:
      return self.num_workers
    try:
      return jax.lax.axis_size(self.axis_name)
    except NameError as error:
      raise ValueError(
        f'axis_name must be mapped here, got {self.axis_name!r}. With'
        ' Workers.on_axis, call this inside jax.shard_map, jax.vmap or'
        ' jax.pmap over that axis; for plain jit, use Workers.on_mesh.'
      ) from error

  @property
  def stacked_gradients(self) -> bool:
    """Whether gradients carry a leading worker axis."""
    return self.kind in ('simulated', 'on_mesh')

  @property
  def num_here(self) -> int:
    """How many workers have their arrays here: all, or this one."""
    return self.count if self.stacked_gradients else 1

  @property
  def is_explicit(self) -> bool:
    """Whether array types say how they are sharded."""
    return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

  @property
  def spmd_axis_name(self) -> str | None:
    """The mesh axis along which stacked arrays lead, if there is one."""
    return self.axis_name if self.kind == 'on_mesh' else None

  @property
  def axis(self) -> Axis:
    """The worker axis as one worker's function sees it."""
    return Programs(self.count) if self.relay is not None else self.axis_name

  @property
  def only_gathers(self) -> bool:
    """Whether all messages go to all workers, as through a relay."""
    return self.relay is not None

  @property
  def group(self) -> Group:
    """The workers as one worker's function sees them."""
    return Group(self.axis, self.count, self.param_specs.axes)

  @property
  def bucket_spec(self) -> Spec:
    """The layout for arrays with the shape `bucket_shape`."""
    return Spec(self.stacked_state, self.param_specs.bucket_spec)

  def bucket_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape for an array that has `shape` on every device.

    `[workers, devices, ...]`, without `workers` inside a step, and without
    `devices` where no axes are inside a worker.
    """
    # From what each device has, outwards.
    if self.param_specs.axes:
      shape = (self.param_specs.devices, *shape)
    if self.stacked_state:
      shape = (self.num_here, *shape)
    return shape

  def device_put(self, tree: Tree) -> Tree:
    """Puts `tree` on the workers' mesh, if there is one.

    Parameters, and what ends in a parameter's path in a state, are sharded by
    `param_specs`; all else is replicated. Arrays that are spread over the mesh
    already (the momentum) stay. Without it, the first step moves what was made
    on one device, and the second one compiles again.
    """
    if self.mesh is None:
      return tree

    def move(
      keys: Keys,
      x: jax.Array,
    ) -> jax.Array:
      spec = self.spec(keys, np.shape(x))
      # Momentum is spread, and parameters may be as the user likes.
      if is_on(self.mesh, x) and (spec == P() or not x.is_fully_replicated):
        return x
      return put(x, self.sharding(spec))

    return map_by_path(move, tree)

  def sharding(self, spec: P) -> NamedSharding:
    """Returns where an array with this spec is on the mesh."""
    assert self.mesh is not None
    return NamedSharding(self.mesh, spec)

  def spec(
    self,
    keys: Keys,
    shape: tuple[int, ...],
  ) -> P:
    """Returns the spec for a parameter, or for a leaf in a state."""
    if not is_stacked(keys):
      return self.param_specs.place_state(keys, shape)
    inner = self.param_specs.place_state(keys, shape[1:])
    # The mesh of a worker that is a separate program has no axis of workers.
    return P(self.axis_name if self.relay is None else None, *inner)


def is_on(mesh: Mesh | None, x: object) -> bool:
  """Returns whether an array is on all devices in a mesh."""
  return getattr(getattr(x, 'sharding', None), 'mesh', None) == mesh


def put(x: Any, sharding: NamedSharding) -> Any:
  """Places an array as `jax.device_put` does, without communication.

  A process cannot write to other processes' devices: an array that each has
  alone goes through the host, each process placing its part. For a shape it
  returns the shape with the sharding.
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  is_placed = isinstance(x, jax.Array) and (
    isinstance(x, jax.core.Tracer) or not x.is_fully_addressable
  )
  if is_placed or sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  if prng.is_key_array(x):
    words = put(prng.words(x), sharding)
    return prng.of_words(words, like=x)
  # Each process passes the same values, and places those for its devices.
  host_array = np.asarray(x)
  return jax.make_array_from_callback(
    host_array.shape, sharding, lambda i: host_array[i]
  )
