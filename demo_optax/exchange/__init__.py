"""Algorithm 1 of the paper, as one worker runs it."""
