"""Exchanges decoupled momentum, as an optax transformation."""

import dataclasses
import functools
import sys
from typing import Any, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Numeric
from optax.experimental import aggregating

from demo_optax import _checks, _tree, compressors
from demo_optax._paths import (
  STACKED,
  Keys,
  dotted,
  leaves_of,
  map_by_path,
)
from demo_optax.codes.value_codes import UPDATE_VALUES, WITHOUT_RESIDUAL
from demo_optax.compressors.compressor import CompressorTree, per_leaf
from demo_optax.compressors.layout import Layout, make_layout
from demo_optax.exchange import algorithm
from demo_optax.numerics import platform, topk
from demo_optax.workers import Workers, checks, inside, lift


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LayoutOf:
  """Holds a state's static `Layout`, and its digest as an array.

  `digest`, uint32 `[4]`, is saved with the momentum. It differs from that of
  `layout` if another layout's state was restored.
  """

  digest: chex.Array
  layout: Layout = dataclasses.field(repr=False, metadata={'static': True})

  def __post_init__(self) -> None:
    # `flax.serialization` would take it for a leaf. It is not imported here.
    if flax := sys.modules.get('flax.serialization'):
      _register(flax)


@functools.cache  # every step makes a state
def _register(flax: Any) -> None:
  """Tells `flax.serialization` how a layout is saved, once."""
  flax.register_serialization_state(
    LayoutOf,
    lambda x: {'digest': x.digest},
    _restored,
  )


def _restored(
  target: LayoutOf,
  saved: dict[str, Any],
) -> LayoutOf:
  """Returns a layout's state from what `flax.serialization` saved."""
  check_digest(saved['digest'], target.layout)
  return LayoutOf(saved['digest'], target.layout)


def layouts_in(tree: Any) -> dict[Keys, Layout]:
  """Returns the layouts in all states in a tree, by their paths.

  Raises for states without types, as Flax makes them, and for a state that was
  restored from another layout.
  """
  layouts = {}
  for keys, leaf in leaves_of(tree, lambda x: isinstance(x, LayoutOf)):
    if isinstance(leaf, LayoutOf):
      layouts[keys[:-1]] = leaf.layout
      check_digest(leaf.digest, leaf.layout)
    elif keys[-2:] == ('layout', 'digest'):
      raise ValueError(
        f'{dotted(keys[:-2])} must be a state that has its types, got one of'
        ' nnx.state. Give the nnx.Optimizer, or its opt_state.'
      )
  return layouts


class DeMoState(NamedTuple):
  """The state in `scale_by_demo`; stacked arrays are under `worker_stacked`.

  Attributes:
    count: int32 `[]`, exchanges so far.
    metrics: scalars about the last exchange, equal on all workers: int32
      `'num_excluded'`, workers excluded for a gradient that is not finite or a
      damaged message (with owners, the most that one owner excluded); and, in
      float32, `'sent_energy'` and `'residual_norm'` as in `exchange_info`
      (energies beyond float32 count as zero), and `'mean_senders'`, how many
      workers sent a coefficient, on average over leaves where workers select
      for themselves (0 without such leaves).
    layout: maps leaves to buckets of momentum.
    worker_stacked: each worker's momentum, by bucket, and the residuals of the
      updates it owns.
  """

  count: chex.Array
  metrics: dict[str, chex.Array]
  layout: LayoutOf
  worker_stacked: algorithm.WorkerState


