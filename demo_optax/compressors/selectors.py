"""Selectors: choose the coefficients to send from every chunk.

`RandomSubset`, `Striding` and `Slicing` are "Random", "Striding" and "Slicing"
of From et al., DeToNATION, arXiv:2502.06728.
"""

import dataclasses
import math
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from demo_optax import _checks
from demo_optax.numerics import topk


class Selector(Protocol):
  """Selects `count(n)` out of `n` coefficients in every chunk.

  Implement it as a frozen dataclass: selectors are compared and hashed.

  Attributes:
    shared: whether all workers select the same indices. Then no indices are
      sent and values are summed. The indices may depend on the step and the
      chunk length alone: the selector is called with one chunk of zeros.
  """

  shared: ClassVar[bool]

  def count(self, n: int) -> int:
    """Returns how many coefficients are selected, 1 to `n`."""

  def __call__(
    self,
    coefficients: Array,
    step: Array,
  ) -> Array:
    """Returns the indices selected from `coefficients [chunks, n]`.

    These are momentum that includes the new gradient; `step`, int32 `[]`,
    counts the exchanges so far. Indices are integers `[chunks, count(n)]` in
    `[0, n)`, distinct within a chunk, in any order.
    """


@dataclasses.dataclass(frozen=True)
class TopK:
  """The `k` coefficients with the largest magnitudes, among equals the first.

  Attributes:
    k: at least 1; a chunk with fewer sends all.
    per: coefficients in a full chunk. A smaller chunk sends its share of `k`,
      rounded up: `ceil(k n / per)`. None: every chunk sends `k`.
  """

  shared: ClassVar[bool] = False
  k: int
  per: int | None = None

  def __post_init__(self) -> None:
    _checks.check_positive('topk', self.k)

  def count(self, n: int) -> int:
    """Returns how many coefficients are selected."""
    per = self.per or n
    share = -(-self.k * min(n, per) // per)
    return min(share, n)

  def __call__(
    self,
    coefficients: Array,
    step: Array,
  ) -> Array:
    del step
    return topk.top_k(coefficients, self.count(coefficients.shape[1]))


@dataclasses.dataclass(frozen=True)
class _Share:
  """Selects a share of the coefficients, the same on all workers."""

  shared: ClassVar[bool] = True
  rate: float

  def __post_init__(self) -> None:
    _checks.check_range('rate', self.rate, '(0, 1]')

  def count(self, n: int) -> int:
    """Returns `ceil(rate * n)`, at least 1, without rounding errors."""
    count = math.ceil(self.rate * n - 1e-9)
    return min(max(1, count), n)


@dataclasses.dataclass(frozen=True)
class RandomSubset(_Share):
  """A random share of the coefficients, the same on all workers.

  All workers draw the same places in all chunks with one size, from `seed` and
  the step. No index is sent, and an all-reduce averages the
  values: received bytes do not grow with the number of workers.

  Attributes:
    rate: sends `ceil(rate * n)` coefficients; in (0, 1].
    seed: 0 or more; the same on all workers.
  """

  seed: int = 0

  def __call__(
    self,
    coefficients: Array,
    step: Array,
  ) -> Array:
    n = coefficients.shape[1]
    key = jax.random.fold_in(jax.random.key(self.seed), step)
    places = jax.random.permutation(key, n)
    return places[None, : self.count(n)]


@dataclasses.dataclass(frozen=True)
class Striding(_Share):
  """As `RandomSubset`, with equal distances, shifted by one at every step."""

  def __call__(
    self,
    coefficients: Array,
    step: Array,
  ) -> Array:
    n = coefficients.shape[1]
    k = self.count(n)
    spread = (n // k) * jnp.arange(k, dtype=jnp.int32)
    return ((step % n + spread) % n)[None]


@dataclasses.dataclass(frozen=True)
class Slicing(_Share):
  """As `RandomSubset`, with consecutive places, the next ones at every step."""

  def __call__(
    self,
    coefficients: Array,
    step: Array,
  ) -> Array:
    n = coefficients.shape[1]
    k = self.count(n)
    # A table, since a product could overflow int32.
    period = n // math.gcd(n, k)
    starts = np.arange(period, dtype=np.int64) * k % n
    start = jnp.asarray(starts, jnp.int32)[step % period]
    places = (start + jnp.arange(k, dtype=jnp.int32)) % n
    return places[None]
