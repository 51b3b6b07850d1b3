"""Links of the recipes' chains that optax lacks."""

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from demo_optax import _tree
from demo_optax._paths import Keys, leaves_of, map_by_path
from demo_optax._per_worker import stays_finite
from demo_optax.compressors.compressor import Compressor, CompressorTree, Frozen
from demo_optax.numerics import plain, platform
from demo_optax.transformation import DeMoState, check_layout
from demo_optax.workers import Workers, checks, lift

# Newton-Schulz iterations `(a + b g + c g g) x` with `g = x x'`, each fitted to
# the singular values that the one before leaves, as in Polar Express
# (arXiv 2505.16932). Values from 0.003 to 1 end between 0.77 and 1.23. Muon's
# five bring them between 0.68 and 1.2. Products in bfloat16 may add 2 % to a
# value; with 3 % it would grow without bound. 'aol' begins with none above 1.
NEWTON_SCHULZ = (
  (8.222, -23.347, 16.634),
  (3.972, -2.843, 0.517),
  (3.447, -2.442, 0.46),
  (2.515, -1.801, 0.409),
)

# Updates with a gradient were above 1e-4 in all models tried; a residual
# without one loses a tenth per step.
_MIN_RMS = 1e-8

# Numbers in a stack on a device: larger ones would only take more memory.
_STACK = 2**24


def scale_to_muon(
  dimensions: Mapping[Keys, contrib.MuonDimensionNumbers],
  compressors: Mapping[Keys, Compressor | Frozen | None],
  decay: chex.Numeric,
  consistent_rms: chex.Numeric | None,
) -> optax.GradientTransformation:
  r"""Gives matrices the length of Muon's updates at a rate of one.

  .. math:: u \leftarrow r\, u / \max(\sqrt{\mathrm{mean}(u^2)}, \epsilon)

  Averaging orthonormal matrices shrinks them (more so when workers disagree),
  and sparsifying shrinks them again. After this link the learning rate alone
  sets a step's length, as in `Muon is Scalable for LLM Training
  <https://arxiv.org/abs/2502.16982>`_, section 2.2. Zeros stay zeros.

  The root mean square :math:`r` of `optax.contrib.muon` is
  `1 / sqrt(max(fan_in, fan_out))` of an orthonormal matrix, times
  `sqrt(max(1, fan_out / fan_in))`, or times
  `sqrt(max(fan_in, fan_out)) * consistent_rms`.

  If a share `s` is sent, a coefficient waits in the residual for about
  `t = 1 / (1 - decay (1 - s))` steps; without a residual its turn comes every
  `t = 1 / s` steps. In `t` steps Muon's similar updates move `t` times as far
  as one. Those of the exchange, which have different coefficients, move
  `sqrt(t)` times as far, and are made that much longer.

  Axes and compressors are given by path. A leaf with more axes is a stack of
  matrices, scaled one by one.
  """

  def update_fn(
    updates: chex.ArrayTree,
    params: chex.ArrayTree | None,
  ) -> chex.ArrayTree:
    del params
    leaves = dict(leaves_of(updates))
    alike = collections.defaultdict(list)
    for keys, leaf in leaves.items():
      alike[jax.typeof(leaf), dimensions[keys]].append(keys)
    for (leaf_type, (inputs, outputs)), members in alike.items():
      length = consistent_rms
      if length is None:
        length = _size(leaf_type, inputs) ** -0.5
      *other_axes, last_axis = inputs + outputs
      # Few kernels for all leaves of one type.
      joined = plain.joined([leaves[keys] for keys in members])
      rows = []
      for leaf in joined:
        # [..., 1, ...]
        rows.append(jnp.mean(leaf * leaf, last_axis, keepdims=True))
      # [leaves, ..., 1, 1, ...]
      axes = tuple(axis + 1 for axis in other_axes)
      squares = jnp.mean(jnp.stack(rows), axes, keepdims=True)
      found = jnp.maximum(jnp.sqrt(squares), _MIN_RMS)
      for keys, leaf, rms in zip(members, joined, found):
        waits = _waits(compressors[keys], leaf.shape, decay)
        wanted = jnp.asarray(length * waits**0.5, leaf.dtype)
        leaves[keys] = leaf * (wanted / rms)
    return jax.tree.structure(updates).unflatten(leaves.values())

  return optax.stateless(update_fn)


