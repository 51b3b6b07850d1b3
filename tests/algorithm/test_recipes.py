"""`demo_muon`: against NumPy, in its parts, and with every kind of leaf."""

import contextlib

import chex
import helpers
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from oracle import Oracle

import demo_optax
from demo_optax import recipes
from demo_optax.recipes import links

pytestmark = pytest.mark.usefixtures('rank_promotion')

TWO = demo_optax.Workers.simulated(2)
EVERYTHING = demo_optax.compressors.full()


def numpy_newton_schulz(x):
  flip = x.shape[0] > x.shape[1]
  x = x.T if flip else x
  # Almost orthogonal layers: each row by the root of its sum in the Gramian.
  x = x / np.sqrt(np.abs(x @ x.T).sum(1, keepdims=True))
  for a, b, c in (
    (8.222, -23.347, 16.634),
    (3.972, -2.843, 0.517),
    (3.447, -2.442, 0.46),
    (2.515, -1.801, 0.409),
  ):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x.T if flip else x


def numpy_demo_muon(
  params, gradients, rate, *, limit, topk, values, rest, share
):
  """Yields parameters; gradients are lists, over steps, of `[N, ...]`."""
  beta, decay, b2 = 0.95, 0.9, 0.95
  count = len(gradients[0]['w'])
  oracles = {
    name: Oracle(
      params[name].shape,
      count,
      limit=limit,
      topk=k,
      values=values,
      decay=decay,
      average='workers',
      gradient_weight=1 - decay,
    )
    for name, k in (('w', topk), ('norm', rest))
  }
  params = dict(params)
  own = np.zeros((count, *params['w'].shape))
  moment = np.zeros(params['norm'].shape)
  steps = np.zeros(count, int)
  for t, g in enumerate(gradients, 1):
    sent = np.full_like(own, np.nan)
    good = [
      np.isfinite(g['w'][i]).all() and np.isfinite(g['norm'][i]).all()
      for i in range(count)
    ]
    for i in np.flatnonzero(good):
      steps[i] += 1
      own[i] = beta * own[i] + (1 - beta) * g['w'][i]
      hat = beta * own[i] / (1 - beta ** (steps[i] + 1)) + (1 - beta) * g['w'][
        i
      ] / (1 - beta ** steps[i])
      sent[i] = numpy_newton_schulz(hat)
    # A worker is excluded as a whole.
    norms = np.where(np.array(good)[:, None], g['norm'], np.nan)
    u = oracles['w'].exchange(sent)
    u = u / np.sqrt(np.mean(u * u))
    # Muon's length by fan_in, longer for what waits in the residual.
    u = u / np.sqrt(len(u) * (1 - decay * (1 - share)))
    params['w'] = params['w'] - rate * u
    u = oracles['norm'].exchange(norms)
    moment = b2 * moment + (1 - b2) * u * u
    step = u / (np.sqrt(moment / (1 - b2**t)) + 1e-8)
    params['norm'] = params['norm'] - rate * step
    yield params


@pytest.mark.core
@pytest.mark.parametrize('values', ['float32', 'sign'])
def test_oracle(values, x64):
  """Momentum, Newton-Schulz, exchange, norm and Adam, one worker with NaN."""
  rng = np.random.default_rng(0)
  shapes = {'w': (24, 40), 'norm': (31,)}
  params = {k: rng.normal(size=s) for k, s in shapes.items()}
  gradients = [
    {k: rng.normal(size=(3, *s)) for k, s in shapes.items()} for _ in range(8)
  ]
  gradients[2]['norm'][1, 5] = np.nan  # a leaf of it is enough
  gradients[5]['w'][0] = np.inf
  workers = demo_optax.Workers.simulated(3)
  compressor = {
    name: demo_optax.dct_topk(16, k, values=values, proportional=False)
    for name, k in (('w', 9), ('norm', 5))
  }
  tx = demo_optax.demo_muon(0.01, workers=workers, compressor=compressor)
  state, found = tx.init(params), params
  update = jax.jit(tx.update)
  expected = numpy_demo_muon(
    params,
    gradients,
    0.01,
    limit=16,
    topk=9,
    values=values,
    rest=5,
    share=9 / (12 * 14),  # 24x40 has six chunks of up to 12x14
  )
  for g, want in zip(gradients, expected):
    updates, state = update(g, state, found)
    found = optax.apply_updates(found, updates)
    for name in shapes:
      np.testing.assert_allclose(found[name], want[name], atol=1e-9)


# What a leaf is ---------------------------------------------------------------


