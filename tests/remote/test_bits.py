"""Workers that are programs: the bits of the simulation."""

import fcntl
import os
import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import wait_until
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import compressors
from demo_optax.exchange.algorithm import run_jitted
from demo_optax.numerics import platform
from demo_optax.remote import frames
from demo_optax.remote import link as link_module
from demo_optax.remote.link import link_of
from demo_optax.remote.program import RemoteProgram
from demo_optax.remote.relay import Relay
from demo_optax.remote.rounds import Options
from demo_optax.remote.states import whole

host = lambda x: np.asarray(whole(x))

# Workers in threads, and those of processes, compile the same programs. In turn,
# all but the first one find them in the cache.
trace = RemoteProgram.trace
TRACED = {}  # by address, programs of workers that take over each other's traces


def trace_in_turn(program, *arrays):
  with open(
    pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'], 'turn'), 'w'
  ) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    address, rank, _ = program.workers.relay
    types = [(x.shape, str(x.dtype)) for x in arrays]
    mesh = program.workers.mesh
    same = str((program.names, types, program.donated, mesh))
    known = TRACED.get(address, {})
    if rank is not None:
      known.setdefault(same, program)
    traced = known.get(same, program)
    if traced is not program and program._step is None:
      # A trace does not know the worker's number, which is an argument.
      own = vars(program) | {'_step': traced._step}
      program.__dict__ = vars(traced) | own
      program._link.shared = traced._link.shared
    trace(program, *arrays)


RemoteProgram.trace = trace_in_turn


