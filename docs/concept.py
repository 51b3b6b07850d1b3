"""Draws docs/concept.png and docs/chunk.png from a small training run.

    python docs/concept.py        # four minutes

Two workers train the model of the example. concept.png is a step of `demo`: a
chunk of 16 x 16 of a feed-forward kernel, 8 coefficients sent. chunk.png is a
chunk of 64 x 64 over 200 steps, 64 coefficients sent as signs.
"""

import pathlib
import sys
from collections.abc import Iterator

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

DECAY = 0.9


def train(
  side: int, topk: int, values: str, steps: int
) -> Iterator[tuple[np.ndarray, ...]]:
  """Yields momentum, gradient, residual of a chunk; DCT `[2, side, side]`."""
  grid = chunks.chunk_grid((side, side), (side, side))
  config = GPTConfig(width=64, layers=1, heads=2)
  workers = demo_optax.Workers.simulated(2)
  graphdef, params = nnx.split(GPT(config, nnx.Rngs(0)))
  tx = optax.chain(
    demo_optax.scale_by_demo(
      demo_optax.dct_topk(side, topk, values=values), DECAY, workers=workers
    ),
    optax.scale_by_sign(),
    optax.scale_by_learning_rate(4e-3),
  )
  state = tx.init(params)
  corpus = text.load()

  @jax.jit
  def step(params, state, tokens):
    def loss_fn(params, tokens):
      return train_lm.loss_fn(nnx.merge(graphdef, params), tokens)

    grads = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(
      params, tokens.reshape(2, -1, tokens.shape[1])
    )
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, grads

  def chunk(kernel):
    return np.stack(
      [
        np.reshape(chunks.to_coefficients(x, grid, Dct()), (side, side))
        for x in kernel[:, :side, :side]
      ]
    )

  def momentum(state):
    (kernel,) = (
      x
      for name, x in demo_optax.state.momentum(state).items()
      if 'up' in name and 'kernel' in name
    )
    return chunk(kernel)

  old = momentum(state)
  for number in range(steps):
    tokens = text.batch(corpus.train, 0, number, 16, config.context)
    params, state, grads = step(params, state, tokens)
    rest = momentum(state)
    yield old, chunk(grads['blocks'][0]['up']['kernel'][...]), rest
    old = rest


def one_step(side: int, topk: int) -> tuple[np.ndarray, ...]:
  """Returns the parts of the 60th step, `[workers, side, side]`."""
  *_, (old, gradient, rest) = train(side, topk, 'float32', 60)
  sent = DECAY * old + gradient - rest
  sent = np.where(np.abs(sent) > 1e-3 * np.abs(sent).max(), sent, 0)
  assert ((sent != 0).sum((1, 2)) == topk).all()
  mean = sent.sum(0) / np.maximum((sent != 0).sum(0), 1)
  update = np.sign(
    chunks.from_coefficients(
      mean.reshape(1, -1).astype(np.float32),
      chunks.chunk_grid((side, side), (side, side)),
      Dct(),
    )
  )
  mean, update = (
    np.stack([np.reshape(x, (side, side))] * 2) for x in (mean, update)
  )
  of_dct = (DECAY * old, gradient, rest, sent, mean)
  # Coefficients are column by column.
  return (*(x.swapaxes(1, 2) for x in of_dct), update)


