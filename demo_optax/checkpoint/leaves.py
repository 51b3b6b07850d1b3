"""States as plain dictionaries of arrays, momentum leaf by leaf, and back.

Momentum's buckets have shapes that depend on workers, devices and all
parameters.
A checkpoint has coefficients for every parameter instead, and a record that
describes its chunks:

    state -> {name: array} -> any files -> {name: array}
          -> compared with another state: errors name the leaf
          -> regrouped (resize), cut into other chunks (rechunk) -> state
"""

import json
from collections.abc import Mapping, Sequence

import chex
import jax
import numpy as np

from demo_optax import _paths, replicas
from demo_optax._paths import Keys, Path
from demo_optax.checkpoint import placement
from demo_optax.checkpoint.buckets import (
  Coding,
  coding_of,
  cut_bucket,
  fill_bucket,
)
from demo_optax.checkpoint.compare import check_fits, saved_records
from demo_optax.checkpoint.placement import Value, abstract
from demo_optax.checkpoint.regroup import regroup, regroup_owned
from demo_optax.compressors import bases
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.layout import Layout, Leaf, Record
from demo_optax.transformation import layouts_in


def to_leaves(state: chex.ArrayTree) -> dict[str, Value]:
  """Returns a state as a dictionary of arrays, for any code that saves.

  Names are dotted paths. `from_leaves` makes the state again, also for another
  number of workers.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> from demo_optax import checkpoint
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.scale_by_demo(workers=workers)
    >>> params = {'w': jnp.ones((128, 128))}
    >>> saved = checkpoint.to_leaves(tx.init(params))
    >>> saved['worker_stacked.momentum.w'].shape
    (4, 2, 2, 4096)
    >>> state = checkpoint.from_leaves(saved, jax.eval_shape(tx.init, params))

  Momentum is `[workers, *counts, n]` for each parameter, `n` coefficients in
  each of `counts` chunks, sharded as the parameter. `...layout` is a record of
  the chunks, JSON text as uint8.

  Args:
    state: any tree with `scale_by_demo` states and their types: made by
      `tx.init`, a `TrainState`, an `nnx.Optimizer` (not its `nnx.state`), with
      parameters. Leaves are arrays, or `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: momentum differs between devices and has no worker axis.
  """
  layouts = layouts_in(state, checked=True)
  flat = _paths.leaves_of(state)
  _check_stacked(flat)
  leaves: dict[str, Value] = {}

  def add(keys: Keys, x: Value) -> None:
    name = _paths.dotted(keys)
    if name in leaves:
      raise ValueError(
        f'The tree must have one leaf called {name}, got two. Rename one.'
      )
    leaves[name] = x

  for keys, array in flat:
    if _paths.is_bucket(keys):
      layout = layouts[keys[:-3]]
      number, is_owned = _bucket_at(keys, layout)
      if is_owned:
        array = _of_one_owner(layout.buckets[number].shape, array)
      coefficients = cut_bucket(layout, number, array)
      for member, of_leaf in coefficients.items():
        leaf = layout.leaves[member]
        add((*keys[:-1], *leaf.keys), of_leaf)
    elif keys[-2:] == ('layout', 'digest'):
      # Instead of the digest, which depends on devices.
      text = json.dumps(layouts[keys[:-2]].records)
      add(keys[:-1], np.frombuffer(text.encode(), np.uint8))
    else:
      add(keys, array)
  return leaves


def from_leaves(
  saved: Mapping[str, Value],
  like: chex.ArrayTree,
  *,
  resize: bool = False,
  rechunk: bool = False,
) -> chex.ArrayTree:
  """Returns a tree like `like` from what `to_leaves` returned.

  Without options nothing is converted, and what does not fit is an error.
  `to_leaves` has an example.

  With `resize`, old and new workers divide the unit interval into equal parts.
  A new worker is the mean over the old ones, weighted by their overlap: from 4
  to 2 workers the mean of pairs, from 4 to 8 every worker twice. The mean over
  all workers does not change, up to rounding. Integers, booleans and PRNG keys
  come from the old worker with the largest overlap, the first among equals.
  With more workers, each folds its number into its key. Owners' residuals
  follow their chunks, exactly.

  Args:
    saved: arrays by name, from NumPy or JAX, on any devices.
    like: a state as for `to_leaves`, such as `jax.eval_shape(tx.init, params)`.
      Leaves are moved to its devices; without a sharding, JAX's are not moved.
    resize: whether to regroup stacked arrays (under a field `worker_stacked`)
      for other workers, and to drop residuals that `like` lacks.
    rechunk: whether to convert momentum with other chunks or another compressor
      through parameter space, up to rounding. With equal chunks and transform,
      every bit is kept.

  Raises:
    ValueError: `saved` and `like` differ. Names leaves, values and a remedy.
  """
  layouts = layouts_in(like, checked=True)
  asked = {'chunks': rechunk, 'workers': resize}
  # Shapes alone: nothing is computed before all fits.
  wanted = to_leaves(jax.tree.map(abstract, like))
  records = {_paths.dotted((*root, 'layout')) for root in layouts}
  check_fits(saved, wanted, records, asked)

  def restored(path: Path, x: Value) -> Value:
    keys = _paths.path_keys(path)
    if _paths.is_bucket(keys):
      return _bucket(saved, layouts[keys[:-3]], keys, x)
    if keys[-2:] == ('layout', 'digest'):
      return layouts[keys[:-2]].digest
    array = saved[_paths.dotted(keys)]
    if not _paths.is_stacked(keys) or len(array) == len(x):
      return array
    return placement.run(regroup, array, placement.of(x), len(x))

  def place(path: Path, x: Value) -> Value:
    return placement.place(restored(path, x), x)

  return jax.tree_util.tree_map_with_path(place, like)