def update_of(
  params, gradients, rate=1.0, make=demo_optax.demo_muon, **options
):
  """The update of two workers' first step, and the state after it."""
  tx = make(rate, workers=TWO, **options)
  return jax.jit(tx.update)(gradients, tx.init(params), params)


def orthonormalised(params, gradients, **options):
  """The update of one step in which everything is sent, as float32."""
  return update_of(
    params, gradients, other_learning_rate=1.0, compressor=EVERYTHING, **options
  )[0]


def rms(x):
  return np.sqrt(np.mean(np.square(x)))


def default_rms(fan_in):
  """The length of an update at a rate of one; a quarter is sent."""
  return (fan_in / 4) ** -0.5


@jax.numpy_dtype_promotion('standard')  # optax' Muon
@pytest.mark.parametrize('consistent_rms', [None, 0.2])
def test_updates_are_as_long_as_those_of_muon(consistent_rms):
  """One worker that sends everything; Newton-Schulz of optax until it is exact.

  Its few iterations leave singular values between 0.77 and 1.23.
  """
  shapes = {
    'square': (32, 32),
    'wide': (16, 96),
    'tall': (96, 16),
    'stack': (3, 32, 48),
  }
  params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
  gradients = helpers.random_tree(0, shapes)
  one = demo_optax.Workers.simulated(1)
  ours = demo_optax.demo_muon(
    0.02, workers=one, compressor=EVERYTHING, consistent_rms=consistent_rms
  )
  muon = contrib.muon(
    0.02,
    ns_coeffs=(1.5, -0.5, 0.0),
    ns_steps=30,
    muon_weight_dimension_numbers=recipes.muon_dimension_numbers,
    consistent_rms=consistent_rms,
  )
  stacked = jax.tree.map(lambda x: x[None], gradients)
  update = jax.jit(ours.update)
  found, _ = update(stacked, ours.init(params), params)
  expected, _ = jax.jit(muon.update)(gradients, muon.init(params), params)
  for name in shapes:
    x, y = found[name], expected[name]
    assert rms(x) == pytest.approx(rms(y), rel=1e-3)
    assert np.vdot(x, y) > 0.95 * x.size * rms(y) ** 2


def test_rates_that_are_injected():
  """A `consistent_rms` that is not finite excludes all workers."""
  params = {'up': jnp.ones((16, 16))}
  tx = optax.inject_hyperparams(demo_optax.demo_muon)(
    0.1, workers=TWO, consistent_rms=0.2, compressor=EVERYTHING
  )
  state, update = tx.init(params), jax.jit(tx.update)
  for value in (0.2, 0.4, np.nan):
    state.hyperparams['consistent_rms'] = jnp.asarray(value)
    updates, state = update({'up': jnp.ones((2, 16, 16))}, state, params)
    expected = 0.0 if np.isnan(value) else 0.1 * value
    np.testing.assert_allclose(rms(updates['up']), expected, rtol=1e-5)


def test_a_stack_of_layers_is_as_many_matrices():
  rng = np.random.default_rng(2)
  each = rng.normal(size=(2, 3, 24, 40)).astype(np.float32)
  found, _ = update_of({'layers': jnp.zeros((3, 24, 40))}, {'layers': each})
  expected, _ = update_of(
    {f'layer{i}': jnp.zeros((24, 40)) for i in range(3)},
    {f'layer{i}': each[:, i] for i in range(3)},
  )
  for i in range(3):
    np.testing.assert_allclose(
      found['layers'][i], expected[f'layer{i}'], atol=1e-6
    )
    assert rms(found['layers'][i]) == pytest.approx(default_rms(24))


def test_kernels_are_the_matrices_that_they_multiply_by():
  shapes = {
    'Conv_0': ((3, 3, 8, 16), (72, 16)),
    'query': ((24, 4, 8), (24, 32)),
    'out': ((4, 8, 24), (32, 24)),  # told by the query beside it
  }
  rng = np.random.default_rng(3)
  params, gradients, flat_params, flat_gradients = {}, {}, {}, {}
  for name, (shape, matrix) in shapes.items():
    gradient = rng.normal(size=(2, *shape)).astype(np.float32)
    params[name] = {'kernel': jnp.zeros(shape)}
    gradients[name] = {'kernel': gradient}
    key = f'w{len(flat_params)}'  # says nothing
    flat_params[key] = jnp.zeros(matrix)
    flat_gradients[key] = gradient.reshape(2, *matrix)
  found = orthonormalised(params, gradients)
  flat = orthonormalised(flat_params, flat_gradients)
  for (name, (_, matrix)), expected in zip(shapes.items(), flat.values()):
    np.testing.assert_allclose(
      found[name]['kernel'].reshape(matrix), expected, atol=1e-5
    )
    singular = np.linalg.svd(expected, compute_uv=False)
    # Of two workers' orthonormal matrices, of equal norm over all elements.
    assert singular.max() / singular.min() < 10


