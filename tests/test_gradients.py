"""value_and_grad: bare pytrees, NNX modules, and what may go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import make_mesh, on_mesh, replicated, stacked
from jax.sharding import PartitionSpec as P

import demo_optax

pytestmark = pytest.mark.core

N = 4
KINDS = {
    'simulated': lambda: demo_optax.Workers.simulated(N),
    'auto': lambda: on_mesh(N, 'auto'),
    'explicit': lambda: on_mesh(N, 'explicit'),
}


@pytest.fixture(params=KINDS)
def workers(request):
  return KINDS[request.param]()


def batch(size=24, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(size, 6)).astype(np.float32)
  return x, x.sum(1, keepdims=True)


def params():
  return {'w': jnp.ones((6, 1)), 'b': jnp.zeros(1)}


def loss_fn(params, x, y):
  return jnp.mean(jnp.square(x @ params['w'] + params['b'][None] - y))


def per_worker_grads(x, y, fun=loss_fn):
  parts = zip(np.split(x, N), np.split(y, N))
  return [jax.value_and_grad(fun)(params(), a, b) for a, b in parts]


# Bare pytrees -----------------------------------------------------------------


@pytest.mark.parametrize('microbatches', [1, 2, 3])
def test_one_gradient_per_worker(workers, microbatches):
  x, y = batch()
  grad = jax.jit(demo_optax.value_and_grad(
      loss_fn, workers=workers, microbatches=microbatches))
  loss, gradients = grad(replicated(params(), workers), x, y)
  expected = per_worker_grads(x, y)
  np.testing.assert_allclose(
      loss, np.mean([e[0] for e in expected]), rtol=1e-6)
  gradients = jax.tree.map(np.asarray, gradients)
  for w, (_, g) in enumerate(expected):
    for key in g:
      np.testing.assert_allclose(gradients[key][w], g[key], atol=1e-5)
  assert jnp.shape(loss) == ()


def test_has_aux_and_argnums(workers):
  def fun(scale, params, x, y):
    return scale * loss_fn(params, x, y), {'mean': x.mean(), 'x': x}

  x, y = batch()
  grad = jax.jit(demo_optax.value_and_grad(
      fun, workers=workers, argnums=(1, 0), has_aux=True))
  args = replicated((jnp.float32(2.0), params()), workers)
  (loss, aux), (for_params, for_scale) = grad(*args, x, y)
  assert for_params['w'].shape == (N, 6, 1) and for_scale.shape == (N,)
  assert aux['x'].shape == (N, 6, 6) and aux['mean'].shape == (N,)
  np.testing.assert_allclose(np.concatenate(np.asarray(aux['x'])), x)
  np.testing.assert_allclose(loss, np.mean(for_scale) * 2, rtol=1e-5)


def test_aux_with_microbatches():
  grad = demo_optax.value_and_grad(
      lambda p, x: (jnp.sum(p * x), x), has_aux=True, microbatches=3,
      workers=demo_optax.Workers.simulated(2))
  (_, aux), _ = grad(jnp.float32(1.0), jnp.arange(12.0))
  assert aux.shape == (2, 3, 2)
  np.testing.assert_array_equal(aux.reshape(-1), np.arange(12.0))


def test_in_axes(workers):
  def fun(params, x, shift, *, y):
    return loss_fn(params, x.T + shift[None], y)

  x, y = batch()
  shift = np.arange(6, dtype=np.float32)
  grad = demo_optax.value_and_grad(
      fun, workers=workers, in_axes=(None, 1, None))
  loss, gradients = jax.jit(grad)(
      replicated(params(), workers), x.T, shift, y=y)
  expected = per_worker_grads(x + shift, y)
  np.testing.assert_allclose(loss, np.mean([e[0] for e in expected]), rtol=1e-6)
  gradients = jax.tree.map(np.asarray, gradients)
  np.testing.assert_allclose(gradients['w'][3], expected[3][1]['w'], atol=1e-4)


def test_shared_batch_gives_equal_gradients(workers):
  x, y = batch()
  grad = demo_optax.value_and_grad(loss_fn, workers=workers, in_axes=None)
  _, gradients = jax.jit(grad)(replicated(params(), workers), x, y)
  full = jax.grad(loss_fn)(params(), x, y)
  gradients = jax.tree.map(np.asarray, gradients)
  for w in range(N):
    np.testing.assert_allclose(gradients['w'][w], full['w'], atol=1e-5)


@pytest.mark.parametrize('microbatches', [1, 2])
def test_scalar_keys_differ_between_workers_and_parts(workers, microbatches):
  def fun(params, x, key):
    draw = jax.random.uniform(key, ())
    return jnp.sum(params['w']) + 0 * x.sum(), draw

  grad = demo_optax.value_and_grad(
      fun, workers=workers, has_aux=True, microbatches=microbatches)
  args = replicated((params(), jax.random.key(0)), workers)
  (_, draws), _ = jax.jit(grad)(args[0], batch()[0], args[1])
  assert len(np.unique(draws)) == N * microbatches


def test_integer_leaves_have_float0_gradients(workers):
  tree = replicated({**params(), 'steps': jnp.ones(2, jnp.int32)}, workers)
  _, gradients = jax.jit(demo_optax.value_and_grad(loss_fn, workers=workers))(
      tree, *batch())
  assert gradients['steps'].dtype == jax.dtypes.float0
  assert gradients['steps'].shape == (N, 2)


@pytest.mark.parametrize('check_vma', [True, False])
def test_own_shard_map(check_vma):
  """Each worker's own batch, parameters replicated: no silent all-reduce."""
  who = demo_optax.Workers.on_axis('data')
  grad = demo_optax.value_and_grad(loss_fn, workers=who, microbatches=2)

  def local(params, x, y):
    loss, gradients = grad(params, x, y)
    return loss, jax.tree.map(lambda g: g[None], gradients)

  x, y = batch()
  mapped = jax.jit(jax.shard_map(
      local, mesh=make_mesh(N), in_specs=(P(), P('data'), P('data')),
      out_specs=(P(), P('data')), check_vma=check_vma))
  loss, gradients = mapped(params(), x, y)
  expected = per_worker_grads(x, y)
  np.testing.assert_allclose(loss, np.mean([e[0] for e in expected]), rtol=1e-6)
  for w, (_, g) in enumerate(expected):
    np.testing.assert_allclose(gradients['w'][w], g['w'], atol=1e-5)


