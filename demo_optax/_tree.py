"""Leaves of gradients, parameters and state, and Flax's wrappers of them.

NNX keeps parameters in `nnx.Variable`s, Linen in `nn.Partitioned` boxes. Both
are tree nodes with sharding annotations. This module does not import Flax.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax._paths import Path, dotted, leaf_name, leaves_of


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
      f'{leaf_name(path)} must be real, got a leaf that is {dtype}. Make two'
      ' leaves of its real and imaginary parts, or wrap the optimizer (but not'
      ' local_updates) in optax.contrib.split_real_and_imaginary.'
    )
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_exchanged(x: Any) -> bool:
  """Returns whether a leaf is exchanged: not empty, and not of integers."""
  if not hasattr(x, 'dtype') and not isinstance(x, int | float | complex):
    raise ValueError(
      f'params must hold arrays, got {x!r:.200}. Of an Equinox model give'
      ' eqx.filter(model, eqx.is_inexact_array).'
    )
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


def params_of(gradients: Any, params: Any) -> Any:
  """Returns the parameters that have gradients, and None for the others.

  Equinox gives None as the gradient of a function or an integer in a model.
  """
  # Annotations of variables may differ.
  types = _wrappers()
  try:
    return jax.tree.map(
      lambda g, p: None if g is None else p,
      gradients,
      params,
      is_leaf=lambda x: x is None or isinstance(x, types),
    )
  except ValueError as error:
    own, others = ({*dict(leaves_of(tree))} for tree in (params, gradients))
    names = sorted(map(dotted, own ^ others))[:3] or ['containers']
    raise ValueError(
      'params must have the leaves of the gradients, got a key mismatch at'
      f' {", ".join(names)}. Give update the parameters that were'
      ' differentiated; of an Equinox model eqx.filter(model,'
      ' eqx.is_inexact_array).'
    ) from error


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


def _wrappers() -> tuple[Any, Any]:
  """Returns the types of Flax's variables and boxes, () if not imported."""
  nnx, linen = map(sys.modules.get, ('flax.nnx', 'flax.linen'))
  return nnx.Variable if nnx else (), linen.Partitioned if linen else ()


def without_variables(tree: Any) -> Any:
  """Returns `tree` with values instead of Flax variables and boxes."""
  variables, boxes = _wrappers()

  def value(x: Any) -> Any:
    if isinstance(x, boxes):
      return x.value
    return x.get_value() if isinstance(x, variables) else x

  return jax.tree.map(
    value, tree, is_leaf=lambda x: isinstance(x, (variables, boxes))
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


# States -----------------------------------------------------------------------


def check_state(state: Any, made: Any, lead: int, workers: Any) -> None:
  """Raises unless a state has the leaves of one made now, in their shapes.

  `lead` axes of its leaves are the workers'.
  """
  old, new = _shapes(state, lead), _shapes(made, 0)
  refuse_state(
    [
      (name, old.get(name, 'nothing'), new.get(name, 'nothing'))
      for name in {**new, **old}
      if old.get(name) != new.get(name)
    ],
    workers,
  )


def _shapes(state: Any, lead: int) -> dict[str, str]:
  """Describes the leaves of a state by name."""

  def is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)

  found = {}
  for keys, x in leaves_of(without_variables(state), is_masked):
    shape = 'no array' if is_masked(x) else str(list(np.shape(x)[lead:]))
    found[dotted(keys)] = shape
  return found


def refuse_state(
  differences: Sequence[tuple[str, str, str]], workers: Any
) -> None:
  """Raises if a state differs from what update is given: name, old, new."""
  if not differences:
    return
  lines = [
    f'{name}: {old} in the state, {new} in the update.'
    for name, old, new in differences[:3]
  ]
  if more := differences[3:]:
    lines.append(f'... and {len(more)} more leaves.')
  raise ValueError(
    f'The state must be made for what update is given ({workers}), got one for'
    f' something else: {" ".join(lines)} Make it with tx.init of the same'
    ' transformation and parameters, or take momentum over by'
    ' demo_optax.checkpoint.from_leaves. Give one gradient per worker: an'
    ' averaged gradient must not reach the exchange.'
  )
