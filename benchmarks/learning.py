"""DeMo beside AdamW on the training example: learning-rate grids and seeds.

    python benchmarks/learning.py --out benchmarks/results/learning.jsonl
    python benchmarks/learning.py --out ... --table   # the table, from the file

Every run is the example's own model, text, batches, warm-up and cosine; the
methods get the same grid of peak learning rates. A run that is in the file is
not done again. Prints, per method, the mean and spread of the validation loss
over seeds at each rate, the best rate, and whether it lies inside the grid.
"""

import argparse
import pathlib
import statistics
import sys

import jax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

import cluster
import methods
import text
import train_lm
from gpt import GPT, GPTConfig
from muon import append, read

METHODS = {
    'adamw': ['--optimizer', 'adamw'],
    'demo': ['--optimizer', 'demo'],
    'demo, embeddings by adamw': [
        '--optimizer', 'demo', '--embeddings', 'adamw'
    ],
    'demo in signs, embeddings by rows and adam': [
        '--optimizer', 'demo', '--values', 'sign', '--embeddings', 'own',
        '--own-chunk', '1', '192', '--own-topk', '24', '--own-base', 'adam',
    ],
}
RATES = [1e-3, 2e-3, 4e-3, 8e-3]


def runs_of(method: str, rate: float, seeds: list[int], extra: list[str]):
  """Yields one record per seed; the compiled step is shared."""
  args = methods.parse_args([*METHODS[method], '--lr', str(rate), *extra])
  corpus, config = text.load(args.data), GPTConfig()
  workers = cluster.make_workers(args.workers)
  tx = methods.make_optimizer(args, workers)
  step_fn = methods.make_train_step(train_lm.loss_fn, workers)
  valid = text.windows(corpus.valid, 64, config.context)
  for seed in seeds:
    model = GPT(config, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    cost = methods.count_bytes(args, nnx.state(model, nnx.Param), workers)
    for step in range(args.steps):
      tokens = text.batch(
          corpus.train, seed, step, args.batch, config.context)
      loss = step_fn(model, optimizer, tokens)
    yield {
        'method': method, 'rate': rate, 'seed': seed, 'extra': extra,
        'steps': args.steps, 'train_loss': float(loss),
        'valid_loss': train_lm.evaluate(model, valid),
        'jax': jax.__version__, **cost,
    }


def table(records: list[dict]) -> None:
  best = {}
  print(f'{"method":<28}{"rate":>8}{"seeds":>6}{"mean":>8}{"min":>8}{"max":>8}')
  for method in dict.fromkeys(r['method'] for r in records):
    rates = sorted({r['rate'] for r in records if r['method'] == method})
    means = {}
    for rate in rates:
      losses = [r['valid_loss'] for r in records
                if r['method'] == method and r['rate'] == rate]
      means[rate] = statistics.mean(losses)
      print(f'{method:<28}{rate:>8.4f}{len(losses):>6}{means[rate]:>8.4f}'
            f'{min(losses):>8.4f}{max(losses):>8.4f}')
    rate = min(means, key=means.get)
    cost = next(r for r in records if r['method'] == method)
    best[method] = (means[rate], rate, rate in rates[1:-1], cost)
  print(f'\n{"method":<28}{"best":>8}{"at":>8}{"inside":>8}{"vs adamw":>10}'
        f'{"sent kB":>10}{"received kB":>12}{"less sent":>10}')
  for method, (loss, rate, inside, cost) in best.items():
    base = best.get('adamw', (loss,))[0]
    print(f'{method:<28}{loss:>8.4f}{rate:>8.4f}{inside!s:>8}'
          f'{100 * (loss / base - 1):>9.2f}%{cost["sent"] / 1e3:>10.1f}'
          f'{cost["received"] / 1e3:>12.1f}'
          f'{cost["adamw"] / cost["sent"]:>9.1f}x')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--methods', nargs='+', default=list(METHODS))
  parser.add_argument('--rates', nargs='+', type=float, default=RATES)
  parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2])
  parser.add_argument('--table', action='store_true')
  args, extra = parser.parse_known_args()
  if not args.table:
    for method in args.methods:
      for rate in args.rates:
        done = {r['seed'] for r in read(args.out) if r['method'] == method
                and r['rate'] == rate and r['extra'] == extra}
        todo = [s for s in args.seeds if s not in done]
        for record in runs_of(method, rate, todo, extra) if todo else ():
          append(args.out, record)
          print(record['method'], rate, record['seed'], record['valid_loss'],
                flush=True)
  table([r for r in read(args.out) if r['extra'] == extra])


if __name__ == '__main__':
  main()
