"""A trainer in Linen with shardings of its own.

Its jit has in_shardings and out_shardings, and donates what it replaces.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
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


class Decoder(nn.Module):

  @nn.compact
  def __call__(self, x):
    x = nn.Embed(16, 32)(x)
    x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
    return nn.Dense(16)(x)


def plain(batches):
  mesh = on_mesh((4,), ('data',))
  model = Decoder()
  tx = optax.adamw(5e-3)

  def init(rng):
    params = model.init(rng, jnp.zeros((1, 8), jnp.int32))['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  sharding = nn.get_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
  data = NamedSharding(mesh, P('data'))

  @jax.jit(in_shardings=(sharding, data), out_shardings=(sharding, None), donate_argnums=0)
  def train_step(state, in_BxL):
    def loss_fn(params):
      logits = state.apply_fn({'params': params}, in_BxL[:, :-1])
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits, in_BxL[:, 1:]
      )
      return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    metrics = {
        'train_loss': loss,
    }
    return state, metrics

  state = jax.jit(init, out_shardings=sharding)(jax.random.key(0))
  for batch in batches:
    batch = jax.device_put(batch, data)
    state, metrics = train_step(state, batch)
    yield Done(train_step, (state, batch), metrics['train_loss'], state.params)


def changed(batches):
  mesh = on_mesh((4,), ('data',))
  workers = demo_optax.Workers.on_mesh(mesh, 'data')
  model = Decoder()
  tx = demo_optax.demo(3e-2, workers=workers, compressor=COMPRESSOR)

  def init(rng):
    params = model.init(rng, jnp.zeros((1, 8), jnp.int32))['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  sharding = nn.get_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
  data = NamedSharding(mesh, P('data'))

  @demo_optax.data_parallel(workers, donate_argnums=0)
  def train_step(state, in_BxL):
    def loss_fn(params):
      logits = state.apply_fn({'params': params}, in_BxL[:, :-1])
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits, in_BxL[:, 1:]
      )
      return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    metrics = {
        'train_loss': loss,
    }
    return state, metrics

  state = jax.jit(init, out_shardings=sharding)(jax.random.key(0))
  for batch in batches:
    batch = jax.device_put(batch, data)
    state, metrics = train_step(state, batch)
    yield Done(train_step, (state, batch), metrics['train_loss'], state.params)


def test_lines():
  assert changed_lines(plain, changed) == 3


def test_plain():
  check_learns(plain(tokens(16, 20)))


def test_changed():
  done = check_learns(changed(tokens(16, 24)), compiles_in=1)
  workers = demo_optax.Workers.on_mesh(done.args[1].sharding.mesh, 'data')
  check_workers(done, workers, slack=16)
  for x in jax.tree.leaves(done.args[0].opt_state):
    if x.ndim > 1:
      assert x.sharding.spec[0] == 'data', x.sharding
