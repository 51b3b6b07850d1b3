"""Bytes, predicted; and the same in what is compiled."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import shapes_of
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import __main__ as command
from demo_optax import compressors
from demo_optax.compressors import bases

# Parameters, and MB per step as published (int64 indices, float32 values).
PAPER = {'300M': (319_946_752, 7.49), '1B': (1_176_764_416, 27.58)}


def papers_plan(model, values, workers=64, topk=8):
  return demo_optax.plan(
    shapes_of(model), demo_optax.dct_topk(64, topk, values=values), workers
  )


@pytest.mark.parametrize('model', PAPER)
def test_plan_of_the_papers_models(model):
  size, published = PAPER[model]
  plan = papers_plan(model, 'float32')
  assert plan.size == size
  assert size / 4096 * 8 * 12 / 1e6 == pytest.approx(published, abs=0.01)
  # Values, 7 low bits of each index and a unary part, then status and energies.
  chunks = size // 4096
  words = 8 * chunks + 8 * chunks * 7 // 32 + -(-chunks * 31 // 32) + 4
  assert plan.sent_bytes == 512 * -(-words // 128)
  assert plan.sent_bytes < 0.45 * published * 1e6
  assert plan.received_bytes == 63 * plan.sent_bytes
  assert plan.dense_bytes(2) == pytest.approx(2 * 63 / 64 * 2 * size)
  signs = papers_plan(model, 'sign')
  words = chunks // 4 + -(-chunks // 2) + words - 8 * chunks
  assert signs.sent_bytes == 512 * -(-words // 128)
  assert signs.sent_bytes < 0.146 * published * 1e6
  if model == '300M':
    assert plan.sent_bytes < 3.4e6 and signs.sent_bytes < 1.1e6


def test_max_workers_is_where_receiving_stops_paying():
  leaf = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
  plan = lambda count: demo_optax.plan(leaf, demo_optax.dct_topk(), count)
  most = plan(2).max_workers()
  assert plan(most).received_bytes < plan(most).dense_bytes()
  assert plan(most + 1).received_bytes >= plan(most + 1).dense_bytes()
  assert re.search(r'with up to \d+/\d+ workers', plan(2).totals())
  shared = compressors.Compressor(
    compressors.RandomSubset(1 / 4), compressors.Identity()
  )
  totals = demo_optax.plan(leaf, shared, 2).totals()
  assert 'with any number of workers' in totals


@pytest.mark.parametrize(
  'compressor', [demo_optax.dct_topk(64, 8), compressors.full(), None]
)
def test_a_worker_by_itself_sends_nothing(compressor):
  alone, two = (
    demo_optax.plan(jnp.zeros((256, 128)), compressor, n) for n in (1, 2)
  )
  assert alone.sent_bytes == alone.received_bytes == 0 < two.sent_bytes
  assert alone.payload_bytes == two.payload_bytes
  assert 'this exchange        sends        0 B, receives' in str(alone)


def test_plan_skips_what_takes_no_part():
  tree = {
    'w': jnp.zeros((8, 8)),
    'n': jnp.zeros(3, jnp.int32),
    'empty': jnp.zeros((0, 4)),
    'none': None,
  }
  plan = demo_optax.plan(tree, demo_optax.dct_topk(), workers=3)
  assert [leaf.name for leaf in plan.leaves] == ['w']
  nothing = demo_optax.plan({'n': tree['n']}, demo_optax.dct_topk(), 3)
  assert nothing.sent_bytes == nothing.max_workers() == 0
  assert 'leaf' in str(nothing)


def test_plan_prints_a_table():
  text = str(
    demo_optax.plan(
      {'w': jnp.zeros((256, 128)), 'b': jnp.zeros(3), 's': jnp.zeros(())},
      demo_optax.dct_topk(64, 8),
      workers=8,
    )
  )
  for words in ('\nw ', '256x128', '64x64', 'whole', 'scalar', 'bfloat16'):
    assert words in text
  tree = [jnp.zeros((64, 64))] * 3 + [jnp.zeros((64, 65))]
  rows = (
    demo_optax.plan(tree, demo_optax.dct_topk(64, 8), 2).table().splitlines()
  )
  assert (
    len(rows) == 3 and rows[1].startswith('0 and 2 more') and 'each' in rows[1]
  )


def test_plan_marks_leaves_that_are_cut_otherwise():
  """`narrow` and `heads` have blocks that are smaller than a chunk."""
  shapes = {'narrow': (64, 128), 'wide': (64, 256), 'heads': (64, 4, 16)}
  params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
  specs = dict.fromkeys(shapes, P(None, 'fsdp'))
  workers = demo_optax.Workers.simulated(2, specs, {'fsdp': 4})
  plan = demo_optax.plan(params, demo_optax.dct_topk(), workers)
  cut_otherwise = [x.name for x in plan.leaves if not x.as_unsharded]
  assert cut_otherwise == ['heads', 'narrow']
  assert plan.table().endswith('over fewer devices.')
  whole = demo_optax.plan(params, demo_optax.dct_topk(), 2).table()
  assert 'over fewer devices' not in whole


def test_plan_errors():
  with pytest.raises(TypeError, match='complex'):
    demo_optax.plan(jnp.zeros(3, jnp.complex64), demo_optax.dct_topk(), 2)
  with pytest.raises(ValueError, match='workers must .* 0'):
    demo_optax.plan(jnp.zeros(3), demo_optax.dct_topk(), 0)


# The command ------------------------------------------------------------------


def test_examples_of_the_help_run(capsys):
  lines = re.findall(r'python -m demo_optax (300M .*)', command.__doc__)
  assert len(lines) == 3 and '--link-mbits' in lines[2]
  for line in lines:
    command.main(line.split())
  assert '319,946,752' in capsys.readouterr().out
  command.main(
    ['300M', '--topk', '8', '--values', 'sign', '--workers', '8', '64']
  )
  text = capsys.readouterr().out
  assert text.startswith(str(papers_plan('300M', 'sign', 8)))
  assert papers_plan('300M', 'sign', 64).totals() in text
  assert '1.08 MB' in text


def test_command_takes_chunks_and_optimizers(capsys):
  command.main(['300M', '--chunk', '32'])
  text = capsys.readouterr().out
  assert '50304x1024' in text and '32x32' in text
  command.main(['300M', '--optimizer', 'demo_muon'])
  assert '16x64   1/4      shared' in capsys.readouterr().out


MODULE = """
import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.up = nnx.Linear(10**6, 2 * 10**6, use_bias=False, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)


