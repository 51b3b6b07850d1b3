"""A classifier in Equinox: functions are among a module's leaves."""

import equinox as eqx
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


class MLP(eqx.Module):
  layers: list

  def __init__(self, key):
    first, second = jax.random.split(key)
    self.layers = [
        jnp.ravel,
        eqx.nn.Linear(64, 48, key=first),
        jax.nn.relu,
        eqx.nn.Linear(48, 4, key=second),
        jax.nn.log_softmax,
    ]

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def loss_fn(model, image, label):
  scores = jax.vmap(model)(image)
  return -jnp.mean(jnp.take_along_axis(scores, label[:, None], 1))


def plain(batches):
  model = MLP(jax.random.key(0))
  optim = optax.adamw(5e-3)
  opt_state = optim.init(eqx.filter(model, eqx.is_array))

  @eqx.filter_jit
  def make_step(model, opt_state, image, label):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, image, label)
    params = eqx.filter(model, eqx.is_array)
    updates, opt_state = optim.update(grads, opt_state, params)
    model = eqx.apply_updates(model, updates)
    return model, opt_state, loss

  for batch in batches:
    args = batch['image'], batch['label']
    model, opt_state, loss = make_step(model, opt_state, *args)
    params = eqx.filter(model, eqx.is_array)
    yield Done(make_step, (model, opt_state, *args), loss, params)


def changed(batches, workers):
  model = MLP(jax.random.key(0))
  optim = demo_optax.demo(3e-2, workers=workers, compressor=COMPRESSOR)
  opt_state = optim.init(eqx.filter(model, eqx.is_array))

  @demo_optax.data_parallel(workers)
  def make_step(model, opt_state, image, label):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, image, label)
    params = eqx.filter(model, eqx.is_array)
    updates, opt_state = optim.update(grads, opt_state, params)
    model = eqx.apply_updates(model, updates)
    return model, opt_state, loss

  for batch in batches:
    args = batch['image'], batch['label']
    model, opt_state, loss = make_step(model, opt_state, *args)
    params = eqx.filter(model, eqx.is_array)
    yield Done(make_step, (model, opt_state, *args), loss, params)


def test_lines():
  assert changed_lines(plain, changed) == 2


def test_plain():
  check_learns(plain(digits(16, 14)))


@pytest.mark.parametrize('kind', ['simulated', 'auto', 'explicit'])
def test_changed(kind):
  check_changed(changed, kind, steps=18)
