"""Steps compiled for TPUs and GPUs that are not here: the compilers' figures.

    python benchmarks/ahead.py              # a small tree, all targets
    python benchmarks/ahead.py --bounds     # and lower the bounds of tests
    python benchmarks/ahead.py --tree 42M --targets v5e --only demo_all_gather

In an environment with libtpu and JAX's CUDA plugin (`.ci/run` makes one).
No figure is a time on a device: milliseconds are the compiler's cycles by the
clock, and leave out sorts, gathers, scatters and transfers. On TPUs
`bytes/param` is XLA's count, which is far too high with gathers and scatters.
"""

import argparse
import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / 'tests' / 'ahead'), str(ROOT / 'tests')]

import programs

RESULTS = pathlib.Path(__file__).parent / 'results' / 'ahead.json'
BOUNDS = ROOT / 'tests' / 'ahead' / 'bounds.json'
COLUMNS = (
  'program',
  'launches',
  'sorts',
  'temp/params',
  'bytes/param',
  'code, MiB',
  'Mcycles',
  'ms',
  'compile, CPU s',
  'over the worker axis',
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
      name: min(_rounded_up(found[name]), before.get(name, float('inf')))
      for name in programs.COSTS
      if name in found
    }
  BOUNDS.write_text(json.dumps(recorded, indent=2) + '\n')


def _rounded_up(x):
  return x if isinstance(x, int) else round(x + 5e-4, 3)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--tree', choices=programs.TREES, default='small')
  parser.add_argument('--targets', nargs='*', default=programs.TARGETS)
  parser.add_argument('--only', nargs='*', default=())
  parser.add_argument('--bounds', action='store_true')
  options = parser.parse_args()
  versions = programs.versions()
  print(', '.join(f'{name} {version}' for name, version in versions.items()))
  print(f'| {" | ".join(COLUMNS)} |\n{"|---" * len(COLUMNS)}|')
  for target in options.targets:
    # A model to train is there for the small tree.
    names = options.only or [
      program.name
      for program in programs.PROGRAMS[target]
      if options.tree == 'small' or not program.train
    ]
    with tempfile.TemporaryDirectory() as out:
      results = programs.run(target, out, options.tree, names)
    print(*map(line_of, results), sep='\n', flush=True)
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for found in results:
      found['versions'] = versions
      recorded.setdefault(options.tree, {})[programs.key(found)] = found
    RESULTS.write_text(json.dumps(recorded, indent=1) + '\n')
    if options.bounds:
      assert options.tree == 'small'
      lower_bounds(results, '.'.join(versions['jax'].split('.')[:2]))
