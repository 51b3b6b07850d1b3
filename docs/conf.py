"""The site: `sphinx-build -W -c docs . site`, from the root, offline.

The root is the source folder, so that links between the guides, the README, the
benchmarks and the notebooks are the same on the site and in the repository. The
front page is the README. Nothing on the site is loaded from elsewhere.
"""

import importlib.util
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'docs')]

import chex
import optax
import reference
from docutils import nodes
from sphinx import addnodes
from sphinx.util.typing import stringify_annotation

import demo_optax

project = 'demo_optax'
copyright = 'the demo_optax authors'
version = release = demo_optax.__version__

extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.intersphinx',
  'sphinx.ext.mathjax',
  'sphinx.ext.napoleon',
  'sphinx_copybutton',
]
root_doc = 'README'
include_patterns = [
  'docs/*.md',
  'docs/api/*.md',
  'README.md',
  'CHANGELOG.md',
  'CONTRIBUTING.md',
  'benchmarks/*.md',
  'notebooks/*.ipynb',
]
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # they are committed with their outputs
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
autodoc_member_order = 'bysource'
python_maximum_signature_line_length = 60  # longer: one argument a line
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes as one list
html_theme = 'furo'
html_title = f'demo_optax {version}'

# Formulas: the package brings MathJax, of which one file is needed.
_MATHJAX = importlib.util.find_spec('sphinx-mathjax-offline')
html_static_path = [
  str(pathlib.Path(_MATHJAX.origin).parent / 'static/mathjax/tex-svg.js'),
  'site.css',
]
mathjax_path = 'tex-svg.js'
html_css_files = ['site.css']
html_search_scorer = 'docs/scorer.js'  # guides before benchmarks
copybutton_exclude = '.linenos, .gp, .go'  # of a session, what was typed

# Names in single backticks lead to their documentation, if there is one. The
# inventories are text: a name, its kind, its page.
default_role = 'py:obj'
intersphinx_mapping = {
  name: (url, str(ROOT / f'docs/inventories/{name}.txt'))
  for name, url in {
    'jax': 'https://docs.jax.dev/en/latest/',
    'optax': 'https://optax.readthedocs.io/en/latest/',
    'flax': 'https://flax.readthedocs.io/en/latest/',
  }.items()
}
_SHORT = {
  'nnx.Optimizer': 'flax.nnx.optimizer.Optimizer',
  'nnx.metrics': 'flax.nnx.metrics.Metric',
  'nnx.': 'flax.nnx.',
  'jnp.': 'jax.numpy.',
  'lax.': 'jax.lax.',
}

_MENU = """
```{toctree}
:hidden:
:caption: Start

notebooks/01_quickstart
docs/is_it_for_me
docs/choosing
docs/errors
```

```{toctree}
:hidden:
:caption: Use

docs/your_trainer
docs/recipes
docs/maxtext
docs/tunix
docs/muon
docs/compressors
docs/local_updates
notebooks/03_choose_k_and_chunk
```

```{toctree}
:hidden:
:caption: Operate

docs/multihost
docs/remote
docs/checkpoints
docs/faults
docs/sharding
notebooks/04_mesh_and_sharding
docs/accelerators
```

```{toctree}
:hidden:
:caption: Understand

docs/how_it_works
notebooks/02_what_is_sent
docs/reading
benchmarks/README
benchmarks/TRIED
```

```{toctree}
:hidden:
:caption: Reference

docs/api
CHANGELOG
CONTRIBUTING
```
"""
# Unions that say less than their names, the longest first.
_ALIASES = {
  'ArrayTree': chex.ArrayTree,
  'ScalarOrSchedule': optax.ScalarOrSchedule,
  'Numeric': chex.Numeric,
  'Array': chex.Array,
}


# Types that are `Any` to a type checker, by their argument or function.
_TREES = {
  r'\bcompressor: Any': 'compressor: CompressorTree',
  r'(weight_dimension_numbers): Any': r'\1: DimensionNumbersTree',
  r'weight_decay_mask: Any': 'weight_decay_mask: ArrayTree | Callable | None',
  r'param_specs: Any': 'param_specs: PartitionSpecTree',
  r'folder: Any': 'folder: str | PathLike',
  r'\b(tree|model): Any': r'\1: Tree',
  r'^Any$': 'Tree',
  r'tuple\[str, Any\]': 'tuple[str, str | None]',
  r'\[str, Any\]': '[str, Array]',
  r'str \| type\[Any\] \| \S+ \| \w\S*': 'DTypeLike',
  r'<function mean>': 'jnp.mean',
  r'Callable\[\[\.\.\.\], Any\]': 'Callable',
}


def _add_menu(app, docname, source):
  """Adds the menu to the front page, and the reference to its index."""
  del app
  if docname == root_doc:
    source[0] += _MENU
  elif docname == 'docs/api':
    source[0] += reference.index()


def _link_names(app, doctree):
  """Leads from each name of the reference's index to its documentation."""
  if app.env.docname == 'docs/api':
    for name in list(doctree.findall(nodes.literal)):
      name.replace_self(
        addnodes.pending_xref(
          '',
          name.deepcopy(),
          refdomain='py',
          reftype='obj',
          reftarget=name.astext(),
          refdoc='docs/api',
        )
      )


def _shorten(app, what, name, obj, options, signature, returns):
  """Writes unions of types as their names."""
  del app, what, obj, options
  if name == 'demo_optax.Workers':  # made by its constructors
    return '', None
  return tuple(text and _with_aliases(text) for text in (signature, returns))


def _with_aliases(text):
  text = _without_modules(text)
  for alias, union in _ALIASES.items():
    text = text.replace(
      _without_modules(stringify_annotation(union, 'smart')), alias
    )
  for untyped, name in _TREES.items():
    text = re.sub(untyped, name, text)
  return text.replace(repr(demo_optax.dct_topk()), 'dct_topk()')


def _without_modules(text):
  return re.sub(r'~?\b[\w.]+\.(?=[A-Z]\w*)', '', text)


def _find(app, env, node, contnode):
  """Finds names that a docstring writes without the module they are in."""
  target = node.get('reftarget', '')
  for short, full in _SHORT.items():
    if target.startswith(short):
      node['reftarget'] = full + target.removeprefix(short)
      return None  # the inventories have it, or nobody
  if node.get('refdomain') != 'py' or target in ('', 'demo_optax'):
    return None
  found = {
    (entry.docname, entry.node_id): entry
    for full, entry in env.domaindata['py']['objects'].items()
    if full.endswith(f'.{target}') and entry.objtype != 'attribute'
  }
  if len(found) != 1:
    return None
  (entry,) = found.values()
  from sphinx.util.nodes import make_refnode

  return make_refnode(
    app.builder, node['refdoc'], entry.docname, entry.node_id, [contnode]
  )


def _add_index(app, error):
  """Leads from index.html to the front page."""
  if error is None and app.builder.name == 'html':
    (pathlib.Path(app.outdir) / 'index.html').write_text(
      '<!doctype html><title>demo_optax</title>'
      f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    )


def setup(app):
  app.connect('config-inited', lambda *_: reference.write(ROOT / 'docs/api'))
  app.connect('source-read', _add_menu)
  app.connect('doctree-read', _link_names)
  app.connect('autodoc-process-signature', _shorten)
  app.connect('missing-reference', _find, priority=400)
  app.connect('build-finished', _add_index)
