"""The relay by itself: rounds, keys, and what does not fit."""

import concurrent.futures
import contextlib
import functools
import logging
import math
import os
import pathlib
import socket
import threading
import time

import pytest
import zmq
from test_bits import Clock, Joined, at_once, pass_when

import demo_optax
from demo_optax.remote import __main__ as command
from demo_optax.remote import frames
from demo_optax.remote import link as link_module
from demo_optax.remote.frames import Header
from demo_optax.remote.link import Behind, Link, Position
from demo_optax.remote.relay import Relay
from demo_optax.remote.rounds import Options


class Links:
  """Workers without arrays: links of threads that exchange bytes."""

  def __init__(self, joined, count, links=()):
    self.text = frames.described(count, {})
    self.links = list(links) or [
      Link(joined.address, r, None) for r in range(count)
    ]

  def __enter__(self):
    self.each(lambda link: link.hello(self.text, frames.digest(b'state')))
    return self

  def __exit__(self, *_):
    for link in self.links:
      link.close()

  def each(self, fun, links=None):
    """Returns what `fun` returns of every link, called at the same time."""
    return at_once(fun, self.links if links is None else links)

  def round(self, links=None, size=100):
    """One round with messages of random bytes, before any deadline."""
    links = self.links if links is None else links
    tag = frames.tag('', b'', True)  # of a training step
    bodies = {id(link): tag + os.urandom(size) for link in links}
    lists = self.each(lambda link: link.gather(bodies[id(link)]), links)
    expected = [bodies.get(id(link), b'') for link in self.links]
    assert all(found == expected for found in lists), lists

  def round_at_deadline(self, joined, links):
    """One round of links, while the others are awaited."""
    held = []

    def pass_deadline():
      pass_when(
        joined,
        lambda members: sum(bool(m.body) for m in members) == len(links),
        0,
      )
      number = joined.relay.rounds.round
      time.sleep(0.1)
      held.append(joined.relay.rounds.round == number)
      joined.clock.now += 61

    thread = threading.Thread(target=pass_deadline)
    thread.start()
    self.round(links)
    thread.join(20)
    assert held == [True]


@pytest.fixture(name='joined')
def make_joined():
  with Joined(3, max_message=1 << 20, clock=Clock()) as joined:
    yield joined


@pytest.fixture(name='rounds')
def make_rounds(joined):
  with Links(joined, 3) as rounds:
    yield rounds


@pytest.mark.parametrize('listens', [False, True])
def test_a_missing_worker_costs_one_deadline(rounds, joined, listens):
  for _ in range(3):
    rounds.round()
  rounds.round_at_deadline(joined, rounds.links[:2])
  for _ in range(9 if listens else 3):
    rounds.round(rounds.links[:2])
  # It gets the lists that it missed, one by one, and is not in them; it is
  # awaited as soon as it sends messages again.
  late = rounds.links[2]
  assert late.gather(bytes(frames.CHAIN))[2] == b''
  while late.position.round < rounds.links[0].position.round:
    if listens:
      late.gather(b'')
    else:
      assert late.gather(b'late')[2] == b''
  assert late.position == rounds.links[0].position
  rounds.round()
  rounds.round()


def test_a_worker_that_pauses_is_not_waited_for(rounds):
  rounds.round()
  away = rounds.links[2]
  away.pause()
  for _ in range(3):
    rounds.round(rounds.links[:2])
  while away.position.round < rounds.links[0].position.round:
    away.gather(b'')
  # The others do not wait for its first message, but for the next one.
  rounds.each(lambda link: link.gather(bytes(frames.CHAIN)))
  rounds.round()
  # If all pause, the first one that is back begins without the others.
  rounds.each(lambda link: link.pause())
  rounds.round(rounds.links[1:2])


def test_a_killed_worker_costs_a_second(rounds, joined):
  """Its connection ends, and a new program gets in at once."""
  rounds.round()
  killed = rounds.links[2]
  killed.close()

  def is_noticed(members):
    ended = [m.rank for m in members if m.disconnected < math.inf]
    return ended == [2] and sum(bool(m.body) for m in members) == 2

  thread = threading.Thread(target=pass_when, args=(joined, is_noticed, 1.1))
  thread.start()
  rounds.round(rounds.links[:2])
  thread.join(20)
  new = rounds.links[2] = Link(joined.address, 2, None)
  new.hello(rounds.text, b'')
  assert new.open == 0


