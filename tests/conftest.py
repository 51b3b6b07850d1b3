"""Eight CPU devices, quick compilation, strict promotion; before jax starts."""

import gc
import os
import shutil
import tempfile
from importlib import metadata

os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

# Half of the time is saved by programs that are hardly optimized.
# TESTS_AS_USERS=1 compiles as JAX does by itself.
if os.environ.get('TESTS_AS_USERS', '0') == '0':
  os.environ['XLA_FLAGS'] += (
    ' --xla_backend_optimization_level=0'
    ' --xla_cpu_parallel_codegen_split_count=1'
  )
  if metadata.version('jaxlib').startswith('0.10.'):  # later there is none
    os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'

# All processes share compiled programs. Who starts the tests removes them.
OWN_CACHE = 'JAX_COMPILATION_CACHE_DIR' not in os.environ
if OWN_CACHE:
  os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='jax-')
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'

import pathlib

import helpers
import hypothesis
import jax
import pytest

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_xdist_auto_num_workers():
  return (os.cpu_count() or 1) + 1  # some tests wait for processes and threads


def pytest_collection_finish():
  # Traces make many objects that live on. By default Python looks through them,
  # and through all that was imported, for some 5 % of the CPU time.
  gc.freeze()
  gc.set_threshold(50_000)


def pytest_unconfigure():
  if OWN_CACHE:
    shutil.rmtree(os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)


def pytest_collection_modifyitems(items):
  here = pathlib.Path(__file__).parent
  for item in items:
    if item.path.is_relative_to(here):
      folder = item.path.relative_to(here).parts[0]
      if folder in ('docs', 'processes', 'integrations', 'ahead'):
        item.add_marker(folder)


@pytest.fixture(params=['simulated', 'auto', 'explicit'])
def workers(request):
  """Four of them; ask for some kinds by `parametrize(..., indirect=True)`."""
  with helpers.make_workers(request.param) as workers:
    yield workers


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def standard_promotion():
  """Of dtypes, as optax's AdamW and schedules need it."""
  with jax.numpy_dtype_promotion('standard'):
    yield


@pytest.fixture
def rank_promotion():
  """Models add biases to batches."""
  with jax.numpy_rank_promotion('allow'):
    yield


# Every new shape compiles: few examples, and no deadline for one of them.
hypothesis.settings.register_profile(
  'suite', deadline=None, max_examples=30, derandomize=True
)
hypothesis.settings.load_profile('suite')
