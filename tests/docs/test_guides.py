"""The guides in docs/: every Python block runs, tables are true, the site builds."""

import inspect
import re
import statistics
import subprocess
import sys

import common_errors
import hlo_text
import jax
import numpy as np
import pytest
from helpers import ROOT, results, shapes_of

import demo_optax
from demo_optax import __main__ as command
from demo_optax.codes.value_codes import VALUES

sys.path.insert(0, str(ROOT / 'benchmarks'))

import muon

GUIDES = {p.stem: p.read_text() for p in sorted((ROOT / 'docs').glob('*.md'))}
BENCHMARKS = (ROOT / 'benchmarks/README.md').read_text()
# Run in this order, in one namespace.
TRAINERS = (
  GUIDES['your_trainer']
  + GUIDES['recipes']
  + (ROOT / 'tests/docs/listings.md').read_text()
)
BATCH = {'x': np.ones((16, 8), np.float32), 'y': np.ones((16, 1))}


def blocks(name):
  return re.findall(r'```python\n(.*?)```', GUIDES[name], re.S)


def sharded(names):
  params = {
    'up': jax.numpy.ones((16, 64)),
    'down': jax.numpy.ones((64, 16)),
    'bias': jax.numpy.ones(16),
  }
  workers = names['sharded']
  tx = demo_optax.demo(1e-3, workers=workers)
  moment = (
    tx.init(workers.device_put(params)).inner_state[1].worker_stacked.momentum
  )
  for x in moment.values():
    assert x.sharding.shard_shape(x.shape)[1] * jax.device_count() == x.shape[1]


def every_few_steps(names):
  args = names['model'], names['optimizer'], BATCH
  losses = [names['train_step'](*args) for _ in range(20)]
  assert losses[0].shape == () and losses[-1] < losses[0]
  assert names['model'](BATCH['x']).shape == (16, 1)


def checkpoints(names):
  assert names['step'] == 100 and names['differences'] == []
  state = names['state']['opt_state'].inner_state[1].worker_stacked
  assert {x.shape[0] for x in state.momentum.values()} == {2}


def every_trainer(names):
  assert names['loss'].shape == ()
  flat = jax.tree_util.tree_leaves_with_path(names['saved'].opt_state)
  own = [
    x for path, x in flat if 'worker_stacked' in jax.tree_util.keystr(path)
  ]
  assert all(len(x) == 8 for x in own)
  assert any(len({row.tobytes() for row in np.asarray(x)}) == 8 for x in own)
  assert not np.array_equal(
    names['after']['head']['w'], names['layers']['head']['w']
  )
  assert names['seen']['outputs'].shape == (16, 1)


def compiled_for_devices(names):
  """The guide's own check, on a mesh of CPUs."""
  found = hlo_text.collectives(names['compiled'], names['mesh'])
  messages = [
    c.received_bytes
    for c in found
    if c.axes == ('replica',) and c.shapes[0].startswith('u32')
  ]
  assert sum(messages) == names['plan'].device_bytes['replica',]
  loss = names['train_step'](
    names['model'], names['optimizer'], np.ones((64, 256), np.float32)
  )
  assert np.isfinite(loss)


# What else is true of the names that the blocks have made.
THEN = {
  'sharding': sharded,
  'local_updates': every_few_steps,
  'checkpoints': checkpoints,
  'accelerators': compiled_for_devices,
}


@pytest.mark.parametrize(
  'name',
  [
    name
    for name in GUIDES
    if blocks(name) and name not in ('compressors', 'your_trainer', 'recipes')
  ],
)
def test_blocks_run(name, tmp_path, monkeypatch):
  """As one script; those of compressors.md in test_compressors."""
  monkeypatch.chdir(tmp_path)
  names = {}
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    for block in blocks(name):
      exec(block, names)
    THEN.get(name, lambda names: None)(names)


