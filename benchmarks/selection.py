"""Ways to select, beside the rate at which memory can be copied.

    python benchmarks/selection.py --out FILE

For k = 8, 32, 64 of chunks of 4096: `lax.top_k`; counting (bisection on the
bits of the magnitudes) among the groups with the largest maxima; and a plain
bisection, which finds the k-th magnitude only, not yet the places. Also the
transform in all precisions, and whether 100 merges of 64 workers give the same
bits. On any backend; medians of milliseconds, in turn, the order reversed every
other round, and ratios to `lax.top_k` of the same k.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.compressors import Dct
from demo_optax.numerics import topk as selection


def bisection(magnitudes: jax.Array, k: int) -> jax.Array:
  """The bits of the k-th largest of each row, int32 `[chunks, 1]`."""
  bits = jax.lax.bitcast_convert_type(magnitudes, jnp.int32)

  def step(number: jax.Array, found: jax.Array) -> jax.Array:
    trial = found | (1 << (30 - number))
    count = jnp.sum(bits >= trial, axis=1, keepdims=True, dtype=jnp.int32)
    return jnp.where(count >= k, trial, found)

  return jax.lax.fori_loop(0, 31, step, jnp.zeros_like(bits[:, :1]))


def candidates(x: jax.Array) -> dict:
  basis = jnp.asarray(Dct().matrix(64), x.dtype)
  timed = {}
  for k in (8, 32, 64):
    timed |= {
        f'top_k k={k}': lambda x, k=k: jax.lax.top_k(x, k)[1],
        f'counting k={k}': (
            lambda x, k=k: selection.top_k_by_counting(x, k, 8)
        ),
        f'bisection k={k}': lambda x, k=k: bisection(x, k),
    }
  for precision in ('highest', 'high', 'default'):
    timed[f'product {precision}'] = lambda x, p=precision: jnp.dot(
        x.reshape(-1, 64), basis, precision=p
    )
  return {name: jax.jit(f).lower(x).compile() for name, f in timed.items()}


def merges_alike(times: int) -> bool:
  """Whether merging the same selections gives the same bits every time."""
  rng = np.random.default_rng(0)
  starts = 128 * np.arange(32) + rng.integers(0, 128, (64, 256, 32))
  indices = jnp.asarray(starts, jnp.int32)
  values = jnp.asarray(rng.normal(size=indices.shape), jnp.float32)
  present = jnp.ones((64,), bool)

  @jax.jit
  def merge(indices: jax.Array, values: jax.Array) -> jax.Array:
    values, _ = selection.weigh(indices, values, present, 4096, 'senders')
    return selection.add_up(indices, values, 4096)

  first = np.asarray(merge(indices, values))
  return all(
      np.array_equal(merge(indices, values), first) for _ in range(times - 1)
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--chunks', type=int, default=2048)
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  x = jnp.abs(jax.random.normal(jax.random.key(0), (args.chunks, 4096)))
  timed = candidates(x)
  # In place: memory that is new to a process costs many times its copy.
  copy, buffer = jax.jit(lambda x: x + 1, donate_argnums=0), x.copy()
  seen: dict[str, list[float]] = {name: [] for name in ['copy', *timed]}
  for number in range(args.rounds + 1):
    for name in list(seen)[:: 1 if number % 2 else -1]:
      start = time.perf_counter()
      if name == 'copy':
        buffer = jax.block_until_ready(copy(buffer))
      else:
        jax.block_until_ready(timed[name](x))
      seen[name].append(1e3 * (time.perf_counter() - start))
  medians = {name: statistics.median(t[1:]) for name, t in seen.items()}
  for name, ms in medians.items():
    base = f'top_k {name.split()[-1]}'
    ratio = f'{ms / medians[base]:8.2f}' if base in medians else ''
    print(f'{name:<20}{ms:10.3f} ms{ratio}')
  rate = 2 * x.nbytes / medians['copy'] / 1e6
  alike = merges_alike(100)
  print(f'copy rate {rate:.1f} GB/s; 100 merges alike: {alike}')
  if args.out:
    record = {
        'jax': jax.__version__, 'device': jax.devices()[0].device_kind,
        'chunks': args.chunks, 'rounds': args.rounds, 'median_ms': medians,
        'copy_gb_per_s': rate, 'merges_alike': alike,
    }
    args.out.write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
