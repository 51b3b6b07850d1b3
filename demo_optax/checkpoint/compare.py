"""Compares saved leaves with those in the state to restore."""

import collections
import json
from collections.abc import Iterator, Mapping

import numpy as np

from demo_optax._paths import STACKED
from demo_optax.checkpoint.placement import Value, as_array
from demo_optax.compressors.layout import Record, differences

# Names, in an exchange's state, of the text that describes its chunks, and of
# the digest of their places.
RECORDS, DIGEST = 'layout.records', 'layout.digest'


def read_records(text: Value) -> dict[str, Record]:
  """Reads the record of the chunks, JSON text as uint8."""
  return json.loads(np.asarray(text).tobytes())


def has_same_places(
  name: str,
  saved: Mapping[str, Value],
  wanted: Mapping[str, Value],
) -> bool:
  """Returns whether residuals are for the chunks that are here."""
  if name not in saved or name not in wanted:
    return False
  digest = name.partition(STACKED)[0] + DIGEST
  has_same_shape = saved[name].shape == wanted[name].shape
  return has_same_shape and np.array_equal(saved[digest], wanted[digest])


def check_fits(
  saved: Mapping[str, Value],
  wanted: Mapping[str, Value],
  remedies: Mapping[str, str],
) -> None:
  """Raises unless saved leaves differ from those wanted only as asked for.

  `remedies` has a sentence for each problem that is refused.
  """
  problems: dict[str, list[str]] = collections.defaultdict(list)
  for name in {**wanted, **saved}:
    for problem, leaf, former, current in _compare(name, saved, wanted):
      line = f'{leaf}: {former} in the checkpoint, {current} here.'
      problems[problem].append(line)
  text = ['The checkpoint must fit like, got one that differs.']
  for problem, remedy in remedies.items():
    if lines := problems[problem]:
      # A few lines say which; the remedy is the same for all.
      text += lines[:4]
      if lines[4:]:
        text.append(f'... and {len(lines) - 4} more leaves.')
      text.append(remedy)
  if text[1:]:
    raise ValueError('\n'.join(text))


def _compare(
  name: str,
  all_saved: Mapping[str, Value],
  all_wanted: Mapping[str, Value],
) -> Iterator[tuple[str, str, str, str]]:
  """Yields a leaf's problems, its name, and what it is in both, in words."""
  saved, wanted = all_saved.get(name), all_wanted.get(name)
  is_stacked = STACKED in name.split('.')
  root, _, rest = name.partition(STACKED)
  part = ''
  if is_stacked and f'{root}{RECORDS}' in all_wanted:
    part = rest.split('.')[1]  # a field in an exchange's `WorkerState`
  if part == 'update_residual':
    is_lost = not has_same_places(name, all_saved, all_wanted)
    # Without old residuals, the new ones are zeros.
    if is_lost and saved is not None:
      yield 'workers', name, _in_words(saved), _in_words(wanted)
    return
  if saved is None or wanted is None:
    yield 'tree', name, _in_words(saved), _in_words(wanted)
    return
  # A Python number and a scalar array are the same.
  saved, wanted = as_array(saved, wanted), as_array(wanted, saved)
  if name.endswith(RECORDS):
    yield from _compare_chunks(saved, wanted)
  if name.endswith((RECORDS, DIGEST)):
    return
  # Coefficients are compared by their records, not by shapes.
  if part != 'momentum':
    former = _in_words(saved, is_stacked)
    current = _in_words(wanted, is_stacked)
    if former != current:
      yield 'tree', name, former, current
      return
  if is_stacked and len(saved) != len(wanted):
    yield 'workers', name, f'{len(saved)} workers', f'{len(wanted)} workers'


def _compare_chunks(
  saved: Value, wanted: Value
) -> Iterator[tuple[str, str, str, str]]:
  """Yields the leaves whose chunks differ, by two layouts' records."""
  former, current = read_records(saved), read_records(wanted)
  for leaf in differences(former, current):
    # A leaf that one of them lacks is named by its own array.
    if leaf.name in former and leaf.name in current:
      problem = 'chunks' if leaf.is_cut_otherwise else 'tree'
      yield problem, leaf.name, leaf.old, leaf.new


def _in_words(x: Value, is_stacked: bool = False) -> str:
  """Describes what never changes: type, dtype and shape."""
  if x is None:
    return 'nothing'
  if not hasattr(x, 'dtype'):
    return f'a Python {type(x).__name__}'
  owner = "each worker's " if is_stacked else ''
  lengths = ','.join(map(str, x.shape[is_stacked:]))
  return f'{owner}{x.dtype}[{lengths}]'


REMEDIES = {
  'tree': 'Restore into a tree of the same leaves, shapes and dtypes, and'
  ' change it afterwards: nothing is cut, padded, cast or made up.',
  'chunks': 'Pass rechunk=True to take the momentum through parameter space.',
  'workers': "Pass resize=True to regroup the workers' states, and to discard"
  " residuals of exchange='all_to_all' that have no place here.",
}
