"""Loaders of documents: kinds (`*_spec.py`) and what each reads with."""
