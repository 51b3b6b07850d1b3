"""Finds which values differ between workers, in one worker's program.

A `data_parallel` step is traced once, for one worker. `Follower` takes the
worker's own arrays (a batch's rows, momentum, random keys) through that
program. What is computed from them differs between workers, until a collective
over all workers makes one value. On the way it asks the checks that
`watch` has left in the program.

Array types (`jax.shard_map` with `check_vma`) say the same about a step on a
mesh, but they need a rule for every primitive, and turn the gradient for
parameters that all workers share into a sum.
"""

import contextvars
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.interpreters import ad, batching, mlir

from demo_optax.workers.collectives import Axis, meet_p
from demo_optax.workers.workers import Workers


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


Origins = Sequence[Origin]  # of several values

_SAME, _OWN = Origin.NOTHING, Origin.STATE | Origin.DATA

# Collectives that make one value of all workers'.
_REDUCTIONS = ('psum', 'pmax', 'pmin', 'all_gather')

# The workers, as a step that is being traced for one of them sees them.
traced_step: contextvars.ContextVar[Workers | None] = contextvars.ContextVar(
  'demo_optax_traced_step', default=None
)

# Raises for values that must differ, or must not.
Check = Callable[[Origins], None]

# Returns its operands. With `outputs`, these come from an exchange, which says
# whether they differ.
watch_p = core.Primitive('demo_optax_watch')
watch_p.multiple_results = True


def watch(
  arrays: Sequence[jax.Array],
  check: Check | None = None,
  outputs: tuple[bool, ...] | None = None,
) -> list[jax.Array]:
  """Returns `arrays`; leaves a check in the program.

  `outputs` says which results an exchange makes different for workers.
  """
  return watch_p.bind(*arrays, check=check, outputs=outputs)


@watch_p.def_impl
@watch_p.def_abstract_eval
def _identity(
  *arrays: Any,
  **params: object,
) -> list[Any]:
  del params
  return list(arrays)


mlir.register_lowering(watch_p, lambda _, *arrays, **params: list(arrays))


def _jvp(
  primals: Any,
  tangents: Any,
  **params: Any,
) -> Any:
  return watch_p.bind(*primals, **params), tangents


def _batch(
  arrays: Any,
  dims: Any,
  **params: Any,
) -> Any:
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


def _is_over(
  params: Mapping[str, Any],
  axis: Axis,
) -> bool:
  """Returns whether a collective with these parameters is over an axis."""
  # By parameters, since JAX has many collectives.
  names = params.get('axes', params.get('axis_name', ()))
  return axis in (names if isinstance(names, tuple) else (names,))


def _joined(origins: Iterable[Origin]) -> Origin:
  """Returns the origin for what is computed from values: it is no batch."""
  joined = _SAME
  for origin in origins:
    joined |= origin
  return joined & ~Origin.ROWS


def _origins_of(
  known: Mapping[Var, Origin],
  atoms: Iterable[object],
) -> Origins:
  """Returns the origins that variables and constants have."""
  origins = []
  for atom in atoms:
    origin = _SAME
    if isinstance(atom, Var):
      origin = known.get(atom, _SAME)
    origins.append(origin)
  return origins


