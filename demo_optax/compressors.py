"""Compressors: what a worker sends of its momentum.

A compressor is a record of pure functions of one leaf. Momentum, decay,
subtraction, byte counting and communication are not its business: they are the
same for all compressors and stand in `demo`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from demo_optax import chunks, paths, selection, wire
from demo_optax.value_codes import VALUES


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

  def stacked(self, count: int) -> 'LeafPlan':
    """The plan of so many such leaves, stacked if there are several."""
    if count == 1:
      return self
    return dataclasses.replace(self, grid=self.grid.stacked(count))


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
    from_selected: `(int32[workers, chunks, k], [workers, chunks, k], plan)`,
      the array whose coefficients are the sum of those selected.
    clear_padding: removes from coefficients what they put into the padding.
    select: `([chunks, n], plan) -> int32[chunks, k]`, ascending places.
  """

  name: str
  plan: Callable[[tuple[int, ...], jnp.dtype], LeafPlan]
  to_coefficients: Callable[[jax.Array, LeafPlan], jax.Array]
  from_coefficients: Callable[[jax.Array, LeafPlan], jax.Array]
  from_selected: Callable[[jax.Array, jax.Array, LeafPlan], jax.Array]
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
  lowest index.

  The `k` indices of a chunk of `n` coefficients take, in bits, the least of

  .. math::
    k \lceil \log_2 n \rceil, \quad n, \quad
    \min_l\; k l + k + \lceil n / 2^l \rceil - 1

  (as they are; a bit per coefficient; Elias-Fano, within 10 % of
  :math:`\log_2 \binom{n}{k}` for `n >= 4096` and `8 <= k <= n / 19`). The
  values :math:`v` of a chunk travel as

  ============ ============== ============== =================================
  `values`     bits per value bits per chunk read as
  ============ ============== ============== =================================
  `'float32'`  32 (or 64)     0              :math:`v`, in the momentum's dtype
  `'bfloat16'` 16             0              :math:`v` rounded to bfloat16
  `'int8'`     8              16             :math:`s\, \mathrm{round}(v / s)`,
                                             :math:`s = \max |v| / 127`
  `'int4'`     4              16             the same, :math:`s = \max |v| / 7`
  `'sign'`     1              16             :math:`\pm s`,
                                             :math:`s = \mathrm{mean} |v|`
  ============ ============== ============== =================================

  with :math:`s` rounded to bfloat16, and a level outside of its range cut. What
  of :math:`s`, or of a bfloat16 value, is below the normal numbers
  (:math:`2^{-126}`) is read as zero, and at most :math:`2^{126} / n` is sent at
  once. What is lost stays in the momentum and is sent later. Computation and
  momentum are float32 (float64 for float64 parameters) with every code.

  Where that would cost as much as sending everything in the same value code,
  everything is sent and no indices are: float32 and bfloat16 values as the leaf
  itself, without a transform; the others as all coefficients of all chunks.

  Args:
    chunk_size: longest side of a chunk, at least 1.
    topk: coefficients sent per chunk, at least 1; a chunk with fewer sends all.
    values: how values travel, see above: `'float32'`, `'bfloat16'`, `'int8'`,
      `'int4'` or `'sign'`.
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
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> demo_optax.dct_topk(topk=8)
    dct_topk(chunk_size=64, topk=8, values='float32', padding=True)
    >>> params = {'w': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> for values in ('float32', 'sign'):  # per 4096 coefficients, in bytes
    ...   compressor = demo_optax.dct_topk(topk=8, values=values)
    ...   plan = demo_optax.plan(params, compressor, workers=16)
    ...   print(values, plan.sent_bytes / 4096)
    float32 42.875244140625
    sign 13.875244140625

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
    name = jnp.dtype(dtype).name
    n = grid.chunk_size
    sparse = LeafPlan(grid, wire.ChunkFormat(n, min(topk, n), name, values))
    # A scale belongs to a chunk; values without one need no chunks.
    if grid.num_chunks == 1 or values in ('float32', 'bfloat16'):
      grid = chunks.whole_grid(shape)
      n = grid.chunk_size
    dense = LeafPlan(grid, wire.ChunkFormat(n, n, name, values))
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
      from_selected=functools.partial(_from_selected, chunks.dct_basis),
      clear_padding=lambda c, plan: chunks.clear_padding(
          c, plan.grid, chunks.dct_basis
      ),
      select=lambda c, plan: selection.top_k(c, plan.format.k),
  )


def _from_selected(
    basis: chunks.Basis, indices: jax.Array, values: jax.Array, plan: LeafPlan
) -> jax.Array:
  workers, _, k = indices.shape
  sides = (1, *plan.grid.lengths)[-2:]
  if not plan.grid.whole and paths.transform_selected(workers, k, *sides):
    return functools.reduce(jnp.add, [
        chunks.from_selected(i, v, plan.grid, basis)
        for i, v in zip(indices, values)
    ])
  c = selection.add_up(indices, values, plan.format.n)
  c = c.reshape(plan.grid.coefficients_shape)
  return chunks.from_coefficients(c, plan.grid, basis)


def _check_positive(name: str, value: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(
        f'{name}={value!r} must be a Python integer: it fixes array shapes.'
    )
  if value < 1:
    raise ValueError(f'{name}={value} must be at least 1.')
