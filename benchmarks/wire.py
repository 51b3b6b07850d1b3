"""What packing and unpacking cost, beside the selection.

    python benchmarks/wire.py --out benchmarks/results/wire.json

4096 chunks of 4096 coefficients. `pack` is a worker's selection to bytes, with
the values that it takes out of its momentum; `unpack N` is N workers' bytes to
their selections, checks included. All are timed in turn, in one process, the
order reversed every other round: medians in milliseconds, and their ratio to
the selection of as many coefficients. Only the ratios carry over between
machines.
"""

import argparse
import json
import pathlib
import platform
import statistics
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import step

from demo_optax.exchange import message as wire
from demo_optax.numerics import topk as selection

CHUNKS, N = 4096, 4096
TOPK = [8, 32]
VALUES = {'float32': [1, 64], 'bfloat16': [1], 'int8': [1], 'int4': [1],
          'sign': [1, 64]}  # and how many workers' payloads are read


def candidates() -> dict[str, Callable[[], object]]:
  """What is timed, compiled and with its arguments."""
  rng = np.random.default_rng(0)
  c = jnp.asarray(rng.normal(size=(CHUNKS, N)), jnp.float32)
  timed = {}
  for k in TOPK:
    indices = selection.top_k(c, k)
    values = selection.take(c, indices)
    timed[f'k={k} select'] = compiled(lambda c, k=k: selection.top_k(c, k), c)
    for name, readings in VALUES.items():
      f = wire.ChunkFormat(N, k, 'float32', name)
      data = f.encode(indices, values)[0][None]
      timed[f'k={k} {name} pack'] = compiled(f.encode, indices, values)
      for workers in readings:
        timed[f'k={k} {name} unpack {workers}'] = compiled(
            lambda data, f=f: f.decode(data, CHUNKS),
            jnp.repeat(data, workers, axis=0))
  return timed


def compiled(function: Callable, *args: jax.Array) -> Callable[[], object]:
  run = jax.jit(function).lower(*args).compile()
  return lambda: jax.block_until_ready(run(*args))


def measure(rounds: int) -> dict[str, float]:
  """Median milliseconds of every candidate."""
  rows = {
      # Caches as this one leaves them, not its neighbour.
      name: types.SimpleNamespace(run=run, reset=run)
      for name, run in candidates().items()
  }
  seconds = step.measure(rows, rounds)
  return {name: 1e3 * statistics.median(x) for name, x in seconds.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=20)
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  medians = measure(args.rounds)
  ratios = {
      name: ms / medians[f'{name.split()[0]} select']
      for name, ms in medians.items()
  }
  print(f'{"":<24}{"ms":>9}{"of selection":>15}')
  for name, ms in medians.items():
    print(f'{name:<24}{ms:9.2f}{100 * ratios[name]:13.1f} %')
  if args.out:
    record = {
        'jax': jax.__version__, 'backend': jax.default_backend(),
        'machine': platform.machine(), 'rounds': args.rounds,
        'median_ms': medians, 'ratio_to_selection': ratios,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
