"""Trains a byte-level GPT on text; a worker sends 0.9 % of its gradient.

    python examples/train_lm.py                    # demo_muon, 4 workers
    python examples/train_lm.py --compare          # and AdamW, and Muon
    python examples/train_lm.py --optimizer demo   # DeMo, published rule
    python examples/train_lm.py --resume           # from the last checkpoint
    python examples/train_lm.py --overwrite        # or from the start
    python examples/launch_local.py -n 4 -- python examples/train_lm.py
    python examples/train_lm.py --relay tcp://127.0.0.1:7077 --workers 4

With several devices there is one worker per device, in one process or in many
(cluster.py connects them). On one device the workers are simulated. With a
relay (`python -m demo_optax.remote --workers 4`) each worker is a separate run,
which can end and start again while the others train. SIGTERM or Ctrl-C ends the
run after the current step, and saves it.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import cluster
import flags
import jax
import metrics
import numpy as np
import optax
import picture
import text
from flax import nnx
from gpt import GPT, GPTConfig, generate
from optax import contrib

import demo_optax
from demo_optax import checkpoint, recipes

# Peak learning rates of matrices and of other leaves, tuned on this example.
RATES = {
  'demo_muon': (2e-2, 1.2e-2),
  'demo': (2e-3, 2e-3),
  'muon': (2e-2, 1.2e-2),
  'adamw': (2e-3, 2e-3),
}
AVERAGED = ('adamw', 'muon')  # all-reduce their gradients
SIZES = {
  'vocab': 'number of tokens',
  'context': 'bytes per sequence',
  'width': 'size of the residual stream',
  'layers': 'number of transformer blocks',
  'heads': 'number of attention heads',
}


def parse_args(
  argv: list[str] | None = None, words: str | None = __doc__
) -> argparse.Namespace:
  parser = flags.make_parser(words)
  above_0 = flags.whole(1)

  def add(flag: str, words: str, **options: Any) -> None:
    shown = '; default: %(default)s' if options.get('default') else ''
    parser.add_argument(flag, help=words + shown, **options)

  env = os.environ.get
  add('--optimizer', 'training method', choices=RATES, default='demo_muon')
  add('--compare', 'train with adamw and muon as well', action='store_true')
  add('--lr', 'peak learning rate; default: tuned', type=flags.positive)
  add(
    '--other-lr',
    'same for embeddings, head, norms, biases',
    type=flags.positive,
  )
  add(
    '--topk',
    'send the largest coefficients, this many per chunk of 64x64',
    type=flags.whole(1, 4096),
  )
  add(
    '--exchange',
    'all_to_all: for many workers',
    default='all_gather',
    choices=['all_gather', 'all_to_all'],
  )
  add(
    '--warmup',
    'steps of learning rate warm-up',
    type=flags.whole(0),
    default=40,
  )
  add(
    '--workers',
    'number of them; default: one per device, or 4 on one',
    type=above_0,
    default=env('DEMO_WORKERS'),
  )
  add(
    '--relay',
    'tcp://HOST:PORT; this run is then one of --workers',
    type=relay_address,
    default=env('DEMO_RELAY'),
  )
  add(
    '--rank',
    'number of this worker, with --relay, from 0',
    type=flags.whole(0),
    default=env('DEMO_RANK', 0),
  )
  add(
    '--keys',
    'file with the keys of this worker, with --relay',
    type=flags.existing,
  )
  add(
    '--data',
    'text file or folder; default: Python help topics',
    type=flags.existing,
  )
  add('--out', 'folder for checkpoints, records, picture', default='runs/lm')
  add('--steps', 'number of training steps', type=above_0, default=800)
  add('--batch', 'sequences per step, all workers', type=above_0, default=16)
  add(
    '--seed',
    'of parameters and batches; default: 0',
    type=flags.whole(0),
    default=0,
  )
  add('--eval-every', 'steps between validations', type=above_0, default=200)
  add('--save-every', 'steps between checkpoints', type=above_0, default=400)
  add(
    '--save-timeout', 'seconds that a save may take', type=above_0, default=300
  )
  add(
    '--check-every',
    'steps between comparisons of all parameter copies',
    type=above_0,
    default=200,
  )
  add(
    '--resume',
    'continue from the last checkpoint; auto: if there is one',
    nargs='?',
    const='must',
    choices=['must', 'auto'],
  )
  add('--overwrite', 'remove earlier checkpoints', action='store_true')
  add('--resize', 'resume with another number of workers', action='store_true')
  cluster.add_flags(parser)
  for field in dataclasses.fields(GPTConfig):
    least = 256 if field.name == 'vocab' else 1  # a token is a byte
    add(
      f'--{field.name}',
      SIZES[field.name],
      type=flags.whole(least),
      default=field.default,
    )
  args = parser.parse_args(argv)
  cluster.check(parser, args)
  if args.resume and (args.overwrite or args.compare):
    parser.error('--resume goes with neither --overwrite nor --compare.')
  if args.width % args.heads:
    parser.error(f'--heads {args.heads} must divide --width {args.width}.')
  if args.relay and args.workers is None:
    parser.error('--relay needs --workers, of which this run is one.')
  if args.relay and args.rank >= args.workers:
    parser.error(
      f'--rank {args.rank}: the workers are numbered from 0 to'
      f' {args.workers - 1}.'
    )
  return args


def relay_address(text: str) -> str:
  """Reads the address of a relay."""
  scheme, _, address = text.partition('://')
  if scheme != 'tcp' or not cluster.is_address(address):
    raise argparse.ArgumentTypeError(
      f'must be tcp://HOST:PORT, with a port from 1 to 65535, got {text!r}.'
    )
  return text


def load_data(args: argparse.Namespace) -> tuple[text.Corpus, np.ndarray]:
  """Loads the text of `--data`, and cuts the held-out part into windows."""
  try:
    corpus = text.load(args.data)
    return corpus, text.windows(corpus.valid, 64, args.context)
  except ValueError as error:
    flags.refuse(f'--data: {error}')


# The optimizer and a step -----------------------------------------------------


def make_optimizer(
  args: argparse.Namespace, workers: demo_optax.Workers
) -> optax.GradientTransformation:
  """The optimizer; its `update` takes one worker's gradient."""
  rate, other_rate = (
    optax.warmup_cosine_decay_schedule(
      0.0,
      given or tuned,
      min(args.warmup, args.steps // 2),
      args.steps,
      end_value=0.1 * (given or tuned),
    )
    for given, tuned in zip((args.lr, args.other_lr), RATES[args.optimizer])
  )
  clip = optax.clip_by_global_norm(1.0)
  if args.optimizer in AVERAGED:
    inner = optax.adamw(rate, b2=0.95)
    if args.optimizer == 'muon':
      inner = contrib.muon(
        rate,
        adam_learning_rate=other_rate,
        adam_b2=0.95,
        muon_weight_dimension_numbers=recipes.muon_dimension_numbers,
      )
    return optax.chain(
      demo_optax.average_gradients(workers=workers), clip, inner
    )
  options = {
    'workers': workers,
    'exchange': args.exchange,
    'compressor': compressor_of(args),
  }
  if args.optimizer == 'demo':
    exchange = demo_optax.demo(rate, decay=0.99, **options)
  else:
    exchange = demo_optax.demo_muon(
      rate, other_learning_rate=other_rate, **options
    )
  return optax.chain(demo_optax.per_worker(clip, workers=workers), exchange)


def compressor_of(args: argparse.Namespace) -> Any:
  """The compressor of `make_optimizer`, for `plan`."""
  if args.optimizer in AVERAGED:
    return None
  if args.optimizer == 'demo':
    return demo_optax.dct_topk(topk=args.topk or 32)
  if args.topk is None:
    return recipes.muon_compressors
  matrix = demo_optax.dct_topk(topk=args.topk, values='sign')
  return lambda params: recipes.muon_compressors(params, matrix)


def make_model(args: argparse.Namespace) -> GPT:
  names = [field.name for field in dataclasses.fields(GPTConfig)]
  config = GPTConfig(**{name: getattr(args, name) for name in names})
  return GPT(config, nnx.Rngs(args.seed))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, tokens[:, 1:]
  ).mean()


