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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from demo_optax.workers.collectives import Met, Programs, meet, meet_p
from demo_optax.workers.variation import watch_p

# From equations of `meet` at one depth, and what this worker sends in each
# (None if it only receives), to what all have sent, as in `Met`.
Exchange = Callable[[list[JaxprEqn], list[Any] | None], Sequence[Any]]

# Makes a program of a function, the variables that it reads and returns, and
# whether it is the last one of a step.
Build = Callable[[Callable[..., Any], list[Var], list[Any], bool], Any]


class _Meeting(NamedTuple):
  """An equation that exchanges: `meet`, or branches of which one is run."""

  eqn: JaxprEqn
  reads: list[Var]
  writes: list[Var]
  branches: list['PartedStep']


class _Part(NamedTuple):
  """A program between two exchanges."""

  program: Any
  reads: list[Var]
  writes: list[Any]


class PartedStep:
  """A step, as compiled parts with exchanges between them."""

  def __init__(
    self,
    step: ClosedJaxpr,
    wanted: Sequence[int] | None = None,
    follows: bool = False,
    donated: Sequence[int] = (),
    build: Build | None = None,
  ):
    """Cuts a step that is `flat`.

    It returns the outputs of the numbers `wanted`, by default all. One that
    `follows` only receives. The inputs of the numbers `donated` may be
    overwritten once all exchanges have succeeded. Programs are made by `build`,
    by default `jax.jit`.
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
    self._parts = self._cut(results, build or self._jit)

  def compile(self) -> None:
    """Compiles the parts, those of branches too, before they are run."""
    for program, reads, _ in self._parts:
      program.lower(*(v.aval for v in reads)).compile()
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
    program, reads, _ = next(parts)
    last = [values[v] for v in reads]
    values.clear()  # drops all other references to donated arrays
    return list(program(*last))

  def _can_run_ahead(self, number: int) -> bool:
    """Returns whether the program after a round need not wait for it."""
    meetings = self._rounds[number]
    if number + 1 == len(self._rounds) or not _is_early(meetings[0].eqn):
      return False
    awaited = [v for meeting in meetings for v in meeting.writes]
    return set(awaited).isdisjoint(self._parts[number + 1].reads)

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
        sent = [_read(values, eqn.invars[0]) for eqn in meets]
      for eqn, met in zip(meets, exchange(meets, sent)):
        values.update(zip(eqn.outvars, met))
    for eqn, _, writes, branches in meetings:
      if branches:
        # Of arrays that no branch uses, one that follows may have none.
        number, *operands = [_read(values, v) for v in eqn.invars]
        found = branches[int(number)].run(operands, exchange)
        values.update(zip(writes, found))

  def _find_needed(self, results: Sequence[Any]) -> set[Var]:
    """Finds the equations that are needed; returns all variables they read."""
    live = {*_variables(results)}
    for eqn in reversed(self._jaxpr.eqns):
      if _exchanges(eqn):
        meeting = self._meeting(eqn, live)
        self._meetings[eqn] = meeting
        live.update(meeting.reads)
      elif live & {*eqn.outvars} or (eqn.effects and not self._follows):
        self._computed.append(eqn)
        live.update(_variables(eqn.invars))
    self._computed.reverse()
    return live

  def _meeting(self, eqn: JaxprEqn, live: set[Var]) -> _Meeting:
    if eqn.primitive is meet_p:  # a message is sent and read in any case
      sent = [] if self._follows else _variables(eqn.invars)
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
      reads += [v for v, is_used in zip(operands, branch.uses) if is_used]
    writes = [eqn.outvars[i] for i in wanted]
    return _Meeting(eqn, _variables(reads), writes, branches)

  def _by_depth(self) -> list[list[_Meeting]]:
    """Returns what exchanges, by the number of exchanges before it."""
    depths: dict[Any, int] = {}
    rounds: dict[int, list[_Meeting]] = {}
    # Of all equations: one that only receives must count as the others do.
    for eqn in self._jaxpr.eqns:
      before = [depths.get(v, 0) for v in _variables(eqn.invars)]
      depth = max(before, default=0)
      if eqn in self._meetings:
        depth -= _is_early(eqn)
        rounds.setdefault(depth, []).append(self._meetings[eqn])
        depth += 1
      depths.update(dict.fromkeys(eqn.outvars, depth))
    return [rounds[depth] for depth in sorted(rounds)]

  def _cut(self, results: list[Any], build: Build) -> list[_Part]:
    """Returns programs, one before each round, and the last one.

    An equation is in the first part that needs it: what a message does not
    depend on is computed after it was sent. A constant, which reads nothing, is
    computed in each part that needs it.
    """
    parts: list[_Part] = []
    pending = self._computed
    sent = [v for m in self._meetings.values() for v in m.reads]
    for meetings in self._rounds:
      wanted = [v for meeting in meetings for v in meeting.reads]
      eqns = _needed_for(wanted, pending)
      once = {eqn for eqn in eqns if _variables(eqn.invars)}
      pending = [eqn for eqn in pending if eqn not in once]
      later = {*_read_by(pending), *_variables(results)}
      later = {*sent, *later.intersection(_made_by(once))}
      writes = [v for v in _made_by(eqns) if v in later]
      parts.append(self._part(eqns, writes, build, False))
    parts.append(self._part(pending, results, build, True))
    return parts

  def _part(
    self, eqns: list[JaxprEqn], writes: list[Any], build: Build, is_last: bool
  ) -> _Part:
    """Returns a program of some equations."""
    made = {*_made_by(eqns)}
    reads = dict.fromkeys([*_read_by(eqns), *_variables(writes)])
    ins = [v for v in reads if v not in made]
    program = build(
      _function(self._jaxpr, eqns, ins, writes), ins, writes, is_last
    )
    return _Part(program, ins, writes)

  def _jit(
    self,
    part: Callable[..., Any],
    reads: list[Var],
    writes: list[Any],
    is_last: bool,
  ) -> Any:
    """Returns a program; results of the last one take over input buffers."""
    kept = {*self._known, *self._jaxpr.invars} - self._donated
    kept.update(_variables(writes))
    free = [_form(v) for v in writes if v not in reads] if is_last else []
    donated = []
    for number, v in enumerate(reads):
      if v not in kept and _form(v) in free:
        free.remove(_form(v))
        donated.append(number)
    return jax.jit(part, donate_argnums=donated)


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
  program, reads, writes = part
  values.update(zip(writes, program(*[values[v] for v in reads])))


def _read(values: dict[Var, Any], atom: Any) -> Any:
  return values.get(atom) if isinstance(atom, Var) else atom.val


def _variables(atoms: Iterable[Any]) -> list[Var]:
  return [v for v in atoms if isinstance(v, Var)]


def _read_by(eqns: Iterable[JaxprEqn]) -> list[Var]:
  return [v for eqn in eqns for v in _variables(eqn.invars)]


def _made_by(eqns: Iterable[JaxprEqn]) -> list[Var]:
  return [v for eqn in eqns for v in eqn.outvars]


def _needed_for(
  wanted: Iterable[Var], eqns: Sequence[JaxprEqn]
) -> list[JaxprEqn]:
  """Returns the equations that variables depend on."""
  needed, found = {*wanted}, []
  for eqn in reversed(eqns):
    if not needed.isdisjoint(eqn.outvars):
      found.append(eqn)
      needed.update(_variables(eqn.invars))
  return found[::-1]


def _function(
  jaxpr: Jaxpr, eqns: list[JaxprEqn], ins: list[Var], outs: list[Any]
) -> Callable[..., list[Any]]:
  """Returns a function of some equations of a program."""
  part = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=eqns)
  return core.jaxpr_as_fun(ClosedJaxpr(part, []))


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
    ins = [_read(values, v) for v in eqn.invars]
    name = eqn.primitive.name
    is_call = name in ('pjit', 'jit', 'shard_map') and _exchanges(eqn)
    if eqn.primitive is watch_p:
      found = ins
    elif is_call and name == 'shard_map':
      found = _replay_on_devices(eqn, ins)
    elif is_call:
      found = _replay(eqn.params['jaxpr'], *ins)
    else:
      reads = list(dict.fromkeys(_variables(eqn.invars)))
      run = _function(jaxpr, [eqn], reads, eqn.outvars)
      found = run(*[values[v] for v in reads])
    values.update(zip(eqn.outvars, found))
  return [_read(values, v) for v in jaxpr.outvars]


def _replay_on_devices(eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
  """Runs a `shard_map` over one worker's devices in parts.

  What passes from one part to the next, with messages for other workers between
  them, has a leading axis of the devices.
  """
  mesh = eqn.params['mesh']
  (body,) = core.jaxprs_in_params(eqn.params)
  specs = dict(zip(body.invars, eqn.params['in_specs']))
  devices = P(mesh.axis_names)

  def build(
    part: Callable[..., Any],
    reads: list[Var],
    writes: list[Any],
    is_last: bool,
  ) -> Any:
    def on_device(*arrays: jax.Array) -> list[jax.Array]:
      own = []
      for v, x in zip(reads, arrays):
        own.append(x if v in specs else x[0])  # from [1, ...] on each device
      found = part(*own)
      return found if is_last else [x[None] for x in found]

    of_results = eqn.params['out_specs']
    return jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=tuple(specs.get(v, devices) for v in reads),
      out_specs=list(of_results) if is_last else [devices] * len(writes),
      check_vma=False,
    )

  def exchange(eqns: list[JaxprEqn], sent: list[Any] | None) -> list[Met]:
    found = []
    for eqn, x in zip(eqns, sent or []):  # f32[devices, ...]
      met = meet(x, Programs(eqn.params['size']), _is_early(eqn))
      rows = jnp.moveaxis(met.rows, 1, 0)  # f32[devices, workers, ...]
      flags = [
        jnp.broadcast_to(flag, (len(x), *flag.shape)) for flag in met[1:]
      ]
      found.append(Met(rows, *flags))
    return found

  return PartedStep(ClosedJaxpr(body, []), build=build).run(ins, exchange)
