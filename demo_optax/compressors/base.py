"""Compressors: what a worker sends of its momentum.

A compressor is a record of pure functions of one leaf. Momentum, decay,
subtraction, byte counting and communication are not its business: they are the
same for all compressors and stand in `exchange`.

Of two kinds: those that select what is largest (`dct_topk` and the same in
other bases), where all workers' selections are gathered, and those that take
the same places on all workers (`random_subset`, `striding`, `slicing`, `full`),
where an all-reduce averages the values and traffic does not grow with the
number of workers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax.compressors import chunking as chunks
from demo_optax.engine import heuristics as paths
from demo_optax.engine import topk as selection
from demo_optax.wire import message as wire
from demo_optax.wire.values import VALUES


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
    name: how it was made, all arguments included; compressors of the same name
      and functions are equal.
    plan: `(shape, dtype) -> LeafPlan`, for a leaf of at least one element and
      the dtype of its momentum.
    to_coefficients: `([*shape], plan) -> [*plan.grid.coefficients_shape]`,
      linear and orthonormal (up to padding).
    from_coefficients: undoes it.
    from_selected: `(int32[workers, chunks, k], [workers, chunks, k], plan)`,
      the array whose coefficients are the sum of those selected.
    clear_padding: removes from coefficients what they put into the padding.
    select: `([chunks, n], plan) -> int32[chunks, k]`, ascending places; for
      formats that are not `shared`.
    places: `(plan, step) -> int32[k]`, ascending places in every chunk, where
      `step` is int32 `[]`, the exchanges so far; for formats that are.
    basis: of the transform, if that is the one of `chunks` with this basis and
      the selection that of the `topk` compressors: then kernels may do the same
      at once. Who replaces the transform replaces it, too (`None`).
  """

  name: str
  plan: Callable[[tuple[int, ...], jnp.dtype], LeafPlan]
  to_coefficients: Callable[[jax.Array, LeafPlan], jax.Array]
  from_coefficients: Callable[[jax.Array, LeafPlan], jax.Array]
  from_selected: Callable[[jax.Array, jax.Array, LeafPlan], jax.Array]
  clear_padding: Callable[[jax.Array, LeafPlan], jax.Array]
  select: Callable[[jax.Array, LeafPlan], jax.Array] | None = None
  places: Callable[[LeafPlan, jax.Array], jax.Array] | None = None
  basis: chunks.Basis | None = None

  def plan_blocks(
      self, shape: tuple[int, ...], dtype: jnp.dtype, blocks: tuple[int, ...]
  ) -> LeafPlan:
    """The plan of a leaf that is cut block by block."""
    block = tuple(d // b for d, b in zip(shape, blocks))
    plan = self.plan(block, dtype)
    wanted = 'places' if plan.format.shared else 'select'
    if getattr(self, wanted) is None:
      raise ValueError(
          f'{self} plans a format with shared={plan.format.shared}, and so'
          f' needs {wanted}: give it to Compressor.'
      )
    return plan.with_blocks(blocks)

  @property
  def kernel_basis(self) -> chunks.Basis | None:
    """The basis, if kernels may transform and select at once."""
    return self.basis if self.select is _largest else None

  def __repr__(self) -> str:
    return self.name

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Compressor) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self.name)

  @property
  def _key(self) -> tuple[Any, ...]:
    """The name and the code of all functions, what they close over left out."""
    functions = (getattr(f, 'func', f) for f in vars(self).values())
    return self.name, *(getattr(f, '__code__', None) for f in functions)


# A compressor, or a tree of them whose leaves may be None: nothing exchanged.
CompressorTree = Any


