"""Mixtures, a file per kind: the source of each sample, and its place there, as a function of its number."""
