"""States as plain dictionaries of arrays, momentum leaf by leaf, and back.

The shapes of momentum's buckets depend on workers, devices and all parameters.
A checkpoint has coefficients for every parameter instead, and a record that
describes its chunks:

    state -> {name: array} -> any files -> {name: array}
          -> compared with another state: errors name the leaf
          -> regrouped (resize), cut into other chunks (rechunk) -> state
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chex
import jax
import numpy as np

from demo_optax import _paths, replicas
from demo_optax._paths import STACKED, Keys, Path
from demo_optax.checkpoint import placement
from demo_optax.checkpoint.buckets import (
  Coding,
  coding_of,
  cut_bucket,
  fill_bucket,
)
from demo_optax.checkpoint.placement import abstract, as_array
from demo_optax.checkpoint.regroup import regroup, regroup_owned
from demo_optax.compressors import bases
from demo_optax.compressors.chunking import ChunkGrid
from demo_optax.compressors.layout import (
  Difference,
  Layout,
  Leaf,
  Record,
  differences,
)
from demo_optax.transformation import layouts_in


def to_leaves(state: chex.ArrayTree) -> dict[str, Any]:
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

  Takes any tree that holds `scale_by_demo` states with their types: made by
  `tx.init`, a `TrainState`, an `nnx.Optimizer` (not its `nnx.state`), with
  parameters. Leaves are arrays, or `jax.ShapeDtypeStruct`.

  Momentum is `[workers, *counts, n]` for each parameter, `n` coefficients in
  each of `counts` chunks, sharded as the parameter. `...layout` is a record of
  the chunks, JSON text as uint8.

  Raises:
    ValueError: momentum differs between devices and has no worker axis.
  """
  layouts = layouts_in(state, checked=True)
  flat = _paths.leaves_of(state)
  _check_stacked(flat)
  leaves: dict[str, Any] = {}

  def add(keys: Keys, x: Any) -> None:
    name = _paths.dotted(keys)
    if name in leaves:
      raise ValueError(
        f'The tree must have one leaf called {name}, got two. Rename one.'
      )
    leaves[name] = x

  for keys, x in flat:
    if _paths.is_bucket(keys):
      layout = layouts[keys[:-3]]
      number, owned = _bucket_at(keys, layout)
      x = _of_one_owner(layout.buckets[number].shape, x) if owned else x
      for i, coefficients in cut_bucket(layout, number, x).items():
        add((*keys[:-1], *layout.leaves[i].keys), coefficients)
    elif keys[-2:] == ('layout', 'digest'):
      text = json.dumps(layouts[keys[:-2]].records)
      add(keys[:-1], np.frombuffer(text.encode(), np.uint8))
    else:
      add(keys, x)
  return leaves


def from_leaves(
  saved: Mapping[str, Any],
  like: chex.ArrayTree,
  *,
  resize: bool = False,
  rechunk: bool = False,
) -> chex.ArrayTree:
  """Returns a tree like `like` from what `to_leaves` returned.

  Without options nothing is converted, and what does not fit is an error.

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
  asked = {'chunks': rechunk, 'workers': resize, 'owed': resize}
  _check(saved, to_leaves(jax.tree.map(abstract, like)), layouts, asked)

  def restored(path: Path, x: Any) -> Any:
    keys = _paths.path_keys(path)
    if _paths.is_bucket(keys):
      return _bucket(saved, layouts[keys[:-3]], keys, x)
    if keys[-2:] == ('layout', 'digest'):
      return layouts[keys[:-2]].digest
    made = saved[_paths.dotted(keys)]
    if not _paths.is_stacked(keys) or len(made) == len(x):
      return made
    return _run(regroup, made, x, len(x))

  return jax.tree_util.tree_map_with_path(
    lambda path, x: placement.place(restored(path, x), x), like
  )


def _check_stacked(leaves: Sequence[tuple[Keys, Any]]) -> None:
  """Raises for arrays that differ between workers and have no worker axis."""
  arrays = {
    _paths.dotted(keys): x
    for keys, x in leaves
    if _paths.is_stacked(keys) and replicas.has_copies(x)
  }
  if arrays and (other := replicas.check_replicas(arrays)):
    raise ValueError(
      f'{other[0].leaf} must be sharded over the workers, got one array that'
      ' differs between devices: only one worker would be saved. In'
      ' jax.shard_map take demo_optax.state_specs(tx, params, workers) as'
      " in_specs and out_specs of the optimizer's state, not P()."
    )


# Buckets ----------------------------------------------------------------------


def _saved_records(text: Any) -> dict[str, Record]:
  return json.loads(np.asarray(text).tobytes())


def _bucket_at(keys: Keys, layout: Layout) -> tuple[int, bool]:
  """Returns a bucket's number, and whether it has owners' residuals."""
  names = [bucket.name for bucket in layout.buckets]
  return names.index(keys[-1]), keys[-2] == 'update_residual'


def _of_one_owner(bucket: tuple[int, ...], x: Any) -> Any:
  """Returns residuals as if one owner had all chunks, in a bucket's shape."""
  shape = (1, *x.shape[1:-2], *bucket)
  sharding = placement.fit_sharding(shape, getattr(x, 'sharding', None))
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
  return placement.run(regroup_owned, x, sharding, shape)


