"""A process of an elastic run: python elastic_worker.py ADDRESS STEPS KIND...

It prints, as JSON lines, what it has at the begin of every attempt at a step,
and at the end. `die=STEP` ends it there as SIGKILL would; `die-building=N` in
the `build` of generation N, `error=STEP` raises an error of its own, `topk=K`
builds another optimizer; `between=STEP` has it die between the two collectives
of an exchange by owners, or never, if STEP is negative.
"""

import json
import os
import signal
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import demo_optax
from demo_optax import elastic
from demo_optax.elastic import transfer

TARGET = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


class Model(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(64, 128, rngs=rngs)
    self.down = nnx.Linear(128, 64, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return self.down(self.dropout(nnx.relu(self.up(x))))


def optimizer_of(kind, workers, topk=4):
  compressor = demo_optax.dct_topk(topk=topk)
  kwargs = {'workers': workers, 'compressor': compressor}
  if kind == 'muon':
    return demo_optax.demo_muon(3e-3, workers=workers)
  if kind == 'local':
    return demo_optax.local.demo_diloco(
        optax.adam(1e-3), sync_period=5, **kwargs)
  if kind == 'owners':
    exchange = demo_optax.scale_by_demo(
        compressor, workers=workers, exchange='all_to_all',
        update_values='int8')
    return optax.chain(exchange, optax.adam(1e-3))
  if kind == 'adamw':
    return optax.adamw(1e-3)
  return demo_optax.demo(3e-3, **kwargs)


def train_step(model, optimizer, batch):
  def loss_fn(model):
    return jnp.mean((model(batch['x']) - batch['y']) ** 2)

  loss, grads = nnx.value_and_grad(loss_fn)(model)
  optimizer.update(model, grads)
  return loss


def batch_of(step, workers):
  rng = np.random.default_rng(step)
  x = rng.normal(size=(24 - 24 % workers.count, 64)).astype(np.float32)
  return {'x': x, 'y': np.tanh(x @ TARGET)}


def digest(values):
  return zlib.crc32(b''.join(np.asarray(x).tobytes() for x in values))


def digests(state):
  """Of what workers share, and of this one's own rows."""
  arrays = transfer.arrays_of(state)
  local = transfer.take(arrays)
  own, shared = [], []
  for (path, x), value in zip(transfer.leaves_of(arrays), local.values):
    keys = transfer.specs.path_keys(path)
    if isinstance(x, jax.Array) and not transfer.specs.is_owned(keys):
      (own if transfer.specs.is_stacked(keys) else shared).append(value)
  return {'shared': digest(shared), 'own': digest(own)}


def say(**record):
  print(json.dumps({'pid': os.getpid(), 'time': time.time(), **record}),
        flush=True)


def die():
  os.kill(os.getpid(), signal.SIGKILL)


def watch_all_to_all(arrived):
  """Calls `arrived` when messages have, before anything is made of them."""
  all_to_all = jax.lax.all_to_all

  def watched(*args, **kwargs):
    def look(x):
      arrived()
      return x

    x = all_to_all(*args, **kwargs)
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(look, kind, x)

  jax.lax.all_to_all = watched


def main(address, steps, kind, *orders):
  orders = dict(order.split('=') for order in orders)
  made = 0
  if between := orders.get('between'):  # in all processes: one program
    watch_all_to_all(lambda: die() if run.step == int(between) else None)

  def build(workers):
    nonlocal made
    made += 1
    if str(made) == orders.get('die-building'):
      die()
    model = Model(nnx.Rngs(0))
    tx = optimizer_of(kind, workers, int(orders.get('topk', 4)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return demo_optax.data_parallel(workers)(train_step), (model, optimizer)

  with elastic.Run(address, build) as run:
    while run.step < int(steps):
      with run.one_step():
        say(at=run.step, step=run.step, generation=run.generation,
            workers=run.workers.count, **digests(run.state))
        if str(run.step) == orders.get('error'):
          raise KeyError('of its own')
        batch = batch_of(run.step, run.workers)
        if str(run.step) == orders.get('die'):
          die()
        loss = float(run.train_step(*run.state, batch))
      say(at=run.step, generation=run.generation, **digests(run.state))
      if float(orders.get('pause', 0)):
        time.sleep(float(orders['pause']))
  found = demo_optax.check_replicas(nnx.state(run.state[0]), run.workers)
  say(end=run.step, loss=loss, differ=len(found), **digests(run.state))


if __name__ == '__main__':
  main(*sys.argv[1:])
