"""Each recipe at its own best value of a key."""
