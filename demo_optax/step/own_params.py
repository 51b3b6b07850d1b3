"""Parameters that `local_updates` keeps in a copy for each worker.

Inside a step the model has the worker's own copy. Outside it has the one that
all workers share. Both are in the optimizer state.
"""

import collections
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax._paths import Keys, dotted

# Where a state of `local_updates` has parameters: those that all share, those
# of the worker, and where the worker's started, if they drift.
_SHARED, _OWN = 'global_params', ('worker_stacked', 'params')
_COPIES = (_SHARED,), _OWN, ('worker_stacked', 'start')


def find(arrays: Sequence[Any]) -> dict[int, list[int]]:
  """Finds the parameters that each worker has in its own copy.

  Returns for each its number among the arrays, by their `keys`, and the numbers
  that its copies in the optimizer state have: the one that all workers share,
  the worker's own, and where the worker's started, if they drift.
  """
  numbers = {array.keys: number for number, array in enumerate(arrays)}
  copies_of = {}
  for state, params in _states(numbers).items():
    model = _model_of(state, params, numbers)
    for param in params:
      copies = []
      for place in _COPIES:
        keys = *state, *place, *param
        if keys in numbers:
          copies.append(numbers[keys])
      copies_of[numbers[*model, *param]] = copies
  return copies_of


def enter(
  copies_of: Mapping[int, Sequence[int]],
  arrays: list[jax.Array],
  described: Sequence[Any],
) -> None:
  """Puts the worker's own copies where the parameters are.

  If any was changed between steps, as when weights are loaded, then what the
  model has holds for all copies.
  """
  # One flag for all: weights are loaded as a whole.
  changed = jnp.zeros((), bool)
  for number, (shared, own, *_) in copies_of.items():
    given, former = arrays[number], arrays[own]
    if (given.shape, given.dtype) != (former.shape, former.dtype):
      raise ValueError(
        f'{described[number].name} must be {former.dtype}{list(former.shape)}'
        ' as in the state of local_updates, got'
        f' {given.dtype}{list(given.shape)}. Make the state with tx.init of'
        ' these parameters.'
      )
    changed |= jnp.any(given != arrays[shared].astype(given.dtype))
  # Also the one that all share, and where the worker's started.
  for number, copies in copies_of.items():
    given = arrays[number]
    for copy in copies:
      former = arrays[copy]
      arrays[copy] = jnp.where(changed, given.astype(former.dtype), former)
    arrays[number] = arrays[copies[1]]  # the worker's own, for the model


def _states(numbers: Mapping[Keys, int]) -> dict[Keys, list[Keys]]:
  """Returns the parameters' paths in each state that has own copies."""
  # A state is known by two fields beside each other.
  params_of = collections.defaultdict(list)
  for keys in numbers:
    if _SHARED in keys:
      place = keys.index(_SHARED)
      state, param = keys[:place], keys[place + 1 :]
      if (*state, *_OWN, *param) in numbers:
        params_of[state].append(param)
  return params_of


def _model_of(
  state: Keys,
  params: Sequence[Keys],
  numbers: Mapping[Keys, int],
) -> Keys:
  """Returns where the model is that has a state's parameters."""
  # A model has all parameters of the state, below one path.
  models = set()
  for keys in numbers:
    model = keys[: len(keys) - len(params[0])]
    is_whole = all((*model, *param) in numbers for param in params)
    if is_whole and model[: len(state)] != state:
      models.add(model)
  if len(models) != 1:
    names = ', '.join(sorted(map(dotted, models))) or 'none'
    listed = textwrap.shorten(', '.join(map(dotted, params)), 200)
    raise ValueError(
      'The arguments and results of a step with local_updates must hold the'
      f' parameters of its state once ({listed}), got {names}. Pass the model'
      ' and the optimizer state, and return both. If parameters were removed or'
      ' renamed, make the state again with tx.init.'
    )
  return models.pop()
