"""A step: time, memory and compilation, beside AdamW, SGD and PyTorch DeMo.

    python benchmarks/step.py --reference PATH --memory --out FILE
    python benchmarks/step.py --trees 10M --topk 8 32 --peers 1 --rounds 3
    python benchmarks/step.py --trees 300M --topk 32 --values float32 \
        --peers 1 8 --muon --rounds 15 --out FILE    # on a GPU or TPU

Every row is one worker's own step from its gradients to its new parameters
(`optax.apply_updates` included), state and parameters donated. At N workers the
other N - 1 messages are there already, of random values at random places: it is
their reading and merging that is timed, not their making. `--reference` is a
copy of the published `demo.py` (needs torch and einops), with one process.
`copy` reads and writes the parameters: 8 times the ratio to it are the bytes
per parameter that the device copies in that time.

All rows take turns in one process, the order reversed every other round. Times
are medians; ratios are medians of the ratios within a round. `--memory` runs
each row once more in a process of its own, for the peak of its memory.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import demo_optax
from demo_optax.__main__ import paper_model
from demo_optax.compressors.layout import Layout
from demo_optax.exchange import message as wire
from demo_optax.workers import Group


def gpt(width: int, layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
  """Shapes of a GPT's leaves with tied embeddings, and of four odd ones."""
  d = width
  layer = {
    'norm1': (d,),
    'norm2': (d,),
    'qkv': (d, 3 * d),
    'qkv_bias': (3 * d,),
    'proj': (d, d),
    'proj_bias': (d,),
    'up': (d, 4 * d),
    'up_bias': (4 * d,),
    'down': (4 * d, d),
    'down_bias': (d,),
  }
  shapes = {'tokens': (vocab, d), 'positions': (1024, d), 'norm': (d,)}
  for number in range(layers):
    shapes |= {f'{number} {name}': shape for name, shape in layer.items()}
  return shapes | {
    'odd1': (300, 96),
    'odd2': (513,),
    'odd3': (1000, 77),
    'odd4': (7,),
  }


TREES = {
  'tiny': gpt(64, 1, 500),
  '42M': gpt(512, 8, 32000),
  '10M': gpt(256, 8, 14000),
  **{
    name: {
      jax.tree_util.keystr(path, simple=True, separator='/'): x.shape
      for path, x in jax.tree.leaves_with_path(paper_model(name))
    }
    for name in ('300M', '1B')
  },
}


@dataclasses.dataclass(frozen=True, eq=False)
class OneOfMany(demo_optax.Workers):
  """One worker, who finds the messages of others beside its own.

  Attributes:
    others: holds uint8 `[others, bytes]`, traced.
  """

  others: list[jax.Array] = dataclasses.field(default_factory=list)

  @property
  def group(self) -> Group:
    """As the worker's function sees it: all of them."""
    (others,) = self.others
    return WithOthers(self.axis_name, 1 + len(others), (), others)


@dataclasses.dataclass(frozen=True, eq=False)
class WithOthers(Group):
  """A worker, and what others have sent."""

  others: jax.Array | None = None

  def send_and_receive(self, message: Any) -> tuple[Any, None]:
    """All messages, the own one first."""
    arrived, _ = super().send_and_receive(message)
    gathered = arrived[wire.GATHERED]
    return {wire.GATHERED: jnp.concatenate([gathered, self.others])}, None


def layout_of(params: Any, compressor: demo_optax.Compressor) -> Layout:
  workers = demo_optax.Workers.simulated(1)
  tx = demo_optax.scale_by_demo(compressor, workers=workers)
  return jax.eval_shape(tx.init, params).layout.layout


def messages(packer: wire.Packer, count: int) -> jax.Array:
  """What `count` workers send to one: random values at random places.

  Returns uint32 `[count, ...]`.
  """

  def message(key: jax.Array) -> jax.Array:
    selected = []
    for bucket in packer.buckets:
      f, rows = bucket.format, bucket.rows
      key, *keys = jax.random.split(key, 3)
      step, first = f.n // f.k, jnp.arange(f.k, dtype=jnp.int32)[None]
      within = jax.random.randint(keys[0], (rows, f.k), 0, step)
      indices = first * step + within if f.k < f.n else None
      values = jax.random.normal(keys[1], (rows, f.k), f.dtype)
      selected.append(wire.Selected(indices, values))
    packed, _ = packer.pack(selected, {}, jnp.ones(()), jnp.array(True))
    data = packed[packer.name]
    return data if packer.num_owners is None else data[0]

  return repeated(message, count)