# NNX modules ------------------------------------------------------------------


class Net(nnx.Module):

  def __init__(self, rngs, norm=True, dropout=0.5):
    self.hidden = nnx.Linear(6, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs) if norm else None
    self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
    self.out = nnx.Linear(16, 1, rngs=rngs)

  def __call__(self, x):
    x = self.hidden(x)
    x = self.norm(x) if self.norm else x
    x = self.dropout(x) if self.dropout else x
    return self.out(jax.nn.relu(x))


def net_loss(model, x, y):
  return jnp.mean(jnp.square(model(x) - y))


def placed(module, workers):
  nnx.update(module, replicated(nnx.state(module), workers))
  return module


def test_plain_module_equals_bare_pytrees(workers):
  model = placed(Net(nnx.Rngs(0), norm=False, dropout=0), workers)
  x, y = batch()
  grad = demo_optax.value_and_grad(net_loss, workers=workers)
  loss, gradients = nnx.jit(grad)(model, x, y)
  graphdef, state = nnx.split(Net(nnx.Rngs(0), norm=False, dropout=0))
  gradients = jax.tree.map(np.asarray, gradients)
  expected = [
      jax.value_and_grad(lambda s, a, b: net_loss(nnx.merge(graphdef, s), a, b))(
          state, a, b)
      for a, b in zip(np.split(x, N), np.split(y, N))]
  np.testing.assert_allclose(loss, np.mean([e[0] for e in expected]), rtol=1e-6)
  for w, (_, g) in enumerate(expected):
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(g)):
      np.testing.assert_allclose(a[w], b, atol=1e-5)


