"""What share of a training step the optimizer takes.

    python benchmarks/share.py --out benchmarks/results/share.json
    python benchmarks/share.py --models 1M --batches 8 --rounds 3

Whole steps (gradients of one worker, update, new parameters) of the training
example's GPT and of one with 42 M parameters, at a few batch sizes, with DeMo,
with AdamW and with plain SGD, which does no more than any step must. A share is
what a step takes beyond that of plain SGD, over the step. State is donated; all
rows of a model and batch take turns in one process, the order reversed every
other round; times are medians, shares medians of those within a round.
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import demo_optax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

import methods
import train_lm
from gpt import GPT, GPTConfig

MODELS = {
    '1M': GPTConfig(),
    '42M': GPTConfig(vocab=16384, context=128, width=512, layers=8, heads=8),
}
WORKERS = demo_optax.Workers.simulated(1)


def optimizers(topk: int) -> dict[str, optax.GradientTransformation]:
  def averaged(tx: optax.GradientTransformation) -> Any:
    mean = demo_optax.average(workers=WORKERS)
    return optax.chain(mean, tx)

  compressor = demo_optax.dct_topk(topk=topk)
  return {
      'demo': demo_optax.demo(1e-3, workers=WORKERS, compressor=compressor),
      'adamw': averaged(optax.adamw(1e-3)),
      'sgd': averaged(optax.sgd(1e-3)),
  }


class Step:
  """A training step of its own model, on the same tokens every time."""

  def __init__(self, config: GPTConfig, batch: int, tx: Any) -> None:
    self.model = GPT(config, nnx.Rngs(0))
    self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
    rng = np.random.default_rng(0)
    shape = (batch, config.context + 1)
    self.tokens = jax.numpy.asarray(rng.integers(0, config.vocab, shape))
    self.step = methods.make_train_step(train_lm.loss_fn, WORKERS)

  def run(self) -> float:
    """Seconds of a step."""
    start = time.perf_counter()
    jax.block_until_ready(self.step(self.model, self.optimizer, self.tokens))
    jax.block_until_ready(nnx.state(self.optimizer))
    jax.block_until_ready(nnx.state(self.model))
    return time.perf_counter() - start


def measure(
    config: GPTConfig, batch: int, topk: int, rounds: int
) -> dict[str, Any]:
  """Milliseconds and shares of all optimizers."""
  rows = {
      name: Step(config, batch, tx) for name, tx in optimizers(topk).items()
  }
  seconds: dict[str, list[float]] = {name: [] for name in rows}
  for number in range(rounds + 1):
    for name in list(rows)[:: 1 if number % 2 else -1]:
      seconds[name].append(rows[name].run())
  found: dict[str, Any] = {}
  for name, times in seconds.items():
    shares = [1 - b / a for a, b in zip(times[1:], seconds['sgd'][1:])]
    found[name] = {
        'ms': 1e3 * statistics.median(times[1:]),
        'share': statistics.median(shares),
    }
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--models', nargs='+', default=list(MODELS))
  parser.add_argument('--batches', nargs='+', type=int, default=[1, 8, 32])
  parser.add_argument('--topk', type=int, default=32)
  parser.add_argument('--rounds', type=int, default=9)
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  results = []
  print('| model | sequences | tokens | demo, ms | share | adamw, ms | share |'
        ' sgd, ms |\n|---|---|---|---|---|---|---|---|')
  for name in args.models:
    config = MODELS[name]
    for batch in args.batches:
      found = measure(config, batch, args.topk, args.rounds)
      tokens = batch * config.context
      demo, adamw, sgd = (found[key] for key in ('demo', 'adamw', 'sgd'))
      print(f'| {name} | {batch} | {tokens} | {demo["ms"]:.1f} |'
            f' {demo["share"]:.0%} | {adamw["ms"]:.1f} | {adamw["share"]:.0%} |'
            f' {sgd["ms"]:.1f} |', flush=True)
      results.append({'model': name, 'sequences': batch, 'tokens': tokens,
                      'topk': args.topk, **found})
  if args.out:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        'jax': jax.__version__, 'device': jax.devices()[0].device_kind,
        'machine': platform.machine(), 'rounds': args.rounds,
        'results': results,
    }, indent=2) + '\n')


if __name__ == '__main__':
  main()
