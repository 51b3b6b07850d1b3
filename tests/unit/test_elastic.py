"""Elastic runs without processes: who is in a generation, and what moves."""

import hashlib
import json
import socket
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src import cache_key
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import accumulation, elastic
from demo_optax.elastic import __main__ as command
from demo_optax.elastic import member, transfer

LOCAL = '127.0.0.1'


class Peer:
  """What a process says to the coordinator, and hears."""

  def __init__(self, port):
    self.socket = socket.create_connection((LOCAL, port), timeout=20)
    self.lines = self.socket.makefile()

  def say(self, kind, **about):
    self.socket.sendall(json.dumps({'kind': kind, **about}).encode() + b'\n')

  def ready(self, step=None):
    self.say('ready', step=step, about={'of': step}, name='a peer')

  def hear(self):
    line = self.lines.readline()
    return json.loads(line) if line else None

  def close(self):
    self.lines.close()
    self.socket.close()


@pytest.fixture
def start():
  """Starts coordinators, and peers of the last one."""
  opened, threads = [], []

  def coordinator(*args, **kwargs):
    made = elastic.Coordinator(*args, host=LOCAL, **kwargs)
    threads.append(threading.Thread(target=made.serve, daemon=True))
    threads[-1].start()

    def peer(step=None, *, ready=True):
      opened.append(Peer(made.port))
      if ready:
        opened[-1].ready(step)
      return opened[-1]

    return made, peer

  yield coordinator
  for peer in opened:
    peer.say('done') if peer.socket.fileno() >= 0 else None
  for peer in opened:
    peer.close()


def test_generations(start):
  """Lost, coming, ahead, done: as the coordinator tells it."""
  made, peer = start(2, deadline=60)
  a, b = peer(), peer()
  first = [a.hear(), b.hear()]
  assert [g['rank'] for g in first] == [0, 1]
  for g in first:
    assert (g['kind'], g['number'], g['processes']) == ('generation', 1, 2)
    assert (g['survivors'], g['step'], g['about']) == (0, None, None)

  c = peer()  # comes: nobody's step has to fail
  a.say('steady')
  b.say('steady')
  for x in (a, b):
    ended = x.hear()
    assert (ended['kind'], ended['lost']) == ('ended', False)
    assert 'comes' in ended['why']
  b.ready(step=7)  # it is ahead by one
  a.ready(step=6)
  second = [x.hear() for x in (a, b, c)]
  assert [g['rank'] for g in second] == [0, 1, 2]
  for g in second:
    assert (g['number'], g['survivors'], g['step']) == (2, 2, 6)
    assert g['about'] == {'of': 6}  # the first survivor's

  a.close()  # lost: its rank goes to the next
  for x in (b, c):
    ended = x.hear()
    assert (ended['kind'], ended['lost']) == ('ended', True)
    assert 'lost' in ended['why']
    x.ready(step=9)
  third = [b.hear(), c.hear()]
  assert [g['rank'] for g in third] == [0, 1]
  assert {g['port'] for g in first + second + third} == {
      g['port'] for g in (first[0], second[0], third[0])}
  assert set(made._services) == {1, 2, 3}

  b.say('done')
  c.say('done')
  assert [b.hear(), c.hear()] == [{'kind': 'finished'}] * 2


def test_services_without_clients_are_closed(start):
  made, peer = start(1, deadline=60)
  a = peer()
  for number in range(1, 8):
    assert a.hear()['number'] == number
    a.say('failed')
    assert a.hear()['kind'] == 'ended'
    a.ready(number)
  assert a.hear()['number'] == 8
  assert set(made._services) == {5, 6, 7, 8}


def test_a_step_that_failed_among_the_same_processes(start):
  _, peer = start(2, deadline=60)
  a, b = peer(), peer()
  a.hear(), b.hear()
  a.say('failed')
  assert [x.hear()['lost'] for x in (a, b)] == [True, True]
  a.ready(3), b.ready(4)
  assert [x.hear()['step'] for x in (a, b)] == [3, 3]


