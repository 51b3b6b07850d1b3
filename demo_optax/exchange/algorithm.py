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
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from chex import Numeric
from jax import Array, lax

from demo_optax.compressors.layout import Layout
from demo_optax.exchange import arithmetic
from demo_optax.exchange.message import Packer, Report, is_weight
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
  # axes inside a worker; float32 (float64 for float64 parameters). Without
  # error feedback a bucket needs no momentum.
  momentum: dict[str, chex.Array]
  # `[workers, chunks, n]`, the losses of the update code in the chunks that a
  # worker owns. Empty without owners and for exact codes.
  update_residual: dict[str, chex.Array]


class Hyper(NamedTuple):
  """Scalar hyperparameters of a step."""

  step: Numeric  # int32, exchanges so far
  alpha: Numeric
  decay: Numeric
  gradient_weight: Numeric


# Scalars about an exchange, as in `DeMoState.metrics`.
Metrics = dict[str, Array]


def no_metrics() -> Metrics:
  """Returns the initial metrics, each a separate array (for donation)."""
  names = 'sent_energy', 'residual_norm', 'mean_senders'
  numbers = {name: jnp.zeros((), jnp.float32) for name in names}
  return {'num_excluded': jnp.zeros((), jnp.int32), **numbers}


ExchangeKind = Literal['all_gather', 'all_to_all']


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
  """The static part of an exchange."""

  layout: Layout
  average: topk.Average
  platform: str
  num_owners: int | None = None  # workers that share the chunks, if they do
  update_values: str = 'float32'  # the value code for owners' updates
  weighted: bool = False  # whether workers have weights

  @functools.cached_property
  def packer(self) -> Packer:
    """Writes and reads messages."""
    return Packer(self.layout.buckets, self.num_owners, self.weighted)

  @functools.cached_property
  def owners(self) -> UpdatePacker | None:
    """Writes and reads updates; None if no chunk has an owner."""
    owned = self.packer.words.buckets
    if not self.num_owners or not owned:
      return None
    return UpdatePacker(owned, self.update_values)

  @property
  def state_on_device(self) -> WorkerState:
    """The state of one device, as `jax.ShapeDtypeStruct`s."""
    momentum = {}
    for bucket in self.layout.buckets:
      if bucket.error_feedback:
        dtype = bucket.format.dtype
        momentum[bucket.name] = jax.ShapeDtypeStruct(bucket.shape, dtype)
    residuals = self.owners.residuals if self.owners else {}
    return WorkerState(momentum, residuals)

  def __str__(self) -> str:
    """Returns the collective and `update_values` in words."""
    if self.num_owners:
      return f"'all_to_all' with update_values={self.update_values!r}"
    return "'all_gather'"


