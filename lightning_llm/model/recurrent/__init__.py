"""Recurrent mixers: a state in place of keys and values."""
