"""One worker's step, run for all workers: data_parallel."""

import functools
import gc
import weakref

import flax
import helpers
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import COMPILATIONS, make_workers

import demo_optax

KINDS = ['simulated', 'auto', 'explicit']

# For what is found while a step is traced, which is the same everywhere.
WORKERS = demo_optax.Workers.simulated(4)


def quadratic(params, x):
  return jnp.mean((x @ params['w'] + params['b'][None]) ** 2)


def linear_params():
  key = jax.random.key(0)
  return {'w': jax.random.normal(key, (16, 8)), 'b': jnp.ones((8,))}


def batch(rows=8, columns=16, seed=1):
  return (
    np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
  )


def make_step(tx, workers, loss_fn=quadratic, **options):
  return helpers.make_step(tx, workers, loss_fn, **options)


# What crosses, and what is computed --------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize('workers', KINDS[1:], indirect=True)
def test_one_all_gather_and_one_scalar_cross(workers):
  tx = optax.chain(
    demo_optax.per_worker(optax.clip_by_global_norm(1.0), workers=workers),
    demo_optax.demo(1e-2, workers=workers, weight_decay=0.1),
  )
  step = make_step(tx, workers)
  params = linear_params()
  compiled = step.lower(params, tx.init(params), batch()).compile()
  found = hlo_text.collectives(compiled, workers.mesh)
  plan = demo_optax.plan(params, demo_optax.dct_topk(), workers)
  message, *rest = sorted(found, key=lambda c: -c.output_bytes)
  assert message.kind == 'all-gather' and message.group_size == 4
  assert message.output_bytes == 4 * plan.sent_bytes
  assert message.received_bytes == plan.received_bytes
  assert {c.kind for c in rest} <= {'all-reduce', 'all-gather'}
  assert sum(c.output_bytes for c in rest) <= 32  # losses, and which count


def test_every_device_computes_its_own_rows():
  flops, params = {}, {'w': jnp.ones((256, 256))}
  loss = lambda params, x: jnp.mean((x @ params['w'] @ params['w']) ** 2)
  for kind in KINDS:
    with make_workers(kind, 4) as workers:
      tx = demo_optax.average_gradients(workers=workers)
      args = params, tx.init(params), batch(1024, 256)
      compiled = make_step(tx, workers, loss).lower(*args).compile()
      flops[kind] = compiled.cost_analysis()['flops']
  assert flops['auto'] < 0.3 * flops['simulated']
  assert flops['explicit'] < 0.3 * flops['simulated']


# Flax NNX ------------------------------------------------------------------------


