"""Compressors transform the momentum and select coefficients."""

from demo_optax.compressors.bases import (
  Basis,
  Dct,
  Hadamard,
  Identity,
  RandomOrthogonal,
)
from demo_optax.compressors.compressor import (
  FROZEN,
  Compressor,
  cyclic_signs,
  dct_topk,
  full,
)
from demo_optax.compressors.selectors import (
  RandomSubset,
  Selector,
  Slicing,
  Striding,
  TopK,
)

__all__ = [
  'FROZEN',
  'Basis',
  'Compressor',
  'Dct',
  'Hadamard',
  'Identity',
  'RandomOrthogonal',
  'RandomSubset',
  'Selector',
  'Slicing',
  'Striding',
  'TopK',
  'cyclic_signs',
  'dct_topk',
  'full',
]
