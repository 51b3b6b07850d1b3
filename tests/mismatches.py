"""Every mismatch between a checkpoint and a tree that was tried.

    python tests/mismatches.py    # writes tests/messages/checkpoints.txt

Each case restores a checkpoint of `saved()` in another way and is refused; the
tests run them, and compare the messages with the file.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp

import demo_optax
from demo_optax import checkpoint

FILE = pathlib.Path(__file__).parent / 'messages/checkpoints.txt'

SHAPES = {'w': (16, 16), 'b': (4,)}
SMALL = demo_optax.dct_topk(chunk_size=8, topk=3)
LARGE = demo_optax.dct_topk(chunk_size=16, topk=3)
FOUR = demo_optax.Workers.simulated(4)
TWO = demo_optax.Workers.simulated(2)
BLOCKS = demo_optax.Workers.simulated(
  4, {'w': jax.P('fsdp'), 'b': None}, {'fsdp': 4}
)


# An exchange whose owners of chunks keep something in the state.
OWNERS = {'exchange': 'all_to_all', 'update_values': 'int4'}


def make(
  workers=FOUR,
  compressor=SMALL,
  shapes=SHAPES,
  dtype=jnp.float32,
  exchange=None,
  **others,
):
  """A tree to save, or to restore."""
  params = {k: jnp.ones(s, dtype) for k, s in shapes.items()}
  tx = (
    demo_optax.demo(1e-3, workers=workers, compressor=compressor)
    if exchange is None
    else demo_optax.scale_by_demo(compressor, workers=workers, **exchange)
  )
  tree = {
    'params': params,
    'opt_state': tx.init(params),
    'position': 0,
    'key': jax.random.key(0),
  }
  return {**tree, **others}


# What was tried: (name, the tree to restore, how it is restored).
CASES = [
  ('other number of workers', lambda: make(TWO), {}),
  ('other chunk size', lambda: make(compressor=LARGE), {}),
  (
    'other compressor of the same chunks',
    lambda: make(compressor=demo_optax.dct_topk(8, 2)),
    {},
  ),
  ('a worker of 4 devices, which cut other chunks', lambda: make(BLOCKS), {}),
  (
    'other chunks and workers, `resize=True` alone',
    lambda: make(TWO, LARGE),
    {'resize': True},
  ),
  (
    'other chunks and workers, `rechunk=True` alone',
    lambda: make(TWO, LARGE),
    {'rechunk': True},
  ),
  (
    'other shape of a parameter',
    lambda: make(shapes={'w': (16, 8), 'b': (4,)}),
    {},
  ),
  ('other dtype of the parameters', lambda: make(dtype=jnp.bfloat16), {}),
  (
    'a parameter that the checkpoint lacks',
    lambda: make(shapes={**SHAPES, 'new': (3,)}),
    {},
  ),
  (
    'a parameter that only the checkpoint has',
    lambda: make(shapes={'w': (16, 16)}),
    {},
  ),
  (
    'a part that only the checkpoint has',
    lambda: {k: x for k, x in make().items() if k != 'position'},
    {},
  ),
  (
    'a number of another kind',
    lambda: make(position=jnp.zeros(())),
    {},
  ),
  (
    'a key of another kind',
    lambda: make(key=jax.random.key(0, impl='rbg')),
    {},
  ),
  (
    'another optimizer',
    lambda: make(opt_state={'trace': make()['params']}),
    {},
  ),
  (
    "`exchange='all_gather'`, and a checkpoint of `'all_to_all'` with"
    " `update_values='int4'`",
    lambda: make(exchange={}),
    {'of': 'owners'},
  ),
  (
    'turns, which keep no momentum, `rechunk=True`',
    lambda: make(compressor=demo_optax.compressors.cyclic_signs(4)),
    {'rechunk': True},
  ),
  ('no such step', make, {'step': 7}),
]


def saved(folder):
  """Step 100, of 4 simulated workers and chunks of 8 x 8."""
  for name, exchange in {'demo': None, 'owners': OWNERS}.items():
    tree = make(exchange=exchange)
    with checkpoint.Checkpointer(folder / name, tree) as checkpoints:
      checkpoints.save(100, tree)


def message(folder, make_tree, options):
  """What a case is refused with."""
  options = {**options}
  folder = folder / options.pop('of', 'demo')
  with checkpoint.Checkpointer(folder, make_tree()) as checkpoints:
    error = refused(lambda: checkpoints.restore(**options))
  text = f'{type(error).__name__}: {error}'
  return text.replace(str(folder), 'runs/checkpoints')


def refused(call):
  """The error that a call ends in."""
  try:
    call()
  except (ValueError, TypeError, FileNotFoundError) as error:
    return error
  raise AssertionError('nothing was refused')


def record(name, text):
  """What was done, and below it the message that it was refused with."""
  return f'# {name}\n{text}\n'


if __name__ == '__main__':
  with tempfile.TemporaryDirectory() as folder:
    saved(pathlib.Path(folder))
    records = [
      record(name, message(pathlib.Path(folder), *case))
      for name, *case in CASES
    ]
  FILE.write_text('\n'.join(records))