class Model(nnx.Module):
  def __init__(self, rngs, rate=0.5):
    # Of few shapes, since each kind of chunk compiles.
    self.up = nnx.Linear(16, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.down = nnx.Linear(16, 16, rngs=rngs)

  def __call__(self, x):
    return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


@pytest.mark.core
@pytest.mark.parametrize('workers', KINDS[1:], indirect=True)
def test_an_nnx_model_learns_and_nothing_compiles_twice(workers):
  model = Model(nnx.Rngs(0), rate=0.0)
  tx = demo_optax.demo(1e-2, workers=workers, decay=0.9)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  metrics = nnx.MultiMetric(loss=nnx.metrics.Average('loss'))
  rngs, statistics = nnx.Rngs(1), np.asarray(model.norm.mean[...])

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(model, optimizer, metrics, rngs, x):
    x = x + 0.01 * rngs.noise.normal(x.shape)
    loss_fn = lambda model: jnp.mean((model(x) - 1) ** 2)  # closes over x
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss

  losses = [step(model, optimizer, metrics, rngs, batch())]
  COMPILATIONS.count = 0
  losses += [step(model, optimizer, metrics, rngs, batch()) for _ in range(29)]
  assert COMPILATIONS.count == 0
  assert losses[-1] < 0.5 * losses[0]
  assert int(optimizer.step[...]) == 30
  assert not np.array_equal(statistics, model.norm.mean[...])
  model(jnp.ones((2, 16)))  # the model outside is the one that was trained


def test_dropout_differs_between_workers_and_steps(workers):
  dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  key = jax.random.key_data(dropout.rngs.key[...])

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(dropout, x):
    return demo_optax.out_batch(dropout(x))

  first = np.asarray(step(dropout, np.ones((4, 64), np.float32)))
  second = np.asarray(step(dropout, np.ones((4, 64), np.float32)))
  assert len({row.tobytes() for row in (*first, *second)}) == 8
  np.testing.assert_array_equal(jax.random.key_data(dropout.rngs.key[...]), key)
  assert int(dropout.rngs.count[...]) == 2  # the stream goes on from one key


def test_batch_statistics_are_the_mean(workers):
  norm = nnx.BatchNorm(
    3, momentum=0.0, use_fast_variance=False, rngs=nnx.Rngs(0)
  )

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(norm, x):
    return demo_optax.out_batch(norm(x))

  x = batch(8, 3)
  step(norm, x)
  np.testing.assert_allclose(norm.mean[...], x.mean(0), rtol=1e-5, atol=1e-6)
  x[0, 0] = np.nan  # of worker 0, whose statistics are left out
  step(norm, x)
  np.testing.assert_allclose(norm.mean[0], x[2:, 0].mean(), rtol=1e-5)


def update_metrics(metrics, x, y):
  metrics.update(values=x, logits=x, labels=y)


def in_a_scan(metrics, x, y):
  """Added to in every turn, in all of them together."""

  @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
  def turn(metrics, x, y):
    update_metrics(metrics, x, y)
    return metrics

  turn(metrics, x.reshape(2, -1, x.shape[1]), y.reshape(2, -1))


@pytest.mark.parametrize(
  'update, workers',
  [
    *((update_metrics, kind) for kind in KINDS),
    (in_a_scan, 'simulated'),
  ],
  indirect=['workers'],
)
def test_metrics_are_those_of_the_whole_batch(workers, update):
  metrics, whole = (
    nnx.MultiMetric(
      values=nnx.metrics.Average('values'), accuracy=nnx.metrics.Accuracy()
    )
    for _ in range(2)
  )
  step = demo_optax.data_parallel(workers, batch_argnames=('x', 'y'))(update)
  with jax.numpy_dtype_promotion('standard'):  # Flax adds integers to floats
    for seed in range(3):
      x = batch(8, 5, seed)
      y = np.arange(8, dtype=np.int32) % 5
      step(metrics, x, y)
      update(whole, x, y)
    got, expected = metrics.compute(), whole.compute()
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected
  )
  assert int(metrics.values.count[...]) == int(whole.values.count[...])


def test_metrics_that_a_step_leaves_alone(workers):
  """Not even rounded; and read, they are what they are."""
  metrics = nnx.metrics.Average('values')
  with jax.numpy_dtype_promotion('standard'):
    metrics.update(values=jnp.asarray(batch(7, 1)))
    total = np.asarray(metrics.total[...])

    @demo_optax.data_parallel(workers, batch_argnames='x')
    def step(metrics, x):
      return metrics.compute() + 0 * x.mean()

    mean = step(metrics, batch())
  np.testing.assert_array_equal(metrics.total[...], total)
  np.testing.assert_allclose(mean, total / 7, rtol=1e-6)
  reset = demo_optax.data_parallel(workers, batch_argnames='x')(
    lambda metrics, x: metrics.reset()
  )
  reset(metrics, batch())  # and nothing else is no mistake
  assert metrics.count[...] == 0 and metrics.total[...] == 0


class Holder(nnx.Module):
  def __init__(self):
    self.linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    self.replaced = nnx.Dropout(0.0)
    self.largest = nnx.Variable(jnp.zeros(()))
    self.mean = nnx.metrics.Average('values')
    self.welford = nnx.metrics.Welford('values')
    self.loss, self.mode, self.old, self.calls = None, 'warm', 1, 0


