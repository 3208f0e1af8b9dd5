"""Runs of a comparison: found, read and paired."""
