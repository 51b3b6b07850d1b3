"""The methods that benchmarks compare: their settings, and how they are made.

Every method is a chain of the same few links: each worker's own gradient is
clipped, exchanged by a compressor, and given to a base optimizer.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import optax
from flax import nnx
from optax import contrib

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'examples'))

from gpt import GPTConfig

import demo_optax
from demo_optax import compressors
from demo_optax.codes.values import VALUES
from demo_optax.exchange.algorithm import ExchangeKind

# What follows the exchange. The first version of the paper takes signs; the
# second takes any optimizer that wants a momentum, with the learning rate
# outside of it and the gradient weighted by 1 - decay.
BASES = {
    'sign': optax.scale_by_sign,
    'signum': optax.scale_by_sign,
    'sgd': optax.identity,
    'adam': lambda: optax.scale_by_adam(b1=0.0, b2=0.95),  # momentum is there
    'adamw': lambda: optax.scale_by_adam(b1=0.9, b2=0.95),
    'lion': optax.scale_by_lion,
    'muon': lambda: optax.partition(
        {
            'matrix': contrib.scale_by_muon(
                beta=0.0,
                nesterov=False,
                weight_dimension_numbers=lambda tree: jax.tree.map(
                    lambda _: contrib.MuonDimensionNumbers(), tree
                ),
            ),
            'other': optax.scale_by_adam(b1=0.0, b2=0.95),
        },
        lambda tree: jax.tree.map(
            lambda x: 'matrix' if x.ndim == 2 else 'other', tree
        ),
    ),
}
TOPK = {
    'dct': compressors.Dct(),
    'hadamard': compressors.Hadamard(),
    'random-orthogonal': compressors.RandomOrthogonal(),
    'identity': compressors.Identity(),
}
SUBSETS = {
    'random-subset': compressors.RandomSubset,
    'striding': compressors.Striding,
    'slicing': compressors.Slicing,
}


# Methods that average all gradients.
AVERAGED = ('adamw', 'muon')

CLIP = 1.0  # norm that gradients are cut to
WARMUP = 40

# What flags are if they are not given.
OTHERWISE = {
    'lr': 2e-3, 'own_lr': None, 'decay': 0.99, 'values': 'float32',
    'topk': 32,
}
# The same of single optimizers: the best rates on the language model
# (benchmarks/README.md); of demo-muon also its default budget.
TUNED = {
    'lr': {'muon': 2e-2},
    'own_lr': {'muon': 1.2e-2, 'demo-muon': 6e-3},
    'decay': {'demo-muon': 0.9},
    'values': {'demo-muon': 'sign'},
    'topk': {'demo-muon': 64},
}


def parse_args(argv: Sequence[str] = ()) -> argparse.Namespace:
  """Settings of a run: a method, and the training example's task."""
  parser = argparse.ArgumentParser()
  add = parser.add_argument
  add('--optimizer', choices=['demo-muon', 'demo', *AVERAGED],
      default='demo-muon')
  add('--lr', type=float)  # peak
  add('--decay', type=float)  # of what was not sent yet
  add('--base', choices=BASES, default='sign')
  add('--compressor', choices=[*TOPK, *SUBSETS, 'full'], default='dct')
  add('--chunk', type=int, default=64)  # its longest side
  add('--topk', type=int)
  add('--values', choices=VALUES)
  add('--rate', type=float, default=1 / 32)  # what `SUBSETS` send
  # Embeddings, head and 1-D leaves: as the rest, by AdamW on averaged
  # gradients, or exchanged by the --own flags.
  add('--embeddings', choices=['demo', 'adamw', 'own'], default='demo')
  add('--own-topk', type=int, default=8)
  add('--own-chunk', type=int, nargs=2, default=[1, 192])
  add('--own-base', choices=BASES, default='adam')
  add('--own-lr', type=float)
  add('--exchange', choices=get_args(ExchangeKind), default='all_gather')
  add('--workers', type=int, default=4)
  add('--data', metavar='FILE')
  add('--steps', type=int, default=800)
  add('--batch', type=int, default=16)
  add('--seed', type=int, default=0)
  for field in dataclasses.fields(GPTConfig):
    add(f'--{field.name}', type=int, default=field.default)
  args = parser.parse_args(argv)
  given = {k: v for k, v in vars(args).items() if v is not None}
  tuned = {
      flag: TUNED[flag].get(args.optimizer, default)
      for flag, default in OTHERWISE.items()
  }
  return argparse.Namespace(**{**vars(args), **tuned, **given})


