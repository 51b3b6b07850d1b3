"""A training step over slow links, beside averaging: times, and bytes.

    python benchmarks/links.py --out FILE   # as root
    python benchmarks/links.py --out FILE --table
    python benchmarks/links.py --out benchmarks/results/links_owners.json \
        --methods all_gather all_to_all 'AdamW bfloat16' \
        --models '7 M' --workers 2 4 8
    python benchmarks/links.py --out benchmarks/results/links_muon.json \
        --methods demo_muon 'Muon bfloat16' 'AdamW bfloat16'

Every worker is a process in a network namespace of its own, whose one interface
is joined to the others by a bridge; both directions are limited to a rate
(tbf). For a link with delay the interface is a TAP, and this process carries
its frames, each 20 ms later. Nothing outlives the processes.

Methods are the two exchanges, by which DeMo sends k = 32 in signs, `demo_muon`,
and AdamW and Muon on gradients averaged in bfloat16 (in one buffer). All are
compiled once, in the same processes, and take turns at each rate, the order
reversed every other round. A step is a gradient (of each worker's own batch),
and an update: exchange or averaging, and the optimizer. Before each update all
wait for each other, so that its time is its own. Bytes are those that the
interface received meanwhile, a mean over steps and workers. What is in the file
is not measured again. Of methods whose steps to AdamW's loss are known
(`muon.py table`), the table has the minutes to it.

Where namespaces are not allowed it says so, and measures nothing.
"""

import argparse
import contextlib
import ctypes
import fcntl
import functools
import heapq
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import muon

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

LINKS = {  # Mbit/s, and how many ms later a frame arrives
  '10 Mbit/s': (10, 0),
  '100 Mbit/s': (100, 0),
  '1 Gbit/s': (1000, 0),
  '100 Mbit/s, 20 ms': (100, 20),
}
MODELS = {  # and sequences in a step, of all workers; 0: one of each
  '1.0 M': ({}, 16),
  '7 M': ({'width': 512, 'heads': 8}, 0),
}
DEMO = {'method': 'demo', 'topk': 32, 'decay': 0.99}
METHODS = {  # settings of `muon.py`
  'AdamW bfloat16': muon.ROWS['AdamW'],
  'Muon bfloat16': muon.ROWS['Muon'],
  'demo_muon': {**muon.ROWS['demo_muon'], 'method': 'demo_muon'},
  'all_gather': DEMO,
  'all_to_all': {**DEMO, 'update_values': 'ternary'},
}
# The same methods in the results of `muon.py`, whose averages are in float32.
TRAINED = {
  'AdamW bfloat16': 'AdamW',
  'Muon bfloat16': 'Muon',
  'demo_muon': 'demo_muon',
}
HEADER = 66  # bytes of a TCP packet in Ethernet before its data


# One worker, in a namespace of its own ----------------------------------------


def worker(number: int, count: int) -> None:
  """Measures what it is told to on standard input; answers on lines with @."""
  interface = sys.stdin.readline().strip()  # once it is here
  command('ip', 'link', 'set', interface, 'name', 'eth0')
  command('ip', 'addr', 'add', f'10.77.0.{number + 1}/24', 'dev', 'eth0')
  for name in ('lo', 'eth0'):
    command('ip', 'link', 'set', name, 'up')
  # Collectives bind to the address that the name of the host has.
  socket.sethostname(f'worker{number}')
  hosts = pathlib.Path(f'/tmp/hosts-{os.getpid()}')
  hosts.write_text(
    '127.0.0.1 localhost\n'
    + ''.join(f'10.77.0.{i + 1} worker{i}\n' for i in range(count))
  )
  command('mount', '--bind', hosts, '/etc/hosts')
  hosts.unlink()

  import jax
  from jax.experimental import multihost_utils

  jax.distributed.initialize('10.77.0.1:1234', count, number)
  multihost_utils.sync_global_devices('connect')  # gloo waits for 30 s only
  methods = {}
  for line in sys.stdin:
    task = json.loads(line)
    answer = None
    if 'rate' in task:
      limit('eth0', task['rate'])
    else:
      key = task['model'], task['method']
      if key not in methods:
        methods[key] = Method(*key)
      answer = methods[key].measure()
    print('@' + json.dumps(answer), flush=True)


