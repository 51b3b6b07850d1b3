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
from demo_optax.checkpoint.buckets import cut_bucket
from demo_optax.transformation import layouts_in
from demo_optax.workers import Workers

__all__ = ['exchange_info', 'momentum', 'state_specs']

_NO_STATE = (
  'opt_state must hold a state of demo_optax.scale_by_demo, got none in it.'
  ' Give the whole optimizer state.'
)


def state_specs(
  tx: optax.GradientTransformation, params: chex.ArrayTree, workers: Workers
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
  return jax.tree_util.tree_map_with_path(
    lambda path, x: workers.spec(_paths.path_keys(path), x.shape),
    jax.eval_shape(tx.init, params),
  )


def momentum(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
  """Returns every worker's momentum in parameter space, :math:`m_i`.

  Takes any optimizer state with exchanges and their types: chained, masked, an
  `nnx.Optimizer` or its `opt_state`. Returns arrays by parameter name, in their
  order, `[workers, *shape]`, in the momentum's dtype; with `Workers.on_axis`,
  inside the map, `[1, *shape]`.

  Raises:
    ValueError: `opt_state` has no exchange, its types are missing, or its
      momentum was restored from a state with another layout.
  """
  layouts = layouts_in(opt_state, checked=True)
  if not layouts:
    raise ValueError(_NO_STATE)
  arrays = dict(_paths.leaves_of(opt_state))
  found: dict[str, jax.Array] = {}
  for root, layout in layouts.items():
    parts: dict[int, jax.Array] = {}
    for number, bucket in enumerate(layout.buckets):
      parts |= cut_bucket(
        layout,
        number,
        arrays[*root, STACKED, 'momentum', bucket.name],
        decoded=True,
      )
    for i, part in sorted(parts.items()):
      name = layout.leaves[i].name
      if name in found:
        raise ValueError(
          f'opt_state must hold one momentum of {name}, got several. Give one'
          ' of its states.'
        )
      found[name] = part
  return found


def exchange_info(opt_state: chex.ArrayTree) -> dict[str, Any]:
  r"""Returns the last exchange's metrics, for logs.

  With momentum :math:`m_i` before it, the sent part :math:`q_i` and the rest
  :math:`m_i'` on :math:`N` valid workers:

  .. math::
    \text{sent\_energy} = \frac{\sum_i \|q_i\|^2}{\sum_i \|m_i\|^2}, \qquad
    \text{residual\_norm} = \sqrt{\tfrac1N \textstyle\sum_i \|m_i'\|^2}

  Warns if momentum is replicated over its mesh.

  Takes any optimizer state with an exchange, with or without its types. Returns
  the `metrics` of `DeMoState`: scalars by name.
  """
  state = dict(_paths.leaves_of(opt_state))
  stacked = {k: x for k, x in state.items() if _paths.is_stacked(k)}
  _warn_if_replicated(stacked)
  roots = [k[:-2] for k in state if k[-2:] == ('metrics', 'num_excluded')]
  if not roots:
    raise ValueError(_NO_STATE)
  # The first exchange with leaves, or the first.
  busy = {k[: k.index(STACKED)] for k in stacked}
  root = next((root for root in roots if root in busy), roots[0])
  return {k[-1]: x for k, x in state.items() if k[:-1] == (*root, 'metrics')}


def _warn_if_replicated(stacked: dict[Keys, Any]) -> None:
  """Warns if stacked arrays are replicated over their mesh."""
  for keys, x in stacked.items():
    sharding = getattr(x, 'sharding', None)
    if (
      isinstance(sharding, NamedSharding)
      and not isinstance(x, jax.core.Tracer)
      and not any(sharding.spec[:1])
      and 1 not in (sharding.mesh.size, len(x))
    ):
      warnings.warn(
        f'{_paths.dotted(keys)} is one per worker, but all of it is on every'
        f' device: {sharding.spec} does not name the worker axis.'
        ' data_parallel corrects that at the next call. Other steps would'
        ' gather it: take demo_optax.state_specs(tx, params, workers).',
        stacklevel=3,
      )
      return  # one warning is enough
