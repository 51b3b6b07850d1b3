"""Reads optimizer states: partition specs, metrics, momentum leaf by leaf.

States are searched by path, not by type, since Flax NNX stores them without
their types: what has a leading worker axis lies under `worker_stacked`, and
there the momentum of an exchange under `momentum`, by buckets.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import _tree
from demo_optax._paths import (
  STACKED,
  Keys,
  Path,
  dotted,
  is_bucket,
  is_stacked,
  path_keys,
)
from demo_optax.compressors import FROZEN, chunking
from demo_optax.compressors.compressor import CompressorTree, per_leaf
from demo_optax.compressors.layout import Layout, make_layout
from demo_optax.demo import check_digest, describe_leaf, layouts_in
from demo_optax.workers import Spec, Workers

__all__ = [
  'exchange_info',
  'momentum',
  'state_specs',
  'with_momentum',
]


def state_specs(
    tx: optax.GradientTransformation, params: chex.ArrayTree, workers: Workers
) -> chex.ArrayTree:
  """Returns the partition specs of a whole optimizer state.

  Stacked leaves (momentum, states of `per_worker`) get `P(axis_name)`, all
  others `P()` (arrays `[workers, ...]` and `[...]`); behind that, what belongs
  to a parameter (which is known by its path and shape) is sharded as `workers`
  shards the parameter. For `in_specs` and `out_specs` of your own
  `jax.shard_map`, for `out_shardings` of a jitted `tx.init`, and for shardings
  of restored checkpoints.

  Args:
    tx: any optax transformation with an exchange somewhere in it.
    params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
    workers: the workers of the exchange.

  Returns:
    A tree like `tx.init(params)` with a `PartitionSpec` for every leaf.

  Raises:
    TypeError: complex leaves.
    ValueError: a parameter that does not fit the specs of `workers`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.on_axis('data')
    >>> tx = demo_optax.scale_by_demo(workers=workers)
    >>> specs = demo_optax.state_specs(tx, {'w': jnp.zeros((4, 4))}, workers)
    >>> {k: tuple(s) for k, s in specs.worker_stacked.momentum.items()}
    {'bucket_000_dense': ('data',)}

  References:
    Layout of the decoupled momentum of Peng et al.
    <https://arxiv.org/abs/2411.19870>, which is one per worker.
  """
  shapes = jax.eval_shape(tx.init, params)
  inside = _param_specs(params, workers)

  def spec(path: Path, leaf: Any) -> P:
    keys = path_keys(path)
    if is_bucket(keys):
      return P(workers.axis_name, *workers.param_specs.bucket_spec)
    lead = 1 if is_stacked(keys) else 0
    owners = (inside.get(keys[start:]) for start in range(len(keys) + 1))
    shape = leaf.shape[lead:]
    within = next((s for o in owners if o for h, s in [o] if h == shape), P())
    return P(workers.axis_name, *within) if lead else within

  return jax.tree_util.tree_map_with_path(spec, shapes)


def _param_specs(
    params: chex.ArrayTree, workers: Workers
) -> dict[Keys, tuple[tuple[int, ...], P]]:
  """Returns every parameter's shape and its spec inside a worker."""
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  place = workers.param_specs.place
  return {
      path_keys(path): (np.shape(x), place(path, np.shape(x)).spec)
      for path, x in flat
      if _tree.is_exchanged(x)
  }


