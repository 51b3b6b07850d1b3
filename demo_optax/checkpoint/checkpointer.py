"""Saving and restoring, also for another number of workers.

A state is a plain pytree, and any Orbax code saves it as it is. What this adds
is a description of it beside the arrays (`describe`): the number of workers,
how every leaf's momentum is cut into chunks, every shape and dtype. A restore
compares it with that of the tree to be filled, and refuses what differs, unless
it was asked for by name:

    files -> (saved description, wanted description) -> mismatches -> ValueError
          -> arrays, as they were saved, on the wanted devices
          -> regrouped (resize), cut into other chunks (rechunk)

Every step's files are one Orbax checkpoint, written asynchronously under a
temporary name and renamed when it is whole.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import operator
import os
import time
import zlib
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# Orbax's current API, in the form in which it is documented.
from orbax.checkpoint import v1 as ocp

import demo_optax
from demo_optax import _checks, _paths, replicas
from demo_optax.checkpoint import folder as folders
from demo_optax.checkpoint import resize as resizing
from demo_optax.compressors import chunking
from demo_optax.compressors.compressor import (
  Compressor,
  CompressorTree,
  per_leaf,
)
from demo_optax.compressors.layout import Layout, Leaf
from demo_optax.demo import layouts_in
from demo_optax.state import (
  check_momentum,
  is_momentum,
  layout_of,
  momentum_from_leaves,
  momentum_to_leaves,
)
from demo_optax.workers import Workers

_FORMAT = 1

# How often a reader looks again where a writer renames and removes meanwhile.
_ATTEMPTS = 10

# Where a state of an exchange has its momentum.
_MOMENTUM = (_paths.STACKED, 'momentum')

# What is said of one leaf: JSON, so that it can be kept beside the arrays.
Codes = dict[_paths.Keys, Any]
Record = dict[str, Any]


class _LastWhole:
  """Keeps the last checkpoints; a folder with nothing in it is none.

  Attributes:
    keep: how many.
    empty: steps of which there is such a folder.
  """

  def __init__(self, keep: int):
    self.keep = keep
    self.empty: set[int] = set()

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    del context
    steps = [c.step for c in checkpoints]
    kept = [step for step in steps if step not in self.empty][-self.keep :]
    return [step in kept for step in steps]


class Checkpointer:
  """Checkpoints of a training run, in one folder.

  Saves any tree: parameters, optimizer state with all workers' momentum, PRNG
  keys, the position in the data. Leaves are arrays, typed PRNG keys, or Python
  numbers, booleans and strings. Restoring into the same layout gives
  the same bits (arrays without a fixed dtype, which JAX calls weakly typed, get
  theirs fixed); into another one it needs `resize` or `rechunk`.

  With several processes every one of them makes the same calls. A leaf that is
  not spread over processes must be the same in all of them.

  Args:
    folder: where the checkpoints are; made if it is not there. A path, `~`
      expanded, or an address `gs://...` or `s3://...` as text or as
      `etils.epath.Path`, if `gcsfs` or `s3fs` is installed.
    params: the parameters, or their shapes (`jax.ShapeDtypeStruct`); of an
      `nnx.Optimizer`, `nnx.state(model, wrt)`. Only shapes are looked at.
    compressor: that of the exchange, or a tree of them as for `plan`; with
      `None` the trees hold no exchange.
    workers: the workers of the exchange; not `Workers.on_axis`: give
      `Workers.simulated(n)` for it.
    keep: how many of the last checkpoints are kept, at least 1.
    timeout: seconds after which a save that is not whole has failed. With
      several processes it is when all learn, by an error, that one could not
      write: choose it longer than the longest save.

  Raises:
    ValueError: `keep` or `timeout` is below 1; `folder` is '', or an address
      of something else.
    TypeError: `compressor`, `workers`, `keep` or `timeout` is something else.
    ImportError: what `folder` needs is not installed.
    OSError: the folder cannot be made, in this or another process.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, tempfile
    >>> from demo_optax import checkpoint
    >>> compressor = demo_optax.dct_topk()
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(1e-3, workers=workers, compressor=compressor)
    >>> params = {'w': jnp.ones((8, 8))}
    >>> state = {'params': params, 'opt_state': tx.init(params),
    ...          'key': jax.random.key(0), 'position': 0}
    >>> folder = tempfile.TemporaryDirectory()
    >>> with checkpoint.Checkpointer(
    ...     folder.name, params, compressor, workers) as checkpoints:
    ...   checkpoints.save(100, state)
    ...   step, state = checkpoints.restore(state)
    >>> step
    100
    >>> folder.cleanup()
  """

  def __init__(
      self,
      folder: Any,
      params: chex.ArrayTree,
      compressor: CompressorTree,
      workers: Workers,
      *,
      keep: int = 2,
      timeout: int = 1200,
  ):
    _checks.check_type(
        'workers', workers, Workers, 'demo_optax.Workers.simulated(n)'
    )
    self._kept = _LastWhole(_integer('keep', keep, 1))
    timeout = _integer('timeout', timeout, 1)
    self._params = {
        _paths.path_keys(path): (path, np.shape(x))
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    self._shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            np.shape(x), getattr(x, 'dtype', None) or jnp.result_type(x)
        ),
        params,
    )
    self._codes, self._workers = self._by_path(compressor), workers
    self._layout_of = functools.partial(
        layout_of, self._shapes, compressor, workers
    )
    self._layout_of()  # what does not fit is an error now
    _ = workers.count  # an error for Workers.on_axis
    self._folder = folders.resolve(folder)
    folders.make(self._folder)
    if jax.process_index() == 0:  # readers, too: what is surely broken off
      folders.remove_unfinished(self._folder, unchanged_for=timeout)
    self._context = ocp.Context()
    self._context.asynchronous.timeout_secs = timeout
    # Else threads wait 300 s for directories that could not be made.
    self._context.asynchronous.create_directories_asynchronously = False
    self._files = self._open()
    self._pending: Any = None
    self._saving: int | None = None  # the step of a save that is not yet whole
    self._lock: int | None = None
    self._failed: list[int] = []
    self._is_writer = False

  def __enter__(self) -> 'Checkpointer':
    return self

  def __exit__(self, *exception: Any) -> None:
    self.close()

  def _open(self) -> ocp.training.Checkpointer:
    alone = jax.process_count() == 1
    for attempt in range(_ATTEMPTS):
      try:
        files = ocp.training.Checkpointer(
            self._folder, preservation_policy=self._kept, context=self._context
        )
        self._kept.empty = {
            c.step
            for c in files.checkpoints
            if folders.is_empty(self._folder / str(c.step))
        }
        return files
      except (FileNotFoundError, NotADirectoryError):
        # A writer has renamed or removed what was seen.
        if attempt == _ATTEMPTS - 1 or not alone:
          raise
      except OSError:
        raise
      except Exception as error:  # it reads what is written beside each of them
        raise ValueError(
            f'{self._folder} cannot be opened: {_first_cause(error)}. The'
            f' description of step {_some(_unreadable(self._folder))} in it is'
            ' damaged: remove it.'
        ) from error
    raise AssertionError('the last attempt returns or raises')

  def _reopen(self) -> None:
    with contextlib.suppress(Exception):
      self._files.close()
    self._files = self._open()

  def _become_writer(self) -> None:
    """Before a save: removes what is left of saves that failed."""
    if jax.process_index() == 0:
      if not self._is_writer:
        folders.remove_unfinished(self._folder, unchanged_for=0)
        self._lock = folders.lock(self._folder, exclusive=False)
      for step in self._failed:  # a thread may have gone on writing
        folders.remove_unfinished_step(self._folder, step)
    self._is_writer = True
    self._failed.clear()

  @property
  def steps(self) -> tuple[int, ...]:
    """The steps of which there is a whole checkpoint, ascending."""
    self.wait()
    found = (c.step for c in self._files.checkpoints)
    return tuple(step for step in found if step not in self._kept.empty)

  def save(self, step: int, tree: chex.ArrayTree) -> None:
    """Saves `tree`, while training goes on.

    Returns as soon as the arrays are copied: they may be donated to the next
    step. Waits for a save before it. When the new one is whole, the oldest
    beyond `keep` is removed; a save that fails leaves all others as they were,
    and its error is raised by the next call of `save`, `wait` or `close`.

    Args:
      step: number of steps done, 0 or more.
      tree: what is saved.

    Raises:
      ValueError: there is a checkpoint of this step already; momentum in `tree`
        is not of these parameters, compressor and workers; a leaf of one
        process alone is not the same in all; no leaf is an array; text that is
        not Unicode.
      TypeError: `step` is not an integer; a leaf that is neither an array nor a
        plain Python value.
      OSError: a process cannot write to the folder; all raise it.
    """
    step = _integer('step', step, 0)
    self.wait()
    self._become_writer()
    if step in self.steps:
      raise ValueError(
          f'There is a checkpoint of step {step} in {self._folder}'
          f' already (steps: {_some(self.steps)}). Nothing is overwritten: give'
          ' another folder, or remove it first.'
      )
    leaves = _Leaves(tree, self._layout_of, self._workers)
    leaves.check_equal_between_processes()
    about = {
        'format': _FORMAT,
        'versions': _versions(),
        'workers': self._workers.count,
        'compressor': ', '.join(sorted(
            {str(code) for code in self._codes.values() if code}
        )),
        'leaves': self._describe(leaves),
        'values': leaves.values,
    }
    arrays = {
        name: _savable(x) for name, x in leaves.arrays.items() if _size(x)
    }
    if not arrays:
      raise ValueError('There is no array in the tree: nothing to save.')
    about['digests'] = replicas.content_digests(arrays)
    about['checksum'] = _checksum(about)
    folders.check_writable(self._folder)
    self._saving, was_empty = step, step in self._kept.empty
    self._kept.empty.discard(step)
    try:
      self._pending = self._files.save_async(
          step,
          arrays,
          force=True,
          overwrite=was_empty,
          custom_metadata=about,
      )
    except BaseException:
      self._give_up()
      raise

  def restore(
      self,
      tree: chex.ArrayTree,
      step: int | None = None,
      *,
      resize: bool = False,
      rechunk: CompressorTree = None,
  ) -> tuple[int, chex.ArrayTree]:
    """Restores a checkpoint into the layout of `tree`.

    Every leaf must be in the checkpoint, in its shape and dtype, and every leaf
    of the checkpoint in `tree`; it goes to the devices of the leaf in `tree`,
    which may be others than it was saved from, on a mesh of another shape.

    Args:
      tree: what it was saved from, or the same made anew: arrays or
        `jax.ShapeDtypeStruct` with shardings.
      step: of which checkpoint; by default the last, also if another process
        writes new ones meanwhile.
      resize: regroup a checkpoint of another number of workers, as
        `demo_optax.checkpoint.resize_workers` does.
      rechunk: the compressor that the checkpoint was made with, or the tree of
        them. What it cut into other chunks than this one's compressor and
        workers do is taken to parameter space and cut anew, which keeps it to
        rounding; what owners of other chunks keep of updates is dropped.

    Returns:
      The step, and a tree like `tree`.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of that step.
      ValueError: the checkpoint and `tree` differ: names every leaf that does,
        both values, and what to do. Or the checkpoint is damaged: what was read
        is not what was saved, or cannot be read at all.
      TypeError: `step` is not an integer.
    """
    former = self._by_path(rechunk, 'rechunk') if rechunk else None
    step = None if step is None else _integer('step', step, 0)
    for attempt in range(_ATTEMPTS):
      steps = self.steps
      if not steps and jax.process_count() == 1:  # not yet, or just renamed
        self._reopen()
        steps = self.steps
      if not steps or (step is not None and step not in steps):
        which = 'checkpoint' if step is None else f'checkpoint of step {step}'
        raise FileNotFoundError(
            f'There is no {which} in {self._folder} (steps:'
            f' {_some(steps)}).'
        )
      chosen = steps[-1] if step is None else step
      try:
        return chosen, self._restore(chosen, tree, resize, former)
      except ValueError:
        last = step is not None or attempt == _ATTEMPTS - 1
        if last or not self._is_removed(chosen):
          raise
        self._reopen()
    raise AssertionError('the last attempt returns or raises')

  def _is_removed(self, step: int) -> bool:
    """Returns whether another process has removed a checkpoint."""
    if jax.process_count() > 1:
      return False
    time.sleep(0.2)  # it may be about to
    return not (self._folder / str(step)).exists()

  def _restore(
      self,
      step: int,
      tree: chex.ArrayTree,
      resize: bool,
      former: Codes | None,
  ) -> chex.ArrayTree:
    """Returns what `restore` returns of one checkpoint."""
    about = self._about(step)
    leaves = _Leaves(tree, self._layout_of, self._workers, abstract=True)
    saved, wanted = about['leaves'], self._describe(leaves)
    codes = {
        name: (_code_of(former, keys), _code_of(self._codes, keys))
        for name, keys in leaves.keys.items()
    }
    olds = None if former is None else {n: old for n, (old, _) in codes.items()}
    problems = _mismatches(about, wanted, olds)
    if resize:
      problems.pop('workers', None)
    if resize or former is not None:
      problems.pop('owed', None)
    if problems:
      raise ValueError(_message(step, problems, _codes_in(about)))

    new = {  # chunks that had no owners, or are others: nothing is kept
        name: _empty(x) for name, x in leaves.arrays.items()
        if 'rows' in wanted[name]
        and _what(saved.get(name)) != _what(wanted[name])
    }
    like = {
        name: _loaded_as(saved[name], x)
        for name, x in leaves.arrays.items()
        if _size(x) and name not in new
    }
    for name in saved.keys() - like.keys():
      if 'rows' in saved[name]:  # to be dropped, but Orbax loads all or nothing
        like[name] = _loaded_as(saved[name], np.empty((), saved[name]['dtype']))
    arrays = self._load(step, like, about['digests'])
    new |= about['values']
    for name, x in leaves.arrays.items():
      if name in new:
        continue
      if not _size(x):
        new[name] = _empty(x)
        continue
      plans = _plans(wanted[name], saved[name], codes[name])
      count = wanted[name].get('workers', 0)
      array = arrays.pop(name)  # no more than one leaf is held twice
      if plans or count != saved[name].get('workers', 0):
        if 'rows' in saved[name]:
          array = _of_other_owners(array, x)
        elif isinstance(x, np.ndarray) and not plans:
          array = resizing.regroup(np.asarray(array), count)
        else:
          array = _converted(array, count, plans, codes[name], x)
      new[name] = _as(array, x)
    return leaves.unflatten(new)

  def wait(self) -> None:
    """Waits until the last save is whole; raises its error if it failed."""
    pending, self._pending = self._pending, None
    if pending is None:
      return
    try:
      pending.result()
    except BaseException:
      self._give_up()
      raise
    self._saving = None

  def _give_up(self) -> None:
    """After a save that failed: removes its files, and opens the folder anew.

    Orbax would raise the error for ever, and has forgotten the checkpoints that
    it was to remove after this one.
    """
    with contextlib.suppress(Exception):
      self._files.close()
    if self._saving is not None:
      self._failed.append(self._saving)
      if jax.process_index() == 0:
        folders.remove_unfinished_step(self._folder, self._saving)
    self._saving = None
    self._files = self._open()

  def close(self) -> None:
    """Waits, and lets go of the folder."""
    try:
      self.wait()
    finally:
      self._files.close()
      lock, self._lock = self._lock, None
      if lock is not None:
        os.close(lock)

  def _about(self, step: int) -> dict[str, Any]:
    """Returns what was written beside the arrays of a checkpoint."""
    try:
      about = self._files.metadata(step).custom_metadata
    except Exception as error:
      raise self._unreadable(step, error) from error
    if not about:
      raise ValueError(
          f'The checkpoint of step {step} in {self._folder} has no description'
          ' by demo_optax: it was not written by demo_optax.checkpoint (use the'
          ' code that wrote it), or the file that holds it is missing or'
          f' damaged: {self._others(step)}'
      )
    if about.get('format') != _FORMAT:
      raise ValueError(
          f'The checkpoint of step {step} in {self._folder} has format'
          f' {about.get("format")}, but this version of demo_optax reads'
          f' {_FORMAT}: use the code that wrote it.'
      )
    if about.pop('checksum', None) != _checksum(about):
      raise self._damaged(step, 'its description is not what was written')
    return about

  def _load(
      self, step: int, like: dict[str, Any], digests: dict[str, str]
  ) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, if they are what was saved."""
    try:
      arrays = self._files.load(step, like)
    except Exception as error:
      raise self._unreadable(step, error) from error
    found = replicas.content_digests(arrays)
    other = [n for n in like if found[n] != digests[n]]
    if other:
      more = f' (and {len(other) - 1} more leaves)' if other[1:] else ''
      raise self._damaged(step, f'{other[0]}{more} is not what was saved')
    return arrays

  def _unreadable(self, step: int, error: BaseException) -> ValueError:
    return ValueError(
        f'The checkpoint of step {step} in {self._folder} cannot be read:'
        f' {_first_cause(error)}. If its files are damaged:'
        f' {self._others(step)}'
    )

  def _damaged(self, step: int, why: str) -> ValueError:
    return ValueError(
        f'The checkpoint of step {step} in {self._folder} is damaged: {why};'
        f' {self._others(step)}'
    )

  def _others(self, step: int) -> str:
    """Returns what to do without the checkpoint of `step`."""
    others = tuple(s for s in self.steps if s != step)
    if not others:
      return 'there is no other one in the folder.'
    return f'restore another one by step= ({_some(others)}), or remove it.'

  def _describe(self, leaves: '_Leaves') -> dict[str, Record]:
    """Returns what a checkpoint says of every leaf."""
    records: dict[str, Record] = {}
    for name, x in leaves.all.items():
      keys = leaves.keys[name]
      if name in leaves.values:
        records[name] = {'value': type(x).__name__}
      elif name in leaves.moments:
        leaf = leaves.moments[name]
        records[name] = {
            'shape': list(leaf.shape),
            'dtype': str(x.dtype),
            'workers': x.shape[0],
            'chunks': {
                'blocks': list(leaf.sharding.blocks),
                'lengths': list(leaf.grid.lengths),
                'whole': leaf.grid.whole,
            },
            'compressor': str(leaf.compressor),
        }
      else:
        lead = {'workers': x.shape[0]} if _paths.is_stacked(keys) else {}
        shape = list(x.shape[len(lead) :])
        records[name] = {'shape': shape, 'dtype': str(x.dtype), **lead}
        if _paths.is_owned(keys):  # by as many owners as there are workers
          records[name]['rows'] = shape.pop(-2)
          chunks = leaves.layout_at(keys).chunks_digest.hex()
          records[name]['written_by'] = f'chunks {chunks[:8]}'
    return records

  def _by_path(
      self, compressor: CompressorTree, argument: str = 'compressor'
  ) -> Codes:
    """Returns the compressor of each parameter."""
    return dict(zip(self._params, per_leaf(compressor, self._shapes, argument)))


