"""The optimizer step, and thin adapters that let Lightning drive it."""
