"""The kernels, interpreted, against the plain functions; and lowered."""

import contextlib
import functools
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, random_tree
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.compressors import Dct
from demo_optax.engine import heuristics as paths
from demo_optax.engine import pallas_common as kernel_math
from demo_optax.engine.pallas import Kernels
from demo_optax.engine.pallas_common import Cut

pytestmark = [
    pytest.mark.core,
    # Of Pallas' Triton backend, from jax 0.12 on.
    pytest.mark.filterwarnings('ignore:.*Pallas Triton.*'),
]

DECAY = 0.75  # which is exact, and so is the product with few digits
TOLERANCE = 6e-6  # of float32 sums of up to 128 products, twice, times 2


def slow(*args):
  return pytest.param(*args, marks=pytest.mark.slow)


# Backend, chunk size, k, shapes of leaves, the gradients' dtype.
CASES = [
    ('gpu', 32, 4, [(64, 96), (2, 32, 32), (256,), (64,)], 'float32'),
    ('gpu', 32, 64, [(32, 64)], 'bfloat16'),
    ('gpu', 64, 32, [(64, 128)], 'float32'),
    ('gpu', 128, 1, [(128, 128)], 'float32'),
    ('tpu', 32, 4, [(128, 256), (256,)], 'float32'),
    # Seconds to compile:
    slow('tpu', 64, 64, [(128, 512)], 'bfloat16'),
    slow('tpu', 128, 1, [(128, 1024)], 'float32'),
]


def make_plans(shapes, chunk_size, k):
  compressor = demo_optax.dct_topk(chunk_size, k)
  return [compressor.plan(shape, jnp.float32) for shape in shapes]


def held_momentum(rng, plan):
  """Few values, so many ties; chunks of zeros, of one value, of one number."""
  shape = plan.grid.num_chunks, plan.grid.chunk_size
  m = rng.integers(-3, 4, shape).astype(np.float32)
  m[0] = 0
  m[-1] = np.where(np.arange(shape[1]) % 2, -1, 1)
  if len(m) > 2:
    m[1] = 0
    m[1, 7] = -(2.0 ** 120)  # more than is sent at once
  return m.reshape(plan.grid.coefficients_shape)


def encoder(backend, plans, limits):
  kernels = Kernels(backend, interpret=True)
  return jax.jit(lambda g, m, present: kernels.encode(
      Dct().matrix, plans, g, m, DECAY, 2.0, present, limits))


# What the plain functions do, in NumPy and float64: nothing to compile.


def top_k(c, k):
  return np.sort(np.argsort(-np.abs(c), axis=-1, kind='stable')[..., :k], -1)


def put(c, indices, values):
  c = np.array(c)
  np.put_along_axis(c, np.asarray(indices), np.asarray(values), -1)
  return c


def transform(x, plan):
  """`[chunks, n]`."""
  cut = Cut.of(plan.grid)
  x = np.asarray(x, np.float64).reshape(
      cut.row_chunks, cut.row_length, cut.col_chunks, cut.col_length)
  rows, cols = map(Dct().matrix, cut.kind)
  return np.einsum('iajb,ua,vb->ijvu', x, rows, cols).reshape(-1, cut.n)


def transform_back(c, plan):
  cut = Cut.of(plan.grid)
  c = c.reshape(cut.row_chunks, cut.col_chunks, cut.col_length, cut.row_length)
  rows, cols = map(Dct().matrix, cut.kind)
  return np.einsum('ijvu,ua,vb->iajb', c, rows, cols).reshape(plan.grid.shape)


