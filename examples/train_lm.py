"""Trains a byte-level GPT on real text; workers send 0.4 % of a gradient.

    python examples/train_lm.py                    # demo_muon, 4 workers
    python examples/train_lm.py --compare          # beside AdamW and Muon
    python examples/train_lm.py --optimizer demo   # DeMo, published rule
    python examples/train_lm.py --resume           # from the last checkpoint
    python examples/train_lm.py --overwrite        # or from the start
    python examples/launch_local.py -n 4 -- python examples/train_lm.py
    python examples/train_lm.py --relay tcp://127.0.0.1:7077 --rank 0

With several devices there is one worker per device, in one process or in many
(cluster.py says how they find each other); with one, workers are simulated.
With a relay (`python -m demo_optax.remote --workers 4`) each worker is a run of
its own, which may end and start again while the others train.
SIGTERM or Ctrl-C, to one process or to all, ends the run after a step, which is
saved.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import cluster
import jax
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
from optax import contrib

import demo_optax
from demo_optax import checkpoint, recipes

# Peak learning rates of matrices and of other leaves, tuned on this example.
RATES = {'demo-muon': (2e-3, 6e-3), 'demo': (2e-3, 2e-3),
         'muon': (2e-2, 1.2e-2), 'adamw': (2e-3, 2e-3)}
AVERAGED = ('adamw', 'muon')  # all-reduce their gradients
SIZES = {'vocab': 'tokens there are', 'context': 'bytes of a sequence',
         'width': 'of the residual stream', 'layers': 'transformer blocks',
         'heads': 'of attention'}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )

  def add(flag: str, words: str, **options: Any) -> None:
    shown = '; default: %(default)s' if options.get('default') else ''
    parser.add_argument(flag, help=words + shown, **options)

  add('--optimizer', 'how to train', choices=RATES, default='demo-muon')
  add('--compare', 'train by adamw and muon as well', action='store_true')
  add('--lr', 'peak learning rate; default: tuned', type=float)
  add('--other-lr', 'that of embeddings, head, norms and biases', type=float)
  add('--topk', 'coefficients sent of each chunk of 64x64', type=int)
  add('--exchange', 'all_to_all: for many workers', default='all_gather',
      choices=['all_gather', 'all_to_all', 'auto'])
  add('--warmup', 'steps in which the rate rises', type=int, default=40)
  add('--workers', 'how many; default: one per device, or 4 on one', type=int,
      default=os.environ.get('DEMO_WORKERS'))
  env = os.environ.get
  add('--relay', 'tcp://HOST:PORT: this run is one worker of several',
      default=env('DEMO_RELAY'))
  add('--rank', 'number of this worker, with --relay', type=int,
      default=env('DEMO_RANK', 0))
  add('--keys', "file of this worker's keys, with --relay")
  add('--data', 'text file or folder; default: Python help topics')
  add('--out', 'folder for checkpoints, records, picture', default='runs/lm')
  add('--steps', 'of training', type=int, default=800)
  add('--batch', 'sequences a step, of all workers', type=int, default=16)
  add('--seed', 'of parameters and batches; default: 0', type=int, default=0)
  add('--eval-every', 'steps between validations', type=int, default=200)
  add('--save-every', 'steps between checkpoints', type=int, default=400)
  add('--save-timeout', 'seconds to wait for one', type=int, default=300)
  add('--check-every', 'steps between comparisons of the copies of all'
      ' parameters', type=int, default=200)
  add('--resume', 'continue from the last checkpoint; auto: if there is one',
      nargs='?', const='must', choices=['must', 'auto'])
  add('--overwrite', 'remove former checkpoints', action='store_true')
  add('--resize', 'to another number of workers', action='store_true')
  cluster.add_flags(parser)
  for field in dataclasses.fields(GPTConfig):
    add(f'--{field.name}', SIZES[field.name], type=int, default=field.default)
  args = parser.parse_args(argv)
  if args.resume and (args.overwrite or args.compare):
    parser.error('--resume goes with neither --overwrite nor --compare.')
  if args.width % args.heads:
    parser.error(f'--heads {args.heads} must divide --width {args.width}.')
  return args


# The optimizer and a step -----------------------------------------------------


def make_optimizer(
    args: argparse.Namespace, workers: demo_optax.Workers
) -> optax.GradientTransformation:
  """The optimizer; its `update` takes one worker's gradient."""
  rate, other_rate = (
      optax.warmup_cosine_decay_schedule(
          0.0, given or tuned, min(args.warmup, args.steps // 2), args.steps,
          end_value=0.1 * (given or tuned))
      for given, tuned in zip((args.lr, args.other_lr), RATES[args.optimizer])
  )
  clip = optax.clip_by_global_norm(1.0)
  if args.optimizer in AVERAGED:
    inner = optax.adamw(rate, b2=0.95)
    if args.optimizer == 'muon':
      inner = contrib.muon(
          rate, adam_learning_rate=other_rate, adam_b2=0.95,
          muon_weight_dimension_numbers=recipes.muon_dimension_numbers)
    return optax.chain(demo_optax.average(workers=workers), clip, inner)
  # Each worker's gradient is clipped, then its compressed update exchanged.
  options = {'workers': workers, 'exchange': args.exchange,
             'compressor': compressor_of(args)}
  if args.optimizer == 'demo':
    exchange = demo_optax.demo(rate, decay=0.99, **options)
  else:
    exchange = demo_optax.demo_muon(
        rate, adam_learning_rate=other_rate, **options)
  return optax.chain(demo_optax.per_worker(clip, workers=workers), exchange)


def compressor_of(args: argparse.Namespace) -> Any:
  """What is sent; `plan` and `Checkpointer` need it as well."""
  if args.optimizer in AVERAGED:
    return None
  if args.optimizer == 'demo':
    return demo_optax.dct_topk(topk=args.topk or 32)
  return lambda params: recipes.muon_compressors(params, args.topk or 64)


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
  ).mean()


