"""Reads programs that were compiled for TPUs and GPUs: what moves, what it costs.

No figure is a time on a device. What is read: collectives and their bytes;
sorts, scatters, products; temporaries and code as allocated; of TPUs the
compiler's estimate of cycles, memory included, but without sorts, gathers,
scatters and transfers; of GPUs launches, and bytes as operands and results of
kernels.
"""

import math
import re

from hlo_text import FREE, Module, collectives, ints, size_of

WORDS = 'u32'  # what messages are made of


# --- Transfers --------------------------------------------------------------


def transfers(text, mesh, axis, slices=1):
  """What crosses the worker axis, and what stays inside a worker.

  Returns:
    `[kind, dtype, received bytes of a device, shapes]` of each over the worker
    axis; and received bytes by kind of all others. Between slices the
    collectives are given to the hosts, as sends of their kind.
  """
  inside_mesh = mesh
  found = []
  if slices > 1:
    import jax

    inner = {name: size for name, size in mesh.shape.items() if name != axis}
    inside_mesh = jax.sharding.AbstractMesh((*inner.values(),), (*inner,))
    for x, times in Module(text).kernels:
      if x.op != 'send':
        continue
      kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', x.attributes)
      dtype, dims, _ = x.arrays[0]
      size = times * size_of(dtype, dims)
      kind = kind[1].lower().replace('_', '-')
      received = {
        'all-gather': (slices - 1) * size,
        'all-to-all': size * (slices - 1) // slices,
        'all-reduce': 2 * size * (slices - 1) // slices,
      }[kind]
      found.append([kind, dtype, received, [f'{dtype}[{dims}]']])
  elsewhere = {}
  for c in collectives(text, inside_mesh):
    if c.axes is None or axis in c.axes:
      found += _by_dtype(c)
    elif c.axes:
      elsewhere[c.kind] = elsewhere.get(c.kind, 0) + c.received_bytes
  return found, elsewhere


def _by_dtype(collective):
  """Takes a gather apart that XLA has joined from those of several dtypes."""
  parts = {}
  for shape in collective.shapes:
    parts.setdefault(shape.split('[')[0], []).append(shape)
  if collective.kind != 'all-gather':
    parts = {'+'.join(sorted(parts)): list(collective.shapes)}
  for dtype, shapes in parts.items():
    sizes = [size_of(*shape.rstrip(']').split('[')) for shape in shapes]
    share = sum(sizes) / collective.output_bytes if len(parts) > 1 else 1
    received = round(collective.received_bytes * share)
    yield [collective.kind, dtype, received, shapes]


# --- Operations -------------------------------------------------------------


def operations(module):
  """Counts of what is slow or unordered where it is compiled in."""
  scatters = module.all('scatter')
  exchange = [
    x
    for x in module.all('dot', 'convolution')
    if re.search(r'op_name="[^"]*shard_map/[^"]*dot_general', x.attributes)
  ]
  return {
    'sorts': sum(
      times
      for x, times in module.kernels
      if x.op == 'sort' or _holds(module, x, 'sort')
    ),
    'unsorted_scatters': sum(
      'indices_are_sorted=true' not in x.attributes for x in scatters
    ),
    'loops': len(module.all('while')),
    'products_of_the_exchange': len(exchange),
    'not_in_full_precision': sum(
      'operand_precision={highest,highest}' not in x.attributes
      for x in exchange
    ),
    'operations': sum(times for _, times in module.kernels),
  }


def _holds(module, x, op):
  body = module.bodies.get(x.attribute('calls') or '', {})
  return x.op == 'fusion' and any(inner.op == op for inner in body.values())


# --- TPUs -------------------------------------------------------------------


def cycles(module):
  """The compiler's estimates, times how often each kernel runs."""
  total = 0
  for name, times in module.runs.items():
    for x in module.bodies[name].values():
      found = re.search(r'"estimated_cycles":"(\d+)"', x.attributes)
      total += times * int(found[1]) if found else 0
  return total


