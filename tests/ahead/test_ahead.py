"""What compilers of TPUs and GPUs make of a step, on a machine without either.

    pytest -m ahead tests/ahead -n 0     # five CPU minutes

In an environment with libtpu and JAX's CUDA plugin (`.ci/run` makes one).
Each target compiles in a process of its own, see `programs`; a program is
compiled once and checked for many things. Costs are held against bounds.json:
`python benchmarks/ahead.py --bounds` lowers those.
"""

import functools
import importlib.util
import json
import pathlib

import jax
import programs
import pytest
import reading

HERE = pathlib.Path(__file__).parent
LINE = '.'.join(jax.__version__.split('.')[:2])
BOUNDS = json.loads((HERE / 'bounds.json').read_text()).get(LINE, {})
# How far above its bound a figure may be: CPU seconds depend on the machine.
SLACK = {
  'compile_seconds': 4.0,
  'temporaries': 1.02,
  'code': 1.05,
  'bytes': 1.02,
  'cycles': 1.05,
  'padding': 1.02,
}
NEEDED = dict.fromkeys(programs.TPUS, 'libtpu') | dict.fromkeys(
  programs.H100S, 'jax_plugins.xla_cuda12'
)


@functools.cache
def compiled(target, folder):
  return {found['program']: found for found in programs.run(target, folder)}


@pytest.fixture(
  params=[
    (target, program)
    for target in programs.TARGETS
    for program in programs.PROGRAMS[target]
  ],
  ids=lambda chosen: f'{chosen[0]} {chosen[1].name}'.replace(' ', '_'),
)
def program(request, tmp_path_factory):
  """A program, and what was found in it."""
  target, chosen = request.param
  try:
    there = importlib.util.find_spec(NEEDED[target])
  except ModuleNotFoundError:
    there = None
  if there is None:
    pytest.skip(f'{NEEDED[target]} is not installed')
  folder = tmp_path_factory.getbasetemp() / target.replace(' ', '_')
  return chosen, compiled(target, folder)[chosen.name]


def test_what_crosses_the_worker_axis_is_what_plan_says(program):
  chosen, found = program
  messages = [x for x in found['across'] if x[1] == reading.WORDS]
  hops = {
    'all_gather': ['all-gather'],
    'all_to_all': ['all-gather', 'all-to-all'],
  }
  # Sorted: a compiler may print a computation after those that follow it.
  assert sorted(kind for kind, *_ in messages) == hops[chosen.exchange]
  assert sum(received for _, _, received, _ in messages) == found['planned']
  # Beside messages no leaf, dense or not: the loss, where the step returns one.
  others = [x for x in found['across'] if x[1] != reading.WORDS]
  assert len(others) == chosen.train
  assert all(received <= 512 for _, _, received, _ in others), others


def test_the_transform_multiplies_in_full_precision(program):
  _, found = program
  assert found['products_of_the_exchange']
  assert not found['not_in_full_precision']


def test_sums_have_one_order(program):
  _, found = program
  assert not found.get('float_atomics', 0)


def test_costs_are_within_recorded_bounds(program):
  _, found = program
  bounds = BOUNDS[programs.key(found)]
  above = {
    name: (found[name], bound)
    for name, bound in bounds.items()
    if found[name] > bound * SLACK.get(name, 1)
  }
  assert not above
  # A bound that is far above what there is holds nothing.
  loose = {
    name: (found[name], bound)
    for name, bound in bounds.items()
    if name != 'compile_seconds' and found[name] < 0.8 * bound
  }
  assert not loose


# --- The readers, by programs written by hand --------------------------------

TEXTS = HERE.parent / 'hlo'
LOOP = (TEXTS / 'loop.txt').read_text()


def test_loops_are_counted_by_their_turns():
  module = reading.Module(LOOP)
  assert module.runs == {'main': 1, 'body': 5}
  assert reading.operations(module)['sorts'] == 5
  assert reading.cycles(module) == 500
  assert (
    reading.launches((TEXTS / 'thunks.txt').read_text(), module)
    == 1 + 5 * 2 + 1
  )


def test_what_tiles_add_is_found():
  # [1, 2] in tiles of [8, 128]: 512 times; 8 x 100 is below 1.3 times.
  assert reading.padding(reading.Module(LOOP)) == (
    64 * 2 * 4 * 511,
    512,
    'f32[64,1,2]{2,1,0:T(8,128)}',
  )


def test_transfers_between_slices_are_found():
  mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'fsdp'))
  across, inside = reading.transfers(LOOP, mesh, 'data', slices=2)
  assert across == [['all-gather', 'u32', 2048, ['u32[1,4,128]']]]
  assert inside == {'all-reduce': 96}


def test_a_kernel_that_reads_a_part_moves_the_part():
  module = reading.Module(LOOP)
  fusion = next(x for x in module.all('fusion') if x.name == 'f')
  assert reading._moved(module, module.bodies['main'], fusion) == 40 + 4 + 40


def test_atomics_are_found():
  assert reading.float_atomics('  atom.global.add.f32 %f1, [%rd1], %f2;') == 1
  assert (
    reading.float_atomics(
      '  red.relaxed.gpu.global.add.noftz.bf16x2 [%rd1], %r2;'
    )
    == 1
  )
  assert reading.float_atomics('  atom.global.add.u32 %r1, [%rd1], %r2;') == 0
