"""Paths of leaves: their keys, their names, and the roles that they encode."""

from typing import Any

Path = tuple[Any, ...]
Keys = tuple[Any, ...]


def path_keys(path: Path) -> Keys:
  """Returns a path's plain keys, without the `value` of Flax variables."""
  keys = []
  for entry in path:
    for attribute in ('name', 'key', 'idx'):
      if hasattr(entry, attribute):
        keys.append(getattr(entry, attribute))
        break
    else:
      keys.append(str(entry))
  if keys and keys[-1] == 'value' and hasattr(path[-1], 'name'):
    keys.pop()
  return tuple(keys)


def dotted(keys: Keys) -> str:
  """Returns a leaf's name in tables and checkpoints."""
  return '.'.join(map(str, keys)) or 'the only leaf'


STACKED = 'worker_stacked'


def is_stacked(keys: Keys) -> bool:
  """Returns whether a state's leaf has a worker axis, by its path."""
  return STACKED in keys


def is_bucket(keys: Keys) -> bool:
  """Returns whether a state's leaf is a bucket, by its path."""
  return is_stacked(keys) and str(keys[-1]).startswith('bucket_')


def is_owned(keys: Keys) -> bool:
  """Returns whether a path is that of a residual of owners."""
  return is_bucket(keys) and keys[-2] == 'update_residual'
