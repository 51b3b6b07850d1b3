"""The package as a whole: imports, layers, documentation."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import demo_optax

pytestmark = pytest.mark.core

PACKAGE = pathlib.Path(demo_optax.__file__).parent

# A module may import those before it, and no other.
ORDER = ['tables', 'paths', 'chunks', 'selection', 'packing', 'index_codes', 'value_codes', 'wire',
         'compressors', 'kernel_math', 'kernels_gpu', 'kernels_tpu', 'kernels',
         'specs', 'workers', 'modules', 'trees', 'gradients',
         'exchange', 'demo', 'partitioning', 'inspection', 'local_updates', 'elastic', 'replicas', 'checkpoint', 'accounting',
         'hlo', 'drawing', '__main__']


def test_imports_go_one_way():
  files = {p.stem for p in PACKAGE.glob('*.py')} - {'__init__'}
  assert files == set(ORDER)
  for place, name in enumerate(ORDER):
    tree = ast.parse((PACKAGE / f'{name}.py').read_text())
    used = set()
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == 'demo_optax':
          used |= {alias.name for alias in node.names}
        elif node.module.startswith('demo_optax.'):
          used.add(node.module.split('.')[1])
    assert used <= set(ORDER[:place]), name


def test_arrays_only_at_the_bottom():
  """The mathematics is readable without optax or collectives."""
  for name in ORDER[: ORDER.index('compressors')]:
    text = (PACKAGE / f'{name}.py').read_text()
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


@pytest.mark.parametrize('name', demo_optax.__all__)
def test_public_names_are_documented(name):
  thing = getattr(demo_optax, name)
  doc = inspect.getdoc(thing)
  assert doc and len(doc.splitlines()) > 1
  if inspect.isfunction(thing):
    for section in ('Args:', 'Returns:', 'Raises:', 'Example:', 'References:'):
      assert section in doc, section
    assert '>>>' in doc
  assert (PACKAGE / 'py.typed').exists()
