"""Prints the lowest versions that pyproject.toml allows, as constraints for pip.

    python tests/lowest.py test > lowest.txt
    pip install -c lowest.txt '.[test]'

Names of extras may follow. Run by CI, in an environment of its own.
"""

import pathlib
import re
import sys
import tomllib

PROJECT = pathlib.Path(__file__).parents[1] / 'pyproject.toml'


def pins(project: dict, extras: list[str]) -> list[str]:
  """Returns `name==version` for every `name>=version`."""
  wanted = list(project['dependencies'])
  for extra in extras:
    wanted += project['optional-dependencies'][extra]
  found = [re.fullmatch(r'([\w-]+)(?:\[\w+\])?>=([\w.]+)', x) for x in wanted]
  return sorted(
    {
      f'{name}=={version}'
      for name, version in (match.groups() for match in found if match)
    }
  )


if __name__ == '__main__':
  project = tomllib.loads(PROJECT.read_text())['project']
  print('\n'.join(pins(project, sys.argv[1:])))
