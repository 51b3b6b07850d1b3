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

# A module may import those before it, and no other.
ORDER = [
    'tools.tables', 'engine.heuristics', 'engine.rounding', 'wire.bits', 'engine.topk',
    'wire.indices', 'wire.values', 'wire.message', 'wire.updates', 'workers.sharding',
    'workers.collectives', 'workers.base', 'workers.stacked',
    'workers.simulated', 'workers.mesh', 'workers.axis', 'workers',
    'annotations', 'compressors.bases', 'compressors.chunking', 'compressors.selectors',
    'compressors.base', 'compressors.buckets', 'compressors', 'engine.plain',
    'agreement', 'exchange', 'one_worker', 'flax', '_tree',
    'gradients', 'demo', 'recipes.matrices', 'recipes.links',
    'recipes.optimizers', 'recipes', 'accumulation', 'data_parallel',
    'tools.placement', 'state', 'local.local_updates', 'local.methods', 'local', 'checkpoint.resize', 'checkpoint.folder',
    'tools.replicas', 'checkpoint.checkpointer', 'checkpoint', 'tools.traffic',
    'tools.budget',
    'tools.hlo', 'tools.drawing', 'elastic.coordinator', 'elastic.member',
    'elastic.transfer', 'elastic.run', 'elastic', 'elastic.__main__', '__main__',
]

# What constructors, and a choice between engines, import when they are called.
LATER = {
    'workers.base': {'workers.simulated', 'workers.mesh', 'workers.axis'},
    'wire.message': {'compressors.buckets'},  # for types
    'wire.updates': {'compressors.buckets'},
}


def modules():
  """Every module's path, by its name inside the package."""
  paths = {}
  for path in PACKAGE.rglob('*.py'):
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    paths['.'.join(parts)] = path
  return paths


def imported(path, known):
  """The modules of the package that a file imports."""
  used = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if not isinstance(node, ast.ImportFrom) or not node.module:
      continue
    top, _, name = node.module.partition('.')
    if top == 'demo_optax':
      for alias in node.names:
        inner = f'{name}.{alias.name}'.strip('.')
        used.add(inner if inner in known else name)
  return used


def test_imports_go_one_way():
  files = modules()
  assert set(files) - {'', 'wire', 'tools'} == set(ORDER)
  for place, name in enumerate(ORDER):
    used = imported(files[name], files) - {'', 'wire', 'tools', 'engine'}
    assert used - LATER.get(name, set()) <= set(ORDER[:place]), name


def test_arrays_only_at_the_bottom():
  """The mathematics is readable without optax or collectives."""
  for name in ORDER[: ORDER.index('workers.sharding')]:
    text = modules()[name].read_text()
    assert 'import optax' not in text and 'all_gather' not in text


def test_import_is_light():
  """No flax, no orbax, and no computation: distributed must start later."""
  code = (
      'import sys, demo_optax, jax\n'
      'assert "flax" not in sys.modules and "orbax" not in sys.modules\n'
      'from jax._src import xla_bridge\n'
      'assert not xla_bridge._backends, "a computation was run"\n'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


PUBLIC = [
    (module, name)
    for module in (demo_optax, demo_optax.checkpoint, demo_optax.compressors,
                   demo_optax.local, demo_optax.recipes, demo_optax.state,
                   demo_optax.tools)
    for name in module.__all__ if not inspect.ismodule(getattr(module, name))]


@pytest.mark.parametrize(
    'module, name', PUBLIC, ids=lambda x: getattr(x, '__name__', x))
def test_public_names_are_documented(module, name):
  """What they are, every argument, and how functions are used."""
  thing = getattr(module, name)
  doc = inspect.getdoc(thing)
  assert doc
  if inspect.isfunction(thing):
    for section in ('Args:', 'Returns:', 'Example:'):
      assert section in doc, section
    assert '>>>' in doc
    documented = re.split(r'\n\w+:\n', doc.split('Args:')[1])[0]
    for argument in inspect.signature(thing).parameters:
      assert re.search(rf'^  \*{{0,2}}{argument}\b', documented, re.M), argument
  assert (PACKAGE / 'py.typed').exists()
