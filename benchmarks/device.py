"""Steps of large models on one GPU or TPU: how fast, and how far from a copy.

    python benchmarks/device.py --out benchmarks/results/device.json
    python benchmarks/device.py --models 1M --rounds 3    # on a CPU

Needs the installed package and, for the larger models, an accelerator that JAX
sees. One worker's whole step from a given gradient, new parameters included, by
`demo`, `demo_muon`, `optax.adamw` and `optax.sgd` with momentum, beside a copy
of the parameters. Rows take turns, the order reversed every other round; times
are medians. `B/param` are the bytes that the device copies in that time. Bytes
of messages are those of `plan`.
"""

import argparse
import json
import pathlib
import platform
import statistics
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
import step

import demo_optax
from demo_optax.__main__ import MODELS

WORKERS = demo_optax.Workers.simulated(1)
SIZES: dict[str, Any] = {**MODELS, '1M': {'embed': [256, 192], **{
    f'layer{i}': [[192, 768], [768, 192], [192, 192]] for i in range(2)
}}}


def optimizers(topk: int) -> dict[str, optax.GradientTransformation]:
  compressor = demo_optax.dct_topk(topk=topk)
  mean = demo_optax.average(workers=WORKERS)
  return {
      'demo': demo_optax.demo(1e-3, workers=WORKERS, compressor=compressor),
      'demo_muon': demo_optax.demo_muon(1e-3, workers=WORKERS),
      'adamw': optax.chain(mean, optax.adamw(1e-3)),
      'sgd': optax.chain(mean, optax.sgd(1e-3, momentum=0.9)),
  }


def parameters_of(model: str) -> dict[str, jax.Array]:
  shapes = jax.tree.leaves(
      SIZES[model],
      is_leaf=lambda x: isinstance(x, list) and isinstance(x[0], int),
  )
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return {
      f'w{i}': jax.random.normal(key, tuple(shape))
      for i, (key, shape) in enumerate(zip(keys, shapes))
  }


def row(
    tx: optax.GradientTransformation, params: Any
) -> types.SimpleNamespace:
  """Returns what runs a step."""
  gradients = jax.tree.map(lambda x: x[None], params)
  state = [jax.tree.map(jnp.copy, params), tx.init(params)]

  def one_step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  compiled = jax.jit(one_step, donate_argnums=(0, 1))

  def run() -> None:
    state[:] = jax.block_until_ready(compiled(*state, gradients))

  return types.SimpleNamespace(run=run)


def measure(model: str, topk: int, rounds: int) -> dict[str, Any]:
  params = parameters_of(model)
  size = sum(x.size for x in params.values())
  rows = {name: row(tx, params) for name, tx in optimizers(topk).items()}
  copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
  rows['copy'] = types.SimpleNamespace(
      run=lambda: jax.block_until_ready(copy(params)))
  seconds = step.measure(rows, rounds)
  medians = {name: statistics.median(x) for name, x in seconds.items()}
  rate = 8 * size / medians['copy']
  sent = {
      'demo': demo_optax.plan(params, demo_optax.dct_topk(topk=topk), WORKERS),
      'demo_muon': demo_optax.plan(
          params, demo_optax.recipes.muon_compressors, WORKERS),
  }
  print(f'{model}: {size:,} parameters; copies at {rate / 1e9:.1f} GB/s')
  for name, seconds in medians.items():
    print(f'  {name:<10}{1e3 * seconds:10.2f} ms{rate * seconds / size:8.1f}'
          ' B/param', flush=True)
  return {
      'parameters': size, 'topk': topk, 'copy_bytes_per_s': rate,
      'ms': {name: 1e3 * x for name, x in medians.items()},
      'sent': {name: plan.sent_bytes for name, plan in sent.items()},
  }


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--models', nargs='+', default=['1B', '300M'],
                      choices=SIZES)
  parser.add_argument('--topk', type=int, default=32)
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  device = jax.devices()[0]
  print(f'{device.device_kind} ({device.platform}), jax {jax.__version__}')
  results = {name: measure(name, args.topk, args.rounds)
             for name in args.models}
  if args.out:
    args.out.write_text(json.dumps({
        'device': device.device_kind, 'jax': jax.__version__,
        'python': platform.python_version(), 'rounds': args.rounds,
        'models': results,
    }, indent=2) + '\n')


if __name__ == '__main__':
  main()
