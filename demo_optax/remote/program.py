"""Runs the step of a worker that is a separate program.

All that workers share follows from the lists of messages that the relay hands
to all of them: a worker that is behind applies lists by a program that only
decodes, without gradients.
"""

import collections
import contextlib
import functools
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import JaxprEqn

from demo_optax.exchange import agreement
from demo_optax.exchange.algorithm import traced_configs
from demo_optax.numerics import packing, prng
from demo_optax.remote import frames
from demo_optax.remote.link import Behind, NotClosedError, Position, link_of
from demo_optax.remote.split import PartedStep, flat
from demo_optax.workers import Workers
from demo_optax.workers.workers import put

_LOG = logging.getLogger('demo_optax.remote')

# Rounds between comparisons of what workers share.
CHECK_EVERY = 64

# Workers on unlike hardware may differ in the last bits. They are made equal
# again where a number differs by more than this share of the largest one.
_TOLERANCE = 1e-3
_ATTEMPTS = 16  # to take part, in a call
_FEW = 16  # numbers of an argument that may differ between steps
_SAMPLE = 64  # numbers of an array that are compared


class RemoteProgram:
  """The program of a call, in parts between which messages are exchanged."""

  def __init__(
    self,
    workers: Workers,
    run: Callable[..., tuple[list[Any], Any]],
    names: Sequence[str],
    shared: Sequence[int],
    copies: Mapping[int, Sequence[int]],
    donated: Sequence[int],
  ):
    """Makes the program of a step.

    Args:
      workers: the workers, with the rank of this one.
      run: `run(*arrays, index=rank)` runs the step of one worker. Returns
        arrays, and what is known of them: in `nexts` for each the number of the
        shared argument whose next value it is, or None.
      names: of the arrays that are passed.
      shared: numbers of those that all workers have.
      copies: for the numbers of some, those of copies that each worker has.
      donated: numbers of arrays that may be overwritten.
    """
    mesh = workers.mesh
    devices = jax.local_devices() if mesh is None else mesh.devices.flat
    if len({d.process_index for d in devices}) < jax.process_count():
      raise ValueError(
        'mesh must have devices of all processes that jax.distributed has'
        f' joined, got {mesh}, and {jax.process_count()} processes.'
        ' They are one worker of Workers.remote.'
      )
    assert workers.relay is not None
    self._workers, rank = workers, workers.relay.rank
    self._rank = frames.FOLLOWER if rank is None else rank
    self._run, self._donated = run, donated
    self._names, self._shared_args, self._copies = names, shared, copies
    self._closed: Any = None
    self._is_source = False  # whether it must send its state
    self._follows: Any = None
    self._link = link_of(workers)

  def __call__(self, *arrays: Any) -> tuple[list[Any], Any]:
    """Runs the step; if it fails, the arrays are as they were before."""
    if self._rank == frames.FOLLOWER:
      raise ValueError(
        f'rank must be the number of a worker that trains, got {self._workers}.'
        ' Give Workers.remote a rank from 0, or call'
        ' demo_optax.remote.follow(train_step, ...).'
      )
    with self._link.interruptible():
      return self._run_step(arrays), self._returned

  def lower(self, *arrays: Any) -> Any:
    """Raises: the step is several programs."""
    raise ValueError(
      f'workers must have one program to lower, got {self._workers}, whose'
      ' step is several. Lower it with Workers.simulated.'
    )

  def follow(self, *arrays: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Yields the arrays of the step after each round; see `remote.follow`.

    They may be shapes: the first values are those of a state. Before them are
    the next round, and how many rounds are over that are not applied yet.
    """
    self.trace(*arrays)
    self._tag_training(arrays)
    self._make_follower()
    link, current = self._link, list(arrays)
    while True:
      try:
        with link.interruptible():
          if link.open < 0:
            self._say_hello(current)
          if link.position.chain:
            self._apply_list(current)
          else:
            self._take(current)
      except Behind:
        continue
      at = link.position.round
      yield at, link.open - at, current

  def _run_step(self, arrays: Sequence[Any]) -> list[Any]:
    self.trace(*arrays)
    link = self._link
    if not self._nexts:
      return self._evaluate(arrays)
    link.shared = link.shared or self._shared
    if self._shared != link.shared:
      raise ValueError(
        f'All training steps of {self._workers} must return the same state,'
        f' got one of {self._shared}, and before it one of {link.shared}.'
        ' Make one step of them.'
      )
    self._tag_training(arrays)
    values = self._train(arrays)
    if self._is_source:
      link.send_state(_joined([values[i] for i in self._nexts.values()]))
    return values

  def _tag_training(self, arrays: Sequence[Any]) -> None:
    """Makes messages those of a training step with these arguments."""
    # Values that a worker which joins does not receive: all must pass the same.
    given = _joined([arrays[n] for n in self._given])
    self._tag = frames.tag(self._messages, given, True)

  def _train(self, arrays: Sequence[Any]) -> list[Any]:
    """Runs a training step in the round that is open."""
    link = self._link
    at = link.position  # of the caller's arrays
    try:
      for _ in range(_ATTEMPTS):
        with contextlib.suppress(Behind):
          if link.open < 0:
            self._say_hello(arrays)
            at = link.position
          self._is_source = False
          current = self._current(arrays)
          return self._execute(self._plan, current, self._exchange)
      raise RuntimeError(
        f'{self._workers} has taken the state of another worker'
        f' {_ATTEMPTS} times and is still behind. Call the same training'
        ' step in all workers, or give the relay a longer --deadline.'
      )
    except BaseException:
      link.position = at
      raise

  def _say_hello(self, arrays: Sequence[Any]) -> None:
    """Says what this worker exchanges, and which state it has now."""
    others = [arrays[n] for n in self._others]
    described = self._text | {'other arguments': _digest(others).hex()}
    text = json.dumps(described).encode()
    if self._rank == frames.FOLLOWER:  # it has no state yet
      return self._link.hello(text, b'')
    state = [arrays[n] for n in self._nexts]
    self._link.hello(text, _digest(state), _steps_in(state))

  def _evaluate(self, arrays: Sequence[Any]) -> list[Any]:
    """Runs a step that changes no state, with all workers or with this one.

    It is alone before its first training step, and if it is so late that the
    others are training again. The next training step brings it up to date.
    """
    before = self._link.position
    if self._link.open >= 0 and before.chain:
      with contextlib.suppress(Behind):
        return self._execute(self._plan, arrays, self._exchange)
      self._link.position = before
    _LOG.warning('%s evaluates alone', self._workers)
    ranks = range(self._workers.count)
    return self._execute(
      self._plan,
      arrays,
      lambda _, body: [body if rank == self._rank else b'' for rank in ranks],
    )

  def trace(self, *arrays: Any) -> None:
    """Traces the step, cuts and compiles it, once."""
    if self._closed is not None:
      return
    with traced_configs() as configs:
      make = jax.make_jaxpr(self._run, return_shape=True)
      closed, (_, self._returned) = make(*arrays, index=np.int32(self._rank))
    closed = flat(closed)
    self._plan = PartedStep(closed, donated=self._donated)
    if self._workers.mesh is None:  # else shardings are known when it runs
      self._plan.compile()
    # Numbers of the arrays that all workers share, and that a step changes,
    # with the places of their next values in what it returns.
    nexts = self._returned.nexts
    self._nexts = {n: nexts.index(n) for n in sorted({*nexts} - {None})}
    if configs and not self._nexts:
      raise ValueError(
        f'A training step of {self._workers} must return parameters and'
        ' optimizer state, from which other workers start. Return both, as'
        ' they were passed.'
      )
    others = [n for n in self._shared_args if n not in self._nexts]
    self._given = [n for n in others if closed.in_avals[n].size <= _FEW]
    self._others = [n for n in others if n not in self._given]
    self._messages = ' '.join(self._plan.meetings)
    self._tag = frames.tag(self._messages, b'', False)
    self._shared: str = ', '.join(
      f'{self._names[n]} {closed.in_avals[n]}' for n in self._nexts
    )
    self._text: dict[str, str] = agreement.describe(configs) | {
      'workers': str(self._workers.count),
      'shared arrays': self._shared,
      'messages': self._messages,
    }
    self._closed = closed

  def _current(self, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays as they are in the round that is open."""
    link, arrays = self._link, list(arrays)
    before = link.position
    if before.chain and before.round >= link.open:
      return arrays
    self._make_follower()  # now, not after the state was taken
    if not before.chain:
      self._take(arrays)
    while link.position.round < link.open:
      at = link.position
      try:
        self._apply_list(arrays)
      except NotClosedError:
        link.position = at
    for number, copies in self._copies.items():
      for own in copies:
        arrays[own] = arrays[number].astype(arrays[own].dtype)[None]
    return arrays

  def _make_follower(self) -> None:
    """Compiles the program that applies lists, without gradients, once."""
    if self._follows is None:
      self._follows = PartedStep(
        self._closed, [*self._nexts.values()], follows=True
      )
      if self._workers.mesh is None:
        self._follows.compile()

  def _apply_list(self, arrays: list[Any]) -> None:
    """Waits for the list of the next round, and applies it."""
    link, received = self._link, [self._link.exchange(b'')]
    if self._is_other(received[0]):
      return

    def next_list(*_: Any) -> list[bytes]:
      return received.pop() if received else link.exchange(b'')

    while received:  # not every step of local updates exchanges
      values = self._execute(self._follows, arrays, next_list)
      for n, x in zip(self._nexts, values):
        arrays[n] = x

  def _is_other(self, messages: Sequence[bytes]) -> bool:
    """Returns whether a list is of another step, which changes no state.

    The others have called it, to evaluate, while this worker was late. Raises
    `Behind` if the other step changes the state.
    """
    tag = next(message[: frames.CHAIN] for message in messages if message)
    if tag == self._tag:
      return False
    if tag[:8] == self._tag[:8]:
      names = ', '.join(self._names[n] for n in self._given)
      raise ValueError(
        f'{names} must be equal on all workers in each round, got another'
        f' value than the others in {self._workers}. A worker that is late'
        ' needs the values of the rounds that it missed: make a schedule of'
        ' the optimizer of what changes.'
      )
    if frames.changes_state(tag):  # only a later state can be followed
      self._link.position = Position(self._link.position.round)
      raise Behind
    return True

  def _take(self, arrays: list[Any]) -> None:
    """Puts another worker's shared state in place of this worker's."""
    state, avals = self._link.state(), self._closed.in_avals
    types = [jax.eval_shape(_data, avals[n]) for n in self._nexts]
    for n, x in zip(self._nexts, _read(state, types)):
      if prng.is_key_array(arrays[n]):
        x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(arrays[n]))
      sharding = getattr(arrays[n], 'sharding', None)
      arrays[n] = jnp.asarray(x) if sharding is None else put(x, sharding)

  def _execute(
    self,
    plan: PartedStep,
    arrays: Sequence[Any],
    exchange: Callable[[Sequence[Any], bytes], list[bytes]],
  ) -> list[Any]:
    """Runs a plan, with messages as bytes: b'' if it only receives."""

    def meet(eqns: list[JaxprEqn], sent: list[Any] | None) -> list[Any]:
      types: list[Any] = [eqn.invars[0].aval for eqn in eqns]
      body = b'' if sent is None else self._tag + _joined(sent)
      is_wanted = self._link.position.wants_state
      messages = exchange(arrays, body)
      size = sum(t.size * t.dtype.itemsize for t in types) + frames.CHAIN
      sketches = {
        rank: message[size:]
        for rank, message in enumerate(messages)
        if len(message) > size
      }
      if sketches:
        first = self._compare(arrays, sketches, sent is None)
        self._is_source |= is_wanted and first == self._rank
      present = np.array(list(map(bool, messages)))
      found = [np.zeros((len(messages), *t.shape), t.dtype) for t in types]
      for i in np.flatnonzero(present):
        for rows, x in zip(found, _read(messages[i], types, frames.CHAIN)):
          rows[i] = x
      is_included = self._rank in np.flatnonzero(present)
      return [(rows, present, np.bool(is_included)) for rows in found]

    return plan.run([*arrays, np.int32(self._rank)], meet)

  def _exchange(self, arrays: Sequence[Any], body: bytes) -> list[bytes]:
    """Sends a message of the step; returns all of its round."""
    while True:
      sketch, at = b'', self._link.position
      is_due = at.round // CHECK_EVERY > at.trained // CHECK_EVERY
      if self._nexts and (is_due or at.wants_state):
        sketch = _sketch([arrays[n] for n in self._nexts])
      messages = self._link.exchange(body + sketch)
      if not self._is_other(messages):
        return messages

  def _compare(
    self, arrays: Sequence[Any], sketches: dict[int, bytes], follows: bool
  ) -> int:
    """Compares the shared arrays of all in a round; returns the first of most.

    This worker parts if it differs from most. One that was not in the round
    adds its vote: a round may be that of a single worker. One that follows may
    have been in it with arrays that it has replaced.
    """
    majority = _majority(sketches)
    if not majority:
      raise RuntimeError(
        'The state of most workers must be equal, without NaN, got'
        f' {len(sketches)} workers ({", ".join(map(str, sketches))}) of which'
        ' no more than half agree. Save the state: it is as before the step.'
        ' Then start the relay and all workers again, from the checkpoint of'
        ' one that is right.'
      )
    if follows or self._rank not in sketches:
      own = _sketch([arrays[n] for n in self._nexts])
      sketches = sketches | {self._rank: own}
    if self._rank not in (_majority(sketches) or [self._rank]):
      self._link.part()
    return majority[0]


