"""Kills workers of a relay at random moments: does one end, or differ?

    python benchmarks/kills.py --kills 200 --out benchmarks/results/kills.json

Three workers train a small model, each a process. One of them is killed
(SIGKILL) at a random age: while it joins, takes a state or trains. It is
started again at once, or a little later, with new parameters. With some kills
the relay is killed as well, or another worker is stopped for some seconds. One
worker that trains is always left, which has the state. After every round all
workers that took part must have the same parameters, and none may end by
itself.

Workers are forked from one process, which has imported what they need: a busy
machine spends its time on rounds. The record is written after every kill. A
command that ended early is given again: it begins another run, and goes on to
the number of kills in all. Ends with status 1 if a worker ended by itself or
differed from the others.
"""

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {
  'JAX_PLATFORMS': 'cpu',
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false'
  ' --xla_backend_optimization_level=0',
}

import jax
import jax.numpy as jnp
import numpy as np
import optax

import demo_optax
from demo_optax.remote import __main__ as command
from demo_optax.remote.link import link_of

FORK = multiprocessing.get_context('fork')
COUNT = 3
BEGIN = 900.0  # seconds for a run to begin, on a busy machine
TOGETHER = 7, 5  # kills between those of the relay, and between stops
PACE = 0.1  # seconds between steps


def to_log(path: pathlib.Path) -> None:
  """Writes what this process prints to a file."""
  with path.open('a') as log:
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)


def relay(folder: pathlib.Path, port: int) -> None:
  """Serves a run."""
  to_log(folder / 'relay.log')
  command.main(['--workers', f'{COUNT}', '--port', f'{port}'])