@pytest.mark.parametrize('backend, chunk_size, k, shapes, dtype', CASES)
def test_encode(backend, chunk_size, k, shapes, dtype):
  rng = np.random.default_rng(0)
  plans = make_plans(shapes, chunk_size, k)
  encode = encoder(backend, plans, [p.format.largest_sent for p in plans])
  ties = [held_momentum(rng, plan) for plan in plans]
  nothing = [np.zeros(shape, jnp.dtype(dtype)) for shape in shapes]

  # Without a gradient nothing is rounded: the same bits, ties included.
  for plan, m, found in zip(plans, ties, encode(nothing, ties, True)):
    c = DECAY * m.reshape(-1, plan.grid.chunk_size)
    indices = top_k(c, k)
    values = np.take_along_axis(c, indices, 1)
    most = plan.format.largest_sent
    rest = put(c, indices, values - np.clip(values, -most, most))
    assert_same_bits(found, (rest, indices, values))

  gradients = [
      rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]
  momentum = [rng.normal(size=m.shape).astype(np.float32) for m in ties]
  done = encode(gradients, momentum, True)
  for plan, g, m, (rest, indices, values) in zip(plans, gradients, momentum, done):
    # What was selected is a selection of just these numbers, exactly ...
    assert not np.take_along_axis(np.asarray(rest), np.asarray(indices), 1).any()
    whole = put(rest, indices, values)
    np.testing.assert_array_equal(indices, top_k(whole, k))
    # ... which are those of the formula but for rounding.
    c = 2 * transform(g, plan) + DECAY * m.reshape(whole.shape)
    np.testing.assert_allclose(whole, c, atol=TOLERANCE)
    np.testing.assert_array_equal(indices, top_k(c, k))

  # Whoever is left out keeps momentum, whatever the gradient, and writes a
  # selection that can be packed.
  gradients[0].flat[0] = np.nan
  done = encode(gradients, momentum, False)
  for m, (kept, indices, values) in zip(momentum, done):
    np.testing.assert_array_equal(kept, m.reshape(kept.shape))
    np.testing.assert_array_equal(indices, top_k(np.asarray(kept), k))
    np.testing.assert_array_equal(
        values, np.take_along_axis(np.asarray(kept), np.asarray(indices), 1))


@pytest.mark.parametrize('backend', ['gpu', 'tpu'])
def test_encode_leaves_what_is_taken_away_later(backend):
  rng = np.random.default_rng(0)
  plans = make_plans([(512,)], 32, 4)
  m = rng.normal(size=plans[0].grid.coefficients_shape).astype(np.float32)
  ((kept, indices, values),) = encoder(backend, plans, [None])(
      [np.zeros(512, np.float32)], [m], True)
  np.testing.assert_array_equal(kept, np.float32(DECAY) * m)
  np.testing.assert_array_equal(indices, top_k(np.asarray(kept), 4))
  np.testing.assert_array_equal(
      values, np.take_along_axis(np.asarray(kept), np.asarray(indices), 1))


@pytest.mark.parametrize('rows, n, k', [(9, 64, 1), (9, 64, 32), (9, 64, 63)])
def test_mask_takes_the_lowest_index_on_ties(rows, n, k):
  find = jax.jit(lambda c: kernel_math.top_k_mask(c, k, jnp.max))
  rng = np.random.default_rng(k)
  c = rng.integers(-2, 3, (rows, n)).astype(np.float32)
  c[0] = 0
  c[1] = -0.0
  c[2] = 7
  c[3] = rng.normal(size=n)
  c[4, ::3] = np.inf
  c[5] = np.linspace(1, 2, n) * 1e-40  # subnormal
  c[6] = 3e38
  mask = np.asarray(find(c))
  expected = top_k(c, k)
  np.testing.assert_array_equal(mask.sum(1), k)
  np.testing.assert_array_equal(np.nonzero(mask)[1].reshape(rows, k), expected)
  c[7, :5] = np.nan
  c[8] = -np.nan
  np.testing.assert_array_equal(np.asarray(find(c)).sum(1), k)


DECODED = [
    # backend, chunk size, k, shapes, workers, average
    ('gpu', 32, 4, [(64, 96), (2, 32, 32), (256,), (64,)], 3, 'senders'),
    ('gpu', 32, 4, [(32, 64)], 1, 'senders'),
    ('gpu', 32, 1, [(32, 32)], 256, 'senders'),
    ('gpu', 64, 32, [(64, 64)], 3, 'workers'),
    ('gpu', 128, 64, [(128, 128)], 2, 'senders'),
    ('tpu', 32, 4, [(128, 128), (256,)], 3, 'senders'),
    ('tpu', 64, 32, [(128, 128)], 8, 'senders'),
    ('tpu', 128, 1, [(128, 128)], 256, 'workers'),
]