def at_once(fun, items, seconds=20):
  """What `fun` returns of each item, or its error, called in threads."""
  items, found = list(items), {}

  def one(i):
    try:
      found[i] = fun(items[i])
    except BaseException as error:
      found[i] = error

  threads = [
    threading.Thread(target=one, args=(i,), daemon=True)
    for i in range(len(items))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(seconds)
    assert not thread.is_alive()
  return [found[i] for i in range(len(items))]


class Clock:
  """Seconds of a relay, which pass when a test says so."""

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


class Joined:
  """A relay in a thread, and workers in others.

  With `one_trace` the first worker traces and compiles a step for all of them.
  """

  def __init__(
    self,
    count,
    clock=time.monotonic,
    one_trace=False,
    keys=None,
    **options,
  ):
    # A machine may be slow: no worker is late by accident.
    self.count, self.options = count, {'deadline': 60} | options
    self.clock, self.one_trace, self.keys = clock, one_trace, keys
    self.address = 'tcp://127.0.0.1:*'

  def __enter__(self):
    options = Options(self.count, **self.options)
    self.relay = Relay(self.address, options, self.keys, self.clock)
    self.address, self.stopped = self.relay.address, []
    if self.one_trace:
      TRACED.setdefault(self.address, {})
    self.thread = threading.Thread(
      target=self.relay.serve, args=(lambda: bool(self.stopped),)
    )
    self.thread.start()
    return self

  def restart(self):
    """The relay ends, and another one starts, which knows nothing."""
    self.stopped.append(True)
    self.thread.join(10)
    self.__enter__()

  def __exit__(self, *_):
    for rank in (*range(self.count), None):
      link_of(self.workers(rank)).close()
    link_module._link.cache_clear()  # a later relay may get this port
    TRACED.pop(self.address, None)
    self.stopped.append(True)
    self.thread.join(10)
    assert not self.thread.is_alive()

  def workers(self, rank):
    return demo_optax.Workers.remote(self.address, rank=rank, count=self.count)

  def run(self, fun, ranks=None):
    """Returns what `fun(workers)` returns for each rank, run in threads."""
    errors = []

    def check():  # so that nobody waits for one that has failed
      if errors:
        raise RuntimeError('another worker has failed')

    def one(rank):
      workers = self.workers(rank)
      link_of(workers).while_waiting = check
      try:
        return fun(workers)
      except BaseException as error:
        errors.append(error)
      finally:
        link_of(workers).pause()  # those that still run need not wait

    found = at_once(one, range(self.count) if ranks is None else ranks, 240)
    if errors:
      raise errors[0]
    return found


def state_is_sent(workers):
  """Waits for the state that a worker sends: no history is short for it."""
  pushing = link_of(workers)._pushing
  if pushing.is_alive():
    pushing.join(20)


def pass_when(joined, is_so, seconds):
  """Lets time pass for the relay when its members are as expected."""
  wait_until(lambda: is_so(list(joined.relay.rounds._members.values())))
  joined.clock.now += seconds


pytestmark = pytest.mark.core

PARAMS = {'w': (24, 160), 'v': (160, 24), 'large': (24, 700), 'b': (24,)}
NAMES = dict.fromkeys(('averaged', 'weighted'), tuple(PARAMS)) | {
  'demo': ('w', 'v', 'b')
}  # others: w and b


def batches(step, count, nan_at=None):
  """Rows of all workers; one worker's are NaN in step `nan_at`."""
  x = np.array(jax.random.normal(jax.random.key(step), (count, 4, 24)))
  if step == nan_at:
    x[1] = np.nan
  return x


def loss_of(params, x):
  """Its gradient, p + x, has the same bits however it is compiled."""
  return sum(
    jnp.sum(p * jnp.resize(x, p.shape)) + jnp.sum(p * p) / 2
    for p in params.values()
  )


def train(method, workers, rows):
  """Trains on a worker's rows, or all; parameters, and what steps returned."""
  names = NAMES.get(method, ('w', 'b'))
  params = {name: jnp.full(PARAMS[name], 0.1, jnp.float32) for name in names}
  tx = METHODS[method](workers)
  state = tx.init(params)

  @demo_optax.data_parallel(workers, batch_argnums=2, donate_argnums=(0, 1))
  def step(params, state, x):
    grads = jax.grad(loss_of)(params, x)
    most = demo_optax.over_workers(jnp.max(jnp.abs(x)), jnp.max)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, (x[0, 0], most)

  returned = []
  for x in rows:
    params, state, found = step(params, state, x)
    returned.append(jax.tree.map(host, found))
  return jax.tree.map(host, params), returned


AVERAGED = {  # whole leaves, and one leaf at random places
  'w': demo_optax.dct_topk(topk=8),
  'large': None,
  'b': None,
  'v': compressors.Compressor(
    compressors.RandomSubset(1 / 4), compressors.Identity()
  ),
}


class Weighted:
  """A chain whose last part has weights, which are read from gradients."""

  def __init__(self, first, last):
    self._first, self._last = first, last

  def init(self, params):
    return self._first.init(params), self._last.init(params)

  def update(self, gradients, state, params):
    weight = 1 + 100 * jnp.abs(gradients['b'][0])
    first, last = state
    updates, first = self._first.update(gradients, first, params)
    updates, last = self._last.update(updates, last, params, weight=weight)
    return updates, (first, last)


METHODS = {
  'plain': lambda workers: optax.chain(
    demo_optax.average_gradients(workers=workers), optax.scale(-1e-2)
  ),
  'demo': lambda workers: demo_optax.demo(1e-2, workers=workers),
  'demo_muon': lambda workers: demo_optax.demo_muon(1e-2, workers=workers),
  'demo_diloco': lambda workers: demo_optax.local.demo_diloco(
    optax.sgd(0.1, momentum=0.9), sync_period=4, workers=workers
  ),
  'averaged': lambda workers: demo_optax.demo(
    1e-2, workers=workers, compressor=AVERAGED
  ),
  # With a state of each worker before the exchange.
  'weighted': lambda workers: Weighted(
    demo_optax.per_worker(optax.trace(0.9), workers=workers),
    METHODS['averaged'](workers),
  ),
}


def data_of(method, count, steps):
  nan_at = None if method == 'demo_diloco' else 3
  return [batches(i, count, nan_at) for i in range(steps)]


def joined_rows(data):
  return [x.reshape(-1, x.shape[-1]) for x in data]


# Bytes in a step's largest message beside the exchange's own: the loss and its
# count, a count of the valid, metrics, a weight.
BESIDE = {'demo_muon': 12, 'demo': 12, 'demo_diloco': 0, 'weighted': 24}


@pytest.fixture
def small_pieces(monkeypatch):
  """Arithmetic is a loop."""
  run_jitted.clear_cache()
  monkeypatch.setattr(platform, 'PIECE', 1024)
  yield
  run_jitted.clear_cache()


@pytest.mark.parametrize(
  'method', ['demo_muon', 'demo', 'demo_diloco', 'weighted']
)
def test_as_simulated(method, request):
  """Also the bytes, those of `plan` and few others."""
  if method == 'demo':
    request.getfixturevalue('small_pieces')
  count = 3 if method == 'weighted' else 2
  data = data_of(method, count, 10)
  expected = train(
    method, demo_optax.Workers.simulated(count), joined_rows(data)
  )
  sizes = []

  def run(workers):
    link, rank = link_of(workers), workers.relay.rank
    if rank == 0:
      real = link.gather
      link.gather = lambda body: sizes.append(len(body)) or real(body)
    return train(method, workers, [x[rank] for x in data])

  with Joined(count, one_trace=True) as joined:
    found = joined.run(run)
    check(method, found, expected)
    params = {
      name: jax.ShapeDtypeStruct(PARAMS[name], jnp.float32)
      for name in NAMES.get(method, ('w', 'b'))
    }
    compressor = AVERAGED if method == 'weighted' else demo_optax.dct_topk()
    plan = demo_optax.plan(params, compressor, joined.workers(0))
  assert max(sizes) == frames.CHAIN + plan.sent_bytes + BESIDE[method]


def check(method, found, expected):
  """Workers have the same bits, and those of the simulation.

  As compiled for users, matrices are not multiplied in a stack as alone.
  """
  for own in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, own, found[0])
  if method != 'demo_muon' or os.environ.get('TESTS_AS_USERS', '0') == '0':
    jax.tree.map(np.testing.assert_array_equal, found[0], expected)


SPECS = {
  'w': P(None, 'fsdp'),
  'v': P('fsdp'),
  'large': P(None, 'fsdp'),
  'b': P(),
}


def test_workers_of_several_devices():
  """Two workers of four devices, which shard parameters."""
  data = [batches(i, 2, 3) for i in range(6)]
  simulated = demo_optax.Workers.simulated(2, SPECS, {'fsdp': 4})
  expected = train('averaged', simulated, joined_rows(data))

  def of_worker(workers):
    rank = workers.relay.rank
    mesh = jax.sharding.Mesh(jax.devices()[4 * rank : 4 * rank + 4], 'fsdp')
    workers = demo_optax.Workers.remote(
      workers.relay.address, rank=rank, count=2, mesh=mesh, param_specs=SPECS
    )
    return train('averaged', workers, [x[rank] for x in data])

  with Joined(2) as joined:
    found = joined.run(of_worker)
  (params, _), (others, _) = found
  jax.tree.map(np.testing.assert_array_equal, params, others)
  for name, x in params.items():
    if name != 'w':
      # Dense updates are multiplied and added in other ways by sharded programs.
      np.testing.assert_allclose(x, expected[0][name], rtol=1e-5, atol=1e-6)
    else:
      np.testing.assert_array_equal(x, expected[0][name])
