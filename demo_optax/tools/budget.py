"""From a number of bytes to what `demo_muon` should send."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import numpy as np

from demo_optax import recipes
from demo_optax.demo import resolve_update_values
from demo_optax.exchange.algorithm import ExchangeKind
from demo_optax.tools import tables
from demo_optax.tools.traffic import Plan, plan
from demo_optax.workers import Workers


@dataclasses.dataclass(frozen=True)
class Setting:
  """A setting of `demo_muon` and its loss in benchmarks/muon.py, of 3 seeds.

  Attributes:
    topk: coefficients of each 64x64 chunk of a matrix.
    row_topk: coefficients of each row of up to 192 of everything else.
    loss: validation loss of the training example with it.
  """

  topk: int
  row_topk: int
  loss: float


# What is best for its bytes: from the fewest on, each learns better.
SETTINGS = (
    Setting(8, 8, 1.409),
    Setting(32, 8, 1.357),
    Setting(64, 8, 1.340),
    Setting(128, 24, 1.328),
)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A setting for given parameters: its compressors, and their bytes."""

  setting: Setting
  compressor: chex.ArrayTree
  plan: Plan


def recommend(
    params: chex.ArrayTree,
    workers: Workers | int,
    *,
    sent_bytes: float | None = None,
    received_bytes: float | None = None,
    bits_per_second: float | None = None,
    seconds: float | None = None,
    exchange: ExchangeKind = 'all_gather',
    update_values: str = 'int4',
    muon_weight_dimension_numbers: Any = None,
) -> chex.ArrayTree:
  """Returns the compressors with which `demo_muon` learns best for its bytes.

  Those of a measured table of settings that fits the budget and had the least
  loss on the training example. What one may spend is given as bytes that a
  worker sends or receives in a step, or as the speed of its link and the time
  that an exchange may take; of several the tightest holds.

  Args:
    params: the parameters, or their shapes.
    workers: the workers of the exchange, or their number.
    sent_bytes: the most that a worker may send in a step.
    received_bytes: the most that it may receive.
    bits_per_second: speed of a worker's link, each way; goes with `seconds`.
    seconds: the most that an exchange may take.
    exchange: as in `demo_muon`. The losses were measured with an all-gather; by
      `'all_to_all'` with updates in `'int4'` that of `topk=64` was within 0.3 %
      of it (8 and 32 workers, one seed).
    update_values: as in `demo_muon`.
    muon_weight_dimension_numbers: as in `demo_muon`.

  Returns:
    A tree of compressors like `params`, for `demo_muon(compressor=...)`.

  Raises:
    TypeError: a budget or `workers` that is no number, parameters that are no
      arrays.
    ValueError: no budget, one of zero or less, a speed without a time or a time
      without a speed, or a budget below the smallest setting, with what that
      would take.

  Example:
    >>> import demo_optax, jax, jax.numpy as jnp
    >>> params = {'up': jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> workers = demo_optax.Workers.simulated(8)
    >>> compressor = demo_optax.recommend(
    ...     params, workers, bits_per_second=100e6, seconds=0.2)
    >>> compressor['up'].select, compressor['up'].values
    (TopShare(rate=0.015625), 'sign')
    >>> demo_optax.plan(params, compressor, workers).received_bytes * 8 / 100e6
    0.169...
  """
  limits = limits_of(sent_bytes, received_bytes, bits_per_second, seconds)
  resolve_update_values(exchange, update_values)
  by = functools.partial(
      settings, params, workers, update_values=update_values,
      muon_weight_dimension_numbers=muon_weight_dimension_numbers,
  )
  return within(limits, by, exchange)[-1].compressor


def settings(
    params: chex.ArrayTree,
    workers: Workers | int,
    exchange: ExchangeKind = 'all_gather',
    update_values: str = 'int4',
    muon_weight_dimension_numbers: Any = None,
) -> list[Choice]:
  """Returns all settings, of those with equally many bytes the best.

  They go up in bytes and down in loss.

  Args:
    params: the parameters, or their shapes.
    workers: the workers of the exchange, or their number.
    exchange: as in `demo_muon`.
    update_values: as in `demo_muon`.
    muon_weight_dimension_numbers: as in `demo_muon`.

  Raises:
    TypeError: parameters that are no arrays.
  """
  for x in jax.tree.leaves(params):
    if not hasattr(x, 'shape'):
      raise TypeError(
          f'The parameters hold {x!r}, which is no array: give arrays, or their'
          ' shapes as jax.ShapeDtypeStruct.'
      )
  found = []
  for setting in SETTINGS:
    compressor = recipes.muon_compressors(
        params,
        setting.topk,
        setting.row_topk,
        muon_weight_dimension_numbers=muon_weight_dimension_numbers,
    )
    bytes_of = plan(
        params, compressor, workers, exchange=exchange,
        update_values=update_values,
    )
    found.append(Choice(setting, compressor, bytes_of))
  found.sort(key=lambda x: (x.plan.payload_bytes, x.setting.loss))
  return [
      next(same)
      for _, same in itertools.groupby(found, lambda x: x.plan.payload_bytes)
  ]


