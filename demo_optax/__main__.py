"""Bytes per step of a model, and seconds over a link.

    python -m demo_optax 300M --topk 8 --values sign --workers 8 64
    python -m demo_optax 300M --optimizer demo_muon
    python -m demo_optax 300M --link 100Mbit/s --latency 20ms --step 0.4s
    python -m demo_optax package.module:function --workers 8

A model is a name (the 300M and 1B of the DeMo paper), a JSON file of float32
shapes, `{"embedding": [50304, 1024], "layer": {"up": [1024, 8192]}}`, or a
function or class without required arguments that returns a Flax NNX module, or
a pytree of arrays or of `jax.ShapeDtypeStruct`. It is traced, not run.

Seconds are modelled: a worker sends and receives at the full rate of its link,
and waits for the latency in each turn of a ring (N - 1 turns of an all-gather,
2 (N - 1) of an all-reduce). The compute of the exchange is not counted.
"""

import argparse
import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp

from demo_optax import compressors
from demo_optax._plan import Plan, plan
from demo_optax.codes.value_codes import UPDATE_VALUES, VALUES
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.recipes import describe_matrices, muon_compressors

_PREFIXES = {'u': 1e-6, 'm': 1e-3, '': 1.0, 'k': 1e3, 'M': 1e6, 'G': 1e9}

# The paper's models: no biases, tied embeddings.
MODELS: dict[str, Any] = {
  name: {
    'embedding': [50304, d],
    'layers': {
      str(number): {
        'attention_in': [d, 3 * d],
        'attention_out': [d, d],
        'mlp_in': [d, 8 * d],
        'mlp_out': [4 * d, d],
      }
      for number in range(16)
    },
  }
  for name, d in (('300M', 1024), ('1B', 2048))
}


def main(argv: list[str] | None = None) -> None:
  """Prints the `demo_optax.plan` of a model, and seconds over a link."""
  parser = _parser()
  args = parser.parse_args(argv)
  try:
    params = _params(args.model)
    plans = _plans(params, args)
  except Exception as error:  # also what the user's function raises
    words = ' '.join(str(error).split()) or type(error).__name__
    parser.error(f'argument model: {words}')
  if args.matrices:
    print(f'{describe_matrices(params)}\n')
  print(plans[0].table())
  for each in plans:
    print(f'\n{each.totals()}')
  if args.link:
    for each in plans:
      print(f'\n{_over_link(each, args.link, args.latency, args.step)}')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m demo_optax',
    description=__doc__,
    usage=argparse.SUPPRESS,  # an error is one line
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('model', help=f'{", ".join(MODELS)}, a JSON file, or module:function')
  add(
    '--optimizer',
    choices=['demo', 'demo_muon'],
    default='demo',
    help='demo_muon: its default compressors, not the next three; default:'
    ' demo',
  )
  add(
    '--matrices',
    action='store_true',
    help='print which parameters demo_muon takes for matrices, and why not',
  )
  add(
    '--topk',
    type=_integer(2**24),
    default=32,
    help='coefficients per chunk; default: 32',
  )
  add('--chunk', type=_integer(4096), default=64, help='its sides; default: 64')
  add('--values', choices=VALUES, default='float32', help='code of values')
  add(
    '--workers',
    type=_integer(2**24),
    nargs='+',
    default=[8],
    help='numbers of workers; default: 8',
  )
  add(
    '--exchange',
    choices=get_args(ExchangeKind),
    default='all_gather',
    help='all_to_all: every worker merges its share of the chunks',
  )
  add(
    '--update-values',
    choices=UPDATE_VALUES,
    help='code of the updates of all_to_all; default: that of the optimizer',
  )
  add(
    '--link',
    type=_amount('bit/s', '100Mbit/s'),
    metavar='RATE',
    help='of a worker, such as 100Mbit/s: prints seconds',
  )
  add(
    '--latency',
    type=_amount('s', '20ms'),
    default=0.0,
    metavar='TIME',
    help='of the link, one way, such as 20ms',
  )
  add(
    '--step',
    type=_amount('s', '0.4s'),
    default=0.0,
    metavar='TIME',
    help='of a step without communication, such as 0.4s',
  )
  return parser


def _integer(most: int) -> Callable[[str], int]:
  """Returns a function that reads an integer from 1 to `most`."""

  def read(text: str) -> int:
    if re.fullmatch(r'\d{1,9}', text) and 1 <= int(text) <= most:
      return int(text)
    raise argparse.ArgumentTypeError(
      f'must be an integer from 1 to {most:,}, got {text[:20]!r}'
    )

  return read


