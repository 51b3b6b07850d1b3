"""Eight simulated CPU devices, strict promotion; set before jax starts."""

import os

os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '')
    + ' --xla_force_host_platform_device_count=8'
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import hypothesis
import jax
import pytest

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture
def x64():
  """Float64 for one test."""
  with jax.enable_x64(True):
    yield


# Every new shape compiles: few examples, and no deadline for one of them.
hypothesis.settings.register_profile(
    'suite', deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile('suite')
