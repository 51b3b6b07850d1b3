"""Collectives of compiled code: recorded texts, and functions compiled here."""

import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

pytestmark = pytest.mark.core

HLO = pathlib.Path(__file__).parents[1] / 'hlo'
GRID = AbstractMesh((2, 4), ('replica', 'fsdp'))
CUBE = AbstractMesh((2, 2, 2), ('a', 'b', 'c'))


def recorded(file):
  """The texts of a file, by name."""
  modules = (HLO / file).read_text().split('// ')[1:]
  return dict(module.split('\n', 1) for module in modules)


def facts(found):
  return [(c.kind, c.axes, c.group_size, c.output_bytes, c.sent_bytes)
          for c in found]


def as_sets(groups):
  return {frozenset(group) for group in groups}


# Recorded texts ---------------------------------------------------------------

# Per function of hlo/record.py: its mesh, and per collective its kind, axes,
# group size, bytes of outputs, bytes sent.
RECORDED = {
    'psum over fsdp': (GRID, [('all-reduce', ('fsdp',), 4, 32, 48)]),
    'psum over all': (
        GRID, [('all-reduce', ('replica', 'fsdp'), 8, 32, 56)]),
    'psum over c, a': (CUBE, [('all-reduce', ('a', 'c'), 4, 32, 48)]),
    'psum in uneven groups': (GRID, [('all-reduce', None, 3, 32, 43)]),
    'psum of two': (GRID, [('all-reduce', ('fsdp',), 4, 44, 66)]),
    'gather of bytes': (GRID, [('all-gather', ('replica',), 2, 16, 8)]),
    'gather of bools': (CUBE, [('all-gather', ('a', 'c'), 4, 32, 24)]),
    'gather of int2': (GRID, [('all-gather', ('fsdp',), 4, 8, 6)]),
    'gather of complex': (CUBE, [('all-gather', ('b',), 2, 128, 64)]),
    'scatter over b, c': (CUBE, [('reduce-scatter', ('b', 'c'), 4, 8, 24)]),
    'all to all': (CUBE, [('all-to-all', ('c',), 2, 32, 16)]),
    'ring': (GRID, [('collective-permute', ('fsdp',), 2, 32, 32)]),
    'one sends': (CUBE, [('collective-permute', ('a',), 2, 32, 32)]),
    'nobody sends': (GRID, [('collective-permute', (), 1, 32, 0)]),
    'matmul': (GRID, [('all-reduce', ('fsdp',), 4, 8192, 12288)]),
    'gather, fsdp first': (
        GRID, [('all-gather', ('replica', 'fsdp'), 8, 16384, 14336)]),
    'transpose of shards': (GRID, [
        ('all-to-all', None, 2, 2048, 1024),  # over half of fsdp
        ('collective-permute', ('replica', 'fsdp'), 2, 2048, 2048)]),
    'between meshes': (GRID, [
        ('collective-permute', ('replica', 'fsdp'), 2, 4096, 4096),
        ('all-gather', None, 2, 8192, 4096)]),
    'no collective': (GRID, []),
}

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


@pytest.mark.parametrize('file', ['jax_0.10.txt', 'jax_0.12.txt'])
@pytest.mark.parametrize('name', RECORDED)
def test_recorded(file, name):
  mesh, expected = RECORDED[name]
  assert facts(demo_optax.tools.collectives(recorded(file)[name], mesh)) == expected


@pytest.mark.parametrize('name', HANDWRITTEN)
def test_handwritten(name):
  text = recorded('handwritten.txt')[name]
  assert facts(demo_optax.tools.collectives(text, GRID)) == HANDWRITTEN[name]


def test_every_recorded_text_is_in_the_tables():
  assert list(recorded('handwritten.txt')) == list(HANDWRITTEN)
  for file in ('jax_0.10.txt', 'jax_0.12.txt'):
    assert list(recorded(file)) == list(RECORDED)


@pytest.mark.parametrize('name', RECORDED)
def test_all_spellings_of_groups_are_the_same_groups(name):
  """The two lines of JAX write the same functions in different ways."""
  old, new = (demo_optax.tools.collectives(recorded(file)[name])
              for file in ('jax_0.10.txt', 'jax_0.12.txt'))
  assert [as_sets(c.groups) for c in old] == [as_sets(c.groups) for c in new]


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
  [found] = demo_optax.tools.collectives(text)
  assert list(found.groups) == groups
  assert found.groups_text == spelling
  assert found.axes is None


def test_shapes_are_listed():
  text = recorded('handwritten.txt')['gather of two in TPU tiles, with state']
  [found] = demo_optax.tools.collectives(text)
  assert found.shapes == ('f32[32]', 's8[16,2]')


# Functions compiled here ------------------------------------------------------

