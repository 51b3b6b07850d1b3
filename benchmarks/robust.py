"""A worker whose gradient is wrong, with and without `max_norm_ratio`.

    python benchmarks/robust.py          # some minutes; results/robust.jsonl
    python benchmarks/robust.py table    # the tables, from the file

A small byte-level GPT (135 thousand parameters) on the training example's
text; 4 simulated workers, 250 steps of 16 windows of 32 bytes. In every step
the gradient of worker 0 is replaced, or that of no worker. A run that is in the
file is not done again; all ratios share a compiled step.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

import text
from gpt import GPT, GPTConfig
from train_lm import loss_fn

import demo_optax

CONFIG = GPTConfig(context=32, width=64, layers=2, heads=4)
WORKERS, BATCH, STEPS = 4, 16, 250
RESULTS = pathlib.Path(__file__).parent / 'results' / 'robust.jsonl'


def demo(rate, values='float32', **options):
  compressor = demo_optax.dct_topk(64, 32, values=values)
  return demo_optax.demo(rate, decay=0.99, compressor=compressor, **options)


def cut(make):
  """Cuts each worker's own gradient at norm 1."""
  return lambda *args, **options: optax.chain(
      optax.clip_by_global_norm(1.0), make(*args, **options))


signs = functools.partial(demo, values='sign')
METHODS = {  # what makes the optimizer, and the peak learning rate
    'demo, signs': (signs, 4e-3),
    'demo, float32': (demo, 4e-3),
    'demo, signs, gradients cut at norm 1': (cut(signs), 4e-3),
    'demo_muon': (demo_optax.demo_muon, 1e-2),
    'demo_muon, gradients cut at norm 1': (cut(demo_optax.demo_muon), 1e-2),
}
# What worker 0 has instead of its gradient g; noise has the norm of g.
FAULTS = {
    'none': lambda g, noise: g,
    'flipped': lambda g, noise: -g,
    'noise': lambda g, noise: noise,
    'noise, tenfold': lambda g, noise: 10 * noise,
    'hundredfold': lambda g, noise: 100 * g,
}
RATIOS = {'none': [None, 1.5, 2.0, 3.0]}  # of faults: off and on
OFF_AND_ON = [None, 2.0]
SEEDS = [0, 1]


def wrong(gradients, fault, who, step):
  """Replaces the gradients of worker 0."""
  leaves, treedef = jax.tree.flatten(gradients)
  key = jax.random.fold_in(jax.random.key(1), step)
  keys = jax.random.split(key, len(leaves))
  replaced = []
  for g, key in zip(leaves, keys):
    noise = jax.random.normal(key, g.shape)
    noise *= jnp.linalg.norm(g) / jnp.linalg.norm(noise)
    choices = [f(g, noise) for f in FAULTS.values()]
    other = jax.lax.select_n(fault, *choices)
    replaced.append(jnp.where(who == 0, other, g))
  return treedef.unflatten(replaced)


class Run:
  """Training by one method, with the norms compared or not."""

  def __init__(self, method, compared):
    self.workers = demo_optax.Workers.simulated(WORKERS)
    self.graphdef = nnx.split(self.model(0), nnx.Param)[0]
    make, peak = METHODS[method]
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, 30, STEPS)

    def make_tx(ratio):
      options = {'max_norm_ratio': ratio} if compared else {}
      return make(rate, workers=self.workers, **options)

    @demo_optax.data_parallel(self.workers)
    def train_step(params, opt_state, tokens, who, ratio, fault, step):
      loss, gradients = jax.value_and_grad(self.loss)(params, tokens)
      gradients = wrong(gradients, fault, who[0], step)
      updates, opt_state = make_tx(ratio).update(gradients, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, loss

    self.init = jax.jit(make_tx(2.0).init)
    self.train_step = train_step
    self.corpus = text.load()
    self.valid = text.windows(self.corpus.valid, 64, CONFIG.context)
    self.evaluate = jax.jit(self.loss)

  def model(self, seed):
    return GPT(CONFIG, nnx.Rngs(seed))

  def loss(self, params, tokens):
    return loss_fn(nnx.merge(self.graphdef, params), tokens)

  def train(self, fault, ratio, seed):
    """Returns a record."""
    params = nnx.split(self.model(seed), nnx.Param)[1]
    opt_state, outliers = self.init(params), 0
    who = np.repeat(np.arange(WORKERS), BATCH // WORKERS)
    fault_number = jnp.int32(list(FAULTS).index(fault))
    started = time.perf_counter()
    for step in range(STEPS):
      tokens = text.batch(self.corpus.train, seed, step, BATCH, CONFIG.context)
      params, opt_state, _ = self.train_step(
          params, opt_state, tokens, who, jnp.float32(ratio or 0),
          fault_number, jnp.int32(step))
      info = demo_optax.exchange_info(opt_state)
      outliers += int(info.get('num_outliers', 0))
    loss = np.mean([self.evaluate(params, x) for x in self.valid])
    return {
        'loss': float(loss), 'outliers': outliers / STEPS,
        'seconds': round(time.perf_counter() - started, 1),
    }


def read():
  if not RESULTS.exists():
    return []
  return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def run(methods, seeds):
  for method in methods:
    for compared in (False, True):
      trained = None
      for fault in FAULTS:
        ratios = RATIOS.get(fault, OFF_AND_ON)
        for ratio in (r for r in ratios if (r is not None) == compared):
          for seed in seeds:
            key = {'method': method, 'fault': fault, 'ratio': ratio,
                   'seed': seed}
            if any(key.items() <= r.items() for r in read()):
              continue
            trained = trained or Run(method, compared)
            record = {**key, **trained.train(fault, ratio, seed)}
            with RESULTS.open('a') as file:
              file.write(json.dumps(record) + '\n')
            print(record, flush=True)


def table():
  """Prints losses, and outliers per step where there were any."""
  records = read()

  def cell(method, fault, ratio):
    found = [r for r in records if (r['method'], r['fault'], r['ratio'])
             == (method, fault, ratio)]
    if not found:
      return ''
    loss, outliers = (
        statistics.mean(r[k] for r in found) for k in ('loss', 'outliers'))
    return f'{loss:.3f}' + (f' ({outliers:.2f})' if outliers else '')

  print('| method | worker 0 | off | 1.5 | 2 | 3 |\n|---|---|---|---|---|---|')
  for method in METHODS:
    for fault in FAULTS:
      cells = [cell(method, fault, ratio) for ratio in RATIOS['none']]
      print(f'| {method} | {fault} | {" | ".join(cells)} |')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument(
      'what', nargs='?', choices=['run', 'table'], default='run')
  parser.add_argument('--methods', nargs='+', default=list(METHODS))
  parser.add_argument('--seeds', nargs='+', type=int, default=SEEDS)
  args = parser.parse_args()
  if args.what == 'run':
    run(args.methods, args.seeds)
  table()


if __name__ == '__main__':
  main()