def test_who_is_silent_is_left_behind(start):
  _, peer = start(2, deadline=2)
  a, b = peer(), peer()
  a.hear(), b.hear()
  until = time.monotonic() + 20
  while time.monotonic() < until:
    a.say('alive')
    a.socket.settimeout(0.2)
    try:
      ended = json.loads(a.socket.recv(4096))
      break
    except TimeoutError:
      continue
  assert 'lost' in ended['why']
  assert b.hear() is None  # hung up


def test_a_loss_while_one_comes(start):
  """Others that still wait in a step hear that it has no end."""
  _, peer = start(2, deadline=60)
  a, b = peer(), peer()
  a.hear(), b.hear()
  a.say('steady'), b.say('steady')
  c = peer()
  assert [x.hear()['lost'] for x in (a, b)] == [False, False]
  b.close()
  assert a.hear()['lost'] is True
  a.ready(3)
  assert [x.hear()['processes'] for x in (a, c)] == [2, 2]


def test_all_who_are_left_are_done(start):
  made, peer = start(2, deadline=60)
  a, b = peer(), peer()
  a.hear(), b.hear()
  a.say('done')
  b.close()
  heard = a.hear()
  if heard['kind'] == 'ended':  # it was the first of the two
    heard = a.hear()
  assert heard == {'kind': 'finished'}
  late = peer()
  assert late.hear() == {'kind': 'finished'}
  a.close(), late.close()


def test_who_comes_back_has_what_it_had(start):
  """Unless others have gone on without it."""
  _, peer = start(2, deadline=60, min_workers=2)
  a, b = peer(), peer()
  a.hear(), b.hear()
  a.close(), b.close()
  again = [peer(ready=False), peer(ready=False)]
  for rank, x in enumerate(again):
    x.say('ready', step=9, about={}, name='x', rank=rank, generation=1)
  found = [x.hear() for x in again]
  assert [(g['number'], g['step'], g['is_new']) for g in found] == [
      (2, 9, False)] * 2


def test_others_have_gone_on_without_it(start):
  _, peer = start(2, deadline=60)
  a, b = peer(), peer()
  a.hear(), b.hear()
  b.close()
  assert a.hear()['kind'] == 'ended'
  a.ready(12)
  assert a.hear()['number'] == 2
  a.say('steady')
  b = peer(ready=False)
  b.say('ready', step=12, about={}, name='x', rank=1, generation=1)
  assert a.hear()['kind'] == 'ended'
  a.ready(13)
  assert (a.hear()['step'], b.hear()['is_new']) == (13, True)


def test_too_few_wait_for_others(start):
  _, peer = start(3, deadline=60, min_workers=2)
  a, b, c = peer(), peer(), peer()
  for x in (a, b, c):
    x.hear()
  a.close(), b.close()
  assert c.hear()['kind'] == 'ended'
  c.ready(5)
  d = peer()
  generation = c.hear()
  while generation['kind'] == 'ended':
    generation = c.hear()
  assert (generation['processes'], generation['survivors']) == (2, 1)
  assert d.hear()['rank'] == 1


@pytest.mark.parametrize('line', [
    b'what\n', b'[]\n', b'{"kind": "ready"}\n', b'{}\n', b'\xff\n',
    b'{"kind": "ready", "step": "7", "about": 0, "name": ""}\n'])
def test_nonsense_is_not_listened_to(start, line):
  _, peer = start(1, deadline=60)
  stranger = peer(ready=False)
  stranger.socket.sendall(line)
  assert stranger.hear() is None
  assert peer().hear()['processes'] == 1


@pytest.mark.parametrize('kwargs, says', [
    ({'min_workers': 3}, 'min_workers=3 must be from 1 to num_workers=2'),
    ({'min_workers': 0}, 'min_workers=0'),
    ({'deadline': 1}, 'deadline=1'), ({'patience': -1}, 'patience=-1')])
def test_coordinators_that_cannot_be(kwargs, says):
  with pytest.raises(ValueError, match=says):
    elastic.Coordinator(2, host=LOCAL, **kwargs)


