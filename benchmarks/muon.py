"""Trains the example's model by many methods, and tabulates loss beside bytes.

    python benchmarks/muon.py run                # all runs; resumes; some hours
    python benchmarks/muon.py run --groups place decay
    python benchmarks/muon.py table              # the tables, from the file
    python benchmarks/muon.py plot               # docs/muon.png, from the file
    python benchmarks/muon.py time               # CPU seconds of a step

A run is a set of settings; what a setting leaves out is as in `DEFAULTS`. Runs
that are in the file are not done again, and several processes may work on one
file: each takes the next run that nobody has. Every method gets the example's
model, text, batches, warm-up and cosine.
"""

import argparse
import fcntl
import hashlib
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

RESULTS = pathlib.Path(__file__).parent / 'results' / 'muon.jsonl'
SECONDS = RESULTS.with_name('muon_seconds.json')

# What a run is unless it says otherwise.
DEFAULTS: dict[str, Any] = {
    'task': 'lm',  # or 'cnn'
    'method': 'recipe',  # see optimizers.py
    'workers': 4,
    'seed': 0,
    'steps': 800,
    'batch': 16,
    'data': 'topics',
    'width': 192, 'layers': 2, 'heads': 6,  # of the language model
    'lr': 2e-3,  # peak; of matrices
    'other_lr': 2e-3,  # of embeddings, head, norms, biases
    # recipe: before the exchange, on every worker by itself
    'worker': 'orthonormalise',  # or 'momentum', None
    'beta': 0.95,
    'nesterov': True,
    'ns_steps': 3,
    'preconditioning': 'aol',
    # recipe: the exchange
    'topk': 32,  # of 64x64 chunks; None: everything
    'groups': False,  # True: `GroupMax`
    'values': 'sign',
    'decay': 0.9,
    'weight': 'ema',  # of gradients in the momentum; 'lr': the learning rate
    'alpha': 1.0,
    'average': 'senders',  # or 'workers'
    'update_values': None,  # of the chunks' owners; None: an all-gather
    'rows': 24,  # of rows of 192 of the others; or 'adamw'
    # recipe: behind it
    'after': 'rms',  # or 'sign', 'orthonormalise'
    'other_after': 'adam',
    'turns': 8,  # of turns: parts of a matrix
    'mu_dtype': None,  # in which the worker's momentum is kept
    # of removed code, which some records have
    'gram': 0.9, 'after_gram': 0.9, 'after_steps': 2, 'share': 1.0,
    'shared': None, 'lambda': 1.0, 'shared_decay': 0.9, 'power': 1.5,
    'chunks': 'matrix',
    # others
    'rank': 1,  # of powersgd, dion
    'inner': 'adamw',  # of diloco, demo-diloco, sparse-loco; or 'muon'
    'period': 10,
    'outer_lr': 0.7,
    'outer_momentum': 0.9,
}


def grid(**axes: Any) -> list[dict[str, Any]]:
  """Returns the settings of all combinations of lists of values."""
  axes = {k: v if isinstance(v, list) else [v] for k, v in axes.items()}
  return [dict(zip(axes, x)) for x in itertools.product(*axes.values())]


# What the picture shows, by names of runs.
PLOTTED = {
    'AdamW': 'adamw',
    'Muon': (
        'muon, lr=0.02, other_lr=0.012, ns_steps=5, preconditioning=frobenius'
    ),
    'demo_muon, topk=128': (
        'recipe, other_lr=0.006, topk=128, average=workers'
    ),
    'demo_muon': (
        'recipe, other_lr=0.006, topk=64, average=workers, rows=8'
    ),
    'demo_muon, topk=8': (
        'recipe, other_lr=0.006, topk=8, average=workers, rows=8'
    ),
    'DeMo as published': 'demo, values=float32, decay=0.99',
    'demo_diloco, Muon inside': (
        'demo-diloco, lr=0.02, other_lr=0.012, ns_steps=5,'
        ' preconditioning=frobenius, topk=128, decay=0.95, inner=muon,'
        ' outer_lr=0.5'
    ),
}
# For colour-blind readers as well: the palette of Okabe and Ito.
COLORS = ('#0072B2', '#E69F00', '#009E73', '#D55E00', '#CC79A7', '#56B4E9',
          '#000000')

