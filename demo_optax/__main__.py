"""Bytes per step of a model, from the shapes of its parameters.

    python -m demo_optax 300M --topk 8 --values sign --workers 8 64
    python -m demo_optax 300M --exchange all_to_all --workers 1024

A model is a name, or a JSON file of shapes by name, with any nesting:
`{"embedding": [50304, 1024], "layer": {"up": [1024, 8192]}}`; `-` reads it from
standard input. All parameters are float32. Named models are the 300M and 1B of
the DeMo paper (16 layers of d = 1024 or 2048, a vocabulary of 50304).
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from demo_optax import compressors
from demo_optax.codes.values import UPDATE_VALUES, VALUES
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.plan import plan


def _transformer(d: int) -> dict[str, Any]:
  """Matrices of the paper's models: no biases, tied embeddings."""
  layer = {
      'attention_in': [d, 3 * d],
      'attention_out': [d, d],
      'mlp_in': [d, 8 * d],
      'mlp_out': [4 * d, d],
  }
  layers = {str(number): layer for number in range(16)}
  return {'embedding': [50304, d], 'layers': layers}


MODELS = {'300M': _transformer(1024), '1B': _transformer(2048)}


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the `demo_optax.plan` of a model."""
  parser = argparse.ArgumentParser(
      prog='python -m demo_optax',
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('model', help=f'{", ".join(MODELS)}, a JSON file of shapes, or -')
  add('--topk', type=_up_to(2**24), default=32, help='coefficients per chunk')
  add('--chunk', type=_up_to(4096), default=64, help='longest side of a chunk')
  add('--values', choices=VALUES, default='float32', help='code of values')
  add('--workers', type=_up_to(2**24), nargs='+', default=[8], help='how many')
  add('--exchange', choices=get_args(ExchangeKind), default='all_gather',
      help='all_to_all: every worker merges its share of the chunks')
  add('--update-values', choices=UPDATE_VALUES, default='ternary',
      help='code of the updates of all_to_all')
  args = parser.parse_args(argv)
  try:
    params = _arrays(_shapes(args.model))
  except (OSError, ValueError) as error:
    parser.error(str(error))
  compressor = compressors.dct_topk(args.chunk, args.topk, values=args.values)
  plans = [
      plan(params, compressor, n, exchange=args.exchange,
           update_values=args.update_values)
      for n in args.workers
  ]
  print('\n\n'.join([plans[0].table(), *(each.totals() for each in plans)]))


def _up_to(most: int) -> Callable[[str], int]:
  def number(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 20 else 0
    if not 1 <= value <= most:
      raise argparse.ArgumentTypeError(
          f'must be an integer from 1 to {most:,}, got {text[:20]!r}'
      )
    return value

  return number


def _shapes(model: str) -> Any:
  if model in MODELS:
    return MODELS[model]
  if model != '-' and not pathlib.Path(model).exists():
    raise ValueError(
        f'The model must be a file or one of {", ".join(MODELS)}, got'
        f' {model!r}.'
    )
  text = sys.stdin.read() if model == '-' else pathlib.Path(model).read_text()
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f'{model} must be JSON: {error}.') from error


def _arrays(shapes: Any, path: str = '') -> Any:
  """Nested shapes `[rows, ...]` as float32 arrays, with names to print."""
  if isinstance(shapes, dict):
    return {
        repr(name)[1:-1]: _arrays(x, f'{path}/{name}')
        for name, x in shapes.items()
    }
  if not isinstance(shapes, list) or not all(
      type(length) is int and length >= 0 for length in shapes
  ):
    raise ValueError(
        f'{path!r} must be a list of lengths, such as [1024, 4096], or an'
        f' object of them by name, got {json.dumps(shapes)[:100]}.'
    )
  return jax.ShapeDtypeStruct(tuple(shapes), jnp.float32)


if __name__ == '__main__':
  main()
