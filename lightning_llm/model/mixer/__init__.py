"""Mixers: what lets a token see others. One kind per pair of files: `NAME_spec.py` describes it, `NAME.py` computes."""
