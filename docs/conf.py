"""The site: `sphinx-build -W -c docs . site`, from the root, offline.

The root is the source folder, so that links between the guides, the README, the
benchmarks and the notebooks are the same on the site and in the repository.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import demo_optax

project = 'demo_optax'
copyright = 'the demo_optax authors'
version = release = demo_optax.__version__

extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.mathjax',
  'sphinx.ext.napoleon',
]
root_doc = 'docs/index'
include_patterns = [
  'docs/*.md',
  'README.md',
  'CHANGELOG.md',
  'CONTRIBUTING.md',
  'benchmarks/README.md',
  'notebooks/*.ipynb',
]
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # they are committed with their outputs
autodoc_typehints = 'signature'
autodoc_member_order = 'bysource'
napoleon_use_rtype = False
html_theme = 'furo'
html_title = f'demo_optax {version}'
