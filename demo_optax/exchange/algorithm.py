"""One exchange, as one device of one worker sees it: Algorithm 1 of the paper.

`exchange` is the main path, from gradients to updates, over buckets of chunks
(`compressors.layout`). The arithmetic of a bucket is in `arithmetic`, the bytes
of messages in `message`, collectives in `workers`.

The whole tree takes one `all_gather` with one message per step, or one
all-reduce where all workers select the same places. With `'all_to_all'` each
worker owns an equal share of the chunks: it receives what was selected from
them, merges it, and broadcasts the update (`owners`). What a worker receives
then does not grow with the number of workers.

A worker is excluded if its gradient is not finite, or above 1e-12 of the
largest float, so that momentum could overflow. All workers leave it out of all
averages, and its momentum does not change. If all are excluded, as by a
hyperparameter that is not finite, or a decay or alpha outside 0 to 1, the
update is zero; links that follow, such as weight decay, still run. A damaged
message also excludes its sender, and the update in it is lost: indices out of
order or range, values that are not finite or too large to transform. Errors
with normal magnitudes are not detected.

  Peng et al., DeMo: Decoupled Momentum Optimization, arXiv:2411.19870
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from demo_optax.compressors.layout import Layout
from demo_optax.exchange import arithmetic
from demo_optax.exchange.message import (
  Packer,
  Received,
  Report,
  is_weight,
)
from demo_optax.exchange.owners import UpdatePacker
from demo_optax.numerics import plain, platform, rounding, topk
from demo_optax.workers import Group, Spec, Workers, lift
from demo_optax.workers.collectives import gather, sums

# A worker is excluded if a gradient element exceeds this share of the largest
# float. Sums of a chunk over all steps then stay finite.
MAX_GRADIENT_SHARE = 1e-12


class WorkerState(NamedTuple):
  """A worker's state between exchanges by bucket name, stacked over workers."""

  # Coefficients `[workers, rows, n]`, `[workers, devices, rows, n]` with mesh
  # axes inside a worker; float32 (float64 for float64 parameters).
  momentum: dict[str, chex.Array]
  # `[workers, chunks, n]`, the losses of the update code in the chunks that a
  # worker owns. Empty without owners and for exact codes.
  update_residual: dict[str, chex.Array]
  # Of an exchange with a delay uint32 `[workers, rows, 128]`, the message of
  # the last step, not yet subtracted from the momentum. Else empty.
  message: dict[str, chex.Array]


class Hyper(NamedTuple):
  """Scalar hyperparameters of a step."""

  step: chex.Numeric  # int32, exchanges so far
  alpha: chex.Numeric
  decay: chex.Numeric
  gradient_weight: chex.Numeric


# Scalars about an exchange, as in `DeMoState.metrics`.
Metrics = dict[str, jax.Array]


def no_metrics() -> Metrics:
  """Returns the initial metrics, each a separate array (for donation)."""
  names = 'sent_energy', 'residual_norm', 'mean_senders'
  numbers = {name: jnp.zeros((), jnp.float32) for name in names}
  return {'num_excluded': jnp.zeros((), jnp.int32), **numbers}


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
  """The static part of an exchange; made by `make_config`."""

  layout: Layout
  average: topk.Average
  packer: Packer
  platform: str
  # Decides about residuals in the state, whichever collective 'auto' chose.
  owners: UpdatePacker | None = None
  # Whether a step exchanges the messages of the step before.
  delayed: bool = False

  @property
  def update_packer(self) -> UpdatePacker | None:
    """Writes and reads updates of owners; None without owners."""
    return None if self.packer.num_owners is None else self.owners

  @property
  def state_on_device(self) -> WorkerState:
    """The state of one device, as `jax.ShapeDtypeStruct`s.

    The same for both choices of `'auto'`, since a state may be resized.
    """
    momentum = {
      b.name: jax.ShapeDtypeStruct(b.shape, b.format.dtype)
      for b in self.layout.buckets
    }
    residuals = {} if self.owners is None else self.owners.residuals
    message = {}
    if self.delayed:
      for name, (shape, dtype) in self.packer.shapes.items():
        message[name] = jax.ShapeDtypeStruct(shape, dtype)
    return WorkerState(momentum, residuals, message)

  def received_bytes(self, count: int) -> int:
    """Returns the bytes from other workers that one device gathers."""
    shape, _ = self.packer.shapes.get(self.packer.name, ((0,), ''))
    size = 4 * math.prod(shape) // (self.packer.num_owners or 1)
    if self.update_packer is not None:
      size += self.update_packer.num_bytes
    return (count - 1) * size

  def __str__(self) -> str:
    """Returns the collective and `update_values` in words."""
    kind = 'all_gather' if self.packer.num_owners is None else 'all_to_all'
    values = self.owners and f' with update_values={self.owners.values!r}'
    late = ', delayed' if self.delayed else ''
    return f'{kind!r}{values or ""}{late}'


