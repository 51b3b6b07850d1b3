"""Leaves of gradients, parameters and state, matched and checked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from demo_optax import annotations
from demo_optax.workers import Workers
from demo_optax.workers.sharding import Path, entry, names_of


def check_type(name: str, value: Any, expected: type, example: str) -> None:
  """Raises a `TypeError` unless `value` is an `expected`."""
  if not isinstance(value, expected):
    raise TypeError(
        f'{name}={value!r} must be a {expected.__name__}, such as {example}.'
    )


def leaf_name(path: Path) -> str:
  """Returns a leaf's path as error messages and tables have it."""
  return jax.tree_util.keystr(path) or 'the only leaf'


def momentum_dtype(path: Path, x: Any) -> Any:
  """Returns float32, or float64 for float64; refuses complex leaves."""
  dtype = _dtype(x)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(
        f'{leaf_name(path)} is {dtype}: complex leaves have no top-k that is'
        ' published. Split it into real and imaginary parts, or keep it out'
        ' with optax.masked.'
    )
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_exchanged(x: Any) -> bool:
  """Returns whether a leaf is exchanged: not empty, and not of integers."""
  shape = np.shape(x)
  inexact = jnp.issubdtype(_dtype(x), jnp.inexact)
  return bool(inexact) and 0 not in shape


def exchanged_mask(tree: Any) -> Any:
  """Returns a tree that is True at the leaves that are exchanged."""
  return jax.tree.map(is_exchanged, tree)


def map_exchanged(fun: Callable[[Path, Any], Any], tree: Any) -> Any:
  """Applies `fun(path, leaf)` to what is exchanged, and masks other leaves."""

  def per_leaf(path: Path, x: Any) -> Any:
    return fun(path, x) if is_exchanged(x) else optax.MaskedNode()

  return jax.tree_util.tree_map_with_path(per_leaf, tree)


def mask_others(tree: Any) -> Any:
  """Returns `tree` with `optax.MaskedNode()` for what is not exchanged."""
  return map_exchanged(lambda path, x: x, tree)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
  """Returns zeros of any dtype, `float0` (which only NumPy knows) included."""
  numpy = np if dtype == jax.dtypes.float0 else jnp
  return numpy.zeros(shape, dtype)


def flatten_alike(
    gradients: Any, *others: Any
) -> tuple[list[tuple[Path, Any]], list[list[Any]]]:
  """Returns gradients with their paths, and what other trees have there."""
  flat = jax.tree_util.tree_flatten_with_path(gradients)[0]
  # Variables carry annotations, in which gradients and state may differ.
  treedef = jax.tree.structure(annotations.without_variables(gradients))
  try:
    return flat, [
        [None] * len(flat)
        if other is None
        else treedef.flatten_up_to(annotations.without_variables(other))
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
        f' {expected}: one gradient per worker, stacked. Decorate the training'
        ' step with demo_optax.data_parallel(workers), and it takes one'
        " worker's gradient; outside of such a step give those of all workers."
        ' An averaged gradient has nothing left to compress.'
    )
  if not ok:
    raise ValueError(
        f'The gradient of {name} has shape {found}, but its parameter has'
        f" {expected}: {workers} needs the worker's own gradient, unstacked."
    )
  if is_exchanged(gradient):
    workers.check_gradient(name, gradient)


def check_sharding(path: Path, param: Any, workers: Workers) -> None:
  """Raises if a parameter's type says that it is sharded as workers do not.

  Only on meshes with axes of type Explicit do types tell. The exchange would
  gather the whole gradient there, in every step, or fail at a reshape.
  """
  shape, found = np.shape(param), jax.typeof(param).sharding
  if not any(names_of(found.spec)) or not workers.stacked_gradients:
    return
  what = f'The parameter {leaf_name(path)}'
  check_on_one_device(what, param, workers)
  expected = workers.param_specs.place(path, shape).spec
  own, asked = (
      _cuts(spec, len(shape), found.mesh) for spec in (found.spec, expected)
  )
  if any(own) and own != asked:
    raise ValueError(
        f'{what} is sharded by {found.spec}, but {workers} expect {expected}.'
        ' Say how parameters are sharded: demo_optax.Workers.on_mesh(mesh,'
        f' {workers.axis_name!r}, param_specs), with a tree of PartitionSpecs'
        ' or demo_optax.param_specs(model); or put them elsewhere, with'
        ' workers.device_put.'
    )


def check_on_one_device(what: str, x: Any, workers: Workers) -> None:
  """Raises if the type of an array of simulated workers says it is sharded."""
  spec = jax.typeof(x).sharding.spec
  if any(names_of(spec)) and workers.mesh is None:
    raise ValueError(
        f'{what} is sharded by {spec} on a mesh with axes of type'
        f' Explicit, but {workers} are all on one device. Use'
        ' demo_optax.Workers.on_mesh(mesh, axis_name, param_specs), a mesh with'
        ' axes of type Auto, or arrays that are not sharded.'
    )


def _cuts(spec: P, rank: int, mesh: Any) -> list[list[Any]]:
  """Returns the axes that cut each dimension, those of one device left out."""
  return [
      [axis for axis in entry(spec, dim) if mesh.shape[axis] > 1]
      for dim in range(rank)
  ]


def _dtype(x: Any) -> Any:
  return x.dtype if hasattr(x, 'dtype') else jnp.asarray(x).dtype
