"""How the arithmetic of a step is done: the same bits at other speeds."""
