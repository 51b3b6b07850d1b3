"""A training loop that goes on with who is left, and takes in who comes."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from demo_optax import agreement
from demo_optax.elastic import transfer
from demo_optax.elastic.member import Member, is_lost_peer
from demo_optax.workers import Workers

_log = logging.getLogger(__name__)

# A step that fails so often among the same processes fails for another reason.
_TRIES = 3


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
    coordinator: its address, "HOST:PORT".
    build: called with the `Workers` of every generation; returns the training
      step and the state that it trains: NNX objects, pytrees of arrays, or any
      pytree of both. It builds the same state in every process, from the same
      seed, and for every number of workers.
    make_workers: called without arguments when the processes have met; returns
      the `Workers`. One for each device, in the order of `jax.devices()`, if
      not given. Every worker lies within one process.
    heartbeat: seconds between two signs of life to the coordinator, at most
      half of its deadline.
    timeout: seconds in which the coordinator must be found.

  Attributes:
    step: the number of steps made. Set it, with `state`, where a run goes on
      from a checkpoint.
    train_step: what `build` returned.
    state: what is trained, as it is now.
    workers: of this generation.
    generation: its number, from 1.

  Raises:
    TimeoutError: there is no coordinator.
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
      self, coordinator: str,
      build: Callable[[Workers], tuple[Callable[..., Any], Any]], *,
      make_workers: Callable[[], Workers] | None = None,
      heartbeat: float = 2.0, timeout: float = 300.0,
  ):
    self._member = Member(coordinator, timeout, heartbeat)
    self._build = build
    self._make_workers = make_workers or _every_device
    self._is_inside = False
    self._is_open = False
    self._previous: Any = None  # the arrays before the last step
    self._tries = 0
    self.step = 0
    self.generation = 0
    self.train_step: Callable[..., Any]
    self.state: Any
    self.workers: Workers

  def __enter__(self) -> 'Run':
    self._member.connect()
    self._begin(None, None)
    self._is_open = True
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    self._is_open = False
    if error is None:
      self._member.finish()
    # The devices stay: what was trained is still to be read.

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
    while self._member.ended:
      self._regroup(transfer.arrays_of(self.state))
    before = transfer.arrays_of(self.state)
    self._is_inside = True
    self._member.enter()
    failure: BaseException | None = None
    try:
      with agreement.given_up_when(lambda: self._member.ended):
        yield
      jax.block_until_ready(transfer.arrays_of(self.state))
    except Exception as error:
      if not is_lost_peer(error):
        raise
      failure = error
    finally:
      self._member.leave()
      self._is_inside = False
    if failure is None:
      self._previous = before
      self.step += 1
      self._tries = 0
      return
    self._member.tell('failed')
    self._tries += 1
    if self._tries > _TRIES:
      raise failure
    _log.info('step %d is undone: %s', self.step, _first_line(failure))
    failure = None  # nothing of it may keep the devices
    self._regroup(before)

  # Generations ----------------------------------------------------------------

  def _regroup(self, arrays: Any) -> None:
    """Goes on in the next generation, from `arrays` or those before them."""
    began = time.monotonic()
    num_workers = self.workers.count
    kept = {self.step: transfer.take(arrays, num_workers)}
    about = transfer.about(arrays, kept[self.step])
    if self._previous is not None:
      kept[self.step - 1] = transfer.take(self._previous, num_workers)
    self._previous = None
    del arrays
    self._void()
    self._begin(kept, about)
    _log.info(
        'generation %d: %d workers, step %d, after %.1f s', self.generation,
        self.workers.count, self.step, time.monotonic() - began,
    )

  def _void(self) -> None:
    del self.train_step, self.state, self.workers
    self._member.leave_generation()

  def _begin(
      self, kept: dict[int, transfer.Local] | None, about: Any
  ) -> None:
    """Waits for a generation, and builds what it trains."""
    while True:
      if not self._member.is_connected:
        # It was taken for lost: others have gone on, and it is new to them.
        kept, about = None, None
        self._member.connect()
      generation = self._member.wait_for_generation(
          None if kept is None else max(kept), about
      )
      if generation is None:
        continue
      try:
        self._join(generation, kept)
        return
      except Exception as error:
        if not (self._member.ended or is_lost_peer(error)
                or 'bad_cast' in str(error)):
          raise
        _log.info('a generation that did not come about: %s', _first_line(error))
      self._member.tell('failed')
      self._member.leave()
      for attribute in ('train_step', 'state', 'workers'):
        self.__dict__.pop(attribute, None)
      self._member.leave_generation()

  def _join(
      self, generation: dict[str, Any], kept: dict[int, transfer.Local] | None
  ) -> None:
    local = None if kept is None else kept[generation['step']]
    self._member.join_generation(generation)
    self._member.enter()
    try:
      self.workers = self._make_workers()
      transfer.connect()
      with agreement.given_up_when(lambda: self._member.ended):
        self.train_step, self.state = self._build(self.workers)
      row = transfer.own_rows(self.workers)[0]
      arrays = transfer.put(
          transfer.arrays_of(self.state), local,
          {**generation, 'first_row': row}, row, self.workers.count,
      )
      jax.block_until_ready(arrays)
    finally:
      self._member.leave()
    self.state = transfer.with_arrays(self.state, arrays)
    if generation['survivors']:
      self.step = generation['step']
    self.generation = generation['number']


def _every_device() -> Workers:
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('workers',))
  return Workers.on_mesh(mesh, 'workers')


def _first_line(error: BaseException) -> str:
  return str(error).split('\n', 1)[0][:200]
