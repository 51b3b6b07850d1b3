"""One process of several: 50 exchanges, and all that it holds, to a file.

Run by test_processes.py under examples/launch_local.py.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / 'examples')]

import argparse

import cluster
import jax
import numpy as np
import optax
from helpers import random_tree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

STEPS = 50


def make_tx(workers, values, exchange='all_gather'):
  compressor = demo_optax.dct_topk(32, 8, values=values)
  return optax.chain(
    demo_optax.scale_by_demo(
      compressor,
      0.9,
      workers=workers,
      exchange=exchange,
      update_values='ternary',
    ),
    optax.scale_by_sign(),
    optax.scale(-1e-3),
  )


def gradients_of(step, workers):
  """Stacked, from NumPy alone; one worker's is not finite now and then."""
  trees = [random_tree(1000 * step + w) for w in range(workers)]
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
  if step % 7 == 3:
    next(iter(stacked.values()))[step % workers] = np.nan
  return stacked


def join(argv=(), parser=None):
  """Joins the other processes; a worker on each device, and the arguments."""
  parser = parser or argparse.ArgumentParser()
  cluster.add_flags(parser)
  args = parser.parse_args(argv)
  cluster.join(args)
  mesh = jax.make_mesh(
    (jax.device_count(),), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  return demo_optax.Workers.on_mesh(mesh, 'data'), args


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--values', default='float32')
  parser.add_argument('--exchange', default='all_gather')
  parser.add_argument('--out', type=pathlib.Path)
  workers, args = join(sys.argv[1:], parser)
  count, mesh = workers.count, workers.mesh
  tx = make_tx(workers, args.values, args.exchange)
  params = workers.device_put(random_tree(99))
  state = tx.init(params)
  stacked = NamedSharding(mesh, P('data'))

  @jax.jit
  def step_fn(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, updates

  first = jax.process_index() * jax.local_device_count()
  rows = slice(first, first + jax.local_device_count())
  for step in range(STEPS):
    gradients = jax.tree.map(
      lambda g: jax.make_array_from_process_local_data(
        stacked, g[rows], g.shape
      ),
      gradients_of(step, count),
    )
    # With several CPU devices in a process, steps that are under way at once
    # take each other's threads, and wait for each other's messages for ever.
    params, state, updates = jax.block_until_ready(
      step_fn(params, state, gradients)
    )

  found = {}
  for name, tree in (
    ('params', params),
    ('updates', updates),
    ('momentum', state[0].worker_stacked.momentum),
  ):
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
      for shard in x.addressable_shards:
        key = f'{name}{jax.tree_util.keystr(path)}@{shard.device.id}'
        found[key] = np.asarray(shard.data)
  np.savez(args.out / f'{jax.process_index()}.npz', **found)


if __name__ == '__main__':
  main()
