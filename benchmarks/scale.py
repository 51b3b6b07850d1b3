"""Trains GPTs of 85.5 and 320 million parameters on one accelerator, in parts.

    python benchmarks/scale.py a              # point by point: what costs what
    python benchmarks/scale.py b c d          # 16 workers, 320 M, other seeds
    python benchmarks/scale.py a --text F.npz # a machine that downloads nothing
    python benchmarks/scale.py table

A call does the runs of its parts that are not in the file. After the first it
starts none that would end after `--minutes`: call it again. A run is
written when it ends. The text is read once (`larger_text.py`; its file is in
`~/.cache/demo_optax`). Settings are those of `muon.py`; workers are simulated.
Neither Flax nor a GPU is needed.
"""

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import muon

RESULTS = muon.RESULTS.with_name('scale.jsonl')

# What differs from `muon.DEFAULTS`: 21 MB in one pass, 32 sequences a worker.
LARGE: dict[str, Any] = {
  'data': 'botocore',
  'layers': 12,
  'width': 768,
  'heads': 12,
  'context': 256,
  'batch': 128,
  'steps': 640,
  'warmup': 100,
  'other_lr': 3e-3,
}
MUON = {**muon.MUON, 'other_lr': 3e-3}
OURS = {**muon.ROWS['demo_muon'], 'other_lr': 3e-3}
TOPK = {**OURS, 'cyclic': None, 'topk': 64}
ALL = {**TOPK, 'topk': None}  # everything: only the orthonormalisation differs
# Rates are the root mean square of an update: 2e-2 is 2.1e-3 at this width.
MERGED = {
  'worker': 'momentum',
  'after': 'orthonormalise',
  'average': 'workers',
  'topk': 64,
  'rows': 8,
}
LARGER = {'layers': 24, 'width': 1024, 'heads': 16, 'steps': 300}
PARTS: dict[str, list[dict[str, Any]]] = {
  'a': [
    MUON,
    OURS,
    ALL,
    TOPK,
    {**OURS, 'cyclic': 8},
    {**OURS, 'lr': 1e-2},
    {**ALL, 'lr': 1e-2},
    {**MERGED, 'lr': 2e-3},
    {**MERGED, 'lr': 1e-3},
    {**OURS, 'lr': 4e-2},
    {**MUON, 'lr': 1e-2},
    {'method': 'adamw', 'lr': 1e-3},
  ],
  'b': [{**x, 'workers': 16} for x in (OURS, {**OURS, 'cyclic': 8})],
  'c': [{**LARGER, **x} for x in (MUON, OURS, ALL)],
  'd': [{**x, 'seed': seed} for seed in (1, 2) for x in (MUON, OURS)],
}


# The model --------------------------------------------------------------------


def initial(s: dict[str, Any]) -> Any:
  """Returns parameters of a byte-level GPT, float32."""
  import jax.numpy as jnp
  import numpy as np

  rng = np.random.default_rng(s['seed'])
  width = s['width']

  def matrix(rows: int, columns: int, scale: float = 1.0) -> Any:
    values = rng.normal(size=(rows, columns)) * scale * width**-0.5
    return {'kernel': jnp.asarray(values, jnp.float32)}

  def norm() -> Any:
    return {'scale': jnp.ones(width)}

  to_residual = (2 * s['layers']) ** -0.5
  params = {
    'token_embedding': matrix(256, width),
    'position_embedding': matrix(s['context'], width),
    'norm': norm(),
    'head': matrix(width, 256),
  }
  for i in range(s['layers']):
    params[f'block_{i}'] = {
      'norm1': norm(),
      'norm2': norm(),
      **{name: matrix(width, width) for name in ('query', 'key', 'value')},
      'proj': matrix(width, width, to_residual),
      'up': matrix(width, 4 * width),
      'down': matrix(4 * width, width, to_residual),
    }
  return params


def normed(x: Any, norm: Any) -> Any:
  import jax
  import jax.numpy as jnp

  square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
  return (x * jax.lax.rsqrt(square + 1e-6) * norm['scale']).astype(x.dtype)


def times(x: Any, matrix: Any) -> Any:
  return x @ matrix['kernel'].astype(x.dtype)


def block(heads: int, x: Any, params: Any) -> Any:
  """Attention and a feed-forward layer: x is bfloat16 `[rows, time, width]`."""
  import jax

  h = normed(x, params['norm1'])
  rows, length, width = h.shape
  q, k, v = (
    times(h, params[name]).reshape(rows, length, heads, width // heads)
    for name in ('query', 'key', 'value')
  )
  attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  x = x + times(attended.reshape(h.shape), params['proj'])
  hidden = jax.nn.gelu(times(normed(x, params['norm2']), params['up']))
  return x + times(hidden, params['down'])


def loss_fn(s: dict[str, Any], params: Any, tokens: Any) -> Any:
  import jax
  import jax.numpy as jnp
  import optax

  # Backward passes compute again what is no product with a matrix.
  layer = jax.checkpoint(
    functools.partial(block, s['heads']),
    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  )
  positions = params['position_embedding']['kernel']
  x = params['token_embedding']['kernel'][tokens[:, :-1]] + positions
  x = x.astype(jnp.bfloat16)
  for i in range(s['layers']):
    x = layer(x, params[f'block_{i}'])
  logits = times(normed(x, params['norm']), params['head'])
  return optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), tokens[:, 1:]
  ).mean()


