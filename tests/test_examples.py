"""The main job, small: it learns, resumes to the bit, and draws."""

import json
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'
sys.path.insert(0, str(EXAMPLES))

import methods
import text
import train_lm

import demo_optax

SMALL = ['--width', '32', '--heads', '2', '--layers', '1', '--context', '32',
         '--steps', '12', '--eval-every', '6', '--save-every', '6',
         '--batch', '8', '--warmup', '2']


@pytest.fixture(autouse=True)
def lenient():
  """Flax layers and optax schedules promote dtypes and ranks."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield


def run(tmp_path, *args):
  return train_lm.main([*SMALL, '--out', str(tmp_path), *args])


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('flags', [
    *(['--compressor', name]
      for name in [*methods.TOPK, *methods.SUBSETS, 'full']),
    *(['--base', name] for name in methods.BASES),
    ['--embeddings', 'adamw'], ['--embeddings', 'own', '--base', 'muon'],
    ['--embeddings', 'own', '--own-chunk', '1', '32', '--values', 'sign'],
    ['--optimizer', 'adamw']])
def test_every_method_makes_updates(flags):
  """Traced, not run: shapes, and what the bytes are counted from."""
  args = train_lm.parse_args([*SMALL, *flags])
  workers = demo_optax.Workers.simulated(2)
  tx = methods.make_optimizer(args, workers)
  shapes = {'token_embedding': (64, 32), 'kernel': (128, 64), 'norm': (32,)}
  params = {k: jax.ShapeDtypeStruct(s, 'float32') for k, s in shapes.items()}
  gradients = {
      k: jax.ShapeDtypeStruct((2, *s), 'float32') for k, s in shapes.items()}
  state = jax.eval_shape(tx.init, params)
  updates, new = jax.eval_shape(tx.update, gradients, state, params)
  assert {k: u.shape for k, u in updates.items()} == shapes
  assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
      lambda x: (x.shape, x.dtype), state)
  cost = methods.count_bytes(args, params, workers)
  assert 0 < cost['sent'] <= cost['adamw'] + 13 + 4


def test_documents_are_not_shared():
  corpus = text.load()
  assert len(corpus.train) > 5 * len(corpus.valid) > 100_000
  train, valid = corpus.train.tobytes(), corpus.valid.tobytes()
  pieces = [valid[i : i + 100] for i in range(0, len(valid) - 100, 100)]
  # Help topics quote each other; what is quoted was taken out.
  assert sum(piece in train for piece in pieces) < 0.01 * len(pieces)


def test_own_data(tmp_path):
  file = tmp_path / 'a.txt'
  file.write_text('\n\n'.join(f'{i} ' * 500 for i in range(30)))
  corpus = text.load(str(file))
  assert len(corpus.train) > len(corpus.valid) > 0
  folder = tmp_path / 'folder'
  folder.mkdir()
  for i in range(12):
    (folder / f'{i}.txt').write_text(f'document {i} ' * 50)
  assert b'document 3' in text.load(str(folder)).valid.tobytes()
  file.write_text('short')
  with pytest.raises(ValueError, match='at least 2 are needed'):
    text.load(str(file))


def test_compare_draws_and_tells(tmp_path, capsys):
  demo, adamw = run(tmp_path, '--compare', '--workers', '2')
  assert (tmp_path / 'loss.png').stat().st_size > 10_000
  assert demo['sent'] < 0.1 * adamw['sent']
  out = capsys.readouterr().out
  assert 'AdamW-DDP' in out and 'demo' in out and 'A sample of' in out
  for name in ('demo', 'adamw'):
    config, *records = read(tmp_path / name / 'metrics.jsonl')
    assert config['config']['optimizer'] == name
    losses = [r['loss'] for r in records]
    assert len(losses) == 12 and np.mean(losses[-3:]) < losses[0] - 0.3
    assert 'valid_loss' in records[-1] and records[-1]['sent'] > 0


@pytest.mark.parametrize('workers', ['2', '9'], ids=['mesh', 'simulated'])
@pytest.mark.parametrize('embeddings', ['demo', 'adamw'])
def test_resumed_equals_uninterrupted(tmp_path, workers, embeddings, capsys):
  args = ['--workers', workers, '--embeddings', embeddings,
          '--batch', '18' if workers == '9' else '8']
  (whole,) = run(tmp_path / 'whole', *args)
  # Stopped after 6 of the same 12 steps: later checkpoints are gone.
  (first,) = run(tmp_path / 'parts', *args)
  folder = tmp_path / 'parts' / 'demo' / 'checkpoints'
  assert sorted(p.name for p in folder.iterdir()) == ['12', '6']
  shutil.rmtree(folder / '12')
  (second,) = run(tmp_path / 'parts', *args, '--resume')
  assert [r['step'] for r in second['records']] == list(range(7, 13))
  assert second['records'] == whole['records'][6:]
  expected = 'on the devices of 1' if workers == '2' else 'simulated'
  assert expected in capsys.readouterr().out
  arrays = [checkpoint(tmp_path / name / 'demo', 12)
            for name in ('whole', 'parts')]
  assert arrays[0].keys() == arrays[1].keys()
  for key in arrays[0]:
    np.testing.assert_array_equal(arrays[0][key], arrays[1][key])


def checkpoint(folder, step):
  """Read as anybody's Orbax code would."""
  import orbax.checkpoint as ocp
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(
        (folder / f'checkpoints/{step}/state').absolute())


