"""Cuts a traced step where workers meet, into programs that are compiled.

What workers exchange passes through the host between two programs. A callback
from one compiled program would do as well, but if it fails, so does the
program, with the arrays that were donated to it. Here they stay as they were,
and no backend has to support callbacks.

All that a step exchanges at one depth, the number of exchanges that it depends
on, is one message. A step with one exchange is two programs and one round.
"""

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from demo_optax.workers.collectives import Met, Programs, meet, meet_p
from demo_optax.workers.equations import (
  function_of,
  made_by,
  values_in,
  values_of,
  variables,
)
from demo_optax.workers.variation import watch_p

# From equations of `meet` at one depth, and what this worker sends in each (if
# it only receives, nothing), to what all have sent, as in `Met`.
Exchange = Callable[[list[JaxprEqn], list[Any]], Sequence[Any]]


class _Meeting(NamedTuple):
  """An equation that exchanges: `meet`, or branches of which one is run."""

  eqn: JaxprEqn
  reads: list[Var]
  writes: list[Var]
  branches: list['PartedStep']


_Placed = tuple[list[JaxprEqn], list[_Meeting]]


class _Part(NamedTuple):
  """A function, then a program, and what is exchanged after it."""

  run: Any
  reads: list[Var]
  writes: list[Any]
  meetings: list[_Meeting]  # of one message; none after the last part
  free: Collection[Var] = ()  # what the last part reads and may overwrite


class PartedStep:
  """A step, as compiled parts with exchanges between them."""

  def __init__(
    self,
    step: ClosedJaxpr,
    compiled: Callable[[_Part], Any],
    wanted: Sequence[int] | None = None,
    follows: bool = False,
    donated: Sequence[int] = (),
  ):
    """Cuts a step that is `flat`.

    Programs are made of parts by `compiled`. The step returns the outputs of
    the numbers `wanted`, by default all. One that `follows` only receives. The
    inputs of the numbers `donated` may be overwritten once all exchanges have
    succeeded.
    """
    jaxpr = step.jaxpr
    self._step = step
    self._jaxpr = jaxpr
    self._compiled = compiled
    self._follows = follows
    self._kept = {*jaxpr.constvars, *jaxpr.invars}
    for number in donated:
      self._kept.discard(jaxpr.invars[number])
    results = jaxpr.outvars
    if wanted is not None:
      results = [results[number] for number in wanted]
    self._parts, read = self._cut(results)
    self.uses = [variable in read for variable in jaxpr.invars]

  def run(
    self,
    args: Sequence[Any],
    exchange: Exchange,
  ) -> list[Any]:
    """Runs the step; returns the outputs that are wanted."""
    values = values_in(self._step, args)
    *parts, last = self._parts
    for part in parts:
      outputs = part.run(*values_of(values, part.reads))
      values.update(zip(part.writes, outputs))
      self._meet(part.meetings, values, exchange)
    inputs = values_of(values, last.reads)
    values.clear()  # drops all other references to donated arrays
    return list(last.run(*inputs))

  def _meet(
    self,
    meetings: Sequence[_Meeting],
    values: dict[Var, Any],
    exchange: Exchange,
  ) -> None:
    """Exchanges one message, and runs a branch of each `cond`."""
    eqns = [meeting.eqn for meeting in meetings if not meeting.branches]
    if eqns:
      sent = []
      if not self._follows:
        for eqn in eqns:
          sent += values_of(values, eqn.invars)
      for eqn, met in zip(eqns, exchange(eqns, sent)):
        values.update(zip(eqn.outvars, met))
    for meeting in meetings:
      if meeting.branches:
        number, *operands = values_of(values, meeting.eqn.invars)
        branch = meeting.branches[int(number)]
        outputs = branch.run(operands, exchange)
        values.update(zip(meeting.writes, outputs))

  def _place(self, results: list[Any]) -> list[_Placed]:
    """Returns each part's equations, and the exchanges after them.

    An equation is in the first part that needs it: what a message does not
    depend on is computed after it was sent. A constant, which reads nothing, is
    computed in each part that needs it.
    """
    round_of = _round_numbers(self._jaxpr)
    last = max(round_of.values(), default=-1) + 1
    placed: list[_Placed] = [([], []) for _ in range(last + 1)]
    # The parts that need each variable.
    needed = collections.defaultdict[Var, set[int]](set)
    for variable in variables(results):
      needed[variable].add(last)
    for eqn in reversed(self._jaxpr.eqns):
      parts: set[int] = set()
      if eqn in round_of:
        number = round_of[eqn]
        parts.add(number)
        _, meetings = placed[number]
        meeting = self._meeting(eqn, needed)
        meetings.insert(0, meeting)
        reads = meeting.reads
      else:
        reads = variables(eqn.invars)
        for variable in eqn.outvars:
          parts |= needed[variable]
        if eqn.effects and not self._follows:
          parts.add(last)
        if reads and parts:
          parts = {min(parts)}
        for number in parts:
          eqns, _ = placed[number]
          eqns.insert(0, eqn)
      for variable in reads:
        needed[variable] |= parts
    return placed

  def _cut(self, results: list[Any]) -> tuple[list[_Part], set[Var]]:
    """Returns the parts, and all variables that are read.

    A program returns the values that exchanges and later parts read.
    """
    *placed, (eqns, _) = self._place(results)
    run, reads = function_of(self._jaxpr, eqns, results)
    free = {*reads} - self._kept - {*variables(results)}
    parts = [_Part(run, reads, results, [], free)]
    read_later = {*reads}
    for eqns, meetings in reversed(placed):
      for meeting in meetings:
        read_later.update(meeting.reads)
      writes = [made for made in made_by(eqns) if made in read_later]
      run, reads = function_of(self._jaxpr, eqns, writes)
      read_later.update(reads)
      parts.insert(0, _Part(run, reads, writes, meetings))
    compiled = [part._replace(run=self._compiled(part)) for part in parts]
    return compiled, read_later

  def _meeting(
    self,
    eqn: JaxprEqn,
    needed: Mapping[Var, set[int]],
  ) -> _Meeting:
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
    writes = []
    wanted = []
    for number, made in enumerate(eqn.outvars):
      if needed[made]:
        writes.append(made)
        wanted.append(number)
    condition, *operands = eqn.invars
    reads = [condition]
    branches = []
    for jaxpr in eqn.params['branches']:
      branch = PartedStep(flat(jaxpr), self._compiled, wanted, self._follows)
      branches.append(branch)
      for operand, is_used in zip(operands, branch.uses):
        if is_used:
          reads.append(operand)
    return _Meeting(eqn, variables(reads), writes, branches)


