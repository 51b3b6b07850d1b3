"""What a step returns and changes: how each array is made one of all workers'.

See `workers.inside.Result` for the roles.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._paths import Keys, is_stacked, path_keys
from demo_optax.numerics import prng
from demo_optax.step import nnx as modules
from demo_optax.step.call import Call, Fixed, Form, structure_of
from demo_optax.workers import Workers, inside
from demo_optax.workers.inside import Result


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
  """What a step returns beside arrays; it leaves `jax.jit` in the structure."""

  form: Form
  # Of each array, the number of the shared one that it is the next value of.
  nexts: list[int | None]


def collect(
    call: Call,
    returned: Any,
    objects: list[Any],
    before: Sequence[Any],
    own: Sequence[Any],
) -> tuple[list[Result], Returned]:
  """Returns what a step returned, then the variables of `objects` after it.

  `before` are all arrays as all workers have them, `own` as the step had them.
  """
  modules.check_variables([a.keys for a in call.variables], objects)
  after, structure = modules.split(objects)
  variables = {id(x): i for i, x in enumerate(after)}
  flat, treedef = jax.tree_util.tree_flatten_with_path(
      returned, is_leaf=modules.is_object
  )
  are_arrays = list(map(
      modules.is_array, [x for _, x in flat], modules.traces_numbers(returned)
  ))
  shapes = [np.shape(x) if a else None for (_, x), a in zip(flat, are_arrays)]
  seen: list[Any] = []
  previous = _previous(call, treedef, shapes, seen)
  kinds = modules.leaf_kinds(returned)
  for one in seen if 'added' in kinds else ():
    same = [first for known, first in call.states if known == one]
    is_metric = call.arrays[same[0]].kind == 'added'
    if is_metric and seen.count(one) < len(same):
      names = ', '.join(str(call.arrays[first].keys[0]) for first in same)
      raise ValueError(
          f'The step must return all of {names}, which have one structure, in'
          f' this order, got {seen.count(one)}. Return those that do not'
          ' change as well, or pass all as one argument.'
      )
  results = []
  fixed: list[Fixed | None] = []
  for (path, x), is_array, at, kind in zip(flat, are_arrays, previous, kinds):
    if isinstance(x, jax.Array) and id(x) in variables:
      # nnx.state(model) is what the step has changed in place.
      fixed.append(Fixed('variable', variables[id(x)]))
    elif modules.is_object(x):
      found = [i for i, o in enumerate(objects) if o is x]
      if not found:
        raise ValueError(
            f'The step returns a {type(x).__name__} that is none of its'
            f' arguments, at {jax.tree_util.keystr(path) or "the top"}. Make'
            ' Flax objects outside of the step and pass them to it, or return'
            ' nnx.state(...) of it.'
        )
      fixed.append(Fixed('object', found[0]))
    elif is_array:
      keys = ('returned', *path_keys(path))
      name = '.'.join(['the result', *map(str, keys[1:])])
      fixed.append(None)
      results.append(_result(call, name, keys, x, at, kind, before, own))
    else:
      fixed.append(Fixed('constant', x))
  first = len(own) - len(call.variables)
  for at, (a, x) in enumerate(zip(call.variables, after), first):
    name = f'the variable {a.name}'
    results.append(_result(call, name, a.keys, x, at, a.kind, before, own))
  own_params = inside.own_params([r.keys for r in results])
  for number, (shared, *_) in own_params.items():
    result = results[number]
    result.role = 'state'
    result.value = results[shared].value.astype(result.value.dtype)
  nexts = [None if r.role == 'stacked' else r.at for r in results]
  return results, Returned(Form(treedef, tuple(fixed), structure), nexts)


def hold(workers: Workers, r: Result, axis: int) -> jax.Array:
  """Returns a result with its rows along an axis, where it belongs."""
  x = jnp.moveaxis(r.value, 0, axis) if r.is_rows else r.value
  if workers.mesh is None or workers.is_explicit:  # types say it
    return x
  if r.role == 'output' and x.ndim:
    return x
  target = workers.sharding(r.keys, x.shape)
  return jax.lax.with_sharding_constraint(x, target)


def _result(
    call: Call,
    name: str,
    keys: Keys,
    x: Any,
    at: int | None,
    kind: Any,
    before: Sequence[Any],
    own: Sequence[Any],
) -> Result:
  """Decides about an array, the next value of array `at` if that is known."""
  role, old = 'output', None
  was_key = at is not None and call.arrays[at].role == 'key'
  if at is not None and was_key and x.dtype != own[at].dtype:
    at, was_key = None, False  # of the same shape by chance
  is_same = at is not None and x is own[at]
  if is_stacked(keys):
    role = 'stacked'
  elif kind in (None, 'stream') and (
      was_key
      or (prng.is_key_array(x) and (at is not None or not x.ndim))
      or (at is None and prng.is_pair(x) and x.ndim == 1
          and prng.is_named(prng.last_name(keys[1:])))
  ):
    role = 'key'
    if at is not None and is_same:  # the next step folds the same one again
      role, x = 'state', before[at]
  elif at is not None and kind not in (None, 'state'):
    role, old = kind, before[at]
    if kind == 'added' and is_same:
      role = 'state'
  elif 'batch_stats' in keys:  # of Linen
    # What stays if no worker's are finite: those before, found by name if need
    # be, or zeros.
    role, suffix = 'statistics', keys[keys.index('batch_stats') :]
    named = [
        n for n, a in enumerate(call.arrays) if a.keys[-len(suffix) :] == suffix
    ]
    number = at if at is not None else next(iter(named), None)
    old = jnp.zeros_like(x) if number is None else before[number]
  elif at is not None:
    role = 'state'
  return Result(name, keys, role, x, old, at)


def _previous(
    call: Call,
    treedef: Any,
    shapes: Sequence[tuple[int, ...] | None],
    seen: list[Any],
) -> list[int | None]:
  """Returns for each leaf the number of the array it is the next value of.

  None for what is not part of the next value of a shared argument. Arguments of
  one structure are returned in their order; `seen` has the structures so far.
  """
  structure = structure_of(treedef, shapes)
  firsts = [first for known, first in call.states if known == structure]
  if structure is not None and firsts:
    after = itertools.count(firsts[min(seen.count(structure), len(firsts) - 1)])
    seen.append(structure)
    return [None if shape is None else next(after) for shape in shapes]
  kind, _ = treedef.node_data() or (None, None)
  if kind not in (tuple, list, dict):  # not the fields of a NamedTuple
    return [None] * len(shapes)
  found: list[int | None] = []
  for part in treedef.children():
    own = shapes[len(found) : len(found) + part.num_leaves]
    found += _previous(call, part, own, seen)
  return found
