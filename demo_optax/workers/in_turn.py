"""Runs a step for one simulated worker after another, between its exchanges.

For steps with operations that `jax.vmap` cannot map, and for models that
fit the memory only one at a time.
"""

from collections.abc import Mapping, Sequence

import jax
from jax.custom_batching import sequential_vmap
from jax.extend import core
from jax.extend.core import JaxprEqn, Var

from demo_optax.workers.collectives import Axis, first
from demo_optax.workers.equations import (
  function_of,
  made_by,
  read_by,
  values_of,
  variables,
)
from demo_optax.workers.variation import Origin, waits, watch_p

# Equations that need the axis of the workers, beside those that communicate.
_MAPPED = watch_p.name, 'axis_index', 'custom_vmap_call'


def run_in_turn(
  closed: core.ClosedJaxpr,
  origins: Mapping[Var, Origin],
  axis: Axis,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Runs one worker's program so that `jax.vmap` takes workers in turn.

  `origins` says which variables differ. Equations between two exchanges are one
  loop over the workers. Those that exchange see all workers; so do loops and
  branches with an exchange inside, whose bodies are mapped.
  """
  jaxpr = closed.jaxpr
  values = dict(zip(jaxpr.constvars, closed.consts))
  values.update(zip(jaxpr.invars, args))

  def run_loop(
    eqns: Sequence[JaxprEqn],
    later: Sequence[JaxprEqn],
  ) -> None:
    """Runs equations in a loop; keeps what later ones and results read."""
    used = {*read_by(later), *variables(jaxpr.outvars)}
    outs = [variable for variable in made_by(eqns) if variable in used]
    part, ins = function_of(jaxpr, eqns, outs)
    # Without an input that differs between workers it runs once.
    found = sequential_vmap(part)(*values_of(values, ins))
    for variable, x in zip(outs, found):
      # The loop has one for each worker also of what they share.
      is_own = origins[variable].differs
      values[variable] = x if is_own else first(x, axis)

  waiting: list[JaxprEqn] = []  # of a worker's own, not yet run
  for number, eqn in enumerate(jaxpr.eqns):
    is_mapped = waits([eqn], axis, _MAPPED)
    is_own = any(origins[variable].differs for variable in eqn.outvars)
    # What workers share runs at once, unless it reads what is waiting.
    is_ready = values.keys() >= {*read_by([eqn])}
    if not is_mapped and (is_own or not is_ready):
      waiting.append(eqn)
      continue
    if is_mapped:
      run_loop(waiting, jaxpr.eqns[number:])
      waiting = []
    # A function may have exchanges inside, and much else between them.
    if is_mapped and eqn.primitive.name in ('pjit', 'jit'):
      inner = eqn.params['jaxpr']
      given = values_of(values, eqn.invars)
      results = run_in_turn(inner, origins, axis, given)
    else:
      part, ins = function_of(jaxpr, [eqn], eqn.outvars)
      results = part(*values_of(values, ins))
    values.update(zip(eqn.outvars, results))
  run_loop(waiting, [])  # what only results read
  return values_of(values, jaxpr.outvars)
