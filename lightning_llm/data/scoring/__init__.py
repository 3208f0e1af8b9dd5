"""Scorers of documents: kinds (`*_spec.py`), and the table of what they found."""