def test_lists_are_kept_for_some_rounds():
  with Joined(2, history=4, clock=Clock()) as joined, Links(joined, 2) as r:
    r.round()
    r.round_at_deadline(joined, r.links[:1])
    for _ in range(9):
      r.round(r.links[:1])
    with pytest.raises(Behind):
      r.links[1].gather(b'x')


def test_another_configuration_is_refused(joined):
  """That of the first worker counts, if no other one has more workers."""
  links = [Link(joined.address, r, None) for r in range(2)]

  def hello(rank):
    pass_when(joined, lambda members: len(members) == rank, 0)
    text = frames.described(3, {'compressor': f'k={8 + rank}'})
    links[rank].hello(text, b'x' * 16)

  welcome, error, _ = at_once(
    lambda call: call(),
    [
      lambda: hello(0),
      lambda: hello(1),
      lambda: pass_when(joined, lambda members: len(members) == 2, 301),
    ],
  )
  assert welcome is None and 'must run what the others run' in str(error)
  lines = str(error).splitlines()
  assert lines[1:4] == [
    '  compressor: k=9',
    'where the run has',
    '  compressor: k=8',
  ]
  for link in links:
    link.close()


def raw(joined):
  """A socket that sends what it likes."""
  made = zmq.Context.instance().socket(zmq.DEALER)
  made.set(zmq.LINGER, 0)
  made.connect(joined.address)
  return made


def test_what_does_not_fit_is_refused(joined, rounds, caplog):
  """While three workers go on, and nobody else is disturbed."""
  caplog.set_level('INFO')
  program, position = os.urandom(8), rounds.links[0].position
  attacks = [
    [b''],
    [b'x'] * 2,
    [os.urandom(50)] * 5,
    [b'DEM1'],
    [b'x' * 100] * 40,
    *(
      [
        Header(kind, rank, number, -1, position.chain, program).pack(),
        *[os.urandom(1000)] * frames_,
      ]
      for kind in (0, 1, 2, 3, 4, 5, 11, 12, 255)
      for rank in (0, 2, 3, 2**16 - 1)
      for number in (-1, 0, 1, 2**62)
      for frames_ in (0, 1, 2)
    ),
    [Header(frames.MESSAGE, 0).pack(), b''],
    # Too large: the connection ends.
    [Header(frames.MESSAGE, 0).pack(), b'x' * (2 << 20)],
  ]
  sockets = [raw(joined) for _ in range(4)]
  for number, attack in enumerate(attacks):
    sockets[number % 4].send_multipart(attack)
    if number % 40 == 0:
      rounds.round()
  host, port = joined.address.removeprefix('tcp://').split(':')
  half_open = [socket.create_connection((host, int(port))) for _ in range(100)]
  for number, one in enumerate(half_open):
    one.send((b'', b'\xff' + b'\0' * 8, b'GET / HTTP/1.0\r\n\r\n')[number % 3])
  rounds.round()
  for one in (*sockets, *half_open):
    one.close()
  rounds.round()
  assert joined.relay.rounds.round == rounds.links[0].position.round
  assert any('refused' in r.message for r in caplog.records)


@pytest.mark.parametrize(
  'data',
  [
    b'\1\0\6\0hello',  # ZMTP 1.0
    b'\xff' + bytes(8) + b'\x7f\1\5\0\0\0\5hello',  # 2.0
    b'GET / HTTP/1.1\r\n\r\n',
    bytes(range(256)) * 16,
  ],
)
def test_who_speaks_another_protocol(joined, rounds, data):
  port = int(joined.address.rpartition(':')[2])
  with socket.create_connection(('127.0.0.1', port)) as stranger:
    stranger.sendall(data)
    time.sleep(0.1)
    rounds.round()
  assert joined.thread.is_alive()