@pytest.mark.parametrize('backend, chunk_size, k, shapes, workers, average', DECODED)
def test_decode(backend, chunk_size, k, shapes, workers, average):
  rng = np.random.default_rng(0)
  plans = make_plans(shapes, chunk_size, k)
  kernels = Kernels(backend, interpret=True)
  present = np.arange(workers) != 1
  selections = []
  for plan in plans:
    size = workers, plan.grid.num_chunks, plan.grid.chunk_size
    # few places, so that many are sent by several
    c = rng.normal(size=size) * (rng.random(size[1:]) < 3 * k / size[-1])
    indices = np.sort(np.argsort(-np.abs(c), -1)[..., :k]).astype(np.int32)
    values = rng.normal(size=indices.shape).astype(np.float32)
    values[~present] = np.nan
    selections.append((indices, values))

  def decode(selections, present):
    return kernels.decode(
        Dct().matrix, plans, selections, [present] * len(plans), average)

  for plan, (i, v), update in zip(
      plans, selections, jax.jit(decode)(selections, present)):
    zeros = np.zeros((plan.grid.num_chunks, plan.grid.chunk_size))
    sums = sum(put(zeros, i[w], v[w]) for w in np.flatnonzero(present))
    counts = sum(put(zeros, i[w], 1) for w in np.flatnonzero(present))
    counts = counts if average == 'senders' else present.sum()
    expected = transform_back(sums / np.maximum(counts, 1), plan)
    assert update.shape == plan.grid.shape
    np.testing.assert_allclose(update, expected, atol=TOLERANCE)


@pytest.mark.parametrize('backend', ['gpu', 'tpu'])
def test_decode_signs_and_nobody(backend):
  plans = make_plans([(512,)], 32, 4)
  kernels = Kernels(backend, interpret=True)
  rng = np.random.default_rng(0)
  indices = np.tile(np.arange(4, dtype=np.int32), (2, 16, 1))
  values = rng.normal(size=indices.shape).astype(np.float32)

  def decode(present, signed):
    (update,) = kernels.decode(
        Dct().matrix, plans, [(indices, values)], [jnp.asarray(present)],
        'senders', signed=signed)
    return np.asarray(update)

  both = [True, True]
  np.testing.assert_array_equal(decode(both, True), np.sign(decode(both, False)))
  assert not decode([False, False], False).any()


# The step as a whole.

SHAPES = {'matrix': (32, 64), 'gain': (5,)}


def make_tx(workers, kernels, values='float32', alpha=1.0):
  compressor = demo_optax.dct_topk(32, 4, values=values)
  return demo_optax.scale_by_demo(
      compressor, 0.9, workers=workers, alpha=alpha, kernels=kernels)


def steps(update, state, place=lambda g: g):
  seen = []
  for step in range(2):
    gradients = random_tree(step, SHAPES, lead=(2,))
    gradients['matrix'][1, 0, 3] = np.nan if step else 0
    updates, state = update(place(gradients), state)
    seen.append((updates, state))
  return seen


@functools.cache
def simulate(kernels, *options):
  tx = make_tx(demo_optax.Workers.simulated(2), kernels, *options)
  params = random_tree(9, SHAPES)
  update = jax.jit(lambda g, s: tx.update(g, s, params))
  return steps(update, tx.init(params))


@pytest.mark.parametrize('options', [(), slow(('int8', 0.5))])
def test_steps(options):
  found, expected = simulate(True, *options), simulate(False, *options)
  for (updates, state), (plain, plain_state) in zip(found, expected):
    momenta = state.worker_stacked, plain_state.worker_stacked
    for a, b in zip(jax.tree.leaves((updates, momenta[0])),
                    jax.tree.leaves((plain, momenta[1]))):
      np.testing.assert_allclose(a, b, atol=TOLERANCE)
  assert [int(state.metrics['num_excluded']) for _, state in found] == [0, 1]
  if not options:  # with them, the leaf that no kernel merges is sent whole
    senders = [float(state.metrics['mean_senders']) for _, state in found]
    assert 1 <= senders[0] <= 2 and senders[1] == 1
  # the worker that was left out, and leaves that no kernel is for
  first, second = (state.worker_stacked.momentum for _, state in found)
  for name in first:
    np.testing.assert_array_equal(first[name][1], second[name][1])
  (other,) = (name for name in first if '32x32' not in name)
  assert_same_bits(
      first[other], expected[0][1].worker_stacked.momentum[other])


