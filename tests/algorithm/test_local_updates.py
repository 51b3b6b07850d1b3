"""Exchanges every few steps: oracles, equality and drift, who communicates."""

import re

import helpers
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, on_mesh
from oracle import Oracle

import demo_optax

pytestmark = pytest.mark.usefixtures('standard_promotion', 'rank_promotion')

SHAPES = {'padded': (31, 37), 'short': (7,)}  # every leaf compiles
LIMIT, TOPK = 16, 5
COMPRESSOR = demo_optax.dct_topk(LIMIT, TOPK, proportional=False)
RAW = demo_optax.Compressor(
  demo_optax.compressors.TopK(TOPK),
  demo_optax.compressors.Identity(),
  LIMIT,
  'int4',
)
RATES = {'learning_rate': 1e-2, 'b1': 0.9, 'b2': 0.95, 'weight_decay': 0.1}
DECAY = 0.9
TWO = demo_optax.Workers.simulated(2)


def make(method, workers, period=3):
  inner = optax.adamw(**RATES)
  kwargs = {'workers': workers, 'sync_period': period}
  if method == 'diloco':
    return demo_optax.local.diloco(
      inner, outer_learning_rate=0.7, outer_momentum=0.9, **kwargs
    )
  if method == 'sparse_loco':
    return demo_optax.local.sparse_loco(
      inner, compressor=RAW, outer_learning_rate=0.8, decay=DECAY, **kwargs
    )
  return demo_optax.local.demo_diloco(
    inner,
    compressor=COMPRESSOR,
    outer_learning_rate=0.7,
    decay=DECAY,
    drift=method == 'drift',
    **kwargs,
  )


METHODS = ['diloco', 'demo_diloco', 'drift', 'sparse_loco']


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


def noise(step, workers, dtype=np.float32):
  """A batch: one row for each worker and parameter, which is its gradient."""
  rng = np.random.default_rng(step)
  return [rng.normal(size=(workers, *s)).astype(dtype) for s in SHAPES.values()]


def start(dtype=np.float32):
  rng = np.random.default_rng(99)
  return {k: rng.normal(size=s).astype(dtype) for k, s in SHAPES.items()}


# Oracles ----------------------------------------------------------------------


class Worker:
  """One worker's AdamW in NumPy."""

  def __init__(self, x):
    self.x, self.m, self.v, self.t = x.copy(), 0 * x, 0 * x, 0

  def step(self, g):
    b1, b2 = RATES['b1'], RATES['b2']
    self.t += 1
    self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
    m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
    self.x = self.x - RATES['learning_rate'] * (
      m / (np.sqrt(v) + 1e-8) + RATES['weight_decay'] * self.x
    )


class Leaf:
  """N workers' copies of one parameter, after the formulas."""

  def __init__(self, x, workers, method):
    self.method, self.s, self.momentum = method, x, 0 * x
    self.workers = [Worker(x) for _ in range(workers)]
    self.own_s = [x] * workers
    values = {'values': 'int4', 'average': 'workers', 'basis': np.eye}
    self.exchange = Oracle(
      x.shape,
      workers,
      limit=LIMIT,
      topk=TOPK,
      decay=DECAY,
      **(values if method == 'sparse_loco' else {}),
    )

  @property
  def x(self):
    return np.stack([w.x for w in self.workers])

  def sync(self):
    if self.method == 'drift':
      G = [s - w.x for s, w in zip(self.own_s, self.workers)]
      Q = self.exchange.exchange(np.stack(G))
      self.exchange.m[:] += Q.reshape(self.exchange.matrix)
      for i, w in enumerate(self.workers):
        m = self.exchange.m[i].reshape(w.x.shape)
        w.x = self.own_s[i] - 0.7 * (G[i] + DECAY * m)
      self.own_s = [w.x for w in self.workers]
      return
    G = np.stack([self.s - w.x for w in self.workers])
    if self.method == 'diloco':
      self.momentum = 0.9 * self.momentum + G.mean(axis=0)
      self.s = self.s - 0.7 * (G.mean(axis=0) + 0.9 * self.momentum)
    else:
      rate = 0.8 if self.method == 'sparse_loco' else 0.7
      self.s = self.s - rate * self.exchange.exchange(G)
    for w in self.workers:
      w.x = self.s.copy()


