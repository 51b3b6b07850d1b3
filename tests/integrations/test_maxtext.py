"""MaxText's own trainer with `examples/maxtext/train.py`, on tiny models."""

import pathlib

import hlo_text
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

# Not `maxtext`: a folder of the examples has that name, too.
pytest.importorskip(
  'maxtext.common', reason='MaxText is not installed: docs/maxtext.md'
)

import maxtext
from maxtext.common import metric_logger

pytestmark = [
  pytest.mark.filterwarnings('ignore'),
  pytest.mark.usefixtures('as_installed'),
]

BASE = pathlib.Path(maxtext.__path__[0]) / 'configs' / 'base.yml'
MODEL = {
  'hardware': 'cpu',
  'skip_jax_distributed_system': True,
  'enable_goodput_recording': False,
  'monitor_goodput': False,
  'dataset_type': 'synthetic',
  'log_config': False,
  'attention': 'dot_product',
  'use_iota_embed': True,
  'dtype': 'float32',
  'weight_dtype': 'float32',
  'base_emb_dim': 64,
  'base_num_query_heads': 4,
  'base_num_kv_heads': 4,
  'base_mlp_dim': 128,
  'base_num_decoder_layers': 2,
  'head_dim': 16,
  'vocab_size': 256,
  'max_target_length': 64,
  'per_device_batch_size': 1,
  'learning_rate': 0.003,
  'enable_checkpointing': False,
  'async_checkpointing': False,
}
LAYOUTS = {'2 of 4': (2, 4), '4 of 2': (4, 2)}


@pytest.fixture(scope='module')
def ours(as_installed, load_example):
  return load_example('maxtext/train.py')


class Trained:
  """A run: its state, its losses and other scalars, its step and arguments."""

  def __init__(
    self, ours, folder, layout=(2, 4), exchange=True, watch=None, **changes
  ):
    workers, inside = layout
    self.watch = watch  # called with the state after every step
    # Its own way to spread a batch over slices is the axis `data`.
    axis = 'diloco' if exchange else 'data'
    config = (
      MODEL
      | {
        f'ici_{axis}_parallelism': workers,
        'ici_fsdp_parallelism': inside,
        'run_name': 'run',
        'base_output_directory': folder,
      }
      | changes
    )
    self.scalars, self.evaluated = [], {}
    self.argv = ['', str(BASE), *(f'{k}={v}' for k, v in config.items())]
    if exchange:
      settings, argv = ours.split_arguments(self.argv)
      with ours.installed(settings):
        self._train(ours, argv)
    else:
      self._train(ours, self.argv)
    self.losses = np.array([x['learning/loss'] for x in self.scalars])

  def _train(self, ours, argv):
    config, recorder = ours.train.initialize(argv)
    make_step = ours.train_utils.jit_train_step

    def recorded(*args, **kwargs):
      self.graphdef = next(x for x in args if isinstance(x, nnx.GraphDef))
      self.step = make_step(*args, **kwargs)
      return self.step if self.watch is None else Watched(self)

    def write_metrics(logger, metrics, step, metric_type='train'):
      scalars = {name: float(x) for name, x in metrics['scalar'].items()}
      if metric_type == 'train':
        self.scalars.append(scalars)
      elif metric_type == 'eval':
        self.evaluated[step] = scalars['eval/avg_loss']

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(ours.train_utils, 'jit_train_step', recorded)
      patch.setattr(metric_logger.MetricLogger, 'write_metrics', write_metrics)
      self.state = ours.train.train_loop(config, recorder)
    data = ours.sharding.get_input_data_sharding(config, self.mesh)
    self.batch = ours.maxtext_utils.get_shaped_batch(
      config, batch_sharding=data
    )
    self.config = config

  @property
  def mesh(self):
    return jax.tree.leaves(nnx.state(self.state, nnx.Param))[0].sharding.mesh

  @property
  def leaves(self):
    return leaves_of(self.state)

  @property
  def stacked(self):
    return stacked_in(self.leaves)

  def collectives(self, ours):
    with (
      jax.set_mesh(self.mesh),
      ours.logical_axis_rules(self.config.logical_axis_rules),
    ):
      compiled = self.step.lower(self.state, self.batch).compile()
    return hlo_text.collectives(compiled, self.mesh)


