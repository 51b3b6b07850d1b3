"""The trainers are ordinary scripts: JAX's own promotion, as they have it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield
