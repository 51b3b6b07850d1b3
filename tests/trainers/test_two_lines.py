"""Small trainers, written as well-known code bases write theirs.

Two lines differ from the original, besides the one that makes the workers; they
say what they are instead of. What a step receives from other workers is read
from the compiled program.
"""

import functools
import inspect
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from helpers import COMPILATIONS, make_mesh
from jax.sharding import AxisType

import demo_optax

RNG = np.random.default_rng(0)
IMAGES = {
    'image': RNG.normal(size=(16, 8, 8, 1)).astype(np.float32),
    'label': np.arange(16, dtype=np.int32) % 4,
}
TEXT = {'inputs': RNG.integers(0, 64, (16, 8)), 'targets': None}
TEXT['targets'] = np.roll(TEXT['inputs'], -1, axis=1)
ROWS = {'x': RNG.normal(size=(16, 64)).astype(np.float32)}
ROWS['y'] = ROWS['x'][:, :1]


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mnist():
  """NNX: convolutions, batch statistics, dropout, metrics, streams, aux."""
  workers = demo_optax.Workers.on_mesh(make_mesh(), 'data')

  class CNN(nnx.Module):

    def __init__(self, rngs):
      self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
      self.norm = nnx.BatchNorm(32, rngs=rngs)
      self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
      self.dropout = nnx.Dropout(0.1)
      self.linear = nnx.Linear(4 * 64, 4, rngs=rngs)

    def __call__(self, x, rngs):
      pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
      x = pool(nnx.relu(self.norm(self.conv1(x))))
      x = self.dropout(pool(nnx.relu(self.conv2(x))), rngs=rngs)
      return self.linear(x.reshape(x.shape[0], -1))

  model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(dropout=1)
  optimizer = nnx.Optimizer(
      model,
      demo_optax.demo(3e-3, workers=workers),  # instead of optax.adamw(3e-3)
      wrt=nnx.Param,
  )
  metrics = nnx.MultiMetric(
      accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average('loss'))

  def loss_fn(model, rngs, batch):
    logits = model(batch['image'], rngs)
    return cross_entropy(logits, batch['label']), logits

  @demo_optax.data_parallel(workers)  # instead of nnx.jit
  def train_step(model, optimizer, metrics, rngs, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch['label'])
    optimizer.update(model, grads)

  def step():
    metrics.reset()
    train_step(model, optimizer, metrics, rngs, IMAGES)
    return metrics.compute()['loss']

  compiled = train_step.lower(model, optimizer, metrics, rngs, IMAGES).compile()
  return step, compiled, nnx.state(model, nnx.Param), workers


def gemma():
  """NNX: a transformer on a mesh with fsdp, its loss closing over the batch."""
  mesh = jax.make_mesh(
      (2, 2), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2,
      devices=jax.devices()[:4])

  class Block(nnx.Module):

    def __init__(self, rngs):
      init = nnx.initializers.lecun_normal()
      self.norm = nnx.RMSNorm(64, rngs=rngs)
      self.attend = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
      self.up = nnx.Linear(
          64, 256, rngs=rngs,
          kernel_init=nnx.with_partitioning(init, (None, 'fsdp')))
      self.down = nnx.Linear(
          256, 64, rngs=rngs,
          kernel_init=nnx.with_partitioning(init, ('fsdp', None)))

    def __call__(self, x):
      x = x + self.attend(self.norm(x))
      return x + self.down(nnx.gelu(self.up(x)))

  class Transformer(nnx.Module):

    def __init__(self, rngs):
      self.embed = nnx.Embed(64, 64, rngs=rngs)
      self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
      x = self.embed(tokens)
      for block in self.blocks:
        x = block(x)
      return self.embed.attend(x)

  with jax.set_mesh(mesh):
    model = Transformer(nnx.Rngs(0))
  workers = demo_optax.Workers.on_mesh(
      mesh, 'data', demo_optax.param_specs(model))
  optimizer = nnx.Optimizer(
      model,
      demo_optax.demo(1e-2, workers=workers),  # instead of optax.adamw(1e-2)
      wrt=nnx.Param,
  )

  @demo_optax.data_parallel(workers)  # instead of nnx.jit
  def train_step(model, optimizer, batch):
    def loss_fn(model):
      return cross_entropy(model(batch['inputs']), batch['targets'])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss

  step = functools.partial(train_step, model, optimizer, TEXT)
  compiled = train_step.lower(model, optimizer, TEXT).compile()
  return step, compiled, nnx.state(model, nnx.Param), workers


