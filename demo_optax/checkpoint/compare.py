"""Compares the leaves of a checkpoint with those of the state to restore."""

import json
from collections.abc import Iterator, Mapping

import numpy as np

from demo_optax import _paths
from demo_optax._paths import STACKED, Keys
from demo_optax.checkpoint.placement import Value, as_array
from demo_optax.compressors.layout import (
  Difference,
  Layout,
  Record,
  differences,
)


def saved_records(text: Value) -> dict[str, Record]:
  """Reads the record of the chunks, JSON text as uint8."""
  return json.loads(np.asarray(text).tobytes())


def check_fits(
  saved: Mapping[str, Value],
  wanted: Mapping[str, Value],
  layouts: Mapping[Keys, Layout],
  asked: Mapping[str, bool],
) -> None:
  """Raises unless saved leaves differ from those wanted only as asked for."""
  chunked = _chunk_differences(saved, layouts)
  problems: dict[str, list[str]] = {problem: [] for problem in _REMEDIES}
  for name in {**wanted, **saved}:
    for problem, old, new in _compare(name, saved, wanted, chunked):
      line = f'{name}: {old} in the checkpoint, {new} here.'
      problems[problem].append(line)
  text = []
  for problem, lines in problems.items():
    if not lines or asked.get(problem):
      continue
    text += lines[:4]
    if lines[4:]:
      text.append(f'... and {len(lines) - 4} more leaves.')
    text.append(_REMEDIES[problem])
  if text:
    raise ValueError(
      '\n'.join(['The checkpoint must fit like, got one that differs.', *text])
    )


def _chunk_differences(
  saved: Mapping[str, Value], layouts: Mapping[Keys, Layout]
) -> dict[str, Difference | None]:
  """Returns how the chunks of each leaf differ, by name; None if they do not.

  Coefficients are compared by these records, not by shapes.
  """
  by_name: dict[str, Difference | None] = {}
  for root, layout in layouts.items():
    where = _paths.dotted((*root, 'layout'))
    if where not in saved:
      continue
    by_name[where] = None
    former = saved_records(saved[where])
    by_leaf = {d.name: d for d in differences(former, layout.records)}
    for leaf in layout.leaves:
      for part in ('momentum', 'update_residual'):
        name = _paths.dotted((*root, STACKED, part, *leaf.keys))
        by_name[name] = by_leaf.get(leaf.name)
  return by_name


def _compare(
  name: str,
  saved: Mapping[str, Value],
  wanted: Mapping[str, Value],
  chunked: Mapping[str, Difference | None],
) -> Iterator[tuple[str, str, str]]:
  """Yields a leaf's problems, and what it is in both, in words."""
  if f'{STACKED}.message.' in name:  # it may be dropped
    return
  old, new = saved.get(name), wanted.get(name)
  if old is None or new is None:
    if f'{STACKED}.update_residual.' not in name:
      yield 'tree', _in_words(old), _in_words(new)
    elif new is None:  # without old residuals, the new ones are zeros
      yield 'workers', _in_words(old), 'no place'
    return
  old, new = as_array(old, new), as_array(new, old)
  is_stacked = STACKED in name.split('.')
  if name in chunked:
    if difference := chunked[name]:
      problem = 'chunks' if difference.is_cut_otherwise else 'tree'
      yield problem, difference.old, difference.new
  else:
    in_old, in_new = _in_words(old, is_stacked), _in_words(new, is_stacked)
    if in_old != in_new:
      yield 'tree', in_old, in_new
      return
  if is_stacked and len(old) != len(new):
    yield 'workers', f'{len(old)} workers', f'{len(new)} workers'


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
