"""Workers that are programs, with a relay: faults, load and slow links.

    python benchmarks/relay.py goodput    # 18 minutes
    python benchmarks/relay.py drift --minutes 3 --pace 0.02
    python benchmarks/relay.py slow --workers 4 --minutes 60 --pace 1
    python benchmarks/relay.py load       # CPU and seconds of the relay
    python benchmarks/relay.py links      # seconds of a round on slow links
    python benchmarks/relay.py attack     # 10,000 connections, and garbage
    python benchmarks/relay.py follow     # bytes of a program that follows

`goodput` runs two jobs side by side, of 8 workers each, which train a small
network on scikit-learn's digits, a step in half a second. In one of them a
worker is killed (SIGKILL) every three minutes, and started again at once with
new parameters. Counted are the steps of all workers, and rounds. After every
round the parameters of all that took part must have the same digest. `slow` is
one job, in which the last worker takes six times as long for a step.

The other commands have workers without gradients: threads that send messages of
a size and wait for the list. On slow links each has a proxy, which limits both
directions; the link of the relay is not limited. Results are in
benchmarks/results/relay.json.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import queue
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / x) for x in ('.', 'benchmarks', 'examples')]

from demo_optax.remote import frames, link

RESULTS = ROOT / 'benchmarks' / 'results' / 'relay.json'


def work(args: argparse.Namespace) -> None:
  """One worker: trains until the time is over, and writes a line a step."""
  import digits
  import jax
  import numpy as np
  from flax import nnx

  import demo_optax

  workers = demo_optax.Workers.remote(
    args.address, rank=args.rank, count=args.workers
  )
  (images, labels), test = digits.load()
  model = digits.CNN(nnx.Rngs(0))
  tx = demo_optax.demo_muon(2e-2, workers=workers)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @demo_optax.data_parallel(
    workers, batch_argnames=('images', 'labels'), donate_argnums=(0, 1)
  )
  def train_step(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    loss, grads = nnx.value_and_grad(digits.loss_fn)(model, images, labels)
    optimizer.update(model, grads)
    return loss

  of_run = link.link_of(workers)
  random = np.random.default_rng((args.rank, os.getpid()))
  with open(args.out, 'a') as out:
    turn = time.time() + args.pace
    while time.time() < args.until:
      rows = random.integers(0, len(labels), 16)
      loss = train_step(model, optimizer, images[rows], labels[rows])
      # Wait for results, since they are on the way until they are needed.
      params = jax.device_get(nnx.state(model, nnx.Param))
      digest = hash(b''.join(x.tobytes() for x in jax.tree.leaves(params)))
      memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
      position = of_run.position.round
      line = [args.rank, position, float(loss), digest, memory, time.time()]
      print(json.dumps(line), file=out, flush=True)
      time.sleep(max(0.0, turn - time.time()))
      turn = max(turn + args.pace, time.time())
  loss = float(digits.loss_fn(model, *map(jax.numpy.asarray, test)))
  found = {'loss': loss, 'joined': of_run.joined, 'parted': of_run.parted}
  pathlib.Path(f'{args.out}.end').write_text(json.dumps(found))


class Job:
  """A relay and its workers, as processes."""

  def __init__(self, folder: pathlib.Path, args: argparse.Namespace):
    folder.mkdir()
    self.folder, self.args = folder, args
    self.log = (folder / 'log').open('w')
    self.relay = subprocess.Popen(
      [
        sys.executable,
        '-m',
        'demo_optax.remote',
        '--workers',
        str(args.workers),
        '--port',
        '0',
        '--start',
        '120',
      ],
      stdout=subprocess.PIPE,
      stderr=self.log,
      text=True,
      cwd=ROOT,
    )
    assert self.relay.stdout is not None
    self.address = self.relay.stdout.readline().split()[-1]
    self.workers = [self.start(rank) for rank in range(args.workers)]

  def __enter__(self) -> 'Job':
    return self

  def __exit__(self, *_: object) -> None:
    for process in (self.relay, *self.workers):
      process.kill()
      process.wait()

  def start(self, rank: int) -> subprocess.Popen:
    flags = ['--xla_cpu_multi_thread_eigen=false']
    if self.args.unlike and rank:
      flags.append('--xla_cpu_enable_fast_math=true')
    env = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'PYTHONHASHSEED': '0',
      'JAX_COMPILATION_CACHE_DIR': str(self.folder.parent / 'cache'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'XLA_FLAGS': ' '.join(flags),
    }
    return subprocess.Popen(
      [
        sys.executable,
        __file__,
        'work',
        '--address',
        self.address,
        '--rank',
        str(rank),
        '--workers',
        str(self.args.workers),
        '--pace',
        str(self.pace(rank)),
        '--until',
        str(self.args.until),
        '--out',
        str(self.folder / f'{rank}'),
      ],
      env=env,
      stdout=self.log,
      stderr=self.log,
    )

  def pace(self, rank: int) -> float:
    is_slow = self.args.one_is_slow and rank == self.args.workers - 1
    return self.args.pace * (6 if is_slow else 1)

  def restart(self, rank: int) -> None:
    self.workers[rank].kill()
    self.workers[rank].wait()
    self.workers[rank] = self.start(rank)

  def end(self) -> dict[str, Any]:
    for worker in self.workers:
      worker.wait(max(0.0, self.args.until - time.time()) + 180)
    self.relay.send_signal(signal.SIGTERM)
    self.relay.wait(10)
    usage = (self.folder / 'log').read_text()
    lines = [
      json.loads(line)
      for rank in range(self.args.workers)
      for line in (self.folder / f'{rank}').read_text().splitlines()
    ]
    began = self.args.until - 60 * self.args.minutes
    lines = [line for line in lines if line[-1] >= began]
    digests = collections.defaultdict(set)
    for _, number, _, digest, _, _ in lines:
      digests[number].add(digest)
    ends = [
      json.loads((self.folder / f'{rank}.end').read_text())
      for rank in range(self.args.workers)
    ]
    memory = [
      [line[4] for line in lines if line[0] == rank]
      for rank in range(self.args.workers)
    ]
    return {
      'steps': len(lines),
      'steps_of_workers': [len(x) for x in memory],
      'rounds': max(digests) - min(digests) + 1,
      'rounds_that_differ': sum(len(x) > 1 for x in digests.values()),
      'validation_loss': round(statistics.median(x['loss'] for x in ends), 4),
      'joined': [x['joined'] for x in ends],
      'parted': [x['parted'] for x in ends],
      'memory_mb': [max(x) for x in memory],
      'memory_mb_after_a_third': [x[len(x) // 3] for x in memory],
      'rounds_without_some': usage.count(' without '),
    }


def goodput(args: argparse.Namespace) -> None:
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    args.until = time.time() + 60 * args.minutes + args.warm_up
    with Job(folder / 'one', args) as one, Job(folder / 'two', args) as two:
      time.sleep(args.warm_up)
      kills, turn = 0, time.time() + args.kill_every / 2
      while turn < args.until - args.kill_every / 3:
        time.sleep(max(0.0, turn - time.time()))
        two.restart(kills % args.workers)
        kills, turn = kills + 1, turn + args.kill_every
      found = {'undisturbed': one.end(), 'killed': two.end()}
  found['kills'] = kills
  for kind in ('steps', 'rounds'):
    found[f'goodput_{kind}'] = round(
      found['killed'][kind] / found['undisturbed'][kind], 4
    )
  save(
    'goodput',
    {
      'workers': args.workers,
      'minutes': args.minutes,
      'pace': args.pace,
      **found,
    },
  )


def drift(args: argparse.Namespace) -> None:
  """Two workers, one of which is compiled with other flags."""
  args.workers, args.unlike = 2, True
  save('drift', alone(args))


def slow(args: argparse.Namespace) -> None:
  """A worker that is never in time."""
  args.one_is_slow = True
  save('slow', {'minutes': args.minutes, 'pace': args.pace, **alone(args)})


def alone(args: argparse.Namespace) -> dict[str, Any]:
  args.until = time.time() + 60 * args.minutes
  with (
    tempfile.TemporaryDirectory() as name,
    Job(pathlib.Path(name) / 'job', args) as job,
  ):
    return job.end()


class Messages:
  """A relay, and threads that send it messages in rounds."""

  def __init__(self, workers: int, link_of: Callable[[str], str] | None = str):
    self.workers = workers
    self.relay = subprocess.Popen(
      [
        sys.executable,
        '-m',
        'demo_optax.remote',
        '--workers',
        str(workers),
        '--port',
        '0',
        '--deadline',
        '60',
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      cwd=ROOT,
    )
    assert self.relay.stdout is not None
    self.address = self.relay.stdout.readline().split()[-1]
    if link_of is None:
      return
    self.links: list[Any] = [
      link.Link(link_of(self.address), rank, None) for rank in range(workers)
    ]
    self.text = frames.described(workers, {})
    self._each(lambda x: x.hello(self.text, frames.digest(b'state')))

  def _each(self, fun: Callable[[Any], Any]) -> None:
    threads = [threading.Thread(target=fun, args=(x,)) for x in self.links]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def seconds(self, size: int, rounds: int) -> float:
    """Returns the median seconds of a round."""
    body, found = os.urandom(size), []

    def take_part(own: Any) -> None:
      for _ in range(rounds):
        began = time.perf_counter()
        own.gather(body)
        found.append(time.perf_counter() - began)

    self._each(take_part)
    return round(statistics.median(found[self.workers :]), 4)

  def usage(self) -> tuple[float, int]:
    """Returns the CPU seconds of the relay, and its largest megabytes."""
    process = pathlib.Path(f'/proc/{self.relay.pid}')
    ticks = (process / 'stat').read_text().split()
    cpu = (int(ticks[13]) + int(ticks[14])) / os.sysconf('SC_CLK_TCK')
    status = (process / 'status').read_text().splitlines()
    (peak,) = (x.split()[1] for x in status if x.startswith('VmHWM'))
    return cpu, int(peak) // 1024

  def close(self) -> None:
    for own in self.links:
      own.close()
    self.relay.terminate()
    self.relay.wait(60)


def load(args: argparse.Namespace) -> None:
  rows = []
  for workers in (8, 32, 64):
    for size in (100_000, 1_000_000, 10_000_000):
      if workers * workers * size > 3e9:
        continue  # lists of gigabytes on one machine
      job = Messages(workers)
      before, _ = job.usage()
      seconds = job.seconds(size, args.rounds)
      cpu, peak = job.usage()
      job.close()
      rows.append(
        {
          'workers': workers,
          'bytes': size,
          'seconds': seconds,
          'relay_cpu_seconds': round((cpu - before) / args.rounds, 4),
          'relay_mb': peak,
        }
      )
      print(rows[-1], flush=True)
  save('load', rows)


class Slow:
  """A link to an address: bytes pass at a rate, some time later."""

  def __init__(self, address: str, mbit: float, delay: float):
    host, port = address.removeprefix('tcp://').split(':')
    self.target, self.rate, self.delay = (host, int(port)), mbit / 8, delay
    self.passed = 0  # bytes, in both directions
    self.socket = socket.create_server(('127.0.0.1', 0))
    self.address = f'tcp://127.0.0.1:{self.socket.getsockname()[1]}'
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self) -> None:
    while True:  # ZeroMQ connects again
      near, _ = self.socket.accept()
      self._join(near)

  def _join(self, near: socket.socket) -> None:
    far = socket.create_connection(self.target)
    for end in (near, far):  # as ZeroMQ does
      end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for pair in ((near, far), (far, near)):
      pipe: queue.Queue[tuple[float, bytes]] = queue.Queue(64)
      threading.Thread(
        target=self._take, args=(pair[0], pipe), daemon=True
      ).start()
      threading.Thread(
        target=self._give, args=(pair[1], pipe), daemon=True
      ).start()

  def _take(self, source: socket.socket, pipe: Any) -> None:
    free = 0.0  # when all that came has passed
    with contextlib.suppress(OSError):
      while data := source.recv(8192):
        self.passed += len(data)
        free = max(free, time.monotonic()) + len(data) / self.rate / 1e6
        pipe.put((free + self.delay, data))
    pipe.put((0.0, b''))

  def _give(self, target: socket.socket, pipe: Any) -> None:
    while True:
      at, data = pipe.get()
      time.sleep(max(0.0, at - time.monotonic()))
      if not data:
        return target.close()
      with contextlib.suppress(OSError):
        target.sendall(data)


def links(args: argparse.Namespace) -> None:
  rows = []
  for mbit, delay in ((1, 0.0), (10, 0.0), (100, 0.0), (10, 0.02), (100, 0.02)):
    for workers, size in ((4, 22_600), (8, 22_600), (4, 650_000)):
      if mbit == 1 and size > 100_000:
        continue
      slow = functools.partial(Slow, mbit=mbit, delay=delay)
      job = Messages(workers, lambda x, slow=slow: slow(x).address)
      rows.append(
        {
          'workers': workers,
          'bytes': size,
          'mbit': mbit,
          'ms': 1000 * delay,
          'seconds': job.seconds(size, min(args.rounds, 8)),
          # Its message, then the list, without headers.
          'least': round((1 + workers) * size * 8e-6 / mbit + 2 * delay, 4),
        }
      )
      job.close()
      print(rows[-1], flush=True)
  save('links', rows)


def follow(args: argparse.Namespace) -> None:
  """Bytes that a program receives which follows, and those of full copies."""
  import jax
  from flax import nnx
  from gpt import GPT, GPTConfig

  import demo_optax
  from demo_optax import recipes

  config = GPTConfig(vocab=8192, width=512, layers=12, heads=8, context=256)
  params = nnx.eval_shape(lambda: nnx.state(GPT(config, nnx.Rngs(0))))
  size = sum(x.size for x in jax.tree.leaves(params))
  rows = []
  for workers in (1, 4):
    plan = demo_optax.plan(params, recipes.muon_compressors, workers)
    job = Messages(workers)
    wire = Slow(job.address, 1e6, 0.0)
    follower = link.Link(wire.address, None, None)
    job.links.append(follower)
    follower.hello(job.text, b'')
    source = job.links[0].position
    follower.position = source  # as if it had taken the state
    job.links.remove(follower)
    before = wire.passed
    job.seconds(plan.payload_bytes + frames.CHAIN, args.rounds)
    while follower.position.round < job.links[0].position.round:
      follower.gather(b'')
    assert follower.position.chain == job.links[0].position.chain
    received = (wire.passed - before) / args.rounds
    follower.close()
    job.relay.kill()
    job.relay.wait()
    row = {'workers': workers, 'elements': size, 'bytes': round(received)}
    for every in (1, 10):
      row[f'copy_bfloat16_each_{every}'] = round(2 * size / every)
    rows.append(row)
    print(row, flush=True)
  save('follow', rows)


def attack(args: argparse.Namespace) -> None:
  """Rounds of 8 workers while others send what they like."""
  job = Messages(8)
  host, port = job.address.removeprefix('tcp://').split(':')
  quiet = job.seconds(22_600, 200)
  before = job.usage()
  opened: list[socket.socket] = []
  stop: list[bool] = []
  sent = [0]

  def connect() -> None:
    while not stop and len(opened) < args.connections:
      opened.append(socket.create_connection((host, int(port))))
      opened[-1].send(os.urandom(len(opened) % 64))

  def flood() -> None:
    own = zmq.Context.instance().socket(zmq.DEALER)
    own.set(zmq.LINGER, 0)
    own.connect(job.address)
    while not stop:
      kind, rank = sent[0] % 20, sent[0] % 9
      head = frames.Header(kind, rank, sent[0] % 300).pack()
      own.send_multipart([head, *[os.urandom(5000)] * (sent[0] % 4)])
      sent[0] += 1
      time.sleep(0.002)
    own.close()

  jobs = [flood, flood, *[connect] * 4]
  threads = [threading.Thread(target=job) for job in jobs]
  for thread in threads:
    thread.start()
  found = []
  while len(opened) < args.connections:
    found.append(job.seconds(22_600, 100))
  attacked = statistics.median(found)
  stop.append(True)
  for thread in threads:
    thread.join()
  after = job.usage()
  for one in opened:
    one.close()
  save(
    'attack',
    {
      'connections': len(opened),
      'messages': sent[0],
      'seconds': quiet,
      'seconds_attacked': attacked,
      'seconds_after': job.seconds(22_600, 200),
      'relay_mb': [before[1], after[1]],
    },
  )
  job.close()


def save(name: str, found: Any) -> None:
  everything = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  RESULTS.write_text(json.dumps(everything | {name: found}, indent=1) + '\n')
  print(json.dumps(found, indent=1))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  tasks = {
    f.__name__: f
    for f in (goodput, drift, slow, load, links, follow, attack, work)
  }
  parser.set_defaults(unlike=False, one_is_slow=False)
  parser.add_argument('what', choices=tasks)
  add = parser.add_argument
  add('--workers', type=int, default=8)
  add('--minutes', type=float, default=18)
  add('--kill-every', type=float, default=180, metavar='SECONDS')
  add('--pace', type=float, default=0.5, help='seconds of a step')
  add('--warm-up', type=float, default=90, metavar='SECONDS')
  add('--rounds', type=int, default=20)
  add('--connections', type=int, default=10_000)
  for name, kind in (
    ('address', str),
    ('rank', int),
    ('until', float),
    ('out', str),
  ):
    add(f'--{name}', type=kind, help='of a worker')
  args = parser.parse_args()
  tasks[args.what](args)


if __name__ == '__main__':
  main()
