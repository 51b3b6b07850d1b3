"""The optimizers that `muon.py` and `links.py` compare, from settings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import baselines
import jax
import jax.numpy as jnp
import optax
from optax import contrib

import demo_optax
from demo_optax import compressors
from demo_optax.recipes import links

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
    'recipe': recipe,
    'demo_muon': demo_muon,
    'demo': demo,
    **dict.fromkeys(
      ('powersgd', 'dion', 'common_mask', 'common_rows'), other_exchange
    ),
    'diloco': local,
    'demo_diloco': local,
    'sparse_loco': local,
  }
  return families.get(s['method'], averaged)(s, workers)


# Parts ------------------------------------------------------------------------


def schedule(s: Settings, peak: float) -> optax.Schedule:
  return optax.warmup_cosine_decay_schedule(
    0.0, peak, s['warmup'], s['steps'], end_value=0.1 * peak
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


def scale_to_unit_rms() -> optax.GradientTransformation:
  """Scales every leaf to a root mean square of one."""

  def scale(update: jax.Array) -> jax.Array:
    length = jnp.sqrt(jnp.mean(update * update))
    return update / jnp.maximum(length, jnp.finfo(update.dtype).tiny ** 0.5)

  return optax.stateless(lambda updates, _: jax.tree.map(scale, updates))


def stored(
  s: Settings, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Rounds Muon's momentum after each step as if it were stored in fewer bits.

  int8 has one scale for each row. The seed of stochastic rounding is taken from
  the gradients, so that each worker rounds in another way.
  """
  if not s['mu_dtype']:
    return tx

  def rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    noise = jax.random.uniform(key, x.shape) - 0.5 if s['stochastic'] else 0.0
    if s['mu_dtype'] == 'int8':
      unit = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127 + 1e-30
    else:  # the distance of bfloat16 numbers
      unit = 2.0 ** (jnp.floor(jnp.log2(jnp.abs(x) + 1e-30)) - 7)
    return jnp.round(x / unit + noise) * unit

  def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
    seed = jax.lax.bitcast_convert_type(optax.global_norm(updates), jnp.uint32)
    updates, state = tx.update(updates, state, params)
    leaves, treedef = jax.tree.flatten(state.mu)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    mu = treedef.unflatten(map(rounded, leaves, keys))
    return updates, state._replace(mu=mu)

  return optax.GradientTransformation(tx.init, update_fn)


def muon(s: Settings) -> optax.GradientTransformation:
  return optax.chain(
    clip(),
    contrib.muon(
      schedule(s, s['lr']),
      beta=s['beta'],
      ns_steps=s['ns_steps'],
      nesterov=s['nesterov'],
      preconditioning=s['preconditioning'],
      adam_b2=0.95,
      adam_learning_rate=schedule(s, s['other_lr']),
      muon_weight_dimension_numbers=demo_optax.recipes.muon_dimension_numbers,
    ),
  )


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


def matrix_or_other(params: Any) -> Any:
  """Labels: embeddings, head, norms and biases are something else."""
  dimensions = jax.tree.leaves(
    demo_optax.recipes.muon_dimension_numbers(params),
    is_leaf=lambda x: x is None or isinstance(x, contrib.MuonDimensionNumbers),
  )
  return jax.tree.structure(params).unflatten(
    ['other' if x is None else 'matrix' for x in dimensions]
  )


# Methods ----------------------------------------------------------------------


def averaged(s: Settings, workers: demo_optax.Workers) -> Method:
  """Optimizers of averaged gradients."""
  return Method(
    optax.chain(demo_optax.average_gradients(workers=workers), of_averages(s)),
    planned(lambda params: jax.tree.map(lambda _: None, params), s, workers),
  )


