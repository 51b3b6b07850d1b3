"""Trains a byte-level GPT on real text; workers send 0.4 % of a gradient.

    python examples/train_lm.py                 # demo_muon, 4 workers
    python examples/train_lm.py --compare       # beside AdamW, Muon averaged
    python examples/train_lm.py --optimizer demo      # DeMo, published rule
    python examples/train_lm.py --optimizer diloco    # exchange every 20 steps
    python examples/train_lm.py --resume        # go on from a checkpoint
    python examples/train_lm.py --overwrite     # or start anew
    python examples/launch_local.py -n 4 -- python examples/train_lm.py

With several devices there is one worker per device, in one process or in many
(cluster.py says how they find each other); with one, workers are simulated.
SIGTERM or Ctrl-C, to one process or to all, ends the run after a step, which is
saved; a second Ctrl-C ends a process at once.
"""

import argparse
import dataclasses
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import cluster
import flags
import jax
import methods
import metrics
import numpy as np
import optax
import picture
import text
from flax import nnx
from gpt import GPT, GPTConfig
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint

try:
  from tqdm import tqdm
except ImportError:  # a progress bar is a convenience
  tqdm = None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  parser = flags.Parser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--compare', action='store_true',
      help='also train by adamw and muon, at their tuned rates; draw all')
  add('--workers', type=flags.whole(1),
      help='default: one per device, or 4 on one device')
  add('--data', type=flags.not_empty, metavar='FILE',
      help='text file or folder; default: Python help topics')
  add('--out', type=flags.folder, default='runs/lm',
      help='folder for all that is written')
  add('--steps', type=flags.whole(1), default=800)
  add('--batch', type=flags.whole(1), default=16,
      help='sequences per step, all workers')
  add('--microbatches', type=flags.whole(1), default=1)
  add('--seed', type=flags.whole(0), default=0)
  add('--eval-every', type=flags.whole(1), default=200)
  add('--save-every', type=flags.whole(1), default=400)
  add('--save-timeout', type=flags.whole(1), default=300, metavar='SECONDS',
      help='in which a checkpoint is whole, or has failed')
  add('--check-every', type=flags.whole(1), default=200,
      help='steps between comparisons of all copies of the parameters')
  add('--resume', nargs='?', const='must', choices=['must', 'auto'],
      help='from the last checkpoint; auto: if there is one')
  add('--overwrite', action='store_true',
      help='start anew, and remove the checkpoints of the run before')
  add('--resize', action='store_true',
      help='the checkpoint may be of another number of workers')
  methods.add_flags(parser, 'demo-muon')
  cluster.add_flags(parser)
  for field in dataclasses.fields(GPTConfig):
    least = 256 if field.name == 'vocab' else 1  # tokens are bytes
    most = 1000 if field.name == 'layers' else 2**20
    add(f'--{field.name}', type=flags.whole(least, most), default=field.default)
  args = methods.settle(parser.parse_args(argv))
  if args.compare and args.resume:
    parser.error('--compare trains both from the start: leave out --resume.')
  if args.resume and args.overwrite:
    parser.error('--overwrite starts anew, --resume goes on: leave one out.')
  if args.width % args.heads:
    parser.error(
        f'--heads {args.heads} does not divide --width {args.width}: give'
        f' --heads {flags.divisors(args.width)}, or a multiple of'
        f' {args.heads} as --width.'
    )
  methods.check(args)
  cluster.check(args)
  return args


# What a training run is made of -----------------------------------------------


def make_workers(count: int | None) -> demo_optax.Workers:
  """One worker per device where there are several, else simulated ones."""
  devices = jax.devices()
  if jax.process_count() > 1 and count not in (None, len(devices)):
    flags.fail(
        f'--workers {count}: {jax.process_count()} processes have'
        f' {len(devices)} devices, and so many workers: leave it out.'
    )
  count = count or (len(devices) if len(devices) > 1 else 4)
  if count > len(devices) or len(devices) == 1:
    return demo_optax.Workers.simulated(count)
  mesh = jax.make_mesh(
      (count,), ('data',), devices=devices[:count],
      axis_types=(jax.sharding.AxisType.Auto,),
  )
  return demo_optax.Workers.on_mesh(mesh, 'data')


