"""Mistakes that are easily made, and what the library answers.

    python tests/common_errors.py    # writes messages/errors.txt, docs/errors.md

Each case makes the mistake. The tests compare its message with the file, and
how the message begins with the table of the page, which has the cases that need
more than the message says.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import mismatches
import optax
from helpers import make_mesh

import demo_optax

FILE = pathlib.Path(__file__).parent / 'messages/errors.txt'
DOCS = pathlib.Path(__file__).parents[1] / 'docs/errors.md'
MARKS = ('<!-- errors: python tests/common_errors.py -->', '<!-- end -->')

FOUR = demo_optax.Workers.simulated(4)
PARAMS = {'w': jnp.ones((8, 8))}
STACKED = {'w': jnp.ones((4, 8, 8))}


def update(tx, gradients=STACKED, params=PARAMS, state=None):
  state = tx.init(PARAMS) if state is None else state
  return tx.update(gradients, state, params)


def on_axis():
  return demo_optax.demo(1e-3, workers=demo_optax.Workers.on_axis('data'))


def demo(**options):
  return demo_optax.demo(1e-3, **{'workers': FOUR, **options})


def owners(update_values='int4', **options):
  return demo_optax.scale_by_demo(
    exchange='all_to_all',
    update_values=update_values,
    **{'workers': FOUR, **options},
  )


def loss_fn(params, x):
  return jnp.mean((x @ params['w']) ** 2)


def run(train_step, state=None, rows=8):
  """Calls a step that is written for one worker."""
  state = demo().init(PARAMS) if state is None else state
  step = demo_optax.data_parallel(FOUR, batch_argnums=2)(train_step)
  step(PARAMS, state, jnp.ones((rows, 8)))


def train_step(params, state, x, tx=None, loss_fn=loss_fn):
  gradients = jax.grad(loss_fn)(params, x)
  updates, state = (tx or demo()).update(gradients, state, params)
  return optax.apply_updates(params, updates), state


def ignore_batch(params, state, x):
  return train_step(params, state, jnp.ones((2, 8)))


def skip_by_own_loss(params, state, x):
  new, state = train_step(params, state, x)
  keep = loss_fn(params, x) < 1
  return jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, params), state


def count_positive(params, state, x):
  return *train_step(params, state, x), jnp.sum(x @ params['w'] > 0)


def close_over_state():
  state = demo().init(PARAMS)

  @demo_optax.data_parallel(FOUR, batch_argnums=1)
  def step(params, x):
    return train_step(params, state, x)[0]

  step(PARAMS, jnp.ones((8, 8)))


def mask_alone():
  tx = optax.masked(demo(), {'w': True, 'frozen': False})
  params = {**PARAMS, 'frozen': jnp.ones(8)}
  loss = lambda params, x: (
    loss_fn(params, x) + jnp.sum(params['frozen'] * x.mean(0))
  )

  @demo_optax.data_parallel(FOUR, batch_argnums=2)
  def step(params, state, x):
    return train_step(params, state, x, tx, loss)

  step(params, tx.init(params), jax.random.normal(jax.random.key(0), (8, 8)))


def batch_not_named():
  def step(params, state, x):
    return train_step(params, state, x, optax.adamw(1e-3))

  state = optax.adamw(1e-3).init(PARAMS)
  demo_optax.data_parallel(FOUR)(step)(PARAMS, state, jnp.ones((8, 8)))


def outer_alone():
  tx = demo_optax.local.local_updates(
    optax.sgd(1.0), optax.sgd(1.0), 1, workers=FOUR
  )

  @demo_optax.data_parallel(FOUR, batch_argnums=2)
  def train_step(params, state, x):
    return tx.update({'w': x}, state, params)

  train_step(PARAMS, tx.init(PARAMS), jnp.ones((32, 8)))


# What was done, in words and in code.
CASES = [
  (
    '`jax.jit` instead of `data_parallel`: one gradient, of no worker',
    lambda: update(demo(), PARAMS),
  ),
  ('a batch that does not divide', lambda: run(train_step, rows=6)),
  (
    'a batch that is not named',
    batch_not_named,
  ),
  (
    "a loss that does not use the step's batch, or averaged gradients",
    lambda: run(ignore_batch),
  ),
  (
    'a gradient that is neither exchanged nor averaged: `optax.masked` alone,'
    ' or another optimizer for some parameters',
    mask_alone,
  ),
  ("a skip by one worker's own loss", lambda: run(skip_by_own_loss)),
  ('a count that is returned', lambda: run(count_positive)),
  ('an optimizer state that is no argument', close_over_state),
  (
    '`Workers.on_axis`, and `jax.grad` of replicated parameters in a'
    ' `shard_map`',
    lambda: jax.make_jaxpr(
      jax.shard_map(
        lambda p, x: update(
          on_axis(), jax.grad(lambda p: jnp.sum(x @ p['w']))(p), p
        )[0],
        mesh=make_mesh(1),
        in_specs=(jax.P(), jax.P('data')),
        out_specs=jax.P(),
      )
    )(PARAMS, jnp.ones((1, 8))),
  ),
  ('`Workers.on_axis` outside of any map', lambda: update(on_axis(), PARAMS)),
  (
    '`tx.update(grads, state)` of `demo` with weight decay',
    lambda: update(demo(weight_decay=0.1), params=None),
  ),
  ('`workers=4`', lambda: demo(workers=4)),
  (
    'an axis that the mesh does not have',
    lambda: demo_optax.Workers.on_mesh(make_mesh(1), 'model'),
  ),
  ('`decay=1.0`', lambda: demo(decay=1.0)),
  ("`values='int3'`", lambda: demo_optax.dct_topk(values='int3')),
  (
    'sides that are no powers of two, for Hadamard',
    lambda: demo(
      compressor=demo_optax.Compressor(
        demo_optax.compressors.TopK(32), demo_optax.compressors.Hadamard(), 48
      )
    ).init({'w': jnp.ones((96, 96))}),
  ),
  (
    'a state of another number of workers',
    lambda: update(
      demo(), state=demo(workers=demo_optax.Workers.simulated(2)).init(PARAMS)
    ),
  ),
  (
    'a state of another compressor',
    lambda: update(
      demo(), state=demo(compressor=demo_optax.dct_topk(4, 2)).init(PARAMS)
    ),
  ),
  (
    "`exchange='all_to_all'` without `update_values`, in `scale_by_demo`",
    lambda: owners(None),
  ),
  ("`update_values='int3'`", lambda: owners('int3')),
  (
    "a state of `exchange='all_gather'` for `'all_to_all'` with"
    " `update_values='int4'`",
    lambda: update(
      owners(), state=demo_optax.scale_by_demo(workers=FOUR).init(PARAMS)
    ),
  ),
  (
    "`exchange='all_to_all'` with `Workers.on_axis`, and `tx.init` outside of"
    ' the map',
    lambda: owners(workers=demo_optax.Workers.on_axis('data')).init(PARAMS),
  ),
  (
    '`optax.MultiSteps` in a step',
    lambda: run(train_step, optax.MultiSteps(demo(), 2).init(PARAMS)),
  ),
  (
    '`optax.inject_hyperparams` with bfloat16 parameters',
    lambda: optax.inject_hyperparams(demo_optax.demo)(
      1e-3, decay=0.999, workers=FOUR
    ).init({'w': jnp.ones((8, 8), jnp.bfloat16)}),
  ),
  (
    'complex parameters',
    lambda: demo().init({'z': jnp.ones(3, jnp.complex64)}),
  ),
  (
    '`demo_optax.state.momentum` of another optimizer',
    lambda: demo_optax.state.momentum(optax.adam(1e-3).init(PARAMS)),
  ),
  (
    'local updates outside of a `data_parallel` step',
    lambda: update(demo_optax.local.diloco(workers=FOUR), PARAMS),
  ),
  ('an outer optimizer without an exchange', outer_alone),
]


# Of some, what to do: those are in the table of the page.
REMEDIES = {
  '`jax.jit` instead of `data_parallel`: one gradient, of no worker': (
    'decorate the step with `data_parallel`, or [stack gradients]'
    '(recipes.md#your-own-jit)'
  ),
  "a loss that does not use the step's batch, or averaged gradients": (
    "use the step's arguments in the loss, and remove `pmean`"
  ),
  "a skip by one worker's own loss": (
    'return [`over_workers` or `out_batch`](your_trainer.md#results)'
  ),
  'a gradient that is neither exchanged nor averaged: `optax.masked` alone,'
  ' or another optimizer for some parameters': (
    '[freeze them](your_trainer.md#freezing-and-lora), or give them'
    ' `demo_optax.average`'
  ),
  'an optimizer state that is no argument': 'make it an argument',
  '`Workers.on_axis`, and `jax.grad` of replicated parameters in a'
  ' `shard_map`': "`jax.lax.pcast(params, 'data', to='varying')` before",
  'a state of another number of workers': (
    '[`resize=True`](checkpoints.md#another-number-of-workers-mesh-or-chunk-size)'
  ),
  'a state of another compressor': (
    '[`rechunk=True`](checkpoints.md#another-number-of-workers-mesh-or-chunk-size)'
  ),
  '`optax.MultiSteps` in a step': (
    '[accumulate in the step](your_trainer.md#gradient-accumulation)'
  ),
  '`optax.inject_hyperparams` with bfloat16 parameters': (
    'give it `hyperparam_dtype=jnp.float32`'
  ),
  'complex parameters': (
    'two real leaves, or `optax.contrib.split_real_and_imaginary`'
  ),
  'local updates outside of a `data_parallel` step': 'decorate the step',
  'an outer optimizer without an exchange': (
    'put `scale_by_demo` or `average` into it'
  ),
}


def message(mistake):
  error = mismatches.refused(mistake)
  return f'{type(error).__name__}: {error}'


def beginning(text):
  """Of a message: what must be, without its type and what it got."""
  return re.split(r', got |: ', text.split(': ', 1)[1])[0]


def table(messages):
  rows = ['| error | cause | remedy |', '|---|---|---|']
  for cause, text in messages.items():
    if cause in REMEDIES:
      rows.append(f'| {beginning(text)} | {cause} | {REMEDIES[cause]} |')
  return '\n'.join(rows)


def page(text, messages):
  """Returns the page with the table between its marks replaced."""
  before, rest = text.split(MARKS[0])
  _, after = rest.split(MARKS[1], 1)
  return f'{before}{MARKS[0]}\n{table(messages)}\n{MARKS[1]}{after}'


def file(messages):
  records = [mismatches.record(*case) for case in messages.items()]
  return '\n'.join(records)


def make_all():
  return {name: message(mistake) for name, mistake in CASES}


if __name__ == '__main__':
  messages = make_all()
  FILE.write_text(file(messages))
  DOCS.write_text(page(DOCS.read_text(), messages))