def _check_stacked(leaves: Sequence[tuple[Keys, Value]]) -> None:
  """Raises for arrays that differ between workers and have no worker axis."""
  arrays = {}
  for keys, array in leaves:
    if _paths.is_stacked(keys) and replicas.has_copies(array):
      arrays[_paths.dotted(keys)] = array
  if arrays and (differences := replicas.check_replicas(arrays)):
    raise ValueError(
      f'{differences[0].leaf} must be sharded over the workers, got one array'
      ' that differs between devices: only one worker would be saved. In'
      ' jax.shard_map take demo_optax.state_specs(tx, params, workers) as'
      " in_specs and out_specs of the optimizer's state, not P()."
    )


# Buckets ----------------------------------------------------------------------


def _bucket_at(keys: Keys, layout: Layout) -> tuple[int, bool]:
  """Returns a bucket's number, and whether it has owners' residuals."""
  names = [bucket.name for bucket in layout.buckets]
  return names.index(keys[-1]), keys[-2] == 'update_residual'


def _of_one_owner(bucket: tuple[int, ...], x: Value) -> Value:
  """Returns residuals as if one owner had all chunks, in a bucket's shape."""
  # [owners, *devices, rows, n] -> [1, *devices, rows, n]
  shape = (1, *x.shape[1:-2], *bucket)
  sharding = placement.fit_sharding(shape, placement.of(x))
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
  return placement.run(regroup_owned, x, sharding, shape)


def _bucket(
  saved: Mapping[str, Value],
  layout: Layout,
  keys: Keys,
  like: Value,
) -> Value:
  """Returns a bucket like `like` from its leaves' coefficients."""
  number, is_owned = _bucket_at(keys, layout)
  records = saved_records(saved[_paths.dotted((*keys[:-3], 'layout'))])
  arrays = {}
  for member in layout.members(number):
    leaf = layout.leaves[member]
    name = _paths.dotted((*keys[:-1], *leaf.keys))
    if name not in saved:  # owners had no residuals
      return np.zeros(like.shape, like.dtype)
    arrays[member] = saved[name]
  whole = like
  if is_owned:
    whole = _of_one_owner(layout.buckets[number].shape, abstract(like))

  def convert(
    leaf: Leaf,
    coefficients: chex.Array,
  ) -> chex.Array:
    record = records[leaf.name]
    # Of another selector or value code, with the same chunks.
    if {**leaf.record, 'compressor': record['compressor']} == record:
      return regroup(coefficients, len(whole))
    former = _recorded_coding(record, layout)
    current = coding_of(leaf)
    if is_owned:  # residuals are of updates, which have been transformed back
      former = former._replace(basis=None)
      current = current._replace(basis=None)
    # [workers, *shape]
    elements = regroup(former.decode(coefficients), len(whole))
    return current.encode(elements)

  array = fill_bucket(layout, number, arrays, whole, convert)
  if is_owned:
    return placement.run(
      regroup_owned,
      array,
      placement.of(like),
      tuple(like.shape),
    )
  return array


def _recorded_coding(record: Record, layout: Layout) -> Coding:
  """Returns a saved leaf's coding; raises if its basis is unknown."""
  blocks, fold = tuple(record['blocks']), record['fold']
  # Chunks are cut shard by shard.
  shard = np.floor_divide(record['shape'], blocks).astype(int)
  grid = ChunkGrid(
    tuple(shard.tolist()),
    tuple(record['lengths']),
    record['whole'],
    fold and tuple(fold),
  )
  name, arguments = record.get('basis', ('Identity', {}))  # none if whole
  # Those of the package, and the user's own in this state.
  known = dict(vars(bases))
  for bucket in layout.buckets:
    known[type(bucket.basis).__name__] = type(bucket.basis)
  if name not in known:
    raise ValueError(
      f'The transform of the checkpoint must be known for rechunk, got {name}'
      f'({arguments}). Restore into a state that has it, without rechunk.'
    )
  return Coding(grid, blocks, known[name](**arguments))
