"""Every Python block of the README runs, in order, as a reader would."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

import demo_optax
from demo_optax import __main__ as command
from demo_optax import compressors

README = (pathlib.Path(__file__).parents[1] / 'README.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', README, re.S)


def test_blocks_run(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert len(BLOCKS) == 7
  names = {}
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    exec(BLOCKS[0], names)
    batch = {'x': np.ones((16, 8), np.float32), 'y': np.ones((16, 1))}
    args = names['model'], names['optimizer'], batch
    losses = [float(names['train_step'](*args)) for _ in range(20)]
    assert losses[-1] < losses[0]
    exec(BLOCKS[1], names)
    assert '50257x768' in capsys.readouterr().out
    exec(BLOCKS[2], names)
    params = {'w': jax.numpy.ones((8, 8))}
    state = names['tx'].init(params)
    grads = {'w': jax.numpy.ones((4, 8, 8))}
    updates, _ = names['tx'].update(grads, state, params)
    assert updates['w'].shape == (8, 8)
    exec(BLOCKS[3], names)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    params, state = names['params'], names['state']
    losses = []
    for _ in range(20):
      params, state, loss = names['step'](params, state, x, x[:, :1])
      losses.append(float(loss))
    assert losses[-1] < losses[0]
    exec(BLOCKS[4], names)
    params = {'up': jax.numpy.ones((16, 64)), 'down': jax.numpy.ones((64, 16)),
              'bias': jax.numpy.ones(16)}
    workers = names['sharded']
    tx = names['demo_optax'].demo(1e-3, workers=workers)
    moment = tx.init(workers.device_put(params)).inner_state[1].momentum
    shards = moment['down'].sharding.shard_shape(moment['down'].shape)
    assert shards[1] * jax.device_count() == moment['down'].shape[1]
    exec(BLOCKS[5], names)
    assert names['step'] == 100 and names['state']['position'] == 1600
    exec(BLOCKS[6], names)
    args = names['model'], names['optimizer'], batch
    losses = [names['local_step'](*args) for _ in range(20)]
    assert losses[0].shape == (4,) and losses[-1].mean() < losses[0].mean()
    assert names['to_evaluate']()(batch['x']).shape == (16, 1)


def test_the_table_of_bytes_is_what_plan_says():
  def cell(count):
    mb = count / 1e6
    return f'{mb:,.2f}' if mb < 30 else f'{mb:,.1f}' if mb < 100 else f'{mb:,.0f}'

  for values in compressors.VALUES:
    cells = []
    for shapes in command.MODELS.values():
      params = jax.tree.map(
          lambda s: jax.ShapeDtypeStruct(tuple(s), np.float32), shapes,
          is_leaf=lambda s: isinstance(s, list))
      few, many = (
          demo_optax.plan(params, demo_optax.dct_topk(topk=8, values=values), n)
          for n in (8, 64))
      cells += [cell(few.sent_bytes), cell(few.received_bytes),
                cell(many.received_bytes)]
    assert f"| `values='{values}'` | {' | '.join(cells)} |" in README


def test_the_table_of_sharded_workers_is_as_measured():
  results = pathlib.Path(__file__).parents[1] / 'benchmarks/results'
  for run in json.loads((results / 'sharded.json').read_text()):
    for what in ('parameters', 'optimizer'):
      assert f'{run["memory"][what] / 1e6:.2f} MB each' in README
    assert f'{run["memory"]["temporaries"] / 1e6:.1f} MB' in README
    assert f'| {run["valid_loss"]:.3f} |' in README
    between = sum(row[3] for row in run['traffic'] if row[1] == ['replica'])
    assert f'{between / 1e3:.1f} kB' in README


def test_workers_at_which_receiving_stops_paying():
  """The numbers in the text are those of plan."""
  import demo_optax
  leaf = jax.ShapeDtypeStruct((6400, 6400), np.float32)
  for topk in (32, 8):
    plan = demo_optax.plan(leaf, demo_optax.dct_topk(64, topk), 2)
    for itemsize in (4, 2):
      assert re.search(rf'\b{plan.max_workers(itemsize)}\b', README)


def test_the_picture_is_there():
  pictures = re.findall(r'!\[[^\]]+\]\(([^)]+)\)', README)
  root = pathlib.Path(__file__).parents[1]
  assert pictures
  for picture in pictures:
    assert (root / picture).stat().st_size > 10_000


@pytest.mark.parametrize('row', [
    'MultiSteps', 'apply_if_finite', 'clip_by_global_norm', 'partition',
    'inject_hyperparams'])
def test_every_row_of_the_table_has_its_test(row):
  tests = (pathlib.Path(__file__).parent / 'test_mistakes.py').read_text()
  assert f'optax.{row}' in README and f'optax.{row}' in tests
