"""Machine health of a run's ranks: speed and correctness of devices, links, memory and disk."""
