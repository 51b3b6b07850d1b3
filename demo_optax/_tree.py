"""Leaves of gradients, parameters and state, matched and checked."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax import flax as modules
from demo_optax.workers import Workers
from demo_optax.workers.sharding import Path


def check_type(name: str, value: Any, expected: type, example: str) -> None:
  """Raises a `TypeError` unless `value` is an `expected`."""
  if not isinstance(value, expected):
    raise TypeError(
        f'{name}={value!r} must be a {expected.__name__}, such as {example}.'
    )


def leaf_name(path: Path) -> str:
  """A leaf's path as written in error messages and tables."""
  return jax.tree_util.keystr(path) or 'the only leaf'


def momentum_dtype(path: Path, x: Any) -> Any:
  """float32, or float64 for float64; complex leaves are refused."""
  dtype = _dtype(x)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(
        f'{leaf_name(path)} is {dtype}: complex leaves have no top-k that is'
        ' published. Split it into real and imaginary parts, or keep it out'
        ' with optax.masked.'
    )
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_exchanged(x: Any) -> bool:
  """Whether a leaf takes part: not empty, and not of integers."""
  shape = np.shape(x)
  inexact = jnp.issubdtype(_dtype(x), jnp.inexact)
  return bool(inexact) and 0 not in shape


def exchanged_mask(tree: Any) -> Any:
  """True at the leaves that take part, as masks of optax want it."""
  return jax.tree.map(is_exchanged, tree)


def map_exchanged(fun: Callable[[Path, Any], Any], tree: Any) -> Any:
  """`fun(path, leaf)` over the leaves that take part; others are masked."""

  def per_leaf(path: Path, x: Any) -> Any:
    return fun(path, x) if is_exchanged(x) else optax.MaskedNode()

  return jax.tree_util.tree_map_with_path(per_leaf, tree)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One leaf of an update: gradient, momentum and parameter.

  Attributes:
    path: where it is.
    gradient: as given, stacked or local.
    momentum: stacked coefficients, or `optax.MaskedNode()`.
    shape: shape of the parameter.
    dtype: dtype of the update: the gradient's, or of an integer leaf, whose
      gradient has none, the parameter's.
  """

  path: Path
  gradient: Any
  momentum: Any
  shape: tuple[int, ...]
  dtype: Any

  @property
  def name(self) -> str:
    """The path as written in error messages."""
    return leaf_name(self.path)

  @property
  def exchanged(self) -> bool:
    """Whether the leaf has momentum."""
    return not isinstance(self.momentum, optax.MaskedNode)

  def zero_update(self) -> Any:
    """What a leaf that takes no part gets."""
    return zeros(self.shape, self.dtype)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
  """Zeros of any dtype, `float0` (which only NumPy knows) included."""
  numpy = np if dtype == jax.dtypes.float0 else jnp
  return numpy.zeros(shape, dtype)


def align(
    gradients: Any, momentum: Any, params: Any | None, workers: Workers
) -> list[Leaf]:
  """Matches the leaves of an update, and checks that each is a worker's own."""
  flat, (moments, like) = flatten_alike(gradients, momentum, params)
  leaves = []
  for (path, gradient), moment, param in zip(flat, moments, like):
    name = leaf_name(path)
    check_gradient(name, gradient, param, workers)
    shape = np.shape(gradient)[1 if workers.stacked_gradients else 0 :]
    dtype = _dtype(gradient)
    if dtype == jax.dtypes.float0 and param is not None:
      dtype = _dtype(param)
    leaves.append(Leaf(path, gradient, moment, shape, dtype))
    if leaves[-1].exchanged != is_exchanged(gradient):
      missing = 'momentum' if leaves[-1].exchanged else 'no momentum'
      raise ValueError(
          f'The gradient of {name} is {_dtype(gradient)}{list(shape)}, and its'
          f' state has {missing}. Initialise the state with the parameters that'
          ' are being updated. If you use optax.partition or optax.masked:'
          ' their label and mask functions are called with stacked gradients'
          ' too, so let them look at paths, not at numbers of dimensions.'
      )
  return leaves


def flatten_alike(
    gradients: Any, *others: Any
) -> tuple[list[tuple[Path, Any]], list[list[Any]]]:
  """Leaves of gradients with their paths, and what the others have there."""
  flat = jax.tree_util.tree_flatten_with_path(gradients)[0]
  # Variables carry annotations, in which gradients and state may differ.
  treedef = jax.tree.structure(modules.without_variables(gradients))
  try:
    return flat, [
        [None] * len(flat)
        if other is None
        else treedef.flatten_up_to(modules.without_variables(other))
        for other in others
    ]
  except ValueError as error:
    raise ValueError(
        'Gradients, optimizer state and parameters differ in structure:'
        f' {error}'
    ) from error


def check_gradient(
    name: str, gradient: Any, param: Any | None, workers: Workers
) -> None:
  """Raises unless `gradient` is laid out as `workers` has it."""
  found = np.shape(gradient)
  lead = (workers.count,) if workers.stacked_gradients else ()
  if param is not None:
    expected: Any = (*lead, *np.shape(param))
    ok = found == expected
  else:
    expected = (*lead, ...)
    ok = found[: len(lead)] == lead
  if not ok and lead:
    raise ValueError(
        f'The gradient of {name} has shape {found}, but {workers} needs'
        f' {expected}: one gradient per worker, stacked. If it was averaged'
        ' already there is nothing left to compress; take gradients with'
        ' demo_optax.value_and_grad(loss_fn, workers=workers).'
    )
  if not ok:
    raise ValueError(
        f'The gradient of {name} has shape {found}, but its parameter has'
        f" {expected}: {workers} needs the worker's own gradient, unstacked."
    )
  if is_exchanged(gradient):
    workers.check_gradient(name, gradient)


def _dtype(x: Any) -> Any:
  return x.dtype if hasattr(x, 'dtype') else jnp.asarray(x).dtype