def of_averages(s: Settings) -> optax.GradientTransformation:
  if s['method'] == 'adamw':
    return adamw(s)
  if s['method'] == 'muon':
    return muon(s)
  if s['method'] == 'signum':
    return optax.chain(
      clip(),
      optax.ema(s['beta'], debias=False),
      optax.scale_by_sign(),
      optax.scale_by_learning_rate(schedule(s, s['lr'])),
    )
  if s['method'] == 'muon-sign':  # what a dense exchange of signs could do
    signed = optax.chain(
      orthonormalised(s, beta=s['beta'], nesterov=s['nesterov']),
      optax.scale_by_sign(),
      optax.scale_by_learning_rate(schedule(s, s['lr'])),
    )
    adam = optax.adam(schedule(s, s['other_lr']), b2=0.95)
    return optax.chain(
      clip(),
      optax.partition({'matrix': signed, 'other': adam}, matrix_or_other),
    )
  raise ValueError(f'There is no method {s["method"]!r}.')


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
      {'gradient_weight': rate}
      if s['alpha'] == 1
      else {
        'alpha': s['alpha'],
        'average': 'workers',
        'gradient_weight': 1 - s['decay'],
      }
    )
    tx = optax.chain(
      demo_optax.scale_by_demo(
        compressor, s['decay'], workers=workers, **rule, **owners(s)
      ),
      optax.scale_by_sign(),
      optax.scale_by_learning_rate(rate),
    )
  return Method(
    optax.chain(clipped(workers), tx), planned(compressor, s, workers)
  )


