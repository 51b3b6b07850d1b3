"""Looking into an optimizer state: shardings, and momentum in the clear.

States are searched by path, not by type, since Flax NNX stores them without
their types: the momentum of an exchange lies under `momentum`, beside `count`
and `info/left_out` (`DeMoState`); the states of `per_worker` lie under
`worker_stacked`.
"""

from typing import Any

import chex
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from demo_optax import trees
from demo_optax.compressors import Compressor
from demo_optax.specs import Keys, Path, momentum_roots, path_keys
from demo_optax.workers import Workers


def state_specs(
    tx: optax.GradientTransformation, params: chex.ArrayTree, workers: Workers
) -> chex.ArrayTree:
  """Partition specs of a whole optimizer state.

  Stacked leaves (momentum, states of `per_worker`) get `P(axis_name)`, all
  others `P()`; behind that, what belongs to a parameter (which is known by its
  path and shape) is sharded as `workers` shards the parameter. For `in_specs`
  and `out_specs` of your own `jax.shard_map`, for `out_shardings` of a jitted
  `tx.init`, and for shardings of restored checkpoints.

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
    >>> print(tuple(specs.momentum['w']), tuple(specs.count))
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
    lead = 1 if 'worker_stacked' in keys else 0
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
    compressor: Compressor,
    workers: Workers,
) -> chex.ArrayTree:
  r"""Every worker's momentum in parameter space, :math:`m_i`.

  Args:
    opt_state: any optimizer state that holds the state of `scale_by_demo`:
      chained, partitioned, masked, or `nnx.Optimizer.opt_state`.
    params: the parameters (of an `nnx.Optimizer`: `nnx.state(model, wrt)`).
    compressor: the compressor that the state was made for.
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
  by_keys = {path_keys(path): leaf for path, leaf in flat_state}
  roots = momentum_roots(list(by_keys))
  if not roots:
    raise ValueError('There is no state of demo_optax.scale_by_demo in it.')
  moments = {
      keys[len(root) :]: leaf
      for keys, leaf in by_keys.items()
      for root in roots
      if keys[: len(root)] == root
  }

  def decode(path: Path, param: Any) -> jax.Array | None:
    name, moment = trees.leaf_name(path), moments.get(path_keys(path))
    if moment is None:
      return None
    shape = np.shape(param)
    placement = workers.param_specs.place(path, shape)
    plan = compressor.plan_blocks(shape, moment.dtype, placement.blocks)
    expected = (workers.stacked_size, *plan.grid.coefficients_shape)
    if moment.shape != expected:
      raise ValueError(
          f'The momentum of {name} has shape {moment.shape}, but {compressor}'
          f' and {workers} keep it as {expected}.'
      )
    local = plan.with_blocks(workers.local_blocks(placement))
    decoded = workers.each(
        lambda c: [compressor.from_coefficients(c[0], local)],
        [moment],
        [placement],
    )
    return decoded[0]

  return jax.tree_util.tree_map_with_path(decode, params)
