"""Whether all processes run the same exchange.

Messages have no header: all workers know their layout from the parameters and
the compressor. A process that was started with others would read garbage, or
wait for bytes that never come; so processes compare what they are about to run
before the first message.
"""

import contextlib
import contextvars
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

# Its client is what Orbax and JAX's own utilities use; there is no public one.
from jax._src import distributed

from demo_optax._version import __version__
from demo_optax.workers import Workers

_NAMES = (
    'version', 'parameters', 'compressor', 'compressors of the leaves',
    'sharding', 'average', 'exchange',
)
_TIMEOUT_MS = 300_000
_SLICE_MS = 1_000  # after which a wait asks whether it is to be given up
_AS_OFTEN = (
    'Every process must call the first step of each data_parallel function, in'
    ' the same order.'
)

# Comparisons are numbered, from 1 in every runtime: processes that come to an
# elastic run have not made those of before.
_numbers: tuple[Any, Iterator[int]] = (None, itertools.count(1))
_is_over: contextvars.ContextVar[Callable[[], str]] = contextvars.ContextVar(
    'demo_optax_is_over', default=lambda: ''
)


class DisagreementError(ValueError):
  """Processes were started with different things.

  Attributes:
    processes: those that have something else than process 0.
  """

  def __init__(self, message: str, processes: Sequence[int]):
    super().__init__(message)
    self.processes = tuple(processes)


@contextlib.contextmanager
def given_up_when(is_over: Callable[[], str]) -> Iterator[None]:
  """Gives up waiting for another process as soon as `is_over` says why."""
  token = _is_over.set(is_over)
  try:
    yield
  finally:
    _is_over.reset(token)


def check_exchanges(workers: Workers, configs: Sequence[Any]) -> None:
  """Raises unless all processes have the same exchanges; see `check`.

  Args:
    workers: the workers of the exchange.
    configs: an `ExchangeConfig` for each exchange.
  """
  described = [_describe(config) for config in dict.fromkeys(configs)]
  texts = [' | '.join(part) for part in zip(*described)]
  check(workers, dict(zip(_NAMES, texts or [''] * len(_NAMES))))


def check(workers: Workers, described: Mapping[str, str]) -> None:
  """Raises unless all processes say the same.

  Every process calls it, with the same keys. It does nothing where one process
  holds the whole mesh, or some hold none of it.

  Args:
    workers: the workers of the exchange.
    described: what must be equal, by name.

  Raises:
    DisagreementError: they differ. All raise it, each with what it has.
    ValueError: a process has not come, or compares other things.
  """
  if workers.mesh is None:
    return
  processes = {device.process_index for device in workers.mesh.devices.flat}
  if len(processes) == 1 or len(processes) < jax.process_count():
    return
  # Not by a collective: nothing is yet known to be the same, and what differs
  # would be garbage or a deadlock there.
  client = distributed.global_state.client
  if client is None:
    return
  global _numbers
  if _numbers[0] is not client:
    _numbers = client, itertools.count(1)
  number, prefix = next(_numbers[1]), 'demo_optax/comparison'
  own = {
      name: hashlib.sha256(text.encode()).hexdigest()
      for name, text in described.items()
  }
  client.key_value_set(
      f'{prefix}/{number}/{jax.process_index()}', json.dumps(own)
  )
  everyones = []
  for process in range(jax.process_count()):
    found = _value_of(client, f'{prefix}/{number}/{process}')
    if found is None:
      raise ValueError(
          f'Process {process} has not come to comparison number {number} in'
          f' {_TIMEOUT_MS // 1000} s. {_AS_OFTEN}'
      )
    everyones.append(json.loads(found))
  if any(found.keys() != own.keys() for found in everyones):
    raise ValueError(
        f'Processes compare different things with each other. {_AS_OFTEN}'
        f' Process {jax.process_index()} is at its comparison number {number}.'
    )
  first = everyones[0]
  others = [p for p, found in enumerate(everyones) if found != first]
  if not others:
    return
  names = [
      name for name in described
      if any(found[name] != first[name] for found in everyones)
  ]
  raise DisagreementError(
      f'Processes {others} were started with something else than process 0:'
      f' different are {", ".join(names)}. All need the same, or they cannot'
      f' read each other. Process {jax.process_index()} has'
      f' {"; ".join(f"{name}: {described[name]}" for name in names)}.',
      others,
  )


def _value_of(client: Any, key: str) -> str | None:
  """Waits for what another process sets; None if it does not.

  Raises:
    jax.errors.JaxRuntimeError: the wait is to be given up, or the service of
      `jax.distributed` is gone.
  """
  for _ in range(0, _TIMEOUT_MS, _SLICE_MS):
    try:
      return client.blocking_key_value_get(key, _SLICE_MS)
    except jax.errors.JaxRuntimeError as error:
      if why := _is_over.get()():
        raise jax.errors.JaxRuntimeError(f'CANCELLED: {why}') from None
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
  return None


def _describe(config: Any) -> tuple[str, ...]:
  """Returns what must be equal of an exchange, in the order of `_NAMES`."""
  leaves = config.layout.leaves
  compressors = list(dict.fromkeys(leaf.compressor for leaf in leaves))
  return (
      __version__,
      ', '.join(f'{x.name} {x.dtype}{list(x.shape)}' for x in leaves),
      # Functions in them are told by their names.
      re.sub(' at 0x[0-9a-f]+', '', ', '.join(map(str, compressors))),
      str([compressors.index(leaf.compressor) for leaf in leaves]),
      str([leaf.sharding.spec for leaf in leaves]),
      config.average,
      str(config),
  )
