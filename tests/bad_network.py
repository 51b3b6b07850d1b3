"""Two network namespaces, and between them a wire that does not carry all.

Every namespace has one interface, a TAP whose other end is held here: frames
are read from one and written to the other, or are not. Needs root.
"""

import os
import pathlib
import random
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'benchmarks'))

import links

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


class Wire(links.Relay):
  """Carries frames between two interfaces, `wire0` and `wire1`.

  Attributes:
    lost, damaged, doubled: share of the frames that this happens to.
    delays: seconds, from and to; frames overtake each other.
    cut: whether nothing is carried at all.
    counts: how often each has happened.
  """

  def __init__(self):
    self.lost = self.damaged = self.doubled = 0.0
    self.delays = 0.0, 0.0
    self.cut = False
    self.counts = dict.fromkeys(['carried', 'lost', 'damaged', 'doubled'], 0)
    self._random = random.Random(0)
    super().__init__(2, 0, 'wire')

  def carry(self, frame):
    """What comes out for one frame, and when."""
    happens = lambda share: self._random.random() < share
    if self.cut or happens(self.lost):
      self.counts['lost'] += 1
      return []
    if happens(self.damaged) and len(frame) > 60:
      place = self._random.randrange(54, len(frame))  # behind the headers
      byte = frame[place] ^ self._random.randrange(1, 256)
      frame = frame[:place] + bytes([byte]) + frame[place + 1 :]
      self.counts['damaged'] += 1
    twice = happens(self.doubled)
    self.counts['doubled'] += twice
    self.counts['carried'] += 1 + twice
    return [(self._random.uniform(*self.delays), frame)
            for _ in range(1 + twice)]
