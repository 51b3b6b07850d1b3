"""Collectives of compiled code: of functions compiled here, and written by hand."""

import math
import pathlib

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

HANDWRITTEN_TEXTS = pathlib.Path(__file__).parents[1] / 'hlo/handwritten.txt'
GRID = AbstractMesh((2, 4), ('replica', 'fsdp'))
CUBE = AbstractMesh((2, 2, 2), ('a', 'b', 'c'))


def facts(found):
  return [(c.kind, c.axes, c.group_size, c.output_bytes, c.received_bytes)
          for c in found]


# Functions compiled here ------------------------------------------------------

PERMUTATION = [3, 1, 0, 2, 7, 6, 4, 5]
DEVICES = np.array(jax.devices())
DEVICE_GRID = Mesh(DEVICES.reshape(2, 4), ('replica', 'fsdp'))
DEVICE_CUBE = Mesh(DEVICES[PERMUTATION].reshape(2, 2, 2), ('a', 'b', 'c'))


def mapped(mesh, body, dtype=jnp.float32, shape=(8, 8)):
  spec = P(mesh.axis_names)
  f = jax.shard_map(
      body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
  return lambda: jax.jit(f).lower(x)


def placed(f, *specs, out):
  """The partitioner's own collectives, from shardings alone."""
  x = [jax.ShapeDtypeStruct((64, 64), jnp.float32,
                            sharding=NamedSharding(DEVICE_GRID, spec))
       for spec in specs]
  out = NamedSharding(DEVICE_GRID, out)
  return lambda: jax.jit(f, out_shardings=out).lower(*x)


# Per function: its mesh, and per collective its kind, axes, group size, bytes of
# outputs, bytes sent.
COMPILED = {
    'psum in uneven groups': (
        GRID, mapped(DEVICE_GRID, lambda x: lax.psum(
            x, ('replica', 'fsdp'),
            axis_index_groups=[[0, 1, 2], [3, 4, 5], [6, 7]])),
        [('all-reduce', None, 3, 32, 43)]),
    'matmul': (
        GRID, placed(jnp.matmul, P('replica', 'fsdp'), P('fsdp'),
                     out=P('replica')),
        [('all-reduce', ('fsdp',), 4, 8192, 12288)]),
    'gather, fsdp first': (
        GRID, placed(jnp.sin, P(('fsdp', 'replica')), out=P()),
        [('all-gather', ('replica', 'fsdp'), 8, 16384, 14336)]),
    'transpose of shards': (
        GRID, placed(jnp.sin, P('replica', 'fsdp'), out=P('fsdp', 'replica')), [
            ('all-to-all', None, 2, 2048, 1024),  # over half of fsdp
            ('collective-permute', ('replica', 'fsdp'), 2, 2048, 2048)]),
    'no collective': (GRID, mapped(DEVICE_GRID, jnp.sin), []),
}


@pytest.mark.parametrize('name', COMPILED)
def test_compiled(name):
  mesh, lower, expected = COMPILED[name]
  found = hlo_text.collectives(lower().compile(), mesh)
  assert facts(found) == expected


# Written by hand, as XLA writes for GPUs and TPUs -------------------------------

HANDWRITTEN = {
    'gather, started and done': [('all-gather', ('fsdp',), 4, 128, 96)],
    'gather of two in TPU tiles, with state': [
        ('all-gather', ('replica',), 2, 160, 80)],
    'gather wrapped in a computation': [
        ('all-gather', ('fsdp',), 4, 400, 300)],
    'all-reduce of one and of two, started and done': [
        ('all-reduce', ('fsdp',), 4, 20, 30),
        ('all-reduce', ('replica', 'fsdp'), 8, 56, 98)],
    'reduce-scatter, started, updated and done': [
        ('reduce-scatter', ('replica',), 2, 40, 40)],
    'permute, started and done': [
        ('collective-permute', ('replica',), 2, 48, 48)],
    'all-to-all, ragged all-to-all, broadcast': [
        ('all-to-all', ('fsdp',), 4, 32, 24),
        ('ragged-all-to-all', ('replica', 'fsdp'), 8, 256, 224),
        ('collective-broadcast', ('replica',), 2, 100, 100)],
    'four bits, packed and not': [
        ('all-gather', ('replica', 'fsdp'), 8, 8, 7),
        ('all-gather', ('replica', 'fsdp'), 8, 16, 14)],
    'named axes in an order of their own': [
        ('all-gather', ('replica',), 2, 8, 4),
        ('all-gather', ('fsdp',), 4, 16, 12),
        ('all-gather', None, 4, 16, 12),
        ('all-reduce', (), 1, 4, 0)],
    'all devices, where nothing is written': [
        ('all-reduce', ('replica', 'fsdp'), 8, 4, 7)],
}


@pytest.mark.parametrize('name', HANDWRITTEN)
def test_handwritten(name):
  modules = HANDWRITTEN_TEXTS.read_text().split('// ')[1:]
  text = dict(module.split('\n', 1) for module in modules)[name]
  assert facts(hlo_text.collectives(text, GRID)) == HANDWRITTEN[name]


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
  text = (f'HloModule f, num_partitions={count}\n  %r = f32[] all-reduce(%p),'
          f' channel_id=1, replica_groups={spelling}, to_apply=%add')
  [found] = hlo_text.collectives(text)
  assert list(found.groups) == groups
  assert found.axes is None


# Axes, and places in the mesh ----------------------------------------------------

AXES = {
    'grid': [('replica',), ('fsdp',), ('replica', 'fsdp')],
    'cube': [('a',), ('b',), ('c',), ('a', 'b'), ('a', 'c'), ('b', 'c'),
             ('a', 'b', 'c')],
}
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


def make_mesh(name, kind='auto'):
  """Of devices whose places are not their ids."""
  shape = {'grid': GRID, 'cube': CUBE}[name]
  devices = np.array(jax.devices())[PERMUTATION]
  return Mesh(devices.reshape(shape.axis_sizes), shape.axis_names,
              axis_types=(MESHES[kind],) * len(shape.axis_names))


def compiled(mesh, body):
  return mapped(mesh, body, shape=(8 * 64,))().compile()


@pytest.mark.parametrize('name, axes', [
    (name, axes) for name, subsets in AXES.items() for axes in subsets])
def test_axes_and_bytes_of_a_map(name, axes):
  mesh = make_mesh(name, 'explicit' if len(axes) == 2 else 'auto')
  size = math.prod(mesh.shape[axis] for axis in axes)

  def all_kinds(x):
    return {kind: body(x, axes, size).reshape(-1)
            for kind, (body, _) in BODIES.items()}

  found = hlo_text.collectives(compiled(mesh, all_kinds), mesh)
  assert {c.kind: c.received_bytes for c in found} == {
      kind: sent(size) for kind, (_, sent) in BODIES.items()}
  assert len(found) == len(BODIES)
  assert {c.axes for c in found} == {axes}
  assert {c.group_size for c in found
          if c.kind != 'collective-permute'} == {size}


def test_groups_are_places_in_the_mesh():
  """Not ids of devices: what each device receives says who its partners are."""
  mesh = make_mesh('cube')
  step = compiled(mesh, lambda x: lax.all_gather(x[0], ('a', 'c')))
  [found] = hlo_text.collectives(step, mesh)
  x = jnp.repeat(jnp.arange(8.), 64)  # shard i is at place i, and holds i
  received = step(jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names))))
  places = received.reshape(8, 4).astype(int).tolist()
  sets = [{frozenset(g) for g in groups} for groups in (found.groups, places)]
  assert sets[0] == sets[1]


def test_what_is_only_lowered_is_refused():
  with pytest.raises(AssertionError, match='module @jit_sin'):
    hlo_text.collectives(jax.jit(jnp.sin).lower(1.0))
