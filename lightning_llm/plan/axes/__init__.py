"""Axes of the device mesh, one file each: legality, what the axis divides, its traffic and memory. Imports no torch."""
