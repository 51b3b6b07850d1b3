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


def facts(found):
  return [(c.kind, c.axes, c.group_size, c.output_bytes, c.received_bytes)
          for c in found]


# Functions compiled here ------------------------------------------------------

DEVICES = np.array(jax.devices())
DEVICE_GRID = Mesh(DEVICES.reshape(2, 4), ('replica', 'fsdp'))


def mapped(mesh, body, size=64):
  spec = P(mesh.axis_names)
  f = jax.shard_map(
      body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  x = jax.ShapeDtypeStruct(
      (size,), jnp.float32, sharding=NamedSharding(mesh, spec))
  return jax.jit(f).lower(x)


# Written by hand, as XLA writes for GPUs and TPUs -------------------------------

# What is found in a module is in the comments before it, as JSON.
HANDWRITTEN = dict(
    module.split('\n', 1)
    for module in re.split('^// (?=[a-z])', TEXTS.read_text(), flags=re.M)[1:])


@pytest.mark.parametrize('name', HANDWRITTEN)
def test_handwritten(name):
  comments, module = HANDWRITTEN[name].split('HloModule', 1)
  found = facts(hlo_text.collectives(f'HloModule{module}', GRID))
  assert json.loads(json.dumps(found)) == [
      json.loads(line[3:]) for line in comments.splitlines()]


@pytest.mark.parametrize('spelling, groups', [
    ('{{0,1},{2,3}}', [(0, 1), (2, 3)]),
    ('{{0, 1}, {2, 3}}', [(0, 1), (2, 3)]),
    ('{}', [(0, 1, 2, 3)]),
    ('[2,2]<=[4]', [(0, 1), (2, 3)]),
    ('[2,2]<=[2,2]', [(0, 1), (2, 3)]),
    ('[2,2]<=[2,2]T(1,0)', [(0, 2), (1, 3)]),
    ('[2,6]<=[2,2,3]T(1,0,2)',
     [(0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)]),
    ("mesh['a'=2,'b'=2] {'a'}", [(0, 2), (1, 3)]),
    ("mesh['a'=2,'b'=2] {'b','a'}", [(0, 2, 1, 3)]),
    ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [(3, 1), (2, 0)]),
    ("mesh['a'=4], device_ids=([2,2]T(1,0)) {'a':(2)2}", [(0, 2), (1, 3)]),
])
def test_spellings_of_groups(spelling, groups):
  count = 1 + max(max(group) for group in groups)
  text = (f'HloModule f, num_partitions={count}\nENTRY %f () -> f32[] {{\n'
          f'  %r = f32[] all-reduce(%p), channel_id=1,'
          f' replica_groups={spelling}, to_apply=%add\n}}')
  [found] = hlo_text.collectives(text)
  assert list(found.groups) == groups
  assert found.axes is None


# Axes, and places in the mesh ----------------------------------------------------

AXES = [('a',), ('b',), ('c',), ('a', 'b'), ('a', 'c'), ('b', 'c'),
        ('a', 'b', 'c')]
B = 4 * 64  # bytes of a device's shard
BODIES = {
    'all-reduce': (
        lambda x, axes, g: lax.psum(x, axes), lambda g: 2 * B * (g - 1) // g),
    'all-gather': (
        lambda x, axes, g: lax.all_gather(x, axes), lambda g: B * (g - 1)),
    'reduce-scatter': (
        lambda x, axes, g: lax.psum_scatter(x.reshape(g, -1), axes),
        lambda g: B * (g - 1) // g),
    'all-to-all': (
        lambda x, axes, g: lax.all_to_all(x.reshape(g, -1), axes, 0, 0),
        lambda g: B * (g - 1) // g),
    'collective-permute': (
        lambda x, axes, g: lax.ppermute(
            x, axes, [(i, (i + 1) % g) for i in range(g)]),
        lambda g: B),
}


def cube(kind):
  """Of devices whose places are not their ids."""
  return Mesh(DEVICES[[3, 1, 0, 2, 7, 6, 4, 5]].reshape(2, 2, 2),
              ('a', 'b', 'c'), axis_types=(MESHES[kind],) * 3)


@pytest.mark.parametrize('axes', AXES)
def test_axes_and_bytes_of_a_map(axes):
  mesh = cube('explicit' if len(axes) == 2 else 'auto')
  size = math.prod(mesh.shape[axis] for axis in axes)

  def all_kinds(x):
    return {kind: body(x, axes, size).reshape(-1)
            for kind, (body, _) in BODIES.items()}

  found = hlo_text.collectives(mapped(mesh, all_kinds, 512).compile(), mesh)
  assert {c.kind: c.received_bytes for c in found} == {
      kind: sent(size) for kind, (_, sent) in BODIES.items()}
  assert len(found) == len(BODIES)
  assert {c.axes for c in found} == {axes}
  assert {c.group_size for c in found
          if c.kind != 'collective-permute'} == {size}


def test_groups_are_places_in_the_mesh():
  """Not ids of devices: what each device receives says who its partners are."""
  mesh = cube('auto')
  step = mapped(mesh, lambda x: lax.all_gather(x[0], ('a', 'c')), 512).compile()
  [found] = hlo_text.collectives(step, mesh)
  x = jnp.repeat(jnp.arange(8.), 64)  # shard i is at place i, and holds i
  received = step(jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names))))
  places = received.reshape(8, 4).astype(int).tolist()
  sets = [{frozenset(g) for g in groups} for groups in (found.groups, places)]
  assert sets[0] == sets[1]


def test_what_is_only_lowered_is_refused():
  with pytest.raises(AssertionError, match='module @jit_sin'):
    hlo_text.collectives(jax.jit(jnp.sin).lower(1.0))
