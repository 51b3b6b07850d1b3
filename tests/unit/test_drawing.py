"""What pictures contain, and what plans and states look like as text."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.compressors import chunking
from demo_optax.tools import drawing

matplotlib.use('Agg')
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def closed():
  yield
  plt.close('all')


def names(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


def data(line):
  return np.array(line.get_xdata()), np.array(line.get_ydata())


def test_energy_kept():
  c = np.random.default_rng(0).normal(size=(3, 2, 5))
  kept = drawing.energy_kept(c)
  for k in range(6):
    largest = sum(np.sort(x * x)[len(x) - k:].sum() for x in c.reshape(-1, 5))
    assert kept[k] == pytest.approx(largest / (c * c).sum())
  assert (drawing.energy_kept(np.zeros((2, 3))) == 0).all()
  for nothing in (1.0, np.zeros((0, 4))):
    with pytest.raises(ValueError, match='no chunk'):
      drawing.energy_kept(nothing)


def test_energy_kept_is_what_an_exchange_tells():
  """With one worker, a first exchange sends that share of the gradient."""
  code = demo_optax.dct_topk(8, 5)
  grad = jax.random.normal(jax.random.key(0), (1, 16, 24))
  workers = demo_optax.Workers.simulated(1)
  tx = demo_optax.scale_by_demo(code, workers=workers)
  state = tx.update(grad, tx.init(grad[0]))[1]
  grid = code.plan((16, 24), grad.dtype).grid
  c = chunking.to_coefficients(grad[0], grid, code.basis)
  sent = demo_optax.exchange_info(state)['sent_energy']
  np.testing.assert_allclose(sent, drawing.energy_kept(c)[5], rtol=1e-5)


def test_curves():
  c = np.random.default_rng(0).normal(size=(3, 16))
  axes = drawing.draw_energy_kept({'raw': c, 'all': c}, topk=[4])
  assert names(axes) == ['raw', 'all'] and axes.texts[0].get_text() == 'k = 4 '
  x, y = data(axes.lines[0])
  assert (x == np.arange(1, 17)).all()
  np.testing.assert_allclose(y, 100 * drawing.energy_kept(c)[1:])

  given = plt.subplots()[1]
  axes = drawing.draw_against_steps({'kept': [3, 2]}, 'norm', given)
  assert axes is given and names(axes) == ['kept']
  assert (np.array(data(axes.lines[0])) == [[1, 2], [3, 2]]).all()

  runs = {'adamw': ([2.0, 1.0], 4e6), 'demo': (np.array([2.0, 1.5]), 5e4)}
  left, right = drawing.draw_losses(runs, 'sent').axes
  assert names(left) == ['adamw', 'demo']
  assert (np.array(data(left.lines[1])) == [[1, 2], [2, 1.5]]).all()
  assert (data(right.lines[1])[0] == [0.05, 0.1]).all()


def test_chunk():
  chunk = np.diag([1.0, -2.0, 3.0])
  coefficients = np.arange(9.0).reshape(3, 3)
  figure = drawing.draw_chunk(chunk, coefficients, 0 * chunk, topk=2)
  first, second, last, *_ = figure.axes
  assert (first.images[0].get_array() == chunk).all()
  assert last.images[0].get_clim() == first.images[0].get_clim() == (-3, 3)
  marks = second.collections[0].get_offsets()
  assert {tuple(xy) for xy in np.asarray(marks)} == {(2.0, 2.0), (1.0, 2.0)}


def test_agreement():
  rng = np.random.default_rng(0)
  selected = np.zeros((4, 64), bool)
  for row in selected:
    row[rng.choice(64, 16, replace=False)] = True
  left, right, *_ = drawing.draw_agreement(selected, (8, 8)).axes
  votes = selected.sum(0)
  assert (left.images[0].get_array() == votes.reshape(8, 8)).all()
  heights = [bar.get_height() for bar in right.patches]
  assert heights == [(votes == v).sum() for v in (1, 2, 3, 4)]
  random = data(right.lines[0])[1]  # 64 times the binomial of 4 and 1/4
  np.testing.assert_allclose(random, 64 * np.array([108, 54, 12, 1]) / 256)


def test_choices():
  series = {'int8': [(2e3, 1.0, 'b'), (1e3, 2.0, 'a')], 'sign': [(5e2, 3, 'c')]}
  axes = drawing.draw_choices(series)
  assert names(axes) == ['int8', 'sign']
  assert (np.array(data(axes.lines[0])) == [[1, 2], [2, 1]]).all()
  assert [t.get_text() for t in axes.texts] == ['a', 'b', 'c']


def test_received():
  params = {'w': jax.ShapeDtypeStruct((1024, 1024), np.float32)}
  plans = {f'k = {k}': demo_optax.plan(params, demo_optax.dct_topk(topk=k), 2)
           for k in (8, 32)}
  axes = drawing.draw_received(plans)
  assert names(axes) == [
      *(f'{k}: pays to {p.max_workers()} workers' for k, p in plans.items()),
      'all-reduce, float32', 'all-reduce, bfloat16']
  (most,), (dense,) = data(axes.lines[1])
  assert most == plans['k = 8'].max_workers()
  assert dense == pytest.approx(8 * (most - 1) / most * 1024**2 / 1e6)
  for line, code in ((axes.lines[0], demo_optax.dct_topk(topk=8)),
                     (axes.lines[4], None)):
    x, y = data(line)
    for at in (0, -1):  # 2 workers, and 1024
      plan = demo_optax.plan(params, code, round(x[at]))
      assert y[at] == pytest.approx(plan.received_bytes / 1e6, rel=1e-6)
  with pytest.raises(ValueError, match='same parameters'):
    drawing.draw_received({})


def test_nothing_is_imported_before_it_is_drawn():
  code = (
      'import sys\n'
      'sys.modules["matplotlib"] = None\n'
      'from demo_optax.tools import drawing\n'
      'drawing.energy_kept([1.0])\n'
      'try:\n'
      '  drawing.draw_against_steps({"a": [1]}, "norm")\n'
      'except ImportError as error:\n'
      '  assert "pip install matplotlib" in str(error)\n'
      'else:\n'
      '  raise SystemExit("no error")\n'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


# As text ----------------------------------------------------------------------


def test_plan_in_terminal_and_notebook():
  params = {'w<b>': jnp.zeros((256, 128)), 's': jnp.zeros(())}
  plan = demo_optax.plan(params, demo_optax.dct_topk(64, 8), 8)
  assert repr(plan) == str(plan) and '256x128' in repr(plan)
  page = plan._repr_html_()
  assert page.count('<tr>') == 3 and '<td style="text-align:right">256x128' in page
  assert 'w&lt;b&gt;' in page and 'w<b>' not in page and '8 workers' in page


def test_names_in_tables_are_short():
  model = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))])
  params = nnx.state(model, nnx.Param)
  plan = demo_optax.plan(params, demo_optax.dct_topk(), 2)
  assert [leaf.name for leaf in plan.leaves] == ['0.bias', '0.kernel']


def test_state_in_words():
  workers = demo_optax.Workers.simulated(2)
  model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
  tx = demo_optax.demo(1e-3, workers=workers,
                       compressor=demo_optax.dct_topk(8, 2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  text = demo_optax.state.state_summary(optimizer.opt_state)
  assert text.startswith('No exchange yet, 2 workers.')
  grads = jax.tree.map(
      lambda x: jax.random.normal(jax.random.key(x.ndim), (2, *x.shape)),
      nnx.state(model, nnx.Param))
  for _ in range(2):
    with jax.numpy_rank_promotion('allow'):
      optimizer.update(model, grads)
  text = demo_optax.state.state_summary(optimizer.opt_state)
  info = demo_optax.exchange_info(optimizer.opt_state)
  assert '2 exchanges of 2 workers' in text
  assert f'sent {info["sent_energy"].item():.1%}' in text
  assert f'by {info["mean_senders"].item():.2f} workers' in text
  rows = [line.split() for line in text.splitlines()[-2:]]
  assert [row[:5] for row in rows] == [
      ['bucket_000_1x8', '2x1x8', 'float32', '64', 'B'],
      ['bucket_001_8x8', '2x2x64', 'float32', '1.02', 'kB']]
  # Norms of the buckets are those of the whole.
  squares = sum(float(row[-1]) ** 2 for row in rows)
  assert squares ** 0.5 == pytest.approx(float(info['residual_norm']), rel=0.01)
  with pytest.raises(ValueError, match='scale_by_demo'):
    demo_optax.state.state_summary({'a': jnp.zeros(3)})


def test_state_on_a_mesh():
  mesh = jax.make_mesh((2, 4), ('replica', 'fsdp'),
                       axis_types=(jax.sharding.AxisType.Auto,) * 2)
  workers = demo_optax.Workers.on_mesh(mesh, 'replica', {'w': P(None, 'fsdp')})
  tx = demo_optax.scale_by_demo(demo_optax.dct_topk(8), workers=workers)
  text = demo_optax.state.state_summary(tx.init({'w': jnp.zeros((8, 32))}))
  assert "sharding" in text and "'replica', 'fsdp'" in text


def test_a_collective_is_a_line():
  text = ('HloModule step, num_partitions=8\n'
          ' %g = u8[4,100] all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}')
  mesh = jax.sharding.AbstractMesh((2, 4), ('replica', 'fsdp'))
  (one,) = demo_optax.tools.collectives(text, mesh)
  assert str(one) == (
      'all-gather over fsdp of 4: u8[4,100], receives 300 B per device')
  (one,) = demo_optax.tools.collectives(text)
  assert str(one).startswith('all-gather of 4: ')
