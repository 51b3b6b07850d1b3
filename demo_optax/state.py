"""Looking into an optimizer state: shardings, and momentum in the clear.

States are searched by path, not by type, since Flax NNX stores them without
their types: what has a leading worker axis lies under `worker_stacked`, and
there the momentum of an exchange under `momentum`.
"""

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import _tree as trees
from demo_optax.compressors import (
  Compressor,
  CompressorTree,
  LeafPlan,
  per_leaf,
)
from demo_optax.tools import placement, tables
from demo_optax.workers import Workers
from demo_optax.workers.sharding import (
  Keys,
  Path,
  Placement,
  dotted,
  is_stacked,
  momentum_roots,
  path_keys,
  pending_axes,
  root_of,
)


def state_specs(
    tx: optax.GradientTransformation, params: chex.ArrayTree, workers: Workers
) -> chex.ArrayTree:
  """Partition specs of a whole optimizer state.

  Stacked leaves (momentum, states of `per_worker`) get `P(axis_name)`, all
  others `P()` (arrays `[workers, ...]` and `[...]`); behind that, what belongs
  to a parameter (which is known by its path and shape) is sharded as `workers`
  shards the parameter. For `in_specs` and `out_specs` of your own
  `jax.shard_map`, for `out_shardings` of a jitted `tx.init`, and for shardings
  of restored checkpoints.

  Args:
    tx: any optax transformation with an exchange somewhere in it.
    params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
    workers: who takes part.

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
    >>> print(tuple(specs.worker_stacked.momentum['w']), tuple(specs.count))
    ('data',) ()

  References:
    Layout of the decoupled momentum of Peng et al.
    <https://arxiv.org/abs/2411.19870>, which is one per worker.
  """
  shapes = jax.eval_shape(tx.init, params)
  flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
  roots = momentum_roots([path_keys(path) for path, _ in flat])
  inside = _param_specs(params, workers)

  def spec(path: Path, leaf: Any) -> P:
    keys = path_keys(path)
    for root in roots:
      if keys[: len(root)] == root:
        _, within = inside[keys[len(root) :]]
        return P(workers.axis_name, *within)
    axes = pending_axes(keys)
    if axes is not None:
      return P(workers.axis_name, *([axes] if axes else []))
    lead = 1 if is_stacked(keys) else 0
    owners = (inside.get(keys[start:]) for start in range(len(keys) + 1))
    shape = leaf.shape[lead:]
    within = next((s for o in owners if o for h, s in [o] if h == shape), P())
    return P(workers.axis_name, *within) if lead else within

  return treedef.unflatten([spec(path, leaf) for path, leaf in flat])


def _param_specs(
    params: chex.ArrayTree, workers: Workers
) -> dict[Keys, tuple[tuple[int, ...], P]]:
  """Every parameter's shape and its spec inside a worker."""
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  place = workers.param_specs.place
  return {
      path_keys(path): (np.shape(x), place(path, np.shape(x)).spec)
      for path, x in flat
      if trees.is_exchanged(x)
  }


def momentum(
    opt_state: chex.ArrayTree,
    params: chex.ArrayTree,
    compressor: CompressorTree,
    workers: Workers,
) -> chex.ArrayTree:
  r"""Every worker's momentum in parameter space, :math:`m_i`.

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`:
      chained, partitioned, masked, or `nnx.Optimizer.opt_state`.
    params: the parameters (of an `nnx.Optimizer`: `nnx.state(model, wrt)`).
    compressor: the compressor that the state was made for, or a tree of them,
      as for `plan`.
    workers: who takes part.

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
    >>> print(demo_optax.momentum(state, params, compressor, workers).round(2))
    [[[-0.25 -0.25]
      [-0.25  0.75]]
     [[ 0.5  -0.5 ]
      [-0.5   0.5 ]]]

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1.
  """
  flat_state = jax.tree_util.tree_flatten_with_path(opt_state)[0]
  moments = _moments([(path_keys(path), x) for path, x in flat_state])

  def decode(
      path: Path, param: Any, code: Compressor | None
  ) -> jax.Array | None:
    moment = moments.get(path_keys(path))
    if moment is None:
      return None
    shape = np.shape(param)
    plan, placement, code = _plan(path, shape, moment, code, workers)
    decoded = workers.each(
        lambda c: [code.from_coefficients(c[0], plan)], [moment], [placement]
    )
    return decoded[0]

  flat, treedef = jax.tree_util.tree_flatten_with_path(params)
  codes = per_leaf(compressor, params)
  return treedef.unflatten(
      [decode(path, param, code) for (path, param), code in zip(flat, codes)]
  )


