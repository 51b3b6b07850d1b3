"""MaxText's trainer with its own optimizer and with an exchange.

    python benchmarks/in_maxtext.py --out FILE

Needs MaxText (docs/maxtext.md), in an environment of its own. On eight
simulated CPU devices: the losses of 50 steps on synthetic tokens, and seconds
to trace, to compile and for a step, of two models. Methods are measured in
turn, several times; the figures are medians. Every run is a process of its own.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.update(
  JAX_PLATFORMS='cpu',
  # Of collectives that are independent, devices may start different ones and
  # wait for each other: the second flag keeps one order.
  XLA_FLAGS='--xla_force_host_platform_device_count=8'
  ' --xla_cpu_enable_concurrency_optimized_scheduler=false',
  DECOUPLE_GCLOUD='TRUE',  # no cloud services
)

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples' / 'maxtext')]

import jax
import maxtext
import train as example  # examples/maxtext/train.py
from maxtext.common import metric_logger
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils

# MaxText keeps compiled programs on disk: each run is to compile its own.
jax.config.update('jax_enable_compilation_cache', False)

BASE = pathlib.Path(maxtext.__path__[0]) / 'configs' / 'base.yml'
SHARED = {
  'hardware': 'cpu',
  'skip_jax_distributed_system': True,
  'enable_goodput_recording': False,
  'monitor_goodput': False,
  'dataset_type': 'synthetic',
  'log_config': False,
  'run_name': 'run',
  'attention': 'dot_product',
  'use_iota_embed': True,
  'dtype': 'float32',
  'weight_dtype': 'float32',
  'max_target_length': 64,
  'per_device_batch_size': 1,
  'learning_rate': 0.003,
  'enable_checkpointing': False,
}
MODELS = {
  'width 64, 2 layers': {
    'base_emb_dim': 64,
    'base_num_query_heads': 4,
    'base_num_kv_heads': 4,
    'base_mlp_dim': 128,
    'base_num_decoder_layers': 2,
    'head_dim': 16,
    'vocab_size': 256,
  },
  'width 256, 4 layers': {
    'base_emb_dim': 256,
    'base_num_query_heads': 8,
    'base_num_kv_heads': 8,
    'base_mlp_dim': 1024,
    'base_num_decoder_layers': 4,
    'head_dim': 32,
    'vocab_size': 2048,
  },
}
METHODS = ('adamw', 'demo', 'demo_muon')
SHOWN = (0, 10, 20, 30, 40, 49)


class Timed:
  """A step that measures itself."""

  def __init__(self, step: Any):
    self.step = step
    self.seconds: dict[str, float] = {}
    self.steps: list[float] = []

  def lower(self, *args: Any) -> 'Timed':
    begin = time.perf_counter()
    self.lowered = self.step.lower(*args)
    self.seconds['trace'] = time.perf_counter() - begin
    return self

  def compile(self, **kwargs: Any) -> Any:
    begin = time.perf_counter()
    compiled = self.lowered.compile(**kwargs)
    self.seconds['compile'] = time.perf_counter() - begin
    return compiled

  def __call__(self, *args: Any) -> Any:
    begin = time.perf_counter()
    made = jax.block_until_ready(self.step(*args))
    self.steps.append(time.perf_counter() - begin)
    return made


def run_apart(*args: Any) -> dict[str, Any]:
  """Runs a method in a process of its own."""
  command = [sys.executable, __file__, '--one', *map(str, args)]
  found = subprocess.run(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    check=True,
  )
  return json.loads(found.stdout.splitlines()[-1])


def one(method: str, model: str, workers: str, steps: str) -> None:
  """Trains, and prints losses and times as JSON."""
  axis = 'data' if method == 'adamw' else 'diloco'
  losses: list[float] = []
  timed: list[Timed] = []
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    argv = [
      '',
      str(BASE),
      *(
        f'{name}={value}'
        for name, value in {
          **SHARED,
          **MODELS[model],
          'steps': steps,
          'base_output_directory': folder,
          f'ici_{axis}_parallelism': workers,
          'ici_fsdp_parallelism': 8 // int(workers),
        }.items()
      ),
    ]
    if method != 'adamw':
      exchange, argv = example.split_arguments(
        [*argv, f'demo_optimizer={method}']
      )
      stack.enter_context(example.installed(exchange))
    make_step = train_utils.jit_train_step  # ours, or its own

    def make_timed(*args: Any, **kwargs: Any) -> Timed:
      timed.append(Timed(make_step(*args, **kwargs)))
      return timed[0]

    def record(logger: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
      losses.append(float(metrics['scalar']['learning/loss']))

    # In a process that does nothing else.
    train_utils.jit_train_step = make_timed
    metric_logger.MetricLogger.write_metrics = record
    train.train_loop(*train.initialize(argv))
  (step,) = timed
  print(json.dumps({'losses': losses, 'steps': step.steps, **step.seconds}))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--one', nargs=4, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.one:
    one(*args.one)
    return
  small = next(iter(MODELS))
  found: dict[str, Any] = {'jax': jax.__version__, 'losses': {}, 'seconds': {}}

  print('| loss after steps |', ' | '.join(map(str, SHOWN)), '|')
  for workers in 2, 4:
    for method in METHODS:
      if method == 'adamw' and workers != 2:
        continue  # averaged gradients are the same
      losses = run_apart(method, small, workers, 50)['losses']
      name = f'{method}, {workers} of {8 // workers}'
      found['losses'][name] = [round(losses[i], 3) for i in SHOWN]
      print(
        '|',
        name,
        '|',
        *(f'{x:.3f} |' for x in found['losses'][name]),
        flush=True,
      )

  print('| 2 workers of 4 | trace, s | compile, s | step, ms |')
  for model in MODELS:
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for _ in range(args.repeats):
      for method in METHODS:
        runs[method].append(run_apart(method, model, 2, 15))
    for method, made in runs.items():
      figures = {
        kind: round(statistics.median(x[kind] for x in made), 2)
        for kind in ('trace', 'compile')
      }
      figures['step_ms'] = round(
        1e3
        * statistics.median(
          seconds for x in made for seconds in x['steps'][3:]
        ),
        1,
      )
      found['seconds'][f'{model}: {method}'] = figures
      print(
        f'| {model}: {method} |',
        *(f'{x:g} |' for x in figures.values()),
        flush=True,
      )
  if args.out:
    args.out.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
