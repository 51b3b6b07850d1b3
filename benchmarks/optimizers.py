"""The optimizers that `muon.py` compares, from settings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import baselines
import jax
import optax
from methods import matrix_or_other
from optax import contrib

import demo_optax
from demo_optax import compressors

Settings = dict[str, Any]


class Method(NamedTuple):
  """An optimizer, and what it costs.

  Attributes:
    tx: the transformation.
    bytes_of: returns the bytes that a worker sends and receives per step, and
      those of averaging, from the parameters.
  """

  tx: optax.GradientTransformation
  bytes_of: Callable[[Any], tuple[float, float, float]]


def make(s: Settings, workers: demo_optax.Workers) -> Method:
  """Returns the method of the settings."""
  families = {
      'recipe': recipe, 'demo': demo, 'powersgd': low_rank, 'dion': low_rank,
      'diloco': local, 'demo-diloco': local, 'sparse-loco': local,
  }
  return families.get(s['method'], averaged)(s, workers)


# Parts ------------------------------------------------------------------------


def schedule(s: Settings, peak: float) -> optax.Schedule:
  return optax.warmup_cosine_decay_schedule(
      0.0, peak, 40, s['steps'], end_value=0.1 * peak
  )


def clip() -> optax.GradientTransformation:
  return optax.clip_by_global_norm(1.0)


def orthonormalised(
    s: Settings, **options: Any
) -> optax.GradientTransformation:
  return contrib.scale_by_muon(
      ns_steps=s['ns_steps'],
      preconditioning=s['preconditioning'],
      weight_dimension_numbers=demo_optax.recipes.muon_dimension_numbers,
      **options,
  )


def muon(s: Settings) -> optax.GradientTransformation:
  return optax.chain(clip(), contrib.muon(
      schedule(s, s['lr']),
      beta=s['beta'],
      ns_steps=s['ns_steps'],
      nesterov=s['nesterov'],
      preconditioning=s['preconditioning'],
      adam_b2=0.95,
      adam_learning_rate=schedule(s, s['other_lr']),
      muon_weight_dimension_numbers=demo_optax.recipes.muon_dimension_numbers,
  ))


def adamw(s: Settings) -> optax.GradientTransformation:
  rate = schedule(s, s['lr'])
  return optax.chain(clip(), optax.adamw(rate, b2=0.95, weight_decay=0.0))


def owners(s: Settings) -> dict[str, Any]:
  """Returns who merges, and how updates are written."""
  if s['update_values'] is None:
    return {}
  return {'exchange': 'all_to_all', 'update_values': s['update_values']}


def planned(
    compressor: Any, s: Settings, workers: demo_optax.Workers, period: int = 1
) -> Callable[[Any], tuple[float, float, float]]:
  """Returns what counts the bytes of an exchange."""

  def bytes_of(params: Any) -> tuple[float, float, float]:
    plan = demo_optax.plan(params, compressor, workers, **owners(s))
    sent, received = plan.sent_bytes / period, plan.received_bytes / period
    return sent, received, plan.dense_bytes()

  return bytes_of


# Methods ----------------------------------------------------------------------


def averaged(s: Settings, workers: demo_optax.Workers) -> Method:
  """Optimizers of averaged gradients."""
  if s['method'] == 'adamw':
    base = adamw(s)
  elif s['method'] == 'muon':
    base = muon(s)
  elif s['method'] == 'signum':
    base = optax.chain(
        clip(), optax.ema(s['beta'], debias=False), optax.scale_by_sign(),
        optax.scale_by_learning_rate(schedule(s, s['lr'])),
    )
  elif s['method'] == 'muon-sign':  # what a dense exchange of signs could do
    signed = optax.chain(
        orthonormalised(s, beta=s['beta'], nesterov=s['nesterov']),
        optax.scale_by_sign(),
        optax.scale_by_learning_rate(schedule(s, s['lr'])),
    )
    adam = optax.adam(schedule(s, s['other_lr']), b2=0.95)
    base = optax.chain(
        clip(),
        optax.partition({'matrix': signed, 'other': adam}, matrix_or_other),
    )
  else:
    raise ValueError(f'There is no method {s["method"]!r}.')
  return Method(
      optax.chain(demo_optax.average(workers=workers), base),
      planned(lambda params: jax.tree.map(lambda _: None, params), s, workers),
  )


def demo(s: Settings, workers: demo_optax.Workers) -> Method:
  """DeMo as published: version 1, or with alpha below 1 version 2."""
  compressor = largest(s, 64, s['topk'])
  rate = schedule(s, s['lr'])
  if s['alpha'] == 1 and not s['update_values']:
    tx = demo_optax.demo(
        rate, workers=workers, compressor=compressor, decay=s['decay']
    )
  else:
    rule = (
        {'gradient_weight': rate} if s['alpha'] == 1
        else {'alpha': s['alpha'], 'average': 'workers', 'ema': True}
    )
    tx = optax.chain(
        demo_optax.scale_by_demo(
            compressor, s['decay'], workers=workers, **rule, **owners(s)
        ),
        optax.scale_by_sign(),
        optax.scale_by_learning_rate(rate),
    )
  return Method(optax.chain(clip(), tx), planned(compressor, s, workers))


def recipe(s: Settings, workers: demo_optax.Workers) -> Method:
  """`demo_muon` in its parts, each of which may be another one."""
  before = {
      'orthonormalise': lambda: orthonormalised(
          s, beta=s['beta'], nesterov=s['nesterov']
      ),
      'momentum': lambda: optax.ema(s['beta']),
      None: optax.identity,
  }[s['worker']]()
  after = {
      'rms': demo_optax.recipes.scale_to_unit_rms,
      'sign': optax.scale_by_sign,
      'orthonormalise': lambda: optax.chain(
          orthonormalised(s, beta=0.0, nesterov=False),
          demo_optax.recipes.scale_to_unit_rms(),
      ),
  }[s['after']]()
  matrix = (
      compressors.full() if s['topk'] is None
      else largest(s, 64, s['topk'])
  )
  compressor, other = other_leaves(s, matrix)
  if s['mu_dtype']:
    tx = optax.chain(
        demo_optax.per_worker(clip(), workers=workers),
        demo_optax.demo_muon(
            schedule(s, s['lr']), workers=workers, compressor=compressor,
            decay=s['decay'], beta=s['beta'], mu_dtype=s['mu_dtype'],
            adam_learning_rate=schedule(s, s['other_lr'])),
    )
    return Method(tx, planned(compressor, s, workers))
  own = optax.partition(
      {'matrix': before, 'other': optax.identity()}, matrix_or_other
  )
  tx = optax.chain(
      demo_optax.per_worker(optax.chain(clip(), own), workers=workers),
      demo_optax.scale_by_demo(
          compressor, s['decay'], workers=workers, alpha=s['alpha'],
          average=s['average'], ema=True, **owners(s),
      ),
      by_kind(s, after, other),
  )
  return Method(tx, planned(compressor, s, workers))


def largest(s: Settings, chunk: Any, k: int) -> Any:
  """Returns a compressor: the largest of a chunk, or one of each group."""
  select = compressors.GroupMax(k) if s['groups'] else compressors.TopK(k)
  return compressors.Compressor(
      select, compressors.Dct(), chunk, values=s['values']
  )


def other_leaves(
    s: Settings, matrix: Any
) -> tuple[Any, optax.GradientTransformation]:
  """Returns all compressors, and what follows for what is no matrix."""
  base, other = optax.scale_by_adam(b1=0.0, b2=0.95), None
  if s['rows'] == 'adamw':
    base = optax.scale_by_adam(b1=0.9, b2=0.95)
  else:
    other = largest(s, (1, 192), s['rows'])
  codes = {'matrix': matrix, 'other': other}
  return lambda params: jax.tree.map(codes.get, matrix_or_other(params)), base


def by_kind(
    s: Settings, matrix: optax.GradientTransformation,
    other: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns what is done to matrices and to others, with their rates."""
  rates = {k: optax.scale_by_learning_rate(schedule(s, s[k]))
           for k in ('lr', 'other_lr')}
  return optax.partition(
      {'matrix': optax.chain(matrix, rates['lr']),
       'other': optax.chain(other, rates['other_lr'])}, matrix_or_other)


