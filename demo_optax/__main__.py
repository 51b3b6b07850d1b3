"""Bytes per step of a model, from the shapes of its parameters.

    python -m demo_optax 300M --topk 8 --values sign --workers 8 64
    python -m demo_optax shapes.json --recommend --workers 16
    python -m demo_optax 300M --recommend --bits-per-second 1e9 --seconds 0.4

A model is a name, or a JSON file of shapes by name, nested as you like:
`{"embedding": [50304, 1024], "layer": {"up": [1024, 8192]}}`; `-` reads it from
standard input. All parameters are float32. Named models: the 300M and 1B of the
DeMo paper (16 layers of d = 1024 or 2048, a vocabulary of 50304).
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from demo_optax import compressors
from demo_optax.codes.values import UPDATE_VALUES, VALUES
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.tools import budget
from demo_optax.tools import traffic as accounting


def _transformer(layers: int, d: int, vocabulary: int) -> dict[str, Any]:
  """Matrices of the paper's models: no biases, tied embeddings."""
  layer = {
      'attention_in': [d, 3 * d],
      'attention_out': [d, d],
      'mlp_in': [d, 8 * d],
      'mlp_out': [4 * d, d],
  }
  return {
      'embedding': [vocabulary, d],
      'layers': {str(number): layer for number in range(layers)},
  }


# Flags of --recommend: arguments of `demo_optax.recommend`.
_BUDGET = ['sent_bytes', 'received_bytes', 'bits_per_second', 'seconds']

_MAX_SIZE = 2**53  # elements of a leaf
_MAX_SIDE = 2**20  # of a chunk: lengths are tried one by one
_MAX_DEPTH = 100  # of objects within objects

MODELS = {
    '300M': _transformer(16, 1024, 50304),
    '1B': _transformer(16, 2048, 50304),
}


def main(argv: Sequence[str] | None = None) -> None:
  """Prints what `demo_optax.plan` says of a model."""
  parser = argparse.ArgumentParser(
      prog='python -m demo_optax',
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('model', help=f'{", ".join(MODELS)}, a JSON file of shapes, or -')
  add('--topk', type=_count, help='coefficients per chunk; default: 32')
  add('--chunk', type=_side, help='longest side of a chunk; default: 64')
  add('--values', choices=VALUES,
      help='how values are sent; default: float32')
  add('--workers', type=_count, nargs='+', default=[8], help='how many')
  add('--exchange', choices=get_args(ExchangeKind), default='all_gather',
      help='all_to_all: every worker merges its share of the chunks')
  add('--update-values', choices=UPDATE_VALUES,
      help='how the updates of all_to_all are sent. Default: ternary, signs and'
      ' zeros; with --recommend int4')
  add('--recommend', action='store_true',
      help='what demo_muon may send, with the loss of the training example')
  add('--sent-bytes', type=float, help='the most that may be sent in a step')
  add('--received-bytes', type=float, help='the most that may be received')
  add('--bits-per-second', type=float,
      help="speed of a worker's link, each way")
  add('--seconds', type=float, help='the most that an exchange may take')
  args = parser.parse_args(argv)
  given = {k: v for k, v in vars(args).items() if v is not None}
  unread = (
      ['topk', 'chunk', 'values'] if args.recommend
      else _BUDGET
  )
  if args.recommend and args.update_values and args.exchange == 'all_gather':
    parser.error('--update-values is of all_to_all: give --exchange, too.')
  for name in unread:
    if name in given:
      flag = f'--{name.replace("_", "-")} {given[name]}'
      parser.error(
          f'{flag} has no effect {"with" if args.recommend else "without"}'
          ' --recommend: leave it out.'
      )
  try:
    params = _arrays(_shapes(args.model), ())
    if not jax.tree.leaves(params):
      parser.error(f'{args.model} has no parameters.')
    if args.recommend:
      _print_settings(params, args)
      return
    compressor = compressors.dct_topk(
        args.chunk or 64, args.topk or 32, values=args.values or 'float32'
    )
    update_values = args.update_values or 'ternary'
    plans = [
        accounting.plan(
            params, compressor, n, exchange=args.exchange,
            update_values=update_values,
        )
        for n in args.workers
    ]
  except (OSError, ValueError) as error:
    parser.error(str(error))
  print(plans[0].table())
  for plan in plans:
    print(f'\n{plan.totals()}')
  fewest = accounting.owners_pay_from(params, compressor, update_values)
  if fewest is not None:
    print(
        f"\nWith exchange='all_to_all', update_values={update_values!r} a"
        ' worker receives less than with an all-gather from'
        f' {fewest} workers on, and hardly more with more of them, as long as'
        ' there are more chunks than workers.'
    )


def _print_settings(params: Any, args: argparse.Namespace) -> None:
  """Prints what `demo_muon` may send within the budget."""
  asked = {name: getattr(args, name) for name in _BUDGET}
  given = any(value is not None for value in asked.values())
  limits = budget.limits_of(**asked) if given else {}
  values = args.update_values or 'int4'
  found = [
      budget.table(params, n, limits, args.exchange, values)
      for n in args.workers
  ]
  for n, table in zip(args.workers, found):
    if n == 1:
      print('demo_muon, 1 worker: nothing is sent.\n')
      continue
    print(
        f'demo_muon, {n} workers; per worker and step, times less than by'
        f' averaging in float32\n{table}\n'
    )


def _shapes(model: str) -> Any:
  if model in MODELS:
    return MODELS[model]
  path = pathlib.Path(model)
  if model != '-' and not path.exists():
    raise ValueError(
        f'{model!r} is neither a file nor one of {", ".join(MODELS)}.'
    )
  try:
    text = sys.stdin.read() if model == '-' else path.read_text()
    return json.loads(text, object_pairs_hook=_object)
  except json.JSONDecodeError as error:
    raise ValueError(f'{model} is not JSON: {error}') from error
  except ValueError as error:  # not text, numbers of thousands of digits, ...
    raise ValueError(f'{model} cannot be read: {error}') from error
  except RecursionError as error:
    raise ValueError(f'{model} is nested too deeply.') from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f'one object has two entries named {name!r}')
    name.encode()  # half a surrogate pair cannot be printed
    found[name] = value
  return found


