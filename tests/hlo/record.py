"""Records what XLA writes for small sharded functions.

    python tests/hlo/record.py tests/hlo/jax_0.12.txt

On eight simulated CPU devices, per function: its name, the first line of the
compiled text, and the collectives without metadata. `jax_0.10.txt` and
`jax_0.12.txt` were made so. `handwritten.txt` was not: no CPU writes those
instructions, which follow XLA's text format for GPUs and TPUs.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PERMUTATION = [3, 1, 0, 2, 7, 6, 4, 5]


def main(path):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  with open(path, 'w') as file:
    for name, lowered in functions().items():
      header, *lines = lowered.compile().as_text().splitlines()
      file.write(f'// {name}\n{header}\n')
      for line in lines:
        if re.search(r'= .*(all-|collective-|reduce-scatter).*\(', line):
          file.write(line.split(', metadata=')[0] + '\n')


def functions():
  devices = np.array(jax.devices())
  grid = Mesh(devices.reshape(2, 4), ('replica', 'fsdp'))
  cube = Mesh(devices.reshape(2, 2, 2), ('a', 'b', 'c'))
  permuted = Mesh(devices[PERMUTATION].reshape(2, 2, 2), ('a', 'b', 'c'))
  other = Mesh(devices.reshape(4, 2), ('p', 'q'))
  ring = [(i, (i + 1) % 4) for i in range(4)]

  def mapped(mesh, body, shape=(8, 8), dtype=jnp.float32):
    spec = P(mesh.axis_names)
    f = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return jax.jit(f).lower(x)

  def placed(f, *specs, out, shape=(64, 64)):
    """The partitioner's own collectives, from shardings alone."""
    x = [jax.ShapeDtypeStruct(shape, jnp.float32,
                              sharding=NamedSharding(grid, spec))
         for spec in specs]
    return jax.jit(f, out_shardings=NamedSharding(grid, out)).lower(*x)

  def between_meshes(x):
    on_other = NamedSharding(other, P('p'))
    return lax.with_sharding_constraint(x * 2, on_other)

  return {
      'psum over fsdp': mapped(grid, lambda x: lax.psum(x, 'fsdp')),
      'psum over all': mapped(grid, lambda x: lax.psum(x, ('replica', 'fsdp'))),
      'psum over c, a': mapped(permuted, lambda x: lax.psum(x, ('c', 'a'))),
      'psum in uneven groups': mapped(grid, lambda x: lax.psum(
          x, ('replica', 'fsdp'),
          axis_index_groups=[[0, 1, 2], [3, 4, 5], [6, 7]])),
      'psum of two': mapped(grid, lambda x: sum(
          jnp.sum(y) + x for y in lax.psum((x, x[:, :3]), 'fsdp'))),
      'gather of bytes': mapped(
          grid, lambda x: lax.all_gather(x, 'replica'), dtype=jnp.uint8),
      'gather of bools': mapped(
          cube, lambda x: lax.all_gather(x, ('a', 'c')), dtype=jnp.bool_),
      'gather of int2': mapped(
          grid, lambda x: lax.all_gather(x, 'fsdp'), dtype=jnp.int2),
      'gather of complex': mapped(
          cube, lambda x: lax.all_gather(x, 'b'), dtype=jnp.complex64),
      'scatter over b, c': mapped(permuted, lambda x: lax.psum_scatter(
          x.reshape(4, 2), ('b', 'c'))),
      'all to all': mapped(cube, lambda x: lax.all_to_all(
          x.reshape(2, 4), 'c', 0, 0)),
      'ring': mapped(grid, lambda x: lax.ppermute(x, 'fsdp', ring)),
      'one sends': mapped(permuted, lambda x: lax.ppermute(x, 'a', [(0, 1)])),
      'nobody sends': mapped(grid, lambda x: lax.ppermute(x, 'fsdp', [])),
      'matmul': placed(
          jnp.matmul, P('replica', 'fsdp'), P('fsdp'), out=P('replica')),
      'gather, fsdp first': placed(
          jnp.sin, P(('fsdp', 'replica')), out=P()),
      'transpose of shards': placed(
          jnp.sin, P('replica', 'fsdp'), out=P('fsdp', 'replica')),
      'between meshes': placed(
          between_meshes, P('fsdp'), out=P('replica')),
      'no collective': mapped(grid, jnp.sin),
  }


if __name__ == '__main__':
  main(sys.argv[1])
