"""What a run starts from: its own checkpoints, a trunk, or weights."""