ExchangeKind = Literal['all_gather', 'all_to_all', 'auto']


def make_config(
  layout: Layout,
  average: topk.Average,
  kind: ExchangeKind = 'all_gather',
  count: int | None = None,
  update_values: str = 'float32',
  runs_on: str | None = None,
  delayed: bool = False,
  weighted: bool = False,
) -> ExchangeConfig:
  """Returns the static part of an exchange.

  `kind='auto'` takes the collective that receives fewer bytes. `count`, the
  number of workers, is None if it is unknown: chunks then have no owners.
  `weighted` says whether workers have weights.
  """
  packer = Packer(layout.buckets, weighted=weighted)
  runs_on = runs_on or platform.of()
  gathered = ExchangeConfig(layout, average, packer, runs_on, delayed=delayed)
  if delayed and packer.summed:
    shared = [x.name for x in layout.buckets if x.format.shared]
    raise ValueError(
      'compressor must let each worker choose what it sends with delayed=True,'
      f' got one whose places all workers share in {", ".join(shared)}. Give'
      ' those leaves demo_optax.dct_topk().'
    )
  if kind == 'all_gather' or count is None:
    return gathered
  if any(not bucket.format.shared for bucket in layout.buckets):
    owners = UpdatePacker(layout.buckets, count, update_values)
    gathered = dataclasses.replace(gathered, owners=owners)
  of_owners = dataclasses.replace(packer, num_owners=count)
  owned = dataclasses.replace(gathered, packer=of_owners)
  choices = [owned] if kind == 'all_to_all' else [gathered, owned]
  return min(choices, key=lambda config: config.received_bytes(count))


