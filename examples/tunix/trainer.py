"""Fine-tunes with Tunix, and exchanges between workers instead of averaging.

`Trainer` takes the place of `tunix.PeftTrainer`: loops, metrics, evaluation,
hooks and checkpoints stay Tunix's. Its step, written for all devices, becomes
the step of one worker.
"""

import functools
from typing import Any

import jax
from flax import nnx
from tunix.sft import peft_trainer

import demo_optax


class Trainer(peft_trainer.PeftTrainer):
  """A `PeftTrainer` whose optimizer has an exchange in it.

  The loss is that of one worker. If `loss_fn` divides by a number of tokens,
  it is the number of this worker.

  Args:
    model: the model, with LoRA or without.
    optimizer: an optax chain with an exchange among `workers`.
    training_config: Tunix's. The first entry of `data_sharding_axis` should
      also name the worker axis: `(('replica', 'fsdp'),)`.
    workers: the workers of the exchange.
    **options: other options of `PeftTrainer`.
  """

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Any,
    training_config: peft_trainer.TrainingConfig,
    *,
    workers: demo_optax.Workers,
    **options: Any,
  ):
    self.workers = workers
    # What is restored goes to where it was before.
    nnx.update(model, workers.device_put(nnx.state(model)))
    super().__init__(model, optimizer, training_config, **options)

  def jit_train_and_eval_step(
    self, skip_jit: bool = False, cache_nnx_graph: bool = False
  ) -> tuple[Any, Any]:
    """Compiles the training step for all workers, and evaluation as before.

    Args:
      skip_jit: must not be asked for.
      cache_nnx_graph: has no meaning here; nothing is looked up twice.
    """
    del cache_nnx_graph
    if skip_jit:
      raise ValueError('The step of one worker is always compiled.')
    if self._jitted_train_step_fn is None:
      step = demo_optax.data_parallel(
        self.workers, batch_argnames='inputs', donate_argnames='optimizer'
      )(self.create_train_step_fn())
      self._jitted_train_step_fn = functools.partial(
        _Counted(step), self.model, self.optimizer
      )
      self._jitted_eval_step_fn = functools.partial(
        nnx.jit(self.create_eval_step_fn()), self.model
      )
    return self._jitted_train_step_fn, self._jitted_eval_step_fn


def micro_batched(loss_fn: Any, number: int) -> Any:
  """Returns a loss that computes its rows in parts, with one part's memory.

  Args:
    loss_fn: `(model, **inputs) -> loss`, a mean over rows.
    number: of parts; it divides one worker's rows.
  """

  @functools.wraps(loss_fn)
  def mean_loss(model: nnx.Module, *inputs: Any, **named: Any) -> jax.Array:
    graphdef, state = nnx.split(model)

    @jax.checkpoint
    def one(state: Any, micro: Any) -> jax.Array:
      inputs, named = micro
      return loss_fn(nnx.merge(graphdef, state), *inputs, **named)

    micro = jax.tree.map(
      lambda x: x.reshape(number, -1, *x.shape[1:]), (inputs, named)
    )
    return jax.lax.map(lambda micro: one(state, micro), micro).mean()

  return mean_loss


class _Counted:
  """A step that can be asked for how many shapes of batches it was compiled.

  Tunix logs that, and asks `step.func.jitted_fn`.
  """

  def __init__(self, step: Any):
    self.step = step
    self._shapes: set[Any] = set()

  @property
  def jitted_fn(self) -> '_Counted':
    return self

  def _cache_size(self) -> int:
    return len(self._shapes)

  def __call__(self, model: Any, optimizer: Any, inputs: Any) -> Any:
    self._shapes.add(tuple(x.shape for x in jax.tree.leaves(inputs)))
    return self.step(model, optimizer, inputs)