# Runs -------------------------------------------------------------------------


def train(s: dict[str, Any], path: pathlib.Path | None) -> dict[str, Any]:
  """Trains by some settings; returns the record of it."""
  import jax
  import larger_text
  import numpy as np
  import optax
  import optimizers
  import text

  import demo_optax

  if path is None:
    corpus = larger_text.load()
  else:
    with np.load(path) as arrays:
      corpus = text.Corpus(arrays['train'], arrays['valid'])
  size = min(s['batch'], 128)
  valid = text.windows(corpus.valid, size, s['context'])
  valid = larger_text.spread(valid, min(len(valid), 1024 // size))
  batch_of = larger_text.once(corpus.train, s['seed'], s['batch'], s['context'])
  workers = demo_optax.Workers.simulated(s['workers'])
  method = optimizers.make(s, workers)
  params = initial(s)
  state = method.tx.init(params)
  loss_of = jax.jit(functools.partial(loss_fn, s))

  @demo_optax.data_parallel(workers, batch_argnums=2, donate_argnums=(0, 1))
  def step_fn(params: Any, state: Any, tokens: Any) -> Any:
    loss, grads = jax.value_and_grad(functools.partial(loss_fn, s))(
      params, tokens
    )
    updates, state = method.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  seconds, curve = [], {}
  quarter = max(s['steps'] // 4, 1)
  for step in range(s['steps']):
    began = time.perf_counter()
    params, state, loss = step_fn(params, state, batch_of(step))
    loss = float(loss)
    seconds.append(time.perf_counter() - began)
    done = step + 1
    if done % quarter == 0 or done == s['steps']:
      found = float(np.mean([loss_of(params, rows) for rows in valid]))
      curve[done] = round(found, 5)
      print(f'  step {done}: {loss:.4f}, validation {found:.4f}', flush=True)
  return {
    **muon.learned(s, curve, loss, method.bytes_of(params)),
    'parameters': sum(x.size for x in jax.tree.leaves(params)),
    'first_call_seconds': round(seconds[0], 1),
    'step_ms': round(1e3 * statistics.median(seconds[1:] or seconds), 2),
    'device': jax.devices()[0].device_kind,
    'jax': jax.__version__,
  }


def do(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
  """Does the runs that are not in the file, as long as there is time."""
  done = list(map(settings_of, muon.read(args.file)))
  left = [s for s in map(settings_of, runs) if s not in done]
  began, longest = time.monotonic(), 0.0
  while left:
    start = time.monotonic()
    if longest and start - began + longest > 60 * args.minutes:
      print(f'{len(left)} runs are left: call again')
      return
    s = left.pop(0)
    print(name_of(s), flush=True)
    record = train(s, args.text)
    muon.append(args.file, record)
    print(f'  {record["step_ms"]} ms a step', flush=True)
    longest = max(longest, time.monotonic() - start)
  print('done')


def settings_of(run: dict[str, Any]) -> dict[str, Any]:
  """Returns all settings of a run, or of its record."""
  measured = {'parameters', 'first_call_seconds', 'step_ms', 'device'}
  return muon.settings_of({k: v for k, v in run.items() if k not in measured})


def name_of(s: dict[str, Any]) -> str:
  return f'{muon.name_of(s)}, {s["workers"]} workers, seed {s["seed"]}'


def table(records: list[dict[str, Any]]) -> None:
  """Prints a line for each run."""
  print('| run | parameters, M | loss | fewer bytes sent | ms a step |')
  print('|---|---|---|---|---|')
  for r in records:
    cells = (
      name_of(settings_of(r)),
      f'{r["parameters"] / 1e6:.1f}',
      f'{r["loss"]:.4f}',
      f'{r["dense"] / r["sent"]:.0f}x',
      f'{r["step_ms"]:.0f}',
    )
    print('|', ' | '.join(cells), '|')


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('parts', nargs='+', choices=[*PARTS, 'table'])
  parser.add_argument(
    '--set',
    nargs='*',
    type=muon.parse,
    default=[],
    metavar='KEY=VALUE',
    help='settings in place of those of the parts: a smaller model',
  )
  parser.add_argument('--text', type=pathlib.Path, help='npz: train, valid')
  parser.add_argument('--minutes', type=float, default=8.0)
  parser.add_argument('--file', type=pathlib.Path, default=RESULTS)
  parser.add_argument(
    '--autotune', type=int, default=0, help='4: XLA times tiles, for minutes'
  )
  args = parser.parse_args()
  root = pathlib.Path(__file__).parents[1]
  sys.path[:0] = [str(root), str(root / 'examples')]
  if args.parts == ['table']:
    table(muon.read(args.file))
    return
  flags = [
    os.environ.get('XLA_FLAGS', ''),
    f'--xla_gpu_autotune_level={args.autotune}',
  ]
  if not args.autotune:
    flags.append('--xla_gpu_enable_triton_gemm=false')
  os.environ['XLA_FLAGS'] = ' '.join(flags)
  set_to = {name: value for name, (value,) in args.set}
  runs = [x for part in args.parts for x in PARTS[part]]
  do([{**LARGE, **run, **set_to} for run in runs], args)


if __name__ == '__main__':
  main()
