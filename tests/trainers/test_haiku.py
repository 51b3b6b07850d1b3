"""A classifier in Haiku: bare pytrees in a NamedTuple, an average of them."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from trainer import (
  COMPRESSOR,
  Done,
  changed_lines,
  check_changed,
  check_learns,
  digits,
)

import demo_optax


class TrainingState(NamedTuple):
  params: Any
  avg_params: Any
  opt_state: Any


def net_fn(images):
  x = images.reshape(images.shape[0], -1)
  return hk.nets.MLP([48, 4])(x)


def plain(batches):
  network = hk.without_apply_rng(hk.transform(net_fn))
  optimiser = optax.adam(5e-3)

  def loss(params, batch):
    logits = network.apply(params, batch['image'])
    labels = jax.nn.one_hot(batch['label'], 4)
    l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), -1)) + 1e-4 * l2

  @jax.jit
  def update(state, batch):
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    updates, opt_state = optimiser.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, 0.1)
    return TrainingState(params, avg_params, opt_state), value

  batch = next(batches)
  params = network.init(jax.random.key(0), batch['image'])
  state = TrainingState(params, params, optimiser.init(params))
  for batch in batches:
    state, value = update(state, batch)
    yield Done(update, (state, batch), value, state.params)


def changed(batches, workers):
  network = hk.without_apply_rng(hk.transform(net_fn))
  optimiser = demo_optax.demo(3e-2, workers=workers, compressor=COMPRESSOR)

  def loss(params, batch):
    logits = network.apply(params, batch['image'])
    labels = jax.nn.one_hot(batch['label'], 4)
    l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), -1)) + 1e-4 * l2

  @demo_optax.data_parallel(workers)
  def update(state, batch):
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, 0.1)
    return TrainingState(params, avg_params, opt_state), value

  batch = next(batches)
  params = network.init(jax.random.key(0), batch['image'])
  state = TrainingState(params, params, optimiser.init(params))
  for batch in batches:
    state, value = update(state, batch)
    yield Done(update, (state, batch), value, state.params)


def test_lines():
  # The third gives the parameters to the update, as Haiku's example does not.
  assert changed_lines(plain, changed) == 3


def test_plain():
  check_learns(plain(digits(16, 14)))


@pytest.mark.parametrize('kind', ['simulated', 'auto', 'explicit'])
def test_changed(kind):
  check_changed(changed, kind, steps=18)