def test_resume_with_another_number_of_workers(tmp_path):
  run(tmp_path, '--workers', '2')
  with pytest.raises(SystemExit, match='(?s)does not fit.*Here: --resize'):
    run(tmp_path, '--workers', '4', '--resume')
  with pytest.raises(SystemExit, match='(?s)does not fit.*width|float32'):
    run(tmp_path, '--workers', '2', '--resume', '--width', '64')
  with pytest.raises(SystemExit, match='--seed 0, and this is --seed 1'):
    run(tmp_path, '--workers', '2', '--resume', '--seed', '1')
  with pytest.raises(SystemExit, match='go on with --resume'):
    run(tmp_path, '--workers', '2')
  # Stopped while it wrote a record.
  with (tmp_path / 'demo/metrics.jsonl').open('a') as file:
    file.write('{"step": 13, "lo')
  (more,) = run(tmp_path, '--workers', '4', '--resume', 'auto', '--resize',
                '--steps', '14')
  assert [r['step'] for r in more['records']] == [13, 14]
  assert more['records'][-1]['loss'] < 5.3


def test_workers_that_part_stop_the_run(tmp_path, monkeypatch):
  parted = demo_optax.Difference("['w']", (3,), (3,), (0,))
  monkeypatch.setattr(demo_optax, 'check_replicas', lambda *_: [parted])
  with pytest.raises(SystemExit, match='(?s)After step 1 not all.*devices .3,'):
    run(tmp_path, '--workers', '2', '--check-every', '1', '--steps', '2')


def test_records_are_not_repeated(tmp_path):
  run(tmp_path, '--workers', '2')
  run(tmp_path, '--workers', '2', '--resume', '--steps', '14')
  config, *records = read(tmp_path / 'demo' / 'metrics.jsonl')
  assert 'config' in config
  assert [r['step'] for r in records] == list(range(1, 15))
  assert all(r.keys() >= INFO for r in records)
  # The same for TensorBoard.
  pytest.importorskip('tensorboardX')
  first, second = sorted((tmp_path / 'demo').glob('events.out.tfevents.*'))
  assert [max(e.step for e in events(file)) for file in (first, second)] == [
      12, 14]
  drawn = {}
  for event in [*events(first), *events(second)]:
    for value in event.summary.value:
      if value.HasField('simple_value'):
        drawn.setdefault(event.step, {})[value.tag] = value.simple_value
  assert drawn == {
      r.pop('step'): pytest.approx(r, rel=1e-6) for r in records}


INFO = {'num_excluded', 'sent_energy', 'residual_norm', 'mean_senders'}


def test_metrics_without_tensorboard(tmp_path, monkeypatch):
  import metrics
  monkeypatch.setattr(metrics, 'SummaryWriter', None)
  with metrics.Metrics(tmp_path, {'config': {}}) as log:
    log.write({'step': 1, 'loss': 0.5})
  assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']


def events(path):
  """Of a TFRecord file: length, its checksum, the event, and its checksum."""
  from tensorboardX.proto import event_pb2
  data, at, found = path.read_bytes(), 0, []
  while at < len(data):
    size = int.from_bytes(data[at : at + 8], 'little')
    found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
    at += 16 + size
  return found


def test_one_worker_and_little_data(tmp_path):
  file = tmp_path / 'small.txt'
  file.write_text(' '.join(f'word{i}' for i in range(6000)))  # one line
  (record,) = run(tmp_path, '--workers', '1', '--optimizer', 'adamw',
                  '--data', str(file))
  assert np.isfinite(record['valid_loss']) and record['sent'] == 0


