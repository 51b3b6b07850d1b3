"""Records of a run: JSON lines and, where tensorboardX is installed, events.

    pip install tensorboardX tensorboard
    tensorboard --logdir runs

tensorboardX needs neither TensorFlow nor PyTorch. Only process 0 writes.
"""

import contextlib
import json
import pathlib
import time
from typing import Any

import cluster
import jax
from flax import nnx

import demo_optax

try:
  from tensorboardX import summary
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.proto.summary_pb2 import Summary
except ImportError:  # pictures in a browser are a convenience
  EventsWriter = None

Record = dict[str, Any]


class Metrics(contextlib.ExitStack):
  """A folder's `metrics.jsonl` and event files.

  Of an earlier run it keeps the records up to step `start`, as `kept` (empty on
  other processes), and drops later ones.
  """

  def __init__(self, folder: pathlib.Path, config: Record, start: int = 0):
    super().__init__()
    self._lines = self._events = None
    self.kept: list[Record] = []
    if not cluster.is_main():
      return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'metrics.jsonl'
    self.kept = _records_until(path, start)
    self._lines = self.enter_context(path.open('w'))
    for record in [config, *self.kept]:
      self._write_line(record)
    if not start:
      for former in folder.glob('events.out.tfevents.*'):
        former.unlink()
    if EventsWriter:
      # Not tensorboardX's SummaryWriter: on a full disk its thread ends, and
      # the run would wait for it forever.
      self._events = self.enter_context(
        contextlib.closing(EventsWriter(str(folder / 'events')))
      )
      begin = SessionLog(status=SessionLog.START)  # what came later is dropped
      self._write_event(start + 1, session_log=begin)
      text = f'```\n{json.dumps(config, indent=2)}'
      self._write_event(0, summary=summary.text('config', text))

  def write(self, record: Record) -> None:
    """Writes the record of `record['step']`; each value has a name."""
    if self._lines:
      self._write_line(record)
    if self._events:
      values = [
        Summary.Value(tag=name, simple_value=value)
        for name, value in record.items()
        if name != 'step'
      ]
      self._write_event(record['step'], summary=Summary(value=values))

  def _write_event(self, step: int, **content: Any) -> None:
    self._events.write_event(Event(wall_time=time.time(), step=step, **content))
    self._events.flush()

  def _write_line(self, record: Record) -> None:
    self._lines.write(json.dumps(record) + '\n')
    self._lines.flush()


def about_exchange(optimizer: nnx.Optimizer) -> dict[str, float]:
  """Returns the diagnostics of the last exchange, by name."""
  info = jax.device_get(demo_optax.exchange_info(optimizer.opt_state))
  return {key: value.item() for key, value in info.items()}


def report(runs: list[dict[str, Any]]) -> None:
  """Prints the bytes of all steps, beside those of an all-reduce."""
  row = '{:<13}{:>11}{:>10}{:>13}{:>20}{:>12}{:>12}'.format
  print(row('', 'validation', 'sent', 'received', 'all-reduce', '', 'steps'))
  print(row('', 'loss', 'MB', 'MB', 'bfloat16', 'float32', 'per s'))
  for run in runs:
    plan, records = run['plan'], run['records']
    steps = records[-1]['step'] if records else 0
    moved = (
      plan.sent_bytes,
      plan.received_bytes,
      plan.dense_bytes(2),
      plan.dense_bytes(4),
    )
    loss, speed = (
      '-' if x is None else f'{x:.{digits}f}'
      for x, digits in ((run['valid_loss'], 4), (run['steps_per_second'], 1))
    )
    print(
      row(run['name'], loss, *(f'{x * steps / 1e6:,.1f}' for x in moved), speed)
    )


def _records_until(path: pathlib.Path, step: int) -> list[Record]:
  """Records of an earlier run up to `step`."""
  if not step or not path.exists():
    return []
  records = []
  for line in path.read_text().splitlines():
    with contextlib.suppress(ValueError):  # a line that was being written
      records.append(json.loads(line))
  return [r for r in records if r.get('step', step + 1) <= step]
