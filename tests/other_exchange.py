"""One of two processes, which were started with different exchanges.

Run by test_processes.py under examples/launch_local.py. For each setting it
prints the error that ends it before the first message.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import process_worker
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.exchange import agreement

TOPK = demo_optax.dct_topk(16, 4)
SETTINGS = {  # of either process; what the error names
  'k': (TOPK, demo_optax.dct_topk(16, 5)),
  'chunk': (TOPK, demo_optax.dct_topk(8, 4)),
  'values': (TOPK, demo_optax.dct_topk(16, 4, values='int8')),
  'as many bytes': (
    TOPK,
    demo_optax.Compressor(
      demo_optax.compressors.TopK(4), demo_optax.compressors.Hadamard(), 16
    ),
  ),
  'averaged': (TOPK, {'w': TOPK, 'b': None}),
  'average': ({'average': 'senders'}, {'average': 'workers'}),
  'version': ('0.1.0', '0.2.0'),
  'shape': (16, 32),
}


def main():
  workers, _ = process_worker.join()
  here = jax.process_index()
  for name, settings in SETTINGS.items():
    own, width, version = settings[here], 16, agreement.__version__
    if name == 'shape':
      own, width = {}, own
    if name == 'version':
      agreement.__version__, own = own, {}
    options = own if name == 'average' else {}
    tx = demo_optax.scale_by_demo(
      TOPK if own == options else own, workers=workers, **options
    )
    attempt(name, trainer(tx, workers), width)
    agreement.__version__ = version
  tx = demo_optax.scale_by_demo(TOPK, workers=workers)
  again = trainer(tx, workers)
  attempt('tried again, first', again, (16, 32)[here])
  attempt('tried again, second', again, 16)
  attempt('the same', trainer(tx, workers), 16)


def attempt(name, train, width):
  try:
    train(width)
    print(f'{name}: done', flush=True)
  except ValueError as error:
    print(f'{name}: {error}', flush=True)


def trainer(tx, workers):
  """Returns two steps of data_parallel, from a state that is made under jit."""

  @demo_optax.data_parallel(workers, batch_argnums=2)
  def train_step(params, opt_state, x):
    grads = jax.grad(
      lambda params: jnp.mean(params['w'] * x.mean()) + params['b'].sum()
    )(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def train(width):
    params = {'w': jnp.ones((16, width)), 'b': jnp.ones(8)}
    opt_state = jax.jit(tx.init)(params)
    x = jax.make_array_from_process_local_data(
      NamedSharding(workers.mesh, P('data')), np.ones((1, 4), np.float32)
    )
    for _ in range(2):
      params, opt_state = train_step(params, opt_state, x)

  return train


if __name__ == '__main__':
  main()
