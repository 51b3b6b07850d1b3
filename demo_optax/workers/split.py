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


class _Part(NamedTuple):
  """A compiled program, and its inputs and outputs in the step."""

  program: Any
  ins: list[Any]
  outs: list[Any]


class Plan:
  """A step, as compiled parts with exchanges between them.

  Attributes:
    uses: for each input whether the step uses it.
    meetings: what is exchanged, as text, in order, in all branches.
  """

  def __init__(
      self,
      closed: core.ClosedJaxpr,
      wanted: Sequence[bool] | None = None,
      follows: bool = False,
      donated: Sequence[int] = (),
      build: Callable[..., Any] | None = None,
  ):
    """Cuts a step.

    Args:
      closed: the step.
      wanted: for each output whether it is returned; by default all are.
      follows: whether this worker only receives.
      donated: numbers of the inputs that may be overwritten, once all exchanges
        have succeeded.
      build: `(part, ins, outs, is_last, donated) -> program`, of a function and
        its variables; by default `jax.jit`.
    """
    self._jaxpr, self._follows = closed.jaxpr, follows
    self._known = dict(zip(closed.jaxpr.constvars, closed.consts))
    outs = [
        v for i, v in enumerate(closed.jaxpr.outvars)
        if wanted is None or wanted[i]
    ]
    eqns, live = self._needed(outs)
    self.uses = [v in live for v in closed.jaxpr.invars]
    self.meetings: list[str] = [
        text for e in eqns if e.exchanges for text in (
            [m for plan in e.branches for m in plan.meetings]
            or [str(e.eqn.invars[0].aval)]
        )
    ]
    self._rounds = self._by_depth(eqns)
    given = [closed.jaxpr.invars[i] for i in donated]
    self._parts = self._cut(eqns, outs, given, build or _jit)

  def compile(self) -> None:
    """Compiles the parts, those of branches too, before they are run."""
    for part in self._parts:
      shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
                for v in part.ins]
      part.program.lower(*shapes).compile()
    for e in (e for of in self._rounds for e in of):
      for plan in e.branches:
        plan.compile()

  def run(self, args: Sequence[Any], exchange: Exchange) -> list[Any]:
    """Runs the step; returns the outputs that are wanted."""
    values = self._known | dict(zip(self._jaxpr.invars, args))

    def value(v: Any) -> Any:
      return values[v] if isinstance(v, core.Var) else v.val

    for part, of in zip(self._parts, self._rounds):
      values |= zip(part.outs, part.program(*map(value, part.ins)))
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
    last = self._parts[-1]
    ins = list(map(value, last.ins))
    values.clear()  # of what is donated no other reference is left
    return list(last.program(*ins))

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
      build: Callable[..., Any],
  ) -> list[_Part]:
    """Returns a part before each round, and the last one.

    An equation is in the first part that needs it: what a message does not
    depend on is computed after it was sent. One without inputs is in each part
    that needs it.
    """
    made = {v: e for e in eqns for v in e.eqn.outvars}
    effects = [e for e in eqns if e.eqn.effects and not e.exchanges]
    targets = [
        list(dict.fromkeys(v for e in of for v in e.ins))
        for of in self._rounds
    ]
    roots = [*targets, [
        *(v for v in outs if isinstance(v, core.Var)),
        *(v for e in effects for v in e.ins),
    ]]
    chosen: list[list[_Equation]] = []
    done: set[int] = set()
    for number, ahead in enumerate(map(list, roots)):
      is_last = number == len(targets)
      mine = {id(e) for e in effects} - done if is_last else set[int]()
      while ahead:
        e = made.get(ahead.pop())
        if e is not None and not e.exchanges and id(e) not in done | mine:
          mine.add(id(e))
          ahead += e.ins
      chosen.append([e for e in eqns if id(e) in mine])
      done |= {id(e) for e in chosen[-1] if e.ins}

    parts = []
    for number, part in enumerate(chosen):
      own = {v for e in part for v in e.eqn.outvars}
      read = [v for e in part for v in e.ins]
      free: list[int] = []
      if number < len(targets):
        # Read later on: by exchanges, and by other parts.
        later = {v for of in targets[number:] for v in of}
        of_inputs = {v for e in part if e.ins for v in e.eqn.outvars}
        later |= of_inputs & {
            *roots[-1], *(v for p in chosen[number + 1 :] for e in p
                          for v in e.ins)
        }
        out = [v for e in part for v in e.eqn.outvars if v in later]
        ins = [v for v in dict.fromkeys(read) if v not in own]
      else:
        out = list(outs)
        ins = [v for v in dict.fromkeys([*read, *roots[-1]]) if v not in own]
        free = self._donated(ins, out, given)
      body = core.jaxpr_as_fun(core.ClosedJaxpr(
          self._jaxpr.replace(
              constvars=[], invars=ins, outvars=out, eqns=[e.eqn for e in part]
          ), []
      ))
      is_last = number == len(targets)
      parts.append(_Part(build(body, ins, out, is_last, free), ins, out))
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


def _jit(body: Callable[..., Any], *how: Any) -> Any:
  _, _, _, donated = how

  def part_of_step(*args: Any) -> Any:
    return body(*args)

  return jax.jit(part_of_step, donate_argnums=donated)


def body_of(
    whole: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, list[int]]:
  """Returns the function in a `shard_map`, and the numbers of its inputs.

  Among those of `whole`, which is this map, and then its constants.
  """
  (eqn,) = whole.jaxpr.eqns
  (body,) = core.jaxprs_in_params(eqn.params)
  given = [*whole.jaxpr.invars, *whole.jaxpr.constvars]
  return core.ClosedJaxpr(body, []), [given.index(v) for v in eqn.invars]


def met_in(closed: core.ClosedJaxpr) -> dict[Any, int]:
  """Returns which field of `Met` a variable is, of what workers exchange."""
  return {
      v: field for eqn in closed.jaxpr.eqns if eqn.primitive is meet_p
      for field, v in enumerate(eqn.outvars)
  }


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