def test_simulated_equals_shard_map():
  mesh = jax.make_mesh(
      (2,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  workers = demo_optax.Workers.on_axis('data')
  tx = make_tx(workers, True)
  specs = demo_optax.state_specs(tx, random_tree(9, SHAPES), workers)

  def step(gradients, state):
    return tx.update(jax.tree.map(lambda g: g[0], gradients), state, None)

  update = jax.jit(jax.shard_map(
      step, mesh=mesh, in_specs=(P('data'), specs), out_specs=(P(), specs),
      check_vma=False))  # in which JAX does not interpret kernels
  simulated = make_tx(demo_optax.Workers.simulated(2), True)
  found = steps(update, simulated.init(random_tree(9, SHAPES)))
  assert_same_bits(found, simulate(True))


def test_interpreting_on_a_mesh_is_refused():
  mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
  workers = demo_optax.Workers.on_mesh(mesh, 'data')
  tx = make_tx(workers, True)
  params = workers.device_put({'w': jnp.zeros((32, 64))})
  with pytest.raises(ValueError, match=r'check_vma=False'):
    tx.update(
        jax.device_put({'w': np.zeros((2, 32, 64), np.float32)},
                       jax.NamedSharding(mesh, P('data'))),
        tx.init(params), params)


# Which leaves, and where.


@pytest.mark.parametrize('shape, chunk_size, k, dtype, gpu, tpu', [
    ((256, 1024), 64, 32, 'float32', True, True),
    ((256, 1024), 64, 32, 'bfloat16', True, True),
    ((4, 128, 1024), 128, 64, 'float32', True, True),
    ((64, 64), 64, 8, 'float32', True, False),  # less than 128 rows
    ((128, 128), 32, 8, 'float32', True, False),  # less than 8 chunks beside
    ((96, 256), 64, 8, 'float32', False, False),  # chunks of 48
    ((97, 1024), 64, 8, 'float32', False, False),  # padded
    ((256, 1024), 16, 8, 'float32', False, False),
    ((256, 1024), 64, 65, 'float32', False, False),
    ((256, 1024), 64, 8, 'float16', False, False),
    ((4096,), 64, 4, 'float32', True, True),
    ((50,), 64, 4, 'float32', False, False),
    ((32,), 64, 32, 'float32', False, False),  # sent whole
])
def test_leaves(shape, chunk_size, k, dtype, gpu, tpu):
  (plan,) = make_plans([shape], chunk_size, k)
  gradient = jax.ShapeDtypeStruct(shape, dtype)
  assert Kernels('gpu').apply(plan, gradient) == gpu
  assert Kernels('tpu').apply(plan, gradient) == tpu
  assert not Kernels(None).apply(plan, gradient)


def test_float64_stays_plain():
  plan = demo_optax.dct_topk().plan((256, 1024), jnp.float64)
  gradient = jax.ShapeDtypeStruct((256, 1024), 'float32')
  assert not Kernels('gpu').apply(plan, gradient)


def test_backends(monkeypatch):
  assert Kernels.chosen(None) == Kernels.chosen(False) == Kernels(None)
  assert Kernels.chosen(True) == Kernels('gpu', interpret=True)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert Kernels.chosen(True) == Kernels('tpu')
  assert Kernels.chosen(False) == Kernels(None)
  monkeypatch.setattr(paths, 'MEASURED', {'tpu'})
  assert Kernels.chosen(None) == Kernels('tpu')


@pytest.mark.parametrize('capability, sizes', [
    ('9.0', [32, 64, 128]), ('8.6', [32, 64]), ('7.5', []), ('gfx90a', [])])
def test_gpus_of_before(monkeypatch, capability, sizes):
  class Device:
    compute_capability = capability

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [Device])
  gradient = jax.ShapeDtypeStruct((128, 128), 'float32')
  assert sizes == [
      s for s in (32, 64, 128)
      if Kernels('gpu').apply(*make_plans([gradient.shape], s, 8), gradient)]


# Lowering, which needs no such device.

DEVICES = {
    'gpu': ('cuda', 'NVIDIA H100 80GB HBM3', '__gpu$xla.gpu.triton'),
    'tpu': ('tpu', 'TPU v5 lite', 'tpu_custom_call'),
}


@contextlib.contextmanager
def pretend(backend, axes=(), kind=AxisType.Auto):
  """A mesh of devices that are not there."""
  _, name, _ = DEVICES[backend]
  mesh = jax.sharding.AbstractMesh(
      (2,) * len(axes), axes, axis_types=(kind,) * len(axes),
      abstract_device=jax.sharding.AbstractDevice(name, 1, backend))
  with jax.sharding.use_abstract_mesh(mesh):
    yield mesh


def lowered(backend, fun, *args):
  """How often kernels are called in the lowered function."""
  platform, _, name = DEVICES[backend]
  checks = [export.DisabledSafetyCheck.custom_call(name)]
  exported = export.export(
      jax.jit(fun), platforms=[platform], disabled_checks=checks)(*args)
  return len(re.findall(re.escape(f'custom_call @{name}('), exported.mlir_module()))


LOWERED = [
    # chunk size, k, shapes, the gradients' dtype, workers, under vmap
    (32, 4, [(256, 1024), (2, 128, 256), (512,), (256,)], 'bfloat16', 2, True),
    (64, 32, [(256, 1024)] * 3, 'float32', 1, False),
    (64, 1, [(128, 1024)], 'bfloat16', 256, True),
    (128, 64, [(128, 1024)], 'float32', 16, False),
]


@pytest.mark.parametrize('backend', ['gpu', 'tpu'])
@pytest.mark.parametrize('chunk_size, k, shapes, dtype, workers, stacked', LOWERED)
def test_lowering(backend, chunk_size, k, shapes, dtype, workers, stacked):
  plans = make_plans(shapes, chunk_size, k)
  kernels = Kernels(backend)
  assert all(kernels.apply(p, jax.ShapeDtypeStruct(s, dtype))
             for p, s in zip(plans, shapes))
  limits = [p.format.largest_sent for p in plans]

  def encode(gradients, momentum, present):
    return kernels.encode(
        Dct().matrix, plans, gradients, momentum, 0.9, 1.0, present, limits)

  def decode(selections, present):
    return kernels.decode(
        Dct().matrix, plans, selections, [present] * len(plans), 'senders')

  lead = (5,) if stacked else ()
  with pretend(backend):
    struct = jax.ShapeDtypeStruct
    encoded = lowered(
        backend, jax.vmap(encode) if stacked else encode,
        [struct((*lead, *s), dtype) for s in shapes],
        [struct((*lead, *p.grid.coefficients_shape), jnp.float32) for p in plans],
        struct(lead, bool))
    sizes = [(workers, p.grid.num_chunks, k) for p in plans]
    decoded = lowered(
        backend, decode,
        [(struct(s, jnp.int32), struct(s, jnp.float32)) for s in sizes],
        struct((workers,), bool))
  matrices = sum(len(shape) > 1 for shape in shapes)
  vectors = int(matrices < len(shapes))  # all in one launch
  launches = vectors + (1 if backend == 'gpu' else matrices)
  assert encoded == decoded == launches


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('backend', ['gpu', 'tpu'])
def test_lowering_a_step_in_shard_map(monkeypatch, backend, kind):
  """In one that tracks what varies, too."""
  monkeypatch.setattr(paths, 'kernels', lambda wanted: backend)
  shapes = {'w': (128, 256), 'b': (256,), 'gain': (5,)}
  workers = demo_optax.Workers.on_axis('data')
  tx = make_tx(workers, True)
  struct = jax.ShapeDtypeStruct
  params = {name: struct(shape, jnp.float32) for name, shape in shapes.items()}
  gradients = {k: struct((2, *v.shape), v.dtype) for k, v in params.items()}
  simulated = make_tx(demo_optax.Workers.simulated(2), False)
  state = jax.eval_shape(simulated.init, params)

  with pretend(backend, ('data',), kind) as mesh:
    specs = demo_optax.state_specs(tx, params, workers)
    args = jax.tree.map(
        lambda x, spec: struct(
            x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)),
        (gradients, state), ({k: P('data') for k in gradients}, specs))

    def step(gradients, state):
      return tx.update(jax.tree.map(lambda g: g[0], gradients), state, None)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P('data'), specs), out_specs=(P(), specs))
    # TPUs want tiles of 128 columns, which a bucket of smaller chunks has not.
    assert lowered(backend, mapped, *args) == (4 if backend == 'gpu' else 2)


@pytest.mark.slow
def test_device_benchmark(tmp_path):
  """What is measured on a device, with small sizes, interpreted."""
  script = pathlib.Path(__file__).parents[2] / 'benchmarks' / 'device.py'
  out = tmp_path / 'device.json'
  subprocess.run(
      [sys.executable, script, '--tiny', '--out', out], check=True, timeout=600)
  found = json.loads(out.read_text())
  assert list(found['missing']) == ['variants']  # they are for GPUs
  (encode,) = (v for k, v in found['correct'].items() if 'encode' in k)
  assert encode['ties exact'] and encode['left out keeps momentum']
  assert encode['chunks otherwise than float64'] == 0
  assert all(x['differing'] == 0 for x in found['same'].values())
  rows = found['times']['tiny']['rows']
  assert {'copy', 'encode', 'decode', 'adamw', 'sgd'} < set(rows)
  # Without --tiny there is nothing to do on a CPU, and it says so.
  subprocess.run([sys.executable, script, '--out', out], check=True, timeout=600)
  assert list(json.loads(out.read_text())['missing']) == ['everything']