def with_momentum(
    opt_state: chex.ArrayTree,
    moments: chex.ArrayTree,
    compressor: CompressorTree,
    workers: Workers,
) -> chex.ArrayTree:
  r"""`opt_state` with this momentum in it, given in parameter space.

  Undoes `momentum`: there and back it is the same to rounding. With a state
  that was made for another compressor, it takes momentum from one chunk size to
  another. Coefficients :math:`T m_i` are what a state holds of :math:`m_i`.

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`.
    moments: a tree like the parameters: per leaf `[workers, *shape]`, and
      `None` for leaves without momentum.
    compressor: the compressor that `opt_state` was made for, or a tree of them,
      as for `plan`.
    workers: who takes part.

  Returns:
    A tree like `opt_state`. Only the momentum differs; its dtype is that of
    `opt_state`.

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
    >>> moments = demo_optax.momentum(state, params, old, workers)
    >>> state = demo_optax.scale_by_demo(new, workers=workers).init(params)
    >>> state = demo_optax.with_momentum(state, moments, new, workers)
    >>> state.worker_stacked.momentum.shape
    (2, 2, 2, 4)

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1.
  """
  flat, treedef = jax.tree_util.tree_flatten_with_path(opt_state)
  keys = [path_keys(path) for path, _ in flat]
  within = {id(x): k for k, x in _moments(list(zip(keys, flat))).items()}
  flat_moments = jax.tree_util.tree_flatten_with_path(moments)[0]
  given = {
      path_keys(path): (path, x, code)
      for (path, x), code in zip(flat_moments, per_leaf(compressor, moments))
  }

  def encode(leaf: tuple[Path, Any]) -> jax.Array:
    _, kept = leaf
    if id(leaf) not in within:
      return kept
    if within[id(leaf)] not in given:
      name = trees.leaf_name(leaf[0])
      raise ValueError(f'There is nothing in moments for {name}.')
    path, moment, code = given[within[id(leaf)]]
    shape = np.shape(moment)
    if shape[:1] != (workers.stacked_size,):
      raise ValueError(
          f'The momentum of {trees.leaf_name(path)} has shape {shape}, but'
          f' {workers} needs ({workers.stacked_size}, ...): one per worker.'
      )
    plan, placement, code = _plan(path, shape[1:], kept, code, workers)
    encoded = workers.each(
        lambda m: [code.to_coefficients(m[0], plan)],
        [jnp.asarray(moment, kept.dtype)],
        [placement],
    )
    return encoded[0]

  return treedef.unflatten(map(encode, flat))


