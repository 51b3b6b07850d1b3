"""Compares saved leaves with those in the state to restore."""

import collections
import json
from collections.abc import Mapping

import numpy as np

from demo_optax._paths import STACKED, dotted
from demo_optax._tree import Words, differences
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
  roots = {}
  for name, text in leaves.items():
    if name.endswith(RECORDS):
      roots[name.removesuffix(RECORDS)] = read_records(text)
  words: dict[str, tuple[str, ...]] = {}
  residuals: dict[str, list[str]] = {root: [] for root in roots}
  for name, array in leaves.items():
    root, stacked, path = name.partition(STACKED)
    field, _, leaf = path[1:].partition('.')
    if not stacked:
      words[name] = (_type(array),)
      continue
    count = f'{len(array)} workers'
    if root not in roots:
      words[name] = f"each worker's {_type(array, 1)}", '', '', count
    elif field == 'momentum':
      record = roots[root][leaf or dotted(())]
      words[name] = *in_words(record), count
    else:
      residuals[root].append(f'{leaf} {array.shape}')
  for root, shapes in residuals.items():
    text = 'no residuals'
    if shapes:
      places = np.asarray(leaves[root + DIGEST]).tobytes().hex()[:8]
      text = f'residuals {", ".join(shapes)} at {places}'
    words[root + RECORDS] = 'an exchange', '', '', text
  return words


def _type(x: Value, lead: int = 0) -> str:
  """Describes what never changes; of a single number only its kind."""
  if x.shape or prng.is_key_array(x):
    return f'{x.dtype}[{",".join(map(str, x.shape[lead:]))}]'
  number = np.zeros((), x.dtype).item()
  return f'one {type(number).__name__}'


def check_fits(
  saved: Words,
  wanted: Words,
  remedies: Mapping[str, str],
) -> None:
  """Raises unless saved leaves, described, differ only as asked for.

  `remedies` has a sentence for each problem that is refused.
  """
  allowed = [
    number for number, name in enumerate(_PROBLEMS) if name not in remedies
  ]
  lines = collections.defaultdict(list)
  for name, place, old, new in differences(saved, wanted, allowed):
    line = f'{name}: {old} in the checkpoint, {new} here.'
    lines[_PROBLEMS[place]].append(line)
  text = ['The checkpoint must fit like, got one that differs.']
  for problem, problem_lines in lines.items():
    # A few lines say which; the remedy is the same for all.
    text += problem_lines[:4]
    if problem_lines[4:]:
      text.append(f'... and {len(problem_lines) - 4} more leaves.')
    text.append(remedies[problem])
  if lines:
    raise ValueError('\n'.join(text))


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
