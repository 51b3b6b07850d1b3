"""What is sent, and what follows: every compressor and every base, trained.

    python benchmarks/compressors.py --out benchmarks/results/compressors.jsonl
    python benchmarks/compressors.py --out ... --table   # from the file

The training example's own model, text, batches and schedule, 4 workers. Three
questions, each with all else as in the example:

- which compressor, at equal traffic: what float32 values with `topk=32` send
  and receive together (an all-reduce moves 2 (N - 1) / N of what it sums each
  way, an all-gather one payload out and N - 1 in);
- which base optimizer after the exchange, at two learning rates each;
- what to do with embeddings, head and 1-D leaves.

A run that is in the file is not done again.
"""

import argparse
import pathlib

import learning
from muon import append, read

RATE = 2e-3
SUBSET = '0.0164'  # of 4 MB of gradients: 197 kB both ways, as topk 32
COMPRESSORS = {
    'dct': [],
    'identity': [],
    'random-subset': ['--rate', SUBSET],
    'striding': ['--rate', SUBSET],
    'slicing': ['--rate', SUBSET],
    'full': [],
}
BASES = {
    'signum': [3e-4, 1e-3],
    'sgd': [1.0, 5.0],
    'adam': [1e-3, 3e-3],
    'adamw': [1e-3, 3e-3],
    'lion': [3e-4, 1e-3],
    'muon': [5e-3, 2e-2],
}
OWN = ['--embeddings', 'own', '--own-chunk']
EMBEDDINGS = {
    'by averaged AdamW': ['--embeddings', 'adamw'],
    'rows, 8 of 192, Adam': [*OWN, '1', '192', '--own-topk', '8'],
    'rows, 24 of 192, Adam': [*OWN, '1', '192', '--own-topk', '24'],
    'rows, 24 of 192, signs, Adam': [
        *OWN, '1', '192', '--own-topk', '24', '--values', 'sign'],
    'rows, 24 of 192, DeMo': [
        *OWN, '1', '192', '--own-topk', '24', '--own-base', 'sign'],
    '64x64, 256 of 4096, DeMo': [
        *OWN, '64', '64', '--own-topk', '256', '--own-base', 'sign'],
}


def settings() -> dict[str, tuple[float, list[str]]]:
  """What is run, by name: a learning rate and flags of the example."""
  found = {
      f'compressor {name}': (RATE, ['--compressor', name, *flags])
      for name, flags in COMPRESSORS.items()
  }
  for base, rates in BASES.items():
    for rate in rates:
      found[f'base {base}, rate {rate:g}'] = rate, ['--base', base]
  for name, flags in EMBEDDINGS.items():
    found[f'embeddings {name}'] = RATE, flags
  return found


def table(records: list[dict]) -> None:
  print('| | sent kB | received kB | validation loss |\n|---|---|---|---|')
  for name in settings():
    for r in records:
      if r['name'] == name:
        sent, received = r['sent'] / 1e3, r['received'] / 1e3
        print(f'| {name} | {sent:,.1f} | {received:,.1f} |'
              f' {r["valid_loss"]:.3f} |')


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--steps', type=int, default=300)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--table', action='store_true')
  args = parser.parse_args()
  done = {r['name'] for r in read(args.out)}
  for name, (rate, flags) in settings().items():
    if args.table or name in done:
      continue
    extra = ['--steps', str(args.steps), *flags]
    for record in learning.runs_of('demo', rate, [args.seed], extra):
      record = {'name': name, 'steps': args.steps, **record}
      append(args.out, record)
      print(name, record['valid_loss'], flush=True)
  table(read(args.out))


if __name__ == '__main__':
  main()
