"""Gaps as numbers of tokens."""
