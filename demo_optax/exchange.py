"""One worker's step: from its gradients to what all workers apply.

The way of the data, each arrow a named call in `_send` or `_receive`:

    gradient --to_coefficients--> + decay * momentum --select--> selection
      --encode--> payload --gather--> payloads --decode--> selections
      --weigh, from_selected--> update

and what stays behind: momentum less what the others read in the own payload.
Where all workers select the same places, values take the short way instead:

    selection --encode--> values --sum--> totals --decode--> mean values

Leaves come from any number of transformations, each with numbers and
compressors of its own; they share one gather and one sum.

If what is exchanged may be late, both halves are the same and only their order
is another: a step first receives what the step before has sent.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from demo_optax.compressors import Compressor, LeafPlan
from demo_optax.compressors import chunking as chunks
from demo_optax.engine import heuristics as paths
from demo_optax.engine import topk as selection
from demo_optax.engine.pallas import Encoded, Fused
from demo_optax.wire import message as wire
from demo_optax.workers import Workers
from demo_optax.workers.sharding import Path, Placement, pending_name

# A worker is left out if an element of its gradient is more than this share of
# the largest number. Sums of a chunk over all steps then stay finite.
LARGEST_GRADIENT = 1e-12


class Numbers(NamedTuple):
  """The numbers of one transformation's update rule, scalars.

  Attributes:
    step: int32, exchanges so far.
    decay: of the momentum.
    gradient_weight: of the gradient that is added to it.
    alpha: of what is taken away.
  """

  step: chex.Numeric
  decay: chex.Numeric
  gradient_weight: chex.Numeric
  alpha: chex.Numeric


class Metrics(NamedTuple):
  """Scalars about an exchange.

  Attributes:
    num_excluded: int32, how many workers were left out.
    sent_energy: float32, the energy (sum of squares) of what was sent, over
      that of the momentum it was taken from, of all workers.
    residual_norm: float32, norm of the momentum that stays behind, the root of
      the mean square over the workers.
    mean_senders: float32, how many workers sent a coefficient, on average over
      all that were sent; of leaves of which every worker selects a part for
      itself (and that no kernel decodes), 0 if there are none.
  """

  num_excluded: jax.Array
  sent_energy: jax.Array
  residual_norm: jax.Array
  mean_senders: jax.Array


def nothing_known() -> Metrics:
  """What is known before the first exchange: arrays that can be donated."""
  numbers = (jnp.zeros((), jnp.float32) for _ in range(3))
  return Metrics(jnp.zeros((), jnp.int32), *numbers)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """What is fixed for a leaf when it is traced.

  Attributes:
    part: number of the transformation that it belongs to.
    compressor: what is sent of it.
    average: how what was sent is averaged.
    kernels: whether kernels are wanted, see `scale_by_demo`.
    exact: whether all that was sent leaves the momentum, `alpha` being 1.
    plan: what the compressor decided.
    placement: where the parameter lies.
  """

  part: int
  compressor: Compressor
  average: selection.Average
  kernels: bool | None
  exact: bool
  plan: LeafPlan
  placement: Placement

  @property
  def limit(self) -> float | None:
    """The largest magnitude sent, if all that is sent leaves the momentum."""
    exact = self.exact and self.plan.format.values == 'float32'
    return self.plan.format.largest_sent if exact else None


def plan_leaf(
    path: Path,
    shape: tuple[int, ...],
    dtype: Any,
    compressor: Compressor,
    workers: Workers,
) -> tuple[LeafPlan, Placement]:
  """What is decided for a parameter, and where it lies."""
  placement = workers.param_specs.place(path, shape)
  return compressor.plan_blocks(shape, dtype, placement.blocks), placement


class Request(NamedTuple):
  """What a transformation wants to have exchanged.

  Attributes:
    workers: who takes part.
    leaves: what is fixed for each leaf.
    gradients: per leaf, laid out as `workers` has gradients.
    momentum: per leaf `[stacked_size, *coefficients_shape]`.
    numbers: of its update rule.
    pending: what was sealed by the exchange before, if what is received is to
      be late, by the names of `pending_parts`; else `()`.
  """

  workers: Workers
  leaves: Sequence[Leaf]
  gradients: list[jax.Array]
  momentum: list[jax.Array]
  numbers: Numbers
  pending: Any = ()


# Per leaf the update and the new momentum, and what is to be known.
Response = tuple[list[jax.Array], list[jax.Array], Metrics]


def exchange(requests: Sequence[Request]) -> list[Response]:
  """All that is requested, by the same workers, at once."""
  leaves = [
      dataclasses.replace(leaf, part=part)
      for part, request in enumerate(requests)
      for leaf in request.leaves
  ]
  updates, momentum, info = _run(
      requests[0].workers,
      tuple(leaves),
      [x for request in requests for x in request.gradients],
      [x for request in requests for x in request.momentum],
      [request.numbers for request in requests],
  )
  responses = []
  for request in requests:
    count = len(request.leaves)
    responses.append((updates[:count], momentum[:count], info))
    updates, momentum = updates[count:], momentum[count:]
  return responses


def exchange_late(request: Request) -> tuple[Response, dict[str, jax.Array]]:
  """Sends now, and receives what the exchange before sent.

  Returns:
    The response, and the new pending parts.
  """
  leaves, momentum = tuple(request.leaves), request.momentum
  parts = pending_parts(request.workers, leaves)
  updates, state, info = _run(
      request.workers,
      leaves,
      request.gradients,
      [*momentum, *(request.pending[name] for name in parts)],
      [request.numbers],
      tuple(placement for _, _, placement in parts.values()),
  )
  kept, sealed = state[: len(momentum)], state[len(momentum) :]
  return (updates, kept, info), dict(zip(parts, sealed))


def pending_parts(
    workers: Workers, leaves: Sequence[Leaf]
) -> dict[str, tuple[int, str, Placement]]:
  """A worker's parts on their way: length, dtype, and where they lie.

  By a name which tells the mesh axes that a part is sharded over.
  """
  nothing = Numbers(0, 0.0, 0.0, 0.0)
  blocks = [workers.local_blocks(leaf.placement) for leaf in leaves]
  arrays = [
      jax.ShapeDtypeStruct(leaf.plan.with_blocks(b).grid.shape, jnp.float32)
      for leaf, b in zip(leaves, blocks)
  ]
  work = _Work.of(workers, leaves, arrays, [nothing])
  sizes = dict(workers.param_specs.axis_sizes)
  found = {}
  for length, dtype, axes in work.payload.part_sizes():
    devices = math.prod(sizes[axis] for axis in axes)
    placement = Placement(P(axes) if axes else P(), (devices,), axes)
    total = length * devices // math.prod(workers.local_blocks(placement))
    found[pending_name(dtype, axes)] = total, dtype, placement
  return found


# Jitted, so that it is one computation outside of the user's jit, too.
@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def _run(
    workers: Workers,
    leaves: tuple[Leaf, ...],
    gradients: list[jax.Array],
    state: list[jax.Array],
    numbers: list[Numbers],
    pending: tuple[Placement, ...] | None = None,
) -> tuple[list[jax.Array], list[jax.Array], Metrics]:
  """The step of all workers; late if there is something `pending`."""
  step = _step if pending is None else _late_step
  return workers.run(
      functools.partial(step, workers, leaves),
      gradients,
      state,
      [*(leaf.placement for leaf in leaves), *(pending or ())],
      numbers,
  )


def _step(
    workers: Workers,
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
    numbers: Sequence[Numbers],
) -> tuple[list[jax.Array], list[jax.Array], Metrics]:
  """The step of one worker; if it is several devices, of one of them."""
  work = _Work.of(workers, leaves, gradients, numbers)
  kept, chosen, parts = _send(
      workers, work, gradients, momentum, numbers
  )
  updates, info = _receive(workers, work, chosen, parts)
  return updates, kept, info


def _late_step(
    workers: Workers,
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    state: Sequence[jax.Array],
    numbers: Sequence[Numbers],
) -> tuple[list[jax.Array], list[jax.Array], Metrics]:
  """The same, but what is received was sent by the step before.

  Behind the momentum, `state` has the parts that were sealed then. Nothing that
  is communicated depends on `gradients`, so it may travel while they are made.
  """
  momentum, pending = state[: len(leaves)], state[len(leaves) :]
  work = _Work.of(workers, leaves, gradients, numbers)
  arrived = work.payload.parts(pending)
  updates, info = _receive(workers, work, work.places_before(), arrived)
  kept, _, (to_gather, to_sum) = _send(
      workers, work, gradients, momentum, numbers
  )
  return updates, [*kept, *(x for x, _ in (*to_gather, *to_sum))], info


class _Work(NamedTuple):
  """What is fixed for a step, leaves that are alike in groups.

  Attributes:
    groups: numbers of the leaves of each group.
    leaves: of each group the first leaf, and
    plans: its plan, of all of them stacked, and
    rules: how it is treated.
    fused: of each transformation the kernels, where they apply.
    payload: what is exchanged of them.
  """

  groups: list[list[int]]
  leaves: list[Leaf]
  plans: list[LeafPlan]
  rules: 'list[_Rule]'
  fused: dict[int, Fused]
  payload: wire.Payload

  @staticmethod
  def of(
      workers: Workers,
      leaves: Sequence[Leaf],
      gradients: Sequence[Any],
      numbers: Sequence[Numbers],
  ) -> '_Work':
    """The work on `leaves`, of which a device has these `gradients`."""
    groups = _alike(leaves, gradients)
    group_leaves = [leaves[group[0]] for group in groups]
    plans = [
        leaf.plan.with_blocks(workers.local_blocks(leaf.placement)).stacked(
            len(group)
        )
        for leaf, group in zip(group_leaves, groups)
    ]
    rules = [
        _Rule(leaf.compressor, leaf.average, numbers[leaf.part])
        for leaf in group_leaves
    ]
    payload = wire.Payload(
        [(plan.format, plan.grid.num_chunks) for plan in plans],
        [leaf.placement.axes for leaf in group_leaves],
    )
    first = [gradients[group[0]] for group in groups]
    fused = _fused(group_leaves, plans, first)
    return _Work(groups, group_leaves, plans, rules, fused, payload)

  def places_before(self) -> list[wire.Selection]:
    """Where what was sent one exchange ago belongs, if that is not told."""
    before = []
    for rule, plan in zip(self.rules, self.plans):
      places = jnp.zeros((plan.format.k,), jnp.int32)
      if rule.compressor.places is not None:
        places = rule.compressor.places(plan, rule.numbers.step - 1)
      chosen = jnp.broadcast_to(places, (plan.grid.num_chunks, plan.format.k))
      before.append((chosen, chosen))
    return before


Parts = tuple[Sequence[wire.Part], Sequence[wire.Part]]  # to gather, to sum


def _send(
    workers: Workers,
    work: _Work,
    gradients: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
    numbers: Sequence[Numbers],
) -> tuple[list[jax.Array], list[wire.Selection], Parts]:
  """From gradients and momentum to what goes on the wire.

  Returns:
    the momentum that stays, what was selected, and what is sent of it.
  """
  rules, plans, payload = work.rules, work.plans, work.payload
  gradients = _stack(gradients, work.groups)
  momentum = _stack(momentum, work.groups)
  present = workers.agree(_is_moderate(rules, gradients, momentum))
  encoded: dict[int, Encoded] = {}
  for part, kernels in work.fused.items():
    _, decay, weight, _ = numbers[part]
    encoded |= kernels.encode(
        gradients,
        momentum,
        decay,
        weight,
        present,
        [leaf.limit for leaf in work.leaves],
    )
  held, indices, values, of_all = zip(*(
      (*encoded[number], _energy(encoded[number][0]))
      if number in encoded
      else _accumulate(*leaf, present)
      for number, leaf in enumerate(zip(rules, plans, gradients, momentum))
  ))
  data, sent = payload.encode(list(zip(indices, values)))
  kept, energies = zip(*(
      _subtract(
          rule,
          plan,
          c,
          energy,
          chosen,
          read,
          present,
          done=number in encoded and work.leaves[number].limit is not None,
      )
      for number, (rule, plan, c, energy, chosen, read) in enumerate(
          zip(rules, plans, held, of_all, zip(indices, values), sent)
      )
  ))
  parts = payload.seal(data, energies, present)
  return _unstack(kept, work.groups), list(zip(indices, sent)), parts


def _receive(
    workers: Workers,
    work: _Work,
    chosen: list[wire.Selection],
    parts: Parts,
) -> tuple[list[jax.Array], Metrics]:
  """Through the wire, to updates.

  Args:
    workers: who takes part.
    work: what is fixed.
    chosen: of what is summed, the own selection.
    parts: the own parts.
  """
  to_gather, to_sum = parts
  gathered, summed = workers.gather(to_gather), workers.sum(to_sum)

  received = work.payload.decode(gathered, summed, chosen, workers.count)
  decoded: dict[int, tuple[jax.Array, None]] = {}
  for part, kernels in work.fused.items():
    done = kernels.decode(
        received.selections,
        received.present,
        next(leaf.average for leaf in work.leaves if leaf.part == part),
    )
    decoded |= {number: (update, None) for number, update in done.items()}
  updates, distinct = zip(*(
      decoded.get(number) or _update(rule, plan, *found, senders)
      for number, (rule, plan, found, senders) in enumerate(
          zip(work.rules, work.plans, received.selections, received.present)
      )
  ))
  info = _info(workers, work.leaves, work.plans, received, distinct)
  return _unstack(updates, work.groups), info


def _fused(
    leaves: Sequence[Leaf],
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
) -> dict[int, Fused]:
  """The kernels of each transformation, where they apply."""
  members: dict[int, list[int]] = {}
  for number, leaf in enumerate(leaves):
    members.setdefault(leaf.part, []).append(number)
  found = {}
  for part, own in members.items():
    leaf = leaves[own[0]]
    basis = leaf.compressor.kernel_basis
    found[part] = Fused(leaf.kernels, basis, own, plans, gradients)
  return found


class _Rule(NamedTuple):
  """How a leaf is treated."""

  compressor: Compressor
  average: selection.Average
  numbers: Numbers


def _is_moderate(
    rules: Sequence[_Rule],
    gradients: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
) -> jax.Array:
  """Whether no momentum can overflow or take in a NaN, bool `[]`.

  Told from the gradients, before momentum is touched, so that it is changed in
  place: keeping the old one, to return to it, costs as much memory again.
  """

  def moderate(
      rule: _Rule, gradient: jax.Array, dtype: jnp.dtype
  ) -> jax.Array:
    weight = jnp.asarray(rule.numbers.gradient_weight, dtype)
    largest = LARGEST_GRADIENT * float(jnp.finfo(dtype).max)
    weighted = jnp.abs(weight * gradient.astype(dtype))
    beyond = ~(weighted <= largest)  # a maximum may skip NaNs
    # In two steps of different kinds: XLA:CPU cuts one long reduction into
    # several, and writes down for each element what goes into them.
    rows = math.gcd(beyond.size, 32)
    beyond = beyond.reshape(rows, beyond.size // rows)
    return jnp.max(jnp.sum(beyond, axis=0, dtype=jnp.int32), initial=0) == 0

  return functools.reduce(
      jnp.logical_and,
      [
          moderate(rule, g, m.dtype)
          for rule, g, m in zip(rules, gradients, momentum)
      ],
  )


def _accumulate(
    rule: _Rule,
    plan: LeafPlan,
    gradient: jax.Array,
    momentum: jax.Array,
    present: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Adds a leaf's gradient to its momentum, unless absent, and selects.

  Returns:
    momentum `[chunks, n]`, indices and values `[chunks, k]` of those selected,
    and the energy of the momentum: known here, where momentum is in the caches,
    so that nothing reads it beside where it is written later.
  """
  count, grid = plan.grid.pieces(paths.piece_elements())
  piece = dataclasses.replace(plan, grid=grid)
  gradients = chunks.split_pieces(gradient, plan.grid, count)
  compressor, select = rule.compressor, rule.compressor.select
  if plan.format.shared and compressor.places is not None:
    shared = compressor.places(plan, rule.numbers.step)

  def accumulate(
      momentum: jax.Array, number: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    gradient = jax.lax.dynamic_index_in_dim(gradients, number, 0, False)
    kept = jax.lax.dynamic_index_in_dim(momentum, number, 0, False)

    def add(_: jax.Array, kept: jax.Array) -> jax.Array:
      _, decay, weight, _ = rule.numbers
      weighted = selection.product(weight, gradient.astype(kept.dtype))
      c = compressor.to_coefficients(weighted, piece)
      return selection.product(decay, kept) + c

    if paths.loop_to_keep(gradient.size):
      c = jax.lax.fori_loop(0, present.astype(jnp.int32), add, kept)
    else:
      c = jnp.where(present, add(present, kept), kept)
    momentum = jax.lax.dynamic_update_index_in_dim(momentum, c, number, 0)
    c = c.reshape(grid.num_chunks, grid.chunk_size)
    if plan.format.shared or select is None:
      indices = jnp.broadcast_to(shared, (len(c), plan.format.k))
    else:
      indices = select(c, piece)
      if compressor.kernel_basis is None:  # not ours: in order or not
        indices = jnp.sort(indices, axis=1)
    return momentum, (indices, selection.take(c, indices), _energy(c))

  momentum, (indices, values, energies) = jax.lax.scan(
      accumulate,
      momentum.reshape(count, *grid.coefficients_shape),
      jnp.arange(count, dtype=jnp.int32),
      unroll=count == 1,
  )
  indices, values = (
      x.reshape(plan.grid.num_chunks, plan.format.k) for x in (indices, values)
  )
  momentum = momentum.reshape(plan.grid.num_chunks, -1)
  return momentum, indices, values, jnp.sum(energies)


def _subtract(
    rule: _Rule,
    plan: LeafPlan,
    momentum: jax.Array,
    energy: jax.Array,
    chosen: tuple[jax.Array, jax.Array],
    sent: jax.Array,
    present: jax.Array,
    *,
    done: bool,
) -> tuple[jax.Array, jax.Array]:
  """Takes what was sent out of a leaf's momentum, unless absent or `done`.

  Returns:
    momentum `[*coefficients_shape]`; float32 `[ENERGIES]`, the sums of squares
    of the momentum as it was, of what was sent, and of what stays.
  """
  indices, values = chosen
  taken = selection.product(rule.numbers.alpha, sent)
  stays = _energy(values - taken)
  held = _energy(values)
  if done:
    held, stays = held + energy, energy
  elif plan.format.k < plan.format.n:
    held, stays = energy, jnp.maximum(energy - held, 0) + stays
  energies = jnp.stack([held, _energy(sent), stays])

  c = momentum
  if not done:
    taken = jnp.where(present, taken, jnp.zeros_like(taken))
    c = selection.subtract(c, indices, taken)
  c = c.reshape(plan.grid.coefficients_shape)
  if any(plan.grid.padding):
    c = jnp.where(present, rule.compressor.clear_padding(c, plan), c)
  return c, energies


def _energy(x: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(x), dtype=jnp.float32)


def _update(
    rule: _Rule,
    plan: LeafPlan,
    indices: jax.Array,
    values: jax.Array,
    present: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """A leaf's update, from what all workers sent.

  Args:
    rule: how the leaf is treated.
    plan: what is decided for it.
    indices: int32 `[workers, chunks, k]`.
    values: `[workers, chunks, k]`.
    present: bool `[workers]`, whose values count.

  Returns:
    the update; float32 `[]`, how many different coefficients it was made of.
  """
  count, grid = plan.grid.pieces(paths.piece_elements())
  piece = dataclasses.replace(plan, grid=grid)

  def merge(
      _: None, arrays: tuple[jax.Array, jax.Array]
  ) -> tuple[None, tuple[jax.Array, jax.Array]]:
    indices, values = arrays
    values, distinct = selection.weigh(
        indices, values, present, plan.format.n, rule.average
    )
    update = rule.compressor.from_selected(indices, values, piece)
    return None, (update, distinct)

  def split(x: jax.Array) -> jax.Array:
    x = x.reshape(len(x), count, grid.num_chunks, -1)
    return x.swapaxes(0, 1)

  _, (pieces, distinct) = jax.lax.scan(
      merge, None, (split(indices), split(values)), unroll=count == 1
  )
  return chunks.join_pieces(pieces, plan.grid), jnp.sum(distinct)


def _info(
    workers: Workers,
    leaves: Sequence[Leaf],
    plans: Sequence[LeafPlan],
    received: wire.Received,
    distinct: Sequence[jax.Array | None],
) -> Metrics:
  """What is to be known about the exchange."""
  energies = functools.reduce(
      jnp.add,
      [x / workers.copies(axes) for axes, x in received.energies.items()],
  )
  count = received.taking_part.astype(jnp.float32)
  sent = jnp.zeros((2,), jnp.float32)  # by all, and how much is different
  for leaf, plan, different in zip(leaves, plans, distinct):
    partly = not plan.format.shared and plan.format.k < plan.format.n
    if partly and different is not None:
      of_all = count * float(plan.grid.num_chunks * plan.format.k)
      copies = workers.copies(leaf.placement.axes)
      sent += jnp.stack([of_all, different]) / copies
  held, taken, kept, all_sent, different = workers.sum_inside(
      jnp.concatenate([energies, sent])
  )
  return Metrics(
      num_excluded=workers.count - received.taking_part,
      sent_energy=_ratio(taken, held),
      residual_norm=jnp.sqrt(_ratio(kept, count)),
      mean_senders=_ratio(all_sent, different),
  )


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def _alike(leaves: Sequence[Leaf], gradients: Sequence[Any]) -> list[list[int]]:
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