class Watched:
  """A step that shows the state that it returns."""

  def __init__(self, run):
    self.run = run
    self.lower = run.step.lower

  def __call__(self, *args):
    state, metrics = self.run.step(*args)
    self.run.watch(state)
    return state, metrics


def leaves_of(state):
  flat = jax.tree_util.tree_flatten_with_path(state)[0]
  return {jax.tree_util.keystr(path): x for path, x in flat}


def stacked_in(leaves):
  return {k: x for k, x in leaves.items() if 'worker_stacked' in k}


@pytest.fixture(scope='module', params=LAYOUTS)
def trained(request, ours, tmp_path_factory):
  layout = LAYOUTS[request.param]
  return Trained(ours, tmp_path_factory.mktemp('ours'), layout, steps=50)


def assert_same_arrays(after, before):
  assert after.keys() == before.keys()
  for name, x in after.items():
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, before[name] = (jax.random.key_data(k) for k in (x, before[name]))
    np.testing.assert_array_equal(x, before[name], err_msg=name)


def test_it_learns_beside_its_own_optimizer(trained, ours, tmp_path):
  layout = trained.step.workers.count, 8 // trained.step.workers.count
  own = Trained(ours, tmp_path, layout, exchange=False, steps=50)
  assert own.losses[0] == pytest.approx(trained.losses[0], abs=0.05)
  for losses in own.losses, trained.losses:
    assert losses[-1] < losses[0] / 4
  assert (
    demo_optax.check_replicas(
      nnx.state(trained.state, nnx.Param), trained.step.workers
    )
    == []
  )


def params_of(run):
  state = run.state
  model = state.model if hasattr(state, 'model') else state['model']
  return nnx.state(model, nnx.Param)


def assert_only_the_message_crosses(run, ours, compressor):
  planned = demo_optax.plan(params_of(run), compressor, run.step.workers)
  crossing = [
    c for c in run.collectives(ours) if c.axes is None or 'diloco' in c.axes
  ]
  (gather,) = (c for c in crossing if c.kind == 'all-gather')
  assert gather.axes == ('diloco',) and gather.shapes[0].startswith('u32')
  assert gather.output_bytes == (
    planned.payload_bytes // planned.num_devices * run.step.workers.count
  )
  # XLA joins what is reduced at the end, and nothing comes before it.
  (reduce,) = (c for c in crossing if c is not gather)
  assert reduce.kind == 'all-reduce' and set(reduce.shapes) <= {
    'f32[]',
    'f32[2]',  # a sum beside its count
  }
  assert reduce.output_bytes < 100


def test_only_the_message_crosses(trained, ours):
  exchange, _ = ours.split_arguments([])
  assert_only_the_message_crosses(
    trained,
    ours,
    demo_optax.dct_topk(
      exchange.chunk_size, exchange.topk, values=exchange.values
    ),
  )


@pytest.mark.parametrize('layout', LAYOUTS)
def test_only_the_message_of_demo_muon_crosses(
  ours, tmp_path, monkeypatch, layout
):
  find = ours.muon_utils.get_muon_weight_dimension_numbers
  found = []
  monkeypatch.setattr(
    ours.muon_utils,
    'get_muon_weight_dimension_numbers',
    lambda *args: found.append(find(*args)) or found[0],
  )
  run = Trained(
    ours, tmp_path, LAYOUTS[layout], steps=1, demo_optimizer='demo_muon'
  )
  assert_only_the_message_crosses(
    run,
    ours,
    demo_optax.recipes.muon_compressors(
      params_of(run), muon_weight_dimension_numbers=found[0]
    ),
  )


