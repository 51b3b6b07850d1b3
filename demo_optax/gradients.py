"""Each worker's own gradient: taking it, transforming it, averaging it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import _tree as trees
from demo_optax import flax as modules
from demo_optax.workers import Workers

_WORKERS = 'demo_optax.Workers.simulated(4)'


def value_and_grad(
    fun: Callable[..., Any],
    *,
    workers: Workers,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    in_axes: int | Sequence[int | None] | None = 0,
    microbatches: int = 1,
    stacked_params: bool = False,
) -> Callable[..., tuple[Any, Any]]:
  r"""Like `jax.value_and_grad`, with one gradient per worker.

  For functions of bare pytrees and of Flax NNX modules. The batch is cut into
  equal parts, one per worker, and nothing is communicated but the mean of the
  loss: for worker :math:`i` with batch :math:`B_i`

  .. math::
    \ell = \frac1N \sum_i f(x; B_i), \qquad g_i = \nabla_x f(x; B_i)

  NNX modules behave as they do in `nnx.jit`: random streams advance, and each
  worker draws numbers of its own; `nnx.BatchStat` variables are updated and
  averaged over the workers whose statistics are finite. Any other variable that
  `fun` changes is an error, since each worker would have another value of it.

  Scalar PRNG keys (`jax.random.key`) among the arguments are not cut: each
  worker and each micro-batch gets the key folded with its number. Python
  numbers, booleans and strings are given to all workers as they are.

  Args:
    fun: returns a scalar, or `(scalar, aux)` with `has_aux`. It should be a
      mean over its batch, as the mean over workers then is the mean over all.
    workers: who takes part. With `Workers.on_axis` the arguments are the
      worker's own already and are not cut.
    argnums: position(s) of the differentiated argument(s), or an
      `nnx.DiffState`. Integer leaves get `float0` gradients.
    has_aux: whether `fun` returns auxiliary data.
    in_axes: the axis of the other arguments to cut, `None` to share them; one
      for all, or one per positional argument (`None` for those in `argnums`).
      Keyword arguments are cut along axis 0.
    microbatches: parts that each worker's batch is cut into and computed one
      after the other; gradients and loss are their means, accumulated in
      float32 or wider.
    stacked_params: the differentiated arguments are stacked, `[workers, ...]`,
      each worker's own (`stack_params`), as `local_updates` has them; of NNX
      modules, the parameters. Nothing is communicated then: losses are stacked
      as well. (Batch statistics are shared, and averaged in every step.)

  Returns:
    A function with the arguments of `fun` that returns `(loss, gradients)`, or
    `((loss, aux), gradients)`. `loss` is a scalar; gradients and aux are
    stacked, `[workers, ...]` (not stacked with `Workers.on_axis`); with
    micro-batches aux is `[workers, microbatches, ...]`.

  Raises:
    ValueError: a batch that does not divide into workers times micro-batches,
      `microbatches` below 1, `in_axes` of another length than the arguments, a
      module that changed variables it may not change, a legacy PRNG key (all
      workers would draw the same numbers), parameters that are not stacked with
      `stacked_params`: when called.
    TypeError: `workers` or `microbatches` of another type, at once; entries of
      `in_axes` that are neither an integer nor `None`, when called.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> grad = demo_optax.value_and_grad(loss, workers=workers)
    >>> value, gradients = grad(jnp.array(1.0), jnp.array([1.0, 2.0, 3.0, 6.0]))
    >>> print(value, gradients)  # the mean of all, and the mean of each half
    3.0 [1.5 4.5]

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_: gradients are not synchronised.
  """
  trees.check_type('workers', workers, Workers, _WORKERS)
  if isinstance(microbatches, bool) or not isinstance(microbatches, int):
    raise TypeError(f'microbatches={microbatches!r} must be an integer.')
  if microbatches < 1:
    raise ValueError(f'microbatches={microbatches} must be at least 1.')

  def value_and_grad_fn(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    call = _Call(fun, argnums, has_aux, args, kwargs)
    own_params: tuple[Any, Any] | None = None
    if stacked_params:
      _check_stacked(call.arguments, workers)
      own_params = call.variables.floats, call.variables.fixed
    axes = _axes(in_axes, call.places, args)
    cut_args, shared_args, join = _cut(call.others, axes, workers, microbatches)

    def one_worker(
        index: jax.Array, own: Any, state: Any, shared: Any
    ) -> tuple[Any, Any, Any]:
      own, params = own
      variables, shared = shared
      if params is not None:
        floats, fixed = params
        variables = variables._replace(floats=floats, fixed=fixed)
      variables = call.for_worker(variables, index)
      before = variables.changing

      def one_batch(variables: Any, part: jax.Array, own: Any) -> Any:
        number = (index, part) if microbatches > 1 else (index,)
        return call.differentiate(variables, join(own, shared, number))

      if microbatches == 1:
        result, variables = one_batch(variables, jnp.int32(0), own)
      else:
        result, variables = _accumulate(
            one_batch, variables, own, microbatches
        )
      after = variables.changing
      statistics = call.modules.statistics(after, before)
      return (result, statistics), state, call.modules.counts(after)

    shared_variables = call.variables
    if stacked_params:
      shared_variables = shared_variables._replace(floats=[], fixed=[])
    own, _, counts = workers.map(
        one_worker,
        (cut_args, own_params),
        (),
        (shared_variables, shared_args),
    )
    ((losses, aux), gradients), statistics = own
    call.modules.write_back(counts, statistics, workers)
    loss = losses if stacked_params else workers.mean(losses)
    lead = workers.stacked_gradients and not stacked_params
    gradients = call.unflatten(gradients, (workers.count,) if lead else ())
    return ((loss, aux) if has_aux else loss), gradients

  return value_and_grad_fn


class PerWorkerState(NamedTuple):
  """State of `per_worker`.

  Attributes:
    worker_stacked: the state of every worker's transformation, stacked
      `[workers, ...]`.
  """

  worker_stacked: chex.ArrayTree


def per_worker(
    tx: optax.GradientTransformation, *, workers: Workers
) -> optax.GradientTransformationExtraArgs:
  r"""Applies a transformation to each worker's own gradient.

  .. math:: g_i \leftarrow \mathrm{tx}(g_i)

  For links before the exchange that look across elements, such as a clip by
  norm: applied to stacked gradients as it is, `optax.clip_by_global_norm` would
  take one norm over all workers. Leaves that take no part in exchanges (of
  integers, or empty) pass through. A stateful `tx` sees its worker's non-finite
  gradients too, and may carry them on.

  Args:
    tx: a transformation that maps gradients to gradients of the same shapes.
    workers: who takes part.

  Returns:
    A gradient transformation from stacked gradients to stacked gradients (with
    `Workers.on_axis`: from the worker's own to the worker's own).

  Raises:
    TypeError: `workers` is something else.
    ValueError: gradients that are not one per worker, when traced.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> clip = demo_optax.per_worker(
    ...     optax.clip_by_global_norm(1.0), workers=workers)
    >>> params = jnp.zeros(2)
    >>> gradients = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    >>> clipped, _ = clip.update(gradients, clip.init(params), params)
    >>> print(clipped)
    [[0.6 0.8]
     [0.3 0.4]]

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, whose runs clip each worker's gradient
    at norm 1.
  """
  trees.check_type('workers', workers, Workers, _WORKERS)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params: chex.ArrayTree) -> PerWorkerState:
    state = tx.init(_exchanged_part(params))
    state = jax.tree.map(workers.stack, state)
    return PerWorkerState(
        modules.stack_annotations(state, workers.spmd_axis_name)
    )

  def update_fn(
      updates: chex.ArrayTree,
      state: PerWorkerState,
      params: chex.ArrayTree | None = None,
      **extra_args: Any,
  ) -> tuple[chex.ArrayTree, PerWorkerState]:
    _check_own(updates, params, workers)
    extra_args.pop('demo_exchange', None)  # nothing is exchanged in here

    def one_worker(
        index: jax.Array, gradients: Any, state: Any, shared: Any
    ) -> tuple[Any, Any, tuple[()]]:
      del index
      params, extra_args = shared
      return *tx.update(gradients, state, params, **extra_args), ()

    leaves, treedef = jax.tree.flatten(updates)
    new, state, _ = workers.map(
        one_worker,
        _exchanged_part(updates),
        state.worker_stacked,
        (_exchanged_part(params), extra_args),
    )
    for place, update in enumerate(treedef.flatten_up_to(new)):
      if not isinstance(update, optax.MaskedNode):
        leaves[place] = update
    return treedef.unflatten(leaves), PerWorkerState(state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def mean_over_workers(*, workers: Workers) -> optax.GradientTransformation:
  r"""Averages the workers' gradients: plain data parallelism.

  .. math::
    u = \frac1N \sum_i g_i

  A dense all-reduce of the leaves it is given, in float32 or wider. As in the
  exchange, a worker whose gradients are not all finite is left out of the mean;
  the mean over nobody is zero. Integer leaves get zeros.

  The first link of a baseline to compare with, and for leaves that should not
  be compressed, where `None` in a tree of compressors does not serve.

  Args:
    workers: who takes part.

  Returns:
    A gradient transformation from stacked gradients (with `Workers.on_axis`:
    the worker's own) to their mean, in the parameters' shapes.

  Raises:
    TypeError: `workers` is something else.
    ValueError: gradients that are not one per worker, when traced.

  Example:
    >>> import demo_optax, jax.numpy as jnp, optax
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = optax.chain(
    ...     demo_optax.mean_over_workers(workers=workers), optax.sgd(1.0))
    >>> params = jnp.zeros(2)
    >>> gradients = jnp.array([[3.0, 4.0], [1.0, 0.0]])
    >>> updates, _ = tx.update(gradients, tx.init(params), params)
    >>> print(updates)
    [-2. -2.]

  References:
    The baseline of Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_ ("AdamW-DDP").
  """
  trees.check_type('workers', workers, Workers, _WORKERS)

  def update_fn(
      updates: chex.ArrayTree, params: chex.ArrayTree | None
  ) -> chex.ArrayTree:
    _check_own(updates, params, workers)

    leaves, treedef = jax.tree.flatten(updates)
    like = leaves if params is None else treedef.flatten_up_to(params)
    taking_part = [x for x in leaves if trees.is_exchanged(x)]
    present = workers.all_finite(taking_part)
    lead = 1 if workers.stacked_gradients else 0

    def mean(x: Any, param: Any) -> Any:
      if not trees.is_exchanged(x):
        dtype = x.dtype if x.dtype != jax.dtypes.float0 else param.dtype
        return trees.zeros(x.shape[lead:], dtype)
      wide = jnp.promote_types(x.dtype, jnp.float32)
      return workers.mean_present(x.astype(wide), present).astype(x.dtype)

    return treedef.unflatten([mean(x, p) for x, p in zip(leaves, like)])

  return optax.stateless(update_fn)


def _exchanged_part(tree: chex.ArrayTree | None) -> chex.ArrayTree | None:
  """`tree` with `optax.MaskedNode()` for leaves that take no part."""
  return trees.map_exchanged(lambda path, x: x, tree)


def _check_own(
    gradients: chex.ArrayTree, params: chex.ArrayTree | None, workers: Workers
) -> None:
  flat, (like,) = trees.flatten_alike(gradients, params)
  for (path, gradient), param in zip(flat, like):
    trees.check_gradient(trees.leaf_name(path), gradient, param, workers)


class _Call:
  """A call of the user's function, taken apart.

  What is differentiated is a list of floating-point arrays; modules among the
  arguments are opened into their variables.
  """

  def __init__(
      self,
      fun: Callable[..., Any],
      argnums: Any,
      has_aux: bool,
      args: tuple[Any, ...],
      kwargs: dict[str, Any],
  ):
    self.fun, self.has_aux = fun, has_aux
    self.single = not isinstance(argnums, Sequence)
    wanted = [argnums] if self.single else list(argnums)
    self.filters = [getattr(w, 'filter', None) for w in wanted]
    self.places = [
        _place(getattr(w, 'argnum', w), len(args)) for w in wanted
    ]
    self.modules = modules.open_arguments(args, self.places, self.filters)
    self.arguments = [
        self.modules.params.get(p, args[p]) for p in self.places
    ]
    leaves, self.treedef = jax.tree.flatten(self.arguments)
    self.floats = [
        jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves
    ]
    self.variables = _Variables(
        [x for x, f in zip(leaves, self.floats) if f],
        [x for x, f in zip(leaves, self.floats) if not f],
        self.modules.rest,
    )
    others = {i: a for i, a in enumerate(args) if i not in self.places}
    self.others: _Others = (others, kwargs)

  def differentiate(
      self, variables: '_Variables', others: '_Others'
  ) -> tuple[Any, '_Variables']:
    """`((loss, aux), gradients)` of one batch, and the variables after it."""

    def loss_fn(floats: list[jax.Array]) -> tuple[jax.Array, Any]:
      arguments = self.treedef.unflatten(
          _interleave(self.floats, floats, variables.fixed)
      )
      by_place = dict(zip(self.places, arguments))
      # Leaves, since a merged module may share its variables with the state.
      before = {p: jax.tree.leaves(a) for p, a in by_place.items()}
      opened = self.modules.rebuild(by_place, variables.changing)
      by_position = {**others[0], **by_place, **opened}
      args = [by_position[i] for i in range(len(by_position))]
      result = self.fun(*args, **others[1])
      loss, aux = result if self.has_aux else (result, None)
      changed = self.modules.changes(opened, before, variables.changing)
      return loss, (aux, changed)

    (loss, (aux, changed)), gradients = jax.value_and_grad(
        loss_fn, has_aux=True
    )(variables.floats)
    return ((loss, aux), gradients), variables._replace(changing=changed)

  def for_worker(
      self, variables: '_Variables', index: jax.Array
  ) -> '_Variables':
    """The variables as worker `index` has them."""
    rest = self.modules.fold_streams(variables.changing, index)
    return variables._replace(changing=rest)

  def unflatten(
      self, gradients: list[jax.Array], lead: tuple[int, ...]
  ) -> Any:
    """Gradients as the caller passed the arguments, `lead` before shapes."""
    fixed = [
        np.zeros((*lead, *np.shape(x)), jax.dtypes.float0)
        for x in self.variables.fixed
    ]
    tree = self.treedef.unflatten(_interleave(self.floats, gradients, fixed))
    return tree[0] if self.single else tuple(tree)


def _check_stacked(arguments: Any, workers: Workers) -> None:
  for path, x in jax.tree_util.tree_flatten_with_path(arguments)[0]:
    shape = np.shape(x)
    if workers.stacked_gradients and shape[:1] != (workers.count,):
      raise ValueError(
          f'The parameter {trees.leaf_name(path[1:])} has shape {shape}, but'
          f' with stacked_params=True {workers} needs ({workers.count}, ...):'
          ' one copy per worker. Give demo_optax.stack_params(params, workers).'
      )


# Arguments that are not differentiated: by position, and by keyword.
_Others = tuple[dict[int, Any], dict[str, Any]]


class _Variables(NamedTuple):
  """What the differentiated arguments hold."""

  floats: list[jax.Array]
  fixed: list[Any]
  changing: Any  # per module place, its other variables


def _accumulate(
    one_batch: Callable[..., Any], variables: _Variables, own: Any, parts: int
) -> tuple[Any, _Variables]:
  """Means over micro-batches of `own`, whose leaves are `[b, ...]`."""
  own = jax.tree.map(
      lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), own
  )

  def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))

  def body(carry: Any, xs: Any) -> Any:
    changing, sums = carry
    part, own = xs
    ((loss, aux), gradients), after = one_batch(
        variables._replace(changing=changing), part, own
    )
    sums = [s + wide(g) for s, g in zip(sums, gradients)]
    return (after.changing, sums), (loss, aux)

  zeros = [wide(jnp.zeros_like(x)) for x in variables.floats]
  (changing, sums), (losses, aux) = jax.lax.scan(
      body,
      (variables.changing, zeros),
      (jnp.arange(parts, dtype=jnp.int32), own),
  )
  gradients = [
      (s / parts).astype(x.dtype) for s, x in zip(sums, variables.floats)
  ]
  loss = jnp.mean(losses)
  return ((loss, aux), gradients), variables._replace(changing=changing)


def _axes(
    in_axes: int | Sequence[int | None] | None,
    places: Sequence[int],
    args: tuple[Any, ...],
) -> dict[int, int | None]:
  """Axis to cut for every positional argument that is not differentiated."""
  if isinstance(in_axes, Sequence):
    if len(in_axes) != len(args):
      raise ValueError(
          f'in_axes={tuple(in_axes)} has {len(in_axes)} entries, but there are'
          f' {len(args)} positional arguments. Give one for each, None for'
          ' those in argnums.'
      )
    for place in places:
      if in_axes[place] is not None:
        raise ValueError(
            f'in_axes={tuple(in_axes)} cuts argument {place}, which is'
            ' differentiated and shared by all workers: give None there.'
        )
    axes = dict(enumerate(in_axes))
  else:
    axes = dict.fromkeys(range(len(args)), in_axes)
  for axis in axes.values():
    if axis is not None and not isinstance(axis, int):
      raise TypeError(
          f'in_axes has the entry {axis!r}: give an integer or None for each'
          ' argument, which holds for all its leaves.'
      )
  return {i: axis for i, axis in axes.items() if i not in places}


def _cut(
    others: _Others,
    axes: dict[int, int | None],
    workers: Workers,
    microbatches: int,
) -> tuple[list[Any], list[Any], Callable[..., _Others]]:
  """Splits arguments into leaves cut over the workers and leaves shared.

  Returns:
    the cut leaves, the shared leaves, and `join(cut, shared, numbers)`, which
    makes the arguments of one worker, folding `numbers` into scalar keys.
  """
  flat, treedef = jax.tree_util.tree_flatten_with_path(others)
  modules.check_no_modules(others)
  cut, shared, is_cut, cut_axes = [], [], [], []
  fixed = [not hasattr(leaf, 'shape') for _, leaf in flat]  # True, 0.5, 'mean'
  constants = [leaf for _, leaf in flat if not hasattr(leaf, 'shape')]
  for path, leaf in flat:
    if not hasattr(leaf, 'shape'):
      continue
    _check_not_a_legacy_key(path, leaf)
    axis = axes.get(path[1].key, 0)  # keyword arguments: 0
    is_cut.append(axis is not None and not _is_scalar_key(leaf))
    if is_cut[-1]:
      cut.append(_cut_leaf(path, leaf, axis, workers, microbatches))
      cut_axes.append(axis)
    else:
      shared.append(leaf)

  def join(
      cut: list[Any], shared: list[Any], numbers: tuple[jax.Array, ...]
  ) -> _Others:
    for number in numbers:
      shared = [
          jax.random.fold_in(x, number) if _is_scalar_key(x) else x
          for x in shared
      ]
    cut = [jnp.moveaxis(x, 0, a) if a else x for x, a in zip(cut, cut_axes)]
    arrays = _interleave(is_cut, cut, shared)
    return treedef.unflatten(_interleave(fixed, constants, arrays))

  return cut, shared, join


def _cut_leaf(
    path: trees.Path, leaf: Any, axis: Any, workers: Workers, microbatches: int
) -> jax.Array:
  shape = np.shape(leaf)
  _, argument, *rest = path
  name = f'argument {argument.key!r}'
  name += f', leaf {trees.leaf_name(tuple(rest))},' if rest else ''
  parts = workers.count if workers.stacked_gradients else 1
  parts *= microbatches
  if len(shape) <= axis or len(shape) < -axis:
    if parts == 1 and not workers.stacked_gradients:
      return leaf
    raise ValueError(
        f'{name} has shape {shape} and no axis {axis} to cut into'
        f' {parts} parts. To give all workers the same value, pass it by'
        ' position and set its entry in in_axes to None.'
    )
  if shape[axis] % parts:
    raise ValueError(
        f'{name} has length {shape[axis]} along axis {axis}, which does not'
        f' divide into {parts} parts ({workers}, microbatches={microbatches}).'
        ' Change the batch size, or set its entry in in_axes to None to share'
        ' it.'
    )
  if axis:
    leaf = jnp.moveaxis(leaf, axis, 0)
  return workers.split(jnp.asarray(leaf))


def _interleave(mask: list[bool], true: list[Any], false: list[Any]) -> list:
  """One list from two: the next of `true` where `mask`, else of `false`."""
  trues, falses = iter(true), iter(false)
  return [next(trues) if m else next(falses) for m in mask]


def _check_not_a_legacy_key(path: trees.Path, x: Any) -> None:
  if x.dtype == np.uint32 and x.shape == (2,):
    raise ValueError(
        f'argument {path[1].key!r} holds uint32[2], which is what'
        ' jax.random.PRNGKey makes: it would be cut, or all workers would draw'
        ' the same numbers. Pass jax.random.key(seed), which is folded with the'
        " worker's number; data of that shape as int32."
    )


def _is_scalar_key(x: Any) -> bool:
  dtype = getattr(x, 'dtype', None)
  is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  return is_key and x.ndim == 0


def _place(argnum: Any, num_args: int) -> int:
  if not isinstance(argnum, int):
    raise TypeError(
        f'argnums={argnum!r} must be an integer, several, or an nnx.DiffState.'
    )
  if not -num_args <= argnum < num_args:
    raise ValueError(
        f'argnums={argnum}, but the function was called with {num_args}'
        ' positional arguments.'
    )
  return argnum % num_args