def kinds_of(params):
  """Counts of axes of matrices by path; None where a leaf is no matrix."""
  flat = jax.tree_util.tree_flatten_with_path(
    recipes.muon_dimension_numbers(params),
    is_leaf=lambda x: x is None or isinstance(x, contrib.MuonDimensionNumbers),
  )[0]
  return {
    '/'.join(str(getattr(k, 'key', getattr(k, 'name', k))) for k in path): x
    and (len(x.reduction_axis), len(x.output_axis))
    for path, x in flat
  }


def test_leaves_of_linen_modules():
  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.LayerNorm()(x)
      return nn.Dense(8)(x), None

  class Scanned(nn.Module):
    @nn.compact
    def __call__(self, tokens, image):
      x = nn.Embed(11, 8)(tokens)
      x = x + self.param('pos_embedding', nn.initializers.ones, (5, 8))
      x = nn.LayerNorm()(nn.MultiHeadDotProductAttention(2)(x))
      stack = nn.scan(
        Stack,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=3,
      )
      x, _ = stack(name='layers')(x)
      y = nn.Conv(4, (3, 3))(image).mean()
      return nn.Dense(11, name='lm_head')(x) + y

  shapes = jax.eval_shape(
    lambda key: Scanned().init(
      key, jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 6, 6, 3))
    ),
    jax.random.key(0),
  )['params']
  found, attention = kinds_of(shapes), 'MultiHeadDotProductAttention_0'
  assert len(found) == 20
  assert {name: axes for name, axes in found.items() if axes} == {
    **{
      f'{attention}/{name}/kernel': (1, 2) for name in ('query', 'key', 'value')
    },
    f'{attention}/out/kernel': (2, 1),
    'Conv_0/kernel': (3, 1),
    'layers/Dense_0/kernel': (1, 1),
  }


@pytest.mark.parametrize(
  'path, shape, expected',
  [
    # Haiku has several names in one key; Equinox says weight.
    ('net/~/lm/head|w', (64, 256), None),
    ('net/~/linear_1|w', (64, 256), (1, 1)),
    ('LMHead_0|kernel', (64, 256), None),
    ('classifier|kernel', (64, 10), None),
    ('to_logits|kernel', (64, 256), None),
    ('wte', (256, 64), None),
    ('token_embed1|embedding', (256, 64), None),
    ('time_embedding|linear|kernel', (64, 64), (1, 1)),
    ('any', (1, 64), None),
    ('', (2, 8, 8), (1, 1)),  # a leaf without a name
    # Attention has heads, and is not one.
    ('MultiHeadAttention_0|proj', (64, 64), (1, 1)),
    ('Head_0|query|kernel', (64, 16), (1, 1)),
    # Vectors of scanned layers; matrices with such letters in their names.
    ('layers|ln_1|weight', (12, 64), None),
    ('layers|linear|b', (12, 64), None),
    ('layers|RMSNorm_0|scale', (12, 64), None),
    ('linear|lora_b', (8, 64), (1, 1)),
    ('upscaler|kernel', (64, 64), (1, 1)),
    # Scanned layers are stacks, and so are experts.
    ('layers|query|kernel', (12, 64, 64), (1, 1)),
    ('layers|query|kernel', (12, 64, 4, 16), (1, 2)),
    ('layers|out|kernel', (12, 64, 64), (1, 1)),
    ('experts|kernel', (4, 4, 64, 32), (1, 1)),
    ('convert|experts|kernel', (8, 64, 32), (1, 1)),
    ('Conv_0|kernel', (3, 8, 16), (2, 1)),
    ('conv2d_1|w', (3, 3, 8, 16), (3, 1)),
    ('conv1|weight', (16, 8, 3, 3), (3, 1)),
    # By their windows: attributes of NNX, lists of Equinox.
    ('down|kernel', (3, 3, 8, 16), (3, 1)),
    ('layers|0|weight', (16, 3, 4, 4), (3, 1)),
    ('patches|kernel', (16, 16, 3, 64), (3, 1)),
  ],
)
def test_names(path, shape, expected):
  tree = jax.ShapeDtypeStruct(shape, 'float32')
  for part in reversed(path.split('|') if path else ()):
    tree = {part: tree}
  (found,) = kinds_of(tree).values()
  assert found == expected


