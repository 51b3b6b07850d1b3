"""Starts a relay, or makes keys: `python -m demo_optax.remote --help`."""

import argparse
import logging
import resource
import select
import signal
import sys
from typing import NoReturn

import zmq

from demo_optax.remote import frames, relay
from demo_optax.remote.rounds import Options

_FLAGS = (
  ('--workers', int, 'N', 'the most that there can be'),
  ('--port', int, 'N', 'to listen on; 7077 if not given'),
  ('--keys', str, 'FILE', "the relay's file of keys"),
  (
    '--write-keys',
    str,
    'FOLDER',
    'write keys, for a relay that other hosts can reach, and end',
  ),
  (
    '--deadline',
    float,
    'SECONDS',
    'from the first message of a round to its end; 2, or 5 median rounds, if'
    ' not given',
  ),
  (
    '--start',
    float,
    'SECONDS',
    'for all workers to come before the first round;'
    f' {Options.start:.0f} if not given',
  ),
  (
    '--history',
    int,
    'ROUNDS',
    'lists that are kept for workers that are late;'
    f' {Options.history} if not given',
  ),
  (
    '--max-message',
    int,
    'BYTES',
    f'larger ones are refused; {Options.max_message:,} if not given',
  ),
)


class _Parser(argparse.ArgumentParser):
  """Says in one line what is wrong with a command line."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f'{self.prog}: {message}\n')


class Handler(logging.StreamHandler):  # type: ignore[type-arg]
  """Writes to standard error; a pipe that nobody reads loses lines.

  A relay that waits for a reader of its log would stop all workers.
  """

  def emit(self, record: logging.LogRecord) -> None:
    """Writes a line, if it need not wait."""
    _, can_write, _ = select.select([], [self.stream], [], 0)
    if can_write:
      super().emit(record)


def main(args: list[str]) -> None:
  """Runs a relay until SIGINT or SIGTERM, or writes keys."""
  parser = _Parser(
    'python -m demo_optax.remote',
    description='A relay: hands all workers of a run the same list of'
    ' messages in every round.',
    argument_default=argparse.SUPPRESS,
  )
  for flag, kind, unit, words in _FLAGS:
    parser.add_argument(flag, type=kind, metavar=unit, help=words)
  given = vars(parser.parse_args(args))
  if 'workers' not in given:  # a wrong flag is named before a missing one
    parser.error('--workers must be given.')
  port, keys = given.pop('port', 7077), given.pop('keys', None)
  if not 0 <= port < 2**16:
    parser.error(f'port must be from 0 to 65,535, got {port}. Give another.')
  host = '*' if keys else '127.0.0.1'
  folder = given.pop('write_keys', None)
  try:
    options = Options(**given)
    if folder is not None:
      print(*frames.write_keys(folder, options.workers), sep='\n')
      return
    served = relay.Relay(f'tcp://{host}:{port}', options, keys)
  except zmq.ZMQError as error:
    parser.error(f'{error}. Give another --port.')
  except ValueError as error:
    parser.error(str(error))
  except OSError as error:
    parser.error(f'{error}. Give another --write-keys.')
  logging.basicConfig(
    level=logging.INFO,
    format='%(asctime)s %(message)s',
    datefmt='%H:%M:%S',
    handlers=[Handler()],
  )
  stopped: list[int] = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: stopped.append(n))
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  print(f'relay for {options.workers} workers on {served.address}', flush=True)
  served.serve(lambda: bool(stopped))


if __name__ == '__main__':
  main(sys.argv[1:])