def test_momentum_lies_with_its_worker(trained):
  assert trained.stacked
  for name, x in trained.stacked.items():
    spread = NamedSharding(trained.mesh, P('diloco', 'fsdp'))
    assert x.sharding.is_equivalent_to(spread, x.ndim), name
    assert x.addressable_shards[0].data.shape[:2] == (1, 1), name


@pytest.mark.parametrize(
  'optimizer, layout',
  [('demo', '2 of 4'), ('demo', '4 of 2'), ('demo_muon', '2 of 4')],
)
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(
  ours, tmp_path, optimizer, layout
):
  options = {
    'layout': LAYOUTS[layout],
    'enable_checkpointing': True,
    'checkpoint_period': 1,
    'learning_rate_schedule_steps': 6,
    'demo_optimizer': optimizer,
  }
  folders = [tmp_path / 'whole', tmp_path / 'parts']
  for folder in folders:
    folder.mkdir()
  whole = Trained(ours, folders[0], steps=6, **options)
  first = Trained(ours, folders[1], steps=3, **options)
  second = Trained(ours, folders[1], steps=6, **options)
  assert len(first.scalars) == 3 and len(second.scalars) == 3  # three new ones
  assert any(np.any(x) for x in first.stacked.values())
  assert_same_arrays(second.leaves, whole.leaves)


@pytest.fixture(scope='module')
def checkpoint(ours, tmp_path_factory):
  """A folder with the checkpoint of two steps."""
  folder = tmp_path_factory.mktemp('saved')
  Trained(ours, folder, steps=2, enable_checkpointing=True, checkpoint_period=1)
  return folder


@pytest.mark.parametrize(
  'changes',
  [
    {'demo_chunk_size': 32},
    {'demo_optimizer': 'demo_muon'},
    {'ici_fsdp_parallelism': 1, 'ici_tensor_parallelism': 4},
  ],
  ids=lambda x: next(iter(x)),
)
def test_a_checkpoint_of_other_momenta_is_refused(ours, checkpoint, changes):
  """MaxText itself would go on with zeros for what it does not find."""
  with pytest.raises(ValueError, match='momenta of the checkpoint are not'):
    Trained(ours, checkpoint, steps=4, enable_checkpointing=True, **changes)


@pytest.mark.parametrize('trained', ['2 of 4'], indirect=True)
def test_a_checkpoint_for_another_number_of_workers(trained, ours, tmp_path):
  """By Orbax and our conversion; MaxText's own restore is an error."""
  saved, like = (  # with the types that MaxText splits off
    nnx.merge(run.graphdef, run.state)
    for run in (trained, Trained(ours, tmp_path, (4, 2), steps=1))
  )
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(
      tmp_path / 'leaves', demo_optax.checkpoint.to_leaves(saved)
    )
    checkpointer.wait_until_finished()
    leaves = checkpointer.restore(tmp_path / 'leaves')
  found = demo_optax.checkpoint.from_leaves(
    leaves, like, resize=True, rechunk=True
  )  # blocks differ, too
  assert_same_arrays(
    *(leaves_of(nnx.state(x, nnx.Param)) for x in (found, saved))
  )
  momenta = (demo_optax.state.momentum(x.optimizer) for x in (found, saved))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x.mean(0), y.mean(0), atol=1e-6),
    *momenta,
  )


def test_each_worker_clips_its_own_gradient(ours, tmp_path):
  run = Trained(ours, tmp_path, steps=4, gradient_clipping_threshold=0.1)
  for x in run.scalars:
    assert x['learning/raw_grad_norm'] > 0.5
    assert x['learning/grad_norm'] == pytest.approx(0.1, rel=1e-4)


