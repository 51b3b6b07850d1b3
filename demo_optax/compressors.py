"""Compressors: what a worker sends of its momentum.

A compressor is a record of pure functions of one leaf. Momentum, decay,
subtraction, byte counting and communication are not its business: they are the
same for all compressors and stand in `demo`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from demo_optax import chunks, selection, wire

VALUES = ('float32',)


@dataclasses.dataclass(frozen=True)
class LeafPlan:
  """What is decided for a leaf from its shape and dtype alone.

  Attributes:
    grid: how the leaf is cut into chunks.
    format: how the selection from a chunk is written to the wire.
  """

  grid: chunks.ChunkGrid
  format: wire.ChunkFormat

  @property
  def num_bytes(self) -> int:
    """Bytes that the leaf takes in a payload."""
    return self.format.num_bytes(self.grid.num_chunks)

  def with_blocks(self, blocks: tuple[int, ...]) -> 'LeafPlan':
    """The plan of a leaf that is so many times this one's blocks."""
    return dataclasses.replace(
        self, grid=dataclasses.replace(self.grid, blocks=blocks)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Compressor:
  """What is selected from a worker's momentum, and how it is written.

  Attributes:
    name: how it was made; compressors of the same name are equal.
    plan: `(shape, dtype) -> LeafPlan`, for a leaf of at least one element and
      the dtype of its momentum.
    to_coefficients: `([*shape], plan) -> [*plan.grid.coefficients_shape]`,
      linear and orthonormal (up to padding).
    from_coefficients: undoes it.
    clear_padding: removes from coefficients what they put into the padding.
    select: `([chunks, n], plan) -> int32[chunks, k]`, distinct places.
  """

  name: str
  plan: Callable[[tuple[int, ...], jnp.dtype], LeafPlan]
  to_coefficients: Callable[[jax.Array, LeafPlan], jax.Array]
  from_coefficients: Callable[[jax.Array, LeafPlan], jax.Array]
  clear_padding: Callable[[jax.Array, LeafPlan], jax.Array]
  select: Callable[[jax.Array, LeafPlan], jax.Array]

  def plan_blocks(
      self, shape: tuple[int, ...], dtype: jnp.dtype, blocks: tuple[int, ...]
  ) -> LeafPlan:
    """The plan of a leaf that is cut block by block."""
    block = tuple(d // b for d, b in zip(shape, blocks))
    return self.plan(block, dtype).with_blocks(blocks)

  def __repr__(self) -> str:
    return self.name

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Compressor) and self.name == other.name

  def __hash__(self) -> int:
    return hash(self.name)


def dct_topk(
    chunk_size: int = 64,
    topk: int = 32,
    *,
    values: str = 'float32',
    padding: bool = True,
) -> Compressor:
  r"""The `topk` largest DCT coefficients of every chunk.

  The last two dimensions of a leaf are cut into chunks of at most
  `chunk_size x chunk_size` (vectors: `chunk_size`; dimensions before the last
  two are batch), each chunk goes through the separable orthonormal DCT-II

  .. math::
    c_{uv} = \sum_{xy} D^{(r)}_{ux} D^{(c)}_{vy} m_{xy}, \quad
    D^{(L)}_{ux} = \sqrt{(2 - [u = 0]) / L}\, \cos \frac{\pi (2x + 1) u}{2L}

  and the `topk` coefficients of largest magnitude are sent, ties going to the
  lowest index. An index takes `ceil(log2 n)` bits, `n` being the number of
  coefficients in a chunk. Where that would cost as much as sending the leaf
  whole, the leaf is sent whole, without indices and without a transform.

  Args:
    chunk_size: longest side of a chunk, at least 1.
    topk: coefficients sent per chunk, at least 1; a chunk with fewer sends all.
    values: how values travel. `'float32'`: exactly, in the dtype of the
      momentum (float32; float64 for float64 parameters).
    padding: cut a dimension without a divisor in `[chunk_size / 2, chunk_size]`
      into nearly `chunk_size` long chunks, the last one padded. False follows
      the published implementation, which takes the largest divisor, however
      small, and sends more than the gradient for a prime dimension.

  Returns:
    A `Compressor`, for `scale_by_demo`, `demo` and `plan`.

  Raises:
    ValueError: `chunk_size` or `topk` below 1, or unknown `values`.
    TypeError: `chunk_size` or `topk` is not an integer.

  Example:
    >>> import demo_optax
    >>> demo_optax.dct_topk(topk=8)
    dct_topk(chunk_size=64, topk=8, values='float32', padding=True)

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1.
  """
  _check_positive('chunk_size', chunk_size)
  _check_positive('topk', topk)
  if values not in VALUES:
    raise ValueError(
        f'values={values!r} is not known; choose one of {", ".join(VALUES)}.'
    )

  def plan(shape: tuple[int, ...], dtype: jnp.dtype) -> LeafPlan:
    grid = chunks.chunk_grid(shape, chunk_size, padding=padding)
    n, name = grid.chunk_size, jnp.dtype(dtype).name
    sparse = LeafPlan(grid, wire.ChunkFormat(n, min(topk, n), name))
    whole = chunks.whole_grid(shape)
    size = whole.chunk_size
    dense = LeafPlan(whole, wire.ChunkFormat(size, size, name))
    return sparse if sparse.num_bytes < dense.num_bytes else dense

  return Compressor(
      name=(
          f'dct_topk(chunk_size={chunk_size}, topk={topk}, values={values!r},'
          f' padding={padding})'
      ),
      plan=plan,
      to_coefficients=lambda x, plan: chunks.to_coefficients(
          x, plan.grid, chunks.dct_basis
      ),
      from_coefficients=lambda c, plan: chunks.from_coefficients(
          c, plan.grid, chunks.dct_basis
      ),
      clear_padding=lambda c, plan: chunks.clear_padding(
          c, plan.grid, chunks.dct_basis
      ),
      select=lambda c, plan: selection.top_k(c, plan.format.k),
  )


def _check_positive(name: str, value: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(
        f'{name}={value!r} must be a Python integer: it fixes array shapes.'
    )
  if value < 1:
    raise ValueError(f'{name}={value} must be at least 1.')
