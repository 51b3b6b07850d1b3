"""A run stopped, and resumed with another number of workers: what it costs.

    python benchmarks/elastic.py --out benchmarks/results/elastic.json

The training example's model, text and optimizer, 300 steps; after 200 it is
saved, and restored for another number of simulated workers, with the same batch
in all. Two runs go on from there: uninterrupted, and with the momentum
regrouped (`resize=True`); with `--rules regrouped zero` a third, to see what
that is worth: with the momentum set to zero. Draws docs/elastic.png. What is in
the file is not done again.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'examples'))

import methods
import picture
import text
import train_lm
from gpt import GPT, GPTConfig

from demo_optax import checkpoint

CHANGES = [(4, 2), (4, 8), (8, 3), (1, 4)]
BATCH = 24  # divides into all these numbers of workers
EVERY = 20


class Run:
  """The training example, stoppable."""

  def __init__(self, workers: int, seed: int, steps: int):
    self.args = train_lm.parse_args([
        '--workers', str(workers), '--seed', str(seed), '--steps', str(steps),
        '--batch', str(BATCH), '--optimizer', 'demo',
    ])
    self.corpus, self.config = text.load(None), GPTConfig()
    self.valid = text.windows(self.corpus.valid, 64, self.config.context)
    self.workers = train_lm.make_workers(workers)
    self.compressor = methods.make_compressor(self.args)
    self.model = GPT(self.config, nnx.Rngs(seed))
    self.optimizer = nnx.Optimizer(
        self.model, methods.make_optimizer(self.args, self.workers),
        wrt=nnx.Param,
    )
    self.step_fn = methods.make_train_step(train_lm.loss_fn, self.workers)

  def train(self, start: int, stop: int, first_valid: int = 0) -> dict:
    """Losses of every step, and validation losses of some."""
    losses, valid = [], []
    for step in range(start, stop):
      tokens = text.batch(
          self.corpus.train, self.args.seed, step, BATCH, self.config.context
      )
      losses.append(float(self.step_fn(self.model, self.optimizer, tokens)))
      if (step + 1) % EVERY == 0 and step + 1 >= first_valid:
        loss = train_lm.evaluate(self.model, self.valid)
        valid.append([step + 1, loss])
    return {'loss': losses, 'valid': valid}

  @property
  def state(self):
    """All that is saved."""
    return {'model': nnx.state(self.model),
            'optimizer': nnx.state(self.optimizer)}

  def update(self, state) -> None:
    """Takes what was restored."""
    nnx.update(self.model, state['model'])
    nnx.update(self.optimizer, state['optimizer'])

  def checkpoints(self, folder) -> checkpoint.Checkpointer:
    """The checkpoints in a folder."""
    params = nnx.state(self.model, nnx.Param)
    return checkpoint.Checkpointer(
        folder, params, self.compressor, self.workers
    )

  def forget(self) -> None:
    """Sets the momentum to zero."""
    state = nnx.state(self.optimizer)
    path = jax.tree_util.keystr
    nnx.update(self.optimizer, jax.tree_util.tree_map_with_path(
        lambda p, x: 0 * x if 'momentum' in path(p) else x, state))


def measure(old: int, new: list[int], seed: int, args: argparse.Namespace):
  """Yields a record for the old number of workers, and for each new one."""
  stop, more = args.stop, args.more
  with tempfile.TemporaryDirectory() as folder:
    run = Run(old, seed, stop + more)
    begun = run.train(0, stop, stop)
    with run.checkpoints(folder) as checkpoints:
      checkpoints.save(stop, run.state)
    end = run.train(stop, stop + more)
    yield {'old': old, 'new': old, 'rule': 'uninterrupted', 'begun': begun,
           **end}
    for count in new:
      for rule in args.rules:
        other = Run(count, seed, stop + more)
        with other.checkpoints(folder) as checkpoints:
          _, state = checkpoints.restore(other.state, resize=True)
        other.update(state)
        if rule == 'zero':
          other.forget()
        yield {'old': old, 'new': count, 'rule': rule,
               **other.train(stop, stop + more)}


def final(record) -> float:
  return record['valid'][-1][1]


def table(records) -> None:
  print(f'{"workers":<10}{"seed":>5}{"uninterrupted":>15}  resumed')
  for old, new in CHANGES:
    for base in records:
      if base['old'] != old or base['rule'] != 'uninterrupted':
        continue
      line = f'{old} -> {new:<5}{base["seed"]:>5}{final(base):>15.4f}'
      for r in records:
        if (r['old'], r['new'], r['seed']) == (old, new, base['seed']):
          more = 100 * (final(r) / final(base) - 1)
          line += f'  {r["rule"]} {final(r):.4f} ({more:+.2f} %)'
      print(line)


def draw(records, stop: int, path: pathlib.Path) -> None:
  plt = picture.pyplot()
  if plt is None:
    return
  figure, axes = plt.subplots(1, len(CHANGES), figsize=(11, 3), sharey=True)
  styles = {'uninterrupted': ('black', '-', 2.4), 'regrouped': ('C0', '-', 1.6),
            'zero': ('C3', '--', 1.2)}
  for axis, (old, new) in zip(axes, CHANGES):
    for rule, (color, style, width) in styles.items():
      count = old if rule == 'uninterrupted' else new
      curves = [
          np.array(r['valid']) for r in records
          if (r['old'], r['new'], r['rule']) == (old, count, rule)
      ]
      begun = [np.array(r['begun']['valid'])[-1:] for r in records
               if r['old'] == old and 'begun' in r]
      curves = [np.concatenate([b, c]) for b, c in zip(begun, curves)]
      if curves:
        mean = np.mean(curves, axis=0)
        label = {'uninterrupted': 'uninterrupted', 'regrouped': 'regrouped',
                 'zero': 'momentum set to zero'}[rule]
        axis.plot(*mean.T, style, color=color, linewidth=width, label=label)
    axis.set_title(f'{old} $\\to$ {new} workers', fontsize=10)
    axis.set_xlabel('step')
    axis.set_xticks([stop, stop + 50, stop + 100])
  axes[0].set_ylabel('validation loss (nats/byte)')
  axes[-1].legend(frameon=False, fontsize=8)
  picture.save(figure, path)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--seeds', nargs='+', type=int, default=[0])
  parser.add_argument('--rules', nargs='+', default=['regrouped'],
                      choices=['regrouped', 'zero'])
  parser.add_argument('--stop', type=int, default=200)
  parser.add_argument('--more', type=int, default=100)
  parser.add_argument('--picture', type=pathlib.Path,
                      default=ROOT / 'docs/elastic.png')
  args = parser.parse_args()
  records = json.loads(args.out.read_text()) if args.out.exists() else []
  for seed in args.seeds:
    for old in dict.fromkeys(old for old, _ in CHANGES):
      if any(r['old'] == old and r['seed'] == seed for r in records):
        continue
      new = [n for o, n in CHANGES if o == old]
      found = []
      for record in measure(old, new, seed, args):
        record |= {'seed': seed, 'jax': jax.__version__}
        found.append(record)
        print(seed, old, record['new'], record['rule'], final(record),
              flush=True)
      records += found
      args.out.write_text(json.dumps(
          records, indent=None, separators=(',', ':')) + '\n')
  table(records)
  draw(records, args.stop, args.picture)


if __name__ == '__main__':
  main()
