"""Compressors: what a worker sends of its momentum."""

from demo_optax.compressors.base import (
  Compressor,
  CompressorTree,
  LeafPlan,
  dct_topk,
  full,
  hadamard_topk,
  identity_topk,
  per_leaf,
  random_orthogonal_topk,
  random_subset,
  slicing,
  striding,
)

__all__ = [
  'Compressor',
  'CompressorTree',
  'LeafPlan',
  'dct_topk',
  'full',
  'hadamard_topk',
  'identity_topk',
  'per_leaf',
  'random_orthogonal_topk',
  'random_subset',
  'slicing',
  'striding',
]