def momentum(
    opt_state: chex.ArrayTree,
    params: chex.ArrayTree,
    compressor: CompressorTree,
    workers: Workers,
) -> chex.ArrayTree:
  r"""Returns every worker's momentum in parameter space, :math:`m_i`.

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`:
      chained, partitioned, masked, or `nnx.Optimizer.opt_state`.
    params: the parameters (of an `nnx.Optimizer`: `nnx.state(model, wrt)`).
    compressor: the compressor that the state was made for, or a tree of them,
      as for `plan`.
    workers: the workers of the exchange.

  Returns:
    A tree like `params`: per leaf `[workers, *shape]` (`Workers.on_axis`:
    `[1, *shape]`) in the momentum's dtype, and `None` for leaves without
    momentum.

  Raises:
    ValueError: there is no momentum in `opt_state`, or a leaf's does not fit
      `params`, `compressor` or `workers`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> compressor = demo_optax.dct_topk(topk=1)
    >>> tx = demo_optax.scale_by_demo(compressor, workers=workers)
    >>> params = jnp.zeros((2, 2))
    >>> gradients = jnp.array([[[1., 1.], [1., 2.]], [[1., 0.], [0., 1.]]])
    >>> _, state = tx.update(gradients, tx.init(params))
    >>> m = demo_optax.state.momentum(state, params, compressor, workers)
    >>> print(m.round(2))
    [[[-0.25 -0.25]
      [-0.25  0.75]]
     [[ 0.5  -0.5 ]
      [-0.5   0.5 ]]]

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1.
  """
  buckets, digest, made_for = _momentum_of(opt_state)
  layout = layout_of(params, compressor, workers, made_for)
  check_momentum(buckets, digest, made_for, layout, workers)

  def decode(i: int, c: jax.Array) -> jax.Array:
    leaf = layout.leaves[i]
    basis = layout.buckets[leaf.bucket].basis
    return chunking.from_coefficients(c, leaf.grid, basis)

  found = momentum_to_leaves(layout, workers, buckets, decode)
  in_order = [found.get(i) for i in range(len(layout.leaves))]
  return jax.tree.structure(params).unflatten(in_order)


def with_momentum(
    opt_state: chex.ArrayTree,
    moments: chex.ArrayTree,
    compressor: CompressorTree,
    workers: Workers,
) -> chex.ArrayTree:
  r"""Replaces the momentum in `opt_state` by one given in parameter space.

  Undoes `momentum`: there and back it is the same to rounding. With a state
  that was made for another compressor, it takes momentum from one chunk size to
  another. Coefficients :math:`T m_i` are what a state holds of :math:`m_i`.

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`.
    moments: a tree like the parameters: per leaf `[workers, *shape]`, and
      `None` for leaves without momentum.
    compressor: the compressor that `opt_state` was made for, or a tree of them,
      as for `plan`.
    workers: the workers of the exchange.

  Returns:
    A tree like `opt_state`. Only the momentum differs; its dtype is that of
    `opt_state`. What owners of chunks owe (`update_residual`) is no momentum,
    and is that of `opt_state`.

  Raises:
    ValueError: there is no momentum in `opt_state`; one of its leaves is not in
      `moments`, or does not fit there.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> old = demo_optax.dct_topk(chunk_size=4, topk=1)
    >>> new = demo_optax.dct_topk(chunk_size=2, topk=1)
    >>> params = jnp.zeros((4, 4))
    >>> state = demo_optax.scale_by_demo(old, workers=workers).init(params)
    >>> moments = demo_optax.state.momentum(state, params, old, workers)
    >>> state = demo_optax.scale_by_demo(new, workers=workers).init(params)
    >>> state = demo_optax.state.with_momentum(state, moments, new, workers)
    >>> {k: x.shape for k, x in state.worker_stacked.momentum.items()}
    {'bucket_000_2x2': (2, 4, 4)}

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1.
  """
  buckets, digest, made_for = _momentum_of(opt_state)
  flat, treedef = jax.tree_util.tree_flatten_with_path(
      moments, is_leaf=lambda x: x is None
  )
  dtypes = {
      leaf.keys: leaf.dtype
      for leaf in (made_for.leaves if made_for else ())
      if leaf.bucket >= 0
  }
  like = [
      # Nothing is exchanged of integers.
      np.zeros((), np.int32) if x is None
      else jax.ShapeDtypeStruct(
          x.shape[1:], dtypes.get(path_keys(path), x.dtype)
      )
      for path, x in flat
  ]
  codes = per_leaf(compressor, treedef.unflatten(like))
  for (path, x) in flat:
    if x is not None and x.shape[:1] != (workers.stacked_size,):
      raise ValueError(
          f'The momentum of {_tree.leaf_name(path)} has shape {x.shape}, but'
          f' {workers} needs ({workers.stacked_size}, ...): one per worker.'
      )
  layout = make_layout(
      [
          describe_leaf(path, np.shape(x), x, workers.param_specs)
          for (path, _), x in zip(flat, like)
      ],
      codes,
      workers.param_specs.axis_sizes,
  )
  check_momentum(buckets, digest, made_for, layout, workers)

  def encode(i: int, m: jax.Array) -> jax.Array:
    leaf = layout.leaves[i]
    bucket = layout.buckets[leaf.bucket]
    m = m.astype(bucket.format.dtype)
    return chunking.to_coefficients(m, leaf.grid, bucket.basis)

  leaves = {i: x for i, (_, x) in enumerate(flat)}
  new = momentum_from_leaves(layout, workers, leaves, encode)
  return replace_momentum(opt_state, new)


