"""What the bits of a value buy: every value code at equal k and at equal bytes.

    python benchmarks/values.py --out benchmarks/results/values.jsonl
    python benchmarks/values.py --out ... --table   # the tables, from the file

The training example's own model, text, batches and schedule. Two budgets: the
bytes of float32 values with `topk=32` and with `topk=8`. Every code gets the
largest `topk` whose payload is within the budget, and all get `topk=32`, too.
A run that is in the file is not done again.
"""

import argparse
import json
import pathlib
import statistics
import sys

from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

import learning
from gpt import GPT, GPTConfig

import demo_optax
from demo_optax.codes.values import VALUES

BUDGETS = [32, 8]  # topk of float32 values


def settings() -> dict[tuple[str, int], list[str]]:
  """`(values, topk)`, and the comparisons they belong to."""
  model = nnx.eval_shape(lambda: GPT(GPTConfig(), nnx.Rngs(0)))
  params = nnx.state(model, nnx.Param)

  def sent(values: str, k: int) -> int:
    compressor = demo_optax.dct_topk(64, k, values=values)
    return demo_optax.plan(params, compressor, workers=4).sent_bytes

  found: dict[tuple[str, int], list[str]] = {}
  for values in VALUES:
    found[values, 32] = ['topk 32']
  for budget in BUDGETS:
    limit = sent('float32', budget)
    for values in VALUES:
      k = 1
      while sent(values, k + 1) <= limit:
        k += 1
      found.setdefault((values, k), []).append(f'{limit / 1e3:.1f} kB')
  return found


def tables(records: list[dict]) -> None:
  found = settings()
  for group in dict.fromkeys(g for groups in found.values() for g in groups):
    print(f'\n{group}\n{"values":<10}{"topk":>5}{"sent kB":>9}'
          f'{"rate":>9}{"loss":>8}  seeds')
    for (values, k), groups in found.items():
      if group not in groups:
        continue
      runs = [r for r in records if (r['values'], r['topk']) == (values, k)]
      for rate in sorted({r['rate'] for r in runs}):
        own = [r for r in runs if r['rate'] == rate]
        losses = [r['valid_loss'] for r in own]
        print(f'{values:<10}{k:>5}{own[0]["sent"] / 1e3:>9.1f}{rate:>9.4f}'
              f'{statistics.mean(losses):>8.4f}  '
              + ' '.join(f'{loss:.4f}' for loss in losses))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--rates', nargs='+', type=float, default=[2e-3])
  parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1])
  parser.add_argument('--table', action='store_true')
  args = parser.parse_args()
  args.out.parent.mkdir(parents=True, exist_ok=True)
  for rate in () if args.table else args.rates:
    for values, k in settings():
      done = {r['seed'] for r in learning.read(args.out)
              if (r['values'], r['topk'], r['rate']) == (values, k, rate)}
      todo = [seed for seed in args.seeds if seed not in done]
      extra = ['--values', values, '--topk', str(k)]
      for record in learning.runs_of('demo', rate, todo, extra) if todo else ():
        record = {'values': values, 'topk': k, **record}
        with args.out.open('a') as file:
          file.write(json.dumps(record) + '\n')
        print(values, k, rate, record['seed'], record['valid_loss'], flush=True)
  tables(learning.read(args.out))


if __name__ == '__main__':
  main()