NO_MATRICES = """
  token_embedder|weight
  embedder_block|segment_embedder|weight
  position_embedder|embedding
  embedder|input_embedding
  embed_tokens|embedding
  tok_emb|weight
  posemb|kernel
  n_embd|w
  unembed|kernel
  Unembedding_0|kernel
  embeddings|word_embeddings|embedding
  reversible_embedding|reverse_embeddings
  transformer|wpe|embedding
  to_vocab|kernel
  transformer|layers|stacked|ln_1|weight|0
  layers|input_layernorm|weight
  layers|post_attention_layernorm|scale
  layers|RMSNorm_0|w
  layers|norms|0|weight
  layers|q_norm|weight
  layer_normalization|gamma
  batch_normalization_1|beta
  lm_head|kernel
  lmhead|kernel
  policy_head|w
  heads|0|weight
  head|layers|0|weight
  classifier_head|weight
  Classification_0|kernel
  logits_dense|kernel
  net/~/to_logits|w
  layers|self_attention|query|bias
  layers|b1
  layers|mixer|A_log
  layers|layer_scale
  relative_attention_bias|embedding
  register_tokens
  rel_pos_h
  position_table
"""
MATRICES = """
  multi_head_attention|w
  multihead_attn|out_proj|kernel
  layers|MultiHeadAttention_0|kernel
  attention_heads|kernel
  per_head_proj|kernel
  headed|kernel
  overhead|w
  header|kernel
  embedder|layers|0|up|kernel
  token_mixing|kernel
  position_wise|kernel
  scale|kernel
  upscaler|kernel
  biased|kernel
  offset_mlp|kernel
  normal_map|kernel
  enormous|kernel
  logistic|kernel
  classic|kernel
  assembly|kernel
  planner|kernel
  layers|linear|lora_b
  layers|lora|B
  q_proj|kernel
  gate_proj|kernel
  c_fc|weight
  layers|0|mlp|wi_0|kernel
  pooler|dense|kernel
  transformer|layers|stacked|attn|q_proj|weight|0
"""


@pytest.mark.parametrize('path', NO_MATRICES.split())
def test_embeddings_norms_and_heads_are_no_matrices(path):
  (found,) = kinds_of(nested(path)).values()
  assert found is None
  # The reason is a name in the path.
  reason = recipes.describe_matrices(nested(path)).split('no matrix: ')[1]
  assert reason in path


@pytest.mark.parametrize('path', MATRICES.split())
def test_names_that_only_resemble_those(path):
  (found,) = kinds_of(nested(path)).values()
  assert found == (1, 1)


def nested(path, shape=(12, 64)):
  """A tree of one leaf; a number stands for a list."""
  tree = jax.ShapeDtypeStruct(shape, 'float32')
  for part in reversed(path.split('|')):
    tree = [tree] if part.isdigit() else {part: tree}
  return tree


def test_variables_without_names():
  """A list, as from Keras, says nothing of them: a warning says what is done."""
  shapes = [(100, 32), (3, 3, 8, 16), (16,), (32, 10)]
  variables = [jnp.zeros(shape) for shape in shapes]
  expected = recipes.muon_dimension_numbers(variables)
  assert expected[1] == contrib.MuonDimensionNumbers((0, 1, 2), (3,))
  with pytest.warns(UserWarning, match='without names, got none for 3') as seen:
    demo_optax.demo_muon(0.1, workers=TWO).init(variables)
  lines = recipes.describe_matrices(variables).splitlines()
  for warning in seen:
    assert all(lines[i] in str(warning.message) for i in (0, 1, 3))
  given = [None, expected[1], None, None]
  demo_optax.demo_muon(
    0.1, workers=TWO, muon_weight_dimension_numbers=given
  ).init(variables)


def test_a_description_of_matrices():
  """With the reasons."""
  params = {
    'embed': jnp.zeros((16, 8)),
    'layers': {'up': jnp.zeros((12, 8, 32)), 'norm': jnp.zeros((12, 8))},
    'mask': jnp.zeros((1, 8)),
  }
  lines = recipes.describe_matrices(params).splitlines()
  assert [line.split(maxsplit=1)[1] for line in lines] == [
    '(16, 8)          no matrix: embed',
    '(12, 8)          no matrix: norm',
    '(12, 8, 32)      (1,) x (2,)',
    '(1, 8)           no matrix: a side of one',
  ]