def low_rank(s: Settings, workers: demo_optax.Workers) -> Method:
  """PowerSGD with AdamW, or Dion; what is no matrix as in `recipe`."""
  if s['method'] == 'powersgd':
    own = optax.chain(baselines.power_sgd(s['rank'], workers),
                      optax.scale_by_adam(0.9, 0.95))
  else:
    own = baselines.dion(s['rank'], workers)
  # The exchange leaves the matrices alone: their factors were averaged.
  compressor, other = other_leaves(s, compressors.FROZEN)
  exchange = demo_optax.scale_by_demo(
      compressor, s['decay'], workers=workers, average=s['average'], ema=True
  )
  tx = optax.chain(clip(), by_kind(s, own, optax.chain(exchange, other)))

  def bytes_of(params: Any) -> tuple[float, float, float]:
    plan = demo_optax.plan(params, compressor, workers)
    size = sum(x.size for x in jax.tree.leaves(params))
    labels = jax.tree.leaves(matrix_or_other(params))
    factors = baselines.sent_bytes(
        [x for x, label in zip(jax.tree.leaves(params), labels)
         if label == 'matrix'], s['rank'], workers.count)
    dense = 2 * (workers.count - 1) / workers.count * 4 * size
    return plan.sent_bytes + factors, plan.received_bytes + factors, dense

  return Method(tx, bytes_of)


def local(s: Settings, workers: demo_optax.Workers) -> Method:
  """Every worker trains alone for `period` steps."""
  inner = {'adamw': adamw, 'muon': muon}[s['inner']](s)
  every = {
      'workers': workers, 'sync_period': s['period'],
      'outer_learning_rate': s['outer_lr'],
  }
  if s['method'] == 'diloco':
    compressor: Any = compressors.full()
    tx = demo_optax.local.diloco(
        inner, outer_momentum=s['outer_momentum'], **every
    )
  elif s['method'] == 'demo-diloco':
    compressor = demo_optax.dct_topk(64, s['topk'], values=s['values'])
    tx = demo_optax.local.demo_diloco(
        inner, compressor=compressor, decay=s['decay'], **every
    )
  else:
    compressor = compressors.Compressor(
        compressors.TopK(s['topk']), compressors.Identity(),
        values=s['values'])
    tx = demo_optax.local.sparse_loco(
        inner, compressor=compressor, decay=s['decay'], **every
    )
  return Method(tx, planned(compressor, s, workers, s['period']))