def per_leaf(
    compressor: CompressorTree, tree: Any, argument: str = 'compressor'
) -> list[Compressor | None]:
  """The compressor of each leaf of `tree`.

  Args:
    compressor: one for all, or a tree of them (and of `None`) like `tree`, in
      which one in place of a subtree holds for all of it.
    tree: parameters.
    argument: what the caller calls `compressor`, for errors.

  Returns:
    One for each leaf, in their order.

  Raises:
    ValueError: the trees differ in structure.
    TypeError: there is something else in the tree of compressors.
  """

  def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, Compressor)

  prefix, treedef = jax.tree.flatten(compressor, is_leaf=is_leaf)
  for x in prefix:
    if not is_leaf(x):
      raise TypeError(
          f'{argument}={x!r} must be a Compressor, such as'
          ' demo_optax.dct_topk(...), or a tree of them and of None.'
      )
  try:
    subtrees = treedef.flatten_up_to(tree)
  except ValueError as error:
    raise ValueError(
        f'The tree in {argument} is not like the parameters: {error}'
    ) from error
  return [
      x
      for x, subtree in zip(prefix, subtrees)
      for _ in jax.tree.leaves(subtree)
  ]


def dct_topk(
    chunk_size: int | tuple[int, int] = 64,
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
    chunk_size: longest side of a chunk, at least 1; or the longest sides along
      the last two dimensions: `(1, 256)` transforms rows, as one may want it
      for embeddings.
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
    float32 42.878173828125
    sign 13.878173828125

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1.
  """
  return _topk(
      'dct_topk', chunks.dct_basis, chunk_size, topk, values, padding
  )


def hadamard_topk(
    chunk_size: int | tuple[int, int] = 64,
    topk: int = 32,
    *,
    values: str = 'float32',
    padding: bool = True,
) -> Compressor:
  r"""`dct_topk` with the Walsh-Hadamard transform in the place of the DCT.

  .. math::
    H_1 = [1], \quad H_{2L} = \frac{1}{\sqrt 2}
    \begin{pmatrix} H_L & H_L \\ H_L & -H_L \end{pmatrix}

  Only signs and one scale: no multiplications on hardware that can use it.

  Args:
    chunk_size: as in `dct_topk`, a power of two.
    topk: as in `dct_topk`.
    values: as in `dct_topk`.
    padding: as in `dct_topk`.

  Returns:
    A `Compressor`.

  Raises:
    ValueError: as `dct_topk`; `chunk_size` is not a power of two; and, when a
      leaf is planned, its chunks have a side that is none.
    TypeError: as `dct_topk`.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> compressor = demo_optax.hadamard_topk(topk=8)
    >>> params = {'w': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> demo_optax.plan(params, compressor, workers=16).sent_bytes / 4096
    42.878...

  References:
    The ablation of the transform in Peng et al.
    <https://arxiv.org/abs/2411.19870v2>, version 2.
  """
  if any(side & (side - 1) for side in _check_sides(chunk_size)):
    raise ValueError(f'chunk_size={chunk_size} must be a power of two.')
  plain = _topk(
      'hadamard_topk',
      chunks.hadamard_basis,
      chunk_size,
      topk,
      values,
      padding,
  )

  def plan(shape: tuple[int, ...], dtype: jnp.dtype) -> LeafPlan:
    leaf = plain.plan(shape, dtype)
    bad = [l for l in leaf.grid.lengths if l & (l - 1)]
    if bad and not leaf.grid.whole:
      raise ValueError(
          f'A leaf of shape {shape} is cut into chunks with a side of'
          f' {bad[0]}, which is not a power of two, and {plain} needs one. Use'
          ' dct_topk or random_orthogonal_topk for this leaf, with'
          ' demo_optax.partition.'
      )
    return leaf

  return dataclasses.replace(plain, plan=plan)


def random_orthogonal_topk(
    chunk_size: int | tuple[int, int] = 64,
    topk: int = 32,
    *,
    seed: int = 0,
    values: str = 'float32',
    padding: bool = True,
) -> Compressor:
  r"""`dct_topk` with a random orthogonal transform in the place of the DCT.

  .. math::
    c = Q^{(r)} m\, Q^{(c)\top}, \quad Q Q^\top = I

  One matrix for every length of a side, drawn once; the paper draws another
  one at every step, with which momentum could not be kept as coefficients.

  Args:
    chunk_size: as in `dct_topk`.
    topk: as in `dct_topk`.
    seed: of the matrices, in `[0, 2**32)`; the same on all workers.
    values: as in `dct_topk`.
    padding: as in `dct_topk`.

  Returns:
    A `Compressor` of coefficients `[chunks, n]`.

  Raises:
    ValueError: as `dct_topk`; `seed` out of range; `chunk_size` above 256,
      whose matrices take long to draw.
    TypeError: as `dct_topk`; `seed` is not an integer.

  Example:
    >>> import demo_optax
    >>> demo_optax.random_orthogonal_topk(32, 8).name
    "random_orthogonal_topk(seed=0, chunk_size=32, topk=8, ...

  References:
    The ablation of the transform in Peng et al.
    <https://arxiv.org/abs/2411.19870v2>, version 2.
  """
  _check_seed(seed)
  if max(_check_sides(chunk_size)) > 256:
    raise ValueError(f'chunk_size={chunk_size} must not be above 256.')
  return _topk(
      'random_orthogonal_topk',
      functools.partial(chunks.random_basis, seed=seed),
      chunk_size,
      topk,
      values,
      padding,
      first=f'seed={seed}, ',
  )


def identity_topk(
    chunk_size: int | tuple[int, int] = 64,
    topk: int = 32,
    *,
    values: str = 'float32',
    padding: bool = True,
) -> Compressor:
  r"""The `topk` largest elements of every chunk, without a transform.

  .. math::
    q = \mathrm{top}_k(m)

  As in top-k sparsification and SparseLoCo. For the published density of a
  percent or so, take `topk` near `0.01 * chunk_size ** 2`.

  Args:
    chunk_size: as in `dct_topk`.
    topk: as in `dct_topk`.
    values: as in `dct_topk`.
    padding: as in `dct_topk`.

  Returns:
    A `Compressor`.

  Raises:
    ValueError: as `dct_topk`.
    TypeError: as `dct_topk`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(1)
    >>> tx = demo_optax.scale_by_demo(
    ...     demo_optax.identity_topk(topk=1), workers=workers)
    >>> params = jnp.zeros(4)
    >>> update, _ = tx.update(
    ...     jnp.array([[1.0, -3.0, 2.0, 0.0]]), tx.init(params), params)
    >>> print(update)
    [ 0. -3.  0.  0.]

  References:
    Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_, 2025.
  """
  return _topk(
      'identity_topk',
      chunks.identity_basis,
      chunk_size,
      topk,
      values,
      padding,
  )


def random_subset(
    rate: float, *, chunk_size: int | tuple[int, int] = 64, seed: int = 0
) -> Compressor:
  r"""A random share of the elements, the same on all workers.

  .. math::
    q_i = m_i[S_t], \quad S_t \text{ drawn anew for every step } t

  The same :math:`k = \lceil \rho n \rceil` places in every chunk of :math:`n`.
  All workers draw them from `seed` and the number of exchanges, so that no
  index is sent and an all-reduce averages the values: what is received does not
  grow with the number of workers. Nothing is selected by size.

  Args:
    rate: :math:`\rho`, the share of the elements, in `(0, 1]`.
    chunk_size: longest side of a chunk.
    seed: of the places, in `[0, 2**32)`; the same on all workers.

  Returns:
    A `Compressor`.

  Raises:
    ValueError: `rate`, `chunk_size` or `seed` out of range.
    TypeError: `chunk_size` or `seed` is not an integer.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {'w': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> compressor = demo_optax.random_subset(1 / 32)
    >>> for workers in (2, 64):
    ...   print(demo_optax.plan(params, compressor, workers).received_bytes)
    2097168
    4128800

  References:
    From et al., `DeToNATION: Decoupled Torch Network-Aware Training on
    Interlinked Online Nodes <https://arxiv.org/abs/2502.06728>`_, 2025
    ("Random").
  """
  _check_seed(seed)

  def places(n: int, k: int, step: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jnp.sort(jax.random.permutation(key, n)[:k])

  return _subset('random_subset', rate, chunk_size, places, f', seed={seed}')


def striding(
    rate: float, *, chunk_size: int | tuple[int, int] = 64
) -> Compressor:
  r"""Elements at equal distances, all one further at every step.

  .. math::
    q_i = m_i[\{(t + j s) \bmod n : 0 \le j < k\}], \quad
    s = \lfloor n / k \rfloor,\ k = \lceil \rho n \rceil

  in every chunk of :math:`n`. Exchanged as `random_subset`.

  Args:
    rate: :math:`\rho`, the share of the elements, in `(0, 1]`.
    chunk_size: longest side of a chunk.

  Returns:
    A `Compressor`.

  Raises:
    ValueError: `rate` or `chunk_size` out of range.
    TypeError: `chunk_size` is not an integer.

  Example:
    >>> import demo_optax
    >>> demo_optax.striding(1 / 16)
    striding(rate=0.0625, chunk_size=64)

  References:
    From et al., `DeToNATION <https://arxiv.org/abs/2502.06728>`_, 2025
    ("Striding").
  """

  def places(n: int, k: int, step: jax.Array) -> jax.Array:
    stride = n // k
    spread = stride * jnp.arange(k, dtype=jnp.int32)
    return jnp.sort((step % n + spread) % n)

  return _subset('striding', rate, chunk_size, places)


def slicing(
    rate: float, *, chunk_size: int | tuple[int, int] = 64
) -> Compressor:
  r"""So many elements in a row, the next ones at every step.

  .. math::
    q_i = m_i[\{t k, \dots, t k + k - 1\}], \quad k = \lceil \rho n \rceil

  in every chunk of :math:`n`, modulo :math:`n`. Exchanged as `random_subset`.

  Args:
    rate: :math:`\rho`, the share of the elements, in `(0, 1]`.
    chunk_size: longest side of a chunk.

  Returns:
    A `Compressor`.

  Raises:
    ValueError: `rate` or `chunk_size` out of range.
    TypeError: `chunk_size` is not an integer.

  Example:
    >>> import demo_optax
    >>> demo_optax.slicing(1 / 16)
    slicing(rate=0.0625, chunk_size=64)

  References:
    From et al., `DeToNATION <https://arxiv.org/abs/2502.06728>`_, 2025
    ("Slicing").
  """

  def places(n: int, k: int, step: jax.Array) -> jax.Array:
    # Modulo the number of steps after which all come again: no overflow.
    turn = step % (n // math.gcd(n, k))
    return jnp.sort((turn * k + jnp.arange(k, dtype=jnp.int32)) % n)

  return _subset('slicing', rate, chunk_size, places)


def full() -> Compressor:
  r"""All of the momentum: gradients are averaged as they are.

  .. math::
    q_i = m_i

  A dense all-reduce; with `alpha=1` nothing stays behind and the exchange is
  plain averaging. Of use beside others in `demo_optax.partition`, and to
  compare with.

  Args:
    None.

  Returns:
    A `Compressor`.

  Raises:
    Nothing.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> tx = demo_optax.scale_by_demo(demo_optax.full(), workers=workers)
    >>> params = jnp.zeros(2)
    >>> gradients = jnp.array([[3.0, 4.0], [1.0, 0.0]])
    >>> print(tx.update(gradients, tx.init(params), params)[0])
    [2. 2.]

  References:
    From et al., `DeToNATION <https://arxiv.org/abs/2502.06728>`_, 2025
    ("Full").
  """
  everything = _subset('full', 1.0, 1, lambda n, k, step: jnp.arange(n))
  return dataclasses.replace(everything, name='full()')


def _topk(
    name: str,
    basis: chunks.Basis,
    chunk_size: int | tuple[int, int],
    topk: int,
    values: str,
    padding: bool,
    first: str = '',
) -> Compressor:
  """The largest coefficients in some basis."""
  _check_sides(chunk_size)
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
          f'{name}({first}chunk_size={chunk_size}, topk={topk},'
          f' values={values!r}, padding={padding})'
      ),
      plan=plan,
      select=_largest,
      basis=basis,
      **_transform(basis),
  )


def _largest(c: jax.Array, plan: LeafPlan) -> jax.Array:
  return selection.top_k(c, plan.format.k)


def _subset(
    name: str,
    rate: float,
    chunk_size: int | tuple[int, int],
    places: Callable[[int, int, jax.Array], jax.Array],
    more: str = '',
) -> Compressor:
  """The same elements on all workers; `places` maps `(n, k, step)`."""
  if isinstance(rate, bool) or not isinstance(rate, (int, float)):
    raise TypeError(f'rate={rate!r} must be a Python number.')
  if not 0 < rate <= 1:
    raise ValueError(f'rate={rate} is not in (0, 1].')
  _check_sides(chunk_size)

  def plan(shape: tuple[int, ...], dtype: jnp.dtype) -> LeafPlan:
    grid = chunks.chunk_grid(shape, chunk_size)
    if rate == 1:
      grid = chunks.whole_grid(shape)
    n = grid.chunk_size
    k = min(n, math.ceil(rate * n))
    name = jnp.dtype(dtype).name
    return LeafPlan(grid, wire.ChunkFormat(n, k, name, shared=True))

  return Compressor(
      name=f'{name}(rate={rate}, chunk_size={chunk_size}{more})',
      plan=plan,
      places=lambda plan, step: places(plan.format.n, plan.format.k, step),
      **_transform(chunks.identity_basis),
  )


def _transform(basis: chunks.Basis) -> dict[str, Any]:
  """The functions of a compressor that follow from its basis."""

  def to_coefficients(x: jax.Array, plan: LeafPlan) -> jax.Array:
    return chunks.to_coefficients(x, plan.grid, basis)

  def from_coefficients(c: jax.Array, plan: LeafPlan) -> jax.Array:
    return chunks.from_coefficients(c, plan.grid, basis)

  def clear_padding(c: jax.Array, plan: LeafPlan) -> jax.Array:
    return chunks.clear_padding(c, plan.grid, basis)

  return {
      'to_coefficients': to_coefficients,
      'from_coefficients': from_coefficients,
      'from_selected': functools.partial(_from_selected, basis),
      'clear_padding': clear_padding,
  }


def _from_selected(
    basis: chunks.Basis, indices: jax.Array, values: jax.Array, plan: LeafPlan
) -> jax.Array:
  workers, _, k = indices.shape
  sides = (1, *plan.grid.lengths)[-2:]
  transformed = not plan.grid.whole and basis is not chunks.identity_basis
  if transformed and paths.transform_selected(workers, k, *sides):
    return functools.reduce(jnp.add, [
        chunks.from_selected(i, v, plan.grid, basis)
        for i, v in zip(indices, values)
    ])
  c = selection.add_up(indices, values, plan.format.n)
  c = c.reshape(plan.grid.coefficients_shape)
  return chunks.from_coefficients(c, plan.grid, basis)


def _check_sides(chunk_size: int | tuple[int, int]) -> tuple[int, ...]:
  if not isinstance(chunk_size, tuple):
    chunk_size = (chunk_size,) * 2
  if len(chunk_size) != 2:
    raise ValueError(
        f'chunk_size={chunk_size} must be one number, or two: for the last two'
        ' dimensions.'
    )
  for side in chunk_size:
    _check_positive('chunk_size', side)
  return chunk_size


def _check_seed(seed: int) -> None:
  if isinstance(seed, bool) or not isinstance(seed, int):
    raise TypeError(f'seed={seed!r} must be a Python integer.')
  if not 0 <= seed < 2**32:
    raise ValueError(f'seed={seed} is not in [0, 2**32).')


def _check_positive(name: str, value: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(
        f'{name}={value!r} must be a Python integer: it fixes array shapes.'
    )
  if value < 1:
    raise ValueError(f'{name}={value} must be at least 1.')
