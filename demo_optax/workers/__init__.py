"""Who takes part in an exchange, and how a worker's function runs for all."""

from demo_optax.workers.base import Workers

__all__ = ['Workers']
