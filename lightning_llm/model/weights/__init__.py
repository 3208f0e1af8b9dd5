"""Weights that lie in a folder: what is in its files, read by rows, without running anything; and such folders written."""