@pytest.mark.parametrize('microbatches', [1, 3])
def test_dropout_masks_differ_and_streams_advance(workers, microbatches):
  model = placed(Net(nnx.Rngs(0), norm=False), workers)
  masks = []

  def fun(model, x):
    mask = model.dropout(jnp.ones((1, 64)))
    return jnp.mean(model(x)), mask

  grad = nnx.jit(demo_optax.value_and_grad(
      fun, workers=workers, has_aux=True, microbatches=microbatches))
  for step in range(3):
    (_, mask), _ = grad(model, np.ones((12, 6), np.float32))
    masks += [tuple(m) for m in np.asarray(mask).reshape(-1, 64)]
    count = model.dropout.rngs.count[...]
    assert int(count) == 2 * microbatches * (step + 1)  # as without workers
  assert len(set(masks)) == 3 * N * microbatches


def test_batch_statistics_are_averaged(workers):
  model = placed(Net(nnx.Rngs(0), dropout=0), workers)
  x, y = batch()
  expected = []
  for part in np.split(x, N):
    alone = Net(nnx.Rngs(0), dropout=0)
    alone(part)
    expected.append(np.asarray(alone.norm.var[...]))
  nnx.jit(demo_optax.value_and_grad(net_loss, workers=workers))(model, x, y)
  np.testing.assert_allclose(
      model.norm.var[...], np.mean(expected, 0), rtol=1e-5)
  assert len({np.asarray(s.data).tobytes()
              for s in model.norm.var[...].addressable_shards}) == 1


def test_statistics_go_through_microbatches(workers):
  model = placed(Net(nnx.Rngs(0), dropout=0), workers)
  x, y = batch()
  alone = Net(nnx.Rngs(0), dropout=0)
  for part in np.split(np.split(x, N)[0], 2):
    alone(part)
  grad = demo_optax.value_and_grad(
      net_loss, workers=workers, microbatches=2)
  nnx.jit(grad)(model, np.tile(x[:6], (N, 1)), np.tile(y[:6], (N, 1)))
  np.testing.assert_allclose(
      model.norm.mean[...], alone.norm.mean[...], atol=1e-6)


def test_diff_state_chooses_what_is_differentiated(workers):
  model = placed(Net(nnx.Rngs(0), norm=False, dropout=0), workers)
  only_out = nnx.All(nnx.Param, nnx.PathContains('out'))
  grad = demo_optax.value_and_grad(
      net_loss, workers=workers, argnums=nnx.DiffState(0, only_out))
  _, gradients = nnx.jit(grad)(model, *batch())
  assert set(gradients) == {'out'}


def test_other_changes_are_errors():
  class Counting(Net):
    def __init__(self, rngs):
      super().__init__(rngs, norm=False, dropout=0)
      self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
      self.calls[...] += 1
      return super().__call__(x)

  class Sowing(Net):
    def __call__(self, x):
      self.input = nnx.Variable(x)
      return super().__call__(x)

  class Editing(Net):
    def __call__(self, x):
      self.out.bias[...] = jnp.ones(1)
      return super().__call__(x)

  grad = demo_optax.value_and_grad(
      net_loss, workers=demo_optax.Workers.simulated(N))
  with pytest.raises(ValueError, match=r'changed the variable .*calls'):
    grad(Counting(nnx.Rngs(0)), *batch())
  with pytest.raises(ValueError, match=r'added or removed .*input'):
    grad(Sowing(nnx.Rngs(0)), *batch())
  with pytest.raises(ValueError, match=r'changed the variable .*bias'):
    grad(Editing(nnx.Rngs(0)), *batch())


def test_modules_as_other_arguments_are_errors():
  grad = demo_optax.value_and_grad(
      lambda p, x, rngs: jnp.sum(p * rngs.normal((2,))), in_axes=None,
      workers=demo_optax.Workers.simulated(N))
  with pytest.raises(ValueError, match='Rngs'):
    grad(jnp.ones(2), jnp.ones(4), nnx.Rngs(0))


# Mistakes ---------------------------------------------------------------------


def test_batches_that_do_not_divide():
  grad = demo_optax.value_and_grad(
      loss_fn, workers=demo_optax.Workers.simulated(N), microbatches=2)
  with pytest.raises(ValueError, match=r"argument 1 has length 12.* 8 parts"):
    grad(params(), *batch(12))
  with pytest.raises(ValueError, match='no axis 0'):
    grad(params(), jnp.float32(1.0), batch()[1])
  with pytest.raises(ValueError, match=r"'x'.*length 3"):
    demo_optax.value_and_grad(
        lambda p, b: jnp.sum(p), workers=demo_optax.Workers.simulated(N))(
            jnp.ones(1), {'x': jnp.ones((3, 2))})