def listings():
  """Python blocks, and of each diff the lines before and after."""
  for kind, block in re.findall(r'```(python|diff)\n(.*?)```', TRAINERS, re.S):
    if kind == 'python':
      yield [block]
      continue
    lines = block.splitlines()
    yield [
      '\n'.join(line[1:] for line in lines if line[:1] != out) for out in '+-'
    ]


def train(block, names):
  """Runs a block; returns the losses in its loop over steps."""
  losses = []

  def steps():
    for step in range(20):
      yield step
      losses.append(float(np.mean(names['loss'])))  # of pmap one each

  names['steps'] = steps
  exec(block.replace('range(20)', 'steps()'), names)
  return losses


@pytest.mark.filterwarnings('ignore:.*pmap:DeprecationWarning')
def test_every_trainer_learns_before_and_after(tmp_path, monkeypatch):
  """Both versions of each listing; what comes later sees the second one."""
  monkeypatch.chdir(tmp_path)
  cache = jax.config.jax_compilation_cache_dir
  names = {}
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    for versions in listings():
      for block in versions:
        losses = train(block, names)
        assert not losses or losses[-1] < 0.8 * losses[0], (block, losses)
        assert bool(losses) == ('range(20)' in block)
    every_trainer(names)
  jax.config.update('jax_compilation_cache_dir', cache)


def test_two_lines_change():
  """Of each listing, but for those that say why it is more."""
  counts = [
    sum(line[:1] == '+' for line in block.splitlines())
    for block in re.findall(r'```diff\n(.*?)```', TRAINERS, re.S)
  ]
  assert len(counts) == 10
  assert sorted(counts) == [1, 2, 2, 2, 2, 2, 3, 3, 3, 4]


def test_errors_are_as_recorded_and_in_the_table():
  messages = common_errors.make_all()
  assert {*common_errors.REMEDIES} < {*messages}
  remedy = 'run python tests/common_errors.py'
  assert common_errors.FILE.read_text() == common_errors.file(messages), remedy
  text = GUIDES['errors']
  assert common_errors.page(text, messages) == text, remedy


def test_bytes_of_a_chunk():
  chunk = jax.ShapeDtypeStruct((64, 64), np.float32)
  for topk, values in ((64, 'sign'), (32, 'float32'), (8, 'sign')):
    (leaf,) = demo_optax.plan(
      chunk, demo_optax.dct_topk(topk=topk, values=values), 2
    ).leaves
    cells = f'{leaf.index_bits:.2f} | {leaf.sent_bytes} | {leaf.sent_bytes / 163.84:.1f} %'
    assert re.search(
      rf'\| `topk={topk}`, {values} values.* \| {cells} \|',
      GUIDES['how_it_works'],
    )


def test_numbers_of_workers_at_which_it_stops_paying():
  leaf = jax.ShapeDtypeStruct((6400, 6400), np.float32)
  for topk, values, itemsize in (
    (32, 'float32', 4),
    (32, 'float32', 2),
    (8, 'float32', 4),
    (8, 'float32', 2),
    (32, 'sign', 4),
  ):
    plan = demo_optax.plan(
      leaf, demo_optax.dct_topk(64, topk, values=values), 2
    )
    assert re.search(
      rf'\b{plan.max_workers(itemsize)}\b', GUIDES['is_it_for_me']
    )


def test_the_output_of_the_command_is_what_it_prints(capsys):
  text = GUIDES['is_it_for_me']
  model, words = re.search(
    r'python -m demo_optax (\S+:\S+) (.+)', text
  ).groups()
  assert f'instead of `{model}`' in text
  command.main(['300M', *words.split()])
  (block,) = re.findall(r'```text\n(.*?)```', text, re.S)
  assert capsys.readouterr().out.endswith(block)


@pytest.mark.parametrize('values', VALUES)
def test_the_table_of_bytes_is_what_plan_says(values):
  def cell(count):
    mb = count / 1e6
    return (
      f'{mb:,.2f}' if mb < 30 else f'{mb:,.1f}' if mb < 100 else f'{mb:,.0f}'
    )

  few, many = (
    demo_optax.plan(
      shapes_of('300M'), demo_optax.dct_topk(topk=8, values=values), n
    )
    for n in (8, 64)
  )
  cells = [
    cell(few.sent_bytes),
    cell(few.received_bytes),
    cell(many.received_bytes),
  ]
  row = f"| `values='{values}'` | {' | '.join(cells)} |"
  assert row in GUIDES['is_it_for_me']


