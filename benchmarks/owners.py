"""Chunks with owners beside an all-gather: merging, and slow links.

    python benchmarks/owners.py merge --out benchmarks/results/owners.json
    python benchmarks/owners.py model    # the tables of seconds over links
    python benchmarks/owners.py plot     # docs/owners.png

`merge` times what one worker does with what has arrived, by N: reading and
merging all messages, or those about its own chunks, encoding its share of the
updates and reading all shares. Others' messages are there already, packed from
random values. All rows take turns in one process, the order reversed every
other round.

`model` computes seconds per exchange, from the bytes of `demo_optax.plan`: a
worker sends and receives at full rate at the same time, and every message that
waits for another one costs a latency more. All-gathers and all-reduces are
rings: N - 1 and 2 (N - 1) messages, one after the other; with `--pattern
doubling` log2 N and 2 log2 N, of the same bytes. The messages of an all-to-all
are on their way together: one latency, and for each the time it takes to hand
it to the network. What `merge` has measured is added, per parameter.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import step as step_lib

import demo_optax
from demo_optax.__main__ import paper_model
from demo_optax.exchange import algorithm as exchange_lib
from demo_optax.exchange import arithmetic
from demo_optax.exchange import message as wire
from demo_optax.numerics import platform
from demo_optax.workers import Group

ROOT = pathlib.Path(__file__).parents[1]
TOPK, VALUES = 32, 'sign'


def compressor() -> demo_optax.Compressor:
  return demo_optax.dct_topk(topk=TOPK, values=VALUES)


# What has arrived -------------------------------------------------------------


def config_of(
  params: Any, exchange: str, count: int
) -> exchange_lib.ExchangeConfig:
  """Returns what is static in an exchange of `count` workers."""
  layout = step_lib.layout_of(params, compressor())
  owners = count if exchange == 'all_to_all' else None
  return exchange_lib.ExchangeConfig(
    layout, 'senders', platform.of(), owners, 'ternary'
  )


def random_updates(
  config: exchange_lib.ExchangeConfig, count: int
) -> jax.Array:
  """Packs what `count` owners tell: uint8 `[count, bytes]`."""
  owners = config.owners
  buckets = dict(enumerate(config.packer.read))

  def update(key: jax.Array) -> jax.Array:
    report = wire.Report(
      jnp.array(config.num_owners),
      jnp.ones((wire.ENERGIES,)),
      jnp.ones((len(buckets),)),
    )
    random = {
      i: jax.random.normal(jax.random.fold_in(key, i), b.shape)
      for i, b in buckets.items()
    }
    return owners.pack(random, {}, report)[0]

  return step_lib.repeated(update, count)


# Merging ----------------------------------------------------------------------


class Merging:
  """What one worker does with what has arrived, compiled."""

  def __init__(self, params: Any, exchange: str, count: int) -> None:
    config = config_of(params, exchange, count)
    group = Group('workers', count)
    self.inputs = [step_lib.messages(config.packer, count)]
    if config.owners is not None:
      self.inputs.append(random_updates(config, count - 1))

    def merge(arrived: jax.Array, others: Any = None) -> Any:
      packer, owners = config.packer, config.owners
      step = jnp.zeros((), jnp.int32)
      received, report = packer.unpack({packer.name: arrived}, group)
      merged, distinct = zip(
        *[
          arithmetic.merge(b, received[i], 'senders', step)
          for i, b in enumerate(packer.read)
        ]
      )
      report = report._replace(distinct=distinct)
      if owners is not None:
        own, _ = owners.pack(merged, {}, report)
        found, report = owners.unpack(
          jnp.concatenate([own[None], others]), distinct, group
        )
        merged = [found[i] for i in range(len(merged))]
      updates = {}
      for i, x in enumerate(merged):
        updates |= config.layout.cut(i, x, step)
      return updates, report

    self.compiled = jax.jit(merge).lower(*self.inputs).compile()
    _, report = self.compiled(*self.inputs)
    assert report.num_valid == count, 'not all messages were read'

  def run(self) -> None:
    """Merges once."""
    jax.block_until_ready(self.compiled(*self.inputs))


def merging(args: argparse.Namespace) -> dict[str, Any]:
  """Times merging for every number of workers, both ways, in turn.

  Prints and returns medians, least times and ratios.
  """
  params = step_lib.random_tree(step_lib.TREES[args.tree], 0)
  rows = {
    (exchange, count): Merging(params, exchange, count)
    for exchange in ('all_gather', 'all_to_all')
    for count in args.workers
    if exchange == 'all_to_all' or count <= args.most
  }
  load = os.getloadavg()[0]
  seconds = step_lib.measure(rows, args.rounds)
  base = seconds['all_to_all', args.workers[0]]
  size = sum(math.prod(s) for s in step_lib.TREES[args.tree].values())
  print(
    f'\n{args.tree}: {size:,} parameters, k = {TOPK} {VALUES}; {args.rounds}'
    f' rounds, load {load:.1f} to {os.getloadavg()[0]:.1f}\n\n'
    '| exchange | N | ms, median | ms, least | of all_to_all at N ='
    f' {args.workers[0]}: median (least of both) | of all_gather |\n'
    '|---|---|---|---|---|---|'
  )
  found = []
  for (exchange, count), own in seconds.items():
    gathered = seconds.get(('all_gather', count))
    print(
      f'| {exchange} | {count} | {1e3 * statistics.median(own):.0f} |'
      f' {1e3 * min(own):.0f} | {ratio(own, base):.2f}'
      f' ({min(own) / min(base):.2f}) |'
      f' {f"{ratio(own, gathered):.3f}" if gathered else ""} |'
    )
    found.append(
      {
        'exchange': exchange,
        'workers': count,
        'median': statistics.median(own),
        'least': min(own),
      }
    )
  return {
    'tree': args.tree,
    'parameters': size,
    'rounds': args.rounds,
    'load': round(load, 1),
    'jax': jax.__version__,
    'rows': found,
  }


def ratio(seconds: list[float], base: list[float]) -> float:
  """Returns the median of the ratios within a round."""
  return statistics.median(a / b for a, b in zip(seconds, base))


# Links ------------------------------------------------------------------------

# Bits per second, and seconds until the first byte of a message is there.
LINKS = {
  '100 Mbit/s, 20 ms': (100e6, 20e-3),
  '1 Gbit/s, 2 ms': (1e9, 2e-3),
  '10 Gbit/s, 0.1 ms': (10e9, 1e-4),
}
HANDING_OVER = 20e-6  # seconds, of one message of many to the network
WORKERS = (8, 64, 256, 1024, 4096)
METHODS = {
  'all_gather': {'exchange': 'all_gather'},
  'all_to_all, ternary': {'exchange': 'all_to_all', 'update_values': 'ternary'},
  'all_to_all, int4': {'exchange': 'all_to_all', 'update_values': 'int4'},
  'ring all-reduce, bfloat16': None,
}


def seven_billion() -> dict[str, Any]:
  """Shapes of a 7B: 32 layers of d = 4096, as a Llama has them."""
  d, hidden = 4096, 11008
  layer = {
    'q': [d, d],
    'k': [d, d],
    'v': [d, d],
    'o': [d, d],
    'gate': [d, hidden],
    'up': [d, hidden],
    'down': [hidden, d],
    'norm1': [d],
    'norm2': [d],
  }
  layers = {str(number): layer for number in range(32)}
  return {
    'embedding': [32000, d],
    'head': [32000, d],
    'norm': [d],
    'layers': layers,
  }


MODELS = {
  '300M': paper_model('300M'),
  '1B': paper_model('1B'),
  '7B': jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, 'float32'),
    seven_billion(),
    is_leaf=lambda x: isinstance(x, list),
  ),
}


class Cost(NamedTuple):
  """What an exchange takes.

  Attributes:
    received: bytes.
    link: seconds on the link.
    merging: seconds of one worker's computing.
    message: bytes of the smallest message.
  """

  received: float
  link: float
  merging: float
  message: float


PATTERNS = {
  'ring': lambda count: count - 1,
  'doubling': lambda count: math.ceil(math.log2(count)),
}


def costs_of(
  params: Any, args: argparse.Namespace
) -> dict[tuple[str, int, str], Cost]:
  """Computes what exchanges take, by method, workers and link."""
  merge, costs = merging_of(args.merging), {}
  for (method, options), n in itertools.product(METHODS.items(), WORKERS):
    plan = demo_optax.plan(params, compressor(), n, **(options or {}))
    exchange = options and options['exchange']
    received, part = plan.dense_bytes(2), 2 * plan.size / n
    if exchange:
      received, part = plan.received_bytes, plan.payload_bytes
    if exchange == 'all_to_all':
      part = min(part, plan.update_bytes) / n
    computing = plan.size * merge(exchange, n) if exchange else 0.0
    # Turns that gather messages or updates, and one of the all-to-all.
    turns = PATTERNS[args.pattern](n) * (1 if exchange else 2)
    is_sent_apart = exchange == 'all_to_all'
    for link, (rate, latency) in LINKS.items():
      seconds = 8 * received / rate + (turns + is_sent_apart) * latency
      seconds += is_sent_apart * (n - 1) * HANDING_OVER
      costs[method, n, link] = Cost(received, seconds, computing, part)
  return costs


def merging_of(path: pathlib.Path) -> Callable[[str, int], float]:
  """Returns seconds per parameter of merging: lines through what was timed."""
  record = json.loads(path.read_text())['merge']
  gathered, owned = (
    [
      (r['workers'], r['median'] / record['parameters'])
      for r in record['rows']
      # Where many owners share a small tree, they merge padding.
      if r['exchange'] == exchange and r['workers'] <= 64
    ]
    for exchange in ('all_gather', 'all_to_all')
  )
  # That owners' time does not grow is what was found: noise is no slope.
  lines = {
    'all_gather': np.polyfit(*zip(*gathered), 1),
    'all_to_all': [0, max(seconds for _, seconds in owned)],
  }
  return lambda exchange, count: float(np.polyval(lines[exchange], count))


def model(args: argparse.Namespace) -> None:
  """Prints seconds per exchange, link and merging."""
  for name, tree in MODELS.items():
    costs = costs_of(tree, args)
    print(f'\n{name}: MB received, and bytes of the smallest message\n')
    print('| N | ' + ' | '.join(METHODS) + ' |')
    print('|---|' + '---|' * len(METHODS))
    link = next(iter(LINKS))
    for n in WORKERS:
      cells = [
        f'{costs[m, n, link].received / 1e6:,.0f},'
        f' {costs[m, n, link].message:,.0f}'
        for m in METHODS
      ]
      print(f'| {n} | ' + ' | '.join(cells) + ' |')
    print(f'\n{name}: seconds on the link + merging\n')
    print('| link | N | ' + ' | '.join(METHODS) + ' |')
    print('|---|---|' + '---|' * len(METHODS))
    for link in LINKS:
      for n in WORKERS:
        cells = [
          f'{short(costs[m, n, link].link)} +'
          f' {short(costs[m, n, link].merging)}'
          for m in METHODS
        ]
        print(f'| {link} | {n} | ' + ' | '.join(cells) + ' |')


def short(seconds: float) -> str:
  """Writes seconds in two digits."""
  return f'{float(f"{seconds:.2g}"):,g}'


def plot(args: argparse.Namespace) -> None:
  """Draws seconds against N, a panel for each model and link."""
  sys.path.insert(0, str(ROOT / 'examples'))
  import picture

  plt = picture.pyplot()
  if plt is None:
    return
  figure, grid = plt.subplots(
    len(MODELS), len(LINKS), figsize=(10, 8.5), sharex=True, sharey=True
  )
  styles = ('C3^-', 'C0o-', 'C2s-', 'C1v-')
  for row, (name, tree) in enumerate(MODELS.items()):
    costs = costs_of(tree, args)
    grid[row, 0].set_ylabel(f'{name}: modelled seconds')
    for axes, link in zip(grid[row], LINKS):
      for method, style in zip(METHODS, styles):
        found = [costs[method, n, link] for n in WORKERS]
        (line,) = axes.loglog(
          WORKERS, [c.link for c in found], style, label=method, markersize=4
        )
        if found[0].merging:
          axes.loglog(
            WORKERS,
            [c.link + c.merging for c in found],
            ':',
            linewidth=1.2,
            color=line.get_color(),
          )
      axes.set_xticks(WORKERS, [str(n) for n in WORKERS])
      axes.minorticks_off()
  for axes, link in zip(grid[0], LINKS):
    axes.set_title(link, fontsize=10)
  for axes in grid[-1]:
    axes.set_xlabel('workers')
  axes = grid[-1, 0]  # where there is room
  axes.plot([], [], 'k:', label='and merging, on two CPU cores')
  axes.legend(frameon=False, fontsize=8, loc='lower right')
  figure.suptitle('A cost model of links; merging as measured on two CPU cores')
  picture.save(figure, args.picture)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  add = parser.add_argument
  add('what', choices=['merge', 'model', 'plot'])
  add('--tree', choices=step_lib.TREES, default='10M')
  add('--workers', type=int, nargs='+', default=[4, 16, 64])
  add('--most', type=int, default=64, help='workers with an all-gather')
  add('--rounds', type=int, default=9)
  add('--out', type=pathlib.Path, help='where times are added to')
  add(
    '--merging',
    type=pathlib.Path,
    default=ROOT / 'benchmarks/results/owners.json',
  )
  add('--pattern', choices=PATTERNS, default='ring')
  add('--picture', type=pathlib.Path, default=ROOT / 'docs/owners.png')
  args = parser.parse_args()
  if args.what != 'merge':
    {'model': model, 'plot': plot}[args.what](args)
    return
  found = merging(args)
  if args.out:
    old = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.write_text(json.dumps({**old, 'merge': found}, indent=1) + '\n')


if __name__ == '__main__':
  main()
