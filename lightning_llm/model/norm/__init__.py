"""Norms, one kind per pair of files: `NAME_spec.py` describes it, `NAME.py` computes."""
