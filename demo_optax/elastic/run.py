"""A training loop that goes on with who is left, and takes in who comes."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from demo_optax import accumulation
from demo_optax.elastic import transfer
from demo_optax.elastic.member import Member, is_lost_peer
from demo_optax.step import agreement
from demo_optax.workers import Workers

_log = logging.getLogger(__name__)

# A step that fails so often among the same processes fails for another reason.
_TRIES = 3


class _Kept(NamedTuple):
  """What a process goes on from: its state after a step, and the one before.

  `about` is what newcomers must know of it.
  """

  states: dict[int, transfer.Local]
  about: dict[str, Any]


class Run:
  """Trains with processes that may be lost, return, or be added.

  Where a process is lost, the others undo the step that it was in, form a mesh
  of what is left, and go on in the same processes, with the parameters and the
  momentum that each of them has: nothing is read from a disk, and nothing but
  the lost process's own momentum is missing, as that of a worker that was
  excluded. A process that is started later becomes one of them: it receives
  the parameters and the optimizer's state from another, and begins with no
  momentum. Who takes part is decided by a `Coordinator` in a process of its
  own.

  Whenever the processes change, JAX starts anew in them: all arrays, compiled
  functions and meshes of before are void. So everything that holds any is made
  in `build`, and reached through `train_step`, `state` and `workers`.

  Args:
    coordinator: its address, "HOST:PORT". None: without one, on the devices
      that JAX has, so that a script may train either way; a step that fails is
      an error then.
    build: called with the `Workers` of every generation; returns the training
      step and the state that it trains: NNX objects, pytrees of arrays, or any
      pytree of both. It builds the same state in every process, from the same
      seed, and for every number of workers.
    begin: called with the run where no process has anything to go on from: in
      the beginning, and where all were lost at once. It may restore a
      checkpoint, by setting `state` and `step`.
    make_workers: called without arguments when the processes have met; returns
      the `Workers`. One for each device, in the order of `jax.devices()`, if
      not given. Every worker lies within one process.
    timeout: seconds in which the coordinator must be found.
    patience: seconds in which there must be enough processes, and all must have
      ended their steps.

  Attributes:
    step: the number of steps made.
    train_step: what `build` returned.
    state: what is trained, as it is now.
    workers: of this generation.
    generation: its number, from 1.

  Raises:
    TimeoutError: there is no coordinator, or there are too few processes.
    RuntimeError: JAX has devices already.
    ValueError: a worker lies in several processes; `build` builds another state
      than before.

  Example:
    The loop of a process; `python -m demo_optax.elastic --workers 4` is the
    coordinator. Reading the loss inside of `one_step` makes the step wait, and
    what comes after it in the block is left out where the step is undone::

      def build(workers):
        model = Model(rngs=nnx.Rngs(0))
        tx = demo_optax.demo(3e-3, workers=workers)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return demo_optax.data_parallel(workers)(train_step), (model, optimizer)

      with demo_optax.elastic.Run('coordinator:7077', build) as run:
        while run.step < 10_000:
          with run.one_step():
            batch = rows_of_step(run.step, run.workers)
            loss = run.train_step(*run.state, batch)
  """

  def __init__(
      self, coordinator: str | None,
      build: Callable[[Workers], tuple[Callable[..., Any], Any]], *,
      begin: Callable[['Run'], None] = lambda run: None,
      make_workers: Callable[[], Workers] | None = None,
      timeout: float = 300.0, patience: float = 1800.0,
  ):
    self._member = (
        None if coordinator is None
        else Member(coordinator, timeout, patience)
    )
    self._build, self._first = build, begin
    self._make_workers = make_workers or _every_device
    self._is_inside = False
    self._is_open = False
    self._previous: Any = None  # the arrays before the last step
    # What this generation began with, until it has made a step: where it fails
    # before, the next one begins with the same.
    self._began_with: _Kept | None = None
    self._tries = 0  # of a step, among the same processes
    self._processes = 0  # of the last generation that was offered
    self._survivors = 0  # in it: their ranks are the first
    self._rank = 0
    self.step = 0
    self.generation = 0
    self.train_step: Callable[..., Any]
    self.state: Any
    self.workers: Workers

  def __enter__(self) -> 'Run':
    if self._member is None:
      self.workers, self.generation = self._make_workers(), 1
      self.train_step, self.state = self._build(self.workers)
      self._first(self)
    else:
      try:
        self._begin(self._member)
      except BaseException:
        self._member.hang_up()
        raise
    self._is_open = True
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    self._is_open = False
    if self._member is None:
      return
    # The devices stay: what was trained is still to be read.
    if error is None:
      self._member.finish()
    else:
      self._member.hang_up()

  @contextlib.contextmanager
  def one_step(self) -> Iterator[None]:
    """Makes one step, which counts when all of it has been computed here.

    Where a process was lost the step is undone: the rest of the block is left
    out, `state` is what it was, and `step` does not move. The same happens
    before the block begins where a process comes.

    Example: see `Run`.
    """
    if not self._is_open:
      raise RuntimeError('one_step is used inside of `with elastic.Run(...)`.')
    if self._is_inside:
      raise RuntimeError('one_step cannot be used inside of itself.')
    self._is_inside = True
    try:
      if self._member is None:
        yield
        self.step += 1
      else:
        yield from self._attempt(self._member)
    finally:
      self._is_inside = False

  def _attempt(self, member: Member) -> Iterator[None]:
    member.enter()
    while member.ended:
      member.leave()
      self._regroup(member, transfer.arrays_of(self.state))
      member.enter()
    before = transfer.arrays_of(self.state)
    failure: BaseException | None = None
    try:
      with agreement.given_up_when(lambda: member.ended):
        yield
      jax.block_until_ready(transfer.arrays_of(self.state))
    except Exception as error:
      if not self._is_of_others(member, error):
        raise
      failure = error
    finally:
      member.leave()
    if failure is None:
      transfer.check_kept(before)
      if self._previous is None:
        member.tell('steady')
        self._began_with = None
      self._previous = before
      self.step += 1
      self._tries = 0
      return
    member.tell('failed')
    self._tries += 1
    if self._tries > _TRIES:
      raise failure
    _log.warning('step %d is undone: %s', self.step, _first_line(failure))
    failure = None  # its frames hold arrays
    self._regroup(member, before)

  def _is_of_others(self, member: Member, error: Exception) -> bool:
    """Returns whether an error is not this process's own.

    Once the generation has ended, any error may follow from that; one that is
    this process's own will occur again.
    """
    if isinstance(error, agreement.DisagreementError):
      # Process 0 has been there for longest: a newcomer that differs from it
      # raises, and the others continue.
      return self._survivors > 0 and self._rank not in error.processes
    return bool(member.ended) or is_lost_peer(error)

  # Generations ----------------------------------------------------------------

  def _regroup(self, member: Member, arrays: Any) -> None:
    """Goes on in the next generation, from `arrays` or those before them."""
    began = time.monotonic()
    kept = self._began_with
    if kept is None:
      local = transfer.take(arrays, self.generation)
      kept = _Kept(
          {self.step: local},
          transfer.about(arrays, local, self.workers.count),
      )
      if self._previous is not None:
        kept.states[self.step - 1] = transfer.take(
            self._previous, self.generation
        )
    del arrays
    self._leave(member)
    self._begin(member, kept)
    _log.info(
        'generation %d: %d workers, step %d, after %.1f s', self.generation,
        self.workers.count, self.step, time.monotonic() - began,
    )

  def _leave(self, member: Member) -> None:
    self._previous = None
    for name in ('train_step', 'state', 'workers'):
      self.__dict__.pop(name, None)
    member.leave_generation()

  def _begin(self, member: Member, kept: _Kept | None = None) -> None:
    """Waits for a generation, and builds what it trains."""
    failures = 0
    while True:
      if not member.is_connected:
        member.connect()  # it was taken for lost
      generation = member.wait_for_generation(
          None if kept is None else max(kept.states),
          None if kept is None else kept.about, self._rank, self.generation,
      )
      if generation is None:
        continue
      self._rank, step = generation['rank'], generation['step']
      if generation['is_new']:
        kept = None
      elif kept is not None and step not in kept.states:
        raise RuntimeError(
            f'This process is at step {max(kept.states)}, and others at {step}:'
            ' they drift apart where nothing of a step is read and nothing'
            ' crosses in it. Read the loss, or something else that all'
            ' contribute to, in every step.'
        )
      elif kept is not None:
        # What was computed with others is not to come back later.
        kept = kept._replace(states={step: kept.states[step]})
      self._survivors = generation['survivors']
      before, self._processes = self._processes, generation['processes']
      if generation['survivors'] == before == self._processes:
        failures += 1
      else:
        failures = self._tries = 0  # the processes are others
      member.enter()
      try:
        with agreement.given_up_when(lambda: member.ended):
          self._join(member, generation, kept)
        self._began_with = kept
        return
      except Exception as error:
        if failures >= _TRIES or not self._is_of_others(member, error):
          raise
        _log.warning(
            'generation %d did not come about: %s', generation['number'],
            _first_line(error),
        )
      finally:
        member.leave()
      member.tell('failed')
      self._leave(member)

  def _join(
      self, member: Member, generation: dict[str, Any], kept: _Kept | None
  ) -> None:
    member.join_generation(generation)
    self.workers = self._make_workers()
    rows = transfer.own_rows(self.workers)
    transfer.connect()
    self.train_step, state = self._build(self.workers)
    # As `data_parallel` would do before the first step.
    self.state, _ = accumulation.stack(
        state, transfer.objects_in(state), self.workers
    )
    self.generation = generation['number']
    if not generation['survivors']:
      self.step = 0
      self._first(self)
      return
    self.step = generation['step']
    local = None if kept is None else kept.states[self.step]
    if local is None:
      transfer.check_structure(self.state, generation['about'])
    arrays = transfer.put(
        transfer.arrays_of(self.state), local, generation, rows
    )
    self.state = transfer.with_arrays(
        self.state, jax.block_until_ready(arrays)
    )


def _every_device() -> Workers:
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('workers',))
  return Workers.on_mesh(mesh, 'workers')


def _first_line(error: BaseException) -> str:
  return str(error).split('\n', 1)[0][:200]
