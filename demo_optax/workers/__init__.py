"""Who takes part in an exchange, and how a worker's function runs for all."""

from demo_optax.workers.collectives import Group
from demo_optax.workers.value import Spec, Workers

__all__ = ['Group', 'Spec', 'Workers']