def scale_by_demo(
  compressor: CompressorTree = compressors.dct_topk(),  # noqa: B008
  decay: Numeric = 0.999,
  *,
  workers: Workers,
  alpha: Numeric = 1.0,
  average: topk.Average = 'senders',
  gradient_weight: optax.ScalarOrSchedule = 1.0,
  exchange: algorithm.ExchangeKind = 'all_gather',
  update_values: str | None = None,
) -> aggregating.Aggregator:
  r"""Exchanges the fast part of every worker's momentum.

  Each worker sends its largest coefficients, and takes them out of its
  momentum. Their average is the update, equal on all workers to the last bit.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> compressor = demo_optax.dct_topk(chunk_size=4, topk=1)
    >>> tx = demo_optax.scale_by_demo(compressor, 0.9, workers=workers)
    >>> params = {'w': jnp.zeros((4, 4))}
    >>> state = tx.init(params)
    >>> gradients = {'w': jnp.stack([jnp.ones((4, 4)), 3 * jnp.ones((4, 4))])}
    >>> updates, state = tx.update(gradients, state, params)
    >>> print(updates['w'][0])  # both sent their mean and nothing else
    [2. 2. 2. 2.]

  For worker :math:`i` with gradient :math:`g_i`, momentum :math:`m_i` and the
  chunked transform :math:`T`:

  .. math::
    m_i &\leftarrow \beta m_i + w g_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - \alpha\, T^{-1} q_i \\
    u   &= T^{-1}\, \mathrm{average}_i(q_i)

  All exclude a worker whose gradient or message is damaged
  (`exchange.algorithm`).

  Args:
    compressor: one, a prefix tree, or a function from parameters to it. `None`
      averages a leaf uncompressed; `compressors.FROZEN` leaves it unchanged.
    decay: :math:`\beta`, in `[0, 1)`.
    workers: the workers in the exchange.
    alpha: share that leaves the momentum, in `[0, 1]`.
    average: divides a coefficient by how many workers sent it (`'senders'`, as
      the published code), or by all that are valid (`'workers'`).
    gradient_weight: :math:`w`, a number or a schedule; `1 - decay` as in the
      second version.
    exchange: `'all_gather'`, or `'all_to_all'`: each worker merges its share.
    update_values: how `'all_to_all'` writes updates: `'ternary'` for
      `optax.scale_by_sign`; losses by others (see `dct_topk`) are sent later,
      but for leaves of `compressors.cyclic_signs`, which has no momentum.

  Returns:
    An aggregator. Its `update` takes stacked gradients `[workers, ...]` (the
    worker's in a `data_parallel` step and with `Workers.on_axis`).
    `update(..., weight=tokens)` weights averages by `[workers]` numbers, or the
    worker's `[]`, from :math:`2^{-30}` to :math:`2^{30}`; others exclude the
    worker.

  Raises:
    ValueError: averaged gradients; a state for other workers, leaves or
      compressors.
    TypeError: complex leaves.

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1 (both versions).
  """
  if not _tree.is_function(compressor):  # which needs the parameters
    # As for parameters in the same tree.
    per_leaf(compressor, compressor)
  _checks.check_type('workers', workers, Workers, 'Workers.simulated(4)')
  _checks.check_range('decay', decay, '[0, 1)')
  if not callable(gradient_weight):
    _checks.check_range('gradient_weight', gradient_weight, '(-inf, inf)')
  _checks.check_range('alpha', alpha, '[0, 1]')
  _checks.check_choice('average', average, get_args(topk.Average))
  values = resolve_update_values(exchange, update_values, workers)

  def config_of(
    layout: Layout, weighted: bool = False
  ) -> algorithm.ExchangeConfig:
    """Returns the static part of the exchange."""
    num_owners = None
    if exchange == 'all_to_all':
      try:
        num_owners = workers.count
      except ValueError:  # `on_axis`, outside of the map
        if values not in WITHOUT_RESIDUAL:  # the state depends on it
          raise
    return algorithm.ExchangeConfig(
      layout,
      average,
      platform.of(workers.mesh),
      num_owners,
      values,
      weighted,
    )

  def init_fn(params: chex.ArrayTree) -> DeMoState:
    if type(params).__name__ == '_ParamsPlaceholder':
      # optax.tree.map_params asks where parameters are: nowhere in this state.
      nothing: Any = 0
      return DeMoState(nothing, nothing, nothing, nothing)
    config = config_of(make_layout(params, compressor, workers.param_specs))
    types, structure = jax.tree.flatten(config.state_on_device)
    return DeMoState(
      count=workers.device_put(jnp.zeros((), jnp.int32)),
      metrics=workers.device_put(algorithm.no_metrics()),
      layout=LayoutOf(
        workers.device_put(jnp.asarray(config.layout.digest)),
        config.layout,
      ),
      worker_stacked=structure.unflatten(
        lift.bucket_zeros(workers, tuple(types))
      ),
    )

  def update_fn(
    updates: chex.ArrayTree,
    state: DeMoState,
    params: chex.ArrayTree | None = None,
    *,
    weight: Numeric | None = None,
    **extra_args: Any,
  ) -> tuple[chex.ArrayTree, DeMoState]:
    of_gradient = gradient_weight
    if callable(of_gradient):
      of_gradient = of_gradient(state.count)
    hyper = {'alpha': alpha, 'decay': decay, 'gradient_weight': of_gradient}
    params, like = checks.params_and_like(updates, params, workers)
    # Here, since links that follow in a step run before the exchange.
    check_layout(state, like, compressor, workers)
    config = config_of(state.layout.layout, weight is not None)
    exchanged = config.layout.exchanged_keys

    def mask(keys: Keys, x: Any) -> Any:
      return x if keys in exchanged else optax.MaskedNode()

    exchanged_only = functools.partial(map_by_path, mask)
    given = exchanged_only(updates), state, params, hyper
    if inside.is_in_step():
      given = inside.check_arguments(workers, *given)
    gradients, state, params, hyper = given
    weights = {}
    if weight is not None:
      # By this name it is one of each worker.
      weights[STACKED] = checks.checked_weight(weight, workers)
    update_all = functools.partial(_update_all, config)
    update = inside.for_workers(update_all, workers)
    new_updates, state = update(
      gradients, state, exchanged_only(params), hyper, weights
    )
    next_update = iter(jax.tree.leaves(new_updates))
    in_order = []
    for keys, _, x in _tree.with_params(updates, like):
      if keys in exchanged:
        in_order.append(next(next_update))
      else:
        in_order.append(jnp.zeros_like(x))
    return jax.tree.structure(updates).unflatten(in_order), state

  return aggregating.Aggregator(init_fn, update_fn)


