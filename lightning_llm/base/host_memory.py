"""Host memory that a run's process keeps from step to step: glibc's malloc, told not to give it back.

By default malloc maps each block above 32 MB anew, and trims what lies free at the end of its heap, so that logits,
large gradients and what is made of them cost a page fault for every 4 KB in every step (2,048 tokens of a vocabulary of
4,096 in fp32: 33.6 MB, three times a step). A training step asks for the same blocks again and again; kept, they are
there. Nothing is computed otherwise: blocks are aligned as before (mallopt(3)).
"""

import ctypes
import gc
import os
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""As malloc.h numbers them; a trim threshold of -1 is none."""
GROWS_BY_BYTES = 1 << 26
SETTINGS = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: GROWS_BY_BYTES}
DEFAULTS = {M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: 128 << 10, M_TOP_PAD: 128 << 10}
"""As mallopt(3) has them."""

_kept = False


def is_given() -> bool:
    """Return whether the user has told malloc by the environment what to do, or another allocator takes its place."""
    names = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")
    return any(os.environ.get(name) for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def keep_memory() -> bool:
    """Let malloc keep what is freed, until `give_back`; return whether it will. Linux with glibc alone."""
    global _kept
    mallopt = _function("mallopt")
    if mallopt is None or is_given():
        return False
    _kept = True
    told = [mallopt(name, value) for name, value in SETTINGS.items()]
    return told == [1] * len(SETTINGS)


def give_back() -> None:
    """Give the kernel what lies free, and keep no more: whoever called a run in this process goes on without it."""
    global _kept
    gc.collect()
    if _kept and (mallopt := _function("mallopt")) is not None:
        for name, value in DEFAULTS.items():
            mallopt(name, value)
    _kept = False
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


def _function(name: str) -> Any:
    """Return glibc's function of that name, None where the process runs on another C library."""
    process = ctypes.CDLL(None)
    return getattr(process, name, None) if hasattr(process, "gnu_get_libc_version") else None
