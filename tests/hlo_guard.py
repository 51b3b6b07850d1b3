"""Digests of the program of a step, to tell that a change did not change it.

    python tests/hlo_guard.py            # compare with what is recorded
    python tests/hlo_guard.py --record   # record what there is

Moving or renaming code must leave the lowered StableHLO as it was, which is
faster to check than the tests and stricter. Names of nested functions and of
arguments are left out. A program belongs to a release of JAX, so digests are
recorded for each.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import sys

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import helpers
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import demo_optax

RECORDED = pathlib.Path(__file__).parent / 'golden' / 'hlo.json'

SHAPES = {
    'matrix': (256, 128), 'padded': (101, 67), 'kernel': (3, 4, 16, 40),
    'bias': (128,), 'gain': (128,), 'scalar': (),
}


def trees(count):
  """Parameters, and the stacked gradients of workers."""
  return ({name: jax.ShapeDtypeStruct((*lead, *shape), jnp.float32)
           for name, shape in SHAPES.items()} for lead in ((), (count,)))


def lowered(compressor, workers, **options):
  """The text of a step whose gradients are stacked."""
  tx = demo_optax.scale_by_demo(compressor, 0.9, workers=workers, **options)
  params, gradients = trees(workers.count)
  state = jax.eval_shape(tx.init, params)
  return jax.jit(tx.update).lower(gradients, state, params).as_text()


def on_mesh(shape, specs=None):
  return demo_optax.Workers.on_mesh(helpers.mesh_of(shape), 'data', specs)


def on_axis(compressor):
  """The text of a step inside the caller's own map."""
  workers = demo_optax.Workers.on_axis('data')
  tx = demo_optax.scale_by_demo(compressor, 0.9, workers=workers)
  params, gradients = trees(4)

  def step(gradients, params):
    return tx.update(gradients, tx.init(params), params)[0]

  mapped = jax.vmap(step, in_axes=(0, None), axis_name='data')
  return jax.jit(mapped).lower(gradients, params).as_text()


def texts():
  topk = demo_optax.dct_topk(64, 8)
  signs = demo_optax.dct_topk(32, 8, values='sign')
  simulated = demo_optax.Workers.simulated
  sharded = {'matrix': P('fsdp'), 'kernel': P(None, 'fsdp')}
  specs = {name: sharded.get(name, P()) for name in SHAPES}
  return {
      'simulated': lowered(topk, simulated(4)),
      'second rule': lowered(signs, simulated(4), alpha=0.2, ema=True, average='workers'),
      'mesh': lowered(topk, on_mesh({'data': 4})),
      'sharded': lowered(signs, on_mesh({'data': 2, 'fsdp': 4}, specs)),
      'on_axis': on_axis(topk),
      'owners': lowered(signs, simulated(4), exchange='all_to_all', update_values='int4'),
      'sums': lowered(demo_optax.Compressor(
          demo_optax.compressors.RandomSubset(1 / 8),
          demo_optax.compressors.Identity()), simulated(4)),
  }


def normalised(text):
  """Without what a move may change: names of functions, arguments, results."""
  text = re.sub(r'jax\.result_info = "[^"]*"', '', text)
  text = re.sub(r'module @\w+', 'module', text)
  names = {}
  for name in re.findall(r'func\.func (?:public |private )?@("[^"]*"|[\w.]+)', text):
    names.setdefault(name, f'@f{len(names)}')
  return re.sub(r'@("[^"]*"|[\w.]+)', lambda m: names.get(m[1], m[0]), text)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--record', action='store_true')
  parser.add_argument('--texts', help='folder to write the texts to')
  args = parser.parse_args()
  found = {name: normalised(text) for name, text in texts().items()}
  if args.texts:
    for name, text in found.items():
      pathlib.Path(args.texts, f'{name}.txt').write_text(text)
  digests = {
      name: {'sha256': hashlib.sha256(text.encode()).hexdigest()[:16],
             'lines': text.count('\n')} for name, text in found.items()}
  recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
  if args.record:
    recorded[jax.__version__] = digests
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + '\n')
    return
  before = recorded.get(jax.__version__, {})
  for name, digest in digests.items():
    same = 'same' if before.get(name) == digest else 'DIFFERS'
    print(f'{name:12} {same:8} {digest["sha256"]} {digest["lines"]:6} lines')
  if digests != before:
    raise SystemExit(1)


if __name__ == '__main__':
  main()
