"""CPU seconds to trace and compile a step, by the number of leaves.

    python benchmarks/compile.py                  # the three trees
    python benchmarks/compile.py --layers 8 --workers 8

The update alone, `dct_topk(topk=32)`, of a GPT (width 512, vocabulary 32,000)
and of a few leaves of odd shapes; then the first call of a whole step with four
workers, of an MLP of six leaves, medians of three rounds. CPU seconds of all
threads, so that other processes do not count; the temporary memory is XLA's own
figure.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from step import gpt

import demo_optax

RESULTS = pathlib.Path(__file__).parent / 'results' / 'compile.json'


def measure(layers, workers, topk):
  shapes = gpt(512, layers, 32_000)
  size = sum(map(math.prod, shapes.values()))
  params, gradients = (
    {
      name: jax.ShapeDtypeStruct((*lead, *shape), jnp.float32)
      for name, shape in shapes.items()
    }
    for lead in ((), (workers,))
  )
  tx = demo_optax.scale_by_demo(
    demo_optax.dct_topk(topk=topk),
    workers=demo_optax.Workers.simulated(workers),
  )
  state = jax.eval_shape(tx.init, params)
  jax.jit(lambda x: x + 1)(jnp.zeros(3))  # so that XLA is there
  start = time.process_time()
  lowered = jax.jit(tx.update, donate_argnums=1).lower(gradients, state, params)
  traced = time.process_time()
  compiled = lowered.compile()
  done = time.process_time()
  memory = compiled.memory_analysis()
  return {
    'leaves': len(shapes),
    'elements': size,
    'workers': workers,
    'topk': topk,
    'trace': round(traced - start, 2),
    'compile': round(done - traced, 2),
    'hlo_instructions': compiled.as_text().count(' = '),
    'temporaries_over_params': round(memory.temp_size_in_bytes / size / 4, 3),
    'jax': jax.__version__,
  }


def first_call(make):
  """CPU seconds to trace and compile a step of an MLP of six leaves."""
  workers = demo_optax.Workers.simulated(4)
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
    nnx.Linear(64, 256, rngs=rngs),
    nnx.relu,
    nnx.Linear(256, 256, rngs=rngs),
    nnx.relu,
    nnx.Linear(256, 10, rngs=rngs),
  )
  optimizer = nnx.Optimizer(model, make(workers), wrt=nnx.Param)

  def step(model, optimizer, x, y):
    def loss_fn(model):
      return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss

  is_ours = make is not ADAMW
  ours = demo_optax.data_parallel(workers, batch_argnames=('x', 'y'))
  jit = ours if is_ours else nnx.jit
  start = time.process_time()
  jit(step).lower(
    model, optimizer, jnp.zeros((32, 64)), jnp.zeros(32, jnp.int32)
  ).compile()
  return time.process_time() - start


ADAMW = lambda workers: optax.adamw(1e-3)  # noqa: E731
RECIPES = {
  'adamw': ADAMW,
  'demo': lambda workers: demo_optax.demo(1e-3, workers=workers),
  'demo_muon': lambda workers: demo_optax.demo_muon(1e-2, workers=workers),
}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--layers', type=int, nargs='*', default=[2, 8, 24])
  parser.add_argument('--workers', type=int, default=1)
  parser.add_argument('--topk', type=int, default=32)
  parser.add_argument('--save', action='store_true')
  args = parser.parse_args()
  found = []
  for layers in args.layers:
    found.append(measure(layers, args.workers, args.topk))
    print(json.dumps(found[-1]), flush=True)
  first_call(ADAMW)  # so that Flax is there
  rounds = [
    {name: first_call(make) for name, make in RECIPES.items()} for _ in range(3)
  ]
  found.append(
    {
      'first_call': {
        name: round(statistics.median(r[name] for r in rounds), 1)
        for name in RECIPES
      },
      'jax': jax.__version__,
    }
  )
  print(json.dumps(found[-1]))
  if args.save:
    RESULTS.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
