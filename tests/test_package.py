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
ORDER = ['tables', 'paths', 'chunks', 'packing', 'selection', 'index_codes', 'value_codes', 'wire',
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


# Functions that compute nothing that a formula would say better than words.
WITHOUT_FORMULA = {
    'collectives', 'param_specs', 'partition', 'settle_params', 'shared_params',
    'stack_params', 'state_specs',
}


@pytest.mark.parametrize('name', demo_optax.__all__)
def test_public_names_are_documented(name):
  """What they are, shapes, formula, errors, source, and how they are used."""
  thing = getattr(demo_optax, name)
  doc = inspect.getdoc(thing)
  assert doc and len(doc.splitlines()) > 1
  if inspect.isfunction(thing) or name.endswith('State'):
    assert re.search(r'\[[^\]\n]*\]|shape|bytes|specs', doc), 'no shapes'
  if inspect.isfunction(thing):
    for section in ('Args:', 'Returns:', 'Raises:', 'Example:', 'References:'):
      assert section in doc, section
    assert '>>>' in doc
    if name not in WITHOUT_FORMULA:
      assert ':math:' in doc or '.. math::' in doc, 'no formula'
    documented = re.split(r'\n\w+:\n', doc.split('Args:')[1])[0]
    for argument in inspect.signature(thing).parameters:
      assert re.search(rf'^  \*{{0,2}}{argument}\b', documented, re.M), argument
  assert (PACKAGE / 'py.typed').exists()