def _amount(unit: str, example: str) -> Callable[[str], float]:
  """Returns a function that reads an amount in a unit, as `example`."""

  def read(text: str) -> float:
    found = re.fullmatch(rf'(\d+(?:\.\d+)?)([umkMG]?){unit}', text)
    if found:
      value = float(found[1]) * _PREFIXES[found[2]]
      if 0 < value < 1e30:
        return value
    raise argparse.ArgumentTypeError(
      f'must be a number above 0 in a unit, such as {example}, got'
      f' {text[:20]!r}'
    )

  return read


def _plans(params: chex.ArrayTree, args: argparse.Namespace) -> list[Plan]:
  """Returns the plan for each number of workers."""
  compressor = compressors.dct_topk(args.chunk, args.topk, values=args.values)
  update_values = 'ternary'
  if args.optimizer == 'demo_muon':
    compressor, update_values = muon_compressors(params), 'int4'
  plans = []
  for workers in args.workers:
    plans.append(
      plan(
        params,
        compressor,
        workers,
        exchange=args.exchange,
        update_values=args.update_values or update_values,
      )
    )
  return plans


def _over_link(plan: Plan, rate: float, latency: float, step: float) -> str:
  """Returns seconds of communication and of a step, and what to do."""
  ring = plan.num_workers - 1  # turns of an all-gather
  turns = ring + (plan.update_bytes > 0)  # messages to owners go together
  ours = 8 * plan.received_bytes / rate + turns * latency
  narrow = 8 * plan.dense_bytes(2) / rate + 2 * ring * latency
  wide = 8 * plan.dense_bytes(4) / rate + 2 * ring * latency
  lines = [f'{plan.num_workers} workers, seconds per step (modelled):']
  for name, seconds in (
    ('this exchange', ours),
    ('all-reduce bfloat16', narrow),
    ('all-reduce float32', wide),
  ):
    lines.append(
      f'  {name:<20} {seconds:>9.3g} of communication, {step + seconds:>9.3g}'
      ' in all'
    )
  saved, whole = narrow - ours, step + narrow
  if saved >= 0.1 * whole:
    lines.append(
      f'The exchange saves {saved:.3g} s of the {whole:.3g} s of a'
      f' step with an all-reduce in bfloat16 ({saved / whole:.0%}).'
    )
  elif narrow < 0.1 * whole:
    lines.append('The link does not limit this step: all-reduce in bfloat16.')
  else:
    lines.append(
      'The exchange saves less than a tenth of this step: lower'
      ' --topk, or all-reduce in bfloat16.'
    )
  return '\n'.join(lines)


def _params(model: str) -> chex.ArrayTree:
  """Returns the shapes of the parameters of a model."""
  module, colon, name = model.partition(':')
  if model in MODELS:
    return _arrays(MODELS[model])
  if pathlib.Path(model).exists():
    try:
      return _arrays(json.loads(pathlib.Path(model).read_text()))
    except json.JSONDecodeError as error:
      raise ValueError(
        f'{model} must be JSON, got {error}. Write float32 shapes, such as'
        ' {"embedding": [50304, 1024]}.'
      ) from error
  if not colon:
    raise ValueError(
      f'must be a file, module:function or one of {", ".join(MODELS)}, got'
      f' {model!r}. Give a file or function that exists.'
    )
  make = getattr(importlib.import_module(module), name)

  def zeros() -> Any:
    made, nnx = make(), sys.modules.get('flax.nnx')
    if nnx and isinstance(made, nnx.Module):
      made = nnx.state(made, nnx.Param)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)

  return jax.eval_shape(zeros)


def _arrays(shapes: object, path: str = '') -> chex.ArrayTree:
  """Returns nested shapes `[rows, ...]` as float32 arrays."""
  if isinstance(shapes, dict):
    return {name: _arrays(x, f'{path}/{name}') for name, x in shapes.items()}
  if isinstance(shapes, list) and all(
    type(length) is int and length >= 0 for length in shapes
  ):
    return jax.ShapeDtypeStruct(tuple(shapes), jnp.float32)
  raise ValueError(
    f'{path!r} must be a list of lengths, or an object of them by name, got'
    f' {json.dumps(shapes)[:100]}. Write lengths such as [1024, 4096].'
  )


if __name__ == '__main__':
  main()