def load(args: argparse.Namespace) -> tuple[text.Corpus, np.ndarray]:
  """The corpus, and windows of what is held out."""

  def read() -> tuple[text.Corpus, np.ndarray]:
    if args.data and not pathlib.Path(args.data).exists():
      raise ValueError('there is none: give a text file, or a folder of them.')
    corpus = text.load(args.data)
    if len(corpus.train) <= args.context:
      raise ValueError(
          f'the training text of {len(corpus.train)} bytes holds no window of'
          f' {args.context + 1}: give more data, or a shorter --context.'
      )
    return corpus, text.windows(corpus.valid, 64, args.context)

  return flags.try_to(read, f'--data {args.data}: ' if args.data else '')


def make_feed(
    args: argparse.Namespace, train: np.ndarray, workers: demo_optax.Workers
) -> Callable[[int], Any]:
  """`step -> int32 [batch, context + 1]`; a process makes its own rows only."""
  size, context = args.batch, args.context
  if workers.mesh is None:
    return lambda step: text.batch(train, args.seed, step, size, context)
  shape = size, context + 1
  sharding = NamedSharding(workers.mesh, P(workers.axis_name))
  own = [rows for rows, _ in
         sharding.addressable_devices_indices_map(shape).values()]
  first = min(rows.start or 0 for rows in own)
  last = max(size if rows.stop is None else rows.stop for rows in own)

  def feed(step: int) -> jax.Array:
    rows = text.batch(
        train, args.seed, step, size, context, slice(first, last)
    )
    return jax.make_array_from_process_local_data(sharding, rows, shape)

  return feed


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
  logits = model(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
  )
  return losses.mean()


@nnx.jit
def eval_step(model: GPT, tokens: jax.Array) -> jax.Array:
  return loss_fn(model, tokens)


def evaluate(model: GPT, batches: np.ndarray) -> float:
  return float(np.mean([eval_step(model, b) for b in batches]))


def generate(
    model: GPT, prompt: np.ndarray, length: int, seed: int
) -> bytes:
  """Continues a prompt of at least `context` bytes."""
  context = model.config.context

  @nnx.jit
  def next_byte(model: GPT, window: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, model(window)[0, -1] / 0.7)

  tokens = list(prompt.astype(np.int32))
  for key in jax.random.split(jax.random.key(seed), length):
    window = np.array(tokens[-context:], np.int32)[None]
    tokens.append(int(next_byte(model, window, key)))
  return bytes(tokens[len(prompt) :])


# Checkpoints ------------------------------------------------------------------


def everything(
    args: argparse.Namespace, model: GPT, optimizer: nnx.Optimizer
) -> dict[str, Any]:
  """What a run goes on from; the data is a function of flags and step."""
  data = {'seed': args.seed, 'batch': args.batch, 'context': args.context,
          'data': str(args.data)}
  return {'model': model, 'optimizer': optimizer, 'data': data}


def restore(
    args: argparse.Namespace,
    checkpoints: checkpoint.Checkpointer,
    model: GPT,
    optimizer: nnx.Optimizer,
) -> int:
  """Restores the last checkpoint; returns the number of steps done."""
  wanted = everything(args, model, optimizer)['data']
  try:
    step, state = checkpoints.restore(resize=args.resize)
    for flag, saved in state['data'].items():
      if saved != wanted[flag]:
        raise ValueError(
            f'The checkpoint is of a run with --{flag} {saved}, and this is'
            f' --{flag} {getattr(args, flag)}: its data would be another.'
        )
  except (FileNotFoundError, ValueError) as error:
    checkpoints.close()
    hint = ' Here: --resize.' if 'resize=True' in str(error) else ''
    raise SystemExit(f'--resume: {error}{hint}') from error
  nnx.update(model, nnx.state(state['model']))
  nnx.update(optimizer, nnx.state(state['optimizer']))
  return step


def check(
    model: GPT, optimizer: nnx.Optimizer, workers: demo_optax.Workers, step: int
) -> None:
  """Stops a run whose workers have parted in what they share."""
  state = nnx.state(model, nnx.Param), nnx.state(optimizer)
  found = demo_optax.check_replicas(state, workers)
  if found:
    lines = [f'  {d.leaf}: devices {d.devices} differ' for d in found]
    raise SystemExit(
        '\n'.join([f'After step {step} not all have the same parameters:',
                   *lines, 'Go on from a checkpoint before that.'])
    )


