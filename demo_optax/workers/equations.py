"""Parts of a traced program: equations, and functions made of some of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Var


def variables(atoms: Iterable[Any]) -> list[Var]:
  """Returns the variables among variables and constants, each once."""
  among = (atom for atom in atoms if isinstance(atom, Var))
  return [*dict.fromkeys(among)]


def read_by(eqns: Iterable[JaxprEqn]) -> list[Var]:
  """Returns the variables that equations read, each once."""
  return variables(atom for eqn in eqns for atom in eqn.invars)


def made_by(eqns: Iterable[JaxprEqn]) -> list[Var]:
  """Returns the variables that equations compute."""
  return [variable for eqn in eqns for variable in eqn.outvars]


def function_of(
  jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outputs: Sequence[Any]
) -> tuple[Callable[..., list[Any]], list[Var]]:
  """Returns a function of some equations of a program, and what it reads."""
  made = {*made_by(eqns)}
  reads = variables([*read_by(eqns), *outputs])
  inputs = [variable for variable in reads if variable not in made]
  part = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=eqns)
  return core.jaxpr_as_fun(core.ClosedJaxpr(part, [])), inputs


def values_in(closed: core.ClosedJaxpr, args: Iterable[Any]) -> dict[Var, Any]:
  """Returns the values of a program's constants and arguments."""
  jaxpr = closed.jaxpr
  given = [*jaxpr.constvars, *jaxpr.invars]
  return dict(zip(given, [*closed.consts, *args]))


def values_of(values: Mapping[Var, Any], atoms: Iterable[Any]) -> list[Any]:
  """Returns the values of atoms, None of variables that have none."""
  chosen = []
  for atom in atoms:
    is_variable = isinstance(atom, Var)
    chosen.append(values.get(atom) if is_variable else atom.val)
  return chosen
