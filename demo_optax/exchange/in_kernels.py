"""A bucket's arithmetic as `arithmetic`, by kernels (`numerics.kernels`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.compressors.layout import Bucket
from demo_optax.exchange.message import Received, Selected
from demo_optax.numerics import groups, kernels, rounding, topk


def accumulate_and_select(
    bucket: Bucket,
    gradients: jax.Array,
    momentum: jax.Array,
    decay: Any,
    weight: Any,
    valid: jax.Array,
) -> tuple[jax.Array, Selected]:
  """Adds gradient chunks to momentum; selects what to send."""
  scalars = [jnp.asarray(x, momentum.dtype) for x in (decay, weight, valid)]
  momentum, places, values, squares = kernels.encode(
      gradients, momentum, jnp.stack(scalars)[None], _matrices(bucket),
      bucket.format.k,
  )
  return momentum, Selected(
      groups.indices(places.T), values.T, jnp.sum(squares)
  )


def subtract(
    momentum: jax.Array, indices: jax.Array, values: jax.Array
) -> jax.Array:
  """Subtracts what was sent from momentum."""
  return kernels.subtract(momentum, groups.places(indices).T, values.T)


def merge(
    bucket: Bucket, received: Received, average: topk.Average
) -> tuple[jax.Array, jax.Array]:
  """Averages all workers' selections and inverts the transform."""
  indices, values, valid = received
  assert indices is not None
  places = jnp.where(valid[:, None, None], groups.places(indices), -1)
  share = rounding.exact_reciprocal(
      jnp.sum(valid, dtype=jnp.int32), len(valid), values.dtype
  )
  updates, distinct = kernels.decode(
      jnp.swapaxes(places, 1, 2), jnp.swapaxes(values, 1, 2), share[None, None],
      _matrices(bucket), average == 'senders',
  )
  # Padding chunks are at the end.
  return updates, jnp.sum(distinct[:, : bucket.num_chunks])


def _matrices(bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
  rows, cols = bucket.sides
  return bucket.basis.matrix(rows), bucket.basis.matrix(cols)
