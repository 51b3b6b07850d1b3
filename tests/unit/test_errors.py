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

# Messages that are made elsewhere, in this form; the numbers may only fall.
OTHERS = {
  'checkpoint/checkpointer.py': 2,  # what `restore` got
  'checkpoint/compare.py': 1,  # a line for each difference
  'compressors/compressor.py': 1,  # adds the leaf to the message of its basis
  'state.py': 2,  # one text for two
  'step/results.py': 1,  # `inside.differs_text`
  'step/runner.py': 1,  # adds a remedy to a message of JAX
  'workers/inside.py': 2,  # `differs_text`, and the caller's in `equal`
  'remote/frames.py': 2,
  'remote/program.py': 1,
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
