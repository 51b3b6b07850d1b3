"""A run whose processes are killed and replaced: what does it cost?

    python benchmarks/outlive.py --out benchmarks/results/outlive.json

Eight processes train a small GPT on real text, in an elastic run. Every three
minutes one of them, drawn at random, is killed, and a new one is started; so
for 18 minutes. The report has: steps made, beside those of an undisturbed run
of the same time (by its median seconds of a step); seconds from the last step
of a generation to the first one of the next; whether all processes had the same
parameters after every 10th step, bit for bit; memory; and the loss, beside that
of as many steps without disturbance (simulated workers of one process). The
processes share compiled programs, as they may on one machine.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import jax
import jax.experimental.multihost_utils
import numpy as np
import text
import train_lm
from flax import nnx
from gpt import GPT, GPTConfig

import demo_optax
from demo_optax import elastic

CONFIG = GPTConfig(context=32, width=32, layers=1, heads=2)
BATCH = 56  # of 8 workers 7 each, of 7 workers 8 each
SEED = 0


def build(workers: demo_optax.Workers) -> tuple[Callable[..., Any], Any]:
  model = GPT(CONFIG, nnx.Rngs(SEED))
  tx = demo_optax.demo(
      3e-3, workers=workers,
      compressor=demo_optax.dct_topk(topk=16, values='sign'), decay=0.99,
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers)
  def train_step(
      model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array
  ) -> jax.Array:
    loss, grads = nnx.value_and_grad(train_lm.loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss

  return train_step, (model, optimizer)


def batch_of(corpus: text.Corpus, step: int, workers: int) -> np.ndarray:
  size = BATCH - BATCH % workers
  return text.batch(corpus.train, SEED, step, size, CONFIG.context)


def memory() -> int:
  """Bytes of memory that this process holds."""
  pages = pathlib.Path('/proc/self/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE')


def work(address: str, until: float) -> None:
  """One process: a line for every step."""
  corpus = text.load(None)
  with elastic.Run(address, build) as run:
    over = False
    while not over:
      with run.one_step():
        tokens = batch_of(corpus, run.step, run.workers.count)
        loss = float(run.train_step(*run.state, tokens))
        record = {'step': run.step, 'loss': loss, 'time': time.time(),
                  'workers': run.workers.count, 'generation': run.generation}
        if run.step % 10 == 0:
          params = jax.tree.leaves(nnx.state(run.state[0], nnx.Param))
          record['params'] = zlib.crc32(b''.join(
              np.asarray(x.addressable_data(0)).tobytes() for x in params
          ))
          record['memory'] = memory()
        # All stop after the same step: the first process's clock decides.
        late = np.array([time.time() > until])
        over = bool(
            jax.experimental.multihost_utils.broadcast_one_to_all(late)[0]
        )
      print(json.dumps(record), flush=True)


def start(command: list[str], log: pathlib.Path) -> subprocess.Popen:
  cache = {
      'JAX_COMPILATION_CACHE_DIR': str(log.parent / 'programs'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_SHARE_BINARY_BETWEEN_HOSTS': '1',
      'JAX_NUM_CPU_DEVICES': '1', 'JAX_PLATFORMS': 'cpu',
  }
  with log.open('w') as file:
    return subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **cache}, stdout=file,
        stderr=subprocess.STDOUT,
    )


def records(log: pathlib.Path) -> list[dict[str, Any]]:
  lines = log.read_text(errors='replace').splitlines()
  return [json.loads(line) for line in lines if line.startswith('{"step')]


def run(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
  """The run with its losses; returns what came of it."""
  coordinator = start(
      ['-m', 'demo_optax.elastic', '--host', '127.0.0.1', '--port',
       str(args.port), '--workers', str(args.processes)], folder / 'coordinator'
  )
  begin = time.time()
  until = begin + args.warm_up + args.seconds
  address = f'127.0.0.1:{args.port}'
  this = str(pathlib.Path(__file__).absolute())
  worker = [this, '--work', address, '--until', str(until)]
  logs = [folder / f'{i}' for i in range(args.processes)]
  alive = {i: start(worker, log) for i, log in enumerate(logs)}
  kills, draw = [], random.Random(SEED)
  try:
    while time.time() < begin + args.warm_up + args.seconds + 300 and any(
        p.poll() is None for p in alive.values()
    ):
      time.sleep(0.2)
      due = begin + args.warm_up + args.every * (len(kills) + 0.5)
      if time.time() > due and due < until - 30:
        victim = draw.choice(sorted(alive))
        alive.pop(victim).send_signal(signal.SIGKILL)
        kills.append({'time': time.time(), 'process': victim})
        logs.append(folder / f'{len(logs)}')
        alive[len(logs) - 1] = start(worker, logs[-1])
    return report(args, begin, kills, logs)
  finally:
    for process in [coordinator, *alive.values()]:
      process.kill()
      process.wait()


def report(
    args: argparse.Namespace, begin: float, kills: list[dict[str, Any]],
    logs: list[pathlib.Path],
) -> dict[str, Any]:
  everyones = [records(log) for log in logs]
  # Of one generation: a step that was undone is made again by others.
  params: dict[tuple[int, int], set[int]] = {}
  for own in everyones:
    for r in own:
      if 'params' in r:
        at = r['generation'], r['step']
        params.setdefault(at, set()).add(r['params'])
  # A survivor of all: when each step was made first.
  killed = {kill['process'] for kill in kills}
  survivor = next(
      own for i, own in enumerate(everyones[: args.processes])
      if i not in killed
  )
  times = np.array([r['time'] for r in survivor])
  seconds = np.diff(times)
  typical = float(np.median(seconds))
  after = begin + args.warm_up
  measured = [r for r in survivor if r['time'] > after]
  span = measured[-1]['time'] - measured[0]['time']
  steps = measured[-1]['step'] - measured[0]['step']
  pauses = []
  for gap, before, now in zip(seconds, survivor, survivor[1:]):
    if now['generation'] != before['generation']:
      pauses.append({
          'from': before['workers'], 'to': now['workers'],
          'seconds': round(float(gap), 1), 'after': before['step'],
      })
  held = [r['memory'] for r in survivor if 'memory' in r]
  return {
      'processes': args.processes, 'kills': len(kills), 'steps': steps,
      'seconds': round(span, 1), 'seconds_per_step': round(typical, 4),
      'goodput': round(steps * typical / span, 4), 'pauses': pauses,
      'compared': len(params),
      'different': sum(len(found) > 1 for found in params.values()),
      'memory': [held[len(held) // 10], held[-1]],
      'last_step': survivor[-1]['step'],
      'loss': round(float(np.mean([r['loss'] for r in survivor[-50:]])), 4),
  }


def undisturbed(steps: int, workers: int) -> float:
  """The mean loss of the last 50 steps of a run without any loss."""
  corpus = text.load(None)
  train_step, state = build(demo_optax.Workers.simulated(workers))
  losses = [
      float(train_step(*state, batch_of(corpus, step, workers)))
      for step in range(steps + 1)
  ]
  return round(float(np.mean(losses[-50:])), 4)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--processes', type=int, default=8)
  add('--every', type=float, default=180, help='seconds between two losses')
  add('--seconds', type=float, default=18 * 60)
  add('--warm-up', type=float, default=90, help='seconds before the first')
  add('--port', type=int, default=29477)
  add('--out', type=pathlib.Path)
  add('--work', metavar='HOST:PORT', help=argparse.SUPPRESS)
  add('--until', type=float, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.work:
    work(args.work, args.until)
    return
  with tempfile.TemporaryDirectory() as folder:
    found = run(args, pathlib.Path(folder))
  found['undisturbed_loss'] = undisturbed(found['last_step'], args.processes)
  found['jax'] = jax.__version__
  print(json.dumps(found, indent=1))
  if args.out:
    args.out.write_text(json.dumps(found, indent=1) + '\n')
  sys.exit(found['different'] > 0)


if __name__ == '__main__':
  main()
