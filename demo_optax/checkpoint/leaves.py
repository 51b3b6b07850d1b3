"""States as plain dictionaries of arrays, momentum leaf by leaf, and back.

The shapes of momentum's buckets depend on the number of workers, their devices
and the other parameters. A checkpoint has the coefficients of
every parameter instead, and a record of its chunks:

    state -> {name: array} -> any files -> {name: array}
          -> compared with another state: errors name the leaf
          -> regrouped (resize), cut into other chunks (rechunk) -> state
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._paths import (
  STACKED,
  Keys,
  dotted,
  is_owned,
  is_stacked,
  path_keys,
)
from demo_optax.checkpoint import resize as resizing
from demo_optax.compressors import bases, chunking
from demo_optax.compressors import leaves as cutting
from demo_optax.compressors.layout import (
  Difference,
  Layout,
  Leaf,
  Record,
  differences,
)
from demo_optax.numerics import prng
from demo_optax.state import exchanges_in, is_momentum

_OWED = f'{STACKED}.update_residual.'


class Named(NamedTuple):
  """The leaves of a state by name."""

  leaves: dict[str, Any]  # momentum, residuals: [workers, *counts, n]
  keys: dict[str, Keys]  # the path of each
  moments: dict[str, tuple[str, Leaf]]  # layout's name and leaf of coefficients
  records: dict[str, dict[str, Record]]  # by the layout's name


def to_leaves(state: chex.ArrayTree) -> dict[str, Any]:
  """Returns a state as a plain dictionary of arrays, for any code that saves.

  Takes any tree that holds states of `scale_by_demo` with their types:
  `tx.init(params)`, a `TrainState`, an `nnx.Optimizer` (not its `nnx.state`),
  with parameters. Leaves are arrays, or `jax.ShapeDtypeStruct`.

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
  named = _names(state)
  return named.leaves | {
      name: np.frombuffer(json.dumps(records).encode(), np.uint8)
      for name, records in named.records.items()
  }


def from_leaves(
    saved: Mapping[str, Any],
    like: chex.ArrayTree,
    *,
    resize: bool = False,
    rechunk: bool = False,
) -> chex.ArrayTree:
  """Returns a tree like `like` from the result of `to_leaves`.

  Args:
    saved: arrays by name, of NumPy or of JAX, on any devices.
    like: a state as for `to_leaves`, such as `jax.eval_shape(tx.init, params)`.
      Leaves are moved to its devices; without a sharding, JAX's are not moved.
    resize: whether to regroup stacked arrays for another number of workers, as
      `resize_workers` does, and to drop residuals that `like` lacks.
    rechunk: whether to convert momentum with other chunks or another compressor
      through parameter space, up to rounding. With equal chunks and transform,
      every bit is kept.

  Raises:
    ValueError: `saved` and `like` differ. Names leaves, values and a remedy.
  """
  _check(saved, like, resize=resize, rechunk=rechunk)
  layouts = exchanges_in(like)
  flat, treedef = jax.tree_util.tree_flatten_with_path(like)
  new = []
  for path, x in flat:
    keys = path_keys(path)
    if _is_cut(keys):
      root = keys[: keys.index(STACKED)]
      records = _records(saved[dotted((*root, 'layout'))])
      made = _bucket(saved, records, layouts[root], keys, x)
    elif keys[-2:] == ('layout', 'digest'):
      made = layouts[keys[:-2]].digest
    else:
      made = saved[dotted(keys)]
      if is_stacked(keys):
        made = _regrouped(made, x, keys)
    new.append(_placed(made, x))
  return treedef.unflatten(new)


def _names(tree: chex.ArrayTree) -> Named:
  """Returns the leaves of a state by name."""
  layouts = exchanges_in(tree)
  named = Named({}, {}, {}, {})

  def add(keys: Keys, x: Any) -> str:
    name = dotted(keys)
    if name in named.leaves or name in named.records:
      raise ValueError(
          f'The tree must have one leaf called {name}, got two. Rename one.'
      )
    named.leaves[name], named.keys[name] = x, keys
    return name

  for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
    keys = path_keys(path)
    if _is_cut(keys):
      root = keys[: keys.index(STACKED)]
      layout, number = layouts[root], _number(layouts[root], keys)
      if is_owned(keys):
        x = _of_one_owner(layout, number, x)
      for i, c in cutting.cut_bucket(layout, number, x).items():
        leaf = layout.leaves[i]
        name = add((*keys[:-1], *leaf.keys), c)
        named.moments[name] = dotted((*root, 'layout')), leaf
    elif keys[-2:] == ('layout', 'digest'):
      layout = layouts[keys[:-2]]
      named.records[dotted(keys[:-1])] = {
          leaf.name: leaf.record for leaf in layout.leaves if leaf.bucket >= 0
      }
    else:
      add(keys, x)
  return named


