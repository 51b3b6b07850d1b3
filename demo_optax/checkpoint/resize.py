"""Regroups stacked state for another number of workers."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax import _checks, _paths, _tree
from demo_optax.compressors import leaves
from demo_optax.demo import layouts_in
from demo_optax.numerics import prng


def resize_workers(opt_state: chex.ArrayTree, n: int) -> chex.ArrayTree:
  r"""Returns the optimizer state of `n` workers from that of another number.

  Stacked leaves are found by their path, under a field `worker_stacked`. Others
  do not change. Old and new workers divide the unit interval into equal parts.
  A new worker is the mean of the old ones, weighted by their overlap with it:

  .. math::
    m'_j = \sum_i w_{ji} m_i, \qquad
    w_{ji} = N'\, \Big| \big[\tfrac{j}{N'}, \tfrac{j+1}{N'}\big] \cap
      \big[\tfrac{i}{N}, \tfrac{i+1}{N}\big] \Big|

  From 4 to 2 workers that is the mean of pairs, from 4 to 8 every worker twice.
  The mean over workers, which the exchange eventually sends, does not change,
  up to rounding: rows of `w` sum to 1 and columns to :math:`N' / N`.

  Integers, booleans and PRNG keys are those of the old worker with the largest
  overlap, the first of equals. With more workers, each folds its number into
  its key. Residuals of owners (`update_residual`) follow their chunks, exactly.

  Takes concrete arrays. On a mesh the result stays on its devices: move it with
  `device_put` of the new workers.

  Raises:
    ValueError: nothing in `opt_state` is stacked; stacked leaves of different
      numbers of workers; or residuals of owners in a state without its types,
      whose chunk count is unknown.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> state = {'worker_stacked': jnp.arange(4.0)}
    >>> for n in (2, 3, 8):
    ...   state_of_n = demo_optax.checkpoint.resize_workers(state, n)
    ...   print(state_of_n['worker_stacked'].round(2))
    [0.5 2.5]
    [0.25 1.5  2.75]
    [0. 0. 1. 1. 2. 2. 3. 3.]
  """
  _checks.check_positive('n', n)
  _check_stacked(opt_state)
  layouts = layouts_in(opt_state)

  def resize(path: _paths.Path, x: Any) -> Any:
    keys = _paths.path_keys(path)
    if not _paths.is_stacked(keys) or len(x) == n:
      return x
    shape = n, *x.shape[1:]
    if not _paths.is_owned(keys):
      is_key = prng.is_key(keys, x)
      return resized(lambda x: regroup(x, n, is_key), x, shape)
    layout = layouts.get(keys[:-3])
    if layout is None:
      raise ValueError(
          f'{_tree.leaf_name(path)} must be in a state that has its types, got'
          ' one of nnx.state. Give the nnx.Optimizer, or its opt_state.'
      )
    bucket = next(b for b in layout.buckets if b.name == keys[-1])
    shape = (*shape[:-2], bucket.share(n).num_chunks, x.shape[-1])
    return resized(lambda x: regroup_owned(x, shape), x, shape)

  return jax.tree_util.tree_map_with_path(resize, opt_state)


def resized(fun: Callable[[Any], Any], x: Any, shape: tuple[int, ...]) -> Any:
  """Calls `fun`, which returns an array of `shape`, on the devices of `x`."""
  sharding = None
  if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
    sharding = leaves.fit_sharding(shape, x.sharding)
  return leaves.run(fun, x, sharding)


def regroup_owned(x: Any, shape: tuple[int, ...]) -> Any:
  """Returns residuals of owners, `[owners, *devices, chunks, n]`, as `shape`.

  Each owner's chunks follow those of the owner before; zeros pad the end.
  """
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  x = xp.moveaxis(x, 0, -3)
  *devices, owners, rows, size = x.shape
  x = x.reshape(*devices, owners * rows, size)
  total = shape[0] * shape[-2]
  missing = max(0, total - owners * rows)
  x = xp.pad(x, [(0, 0)] * len(devices) + [(0, missing), (0, 0)])
  x = x[..., :total, :].reshape(*devices, shape[0], shape[-2], size)
  return xp.moveaxis(x, -3, 0)


def _check_stacked(opt_state: chex.ArrayTree) -> None:
  stacked = [
      (path, x)
      for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]
      if _paths.is_stacked(_paths.path_keys(path))
  ]
  if not stacked:
    raise ValueError(
        'Nothing in it is known to be stacked: there is no state of'
        ' demo_optax.scale_by_demo or demo_optax.per_worker in it, and no'
        " 'worker_stacked', as stacked parameters are to be named."
    )
  (first, x), *others = stacked
  for path, y in others:
    if len(x) != len(y):
      raise ValueError(
          f'{_tree.leaf_name(first)} is of {len(x)} workers and'
          f' {_tree.leaf_name(path)} of {len(y)}: they are not of one state.'
      )


def regroup(x: Any, n: int, is_key: bool = False) -> Any:
  """Resizes `x [workers, ...]` to `n`, by the rule of `resize_workers`."""
  old = x.shape[0]
  if n == old:
    return x
  # NumPy's stay NumPy's: JAX would make 32 bits of 64.
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    x = x[np.argmax(weights(old, n), axis=1)]
    if is_key and n > old:  # several workers would have the same key
      keys = jax.vmap(prng.fold)(jnp.asarray(x), jnp.arange(n))
      return np.asarray(keys) if isinstance(x, np.ndarray) else keys
    return x
  if n % old == 0:
    return xp.repeat(x, n // old, axis=0)
  if old % n == 0:
    return xp.mean(x.reshape(n, old // n, *x.shape[1:]), axis=1)
  # Only weights that are not zero: 0 times NaN is NaN.
  wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
  mixed = []
  for row in weights(old, n):
    covered = np.flatnonzero(row)
    parts = [xp.asarray(row[i], wide.dtype) * wide[i] for i in covered]
    mixed.append(functools.reduce(operator.add, parts))
  return xp.stack(mixed).astype(x.dtype)


def weights(old: int, new: int) -> np.ndarray:
  """Returns the weights of old workers in new ones, float64 `[new, old]`.

  >>> weights(3, 2) * 3
  array([[2., 1., 0.],
         [0., 1., 2.]])
  """
  # In units of 1 / (old * new) all ends are integers.
  i, j = np.arange(old)[None, :], np.arange(new)[:, None]
  ends = np.minimum((j + 1) * old, (i + 1) * new)
  return np.maximum(ends - np.maximum(j * old, i * new), 0) / old