# The run ----------------------------------------------------------------------


def config_of(args: argparse.Namespace) -> GPTConfig:
  names = [field.name for field in dataclasses.fields(GPTConfig)]
  return GPTConfig(**{name: getattr(args, name) for name in names})


def train(
    args: argparse.Namespace, stop: cluster.StopSignal
) -> dict[str, Any]:
  """One training run; returns its records and its summary."""
  corpus, valid = load(args)
  name = args.optimizer
  folder = pathlib.Path(args.out).absolute() / name
  if not args.resume:
    remove_former(folder / 'checkpoints', args.overwrite)
  workers = make_workers(args.workers)
  flags.check_batch(args.batch, workers.count, args.microbatches)
  params = nnx.state(
      nnx.eval_shape(lambda: GPT(config_of(args), nnx.Rngs(0))), nnx.Param
  )
  cost = flags.try_to(lambda: methods.count_bytes(args, params, workers))
  feed = make_feed(args, corpus.train, workers)
  model = GPT(config_of(args), nnx.Rngs(args.seed))
  optimizer = nnx.Optimizer(
      model, methods.make_optimizer(args, workers), wrt=nnx.Param
  )
  train_step = methods.make_train_step(loss_fn, workers, args.microbatches)
  checkpoints = checkpoint.Checkpointer(
      folder / 'checkpoints', everything(args, model, optimizer),
      timeout=args.save_timeout,
  )
  start = 0
  if args.resume == 'must' or checkpoints.steps:
    start = restore(args, checkpoints, model, optimizer)
    say(f'Going on after step {start}.')

  size = sum(x.size for x in jax.tree.leaves(params))
  where = (
      'simulated' if workers.mesh is None
      else f'on the devices of {jax.process_count()} process(es)'
  )
  say(
      f'{name}: {size:,} parameters, {workers.count} workers {where},'
      f' {len(corpus.train):,} bytes of training text; every worker sends'
      f' {cost["sent"] / 1e3:,.1f} kB a step'
  )
  about = {'config': vars(args), 'parameters': size, 'bytes': cost}
  records: list[dict[str, Any]] = []
  seconds: list[float] = []
  stopped = 0
  stop.begin()
  with metrics.Metrics(folder, about, start) as log:
    bar = progress(start, args.steps, name)
    for step in range(start, args.steps):
      if stopped := stop.after(step):
        if step > start and step not in checkpoints.steps:
          checkpoints.save(step, everything(args, model, optimizer))
        break
      tokens = feed(step)
      began = time.perf_counter()
      loss = float(train_step(model, optimizer, tokens))
      seconds.append(time.perf_counter() - began)
      done = step + 1
      last = done == args.steps
      record = {'step': done, 'loss': loss, 'sent': cost['sent'] * done,
                'received': cost['received'] * done}
      if name not in methods.AVERAGED:
        record |= metrics.about_exchange(optimizer)
      if done % args.eval_every == 0 or last:
        record['valid_loss'] = evaluate(model, valid)
      if done % args.check_every == 0 or last:
        check(model, optimizer, workers, done)
      if done % args.save_every == 0 or last:
        checkpoints.save(done, everything(args, model, optimizer))
      records.append(record)
      log.write(record)
      show(bar, record, cost)
  checkpoints.close()
  if stopped:
    by = signal.Signals(stopped).name
    say(f'Stopped by {by} after step {step}, which is saved: go on with'
        ' --resume.' if step > start else f'Stopped by {by} before a step.')
    return {'name': name, 'stopped': stopped}

  sample = generate(model, corpus.valid[: args.context], 200, args.seed)
  say(f'\nA sample of {name}:\n{sample.decode(errors="replace")}\n')
  return {
      'name': name,
      'stopped': 0,
      'records': records,
      'valid_loss': records[-1]['valid_loss'] if records else None,
      'steps_per_second': 1 / np.median(seconds[1:]) if seconds[1:] else None,
      **cost,
  }


def formers(folder: pathlib.Path) -> str:
  return (
      f'There are checkpoints in {folder}: go on with --resume, start anew'
      ' with --overwrite, or give another --out.'
  )