def make_train_step(workers: demo_optax.Workers) -> Callable[..., jax.Array]:
  """`(model, optimizer, tokens) -> loss`, the mean over all workers."""

  @demo_optax.data_parallel(workers, donate_argnums=(0, 1))
  def train_step(
      model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array
  ) -> jax.Array:
    # Written for one worker: its rows of the batch, its loss, its gradient.
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)  # the exchange
    return loss

  return train_step


# Workers, data, evaluation ----------------------------------------------------


def make_workers(args: argparse.Namespace) -> demo_optax.Workers:
  """One worker per device where there are several, else simulated ones."""
  count, devices = args.workers, jax.devices()
  if args.relay:
    return demo_optax.Workers.remote(
        args.relay, rank=args.rank, count=count or 4, keys=args.keys)
  if jax.process_count() > 1 and count not in (None, len(devices)):
    raise SystemExit(
        f'--workers {count}: with several processes there is one worker for'
        f' each of the {len(devices)} devices. Leave it out.')
  count = count or (len(devices) if len(devices) > 1 else 4)
  if count > len(devices) or len(devices) == 1:
    return demo_optax.Workers.simulated(count)
  mesh = jax.make_mesh(
      (count,), ('data',), devices=devices[:count],
      axis_types=(jax.sharding.AxisType.Auto,),
  )
  return demo_optax.Workers.on_mesh(mesh, 'data')


def make_feed(
    args: argparse.Namespace, train: np.ndarray, workers: demo_optax.Workers
) -> Callable[[int], Any]:
  """`step -> int32 [batch, context + 1]`, on a mesh with its rows in place."""
  size, context = args.batch, args.context
  if args.relay:
    return lambda step: np.split(
        text.batch(train, args.seed, step, size, context), workers.count
    )[args.rank]
  if workers.mesh is None:
    return lambda step: text.batch(train, args.seed, step, size, context)
  shape = size, context + 1
  sharding = NamedSharding(workers.mesh, P(workers.axis_name))

  def feed(step: int) -> jax.Array:
    rows = text.batch(train, args.seed, step, size, context)
    return jax.make_array_from_callback(shape, sharding, lambda at: rows[at])

  return feed


@nnx.jit
def eval_step(model: GPT, tokens: jax.Array) -> jax.Array:
  return loss_fn(model, tokens)


def evaluate(model: GPT, batches: np.ndarray) -> float:
  return float(np.mean([eval_step(model, b) for b in batches]))


def generate(model: GPT, prompt: np.ndarray, length: int, seed: int) -> bytes:
  """Continues a prompt of at least `context` bytes."""
  context = model.config.context

  @nnx.jit
  def next_byte(model: GPT, window: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, model(window)[0, -1] / 0.7)

  tokens = list(prompt.astype(np.int32))
  for key in jax.random.split(jax.random.key(seed), length):
    window = np.array(tokens[-context:], np.int32)[None]
    tokens.append(int(next_byte(model, window, key)))
  return bytes(tokens[len(prompt):])


