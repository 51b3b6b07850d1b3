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
import operator
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np

from demo_optax import _checks, _paths, replicas
from demo_optax._paths import STACKED, Keys, dotted
from demo_optax.checkpoint import placement
from demo_optax.checkpoint.buckets import (
  Coding,
  coding_of,
  decode,
  encode,
  fill_bucket,
  take_momentum,
)
from demo_optax.checkpoint.compare import (
  RECORDS,
  REMEDIES,
  check_fits,
  describe,
  read_records,
)
from demo_optax.checkpoint.placement import Value, abstract
from demo_optax.checkpoint.regroup import regroup
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
  each of `counts` chunks, sharded as the parameter. `...layout.records`
  describes the chunks, JSON text as uint8, `...layout.digest` their places.

  Args:
    state: any tree with `scale_by_demo` states and their types: made by
      `tx.init`, a `TrainState`, an `nnx.Optimizer` (not its `nnx.state`), with
      parameters. Leaves are arrays, or `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: momentum differs between devices and has no worker axis.
  """
  layouts = layouts_in(state)
  arrays = dict(_paths.leaves_of(state))
  _check_stacked(arrays)
  for root, layout in layouts.items():
    text = json.dumps(layout.records).encode()
    arrays[*root, 'layout', 'digest'] = layout.digest
    arrays[*root, RECORDS] = np.frombuffer(text, np.uint8)
    for number, array in take_momentum(arrays, root, layout).items():
      leaf = layout.leaves[number]
      arrays[*root, STACKED, 'momentum', *leaf.keys] = array
  leaves: dict[str, Value] = {}
  for keys, array in arrays.items():
    name = dotted(keys)
    if name in leaves:
      raise ValueError(
        f'The tree must have one leaf called {name}, got two. Rename one.'
      )
    leaves[name] = _as_array(name, array)
  return leaves


def _as_array(name: str, x: Value) -> Value:
  """Returns a leaf as an array; raises if it is not of numbers or keys."""
  array = x if hasattr(x, 'dtype') else np.asarray(x)
  kinds = np.number, np.bool_, jax.dtypes.prng_key
  if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
    raise TypeError(
      f'{name} must be an array of numbers or keys, or a number, got'
      f' {_checks.short(x)}. Leave it out, and put it back into what is'
      ' restored.'
    )
  return array


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
  With more workers, each folds its number into its key.

  Owners' residuals need the same chunks, workers and devices. They are
  otherwise discarded, with `resize`.

  Args:
    saved: arrays by name, from NumPy or JAX, on any devices.
    like: a state as for `to_leaves`, such as `jax.eval_shape(tx.init, params)`.
      Leaves are moved to its devices; without a sharding, JAX's are not moved.
    resize: whether to regroup stacked arrays (under a field `worker_stacked`)
      for other workers, and to discard residuals that have no place in `like`.
    rechunk: whether to convert momentum with other chunks or another compressor
      through parameter space, up to rounding. With equal chunks and transform,
      every bit is kept.

  Raises:
    ValueError: `saved` and `like` differ. Names leaves, values and a remedy.
  """
  layouts = layouts_in(like)
  remedies = dict(REMEDIES)
  if rechunk:
    del remedies['chunks']
  if resize:
    del remedies['workers']
  # Shapes alone: nothing is computed before all fits.
  wanted = to_leaves(jax.tree.map(abstract, like))
  saved_words, wanted_words = describe(saved), describe(wanted)
  check_fits(saved_words, wanted_words, remedies)

  def converted(keys: Keys, codings: Codings = None) -> Value:
    """Returns a saved leaf for the workers and chunks in `like`."""
    name = dotted(keys)
    array, target = saved[name], wanted[name]
    if not _paths.is_stacked(keys):
      return array
    if codings is None and len(array) == len(target):
      return array
    sharding = placement.sharding_of(target)
    return placement.run(_convert, array, sharding, len(target), codings)

  targets = dict(_paths.leaves_of(like))
  restored: dict[Keys, Value] = {}
  for root, layout in layouts.items():
    restored[*root, 'layout', 'digest'] = layout.digest
    name = dotted((*root, RECORDS))
    records = read_records(saved[name])
    has_same_places = saved_words[name] == wanted_words[name]
    momentum = *root, STACKED, 'momentum'
    for number, bucket in enumerate(layout.buckets):
      residual = *root, STACKED, 'update_residual', bucket.name
      if residual in targets and not has_same_places:
        target = targets[residual]
        restored[residual] = np.zeros(target.shape, target.dtype)
      if not bucket.error_feedback:
        continue
      coefficients = {}
      for member, leaf in layout.members(number).items():
        codings = _codings(records[leaf.name], leaf, layout)
        coefficients[member] = converted((*momentum, *leaf.keys), codings)
      keys = *momentum, bucket.name
      restored[keys] = fill_bucket(layout, number, coefficients, targets[keys])

  def place(keys: Keys, target: Value) -> Value:
    if keys not in restored:
      restored[keys] = converted(keys)
    return placement.place(dotted(keys), restored[keys], target)

  return _paths.map_by_path(place, like)


def _check_stacked(leaves: Mapping[Keys, Value]) -> None:
  """Raises for arrays that differ between workers and have no worker axis."""
  arrays = {}
  for keys, array in leaves.items():
    if _paths.is_stacked(keys) and isinstance(array, jax.Array):
      arrays[dotted(keys)] = array
  for differing in replicas.check_replicas(arrays):
    raise ValueError(
      f'{differing.leaf} must be sharded over the workers, got one array that'
      ' differs between devices: only one worker would be saved. In'
      ' jax.shard_map take demo_optax.state_specs(tx, params, workers) as'
      " in_specs and out_specs of the optimizer's state, not P()."
    )


# Other chunks -----------------------------------------------------------------

# A leaf's former and current coding, if they differ.
Codings = tuple[Coding, Coding] | None


def _convert(
  x: chex.Array,
  num_workers: int,
  codings: Codings,
) -> chex.Array:
  """Returns a stacked array for other workers, in another coding."""
  x = regroup(x, num_workers)
  if codings is None:
    return x
  former, current = codings
  return encode(decode(x, former), current)


def _codings(record: Record, leaf: Leaf, layout: Layout) -> Codings:
  """Returns the codings for a leaf with this record in the checkpoint."""
  # Of another selector or value code, with the same chunks.
  if {**leaf.record, 'compressor': record['compressor']} == record:
    return None
  return _recorded_coding(record, layout), coding_of(leaf)


def _recorded_coding(record: Record, layout: Layout) -> Coding:
  """Returns a saved leaf's coding; raises if its basis is unknown."""
  blocks, fold = tuple(record['blocks']), record['fold']
  # Chunks are cut shard by shard.
  shard = map(operator.floordiv, record['shape'], blocks)
  grid = ChunkGrid(
    tuple(shard),
    tuple(record['lengths']),
    record['whole'],
    fold and tuple(fold),
  )
  name, arguments = record.get('basis', ('Identity', {}))  # none if whole
  # Those of the package, and the user's own in this state.
  known = dict(vars(bases))
  for bucket in layout.buckets:
    basis_type = type(bucket.basis)
    known[basis_type.__name__] = basis_type
  if name not in known:
    raise ValueError(
      f'The transform of the checkpoint must be known for rechunk, got {name}'
      f'({arguments}). Restore into a state that has it, without rechunk.'
    )
  return Coding(grid, blocks, known[name](**arguments))