def lm1b():
  """Linen: boxed parameters with logical names, in a sharded `TrainState`."""
  mesh = jax.make_mesh(
      (2, 2), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2,
      devices=jax.devices()[:4])
  rules = (('embed', None), ('mlp', 'fsdp'))
  boxed = functools.partial(
      nn.with_logical_partitioning, nn.initializers.normal(0.1))
  net = nn.Sequential([
      nn.Embed(64, 64, embedding_init=boxed(('embed', None))),
      nn.Dense(256, kernel_init=boxed(('embed', 'mlp'))), nn.gelu,
      nn.Dense(64, kernel_init=boxed(('mlp', 'embed')))])
  shapes = jax.eval_shape(net.init, jax.random.key(0), TEXT['inputs'])
  workers = demo_optax.Workers.on_mesh(
      mesh, 'data', demo_optax.param_specs(shapes['params'], rules))

  def init(key):
    params = net.init(key, TEXT['inputs'])['params']
    tx = demo_optax.demo(1e-2, workers=workers)  # instead of optax.adamw(1e-2)
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx)

  specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
  shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
  state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))

  @demo_optax.data_parallel(workers, donate_argnums=0)  # instead of jax.jit
  def train_step(state, batch):
    def loss_fn(params):
      logits = state.apply_fn({'params': params}, batch['inputs'])
      return cross_entropy(logits, batch['targets'])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {'loss': loss}

  compiled = train_step.lower(state, TEXT).compile()

  def step():
    nonlocal state
    state, metrics = train_step(state, TEXT)
    return metrics['loss']

  return step, compiled, state.params, workers


def gpt_jax():
  """Linen in `pmap`: a clip, dropout keys folded by hand, replicated state."""
  net = nn.Sequential([nn.Embed(64, 64), nn.Dense(256), nn.gelu, nn.Dense(64)])
  params = net.init(jax.random.key(0), TEXT['inputs'])['params']
  workers = demo_optax.Workers.on_axis('batch')
  tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      demo_optax.demo(1e-2, workers=workers),  # instead of optax.adamw(1e-2)
  )
  devices = jax.devices()[:4]
  state = jax_utils.replicate(
      TrainState.create(apply_fn=net.apply, params=params, tx=tx), devices)

  @functools.partial(jax.pmap, axis_name='batch', devices=devices)
  def train_step(state, batch):
    def loss_fn(params):
      logits = state.apply_fn({'params': params}, batch['inputs'])
      return cross_entropy(logits, batch['targets'])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss = jax.lax.pmean(loss, 'batch')  # instead of the pmean of loss, grads
    return state.apply_gradients(grads=grads), loss

  batch = jax.tree.map(lambda x: x.reshape(4, 4, -1), TEXT)
  compiled = train_step.lower(state, batch).compile()

  def step():
    nonlocal state
    state, loss = train_step(state, batch)
    return loss[0]

  return step, compiled, params, workers


def nanodo():
  """Linen in `jit` with donation, a clip before the optimizer."""
  mesh = make_mesh()
  workers = demo_optax.Workers.on_mesh(mesh, 'data')
  net = nn.Sequential([nn.Embed(64, 64), nn.Dense(256), nn.gelu, nn.Dense(64)])
  tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      demo_optax.demo(3e-2, workers=workers),  # instead of optax.adamw(3e-2)
  )
  params = net.init(jax.random.key(0), TEXT['inputs'])['params']
  state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

  @demo_optax.data_parallel(workers, donate_argnums=0)  # instead of jax.jit
  def train_step(state, batch):
    def loss_fn(params):
      logits = state.apply_fn({'params': params}, batch['inputs'])
      return cross_entropy(logits, batch['targets'])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {'loss': loss, 'grad_norm': optax.tree.norm(grads)}

  compiled = train_step.lower(state, TEXT).compile()

  def step():
    nonlocal state
    state, metrics = train_step(state, TEXT)
    return metrics['loss']

  return step, compiled, params, workers


