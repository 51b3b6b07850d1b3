"""Compressors: what a worker sends of its momentum.

A compressor is a `Selector` of coefficients in a `Basis`, with the size of the
chunks and the code of the values. Momentum, error feedback, byte counting and
communication are the same for all compressors; see `exchange`.

Selectors are of two kinds: those of what is largest, where all workers'
selections are gathered, and those of the same indices on all workers
(`RandomSubset`, `Striding`, `Slicing`, `Everything`), where an all-reduce
averages the values and traffic does not grow with the number of workers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax import _checks, _tree
from demo_optax.codes.format import ChunkFormat
from demo_optax.codes.values import VALUES
from demo_optax.compressors import bases, chunking, selectors
from demo_optax.compressors.bases import Basis
from demo_optax.compressors.selectors import Selector

# Value codes without a scale for each chunk: dense values need no chunks.
_UNSCALED = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class LeafPlan:
  """What is decided for a leaf from its shape and dtype alone.

  Attributes:
    grid: how the leaf is cut into chunks; of a sharded leaf, one shard of it.
    format: how the selection from a chunk is written to the wire.
  """

  grid: chunking.ChunkGrid
  format: ChunkFormat

  @property
  def num_bytes(self) -> int:
    """Bytes that the leaf takes in a message."""
    return self.format.num_bytes(self.grid.num_chunks)

  @property
  def is_dense(self) -> bool:
    """Whether the leaf is sent element by element, without chunks."""
    return self.grid.whole and self.format.values in _UNSCALED


@dataclasses.dataclass(frozen=True)
class Compressor:
  """What is selected from a worker's momentum, and how it is written.

  A new selector or basis is a frozen dataclass with the methods of `Selector`
  or `Basis`.

  Attributes:
    select: which coefficients of a chunk are sent.
    basis: the orthonormal transform of a chunk.
    chunk_size: longest side of a chunk, or its longest sides along the last two
      dimensions.
    values: how values travel, see `dct_topk`.
    padding: whether chunks may reach past the end of a dimension, see
      `dct_topk`.

  Raises:
    ValueError: `chunk_size` below 1, or unknown `values`.
    TypeError: `chunk_size` is not an integer.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> from demo_optax.compressors import Compressor, Identity, TopK
    >>> largest = Compressor(TopK(1), Identity())  # the largest element
    >>> tx = demo_optax.scale_by_demo(
    ...     largest, workers=demo_optax.Workers.simulated(1))
    >>> params = jnp.zeros(4)
    >>> update, _ = tx.update(
    ...     jnp.array([[1.0, -3.0, 2.0, 0.0]]), tx.init(params), params)
    >>> print(update)
    [ 0. -3.  0.  0.]
  """

  select: Selector
  basis: Basis
  chunk_size: int | tuple[int, int] = 64
  values: str = 'float32'
  padding: bool = True

  def __post_init__(self) -> None:
    _check_sides(self.chunk_size)
    if self.values not in VALUES:
      raise ValueError(
          f'values={self.values!r} is not known; choose one of'
          f' {", ".join(VALUES)}.'
      )

  def plan(self, shape: tuple[int, ...], dtype: Any) -> LeafPlan:
    """Returns how a leaf, or the shard of it on one device, is sent.

    Where a selection would take as many bytes as everything does, everything is
    sent and no indices are: values without a scale as the array itself.

    Args:
      shape: of the array, which has at least one element.
      dtype: of its momentum.
    """
    name = jnp.dtype(dtype).name
    grid = chunking.chunk_grid(shape, self.chunk_size, padding=self.padding)
    n, shared = grid.chunk_size, self.select.shared
    k = self.select.count(n)
    grouped = isinstance(self.select, selectors.GroupMax)
    sparse = LeafPlan(
        grid, ChunkFormat(n, k, name, self.values, shared, grouped)
    )
    whole = chunking.whole_grid(shape)
    if shared:
      everything = k == n and isinstance(self.basis, bases.Identity)
      dense = LeafPlan(whole, ChunkFormat(
          whole.chunk_size, whole.chunk_size, name, self.values, shared
      ))
      return dense if everything else self._checked(sparse)
    # A scale belongs to a chunk; values without one need no chunks.
    if grid.num_chunks == 1 or self.values in _UNSCALED:
      grid = whole
      n = grid.chunk_size
    dense = LeafPlan(grid, ChunkFormat(n, n, name, self.values))
    cheaper = sparse.num_bytes < dense.num_bytes
    return self._checked(sparse if cheaper else dense)

  def _checked(self, plan: LeafPlan) -> LeafPlan:
    """Raises if the basis has no matrix for the chunks of a leaf."""
    if not plan.grid.whole:
      try:
        for length in plan.grid.sides:
          self.basis.check(length)
      except ValueError as error:
        rows, cols = plan.grid.sides
        raise ValueError(
            f'A leaf of shape {plan.grid.shape} is cut into chunks of'
            f' {rows}x{cols}: {error}'
        ) from error
    return plan


# A compressor, or a prefix tree of them, or a function from the parameters to
# such a tree. None: the gradient is averaged uncompressed. FROZEN: the leaf is
# left alone.
CompressorTree = Any


@dataclasses.dataclass(frozen=True)
class Frozen:
  """Marks leaves, in a tree of compressors, that are not trained.

  Nothing of them is exchanged, their updates are zero, and what their gradients
  hold is not looked at.
  """


FROZEN = Frozen()


def per_leaf(
    compressor: CompressorTree, tree: Any, argument: str = 'compressor'
) -> list[Compressor | Frozen | None]:
  """Returns the compressor of each leaf of `tree`.

  Args:
    compressor: one for all, or a tree of them (of `None` and `FROZEN`) like
      `tree`, in which one in place of a subtree holds for all of it; or a
      function from `tree` to such a tree.
    tree: parameters.
    argument: what the caller calls `compressor`, for errors.

  Raises:
    ValueError: the trees differ in structure.
    TypeError: there is something else in the tree of compressors.
  """

  def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, Compressor | Frozen)

  if is_function(compressor):
    compressor = compressor(tree)
  for x in jax.tree.leaves(compressor, is_leaf=is_leaf):
    if not is_leaf(x):
      raise TypeError(
          f'{argument}={x!r} must be a Compressor, such as'
          ' demo_optax.dct_topk(...), or a tree of them and of None.'
      )
  return broadcast(compressor, tree, argument, is_leaf)


def is_function(x: Any) -> bool:
  """Returns whether `x` is to be called; modules that are trees are not."""
  if isinstance(x, jax.tree_util.Partial):
    return True
  return callable(x) and jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def broadcast(
    prefix: Any, tree: Any, argument: str, is_leaf: Any = None
) -> list[Any]:
  """Returns the leaf of a prefix tree that holds for each leaf of `tree`."""
  # Both may be made of `nnx.state(model)`; messages need not print arrays.
  prefix = _tree.without_variables(prefix)
  tree = jax.tree.map(lambda _: ..., _tree.without_variables(tree))
  leaves, treedef = jax.tree.flatten(prefix, is_leaf=is_leaf)
  try:
    subtrees = treedef.flatten_up_to(tree)
  except ValueError as error:
    remedy = ''
    if 'MaskedNode' in str(error):
      remedy = (
          ' Within optax.masked or optax.partition give a function from the'
          ' parameters to the tree: each part of the parameters has its own.'
      )
    raise ValueError(
        f'The tree in {argument} is not like the parameters: {error}{remedy}'
    ) from error
  return [
      x
      for x, subtree in zip(leaves, subtrees)
      for _ in jax.tree.leaves(subtree)
  ]


def dct_topk(
    chunk_size: int | tuple[int, int] = 64,
    topk: int = 32,
    *,
    values: str = 'float32',
    padding: bool = True,
) -> Compressor:
  r"""Sends the `topk` largest DCT coefficients of every chunk.

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
    Compressor(select=TopK(k=8), basis=Dct(), chunk_size=64, ...
    >>> params = {'w': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> for values in ('float32', 'sign'):  # per 4096 coefficients, in bytes
    ...   compressor = demo_optax.dct_topk(topk=8, values=values)
    ...   plan = demo_optax.plan(params, compressor, workers=16)
    ...   print(values, plan.sent_bytes / 4096)
    float32 43.0
    sign 14.0

  References:
    Peng et al., `DeMo: Decoupled Momentum Optimization
    <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1.
  """
  select = selectors.TopK(topk)
  return Compressor(select, bases.Dct(), chunk_size, values, padding)


def full() -> Compressor:
  r"""Sends all of the momentum: gradients are averaged as they are.

  .. math::
    q_i = m_i

  A dense all-reduce; with `alpha=1` nothing stays behind and the exchange is
  plain averaging. Of use in a tree of compressors, and to compare with.

  Args:
    None.

  Returns:
    A `Compressor`.

  Example:
    >>> import demo_optax, jax.numpy as jnp
    >>> workers = demo_optax.Workers.simulated(2)
    >>> everything = demo_optax.compressors.full()
    >>> tx = demo_optax.scale_by_demo(everything, workers=workers)
    >>> params = jnp.zeros(2)
    >>> gradients = jnp.array([[3.0, 4.0], [1.0, 0.0]])
    >>> print(tx.update(gradients, tx.init(params), params)[0])
    [2. 2.]

  References:
    From et al., `DeToNATION <https://arxiv.org/abs/2502.06728>`_, 2025
    ("Full").
  """
  return Compressor(selectors.Everything(), bases.Identity())


def _check_sides(chunk_size: int | tuple[int, int]) -> tuple[int, ...]:
  if not isinstance(chunk_size, tuple):
    chunk_size = (chunk_size,) * 2
  if len(chunk_size) != 2:
    raise ValueError(
        f'chunk_size={chunk_size} must be one number, or two: for the last two'
        ' dimensions.'
    )
  for side in chunk_size:
    _checks.check_positive('chunk_size', side)
  return chunk_size
