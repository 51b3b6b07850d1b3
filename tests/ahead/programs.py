"""Compiles steps for TPUs and GPUs that are not here, and reads the result.

    python tests/ahead/programs.py v5e --out DIR [--tree small] [--only NAME ...]

The compilers come with libtpu and with JAX's CUDA plugin; no device is used.
Run as a process for each target: a target has flags, which XLA reads once.
For each program: DIR/<name>.json, what `reading` finds; DIR/<name>.txt, the
compiled program.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from importlib import metadata

HERE = pathlib.Path(__file__).parent
# By target: XLA's name of the devices, how many slices there are of them, and
# the clock (from published peak FLOP/s, for milliseconds from cycles).
TPUS = {
  'v5e': ('v5e:2x4', 1, 1.5e9),
  'v6e': ('v6e:2x4', 1, 1.75e9),
  'v5p': ('v5p:2x2x1', 1, 1.75e9),
  'v6e 8x16': ('v6e:8x16', 1, 1.75e9),
  'two slices of v5e': ('v5e:2x2', 2, 1.5e9),
}
H100S = {'h100': 8, '64 h100': 64}
TARGETS = (*TPUS, *H100S)


@dataclasses.dataclass(frozen=True)
class Program:
  """A step to compile.

  Attributes:
    recipe: name of the optimizer.
    exchange: as in `scale_by_demo`.
    inside: devices of a worker.
    train: with the model and its gradients, else from gradients on.
    kernels: with kernels of Pallas.
  """

  recipe: str = 'demo'
  exchange: str = 'all_gather'
  inside: int = 1
  train: bool = False
  kernels: bool = False

  @property
  def name(self):
    parts = [self.recipe, self.exchange]
    parts += [f'{self.inside}_devices'] * (self.inside > 1)
    parts += ['train'] * self.train + ['kernels'] * self.kernels
    return '_'.join(parts)


PROGRAMS = {
  'v5e': (Program(), Program('demo_muon', 'all_to_all', 2)),
  'v6e': (Program('demo', 'all_to_all', 2),),
  'v5p': (Program('demo_muon', 'all_gather', 2),),
  'v6e 8x16': (Program(inside=2),),
  'two slices of v5e': (
    Program('demo', 'all_gather', 4, train=True),
    Program('demo_muon', 'all_to_all', 4),
  ),
  'h100': (
    Program(),
    Program(kernels=True),
    Program('demo', 'all_to_all', 2),
    Program('demo_muon', 'all_gather', 2),
    Program('demo_muon', 'all_to_all'),
  ),
  '64 h100': (Program(),),
}


def gpt(layers, width, vocabulary, positions):
  """Shapes of the parameters."""
  layer = {
    'norm1': (width,),
    'norm2': (width,),
    'qkv': (width, 3 * width),
    'proj': (width, width),
    'up': (width, 4 * width),
    'down': (4 * width, width),
  }
  shapes = {'tall': (vocabulary, width), 'positions': (positions, width)}
  for number in range(layers):
    shapes |= {f'{number} {name}': shape for name, shape in layer.items()}
  return shapes


TREES = {
  # 0.8 M parameters in few leaves: a leaf costs a second to compile. Chunks
  # have sides that are multiples of 16, also of two devices: others XLA:GPU
  # 0.10.2 does not compile where it cannot time tiles (autotune_level=0).
  'small': lambda: {
    'tall': (1024, 256),
    'up': (256, 1024),
    'bias': (1024,),
    'down': (1024, 256),
    'norm': (256,),
    'odd': (384, 96),
  },
  '42M': lambda: gpt(8, 512, 32_000, 1024),
}


def environment(target, out):
  """Variables for a process that compiles for a target."""
  found = dict(os.environ)
  for name in ('JAX_COMPILATION_CACHE_DIR', 'LIBTPU_INIT_ARGS'):
    found.pop(name, None)
  found |= {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '',
    'TF_CPP_MIN_LOG_LEVEL': '2',
  }
  if target in H100S:
    found |= {
      'JAX_PLATFORMS': '',
      'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
      'CUDA_VISIBLE_DEVICES': '',
      'XLA_FLAGS': (
        f'--xla_gpu_autotune_level=0 --xla_dump_to={out}/dump'
        ' --xla_dump_hlo_module_re=jit_demo.*'
      ),
    }
  return found


def devices(target):
  import numpy as np
  from jax.experimental import topologies

  if target in H100S:
    return np.array(
      topologies.get_topology_desc(
        '',
        'cuda',
        topology=f'1x{H100S[target]}x1',
        target_config=(HERE / 'h100.txtpb').read_text(),
      ).devices
    )
  name, slices, _ = TPUS[target]
  more = {} if slices == 1 else {'num_slices': slices}
  found = topologies.get_topology_desc(name, 'tpu', **more).devices
  # Slices are workers: theirs is the outermost axis.
  return np.array(
    sorted(found, key=lambda d: (getattr(d, 'slice_index', 0) or 0, d.id))
  )


def mesh_of(target, inside):
  import jax

  found = devices(target)
  return jax.sharding.Mesh(
    found.reshape(-1, inside),
    ('data', 'fsdp'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )


def lower(program, mesh, shapes):
  """Returns the lowered step, and what `plan` says of its exchange."""
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  import demo_optax

  specs = {
    name: P()
    if program.inside == 1 or shape[0] % program.inside or len(shape) == 1
    else P('fsdp')
    for name, shape in shapes.items()
  }
  workers = demo_optax.Workers.on_mesh(mesh, 'data', specs)

  def place(tree, specs, lead=()):
    return jax.tree.map(
      lambda x, spec: jax.ShapeDtypeStruct(
        (*lead, *x.shape),
        x.dtype,
        sharding=NamedSharding(mesh, P(*['data'] * len(lead), *spec)),
      ),
      tree,
      specs,
    )

  plain = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }
  make = getattr(demo_optax, program.recipe)
  tx = make(
    0.001,
    workers=workers,
    exchange=program.exchange,
    compressor=compressor_of(program, plain),
  )
  state = place(
    jax.eval_shape(tx.init, plain), demo_optax.state_specs(tx, plain, workers)
  )
  params = place(plain, specs)

  def from_gradients(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  def from_batch(params, state, x):
    def loss_fn(params):
      hidden = x @ params['tall']
      hidden = jax.nn.relu(hidden @ params['up'] + params['bias'])
      hidden = hidden @ params['down'] + params['norm']
      return jnp.mean(hidden**2) + jnp.mean(params['odd'] ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  if program.train:
    from_batch.__name__ = program.name
    step = demo_optax.data_parallel(workers, batch_argnums=2)(from_batch)
    batch = jax.ShapeDtypeStruct(
      (64, shapes['tall'][0]),
      jnp.float32,
      sharding=NamedSharding(mesh, P(('data', 'fsdp'))),
    )
  else:
    from_gradients.__name__ = program.name
    step = jax.jit(from_gradients, donate_argnums=(0, 1))
    batch = place(plain, specs, (workers.count,))
  return step.lower(params, state, batch), workers, plain


def compressor_of(program, plain):
  import demo_optax

  if program.recipe == 'demo_muon':
    return demo_optax.recipes.muon_compressors(plain)
  return demo_optax.dct_topk(kernels=program.kernels)


def planned(program, workers, plain):
  """Bytes that a device receives over the worker axis, by `plan`."""
  import demo_optax

  values = {'demo': 'ternary', 'demo_muon': 'int4'}[program.recipe]
  owners = program.exchange == 'all_to_all'
  codes = compressor_of(program, plain)
  found = demo_optax.plan(
    plain,
    codes,
    workers,
    exchange=program.exchange,
    update_values=values if owners else None,
  )
  return found.device_bytes['data',]


def read(program, target, compiled, mesh, params, out):
  """Returns what is found in a compiled program."""
  import reading

  text = compiled.as_text()
  (out / f'{program.name}.txt').write_text(text)
  module = reading.Module(text)
  memory = compiled.memory_analysis()
  slices = TPUS[target][1] if target in TPUS else 1
  across, inside = reading.transfers(text, mesh, 'data', slices)
  found = {
    'across': across,
    'inside': inside,
    **reading.operations(module),
    'temporaries': memory.temp_size_in_bytes / (4 * params),
    'code': memory.generated_code_size_in_bytes,
  }
  if target in TPUS:
    found['cycles'] = reading.cycles(module)
    found['milliseconds'] = 1e3 * found['cycles'] / TPUS[target][2]
    added, found['widest_padding'], found['padded'] = reading.padding(module)
    found['padding'] = added / (4 * params)
    found['bytes'] = compiled.cost_analysis()['bytes accessed'] / params
    return found
  pattern = f'dump/*jit_{program.name}.thunk_sequence.txt'
  [thunks] = sorted(out.glob(pattern))[-1:]
  stem = thunks.name.removesuffix('.thunk_sequence.txt')
  ptx = [file.read_text() for file in out.glob(f'dump/{stem}.*ptx')]
  assert ptx
  found['launches'] = reading.launches(thunks.read_text(), module)
  found['bytes'] = reading.moved(module) / params
  found['float_atomics'] = sum(map(reading.float_atomics, ptx))
  found['code'] = sum(map(len, ptx))
  return found


def compile_here(target, tree, out, only):
  sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
  shapes = TREES[tree]()
  params = sum(map(math.prod, shapes.values()))
  for program in PROGRAMS[target]:
    if only and program.name not in only:
      continue
    mesh = mesh_of(target, program.inside)
    start = time.process_time()
    lowered, workers, plain = lower(program, mesh, shapes)
    middle = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - middle
    found = {
      'target': target,
      'tree': tree,
      'program': program.name,
      'parameters': params,
      'workers': workers.count,
      'planned': planned(program, workers, plain),
      'lower_seconds': middle - start,
      'compile_seconds': seconds,
      **read(program, target, compiled, mesh, params, out),
    }
    (out / f'{program.name}.json').write_text(json.dumps(found, indent=2))


def run(target, out, tree='small', only=(), timeout=None):
  """Compiles a target's programs in a process; returns what is found of each."""
  out = pathlib.Path(out)
  shutil.rmtree(out, ignore_errors=True)
  out.mkdir(parents=True)
  done = subprocess.run(
    [
      sys.executable,
      __file__,
      target,
      '--tree',
      tree,
      '--out',
      out,
      *(['--only', *only] if only else []),
    ],
    env=environment(target, out),
    capture_output=True,
    text=True,
    timeout=timeout,
  )
  if done.returncode:
    raise RuntimeError(f'{target}: {done.stderr[-3000:]}')
  return [
    json.loads((out / f'{program.name}.json').read_text())
    for program in PROGRAMS[target]
    if not only or program.name in only
  ]


def key(found):
  """Name of a program of a target."""
  return f'{found["target"]}: {found["program"]}'


# What costs: held below bounds.
COSTS = (
  'sorts',
  'unsorted_scatters',
  'loops',
  'operations',
  'launches',
  'temporaries',
  'code',
  'bytes',
  'cycles',
  'padding',
  'widest_padding',
  'compile_seconds',
)


def versions():
  """Versions of what compiles."""
  names = ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-plugin')
  return {name: metadata.version(name) for name in names}


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('target', choices=TARGETS)
  parser.add_argument('--tree', choices=TREES, default='small')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--only', nargs='*', default=())
  options = parser.parse_args()
  compile_here(options.target, options.tree, options.out, options.only)