class Follower:
  """Follows what is a worker's own through the worker's program.

  Attributes:
    axis: that of the workers in the program.
    found: the origins of all variables, also in the programs inside it.
    waiting: the equations, likewise, in which workers wait for each other.
  """

  def __init__(self, axis: Axis):
    self.axis = axis
    self._checks = True  # not while a loop is followed to its fixed point
    self._num_exchanges = 0  # so far, to see which equations have some inside
    self.found: dict[Var, Origin] = {}
    self.waiting: set[JaxprEqn] = set()

  def follow(
    self,
    jaxpr: Jaxpr,
    inputs: Origins,
  ) -> Origins:
    """Returns the origins of a program's outputs, from those of its inputs.

    Raises:
      ValueError: by a check of `watch`.
    """
    known = dict(zip(jaxpr.invars, inputs))
    for eqn in jaxpr.eqns:
      num_before = self._num_exchanges
      outputs = self._outputs(eqn, _origins_of(known, eqn.invars))
      known.update(zip(eqn.outvars, outputs))
      if self._num_exchanges > num_before:
        self.waiting.add(eqn)
    for variable, origin in known.items():  # a program may be called again
      self.found[variable] = self.found.get(variable, _SAME) | origin
    return _origins_of(known, jaxpr.outvars)

  def _outputs(
    self,
    eqn: JaxprEqn,
    inputs: Origins,
  ) -> Origins:
    """Returns the origins that an equation's outputs have."""
    name, num_outputs = eqn.primitive.name, len(eqn.outvars)
    match name:
      case 'scan':
        return self._scan(eqn, inputs)
      case 'while':
        return self._while(eqn, inputs)
      case 'cond':
        return self._cond(eqn, inputs)
      # Our own: a check or an exchange, and a meeting at the relay.
      case watch_p.name:
        return self._watch(eqn, inputs)
      case meet_p.name:  # rows, who is present, whether this worker is
        self._num_exchanges += 1
        return _SAME, _SAME, _OWN
      case 'convert_element_type' | 'device_put' | 'optimization_barrier':
        return inputs  # each output has what is in its place
      case 'new_ref' | 'empty_ref':
        raise ValueError(
          'A data_parallel step must not make mutable arrays, got jax.new_ref:'
          ' what is written to them cannot be followed. Use values that it'
          ' returns.'
        )
    if _is_over(eqn.params, self.axis):
      self._num_exchanges += 1
      # A sum in groups, a permutation, or the number of the worker differs.
      in_groups = eqn.params.get('axis_index_groups') is not None
      is_reduction = name.removesuffix('_invariant') in _REDUCTIONS
      is_same = is_reduction and not in_groups
      return [_SAME if is_same else Origin.DATA] * num_outputs
    # A call: jit, remat, or a function whose derivative is given.
    lengths = len(inputs), num_outputs
    for program in core.jaxprs_in_params(eqn.params):
      if (len(program.invars), len(program.outvars)) == lengths:
        return self.follow(program, inputs)
    return [_joined(inputs)] * num_outputs

  def _watch(
    self,
    eqn: JaxprEqn,
    inputs: Origins,
  ) -> Origins:
    check, outputs = eqn.params['check'], eqn.params['outputs']
    if check is not None and self._checks:
      check(inputs)
    if outputs is None:
      return inputs
    self._num_exchanges += 1
    return [_OWN if differs else _SAME for differs in outputs]

  def _loop(
    self,
    body: Jaxpr,
    constants: Origins,
    carry: Origins,
    scanned: Origins,
  ) -> Origins:
    """Returns the origins for a loop's outputs, at the fixed point."""
    # Checks wait: what is carried is not known to differ yet.
    did_check, self._checks = self._checks, False
    carry = [_joined([origin]) for origin in carry]
    former: Origins = []
    while former != carry:
      former = carry
      outputs = self.follow(body, [*constants, *carry, *scanned])
      carry = [_joined(pair) for pair in zip(carry, outputs)]
    # Origins only grow, so that this ends. Now they are all there.
    self._checks = did_check
    outputs = self.follow(body, [*constants, *carry, *scanned])
    return [*carry, *outputs[len(carry) :]]

  def _scan(
    self,
    eqn: JaxprEqn,
    inputs: Origins,
  ) -> Origins:
    body, num_before = eqn.params['jaxpr'].jaxpr, self._num_exchanges
    # From shapes, since releases of JAX name the numbers differently: what is
    # scanned over, or stacked, has one more dimension outside of the body.
    num_carry = _num_equal(eqn.outvars, body.outvars)
    num_equal = _num_equal(eqn.invars, body.invars)
    num_consts = num_equal - num_carry
    carry, scanned = inputs[num_consts:num_equal], inputs[num_equal:]
    turns = [_joined([origin]) for origin in scanned]
    outputs = self._loop(body, inputs[:num_consts], carry, turns)
    has_rows = any(Origin.ROWS in origin for origin in scanned)
    if has_rows and self._num_exchanges > num_before:
      raise ValueError(
        'A batch must have its rows along the first axis, got one over which'
        ' the step scans and exchanges in each turn, as over batches [steps,'
        ' rows, ...]. Say where the rows are: demo_optax.data_parallel(workers,'
        ' batch_argnames=..., batch_axis=1), or batch_axis=0 if every row is a'
        ' step.'
      )
    return outputs

  def _while(
    self,
    eqn: JaxprEqn,
    inputs: Origins,
  ) -> Origins:
    num_before, num_cond = self._num_exchanges, eqn.params['cond_nconsts']
    num_consts = num_cond + eqn.params['body_nconsts']
    body = eqn.params['body_jaxpr'].jaxpr
    carry = inputs[num_consts:]
    carry = self._loop(body, inputs[num_cond:num_consts], carry, [])
    program = eqn.params['cond_jaxpr'].jaxpr
    (condition,) = self.follow(program, [*inputs[:num_cond], *carry])
    # If it is a worker's own, workers leave the loop at different times.
    self._check_common(condition, num_before)
    return [_joined([origin, condition]) for origin in carry]

  def _cond(
    self,
    eqn: JaxprEqn,
    inputs: Origins,
  ) -> Origins:
    # A worker's own branch makes all of its results the worker's own.
    condition, *operands = inputs
    num_before, outputs = self._num_exchanges, []
    for branch in eqn.params['branches']:
      outputs.append(self.follow(branch.jaxpr, operands))
    self._check_common(condition, num_before)
    return [_joined([condition, *several]) for several in zip(*outputs)]

  def _check_common(
    self,
    condition: Origin,
    num_before: int,
  ) -> None:
    """Raises if only some workers would exchange, more than `num_before`."""
    if condition.differs and self._num_exchanges > num_before:
      raise ValueError(
        'The condition of jax.lax.cond or of a loop around an exchange, or'
        ' around over_workers, must be the same on all workers, got one that'
        ' differs: some would wait for the others for ever. Give it'
        ' demo_optax.over_workers(flag, jnp.all); optax.apply_if_finite is not'
        ' needed, since the exchange leaves out workers with gradients that are'
        ' not finite.'
      )


def _num_equal(
  outer: Sequence[Any],
  inner: Sequence[Any],
) -> int:
  """Counts the variables that have the same shape in both programs."""
  pairs = zip(outer, inner, strict=True)
  return sum(first.aval.shape == second.aval.shape for first, second in pairs)
