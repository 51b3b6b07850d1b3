"""The roles that arrays have in a step."""

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

from demo_optax._paths import Keys, is_stacked
from demo_optax.numerics import prng


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


def role_of(
  keys: Keys,
  x: Any,
  said: Role | None,
  has_rows: bool,
) -> Role:
  """Returns an array's role; `said` is what its variable's class says."""
  if is_stacked(keys):
    return Role.STACKED
  if has_rows:
    return Role.BATCH
  if said in (None, Role.KEY) and prng.is_key_array(x):
    return Role.KEY
  return said or Role.SHARED


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
    for array, role in zip(arrays, roles):
      side = parts.own if role.is_own else parts.equal
      side.append(array)
    return parts

  def joined(self, roles: Iterable[Role]) -> list[Any]:
    """Returns the arrays in one list again."""
    # Each list is read in its own order.
    own, equal = iter(self.own), iter(self.equal)
    return [next(own if role.is_own else equal) for role in roles]