class Method:
  """A model and its optimizer, compiled."""

  def __init__(self, model: str, method: str):
    import cluster
    import jax
    import optimizers
    import text
    import train_lm
    from flax import nnx
    from gpt import GPT, GPTConfig

    count = jax.device_count()
    shape, batch = MODELS[model]
    s = muon.settings_of(METHODS[method] | shape)
    config = GPTConfig(width=s['width'], layers=s['layers'], heads=s['heads'])
    workers = cluster.make_workers(count)
    is_averaged = method.endswith('bfloat16')
    found = optimizers.make(s, workers)
    tx = averaged(s, workers) if is_averaged else found.tx
    self.model = GPT(config, nnx.Rngs(0))
    self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
    for module in (self.model, self.optimizer):
      nnx.update(module, workers.device_put(nnx.state(module)))
    params = nnx.state(self.model, nnx.Param)
    _, received, dense = found.bytes_of(params)
    self.bytes = dense / 2 if is_averaged else received
    self.parameters = sum(x.size for x in jax.tree.leaves(params))
    # Stacked gradients, so that gradient and exchange are timed apart.
    graphdef = nnx.graphdef(self.model)
    value_and_grad = jax.vmap(
      jax.value_and_grad(
        lambda params, tokens: train_lm.loss_fn(
          nnx.merge(graphdef, params), tokens
        )
      ),
      in_axes=(None, 0),
      spmd_axis_name=workers.spmd_axis_name,
    )

    def gradient(model, tokens):
      losses, grads = value_and_grad(
        nnx.state(model, nnx.Param),
        tokens.reshape(count, -1, *tokens.shape[1:]),
      )
      return losses.mean(), grads

    self.gradient = nnx.jit(gradient)
    self.update = nnx.jit(
      lambda model, optimizer, grads: optimizer.update(model, grads),
      donate_argnums=(0, 1),
    )
    self.tokens = text.make_feed(
      text.load(None).train, 0, batch or count, config.context, workers
    )(0)
    self.measure()

  def measure(self) -> dict:
    """Seconds of a gradient and of an update, and its bytes."""
    import jax
    from flax import nnx
    from jax.experimental import multihost_utils

    began = time.perf_counter()
    _, grads = jax.block_until_ready(self.gradient(self.model, self.tokens))
    gradient = time.perf_counter() - began
    multihost_utils.sync_global_devices('update')
    before, began = counters(), time.perf_counter()
    self.update(self.model, self.optimizer, grads)
    jax.block_until_ready(nnx.state(self.model))
    return {
      'gradient': gradient,
      'update': time.perf_counter() - began,
      'moved': {k: v - before[k] for k, v in counters().items()},
      'planned': self.bytes,
      'parameters': self.parameters,
    }