def exchange_info(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
  r"""Returns the metrics of the last exchange, for logs.

  With momentum :math:`m_i` before it, what was sent :math:`q_i` and what stayed
  :math:`m_i'` of the :math:`N` workers that took part:

  .. math::
    \text{sent\_energy} = \frac{\sum_i \|q_i\|^2}{\sum_i \|m_i\|^2}, \qquad
    \text{residual\_norm} = \sqrt{\tfrac1N \textstyle\sum_i \|m_i'\|^2}

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`:
      chained, partitioned, masked, or `nnx.Optimizer.opt_state`.

  Returns:
    The `metrics` of `DeMoState`, by name, all of shape `[]`: `'num_excluded'`
    (int32), `'sent_energy'`, `'residual_norm'` and `'mean_senders'` (float32).

  Raises:
    ValueError: there is no exchange in `opt_state`.

  Warns of momentum that is replicated over the devices of its mesh.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.demo(1e-3, workers=workers)
    >>> params = jnp.ones((8, 8))
    >>> _, state = tx.update(jnp.ones((2, 8, 8)), tx.init(params), params)
    >>> float(demo_optax.exchange_info(state)['mean_senders'])
    2.0

  References:
    Of the momentum of Peng et al. <https://arxiv.org/abs/2411.19870>,
    Algorithm 1.
  """
  warn_if_replicated(opt_state)
  flat = jax.tree_util.tree_flatten_with_path(opt_state)[0]
  state = {path_keys(path): x for path, x in flat}
  root = _root_of(state)
  return {
      k[-1]: x for k, x in state.items() if k[:-1] == (*root, 'metrics')
  }


def _root_of(paths: Iterable[Keys]) -> Keys:
  """Returns the path of the first exchange that has something to exchange.

  Of an idle one nothing is known; it is returned if there is no other.
  """
  paths = list(paths)
  roots = [k[:-2] for k in paths if k[-2:] == _MARKER]
  if not roots:
    raise ValueError(_NO_STATE)
  busy = {k[: k.index(STACKED)] for k in paths if STACKED in k}
  return next((root for root in roots if root in busy), roots[0])


def warn_if_replicated(
    opt_state: chex.ArrayTree, axis_name: str | None = None
) -> None:
  """Warns of stacked arrays that every device of their mesh has all of.

  They take the memory of all workers on each device, and are gathered in every
  step. Nothing else shows it: losses are the same.

  Args:
    opt_state: any optimizer state; what is traced is not looked at.
    axis_name: the worker axis; by default any axis of the mesh will do.
  """
  for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
    keys = path_keys(path)
    if not is_stacked(keys) or not _is_replicated(x, axis_name):
      continue
    warnings.warn(
        f'{dotted(keys)} is one per worker, but all of it is on every device,'
        ' and a step of your own would gather it: its sharding'
        f' {x.sharding.spec} does not name the worker axis. data_parallel puts'
        ' it right at the next call; for shardings of your own, as from'
        ' nn.get_sharding or nnx.get_partition_spec, take those of'
        ' demo_optax.state_specs(tx, params, workers) for the optimizer state.',
        stacklevel=3,
    )
    return  # one says it


def _is_replicated(x: Any, axis_name: str | None) -> bool:
  if isinstance(x, jax.core.Tracer):
    return False
  sharding = getattr(x, 'sharding', None)
  if not isinstance(sharding, NamedSharding) or len(x) == 1:
    return False
  size = sharding.mesh.shape.get(axis_name, 1) if axis_name else (
      sharding.mesh.size
  )
  first = sharding.spec[0] if sharding.spec else None
  names = first if isinstance(first, tuple) else (first,)
  there = axis_name in names if axis_name else first is not None
  return size > 1 and not there


# Buckets and leaves -----------------------------------------------------------

_MARKER = ('metrics', 'num_excluded')
_NO_STATE = 'There is no state of demo_optax.scale_by_demo in it.'


def layout_of(
    params: chex.ArrayTree,
    compressor: CompressorTree,
    workers: Workers,
    made_for: Layout | None = None,
) -> Layout:
  """Returns the layout of the momentum of `params`.

  Args:
    params: the parameters.
    compressor: what is sent of them.
    workers: the workers of the exchange.
    made_for: the layout of a state that may hold the momentum of some of them
      only, as that of `optax.masked` does; None if all have one.
  """
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  codes = per_leaf(compressor, params)
  known = None
  if made_for is not None:
    known = {leaf.keys for leaf in made_for.leaves}
  return make_layout(
      [
          describe_leaf(path, np.shape(x), x, workers.param_specs)
          for path, x in flat
      ],
      [
          code if known is None or path_keys(path) in known else FROZEN
          for code, (path, _) in zip(codes, flat)
      ],
      workers.param_specs.axis_sizes,
  )


def _momentum_of(
    opt_state: chex.ArrayTree,
) -> tuple[dict[str, Any], Any, Layout | None]:
  """Returns a state's momentum, by buckets, its digest, and its layout."""
  buckets: dict[str, Any] = {}
  digest, roots = None, 0
  made_for, layouts = None, layouts_in(opt_state)
  for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
    keys = path_keys(path)
    roots += keys[-2:] == _MARKER
    if is_momentum(keys):
      if keys[-1] in buckets:
        raise ValueError(
            'There are several states of demo_optax.scale_by_demo in it: give'
            ' one of them.'
        )
      buckets[keys[-1]] = x
      made_for = layouts.get(keys[:-3])
    elif keys[-2:] == ('layout', 'digest'):
      digest = x
  if not roots:
    raise ValueError(_NO_STATE)
  return buckets, digest, made_for


def is_momentum(keys: Keys) -> bool:
  """Returns whether a path is that of a bucket of momentum."""
  return is_bucket(keys) and keys[-2] == 'momentum'


def replace_momentum(
    opt_state: chex.ArrayTree, buckets: dict[str, Any]
) -> chex.ArrayTree:
  """Returns a state with other momentum, by buckets."""

  def replace(path: Path, x: Any) -> Any:
    keys = path_keys(path)
    return buckets[keys[-1]] if is_momentum(keys) else x

  return jax.tree_util.tree_map_with_path(replace, opt_state)


def check_momentum(
    buckets: dict[str, Any],
    digest: Any,
    made_for: Layout | None,
    layout: Layout,
    workers: Workers,
) -> None:
  """Raises unless momentum is of this layout and of these workers.

  Args:
    buckets: the momentum.
    digest: of the layout that it has; None if it is not known.
    made_for: the layout that the state was made for, if it is known.
    layout: that it is to have.
    workers: the workers of the exchange.
  """
  if made_for is not None:
    of_state, given = _described(made_for), _described(layout)
    for name in {**of_state, **given}:
      a, b = of_state.get(name), given.get(name)
      if a != b:
        raise ValueError(
            f'{name}: {a or "no momentum"} in the state, {b or "no momentum"}'
            ' here. Give the parameters and the compressor that the state was'
            ' made for.'
        )
  expected = {
      b.name: workers.bucket_shape(b.shape) for b in layout.buckets
  }
  found = {name: tuple(x.shape) for name, x in buckets.items()}
  if found != expected:
    raise ValueError(
        f'The state holds momentum as {found}, but these parameters, compressor'
        f' and {workers} keep it as {expected}. Give those that the state was'
        ' made for.'
    )
  if digest is not None and not isinstance(digest, jax.core.Tracer):
    check_digest(digest, layout)


def _described(layout: Layout) -> dict[str, str]:
  """Returns what the momentum of each leaf is of."""
  return {
      leaf.name: (
          f'momentum of {leaf.dtype}[{",".join(map(str, leaf.shape))}] under'
          f' {leaf.compressor}'
      )
      for leaf in layout.leaves
      if leaf.bucket >= 0
  }


def momentum_to_leaves(
    layout: Layout,
    workers: Workers,
    buckets: dict[str, Any],
    fun: Callable[[int, jax.Array], jax.Array] = lambda _, c: c,
) -> dict[int, jax.Array]:
  """Cuts momentum into leaves.

  Args:
    layout: where they lie.
    workers: the workers of the exchange.
    buckets: momentum, stacked.
    fun: of the number of a leaf and of the coefficients of one shard of it,
      `[*grid.coefficients_shape]`.

  Returns:
    by the number of the leaf, what `fun` returned for all workers, stacked and
    sharded as the parameter is.
  """
  group = workers.group

  def one_worker(own: dict[str, jax.Array]) -> dict[int, jax.Array]:
    found = {}
    for number, bucket in enumerate(layout.buckets):
      rows = own[bucket.name].reshape(bucket.shape)
      if bucket.split_axes:
        rows = group.join_devices(
            rows[: bucket.num_chunks], bucket.split_axes
        )
      for i, x in layout.slices(number, rows).items():
        found[i] = fun(i, x.reshape(layout.leaves[i].grid.coefficients_shape))
    return found

  specs = {i: Spec(True, layout.leaves[i].sharding.spec)
           for i in layout.compressed}
  stacked = dict.fromkeys(buckets, workers.bucket_spec)
  return _call(
      lambda own: workers.run(one_worker, (own,), (stacked,), specs), buckets
  )


def momentum_from_leaves(
    layout: Layout,
    workers: Workers,
    leaves: dict[int, Any],
    fun: Callable[[int, jax.Array], jax.Array] = lambda _, c: c,
) -> dict[str, jax.Array]:
  """Undoes `momentum_to_leaves`; `fun` returns the coefficients of a shard."""
  group = workers.group
  given = {i: leaves[i] for i in layout.compressed}
  shapes = {b.name: workers.bucket_shape(b.shape) for b in layout.buckets}

  def one_worker(own: dict[int, jax.Array]) -> dict[str, jax.Array]:
    found = {}
    for number, bucket in enumerate(layout.buckets):
      rows = {}
      for i in layout.members(number):
        grid = layout.leaves[i].grid
        rows[i] = fun(i, own[i]).reshape(grid.num_chunks, grid.chunk_size)
      device = group.device_index(bucket.split_axes)
      x = layout.assemble(number, rows, device)
      shape = shapes[bucket.name]
      found[bucket.name] = x[None] if len(shape) == 4 else x
    return found

  specs = {i: Spec(True, layout.leaves[i].sharding.spec) for i in given}
  stacked = {b.name: workers.bucket_spec for b in layout.buckets}
  return _call(
      lambda own: workers.run(one_worker, (own,), (specs,), stacked), given
  )


def _call(fun: Any, args: Any) -> Any:
  """Calls `fun`, jitted: shard_map outside of jit runs each operation."""
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
    return fun(args)
  return jax.jit(fun)(args)
