"""Optimizers in one line: chains of optax around the exchange."""

from demo_optax.recipes.matrices import (
  describe_matrices,
  muon_dimension_numbers,
)
from demo_optax.recipes.optimizers import demo, demo_muon, muon_compressors

__all__ = [
  'demo',
  'demo_muon',
  'describe_matrices',
  'muon_compressors',
  'muon_dimension_numbers',
]
