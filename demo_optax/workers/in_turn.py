"""Runs a step for one simulated worker after another, between its exchanges.

For steps with operations that `jax.vmap` cannot map, and for models of which
only one fits the memory at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.custom_batching import sequential_vmap
from jax.extend import core

from demo_optax.workers.collectives import Axis, first
from demo_optax.workers.variation import (
  Origin,
  crosses_workers,
  origin_of,
  origins_of,
)


def run_in_turn(
  closed: core.ClosedJaxpr,
  inputs: Sequence[Origin],
  axis: Axis,
  args: Sequence[Any],
) -> list[Any]:
  """Runs one worker's program so that `jax.vmap` takes workers in turn.

  `inputs` are the origins of `args`. Equations between two exchanges are one
  loop over the workers. Those that exchange see all workers; so do loops and
  branches with an exchange inside, whose bodies are mapped.
  """
  origins = origins_of(closed, inputs, axis)
  jaxpr = closed.jaxpr
  values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts))
  values.update(zip(jaxpr.invars, args))

  def loop(eqns: Sequence[Any], later: Sequence[Any]) -> None:
    """Runs equations for the workers in turn; adds what is used later."""
    made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    read = _variables(v for eqn in eqns for v in eqn.invars)
    ins = [v for v in dict.fromkeys(read) if v not in made]
    used = {*_variables(v for eqn in later for v in eqn.invars)}
    used.update(_variables(jaxpr.outvars))
    outs = [v for v in made if v in used]
    run = sequential_vmap(_part(jaxpr, eqns, ins, outs))
    for v, x in zip(outs, run(*(values[v] for v in ins))):
      # Equal on all workers, but the loop has one for each of them.
      values[v] = x if origins[v].differs else first(x, axis)

  pending: list[Any] = []  # equations of the worker's own, not yet run
  for number, eqn in enumerate(jaxpr.eqns):
    crosses = crosses_workers(eqn, axis)
    is_own = any(origins[v].differs for v in eqn.outvars)
    is_ready = all(v in values for v in _variables(eqn.invars))
    if not crosses and (is_own or not is_ready):
      pending.append(eqn)
      continue
    if crosses and pending:
      loop(pending, jaxpr.eqns[number:])
      pending = []
    if crosses and eqn.primitive.name in ('pjit', 'jit'):
      given = [_value(values, v) for v in eqn.invars]
      of_given = [origin_of(origins, v) for v in eqn.invars]
      found = run_in_turn(eqn.params['jaxpr'], of_given, axis, given)
    else:
      ins = _variables(eqn.invars)
      part = _part(jaxpr, [eqn], ins, eqn.outvars)
      found = part(*(values[v] for v in ins))
    values.update(zip(eqn.outvars, found))
  if pending:
    loop(pending, ())
  return [_value(values, v) for v in jaxpr.outvars]


def _part(
  jaxpr: core.Jaxpr, eqns: Sequence[Any], ins: Any, outs: Any
) -> Callable[..., Any]:
  """Returns a function of some equations of a program."""
  part = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=list(eqns))
  return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))


def _variables(of: Iterable[Any]) -> list[Any]:
  return [v for v in of if isinstance(v, core.Var)]


def _value(values: Mapping[Any, Any], v: Any) -> Any:
  return values[v] if isinstance(v, core.Var) else v.val