def test_a_loss_in_several_parts(ours, tmp_path):
  """The first step's parts are those of MaxText's own."""
  run, own = (
    Trained(ours, tmp_path, exchange=exchange, steps=4, z_loss_multiplier=1e-2)
    for exchange in (True, False)
  )
  for part in 'loss', 'z_loss':
    assert run.scalars[0][f'learning/{part}'] == pytest.approx(
      own.scalars[0][f'learning/{part}'], rel=1e-4
    )
  assert own.scalars[0]['learning/z_loss'] > 0.01
  assert run.losses[-1] < run.losses[0] - 0.3


def test_gradients_accumulate_as_in_one_batch(ours, tmp_path):
  """Rounding apart: a sign that flips costs a little."""
  many = Trained(ours, tmp_path, steps=6, gradient_accumulation_steps=2)
  once = Trained(ours, tmp_path, steps=6, per_device_batch_size=2)
  assert many.scalars[0]['learning/total_weights'] == 16 * 64
  np.testing.assert_allclose(many.losses, once.losses, rtol=5e-3)
  assert many.losses[-1] < many.losses[0] - 0.3


def test_skipped_steps_are_skipped_by_all(ours, tmp_path):
  """A factor that no step but the first few can pass."""
  kept = []  # after each step: parameters and momenta
  run = Trained(
    ours,
    tmp_path,
    steps=8,
    skip_step_on_spikes=True,
    skip_step_interval=4,
    skip_step_scaling_factor=-1000.0,
    watch=lambda state: kept.append(
      {
        name: np.asarray(x)
        for name, x in leaves_of(state).items()
        if 'worker_stacked' in name
        or ("['model']" in name and jax.dtypes.issubdtype(x.dtype, np.floating))
      }
    ),
  )
  skipped = [x['optim/step_skipped'] for x in run.scalars]
  assert 1.0 in skipped and 0.0 in skipped[1:]
  assert len(kept) == len(skipped) == 8
  assert stacked_in(kept[0]) and len(stacked_in(kept[0])) < len(kept[0])
  for step, is_skipped in list(enumerate(skipped))[1:]:
    if is_skipped:
      assert_same_arrays(kept[step], kept[step - 1])
    else:
      assert all(
        np.any(x != kept[step - 1][name])
        for name, x in stacked_in(kept[step]).items()
      )
  # Decided from the mean losses, which no worker has seen by itself.
  (seen,) = (x for name, x in run.leaves.items() if "['losses']" in name)
  np.testing.assert_allclose(sorted(seen), sorted(run.losses[-4:]), rtol=1e-6)
  (count,) = (
    x
    for name, x in run.leaves.items()
    if "['count']" in name
    and "['metrics']" not in name
    and "[1]['count']" in name
  )
  assert count == skipped.count(0.0)


def test_evaluation_is_of_the_shared_parameters(ours, tmp_path):
  """Every two steps, on the batch that is trained: the next step's loss."""
  with_it, without = (
    Trained(ours, tmp_path, steps=6, **options)
    for options in ({'eval_interval': 2, 'eval_steps': 1}, {})
  )
  assert_same_arrays(with_it.leaves, without.leaves)
  assert len(with_it.evaluated) >= 2
  for step, loss in with_it.evaluated.items():
    if step + 1 < len(without.losses):
      assert loss == pytest.approx(without.losses[step + 1], rel=1e-4)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'use_iota_embed': False}, 'use_iota_embed=true'),
    ({'layout': (1, 8)}, 'dcn_diloco_parallelism=2'),
    ({'enable_diloco': True}, 'Not with an exchange: enable_diloco'),
    ({'demo_topkk': 3}, 'demo_topk'),
    ({'demo_topk': 'abc'}, "demo_topk=abc: not 'int'"),
    ({'demo_optimizer': 'adam'}, 'demo_optimizer=adam'),
    ({'demo_optimizer': 'demo_muon', 'demo_values': 'sign'}, 'is not read by'),
    ({'opt_type': 'muon'}, 'opt_type=muon has no effect'),
  ],
)
def test_what_does_not_fit_is_refused(ours, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    Trained(ours, tmp_path, steps=1, **changes)
