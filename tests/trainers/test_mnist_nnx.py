"""An image classifier in Flax NNX.

Metrics and random streams are arguments of the step, and the loss closes over
its batch.
"""

import optax
from flax import nnx
from helpers import make_workers
from trainer import (
  COMPRESSOR,
  Done,
  changed_lines,
  check_learns,
  check_workers,
  digits,
)

import demo_optax


class CNN(nnx.Module):

  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.1)
    self.linear = nnx.Linear(8 * 4 * 4, 4, rngs=rngs)

  def __call__(self, x, rngs=None):
    x = nnx.relu(self.norm(self.conv(x)))
    x = nnx.avg_pool(x, (2, 2), (2, 2))
    x = self.dropout(x.reshape(x.shape[0], -1), rngs=rngs)
    return self.linear(x)


def plain(batches):
  model = CNN(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)
  metrics = nnx.MultiMetric(
      accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average('loss')
  )
  rngs = nnx.Rngs(1)

  @nnx.jit
  def train_step(model, optimizer, metrics, rngs, batch):
    def loss_fn(model, rngs):
      logits = model(batch['image'], rngs)
      loss = optax.softmax_cross_entropy_with_integer_labels(
          logits=logits, labels=batch['label']
      ).mean()
      return loss, logits

    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs)
    metrics.update(loss=loss, logits=logits, labels=batch['label'])
    optimizer.update(model, grads)

  for batch in batches:
    train_step(model, optimizer, metrics, rngs, batch)
    computed = metrics.compute()
    assert metrics.accuracy.count[...] == len(batch['label'])
    metrics.reset()
    args = model, optimizer, metrics, rngs, batch
    yield Done(train_step, args, computed['loss'], nnx.state(model, nnx.Param))


def changed(batches, workers):
  model = CNN(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, demo_optax.demo(3e-2, workers=workers, compressor=COMPRESSOR), wrt=nnx.Param)
  metrics = nnx.MultiMetric(
      accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average('loss')
  )
  rngs = nnx.Rngs(1)

  @demo_optax.data_parallel(workers)
  def train_step(model, optimizer, metrics, rngs, batch):
    def loss_fn(model, rngs):
      logits = model(batch['image'], rngs)
      loss = optax.softmax_cross_entropy_with_integer_labels(
          logits=logits, labels=batch['label']
      ).mean()
      return loss, logits

    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs)
    metrics.update(loss=loss, logits=logits, labels=batch['label'])
    optimizer.update(model, grads)

  for batch in batches:
    train_step(model, optimizer, metrics, rngs, batch)
    computed = metrics.compute()
    assert metrics.accuracy.count[...] == len(batch['label'])
    metrics.reset()
    args = model, optimizer, metrics, rngs, batch
    yield Done(train_step, args, computed['loss'], nnx.state(model, nnx.Param))


def test_lines():
  assert changed_lines(plain, changed) == 2


def test_plain():
  check_learns(plain(digits(16, 12)))


def test_changed():
  check_learns(changed(digits(16, 16), demo_optax.Workers.simulated(4)), compiles_in=1)


def test_changed_on_a_mesh():
  with make_workers('auto') as workers:
    done = check_learns(changed(digits(16, 16), workers), compiles_in=1)
    check_workers(done, workers, slack=400)