def make_step(tx, workers, pull=0.0, **options):
  """A step of one worker, whose gradient is its row of the batch."""

  def loss_fn(params, rows):
    return sum(
      jnp.sum(x * row[0] + pull / 2 * x * x)
      for x, row in zip(params.values(), rows)
    )

  step = helpers.make_step(tx, workers, loss_fn, batch_argnums=2, **options)
  return lambda *args: step(*args)[:2]


def apart(params):
  """Largest difference between workers, over the parameters' size."""
  return max(
    float(np.abs(x - x[:1]).max() / np.abs(x).max()) for x in params.values()
  )


@pytest.mark.parametrize('method', METHODS)
def test_oracle(method, x64):
  """Equal after each exchange, to the bit; as published workers drift."""
  n, period, steps = 3, 3, 13
  workers = demo_optax.Workers.simulated(n)
  tx = make(method, workers, period)
  params = start(np.float64)
  leaves = {k: Leaf(x, n, method) for k, x in params.items()}
  state, train_step = tx.init(params), make_step(tx, workers, pull=0.3)
  between, after = [], []
  for step in range(steps):
    e = noise(step, n, np.float64)
    params, state = train_step(params, state, e)
    own, is_end = state.worker_stacked.params, step % period == period - 1
    for (k, leaf), e_leaf in zip(leaves.items(), e):
      for i, w in enumerate(leaf.workers):
        w.step(0.3 * w.x + e_leaf[i])
      if is_end:
        leaf.sync()
      shared = np.mean(leaf.own_s, axis=0) if method == 'drift' else leaf.s
      for got, expected in ((own[k], leaf.x), (params[k], shared)):
        np.testing.assert_allclose(
          got, expected, atol=1e-10, rtol=0, err_msg=f'{k} {step}'
        )
    assert_same_bits(params, state.global_params)
    (after if is_end else between).append(apart(own))
    if is_end and method != 'drift':
      for k, x in params.items():
        np.testing.assert_array_equal(own[k], np.stack([x] * n))
  assert min(between) > 1e-3
  assert int(state.count) == steps and int(state.steps_since_sync) == 1
  assert int(state.outer[0].count) == steps // period
  if method == 'drift':
    assert after == sorted(after)  # further and further
    assert 0.01 < after[-1] < 0.2


# Runs -------------------------------------------------------------------------


def test_any_chain_with_an_exchange_is_an_outer_optimizer():
  """Some leaves exchanged sparsely, some averaged; pseudo-gradients clipped."""
  workers = demo_optax.Workers.simulated(3)
  exchange = demo_optax.scale_by_demo(
    {'padded': COMPRESSOR, 'short': None}, workers=workers
  )
  outer = optax.chain(optax.clip_by_global_norm(1e6), exchange, optax.sgd(1.0))
  tx = demo_optax.local.local_updates(optax.sgd(0.1), outer, 2, workers=workers)
  params = start()
  state, train_step = tx.init(params), make_step(tx, workers)
  moved = params['short']
  for step in range(4):
    params, state = train_step(params, state, noise(step, 3))
    moved = moved - 0.1 * noise(step, 3)[1].mean(axis=0)
  assert apart(state.worker_stacked.params) == 0
  np.testing.assert_allclose(params['short'], moved, atol=1e-5)


# Who communicates -------------------------------------------------------------


@pytest.mark.parametrize(
  'method, kind',
  [
    ('diloco', 'auto'),
    ('demo_diloco', 'auto'),
    ('demo_diloco', 'explicit'),
    slow('drift', 'auto'),
  ],
)
def test_only_exchange_steps_communicate(method, kind):
  """From the compiled step, gradients and all: one collective, in a branch."""
  workers = on_mesh(4, kind)
  tx = make(method, workers)
  params = {'w': np.ones((32, 32), np.float32), 'b': np.ones((5,), np.float32)}
  plan = demo_optax.plan(params, COMPRESSOR, workers)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def train_step(params, state, x):  # whose loss, a mean, would be sent
    loss_fn = lambda params: jnp.mean(
      (x @ params['w'] + params['b'].sum()) ** 2
    )
    updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
    return optax.apply_updates(params, updates), state

  compiled = train_step.lower(
    params, tx.init(params), np.ones((8, 32), np.float32)
  ).compile()
  text = compiled.as_text()
  found = hlo_text.collectives(compiled, workers.mesh)
  assert {c.axes for c in found} == {('data',)}
  if method == 'drift':  # the mean for evaluation: beside what is published
    message = 4 * plan.sent_bytes
    means = [c.output_bytes for c in found if c.output_bytes != message]
    assert sum(means) == 4 * 4 * plan.size  # small arrays are gathered
    found = [c for c in found if c.output_bytes == message]
  (exchange,) = found
  if method == 'diloco':
    assert exchange.kind == 'all-reduce'
  else:
    assert exchange.kind == 'all-gather'
    assert exchange.output_bytes == 4 * plan.sent_bytes
    assert plan.received_bytes == exchange.received_bytes
  taken = [
    re.match(r'\s*(?:ENTRY )?%?([\w.\-]+)', body)[1]
    for body in text.split('\n\n')  # computations
    if re.search(' all-(gather|reduce)(-start)?[(]', body)
  ]
  (conditional,) = re.findall(r' conditional\(.*', text)
  assert len(taken) == 1 and taken[0] in re.findall(r'[\w.\-]+', conditional)


