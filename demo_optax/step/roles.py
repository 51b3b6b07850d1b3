"""The roles of arrays in a step."""

import enum


class Role(enum.Enum):
  """Says how workers have an array, and how one value is made of theirs.

  ==========  ======================  ====================================
  role        in the step             after it
  ==========  ======================  ====================================
  SHARED      the same                the same, or an error
  STACKED     the worker's part       each worker's
  KEY         folded with the number  worker 0's
  BATCH       the worker's rows       the rows of all workers
  MEAN        (results only)          the mean of those that are finite
  STATISTICS  the same                the mean of those that are finite
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
