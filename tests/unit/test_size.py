"""Ratchets: how many tokens the package has, and how dense its lines are.

`python tests/unit/test_size.py` prints all numbers. They may only get better.
"""

import ast
import io
import pathlib
import tokenize

PACKAGE = pathlib.Path(__file__).parents[2] / 'demo_optax'
LAYOUT = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENDMARKER,
}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree):
  """Numbers of the lines of strings that are statements."""
  for node in ast.walk(tree):
    value = getattr(node, 'value', None)
    if isinstance(node, ast.Expr) and isinstance(value, ast.Constant):
      yield from range(node.lineno, node.end_lineno + 1)


def count(text):
  """Counts what makes one file long or dense."""
  tree = ast.parse(text)
  documented = set(docstring_lines(tree))
  tokens, comments, code = 0, set(), set()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      comments.add(token.start[0])
    if token.type not in LAYOUT and token.start[0] not in documented:
      tokens += 1
      code.update(range(token.start[0], token.end[0] + 1))
  nodes = list(ast.walk(tree))
  functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
  parameters = [p for f in functions for p in f.args.args + f.args.kwonlyargs]
  annotations = [p.annotation for p in parameters if p.annotation is not None]
  stored = [
    node.id
    for function in functions
    for node in ast.walk(function)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  ]
  return {
    'tokens': tokens,
    'lines': text.count('\n'),
    'code lines': len(code),
    'comments': len(comments),
    'comprehensions': sum(isinstance(x, COMPREHENSIONS) for x in nodes),
    'conditional expressions': sum(isinstance(x, ast.IfExp) for x in nodes),
    'annotations': len(annotations),
    'Any': sum('Any' in ast.dump(x) for x in annotations),
    'letters': sum(map(len, stored)),
    'locals': len(stored),
  }


def measure():
  """Sums over the package, and the ratios that are compared with the field."""
  files = [count(path.read_text()) for path in sorted(PACKAGE.rglob('*.py'))]
  total = {name: sum(file[name] for file in files) for name in files[0]}
  thousands = total['code lines'] / 1000
  return {
    'tokens': total['tokens'],
    'tokens per code line': total['tokens'] / total['code lines'],
    'comprehensions per 1000': total['comprehensions'] / thousands,
    'conditionals per 1000': total['conditional expressions'] / thousands,
    'share of Any': total['Any'] / total['annotations'],
    'share of comments': total['comments'] / total['lines'],
    'letters of a local': total['letters'] / total['locals'],
  }


def test_count():
  text = '"""Doc."""\n\n# Why.\nx = [y for y in z] if a else b\n'
  found = count(text)
  assert found['tokens'] == 13
  assert (found['comments'], found['comprehensions']) == (1, 1)
  assert found['conditional expressions'] == 1


def test_size():
  found = measure()
  assert found['tokens'] <= 76287
  assert found['tokens per code line'] <= 7.72
  assert found['comprehensions per 1000'] <= 17
  assert found['conditionals per 1000'] <= 9.5
  assert found['share of Any'] <= 0.08
  assert found['share of comments'] >= 0.05
  assert found['letters of a local'] >= 5.85


if __name__ == '__main__':
  for name, value in measure().items():
    print(f'{name:24} {value:10.2f}')
