"""Runs a step for one simulated worker after another, between its exchanges.

For steps with operations that `jax.vmap` cannot map, and for models of which
only one fits the memory at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jax.custom_batching import sequential_vmap
from jax.extend import core

from demo_optax.workers.collectives import Axis, first
from demo_optax.workers.variation import (
  Origin,
  follow,
  origins_at,
  waits,
  watch_p,
)

# Equations that need the axis of the workers, beside those that communicate.
_MAPPED = watch_p.name, 'axis_index', 'custom_vmap_call'


def run_in_turn(
  closed: core.ClosedJaxpr,
  origins: Mapping[core.Var, Origin],
  axis: Axis,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Runs one worker's program so that `jax.vmap` takes workers in turn.

  `origins` are those of its variables. Equations between two exchanges are one
  loop over the workers. Those that exchange see all workers; so do loops and
  branches with an exchange inside, whose bodies are mapped.
  """
  jaxpr = closed.jaxpr
  values = dict(zip(jaxpr.constvars, closed.consts))
  values.update(zip(jaxpr.invars, args))

  def read(atom: core.Var | core.Literal) -> jax.Array:
    return values[atom] if isinstance(atom, core.Var) else atom.val

  def run_pending(later: list[core.JaxprEqn]) -> None:
    """Runs what is pending; keeps what later equations and results read."""
    used = {*_variables(later), *_only(jaxpr.outvars)}
    outs = [v for eqn in pending for v in eqn.outvars if v in used]
    part, ins = _part(jaxpr, pending, outs)
    for variable, x in zip(outs, sequential_vmap(part)(*map(read, ins))):
      # The loop has one for each worker also of what they share.
      is_own = origins[variable].differs
      values[variable] = x if is_own else first(x, axis)

  pending: list[core.JaxprEqn] = []  # of the worker's own, not yet run
  for number, eqn in enumerate(jaxpr.eqns):
    is_mapped = waits(eqn, axis, _MAPPED)
    is_own = any(origins[v].differs for v in eqn.outvars)
    if is_own and not is_mapped:
      pending.append(eqn)
      continue
    is_ready = all(v in values for v in _variables([eqn]))
    if pending and (is_mapped or not is_ready):
      run_pending(jaxpr.eqns[number:])
      pending = []
    if is_mapped and eqn.primitive.name in ('pjit', 'jit'):
      inner = eqn.params['jaxpr']
      known = follow(inner.jaxpr, origins_at(origins, eqn.invars), axis)
      found = run_in_turn(inner, known, axis, [*map(read, eqn.invars)])
    else:
      part, ins = _part(jaxpr, [eqn], eqn.outvars)
      found = part(*map(read, ins))
    values.update(zip(eqn.outvars, found))
  if pending:
    run_pending([])
  return [*map(read, jaxpr.outvars)]


def _part(
  jaxpr: core.Jaxpr, eqns: list[core.JaxprEqn], outs: list[core.Var]
) -> tuple[Callable[..., list[jax.Array]], list[core.Var]]:
  """Returns a function of some equations of a program, and what it reads."""
  made = {v for eqn in eqns for v in eqn.outvars}
  ins = [v for v in _variables(eqns) if v not in made]
  part = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=eqns)
  return core.jaxpr_as_fun(core.ClosedJaxpr(part, [])), ins


def _variables(eqns: Sequence[core.JaxprEqn]) -> list[core.Var]:
  """Returns the variables that equations read, each once."""
  return _only(atom for eqn in eqns for atom in eqn.invars)


def _only(atoms: Iterable[object]) -> list[core.Var]:
  variables = (atom for atom in atoms if isinstance(atom, core.Var))
  return [*dict.fromkeys(variables)]
