"""Links of the recipes' chains that optax lacks."""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from demo_optax import _tree
from demo_optax._paths import Keys, Path, path_keys
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
  dimensions: Mapping[Keys, contrib.MuonDimensionNumbers | None],
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

  Axes and compressors are given for all leaves, by path. A leaf with more axes
  is a stack of matrices, scaled one by one.
  """

  def length_of(
    axes: contrib.MuonDimensionNumbers,
    shape: tuple[int, ...],
    compressor: Compressor | Frozen | None,
  ) -> chex.Numeric:
    waits: chex.Numeric = 1.0  # steps until a coefficient is sent
    if isinstance(compressor, Compressor):
      waits = compressor.period
      if compressor.error_feedback:
        sent = compressor.chunks(shape, 'float32').format
        waits = 1 / (1 - decay * (1 - sent.k / sent.n))
    length = consistent_rms
    if length is None:
      length = math.prod(shape[axis] for axis in axes.reduction_axis) ** -0.5
    return length * waits**0.5

  def update_fn(
    updates: chex.ArrayTree,
    params: chex.ArrayTree | None,
  ) -> chex.ArrayTree:
    del params
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
    leaves, lengths = [], []
    alike = collections.defaultdict(list)
    for number, (path, leaf) in enumerate(with_paths):
      keys = path_keys(path)
      sides = dimensions[keys]
      assert sides is not None
      leaves.append(leaf)
      lengths.append(length_of(sides, leaf.shape, compressors[keys]))
      alike[jax.typeof(leaf), (*sides[0], *sides[1])].append(number)
    for (_, axes), members in alike.items():
      # Few kernels for all leaves of one type.
      joined = plain.joined([leaves[number] for number in members])
      rows = []
      for leaf in joined:
        # [..., 1, ...]
        rows.append(jnp.mean(leaf * leaf, axes[-1:], keepdims=True))
      # [leaves, ..., 1, 1, ...]
      other_axes = tuple(axis + 1 for axis in axes[:-1])
      squares = jnp.mean(jnp.stack(rows), other_axes, keepdims=True)
      found = jnp.maximum(jnp.sqrt(squares), _MIN_RMS)
      for number, leaf, rms in zip(members, joined, found):
        length = jnp.asarray(lengths[number], leaf.dtype)
        leaves[number] = leaf * (length / rms)
    return treedef.unflatten(leaves)

  return optax.stateless(update_fn)


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
      if callable(value):
        values.append(value(count))
      elif value is not None:
        values.append(value)
    finite = [jnp.isfinite(value).all() for value in values]
    return jnp.where(jnp.stack(finite).all(), values[0], jnp.nan)

  return weight_at


class OwnMuonState(NamedTuple):
  """The state of each worker's Muon."""

  steps: jax.Array
  mu: chex.ArrayTree


