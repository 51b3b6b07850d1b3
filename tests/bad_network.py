"""Two network namespaces, and between them a wire that does not carry all.

Every namespace has one interface, a TAP whose other end is held here: frames
are read from one and written to the other, or are not. Needs root.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque

PREFIX = '10.78.0.'


def why_not() -> str | None:
  """Why it cannot be had here; None if it can."""
  try:
    Wire().close()
    subprocess.run(['unshare', '--net', '--uts', '--mount', 'true'],
                   check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as error:
    return str(error)
  return None


def inside(number: int, command: list) -> list:
  """A command in a namespace of its own, once its interface is there."""
  hosts = ''.join(f'{PREFIX}{i + 1} worker{i}\\n' for i in range(2))
  script = f'''
    set -e
    until ip link show wire{number} > /dev/null 2>&1; do sleep 0.05; done
    ip addr add {PREFIX}{number + 1}/24 dev wire{number}
    ip link set lo up; ip link set wire{number} up
    hostname worker{number}
    printf '127.0.0.1 localhost\\n{hosts}' > "$HOSTS"
    mount --bind "$HOSTS" /etc/hosts; rm "$HOSTS"
    exec "$@"'''
  return ['env', f'HOSTS=/tmp/hosts-{os.getpid()}-{number}', 'unshare', '--net',
          '--uts', '--mount', 'sh', '-c', script, 'sh', *map(str, command)]


def give(number: int, pid: int) -> None:
  """Moves an interface into the namespace of a process made by `inside`."""
  own = os.readlink('/proc/self/ns/net')
  while os.readlink(f'/proc/{pid}/ns/net') == own:
    time.sleep(0.02)
  subprocess.run(['ip', 'link', 'set', f'wire{number}', 'netns', str(pid)],
                 check=True)


class Wire(threading.Thread):
  """Carries frames between two interfaces, `wire0` and `wire1`.

  Attributes:
    lost, damaged, doubled: share of the frames that this happens to.
    delays: seconds, from and to; frames overtake each other.
    cut: whether nothing is carried at all.
    counts: how often each has happened.
  """

  def __init__(self):
    super().__init__(daemon=True)
    self.lost = self.damaged = self.doubled = 0.0
    self.delays = 0.0, 0.0
    self.cut, self._open = False, True
    self.counts = dict.fromkeys(['carried', 'lost', 'damaged', 'doubled'], 0)
    self._random = random.Random(0)
    self._files = []
    for i in range(2):
      file = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
      # TUNSETIFF, IFF_TAP | IFF_NO_PI
      fcntl.ioctl(file, 0x400454CA, struct.pack('16sH', b'wire%d' % i, 0x1002))
      self._files.append(file)
    self.start()

  def run(self) -> None:
    """Until it is closed."""
    waiting = deque()
    while self._open:
      for source in select.select(self._files, [], [], 0.001)[0]:
        with contextlib.suppress(BlockingIOError, OSError):
          for _ in range(64):
            self._take(os.read(source, 2048), source, waiting)
      now = time.monotonic()
      late = deque()
      for due, target, frame in waiting:
        if due > now:
          late.append((due, target, frame))
          continue
        with contextlib.suppress(OSError):
          os.write(target, frame)
      waiting = late

  def _take(self, frame, source, waiting) -> None:
    target = self._files[1 - self._files.index(source)]
    happens = lambda share: self._random.random() < share
    if self.cut or happens(self.lost):
      self.counts['lost'] += 1
      return
    if happens(self.damaged) and len(frame) > 60:
      place = self._random.randrange(54, len(frame))  # behind the headers
      byte = frame[place] ^ self._random.randrange(1, 256)
      frame = frame[:place] + bytes([byte]) + frame[place + 1 :]
      self.counts['damaged'] += 1
    twice = happens(self.doubled)
    self.counts['doubled'] += twice
    for _ in range(1 + twice):
      due = time.monotonic() + self._random.uniform(*self.delays)
      waiting.append((due, target, frame))
      self.counts['carried'] += 1

  def close(self) -> None:
    """Takes the interfaces away."""
    self._open = False
    self.join()
    for file in self._files:
      os.close(file)
