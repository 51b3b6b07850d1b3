"""A language model in Linen: boxed parameters, logical axes, a TrainState.

The whole state is made under jit with the shardings that nn.get_partition_spec
reads from the boxes, and unboxed afterwards.
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

RULES = (('embed', None), ('mlp', 'fsdp'), ('vocab', None))


def dense(features, *axes):
  init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
  return nn.Dense(features, use_bias=False, kernel_init=init)


class LanguageModel(nn.Module):

  @nn.compact
  def __call__(self, x, deterministic=False):
    x = nn.Embed(16, 32)(x)
    x = x + dense(32, 'mlp', 'embed')(nn.gelu(dense(64, 'embed', 'mlp')(x)))
    x = nn.Dropout(0.05, deterministic=deterministic)(x)
    return dense(16, 'embed', 'vocab')(x)


def unbox(state):
  return jax.tree.map(
      lambda x: x.unbox() if isinstance(x, nn.Partitioned) else x,
      state, is_leaf=lambda x: isinstance(x, nn.Partitioned),
  )


def plain(batches):
  mesh = on_mesh((2, 2), ('data', 'fsdp'))
  model = LanguageModel()

  def init(rng):
    rng = {'params': rng, 'dropout': rng}
    params = model.init(rng, jnp.zeros((1, 8), jnp.int32))['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-3))
  specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
  shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
  state = unbox(jax.jit(init, out_shardings=shardings)(jax.random.key(0)))

  @jax.jit
  def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
      logits = state.apply_fn(
          {'params': params}, batch[:, :-1], rngs={'dropout': dropout_rng}
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits, batch[:, 1:]
      )
      return losses.mean(), logits

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state, {'loss': loss}

  for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P('data')))
    args = batch, jax.random.key(1)
    state, metrics = train_step(state, *args)
    yield Done(train_step, (state, *args), metrics['loss'], state.params)


def changed(batches):
  mesh = on_mesh((2, 2), ('data', 'fsdp'))
  model = LanguageModel()

  def init(rng):
    rng = {'params': rng, 'dropout': rng}
    params = model.init(rng, jnp.zeros((1, 8), jnp.int32))['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  workers = demo_optax.Workers.on_mesh(mesh, 'data', demo_optax.param_specs(boxed(model), RULES))
  tx = optax.chain(optax.clip_by_global_norm(1.0), demo_optax.demo(3e-2, workers=workers, compressor=COMPRESSOR))
  specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
  shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
  state = unbox(jax.jit(init, out_shardings=shardings)(jax.random.key(0)))

  @demo_optax.data_parallel(workers)
  def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
      logits = state.apply_fn(
          {'params': params}, batch[:, :-1], rngs={'dropout': dropout_rng}
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits, batch[:, 1:]
      )
      return losses.mean(), logits

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state, {'loss': loss}

  for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P('data')))
    args = batch, jax.random.key(1)
    state, metrics = train_step(state, *args)
    yield Done(train_step, (state, *args), metrics['loss'], state.params)


def boxed(model):
  x = jnp.zeros((1, 8), jnp.int32)
  make = lambda: model.init(jax.random.key(0), x, True)['params']
  return jax.eval_shape(make)


def test_lines():
  assert changed_lines(plain, changed) == 3


def test_plain():
  check_learns(plain(tokens(8, 14)))


def test_changed():
  done = check_learns(changed(tokens(8, 24)), compiles_in=1)
  state, batch, _ = done.args
  specs = demo_optax.param_specs(boxed(LanguageModel()), RULES)
  workers = demo_optax.Workers.on_mesh(batch.sharding.mesh, 'data', specs)
  check_workers(done, workers, slack=100)
  kernel = state.params['Dense_0']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (32, 32)
  assert state.params['Dense_0']['kernel'].sharding.spec == P('fsdp')
  largest = max(jax.tree.leaves(state.opt_state), key=lambda x: x.size)
  assert largest.sharding.spec[0] == 'data'
  assert 'fsdp' in jax.tree.leaves(tuple(largest.sharding.spec))
