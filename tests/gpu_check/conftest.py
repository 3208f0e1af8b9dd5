"""Transformer Engine's stand-in, as the native linears' tests have it."""

from native.conftest import engine

__all__ = ["engine"]