def exchange(
  config: ExchangeConfig,
  group: Group,
  gradients: Mapping[int, Array],
  state: WorkerState,
  hyper: Hyper,
  weight: Array | None = None,
) -> tuple[list[Array], WorkerState, Metrics]:
  """Runs Algorithm 1 for one step, on one device of one worker.

  The formulas are those of `scale_by_demo`; momentum is kept transformed. Takes
  the shards of gradients on this device, by leaf number; its own state, with
  momentum `[rows, n]` of each bucket; and its weight, float32 `[]`, in averages
  over workers, None in plain ones. Returns the update of each leaf,
  equal on all workers to the last bit; the new state; and metrics.
  """
  layout, packer, buckets = config.layout, config.packer, config.layout.buckets
  # The gradients' chunks of each kind, [rows, n], from all leaves.
  chunks = []
  for number in range(len(buckets)):
    chunks.append(layout.fill(number, gradients, hyper.step))

  # Exclude a worker whose gradient could make its momentum overflow. Decided
  # before momentum is touched, so that momentum can be updated in place.
  valid = group.all_devices(_is_valid(layout, chunks, gradients, hyper, weight))

  # m <- decay m + w T g, and the k of n coefficients of each chunk to send.
  momentum, selected = {}, []
  for bucket, gradient in zip(buckets, chunks):
    held, selection = arithmetic.accumulate_and_select(
      bucket,
      gradient,
      state.momentum.get(bucket.name),
      hyper.decay,
      hyper.gradient_weight,
      valid,
      hyper.step,
    )
    selected.append(selection)
    if held is not None:
      momentum[bucket.name] = held

  # The message, and the values [rows, k] that all workers decode from it.
  message, sent = packer.pack(selected, momentum, hyper.alpha, valid, weight)

  # Send and receive. Updates of owners and uncompressed averages follow below.
  arrived, included = group.send_and_receive(message)

  # m <- m - alpha q. Quantisation losses stay in momentum: error feedback. So
  # does what did not reach the others.
  given = valid if included is None else valid & included
  for bucket, values, selection in zip(buckets, sent, selected):
    if (held := momentum.get(bucket.name)) is None:
      continue
    leaving = rounding.mul_no_fma(hyper.alpha, values)
    leaving = jnp.where(given, leaving, 0)
    momentum[bucket.name] = arithmetic.subtract(
      bucket, held, selection.indices, leaving
    )

  received, report = packer.unpack(arrived, group)

  # u = T^-1 average_i(q_i), in a fixed order: the same bits on all workers.
  merged, distinct = [], []
  for number, bucket in enumerate(packer.read):
    update, count = arithmetic.merge(
      bucket,
      received[number],
      config.average,
      hyper.step,
    )
    merged.append(update)
    distinct.append(count)
  report = report._replace(distinct=distinct)

  # Owners broadcast the updates of the chunks they have merged.
  residual = state.update_residual
  if owners := config.owners:
    data, residual = owners.pack(merged, residual, report)
    everyones = gather(data, group.axis)  # [owners, rows, 128]
    of_owners, report = owners.unpack(everyones, distinct, group)
    for number, update in of_owners.items():
      merged[number] = update

  updates: dict[int, Array] = {}
  for number, update in enumerate(merged):
    updates |= layout.cut(number, update, hyper.step)

  averages, num_valid = _averages(layout, group, gradients, valid, weight)
  updates |= averages
  if report.num_valid is None:  # nothing was compressed
    report = report._replace(num_valid=num_valid)
  metrics = _metrics(packer, group, report)
  state = WorkerState(momentum, residual)
  return [updates[member] for member in sorted(updates)], state, metrics


_traced: contextvars.ContextVar[tuple[list[ExchangeConfig], ...]] = (
  contextvars.ContextVar('demo_optax_traced', default=())
)


@contextlib.contextmanager
def traced_configs() -> Iterator[list[ExchangeConfig]]:
  """Yields a list that collects the configs of exchanges traced inside."""
  configs: list[ExchangeConfig] = []
  token = _traced.set((*_traced.get(), configs))
  try:
    yield configs
  finally:
    _traced.reset(token)


def note(config: ExchangeConfig) -> None:
  """Adds the config of an exchange to the lists of `traced_configs`."""
  for configs in _traced.get():
    configs.append(config)


def run(
  workers: Workers,
  config: ExchangeConfig,
  gradients: Sequence[Array],
  state: WorkerState,
  hyper: Hyper,
  weight: Array | None = None,
) -> tuple[list[Array], WorkerState, Metrics]:
  """Runs `exchange` for all workers.

  Takes the gradients of the exchanged leaves, state and weights as `workers`
  hold them. The updates have the parameters' shapes.
  """
  leaves = config.layout.leaves
  exchanged = config.layout.exchanged

  def one_worker(
    own: list[Array],
    state: WorkerState,
    hyper: Hyper,
    weight: Array | None,
  ) -> tuple[list[Array], WorkerState, Metrics]:
    by_leaf = dict(zip(exchanged, own))
    own_state = jax.tree.map(lambda x: x.reshape(x.shape[-2:]), state)
    with platform.running_on(config.platform):
      updates, new, metrics = exchange(
        config,
        workers.group,
        by_leaf,
        own_state,
        hyper,
        weight,
      )
    new = jax.tree.map(lambda x, old: x.reshape(old.shape), new, state)
    return updates, new, metrics

  stacked, same = workers.stacked_gradients, Spec(False)
  inner = [leaves[member].sharding.spec for member in exchanged]
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
  updates, state, metrics = mapped([*gradients], state, hyper, weight)
  # An update has the type of its parameter, which Explicit meshes compare.
  placed = []
  for member, update in zip(exchanged, updates):
    placed.append(lift.reshard(workers, update, leaves[member].sharding.given))
  return placed, state, metrics