AXES = {
    'grid': [('replica',), ('fsdp',), ('replica', 'fsdp')],
    'cube': [('a',), ('b',), ('c',), ('a', 'b'), ('a', 'c'), ('b', 'c'),
             ('a', 'b', 'c')],
}
# Places of the devices in the mesh: their ids, and others.
ORDERS = {'in order': range(8), 'permuted': [3, 1, 0, 2, 7, 6, 4, 5]}

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


def make_mesh(name, kind='auto', order='in order'):
  shape = {'grid': GRID, 'cube': CUBE}[name]
  devices = np.array(jax.devices())[list(ORDERS[order])]
  return Mesh(devices.reshape(shape.axis_sizes), shape.axis_names,
              axis_types=(MESHES[kind],) * len(shape.axis_names))


def compiled(mesh, body):
  spec = P(mesh.axis_names)
  x = jax.ShapeDtypeStruct(
      (8 * 64,), jnp.float32, sharding=NamedSharding(mesh, spec))
  return jax.jit(jax.shard_map(
      body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  ).lower(x).compile()


@pytest.mark.parametrize('name, axes', [
    (name, axes) for name, subsets in AXES.items() for axes in subsets])
@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('kind', MESHES)
def test_axes_and_bytes_of_a_map(name, axes, order, kind):
  mesh = make_mesh(name, kind, order)
  size = math.prod(mesh.shape[axis] for axis in axes)

  def all_kinds(x):
    return {kind: body(x, axes, size).reshape(-1)
            for kind, (body, _) in BODIES.items()}

  found = demo_optax.tools.collectives(compiled(mesh, all_kinds), mesh)
  assert {c.kind: c.sent_bytes for c in found} == {
      kind: sent(size) for kind, (_, sent) in BODIES.items()}
  assert len(found) == len(BODIES)
  assert {c.axes for c in found} == {axes}
  assert {c.group_size for c in found
          if c.kind != 'collective-permute'} == {size}


@pytest.mark.parametrize('order', ORDERS)
def test_groups_are_places_in_the_mesh(order):
  """Not ids of devices: what each device receives says who its partners are."""
  mesh = make_mesh('cube', order=order)
  step = compiled(mesh, lambda x: lax.all_gather(x[0], ('a', 'c')))
  [found] = demo_optax.tools.collectives(step, mesh)
  x = jnp.repeat(jnp.arange(8.), 64)  # shard i is at place i, and holds i
  received = step(jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names))))
  places = received.reshape(8, 4).astype(int).tolist()
  assert as_sets(found.groups) == as_sets(places)


def test_an_abstract_mesh_is_enough():
  step = compiled(make_mesh('grid'), lambda x: lax.psum(x, 'fsdp'))
  [found] = demo_optax.tools.collectives(step, GRID)
  assert found.axes == ('fsdp',)
  assert demo_optax.tools.collectives(step.as_text(), GRID) == [found]


@pytest.mark.parametrize('kind', MESHES)
def test_the_partitioners_own_collectives(kind):
  mesh = make_mesh('grid', kind)
  a, b = (jax.ShapeDtypeStruct((64, 64), jnp.float32,
                               sharding=NamedSharding(mesh, spec))
          for spec in (P('replica', None), P('fsdp', None)))
  f = jax.jit(lambda a, b: (a.sum(), b.sum()))
  found = demo_optax.tools.collectives(f.lower(a, b).compile(), mesh)
  assert {c.axes for c in found} == {('replica',), ('fsdp',)}
  assert sum(c.output_bytes for c in found) == 8


# Mistakes ---------------------------------------------------------------------

HEADER = 'HloModule f, num_partitions=8\n'


@pytest.mark.parametrize('compiled, mesh, error, match', [
    (3, None, TypeError, 'int has no as_text'),
    (HEADER, 'data', TypeError, "mesh='data' must be a mesh"),
    (HEADER, AbstractMesh((4,), ('data',)), ValueError,
     "'data': 4.* has 4 devices.* compiled for 8"),
    ('module @jit_f {}', None, ValueError, "'module @jit_f {}'.*compile()"),
    (HEADER + '  %r = q7[3]{0} all-reduce(%p), to_apply=%add', None,
     ValueError, r'q7\[3\]: the size of dtype q7'),
    (HEADER + '  %r = f32[] all-reduce(%p), replica_groups=ring(8)', None,
     ValueError, r'not understood:.*ring\(8\)'),
])
def test_mistakes(compiled, mesh, error, match):
  with pytest.raises(error, match=match):
    demo_optax.tools.collectives(compiled, mesh)


def test_what_is_only_lowered_is_refused():
  with pytest.raises(ValueError, match='not compiled'):
    demo_optax.tools.collectives(jax.jit(jnp.sin).lower(1.0))


