"""Fits the Newton-Schulz iterations of `demo_muon`.

    python benchmarks/newton_schulz.py

Each iteration is the odd polynomial of degree five that is nearest to one on
the singular values that the one before leaves (Polar Express, arXiv
2505.16932), in the largest difference, found as a linear program. `--margin` is
how much too large a value may be: TPUs multiply in bfloat16 by default. The
table's last columns have the largest singular value of matrices by products
that round to bfloat16.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import optimize

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from demo_optax.recipes import links

MUON = ((3.4445, -4.7750, 2.0315),) * 5
Iterations = tuple[tuple[float, ...], ...]


def nearest_to_one(low: float, high: float) -> tuple[float, ...]:
  """Returns `a, b, c` whose `a x + b x^3 + c x^5` is nearest to one."""
  x = np.concatenate(
    [np.geomspace(low, high, 4000), np.linspace(low, high, 4000)]
  )
  powers = np.stack([x, x**3, x**5], axis=1)
  distance = np.ones((len(x), 1))
  found = optimize.linprog(
    [0, 0, 0, 1],  # the largest distance
    A_ub=np.block([[powers, -distance], [-powers, -distance]]),
    b_ub=np.concatenate([distance[:, 0], -distance[:, 0]]),
    bounds=[(None, None)] * 3 + [(0, None)],
  )
  return tuple(round(float(value), 3) for value in found.x[:3])


def left_by(
  coefficients: tuple[float, ...], low: float, high: float
) -> tuple[float, float]:
  """Returns the smallest and largest singular value after an iteration."""
  a, b, c = coefficients
  x = np.geomspace(low, high, 100_000)
  y = a * x + b * x**3 + c * x**5
  return y.min(), y.max()


def fit(low: float, count: int, margin: float) -> Iterations:
  """Returns iterations for singular values from `low` to one."""
  found, high = [], 1.0
  for _ in range(count):
    high *= 1 + margin
    found.append(nearest_to_one(low, high))
    low, high = left_by(found[-1], low, high)
  return tuple(found)


def after(iterations: Iterations, low: float) -> tuple[float, float]:
  high = 1.0
  for coefficients in iterations:
    low, high = left_by(coefficients, low, high)
  return low, high


def largest(x: Any, iterations: Iterations) -> float:
  """Returns the largest singular value, by products of bfloat16."""

  def product(x: Any, y: Any) -> Any:
    narrow = (x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
    return jnp.matmul(*narrow, preferred_element_type=jnp.float32)

  for number, (a, b, c) in enumerate(iterations):
    gram = product(x, x.T)
    scale = jnp.ones(1)
    if number == 0:  # rows by the roots of their sums in the Gramian
      scale = 1 / jnp.sqrt(jnp.sum(jnp.abs(gram), axis=1, keepdims=True))
      gram = scale * gram * scale.T
    polynomial = a * jnp.eye(len(x)) + b * gram + product(c * gram, gram)
    x = product(polynomial * scale.T, x)
  return float(jnp.linalg.norm(x, ord=2))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--low', type=float, default=0.003)
  parser.add_argument('--count', type=int, default=4)
  parser.add_argument('--margin', type=float, default=0.02)
  args = parser.parse_args()
  fitted = fit(args.low, args.count, args.margin)
  for coefficients in fitted:
    print(coefficients)
  same = 'the same as' if fitted == links.NEWTON_SCHULZ else 'not those'
  print(f'They are {same} in demo_optax.')
  rows = {
    'fitted': fitted,
    'no margin': fit(args.low, args.count, 0.0),
    'Muon, five': MUON,
    'Muon, three': MUON[:3],
  }
  rng = np.random.default_rng(0)
  matrices = {
    'random': rng.normal(size=(171, 171)),
    'identity': np.eye(171),
    'equal rows': np.ones((171, 1)) * rng.normal(size=171),
  }
  print(f'\n| | from {args.low} to 1 | slope at 0 | {" | ".join(matrices)} |')
  print('|---' * (3 + len(matrices)) + '|')
  for name, iterations in rows.items():
    low, high = after(iterations, args.low)
    slope = np.prod([a for a, _, _ in iterations])
    cells = [f'{low:.2f} to {high:.2f}', f'{slope:.0f}']
    for matrix in matrices.values():
      cells.append(
        f'{largest(jnp.asarray(matrix, jnp.float32), iterations):.2f}'
      )
    print(f'| {name} | {" | ".join(cells)} |')


if __name__ == '__main__':
  main()