def test_messages_of_another_round_or_size(rounds, joined):
  """Replayed, too early, or not as long as those of the others."""
  link, other = rounds.links[1], raw(joined)
  rounds.round()
  for number in (-3, -1, 1, 7):
    header = Header(
      frames.MESSAGE,
      1,
      link.position.round + number,
      0,
      link.position.chain,
      link._program,
    )
    other.send_multipart([header.pack(), b'replayed'])
  rounds.round()
  other.close()
  sizes = {0: 10, 1: 11, 2: 10}
  found = rounds.each(lambda x: x.gather(b'x' * sizes[x.rank]))
  assert found == [[b'x' * 10, b'', b'x' * 10]] * 3


def test_two_programs_of_one_rank(joined, rounds, monkeypatch):
  monkeypatch.setattr(link_module, '_ASK_LARGE', 0.3)
  twin = Link(joined.address, 0, None)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    hello = pool.submit(twin.hello, rounds.text, b'')
    while not hello.done():
      joined.clock.now += 0.1
      rounds.round()
  with pytest.raises(RuntimeError, match='Another program'):
    hello.result()
  twin.open, twin._largest = 0, 1
  twin.position = rounds.links[0].position
  with pytest.raises(RuntimeError, match='Another program'):
    twin.gather(b'x')
  twin.close()
  rounds.round()


def test_keys(tmp_path):
  """Without its key nobody gets in; with it, a worker is its rank alone."""
  files = frames.write_keys(tmp_path, 2)
  assert all(path.stat().st_mode & 0o77 == 0 for path in files)
  with pytest.raises(FileExistsError):
    frames.write_keys(tmp_path, 2)
  for address in ('tcp://*:7077', 'tcp://relay.example.org:7077'):
    with pytest.raises(ValueError, match='keys must be given'):
      Relay(address, Options(2))
    if '*' not in address:
      with pytest.raises(ValueError, match='keys must be given'):
        Link(address, 0, None)
  with pytest.raises(ValueError, match='must be a file of keys'):
    frames.keys_for('', __file__)
  first, *own, _ = map(str, files)  # the last one is of followers
  with pytest.raises(ValueError, match='keys must be the file of a worker'):
    Link('tcp://127.0.0.1:7077', 0, first)
  with Joined(2, keys=first) as joined:
    links = [Link(joined.address, r, key) for r, key in enumerate(own)]
    intruders = [
      Link(joined.address, 1, None),  # no key
      Link(joined.address, 1, own[0]),  # of another rank
    ]
    strangers = frames.write_keys(tmp_path / 'others', 2)
    intruders.append(Link(joined.address, 1, str(strangers[2])))
    connected = [
      bool(x._socket.poll(wait, zmq.POLLOUT))
      for x, wait in zip(intruders, (500, 20_000, 500))
    ]
    assert connected == [False, True, False]
    intruders[1]._socket.send_multipart(
      [
        Header(frames.HELLO, 1, program=b'12345678').pack(),
        frames.described(2, {}),
      ]
    )
    with Links(joined, 2, links) as rounds:
      for _ in range(5):
        rounds.round()
      assert not any(link._socket.poll(100) for link in intruders)
    for link in intruders:
      link.close()


def test_a_bad_address_or_rank():
  remote = demo_optax.Workers.remote
  with pytest.raises(ValueError, match='rank must be from 0 to 1'):
    remote('tcp://127.0.0.1:7077', rank=2, count=2)
  with pytest.raises(ValueError, match='address must be that of a relay'):
    remote('127.0.0.1:7077', rank=0, count=2)


def test_the_command_for_keys(tmp_path, capsys):
  command.main(['--workers', '2', '--write-keys', str(tmp_path)])
  names = [pathlib.Path(x).name for x in capsys.readouterr().out.split()]
  of_workers = ['worker-0.key', 'worker-1.key']
  assert names == ['relay.key', *of_workers, 'follower.key']