def draw_step(side: int = 16, topk: int = 8) -> plt.Figure:
  parts = one_step(side, topk)
  titles = (
    f'{DECAY} x old momentum',
    'gradient',
    'residual: new momentum',
    f'sent: {topk} of {side**2}',
    'mean of messages',
    'step: sign of inverse',
  )
  signs = ('+', '=', '+', '', '')
  limit = max(np.abs(x).max() for x in parts[:-1])
  figure = plt.figure(figsize=(12, 4.6))
  lefts = (0.05, 0.2, 0.35, 0.5, 0.7, 0.85)
  width = 0.122
  for row, bottom in enumerate((0.53, 0.1)):
    figure.text(
      0.025,
      bottom + 0.17,
      f'worker {row + 1}',
      rotation=90,
      va='center',
      fontsize=12,
      weight='bold',
    )
    for left, part, title, sign in zip(lefts, parts, titles, (*signs, '')):
      axes = figure.add_axes((left, bottom, width, 0.34))
      most = 1.4 if title.startswith('step') else limit
      image = axes.imshow(part[row], cmap='RdBu_r', vmin=-most, vmax=most)
      axes.set(xticks=[], yticks=[])
      if not row:
        axes.set_title(title, fontsize=10.5)
      figure.text(
        left + width + 0.014,
        bottom + 0.17,
        sign,
        fontsize=16,
        ha='center',
        va='center',
      )
      if left == lefts[0]:
        shown = image
  for start, end in ((0.70, 0.70), (0.27, 0.27), (0.70, 0.27), (0.27, 0.70)):
    figure.add_artist(
      plt.matplotlib.patches.FancyArrowPatch(
        (0.626, start),
        (0.697, end),
        transform=figure.transFigure,
        color='#0072B2',
        lw=1.5,
        arrowstyle='-|>',
        mutation_scale=13,
      )
    )
  figure.text(
    0.661,
    0.485,
    'all-gather',
    fontsize=11,
    color='#0072B2',
    ha='center',
    va='center',
    backgroundcolor='white',
  )
  bar = figure.add_axes((0.2, 0.05, 0.272, 0.022))
  figure.colorbar(
    shown, cax=bar, orientation='horizontal', ticks=[-limit, 0, limit]
  ).ax.set_xticklabels(['negative', '0', 'positive'])
  figure.text(
    0.485, 0.055, 'DCT coefficients, one scale', fontsize=10, va='center'
  )
  figure.text(
    0.85 + width,
    0.055,
    'the same on both workers',
    fontsize=10,
    va='center',
    ha='right',
  )
  return figure


def draw_chunk(side: int = 64, topk: int = 64, steps: int = 200) -> plt.Figure:
  found = list(train(side, topk, 'sign', steps))
  before = np.stack([DECAY * old[0] + new[0] for old, new, _ in found])
  after = np.stack([rest[0] for *_, rest in found])
  given = np.abs(before - after)
  sent = given > 1e-3 * given.max((1, 2), keepdims=True)
  figure, ((top, largest), (one, energy)) = plt.subplots(
    2, 2, figsize=(7.5, 6), layout='constrained'
  )

  size = np.log10(np.abs(before[-1]) + 1e-3 * np.abs(before[-1]).max())
  top.imshow(size.T, cmap='Greys')
  top.scatter(
    *np.nonzero(sent[-1]),
    s=13,
    marker='s',
    facecolors='none',
    edgecolors='#D55E00',
  )
  top.set(
    title=f'select: {topk} of {side**2} DCT coefficients', xticks=[], yticks=[]
  )

  values = before[-1][sent[-1]]
  order = np.argsort(values)
  largest.plot(values[order], 'o', color='#0072B2')
  largest.plot((before - after)[-1][sent[-1]][order], color='#D55E00')
  largest.set(
    title='quantize: the selected ones, sorted',
    xlabel='coefficient',
    ylabel='value',
  )
  for height, words, color in (
    (0.7, 'momentum', '#0072B2'),
    (0.5, 'message:\nsign, scale', '#D55E00'),
  ):
    largest.text(0.05, height, words, color=color, transform=largest.transAxes)

  often = sent[-100:].sum(0)
  place = np.unravel_index(np.argmax(often), often.shape)
  # Each step has two points: with the new gradient, and after sending.
  line = np.stack(
    [before[(slice(-100, None), *place)], after[(slice(-100, None), *place)]], 1
  ).ravel()
  time = np.repeat(np.arange(steps - 100, steps), 2)
  one.plot(time, line, color='#0072B2')
  for number in np.flatnonzero(sent[(slice(-100, None), *place)]):
    one.axvline(steps - 100 + number, color='#D55E00', lw=0.8, alpha=0.6)
  one.axhline(0, color='0.6', lw=0.8)
  one.set(
    title='feed back: one coefficient; orange: sent',
    xlabel='step',
    ylabel='value',
  )

  norms = [np.sqrt((x**2).sum((1, 2))) for x in (before, after)]
  for norm, color, name in zip(
    norms,
    ('#0072B2', '#D55E00'),
    ('with the new gradient', 'after sending: the residual'),
  ):
    energy.plot(norm, color=color, label=name)
  energy.set(title='norm of the chunk', xlabel='step', ylim=(0, None))
  energy.legend(frameon=False)
  return figure


if __name__ == '__main__':
  folder = pathlib.Path(__file__).parent
  draw_step().savefig(folder / 'concept.png', dpi=120)
  draw_chunk().savefig(folder / 'chunk.png', dpi=140)