def make_optimizer(
    args: argparse.Namespace, workers: demo_optax.Workers
) -> optax.GradientTransformation:
  lr = args.lr
  own_lr = lr if args.own_lr is None else args.own_lr
  if args.optimizer in AVERAGED:
    return optax.chain(demo_optax.average(workers=workers), of_averages(args))
  clip = demo_optax.per_worker(
      optax.clip_by_global_norm(CLIP), workers=workers
  )
  if args.optimizer == 'demo-muon':
    return optax.chain(clip, demo_optax.demo_muon(
        make_schedule(args, lr),
        workers=workers,
        compressor=lambda params: compressor_of_leaves(args, params),
        decay=args.decay,
        adam_learning_rate=make_schedule(args, own_lr),
        exchange=args.exchange,
        update_values=update_values(args),
    ))
  bases = {'matrix': base_of(args, args.base, lr)}
  codes = {'matrix': make_compressor(args)}
  if args.embeddings == 'adamw':
    codes['other'], bases['other'] = None, adamw(args, own_lr)
  elif args.embeddings == 'own':
    codes['other'] = own_compressor(args)
    bases['other'] = base_of(args, args.own_base, own_lr)
  else:
    codes['other'], bases['other'] = codes['matrix'], bases['matrix']
  weights = {'matrix': weighted(args, args.base, lr)}
  weights['other'] = {
      'demo': weights['matrix'],
      'own': weighted(args, args.own_base, own_lr),
      'adamw': optax.identity(),
  }[args.embeddings]

  def exchange(params: Any) -> optax.GradientTransformation:
    labels = matrix_or_other(params)
    return optax.chain(
        optax.partition(weights, labels),
        demo_optax.scale_by_demo(
            jax.tree.map(codes.get, labels),
            args.decay,
            workers=workers,
            exchange=args.exchange,
            update_values=update_values(args),
        ),
    )

  return optax.chain(
      clip, for_params(exchange), optax.partition(bases, matrix_or_other)
  )


