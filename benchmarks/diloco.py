"""Exchanging every H steps: bytes and losses.

    python benchmarks/diloco.py --out benchmarks/results/diloco.jsonl
    python benchmarks/diloco.py --out ... --table   # from the file alone

DiLoCo, DeMo inside it (without drift and as published), SparseLoCo, on the
training example's text, at equal H, for 2 and 4 workers, over outer learning
rates; what each sends and receives, against DiLoCo.

A narrower model than the example's (`--width`), so that it takes minutes; the
inner rate, the batch and the schedule are the same for all. A run that is in
the file is not done again.
"""

import argparse
import functools
import itertools
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

import methods
import text
import train_lm
from gpt import GPT, GPTConfig
from muon import append, read

import demo_optax

TOPK = demo_optax.dct_topk(64, 32)
MORE = demo_optax.dct_topk(64, 128)
SIGN = demo_optax.dct_topk(64, 128, values='sign')
RAW = demo_optax.Compressor(
    demo_optax.compressors.TopK(64), demo_optax.compressors.Identity(),
    values='int4')

# Method: its compressor, and how it is made; None: averaged in every step.
PERIODS = {
    'AdamW every step': (demo_optax.compressors.full(), None),
    'DiLoCo': (demo_optax.compressors.full(), demo_optax.local.diloco),
    'DeMo, as published': (
        TOPK,
        functools.partial(
            demo_optax.local.demo_diloco, compressor=TOPK, drift=True)),
    'DeMo, without drift': (
        TOPK, functools.partial(demo_optax.local.demo_diloco, compressor=TOPK)),
    'DeMo, without drift, topk=128': (
        MORE, functools.partial(demo_optax.local.demo_diloco, compressor=MORE)),
    'DeMo, without drift, topk=128, signs': (
        SIGN, functools.partial(demo_optax.local.demo_diloco, compressor=SIGN)),
    'SparseLoCo': (
        RAW, functools.partial(demo_optax.local.sparse_loco, compressor=RAW)),
}
OUTER_RATES = [0.25, 0.5, 1.0, 2.0]
RUN = ('method', 'workers', 'rate', 'seed')


def train(
    args: argparse.Namespace, method: str, count: int, rate: float, seed: int
) -> dict[str, Any]:
  """Returns the record of a run."""
  workers = demo_optax.Workers.simulated(count)
  compressor, make = PERIODS[method]
  tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(optax.warmup_cosine_decay_schedule(
          0.0, args.lr, args.steps // 10, args.steps, 0.1 * args.lr), b2=0.95))
  if make is None:
    period, tx = 1, optax.chain(demo_optax.average(workers=workers), tx)
  else:
    period = args.period
    tx = make(tx, workers=workers, sync_period=period, outer_learning_rate=rate)
  config = GPTConfig(width=args.width, heads=args.width // 32)
  corpus = text.load()
  model = GPT(config, nnx.Rngs(seed))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step_fn = methods.make_train_step(train_lm.loss_fn, workers)
  for step in range(args.steps):
    tokens = text.batch(corpus.train, seed, step, args.batch, config.context)
    loss = step_fn(model, optimizer, tokens)
  valid = text.windows(corpus.valid, 64, config.context)[: args.valid_batches]
  apart = [
      float(jnp.abs(x - x.mean(0)).max() / jnp.abs(x).max())
      for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))
      if 'worker_stacked' in (where := jax.tree_util.keystr(path))
      and 'params' in where]
  dense, plan = (
      demo_optax.plan(nnx.state(model, nnx.Param), code, workers)
      for code in (demo_optax.compressors.full(), compressor))
  less = period / args.period
  return {
      'method': method, 'workers': count, 'rate': rate, 'seed': seed,
      'valid_loss': train_lm.evaluate(model, valid),
      'train_loss': float(loss), 'apart': max(apart, default=0.0),
      'sent': plan.sent_bytes / period,
      'received': plan.received_bytes / period,
      'less_sent': less * dense.sent_bytes / plan.sent_bytes,
      'less_received': less * dense.received_bytes / plan.received_bytes,
      'size': plan.size, 'jax': jax.__version__,
  }


def table(records: list[dict[str, Any]]) -> None:
  print('| N | method | best outer lr of'
        f' {", ".join(map(str, sorted({r["rate"] for r in records} - {0.0})))}'
        ' | validation loss | against DiLoCo | sent, received per step | less'
        ' sent, received than DiLoCo | copies apart |')
  print('|---|---|---|---|---|---|---|---|')
  for count in sorted({r['workers'] for r in records}):
    best = {}
    for r in records:
      if r['workers'] == count:
        rates = best.setdefault(r['method'], {})
        rates.setdefault(r['rate'], []).append(r)
    rows = {}
    for method, rates in best.items():
      means = {x: statistics.mean(r['valid_loss'] for r in rs)
               for x, rs in rates.items()}
      rate = min(means, key=means.get)
      rows[method] = (rate, means[rate], rates[rate][0], means)
    base = rows.get('DiLoCo', (0, float('nan')))[1]
    for method, (rate, loss, r, means) in rows.items():
      all_rates = ', '.join(f'{x}: {m:.3f}' for x, m in sorted(means.items()))
      which = f'{rate} ({all_rates})' if rate else '-'
      print(f'| {count} | {method} | {which} | {loss:.3f} |'
            f' {loss - base:+.3f} | {r["sent"] / 1e3:.2f},'
            f' {r["received"] / 1e3:.2f} kB |'
            f' {r["less_sent"]:.3g}x, {r["less_received"]:.3g}x |'
            f' {100 * r["apart"]:.1f} % |')


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add('--out', type=pathlib.Path, required=True)
  add('--methods', nargs='+', default=list(PERIODS))
  add('--outer-rates', nargs='+', type=float, default=OUTER_RATES)
  add('--seeds', nargs='+', type=int, default=[0])
  add('--lr', type=float, default=4e-3, help='peak rate of the inner AdamW')
  add('--period', type=int, default=10)
  add('--steps', type=int, default=400)
  add('--batch', type=int, default=16)
  add('--width', type=int, default=64)
  add('--valid-batches', type=int, default=8)
  add('--table', action='store_true')
  args = parser.parse_args()
  names = ['steps', 'batch', 'width', 'valid_batches', 'lr', 'period']
  settings = {name: getattr(args, name) for name in names}

  def records() -> list[dict[str, Any]]:
    return [r for r in read(args.out) if r['settings'] == settings]

  for count, method in itertools.product((2, 4), args.methods):
    rates = args.outer_rates if PERIODS[method][1] else [0.0]
    for run in itertools.product([method], [count], rates, args.seeds):
      if args.table or run in [tuple(r[k] for k in RUN) for r in records()]:
        continue
      record = {**train(args, *run), 'settings': settings}
      append(args.out, record)
      print(*run, f'{record["valid_loss"]:.4f}', flush=True)
  table(records())


if __name__ == '__main__':
  main()
