"""Bytes per step of a model, and seconds over a link.

    python -m demo_optax 300M --topk 8 --values sign --workers 8 64
    python -m demo_optax 300M --optimizer demo_muon
    python -m demo_optax 300M --link-mbits 100 --latency-ms 20 --step-ms 400
    python -m demo_optax package.module:function --workers 8

A model is a name (the 300M and 1B of the DeMo paper), or a function or class
without required arguments that returns a Flax NNX module, or a pytree of arrays
or of `jax.ShapeDtypeStruct`. It is traced, not run.

Seconds are modelled: a worker sends and receives at the full rate of its link,
and waits for the latency in each turn of a ring (N - 1 turns of an all-gather,
2 (N - 1) of an all-reduce). The compute of the exchange is not counted.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp

from demo_optax import _checks, compressors
from demo_optax._plan import Plan, plan
from demo_optax.codes.value_codes import VALUES
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.recipes import muon_compressors

# The paper's models by name, and their width.
_WIDTHS = {'300M': 1024, '1B': 2048}


def paper_model(name: str) -> chex.ArrayTree:
  """Returns a model's shapes: no biases, tied embeddings."""
  width = _WIDTHS[name]

  def matrix(rows: int, columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, columns), jnp.float32)

  # Matrices are `[inputs, outputs]`.
  layer = {
    'attention_in': matrix(width, 3 * width),
    'attention_out': matrix(width, width),
    'mlp_in': matrix(width, 8 * width),
    'mlp_out': matrix(4 * width, width),
  }
  layers = dict.fromkeys(map(str, range(16)), layer)
  return {'embedding': matrix(50304, width), 'layers': layers}


def main(argv: list[str] | None = None) -> None:
  """Prints a model's `demo_optax.plan`, and seconds over a link."""
  parser = _parser()
  args = parser.parse_args(argv)
  try:
    text = _described(_params(args.model), args)
  except Exception as error:  # also what the user's function raises
    words = ' '.join(str(error).split()) or type(error).__name__
    parser.error(words)
  print(text)


def _described(params: chex.ArrayTree, args: argparse.Namespace) -> str:
  """Returns a table, and bytes and seconds for each number of workers."""
  # The optimizers differ in compressors, and in the code for updates.
  compressor = compressors.dct_topk(args.chunk, args.topk, values=args.values)
  update_values = 'ternary'
  if args.optimizer == 'demo_muon':
    compressor, update_values = muon_compressors(params), 'int4'
  parts: list[str] = []
  for workers in args.workers:
    planned = plan(
      params,
      compressor,
      workers,
      exchange=args.exchange,
      update_values=update_values,
    )
    if not parts:
      parts.append(planned.table())
    parts.append(planned.totals())
    if args.link_mbits is not None:
      parts.append(_over_link(planned, args))
  return '\n\n'.join(parts)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m demo_optax',
    description=__doc__,
    usage=argparse.SUPPRESS,  # an error is one line
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  names = ', '.join(_WIDTHS)
  parser.add_argument('model', help=f'{names}, or module:function')
  _add_exchange(parser.add_argument)
  _add_link(parser.add_argument)
  return parser


def _add_exchange(add: Callable[..., Any]) -> None:
  """Adds what decides about bytes."""
  add(
    '--optimizer',
    choices=['demo', 'demo_muon'],
    default='demo',
    help='demo_muon: its default compressors, not the next three; default:'
    ' demo',
  )
  add(
    '--topk',
    type=int,
    default=32,
    help='coefficients per chunk; default: 32',
  )
  add('--chunk', type=int, default=64, help='its sides; default: 64')
  add(
    '--values',
    choices=VALUES,
    default='float32',
    help='code of values',
  )
  add(
    '--workers',
    type=int,
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


def _add_link(add: Callable[..., Any]) -> None:
  """Adds what decides about seconds."""
  for name, default, meaning in (
    ('--link-mbits', None, 'of a worker, in Mbit/s: prints seconds'),
    ('--latency-ms', 0.0, 'of the link, one way, in milliseconds'),
    ('--step-ms', 0.0, 'of a step without communication, in milliseconds'),
  ):
    add(name, type=float, metavar='NUMBER', default=default, help=meaning)


def _over_link(plan: Plan, args: argparse.Namespace) -> str:
  """Returns seconds for communication and for a step, and what to do."""
  _checks.check_range('link_mbits', args.link_mbits, '(0, inf)')
  bytes_per_second = args.link_mbits * 1e6 / 8
  latency, compute = args.latency_ms / 1e3, args.step_ms / 1e3
  lines = [f'{plan.num_workers} workers, seconds per step (modelled):']
  seconds = []
  for name, _, received, turns in plan.exchanges():
    on_link = received / bytes_per_second + turns * latency
    seconds.append(on_link)
    lines.append(
      f'  {name:<20} {on_link:>9.3g} of communication,'
      f' {compute + on_link:>9.3g} in all'
    )
  exchange, _, all_reduce = seconds
  saved, whole_step = all_reduce - exchange, compute + all_reduce
  # A tenth of the step is what makes a change worth its trouble.
  if saved >= 0.1 * whole_step:
    lines.append(
      f'The exchange saves {saved:.3g} s of the {whole_step:.3g} s of a'
      f' step with an all-reduce in bfloat16 ({saved / whole_step:.0%}).'
    )
  elif all_reduce < 0.1 * whole_step:
    lines.append('The link does not limit this step: all-reduce in bfloat16.')
  else:
    lines.append(
      'The exchange saves less than a tenth of this step: lower'
      ' --topk, or all-reduce in bfloat16.'
    )
  return '\n'.join(lines)


def _params(model: str) -> chex.ArrayTree:
  """Returns the shapes of a model's parameters."""
  if model in _WIDTHS:
    return paper_model(model)
  module, _, name = model.partition(':')
  try:
    make = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError) as error:
    raise ValueError(
      f'model must be {", ".join(_WIDTHS)} or module:function, got {model!r}'
      f' ({error}). Give a function that exists, and start in the folder that'
      ' has its module.'
    ) from error

  def zeros() -> chex.ArrayTree:
    params, nnx = make(), sys.modules.get('flax.nnx')
    if nnx and isinstance(params, nnx.Module):
      params = nnx.state(params, nnx.Param)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)

  return jax.eval_shape(zeros)


if __name__ == '__main__':
  main()
