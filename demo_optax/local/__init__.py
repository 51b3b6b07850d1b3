"""Local updates: workers train alone between exchanges."""

from demo_optax.local.local_updates import LocalUpdatesState, local_updates
from demo_optax.local.methods import demo_diloco, diloco, sparse_loco

__all__ = [
  'LocalUpdatesState',
  'demo_diloco',
  'diloco',
  'local_updates',
  'sparse_loco',
]
