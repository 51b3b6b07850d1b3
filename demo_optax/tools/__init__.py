"""Predicts, reads, checks and draws what an exchange does."""

from demo_optax.tools.hlo import Collective, collectives
from demo_optax.tools.replicas import Difference, check_replicas
from demo_optax.tools.traffic import Plan, plan

__all__ = [
  'Collective',
  'Difference',
  'Plan',
  'check_replicas',
  'collectives',
  'plan',
]
