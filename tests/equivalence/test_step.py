"""What a step may do, and what it must not, on every map."""

import contextlib
import functools
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, make_mesh_2d, on_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

pytestmark = pytest.mark.core

MAPS = {
  'simulated': lambda: demo_optax.Workers.simulated(4),
  'sequential': lambda: demo_optax.Workers.simulated(4, sequential=True),
  'auto': lambda: on_mesh(4, 'auto'),
  'explicit': lambda: on_mesh(4, 'explicit'),
  'several devices': lambda: demo_optax.Workers.on_mesh(
    make_mesh_2d('auto', (4, 2)), 'data'
  ),
}
every_map = pytest.mark.parametrize('workers', MAPS, indirect=True)


@pytest.fixture
def workers(request):
  workers = MAPS[request.param]()
  is_explicit = request.param == 'explicit'
  with jax.set_mesh(workers.mesh) if is_explicit else contextlib.nullcontext():
    yield workers


OPTIMIZERS = {
  'demo': lambda workers: demo_optax.demo(1e-2, workers=workers),
  'demo_muon': lambda workers: demo_optax.demo_muon(1e-2, workers=workers),
  'owners': lambda workers: demo_optax.demo_muon(
    1e-2, workers=workers, exchange='all_to_all'
  ),
  'average': lambda workers: optax.chain(
    demo_optax.average_gradients(workers=workers), optax.sgd(0.1)
  ),
  'per_worker': lambda workers: optax.chain(
    demo_optax.per_worker(optax.trace(0.9), workers=workers),
    demo_optax.scale_by_demo(workers=workers),
    optax.sgd(0.1),
  ),
  'local_updates': lambda workers: demo_optax.local.local_updates(
    optax.sgd(0.1),
    optax.chain(demo_optax.average_gradients(workers=workers), optax.sgd(1.0)),
    2,
    workers=workers,
  ),
  'demo_diloco': lambda workers: demo_optax.local.demo_diloco(
    optax.sgd(0.1), workers=workers, sync_period=2
  ),
}

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
PARAMS = {
  'w': jnp.asarray(
    np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
  ),
  'unused': jnp.ones(3),
}


def loss_fn(params, x):
  return jnp.mean((x @ params['w']) ** 2)


