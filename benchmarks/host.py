"""Host time of a `data_parallel` step that computes next to nothing.

    python benchmarks/host.py                # this tree
    python benchmarks/host.py . ../other     # interleaved with another tree

Milliseconds per call, medians, for 247 leaves and the state of `demo`.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

LEAVES, CALLS, ROUNDS = 247, 60, 5


def measure():
  import demo_optax

  workers = demo_optax.Workers.simulated(2)
  tx = demo_optax.demo(0.1, workers=workers)
  params = {f'w{i}': jnp.zeros((4, 4)) for i in range(LEAVES)}
  model = nnx.data([nnx.Param(x) for x in params.values()])
  model = nnx.Dict(layers=model)
  objects = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
  trees = params, tx.init(params)
  decorated = demo_optax.data_parallel(workers, batch_argnames='x')
  found = {}
  for name, decorate, (first, second) in (
    ('jax.jit', jax.jit, trees),
    ('trees', decorated, trees),
    ('nnx.jit', nnx.jit, objects),
    ('objects', decorated, objects),
  ):
    step = decorate(
      lambda a, b, x: (
        x.mean() if isinstance(a, nnx.Module) else (a, b, x.mean())
      )
    )
    times = []
    for _ in range(CALLS):
      start = time.perf_counter()
      jax.block_until_ready(step(first, second, jnp.ones((4, 2))))
      times.append(1e3 * (time.perf_counter() - start))
    found[name] = statistics.median(times[5:])
  return found


if __name__ == '__main__':
  if sys.argv[1:] == ['--once']:
    print(json.dumps(measure()))
  else:
    runs = {tree: [] for tree in sys.argv[1:] or ['.']}
    for tree in runs:
      if not os.path.isdir(f'{tree}/demo_optax'):
        sys.exit(f'{tree} must be a clone of this repository.')
    for tree in list(runs) * ROUNDS:
      environment = {**os.environ, 'PYTHONPATH': os.path.abspath(tree)}
      command = [sys.executable, __file__, '--once']
      runs[tree].append(
        json.loads(subprocess.check_output(command, env=environment))
      )
    for tree, found in runs.items():
      print(
        tree,
        {
          name: round(statistics.median(run[name] for run in found), 2)
          for name in found[0]
        },
      )
