"""Workers that are programs, and the relay that joins them.

    frames   what workers and relay send each other
    relay    hands all workers the same list of messages, round by round
    rounds   who takes part in a round, and what each worker is answered
    store    lists of messages, and a state, in files of the relay
    link     a worker's connection to the relay

See `demo_optax.Workers.remote`. `python -m demo_optax.remote` starts a relay.
"""

from demo_optax.workers import Workers


def pause(workers: Workers) -> None:
  """Lets the others go on without this worker, until its next step.

  To be called before an evaluation or a save that the other workers do not make
  at the same step: no round waits for this worker, which would cost the others
  one deadline. Its next step applies the rounds that it missed.
  """
  if workers.relay is None:
    raise ValueError(
      f'workers must be Workers.remote, got {workers}. Leave pause out: only'
      ' workers with a relay go on without each other.'
    )
  from demo_optax.remote import link  # needs ZeroMQ

  link.link_of(workers).pause()