def for_params(
    make: Callable[[Any], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
  """The transformation that `make` makes for the parameters it is given."""
  return optax.GradientTransformationExtraArgs(
      lambda params: make(params).init(params),
      lambda updates, state, params=None, **extra: make(params).update(
          updates, state, params, **extra
      ),
  )


def update_values(args: argparse.Namespace) -> str:
  """How updates of `all_to_all` are sent: as signs where those are taken."""
  bases = [args.base] if args.optimizer == 'demo' else ['muon']
  if args.embeddings == 'own':
    bases.append(args.own_base)
  return 'ternary' if {'sign', 'signum'}.issuperset(bases) else 'int4'


def weighted(
    args: argparse.Namespace, base: str, lr: float
) -> optax.GradientTransformation:
  """Scales gradients before the exchange.

  The learning rate is inside the momentum where signs are taken of it.
  """
  weight = make_schedule(args, lr) if base == 'sign' else 1 - args.decay
  return optax.scale_by_learning_rate(weight, flip_sign=False)


def base_of(
    args: argparse.Namespace, base: str, lr: float
) -> optax.GradientTransformation:
  """The base optimizer behind the exchange."""
  return optax.chain(
      BASES[base](),
      optax.scale_by_learning_rate(make_schedule(args, lr)),
  )


def adamw(
    args: argparse.Namespace, lr: float
) -> optax.GradientTransformation:
  """For gradients that are averaged every step."""
  return optax.chain(
      optax.clip_by_global_norm(CLIP),
      optax.adamw(make_schedule(args, lr), b2=0.95, weight_decay=0.0),
  )


def of_averages(args: argparse.Namespace) -> optax.GradientTransformation:
  """The base optimizer of a method that averages gradients."""
  if args.optimizer == 'adamw':
    return adamw(args, args.lr)
  return optax.chain(
      optax.clip_by_global_norm(CLIP),
      contrib.muon(
          make_schedule(args, args.lr),
          adam_b2=0.95,
          adam_learning_rate=make_schedule(args, args.own_lr),
          muon_weight_dimension_numbers=(
              demo_optax.recipes.muon_dimension_numbers
          ),
      ),
  )


def make_compressor(args: argparse.Namespace) -> demo_optax.Compressor:
  if args.compressor == 'full':
    return compressors.full()
  if args.compressor in SUBSETS:
    select = SUBSETS[args.compressor](args.rate)
    return compressors.Compressor(select, compressors.Identity(), args.chunk)
  basis, select = TOPK[args.compressor], compressors.TopK(args.topk)
  return compressors.Compressor(select, basis, args.chunk, args.values)


def own_compressor(args: argparse.Namespace) -> demo_optax.Compressor:
  return demo_optax.dct_topk(
      tuple(args.own_chunk), args.own_topk, values=args.values
  )


def compressor_of_leaves(args: argparse.Namespace, params: Any) -> Any:
  """What `plan` wants to know."""
  if args.optimizer in AVERAGED:
    return jax.tree.map(lambda _: None, params)
  compressor = make_compressor(args)
  own = args.embeddings == 'own' or args.optimizer == 'demo-muon'
  if not own and args.embeddings == 'demo':
    return compressor
  other = own_compressor(args) if own else None
  by_label = {'matrix': compressor, 'other': other}
  return jax.tree.map(by_label.get, matrix_or_other(params))


def matrix_or_other(params: Any) -> Any:
  """Labels: embeddings, head, norms and biases are something else."""
  dimensions = jax.tree.leaves(
      demo_optax.recipes.muon_dimension_numbers(params),
      is_leaf=lambda x: x is None
      or isinstance(x, contrib.MuonDimensionNumbers),
  )
  return jax.tree.structure(params).unflatten(
      ['other' if x is None else 'matrix' for x in dimensions]
  )


def make_schedule(args: argparse.Namespace, peak: float) -> optax.Schedule:
  warmup = min(WARMUP, args.steps // 2)
  return optax.warmup_cosine_decay_schedule(
      0.0, peak, warmup, args.steps, end_value=0.1 * peak
  )


def count_bytes(
    args: argparse.Namespace, params: Any, workers: demo_optax.Workers
) -> dict[str, float]:
  """Bytes per worker and step of the chosen optimizer and of AdamW-DDP."""
  plan = demo_optax.plan(
      params,
      compressor_of_leaves(args, params),
      workers,
      exchange=args.exchange,
      update_values=update_values(args),
  )
  return {
      'sent': plan.sent_bytes,
      'received': plan.received_bytes,
      'adamw': plan.dense_bytes(),
  }


# Training with any of them ----------------------------------------------------


def make_train_step(
    loss_fn: Callable[..., jax.Array],
    workers: demo_optax.Workers,
) -> Callable[..., jax.Array]:
  """Returns `(model, optimizer, *batch) -> loss`, the mean over all workers.

  Written for one worker: its rows of the batch, its loss, its gradient. The
  exchange is in `optimizer.update`.
  """

  @demo_optax.data_parallel(workers, donate_argnums=(0, 1))
  def train_step(
      model: nnx.Module, optimizer: nnx.Optimizer, *batch: jax.Array
  ) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
    optimizer.update(model, grads)
    return loss

  return train_step