def exchange(
  config: ExchangeConfig,
  group: Group,
  gradients: Mapping[int, jax.Array],
  state: WorkerState,
  hyper: Hyper,
  weight: jax.Array | None = None,
) -> tuple[list[jax.Array], WorkerState, Metrics]:
  """Runs Algorithm 1 for one step, on one device of one worker.

  The formulas are those of `scale_by_demo`; momentum is kept transformed. Takes
  the shards of gradients on this device, by leaf number; its own state, with
  momentum `[rows, n]` of each bucket; and its weight, float32 `[]`, in averages
  over workers, None in plain ones. Returns the update of each leaf,
  equal on all workers to the last bit; the new state; and metrics.
  """
  layout, packer, buckets = config.layout, config.packer, config.layout.buckets
  devices = [group.device_index(bucket.split_axes) for bucket in buckets]

  def give(
    number: int,
    momentum: jax.Array,
    indices: jax.Array | None,
    values: jax.Array,
    given: jax.Array,
    valid: jax.Array,
  ) -> jax.Array:
    """Subtracts sent values from a bucket's momentum, if `given`."""
    values = rounding.mul_no_fma(hyper.alpha, values)
    values = plain.where(given, values, 0)
    m = arithmetic.subtract(buckets[number], momentum, indices, values)
    return layout.clear_padding(number, m, devices[number], valid)

  held, last = dict(state.momentum), []
  if config.delayed:
    # The last message leaves the momentum, with the values that others read.
    alone = dataclasses.replace(group, size=1)
    rows = jax.tree.map(lambda x: x[None], state.message)
    received, _ = packer.unpack(rows, alone)
    last = [jax.tree.map(lambda x: x[0], of_bucket) for of_bucket in received]
    for i, (indices, values, valid, _) in enumerate(last):
      name = buckets[i].name
      held[name] = give(i, held[name], indices, values, valid, valid)

  # The gradients' chunks of each kind, [rows, n], from all leaves.
  starts = layout.starts(hyper.step)
  chunks = []
  for i, device in enumerate(devices):
    chunks.append(layout.fill(i, gradients, device, starts))

  # Exclude a worker whose gradient could make its momentum overflow. Decided
  # before momentum is touched, so that momentum can be updated in place.
  valid = group.all_devices(_is_valid(layout, chunks, gradients, hyper, weight))

  # m <- decay m + w T g, and the k of n coefficients of each chunk to send.
  momentum, selected = [], []
  for i, bucket in enumerate(buckets):
    m, of_bucket = arithmetic.accumulate_and_select(
      bucket,
      chunks[i],
      held[bucket.name],
      hyper.decay,
      hyper.gradient_weight,
      valid,
      hyper.step,
    )
    momentum.append(m)
    selected.append(of_bucket)

  # The message, and the values [rows, k] that all workers decode from it.
  message, sent = packer.pack(selected, hyper.alpha, valid, weight)

  # Send and receive. Updates of owners and uncompressed averages follow below.
  if config.delayed:
    arrived, included = group.send_and_receive(state.message, early=True)
    residual = _take_back(config, momentum, last, included, valid, hyper)
    # That of a worker that is excluded is empty.
    new = {name: plain.where(valid, x, 0) for name, x in message.items()}
  else:
    arrived, included = group.send_and_receive(message)
    # m <- m - alpha q. Quantisation losses stay in momentum: error feedback. So
    # does what did not reach the others.
    given = valid if included is None else valid & included
    residual = []
    for i, m in enumerate(momentum):
      residual.append(give(i, m, selected[i].indices, sent[i], given, valid))
    new = {}

  received, report = packer.unpack(arrived, group)

  # u = T^-1 average_i(q_i), in a fixed order: the same bits on all workers.
  merged, distinct = [], []
  for bucket, selections, unused in zip(packer.read, received, chunks):
    u, found = arithmetic.merge(
      bucket, selections, config.average, hyper.step, unused
    )
    merged.append(u)
    distinct.append(found)
  report = report._replace(distinct=distinct)

  # Owners broadcast the updates of the chunks they have merged.
  update_residual = state.update_residual
  if owners := config.update_packer:
    data, update_residual = owners.pack(merged, update_residual, report)
    everyones = gather(data, group.axis)
    of_owners, report = owners.unpack(everyones, distinct, group)
    merged = [of_owners.get(i, u) for i, u in enumerate(merged)]

  updates: dict[int, jax.Array] = {}
  for i, (bucket, u) in enumerate(zip(buckets, merged)):
    if bucket.split_axes:
      u = group.join_devices(u[: bucket.num_chunks], bucket.split_axes)
    updates |= layout.cut(i, u, starts)

  averages, num_valid = _averages(layout, group, gradients, valid, weight)
  updates |= averages
  if report.num_valid is None:  # nothing was compressed
    report = report._replace(num_valid=num_valid)
  metrics = _metrics(layout, group, report)
  by_name = {b.name: m for b, m in zip(buckets, residual)}
  state = WorkerState(by_name, update_residual, new)
  return [updates[i] for i in sorted(updates)], state, metrics