# Buckets ----------------------------------------------------------------------


def _is_cut(keys: Keys) -> bool:
  return is_momentum(keys) or is_owned(keys)


def _number(layout: Layout, keys: Keys) -> int:
  return [bucket.name for bucket in layout.buckets].index(keys[-1])


def _of_one_owner(layout: Layout, number: int, x: Any) -> Any:
  """Returns residuals of owners as if one of them had all chunks."""
  shape = (1, *x.shape[1:-2], *layout.buckets[number].shape)
  if isinstance(x, jax.ShapeDtypeStruct):
    sharding = cutting.fit_sharding(shape, x.sharding)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
  return resizing.resized(
      lambda x: resizing.regroup_owned(x, shape), x, shape
  )


def _bucket(
    saved: Mapping[str, Any],
    records: dict[str, Record],
    layout: Layout,
    keys: Keys,
    like: Any,
) -> Any:
  """Returns a bucket like `like` from the coefficients of its leaves."""
  number, owned = _number(layout, keys), is_owned(keys)
  found = {}
  for i in layout.members(number):
    x = saved.get(dotted((*keys[:-1], *layout.leaves[i].keys)))
    if x is None:  # owners had no residuals
      return np.zeros(like.shape, like.dtype)
    found[i] = _near(x, like)
  known = [bucket.basis for bucket in layout.buckets]

  def convert(leaf: Leaf, c: Any) -> Any:
    record = records[leaf.name]
    same = {**record, 'compressor': ''} == {**leaf.record, 'compressor': ''}
    if not same:
      c = cutting.decode(c, *of_elements(_cut(record, known)))
    if not owned:
      c = resizing.regroup(c, like.shape[0])
    if not same:
      c = cutting.encode(c, *of_elements(cutting.cut_of(leaf)))
    return c

  def of_elements(cut: cutting.Cut) -> cutting.Cut:
    # Residuals are of updates, which have been transformed back.
    return (*cut[:2], None) if owned else cut

  if not owned:
    return cutting.fill_bucket(layout, number, found, like, convert)
  whole = _of_one_owner(layout, number, abstract(like))
  x = cutting.fill_bucket(layout, number, found, whole, convert)
  return _run(lambda x: resizing.regroup_owned(x, like.shape), x, like)


