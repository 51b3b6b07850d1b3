"""A folder of Orbax checkpoints, with leaves by name and their digests.

With Orbax alone, two writers replace each other's steps, an empty folder counts
as the latest checkpoint, and damaged arrays are restored silently.
"""

import contextlib
import fcntl
import json
import operator
import os
import types
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

# Orbax's current API, in the form in which it is documented.
from orbax.checkpoint import v1 as ocp

from demo_optax import replicas
from demo_optax.checkpoint import leaves as naming
from demo_optax.compressors import leaves as cutting
from demo_optax.numerics import prng

_FORMAT = 2


class Checkpointer(contextlib.AbstractContextManager['Checkpointer']):
  """Saves and restores one tree of a run, by steps, in one folder.

  A step is one Orbax checkpoint, written in the background under a temporary
  name and renamed when complete. All processes make the same calls, on a shared
  folder.

  Args:
    folder: a local path or `gs://...`; created by the first save.
    like: the tree to save and to restore, as for `from_leaves`. Only shapes,
      dtypes and shardings of JAX's arrays are kept.
    keep: number of checkpoints to keep, at least 1.
    timeout: seconds after which an incomplete save fails in all processes.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp, tempfile
    >>> from demo_optax import checkpoint
    >>> workers = demo_optax.Workers.simulated(4)
    >>> tx = demo_optax.demo(1e-3, workers=workers)
    >>> params = {'w': jnp.ones((8, 8))}
    >>> state = {'params': params, 'opt_state': tx.init(params), 'position': 0}
    >>> folder = tempfile.TemporaryDirectory()
    >>> with checkpoint.Checkpointer(folder.name, state) as checkpoints:
    ...   checkpoints.save(100, state)
    ...   step, state = checkpoints.restore()
    >>> step
    100
    >>> folder.cleanup()
  """

  def __init__(
      self,
      folder: Any,
      like: chex.ArrayTree,
      *,
      keep: int = 2,
      timeout: int = 1200,
  ):
    self._folder = epath.Path(folder).expanduser()
    if '://' not in os.fspath(self._folder):
      self._folder = epath.Path(os.path.abspath(self._folder))
    self._like = jax.tree.map(
        lambda x: naming.abstract(x) if isinstance(x, jax.Array) else x, like
    )
    naming.names(self._like)  # raises if the tree cannot be saved
    self._keep = _integer('keep', keep, 1)
    self._context = ocp.Context()
    self._context.asynchronous.timeout_secs = _integer('timeout', timeout, 1)
    # Otherwise threads wait 300 s for directories that could not be made.
    self._context.asynchronous.create_directories_asynchronously = False
    self._pending: tuple[ocp.training.Checkpointer, Any] | None = None
    self._unlock: Callable[[], Any] | None = None

  def __exit__(self, *exception: Any) -> None:
    self.close()

  @property
  def steps(self) -> tuple[int, ...]:
    """The steps with a complete checkpoint, ascending."""
    self.wait()
    found = self._folder.iterdir() if self._folder.exists() else ()
    return tuple(sorted(
        int(p.name) for p in found if p.name.isdecimal() and any(p.iterdir())
    ))

  def save(self, step: int, tree: chex.ArrayTree) -> None:
    """Saves `tree` in the background.

    Waits for the previous save, and returns once the arrays are copied: they
    may be donated to the next step. A complete save removes the oldest beyond
    `keep`. A failed one changes no other; `save`, `wait` or `close` raises its
    error next.

    Args:
      step: number of steps done, 0 or more.
      tree: with the leaves of `like`.

    Raises:
      ValueError: a checkpoint of this step exists; a leaf of one process alone
        differs between processes.
      OSError: another Checkpointer, of this or another job, writes to the
        folder; or the folder cannot be written.
    """
    step = _integer('step', step, 0)
    self.wait()
    _in_first(lambda: self._prepare(step))
    named = naming.names(tree)
    found = replicas.between_processes(
        [(name, replicas.comparable(x)) for name, x in named.leaves.items()]
    )
    if found:
      raise ValueError(
          f'{found[0].leaf} must be the same in all processes, got another in'
          f' {found[0].processes}. Spread it over the mesh, or gather it first.'
      )
    leaves = {n: x for n, x in named.leaves.items() if hasattr(x, 'dtype')}
    arrays = {n: _savable(x) for n, x in leaves.items() if x.size}
    digests = replicas.content_digests(arrays)
    about = {
        'format': _FORMAT,
        'leaves': {
            n: [str(x.dtype), x.shape, digests.get(n)]
            for n, x in leaves.items()
        },
        'values': {n: x for n, x in named.leaves.items() if n not in leaves},
        'records': named.records,
    }
    about['checksum'] = _checksum(about)
    # One for each save: after an error it would repeat the error.
    files = ocp.training.Checkpointer(
        self._folder,
        preservation_policy=ocp.training.preservation_policies.LatestN(
            self._keep
        ),
        cleanup_tmp_directories=True,  # safe only under the lock
        context=self._context,
    )
    try:
      self._pending = files, files.save_async(
          step, arrays, force=True, custom_metadata=about
      )
    except BaseException:
      with contextlib.suppress(Exception):
        files.close()
      raise

  def _prepare(self, step: int) -> None:
    """Locks the folder; raises if the step exists."""
    self._folder.mkdir(parents=True, exist_ok=True)
    if self._unlock is None and '://' not in os.fspath(self._folder):
      handle = os.open(self._folder, os.O_RDONLY)
      unlock = weakref.finalize(self, os.close, handle)
      try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        unlock()
        raise OSError(
            f'{self._folder} must have one writer, and another Checkpointer'
            ' saves to it, here or in another job. Close it, or give another'
            ' folder.'
        ) from error
      except OSError:  # a network file system without locks
        pass
      self._unlock = unlock
      for path in self._folder.iterdir():
        if path.name.isdecimal():
          with contextlib.suppress(OSError):
            os.rmdir(path)  # an empty one would count as the latest
    if (self._folder / str(step)).exists():
      raise ValueError(
          f'step must be new in {self._folder}, got {step} (there are:'
          f' {_some(self.steps)}). Give another folder, or remove it first.'
      )

  def wait(self) -> None:
    """Waits for the last save; raises its error if it failed."""
    pending, self._pending = self._pending, None
    if pending is not None:
      files, saved = pending
      try:
        saved.result()
      finally:
        files.close()

  def close(self) -> None:
    """Waits for the last save, and releases the folder."""
    try:
      self.wait()
    finally:
      unlock, self._unlock = self._unlock, None
      if unlock is not None:
        unlock()

  def restore(
      self,
      step: int | None = None,
      *,
      resize: bool = False,
      rechunk: bool = False,
  ) -> tuple[int, chex.ArrayTree]:
    """Restores a checkpoint into the layout of `like`.

    Args:
      step: the step; by default the last.
      resize: as for `from_leaves`.
      rechunk: as for `from_leaves`.

    Returns:
      The step, and a tree like `like`, on its devices.

    Raises:
      FileNotFoundError: no checkpoint, or none of that step.
      ValueError: the checkpoint differs from `like`, as for `from_leaves`; or
        it is damaged.
    """
    steps = self.steps
    chosen = step
    if step is None and steps:
      chosen = steps[-1]
    if chosen not in steps:
      raise FileNotFoundError(
          f'step must be one of those in {self._folder} ({_some(steps)}), got'
          f' {step}.'
      )
    chosen = int(chosen)
    about = self._about(chosen)
    saved = {
        **{
            name: types.SimpleNamespace(dtype=dtype, shape=tuple(shape))
            for name, (dtype, shape, _) in about['leaves'].items()
        },
        **about['values'],
        **naming.described(about['records']),
    }
    naming.check(saved, self._like, resize=resize, rechunk=rechunk)
    wanted = naming.names(jax.tree.map(naming.abstract, self._like)).leaves
    targets = {
        name: _target(tuple(shape), dtype, wanted.get(name))
        for name, (dtype, shape, _) in about['leaves'].items()
    }
    digests = {
        name: digest for name, (*_, digest) in about['leaves'].items()
        if digest is not None  # an empty array, which is not saved
    }
    try:
      arrays = ocp.load(
          self._folder / str(chosen), {name: targets[name] for name in digests}
      ) if digests else {}
    except Exception as error:
      raise self._damaged(chosen, repr(error)[:400]) from error
    for name, digest in replicas.content_digests(arrays).items():
      if digest != digests[name]:
        raise self._damaged(chosen, f'{name} is not what was saved')
    for name, x in targets.items():
      found = arrays.get(name)
      saved[name] = np.zeros(x.shape, x.dtype) if found is None else _as_key(
          found, wanted.get(name)
      )
    return chosen, naming.from_leaves(
        saved, self._like, resize=resize, rechunk=rechunk
    )

  def _about(self, step: int) -> dict[str, Any]:
    """Returns the description of a checkpoint's arrays."""
    try:
      about = ocp.metadata(self._folder / str(step)).custom_metadata
    except Exception as error:
      raise self._damaged(step, repr(error)[:400]) from error
    if not about or about.pop('checksum', None) != _checksum(about):
      raise self._damaged(
          step, 'its description is missing, or not what was written'
      )
    if about['format'] != _FORMAT:
      raise self._damaged(step, f'format {about["format"]}, not {_FORMAT}')
    return about

  def _damaged(self, step: int, why: str) -> ValueError:
    others = tuple(s for s in self.steps if s != step)
    return ValueError(
        f'The checkpoint of step {step} in {self._folder} must be whole, and'
        f' written by demo_optax, got: {why}. Restore another one by step='
        f' (there are: {_some(others)}), or remove it.'
    )


