"""What is asked of every trainer.

A trainer is a generator function that is written twice: as a script for one
device, with an optimizer of optax, and with the lines changed that this package
asks for. After each step it yields a `Done`.
"""

import difflib
import inspect
from typing import Any, NamedTuple

import hlo_text
import jax
import numpy as np
from helpers import COMPILATIONS, assert_replicas_equal

import demo_optax

# Of those that compile fast; what is sent does not matter here.
COMPRESSOR = demo_optax.Compressor(
    demo_optax.compressors.Slicing(0.1), demo_optax.compressors.Identity())


class Done(NamedTuple):
  """A step that was done.

  Attributes:
    step: the compiled function.
    args: its arguments for the next step.
    loss: the loss of this one.
    params: the parameters after it.
  """

  step: Any
  args: tuple[Any, ...]
  loss: Any
  params: Any


def changed_lines(before, after):
  """The lines that two functions differ in, their headers aside."""
  texts = [inspect.getsource(f).splitlines() for f in (before, after)]
  bodies = [
      text[next(i for i, x in enumerate(text) if x.endswith('):')) + 1 :]
      for text in texts
  ]
  changes = difflib.SequenceMatcher(None, *bodies, autojunk=False).get_opcodes()
  return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes
             if tag != 'equal')


def check_learns(trainer, fall=0.8, compiles_in=None):
  """The loss falls; nothing compiles after as many steps as `compiles_in`."""
  losses = []
  for number, done in enumerate(trainer, 1):
    losses.append(float(done.loss))
    if number == compiles_in:
      COMPILATIONS.count = 0
  assert compiles_in is None or COMPILATIONS.count == 0
  assert np.mean(losses[-2:]) < fall * losses[0], losses
  return done


def check_workers(done, workers, slack):
  """Nothing dense crosses the worker axis, and all copies are the same.

  Args:
    done: the last step.
    workers: the workers on a mesh.
    slack: bytes of loss, metrics and statistics that a device may receive, too.
  """
  compiled = done.step.lower(*done.args).compile()
  found = [
      c
      for c in hlo_text.collectives(compiled, workers.mesh)
      if workers.axis_name in c.axes
  ]
  received = sum(c.received_bytes for c in found)
  plan = demo_optax.plan(done.params, COMPRESSOR, workers)
  message = plan.device_bytes[workers.axis_name,]
  dense = sum(x.nbytes for x in jax.tree.leaves(done.params))
  assert message <= received <= message + slack, [*map(str, found)]
  assert received < dense / 4  # an all-reduce receives about twice of that
  assert demo_optax.check_replicas(done.params, workers) == []
  if not workers.param_specs.axes:
    assert_replicas_equal(done.params)


def tokens(rows, steps, length=8, vocabulary=16, seed=0):
  """Counting upwards from a random token, for each step."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    first = rng.integers(vocabulary, size=(rows, 1))
    yield ((first + np.arange(length)) % vocabulary).astype(np.int32)


def on_mesh(shape, names, kind='auto'):
  """A mesh of this test's devices."""
  types = {'auto': jax.sharding.AxisType.Auto,
           'explicit': jax.sharding.AxisType.Explicit}
  return jax.make_mesh(
      shape, names, axis_types=(types[kind],) * len(shape),
      devices=jax.devices()[: int(np.prod(shape))],
  )
