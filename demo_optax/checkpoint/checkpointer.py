"""A folder of Orbax checkpoints, with leaves by name and their digests.

With Orbax alone, damaged arrays are restored silently.
"""

import contextlib
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

# Orbax's current API, in the form in which it is documented.
from orbax.checkpoint import v1 as ocp

from demo_optax import _checks, replicas
from demo_optax.checkpoint import placement
from demo_optax.checkpoint.compare import REMEDIES, check_fits, describe
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

    self._like = jax.tree.map(abstract, like)
    self._wanted = to_leaves(self._like)
    _checks.check_positive('keep', keep)
    self._policy = ocp.training.preservation_policies.LatestN(keep)
    self._context = ocp.Context()
    self._context.asynchronous.timeout_secs = timeout
    # Otherwise threads wait 300 s for directories that could not be made.
    self._context.asynchronous.create_directories_asynchronously = False
    self._pending = contextlib.ExitStack()  # closing it waits for the save

  def __exit__(self, *exception: object) -> None:
    self.wait()

  @property
  def steps(self) -> tuple[int, ...]:
    """The steps with a complete checkpoint, ascending."""
    self.wait()
    steps = []
    for path in self._folder.glob('*'):
      # What Orbax has not renamed yet has another name.
      if path.name.isdecimal():
        steps.append(int(path.name))
    return tuple(sorted(steps))

  def save(self, step: int, tree: chex.ArrayTree) -> None:
    """Saves `tree` in the background.

    Waits for the previous save, and returns once the arrays are copied: they
    may be donated to the next step. A complete save removes the oldest beyond
    `keep`. A failed one changes no other; the next `save` or `wait` raises its
    error.

    Raises:
      FileExistsError: the step has a checkpoint.
      ValueError: `tree` differs from `like`; or a leaf that each process holds
        alone differs between processes.
    """
    step = operator.index(step)
    _checks.check_positive('step', step, 0)
    self.wait()
    leaves = to_leaves(tree)
    remedy = 'Save such a tree, or make a Checkpointer for this one.'
    check_fits(
      describe(leaves),
      describe(self._wanted),
      dict.fromkeys(REMEDIES, remedy),
    )
    arrays, descriptions = _described(leaves)
    # One for each save: after an error it would repeat the error.
    writer = self._pending.enter_context(
      ocp.training.Checkpointer(
        self._folder,
        preservation_policy=self._policy,
        cleanup_tmp_directories=True,
        context=self._context,
      )
    )
    # `force`: Orbax's own policy would skip steps.
    saved = writer.save_async(
      step,
      arrays,
      force=True,
      custom_metadata=descriptions,
    )
    self._pending.callback(saved.result)

  def wait(self) -> None:
    """Waits for the last save; raises its error if it failed."""
    self._pending.close()

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
        f'step must be one of {steps} in {self._folder}, got {step}. Save one'
        ' first, or give another folder.'
      )
    try:
      saved = self._read(self._folder / str(chosen))
    except Exception as error:
      raise ValueError(
        f'The checkpoint of step {chosen} in {self._folder} must be whole,'
        f' and written by demo_optax, got {repr(error)[:400]}. Restore'
        f' another one of {steps} by step=, or remove it.'
      ) from error
    return int(chosen), from_leaves(
      saved,
      self._like,
      resize=resize,
      rechunk=rechunk,
    )

  def _read(self, path: epath.Path) -> dict[str, Value]:
    """Returns a checkpoint's leaves; raises if it is damaged."""
    # Written by Orbax beside the arrays.
    descriptions = ocp.metadata(path).custom_metadata
    if not descriptions:
      raise ValueError('it has no digests')
    targets = {}
    for name, (dtype, shape, *_) in descriptions.items():
      targets[name] = _target(tuple(shape), dtype, self._wanted.get(name))
    arrays = ocp.load(path, targets)
    # Digests are made where the arrays are: nothing is gathered.
    copies = replicas.copies(arrays)
    for name, (*_, key_impl, digest) in descriptions.items():
      if replicas.content_digest(copies[name]) != digest:
        raise ValueError(f'{name} is not what was saved')
      if key_impl is not None:
        key_data = jnp.asarray(arrays[name])
        arrays[name] = jax.random.wrap_key_data(key_data, impl=key_impl)
    return arrays


def _described(
  leaves: Mapping[str, Value],
) -> tuple[dict[str, Value], dict[str, Any]]:
  """Returns the arrays that Orbax writes, and what describes them."""
  # Compared before anything is written.
  copies = replicas.copies(leaves)
  arrays: dict[str, Value] = {}
  descriptions = {}
  for name, leaf in leaves.items():
    _check_same(name, copies[name])
    key_impl = None
    if prng.is_key_array(leaf):
      key_impl = str(jax.random.key_impl(leaf))
    array = replicas.comparable(leaf)
    digest = replicas.content_digest(copies[name])
    descriptions[name] = [str(array.dtype), array.shape, key_impl, digest]
    # A copy: the caller may write to NumPy's while it is saved.
    arrays[name] = np.array(array) if isinstance(array, np.ndarray) else array
  return arrays, descriptions


def _target(
  shape: tuple[int, ...],
  dtype: str,
  wanted: Value,
) -> Value:
  """Returns a target for Orbax's load: placed as wanted, if that is equal.

  Otherwise on the host, as keys are.
  """
  sharding = placement.sharding_of(wanted)
  if (
    sharding is None
    or (wanted.shape, str(wanted.dtype)) != (shape, dtype)
    or (jax.process_count() > 1 and sharding.is_fully_addressable)
  ):
    return np.broadcast_to(np.zeros((), dtype), shape)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.auto(sharding))


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