def clipped(
  workers: demo_optax.Workers, *then: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Clips each worker's gradient, before what it does alone."""
  return demo_optax.per_worker(optax.chain(clip(), *then), workers=workers)


def of_matrices(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns a transformation of matrices that leaves the others alone."""
  return optax.partition(
    {'matrix': tx, 'other': optax.identity()}, matrix_or_other
  )


def demo_muon(s: Settings, workers: demo_optax.Workers) -> Method:
  """Returns `demo_optax.demo_muon`, behind clipping.

  Rates of the recipe are the root mean square of an update.
  """
  iterations = len(links.NEWTON_SCHULZ)
  if s['ns_steps'] != iterations:
    raise ValueError(
      f'ns_steps must be {iterations} as in demo_muon, got {s["ns_steps"]}.'
      f' Add ns_steps={iterations}; other numbers are in history.'
    )
  compressor, _ = other_leaves(s, matrix_compressor(s))
  consistent_rms = None
  if s['method'] == 'recipe':  # of chunks that are full
    consistent_rms = (1 - s['decay'] * (1 - s['topk'] / 64**2)) ** 0.5
  tx = demo_optax.demo_muon(
    schedule(s, s['lr']),
    workers=workers,
    compressor=compressor,
    decay=s['decay'],
    beta=s['beta'],
    mu_dtype=s['mu_dtype'],
    consistent_rms=consistent_rms,
    other_learning_rate=schedule(s, s['other_lr']),
    **owners(s),
  )
  return Method(
    optax.chain(clipped(workers), tx), planned(compressor, s, workers)
  )


def recipe(s: Settings, workers: demo_optax.Workers) -> Method:
  """`demo_muon` in its parts, each of which may be another one."""
  if s['mu_dtype'] == 'bfloat16' and not s['stochastic']:
    return demo_muon(s, workers)
  before = {
    'orthonormalise': lambda: stored(
      s, orthonormalised(s, beta=s['beta'], nesterov=s['nesterov'])
    ),
    'momentum': lambda: optax.ema(s['beta']),
    None: optax.identity,
  }[s['worker']]()
  after = {
    'rms': scale_to_unit_rms,
    'sign': optax.scale_by_sign,
    'orthonormalise': lambda: optax.chain(
      orthonormalised(s, beta=0.0, nesterov=False),
      scale_to_unit_rms(),
    ),
  }[s['after']]()
  compressor, other = other_leaves(s, matrix_compressor(s))
  exchange = demo_optax.scale_by_demo(
    compressor,
    s['decay'],
    workers=workers,
    alpha=s['alpha'],
    average=s['average'],
    gradient_weight=1 - s['decay'],
    **owners(s),
  )
  tx = optax.chain(
    clipped(workers, of_matrices(before)),
    exchange,
    by_kind(s, after, other),
  )
  return Method(tx, planned(compressor, s, workers))


def matrix_compressor(s: Settings) -> Any:
  if s['cyclic'] is not None:
    return compressors.cyclic_signs(s['cyclic'])
  if s['topk'] is None:
    return compressors.full()
  return largest(s, 64, s['topk'])


def largest(s: Settings, chunk: Any, k: int) -> Any:
  """Returns a compressor: the largest of a chunk."""
  return compressors.Compressor(
    compressors.TopK(k), compressors.Dct(), chunk, values=s['values']
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
  s: Settings,
  matrix: optax.GradientTransformation,
  other: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns what is done to matrices and to others, with their rates."""
  rates = {
    k: optax.scale_by_learning_rate(schedule(s, s[k]))
    for k in ('lr', 'other_lr')
  }
  return optax.partition(
    {
      'matrix': optax.chain(matrix, rates['lr']),
      'other': optax.chain(other, rates['other_lr']),
    },
    matrix_or_other,
  )


def other_exchange(s: Settings, workers: demo_optax.Workers) -> Method:
  """Matrices by another exchange than `recipe`'s; what is no matrix as there.

  PowerSGD has AdamW behind it. Common places have what `recipe` has on both
  sides: each worker's own Newton-Schulz, and a scaling.
  """
  size, before = s['rank'], optax.identity()
  if s['method'] == 'powersgd':
    own = optax.chain(
      baselines.power_sgd(size, workers), optax.scale_by_adam(0.9, 0.95)
    )
  elif s['method'] == 'dion':
    own = baselines.dion(size, workers)
  else:
    common = {
      'common_mask': baselines.common_mask,
      'common_rows': baselines.common_rows,
    }[s['method']]
    size = s['topk']
    before = of_matrices(
      orthonormalised(s, beta=s['beta'], nesterov=s['nesterov'])
    )
    own = optax.chain(common(size, workers, s['decay']), scale_to_unit_rms())
  # The library's exchange leaves the matrices alone.
  compressor, other = other_leaves(s, compressors.FROZEN)
  exchange = demo_optax.scale_by_demo(
    compressor,
    s['decay'],
    workers=workers,
    average=s['average'],
    gradient_weight=1 - s['decay'],
    **owners(s),
  )
  tx = optax.chain(
    clipped(workers, before), by_kind(s, own, optax.chain(exchange, other))
  )

  def bytes_of(params: Any) -> tuple[float, float, float]:
    plan = demo_optax.plan(params, compressor, workers, **owners(s))
    labels = jax.tree.leaves(matrix_or_other(params))
    leaves = jax.tree.leaves(params)
    matrices = sum(
      baselines.sent_bytes(s['method'], size, x, workers.count)
      for x, label in zip(leaves, labels)
      if label == 'matrix'
    )
    # The plan has no bytes of what it leaves alone.
    dense = 2 * (workers.count - 1) / workers.count * 4
    return (
      plan.sent_bytes + matrices,
      plan.received_bytes + matrices,
      dense * sum(x.size for x in leaves),
    )

  return Method(tx, bytes_of)


def local(s: Settings, workers: demo_optax.Workers) -> Method:
  """Every worker trains alone for `period` steps."""
  inner = {'adamw': adamw, 'muon': muon}[s['inner']](s)
  every = {
    'workers': workers,
    'sync_period': s['period'],
    'outer_learning_rate': s['outer_lr'],
  }
  if s['method'] == 'diloco':
    compressor: Any = compressors.full()
    tx = demo_optax.local.diloco(
      inner, outer_momentum=s['outer_momentum'], **every
    )
  elif s['method'] == 'demo_diloco':
    compressor = demo_optax.dct_topk(64, s['topk'], values=s['values'])
    tx = demo_optax.local.demo_diloco(
      inner, compressor=compressor, decay=s['decay'], **every
    )
  else:
    compressor = compressors.Compressor(
      compressors.TopK(s['topk']), compressors.Identity(), values=s['values']
    )
    tx = demo_optax.local.sparse_loco(
      inner, compressor=compressor, decay=s['decay'], **every
    )
  return Method(tx, planned(compressor, s, workers, s['period']))
