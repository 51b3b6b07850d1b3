"""Trains a small convolutional network on handwritten digits, by any method.

    python examples/train_cnn.py                         # DeMo, 4 workers
    python examples/train_cnn.py --optimizer diloco      # every 20 steps
    python examples/train_cnn.py --compare               # all, and a picture
    python examples/train_cnn.py --compare demo adamw

scikit-learn's 1,797 digits of 8x8 pixels, which it brings with it; a fifth of
them is held out. Flags of the methods are those of train_lm.py (methods.py).
With several devices there is one worker per device, else workers are simulated.
"""

import argparse
import json
import pathlib
import signal
from typing import Any

import cluster
import flags
import jax
import jax.numpy as jnp
import methods
import metrics
import numpy as np
import optax
import picture
import train_lm
from flax import nnx

METHODS = ['adamw', 'demo', 'demo-muon', *methods.LOCAL]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  parser = flags.Parser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  methods.add_flags(parser)
  add('--compare', nargs='*', metavar='METHOD', choices=METHODS,
      help=f'train by several, draw all; without names: {", ".join(METHODS)}')
  add('--workers', type=flags.whole(1),
      help='default: one per device, or 4 on one device')
  add('--out', type=flags.folder, default='runs/cnn',
      help='folder for all that is written')
  add('--steps', type=flags.whole(1), default=400)
  add('--batch', type=flags.whole(1), default=64,
      help='images per step, all workers')
  add('--eval-every', type=flags.whole(1), default=20)
  add('--seed', type=flags.whole(0), default=0)
  args = methods.settle(parser.parse_args(argv))
  methods.check(args, names(args))
  return args


def names(args: argparse.Namespace) -> list[str]:
  return [args.optimizer] if args.compare is None else args.compare or METHODS


class CNN(nnx.Module):
  """Two convolutions, two dense layers; 53,000 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
    self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
    self.dense = nnx.Linear(2 * 2 * 64, 128, rngs=rngs)
    self.head = nnx.Linear(128, 10, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:  # f32[batch, 8, 8, 1]
    x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), (2, 2))
    x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
    x = nnx.relu(self.dense(x.reshape(len(x), -1)))
    return self.head(x)  # f32[batch, 10]


def load(seed: int = 0) -> tuple[Any, Any]:
  """Images f32[n, 8, 8, 1] and labels i32[n], to train and to test with."""
  from sklearn import datasets

  digits = datasets.load_digits()
  images = (digits.images[..., None] / 16).astype(np.float32)
  labels = digits.target.astype(np.int32)
  order = np.random.default_rng(seed).permutation(len(labels))
  test, train = np.split(order, [len(order) // 5])
  return (images[train], labels[train]), (images[test], labels[test])


def loss_fn(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
  logits = model(images)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def count_correct(model: CNN, images: jax.Array, labels: jax.Array) -> Any:
  return jnp.mean(jnp.argmax(model(images), -1) == labels)


def train(
    args: argparse.Namespace, stop: cluster.StopSignal
) -> dict[str, Any]:
  """One training run; returns its records and its summary."""
  (images, labels), test = load()
  workers = train_lm.make_workers(args.workers)
  flags.check_batch(args.batch, workers.count)
  params = nnx.state(nnx.eval_shape(lambda: CNN(nnx.Rngs(0))), nnx.Param)
  cost = flags.try_to(lambda: methods.count_bytes(args, params, workers))
  model = CNN(nnx.Rngs(args.seed))
  optimizer = nnx.Optimizer(
      model, methods.make_optimizer(args, workers), wrt=nnx.Param
  )
  train_step = methods.make_train_step(loss_fn, workers)
  folder = pathlib.Path(args.out) / args.optimizer
  records = []
  with metrics.Metrics(folder, {'config': vars(args), 'bytes': cost}) as log:
    for step in range(args.steps):
      if number := stop.after(step):
        print(f'Stopped by {signal.Signals(number).name} after step {step}.')
        raise SystemExit(128 + number)
      rng = np.random.default_rng((args.seed, step))
      batch = rng.integers(0, len(labels), args.batch)
      loss = train_step(model, optimizer, images[batch], labels[batch])
      done = step + 1
      if done % args.eval_every == 0 or done == args.steps:
        records.append({
            'step': done, 'loss': float(loss),
            'accuracy': float(count_correct(model, *test)),
            'sent': cost['sent'] * done,
        })
        if args.optimizer not in methods.AVERAGED:
          records[-1] |= metrics.about_exchange(optimizer)
        log.write(records[-1])
  print(f'{args.optimizer:<18} accuracy {records[-1]["accuracy"]:.2%} on'
        f' {len(test[1])} held-out digits; sends {cost["sent"] / 1e3:9.3f} kB,'
        f' receives {cost["received"] / 1e3:9.3f} kB per worker and step'
        f' ({cost["adamw"] / 1e3:.1f} by averaging)', flush=True)
  return {'name': args.optimizer, 'records': records, **cost}


def draw(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Accuracy against steps, and against bytes sent."""
  plt = picture.pyplot()
  if plt is None:
    return
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
  for run in runs:
    accuracy = [100 * r['accuracy'] for r in run['records']]
    left.plot([r['step'] for r in run['records']], accuracy, label=run['name'])
    sent = [r['sent'] / 1e6 for r in run['records']]
    right.plot(sent, accuracy, marker='.')
  left.set(xlabel='step', ylabel='held-out digits right, %')
  right.set(xlabel='MB sent per worker')
  if any(run['sent'] for run in runs):
    right.set_xscale('log')
  left.legend(frameon=False)
  picture.save(figure, path)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  args = parse_args(argv)
  with cluster.StopSignal() as stop:
    runs = [
        train(args if name == args.optimizer else methods.other(args, name),
              stop)
        for name in names(args)
    ]
  folder = pathlib.Path(args.out)
  lines = [json.dumps({**run, 'records': [
      {k: r[k] for k in ('step', 'loss', 'accuracy')} for r in run['records']
  ]}) + '\n' for run in runs]
  (folder / 'runs.jsonl').write_text(''.join(lines))
  draw(runs, folder / 'accuracy.png')
  return runs


if __name__ == '__main__':
  main()
