"""Cuts a traced step where workers meet, into programs that are compiled.

What workers exchange passes through the host between two programs. A callback
from one compiled program would do as well, but if it fails, so does the
program, with the arrays that were donated to it. Here they stay as they were,
and no backend has to support callbacks.

All that a step exchanges at one depth, the number of exchanges that it depends
on, is one message. A step with one exchange is two programs and one round. The
message of a delayed exchange exists before the step, and has a separate round:
the program after it runs while its messages travel.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from demo_optax.workers.collectives import meet_p

# From the types of what this worker sends, and the arrays (None if it only
# receives), to what all have sent: see `Met`.
Exchange = Callable[[list[Any], list[Any] | None], list[Any]]


@dataclasses.dataclass(eq=False)
class _Equation:
  """An equation that a step needs, and the variables that it needs itself."""

  eqn: Any
  ins: list[Any]
  branches: list['PartedStep']  # if it exchanges inside

  @property
  def exchanges(self) -> bool:
    return self.eqn.primitive is meet_p or bool(self.branches)

  @property
  def is_early(self) -> bool:
    return self.eqn.params.get('early', False)


class PartedStep:
  """A step, as compiled parts with exchanges between them."""

  def __init__(
    self,
    closed: core.ClosedJaxpr,
    wanted: Sequence[int] | None = None,
    follows: bool = False,
    donated: Sequence[int] = (),
    build: Callable[..., Any] | None = None,
  ):
    """Cuts a step.

    It returns the outputs of the numbers `wanted`, by default all. One that
    `follows` only receives. The inputs of the numbers `donated` may be
    overwritten once all exchanges have succeeded. `build(part, ins, outs,
    is_last)` makes a program of a function and its variables, by default
    `jax.jit`.
    """
    self._jaxpr, self._follows = closed.jaxpr, follows
    self._known = dict(zip(closed.jaxpr.constvars, closed.consts))
    outs = closed.jaxpr.outvars
    if wanted is not None:
      outs = [outs[i] for i in wanted]
    self._live = set(_variables(outs))  # the variables that are needed
    eqns = self._needed()
    self.uses = [v in self._live for v in closed.jaxpr.invars]
    self.meetings = _meetings(closed.jaxpr)
    self._rounds = self._by_depth(eqns)
    self.are_early = [of[0].is_early for of in self._rounds]
    self._given = {closed.jaxpr.invars[i] for i in donated}
    self._parts = self._cut(eqns, outs, build or self._jit)

  def compile(self) -> None:
    """Compiles the parts, those of branches too, before they are run."""
    for program, ins, _ in self._parts:
      program.lower(*(v.aval for v in ins)).compile()
    for plan in (p for of in self._rounds for e in of for p in e.branches):
      plan.compile()

  def run(self, args: Sequence[Any], exchange: Exchange) -> list[Any]:
    """Runs the step; returns the outputs that are wanted."""
    values = self._known | dict(zip(self._jaxpr.invars, args))

    def value(v: Any) -> Any:  # None if it is not needed
      return values.get(v) if isinstance(v, core.Var) else v.val

    def run_part(number: int) -> None:
      program, ins, outs = self._parts[number]
      values.update(zip(outs, program(*map(value, ins))))

    runs_ahead = False
    for number, of in enumerate(self._rounds):
      if not runs_ahead:
        run_part(number)
      # Nothing waits for a program: early messages are sent while it runs.
      awaited = {v for e in of for v in e.eqn.outvars}
      runs_ahead = self.are_early[number] and number + 1 < len(self._rounds)
      runs_ahead &= awaited.isdisjoint(self._parts[number + 1][1])
      if runs_ahead:
        run_part(number + 1)
      meets = [e.eqn for e in of if not e.branches]
      if meets:
        types = [eqn.invars[0].aval for eqn in meets]
        sent = [value(eqn.invars[0]) for eqn in meets if not self._follows]
        found = exchange(types, None if self._follows else sent)
        for eqn, met in zip(meets, found):
          values |= zip(eqn.outvars, met)
      for e in (e for e in of if e.branches):
        has_number = len(e.branches) > 1
        plan = e.branches[value(e.eqn.invars[0]) if has_number else 0]
        own = list(map(value, e.eqn.invars[has_number:]))
        outs = [v for v in e.eqn.outvars if v in self._live]
        values |= zip(outs, plan.run(own, exchange))
    program, ins, _ = self._parts[-1]
    last = list(map(value, ins))
    values.clear()  # drops all other references to donated arrays
    return list(program(*last))

  def _needed(self) -> list[_Equation]:
    """Returns the equations that are needed; adds to the live variables."""
    live, found = self._live, []
    for eqn in reversed(self._jaxpr.eqns):
      ins, plans = list(eqn.invars), []
      if eqn.primitive is meet_p:  # a message is sent and read in any case
        ins = [] if self._follows else ins
      elif any(map(_meetings, core.jaxprs_in_params(eqn.params))):
        wanted = [i for i, v in enumerate(eqn.outvars) if v in live]
        plans = [PartedStep(b, wanted, self._follows) for b in _branches(eqn)]
        number = ins[: len(plans) > 1]  # of the branch
        ins = number + [
          v
          for plan in plans
          for v, used in zip(ins[len(number) :], plan.uses)
          if used
        ]
      elif not live & {*eqn.outvars} and (self._follows or not eqn.effects):
        continue
      live.update(_variables(ins))
      found.append(_Equation(eqn, _variables(ins), plans))
    return found[::-1]

  def _by_depth(self, eqns: Sequence[_Equation]) -> list[list[_Equation]]:
    """Returns those that exchange, by the number of exchanges before them."""
    exchanging = {id(e.eqn): e for e in eqns if e.exchanges}
    depths: dict[Any, int] = {}
    rounds: dict[int, list[_Equation]] = {}
    # Of all equations: one that only receives must count as the others do.
    for eqn in self._jaxpr.eqns:
      depth = max((depths.get(v, 0) for v in _variables(eqn.invars)), default=0)
      if id(eqn) in exchanging:
        depth -= exchanging[id(eqn)].is_early
        rounds.setdefault(depth, []).append(exchanging[id(eqn)])
        depth += 1
      depths |= dict.fromkeys(eqn.outvars, depth)
    return [rounds[depth] for depth in sorted(rounds)]

  def _cut(
    self,
    eqns: Sequence[_Equation],
    outs: Sequence[Any],
    build: Callable[..., Any],
  ) -> list[tuple[Any, list[Any], list[Any]]]:
    """Returns programs, one before each round, with their inputs and outputs.

    An equation is in the first part that needs it: what a message does not
    depend on is computed after it was sent. One without inputs is in each part
    that needs it.
    """
    computed = [e for e in reversed(eqns) if not e.exchanges]
    read = [[v for e in of for v in e.ins] for of in self._rounds]
    read.append(_variables(outs))
    parts = []
    done: set[_Equation] = set()
    for number, wanted in enumerate(read):
      is_last = number == len(self._rounds)
      part, needed = [], {*wanted}
      for e in computed:
        is_needed = not needed.isdisjoint(e.eqn.outvars)
        if e not in done and (is_needed or (is_last and e.eqn.effects)):
          part.append(e)
          needed.update(e.ins)
      part.reverse()
      done |= {e for e in part if e.ins}
      own = {v for e in part for v in e.eqn.outvars}
      ins = [v for e in part for v in e.ins] + (wanted if is_last else [])
      ins = [v for v in dict.fromkeys(ins) if v not in own]
      out = list(outs)
      if not is_last:
        # Read later on: by exchanges, and by other parts.
        later = {v for e in eqns if e not in done for v in e.ins} | {*read[-1]}
        later &= {v for e in part if e.ins for v in e.eqn.outvars}
        later |= {v for of in read[number:-1] for v in of}
        out = [v for e in part for v in e.eqn.outvars if v in later]
      body = core.jaxpr_as_fun(
        core.ClosedJaxpr(
          self._jaxpr.replace(
            constvars=[], invars=ins, outvars=out, eqns=[e.eqn for e in part]
          ),
          [],
        )
      )
      parts.append((build(body, ins, out, is_last), ins, out))
    return parts

  def _jit(
    self, part: Any, ins: Sequence[Any], outs: Sequence[Any], is_last: bool
  ) -> Any:
    """Returns a program; results of the last one take over input buffers."""
    forms = [_form(v) for v in outs if v not in ins] if is_last else []
    kept = {*self._known, *self._jaxpr.invars} - self._given
    kept.update(_variables(outs))
    donated = []
    for i, v in enumerate(ins):
      if v not in kept and _form(v) in forms:
        forms.remove(_form(v))
        donated.append(i)
    return jax.jit(part, donate_argnums=donated)


def _form(v: Any) -> Any:
  return v.aval.shape, v.aval.dtype


def _variables(of: Sequence[Any]) -> list[Any]:
  return [v for v in of if isinstance(v, core.Var)]


def _meetings(jaxpr: core.Jaxpr) -> list[str]:
  """Returns the types of what is exchanged, in order, in all branches."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive is meet_p:
      found.append(str(eqn.invars[0].aval))
    for inner in core.jaxprs_in_params(eqn.params):
      found += _meetings(inner)
  return found


def _branches(eqn: Any) -> Sequence[core.ClosedJaxpr]:
  """Returns the programs of which the host chooses one."""
  name = eqn.primitive.name
  if name == 'cond':
    return eqn.params['branches']
  if name in ('pjit', 'jit'):
    return [eqn.params['jaxpr']]
  raise ValueError(
    'A step with Workers.remote must exchange outside of loops and of what is'
    f' differentiated, got an exchange inside of {name!r}. Call the step once'
    ' for each exchange.'
  )