def test_what_was_compiled_is_as_recorded():
  page = GUIDES['accelerators']
  found = results('ahead.json')['small'].values()
  rows = re.findall(r'^\| (.*all_(?:gather|to_all).*) \|$', page, re.M)
  assert len(rows) == len(found)
  for run in found:
    recipe, exchange, inside, train, kernels = re.fullmatch(
      r'(demo|demo_muon)_(all_\w+?)(?:_(\d)_devices)?(_train)?(_kernels)?',
      run['program'],
    ).groups()
    step = f'`{recipe}`, {exchange}'
    step += ', with the model' if train else ''
    step += ', kernels' if kernels else ''
    cells = [
      f'{run["target"]}, {run["workers"]} x {inside or 1}',
      step,
      f'{run["planned"]:,}',
      f'{run.get("launches", run["operations"]):,}',
      f'{run["temporaries"]:.1f}x',
      f'{run["compile_seconds"]:.0f}',
    ]
    assert ' | '.join(cells) in rows
    for name in ('jax', 'libtpu', 'jax-cuda12-plugin'):
      assert f' {run["versions"][name]}' in page


def test_steps_on_a_gpu_are_as_recorded():
  found = results('step_h100.json')
  alone, together = found['after'], found['one_change_at_a_time']
  times = [alone[name]['ms'] for name in alone] + list(together.values())
  table = GUIDES['accelerators'].split('## One H100')[1].split('## ')[0]
  rows = re.findall(r'^\| [^|]+ \| ([\d.]+) \| [\d.]+ \|$', table, re.M)
  assert len(rows) == 4
  assert all(x in [f'{ms:.1f}' for ms in times] for x in rows)


def test_what_maxtext_compiles_is_as_recorded():
  found, page = results('maxtext_ahead.json'), GUIDES['maxtext']
  for method in ('own', 'diloco', 'demo', 'demo_muon'):
    x = found[method]
    cells = [
      f'{max(x["dcn"].values()) / 1e6:.2f}',
      f'{x["arguments"] / 1e9:.2f}',
      f'{x["temporaries"] / 1e9:.2f}',
    ]
    assert f'| {" | ".join(cells)} |\n' in page, method
    assert f'{sum(x["inside"].values()) / 1e9:.1f} GB' in page
  assert found['versions']['libtpu'] in page


def test_small_tasks_are_as_recorded():
  import tasks

  found = {}
  for row in tasks.table().splitlines()[2:]:
    task, method, _, loss, *_ = row.strip('| ').split(' | ')
    found.setdefault(task, {})[method] = loss.split()[0]
  assert len(found) == 4
  for task, losses in found.items():
    cells = [losses[m] for m in ('adamw', 'muon', 'demo', 'demo_muon')]
    row = rf'\| {task}, [^|]+ \| {re.escape(" | ".join(cells))} \|'
    assert re.search(row, GUIDES['choosing']), task


@pytest.mark.parametrize('model', ['300M', '1B'])
def test_seconds_by_bandwidth_are_bytes_over_it(model):
  params = shapes_of(model)
  compressors = demo_optax.recipes.muon_compressors(params)
  plan = demo_optax.plan(params, compressors, 8)

  def seconds(size, rate):
    took = 8 * size / rate
    return f'{took:,.0f}' if took >= 100 else f'{took:.2g}'

  cells = [
    f'{seconds(plan.received_bytes, rate)}'
    f' / {seconds(plan.dense_bytes(2), rate)}'
    for rate in (1e7, 1e8, 1e9, 1e10)
  ]
  row = f'| {model} parameters | {" | ".join(cells)} |'
  assert row in GUIDES['is_it_for_me']