def _target(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
  """Returns the target of Orbax's load: the saved shape, sharded as `like`."""
  if like is None:  # `resize` discards it
    return np.broadcast_to(np.zeros((), dtype), shape)
  dtype, sharding = like.dtype, like.sharding
  if prng.is_key_array(like):
    data = jax.eval_shape(jax.random.key_data, like)
    shape, dtype = (*shape, *data.shape[len(like.shape) :]), data.dtype
  if sharding is None or (
      jax.process_count() > 1 and sharding.is_fully_addressable
  ):
    return np.broadcast_to(np.zeros((), dtype), shape)
  if shape[: len(like.shape)] != like.shape:
    sharding = cutting.auto(cutting.fit_sharding(shape, sharding))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _savable(x: Any) -> Any:
  """Returns an array in a form that Orbax accepts."""
  x = jax.random.key_data(x) if prng.is_key_array(x) else x
  if jax.process_count() > 1 and replicas.is_local(x):
    return np.array(x)
  return np.asarray(x) if isinstance(x, np.generic) else x


def _as_key(x: Any, like: Any) -> Any:
  if like is None or not prng.is_key_array(like):
    return x
  found: list[Any] = []
  jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
  return jax.random.wrap_key_data(x, impl=found[0])


def _checksum(about: dict[str, Any]) -> int:
  """Returns the checksum of a description, as read from its file."""
  return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _in_first(action: Callable[[], None]) -> None:
  """Calls `action` in process 0; raises in all if it fails."""
  error = None
  if jax.process_index() == 0:
    try:
      action()
    except Exception as caught:
      error = caught
  if jax.process_count() > 1:
    failed = multihost_utils.broadcast_one_to_all(np.array(error is not None))
    if failed and error is None:
      raise OSError('process 0 could not save: its own output says why.')
  if error is not None:
    raise error


def _integer(argument: str, value: Any, least: int) -> int:
  if isinstance(value, bool) or not hasattr(value, '__index__'):
    raise TypeError(f'{argument} must be an integer, got {value!r}.')
  if value < least:
    raise ValueError(f'{argument} must be at least {least}, got {value}.')
  return operator.index(value)


def _some(steps: tuple[int, ...]) -> str:
  return ', '.join(map(str, steps)) or 'none'
