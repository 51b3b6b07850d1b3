"""What share of its gradient a worker sends, of models of stock Flax layers.

    python benchmarks/folds.py --out benchmarks/results/folds.json

`dct_topk()` in float32, by shapes alone: nothing is trained. Before: kernels
are not folded, lengths are divisors. Folded: 32 coefficients of every chunk.
Default: of small chunks in proportion.
"""

import argparse
import json
import pathlib
from unittest import mock

import jax
from flax import nnx

import demo_optax
from demo_optax.compressors import chunking


class Block(nnx.Module):
  def __init__(self, d: int, heads: int, rngs: nnx.Rngs):
    self.norms = nnx.List([nnx.LayerNorm(d, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(heads, d, decode=False, rngs=rngs)
    self.up = nnx.Linear(d, 4 * d, rngs=rngs)
    self.down = nnx.Linear(4 * d, d, rngs=rngs)


class Transformer(nnx.Module):
  """Of bytes, 256 long, four layers."""

  def __init__(self, d: int, tied: bool, rngs: nnx.Rngs):
    self.tokens = nnx.Embed(256, d, rngs=rngs)
    self.positions = nnx.Embed(256, d, rngs=rngs)
    heads = max(4, d // 64)
    self.blocks = nnx.List([Block(d, heads, rngs) for _ in range(4)])
    self.norm = nnx.LayerNorm(d, rngs=rngs)
    self.head = None if tied else nnx.Linear(d, 256, rngs=rngs)


class ViT(nnx.Module):
  """ViT-Ti/16."""

  def __init__(self, rngs: nnx.Rngs):
    d = 192
    self.patches = nnx.Conv(3, d, (16, 16), strides=16, rngs=rngs)
    self.positions = nnx.Param(jax.numpy.zeros((1, 197, d)))
    self.blocks = nnx.List([Block(d, 3, rngs) for _ in range(12)])
    self.norm = nnx.LayerNorm(d, rngs=rngs)
    self.head = nnx.Linear(d, 1000, rngs=rngs)


class ResNet(nnx.Module):
  """ResNet-18."""

  def __init__(self, rngs: nnx.Rngs):
    convolutions = [nnx.Conv(3, 64, (7, 7), use_bias=False, rngs=rngs)]
    width = 64
    for out in (64, 64, 128, 128, 256, 256, 512, 512):
      for inputs in (width, out):
        convolutions.append(
          nnx.Conv(inputs, out, (3, 3), use_bias=False, rngs=rngs)
        )
      if width != out:
        convolutions.append(
          nnx.Conv(width, out, (1, 1), use_bias=False, rngs=rngs)
        )
      width = out
    self.convolutions = nnx.List(convolutions)
    self.norms = nnx.List(
      [nnx.BatchNorm(c.out_features, rngs=rngs) for c in convolutions]
    )
    self.head = nnx.Linear(512, 1000, rngs=rngs)


MODELS = {
  **{
    f'transformer, d = {d}, {name}': (Transformer, d, tied)
    for d in (64, 256, 1024, 4096)
    for name, tied in (('tied', True), ('untied', False))
  },
  'ViT-Ti/16': (ViT,),
  'ResNet-18': (ResNet,),
}


def former_length(size: int, limit: int, *, padding: bool = True) -> int:
  """The largest divisor of at least half the limit, or the least padding."""
  del padding
  lengths = range(-(-limit // 2), limit + 1)
  return size if size <= limit else min(lengths, key=lambda l: (-size % l, -l))


def shares(model: tuple) -> dict[str, float]:
  """Parameters, and bytes sent of four each."""
  make, *arguments = model
  params = nnx.state(
    nnx.eval_shape(lambda: make(*arguments, nnx.Rngs(0))), nnx.Param
  )

  def share(proportional: bool) -> float:
    compressor = demo_optax.dct_topk(proportional=proportional)
    plan = demo_optax.plan(params, compressor, 2)
    return plan.sent_bytes / (4 * plan.size)

  with mock.patch.multiple(
    chunking,
    chunk_length=former_length,
    folds=lambda ndim, batch_dims: [None],
  ):
    before = share(False)
  size = sum(x.size for x in jax.tree.leaves(params))
  return {
    'parameters': size,
    'before': before,
    'folded': share(False),
    'default': share(True),
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  found = {name: shares(model) for name, model in MODELS.items()}
  print(
    '| model | parameters, M | before | folded | default |\n'
    '|---|---|---|---|---|'
  )
  for name, row in found.items():
    print(
      f'| {name} | {row["parameters"] / 1e6:.2f} | {row["before"]:.2%} |'
      f' {row["folded"]:.2%} | {row["default"]:.2%} |'
    )
  if args.out:
    args.out.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