def _take_back(
  config: ExchangeConfig,
  momentum: Sequence[jax.Array],
  last: Sequence[Received],
  included: jax.Array | None,
  valid: jax.Array,
  hyper: Hyper,
) -> list[jax.Array]:
  """Returns momentum with what was in a message that did not arrive.

  It has decayed since, as if it had stayed there.
  """
  if included is None:
    return list(momentum)
  found = []
  for bucket, m, (indices, values, sound, _) in zip(
    config.layout.buckets, momentum, last
  ):
    values = rounding.mul_no_fma(hyper.alpha, values)
    decayed = rounding.mul_no_fma(hyper.decay, values)
    lost = plain.where(valid, decayed, values)
    lost = plain.where(sound & ~included, lost, 0)
    found.append(arithmetic.subtract(bucket, m, indices, -lost))
  return found


_traced: contextvars.ContextVar[tuple[list[ExchangeConfig], ...]] = (
  contextvars.ContextVar('demo_optax_traced', default=())
)


@contextlib.contextmanager
def traced_configs() -> Iterator[list[ExchangeConfig]]:
  """Yields a list that collects the configs of exchanges traced inside."""
  found: list[ExchangeConfig] = []
  token = _traced.set((*_traced.get(), found))
  try:
    yield found
  finally:
    _traced.reset(token)


def note(config: ExchangeConfig) -> None:
  """Adds the config of an exchange to the lists of `traced_configs`."""
  for found in _traced.get():
    found.append(config)


def run(
  workers: Workers,
  config: ExchangeConfig,
  gradients: Sequence[jax.Array],
  state: WorkerState,
  hyper: Hyper,
  weight: jax.Array | None = None,
) -> tuple[list[jax.Array], WorkerState, Metrics]:
  """Runs `exchange` for all workers.

  Takes the gradient of each leaf, state and weights as `workers` hold them. The
  updates are those of the exchanged leaves, in the parameters' shapes.
  """
  leaves = config.layout.leaves
  exchanged = sorted((*config.layout.compressed, *config.layout.averaged))

  def one_worker(
    own: list[jax.Array],
    state: WorkerState,
    hyper: Hyper,
    weight: jax.Array | None,
  ) -> tuple[list[jax.Array], WorkerState, Metrics]:
    own_state = jax.tree.map(lambda x: x.reshape(x.shape[-2:]), state)
    with platform.running_on(config.platform):
      updates, new, metrics = exchange(
        config,
        workers.group,
        dict(zip(exchanged, own)),
        own_state,
        hyper,
        weight,
      )
    new = jax.tree.map(lambda x, old: x.reshape(old.shape), new, state)
    return updates, new, metrics

  stacked, same = workers.stacked_gradients, Spec(False)
  inner = [leaves[i].sharding.spec for i in exchanged]
  buckets = jax.tree.map(lambda _: workers.bucket_spec, state)
  of_metrics = dict.fromkeys(jax.eval_shape(no_metrics), same)
  mapped = lift.map_over(
    workers,
    one_worker,
    (
      [Spec(stacked, spec) for spec in inner],
      buckets,
      jax.tree.map(lambda _: same, hyper),
      None if weight is None else Spec(stacked),
    ),
    ([Spec(False, spec) for spec in inner], buckets, of_metrics),
  )
  own = [gradients[i] for i in exchanged]
  updates, state, metrics = mapped(own, state, hyper, weight)
  # An update has the type of its parameter, which Explicit meshes compare.
  updates = [
    lift.reshard(workers, u, leaves[i].sharding.given)
    for i, u in zip(exchanged, updates)
  ]
  return updates, state, metrics


# One computation also outside of a user's jit.
run_jitted = jax.jit(run, static_argnums=(0, 1), inline=True)


