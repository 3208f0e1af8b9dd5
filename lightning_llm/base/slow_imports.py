"""Imports of torch, Lightning and MLflow: seconds, of which the garbage collector need not take a quarter."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_own_process = False
_depth = 0


def take_process() -> None:
    """Say that this process runs one command and nothing else: what it imports, it keeps to its end."""
    global _own_process
    _own_process = True


def is_importing() -> bool:
    """Return whether this process, of a command alone, is within `slow_imports`."""
    return _depth > 0


@contextmanager
def slow_imports() -> Iterator[None]:
    """Import without looking for garbage, among half a million objects that are none, and not among them later.

    In the process of a command alone (`take_process`). Another's, a notebook's say, has objects of its own, which
    would never be collected either.
    """
    if not _own_process:
        yield
        return
    global _depth
    _depth += 1
    gc.disable()
    try:
        yield
    finally:
        _depth -= 1
        gc.freeze()
        gc.enable()
