"""The roles that arrays have in a step."""

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple


class Role(enum.Enum):
  """Says how workers have an array, and how one value is made from theirs.

  ==========  ======================  ====================================
  role        in the step             after it
  ==========  ======================  ====================================
  SHARED      the same                the same, or an error
  STACKED     the worker's part       each worker's
  KEY         folded with the number  worker 0's
  BATCH       the worker's rows       all workers' rows
  MEAN        (results only)          the mean where finite
  STATISTICS  the same                the mean where finite
  ADDED       the same                the old value, and all that was added
  ==========  ======================  ====================================
  """

  SHARED = 'shared'
  STACKED = 'stacked'
  KEY = 'key'
  BATCH = 'batch'
  MEAN = 'mean'
  STATISTICS = 'statistics'
  ADDED = 'added'

  @property
  def is_own(self) -> bool:
    """Whether workers have different parts."""
    return self in (Role.BATCH, Role.STACKED)


class Parts(NamedTuple):
  """Arrays in two lists, each in order; or what holds for each list."""

  own: Any  # workers have different parts
  equal: Any  # all workers have the same

  @classmethod
  def of(
    cls,
    arrays: Iterable[Any],
    roles: Iterable[Role],
  ) -> 'Parts':
    """Parts arrays by their roles."""
    parts = cls([], [])
    for x, role in zip(arrays, roles):
      side = parts.own if role.is_own else parts.equal
      side.append(x)
    return parts

  def joined(self, roles: Iterable[Role]) -> list[Any]:
    """Returns the arrays in one list again."""
    own, equal = iter(self.own), iter(self.equal)
    return [next(own if role.is_own else equal) for role in roles]