def _update_all(
  config: algorithm.ExchangeConfig,
  gradients: chex.ArrayTree,
  state: DeMoState,
  params: chex.ArrayTree | None,
  hyper: dict[str, Numeric],
  weights: dict[str, jax.Array],
  workers: Workers,
) -> tuple[chex.ArrayTree, DeMoState]:
  """Exchanges gradients that are laid out as `workers` have them."""
  for keys, gradient, param in _tree.with_params(gradients, params):
    if param is not None:
      checks.check_sharding(keys, param, workers)
    checks.check_gradient(dotted(keys), gradient, param, workers)
  _check_worker_state(state, config, workers)
  leaves, structure = jax.tree.flatten(gradients)
  updates: list[jax.Array] = []
  metrics, worker_state = algorithm.no_metrics(), state.worker_stacked
  if leaves:
    algorithm.note(config)
    updates, worker_state, metrics = algorithm.run_jitted(
      workers,
      config,
      leaves,
      worker_state,
      algorithm.Hyper(state.count, **hyper),
      weights.get(STACKED),
    )
  new_state = DeMoState(
    count=optax.safe_increment(state.count),
    metrics=metrics,
    layout=state.layout,
    worker_stacked=worker_state,
  )
  updates = optax.tree.cast_like(updates, leaves)
  return structure.unflatten(updates), new_state


def average_gradients(*, workers: Workers) -> aggregating.Aggregator:
  """Averages the workers' gradients: `scale_by_demo` without compression.

  Plain data parallelism, as the first link of a baseline. The sum is in float32
  or wider. Leaves of up to 64 KB are gathered and added in the order of the
  workers, with equal bits in every map. Larger ones are all-reduced, in the
  collective's order. A worker whose gradients are not all finite is excluded,
  as in every exchange; if all are, the mean is zero.
  """
  return scale_by_demo(None, workers=workers)


def check_layout(
  state: DeMoState,
  params: Any,
  compressor: CompressorTree,
  workers: Workers,
) -> None:
  """Raises unless a state was made for such parameters and compressors."""
  found = state.layout.layout
  expected = make_layout(params, compressor, workers.param_specs)
  if found != expected:
    _tree.check_same(found.words, expected.words, workers)
    order = {'The leaves': ['another order or sharding']}
    _tree.check_same(order, {'The leaves': ['these']}, workers)


def _check_worker_state(
  state: DeMoState,
  config: algorithm.ExchangeConfig,
  workers: Workers,
) -> None:
  """Raises unless the momentum in a state fits its layout and workers."""
  check_digest(state.layout.digest, config.layout)

  def for_all(on_device: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    shape = workers.bucket_shape(on_device.shape)
    return jax.ShapeDtypeStruct(shape, on_device.dtype)

  expected = jax.tree.map(for_all, config.state_on_device)
  made_for = f'{workers}, {config}'
  _tree.check_state(state.worker_stacked, expected, 0, made_for)


def check_digest(
  digest: Any,
  layout: Layout,
) -> None:
  """Raises if the momentum was saved with another layout, where that shows."""
  is_array = isinstance(digest, jax.Array | np.ndarray)
  if not is_array or isinstance(digest, jax.core.Tracer):
    return
  if not np.array_equal(np.asarray(digest).reshape(-1)[:4], layout.digest):
    raise ValueError(
      'The momentum in this state must have been saved for the same leaves,'
      ' shapes and compressors, got that of others, whose chunks have other'
      ' places in the buckets. Restore it into a state of the same parameters'
      ' and compressor; demo_optax.checkpoint saves leaf by leaf.'
    )


def resolve_update_values(
  exchange: str,
  update_values: str | None,
  workers: Workers,
) -> str:
  """Returns the code for updates; raises unless the arguments make sense."""
  _checks.check_choice('exchange', exchange, get_args(algorithm.ExchangeKind))
  if workers.only_gathers and exchange == 'all_to_all':
    raise ValueError(
      "exchange must be 'all_gather' with a relay, which sends all messages to"
      " all workers, got 'all_to_all'. Give 'all_gather'."
    )
  if update_values is not None:
    _checks.check_choice('update_values', update_values, UPDATE_VALUES)
    return update_values
  if exchange == 'all_gather':
    return 'float32'
  raise ValueError(
    f'update_values must be given for exchange={exchange!r}, got None. Give'
    " 'ternary' if the signs of updates are taken (optax.scale_by_sign,"
    " demo_optax.demo), else 'int8', 'int4' or 'sign', whose losses"
    " are sent later, or 'float32'."
  )
