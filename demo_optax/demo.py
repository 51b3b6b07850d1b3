r"""DeMo: decoupled momentum, from a worker's gradient to the update.

The way of the data, each arrow a named call in `_exchange`:

    gradient --to_coefficients--> + decay * momentum --select--> selection
      --encode--> payload --gather--> payloads --decode--> selections
      --weigh, from_selected--> update

and what stays behind: momentum less what the others read in the own payload.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import (
  chunks,
  compressors,
  modules,
  paths,
  selection,
  trees,
  wire,
)
from demo_optax.compressors import Compressor, LeafPlan
from demo_optax.specs import Path, Placement
from demo_optax.workers import Workers

# A worker is left out if an element of its gradient is more than this share of
# the largest number. Sums of a chunk over all steps then stay finite.
LARGEST_GRADIENT = 1e-12


class DeMoState(NamedTuple):
  """State of `scale_by_demo`.

  Attributes:
    count: int32 `[]`, exchanges so far.
    momentum: a tree like the parameters: every leaf's momentum as coefficients,
      float32 (float64 for float64 parameters), stacked
      `[workers, *chunk counts, n]`; `optax.MaskedNode()` for leaves that are
      empty or not floating point.
    info: scalars about the last exchange. `'left_out'`: int32 `[]`, how many
      workers were left out: their gradient was not finite, or their payload
      was damaged.
    pending: `()`; kept for exchanges that are applied late.
  """

  count: chex.Array
  momentum: chex.ArrayTree
  info: dict[str, chex.Array]
  pending: chex.ArrayTree


class _Rule(NamedTuple):
  """The numbers of the update rule."""

  decay: chex.Numeric
  alpha: chex.Numeric
  average: selection.Average


class _Leaf(NamedTuple):
  """What is fixed for a leaf when it is traced."""

  plan: LeafPlan
  placement: Placement

  def on_device(self, workers: Workers) -> LeafPlan:
    """The plan of those blocks that a step sees at once."""
    return self.plan.with_blocks(workers.local_blocks(self.placement))


def _plan_leaf(
    path: Path,
    shape: tuple[int, ...],
    dtype: Any,
    compressor: Compressor,
    workers: Workers,
) -> _Leaf:
  placement = workers.param_specs.place(path, shape)
  plan = compressor.plan_blocks(shape, dtype, placement.blocks)
  return _Leaf(plan, placement)


def _exchange(
    compressor: Compressor,
    workers: Workers,
    leaves: Sequence[_Leaf],
    rule: _Rule,
    gradients: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
    weight: chex.Numeric,
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
  """One worker's step: `(updates, momentum, left_out)`, all of one worker.

  If a worker is several devices it is the step of one of them.
  """
  groups = _alike(leaves, gradients)
  plans = [
      leaves[group[0]].on_device(workers).stacked(len(group))
      for group in groups
  ]
  gradients, momentum = _stack(gradients, groups), _stack(momentum, groups)
  payload = wire.Payload(
      [(plan.format, plan.grid.num_chunks) for plan in plans],
      [leaves[group[0]].placement.axes for group in groups],
  )

  present = workers.agree(_is_moderate(gradients, momentum, weight))
  held, indices, values = zip(*(
      _accumulate(compressor, rule, plan, gradient, kept, weight, present)
      for plan, gradient, kept in zip(plans, gradients, momentum)
  ))
  parts, sent = payload.encode(list(zip(indices, values)), present)

  kept_momentum = []
  for c, i, v, plan in zip(held, indices, sent, plans):
    v = jnp.where(present, v, jnp.zeros_like(v))
    c = selection.subtract(c, i, selection.product(rule.alpha, v))
    c = c.reshape(plan.grid.coefficients_shape)
    if any(plan.grid.padding):
      c = jnp.where(present, compressor.clear_padding(c, plan), c)
    kept_momentum.append(c)

  received = workers.gather(parts)  # per part uint8 [workers, bytes]

  selections, senders, all_present = payload.decode(received)
  updates = [
      _update(compressor, rule, plan, i, v, taking_part)
      for plan, (i, v), taking_part in zip(plans, selections, senders)
  ]
  left_out = jnp.sum(~all_present, dtype=jnp.int32)
  return _unstack(updates, groups), _unstack(kept_momentum, groups), left_out


def _alike(
    leaves: Sequence[_Leaf], gradients: Sequence[jax.Array]
) -> list[list[int]]:
  """Numbers of leaves: of small ones that are alike together, others alone."""
  groups: dict[Any, list[int]] = {}
  for number, (leaf, gradient) in enumerate(zip(leaves, gradients)):
    small = paths.is_small(gradient.size)
    kind = (leaf, gradient.shape, gradient.dtype) if small else number
    groups.setdefault(kind, []).append(number)
  return list(groups.values())


def _stack(
    arrays: Sequence[jax.Array], groups: list[list[int]]
) -> list[jax.Array]:
  """Per group `[members, ...]`; the array itself where it is the only one."""
  return [
      jnp.stack([arrays[i] for i in group]) if len(group) > 1
      else arrays[group[0]]
      for group in groups
  ]


def _unstack(
    arrays: Sequence[jax.Array], groups: list[list[int]]
) -> list[jax.Array]:
  """Undoes `_stack`."""
  found: dict[int, jax.Array] = {}
  for array, group in zip(arrays, groups):
    found.update(zip(group, array if len(group) > 1 else [array]))
  return [found[number] for number in range(len(found))]


def _is_moderate(
    gradients: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
    weight: chex.Numeric,
) -> jax.Array:
  """Whether no momentum can overflow or take in a NaN, bool `[]`.

  Told from the gradients, before momentum is touched, so that it is changed in
  place: keeping the old one, to return to it, costs as much memory again.
  """

  def moderate(gradient: jax.Array, dtype: jnp.dtype) -> jax.Array:
    weighted = jnp.asarray(weight, dtype) * gradient.astype(dtype)
    largest = LARGEST_GRADIENT * float(jnp.finfo(dtype).max)
    return jnp.all(jnp.abs(weighted) <= largest)  # a maximum may skip NaNs

  return functools.reduce(
      jnp.logical_and,
      [moderate(g, m.dtype) for g, m in zip(gradients, momentum)],
  )


def _add(
    compressor: Compressor,
    rule: _Rule,
    plan: LeafPlan,
    gradient: jax.Array,
    momentum: jax.Array,
    weight: chex.Numeric,
) -> jax.Array:
  """Momentum with a gradient added, `[*plan.grid.coefficients_shape]`."""
  gradient = selection.product(weight, gradient.astype(momentum.dtype))
  c = compressor.to_coefficients(gradient, plan)
  return selection.product(rule.decay, momentum) + c


def _accumulate(
    compressor: Compressor,
    rule: _Rule,
    plan: LeafPlan,
    gradient: jax.Array,
    momentum: jax.Array,
    weight: chex.Numeric,
    present: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds a leaf's gradient to its momentum, unless absent, and selects.

  Returns:
    momentum `[chunks, n]`, indices and values `[chunks, k]` of those selected.
  """
  count, grid = plan.grid.pieces(paths.piece_elements())
  piece = dataclasses.replace(plan, grid=grid)
  gradients = chunks.split_pieces(gradient, plan.grid, count)

  def accumulate(
      momentum: jax.Array, number: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    gradient = jax.lax.dynamic_index_in_dim(gradients, number, 0, False)
    kept = jax.lax.dynamic_index_in_dim(momentum, number, 0, False)

    def add(_: jax.Array, kept: jax.Array) -> jax.Array:
      return _add(compressor, rule, piece, gradient, kept, weight)

    if paths.loop_to_keep(gradient.size):
      c = jax.lax.fori_loop(0, present.astype(jnp.int32), add, kept)
    else:
      c = jnp.where(present, add(present, kept), kept)
    momentum = jax.lax.dynamic_update_index_in_dim(momentum, c, number, 0)
    c = c.reshape(grid.num_chunks, grid.chunk_size)
    indices = compressor.select(c, piece)
    return momentum, (indices, selection.take(c, indices))

  momentum, selected = jax.lax.scan(
      accumulate,
      momentum.reshape(count, *grid.coefficients_shape),
      jnp.arange(count, dtype=jnp.int32),
      unroll=count == 1,
  )
  indices, values = (
      x.reshape(plan.grid.num_chunks, plan.format.k) for x in selected
  )
  return momentum.reshape(plan.grid.num_chunks, -1), indices, values


def _update(
    compressor: Compressor,
    rule: _Rule,
    plan: LeafPlan,
    indices: jax.Array,
    values: jax.Array,
    present: jax.Array,
) -> jax.Array:
  """A leaf's update, from what all workers sent, `[workers, chunks, k]`."""
  count, grid = plan.grid.pieces(paths.piece_elements())
  piece = dataclasses.replace(plan, grid=grid)

  def merge(arrays: tuple[jax.Array, jax.Array]) -> jax.Array:
    indices, values = arrays
    values = selection.weigh(
        indices, values, present, plan.format.n, rule.average
    )
    return compressor.from_selected(indices, values, piece)

  def split(x: jax.Array) -> jax.Array:
    x = x.reshape(len(x), count, grid.num_chunks, -1)
    return x.swapaxes(0, 1)

  _, pieces = jax.lax.scan(
      lambda _, arrays: (None, merge(arrays)),
      None,
      (split(indices), split(values)),
      unroll=count == 1,
  )
  return chunks.join_pieces(pieces, plan.grid)


def scale_by_demo(
    compressor: Compressor | None = None,
    decay: chex.Numeric = 0.999,
    *,
    workers: Workers,
    alpha: chex.Numeric = 1.0,
    average: selection.Average = 'senders',
    ema: bool = False,
    gradient_weight: optax.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformation:
  r"""Exchanges the fast part of every worker's own momentum.

  For worker :math:`i` with gradient :math:`g_i`, momentum :math:`m_i` and the
  chunked transform :math:`T`:

  .. math::
    m_i &\leftarrow \beta m_i + w g_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - \alpha\, T^{-1} q_i \\
    u   &= T^{-1}\, \mathrm{average}_i(q_i)

  where :math:`q_i` is rounded to what the compressor's value code can say, so
  that momentum keeps what rounding lost.
  `u` is the update, the same on all workers to the last bit. It takes the
  place of a momentum-filtered averaged gradient: follow it with any optax
  transformation. Momentum is kept as coefficients, which changes nothing since
  :math:`T` is linear and orthonormal.

  Communication: one `all_gather` of one uint8 payload per step for the whole
  tree; `demo_optax.plan` gives its size.

  A worker whose gradient is not finite, or beyond :math:`10^{-12}` of the
  largest number so that momentum could overflow, says so in its payload. All
  workers leave it out of the average and it keeps its momentum as it was;
  `state.info['left_out']` counts. If all are left out the update is zero (and
  what follows, such as weight decay, goes on as with any update). A payload
  that is damaged beyond sense (indices out of order or of the chunk, values
  that are not finite or too large to transform) is left out, too, and what it
  was to carry is lost. If a worker is several devices, the bytes of each are
  judged by themselves, and `'left_out'` counts by those that all of them hold.

  Integer leaves get zero updates; complex leaves are refused.

  Args:
    compressor: what is sent; `dct_topk()` by default.
    decay: :math:`\beta`, in `[0, 1)`.
    workers: who takes part.
    alpha: share of what was sent that leaves the momentum, in `[0, 1]`: 1 in
      the first version of the paper, 0.2 was best in the second.
    average: `'senders'` divides a coefficient by the number of workers that
      sent it (the published code); `'workers'` by the number of workers that
      were not left out.
    ema: weight the gradient by :math:`1 - \beta`, too, as `optax.ema` and the
      second version of the paper do.
    gradient_weight: :math:`w`, a number or a schedule of the step.

  Returns:
    A gradient transformation. Its `update` takes stacked gradients
    `[workers, ...]` (`Workers.on_axis`: the worker's own) and returns updates
    in the parameters' shapes and the gradients' dtypes.

  Raises:
    ValueError: `decay` or `alpha` out of range or unknown `average`, at once;
      gradients that can be seen not to be one per worker, or momentum of
      another number of workers or another compressor, when traced.
    TypeError: `compressor` or `workers` is something else, at once; complex
      leaves, when traced.

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

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, Algorithm 1 (both versions).
  """
  compressor = compressors.dct_topk() if compressor is None else compressor
  trees.check_type(
      'compressor', compressor, Compressor, 'demo_optax.dct_topk(...)'
  )
  trees.check_type(
      'workers', workers, Workers, 'demo_optax.Workers.simulated(n)'
  )
  _check_range('decay', decay, 0.0, 1.0, open_end=True)
  _check_range('alpha', alpha, 0.0, 1.0)
  if average not in ('senders', 'workers'):
    raise ValueError(f"average={average!r} must be 'senders' or 'workers'.")
  rule = _Rule(decay, alpha, average)

  def init_fn(params: chex.ArrayTree) -> DeMoState:
    def zeros(path: Path, param: jax.Array) -> jax.Array:
      dtype = trees.momentum_dtype(path, param)
      leaf = _plan_leaf(path, np.shape(param), dtype, compressor, workers)
      shape = leaf.plan.grid.coefficients_shape
      return workers.zeros(shape, dtype, leaf.placement)

    momentum = modules.stack_annotations(
        trees.map_exchanged(zeros, params), workers.spmd_axis_name
    )
    return DeMoState(
        count=workers.device_put(jnp.zeros((), jnp.int32)),
        momentum=momentum,
        info={'left_out': workers.device_put(jnp.zeros((), jnp.int32))},
        pending=(),
    )

  # Jitted, so that it is one computation outside of the user's jit, too.
  @functools.partial(jax.jit, static_argnums=0)
  def exchange(
      leaves: tuple[_Leaf, ...],
      weight: chex.Numeric,
      gradients: list[jax.Array],
      momentum: list[jax.Array],
  ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    return workers.run(
        functools.partial(_exchange, compressor, workers, leaves, rule),
        gradients,
        momentum,
        [leaf.placement for leaf in leaves],
        weight,
    )

  def update_fn(
      updates: chex.ArrayTree,
      state: DeMoState,
      params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, DeMoState]:
    leaves = trees.align(updates, state.momentum, params, workers)
    new = [leaf.zero_update() for leaf in leaves]
    kept: list[jax.Array] = []
    left_out = jnp.zeros((), jnp.int32)
    places = [p for p, leaf in enumerate(leaves) if leaf.exchanged]
    if places:
      sent = [leaves[p] for p in places]
      planned = []
      for leaf in sent:
        dtype = leaf.momentum.dtype
        planned.append(
            _plan_leaf(leaf.path, leaf.shape, dtype, compressor, workers)
        )
        _check_momentum(leaf, planned[-1].plan, compressor, workers)
      weight = gradient_weight
      if callable(weight):
        weight = weight(state.count)
      merged, kept, left_out = exchange(
          tuple(planned),
          (1 - decay) * weight if ema else weight,
          [leaf.gradient for leaf in sent],
          [leaf.momentum for leaf in sent],
      )
      for p, update in zip(places, merged):
        new[p] = update.astype(leaves[p].dtype)

    return jax.tree.structure(updates).unflatten(new), DeMoState(
        count=optax.safe_increment(state.count),
        momentum=jax.tree.structure(state.momentum).unflatten(kept),
        info={'left_out': left_out},
        pending=(),
    )

  return optax.GradientTransformation(init_fn, update_fn)


def demo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    workers: Workers,
    compressor: Compressor | None = None,
    decay: chex.Numeric = 0.999,
    weight_decay: chex.Numeric = 0.0,
    weight_decay_mask: Any = None,
    alpha: chex.Numeric = 1.0,
    average: selection.Average = 'senders',
) -> optax.GradientTransformationExtraArgs:
  r"""DeMo as published (first version): signed updates, lr in the momentum.

  .. math::
    m_i &\leftarrow \beta m_i + \eta_t g_i \\
    q_i &= \mathrm{top}_k(T m_i) \\
    m_i &\leftarrow m_i - T^{-1} q_i \\
    x   &\leftarrow x - \eta_t \lambda x
           - \eta_t\, \mathrm{sign}(T^{-1}\, \mathrm{average}_i(q_i))

  It is this chain: `scale_by_demo` with :math:`\eta_t` as the gradients'
  weight, `optax.scale_by_sign`, `optax.add_decayed_weights`,
  `optax.scale_by_learning_rate`; masked to the leaves that take part. If every
  worker is left out of a step, the parameters stay as they are, weight decay
  included.

  Args:
    learning_rate: :math:`\eta_t`, a number or a schedule of the step.
    workers: who takes part.
    compressor: what is sent; `dct_topk()` by default.
    decay: :math:`\beta`, in `[0, 1)`. 0.999 is the paper's; short runs and
      small `topk` want less (0.99).
    weight_decay: :math:`\lambda`, decoupled.
    weight_decay_mask: which leaves decay, as in `optax.add_decayed_weights`; by
      default all that take part.
    alpha: see `scale_by_demo`.
    average: see `scale_by_demo`.

  Returns:
    A gradient transformation; see `scale_by_demo` for what it takes.

  Raises:
    ValueError: as `scale_by_demo`; also a negative `weight_decay`.
    TypeError: as `scale_by_demo`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(0.1, workers=workers)
    >>> params = {'w': jnp.ones((8, 8))}
    >>> loss = lambda params, x: jnp.mean((x @ params['w']) ** 2)
    >>> grad = demo_optax.value_and_grad(loss, workers=workers)
    >>> state = tx.init(params)
    >>> for step in range(10):
    ...   value, gradients = grad(params, jnp.eye(8))  # [4, 8, 8]: one each
    ...   updates, state = tx.update(gradients, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> print(f'{value:.3f}')
    0.010

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870v1>`_, version 1, Algorithm 1.
  """
  _check_range('weight_decay', weight_decay, 0.0, float('inf'))
  chain = optax.chain(
      _in_momentum_dtype(),
      # The exchange weights gradients piece by piece: a tree of weighted ones
      # takes as much memory again. What is left of the link is its state.
      optax.scale_by_learning_rate(
          (lambda step: 1.0) if callable(learning_rate) else 1.0,
          flip_sign=False,
      ),
      scale_by_demo(
          compressor,
          decay,
          workers=workers,
          alpha=alpha,
          average=average,
          gradient_weight=learning_rate,
      ),
      optax.scale_by_sign(),
      _in_parameter_dtype(),
      optax.add_decayed_weights(weight_decay, weight_decay_mask),
      optax.scale_by_learning_rate(learning_rate),
  )
  return _zero_where_nothing_was_exchanged(chain, workers)


def _in_momentum_dtype() -> optax.GradientTransformation:
  """Gradients, and so merged momentum, in its dtype: float16 underflows."""

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    del params
    return trees.map_exchanged(
        lambda path, x: x.astype(trees.momentum_dtype(path, x)), updates
    )

  return optax.stateless(update_fn)


def _in_parameter_dtype() -> optax.GradientTransformation:
  """Updates in the dtypes of the parameters, once their signs are taken."""

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    return jax.tree.map(
        lambda u, p: u.astype(jnp.result_type(p)), updates, params
    )

  return optax.stateless(update_fn)


def _zero_where_nothing_was_exchanged(
    chain: optax.GradientTransformation, workers: Workers
) -> optax.GradientTransformationExtraArgs:
  """`chain` over the leaves that take part; zero updates for all others.

  And for all leaves, in a step from which every worker was left out.
  """
  masked = optax.masked(chain, trees.exchanged_mask)

  def update_fn(
      updates: chex.ArrayTree,
      state: optax.MaskedState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, optax.MaskedState]:
    if params is None:
      raise ValueError('demo needs params: tx.update(grads, state, params).')
    updates, state = masked.update(updates, state, params, **extra_args)
    links = state.inner_state
    (exchange,) = (link for link in links if isinstance(link, DeMoState))
    someone = exchange.info['left_out'] < workers.count

    def settle(update: jax.Array, param: Any) -> jax.Array:
      if not trees.is_exchanged(param):
        return jnp.zeros_like(param)
      return jnp.where(someone, update, jnp.zeros_like(update))

    return jax.tree.map(settle, updates, params), state

  return optax.GradientTransformationExtraArgs(masked.init, update_fn)


def _check_range(
    name: str,
    value: chex.Numeric,
    low: float,
    high: float,
    *,
    open_end: bool = False,
) -> None:
  """Checks a concrete number; schedules' traced values cannot be checked."""
  dtype = getattr(value, 'dtype', None)
  if dtype in (jnp.bfloat16, jnp.float16):
    raise ValueError(
        f'{name} is {dtype}, in which 0.999 is 1. optax.inject_hyperparams'
        " casts numbers to the parameters' dtype: give it"
        ' hyperparam_dtype=jnp.float32.'
    )
  if isinstance(value, jax.core.Tracer):
    return
  if not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
    raise TypeError(f'{name}={value!r} must be a number.')
  number = float(value)
  if not (low <= number < high or (number == high and not open_end)):
    bracket = ')' if open_end or high == float('inf') else ']'
    raise ValueError(
        f'{name}={number} is not in [{low:g}, {high:g}{bracket}.'
    )


def _check_momentum(
    leaf: trees.Leaf, plan: LeafPlan, compressor: Compressor, workers: Workers
) -> None:
  expected = (workers.stacked_size, *plan.grid.coefficients_shape)
  found = leaf.momentum.shape
  if found == expected:
    return
  if found[1:] == expected[1:]:
    raise ValueError(
        f'The momentum of {leaf.name} is of {found[0]} workers, but {workers}'
        f' has {expected[0]}. Make the state with tx.init under the same'
        ' workers that update uses.'
    )
  raise ValueError(
      f'The momentum of {leaf.name} has shape {found}, but a gradient of shape'
      f' {leaf.gradient.shape} under {compressor} and {workers} needs'
      f' {expected}. Either the state was made for another compressor, or the'
      ' gradient is not one per worker: an averaged gradient must not reach the'
      ' exchange. Take gradients with demo_optax.value_and_grad.'
  )
