"""Generates text while train_lm.py trains: a program that only follows.

    python -m demo_optax.remote --workers 2
    export DEMO_RELAY=tcp://127.0.0.1:7077 DEMO_WORKERS=2
    python examples/train_lm.py --rank 0
    python examples/train_lm.py --rank 1
    python examples/follow.py

It takes the model from a worker once, then receives the workers' messages, and
has their parameters after each round. It computes no gradient, and nobody waits
for it. It can be ended and started again at any time. Give it the flags of the
workers that change the model or the optimizer. `--eval-every` is the number of
rounds between texts.
"""

import sys

import flags
import jax
import jax.numpy as jnp
from flax import nnx
from gpt import generate
from train_lm import (
  evaluate,
  load_data,
  make_model,
  make_optimizer,
  make_train_step,
  parse_args,
)

import demo_optax

LENGTH = 120  # bytes of a text


def main(argv: list[str] | None = None) -> int:
  args = parse_args(argv, __doc__)
  if args.relay is None:
    flags.refuse('--relay must be given.')
  corpus, valid = load_data(args)
  workers = demo_optax.Workers.remote(
    args.relay, rank=None, count=args.workers, keys=args.keys
  )
  # Its values come from the workers: neither these nor the momentum are used.
  model = make_model(args)
  optimizer = nnx.Optimizer(model, make_optimizer(args, workers), wrt=nnx.Param)
  tokens = jax.ShapeDtypeStruct((1, args.context + 1), jnp.int32)
  train_step = make_train_step(workers)
  followed = demo_optax.remote.follow(
    train_step, model, optimizer, tokens=tokens
  )
  shown = -args.eval_every
  for number, behind, (model, _) in followed:
    is_last = number >= args.steps
    if not is_last and (behind or number < shown + args.eval_every):
      continue
    shown = number
    loss = evaluate(model, valid)
    prompt = corpus.valid[: args.context]
    text = generate(model, prompt, LENGTH, args.seed).decode(errors='replace')
    print(f'round {number}: validation loss {loss:.3f}\n{text}\n', flush=True)
    if is_last:
      return 0
  return 1


if __name__ == '__main__':
  sys.exit(main())
