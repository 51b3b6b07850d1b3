"""Chooses between forms of one operation, by shape and platform.

Decided here and nowhere else, from static shapes and from the platform that a
step runs on. A platform chooses operations, never the layout of a state, the
bytes of a message, a digest or a checkpoint. The reasons are measurements on
CPUs (`benchmarks/README.md`, 'A step') and readings of programs that were
compiled for GPUs and TPUs. Bits are promised for each form: updates of two
forms differ in their last bits.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

# Coefficients that a CPU handles at once, 1 MB in float32. Intermediate results
# stay in the caches, and memory is written for results alone: memory that is
# new to a process costs ten times its copy.
PIECE = 2**18

# Up to so many coefficients, plain operations are taken: what cleverer ones
# save is less than what it costs to compile them.
_SMALL = 2**17

_running: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    'demo_optax_platform', default=None
)


def of(mesh: Any = None) -> str:
  """Returns the platform that a step runs on: 'cpu', 'gpu' or 'tpu'.

  In this order: that of `running_on`, of the devices of the workers' mesh, of
  the mesh that is being traced for, of `jax.default_device`, of the backend.

  Args:
    mesh: the workers' mesh, or `None`.
  """
  if (name := _running.get()) is not None:
    return name
  for found in (mesh, jax.sharding.get_abstract_mesh()):
    # Also of a topology to compile for, which has no devices here.
    abstract = getattr(found, 'abstract_mesh', found)
    if (device := getattr(abstract, 'abstract_device', None)) is not None:
      return _short(device.platform)
  if mesh is not None:
    return _short(mesh.devices.flat[0].platform)
  device = jax.config.values['jax_default_device']
  return _short(
      device if isinstance(device, str)
      else getattr(device, 'platform', None) or jax.default_backend()
  )


@contextlib.contextmanager
def running_on(name: str) -> Iterator[None]:
  """Traces for a platform, on any: 'cpu', 'gpu' or 'tpu'."""
  token = _running.set(_short(name))
  try:
    yield
  finally:
    _running.reset(token)


def in_pieces() -> bool:
  """Returns whether a bucket is handled in pieces that fit the caches.

  GPUs and TPUs want few large operations and have no such caches.
  """
  return _on_cpu()


def is_small(elements: int) -> bool:
  """Returns whether so many coefficients are few."""
  return elements <= _SMALL


def group_size(elements: int, n: int, k: int) -> int:
  """Returns the length of the groups whose maxima `top_k` of `n` counts first.

  XLA:CPU's `top_k` takes one thread, and three to five times as long as
  counting `n / 8` maxima and then `8 k` candidates, in the caches.

  Args:
    elements: of all chunks. For few, `lax.top_k` is compiled in less time.
    n: length of a chunk.
    k: how many are selected of each.

  Returns:
    8; or 1, for `lax.top_k` of all.
  """
  many = not is_small(elements) and n % 8 == 0 and n >= 32 * k
  return 8 if many and _on_cpu() else 1


def stage_size(n: int, k: int) -> int:
  """Returns the length of the groups that `lax.top_k` selects first.

  XLA:GPU sorts all n pairs of a chunk for `top_k` of more than 16; the maxima
  of groups of 16, and then the members of the k largest, take a tenth of the
  comparisons. One stage where groups are not fewer than the chunk by much.

  Args:
    n: length of a chunk.
    k: how many are selected of each.

  Returns:
    16; or 1, for one stage.
  """
  return 16 if not _on_cpu() and n % 16 == 0 and n >= 32 * k else 1


def transform_selected(workers: int, k: int, rows: int, cols: int) -> bool:
  """Returns whether what was selected goes back through outer products.

  Those take `k * rows * cols` multiplications for each worker and a sum, and
  the transform of the whole chunk `rows * cols * (rows + cols)` and a place
  where to put them. On CPUs one worker's take half the time at 32 of 64 x 64
  and a fourth at 8, and four workers' 0.8 at 8.
  """
  few = 2 * workers * (k + 8) <= rows + cols
  return few and min(rows, cols) >= 16 and _on_cpu()


def loop_to_keep(elements: int) -> bool:
  """Returns whether a loop of no or one turn replaces a select of momentum.

  XLA:CPU fuses a select into each of its uses: it would be computed three
  times, and momentum copied since it is read beside where it is written. For
  few elements that costs less than compiling the loop, and on GPUs such a loop
  waits for the host.
  """
  return _on_cpu() and not is_small(elements)


def one_payload_at_a_time() -> bool:
  """Returns whether payloads are read one by one, each within the caches."""
  return _on_cpu()


def by_comparison() -> bool:
  """Returns whether one of each group is found by comparing its place.

  A scatter is serial on TPUs, and needs sorted indices; on CPUs it takes a
  fifth of the time of comparisons with many workers.
  """
  return not _on_cpu()


def reduce_in_two_stages() -> bool:
  """Returns whether a long reduction is written as two.

  XLA:CPU splits one long reduction into several and materialises their
  operands; TPUs copy the operand for the reshape of two.
  """
  return _on_cpu()


def _on_cpu() -> bool:
  return of() == 'cpu'


def _short(name: str) -> str:
  return 'gpu' if name in ('cuda', 'rocm', 'gpu') else name
