"""Operations that XLA compiles once, and maps as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demo_optax.numerics import plain

pytestmark = pytest.mark.core


def test_put_is_one_update_under_vmap():
  arrays, parts = jnp.zeros((3, 5, 2)), jnp.ones((3, 2, 2))
  put = jax.jit(jax.vmap(lambda x, part: plain.put(x, part, 2)))
  want = np.zeros((3, 5, 2))
  want[:, 2:4] = 1
  np.testing.assert_array_equal(put(arrays, parts), want)
  np.testing.assert_array_equal(put(arrays, parts)[0], want[0])
  only_parts = jax.vmap(lambda part: plain.put(arrays[0], part, 2))
  np.testing.assert_array_equal(only_parts(parts), want)
  text = put.lower(arrays, parts).as_text()
  assert 'scatter' not in text
  assert text.count('dynamic_update_slice') == 1


@pytest.mark.parametrize('numbers', [[7], [0, 5, 9]])
def test_unknown_numbers_are_what_they_were(numbers):
  @jax.jit
  def of(step):
    return [jnp.asarray(x) for x in plain.unknown(numbers, step)]

  for step in (0, 1, 2**31 - 1):
    assert [*map(int, of(jnp.int32(step)))] == numbers
  assert plain.unknown(numbers, 0) == numbers