def within(
    limits: Mapping[str, float],
    by: Callable[..., list[Choice]],
    exchange: ExchangeKind,
) -> list[Choice]:
  """Returns the settings within limits, the best last.

  Args:
    limits: the most bytes, by names of attributes of `Plan`.
    by: `settings` of all but its `exchange`.
    exchange: as in `demo_muon`.

  Raises:
    ValueError: no setting is within the limits.
  """
  found = by(exchange=exchange)
  fitting = _fitting(found, limits)
  if not fitting:
    least = found[0].plan
    asked = ' and '.join(
        f'{name}={limit:,.0f}' if limit >= 10 else f'{name}={limit:.3g}'
        for name, limit in limits.items()
    )
    other: ExchangeKind = (
        'all_to_all' if exchange == 'all_gather' else 'all_gather'
    )
    others = _fitting(by(exchange=other), limits)
    by_other = f'{_sentence(others[-1], other)} ' if others else ''
    raise ValueError(
        f'No setting is as small as {asked}: with'
        f' {least.num_workers} workers the smallest sends {least.sent_bytes:,}'
        ' bytes of these parameters and receives'
        f' {least.received_bytes:,}. {by_other}Exchanges every few steps'
        ' (demo_optax.local) take less.'
    )
  return fitting


def _fitting(
    choices: list[Choice], limits: Mapping[str, float]
) -> list[Choice]:
  return [
      x for x in choices
      if all(getattr(x.plan, name) <= limit for name, limit in limits.items())
  ]


def _sentence(choice: Choice, exchange: ExchangeKind) -> str:
  """Returns what a setting sends and receives by an exchange."""
  sent, received = (
      tables.num_bytes(x)
      for x in (choice.plan.sent_bytes, choice.plan.received_bytes)
  )
  return (
      f'With exchange={exchange!r}, topk={choice.setting.topk} sends {sent} and'
      f' receives {received}.'
  )


def table(
    params: chex.ArrayTree,
    workers: Workers | int,
    limits: Mapping[str, float],
    exchange: ExchangeKind = 'all_gather',
    update_values: str = 'int4',
) -> str:
  """Returns the settings within limits as lines of a terminal."""
  rows: list[tables.Row] = [(
      'topk', 'of rows', 'sends', 'receives', 'less sent', 'less received',
      'loss of the example' if exchange == 'all_gather'
      else 'its loss by all_gather',
  )]
  by = functools.partial(
      settings, params, workers, update_values=update_values
  )
  for choice in within(limits, by, exchange):
    bytes_of = choice.plan
    averaged = bytes_of.dense_bytes()
    rows.append((
        str(choice.setting.topk),
        str(choice.setting.row_topk),
        tables.num_bytes(bytes_of.sent_bytes),
        tables.num_bytes(bytes_of.received_bytes),
        *(
            f'{averaged / own:.{0 if averaged > 10 * own else 1}f}x'
            if own else ''
            for own in (bytes_of.sent_bytes, bytes_of.received_bytes)
        ),
        f'{choice.setting.loss:.3f}',
    ))
  lines = tables.aligned(rows)
  if exchange == 'all_gather':
    owners = _fitting(by(exchange='all_to_all'), limits)
    if owners:
      gathered = plan(params, owners[-1].compressor, workers)
      if owners[-1].plan.received_bytes < gathered.received_bytes:
        lines.append(_sentence(owners[-1], 'all_to_all'))
  return '\n'.join(lines)


def limits_of(
    sent_bytes: float | None = None,
    received_bytes: float | None = None,
    bits_per_second: float | None = None,
    seconds: float | None = None,
) -> dict[str, float]:
  """Returns the most bytes, by names of attributes of `Plan`."""
  given = {
      'sent_bytes': sent_bytes, 'received_bytes': received_bytes,
      'bits_per_second': bits_per_second, 'seconds': seconds,
  }
  limits = {
      name: _positive(name, value)
      for name, value in given.items() if value is not None
  }
  if (bits_per_second is None) != (seconds is None):
    raise ValueError(
        f'bits_per_second={bits_per_second!r} and seconds={seconds!r} make a'
        ' budget together: give both.'
    )
  if seconds is not None:
    whole = limits.pop('bits_per_second') * limits.pop('seconds') / 8
    for name in ('sent_bytes', 'received_bytes'):
      limits[name] = min(limits.get(name, whole), whole)
  if not limits:
    raise ValueError(
        'Give a budget: sent_bytes, received_bytes, or bits_per_second and'
        ' seconds.'
    )
  return limits


def _positive(name: str, value: Any) -> float:
  try:
    if isinstance(value, bool | np.bool_ | str):
      raise TypeError
    number = float(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise TypeError(f'{name}={value!r} must be a number.') from error
  if not number > 0:
    raise ValueError(f'{name}={value!r} must be above 0.')
  return number