# Bytes of arrays --------------------------------------------------------------


def _data(x: Any) -> Any:
  return jax.random.key_data(x) if prng.is_key_array(x) else x


def _whole(x: Any) -> Any:
  """Returns an array that is on the devices of all processes as a whole."""
  x = _data(x)
  if isinstance(x, jax.Array) and not (
    x.is_fully_addressable or x.is_fully_replicated
  ):
    return multihost_utils.process_allgather(x, tiled=True)
  return x


def _joined(arrays: Sequence[Any]) -> bytes:
  on_host = jax.device_get(list(map(_whole, arrays)))
  return b''.join(np.asarray(x).tobytes() for x in on_host)


def _read(data: bytes, types: Sequence[Any], start: int = 0) -> Iterator[Any]:
  """Reads arrays of shapes and dtypes, one after the other."""
  for t in types:
    yield np.frombuffer(data, t.dtype, t.size, start).reshape(t.shape)
    start += t.size * t.dtype.itemsize


# Comparisons ------------------------------------------------------------------


def _digest(arrays: Sequence[Any]) -> bytes:
  """Returns a digest of arrays, the same however they are sharded."""
  return _sketch(arrays)[frames.CHAIN : 2 * frames.CHAIN]


def _steps_in(arrays: Sequence[Any]) -> int:
  """Returns the largest count of steps in a state."""
  found = [int(_whole(x)) for x in arrays if x.dtype == np.int32 and not x.ndim]
  return max(found, default=0)