arrays = lambda: {'up': {'kernel': jnp.zeros((10**6, 2 * 10**6))}}
shapes = lambda: jax.eval_shape(arrays)


def breaks():
  raise RuntimeError('no\\n data')


needs = lambda size: jnp.zeros(size)
text = lambda: {'a': 'text'}
signal = lambda: {'a': jnp.zeros(3, jnp.complex64)}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'of_a_user.py').write_text(MODULE)
  yield 'of_a_user'
  sys.modules.pop('of_a_user', None)


@pytest.mark.parametrize('name', ['Model', 'arrays', 'shapes'])
def test_command_takes_shapes_from_a_function(name, module, capsys):
  """Of 8 TB, so nothing is allocated."""
  command.main([f'{module}:{name}'])
  text = capsys.readouterr().out
  assert 'up.kernel' in text and '1000000x2000000' in text
  assert '2,000,000,000,000 elements' in text


SECONDS = re.compile(
  r'^  (this exchange|all-reduce \w+) +(\S+) of'
  r' communication, +(\S+) in all$',
  re.M,
)


@pytest.mark.parametrize('exchange', ['all_gather', 'all_to_all'])
def test_command_prints_seconds_over_a_link(exchange, capsys):
  command.main(
    [
      '300M',
      '--workers',
      '8',
      '--link-mbits',
      '100',
      '--latency-ms',
      '20',
      '--step-ms',
      '400',
      '--exchange',
      exchange,
    ]
  )
  text = capsys.readouterr().out
  found = {
    name: (float(seconds), float(whole))
    for name, seconds, whole in SECONDS.findall(text)
  }
  plan = demo_optax.plan(
    shapes_of('300M'),
    demo_optax.dct_topk(),
    8,
    exchange=exchange,
    update_values='ternary',
  )
  # A ring of 8 has 7 turns; an all-reduce is two of them, and the messages of
  # an all-to-all are on their way together.
  turns = {'all_gather': 7, 'all_to_all': 8}[exchange]
  size = 319_946_752
  for name, seconds in {
    'this exchange': plan.received_bytes / 12.5e6 + turns * 0.02,
    'all-reduce bfloat16': 7 / 4 * 2 * size / 12.5e6 + 14 * 0.02,
    'all-reduce float32': 7 / 4 * 4 * size / 12.5e6 + 14 * 0.02,
  }.items():
    assert found[name] == pytest.approx((seconds, seconds + 0.4), rel=5e-3)
  saved = found['all-reduce bfloat16'][0] - found['this exchange'][0]
  (said,) = re.findall(r'^The exchange saves (\S+) s of the 90.3 s', text, re.M)
  assert float(said) == pytest.approx(saved, rel=5e-3)


