"""The optimizer step, checkpoints, spikes, and Lightning adapters."""
