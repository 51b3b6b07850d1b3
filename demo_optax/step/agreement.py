"""Whether all processes run the same exchange.

Messages have no header: all workers know their layout from the parameters and
the compressor. A process that was started with others would read garbage, or
wait for bytes that never come; so processes compare what they are about to run
before the first message.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
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
_AS_OFTEN = (
    'Every process must call the first step of each data_parallel function, in'
    ' the same order.'
)

_numbers = itertools.count(1)  # of comparisons


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
    ValueError: they differ; all raise it, each with what it has. Or a process
      has not come, or compares other things.
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
  number, prefix = next(_numbers), 'demo_optax/comparison'
  own = {
      name: hashlib.sha256(text.encode()).hexdigest()
      for name, text in described.items()
  }
  client.key_value_set(
      f'{prefix}/{number}/{jax.process_index()}', json.dumps(own)
  )
  everyones = []
  for process in range(jax.process_count()):
    try:
      found = client.blocking_key_value_get(
          f'{prefix}/{number}/{process}', _TIMEOUT_MS
      )
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
      raise ValueError(
          f'Process {process} has not come to comparison number {number} in'
          f' {_TIMEOUT_MS // 1000} s. {_AS_OFTEN}'
      ) from None
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
  raise ValueError(
      f'Processes {others} were started with something else than process 0:'
      f' different are {", ".join(names)}. All need the same, or they cannot'
      f' read each other. Process {jax.process_index()} has'
      f' {"; ".join(f"{name}: {described[name]}" for name in names)}.'
  )


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