@pytest.mark.parametrize(
  'step, match',
  [
    (
      lambda m, x: m.mean.reset() or m.mean.update(values=x),
      'metric .* must not be reset in the step, got m.mean',
    ),
    (
      lambda m, x: m.welford.update(values=x),
      r'(?s)m\.welford.*differs between.*nnx.metrics.Average',
    ),
    (lambda m, x: m.largest.set_value(x.max()), r'm\.largest.*differs between'),
    (
      lambda m, x: setattr(m, 'extra', nnx.Variable(jnp.zeros(()))),
      r'must not add or remove.*0\.extra',
    ),
    # `nnx.jit` leaves a tracer there.
    (
      lambda m, x: setattr(m, 'loss', m.linear(x).mean()),
      r'0\.loss\. Return .* nnx.Variable',
    ),
    (lambda m, x: nnx.Rngs(0), 'that are among its arguments'),
  ],
)
def test_what_a_step_must_not_do_to_an_object(step, match):
  model = Holder()
  with jax.numpy_dtype_promotion('standard'):  # Flax adds integers to floats
    model.mean.update(values=jnp.ones(3))
    model.welford.update(values=jnp.ones(3))
    with pytest.raises(ValueError, match=match):
      decorate(step)(model, batch())


def test_a_variable_that_workers_agree_on():
  model = Holder()

  @demo_optax.data_parallel(WORKERS, batch_argnames='x')
  def agreed(model, x):
    model.largest[...] = demo_optax.over_workers(x.max(), jnp.max)

  agreed(model, batch())
  assert float(model.largest[...]) == batch().max()


def test_static_attributes_go_out_as_from_nnx_jit():
  def update(model, x):
    model.eval()
    model.mode, model.new, model.replaced = 'hot', (1, 2), nnx.Sequential()
    model.calls += 1
    if hasattr(model, 'old'):
      del model.old
    model.linear.kernel[...] += 1
    return model.dropout(model.linear(x)).mean()

  steps = decorate(update), nnx.jit(update)
  models = Holder(), Holder()
  for calls in (1, 2):
    for step, model in zip(steps, models):
      step(model, batch())
      assert model.dropout.deterministic and model.mode == 'hot'
      assert model.new == (1, 2) and not hasattr(model, 'old')
      assert model.calls == calls and isinstance(model.replaced, nnx.Sequential)
  assert nnx.graphdef(models[0]) == nnx.graphdef(models[1])


def make_linear():
  """A layer, its optimizer, and a step."""
  model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(
    model, demo_optax.demo(1e-2, workers=WORKERS), wrt=nnx.Param
  )

  @demo_optax.data_parallel(WORKERS, batch_argnames='x')
  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  return model, optimizer, step


def test_a_cached_partial_is_a_partial():
  model, optimizer, step = make_linear()
  train_step = nnx.cached_partial(step, model, optimizer)
  losses = [float(train_step(batch())) for _ in range(4)]
  assert losses[-1] < losses[0] and int(optimizer.step[...]) == 4
  expected = jnp.mean(model(batch()) ** 2)
  np.testing.assert_allclose(
    step(model, optimizer, batch()), expected, rtol=1e-5
  )


def test_shared_variables_and_objects_that_are_returned():
  model = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
  tied = nnx.List([model, model])

  @demo_optax.data_parallel(WORKERS, batch_argnames='x')
  def step(tied, again, x):
    tied[0].kernel[...] += 1
    return again, demo_optax.out_batch(x @ tied[1].kernel[...])

  before = np.asarray(model.kernel[...])
  returned, _ = step(tied, model, batch())
  assert returned is model
  np.testing.assert_array_equal(model.kernel[...], before + 1)


# Other kinds of state -------------------------------------------------------------


def test_a_step_is_lowered_from_shapes(workers):
  """What is compiled ahead is what the call with arrays runs."""
  tx = demo_optax.demo(0.01, workers=workers)
  step = make_step(tx, workers)
  params = linear_params()
  args = params, tx.init(params), batch()
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args
  )
  ahead = step.lower(*shapes)
  assert ahead.as_text() == step.lower(*args).as_text()


def test_counts_of_streams_are_no_keys():
  """Two uint32 in a state: of two layers, not a legacy key."""
  workers = demo_optax.Workers.simulated(2)
  counts = nnx.State(
    {'layers': {'count': nnx.RngCount(jnp.array([3, 4], jnp.uint32))}}
  )

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def step(state, x):
    seen = state['layers']['count'][...]
    after = jax.tree.map(lambda n: n + jnp.ones((), n.dtype), state)
    return after, demo_optax.out_batch(x + seen[None].astype(x.dtype))

  after, seen = step(counts, np.zeros((4, 2), np.float32))
  np.testing.assert_array_equal(seen, [[3, 4]] * 4)
  np.testing.assert_array_equal(after['layers']['count'][...], [4, 5])