# One computation also outside of a user's jit.
run_jitted = jax.jit(run, static_argnums=(0, 1), inline=True)


def _is_valid(
  layout: Layout,
  chunks: Sequence[Array],
  gradients: Mapping[int, Array],
  hyper: Hyper,
  weight: Array | None,
) -> Array:
  """Returns whether no momentum can overflow or become NaN, bool `[]`.

  False also for a hyperparameter that is not finite, for a decay or alpha
  outside [0, 1], and for a weight that does not count.
  """
  good = [] if weight is None else [is_weight(weight)]
  # A schedule may return [1].
  good.append(jnp.isfinite(hyper.gradient_weight).all())
  for share in (hyper.alpha, hyper.decay):
    good.append((share >= 0) & (share <= 1))
  for chunk in chunks:
    dtype = chunk.dtype
    weighted = jnp.asarray(hyper.gradient_weight, dtype) * chunk
    largest = MAX_GRADIENT_SHARE * float(jnp.finfo(dtype).max)
    # Not a maximum of magnitudes: that of XLA:CPU may lose NaN.
    good.append(jnp.all(jnp.abs(weighted) <= largest))
  for member in layout.averaged:
    gradient = gradients[member]
    if weight is not None:
      gradient = weight.astype(gradient.dtype) * gradient
    good.append(jnp.all(jnp.isfinite(gradient)))
  return plain.every(good)


def _averages(
  layout: Layout,
  group: Group,
  gradients: Mapping[int, Array],
  valid: Array,
  weight: Array | None,
) -> tuple[dict[int, Array], Array | None]:
  """Averages uncompressed gradients over the valid workers."""
  if not layout.averaged:
    return {}, None
  # A joint sum varies over every axis that any of its terms varies over: only
  # leaves that are sharded over the same axes are summed together.
  groups: dict[tuple[str, ...], list[int]] = {(): []}
  for member in layout.averaged:
    groups.setdefault(layout.leaves[member].sharding.axes, []).append(member)
  averages = {}
  scalars = [valid.astype(jnp.int32)]
  if weight is not None:
    scalars.append(jnp.where(valid, weight, 0))
  for axes, members in groups.items():
    terms = []
    for member in members:
      term = gradients[member].astype(layout.leaves[member].dtype)
      if weight is not None:
        term = rounding.mul_no_fma(weight, term)
      terms.append(jnp.where(valid, term, 0))
    if axes:
      totals = sums(terms, group.axis)
    else:  # the first group
      summed = sums([*terms, *scalars], group.axis)
      totals, scalars = summed[: len(members)], summed[len(members) :]
    for member, total in zip(members, totals):
      share = rounding.share(1, scalars[-1], total.dtype)
      averages[member] = rounding.mul_no_fma(share, total)
  return averages, scalars[0]


def _metrics(
  packer: Packer,
  group: Group,
  report: Report,
) -> Metrics:
  assert report.num_valid is not None
  valid = report.num_valid.astype(jnp.float32)
  senders = jnp.zeros((2,), jnp.float32)  # of all that was sent; distinct
  for number, (bucket, distinct) in enumerate(
    zip(packer.buckets, report.distinct)
  ):
    k = bucket.format.k
    if not bucket.format.shared and k < bucket.format.n:
      of_all = valid * float(bucket.num_chunks * k)
      # Rows that fill a bucket count as sent by all.
      rows = packer.read[number].rows * (packer.num_owners or 1)
      filling = (rows - bucket.num_chunks) * k * jnp.minimum(valid, 1)
      senders += jnp.stack([of_all, distinct - filling])
  held, sent, stays, all_sent, different = group.over_devices(
    lax.psum,
    jnp.concatenate([report.energies, senders]),
  )
  return {
    'num_excluded': group.size - report.num_valid,
    'sent_energy': _ratio(sent, held),
    'residual_norm': jnp.sqrt(_ratio(stays, valid)),
    'mean_senders': _ratio(all_sent, different),
  }


def _ratio(a: Array, b: Array) -> Array:
  return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
