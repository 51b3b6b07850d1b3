"""A stock optax.MultiSteps in a step of one worker."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import COMPILATIONS, make_workers

import demo_optax

KINDS = ['simulated', 'auto', 'explicit']
K = 3


@pytest.fixture(params=KINDS)
def workers(request):
  with make_workers(request.param, 4) as workers:
    yield workers


@pytest.fixture(autouse=True)
def standard_promotion():
  with jax.numpy_dtype_promotion('standard'):  # MultiSteps multiplies by flags
    yield


def loss_fn(params, x):
  return jnp.mean((x @ params['w'] + params['b'][None] - 1) ** 2)


def make_params():
  return {'w': 0.1 * jnp.ones((16, 8)), 'b': jnp.zeros((8,))}


def batches(number):
  rng = np.random.default_rng(0)
  return rng.normal(size=(number, 8, 16)).astype(np.float32)


def make_tx(workers):
  return demo_optax.demo(
      0.03, workers=workers, decay=0.9, compressor=demo_optax.Compressor(
          demo_optax.compressors.Slicing(0.5),
          demo_optax.compressors.Identity())
  )


def by_hand(workers, xs):
  """Gradients added up in the loop of the step, one exchange for K batches."""
  tx = make_tx(workers)
  params = make_params()
  state = tx.init(params)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, xs):
    total = jax.tree.map(jnp.zeros_like, params)
    losses = []
    for j in range(K):
      loss, grads = jax.value_and_grad(loss_fn)(params, xs[:, j])
      # As MultiSteps takes its mean.
      mean = functools.partial(lambda n, a, g: a + (g - a) / n, j + 1)
      total = jax.tree.map(mean, total, grads)
      losses.append(loss)
    updates, state = tx.update(total, state, params)
    return optax.apply_updates(params, updates), state, losses

  losses = []
  for start in range(0, len(xs), K):
    part = np.moveaxis(xs[start : start + K], 0, 1)
    params, state, some = step(params, state, part)
    losses += map(float, some)
  return losses, params, state


@pytest.mark.core
def test_its_losses_are_those_of_accumulation_by_hand(workers):
  xs = batches(3 * K)
  expected, expected_params, expected_state = by_hand(workers, xs)
  tx = optax.MultiSteps(make_tx(workers), K)
  params = make_params()
  state = tx.init(params)

  @demo_optax.data_parallel(workers)
  def step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    assert state.acc_grads['w'].shape == params['w'].shape
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  losses = []
  for number, x in enumerate(xs):
    params, state, loss = step(params, state, x)
    losses.append(float(loss))
    if number == 0:
      COMPILATIONS.count = 0
      own = np.asarray(state.acc_grads['worker_stacked']['w'])
      assert own.shape == (4, 16, 8)
      assert len({row.tobytes() for row in own}) == 4
  assert COMPILATIONS.count == 0
  np.testing.assert_allclose(losses, expected, rtol=1e-6)
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
      params, expected_params,
  )
  assert int(state.gradient_step) == 3 and int(state.mini_step) == 0
  assert demo_optax.exchange_info(state).keys() == (
      demo_optax.exchange_info(expected_state).keys()
  )


def test_in_an_nnx_optimizer(workers):
  model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
  tx = optax.MultiSteps(make_tx(workers), K)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(workers)
  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  x = batches(1)[0]
  losses = [float(step(model, optimizer, x)) for _ in range(10 * K + 1)]
  assert len(set(losses[:K])) == 1 and losses[K] != losses[0]
  assert losses[-1] < 0.7 * losses[0]
  assert int(optimizer.opt_state.gradient_step[...]) == 10
  own = optimizer.opt_state.acc_grads['worker_stacked']['kernel'][...]
  assert own.shape == (4, 16, 8)
  assert len({row.tobytes() for row in np.asarray(own)}) == 4


def test_in_a_train_state(workers):
  state = TrainState.create(
      apply_fn=loss_fn, params=make_params(),
      tx=optax.MultiSteps(make_tx(workers), 2),
  )

  @demo_optax.data_parallel(workers)
  def step(state, x):
    loss, grads = jax.value_and_grad(state.apply_fn)(state.params, x)
    return state.apply_gradients(grads=grads), loss

  x = batches(1)[0]
  losses = []
  for _ in range(11):
    state, loss = step(state, x)
    losses.append(float(loss))
  assert losses[0] == losses[1] != losses[2]
  assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize('workers', KINDS[:2], indirect=True)
def test_another_number_of_workers_goes_on_with_the_mean(workers):
  tx = optax.MultiSteps(make_tx(workers), K)
  params = make_params()
  state = tx.init(params)

  @demo_optax.data_parallel(workers)
  def step(params, state, x):
    grads = jax.grad(loss_fn)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, state = step(params, state, batches(1)[0])
  fewer = demo_optax.checkpoint.resize_workers(state, 2)
  own, own_fewer = (s.acc_grads['worker_stacked']['w'] for s in (state, fewer))
  assert own_fewer.shape == (2, 16, 8)
  np.testing.assert_allclose(own.mean(0), own_fewer.mean(0), rtol=1e-5)
  fewer = demo_optax.checkpoint.resize_workers(fewer, 4)
  step(params, workers.device_put(fewer), batches(1)[0])


def test_skipping_by_a_workers_own_gradient_is_named(workers):
  tx = optax.MultiSteps(
      make_tx(workers), K, should_skip_update_fn=optax.skip_not_finite
  )
  params = make_params()

  @demo_optax.data_parallel(workers)
  def step(params, state, x):
    grads = jax.grad(loss_fn)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  with pytest.raises(ValueError, match='differs between workers'):
    step(params, tx.init(params), batches(1)[0])
