"""Finds which values differ between workers, in the program of one worker.

A `data_parallel` step is traced once, for one worker. `follow` takes the
worker's own arrays (rows of a batch, momentum, random keys) through that
program. What is computed from them differs between workers, until a collective
over all workers makes one value of it. On the way it asks the checks that
`watch` has left in the program.

Types of arrays (`jax.shard_map` with `check_vma`) say the same of a step on a
mesh, but they need a rule for every primitive, and turn the gradient of
parameters that all workers share into a sum.
"""

import contextvars
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from demo_optax.workers.collectives import Axis, meet_p
from demo_optax.workers.param_specs import names_of


class Origin(enum.IntFlag):
  """Says from what a value is computed that is one worker's own."""

  NOTHING = 0  # so that it is the same on all workers
  STATE = 1  # momentum, or own parameters
  DATA = 2  # a batch, or random keys
  ROWS = 4  # is itself a batch, as `data_parallel` has cut it
  TOTAL = 8  # the total of a metric before the step, which all workers share

  @property
  def differs(self) -> bool:
    """Whether the value differs between workers."""
    return bool(self & _OWN)


_SAME, _OWN = Origin.NOTHING, Origin.STATE | Origin.DATA

# Collectives that make one value of all workers'.
_REDUCTIONS = ('psum', 'pmax', 'pmin', 'all_gather')

# The step that is being traced for one worker: a `StepView` of `inside`.
traced_step: contextvars.ContextVar[Any] = contextvars.ContextVar(
  'demo_optax_traced_step', default=None
)

# Raises for values that must differ, or must not.
Check = Callable[[Sequence[Origin]], None]

# Returns its operands. With `outputs`, these come from an exchange, which says
# whether they differ.
watch_p = core.Primitive('demo_optax_watch')
watch_p.multiple_results = True


def watch(
  arrays: Sequence[jax.Array],
  check: Check | None = None,
  outputs: tuple[bool, ...] | None = None,
) -> list[jax.Array]:
  """Returns `arrays`; leaves a check of them in the program.

  `outputs` says which results of an exchange differ between workers.
  """
  return watch_p.bind(*arrays, check=check, outputs=outputs)


@watch_p.def_impl
@watch_p.def_abstract_eval
def _identity(*arrays: Any, **params: object) -> list[Any]:
  del params
  return list(arrays)


mlir.register_lowering(watch_p, lambda _, *arrays, **params: list(arrays))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  return watch_p.bind(*primals, **params), tangents


def _batch(arrays: Any, dims: Any, **params: Any) -> Any:
  if traced_step.get() is not None:
    raise ValueError(
      'A data_parallel step must call update, and what else exchanges, outside'
      ' of jax.vmap, got a vmap in the step. For an ensemble, map the decorated'
      ' step, jax.vmap(step, in_axes=...), over stacked parameters and states;'
      ' or call update once for a list of models.'
    )
  return watch_p.bind(*arrays, **params), dims


ad.primitive_jvps[watch_p] = _jvp
batching.primitive_batchers[watch_p] = _batch


def follow(
  jaxpr: core.Jaxpr, inputs: Sequence[Origin], axis: Axis
) -> dict[core.Var, Origin]:
  """Returns the origins of all variables in one worker's program.

  `inputs` are the origins of its inputs. `axis` is that of the workers in the
  program.

  Raises:
    ValueError: by a check of `watch`.
  """
  return _Follower(axis).follow(jaxpr, inputs)


def origins_at(
  known: Mapping[core.Var, Origin], atoms: Iterable[object]
) -> list[Origin]:
  """Returns the origins of variables and constants."""
  found = []
  for atom in atoms:
    origin = _SAME
    if isinstance(atom, core.Var):
      origin = known.get(atom, _SAME)
    found.append(origin)
  return found


def waits(
  eqn: core.JaxprEqn, axis: Axis, also: Sequence[core.Primitive | str] = ()
) -> bool:
  """Returns whether workers wait for each other in an equation.

  True as well for equations of the primitives `also`, by name.
  """
  name, params = eqn.primitive.name, eqn.params
  is_exchange = eqn.primitive is watch_p and params['outputs'] is not None
  is_collective = _is_over(params, axis) and name != 'axis_index'
  if name in also or eqn.primitive is meet_p or is_exchange or is_collective:
    return True
  return any(
    waits(inner, axis, also)
    for jaxpr in core.jaxprs_in_params(params)
    for inner in jaxpr.eqns
  )


