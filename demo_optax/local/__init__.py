"""Local updates: workers train alone between exchanges."""

from demo_optax.local.local_updates import (
  LocalUpdatesState,
  demo_diloco,
  diloco,
  local_updates,
  settle_params,
  shared_params,
  sparse_loco,
  stack_params,
)

__all__ = [
  'LocalUpdatesState',
  'demo_diloco',
  'diloco',
  'local_updates',
  'settle_params',
  'shared_params',
  'sparse_loco',
  'stack_params',
]
