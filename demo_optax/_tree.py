"""Leaves of gradients, parameters and states, in Flax's wrappers or not.

NNX keeps parameters in `nnx.Variable`s, Linen in `nn.Partitioned` boxes. Both
are tree nodes with sharding annotations. This module does not import Flax.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_optax._paths import Keys, dotted, leaves_of, map_by_path

Tree = TypeVar('Tree')

# A leaf, which may be an array, a shape or a number.
Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct | float


def is_function(x: object) -> bool:
  """Returns whether `x` is a function to call.

  Callable pytrees, such as Equinox modules, are not.
  """
  return callable(x) and jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def momentum_dtype(keys: Keys, x: Leaf) -> np.dtype:
  """Returns float32, or float64 for float64; refuses complex leaves."""
  dtype = jnp.result_type(x)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(
      f'{dotted(keys)} must be real, got a leaf that is {dtype}. Make two'
      ' leaves of its real and imaginary parts, or wrap the optimizer (but not'
      ' local_updates) in optax.contrib.split_real_and_imaginary.'
    )
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_inexact(x: Leaf) -> bool:
  """Returns whether a leaf has real or complex numbers, which have a mean."""
  return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def is_exchanged(x: Leaf) -> bool:
  """Returns whether a leaf is exchanged: not empty, and not of integers."""
  if not hasattr(x, 'dtype') and not isinstance(x, int | float | complex):
    raise ValueError(
      f'params must hold arrays, got {x!r:.200}. Of an Equinox model give'
      ' eqx.filter(model, eqx.is_inexact_array).'
    )
  return is_inexact(x) and 0 not in np.shape(x)


def mask_others(tree: chex.ArrayTree) -> Any:
  """Returns `tree` with `optax.MaskedNode()` for leaves not exchanged."""
  masked = optax.MaskedNode()
  return jax.tree.map(lambda x: x if is_exchanged(x) else masked, tree)


def map_wide(
  fun: Callable[..., jax.Array],
  tree: chex.ArrayTree,
) -> Any:
  """Applies `fun(leaf, momentum's dtype)` to the leaves that are exchanged."""
  return map_by_path(
    lambda keys, x: fun(x, momentum_dtype(keys, x)),
    mask_others(tree),
  )


def params_of(
  gradients: chex.ArrayTree,
  params: chex.ArrayTree,
) -> Any:
  """Returns the parameters that have gradients, and None for the others.

  Equinox gives None as gradient for functions and integers in a model.
  """
  # Annotations of variables may differ.
  types = _wrappers()

  def is_leaf(x: object) -> bool:
    return x is None or isinstance(x, types)

  def param_of(gradient: object, param: object) -> object:
    return None if gradient is None else param

  try:
    return jax.tree.map(param_of, gradients, params, is_leaf=is_leaf)
  except ValueError as error:
    # Names that only one of them has.
    in_one = {*dict(leaves_of(params))} ^ {*dict(leaves_of(gradients))}
    names = sorted(map(dotted, in_one))[:3] or ['containers']
    raise ValueError(
      'params must have the leaves of the gradients, got a key mismatch at'
      f' {", ".join(names)}. Give update the parameters that were'
      ' differentiated; of an Equinox model eqx.filter(model,'
      ' eqx.is_inexact_array).'
    ) from error


def with_params(
  gradients: chex.ArrayTree,
  params: chex.ArrayTree | None,
) -> list[tuple[Keys, Any, Any]]:
  """Returns each gradient's path, itself and its parameter, or None."""
  flat = leaves_of(gradients)
  # Not by structure: annotations of variables may differ.
  in_order = jax.tree.leaves(params) or [None] * len(flat)
  return [
    (*gradient, param) for gradient, param in zip(flat, in_order, strict=True)
  ]


def _wrappers() -> tuple[Any, Any]:
  """Returns Flax's types for variables and boxes, () if not imported."""
  nnx, linen = sys.modules.get('flax.nnx'), sys.modules.get('flax.linen')
  variables = getattr(nnx, 'Variable', ())
  return variables, getattr(linen, 'Partitioned', ())


def without_variables(tree: chex.ArrayTree) -> Any:
  """Returns `tree` with values instead of Flax variables and boxes."""
  variables, boxes = _wrappers()

  def is_wrapper(x: object) -> bool:
    return isinstance(x, (variables, boxes))

  def value_of(x: Any) -> Any:
    if isinstance(x, boxes):
      return x.value
    if isinstance(x, variables):
      return x.get_value()
    return x

  return jax.tree.map(value_of, tree, is_leaf=is_wrapper)


def update_without_variables(
  update: Callable[..., tuple[Any, Any]],
  updates: Tree,
  state: chex.ArrayTree,
  params: chex.ArrayTree | None = None,
  **extra_args: object,
) -> tuple[Tree, Any]:
  """Returns `update(updates, state, params, ...)`, computed without Flax.

  Boxes of parameters differ from those of stacked arrays, so trees would not
  match.
  """
  trees = map(without_variables, (updates, state, params))
  results = update(*trees, **extra_args)
  # Wrapped as what was given.
  structure = jax.tree.structure((updates, state))
  return structure.unflatten(jax.tree.leaves(results))


# States -----------------------------------------------------------------------


# Describes leaves by name, in words, the most important ones first.
Words = Mapping[str, Sequence[str]]


def differences(
  old: Words,
  new: Words,
  ignored: Collection[int] = (),
) -> Iterator[tuple[str, int, str, str]]:
  """Yields a leaf's name, and the first words that differ with their place."""
  for name in {**new, **old}:
    pairs = zip(old.get(name, _ABSENT), new.get(name, _ABSENT))
    for place, (before, after) in enumerate(pairs):
      if before != after and place not in ignored:
        yield name, place, before, after
        break


_ABSENT = ('nothing',)


def first_lines(lines: list[str]) -> list[str]:
  """Returns some lines, and how many there are more, for a message."""
  if len(lines) < 5:
    return lines
  return [*lines[:4], f'... and {len(lines) - 4} more leaves.']


def check_state(
  state: chex.ArrayTree,
  expected: chex.ArrayTree,
  num_axes: int,
  workers: object,
) -> None:
  """Raises unless a state has the expected leaves, in their shapes.

  Its leaves have `num_axes` more, for workers.
  """
  check_same(_shapes(state, num_axes), _shapes(expected, 0), workers)


def _shapes(state: chex.ArrayTree, num_axes: int) -> Words:
  """Describes the shapes of a state's leaves, without their first axes."""

  def is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)

  shapes = {}
  for keys, leaf in leaves_of(without_variables(state), is_masked):
    shape = 'no array'
    if not is_masked(leaf):
      shape = str(list(np.shape(leaf)[num_axes:]))
    shapes[dotted(keys)] = [shape]
  return shapes


def check_same(
  state: Words,
  expected: Words,
  workers: object,
) -> None:
  """Raises if a state differs from what update is given."""
  lines = []
  for name, _, former, current in differences(state, expected):
    lines.append(f'{name}: {former} in the state, {current} in the update.')
  if lines:
    found = ' '.join(first_lines(lines))
    raise ValueError(
      f'The state must be made for what update is given ({workers}), got one'
      f' for something else: {found} Make it with tx.init of the same'
      ' transformation and parameters, or take momentum over by'
      ' demo_optax.checkpoint.from_leaves, with resize=True from other workers,'
      ' with rechunk=True from other chunks. Give one gradient per worker: an'
      ' averaged gradient must not reach the exchange.'
    )