def _waits(
  compressor: Compressor | Frozen | None,
  shape: tuple[int, ...],
  decay: chex.Numeric,
) -> chex.Numeric:
  """Returns how many steps a coefficient waits until it is sent."""
  if not isinstance(compressor, Compressor):
    return 1
  if not compressor.error_feedback:
    return compressor.period
  sent = compressor.chunks(shape, 'float32').format
  return 1 / (1 - decay * (1 - sent.k / sent.n))


def lost_unless_finite(
  weight: optax.ScalarOrSchedule,
  *hyperparams: optax.ScalarOrSchedule | None,
) -> optax.Schedule:
  """Returns the weight of gradients, NaN if a hyperparameter is not finite.

  Every worker is then excluded: neither momentum nor parameters change.
  """

  def weight_at(count: chex.Numeric) -> chex.Numeric:
    values = []
    for value in (weight, *hyperparams):
      values.append(value(count) if callable(value) else value)
    return jnp.where(stays_finite(values), values[0], jnp.nan)

  return weight_at


class OwnMuonState(NamedTuple):
  """The state of each worker's Muon."""

  steps: jax.Array
  mu: chex.ArrayTree


def own_muon(
  beta: chex.Numeric,
  mu_dtype: chex.ArrayDType | None,
  dimensions: Mapping[Keys, contrib.MuonDimensionNumbers | None],
  workers: Workers,
) -> optax.GradientTransformation:
  """Orthonormalises each worker's momentum of the leaves that have axes.

  As `optax.contrib.scale_by_muon`, except that Newton-Schulz runs on stacks of
  matrices: it takes as many kernels for a stack as for a matrix. A matrix whose
  gradient is zero, or below some 1e-19, where squares vanish, gets a zero
  update: orthonormalisation would restore the length of a momentum without
  gradients. If a gradient is not finite, or so large that squares overflow,
  matrices become NaN and the state stays.
  """

  def zeros(keys: Keys, x: jax.Array) -> Any:
    if dimensions[keys] is None:  # no matrix
      return optax.MaskedNode()
    return jnp.zeros_like(x, dtype=mu_dtype)

  def init_fn(params: chex.ArrayTree) -> OwnMuonState:
    mu = map_by_path(zeros, params)
    return OwnMuonState(jnp.zeros((), jnp.int32), mu)

  def update_fn(
    updates: chex.ArrayTree,
    state: OwnMuonState,
    params: chex.ArrayTree | None = None,
  ) -> tuple[chex.ArrayTree, OwnMuonState]:
    leaves = dict(leaves_of(updates))
    sides, gradients, others = {}, [], []
    for keys, leaf in leaves.items():
      if axes := dimensions[keys]:
        sides[keys] = axes
        gradients.append(leaf)
      else:
        others.append(leaf)
    momenta, mu_structure = jax.tree.flatten(state.mu)
    own = gradients, momenta, state.steps
    update = functools.partial(_update_matrices, [*sides.values()], workers)
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
      # XLA shards what is between: optax passes no `out_sharding`, which every
      # reshape and product of sharded arrays would need.
      specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, own)
      update = jax.sharding.auto_axes(update, axes=explicit, out_sharding=specs)
    # An array that is closed over would keep its Explicit type, and a number
    # becomes an array: subtracted before, so that all maps have the same bits.
    good = stays_finite(others)
    orthonormal, momenta, steps = update(*own, good, beta, 1 - beta)
    leaves |= zip(sides, orthonormal)
    updates = jax.tree.structure(updates).unflatten(leaves.values())
    return updates, OwnMuonState(steps, mu_structure.unflatten(momenta))

  return optax.GradientTransformation(init_fn, update_fn)


