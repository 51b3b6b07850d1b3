"""Records of a run: JSON lines and, where tensorboardX is installed, events.

    pip install tensorboardX tensorboard
    tensorboard --logdir runs

tensorboardX writes what TensorBoard reads, and needs neither TensorFlow nor
PyTorch. Process 0 writes; the others do nothing.
"""

import contextlib
import json
import pathlib
from typing import Any

import cluster
import jax
from flax import nnx

import demo_optax

try:
  from tensorboardX import SummaryWriter
except ImportError:  # pictures in a browser are a convenience
  SummaryWriter = None

Record = dict[str, Any]


class Metrics(contextlib.ExitStack):
  """A folder's `metrics.jsonl`, and event files beside it.

  Opened after `start` steps, it keeps what is known of the steps up to there;
  what came later is written again.
  """

  def __init__(self, folder: pathlib.Path, config: Record, start: int = 0):
    super().__init__()
    self._lines = self._events = None
    if not cluster.is_main():
      return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'metrics.jsonl'
    kept = _records_until(path, start)
    self._lines = self.enter_context(path.open('w'))
    for record in [config, *kept]:
      self._write_line(record)
    if not start:
      for former in folder.glob('events.out.tfevents.*'):
        former.unlink()
    if SummaryWriter:
      self._events = self.enter_context(
          SummaryWriter(str(folder), purge_step=start + 1)
      )
      self._events.add_text('config', f'```\n{json.dumps(config, indent=2)}')

  def write(self, record: Record) -> None:
    """A record of `record['step']`; what is in it is drawn by name."""
    if self._lines:
      self._write_line(record)
    if self._events:
      for name, value in record.items():
        if name != 'step':
          self._events.add_scalar(name, value, record['step'])

  def _write_line(self, record: Record) -> None:
    self._lines.write(json.dumps(record) + '\n')
    self._lines.flush()


def about_exchange(optimizer: nnx.Optimizer) -> dict[str, float]:
  """What the optimizer knows about its last exchange, by name."""
  info = jax.device_get(demo_optax.exchange_info(optimizer.opt_state))
  return {key: value.item() for key, value in info.items()}


def _records_until(path: pathlib.Path, step: int) -> list[Record]:
  """Records of an earlier run up to `step`."""
  if not step or not path.exists():
    return []
  records = []
  for line in path.read_text().splitlines():
    with contextlib.suppress(ValueError):  # a line that was being written
      records.append(json.loads(line))
  return [r for r in records if r.get('step', step + 1) <= step]