# Checkpoints ------------------------------------------------------------------


def everything(
    args: argparse.Namespace, model: GPT, optimizer: nnx.Optimizer
) -> dict[str, Any]:
  """The state of a run; its batches are a function of flags and step."""
  data = {'seed': args.seed, 'batch': args.batch, 'context': args.context,
          'data': str(args.data)}
  return {'model': model, 'optimizer': optimizer, 'data': data}


def restore(
    args: argparse.Namespace, checkpoints: checkpoint.Checkpointer, model: GPT,
    optimizer: nnx.Optimizer,
) -> int:
  """Restores the last checkpoint; returns the number of steps done."""
  wanted = everything(args, model, optimizer)['data']
  try:
    step, state = checkpoints.restore(resize=args.resize)
    for flag, saved in state['data'].items():
      if saved != wanted[flag]:
        raise ValueError(f'the checkpoint is of a run with --{flag} {saved}.')
  except (FileNotFoundError, ValueError) as error:
    checkpoints.close()
    hint = ' Here: --resize.' if 'resize=True' in str(error) else ''
    raise SystemExit(f'--resume: {error}{hint}') from error
  nnx.update(model, nnx.state(state['model']))
  nnx.update(optimizer, nnx.state(state['optimizer']))
  return step


def remove_former(folder: pathlib.Path, overwrite: bool) -> None:
  """Removes the checkpoints of the run before, if the flags allow it."""
  if folder.exists() and any(folder.iterdir()) and not overwrite:
    raise SystemExit(
        f'There are checkpoints in {folder}: give --resume, --overwrite, or'
        ' another --out.')
  multihost_utils.sync_global_devices('all have looked for checkpoints')
  if cluster.is_main():
    shutil.rmtree(folder, ignore_errors=True)
  multihost_utils.sync_global_devices('former checkpoints are removed')


# The run ----------------------------------------------------------------------


def train(
    args: argparse.Namespace, stop: cluster.StopSignal
) -> dict[str, Any]:
  """One training run; returns its records and its summary."""
  corpus = text.load(args.data)
  valid = text.windows(corpus.valid, 64, args.context)
  name = args.optimizer
  own = f'{name}-{args.rank}' if args.relay else name
  folder = pathlib.Path(args.out).absolute() / own
  if not args.resume:
    remove_former(folder / 'checkpoints', args.overwrite)
  workers = make_workers(args)
  if args.batch % workers.count:
    raise SystemExit(
        f'--batch {args.batch} must be a multiple of {workers.count} workers.')
  feed = make_feed(args, corpus.train, workers)
  config = GPTConfig(**{
      f.name: getattr(args, f.name) for f in dataclasses.fields(GPTConfig)})
  model = GPT(config, nnx.Rngs(args.seed))
  optimizer = nnx.Optimizer(model, make_optimizer(args, workers), wrt=nnx.Param)
  train_step = make_train_step(workers)
  params = nnx.state(model, nnx.Param)
  compressor = compressor_of(args)
  plan = demo_optax.plan(params, compressor, workers, exchange=args.exchange)
  checkpoints = checkpoint.Checkpointer(
      folder / 'checkpoints', everything(args, model, optimizer),
      timeout=args.save_timeout,
  )
  start = 0
  if args.resume == 'must' or checkpoints.steps:
    start = restore(args, checkpoints, model, optimizer)
    say(f'Going on after step {start}.')
  kind = '' if workers.mesh else f' {workers.kind}'
  say(f'{name}: {plan.size:,} parameters, {workers.count}{kind} workers on the'
      f' devices of {jax.process_count()} process(es),'
      f' {len(corpus.train):,} bytes of training text; every worker sends'
      f' {plan.sent_bytes / 1e3:,.1f} kB a step')

  about = {'config': vars(args), 'parameters': plan.size}
  seconds: list[float] = []
  stopped = 0
  stop.begin()
  if start < args.steps:
    say('Compiling the first step.')
  with metrics.Metrics(folder, about, start) as log:
    records = log.kept  # of the steps before, in a run that is resumed
    step = start
    while step < args.steps:
      if stopped := stop.after(step):
        if step > start and step not in checkpoints.steps:
          checkpoints.save(step, everything(args, model, optimizer))
        break
      began = time.perf_counter()
      loss = float(train_step(model, optimizer, feed(step)))
      seconds.append(time.perf_counter() - began)
      # With a relay, more than one step if this worker was late.
      done = int(optimizer.step[...])
      last = done >= args.steps
      record = {'step': done, 'loss': loss, 'sent': plan.sent_bytes * done,
                'received': plan.received_bytes * done}
      if name not in AVERAGED:
        record |= metrics.about_exchange(optimizer)
      if done % args.eval_every == 0 or last:
        record['valid_loss'] = evaluate(model, valid)
        say(f'step {done} of {args.steps}: loss {loss:.3f}, validation loss'
            f' {record["valid_loss"]:.3f}, {sum(seconds):.0f} s so far')
      if done % args.check_every == 0 or last:
        parted = demo_optax.check_replicas(
            (nnx.state(model, nnx.Param), nnx.state(optimizer)), workers)
        if parted:
          raise SystemExit(f'After step {done} copies differ: {parted}')
      if done % args.save_every == 0 or last:
        checkpoints.save(done, everything(args, model, optimizer))
      records.append(record)
      log.write(record)
      step = done
  checkpoints.close()
  if stopped:
    by = signal.Signals(stopped).name
    say(f'Stopped by {by} after step {step}, which is saved: go on with'
        ' --resume.' if step > start else f'Stopped by {by} before a step.')
    return {'name': name, 'stopped': stopped}

  sample = generate(model, corpus.valid[: args.context], 200, args.seed)
  say(f'\nA sample of {name}:\n{sample.decode(errors="replace")}\n')
  return {
      'name': name, 'stopped': 0, 'records': records,
      'valid_loss': records[-1].get('valid_loss') if records else None,
      'steps_per_second': 1 / np.median(seconds[1:]) if seconds[1:] else None,
      'plan': plan,
  }


