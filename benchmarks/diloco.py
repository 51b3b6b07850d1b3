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
import json
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

import text
from gpt import GPT, GPTConfig

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


class Task:
  """The example's model and text as functions of bare trees."""

  def __init__(self, args: argparse.Namespace, workers: demo_optax.Workers):
    self.args, self.workers = args, workers
    self.config = GPTConfig(width=args.width, heads=args.width // 32)
    self.corpus = text.load()
    model = GPT(self.config, nnx.Rngs(0))
    self.graphdef = nnx.split(model)[0]
    valid = text.windows(self.corpus.valid, 64, self.config.context)
    self.valid = valid[: args.valid_batches]
    self.eval = jax.jit(self.loss)

  def params(self, seed: int) -> Any:
    model = GPT(self.config, nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.split(model)[1])

  def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
    state = nnx.split(GPT(self.config, nnx.Rngs(0)))[1]
    nnx.replace_by_pure_dict(state, params)
    logits = nnx.merge(self.graphdef, state)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]).mean()

  def tokens(self, seed: int, step: int) -> np.ndarray:
    return text.batch(
        self.corpus.train, seed, step, self.args.batch, self.config.context)

  def validate(self, params: Any) -> float:
    return float(np.mean([self.eval(params, b) for b in self.valid]))

  def schedule(self, peak: Any) -> optax.Schedule:
    shape = optax.warmup_cosine_decay_schedule(
        0.0, 1.0, self.args.steps // 10, self.args.steps, end_value=0.1)
    return lambda step: peak * shape(step)


# Periods ----------------------------------------------------------------------


def runs_of(task: Task, method: str) -> Any:
  """`(outer rate, seed) -> record`; the compiled step is shared."""
  args, workers = task.args, task.workers
  compressor, make = PERIODS[method]
  inner = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(task.schedule(args.lr), b2=0.95))

  def tx_of(rate: Any) -> optax.GradientTransformation:
    if make is None:
      return optax.chain(demo_optax.average(workers=workers), inner)
    return make(
        inner, workers=workers, sync_period=args.period,
        outer_learning_rate=rate)

  @demo_optax.data_parallel(workers, batch_argnums=3)
  def train_step(rate: Any, params: Any, state: Any, tokens: Any) -> Any:
    loss, grads = jax.value_and_grad(task.loss)(params, tokens)
    updates, state = tx_of(rate).update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  dense, plan = (
      demo_optax.plan(task.params(0), code, workers)
      for code in (demo_optax.compressors.full(), compressor))
  period = 1 if make is None else args.period

  def run(rate: float, seed: int) -> dict[str, Any]:
    params = task.params(seed)
    state = tx_of(jnp.float32(rate)).init(params)
    for step in range(args.steps):
      params, state, loss = train_step(
          jnp.float32(rate), params, state, task.tokens(seed, step))
    own = getattr(state, 'worker_stacked', None)
    apart = [float(jnp.abs(x - x.mean(0)).max() / jnp.abs(x).max())
             for x in jax.tree.leaves(own and own.params)]
    less = period / args.period
    return {
        'valid_loss': task.validate(params),
        'train_loss': float(loss), 'apart': max(apart, default=0.0),
        'sent': plan.sent_bytes / period,
        'received': plan.received_bytes / period,
        'less_sent': less * dense.sent_bytes / plan.sent_bytes,
        'less_received': less * dense.received_bytes / plan.received_bytes,
        'size': plan.size,
    }

  return run


def periods(args: argparse.Namespace, seen: 'Seen') -> None:
  for count in (2, 4):
    task = Task(args, demo_optax.Workers.simulated(count))
    for method, (_, make) in PERIODS.items():
      rates = args.outer_rates if make else [0.0]
      if method in args.methods:
        seen.run(runs_of(task, method), (method, count),
                 [(r, s) for r in rates for s in args.seeds])


def periods_table(records: list[dict[str, Any]]) -> None:
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


# Runs -------------------------------------------------------------------------


class Seen:
  """Records in a file: what is there is not done again."""

  def __init__(self, path: pathlib.Path, settings: dict[str, Any]):
    self.path, self.settings = path, settings
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    self.records = [r for r in found if r['settings'] == settings]

  def run(self, run: Any, name: tuple[str, int], todo: list[Any]) -> None:
    method, workers = name
    done = {(r['method'], r['workers'], r['rate'], r['seed'])
            for r in self.records}
    for rate, seed in todo:
      if (method, workers, rate, seed) in done:
        continue
      record = {'method': method, 'workers': workers, 'rate': rate,
                'seed': seed, **run(rate, seed), 'settings': self.settings,
                'jax': jax.__version__}
      self.records.append(record)
      with self.path.open('a') as file:
        file.write(json.dumps(record) + '\n')
      print(method, workers, rate, seed, f'{record["valid_loss"]:.4f}',
            flush=True)


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
  args.out.parent.mkdir(parents=True, exist_ok=True)
  seen = Seen(args.out, {name: getattr(args, name) for name in names})
  if not args.table:
    periods(args, seen)
  periods_table(seen.records)


if __name__ == '__main__':
  main()
