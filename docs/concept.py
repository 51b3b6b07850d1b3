"""Draws docs/concept.png, an exchange with real arrays."""

import pathlib

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import demo_optax
from demo_optax.compressors import Dct
from demo_optax.compressors import chunking as chunks

SIDE, TOPK, DECAY = 16, 10, 0.9
BUCKET = f'bucket_000_{SIDE}x{SIDE}'
GRID = chunks.chunk_grid((SIDE, SIDE), SIDE)


def draw() -> plt.Figure:
  workers = demo_optax.Workers.simulated(2)
  compressor = demo_optax.dct_topk(SIDE, TOPK)
  tx = demo_optax.scale_by_demo(compressor, DECAY, workers=workers)
  rng = np.random.default_rng(3)
  waves = np.outer(np.cos(np.arange(SIDE) / 3), np.sin(np.arange(SIDE) / 4))

  def gradients() -> jnp.ndarray:
    noise = rng.normal(size=(2, SIDE, SIDE))
    return jnp.asarray(waves + 0.5 * noise, jnp.float32)

  params = jnp.zeros((SIDE, SIDE))
  state = tx.init(params)
  for _ in range(4):
    update, state = tx.update(gradients(), state, params)
  g = gradients()
  before = state.worker_stacked.momentum[BUCKET].reshape(2, SIDE, SIDE)
  update, state = tx.update(g, state, params)
  after = np.asarray(state.worker_stacked.momentum[BUCKET])
  after = after.reshape(2, SIDE, SIDE)
  coefficients = [chunks.to_coefficients(x, GRID, Dct()) for x in g]
  held = np.asarray(
      DECAY * before + np.reshape(coefficients, (2, SIDE, SIDE))
  )
  sent = held - after

  figure = plt.figure(figsize=(11, 4.3))
  width, height = 0.115, 0.32
  left = [0.055, 0.225, 0.395, 0.565]
  bottom = [0.60, 0.09]

  def show(x, y, array, title, below='', zeros=False):
    axes = figure.add_axes((x, y, width, height))
    limit = np.abs(array).max()
    shown = np.ma.masked_equal(array, 0) if zeros else array
    axes.imshow(shown, cmap='RdBu', vmin=-limit, vmax=limit)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=9.5, pad=4)
    axes.set_xlabel(below, fontsize=8.5, labelpad=3)

  def arrow(start, end, text='', at=None, curve=0.0, color='0.35'):
    figure.add_artist(
        plt.matplotlib.patches.FancyArrowPatch(
            start, end, transform=figure.transFigure, color=color, lw=1.3,
            arrowstyle='-|>', mutation_scale=12,
            connectionstyle=f'arc3,rad={curve}',
        )
    )
    if text:
      figure.text(*at, text, ha='center', va='center', fontsize=8.5)

  for i, y in enumerate(bottom):
    middle = y + height / 2
    figure.text(
        0.022, middle, f'worker {i + 1}', rotation=90, va='center',
        ha='center', fontsize=11, weight='bold',
    )
    show(left[0], y, np.asarray(g[i]), r'gradient $g_i$')
    show(left[1], y, held[i].T, r'momentum, DCT of chunks', 'its own')
    show(left[2], y, after[i].T, 'what stays behind',
         'until it is large enough')
    show(left[3], y, sent[i].T, f'sent: top {TOPK} of {SIDE * SIDE}',
         'indices and values, few bits', zeros=True)
    arrow((left[0] + width + 0.004, middle), (left[1] - 0.004, middle))
    for x, sign in ((left[2], '='), (left[3], '+')):
      figure.text(x - 0.029, middle, sign, fontsize=15, ha='center',
                  va='center', color='0.35')
    arrow((left[3] + width + 0.006, middle), (0.748, (0.76, 0.66)[i]),
          color='C0')
  figure.text(0.718, 0.79, 'all_gather', fontsize=8.5, color='C0', ha='center')
  merged = np.asarray(
      chunks.to_coefficients(update, GRID, Dct())
  ).reshape(SIDE, SIDE)
  merged = np.where(np.abs(merged) > 1e-5, merged, 0)
  show(0.755, 0.60, merged.T, 'mean of what was sent', zeros=True)
  show(0.735, 0.09, np.asarray(update), 'transformed back')
  show(0.875, 0.09, np.sign(np.asarray(update)), 'its sign: the step')
  figure.text(0.862, 0.03, 'the same on all workers', ha='center',
              fontsize=8.5)
  arrow((0.735 + width / 2 + 0.01, 0.58), (0.735 + width / 2 + 0.01, 0.475))
  arrow((0.735 + width + 0.003, 0.25), (0.872, 0.25))
  return figure


if __name__ == '__main__':
  draw().savefig(pathlib.Path(__file__).with_name('concept.png'), dpi=120)
