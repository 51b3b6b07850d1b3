"""Tunix's own trainer with `examples/tunix/trainer.py`, on a tiny Llama."""

import contextlib

import hlo_text
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

pytest.importorskip('tunix', reason='Tunix is not installed: docs/tunix.md')

pytestmark = [
  pytest.mark.filterwarnings('ignore'),
  pytest.mark.usefixtures('as_installed'),
]

COMPRESSOR = demo_optax.dct_topk(topk=8, values='sign')
ADAPTED = '.*(q|kv|o|gate|up|down)_proj'
LEARNS = {'full': 3e-3, 'lora': 1e-2}


@pytest.fixture(scope='module')
def tunix(as_installed):
  """The modules, imported in here: they change JAX as they are imported."""
  import qwix
  from tunix.models.llama3 import model
  from tunix.sft import peft_trainer, utils

  class Modules:
    pass

  modules = Modules()
  modules.qwix, modules.model = qwix, model
  modules.peft_trainer, modules.utils = peft_trainer, utils
  return modules


@pytest.fixture(scope='module')
def ours(tunix, load_example):
  return load_example('tunix/trainer.py')


@pytest.fixture(scope='module')
def mesh():
  auto = (jax.sharding.AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), ('replica', 'fsdp', 'tp'), axis_types=auto)
  with contextlib.ExitStack() as stack:
    stack.enter_context(mesh)  # where Tunix looks for it
    yield mesh


def make_model(tunix, kind):
  config = tunix.model.ModelConfig(
    num_layers=2,
    vocab_size=256,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=4,
    rope_theta=10000,
    norm_eps=1e-5,
  )
  model = tunix.model.Llama3(config, rngs=nnx.Rngs(0))
  if kind == 'lora':
    provider = tunix.qwix.LoraProvider(module_path=ADAPTED, rank=16, alpha=32.0)
    model = tunix.qwix.apply_lora_to_model(
      model, provider, **model.get_model_input(), rngs=nnx.Rngs(1)
    )
  return model


def trained_params(model, kind):
  return nnx.state(model, nnx.LoRAParam if kind == 'lora' else nnx.Param)


class Trained:
  """A run of Tunix's training loop on the same few rows again and again."""

  def __init__(self, tunix, mesh, kind, steps, make_trainer=None, folder=None):
    self.losses = []
    self.model = make_model(tunix, kind)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 32))
    self.batch = tunix.peft_trainer.TrainingInput(
      input_tokens=tokens.astype(np.int32),
      input_mask=np.ones((16, 32), np.int32),
    )
    config = tunix.peft_trainer.TrainingConfig(
      eval_every_n_steps=steps,
      max_steps=steps,
      data_sharding_axis=(('replica', 'fsdp'),),
      checkpoint_root_directory=folder and str(folder),
      checkpointing_options=ocp.CheckpointManagerOptions(
        save_interval_steps=1, enable_async_checkpointing=False
      ),
    )
    if make_trainer is None:
      self.trainer = tunix.peft_trainer.PeftTrainer(
        self.model, optax.adamw(LEARNS[kind]), config
      )
    else:
      self.trainer = make_trainer(self.model, config)

    def inputs(x):
      mask = x.input_mask != 0
      return {
        'input_tokens': x.input_tokens,
        'input_mask': x.input_mask,
        'positions': tunix.utils.build_positions_from_mask(mask),
        'attention_mask': tunix.utils.make_causal_attn_mask(mask),
      }

    self.trainer.with_gen_model_input_fn(inputs)
    self.trainer.training_hooks = self
    batches = [self.batch] * steps
    self.trainer.train(batches, eval_ds=batches[:1])

  def on_train_step_end(self, trainer, step, loss):
    self.losses.append(float(loss))

  def __getattr__(self, name):
    if name.startswith('on_'):  # the other hooks
      return lambda *args, **kwargs: None
    raise AttributeError(name)

  @property
  def arrays(self):
    state = nnx.state((self.model, self.trainer.optimizer))
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
      jax.tree_util.keystr(path): x
      for path, x in flat
      if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    }