def test_a_users_own_rule():
  """A tree or a function says what is a matrix; the default asks no shapes."""
  params = {'a': jnp.zeros((8, 8)), 'embed': jnp.zeros((16, 8))}
  gradients = {
    k: np.random.default_rng(5).normal(size=(2, *x.shape)).astype(np.float32)
    for k, x in params.items()
  }
  rule = {'a': None, 'embed': contrib.MuonDimensionNumbers(1, 0)}
  found = orthonormalised(params, gradients, muon_weight_dimension_numbers=rule)
  again = orthonormalised(
    params,
    gradients,
    muon_weight_dimension_numbers=lambda tree: {k: rule[k] for k in tree},
  )
  jax.tree.map(np.testing.assert_array_equal, found, again)
  np.testing.assert_allclose(np.abs(found['a']), 1, atol=1e-4)  # Adam's first
  flat = orthonormalised(
    {'w': params['embed'].T}, {'w': gradients['embed'].transpose(0, 2, 1)}
  )
  np.testing.assert_allclose(found['embed'].T, flat['w'], atol=1e-5)


# Contracts --------------------------------------------------------------------


def model(dtype=jnp.float32):
  rng = np.random.default_rng(7)
  make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, dtype)
  return {
    'embed': make(16, 64),
    'up': make(64, 128),
    'down': make(128, 64),
    'norm': jnp.ones(64, dtype),
    'table': jnp.arange(3),
  }


def loss_fn(params, tokens):
  x = params['embed'][tokens] * params['norm']
  x = x + jax.nn.relu(x @ params['up']) @ params['down']
  logits = (x @ params['embed'].T).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, (tokens + 1) % 16
  ).mean()


TOKENS = np.random.default_rng(8).integers(0, 16, (20, 16, 8))


def train(workers, dtype=jnp.float32):
  """Learns; returns the step and its last results."""
  tx = demo_optax.demo_muon(0.02, workers=workers)
  step = helpers.make_step(tx, workers, loss_fn)
  params = workers.device_put(model(dtype))
  state, losses = tx.init(params), []
  for tokens in TOKENS:
    params, state, loss = step(params, state, tokens)
    losses.append(float(loss))
  assert losses[-1] < 0.5 * losses[0]
  return step, params, state


def test_it_learns():
  _, params, state = train(demo_optax.Workers.simulated(4), jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(params)} == {
    jnp.dtype(jnp.bfloat16),
    jnp.dtype(jnp.int32),
  }
  np.testing.assert_array_equal(params['table'], [0, 1, 2])
  floats = [
    x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


@pytest.mark.core
def test_kernels_of_more_axes_where_types_say_how_they_are_sharded():
  """Newton-Schulz reshapes them, which axes of type Explicit do not allow.

  Nor may an injected beta have such a type.
  """
  shapes = {'query': (16, 4, 8), 'out': (4, 8, 16), 'conv': (3, 3, 4, 8)}
  params = {k: {'kernel': x} for k, x in helpers.random_tree(9, shapes).items()}
  specs = {
    'query': {'kernel': P(None, 'fsdp')},
    'out': {'kernel': P('fsdp')},
    'conv': {'kernel': P(None, None, None, 'fsdp')},
  }
  mesh = helpers.make_mesh_2d('explicit', (4, 2))

  def distance(params, x):
    return sum(
      jnp.sum(jnp.square(p - jnp.mean(x))) for p in jax.tree.leaves(params)
    )

  def losses_of(workers):
    tx = optax.inject_hyperparams(demo_optax.demo_muon)(
      0.02, workers=workers, beta=0.5
    )
    step = helpers.make_step(tx, workers, distance)
    now = workers.device_put(params)
    state = tx.init(now)
    for number in range(3):
      now, state, loss = step(now, state, np.full(8, number, np.float32))
      yield float(loss)

  with jax.set_mesh(mesh):
    found = [*losses_of(demo_optax.Workers.on_mesh(mesh, 'data', specs))]
  expected = [*losses_of(demo_optax.Workers.simulated(4, specs, {'fsdp': 2}))]
  np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.core
def test_workers_of_several_devices():
  """Newton-Schulz stays inside of a worker; momenta lie as parameters do."""
  mesh = helpers.make_mesh_2d()
  specs = {
    'embed': P('fsdp'),
    'up': P(None, 'fsdp'),
    'down': P('fsdp'),
    'norm': P(),
    'table': P(),
  }
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)
  step, params, state = train(workers)
  assert not demo_optax.check_replicas((params, state), workers)
  momentum = next(
    x for k, x in helpers.own(state).items() if 'mu' in k and "['up']" in k
  )
  assert momentum.sharding.shard_shape(momentum.shape) == (1, 64, 32)
  compiled = step.lower(params, state, TOKENS[0]).compile()
  found = hlo_text.collectives(compiled.as_text(), mesh)
  between = [
    c for c in found if 'data' in (c.axes or ('data',)) and c.output_bytes > 64
  ]
  assert [c.kind for c in between] == ['all-gather']
  plan = demo_optax.plan(params, recipes.muon_compressors(params), workers)
  assert 4 * between[0].received_bytes == plan.received_bytes  # per device


