"""The optimizer step, and the thin adapters by which Lightning drives it."""