def test_start_anew(tmp_path):
  (first,) = run(tmp_path, '--resume', 'auto', '--steps', '2', '--workers', '1')
  (again,) = run(tmp_path, '--overwrite', '--steps', '2', '--workers', '1')
  assert first['records'] == again['records']
  assert len(list((tmp_path / 'demo').glob('events.out.tfevents.*'))) <= 1


def test_resume_without_a_checkpoint(tmp_path):
  with pytest.raises(SystemExit, match='no checkpoint'):
    run(tmp_path, '--resume')


# Workers of several devices ---------------------------------------------------


def test_train_sharded(tmp_path, capsys):
  """Eight devices: a quarter of the memory each, and the same losses."""
  import train_sharded
  sharded, alone = train_sharded.main(
      ['--width', '256', '--heads', '2', '--layers', '1', '--context', '64',
       '--steps', '3', '--batch', '8', '--warmup', '1',
       '--out', str(tmp_path)])
  assert (tmp_path / 'loss.png').exists()
  assert json.loads((tmp_path / 'sharded.json').read_text())
  _, *records = read(tmp_path / '2-workers-of-4-devices/metrics.jsonl')
  assert [r['loss'] for r in records] == sharded['losses']
  assert records[-1].keys() >= INFO
  np.testing.assert_allclose(sharded['losses'], alone['losses'], atol=0.02)
  for what in ('parameters', 'optimizer'):
    assert sharded['memory'][what] < 0.27 * alone['memory'][what]
  between = {tuple(axes): (kind, received)
             for kind, axes, number, received in sharded['traffic']
             if kind == 'all-gather'}
  between_alone = {tuple(axes): (kind, received)
                   for kind, axes, number, received in alone['traffic']
                   if kind == 'all-gather'}
  assert set(between) == {('replica',), ('fsdp',)}
  assert set(between_alone) == {('replica',)}
  # A quarter each; what is sharded has an end of 13 bytes of its own.
  assert between['replica',][1] <= between_alone['replica',][1] / 4 + 13 + 2
  assert '0 leaves cut otherwise' in capsys.readouterr().out


# Exchanging every few steps ---------------------------------------------------


@pytest.mark.parametrize('method', [
    'demo-diloco',
    *(pytest.param(m, marks=pytest.mark.slow)
      for m in ('diloco', 'demo-diloco-drift', 'sparse-loco'))])
def test_local_updates_resumed_in_a_period(tmp_path, method, capsys):
  args = ['--workers', '2', '--optimizer', method, '--sync-period', '4']
  (whole,) = run(tmp_path / 'whole', *args)
  shutil.copytree(tmp_path / 'whole', tmp_path / 'parts')
  shutil.rmtree(tmp_path / 'parts' / method / 'checkpoints' / '12')
  (second,) = run(tmp_path / 'parts', *args, '--resume')
  assert second['records'] == whole['records'][6:]
  assert whole['records'][-1]['loss'] < whole['records'][0]['loss'] - 0.3
  assert method in capsys.readouterr().out
  for name in ('whole', 'parts'):
    found = checkpoint(tmp_path / name / method, 12)
    assert any('worker_stacked' in key for key in found)


def test_train_cnn(tmp_path, capsys):
  import train_cnn
  names = ['adamw', 'demo-diloco']
  runs = train_cnn.main(
      ['--compare', *names, '--steps', '40', '--sync-period', '5', '--warmup',
       '5', '--eval-every', '20', '--workers', '2', '--out', str(tmp_path)])
  assert [r['name'] for r in runs] == names
  for r in runs:
    assert r['records'][-1]['accuracy'] > 0.7
  assert runs[1]['sent'] < runs[0]['sent'] / 100
  _, *records = read(tmp_path / 'demo-diloco/metrics.jsonl')
  assert records == runs[1]['records'] and records[-1].keys() >= INFO
  assert (tmp_path / 'accuracy.png').stat().st_size > 10_000
  assert 'accuracy' in capsys.readouterr().out


@pytest.mark.slow
def test_train_cnn_by_every_method(tmp_path):
  import train_cnn
  runs = train_cnn.main(['--compare', '--out', str(tmp_path)])
  assert len(runs) == 6
  for r in runs:
    assert r['records'][-1]['accuracy'] > 0.95, r['name']