def repeated(make: Callable[[jax.Array], jax.Array], count: int) -> jax.Array:
  """Makes up to 64 different rows, and as many copies as it takes."""
  keys = jax.random.split(jax.random.key(1), min(count, 64))
  rows = jax.jit(lambda keys: jax.lax.map(make, keys))(keys)
  return jnp.tile(rows, (-(-count // 64), *(1,) * (rows.ndim - 1)))[:count]


def random_tree(shapes: dict, seed: int) -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return {
    name: 0.02 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, shapes.items())
  }


class Copy:
  """Reads the parameters and writes as many."""

  def __init__(self, shapes: dict) -> None:
    self.params, self.facts = random_tree(shapes, 0), {}
    self.copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))

  def run(self) -> None:
    """A copy."""
    jax.block_until_ready(self.copy(self.params))


class Row:
  """A compiled step and what it works on; `facts` are known once compiled."""

  def __init__(self, shapes: dict, name: str) -> None:
    method, *options = name.split()
    self.params, gradients = random_tree(shapes, 0), random_tree(shapes, 1)
    others, workers = None, demo_optax.Workers.simulated(1)
    if method == 'demo':
      topk, values, peers = (option.split('=')[1] for option in options)
      compressor = demo_optax.dct_topk(topk=int(topk), values=values)
      if int(peers) > 1:
        workers = OneOfMany('simulated', 'workers', 1)
        packer = wire.Packer(layout_of(self.params, compressor).buckets)
        others = messages(packer, int(peers) - 1)
      tx = demo_optax.demo(1e-3, workers=workers, compressor=compressor)
    elif method == 'demo_muon':
      tx = demo_optax.demo_muon(1e-2, workers=workers)
    elif method == 'muon':
      tx = optax.contrib.muon(
        1e-3,
        muon_weight_dimension_numbers=(
          demo_optax.recipes.muon_dimension_numbers
        ),
      )
    else:
      tx = {'adamw': optax.adamw(1e-3), 'sgd': optax.sgd(1e-3, 0.9)}[method]
    if method.startswith('demo'):
      gradients = jax.tree.map(lambda g: g[None], gradients)
    self.state, self.inputs = tx.init(self.params), (gradients, others)

    def step(
      params: Any, state: Any, gradients: Any, others: Any
    ) -> tuple[Any, Any]:
      if others is not None:
        workers.others[:] = [others]
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state

    start = time.process_time()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
      self.params, self.state, *self.inputs
    )
    traced = time.process_time()
    self.compiled = lowered.compile()
    size = sum(p.nbytes for p in self.params.values())
    memory = self.compiled.memory_analysis()
    self.facts = {
      'trace_cpu_s': traced - start,
      'compile_cpu_s': time.process_time() - traced,
      'hlo_instructions': self.compiled.as_text().count(' = '),
      'temporaries_to_params': memory.temp_size_in_bytes / size,
    }

  def run(self) -> None:
    """A step."""
    self.params, self.state = jax.block_until_ready(
      self.compiled(self.params, self.state, *self.inputs)
    )


class Published:
  """The published implementation, on the CPU."""

  def __init__(self, shapes: dict, path: pathlib.Path) -> None:
    import torch

    spec = importlib.util.spec_from_file_location('published', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not torch.distributed.is_initialized():
      torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
      )
    torch.manual_seed(0)
    tensors = [torch.randn(shape) * 0.02 for shape in shapes.values()]
    self.params = [torch.nn.Parameter(x) for x in tensors]
    self.gradients = [torch.randn_like(x) for x in tensors]
    self.optimizer = module.DeMo(self.params, lr=1e-3)
    self.facts: dict[str, float] = {}
    self.reset()

  def reset(self) -> None:
    """The step overwrites the gradients."""
    for param, gradient in zip(self.params, self.gradients):
      param.grad = gradient.clone()

  def run(self) -> None:
    """A step."""
    self.optimizer.step()


def make(tree: str, name: str, reference: pathlib.Path | None) -> Any:
  if name == 'published':
    return Published(TREES[tree], reference)
  if name == 'copy':
    return Copy(TREES[tree])
  return Row(TREES[tree], name)