def exchange_info(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
  r"""What is known about the last exchange, for logs.

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
  placement.warn_if_replicated(opt_state)
  flat = jax.tree_util.tree_flatten_with_path(opt_state)[0]
  state = [(path_keys(path), x) for path, x in flat]
  roots = momentum_roots([keys for keys, _ in state])
  if not roots:
    raise ValueError('There is no state of demo_optax.scale_by_demo in it.')
  # Of transformations that had nothing to exchange, nothing is known.
  busy = {root_of(keys, roots) for keys, _ in state}
  root = next((root for root in roots if root in busy), roots[0])
  metrics = (*root[:-2], 'metrics')
  return {keys[-1]: x for keys, x in state if keys[:-1] == metrics}


def state_summary(opt_state: chex.ArrayTree) -> str:
  r"""An optimizer state's exchange in words, and its momentum as a table.

  On a mesh of several processes all of them call it, since it takes norms.

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`:
      chained, partitioned, masked, or `nnx.Optimizer.opt_state`.

  Returns:
    Lines to print: what `exchange_info` tells, and per leaf the shape of the
    momentum of all workers, `[workers, *chunks, n]`; its dtype and bytes; its
    norm :math:`\sqrt{\frac 1 N \sum_i \lVert m_i \rVert^2}` over `N` workers;
    and, on a mesh, how it is sharded.

  Raises:
    ValueError: there is no exchange in `opt_state`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> compressor = demo_optax.dct_topk(topk=1)
    >>> tx = demo_optax.scale_by_demo(compressor, workers=workers)
    >>> state = tx.init(jnp.zeros((2, 2)))
    >>> gradients = jnp.array([[[1., 1.], [1., 2.]], [[1., 0.], [0., 1.]]])
    >>> print(demo_optax.state_summary(tx.update(gradients, state)[1]))
    1 exchange of 2 workers. The last one:
      sent 80.6% of the momentum's energy; what stays behind has norm 0.935
      a coefficient that was sent was sent by 2.00 workers on average
      workers left out: 0
    momentum         shape    dtype  bytes   norm
    the only leaf  2x1x1x4  float32   32 B  0.935

  References:
    Of the momentum of Peng et al. <https://arxiv.org/abs/2411.19870>,
    Algorithm 1.
  """
  flat = [
      (path_keys(path), x)
      for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]
  ]
  moments = _moments(flat)
  root, *_ = momentum_roots([keys for keys, _ in flat])
  count = int(dict(flat)[(*root[:-2], 'count')])
  workers = next((m.shape[0] for m in moments.values()), 0)
  placed = [isinstance(m.sharding, NamedSharding) for m in moments.values()]
  header = ('momentum', 'shape', 'dtype', 'bytes', 'norm')
  rows = [(*header, 'sharding') if any(placed) else header]
  for (keys, moment), named in zip(moments.items(), placed):
    row = (
        dotted(keys),
        tables.times(moment.shape),
        str(moment.dtype),
        tables.num_bytes(moment.nbytes),
        f'{float(_mean_norm(moment)):.3g}',
    )
    spec = moment.sharding.spec if named else None
    rows.append((*row, str(spec or '')) if any(placed) else row)
  return '\n'.join(
      [*_in_words(count, workers, opt_state), *tables.aligned(rows)]
  )


def _in_words(
    count: int, workers: int, opt_state: chex.ArrayTree
) -> Iterator[str]:
  """What is known about the last exchange."""
  plural = '' if count == 1 else 's'
  if not count:
    yield f'No exchange yet, {workers} workers.'
    return
  info = {k: x.item() for k, x in exchange_info(opt_state).items()}
  yield f'{count} exchange{plural} of {workers} workers. The last one:'
  yield (
      f'  sent {info["sent_energy"]:.1%} of the momentum\'s energy; what stays'
      f' behind has norm {info["residual_norm"]:.3g}'
  )
  if info['mean_senders']:
    yield (
        '  a coefficient that was sent was sent by'
        f' {info["mean_senders"]:.2f} workers on average'
    )
  yield f'  workers left out: {info["num_excluded"]}'


@jax.jit
def _mean_norm(moment: jax.Array) -> jax.Array:
  """Root of the mean square norm over the workers."""
  return jnp.sqrt(jnp.sum(moment * moment) / moment.shape[0])


def _moments(flat: list[tuple[Keys, Any]]) -> dict[Keys, Any]:
  """What lies under the momentum of exchanges, by the path of the parameter."""
  roots = momentum_roots([keys for keys, _ in flat])
  if not roots:
    raise ValueError('There is no state of demo_optax.scale_by_demo in it.')
  return {
      keys[len(root) :]: x
      for keys, x in flat
      if (root := root_of(keys, roots)) is not None
  }


def _plan(
    path: Path,
    shape: tuple[int, ...],
    moment: jax.Array,
    compressor: Compressor | None,
    workers: Workers,
) -> tuple[LeafPlan, Placement, Compressor]:
  """A leaf's plan, as `workers.each` shows it, checked; and where it lies."""
  if compressor is None:
    raise ValueError(
        f'{trees.leaf_name(path)} has momentum, but the tree of compressors has'
        ' None for it.'
    )
  placement = workers.param_specs.place(path, shape)
  plan = compressor.plan_blocks(shape, moment.dtype, placement.blocks)
  expected = (workers.stacked_size, *plan.grid.coefficients_shape)
  if moment.shape != expected:
    raise ValueError(
        f'The momentum of {trees.leaf_name(path)} has shape {moment.shape}, but'
        f' {compressor} and {workers} keep it as {expected}.'
    )
  plan = plan.with_blocks(workers.local_blocks(placement))
  return plan, placement, compressor
