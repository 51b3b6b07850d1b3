"""Workers that are programs, and the relay that joins them.

    frames   what workers and relay send each other
    relay    hands all workers the same list of messages, round by round
    rounds   who takes part in a round, and what each worker is answered
    store    lists of messages, and a state, in files of the relay
    link     a worker's connection to the relay
    states   the state that workers share, as bytes, and who agrees on it
    split    cuts a step at its exchanges
    program  the step of a worker: its parts, and messages between them

See `demo_optax.Workers.remote`. `python -m demo_optax.remote` starts a relay.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex

from demo_optax.workers import Workers

__all__ = ['Followed', 'Status', 'follow', 'pause', 'status']


class Followed(NamedTuple):
  """What a program that follows has after a round."""

  round: int  # that the trainers take part in next, with these arguments
  behind: int  # rounds that are known to be over, and are not applied yet
  args: tuple[chex.ArrayTree, ...]  # of the step, by position


class Status(NamedTuple):
  """Where a worker is in the run."""

  round: int  # that it takes part in next
  joined: int  # how often it has taken the state of another worker
  parted: int  # how often because its own was not that of the others


def follow(
  train_step: Callable[..., object],
  *args: chex.ArrayTree,
  **kwargs: chex.ArrayTree,
) -> Iterator[Followed]:
  """Follows the parameters of workers with a relay, without training.

  For evaluation, generation or rollouts in a separate program, which receives
  the workers' messages and computes no gradient. It takes a state from a worker
  once, and then applies list after list, with the bits that the workers have on
  hardware of its kind. Nobody waits for it. If it is so late that the relay has
  dropped lists (`--history`), or is started again, it takes a state again.

  Args:
    train_step: the workers' step, decorated by `data_parallel` with
      `Workers.remote(address, rank=None, count=...)`.
    *args: the arguments of the step. What it changes and its batch may be
      shapes (`jax.eval_shape`).
    **kwargs: those by name.

  Yields:
    A `Followed` for the state, and then for each round: the arguments by
    position as the workers have them, parameters and optimizer state among
    them. Momentum, which is the workers' own, stays as it was given.

  Raises:
    ValueError: `train_step` is that of a worker.
    RuntimeError: the workers run another step than this one.

  Example:
    >>> import demo_optax
    >>> workers = demo_optax.Workers.remote(
    ...     'tcp://127.0.0.1:7077', rank=None, count=4)

    With the `train_step`, model and optimizer of the workers::

      followed = demo_optax.remote.follow(
          train_step, model, optimizer, tokens=tokens)
      for number, behind, (model, optimizer) in followed:
        if not behind:
          print(number, generate(model))
  """
  workers = getattr(train_step, 'workers', None)
  relay = getattr(workers, 'relay', None)
  if relay is None or relay.rank is not None:
    raise ValueError(
      'train_step must be decorated by demo_optax.data_parallel with'
      f' Workers.remote(address, rank=None, count=...), got one with {workers}.'
      ' Make it, and its optimizer, with these workers.'
    )
  followed = train_step.followed  # type: ignore[attr-defined]
  return itertools.starmap(Followed, followed(*args, **kwargs))


def pause(workers: Workers) -> None:
  """Lets the others go on without this worker, until its next step.

  To be called before an evaluation or a save that the other workers do not make
  at the same step: no round waits for this worker, which would cost the others
  one deadline. Its next step applies the rounds that it missed.
  """
  _link_of(workers).pause()


def status(workers: Workers) -> Status:
  """Returns where this worker is in the run, for logs."""
  own = _link_of(workers)
  return Status(own.position.round, own.joined, own.parted)


def _link_of(workers: Workers) -> Any:
  if workers.relay is None:
    raise ValueError(
      f'workers must be Workers.remote, got {workers}. Leave the call out: only'
      ' workers with a relay go on without each other.'
    )
  from demo_optax.remote import link  # needs ZeroMQ

  return link.link_of(workers)
