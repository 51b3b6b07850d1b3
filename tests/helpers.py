"""Meshes, gradients and comparisons that many tests share."""

import contextlib
import json
import math
import pathlib
import time

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint
from demo_optax.__main__ import paper_model as shapes_of  # noqa: F401
from demo_optax._paths import is_stacked, path_keys
from demo_optax.checkpoint.buckets import coding_of, encode, fill_bucket
from demo_optax.numerics import topk as selection

ROOT = pathlib.Path(__file__).parents[1]
MESHES = {'auto': AxisType.Auto, 'explicit': AxisType.Explicit}

SHAPES = {  # every kind of chunk compiles; test_oracle.py has many more
  'matrix': (64, 64),
  'padded': (97, 67),
  'bias': (70,),
  'scalar': (),
}


def mesh_of(shape, kind='auto'):
  """A mesh with axes of these names and sizes."""
  return jax.make_mesh(
    tuple(shape.values()),
    tuple(shape),
    axis_types=(MESHES[kind],) * len(shape),
    devices=jax.devices()[: math.prod(shape.values())],
  )


def make_mesh(count=4, kind='auto'):
  return mesh_of({'data': count}, kind)


def on_mesh(count=4, kind='auto'):
  return demo_optax.Workers.on_mesh(make_mesh(count, kind), 'data')


@contextlib.contextmanager
def make_workers(kind, count=4):
  """Simulated workers, or those of a mesh; an Explicit mesh is the context's."""
  if kind == 'simulated':
    yield demo_optax.Workers.simulated(count)
    return
  workers = on_mesh(count, kind)
  with (
    jax.set_mesh(workers.mesh)
    if kind == 'explicit'
    else (contextlib.nullcontext())
  ):
    yield workers


def stacked(tree, workers, specs=None):
  """Stacked gradients, each at its worker; there sharded as their specs say."""
  if workers.mesh is None:
    return tree
  place = lambda spec: NamedSharding(
    workers.mesh, P(workers.axis_name, *(spec or ()))
  )
  return jax.device_put(
    tree, {k: place(specs.get(k)) for k in tree} if specs else place(None)
  )


def make_step(tx, workers, loss_fn, batch_argnums=2, **options):
  """The usual step, written for one worker: `(params, state, x)`."""

  @demo_optax.data_parallel(workers, batch_argnums=batch_argnums, **options)
  def train_step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn, allow_int=True)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step


def make_mesh_2d(kind='auto', shape=(2, 4), names=('data', 'fsdp')):
  """Workers of several devices."""
  return mesh_of(dict(zip(names, shape)), kind)


def merge(indices, values, present, n, average):
  """The average of what workers selected, dense."""
  return selection.merge(indices, values, present, n, average)[0]


def random_tree(seed, shapes=None, lead=()):
  rng = np.random.default_rng(seed)
  shapes = SHAPES if shapes is None else shapes
  return {
    k: rng.normal(size=(*lead, *s)).astype(np.float32)
    for k, s in shapes.items()
  }


def updates_of(tx, params, gradients):
  """The updates of each step, of the same parameters, and the last state."""
  state, update, seen = tx.init(params), jax.jit(tx.update), []
  for g in gradients:
    updates, state = update(g, state, params)
    seen.append(updates)
  return seen, state


def resized(state, n):
  """A state of simulated workers, or of NumPy, for `n` of them."""

  def of_n(path, x):
    if not is_stacked(path_keys(path)):
      return x
    shape = n, *x.shape[1:]
    return (
      np.zeros(shape, x.dtype)
      if isinstance(x, np.ndarray)
      else jax.ShapeDtypeStruct(shape, x.dtype)
    )

  like = jax.tree_util.tree_map_with_path(of_n, state)
  return checkpoint.from_leaves(checkpoint.to_leaves(state), like, resize=True)


def with_momentum(state, moments):
  """An exchange's state with this momentum, given in parameter space."""
  layout, own, made = state.layout.layout, state.worker_stacked, {}
  for number, bucket in enumerate(layout.buckets):
    given = {}
    for member, leaf in layout.members(number).items():
      given[member] = encode(moments[leaf.name], coding_of(leaf))
    like = own.momentum[bucket.name]
    made[bucket.name] = fill_bucket(layout, number, given, like)
  return state._replace(worker_stacked=own._replace(momentum=made))


def results(name):
  """What benchmarks have recorded, in JSON or a record in each line."""
  text = (ROOT / 'benchmarks/results' / name).read_text()
  if name.endswith('.json'):
    return json.loads(text)
  return [json.loads(line) for line in text.splitlines()]


def assert_same_bits(a, b):
  flat_a, tree_a = jax.tree_util.tree_flatten_with_path(a)
  flat_b, tree_b = jax.tree.flatten(b)
  assert tree_a == tree_b
  for (path, x), y in zip(flat_a, flat_b):
    name = jax.tree_util.keystr(path)
    x, y = np.asarray(x), np.asarray(y)
    if '.metrics[' in name and x.dtype == np.float32:
      # Sums over everything, only looked at: in another order elsewhere.
      np.testing.assert_allclose(x, y, rtol=1e-5, err_msg=name)
    else:
      np.testing.assert_array_equal(x, y, err_msg=name)


def own(state):
  """Everything in a state that lies under `worker_stacked`, by its path."""
  flat = jax.tree_util.tree_flatten_with_path(state)[0]
  leaves = {jax.tree_util.keystr(path): x for path, x in flat}
  return {name: x for name, x in leaves.items() if 'worker_stacked' in name}


def assert_devices_agree(tree):
  """Every device that holds a part of an array holds the same bits of it."""
  for leaf in jax.tree.leaves(tree):
    parts = {}
    for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
      x = np.asarray(shard.data)
      np.testing.assert_array_equal(parts.setdefault(str(shard.index), x), x)


def wait_until(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not happen in time'
    time.sleep(0.01)


class Compilations:
  """Counts what XLA compiled since it was made or reset."""

  count = 0

  def __init__(self):
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event, *_, **__):
    self.count += event == '/jax/core/compile/backend_compile_duration'


COMPILATIONS = Compilations()