# States -----------------------------------------------------------------------


def test_period_by_a_schedule():
  """Every one of four steps, then every third."""
  period = optax.piecewise_constant_schedule(1, {4: 3})
  tx = make('demo_diloco', TWO, period)
  params, ends = start(), []
  state, train_step = tx.init(params), make_step(tx, TWO)
  for step in range(12):
    params, state = train_step(params, state, noise(step, 2))
    if int(state.steps_since_sync) == 0:
      ends.append(step)
      assert apart(state.worker_stacked.params) == 0
  assert ends == [0, 1, 2, 3, 6, 9]
  assert int(state.outer[0].count) == len(ends)


def test_gradients_that_are_not_finite():
  """The worker leaves out that step; a worker gone infinite comes back."""
  workers = demo_optax.Workers.simulated(3)
  tx = make('demo_diloco', workers)
  params = start()
  state, train_step = tx.init(params), make_step(tx, workers)
  rows = noise(0, 3)
  rows[1][1, 2] = np.nan
  params, state = train_step(params, state, rows)
  own = state.worker_stacked
  assert own.skipped.tolist() == [0, 1, 0]
  np.testing.assert_array_equal(own.params['padded'][1], start()['padded'])
  assert np.abs(own.params['padded'][0] - start()['padded']).max() > 1e-3
  assert int(own.inner[0].count[1]) == 0
  own.params['padded'] = own.params['padded'].at[2, 0, 0].set(np.inf)
  for step in (1, 2):
    params, state = train_step(params, state, noise(step, 3))
  assert int(state.outer[0].metrics['num_excluded']) == 1
  own = state.worker_stacked.params
  assert all(np.isfinite(x).all() for x in own.values())
  assert apart(own) == 0


# With Flax --------------------------------------------------------------------


