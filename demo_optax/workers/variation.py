"""Finds which values differ between workers, in the program of one worker.

A `data_parallel` step is traced once, for one worker. `origins_of_outputs`
follows the worker's own arrays (rows of a batch, momentum, random keys) through
that program. What is computed from them differs between workers, until a
collective over all workers makes one value of it. On the way it asks the checks
that `watch` has left in the program.

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
    return bool(self & (Origin.STATE | Origin.DATA))


_REDUCTIONS = ('psum', 'pmax', 'pmin', 'all_gather')
_EXCHANGES = ('all_to_all', 'ppermute', 'reduce_scatter', 'axis_index')

# Each output is computed from the operand in its place alone.
_EACH_ALONE = ('convert_element_type', 'device_put', 'optimization_barrier')

# The step that is being traced for one worker: a `StepView` of `inside`.
traced_step: contextvars.ContextVar[Any] = contextvars.ContextVar(
  'demo_optax_traced_step', default=None
)

# Raises for values that must differ, or must not.
Check = Callable[[Sequence[Origin]], None]

_SAME, _OWN = Origin.NOTHING, Origin.STATE | Origin.DATA
_PASSED_ON = _OWN | Origin.TOTAL


# Returns its operands. With `outputs`, these are declared to differ, or not.
watch_p = core.Primitive('demo_optax_watch')
watch_p.multiple_results = True


def watch(
  arrays: Sequence[jax.Array],
  check: Check | None = None,
  outputs: Sequence[bool] | None = None,
  exchanges: bool = False,
) -> list[jax.Array]:
  """Returns `arrays`; leaves a check of them in the program.

  `outputs` says which of them differ from here on. `exchanges` marks the
  exchange, which must not be in a scan over the rows of one batch.
  """
  declared = None if outputs is None else tuple(outputs)
  return watch_p.bind(
    *arrays, check=check, outputs=declared, exchanges=exchanges
  )


def _identity(*arrays: Any, **params: Any) -> list[Any]:
  del params
  return list(arrays)


watch_p.def_impl(_identity)
watch_p.def_abstract_eval(_identity)
mlir.register_lowering(watch_p, lambda _, *arrays, **params: list(arrays))


@functools.partial(ad.primitive_jvps.__setitem__, watch_p)
def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  return watch_p.bind(*primals, **params), tangents


@functools.partial(batching.primitive_batchers.__setitem__, watch_p)
def _batch(arrays: Any, dims: Any, **params: Any) -> Any:
  if traced_step.get() is not None:
    raise ValueError(
      'A data_parallel step must call update, and what else exchanges, outside'
      ' of jax.vmap, got a vmap in the step. For an ensemble, map the decorated'
      ' step, jax.vmap(step, in_axes=...), over stacked parameters and states;'
      ' or call update once for a list of models.'
    )
  return watch_p.bind(*arrays, **params), dims


def origins_of_outputs(
  closed: core.ClosedJaxpr, inputs: Sequence[Origin], axis: Axis
) -> list[Origin]:
  """Returns the origins of what one worker's program returns.

  `inputs` are the origins of its inputs. `axis` is that of the workers in the
  program.

  Raises:
    ValueError: by a check of `watch`.
  """
  return _Follower(axis).follow(closed.jaxpr, inputs)


def origins_of(
  closed: core.ClosedJaxpr, inputs: Sequence[Origin], axis: Axis
) -> dict[Any, Origin]:
  """Returns the origins of all variables of a program, without checks."""
  return _Follower(axis, checks=False).all_origins(closed.jaxpr, inputs)


def crosses_workers(eqn: Any, axis: Axis) -> bool:
  """Returns whether an equation needs the worker axis, or all workers."""

  def crosses(eqn: Any) -> bool:
    if eqn.primitive.name == 'custom_vmap_call' or eqn.params.get('outputs'):
      return True
    return eqn.params.get('exchanges') or _is_over(eqn.params, axis)

  return _contains(eqn, crosses)


def _contains(eqn: Any, test: Callable[[Any], bool]) -> bool:
  """Returns whether an equation, or one in its programs, passes a test."""
  return test(eqn) or any(
    _contains(inner, test)
    for jaxpr in core.jaxprs_in_params(eqn.params)
    for inner in jaxpr.eqns
  )


class _Follower:
  """Follows values through a program and the programs inside of it."""

  def __init__(self, axis: Axis, checks: bool = True):
    self._axis = axis
    self._checks = checks  # not while a loop is followed to its fixed point

  def follow(self, jaxpr: core.Jaxpr, inputs: Sequence[Origin]) -> list[Origin]:
    """Returns the origins of the outputs."""
    known = self.all_origins(jaxpr, inputs)
    return [origin_of(known, v) for v in jaxpr.outvars]

  def all_origins(
    self, jaxpr: core.Jaxpr, inputs: Sequence[Origin]
  ) -> dict[Any, Origin]:
    """Returns the origins of all variables."""
    known = dict(zip(jaxpr.invars, inputs))
    for eqn in jaxpr.eqns:
      outputs = self._outputs(eqn, [origin_of(known, v) for v in eqn.invars])
      known.update(zip(eqn.outvars, outputs))
    return known

  def _outputs(self, eqn: Any, inputs: list[Origin]) -> Sequence[Origin]:
    """Returns the origins of the outputs of an equation."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if eqn.primitive is watch_p:
      return self._watched(eqn.params, inputs)
    if eqn.primitive is meet_p:  # rows, who is present, whether this worker is
      return _SAME, _SAME, _OWN
    if name in ('new_ref', 'empty_ref'):
      raise ValueError(
        'A data_parallel step must not make mutable arrays, got jax.new_ref:'
        ' what is written to them cannot be followed. Use values that it'
        ' returns.'
      )
    if _is_over(eqn.params, self._axis):
      in_groups = eqn.params.get('axis_index_groups') is not None
      if name in _EXCHANGES or in_groups:
        return [Origin.DATA] * count
      if name.removesuffix('_invariant') in _REDUCTIONS:
        return [_SAME] * count
    if name in _EACH_ALONE:
      return inputs
    if name == 'sharding_constraint':
      self._check_sharding(eqn.params['sharding'])
    if name == 'scan':
      return self._scan(eqn, inputs)
    if name == 'while':
      return self._while(eqn, inputs)
    if name == 'cond':
      return self._cond(eqn, inputs)
    for inner in core.jaxprs_in_params(eqn.params):
      if (len(inner.invars), len(inner.outvars)) == (len(inputs), count):
        return self.follow(inner, inputs)
    return [_joined(inputs)] * count

  def _watched(self, params: Any, inputs: list[Origin]) -> Sequence[Origin]:
    if params['check'] is not None and self._checks:
      params['check'](inputs)
    if params['outputs'] is None:
      return inputs
    return [_OWN if differs else _SAME for differs in params['outputs']]

  def _check_common(
    self, condition: Origin, programs: Sequence[core.Jaxpr]
  ) -> None:
    """Raises if only some workers would communicate."""
    waits = any(_communicates(jaxpr, self._axis) for jaxpr in programs)
    if condition.differs and waits:
      raise ValueError(
        'The condition of jax.lax.cond or of a loop around an exchange, or'
        ' around over_workers, must be the same on all workers, got one that'
        ' differs: some would wait for the others for ever. Give it'
        ' demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is not'
        ' needed, since the exchange leaves out workers with gradients that are'
        ' not finite.'
      )

  def _check_sharding(self, sharding: Any) -> None:
    is_named = isinstance(sharding, NamedSharding)
    if is_named and self._axis in names_of(sharding.spec):
      raise ValueError(
        f'A sharding in a data_parallel step must not name the worker axis'
        f' {self._axis!r}, got {sharding.spec}: arrays in the step are one'
        f" worker's. Leave the axis out: None in place of {self._axis!r}."
      )

  def _loop(
    self,
    body: core.Jaxpr,
    before: list[Origin],
    carry: list[Origin],
    after: list[Origin],
  ) -> list[Origin]:
    """Returns the origins of a loop's outputs, at the fixed point."""
    did_check, self._checks = self._checks, False
    while True:
      outputs = self.follow(body, [*before, *carry, *after])
      new = [_joined(pair) for pair in zip(carry, outputs)]
      if new == carry:
        break
      carry = new
    self._checks = did_check
    outputs = self.follow(body, [*before, *carry, *after])
    return [*carry, *outputs[len(carry) :]]

  def _scan(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
    body, num_consts, num_carry = _scan_parts(eqn)
    consts, rest = inputs[:num_consts], inputs[num_consts:]
    carry, scanned = rest[:num_carry], rest[num_carry:]
    if any(Origin.ROWS in x for x in scanned) and _communicates(
      body, self._axis
    ):
      raise ValueError(
        'A batch must have its rows along the first axis, got one over which'
        ' the step scans and exchanges in each turn, as over batches [steps,'
        ' rows, ...]. Say where the rows are: demo_optax.data_parallel(workers,'
        ' batch_argnames=..., batch_axis=1), or batch_axis=0 if every row is a'
        ' step.'
      )
    each_turn = [_joined([x]) for x in scanned]
    return self._loop(body, consts, [_joined([x]) for x in carry], each_turn)

  def _while(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
    num_cond = eqn.params['cond_nconsts']
    num_body = eqn.params['body_nconsts']
    of_cond, rest = inputs[:num_cond], inputs[num_cond:]
    of_body, carry = rest[:num_body], [_joined([x]) for x in rest[num_body:]]
    carry = self._loop(_jaxpr(eqn.params['body_jaxpr']), of_body, carry, [])
    (ends,) = self.follow(_jaxpr(eqn.params['cond_jaxpr']), [*of_cond, *carry])
    # If it is a worker's own, workers leave the loop at different times.
    self._check_common(ends, [_jaxpr(eqn.params['body_jaxpr'])])
    return [_joined([x, ends]) for x in carry]

  def _cond(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
    which, *operands = inputs
    branches = [_jaxpr(branch) for branch in eqn.params['branches']]
    self._check_common(which, branches)
    outputs = [self.follow(branch, operands) for branch in branches]
    return [_joined([which, *several]) for several in zip(*outputs)]


def _communicates(jaxpr: core.Jaxpr, axis: Axis) -> bool:
  """Returns whether workers wait for each other in a program."""

  def waits(eqn: Any) -> bool:
    if eqn.primitive is meet_p or eqn.params.get('exchanges'):
      return True
    return _is_over(eqn.params, axis) and eqn.primitive.name != 'axis_index'

  return any(_contains(eqn, waits) for eqn in jaxpr.eqns)


def origin_of(known: Mapping[Any, Origin], v: Any) -> Origin:
  """Returns the origin of a variable, or of a constant."""
  return known.get(v, _SAME) if isinstance(v, core.Var) else _SAME


def _is_over(params: Mapping[str, Any], axis: Axis) -> bool:
  """Returns whether a collective with these parameters is over an axis."""
  names = params.get('axes', params.get('axis_name', ()))
  return axis in (names if isinstance(names, tuple) else (names,))


def _joined(origins: Iterable[Origin]) -> Origin:
  """Returns the origin of what is computed from values."""
  return functools.reduce(operator.or_, origins, _SAME) & _PASSED_ON


def _jaxpr(jaxpr: Any) -> core.Jaxpr:
  """Returns a program without its constants, which JAX 0.12 has in itself."""
  return getattr(jaxpr, 'jaxpr', jaxpr)


def _scan_parts(eqn: Any) -> tuple[core.Jaxpr, int, int]:
  """Returns the body of a scan, and its numbers of constants and carries.

  From shapes, since releases of JAX name these parameters differently: what is
  scanned over, or stacked, has one more dimension outside of the body.
  """
  body = _jaxpr(eqn.params['jaxpr'])

  def count_equal(outer: Any, inner: Any) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(x.aval.shape == y.aval.shape for x, y in pairs)

  carry = count_equal(eqn.outvars, body.outvars)
  return body, count_equal(eqn.invars, body.invars) - carry, carry