def _code_of(codes: Codes | None, keys: _paths.Keys) -> Compressor | None:
  """Returns the compressor of the parameter that a leaf's path ends in."""
  ends = ((codes or {}).get(keys[start:]) for start in range(len(keys) + 1))
  return next((code for code in ends if code is not None), None)


def _plans(
    wanted: Record,
    saved: Record,
    codes: tuple[Compressor | None, Compressor | None],
) -> tuple[Any, Any] | None:
  """Returns the two cuts of a leaf that goes through parameter space."""
  old, new = codes
  if old is None or new is None or 'chunks' not in saved:
    return None
  same_code = saved['compressor'] == wanted['compressor']
  if same_code and _same_chunks(saved, wanted):
    return None
  return _plan(saved, old), _plan(wanted, new)


def _of_other_owners(x: Any, like: Any) -> Any:
  """Returns what owners of chunks keep, with as many owners as in `like`."""
  if isinstance(like, np.ndarray):
    return resizing.regroup_owned(np.asarray(x), like.shape)
  sharding = like.sharding
  regroup = jax.jit(
      resizing.regroup_owned,
      static_argnums=1,
      out_shardings=resizing.auto(sharding),
  )
  return resizing.on_mesh(regroup(jnp.asarray(x), like.shape), sharding)