def test_static_and_keyword_arguments_and_constants():
  tx = demo_optax.demo(1e-2, workers=WORKERS)

  @demo_optax.data_parallel(
    WORKERS, batch_argnames='x', static_argnames=('power', 'name')
  )
  def step(params, opt_state, *, x, power, name=None, loss_of=None):
    assert isinstance(power, int) and name == 'run'
    loss_fn = lambda params: jnp.mean(loss_of(x @ params['w']) ** power)
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {'loss': loss}

  params = linear_params()
  _, _, aux = step(
    params, tx.init(params), x=batch(), power=2, name='run', loss_of=jnp.abs
  )
  assert aux['loss'].shape == ()


def test_arguments_that_a_step_takes_in_any_number():
  """They have a position, or the name that the caller gives."""
  x = batch()

  @demo_optax.data_parallel(
    WORKERS, batch_argnums=(1, 3), batch_argnames='third', static_argnames='n'
  )
  def step(scale, *rest, **named):
    first, shift, second = rest
    assert [a.shape for a in (first, second, named['third'])] == [(2, 16)] * 3
    assert named['n'] == 2 and named['shared'].shape == (8, 16)
    return demo_optax.out_batch(
      scale * (first + second + named['third']) + shift
    )

  found = step(jnp.ones(()), x, jnp.ones(()), x, third=x, n=2, shared=x)
  np.testing.assert_allclose(found, 3 * x + 1, rtol=1e-6)

  @demo_optax.data_parallel(WORKERS, batch_argnums=1)
  def wrapped(*arguments):
    return arguments[0], demo_optax.out_batch(arguments[1])

  assert wrapped(jnp.ones(()), x)[1].shape == x.shape
  with pytest.raises(ValueError, match='got -1'):
    demo_optax.data_parallel(WORKERS, batch_argnums=-1)(step)
  with pytest.raises(ValueError, match="got 'arguments'"):
    demo_optax.data_parallel(WORKERS, batch_argnames='arguments')(
      lambda *arguments: None
    )


def test_donated_arguments_are_overwritten(workers):
  tx = demo_optax.demo(1e-2, workers=workers)
  params = linear_params()
  step = make_step(tx, workers, donate_argnums=(0, 1))
  params, opt_state, _ = step(params, tx.init(params), batch())
  old = jax.tree.leaves(params)
  params, opt_state, _ = step(params, opt_state, batch())
  assert all(x.is_deleted() for x in old)


def test_a_value_in_the_loss_that_is_not_differentiated():
  """A number from all workers' batches may scale one worker's loss."""
  tx = demo_optax.demo(1e-2, workers=WORKERS)
  params = linear_params()

  def scaled(params, x):
    size = demo_optax.over_workers(jnp.abs(x).sum(), jnp.sum)
    loss = quadratic(params, x)
    mean = demo_optax.over_workers(jax.lax.stop_gradient(loss))
    return loss / size + 0 * mean

  step = make_step(tx, WORKERS, scaled)
  _, _, loss = step(params, tx.init(params), batch())
  expected = quadratic(params, batch()) / np.abs(batch()).sum()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


# Mistakes ------------------------------------------------------------------------


def run_step(x=None, of=WORKERS, loss_fn=quadratic, **options):
  """A step of `WORKERS`, with an optimizer `of` some."""
  tx, params = demo_optax.demo(1e-2, workers=of), linear_params()
  step = make_step(tx, WORKERS, loss_fn, **options)
  step(params, tx.init(params), batch() if x is None else x)


def decorate(function=lambda params, x: params, of=WORKERS, **options):
  if 'batch_argnums' not in options:
    options = {'batch_argnames': 'x', **options}
  return demo_optax.data_parallel(of, **options)(function)


def run_conditional_step():
  tx, params = demo_optax.demo(1e-2, workers=WORKERS), linear_params()

  def step(params, state, x):
    grads = jax.grad(quadratic)(params, x)
    return jax.lax.cond(
      x.mean() > 0,
      lambda: tx.update(grads, state, params),
      lambda: (jax.tree.map(jnp.zeros_like, grads), state),
    )

  decorate(step)(params, tx.init(params), batch())


