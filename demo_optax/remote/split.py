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

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from demo_optax.workers.collectives import Programs, meet, meet_p
from demo_optax.workers.equations import (
  function_of,
  made_by,
  read_by,
  values_of,
  variables,
)
from demo_optax.workers.variation import watch_p

# From equations of `meet` at one depth, and what this worker sends in each
# (None if it only receives), to what all have sent, as in `Met`.
Exchange = Callable[[list[JaxprEqn], list[Any] | None], Sequence[Any]]


class _Meeting(NamedTuple):
  """An equation that exchanges: `meet`, or branches of which one is run."""

  eqn: JaxprEqn
  reads: list[Var]
  writes: list[Var]
  branches: list['PartedStep']


class _Part(NamedTuple):
  """A function, then a program, of what is between two exchanges."""

  run: Any
  reads: list[Var]
  writes: list[Any]
  is_last: bool


class PartedStep:
  """A step, as compiled parts with exchanges between them."""

  def __init__(
    self,
    step: ClosedJaxpr,
    wanted: Sequence[int] | None = None,
    follows: bool = False,
    donated: Sequence[int] = (),
    compiled: Callable[[_Part], Any] | None = None,
  ):
    """Cuts a step that is `flat`.

    It returns the outputs of the numbers `wanted`, by default all. One that
    `follows` only receives. The inputs of the numbers `donated` may be
    overwritten once all exchanges have succeeded. Programs are made of parts by
    `compiled`, by default `jax.jit`.
    """
    self._jaxpr, self._follows = step.jaxpr, follows
    self._known = dict(zip(step.jaxpr.constvars, step.consts))
    self._donated = {step.jaxpr.invars[i] for i in donated}
    results = step.jaxpr.outvars
    if wanted is not None:
      results = [results[i] for i in wanted]
    self._computed: list[JaxprEqn] = []
    self._meetings: dict[JaxprEqn, _Meeting] = {}
    self.meetings = meetings_in(step.jaxpr)
    live = self._find_needed(results)
    self.uses = [v in live for v in step.jaxpr.invars]
    self._rounds = self._by_depth()
    compiled = compiled or self._jit
    parts = self._cut(results)
    self._parts = [part._replace(run=compiled(part)) for part in parts]

  def compile(self) -> None:
    """Compiles the parts, those of branches too, before they are run."""
    for part in self._parts:
      part.run.lower(*(v.aval for v in part.reads)).compile()
    for meeting in self._meetings.values():
      for branch in meeting.branches:
        branch.compile()

  def run(self, args: Sequence[Any], exchange: Exchange) -> list[Any]:
    """Runs the step; returns the outputs that are wanted."""
    values = self._known | dict(zip(self._jaxpr.invars, args))
    parts = iter(self._parts)
    runs_ahead = False
    for number, meetings in enumerate(self._rounds):
      if not runs_ahead:
        _run_part(next(parts), values)
      # Nothing waits for a program: early messages are sent while it runs.
      runs_ahead = self._can_run_ahead(number)
      if runs_ahead:
        _run_part(next(parts), values)
      self._meet(meetings, values, exchange)
    part = next(parts)
    last = values_of(values, part.reads)
    values.clear()  # drops all other references to donated arrays
    return list(part.run(*last))

  def _can_run_ahead(self, number: int) -> bool:
    """Returns whether the program after a round need not wait for it."""
    meetings = self._rounds[number]
    if number + 1 == len(self._rounds) or not _is_early(meetings[0].eqn):
      return False
    awaited = set(self._parts[number + 1].reads)
    return all(awaited.isdisjoint(meeting.writes) for meeting in meetings)

  def _meet(
    self,
    meetings: Sequence[_Meeting],
    values: dict[Var, Any],
    exchange: Exchange,
  ) -> None:
    """Exchanges one message, and runs a branch of each `cond`."""
    meets = [meeting.eqn for meeting in meetings if not meeting.branches]
    if meets:
      sent = None
      if not self._follows:
        sent = values_of(values, [eqn.invars[0] for eqn in meets])
      for eqn, met in zip(meets, exchange(meets, sent)):
        values.update(zip(eqn.outvars, met))
    for eqn, _, writes, branches in meetings:
      if branches:
        number, *operands = values_of(values, eqn.invars)
        found = branches[int(number)].run(operands, exchange)
        values.update(zip(writes, found))

  def _find_needed(self, results: Sequence[Any]) -> set[Var]:
    """Finds the equations that are needed; returns all variables they read."""
    live = {*variables(results)}
    for eqn in reversed(self._jaxpr.eqns):
      if _exchanges(eqn):
        meeting = self._meeting(eqn, live)
        self._meetings[eqn] = meeting
        live.update(meeting.reads)
      elif live & {*eqn.outvars} or (eqn.effects and not self._follows):
        self._computed.append(eqn)
        live.update(variables(eqn.invars))
    self._computed.reverse()
    return live

  def _meeting(self, eqn: JaxprEqn, live: set[Var]) -> _Meeting:
    if eqn.primitive is meet_p:  # a message is sent and read in any case
      sent = [] if self._follows else variables(eqn.invars)
      return _Meeting(eqn, sent, eqn.outvars, [])
    name = eqn.primitive.name
    if name != 'cond':
      raise ValueError(
        'A step with Workers.remote must exchange outside of loops and of what'
        f' is differentiated, got an exchange inside of {name!r}. Call the'
        ' step once for each exchange.'
      )
    wanted = [i for i, v in enumerate(eqn.outvars) if v in live]
    branches = [
      PartedStep(flat(branch), wanted, self._follows)
      for branch in eqn.params['branches']
    ]
    number, *operands = eqn.invars
    reads = [number]
    for branch in branches:
      reads += itertools.compress(operands, branch.uses)
    writes = [eqn.outvars[i] for i in wanted]
    return _Meeting(eqn, variables(reads), writes, branches)

  def _by_depth(self) -> list[list[_Meeting]]:
    """Returns what exchanges, by the number of exchanges before it."""
    depths: dict[Any, int] = {}
    rounds: dict[int, list[_Meeting]] = {}
    # Of all equations: one that only receives must count as the others do.
    for eqn in self._jaxpr.eqns:
      before = [depths.get(v, 0) for v in variables(eqn.invars)]
      depth = max(before, default=0)
      if eqn in self._meetings:
        depth -= _is_early(eqn)
        rounds.setdefault(depth, []).append(self._meetings[eqn])
        depth += 1
      depths.update(dict.fromkeys(eqn.outvars, depth))
    return [rounds[depth] for depth in sorted(rounds)]

  def _cut(self, results: list[Any]) -> list[_Part]:
    """Returns parts, one before each round, and the last one.

    An equation is in the first part that needs it: what a message does not
    depend on is computed after it was sent. A constant, which reads nothing, is
    computed in each part that needs it.
    """
    parts: list[_Part] = []
    pending = self._computed
    sent = _sent_by(self._meetings.values())
    for meetings in self._rounds:
      eqns = _needed_for(_sent_by(meetings), pending)
      once = {eqn for eqn in eqns if variables(eqn.invars)}
      pending = [eqn for eqn in pending if eqn not in once]
      later = {*read_by(pending), *variables(results)}
      later = {*sent, *later.intersection(made_by(once))}
      writes = [v for v in made_by(eqns) if v in later]
      run, reads = function_of(self._jaxpr, eqns, writes)
      parts.append(_Part(run, reads, writes, is_last=False))
    run, reads = function_of(self._jaxpr, pending, results)
    return [*parts, _Part(run, reads, results, is_last=True)]

  def _jit(self, part: _Part) -> Any:
    """Returns a program; results of the last one take over input buffers."""
    kept = {*self._known, *self._jaxpr.invars} - self._donated
    kept.update(variables(part.writes))
    free = []
    if part.is_last:
      free = [_form(v) for v in part.writes if v not in part.reads]
    donated = []
    for number, v in enumerate(part.reads):
      if v not in kept and _form(v) in free:
        free.remove(_form(v))
        donated.append(number)
    return jax.jit(part.run, donate_argnums=donated)