def make_train_step(workers: demo_optax.Workers) -> Callable[..., jax.Array]:
  """`(model, optimizer, tokens) -> loss`, the mean over all workers."""

  @demo_optax.data_parallel(
    workers, batch_argnames='tokens', donate_argnums=(0, 1)
  )
  def train_step(
    model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array
  ) -> jax.Array:
    # Written for one worker: its rows of the batch, its loss, its gradient.
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)  # the exchange
    return loss

  return train_step


eval_step = nnx.jit(loss_fn)


def evaluate(model: GPT, batches: np.ndarray) -> float:
  return float(np.mean([eval_step(model, b) for b in batches]))


# Checkpoints ------------------------------------------------------------------


def restore(
  args: argparse.Namespace,
  checkpoints: checkpoint.Checkpointer,
  now: dict[str, Any],
) -> int:
  """Restores the last checkpoint into `now`; returns its step."""
  try:
    step, state = checkpoints.restore(resize=args.resize)
    for name, saved in state['data'].items():
      here = now['data'][name]
      if saved != here:
        raise ValueError(
          f'the checkpoint is of a run with another --{name}: {saved} there,'
          f' {here} here.'
        )
  except (FileNotFoundError, ValueError) as error:
    hint = ' Here: --resize.' if 'resize=True' in str(error) else ''
    flags.refuse(f'--resume: {error}{hint}')
  for name in ('model', 'optimizer'):
    nnx.update(now[name], nnx.state(state[name]))
  return step


# The run ----------------------------------------------------------------------


