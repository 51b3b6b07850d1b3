"""A small convolutional network on handwritten digits, for `muon.py`.

scikit-learn's 1,797 digits of 8x8 pixels, which it brings with it; a fifth of
them is held out.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx


class CNN(nnx.Module):
  """Two convolutions, two dense layers; 53,000 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
    self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
    self.dense = nnx.Linear(2 * 2 * 64, 128, rngs=rngs)
    self.head = nnx.Linear(128, 10, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:  # f32[batch, 8, 8, 1]
    x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), (2, 2))
    x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
    x = nnx.relu(self.dense(x.reshape(len(x), -1)))
    return self.head(x)  # f32[batch, 10]


def load(seed: int = 0) -> tuple[Any, Any]:
  """Images f32[n, 8, 8, 1] and labels i32[n], to train and to test with."""
  from sklearn import datasets

  digits = datasets.load_digits()
  images = (digits.images[..., None] / 16).astype(np.float32)
  labels = digits.target.astype(np.int32)
  order = np.random.default_rng(seed).permutation(len(labels))
  test, train = np.split(order, [len(order) // 5])
  return (images[train], labels[train]), (images[test], labels[test])


def loss_fn(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
  logits = model(images)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