def _converted(
    x: Any,
    count: int,
    plans: tuple[Any, Any] | None,
    codes: tuple[Compressor | None, Compressor | None],
    like: Any,
) -> jax.Array:
  """Returns a leaf for `count` workers in other chunks, laid out as `like`."""
  sharding = getattr(like, 'sharding', None)
  auto = resizing.auto(sharding)
  return resizing.on_mesh(
      _convert(jnp.asarray(x), count, plans, codes, auto), sharding
  )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _convert(
    x: jax.Array,
    count: int,
    plans: tuple[Any, Any] | None,
    compressors: tuple[Any, Any],
    sharding: Any,
) -> jax.Array:
  """Stacked `x` for `count` workers, and cut into other chunks."""
  if plans is not None:
    (old, new), ((old_grid, old_blocks), (new_grid, new_blocks)) = (
        compressors, plans
    )
    x = jax.vmap(_by_shard(
        lambda c: chunking.from_coefficients(c, old_grid, old.basis), old_blocks
    ))(x)
  x = resizing.regroup(x, count)
  if plans is not None:
    x = jax.vmap(_by_shard(
        lambda m: chunking.to_coefficients(m, new_grid, new.basis), new_blocks
    ))(x)
  if sharding is None:
    return x
  return jax.lax.with_sharding_constraint(x, sharding)


