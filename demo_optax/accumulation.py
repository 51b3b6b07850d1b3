"""Stock `optax.MultiSteps` in a step of one worker.

It adds up gradients over steps, in a tree `acc_grads` like the parameters. They
are each worker's own, and so lie where all does that is a worker's own:
`acc_grads={'worker_stacked': [workers, ...]}`. Only in the step they are what
optax knows.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from demo_optax import _tree
from demo_optax._paths import STACKED
from demo_optax.step import nnx as modules
from demo_optax.workers import Workers


def stack(
    tree: Any, objects: list[Any], workers: Workers
) -> tuple[Any, bool]:
  """Gives every worker its accumulator, where there is one for all.

  Args:
    tree: arguments of a step.
    objects: its NNX objects, which are changed in place.
    workers: the workers of the exchange.

  Returns:
    the arguments, and whether anything was stacked.
  """
  changed = False

  def each(gradients: Any) -> Any:
    nonlocal changed
    if _is_wrapped(gradients):
      return gradients
    changed = True
    leaves = jax.tree.leaves(gradients)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
      gradients = workers.device_put(gradients)
    # Jitted: one program for all leaves, not one for each.
    stacked = jax.jit(lambda tree: jax.tree.map(workers.stack, tree))(gradients)
    own = _tree.stack_annotations(stacked, workers.spmd_axis_name)
    return {STACKED: own}

  return _map(each, tree, objects), changed


def unwrap(tree: Any, objects: list[Any]) -> Any:
  """Returns `tree` as optax knows it; NNX objects are changed in place."""
  return _map(lambda x: x[STACKED] if _is_wrapped(x) else x, tree, objects)


def wrap(tree: Any, objects: list[Any]) -> Any:
  """Undoes `unwrap`."""
  return _map(
      lambda x: x if _is_wrapped(x) else {STACKED: x}, tree, objects
  )


def _is_wrapped(gradients: Any) -> bool:
  return isinstance(gradients, dict) and set(gradients) == {STACKED}


def _map(fun: Callable[[Any], Any], tree: Any, objects: list[Any]) -> Any:
  """Replaces the accumulators in a tree and, in place, in NNX objects."""

  def is_state(x: Any) -> bool:
    return isinstance(x, optax.MultiStepsState) or modules.is_object(x)

  def each(x: Any) -> Any:
    if not isinstance(x, optax.MultiStepsState):
      return x
    return x._replace(
        inner_opt_state=jax.tree.map(each, x.inner_opt_state, is_leaf=is_state),
        acc_grads=fun(x.acc_grads),
    )

  def replace(tree: Any) -> Any:
    leaves = jax.tree.leaves(tree, is_leaf=is_state)
    if not any(isinstance(x, optax.MultiStepsState) for x in leaves):
      return tree  # the same object: nothing is rebuilt that need not be
    return jax.tree.map(each, tree, is_leaf=is_state)

  modules.replace_attributes(replace, objects)
  return replace(tree)
