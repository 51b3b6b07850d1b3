"""Trains four small models by AdamW, Muon, `demo` and `demo_muon`.

    pip install --no-deps animal-mnist    # 10,000 images, for `cnn`
    python benchmarks/tasks.py run        # what the records lack
    python benchmarks/tasks.py table

`mlp` fits a random network; `cnn` classifies images of animals; `transformer`
is a stock Flax transformer on the bytes of Python's help; `lora` fits that
transformer, trained on the help, to Python sources by LoRA. Four workers, 300
steps. Rates are tried with seed 0; the best one has three seeds, and with
`demo_muon` the one that docs/choosing.md says to try first.
"""

import argparse
import ast
import functools
import gzip
import importlib.util
import io
import math
import pathlib
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'examples'))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
from flax import nnx
from muon import append, read

import demo_optax

OUT = ROOT / 'benchmarks/results/tasks.jsonl'
STEPS, WORKERS = 300, 4
WORDS, WIDTH, CONTEXT = 256, 128, 64  # of the transformer
FIRST_RATE = 2e-2  # of `demo_muon`
RATES = {
  'adamw': [5e-4, 1e-3, 2e-3, 4e-3, 8e-3],
  'muon': [5e-3, 1e-2, 2e-2, 4e-2, 8e-2],
  'demo': [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3],
  'demo_muon': [1e-2, 2e-2, 4e-2],
}


class Task(NamedTuple):
  """A model, what is trained of it, its loss, its batches, a held-out batch."""

  model: nnx.Module
  trained: Any
  loss: Callable[[Any, Any, Any], jax.Array]
  batch: Callable[[np.random.Generator], tuple[Any, Any]]
  held_out: tuple[Any, Any]


