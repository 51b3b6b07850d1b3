"""Chooses how to write an operation, by shape and platform.

Only this module decides, from static shapes and from the platform that a step
runs on. A platform chooses operations, never a layout, a message, a digest or a
checkpoint. The reasons are measurements on CPUs
(`benchmarks/README.md`, 'A step') and programs compiled for GPUs and TPUs.
Updates may then differ in their last bits.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

# Coefficients that a CPU handles at once, 1 MB in float32. Intermediate results
# stay in the caches: memory new to a process costs ten times its copy.
PIECE = 2**18

# Coefficients that a TPU handles at once: 32 MB of a v5e's 128 MB.
_PART = 2**23

# Up to here plain operations compile faster than cleverer ones would save.
_SMALL = 2**17

_running: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  'demo_optax_platform', default=None
)


def of(mesh: Mesh | None = None) -> str:
  """Returns the platform that a step runs on: 'cpu', 'gpu' or 'tpu'.

  In this order: the name in `running_on`, the workers' `mesh`, the mesh being
  traced for, `jax.default_device`, the backend.
  """
  name = _running.get() or _platform_of(mesh)
  return 'gpu' if name in ('cuda', 'rocm') else name


def _platform_of(mesh: Mesh | None) -> str:
  if mesh is not None:
    return mesh.devices.flat[0].platform
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    device = jax.config.values['jax_default_device']
  if isinstance(device, str):
    return device
  return getattr(device, 'platform', None) or jax.default_backend()


@contextlib.contextmanager
def running_on(name: str) -> Iterator[None]:
  """Traces for another platform: 'cpu', 'gpu' or 'tpu'."""
  token = _running.set(name)
  try:
    yield
  finally:
    _running.reset(token)


def num_pieces(pieces: int, elements: int) -> int:
  """Returns in how many parts a bucket with `pieces` is handled.

  CPUs take the pieces, each of which fits the caches. TPUs take as few parts as
  fit their memory for vectors. GPUs prefer few large operations.
  """
  if of() == 'cpu':
    return pieces
  if of() != 'tpu':
    return 1
  for parts in range(1, pieces):
    if pieces % parts == 0 and elements <= parts * _PART:
      return parts
  return pieces


def top_k_tile(elements: int, n: int, k: int) -> int:
  """Returns the tile size for `top_k_of_tiles`, or 1 for plain `lax.top_k`.

  That of XLA:CPU is single-threaded, and takes three to five times as long as
  counting `n / 8` maxima and `8 k` candidates in the caches. For few `elements`
  it compiles faster. XLA:GPU sorts all pairs in a chunk, and tiles within tiles
  leave few. XLA:TPU has a kernel, and would pad tiles to 128.
  """
  if of() == 'cpu':
    size, share = 8, 32
  elif of() == 'gpu':
    size, share = 4, 8
  else:
    return 1
  if elements <= _SMALL or n % size or n < share * k:
    return 1
  return size


def counts_top_k() -> bool:
  """Returns whether tiles are found by counting, on CPUs, or by sorting."""
  return of() == 'cpu'


def chunks_in_lanes(chunks: int) -> bool:
  """Returns whether chunks are handled side by side, one in each lane.

  A TPU's vectors have 128 lanes. Products, maxima and sums along a chunk then
  need no other layout, and a chunk of 64 x 64 no padding to 128. Fewer chunks
  would be padded themselves.
  """
  return of() == 'tpu' and chunks >= 128


def laid_out(x: jax.Array, *, in_lanes: bool) -> jax.Array:
  """Returns chunks `[rows, ...]` in lanes, or in rows as programs take them."""
  if not chunks_in_lanes(len(x)):
    return x
  order = tuple(range(x.ndim))
  if in_lanes:
    order = (*order[1:], 0)
  return with_layout_constraint(x, Layout(order))


def concatenates(chunk_rows: int) -> bool:
  """Returns whether leaves are concatenated, or else written one by one.

  A concatenation of transposed leaves holds all of them twice on CPUs. Vectors
  are not transposed, and each update is a kernel to compile. TPUs and GPUs
  would write zeros first; an H100 then needs three times as long.
  """
  return chunk_rows == 1 or of() != 'cpu'


def hides_constants() -> bool:
  """Returns whether offsets are arrays, so that leaves share their kernels."""
  return of() == 'cpu'


def unrolled(workers: int) -> int:
  """Returns how many workers a turn of a loop adds; GPUs wait for turns."""
  return 1 if of() == 'cpu' else min(workers, 16)


def count_by_comparison(sent: int) -> bool:
  """Returns whether senders are counted by comparing places.

  On accelerators few comparisons cost less than writing a count for every
  coefficient, mostly zeros. CPUs write it in the caches.
  """
  return of() != 'cpu' and sent <= 512


def by_product() -> bool:
  """Returns whether selections are written as products with one-hot matrices.

  TPUs execute gathers and scatters serially, after a sort.
  """
  return of() == 'tpu'


def by_comparison(workers: int, k: int) -> bool:
  """Returns whether selections are compared with all places.

  Of one place in each chunk, XLA:GPU joins this for all workers in a turn.
  Several turns would keep an array of all selections for longer.
  """
  return of() == 'gpu' and k == 1 and workers == unrolled(workers)


def sorts_flags() -> bool:
  """Returns whether a sort joins flags. XLA:CPU copies ands into each use."""
  return of() == 'cpu'


def joins_products(elements: int) -> bool:
  """Returns whether a product by a constant is joined with a larger one.

  XLA:GPU joins a product with others by the same matrix, and copies the large
  operand and the large result for it.
  """
  return of() == 'gpu' and elements < 2**23


def joins_kernels() -> bool:
  """Returns whether arrays are made to depend on one array.

  XLA:GPU then joins kernels that write arrays of one size. A launch takes as
  long as writing some megabytes.
  """
  return of() == 'gpu'


def digests_on_host(device: jax.Device) -> bool:
  """Returns whether NumPy digests what this device holds: for CPUs.

  XLA would compile a program for every shape and device.
  """
  return device.platform == 'cpu'
