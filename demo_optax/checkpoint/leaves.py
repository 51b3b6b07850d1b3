"""States as plain dictionaries of arrays, momentum leaf by leaf, and back.

The shapes of momentum's buckets depend on the number of workers, their devices
and the other parameters. A checkpoint has the coefficients of every parameter
instead, and a record of its chunks:

    state -> {name: array} -> any files -> {name: array}
          -> compared with another state: errors name the leaf
          -> regrouped (resize), cut into other chunks (rechunk) -> state
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax import _paths, replicas
from demo_optax._paths import STACKED, Keys, Path
from demo_optax.checkpoint import cutting
from demo_optax.compressors import bases, chunking
from demo_optax.compressors.layout import Layout, Leaf, Record, differences
from demo_optax.numerics import prng
from demo_optax.transformation import layouts_in
from demo_optax.workers.collectives import GATHERED
from demo_optax.workers.value import put


def to_leaves(state: chex.ArrayTree) -> dict[str, Any]:
  """Returns a state as a plain dictionary of arrays, for any code that saves.

  Takes any tree that holds states of `scale_by_demo` with their types:
  `tx.init(params)`, a `TrainState`, an `nnx.Optimizer` (not its `nnx.state`),
  with parameters. Leaves are arrays, or `jax.ShapeDtypeStruct`.

  Refuses momentum that differs between devices without a worker axis.

  Returns them by their dotted paths. Momentum is `[workers, *counts, n]` for
  each parameter, `n` coefficients of `counts` chunks, sharded as the parameter.
  `...layout` is the record of the chunks, text in JSON as uint8.

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
  """
  layouts = layouts_in(state, checked=True)
  flat = _paths.leaves_of(state)
  _check_stacked(flat)
  found: dict[str, Any] = {}

  def add(keys: Keys, x: Any) -> None:
    name = _paths.dotted(keys)
    if name in found:
      raise ValueError(
        f'The tree must have one leaf called {name}, got two. Rename one.'
      )
    found[name] = x

  for keys, x in flat:
    if _paths.is_bucket(keys):
      layout = layouts[keys[:-3]]
      number, owned = _bucket_at(keys, layout)
      x = _of_one_owner(layout.buckets[number].shape, x) if owned else x
      for i, c in cutting.cut_bucket(layout, number, x).items():
        add((*keys[:-1], *layout.leaves[i].keys), c)
    elif keys[-2:] == ('layout', 'digest'):
      text = json.dumps(layouts[keys[:-2]].records)
      add(keys[:-1], np.frombuffer(text.encode(), np.uint8))
    else:
      add(keys, x)
  return found


def from_leaves(
  saved: Mapping[str, Any],
  like: chex.ArrayTree,
  *,
  resize: bool = False,
  rechunk: bool = False,
) -> chex.ArrayTree:
  """Returns a tree like `like` from the result of `to_leaves`.

  With `resize`, the old and the new workers divide the unit interval into equal
  parts. A new worker is the mean of the old ones, weighted by their overlap:
  from 4 to 2 workers the mean of pairs, from 4 to 8 every worker twice. The
  mean over workers does not change, up to rounding. Integers, booleans and PRNG
  keys are those of the old worker with the largest overlap, the first of
  equals. With more workers, each folds its number into its key. Residuals of
  owners follow their chunks, exactly. A message in flight (`delayed=True`)
  stays if its chunks, workers and their devices do; else it is as if it had not
  been sent: momentum still holds it, and sends it again.

  Args:
    saved: arrays by name, of NumPy or of JAX, on any devices.
    like: a state as for `to_leaves`, such as `jax.eval_shape(tx.init, params)`.
      Leaves are moved to its devices; without a sharding, JAX's are not moved.
    resize: whether to regroup stacked arrays (under a field `worker_stacked`)
      for another number of workers, and to drop residuals that `like` lacks.
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
    if _paths.is_message(keys):
      return _message(saved, layouts[keys[:-3]], keys, x)
    made = saved[_paths.dotted(keys)]
    if not _paths.is_stacked(keys) or len(made) == len(x):
      return made
    return _run(regroup, made, x, len(x))

  return jax.tree_util.tree_map_with_path(
    lambda path, x: _placed(restored(path, x), x), like
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
  """Returns a bucket's number, and whether it has residuals of owners."""
  names = [bucket.name for bucket in layout.buckets]
  return names.index(keys[-1]), keys[-2] == 'update_residual'


def _of_one_owner(bucket: tuple[int, ...], x: Any) -> Any:
  """Returns residuals as if one owner had all chunks of a bucket's shape."""
  shape = (1, *x.shape[1:-2], *bucket)
  sharding = cutting.fit_sharding(shape, getattr(x, 'sharding', None))
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
  return cutting.run(regroup_owned, x, sharding, shape)


def _bucket(
  saved: Mapping[str, Any], layout: Layout, keys: Keys, like: Any
) -> Any:
  """Returns a bucket like `like` from the coefficients of its leaves."""
  number, owned = _bucket_at(keys, layout)
  records = _saved_records(saved[_paths.dotted((*keys[:-3], 'layout'))])
  found = {}
  for i in layout.members(number):
    x = saved.get(_paths.dotted((*keys[:-1], *layout.leaves[i].keys)))
    if x is None:  # owners had no residuals
      return np.zeros(like.shape, like.dtype)
    found[i] = _near(x, like)
  shape = layout.buckets[number].shape
  whole = _of_one_owner(shape, abstract(like)) if owned else like

  def convert(leaf: Leaf, c: Any) -> Any:
    record = records[leaf.name]
    if {**record, 'compressor': ''} == {**leaf.record, 'compressor': ''}:
      return regroup(c, len(whole))
    old, new = _recorded_cut(record, layout), cutting.cut_of(leaf)
    if owned:  # residuals are of updates, which have been transformed back
      old, new = (*old[:2], None), (*new[:2], None)
    return cutting.encode(regroup(cutting.decode(c, *old), len(whole)), *new)

  x = cutting.fill_bucket(layout, number, found, whole, convert)
  if not owned:
    return x
  return _run(regroup_owned, x, like, like.shape)


def _message(
  saved: Mapping[str, Any], layout: Layout, keys: Keys, like: Any
) -> Any:
  """Returns the message in flight, or none if it would be read otherwise."""
  found = saved.get(_paths.dotted(keys))
  records = _saved_records(saved[_paths.dotted((*keys[:-3], 'layout'))])
  is_same = [*records.items()] == [*layout.records.items()]
  if found is None or found.shape != like.shape or not is_same:
    return np.zeros(like.shape, like.dtype)
  return found


def _recorded_cut(record: Record, layout: Layout) -> cutting.Cut:
  """Returns how a leaf was cut; raises if its transform is unknown."""
  blocks, fold = tuple(record['blocks']), record['fold']
  grid = chunking.ChunkGrid(
    tuple(d // b for d, b in zip(record['shape'], blocks)),
    tuple(record['lengths']),
    record['whole'],
    fold and tuple(fold),
  )
  name, arguments = record.get('basis', ('Identity', {}))  # none if whole
  own = (type(bucket.basis) for bucket in layout.buckets)
  known = {**vars(bases), **{basis.__name__: basis for basis in own}}
  if name not in known:
    raise ValueError(
      f'The transform of the checkpoint must be known for rechunk, got {name}'
      f'({arguments}). Restore into a state that has it, without rechunk.'
    )
  return grid, blocks, known[name](**arguments)


# Another number of workers ----------------------------------------------------


def regroup(x: Any, n: int) -> Any:
  """Returns `x [workers, ...]` of `n` workers, by the rule of `from_leaves`."""
  old = x.shape[0]
  if n == old:
    return x
  # NumPy's stay NumPy's: JAX would make 32 bits of 64.
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  if n % old == 0 or not jnp.issubdtype(x.dtype, jnp.inexact):
    x = x[np.argmax(weights(old, n), axis=1)]
    if (
      prng.is_key_array(x) and n > old
    ):  # several workers would have the same key
      x = xp.asarray(jax.vmap(prng.fold)(jnp.asarray(x), jnp.arange(n)))
    return x
  if old % n == 0:
    return xp.mean(x.reshape(n, old // n, *x.shape[1:]), axis=1)
  # Only weights that are not zero: 0 times NaN is NaN.
  wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
  mixed = []
  for row in weights(old, n):
    covered = np.flatnonzero(row)
    parts = [xp.asarray(row[i], wide.dtype) * wide[i] for i in covered]
    mixed.append(sum(parts[1:], parts[0]))
  return xp.stack(mixed).astype(x.dtype)


def weights(old: int, new: int) -> np.ndarray:
  """Returns the weights of old workers in new ones, float64 `[new, old]`.

  >>> weights(3, 2) * 3
  array([[2., 1., 0.],
         [0., 1., 2.]])
  """
  # In units of 1 / (old * new) all ends are integers.
  i, j = np.arange(old)[None, :], np.arange(new)[:, None]
  ends = np.minimum((j + 1) * old, (i + 1) * new)
  return np.maximum(ends - np.maximum(j * old, i * new), 0) / old


def regroup_owned(x: Any, shape: tuple[int, ...]) -> Any:
  """Returns residuals of owners, `[owners, *devices, chunks, n]`, as `shape`.

  Each owner's chunks follow those of the owner before; zeros pad the end.
  """
  xp: Any = np if isinstance(x, np.ndarray) else jnp
  owners, *devices, rows, size = shape
  x = xp.moveaxis(x, 0, -3).reshape(*devices, -1, size)
  x = x[..., : owners * rows, :]
  missing = owners * rows - x.shape[-2]
  x = xp.pad(x, [*[(0, 0)] * len(devices), (0, missing), (0, 0)])
  return xp.moveaxis(x.reshape(*devices, owners, rows, size), -3, 0)


# Arrays -----------------------------------------------------------------------


def abstract(x: Any) -> Any:
  """Returns shape, dtype and sharding of an array; other values unchanged.

  An array that is not committed to its device has no sharding: a step would be
  compiled again for one that is.
  """
  if not hasattr(x, 'dtype'):
    return x
  is_free = isinstance(x, jax.Array) and not x.committed
  sharding = None if is_free else getattr(x, 'sharding', None)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _near(x: Any, like: Any) -> Any:
  """Returns a saved array on the devices of `like`."""
  sharding = getattr(like, 'sharding', None)
  if (
    not isinstance(x, jax.Array)
    or sharding is None
    or x.sharding.device_set == sharding.device_set
  ):
    return x
  fit = cutting.fit_sharding(x.shape, sharding)
  return jax.device_put(x, cutting.auto(fit))


def _run(fun: Callable[..., Any], x: Any, like: Any, *static: Any) -> Any:
  x = np.asarray(x) if isinstance(like, np.ndarray) else _near(x, like)
  return cutting.run(fun, x, getattr(like, 'sharding', None), *static)


# The arrays that hold the same as a Python number. A step returns the count of
# a state as an array, also where it was a Python number.
_DTYPES = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating}


def _as_array(x: Any, like: Any) -> Any:
  """Returns a Python number as a scalar array like `like`, if that is one.

  Other values are returned as they are.
  """
  kind = _DTYPES.get(type(x))
  if kind is None or not hasattr(like, 'dtype'):
    return x
  if like.shape or not jnp.issubdtype(like.dtype, kind):
    return x
  try:
    return np.asarray(x, like.dtype)
  except OverflowError:
    return x


def _placed(x: Any, like: Any) -> Any:
  """Returns `x` as an array of the kind of `like`, on its devices."""
  if not hasattr(like, 'dtype'):
    return x.item() if hasattr(x, 'dtype') else x
  x = _as_array(x, like)
  if isinstance(like, np.ndarray | np.generic):
    return np.asarray(x)[()] if isinstance(like, np.generic) else np.asarray(x)
  return jnp.asarray(x) if like.sharding is None else put(x, like.sharding)


# Comparing --------------------------------------------------------------------


def _check(
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
  layouts: Mapping[Keys, Layout],
  asked: Mapping[str, bool],
) -> None:
  """Raises unless saved leaves differ from those wanted only as asked for."""
  problems: dict[str, list[str]] = {kind: [] for kind in _REMEDIES}

  def differs(kind: str, name: str, old: str, new: str) -> None:
    problems[kind].append(f'{name}: {old} in the checkpoint, {new} here.')

  # Coefficients are compared by the records of their chunks, not by shapes.
  recorded: dict[str, Any] = {}
  for root, layout in layouts.items():
    where = _paths.dotted((*root, 'layout'))
    if where in saved:
      former = _saved_records(saved[where])
      cut = {d.name: d for d in differences(former, layout.records)}
      recorded[where] = None
      for leaf in layout.leaves:
        for part in ('momentum', 'update_residual'):
          name = _paths.dotted((*root, STACKED, part, *leaf.keys))
          recorded[name] = cut.get(leaf.name)
  messages = {
    _paths.dotted((*root, STACKED, 'message', GATHERED)) for root in layouts
  }
  for name in {**wanted, **saved}:
    if name in messages:  # that are left out lose nothing
      continue
    old, new = saved.get(name), wanted.get(name)
    if old is None or new is None:
      owed = f'{STACKED}.update_residual.' in name
      if new is None or not owed:
        differs('owed' if owed else 'tree', name, _kind(old), _kind(new))
      continue
    old, new = _as_array(old, new), _as_array(new, old)
    stacked = STACKED in name.split('.')
    if name in recorded:
      if d := recorded[name]:
        kind = 'chunks' if d.is_cut_otherwise else 'tree'
        differs(kind, name, d.old, d.new)
    elif _kind(old, stacked) != _kind(new, stacked):
      differs('tree', name, _kind(old, stacked), _kind(new, stacked))
      continue
    if stacked and len(old) != len(new):
      differs('workers', name, f'{len(old)} workers', f'{len(new)} workers')
  text = []
  for kind, found in problems.items():
    if found and not asked.get(kind):
      text += found[:4]
      if found[4:]:
        text.append(f'... and {len(found) - 4} more leaves.')
      text.append(_REMEDIES[kind])
  if text:
    raise ValueError(
      '\n'.join(['The checkpoint must fit like, got one that differs.', *text])
    )


def _kind(x: Any, stacked: bool = False) -> str:
  """Describes the kind, dtype and shape of a leaf, which never change."""
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
