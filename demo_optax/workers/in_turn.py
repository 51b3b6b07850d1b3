"""Runs a step for one simulated worker after another, between its exchanges.

For steps with operations that `jax.vmap` cannot map, and for models that
fit the memory only one at a time.
"""

from collections.abc import Sequence

import jax
from jax.custom_batching import sequential_vmap
from jax.extend import core
from jax.extend.core import JaxprEqn

from demo_optax.workers.collectives import first
from demo_optax.workers.equations import (
  function_of,
  made_by,
  read_by,
  values_in,
  values_of,
  variables,
)
from demo_optax.workers.variation import Follower, watch_p


def run_in_turn(
  closed: core.ClosedJaxpr,
  follower: Follower,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Runs one worker's program so that `jax.vmap` takes workers in turn.

  `follower` has followed the program. Equations between two exchanges are one
  loop over the workers. Those that exchange see all workers; so do loops and
  branches with an exchange inside, whose bodies are mapped.
  """
  jaxpr = closed.jaxpr
  origins = follower.found
  values = values_in(closed, args)

  def run_loop(
    eqns: Sequence[JaxprEqn],
    later: Sequence[JaxprEqn],
  ) -> None:
    """Runs equations in a loop; keeps what later ones and results read."""
    read_later = {*read_by(later), *variables(jaxpr.outvars)}
    outputs = [variable for variable in made_by(eqns) if variable in read_later]
    part, inputs = function_of(jaxpr, eqns, outputs)
    # Without an input that differs between workers it runs once.
    returned = sequential_vmap(part)(*values_of(values, inputs))
    for variable, value in zip(outputs, returned):
      # The loop has one for each worker also of what they share.
      is_own = origins[variable].differs
      values[variable] = value if is_own else first(value, follower.axis)

  waiting: list[JaxprEqn] = []  # of a worker's own, not yet run
  for number, eqn in enumerate(jaxpr.eqns):
    # What is watched stays as it is: a loop would copy momentum.
    is_mapped = eqn in follower.waiting or eqn.primitive is watch_p
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
      program = eqn.params['jaxpr']
      given = values_of(values, eqn.invars)
      results = run_in_turn(program, follower, given)
    else:
      part, inputs = function_of(jaxpr, [eqn], eqn.outvars)
      results = part(*values_of(values, inputs))
    values.update(zip(eqn.outvars, results))
  run_loop(waiting, [])  # what only results read
  return values_of(values, jaxpr.outvars)