def make_step(tx, workers, value_and_grad, see=lambda grads: grads):
  """The usual step; `see` is applied to the gradients."""

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(params, opt_state, x):
    loss, grads = value_and_grad(params, x)
    updates, opt_state = tx.update(see(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def train(workers, optimizer='demo', loss_fn=loss_fn, steps=2, **options):
  """Returns parameters and loss after some steps."""
  tx = OPTIMIZERS[optimizer](workers)
  value_and_grad = options.pop('value_and_grad', jax.value_and_grad(loss_fn))
  step = make_step(tx, workers, value_and_grad, **options)
  params, opt_state = PARAMS, tx.init(PARAMS)
  for _ in range(steps):
    params, opt_state, loss = step(params, opt_state, X)
  return {'params': params, 'loss': loss}


# Gradients that are not one worker's -----------------------------------------


# Every optimizer on one map, and one optimizer on every map, each with one of the
# mistakes; workers in turn are traced as simulated ones are.
REFUSALS = [('simulated', optimizer) for optimizer in OPTIMIZERS]
REFUSALS += [(kind, 'demo') for kind in ('auto', 'explicit', 'several devices')]
OF_ALL_WORKERS = 'averaged', 'closed over', 'constant key'
REFUSALS = [
  (*refusal, OF_ALL_WORKERS[number % 3])
  for number, refusal in enumerate(REFUSALS)
]


@pytest.mark.parametrize(
  'workers, optimizer, mistake', REFUSALS, indirect=['workers']
)
def test_equal_gradients_are_refused(workers, optimizer, mistake):
  """Recipes with a state before the exchange trained on them, silently."""

  def with_constant_key(params, x):
    del x
    return loss_fn(params, jax.random.normal(jax.random.key(0), (2, 16)))

  options = {
    'averaged': {'see': demo_optax.over_workers},
    'closed over': {'loss_fn': lambda params, x: loss_fn(params, X)},
    'constant key': {'loss_fn': with_constant_key},
  }[mistake]
  with pytest.raises(ValueError, match=r'(?s)got the same on all.*random key'):
    train(workers, optimizer, steps=1, **options)


def lower(workers, optimizer, loss_fn=loss_fn):
  """Traces a step as its first call does, and compiles nothing."""
  tx = OPTIMIZERS[optimizer](workers)
  step = make_step(tx, workers, jax.value_and_grad(loss_fn))
  step.lower(PARAMS, tx.init(PARAMS), X)


@pytest.mark.parametrize('optimizer', ['demo', 'per_worker', 'local_updates'])
def test_a_single_worker_has_nothing_to_compare(optimizer):
  workers = demo_optax.Workers.simulated(1)
  lower(workers, optimizer, lambda params, x: loss_fn(params, X))


# Where JAX can run the step, it runs ------------------------------------------


def ragged(params, x):
  groups = jnp.array([len(x) // 2, len(x) - len(x) // 2], jnp.int32)
  experts = jnp.stack([params['w'], params['w']])
  return jnp.mean(jax.lax.ragged_dot(x, experts, groups) ** 2)


def call_back(params, x):
  loss = loss_fn(params, x)
  seen = jax.pure_callback(
    lambda x: np.asarray(x), loss, jax.lax.stop_gradient(loss)
  )
  return loss + 0 * seen


@functools.cache
def expected_of_both():
  return jax.device_get(train(MAPS['simulated']()))


@pytest.mark.parametrize(
  'workers, loss',
  [
    *((kind, ragged) for kind in MAPS if kind != 'explicit'),
    *((kind, call_back) for kind in ('simulated', 'sequential', 'explicit')),
  ],
  indirect=['workers'],
)
def test_operations_that_vmap_cannot_map(workers, loss):
  """On meshes of either kind a step is traced alike: one operation on each."""
  expected = expected_of_both()
  if workers.kind == 'simulated' and not workers.sequential:
    with pytest.raises(ValueError, match=r'simulated\(4, sequential=True\)'):
      train(workers, loss_fn=loss)
    return
  if workers.mesh is not None and len(workers.mesh.shape) > 1:
    with pytest.raises(ValueError, match='sequential_vmap'):
      train(workers, loss_fn=loss)
    mapped = jax.custom_batching.sequential_vmap(jax.value_and_grad(loss))
    found = train(workers, value_and_grad=mapped)
  else:
    found = train(workers, loss_fn=loss)
  np.testing.assert_allclose(found['loss'], expected['loss'], rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    jax.device_get(found['params']),
    expected['params'],
  )


@pytest.mark.parametrize(
  'workers, optimizer',
  [('simulated', 'demo'), *((kind, 'demo_diloco') for kind in MAPS)],
  indirect=['workers'],
)
def test_no_tracer_leaks(workers, optimizer):
  with jax.checking_leaks():
    lower(workers, optimizer)


@pytest.mark.parametrize(
  'optimizer', ['demo', 'owners', 'average', 'per_worker', 'demo_diloco']
)
def test_workers_in_turn_have_the_bits_of_mapped_ones(optimizer):
  """Of gradients without rounding; a product of matrices has another one."""

  def linear(params, x):
    return jnp.sum(x[0] * params['w'][:, 0])

  mapped, in_turn = (
    train(MAPS[kind](), optimizer, linear, steps=4)
    for kind in ('simulated', 'sequential')
  )
  if optimizer == 'owners':  # of demo_muon
    mapped, in_turn = (jax.device_get(x['params']) for x in (mapped, in_turn))
    np.testing.assert_allclose(mapped['w'], in_turn['w'], atol=1e-5)
  else:
    assert_same_bits(mapped, in_turn)


def test_exchanges_in_a_nested_jit_and_in_a_scan_in_turn():
  workers = MAPS['sequential']()
  tx = OPTIMIZERS['demo'](workers)
  update = jax.jit(tx.update)

  @demo_optax.data_parallel(workers, batch_argnames='x', batch_axis=1)
  def epoch(params, opt_state, x):
    def turn(carry, x):
      params, opt_state = carry
      grads = jax.grad(loss_fn)(params, x)
      updates, opt_state = update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), None

    return jax.lax.scan(turn, (params, opt_state), x)[0]

  params, _ = epoch(PARAMS, tx.init(PARAMS), np.stack([X] * 2))
  expected = expected_of_both()['params']
  np.testing.assert_allclose(params['w'], expected['w'], atol=1e-6)


@pytest.mark.parametrize(
  'workers', ['auto', 'explicit', 'several devices'], indirect=True
)
def test_a_sharding_that_names_the_worker_axis(workers):
  places = 'batch', 'hidden', 'grads'

  def run(names, places):
    spec = P(names, None)

    def hold(where, x):
      if where not in places:
        return x
      if workers.is_explicit:
        return jax.sharding.reshard(x, spec)
      sharding = NamedSharding(workers.mesh, spec)
      return jax.lax.with_sharding_constraint(x, sharding)

    def loss(params, x):
      hidden = hold('hidden', hold('batch', x) @ params['w'])
      return jnp.mean(hidden**2)

    def see(grads):
      return {**grads, 'w': hold('grads', grads['w'])}

    return train(workers, loss_fn=loss, see=see, steps=1)

  for where in places:
    # JAX says it where each worker is one device.
    with pytest.raises(ValueError, match=r"Leave .* out.*'data'|not manual"):
      run('data', [where])
  run(None, places)  # the remedy


# What only some workers would do -----------------------------------------------


def loop_of_own_length(tx, params, opt_state, x):
  def turn(_, carry):
    grads = jax.grad(loss_fn)(carry[0], x)
    updates, opt_state = tx.update(grads, carry[1], carry[0])
    return optax.apply_updates(carry[0], updates), opt_state

  number = jnp.sum(x[:, 0] > 0)
  return jax.lax.fori_loop(0, number, turn, (params, opt_state))


def branch_of_own(tx, params, opt_state, x):
  mean = lambda: demo_optax.over_workers(x.mean())
  return jax.lax.cond(x.sum() > 0, mean, lambda: jnp.zeros(()))


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
@pytest.mark.parametrize('step', [loop_of_own_length, branch_of_own])
def test_conditions_around_what_all_wait_for(workers, step):
  """On a mesh the others waited for ever."""
  tx = OPTIMIZERS['demo'](workers)
  run = demo_optax.data_parallel(workers, batch_argnames='x')(
    lambda params, opt_state, x: step(tx, params, opt_state, x)
  )
  with pytest.raises(ValueError, match='condition .* must be the same on all'):
    run(PARAMS, tx.init(PARAMS), X)


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
def test_values_that_pass_beside_others(workers):
  """They were taken for what is computed from the others."""

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(params, x):
    params, mean = jax.lax.optimization_barrier((params, x.mean()))
    params, x = jax.device_put((params, x))
    return params, mean

  params, _ = step(PARAMS, X)
  np.testing.assert_array_equal(params['w'], PARAMS['w'])


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
def test_values_that_cannot_be_followed(workers):
  """A sum in groups, and what was written to a mutable array."""

  def write(x):
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = x.mean()
    return ref[...]

  with pytest.raises(ValueError, match='mutable arrays, got jax.new_ref'):
    demo_optax.data_parallel(workers, batch_argnames='x')(write)(X)
  if workers.mesh is not None:
    in_groups = lambda x: jax.lax.psum(
      (x > 0).sum(), 'data', axis_index_groups=[[0, 1], [2, 3]]
    )
    with pytest.raises(ValueError, match='differs between workers'):
      demo_optax.data_parallel(workers, batch_argnames='x')(in_groups)(X)


def test_metrics_of_one_structure_are_not_taken_for_each_other():
  """Returned in another order, each had the total of the other."""
  graph, state = nnx.split(nnx.metrics.Average('v'))

  def step(first, second, x):
    metrics = [nnx.merge(graph, first), nnx.merge(graph, second)]
    for metric in metrics:
      metric.update(v=x)
    return {'b': nnx.state(metrics[0]), 'a': nnx.state(metrics[1])}

  with (
    jax.numpy_dtype_promotion('standard'),
    pytest.raises(ValueError, match='pass an nnx.metrics.Average'),
  ):
    decorated = demo_optax.data_parallel(
      MAPS['simulated'](), batch_argnames='x'
    )(step)
    decorated(state, state, X)


# An ensemble ------------------------------------------------------------------


@pytest.mark.parametrize(
  'workers, optimizer, models',
  [
    ('simulated', 'demo', 3),
    ('auto', 'average', 4),  # as many as workers
    *((kind, 'demo', 4) for kind in MAPS if kind != 'simulated'),
  ],
  indirect=['workers'],
)
def test_a_vmap_of_ones_own(workers, optimizer, models):
  """In the step it is refused; around the step it is right."""
  tx = OPTIMIZERS[optimizer](workers)
  params = [optax.tree.scale(1.0 + i, PARAMS) for i in range(models)]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
  states = [tx.init(p) for p in params]
  step = make_step(tx, workers, jax.value_and_grad(loss_fn))

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def ensemble(params, states, x):
    def one(params, state):
      grads = jax.grad(loss_fn)(params, x)
      return tx.update(grads, state, params)

    return jax.vmap(one)(params, states)

  stacked_states = jax.vmap(tx.init)(stacked)
  with pytest.raises(ValueError, match=r'jax.vmap\(step, in_axes'):
    ensemble(stacked, stacked_states, X)
  if workers.is_explicit:
    return  # jax.vmap over arrays of an Explicit mesh is another matter
  found, _, losses = jax.vmap(step, (0, 0, None))(stacked, stacked_states, X)
  assert losses.shape == (models,)
  for number, (p, state) in enumerate(zip(params, states)):
    alone, _, _ = step(p, state, X)
    tolerance = 0 if optimizer == 'demo' else 2e-5
    np.testing.assert_allclose(
      found['w'][number], alone['w'], atol=tolerance, rtol=tolerance
    )


# What a step returns -----------------------------------------------------------


@every_map
def test_a_loss_is_the_mean_of_workers_that_took_part(workers):
  """A worker without tokens divided by zero, and the loss was NaN for all."""
  x = X.copy()
  x[:2] = np.nan  # the rows of worker 0
  tx = OPTIMIZERS['demo'](workers)
  step = make_step(tx, workers, jax.value_and_grad(loss_fn))
  params, opt_state, loss = step(PARAMS, tx.init(PARAMS), x)
  expected = np.mean([loss_fn(PARAMS, x[i : i + 2]) for i in (2, 4, 6)])
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert int(demo_optax.exchange_info(opt_state)['num_excluded']) == 1
  assert np.isfinite(params['w']).all()
  _, _, loss = step(params, opt_state, np.full_like(X, np.nan))
  assert np.isnan(loss)


@every_map
def test_rows_are_joined_where_a_step_says_so(workers):
  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(params, x):
    rows = {'sum': x.sum(axis=1), 'equal': jnp.ones(len(x))}
    return demo_optax.out_batch(rows), jax.random.key(3)

  rows, key = step(PARAMS, X)
  assert key == jax.random.key(3)
  np.testing.assert_allclose(rows['sum'], X.sum(axis=1), rtol=1e-6)
  np.testing.assert_array_equal(rows['equal'], np.ones(8))


@pytest.mark.parametrize(
  'workers, rows, extra',
  [
    ('simulated', 4, 'array'),
    ('simulated', 4, 3),
    ('auto', 4, 'key'),
  ],
  indirect=['workers'],
)
def test_rows_as_many_as_workers(workers, rows, extra):
  """With a scalar among the arguments it was taken for a state."""
  tx = OPTIMIZERS['demo'](workers)
  extra = {'array': jnp.asarray(3), 'key': jax.random.key(0)}.get(extra, extra)

  @demo_optax.data_parallel(workers, batch_argnames='batch')
  def step(params, opt_state, batch, extra):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch['x'])
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  _, _, loss = step(PARAMS, tx.init(PARAMS), {'x': X[:rows]}, extra)
  np.testing.assert_allclose(loss, loss_fn(PARAMS, X[:rows]), rtol=1e-5)


def test_metrics_of_others_are_merged_over_workers():
  """Counts and totals in dataclasses, as those of clu and Kauldron are."""
  workers = MAPS['simulated']()

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def refused(total, x):
    return total + (x > 0).sum()

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def merged(total, x):
    return total + demo_optax.over_workers((x > 0).sum(), jnp.sum)

  zero = jnp.zeros((), jnp.int32)
  with pytest.raises(ValueError, match=r'over_workers\(own, jnp.sum\)'):
    refused(zero, X)
  assert int(merged(zero, X)) == int((X > 0).sum())


def test_the_program_of_a_mesh_is_traced_once():
  traced = []

  def loss(params, x):
    traced.append(1)
    return loss_fn(params, x)

  train(MAPS['auto'](), loss_fn=loss)
  assert len(traced) == 1


@pytest.mark.parametrize('workers', ['auto'], indirect=True)
def test_few_calls_lead_from_an_update_to_its_message(workers, monkeypatch):
  """A reader follows a gradient through at most eight functions."""
  package = str(pathlib.Path(demo_optax.__file__).parent)
  stacks = []

  def gather(*args, **options):
    stack = traceback.extract_stack()
    stacks.append([x.name for x in stack if x.filename.startswith(package)])
    return all_gather(*args, **options)

  all_gather = jax.lax.all_gather
  monkeypatch.setattr(jax.lax, 'all_gather', gather)
  # Of its own, which no other test has traced.
  compressor = demo_optax.dct_topk(chunk_size=4, topk=3)
  tx = demo_optax.demo(1e-2, workers=workers, compressor=compressor)
  step = make_step(tx, workers, jax.value_and_grad(loss_fn))
  step(PARAMS, tx.init(PARAMS), X)
  from_update = stacks[0][stacks[0].index('update_fn') :]
  assert from_update[-1] == 'gather' and len(from_update) <= 8
