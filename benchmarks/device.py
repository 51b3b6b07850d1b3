"""The kernels on a GPU or TPU: are they right, always the same, and how fast?

    python benchmarks/device.py --out benchmarks/results/device.json
    python benchmarks/device.py --tiny    # a few chunks, interpreted on a CPU

Needs the installed package and an accelerator that JAX sees; takes up to eight
minutes (`--minutes`), compilation included. In this order:

1. `correct`: both kernels against NumPy in float64; ties, a worker that is left
   out, and the plain way on the same device.
2. `same`: 100 runs of both kernels, compared bit by bit.
3. `times`: the 1B and the 300M model of the DeMo paper. Both kernels by
   themselves, a worker's whole step with kernels and without (new parameters
   included), `optax.adamw`, `optax.sgd` with momentum, and a copy of the
   parameters. All rows take turns, the order reversed every other round; times
   are medians. `must` is what has to be moved, in bytes per parameter: gradient
   (a kernel reads it twice: before momentum is touched it must be known whether
   the worker takes part), momentum, update, parameters. `worth` is what the
   device would have copied in that time.
4. `variants` (GPUs): precision of the products and threads per program, with
   how many chunks each selects otherwise than float64 does.

What cannot be had is listed under `missing`, with the reason; nothing fails.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_optax.engine.pallas import Kernels
from demo_optax.engine.pallas_common import Cut

import demo_optax
from demo_optax.__main__ import MODELS
from demo_optax.compressors import Dct
from demo_optax.compressors import chunking as chunks
from demo_optax.numerics import topk as selection

DECAY = 0.999


class Report:
  """Results by section; what is missing, and why; and the time that is left."""

  def __init__(self, minutes: float) -> None:
    device = jax.devices()[0]
    self.end = time.monotonic() + 60 * minutes
    self.results: dict[str, Any] = {
        'device': device.device_kind, 'backend': jax.default_backend(),
        'jax': jax.__version__, 'python': platform.python_version(),
        'missing': {},
    }

  def miss(self, what: str, why: Any) -> None:
    """Lists what cannot be had."""
    why = (str(why).strip().splitlines() or [repr(why)])[0][:300]
    self.results['missing'][what] = why
    print(f'missing: {what}: {why}', flush=True)

  def add(self, section: str, what: str, run: Callable[[], Any]) -> Any:
    """The result of `run`, or None; kept and printed."""
    if time.monotonic() > self.end:
      return self.miss(f'{section} {what}', 'no time left; see --minutes')
    try:
      result = run()
    except Exception as error:  # of compilers, of memory, of drivers
      return self.miss(f'{section} {what}', error)
    self.results.setdefault(section, {})[what] = result
    print(f'{section} {what}: {json.dumps(result)}', flush=True)
    return result


# 1. Correct


def top_k(c: np.ndarray, k: int) -> np.ndarray:
  return np.sort(np.argsort(-np.abs(c), -1, kind='stable')[..., :k], -1)


def put(c: np.ndarray, indices: Any, values: Any) -> np.ndarray:
  c = np.array(c)
  np.put_along_axis(c, np.asarray(indices), np.asarray(values), -1)
  return c


def transform(x: Any, cut: Cut) -> np.ndarray:
  """float64 `[chunks, n]`."""
  x = np.asarray(x, np.float64).reshape(
      cut.row_chunks, cut.row_length, cut.col_chunks, cut.col_length
  )
  rows, cols = map(Dct().matrix, cut.kind)
  x = np.einsum('iajb,ua,vb->ijvu', x, rows, cols, optimize=True)
  return x.reshape(-1, cut.n)


def transform_back(c: np.ndarray, cut: Cut) -> np.ndarray:
  c = c.reshape(cut.row_chunks, cut.col_chunks, cut.col_length, cut.row_length)
  rows, cols = map(Dct().matrix, cut.kind)
  c = np.einsum('ijvu,ua,vb->iajb', c, rows, cols, optimize=True)
  return c.reshape(cut.shape)


def encoder(kernels: Kernels, plans: Any, decay: float) -> Callable[..., Any]:
  limits = [plan.format.largest_sent for plan in plans]
  return jax.jit(
      lambda g, m, present: kernels.encode(
          Dct().matrix, plans, g, m, decay, 1.0, present, limits
      ),
      donate_argnums=1,
  )


def decoder(kernels: Kernels, plans: Any, average: Any) -> Callable[..., Any]:
  return jax.jit(
      lambda selections, present: kernels.decode(
          Dct().matrix, plans, selections, [present] * len(plans), average
      )
  )


def check_encode(
    kernels: Kernels, shape: tuple[int, ...], size: int, k: int, dtype: str
) -> dict[str, Any]:
  rng = np.random.default_rng(0)
  plan = demo_optax.dct_topk(size, k).plan(shape, jnp.float32)
  cut = Cut.of(plan.grid)
  encode = encoder(kernels, [plan], 0.5)
  layout = plan.grid.coefficients_shape
  g = rng.normal(size=shape).astype(jnp.dtype(dtype))
  m = rng.normal(size=layout).astype(np.float32)

  def run(g: Any, m: Any, present: bool) -> list[np.ndarray]:
    (done,) = encode([jnp.asarray(g)], [jnp.array(m)], present)
    return [np.asarray(x) for x in done]

  rest, indices, values = run(g, m, True)
  whole = put(rest, indices, values)
  c = 0.5 * m.reshape(-1, cut.n) + transform(g, cut)
  plain = chunks.to_coefficients(
      jnp.asarray(g, jnp.float32), plan.grid, Dct()
  )
  plain = (0.5 * m + plain).reshape(-1, cut.n)
  same = np.asarray(selection.top_k(plain, k)) == indices

  ties = rng.integers(-3, 4, layout).astype(np.float32)
  tied = 0.5 * ties.reshape(-1, cut.n)
  rest_t, indices_t, values_t = run(np.zeros_like(g), ties, True)
  expected = top_k(tied, k)
  left = run(np.full_like(g, np.nan), m, False)[0]
  return {
      'largest error': float(np.abs(whole - c).max()),
      'plain way, largest error': float(np.abs(np.asarray(plain) - c).max()),
      'a selection of its own numbers':
          bool((top_k(whole, k) == indices).all()),
      'chunks otherwise than float64':
          int((top_k(c, k) != indices).any(1).sum()),
      'chunks otherwise than plain': int((~same).any(1).sum()),
      'chunks': cut.chunks,
      'ties exact': bool(
          (indices_t == expected).all()
          and (put(rest_t, indices_t, values_t) == tied).all()
          and not np.take_along_axis(rest_t, expected, 1).any()
      ),
      'left out keeps momentum': bool((left == m.reshape(left.shape)).all()),
  }


def draw_selections(
    plan: Any, workers: int, seed: int
) -> tuple[jax.Array, jax.Array]:
  """Random values at random ascending places, on the device."""
  n, k = plan.format.n, plan.format.k
  keys = jax.random.split(jax.random.key(seed))
  size = workers, plan.grid.num_chunks, k
  within = jax.random.randint(keys[0], size, 0, n // k)
  first = jnp.arange(k, dtype=jnp.int32) * (n // k)
  return within + first[None, None], jax.random.normal(keys[1], size)


def check_decode(
    kernels: Kernels, shape: tuple[int, ...], size: int, k: int, workers: int,
    average: str,
) -> dict[str, Any]:
  plan = demo_optax.dct_topk(size, k).plan(shape, jnp.float32)
  cut = Cut.of(plan.grid)
  i, v = map(np.array, draw_selections(plan, workers, 0))
  present = np.arange(workers) != 1
  v[~present] = np.nan
  (update,) = decoder(kernels, [plan], average)([(i, v)], present)
  zeros = np.zeros((cut.chunks, cut.n))
  sums = sum(put(zeros, i[w], v[w]) for w in np.flatnonzero(present))
  counts = sum(put(zeros, i[w], 1) for w in np.flatnonzero(present))
  counts = counts if average == 'senders' else present.sum()
  expected = transform_back(sums / np.maximum(counts, 1), cut)
  update = np.asarray(update).reshape(expected.shape)
  return {'largest error': float(np.abs(update - expected).max()),
          'largest number': float(np.abs(expected).max())}


# 2. Same


def check_same(kernels: Kernels, side: int, size: int, runs: int) -> dict:
  plan = demo_optax.dct_topk(size, 4).plan((side, side), jnp.float32)
  encode = encoder(kernels, [plan], DECAY)
  decode = decoder(kernels, [plan], 'senders')
  keys = jax.random.split(jax.random.key(0))
  g = jax.random.normal(keys[0], (side, side))
  m = jax.random.normal(keys[1], plan.grid.coefficients_shape)
  sent = draw_selections(plan, 4, 2)

  def run() -> list[jax.Array]:
    done = encode([g], [jnp.array(m)], True)
    updates = decode([sent], jnp.ones(4, bool))
    return jax.tree.leaves((done, updates))

  @jax.jit
  def equal(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.array([jnp.array_equal(x, y) for x, y in zip(a, b)]))

  first = run()
  differing = sum(not equal(first, run()) for _ in range(runs - 1))
  return {'runs': runs, 'differing': differing}


# 3. Times


class Row:
  """Something that is timed: arrays by name in, and new ones out."""

  def __init__(
      self, fun: Callable[..., Any], inputs: list[str], outputs: list[str],
      must: float, arrays: dict[str, Any],
  ) -> None:
    """`inputs` that are `outputs`, too, are donated."""
    donated = [i for i, x in enumerate(inputs) if x in outputs]
    self.inputs, self.outputs, self.must = inputs, outputs, must
    self.times: list[float] = []
    start = time.perf_counter()
    self.compiled = jax.jit(fun, donate_argnums=donated).lower(
        *(arrays[x] for x in inputs)
    ).compile()
    self.compilation = time.perf_counter() - start

  def run(self, arrays: dict[str, Any]) -> float:
    """Seconds; `arrays` are the new ones then."""
    args = [arrays.pop(x) if x in self.outputs else arrays[x]
            for x in self.inputs]
    start = time.perf_counter()
    results = jax.block_until_ready(self.compiled(*args))
    seconds = time.perf_counter() - start
    arrays.update(zip(self.outputs, results))
    return seconds


def make_rows(
    kernels: Kernels, shapes: Any, topk: int, size: int
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
  """Arrays, and what rows are made of."""
  names = [str(i) for i in range(len(shapes))]
  compressor = demo_optax.dct_topk(size, topk)
  params = {
      name: 0.02 * jax.random.normal(jax.random.key(i), shape)
      for i, (name, shape) in enumerate(zip(names, shapes))
  }
  arrays: dict[str, Any] = {
      'params': params, 'gradients': jax.tree.map(jnp.negative, params)}
  plans = [compressor.plan(s, jnp.float32) for s in shapes]
  parameters = sum(p.size for p in params.values())
  sent = 8 * sum(p.grid.num_chunks * p.format.k for p in plans) / parameters
  yes = jnp.ones((), bool)
  limits = [p.format.largest_sent for p in plans]
  alone = demo_optax.Workers.simulated(1)
  txs = {
      kind: demo_optax.scale_by_demo(
          compressor, DECAY, workers=alone, kernels=kind == 'kernels')
      for kind in ('kernels', 'plain')
  }
  txs = {k: optax.chain(tx, optax.scale_by_learning_rate(1e-4))
         for k, tx in txs.items()}
  txs |= {'adamw': optax.adamw(1e-4), 'sgd': optax.sgd(1e-4, 0.9)}
  arrays['demo'] = jax.jit(txs['plain'].init)(params)
  arrays['adamw'] = jax.jit(txs['adamw'].init)(params)
  arrays['sgd'] = jax.jit(txs['sgd'].init)(params)
  for workers in (1, 8):
    arrays[f'sent by {workers}'] = [
        draw_selections(p, workers, i) for i, p in enumerate(plans)]

  arrays['momentum'] = [jnp.zeros(p.grid.coefficients_shape) for p in plans]

  def encode(gradients: Any, momentum: Any) -> Any:
    done = kernels.encode(
        Dct().matrix, plans, [gradients[n] for n in names], momentum, DECAY,
        1.0, yes, limits)
    new = [x[0].reshape(m.shape) for x, m in zip(done, momentum)]
    return new, [x[1:] for x in done]

  def decode(selections: Any) -> Any:
    present = jnp.ones(len(selections[0][0]), bool)
    return (kernels.decode(
        Dct().matrix, plans, selections, [present] * len(plans),
        'senders'),)

  def step(kind: str) -> Callable[..., Any]:
    def one(params: Any, state: Any, gradients: Any) -> Any:
      if kind in ('kernels', 'plain'):
        gradients = jax.tree.map(lambda g: g[None], gradients)
      updates, state = txs[kind].update(gradients, state, params)
      return optax.apply_updates(params, updates), state
    return one

  def demo(kind: str) -> tuple[Any, ...]:
    # gradient twice, momentum, update; update again and parameters
    must = 8 + 8 + 4 + 2 * sent + 4 + 8
    names = ['params', 'demo', 'gradients']
    return step(kind), names, names[:2], must

  rows = {
      'copy': (lambda p: (jax.tree.map(jnp.negative, p),), ['params'],
               ['params'], 8.0),
      'encode': (encode, ['gradients', 'momentum'], ['momentum', 'selected'],
                 4 + 8 + sent),
      'decode': (decode, ['sent by 1'], ['updates'], 4 + sent),
      'decode of 8': (decode, ['sent by 8'], ['updates'], 4 + 8 * sent),
      'step with kernels': demo('kernels'),
      'adamw': (step('adamw'), ['params', 'adamw', 'gradients'],
                ['params', 'adamw'], 28.0),
      'sgd': (step('sgd'), ['params', 'sgd', 'gradients'],
              ['params', 'sgd'], 20.0),
      'step without': demo('plain'),
  }
  return arrays, rows


def shapes_of(tree: Any) -> list[tuple[int, ...]]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, list))
  return [tuple(x) for x in leaves]


def measure(
    report: Report, kernels: Kernels, name: str, topk: int, size: int,
    rounds: int, shapes: list[tuple[int, ...]],
) -> None:
  parameters = sum(int(np.prod(s)) for s in shapes)
  try:
    arrays, wanted = make_rows(kernels, shapes, topk, size)
  except Exception as error:
    return report.miss(f'times {name}', error)
  rows: dict[str, Row] = {}
  for row, (fun, inputs, outputs, must) in wanted.items():
    if time.monotonic() > report.end:
      report.miss(f'times {name} {row}', 'no time left; see --minutes')
      continue
    try:
      rows[row] = Row(fun, inputs, outputs, must, arrays)
      rows[row].run(arrays)
    except Exception as error:
      rows.pop(row, None)
      report.miss(f'times {name} {row}', error)
      if not set(inputs) <= set(arrays):
        return report.miss(f'times {name}', 'arrays were lost in a failed run')
    arrays.pop('updates', None)
  for number in range(rounds):
    if number > 2 and time.monotonic() > report.end:
      break
    for row in list(rows.values())[:: 1 if number % 2 else -1]:
      row.times.append(row.run(arrays))
      arrays.pop('updates', None)
  medians = {row: statistics.median(x.times) for row, x in rows.items()}
  rate = 8 * parameters / medians['copy'] if 'copy' in medians else None
  table = {
      row: {
          'ms': 1e3 * medians[row],
          'fastest ms': 1e3 * min(x.times),
          'must': x.must,
          'worth': rate and rate * medians[row] / parameters,
          'fraction of copy rate':
              rate and x.must * parameters / medians[row] / rate,
          'compilation s': x.compilation,
      }
      for row, x in rows.items()
  }
  report.results.setdefault('times', {})[name] = {
      'parameters': parameters, 'topk': topk, 'chunk': size, 'rounds': rounds,
      'copy GB/s': rate and rate / 1e9, 'rows': table,
  }
  print(f'{name}: {parameters:,} parameters, {size} x {size}, k = {topk};'
        f' copies at {(rate or 0) / 1e9:.0f} GB/s')
  print('| row | ms | must, B/param | worth, B/param | of copy rate |')
  print('|---|---|---|---|---|')
  for row, x in table.items():
    print(f'| {row} | {x["ms"]:.2f} | {x["must"]:.1f} | {x["worth"] or 0:.1f}'
          f' | {x["fraction of copy rate"] or 0:.2f} |', flush=True)


# 4. Variants


def variant(
    shape: tuple[int, int], size: int, k: int, precision: Any, warps: int
) -> dict[str, Any]:
  from demo_optax.engine import pallas_gpu as kernels_gpu

  plan = demo_optax.dct_topk(size, k).plan(shape, jnp.float32)
  cut = Cut.of(plan.grid)
  keys = jax.random.split(jax.random.key(0))
  g = jax.random.normal(keys[0], shape)
  m = 3 * jax.random.normal(
      keys[1], (cut.row_chunks, cut.col_chunks, cut.n))
  scalars = jnp.asarray([DECAY, 1.0, 1.0], jnp.float32)

  @jax.jit
  def encode(g: jax.Array, m: jax.Array) -> Any:
    return kernels_gpu.encode(
        [g], [m], scalars, [cut], k, Dct().matrix, 1e30,
        precision=precision, num_warps=warps)

  ((_, indices, _),) = encode(g, m)
  few = min(cut.row_chunks, 8) * size, cut
  part = Cut(few[0] // size, cut.col_chunks, size, size)
  c = np.float64(np.float32(DECAY)) * np.asarray(
      m[: part.row_chunks], np.float64).reshape(-1, cut.n)
  c += transform(g[: few[0]], part)
  found = np.asarray(indices)[: part.chunks]
  times = []
  for _ in range(10):
    start = time.perf_counter()
    jax.block_until_ready(encode(g, m))
    times.append(time.perf_counter() - start)
  return {
      'ms': 1e3 * statistics.median(times),
      'chunks otherwise than float64': int((top_k(c, k) != found).any(1).sum()),
      'chunks looked at': part.chunks,
  }


VARIANTS = {
    'bfloat16 x 6': jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    'bfloat16 x 3': jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    'TF32 x 3': jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    'TF32': jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
    'float32': jax.lax.Precision.HIGHEST,
}


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add('--out', type=pathlib.Path, help='where to write JSON')
  add('--minutes', type=float, default=7.5)
  add('--topk', type=int, default=32)
  add('--rounds', type=int, default=15)
  add('--models', nargs='*', default=['1B', '300M'], choices=MODELS)
  add('--tiny', action='store_true', help='small sizes, on any backend')
  args = parser.parse_args()

  report = Report(args.minutes)
  backend = jax.default_backend()
  kernels = Kernels.chosen(True)
  print(f'{report.results["device"]} ({backend}), jax {jax.__version__}')
  if backend == 'cpu' and not args.tiny:
    report.miss('everything', 'JAX sees no GPU or TPU; --tiny runs interpreted')
  else:
    run(report, kernels, args)
  if args.out:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report.results, indent=1) + '\n')


def run(report: Report, kernels: Kernels, args: argparse.Namespace) -> None:
  large = (256, 1024)
  encoded = [((2048,), 64, 4, 'float32'), (large, 32, 4, 'float32'),
             (large, 64, 32, 'float32'), (large, 64, 64, 'bfloat16'),
             (large, 128, 64, 'float32')]
  decoded = [(large, 64, 32, 1, 'senders'), (large, 64, 32, 8, 'senders'),
             (large, 32, 4, 64, 'workers'), (large, 128, 1, 256, 'senders'),
             ((2048,), 64, 4, 8, 'senders')]
  models = {name: shapes_of(MODELS[name]) for name in args.models}
  side, size, runs, rounds, topk = 2048, 64, 100, args.rounds, args.topk
  if args.tiny:
    encoded, decoded = [((64, 32), 32, 4, 'float32')], [
        ((32, 32), 32, 4, 2, 'senders')]
    models, (side, size, runs, rounds, topk) = {
        'tiny': [(32, 64), (64,)]}, (64, 32, 3, 1, 4)

  for case in encoded:
    plan = demo_optax.dct_topk(*case[1:3]).plan(case[0], jnp.float32)
    if not kernels.apply(plan, jax.ShapeDtypeStruct(case[0], case[3])):
      report.miss(f'correct encode {case}', 'no kernel for it on this device')
      continue
    report.add('correct', f'encode {case}',
               lambda case=case: check_encode(kernels, *case))
  for case in decoded:
    report.add('correct', f'decode {case}',
               lambda case=case: check_decode(kernels, *case))
  report.add('same', f'{side} x {side}',
             lambda: check_same(kernels, side, size, runs))
  for name, shapes in models.items():
    measure(report, kernels, name, topk, size, rounds, shapes)
  if kernels.backend != 'gpu':
    return report.miss('variants', 'they are of the kernels for GPUs')
  if args.tiny:
    return report.miss('variants', 'nothing to time without a GPU')
  for name, precision in VARIANTS.items():
    for warps in (8, 4):
      report.add('variants', f'{name}, {32 * warps} threads',
                 lambda p=precision, w=warps: variant(
                     (8192, 8192), 64, args.topk, p, w))


if __name__ == '__main__':
  main()
