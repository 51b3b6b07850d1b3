r"""Starts N processes of a training script on this machine, as N hosts would.

    python examples/launch_local.py -n 4 -- python examples/train_lm.py
    python examples/launch_local.py -n 4 --relay -- python examples/train_lm.py

Each process gets separate CPU devices and the environment variables
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
`cluster.py` reads. They communicate over the loopback interface (gloo). Each
line of output has the number of its process in front. If one process fails,
the launcher stops the others and exits with its status. It also stops them when
its output pipe closes (`| head`), and leaves no process behind. Ctrl-C lets
them save a last checkpoint. A second Ctrl-C kills them.

With --relay each process is a separate worker, which gets DEMO_RELAY and
DEMO_RANK. If one fails, the others continue.
"""

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import flags

_PR_SET_PDEATHSIG = 1
_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_BROKEN_PIPE = 128 + signal.SIGPIPE


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
  parser = flags.make_parser(__doc__)
  add = parser.add_argument
  add(
    '-n',
    '--processes',
    type=flags.whole(1),
    default=2,
    help='number of processes; default: 2',
  )
  add(
    '--devices',
    type=flags.whole(1),
    default=1,
    help='CPU devices per process; default: 1',
  )
  add(
    '--relay',
    action='store_true',
    help='start a relay, and one worker per process',
  )
  add(
    '--grace',
    type=flags.positive,
    default=30.0,
    metavar='SECONDS',
    help='time for a last checkpoint before a process is killed',
  )
  add('command', nargs=argparse.REMAINDER, help='-- and the command to run')
  args = parser.parse_args(argv)
  if args.command[:1] == ['--']:
    args.command.pop(0)
  if not args.command:
    parser.error('Give a command after --: -- python examples/train_lm.py')
  if shutil.which(args.command[0]) is None:
    parser.error(
      f'{args.command[0]!r} is not a program. Give a program and its'
      ' arguments: -- python examples/train_lm.py'
    )
  return args


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the processes; returns the status of the first failure, or 0."""
  args = parse_args(argv)
  # An exception in the launcher also ends its processes. SIGINT needs a handler
  # because shells ignore it in the background.
  for name in _ENDING:
    signal.signal(name, lambda number, _: sys.exit(128 + number))
  code = run(args)
  if _is_unheard():  # Python must not write the rest of its output
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return code


def run(args: argparse.Namespace) -> int:
  """Runs the processes; when it returns none of them is left."""
  processes: list[subprocess.Popen] = []
  readers: list[threading.Thread] = []
  address = f'127.0.0.1:{free_port()}'
  relays = (
    [
      subprocess.Popen(
        [
          sys.executable,
          '-m',
          'demo_optax.remote',
          '--workers',
          str(args.processes),
          '--port',
          address.split(':')[1],
        ],
        start_new_session=True,
        preexec_fn=_die_with_me,
      )
    ]
    if args.relay
    else []
  )
  try:
    for number in range(args.processes):
      processes.append(start(args, address, number))
      readers.append(relay(processes[-1], number))
    return wait(processes, args.relay)
  except OSError as error:
    report(f'{args.command[0]}: {error.strerror}')
    return 127
  finally:
    # Not to be interrupted; Ctrl-C once more leaves them no time.
    hurry = threading.Event()
    ending = {name: signal.signal(name, signal.SIG_IGN) for name in _ENDING}
    signal.signal(signal.SIGINT, lambda *_: hurry.set())
    end([*processes, *relays], args.grace, hurry)
    for reader in readers:
      reader.join(timeout=min(args.grace, 5))
    for name, handler in ending.items():
      signal.signal(name, handler)


def free_port() -> int:
  """A port that nobody listens on; somebody may before we do, but rarely."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def start(
  args: argparse.Namespace, address: str, number: int
) -> subprocess.Popen:
  """Starts a process in a new session, so that all its children end with it."""
  variables = (
    {
      'DEMO_RELAY': f'tcp://{address}',
      'DEMO_WORKERS': str(args.processes),
      'DEMO_RANK': str(number),
    }
    if args.relay
    else {
      'JAX_COORDINATOR_ADDRESS': address,
      'JAX_NUM_PROCESSES': str(args.processes),
      'JAX_PROCESS_ID': str(number),
    }
  )
  variables |= {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': str(args.devices),
    'PYTHONUNBUFFERED': '1',
  }
  return subprocess.Popen(
    args.command,
    env={**os.environ, **variables},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,
    preexec_fn=_die_with_me,
  )


def _load_libc() -> ctypes.CDLL | None:
  return ctypes.CDLL(None) if sys.platform == 'linux' else None


_libc = _load_libc()  # before the fork


def _die_with_me() -> None:
  """Ends the processes when the launcher is killed (on Linux)."""
  if _libc is not None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def relay(process: subprocess.Popen, name: int) -> threading.Thread:
  """Copies a process's lines to our output, with its name in front.

  It reads them even if it cannot write them: a process with a full pipe would
  stop.
  """

  def copy() -> None:
    out, heard = sys.stdout.buffer, True
    for line in process.stdout:
      if heard:
        try:
          out.write(b'[%b] %b\n' % (str(name).encode(), line.rstrip(b'\r\n')))
          out.flush()
        except (OSError, ValueError):
          heard = False

  thread = threading.Thread(target=copy, daemon=True)
  thread.start()
  return thread


def report(text: str) -> None:
  with contextlib.suppress(OSError):
    print(text, file=sys.stderr)


def _is_unheard() -> bool:
  """Whether our output is a pipe that nobody reads any more."""
  try:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
  except (AttributeError, OSError, ValueError):  # no poll, or no such output
    return False


def wait(processes: Sequence[subprocess.Popen], is_relayed: bool) -> int:
  """Waits until one fails, all are done, or the output pipe is closed.

  With a relay the others continue when one fails.
  """
  while True:
    codes = [p.poll() for p in processes]
    for number, code in enumerate(codes):
      if code and not is_relayed:
        # A negative code is the signal that ended it; shells report 128 + it.
        code = code if code > 0 else 128 - code
        report(f'process {number} ended with status {code}')
        return code
    if None not in codes:
      return max(codes)
    if _is_unheard():
      return _BROKEN_PIPE
    time.sleep(0.05)


def end(
  processes: Sequence[subprocess.Popen], grace: float, hurry: threading.Event
) -> None:
  """Asks all to end, then kills what is left, with all that it started.

  A process that waits in a collective does not hear a SIGTERM.
  """
  for process in processes:
    _signal(process, signal.SIGTERM)
  deadline = time.monotonic() + grace
  while any(process.poll() is None for process in processes):
    if hurry.wait(0.02) or time.monotonic() > deadline:
      break
  for process in processes:
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, number)  # its session, also after its own end


if __name__ == '__main__':
  sys.exit(main())