def squared(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.mean((model(x) - y) ** 2)


def cross_entropy(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def mlp(seed: int) -> Task:
  def layers(rngs: nnx.Rngs, width: int) -> nnx.Sequential:
    sizes = [(64, width), (width, width), (width, 8)]
    made = [nnx.Linear(*size, rngs=rngs) for size in sizes]
    return nnx.Sequential(made[0], nnx.gelu, made[1], nnx.gelu, made[2])

  teacher = layers(nnx.Rngs(7), 128)
  answer = nnx.jit(lambda x: 3 * teacher(x))

  def rows(rng: np.random.Generator, count: int = 128) -> tuple[Any, Any]:
    x = rng.standard_normal((count, 64), np.float32)
    return x, answer(x)

  held_out = rows(np.random.default_rng(1), 2048)
  return Task(layers(nnx.Rngs(seed), 256), nnx.Param, squared, rows, held_out)


class _Arrays(pickle.Unpickler):
  """Reads pickled arrays and nothing else."""

  def find_class(self, module: str, name: str) -> Any:
    if name in ('_reconstruct', 'ndarray', 'dtype', 'scalar'):
      core = np._core.multiarray
      return getattr(np, name, None) or getattr(core, name)
    raise pickle.UnpicklingError(f'{module}.{name} is no array.')


class CNN(nnx.Module):
  """Three convolutions, each with layer normalisation."""

  def __init__(self, rngs: nnx.Rngs):
    conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
    self.convs = nnx.List([conv(1, 32), conv(32, 64), conv(64, 64)])
    self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for n in (32, 64, 64)])
    self.head = nnx.Linear(576, 10, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # f32[batch, 28, 28, 1]
    for conv, norm in zip(self.convs, self.norms):
      x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
    return self.head(x.reshape(len(x), -1))


def cnn(seed: int) -> Task:
  spec = importlib.util.find_spec('animal_mnist')
  if spec is None:
    raise SystemExit('pip install --no-deps animal-mnist')
  folder = pathlib.Path(spec.origin).parent / 'data/Animal_MNIST'
  images, labels = (
    np.asarray(
      _Arrays(
        io.BytesIO(
          gzip.decompress((folder / f'animal_{x}_version_3.gz').read_bytes())
        )
      ).load()
    )
    for x in ('data', 'label')
  )
  images = images.reshape(-1, 28, 28, 1).astype(np.float32) / 255
  labels = labels.reshape(-1).astype(np.int32)
  order = np.random.default_rng(0).permutation(len(labels))
  test, train = order[:1000], order[1000:]

  def batch(rng: np.random.Generator) -> tuple[Any, Any]:
    rows = rng.choice(train, 64)
    return images[rows], labels[rows]

  model = CNN(nnx.Rngs(seed))
  return Task(
    model, nnx.Param, cross_entropy, batch, (images[test], labels[test])
  )


class Transformer(nnx.Module):
  """Two layers of Flax's own attention; kernels of three dimensions."""

  def __init__(self, rngs: nnx.Rngs, rank: int = 0):
    d = WIDTH
    self.embed = nnx.Embed(WORDS, d, rngs=rngs)
    self.position = nnx.Embed(CONTEXT, d, rngs=rngs)
    linear = functools.partial(nnx.Linear, rngs=rngs)
    if rank:
      linear = functools.partial(nnx.LoRALinear, lora_rank=rank, rngs=rngs)
    self.layers = nnx.List(
      [
        nnx.Dict(
          norm1=nnx.LayerNorm(d, rngs=rngs),
          norm2=nnx.LayerNorm(d, rngs=rngs),
          attention=nnx.MultiHeadAttention(4, d, decode=False, rngs=rngs),
          up=linear(d, 4 * d),
          down=linear(4 * d, d),
        )
        for _ in range(2)
      ]
    )
    self.norm = nnx.LayerNorm(d, rngs=rngs)
    self.head = nnx.Linear(d, WORDS, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:  # i32[batch, time]
    x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
    mask = nnx.make_causal_mask(tokens)
    for layer in self.layers:
      x = x + layer.attention(layer.norm1(x), mask=mask)
      x = x + layer.down(nnx.gelu(layer.up(layer.norm2(x))))
    return self.head(self.norm(x))


def windows(corpus: text.Corpus) -> tuple[Any, tuple[Any, Any]]:
  def batch(rng: np.random.Generator) -> tuple[Any, Any]:
    starts = rng.integers(0, len(corpus.train) - CONTEXT, 32)
    found = corpus.train[starts[:, None] + np.arange(CONTEXT + 1)]
    return found[:, :-1].astype(np.int32), found[:, 1:].astype(np.int32)

  held_out = corpus.valid[: 256 * CONTEXT + 1].astype(np.int32)
  x, y = (h.reshape(-1, CONTEXT) for h in (held_out[:-1], held_out[1:]))
  return batch, (x, y)


def transformer(seed: int) -> Task:
  model = Transformer(nnx.Rngs(seed))
  return Task(model, nnx.Param, cross_entropy, *windows(text.load()))


@functools.cache
def _base() -> Any:
  """Returns the parameters of `transformer`, trained by AdamW."""
  base, rate = transformer(0), schedule(4e-3)
  optimizer = nnx.Optimizer(base.model, optax.adamw(rate), wrt=nnx.Param)

  @nnx.jit
  def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.update(model, nnx.grad(cross_entropy)(model, x, y))

  for i in range(STEPS):
    step(base.model, optimizer, *base.batch(np.random.default_rng(i)))
  return jax.tree.map(np.asarray, nnx.state(base.model, nnx.Param))


def lora(seed: int) -> Task:
  model = Transformer(nnx.Rngs(seed + 1), rank=8)
  nnx.update(model, _base())
  data = windows(text.load(str(pathlib.Path(ast.__file__).parent / 'asyncio')))
  return Task(model, nnx.LoRAParam, cross_entropy, *data)


TASKS = {f.__name__: f for f in (mlp, cnn, transformer, lora)}


def schedule(rate: float) -> optax.Schedule:
  return optax.warmup_cosine_decay_schedule(0.0, rate, 15, STEPS, 0.1 * rate)


def optimizer_of(
  method: str, rate: float, workers: demo_optax.Workers
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
  """Returns a method with its defaults, and its compressors for `plan`."""
  rates = schedule(rate)
  averaged: dict[str, Callable[[], optax.GradientTransformation]] = {
    'adamw': lambda: optax.adamw(rates, weight_decay=0.0),
    'muon': lambda: optax.contrib.muon(
      rates,
      weight_decay=0.0,
      adam_learning_rate=schedule(0.6 * rate),
      muon_weight_dimension_numbers=(demo_optax.recipes.muon_dimension_numbers),
    ),
  }
  if method in averaged:
    tx = optax.chain(
      demo_optax.average_gradients(workers=workers), averaged[method]()
    )
    return tx, lambda params: jax.tree.map(lambda _: None, params)
  if method == 'demo':
    tx, compressor = demo_optax.demo, lambda params: demo_optax.dct_topk()
  else:
    tx, compressor = demo_optax.demo_muon, demo_optax.recipes.muon_compressors
  return tx(rates, workers=workers), compressor


def train(task: str, method: str, rate: float, seed: int) -> dict[str, Any]:
  """Returns the record of a run; the loss is that of the held-out batch."""
  start = time.time()
  workers = demo_optax.Workers.simulated(WORKERS)
  t = TASKS[task](seed)
  tx, compressor = optimizer_of(method, rate, workers)
  clipped = optax.chain(optax.clip_by_global_norm(1.0), tx)
  optimizer = nnx.Optimizer(t.model, clipped, wrt=t.trained)

  @demo_optax.data_parallel(workers, batch_argnames=('x', 'y'))
  def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    of = nnx.DiffState(0, t.trained)
    loss, grads = nnx.value_and_grad(t.loss, argnums=of)(model, x, y)
    optimizer.update(model, grads)
    return loss

  for i in range(STEPS):
    rng = np.random.default_rng((seed, i))
    loss = step(t.model, optimizer, *t.batch(rng))
  params = nnx.state(t.model, t.trained)
  plan = demo_optax.plan(params, compressor(params), workers)
  final = float(nnx.jit(t.loss)(t.model, *t.held_out))
  return {
    'task': task,
    'method': method,
    'rate': rate,
    'seed': seed,
    'loss': round(final, 4) if math.isfinite(final) else None,
    'train_loss': round(float(loss), 4),
    'sent': plan.sent_bytes,
    'received': plan.received_bytes,
    'parameters': sum(x.size for x in jax.tree.leaves(params)),
    'seconds': round(time.time() - start, 1),
  }


def run(tasks: list[str]) -> None:
  """Trains what the records lack, until each best rate has worse neighbours."""
  for task in tasks:
    for method in RATES:
      rates = list(RATES[method])
      while True:
        losses = [record(task, method, rate, 0)['loss'] for rate in rates]
        best = losses.index(min(x for x in losses if x is not None))
        if best == 0:
          rates.insert(0, rates[0] / 2)
        elif best == len(rates) - 1:
          rates.append(rates[-1] * 2)
        else:
          break
      tried = {rates[best]}
      if method == 'demo_muon':
        tried.add(FIRST_RATE)
      for rate in tried:
        for seed in (1, 2):
          record(task, method, rate, seed)


def best_of(records: list[dict[str, Any]], task: str, method: str) -> float:
  found = [
    (r['loss'], r['rate'])
    for r in records
    if (r['task'], r['method'], r['seed']) == (task, method, 0)
    and r['loss'] is not None
  ]
  return min(found)[1]


def record(task: str, method: str, rate: float, seed: int) -> dict[str, Any]:
  """Returns the record of a run; trains if there is none."""
  for r in read(OUT):
    if (r['task'], r['method'], r['rate'], r['seed']) == (
      task,
      method,
      rate,
      seed,
    ):
      return r
  made = train(task, method, rate, seed)
  print(made, flush=True)
  append(OUT, made)
  return made


def table() -> str:
  """Mean and range of three seeds, bytes per worker and step."""
  records = read(OUT)
  lines = [
    '| task | method | rate | loss | sent, kB | received, kB |',
    '|---|---|---|---|---|---|',
  ]
  for task in TASKS:
    rows = [(m, best_of(records, task, m)) for m in RATES]
    rows.append(('demo_muon', FIRST_RATE))
    for method, rate in dict.fromkeys(rows):
      found = [
        r
        for r in records
        if (r['task'], r['method'], r['rate']) == (task, method, rate)
      ]
      losses = [r['loss'] for r in found]
      dense = 2 * (WORKERS - 1) / WORKERS * 2 * found[0]['parameters']
      is_dense = method in ('adamw', 'muon')
      sent, received = (
        dense if is_dense else found[0][k] for k in ('sent', 'received')
      )
      lines.append(
        f'| {task} | {method} | {rate:g} | {statistics.mean(losses):.3f}'
        f' ({min(losses):.3f} to {max(losses):.3f}) | {sent / 1e3:.1f} |'
        f' {received / 1e3:.1f} |'
      )
  return '\n'.join(lines)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('what', choices=['run', 'table'])
  parser.add_argument('tasks', nargs='*', default=list(TASKS))
  args = parser.parse_args()
  if args.what == 'run':
    run(args.tasks)
  print(table())
