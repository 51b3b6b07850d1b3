"""Runs the step of a worker that is a separate program.

All that workers share follows from the lists of messages that the relay hands
to all of them: a worker that is behind applies lists by a program that only
decodes, without gradients.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from demo_optax.exchange import agreement
from demo_optax.exchange.algorithm import traced_configs
from demo_optax.numerics import prng
from demo_optax.remote import frames, states
from demo_optax.remote.link import Behind, Position, link_of
from demo_optax.remote.split import PartedStep, flat, jitted, meetings_in
from demo_optax.workers import Workers
from demo_optax.workers.workers import put

_LOG = logging.getLogger('demo_optax.remote')

_ATTEMPTS = 16  # to take part, in a call
_FEW = 16  # numbers of an argument that may differ between steps


@dataclasses.dataclass
class RemoteProgram:
  """The program of a call, in parts between which messages are exchanged.

  Attributes:
    workers: the workers, with the rank of this one.
    run: `run(*arrays, index=rank)` runs the step of one worker. Returns arrays,
      and what is known of them: in `nexts` for each the number of the shared
      argument whose next value it is, or None.
    names: of the arrays that are passed.
    shared: numbers of those that all workers have.
    copies: for the numbers of some, those of copies that each worker has.
    donated: numbers of arrays that may be overwritten.
  """

  workers: Workers
  run: Callable[..., tuple[list[Any], Any]]
  names: Sequence[str]
  shared: Sequence[int]
  copies: Mapping[int, Sequence[int]]
  donated: Sequence[int]

  def __post_init__(self) -> None:
    mesh = self.workers.mesh
    devices = jax.local_devices() if mesh is None else mesh.devices.flat
    processes = {device.process_index for device in devices}
    if len(processes) < jax.process_count():
      raise ValueError(
        'mesh must have devices of all processes that jax.distributed has'
        f' joined, got {mesh}, and {jax.process_count()} processes.'
        ' They are one worker of Workers.remote.'
      )
    # Shardings on a mesh are known when the step is run.
    self._compiled = functools.partial(jitted, ahead=mesh is None)
    self._link = link_of(self.workers)
    self._step: Any = None  # once it is traced
    self._is_source = False  # whether it must send its state

  def __call__(self, *arrays: Any) -> tuple[list[Any], Any]:
    """Runs the step; if it fails, the arrays are as they were before."""
    if self._link.rank == frames.FOLLOWER:
      raise ValueError(
        f'rank must be the number of a worker that trains, got {self.workers}.'
        ' Give Workers.remote a rank from 0, or call'
        ' demo_optax.remote.follow(train_step, ...).'
      )
    with self._link.interruptible():
      self.trace(*arrays)
      self._tag_step(arrays)
      run = self._train if self._nexts else self._evaluate
      return run(arrays), self._returned

  def lower(self, *arrays: Any) -> Any:
    """Raises: the step is several programs."""
    raise ValueError(
      f'workers must have one program to lower, got {self.workers}, whose'
      ' step is several. Lower it with Workers.simulated.'
    )

  def follow(self, *arrays: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Yields the arrays of a traced step after each round: `remote.follow`.

    They may be shapes: the first values are those of a state. Before them are
    the next round, and how many rounds are over that are not applied yet.
    """
    for number in (*self._given, *self._others):
      if isinstance(arrays[number], jax.ShapeDtypeStruct):
        raise ValueError(
          f'{self.names[number]} must be an array, got its shape alone: no'
          ' worker sends what a step does not change. Pass the value that the'
          ' workers have.'
        )
    self._tag_step(arrays)
    link = self._link
    current = list(arrays)
    position = link.position
    while True:
      try:
        with link.interruptible():
          position = self._say_hello(current, position)
          self._advance(current)
      except Behind:
        continue
      position = link.position
      yield position.round, link.open - position.round, current

  # Tracing --------------------------------------------------------------------

  def trace(self, *arrays: Any) -> None:
    """Traces the step, cuts and compiles it, once."""
    if self._step is not None:
      return
    index = np.int32(self._link.rank)
    with traced_configs() as configs:
      make = jax.make_jaxpr(self.run, return_shape=True)
      traced, (_, returned) = make(*arrays, index=index)
    # The arrays that all workers share and that a step changes, by number, and
    # the places of their next values in what it returns.
    changed = sorted({*returned.nexts} - {None})
    self._nexts = {number: returned.nexts.index(number) for number in changed}
    if configs and not changed:
      raise ValueError(
        f'A training step of {self.workers} must return parameters and'
        ' optimizer state, from which other workers start. Return both, as'
        ' they were passed.'
      )
    types = traced.in_avals
    described = [f'{self.names[number]} {types[number]}' for number in changed]
    state = ', '.join(described)
    former = self._link.shared or state
    if changed and state != former:
      raise ValueError(
        f'All training steps of {self.workers} must return the same state,'
        f' got one of {state}, and before it one of {former}.'
        ' Make one step of them.'
      )
    self._link.shared = former
    kept = [number for number in self.shared if number not in changed]
    # Small ones may have other values in the next step.
    small = [number for number in kept if types[number].size <= _FEW]
    self._given = small if changed else []
    self._others = [number for number in kept if number not in small]
    self._step = flat(traced)
    self._returned = returned
    if self._link.rank != frames.FOLLOWER:
      self._plan = PartedStep(self._step, self._compiled, donated=self.donated)
    messages = ' '.join(meetings_in(self._step.jaxpr.eqns))
    self._text = agreement.describe(configs)
    self._text |= {'shared arrays': state, 'messages': messages}

  @functools.cached_property
  def _follower(self) -> PartedStep:
    """The program that applies lists, without gradients."""
    nexts = [*self._nexts.values()]
    return PartedStep(self._step, self._compiled, nexts, follows=True)

  def _state_in(self, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays that all workers share and that a step changes."""
    return [arrays[number] for number in self._nexts]

  def _tag_step(self, arrays: Sequence[Any]) -> None:
    """Makes messages those of a step with these arguments."""
    # Values that a worker which joins does not receive: all must pass the same.
    given = [arrays[number] for number in self._given]
    values = states.to_bytes(given)
    self._tag = frames.tag(self._text['messages'], values, bool(self._nexts))

  # Rounds ---------------------------------------------------------------------

  def _train(self, arrays: Sequence[Any]) -> list[Any]:
    """Runs a training step in the round that is open."""
    link = self._link
    position = link.position  # of the caller's arrays
    try:
      for _ in range(_ATTEMPTS):
        with contextlib.suppress(Behind):
          position = self._say_hello(arrays, position)
          self._is_source = False
          values = self._run_in_round(self._current(arrays))
          if self._is_source:
            state = [values[place] for place in self._nexts.values()]
            link.send_state(states.to_bytes(state))
          return values
      raise RuntimeError(
        f'{self.workers} has taken the state of another worker'
        f' {_ATTEMPTS} times and is still behind. Call the same training'
        ' step in all workers, or give the relay a longer --deadline.'
      )
    except BaseException:
      link.position = position
      raise

  def _evaluate(self, arrays: Sequence[Any]) -> list[Any]:
    """Runs a step that changes no state, with all workers or with this one.

    It is alone before its first training step, and if it is so late that the
    others are training again. The next training step brings it up to date.
    """
    link = self._link
    position = link.position
    if link.open >= 0 and position.chain:
      with contextlib.suppress(Behind):
        return self._run_in_round(arrays)
      link.position = position
    _LOG.warning('%s evaluates alone', self.workers)

    def alone(body: bytes) -> list[bytes]:
      messages = [b''] * self.workers.count
      messages[link.rank] = body
      return messages

    return self._execute(self._plan, arrays, alone)

  def _say_hello(self, arrays: Sequence[Any], at: Position) -> Position:
    """Says hello to a new relay, with the position of these arrays.

    Says what this worker exchanges, and which state it has now; returns where
    the arrays are then.
    """
    link = self._link
    if link.open >= 0:
      return at
    link.position = at
    others = [arrays[number] for number in self._others]
    digest = states.digest(others).hex()
    described = self._text | {'other arguments': digest}
    text = frames.described(self.workers.count, described)
    if link.rank == frames.FOLLOWER:  # it has no state yet
      link.hello(text, b'')
    else:
      state = self._state_in(arrays)
      link.hello(text, states.digest(state), states.steps_in(state))
    return link.position

  def _current(self, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays as they are in the round that is open."""
    link = self._link
    current = list(arrays)
    while not link.position.chain or link.position.round < link.open:
      self._advance(current)
    return current

  def _advance(self, arrays: list[Any]) -> None:
    """Takes a state, or waits for the list of the next round and applies it."""
    follower = self._follower  # is compiled now, not after the state was taken
    if self._link.position.chain:
      self._apply_list(follower, arrays)
    else:
      self._take(arrays)
    for number, copies in self.copies.items():
      for copy in copies:
        updated = arrays[number].astype(arrays[copy].dtype)
        arrays[copy] = updated[None]  # of one worker: [1, ...]

  def _apply_list(self, follower: PartedStep, arrays: list[Any]) -> None:
    link = self._link
    received = [self._link.gather(b'')]
    if self._is_other(received[0]):
      return

    def next_list(body: bytes) -> list[bytes]:
      return received.pop() if received else link.gather(body)

    while received:  # not every step of local updates exchanges
      values = self._execute(follower, arrays, next_list)
      for number, array in zip(self._nexts, values):
        arrays[number] = array

  def _is_other(self, messages: Sequence[bytes]) -> bool:
    """Returns whether a list is of another step, which changes no state.

    The others have called it, to evaluate, while this worker was late. Raises
    `Behind` if the other step changes the state.
    """
    tag = next(message[: frames.CHAIN] for message in messages if message)
    if tag == self._tag:
      return False
    if tag[:8] == self._tag[:8]:
      names = ', '.join(self.names[number] for number in self._given)
      raise ValueError(
        f'{names} must be equal on all workers in each round, got another'
        f' value than the others in {self.workers}. A worker that is late'
        ' needs the values of the rounds that it missed: make a schedule of'
        ' the optimizer of what changes.'
      )
    if frames.changes_state(tag):  # only a later state can be followed
      self._link.position = Position()
      raise Behind
    return True

  def _take(self, arrays: list[Any]) -> None:
    """Puts another worker's shared state in place of this worker's."""
    state = self._link.state()
    types = []
    for array in self._state_in(arrays):
      types.append(jax.eval_shape(prng.words, array))
    received, _ = states.from_bytes(state, types)
    for number, array in zip(self._nexts, received):
      former = arrays[number]
      taken = prng.of_words(jnp.asarray(array), like=former)
      sharding = getattr(former, 'sharding', None)
      # Programs are compiled for arrays that no device was chosen for.
      if sharding is not None and getattr(former, 'committed', True):
        taken = put(taken, sharding)
      arrays[number] = taken

  # Messages -------------------------------------------------------------------

  def _run_in_round(self, arrays: Sequence[Any]) -> list[Any]:
    """Runs the step in the round that is open."""

    def gather(body: bytes) -> list[bytes]:
      while True:
        sketch = b''
        if self._nexts and self._link.position.then:
          sketch = states.sketch(self._state_in(arrays))
        messages = self._link.gather(body + sketch)
        if not self._is_other(messages):
          return messages

    return self._execute(self._plan, arrays, gather)

  def _execute(
    self,
    plan: PartedStep,
    arrays: Sequence[Any],
    gather: Callable[[bytes], list[bytes]],
  ) -> list[Any]:
    """Runs a plan. `gather` exchanges bytes: b'' if this worker only receives.

    A message is the tag, the arrays that are sent, and a sketch of the state
    if workers compare theirs.
    """
    link = self._link

    def exchange(eqns: list[JaxprEqn], sent: list[Any]) -> list[Any]:
      types: list[Any] = [eqn.invars[0].aval for eqn in eqns]
      body = self._tag + states.to_bytes(sent) if sent else b''
      is_wanted = link.position.then == frames.SEND
      messages = gather(body)
      gathered = []  # [workers, ...] each
      for like in types:
        shape = len(messages), *like.shape
        gathered.append(np.zeros(shape, like.dtype))
      present = np.array([*map(bool, messages)])
      ranks = np.flatnonzero(present).tolist()
      sketches = {}
      for rank in ranks:
        after_tag = memoryview(messages[rank])[frames.CHAIN :]
        received, sketch = states.from_bytes(after_tag, types)
        for rows, array in zip(gathered, received):
          rows[rank] = array
        if sketch:
          sketches[rank] = bytes(sketch)
      if sketches:
        first = self._compare(arrays, sketches)
        self._is_source |= is_wanted and first == link.rank
      included = np.bool(link.rank in ranks)
      return [(rows, present, included) for rows in gathered]

    index = np.int32(link.rank)
    return plan.run([*arrays, index], exchange)

  def _compare(
    self, arrays: Sequence[Any], sketches: Mapping[int, bytes]
  ) -> int:
    """Compares the shared arrays of all in a round; returns the first of most.

    This worker parts if it differs from most. It votes with the arrays that it
    has now: it may not have been in the round, or with arrays that it has
    replaced since. A round may be that of a single worker.
    """
    majority = states.majority(sketches)
    if not majority:
      raise RuntimeError(
        'The state of most workers must be equal, without NaN, got'
        f' {len(sketches)} workers ({", ".join(map(str, sketches))}) of which'
        ' no more than half agree. Save the state: it is as before the step.'
        ' Then start the relay and all workers again, from the checkpoint of'
        ' one that is right.'
      )
    rank = self._link.rank
    own_sketch = states.sketch(self._state_in(arrays))
    with_own = states.majority({**sketches, rank: own_sketch})
    if with_own and rank not in with_own:
      self._link.part()
    return majority[0]
