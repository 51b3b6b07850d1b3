"""Trains the GPT with workers of several devices, which shard its parameters.

    python examples/train_sharded.py                # 2 workers of 4 devices
    python examples/train_sharded.py --workers 4 --devices 2 --steps 400

If there are too few devices, they are simulated on the CPU. The script repeats
the training with workers of one device, and compares memory, traffic per mesh
axis, and losses. It also takes the flags of train_lm.py.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import sys
from typing import Any

import flags

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'tests'))  # hlo_text


def parse_args(
  argv: list[str] | None = None,
) -> tuple[argparse.Namespace, list[str]]:
  parser = flags.make_parser(__doc__)
  add = parser.add_argument
  count = flags.whole(1)
  add('--workers', type=count, default=2, help='number of workers; default: 2')
  add('--devices', type=count, default=4, help='devices per worker; default: 4')
  return parser.parse_known_args(argv)


if __name__ == '__main__':  # before jax starts; it touches the CPU only
  own_args, _ = parse_args()
  count = own_args.workers * own_args.devices
  flag = f'--xla_force_host_platform_device_count={count}'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'

import cluster
import hlo_text
import jax
import metrics
import numpy as np
import picture
import text
import train_lm
from flax import nnx
from gpt import GPT, GPTConfig
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

# With these lengths every device's block is a multiple of the chunk size. Then
# the exchange has the bits of workers of one device.
DEFAULTS = [
  '--optimizer',
  'demo',
  '--width',
  '256',
  '--heads',
  '8',
  '--steps',
  '200',
]


@dataclasses.dataclass
class Run:
  """A model in training, and the sharding of its batches."""

  name: str
  model: GPT
  optimizer: nnx.Optimizer
  workers: demo_optax.Workers
  mesh: jax.sharding.Mesh
  batch: NamedSharding


def make_run(args: argparse.Namespace, count: int, devices: int) -> Run:
  """Makes workers of `devices` devices; with one, nothing is sharded."""
  names = [f.name for f in dataclasses.fields(GPTConfig)]
  config = GPTConfig(**{name: getattr(args, name) for name in names})
  mesh = jax.make_mesh(
    (count, devices),
    ('replica', 'fsdp'),
    devices=jax.devices()[: count * devices],
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  with jax.set_mesh(mesh):
    create = nnx.jit(lambda: GPT(config, nnx.Rngs(args.seed), 'fsdp'))
    model = create()  # under jit: no device ever holds all of it
    specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    workers = demo_optax.Workers.on_mesh(mesh, 'replica', specs)
    optimizer = nnx.Optimizer(
      model, train_lm.make_optimizer(args, workers), wrt=nnx.Param
    )
  batch = NamedSharding(mesh, P(('replica', 'fsdp')))
  name = f'{count} workers of {devices} device' + 's' * (devices > 1)
  return Run(name, model, optimizer, workers, mesh, batch)


def train(
  run: Run,
  args: argparse.Namespace,
  data: tuple[text.Corpus, np.ndarray],
  stop: cluster.StopSignal,
) -> dict[str, Any]:
  """Trains, prints memory and traffic, and returns the losses."""
  corpus, valid = data
  train_step = train_lm.make_train_step(run.workers)

  def batch_of(step: int) -> jax.Array:
    tokens = text.batch(corpus.train, args.seed, step, args.batch, args.context)
    return jax.device_put(tokens, run.batch)

  print(f'\n{run.name}')
  params = nnx.state(run.model, nnx.Param)
  compiled = train_step.lower(run.model, run.optimizer, batch_of(0)).compile()
  memory = {
    'parameters': device_bytes(params),
    'optimizer': device_bytes(nnx.state(run.optimizer)),
    'temporaries': compiled.memory_analysis().temp_size_in_bytes,
  }
  for name, size in memory.items():
    print(f'  {name:<12} {size / 1e6:8.2f} MB per device')
  plan = demo_optax.plan(
    params, train_lm.compressor_of(args), run.workers, exchange=args.exchange
  )
  other = [leaf.name for leaf in plan.leaves if not leaf.as_unsharded]
  print(
    f'  {plan.sent_bytes / 1e3:.1f} kB sent per worker and step;'
    f' {len(other)} leaves cut otherwise than on one device'
  )
  traffic = by_axes(hlo_text.collectives(compiled, run.mesh))
  for (kind, axes), (number, received) in traffic.items():
    print(
      f'  {number:3} x {kind:<18} over {" ".join(axes):<14}'
      f' {received / 1e3:10.1f} kB received per device'
    )

  losses = []
  folder = pathlib.Path(args.out) / run.name.replace(' ', '-')
  about = {'config': vars(args), 'memory': memory}
  with metrics.Metrics(folder, about) as log:
    for step in range(args.steps):
      if number := stop.after(step):
        print(f'Stopped by {signal.Signals(number).name} after step {step}.')
        raise SystemExit(128 + number)
      losses.append(float(train_step(run.model, run.optimizer, batch_of(step))))
      record = {'step': step + 1, 'loss': losses[-1]}
      if args.optimizer not in train_lm.AVERAGED:
        record |= metrics.about_exchange(run.optimizer)
      log.write(record)
  result = train_lm.evaluate(run.model, valid)
  print(f'  validation loss {result:.4f}')
  return {
    'name': run.name,
    'losses': losses,
    'valid_loss': result,
    'memory': memory,
    'traffic': [[*key, *value] for key, value in traffic.items()],
  }


def device_bytes(tree: Any) -> int:
  """Bytes of a tree's arrays on the first device."""
  first = jax.local_devices()[0]
  return sum(
    shard.data.nbytes
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
    if shard.device == first
  )


def by_axes(
  collectives: list[hlo_text.Collective],
) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
  """Number and received bytes of the collectives by kind and mesh axes."""
  total: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
  for c in collectives:
    if c.axes:
      number, received = total.get((c.kind, c.axes), (0, 0))
      total[c.kind, c.axes] = number + 1, received + c.received_bytes
  return dict(sorted(total.items(), key=lambda item: item[0][::-1]))


def draw(results: list[dict[str, Any]], path: pathlib.Path) -> None:
  """The loss curves, and how far they are apart."""
  plt = picture.pyplot()
  if plt is None:
    return
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
  for result, style in zip(results, ('-', '--')):
    left.plot(picture.smooth(result['losses']), style, label=result['name'])
  left.set(xlabel='step', ylabel='loss (nats per byte), mean of 10 steps')
  left.legend(frameon=False)
  a, b = (np.array(result['losses']) for result in results)
  right.plot(a - b, lw=0.8)
  right.set(xlabel='step', ylabel='solid minus dashed, each step')
  print()
  picture.save(figure, path)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  own, rest = parse_args(argv)
  args = train_lm.parse_args(['--out', 'runs/sharded', *DEFAULTS, *rest])
  total = own.workers * own.devices
  if args.batch % total:
    flags.refuse(f'--batch {args.batch} must be a multiple of {total} devices.')
  data = train_lm.load_data(args)
  with cluster.StopSignal() as stop:
    results = [
      train(make_run(args, own.workers, devices), args, data, stop)
      for devices in (own.devices, 1)
    ]
  out = pathlib.Path(args.out)
  out.mkdir(parents=True, exist_ok=True)
  (out / 'sharded.json').write_text(json.dumps(results) + '\n')
  draw(results, out / 'loss.png')
  return results


if __name__ == '__main__':
  main()