@pytest.mark.parametrize(
  'args, says',
  [
    (
      ['--link-mbits', '400000', '--step-ms', '400'],
      'The link does not limit this step: all-reduce in bfloat16.',
    ),
    (
      ['--link-mbits', '1000', '--workers', '98'],
      'The exchange saves less than a tenth of this step',
    ),
    (
      ['--link-mbits', '1000', '--workers', '2'],
      'The exchange saves 5.02 s of the 5.12 s',
    ),
  ],
)
def test_command_ends_with_a_verdict(args, says, capsys):
  command.main(['300M', *args])
  assert capsys.readouterr().out.splitlines()[-1].startswith(says)


@pytest.mark.parametrize(
  'optimizer, values', [('demo', 'ternary'), ('demo_muon', 'int4')]
)
def test_updates_are_counted_in_the_code_of_the_optimizer(
  optimizer, values, capsys
):
  command.main(['300M', '--optimizer', optimizer, '--exchange', 'all_to_all'])
  params, compressor = shapes_of('300M'), demo_optax.dct_topk()
  if optimizer == 'demo_muon':
    compressor = demo_optax.recipes.muon_compressors(params)
  plan = demo_optax.plan(
    params, compressor, 8, exchange='all_to_all', update_values=values
  )
  assert capsys.readouterr().out == f'{plan}\n'


MISTAKES = {  # by the end of the message: arguments
  'error: no data': ['of_a_user:breaks'],
  "argument: 'size'": ['of_a_user:needs'],
  "'str' object has no attribute 'shape'": ['of_a_user:text'],
  'is complex64': ['of_a_user:signal'],
  "no attribute 'nothing'). Give a function that exists": ['of_a_user:nothing'],
  "got 'nope:x' (No module named 'nope')": ['nope:x'],
  'model must be 300M, 1B or module:function': ['no/such/file'],
  'link_mbits must be in (0, inf), got 0.0': ['300M', '--link-mbits', '0'],
  'link_mbits must be in (0, inf), got nan': ['300M', '--link-mbits', 'nan'],
  "--link-mbits: invalid float value: '1Gbit'": [
    '300M',
    '--link-mbits',
    '1Gbit',
  ],
  'topk must be at least 1, got 0': ['300M', '--topk', '0'],
  'chunk_size must be at least 1, got -1': ['300M', '--chunk=-1'],
  "--chunk: invalid int value: '2.5'": ['300M', '--chunk', '2.5'],
  'workers must be at least 1, got 0': ['300M', '--workers', '0'],
}


@pytest.mark.parametrize('says', MISTAKES)
def test_command_explains_mistakes(says, module, capsys):
  """In one line, with the name of the argument, and exit status 2."""
  args = MISTAKES[says]
  with pytest.raises(SystemExit) as end:
    command.main(args)
  (line,) = capsys.readouterr().err.splitlines()
  assert end.value.code == 2 and says in line
  assert len(line) < 300
  assert line.startswith('python -m demo_optax: error: ')


@pytest.mark.parametrize('flag', ['--nothing', '--work'])
def test_command_names_unknown_flags(flag, capsys):
  with pytest.raises(SystemExit):
    command.main(['300M', flag, '3'])
  (line,) = capsys.readouterr().err.splitlines()
  assert line.endswith(f'unrecognized arguments: {flag} 3')


def test_bytes_are_counted_without_a_basis(monkeypatch):
  """Which takes memory by the square of a chunk's side."""
  monkeypatch.setattr(bases.Dct, 'matrix', None)
  leaf = jax.ShapeDtypeStruct((10**5, 64), jnp.float32)
  plan = demo_optax.plan(leaf, demo_optax.dct_topk((10**5, 64)), 2)
  assert plan.leaves[0].num_chunks == 1
