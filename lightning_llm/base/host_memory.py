"""Settings of glibc's malloc that keep freed host memory from step to step.

By default malloc maps each block above 32 MB separately and trims free memory at the end of its heap. Logits and large
gradients then cause a page fault for every 4 KB in every step (2,048 tokens with a vocabulary of 4,096 in fp32:
33.6 MB, three times a step). A training step allocates the same blocks repeatedly, so kept memory is reused. Results do
not change: the alignment of blocks is the same (mallopt(3)).
"""

import ctypes
import gc
import os
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameter numbers from malloc.h; a trim threshold of -1 disables trimming."""
GROWS_BY_BYTES = 1 << 26
SETTINGS = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: GROWS_BY_BYTES}
DEFAULTS = {M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: 128 << 10, M_TOP_PAD: 128 << 10}
"""Defaults from mallopt(3)."""

_kept = False


def is_given() -> bool:
    """Return whether the user configures malloc by environment variables, or replaces it by another allocator."""
    names = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")
    return any(os.environ.get(name) for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def keep_memory() -> bool:
    """Let malloc keep freed memory for later steps, until `give_back`; return whether that was possible.

    It needs Linux with glibc, and is not done if the user has configured malloc.
    """
    global _kept
    mallopt = _function("mallopt")
    if mallopt is None or is_given():
        return False
    _kept = True
    told = [mallopt(name, value) for name, value in SETTINGS.items()]
    return told == [1] * len(SETTINGS)


def give_back() -> None:
    """Return freed memory to the kernel and restore malloc's defaults, for a caller that continues after a run."""
    global _kept
    gc.collect()
    if _kept and (mallopt := _function("mallopt")) is not None:
        for name, value in DEFAULTS.items():
            mallopt(name, value)
    _kept = False
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


def _function(name: str) -> Any:
    """Return a function of glibc by name, None with another C library."""
    process = ctypes.CDLL(None)
    return getattr(process, name, None) if hasattr(process, "gnu_get_libc_version") else None