@pytest.mark.core
@pytest.mark.parametrize('kind, number', [('explicit', 1), ('auto', 5)])
def test_devices_orthonormalise_whole_matrices(kind, number):
  """Of a stack with one for every second device; else XLA cuts the products."""
  mesh = helpers.make_mesh_2d(kind)
  specs, axes = (
    {'up': P(None, 'fsdp')},
    contrib.MuonDimensionNumbers((1,), (2,)),
  )
  params = {'up': jnp.ones((number, 64, 128))}
  gradients = {'up': jax.random.normal(jax.random.key(0), (2, number, 64, 128))}

  def updates_of(workers):
    tx = demo_optax.demo_muon(
      1e-2, workers=workers, muon_weight_dimension_numbers={'up': axes}
    )
    own = workers.device_put(params)
    args = helpers.stacked(gradients, workers, specs), tx.init(own), own
    update = jax.jit(tx.update).lower(*args).compile()
    return update(*args)[0]['up'], update.as_text()

  expected, _ = updates_of(demo_optax.Workers.simulated(2, specs, {'fsdp': 4}))
  with jax.set_mesh(mesh) if kind == 'explicit' else contextlib.nullcontext():
    found, text = updates_of(demo_optax.Workers.on_mesh(mesh, 'data', specs))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
  gathered = sum(
    c.received_bytes
    for c in hlo_text.collectives(text, mesh)
    if 'data' not in (c.axes or ('data',)) and c.kind == 'all-gather'
  )
  assert (gathered < 2000) == (number == 5)


def test_rates_and_weight_decay_of_both_kinds_of_leaves():
  """Each has its own; scaled by RMS a step is as long as its rate.

  As in `optax.contrib.muon`, a decay is times the rate of its kind.
  """
  params = {'up': jnp.ones((16, 16)), 'norm': jnp.ones(16)}
  gradients = {'up': jnp.ones((2, 16, 16)), 'norm': jnp.full((2, 16), 1e-4)}
  tx = demo_optax.demo_muon(
    lambda step: jnp.where(step == 0, 0.0, 1e-5),
    other_learning_rate=lambda step: jnp.where(step == 0, 1e-5, 0.0),
    workers=TWO,
    compressor=EVERYTHING,
  )
  seen, _ = helpers.updates_of(tx, params, [gradients] * 2)
  for updates, rate, other in zip(seen, (0.0, 1e-5), (1e-5, 0.0)):
    for name, expected in (('up', rate / 4), ('norm', other)):
      np.testing.assert_allclose(rms(updates[name]), expected, rtol=0.01)
  updates, _ = update_of(
    params,
    jax.tree.map(jnp.zeros_like, gradients),
    weight_decay=0.1,
    other_weight_decay=0.2,
  )
  for name, value in (('up', -0.1), ('norm', -0.2)):
    np.testing.assert_allclose(updates[name], value, rtol=1e-6)


def test_steps_that_all_workers_lost_do_not_wear_second_moments():
  one = demo_optax.Workers.simulated(1)
  tx = demo_optax.demo_muon(
    0.1, other_learning_rate=0.1, workers=one, compressor=EVERYTHING
  )
  params = {'norm': jnp.zeros(16)}
  state, update = tx.init(params), jax.jit(tx.update)
  good, bad = ({'norm': jnp.full((1, 16), x)} for x in (1.0, np.nan))
  for gradients in [good] * 20 + [bad] * 50 + [good]:
    updates, state = update(gradients, state, params)
  assert np.abs(updates['norm']).max() < 0.15


