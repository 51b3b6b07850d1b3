"""Trainers of others, as they are published, with eight simulated devices.

Each test file is skipped where its trainer is not installed.
"""

import importlib.util
import os

os.environ.setdefault('DECOUPLE_GCLOUD', 'TRUE')  # MaxText: no cloud services
# Two devices may start with different ones of MaxText's independent collectives
# and wait for each other: docs/maxtext.md. Other tests run as JAX does.
if importlib.util.find_spec('maxtext'):
  os.environ['XLA_FLAGS'] += (
    ' --xla_cpu_enable_concurrency_optimized_scheduler=false'
  )

import contextlib
import pathlib
import sys

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
# What these trainers change in JAX for good.
CHANGED = (
  'jax_default_prng_impl',
  'jax_use_shardy_partitioner',
  'jax_remove_size_one_mesh_axis_from_type',
  'jax_threefry_partitionable',
)


@pytest.fixture(scope='module')
def as_installed():
  """JAX as a trainer's users have it, and as it was after the tests."""
  before = {name: getattr(jax.config, name) for name in CHANGED}
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.numpy_dtype_promotion('standard'))
    stack.enter_context(jax.numpy_rank_promotion('allow'))
    yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope='session')
def load_example():
  """Imports a file of the examples."""

  def load(name):
    path = EXAMPLES / name
    module = f'example_{path.parent.name}_{path.stem}'
    spec = importlib.util.spec_from_file_location(module, path)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]

  return load