# Hostile texts, built by a process of their own, which must come to an end. A
# quadratic search takes hours at this length, a linear one a second.
LONG = {
    'types': "'%a = ' + 'f32[' * 10**6 + ' all-gather(x)'",
    'layouts': "'%a = ' + 'f32[1]{' * 10**6 + ' all-gather(x)'",
    'a tuple': "'%a = (' + 'f32[1],' * 10**6 + 'f32[]) all-gather-start(x)'",
    'open meshes': "'%a = f32[] all-gather(x), '"
                   " + 'replica_groups=mesh[' * 10**6",
    'ids': "'%a = f32[] all-gather(x), '"
           " + 'replica_groups=mesh[a=2], device_ids=(' * 10**6",
    'axes': "'%a = f32[] all-gather(x), ' + 'replica_groups=mesh[a=2] {' * 10**6",
    'a name': "'%a = f32[] all-gather(x), replica_groups=mesh[' + 'a' * 10**6"
              " + '] {a}'",
    'many axes': "'%a = f32[] all-gather(x), replica_groups=mesh['"
                 " + 'a=2,' * 10**6 + '] {a}'",
    'braces': "'%a = f32[] all-gather(x), replica_groups=' + '{' * 10**6 + '}'",
    'spaces': "' ' * 10**6",
    'brackets': "'%a = ' + '(' * 10**6 + ') all-gather'",
    'a number': "'%a = f32[' + '9' * 10**6 + '] all-gather(x)'",
    'numbers': "'%a = f32[' + '999999999,' * 10**6 + '] all-gather(x)'",
}
READ = '''
import sys, demo_optax
for name, text in eval(sys.argv[1]).items():
  print(name, flush=True)
  try:
    demo_optax.tools.collectives('HloModule f, num_partitions=8\\n' + eval(text))
  except ValueError as error:
    assert len(str(error)) < 1000
'''


def test_long_texts_are_read_in_linear_time():
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  try:
    run = subprocess.run(
        [sys.executable, '-c', READ, repr(LONG)], env=environment,
        timeout=200, capture_output=True, text=True)
  except subprocess.TimeoutExpired as error:
    pytest.fail(f'The last of these takes too long: {error.stdout!r}')
  assert run.returncode == 0, (run.stdout, run.stderr[-2000:])
  assert run.stdout.splitlines() == list(LONG)


@pytest.mark.parametrize('line, says', [
    *((f'%r = f32[4] all-gather(%p), replica_groups={groups}', says)
      for groups, says in [
          ('[2,4]<=[99999999999]', 'More than 8 devices: .99999999999'),
          ('[1,9]<=[' + '9,' * 40 + '9]', 'More than 8 devices'),
          ('[2,4]<=[9]', 'More than 8 devices'),
          ('[2,4]<=[6]', 'cannot reshape'),
          ('{{0,99}}', 'Device 99 is in a group.* for 8'),
          ('[8]<=[8]', '1 dimensions'),
          ('[0,8]<=[0]', 'no group in it'),
          ('[2,4]<=[2,4]T(0,0)', 'repeated axis'),
          ('[1,1]<=[' + '9' * 30 + ']', 'too large a number'),
          ("mesh['a'=99999999999] {'a'}", 'More than 8 devices'),
          ("mesh['a'=8] {'b'}", "'b'.*mesh"),
          ("mesh['a'=8] {'a':(0)2}", 'not understood.*mesh'),
          ("mesh['a'=8] {'a':(3)2}", 'not understood.*mesh'),
          ('mesh[a] {a}', "'a' is no axis"),
          ('{{}}', 'no group in it'),
          ('{{9' + '9' * 30 + '}}', 'too large a number'),
      ]),
    ('%r = f32[4] all-gather-start(%p), replica_groups={}', 'not a tuple'),
    ('%r = f32[4] collective-permute(%p), source_target_pairs={{0,1,2}}',
     'Pairs are wanted'),
    ('%r = f32[9999999999,9999999999] all-gather(%p)', 'More than .* elements'),
])
def test_texts_that_ask_for_too_much(line, says):
  with pytest.raises(ValueError, match=says):
    demo_optax.tools.collectives(f'{HEADER}  {line}')


def test_more_devices_than_there_are():
  text = '\n  %r = f32[] all-reduce(%p), replica_groups='
  with pytest.raises(ValueError, match='More than 131,072 devices'):
    demo_optax.tools.collectives(f'HloModule f, num_partitions=99999999999{text}{{}}')
  with pytest.raises(ValueError, match=r'Device 8 is in a group.*compiled for 8'):
    demo_optax.tools.collectives(
        f'HloModule f, num_partitions=8{text}{{{{0,8}}}}', GRID)


def test_many_groups_of_many_devices_are_refused():
  """Also where each is below the bound: time is that of the devices there are."""
  lines = ''.join(
      f'  %r = f32[8] all-gather(%p), replica_groups=[{n},1]<=[{n}]\n'
      for n in range(100_000, 100_400))
  with pytest.raises(ValueError, match='More than 8 devices'):
    demo_optax.tools.collectives(f'{HEADER}{lines}')
