"""Counts banned words, which may only become fewer."""

import ast
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
BANNED = re.compile(
  r'\b(told|tells?|anew|alike|whatever|so many|(is|are|has) none|comes? of|is to'
  r'|in the place of|[Rr]eturns what|of (his|its|their) own|lies|stands|goes on)\b|, too[.,:]'
)
PACKAGE, GUIDES = 2, 0


def words_of(path):
  """Yields docstrings, comments and error messages."""
  source = path.read_text()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
      yield ast.get_docstring(node) or ''
    elif isinstance(node, ast.Raise):
      parts = [getattr(x, 'value', '') for x in ast.walk(node)]
      yield ''.join(x for x in parts if isinstance(x, str))
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  yield from (t.string for t in tokens if t.type == tokenize.COMMENT)


def count(texts):  # of banned words, outside of code
  prose = (re.sub('(?s)```.*?```|`[^`]*`', '', text).split() for text in texts)
  return sum(len(BANNED.findall(' '.join(words))) for words in prose)


def test_words():
  assert count(['It is to lie, too.', '`told` is None']) == 2
  files = (ROOT / 'demo_optax').rglob('*.py')
  assert count(text for f in files for text in words_of(f)) <= PACKAGE
  guides = [*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')]
  assert count(path.read_text() for path in guides) <= GUIDES
