"""Trains a small convolutional network on handwritten digits, by any method.

    python benchmarks/train_cnn.py                   # by all
    python benchmarks/train_cnn.py demo adamw        # by two of them

scikit-learn's 1,797 digits of 8x8 pixels, which it brings with it; a fifth of
them is held out. Further flags are those of methods.py.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
from flax import nnx

import demo_optax

METHODS = ['adamw', 'demo', 'demo-muon', *methods.LOCAL]


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


def train(args: argparse.Namespace, eval_every: int) -> dict[str, Any]:
  """One training run; returns its records and its summary."""
  (images, labels), test = load()
  workers = demo_optax.Workers.simulated(args.workers)
  model = CNN(nnx.Rngs(args.seed))
  cost = methods.count_bytes(args, nnx.state(model, nnx.Param), workers)
  optimizer = nnx.Optimizer(
      model, methods.make_optimizer(args, workers), wrt=nnx.Param
  )
  train_step = methods.make_train_step(loss_fn, workers)
  records = []
  for step in range(args.steps):
    rng = np.random.default_rng((args.seed, step))
    batch = rng.integers(0, len(labels), args.batch)
    loss = train_step(model, optimizer, images[batch], labels[batch])
    done = step + 1
    if done % eval_every == 0 or done == args.steps:
      records.append({
          'step': done, 'loss': float(loss),
          'accuracy': float(count_correct(model, *test)),
      })
  print(f'{args.optimizer:<18} accuracy {records[-1]["accuracy"]:.2%} on'
        f' {len(test[1])} held-out digits; sends {cost["sent"] / 1e3:9.3f} kB,'
        f' receives {cost["received"] / 1e3:9.3f} kB per worker and step'
        f' ({cost["adamw"] / 1e3:.1f} by averaging)', flush=True)
  return {'name': args.optimizer, 'records': records, **cost}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('methods', nargs='*', metavar='METHOD')
  add('--out', type=pathlib.Path, default=pathlib.Path('runs/cnn'))
  add('--steps', default='400')
  add('--batch', default='64', help='images per step, all workers')
  add('--eval-every', type=int, default=20)
  own, rest = parser.parse_known_args(argv)
  task = ['--steps', own.steps, '--batch', own.batch, *rest]
  runs = [
      train(methods.parse_args(['--optimizer', name, *task]), own.eval_every)
      for name in own.methods or METHODS
  ]
  own.out.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(run) + '\n' for run in runs]
  (own.out / 'runs.jsonl').write_text(''.join(lines))
  return runs


if __name__ == '__main__':
  main()
