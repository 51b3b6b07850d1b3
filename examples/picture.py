"""Pictures as files, where matplotlib is installed."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def pyplot() -> Any:
  """`matplotlib.pyplot`, drawing without a screen; None if it is missing."""
  try:
    import matplotlib
  except ImportError:
    print('No picture: matplotlib is not installed.')
    return None
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  return plt


def smooth(losses: Sequence[float]) -> np.ndarray:
  """Running mean over 10 steps."""
  padded = np.concatenate([np.full(9, losses[0]), losses])
  return np.convolve(padded, np.full(10, 0.1), 'valid')


def draw_losses(runs: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws loss against steps, and against bytes sent."""
  plt = pyplot()
  runs = [run for run in runs if run['records']]
  if plt is None or not runs:
    return
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
  for number, run in enumerate(runs):
    losses = smooth([r['loss'] for r in run['records']])
    checks = [r for r in run['records'] if 'valid_loss' in r]
    for axes, key, unit in ((left, 'step', 1), (right, 'sent', 1e6)):
      axes.plot(
        [r[key] / unit for r in run['records']],
        losses,
        color=f'C{number}',
        label=run['name'],
      )
      axes.plot(
        [r[key] / unit for r in checks],
        [r['valid_loss'] for r in checks],
        'o',
        color=f'C{number}',
      )
  left.set(xlabel='step', ylabel='loss (nats per byte); held-out: dots')
  right.set(xlabel='MB sent per worker')
  if any(run['plan'].sent_bytes for run in runs):
    right.set_xscale('log')
  left.legend(frameon=False)
  save(figure, path)


def save(figure: Any, path: pathlib.Path) -> None:
  """Styles the axes of a figure, writes it to a file, and closes it."""
  for axes in figure.axes:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  pyplot().close(figure)
  print(f'Picture: {path}')