def remove_former(folder: pathlib.Path, overwrite: bool) -> None:
  """Removes the checkpoints of the run before, if that was asked for."""
  if folder.exists() and any(folder.iterdir()) and not overwrite:
    raise SystemExit(formers(folder))
  multihost_utils.sync_global_devices('all have looked for checkpoints')
  if cluster.is_main():
    shutil.rmtree(folder, ignore_errors=True)
  multihost_utils.sync_global_devices('former checkpoints are removed')


def progress(start: int, steps: int, name: str) -> Any:
  """A bar where somebody looks at it; lines in logs."""
  if tqdm and cluster.is_main() and sys.stderr.isatty():
    return tqdm(initial=start, total=steps, desc=name, unit='step')
  return None


def show(bar: Any, record: dict[str, Any], cost: dict[str, float]) -> None:
  if bar is None:
    if 'valid_loss' in record:
      say(f'step {record["step"]}: loss {record["loss"]:.3f}, validation'
          f' {record["valid_loss"]:.3f}')
    return
  words = [f'loss {record["loss"]:.3f}', f'{cost["sent"] / 1e3:,.1f} kB/step']
  if 'sent_energy' in record:
    words.append(f'{record["sent_energy"]:.0%} of the energy')
  if record.get('num_excluded'):
    words.append(f'{record["num_excluded"]} left out')
  bar.set_postfix_str(', '.join(words), refresh=False)
  bar.update(record['step'] - bar.n)


def say(text: str) -> None:
  if cluster.is_main():
    print(text, flush=True)


def draw(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Loss against steps, and against bytes sent."""
  plt = picture.pyplot()
  if plt is None or not any(run['records'] for run in runs):
    return
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
  for number, run in enumerate(runs):
    if not run['records']:
      continue
    losses = smooth([r['loss'] for r in run['records']])
    steps = [r['step'] for r in run['records']]
    sent = [r['sent'] / 1e6 for r in run['records']]
    checks = [r for r in run['records'] if 'valid_loss' in r]
    color = f'C{number}'
    left.plot(steps, losses, color=color, label=run['name'])
    left.plot([r['step'] for r in checks], [r['valid_loss'] for r in checks],
              'o', color=color, label=f'{run["name"]}, held-out text')
    right.plot(sent, losses, color=color)
    right.plot([r['sent'] / 1e6 for r in checks],
               [r['valid_loss'] for r in checks], 'o', color=color)
  left.set(xlabel='step', ylabel='loss (nats per byte)')
  right.set(xlabel='MB sent per worker')
  if any(run['sent'] for run in runs):
    right.set_xscale('log')
  left.legend(frameon=False)
  picture.save(figure, path)


def smooth(losses: list[float]) -> np.ndarray:
  """Running mean over 10 steps."""
  padded = np.concatenate([np.full(9, losses[0]), losses])
  return np.convolve(padded, np.full(10, 0.1), 'valid')


def report(runs: list[dict[str, Any]]) -> None:
  print(f'{"":<18}{"validation":>11}{"sent":>12}{"received":>12}'
        f'{"less sent than":>16}{"steps":>8}')
  print(f'{"":<18}{"loss":>11}{"kB/step":>12}{"kB/step":>12}'
        f'{"AdamW-DDP":>16}{"per s":>8}')
  for run in runs:
    loss = '-' if run['valid_loss'] is None else f'{run["valid_loss"]:.4f}'
    speed = run['steps_per_second']
    speed = '-' if speed is None else f'{speed:.1f}'
    times = f'{run["adamw"] / run["sent"]:.1f}x' if run['sent'] else '-'
    print(f'{run["name"]:<18}{loss:>11}{run["sent"] / 1e3:>12,.1f}'
          f'{run["received"] / 1e3:>12,.1f}{times:>16}{speed:>8}')


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  args = parse_args(argv)
  cluster.join(args)
  todo = [args]
  if args.compare:
    todo += [methods.other(args, name) for name in methods.AVERAGED
             if name != args.optimizer]
  runs = []
  with cluster.failing_at_once(), cluster.StopSignal() as stop:
    for run_args in todo:
      runs.append(train(run_args, stop))
      if runs[-1]['stopped']:
        break
  if runs[-1]['stopped']:
    sys.exit(128 + runs[-1]['stopped'])
  if cluster.is_main():
    draw(runs, pathlib.Path(args.out) / 'loss.png')
    report(runs)
  return runs


if __name__ == '__main__':
  main()
