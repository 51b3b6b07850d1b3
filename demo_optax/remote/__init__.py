"""Workers that are programs, and the relay that joins them.

    frames   what workers and relay send each other
    relay    hands all workers the same list of messages, round by round
    link     a worker's connection to the relay

See `demo_optax.Workers.remote`. `python -m demo_optax.remote` starts a relay.
"""
