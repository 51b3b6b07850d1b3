"""Reads optimizer states: partition specs, metrics, momentum leaf by leaf.

States are searched by path, since Flax NNX stores them without their types.
"""

import warnings
from typing import Any

import chex
import jax
import optax
from jax.sharding import NamedSharding

from demo_optax import _paths
from demo_optax._paths import STACKED, Keys
from demo_optax.checkpoint import placement
from demo_optax.checkpoint.buckets import coding_of, decode, take_momentum
from demo_optax.transformation import layouts_in
from demo_optax.workers import Workers

__all__ = ['exchange_info', 'momentum', 'state_specs']

_NO_STATE = (
  'opt_state must hold a state of demo_optax.scale_by_demo, got none in it.'
  ' Give the whole optimizer state.'
)


def state_specs(
  tx: optax.GradientTransformation,
  params: chex.ArrayTree,
  workers: Workers,
) -> chex.ArrayTree:
  """Returns the partition specs for a whole optimizer state.

  They are `in_specs` and `out_specs` for `jax.shard_map`, `out_shardings` for a
  jitted `tx.init`, and for restored checkpoints. Takes any optax transformation
  that contains an exchange, and parameters or their shapes. Returns a tree like
  `tx.init(params)`.

  Stacked leaves `[workers, ...]` get `P(axis_name, ...)` (`P(None, ...)` with a
  relay), others `P(...)`. Leaves of a parameter, inferred from their paths, are
  then sharded as it is, where their shapes allow.
  """
  return _paths.map_by_path(
    lambda keys, x: workers.spec(keys, x.shape),
    jax.eval_shape(tx.init, params),
  )


def momentum(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
  """Returns every worker's momentum in parameter space, :math:`m_i`.

  Takes any optimizer state with exchanges and their types: chained, masked, an
  `nnx.Optimizer` or its `opt_state`. Returns arrays by parameter name, in their
  order, `[workers, *shape]`, in the momentum's dtype; with `Workers.on_axis`,
  inside the map, `[1, *shape]`. Leaves without error feedback have none.

  Raises:
    ValueError: `opt_state` has no exchange, its types are missing, or its
      momentum was restored from a state with another layout.
  """
  layouts = layouts_in(opt_state)
  if not layouts:
    raise ValueError(_NO_STATE)
  arrays = dict(_paths.leaves_of(opt_state))
  moments: dict[str, jax.Array] = {}
  for root, layout in layouts.items():
    by_leaf = take_momentum(arrays, root, layout)
    for number, coefficients in sorted(by_leaf.items()):
      leaf = layout.leaves[number]
      if leaf.name in moments:
        raise ValueError(
          f'opt_state must hold one momentum of {leaf.name}, got several. Give'
          ' one of its states.'
        )
      # The parameter is sharded as its coefficients.
      sharding = placement.sharding_of(coefficients)
      moments[leaf.name] = placement.run(
        decode,
        coefficients,
        sharding,
        coding_of(leaf),
      )
  return moments


def exchange_info(opt_state: chex.ArrayTree) -> dict[str, Any]:
  r"""Returns the last exchange's metrics, for logs.

  Warns if momentum is replicated over its mesh.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.demo(1e-3, workers=workers)
    >>> info = demo_optax.exchange_info(tx.init({'w': jnp.ones((8, 8))}))
    >>> sorted(info)
    ['mean_senders', 'num_excluded', 'residual_norm', 'sent_energy']

  With momentum :math:`m_i` before the exchange, the sent part :math:`q_i` and
  the rest :math:`m_i'` on :math:`N` valid workers:

  .. math::
    \text{sent\_energy} = \frac{\sum_i \|q_i\|^2}{\sum_i \|m_i\|^2}, \qquad
    \text{residual\_norm} = \sqrt{\tfrac1N \textstyle\sum_i \|m_i'\|^2}

  Args:
    opt_state: any optimizer state with an exchange, with or without its types.

  Returns:
    The `metrics` of `DeMoState`: scalars by name.

  Raises:
    ValueError: there is no exchange in the state.
  """
  # By path: Flax keeps no types.
  stacked, roots_with_leaves = {}, set()
  metrics: dict[Keys, dict[str, Any]] = {}
  for keys, array in _paths.leaves_of(opt_state):
    if _paths.is_stacked(keys):
      stacked[keys] = array
      roots_with_leaves.add(keys[: keys.index(STACKED)])
    elif keys[-2:-1] == ('metrics',):
      metrics.setdefault(keys[:-2], {})[keys[-1]] = array
  _warn_if_replicated(stacked)
  exchanges = [
    root for root, found in metrics.items() if 'num_excluded' in found
  ]
  if not exchanges:
    raise ValueError(_NO_STATE)
  # The first exchange with leaves, or the first.
  with_leaves = filter(roots_with_leaves.__contains__, exchanges)
  return metrics[next(with_leaves, exchanges[0])]


def _warn_if_replicated(stacked: dict[Keys, Any]) -> None:
  """Warns if stacked arrays are replicated over their mesh."""
  for keys, array in stacked.items():
    sharding = getattr(array, 'sharding', None)
    if (
      isinstance(sharding, NamedSharding)
      and not isinstance(array, jax.core.Tracer)
      and not any(sharding.spec[:1])
      and 1 not in (sharding.mesh.size, len(array))
    ):
      warnings.warn(
        f'{_paths.dotted(keys)} is one per worker, but all of it is on every'
        f' device: {sharding.spec} does not name the worker axis.'
        ' data_parallel corrects that at the next call. Other steps would'
        ' gather it: take demo_optax.state_specs(tx, params, workers).',
        stacklevel=3,
      )
      return  # one warning is enough
