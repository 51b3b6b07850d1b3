"""A folder of Orbax checkpoints, with leaves by name and their digests.

With Orbax alone, two writers replace each other's steps, an empty folder counts
as the latest checkpoint, and damaged arrays are restored silently.
"""

import contextlib
import fcntl
import json
import operator
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

# Orbax's current API, in the form in which it is documented.
from orbax.checkpoint import v1 as ocp

from demo_optax import _checks, replicas
from demo_optax.checkpoint import placement
from demo_optax.checkpoint.leaves import from_leaves, to_leaves
from demo_optax.checkpoint.placement import Value, abstract
from demo_optax.numerics import prng


class Checkpointer(contextlib.AbstractContextManager['Checkpointer']):
  """Saves and restores one tree, by steps, in one folder.

  A step is one Orbax checkpoint, written in the background under a temporary
  name and renamed when complete. All processes make the same calls, on a shared
  folder.

  Example:
    >>> import demo_optax, jax.numpy as jnp, tempfile
    >>> from demo_optax import checkpoint
    >>> tree = {'w': jnp.ones(3)}
    >>> folder = tempfile.mkdtemp()
    >>> with checkpoint.Checkpointer(folder, tree) as checkpoints:
    ...   checkpoints.save(10, tree)
    ...   step, tree = checkpoints.restore()
    >>> step
    10

  Args:
    folder: a local path or `gs://...`; created by the first save.
    like: the tree to save and to restore, as for `from_leaves`. Arrays are
      kept as shapes, dtypes and shardings.
    keep: how many checkpoints to keep, at least 1.
    timeout: seconds after which an incomplete save fails in all processes.
  """

  def __init__(
    self,
    folder: epath.PathLike,
    like: chex.ArrayTree,
    *,
    keep: int = 2,
    timeout: int = 1200,
  ):
    self._folder = epath.Path(folder).expanduser()
    if '://' not in os.fspath(self._folder):
      self._folder = self._folder.absolute()

    def keep_shape(x: Value) -> Value:
      return abstract(x) if isinstance(x, jax.Array) else x

    self._like = jax.tree.map(keep_shape, like)
    # Raises if the tree cannot be saved.
    self._wanted = to_leaves(jax.tree.map(abstract, self._like))
    _checks.check_positive('keep', keep)
    _checks.check_positive('timeout', timeout)
    self._policy = ocp.training.preservation_policies.LatestN(keep)
    self._context = ocp.Context()
    self._context.asynchronous.timeout_secs = timeout
    # Otherwise threads wait 300 s for directories that could not be made.
    self._context.asynchronous.create_directories_asynchronously = False
    self._pending = contextlib.ExitStack()  # closing it waits for the save
    self._lock: weakref.finalize[..., Any] | None = None  # calling it unlocks

  def __exit__(self, *exception: object) -> None:
    self.close()

  @property
  def steps(self) -> tuple[int, ...]:
    """The steps with a complete checkpoint, ascending."""
    self.wait()
    steps = []
    for path in self._folder.glob('*'):
      # What Orbax has not renamed yet has another name.
      if path.name.isdecimal() and any(path.iterdir()):
        steps.append(int(path.name))
    return tuple(sorted(steps))

  def save(self, step: int, tree: chex.ArrayTree) -> None:
    """Saves `tree` in the background.

    Waits for the previous save, and returns once the arrays are copied: they
    may be donated to the next step. A complete save removes the oldest beyond
    `keep`. A failed one changes no other; `save`, `wait` or `close` raises its
    error next.

    Raises:
      ValueError: the step has a checkpoint; or a leaf that each process holds
        alone differs between processes.
      OSError: another Checkpointer, here or in another job, writes to the
        folder; or the folder cannot be written.
    """
    step = operator.index(step)
    _checks.check_positive('step', step, 0)
    self.wait()
    # All processes write, one looks after the folder.
    _in_first(lambda: self._prepare(step))
    arrays, about = _described(to_leaves(tree))
    # One for each save: after an error it would repeat the error.
    writer = self._pending.enter_context(
      ocp.training.Checkpointer(
        self._folder,
        preservation_policy=self._policy,
        cleanup_tmp_directories=True,  # safe only under the lock
        context=self._context,
      )
    )
    # `force`: Orbax's own policy would skip steps.
    saved = writer.save_async(
      step,
      arrays,
      force=True,
      custom_metadata=about,
    )
    self._pending.callback(saved.result)

  def _prepare(self, step: int) -> None:
    """Locks the folder; raises if the step exists."""
    self._folder.mkdir(parents=True, exist_ok=True)
    if self._lock is None or not self._lock.alive:
      self._lock_folder()
    if (self._folder / str(step)).exists():
      raise ValueError(
        f'step must be new in {self._folder}, got {step} (there are:'
        f' {_some(self.steps)}). Give another folder, or remove it first.'
      )

  def _lock_folder(self) -> None:
    """Becomes the one writer; removes what others have left empty."""
    try:
      handle = os.open(self._folder, os.O_RDONLY)
      # Also if this object is forgotten.
      self._lock = weakref.finalize(self, os.close, handle)
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      self.close()
      raise OSError(
        f'{self._folder} must have one writer, and another Checkpointer'
        ' saves to it, here or in another job. Close it, or give another'
        ' folder.'
      ) from error
    except OSError:  # no local folder, or a network file system without locks
      pass
    for path in self._folder.iterdir():
      if path.name.isdecimal():
        with contextlib.suppress(OSError):
          os.rmdir(path)  # an empty one would count as the latest

  def wait(self) -> None:
    """Waits for the last save; raises its error if it failed."""
    self._pending.close()

  def close(self) -> None:
    """Waits for the last save, and releases the folder."""
    try:
      self.wait()
    finally:
      if self._lock is not None:
        self._lock()

  def restore(
    self,
    step: int | None = None,
    *,
    resize: bool = False,
    rechunk: bool = False,
  ) -> tuple[int, chex.ArrayTree]:
    """Restores a step, by default the last, with the options of `from_leaves`.

    Returns the step, and a tree like `like`, on its devices. Raises a
    `FileNotFoundError` if there is no checkpoint, and a `ValueError` if it is
    damaged, or differs from `like` as for `from_leaves`.
    """
    steps = self.steps
    chosen = max(steps, default=-1) if step is None else step
    if chosen not in steps:
      raise FileNotFoundError(
        f'step must be one of those in {self._folder} ({_some(steps)}), got'
        f' {step}.'
      )
    try:
      saved = self._read(self._folder / str(chosen))
    except Exception as error:
      others = _some(set(steps) - {chosen})
      raise ValueError(
        f'The checkpoint of step {chosen} in {self._folder} must be whole,'
        f' and written by demo_optax, got {repr(error)[:400]}. Restore'
        f' another one by step= (there are: {others}), or remove it.'
      ) from error
    return int(chosen), from_leaves(
      saved,
      self._like,
      resize=resize,
      rechunk=rechunk,
    )

  def _read(self, path: epath.Path) -> dict[str, Value]:
    """Returns a checkpoint's leaves; raises if it is damaged."""
    # Written by Orbax beside the arrays, and checked here.
    about = ocp.metadata(path).custom_metadata
    if not about or about.pop('checksum', None) != _checksum(about):
      raise ValueError('its description is missing, or not what was written')
    targets = {}
    for name, (dtype, shape, *_) in about['arrays'].items():
      if 0 not in shape:
        wanted = self._wanted.get(name)
        targets[name] = _target(tuple(shape), dtype, wanted)
    arrays = ocp.load(path, targets) if targets else {}
    # Digests are made where the arrays are: nothing is gathered.
    copies = replicas.copies(arrays)
    leaves = dict(about['values'])
    for name, (dtype, shape, impl, digest) in about['arrays'].items():
      array = arrays.get(name)
      if array is None:
        array = np.zeros(shape, dtype)
      elif replicas.content_digest(copies[name]) != digest:
        raise ValueError(f'{name} is not what was saved')
      if impl is not None:
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
      leaves[name] = array
    return leaves