class Net(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(6, 3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(nnx.relu(self.linear(x)))


@pytest.mark.parametrize('workers', ['simulated', 'explicit'], indirect=True)
def test_nnx_optimizer(workers):
  """Inside, each worker's own model; outside, the one that all share."""
  tx = make('demo_diloco', workers, 2)
  model = Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers, batch_argnums=2, donate_argnums=(0, 1))
  def train_step(model, optimizer, x):
    loss_fn = lambda model: jnp.mean((model(x) - 1) ** 2)
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    kernel = jnp.sum(model.linear.kernel[...])
    optimizer.update(model, grads)
    return loss, demo_optax.out_batch(jnp.broadcast_to(kernel, x.shape[:1]))

  x = np.tile(np.random.default_rng(0).normal(size=(2, 6)), (4, 1))
  x = x.astype(np.float32)  # the same for all: dropout masks differ
  for step in range(4):
    before, shared = np.asarray(model.linear.kernel[...]), step % 2 == 1
    loss, kernels = train_step(model, optimizer, x)
    assert loss.shape == () and np.isfinite(loss)
    assert (len(set(kernels.tolist())) > 1) == shared
    state = optimizer.opt_state
    own = np.asarray(state.worker_stacked.params['linear']['kernel'][...])
    assert (np.abs(own - own[:1]).max() == 0) == shared
    kernel = np.asarray(model.linear.kernel[...])
    np.testing.assert_array_equal(
      kernel, state.global_params['linear']['kernel'][...]
    )
    np.testing.assert_array_equal(kernel, own[0] if shared else before)
  model.eval()
  assert model(jnp.ones((8, 6))).shape == (8, 3)


@pytest.mark.parametrize(
  'dtype, of_gradients',
  [('bfloat16', 'float32'), ('float16', 'float16'), ('float32', 'bfloat16')],
)
@pytest.mark.parametrize(
  'method', [slow('diloco'), 'demo_diloco', slow('drift'), slow('sparse_loco')]
)
def test_dtypes(method, dtype, of_gradients):
  """Updates in the parameters' dtype; what is shared, in that of momentum."""
  tx = make(method, TWO, 2)
  params = {'w': jnp.linspace(-1, 1, 64, dtype=dtype).reshape(8, 8)}
  state = tx.init(params)
  like = jax.tree.map(lambda x: x.dtype, state)

  @demo_optax.data_parallel(TWO, batch_argnums=2)
  def train_step(params, state, x):
    updates, state = tx.update({'w': x[0]}, state, params)
    assert updates['w'].dtype == dtype
    return optax.apply_updates(params, updates), state

  for step in range(4):
    gradients = jnp.ones((2, 8, 8), of_gradients) * (step + 1)
    params, state = train_step(params, state, gradients)
  assert [x.dtype for x in jax.tree.leaves(state)] == jax.tree.leaves(like)
  assert params['w'].dtype == dtype
  assert state.global_params['w'].dtype == 'float32'
  np.testing.assert_array_equal(
    params['w'], state.global_params['w'].astype(dtype)
  )
  own = state.worker_stacked.params['w']
  assert own.dtype == dtype
  if method != 'drift':
    np.testing.assert_array_equal(own, np.stack([params['w']] * 2))


def test_a_step_that_would_not_be_finite_is_left_out():
  """Adam squares a gradient that is finite itself."""
  tx = demo_optax.local.diloco(optax.adam(1e-2), workers=TWO, sync_period=4)
  params = {'padded': jnp.ones(4)}
  state, train_step = tx.init(params), make_step(tx, TWO)
  for step in range(4):
    rows = jnp.ones((2, 4)).at[0].mul(1e25 if step == 1 else 1.0)
    params, state = train_step(params, state, [rows])
  assert state.worker_stacked.skipped.tolist() == [1, 0]
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((params, state)))
  last = params
  donating = make_step(tx, TWO, donate_argnums=1)
  donating(params, state, [rows])
  assert jnp.isfinite(last['padded']).all()  # still there


# Mistakes ---------------------------------------------------------------------


def make_period(period):
  sgd = optax.sgd(1.0)
  return demo_optax.local.local_updates(sgd, sgd, period, workers=TWO)


def step_of(gradients, given=True):
  tx, params = make_period(1), {'w': np.ones(3, np.float32)}
  update = lambda params, state, x: tx.update(
    gradients(x), state, params if given else None
  )
  demo_optax.data_parallel(TWO, batch_argnums=2)(update)(
    params, tx.init(params), np.ones((2, 3), np.float32)
  )


@pytest.mark.parametrize(
  'call, error, match',
  [
    (
      lambda: make_period(0),
      ValueError,
      'sync_period must be at least 1, got 0',
    ),
    (
      lambda: make_period(2.5),
      TypeError,
      r'sync_period must be an integer, got 2\.5',
    ),
    (
      lambda: demo_optax.local.diloco(
        workers=demo_optax.Workers.on_axis('data')
      ),
      TypeError,
      r'Workers\.simulated.*on_axis',
    ),
    (
      lambda: step_of(lambda x: {'w': x[0]}, False),
      ValueError,
      'params must be given',
    ),
    (
      lambda: step_of(lambda x: {'w': x}),
      ValueError,
      r'w must have .* \(1, 3\)',
    ),
    (
      lambda: step_of(lambda x: {'v': x[0]}),
      ValueError,
      'key mismatch at v, w',
    ),
  ],
)
def test_mistakes(call, error, match):
  with pytest.raises(error, match=match):
    call()


def test_drift_of_a_leaf_without_momentum():
  """It moves by the update that all share."""
  workers = demo_optax.Workers.simulated(2)
  signs = demo_optax.compressors.cyclic_signs(2)
  codes = {'kept': demo_optax.dct_topk(8, 3), 'signs': signs}
  tx = demo_optax.local.demo_diloco(
    optax.sgd(0.125),
    workers=workers,
    sync_period=1,
    compressor=codes,
    drift=True,
  )

  @demo_optax.data_parallel(workers, batch_argnames='rows')
  def step(params, state, rows):
    gradients = jax.tree.map(lambda x: x * jnp.mean(rows), params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  params = {name: jnp.ones((18, 20)) for name in codes}
  state = tx.init(params)
  for _ in range(3):
    params, state = step(params, state, jnp.array([1.0, 2.0]))
  assert all(np.isfinite(x).all() and (x < 1).any() for x in params.values())