@pytest.mark.parametrize('args, says', [
    (['--workers', '0'], "'0' must be an integer of at least 1"),
    (['--workers', 'x'], "'x' must be an integer"), ([], '--workers'),
    (['--workers', '2', '--min-workers', '3'], 'from 1 to num_workers=2'),
    (['--workers', '2', '--deadline', 'nan'], "'nan' must be a number"),
    (['--workers', '2', '--port', '99999'], '--port 99999')])
def test_command_explains(args, says, capsys):
  with pytest.raises(SystemExit) as status:
    command.main(args)
  assert status.value.code == 2
  assert says in capsys.readouterr().err


def test_command_says_that_a_port_is_taken(capsys):
  with socket.create_server((LOCAL, 0)) as taken:
    port = str(taken.getsockname()[1])
    with pytest.raises(SystemExit):
      command.main(['--workers', '1', '--host', LOCAL, '--port', port])
  assert port in capsys.readouterr().err


# Run --------------------------------------------------------------------------


def build(workers):
  model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
  compressor = demo_optax.dct_topk(topk=4)
  tx = demo_optax.demo(1e-2, workers=workers, compressor=compressor)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers)
  def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  return train_step, (model, optimizer)


def test_without_a_coordinator():
  """The loop of an elastic run, on the devices that there are."""
  losses = []
  with elastic.Run(None, build) as run:
    assert run.workers.count == len(jax.devices())
    while run.step < 3:
      with run.one_step():
        losses.append(float(run.train_step(*run.state, jnp.ones((8, 64)))))
  assert len(losses) == 3 and losses[2] < losses[0]

  step, state = build(demo_optax.Workers.simulated(2))
  expected = [float(step(*state, jnp.ones((8, 64)))) for _ in range(3)]
  np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_begin_sets_the_step():
  def begin(run):
    run.step = 5

  with elastic.Run(None, build, begin=begin) as run, run.one_step():
    pass
  assert run.step == 6


def test_steps_are_made_in_a_run():
  run = elastic.Run(None, build)
  with pytest.raises(RuntimeError, match='inside of `with'), run.one_step():
    pass
  with run:
    with pytest.raises(ZeroDivisionError), run.one_step():
      _ = 1 / 0
    assert run.step == 0
    again = pytest.raises(RuntimeError, match='inside of itself')
    with again, run.one_step(), run.one_step():
      pass


def test_a_run_must_find_its_coordinator():
  with socket.create_server((LOCAL, 0)) as taken:
    port = taken.getsockname()[1]
  run = elastic.Run(f'{LOCAL}:{port}', build, timeout=0.3)
  with pytest.raises(TimeoutError, match=f'no coordinator at {LOCAL}:{port}'):
    run.__enter__()
  for address in ('nowhere', ':70', 'host:x', ''):
    with pytest.raises(ValueError, match='must be "HOST:PORT"'):
      elastic.Run(address, build)


def test_a_run_must_find_others(start):
  made, _ = start(2, deadline=60)
  run = elastic.Run(f'{LOCAL}:{made.port}', build, patience=0.3)
  with pytest.raises(TimeoutError, match='waits for other processes, 0.3 s'):
    run.__enter__()


def test_a_run_must_come_before_devices(start):
  made, _ = start(1, deadline=60)
  jax.devices()
  run = elastic.Run(f'{LOCAL}:{made.port}', build)
  with pytest.raises(RuntimeError, match='JAX has devices already'):
    run.__enter__()


def test_programs_of_others_are_found_in_the_cache(monkeypatch):
  """On CPU JAX's key contains the process, through its own devices."""
  monkeypatch.setattr(
      cache_key, '_hash_accelerator_config', cache_key._hash_accelerator_config)

  def key(*devices):
    found = hashlib.sha256()
    cache_key._hash_accelerator_config(found, np.array(devices))
    return found.digest()

  cpu = types.SimpleNamespace(platform='cpu', device_kind='cpu')
  for _ in range(2):  # every generation does it
    member._share_programs()
  assert key(cpu, cpu) == key(*jax.devices()[:2]) != key(cpu)
  before = key(cpu)
  monkeypatch.setattr(member, '_cpu_features', lambda: 'another processor')
  assert key(cpu) != before

  asked = []
  monkeypatch.setattr(
      cache_key, '_hash_accelerator_config', lambda *args: asked.append(args))
  member._share_programs()
  key(types.SimpleNamespace(platform='gpu', device_kind='H100'))
  assert len(asked) == 1


