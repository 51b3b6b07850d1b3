"""Messages of errors have one form, read from the package's syntax tree.

`<argument> must be <condition>, got <value>. <Remedy>.`
"""

import ast
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import demo_optax
from demo_optax import _checks

PACKAGE = pathlib.Path(demo_optax.__file__).parent
FORM = re.compile(r'(?s)\bmust\b.*\bgot\b.*?[.?]\s+\S')

# How many messages of a file have another form; the numbers may only fall.
OTHERS = {
  # Quotes the error of a basis, which has the form.
  'compressors/compressor.py': 1,
  '_tree.py': 1,
  'checkpoint/checkpointer.py': 2,
  'checkpoint/leaves.py': 1,
  'local.py': 2,
  'recipes/matrices.py': 1,
  'remote/frames.py': 2,
  'remote/relay.py': 1,
  'replicas.py': 1,
  'state.py': 2,
  'step/agreement.py': 1,
  'step/calls.py': 5,
  'step/data_parallel.py': 5,
  'step/modules.py': 3,
  'step/remote.py': 1,
  'step/results.py': 1,
  'transformation.py': 5,
  'workers/inside.py': 10,
}


def text_of(node):
  """The constant parts of a message, with `{}` for all others."""
  if isinstance(node, ast.Constant):
    return str(node.value)
  if isinstance(node, ast.JoinedStr):
    return ''.join(map(text_of, node.values))
  if isinstance(node, ast.BinOp):
    return text_of(node.left) + text_of(node.right)
  return '{}'


def messages(source):
  """Yields the messages of raised `ValueError`s and `TypeError`s."""
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
      continue
    if ast.unparse(node.exc.func) in ('ValueError', 'TypeError'):
      yield ''.join(map(text_of, node.exc.args))


def others_in(source):
  return [text for text in messages(source) if not FORM.search(text)]


def test_the_form():
  assert not others_in(
    "raise ValueError(f'x must be {a}, got {b}.' ' Give another.')\n"
    "raise ValueError('x must be 1, got ' + x + f'. {remedy}')"
  )
  for other in (
    "raise TypeError(f'x={x} is not in {y}. Give another.')",
    "raise ValueError('x must be 1, got ' + repr(x) + '.')",
    'raise ValueError(f"x must be in {y}. Give another.")',
    'raise ValueError(message)',
  ):
    assert others_in(other), other


def test_messages_have_the_form():
  for path in sorted(PACKAGE.rglob('*.py')):
    name = path.relative_to(PACKAGE).as_posix()
    others = others_in(path.read_text())
    assert len(others) <= OTHERS.get(name, 0), (name, others)


@pytest.mark.parametrize(
  'value',
  [
    {'w': jnp.ones((64, 64)), 'b': [np.zeros(3)] * 1000},
    np.arange(900.0).reshape(30, 30),
    'word ' * 1000,
    'x' * 1000,
  ],
)
def test_values_are_cut(value):
  assert len(_checks.short(value)) == 200
  with pytest.raises(TypeError) as info:
    demo_optax.scale_by_demo(value, workers=demo_optax.Workers.simulated(2))
  assert len(str(info.value)) < 400 and '\n' not in str(info.value)


def test_a_short_value_is_whole():
  assert _checks.short('int3') == "'int3'"
  assert _checks.short(np.eye(2)) == 'array([[1., 0.], [0., 1.]])'