def say(words: str) -> None:
  if cluster.is_main():
    print(words, flush=True)


def draw(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Loss against steps, and against bytes sent."""
  plt = picture.pyplot()
  runs = [run for run in runs if run['records']]
  if plt is None or not runs:
    return
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
  for number, run in enumerate(runs):
    losses = picture.smooth([r['loss'] for r in run['records']])
    checks = [r for r in run['records'] if 'valid_loss' in r]
    for axes, key, unit in ((left, 'step', 1), (right, 'sent', 1e6)):
      axes.plot([r[key] / unit for r in run['records']], losses,
                color=f'C{number}', label=run['name'])
      axes.plot([r[key] / unit for r in checks],
                [r['valid_loss'] for r in checks], 'o', color=f'C{number}')
  left.set(xlabel='step', ylabel='loss (nats per byte); held-out: dots')
  right.set(xlabel='MB sent per worker')
  if any(run['plan'].sent_bytes for run in runs):
    right.set_xscale('log')
  left.legend(frameon=False)
  picture.save(figure, path)


def report(runs: list[dict[str, Any]]) -> None:
  """All steps of a worker, beside what an all-reduce would have moved."""
  row = '{:<13}{:>11}{:>10}{:>13}{:>20}{:>12}{:>12}'.format
  print(row('', 'validation', 'sent', 'received', 'all-reduce', '', 'steps'))
  print(row('', 'loss', 'MB', 'MB', 'bfloat16', 'float32', 'per s'))
  for run in runs:
    plan, records = run['plan'], run['records']
    steps = records[-1]['step'] if records else 0
    moved = (plan.sent_bytes, plan.received_bytes, plan.dense_bytes(2),
             plan.dense_bytes(4))
    loss, speed = (
        '-' if x is None else f'{x:.{digits}f}'
        for x, digits in ((run['valid_loss'], 4), (run['steps_per_second'], 1)))
    print(row(run['name'], loss, *(f'{x * steps / 1e6:,.1f}' for x in moved),
              speed))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  args = parse_args(argv)
  cluster.join(args)
  names = [args.optimizer, *(AVERAGED if args.compare else ())]
  runs = []
  with cluster.failing_at_once(), cluster.StopSignal() as stop:
    for name in dict.fromkeys(names):
      of = {'optimizer': name}
      if name != args.optimizer:  # at its tuned rates
        of |= {'lr': None, 'other_lr': None}
      runs.append(train(argparse.Namespace(**{**vars(args), **of}), stop))
      if runs[-1]['stopped']:
        sys.exit(128 + runs[-1]['stopped'])
  if cluster.is_main():
    draw(runs, pathlib.Path(args.out) / 'loss.png')
    report(runs)
  return runs


if __name__ == '__main__':
  main()
