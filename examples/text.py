"""Bytes of real text, split by document."""

import pathlib
import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import demo_optax


class Corpus(NamedTuple):
  """Training and validation text, uint8 `[n]`; no document is in both."""

  train: np.ndarray
  valid: np.ndarray


def load(path: str | None = None) -> Corpus:
  """Loads a file, a folder, or Python's help topics.

  A folder has one document per file. A file is cut into documents of at least
  2,000 characters: at blank lines, or if it has few, at lines or spaces. Every
  tenth document is held out. Documents quote each other, so the paragraphs of
  held-out documents are removed from all others.
  """
  if path is None:
    topics = pydoc_data.topics.topics
    documents = [topics[name] for name in sorted(topics)]
  elif pathlib.Path(path).is_dir():
    files = sorted(p for p in pathlib.Path(path).rglob('*') if p.is_file())
    documents = [p.read_text(errors='replace') for p in files]
  else:
    documents = _cut(pathlib.Path(path).read_text(errors='replace'))
  if len(documents) < 2:
    raise ValueError(
      f'{path} has {len(documents)} document(s), but validation needs a'
      ' second one. Give a longer file, or a folder.'
    )
  held_out = range(min(5, len(documents) - 1), len(documents), 10)
  valid = [documents[i] for i in held_out]
  quoted = {p.strip() for d in valid for p in d.split('\n\n')}
  train = [
    '\n\n'.join(p for p in d.split('\n\n') if p.strip() not in quoted)
    for i, d in enumerate(documents)
    if i not in held_out
  ]
  return Corpus(_join(train), _join(valid))


def batch(
  text: np.ndarray, seed: int, step: int, size: int, length: int
) -> np.ndarray:
  """Random windows of training text: a function of seed and step alone.

  Returns:
    int32 `[size, length + 1]`; inputs and, shifted by one, targets.
  """
  rng = np.random.default_rng((seed, step))
  starts = rng.integers(0, len(text) - length, size)
  return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def make_feed(
  text: np.ndarray,
  seed: int,
  size: int,
  length: int,
  workers: demo_optax.Workers,
  rank: int = 0,
) -> Callable[[int], Any]:
  """`step -> tokens`: of all workers, or with a relay of the worker `rank`."""

  def rows(step: int) -> np.ndarray:
    return batch(text, seed, step, size, length)

  if workers.kind == 'remote':
    return lambda step: np.split(rows(step), workers.count)[rank]
  if workers.mesh is None:
    return rows
  sharding = NamedSharding(workers.mesh, PartitionSpec(workers.axis_name))

  def placed(step: int) -> jax.Array:  # each process places its devices' rows
    tokens = rows(step)
    return jax.make_array_from_callback(
      tokens.shape, sharding, lambda at: tokens[at]
    )

  return placed


def windows(text: np.ndarray, size: int, length: int) -> np.ndarray:
  """All of a text in order, int32 `[batches, size, length + 1]`."""
  available = (len(text) - 1) // length
  if available < 1:
    raise ValueError(
      f'The validation text of {len(text)} bytes holds no window of'
      f' {length + 1}: give more data, or a shorter --context.'
    )
  size = min(size, available)
  count = available // size * size
  starts = np.arange(count) * length
  cut = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
  return cut.reshape(-1, size, length + 1)


def _join(documents) -> np.ndarray:
  return np.frombuffer('\0'.join(documents).encode(), np.uint8)


def _cut(text: str) -> list[str]:
  for separator in ('\n\n', '\n', ' '):
    documents = ['']
    for part in text.split(separator):
      if len(documents[-1]) >= 2000:
        documents.append('')
      documents[-1] += part + separator
    if len(documents) >= 10:
      break
  return documents