def on_an_axis(axis):
  step = decorate(
    lambda batch: batch[0].mean(), batch_argnums=0, batch_axis=axis
  )
  step((np.ones((4, 16), np.float32), np.ones(16, np.float32)))


MISTAKES = {
  r'batch_argnames or .* got neither for <lambda>\(params, x\)': [
    lambda: demo_optax.data_parallel(WORKERS)(lambda params, x: params)
  ],
  r'batch of .* must hold arrays .* got none in x. Pass .* np.asarray\(x\)': [
    lambda: run_step((), batch_argnums=2),
    lambda: decorate()(linear_params(), [[1.0, 2.0], [3.0, 4.0]]),
    lambda: decorate()(linear_params(), 'a text'),
    lambda: decorate()(linear_params(), 3),
    lambda: decorate(lambda y, x: y.mean(), batch_argnums=(0, 1))(batch(), 3),
  ],
  'must have rows that divide among': [
    lambda: run_step(batch(6)),
    lambda: run_step(batch(0)),
  ],
  'same number of rows, got .*params.w: 16': [
    lambda: run_step(batch_argnums=(0, 2))
  ],
  r'legacy random key, got uint32\[2\].*wrap_key_data\(key\)': [
    lambda: decorate(lambda key, x: x.mean())(
      jax.random.key_data(jax.random.key(0)), batch()
    )
  ],
  r'(?s)differs.*out_batch\(x\).*over_workers\(x, jnp.sum\)': [
    lambda: decorate(lambda params, x: x)(linear_params(), batch()),
    lambda: decorate(lambda params, x: (x > 0).sum())(linear_params(), batch()),
    lambda: decorate(lambda params, x: x.mean(0))(linear_params(), batch()),
  ],
  'out_batch must be given arrays with the 2 rows': [
    lambda: decorate(lambda params, x: demo_optax.out_batch(x.mean(0)))(
      linear_params(), batch()
    )
  ],
  'out_batch must be called in a': [lambda: demo_optax.out_batch(jnp.ones(3))],
  'condition of jax.lax.cond .* must be the same': [
    lambda: run_conditional_step()
  ],
  'outside of the function that is differentiated, got a call inside': [
    lambda: run_step(
      loss_fn=lambda params, x: demo_optax.over_workers(quadratic(params, x))
    )
  ],
  'entry for each of the 4 workers .* under the same workers': [
    lambda: run_step(of=demo_optax.Workers.simulated(2))
  ],
  'your own shard_map': [
    lambda: decorate(of=demo_optax.Workers.on_axis('data'))
  ],
  'workers=4|workers must be': [lambda: decorate(of=4)],
  r'for <lambda>\(params, x\)': [
    lambda: decorate(donate_argnames='opt'),
    lambda: decorate(static_argnames=('trian',)),
    lambda: decorate(batch_argnums=2),
    lambda: decorate(donate_argnums=(0, -3)),
  ],
  'counted from the first argument': [
    lambda: decorate(lambda params, *batch: params, batch_argnums=-1),
    lambda: decorate(lambda params, x=1: params, batch_argnums=-1),
  ],
  'axis of every batch, got 1 for batch.1.': [lambda: on_an_axis(1)],
  "got 'y' for": [lambda: on_an_axis({'y': 1})],
  r'<lambda>\(\) (missing|takes 2|got)': [  # as Python says it
    lambda: decorate()(linear_params()),
    lambda: decorate()(linear_params(), batch(), 3),
    lambda: decorate()(linear_params(), batch(), y=3),
    lambda: decorate()(linear_params(), batch(), params=3),
  ],
  'must be hashable, .* got an unhashable type': [
    lambda: decorate(lambda x, names: x, static_argnums=1, batch_argnums=0)(
      jnp.ones(8), ['a list']
    )
  ],
}


@pytest.mark.parametrize('match', MISTAKES)
def test_mistakes(match):
  """Those that the table of `common_errors.py` does not have."""
  for call in MISTAKES[match]:
    with pytest.raises((ValueError, TypeError), match=match):
      call()


