"""The coordinator of a run: `python -m demo_optax.elastic --workers 4`.

It computes nothing, and holds no part of the model. Start it where it outlives
the workers; it ends when the run does.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from demo_optax.elastic.coordinator import Coordinator


def _at_least(least: float, kind: Callable[[str], float]) -> Callable:
  def convert(text: str) -> float:
    try:
      value = kind(text)
    except ValueError:
      value = float('nan')
    if not least <= value < float('inf'):
      raise argparse.ArgumentTypeError(
          f'{text!r} must be {"an integer" if kind is int else "a number"} of'
          f' at least {least}'
      )
    return value

  return convert


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a coordinator until its run is done; returns the exit status."""
  parser = argparse.ArgumentParser(
      prog='python -m demo_optax.elastic', description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('--host', default='', help='address to listen on; default: all')
  add('--port', type=_at_least(0, int), default=7077, help='0: any free one')
  add('--workers', type=_at_least(1, int), required=True,
      help='processes that the run begins with')
  add('--min-workers', type=_at_least(1, int), default=1,
      help='with fewer the run waits for others to come')
  add('--deadline', type=_at_least(2, float), default=10.0, metavar='SECONDS',
      help='a process that is silent for so long is left behind')
  args = parser.parse_args(argv)
  logging.basicConfig(level=logging.INFO, format='coordinator: %(message)s')
  try:
    coordinator = Coordinator(
        args.workers, host=args.host, port=args.port, deadline=args.deadline,
        min_workers=args.min_workers,
    )
  except (OSError, ValueError) as error:
    parser.error(f'--port {args.port}: {error}')
  print(f'listening on port {coordinator.port}', flush=True)
  try:
    coordinator.serve()
  except KeyboardInterrupt:
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(main())
