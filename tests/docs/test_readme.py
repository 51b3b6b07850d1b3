"""Every Python block of the README runs, in order, as a reader would."""

import pathlib
import re

import jax
import numpy as np

import demo_optax
from demo_optax import __main__ as command
from demo_optax.tools import traffic
from demo_optax.wire.values import VALUES

README = (pathlib.Path(__file__).parents[2] / 'README.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', README, re.S)


def test_blocks_run(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert len(BLOCKS) == 3
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

    @demo_optax.data_parallel(names['workers'], batch_argnums=1)
    def update(opt_state, grads):
      return names['tx'].update({'w': grads[0]}, opt_state, params)

    grads = np.random.default_rng(0).normal(size=(4, 8, 8)).astype('float32')
    updates, _ = update(names['tx'].init(params), grads)
    assert updates['w'].shape == (8, 8)


def test_the_table_of_bytes_is_what_plan_says():
  def cell(count):
    mb = count / 1e6
    return f'{mb:,.2f}' if mb < 30 else f'{mb:,.1f}' if mb < 100 else f'{mb:,.0f}'

  for values in VALUES:
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


def test_the_table_of_both_exchanges_is_what_plan_says():
  def received(params, topk, count, exchange):
    compressor = demo_optax.dct_topk(topk=topk, values='sign')
    return demo_optax.plan(
        params, compressor, count, exchange=exchange, update_values='ternary')

  for name, label in (('300M', '300 M'), ('1B', '1 B')):
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(tuple(s), np.float32),
        command.MODELS[name], is_leaf=lambda s: isinstance(s, list))
    for topk in (8, 32):
      cells = []
      for count in (8, 64, 1024):
        both = [received(params, topk, count, exchange)
                for exchange in ('all_gather', 'all_to_all')]
        cells.append(' / '.join(
            f'{plan.received_bytes / 1e6:,.0f}' for plan in both))
      fewest = traffic.owners_pay_from(
          params, demo_optax.dct_topk(topk=topk, values='sign'), 'ternary')
      line = next(
          line for line in README.splitlines()
          if line.startswith(f'| {label} parameters, `topk={topk}`'))
      assert f'({both[0].sent_bytes / 1e6:.1f})' in line.replace('sends ', '')
      assert line.endswith(f'| {" | ".join(cells)} | {fewest} workers |')


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
  root = pathlib.Path(__file__).parents[2]
  assert pictures
  for picture in pictures:
    assert (root / picture).stat().st_size > 10_000
