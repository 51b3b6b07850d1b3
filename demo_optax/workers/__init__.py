"""The workers in an exchange, and the maps that run a worker's function."""

from demo_optax.workers.collectives import Group
from demo_optax.workers.workers import Spec, Workers

__all__ = ['Group', 'Spec', 'Workers']
