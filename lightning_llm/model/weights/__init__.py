"""Weights that lie in a folder: read by rows, without running anything in it; and such folders written."""