def _is_valid(
  layout: Layout,
  chunks: Sequence[jax.Array],
  gradients: Mapping[int, jax.Array],
  hyper: Hyper,
  weight: jax.Array | None,
) -> jax.Array:
  """Returns whether no momentum can overflow or become NaN, bool `[]`.

  False also for a hyperparameter that is not finite, for a decay or alpha
  outside [0, 1], and for a weight that does not count.
  """
  good = [] if weight is None else [is_weight(weight)]
  good.append(
    jnp.isfinite(hyper.gradient_weight).all()
  )  # a schedule may return [1]
  good += [(x >= 0) & (x <= 1) for x in (hyper.alpha, hyper.decay)]
  for g in chunks:
    gradient_weight = jnp.asarray(hyper.gradient_weight, g.dtype)
    largest = MAX_GRADIENT_SHARE * float(jnp.finfo(g.dtype).max)
    good.append(_none(~(jnp.abs(gradient_weight * g) <= largest)))
  for i in layout.averaged:
    g = gradients[i]
    if weight is not None:
      g = weight.astype(g.dtype) * g
    good.append(_none(~jnp.isfinite(g)))
  return plain.every(good)


def _none(beyond: jax.Array) -> jax.Array:
  """Returns whether no element is true."""
  # Not a maximum of magnitudes: that of XLA:CPU may lose NaN.
  if not platform.reduce_in_two_stages():
    return ~jnp.any(beyond)
  rows = next(r for r in range(32, 0, -1) if beyond.size % r == 0)
  beyond = beyond.reshape(rows, beyond.size // rows)
  return jnp.max(jnp.sum(beyond, axis=0, dtype=jnp.int32), initial=0) == 0


def _averages(
  layout: Layout,
  group: Group,
  gradients: Mapping[int, jax.Array],
  valid: jax.Array,
  weight: jax.Array | None,
) -> tuple[dict[int, jax.Array], jax.Array | None]:
  """Averages uncompressed gradients over the valid workers."""
  if not layout.averaged:
    return {}, None
  # A joint sum varies over every axis that any of its terms varies over: only
  # leaves that are sharded over the same axes are summed together.
  groups: dict[tuple[str, ...], list[int]] = {(): []}
  for i in layout.averaged:
    groups.setdefault(layout.leaves[i].sharding.axes, []).append(i)
  found = {}
  scalars = [valid.astype(jnp.int32)]
  if weight is not None:
    scalars.append(plain.where(valid, weight, 0))
  for axes, members in groups.items():
    own = [gradients[i].astype(layout.leaves[i].dtype) for i in members]
    if weight is not None:
      own = [rounding.mul_no_fma(weight, x) for x in own]
    own = [plain.where(valid, x, jnp.zeros_like(x)) for x in own]
    summed = sums([*own, *([] if axes else scalars)], group.axis)
    if not axes:  # the first group
      scalars = summed[len(members) :]
    count, *total_weight = scalars
    for i, total in zip(members, summed):
      share = rounding.exact_reciprocal(count, group.size, total.dtype)
      if total_weight:
        share = rounding.reciprocal(total_weight[0], total.dtype)
      found[i] = rounding.mul_no_fma(share, total)
  return found, scalars[0]


def _metrics(layout: Layout, group: Group, report: Report) -> Metrics:
  assert report.num_valid is not None
  valid = report.num_valid.astype(jnp.float32)
  senders = jnp.zeros((2,), jnp.float32)  # of all that was sent; distinct
  for bucket, different in zip(layout.buckets, report.distinct):
    form = bucket.format
    if not form.shared and form.k < form.n:
      of_all = valid * float(bucket.num_chunks * form.k)
      senders += jnp.stack([of_all, different])
  held, sent, stays, all_sent, different = group.over_devices(
    jax.lax.psum, jnp.concatenate([report.energies, senders])
  )
  return {
    'num_excluded': group.size - report.num_valid,
    'sent_energy': _ratio(sent, held),
    'residual_norm': jnp.sqrt(_ratio(stays, valid)),
    'mean_senders': _ratio(all_sent, different),
  }


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
  return plain.where(b > 0, a / plain.where(b > 0, b, 1), 0)
