"""Who takes part in an exchange, and how a worker's function runs for all."""

from demo_optax.workers.base import Spec, Workers
from demo_optax.workers.collectives import Group

__all__ = ['Group', 'Spec', 'Workers']
