"""Checkpoints: a run's whole state, written with checksums, verified, retained, and restored under any layout."""