def averaged(s, workers):
  """The example's AdamW or Muon; averages gradients in bfloat16.

  They travel in one buffer: leaf by leaf every one would pay for round trips.
  XLA on CPU widens an all-reduce in bfloat16 to float32. So each worker
  averages a part, and all gather the parts, as a ring does.
  """
  import jax
  import jax.numpy as jnp
  import optax
  import optimizers
  from jax.sharding import PartitionSpec as P

  axis, count = workers.axis_name, workers.count

  def mean_in_bfloat16(x):
    rows = jnp.pad(x.astype(jnp.bfloat16), (0, -x.size % count))
    bits = jax.lax.bitcast_convert_type(rows.reshape(count, -1), jnp.uint16)
    bits = jax.lax.all_to_all(bits, axis, 0, 0, tiled=True)
    rows = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    part = rows.astype(jnp.float32).mean(0).astype(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(part, jnp.uint16)
    bits = jax.lax.all_gather(bits, axis, tiled=True)
    whole = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return whole.astype(jnp.float32)[: x.size]

  def local(stacked):
    flat, treedef = jax.tree.flatten(stacked)
    x = jnp.concatenate([g.ravel() for g in flat])
    x = mean_in_bfloat16(x)
    ends = [sum(g.size for g in flat[:i]) for i in range(1, len(flat))]
    parts = jnp.split(x, ends)
    return treedef.unflatten(
      [p.reshape(g.shape[1:]) for p, g in zip(parts, flat)]
    )

  mean = jax.shard_map(
    local, mesh=workers.mesh, in_specs=P(axis), out_specs=P(), check_vma=False
  )
  return optax.chain(
    optax.stateless(lambda updates, params: mean(updates)),
    optimizers.of_averages(s),
  )


def counters() -> dict[str, int]:
  """What this namespace's interface has received (/sys shows another's)."""
  lines = pathlib.Path('/proc/net/dev').read_text().splitlines()
  (line,) = [line for line in lines if line.strip().startswith('eth0:')]
  bytes_, packets = line.split(':')[1].split()[:2]
  return {'rx_bytes': int(bytes_), 'rx_packets': int(packets)}


# The network ------------------------------------------------------------------


def command(*words) -> None:
  subprocess.run([str(w) for w in words], check=True, stdin=subprocess.DEVNULL)


def limit(interface: str, mbit: float) -> None:
  """Of what leaves the interface; 2 ms of it may leave at once, not more."""
  burst = max(8_000, int(2e-3 * mbit * 1e6 / 8))
  command(
    'tc',
    'qdisc',
    'replace',
    'dev',
    interface,
    'root',
    'tbf',
    'rate',
    f'{mbit}mbit',
    'burst',
    f'{burst}b',
    'latency',
    '400ms',
  )


def allowed() -> str | None:
  """Why namespaces cannot be had; None if they can."""
  try:
    subprocess.run(
      [
        'unshare',
        '--net',
        '--uts',
        '--mount',
        'sh',
        '-ec',
        'ip link add one type veth peer name two;'
        'tc qdisc add dev one root tbf rate 1mbit burst 64kb latency 100ms',
      ],
      check=True,
      capture_output=True,
      text=True,
    )
  except FileNotFoundError as error:
    return f'{error.filename} is not here'
  except subprocess.CalledProcessError as error:
    return (error.stderr or str(error)).strip()
  return None


class Network:
  """`count` workers, and what joins them."""

  def __init__(self, count: int, delay: int):
    libc = ctypes.CDLL(None)
    self.count, self.delay = count, delay
    # Of their own: those of a network before are gone a while after it.
    link, end = (f'{word}{count}d{delay}n' for word in ('link', 'end'))
    self.ends = [f'{end}{i}' for i in range(count)]
    self.relay = None
    if delay:
      self.relay = Relay(count, delay / 1000, link)
    else:
      command('ip', 'link', 'add', 'name', 'bridge', 'type', 'bridge')
      command('ip', 'link', 'set', 'bridge', 'up')
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    environment.pop('XLA_FLAGS', None)
    self.processes = [
      subprocess.Popen(
        [
          'unshare',
          '--net',
          '--uts',
          '--mount',
          sys.executable,
          str(pathlib.Path(__file__).resolve()),
          '--worker',
          str(i),
          '--count',
          str(count),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
      )  # with us
      for i in range(count)
    ]
    own = os.readlink('/proc/self/ns/net')
    for i, process in enumerate(self.processes):
      while os.readlink(f'/proc/{process.pid}/ns/net') == own:
        time.sleep(0.05)
      name = f'{link}{i}'
      if not delay:
        command(
          'ip',
          'link',
          'add',
          name,
          'type',
          'veth',
          'peer',
          'name',
          self.ends[i],
        )
        command('ip', 'link', 'set', self.ends[i], 'master', 'bridge', 'up')
      command('ip', 'link', 'set', name, 'netns', process.pid)
      process.stdin.write(f'{name}\n')
    self._flush()

  def _flush(self) -> None:
    for process in self.processes:
      process.stdin.flush()

  def ask(self, **task) -> list:
    """All do it; all answers."""
    for process in self.processes:
      process.stdin.write(json.dumps(task) + '\n')
    self._flush()
    answers = []
    for process in self.processes:
      for line in process.stdout:
        if line.startswith('@'):
          answers.append(json.loads(line[1:]))
          break
      else:
        raise SystemExit(f'A worker has ended with {process.wait()}.')
    return answers

  def set_rate(self, mbit: float) -> None:
    """Of all interfaces, in both directions (with delay: of what is sent)."""
    self.ask(rate=mbit)
    if not self.delay:
      for end in self.ends:
        limit(end, mbit)

  def close(self) -> None:
    """Ends the workers, and with them all that was made."""
    for process in self.processes:
      process.kill()
      process.wait()
    if self.relay:
      self.relay.close()
    else:
      command('ip', 'link', 'del', 'bridge')


class Relay(threading.Thread):
  """Carries frames between TAP interfaces, each `delay` seconds later."""

  def __init__(self, count: int, delay: float, name: str = 'link'):
    super().__init__(daemon=True)
    self.files, self.delay, self.open = [], delay, True
    for i in range(count):
      file = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
      # TUNSETIFF, IFF_TAP | IFF_NO_PI
      request = struct.pack('16sH', f'{name}{i}'.encode(), 0x1002)
      fcntl.ioctl(file, 0x400454CA, request)
      self.files.append(file)
    self.start()

  def run(self) -> None:
    """Until it is closed."""
    ports: dict[bytes, int] = {}  # by Ethernet address
    waiting: list[tuple[float, int, int, bytes]] = []
    number = itertools.count()  # in their order, where times are equal
    while self.open:
      now = time.monotonic()
      pause = waiting[0][0] - now if waiting else 0.1
      ready = select.select(self.files, [], [], max(0, min(pause, 0.1)))[0]
      now = time.monotonic()
      for file in ready:
        with contextlib.suppress(BlockingIOError, OSError):
          for _ in range(64):
            frame = os.read(file, 2048)
            ports[frame[6:12]] = file
            item = now + self.delay, next(number), file, frame
            heapq.heappush(waiting, item)
      while waiting and waiting[0][0] <= now:
        _, _, source, frame = heapq.heappop(waiting)
        known = ports.get(frame[:6])
        for file in [known] if known else self.files:
          if file != source:
            with contextlib.suppress(OSError):
              os.write(file, frame)

  def close(self) -> None:
    """Takes the interfaces away."""
    self.open = False
    self.join()
    for file in self.files:
      os.close(file)


# All measurements -------------------------------------------------------------


def measure(args: argparse.Namespace, done: set) -> Iterator[dict]:
  """Yields a record for each number of workers, link, model and method."""
  for count in args.workers:
    for delays in (False, True):
      links = {
        name: LINKS[name]
        for name in args.links
        if bool(LINKS[name][1]) == delays and (count, name) not in done
      }
      if links:
        network = Network(count, next(iter(links.values()))[1])
        try:
          yield from measure_links(network, links, args)
        finally:
          network.close()


def measure_links(
  network: Network, links: dict, args: argparse.Namespace
) -> Iterator[dict]:
  methods = args.methods
  for model in args.models:
    for method in methods:  # compile, before there is a limit
      began = time.monotonic()
      network.ask(model=model, method=method)
      print(
        f'{network.count} {model} {method}: compiled in'
        f' {time.monotonic() - began:.0f} s',
        flush=True,
      )
  for link, (rate, delay) in links.items():
    network.set_rate(rate)
    for model in args.models:
      found: dict[str, list] = {method: [] for method in methods}
      for number in range(1 if args.trial else 3):
        for method in methods[:: -1 if number % 2 else 1]:
          found[method].append(network.ask(model=model, method=method))
      for method, answers in found.items():
        yield {
          'workers': network.count,
          'link': link,
          'rate': rate,
          'delay': delay,
          'model': model,
          'method': method,
          **summary(answers),
        }


def summary(rounds: list[list[dict]]) -> dict:
  """Of all rounds and workers of one method."""
  gradient, update = (
    [max(answer[part] for answer in answers) for answers in rounds]
    for part in ('gradient', 'update')
  )
  step = [g + u for g, u in zip(gradient, update)]
  every = [answer['moved'] for answers in rounds for answer in answers]
  received, packets = (
    statistics.mean(moved[name] for moved in every)
    for name in ('rx_bytes', 'rx_packets')
  )
  return {
    'rounds': len(rounds),
    'parameters': rounds[0][0]['parameters'],
    'gradient': statistics.median(gradient),
    'update': statistics.median(update),
    'step': statistics.median(step),
    'steps': [round(s, 4) for s in step],
    'share': statistics.median(u / s for u, s in zip(update, step)),
    'planned': rounds[0][0]['planned'],
    'rx': received,
    'rx_data': received - HEADER * packets,
  }


def table(records: list[dict]) -> None:
  averaged = 'AdamW bfloat16'
  print(
    '| model | workers | link | method | step, s | of that the update |'
    f' {averaged} / this | received, planned | at the interface |'
    ' without headers | to the loss, min |'
  )
  print('|---|---|---|---|---|---|---|---|---|---|---|')
  for r in records:
    base = next(
      b
      for b in records
      if b['method'] == averaged
      and all(b[k] == r[k] for k in ('model', 'workers', 'link'))
    )
    print(
      f'| {r["model"]} | {r["workers"]} | {r["link"]} | {r["method"]} |'
      f' {r["step"]:.3g} | {100 * r["share"]:.0f} % |'
      f' {base["step"] / r["step"]:.2f} |'
      f' {r["planned"] / 1e3:,.1f} kB | {r["rx"] / 1e3:,.1f} kB |'
      f' {100 * (r["rx_data"] / r["planned"] - 1):+.1f} % |'
      f' {to_the_loss(r)} |'
    )


def to_the_loss(record: dict) -> str:
  """Returns the minutes to AdamW's loss, for the model that was trained."""
  if record['method'] not in TRAINED or record['model'] != '1.0 M':
    return ''
  return f'{record["step"] * steps_to_the_loss(record["method"]) / 60:.1f}'


@functools.cache
def steps_to_the_loss(method: str) -> float:
  runs = muon.read()
  adamw = muon.runs_of(muon.ROWS['AdamW'], runs)
  if TRAINED[method] == 'AdamW':  # whose mean is there at the end
    return muon.DEFAULTS['steps']
  loss = statistics.mean(r['loss'] for r in adamw)
  found = muon.runs_of(muon.ROWS[TRAINED[method]], runs)
  return statistics.mean(muon.steps_to(r, loss) for r in found)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--out', type=pathlib.Path, required=True)
  add('--table', action='store_true', help='of what is in the file')
  add('--trial', action='store_true', help='one round each')
  add('--workers', type=int, nargs='+', default=[4], help='how many')
  add('--models', choices=MODELS, nargs='+', default=['1.0 M'])
  add('--links', choices=LINKS, nargs='+', default=list(LINKS))
  add('--methods', choices=METHODS, nargs='+', default=list(METHODS))
  add('--inside', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if not args.table and not args.inside:
    problem = allowed()
    if problem:
      print(
        f'Nothing is measured: network namespaces cannot be had ({problem})'
        '. Root may make them: unshare, ip, and tc with tbf are needed.'
      )
      return
    os.execvp(
      'unshare',
      ['unshare', '--net', '--mount', sys.executable, *sys.argv, '--inside'],
    )
  if not args.table:
    import jax

    command('ip', 'link', 'set', 'lo', 'up')
    records = json.loads(args.out.read_text()) if args.out.exists() else []
    whole = len(args.models) * len(args.methods)
    places = [(r['workers'], r['link']) for r in records]
    done = {place for place in places if places.count(place) == whole}
    records = [r for r in records if (r['workers'], r['link']) in done]
    with tempfile.TemporaryDirectory(prefix='jax-') as cache:
      os.environ |= {
        'JAX_COMPILATION_CACHE_DIR': cache,
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.2',
      }
      for record in measure(args, done):
        load = round(os.getloadavg()[0], 1)
        records.append({**record, 'jax': jax.__version__, 'load': load})
        print(
          f'{record["workers"]} {record["link"]} {record["model"]}'
          f' {record["method"]}: {record["steps"]}',
          flush=True,
        )
        args.out.write_text(json.dumps(records, indent=1) + '\n')
  records = json.loads(args.out.read_text())
  table(records)


if __name__ == '__main__':
  if sys.argv[1:2] == ['--worker']:
    worker(int(sys.argv[2]), int(sys.argv[4]))
  else:
    main()