def own_muon(
  beta: chex.Numeric,
  mu_dtype: chex.ArrayDType | None,
  dimension_numbers: Callable[..., chex.ArrayTree],
  workers: Workers,
) -> optax.GradientTransformation:
  """Orthonormalises each worker's momentum of the leaves that have axes.

  As `optax.contrib.scale_by_muon`, except that Newton-Schulz runs on stacks of
  matrices: it takes as many kernels for a stack as for a matrix. A matrix whose
  gradient is zero, or below some 1e-19, where squares vanish, gets a zero
  update: orthonormalisation would restore the length of a momentum without
  gradients. If a gradient is not finite, or so
  large that squares overflow, matrices become NaN and the state stays.
  """

  def zeros(x: jax.Array, axes: Any) -> Any:
    if axes is None:  # no matrix
      return optax.MaskedNode()
    return jnp.zeros_like(x, dtype=mu_dtype)

  def init_fn(params: chex.ArrayTree) -> OwnMuonState:
    mu = jax.tree.map(zeros, params, dimension_numbers(params))
    return OwnMuonState(jnp.zeros((), jnp.int32), mu)

  def update_fn(
    updates: chex.ArrayTree,
    state: OwnMuonState,
    params: Any = None,
  ) -> tuple[chex.ArrayTree, OwnMuonState]:
    leaves, treedef = jax.tree.flatten(updates)
    mu = treedef.flatten_up_to(state.mu)
    axes = treedef.flatten_up_to(dimension_numbers(updates))
    numbers, sides, gradients, momenta, others = [], [], [], [], []
    for number, (leaf, of_leaf) in enumerate(zip(leaves, axes)):
      if of_leaf is None:
        others.append(leaf)
        continue
      numbers.append(number)
      sides.append(of_leaf)
      gradients.append(leaf)
      momenta.append(mu[number])
    own = gradients, momenta, state.steps
    update = functools.partial(_update_matrices, sides, workers)
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
      # XLA shards what is between: optax passes no `out_sharding`, which every
      # reshape and product of sharded arrays would need.
      specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, own)
      update = jax.sharding.auto_axes(update, axes=explicit, out_sharding=specs)
    # An array that is closed over would keep its Explicit type, and a number
    # becomes an array: subtracted before, so that all maps have the same bits.
    good = stays_finite(others, (), ())
    orthonormal, momenta, steps = update(*own, good, beta, 1 - beta)
    for number, matrix, momentum in zip(numbers, orthonormal, momenta):
      leaves[number], mu[number] = matrix, momentum
    return treedef.unflatten(leaves), OwnMuonState(steps, treedef.unflatten(mu))

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
  good &= (beta >= 0) & (beta < 1)
  count = optax.safe_increment(steps)
  # Both corrected for a momentum that starts at zero.
  of_momentum = beta / (1 - beta ** (count + 1))
  of_gradient = weight / (1 - beta**count)
  gradients = plain.joined(gradients)
  rows, orders = [], []
  stacks: dict[Any, list[int]] = collections.defaultdict(list)
  sizes: dict[Any, int] = collections.defaultdict(int)
  for number, gradient in enumerate(gradients):
    inputs, outputs = dimensions[number]
    sides = inputs + outputs
    batch = [axis for axis in range(gradient.ndim) if axis not in sides]
    order = *batch, *sides
    orders.append(order)
    shape = -1, _size(gradient, inputs), _size(gradient, outputs)
    squares = jnp.sum(jnp.square(gradient), outputs, keepdims=True)
    rows.append(squares.transpose(order).reshape(shape[:2]))
    kind = shape, gradient.dtype
    most = workers.param_specs.devices * max(_STACK, math.prod(shape[1:]))
    stacks[kind, sizes[kind] // most].append(number)
    sizes[kind] += gradient.size

  energies = []  # of each stack, [matrices]
  for members in stacks.values():
    of_rows = jnp.concatenate([rows[number] for number in members])
    energies.append(jnp.sum(of_rows, axis=1))
    # No sum in the Gramian of `ahead` is larger.
    good &= jnp.isfinite(4 * of_rows.shape[1] * energies[-1]).all()

  new, ahead = [], []
  for gradient, momentum, row, order in zip(gradients, momenta, rows, orders):
    old = momentum.astype(gradient.dtype)
    # Not changed by a choice later: `ahead` would be made of both again.
    current = jnp.where(good, beta * old + weight * gradient, old)
    new.append(current.astype(momentum.dtype))
    nesterov = of_momentum * current + of_gradient * gradient
    ahead.append(nesterov.transpose(order).reshape(*row.shape, -1))

  found: list[Any] = [None] * len(gradients)
  for members, energy in zip(stacks.values(), energies):
    stack = jnp.concatenate([ahead[number] for number in members])
    # 1, or 0 for a matrix without gradient; NaN excludes the worker.
    size = jnp.where(good, energy != 0, jnp.nan).astype(stack.dtype)
    stack = _orthonormal(
      lift.spread(workers, stack), lift.spread(workers, size)
    )
    ends = np.cumsum([len(ahead[number]) for number in members])
    stack = lift.spread(workers, stack)[: ends[-1]]
    for number, part in zip(members, jnp.split(stack, ends[:-1])):
      order = orders[number]
      in_order = [gradients[number].shape[axis] for axis in order]
      found[number] = part.reshape(in_order).transpose(np.argsort(order))
  return found, new, jnp.where(good, count, steps)


def _orthonormal(x: jax.Array, size: jax.Array) -> jax.Array:
  """Orthonormalises `[matrices, rows, cols]`, times a `size [matrices]`.

  Newton-Schulz whose first iteration divides each row by the root of its sum in
  the Gramian (`'aol'` of optax). Large arrays are only multiplied.
  """
  if x.shape[1] > x.shape[2]:  # products need no transposed copy
    return _orthonormal(x.mT, size).mT
  one = jnp.eye(x.shape[1], dtype=x.dtype)[None]
  limits = jnp.finfo(x.dtype)
  for iteration, (a, b, c) in enumerate(NEWTON_SCHULZ):
    gram = x @ x.mT
    scale = jnp.ones_like(x, shape=())
    if iteration == 0:
      sums = jnp.sum(jnp.abs(gram), axis=2, keepdims=True)
      # Smaller sums may lack terms that became zero.
      least = limits.tiny / limits.eps
      scale = jax.lax.rsqrt(jnp.maximum(sums, least))
      gram = scale * gram * scale.mT
      scale = size[:, None, None] * scale.mT
    x = ((a * one + b * gram + c * gram @ gram) * scale) @ x
  return x


def _size(x: jax.Array, axes: Iterable[int]) -> int:
  return math.prod(x.shape[axis] for axis in axes)


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
      leaves = exchange.layout.layout.leaves
      frozen = {leaf.keys for leaf in leaves if leaf.is_frozen}
      someone = exchange.metrics['num_excluded'] < workers.count
      after = _keep(state, after, someone)

      def settle(
        path: Path,
        update: jax.Array,
        x: jax.Array,
      ) -> jax.Array:
        if path_keys(path) in frozen or not _tree.is_exchanged(x):
          return jnp.zeros_like(x)
        # By where, not by a product: a decay that is not finite would stay.
        return jnp.where(someone, update, 0)

      updates = jax.tree_util.tree_map_with_path(settle, updates, like)
      settled, treedef = jax.tree.flatten(updates)
      updates = treedef.unflatten(plain.joined(settled))
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
  def is_kept(x: object) -> bool:
    return hasattr(x, 'nu')

  def keep(
    old: chex.ArrayTree,
    new: chex.ArrayTree,
  ) -> chex.ArrayTree:
    return optax.tree.where(someone, new, old) if is_kept(new) else new

  return jax.tree.map(keep, state, after, is_leaf=is_kept)
