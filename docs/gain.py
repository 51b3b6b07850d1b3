"""Draws docs/gain.png from the records in benchmarks/results.

    python docs/gain.py

On the left what each method reaches with the bytes that a worker receives, on
the right the minutes until it has reached AdamW's final loss over a link.
"""

import json
import pathlib
import statistics
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / 'benchmarks'), str(ROOT / 'examples')]

import muon
import picture

# The label of a method: its name in links_muon.json, its row in muon.py.
METHODS = {
  'AdamW, bfloat16 all-reduce': ('AdamW bfloat16', 'AdamW'),
  'Muon, bfloat16 all-reduce': ('Muon bfloat16', 'Muon'),
  '`demo_muon`': ('demo_muon', 'demo_muon'),
}
BANDWIDTHS = {'10 Mbit/s': 10, '100 Mbit/s': 100, '1 Gbit/s': 1000}
SETTINGS = [
  'topk=8',
  'demo_muon, period 8',
  'demo_muon',
]
RUNS = muon.read()
LINKS = json.loads((ROOT / 'benchmarks/results/links_muon.json').read_text())


def runs(row: str, **other: Any) -> list[dict[str, Any]]:
  """Returns the recorded runs of a row of muon.py, one for each seed."""
  return muon.runs_of(muon.ROWS[row] | other, RUNS)


def mean_loss(row: str) -> float:
  return statistics.mean(run['loss'] for run in runs(row))


def received_kilobytes(row: str) -> float:
  """Returns kB per worker and step; those of all-reduces in bfloat16."""
  run = runs(row)[0]
  in_bfloat16 = run['sent'] == run['dense']  # counted in float32
  return float(run['received']) / (2e3 if in_bfloat16 else 1e3)


def minutes(label: str, link: str) -> float:
  """Returns the time until AdamW's final loss: steps times seconds of one."""
  method, row = METHODS[label]
  if row == 'AdamW':
    steps = 800.0
  else:
    goal = mean_loss('AdamW')
    steps = statistics.mean(muon.steps_to(run, goal) for run in runs(row))
  (seconds,) = (
    measured['step']
    for measured in LINKS
    if (measured['link'], measured['method']) == (link, method)
  )
  return float(steps * seconds / 60)


def draw_losses(axes: Any) -> None:
  """Draws final losses against bytes, with the range of three seeds."""
  for rows in (['AdamW'], ['Muon'], SETTINGS):
    color = muon.PLOTTED[rows[-1] if len(rows) == 1 else 'demo_muon']
    kilobytes = [received_kilobytes(row) for row in rows]
    means = [mean_loss(row) for row in rows]
    losses = [[run['loss'] for run in runs(row)] for row in rows]
    below = [mean - min(found) for mean, found in zip(means, losses)]
    above = [max(found) - mean for mean, found in zip(means, losses)]
    axes.errorbar(
      kilobytes, means, [below, above], color=color, marker='o', ms=5, lw=1.2
    )
  axes.set(
    xlabel='kB received per worker and step',
    xscale='log',
    xlim=(15, 8e3),
    ylabel='validation loss after 800 steps',
    ylim=(1.29, 1.49),
  )
  ticks = [30, 100, 300, 1000, 3000]
  axes.set_xticks(ticks, [f'{tick:,}' for tick in ticks])
  axes.minorticks_off()
  label(axes, 'AdamW, all-reduce in bfloat16', (2999, 1.471), (-8, 0), 'right')
  label(axes, 'Muon, all-reduce in bfloat16', (2999, 1.315), (-8, 0), 'right')
  label(axes, '8 of 4,096 coefficients', (28.9, 1.409), (8, 4))
  label(axes, 'a period of 8', (63.0, 1.338), (-6, -8), 'right')
  label(axes, 'demo_muon', (104.4, 1.326), (8, 8))


def draw_minutes(axes: Any) -> None:
  """Draws the minutes to AdamW's final loss against the bandwidth."""
  for method, (_, row) in METHODS.items():
    at = [minutes(method, link) for link in BANDWIDTHS]
    color = muon.PLOTTED[row]
    axes.plot(list(BANDWIDTHS.values()), at, 'o-', color=color, ms=5, lw=1.2)
    label(axes, row, (10, at[0]), (-2, -16) if row == 'Muon' else (8, 8))
  axes.set(
    xlabel='bandwidth of each worker',
    xscale='log',
    yscale='log',
    ylabel="minutes to AdamW's final loss",
    ylim=(1.5, 80),
  )
  axes.set_xticks(list(BANDWIDTHS.values()), list(BANDWIDTHS))
  axes.set_yticks([2, 5, 10, 20, 50], ['2', '5', '10', '20', '50'])
  axes.minorticks_off()


def label(
  axes: Any,
  text: str,
  point: tuple[float, float],
  shift: tuple[int, int],
  side: str = 'left',
) -> None:
  """Writes beside a point, at a distance in typographic points."""
  axes.annotate(
    text,
    point,
    shift,
    textcoords='offset points',
    ha=side,
    va='center',
    fontsize=8,
  )


def main() -> None:
  plt = picture.pyplot()
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
  draw_losses(left)
  draw_minutes(right)
  picture.save(figure, ROOT / 'docs/gain.png')


if __name__ == '__main__':
  main()