@pytest.mark.parametrize(
  'args, error',
  [
    ('--wrokers 2', 'unrecognized arguments: --wrokers 2'),
    ('--port 7077', '--workers must be given.'),
    ('--workers two', "argument --workers: invalid int value: 'two'"),
    ('--workers 0', 'workers must be from 1 to 65,535, got 0.'),
    ('--workers 2 --history 0', 'history must be from 1 to'),
    ('--workers 2 --deadline nan', 'deadline must be from 0.001 to'),
    ('--workers 2 --deadline -1', 'deadline must be from 0.001 to'),
    ('--workers 2 --start inf', 'start must be from 0 to'),
    ('--workers 2 --history -5', 'history must be from 1 to'),
    ('--workers 2 --max-message -1', 'max_message must be from 1,048,576 to'),
    ('--workers 2 --port 70000', 'port must be from 0 to 65,535, got 70000.'),
    ('--workers 2 --keys /nope', 'Make one for the relay and for each worker'),
    ('--workers 2 --port {used}', 'Give another --port.'),
    ('--workers 0 --write-keys {folder}', 'workers must be from 1 to 65,535'),
    ('--workers 2 --write-keys /dev/null/x', 'Give another --write-keys.'),
  ],
)
def test_a_wrong_command(joined, tmp_path, args, error, capsys):
  """One line, exit code 2, and no traceback."""
  used = joined.address.rpartition(':')[2]
  words = args.format(used=used, folder=tmp_path).split()
  with pytest.raises(SystemExit) as ended:
    command.main(words)
  assert ended.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('python -m demo_optax.remote') and error in line


def test_a_log_that_nobody_reads():
  """A full pipe loses lines; the relay does not wait for a reader."""
  read, write = os.pipe()
  with os.fdopen(write, 'w') as stream:
    handler = command.Handler(stream)
    record = logging.LogRecord('', 0, '', 0, 'x' * 300, (), None)
    for _ in range(1000):
      handler.emit(record)
    found = os.read(read, 1 << 20).count(b'\n')
    assert 100 < found < 1000
    handler.emit(record)
    assert os.read(read, 1 << 20) == b'x' * 300 + b'\n'
  os.close(read)


def test_a_run_begins_with_the_newest_state():
  with Joined(3) as joined:
    rounds = Links(joined, 3)
    digests, steps = (b'a' * 16, b'b' * 16, b'b' * 16), (0, 50, 50)
    rounds.each(lambda x: x.hello(rounds.text, digests[x.rank], steps[x.rank]))
    behind, *lists = rounds.each(lambda link: link.gather(b'x'))
    assert isinstance(behind, Behind) and lists == [[b'', b'x', b'x']] * 2
    rounds.__exit__()


def test_a_longer_run_that_comes_back(rounds, joined):
  """Its state is kept, not that of a program that began without it."""
  for _ in range(3):
    rounds.round()
  joined.restart()
  new = Link(joined.address, 0, None)
  rounds.links[0].close()

  def start_passes(count):
    pass_when(joined, lambda members: len(members) == count, 301)

  at_once(
    lambda call: call(),
    [lambda: new.hello(rounds.text, b'another state'), lambda: start_passes(1)],
  )
  new.gather(bytes(frames.CHAIN))

  def goes_on(link):
    with pytest.raises(Behind):
      link.gather(bytes(frames.CHAIN))
    assert link.open == -1  # the relay does not know it
    link.hello(rounds.text, b'')
    return link.gather(bytes(frames.CHAIN))

  # Without the one that was refused, sooner than it would have to join.
  *lists, _ = at_once(
    lambda call: call(),
    [
      *(functools.partial(goes_on, link) for link in rounds.links[1:]),
      lambda: start_passes(2),
    ],
  )
  assert [len(found) for found in lists] == [3, 3]
  assert joined.relay.rounds.round == 4
  with pytest.raises(Behind):
    new.gather(bytes(frames.CHAIN))
  new.close()


def test_a_list_that_only_some_have_received(rounds, joined):
  """The new relay has it from the others, and who sent for it learns of it.

  A worker that only listened would give up nothing of its momentum, although
  its message is in the list.
  """
  rounds.round()
  link = rounds.links[2]
  before = link.position
  bodies = [bytes(frames.CHAIN) + b'%d' % n for n in range(3)]
  rounds.each(lambda x: x.gather(bodies[x.rank]))
  link.position = before
  joined.restart()
  rounds.each(lambda x: x.hello(rounds.text, b''))
  assert link.open == before.round
  assert link.gather(bodies[2]) == bodies
  assert link.position == rounds.links[0].position
  rounds.round()


