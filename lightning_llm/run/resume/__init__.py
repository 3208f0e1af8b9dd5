"""Start of a run: from its own checkpoints, a parent run, or weights."""
