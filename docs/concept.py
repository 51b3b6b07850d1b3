"""Draws docs/concept.png: one step of `demo` as it is in a small training run.

    python docs/concept.py        # two minutes

Two workers train the example's model for 60 steps. Drawn is one chunk of
16 x 16 of a feed-forward kernel, of which 8 coefficients are sent.
"""

import pathlib
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import text
import train_lm
from gpt import GPT, GPTConfig

import demo_optax
from demo_optax.compressors import Dct
from demo_optax.compressors import chunking as chunks

SIDE, TOPK, DECAY, STEPS = 16, 8, 0.9, 60
GRID = chunks.chunk_grid((SIDE, SIDE), SIDE)


def train() -> tuple[np.ndarray, ...]:
  """Returns parts of one step, `[workers, SIDE, SIDE]`; all but one in DCT."""
  config = GPTConfig(width=64, layers=1, heads=2)
  workers = demo_optax.Workers.simulated(2)
  graphdef, params = nnx.split(GPT(config, nnx.Rngs(0)))
  tx = optax.chain(
      demo_optax.scale_by_demo(
          demo_optax.dct_topk(SIDE, TOPK), DECAY, workers=workers),
      optax.scale_by_sign(), optax.scale_by_learning_rate(4e-3))
  state = tx.init(params)
  corpus = text.load()

  @jax.jit
  def step(params, state, tokens):
    def loss_fn(params, tokens):
      return train_lm.loss_fn(nnx.merge(graphdef, params), tokens)

    grads = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(
        params, tokens.reshape(2, -1, tokens.shape[1]))
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, grads

  def chunk(kernel):
    return np.stack([
        np.reshape(chunks.to_coefficients(x, GRID, Dct()), (SIDE, SIDE))
        for x in kernel[:, :SIDE, :SIDE]])

  def momentum(state):
    (kernel,) = (x for name, x in demo_optax.state.momentum(state).items()
                 if 'up' in name and 'kernel' in name)
    return chunk(kernel)

  for number in range(STEPS):
    old = momentum(state) if number == STEPS - 1 else None
    tokens = text.batch(corpus.train, 0, number, 16, config.context)
    params, state, grads = step(params, state, tokens)
  assert old is not None
  gradient = chunk(grads['blocks'][0]['up']['kernel'][...])
  rest = momentum(state)
  sent = DECAY * old + gradient - rest
  sent = np.where(np.abs(sent) > 1e-3 * np.abs(sent).max(), sent, 0)
  assert ((sent != 0).sum((1, 2)) == TOPK).all()
  mean = sent.sum(0) / np.maximum((sent != 0).sum(0), 1)
  update = np.sign(chunks.from_coefficients(
      mean.reshape(1, -1).astype(np.float32), GRID, Dct()))
  mean, update = (
      np.stack([np.reshape(x, (SIDE, SIDE))] * 2) for x in (mean, update))
  of_dct = (DECAY * old, gradient, rest, sent, mean)
  # Coefficients are column by column.
  return (*(x.swapaxes(1, 2) for x in of_dct), update)


def draw() -> plt.Figure:
  parts = train()
  titles = (f'{DECAY} x old momentum', 'gradient', 'residual: new momentum',
            f'sent: {TOPK} of {SIDE**2}', 'mean of messages',
            'step: sign of inverse')
  signs = ('+', '=', '+', '', '')
  limit = max(np.abs(x).max() for x in parts[:-1])
  figure = plt.figure(figsize=(12, 4.6))
  lefts = (0.05, 0.2, 0.35, 0.5, 0.7, 0.85)
  width = 0.122
  for row, bottom in enumerate((0.53, 0.1)):
    figure.text(0.025, bottom + 0.17, f'worker {row + 1}', rotation=90,
                va='center', fontsize=12, weight='bold')
    for left, part, title, sign in zip(lefts, parts, titles, (*signs, '')):
      axes = figure.add_axes((left, bottom, width, 0.34))
      most = 1.4 if title.startswith('step') else limit
      image = axes.imshow(part[row], cmap='RdBu_r', vmin=-most, vmax=most)
      axes.set(xticks=[], yticks=[])
      if not row:
        axes.set_title(title, fontsize=10.5)
      figure.text(left + width + 0.014, bottom + 0.17, sign, fontsize=16,
                  ha='center', va='center')
      if left == lefts[0]:
        shown = image
  for start, end in ((0.70, 0.70), (0.27, 0.27), (0.70, 0.27), (0.27, 0.70)):
    figure.add_artist(plt.matplotlib.patches.FancyArrowPatch(
        (0.626, start), (0.697, end), transform=figure.transFigure,
        color='#0072B2', lw=1.5, arrowstyle='-|>', mutation_scale=13))
  figure.text(0.661, 0.485, 'all-gather', fontsize=11, color='#0072B2',
              ha='center', va='center', backgroundcolor='white')
  bar = figure.add_axes((0.2, 0.05, 0.272, 0.022))
  figure.colorbar(shown, cax=bar, orientation='horizontal', ticks=[
      -limit, 0, limit]).ax.set_xticklabels(['negative', '0', 'positive'])
  figure.text(0.485, 0.055, 'DCT coefficients, one scale', fontsize=10,
              va='center')
  figure.text(0.85 + width, 0.055, 'the same on both workers', fontsize=10,
              va='center', ha='right')
  return figure


if __name__ == '__main__':
  draw().savefig(pathlib.Path(__file__).with_name('concept.png'), dpi=120)
