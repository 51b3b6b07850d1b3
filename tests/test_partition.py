"""Several optimizers, one exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
  assert_replicas_equal,
  assert_same_bits,
  on_mesh,
  random_tree,
  replicated,
  stacked,
    worker_grads,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

pytestmark = pytest.mark.core

N = 4
SHAPES = {'a': (32, 24), 'b': (24, 32), 'rows': (40, 16), 'gain': (9,)}
LABELS = {'a': 'hidden', 'b': 'hidden', 'rows': 'embedding', 'gain': 'dense'}
CODES = {'hidden': demo_optax.dct_topk(16, 4),
         'embedding': demo_optax.dct_topk((1, 16), 3, values='sign'),
         'dense': None}
TREE = {name: CODES[label] for name, label in LABELS.items()}


@pytest.fixture(autouse=True)
def standard_promotion():
  """As optax.adamw needs it."""
  with jax.numpy_dtype_promotion('standard'):
    yield


def parts(workers):
  """DeMo; Adam after an exchange of its own; AdamW on averaged gradients."""
  return {
      'hidden': demo_optax.demo(
          0.01, workers=workers, compressor=CODES['hidden'], decay=0.9),
      'embedding': optax.chain(
          demo_optax.per_worker(
              optax.clip_by_global_norm(1.0), workers=workers),
          demo_optax.scale_by_demo(
              CODES['embedding'], 0.8, workers=workers, ema=True),
          optax.scale_by_adam(b1=0.0),
          optax.scale_by_learning_rate(0.02)),
      'dense': optax.adamw(0.03),
  }


def alone(label, workers, steps):
  """The updates of one part by itself."""
  tx = parts(workers)[label]
  if label == 'dense':
    tx = optax.chain(demo_optax.average(workers=workers), tx)
  names = [name for name in SHAPES if LABELS[name] == label]
  params = {name: jnp.asarray(random_tree(9, SHAPES)[name]) for name in names}
  state, update = tx.init(params), jax.jit(tx.update)
  for step in range(steps):
    gradients = random_tree(step, SHAPES, lead=(N,))
    updates, state = update(
        {name: gradients[name] for name in names}, state, params)
    yield updates


def test_parts_do_as_they_do_alone():
  workers = demo_optax.Workers.simulated(N)
  tx = demo_optax.partition(parts(workers), LABELS, workers=workers)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  state, update = tx.init(params), jax.jit(tx.update)
  expected = {label: alone(label, workers, 3) for label in CODES}
  for step in range(3):
    updates, state = update(random_tree(step, SHAPES, lead=(N,)), state, params)
    for label, results in expected.items():
      for name, value in next(results).items():
        np.testing.assert_allclose(
            updates[name], value, atol=1e-7, err_msg=f'{name} of {label}')


@pytest.mark.parametrize('kind', ['auto', 'explicit'])
def test_one_gather_for_all_parts(kind):
  workers = on_mesh(N, kind)
  tx = demo_optax.partition(
      parts(workers), lambda params: LABELS, workers=workers)
  params = replicated(random_tree(9, SHAPES), workers)
  state = workers.device_put(tx.init(params))
  gradients = stacked(random_tree(0, SHAPES, lead=(N,)), workers)
  update = jax.jit(tx.update)
  updates, _ = update(gradients, state, params)
  assert_replicas_equal(updates)
  found = demo_optax.collectives(
      update.lower(gradients, state, params).compile())
  plan = demo_optax.plan(params, TREE, workers)
  (gather,) = [c for c in found if c.kind == 'all-gather']
  assert gather.received_bytes == (N - 1) * plan.payload_bytes
  # The dense part: the gradient, and who takes part in it.
  dense = [c for c in found if c.kind == 'all-reduce']
  assert plan.summed_bytes == 4 * 9
  assert plan.summed_bytes <= sum(c.output_bytes for c in dense) <= 4 * 9 + 8
  assert plan.sent_bytes == plan.payload_bytes + 2 * (N - 1) // N * 36 + 18
  if kind == 'auto':
    simulated = demo_optax.Workers.simulated(N)
    tx = demo_optax.partition(parts(simulated), LABELS, workers=simulated)
    same, _ = jax.jit(tx.update)(
        random_tree(0, SHAPES, lead=(N,)),
        tx.init(random_tree(9, SHAPES)), random_tree(9, SHAPES))
    assert_same_bits({k: updates[k] for k in 'ab'}, {k: same[k] for k in 'ab'})


def test_gathered_summed_and_dense_together():
  workers = demo_optax.Workers.simulated(N)
  transforms = {
      'gather': demo_optax.scale_by_demo(CODES['hidden'], workers=workers),
      'sum': demo_optax.scale_by_demo(
          demo_optax.striding(0.25, chunk_size=8), workers=workers),
  }
  labels = {'a': 'gather', 'b': 'sum', 'rows': 'sum', 'gain': 'gather'}
  tx = demo_optax.partition(transforms, labels, workers=workers)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  gradients = random_tree(0, SHAPES, lead=(N,))
  gradients['b'][2] = np.nan
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  # Whoever is not finite in one part is left out of all.
  assert int(demo_optax.exchange_info(state)['num_excluded']) == 1
  assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
  codes = {'a': CODES['hidden'], 'gain': CODES['hidden'],
           'b': demo_optax.striding(0.25, chunk_size=8),
           'rows': demo_optax.striding(0.25, chunk_size=8)}
  kept = demo_optax.momentum(state, params, codes, workers)
  for name, moment in kept.items():
    assert not np.any(moment[2])
    expected = gradients[name][[0, 1, 3]].mean(0)
    if labels[name] == 'sum':
      np.testing.assert_allclose(
          np.asarray(moment)[[0, 1, 3]].mean(0) + updates[name], expected,
          atol=1e-6)
  again = demo_optax.with_momentum(state, kept, codes, workers)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again)):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_with_nnx_and_schedules():
  """The count of steps, hyperparameters and numbers of each part advance."""
  workers = demo_optax.Workers.simulated(2)
  model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  make = optax.inject_hyperparams(
      demo_optax.demo, static_args=('workers', 'compressor'),
      hyperparam_dtype=jnp.float32)
  tx = demo_optax.partition(
      {'kernel': make(
          optax.linear_schedule(0.1, 0.0, 10), workers=workers,
          compressor=demo_optax.dct_topk(4, 2)),
       'bias': optax.sgd(optax.linear_schedule(1.0, 0.0, 10))},
      lambda params: jax.tree.map(
          lambda x: 'kernel' if x.ndim > 1 else 'bias', params),
      workers=workers)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def train_step(model, optimizer, x):
    graphdef, params = nnx.split(model)
    loss, gradients = worker_grads(
        lambda p, x: jnp.mean(nnx.merge(graphdef, p)(x) ** 2), workers)(
            params, x)
    optimizer.update(model, gradients)
    return loss

  x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
  losses = [float(train_step(model, optimizer, x)) for _ in range(8)]
  assert losses[-1] < 0.7 * losses[0]
  counts = [int(x) for path, x in
            jax.tree_util.tree_flatten_with_path(optimizer.opt_state)[0]
            if 'count' in jax.tree_util.keystr(path)]
  assert len(counts) >= 3 and set(counts) == {8}


def test_mistakes():
  workers = demo_optax.Workers.simulated(2)
  params = jax.tree.map(jnp.asarray, random_tree(9, SHAPES))
  gradients = random_tree(0, SHAPES, lead=(2,))

  def update(transforms, labels=LABELS, params=params):
    tx = demo_optax.partition(transforms, labels, workers=workers)
    return tx.update(gradients, tx.init(params), params)

  exchange = demo_optax.scale_by_demo(workers=workers)
  plain = {'hidden': exchange, 'embedding': optax.sgd(0.1),
           'dense': optax.sgd(0.1)}
  with pytest.raises(ValueError, match='embedding'):
    update({'hidden': exchange, 'dense': exchange})
  with pytest.raises(ValueError, match='same workers'):
    update({**plain, 'hidden': demo_optax.scale_by_demo(workers=on_mesh(2))})
  with pytest.raises(ValueError, match=r"\['hidden'\] has 2 exchanges"):
    twice = optax.chain(
        exchange,
        optax.stateless(lambda u, p: jax.tree.map(
            lambda x: jnp.stack([x, x]), u)),
        exchange)
    update({**plain, 'hidden': twice})
  with pytest.raises(ValueError, match=r"'a'.*shape \(1, 32, 24\).*\(32, 24\)"):
    grown = optax.stateless(lambda u, p: jax.tree.map(lambda x: x[None], u))
    update({**plain, 'hidden': optax.chain(exchange, grown)})
  with pytest.raises(ValueError, match='one gradient per worker'):
    mean = demo_optax.average(workers=workers)
    update({**plain, 'dense': optax.chain(mean, optax.sgd(0.1))})
  with pytest.raises(ValueError, match='needs params'):
    tx = demo_optax.partition(plain, LABELS, workers=workers)
    tx.update(gradients, tx.init(params))
  with pytest.raises(TypeError, match=r"transforms\['dense'\]=0.1"):
    demo_optax.partition({**plain, 'dense': 0.1}, LABELS, workers=workers)
  with pytest.raises(TypeError, match='workers=2'):
    demo_optax.partition(plain, LABELS, workers=2)
  with pytest.raises(TypeError, match='transforms='):
    demo_optax.partition([exchange], LABELS, workers=workers)
  with pytest.raises(ValueError, match='leave out average'):
    mean = demo_optax.average(workers=workers)
    update({**plain, 'dense': optax.chain(mean, optax.sgd(0.1))})
  with pytest.raises(ValueError, match='inside of another one'):
    inner = demo_optax.partition(
        {'x': exchange}, lambda p: jax.tree.map(lambda _: 'x', p),
        workers=workers)
    update({**plain, 'hidden': inner})


def test_empty_parts_know_nothing():
  """What is known is of a part that exchanges, whichever comes first."""
  workers = demo_optax.Workers.simulated(2)
  exchange = demo_optax.scale_by_demo(workers=workers)
  tx = demo_optax.partition(
      {'a_unused': exchange, 'b': exchange},
      {'n': 'a_unused', 'w': 'b'}, workers=workers)
  params = {'n': jnp.arange(3), 'w': jnp.zeros((8, 8))}
  gradients = {'n': np.zeros((2, 3), jax.dtypes.float0),
               'w': jnp.ones((2, 8, 8)).at[0].set(jnp.nan)}
  _, state = tx.update(gradients, tx.init(params), params)
  assert int(demo_optax.exchange_info(state)['num_excluded']) == 1


def test_dense_leaves_of_several_devices():
  """The plan counts what each device all-reduces, replicated or sharded."""
  mesh = jax.make_mesh(
      (2, 2), ('replica', 'fsdp'),
      axis_types=(jax.sharding.AxisType.Auto,) * 2)
  specs = {'w': P('fsdp', None), 'e': P('fsdp', None), 'n': P()}
  workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)
  params = workers.device_put(random_tree(
      0, {'w': (32, 16), 'e': (40, 8), 'n': (33,)}))
  code = demo_optax.dct_topk(16, 4)
  tx = demo_optax.partition(
      {'x': demo_optax.scale_by_demo(code, workers=workers),
       'dense': optax.sgd(0.1)},
      {'w': 'x', 'e': 'dense', 'n': 'dense'}, workers=workers)
  state = workers.device_put(tx.init(params))
  gradients = {
      k: jax.device_put(g, NamedSharding(mesh, P('replica', *specs[k])))
      for k, g in random_tree(
          1, {'w': (32, 16), 'e': (40, 8), 'n': (33,)}, lead=(2,)).items()}
  found = demo_optax.collectives(
      jax.jit(tx.update).lower(gradients, state, params).compile(), mesh)
  plan = demo_optax.plan(params, {'w': code, 'e': None, 'n': None}, workers)
  moved = sum(c.received_bytes for c in found
              if c.axes == ('replica',) and 's32' not in str(c.shapes))
  assert moved == plan.device_bytes['replica',]
