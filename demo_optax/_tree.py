"""Leaves of gradients, parameters and state, and Flax's wrappers of them.

NNX keeps parameters in `nnx.Variable`s, Linen in `nn.Partitioned` boxes. Both
are tree nodes with sharding annotations. This module does not import Flax.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax._paths import Path, leaf_name


def is_function(x: Any) -> bool:
  """Returns whether `x` is a function to call.

  Callable pytrees, such as Equinox modules, are not.
  """
  if isinstance(x, jax.tree_util.Partial):
    return True
  return callable(x) and jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def momentum_dtype(path: Path, x: Any) -> Any:
  """Returns float32, or float64 for float64; refuses complex leaves."""
  dtype = jnp.result_type(x)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(
      f'{leaf_name(path)} is {dtype}: complex leaves have no top-k that is'
      ' published. Split it into real and imaginary parts, or keep it out'
      ' with optax.masked.'
    )
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_exchanged(x: Any) -> bool:
  """Returns whether a leaf is exchanged: not empty, and not of integers."""
  inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  return bool(inexact) and 0 not in np.shape(x)


def mask_others(tree: Any) -> Any:
  """Returns `tree` with `optax.MaskedNode()` for leaves not exchanged."""
  return jax.tree.map(
    lambda x: x if is_exchanged(x) else optax.MaskedNode(), tree
  )


def map_wide(fun: Callable[[Any, Any], Any], tree: Any) -> Any:
  """Applies `fun(leaf, dtype of momentum)` to the leaves of `mask_others`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: fun(x, momentum_dtype(path, x)), mask_others(tree)
  )


def zero_update(gradient: Any, param: Any, lead: int) -> Any:
  """Returns the update of a leaf that is not exchanged.

  `lead` axes of the gradient are the workers'. Gradients of integers may be
  NumPy's `float0`.
  """
  is_typed = param is None or gradient.dtype != jax.dtypes.float0
  dtype = gradient.dtype if is_typed else param.dtype
  return jnp.zeros(np.shape(gradient)[lead:], dtype)


def flatten_alike(
  gradients: Any, params: Any
) -> tuple[list[tuple[Path, Any]], list[Any]]:
  """Returns gradients with their paths, and their parameters or None."""
  flat = jax.tree_util.tree_flatten_with_path(gradients)[0]
  if params is None:
    return flat, [None] * len(flat)
  # Annotations of variables may differ.
  treedef = jax.tree.structure(without_variables(gradients))
  return flat, treedef.flatten_up_to(without_variables(params))


def without_variables(tree: Any) -> Any:
  """Returns `tree` with values instead of Flax variables and boxes."""
  nnx, linen = map(sys.modules.get, ('flax.nnx', 'flax.linen'))
  variables: Any = (nnx.Variable,) if nnx else ()
  boxes: Any = (linen.Partitioned,) if linen else ()

  def value(x: Any) -> Any:
    if isinstance(x, boxes):
      return x.value
    return x.get_value() if isinstance(x, variables) else x

  return jax.tree.map(
    value, tree, is_leaf=lambda x: isinstance(x, (*boxes, *variables))
  )


def update_without_variables(
  update: Any, updates: Any, state: Any, params: Any = None, **extra_args: Any
) -> tuple[Any, Any]:
  """Returns `update(updates, state, params, ...)`, computed without Flax.

  Boxes of parameters differ from those of stacked arrays, so trees would not
  match.
  """
  trees = map(without_variables, (updates, state, params))
  new, after = update(*trees, **extra_args)
  return (
    jax.tree.structure(updates).unflatten(jax.tree.leaves(new)),
    jax.tree.structure(state).unflatten(jax.tree.leaves(after)),
  )
