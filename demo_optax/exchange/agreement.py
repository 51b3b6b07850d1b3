"""Compares the exchange that each process is about to run.

Messages have no header: a process that was started with other parameters or
another compressor would read garbage, or wait for bytes that never come.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from demo_optax._version import __version__
from demo_optax.exchange.algorithm import ExchangeConfig
from demo_optax.workers import Workers


def _parameters(config: ExchangeConfig) -> str:
  leaves = config.layout.leaves
  return ', '.join(
    f'{leaf.name} {leaf.dtype}{list(leaf.shape)}' for leaf in leaves
  )


def _compressors(config: ExchangeConfig) -> str:
  text = str([leaf.compressor for leaf in config.layout.leaves])
  # Functions in them are compared by name.
  return re.sub(' at 0x[0-9a-f]+', '', text)


_FIELDS: dict[str, Callable[[ExchangeConfig], str]] = {
  'version': lambda _: __version__,
  'parameters': _parameters,
  'compressors': _compressors,
  'sharding': lambda config: str([x.sharding for x in config.layout.leaves]),
  'average': lambda config: config.average,
  'exchange': str,
  'weighted': lambda config: str(config.packer.weighted),
}


def describe(configs: Sequence[ExchangeConfig]) -> dict[str, str]:
  """Describes the properties of exchanges that all workers must share."""
  different = dict.fromkeys(configs)
  found = {}
  for name, field in _FIELDS.items():
    found[name] = ' | '.join(map(field, different))
  return found


def check(workers: Workers, described: Mapping[str, str]) -> None:
  """Raises unless all processes say the same.

  Every process calls it, with the same keys, and all raise, each with its own
  values. It does nothing where one process holds the whole mesh, or some hold
  none of it.
  """
  if workers.mesh is None:
    return
  processes = {device.process_index for device in workers.mesh.devices.flat}
  if len(processes) == 1 or len(processes) < jax.process_count():
    return
  # Digests have one size, so that processes that differ can gather them.
  digests = b''
  for text in described.values():
    digests += hashlib.sha256(text.encode()).digest()
  own = np.frombuffer(digests, np.uint32).reshape(len(described), -1)
  everyones = multihost_utils.process_allgather(own)  # [processes, fields, 8]
  differs = np.any(everyones != everyones[:1], axis=-1)  # [processes, fields]
  if not np.any(differs):
    return
  others = np.flatnonzero(np.any(differs, axis=1)).tolist()
  names = [*itertools.compress(described, np.any(differs, axis=0))]
  raise ValueError(
    f'All processes must be started with the same {", ".join(names)}, or they'
    f' cannot read each other, got others than process 0 in {others}. Start'
    f' all in the same way. Process {jax.process_index()} has'
    f' {"; ".join(f"{name}: {described[name]}" for name in names)}.'
  )