def train(args: argparse.Namespace, stop: cluster.StopSignal) -> dict[str, Any]:
  """One training run; returns its records and its summary."""
  corpus, valid = load_data(args)
  name = args.optimizer
  own = f'{name}-{args.rank}' if args.relay else name
  folder = pathlib.Path(args.out).absolute() / own
  if not args.resume:
    cluster.remove_checkpoints(folder / 'checkpoints', args.overwrite)
  if args.relay:
    workers = demo_optax.Workers.remote(
      args.relay, rank=args.rank, count=args.workers, keys=args.keys
    )
  else:
    workers = cluster.make_workers(args.workers)
  if args.batch % workers.count:
    flags.refuse(
      f'--batch {args.batch} must be a multiple of {workers.count} workers.'
    )
  feed = text.make_feed(
    corpus.train, args.seed, args.batch, args.context, workers, args.rank
  )
  model = make_model(args)
  optimizer = nnx.Optimizer(model, make_optimizer(args, workers), wrt=nnx.Param)
  train_step = make_train_step(workers)
  plan = demo_optax.plan(
    nnx.state(model, nnx.Param),
    compressor_of(args),
    workers,
    exchange=args.exchange,
  )
  # The state of a run. Batches follow from these flags and the step.
  data = {name: getattr(args, name) for name in ('seed', 'batch', 'context')}
  everything = {
    'model': model,
    'optimizer': optimizer,
    'data': {**data, 'data': zlib.crc32(corpus.train)},
  }
  checkpoints = checkpoint.Checkpointer(
    folder / 'checkpoints', everything, timeout=args.save_timeout
  )
  start = 0
  if args.resume == 'must' or checkpoints.steps:
    start = restore(args, checkpoints, everything)
    cluster.say(f'Going on after step {start}.')
  kind = '' if workers.mesh else f' {workers.kind}'
  cluster.say(
    f'{name}: {plan.size:,} parameters, {workers.count}{kind} workers on the'
    f' devices of {jax.process_count()} process(es),'
    f' {len(corpus.train):,} bytes of training text. Each worker sends'
    f' {plan.sent_bytes / 1e3:,.1f} kB a step. Records: {folder}'
  )

  about = {'config': vars(args), 'parameters': plan.size}
  seconds: list[float] = []
  stopped, step = 0, start
  stop.begin()
  if start < args.steps:
    cluster.say('Compiling the first step.')
  with metrics.Metrics(folder, about, start) as log:
    records = log.kept  # of the steps before, in a run that is resumed
    while step < args.steps:
      if stopped := stop.after(step):
        if step > start and step not in checkpoints.steps:
          checkpoints.save(step, everything)
        break
      began = time.perf_counter()
      loss = float(train_step(model, optimizer, feed(step)))
      seconds.append(time.perf_counter() - began)
      # With a relay, more than one step if this worker was late.
      done = int(optimizer.step[...])
      last = done >= args.steps
      record = {
        'step': done,
        'loss': loss,
        'sent': plan.sent_bytes * done,
        'received': plan.received_bytes * done,
      }
      if name not in AVERAGED:
        record |= metrics.about_exchange(optimizer)
      if done % args.eval_every == 0 or last:
        record['valid_loss'] = evaluate(model, valid)
        cluster.say(
          f'step {done} of {args.steps}: loss {loss:.3f}, validation loss'
          f' {record["valid_loss"]:.3f}, {sum(seconds):.0f} s so far'
        )
      if done % args.check_every == 0 or last:
        parted = demo_optax.check_replicas(
          (nnx.state(model, nnx.Param), nnx.state(optimizer)), workers
        )
        if parted:
          raise SystemExit(f'After step {done} copies differ: {parted}')
      if done % args.save_every == 0 or last:
        checkpoints.save(done, everything)
      records.append(record)
      log.write(record)
      step = done
  checkpoints.wait()
  if stopped:
    when = (
      f'after step {step}, which is saved. Continue with --resume.'
      if step > start
      else 'before a step.'
    )
    cluster.say(f'Stopped by {signal.Signals(stopped).name} {when}')
    return {'name': name, 'stopped': stopped}

  sample = generate(model, corpus.valid[: args.context], 200, args.seed)
  cluster.say(f'\nA sample of {name}:\n{sample.decode(errors="replace")}\n')
  return {
    'name': name,
    'stopped': 0,
    'records': records,
    'valid_loss': records[-1].get('valid_loss') if records else None,
    'steps_per_second': 1 / np.median(seconds[1:]) if seconds[1:] else None,
    'plan': plan,
  }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  args = parse_args(argv)
  cluster.join(args)
  names = [args.optimizer, *(AVERAGED if args.compare else ())]
  runs = []
  with cluster.failing_at_once(), cluster.StopSignal() as stop:
    for name in dict.fromkeys(names):
      own = {**vars(args), 'optimizer': name}
      if name != args.optimizer:  # at its tuned rates
        own |= {'lr': None, 'other_lr': None}
      runs.append(train(argparse.Namespace(**own), stop))
      if runs[-1]['stopped']:
        sys.exit(128 + runs[-1]['stopped'])
  if cluster.is_main():
    picture.draw_losses(runs, pathlib.Path(args.out) / 'loss.png')
    metrics.report(runs)
  return runs


if __name__ == '__main__':
  main()