@pytest.mark.parametrize('kwargs, error, match', [
    ({'microbatches': 0}, ValueError, 'microbatches=0'),
    ({'microbatches': 2.0}, TypeError, 'microbatches=2.0'),
    ({'workers': 4}, TypeError, 'workers=4'),
])
def test_bad_options(kwargs, error, match):
  kwargs = {'workers': demo_optax.Workers.simulated(2), **kwargs}
  with pytest.raises(error, match=match):
    demo_optax.value_and_grad(loss_fn, **kwargs)


@pytest.mark.parametrize('kwargs, error, match', [
    ({'in_axes': (None, 0)}, ValueError, '2 entries'),
    ({'in_axes': 0, 'argnums': 7}, ValueError, 'argnums=7'),
    ({'in_axes': (0, 0, 0)}, ValueError, 'differentiated'),
    ({'argnums': 'w'}, TypeError, 'argnums'),
    ({'in_axes': (None, 0, {'y': 0})}, TypeError, 'in_axes has the entry'),
    ({'argnums': nnx.DiffState(0, nnx.Param)}, TypeError, 'DiffState'),
])
def test_bad_calls(kwargs, error, match):
  grad = demo_optax.value_and_grad(
      loss_fn, workers=demo_optax.Workers.simulated(2), **kwargs)
  with pytest.raises(error, match=match):
    grad(params(), *batch())


# Whole training steps ---------------------------------------------------------


@pytest.mark.parametrize('microbatches', [1, 2])
def test_nnx_optimizer_with_dropout_and_batch_norm(workers, microbatches):
  model = placed(Net(nnx.Rngs(0), dropout=0.1), workers)
  tx = demo_optax.demo(
      optax.linear_schedule(3e-2, 1e-3, 150), workers=workers, decay=0.9)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  grad = demo_optax.value_and_grad(
      net_loss, workers=workers, microbatches=microbatches)

  @nnx.jit
  def train_step(model, optimizer, x, y):
    loss, gradients = grad(model, x, y)
    optimizer.update(model, gradients)
    return loss

  losses = [float(train_step(model, optimizer, *batch(48, s % 3)))
            for s in range(150)]
  assert np.mean(losses[-10:]) < 0.2 * losses[0]
  assert int(optimizer.step[...]) == 150
  momentum = demo_optax.momentum(
      optimizer.opt_state, nnx.state(model, nnx.Param), demo_optax.dct_topk(),
      workers)
  assert momentum['hidden']['kernel'].get_value().shape == (N, 6, 16)


def test_linen_train_state_with_batch_statistics(workers):
  from flax import linen as nn
  from flax.training import train_state

  class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(16)(x)
      x = nn.BatchNorm(use_running_average=False)(x)
      x = nn.Dropout(0.1, deterministic=False)(x)
      return nn.Dense(1)(nn.relu(x))

  class State(train_state.TrainState):
    batch_stats: dict

  net = LinenNet()
  with jax.numpy_rank_promotion('allow'):  # Linen's own layers promote
    variables = net.init({'params': jax.random.key(0),
                          'dropout': jax.random.key(1)}, batch()[0])
    tx = demo_optax.demo(
        optax.linear_schedule(3e-2, 1e-3, 150), workers=workers, decay=0.9)
    variables = replicated(variables, workers)
    state = State.create(apply_fn=net.apply, params=variables['params'], tx=tx,
                         batch_stats=variables['batch_stats'])

    def fun(params, stats, x, y, key):
      out, changed = net.apply(
          {'params': params, 'batch_stats': stats}, x,
          rngs={'dropout': key}, mutable=['batch_stats'])
      return jnp.mean(jnp.square(out - y)), changed['batch_stats']

    grad = demo_optax.value_and_grad(
        fun, workers=workers, has_aux=True, in_axes=(None, None, 0, 0, None))

    @jax.jit
    def train_step(state, x, y, key):
      (loss, stats), gradients = grad(
          state.params, state.batch_stats, x, y, key)
      stats = jax.tree.map(lambda s: s.mean(0), stats)
      return state.apply_gradients(grads=gradients, batch_stats=stats), loss

    losses = []
    for s in range(150):
      key = replicated(jax.random.key(s), workers)
      state, loss = train_step(state, *batch(48, s % 3), key)
      losses.append(float(loss))
  assert np.mean(losses[-10:]) < 0.2 * losses[0]
  mean = jax.tree.leaves(state.batch_stats)[0]
  assert np.any(mean)


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_statistics_are_the_only_other_collectives(kind):
  workers = on_mesh(N, kind)
  model = placed(Net(nnx.Rngs(0)), workers)
  graphdef, state = nnx.split(model)

  def step(state, x, y):
    model = nnx.merge(graphdef, state)
    loss, gradients = demo_optax.value_and_grad(
        net_loss, workers=workers)(model, x, y)
    return loss, gradients, nnx.state(model)

  x, y = stacked(batch(), workers)
  compiled = jax.jit(step).lower(state, x, y).compile()
  found = demo_optax.collectives(compiled)
  assert {c.kind for c in found} == {'all-reduce'}
  # The loss, and the mean and variance of 16 features with who is finite.
  assert sum(c.output_bytes for c in found) == 4 * (1 + 2 * (16 + 1))


