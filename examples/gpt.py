"""A small GPT in Flax NNX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class GPTConfig:
  """Sizes of the model; the defaults make 1.0 M parameters."""

  vocab: int = 256
  context: int = 64
  width: int = 192
  layers: int = 2
  heads: int = 6


def _initializers(config: GPTConfig) -> tuple[Any, Any]:
  """Of all weights, and of those that add to the residual stream."""
  scale = config.width**-0.5
  normal = nnx.initializers.normal
  return normal(scale), normal(scale / (2 * config.layers) ** 0.5)


def _sharded(init: Any, *axes: str | None) -> Any:
  """`init`, annotated with the mesh axes of its dimensions if there are any."""
  return nnx.with_partitioning(init, axes) if any(axes) else init


class Block(nnx.Module):
  """Attention and a feed-forward layer, normalised before each."""

  def __init__(
    self, config: GPTConfig, rngs: nnx.Rngs, fsdp: str | None = None
  ):
    d = config.width
    init, out_init = _initializers(config)
    init, out_init = _sharded(init, None, fsdp), _sharded(out_init, fsdp, None)
    self.heads = config.heads
    self.norm1 = nnx.RMSNorm(d, rngs=rngs)
    self.norm2 = nnx.RMSNorm(d, rngs=rngs)
    self.qkv = nnx.Linear(d, 3 * d, kernel_init=init, rngs=rngs)
    self.proj = nnx.Linear(d, d, kernel_init=out_init, rngs=rngs)
    self.up = nnx.Linear(d, 4 * d, kernel_init=init, rngs=rngs)
    self.down = nnx.Linear(4 * d, d, kernel_init=out_init, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # f32[batch, time, width]
    batch, time, width = x.shape
    qkv = self.qkv(self.norm1(x))
    q, k, v = jnp.split(
      qkv.reshape(batch, time, self.heads, 3 * width // self.heads), 3, -1
    )
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + self.proj(attended.reshape(batch, time, width))
    return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
  """Next-token logits of a causal transformer.

  With `fsdp`, the name of a mesh axis, all matrices but the positions are
  annotated as sharded over it; norms and biases are replicated.
  """

  def __init__(
    self, config: GPTConfig, rngs: nnx.Rngs, fsdp: str | None = None
  ):
    init, _ = _initializers(config)
    self.config = config
    self.token_embedding = nnx.Embed(
      config.vocab,
      config.width,
      embedding_init=_sharded(init, fsdp, None),
      rngs=rngs,
    )
    self.position_embedding = nnx.Embed(
      config.context, config.width, embedding_init=init, rngs=rngs
    )
    self.blocks = nnx.List(
      [Block(config, rngs, fsdp) for _ in range(config.layers)]
    )
    self.norm = nnx.RMSNorm(config.width, rngs=rngs)
    self.head = nnx.Linear(
      config.width,
      config.vocab,
      use_bias=False,
      kernel_init=_sharded(init, None, fsdp),
      rngs=rngs,
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:  # i32[batch, time]
    positions = jnp.arange(tokens.shape[1])
    x = self.token_embedding(tokens) + self.position_embedding(positions)
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))  # f32[batch, time, vocab]


def generate(model: GPT, prompt: np.ndarray, length: int, seed: int) -> bytes:
  """Continues a prompt of at least `context` bytes."""
  context = model.config.context

  @nnx.jit
  def next_byte(model: GPT, window: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, model(window)[0, -1] / 0.7)

  tokens = list(prompt.astype(np.int32))
  for key in jax.random.split(jax.random.key(seed), length):
    window = np.array(tokens[-context:], np.int32)[None]
    tokens.append(int(next_byte(model, window, key)))
  return bytes(tokens[len(prompt) :])
