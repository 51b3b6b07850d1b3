"""Trains the example's model by many methods, and tabulates loss beside bytes.

    python benchmarks/muon.py run                # `ROWS`, three seeds; hours
    python benchmarks/muon.py run lr=1e-3,3e-3 topk=64 rows=8
    python benchmarks/muon.py run --row Muon --row AdamW data=stdlib seed=0,1
    python benchmarks/muon.py table              # the tables, from the file
    python benchmarks/muon.py plot               # docs/{muon,batches}.png
    python benchmarks/muon.py time               # CPU seconds of a step

A run is a set of settings; what a setting leaves out is as in `DEFAULTS`, and a
record has the settings that differ. With settings, `run` trains by all
combinations of their values, and by those of the rows that are named. Runs that
are in the file are not done again, and several processes may work on one file:
each takes the next run that nobody has. Every method gets the example's model,
text, batches, warm-up and cosine.
"""

import argparse
import ast
import fcntl
import hashlib
import itertools
import json
import math
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
  'method': 'recipe',  # or 'demo_muon', with its own rates; see optimizers.py
  'workers': 4,
  'seed': 0,
  'steps': 800,
  'warmup': 40,
  'batch': 16,
  'data': 'topics',  # or 'stdlib', 'botocore'
  'apart': False,  # True: each worker has documents of its own, of botocore
  'context': 64,
  'width': 192,
  'layers': 2,
  'heads': 6,  # of the language model
  'lr': 2e-3,  # peak; of matrices
  'other_lr': 2e-3,  # of embeddings, head, norms, biases
  # recipe: before the exchange, on every worker by itself
  'worker': 'orthonormalise',  # or 'momentum', None
  'beta': 0.95,
  'nesterov': True,
  'ns_steps': 3,
  'preconditioning': 'aol',
  'mu_dtype': None,  # 'bfloat16': by `demo_muon` itself; or 'int8'
  'stochastic': False,  # rounding to it
  # recipe: the exchange
  'cyclic': None,  # period of `cyclic_signs` of matrices, instead of top-k
  'topk': 32,  # of 64x64 chunks; None: everything
  'values': 'sign',
  'decay': 0.9,
  'alpha': 1.0,
  'average': 'senders',  # or 'workers'
  'update_values': None,  # of the chunks' owners; None: an all-gather
  'rows': 24,  # of rows of 192 of the others; or 'adamw'
  # recipe: after it
  'after': 'rms',  # or 'sign', 'orthonormalise'
  # others
  'rank': 1,  # of powersgd, dion
  'inner': 'adamw',  # of diloco, demo_diloco, sparse_loco; or 'muon'
  'period': 10,
  'outer_lr': 0.7,
  'outer_momentum': 0.9,
}
# What a record has beside settings.
MEASURED = {
  'loss',
  'train_loss',
  'curve',
  'sent',
  'received',
  'dense',
  'cpu_seconds_per_step',
  'jax',
}

# optax.contrib.muon as it is, at the best of its rates.
MUON = {
  'method': 'muon',
  'lr': 2e-2,
  'other_lr': 1.2e-2,
  'ns_steps': 5,
  'preconditioning': 'frobenius',
}
BEST = {'average': 'workers', 'other_lr': 6e-3}  # of the recipe
# Newton-Schulz steps are the package's; records without them had three.
TURNS = {'method': 'demo_muon', 'lr': 2e-2, 'other_lr': 1.2e-2, 'ns_steps': 4}
PUBLISHED = {'method': 'demo', 'values': 'float32', 'decay': 0.99}
ROWS = {  # of the table of results
  'AdamW': {'method': 'adamw'},
  'Muon': MUON,
  'demo_muon': {**TURNS, 'cyclic': 4, 'rows': 8},
  'demo_muon, period 8': {**TURNS, 'cyclic': 8, 'rows': 8},
  'topk=128': {'topk': 128, **BEST},
  'topk=64': {'topk': 64, 'rows': 8, **BEST},
  'topk=8': {'topk': 8, 'rows': 8, **BEST},
  'Signum': {'method': 'signum', 'lr': 5e-4, 'beta': 0.9},
  'DeMo as published': PUBLISHED,
  'DeMo in signs': {'method': 'demo', 'decay': 0.99},
  'DeMo, second version': {**PUBLISHED, 'alpha': 0.2, 'lr': 1e-3},
  'PowerSGD': {'method': 'powersgd', **BEST, 'lr': 1e-3},
  'Dion': {'method': 'dion', **BEST, 'lr': 4e-2},
  'DiLoCo': {'method': 'diloco', 'outer_lr': 0.25},
  'DiLoCo, Muon inside': {
    **MUON,
    'method': 'diloco',
    'inner': 'muon',
    'lr': 1e-2,
    'outer_lr': 0.25,
  },
  'SparseLoCo': {
    'method': 'sparse_loco',
    'topk': 128,
    'decay': 0.95,
    'outer_lr': 2.0,
  },
  'demo_diloco, Muon inside': {
    **MUON,
    'method': 'demo_diloco',
    'inner': 'muon',
    'outer_lr': 0.5,
    'topk': 128,
    'decay': 0.95,
  },
}
# What the picture shows, in the palette of Okabe and Ito.
PLOTTED = {
  'AdamW': '#0072B2',
  'Muon': '#E69F00',
  'demo_muon, period 8': '#009E73',
  'demo_muon': '#D55E00',
  'topk=8': '#CC79A7',
  'DeMo as published': '#56B4E9',
  'demo_diloco, Muon inside': '#000000',
}