def meetings_in(jaxpr: Jaxpr) -> list[str]:
  """Returns the types of what is exchanged, in order, in all branches."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive is meet_p:
      found.append(str(eqn.invars[0].aval))
    for inner in core.jaxprs_in_params(eqn.params):
      found += meetings_in(inner)
  return found


def _exchanges(eqn: JaxprEqn) -> bool:
  inner = core.jaxprs_in_params(eqn.params)
  return eqn.primitive is meet_p or any(map(meetings_in, inner))


def _is_early(eqn: JaxprEqn) -> bool:
  return eqn.params.get('early', False)


def _run_part(part: _Part, values: dict[Var, Any]) -> None:
  found = part.run(*values_of(values, part.reads))
  values.update(zip(part.writes, found))


def _sent_by(meetings: Iterable[_Meeting]) -> list[Var]:
  found = []
  for meeting in meetings:
    found += meeting.reads
  return found


def _needed_for(
  wanted: Iterable[Var], eqns: Sequence[JaxprEqn]
) -> list[JaxprEqn]:
  """Returns the equations that variables depend on."""
  needed, found = {*wanted}, []
  for eqn in reversed(eqns):
    if not needed.isdisjoint(eqn.outvars):
      found.append(eqn)
      needed.update(variables(eqn.invars))
  return found[::-1]


def _form(v: Any) -> Any:
  return v.aval.shape, v.aval.dtype


# Exchanges at the top ---------------------------------------------------------


def flat(step: ClosedJaxpr) -> ClosedJaxpr:
  """Returns a step whose exchanges are not in `jit` or `shard_map`.

  Also without the checks of `watch`, which are over. One that follows would
  depend on gradients, where they are watched together with what it needs.
  """
  return jax.make_jaxpr(functools.partial(_replay, step))(*step.in_avals)


def _replay(step: ClosedJaxpr, *args: Any) -> list[Any]:
  """Runs a step equation by equation."""
  jaxpr = step.jaxpr
  values = dict(zip(jaxpr.constvars, step.consts))
  values.update(zip(jaxpr.invars, args))
  for eqn in jaxpr.eqns:
    ins = values_of(values, eqn.invars)
    name = eqn.primitive.name
    is_call = name in ('pjit', 'jit', 'shard_map') and _exchanges(eqn)
    if eqn.primitive is watch_p:
      found = ins
    elif is_call and name == 'shard_map':
      found = _replay_on_devices(eqn, ins)
    elif is_call:
      found = _replay(eqn.params['jaxpr'], *ins)
    else:
      run, reads = function_of(jaxpr, [eqn], eqn.outvars)
      found = run(*values_of(values, reads))
    values.update(zip(eqn.outvars, found))
  return values_of(values, jaxpr.outvars)


def _replay_on_devices(eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
  """Runs a `shard_map` over one worker's devices in parts.

  What passes from one part to the next, with messages for other workers between
  them, has a leading axis of the devices.
  """
  mesh = eqn.params['mesh']
  (body,) = core.jaxprs_in_params(eqn.params)
  specs = dict(zip(body.invars, eqn.params['in_specs']))
  devices = P(mesh.axis_names)

  def compiled(part: _Part) -> Any:
    def on_device(*arrays: jax.Array) -> list[jax.Array]:
      own = []
      for v, x in zip(part.reads, arrays):
        own.append(x if v in specs else x[0])  # from [1, ...] on each device
      found = part.run(*own)
      return found if part.is_last else [x[None] for x in found]

    out_specs = [devices] * len(part.writes)
    if part.is_last:
      out_specs = list(eqn.params['out_specs'])
    in_specs = tuple(specs.get(v, devices) for v in part.reads)
    return jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
    )

  def exchange(eqns: list[JaxprEqn], sent: list[Any] | None) -> list[Any]:
    found = []
    for eqn, x in zip(eqns, sent or []):  # f32[devices, ...]
      rows, *flags = meet(x, Programs(eqn.params['size']), _is_early(eqn))
      # From f32[workers, devices, ...]; all devices have the same flags.
      to_devices = jax.vmap(lambda rows, flags: [rows, *flags], (1, None))
      found.append(to_devices(rows, flags))
    return found

  parts = PartedStep(ClosedJaxpr(body, []), compiled=compiled)
  return parts.run(ins, exchange)
