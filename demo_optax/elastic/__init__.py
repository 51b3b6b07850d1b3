"""Training that goes on when processes are lost, return, or are added.

    run              the loop around a training step
    member           one process of the run: its connection, and JAX's runtime
    coordinator      who takes part, decided in a process that does nothing else
    transfer         a process's part of a state, out of one mesh into another

`python -m demo_optax.elastic` is the coordinator.
"""

from demo_optax.elastic.coordinator import Coordinator
from demo_optax.elastic.run import Run

__all__ = ['Coordinator', 'Run']
