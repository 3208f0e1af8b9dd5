"""Weights in folders: read by rows, without executing anything in them, and written."""