def measure(rows: dict[Any, Any], rounds: int) -> dict[Any, list[float]]:
  """Seconds of every row in every round, after one round to warm up.

  Of `run` of a row; its `reset`, if it has one, comes before.
  """
  seconds: dict[Any, list[float]] = {name: [] for name in rows}
  for number in range(rounds + 1):
    for name in list(rows)[:: 1 if number % 2 else -1]:
      if hasattr(rows[name], 'reset'):
        rows[name].reset()
      start = time.perf_counter()
      rows[name].run()
      seconds[name].append(time.perf_counter() - start)
  return {name: times[1:] for name, times in seconds.items()}


def peak_memory(tree: str, name: str, reference: pathlib.Path | None) -> float:
  """Peak of a process with one row, in bytes per byte of parameters."""
  command = [sys.executable, __file__, '--peak', tree, name]
  if reference:
    command += ['--reference', str(reference)]
  peak = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
  return peak / sum(4 * math.prod(shape) for shape in TREES[tree].values())


def print_peak(tree: str, name: str, reference: pathlib.Path | None) -> None:
  """The peak of this process after two steps, in bytes."""
  row = make(tree, name, reference)
  for _ in range(2):
    row.run()
  # Not getrusage: a new process inherits the peak of the one that started it.
  status = pathlib.Path('/proc/self/status').read_text()
  kilobytes = status.split('VmHWM:')[1].split()[0]
  print(1024 * int(kilobytes))


def table(found: dict[str, dict[str, Any]], bases: list[str]) -> None:
  facts = [key for key in next(iter(found.values())) if key != 'ratios']
  columns = [*facts, *(f'/ {base}' for base in bases)]
  print(f'{"":<26}' + ''.join(f'{column:>14.14}' for column in columns))
  for name, row in found.items():
    cells = [row.get(key) for key in facts]
    cells += [row['ratios'][base] for base in bases]
    print(
      f'{name:<26}'
      + ''.join(
        f'{"":>14}' if cell is None else f'{cell:14.3f}' for cell in cells
      )
    )


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--trees', nargs='+', default=['42M', '10M'])
  parser.add_argument('--topk', nargs='+', type=int, default=[1, 8, 32, 64])
  values = ['float32', 'int8', 'sign']
  parser.add_argument('--values', nargs='+', default=values)
  parser.add_argument('--peers', nargs='+', type=int, default=[1, 8, 64])
  parser.add_argument(
    '--full',
    action='store_true',
    help='all combinations, not only what differs in one',
  )
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--muon', action='store_true', help='also Muon itself')
  parser.add_argument('--memory', action='store_true')
  parser.add_argument('--reference', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--peak', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.reference and not args.reference.is_file():
    parser.error(f'--reference must be a file, got {args.reference}.')
  return args


def names(args: argparse.Namespace) -> list[str]:
  """All rows; of demo those that differ in one option from the first ones."""
  found = ['adamw', 'sgd', 'copy'] + ['published'] * bool(args.reference)
  found += ['muon', 'demo_muon'] * args.muon
  base = (
    32 if 32 in args.topk else args.topk[0],
    args.values[0],
    args.peers[0],
  )
  for options in itertools.product(args.topk, args.values, args.peers):
    changed = sum(a != b for a, b in zip(options, base))
    if args.full or changed <= 1:
      found.append('demo k={} values={} N={}'.format(*options))
  return found


def main() -> None:
  args = parse()
  if args.peak:
    print_peak(*args.peak, args.reference)
    return
  results = {}
  for tree in args.trees:
    rows = {name: make(tree, name, args.reference) for name in names(args)}
    seconds = measure(rows, args.rounds)
    bases = [name for name in rows if not name.startswith('demo')]
    found = {}
    for name, row in rows.items():
      found[name] = {'ms': 1e3 * statistics.median(seconds[name]), **row.facts}
      if args.memory:
        found[name]['peak'] = peak_memory(tree, name, args.reference)
      found[name]['ratios'] = {
        base: statistics.median(
          a / b for a, b in zip(seconds[name], seconds[base])
        )
        for base in bases
      }
    print(f'\n{tree}')
    table(found, bases)
    results[tree] = found
    del rows, row  # before those of the next tree
  if args.out:
    record = {
      'jax': jax.__version__,
      'device': jax.devices()[0].device_kind,
      'machine': platform.machine(),
      'rounds': args.rounds,
      'results': results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