def test_a_damaged_state_is_asked_for_again(rounds, joined):
  rounds.round()
  source, late = rounds.links[0], rounds.links[2]
  late.part()
  found, damaged = [], [b'x' * 40]
  thread = threading.Thread(target=lambda: found.append(late.state()))
  thread.start()
  rounds.round(rounds.links[:2])  # nobody waits for one that joins
  until = time.monotonic() + 20
  while thread.is_alive() and time.monotonic() < until:
    rounds.round(rounds.links[:2])
    is_wanted = source.position.then == frames.SEND
    if is_wanted and damaged:
      source._push(damaged.pop(), source._header(frames.PUSH))
    elif is_wanted:
      source.send_state(b'state')
    time.sleep(0.02)
  assert found == [b'state'] and not damaged


def test_limits(joined):
  rank, large = (Link(joined.address, rank, None) for rank in (3, 0))
  with pytest.raises(RuntimeError, match='got workers: 3 from worker 3'):
    rank.hello(frames.described(3, {}), b'')
  with pytest.raises(
    RuntimeError,
    match='count must be that of the relay, workers: 3, got workers: 4',
  ):
    large.hello(frames.described(4, {}), b'')
  at_once(
    lambda call: call(),
    [
      lambda: large.hello(frames.described(3, {}), b''),
      lambda: pass_when(joined, lambda members: members, 301),
    ],
  )
  with pytest.raises(ValueError, match='larger --max-message'):
    large.gather(bytes((1 << 20) + 1))
  for link in (rank, large):
    link.close()


def test_a_run_that_all_have_left(joined):
  """The relay waits for workers to come, and begins again."""
  with Links(joined, 3) as rounds:
    for _ in range(5):
      rounds.round()
  joined.clock.now += 3  # then other programs may have these ranks
  with Links(joined, 3) as rounds:
    for link in rounds.links:
      link.position = Position(chain=b'x' * frames.CHAIN)
    found = rounds.each(lambda link: link.gather(b'x'))
    assert all(isinstance(error, Behind) for error in found)

    def minutes():
      while joined.relay.rounds._members:
        joined.clock.now += 20
        time.sleep(0.15)  # they ask in between

    *found, _ = at_once(
      lambda call: call(), [*(link.state for link in rounds.links), minutes]
    )
    assert all(isinstance(error, Behind) for error in found)
    with rounds:
      rounds.round()


class Wire:
  """Connections to an address that can be cut; new ones are let through."""

  def __init__(self, address):
    host, port = address.removeprefix('tcp://').split(':')
    self.target, self.ends = (host, int(port)), []
    self.server = socket.create_server(('127.0.0.1', 0))
    self.address = f'tcp://127.0.0.1:{self.server.getsockname()[1]}'
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    with contextlib.suppress(OSError):
      while True:
        near, _ = self.server.accept()
        far = socket.create_connection(self.target)
        self.ends += [near, far]
        for pair in ((near, far), (far, near)):
          threading.Thread(target=self._copy, args=pair, daemon=True).start()

  def _copy(self, source, target):
    with contextlib.suppress(OSError):
      while data := source.recv(8192):
        target.sendall(data)
    self._shut(source, target)

  def _shut(self, *ends):
    for end in ends:
      with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
      end.close()

  def cut(self):
    ends, self.ends = self.ends, []
    self._shut(*ends)

  def close(self):
    self._shut(self.server)
    self.cut()


def test_a_wire_that_is_cut():
  """In the middle of messages and lists: they are sent again, none is lost."""
  with Joined(2) as joined, contextlib.ExitStack() as stack:
    wires = [Wire(joined.address) for _ in range(2)]
    for wire in wires:
      stack.callback(wire.close)
    links = [Link(w.address, r, None) for r, w in enumerate(wires)]
    with Links(joined, 2, links) as rounds:
      rounds.round()
      for number in range(8):
        timer = threading.Timer(0.004 * number, wires[number % 2].cut)
        timer.start()
        rounds.round(size=2_000_000)
        timer.join()
