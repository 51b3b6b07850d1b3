"""A transformer in Flax NNX on a mesh, sharded by its annotations.

The parameters of a worker are sharded over its devices ('fsdp'), on meshes with
axes of either type.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trainer import (
  COMPRESSOR,
  Done,
  changed_lines,
  check_learns,
  check_workers,
  on_mesh,
  tokens,
)

import demo_optax


def sharded(*axes):
  return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Block(nnx.Module):

  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(32, rngs=rngs)
    columns, rows = sharded(None, 'fsdp'), sharded('fsdp', None)
    self.qkv = nnx.Linear(32, 96, use_bias=False, kernel_init=columns, rngs=rngs)
    self.out = nnx.Linear(32, 32, use_bias=False, kernel_init=sharded(None, None), rngs=rngs)
    self.up = nnx.Linear(32, 64, use_bias=False, kernel_init=columns, rngs=rngs)
    self.down = nnx.Linear(64, 32, use_bias=False, kernel_init=rows, rngs=rngs)
    self.dropout = nnx.Dropout(0.05, rngs=rngs)

  def __call__(self, x):
    whole = P(None, None, None)
    q, k, v = jnp.split(self.qkv(self.norm(x), out_sharding=whole), 3, axis=-1)
    scores = jnp.einsum('bqd,bkd->bqk', q, k) / 6
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + self.out(jnp.einsum('bqk,bkd->bqd', scores, v))
    x = x + self.down(nnx.gelu(self.up(self.norm(x))), out_sharding=whole)
    return self.dropout(x)


class Transformer(nnx.Module):

  def __init__(self, rngs):
    self.embedder = nnx.Embed(16, 32, rngs=rngs)
    self.block = Block(rngs)
    self.head = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.block(self.embedder(tokens, out_sharding=P(None, None, None))))


def loss_fn(model, tokens):
  logits = model(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  return losses.mean()


def plain(batches, kind):
  mesh = on_mesh((2, 2), ('data', 'fsdp'), kind)
  with jax.set_mesh(mesh):
    model = nnx.jit(lambda: Transformer(nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, tokens):
      loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
      optimizer.update(model, grads)
      return loss

    for batch in batches:
      batch = jax.device_put(batch, NamedSharding(mesh, P('data')))
      loss = train_step(model, optimizer, batch)
      args = model, optimizer, batch
      yield Done(train_step, args, loss, nnx.state(model, nnx.Param))


def changed(batches, kind):
  mesh = on_mesh((2, 2), ('data', 'fsdp'), kind)
  with jax.set_mesh(mesh):
    model = nnx.jit(lambda: Transformer(nnx.Rngs(0)))()
    workers = demo_optax.Workers.on_mesh(mesh, 'data', demo_optax.param_specs(model))
    optimizer = nnx.Optimizer(model, demo_optax.demo(3e-2, workers=workers, compressor=COMPRESSOR), wrt=nnx.Param)

    @demo_optax.data_parallel(workers)
    def train_step(model, optimizer, tokens):
      loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
      optimizer.update(model, grads)
      return loss

    for batch in batches:
      batch = jax.device_put(batch, NamedSharding(mesh, P('data')))
      loss = train_step(model, optimizer, batch)
      args = model, optimizer, batch
      yield Done(train_step, args, loss, nnx.state(model, nnx.Param))


def test_lines():
  assert changed_lines(plain, changed) == 3


def test_plain():
  check_learns(plain(tokens(8, 14), 'auto'))


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_changed(kind):
  trainer = changed(tokens(8, 24), kind)
  done = check_learns(trainer, compiles_in=1)
  model, optimizer, batch = done.args
  workers = demo_optax.Workers.on_mesh(
      batch.sharding.mesh, 'data', demo_optax.param_specs(model)
  )
  with jax.set_mesh(workers.mesh):
    check_workers(done, workers, slack=100)
  kernel = model.block.up.kernel[...]
  assert kernel.sharding.shard_shape(kernel.shape) == (32, 32)
  largest = max(
      jax.tree.leaves(nnx.state(optimizer)), key=lambda x: np.size(x)
  )
  assert largest.sharding.spec[0] == 'data'
  assert 'fsdp' in jax.tree.leaves(tuple(largest.sharding.spec))
