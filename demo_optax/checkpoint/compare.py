"""Compares saved leaves with those in the state to restore."""

import json
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from demo_optax._paths import STACKED
from demo_optax.checkpoint.placement import Value, as_array
from demo_optax.compressors.layout import Record, differences


def saved_records(text: Value) -> dict[str, Record]:
  """Reads the record of the chunks, JSON text as uint8."""
  return json.loads(np.asarray(text).tobytes())


def check_fits(
  saved: Mapping[str, Value],
  wanted: Mapping[str, Value],
  layouts: Collection[str],
  asked: Mapping[str, bool],
) -> None:
  """Raises unless saved leaves differ from those wanted only as asked for.

  `layouts` are the names under which chunks are described.
  """
  problems: dict[str, list[str]] = {problem: [] for problem in _REMEDIES}
  for name in {**wanted, **saved}:
    found = _compare(
      name,
      saved.get(name),
      wanted.get(name),
      layouts,
    )
    for problem, leaf, former, current in found:
      line = f'{leaf}: {former} in the checkpoint, {current} here.'
      problems[problem].append(line)
  text = []
  for problem, lines in problems.items():
    if not lines or asked.get(problem):
      continue
    # A few lines say which; the remedy is the same for all.
    text += lines[:4]
    if lines[4:]:
      text.append(f'... and {len(lines) - 4} more leaves.')
    text.append(_REMEDIES[problem])
  if text:
    raise ValueError(
      '\n'.join(['The checkpoint must fit like, got one that differs.', *text])
    )


def _compare(
  name: str,
  saved: Value,
  wanted: Value,
  layouts: Collection[str],
) -> Iterator[tuple[str, str, str, str]]:
  """Yields a leaf's problems, its name, and what it is in both, in words."""
  is_stacked = STACKED in name.split('.')
  root, _, rest = name.partition(STACKED)
  has_chunks = is_stacked and f'{root}layout' in layouts
  part = rest.split('.')[1:2]
  if saved is None or wanted is None:
    if part != ['update_residual']:
      yield 'tree', name, _in_words(saved), _in_words(wanted)
    elif wanted is None:  # without old residuals, the new ones are zeros
      yield 'workers', name, _in_words(saved), 'no place'
    return
  # A Python number and a scalar array are the same.
  saved, wanted = as_array(saved, wanted), as_array(wanted, saved)
  if name in layouts:
    yield from _compare_chunks(name, saved, wanted)
    return
  # Coefficients are compared by their records, not by shapes.
  if not has_chunks:
    former = _in_words(saved, is_stacked)
    current = _in_words(wanted, is_stacked)
    if former != current:
      yield 'tree', name, former, current
      return
  if is_stacked and len(saved) != len(wanted):
    yield 'workers', name, f'{len(saved)} workers', f'{len(wanted)} workers'


def _compare_chunks(
  name: str, saved: Value, wanted: Value
) -> Iterator[tuple[str, str, str, str]]:
  """Yields the leaves whose chunks differ, by two layouts' records."""
  former, current = saved_records(saved), saved_records(wanted)
  root = name.removesuffix('layout')
  for leaf in differences(former, current):
    # A leaf that one of them lacks is named by its own array.
    if leaf.name in former and leaf.name in current:
      problem = 'chunks' if leaf.is_cut_otherwise else 'tree'
      place = f'{root}{STACKED}.momentum.{leaf.name}'
      yield problem, place, leaf.old, leaf.new


def _in_words(x: Value, is_stacked: bool = False) -> str:
  """Describes what never changes: type, dtype and shape."""
  if x is None:
    return 'nothing'
  if not hasattr(x, 'dtype'):
    return f'a Python {type(x).__name__}'
  owner = "each worker's " if is_stacked else ''
  lengths = ','.join(map(str, x.shape[is_stacked:]))
  return f'{owner}{x.dtype}[{lengths}]'


_REMEDIES = {
  'tree': 'Restore into a tree of the same leaves, shapes and dtypes, and'
  ' change it afterwards: nothing is cut, padded, cast or made up.',
  'chunks': 'Pass rechunk=True to take the momentum through parameter space.',
  'workers': "Pass resize=True to regroup the workers' states. Residuals of"
  " exchange='all_to_all' that have no place here are then discarded.",
}
