"""Bits per index of every code, beside the bound log2 C(n, k) / k.

    python benchmarks/index_codes.py
    python benchmarks/index_codes.py --all   # every k from 1 to 64

Nothing is measured: sizes are a function of n and k.
"""

import argparse
import math

from demo_optax.codes import indices as index_codes

CHUNKS = [64, 1024, 4096, 16384]
TOPK = [1, 2, 4, 8, 16, 32, 64]


def row(n: int, k: int) -> str:
  chosen = index_codes.cheapest(n, k)
  elias_fano = min(
      index_codes.EliasFano(n, k, low).bits
      for low in range(index_codes.index_width(n))
  )
  bound = math.log2(math.comb(n, k)) / k
  bits = [index_codes.FixedWidth(n, k).bits, n, elias_fano, chosen.bits]
  cells = [f'{b / k:11.3f}' for b in bits]
  above = f'{100 * (bits[-1] / k / bound - 1):7.1f} %' if bound else '        -'
  return (f'{n:6}{k:4}{"".join(cells)}{bound:9.3f}{above}'
          f'  {chosen.name}')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--all', action='store_true')
  args = parser.parse_args()
  names = ('fixed', 'bitmap', 'elias-fano', 'chosen')
  print(f'{"n":>6}{"k":>4}' + ''.join(f'{name:>11}' for name in names)
        + f'{"bound":>9}{"above":>9}  code')
  for n in CHUNKS:
    for k in range(1, 65) if args.all else TOPK:
      print(row(n, k))


if __name__ == '__main__':
  main()
