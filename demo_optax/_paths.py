"""Leaves' paths: their keys, names, and the roles that they encode."""

from collections.abc import Callable, Hashable
from typing import Any

import jax

# A leaf's path as it is written: names, keys of dictionaries, and indices.
Keys = tuple[Any, ...]


def path_keys(path: tuple[Any, ...]) -> Keys:
  """Returns a path's plain keys, without the `value` of Flax variables."""
  if path[-1:] == (jax.tree_util.GetAttrKey('value'),):
    path = path[:-1]
  return tuple(map(_plain_key, path))


def _plain_key(entry: object) -> Hashable:
  """Returns an entry's attribute, key or index."""
  for field in ('name', 'key', 'idx'):
    if hasattr(entry, field):
      return getattr(entry, field)
  return str(entry)


def leaves_of(
  tree: object,
  is_leaf: Callable[[object], bool] | None = None,
) -> list[tuple[Keys, Any]]:
  """Returns a tree's leaves, with their paths' plain keys."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
  return [(path_keys(path), leaf) for path, leaf in flat]


def map_by_path(
  fun: Callable[[Keys, Any], object],
  tree: object,
) -> Any:
  """Applies `fun(keys, leaf)` to a tree's leaves."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: fun(path_keys(path), leaf),
    tree,
  )


def dotted(keys: Keys) -> str:
  """Returns a leaf's name in errors, tables and checkpoints."""
  return '.'.join(map(str, keys)) if keys else 'the only leaf'


STACKED = 'worker_stacked'


def is_stacked(keys: Keys) -> bool:
  """Returns whether a state's leaf has a worker axis, by its path."""
  return STACKED in keys


def is_bucket(keys: Keys) -> bool:
  """Returns whether a leaf is a bucket of an exchange, by its path."""
  fields = (STACKED, 'momentum'), (STACKED, 'update_residual')
  return keys[-3:-1] in fields and str(keys[-1]).startswith('bucket_')