# optax.contrib.muon as it is, at the best of its rates.
MUON = {
    'method': 'muon', 'lr': 2e-2, 'other_lr': 1.2e-2,
    'ns_steps': 5, 'preconditioning': 'frobenius',
}
SLOWER = {**MUON, 'lr': 1e-2}
# The recipe's settings at three budgets: as it was first, and at its best.
LARGE = {'topk': 128}  # 144 times fewer bytes than averaging
MEDIUM = {'topk': 64, 'rows': 8}  # 265 times
SMALL = {'topk': 8, 'rows': 8}  # 623 times
BEST = {'average': 'workers', 'other_lr': 6e-3}
PUBLISHED = {'method': 'demo', 'values': 'float32', 'decay': 0.99}
EVERY_TEN = {
    **MUON, 'method': 'demo-diloco', 'inner': 'muon', 'outer_lr': 0.5,
    'topk': 128, 'decay': 0.95,
}
MANY = {n: {'workers': n, 'batch': 32, 'steps': 400} for n in (8, 32)}
# How owners of chunks may write updates.
UPDATES = ['int4', 'sign', 'int8']
LARGER = {'width': 512, 'layers': 3, 'heads': 8, 'steps': 400}
# Cheap runs with one sequence for each of 16 workers.
SHORT = {'workers': 16, 'width': 128, 'heads': 4, 'steps': 200}
RECIPE = {**SHORT, **MEDIUM, **BEST}
CNN = {'task': 'cnn', 'steps': 400, 'batch': 64}

# Whose seconds are measured: the rows of the table of results.
TIMED = {
    'AdamW': {'method': 'adamw'},
    'Muon': MUON,
    'demo_muon, 144 times fewer bytes sent': {**LARGE, **BEST},
    'demo_muon': {**MEDIUM, **BEST},
    'demo_muon, 383 times': {'rows': 8, **BEST},
    'demo_muon, 623 times': {**SMALL, **BEST},
    'Signum': {'method': 'signum', 'lr': 5e-4, 'beta': 0.9},
    'DeMo as published': PUBLISHED,
    'DeMo in signs': {'method': 'demo', 'decay': 0.99},
    'DeMo, second version': {**PUBLISHED, 'alpha': 0.2},
    'PowerSGD': {'method': 'powersgd', **BEST},
    'Dion': {'method': 'dion', **BEST},
    'DiLoCo': {'method': 'diloco', 'outer_lr': 0.25},
    'DiLoCo with Muon inside': {
        **MUON, 'method': 'diloco', 'inner': 'muon', 'outer_lr': 0.25},
    'SparseLoCo': {
        'method': 'sparse-loco', 'topk': 128, 'decay': 0.95, 'outer_lr': 2.0},
    'DeMo inside DiLoCo with Muon inside': EVERY_TEN,
}

