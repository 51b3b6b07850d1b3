r"""Starts N processes of a training script on this machine, as N hosts would.

    python examples/launch_local.py -n 4 -- python examples/train_lm.py

Every process gets the environment variables JAX_COORDINATOR_ADDRESS,
JAX_NUM_PROCESSES and JAX_PROCESS_ID, which `cluster.py` reads, and CPU devices
of its own; they talk over the loopback interface (gloo). Lines of output begin
with the number of the process. When one fails the others are ended, and its
exit status is that of the launcher; none outlives the launcher, unless it has
made itself a session of its own. Nor do they go on when nobody reads their
output any more (`| head`). Ctrl-C lets them save a last checkpoint, a second
one kills them.

With --elastic the others go on when a process is lost, and a new one is started
in its place, which joins them; the command takes part in an elastic run at the
address in DEMO_OPTAX_COORDINATOR:

    python examples/launch_local.py -n 4 --elastic -- \
        python examples/train_lm.py

As often as there are processes one is replaced; then they become fewer. Should
all end, or the coordinator, the command is started again as a whole once, with
DEMO_OPTAX_RESUME=auto: it is to go on from its checkpoints.
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
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import flags

_PR_SET_PDEATHSIG = 1
_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_TOLD_TO_END = [128 + number for number in _ENDING]
_BROKEN_PIPE = 128 + signal.SIGPIPE


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
  parser = flags.Parser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('-n', '--processes', type=flags.whole(1, 1024), default=2)
  add('--devices', type=flags.whole(1, 1024), default=1,
      help='CPU devices of each process')
  add('--grace', type=flags.not_negative, default=30.0, metavar='SECONDS',
      help='time to save a last checkpoint in, before a process is killed')
  add('--elastic', action='store_true',
      help='the others go on when a process is lost; a new one is started')
  add('command', nargs=argparse.REMAINDER, help='-- and what to run')
  args = parser.parse_args(argv)
  if args.command[:1] == ['--']:
    args.command.pop(0)
  if not args.command:
    parser.error('say what to run, after --: -- python examples/train_lm.py')
  if shutil.which(args.command[0]) is None:
    parser.error(
        f'{args.command[0]!r} is no program: give one and its arguments, such'
        ' as -- python examples/train_lm.py'
    )
  return args


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the processes; the exit status of the first one that failed, or 0."""
  args = parse_args(argv)
  # As an exception wherever the launcher is, so that the processes end, too.
  # Of SIGINT, too: in the background shells let it be ignored.
  for name in _ENDING:
    signal.signal(name, lambda number, _: sys.exit(128 + number))
  code = run(args)
  again = args.elastic and code and code not in _TOLD_TO_END
  if again and not _is_unheard():
    tell(f'all have ended, with status {code}: starting again')
    os.environ['DEMO_OPTAX_RESUME'] = 'auto'
    code = run(args)
  if _is_unheard():  # nor is Python to try and write what it still has
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return code


def run(args: argparse.Namespace) -> int:
  """Runs the processes; when it returns none of them is left."""
  processes: list[subprocess.Popen] = []
  readers: list[threading.Thread] = []
  address = f'127.0.0.1:{free_port()}'
  programs = None
  if args.elastic and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    # Whenever the processes change, all of them need the same program.
    programs = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

  # One process compiles for all of them, each number of processes once.
  cache = {
      'JAX_COMPILATION_CACHE_DIR': programs.name,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_SHARE_BINARY_BETWEEN_HOSTS': '1',
  } if programs else {}
  cache = {k: v for k, v in cache.items() if k not in os.environ}

  def add(name: int | str, process: subprocess.Popen) -> None:
    processes.append(process)
    readers.append(relay(process, name))

  try:
    if args.elastic:
      add('coordinator', start_coordinator(args, address))
    for number in range(args.processes):
      add(number, start(args, address, number, cache))
    if not args.elastic:
      return wait(processes)
    return wait_elastic(
        processes, args.processes,
        lambda number: add(number, start(args, address, number, cache)),
    )
  except OSError as error:
    tell(f'{args.command[0]}: {error.strerror}')
    return 127
  finally:
    # Not to be interrupted; Ctrl-C once more leaves them no time.
    hurry = threading.Event()
    ending = {name: signal.signal(name, signal.SIG_IGN) for name in _ENDING}
    signal.signal(signal.SIGINT, lambda *_: hurry.set())
    # The coordinator ends with its run; before that nobody could be saved.
    end(processes[args.elastic :], args.grace, hurry)
    end(processes[: args.elastic], 0, hurry)
    for reader in readers:
      reader.join(timeout=min(args.grace, 5))
    if programs:
      programs.cleanup()
    for name, handler in ending.items():
      signal.signal(name, handler)


