"""Starts a relay, or makes keys: `python -m demo_optax.remote --help`."""

import argparse
import contextlib
import logging
import resource
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import zmq

from demo_optax.remote import frames, relay

_FLAGS = (
  ('--workers', int, None, 'N', 'the most that there can be'),
  ('--port', int, 7077, 'N', 'to listen on'),
  (
    '--host',
    str,
    None,
    'HOST',
    'address to listen on; 127.0.0.1, or all with --keys, if not given',
  ),
  ('--keys', str, None, 'FILE', "the relay's file of keys"),
  (
    '--deadline',
    float,
    None,
    'SECONDS',
    'from the first message of a round to its end; 2, or 5 median rounds, if'
    ' not given',
  ),
  ('--quorum', int, 1, 'N', 'workers that a round needs'),
  (
    '--start',
    float,
    300.0,
    'SECONDS',
    'for all workers to come before the first round',
  ),
  (
    '--history',
    int,
    64,
    'ROUNDS',
    'lists that are kept for workers that are late',
  ),
  ('--max-message', int, 1 << 28, 'BYTES', 'larger ones are refused'),
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


def write_keys(args: list[str]) -> None:
  """Runs the command line that begins with `keys`."""
  parser = _Parser(
    'python -m demo_optax.remote keys',
    description='Writes keys for a relay that other hosts can reach.',
  )
  parser.add_argument(
    'folder', help='where to write a file for the relay and one for each worker'
  )
  parser.add_argument('--workers', type=int, help='how many there are')
  with _explained(parser):
    for path in frames.write_keys(**_parsed(parser, args)):
      print(path)


def serve(args: list[str]) -> None:
  """Runs a relay until SIGINT or SIGTERM."""
  parser = _Parser(
    'python -m demo_optax.remote',
    description='A relay: hands all workers of a run the same list of'
    ' messages in every round. "keys FOLDER --workers N" writes keys for a'
    ' relay that other hosts can reach.',
  )

  for flag, kind, default, unit, words in _FLAGS:
    shown = '' if default is None else '; %(default)s if not given'
    parser.add_argument(
      flag, type=kind, default=default, metavar=unit, help=words + shown
    )
  given = _parsed(parser, args)
  host, port = given.pop('host'), given.pop('port')
  host = host or ('*' if given['keys'] else '127.0.0.1')
  if not 0 <= port < 2**16:
    parser.error(f'port must be from 0 to 65,535, got {port}. Give another.')
  with _explained(parser):
    served = relay.Relay(f'tcp://{host}:{port}', **given)
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
  print(f'relay for {given["workers"]} workers on {served.address}', flush=True)
  if given['keys'] is None:
    print('no keys: this machine alone can reach it', flush=True)
  served.serve(lambda: bool(stopped))


def _parsed(parser: _Parser, args: list[str]) -> dict[str, Any]:
  """Returns the values of all flags; a wrong one is named before a missing."""
  given = vars(parser.parse_args(args))
  if given['workers'] is None:
    parser.error('--workers must be given.')
  return given


@contextlib.contextmanager
def _explained(parser: _Parser) -> Iterator[None]:
  """Ends the program with a line, where an argument does not fit."""
  try:
    yield
  except (ValueError, OSError, zmq.ZMQError) as error:
    parser.error(str(error))


if __name__ == '__main__':
  if sys.argv[1:2] == ['keys']:
    write_keys(sys.argv[2:])
  else:
    serve(sys.argv[1:])