@pytest.mark.parametrize('make', [demo_optax.demo_muon, demo_optax.demo])
def test_frozen_leaves_are_left_alone(make):
  params = {'up': jnp.ones((16, 16)), 'down': jnp.ones((16, 16))}
  gradients = {
    'up': jnp.full((2, 16, 16), np.nan),
    'down': jnp.ones((2, 16, 16)),
  }
  updates, state = update_of(
    params,
    gradients,
    0.1,
    make,
    weight_decay=0.1,
    compressor={
      'up': demo_optax.compressors.FROZEN,
      'down': demo_optax.dct_topk(topk=8),
    },
  )
  np.testing.assert_array_equal(updates['up'], 0)
  assert np.all(updates['down'] != 0)
  assert demo_optax.exchange_info(state)['num_excluded'] == 0
  for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]:
    assert 'up' not in jax.tree_util.keystr(path)


def test_gradients_of_any_size_are_orthonormalised():
  gradient = np.random.default_rng(9).normal(size=(2, 256, 256))
  gradient[1] = gradient[0]
  sizes = {f'w{size}': size for size in (1e-9, 1e-7, 1.0, 1e6)}
  updates = orthonormalised(
    {name: jnp.zeros((256, 256)) for name in sizes},
    {name: (gradient * x).astype(np.float32) for name, x in sizes.items()},
  )
  for update in updates.values():
    singular = np.linalg.svd(update, compute_uv=False)
    assert np.median(singular) > 0.8 * singular.max() * 0.7
    assert np.mean(singular < 0.3 * singular.max()) < 0.15


@pytest.mark.parametrize('size', [1e-22, 5e-20, 1e-19, 3e-19, 1e-18, 1e-17])
def test_a_small_gradient_does_not_exclude_the_worker(size):
  rng = np.random.default_rng(0)
  shapes = {'up': (64, 96), 'down': (32, 32)}
  sizes = {'up': size, 'down': 1.0}
  params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
  gradients = {
    name: (rng.normal(size=(1, *shape)) * sizes[name]).astype(np.float32)
    for name, shape in shapes.items()
  }
  one = demo_optax.Workers.simulated(1)
  tx = demo_optax.demo_muon(1.0, workers=one, compressor=EVERYTHING)
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  assert demo_optax.exchange_info(state)['num_excluded'] == 0
  assert rms(updates['up']) < 1.01 * 64**-0.5
  assert rms(updates['down']) == pytest.approx(32**-0.5, rel=1e-3)


def test_singular_values_with_a_margin():
  """An iteration may leave values that are 2 % too large, by bfloat16."""
  low, high = 0.003, 1.0
  for a, b, c in links.NEWTON_SCHULZ:
    values = np.linspace(low, 1.02 * high, 100_000)
    values = a * values + b * values**3 + c * values**5
    low, high = values.min(), values.max()
  assert 0.77 < low < high < 1.23


def test_functions_of_parameters_see_all_leaves():
  """Integers, too."""
  params = {'w': jnp.ones((8, 8)), 'step': jnp.zeros(3, jnp.int32)}
  seen = []

  def choose(params):
    seen.append(params['step'].dtype)
    return {'w': demo_optax.dct_topk(8, 4), 'step': None}

  gradients = {'w': jnp.ones((2, 8, 8)), 'step': jnp.zeros((2, 3), jnp.int32)}
  update_of(params, gradients, compressor=choose)
  assert set(seen) == {jnp.dtype('int32')}


def test_a_momentum_in_bfloat16():
  params = {'w': jnp.ones((64, 32)), 'embed': jnp.ones((8, 8))}
  wide, narrow = (
    demo_optax.demo_muon(0.1, workers=TWO, mu_dtype=dtype)
    for dtype in (None, 'bfloat16')
  )
  before = narrow.init(params)
  shapes = {k: x.shape for k, x in params.items()}
  gradients = [helpers.random_tree(s, shapes, (2,)) for s in range(3)]
  states = [
    helpers.updates_of(tx, params, gradients)[1] for tx in (wide, narrow)
  ]
  kept = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in states]
  assert kept[0] - kept[1] == 2 * 64 * 32 * 2  # of each worker's matrix half
  wide, narrow = (
    next(x for x in jax.tree.leaves(s) if x.shape == (2, 64, 32))
    for s in states
  )
  assert not np.array_equal(wide, narrow)
  np.testing.assert_allclose(narrow, wide, atol=0.02 * np.abs(wide).max())
  chex.assert_trees_all_equal_shapes_and_dtypes(states[1], before)