def grid(**axes: list[Any]) -> list[dict[str, Any]]:
  """Returns the settings of all combinations of lists of values."""
  return [dict(zip(axes, x)) for x in itertools.product(*axes.values())]


def parse(word: str) -> tuple[str, list[Any]]:
  """Reads `lr=1e-3,2e-3`; what is no Python literal is a string."""
  name, _, values = word.partition('=')
  if name not in DEFAULTS:
    raise argparse.ArgumentTypeError(f'no setting: {name}')
  found: list[Any] = []
  for value in values.split(','):
    try:
      found.append(ast.literal_eval(value))
    except ValueError:
      found.append(value)
  return name, found


# Runs -------------------------------------------------------------------------


class Run:
  """A model, its optimizer and its step.

  Attributes:
    model: the model.
    evaluate: from a model to its validation loss.
    bytes_per_step: sent and received by a worker, and sent by averaging.
  """

  def __init__(self, s: dict[str, Any]) -> None:
    import optimizers
    from flax import nnx

    import demo_optax

    self.model, loss_fn, self._batch_of, self.evaluate = TASKS[s['task']](s)
    workers = demo_optax.Workers.simulated(s['workers'])
    method = optimizers.make(s, workers)
    self.bytes_per_step = method.bytes_of(nnx.state(self.model, nnx.Param))
    self._optimizer = nnx.Optimizer(self.model, method.tx, wrt=nnx.Param)

    # Written for one worker: its rows of the batch, its loss, its gradient. The
    # exchange is in `optimizer.update`.
    @demo_optax.data_parallel(
      workers, batch_argnames='batch', donate_argnums=(0, 1)
    )
    def step_fn(
      model: nnx.Module, optimizer: nnx.Optimizer, batch: tuple[Any, ...]
    ) -> Any:
      loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
      optimizer.update(model, grads)
      return loss

    self._step_fn = step_fn

  def step(self, number: int) -> tuple[float, float]:
    """Trains by one batch; returns its loss, and the CPU seconds it took."""
    batch = self._batch_of(number)
    began = time.process_time()
    loss = float(self._step_fn(self.model, self._optimizer, batch))
    return loss, time.process_time() - began