def work(folder: pathlib.Path, port: int, rank: int, parent: int) -> None:
  """Trains; writes for each step time, process, round, chain and digest."""
  to_log(folder / f'worker-{rank}.log')
  logging.basicConfig(level=logging.INFO, format='%(asctime)s %(message)s')
  jax.config.update('jax_compilation_cache_dir', str(folder / 'cache'))
  address = f'tcp://127.0.0.1:{port}'
  workers = demo_optax.Workers.remote(address, rank=rank, count=COUNT)
  tx = demo_optax.demo(3e-3, workers=workers)
  rng = np.random.default_rng((rank, os.getpid()))
  # A state of some parts, so that one may be killed while it takes it.
  params = {
    'w': jnp.asarray(rng.normal(size=(512, 1024)), jnp.float32),
    'b': jnp.zeros(1024),
  }
  opt_state = tx.init(params)

  @demo_optax.data_parallel(workers, batch_argnames='x')
  def train_step(params: Any, opt_state: Any, x: Any) -> Any:
    def loss_fn(params: Any) -> Any:
      return jnp.mean((jnp.tanh(x @ params['w']) + params['b'] - 1.0) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  link = link_of(workers)
  with (folder / f'{rank}').open('a') as file:
    while os.getppid() == parent:
      x = rng.normal(size=(2, 512)).astype(np.float32)
      params, opt_state, _ = train_step(params, opt_state, x)
      data = b''.join(np.asarray(leaf).tobytes() for leaf in params.values())
      digest = hashlib.sha1(data).hexdigest()[:12]
      at = link.position
      line = [time.time(), os.getpid(), at.round, at.chain.hex(), digest]
      print(json.dumps(line), file=file, flush=True)
      time.sleep(PACE)


class Run:
  """A relay and its workers, as processes that are killed."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      self.port = free.getsockname()[1]
    self.born = [0.0] * COUNT
    self.ages = [5.0]  # at which workers have made their first step
    self.counted: set[int] = set()  # their processes
    self.ended: list[list[Any]] = []  # workers that ended by themselves
    self.relay = self.start_relay()
    self.workers = [self.start(rank) for rank in range(COUNT)]

  def __enter__(self) -> 'Run':
    return self

  def __exit__(self, *_: object) -> None:
    for process in (self.relay, *self.workers):
      process.kill()
      process.join()

  def start_relay(self) -> Any:
    process = FORK.Process(target=relay, args=(self.folder, self.port))
    process.start()
    return process

  def start(self, rank: int) -> Any:
    self.born[rank] = time.time()
    args = self.folder, self.port, rank, os.getpid()
    process = FORK.Process(target=work, args=args)
    process.start()
    return process

  def lines(self, rank: int) -> list[Any]:
    """Lines that a worker, and those before it in its place, have written."""
    with contextlib.suppress(OSError):
      text = (self.folder / f'{rank}').read_text()
      whole = [x for x in text.splitlines() if x.endswith(']')]
      return [json.loads(line) for line in whole]
    return []

  def trains(self, rank: int) -> bool:
    """Whether a worker has made a step since it was started."""
    pid = self.workers[rank].pid
    own = [line for line in self.lines(rank) if line[1] == pid]
    if own and pid not in self.counted:
      self.counted.add(pid)
      self.ages.append(own[0][0] - self.born[rank])
    return bool(own)

  def wait_for(self, ranks: list[int], least: int) -> None:
    """Waits until some workers train."""
    until = time.time() + BEGIN
    while sum(map(self.trains, ranks)) < least:
      self.check()
      if time.time() > until:
        raise RuntimeError('The workers do not train: ' + self.logs())
      time.sleep(0.2)

  def check(self) -> None:
    """Notes workers that have ended by themselves; starts them again."""
    for rank, worker in enumerate(self.workers):
      if not worker.is_alive():
        self.ended.append([rank, self.logs()])
        self.workers[rank] = self.start(rank)

  def logs(self) -> str:
    files = sorted(self.folder.glob('*.log'))
    return '\n'.join(file.read_text()[-1500:] for file in files)

  def disturb(self, number: int, rng: random.Random) -> list[Any]:
    """Kills a worker at a random age, and starts it again."""
    rank = rng.randrange(COUNT)
    others = [other for other in range(COUNT) if other != rank]
    age = rng.uniform(0, 1.5) * statistics.median(self.ages)
    self.wait_for(others, 1)
    time.sleep(max(0.0, self.born[rank] + age - time.time()))
    also = ''
    if number % TOGETHER[0] == TOGETHER[0] - 1:
      also = 'relay'
      self.relay.kill()
      self.relay.join()
      time.sleep(rng.uniform(0, 3))
      self.relay = self.start_relay()
    if number % TOGETHER[1] == TOGETHER[1] - 1:
      also += ' stop'
      other = self.workers[rng.choice(others)]
      os.kill(other.pid, signal.SIGSTOP)
      time.sleep(rng.uniform(2, 5))
      os.kill(other.pid, signal.SIGCONT)
    self.check()
    did = 'trained' if self.trains(rank) else 'came'
    age = time.time() - self.born[rank]
    self.workers[rank].kill()
    self.workers[rank].join()
    time.sleep(rng.choice([0.0, rng.uniform(0, 3)]))
    self.workers[rank] = self.start(rank)
    return [rank, did, round(age, 1), also.strip()]

  def found(self, kills: list[list[Any]]) -> dict[str, Any]:
    """Returns what has happened in this run so far."""
    # By the digest of the lists so far. If the relay and the one worker that
    # has them are killed together, rounds are made again, with other lists.
    digests: dict[str, list[str]] = collections.defaultdict(list)
    rounds: set[int] = set()
    times: list[float] = []
    for rank in range(COUNT):
      for at, _, number, chain, digest in self.lines(rank):
        digests[chain].append(digest)
        rounds.add(number)
        times.append(at)
    in_order = sorted(times)
    gaps = [after - at for at, after in itertools.pairwise(in_order)]
    several = [own for own in digests.values() if len(own) > 1]
    return {
      'kills': kills,
      'rounds': len(rounds),
      'made_again': len(digests) - len(rounds),
      'compared': len(several),
      'unequal': sum(len(set(own)) > 1 for own in several),
      'ended': self.ended,
      'seconds': round(in_order[-1] - in_order[0], 1),
      'seconds_to_the_first_step': round(statistics.median(self.ages), 1),
      'longest_without_a_round': round(max(gaps), 1),
    }


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the totals of all runs, before the runs."""
  every = [kill for run in runs for kill in run['kills']]
  return {
    'kills': len(every),
    'kills_of_one_that_trained': sum('trained' in did for _, did, *_ in every),
    'kills_of_the_relay': sum('relay' in also for *_, also in every),
    'stops': sum('stop' in also for *_, also in every),
    **{
      name: sum(run[name] for run in runs)
      for name in ('rounds', 'made_again', 'compared', 'unequal')
    },
    'ended': sum(len(run['ended']) for run in runs),
    'runs': runs,
  }


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--kills', type=int, default=200, help='in all, of all runs')
  add('--part', type=int, default=50, metavar='N', help='kills in a run')
  add('--out', type=pathlib.Path, required=True, help='the record')
  args = parser.parse_args()
  before: list[dict[str, Any]] = []
  if args.out.exists():
    before = json.loads(args.out.read_text())['runs']
  while (done := sum(len(run['kills']) for run in before)) < args.kills:
    rng = random.Random(done)
    with (
      tempfile.TemporaryDirectory() as folder,
      Run(pathlib.Path(folder)) as run,
    ):
      run.wait_for([*range(COUNT)], COUNT)
      kills: list[list[Any]] = []
      while len(kills) < min(args.part, args.kills - done):
        kills.append(run.disturb(done + len(kills), rng))
        found = summed([*before, run.found(kills)])
        args.out.write_text(json.dumps(found) + '\n')
      run.wait_for([*range(COUNT)], COUNT)
      before.append(run.found(kills))
    args.out.write_text(json.dumps(summed(before)) + '\n')
  found = summed(before)
  print({name: value for name, value in found.items() if name != 'runs'})
  return int(found['unequal'] + found['ended'] > 0)


if __name__ == '__main__':
  sys.exit(main())
