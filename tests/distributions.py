"""Checks what `python -m build` made: what is in it, and what it says of itself.

    python tests/distributions.py dist
    python tests/distributions.py dist --release v0.1.0

With a tag, also what a release needs that a build does not.
"""

import argparse
import email
import pathlib
import re
import tarfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
# What a folder of the source distribution holds, at least.
IN_SOURCES = {
  'demo_optax': 'py.typed',
  'tests': 'oracle.py',
  'tests/golden': 'two_workers.npz',
  'examples': 'train_lm.py',
  'docs': 'conf.py',
  'notebooks': '01_quickstart.ipynb',
  'benchmarks': 'README.md',
  'benchmarks/results': 'muon.jsonl',
  '.': 'CITATION.cff',
}
LARGEST = 20e6  # bytes of a distribution


def only(folder: pathlib.Path, pattern: str) -> pathlib.Path:
  (found,) = folder.glob(pattern)
  assert found.stat().st_size < LARGEST, found
  return found


def check_wheel(path: pathlib.Path) -> None:
  """The package and nothing else, and metadata that an index shows."""
  wheel = zipfile.ZipFile(path)
  names = wheel.namelist()
  modules = {
    str(p.relative_to(ROOT)) for p in (ROOT / 'demo_optax').rglob('*.py')
  }
  packed = {name for name in names if name.startswith('demo_optax/')}
  assert packed == {*modules, 'demo_optax/py.typed'}, packed ^ modules
  folder = f'demo_optax-{PROJECT["project"]["version"]}.dist-info'
  assert f'{folder}/licenses/LICENSE' in names
  said = email.message_from_bytes(wheel.read(f'{folder}/METADATA'))
  assert said['License-Expression'] == 'Apache-2.0'
  assert said['Requires-Python'] == '>=3.11'
  assert said['Description-Content-Type'] == 'text/markdown'
  assert said['Author'] and said['Summary'] and said['Keywords']
  assert said.get_payload().startswith('# demo_optax')


def check_sources(path: pathlib.Path) -> None:
  """All that the tests and the site need, and nothing that was generated."""
  with tarfile.open(path) as sources:
    names = {name.split('/', 1)[1] for name in sources.getnames()}
  for folder, name in IN_SOURCES.items():
    assert (name if folder == '.' else f'{folder}/{name}') in names, name
  generated = r'(^|/)(site|__pycache__|docs/api)/|\.(pyc|egg-info)'
  assert not [name for name in names if re.search(generated, name)]


def check_release(tag: str) -> None:
  """A person has said where the project lives, and dated its changes."""
  version = PROJECT['project']['version']
  assert tag == f'v{version}', (tag, version)
  assert PROJECT['tool']['demo_optax']['repository'], 'no public address'
  assert PROJECT['project'].get('urls'), 'no [project.urls]'
  changes = (ROOT / 'CHANGELOG.md').read_text()
  assert re.search(
    rf'^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)', changes, re.M
  )


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--release', metavar='TAG')
  options = parser.parse_args()
  check_wheel(only(options.folder, '*.whl'))
  check_sources(only(options.folder, '*.tar.gz'))
  if options.release:
    check_release(options.release)
  print('The distributions are as they should be.')
