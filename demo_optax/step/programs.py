"""Reads the program of one worker's step."""

from collections.abc import Container, Mapping
from typing import Any

from jax.extend import core

from demo_optax.workers.inside import EXCHANGE


def scanned(jaxpr: core.Jaxpr, batches: Mapping[Any, Any]) -> Any:
  """Returns the batch, by its variable, that a scan with an exchange takes."""
  known = dict(batches)
  for eqn in jaxpr.eqns:
    given = [known[v] if _is_in(v, known) else None for v in eqn.invars]
    if eqn.primitive.name == 'scan':
      body, consts, carry = _scan(eqn)
      first = consts + carry
      over = [n for n in given[first:] if n is not None]
      if over and _exchanges(body):
        return over[0]
      given[first:] = [None] * len(given[first:])
    if eqn.primitive.name == 'convert_element_type' and given[0] is not None:
      known[eqn.outvars[0]] = given[0]
    for inner in core.jaxprs_in_params(eqn.params):
      if len(inner.invars) == len(given):
        passed = {v: n for v, n in zip(inner.invars, given) if n is not None}
        if (found := scanned(inner, passed)) is not None:
          return found
  return None


def adds(jaxpr: core.Jaxpr, before: Any, after: Any) -> bool:
  """Returns whether `after` is `before` plus what does not depend on it."""
  dependent, sums = {before}, {before}
  for eqn in jaxpr.eqns:
    ins = [v for v in eqn.invars if _is_in(v, dependent)]
    if not ins:
      continue
    dependent.update(eqn.outvars)
    for place, v in enumerate(eqn.outvars):
      if eqn.primitive.name in ('add', 'convert_element_type'):
        is_sum = len(ins) == 1 and ins[0] in sums
      elif eqn.primitive.name == 'scan':
        body, consts, carry = _scan(eqn)
        number = consts + place
        is_sum = (
          place < carry
          and _is_in(eqn.invars[number], sums)
          and adds(body, body.invars[number], body.outvars[place])
        )
      else:
        is_sum = any(
          _is_in(x, sums) and adds(inner, y, inner.outvars[place])
          for inner in core.jaxprs_in_params(eqn.params)
          if len(inner.invars) == len(eqn.invars)
          and eqn.primitive.name != 'while'  # whose end may depend on the sum
          for x, y in zip(eqn.invars, inner.invars)
        )
      if is_sum:
        sums.add(v)
  return _is_in(after, sums)


def _is_in(v: Any, variables: Container[Any]) -> bool:
  return isinstance(v, core.Var) and v in variables


def _exchanges(jaxpr: core.Jaxpr) -> bool:
  return any(
    eqn.params.get('name') == EXCHANGE
    or any(map(_exchanges, core.jaxprs_in_params(eqn.params)))
    for eqn in jaxpr.eqns
  )


def _scan(eqn: Any) -> tuple[core.Jaxpr, int, int]:
  """Returns the body of a scan, and its numbers of constants and carries.

  From shapes, since releases of JAX name these parameters differently: what is
  scanned over, or stacked, has one more dimension outside of the body.
  """
  body = getattr(eqn.params['jaxpr'], 'jaxpr', eqn.params['jaxpr'])

  def count_equal(outer: Any, inner: Any) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(x.aval.shape == y.aval.shape for x, y in pairs)

  carry = count_equal(eqn.outvars, body.outvars)
  return body, count_equal(eqn.invars, body.invars) - carry, carry