@pytest.mark.parametrize('workers', ['simulated', 'auto'], indirect=True)
@pytest.mark.parametrize('axis', ['data', 'batch'])
def test_collectives_of_ones_own(workers, axis):
  """Gradients that a step averages are refused, whether the axis is bound."""
  tx = demo_optax.demo(1e-2, workers=workers)
  params = linear_params()

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def pmean(params, opt_state, x):
    grads = jax.lax.pmean(jax.grad(quadratic)(params, x), axis)
    return tx.update(grads, opt_state, params)

  is_bound = workers.mesh is not None and axis == 'data'
  match = 'got the same on all workers' if is_bound else 'no axis has a name'
  with pytest.raises(ValueError, match=match):
    pmean(params, tx.init(params), batch())


def test_an_array_of_keys_in_a_state_differs_between_workers():
  """And is the next step's own, whether the step splits it or not."""

  @flax.struct.dataclass
  class State:
    keys: jax.Array

  @demo_optax.data_parallel(WORKERS, batch_argnames='x')
  def step(state, x):
    noise = jax.random.normal(state.keys[0], x.shape[:1])
    return state, demo_optax.out_batch(noise)

  state = State(jax.random.split(jax.random.key(0), 3))
  new, noise = step(state, batch())
  assert len(set(np.asarray(noise).tolist())) == 8
  np.testing.assert_array_equal(
    jax.random.key_data(new.keys), jax.random.key_data(state.keys)
  )


@pytest.mark.parametrize('carry', [False, True])
@pytest.mark.parametrize(
  'pack',
  [
    lambda params, state: (params, state),
    lambda params, state: {'params': params, 'opt_state': state},
    lambda params, state: (jnp.ones(()), {'train': [params, state]}),
  ],
)
def test_states_must_be_equal_in_whatever_they_are_returned(pack, carry):
  tx = optax.masked(
    demo_optax.demo(0.1, workers=WORKERS), {'w': True, 's': False}
  )
  params = {'w': jnp.ones((16, 1)), 's': jnp.ones((1, 1))}
  loss_fn = lambda params, x: jnp.mean((x @ params['w'] * params['s']) ** 2)

  def step(params, state, x):
    updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
    return pack(optax.apply_updates(params, updates), state)

  def of_a_carry(carry, x):
    return step(*carry, x)

  state = params, tx.init(params)
  with pytest.raises(ValueError, match=r'\.s\b.* differs between workers'):
    if carry:
      decorate(of_a_carry)(state, batch())
    else:
      decorate(step)(*state, batch())


def test_arrays_of_the_first_call_are_not_kept():
  """They would be a second copy of all that is trained."""
  model, optimizer, step = make_linear()
  first = [weakref.ref(x) for x in jax.tree.leaves(nnx.state(model))]
  assert first
  for _ in range(2):
    step(model, optimizer, batch())
  gc.collect()
  assert [ref() for ref in first] == [None] * len(first)


@pytest.mark.parametrize(
  'use',
  [
    lambda m, x: nnx.grad(lambda linear: jnp.mean(linear(x) ** 2))(m.linear),
    lambda m, x: m.dropout(x),
    lambda m, x: m.mean.update(values=x),
  ],
)
def test_objects_that_a_step_closes_over(use):
  model = Holder()
  step = decorate(lambda x: use(model, x), batch_argnums=0)
  with pytest.raises(ValueError, match='(?s)trace level.*Make it an argument'):
    step(batch())


def test_batches_that_look_like_parts_of_a_state():
  """Parameters in pieces are a batch; names of `optax.MultiSteps` are names."""
  workers = demo_optax.Workers.simulated(2)
  params = {'w': jnp.ones((8, 2)), 'b': jnp.ones(8)}
  state = demo_optax.demo(0.1, workers=workers).init(params)

  @demo_optax.data_parallel(workers, batch_argnames='teacher')
  def step(params, state, teacher):
    assert params['b'].shape == (8,)
    sums = demo_optax.out_batch(teacher['left']['w'].sum(axis=1))
    return sums, teacher['right']['b'].shape[0]

  teacher = {'left': {'w': jnp.ones((8, 2))}, 'right': {'b': jnp.ones(8)}}
  rows, seen = step(params, state, teacher)
  assert rows.shape == (8,) and seen == 4
  counts = {'mini_step': 1, 'gradient_step': 2}
  mean = demo_optax.data_parallel(workers, batch_argnums=1)(
    lambda counts, x: x.mean() + counts['mini_step'].astype(x.dtype)
  )
  assert mean(counts, jnp.arange(8.0)) == 4.5
