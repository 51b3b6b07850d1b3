"""Engines: interchangeable implementations of a bucket's arithmetic.

An engine is a module with two functions, `accumulate_and_select` and `merge`,
and `COUNTS_SENDERS`; what they promise is written in `plain`.
"""

from typing import Any

from demo_optax.engine import heuristics


def choose(bucket: Any, kernels: bool | None) -> Any:
  """Returns the engine of a bucket.

  Args:
    bucket: its static description.
    kernels: whether kernels are wanted, see `scale_by_demo`.
  """
  from demo_optax.engine import plain

  if heuristics.kernels(kernels) is not None:
    from demo_optax.engine import pallas

    if pallas.applies(bucket):
      return pallas
  return plain