def jitted(part: _Part, ahead: bool) -> Any:
  """Returns a program, compiled `ahead` of its first call, or by that.

  Results of the last part take over the buffers of what it may overwrite.
  """
  written = []
  for result in part.writes:
    if result not in part.reads:
      written.append(_type_of(result))
  donated = []
  for number, variable in enumerate(part.reads):
    buffer = _type_of(variable)
    if variable in part.free and buffer in written:
      written.remove(buffer)
      donated.append(number)
  program = jax.jit(part.run, donate_argnums=donated)
  if ahead:
    types = [variable.aval for variable in part.reads]
    program.lower(*types).compile()
  return program


def _round_numbers(jaxpr: Jaxpr) -> dict[JaxprEqn, int]:
  """Returns the rounds of equations, by the exchanges that they depend on.

  Also of those that one which only receives does not need: it must count as the
  others do.
  """
  # The number of exchanges that each variable depends on.
  depths = collections.Counter[Var]()
  rounds = {}
  for eqn in jaxpr.eqns:
    depth = 0
    for variable in variables(eqn.invars):
      depth = max(depth, depths[variable])
    if meetings_in([eqn]):
      rounds[eqn] = depth
      depth += 1
    for variable in eqn.outvars:
      depths[variable] = depth
  return rounds


def meetings_in(eqns: Iterable[JaxprEqn]) -> list[str]:
  """Returns the types of what is exchanged, in order, in all branches."""
  types = []
  for eqn in eqns:
    if eqn.primitive is meet_p:
      types.append(str(eqn.invars[0].aval))
    for inner in core.jaxprs_in_params(eqn.params):
      types += meetings_in(inner.eqns)
  return types


def _type_of(atom: Any) -> Any:
  return atom.aval.shape, atom.aval.dtype


# Exchanges at the top ---------------------------------------------------------


def flat(step: ClosedJaxpr) -> ClosedJaxpr:
  """Returns a step whose exchanges are not in `jit` or `shard_map`.

  Also without the checks of `watch`, which are over. One that follows would
  depend on gradients, where they are watched together with what it needs.
  """
  replay = functools.partial(_replay, step)
  return jax.make_jaxpr(replay)(*step.in_avals)


def _replay(step: ClosedJaxpr, *args: Any) -> list[Any]:
  """Runs a step, and what is in it that exchanges, equation by equation."""
  jaxpr = step.jaxpr
  values = values_in(step, args)
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    inputs = values_of(values, eqn.invars)
    if eqn.primitive is watch_p:
      outputs = inputs
    elif name == 'shard_map' and meetings_in([eqn]):
      outputs = _replay_on_devices(eqn, inputs)
    elif name in ('pjit', 'jit') and meetings_in([eqn]):
      outputs = _replay(eqn.params['jaxpr'], *inputs)
    else:
      run, reads = function_of(jaxpr, [eqn], eqn.outvars)
      outputs = run(*values_of(values, reads))
    values.update(zip(eqn.outvars, outputs))
  return values_of(values, jaxpr.outvars)


def _replay_on_devices(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
  """Runs a `shard_map` over one worker's devices in parts.

  What passes from one part to the next, with messages for other workers between
  them, has a leading axis of the devices.
  """
  mesh = eqn.params['mesh']
  (body,) = core.jaxprs_in_params(eqn.params)
  specs = dict(zip(body.invars, eqn.params['in_specs']))
  devices = P(mesh.axis_names)

  def mapped(part: _Part) -> Any:
    is_last = not part.meetings

    def on_device(*arrays: jax.Array) -> list[jax.Array]:
      inputs = []
      for variable, array in zip(part.reads, arrays):
        if variable not in specs:
          array = array[0]  # from [1, ...] on each device
        inputs.append(array)
      outputs = part.run(*inputs)
      if is_last:
        return outputs
      return [array[None] for array in outputs]

    in_specs = tuple(specs.get(variable, devices) for variable in part.reads)
    out_specs = [devices] * len(part.writes)
    if is_last:
      out_specs = list(eqn.params['out_specs'])
    return jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
    )

  def exchange(
    eqns: list[JaxprEqn],
    sent: list[Any],
  ) -> list[Met]:
    # From f32[workers, devices, ...]; all devices have the same flags.
    to_devices = jax.vmap(Met, (1, None, None))
    received = []
    for eqn, array in zip(eqns, sent):  # f32[devices, ...]
      programs = Programs(eqn.params['size'])
      met = meet(array, programs)
      received.append(to_devices(*met))
    return received

  parts = PartedStep(ClosedJaxpr(body, []), mapped)
  return parts.run(inputs, exchange)
