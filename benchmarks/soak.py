"""Thousands of steps with workers left out at random: does anything drift?

    python benchmarks/soak.py --out benchmarks/results/soak.json

A small GPT on real text, 10,000 steps on 8 simulated devices of one process,
and 2,000 on 4 processes. In every step each worker's gradient is NaN with
probability 0.05. Every 100 steps all copies of the parameters, and of all else
that workers hold alike, are compared bit for bit (`check_replicas`). Counted
throughout: workers left out, as the exchange saw them and as they were drawn;
programs compiled after the first comparison; bytes of memory that the process
holds, and its arrays. Ends with status 1 if anything was not as it should be.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import cluster
import jax
import numpy as np
import optax
import text
from flax import nnx
from gpt import GPT, GPTConfig
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

RUNS = {  # steps, processes, devices of each
  '8 simulated devices': (10_000, 1, 8),
  '4 processes': (2_000, 4, 1),
}
CONFIG = GPTConfig(context=16, width=32, layers=1, heads=2)
BATCH = 16
LEFT_OUT = 0.05
EVERY = 100
SEED = 0
COMPILED = '/jax/core/compile/backend_compile_duration'


def loss_fn(model: GPT, tokens: jax.Array, weight: jax.Array) -> jax.Array:
  logits = model(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, tokens[:, 1:]
  )
  return (losses.mean(1) * weight).mean()


def draw(step: int, workers: int) -> np.ndarray:
  """Which workers are left out of a step, bool `[workers]`."""
  return np.random.default_rng((SEED, 1, step)).random(workers) < LEFT_OUT


def memory() -> int:
  """Bytes that this process has in memory (Linux)."""
  pages = pathlib.Path('/proc/self/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE')


def soak(steps: int) -> dict:
  """One run, seen from one process."""
  count = jax.device_count()
  mesh = jax.make_mesh(
    (count,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  workers = demo_optax.Workers.on_mesh(mesh, 'data')
  tx = demo_optax.demo(
    1e-3, workers=workers, compressor=demo_optax.dct_topk(topk=8), decay=0.99
  )
  model = GPT(CONFIG, nnx.Rngs(SEED))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(
    workers, batch_argnames=('tokens', 'weight'), donate_argnums=(0, 1)
  )
  def train_step(model, optimizer, tokens, weight):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens, weight)
    optimizer.update(model, grads)
    return loss

  def left_out() -> int:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))
    (found,) = [
      int(x)
      for path, x in leaves
      if 'num_excluded' in jax.tree_util.keystr(path)
    ]
    return found

  corpus = text.load(None)
  sharding = NamedSharding(mesh, P('data'))
  share = BATCH // count
  mine = [share * mesh.devices.tolist().index(d) for d in jax.local_devices()]
  rows = slice(min(mine), max(mine) + share)

  def spread(x: np.ndarray) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, x[rows], x.shape)

  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if name == COMPILED else None
  )
  record = {
    'steps': steps,
    'workers': count,
    'num_excluded': 0,
    'drawn': 0,
    'comparisons': 0,
    'differences': [],
    'loss': [],
    'memory': [],
    'arrays': [],
  }
  losses = []
  began = time.perf_counter()
  for step in range(steps):
    out = draw(step, count)
    tokens = text.batch(corpus.train, SEED, step, BATCH, CONFIG.context)
    weight = np.where(np.repeat(out, share), np.nan, 1).astype(np.float32)
    loss = float(train_step(model, optimizer, spread(tokens), spread(weight)))
    if not out.any():
      losses.append(loss)
    seen, drawn = left_out(), int(out.sum())
    assert seen == drawn, f'step {step}: {seen} left out, {drawn} drawn'
    record['num_excluded'] += seen
    record['drawn'] += drawn
    if (step + 1) % EVERY == 0:
      held = nnx.state(model), nnx.state(optimizer)
      found = demo_optax.check_replicas(held, workers)
      record['differences'] += [[step + 1, d.leaf, d.devices] for d in found]
      record['comparisons'] += 1
      if step + 1 == EVERY:
        compiled.clear()
      record['memory'].append(memory())
      record['arrays'].append(len(jax.live_arrays()))
      record['loss'].append(float(np.mean(losses)))
      losses.clear()
  record |= {
    'seconds': round(time.perf_counter() - began, 1),
    'compiled_after_first_comparison': len(compiled),
  }
  return record


def problems(record: dict) -> list[str]:
  """What is not as it should be."""
  memory = np.array(record['memory'])
  begun, ended = np.array_split(memory, 4)[1], np.array_split(memory, 4)[3]
  checks = {
    'parameters parted': record['differences'],
    'no worker was left out': not record['num_excluded'],
    'programs were compiled': record['compiled_after_first_comparison'],
    'arrays were left behind': len(set(record['arrays'])) > 1,
    'memory grew': np.median(ended) > 1.02 * np.median(begun),
    'nothing was learnt': record['loss'][-1] > record['loss'][0] - 0.5,
  }
  return [text for text, found in checks.items() if found]


def summary(name: str, records: list[dict]) -> str:
  r = records[0]
  quarters = [np.array_split(np.array(r['memory']), 4) for r in records]
  growth = max(np.median(q[3]) / np.median(q[1]) - 1 for q in quarters)
  return (
    f'| {name} | {r["steps"]:,} in {r["seconds"]:.0f} s |'
    f' {r["num_excluded"]:,} of {r["drawn"]:,} drawn |'
    f' {r["comparisons"]} | {sum(len(r["differences"]) for r in records)} |'
    f' {sum(r["compiled_after_first_comparison"] for r in records)} |'
    f' {np.median(quarters[0][1]) / 1e6:.0f} MB, {100 * growth:+.1f} % |'
    f' {r["loss"][0]:.2f} to {r["loss"][-1]:.2f} |'
  )


def launch(steps: int, processes: int, devices: int) -> list[dict]:
  """The records of all processes."""
  with tempfile.TemporaryDirectory() as folder:
    command = [
      sys.executable,
      __file__,
      '--steps',
      str(steps),
      '--folder',
      folder,
    ]
    if processes > 1:
      command = [
        sys.executable,
        ROOT / 'examples/launch_local.py',
        '-n',
        str(processes),
        '--devices',
        str(devices),
        '--',
        *command,
      ]
    environment = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(devices),
    }
    subprocess.run(command, env=environment, check=True)
    files = sorted(pathlib.Path(folder).iterdir())
    return [json.loads(file.read_text()) for file in files]


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--out', type=pathlib.Path, help='where results go')
  add('--share', type=float, default=1.0, help='of the steps, for a trial')
  add('--steps', type=int, help=argparse.SUPPRESS)  # one process of a run
  add('--folder', type=pathlib.Path, help=argparse.SUPPRESS)
  cluster.add_flags(parser)
  args = parser.parse_args()
  if args.steps:
    cluster.join(args)
    record = soak(args.steps)
    path = args.folder / f'{jax.process_index()}.json'
    path.write_text(json.dumps(record))
    return 0
  results, lines, failed = {'jax': jax.__version__}, [], False
  for name, (steps, processes, devices) in RUNS.items():
    steps = max(4 * EVERY, int(args.share * steps))
    records = launch(steps, processes, devices)
    results[name] = records
    lines.append(summary(name, records))
    for number, record in enumerate(records):
      for problem in problems(record):
        print(f'{name}, process {number}: {problem}', file=sys.stderr)
        failed = True
  print(
    '| | steps | workers left out | comparisons | differences |'
    ' programs compiled later | memory, growth | loss |'
  )
  print('|---|---|---|---|---|---|---|---|')
  print('\n'.join(lines))
  if args.out:
    args.out.write_text(json.dumps(results, separators=(',', ':')) + '\n')
  return int(failed)


if __name__ == '__main__':
  sys.exit(main())
