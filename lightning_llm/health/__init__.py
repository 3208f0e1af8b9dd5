"""Health of the ranks of a run: what their devices, links, memory and disk do, and whether their numbers are right."""