def free_port() -> int:
  """A port that nobody listens on; somebody may before we do, but rarely."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def start(
    args: argparse.Namespace, address: str, number: int, cache: dict[str, str]
) -> subprocess.Popen:
  others = (
      {'DEMO_OPTAX_COORDINATOR': address, **cache} if args.elastic else {
          'JAX_COORDINATOR_ADDRESS': address,
          'JAX_NUM_PROCESSES': str(args.processes),
          'JAX_PROCESS_ID': str(number),
      }
  )
  return open_session(args.command, {
      **others,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(args.devices),
  })


def start_coordinator(
    args: argparse.Namespace, address: str
) -> subprocess.Popen:
  host, port = address.split(':')
  return open_session([
      sys.executable, '-m', 'demo_optax.elastic', '--host', host, '--port',
      port, '--workers', str(args.processes),
  ], {'JAX_PLATFORMS': 'cpu'})


def open_session(
    command: Sequence[str], variables: dict[str, str]
) -> subprocess.Popen:
  """Starts a process in a session of its own: all it starts ends with it."""
  return subprocess.Popen(
      command, env={**os.environ, **variables, 'PYTHONUNBUFFERED': '1'},
      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_me,
  )


def _load_libc() -> ctypes.CDLL | None:
  return ctypes.CDLL(None) if sys.platform == 'linux' else None


_libc = _load_libc()  # before the fork


def _die_with_me() -> None:
  """Even if the launcher is killed its processes end (on Linux)."""
  if _libc is not None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def relay(process: subprocess.Popen, name: int | str) -> threading.Thread:
  """Copies a process's lines to our output, with its name in front.

  Where they cannot be written they are still taken: a process whose lines
  nobody takes stands still.
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


def tell(text: str) -> None:
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


def wait(processes: Sequence[subprocess.Popen]) -> int:
  """Until one fails, all are done, or nobody listens."""
  while True:
    codes = [p.poll() for p in processes]
    for number, code in enumerate(codes):
      if code:
        # A negative code is the signal that ended it, as shells tell it.
        code = code if code > 0 else 128 - code
        tell(f'process {number} ended with status {code}')
        return code
    if all(code == 0 for code in codes):
      return 0
    if _is_unheard():
      return _BROKEN_PIPE
    time.sleep(0.05)


def wait_elastic(
    processes: Sequence[subprocess.Popen], replacements: int,
    replace: Callable[[int], None],
) -> int:
  """Until all workers are done, the coordinator ends, or nobody listens."""
  coordinator, *workers = processes
  number = len(workers)
  failed: set[subprocess.Popen] = set()
  status = 0
  while not _is_unheard():
    workers = [p for p in processes[1:] if p not in failed]
    for worker in workers:
      if worker.poll():
        code = worker.returncode
        status = code if code > 0 else 128 - code
        tell(f'process of pid {worker.pid} ended with status {status}')
        failed.add(worker)
        if coordinator.poll() == 0 or status in _TOLD_TO_END:
          continue  # the run is over
        if replacements:
          replacements -= 1
          replace(number)
          number += 1
    workers = [p for p in processes[1:] if p not in failed]
    if not workers:
      return status
    if all(worker.poll() == 0 for worker in workers):
      return 0
    if coordinator.poll() is not None and any(
        worker.poll() is None for worker in workers
    ):
      # It ends when the run is done, a moment before its last worker.
      deadline = time.monotonic() + 10
      while time.monotonic() < deadline and any(
          worker.poll() is None for worker in workers
      ):
        time.sleep(0.05)
      if coordinator.returncode:
        tell(f'the coordinator ended with status {coordinator.returncode}')
        return 1
    time.sleep(0.05)
  return _BROKEN_PIPE


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