def _sketch(arrays: Sequence[Any]) -> bytes:
  """Returns the hardware, a digest of arrays, and numbers from all of them."""
  digests, samples = (_joined([x]) for x in _sketched(list(arrays)))
  return _hardware() + frames.digest(digests) + samples


@functools.cache
def _hardware() -> bytes:
  """Returns a digest of what the last bits of results depend on."""
  device = jax.devices()[0]
  flags = os.environ.get('XLA_FLAGS', '')
  names = {device.device_kind, device.client.platform_version, flags}
  # JAX compiles for the instructions of each processor. Processes of one worker
  # must say the same.
  if device.platform == 'cpu' and jax.process_count() == 1:
    names.add(f'{os.cpu_count()} cores')
    with contextlib.suppress(OSError):
      lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
      names.update(x for x in lines if x.startswith(('model name', 'flags')))
  return frames.digest(*map(str.encode, sorted(names)))


@jax.jit
def _sketched(arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
  digests, samples = [], []
  for x in map(_data, arrays):
    start = np.zeros(x.ndim, np.uint32)
    digests.append(packing.digest_block(x, start, x.shape))
    is_rounded = jnp.issubdtype(x.dtype, jnp.inexact)
    if jnp.iscomplexobj(x):
      x = jnp.stack([x.real, x.imag])
    x = jnp.ravel(x).astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), initial=0)  # NaN if one is
    is_compared = jnp.isfinite(x) & is_rounded  # of integers all bits count
    scale = jnp.max(jnp.abs(x), initial=0, where=is_compared)
    some = x[:: max(1, x.size // _SAMPLE)][:_SAMPLE]
    some = jnp.pad(some, (0, _SAMPLE - some.size))
    samples.append(jnp.concatenate([jnp.stack([scale, largest]), some]))
  return jnp.array(digests), jnp.array(samples)


def _majority(sketches: dict[int, bytes]) -> list[int]:
  """Returns the ranks whose arrays agree, if they are more than half.

  On hardware of one kind arrays agree to the bit, else within a tolerance.
  """
  equal = collections.defaultdict(list)  # ranks, by what they sent
  for rank, sketch in sketches.items():
    equal[sketch].append(rank)
  by_size = sorted(equal, key=lambda sketch: -len(equal[sketch]))
  largest: list[int] = []
  for center in equal:
    # The center, and of other hardware the largest group that is close to it.
    of_hardware = {}
    for sketch in (center, *by_size):
      hardware = sketch[: frames.CHAIN]
      if hardware not in of_hardware and _are_close(center, sketch):
        of_hardware[hardware] = equal[sketch]
    ranks = sorted(itertools.chain(*of_hardware.values()))
    largest = max(largest, ranks, key=len)
  return largest if 2 * len(largest) > len(sketches) else []


def _are_close(one: bytes, other: bytes) -> bool:
  """Returns whether samples are equal, but for rounding. NaN never is."""
  a, b = (
    np.frombuffer(x[2 * frames.CHAIN :], np.float32).reshape(-1, 2 + _SAMPLE)
    for x in (one, other)
  )
  scale = np.maximum(a[:, :1], b[:, :1])
  with np.errstate(invalid='ignore', over='ignore'):  # of infinite numbers
    is_close = np.abs(a - b) <= _TOLERANCE * scale
  return bool(np.all((a == b) | is_close))
