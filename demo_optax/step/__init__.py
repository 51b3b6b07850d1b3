"""One worker's training step, run for all workers."""