def train(s: dict[str, Any]) -> dict[str, Any]:
  """Trains by some settings; returns the record of it."""
  import jax
  import numpy as np

  run = Run(s)
  seconds, curve = [], {}
  for step in range(s['steps']):
    loss, took = run.step(step)
    seconds.append(took)
    done = step + 1
    if done == s['steps'] or done % (s['steps'] // 8) == 0:
      curve[done] = round(run.evaluate(run.model), 5)
  return {
    **learned(s, curve, loss, run.bytes_per_step),
    'cpu_seconds_per_step': round(float(np.median(seconds[5:])), 4),
    'jax': jax.__version__,
  }


def learned(
  s: dict[str, Any],
  curve: dict[int, float],
  loss: float,
  bytes_per_step: tuple[float, float, float],
) -> dict[str, Any]:
  """What a record of any run has: its settings, losses, and bytes of a step."""
  sent, received, dense = bytes_per_step
  return {
    **{k: v for k, v in s.items() if v != DEFAULTS[k]},
    'loss': curve[s['steps']],
    'train_loss': round(loss, 5),
    'curve': curve,
    'sent': sent,
    'received': received,
    'dense': dense,
  }


def language_model(s: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
  """The model, its loss, its batches by steps, and its validation loss."""
  import larger_text
  import numpy as np
  import text
  import train_lm
  from flax import nnx
  from gpt import GPT, GPTConfig

  config = GPTConfig(
    context=s['context'],
    width=s['width'],
    layers=s['layers'],
    heads=s['heads'],
  )
  repeated = s['data'] != 'botocore'
  if s['data'] == 'topics':
    corpus = text.load()
  elif not repeated:
    corpus = larger_text.load()
  else:  # the standard library's sources, split by file
    folder = pathlib.Path(statistics.__file__).parent
    with tempfile.TemporaryDirectory() as copies:
      for path in folder.glob('*.py'):
        pathlib.Path(copies, path.name).write_text(path.read_text())
      corpus = text.load(copies)
  valid = text.windows(corpus.valid, 64, config.context)
  if not repeated:  # 131 kB of all services, and no window twice
    valid = larger_text.spread(valid, 32)
    parts = s['workers'] if s['apart'] else 1
    texts = larger_text.parts_of(corpus.train, parts)
    feeds = [
      larger_text.once(part, s['seed'], s['batch'] // parts, config.context)
      for part in texts
    ]

  def batch_of(step: int) -> tuple[Any, ...]:
    if not repeated:
      return (np.concatenate([feed(step) for feed in feeds]),)
    return (
      text.batch(corpus.train, s['seed'], step, s['batch'], config.context),
    )

  return (
    GPT(config, nnx.Rngs(s['seed'])),
    train_lm.loss_fn,
    batch_of,
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
    task.CNN(nnx.Rngs(s['seed'])),
    task.loss_fn,
    batch_of,
    lambda model: float(loss_of(model, *test)),
  )


TASKS = {'lm': language_model, 'cnn': digits}


def settings_of(run: dict[str, Any]) -> dict[str, Any]:
  """Returns all settings of a run, or of its record."""
  return DEFAULTS | {k: v for k, v in run.items() if k not in MEASURED}


def read(path: pathlib.Path = RESULTS) -> list[dict[str, Any]]:
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('a') as file:
    file.write(json.dumps(record) + '\n')


def run(path: pathlib.Path, runs: list[dict[str, Any]]) -> None:
  """Does what is not in the file, and nobody else is doing."""
  for settings in map(settings_of, runs):
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    claim = pathlib.Path(tempfile.gettempdir(), f'run-{name}.lock')
    with claim.open('w') as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        continue
      if settings not in map(settings_of, read(path)):
        record = train(settings)
        append(path, record)
        print(json.dumps(record), flush=True)


def measure_seconds(rounds: int) -> list[dict[str, Any]]:
  """Returns CPU seconds of a step: medians of interleaved rounds, and ratios.

  A round is twenty steps of each method, two periods of those that exchange
  every ten, and counts by its mean.
  """
  runs = {}
  for name, settings in ROWS.items():
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
      a / b for a, b in zip(took, seconds[first], strict=True)
    )
    records.append(
      {
        'method': name,
        'cpu_seconds': round(statistics.median(took), 4),
        'ratio': round(ratio, 3),
        'rounds': [round(x, 4) for x in took],
      }
    )
    print(f'| {name} | {records[-1]["cpu_seconds"]:.3f} | {ratio:.2f} |')
  return records


# Tables and the picture -------------------------------------------------------

# What runs must have in common to be compared.
SETTING = (
  'task',
  'data',
  'apart',
  'context',
  'width',
  'layers',
  'heads',
  'workers',
  'batch',
  'steps',
  'warmup',
)


def name_of(record: dict[str, Any]) -> str:
  """Returns what a run has that is not a default; seeds are not in it."""
  different = [
    f'{k}={value}'
    for k, value in settings_of(record).items()
    if k not in ('method', 'seed', *SETTING) and DEFAULTS.get(k) != value
  ]
  return ', '.join([settings_of(record)['method'], *different])


def runs_of(
  settings: dict[str, Any], records: list[dict[str, Any]]
) -> list[dict[str, Any]]:
  """Returns the records of some settings, one for each seed."""
  row = settings_of(settings)
  return [r for r in records if settings_of({**r, 'seed': 0}) == row]


def steps_to(record: dict[str, Any], loss: float) -> float | None:
  """Returns the step at which a validation loss was reached, interpolated."""
  curve = [(int(step), value) for step, value in record['curve'].items()]
  for (step, before), (later, after) in itertools.pairwise(curve):
    if after <= loss:
      return step + (later - step) * (before - loss) / (before - after)
  return None


def table(records: list[dict[str, Any]]) -> None:
  """Prints all runs in Markdown, a table for each setting.

  Seeds of one method are in one line. The steps are those to AdamW's loss.
  """
  settings: dict[str, dict[str, list[dict[str, Any]]]] = {}
  for record in records:
    words = [f'{k} {settings_of(record)[k]}' for k in SETTING]
    runs = settings.setdefault(', '.join(words), {})
    runs.setdefault(name_of(record), []).append(record)
  for setting, runs in settings.items():
    print(f'\n{setting}\n')
    part_of_table(runs)


def part_of_table(runs: dict[str, list[dict[str, Any]]]) -> None:
  adamw = [
    statistics.mean(r['loss'] for r in found)
    for name, found in runs.items()
    if name.startswith('adamw')
  ]
  goal = min(adamw, default=None)
  steps = 'steps' if goal is None else f'steps to {goal:.3f}'
  print(f'| what | seeds | loss | sent / received, kB | fewer sent | {steps} |')
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
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
  for (label, color), marker in zip(PLOTTED.items(), 'osD^vPX'):
    found = runs_of(ROWS[label], records)
    style = {'color': color, 'marker': marker, 'markersize': 5}
    steps = list(found[0]['curve'])
    every = [[r['curve'][step] for r in found] for step in steps]
    at = [int(step) for step in steps]
    left.plot(at, list(map(statistics.mean, every)), lw=1.2, **style)
    left.fill_between(
      at,
      list(map(min, every)),
      list(map(max, every)),
      color=color,
      alpha=0.2,
      lw=0,
    )
    losses = [r['loss'] for r in found]
    mean = statistics.mean(losses)
    # All-reduces were counted in float32.
    dense = found[0]['sent'] == found[0]['dense']
    received = found[0]['received'] / (2e3 if dense else 1e3)
    right.errorbar(
      received, mean, [[mean - min(losses)], [max(losses) - mean]], **style
    )
    shift, side = (-8, 'right') if label.endswith('period 8') else (8, 'left')
    right.annotate(
      label,
      (received, mean),
      (0, 14) if dense else (shift, 0),
      va='center',
      ha='center' if dense else side,
      textcoords='offset points',
      fontsize=8,
    )
  left.set(
    xlabel='step', ylabel='validation loss (nats per byte)', ylim=(1.28, 1.8)
  )
  right.set(
    xlabel='kB received per worker and step', xscale='log', xlim=(5, 6e3)
  )
  picture.save(figure, path)


def plot_batches(records: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws the loss above Muon's best against sequences, by workers and rate."""
  import picture

  short = {'data': 'botocore', 'width': 128, 'heads': 4, 'steps': 200}
  muon: dict[int, float] = {}
  lines: dict[tuple[int, float], dict[int, float]] = {}
  recipe = settings_of(ROWS['topk=64'] | short)
  for record in records:
    s = settings_of(record)
    lr, workers, batch = s['lr'], s['workers'], s['batch']
    free = {'workers': workers, 'batch': batch, 'lr': lr}
    if s == settings_of(MUON | short | free):
      muon[batch] = min(record['loss'], muon.get(batch, 9.0))
    elif s == recipe | free:
      lines.setdefault((workers, lr), {})[batch] = record['loss']
  plt = picture.pyplot()
  figure, axes = plt.subplots(figsize=(6, 4))
  colors = dict(zip((4, 8, 16, 32), PLOTTED.values()))
  styles = {6e-3: ('-', 'o'), 3e-3: ('--', 's')}
  ticks = sorted(set().union(*lines.values()))
  for (workers, lr), losses in sorted(lines.items()):
    if lr in styles:
      style, marker = styles[lr]
      above = [100 * (losses.get(b, math.nan) / muon[b] - 1) for b in ticks]
      axes.plot(
        ticks,
        above,
        style,
        marker=marker,
        ms=5,
        lw=1.2,
        color=colors[workers],
        label=f'{workers} workers, rate {lr:g}',
      )
  axes.axhline(0, lw=0.8, color='0.6')
  axes.set(
    xlabel='sequences in a step, of all workers',
    xscale='log',
    ylabel="loss above averaged Muon's at its best rate, %",
  )
  axes.set_xticks(ticks, map(str, ticks))
  axes.minorticks_off()
  axes.legend(frameon=False, fontsize=8)
  picture.save(figure, path)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('what', choices=['run', 'table', 'plot', 'time'])
  parser.add_argument('settings', nargs='*', type=parse, metavar='KEY=VALUES')
  parser.add_argument('--row', action='append', choices=ROWS)
  parser.add_argument('--rounds', type=int, default=5, help='of time')
  parser.add_argument('--file', type=pathlib.Path, default=RESULTS)
  args = parser.parse_intermixed_args()
  root = pathlib.Path(__file__).parents[1]
  sys.path[:0] = [str(root), str(root / 'examples')]
  if args.what == 'run' and (args.settings or args.row):
    rows = [ROWS[name] for name in args.row or []] or [{}]
    run(
      args.file,
      [
        {**row, **settings}
        for settings in grid(**dict(args.settings))
        for row in rows
      ],
    )
  elif args.what == 'run':
    run(
      args.file,
      [{**row, 'seed': seed} for row in ROWS.values() for seed in range(3)],
    )
  elif args.what == 'table':
    table(read(args.file))
  elif args.what == 'time':
    measured = measure_seconds(args.rounds)
    SECONDS.write_text(json.dumps(measured, indent=1) + '\n')
  else:
    plot(read(args.file), root / 'docs' / 'muon.png')
    plot_batches(read(args.file), root / 'docs' / 'batches.png')


if __name__ == '__main__':
  main()