def test_boxes_of_linen():
  """As parameters of `nn.with_partitioning` come from `init`."""
  params = {'w': jnp.ones((16, 16)), 'b': jnp.ones(16)}
  gradients = {'w': jnp.ones((2, 16, 16)), 'b': jnp.ones((2, 16))}
  boxed = {**params, 'w': nn.Partitioned(params['w'], (None, 'm'))}
  given = {**gradients, 'w': nn.Partitioned(gradients['w'], (None, None, 'm'))}
  plain, _ = update_of(params, gradients)
  updates, state = update_of(boxed, given)
  np.testing.assert_array_equal(updates['w'].value, plain['w'])
  new = demo_optax.demo_muon(1.0, workers=TWO).init(boxed)
  assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize(
  'case', [pytest.param('stack', marks=pytest.mark.slow), 'sharded']
)
def test_matrices_without_gradients_come_to_rest(case):
  """Experts that get no tokens, and no momentum moves them."""
  rng = np.random.default_rng(12)
  experts = jnp.asarray(rng.normal(size=(3, 64, 64)), jnp.float32)
  if case == 'sharded':
    mesh = helpers.make_mesh_2d('explicit')
    specs = {'experts': P(None, 'fsdp')}
    workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)
    params = {
      'experts': jax.device_put(experts, NamedSharding(mesh, specs['experts']))
    }
  else:
    workers, params = TWO, {'experts': experts}
  tx = demo_optax.demo_muon(1.0, workers=workers)

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def step(params, state, gradients):
    gradients = {'experts': gradients['experts'][0]}
    updates, state = tx.update(gradients, state, params)
    return updates, state

  state = tx.init(params)
  # The first expert has gradients of one worker only, the second of none after
  # a while, the third always.
  sizes = []
  for number in range(6):
    g = rng.normal(size=(2, 3, 64, 64)).astype(np.float32)
    if number >= 3:
      g[1, 0] = 0
      g[:, 1] = 0
    updates, state = step(params, state, {'experts': g})
    sizes.append(np.sqrt(np.square(updates['experts']).mean((1, 2))))
  sizes = np.array(sizes) / default_rms(64)
  np.testing.assert_allclose(sizes[:, [0, 2]], 1, rtol=1e-5)
  np.testing.assert_allclose(sizes[:3, 1], 1, rtol=1e-5)
  assert np.all(sizes[3:, 1] == 0)


def test_a_single_leaf_that_is_no_matrix():
  """Is compressed as one, and not by the default for its shape."""
  tx = demo_optax.demo_muon(
    0.1, workers=TWO, muon_weight_dimension_numbers=lambda params: None
  )
  alone, inside = (
    tx.init(params)
    for params in (jnp.ones((64, 64)), {'a': jnp.ones((64, 64))})
  )
  shapes = [[x.shape for x in jax.tree.leaves(s)] for s in (alone, inside)]
  assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
  'size, wanted', [(1e-7, 1), (1.0, 1), (1e18, 1), (1e-12, 1e-4), (0, 0)]
)
def test_lengths_of_matrices(size, wanted):
  """Each of a stack by itself; without a gradient updates come to rest."""
  axes = contrib.MuonDimensionNumbers((1,), (2,))
  tx = links.scale_to_muon({('w',): axes}, {('w',): None}, 0.9, 0.5)
  signs = np.array([[[1.0, -1]], [[-1, 1]]], np.float32)  # [2, 1, 2]
  sizes = np.array([size, 1.0], np.float32)[:, None, None]
  updates, _ = tx.update({'w': jnp.asarray(sizes * signs)}, ())
  lengths = np.array([wanted, 1.0])[:, None, None]
  np.testing.assert_allclose(updates['w'], 0.5 * lengths * signs, rtol=1e-4)


def test_functions_that_inject_hyperparams_calls_with_the_step():
  """An error names its `static_args`; with them, functions see parameters."""
  params = {'a': {'w': jnp.ones((8, 8))}}
  make = lambda *static: optax.inject_hyperparams(demo_optax.demo_muon, static)(
    0.1, workers=TWO, mu_dtype='bfloat16', compressor=recipes.muon_compressors
  )
  with pytest.raises(TypeError, match=r"static_args=\('compressor'"):
    make().init(params)
  state = make('compressor', 'mu_dtype').init(params)
  assert jnp.bfloat16 in [x.dtype for x in jax.tree.leaves(state)]


def test_compressors_of_matrices_may_be_none_or_frozen():
  params = {'up': jnp.zeros((8, 8)), 'norm': jnp.zeros(8)}
  for matrix in (None, demo_optax.compressors.FROZEN):
    found = recipes.muon_compressors(params, matrix)
    assert found['up'] is matrix and found['norm'].select.k == 8
