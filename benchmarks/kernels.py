"""The kernels, looked at without a device.

    python benchmarks/kernels.py precision           # of products, in NumPy
    python benchmarks/kernels.py write FOLDER        # what Triton reads
    python benchmarks/kernels.py registers FOLDER    # needs Triton, not JAX
    python benchmarks/kernels.py tpu v5e:2x2         # needs libtpu

`precision`: how far coefficients of 64 x 64 chunks are from float64, and how
often another selection follows. `registers`: what `ptxas` says of every variant
that `write` wrote. `tpu`: whether Mosaic's own compiler takes all kernels.
"""

import contextlib
import functools
import io
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np

CHUNKS = 2000
LOCATION = r' (#loc\d*|"[^"]*"\(.*\)|/\S+:\d+:\d+( to (\d+)?:\d+)?)$'


def precision() -> None:
  import ml_dtypes

  from demo_optax.compressors import Dct

  def bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)

  def tf32(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64) + 0x1000
    return (bits & 0xFFFFE000).astype(np.uint32).view(np.float32)

  def parts(x: np.ndarray, rounded: Any, count: int) -> list[np.ndarray]:
    found = []
    for _ in range(count):
      found.append(rounded(x))
      x = x - found[-1]
    return [part.astype(np.float64) for part in found]

  # Rounding, parts of a number, and which products of parts are summed up.
  ways: dict[str, tuple[Any, int, list[tuple[int, int]]]] = {
      'float32': (None, 0, []),
      'bfloat16 x 6': (bfloat16, 3, [
          (2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]),
      'TF32 x 3': (tf32, 2, [(0, 1), (1, 0), (0, 0)]),
      'bfloat16 x 3': (bfloat16, 2, [(0, 1), (1, 0), (0, 0)]),
      'TF32': (tf32, 1, [(0, 0)]),
      'bfloat16': (bfloat16, 1, [(0, 0)]),
  }
  basis = np.ascontiguousarray(Dct().matrix(64).T)

  def product(x: np.ndarray, way: str | None) -> np.ndarray:
    if way is None:
      return x @ basis
    rounded, count, pairs = ways[way]
    matrix = basis.astype(np.float32)
    if not pairs:
      return x @ matrix
    left, right = parts(x, rounded, count), parts(matrix, rounded, count)
    total = np.zeros_like(x)
    for i, j in pairs:
      total += (left[i] @ right[j]).astype(np.float32)
    return total

  def transform(x: np.ndarray, way: str | None) -> np.ndarray:
    x = np.ascontiguousarray(np.swapaxes(product(x, way), 1, 2))
    return product(x, way).reshape(CHUNKS, -1)

  def top_k(c: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(-np.abs(c), 1, kind='stable')[:, :k]
    return np.sort(order, 1)

  rng = np.random.default_rng(0)
  gradient = rng.normal(size=(CHUNKS, 64, 64)).astype(np.float32)
  momentum = 3 * rng.normal(size=(CHUNKS, 4096)).astype(np.float32)
  exact = transform(gradient.astype(np.float64), None)
  print('| products | error, RMS | largest | chunks selected otherwise |')
  for way in ways:
    c = transform(gradient, way)
    others = [
        np.mean((top_k(0.999 * momentum + exact, k)
                 != top_k(np.float32(0.999) * momentum + c, k)).any(1))
        for k in (8, 32)
    ]
    error = np.abs(c - exact)
    print(f'| {way} | {np.sqrt(np.mean(error**2)):.1e} | {error.max():.1e} |'
          f' k = 8: {others[0]:.2%}, k = 32: {others[1]:.2%} |', flush=True)


def write(folder: str) -> None:
  """A file for each kernel and variant, `name.warps.ttir`."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl

  from demo_optax.compressors import Dct
  from demo_optax.engine import pallas_gpu as kernels_gpu
  from demo_optax.engine.pallas_common import Cut

  presets = jax.lax.DotAlgorithmPreset
  ways = {'bf16x6': presets.BF16_BF16_F32_X6,
          'tf32x3': presets.TF32_TF32_F32_X3,
          'f32': jax.lax.Precision.HIGHEST}
  pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  plain, struct = pl.pallas_call, jax.ShapeDtypeStruct
  mesh = jax.sharding.AbstractMesh(
      (), (), abstract_device=jax.sharding.AbstractDevice(
          'NVIDIA H100 80GB HBM3', 132, 'gpu'))

  def lower(fun: Any, *args: Any) -> str:
    pl.pallas_call = functools.partial(plain, debug=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), (
        jax.sharding.use_abstract_mesh(mesh)):
      jax.jit(fun).trace(*args).lower(lowering_platforms=('cuda',))
    pl.pallas_call = plain
    text = printed.getvalue()
    text = text[text.index('The Triton module') :].replace(' [unknown]', '')
    text = text[text.index('module @') : text.index('\n}') + 2]
    return re.sub(LOCATION, '', text, flags=re.MULTILINE)

  for size, k, warps in ((32, 32, 4), (64, 32, 4), (64, 32, 8), (64, 32, 16),
                         (128, 64, 8), (128, 64, 16)):
    cut = Cut(2048 // size, 2048 // size, size, size)
    m = struct((cut.row_chunks, cut.col_chunks, cut.n), jnp.float32)
    sent = [struct((cut.chunks, 2 * k), d) for d in (jnp.int32, jnp.float32)]
    for name, way in ways.items():
      options = {'precision': way, 'num_warps': warps}
      texts = {
          'encode': lower(
              lambda g, m, s, cut=cut, k=k, o=options: kernels_gpu.encode(
                  [g], [m], s, [cut], k, Dct().matrix, 1e30, **o),
              struct(cut.shape, jnp.float32), m, struct((3,), jnp.float32)),
          'decode': lower(
              lambda p, v, cut=cut, o=options: kernels_gpu.decode(
                  p, v, [cut], Dct().matrix, weighted=False, **o), *sent),
      }
      for kind, text in texts.items():
        file = pathlib.Path(folder, f'{kind}_{size}_{name}.{warps}.ttir')
        file.write_text(text)


def registers(folder: str, capability: str = '90') -> None:
  import triton
  from triton.backends.compiler import GPUTarget

  tools = pathlib.Path(triton.__file__).parent / 'backends/nvidia/bin'
  print('| kernel | threads | shared memory | registers | spilled, bytes |')
  for file in sorted(pathlib.Path(folder).glob('*.ttir')):
    name, warps, _ = file.name.split('.')
    done = triton.compile(
        str(file), target=GPUTarget('cuda', int(capability), 32),
        options={'num_warps': int(warps)})
    cubin = file.with_suffix('.cubin')
    cubin.write_bytes(done.asm['cubin'])
    said = subprocess.run(
        [tools / 'cuobjdump', '-res-usage', cubin], capture_output=True,
        text=True, check=True).stdout
    used, spilled = re.findall(r'REG:(\d+) STACK:(\d+)', said)[0]
    print(f'| {name} | {32 * int(warps)} | {done.metadata.shared} | {used} |'
          f' {spilled} |', flush=True)


def tpu(topology: str) -> None:
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  import demo_optax
  from demo_optax.compressors import Dct
  from demo_optax.engine.pallas import Kernels

  devices = topologies.get_topology_desc(topology, 'tpu').devices[:1]
  mesh = jax.sharding.Mesh(np.array(devices), ('x',))
  place = NamedSharding(mesh, P())
  kernels, struct = Kernels('tpu'), jax.ShapeDtypeStruct

  def temporaries(fun: Any, *args: Any) -> int:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      lowered = jax.jit(
          fun, in_shardings=place, out_shardings=place, donate_argnums=1
      ).lower(*args)
      return lowered.compile().memory_analysis().temp_size_in_bytes

  for shape, size, k, dtype, workers in (
      ((2048, 2048), 32, 4, 'float32', 2), ((2048, 2048), 64, 32, 'float32', 8),
      ((2048, 2048), 64, 32, 'bfloat16', 64),
      ((2048, 2048), 128, 64, 'float32', 2), ((8192,), 64, 8, 'float32', 2)):
    plan = demo_optax.dct_topk(size, k).plan(shape, jnp.float32)

    def encode(g: Any, m: Any, present: Any, plan: Any = plan) -> Any:
      return kernels.encode(
          Dct().matrix, [plan], [g], [m], 0.9, 1.0, present, [1e30])

    def decode(sent: Any, present: Any, plan: Any = plan) -> Any:
      return kernels.decode(
          Dct().matrix, [plan], [sent], [present], 'senders')

    m = struct(plan.grid.coefficients_shape, jnp.float32)
    sent = (workers, plan.grid.num_chunks, k)
    cases = {
        'encode': (encode, struct(shape, dtype), m, struct((), bool)),
        'decode': (decode, (struct(sent, jnp.int32), struct(sent, jnp.float32)),
                   struct((workers,), bool)),
    }
    for kind, case in cases.items():
      try:
        said = f'temporaries {temporaries(*case)} bytes'
      except Exception as error:
        said = f'refused: {str(error)[:200]}'
      print(topology, kind, shape, size, k, dtype, workers, said, flush=True)


if __name__ == '__main__':
  if len(sys.argv) < 2 or sys.argv[1] not in (
      'precision', 'write', 'registers', 'tpu'):
    raise SystemExit(__doc__)
  {'precision': precision, 'write': write, 'registers': registers,
   'tpu': tpu}[sys.argv[1]](*sys.argv[2:])
