"""A language model in Linen under jax.pmap, with a TrainState.

pmap maps a step over devices by itself: the workers are those of its axis.
"""

import functools

import flax.linen as nn
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training.train_state import TrainState
from trainer import (
  COMPRESSOR,
  Done,
  changed_lines,
  check_learns,
  tokens,
)

import demo_optax


class GPT(nn.Module):

  @nn.compact
  def __call__(self, x, deterministic):
    x = nn.Embed(16, 32)(x)
    x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
    x = nn.Dropout(0.05, deterministic=deterministic)(x)
    return nn.Dense(16, use_bias=False)(x)


def plain(batches):
  model = GPT()
  tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(5e-3),
      optax.apply_every(1),
  )

  @functools.partial(jax.pmap, axis_name='batch')
  def train_step(state, tokens, dropout_key):
    dropout_key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
      logits = state.apply_fn(
          params, tokens[:, :-1], False, rngs={'dropout': dropout_key}
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits, tokens[:, 1:]
      )
      return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, axis_name='batch')
    loss = jax.lax.pmean(loss, axis_name='batch')
    return loss, state.apply_gradients(grads=grads)

  params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32), True)
  state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
  state = jax_utils.replicate(state, jax.devices()[:4])
  keys = jax.random.split(jax.random.key(1), 4)
  for batch in batches:
    args = batch.reshape(4, -1, batch.shape[-1]), keys
    loss, state = train_step(state, *args)
    yield Done(train_step, (state, *args), loss[0], state.params)


def changed(batches):
  model = GPT()
  tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      demo_optax.demo(3e-2, workers=demo_optax.Workers.on_axis('batch'), compressor=COMPRESSOR),
      optax.apply_every(1),
  )

  @functools.partial(jax.pmap, axis_name='batch')
  def train_step(state, tokens, dropout_key):
    dropout_key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
      logits = state.apply_fn(
          params, tokens[:, :-1], False, rngs={'dropout': dropout_key}
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits, tokens[:, 1:]
      )
      return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss = jax.lax.pmean(loss, axis_name='batch')
    return loss, state.apply_gradients(grads=grads)

  params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32), True)
  state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
  state = jax_utils.replicate(state, jax.devices()[:4])
  keys = jax.random.split(jax.random.key(1), 4)
  for batch in batches:
    args = batch.reshape(4, -1, batch.shape[-1]), keys
    loss, state = train_step(state, *args)
    yield Done(train_step, (state, *args), loss[0], state.params)


def test_lines():
  # One for the optimizer; one, which averages gradients, goes.
  assert changed_lines(plain, changed) == 2


def test_plain():
  check_learns(plain(tokens(16, 14)))


def test_changed():
  done = check_learns(changed(tokens(16, 24)), compiles_in=2)
  compiled = done.step.lower(*done.args).compile()
  found = hlo_text.collectives(compiled)
  received = sum(c.received_bytes for c in found)
  one = jax.tree.map(lambda x: x[0], done.params)
  message = demo_optax.plan(one, COMPRESSOR, 4).received_bytes
  assert message <= received <= message + 200
  for x in jax.tree.leaves(done.params):
    for other in x[1:]:
      np.testing.assert_array_equal(x[0], other)
  # What jax_utils.unreplicate would lose: each worker's own momentum.
  momentum = max(
      jax.tree.leaves(done.args[0].opt_state), key=lambda x: x.ndim
  )
  assert len({np.asarray(x).tobytes() for x in momentum}) == 4