def _update_matrices(
  dimensions: Sequence[contrib.MuonDimensionNumbers],
  workers: Workers,
  gradients: Sequence[jax.Array],
  momenta: Sequence[jax.Array],
  steps: jax.Array,
  good: jax.Array,
  beta: chex.Numeric,
  weight: chex.Numeric,
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
  """Returns orthonormal matrices, their momenta, and the number of steps.

  Matrices of one shape form stacks. Devices of a worker take whole matrices of
  a stack (`lift.spread`): sharded ones would be gathered for every product.
  """
  # Squares: they show whether this step is good, and which matrices have a
  # gradient.
  good &= (beta >= 0) & (beta < 1)
  gradients = plain.joined(gradients)
  rows = []  # of each leaf, [matrices, inputs, 1]
  for gradient, sides in zip(gradients, dimensions):
    squares = jnp.square(gradient)
    sums = jnp.sum(squares, sides.output_axis, keepdims=True)
    rows.append(_to_matrices(sums, sides))
  stacks = _stacks(gradients, dimensions, workers)
  energies = []  # of each stack, [matrices]
  for members in stacks:
    of_rows = jnp.concatenate([rows[number] for number in members])
    energy = jnp.sum(of_rows, axis=(1, 2))
    energies.append(energy)
    # No sum in the Gramian of `ahead` is larger.
    largest = 4 * of_rows.shape[1] * energy
    good &= jnp.isfinite(largest).all()

  # Momentum, and what Nesterov's step sees, both corrected for a momentum that
  # starts at zero.
  count = optax.safe_increment(steps)
  momentum_weight = beta / (1 - beta ** (count + 1))
  gradient_weight = weight / (1 - beta**count)
  new_momenta = []
  ahead = []  # of each leaf, [matrices, inputs, outputs]
  for gradient, momentum, sides in zip(gradients, momenta, dimensions):
    old = momentum.astype(gradient.dtype)
    # Not changed by a choice later: `ahead` would be made of both again.
    new = jnp.where(good, beta * old + weight * gradient, old)
    new_momenta.append(new.astype(momentum.dtype))
    nesterov = momentum_weight * new + gradient_weight * gradient
    ahead.append(_to_matrices(nesterov, sides))

  # Newton-Schulz, a stack at a time.
  spread = functools.partial(lift.spread, workers)
  updates = list(gradients)
  for members, energy in zip(stacks, energies):
    stack = jnp.concatenate([ahead[number] for number in members])
    # 1, or 0 for a matrix without gradient; NaN excludes the worker.
    size = jnp.where(good, energy != 0, jnp.nan).astype(stack.dtype)
    orthonormal = spread(_orthonormal(spread(stack), spread(size)))
    counts = [len(ahead[number]) for number in members]
    without_padding = orthonormal[: sum(counts)]
    parts = jax.lax.split(without_padding, counts)
    for number, part in zip(members, parts):
      shape = gradients[number].shape
      updates[number] = _to_leaf(part, shape, dimensions[number])
  return updates, new_momenta, jnp.where(good, count, steps)


def _stacks(
  leaves: Sequence[jax.Array],
  dimensions: Sequence[contrib.MuonDimensionNumbers],
  workers: Workers,
) -> list[list[int]]:
  """Returns stacks of matrices with one shape, as numbers of their leaves."""
  stacks = collections.defaultdict(list)
  sizes: dict[Any, int] = collections.Counter()
  for number, leaf in enumerate(leaves):
    inputs, outputs = dimensions[number]
    shape = _size(leaf, inputs), _size(leaf, outputs)
    kind = shape, leaf.dtype
    most = workers.param_specs.devices * max(_STACK, math.prod(shape))
    stacks[kind, sizes[kind] // most].append(number)
    sizes[kind] += leaf.size
  return list(stacks.values())


def _to_matrices(
  x: jax.Array,
  dimensions: contrib.MuonDimensionNumbers,
) -> jax.Array:
  """Returns a leaf as `[matrices, inputs, outputs]`."""
  inputs, outputs = dimensions
  axes = inputs + outputs
  # [..., *inputs, *outputs]
  moved = jnp.moveaxis(x, axes, range(-len(axes), 0))
  return moved.reshape(-1, _size(x, inputs), _size(x, outputs))


def _to_leaf(
  matrices: jax.Array,
  shape: tuple[int, ...],
  dimensions: contrib.MuonDimensionNumbers,
) -> jax.Array:
  """Undoes `_to_matrices`, for a leaf of this shape."""
  axes = dimensions.reduction_axis + dimensions.output_axis
  # [..., *inputs, *outputs]
  moved = matrices.reshape(*np.delete(shape, axes), *np.take(shape, axes))
  return jnp.moveaxis(moved, range(-len(axes), 0), axes)


def _size(x: jax.Array, axes: Iterable[int]) -> int:
  return math.prod(x.shape[axis] for axis in axes)


def _orthonormal(x: jax.Array, size: jax.Array) -> jax.Array:
  """Orthonormalises `[matrices, rows, cols]`, times a `size [matrices]`.

  Newton-Schulz whose first iteration divides each row by the root of its sum in
  the Gramian (`'aol'` of optax). Large arrays are only multiplied.
  """
  if x.shape[1] > x.shape[2]:  # products need no transposed copy
    return _orthonormal(x.mT, size).mT
  one = jnp.eye(x.shape[1], dtype=x.dtype)[None]

  def polynomial(
    gram: jax.Array,
    coefficients: tuple[float, float, float],
  ) -> jax.Array:
    a, b, c = coefficients
    return a * one + b * gram + c * gram @ gram

  gram = x @ x.mT
  sums = jnp.sum(jnp.abs(gram), axis=2, keepdims=True)
  limits = jnp.finfo(x.dtype)
  # Smaller sums may lack terms that became zero.
  least = limits.tiny / limits.eps
  scale = jax.lax.rsqrt(jnp.maximum(sums, least))  # [matrices, rows, 1]
  first, *others = NEWTON_SCHULZ
  factor = polynomial(scale * gram * scale.mT, first)
  x = (factor * (size[:, None, None] * scale.mT)) @ x
  for coefficients in others:
    x = polynomial(x @ x.mT, coefficients) @ x
  return x


def chain(
  workers: Workers,
  compressor: CompressorTree,
  *links: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Chains links for the leaves that are exchanged; other updates are zero.

  One of the links is an exchange. In a step that excludes every worker, zeroes
  all updates and keeps the moments after the exchange.
  """
  # To the momentum's dtype: float16 would underflow.
  cast = optax.stateless(lambda updates, _: _tree.map_wide(jnp.astype, updates))
  masked = optax.masked(
    optax.chain(cast, *links),
    lambda tree: jax.tree.map(_tree.is_exchanged, tree),
  )

  def update_fn(
    updates: chex.ArrayTree,
    state: optax.MaskedState,
    params: chex.ArrayTree | None = None,
    **extra: Any,
  ) -> tuple[chex.ArrayTree, optax.MaskedState]:
    params, like = checks.params_and_like(updates, params, workers)
    # Before any link takes its state for one of these parameters.
    check_layout(_exchange(state), like, compressor, workers)
    with platform.running_on(platform.of(workers.mesh)):
      updates, after = masked.update(updates, state, params, **extra)
      if params is None:
        updates = optax.tree.cast_like(updates, like)
      exchange = _exchange(after)
      moved = exchange.layout.layout.exchanged_keys
      someone = exchange.metrics['num_excluded'] < workers.count
      after = _keep(state, after, someone)
      in_order = []
      for keys, update, x in _tree.with_params(updates, like):
        if keys in moved:
          # By where, not by a product: a decay that is not finite would stay.
          in_order.append(jnp.where(someone, update, 0))
        else:
          in_order.append(jnp.zeros_like(x))
      treedef = jax.tree.structure(updates)
      updates = treedef.unflatten(plain.joined(in_order))
    return updates, after

  return optax.GradientTransformationExtraArgs(masked.init, update_fn)


def _exchange(state: optax.MaskedState) -> DeMoState:
  """Returns the exchange's state in a chain."""
  links = state.inner_state
  return next(link for link in links if isinstance(link, DeMoState))


def _keep(
  state: chex.ArrayTree,
  after: chex.ArrayTree,
  someone: jax.Array,
) -> chex.ArrayTree:
  """Returns a new state, with the old moments without workers."""

  # By a field: optax does not export the types of all.
  def has_moments(x: object) -> bool:
    return hasattr(x, 'nu')

  def keep(old: chex.ArrayTree, new: chex.ArrayTree) -> chex.ArrayTree:
    if has_moments(new):
      return optax.tree.where(someone, new, old)
    return new

  return jax.tree.map(keep, state, after, is_leaf=has_moments)
