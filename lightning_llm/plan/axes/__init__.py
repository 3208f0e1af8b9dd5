"""Axes of the device mesh, one file each: checks, divided dimensions, traffic and memory. Imports no torch."""
