"""Starts a relay, or makes keys: `python -m demo_optax.remote --help`."""

import argparse
import logging
import resource
import signal
import sys

from demo_optax.remote import frames, relay


def write_keys(args: list[str]) -> None:
  """Runs the command line that begins with `keys`."""
  parser = argparse.ArgumentParser(
    'python -m demo_optax.remote keys',
    description='Writes keys for a relay that other hosts can reach.',
  )
  parser.add_argument(
    'folder', help='where to write a file for the relay and one for each worker'
  )
  parser.add_argument('--workers', type=int, required=True)
  for path in frames.write_keys(**vars(parser.parse_args(args))):
    print(path)


def serve(args: list[str]) -> None:
  """Runs a relay until SIGINT or SIGTERM."""
  parser = argparse.ArgumentParser(
    'python -m demo_optax.remote',
    description='A relay: hands all workers of a run the same list of'
    ' messages in every round. "keys FOLDER --workers N" writes keys for a'
    ' relay that other hosts can reach.',
  )
  add = parser.add_argument
  add('--workers', type=int, required=True, help='the most that there can be')
  add('--port', type=int, default=7077, help='to listen on (%(default)s)')
  add('--host', help='address to listen on: 127.0.0.1, or all with --keys')
  add('--keys', help="the relay's file of keys")
  add(
    '--deadline',
    type=float,
    metavar='SECONDS',
    help='from the first message'
    ' of a round to its end; 2, or 5 median rounds, if not given',
  )
  add(
    '--quorum',
    type=int,
    default=1,
    help='workers that a round needs (%(default)s)',
  )
  add(
    '--start',
    type=float,
    default=300,
    metavar='SECONDS',
    help='for all workers to come before the first round (%(default)s)',
  )
  add(
    '--history',
    type=int,
    default=64,
    metavar='ROUNDS',
    help='lists that are kept for workers that are late (%(default)s)',
  )
  add(
    '--max-message',
    type=int,
    default=1 << 28,
    metavar='BYTES',
    help='larger ones are refused (%(default)s)',
  )
  given = vars(parser.parse_args(args))
  logging.basicConfig(
    level=logging.INFO, format='%(asctime)s %(message)s', datefmt='%H:%M:%S'
  )
  stopped: list[int] = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: stopped.append(n))
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  host, port = given.pop('host'), given.pop('port')
  host = host or ('*' if given['keys'] else '127.0.0.1')
  served = relay.Relay(f'tcp://{host}:{port}', **given)
  print(f'relay for {given["workers"]} workers on {served.address}', flush=True)
  if given['keys'] is None:
    print('no keys: this machine alone can reach it', flush=True)
  served.serve(lambda: bool(stopped))


if __name__ == '__main__':
  if sys.argv[1:2] == ['keys']:
    write_keys(sys.argv[2:])
  else:
    serve(sys.argv[1:])
