"""Fine-tuning in Flax NNX: nnx.LoRAParam is trained, nnx.Param stays."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainer import (
  COMPRESSOR,
  Done,
  changed_lines,
  check_changed,
  check_learns,
  digits,
)

import demo_optax


class Classifier(nnx.Module):

  def __init__(self, rngs):
    self.up = nnx.LoRALinear(64, 64, lora_rank=16, rngs=rngs)
    self.down = nnx.LoRALinear(64, 4, lora_rank=16, rngs=rngs)

  def __call__(self, x):
    return self.down(jnp.tanh(self.up(x.reshape(x.shape[0], -1))))


def plain(batches):
  model = Classifier(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(2e-2), wrt=nnx.LoRAParam)

  @nnx.jit
  def train_step(model, optimizer, batch):
    def loss_fn(model):
      return optax.softmax_cross_entropy_with_integer_labels(
          model(batch['image']), batch['label']
      ).mean()

    lora = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=lora)(model)
    optimizer.update(model, grads)
    return loss

  for batch in batches:
    loss = train_step(model, optimizer, batch)
    args = model, optimizer, batch
    yield Done(train_step, args, loss, nnx.state(model, nnx.LoRAParam))


def changed(batches, workers):
  model = Classifier(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, demo_optax.demo(5e-2, workers=workers, compressor=COMPRESSOR), wrt=nnx.LoRAParam)

  @demo_optax.data_parallel(workers)
  def train_step(model, optimizer, batch):
    def loss_fn(model):
      return optax.softmax_cross_entropy_with_integer_labels(
          model(batch['image']), batch['label']
      ).mean()

    lora = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=lora)(model)
    optimizer.update(model, grads)
    return loss

  for batch in batches:
    loss = train_step(model, optimizer, batch)
    args = model, optimizer, batch
    yield Done(train_step, args, loss, nnx.state(model, nnx.LoRAParam))


def test_lines():
  assert changed_lines(plain, changed) == 2


def test_plain():
  check_learns(plain(digits(16, 14)))


@pytest.mark.parametrize('kind', ['simulated', 'auto', 'explicit'])
def test_changed(kind):
  before = np.asarray(Classifier(nnx.Rngs(0)).up.kernel[...])
  done = check_changed(changed, kind, steps=24)
  np.testing.assert_array_equal(done.args[0].up.kernel[...], before)