def _cut(record: Record, known: list[bases.Basis]) -> cutting.Cut:
  """Returns how a leaf was cut; raises if its transform is unknown."""
  blocks = tuple(record['blocks'])
  shard = tuple(d // b for d, b in zip(record['shape'], blocks))
  fold = record['fold'] and tuple(record['fold'])
  grid = chunking.ChunkGrid(
      shard, tuple(record['lengths']), record['whole'], fold
  )
  if grid.whole:
    return grid, blocks, bases.Identity()
  name, arguments = record['basis']
  for basis in known:
    if [type(basis).__name__, vars(basis)] == [name, arguments]:
      return grid, blocks, basis
  if not hasattr(bases, name):
    raise ValueError(
        f'The transform of the checkpoint must be known for rechunk, got {name}'
        f'({arguments}). Restore into a state that has it, and take the'
        ' momentum over with demo_optax.state.momentum and with_momentum.'
    )
  return grid, blocks, getattr(bases, name)(**arguments)


# Arrays -----------------------------------------------------------------------


def abstract(x: Any) -> Any:
  """Returns shape, dtype and sharding of an array; other values unchanged."""
  if not hasattr(x, 'dtype'):
    return x
  sharding = getattr(x, 'sharding', None)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _regrouped(x: Any, like: Any, keys: Keys) -> Any:
  n, is_key = like.shape[0], prng.is_key(keys, like)
  if len(x) == n:
    return x
  return _run(lambda x: resizing.regroup(x, n, is_key), _near(x, like), like)


def _near(x: Any, like: Any) -> Any:
  """Returns a saved array on the devices of `like`."""
  sharding = getattr(like, 'sharding', None)
  if not isinstance(x, jax.Array) or sharding is None:
    return x
  if x.sharding.device_set == sharding.device_set:
    return x
  fit = cutting.fit_sharding(x.shape, sharding)
  return jax.device_put(x, cutting.auto(fit))


def _run(fun: Callable[[Any], Any], x: Any, like: Any) -> Any:
  x = np.asarray(x) if isinstance(like, np.ndarray) else x
  return cutting.run(fun, x, getattr(like, 'sharding', None))


def _placed(x: Any, like: Any) -> Any:
  """Returns `x` as an array of the kind of `like`, on its devices."""
  if not hasattr(like, 'dtype'):
    return x
  if isinstance(like, np.ndarray | np.generic):
    x = np.asarray(x)
    return x[()] if isinstance(like, np.generic) else x
  if like.sharding is None or isinstance(x, jax.Array):
    same = like.sharding is None or getattr(x, 'sharding', 0) == like.sharding
    return jnp.asarray(x) if same else jax.device_put(x, like.sharding)
  return jax.make_array_from_callback(
      np.shape(x), like.sharding, lambda index: np.asarray(x)[index]
  )


# Comparing --------------------------------------------------------------------


def _check(
    saved: Mapping[str, Any],
    like: chex.ArrayTree,
    *,
    resize: bool,
    rechunk: bool,
) -> None:
  """Raises unless saved leaves, or their shapes and dtypes, fit into `like`."""
  wanted = _names(jax.tree.map(abstract, like))
  problems: dict[str, list[Difference]] = {kind: [] for kind in _REMEDIES}
  cut: dict[str, dict[str, Difference]] = {}
  for where, records in wanted.records.items():
    former = _records(saved[where]) if where in saved else {}
    cut[where] = {d.name: d for d in differences(former, records)}
    if where not in saved:
      problems['tree'].append(Difference(where, 'nothing', 'a layout', False))
  for name in {**wanted.leaves, **saved}:
    if name in wanted.records:
      continue
    old: Any = saved.get(name)
    new: Any = wanted.leaves.get(name)
    if _OWED in name and (old is None or new is None):
      if new is None:
        problems['owed'].append(Difference(name, _kind(old), 'nothing', False))
      continue
    stacked = is_stacked(wanted.keys.get(name, ())) and old is not None
    if name in wanted.moments and old is not None:
      where, leaf = wanted.moments[name]
      if d := cut[where].get(leaf.name):
        kind = 'chunks' if d.is_cut_otherwise else 'tree'
        problems[kind].append(d._replace(name=name))
    elif _kind(old, stacked) != _kind(new, stacked):
      pair = _kind(old, stacked), _kind(new, stacked)
      problems['tree'].append(Difference(name, *pair, False))
      continue
    if stacked and old.shape[:1] != new.shape[:1]:
      pair = f'{old.shape[0]} workers', f'{new.shape[0]} workers'
      problems['workers'].append(Difference(name, *pair, False))
  if resize:
    problems['workers'], problems['owed'] = [], []
  if rechunk:
    problems['chunks'] = []
  if not any(problems.values()):
    return
  text = ['The checkpoint does not fit.']
  for kind, found in problems.items():
    text += [
        f'{d.name}: {d.old} in the checkpoint, {d.new} here.' for d in found[:4]
    ]
    if found[4:]:
      text.append(f'... and {len(found) - 4} more leaves.')
    if found:
      text.append(_REMEDIES[kind])
  raise ValueError('\n'.join(text))


def _records(text: Any) -> dict[str, Record]:
  return json.loads(np.asarray(text).tobytes())


def _kind(x: Any, stacked: bool = False) -> str:
  """Describes the kind, dtype and shape of a leaf, which never change."""
  if x is None:
    return 'nothing'
  if not hasattr(x, 'dtype'):
    return f'a Python {type(x).__name__}'
  if not stacked:
    return f'{x.dtype}[{",".join(map(str, x.shape))}]'
  return f"each worker's {x.dtype}[{','.join(map(str, x.shape[1:]))}]"


_REMEDIES = {
    'tree': (
        'Restore into a tree of the same leaves, shapes and dtypes, and change'
        ' it afterwards: nothing is cut, padded, cast or made up.'
    ),
    'chunks': (
        'Pass rechunk=True to take the momentum through parameter space.'
    ),
    'workers': "Pass resize=True to regroup the workers' states.",
    'owed': (
        "This is the residual of exchange='all_to_all', which has no place"
        ' here. Pass resize=True to discard it.'
    ),
}
