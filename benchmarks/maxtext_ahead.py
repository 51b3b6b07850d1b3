"""MaxText's training step, compiled for two TPU slices that are not here.

    python benchmarks/maxtext_ahead.py --out FILE

A model of 1.0 B parameters on two slices of 8 chips of v6e, sharded by FSDP
inside a slice: with MaxText's own data parallelism between the slices, with its
DiLoCo (transfers are those of a step that exchanges), with `demo`, and with
`demo_muon`, by the functions of MaxText's `train_compile`. Needs MaxText
(docs/maxtext.md) and the libtpu of its JAX. No figure is a time.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

os.environ.update(JAX_PLATFORMS='cpu', DECOUPLE_GCLOUD='TRUE')
ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [
  str(ROOT / name) for name in ('examples/maxtext', 'tests', 'tests/ahead')
]
METHODS = {
  'own': {'dcn_data_parallelism': 2},
  'diloco': {'dcn_diloco_parallelism': 2, 'enable_diloco': True},
  'demo': {'dcn_diloco_parallelism': 2, 'demo_optimizer': 'demo'},
  'demo_muon': {'dcn_diloco_parallelism': 2, 'demo_optimizer': 'demo_muon'},
}
SETTINGS = {
  'compile_topology': 'v6e-8',
  'compile_topology_num_slices': 2,
  'ici_fsdp_parallelism': 8,
  'hardware': 'tpu',
  'run_name': 'ahead',
  'skip_jax_distributed_system': True,
  'enable_checkpointing': False,
  'enable_goodput_recording': False,
  'monitor_goodput': False,
  'dataset_type': 'synthetic',
  'log_config': False,
  'use_iota_embed': True,
  'attention': 'dot_product',
  'per_device_batch_size': 1,
  'base_emb_dim': 2048,
  'base_mlp_dim': 5632,
  'base_num_decoder_layers': 16,
  'base_num_query_heads': 16,
  'base_num_kv_heads': 16,
  'head_dim': 128,
  'vocab_size': 32768,
  'max_target_length': 2048,
}


def compile_step(method: str) -> dict[str, Any]:
  """Returns what is in the compiled step."""
  import jax
  import maxtext
  import reading
  import train as example  # examples/maxtext/train.py
  from flax.linen import logical_axis_rules
  from maxtext.configs import pyconfig
  from maxtext.trainers.diloco import diloco
  from maxtext.trainers.pre_train import train, train_compile
  from maxtext.utils import maxtext_utils, sharding, train_utils

  base = pathlib.Path(maxtext.__path__[0]) / 'configs' / 'base.yml'
  settings = SETTINGS | METHODS[method]
  exchange, argv = example.split_arguments(
    ['', str(base), *(f'{name}={value}' for name, value in settings.items())]
  )
  with contextlib.ExitStack() as stack:
    if method not in ('own', 'diloco'):
      stack.enter_context(example.installed(exchange))
    jax.config.update('jax_default_prng_impl', 'unsafe_rbg')
    config = pyconfig.initialize(argv)
    mesh = train_compile.get_topology_mesh(config)
    args, kwargs, state, _, model = train_compile.get_shaped_inputs(
      mesh, config
    )
    params, state = sharding.maybe_update_params_sharding_with_opt(
      config, state
    )
    data = sharding.get_input_data_sharding(config, mesh)
    stack.enter_context(jax.set_mesh(mesh))
    stack.enter_context(logical_axis_rules(config.logical_axis_rules))
    if method == 'own':
      step, ins, outs, static, donated = (
        maxtext_utils.get_functional_train_with_signature(
          train.train_step, data, state, model, config, params
        )
      )
      step = jax.jit(
        step,
        in_shardings=ins,
        out_shardings=outs,
        static_argnums=static,
        donate_argnums=donated,
      )
    elif method == 'diloco':
      local, state, inner = diloco.build_abstract_diloco_state(
        config, args[0], state, mesh
      )
      args = (local, args[1], None)
      stack.enter_context(mesh)  # drjax maps over it
      step = jax.jit(
        diloco.build_diloco_train_step(
          config,
          functools.partial(train.train_step, model, config, inner, params),
        ),
        in_shardings=(state, data, None),
        out_shardings=(state, None),
        donate_argnums=0,
      )
    else:
      step = train_utils.jit_train_step(
        config, model, None, state, data, train.train_step, params
      )
    start = time.process_time()
    compiled = step.lower(*args, **kwargs).compile()
  axis = 'data' if method == 'own' else 'diloco'
  across, inside = reading.transfers(compiled.as_text(), mesh, axis, 2)
  dcn = collections.Counter()
  for kind, _, received, _ in across:
    dcn[kind] += received
  memory = compiled.memory_analysis()
  return {
    'dcn': dict(dcn),
    'inside': inside,
    'arguments': memory.argument_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'compile_seconds': round(time.process_time() - start),
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--one', choices=METHODS, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.one:
    print(json.dumps(compile_step(options.one)))
    return
  names = ('maxtext', 'jax', 'libtpu')
  found: dict[str, Any] = {
    'versions': {name: metadata.version(name) for name in names}
  }
  print('| between slices | over DCN, MB | arguments, GB | temporaries, GB |')
  print('|---|---|---|---|')
  for method in METHODS:
    done = subprocess.run(
      [sys.executable, __file__, '--one', method],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      check=True,
    )
    found[method] = x = json.loads(done.stdout.splitlines()[-1])
    crossing = ', '.join(f'{k} {v / 1e6:.3f}' for k, v in x['dcn'].items())
    print(
      f'| {method} | {crossing} | {x["arguments"] / 1e9:.2f} |'
      f' {x["temporaries"] / 1e9:.2f} |',
      flush=True,
    )
  if options.out:
    options.out.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