# One worker that is not finite ------------------------------------------------


def test_statistics_leave_out_who_is_not_finite(workers):
  model = placed(Net(nnx.Rngs(0), dropout=0), workers)
  x, y = batch()
  alone = [Net(nnx.Rngs(0), dropout=0) for _ in range(N)]
  for net, part in zip(alone, np.split(x, N)):
    net(part)
  grad = nnx.jit(demo_optax.value_and_grad(net_loss, workers=workers))
  broken = x.copy()
  broken[0, 0] = np.nan  # of the first worker
  grad(model, broken, y)
  expected = np.mean([net.norm.var[...] for net in alone[1:]], 0)
  np.testing.assert_allclose(model.norm.var[...], expected, rtol=1e-5)
  before = np.asarray(model.norm.mean[...])
  grad(model, np.full_like(x, np.nan), y)
  np.testing.assert_array_equal(model.norm.mean[...], before)


@pytest.mark.parametrize('container', [
    lambda m: {'net': m}, lambda m: (m,), lambda m: [m]])
def test_modules_in_containers(container):
  """They are modules still: masks differ, streams and statistics advance."""
  workers = demo_optax.Workers.simulated(N)
  tree = container(Net(nnx.Rngs(0)))
  (model,) = tree.values() if isinstance(tree, dict) else tree

  def fun(tree, x, y):
    (model,) = tree.values() if isinstance(tree, dict) else tree
    return net_loss(model, x, y), model.dropout(jnp.ones((1, 64)))

  grad = nnx.jit(demo_optax.value_and_grad(fun, workers=workers, has_aux=True))
  (_, masks), gradients = grad(tree, *batch())
  assert len({tuple(m.ravel()) for m in np.asarray(masks)}) == N
  assert int(model.dropout.rngs.count[...]) == 2
  assert np.any(model.norm.mean[...])
  assert len(jax.tree.leaves(gradients)) == 6  # parameters, not statistics


def test_python_constants_are_given_as_they_are():
  def fun(params, x, y, train, *, scale, name='a'):
    assert train is True and name == 'b'
    return scale * loss_fn(params, x, y)

  x, y = batch()
  for who in (KINDS['simulated'](), KINDS['auto']()):
    grad = demo_optax.value_and_grad(fun, workers=who)
    loss, _ = grad(params(), x, y, True, scale=2.0, name='b')
    plain, _ = demo_optax.value_and_grad(loss_fn, workers=who)(params(), x, y)
    np.testing.assert_allclose(loss, 2 * plain, rtol=1e-6)


def test_legacy_keys_are_refused():
  grad = demo_optax.value_and_grad(
      lambda p, key: jnp.sum(p), in_axes=None,
      workers=demo_optax.Workers.simulated(N))
  with pytest.raises(ValueError, match=r'PRNGKey.*jax.random.key'):
    grad(jnp.ones(2), jax.random.PRNGKey(0))