def _integer(argument: str, value: Any, least: int) -> int:
  if isinstance(value, bool) or not hasattr(value, '__index__'):
    raise TypeError(f'{argument}={value!r} must be an integer.')
  number = operator.index(value)
  if number < least:
    raise ValueError(f'{argument}={number} must be at least {least}.')
  return number


def _is_unicode(text: str) -> bool:
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _by_shard(fun: Any, blocks: tuple[int, ...]) -> Any:
  """Returns `fun` of one shard as a function of a whole array.

  Args:
    fun: from an array to an array, of the same number of dimensions or with one
      more, or one less, at the end.
    blocks: number of shards along each dimension.
  """
  rank, shards = len(blocks), math.prod(blocks)
  if shards == 1:
    return fun

  def whole(x: jax.Array) -> jax.Array:
    shape: list[int] = []
    for d, size in enumerate(x.shape):
      shape += [blocks[d], size // blocks[d]] if d < rank else [size]
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    x = x.reshape(shape).transpose([*order, *range(2 * rank, len(shape))])
    y = jax.vmap(fun)(x.reshape(shards, *x.shape[rank:]))
    y = y.reshape(*blocks, *y.shape[1:])
    order = [axis for d in range(rank) for axis in (d, rank + d)]
    y = y.transpose([*order, *range(2 * rank, y.ndim)])
    joined = [y.shape[2 * d] * y.shape[2 * d + 1] for d in range(rank)]
    return y.reshape(*joined, *y.shape[2 * rank :])

  return whole


# Trees as named leaves --------------------------------------------------------


class _Leaves:
  """The leaves of a tree, by name; momentum leaf by leaf, not in buckets.

  Args:
    tree: what is saved, or restored into.
    layout_of: returns the layout of the momentum in a state, from the layout
      that the state was made for, or None.
    workers: the workers of the exchange.
    abstract: whether momentum is only described.

  Attributes:
    all: every leaf.
    arrays: those that are arrays, or stand for some; PRNG keys, too.
    values: those that are plain Python values.
    keys: the path of each.
    moments: for each leaf of momentum, where it lies.
  """

  def __init__(
      self,
      tree: chex.ArrayTree,
      layout_of: Callable[..., Layout],
      workers: Workers,
      *,
      abstract: bool = False,
  ):
    self._workers = workers
    self._layouts: dict[_paths.Keys, Layout] = {}
    self._digests: dict[_paths.Keys, Any] = {}
    self._on_host: set[Any] = set()  # buckets that are arrays of NumPy
    flat, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
    self._places: list[Any] = []  # the name of each leaf, or its bucket
    self.all: dict[str, Any] = {}
    self.keys: dict[str, _paths.Keys] = {}
    self.moments: dict[str, Leaf] = {}
    buckets: dict[_paths.Keys, dict[str, Any]] = {}
    made_for = layouts_in(tree)
    for path, x in flat:
      keys = _paths.path_keys(path)
      if is_momentum(keys):
        buckets.setdefault(keys[:-1], {})[keys[-1]] = x
        if isinstance(x, np.ndarray):
          self._on_host.add((keys[:-1], keys[-1]))
        self._places.append((keys[:-1], keys[-1]))
      elif keys[-2:] == ('layout', 'digest'):
        self._digests[keys[:-2]] = x  # of how buckets are made: not saved
        self._places.append((keys[:-2], 'digest'))
      else:
        self._places.append(self._add(keys, x))
    for root, found in buckets.items():
      own = self._digests.get(root[:-2])
      if isinstance(own, jax.ShapeDtypeStruct):
        own = None
      old = made_for.get(root[:-2])
      layout = layout_of(old)
      check_momentum(found, own, old, layout, workers)
      self._layouts[root] = layout
      moments = (
          self._abstract(layout, found) if abstract
          else momentum_to_leaves(layout, workers, found)
      )
      for i, x in moments.items():
        leaf = layout.leaves[i]
        self.moments[self._add((*root, *leaf.keys), x)] = leaf
    self.arrays = {n: x for n, x in self.all.items() if hasattr(x, 'dtype')}
    self.values = {n: x for n, x in self.all.items() if n not in self.arrays}
    for name, x in self.values.items():
      if not isinstance(x, (bool, int, float, str)):
        raise TypeError(
            f'{name} is {x!r}: checkpoints hold arrays, PRNG keys, and Python'
            ' numbers, booleans and strings.'
        )
    for name, x in self.all.items():
      for text in (name, x):
        if isinstance(text, str) and not _is_unicode(text):
          raise ValueError(
              f'{name!r}: {text!r} has half a surrogate pair, which cannot be'
              ' written as UTF-8.'
          )

  def _add(self, keys: _paths.Keys, x: Any) -> str:
    name = _paths.dotted(keys)
    if name in self.all:
      raise ValueError(f'Two leaves of the tree are called {name}.')
    self.all[name], self.keys[name] = x, keys
    return name

  def layout_at(self, keys: _paths.Keys) -> Layout:
    """Returns the layout of the state that has a stacked leaf."""
    root = keys[: keys.index(_paths.STACKED)]
    return self._layouts.get((*root, *_MOMENTUM), Layout((), ()))

  def _abstract(
      self, layout: Layout, buckets: dict[str, Any]
  ) -> dict[int, Any]:
    """Describes what `momentum_to_leaves` would return."""
    found = {}
    for i in layout.compressed:
      leaf = layout.leaves[i]
      like = buckets[layout.buckets[leaf.bucket].name]
      counts = [
          b * c for b, c in zip(leaf.sharding.blocks, leaf.grid.counts)
      ]
      sharding = getattr(like, 'sharding', None)
      if isinstance(sharding, NamedSharding):
        spec = P(self._workers.axis_name, *leaf.sharding.spec)
        if self._workers.mesh != sharding.mesh:  # a state from other workers
          spec = P()
        sharding = NamedSharding(sharding.mesh, spec)
      found[i] = jax.ShapeDtypeStruct(
          (like.shape[0], *counts, leaf.grid.chunk_size), like.dtype,
          sharding=sharding,
      )
    return found

  def unflatten(self, leaves: dict[str, Any]) -> chex.ArrayTree:
    """Returns the tree with other leaves."""
    made = {}
    for root, layout in self._layouts.items():
      names = {
          i: _paths.dotted((*root, *layout.leaves[i].keys))
          for i in layout.compressed
      }
      moments = {i: leaves[name] for i, name in names.items()}
      made[root] = momentum_from_leaves(layout, self._workers, moments)
    for root, like in self._digests.items():
      digest = self.layout_at((*root, *_MOMENTUM)).digest
      made[root] = {'digest': _placed(digest, like)}
    flat = []
    for place in self._places:
      if isinstance(place, str):
        flat.append(leaves[place])
      else:
        root, bucket = place
        x = made[root][bucket]
        flat.append(np.asarray(x) if place in self._on_host else x)
    return self._treedef.unflatten(flat)

  def check_equal_between_processes(self) -> None:
    """Raises if a leaf that each process has for itself is not the same."""
    found = replicas.between_processes(
        [(name, replicas.comparable(x)) for name, x in self.all.items()]
    )
    if found:
      raise ValueError(
          f'{found[0].leaf} is not the same in all processes (another in'
          f' {found[0].processes}), and one of them would be saved. Spread it'
          ' over the mesh, or gather it into one array first.'
      )


def _savable(x: Any) -> Any:
  """Returns an array as Orbax takes it."""
  if _is_key(x):
    x = jax.random.key_data(x)
  if jax.process_count() > 1 and replicas.is_local(x):
    return np.array(x)
  return np.asarray(x) if isinstance(x, np.generic) else x


def _loaded_as(saved: Record, like: Any) -> Any:
  """Returns what Orbax is to load: the saved shape, placed much like `like`."""
  shape: tuple[int, ...] = tuple(saved['shape'])
  dtype = getattr(like, 'dtype', None)
  if 'chunks' in saved:
    grid, blocks = _grid(saved)
    counts = [b * c for b, c in zip(blocks, grid.counts)]
    shape = (*counts, grid.chunk_size)
  if 'rows' in saved:
    shape = (*shape[:-1], saved['rows'], shape[-1])
  if 'workers' in saved:
    shape = (saved['workers'], *shape)
  if _is_key(like):
    data = jax.eval_shape(jax.random.key_data, like)
    shape, dtype = (*shape, *data.shape[len(like.shape) :]), data.dtype
  if _on_host(like):
    return np.broadcast_to(np.zeros((), dtype), shape)
  sharding = like.sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  elif shape[: len(like.shape)] != like.shape:
    sharding = resizing.auto(resizing.fit_sharding(shape, sharding))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _as(x: Any, like: Any) -> Any:
  """Returns a loaded array as `like` is: a key, on a device, or NumPy's."""
  if isinstance(like, np.generic):
    return x[()]
  if isinstance(like, np.ndarray):
    return np.asarray(x)
  if not isinstance(x, jax.Array):
    x = jax.device_put(x, like.sharding)
  return jax.random.wrap_key_data(x, impl=_impl(like)) if _is_key(like) else x


def _size(x: Any) -> int:
  return math.prod(x.shape)


def _empty(like: Any) -> Any:
  """Returns an array without elements, which Orbax does not save."""
  return _placed(np.zeros(like.shape, like.dtype), like)


def _placed(x: np.ndarray, like: Any) -> Any:
  """Returns `x`, which all processes know, laid out as `like`."""
  if isinstance(like, np.ndarray) or like.sharding is None:
    return x
  return jax.make_array_from_callback(
      x.shape, like.sharding, lambda index: x[index]
  )


def _on_host(x: Any) -> bool:
  """Returns whether every process loads a leaf by itself, as NumPy's array."""
  if isinstance(x, (np.ndarray, np.generic)):
    return True
  return jax.process_count() > 1 and replicas.is_local(x)


def _impl(key: Any) -> Any:
  """Returns how a PRNG key draws; also of a `jax.ShapeDtypeStruct`."""
  found = []
  jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
  return found[0]


def _is_key(x: Any) -> bool:
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


# Comparing --------------------------------------------------------------------


def _codes_in(about: dict[str, Any]) -> list[str]:
  """Returns the compressors of a checkpoint."""
  records = about['leaves'].values()
  return sorted({r['compressor'] for r in records if 'chunks' in r})


def _mismatches(
    about: dict[str, Any],
    wanted: dict[str, Record],
    former: dict[str, Compressor | None] | None,
) -> dict[str, list[str]]:
  """Returns every leaf that differs, by what could be done about it."""
  saved = about['leaves']
  problems: dict[str, list[str]] = {
      'tree': [], 'chunks': [], 'workers': [], 'owed': []
  }
  codes: dict[tuple[str, str, str], list[str]] = {}
  for name in {**saved, **wanted}:
    old, new = saved.get(name), wanted.get(name)
    if 'rows' in (old or new or {}) and _what(old) != _what(new):
      if old is not None:  # where nothing was kept, zeros are
        problems['owed'].append(_line(name, _what(old), _what(new)))
      continue
    if old is None or new is None or _what(old) != _what(new):
      problems['tree'].append(_line(name, _what(old), _what(new)))
      continue
    if 'chunks' in old:
      was = old['compressor']
      code = former[name] if former else None
      if former is None and was != new['compressor']:
        key = 'compressor', was, new['compressor']
        codes.setdefault(key, []).append(name)
      elif former is not None and str(code) != was:
        codes.setdefault(('rechunk', was, str(code)), []).append(name)
      if code is None or str(code) != was:
        if not _same_chunks(old, new):
          problems['chunks'].append(_line(name, _cut(old), _cut(new)))
      elif _plan(old, code) != _grid(old):
        grid, _ = _plan(old, code)
        chunks = {**old['chunks'], 'lengths': grid.lengths, 'whole': grid.whole}
        made = {**old, 'chunks': chunks}
        problems['chunks'].append(_line(name, _cut(old), _cut(made)))
    if old.get('workers') != new.get('workers'):
      counts = [f'{record["workers"]} workers' for record in (old, new)]
      problems['workers'].append(_line(name, *counts))
  first = [
      _line(what if len(codes) == 1 else f'{what} of {names[0]}', was, now)
      for (what, was, now), names in codes.items()
  ]
  problems['chunks'] = first + problems['chunks']
  return {kind: lines for kind, lines in problems.items() if lines}


def _message(
    step: int, problems: dict[str, list[str]], codes: list[str]
) -> str:
  known = (
      f'rechunk={codes[0]}, the compressor of the checkpoint,'
      if len(codes) == 1
      else 'rechunk=, the tree of the compressors of the checkpoint,'
  )
  remedies = {
      'tree': (
          'Restore into a tree of the same leaves, shapes and dtypes, and'
          ' change it afterwards: nothing is cut, padded, cast or made anew.'
      ),
      'chunks': (
          f'Pass {known} to take the momentum through parameter space.'
      ),
      'workers': (
          'Pass resize=True to regroup what each worker has of its own.'
      ),
      'owed': (
          'It is what owners of chunks kept of updates: chunks have no owners'
          ' here, or lie elsewhere, or nothing of an update is lost. Pass'
          ' resize=True to drop it.'
      ),
  }
  text = [f'The checkpoint of step {step} does not fit.']
  for kind, lines in problems.items():
    text += lines[:4]
    if len(lines) > 4:
      text.append(f'... and {len(lines) - 4} more leaves.')
    text.append(remedies[kind])
  return '\n'.join(text)


def _line(name: str, old: str, new: str) -> str:
  return f'{name}: {old} in the checkpoint, {new} here.'


def _what(record: Record | None) -> str:
  """Describes what `restore` never converts: kind, dtype and shape."""
  if record is None:
    return 'nothing'
  if 'value' in record:
    return f'a Python {record["value"]}'
  text = f'{record["dtype"]}[{",".join(map(str, record["shape"]))}]'
  if 'written_by' in record:
    text += f' written by {record["written_by"]}'
  if 'chunks' in record:
    return f'momentum of {text}'
  return f"each worker's {text}" if 'workers' in record else text


def _cut(record: Record) -> str:
  grid, blocks = _grid(record)
  if grid.whole and math.prod(blocks) == 1:
    return 'sent whole'
  text = f'chunks of {"x".join(map(str, grid.lengths))}'
  if max(blocks, default=1) > 1:
    text += f' in {"x".join(map(str, blocks))} blocks'
  return f'{text}, sent whole' if grid.whole else text


def _grid(record: Record) -> tuple[chunking.ChunkGrid, tuple[int, ...]]:
  """Returns how a shard is cut, and how many shards there are."""
  cut = record['chunks']
  blocks = tuple(cut['blocks'])
  shard = tuple(d // b for d, b in zip(record['shape'], blocks))
  grid = chunking.ChunkGrid(shard, tuple(cut['lengths']), cut['whole'])
  return grid, blocks


def _same_chunks(a: Record, b: Record) -> bool:
  """Returns whether chunks are equal, however they lie on devices."""
  (old, old_blocks), (new, new_blocks) = _grid(a), _grid(b)
  if (old.lengths, old.whole) != (new.lengths, new.whole):
    return False
  ends = zip(old_blocks, new_blocks, old.padding, new.padding)
  return all(b == c or not (p or q) for b, c, p, q in ends)


def _plan(
    record: Record, compressor: Compressor
) -> tuple[chunking.ChunkGrid, tuple[int, ...]]:
  """Returns how a compressor would cut it."""
  grid, blocks = _grid(record)
  return compressor.plan(grid.shape, jnp.dtype(record['dtype'])).grid, blocks


def _checksum(about: dict[str, Any]) -> int:
  """Of a description, as it is after being written and read."""
  return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _first_cause(error: BaseException) -> str:
  """Returns what was found first; Orbax goes on to guess what it could be."""
  while (cause := error.__cause__ or error.__context__) is not None:
    error = cause
  why = str(error).split(' [tensorstore_spec')[0]
  return f'{type(error).__name__}: {why}'[:400]


def _unreadable(folder: epath.Path) -> tuple[int, ...]:
  """Steps whose checkpoint Orbax cannot describe."""
  found = []
  names = (p.name for p in folder.iterdir())
  for step in sorted(int(name) for name in names if name.isdecimal()):
    try:
      ocp.metadata(folder / str(step))
    except Exception:
      found.append(step)
  return tuple(found)


def _versions() -> dict[str, str]:
  return {
      'demo_optax': demo_optax.__version__,
      'jax': jax.__version__,
      'orbax-checkpoint': importlib.metadata.version('orbax-checkpoint'),
  }


def _some(steps: tuple[int, ...]) -> str:
  return ', '.join(map(str, steps)) or 'none'
