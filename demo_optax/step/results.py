"""Gives each array that a step returns or changes a role.

`workers.inside.Result` lists the roles; `workers.inside.settle` combines.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._paths import Keys, dotted, is_stacked, leaves_of
from demo_optax.numerics import prng
from demo_optax.step import modules
from demo_optax.step.calls import Call, Fixed, Form, Shapes, take_apart
from demo_optax.workers import Workers, inside
from demo_optax.workers.inside import Result


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
  """The static part of a result; it leaves `jax.jit` in the structure."""

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
  """Collects the results of a step, then the variables of `objects` after it.

  `before` are all arrays as all workers have them, `own` as the step had them.
  """
  after, structure = modules.split(objects)
  treedef = jax.tree.structure(returned, modules.is_object)
  flat = leaves_of({'result': returned}, modules.is_object)
  known, leaves = [*objects], [x for _, x in flat]
  fixed, _ = take_apart(leaves, modules.traces_numbers(returned), known)
  if len(known) > len(objects):
    raise ValueError(
      f'The step returns a {type(known[-1]).__name__} that is not one of'
      ' its arguments. Make Flax objects outside of the step and pass them'
      ' to it, or return nnx.state(...) of it.'
    )
  # nnx.state(model) is what the step has changed in place.
  numbers = {id(x): number for number, x in enumerate(after)}
  fixed = tuple(
    Fixed('variable', numbers[id(x)]) if not f and id(x) in numbers else f
    for x, f in zip(leaves, fixed)
  )
  shapes = tuple(None if f else np.shape(x) for x, f in zip(leaves, fixed))
  seen: list[Any] = []
  previous = _previous(call, treedef, shapes, seen)
  kinds = modules.leaf_kinds(returned)
  _check_metrics(call, seen)
  found = [
    (f'the {dotted(keys)}', keys, x, at, kind)
    for (keys, x), f, at, kind in zip(flat, fixed, previous, kinds)
    if not f
  ]
  start = call.form.fixed.count(None)  # where variables are
  found += [
    (f'the variable {a.name}', a.keys, x, at, a.kind)
    for at, (a, x) in enumerate(zip(call.arrays[start:], after), start)
  ]
  results = [_result(call, before, own, *f) for f in found]
  own_params = inside.own_params([r.keys for r in results])
  for number, (shared, *_) in own_params.items():
    result = results[number]
    result.role = 'equal'
    result.value = results[shared].value.astype(result.value.dtype)
  nexts = [None if r.role == 'stacked' else r.at for r in results]
  return results, Returned(Form(treedef, fixed, structure), nexts)


def hold(workers: Workers, r: Result, axis: int) -> jax.Array:
  """Returns a result with its rows along an axis, where it belongs."""
  x = jnp.moveaxis(r.value, 0, axis) if r.is_rows else r.value
  types_say_it = workers.mesh is None or workers.is_explicit
  if types_say_it or (r.role == 'output' and x.ndim):
    return x
  return jax.lax.with_sharding_constraint(x, workers.sharding(r.keys, x.shape))


def _check_metrics(call: Call, seen: list[Any]) -> None:
  """Raises if a step returns some, not all, of metrics of one structure."""
  for structure, firsts in call.states.items():
    same, count = [call.arrays[n] for n in firsts], seen.count(structure)
    if same[0].kind == 'added' and 0 < count < len(same):
      raise ValueError(
        f'The step must return all of {", ".join(a.keys[0] for a in same)},'
        f' which have one structure, in this order, got {count}. Return those'
        ' that do not change as well, or pass all as one argument.'
      )


def _result(
  call: Call,
  before: Sequence[Any],
  own: Sequence[Any],
  name: str,
  keys: Keys,
  x: Any,
  at: int | None,
  kind: Any,
) -> Result:
  """Decides about an array, the next value of array `at` if that is known."""
  was_key = at is not None and call.arrays[at].role == 'key'
  if at is not None and was_key and x.dtype != own[at].dtype:
    at, was_key = None, False  # of the same shape by chance
  old = None if at is None else before[at]
  is_same = at is not None and x is own[at]
  is_new_key = (
    at is None
    and prng.is_key(keys[1:], x)
    and (
      x.ndim == int(prng.is_pair(x))  # one, not several
    )
  )
  role: inside.ResultRole = 'output' if at is None else 'equal'
  if is_stacked(keys):
    role = 'stacked'
  elif kind in (None, 'stream') and (was_key or is_new_key):
    # The next step folds a key that is the same again.
    role, x = ('equal', old) if is_same else ('key', x)
  elif at is not None and kind not in (None, 'equal'):
    role = 'equal' if kind == 'added' and is_same else kind
  elif 'batch_stats' in keys:  # of Linen
    role = 'statistics'
    if at is None:
      # What stays if no worker's are finite, found by name, or zeros.
      suffix = keys[keys.index('batch_stats') :]
      named = (
        x
        for x, a in zip(before, call.arrays)
        if a.keys[-len(suffix) :] == suffix
      )
      old = next(named, jnp.zeros_like(x))
  if role not in ('statistics', 'added'):
    old = None
  return Result(name, keys, role, x, old, at)


def _previous(
  call: Call, treedef: Any, shapes: Shapes, seen: list[Any]
) -> list[int | None]:
  """Returns for each leaf the number of the array it is the next value of.

  None for what is not part of the next value of a shared argument. Arguments of
  one structure are returned in their order; `seen` has the structures so far.
  """
  structure = treedef, shapes
  for known, firsts in call.states.items():
    if known == structure:
      first = firsts[min(seen.count(structure), len(firsts) - 1)]
      seen.append(structure)
      after = itertools.count(first)
      return [None if shape is None else next(after) for shape in shapes]
  kind, _ = treedef.node_data() or (None, None)
  if kind not in (tuple, list, dict):  # not the fields of a NamedTuple
    return [None] * len(shapes)
  found: list[int | None] = []
  for part in treedef.children():
    own = shapes[len(found) : len(found) + part.num_leaves]
    found += _previous(call, part, own, seen)
  return found
