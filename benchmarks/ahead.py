"""Steps compiled for TPUs and GPUs that are not here: the compilers' figures.

    python benchmarks/ahead.py              # a small tree, all targets
    python benchmarks/ahead.py --bounds     # and lower the bounds of tests
    python benchmarks/ahead.py --tree 42M --targets v5e --only demo_all_gather
    python benchmarks/ahead.py --kernels    # cycles of TPUs' kernels, alone

In an environment with libtpu and JAX's CUDA plugin (`.ci/run` makes one).
No figure is a time on a device: milliseconds are the compiler's cycles by the
clock, and leave out sorts, gathers, scatters, transfers and kernels. Cycles of
kernels are those of the final schedule, without memory. On TPUs `bytes/param`
is XLA's count, which is far too high with gathers and scatters.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / 'tests' / 'ahead'), str(ROOT / 'tests')]

import programs

RESULTS = pathlib.Path(__file__).parent / 'results' / 'ahead.json'
BOUNDS = ROOT / 'tests' / 'ahead' / 'bounds.json'
COLUMNS = (
    'program', 'launches', 'sorts', 'temp/params', 'bytes/param', 'code, MiB',
    'Mcycles', 'ms', 'compile, CPU s', 'over the worker axis',
)


def row(found):
  tpu = 'cycles' in found
  across = ', '.join(
      f'{kind} {"".join(shapes)}: {received:,} B'
      for kind, _, received, shapes in found['across']
  )
  return (
      programs.key(found),
      str(found['operations' if tpu else 'launches']),
      str(found['sorts']),
      f'{found["temporaries"]:.2f}',
      f'{found["bytes"]:.1f}',
      f'{found["code"] / 2**20:.1f}',
      f'{found["cycles"] / 1e6:.2f}' if tpu else '-',
      f'{found["milliseconds"]:.2f}' if tpu else '-',
      f'{found["compile_seconds"]:.0f}',
      across,
  )


def line_of(found):
  return f'| {" | ".join(row(found))} |'


def lower_bounds(results, line):
  """Puts in what is new, and what is below its bound."""
  recorded = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
  bounds = recorded.setdefault(line, {})
  for found in results:
    before = bounds.get(programs.key(found), {})
    bounds[programs.key(found)] = {
        name: _rounded_up(min(found[name], before.get(name, found[name])))
        for name in programs.COSTS if name in found}
  BOUNDS.write_text(json.dumps(recorded, indent=2) + '\n')


def measure_kernels(targets, folder):
  """Returns cycles per coefficient of each kernel: k = 32, 8 workers."""
  os.environ |= {
      'LIBTPU_INIT_ARGS': f'--xla_jf_dump_static_llo_profile_to={folder}',
      'JAX_PLATFORMS': 'cpu'}
  import jax
  import jax.numpy as jnp
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from demo_optax.compressors import Dct
  from demo_optax.numerics import kernels

  rows, n, k = 1280, 4096, 32
  matrices = (Dct().matrix(64),) * 2
  found = {}
  for target in targets:
    mesh = Mesh(programs.devices(target)[:1], ('x',))
    place = functools.partial(
        jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    bucket, one, all_ = place((rows, n), jnp.float32), (k, rows), (8, k, rows)
    args = {
        'encode': (bucket, bucket, place((1, 3), jnp.float32)),
        'subtract': (bucket, place(one, jnp.int32), place(one, jnp.float32)),
        'decode': (place(all_, jnp.int32), place(all_, jnp.float32),
                   place((1, 1), jnp.float32)),
    }
    forms = {
        'encode': lambda *args: kernels.encode(*args, matrices, k),
        'subtract': kernels.subtract,
        'decode': lambda *args: kernels.decode(*args, matrices, False),
    }
    found[target] = {}
    for name, form in forms.items():
      donated = {'encode': 1, 'subtract': 0}.get(name, ())
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(form, donate_argnums=donated).lower(*args[name]).compile()
      [profile] = folder.glob(f'demo_{name}*')
      text = profile.read_text()
      cycles = int(re.search(r'estimated_cycles: (\d+)', text)[1])
      found[target][name] = round(cycles / (rows * n), 4)
      print(f'{target}: {name} {found[target][name]} cycles per coefficient')
  return found


def _rounded_up(x):
  return x if isinstance(x, int) else round(x + 5e-4, 3)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--tree', choices=programs.TREES, default='small')
  parser.add_argument('--targets', nargs='*', default=programs.TARGETS)
  parser.add_argument('--only', nargs='*', default=())
  parser.add_argument('--bounds', action='store_true')
  parser.add_argument('--kernels', action='store_true')
  options = parser.parse_args()
  if options.kernels:
    with tempfile.TemporaryDirectory() as out:
      found = measure_kernels(['v5e', 'v6e', 'v5p'], pathlib.Path(out))
    recorded = json.loads(RESULTS.read_text()) | {'kernels': found}
    RESULTS.write_text(json.dumps(recorded, indent=1) + '\n')
    sys.exit()
  versions = programs.versions()
  print(', '.join(f'{name} {version}' for name, version in versions.items()))
  print(f'| {" | ".join(COLUMNS)} |\n{"|---" * len(COLUMNS)}|')
  for target in options.targets:
    with tempfile.TemporaryDirectory() as out:
      results = programs.run(target, out, options.tree, options.only)
    print(*map(line_of, results), sep='\n', flush=True)
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for found in results:
      found['versions'] = versions
      recorded.setdefault(options.tree, {})[programs.key(found)] = found
    RESULTS.write_text(json.dumps(recorded, indent=1) + '\n')
    if options.bounds:
      assert options.tree == 'small'
      lower_bounds(results, '.'.join(versions['jax'].split('.')[:2]))