# In the order in which they are worth running.
GROUPS: dict[str, list[dict[str, Any]]] = {
    # Averaged gradients, over learning rates.
    'muon': [
        *grid(**{**MUON, 'seed': [0, 1, 2]}),
        *grid(**{**MUON, 'lr': [5e-3, 1e-2, 2e-2, 4e-2], 'other_lr': 3e-3}),
        *grid(**{**MUON, 'lr': [5e-3, 1e-2, 4e-2]}),
        *grid(**{**MUON, 'other_lr': [1.5e-3, 6e-3, 2.4e-2]}),
        *grid(**{**SLOWER, 'other_lr': [6e-3, 2.4e-2]}),
        *grid(**{**SLOWER, 'other_lr': 3e-3, 'seed': 1}),
        *grid(**{**SLOWER, 'other_lr': [6e-3, 1.2e-2], 'seed': [1, 2]}),
    ],
    'adamw': [
        *grid(method='adamw', seed=[0, 1, 2]),
        *grid(method='adamw', lr=[1e-3, 4e-3]),
    ],
    'signum': [
        *grid(method='signum', beta=0.9, lr=[2.5e-4, 5e-4, 1e-3]),
        *grid(method='signum', beta=0.9, lr=5e-4, seed=[1, 2]),
    ],
    # The recipe: what is sent, and what of it matters.
    'budgets': [
        *grid(**LARGE, **BEST, seed=[0, 1, 2]),
        *grid(**MEDIUM, **BEST, seed=[0, 1, 2]),
        *grid(**SMALL, **BEST, seed=[0, 1, 2]),
        *grid(**LARGE, seed=[0, 1, 2]),
        *grid(**MEDIUM, seed=[0, 1, 2]),
        *grid(**SMALL, seed=[0, 1, 2]),
        *grid(seed=[0, 1, 2]),
    ],
    'between': [
        *grid(topk=32, rows=8, **BEST, seed=[0, 1, 2]),
        *grid(topk=256, rows=48, **BEST, seed=[0, 1, 2]),
    ],
    'edges': [
        *grid(**MEDIUM, **BEST, lr=[1e-3, 3e-3]),
        *grid(**{**MEDIUM, **BEST, 'other_lr': 1.2e-2}, seed=[0, 1, 2]),
        *grid(**{**MEDIUM, **BEST, 'other_lr': 2.4e-2}),
        *grid(**{**SMALL, **BEST, 'other_lr': 1.2e-2}),
        *grid(**SMALL, **BEST, lr=[3e-3, 4e-3]),
        *grid(**LARGE, **BEST, lr=[1e-3, 3e-3]),
    ],
    'average': [
        *grid(**LARGE, average='workers'), *grid(**MEDIUM, average='workers'),
        *grid(**SMALL, average='workers'),
        *grid(**LARGE, average='workers', other_lr=[6e-3, 1.2e-2]),
        *grid(**MEDIUM, average='workers', other_lr=6e-3),
    ],
    'rates': [
        *grid(lr=[1e-3, 3e-3, 4e-3]), *grid(other_lr=[4e-3, 6e-3]),
        *grid(**LARGE, other_lr=[6e-3, 4e-3]),
        *grid(**MEDIUM, other_lr=[6e-3, 4e-3]),
        *grid(**SMALL, other_lr=6e-3),
        *grid(**LARGE, lr=3e-3),
    ],
    # Chunks with owners: what the code of updates costs.
    'owners': [
        *grid(**MEDIUM, **BEST, **MANY[8], update_values=[None, *UPDATES]),
        *grid(**PUBLISHED, **MANY[8], update_values=[None, 'sign']),
    ],
    'owners-32': [
        *grid(**PUBLISHED, **MANY[32], update_values=[None, 'sign']),
        *grid(**MEDIUM, **BEST, **MANY[32], update_values=[None, 'int4']),
    ],
    # At equal bytes.
    'groups': [
        *grid(topk=11, rows=10, groups=True, **BEST, seed=[0, 1, 2]),
        *grid(topk=170, rows=34, groups=True, **BEST, seed=[0, 1, 2]),
    ],
    'beta': [
        *grid(**MEDIUM, beta=[0.9, 0.98]),
        *grid(**MEDIUM, **BEST, beta=0.9, seed=[0, 1, 2]),
        *grid(beta=0.0, decay=[0.9, 0.99]),
    ],
    'decay': [
        *grid(decay=[0.0, 0.5, 0.8, 0.95, 0.99]),
    ],
    'place': [
        *grid(worker='momentum', lr=[5e-4, 1e-3, 2e-3]),
        *grid(worker='momentum', after='orthonormalise'),
        *grid(worker=None, decay=0.99, after='orthonormalise'),
        # What is orthonormalised last is dense: shorter steps were tried, too.
        *grid(worker=None, decay=0.99, after='orthonormalise', lr=1e-3),
        *grid(worker='momentum', after='orthonormalise', lr=1e-3),
        *grid(worker='orthonormalise', after='orthonormalise',
              lr=[1e-3, 2e-3]),
    ],
    'after': grid(after='sign'),
    'others': [
        *grid(rows=[8, 48, 'adamw']), *grid(**LARGE, rows=8),
        *grid(other_after=['sign', 'rms']), *grid(other_lr=1e-3),
    ],
    'values': [
        *grid(topk=8, values='float32'), *grid(topk=22, values='int4'),
        *grid(topk=64), *grid(topk=8),
    ],
    'newton-schulz': [
        *grid(ns_steps=2), *grid(ns_steps=[3, 5], preconditioning='frobenius'),
    ],
    'nesterov': grid(nesterov=False),
    'alpha': [*grid(alpha=0.5), *grid(**LARGE, alpha=0.5)],
    'weight': grid(weight='lr'),
    'memory': grid(mu_dtype='bfloat16'),
    'controls': [
        *grid(topk=None, lr=[5e-4, 1e-3, 2e-3]),
        *grid(method='muon-sign', lr=[5e-4, 1e-3, 2e-3]),
    ],
    # Other methods.
    'demo': [
        *grid(method='demo', values='float32', decay=0.99,
              lr=[1e-3, 2e-3, 4e-3]),
        *grid(method='demo', values='sign', decay=0.99, lr=2e-3),
        *grid(method='demo', values='float32', decay=0.99, alpha=0.2,
              lr=[2.5e-4, 5e-4, 1e-3, 2e-3]),
        *grid(**PUBLISHED, seed=[1, 2]),
        *grid(method='demo', values='sign', decay=0.99, seed=[1, 2]),
        *grid(**PUBLISHED, alpha=0.2, lr=1e-3, seed=[1, 2]),
    ],
    'low-rank': [
        *grid(method='powersgd', lr=[1e-3, 2e-3, 4e-3]),
        *grid(method='powersgd', lr=[5e-4, 1e-3, 2e-3, 4e-3], **BEST),
        *grid(method='powersgd', lr=1e-3, **BEST, seed=[1, 2]),
        *grid(method='dion', lr=[5e-3, 1e-2, 2e-2, 4e-2, 8e-2], **BEST),
        *grid(method='dion', lr=4e-2, **BEST, seed=[1, 2]),
        *grid(method='dion', lr=[5e-3, 1e-2]),
    ],
    'local': [
        *grid(method='diloco', outer_lr=[0.1, 0.25, 0.7]),
        *grid(**{**SLOWER, 'method': 'diloco', 'inner': 'muon',
                 'outer_lr': [0.1, 0.25, 0.7]}),
        *grid(**{**MUON, 'method': 'diloco', 'inner': 'muon',
                 'outer_lr': 0.25}),
        *grid(**{**EVERY_TEN, 'seed': [0, 1, 2]}),
        *grid(**{**EVERY_TEN, 'lr': [5e-3, 1e-2, 4e-2]}),
        *grid(**{**EVERY_TEN, 'lr': 1e-2, 'outer_lr': [0.25, 1.0]}),
        *grid(**{**EVERY_TEN, 'lr': 1e-2, 'period': [4, 20]}),
        *grid(**{**EVERY_TEN, 'lr': 1e-2, 'seed': [1, 2]}),
        *grid(method='sparse-loco', topk=128, decay=0.95,
              outer_lr=[1.0, 2.0, 4.0]),
        *grid(method='sparse-loco', topk=128, decay=0.95, outer_lr=2.0,
              seed=[1, 2]),
        *grid(method='diloco', outer_lr=0.25, seed=[1, 2]),
        *grid(**{**SLOWER, 'method': 'diloco', 'inner': 'muon',
                 'outer_lr': 0.25, 'seed': [1, 2]}),
    ],
    # The leaders for longer, and elsewhere.
    'long': [
        *grid(steps=5000, **MEDIUM, **BEST), *grid(**SLOWER, steps=5000),
        *grid(method='adamw', steps=5000),
    ],
    'longer-sources': [
        *grid(**SLOWER, data='stdlib', steps=2400),
        *grid(method='adamw', data='stdlib', steps=2400),
        *grid(data='stdlib', **MEDIUM, **BEST, steps=2400),
    ],
    # 9.8 M parameters; rates as one over the width, but for Muon's matrices.
    'larger': [
        *grid(**LARGER, method='adamw', lr=[3.75e-4, 7.5e-4, 1.5e-3]),
        *grid(**LARGER, **MEDIUM, average='workers', lr=7.5e-4,
              other_lr=2.25e-3),
        *grid(**{**MUON, **LARGER, 'other_lr': 4.5e-3}),
        # As Muon's own steps at one rate: one over the root of the width.
        *grid(**LARGER, **MEDIUM, average='workers', lr=1.2e-3,
              other_lr=2.25e-3),
    ],
    'sixteen': [
        *grid(workers=16, **LARGE, **BEST), *grid(workers=16, **MEDIUM, **BEST),
        *grid(**MUON, workers=16), *grid(**SLOWER, workers=16),
        *grid(method='adamw', workers=16),
        *grid(workers=16, **MEDIUM, **BEST, beta=0.98),
        *grid(workers=16, **MEDIUM, **BEST, lr=1e-3),
        *grid(workers=16, **LARGE, **BEST, lr=1e-3),
    ],
    # With four sequences for each worker, as where there are four workers.
    'sixteen-64': [
        *grid(**MUON, workers=16, batch=64),
        *grid(**SLOWER, workers=16, batch=64),
        *grid(workers=16, batch=64, **MEDIUM, **BEST),
        *grid(method='adamw', workers=16, batch=64),
    ],
    'many': [
        *grid(**MUON, workers=16, steps=200),
        *grid(**MEDIUM, **BEST, workers=16, steps=200),
        *grid(**SHORT, **MUON), *grid(**SHORT, **{**MUON, 'lr': 4e-2}),
        *grid(**SHORT, **MUON, beta=0.9),
        *grid(**RECIPE, lr=[2e-3, 3e-3]), *grid(**RECIPE, lr=3e-3, beta=0.9),
        *grid(**RECIPE, lr=3e-3, decay=[0.8, 0.95]),
        *grid(**RECIPE, lr=3e-3, ns_steps=2),
        *grid(**{**RECIPE, 'rows': 'adamw'}),
        *grid(**SHORT, **BEST, topk=None, lr=[1e-3, 2e-3]),
        *grid(**BEST, workers=16, topk=None, lr=1e-3),
        *grid(**RECIPE, method='turns', lr=3e-3),
    ],
    'sources': [
        *grid(data='stdlib', **LARGE, **BEST),
        *grid(data='stdlib', **MEDIUM, **BEST),
        *grid(**MUON, data='stdlib', seed=[0, 1, 2]),
        *grid(method='adamw', data='stdlib'),
        *grid(data='stdlib', **MEDIUM, **BEST, seed=[1, 2]),
        *grid(**SLOWER, data='stdlib', seed=[0, 1, 2]),
        *grid(method='adamw', data='stdlib', seed=[1, 2]),
    ],
    'cnn': [
        *grid(**CNN, **MEDIUM, **BEST, lr=[2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),
        *grid(**CNN, method='adamw',
              lr=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]),
        *grid(**{**MUON, **CNN,
                 'lr': [1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2]}),
        *grid(**CNN, **MEDIUM, average='workers', lr=5e-4,
              other_lr=[3e-3, 1.2e-2, 2.4e-2]),
        *grid(**CNN, **MEDIUM, **BEST, lr=5e-4, seed=[1, 2]),
        *grid(**CNN, method='adamw', lr=1.6e-2, seed=[1, 2]),
        *grid(**{**MUON, **CNN, 'lr': 2.5e-3,
                 'other_lr': [3e-3, 6e-3, 2.4e-2, 4.8e-2]}),
        *grid(**{**MUON, **CNN, 'lr': 2.5e-3}, seed=[1, 2]),
        *grid(**{**MUON, **CNN, 'lr': 2.5e-3, 'other_lr': 2.4e-2},
              seed=[1, 2]),
        *grid(**CNN, **LARGE, **BEST, lr=5e-4, seed=[0, 1, 2]),
        *grid(**CNN, **SMALL, **BEST, lr=5e-4, seed=[0, 1, 2]),
    ],
}


