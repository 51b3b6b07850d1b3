"""Pages of the reference, made from the docstrings of public names."""

import inspect

import demo_optax

# Pages by the modules in which names are defined.
PAGES = {
  'optimizers': ('Optimizers', 'recipes', 'transformation', '_per_worker'),
  'training': ('Training step and workers', 'step', 'workers', 'remote'),
  'compressors': ('Compressors', 'compressors'),
  'local': ('Local updates', 'local'),
  'plan': ('Bytes', '_plan'),
  'state': ('Optimizer states', 'state', 'replicas'),
  'checkpoint': ('Checkpoints', 'checkpoint'),
}
WITH_MEMBERS = {
  'Workers': 'simulated, on_mesh, remote, on_axis, count, device_put',
  'Plan': '',
  'Checkpointer': '',
}
TYPES = {
  'Array': 'a JAX or NumPy array',
  'Numeric': 'a number or a scalar array',
  'ArrayTree': 'a pytree of arrays',
  'Tree': 'a pytree of anything, such as an NNX module',
  'ScalarOrSchedule': 'a number, or a function of the step',
  'CompressorTree': 'a `Compressor`, a pytree of them like the parameters, or'
  ' a function from the parameters to one',
  'DimensionNumbersTree': 'a pytree of `optax.contrib.MuonDimensionNumbers`'
  ' and `None`, or a function to one',
  'PartitionSpecTree': 'a pytree of `jax.sharding.PartitionSpec` and `None`,'
  ' for the parameters or for subtrees',
}


def public_names():
  """Returns each public object by its shortest name."""
  submodules = filter(
    inspect.ismodule, map(vars(demo_optax).get, _all(demo_optax))
  )
  found = {}
  for module in (demo_optax, *submodules):
    for name in _all(module):
      value = getattr(module, name)
      known = any(value is other for other in found.values())
      if not inspect.ismodule(value) and not known:
        found[f'{module.__name__}.{name}'] = value
  return found


def _all(module):
  defined_here = [
    name
    for name, value in vars(module).items()
    if getattr(value, '__module__', None) == module.__name__
  ]
  return getattr(module, '__all__', defined_here)


def pages():
  """Returns the names and objects of each page."""
  found = {page: {} for page in PAGES}
  for name, value in public_names().items():
    defined = getattr(value, '__module__', type(value).__module__)
    part = defined.split('.')[1]
    (page,) = (page for page, (_, *parts) in PAGES.items() if part in parts)
    found[page][name] = value
  return found


def write(folder):
  """Writes the pages for Sphinx; those that are as before keep their time."""
  folder.mkdir(exist_ok=True)
  for page, names in pages().items():
    path, text = folder / f'{page}.md', _page(PAGES[page][0], names)
    if not path.exists() or path.read_text() != text:
      path.write_text(text)


def _page(title, names):
  lines = [f'# {title}', '', '```{eval-rst}']
  for name, value in names.items():
    kind = 'autofunction' if inspect.isfunction(value) else 'autodata'
    if inspect.isclass(value):
      kind = 'autoclass'
    lines.append(f'.. {kind}:: {name}')
    short = name.split('.')[-1]
    if short in WITH_MEMBERS:
      lines.append(f'   :members: {WITH_MEMBERS[short]}')
  return '\n'.join([*lines, '```', ''])


def index():
  """Returns tables of all names with the first lines of their docstrings."""
  lines = []
  for page, names in pages().items():
    lines += ['', f'## [{PAGES[page][0]}](api/{page}.md)', '', _HEAD]
    for name, value in names.items():
      first = inspect.getdoc(value).split('\n\n')[0].replace('\n', ' ')
      first = first.replace(', :math:`m_i`', '')
      lines.append(f'| `{name.removeprefix("demo_optax.")}` | {first} |')
  lines += ['', '## Types in signatures', '', _HEAD]
  lines += [f'| `{name}` | {meaning} |' for name, meaning in TYPES.items()]
  menu = [f'api/{page}' for page in PAGES]
  lines += ['', '```{toctree}', ':hidden:', '', *menu, '```', '']
  return '\n'.join(lines)


_HEAD = '| name | one line |\n|---|---|'
