"""Local updates: workers train alone between exchanges."""

from demo_optax.local.local_updates import (
  LocalUpdatesState,
  OwnState,
  local_updates,
)
from demo_optax.local.methods import demo_diloco, diloco, sparse_loco

__all__ = [
  'LocalUpdatesState',
  'OwnState',
  'demo_diloco',
  'diloco',
  'local_updates',
  'sparse_loco',
]
