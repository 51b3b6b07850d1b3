"""Saves and restores states, also for another number of workers.

`Checkpointer` needs Orbax, which is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from demo_optax.checkpoint.leaves import from_leaves, to_leaves

if TYPE_CHECKING:
  from demo_optax.checkpoint.checkpointer import Checkpointer

__all__ = ['Checkpointer', 'from_leaves', 'to_leaves']


def __getattr__(name: str) -> Any:
  if name != 'Checkpointer':
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from demo_optax.checkpoint.checkpointer import Checkpointer

  return Checkpointer
