"""Pictures of what is sent, and of what it costs.

Functions of plain arrays and of plans, with matplotlib (`pip install
matplotlib`), which is imported when one of them is called. Import this module
by name:

    from demo_optax.tools import drawing

Those that draw one picture draw into `axes`, or into a new figure, and return
the axes; those that draw several return the figure.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from demo_optax.tools.traffic import Plan

# `matplotlib.axes.Axes` and `matplotlib.figure.Figure`, which may be missing.
Axes = Any
Figure = Any


def energy_kept(coefficients: Any) -> np.ndarray:
  r"""Returns the share of energy in the `k` largest coefficients of chunks.

  .. math:: E_k = \frac {\sum_c \sum_{i \in \text{top}_k(c)} c_i^2}
      {\sum_c \sum_i c_i^2}

  Args:
    coefficients: `[..., n]`, chunks of `n` coefficients (`to_coefficients` of a
      compressor), or of raw elements.

  Returns:
    float64 `[n + 1]`, the share for `k` from 0 to `n`; zeros if all are zero.

  Raises:
    ValueError: there is no chunk in it.

  Example:
    >>> from demo_optax.tools import drawing
    >>> drawing.energy_kept([[3., 0., -4.], [0., 5., 0.]])
    array([0.  , 0.82, 1.  , 1.  ])

  References:
    The selection of Peng et al. <https://arxiv.org/abs/2411.19870>, Algorithm
    1, whose transform is meant to make this large.
  """
  c = np.asarray(coefficients, np.float64)
  if c.ndim == 0 or not c.size:
    raise ValueError(
        f'coefficients of shape {c.shape} hold no chunk: pass [..., n], such as'
        ' what the compressor has made of a leaf.'
    )
  energy = np.sort((c * c).reshape(-1, c.shape[-1]), axis=1)[:, ::-1].sum(0)
  kept = np.concatenate([[0.0], np.cumsum(energy)])
  return kept / kept[-1] if kept[-1] else kept


def draw_energy_kept(
    coefficients: Mapping[str, Any],
    topk: Sequence[int] = (),
    axes: Axes | None = None,
) -> Axes:
  """Draws `energy_kept` against `k`, a curve for each basis.

  Args:
    coefficients: for each name in the legend, an array as for `energy_kept`.
    topk: values of `k` to mark.
    axes: where to draw; a new figure if there are none.

  Returns:
    The axes.

  Raises:
    ImportError: matplotlib is not installed.
    ValueError: there is no chunk in an array.

  Example:
    >>> import numpy as np
    >>> from demo_optax.tools import drawing
    >>> chunks = np.random.default_rng(0).normal(size=(4, 64))
    >>> axes = drawing.draw_energy_kept({'raw': chunks}, topk=[8])
    >>> axes.get_xlabel()
    'k, coefficients sent per chunk'

  References:
    The selection of Peng et al. <https://arxiv.org/abs/2411.19870>.
  """
  axes = axes or _pyplot().subplots(figsize=(6, 3.6), layout='constrained')[1]
  for name, c in coefficients.items():
    share = 100 * energy_kept(c)[1:]
    axes.plot(np.arange(1, len(share) + 1), share, label=name)
  for k in topk:
    axes.axvline(k, color='0.6', linewidth=0.8, linestyle=':')
    axes.annotate(f'k = {k} ', (k, 97), color='0.4', ha='right', va='top')
  axes.set_xscale('log', base=2)
  axes.xaxis.set_major_formatter('{x:.0f}')
  axes.set(
      xlabel='k, coefficients sent per chunk', ylabel='energy kept, %',
      ylim=(0, 100),
  )
  return _finish(axes)


def draw_chunk(
    chunk: Any, coefficients: Any, rebuilt: Any, topk: int
) -> Figure:
  """Draws a chunk, its coefficients, and what the largest of them say of it.

  Args:
    chunk: `[rows, columns]`, in parameter space.
    coefficients: `[rows, columns]`, the same after the transform.
    rebuilt: `[rows, columns]`, what is made of the `topk` that are sent.
    topk: how many are sent; they are marked.

  Returns:
    The figure, of three axes. Colours of the first and the last are the same,
    from minus to plus the largest magnitude of the chunk; coefficients are
    drawn by magnitude, in powers of ten.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> import numpy as np
    >>> from demo_optax.tools import drawing
    >>> chunk = np.random.default_rng(0).normal(size=(8, 8))
    >>> figure = drawing.draw_chunk(chunk, chunk, np.zeros((8, 8)), topk=4)
    >>> [axes.get_title() for axes in figure.axes[:3]]
    ['the chunk', 'its coefficients', 'what 4 of 64 say of it']

  References:
    The transform of Peng et al. <https://arxiv.org/abs/2411.19870>.
  """
  chunk, coefficients = np.asarray(chunk), np.asarray(coefficients)
  plt = _pyplot()
  figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), layout='constrained')
  largest = np.abs(chunk).max() or 1.0
  values = {'cmap': 'RdBu_r', 'vmin': -largest, 'vmax': largest}
  size = np.abs(coefficients)
  floor = size.max() * 1e-4 or 1.0
  logs = np.log10(np.maximum(size, floor))
  titles = 'the chunk', 'its coefficients', (
      f'what {topk} of {chunk.size} say of it'
  )
  images = [
      panels[0].imshow(chunk, **values),
      panels[1].imshow(logs, cmap='Greys'),
      panels[2].imshow(np.asarray(rebuilt), **values),
  ]
  sent = np.argsort(-size, axis=None, kind='stable')[:topk]
  rows, columns = np.unravel_index(sent, size.shape)
  panels[1].scatter(
      columns, rows, s=14, marker='s', facecolors='none', edgecolors='C3',
      linewidths=0.8,
  )
  for axes, title in zip(panels, titles):
    axes.set(title=title, xticks=[], yticks=[])
  panels[1].set_xlabel('frequency along the columns')
  panels[1].set_ylabel('frequency along the rows')
  figure.colorbar(images[1], ax=panels[1], label='log10 of the magnitude')
  figure.colorbar(images[2], ax=panels[2])
  return figure


def draw_against_steps(
    curves: Mapping[str, Any], ylabel: str, axes: Axes | None = None
) -> Axes:
  """Curves against steps: what stays behind, the energy sent, a loss.

  Args:
    curves: for each name in the legend, `[steps]`.
    ylabel: what they are.
    axes: where to draw; a new figure if there are none.

  Returns:
    The axes.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from demo_optax.tools import drawing
    >>> axes = drawing.draw_against_steps({'a': [1., 2.]}, 'norm that is kept')
    >>> axes.get_ylabel()
    'norm that is kept'

  References:
    Of `exchange_info`, in the terms of Peng et al.
    <https://arxiv.org/abs/2411.19870>.
  """
  axes = axes or _pyplot().subplots(figsize=(6, 3.6), layout='constrained')[1]
  for name, values in curves.items():
    axes.plot(np.arange(1, len(values) + 1), values, label=name)
  axes.set(xlabel='step', ylabel=ylabel)
  return _finish(axes)


def draw_agreement(selected: Any, shape: tuple[int, int]) -> Figure:
  """Draws which coefficients of a chunk how many workers have chosen.

  Args:
    selected: bool `[workers, rows * columns]`, whether a worker chose it.
    shape: `(rows, columns)` of the chunk.

  Returns:
    The figure: the chunk, coloured by the number of workers, and how many
    coefficients were chosen by one worker, by two, and so on, beside what
    workers would do who choose as many at random.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> import numpy as np
    >>> from demo_optax.tools import drawing
    >>> selected = np.array([[True, True, False, False], [True] + 3 * [False]])
    >>> figure = drawing.draw_agreement(selected, (2, 2))
    >>> [int(bar.get_height()) for bar in figure.axes[1].patches]
    [1, 1]

  References:
    The average over senders of Peng et al. <https://arxiv.org/abs/2411.19870>.
  """
  selected = np.asarray(selected, bool)  # [workers, n]
  count, n = selected.shape
  votes = selected.sum(0)
  plt = _pyplot()
  figure, (left, right) = plt.subplots(
      1, 2, figsize=(9, 3.6), layout='constrained'
  )
  colors = plt.get_cmap('magma_r', count + 1)
  image = left.imshow(
      votes.reshape(shape), cmap=colors, vmin=-0.5, vmax=count + 0.5
  )
  left.set(
      xticks=[], yticks=[], title='who chose it',
      xlabel='frequency along the columns', ylabel='frequency along the rows',
  )
  bar = figure.colorbar(image, ax=left, label='workers')
  bar.set_ticks(np.arange(count + 1))
  bars = np.arange(1, count + 1)
  right.bar(bars, [(votes == v).sum() for v in bars], color='C0',
            label='these workers')
  right.plot(bars, n * _votes_at_random(selected)[1:], 'k_', markersize=16,
             label='as many at random')
  right.set(
      xlabel='workers that chose it', ylabel='coefficients', xticks=bars,
      title='how many coefficients', yscale='log', ylim=(0.5, None),
  )
  _finish(right)
  return figure


def draw_losses(runs: Mapping[str, tuple[Any, float]], sent: str) -> Figure:
  """Losses against steps, and against bytes.

  Args:
    runs: for each name in the legend, `[steps]` losses and the bytes of a step.
    sent: what the bytes are, such as `'sent per worker'`.

  Returns:
    The figure; bytes are drawn in powers of ten.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from demo_optax.tools import drawing
    >>> runs = {'adamw': ([2., 1.], 4e6), 'demo': ([2., 1.5], 5e4)}
    >>> figure = drawing.draw_losses(runs, 'sent per worker')
    >>> figure.axes[1].get_xlabel()
    'MB sent per worker'

  References:
    Figures of Peng et al. <https://arxiv.org/abs/2411.19870>.
  """
  plt = _pyplot()
  figure, (left, right) = plt.subplots(
      1, 2, figsize=(9, 3.6), sharey=True, layout='constrained'
  )
  for name, (losses, num_bytes) in runs.items():
    steps = np.arange(1, len(losses) + 1)
    left.plot(steps, losses, label=name)
    right.plot(steps * num_bytes / 1e6, losses, label=name)
  left.set(xlabel='step', ylabel='loss')
  right.set(xlabel=f'MB {sent}', xscale='log')
  _finish(left)
  _finish(right, legend=False)
  return figure


def draw_choices(
    series: Mapping[str, Sequence[tuple[float, float, str]]],
    axes: Axes | None = None,
) -> Axes:
  """Draws what a choice costs, and the loss it ends with.

  Args:
    series: for each name in the legend, points of one line: the bytes of a
      step, the loss, and what is written beside it.
    axes: where to draw; a new figure if there are none.

  Returns:
    The axes; bytes are drawn in powers of ten.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from demo_optax.tools import drawing
    >>> points = [(13.0e3, 1.69, 'k = 8'), (49.2e3, 1.53, 'k = 32')]
    >>> axes = drawing.draw_choices({'float32': points})
    >>> [text.get_text() for text in axes.texts]
    ['k = 8', 'k = 32']

  References:
    Figures of Peng et al. <https://arxiv.org/abs/2411.19870>.
  """
  axes = axes or _pyplot().subplots(figsize=(7, 4.2), layout='constrained')[1]
  # Beside its point, for each line somewhere else: lines may meet.
  places = ((5, 5), (-5, 5), (-5, -11), (8, -3), (5, -11))
  for (name, points), place in zip(series.items(), itertools.cycle(places)):
    ordered = sorted(points)
    sent = [p[0] / 1e3 for p in ordered]
    losses = [p[1] for p in ordered]
    (line,) = axes.plot(sent, losses, 'o-', label=name)
    for x, y, (_, _, text) in zip(sent, losses, ordered):
      axes.annotate(
          text, (x, y), xytext=place, textcoords='offset points',
          ha='left' if place[0] > 0 else 'right', color=line.get_color(),
          fontsize='small',
      )
  axes.set(xlabel='kB sent per worker and step', ylabel='loss', xscale='log')
  axes.xaxis.get_major_locator().set_params(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
  axes.xaxis.set_major_formatter('{x:g}')
  axes.xaxis.set_minor_formatter('')
  return _finish(axes)


def draw_received(
    plans: Mapping[str, Plan],
    most_workers: int = 1024,
    axes: Axes | None = None,
) -> Axes:
  """Draws the bytes that a worker receives, against the number of workers.

  Args:
    plans: for each name in the legend, what `demo_optax.plan` says of the same
      parameters, for any number of workers.
    most_workers: up to how many to draw.
    axes: where to draw; a new figure if there are none.

  Returns:
    The axes. Dashed are ring all-reduces of the dense gradient, in float32 and
    bfloat16; a point marks up to where a plan receives less than the first,
    which the legend has as a number.

  Raises:
    ImportError: matplotlib is not installed.
    ValueError: there is no plan, or they are not of the same parameters.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> from demo_optax.tools import drawing
    >>> params = {'w': jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    >>> plan = demo_optax.plan(params, demo_optax.dct_topk(topk=8), workers=2)
    >>> axes = drawing.draw_received({'k = 8': plan})
    >>> axes.get_xlabel()
    'workers'

  References:
    Ring collectives: Patarasuk and Yuan, `Bandwidth optimal all-reduce
    algorithms for clusters of workstations
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.
  """
  sizes = {plan.size for plan in plans.values()}
  if len(sizes) != 1:
    raise ValueError(
        f'plans are of {sorted(sizes)} elements: give plans of the same'
        ' parameters, at least one.'
    )
  axes = axes or _pyplot().subplots(figsize=(9, 4.2), layout='constrained')[1]
  workers = np.geomspace(2, most_workers, 200)
  ring = 2 * (workers - 1) / workers
  for name, plan in plans.items():
    received = (workers - 1) * plan.payload_bytes + ring * plan.summed_bytes
    most = plan.max_workers()
    pays = f'{most} workers' if most < math.inf else 'any number'
    label = f'{name}: pays to {pays}'
    (line,) = axes.plot(workers, received / 1e6, label=label)
    if 2 <= most <= most_workers:
      dense = 2 * (most - 1) / most * plan.size * 4 / 1e6
      axes.plot(most, dense, 'o', color=line.get_color())
  (size,) = sizes
  for itemsize, style, name in ((4, '--', 'float32'), (2, ':', 'bfloat16')):
    axes.plot(workers, ring * size * itemsize / 1e6, f'k{style}',
              label=f'all-reduce, {name}')
  axes.set(
      xlabel='workers', ylabel='MB received per worker and step',
      xscale='log', yscale='log',
  )
  axes.set_xscale('log', base=2)
  axes.xaxis.set_major_formatter('{x:.0f}')
  _finish(axes).legend(
      frameon=False, fontsize='small', loc='upper left', bbox_to_anchor=(1, 1)
  )
  return axes


def _votes_at_random(selected: np.ndarray) -> np.ndarray:
  """Probability of 0, 1, ... votes if workers choose as many at random."""
  result = np.ones(1)
  for share in selected.mean(1):
    result = np.convolve(result, [1 - share, share])
  return result


def _finish(axes: Axes, legend: bool = True) -> Axes:
  axes.grid(alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)
  if legend and axes.get_legend_handles_labels()[0]:
    axes.legend(frameon=False, fontsize='small')
  return axes


def _pyplot() -> Any:
  try:
    import matplotlib.pyplot as plt
  except ImportError as error:
    raise ImportError(
        'demo_optax.tools.drawing draws with matplotlib: pip install'
        ' matplotlib.'
    ) from error
  return plt