def exchanging(ours, mesh, kind):
  def make_trainer(model, config):
    workers = demo_optax.Workers.on_mesh(
      mesh, 'replica', nnx.get_partition_spec(nnx.state(model, nnx.Param))
    )
    tx = demo_optax.demo(
      LEARNS[kind], workers=workers, decay=0.99, compressor=COMPRESSOR
    )
    return ours.Trainer(model, tx, config, workers=workers)

  return make_trainer


@pytest.fixture(scope='module', params=LEARNS)
def trained(request, tunix, ours, mesh):
  kind = request.param
  return Trained(tunix, mesh, kind, 50, exchanging(ours, mesh, kind))


@pytest.fixture
def kind(request):
  return request.node.callspec.params['trained']


def test_it_learns_beside_its_own_optimizer(trained, kind, tunix, mesh):
  own = Trained(tunix, mesh, kind, 50)
  assert own.losses[0] == pytest.approx(trained.losses[0], rel=1e-4)
  falls = {'full': 1.5, 'lora': 0.1}[kind]
  for losses in own.losses, trained.losses:
    assert losses[-1] < losses[0] - falls
  workers = trained.trainer.workers
  assert (
    demo_optax.check_replicas(nnx.state(trained.model, nnx.Param), workers)
    == []
  )


def test_only_the_message_of_what_is_trained_crosses(trained, kind):
  trainer = trained.trainer
  params = trained_params(trained.model, kind)
  planned = demo_optax.plan(params, COMPRESSOR, trainer.workers)
  assert len(planned.leaves) == len(jax.tree.leaves(params))
  step = trainer._jitted_train_step_fn.func.step
  compiled = step.lower(
    trained.model, trainer.optimizer, trained.batch
  ).compile()
  crossing = [
    c
    for c in hlo_text.collectives(compiled, trainer.workers.mesh)
    if c.axes is None or 'replica' in c.axes
  ]
  (gather,) = (c for c in crossing if c.kind == 'all-gather')
  assert gather.axes == ('replica',) and gather.shapes[0].startswith('u32')
  assert gather.output_bytes == 2 * planned.payload_bytes // planned.num_devices
  rest = [c for c in crossing if c is not gather]
  scalars = {'f32[]', 's32[]', 'f32[2]'}  # also a sum beside its count
  assert all(
    c.kind == 'all-reduce' and set(c.shapes) <= scalars for c in rest
  ), crossing


def test_momentum_lies_with_its_worker(trained):
  stacked = {k: x for k, x in trained.arrays.items() if 'worker_stacked' in k}
  assert stacked
  for name, x in stacked.items():
    spread = NamedSharding(
      trained.trainer.workers.mesh, P('replica', ('fsdp', 'tp'))
    )
    assert x.sharding.is_equivalent_to(spread, x.ndim), name


def test_frozen_parameters_stay(tunix, ours, mesh):
  before = trained_params(make_model(tunix, 'full'), 'full')
  run = Trained(tunix, mesh, 'lora', 2, exchanging(ours, mesh, 'lora'))
  after = dict(jax.tree_util.tree_leaves_with_path(nnx.state(run.model)))
  for path, x in jax.tree_util.tree_leaves_with_path(before):
    np.testing.assert_array_equal(after[path], x)
  assert any(np.any(x) for path, x in after.items() if 'lora_b' in str(path))


@pytest.mark.parametrize('kind', LEARNS)
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(
  tunix, ours, mesh, tmp_path, kind
):
  make = exchanging(ours, mesh, kind)
  whole = Trained(tunix, mesh, kind, 6, make)
  Trained(tunix, mesh, kind, 3, make, tmp_path)
  second = Trained(tunix, mesh, kind, 6, make, tmp_path)
  assert len(second.losses) == len(whole.losses) - 3
  assert second.arrays.keys() == whole.arrays.keys()
  for name, x in second.arrays.items():
    np.testing.assert_array_equal(x, whole.arrays[name], err_msg=name)


def test_gradients_accumulate(tunix, ours, mesh):
  """In two parts, each step is that of one pass over all rows."""
  make = exchanging(ours, mesh, 'full')

  def in_parts(model, config):
    trainer = make(model, config)
    return trainer.with_loss_fn(ours.micro_batched(trainer.loss_fn, 2))

  once = Trained(tunix, mesh, 'full', 6, make)
  twice = Trained(tunix, mesh, 'full', 6, in_parts)
  np.testing.assert_allclose(twice.losses, once.losses, rtol=5e-3)
