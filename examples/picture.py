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


def save(figure: Any, path: pathlib.Path) -> None:
  """Writes a figure, all of whose axes look alike, and closes it."""
  for axes in figure.axes:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  pyplot().close(figure)
  print(f'Picture: {path}')