@pytest.mark.parametrize('exchange', ['all_gather', 'all_to_all'])
@pytest.mark.parametrize('topk', [8, 32])
@pytest.mark.parametrize('model', ['300M'])
def test_what_many_workers_receive(model, topk, exchange):
  params = shapes_of(model)
  compressor = demo_optax.dct_topk(topk=topk, values='sign')

  def received(count, exchange=exchange):
    return demo_optax.plan(
      params, compressor, count, exchange=exchange, update_values='ternary'
    ).received_bytes

  cells = [f'{received(count) / 1e6:,.1f}' for count in (8, 64, 1024)]
  row = ' | '.join([model, str(topk), exchange, *cells])
  text = GUIDES['is_it_for_me']
  assert f'| {row} |' in text
  if exchange == 'all_to_all':
    (least,) = re.findall(rf'{re.escape(row)} \| (\d+) workers', text)
    for count, fewer in ((int(least), True), (int(least) - 1, False)):
      assert (received(count) < received(count, 'all_gather')) == fewer


def test_losses_of_methods_are_those_of_the_benchmarks():
  """Each row of docs/choosing.md has a row with its loss and its bytes."""
  rows = re.findall(
    r'^\| ([^|]+) \| ([\d.]+) \| ([\d.,]+) \| ([\d.,]+) \|',
    GUIDES['choosing'].split('## Which rate')[0],
    re.M,
  )
  assert len(rows) == 10
  for name, loss, sent, received in rows:
    first = name.split(',')[0].split(' with ')[0].split(' as ')[0]
    first = {'`demo_diloco`': 'DeMo inside DiLoCo'}.get(first, first)
    (row,) = [
      line
      for line in BENCHMARKS.splitlines()
      if f'| {loss} (' in line and f'| {sent} / {received} |' in line
    ]
    assert row.startswith(f'| {first}'), name


def test_the_site_builds(tmp_path):
  """Offline, and without a warning: every link and reference is there."""
  for name in ('myst_nb', 'furo', 'sphinx-mathjax-offline'):
    pytest.importorskip(name)
  subprocess.run(
    [
      sys.executable,
      '-m',
      'sphinx',
      '-q',
      '-W',
      '-c',
      'docs',
      '.',
      str(tmp_path),
    ],
    cwd=ROOT,
    check=True,
    timeout=900,
  )
  assert 'README.html' in (tmp_path / 'index.html').read_text()
  for page in tmp_path.rglob('*.html'):  # nothing is loaded from elsewhere
    loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*', page.read_text())
    assert not [tag for tag in loaded if '="http' in tag], page
  index = (tmp_path / 'docs/api.html').read_text()
  pages = [p.read_text() for p in (tmp_path / 'docs/api').glob('*.html')]
  assert max(map(len, pages)) < 200_000
  api = ''.join(pages)
  assert 'tex-svg.js' in api and (tmp_path / '_static/tex-svg.js').exists()
  for page in (
    'docs.jax.dev/en/latest/_autosummary/jax.jit.html#jax.jit',
    'optax.readthedocs.io/en/latest/api/transformations.html',
  ):
    assert f'https://{page}' in api
  signatures = dict(
    re.findall(r'<dt class="sig [^>]*id="([^"]+)">(.*?)</dt>', api, re.S)
  )
  signature = signatures['demo_optax.demo']
  assert signature.count('<dd>') >= 7 and 'ScalarOrSchedule' in signature
  assert not [x for x in signatures.values() if re.search(r'>Any<', x)]
  modules = (
    demo_optax,
    demo_optax.checkpoint,
    demo_optax.compressors,
    demo_optax.local,
    demo_optax.recipes,
    demo_optax.state,
  )
  names = {
    name
    for module in modules
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
  }
  for name in names:
    assert re.search(rf'id="demo_optax\.(\w+\.)?{name}"', api), name
    assert re.search(
      rf'href="api/\w+\.html#demo_optax\.(\w+\.)?{name}"', index
    ), name