def _bucket(
  saved: Mapping[str, Any], layout: Layout, keys: Keys, like: Any
) -> Any:
  """Returns a bucket like `like` from its leaves' coefficients."""
  number, owned = _bucket_at(keys, layout)
  records = _saved_records(saved[_paths.dotted((*keys[:-3], 'layout'))])
  coefficients_of = {}
  for i in layout.members(number):
    array = saved.get(_paths.dotted((*keys[:-1], *layout.leaves[i].keys)))
    if array is None:  # owners had no residuals
      return np.zeros(like.shape, like.dtype)
    coefficients_of[i] = placement.near(array, like)
  whole = like
  if owned:
    whole = _of_one_owner(layout.buckets[number].shape, abstract(like))

  def convert(leaf: Leaf, coefficients: chex.Array) -> chex.Array:
    record = records[leaf.name]
    if {**record, 'compressor': ''} == {**leaf.record, 'compressor': ''}:
      return regroup(coefficients, len(whole))
    old, new = _recorded_coding(record, layout), coding_of(leaf)
    if owned:  # residuals are of updates, which have been transformed back
      old, new = old._replace(basis=None), new._replace(basis=None)
    return new.encode(regroup(old.decode(coefficients), len(whole)))

  array = fill_bucket(layout, number, coefficients_of, whole, convert)
  return _run(regroup_owned, array, like, like.shape) if owned else array


def _recorded_coding(record: Record, layout: Layout) -> Coding:
  """Returns a saved leaf's coding; raises if its basis is unknown."""
  blocks, fold = tuple(record['blocks']), record['fold']
  shard = [length // n for length, n in zip(record['shape'], blocks)]
  grid = ChunkGrid(
    tuple(shard),
    tuple(record['lengths']),
    record['whole'],
    fold and tuple(fold),
  )
  name, arguments = record.get('basis', ('Identity', {}))  # none if whole
  known = dict(vars(bases))
  for bucket in layout.buckets:
    known[type(bucket.basis).__name__] = type(bucket.basis)
  if name not in known:
    raise ValueError(
      f'The transform of the checkpoint must be known for rechunk, got {name}'
      f'({arguments}). Restore into a state that has it, without rechunk.'
    )
  return Coding(grid, blocks, known[name](**arguments))


def _run(fun: Callable[..., Any], x: Any, like: Any, *static: Any) -> Any:
  sharding = getattr(like, 'sharding', None)
  return placement.run(fun, placement.near(x, like), sharding, *static)


# Comparing --------------------------------------------------------------------


def _check(
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
  layouts: Mapping[Keys, Layout],
  asked: Mapping[str, bool],
) -> None:
  """Raises unless saved leaves differ from those wanted only as asked for."""
  chunked = _chunk_differences(saved, layouts)
  problems: dict[str, list[str]] = {problem: [] for problem in _REMEDIES}
  for name in {**wanted, **saved}:
    for problem, old, new in _compare(name, saved, wanted, chunked):
      line = f'{name}: {old} in the checkpoint, {new} here.'
      problems[problem].append(line)
  text = []
  for problem, lines in problems.items():
    if not lines or asked.get(problem):
      continue
    text += lines[:4]
    if lines[4:]:
      text.append(f'... and {len(lines) - 4} more leaves.')
    text.append(_REMEDIES[problem])
  if text:
    raise ValueError(
      '\n'.join(['The checkpoint must fit like, got one that differs.', *text])
    )


def _chunk_differences(
  saved: Mapping[str, Any], layouts: Mapping[Keys, Layout]
) -> dict[str, Difference | None]:
  """Returns how the chunks of each leaf differ, by name; None if they do not.

  Coefficients are compared by these records, not by shapes.
  """
  by_name: dict[str, Difference | None] = {}
  for root, layout in layouts.items():
    where = _paths.dotted((*root, 'layout'))
    if where not in saved:
      continue
    by_name[where] = None
    former = _saved_records(saved[where])
    by_leaf = {d.name: d for d in differences(former, layout.records)}
    for leaf in layout.leaves:
      for part in ('momentum', 'update_residual'):
        name = _paths.dotted((*root, STACKED, part, *leaf.keys))
        by_name[name] = by_leaf.get(leaf.name)
  return by_name


def _compare(
  name: str,
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
  chunked: Mapping[str, Difference | None],
) -> Iterator[tuple[str, str, str]]:
  """Yields a leaf's problems, and what it is in both, in words."""
  old, new = saved.get(name), wanted.get(name)
  if old is None or new is None:
    is_owed = f'{STACKED}.update_residual.' in name
    if not is_owed:
      yield 'tree', _in_words(old), _in_words(new)
    elif new is None:  # without old residuals, the new ones are zeros
      yield 'owed', _in_words(old), _in_words(new)
    return
  old, new = as_array(old, new), as_array(new, old)
  stacked = STACKED in name.split('.')
  if name in chunked:
    if other := chunked[name]:
      problem = 'chunks' if other.is_cut_otherwise else 'tree'
      yield problem, other.old, other.new
  else:
    old_words, new_words = _in_words(old, stacked), _in_words(new, stacked)
    if old_words != new_words:
      yield 'tree', old_words, new_words
      return
  if stacked and len(old) != len(new):
    yield 'workers', f'{len(old)} workers', f'{len(new)} workers'


def _in_words(x: Any, stacked: bool = False) -> str:
  """Describes what never changes: type, dtype and shape."""
  if x is None:
    return 'nothing'
  if not hasattr(x, 'dtype'):
    return f'a Python {type(x).__name__}'
  owner = "each worker's " if stacked else ''
  return f'{owner}{x.dtype}[{",".join(map(str, x.shape[stacked:]))}]'


_REMEDIES = {
  'tree': 'Restore into a tree of the same leaves, shapes and dtypes, and'
  ' change it afterwards: nothing is cut, padded, cast or made up.',
  'chunks': 'Pass rechunk=True to take the momentum through parameter space.',
  'workers': "Pass resize=True to regroup the workers' states.",
  'owed': "This is the residual of exchange='all_to_all', which has no place"
  ' here. Pass resize=True to discard it.',
}