def test_errors_of_lost_peers_are_told_from_others():
  for error in (
      jax.errors.JaxRuntimeError('INTERNAL: x'), RuntimeError('std::bad_cast'),
      ValueError('UNKNOWN: Gloo AllGather failed: closed')):
    assert member.is_lost_peer(error)
  for error in (ValueError('axis 3 is out of bounds'), RuntimeError('mine'),
                TypeError('UNKNOWN: x'), ValueError('Gradients: none')):
    assert not member.is_lost_peer(error)
  try:
    try:
      raise jax.errors.JaxRuntimeError('INTERNAL: x')
    except jax.errors.JaxRuntimeError as error:
      raise TimeoutError('at a barrier') from error
  except TimeoutError as wrapped:
    assert member.is_lost_peer(wrapped)


# What moves -------------------------------------------------------------------


@pytest.fixture
def state():
  mesh = jax.make_mesh((4,), ('workers',), devices=jax.devices()[:4])
  workers = demo_optax.Workers.on_mesh(mesh, 'workers')
  step, (model, optimizer) = build(workers)
  for seed in range(3):
    step(model, optimizer, jax.random.normal(jax.random.key(seed), (8, 64)))
  return workers, (model, optimizer)


GENERATION = {'processes': 1, 'survivors': 1, 'rank': 0}


def test_a_state_comes_back(state):
  workers, objects = state
  arrays = transfer.arrays_of(objects)
  local = transfer.take(arrays)
  assert local.rows == [0, 1, 2, 3] == list(transfer.own_rows(workers))
  about = transfer.about(arrays, local, 4)
  json.dumps(about)
  _, fresh = build(workers)
  placed = transfer.put(
      transfer.arrays_of(fresh), local, {**GENERATION, 'about': about},
      local.rows)
  back = transfer.arrays_of(transfer.with_arrays(fresh, placed))
  jax.tree.map(np.testing.assert_array_equal, back, arrays)
  assert fresh[0].kernel[...].sharding == placed[0]['kernel'][...].sharding


def test_arrays_are_not_those_that_the_next_step_changes(state):
  _, (model, optimizer) = state
  arrays = transfer.arrays_of((model, optimizer))
  before = jax.tree.map(np.asarray, arrays)
  model.kernel[...] = model.kernel[...] * 2
  jax.tree.map(np.testing.assert_array_equal, arrays, before)


def test_keys_scalars_and_empty_arrays_come_back():
  tree = {'key': jax.random.key(3), 'legacy': jnp.zeros(0), 'count': jnp.int32(4),
          'flag': jnp.array(True), 'half': jnp.ones(3, jnp.bfloat16), 'text': 'x'}
  local = transfer.take(tree)
  blank = {**tree, 'key': jax.random.key(0), 'count': jnp.int32(0)}
  back = transfer.put(blank, local, {**GENERATION, 'about': {}}, [0])
  assert back['text'] == 'x' and back['count'] == 4 and back['flag']
  np.testing.assert_array_equal(
      jax.random.key_data(back['key']), jax.random.key_data(tree['key']))


def test_numbers_and_numpy_arrays_are_trained_too():
  """As in a TrainState, whose step is a number until the first step."""
  built = {'w': np.zeros((2, 2)), 'step': 0, 'rate': 0.5, 'name': 'x'}
  trained = {'w': jnp.full((2, 2), 7.0), 'step': jnp.int32(500), 'rate': 0.25,
             'name': 'x'}
  back = transfer.put(
      built, transfer.take(trained), {**GENERATION, 'about': {}}, [0])
  assert (back['w'] == 7).all() and back['step'] == 500
  assert back['rate'] == 0.25 and back['name'] == 'x'