def test_the_table_of_sharded_workers_is_as_measured():
  text, page = GUIDES['sharding'], BENCHMARKS
  runs, more = results('sharded.json'), results('sharded_muon.json')

  def mb(what, digits, runs):
    return ' | '.join(f'{r["memory"][what] / 1e6:.{digits}f} MB' for r in runs)

  def received(run, axis):
    return sum(row[3] for row in run['traffic'] if row[1] == [axis])

  for name, what, digits in (
    ('parameters', 'parameters', 2),
    ('optimizer state', 'optimizer', 2),
    ('temporaries of the step', 'temporaries', 1),
  ):
    assert re.search(
      rf'\| {name}, per device.* \| {mb(what, digits, runs)} \|', text
    )
    assert f'| {mb(what, 2, runs + more)} |' in page
  assert (
    f'| validation loss | {runs[0]["valid_loss"]:.3f} | {runs[1]["valid_loss"]:.3f} |'
    in text
  )
  for run in runs + more:
    between = f'{received(run, "replica") / 1e3:.1f} kB'
    assert between in page and (run in more or between in text)
  for run, where in (
    (runs[0], (text, page)),
    (more[0], (page, GUIDES['muon'])),
  ):
    inside = f'{received(run, "fsdp") / 1e6:.1f} MB'
    assert all(inside in x for x in where), inside


def test_the_table_of_digits_is_as_measured():
  for run in results('digits.jsonl'):
    name = f'`{run["name"]}`'.replace('-', '_')
    name = name.replace('_drift`', '`, `drift=True`')
    right = f'{run["records"][-1]["accuracy"]:.2%}'.replace('%', ' %')
    digits = 1 if run['sent'] > 1e5 else 2
    kb = ' / '.join(f'{run[k] / 1e3:.{digits}f}' for k in ('sent', 'received'))
    row = rf'\| {name}[^|]*\| {right} \| {kb} kB'
    assert re.search(row, GUIDES['local_updates']), name


def test_seconds_over_links_are_as_measured():
  runs = {
    (r['workers'], r['link'], r['method']): r['step']
    for r in results('links_owners.json')
  }
  for workers in (2, 8):
    for name, method in (
      ('DeMo', 'all_gather'),
      ('AdamW, averaged in bfloat16', 'AdamW bfloat16'),
    ):
      cells = []
      for link in ('10 Mbit/s', '100 Mbit/s', '1 Gbit/s', '100 Mbit/s, 20 ms'):
        step = runs.get((workers, link, method))
        cells.append(
          '' if step is None else f'{step:.1f}' if step > 10 else f'{step:.2f}'
        )
      row = f'| {workers} | {name} | {" | ".join(cells)}'.rstrip() + ' |'
      assert row in GUIDES['is_it_for_me']


def test_the_table_of_values_is_as_measured():
  text = GUIDES['choosing']
  runs = {}
  for r in results('values.jsonl'):
    runs.setdefault((r['values'], r['topk']), []).append(r)
  for values in VALUES:
    found = runs[values, 32]
    loss = statistics.mean(r['valid_loss'] for r in found)
    assert f'{loss:.3f} ({found[0]["sent"] / 1e3:.1f})' in text
  for values, topk in re.findall(r'\| (\d\.\d+) \(`topk=(\d+)`\)', text):
    assert any(
      f'{statistics.mean(r["valid_loss"] for r in found):.3f}' == values
      for (_, k), found in runs.items()
      if k == int(topk)
    ), (values, topk)


def test_rates_of_other_parameters_are_as_measured():
  for topk in ('64', '8'):
    row = muon.ROWS[f'topk={topk}']
    cells = []
    for rate in (2e-3, 6e-3, 1.2e-2):
      found = muon.runs_of(row | {'other_lr': rate}, muon.read())
      cells += [f'{r["loss"]:.3f}' for r in found if 'seed' not in r]
    assert f'| `topk={topk}` | {" | ".join(cells)} |' in GUIDES['muon']
