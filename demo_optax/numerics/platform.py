"""Chooses between implementations of one operation, by shape and backend.

Decided here and nowhere else, from static shapes and the backend. The reasons
are measurements: `benchmarks/README.md`, 'A step'. Other backends than CPUs
take the plain ways until somebody has measured them there.
"""

import jax

# Coefficients that are handled at once, 1 MB in float32. What a step makes of
# them stays in the caches, and memory is written for results alone: memory that
# is new to a process costs ten times its copy.
_PIECE = 2**18

# Up to so many coefficients, plain operations are taken: what cleverer ones
# save is less than what it costs to compile them.
_SMALL = 2**17


def piece_elements() -> int | None:
  """Returns the largest part of a bucket to handle at once; None: all of it.

  GPUs want few large operations and have no such caches.
  """
  return _PIECE if _on_cpu() else None


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
  """Returns whether a loop of no or one turn stands for a select of momentum.

  XLA:CPU fuses a select into each of its uses: it would be computed three
  times, and momentum copied since it is read beside where it is written. For
  few elements that costs less than compiling the loop, and on GPUs such a loop
  waits for the host.
  """
  return _on_cpu() and not is_small(elements)


def one_payload_at_a_time() -> bool:
  """Returns whether payloads are read one by one, each within the caches."""
  return _on_cpu()


def _on_cpu() -> bool:
  return jax.default_backend() == 'cpu'
