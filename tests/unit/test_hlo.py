"""Collectives of compiled code: of functions compiled here, and written by hand."""

import json
import math
import pathlib
import re

import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.core

TEXTS = pathlib.Path(__file__).parents[1] / 'hlo/handwritten.txt'
GRID = AbstractMesh((2, 4), ('replica', 'fsdp'))


# Written by hand, as XLA writes for GPUs and TPUs -------------------------------

# What is found in a module is in the comments before it, as JSON.
HANDWRITTEN = dict(
  module.split('\n', 1)
  for module in re.split('^// (?=[a-z])', TEXTS.read_text(), flags=re.M)[1:]
)


@pytest.mark.parametrize('name', HANDWRITTEN)
def test_handwritten(name):
  comments, module = HANDWRITTEN[name].split('HloModule', 1)
  found = [
    (c.kind, c.axes, c.group_size, c.output_bytes, c.received_bytes)
    for c in hlo_text.collectives(f'HloModule{module}', GRID)
  ]
  assert json.loads(json.dumps(found)) == [
    json.loads(line[3:]) for line in comments.splitlines()
  ]


# Axes, and places in the mesh ----------------------------------------------------

AXES = [('a',), ('c',), ('a', 'b'), ('a', 'c'), ('a', 'b', 'c')]
B = 4 * 64  # bytes of a device's shard
BODIES = {
  'all-reduce': (
    lambda x, axes, g: lax.psum(x, axes),
    lambda g: 2 * B * (g - 1) // g,
  ),
  'all-gather': (
    lambda x, axes, g: lax.all_gather(x, axes),
    lambda g: B * (g - 1),
  ),
  'reduce-scatter': (
    lambda x, axes, g: lax.psum_scatter(x.reshape(g, -1), axes),
    lambda g: B * (g - 1) // g,
  ),
  'all-to-all': (
    lambda x, axes, g: lax.all_to_all(x.reshape(g, -1), axes, 0, 0),
    lambda g: B * (g - 1) // g,
  ),
  'collective-permute': (
    lambda x, axes, g: lax.ppermute(
      x, axes, [(i, (i + 1) % g) for i in range(g)]
    ),
    lambda g: B,
  ),
}


@pytest.mark.parametrize('axes', AXES)
def test_axes_and_bytes_of_a_map(axes):
  """Of devices whose places in the mesh are not their ids."""
  devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 4, 5]].reshape(2, 2, 2)
  kind = MESHES['explicit' if len(axes) == 2 else 'auto']
  mesh = Mesh(devices, ('a', 'b', 'c'), axis_types=(kind,) * 3)
  size, spec = math.prod(mesh.shape[axis] for axis in axes), P(mesh.axis_names)

  def all_kinds(x):
    return {
      kind: body(x, axes, size).reshape(-1)
      for kind, (body, _) in BODIES.items()
    }

  mapped = jax.jit(
    jax.shard_map(
      all_kinds, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
  )
  x = jax.ShapeDtypeStruct(
    (512,), jnp.float32, sharding=NamedSharding(mesh, spec)
  )
  found = hlo_text.collectives(mapped.lower(x).compile(), mesh)
  assert {c.kind: c.received_bytes for c in found} == {
    kind: sent(size) for kind, (_, sent) in BODIES.items()
  }
  assert len(found) == len(BODIES)
  assert {c.axes for c in found} == {axes}
  assert {c.group_size for c in found if c.kind != 'collective-permute'} == {
    size
  }


def test_what_is_only_lowered_is_refused():
  with pytest.raises(AssertionError, match='module @jit_sin'):
    hlo_text.collectives(jax.jit(jnp.sin).lower(1.0))
