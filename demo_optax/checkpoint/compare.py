"""Compares saved leaves with those in the state to restore."""

import collections
import json
from collections.abc import Mapping

import numpy as np

from demo_optax._paths import STACKED, dotted
from demo_optax._tree import Words, differences, first_lines
from demo_optax.checkpoint.placement import Value
from demo_optax.compressors.layout import Record, in_words
from demo_optax.numerics import prng

# Names, in an exchange's state, of the text that describes its chunks, and of
# the digest of their places.
RECORDS, DIGEST = 'layout.records', 'layout.digest'


def read_records(text: Value) -> dict[str, Record]:
  """Reads the records of the leaves by name, JSON text as uint8."""
  return json.loads(np.asarray(text).tobytes())


def describe(leaves: Mapping[str, Value]) -> Words:
  """Describes what `_PROBLEMS` are about, in words, by name."""
  # By the beginning of the names in an exchange's state.
  records = {}
  for name, array in leaves.items():
    if name.endswith(RECORDS):
      records[name.removesuffix(RECORDS)] = read_records(array)
  words: dict[str, tuple[str, ...]] = {}
  residuals = collections.defaultdict(list)  # of each exchange
  for name, array in leaves.items():
    root, stacked, path = name.partition(STACKED)
    field, _, leaf_name = path[1:].partition('.')
    if not stacked:
      words[name] = (_type(array),)
      continue
    workers = f'{len(array)} workers'
    if root not in records:
      words[name] = f"each worker's {_type(array, 1)}", '', '', workers
    elif field == 'momentum':
      record = records[root][leaf_name or dotted(())]
      words[name] = *in_words(record), workers
    else:
      residuals[root].append(f'{leaf_name} {array.shape}')
  for root in records:
    text = 'no residuals'
    if shapes := residuals[root]:
      digest = np.asarray(leaves[root + DIGEST]).tobytes().hex()
      text = f'residuals {", ".join(shapes)} at {digest[:8]}'
    words[root + RECORDS] = 'an exchange', '', '', text
  return words


def _type(array: Value, num_axes: int = 0) -> str:
  """Describes what never changes; of a single number only its kind.

  Without the first axes of an array, for workers.
  """
  if array.shape or prng.is_key_array(array):
    shape = ','.join(map(str, array.shape[num_axes:]))
    return f'{array.dtype}[{shape}]'
  number = np.zeros((), array.dtype).item()
  return f'one {type(number).__name__}'


def check_fits(
  saved: Words,
  wanted: Words,
  remedies: Mapping[str, str],
) -> None:
  """Raises unless saved leaves, described, differ only as asked for.

  `remedies` has a sentence for each problem that is refused.
  """
  problems = enumerate(_PROBLEMS)
  allowed = [place for place, problem in problems if problem not in remedies]
  lines = collections.defaultdict(list)
  for name, place, former, current in differences(saved, wanted, allowed):
    line = f'{name}: {former} in the checkpoint, {current} here.'
    lines[_PROBLEMS[place]].append(line)
  message = ['The checkpoint must fit like, got one that differs.']
  for problem, problem_lines in lines.items():
    # A few lines say which; the remedy is the same for all.
    message += [*first_lines(problem_lines), remedies[problem]]
  if lines:
    raise ValueError('\n'.join(message))


# What the words for a leaf are about.
_PROBLEMS = 'tree', 'chunks', 'chunks', 'workers'

REMEDIES = {
  'tree': 'Restore into a tree of the same leaves, shapes and dtypes, and'
  ' change it afterwards, another optimizer by its init: nothing is cut,'
  ' padded, cast or made up.',
  'chunks': 'Pass rechunk=True to take the momentum through parameter space.',
  'workers': "Pass resize=True to regroup the workers' states, and to discard"
  " residuals of exchange='all_to_all' that have no place here.",
}
