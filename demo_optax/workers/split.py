"""Cuts a traced step where workers meet, into programs that are compiled.

What workers exchange passes through the host between two programs. A callback
from one compiled program would do as well, but if it fails, so does the
program, with the arrays that were donated to it. Here they stay as they were,
and no backend has to support callbacks.

All that a step exchanges at one depth, the number of exchanges that it depends
on, is one message. A step with one exchange is two programs and one round.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from demo_optax.workers.collectives import meet_p

# From the types of what this worker sends, and the arrays (None if it only
# receives), to what all have sent: see `Met`.
Exchange = Callable[[list[Any], list[Any] | None], list[Any]]


class _Equation(NamedTuple):
  """An equation that a step needs, and the variables that it needs itself."""

  eqn: Any
  ins: list[Any]
  branches: list['Plan']  # if it exchanges inside

  @property
  def exchanges(self) -> bool:
    return self.eqn.primitive is meet_p or bool(self.branches)


class Plan:
  """A step, as compiled parts with exchanges between them."""

  def __init__(
      self,
      closed: core.ClosedJaxpr,
      wanted: Sequence[bool] | None = None,
      follows: bool = False,
      donated: Sequence[int] = (),
      build: Callable[..., Any] | None = None,
  ):
    """Cuts a step.

    It returns the outputs that are `wanted`, by default all. One that `follows`
    only receives. The inputs of the numbers `donated` may be overwritten once
    all exchanges have succeeded. `build(part, ins, outs, is_last)` makes a
    program of a function and its variables, by default `jax.jit`.
    """
    self._jaxpr, self._follows = closed.jaxpr, follows
    self._known = dict(zip(closed.jaxpr.constvars, closed.consts))
    outs = [
        v for i, v in enumerate(closed.jaxpr.outvars)
        if wanted is None or wanted[i]
    ]
    eqns, live = self._needed(outs)
    self.uses = [v in live for v in closed.jaxpr.invars]
    # What is exchanged, as text, in order, in all branches.
    self.meetings: list[str] = [
        text for e in eqns if e.exchanges for text in (
            [m for plan in e.branches for m in plan.meetings]
            or [str(e.eqn.invars[0].aval)]
        )
    ]
    self._rounds = self._by_depth(eqns)
    given = [closed.jaxpr.invars[i] for i in donated]
    self._parts = self._cut(eqns, outs, given, build)

  def compile(self) -> None:
    """Compiles the parts, those of branches too, before they are run."""
    for program, ins, _ in self._parts:
      shapes = [jax.ShapeDtypeStruct(*_form(v)) for v in ins]
      program.lower(*shapes).compile()
    for e in (e for of in self._rounds for e in of):
      for plan in e.branches:
        plan.compile()

  def run(self, args: Sequence[Any], exchange: Exchange) -> list[Any]:
    """Runs the step; returns the outputs that are wanted."""
    values = self._known | dict(zip(self._jaxpr.invars, args))

    def value(v: Any) -> Any:
      return values[v] if isinstance(v, core.Var) else v.val

    for (program, ins, outs), of in zip(self._parts, self._rounds):
      values |= zip(outs, program(*map(value, ins)))
      meets = [e.eqn for e in of if not e.branches]
      if meets:
        types = [eqn.invars[0].aval for eqn in meets]
        sent = [value(eqn.invars[0]) for eqn in meets if not self._follows]
        found = exchange(types, None if self._follows else sent)
        for eqn, met in zip(meets, found):
          values |= zip(eqn.outvars, met)
      for eqn, _, plans in (e for e in of if e.branches):
        plan = plans[int(value(eqn.invars[0])) if len(plans) > 1 else 0]
        inner = eqn.invars[-len(plan.uses) :] if plan.uses else []
        own = [value(v) if used else None for v, used in zip(inner, plan.uses)]
        outs = [v for v in eqn.outvars if v in self._read]
        values |= zip(outs, plan.run(own, exchange))
    program, ins, _ = self._parts[-1]
    last = list(map(value, ins))
    values.clear()  # of what is donated no other reference is left
    return list(program(*last))

  def _needed(
      self, outs: Sequence[Any]
  ) -> tuple[list[_Equation], set[Any]]:
    """Returns the equations, in order, and the variables that are needed."""
    live = {v for v in outs if isinstance(v, core.Var)}
    found = []
    for eqn in reversed(self._jaxpr.eqns):
      ins, plans = _variables(eqn), []
      if eqn.primitive is meet_p:  # a message is sent and read in any case
        ins = [] if self._follows else ins
      elif _meets_in(eqn):
        wanted = [v in live for v in eqn.outvars]
        plans = [Plan(b, wanted, self._follows) for b in _branches(eqn)]
        uses = [any(use) for use in zip(*(plan.uses for plan in plans))]
        for plan in plans:
          plan.uses = uses
        uses = [True] * (len(eqn.invars) - len(uses)) + uses
        ins = [v for v, used in zip(eqn.invars, uses) if used]
        ins = [v for v in ins if isinstance(v, core.Var)]
      elif not live & {*eqn.outvars} and (self._follows or not eqn.effects):
        continue
      live.update(ins)
      found.append(_Equation(eqn, ins, plans))
    self._read = live
    return found[::-1], live

  def _by_depth(self, eqns: Sequence[_Equation]) -> list[list[_Equation]]:
    """Returns those that exchange, by the number of exchanges before them."""
    needed = {id(e.eqn): e for e in eqns}
    depths: dict[Any, int] = {}
    rounds: dict[int, list[_Equation]] = {}
    # Of all equations: one that only receives must count as the others do.
    for eqn in self._jaxpr.eqns:
      depth = max((depths.get(v, 0) for v in _variables(eqn)), default=0)
      e = needed.get(id(eqn))
      if e is not None and e.exchanges:
        rounds.setdefault(depth, []).append(e)
        depth += 1
      depths |= dict.fromkeys(eqn.outvars, depth)
    return [rounds[depth] for depth in sorted(rounds)]

  def _cut(
      self,
      eqns: Sequence[_Equation],
      outs: Sequence[Any],
      given: Sequence[Any],
      build: Callable[..., Any] | None,
  ) -> list[tuple[Any, list[Any], list[Any]]]:
    """Returns programs, one before each round, with their inputs and outputs.

    An equation is in the first part that needs it: what a message does not
    depend on is computed after it was sent. One without inputs is in each part
    that needs it.
    """
    made = {v: e for e in eqns for v in e.eqn.outvars}
    effects = [e for e in eqns if e.eqn.effects and not e.exchanges]
    read = [[v for e in of for v in e.ins] for of in self._rounds]
    last = [
        *(v for v in outs if isinstance(v, core.Var)),
        *(v for e in effects for v in e.ins),
    ]
    parts = []
    done: set[int] = set()
    for number, ahead in enumerate(map(list, [*read, last])):
      is_last = number == len(read)
      mine = {id(e) for e in effects} - done if is_last else set[int]()
      while ahead:
        e = made.get(ahead.pop())
        if e is not None and not e.exchanges and id(e) not in done | mine:
          mine.add(id(e))
          ahead += e.ins
      part = [e for e in eqns if id(e) in mine]
      done |= {id(e) for e in part if e.ins}
      own = {v for e in part for v in e.eqn.outvars}
      ins = [v for e in part for v in e.ins] + (last if is_last else [])
      ins = [v for v in dict.fromkeys(ins) if v not in own]
      out = list(outs)
      if not is_last:
        # Read later on: by exchanges, and by other parts.
        later = {v for e in eqns if id(e) not in done for v in e.ins} | {*last}
        later &= {v for e in part if e.ins for v in e.eqn.outvars}
        later |= {v for of in read[number:] for v in of}
        out = [v for e in part for v in e.eqn.outvars if v in later]
      body = core.jaxpr_as_fun(core.ClosedJaxpr(
          self._jaxpr.replace(
              constvars=[], invars=ins, outvars=out, eqns=[e.eqn for e in part]
          ), []
      ))
      if build is not None:
        program = build(body, ins, out, is_last)
      else:
        free = self._donated(ins, out, given) if is_last else []
        program = jax.jit(body, donate_argnums=free)
      parts.append((program, ins, out))
    return parts

  def _donated(
      self, ins: Sequence[Any], outs: Sequence[Any], given: Sequence[Any]
  ) -> list[int]:
    """Returns numbers of inputs whose buffers results may take over."""
    forms = [_form(v) for v in outs if v not in ins]
    kept = {*self._known, *self._jaxpr.invars, *outs} - {*given} | {*outs}
    found = []
    for i, v in enumerate(ins):
      if v not in kept and _form(v) in forms:
        forms.remove(_form(v))
        found.append(i)
    return found


def _form(v: Any) -> Any:
  return v.aval.shape, v.aval.dtype


def _variables(eqn: Any) -> list[Any]:
  return [v for v in eqn.invars if isinstance(v, core.Var)]


def _meets_in(eqn: Any) -> bool:
  return any(
      inner.primitive is meet_p or _meets_in(inner)
      for jaxpr in core.jaxprs_in_params(eqn.params)
      for inner in jaxpr.eqns
  )


def _branches(eqn: Any) -> Iterator[core.ClosedJaxpr]:
  """Returns what an equation runs one of, the host choosing it."""
  name = eqn.primitive.name
  if name == 'cond':
    return iter(eqn.params['branches'])
  if name in ('pjit', 'jit'):
    return iter([eqn.params['jaxpr']])
  raise ValueError(
      'A step with Workers.remote must exchange outside of loops and of what is'
      f' differentiated, got an exchange inside of {name!r}. Call the step once'
      ' for each exchange.'
  )