def _described(
  leaves: Mapping[str, Value],
) -> tuple[dict[str, Value], dict[str, Any]]:
  """Returns the arrays that Orbax writes, and what describes all leaves."""
  # Compared before anything is written.
  copies = replicas.copies(leaves)
  arrays: dict[str, Value] = {}
  descriptions, values = {}, {}
  for name, leaf in leaves.items():
    _check_same(name, copies[name])
    if not hasattr(leaf, 'dtype'):
      values[name] = leaf
      continue
    impl = None
    if prng.is_key_array(leaf):
      impl, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    digest = replicas.content_digest(copies[name])
    descriptions[name] = [str(leaf.dtype), leaf.shape, impl, digest]
    is_spread = isinstance(leaf, jax.Array) and not replicas.is_local(leaf)
    if leaf.size:  # Orbax refuses empty ones
      arrays[name] = leaf if is_spread else np.array(leaf)
  about = {'arrays': descriptions, 'values': values}
  return arrays, {**about, 'checksum': _checksum(about)}


def _target(
  shape: tuple[int, ...],
  dtype: str,
  wanted: Value,
) -> Value:
  """Returns a target for Orbax's load: the saved shape, sharded as wanted.

  On the host if that has no place for it on devices, and for keys.
  """
  sharding = getattr(wanted, 'sharding', None)
  if (
    sharding is None
    or str(wanted.dtype) != dtype
    or (jax.process_count() > 1 and sharding.is_fully_addressable)
  ):
    return np.broadcast_to(np.zeros((), dtype), shape)
  sharding = placement.auto(placement.fit_sharding(shape, sharding))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _check_same(
  name: str,
  copies: Sequence[replicas.Copy],
) -> None:
  """Raises if processes hold different copies, each for itself."""
  processes = set()
  for copy in replicas.differing(copies):
    if copy.device is None:
      processes.add(copy.process)
  if processes:
    raise ValueError(
      f'{name} must be the same in all processes, got another in'
      f' {sorted(processes)}. Spread it over the mesh, or gather it first.'
    )


def _checksum(about: Mapping[str, object]) -> int:
  """Returns a description's checksum, as read from its file."""
  return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _in_first(action: Callable[[], None]) -> None:
  """Calls `action` in process 0; raises in all if it fails."""
  error = None
  if jax.process_index() == 0:
    try:
      action()
    except Exception as caught:
      error = caught
  has_failed = np.array(error is not None)
  if multihost_utils.broadcast_one_to_all(has_failed):
    raise error or OSError('process 0 could not save: its output says why.')


def _some(steps: Iterable[int]) -> str:
  return ', '.join(map(str, sorted(steps))) or 'none'
