"""The package as a whole: imports, layers, documentation."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import demo_optax

pytestmark = pytest.mark.core

PACKAGE = pathlib.Path(demo_optax.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]

# From the ground up: a folder, or a module, imports from lower floors alone.
FLOORS = [
  '_version',
  '_checks',
  '_paths',
  'numerics',
  'codes',
  '_tree',
  'workers',
  'compressors',
  '_per_worker',
  'exchange',
  'transformation',
  'remote',
  'step',
  'recipes',
  '_plan',
  'replicas',
  'checkpoint',
  'local',
  'state',
  '__main__',
]


def floor_of(module):
  """The number of the floor of `demo_optax.<module>`."""
  parts = module.split('.')
  names = ['.'.join(parts[:n]) for n in range(len(parts), 0, -1)]
  return next(FLOORS.index(name) for name in names if name in FLOORS)


def imported(path):
  """What a file imports of the package, relative to it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    else:
      continue
    for name in names:
      top, _, inner = name.partition('.')
      if top == 'demo_optax':
        assert inner, f'{path} imports the whole package'
        yield inner


def test_imports_go_one_way():
  for path in PACKAGE.rglob('*.py'):
    own = path.relative_to(PACKAGE).with_suffix('').parts
    if own == ('__init__',):
      continue
    floor = floor_of('.'.join(own))
    for name in imported(path):
      inside = name.split('.')[0] == own[0] and floor_of(name) == floor
      assert inside or floor_of(name) < floor, f'{path} imports {name}'


def test_arrays_only_at_the_bottom():
  """The mathematics is readable without optax or collectives."""
  for folder in ('numerics', 'codes'):
    for path in (PACKAGE / folder).glob('*.py'):
      text = path.read_text()
      assert 'import optax' not in text and 'all_gather' not in text


def test_one_place_asks_for_a_relay():
  """Others ask what a kind of workers can do."""
  asking = []
  for path in PACKAGE.rglob('*.py'):
    name = path.relative_to(PACKAGE).as_posix()
    if name.split('/')[0] not in ('remote', 'workers'):
      found = re.findall(r"\.relay\b|'remote'[^,]", path.read_text())
      asking += [name] * len(found)
  assert asking == ['step/data_parallel.py']


def test_import_is_light():
  """Of what only some need, nothing; no computation before distributed."""
  code = (
    'import sys, demo_optax, jax\n'
    'assert not {"flax", "orbax", "zmq"} & {*sys.modules}\n'
    'from jax._src import xla_bridge\n'
    'assert not xla_bridge._backends, "a computation was run"\n'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


def documents():
  pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
  return '\n'.join(page.read_text() for page in pages)


def test_documents_install_from_a_clone():
  """Nothing of this name is published."""
  commands = re.findall(r'pip install[^`\n]*', documents())
  assert len(commands) > 5
  assert not [x for x in commands if 'demo_optax' in x]


def test_names_in_documents_exist():
  """All of them, after `import demo_optax` alone."""
  names = {*re.findall(r'\bdemo_optax(?:\.[A-Za-z]\w*)+', documents())}
  assert 'demo_optax.remote.pause' in names
  code = '\n'.join(['import demo_optax', *sorted(names)])
  run = subprocess.run(
    [sys.executable, '-c', code], stderr=subprocess.PIPE, text=True, timeout=120
  )
  assert run.returncode == 0, run.stderr


def test_public_names_are_documented():
  for module in (
    demo_optax,
    demo_optax.checkpoint,
    demo_optax.compressors,
    demo_optax.local,
    demo_optax.recipes,
    demo_optax.state,
  ):
    for name in module.__all__:
      assert inspect.getdoc(getattr(module, name)), name
  assert (PACKAGE / 'py.typed').exists()


def test_a_public_name_is_no_module_beside_it():
  """`import demo_optax.plan as m` would be the function."""
  modules = {path.stem for path in PACKAGE.glob('[a-z]*')}
  for name in modules & {*demo_optax.__all__}:
    assert inspect.ismodule(getattr(demo_optax, name)), name


def test_the_reference_has_every_public_name(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(ROOT / 'docs')
  import reference

  names = reference.public_names()
  assert len(names) > 40
  assert {'demo_optax.demo', 'demo_optax.remote.pause'} <= {*names}
  index = reference.index()
  reference.write(tmp_path)
  written = ''.join(path.read_text() for path in tmp_path.glob('*.md'))
  for name in names:
    assert f'`{name.removeprefix("demo_optax.")}`' in index
    assert f':: {name}\n' in written