def _side(text: str) -> int:
  """Reads the length of a side of a chunk."""
  number = _count(text)
  if number > _MAX_SIDE:
    raise argparse.ArgumentTypeError(f'{number} is above {_MAX_SIDE:,}')
  return number


def _count(text: str) -> int:
  """Reads a number of things."""
  try:
    number = int(text)
  except ValueError:
    number = 0
  if not 1 <= number < 2**31:
    raise argparse.ArgumentTypeError(
        f'{_start_of(text)!r} must be an integer, at least 1 and below 2^31'
    )
  return number


def _arrays(shapes: Any, path: tuple[str, ...]) -> Any:
  """Shapes `[rows, ...]` in nested dicts, as float32 arrays of those shapes."""
  name = _start_of(''.join(f'/{key}' for key in path)) or 'the model'
  if len(path) > _MAX_DEPTH:
    raise ValueError(f'{name} lies deeper than {_MAX_DEPTH} objects.')
  if isinstance(shapes, dict):
    return {key: _arrays(x, (*path, key)) for key, x in shapes.items()}
  lengths: list[Any] = shapes if isinstance(shapes, list) else [None]
  if not all(type(length) is int and length >= 0 for length in lengths):
    raise ValueError(
        f'{name}: {_start_of(repr(shapes))} is not a shape; write a list of'
        ' lengths such as [1024, 4096], or an object of them by name.'
    )
  # One after the other: a product of all could be millions of digits long.
  size = 1
  for length in lengths:
    size *= max(length, 1)
    if size > _MAX_SIZE:
      raise ValueError(
          f'{name}: {_start_of(repr(shapes))} has more than 2^53 elements.'
      )
  return jax.ShapeDtypeStruct(tuple(lengths), jnp.float32)


def _start_of(text: str) -> str:
  return text if len(text) <= 100 else f'{text[:100]}...'


if __name__ == '__main__':
  try:
    main()
    sys.stdout.flush()
  except BrokenPipeError:  # of `| head`; no second one when Python ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