def padding(module, least=2**16):
  """Bytes that tiles add, of arrays that they enlarge by more than 1.3.

  Returns:
    the sum; the largest factor; and the array that has it.
  """
  added, worst, where = 0, 1.0, ''
  for dtype, dims, layout in (a for x, _ in module.kernels for a in x.arrays):
    tile, sizes = re.search(r':T\(([\d,]+)\)', layout), ints(dims)
    if tile is None or not sizes:
      continue
    physical = [sizes[d] for d in ints(layout.split(':')[0])]  # minor first
    for place, length in enumerate(reversed(ints(tile[1]))):
      if place < len(physical):
        physical[place] = -(-physical[place] // length) * length
    factor = math.prod(physical) / max(math.prod(sizes), 1)
    size = size_of(dtype, dims)
    if factor > 1.3 and factor * size >= least:
      added += (factor - 1) * size
      if factor > worst:
        worst, where = factor, f'{dtype}[{dims}]{{{layout}}}'
  return added, worst, where


# --- GPUs -------------------------------------------------------------------


def launches(thunks, module):
  """Kernels and copies on the device, by XLA's own list of what it runs.

  A loop of a known number of turns runs its body so often and no condition.
  """
  turns = iter(
    [
      module.trips(x)
      for name in module.runs
      for x in module.bodies[name].values()
      if x.op == 'while'
    ]
  )
  total, outer = 0, []  # [indentation, turns, whether its body is read]
  for line in thunks.splitlines():
    indent, text = len(line) - len(line.lstrip()), line.strip()
    if text in ('condition:', 'body:'):
      outer = [loop for loop in outer if loop[0] <= indent]
      outer[-1][2] = text == 'body:'
    elif entry := re.match(r'\d+: (k\w+)', text):
      outer = [loop for loop in outer if loop[0] < indent]
      if entry[1] == 'kWhile':
        outer.append([indent, next(turns), False])
      elif entry[1] in _LAUNCHED:
        total += math.prod(loop[1] * loop[2] for loop in outer)
  return total


_LAUNCHED = (
  'kCustomKernel',
  'kKernel',
  'kGemm',
  'kCublasLtMatmul',
  'kCustomCall',
  'kCopy',
  'kMemset32BitValue',
  'kMemzero',
  'kCubSort',
)


def moved(module):
  """Bytes that kernels read and write: operands and results."""
  return sum(
    times * _moved(module, module.bodies[name], x)
    for name, times in module.runs.items()
    for x in module.bodies[name].values()
    if x.op not in FREE
  )


def _moved(module, body, x):
  if x.op.endswith('-done'):
    return 0
  operands = [body[name].bytes for name in x.operands if name in body]
  if x.op == 'fusion':
    return _moved_by_fusion(module.bodies[x.attribute('calls')])
  if x.op == 'dynamic-update-slice':
    return 2 * operands[1]
  if x.op in ('slice', 'dynamic-slice', 'gather'):
    return 2 * x.bytes
  if x.op.endswith('-start'):
    return max(x.bytes, sum(operands))
  return sum(operands) + x.bytes


def _moved_by_fusion(body):
  """Of a part that is read, the part; of a result in place, what is written."""
  users = {name: [] for name in body}
  for x in body.values():
    for name in x.operands:
      users.get(name, []).append(x)

  def source(name):
    x = body[name]
    return source(x.operands[0]) if x.op in ('bitcast', 'copy') else x

  def read(name, whole):
    total = 0.0
    for user in users[name]:
      first = bool(user.operands) and user.operands[0] == name
      if user.op in ('slice', 'dynamic-slice') or (
        user.op == 'gather' and first
      ):
        total += user.bytes
      elif user.op == 'bitcast' and not user.root:
        total += read(user.name, whole)
      elif user.op in ('dynamic-update-slice', 'scatter') and first:
        pass  # in place
      else:
        return whole
    return min(total, whole)

  total = 0.0
  for x in body.values():
    if x.op == 'parameter':
      total += read(x.name, x.bytes)
  root = next(x for x in body.values() if x.root)
  for name in root.operands if root.op == 'tuple' else (root.name,):
    x = source(name)
    if x.op == 'dynamic-update-slice':
      total += body[x.operands[1]].bytes
    elif x.op == 'scatter':
      updates = x.operands[(len(x.operands) + 1) // 2 :]
      total += 2 * sum(body[name].bytes for name in updates)
    else:
      total += body[name].bytes
  return total


def float_atomics(ptx):
  """Atomic additions of floating-point numbers, whose order is not fixed."""
  return len(
    re.findall(r'\b(?:atom|red)\.[\w.:]*add[\w.]*\.(?:b?f\d+x?2?)\b', ptx)
  )