def equinox():
  """A module with functions among its leaves."""
  workers = demo_optax.Workers.on_mesh(make_mesh(), 'data')
  model = eqx.nn.MLP(64, 1, 128, 2, key=jax.random.key(0))
  optim = demo_optax.demo(3e-3, workers=workers)  # instead of optax.adamw(3e-3)
  opt_state = optim.init(eqx.filter(model, eqx.is_array))

  @demo_optax.data_parallel(workers)  # instead of eqx.filter_jit
  def make_step(model, opt_state, x, y):
    loss_fn = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    updates, opt_state = optim.update(
        grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss

  params = eqx.filter(model, eqx.is_array)
  compiled = make_step.lower(model, opt_state, *ROWS.values()).compile()

  def step():
    nonlocal model, opt_state
    model, opt_state, loss = make_step(model, opt_state, *ROWS.values())
    return loss

  return step, compiled, params, workers


def haiku():
  """Parameters and their average in a NamedTuple."""
  workers = demo_optax.Workers.on_mesh(make_mesh(), 'data')

  class TrainingState(NamedTuple):
    params: Any
    avg_params: Any
    opt_state: Any

  net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, 1])(x)))
  optimiser = demo_optax.demo(3e-3, workers=workers)  # instead of optax.adam(3e-3)
  params = net.init(jax.random.key(0), ROWS['x'])
  state = TrainingState(params, params, optimiser.init(params))

  def loss(params, batch):
    return jnp.mean((net.apply(params, batch['x']) - batch['y']) ** 2)

  @demo_optax.data_parallel(workers)  # instead of jax.jit
  def update(state, batch):
    grads = jax.grad(loss)(state.params, batch)
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, 0.001)
    return TrainingState(params, avg_params, opt_state)

  compiled = update.lower(state, ROWS).compile()

  def step():
    nonlocal state
    before, state = state, update(state, ROWS)
    return loss(before.params, ROWS)

  return step, compiled, params, workers


def lora():
  """Adapters are trained, the rest of the model is not."""
  workers = demo_optax.Workers.on_mesh(make_mesh(), 'data')
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
      nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs), nnx.relu,
      nnx.LoRALinear(64, 1, lora_rank=4, rngs=rngs))
  optimizer = nnx.Optimizer(
      model,
      demo_optax.demo(1e-2, workers=workers),  # instead of optax.adamw(1e-2)
      wrt=nnx.LoRAParam,
  )

  @demo_optax.data_parallel(workers)  # instead of nnx.jit
  def train_step(model, optimizer, batch):
    loss_fn = lambda model: jnp.mean((model(batch['x']) - batch['y']) ** 2)
    loss, grads = nnx.value_and_grad(
        loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    return loss

  step = functools.partial(train_step, model, optimizer, ROWS)
  compiled = train_step.lower(model, optimizer, ROWS).compile()
  return step, compiled, nnx.state(model, nnx.LoRAParam), workers


TRAINERS = [mnist, gemma, lm1b, gpt_jax, nanodo, equinox, haiku, lora]


@pytest.mark.filterwarnings('ignore:.*pmap:DeprecationWarning')
@pytest.mark.parametrize('trainer', TRAINERS, ids=lambda f: f.__name__)
def test_two_lines_train_with_nothing_dense_between_workers(trainer):
  assert inspect.getsource(trainer).count('# instead of ') == 2
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    step, compiled, params, workers = trainer()
    losses = [float(step())]
    step()  # what is done between steps compiles, too
    before = COMPILATIONS.count
    losses += [float(step()) for _ in range(18)]
    assert COMPILATIONS.count == before
  assert losses[-1] < 0.8 * losses[0]
  found = [
      c for c in hlo_text.collectives(compiled, workers.mesh)
      if workers.mesh is None or 'data' in c.axes
  ]
  (message,) = [c for c in found if c.shapes[0].startswith('u8')]
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  averaged = 2 * size * (message.group_size - 1) / message.group_size
  assert message.received_bytes < averaged / 3
  # The rest are losses, metrics and batch statistics.
  assert sum(c.received_bytes for c in found) - message.received_bytes < 500
