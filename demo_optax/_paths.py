"""Leaves' paths: their keys, names, and the roles that they encode."""

from collections.abc import Callable, Hashable
from typing import Any

import jax

Path = tuple[Any, ...]
Keys = tuple[Any, ...]


def path_keys(path: Path) -> Keys:
  """Returns a path's plain keys, without the `value` of Flax variables."""
  keys = tuple(map(_plain_key, path))
  is_attribute = path and hasattr(path[-1], 'name')
  if is_attribute and keys[-1] == 'value':
    return keys[:-1]
  return keys


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


def dotted(keys: Keys) -> str:
  """Returns a leaf's name in errors, tables and checkpoints."""
  return '.'.join(map(str, keys)) if keys else 'the only leaf'


def leaf_name(path: Path) -> str:
  """Returns a leaf's name by its path."""
  return dotted(path_keys(path))


STACKED = 'worker_stacked'


def is_stacked(keys: Keys) -> bool:
  """Returns whether a state's leaf has a worker axis, by its path."""
  return STACKED in keys


def is_bucket(keys: Keys) -> bool:
  """Returns whether a leaf is a bucket of an exchange, by its path."""
  fields = (STACKED, 'momentum'), (STACKED, 'update_residual')
  if keys[-3:-1] not in fields:
    return False
  return str(keys[-1]).startswith('bucket_')
