"""The state that workers share, as bytes, and which workers agree on it."""

import collections
import contextlib
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from demo_optax.numerics import packing, prng
from demo_optax.remote import frames

# Workers on unlike hardware may differ in the last bits. They are made equal
# again where a number differs by more than this share of the largest one.
_TOLERANCE = 1e-3
_SAMPLE = 64  # numbers of an array that are compared

# Bytes of arrays --------------------------------------------------------------


def whole(x: Any) -> Any:
  """Returns an array that is on the devices of all processes as a whole."""
  x = prng.words(x)
  if isinstance(x, jax.Array) and not (
    x.is_fully_addressable or x.is_fully_replicated
  ):
    return multihost_utils.process_allgather(x, tiled=True)
  return x


def to_bytes(arrays: Sequence[Any]) -> bytes:
  """Returns the bytes of arrays, one after the other."""
  on_host = jax.device_get([*map(whole, arrays)])
  return b''.join(np.asarray(array).tobytes() for array in on_host)


def from_bytes(
  joined: memoryview, types: Sequence[Any]
) -> tuple[list[np.ndarray], memoryview]:
  """Reads arrays of these shapes and dtypes; returns them, and the rest."""
  arrays = []
  for like in types:
    numbers = np.frombuffer(joined, like.dtype, like.size)
    arrays.append(numbers.reshape(like.shape))
    joined = joined[numbers.nbytes :]
  return arrays, joined


# Comparisons ------------------------------------------------------------------


def steps_in(arrays: Sequence[Any]) -> int:
  """Returns the largest count of steps in a state."""
  most = 0
  for array in arrays:
    if array.dtype == np.int32 and not array.ndim:
      most = max(most, int(whole(array)))
  return most


def digest(arrays: Sequence[Any]) -> bytes:
  """Returns a digest of arrays, the same however they are sharded."""
  return sketch(arrays)[frames.CHAIN : 2 * frames.CHAIN]


def sketch(arrays: Sequence[Any]) -> bytes:
  """Returns the hardware, a digest of arrays, and numbers from all of them."""
  digests, samples = _sketched(list(arrays))
  digest = frames.digest(to_bytes([digests]))
  return hardware() + digest + to_bytes([samples])


@functools.cache
def hardware() -> bytes:
  """Returns a digest of what the last bits of results depend on."""
  device = jax.devices()[0]
  flags = os.environ.get('XLA_FLAGS', '')
  names = {device.device_kind, device.client.platform_version, flags}
  # JAX compiles for the instructions of each processor. Processes of one worker
  # must say the same.
  if device.platform == 'cpu' and jax.process_count() == 1:
    names.add(f'{os.cpu_count()} cores')
    with contextlib.suppress(OSError):
      lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
      names.update(
        line for line in lines if line.startswith(('model name', 'flags'))
      )
  return frames.digest(*map(str.encode, sorted(names)))


@jax.jit
def _sketched(arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
  digests = []
  samples = []
  for array in map(prng.words, arrays):
    start = np.zeros(array.ndim, np.uint32)
    digests.append(packing.digest_block(array, start, array.shape))
    samples.append(_sampled(array))
  return jnp.array(digests), jnp.array(samples)


def _sampled(x: jax.Array) -> jax.Array:
  """Returns f32[2 + samples]: a scale, the largest number, and some numbers."""
  is_rounded = jnp.issubdtype(x.dtype, jnp.inexact)
  if jnp.iscomplexobj(x):
    x = jnp.stack([x.real, x.imag])
  numbers = jnp.ravel(x).astype(jnp.float32)
  sizes = jnp.abs(numbers)
  largest = jnp.max(sizes, initial=0)  # NaN if one is
  is_compared = jnp.isfinite(sizes) & is_rounded  # of integers all bits count
  scale = jnp.max(sizes, initial=0, where=is_compared)
  stride = max(1, numbers.size // _SAMPLE)
  sampled = numbers[::stride][:_SAMPLE]
  sampled = jnp.pad(sampled, (0, _SAMPLE - sampled.size))
  return jnp.concatenate([jnp.stack([scale, largest]), sampled])


def majority(sketches: Mapping[int, bytes]) -> list[int]:
  """Returns the ranks whose arrays agree, if they are more than half.

  On hardware of one kind arrays agree to the bit, else within a tolerance.
  """
  counts = collections.Counter(sketches.values())
  by_size = [sketched for sketched, _ in counts.most_common()]
  largest: list[int] = []
  for center in counts:
    # The center, and of other hardware the largest group that is close to it.
    agreeing: dict[bytes, bytes] = {}  # by hardware
    for sketched in (center, *by_size):
      if _are_close(center, sketched):
        agreeing.setdefault(sketched[: frames.CHAIN], sketched)
    groups = agreeing.values()
    ranks = [rank for rank, sketched in sketches.items() if sketched in groups]
    largest = max(largest, ranks, key=len)
  return largest if 2 * len(largest) > len(sketches) else []


def _are_close(one: bytes, other: bytes) -> bool:
  """Returns whether samples are equal, but for rounding. NaN never is."""
  ours, theirs = _samples_of(one), _samples_of(other)
  scales = np.maximum(ours[:, :1], theirs[:, :1])
  with np.errstate(invalid='ignore', over='ignore'):  # of infinite numbers
    is_close = np.abs(ours - theirs) <= _TOLERANCE * scales
  return bool(np.all((ours == theirs) | is_close))


def _samples_of(sketched: bytes) -> np.ndarray:
  """Returns the samples in a sketch, f32[arrays, 2 + samples]."""
  numbers = np.frombuffer(sketched, np.float32, offset=2 * frames.CHAIN)
  return numbers.reshape(-1, 2 + _SAMPLE)
