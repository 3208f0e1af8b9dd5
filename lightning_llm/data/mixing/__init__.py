"""Mixtures: which source each sample of a run comes from, as a function of its number."""