def test_accumulated_gradients_move(state):
  workers, _ = state
  params = {'w': jnp.ones((8, 8))}
  tx = optax.MultiSteps(demo_optax.demo(1e-2, workers=workers), 4)

  @demo_optax.data_parallel(workers)
  def step(params, opt_state, x):
    grads = jax.grad(lambda p: ((x @ p['w']) ** 2).mean())(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  with jax.numpy_dtype_promotion('standard'):
    trained = step(params, tx.init(params), jnp.ones((8, 8)))
  local = transfer.take(trained)
  fresh, _ = accumulation.stack(
      (params, tx.init(params)), [], workers)
  back = transfer.put(fresh, local, {**GENERATION, 'about': {}}, local.rows)
  jax.tree.map(np.testing.assert_array_equal, back, trained)


def test_newcomers_receive_what_survivors_have(state, monkeypatch):
  """All but the momentum of one: its row is zero, the others' stay."""
  _, objects = state
  arrays = transfer.arrays_of(objects)
  crossing = []
  monkeypatch.setattr(
      transfer, '_sum_over_processes', lambda x: crossing.append(x) or x)
  two = {'processes': 2, 'survivors': 1,
         'about': transfer.about(arrays, transfer.take(arrays), 4)}
  flat = transfer.leaves_of(arrays)
  values = transfer.take(arrays).values
  transfer._from_survivor(flat, values, True, {**two, 'rank': 0})
  told = crossing.pop()
  assert told.any()
  monkeypatch.setattr(transfer, '_sum_over_processes', lambda x: x + told)
  blank = [np.zeros_like(x) for x in values]
  received = transfer._from_survivor(flat, blank, False, {**two, 'rank': 1})
  momenta = 0
  for (path, _), new, old in zip(flat, received, values):
    keys = transfer.specs.path_keys(path)
    if transfer.is_momentum(keys):
      momenta += 1
      assert not new.any() and old.any()
    elif transfer.specs.is_stacked(keys):
      np.testing.assert_array_equal(new, np.broadcast_to(old[:1], old.shape))
    else:
      np.testing.assert_array_equal(new, old)
  assert momenta


def test_sums_over_processes_are_those_of_bytes():
  values = np.arange(256, dtype=np.uint8)
  np.testing.assert_array_equal(transfer._sum_over_processes(values), values)
  pieces = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
  old, transfer._PIECE = transfer._PIECE, 64
  try:
    np.testing.assert_array_equal(transfer._sum_over_processes(pieces), pieces)
  finally:
    transfer._PIECE = old


def test_what_cannot_move_is_an_error(state):
  workers, objects = state
  arrays = transfer.arrays_of(objects)
  local = transfer.take(arrays)
  other = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
  tx = demo_optax.demo(1e-2, workers=workers)
  larger = other, nnx.Optimizer(other, tx, wrt=nnx.Param)
  with pytest.raises(ValueError, match='must build the same state'):
    transfer.put(transfer.arrays_of(larger), local,
                 {**GENERATION, 'about': {}}, local.rows)
  donated = jnp.ones(3)
  donated.delete()
  with pytest.raises(ValueError, match='leave donate_argnums out'):
    transfer.take({'w': donated})
  with pytest.raises(ValueError, match='Workers.on_mesh'):
    transfer.own_rows(demo_optax.Workers.simulated(2))


def test_a_base_state_of_optax_moves(state):
  workers, _ = state
  params = {'w': jnp.ones((8, 8))}
  tx = optax.chain(
      demo_optax.scale_by_demo(demo_optax.dct_topk(), workers=workers),
      optax.adam(1e-3))
  opt_state = tx.init(params)
  local = transfer.take(opt_state)
  back = transfer.put(
      tx.init(params), local, {**GENERATION, 'about': {}}, local.rows)
  jax.tree.map(np.testing.assert_array_equal, back, opt_state)
  assert all(
      x.sharding.is_equivalent_to(y.sharding, x.ndim)
      for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(opt_state)))
  placed = jax.device_put(
      jnp.ones((4, 2)), NamedSharding(workers.mesh, P('workers')))
  assert transfer.take({'worker_stacked': placed}).rows == [0, 1, 2, 3]