def _is_over(params: Mapping[str, Any], axis: Axis) -> bool:
  """Returns whether a collective with these parameters is over an axis."""
  names = params.get('axes', params.get('axis_name', ()))
  return axis in (names if isinstance(names, tuple) else (names,))


def _joined(origins: Iterable[Origin]) -> Origin:
  """Returns the origin of what is computed from values."""
  computed = functools.reduce(operator.or_, origins, _SAME)
  return computed & ~Origin.ROWS


class _Follower:
  """Follows values through a program and the programs inside of it."""

  def __init__(self, axis: Axis):
    self._axis = axis
    self._checks = True  # not while a loop is followed to its fixed point

  def follow(
    self, jaxpr: core.Jaxpr, inputs: Sequence[Origin]
  ) -> dict[core.Var, Origin]:
    """Returns the origins of all variables."""
    known = dict(zip(jaxpr.invars, inputs))
    for eqn in jaxpr.eqns:
      outputs = self._outputs(eqn, origins_at(known, eqn.invars))
      known.update(zip(eqn.outvars, outputs))
    return known

  def _run(self, jaxpr: core.Jaxpr, inputs: Sequence[Origin]) -> list[Origin]:
    """Returns the origins of a program's outputs."""
    return origins_at(self.follow(jaxpr, inputs), jaxpr.outvars)

  def _outputs(
    self, eqn: core.JaxprEqn, inputs: list[Origin]
  ) -> Sequence[Origin]:
    """Returns the origins of the outputs of an equation."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _RULES:
      return _RULES[name](self, eqn, inputs)
    if _is_over(eqn.params, self._axis):
      # A sum in groups, a permutation, or the number of the worker differs.
      in_groups = eqn.params.get('axis_index_groups') is not None
      is_reduction = name.removesuffix('_invariant') in _REDUCTIONS
      is_same = is_reduction and not in_groups
      return [_SAME if is_same else Origin.DATA] * count
    for inner in core.jaxprs_in_params(eqn.params):
      if (len(inner.invars), len(inner.outvars)) == (len(inputs), count):
        return self._run(inner, inputs)
    return [_joined(inputs)] * count

  def _watch(
    self, eqn: core.JaxprEqn, inputs: list[Origin]
  ) -> Sequence[Origin]:
    check, outputs = eqn.params['check'], eqn.params['outputs']
    if check is not None and self._checks:
      check(inputs)
    if outputs is None:
      return inputs
    return [_OWN if differs else _SAME for differs in outputs]

  def _meet(self, eqn: core.JaxprEqn, inputs: list[Origin]) -> Sequence[Origin]:
    return _SAME, _SAME, _OWN  # rows, who is present, whether this worker is

  def _each_alone(
    self, eqn: core.JaxprEqn, inputs: list[Origin]
  ) -> Sequence[Origin]:
    return inputs

  def _ref(self, eqn: core.JaxprEqn, inputs: list[Origin]) -> Sequence[Origin]:
    raise ValueError(
      'A data_parallel step must not make mutable arrays, got jax.new_ref: what'
      ' is written to them cannot be followed. Use values that it returns.'
    )

  def _sharding(
    self, eqn: core.JaxprEqn, inputs: list[Origin]
  ) -> Sequence[Origin]:
    sharding = eqn.params['sharding']
    is_named = isinstance(sharding, NamedSharding)
    if is_named and self._axis in names_of(sharding.spec):
      raise ValueError(
        f'A sharding in a data_parallel step must not name the worker axis'
        f' {self._axis!r}, got {sharding.spec}: arrays in the step are one'
        f" worker's. Leave the axis out: None in place of {self._axis!r}."
      )
    return [_joined(inputs)]

  def _loop(
    self,
    body: core.Jaxpr,
    before: list[Origin],
    carry: list[Origin],
    after: list[Origin],
  ) -> list[Origin]:
    """Returns the origins of a loop's outputs, at the fixed point."""
    did_check, self._checks = self._checks, False
    carry = [_joined([x]) for x in carry]
    old: list[Origin] = []
    while old != carry:
      old = carry
      outputs = self._run(body, [*before, *carry, *after])
      carry = [_joined(pair) for pair in zip(carry, outputs)]
    self._checks = did_check
    outputs = self._run(body, [*before, *carry, *after])
    return [*carry, *outputs[len(carry) :]]

  def _scan(self, eqn: core.JaxprEqn, inputs: list[Origin]) -> Sequence[Origin]:
    body = eqn.params['jaxpr'].jaxpr
    # From shapes, since releases of JAX name the numbers differently: what is
    # scanned over, or stacked, has one more dimension outside of the body.
    num_carry = _num_equal(eqn.outvars, body.outvars)
    num_equal = _num_equal(eqn.invars, body.invars)
    num_consts = num_equal - num_carry
    scanned = inputs[num_equal:]
    has_rows = any(Origin.ROWS in x for x in scanned)
    if has_rows and any(waits(inner, self._axis) for inner in body.eqns):
      raise ValueError(
        'A batch must have its rows along the first axis, got one over which'
        ' the step scans and exchanges in each turn, as over batches [steps,'
        ' rows, ...]. Say where the rows are: demo_optax.data_parallel(workers,'
        ' batch_argnames=..., batch_axis=1), or batch_axis=0 if every row is a'
        ' step.'
      )
    each_turn = [_joined([x]) for x in scanned]
    carry = inputs[num_consts:num_equal]
    return self._loop(body, inputs[:num_consts], carry, each_turn)

  def _while(
    self, eqn: core.JaxprEqn, inputs: list[Origin]
  ) -> Sequence[Origin]:
    num_cond = eqn.params['cond_nconsts']
    num_consts = num_cond + eqn.params['body_nconsts']
    body = eqn.params['body_jaxpr'].jaxpr
    carry = inputs[num_consts:]
    carry = self._loop(body, inputs[num_cond:num_consts], carry, [])
    condition = eqn.params['cond_jaxpr'].jaxpr
    (ends,) = self._run(condition, [*inputs[:num_cond], *carry])
    # If it is a worker's own, workers leave the loop at different times.
    self._check_common(ends, [body])
    return [_joined([x, ends]) for x in carry]

  def _cond(self, eqn: core.JaxprEqn, inputs: list[Origin]) -> Sequence[Origin]:
    which, *operands = inputs
    branches = [branch.jaxpr for branch in eqn.params['branches']]
    self._check_common(which, branches)
    outputs = [self._run(branch, operands) for branch in branches]
    return [_joined([which, *several]) for several in zip(*outputs)]

  def _check_common(
    self, condition: Origin, programs: Sequence[core.Jaxpr]
  ) -> None:
    """Raises if only some workers would communicate."""
    if not condition.differs:
      return
    inside = [eqn for program in programs for eqn in program.eqns]
    if any(waits(eqn, self._axis) for eqn in inside):
      raise ValueError(
        'The condition of jax.lax.cond or of a loop around an exchange, or'
        ' around over_workers, must be the same on all workers, got one that'
        ' differs: some would wait for the others for ever. Give it'
        ' demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is not'
        ' needed, since the exchange leaves out workers with gradients that are'
        ' not finite.'
      )


def _num_equal(outer: Sequence[Any], inner: Sequence[Any]) -> int:
  """Counts the variables that have the same shape in both programs."""
  pairs = zip(outer, inner, strict=True)
  return sum(x.aval.shape == y.aval.shape for x, y in pairs)


# By primitive, where outputs are not computed from all inputs alike.
_RULES = {
  watch_p.name: _Follower._watch,
  meet_p.name: _Follower._meet,
  'convert_element_type': _Follower._each_alone,
  'device_put': _Follower._each_alone,
  'optimization_barrier': _Follower._each_alone,
  'new_ref': _Follower._ref,
  'empty_ref': _Follower._ref,
  'sharding_constraint': _Follower._sharding,
  'scan': _Follower._scan,
  'while': _Follower._while,
  'cond': _Follower._cond,
}