# Runs -------------------------------------------------------------------------


class Run:
  """A model, its optimizer and its step.

  Attributes:
    model: the model.
    evaluate: from a model to its validation loss.
    bytes_per_step: sent and received by a worker, and sent by averaging.
  """

  def __init__(self, s: dict[str, Any]) -> None:
    import methods
    import optimizers
    from flax import nnx

    import demo_optax

    self.model, loss_fn, self._batch_of, self.evaluate = TASKS[s['task']](s)
    workers = demo_optax.Workers.simulated(s['workers'])
    method = optimizers.make(s, workers)
    self.bytes_per_step = method.bytes_of(nnx.state(self.model, nnx.Param))
    self._optimizer = nnx.Optimizer(self.model, method.tx, wrt=nnx.Param)
    self._step_fn = methods.make_train_step(loss_fn, workers)

  def step(self, number: int) -> tuple[float, float]:
    """Trains by one batch; returns its loss, and the CPU seconds it took."""
    batch = self._batch_of(number)
    began = time.process_time()
    loss = float(self._step_fn(self.model, self._optimizer, *batch))
    return loss, time.process_time() - began


def train(s: dict[str, Any]) -> dict[str, Any]:
  """Trains by some settings; returns the record of it."""
  import jax
  import numpy as np

  run = Run(s)
  sent, received, dense = run.bytes_per_step
  seconds, curve = [], {}
  for step in range(s['steps']):
    loss, took = run.step(step)
    seconds.append(took)
    done = step + 1
    if done == s['steps'] or done % (s['steps'] // 8) == 0:
      curve[done] = round(run.evaluate(run.model), 5)
  return {
      **{k: v for k, v in s.items() if v != DEFAULTS[k]},
      'loss': curve[s['steps']], 'train_loss': round(loss, 5),
      'curve': curve, 'sent': sent, 'received': received, 'dense': dense,
      'cpu_seconds_per_step': round(float(np.median(seconds[5:])), 4),
      'jax': jax.__version__,
  }


def language_model(s: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
  """The model, its loss, its batches by steps, and its validation loss."""
  import text
  import train_lm
  from flax import nnx
  from gpt import GPT, GPTConfig

  config = GPTConfig(
      width=s['width'], layers=s['layers'], heads=s['heads']
  )
  if s['data'] == 'topics':
    corpus = text.load()
  else:  # the standard library's sources, split by file
    folder = pathlib.Path(statistics.__file__).parent
    with tempfile.TemporaryDirectory() as copies:
      for path in folder.glob('*.py'):
        pathlib.Path(copies, path.name).write_text(path.read_text())
      corpus = text.load(copies)
  valid = text.windows(corpus.valid, 64, config.context)

  def batch_of(step: int) -> tuple[Any, ...]:
    return text.batch(
        corpus.train, s['seed'], step, s['batch'], config.context
    ),

  return (
      GPT(config, nnx.Rngs(s['seed'])), train_lm.loss_fn, batch_of,
      lambda model: train_lm.evaluate(model, valid),
  )


def digits(s: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
  """The same of the convolutional network; the loss is that of the test set."""
  import digits as task
  import numpy as np
  from flax import nnx

  (images, labels), test = task.load()

  def batch_of(step: int) -> tuple[Any, ...]:
    rows = np.random.default_rng((s['seed'], step)).integers(
        0, len(labels), s['batch']
    )
    return images[rows], labels[rows]

  loss_of = nnx.jit(task.loss_fn)
  return (
      task.CNN(nnx.Rngs(s['seed'])), task.loss_fn, batch_of,
      lambda model: float(loss_of(model, *test)),
  )


TASKS = {'lm': language_model, 'cnn': digits}


def key(settings: dict[str, Any]) -> str:
  """Returns the settings of a run, or of its record, in one form."""
  return json.dumps(
      {k: settings.get(k, default) for k, default in DEFAULTS.items()}
  )


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: pathlib.Path, groups: list[str], limit: int | None) -> None:
  """Does what is not in the file, and nobody else is doing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  done = 0
  for group in groups:
    for settings in GROUPS[group]:
      settings = {**DEFAULTS, **settings}
      name = hashlib.sha256(key(settings).encode()).hexdigest()[:16]
      claim = pathlib.Path(tempfile.gettempdir(), f'run-{name}.lock')
      with claim.open('w') as lock:
        try:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
          continue
        if key(settings) in {key(r) for r in read(path)}:
          continue
        record = train(settings)
        with path.open('a') as file:
          file.write(json.dumps(record) + '\n')
        print(group, json.dumps(record), flush=True)
        done += 1
        if done == limit:
          return


def measure_seconds(rounds: int) -> list[dict[str, Any]]:
  """Returns CPU seconds of a step: medians of interleaved rounds, and ratios.

  A round is twenty steps of each method, two periods of those that exchange
  every ten, and counts by its mean.
  """
  runs = {}
  for name, settings in TIMED.items():
    print(f'Compiling {name}', flush=True)
    runs[name] = Run({**DEFAULTS, **settings})
    for step in range(12):
      runs[name].step(step)
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for number in range(rounds):
    for name, run in runs.items():
      took = [run.step(12 + 20 * number + k)[1] for k in range(20)]
      seconds[name].append(statistics.mean(took))
  first = next(iter(runs))
  records = []
  for name, took in seconds.items():
    ratio = statistics.median(
        a / b for a, b in zip(took, seconds[first], strict=True))
    records.append({
        'method': name, 'cpu_seconds': round(statistics.median(took), 4),
        'ratio': round(ratio, 3), 'rounds': [round(x, 4) for x in took],
    })
    print(f'| {name} | {records[-1]["cpu_seconds"]:.3f} | {ratio:.2f} |')
  return records


# Tables and the picture -------------------------------------------------------


def name_of(record: dict[str, Any]) -> str:
  """Returns what a run has that is not a default; seeds are not in it."""
  different = [
      f'{k}={record[k]}' for k, default in DEFAULTS.items()
      if k not in ('method', 'seed') and record.get(k, default) != default
  ]
  return ', '.join([record.get('method', 'recipe'), *different])


def by_name(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
  found: dict[str, list[dict[str, Any]]] = {}
  for record in records:
    found.setdefault(name_of(record), []).append(record)
  return found


def steps_to(record: dict[str, Any], loss: float) -> float | None:
  """Returns the step at which a validation loss was reached, interpolated."""
  before = None
  for step, value in ((int(k), v) for k, v in record['curve'].items()):
    if value <= loss:
      if before is None:
        return step
      share = (before[1] - loss) / (before[1] - value)
      return before[0] + share * (step - before[0])
    before = step, value
  return None


# What runs must have in common to be compared.
SETTING = ('task', 'data', 'width', 'layers', 'heads', 'workers', 'batch',
           'steps')


def table(records: list[dict[str, Any]]) -> None:
  """Prints all runs in Markdown, a table for each setting.

  Seeds of one method are in one line. The steps are those to AdamW's loss.
  """
  settings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
  for record in records:
    setting = tuple(record.get(k, DEFAULTS[k]) for k in SETTING)
    settings.setdefault(setting, []).append(record)
  for setting, found in settings.items():
    words = [f'{k} {value}' for k, value in zip(SETTING, setting)]
    print(f'\n{", ".join(words)}\n')
    part_of_table(found)


def part_of_table(records: list[dict[str, Any]]) -> None:
  runs = by_name([
      {k: v for k, v in record.items() if k not in SETTING}
      for record in records
  ])
  adamw = [statistics.mean(r['loss'] for r in found)
           for name, found in runs.items() if name.startswith('adamw')]
  goal = min(adamw, default=None)
  steps = 'steps' if goal is None else f'steps to {goal:.3f}'
  print('| what | seeds | loss | sent / received, kB | fewer sent |'
        f' {steps} |')
  print('|---|---|---|---|---|---|')
  for name, found in runs.items():
    losses = [r['loss'] for r in found]
    spread = (
        f' ({min(losses):.3f} - {max(losses):.3f})' if len(losses) > 1 else ''
    )
    reached = [None if goal is None else steps_to(r, goal) for r in found]
    steps = '' if None in reached else f'{statistics.mean(reached):.0f}'
    r = found[0]
    print(
        f'| {name} | {len(found)} | {statistics.mean(losses):.3f}{spread} |'
        f' {r["sent"] / 1e3:,.1f} / {r["received"] / 1e3:,.1f} |'
        f' {r["dense"] / r["sent"]:.0f}x | {steps} |'
    )


def plot(records: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws losses against steps, and at the end against received bytes."""
  import picture

  plt = picture.pyplot()
  runs = by_name(records)
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
  for (label, name), color, marker in zip(PLOTTED.items(), COLORS, 'osD^vPX'):
    found = runs[name]
    style = {'color': color, 'marker': marker, 'markersize': 5}
    steps = list(found[0]['curve'])
    every = [[r['curve'][step] for r in found] for step in steps]
    at = [int(step) for step in steps]
    left.plot(at, list(map(statistics.mean, every)), lw=1.2, **style)
    left.fill_between(
        at, list(map(min, every)), list(map(max, every)), color=color,
        alpha=0.2, lw=0)
    losses = [r['loss'] for r in found]
    mean = statistics.mean(losses)
    # All-reduces were counted in float32.
    dense = found[0]['sent'] == found[0]['dense']
    received = found[0]['received'] / (2e3 if dense else 1e3)
    right.errorbar(received, mean, [[mean - min(losses)], [max(losses) - mean]],
                   **style)
    shift, side = (-8, 'right') if label == 'demo_muon' else (8, 'left')
    right.annotate(
        label, (received, mean), (0, 14) if dense else (shift, 0), va='center',
        ha='center' if dense else side, textcoords='offset points', fontsize=8)
  left.set(xlabel='step', ylabel='validation loss (nats per byte)',
           ylim=(1.28, 1.8))
  right.set(xlabel='kB received per worker and step', xscale='log',
            xlim=(5, 6e3))
  picture.save(figure, path)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('what', choices=['run', 'table', 'plot', 'time'])
  parser.add_argument('--groups', nargs='+', choices=GROUPS)
  parser.add_argument('--limit', type=int, help='stop after so many runs')
  parser.add_argument('--rounds', type=int, default=5, help='of time')
  parser.add_argument('--file', type=pathlib.Path, default=RESULTS)
  args = parser.parse_args()
  root = pathlib.Path(__file__).parents[1]
  sys.path[:0] = [str(root), str(root / 'examples')]
  if args.what == 'run':
    run(args.file, args.groups or list(GROUPS), args.limit)
  elif args.what == 'table':
    table(read(args.file))
  elif args.what == 'time':
    measured = measure_seconds(args.rounds)
    SECONDS.write_text(json.dumps(measured, indent=1) + '\n')
  else:
    plot(read(args.file), root / 'docs' / 'muon.png')


if __name__ == '__main__':
  main()
