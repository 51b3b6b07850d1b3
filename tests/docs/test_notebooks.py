"""Notebooks run from top to bottom, say nothing unexpected, and look whole.

All are run as they are by `pytest -m slow`; by every `pytest` only the first, and
for a few steps: training, and compiling it, is what the others are made of.
"""

import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib

import nbformat
import pytest
from helpers import ROOT

NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
NAMES = [
  '01_quickstart',
  '02_what_is_sent',
  '03_choose_k_and_chunk',
  '04_mesh_and_sharding',
]
SECONDS = 900  # per cell


def read(path):
  return nbformat.read(path, as_version=4)


def sources(notebook, kind):
  return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def execute(path, folder, steps=None):
  """Runs a notebook in a folder, as Jupyter would on a machine of one device."""
  from nbclient import NotebookClient

  notebook = read(path)
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      cell.outputs, cell.execution_count = [], None
      if steps:
        cell.source = re.sub(
          r'^STEPS = \d+', f'STEPS = {steps}', cell.source, flags=re.M
        )
  ours = ('XLA_FLAGS', 'JAX_', 'PYTEST_', 'PYTHONWARNINGS', 'MPLBACKEND')
  env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
  env['PYTHONPATH'] = str(ROOT)
  env['JAX_PLATFORMS'] = os.environ.get('JAX_PLATFORMS', '')
  client = NotebookClient(
    notebook,
    timeout=SECONDS,
    kernel_name='python3',
    resources={'metadata': {'path': str(folder)}},
    coalesce_streams=True,
  )
  client.execute(env=env)  # an error in a cell is one here
  return notebook


def outputs(notebook):
  return [
    (cell.id, output)
    for cell in notebook.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
  ]


def kinds(notebook):
  """Per code cell, what it shows."""
  found = []
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      shown = [
        output.get('name') or sorted(output.data) for output in cell.outputs
      ]
      found.append((cell.id, shown))
  return found


# Many warnings of Jupyter's own libraries are about themselves.
@pytest.mark.filterwarnings('default')
@pytest.mark.parametrize(
  'name, steps',
  [
    (NAMES[0], 20),
    *(pytest.param(n, None, marks=pytest.mark.slow) for n in NAMES),
  ],
)
def test_runs_without_a_warning(name, steps, tmp_path):
  path = ROOT / 'notebooks' / f'{name}.ipynb'
  notebook = execute(path, tmp_path, steps)
  for cell, output in outputs(notebook):
    assert output.get('name') != 'stderr', (cell, output.text)
    assert 'Warning' not in output.get('text', ''), (cell, output.text)
    print(cell, output.get('text', ''))
  assert kinds(notebook) == kinds(read(path))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=NAMES)
def test_is_whole(path):
  """Committed as it ran, once, from top to bottom, without warnings."""
  notebook = read(path)
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in code] == list(
    range(1, len(code) + 1)
  )
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
  for cell in code:
    shows = re.search(
      r'^(print|  print|    print|figure, )'
      r'|^(demo_optax\.)?plan(\(|$)',
      cell.source,
      re.M,
    )
    assert bool(cell.outputs) == bool(shows), cell.id
  for cell, output in outputs(notebook):
    assert output.output_type != 'error' and output.get('name') != 'stderr', (
      cell
    )
  pictures = [
    o for _, o in outputs(notebook) if 'image/png' in o.get('data', {})
  ]
  assert pictures
  assert notebook.metadata.kernelspec.name == 'python3'
  assert path.stat().st_size < 1_000_000
  text = path.read_text()
  assert '"execution": {' not in text  # times of the run
  for place in ('/tmp', '/work', '/home', '/root'):
    assert place not in re.sub(r'"image/png": "[^"]*"', '', text)


def test_no_address_is_shown_before_there_is_one():
  """Of this repository: a link that leads nowhere, or to somebody else."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  assert project['tool']['demo_optax']['repository'] == ''
  assert 'urls' not in project['project']
  assert 'repository' not in (ROOT / 'CITATION.cff').read_text()
  pages = [ROOT / 'README.md', *NOTEBOOKS, *(ROOT / 'docs').glob('*.md')]
  for page in pages:
    for link in re.findall(
      r'(?:github|colab)[\w.]*\.com/[^\s)"\\]+', page.read_text()
    ):
      assert 'demo_optax' not in link and 'demo-optax' not in link, (page, link)


def test_notebooks_share_their_first_cells():
  """Whoever changes one changes all."""
  every = [sources(read(path), 'code') for path in NOTEBOOKS]
  assert len({cells[0] for cells in every}) == 1
  for start in ('class Block', "# Python's own help"):
    assert (
      len({c for cells in every for c in cells if c.startswith(start)}) == 1
    )
    assert all(any(c.startswith(start) for c in cells) for cells in every)


def test_the_install_cell_keeps_jax(monkeypatch, tmp_path):
  """Where demo_optax is missing: from a clone, an archive, or an address."""
  from IPython.core.inputtransformer2 import TransformerManager

  cell = sources(read(NOTEBOOKS[0]), 'code')[0]
  transform = TransformerManager().transform_cell
  commands = []

  class Shell:
    def run_line_magic(self, magic, line):
      assert magic == 'pip'
      commands.append(line)

  def run(source):
    # IPython fills in the braces of a line magic.
    braces = re.compile(r"run_line_magic\('pip', '(.*)'\)")
    exec(
      braces.sub(r"run_line_magic('pip', f'\1')", transform(source)),
      {'get_ipython': Shell},
    )

  find_spec = importlib.util.find_spec
  (tmp_path / 'notebooks').mkdir()
  monkeypatch.chdir(tmp_path / 'notebooks')
  monkeypatch.setattr(
    importlib.util,
    'find_spec',
    lambda name: None if name == 'demo_optax' else find_spec(name),
  )
  with pytest.raises(RuntimeError, match='Upload an archive of the repository'):
    run(cell)
  run(cell.replace("ADDRESS = ''", "ADDRESS = 'https://example.org/main.zip'"))
  archive = tmp_path / 'notebooks/demo_optax-main.zip'
  archive.touch()
  run(cell)
  (tmp_path / 'pyproject.toml').touch()
  run(cell)
  for command, source in zip(
    commands,
    ('https://example.org/main.zip', archive.as_uri(), tmp_path.as_uri()),
    strict=True,
  ):
    assert f'"demo_optax[examples] @ {source}"' in command
    assert '-c constraints.txt' in command
    assert '--upgrade' not in command and '-U' not in command
  lines = (tmp_path / 'notebooks/constraints.txt').read_text().splitlines()
  for name in ('jax', 'jaxlib', 'numpy'):
    assert f'{name}=={importlib.metadata.version(name)}' in lines
  monkeypatch.setitem(sys.modules, 'demo_optax', None)
  with pytest.raises(ModuleNotFoundError, match='demo_optax'):
    run(cell)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=NAMES)
def test_the_install_cell_is_hidden_and_the_text_says_what_is_needed(path):
  title, cell = read(path).cells[:2]
  assert cell.metadata == {
    'jupyter': {'source_hidden': True},
    'tags': ['hide-input'],
  }
  assert len(cell.source.splitlines()) <= 26
  assert 'the first cell installs it' in title.source
